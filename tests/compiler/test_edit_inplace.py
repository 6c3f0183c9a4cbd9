"""Writes into memory: made pure where nobody else looks, else followed by what they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kfac_fx.passes.graphs.edit import memory_owner, overwritten
from kfac_fx.passes.graphs.labels import Label, labels
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before, code, node

X = torch.randn(5, 3)


def normalized(function: Callable[..., Any], exported: bool = True) -> fx.Graph:
    return before("find_losses", Toy(function), *([X] if exported else [])).graph


def returns_first(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        h = x * 2
        function(h)
        return h

    return run


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda h: h.relu_(), "relu = relu(mul)"),
        (lambda h: F.relu(h, inplace=True), "relu = relu(mul)"),
        (lambda h: torch.relu_(h), "relu = relu(mul)"),
        (lambda h: h.add_(1), "add = add(mul, 1)"),
        (lambda h: h.mul_(h), "mul = mul(mul, mul)"),
        (lambda h: F.dropout(h, 0.5, training=True, inplace=True), "dropout = dropout(mul, 0.5, True)"),
    ],
)
def test_the_pure_twin_is_read_in_the_operands_place(
    function: Callable[[Tensor], Any], expected: str, exported: bool
) -> None:
    graph = normalized(returns_first(function), exported)
    _, last = code(graph)
    assert without_names(last) == without_names(expected)
    (output,) = (node for node in graph.nodes if node.op == "output")
    assert output.all_input_nodes[0].prev.name == "mul"


def without_names(line: str) -> str:
    operation = line.partition(" = ")[2]
    return operation.replace("p=0.5", "0.5").replace("training=True", "True").replace("mul_1(", "mul(")


def viewed(x: Tensor) -> Tensor:
    h = x * 2
    first = h[:, 0]
    h.relu_()
    return h.sum(1) + first


def viewed_and_written(x: Tensor) -> Tensor:
    h = x * 2
    h[:, 0].relu_()
    return h + 1


def built(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 4)
    out[:, :3] = x.exp()
    out[:, 3] = x.sum(1)
    return out.tanh()


def filled(x: Tensor) -> Tensor:
    out = torch.empty(5, 3)
    out.copy_(x)
    out.zero_()
    return out + x


def chained(x: Tensor) -> Tensor:
    h = x.clone()
    rows = h.view(-1)
    rows[:3].add_(1)
    h.mul_(2)
    return rows * 3


@pytest.mark.parametrize("function", [viewed, viewed_and_written, built, filled, chained])
def test_what_stays_in_place_computes_the_same(function: Callable[[Tensor], Tensor]) -> None:
    program = before("find_losses", Toy(function), X)
    module = fx.GraphModule(program.root, program.graph)
    x, twin = X.clone().requires_grad_(), X.clone().requires_grad_()
    (got,) = module(x)
    expected = function(twin)
    assert torch.equal(got, expected)
    weight = torch.randn_like(got)
    (ours,) = torch.autograd.grad(got, x, weight, allow_unused=True)
    (theirs,) = torch.autograd.grad(expected, twin, weight, allow_unused=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "movedim": lambda h: h.movedim(0, 1),
    "T": lambda h: h.T,
    "mT": lambda h: h.mT,
    "H": lambda h: h.H,
    "mH": lambda h: h.mH,
    "adjoint": lambda h: h.adjoint(),
    "ravel": lambda h: h.ravel(),
    "reshape_as": lambda h: h.reshape_as(h),
    "broadcast_to": lambda h: h.broadcast_to(2, 5, 3)[0],
    "unfold": lambda h: h.unfold(0, 2, 2),
    "as_strided": lambda h: h.as_strided((2, 2), (1, 1)),
    "tensor_split": lambda h: h.tensor_split(2, -1)[1],
    "unsafe_chunk": lambda h: h.unsafe_chunk(3, -1)[0],
    "real": lambda h: h.real,
    "type_as": lambda h: h.type_as(h),
    "atleast_2d": lambda h: torch.atleast_2d(h),
    "dropout in evaluation": lambda h: F.dropout(h, 0.5, training=False),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_write_into_any_view_is_a_write_into_what_it_is_of(view: Callable[[Tensor], Tensor], exported: bool) -> None:
    def function(x: Tensor) -> Tensor:
        h = x * 2
        view(h).mul_(3)
        return h + 1

    program = before("find_losses", Toy(function), *([X] if exported else []))
    (*_, got) = pytree.tree_leaves(fx.GraphModule(program.root, program.graph)(X))
    assert torch.equal(got, function(X))


def test_what_is_read_after_a_write_depends_on_it() -> None:
    program = before("find_losses", Toy(built), X)
    lines = [line for line in code(program) if line.startswith(("overwritten", "copy_", "tanh"))]
    assert lines == [
        "copy_ = copy_(slice_2, exp)",
        "overwritten = overwritten(new_zeros, copy_)",
        "copy__1 = copy_(select, sum_1)",
        "overwritten_1 = overwritten(overwritten, copy__1)",
        "tanh = tanh(overwritten_1)",
    ]
    assert labels(program.graph, ())[node(program, "overwritten")] is Label.ACT
    assert memory_owner(node(program, "overwritten_1")) is node(program, "new_zeros")
    assert overwritten(X, None) is X


def test_buffers_stay_updated_in_place() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.mul_(0.5).add_(x.detach().mean(0))
            return x - self.seen

    program = normalize(trace_model(Counting(), (X,)).program)
    assert [line.partition(" = ")[2].partition("(")[0] for line in code(program)] == [
        "mul_", "detach", "mean", "add_", "sub",
    ]  # fmt: skip


def test_an_input_that_forward_changes_is_read_changed() -> None:
    graph = normalized(lambda x: x.mul_(2) + x)
    assert code(graph) == ["mul_ = mul(x, 2)", "add = add(mul_, mul_)"]


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_what_reads_a_tensor_before_it_is_written_reads_the_old_values(exported: bool) -> None:
    def function(x: Tensor) -> Tensor:
        h = x * 2
        before = h.exp()
        h.relu_()
        return before + h

    graph = normalized(function, exported)
    graph.lint()
    module = fx.GraphModule(nn.Module(), graph)
    (value,) = pytree.tree_leaves(module(X))
    torch.testing.assert_close(value, function(X))


def test_what_is_written_into_a_buffer_stays_a_write() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.copy_(x.mean(0)).mul_(2.0)
            return x + 1

    model = Running()
    program = normalize(trace_model(model, (X,)).program)
    fx.GraphModule(program.root, program.graph)(X)
    torch.testing.assert_close(program.root.get_buffer("mean"), 2 * X.mean(0))
