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

**Pieces**: slices that are used apart from each other, and tensors that are put together from several.

q, kv = in_proj_weight.split([e, 2 * e])        two pieces of one parameter
torch.cat([q_bias, zeros, v_bias])              an expression of two parameters and a constant
1 - 0.5 * w                                     a multiple, which is the bound parameter's `scale`

No values are computed: a slice of a parameter is a view of a tensor without data, whose strides say which elements it
has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from .errors import fatal
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
        for part in fields(self):
            value = getattr(self, part.name)
            several = enumerate(value) if isinstance(value, tuple) else [("", value)]
            nodes |= {f"{part.name}{n}": item for n, item in several if isinstance(item, Value)}
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


Box = tuple[tuple[int, int], ...]  # of a tensor: (start, stop) along each dimension
Region = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # of a matrix [g, o, i]


@dataclass(frozen=True)
class Piece:
    """A slice of a parameter that is used apart from the rest: to the compiler and to blocks a parameter of its own.

    within: the place along each dimension in front of `dim`, of a member of a stack of stacks; () for all places.
    name: `"attn.in_proj_weight[0:64]"`, `"table[:, 2:5]"`, `"experts[1:2, 0:1]"`; written once, for Dynamo writes no
        names of numbers.
    """

    parameter: str
    dim: int
    start: int
    stop: int
    within: Shape = field(default=(), kw_only=True)
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        before = "".join(f"{place}:{place + 1}, " for place in self.within) or ":, " * self.dim
        object.__setattr__(self, "name", f"{self.parameter}[{before}{self.start}:{self.stop}]")

    def shape(self, whole: Shape) -> Shape:
        before = (1,) * len(self.within) or whole[: self.dim]
        return (*before, self.stop - self.start, *whole[self.dim + 1 :])

    def of(self, whole: Tensor, lead: int = 0) -> Tensor:
        """The slice of a tensor that has the parameter's shape behind `lead` more dimensions; a view."""
        for dim, place in enumerate(self.within):
            whole = whole.narrow(lead + dim, place, 1)
        return whole.narrow(lead + self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Slice:
    """Some elements of a parameter in a tensor.

    box: where they are in the tensor, (start, stop) along each of its dimensions.
    strides, offset: which elements they are and in which order, as those of a view of the parameter.
    scale: the tensor has a multiple of them, and perhaps a constant more.
    through: the functions that were applied to them, the first one first.
    """

    box: Box
    parameter: str
    strides: Shape
    offset: int
    scale: float = 1.0
    through: tuple[Parametrization, ...] = ()

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Partner:
    """The other operand C of a product in which V is a factor.

    kind: "left" C V, "right" V C, "times" V * C, "kron left" V ⊗ C, or "kron right" C ⊗ V.
    shape: of C as a matrix, or as a stack of matrices.
    turned: whether C is used transposed.
    order: of the dimensions of the node in C; () if it is theirs.
    """

    kind: str
    node: fx.Node
    shape: Shape
    turned: bool = False
    order: Shape = ()


@dataclass(frozen=True)
class ProductTerm:
    """`scale` times a matrix of `shape` in which a parameter is one factor; see `passes.parametrizations.product`. Or a
    stack of such matrices, with a third dimension in front.

    layout: from the parameter to the factor, a matrix or a stack of these.
    partners: what the factor is multiplied with; the last one, which makes the product, comes first.
    """

    parameter: str
    layout: Layout
    shape: Shape
    partners: tuple[Partner, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True)
class ParameterExpr:
    """A tensor that is computed from parameters alone.

    slices: where it holds elements of parameters. It is constant elsewhere.
    products: matrices of this tensor's shape, perhaps with dimensions merged, that are added to it.
    function: the tensor's node, if it is any function of the slices, which are whole parameters then.
    """

    shape: Shape
    slices: tuple[Slice, ...]
    products: tuple[ProductTerm, ...] = ()
    function: fx.Node | None = None


# --- strides --------------------------------------------------------------------------------------------------------


def unallocated(shape: Shape) -> Tensor:
    """A parameter without data: views of it say by their strides which of its elements they show."""
    return torch.empty(shape, device="meta")


def view_of(slice_: Slice) -> Tensor:
    """Without data."""
    sizes = slice_.shape
    reach = slice_.offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, slice_.strides, strict=True))
    return unallocated((reach,)).as_strided(sizes, slice_.strides, slice_.offset)


def slice_of(parameter: str, view: Tensor, scale: float = 1.0, through: tuple[Parametrization, ...] = ()) -> Slice:
    """All of a tensor."""
    box = tuple((0, int(size)) for size in view.shape)
    return Slice(box, parameter, view.stride(), int(view.storage_offset()), scale, through)


