"""Expressions: which elements of parameters a tensor holds that is computed from parameters alone.

    w[:, :4].t()        split, chunk, unbind, select       a part of a parameter, in another order
    frozen[:4]                                             a part of a constant, beside a parameter
    torch.cat([q_bias, zeros, v_bias])                     parts of several, and constants
    b = q_bias.clone(); b[4:8].zero_()                     parts of one
    1 - 0.5 * w                                            a multiple, and a constant
    torch.exp(s), w / w.norm(), a @ b, softmax(s)          functions and products, see `passes.parametrizations`

Elements that are only moved and scaled are followed without computing anything: a part of a parameter is a view of a
tensor without data, and the strides of the view say which elements it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from .errors import fatal
from .graphs.edit import attribute, shares_memory
from .graphs.labels import Label, ancestors, differentiated, labels_of, parameters_behind
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
from .ir import ELEMENTS, Program
from .matrix import Shape
from .parametrizations.elements import OPERATIONS, by_element
from .parametrizations.functions import DERIVATIVES, Elementwise, elementwise, is_function, small_functions
from .parametrizations.normalized import MAKERS, Centered, Scaled, WithGain, dim_of, is_mean, laid_out, scaled_by
from .parametrizations.product import MULTIPLIES, added, complete, product_of, reshaped, sum_of
from .pieces import (
    ParameterExpr,
    Slice,
    concatenated,
    expr_of,
    is_one_slice,
    multiple_of,
    narrowed_slice,
    permuted,
    ranges,
    seen_part,
    slice_of,
    unallocated,
    unsqueezed,
    view_of,
    without_data,
)
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
    in_pieces: set[str] = set()
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
            in_pieces |= {slice_.parameter for slice_ in value.slices if enters and is_part(slice_, program)}
        elif enters:
            others.append(node)
    return program.but(parameter_exprs={**exprs, **small_functions(program, expressions.label, others, in_pieces)})


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
        if layout is None or multiple:
            return None
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
