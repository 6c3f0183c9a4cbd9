"""Functions between a parameter and its use: of every element, or any small function of one or several parameters.

    x * exp(s)                       Σ d x, times exp(s), is the gradient of s
    x * sigmoid(2 * g - 1)           the argument may be a multiple of the parameter and a constant more
    F.linear(x, w, tanh(b))          a bias
    F.linear(x, w * exp(e))          a gain of normalized or multiplied weights, see `normalized`

The derivative of a function of every element multiplies the gradient of every element. The gradient of a matrix
[g, o, i] is a sum of products of gradient rows and rows. So the derivative must be constant along inputs, where it
multiplies the gradient rows, or along outputs, where it multiplies the rows. It is so if the matrix has one input, or
one output: for scales, shifts and biases. A function of every element of a larger weight is refused.

Other functions have gradients of whole cases only (`PerCase`):

    λ = exp(Σ q1 k1) - exp(Σ q2 k2) + c,  y = x λ     any function, by its Jacobian: DIFF Transformer (Ye et al. 2024)
    softmax(w)[i] * x                                 one of several branches
    irfft(rfft(x) * rfft(k))                          a long filter; T is complex, and has real and imaginary parts
    x * g + g                                         a gain whose rows are inputs, and a shift whose rows are ones

The matrix of such a parameter has a group for every element, of one input and one output. With d_n the gradient of a
case for the tensor T(p) in the use, Jᵀ d_n is that for p. These are the gradient rows, the rows are ones, and the block
is exact: it is made of the gradients of cases. J, [elements of T, elements of p], is computed beside the use, once in a
forward of a recording. Elements that scale in one use and shift in another have no other matrix in common; for them J
is the identity.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from ..graphs.edit import memory_owner
from ..graphs.labels import Label, ancestors, is_size, parameters_behind, symbolic_sizes
from ..graphs.operations import DRAWN, FILLED, changes_memory, is_random, no_grad_region, op_name, writes_elsewhere
from ..ir import ROW_MASK, Bound, Program, Use
from ..matrix import Layout, Shape, real_numbers
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    Computed,
    NodeValues,
    ParameterExpr,
    Parametrization,
    Piece,
    RowPair,
    RowsStep,
    Transposed,
    Value,
    WeightExample,
    apply_views,
    slice_of,
    unallocated,
    view_steps,
)
from ..parametrization import viewed as view_through
from ..torch_private import ADD_BATCH_DIM, REGION

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


# --- gradients of whole cases -----------------------------------------------------------------------------------------


LARGEST_JACOBIAN = 1 << 20  # elements of a Jacobian


@dataclass(frozen=True)
class PerCase(Parametrization):
    """Gradients of whole cases instead of rows.

    layout: from the tensor in the use to the matrix [g, o, i] of the layer, or [g, o] of a bias.
    jacobian: J; None if the tensor in the use is the parameter.
    of_complex: whether the tensor in the use is complex; J has its real and imaginary parts.
    """

    all_rows = "its rows are gradients of cases"
    unmasked = "its rows are gradients of whole cases"

    layout: Layout
    jacobian: Value | None = None
    of_complex: bool = False

    @property
    def default(self) -> tuple[str, str]:
        why = "its uses lay it out in different ways" if self.jacobian is None else "forward uses a function of it"
        return "full", f"{why}: its block is made of the gradients of whole examples"

    def step(self) -> RowsStep:
        """(rows, gradient rows) -> rows of ones and gradients, [N, 1, elements, 1] both."""
        result, back, function = (
            self.layout.result,
            view_steps(self.layout, Layout(self.layout.shape)),
            self.jacobian is not None,
        )
        of_complex = self.of_complex
        in_cases = tuple(((0, *(dim + 1 for dim in order)), ()) if order else ((), shape) for order, shape in back)

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            gradients = of_bias(both[1]) if len(result) == 2 else of_cases(*both, result[2])
            cases = len(gradients)
            gradients = gradients.reshape(cases, *result)
            for order, shape in in_cases:
                gradients = gradients.permute(order) if order else gradients.reshape(cases, *shape)
            gradients = gradients.reshape(cases, math.prod(gradients.shape[1:]))
            gradients = real_numbers(gradients).flatten(1) if of_complex else gradients.real
            if function:
                gradients = gradients @ tensors["jacobian"].to(gradients)
            gradients = gradients[:, None, :, None]
            return torch.ones_like(gradients), gradients

        return step


def of_bias(grad_rows: Tensor) -> Tensor:
    """[N, S, g, o] -> [N, g, o]"""
    return with_groups(grad_rows).sum(1)


def of_cases(rows: Tensor, grad_rows: Tensor, inputs: int) -> Tensor:
    """Σ_s d conj(r)ᵀ of every case, [N, g, o, i], at least in float32."""
    d = with_groups(grad_rows)
    cases, _, g, o = d.shape
    if not (rows.is_floating_point() or rows.is_complex()):
        places = rows.clamp(min=0) + inputs * torch.arange(cases, device=rows.device).unsqueeze(1)
        d = torch.where((rows >= 0).unsqueeze(-1), d.squeeze(2), 0).flatten(0, 1)
        return d.new_zeros(cases * inputs, o).index_add(0, places.flatten(), d).view(cases, 1, inputs, o).mT
    x = (rows if rows.dim() == 4 else rows.unsqueeze(2)).to(d.dtype).expand(cases, -1, -1, -1).conj()
    if 1 in (o, x.shape[-1]):  # thousands of matrix products of one number each are slow
        return (d.unsqueeze(-1) * x.unsqueeze(-2)).sum(1)
    with torch.autocast(d.device.type, enabled=False):
        return torch.einsum("nsgo,nsgi->ngoi", d, x)


def with_groups(grad_rows: Tensor) -> Tensor:
    d = grad_rows if grad_rows.dim() == 4 else grad_rows.unsqueeze(2)
    return d.to(torch.promote_types(d.dtype, torch.float32))


def by_jacobian(use: Use, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """A use of every parameter behind a function of its own, and what is left of the use."""
    rest = {role: expression for role, expression in use.exprs.items() if expression[0].function is None}
    for role in use.exprs.keys() - rest.keys():
        value, canonical = use.exprs[role]
        assert value.function is not None, "bug in kfac_fx: a function of nothing"
        for slice_ in value.slices:
            shape = shapes[slice_.parameter]
            bound = Bound(slice_.parameter, Layout(shape), one_by_one(shape))
            of_complex = value.function.meta["val"].is_complex()
            case = PerCase(canonical, jacobian_of(value.function, slice_.parameter), of_complex)
            yield replace(use, parameters={"weight": bound}, exprs={}, attrs=unmasked(use), through=(case,))
    if rest or use.parameters:
        yield replace(use, exprs=rest) if use.exprs else use


def as_per_case(use: Use, matrices: bool = False) -> Use | None:
    """The use of one parameter that scales or shifts, over the matrix of its elements; None of another.

    matrices: also of a small matrix with several inputs.
    """
    ((role, bound),) = use.parameters.items()
    elements = one_by_one(bound.layout.shape)
    if role == "weight" and same(bound.layout, elements):
        return use
    small = matrices and math.prod(bound.layout.shape) ** 2 <= LARGEST_JACOBIAN
    scales = bound.layout.result[2:] in ((), (1,))
    if not (scales or small) or not all(step.keeps_elements for step in use.through):
        return None
    through = (*(step for step in use.through if not isinstance(step, Transposed)), PerCase(bound.layout))
    weight = Bound(bound.parameter, Layout(elements.shape), elements, bound.scale)
    return replace(use, parameters={"weight": weight}, attrs=unmasked(use), through=through)


def one_by_one(shape: Shape) -> Layout:
    """[elements, 1, 1]"""
    return Layout(shape).reshape((math.prod(shape), 1, 1))


def same(first: Layout, second: Layout) -> bool:
    mine, its = (view_through(layout, unallocated(layout.shape)) for layout in (first, second))
    return mine is not None and its is not None and mine.shape == its.shape and mine.stride() == its.stride()


def unmasked(use: Use) -> dict[str, Any]:
    """Padding is in the gradient of a case; what is sent back from there is nothing."""
    return {name: value for name, value in use.attrs.items() if name != ROW_MASK}


# --- in a graph -------------------------------------------------------------------------------------------------------


def small_functions(
    program: Program, label: Mapping[fx.Node, Label], nodes: Iterable[fx.Node], in_pieces: AbstractSet[str]
) -> dict[fx.Node, ParameterExpr]:
    """Those of the nodes that are functions of parameters and constants alone, and small, as expressions: a slice for
    every parameter, all of it. A parameter that another use has in pieces is none of them."""
    exprs: dict[fx.Node, ParameterExpr] = {}
    for node in nodes:
        shape = static_shape(node)
        elements = elements_of_jacobians(program, label, node)
        if shape is None or not all(0 < number <= LARGEST_JACOBIAN for number in elements.values()):
            continue
        sizes = {name: tuple(program.parameters[name].shape) for name in elements}
        differentiable = node.meta["val"].is_floating_point() or node.meta["val"].is_complex()
        if in_pieces.isdisjoint(sizes) and differentiable and is_function(node):
            slices = tuple(slice_of(name, unallocated(size)) for name, size in sizes.items())
            exprs[node] = ParameterExpr(shape, slices, function=node)
    return exprs


def elements_of_jacobians(program: Program, label: Mapping[fx.Node, Label], node: fx.Node) -> dict[str, int]:
    """The size of the Jacobian of a node by each parameter behind it, if the node's size is known."""
    if (shape := static_shape(node)) is None:
        return {}
    behind_it = sorted(parameters_behind(node, label))
    return {name: math.prod((*shape, *program.parameters[name].shape)) for name in behind_it}


