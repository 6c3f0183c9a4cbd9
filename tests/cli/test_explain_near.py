"""`near_matches` names the layers that nearly match at a place, and the condition that each fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.cli.explain import explain
from kfac_fx.passes.expressions import express
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Program
from kfac_fx.passes.layers import LAYERS, Layer, collect, layer
from kfac_fx.passes.match import NearMatch, near_matches
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.trace import trace_model


def expressed(model: nn.Module, *declared: Layer, inputs: tuple[Tensor, ...] | None = None) -> Program:
    """The program up to the pass `express`."""
    layers = collect(*LAYERS.values(), *declared)
    return run(trace_model(model, inputs, layers=layers).program, PIPELINE[: PIPELINE.index(express) + 1])


def at(
    model: nn.Module, operation: str, *declared: Layer, inputs: tuple[Tensor, ...] | None = None
) -> dict[str, NearMatch]:
    program = expressed(model, *declared, inputs=inputs)
    (place,) = (node for node in program.graph.nodes if node.op != "get_attr" and op_name(node) == operation)
    return {near.layer: near for near in near_matches(program, place)}


class Weighted(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape or (3, 3)))


def test_a_layer_that_matches_has_no_condition() -> None:
    class Plain(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    near = at(Plain(), "matmul")
    assert near["linear"].condition is None
    assert next(iter(near)) == "linear"


def test_an_unknown_expression_in_a_role_is_named_with_its_operation() -> None:
    class Sorted(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.sort(0).values

    condition = at(Sorted(40, 40), "matmul")["linear"].condition
    assert (
        condition is not None and condition.startswith("its weight must be one parameter") and "values at" in condition
    )


def test_a_second_reader_of_an_intermediate_value_is_named() -> None:
    class Read(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            product = x @ self.weight
            return (product + self.bias) * product.sin()

    condition = at(Read(), "add")["linear"].condition
    assert condition is not None and condition.startswith("its intermediate value matmul at matmul")


def test_a_frozen_weight_fills_no_role() -> None:
    class Frozen(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Frozen()
    model.weight.requires_grad_(False)
    condition = at(model, "matmul")["linear"].condition
    assert condition is not None and condition.startswith("no trainable parameter fills one of its roles at matmul at")


def test_an_operation_in_no_form_has_no_near_match() -> None:
    class Far(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logaddexp(x, self.weight)

    assert at(Far(), "logaddexp") == {}


@pytest.mark.parametrize("rank", [(False, False, 3), (False, True, 0), (True, False, 1)])
def test_matches_come_before_near_matches_of_more_operations_and_declared_layers_before_others(
    rank: tuple[bool, bool, int],
) -> None:
    matches, declared, fitted = rank
    near = NearMatch("linear", fx.Graph().placeholder("x"), None if matches else "", fitted, declared)
    assert near.rank == rank and (True, False, 1) > (False, True, 0) > (False, False, 3)


class Cut(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x, self.weight)[..., :2]


def declared(form: Callable[..., Any]) -> Layer:
    return layer(rows=lambda x, attrs: x, grad_rows=lambda dy, attrs: dy, example=lambda: (Cut(), X))(form)


X = torch.randn(5, 3, 3)


def test_a_declared_layer_says_which_operation_its_form_ends_with() -> None:
    @declared
    def cut(x, *, weight):  # type: ignore[no-untyped-def]
        return torch.logaddexp(x, weight).narrow(-1, 0, 2)

    near = next(iter(at(Cut(), "logaddexp", cut).values()))
    assert near.layer == "cut"
    assert near.condition == "its form ends with the operation narrow, which does not follow here"


def test_a_declared_layer_says_that_operations_before_its_last_one_differ() -> None:
    class Curved(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logaddexp(x, self.weight).exp().tanh()

    @declared
    def curved(x, *, weight):  # type: ignore[no-untyped-def]
        return torch.logaddexp(x, weight).sin().tanh()

    near = at(Curved(), "logaddexp", curved)["curved"]
    assert near.condition == "its form has other operations between this one and its last, tanh"


def test_a_declared_layer_says_which_operation_its_form_lacks() -> None:
    @declared
    def other(x, *, weight):  # type: ignore[no-untyped-def]
        return torch.logaddexp2(x, weight)

    assert at(Cut(), "logaddexp", other)["other"].condition == "its form has no operation logaddexp"


def test_an_operation_that_a_form_lacks_is_spelled_as_in_the_graph() -> None:
    class Table(Weighted):
        def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
            return self.weight[rows, columns].tanh()

    @declared
    def table(rows, columns, *, weight):  # type: ignore[no-untyped-def]
        return weight[rows, columns]

    ids = torch.tensor([0, 2])
    condition = at(Table(), "index", table, inputs=(ids, ids))["table"].condition
    assert condition == "its form has no operation index, in a form torch.ops.aten.index.Tensor"


class Rotated(nn.Module):
    """A circulant matrix, or its transpose."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight, self.transposed = nn.Parameter(torch.randn(6)), transposed

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(self.weight)
        return torch.fft.irfft(torch.fft.rfft(x) * (filtered.conj() if self.transposed else filtered), x.shape[-1])


