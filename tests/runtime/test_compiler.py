"""A compiled module is the model: its names, its calls, its state. And what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
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
    ModelChangedError,
    RegistrationError,
    UntraceableError,
    capture,
)
from kfac_fx.agreement import other_path
from kfac_fx.captures import KINDS
from kfac_fx.compiled_module import CompiledModule
from kfac_fx.compiler import compile
from tests.whole.training import differences, step

X = torch.randn(6, 4)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(5, 3))


def net_of(model: nn.Module, *inputs: Any, **options: Any) -> CompiledModule:
    return compile(model, inputs or None, loss="categorical", **options)


def count(net: CompiledModule) -> int:
    return sum(len(known) for known in net.captures.known.values())


# --- the model's own behavior ---------------------------------------------------------------------------------------


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
    assert [str(one) for one in twin.registrations] == [str(one) for one in net.registrations]
    twin.record((X,), {})


def test_a_compiled_module_is_not_pickled_and_says_what_is() -> None:
    net = net_of(mlp(), X)
    with pytest.raises(
        TypeError, match=r"not pickled: .* Save net.state_dict\(\), or net.model, and compile what you load"
    ):
        pickle.dumps(net)
    pickle.dumps(net.model)


def test_a_tensor_or_a_list_will_do_for_inputs() -> None:
    for inputs in (X, [X], (X,)):
        assert len(compile(mlp(), inputs).registrations) == 3  # type: ignore[arg-type]


def test_example_keywords_alone_are_inputs() -> None:
    net = compile(nn.Linear(4, 3), example_kwargs={"input": X}, loss="normal")
    assert count(net) == 1 and net.record((), {"input": X}).cases == 6


# --- when a capture is made -----------------------------------------------------------------------------------------


def test_another_batch_size_needs_no_capture() -> None:
    net = net_of(mlp(), X)
    for cases in (6, 3, 100):
        assert net.record((torch.randn(cases, 4),), {}).cases == cases
    assert count(net) == 1


class Switching(nn.Module):
    """Another graph for long sequences, with the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.inner(x if x.shape[1] < 5 else x.flip(1))
        return scale * (y if mask is None else y * mask).mean(1)


def test_a_guard_that_fails_captures_again() -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    for size, captures in ((3, 1), (7, 2), (9, 2), (2, 2)):
        net.record((torch.randn(6, size, 4),), {})
        assert count(net) == captures


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


def test_a_parameter_that_is_expanded_to_the_batch_is_registered() -> None:
    net = net_of(Token(), torch.randn(3, 2, 4))
    assert {name for one in net.registrations for name in one.parameters} == {"token", "head.weight", "head.bias"}


def test_images_of_another_size_are_captured_once_more_and_then_at_every_size() -> None:
    net = compile(nn.Conv2d(3, 2, 3), (torch.randn(2, 3, 5, 5),), loss="normal")
    for (batch, height, width), captures in (((4, 5, 5), 1), ((4, 6, 7), 2), ((3, 8, 4), 2), ((2, 5, 5), 2)):
        net.record((torch.randn(batch, 3, height, width),), {})
        assert count(net) == captures


@pytest.mark.parametrize(
    ("change", "keywords"),
    [
        (lambda net: net.eval(), {}),
        (lambda net: None, {"scale": 2.0}),
        (lambda net: None, {"mask": torch.ones(3)}),
    ],
)
def test_another_kind_of_call_captures_again(change: Callable[[Any], Any], keywords: dict[str, Any]) -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    change(net)
    args = (torch.randn(6, 4, 4),)
    net.record(args, keywords)
    net.record(args, keywords)
    assert count(net) == 2
    outputs, _ = net.functional({}, args, keywords)
    torch.testing.assert_close(outputs, net.model(*args, **keywords))


