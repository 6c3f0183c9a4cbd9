"""Every use of every declared layer: the form of the layer, laid over the graph from its output back to its inputs.

A form is traced and normalized as the model is, so one language is compared with itself. Values that the form
computes on the way to its output must have no other reader: `h = x @ w; h + b; f(h)` is a product and a shift,
not one linear layer.

A form that says where its outputs are makes two patterns, itself and its sum with a bias. Between the output and the
bias the graph may permute dimensions, as in `(w @ x.mT).mT + b`. The output of such a use is the layer's own,
before the permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from .cases import number_of_cases, with_batch_dim, with_mask
from .errors import LayerError, fatal, where
from .graphs.edit import attribute, functional
from .graphs.labels import Label, ancestors, entries, labels_of, once, parameters_behind
from .graphs.operations import (
    CASTS,
    PERMUTES,
    SPELLED_OUT,
    bound_parameter,
    complex_parameter,
    dims_after,
    function_matched,
    op_name,
)
from .graphs.spelling import (
    in_order_of_letters,
    in_pairs,
    order_operands,
    respell,
    spell_selections,
    subtract_by_adding,
)
from .ir import ADDED, CASES, ELEMENTS, Bound, Program, Use, returned_by
from .layers import LAYERS, Form, Layer
from .layers.declaration import ROLES, unknown_attribute
from .matrix import Layout, Shape
from .parametrization import Complex, ComplexOutputs, ParameterExpr, nodes_of
from .parametrizations.functions import in_pieces, small_functions, static_shape
from .parametrizations.tables import LinearMap, constant, gathered_weight
from .torch_private import OpOverload
from .tracing.substitutes import ThreadTracer


@dataclass(frozen=True)
class Pattern:
    """A form, or its sum with a bias, as a graph.

    root: computes the output.
    product: the form's own output in a sum; None for the form itself.
    """

    layer: Layer
    number: int
    root: fx.Node
    product: fx.Node | None = None

    @property
    def form(self) -> Form:
        return self.layer.forms[self.number]

    @property
    def roles(self) -> tuple[str, ...]:
        return self.form.roles if self.product is None else ROLES

    @property
    def adds(self) -> bool:
        """Whether its bias is added, so that it may have any shape that broadcasts."""
        return self.product is not None or (self.form.bias_along is not None and self.form.needs_bias)


def match(program: Program) -> Program:
    """Find all matches, in graph order. See the module's docstring."""
    label = labels_of(program)
    shapes = held_shapes(program)
    behind = ancestors(program.outputs)
    patterns = patterns_by_target(program.layers)
    matches: list[Use] = []
    for node in program.graph.nodes:
        if not label[node].activation or node not in behind:
            continue
        gathered = [operand for operand in node.all_input_nodes if ELEMENTS in operand.meta]
        found: list[tuple[Pattern, Use]] = []
        for pattern in patterns_at(patterns, node):
            uses = lay_over(pattern, node, label, shapes, program.parameters, program.parameter_exprs)
            if gathered and not pattern.layer.parts:
                uses += lay_over_gathered(pattern, node, label, shapes, program)
            found += [(pattern, use) for use in uses]
        if gathered and not found:  # their elements are neither rows nor columns of a table
            exprs = {**program.parameter_exprs, **small_functions(program, label, gathered, in_pieces(program))}
            found = [
                (pattern, use)
                for pattern in patterns_at(patterns, node)
                for use in lay_over(pattern, node, label, shapes, program.parameters, exprs)
            ]
        for pattern, use in found:
            if program.cases is not None:
                use = with_batch_dim(use, program.cases, pattern.form.leading)
            matches.append(with_mask(use))
    used = {use.layer for use in matches}
    absent = [name for name, of in program.layers.items() if LAYERS.get(name) is not of and name not in used]
    nowhere = {name: why_nowhere(program, name) for name in absent if not program.layers[name].parts}
    return program.but(matches=tuple(matches), nowhere=nowhere)


def held_shapes(program: Program) -> dict[str, Shape]:
    """The shapes of all parameters, and of the constants that may fill the role of a frozen parameter."""
    held = {
        str(node.target): attribute(program.root, str(node.target))
        for node in program.graph.nodes
        if node.op == "get_attr"
    }
    tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    return {name: tuple(value.shape) for name, value in {**tensors, **program.parameters}.items()}


