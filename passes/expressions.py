"""Expressions: which elements of parameters a tensor holds that is computed from parameters alone.

    w[:, :4].t()        split, chunk, unbind, select       a part of a parameter, in another order
    frozen[:4]                                             a part of a constant, beside a parameter
    torch.cat([q_bias, zeros, v_bias])                     parts of several, and constants
    b = q_bias.clone(); b[4:8].zero_()                     parts of one
    1 - 0.5 * w                                            a multiple, and a constant
    torch.exp(s), w / w.norm(), a @ b, softmax(s)          functions and products, see `passes.parametrizations`

Elements that are only moved and scaled are followed without computing anything: a part of a parameter is a view of a
tensor without data, and the strides of the view say which elements it has.

**Cut**: parameters that are used in pieces become pieces, each registered on its own; so do parameters whose use is put
together from several.

    linear(x, w[:4], b[:4])                          linear(w[0:4], b[0:4])
    linear(y, w[4:], b[4:])                          linear(w[4:12], b[4:12])

    linear(x, w, cat([q, zeros, v]))                 linear(w[0:4], q), linear(w[4:8]), linear(w[8:12], v)

    linear(x, w), and the user asks for w[0:4]       linear(w[0:4]), linear(w[4:12])

A use is taken apart along its matrix [g, o, i]: what reaches outputs of its own, or comes from inputs of its own, has
rows of its own, so that every part is an exact registration. A parameter is cut along one dimension, where any of its
uses begins or ends and where its partner in a use, a weight's bias, is cut. A stack of stacks, as w[layer][expert], is
cut into its members. Parameters that cannot be cut so stay whole; the uses that would need it are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from .errors import fatal, where
from .graphs.edit import attribute, is_complex, shares_memory
from .graphs.labels import Label, ancestors, differentiated, labels_of, parameters_behind, use_edges
from .graphs.operations import (
    CASTS,
    JOINS,
    PARTS,
    PERMUTES,
    SHAPE_ONLY,
    bound_parameter,
    complex_parameter,
    computed,
    dims_after,
    op_name,
)
from .ir import ELEMENTS, Note, Program, Use
from .matrix import Shape
from .parametrization import (
    ParameterExpr,
    Piece,
    Slice,
    axis_along,
    concatenated,
    expr_of,
    is_one_slice,
    multiple_of,
    narrowed_slice,
    nodes_of,
    permuted,
    ranges,
    seen_part,
    slice_of,
    unallocated,
    unsqueezed,
    view_of,
    without_data,
)
from .parametrizations.functions import (
    DERIVATIVES,
    Elementwise,
    by_jacobian,
    elementwise,
    in_pieces,
    is_function,
    small_functions,
)
from .parametrizations.normalized import (
    MAKERS,
    BySlice,
    Centered,
    Scaled,
    WithGain,
    dim_of,
    is_mean,
    laid_out,
    scaled_by,
)
from .parametrizations.parts import (
    NOTHING,
    OPERATIONS,
    Part,
    by_element,
    partial,
    parts_of,
    parts_of_expr,
    sides_of,
    taken_apart,
    whole_uses,
)
from .parametrizations.product import MULTIPLIES, ProductFactor, added, complete, product_of, reshaped, sum_of
from .torch_private import WEIGHT_NORM

RESHAPES = {"reshape", "flatten", "view", "unflatten", "reshape_as"}  # views, unless elements have to be copied
MOVES_ELEMENTS = RESHAPES | PERMUTES | PARTS | {"squeeze", "unsqueeze", "expand", "expand_as", "view_as", "as_strided"}
FUNCTIONS = {*DERIVATIVES, "batch_norm", WEIGHT_NORM}
WRITES = {"zero_", "fill_", "copy_"}
ExprValue = Any  # a ParameterExpr, a tuple of them, or a number


def express(program: Program) -> Program:
    """Note the expression of every such tensor that an operation without a rule reads, unless the tensor is a view of a
    whole parameter."""
    expressions, behind = Expressions(program), ancestors(program.outputs)
    values, exprs = expressions.values, dict[fx.Node, ParameterExpr]()
    others: list[fx.Node] = []
    pieces: dict[fx.Node, set[str]] = {}
    for node in program.graph.nodes:
        value = values.get(node)
        pure = value is None and expressions.label[node] is Label.PURE and ELEMENTS not in node.meta
        if not pure and not isinstance(value, ParameterExpr):
            continue
        readers = [
            user for user in node.users if user in behind and user not in values and node in differentiated(user)
        ]
        read = any(op_name(user) not in WRITES for user in readers)
        plain = (
            node.op == "get_attr" or bound_parameter(node, program.shapes) or complex_parameter(node, program.shapes)
        )
        value = complete(value, node) if isinstance(value, ParameterExpr) and value.products else value
        if plain or not (read or node in program.outputs):
            continue
        enters = any(expressions.label[user].activation for user in readers)
        if isinstance(value, ParameterExpr):
            exprs[node] = value
            pieces |= {node: {part.parameter for part in value.slices if is_part(part, program)}} if enters else {}
        elif enters:
            others.append(node)
    functions = functions_next_to_pieces(program.but(parameter_exprs=exprs), expressions.label, others, pieces)
    return program.but(parameter_exprs={**exprs, **functions})


def functions_next_to_pieces(
    program: Program, label: Mapping[fx.Node, Label], others: Sequence[fx.Node], pieces: Mapping[fx.Node, set[str]]
) -> dict[fx.Node, ParameterExpr]:
    """The small functions that enter the computation. A parameter in pieces that another function reads whole, as the
    lengths `(v ** 2).sum(1)` of reflections read their vectors `v[0]`, `v[1]`, cannot be cut: its pieces are small
    functions of all of it, too, if all of these are small.

    pieces: the parameters of which a node has a part.
    """
    in_pieces = set[str]().union(*pieces.values())
    read = {node: wholes(program, label, node) & in_pieces for node in others}
    uncut = set[str]().union(*read.values())
    while True:
        places = {**read, **{node: names for node, names in pieces.items() if names & uncut}}
        functions = small_functions(program, label, places, in_pieces - uncut)
        large = set[str]().union(*(names & uncut for node, names in places.items() if node not in functions))
        if not large:
            return functions
        uncut -= large


def is_part(slice_: Slice, program: Program) -> bool:
    return math.prod(slice_.shape) < program.parameters[slice_.parameter].numel()


def overlaps(view: Tensor) -> bool:
    """Whether an element of memory may be at several places of the view."""
    extent = 1
    for stride, size in sorted(pair for pair in zip(view.stride(), view.shape, strict=True) if pair[1] > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


class Expressions:
    """The expressions of a graph. values: by node, of those that have one."""

    def __init__(self, program: Program) -> None:
        self.root = program.root
        self.label = labels_of(program)
        self.values: dict[fx.Node, ExprValue] = {}
        for node in program.graph.nodes:
            value = self.value(node)
            if value is not None:
                self.values[node] = value

    def value(self, node: fx.Node) -> ExprValue | None:
        if node.op == "get_attr" and self.label[node] is Label.PURE:
            view = unallocated(tuple(attribute(self.root, str(node.target)).shape))
            return ParameterExpr(tuple(view.shape), (slice_of(str(node.target), view),))
        if node.op == "get_attr" and self.label[node] is Label.CONST:
            held = attribute(self.root, str(node.target))
            return ParameterExpr(tuple(held.shape), ()) if isinstance(held, Tensor) else None
        if node.op not in ("call_function", "call_method") or self.label[node] not in (Label.PURE, Label.CONST):
            return None
        try:
            return self.number(node) if self.label[node] is Label.CONST else self.tensor(node)
        except (RuntimeError, TypeError, ValueError) as error:
            if fatal(error):
                raise
            return None  # arguments that are no numbers here, views that would copy

    def number(self, node: fx.Node) -> ExprValue | None:
        """A size of a tensor, or what is computed from sizes; a part of a constant."""
        if not node.all_input_nodes or any(operand not in self.values for operand in node.all_input_nodes):
            return None
        if op_name(node) in SHAPE_ONLY or not any(
            isinstance(self.values[n], ParameterExpr) for n in node.all_input_nodes
        ):
            result = computed(node, without_data(node.args, self.values), node.kwargs)
            return None if isinstance(result, Tensor) else result
        if op_name(node) in MOVES_ELEMENTS | CASTS:
            result = computed(node, without_data(node.args, self.values), node.kwargs)
            if isinstance(result, (list, tuple)):
                return tuple(ParameterExpr(tuple(part.shape), ()) for part in result)
            return ParameterExpr(tuple(result.shape), ())
        return None

    def tensor(self, node: fx.Node) -> ExprValue | None:
        value = self.followed(node)
        return self.by_element(node) if value is None and op_name(node) in OPERATIONS else value

    def followed(self, node: fx.Node) -> ExprValue | None:
        name, arguments = op_name(node), node.args
        if name in JOINS:
            return self.joined(node, name == "stack")
        if name == "rsub" or (name == "sub" and not isinstance(arguments[0], fx.Node)):
            constant, operand = arguments[:2] if name == "sub" else arguments[1::-1]
            times: Any = arguments[2] if len(arguments) > 2 else node.kwargs.get("alpha", 1.0)
            return self.shifted(operand, constant, -float(times))
        if name in MULTIPLIES and all(isinstance(argument, fx.Node) for argument in arguments[:2]):
            return self.product(node, *arguments[:2])
        if name == "einsum" and len(arguments) == 3:
            return product_of(node, [self.operand(side, of_parameters=True) for side in arguments[1:]], self.root)
        if name in ("addmm", "baddbmm") and len(arguments) == 3:
            factors = [self.operand(side, of_parameters=True) for side in arguments[1:]]
            return added(node, self.operand(arguments[0]), factors, self.root)
        first = arguments[0] if arguments else None
        if not isinstance(first, fx.Node) or first not in self.values:
            return None
        value = self.values[first]
        if isinstance(value, tuple):
            return value[arguments[1]] if name == "getitem" else None  # type: ignore[index]
        rule = RULES.get(name)
        return None if rule is None or not isinstance(value, ParameterExpr) else rule(self, node, first, value)

    # --- operations -------------------------------------------------------------------------------------------------

    def same(self, node: fx.Node, operand: fx.Node, value: ParameterExpr) -> ExprValue:
        return value

    def viewed(self, node: fx.Node, operand: fx.Node, value: ParameterExpr) -> ExprValue | None:
        if value.products:
            return reshaped(node, value, self.values)
        if op_name(node) == "getitem" and not basic(node.args[1]):
            return None
        rest = without_data(node.args[1:], self.values)
        view = self.seen(node, value.slices[0], rest) if is_one_slice(value) else None
        if view is None and op_name(node) in PERMUTES:
            order = dims_after(node, len(value.shape), rest)
            turned = [permuted(slice_, order) for slice_ in value.slices]
            return ParameterExpr(tuple(value.shape[d] for d in order), tuple(turned))
        if view is None and op_name(node) in PARTS and not is_one_slice(value):
            shown = computed(node, (unallocated(value.shape), *rest), node.kwargs)
            several = isinstance(shown, (list, tuple))
            return tuple(seen_part(value, part) for part in shown) if several else seen_part(value, shown)
        return view

    def seen(self, node: fx.Node, slice_: Slice, rest: Any) -> ExprValue | None:
        view = view_of(slice_)
        result = computed(node, (view, *rest), node.kwargs)
        if op_name(node) in RESHAPES:
            result = view.view(result.shape)  # raises where the elements had to be copied
        if op_name(node) == "as_strided" and overlaps(result):
            return None
        several = isinstance(result, (list, tuple))
        return tuple(expr_of(part, slice_) for part in result) if several else expr_of(result, slice_)

    def multiple(self, node: fx.Node, operand: fx.Node, value: ParameterExpr) -> ParameterExpr | None:
        return multiple_of(value, factor(op_name(node), node))

    def summed(self, node: fx.Node, operand: fx.Node, value: ParameterExpr) -> ExprValue | None:
        other: Any = node.args[1]
        if op_name(node) == "sub" and isinstance(other, fx.Node):
            without = self.centered(node, operand, other)
            if without is not None:
                return without
        total = sum_of(node, value, self.values.get(other))
        total = self.shifted(operand, other, 1.0) if total is None else total
        return self.of_both(node, value, self.values.get(other)) if total is None else total

    def of_both(self, node: fx.Node, value: ParameterExpr, other: ExprValue | None) -> ParameterExpr | None:
        """The sum, or the difference, of two weights that have every element in the same place."""
        if not isinstance(other, ParameterExpr) or node.kwargs or len(node.args) > 2 or value.shape != other.shape:
            return None
        other = multiple_of(other, -1.0) if op_name(node) == "sub" else other
        slices = (*value.slices, *(other.slices if other is not None else ()))
        entire = all(slice_.shape == value.shape for slice_ in slices)
        several = len({slice_.parameter for slice_ in slices}) == len(slices) == 2
        return ParameterExpr(value.shape, slices) if entire and several and not value.products else None

    def product(self, node: fx.Node, left: Any, right: Any) -> ParameterExpr | None:
        """The product of a weight and a factor for its slices, or of matrices."""
        scaled_weight = self.scaled(node, left, right) if op_name(node) in ("mul", "div") else None
        return scaled_weight or product_of(
            node, [self.operand(side, of_parameters=True) for side in (left, right)], self.root
        )

    def joined(self, node: fx.Node, stack: bool) -> ParameterExpr | None:
        operands: Any = node.args[0]
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        assert isinstance(operands, (list, tuple)), "bug in kfac_fx: cat of something else than a list"
        parts = [self.operand(operand) for operand in operands]
        return concatenated([unsqueezed(part, dim) for part in parts] if stack else parts, dim)

    def operand(self, node: Any, of_parameters: bool = False) -> ParameterExpr:
        """A value, or a constant, or anything of parameters. Raises ValueError for anything else."""
        if isinstance(self.values.get(node), ParameterExpr):
            return self.values[node]  # type: ignore[no-any-return]
        if not isinstance(node, fx.Node) or self.label[node] not in ((Label.CONST, Label.PURE)[: 1 + of_parameters]):
            raise ValueError
        return ParameterExpr(self.shape_of(node), ())

    def shifted(self, operand: Any, constant: Any, sign: float) -> ExprValue | None:
        """A multiple of the operand and a constant that makes no new elements."""
        value = self.values.get(operand)
        if not isinstance(value, ParameterExpr):
            return None
        if isinstance(constant, fx.Node):
            if self.label[constant] is not Label.CONST:
                return None
            if torch.broadcast_shapes(value.shape, self.shape_of(constant)) != value.shape:
                return None
        return multiple_of(value, sign)

    def overwritten(self, node: fx.Node, base: fx.Node, value: ParameterExpr) -> ParameterExpr | None:
        """A tensor after constants were written into a slice of a copy: of itself, or of what it was copied from."""
        write: Any = node.args[1]
        copy = target = write.args[0]
        while shares_memory(copy) and op_name(copy) != "clone":
            copy = copy.args[0]
        constant = all(self.label[n] is Label.CONST for n in write.all_input_nodes if n is not target)
        if op_name(copy) != "clone" or op_name(write) not in WRITES or not constant or not is_one_slice(value):
            return None
        if copy is not base:
            return value if base.op == "get_attr" else None  # not what was written into
        if target.args[0] is not base:
            return None
        view = computed(target, (unallocated(value.shape), *without_data(target.args[1:], self.values)), target.kwargs)
        dim, (start, stop) = next(iter(ranges(view, value.shape).items()), (0, (0, 0)))
        if start == stop:
            return None  # not one slice
        ends = [(first, last) for first, last in ((0, start), (stop, value.shape[dim])) if first < last]
        return ParameterExpr(value.shape, tuple(narrowed_slice(value.slices[0], dim, *places) for places in ends))

    # --- functions of every element, or of every slice along a dimension ----------------------------------------------

    def function(
        self, node: fx.Node, operand: fx.Node, value: ParameterExpr, other: Shape | None = None
    ) -> ParameterExpr | None:
        """The value of a function of every element of `value`, or of every slice along a dimension.

        other: the shape of what `value` is multiplied with or divided by, if that does not depend on the parameter.
        """
        (slice_,) = value.slices
        name, plain = op_name(node), value
        if other is None and name in ("mul", "div") and [type(step) for step in slice_.through] == [Centered]:
            plain = ParameterExpr(value.shape, (replace(slice_, through=()),))
        layout = laid_out(plain, self.whole_shape(slice_))
        multiple = name in MAKERS and (slice_.scale != 1.0 or plain.slices[0].through)
        if layout is None or multiple or (other is not None and is_complex(node, self.root)):
            return None  # a complex factor would have to be conjugated
        make = MAKERS.get(name, elementwise)
        step = make(node, operand, layout) if other is None else scaled_by(node, operand, layout, other)
        if isinstance(step, WithGain):
            step = replace(step, gain=self.gain(step))
        return None if step is None else ParameterExpr(value.shape, (replace(slice_, through=(*slice_.through, step)),))

    def by_element(self, node: fx.Node) -> ParameterExpr | None:
        """The value of an operation of which every element is made of one of a parameter, and of what does not depend
        on that parameter."""
        size, arguments = self.sizes(node), list(dict.fromkeys(node.all_input_nodes))
        if any(self.label[argument].activation for argument in arguments) or not is_function(node):
            return None
        if is_complex(node, self.root):  # a complex number has no single derivative by a real one
            return None
        slices: list[Slice] = []
        for operand in arguments:
            value = self.values.get(operand)
            if not isinstance(value, ParameterExpr) or not is_one_slice(value) or value.shape != size:
                continue
            (slice_,) = value.slices
            bare = replace(slice_, through=tuple(step for step in slice_.through if not isinstance(step, Scaled)))
            layout = laid_out(ParameterExpr(size, (bare,)), self.whole_shape(slice_))
            others = [argument for argument in arguments if argument is not operand]
            if layout is None or any(slice_.parameter in parameters_behind(other, self.label) for other in others):
                return None
            steps = tuple(replace(step, gain=None) if isinstance(step, Scaled) else step for step in slice_.through)
            slices.append(replace(slice_, through=(*steps, by_element(node, operand, layout))))
        return ParameterExpr(slices[0].shape, tuple(slices)) if len(slices) == 1 else None

    def gain(self, step: WithGain) -> Slice | None:
        """The parameter that slices are multiplied by, if it is a whole one in its own order."""
        value = None if step.factor is None else self.values.get(step.factor)
        if step.factor is None or not isinstance(value, ParameterExpr) or not is_one_slice(value):
            return None
        slice_, shape = value.slices[0], self.whole_shape(value.slices[0])
        layout = laid_out(value, shape)
        if isinstance(step, Scaled) and step.divides and layout is not None:
            slice_ = replace(slice_, through=(*slice_.through, Elementwise(step.factor, layout, "reciprocal")))
        plain, size = all(isinstance(function, Elementwise) for function in slice_.through), math.prod(shape)
        return slice_ if plain and view_of(slice_).is_contiguous() and math.prod(slice_.shape) == size else None

    def whole_shape(self, slice_: Slice) -> Shape:
        """The shape of the slice's parameter."""
        return tuple(attribute(self.root, slice_.parameter).shape)

    def scaled(self, node: fx.Node, left: fx.Node, right: fx.Node) -> ParameterExpr | None:
        """The product of a weight and a factor, which may be another parameter or a number of the weight's own."""
        pairs = ((left, right), (right, left)) if op_name(node) == "mul" else ((left, right),)
        for operand, by in pairs:
            value, shape = self.values.get(operand), self.sizes(by)
            if not isinstance(value, ParameterExpr) or len(value.slices) != 1 or self.label[by].activation:
                continue
            behind, parameter = parameters_behind(by, self.label), {value.slices[0].parameter}
            if behind == parameter:
                scaled = self.function(node, operand, value)
                if scaled is not None or op_name(node) == "div":
                    return scaled
            scaled = None if shape is None or behind & parameter else self.function(node, operand, value, shape)
            if scaled is not None:
                return scaled
        return None

    def centered(self, node: fx.Node, operand: fx.Node, mean: fx.Node) -> ParameterExpr | None:
        """A weight without the mean of each of its filters."""
        value, shape = self.values.get(operand), self.sizes(mean)
        if not isinstance(value, ParameterExpr) or not is_one_slice(value) or shape is None or node.kwargs:
            return None
        (slice_,) = value.slices
        layout = laid_out(value, self.whole_shape(slice_))
        if layout is None or slice_.through or slice_.scale != 1.0 or dim_of(shape, layout) != 0:
            return None
        if not is_mean(mean, slice_, self.values):
            return None
        return ParameterExpr(value.shape, (replace(slice_, through=(Centered(operand, layout, 0),)),))

    def sizes(self, node: fx.Node) -> Shape | None:
        value = self.values.get(node)
        if isinstance(value, ParameterExpr):
            return value.shape
        try:
            return self.shape_of(node)
        except ValueError:
            return None

    def shape_of(self, node: fx.Node) -> Shape:
        """The shape of a constant. Raises ValueError if it is not known."""
        value = attribute(self.root, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if value is None and all(operand in self.values for operand in node.all_input_nodes):
            value = computed(node, without_data(node.args, self.values), node.kwargs)
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise ValueError
        return tuple(value.shape)


def factor(name: str, node: fx.Node) -> float | None:
    """The number that a product multiplies with; None for a product with something else."""
    if name == "neg":
        return -1.0
    by = node.args[1]
    if node.kwargs or not isinstance(by, (int, float)) or by == 0:
        return None
    return 1.0 / by if name == "div" else float(by)


def basic(index: Any) -> bool:
    """Whether an index makes a view."""
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is ... or isinstance(item, (int, slice, fx.Node)) for item in items)


