"""Weights of which every element is a function of one element of a parameter: masks, bounds, scales of noise.

    linear(x, w * mask), linear(x, w.tril())         masked layers (MADE, PixelCNN), pruning
    linear(x, where(mask, w, 0)), masked_fill, ...   the same in other spellings
    linear(x, mu + softplus(rho) * noise)            Bayesian layers (Blundell et al. 2015)
    linear(x, w.exp()), linear(x, w.clamp(-1, 1))    weights with a sign, or within bounds

With D the gradient of the weight and c the derivatives of its elements, c D is the gradient of the parameter. If c is
constant along the outputs, or along the inputs, one side of a Kronecker product has it, see `functions`. Otherwise the
block has u vᵀ instead of c: u² are the means of c² over the inputs, and v² those over the outputs, divided by the mean
of all. So u vᵀ has the mean squares of c in every row and every column, and is c if c is of rank one and positive. A
block of a mask therefore knows which outputs and inputs are masked, and how many of their elements. The numeric proof
adds (c - u vᵀ) D. A small parameter has the exact block of its elements instead, see `functions.PerCase`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graphs.labels import everything_behind
from ..matrix import Layout
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    Computed,
    NodeValues,
    Parametrization,
    RowPair,
    RowsStep,
    Value,
    WeightExample,
    apply_views,
    view_steps,
)
from ..pieces import Piece
from .functions import DERIVATIVES, Constant, Derivative, Diagonal, Elementwise, multiplied, placed, without_history
from .normalized import Scaled

MEAN_SQUARES = "its elements have derivatives of their own: with the mean squares of these by output and input"
OPERATIONS = {  # of tensors of one shape, or of one and a smaller one
    *DERIVATIVES, "add", "sub", "mul", "div", "where", "masked_fill", "tril", "triu", "minimum", "maximum",
    "elu", "gelu", "silu", "leaky_relu", "selu", "hardtanh", "erf", "sinh", "cosh", "atan", "log_sigmoid", "logsigmoid",
    "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant",
}  # fmt: skip


# --- one operation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByElement(Diagonal):
    """An operation that makes every element from one of its operand. factor: its derivative, [the operand's shape]."""

    factor: Value

    def derivative(self) -> Derivative:
        return lambda tensors: tensors["factor"]

    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        return in_line(sizes)


def in_line(sizes: Sequence[int]) -> set[str]:
    """The sides of a matrix [g, o, i] of which the other one has one element."""
    g, o, i = sizes
    return ({OUTPUTS} if i == 1 else set()) | ({INPUTS} if g * o == 1 else set())


class ElementDerivative(nn.Module):
    """The derivative of an operation by one of its arguments, of which every element makes one of the result."""

    def __init__(self, operation: nn.Module, number: int) -> None:
        super().__init__()
        self.operation, self.number = operation, number

    def forward(self, *arguments: Tensor) -> Tensor:
        fixed = without_history(self.operation, arguments)
        at = fixed[self.number]

        def value(changed: Tensor) -> Any:
            return self.operation(*fixed[: self.number], changed, *fixed[self.number + 1 :]).sum()

        if torch.compiler.is_compiling():  # autograd's own function cannot be compiled
            gradient: Tensor = torch.func.grad(value)(at)
            return gradient.detach()
        with torch.enable_grad():
            (derivative,) = torch.autograd.grad(value(at.requires_grad_()), at)
        return derivative


def by_element(node: fx.Node, operand: fx.Node, layout: Layout) -> ByElement:
    """The effect of a node of `OPERATIONS` on its operand, which is `layout` of a parameter.

    Its other operands are read as they are in the graph.
    """
    arguments = list(dict.fromkeys(node.all_input_nodes))
    graph = fx.Graph()
    copies = {argument: graph.placeholder(f"argument_{n}") for n, argument in enumerate(arguments)}
    graph.output(graph.node_copy(node, lambda argument: copies[argument]))
    derivative = ElementDerivative(fx.GraphModule(nn.Module(), graph), arguments.index(operand))
    return ByElement(operand, layout, Computed(derivative, tuple(arguments)))


# --- in the matrix of a use -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanSquares(Parametrization):
    """Functions of every element, with the mean squares of their derivatives by output and input.

    parameter: its node. steps: the functions, the first one first. matrix: from the parameter to [g, o, i].
    """

    left_out = MEAN_SQUARES

    parameter: fx.Node
    steps: tuple[Diagonal, ...]
    matrix: Layout

    @property
    def nodes(self) -> dict[str, Value]:
        """The tensors of the functions, each with its number."""
        inside = {f"{n}.{key}": value for n, step in enumerate(self.steps) for key, value in step.nodes.items()}
        return {"parameter": self.parameter, **inside}

    def derivatives(self) -> Derivative:
        """c as [g, o, i]."""
        functions = tuple((f"{n}.", *derivative_in(step)) for n, step in enumerate(self.steps))
        to_matrix = view_steps(Layout(self.matrix.shape), self.matrix)

        def derivatives(tensors: NodeValues) -> Tensor:
            product: Any = 1.0
            for prefix, derivative, back in functions:
                own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                product = product * apply_views(derivative(own), back)
            return apply_views(product, to_matrix)

        return derivatives

    def step(self) -> RowsStep:
        derivatives = self.derivatives()

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            of_outputs, of_inputs = roots_of_means(derivatives(tensors))
            rows, grad_rows = multiplied(*both, of_outputs.to(both[1]), outputs=True)
            return multiplied(rows, grad_rows, of_inputs.to(both[1]), outputs=False)

        return step

    def remainder(self, gradient: Tensor, tensors: NodeValues) -> Tensor:
        exact = self.derivatives()(tensors).detach()
        of_outputs, of_inputs = roots_of_means(exact)
        made = of_outputs * of_inputs
        missing = torch.where(made == 0, 0, exact / made - 1)  # where all of a side is 0, nothing is missing
        back = view_steps(self.matrix, Layout(self.matrix.shape))
        with torch.enable_grad():
            return (tensors["parameter"] * (apply_views(missing, back) * gradient).detach()).sum()


def derivative_in(step: Diagonal) -> tuple[Derivative, Any]:
    """The derivative of a function, and the views that bring it into the parameter's shape."""
    return step.derivative(), view_steps(step.layout, Layout(step.layout.shape))


def roots_of_means(factors: Tensor) -> tuple[Tensor, Tensor]:
    """(u [g, o, 1], v [g, 1, i]) of factors [g, o, i]."""
    squares = factors.to(torch.promote_types(factors.dtype, torch.float32)).square()
    by_output, by_input = squares.mean(2, keepdim=True), squares.mean(1, keepdim=True)
    total = by_output.mean(1, keepdim=True)
    return by_output.sqrt(), (by_input / torch.where(total == 0, 1, total)).sqrt()


def spreads(steps: Iterable[Parametrization]) -> bool:
    """Whether all are functions of every element."""
    return all(isinstance(step, (Elementwise, ByElement, Scaled)) for step in steps)


def placed_or_spread(
    steps: Sequence[Parametrization], matrix: Layout, side: str | None, parameter: str, piece: Piece | None = None
) -> tuple[Parametrization, ...] | None:
    """See `functions.placed`. Functions of every element that have no side of the matrix become one step. None for
    other functions that have none."""
    if side is not None or not steps:
        return placed(steps, matrix, side, piece)
    diagonal = tuple(step for step in steps if isinstance(step, (Elementwise, ByElement, Scaled)))
    if len(diagonal) < len(steps) or len(matrix.result) != 3 or piece is not None:
        return None
    behind = everything_behind([diagonal[0].operand])
    leaf = next(node for node in sorted(behind) if node.op == "get_attr" and node.target == parameter)
    return (MeanSquares(leaf, diagonal, matrix),)


MASK = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]  # an input is not used
NOISE = [[0.5, -1.0, 2.0, 1.0], [1.0, 0.2, -0.4, 3.0], [-2.0, 1.0, 1.0, 0.1], [0.3, -0.7, 1.0, -1.0]]
EXAMPLES = {
    "mask": WeightExample(lambda w: w * torch.tensor(MASK).to(w), {"w": (4, 4)}),
    "bounds and noise": WeightExample(
        lambda w, r: w.tril() + torch.sigmoid(r) * torch.tensor(NOISE).to(r), {"w": (4, 4), "r": (4, 4)}
    ),
}