def narrowed_slice(slice_: Slice, dim: int, start: int, stop: int) -> Slice:
    """The part of a slice between these places of its tensor along `dim`."""
    first, _ = slice_.box[dim]
    box = (*slice_.box[:dim], (start, stop), *slice_.box[dim + 1 :])
    return replace(slice_, box=box, offset=slice_.offset + (start - first) * slice_.strides[dim])


def viewed(layout: Layout, tensor: Tensor) -> Tensor | None:
    """The layout of a tensor, or None if it is no view of it."""
    for step in layout.steps:
        try:
            tensor = tensor.permute(step.order) if step.order is not None else tensor.view(step.after)
        except (RuntimeError, ValueError) as error:  # the latter where a dispatch mode is active
            if fatal(error):
                raise
            return None
    return tensor


def same_elements(first: Layout, other: Layout, transposed: bool) -> bool:
    """Whether both have the same elements of the parameter in the same places, those of `other` transposed."""
    if first == other and not transposed:
        return True
    mine, its = viewed(first, unallocated(first.shape)), viewed(other, unallocated(other.shape))
    if mine is None or its is None:  # some elements are copied on the way: compare their numbers
        numbers = torch.arange(math.prod(first.shape)).reshape(first.shape)
        mine, its = first.apply(numbers), other.apply(numbers)
        return torch.equal(mine, its.mT if transposed else its)
    its = its.mT if transposed else its
    sides = zip(mine.shape, mine.stride(), its.stride(), strict=True)
    return mine.shape == its.shape and all(size == 1 or stride == other for size, stride, other in sides)


def ranges(view: Tensor, shape: Shape) -> dict[int, tuple[int, int]]:
    """The dimensions along which a view of a parameter of `shape` shows a slice, every element once: (start, stop)."""
    along: dict[int, tuple[int, int]] = {}
    for dim, size in enumerate(shape):
        before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        length, rest = divmod(view.numel(), before * after)
        start, inside = divmod(int(view.storage_offset()), after)
        if not rest and not inside and length and start + length <= size:
            piece = Piece("", dim, start, start + length)
            if layout_in(piece, shape, view) is not None:
                along[dim] = (start, start + length)
    return along


