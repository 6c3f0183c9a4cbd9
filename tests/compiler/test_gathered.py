"""Weights whose outputs or inputs are entries of a table: found for what they are, with the rows of the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.ir import ELEMENTS, Program
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.parametrization import INPUTS, OUTPUTS
from kfac_fx.passes.parametrizations.tables import Gathered, of_table
from kfac_fx.passes.resolve import resolve
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before, found

INDEX = torch.tensor([[0, 2, 1], [2, 2, 0]])
ORDER = torch.tensor([2, 0, 2, 1])
Function = Callable[..., Tensor]

SIDES: dict[str, tuple[Function, tuple[int, ...], tuple[str, int], tuple[int, ...]]] = {
    "a group an index": (lambda x, w: torch.einsum("ngi,goi->ngo", x, w[INDEX]), (3, 4), (OUTPUTS, 3), (1, 3, 4)),
    "a product": (lambda x, w: x @ w[ORDER].t(), (3, 4), (OUTPUTS, 3), (1, 3, 4)),
    "a linear layer": (lambda x, w: F.linear(x, w[ORDER]), (3, 4), (OUTPUTS, 3), (1, 3, 4)),
    "an embedding": (lambda x, w: x @ F.embedding(ORDER, w).mT, (3, 4), (OUTPUTS, 3), (1, 3, 4)),
    "outputs along the second dimension": (lambda x, w: x @ w[:, ORDER], (4, 3), (OUTPUTS, 3), (1, 3, 4)),
    "inputs": (lambda x, w: x @ w[ORDER], (3, 5), (INPUTS, 3), (1, 5, 3)),
    "inputs along the second dimension": (lambda x, w: F.linear(x, w[:, ORDER]), (5, 3), (INPUTS, 3), (1, 5, 3)),
    "another order": (lambda x, w: F.linear(x, w.flip(0)), (3, 4), (OUTPUTS, 3), (1, 3, 4)),
    "one more dimension": (lambda x, w: x @ w[0].flip(1), (1, 4, 3), (OUTPUTS, 3), (1, 3, 4)),
    "every second output": (lambda x, w: x @ w.unfold(1, 1, 2)[..., 0].contiguous(), (4, 6), (OUTPUTS, 6), (1, 6, 4)),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("function", "shape", "side", "matrix"), SIDES.values(), ids=SIDES.keys())
def test_which_side_is_gathered(
    function: Function, shape: tuple[int, ...], side: tuple[str, int], matrix: tuple[int, ...], exported: bool
) -> None:
    x = torch.randn(5, 2, 4)
    program = resolve(before("resolve", Toy(function, w=shape), *([x] if exported else [])))
    (one,) = program.registrations
    (use,) = one.uses
    (step,) = use.through
    assert isinstance(step, Gathered) and (step.side, step.size) == side
    assert one.matrix is not None and one.matrix.shape == matrix


@pytest.mark.parametrize(("function", "shape"), [(f, s) for f, s, *_ in SIDES.values()], ids=SIDES.keys())
def test_rows_give_the_gradient_of_every_case(function: Function, shape: tuple[int, ...]) -> None:
    """Squares are of the cases' own gradients: rows instead of other cases would show."""
    torch.manual_seed(0)
    model, x = Toy(function, w=shape), torch.randn(5, 2, 4)
    targets = torch.randn_like(model(x))
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"w": "diagonal"})
    (one,) = net.registrations
    assert not one.generic and one.matrix is not None
    found = net.record((x,), {}, mode="empirical", targets=targets).statistics["w",]["square"]
    wanted = torch.zeros(shape)
    for n in range(len(x)):
        (gradient,) = torch.autograd.grad((model(x[n : n + 1]) - targets[n : n + 1]).square().sum(), [model.w])
        wanted += gradient**2
    torch.testing.assert_close(one.matrix.unpack(found)["w"], wanted)


