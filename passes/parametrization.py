"""Parametrizations: what stands between a parameter and the matrix of its layer.

A layer is a matrix times rows, `y = W r`. The matrix may be a function of the parameter:

    F.linear(x, w[:4])               Sliced            a part of the matrix                 exact
    F.linear(x, w[index])            Gathered          outputs or inputs of a table         exact
    x + interpolate(table)           LinearMap         a constant matrix times the table    exact
    x * exp(s)                       Elementwise       a function of every element          exact
    F.linear(x, w * mask)            MeanSquares       every element by itself              not exact
    F.linear(x, g * v / |v|)         WeightNorm, ...   normalized weights; `Gain` for g     the direction v: not exact
    F.linear(x, a @ b)               Factor            one factor of a product              exact
    F.linear(x, view_as_complex(w))  Complex, ...      real and imaginary parts             exact
    x * softmax(s)                   PerCase           any small function, by its Jacobian  exact
    h @ w                            Transposed        a weight that is tied to another     exact

`Use.through` lists them from the operation to the parameter. Each one turns the rows and gradient rows of a tensor into
those of the tensor before it, so that with Σ over cases and positions

    Σ grad_rowsᵀ rows = ∂L/∂W    becomes    Σ grad_rowsᵀ rows + remainder = ∂L/∂p

`tests/contract/test_every_parametrization.py` holds this, for every parametrization and for pairs of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from .matrix import Layout, Shape

T = TypeVar("T")
OUTPUTS, INPUTS = "outputs", "inputs"  # the sides of a matrix


# --- values that a parametrization needs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """A value that a use needs while a batch is recorded, and that no node of the model's graph computes:
    `function(*arguments)`.

        linear(x, w[:, chosen])          the indices of the gathered inputs, from the numbers of w's elements
        softmax(w)[i] * x                the Jacobian of the function, from w
        pos = linear(constant, w)        the number of cases, from the first input

    A pass describes such a value and writes no node, because other Programs share the graph that it was given.
    `rewrite` adds the node to the module that it emits.

    function: a function of a module, or an `nn.Module`, which the emitted module then holds.
    arguments: nodes of the graph, one at least, and literals.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return [argument for argument in self.arguments if isinstance(argument, fx.Node)]


Value = fx.Node | Computed


def nodes_of(value: Value) -> list[fx.Node]:
    """The nodes that a value is, or is computed from."""
    return value.nodes if isinstance(value, Computed) else [value]


def with_nodes(value: T, nodes: Mapping[fx.Node, fx.Node]) -> T:
    """Plain data with other nodes instead of its own, as in a copy of the graph. Data without nodes is returned
    as it is."""
    result: Any = value
    if isinstance(value, fx.Node):
        result = nodes[value]
    elif isinstance(value, (tuple, frozenset)):
        items = [with_nodes(item, nodes) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            result = type(value)(items)
    elif isinstance(value, Mapping):
        result = {with_nodes(key, nodes): with_nodes(item, nodes) for key, item in value.items()}
    elif is_dataclass(value) and not isinstance(value, (type, Layout)):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: with_nodes(item, nodes) for name, item in old.items()}
        if any(new[name] is not old[name] for name in old):
            result = replace(value, **new)
    return result  # type: ignore[no-any-return]


# --- parametrizations -------------------------------------------------------------------------------------------------


RowPair = tuple[Tensor, Tensor]  # [N, S, g, i], or ids [N, S], and [N, S, g, o]; without g if it is 1
NodeValues = Mapping[str, Tensor]  # the values of `Parametrization.nodes`, by the same names
RowsStep = Callable[[RowPair, NodeValues], RowPair]
Views = tuple[tuple[Shape, Shape], ...]  # views of a tensor one after another: (order, shape), one of them empty


