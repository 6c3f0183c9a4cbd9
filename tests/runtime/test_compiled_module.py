"""Models in the wrappers of data parallelism and torch.compile, their modes, and models without any Python."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.errors import RegistrationError
from tests.whole.training import differences, step

X = torch.randn(6, 4)


class Beside(nn.Module):
    """A trained parameter that nothing is computed from, beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.beside = nn.Linear(4, 3).requires_grad_(False), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Drops(nn.Module):
    """Drops numbers by its own mode, as `F.dropout(x, p, self.training)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.dropout(self.layer(self.inner(x)), 0.5, self.training)
        return y


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_module_and_its_model_have_one_mode(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Drops()
    net = kfac_fx.compile(wrap(model), loss="categorical")
    for change, mode in [
        (lambda: net.eval(), False),
        (lambda: net.train(), True),
        (lambda: setattr(net, "training", False), False),
        (lambda: setattr(model, "training", True), True),
        (lambda: model.eval(), False),
    ]:
        change()
        assert net.training is model.training is mode


def test_modes_that_are_restored_one_by_one_record_and_drop_again() -> None:
    """Lightning's validation loop restores the mode of every module in `net.modules()`."""
    net = kfac_fx.compile(Drops(), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    modes = {name: module.training for name, module in net.named_modules()}
    for _ in range(2):
        net.eval()
        assert torch.equal(net(X), net(X))
        for name, module in net.named_modules():
            module.training = modes[name]
        assert not torch.equal(net(X), net(X))
        nn.functional.cross_entropy(net(X), torch.zeros(6, dtype=torch.int64)).backward()
        optimizer.step()
    assert optimizer.counter == 2 and optimizer.fallbacks() == []


class Slope(nn.Module):
    """Forgets create_graph=True, as equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).square().sum(), x)
        return slope


@pytest.mark.filterwarnings("ignore:the derivative at")
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Linear(4, 3).requires_grad_(False),
            r"trained parameters, and there are none: all 2 are frozen, .*\nUnfreeze",
        ),
        (nn.ReLU(), "trained parameters, and there are none: the model has none"),
        (Beside(), r"there is no Fisher block: none of the trained .*: beside\.\nprint\(net\.report\)"),
        (Slope(), r"there is no Fisher block: .*\n.*without create_graph=True it is a constant\.$"),
    ],
    ids=["frozen", "without parameters", "unused", "a derivative without its graph"],
)
def test_a_model_of_which_nothing_is_trained_has_no_fisher(model: nn.Module, text: str) -> None:
    net = kfac_fx.compile(model, (X,), loss="categorical")
    with pytest.raises(RegistrationError, match=text):
        kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    with pytest.raises(RegistrationError, match=text):
        kfac_fx.FisherEstimator(net).update_covariances(X)


class Wave(nn.Module):
    """An equation whose first or second derivative lacks create_graph=True."""

    def __init__(self, *lacking: int, retain: bool = True) -> None:
        super().__init__()
        self.u, self.lacking, self.retain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), lacking, retain

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        u = self.u(x).sum()
        kept = {"retain_graph": True} if self.retain else {}
        (first,) = torch.autograd.grad(u, x, **(kept if 1 in self.lacking else {"create_graph": True}))
        if self.lacking == (1,) and not self.retain:
            return first + u
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, **(kept if 2 in self.lacking else {"create_graph": True}))
        return first[:, 1:] - second[:, :1]


@pytest.mark.parametrize("model", [Wave(1), Wave(1, 2), Wave(1, retain=False)], ids=["first", "both", "freed"])
@pytest.mark.parametrize("example", [True, False], ids=["captured", "symbolic"])
def test_a_failing_derivative_without_its_graph_is_named_by_its_line(model: nn.Module, example: bool) -> None:
    """The errors of torch do not have the word create_graph."""
    x, text = torch.rand(5, 2), r"test_compiled_module\.py:\d+ ha(s|ve) no create_graph=True, so the result is"
    with pytest.raises(kfac_fx.InputError, match=text):
        net = kfac_fx.compile(model, (x,) if example else None, loss="normal")
        kfac_fx.KFAC(net)
        net(x)


class Residual(Wave):
    """An equation whose only other term has the graph that the second derivative frees."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        u = self.u(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x)
        return second + u


@pytest.mark.parametrize("example", [True, False], ids=["captured", "symbolic"])
def test_a_second_derivative_that_frees_the_graph_of_the_loss_is_named_by_its_line(example: bool) -> None:
    """torch advises retain_graph=True, which gives wrong gradients here."""
    with pytest.raises(kfac_fx.InputError) as caught:
        kfac_fx.compile(Residual(), (torch.rand(5, 2),) if example else None, loss="normal")(torch.rand(5, 2))
    first, second = str(caught.value).splitlines()
    assert first == "Residual runs on these inputs, and its outputs have no gradient."
    assert re.fullmatch(
        r"The derivative at test_compiled_module\.py:\d+ has no create_graph=True, so the result is a constant, and the"
        r" graph is freed: write torch\.autograd\.grad\(\.\.\., create_graph=True\) in every derivative that forward "
        r"takes\.",
        second,
    )


class Forces(nn.Module):
    """An energy, and what becomes of its derivative without create_graph=True."""

    def __init__(self, of_derivative: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.u, self.coefficient = (
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
            nn.Parameter(torch.ones(2)),
        )
        self.of_derivative = of_derivative

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.u(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.of_derivative(self, x, slope) + energy


CONSTANT = (
    r"the derivative at test_compiled_module\.py:\d+ has no create_graph=True, so the loss takes the result for a"
)


@pytest.mark.parametrize(
    "of_derivative", [lambda net, x, slope: -slope, lambda net, x, slope: net.coefficient * slope.square()]
)
def test_a_derivative_that_enters_the_loss_as_a_constant_is_told_once_when_the_model_is_compiled(
    of_derivative: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> None:
    """Only a line of the report said so, and the network trained on other gradients than its author meant."""
    with pytest.warns(UserWarning, match=CONSTANT) as caught:
        net = kfac_fx.compile(Forces(of_derivative), (torch.rand(5, 2),), loss="normal")
        net.recorder((torch.rand(7, 2),), {})
    assert sum("create_graph" in str(warning.message) for warning in caught) == 1
    net = kfac_fx.compile(Forces(of_derivative), loss="normal")
    with pytest.warns(UserWarning, match=CONSTANT):
        net.recorder((torch.rand(5, 2),), {})


@pytest.mark.parametrize(
    "of_derivative",
    [
        lambda net, x, slope: slope.detach(),
        lambda net, x, slope: net.u(x - slope),
        lambda net, x, slope: (slope > 0).to(x.dtype),
    ],
    ids=["detached", "a step of a sampler", "a choice"],
)
def test_a_derivative_that_is_meant_as_a_constant_is_not_told(
    of_derivative: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac_fx.compile(Forces(of_derivative), (torch.rand(5, 2),), loss="normal")


def test_a_derivative_is_a_constant_in_an_evaluation_and_where_no_loss_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac_fx.compile(Forces(lambda net, x, slope: -slope).eval(), (torch.rand(5, 2),), loss="normal")
        kfac_fx.compile(Forces(lambda net, x, slope: -slope), (torch.rand(5, 2),))


def test_a_second_derivative_without_its_graph_is_named_in_the_report() -> None:
    """The report had the name of an operation that the capture writes."""
    x, text = (
        torch.rand(5, 2),
        r"the derivative at test_compiled_module\.py:\d+ has no create_graph=True, so no gradient",
    )
    with pytest.warns(UserWarning, match=CONSTANT):
        net = kfac_fx.compile(Wave(2), (x,), loss="normal")
    optimizer = kfac_fx.KFAC(net)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    assert re.search(text, " ".join(optimizer.fallbacks()))


def test_a_collection_of_a_frozen_model_has_no_fisher() -> None:
    lc = kfac_fx.LayerCollection(kfac_fx.capture(nn.Linear(4, 3).requires_grad_(False), (X,)))
    with pytest.raises(RegistrationError, match="all 2 are frozen"):
        kfac_fx.FisherEstimator(lc)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3))


def optimized(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, optimized, lambda model: nn.DataParallel(optimized(model))])
def test_a_wrapper_is_looked_through_and_trained_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    wrapper = wrap(model)
    calls: list[Any] = []
    wrapper.register_forward_pre_hook(lambda module, args: calls.append(args))
    net = kfac_fx.compile(wrapper, (X,), loss="categorical")
    assert net.model is model
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [registration.parameters for registration in net.registrations] == [
        ("0.weight", "0.bias"),
        ("3.weight", "3.bias"),
    ]
    net.record((X,), {})
    assert calls == []
    assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []
    assert len(calls) == 1
    assert not net.eval().training and not wrapper.training and not model.training


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at all tensors
@pytest.mark.parametrize("inside", [False, True])
def test_torch_compile_around_a_compiled_module_leaves_it_as_it_is(inside: bool) -> None:
    """Recording and an optimizer's listening are Python, which torch.compile would trace into."""

    class Training(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            return self.net(x).square().mean()

    torch.compiler.reset()
    trained = []
    for optimize in (False, True):
        torch.manual_seed(0)
        net = kfac_fx.compile(mlp(), (X,), loss="mse")
        around = Training(torch.compile(net, backend="eager") if optimize and inside else net)
        run = torch.compile(around, backend="eager") if optimize and not inside else around
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            run(X).backward()
            optimizer.step()
        trained.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*trained)


def test_a_copy_keeps_the_wrapper() -> None:
    net = copy.deepcopy(kfac_fx.compile(nn.DataParallel(mlp()), (X,), loss="categorical"))
    assert isinstance(net._wrapper, nn.DataParallel) and net._wrapper.module is net.model


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = torch.jit.script(mlp())

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_by_name() -> None:
    for model, names in ((torch.jit.script(mlp()), "the model itself"), (Partly(), "last")):
        with pytest.raises(kfac_fx.UntraceableError) as failure:
            kfac_fx.compile(model, (X,))
        first, advice = str(failure.value).splitlines()
        assert first == f"TorchScript modules have no Python code and cannot be captured: {names}."
        assert advice.startswith(
            "Pass kfac_fx.compile the module that torch.jit.script or torch.jit.trace was called on"
        )


def refusal(model: nn.Module) -> list[str]:
    for compiling in (kfac_fx.compile, kfac_fx.capture):
        with pytest.raises(kfac_fx.UntraceableError) as failure:
            compiling(model, (X,))
    return str(failure.value).splitlines()


def test_parameters_without_a_shape_are_refused_until_the_model_ran() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    first, advice = refusal(model)
    assert first.startswith("these parameters have no shape yet: 0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean")
    assert advice == "Run the model once on a batch, as in model(*example_inputs), before you compile it."
    model(X)
    assert len(kfac_fx.compile(model, (X,), loss="normal").registrations) == 2


def test_frozen_complex_parameters_are_constants() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat), requires_grad=False)  # the first parameter
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return (self.fc(x).to(self.waves.dtype) @ self.waves).real

    net = kfac_fx.compile(Spectrum(), (X,), loss="normal")
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        loss = net(X).square().sum(1).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2] and opt.damping.dtype is torch.float32


