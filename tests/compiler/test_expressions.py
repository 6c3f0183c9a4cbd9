"""The expressions of tensors that are computed from parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.expressions import basic, express, factor
from kfac_fx.passes.ir import Program
from kfac_fx.passes.parametrization import Computed, ParameterExpr, ranges, view_of
from kfac_fx.passes.parametrizations.functions import Elementwise
from kfac_fx.passes.parametrizations.normalized import Standardized, WeightNorm
from kfac_fx.passes.parametrizations.parts import ByElement
from tests.compiler.test_pieces_values import node
from tests.compiler.toy import Toy, before
from tests.contract.values import Values

Function = Callable[..., Any]
Part = tuple[Any, ...]
X = (3, 5, 4)


def expressed(function: Function, exported: bool = False, /, **shapes: tuple[int, ...]) -> Program:
    """Traced symbolically, or by torch.export, which spells the same things in ATen."""
    return express(before("express", Toy(function, **shapes), *[torch.randn(X)] * exported))


def parts(program: Program, exprs: ParameterExpr) -> list[Part]:
    """`(box, parameter, {dim: (start, stop)})`, and the multiple if it is one."""
    found: list[Part] = []
    for slice_ in exprs.slices:
        along = ranges(view_of(slice_), tuple(program.parameters[slice_.parameter].shape))
        found.append((slice_.box, slice_.parameter, along, *[slice_.scale] * (slice_.scale != 1)))
    return found


def test_plain_views_of_whole_parameters_are_left_to_the_matcher() -> None:
    assert expressed(lambda x, w: x @ w.t().contiguous(), w=(6, 4)).parameter_exprs == {}


@pytest.mark.parametrize(
    ("function", "shape", "rows"),
    [
        (lambda x, w: F.linear(x, w[2:5]), (6, 4), (2, 5)),
        (lambda x, w: F.linear(x, w.narrow(0, 2, 3)), (6, 4), (2, 5)),
        (lambda x, w: F.linear(x, w.chunk(3)[1]), (6, 4), (2, 4)),
        (lambda x, w: F.linear(x, w.split(4)[1]), (6, 4), (4, 6)),
        (lambda x, w: F.linear(x, w.split([1, 2, 3])[1]), (6, 4), (1, 3)),
        (lambda x, w: F.linear(x, w.view(3, 2, 4)[2]), (6, 4), (4, 6)),
        (lambda x, w: F.linear(x, w.view(3, 2, 4).select(0, 1)), (6, 4), (2, 4)),
        (lambda x, w: F.linear(x, w.unflatten(0, (3, 2)).unbind(0)[1]), (6, 4), (2, 4)),
        (lambda x, w: x @ w[1].t(), (3, 2, 4), (1, 2)),
        (lambda x, w: x @ w.permute(0, 2, 1)[1, :, :].contiguous(), (3, 2, 4), (1, 2)),
        (lambda x, w: F.linear(x, w[w.shape[0] // 3 : 2 * w.size(0) // 3]), (6, 4), (2, 4)),
        (lambda x, w: F.linear(x, w[2:][..., 1:3, :]), (6, 4), (3, 5)),
    ],
)
def test_slices_are_found_in_all_their_spellings(
    function: Function, shape: tuple[int, ...], rows: tuple[int, int]
) -> None:
    (exprs,) = expressed(function, w=shape).parameter_exprs.values()
    (slice_,) = exprs.slices
    assert ranges(view_of(slice_), shape) == {0: rows}


def test_slices_in_the_spelling_of_aten() -> None:
    def sliced(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w.chunk(3)[1]) + F.linear(x, w.split([1, 2, 3])[1]) + F.linear(x, w[4:])
        return y @ w.view(3, 2, 4)[2] @ w.narrow(0, 2, 2).mT

    found = expressed(sliced, True, w=(6, 4)).parameter_exprs.values()
    assert [ranges(view_of(exprs.slices[0]), (6, 4))[0] for exprs in found] == [(2, 4), (1, 3), (4, 6), (4, 6), (2, 4)]


def test_tensors_put_together_hold_parts_and_constants() -> None:
    program = expressed(
        lambda x, w, q, v: F.linear(x, w, torch.cat([q, torch.zeros_like(v), v])), w=(6, 4), q=(2,), v=(2,)
    )
    (exprs,) = program.parameter_exprs.values()
    assert exprs.shape == (6,)
    assert parts(program, exprs) == [(((0, 2),), "q", {0: (0, 2)}), (((4, 6),), "v", {0: (0, 2)})]


def test_parts_are_put_together_along_any_dimension_and_turned() -> None:
    program = expressed(lambda x, w, v: F.linear(x, torch.cat([w.t(), v], dim=-2).mT), w=(6, 3), v=(1, 6))
    (exprs,) = program.parameter_exprs.values()
    assert exprs.shape == (6, 4)
    assert [part[:2] for part in parts(program, exprs)] == [(((0, 6), (0, 3)), "w"), (((0, 6), (3, 4)), "v")]
    program = expressed(lambda x, w, v: x @ torch.stack([w, v], 1), w=(4,), v=(4,))
    (exprs,) = program.parameter_exprs.values()
    assert exprs.shape == (4, 2)
    assert [part[:2] for part in parts(program, exprs)] == [(((0, 4), (0, 1)), "w"), (((0, 4), (1, 2)), "v")]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x, q, k: x + torch.cat([q, k]).chunk(2)[1], [(((0, 4),), "k", {0: (0, 4)})]),
        (lambda x, q, k: x + torch.cat([q, k])[2:6], [(((0, 2),), "q", {0: (2, 4)}), (((2, 4),), "k", {0: (0, 2)})]),
        (lambda x, q, k: x + torch.stack([q, k])[1], [(((0, 4),), "k", {0: (0, 4)})]),
        (lambda x, q, k: x + torch.stack([q, k], 1).unbind(1)[0], [(((0, 4),), "q", {0: (0, 4)})]),
        (lambda x, q, k: x + torch.cat([q, torch.zeros(4), k]).split(4)[1], []),
    ],
)
def test_parts_of_what_was_put_together(function: Function, wanted: list[Part]) -> None:
    program = expressed(function, True, q=(4,), k=(4,))
    (exprs,) = program.parameter_exprs.values()
    assert exprs.shape == (4,) and parts(program, exprs) == wanted


def test_every_second_element_of_several_is_a_function_of_them() -> None:
    exprs = expressed(lambda x, q, k: x + torch.cat([q, k])[::2], q=(4,), k=(4,)).parameter_exprs
    assert {node.name: node is expr.function for node, expr in exprs.items()} == {"cat": False, "getitem": True}


def zeroed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    bias = b.clone()
    bias[2:4].zero_()
    return F.linear(x, w, bias)


def assigned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    bias = b.clone()
    bias[2:4] = 0
    return F.linear(x, w, bias)


def filled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    bias = b.clone()
    bias.narrow(0, 2, 2).fill_(1.5)
    return F.linear(x, w, bias)


@pytest.mark.parametrize(("function", "exported"), [(zeroed, False), (filled, False), (zeroed, True), (assigned, True)])
def test_a_copy_is_constant_where_numbers_were_written(function: Function, exported: bool) -> None:
    program = expressed(function, exported, w=(6, 4), b=(6,))
    (exprs,) = program.parameter_exprs.values()
    assert parts(program, exprs) == [(((0, 2),), "b", {0: (0, 2)}), (((4, 6),), "b", {0: (4, 6)})]


def test_a_copy_into_which_nothing_is_written_has_no_expression() -> None:
    def empty(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        bias = b.clone()
        bias[:0].zero_()
        return F.linear(x, w, bias)

    assert expressed(empty, w=(6, 4), b=(6,)).parameter_exprs == {}


@pytest.mark.parametrize(
    ("function", "multiple"),
    [
        (lambda x, g: x * (0.5 * g), 0.5),
        (lambda x, g: x * (g / 4 + 1), 0.25),
        (lambda x, g: x * (1 - g), -1.0),
        (lambda x, g: x * torch.neg(g), -1.0),
        (lambda x, g: x * torch.rsub(g, 1.0, alpha=3), -3.0),
        (lambda x, g: x * ((g - 1) * 2 * 3), 6.0),
        (lambda x, g: x * (g.detach() + 2 * g), 2.0),
    ],
)
@pytest.mark.parametrize("exported", [False, True])
def test_multiples_and_constants_more_are_followed(function: Function, multiple: float, exported: bool) -> None:
    program = expressed(function, exported, g=(4,))
    (exprs,) = program.parameter_exprs.values()
    assert parts(program, exprs) == [(((0, 4),), "g", {0: (0, 4)}, multiple)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: x * g.softmax(0),
        lambda x, g: x[..., :2] * g[torch.tensor([0, 2])],
        lambda x, g: x * g.sum(),
    ],
)
def test_what_computes_is_no_part_of_a_parameter(function: Function) -> None:
    assert all(node is expr.function for node, expr in expressed(function, g=(4,)).parameter_exprs.items())


@pytest.mark.parametrize(
    ("function", "derivative"),
    [
        (lambda x, w: F.linear(x, w * w), lambda w: 2 * w),
        (lambda x, w: F.linear(x, torch.maximum(w, torch.zeros(4, 4))), lambda w: (w > 0).to(w)),
        (lambda x, w: F.linear(x, F.softplus(w, 2.0)), lambda w: torch.sigmoid(2 * w)),
        (lambda x, w: F.linear(x, w.triu(1)), lambda w: torch.ones_like(w).triu(1)),
        (lambda x, w: F.linear(x, torch.where(w.detach() > 0, w, 0.0)), lambda w: (w > 0).to(w)),
        (lambda x, w: F.linear(x, w.masked_fill(torch.eye(4, dtype=torch.bool), 1.0)), lambda w: 1 - torch.eye(4)),
        (lambda x, w: F.linear(x, F.silu(w).t()), lambda w: torch.func.grad(lambda v: F.silu(v).sum())(w)),
    ],
)
def test_operations_of_every_element_have_their_derivative(function: Function, derivative: Any) -> None:
    program = expressed(function, True, w=(4, 4))
    (expr,) = program.parameter_exprs.values()
    (step,) = expr.slices[0].through
    assert isinstance(step, ByElement)
    assert isinstance(step.factor, Computed)
    values = Values(program)
    values.run(torch.randn(3, 4))
    weight = program.parameters["w"].detach()
    torch.testing.assert_close(values.of(step.factor).detach(), derivative(weight))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, F.dropout(w, 0.5)),  # chance decides which elements: a block would be of one batch
        lambda x, w: F.linear(x, torch.where(w > w.mean(), w, w.mean())),
        lambda x, w: F.linear(x, torch.lerp(w, w.flip(0), 0.5)),
    ],
)
def test_other_functions_of_elements_are_not_followed(function: Function) -> None:
    program = expressed(function, True, w=(4, 4))
    assert not any(expr.function is None for expr in program.parameter_exprs.values())


class Clipped(nn.Module):
    """Writes into its own weight before it reads a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[:2].zero_()
        return F.linear(x, self.weight[:4])