def test_autocast_captures_again() -> None:
    net = net_of(mlp(), X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moments = net.record((X,), {})
    assert count(net) == 2
    assert moments.statistics[("0.weight", "0.bias")]["A"].dtype == torch.float32


def test_the_oldest_kind_of_call_is_forgotten() -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    for n in range(KINDS + 1):
        net.record((torch.randn(6, 4, 4),), {"scale": 1.5 + n})
    assert len(net.captures.known) == KINDS


def test_what_was_traced_symbolically_serves_where_it_holds() -> None:
    net = net_of(Optional())
    assert count(net) == 0 and len(net.registrations) == 1
    net.record((X,), {})
    assert net.captures.first is not None and net.program.cases is None
    net.record((X, torch.ones(3)), {})
    assert [one.program.cases is None for known in net.captures.known.values() for one in known] == [True, False]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.inner(x)
        return y if mask is None else y * mask


def test_what_symbolic_tracing_gets_wrong_is_captured_with_inputs() -> None:
    net = net_of(Optional())
    net.record((X, torch.ones(3)), {})
    assert net.program.cases is not None and count(net) == 1


# --- without inputs, and not seen by torch.fx -----------------------------------------------------------------------


class Steps(nn.Module):
    """A loop over the positions, which torch.fx cannot unroll."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row) for row in x.unbind(1)]).mean(0)


def test_the_first_training_forward_captures_what_torch_fx_cannot_see() -> None:
    net = net_of(Steps())
    with pytest.raises(UntraceableError) as failure:
        _ = net.registrations
    lines = str(failure.value).splitlines()
    assert lines[0] == (
        "Steps is captured at its first training forward, for torch.fx alone cannot see it whole. Give kfac_fx.compile "
        "example inputs to capture it now. What torch.fx says:"
    )
    assert lines[1].startswith("Steps could not be captured as a graph; torch gave up in Steps (test_compiler.py:")
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        net(x)
    assert count(net) == 0
    assert torch.equal(net(x), net.model(x))
    assert [len(one.uses) for one in net.registrations] == [2]


class Bare(nn.Module):
    """No submodule to capture, and a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if x.sum() > 0 else x @ self.weight.exp()


def test_what_cannot_be_captured_at_all_is_an_error_at_compile_or_at_the_first_step() -> None:
    model, x = nn.Sequential(nn.Tanh(), Bare()), -torch.ones(6, 2)
    with pytest.raises(UntraceableError, match=r"torch gave up in 1 \(test_compiler.py:\d+\)"):
        net_of(model, x)
    net = net_of(model)
    for _ in range(2):
        with pytest.raises(UntraceableError, match=r"torch gave up in 1 \(test_compiler.py:\d+\)"):
            net(x)
    assert torch.equal(net.eval()(x), model(x))


def test_a_model_that_does_not_run_is_told_so() -> None:
    with pytest.raises(UntraceableError) as failure:
        net_of(nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 5))
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("Sequential does not run on these inputs: RuntimeError: mat1 and mat2 shapes")
    assert lines[1] == "Correct the inputs or the model. What torch.export says:"


# --- what must stay as it was compiled ------------------------------------------------------------------------------


def replaced_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(5, 4))


def replaced_module(model: Any) -> None:
    model[4] = nn.Linear(5, 3)


def added(model: Any) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(5)))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced_parameter, "1 parameter or module was .*: 0.weight"),
        (replaced_module, "2 parameters or modules were .*: 4.weight, 4.bias"),
        (added, "1 parameter or module was .*: 0.scale"),
        (lambda model: model.__setitem__(3, nn.Tanh()), "1 parameter or module was .*: 3"),
    ],
)
def test_a_changed_model_is_noticed_by_name(change: Callable[[nn.Module], None], names: str) -> None:
    net = net_of(mlp(), X)
    net(X)
    change(net.model)
    for call in (lambda: net(X), lambda: net.record((X,), {}), lambda: net.ride((X,), {})):
        with pytest.raises(ModelChangedError, match=rf"{names}\.\n.*Compile again, or change values in place"):
            call()
    net.eval()(X)


def test_values_may_change_in_place() -> None:
    net = net_of(mlp(), X)
    net.model[0].weight.data.copy_(torch.zeros(5, 4))
    net.load_state_dict(mlp().state_dict())
    net(X)
    net.record((X,), {})


def test_freezing_after_compile_is_noticed() -> None:
    net = net_of(mlp(), X)
    net.model[4].requires_grad_(False)
    with pytest.raises(ModelChangedError, match=r"requires_grad was changed .*: 4.weight, 4.bias\.\nCompile again"):
        net.record((X,), {})


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, second: bool = False, exp: bool = False) -> Tensor:
        y = F.linear(x, self.first.weight.exp(), self.first.bias) if exp else self.first(x)
        return y + self.second(x) if second else y


def test_inputs_on_another_path_are_refused_with_the_difference() -> None:
    net = net_of(Heads(), X)
    with pytest.raises(ModelChangedError) as failure:
        net.record((X,), {"second": True, "exp": True})
    first, *rows, last = str(failure.value).splitlines()
    assert first == "these inputs take another path through Heads than the first:"
    assert [row.rpartition("  ")[0].strip() for row in rows] == [
        "first.weight, first.bias", "first.bias", "second.weight, second.bias", "first.weight"
    ]  # fmt: skip
    assert rows[0].endswith("  linear with 1 use at first, no block of its own here")
    assert rows[2].endswith("  no block of its own at first, linear with 1 use here")
    assert "no block of its own at first, generic (no layer has the form of linear (test_compiler.py:" in rows[3]
    assert last == "Compile one module for each path."