RULES: dict[
    str, Callable[[Expressions, fx.Node, fx.Node, Any], ExprValue | None]
] = {  # of one known value, and constants
    **dict.fromkeys(CASTS, Expressions.same),
    **dict.fromkeys(MOVES_ELEMENTS, Expressions.viewed),
    **dict.fromkeys(("add", "sub"), Expressions.summed),
    **dict.fromkeys(("mul", "div", "neg"), Expressions.multiple),
    **dict.fromkeys(FUNCTIONS, Expressions.function),
    "overwritten": Expressions.overwritten,
}


OUTPUTS = (0, 1)  # the axes of a matrix that a weight has in common with a bias: groups and outputs


def cut(program: Program) -> Program:
    """See the module's docstring. Afterwards no match has a role that is an expression."""
    shapes = {name: tuple(parameter.shape) for name, parameter in program.parameters.items()}
    uses = [with_functions(use, program, shapes) for use in program.matches]
    program = program.but(matches=tuple(part for use in uses for part in by_jacobian(use, shapes)))
    if not any(use.exprs for use in program.matches) and not program.options.pieces:
        return program.but(parameter_exprs={})
    cutter = Cutter(program, shapes)
    plan = cutter.plan()
    pieces = {piece.name: piece for name in program.parameters for piece in plan.pieces(name)}
    dropped = (*program.dropped, *cutter.notes)
    behind = behind_nodes(program, plan, cutter.label)
    return program.but(
        matches=tuple(cutter.matches(plan)), parameter_exprs={}, pieces=pieces, dropped=dropped, behind=behind
    )