def test_ids_of_gathered_inputs_are_those_of_the_table() -> None:
    ids = torch.tensor([[0, 3, 1], [2, -1, 0]])
    rows, grad_rows = of_table(ids, torch.ones(2, 3, 4), ORDER[None], INPUTS, 3)
    assert rows.tolist() == [[2, 1, 0], [2, -1, 2]] and list(grad_rows.shape) == [2, 3, 4]
    model = Toy(lambda x, w: F.embedding(x, w[ORDER]), w=(3, 5))
    net = kfac_fx.compile(model, (torch.tensor([[0, 3, 1], [2, 2, 0]]),), loss="normal")
    assert [(registration.layer, registration.parameters) for registration in net.registrations] == [
        ("embedding", ("w",))
    ]


def test_a_bias_beside_a_gathered_weight_is_registered_apart() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w[ORDER], b)

    program = resolve(before("resolve", Toy(function, w=(3, 4), b=(4,)), torch.randn(5, 4)))
    assert found(program) == [("linear", ("b",), 1), ("linear", ("w",), 1)]
    net = kfac_fx.compile(Toy(function, w=(3, 4), b=(4,)), (torch.randn(5, 4),), loss="normal")
    assert not any(registration.generic for registration in net.registrations)


OTHERS: dict[str, tuple[Function, tuple[int, ...], bool]] = {
    "elements in any order": (lambda x, w: x @ w.reshape(-1)[torch.randperm(12)].reshape(4, 3), (3, 4), True),
    "outputs and inputs": (lambda x, w: x @ w.flip(0).flip(1), (4, 3), False),
    "many of them": (lambda x, w: x @ w.flip(0).flip(1), (4, 600), True),
    "outputs that are padding": (lambda x, w: x @ F.embedding(ORDER, w, 2).mT, (3, 4), False),
    "stacks of three dimensions": (lambda x, w: torch.einsum("ngi,goi->ngo", x, w[[1, 0]]), (2, 3, 4), False),
    "written into": (lambda x, w: x @ w[written()].t(), (3, 4), False),
}


def written() -> Tensor:
    index = torch.zeros(4, dtype=torch.int64)
    index[1:].fill_(2)
    return index


@pytest.mark.parametrize(("function", "shape", "generic"), OTHERS.values(), ids=OTHERS.keys())
def test_what_is_gathered_in_another_way_is_generic_unless_it_is_small(
    function: Function, shape: tuple[int, ...], generic: bool
) -> None:
    net = kfac_fx.compile(Toy(function, w=shape), (torch.randn(5, 2, 4),), loss="normal")
    (one,) = net.registrations
    assert one.generic == generic and one.approximation == ("diagonal" if generic else "full")
    assert ("no layer has the form of" in str(one.reason)) == generic


def test_a_size_behind_a_deep_network_is_no_constant() -> None:
    """And what is behind it is not gone through."""

    def deep(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(sys.getrecursionlimit()):
            x = torch.tanh(x)
        return x @ w[torch.arange(x.shape[1]) % 3].t()

    assert before("resolve", Toy(deep, w=(3, 4))).matches == ()


def test_indices_are_read_at_every_recording() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))
            self.register_buffer("index", ORDER.clone())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w[self.index])

    model, x = Moving(), torch.randn(5, 4)
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"w": "diagonal"})
    assert isinstance(net.registrations[0].uses[0].through[0], Gathered)
    model.index.fill_(1)
    square = net.record((x,), {}).statistics["w",]["square"]
    assert bool(square[0, 1].all()) and not bool(square[0, [0, 2]].any())


def test_a_mask_of_positions_counts_for_every_group() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.einsum("nsgi,goi->nsgo", x.unflatten(-1, (2, 2)), self.w[INDEX]) * mask[..., None, None]

    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    net = kfac_fx.compile(Masked(), (torch.randn(3, 5, 4), mask), loss="normal", padding_mask="mask")
    statistics: Any = net.record((torch.randn(3, 5, 4), mask), {}).statistics["w",]
    assert not net.program.unmasked
    assert float(statistics["count"]) == 9 * 2


# --- the numbers of gathered elements ---------------------------------------------------------------------------------

PLACES = torch.tensor([[0, 2], [2, 1]])


