"""Recordings through a backend of torch.compile are those of the eager model."""

from __future__ import annotations

import copy
import cProfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.compiled_module import compile as compiled
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.recording.emitted import CompiledForward, CompiledOrPlain, compiled_function
from tests.runtime.recorded_by_hand import generator


class Mixed(nn.Module):
    """Convolution, norm, embedding, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3)) + self.table(ids).sum(1)
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Few(nn.Module):
    """A norm, whose block is diagonal, and a weight used twice: it compiles in half of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.norm(torch.tanh(self.inner(x))))))  # type: ignore[no-any-return]


def mixed(backend: str) -> CompiledModule:
    torch.manual_seed(0)
    return compiled(Mixed(), (torch.randn(6, 1, 6, 6), torch.randint(7, (6, 3))), loss="categorical", backend=backend)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    """For two batch sizes, with one capture and one compilation."""
    eager, other = mixed("eager"), mixed(backend)
    for cases in (6, 4):
        args = (torch.randn(cases, 1, 6, 6), torch.randint(7, (cases, 3)))
        sampled = [net.record(args, {}, generator=generator()) for net in (eager, other)]
        torch.testing.assert_close(sampled[0].statistics, sampled[1].statistics, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_with_sizes_among_their_attributes_compile() -> None:
    """A tap hands the normalized shape of a layer norm to its backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), torch.randn(6, 5)
    eager, other = (
        compiled(model, (x,), loss="categorical", backend=backend).record((x,), {}, generator=generator())
        for backend in ("eager", "aot_eager")
    )
    torch.testing.assert_close(eager.statistics, other.statistics, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_ride_equals_an_eager_one(backend: str) -> None:
    eager, other = mixed("eager"), mixed(backend)
    args = (torch.randn(6, 1, 6, 6), torch.randint(7, (6, 3)))
    recorded = []
    for net in (eager, other):
        outputs, pending = net.record_in_training(args, {})
        F.cross_entropy(outputs, torch.arange(6) % 3).backward()
        recorded.append(pending.moments())
    torch.testing.assert_close(recorded[0].statistics, recorded[1].statistics, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(eager.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "model"),
    [
        ("aot_eager", Few),
        pytest.param("aot_eager", Mixed, marks=pytest.mark.slow),
        pytest.param("inductor", Mixed, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_of_the_default_equals_an_eager_one(backend: str, model: type[nn.Module]) -> None:
    """With checks, new bases and a block that is diagonal. Later steps compile nothing."""
    ends = []
    for name in ("eager", backend):
        torch.manual_seed(0)
        args: tuple[Tensor, ...] = torch.randn(6, 1, 6, 6).double(), torch.randint(7, (6, 3))
        args = args if model is Mixed else (torch.randn(6, 4).double(),)
        labels = torch.arange(6) % 3
        net = compiled(model().double(), args, loss="categorical", backend=name)
        optimizer = KFAC(net, estimation_mode="empirical", seed=0, exact_steps=False)
        for step in range(12):
            torch.compiler.set_stance("default" if step < 8 else "fail_on_recompile")
            optimizer.zero_grad()
            F.cross_entropy(net(*args), labels).backward()
            optimizer.step()
        torch.compiler.set_stance("default")
        assert int(optimizer.skipped) == 0
        ends.append([parameter.detach().clone() for parameter in net.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-8)


class Forces(nn.Module):
    """Minus the derivative of an energy by the positions; plain values in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.last(torch.exp(-(self.first(x) ** 2)))
        return -torch.autograd.grad(energy.sum(), x, create_graph=self.training)[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("in_place", "looked"), [(False, True), (True, False)])
def test_a_forward_that_takes_derivatives_is_not_compiled_and_the_report_says_so(in_place: bool, looked: bool) -> None:
    """Also behind a forward in evaluation, whose derivatives need no graph."""
    ends, x = [], torch.randn(6, 5)
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model = Forces()
        net = compiled(model, (x,), loss="mse", backend=backend, in_place=in_place)
        called = model if in_place else net
        optimizer = KFAC(net, seed=0)
        if looked:
            net.eval()
            called(x)
            net.train()
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(called(x), -x).backward()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in net.parameters()])
        told = "the forward in training is not compiled: it takes derivatives" in " ".join(str(net.report).split())
        assert told is (backend != "eager")
    torch.testing.assert_close(*ends)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_forward_runs_under_a_profiler() -> None:
    """A profiler in C is no function, which Python could call or set again."""
    net, x = compiled(nn.Linear(5, 5), (torch.randn(6, 5),), loss="mse", backend="aot_eager"), torch.randn(6, 5)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        net(x).sum().backward()
    finally:
        profiler.disable()