def with_functions(use: Use, program: Program, shapes: Mapping[str, Shape]) -> Use:
    """A use with small functions of parameters instead of expressions whose elements go neither with the outputs nor
    with the inputs of its matrix, as those of `x @ w.exp()`, and instead of products whose factors are no matrices in
    it, as the bases of a relational graph network."""
    exprs = dict(use.exprs)
    for role, (expr, canonical) in use.exprs.items():
        nodes = [node for node, value in program.parameter_exprs.items() if value is expr]
        if expr.products:
            placed = {name for part in whole_uses(use, shapes) or () for name in part.parameter_set}
            if placed.issuperset(product.parameter for product in expr.products):
                continue
        elif not any(slice_.through for slice_ in expr.slices):
            continue
        else:
            exact = parts_of_expr(use, role, program, exact=True) or whole_uses(use, shapes, exact=True)
            if exact is not None and not lost(expr, role, nodes, labels_of(program)):
                continue
        for small in small_functions(program, labels_of(program), nodes[:1], in_pieces(program)).values():
            exprs[role] = small, canonical
    return use if exprs == use.exprs else replace(use, exprs=exprs)


def lost(expr: ParameterExpr, role: str, nodes: Sequence[fx.Node], label: Mapping[fx.Node, Label]) -> set[str]:
    """The parameters behind a node of which its expression has neither elements nor gains. A gain has rows in a weight
    alone: a bias `g * b` is a function of both."""
    steps = [step for slice_ in expr.slices for step in slice_.through if isinstance(step, WithGain)]
    steps = steps if role == "weight" else []
    kept = {slice_.parameter for slice_ in expr.slices} | {step.gain.parameter for step in steps if step.gain}
    return set[str]().union(*(parameters_behind(node, label) for node in nodes[:1])) - kept