class Pair(nn.Module):
    def __init__(self, share: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        share(self.a, self.b)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())


def by_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data)


def by_transposed_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data.t()


@pytest.mark.parametrize("share", [by_data, by_transposed_data])
def test_parameters_in_one_memory_are_refused_unless_they_are_one(
    share: Callable[[nn.Linear, nn.Linear], None],
) -> None:
    text = r"not the same parameter:\n  b.weight  has elements of a.weight\nTie them .* model.b.weight = model.a.weight"
    with pytest.raises(kfac_fx.UntraceableError, match=text):
        kfac_fx.compile(Pair(share), (X,), loss="normal")


def tied(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = a.weight


def side_by_side(a: nn.Linear, b: nn.Linear) -> None:
    flat = torch.randn(32)
    a.weight.data, b.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)


def in_columns(a: nn.Linear, b: nn.Linear) -> None:
    both = torch.randn(4, 8)
    a.weight.data, b.weight.data = both[:, :4], both[:, 4:]


def frozen(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data, requires_grad=False)


@pytest.mark.parametrize("share", [tied, side_by_side, in_columns, frozen])
def test_parameters_may_lie_side_by_side_and_one_of_two_may_be_a_constant(
    share: Callable[[nn.Linear, nn.Linear], None],
) -> None:
    net = kfac_fx.compile(Pair(share), (X,), loss="normal")
    assert net.record((X,), {}).cases == 6


