"""Uses taken apart: where in the matrix [g, o, i] of a use the elements of each parameter are, and the uses of these.

    linear(x, torch.cat([w, v * e]))    w at outputs 0:4, v at outputs 4:6, and e a gain of the latter

Each part is a use of the same layer on a region of its matrix, with the functions that its parameter goes through, see
`elementwise`. Outputs that are a parameter's own have gradient rows of their own, inputs have rows, and groups have
both, so each part is exact. Gains of normalized weights are layers of their own.

    conv1d(x, g v / |v|)          g for every filter: outputs
    conv_transpose1d(x, ...)      g for every channel of the input, as torch counts them: inputs, [1, channels, kernel]
    conv1d(x, ..., dim=2)         g for every place in the kernel: inputs, [channels, kernel, 1]
    linear(x, a * exp(e))         exp(e) for every output, and e behind a function of every element

A gain multiplies what the filters compute without it: a layer of one input and one output a filter, which is exact.
Where a gain belongs to inputs, its own gradient at every position stands for gradient rows, beside rows of ones.

**Elements**: weights of which every element is a function of one element of a parameter: masks, bounds, scales of
noise.

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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import LayerError
from ..graphs.labels import everything_behind, has_gradient
from ..ir import Bound, Program, Use
from ..matrix import Layout, Shape
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    Computed,
    NodeValues,
    Parametrization,
    Piece,
    Region,
    RowPair,
    RowsStep,
    Value,
    WeightExample,
    apply_views,
    constant_along,
    layout_in,
    region_in,
    unallocated,
    view_of,
    view_steps,
    viewed,
)
from .functions import (
    DERIVATIVES,
    Constant,
    Derivative,
    Diagonal,
    Elementwise,
    PerCase,
    multiplied,
    placed,
    side_of,
    without_history,
)
from .normalized import Scaled, WithGain
from .product import uses_of_factors

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


NOTHING = (0, 0)


@dataclass(frozen=True)
class Sliced(Parametrization):
    """The parameters of the use are a region of the layer's matrix: (start, stop) of groups, outputs and inputs."""

    keeps_elements = True

    region: Region

    def step(self) -> RowsStep:
        region = self.region
        return lambda both, tensors: in_region(*both, region)


def in_region(rows: Tensor, grad_rows: Tensor, region: Region) -> RowPair:
    """The rows and gradient rows that belong to a part of the matrix: its groups and inputs, its groups and outputs."""
    groups, outputs, inputs = (slice(*ends) for ends in region)
    grad_rows = grad_rows[:, :, groups, outputs] if grad_rows.dim() == 4 else grad_rows[..., outputs]
    if rows.is_floating_point():
        return rows[:, :, groups, inputs] if rows.dim() == 4 else rows[..., inputs], grad_rows
    inside = (rows >= inputs.start) & (rows < inputs.stop)
    return torch.where(inside, rows - inputs.start, -1), grad_rows


def region_of(use: Use) -> Region | None:
    """The region of the layer's matrix that a use has; None if it has all of it."""
    return next((step.region for step in use.through if isinstance(step, Sliced)), None)


@dataclass(frozen=True)
class Part:
    """Some elements of a parameter in the matrix of a use.

    view: of the parameter, as [g, o, i]; [g, o, 1] for a bias.
    region: where they are in the matrix.
    scale: the matrix has a multiple of them.
    piece: the piece of the parameter that they are; None for a parameter that is not cut.
    through: the functions that the parameter goes through.
    """

    role: str
    parameter: str
    view: Tensor
    region: Region
    scale: float = 1.0
    piece: Piece | None = None
    through: tuple[Parametrization, ...] = ()


def parts_of(use: Use, program: Program) -> list[Part] | None:
    """The parameters in a use's matrix, without roles whose place in it is not known. None if there are none, if a
    whole parameter is copied on the way, and for a composite layer."""
    if program.layers[use.layer].parts or any(isinstance(step, PerCase) for step in use.through):
        return None
    parts: list[Part] = []
    for role, bound in use.parameters.items():
        view = viewed(bound.layout, unallocated(bound.used.shape))
        if view is None:
            return None
        parts.append(Part(role, bound.parameter, as_matrix(view), everywhere(as_matrix(view)), bound.scale))
    for role in use.exprs:
        parts += parts_of_expr(use, role, program) or []
    return parts or None