def test_values_written_into_a_parameter_stay_its_elements() -> None:
    program = express(before("express", Clipped(), torch.randn(X)))
    (exprs,) = program.parameter_exprs.values()
    assert parts(program, exprs) == [(((0, 4), (0, 4)), "weight", {0: (0, 4)})]


def scattered(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    bias = b.clone()
    bias[:2].copy_(b[4:])
    return F.linear(x, w, bias)


def test_a_copy_with_other_parameters_written_into_it_has_no_expression() -> None:
    program = expressed(scattered, w=(6, 4), b=(6,))
    assert all(node.name != "overwritten" for node in program.parameter_exprs)


def test_slices_as_long_as_the_batch_says_have_no_expression() -> None:
    assert expressed(lambda x, w: x + w[: x.shape[1]], True, w=(7, 4)).parameter_exprs == {}


def functions(program: Program) -> list[Any]:
    """The parametrizations of the only expression."""
    (exprs,) = program.parameter_exprs.values()
    (slice_,) = exprs.slices
    return list(slice_.through)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x, g: x * g.exp(), [("exp", ())]),
        (lambda x, g: x * torch.sigmoid(2 * g).view(1, 4), [("sigmoid", ())]),
        (lambda x, g: x * -g.clamp(max=4.6).exp(), [("clamp", (None, 4.6)), ("exp", ())]),
        (lambda x, g: x * F.softplus(g[:]), [("softplus", ())]),
    ],
)
@pytest.mark.parametrize("exported", [False, True])
def test_functions_of_every_element_are_followed(function: Function, wanted: list[Part], exported: bool) -> None:
    found = functions(expressed(function, exported, g=(4,)))
    assert [(step.function, step.settings) for step in found if isinstance(step, Elementwise)] == wanted