def test_any_number_of_nets_is_compiled_in_one_process() -> None:
    """torch.compile counts graphs by code objects, and gives up at the ninth; ours have code of their own.

    Texts, because it compiles one graph for all numbers."""

    class Scaled:
        def __init__(self, text: str) -> None:
            self.text = text

        def method(self, x: Tensor, *, more: float = 1.0) -> Tensor:
            return len(self.text) * x + more

    def function_of(text: str) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor, more: float = 1.0) -> Tensor:
            return len(text) * x + more

        return function

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        return graph.forward

    x = torch.ones(2)
    for factor in range(2, 12):
        text = factor * "a"
        for callable_ in (function_of(text), Scaled(text).method, torch.no_grad()(function_of(text))):
            compiled = compiled_function(callable_, backend)  # type: ignore[arg-type]
            assert torch.equal(compiled(x), factor * x + 1)
            assert isinstance(compiled, CompiledOrPlain) and compiled.reason is None


def test_the_forward_of_the_ninth_net_of_a_class_is_compiled_as_well() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    for number in range(10):
        forward = CompiledForward(model := nn.Linear(2, 2), backend, model)  # type: ignore[arg-type]
        for _ in range(2):
            forward(torch.ones(1, 2)).sum().backward()
        assert len(graphs) == number + 1


def test_a_function_of_too_many_variants_goes_on_in_eager_mode_and_says_so() -> None:
    def shifted(x: Tensor, *, mode: str) -> Tensor:
        return x + len(mode)

    compiled = compiled_function(shifted, "aot_eager")
    assert isinstance(compiled, CompiledOrPlain)
    for number in range(12):
        assert torch.equal(compiled(torch.ones(2), mode="a" * number), torch.ones(2) + number)
    assert compiled.reason == (
        "aot_eager has compiled shifted for as many variants as torch takes (torch._dynamo.config.recompile_limit): it "
        "runs in eager mode"
    )


@torch._dynamo.config.patch(recompile_limit=2)  # torch's own is 8, which takes seconds to reach
def test_a_step_of_too_many_variants_goes_on_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).double() for _ in range(3)]
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    ends = []
    for backend in ("eager", "aot_eager"):
        model = copy.deepcopy(nn.Sequential(*layers))
        net = compiled(model, (x,), loss="categorical", backend=backend)
        optimizer = KFAC(net, seed=0, estimation_mode="exact")
        for number in (0, 1, 2, 0):
            for place, layer in enumerate(model):
                layer.requires_grad_(place == 2 or bool(number >> place & 1))  # another set in every step
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*ends)
    assert "variants as torch takes" in str(net.report)


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_statistics_of_a_compiled_net_under_autocast_are_those_of_an_eager_one(mode: str) -> None:
    x, y = torch.randn(8, 2, 5, 5, generator=generator()), torch.arange(8) % 3
    states = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3)
        net = compiled(nn.Sequential(*layers), (x,), loss="categorical", backend=backend)
        optimizer = KFAC(net, seed=0, estimation_mode=mode)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        states.append({name: entry for name, entry in optimizer.estimator.state_dict().items() if "/moment" in name})
    assert states[0] and all(torch.equal(entry, states[1][name]) for name, entry in states[0].items())
    assert "recordings are not compiled: aot_eager would round statistics under autocast" in " ".join(
        str(net.report).split()
    )


class CompiledInPython(nn.Module):
    """A function of the user under torch.compile reads parameters, and Python reads a number, which divides the
    model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(5)) for _ in range(2))
        self.gated = torch.compile(lambda x, gain: torch.tanh(x) * gain, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = self.gated(layer(x), gain) if x.sum().item() < 1e9 else x
        return x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_of_a_divided_model_leaves_its_gradients(backend: str) -> None:
    model, x = CompiledInPython(), torch.randn(6, 5)
    F.mse_loss(model(x), -x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    net = compiled(model, (x,), loss="mse", backend=backend)
    assert [registration.approximation for registration in net.registrations].count("full") == 2
    optimizer = KFAC(net, seed=0, lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(net(x), -x).backward()
        torch.testing.assert_close([parameter.grad for parameter in net.parameters()], expected)
        optimizer.step()