def parts_of_expr(use: Use, role: str, program: Program, exact: bool = False) -> list[Part] | None:
    """See `whole_uses`."""
    form, (expr, canonical) = program.layers[use.layer].forms[use.form], use.exprs[role]
    matrix = viewed(canonical, unallocated(expr.shape))
    parts: list[Part] = []
    for slice_ in expr.slices:
        try:
            layout = form.layout(role, Layout(slice_.shape), use.attrs)
        except LayerError:
            return None
        box = unallocated(expr.shape)[tuple(slice(*ends) for ends in slice_.box)]
        place, view = viewed(layout, box), viewed(layout, view_of(slice_))
        if matrix is None or place is None or view is None:
            return None
        region = region_in(as_matrix(matrix), as_matrix(place))
        if region is None:
            return None
        part = Part(role, slice_.parameter, as_matrix(view), region, slice_.scale, None, slice_.through)
        sided = sides_of(part, tuple(program.parameters[slice_.parameter].shape)) is not None
        if slice_.through and not sided and (exact or not spreads(part.through)):
            return None
        parts.append(part)
    return parts


def taken_apart(use: Use, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """A use for every part of the weight, with the bias of its outputs, and for every bias that has no such weight. A
    part that goes through functions is on its own: they are not those of its partner. So is a bias that is the weight
    itself."""
    biases = [part for part in parts if part.role == "bias"]
    for part in sorted((part for part in parts if part.role == "weight"), key=lambda part: part.region):
        bias = next((bias for bias in biases if bias.region[:2] == part.region[:2] and not bias.through), None)
        if bias is None or part.through or share_elements(part, bias):
            yield (alone := use_of(use, part.region, [part], shapes))
            yield from gains_of(alone, shapes)
        else:
            biases.remove(bias)
            yield use_of(use, part.region, [part, bias], shapes)
    for bias in biases:
        yield use_of(use, (*bias.region[:2], NOTHING), [bias], shapes)


def share_elements(part: Part, other: Part) -> bool:
    """Whether one parameter, or one piece, has both roles: `layer_norm(x, (3,), g, 2 * g)`."""
    return (part.parameter, part.piece) == (other.parameter, other.piece)


def whole_uses(use: Use, shapes: Mapping[str, Shape], exact: bool = False) -> list[Use] | None:
    """The uses that a use is taken apart into if its expressions are products, or all of a parameter each in any order;
    None if one is not. The matrix of a transposed convolution, which is no view of its weight, has such uses only.

    exact: None also where functions of the parameters have no side of the matrix.
    """
    whole: dict[str, Bound] = dict(use.parameters)
    apart: list[Use] = []
    for role, (expr, canonical) in use.exprs.items():
        for slice_ in expr.slices:
            shape = shapes[slice_.parameter]
            used = layout_in(Piece(slice_.parameter, 0, 0, *shape[:1] or (1,)), shape, view_of(slice_))
            if slice_.shape != expr.shape or used is None:
                return None
            bound = Bound(slice_.parameter, used, canonical, slice_.scale)
            elsewhere = any(other.parameter == slice_.parameter for other in whole.values())
            if role not in whole and not slice_.through and not elsewhere:
                whole[role] = bound
                continue
            if slice_.through and role != "weight":
                return None
            side = side_of(slice_.through, (*canonical.result, 1)[:3], constant_in(bound.layout))
            through = placed_or_spread(slice_.through, bound.layout, side, slice_.parameter)
            if through is None or (exact and slice_.through and side is None):
                return None
            alone = replace(use, parameters={role: bound}, exprs={}, through=through)
            apart += [alone, *gains_of(alone, shapes)]
        if expr.products and role == "weight":
            apart += uses_of_factors(use, expr, canonical, reads_ids(use))
    return [*apart, *([replace(use, parameters=whole, exprs={})] if whole else [])]


def use_of(use: Use, region: Region, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Use:
    layouts = {role: bound.layout for role, bound in use.parameters.items()}
    layouts |= {role: layout for role, (_, layout) in use.exprs.items()}
    g, o, i = layouts["weight"].result if "weight" in layouts else (*layouts["bias"].result, 0)
    bound = {part.role: bound_to(part, shapes[part.parameter]) for part in parts}
    all_of_it = region == ((0, g), (0, o), (0, i))
    first = parts[0]
    side = sides_of(first, shapes[first.parameter])
    functions = placed_or_spread(first.through, bound[first.role].layout, side, first.parameter, first.piece)
    assert functions is not None, f"bug in kfac_fx: functions of {first.parameter} without a place"
    sliced = () if all_of_it else (Sliced(region),)
    return replace(use, parameters=bound, exprs={}, through=(*use.through, *sliced, *functions))


def sides_of(part: Part, shape: Shape) -> str | None:
    return side_of(part.through, part.view.shape, lambda dim, axis: constant_along(part.view, shape, dim, axis))


def bound_to(part: Part, shape: Shape) -> Bound:
    piece = part.piece or Piece(part.parameter, 0, 0, *shape[:1] or (1,))
    layout = layout_in(piece, shape, part.view if part.role == "weight" else part.view[..., 0])
    assert layout is not None, f"bug in kfac_fx: a part of {part.parameter} that is not what was cut"
    name = part.parameter if part.piece is None else part.piece.name
    return Bound(name, layout, Layout(layout.result), part.scale)


def partial(view: Tensor, shape: Shape) -> bool:
    return view.numel() < math.prod(shape)


def as_matrix(view: Tensor) -> Tensor:
    """[g, o, i], also of a bias."""
    return view if view.dim() == 3 else view.unsqueeze(-1)


def everywhere(matrix: Tensor) -> Region:
    g, o, i = ((0, int(size)) for size in matrix.shape)
    return g, o, i


# --- gains ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain(Parametrization):
    """The parameter multiplies every slice of the filters of another one by a number of its own.

    of: the function that makes the filters.
    matrix: from the other parameter to the matrix [g, o, i] of the use.
    side: where the slices lie, "outputs" or "inputs".
    repeats: (before, after); the numbers of slices along the side, flattened, are those of [before, slices, after].
    ids: whether the rows are ids.
    """

    default = "full", "its elements multiply slices of another parameter"

    of: WithGain
    matrix: Layout
    side: str
    repeats: tuple[int, int] = (1, 1)
    ids: bool = False

    @property
    def nodes(self) -> dict[str, Value]:
        return {"filters": self.of.operand}

    @property
    def of_outputs(self) -> bool:
        """Whether every output has a gain of its own, in their order."""
        return self.side == OUTPUTS and self.repeats == (1, 1)

    def step(self) -> RowsStep:
        """rows [N, S, g, i] with filters [g, o, i], gradient rows [N, S, g, o] -> [N, S, slices, 1] both.

        One gain an output: what the output is without it, and its gradient. Else Σ d u r, over what the slice
        multiplies, is the gradient of the gain at a position, and the rows are ones.
        """
        filters, to_matrix = self.of.filters(), view_steps(self.of.layout, self.matrix)
        of_outputs, inputs, (before, after), ids = self.of_outputs, self.side == INPUTS, self.repeats, self.ids

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, grad_rows = both[0], both[1] if both[1].dim() == 4 else both[1].unsqueeze(2)
            matrix = apply_views(filters(tensors["filters"]), to_matrix).to(grad_rows)
            if ids:
                outputs = F.embedding(rows.clamp(min=0), matrix[0].mT).unsqueeze(2)
                outputs = torch.where((rows >= 0)[..., None, None], outputs, 0)
                if inputs:
                    return rows, (grad_rows * outputs).sum(-1)
            elif inputs:
                rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
                sums = rows * torch.einsum("nsgo,goi->nsgi", grad_rows, matrix)
            else:
                outputs = torch.einsum("nsgi,goi->nsgo", rows if rows.dim() == 4 else rows.unsqueeze(2), matrix)
            if of_outputs:
                return outputs.flatten(2).unsqueeze(-1), grad_rows.flatten(2).unsqueeze(-1)
            sums = (sums if inputs else outputs * grad_rows).flatten(2).unflatten(2, (before, -1, after)).sum((2, 4))
            return torch.ones_like(sums).unsqueeze(-1), sums.unsqueeze(-1)

        return step


def gains_of(use: Use, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """Beside the use of a weight with a gain that of the gain, if there is one for every slice in their order."""
    (bound,) = use.parameters.values()
    step = next((step for step in use.through if isinstance(step, WithGain) and step.gain is not None), None)
    if step is None or step.gain is None:
        return
    slices = 1 if step.dim is None else bound.layout.shape[step.dim]
    place = repeats(slice_numbers(bound.layout, step.dim), slices)
    shape = shapes[step.gain.parameter]
    if place is None or math.prod(shape) != slices:
        return
    side, around = place
    gain = Gain(step, bound.layout, side, around, reads_ids(use))
    matrix = (1, 1, slices) if gain.ids and side == INPUTS else (slices, 1, 1)
    weight = Bound(step.gain.parameter, Layout(shape), Layout(shape).reshape(matrix), step.gain.scale * bound.scale)
    before = tuple(other for other in use.through if not isinstance(other, Diagonal))
    behind = placed(step.gain.through, weight.layout, OUTPUTS if matrix[0] == slices else INPUTS)
    yield replace(use, parameters={"weight": weight}, through=(*before, gain, *behind))


def slice_numbers(layout: Layout, dim: int | None) -> Tensor:
    """The number of the slice that every element of a matrix [g, o, i] is in."""
    sizes = [1] * len(layout.shape)
    if dim is None:
        return layout.apply(torch.zeros(sizes, dtype=torch.int32).expand(layout.shape))
    sizes[dim] = layout.shape[dim]
    return layout.apply(torch.arange(layout.shape[dim], dtype=torch.int32).view(sizes).expand(layout.shape))


def constant_in(layout: Layout) -> Constant:
    """For `Diagonal.sides`, of a whole parameter: found by trying, since the matrix may be no view of it."""

    def constant(dim: int, axis: int) -> bool:
        slices = slice_numbers(layout, dim)
        return bool((slices == slices.narrow(axis, 0, 1)).all())

    return constant


def repeats(slices: Tensor, count: int) -> tuple[str, tuple[int, int]] | None:
    """(side, (before, after)) of the numbers of slices in a matrix; None if they lie otherwise."""
    outputs, inputs = bool((slices == slices[..., :1]).all()), bool((slices == slices[:, :1]).all())
    if not outputs and not inputs:
        return None
    flat = (slices[..., 0] if outputs else slices[:, 0]).flatten()
    after = int((flat == flat[0]).int().cumprod(0).sum())
    before, rest = divmod(len(flat), count * after) if count > 1 else (1, 0)
    wanted = torch.arange(count, dtype=flat.dtype).repeat_interleave(after).repeat(before)
    return (OUTPUTS if outputs else INPUTS, (before, after)) if not rest and torch.equal(flat, wanted) else None


def reads_ids(use: Use) -> bool:
    value = use.input.meta.get("val")
    return use.layer == "embedding" or (isinstance(value, Tensor) and not has_gradient(use.input))


MASK = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]  # an input is not used
NOISE = [[0.5, -1.0, 2.0, 1.0], [1.0, 0.2, -0.4, 3.0], [-2.0, 1.0, 1.0, 0.1], [0.3, -0.7, 1.0, -1.0]]
EXAMPLES = {
    "mask": WeightExample(lambda w: w * torch.tensor(MASK).to(w), {"w": (4, 4)}),
    "bounds and noise": WeightExample(
        lambda w, r: w.tril() + torch.sigmoid(r) * torch.tensor(NOISE).to(r), {"w": (4, 4), "r": (4, 4)}
    ),
    "slices": WeightExample(lambda w, v: torch.cat([w[1:], v]), {"w": (4, 4), "v": (1, 4)}),
    "multiple": WeightExample(lambda w: 1 - 0.3 * w, {"w": (4, 4)}),
    "gain": WeightExample(lambda w, e: w * e.exp(), {"w": (4, 4), "e": (4, 1)}),
}
