"""A compiled module is the model: its names, its calls, its state. And what it refuses."""

from __future__ import annotations

import copy
import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import (
    AlreadyAttachedError,
    LayerCollection,
    LinkError,
    LossError,
    RegistrationError,
    capture,
)
from kfac_fx.compiled.compiled_module import CompiledModule, compile
from tests.runtime.compiled import X, count, mlp, net_of
from tests.whole.training import differences, step


def test_names_parameters_and_state_are_the_models() -> None:
    model = mlp()
    net = net_of(model, X)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(net.get_parameter(name) is parameter for name, parameter in model.named_parameters())
    assert dict(net.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert net.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in net.named_children()] == ["0", "1", "2", "3", "4"]
    other = mlp().state_dict()
    net.load_state_dict(other)
    torch.testing.assert_close(model.state_dict(), other, rtol=0, atol=0)
    assert repr(net) == f"kfac_fx.compile({model!r})"


def test_modes_are_the_models() -> None:
    model = mlp()
    net = net_of(model, X)
    assert net.eval() is net and not any(module.training for module in (net, *model.modules()))
    assert torch.equal(net(X), model(X))
    assert net.train().training and model[1].training
    model.eval()
    stream = torch.random.get_rng_state()
    net(X)
    assert torch.equal(torch.random.get_rng_state(), stream)


def test_attributes_are_read_and_set_on_the_model() -> None:
    class Named(nn.Sequential):
        classes = 3

        def twice(self, x: Tensor) -> Any:
            return 2 * self(x)

    model = Named(nn.Linear(4, 3))
    model.temperature = 1.0
    net = net_of(model, X)
    assert net.classes == 3 and net.temperature == 1.0 and torch.equal(net.twice(X), 2 * model(X))
    net.temperature = 2.0
    assert model.temperature == 2.0 and "temperature" not in net.__dict__
    with pytest.raises(AttributeError, match="no attribute 'temprature'"):
        _ = net.temprature


def test_a_change_of_dtype_keeps_the_parameters_and_captures_again() -> None:
    model = mlp()
    net = net_of(model, X)
    before = list(model.parameters())
    net.to(torch.float64)
    assert all(now is then for now, then in zip(net.parameters(), before, strict=True))
    assert net(X.double()).dtype == torch.float64
    moments = net.record((X.double(),), {})
    assert moments.statistics[("0.weight", "0.bias")]["A"].dtype == torch.float64
    assert count(net) == 2


