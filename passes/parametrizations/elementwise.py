"""Functions of every element between a parameter and its use.

    x * exp(s)                       Σ d x, times exp(s), is the gradient of s
    x * sigmoid(2 * g - 1)           the argument may be a multiple of the parameter and a constant more
    F.linear(x, w, tanh(b))          a bias
    F.linear(x, w * exp(e))          a gain of normalized or multiplied weights, see `normalized`

The derivative multiplies the gradient of every element. The gradient of a matrix [g, o, i] is a sum of products of
gradient rows and rows. So the derivative must be constant along inputs, where it multiplies the gradient rows, or along
outputs, where it multiplies the rows. The derivative of an element function is so if the matrix has one input, or one
output: for scales, shifts and biases. A function of every element of a larger weight is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, fx

from ..graphs.operations import op_name
from ..matrix import Layout
from ..parametrization import NodeValues, Parametrization, RowPair, RowsStep, WeightExample, apply_views, view_steps
from ..pieces import Piece

OUTPUTS, INPUTS = "outputs", "inputs"
Derivative = Callable[[NodeValues], Tensor]
Constant = Callable[[int, int], bool]  # (dimension of the parameter, axis of the matrix): see `Diagonal.sides`


@cache
def bounds_have_gradients() -> bool:
    """Whether torch.clamp sends a gradient to an element that equals a bound: up to torch 2.13 it does, in 2.15 not.

    It runs a backward, before which all backends must be registered, so it must not run at import.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, min=0.0), x)[0])


def derivative_of_clamp(x: Tensor, low: float | None, high: float | None, bounds: bool) -> Tensor:
    above, below = (torch.ge, torch.le) if bounds else (torch.gt, torch.lt)
    inside = torch.ones_like(x, dtype=torch.bool)
    inside = inside if low is None else inside & above(x, low)
    inside = inside if high is None else inside & below(x, high)
    return inside.to(x)


DERIVATIVES: Mapping[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.exp,
    "log": torch.reciprocal,
    "log1p": lambda x: 1 / (1 + x),
    "sqrt": lambda x: 0.5 * x.rsqrt(),
    "rsqrt": lambda x: -0.5 * x.rsqrt() / x,
    "reciprocal": lambda x: -1 / x**2,
    "square": lambda x: 2 * x,
    "pow": lambda x, exponent: exponent * x ** (exponent - 1),
    "sin": torch.cos,
    "cos": lambda x: -torch.sin(x),
    "abs": torch.sign,
    "tanh": lambda x: 1 - torch.tanh(x) ** 2,
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "softplus": torch.sigmoid,
    "relu": lambda x: (x > 0).to(x),
    "clamp": derivative_of_clamp,
}


@dataclass(frozen=True)
class Diagonal(Parametrization):
    """A function that multiplies gradients on one side of the matrix.

    operand: the node of its argument, which is `layout` of the parameter, or a multiple of it and a constant more.
    piece: the only piece of the parameter that the use has; None: all of it.
    matrix: from the parameter, or the piece, to the matrix [g, o, i] of the use, or [g, o] of a bias.
    side: what is multiplied: gradient rows ("outputs") or rows ("inputs").

    The last three are known where the use is, see `placed`. Several of them commute; they stand in the order of the
    graph.
    """

    keeps_elements = True

    operand: fx.Node
    layout: Layout
    piece: Piece | None = field(default=None, kw_only=True)
    matrix: Layout | None = field(default=None, kw_only=True)
    side: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def derivative(self) -> Derivative:
        """The factor of the gradient, in the shape of the operand. The function closes over literals only."""

    @abstractmethod
    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        """The sides of a matrix of these sizes [g, o, i] that the derivative may multiply.

        constant: of a dimension of the parameter, whether a step along an axis of the matrix stays at the same place
        along the dimension.
        """

    def placed(self, matrix: Layout, side: str, piece: Piece | None = None) -> Self:
        return replace(self, matrix=matrix, side=side, piece=piece)

    def step(self) -> RowsStep:
        assert self.matrix is not None and self.side is not None, "bug in kfac_fx: a function that was not placed"
        derivative, outputs, piece = self.derivative(), self.side == OUTPUTS, self.piece
        back, to_matrix = (
            view_steps(self.layout, Layout(self.layout.shape)),
            view_steps(Layout(self.matrix.shape), self.matrix),
        )
        place = None if piece is None else (piece.dim, piece.start, piece.stop - piece.start)

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            by = apply_views(derivative(tensors), back)
            by = by if place is None else by.narrow(*place)
            return multiplied(*both, apply_views(by, to_matrix), outputs)

        return step


def multiplied(rows: Tensor, grad_rows: Tensor, by: Tensor, outputs: bool) -> RowPair:
    """Gradient rows or rows times a matrix [g, o, i], or [g, o], that is constant along the other side."""
    if outputs:
        side = by if by.dim() == 2 else by[:, :, 0]
        return rows, grad_rows * (side if grad_rows.dim() == 4 else side[0])
    if not rows.is_floating_point():
        return rows, grad_rows * by[0, 0][rows.clamp(min=0)].unsqueeze(-1)
    return rows * (by[:, 0] if rows.dim() == 4 else by[0, 0]), grad_rows


def side_of(steps: Iterable[Parametrization], sizes: Sequence[int], constant: Constant) -> str | None:
    """The side that all of these functions multiply, outputs where it may be both; None if there is none."""
    sides = {OUTPUTS, INPUTS}
    for step in steps:
        assert isinstance(step, Diagonal), f"bug in kfac_fx: {step} has no side"
        sides &= step.sides(sizes, constant)
    return OUTPUTS if OUTPUTS in sides else INPUTS if sides else None


def placed(
    steps: Iterable[Parametrization], matrix: Layout, side: str | None, piece: Piece | None = None
) -> tuple[Parametrization, ...]:
    """The functions in a use whose parameter, or piece, has this layout in the matrix."""
    functions: list[Parametrization] = []
    for step in steps:
        assert isinstance(step, Diagonal) and side is not None, f"bug in kfac_fx: {step} has no side"
        functions.append(step.placed(matrix, side, piece))
    return tuple(functions)


@dataclass(frozen=True)
class Elementwise(Diagonal):
    """A function of every element, one of `DERIVATIVES`. settings: its arguments beside the operand."""

    function: str
    settings: tuple[Any, ...] = ()

    def derivative(self) -> Derivative:
        function, settings = DERIVATIVES[self.function], self.settings
        if self.function == "clamp":
            settings = (*settings, bounds_have_gradients())
        return lambda tensors: function(tensors["operand"], *settings)

    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        g, o, i = sizes
        return ({OUTPUTS} if i == 1 else set()) | ({INPUTS} if g * o == 1 else set())


def elementwise(node: fx.Node, operand: fx.Node, layout: Layout) -> Elementwise | None:
    """The function that a node applies to its operand, which is `layout` of a parameter; None if it is no such one."""
    settings: tuple[Any, ...] = tuple(node.args[1:])
    if op_name(node) == "clamp":
        low, high = (*settings, None, None)[:2]
        settings = node.kwargs.get("min", low), node.kwargs.get("max", high)
    elif node.kwargs or settings:
        return None
    numbers = all(setting is None or isinstance(setting, (int, float)) for setting in settings)
    return Elementwise(operand, layout, op_name(node), settings) if numbers else None


EXAMPLES = {
    "exp": WeightExample(torch.exp, {"w": (4, 4)}),
}