def test_the_number_of_uses_may_change() -> None:
    """One step of a recurrence, then three: the block is that of the first."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[:, 0])
            for row in x.unbind(1):
                h = torch.tanh(self.inner(h + row))
            return self.head(h)

    net = net_of(Recurrent(), torch.randn(6, 1, 4))
    assert [one.approximation for one in net.registrations] == ["kron", "kron"]
    moments = net.record((torch.randn(6, 3, 4),), {})
    assert moments.statistics[("inner.weight", "inner.bias")]["count"] == 18
    assert {one.approximation for one in net.recorder((torch.randn(6, 3, 4),), {}).program.registrations} == {"kron"}


def test_cases_that_are_merged_later_are_no_diagonal_of_cases() -> None:
    (one,) = net_of(nn.Sequential(nn.Linear(4, 3)), X, approximations={"0": "diagonal"}).registrations
    assert other_path(one, one) == ""
    assert other_path(one, replace(one, approximation="kron", reason="merged")) == (
        "linear with 1 use and diagonal at first, linear with 1 use (merged) here"
    )


# --- the listener ---------------------------------------------------------------------------------------------------


class Silent:
    def __init__(self, answer: Any = None) -> None:
        self.calls, self.answer = 0, answer

    def on_forward(self, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return self.answer

    def on_outputs(self, args: Any, kwargs: Any, outputs: Any) -> None:
        self.last = outputs


def test_a_listener_hears_training_forwards_only() -> None:
    net = net_of(mlp(), X)
    listener = Silent()
    net.attach(listener)
    first = net(X)
    with torch.no_grad():
        net(X)
    net.plain(X)
    net.eval()(X)
    assert listener.calls == 1 and listener.last is first
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
        AlreadyAttachedError, match=r"a Silent is attached to this module already: .*\n.*net.detach\(\)"
    ):
        net.attach(Silent())


# --- arguments that make no sense -----------------------------------------------------------------------------------


def test_arguments_of_compile_are_checked() -> None:
    net = net_of(mlp(), X)
    with pytest.raises(RegistrationError, match="compiled already; hand kfac_fx.compile the original model, net.model"):
        compile(net)
    with pytest.raises(RegistrationError, match="variables belong to a LayerCollection; of a model every parameter"):
        compile(mlp(), variables=["0.weight"])
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a function"):
        compile(lambda x: x)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"backend='inductr' is none of eager, .*\. Did you mean 'inductor'\?"):
        compile(mlp(), backend="inductr")
    for names in ("0.weight", ("0.weight", "0.bias")):
        with pytest.raises(LinkError, match=r"linked takes groups of names, .*; names were given"):
            compile(mlp(), linked=names)
    with pytest.raises(LossError, match=r"loss 'categoricl' is none of .* Did you mean 'categorical'\?"):
        compile(mlp(), loss="categoricl")


@pytest.mark.parametrize(
    "linked",
    [[("4.weight", "4.bias")], [["4.weight", "4.bias"]], {("4.weight", "4.bias"): "diagonal"}],
)
def test_linked_parameters_in_every_notation(linked: Any) -> None:
    head = [one for one in net_of(mlp(), X, linked=linked).registrations if one.parameters[0] == "4.weight"]
    assert [one.approximation for one in head] == ["diagonal" if isinstance(linked, dict) else "kron"]


def test_strict_refuses_what_would_be_generic_at_once_or_at_the_first_step() -> None:
    class Tempered(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.t = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.t.cumsum(0)

    place = f"mul (test_compiler.py:{Tempered.forward.__code__.co_firstlineno + 1})"
    for inputs in ((), (X,)):
        with pytest.raises(RegistrationError) as failure:
            net_of(Tempered(), *inputs, strict=True)
        assert str(failure.value).splitlines()[:2] == [
            "1 of 3 trainable parameters are in no structured Fisher block:",
            f"  t  no layer has the form of {place} through cumsum",
        ]
    assert len(net_of(Tempered(), X, strict=True, approximations={"t": "generic"}).registrations) == 2


def test_the_module_of_a_layer_collection_is_not_copied() -> None:
    collection = LayerCollection(capture(nn.Sequential(nn.Linear(4, 3)), (X,)))
    collection.register_categorical_predictive_distribution(collection.captured.outputs_of("0"))
    collection.auto_register_layers()
    with pytest.raises(TypeError, match="a module of a LayerCollection is not copied"):
        copy.deepcopy(compile(collection))


def test_losses_of_the_outputs() -> None:
    net = net_of(mlp().eval(), X)
    outputs, fisher = net.functional({}, (X,), {})
    ((coefficient, loss),) = net.losses(outputs, fisher, torch.zeros(6, dtype=torch.long))
    assert coefficient == 1
    torch.testing.assert_close(
        loss.evaluate(), F.cross_entropy(outputs, torch.zeros(6, dtype=torch.long), reduction="sum")
    )