def test_parameters_without_values_are_refused_where_something_is_to_be_proved() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 3), torch.ones(2, 4)
    text = r"have no values, so nothing can be verified, recorded or trained: weight, bias\.\nGive them values first"
    with pytest.raises(kfac_fx.UntraceableError, match=text):
        kfac_fx.compile(model, (x,), loss="normal")
    for net in (kfac_fx.compile(model, loss="normal"), kfac_fx.compile(model, (x,), loss="normal", verify=False)):
        assert "registered 15 of 15" in str(net.report)


@pytest.fixture
def one_process() -> Any:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_data_parallel_over_processes_is_looked_through(inside: bool) -> None:
    ddp = nn.parallel.DistributedDataParallel
    model = nn.Sequential(ddp(nn.Linear(4, 5)), nn.Linear(5, 3)) if inside else ddp(mlp())
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert [registration.layer for registration in net.registrations] == ["linear", "linear"]
    assert net.record((X,), {}).cases == 6


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [nn.DataParallel, optimized, nn.parallel.DistributedDataParallel])
def test_a_wrapper_is_captured_by_hand_as_it_is_compiled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    wrapper = wrap(model)
    collection = kfac_fx.LayerCollection(kfac_fx.capture(wrapper, (X,)))
    collection.register_categorical_predictive_distribution("linear_1")
    collection.auto_register_layers()
    assert list(collection.fisher_blocks) == [("0.weight", "0.bias"), ("3.weight", "3.bias")]
    net, calls = kfac_fx.compile(collection), list[Any]()
    wrapper.register_forward_pre_hook(lambda module, args: calls.append(args))
    net(X)
    assert net.model is model and len(calls) == 1