@dataclass(frozen=True)
class Parametrization(ABC):
    """One step between a parameter and the matrix of its layer: plain data, nodes of the graph among it."""

    @abstractmethod
    def step(self) -> RowsStep:
        """The function from (rows, gradient rows) of the matrix, and tensors, to (rows, gradient rows) of what stands
        before it. It closes over literals and functions only: Dynamo takes nothing else into a tap."""

    @property
    def nodes(self) -> dict[str, Value]:
        """The tensors that `step` and `remainder` need beside the rows."""
        nodes: dict[str, Value] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            several = enumerate(value) if isinstance(value, tuple) else [("", value)]
            nodes |= {f"{field.name}{n}": item for n, item in several if isinstance(item, Value)}
        return nodes

    def remainder(self, gradient: Tensor, tensors: NodeValues) -> Tensor | None:
        """The part of the parameter's gradient that the rows omit, for the numeric proof; None if they are exact.

        gradient: what the rows make, in the parameter's shape. tensors: `nodes`, with their history.

        Returns a number whose gradient with respect to the parameter is to be added.
        """
        return None

    # --- what it allows -----------------------------------------------------------------------------------------------

    @property
    def left_out(self) -> str | None:
        """For the report: what the rows leave out, so that only Kronecker products are offered; None if exact."""
        return None

    @property
    def keeps_pixels(self) -> bool:
        """Whether rows are still pixels of the layer's input, as SUA needs them."""
        return False

    @property
    def keeps_elements(self) -> bool:
        """Whether each element of the matrix is still a function of one element of the parameter alone."""
        return False

    @property
    def all_rows(self) -> str | None:
        """Why the input factor needs all rows; None if a sample will do."""
        return None

    @property
    def unmasked(self) -> str | None:
        """Why no mask of positions goes with the rows; None if one does."""
        return None

    @property
    def merges_groups(self) -> bool:
        """Whether the groups of a position become positions of their own."""
        return False

    @property
    def default(self) -> tuple[str, str] | None:
        """The approximation that it prefers to the layer's own, and why."""
        return None


@dataclass(frozen=True)
class WeightExample:
    """For the contract test: a weight [o, i] that is made of parameters, which are given by their shapes.

    The result of another example may take the place of the first parameter.
    """

    function: Callable[..., Tensor]
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class Transposed(Parametrization):
    """A weight that is used the other way round, as the output layer that is tied to an embedding.

        h = F.embedding(ids, w);  y = h @ w.T        the second use has the matrix of the first, transposed

    Rows and gradient rows change sides, so both uses add to the same two factors.
    """

    def step(self) -> RowsStep:
        return lambda both, tensors: (both[1], both[0])

    @property
    def keeps_elements(self) -> bool:
        return True

    @property
    def all_rows(self) -> str | None:
        return "the gradients of its output are rows"


def in_real_positions(rows: Tensor, grad_rows: Tensor) -> RowPair:
    """Complex rows r and gradient rows d of a real matrix, whose gradient is Re d conj(r): every position becomes two,
    of the real and of the imaginary parts."""
    rows, grad_rows = (torch.cat([side.real, side.imag], 1) for side in map(as_complex, (rows, grad_rows)))
    return rows, grad_rows


def as_complex(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.complex64))


@dataclass(frozen=True)
class Complex(Parametrization):
    """A matrix of complex numbers, whose parameter holds their real and imaginary parts side by side.

        y = einsum("bix,iox->box", x, torch.view_as_complex(w))        w [i, o, x, 2]

    For complex rows r and gradient rows d, the gradient of an element is d conj(r). So every position becomes two, of
    the real and of the imaginary parts of d: (Re d, [Re r, -Im r]) and (Im d, [Im r, Re r]). A bias would be one column
    at the first and another one at the second, so it has a matrix of its own.

    conjugated: whether the matrix is of the conjugate numbers, whose imaginary parts have the other sign.
    """

    conjugated: bool = False

    def step(self) -> RowsStep:
        sign = -1 if self.conjugated else 1

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            (re, im), grad_parts = ((side.real, side.imag) for side in map(as_complex, both))
            pairs = torch.stack([torch.stack([re, -sign * im], -1), torch.stack([im, sign * re], -1)], 2)
            return pairs.flatten(1, 2).flatten(-2), torch.stack(grad_parts, 2).flatten(1, 2)

        return step

    @property
    def unmasked(self) -> str | None:
        return "its matrix is complex, so each position has two rows"


@dataclass(frozen=True)
class ComplexOutputs(Parametrization):
    """The same where rows are real, as the ones of a bias and those of an embedding: every output becomes two.

        y = x + torch.view_as_complex(b)        b [o, 2]

    For real rows r and complex gradient rows d, the gradients of an element are Re d r and Im d r.

    conjugated: see `Complex`.
    """

    conjugated: bool = False

    def step(self) -> RowsStep:
        sign = -1 if self.conjugated else 1

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, d = both[0], as_complex(both[1])
            rows = rows.real if rows.is_complex() else rows  # those of a bias alone, [N, S, 0]
            return rows, torch.stack([d.real, sign * d.imag], -1).flatten(-2)

        return step


# --- views, as literals -----------------------------------------------------------------------------------------------


def view_steps(before: Layout, after: Layout) -> Views:
    """Back through one layout and on through another."""
    back = [(step.back, ()) if step.back else ((), step.before) for step in reversed(before.steps)]
    return (*back, *((step.order, ()) if step.order else ((), step.after) for step in after.steps))


def apply_views(tensor: Tensor, steps: Views) -> Tensor:
    for order, shape in steps:
        tensor = tensor.permute(order) if order else tensor.reshape(shape)
    return tensor