@pytest.mark.parametrize("inputs", [(), (X,)], ids=["symbolic", "exported"])
def test_training_with_recordings_is_the_model_bit_for_bit(inputs: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    net = net_of(model, *inputs)
    for _ in range(2):
        net.record((X,), {})
        assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []


def test_a_copy_is_compiled_anew_without_the_listener() -> None:
    model = mlp()
    net = net_of(model, X)
    net.attach(Silent())
    twin = copy.deepcopy(net)
    twin.attach(Silent())
    assert isinstance(twin, CompiledModule) and twin.model is not model
    assert all(torch.equal(a, b) and a is not b for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert [str(registration) for registration in twin.registrations] == [
        str(registration) for registration in net.registrations
    ]
    twin.record((X,), {})


def test_a_compiled_module_is_not_pickled_and_says_what_is() -> None:
    net = net_of(mlp(), X)
    with pytest.raises(
        TypeError, match=r"cannot be pickled, .* Save net.state_dict\(\) or net.model, and compile the model again"
    ):
        pickle.dumps(net)
    pickle.dumps(net.model)


def test_a_tensor_or_a_list_will_do_for_inputs() -> None:
    for inputs in (X, [X], (X,)):
        assert len(compile(mlp(), inputs).registrations) == 3  # type: ignore[arg-type]


def test_example_keywords_alone_are_inputs() -> None:
    net = compile(nn.Linear(4, 3), example_kwargs={"input": X}, loss="normal")
    assert count(net) == 1 and net.record((), {"input": X}).cases == 6


class Silent:
    def __init__(self, answer: Any = None) -> None:
        self.calls, self.answer, self.zeroed, self.trainings = 0, answer, 0, 0

    def forgetting_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_call(self) -> None:
        self.trainings += 1

    def on_forward(self, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return self.answer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1

    def on_outputs(self, args: Any, kwargs: Any, outputs: Any) -> None:
        self.last = outputs


def test_a_listener_hears_training_forwards_and_zeroed_gradients_only() -> None:
    net = net_of(mlp(), X)
    listener = Silent()
    net.attach(listener)
    first = net(X)
    with torch.no_grad():
        net(X)
    net.plain(X)
    net.eval()(X)
    net.zero_grad()
    assert listener.calls == listener.zeroed == 1 and listener.last is first and listener.trainings == 2
    net.train()
    net.detach()
    net(X)
    assert listener.calls == 1
    net.attach(Silent(answer := torch.ones(1)))
    assert net(X) is answer


def test_one_listener_at_a_time() -> None:
    net = net_of(mlp(), X)
    net.attach(Silent())
    with pytest.raises(
        AlreadyAttachedError, match=r"a Silent is already attached to this module: .*\n.*net.detach\(\)"
    ):
        net.attach(Silent())


def test_arguments_of_compile_are_checked() -> None:
    net = net_of(mlp(), X)
    with pytest.raises(
        RegistrationError, match="already compiled; pass the original model, net.model, to kfac_fx.compile"
    ):
        compile(net)
    with pytest.raises(RegistrationError, match="variables are for a LayerCollection; of a model, every parameter"):
        compile(mlp(), variables=["0.weight"])
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a function"):
        compile(lambda x: x)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"backend 'inductr' is none of 'eager', .*\. Did you mean 'inductor'\?"):
        compile(mlp(), backend="inductr")
    for names in ("0.weight", ("0.weight", "0.bias")):
        with pytest.raises(LinkError, match=r"linked takes groups of names, .*, not names"):
            compile(mlp(), linked=names)
    with pytest.raises(LossError, match=r"loss 'categoricl' is none of .* Did you mean 'categorical'\?"):
        compile(mlp(), loss="categoricl")


@pytest.mark.parametrize(
    "linked",
    [[("4.weight", "4.bias")], [["4.weight", "4.bias"]], {("4.weight", "4.bias"): "diagonal"}],
)
def test_linked_parameters_in_every_notation(linked: Any) -> None:
    head = [
        registration
        for registration in net_of(mlp(), X, linked=linked).registrations
        if registration.parameters[0] == "4.weight"
    ]
    assert [line.approximation for line in head] == ["diagonal" if isinstance(linked, dict) else "kron"]


def test_strict_refuses_what_would_be_generic_at_once_or_at_the_first_step() -> None:
    class Angles(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.t = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(super().forward(x), self.t.cumsum(0))

    place = f"atan2 (test_compiler.py:{Angles.forward.__code__.co_firstlineno + 1})"
    for inputs in ((), (X,)):
        with pytest.raises(RegistrationError) as failure:
            net_of(Angles(), *inputs, strict=True)
        assert str(failure.value).splitlines()[:2] == [
            "1 of 3 trainable parameters are in no structured Fisher block:",
            f"  t  no layer has the form of {place} through cumsum",
        ]
    assert len(net_of(Angles(), X, strict=True, approximations={"t": "generic"}).registrations) == 2


def test_the_module_of_a_layer_collection_is_not_copied() -> None:
    collection = LayerCollection(capture(nn.Sequential(nn.Linear(4, 3)), (X,)))
    collection.register_categorical_predictive_distribution(collection.captured.outputs_of("0"))
    collection.auto_register_layers()
    with pytest.raises(TypeError, match="a module that was compiled from a LayerCollection cannot be copied"):
        copy.deepcopy(compile(collection))


def test_losses_of_the_outputs() -> None:
    net = net_of(mlp().eval(), X)
    outputs, fisher = net.functional({}, (X,), {})
    ((coefficient, loss),) = net.losses(outputs, fisher, torch.zeros(6, dtype=torch.long))
    assert coefficient == 1
    torch.testing.assert_close(
        loss.evaluate(), F.cross_entropy(outputs, torch.zeros(6, dtype=torch.long), reduction="sum")
    )


def clone(module: nn.Module, tensors: dict[Tensor, Tensor]) -> nn.Module:
    """A copy with clones of the parameters, as libraries of meta-learning make it."""
    copied = module.__new__(type(module))
    copied.__dict__ = module.__dict__.copy()
    copied._parameters, copied._modules = copied._parameters.copy(), copied._modules.copy()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tensors[parameter] = parameter.clone()
            copied._parameters[name] = tensors[parameter]  # type: ignore[assignment]
    for name, child in module._modules.items():
        if child is not None:
            copied._modules[name] = clone(child, tensors)
    return copied


def test_a_clone_computes_with_its_own_tensors_and_gradients_flow_back() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    net = compile(model, (x,), loss="normal")
    net.attach(Silent())
    tensors: dict[Tensor, Tensor] = {}
    cloned = clone(net, tensors)
    inner = torch.autograd.grad(cloned(x).square().sum(), list(tensors.values()), create_graph=True)
    moved = {name: tensors[p] - 0.1 * g for (name, p), g in zip(net.named_parameters(), inner, strict=True)}
    cloned._modules["0"]._parameters["weight"] = moved["0.weight"]  # type: ignore[assignment]
    wanted = torch.func.functional_call(model, {"0.weight": moved["0.weight"]}, (x,))
    torch.testing.assert_close(cloned(x), wanted, rtol=0, atol=0)
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=0)
    cloned(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