def layout_in(piece: Piece, shape: Shape, view: Tensor) -> Layout | None:
    """From a piece of a parameter of `shape` to a view that shows all of it; None if the view does not.

    Seen as a tensor of its own, the piece has a shorter stride than the parameter in the dimensions before the cut.
    """
    if not shape:
        return Layout(()).reshape(tuple(view.shape)) if view.numel() == 1 else None
    apart = math.prod(shape[piece.dim :])
    close = apart // shape[piece.dim] * (piece.stop - piece.start)
    sizes = tuple(int(size) for size in view.shape)
    for size, stride in zip(sizes, view.stride(), strict=True):
        if close < apart and size > 1 and stride % apart and size * stride > close:
            return None  # runs on behind the cut
    strides = [stride // apart * close + stride % apart for stride in view.stride()]
    several = [d for d, size in enumerate(sizes) if size > 1]
    order = sorted(several, key=lambda d: -strides[d])
    dense = 1
    for d in reversed(order):
        if strides[d] != dense:
            return None
        dense *= sizes[d]
    if dense != math.prod(piece.shape(shape)):
        return None
    if order == several:
        return Layout(piece.shape(shape)).reshape(sizes)
    split = Layout(piece.shape(shape)).reshape(tuple(sizes[d] for d in order))
    return split.permute(tuple(order.index(d) for d in several)).reshape(sizes)


def axis_along(view: Tensor, shape: Shape, dim: int, length: int) -> tuple[int, int] | None:
    """The axis of a view on which a slice of `length` along `dim` lies from end to end, and the steps on it that one
    step along `dim` takes; None if there is none."""
    stride = math.prod(shape[dim + 1 :])
    for axis, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if step and stride % step == 0 and size == stride // step * length:
            return axis, stride // step
    return None


def region_in(matrix: Tensor, part: Tensor) -> Region | None:
    """Where a view lies in a matrix [g, o, i] that is a view of the same tensor; None if it is no box of it."""
    rest, starts = int(part.storage_offset()), [0, 0, 0]
    for axis in sorted(range(3), key=matrix.stride, reverse=True):
        if matrix.shape[axis] > 1:
            starts[axis], rest = divmod(rest, matrix.stride(axis))
    if rest:
        return None
    for axis, start in enumerate(starts):
        same = part.shape[axis] == 1 or part.stride(axis) == matrix.stride(axis)
        if not same or start + part.shape[axis] > matrix.shape[axis]:
            return None
    g, o, i = ((start, start + int(size)) for start, size in zip(starts, part.shape, strict=True))
    return g, o, i


def constant_along(view: Tensor, shape: Shape, dim: int, axis: int) -> bool:
    """Whether a step along an axis of a view leaves the place along `dim` of the parameter as it is."""
    step, size, inner = view.stride(axis), int(view.shape[axis]), math.prod(shape[dim + 1 :])
    above = step % (inner * shape[dim]) == 0
    below = step * size <= inner and inner % (step * size) == 0
    return size == 1 or above or below


# --- expressions ------------------------------------------------------------------------------------------------------


def without_data(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the values of their nodes; those that are tensors have shapes only.

    Raises ValueError for a node whose value is not known.
    """

    def value_of(node: fx.Node) -> Any:
        if node not in values:
            raise ValueError(f"{node} has no value")
        value = values[node]
        return unallocated(value.shape) if isinstance(value, ParameterExpr) else value

    return fx.map_arg(arguments, value_of)


def is_one_slice(value: ParameterExpr) -> bool:
    return len(value.slices) == 1 and value.slices[0].shape == value.shape and not value.products


def expr_of(view: Tensor, slice_: Slice) -> ParameterExpr:
    """A view of a slice. Raises ValueError where elements are repeated."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise ValueError
    return ParameterExpr(tuple(view.shape), (slice_of(slice_.parameter, view, slice_.scale, slice_.through),))


def seen_part(value: ParameterExpr, view: Tensor) -> ParameterExpr | None:
    """The part of a value that a view of `unallocated(value.shape)` shows; None if it is no box of it."""
    rest, box = int(view.storage_offset()), list[tuple[int, int]]()
    dims: list[int] = []
    for dim, step in enumerate(unallocated(value.shape).stride()):
        start, rest = divmod(rest, step)
        shown = len(dims) < view.dim() and view.stride(len(dims)) == step
        box.append((start, start + int(view.shape[len(dims)]) if shown else start + 1))
        dims += [dim] if shown else []
    if len(dims) < view.dim() or any(stop > size for (_, stop), size in zip(box, value.shape, strict=True)):
        return None
    slices = (cropped(slice_, tuple(box), dims) for slice_ in value.slices)
    return ParameterExpr(tuple(view.shape), tuple(slice_ for slice_ in slices if slice_ is not None))


def cropped(slice_: Slice, box: Box, dims: list[int]) -> Slice | None:
    """The elements of a slice in a box, in coordinates of the box's dimensions `dims`; None if there are none."""
    for dim, (start, stop) in enumerate(box):
        first, last = max(start, slice_.box[dim][0]), min(stop, slice_.box[dim][1])
        if first >= last:
            return None
        slice_ = narrowed_slice(slice_, dim, first, last)
    inside = tuple((slice_.box[dim][0] - box[dim][0], slice_.box[dim][1] - box[dim][0]) for dim in dims)
    return replace(slice_, box=inside, strides=tuple(slice_.strides[dim] for dim in dims))


def multiple_of(value: ParameterExpr | None, by: float | None) -> ParameterExpr | None:
    if value is None or by is None:
        return None
    slices = tuple(replace(slice_, scale=by * slice_.scale) for slice_ in value.slices)
    return ParameterExpr(
        value.shape, slices, tuple(replace(product, scale=by * product.scale) for product in value.products)
    )


def unsqueezed(value: ParameterExpr, dim: int) -> ParameterExpr:
    dim = dim % (len(value.shape) + 1)
    slices = tuple(
        replace(
            slice_, box=(*slice_.box[:dim], (0, 1), *slice_.box[dim:]), strides=view_of(slice_).unsqueeze(dim).stride()
        )
        for slice_ in value.slices
    )
    return ParameterExpr((*value.shape[:dim], 1, *value.shape[dim:]), slices)


def concatenated(parts: Sequence[ParameterExpr], dim: int) -> ParameterExpr | None:
    """Concatenated along `dim`; None where all are constants."""
    shape, at = parts[0].shape, 0
    dim %= len(shape)
    slices: list[Slice] = []
    for part in parts:
        slices += [replace(slice_, box=moved_box(slice_.box, dim, at)) for slice_ in part.slices]
        at += part.shape[dim]
    return ParameterExpr((*shape[:dim], at, *shape[dim + 1 :]), tuple(slices)) if slices else None


def permuted(slice_: Slice, order: Shape) -> Slice:
    return replace(slice_, box=tuple(slice_.box[d] for d in order), strides=tuple(slice_.strides[d] for d in order))


def moved_box(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])