def too_large(program: Program, label: Mapping[fx.Node, Label], node: fx.Node) -> str:
    """That a node is a function of parameters with too large a Jacobian, as the end of a sentence; "" if it is not."""
    elements = {} if node.op == "get_attr" else elements_of_jacobians(program, label, node)
    largest = max(elements, key=lambda name: elements[name], default="")
    if not largest or elements[largest] <= LARGEST_JACOBIAN or not is_function(node):
        return ""
    return (
        f": what enters is a function of parameters, and its Jacobian by {largest} would have {elements[largest]:,} "
        f"elements, which is more than {LARGEST_JACOBIAN:,}"
    )


def has_size_of_inputs(program: Program, node: fx.Node) -> str:
    """That a node is a function of parameters with a size of the inputs, other than that of the cases, as the end of a
    sentence; "" if it is not."""
    varies = isinstance(node.meta.get("val"), Tensor) and static_shape(node) is None
    varies = varies and program.cases not in symbolic_sizes(node)
    if node.op == "get_attr" or not varies or not is_function(node, lambda inner: is_leaf(inner) or is_size(inner)):
        return ""
    return (
        ": what enters is a function of parameters, and has a size of the inputs, which may vary. If it does not, fix "
        "it in forward, as in x = x.reshape(len(x), 128, 64) for inputs of 128 positions: the block is exact where it "
        "is small"
    )


