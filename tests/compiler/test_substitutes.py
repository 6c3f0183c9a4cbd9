"""Substitutes while a model is traced: certain looks.branches, checkpoints, autograd.Functions and `.data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.tracing.substitutes import checkpoints_off, custom_functions, recurrent_cell
from tests.compiler import looks

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Dropped(nn.Module):
    """A layer that is left out where `branch` of its rate says so, and dropout behind it."""

    def __init__(self, branch: Callable[[float], Tensor | bool], rate: float) -> None:
        super().__init__()
        self.layer, self.branch, self.rate, self.dropout = nn.Linear(3, 3), branch, rate, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.branch(self.rate):
            x = self.layer(x)
        y: Tensor = self.dropout(x)
        return y


CERTAIN: dict[str, tuple[Callable[[float], Tensor | bool], float, bool]] = {
    "> 0": (lambda rate: torch.rand(1) > rate, 0.0, True),
    ">= 0": (lambda rate: torch.rand([]) >= rate, 0, True),
    "< 0": (lambda rate: torch.rand(1) < rate, 0.0, False),
    "<= 0": (lambda rate: torch.rand(1).le(rate), 0.0, False),
    "> 1": (lambda rate: torch.gt(torch.rand(1), rate), 1.0, False),
    "< 1": (lambda rate: (rate > torch.rand_like(X[0, 0])).item(), 1.0, True),
    "not": (lambda rate: not torch.rand(1) < rate, 0.0, True),
    ">= 0 of half": (lambda rate: torch.rand(1, dtype=torch.float16) >= rate, 0.0, True),
}


@pytest.mark.parametrize("kind", CERTAIN)
def test_a_certain_branch_is_taken_and_the_stream_goes_on_as_the_models(kind: str) -> None:
    branch, rate, taken = CERTAIN[kind]
    model = Dropped(branch, rate)
    captured = trace_model(model, (X,))
    graph = captured.program.graph
    assert (sum(op_name(node) == "linear" for node in graph.nodes) == 1) is taken
    torch.manual_seed(1)
    wanted = model(X)
    torch.manual_seed(1)
    (found,) = torch.fx.GraphModule(captured.program.root, graph)(*captured.flatten((X,), {}))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "branch",
    [
        lambda rate: torch.rand(1) > rate,
        lambda rate: torch.rand(1, dtype=torch.bfloat16) > 0.0,  # one in 256 draws is 0
        lambda rate: torch.randn(1) > 0.0,
        lambda rate: torch.rand(1) * 2 < 1.0,
    ],
    ids=["a rate", "of few numbers", "normal", "computed with"],
)
def test_what_depends_on_the_draw_is_refused(branch: Callable[[float], Tensor]) -> None:
    with pytest.raises(UntraceableError, match="Dropped could not be captured as a graph"):
        trace_model(Dropped(branch, 0.1), (X,))


def test_a_rate_that_is_set_later_is_seen() -> None:
    model = nn.Sequential(Dropped(lambda rate: torch.rand(1) > rate, 0.0), nn.Linear(3, 2))
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert net.recorder((X,), {}).whole
    model[0].rate = 0.5  # type: ignore[assignment]
    assert not net.recorder((X,), {}).whole


class Refusing(nn.Module):
    """A layer whose outputs are looked at."""

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layer, self.look = nn.Linear(3, 2), look

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.look(y)
        return y


@pytest.mark.parametrize(
    "look",
    [
        looks.asserts,
        looks.asserts_not,
        looks.asserts_close,
        looks.asserts_either,
        looks.asserts_either_in_front,
        looks.raises_error,
    ],
)
def test_a_look_at_values_that_only_raises_is_no_obstacle_to_a_graph(look: Callable[[Tensor], None]) -> None:
    net = kfac_fx.compile(Refusing(look), (X,), loss="normal")
    assert net.recorder((X,), {}).whole
    if look is not looks.asserts_close:
        with pytest.raises((AssertionError, ValueError)):
            net(X * torch.nan)


@pytest.mark.parametrize("look", [looks.branches, looks.handles])
def test_a_look_at_values_that_decides_what_is_computed_is_refused(look: Callable[[Tensor], None]) -> None:
    with pytest.raises(UntraceableError, match="Refusing could not be captured as a graph"):
        trace_model(Refusing(look), (X,))


def runs(x: Tensor, **options: Any) -> tuple[int, Tensor]:
    """(how often a checkpointed function runs, the gradient of it)."""
    times = []

    def function(value: Tensor) -> Tensor:
        times.append(1)
        return value.sin() * torch.rand_like(value)

    torch.manual_seed(0)
    output: Any = checkpoint(function, x, **options)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    return len(times), gradient


def test_a_checkpoint_that_is_not_reentrant_runs_once() -> None:
    x = torch.ones(3, requires_grad=True)
    twice, wanted = runs(x, use_reentrant=False)
    with checkpoints_off():
        once, gradient = runs(x, use_reentrant=False)
    assert (twice, once) == (2, 1)
    assert torch.equal(gradient, wanted)
    assert runs(x, use_reentrant=False)[0] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_are_off_where_custom_functions_are_watched(reentrant: bool) -> None:
    with custom_functions() as seen:
        assert runs(torch.ones(3, requires_grad=True), use_reentrant=reentrant)[0] == 1
    assert seen == set()


class Beside(nn.Module):
    """An adapter that reads the weight it was put beside, and its own output, without their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.linear(x, self.base.weight.data) + self.own(x)
        return y / y.data.norm()