def rotations(x: Tensor, attrs: Any) -> Tensor:
    place = torch.arange(x.shape[-1])
    return x[:, (place[:, None] - place[None, :]) % x.shape[-1]]


@layer(
    rows=rotations,
    grad_rows=lambda dy, attrs: dy.unsqueeze(-1),
    layouts={"weight": "i -> () i"},
    example=lambda: (Rotated(False), torch.randn(4, 6)),
)
def circulant(x: Tensor, size: int, *, weight: Tensor) -> Tensor:
    return torch.fft.irfft(torch.mul(torch.fft.rfft(x), torch.fft.rfft(weight)), size)


@pytest.mark.filterwarnings("ignore:the layer .* is nowhere in the graph")
def test_a_users_layer_is_told_where_the_parameter_has_a_block_of_another_layer() -> None:
    x = torch.randn(4, 6)
    net = kfac_fx.compile(Rotated(True), (x,), loss="mse", layers=[circulant])
    told = " ".join(explain(net.program, "weight").split())
    assert "Fisher block 0: full" in told
    assert (
        "scale_and_shift, as weight not circulant: its form has the operation fft_rfft where the graph has conj" in told
    )
    assert "not circulant" not in explain(
        kfac_fx.compile(Rotated(False), (x,), loss="mse", layers=[circulant]).program, "weight"
    )
    plain = explain(kfac_fx.compile(Rotated(True), (x,), loss="mse").program, "weight")
    assert "  not " not in plain.partition("for another")[0]  # layers of the library are told only without a block


@pytest.mark.filterwarnings("ignore:the layer .* is nowhere in the graph")
def test_a_layer_of_two_matrices_is_none_and_says_why() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * torch.sigmoid(self.k(x))

    @layer(
        rows=lambda x, attrs: x[:, None],
        grad_rows=lambda dy, attrs: dy[:, None],
        layouts={"weight": "o i -> o i", "bias": "o i -> o i"},
        example=lambda: (Gate(), torch.randn(4, 5)),
    )
    def gate(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(x, weight) * torch.sigmoid(nn.functional.linear(x, bias))

    x = torch.randn(6, 5)
    with pytest.raises(
        kfac_fx.LinkError, match=r"(?s)q\.weight  linked with k\.weight.*A block has one matrix, .*Take"
    ):
        kfac_fx.compile(Gate(), (x,), loss="normal", layers=[gate], linked=[("q.weight", "k.weight")])
    told = " ".join(explain(kfac_fx.compile(Gate(), (x,), loss="normal", layers=[gate]).program, "q.weight").split())
    assert "not gate: its bias, as it is laid out, has not one number for each output of its weight at mul" in told


def test_other_arguments_of_the_last_operation_are_the_condition() -> None:
    """And not operations between the place and the last one, of which there are none."""

    @layer(
        rows=lambda x, attrs: x.unsqueeze(1),
        grad_rows=lambda dy, attrs: dy.unsqueeze(1),
        layouts={"weight": "i -> () i"},
        example=lambda: (Kept(3), torch.ones(2, 3)),
    )
    def summed(x: Tensor, *, weight: Tensor) -> Tensor:
        return (x * weight).sum(-1)

    class Kept(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum(-1, keepdim=True)

    for inputs in ((torch.randn(2, 3),), None):
        condition = at(Kept(3), "mul", summed, inputs=inputs)["summed"].condition
        assert condition is not None
        assert condition.startswith("its form has sum(mul, [-1]) where the graph has sum(mul, [-1], True) at sum")