@pytest.mark.parametrize("exported", [False, True])
def test_normalized_weights_are_followed(exported: bool) -> None:
    def standardized(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        filters = F.batch_norm(w.view(1, 3, -1), None, None, g.view(-1), training=True, momentum=0.0, eps=1e-6)
        return F.linear(x, filters.view_as(w))

    def normalized(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return F.linear(x, torch._weight_norm(w, g, 0))

    (step,) = functions(expressed(standardized, exported, w=(3, 4), g=(3, 1)))
    assert isinstance(step, Standardized) and (step.eps, step.gain and step.gain.parameter) == (1e-6, "g")
    (step,) = functions(expressed(normalized, exported, w=(3, 4), g=(3, 1)))
    assert isinstance(step, WeightNorm) and (step.dim, step.gain and step.gain.parameter) == (0, "g")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, torch._weight_norm(2 * w, w.norm(2, 1, keepdim=True), 0)),
        lambda x, w: F.linear(x, torch._weight_norm(w.t(), w.t().norm(2, 1, keepdim=True), 0).t()),
        lambda x, w: F.linear(x, F.batch_norm(w, None, None, training=True)),
        lambda x, w: F.linear(x, torch.exp(torch._weight_norm(w, w.norm(2, 1, keepdim=True), 0))),
        lambda x, w: F.linear(x, torch.clamp(w, w.min(), w.max())),
    ],
)
def test_other_normalizations_and_functions_are_taken_as_a_whole(function: Function) -> None:
    program = expressed(function, w=(3, 4))
    weight = program.outputs[0].args[1]
    assert isinstance(weight, fx.Node) and program.parameter_exprs[weight].function is weight