def normal(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Program:
    return normalize(trace_model(Toy(function, **shapes), inputs or None).program)


GATHERED: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "rows by an index": (lambda w: w[PLACES], [[[0, 1], [4, 5]], [[4, 5], [2, 3]]]),
    "an index, turned": (lambda w: w[PLACES].permute(2, 0, 1), [[[0, 4], [4, 2]], [[1, 5], [5, 3]]]),
    "an embedding": (lambda w: F.embedding(PLACES[0], w), [[0, 1], [4, 5]]),
    "an embedding with padding": (lambda w: F.embedding(PLACES[0], w, -1), [[0, 1], [-1, -1]]),
    "a slice": (lambda w: w[1:, :1].contiguous(), [[2], [4]]),
    "in another order": (lambda w: w.flip(0), [[4, 5], [2, 3], [0, 1]]),
    "beside a constant": (lambda w: w[:2] + torch.ones(2, 1, 2), [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]),
    "masked": (lambda w: w[:2].masked_fill(PLACES == 2, 0.5), [[0, -1], [-1, 3]]),
    "where": (lambda w: torch.where(PLACES == 2, w[:2], -9.0), [[-1, 1], [2, -1]]),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("function", "expected"), GATHERED.values(), ids=GATHERED.keys())
def test_elements_are_numbered(function: Callable[[Tensor], Tensor], expected: list[Any], exported: bool) -> None:
    x = torch.randn(1)
    program = normal(lambda x, w: x * function(w).sum(), *([x] if exported else []), w=(3, 2))
    noted = [node for node in program.graph.nodes if ELEMENTS in node.meta]
    elements = noted[-1].meta[ELEMENTS]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, copies)
    graph.output(copies[elements.numbers])
    assert elements.parameter == "w"
    assert fx.GraphModule(program.root, graph)(x).tolist() == expected


def test_what_is_computed_from_elements_has_no_numbers() -> None:
    program = normal(lambda x, w: x * (2 * w[PLACES]).exp().sum(), w=(3, 2))
    assert [node.name for node in program.graph.nodes if ELEMENTS in node.meta] == ["getitem"]
    program = normal(lambda x, w: x * w.t().reshape(-1).exp().sum(), w=(3, 2))
    assert not any(ELEMENTS in node.meta for node in program.graph.nodes)


SMALL: dict[str, Function] = {
    "Toeplitz": lambda x, w: x @ w[(torch.arange(4)[:, None] - torch.arange(4) + 3)],
    "taken": lambda x, w: x @ torch.take(w, torch.arange(4)[:, None] + torch.arange(3)),
    "windows": lambda x, w: F.linear(x, w.unfold(0, 4, 1)),
    "windows in memory": lambda x, w: F.linear(x, w.as_strided((4, 4), (1, 1))),
    "a filter": lambda x, w: F.conv1d(x[:, None], w[torch.tensor([[[2, 1, 0, 1, 2]]])], padding=2),
    "rows": lambda x, w: x + w[torch.tensor([0, 2, 2, 6])],
}


@pytest.mark.parametrize("function", SMALL.values(), ids=SMALL)
def test_elements_that_are_neither_rows_nor_columns_have_an_exact_block(function: Function) -> None:
    """2 JᵀJ over the cases: the second derivative of a squared error is 2. They were in a diagonal block."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    model = Toy(function, w=(7,))
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    jacobian = torch.autograd.functional.jacobian(lambda w: function(x, w), model.w.detach()).flatten(0, -2)
    (block,) = estimator.blocks.values()
    torch.testing.assert_close(block.full_fisher_block(), 2 * jacobian.T @ jacobian / len(x), rtol=1e-4, atol=1e-4)


def test_parts_of_one_vector_by_their_places_in_memory_are_layers() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, w.as_strided((5, 4), (4, 1), 0), w[20:25]))
        return F.linear(h, w.as_strided((3, 5), (1, 3), 25))

    net = kfac_fx.compile(Toy(function, w=(40,)), (torch.randn(6, 4),), loss="normal", strict=True)
    shapes = [registration.matrix.shape for registration in net.registrations if registration.matrix]
    assert shapes == [(1, 5, 5), (1, 3, 5)]