def in_pieces(program: Program) -> set[str]:
    """The parameters of which an expression has a part."""
    slices = [slice_ for expression in program.parameter_exprs.values() for slice_ in expression.slices]
    sizes = {name: parameter.numel() for name, parameter in program.parameters.items()}
    return {slice_.parameter for slice_ in slices if math.prod(slice_.shape) < sizes[slice_.parameter]}


def static_shape(node: fx.Node) -> Shape | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def is_function(node: fx.Node, leaf: Callable[[fx.Node], bool] | None = None) -> bool:
    """Whether nothing but parameters and constants goes into it, and nothing but its value comes out: what is written
    in place is memory that is made on the way, and made again where the function is run. Inside of torch.func.vmap a
    function has a value for every one that is mapped over, and no Jacobian of its own. leaf: `is_leaf`, or more."""
    leaf = leaf or is_leaf
    inside = [operation for operation in behind(node, leaf) if not leaf(operation)]
    plain = all(operation.op in ("call_function", "call_method") for operation in inside)
    return plain and not any(
        is_random(operation)
        or op_name(operation).startswith((REGION, ADD_BATCH_DIM))
        or (changes_memory(operation) and memory_owner(operation).op == "get_attr")
        for operation in inside
    )


def behind(node: fx.Node, leaf: Callable[[fx.Node], bool] | None = None) -> list[fx.Node]:
    """The node and all that it is computed from, up to the leaves, in graph order."""
    leaf = leaf or is_leaf
    nodes = ancestors([node], operands=lambda inner: [] if leaf(inner) else inner.all_input_nodes)
    return sorted(nodes)  # nodes compare by their places