def test_capture_and_compile_refuse_the_same_in_the_same_words() -> None:
    texts = []
    for take in (kfac_fx.compile, kfac_fx.capture):
        with pytest.raises(kfac_fx.LayerError) as error:
            take(mlp(), (X,), layers="ab")
        texts.append(str(error.value))
    assert texts == ["layers takes a list of layers that @kfac_fx.layer(...) declares, and got a str"] * 2


def test_a_module_that_was_compiled_is_refused_inside_of_another() -> None:
    net = kfac_fx.compile(mlp(), (X,), loss="normal")
    with pytest.raises(
        kfac_fx.RegistrationError, match=r"are already compiled and would be captured twice: 0; use their .model"
    ):
        kfac_fx.compile(nn.Sequential(net, nn.Linear(3, 3)), (X,), loss="normal")


def test_a_container_has_its_length_and_members() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net = kfac_fx.compile(model, loss="categorical")
    assert len(net) == 3 and net[0] is model[0] and net[-1] is model[2] and list(net) == list(model)
    assert bool(kfac_fx.compile(Drops(), loss="categorical"))
    with pytest.raises(TypeError, match=r"object of type 'Drops' has no len\(\)"):
        len(kfac_fx.compile(Drops(), loss="categorical"))


def test_a_recording_of_some_parameters_is_of_all_blocks_that_have_them() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), loss="categorical")
    for only in ({"1.bias"}, ["1.weight"], ("1.weight", "1.bias")):
        assert list(net.record((X,), {}, only=only).statistics) == [("1.weight", "1.bias")]