def wholes(program: Program, label: Mapping[fx.Node, Label], pure: fx.Node) -> set[str]:
    """The parameters that all of a node's value depends on."""
    shapes = {name: tuple(parameter.shape) for name, parameter in program.parameters.items()}
    names: set[str] = set()
    stack, seen = [pure], {pure}
    while stack:
        node = stack.pop()
        if node in program.parameter_exprs:
            slices = program.parameter_exprs[node].slices
            names |= {part.parameter for part in slices if not partial(view_of(part), shapes[part.parameter])}
            names |= {product.parameter for product in program.parameter_exprs[node].products}
            continue
        if node.op == "get_attr" and label[node] is Label.PURE:
            names.add(str(node.target))
        operands = [n for n in differentiated(node) if n not in seen]
        seen.update(operands)
        stack += operands
    return names


class Cutter:
    """Where parameters may be cut.

    parts: of every use by its number among the matches; None where they are no views of parameters.
    entire: uses of whole parameters instead of such a use.
    rigid: parameters that may not be cut.
    stacks: the first sizes of parameters that are stacks of stacks, as those of w[layer][expert].
    flat: the shapes of parameters, with these sizes as one.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.program, self.shapes = program, shapes
        self.parts = {number: parts_of(use, program) for number, use in enumerate(program.matches)}
        self.notes: list[Note] = []
        self.rigid: set[str] = set()
        self.entire: dict[int, list[Use]] = {}
        for number, use in enumerate(program.matches):
            placed = {part.role for part in self.parts[number] or ()}
            products = any(expr.products for expr, _ in use.exprs.values())
            entire = whole_uses(use, shapes) if products or use.exprs.keys() - placed else None
            if entire is not None:
                self.parts[number], self.entire[number] = None, entire
                self.rigid |= {name for part in entire for name in part.parameter_set}
            elif self.parts[number] is None and use.exprs:
                self.forget(number, "its parameters have no place of their own in its matrix")
            elif self.parts[number] is None and not program.layers[use.layer].parts:
                self.rigid |= use.parameter_set
            for part in self.parts.get(number) or ():
                steps = [step for step in part.through if isinstance(step, BySlice)]
                gains = [step.gain for step in steps if isinstance(step, WithGain) and step.gain is not None]
                spread = bool(part.through) and sides_of(part, shapes[part.parameter]) is None
                self.rigid.update([part.parameter] * (spread or bool(steps)), (gain.parameter for gain in gains))
        self.drop_factors()
        self.stacks = self.stacks_of_stacks()
        self.flat = {n: with_first_merged(shape, len(self.stacks.get(n, (0,)))) for n, shape in shapes.items()}
        self.label = labels_of(program)
        self.edges = use_edges(program.graph, self.label, program.outputs)

    def stacks_of_stacks(self) -> dict[str, Shape]:
        """The first sizes of parameters whose parts are cut out along more than one of their first dimensions."""
        parts_by_name: dict[str, list[Part]] = defaultdict(list)
        for part in chain.from_iterable(parts or () for parts in self.parts.values()):
            parts_by_name[part.parameter].append(part)
        stacks: dict[str, Shape] = {}
        asked = {piece.parameter for piece in self.program.options.pieces if not piece.within}
        for name in parts_by_name.keys() - self.rigid - asked:
            shape, parts = self.shapes[name], parts_by_name[name]
            if any(part.through for part in parts) or all(ranges(part.view, shape) for part in parts):
                continue
            for count in range(2, len(shape)):
                flat = with_first_merged(shape, count)
                if flat[0] <= MOST_MEMBERS and all(0 in ranges(part.view, flat) for part in parts):
                    stacks[name] = shape[:count]
                    break
        return stacks

    def drop_factors(self) -> None:
        """Drop the factors of products that another use lays out in other groups."""
        groups: dict[str, set[int]] = defaultdict(set)
        others = [use for number, use in enumerate(self.program.matches) if number not in self.entire]
        for use in chain(others, *self.entire.values()):
            for role, bound in use.parameters.items():
                if role == "weight" and not self.program.layers[use.layer].parts:
                    groups[bound.parameter].add(bound.layout.result[0])
        for number, parts in self.parts.items():
            exprs = self.program.matches[number].exprs
            for part in parts or ():
                if part.role == "weight" and "weight" in exprs:
                    groups[part.parameter].add(exprs["weight"][1].result[0])
        for number, uses in self.entire.items():
            consistent = [
                use for use in uses if not is_factor(use) or all(len(groups[n]) == 1 for n in use.parameter_set)
            ]
            if len(consistent) < len(uses):
                self.entire[number] = consistent
                reason = "a factor of its weight has a use of another form"
                self.notes.append(Note(f"{uses[0].layer} at {where(uses[0].output)}", reason))

    def plan(self) -> Plan:
        """The first plan that no use objects to; every objection leaves one more parameter whole."""
        while True:
            self.drop()
            plan = Plan(self.flat, self.stacks)
            try:
                self.cut_as_asked(plan)
                self.cut_apart(plan)
                while sum(self.cut_alike(plan, parts) for parts in self.parts.values() if parts):
                    pass
                return plan
            except Uncuttable as error:
                self.rigid.add(str(error))

    def drop(self) -> None:
        """Drop uses of a part of what must stay whole. The parameters that they leave unmatched are read whole, too."""
        while True:
            self.rigid |= self.read_whole()
            dropped = [n for n, parts in self.parts.items() if parts and any(map(self.impossible, parts))]
            if not dropped:
                return
            for number in dropped:
                names = dict.fromkeys(part.parameter for part in self.parts[number] or () if self.impossible(part))
                self.forget(number, f"takes a part of {', '.join(names)}, which cannot be cut there")

    def forget(self, number: int, reason: str) -> None:
        use = self.program.matches[number]
        self.notes.append(Note(f"{use.layer} at {where(use.output)}", reason))
        del self.parts[number]

    def impossible(self, part: Part) -> bool:
        return part.parameter in self.rigid and partial(part.view, self.shapes[part.parameter])

    def read_whole(self) -> set[str]:
        """Parameters that a node reads whole which no use explains."""
        explained: set[tuple[fx.Node, str]] = set()
        for number, parts in self.parts.items():
            use = self.program.matches[number]
            names = {part.parameter for part in parts or ()} | {bound.parameter for bound in use.parameters.values()}
            explained |= {(node, name) for node in use.nodes for name in names}
        return {
            name
            for pure, act in self.edges
            for name in wholes(self.program, self.label, pure)
            if (act, name) not in explained
        }

    # --- places -----------------------------------------------------------------------------------------------------

    def cut_as_asked(self, plan: Plan) -> None:
        for piece in self.program.options.pieces:
            if piece.parameter in self.shapes and piece.parameter not in self.rigid and not piece.within:
                for place in (piece.start, piece.stop):
                    plan.cut(piece.parameter, piece.dim, place)

    def cut_apart(self, plan: Plan) -> None:
        """Where parts of parameters begin and end."""
        for name in self.stacks.keys() - self.rigid:
            for place in range(self.flat[name][0]):
                plan.cut(name, 0, place)
        for part in chain.from_iterable(parts or () for parts in self.parts.values()):
            shape = self.flat[part.parameter]
            if partial(part.view, shape):
                along = ranges(part.view, shape)
                if not along:
                    raise Uncuttable(part.parameter)
                ((dim, ends),) = along.items()
                for place in ends:
                    plan.cut(part.parameter, dim, place)

    def cut_alike(self, plan: Plan, parts: Sequence[Part]) -> bool:
        """Cut the weight and the bias of a use where the other one is cut. Where one cannot be cut, they are registered
        apart. Returns whether there was need to."""
        divided = [piece for part in parts for piece in plan.divided(part)]
        changed = False
        for axis in OUTPUTS:
            edges = {edge for piece in divided for edge in piece.region[axis]}
            for part in parts:
                start, stop = part.region[axis]
                for edge in edges:
                    if start < edge < stop and part.parameter not in self.rigid:
                        changed |= self.cut_at(plan, part, axis, edge - start)
        return changed

    def cut_at(self, plan: Plan, part: Part, axis: int, distance: int) -> bool:
        shape, name = self.flat[part.parameter], part.parameter
        for dim, (start, stop) in ranges(part.view, shape).items():
            along = axis_along(part.view, shape, dim, stop - start)
            if plan.dims.get(name, dim) == dim and along is not None and along[0] == axis and not distance % along[1]:
                return plan.cut(name, dim, start + distance // along[1])
        return False

    # --- uses -------------------------------------------------------------------------------------------------------

    def matches(self, plan: Plan) -> Iterator[Use]:
        """The matches after the cuts, in their order."""
        for number, use in enumerate(self.program.matches):
            parts = self.parts.get(number)
            cut = any(plan.cuts(bound.parameter) for bound in use.parameters.values())
            yield from self.entire.get(number, ())
            if parts is not None and (use.exprs or cut):
                yield from taken_apart(use, [piece for part in parts for piece in plan.divided(part)], self.shapes)
            elif number in self.parts and not use.exprs and not cut:
                yield use


def is_factor(use: Use) -> bool:
    return any(isinstance(step, ProductFactor) for step in use.through)


def behind_nodes(program: Program, plan: Plan, label: Mapping[fx.Node, Label]) -> dict[fx.Node, frozenset[str]]:
    """The pieces and parameters behind every node that is an expression or is cut."""
    behind: dict[fx.Node, frozenset[str]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr" and (pieces := plan.pieces(str(node.target))):
            behind[node] = frozenset(piece.name for piece in pieces)
    for node, expr in program.parameter_exprs.items():
        steps = [step for slice_ in expr.slices for step in slice_.through]
        factors = [
            node for step in steps for key, value in step.nodes.items() if key != "operand" for node in nodes_of(value)
        ]
        factors += [node] if expr.products else []
        names = {name for slice_ in expr.slices for name in names_in(slice_, plan)}
        behind[node] = frozenset(names.union(*(parameters_behind(factor, label, behind) for factor in factors)))
    return behind


def names_in(slice_: Slice, plan: Plan) -> list[str]:
    """The pieces that a slice may read."""
    if not plan.cuts(slice_.parameter):
        return [slice_.parameter]
    dim, shape = plan.dims[slice_.parameter], plan.shapes[slice_.parameter]
    start, stop = ranges(view_of(slice_), shape).get(dim, (0, shape[dim]))
    return [piece.name for piece in plan.meeting(slice_.parameter, start, stop)]


# --- where parameters are cut -----------------------------------------------------------------------------------------


MOST_MEMBERS = 1024  # of a stack of stacks that is cut: each is a piece with a block of its own


def with_first_merged(shape: Shape, count: int) -> Shape:
    """A shape with its first `count` sizes as one."""
    return (math.prod(shape[:count]), *shape[count:]) if count > 1 else shape


def member(parameter: str, sizes: Shape, number: int) -> Piece:
    """The member with this number of a stack of stacks of these sizes."""
    *within, last = (number // math.prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes))
    return Piece(parameter, len(within), last, last + 1, within=tuple(within))


class Uncuttable(Exception):
    """A parameter cannot be cut as its uses need it; never leaves passes.cut."""


@dataclass
class Plan:
    """Where parameters are cut: along which dimension, and at which places, in order; their ends are among these.

    shapes, stacks: see `Cutter.flat`. A stack of stacks is cut into its members.
    """

    shapes: Mapping[str, Shape]
    stacks: Mapping[str, Shape] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)

    def cut(self, parameter: str, dim: int, place: int) -> bool:
        """Returns whether there was need to. Raises Uncuttable."""
        cuts = self.places.setdefault(parameter, [0, self.shapes[parameter][dim]])
        if self.dims.setdefault(parameter, dim) != dim:
            raise Uncuttable(parameter)
        at = bisect_left(cuts, place)
        if at < len(cuts) and cuts[at] == place:
            return False
        cuts.insert(at, place)
        return True

    def cuts(self, parameter: str) -> bool:
        return len(self.places.get(parameter, ())) > 2

    def pieces(self, parameter: str) -> list[Piece]:
        """Empty for what is not cut."""
        return self.at(parameter, self.places[parameter]) if self.cuts(parameter) else []

    def at(self, parameter: str, places: Sequence[int]) -> list[Piece]:
        if parameter in self.stacks:
            return [member(parameter, self.stacks[parameter], number) for number in places[:-1]]
        return [Piece(parameter, self.dims[parameter], *ends) for ends in pairwise(places)]

    def inside(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """The pieces of a cut parameter that have no element outside."""
        places = self.places[parameter]
        return self.at(parameter, places[bisect_left(places, start) : bisect_right(places, stop)])

    def meeting(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """The pieces of a cut parameter that have an element between."""
        places = self.places[parameter]
        return self.at(parameter, places[bisect_right(places, start) - 1 : bisect_left(places, stop) + 1])

    def divided(self, part: Part) -> list[Part]:
        """A part of a parameter as parts of its pieces. Raises Uncuttable."""
        if not self.cuts(part.parameter):
            return [part]
        dim, shape = self.dims[part.parameter], self.shapes[part.parameter]
        start, stop = ranges(part.view, shape).get(dim, NOTHING)
        inside = self.inside(part.parameter, start, stop)
        if len(inside) == 1:
            return [replace(part, piece=inside[0])]
        along = axis_along(part.view, shape, dim, stop - start)
        if along is None:
            raise Uncuttable(part.parameter)
        axis, steps = along
        ends = [(steps * (piece.start - start), steps * (piece.stop - start)) for piece in inside]
        return [between(part, axis, *places, piece) for places, piece in zip(ends, inside, strict=True)]


def between(part: Part, axis: int, start: int, stop: int, piece: Piece) -> Part:
    region, first = list(part.region), part.region[axis][0]
    region[axis] = first + start, first + stop
    g, o, i = region
    return replace(part, view=part.view.narrow(axis, start, stop - start), region=(g, o, i), piece=piece)