@pytest.mark.parametrize("inputs", [None, (torch.ones(2, 3),)], ids=["symbolic", "exported"])
def test_data_is_read_without_a_gradient(inputs: tuple[Tensor] | None) -> None:
    torch.manual_seed(0)
    model, x = Beside(), torch.randn(2, 3)
    traced = trace_model(model, inputs)
    graph = fx.GraphModule(traced.program.root, traced.program.graph)
    torch.testing.assert_close(traced.unflatten(graph(x)), model(x), rtol=0, atol=0)


def test_what_only_data_reads_is_unused() -> None:
    net = kfac_fx.compile(Beside(), (torch.randn(4, 3),), loss="normal", strict=True)
    assert [registration.parameters for registration in net.registrations] == [("own.weight", "own.bias")]
    assert set(net.report.unused) == {"base.weight", "base.bias"}


def test_what_data_is_written_through_is_no_graph() -> None:
    class Decays(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.9)
            return super().forward(x)

    model, x = nn.Sequential(Decays(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = kfac_fx.compile(model, (x,), loss="normal")
    assert "writes into its parameters 0.weight in forward" in str(net.report).replace("\n            ", " ")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Moved(nn.Module):
    def __init__(self, move: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.move = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), move

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        y: Tensor = self.last(self.norm(self.first(x)))
        return y


MOVES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "to the device of the input": lambda model, x: model.get_submodule("last").to(x.device),
    "the whole model, to device and type": lambda model, x: model.to(x.device, x.dtype),
    "to the type that it has": lambda model, x: model.float(),
    "to the processor": lambda model, x: model.get_submodule("norm").cpu(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_module_that_is_moved_to_where_it_is_is_in_the_graph(move: Callable[[nn.Module, Tensor], Any]) -> None:
    net = kfac_fx.compile(Moved(move), (torch.randn(5, 3),), loss="normal", strict=True)
    assert net.captures.first.whole and len(net.registrations) == 3
    net(torch.randn(5, 3)).sum().backward()
    assert nn.Module.to.__qualname__ == "Module.to"


def test_a_module_that_is_cast_is_in_no_graph() -> None:
    model = Moved(lambda model, x: model.get_submodule("last").to(torch.bfloat16))
    with pytest.raises(kfac_fx.InputError, match="does not run on these inputs"):
        kfac_fx.compile(model, (torch.randn(5, 3),), loss="normal")


def test_a_step_of_a_cell_that_stands_in_has_the_shape_of_its_state() -> None:
    x, state, w, u = (torch.empty(shape, device="meta") for shape in ((7, 3), (7, 5), (20, 3), (20, 5)))
    assert [list(new.shape) for new in recurrent_cell("lstm", x, [state, state], w, u, None, None)] == [[7, 5], [7, 5]]


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -grad


def test_custom_functions_are_seen_and_still_run() -> None:
    x = torch.ones(2, requires_grad=True)
    with custom_functions() as seen:
        Negated.apply(x).sum().backward()
    assert seen == {"Negated"}
    assert x.grad is not None and x.grad.tolist() == [-1, -1]
    Negated.apply(x)
    assert seen == {"Negated"}


# --- lengths ----------------------------------------------------------------------------------------------------------


class Lengths(nn.Module):
    """It asks for lengths of tensors, and for those of lists."""

    def __init__(self, hashed: bool = False) -> None:
        super().__init__()
        self.layer, self.sizes, self.hashed = nn.Linear(4, 6), [2, 3], hashed

    def forward(self, x: Tensor, graph: Tensor, pointers: Tensor) -> Tensor:
        h = self.layer(x).view(len(x), *self.sizes) / len(self.sizes)
        names = {len(pointers): "graphs"} if self.hashed else {}
        return h.new_zeros(len(pointers) - 1, 6).index_add(0, graph, h.view(len(h), -1)) + len(names)


def graphs(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    pointers = torch.tensor([0, *sizes]).cumsum(0)
    return torch.randn(sum(sizes), 4), torch.repeat_interleave(torch.arange(len(sizes)), pointers.diff()), pointers


def test_a_graph_holds_for_all_lengths_that_forward_asks_for() -> None:
    net = kfac_fx.compile(Lengths(), graphs(3, 5, 2), loss="normal")
    for sizes in ((4, 4, 4, 4), (2, 9), (3, 5, 2)):
        batch = graphs(*sizes)
        torch.testing.assert_close(net.functional({}, batch, {})[0], net.model(*batch))
        assert len(net.captures.all) == 1
    assert "len" not in globals()


def test_a_length_that_must_be_a_number_is_one() -> None:
    net = kfac_fx.compile(Lengths(hashed=True), graphs(3, 5, 2), loss="normal")
    assert not net.program.submodules and net.record(graphs(6, 6, 6), {}).cases == 3
    with pytest.raises(kfac_fx.UntraceableError, match="float"):
        kfac_fx.capture(Wrong(), (torch.randn(3, 4),))
    assert "len" not in globals()


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 4) if float(x.sum()) > len(x) else x


@pytest.mark.parametrize("own", [False, True])
def test_the_files_of_all_classes_have_their_own_len_afterwards(own: bool) -> None:
    source = "def forward(self, x):\n    return self.layer(x).view(len(x), -1)"
    scope: dict[str, Any] = {"__name__": "elsewhere", **({"len": len} if own else {})}
    exec(source, scope)

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        forward = scope["forward"]

    class Derived(Base):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(torch.tanh(x))
            return result

    program = kfac_fx.capture(Derived(), (torch.randn(3, 4),)).program
    assert (scope.get("len") is len) == own and "len" not in globals()
    assert (str(program.inputs[0].meta["val"].shape[0]) == "3") == own


class Bytes(nn.Linear):
    """Its mask is of bytes, as those of older code."""

    def forward(self, x: Tensor) -> Tensor:
        y, mask = super().forward(x), x.new_ones(x.shape, dtype=torch.uint8)
        y = torch.where(mask, y, -y)
        return y.where(condition=1 - mask, other=2 * y)


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")
def test_a_mask_of_bytes_is_a_condition() -> None:
    torch.manual_seed(0)
    model, x = Bytes(3, 3), torch.randn(4, 3)
    net = kfac_fx.compile(model, (x,), loss="normal")
    assert net.captures.first.whole
    torch.testing.assert_close(net.functional({}, (x[:2],), {})[0], model(x[:2]))


class Policy(nn.Module):
    """torch.distributions checks its arguments, and what it is asked the probability of."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        normal = torch.distributions.Normal(self.mean(x), F.softplus(self.scale) + 0.1, validate_args=True)
        return normal.log_prob(action).sum(-1)


def test_distributions_are_captured_and_still_refuse_what_is_invalid() -> None:
    torch.manual_seed(0)
    model, x, action = Policy(), torch.randn(4, 3), torch.randn(4, 2)
    net = kfac_fx.compile(model, (x, action), loss=lambda outputs: kfac_fx.losses.Normal(outputs[:, None]))
    assert net.captures.first.whole
    assert {row.names: row.block for row in net.report.rows} == {"mean.{weight, bias}": "kronecker", "scale": "full"}
    torch.testing.assert_close(net(x, action), model(x, action))
    with pytest.raises(ValueError, match="within the support"):
        net(x, torch.full((4, 2), torch.nan))