def patterns_by_target(layers: Mapping[str, Layer]) -> dict[Any, list[Pattern]]:
    """The patterns by the target of their root, and the sums by that of their product."""
    patterns: dict[Any, list[Pattern]] = {}
    for layer in layers.values():
        for number, form in enumerate(layer.forms):
            root = form_graph(layer, form)
            patterns.setdefault(root.target, []).append(Pattern(layer, number, root))
            if form.bias_along is not None and not form.needs_bias:
                product, total = with_bias(root)
                patterns.setdefault((torch.add, product.target), []).append(Pattern(layer, number, total, product))
    return patterns


def patterns_at(patterns: Mapping[Any, list[Pattern]], root: fx.Node) -> Iterator[Pattern]:
    """The patterns that may compute the output at `root`."""
    if root.target is torch.add and root.args and isinstance(root.args[0], fx.Node):
        yield from patterns.get((torch.add, function_matched(moved(root.args[0])[0])), ())
    yield from patterns.get(function_matched(root), ())


def moved(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node of which `node` has the dimensions in another order, and the nodes that permute them."""
    between: list[fx.Node] = []
    while op_name(node) in PERMUTES and node.all_input_nodes == [node.args[0]]:
        between.append(node)
        node = node.all_input_nodes[0]
    return node, between


def form_graph(layer: Layer, form: Form) -> fx.Node:
    """The node that computes the form's output, in a normalized graph. Raises LayerError if it cannot be traced."""
    try:
        root = returned(form.function, form.roles, len(SPELLED_OUT))
    except Exception as error:
        if fatal(error):
            raise
        raise LayerError(f"the form of layer {layer.name!r} ({layer.location}) cannot be traced: {error}") from error
    if not isinstance(root, fx.Node) or root.op == "placeholder":
        raise LayerError(f"the form of layer {layer.name!r} ({layer.location}) must return one computed tensor")
    return root


@lru_cache(maxsize=1000)  # forms are the same for all models
def returned(form: Callable[..., Any], roles: tuple[str, ...], spelled_out: int) -> Any:
    """The value that a function returns, in its normalized graph. spelled_out: how many functions of torch are."""
    graph = ThreadTracer().trace(form)
    pure = [node for node in graph.find_nodes(op="placeholder") if node.target in roles]
    functional(graph)
    respell(graph)
    spell_selections(graph, (), pure)
    subtract_by_adding(graph, (), pure)
    order_operands(graph, (), pure)
    in_pairs(graph, (), pure)
    return returned_by(graph)


@lru_cache(maxsize=1000)
def with_bias(root: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The node that computes the form's output without a bias, and the one that adds a bias, in another graph."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in root.graph.nodes:
        if node.op == "placeholder" and node.target == "bias":
            copies[node] = None
        elif node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            product, bias = copies[node.args[0]], graph.placeholder("bias")
    return product, graph.call_function(torch.add, (product, bias))


def lay_over(
    pattern: Pattern,
    root: fx.Node,
    label: Mapping[fx.Node, Label],
    shapes: Mapping[str, Shape],
    trained: Collection[str],
    expressions: Mapping[fx.Node, ParameterExpr] | None = None,
    binding: Binding | None = None,
) -> list[Use]:
    """The use whose output is `root`; of complex numbers one for each of its parameters.

    A frozen weight or bias fills its role and is not registered; neither is one that is computed in another way. `cut`
    decides which parameters of an expression are registered.
    """
    form, usable = pattern.form, {} if pattern.layer.parts else expressions or {}
    binding = binding or Binding(pattern, label, shapes, usable, label[root] is Label.FREE)
    if not binding.fits(pattern.root, root):
        return []
    inside = set(binding.nodes.values())
    if read := [node for node in inside - {root} if any(user not in inside for user in node.users)]:
        binding.refuse(Mismatch.READ, read[0])
        return []
    if form.inputs[0].startswith("_"):
        binding.names[form.inputs[0]] = root  # no input: the output stands for it
    if not isinstance(binding.names.get(form.inputs[0]), fx.Node):
        binding.refuse(Mismatch.INPUT, root)
        return []
    attrs = {name: binding.names.get(name) for name in form.inputs[1:]}
    attrs |= {role: layout.result for role, (_, layout) in binding.parameters.items()}
    attrs |= {role: expr.shape for role, expr in binding.exprs.items()}
    attrs |= {role: static_shape(node) for role, node in binding.foreign.items()}
    roles = [role for role in pattern.roles if role in binding.parameters]
    trainable = {role: binding.parameters[role] for role in roles if binding.parameters[role][0] in trained}
    learned = trainable or any(expr.slices or expr.products for expr in binding.exprs.values())
    if not learned:
        binding.refuse(Mismatch.LEARNED, root)
        return []
    attrs_of_form = attrs if not pattern.adds else {name: value for name, value in attrs.items() if name != "bias"}
    try:
        fits = form.where(attrs_of_form)
    except KeyError as error:
        raise LayerError(f"{pattern.layer.name}: where= reads {unknown_attribute(error, attrs_of_form)}") from error
    if not fits:
        binding.refuse(Mismatch.WHERE, root)
        return []
    if binding.reads_itself():
        binding.refuse(Mismatch.ITSELF, root)
        return []
    if binding.batch_independent:
        attrs[CASES] = number_of_cases(root, None)
    bound: dict[str, Bound] = {}
    exprs: dict[str, tuple[ParameterExpr, Layout]] = {}
    role = "bias"
    try:
        if pattern.adds and not form.takes_bias(attrs, binding.order):
            binding.refuse(Mismatch.WHERE, root)
            return []
        if pattern.adds:
            attrs[ADDED] = binding.order
        for role, (name, used) in trainable.items():
            canonical = form.layout(role, used, attrs) if not pattern.layer.parts else Layout(used.result)
            bound[role] = Bound(name, used, canonical)
        for role, expr in binding.exprs.items():
            exprs[role] = expr, form.layout(role, Layout(expr.shape), attrs)
    except LayerError as error:  # such as a 3-D weight in a matmul, which is no linear layer
        name = binding.parameters[role][0] if role in binding.parameters else "an expression of parameters"
        binding.refuse(
            Mismatch.SHAPE, root, f"its {role} is {name} {list(attrs.get(role) or ())}, and {error}: {LAYOUTS[role]}"
        )
        return []
    except KeyError as error:
        raise LayerError(f"{pattern.layer.name}: its layout reads {unknown_attribute(error, attrs)}") from error
    if len(bound) == 2 and not pattern.layer.parts:
        (groups, outputs, *_), of_bias = bound["weight"].canonical.result, bound["bias"].canonical.result
        if of_bias != (groups, outputs):  # such as two matrices, which are no single matrix
            binding.refuse(Mismatch.OUTPUTS, root)
            return []
    input, nodes = binding.names[form.inputs[0]], frozenset(inside)
    # Where dimensions are permuted, the gradient of the sum is that of the form's own output, permuted.
    output = root if binding.output is None else binding.output
    use = Use(pattern.layer.name, pattern.number, input, output, bound, attrs, nodes, exprs=exprs)
    if binding.conjugated:
        return [] if exprs else of_parts(use, binding.conjugated, pattern.layer.dense_rows)
    if use.is_complex and len(bound) + len(exprs) > 1:
        return [] if exprs else of_parts(use, {}, pattern.layer.dense_rows)
    return [use if binding.map is None else with_map(use, binding.map)]


def of_parts(use: Use, conjugated: Mapping[str, bool], dense_rows: bool) -> list[Use]:
    """The uses of the parameters of a use of complex numbers, in matrices of the real and imaginary parts.

    conjugated: whether the numbers of each complex parameter, [..., 2], are conjugated, by its role.
    """
    uses: list[Use] = []
    for role, bound in use.parameters.items():
        if role not in conjugated:
            uses.append(replace(use, parameters={role: bound}))
            continue
        of_inputs = role == "weight" and dense_rows
        canonical = bound.canonical.in_pairs()
        groups, outputs, *inputs = canonical.result
        if of_inputs:
            canonical = canonical.reshape((groups, outputs, math.prod(inputs)))
        elif role == "weight":
            canonical = canonical.permute((0, 1, 3, 2)).reshape((groups, 2 * outputs, inputs[0]))
        else:
            canonical = canonical.reshape((groups, 2 * outputs))
        step = (Complex if of_inputs else ComplexOutputs)(conjugated[role])
        place = Bound(bound.parameter, bound.used.in_pairs(), canonical)
        uses.append(replace(use, parameters={role: place}, through=(step,)))
    return uses


def with_map(use: Use, linear_map: LinearMap) -> Use:
    """The layer has a table instead of its parameter, so the shape that it knows is the table's."""
    (role,) = use.parameters
    return replace(use, through=(linear_map,), attrs={**use.attrs, role: linear_map.columns.shape})


def lay_over_gathered(
    pattern: Pattern, root: fx.Node, label: Mapping[fx.Node, Label], shapes: Mapping[str, Shape], program: Program
) -> list[Use]:
    """The use of a weight alone whose outputs or inputs were gathered from a parameter's."""
    independent = label[root] is Label.FREE
    binding = Binding(pattern, label, shapes, program.parameter_exprs, independent, gathers=program.root)
    uses = lay_over(pattern, root, label, shapes, program.parameters, None, binding)
    if len(uses) != 1 or binding.numbers is None:
        return []
    (use,) = uses
    bound = use.parameters["weight"]
    whole_table = gathered_weight(binding.numbers, bound.layout, shapes[bound.parameter], program.root, label)
    if whole_table is None:
        return []
    canonical, gathered = whole_table
    weight = Bound(bound.parameter, Layout(shapes[bound.parameter]), canonical)
    return [replace(use, parameters={"weight": weight}, through=(gathered,))]


# --- what the names of a form stand for -------------------------------------------------------------------------------


class Mismatch(Enum):
    """A condition of a match that fails. `kfac_fx.cli.explain` has the words."""

    FORM = auto()
    READ = auto()
    INPUT = auto()
    LEARNED = auto()
    WHERE = auto()
    ITSELF = auto()
    SHAPE = auto()
    OUTPUTS = auto()


@dataclass
class Binding:
    """The values that the names of a form stand for while it is laid over the graph.

    pattern, label, shapes: the form; the graph's labels, and the shapes that it holds.
    expressions: what may fill a role beside a parameter.
    batch_independent: what is computed from parameters alone may be the input.
    gathers: the model, if the weight must be gathered from one of its parameters, and no other role has one.

    nodes: the pattern's operation -> the graph's.
    names: the pattern's placeholder -> a node or a literal.
    parameters, exprs, foreign: the roles that a parameter, an expression or any other node fills.
    order, output: of a sum: the order of the form's dimensions in it, None if their number is not known; the form's own
        output if they are permuted.
    conjugated: the roles that complex numbers fill, whose parts are a parameter [..., 2], and whether they are
        conjugated.
    numbers: of the elements that were gathered.
    map: from the parameter to the table in its place.
    mismatch: why the form does not fit: the first condition that fails, the place in the graph, and the part of the
        pattern that should lie over it, or words.
    """

    pattern: Pattern
    label: Mapping[fx.Node, Label]
    shapes: Mapping[str, Shape]
    expressions: Mapping[fx.Node, ParameterExpr] = field(default_factory=dict)
    batch_independent: bool = False
    gathers: nn.Module | None = None
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, tuple[str, Layout]] = field(default_factory=dict)
    exprs: dict[str, ParameterExpr] = field(default_factory=dict)
    foreign: dict[str, fx.Node] = field(default_factory=dict)
    order: Shape | None = None
    output: fx.Node | None = None
    conjugated: dict[str, bool] = field(default_factory=dict)
    numbers: fx.Node | None = None
    map: LinearMap | None = None
    mismatch: tuple[Mismatch, Any, Any] | None = None

    def refuse(self, mismatch: Mismatch, place: Any, wanted: Any = None) -> None:
        if self.mismatch is None:
            self.mismatch = mismatch, place, wanted

    def fits(self, wanted: Any, actual: Any) -> bool:
        """Lay the pattern's `wanted` over the graph's `actual`."""
        fitted = self.lies_over(wanted, actual)
        if not fitted:
            self.refuse(Mismatch.FORM, actual, wanted)
        return fitted

    def lies_over(self, wanted: Any, actual: Any) -> bool:
        if isinstance(wanted, (list, tuple)):
            return (
                isinstance(actual, (list, tuple)) and len(wanted) == len(actual) and all(map(self.fits, wanted, actual))
            )
        if not isinstance(wanted, fx.Node):
            return not isinstance(actual, fx.Node) and wanted == actual
        if wanted.op == "placeholder":
            return self.binds(wanted, actual)
        actual = self.uncast(actual)
        if wanted is self.pattern.product and isinstance(actual, fx.Node):
            actual = self.unmoved(actual)
        if not isinstance(actual, fx.Node) or (wanted.op, wanted.target) != (actual.op, function_matched(actual)):
            return False
        if self.nodes.setdefault(wanted, actual) is not actual or set(wanted.kwargs) != set(actual.kwargs):
            return False
        args = actual.args
        if op_name(wanted) == "einsum" and args and in_order_of_letters(wanted.args[0]) == in_order_of_letters(args[0]):
            args = (wanted.args[0], *args[1:])  # letters are names
        pairs = [(wanted.args, args), *((value, actual.kwargs[key]) for key, value in wanted.kwargs.items())]
        return all(self.fits(inner, its) for inner, its in pairs)

    def uncast(self, actual: Any) -> Any:
        """Skip casts and copies of what is computed from parameters alone, such as position embeddings: same rows."""
        while isinstance(actual, fx.Node) and self.label[actual] is Label.PURE and op_name(actual) in CASTS:
            self.nodes[actual] = actual
            actual = actual.args[0]
        return actual

    def unmoved(self, actual: fx.Node) -> fx.Node:
        """Skip permutations of the form's output, if the graph knows its dimensions."""
        product, between = moved(actual)
        value = product.meta.get("val")
        if not isinstance(value, Tensor):
            return actual
        self.order = tuple(range(value.dim()))
        for node in reversed(between):
            after = dims_after(node, value.dim(), node.args[1:])
            self.order = tuple(self.order[dim] for dim in after)
            self.nodes[node] = node
        self.output = product if self.order != tuple(range(value.dim())) else None
        return product

    def binds(self, wanted: fx.Node, actual: Any) -> bool:
        """Bind a placeholder of the form: a role to a parameter or to None, another name to a node or a literal."""
        name = str(wanted.target)
        if name in self.names:
            return bool(self.names[name] is actual)
        self.names[name] = actual
        if name not in self.pattern.roles:
            return not isinstance(actual, fx.Node) or self.label[actual] is not Label.PURE or self.batch_independent
        if actual is None:
            return bool(wanted.args)  # optional: the form gives it a default
        if not isinstance(actual, fx.Node) or self.label[actual].activation:
            return False
        if self.gathers is not None:
            return self.binds_gathered(name, actual)
        parameter = bound_parameter(actual, self.shapes)
        if parameter is None and not self.pattern.layer.parts:
            of_complex = complex_parameter(actual, self.shapes)
            if of_complex is not None:
                parameter, self.conjugated[name] = of_complex[:2], of_complex[2]
        if name == "weight" and "value" in self.pattern.form.inputs:
            self.names["value"] = actual
        if parameter is None and actual in self.expressions:
            self.exprs[name] = self.expressions[actual]
            return True
        if parameter is None and "elements" in self.pattern.form.inputs and ELEMENTS in actual.meta:
            elements = actual.meta[ELEMENTS]
            self.names["elements"], self.map = elements.numbers, elements.map
            parameter = elements.parameter, Layout(self.shapes[elements.parameter])
        if parameter is None and len(self.pattern.roles) > 1 and static_shape(actual) is not None:
            self.foreign[name] = actual  # the rows of the other roles do not depend on its values
            return True
        if parameter is None or any(parameter[0] == other for other, _ in self.parameters.values()):
            return False
        self.parameters[name] = parameter
        return True

    def binds_gathered(self, name: str, actual: fx.Node) -> bool:
        """Bind a role where one weight was gathered: as a parameter of its own shape, for now."""
        if name != "weight":
            self.foreign[name] = actual
            return static_shape(actual) is not None
        if ELEMENTS not in actual.meta or actual in self.expressions:
            return False
        elements = actual.meta[ELEMENTS]
        if elements.map is not None:
            return False
        shape = static_shape(actual)
        if shape is None:
            value = constant(elements.numbers, self.gathers, self.label)
            if value is None:
                return False
            shape = tuple(value.shape)
        self.parameters[name], self.numbers = (elements.parameter, Layout(shape)), elements.numbers
        return True

    def reads_itself(self) -> bool:
        """Whether a parameter of one role is also behind what fills another: the match would hide this use of it."""
        exprs = list(self.exprs.values())
        in_roles = [{name} for name, _ in self.parameters.values()]
        in_roles += [{slice_.parameter for slice_ in expr.slices} for expr in exprs]
        names = set[str]().union(*in_roles, {product.parameter for expr in exprs for product in expr.products})
        if any(expr.function is not None for expr in exprs) and sum(map(len, in_roles)) > len(names):
            return True
        steps = [step.nodes for expr in exprs for slice_ in expr.slices for step in slice_.through]
        factors = [
            node
            for nodes in steps
            if "factor" in nodes
            for node in nodes_of(nodes["factor"])
            if nodes["operand"] not in ancestors([node])  # the derivative of the parameter's own function
        ]
        return any(names & parameters_behind(node, self.label) for node in (*self.foreign.values(), *factors))


# --- layers that nearly match -----------------------------------------------------------------------------------------

WORDS = {
    Mismatch.READ: "its intermediate value {place} is read by another operation, too",
    Mismatch.INPUT: "its input is no computed value at {place}",
    Mismatch.LEARNED: "no trainable parameter fills one of its roles at {place}",
    Mismatch.WHERE: "its condition on shapes and settings fails at {place}",
    Mismatch.ITSELF: "a parameter is in two operands of {place}",
    Mismatch.SHAPE: "{wanted}",
    Mismatch.OUTPUTS: "its bias, as it is laid out, has not one number for each output of its weight at {place}",
}
LAYOUTS = {
    "weight": "write layouts={'weight': 'i -> () i'} in the declaration for a vector of the inputs of one output, "
    "'o a b -> o (a b)' for outputs with inputs along two dimensions, or another view of it as [outputs, inputs]",
    "bias": "write layouts={'bias': 'a b -> (a b)'} in the declaration for outputs along two dimensions, or another "
    "view of it as [outputs]",
}


@dataclass(frozen=True)
class NearMatch:
    """A layer at a place.

    Attributes:
        layer: the name of the layer.
        output: the node that would compute the layer's output.
        condition: the condition that fails, in words; None if the layer matches.
        fitted: the number of operations that fitted before; -1 if the layer has not the operation of the place.
        declared: whether the user declared the layer.
    """

    layer: str
    output: fx.Node
    condition: str | None
    fitted: int
    declared: bool = False

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Matches before near matches, the user's own layers before others, then by the operations that fitted."""
        return self.condition is None, self.declared, self.fitted


def why_nowhere(program: Program, name: str) -> str:
    """Why a layer of the user matches nowhere: the condition that fails where most of its operations fit."""
    alone = program.but(layers={name: program.layers[name]})
    places = dict.fromkeys(place for _, place in entries(alone))
    every = (near for place in places for near in near_matches(alone, place))
    best = max(every, key=attrgetter("fitted"), default=None)
    if best is None or best.condition is None or best.fitted < 0:
        forms = [form_graph(program.layers[name], form) for form in program.layers[name].forms]
        names = dict.fromkeys(op_name(node) for root in forms for node in operations_of(root))
        return f"no parameter enters one of the operations of its form, {', '.join(names)}"
    return f"at {where(best.output)}, {best.condition}"


def near_matches(program: Program, place: fx.Node) -> list[NearMatch]:
    """The layers with the operation `place` in one of their forms: those that match, then those that nearly do.

    One entry a layer: of its forms and outputs, the one with the most fitting operations. A layer of the user always
    has an entry. `program` has its expressions, as after the pass `express`.
    """
    label, shapes = labels_of(program), once(held_shapes, program, lambda: held_shapes(program))
    nearest: dict[str, NearMatch] = {}
    for patterns in patterns_by_target(program.layers).values():
        for pattern in patterns:
            name = pattern.layer.name
            declared = LAYERS.get(name) is not pattern.layer
            if declared:
                nearest.setdefault(name, NearMatch(name, place, *missing_output(pattern, place), declared))
            for root in possible_outputs(pattern, place):
                free = label[root] is Label.FREE
                binding = Binding(pattern, label, shapes, program.parameter_exprs, free)
                uses = lay_over(pattern, root, label, shapes, program.parameters, binding=binding)
                differs = arguments_given(pattern.root) != arguments_given(root)
                if place not in binding.nodes.values() and not (declared and differs):
                    continue
                words = None if uses else differing(pattern.root, root) if differs else failing_condition(binding)
                near = NearMatch(name, root, words, len(binding.nodes), declared)
                if name not in nearest or near.rank > nearest[name].rank:
                    nearest[name] = near
    return sorted(nearest.values(), key=lambda near: near.rank, reverse=True)


def possible_outputs(pattern: Pattern, place: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graph that may compute the pattern's output if `place` is one of its operations."""
    level = [place] if any(node.target == place.target for node in operations_of(pattern.root)) else []
    for _ in operations_of(pattern.root):
        yield from (node for node in level if node.target == pattern.root.target)
        level = list(dict.fromkeys(user for node in level for user in node.users))


def operations_of(root: fx.Node) -> list[fx.Node]:
    """The operations of a pattern."""
    return [node for node in root.graph.nodes if node.op not in ("placeholder", "output")]


def missing_output(pattern: Pattern, place: fx.Node) -> tuple[str, int]:
    """The condition that a layer fails if no node that `place` leads to computes its output; and 0, or -1 if the layer
    has not even the operation of the place."""
    if all(node.target != place.target for node in operations_of(pattern.root)):
        spelling = f", in a form torch.ops.{place.target}" if isinstance(place.target, OpOverload) else ""
        return f"its form has no operation {op_name(place)}{spelling}", -1
    last = op_name(pattern.root)
    if next(possible_outputs(pattern, place), None) is not None:
        return f"its form has other operations between this one and its last, {last}", 0
    return f"its form ends with the operation {last}, which does not follow here", 0


def failing_condition(binding: Binding) -> str:
    """The condition that a layer fails, in words."""
    assert binding.mismatch is not None, "bug in kfac_fx: a form that does not fit, and no condition that it fails"
    mismatch, place, wanted = binding.mismatch
    if mismatch in WORDS:
        return WORDS[mismatch].format(place=place_text(place), wanted=wanted)
    return misfit(wanted, place, binding.pattern)


def arguments_given(node: fx.Node) -> tuple[int, set[str]]:
    """How many arguments a node has by position, and the names of the others."""
    return len(node.args), set(node.kwargs)


def differing(wanted: fx.Node, place: fx.Node) -> str:
    """Words for the last operation of a form, to which the graph gives other arguments."""
    return f"its form has {call_text(wanted)} where the graph has {call_text(place)} at {where(place)}"


def call_text(node: fx.Node) -> str:
    """A call with the names of its operands: `sum(mul, [-1])`."""
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"{op_name(node)}({', '.join(arguments)})"


def misfit(wanted: Any, place: Any, pattern: Pattern) -> str:
    """Words for a part of a form that does not lie over the graph."""
    if not isinstance(wanted, fx.Node):
        return f"its form has {wanted!r} where the graph has {place_text(place)}"
    name, actual = str(wanted.target), place_text(place)
    if wanted.op != "placeholder":
        return f"its form has the operation {op_name(wanted)} where the graph has {actual}"
    if name in pattern.roles:
        return f"its {name} must be one parameter, or an expression of parameters that is known, not {actual}"
    return f"its argument {name} must be computed from the data, and stand for one value only, unlike {actual}"


def place_text(place: Any) -> str:
    """A node with its operation and line, or a literal."""
    if not isinstance(place, fx.Node):
        return repr(place)
    operation = str(place.target) if place.op in ("get_attr", "placeholder") else op_name(place)
    return f"{operation} at {where(place)}"