@pytest.mark.parametrize(
    ("draw", "exported"),
    [
        (torch.randn_like, False),
        (lambda mu: torch.randn(3, 4), True),
        (lambda mu: torch.distributions.Normal(torch.zeros_like(mu), 1.0).rsample(), True),
        (lambda mu: torch.bernoulli(mu.sigmoid()), True),
    ],
    ids=["randn_like", "randn", "rsample", "bernoulli"],
)
def test_random_numbers_are_values_that_a_function_takes(draw: Function, exported: bool) -> None:
    """As in the weights of Blundell et al. 2015: the derivatives are those at the numbers of the graph."""
    program = expressed(
        lambda x, mu, rho: F.linear(x, mu + F.softplus(rho) * draw(mu)), exported, mu=(3, 4), rho=(3, 4)
    )
    (expr,) = program.parameter_exprs.values()
    assert [(slice_.parameter, len(slice_.through)) for slice_ in expr.slices] == [("mu", 0), ("rho", 2)]


class Noisy(nn.Linear):
    """A layer of NoisyNet (Fortunato et al. 2018): its noise is drawn into a buffer."""

    noise: Tensor

    def __init__(self, own: bool) -> None:
        super().__init__(4, 3)
        self.scale, self.own = nn.Parameter(torch.full((3, 4), 0.5)), own
        self.register_buffer("noise", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.noise.normal_()
        noise = drawn if self.own else drawn + self.noise.normal_()
        return F.linear(x, self.weight + self.scale * noise, self.bias)


@pytest.mark.parametrize("own", [True, False])
def test_random_numbers_may_be_drawn_into_a_buffer_that_nothing_else_writes(own: bool) -> None:
    program = kfac_fx.compile(Noisy(own), (torch.randn(5, 4),), loss="normal").program
    assert [registration.parameters for registration in program.registrations if registration.generic] == (
        [] if own else [("weight",), ("scale",)]
    )


def test_random_numbers_that_have_a_gradient_are_not() -> None:
    assert expressed(lambda x, w: F.linear(x, F.dropout(w)), w=(3, 4)).parameter_exprs == {}


def test_a_copy_whose_first_or_last_elements_were_overwritten_is_one_part() -> None:
    def first(x: Tensor, b: Tensor) -> Tensor:
        bias = b.clone()
        bias[:2].zero_()
        return x + bias

    def last(x: Tensor, b: Tensor) -> Tensor:
        bias = b.clone()
        bias[3:].zero_()
        return x + bias

    for function, ends in ((first, (2, 4)), (last, (0, 3))):
        program = expressed(function, b=(4,))
        (exprs,) = program.parameter_exprs.values()
        assert parts(program, exprs) == [((ends,), "b", {0: ends})]


def test_a_constant_that_repeats_elements_makes_no_expression() -> None:
    assert expressed(lambda x, g: x[0] * (g + torch.ones(5, 4)), g=(4,)).parameter_exprs == {}


def test_a_part_of_a_constant_in_another_dtype_is_a_constant() -> None:
    """Without inputs no node has a shape, so that of the part comes from what it is a part of."""
    model = Toy(lambda x, q, c, v: x + torch.cat([q, c.float()[2:4], v]), q=(2,), c=(5,), v=(1,))
    model.c.requires_grad_(False)
    program = express(before("express", model))
    (exprs,) = program.parameter_exprs.values()
    assert parts(program, exprs) == [(((0, 2),), "q", {0: (0, 2)}), (((4, 5),), "v", {0: (0, 1)})]


@pytest.mark.parametrize(
    ("name", "arguments", "options", "by"),
    [
        ("neg", (), {}, -1.0),
        ("mul", (4,), {}, 4.0),
        ("div", (4,), {}, 0.25),
        ("mul", (0,), {}, None),  # a constant
        ("mul", ("a tensor",), {}, None),
        ("div", (4,), {"rounding_mode": "floor"}, None),
    ],
)
def test_the_number_that_a_product_multiplies_with(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], by: float | None
) -> None:
    assert factor(name, node(getattr(torch, name), *arguments, **options)) == by


@pytest.mark.parametrize(
    ("index", "is_view"), [(0, True), ((slice(2), None, ...), True), ((0, [1, 2]), False), (torch.ones(2), False)]
)
def test_an_index_makes_a_view_or_a_copy(index: Any, is_view: bool) -> None:
    assert basic(index) is is_view