def is_leaf(node: fx.Node) -> bool:
    """Whether a function of parameters takes the node's value as it is in the graph: a parameter, a constant, random
    numbers, or what a region without gradients has computed, as the vectors of a spectral norm."""
    from_region = op_name(node) == "getitem" and isinstance(node.args[0], fx.Node) and no_grad_region(node.args[0])
    return node.op == "get_attr" or from_region or is_drawn(node)


def is_drawn(node: fx.Node) -> bool:
    """Whether the node's value are random numbers that are written once, into new memory or into a buffer that is read
    nowhere else."""
    if op_name(node) not in FILLED:
        return op_name(node) in DRAWN
    memory = node.args[0]
    if not isinstance(memory, fx.Node) or len(memory.users) != 1 or any(map(changes_memory, node.users)):
        return False
    return memory.op == "get_attr" or op_name(memory).startswith("empty")


def jacobian_of(node: fx.Node, parameter: str) -> Computed:
    """The Jacobian, [elements of the node's tensor, elements of the parameter]."""
    leaves = [leaf for leaf in behind(node) if is_leaf(leaf)]
    number = next(n for n, leaf in enumerate(leaves) if leaf.op == "get_attr" and leaf.target == parameter)
    return Computed(Jacobian(function_of(node), number), tuple(leaves))


def function_of(node: fx.Node) -> fx.GraphModule:
    """The leaves behind a node, in graph order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for n, leaf in enumerate(filter(is_leaf, behind(node))):
        copies[leaf] = graph.placeholder(f"leaf_{n}")
    for operation in behind(node):
        if operation not in copies:
            copies[operation] = graph.node_copy(operation, lambda operand: copies[operand])
    graph.output(copies[node])
    return fx.GraphModule(nn.Module(), graph)


def without_history(function: nn.Module, arguments: Iterable[Tensor]) -> list[Tensor]:
    """The arguments without their history; copies for a function that writes into them, which the graph does, too."""
    assert isinstance(function, fx.GraphModule), "bug in kfac_fx: a function without a graph"
    writes = any(writes_elsewhere(op_name(node)) for node in function.graph.nodes)
    return [argument.detach().clone() if writes else argument.detach() for argument in arguments]


class Jacobian(nn.Module):
    """The Jacobian of a function by one of its arguments, row by row of its value; of the real and imaginary parts of a
    complex one."""

    def __init__(self, function: nn.Module, number: int) -> None:
        super().__init__()
        self.function, self.number = function, number

    def forward(self, *leaves: Tensor) -> Tensor:
        fixed = without_history(self.function, leaves)
        at = fixed[self.number]

        def value(changed: Tensor) -> Any:
            return real_numbers(self.function(*fixed[: self.number], changed, *fixed[self.number + 1 :])).reshape(-1)

        if torch.compiler.is_compiling():  # autograd's own function cannot be compiled
            elements: Tensor = torch.func.jacrev(value)(at).reshape(-1, at.numel())
            return elements.detach()
        with torch.enable_grad():  # torch.func refuses to run where hooks look at what is saved for a backward
            result = value(at.requires_grad_())
            rows = torch.eye(result.numel(), dtype=result.dtype, device=result.device)
            (rowwise,) = torch.autograd.grad(result, at, rows, is_grads_batched=True)
        return rowwise.reshape(-1, at.numel())  # of a single number, too


EXAMPLES = {
    "exp": WeightExample(torch.exp, {"w": (4, 4)}),
    "jacobian": WeightExample(lambda w: w.softmax(1), {"w": (4, 4)}),
}
