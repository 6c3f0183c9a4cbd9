"""Every use of every declared layer: the form of the layer, laid over the graph from its output back to its inputs.

A form is traced and normalized as the model is, so one language is compared with itself. Values that the form
computes on the way to its output must have no other reader: `h = x @ w; h + b; f(h)` is a product and a shift,
not one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from torch import Tensor, fx, nn

from .cases import number_of_cases, with_batch_dim, with_mask
from .errors import LayerError, fatal
from .graphs.edit import attribute, functional
from .graphs.labels import Label, ancestors, labels_of, parameters_behind
from .graphs.operations import CASTS, bound_parameter, op_name
from .graphs.spelling import order_operands, respell
from .ir import CASES, ELEMENTS, Bound, Program, Use, returned_by
from .layers import Form, Layer
from .matrix import Layout, Shape
from .parametrization import nodes_of
from .parametrizations.functions import static_shape
from .parametrizations.tables import LinearMap, constant, gathered_weight
from .pieces import ParameterExpr
from .tracing.substitutes import ThreadTracer


@dataclass(frozen=True)
class Pattern:
    """A form as a graph. `root` computes its output."""

    layer: Layer
    number: int
    root: fx.Node

    @property
    def form(self) -> Form:
        return self.layer.forms[self.number]


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
        gathered = any(ELEMENTS in operand.meta for operand in node.all_input_nodes)
        for pattern in patterns.get(node.target, ()):
            uses = [lay_over(pattern, node, label, shapes, program.parameters, program.parameter_exprs)]
            if gathered and not pattern.layer.parts:
                uses.append(lay_over_gathered(pattern, node, label, shapes, program))
            for use in filter(None, uses):
                matches.append(with_mask(use if program.cases is None else with_batch_dim(use, program.cases)))
    return program.but(matches=tuple(matches))


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
    patterns: dict[Any, list[Pattern]] = {}
    for layer in layers.values():
        for number, form in enumerate(layer.forms):
            pattern = Pattern(layer, number, form_graph(layer, form))
            patterns.setdefault(pattern.root.target, []).append(pattern)
    return patterns


def form_graph(layer: Layer, form: Form) -> fx.Node:
    """The node that computes the form's output, in a normalized graph. Raises LayerError if it cannot be traced."""
    try:
        root = returned(form.function, form.roles)
    except Exception as error:
        if fatal(error):
            raise
        raise LayerError(f"the form of layer {layer.name!r} ({layer.location}) cannot be traced: {error}") from error
    if not isinstance(root, fx.Node) or root.op == "placeholder":
        raise LayerError(f"the form of layer {layer.name!r} ({layer.location}) must return one computed tensor")
    return root


@lru_cache(maxsize=1000)  # forms are the same for all models
def returned(form: Callable[..., Any], roles: tuple[str, ...]) -> Any:
    """The value that a function returns, in its normalized graph."""
    graph = ThreadTracer().trace(form)
    pure = [node for node in graph.find_nodes(op="placeholder") if node.target in roles]
    functional(graph)
    respell(graph)
    order_operands(graph, (), pure)
    return returned_by(graph)


def lay_over(
    pattern: Pattern,
    root: fx.Node,
    label: Mapping[fx.Node, Label],
    shapes: Mapping[str, Shape],
    trained: Collection[str],
    expressions: Mapping[fx.Node, ParameterExpr] | None = None,
    binding: Binding | None = None,
) -> Use | None:
    """The use whose output is `root`, or None. A frozen weight or bias fills its role and is not registered; neither is
    one that is computed in another way. `cut` decides which parameters of an expression are registered."""
    form, usable = pattern.form, {} if pattern.layer.parts else expressions or {}
    binding = binding or Binding(form, label, shapes, usable, label[root] is Label.FREE)
    if not binding.fits(pattern.root, root):
        return None
    inside = set(binding.nodes.values())
    if read := [node for node in inside - {root} if any(user not in inside for user in node.users)]:
        binding.refuse(Mismatch.READ, read[0])
        return None
    if form.inputs[0].startswith("_"):
        binding.names[form.inputs[0]] = root  # no input: the output stands for it
    if not isinstance(binding.names.get(form.inputs[0]), fx.Node):
        binding.refuse(Mismatch.INPUT, root)
        return None
    attrs = {name: binding.names.get(name) for name in form.inputs[1:]}
    attrs |= {role: layout.result for role, (_, layout) in binding.parameters.items()}
    attrs |= {role: expr.shape for role, expr in binding.exprs.items()}
    attrs |= {role: static_shape(node) for role, node in binding.foreign.items()}
    roles = [role for role in form.roles if role in binding.parameters]
    trainable = {role: binding.parameters[role] for role in roles if binding.parameters[role][0] in trained}
    learned = trainable or any(expr.slices or expr.products for expr in binding.exprs.values())
    if not learned:
        binding.refuse(Mismatch.LEARNED, root)
        return None
    if not form.where(attrs):
        binding.refuse(Mismatch.WHERE, root)
        return None
    if binding.reads_itself():
        binding.refuse(Mismatch.ITSELF, root)
        return None
    if binding.batch_independent:
        attrs[CASES] = number_of_cases(root, None)
    bound: dict[str, Bound] = {}
    exprs: dict[str, tuple[ParameterExpr, Layout]] = {}
    try:
        for role, (name, used) in trainable.items():
            canonical = form.layout(role, used, attrs) if not pattern.layer.parts else Layout(used.result)
            bound[role] = Bound(name, used, canonical)
        for role, expr in binding.exprs.items():
            exprs[role] = expr, form.layout(role, Layout(expr.shape), attrs)
    except LayerError:  # such as a 3-D weight in a matmul, which is no linear layer
        binding.refuse(Mismatch.SHAPE, root)
        return None
    input, nodes = binding.names[form.inputs[0]], frozenset(inside)
    use = Use(pattern.layer.name, pattern.number, input, root, bound, attrs, nodes, exprs=exprs)
    return use if binding.map is None else with_map(use, binding.map)


def with_map(use: Use, linear_map: LinearMap) -> Use:
    """The layer has a table in the place of its parameter, so the shape that it knows is the table's."""
    (role,) = use.parameters
    return replace(use, through=(linear_map,), attrs={**use.attrs, role: linear_map.columns.shape})


def lay_over_gathered(
    pattern: Pattern, root: fx.Node, label: Mapping[fx.Node, Label], shapes: Mapping[str, Shape], program: Program
) -> Use | None:
    """The use of a weight alone whose outputs or inputs were gathered from a parameter's; None if it is no such one."""
    independent = label[root] is Label.FREE
    binding = Binding(pattern.form, label, shapes, program.parameter_exprs, independent, gathers=program.root)
    use = lay_over(pattern, root, label, shapes, program.parameters, None, binding)
    if use is None or binding.numbers is None:
        return None
    bound = use.parameters["weight"]
    whole_table = gathered_weight(binding.numbers, bound.layout, shapes[bound.parameter], program.root, label)
    if whole_table is None:
        return None
    canonical, gathered = whole_table
    weight = Bound(bound.parameter, Layout(shapes[bound.parameter]), canonical)
    return replace(use, parameters={"weight": weight}, through=(gathered,))


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


@dataclass
class Binding:
    """The values that the names of a form stand for while it is laid over the graph.

    form, label, shapes: the form; the graph's labels, and the shapes that it holds.
    expressions: what may fill a role beside a parameter.
    batch_independent: what is computed from parameters alone may be the input.
    gathers: the model, if the weight must be gathered from one of its parameters, and no other role has one.

    nodes: the pattern's operation -> the graph's.
    names: the pattern's placeholder -> a node or a literal.
    parameters, exprs, foreign: the roles that a parameter, an expression or any other node fills.
    numbers: of the elements that were gathered.
    map: from the parameter to the table in its place.
    mismatch: why the form does not fit: the first condition that fails, the place in the graph, and the part of the
        pattern that should lie over it.
    """

    form: Form
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
        if not isinstance(actual, fx.Node) or (wanted.op, wanted.target) != (actual.op, actual.target):
            return False
        if self.nodes.setdefault(wanted, actual) is not actual or set(wanted.kwargs) != set(actual.kwargs):
            return False
        pairs = [(wanted.args, actual.args), *((value, actual.kwargs[key]) for key, value in wanted.kwargs.items())]
        return all(self.fits(inner, its) for inner, its in pairs)

    def uncast(self, actual: Any) -> Any:
        """Skip casts and copies of what is computed from parameters alone, such as position embeddings: same rows."""
        while isinstance(actual, fx.Node) and self.label[actual] is Label.PURE and op_name(actual) in CASTS:
            self.nodes[actual] = actual
            actual = actual.args[0]
        return actual

    def binds(self, wanted: fx.Node, actual: Any) -> bool:
        """Bind a placeholder of the form: a role to a parameter or to None, another name to a node or a literal."""
        name = str(wanted.target)
        if name in self.names:
            return bool(self.names[name] is actual)
        self.names[name] = actual
        if name not in self.form.roles:
            return not isinstance(actual, fx.Node) or self.label[actual] is not Label.PURE or self.batch_independent
        if actual is None:
            return bool(wanted.args)  # optional: the form gives it a default
        if not isinstance(actual, fx.Node) or self.label[actual].activation:
            return False
        if self.gathers is not None:
            return self.binds_gathered(name, actual)
        parameter = bound_parameter(actual, self.shapes)
        if name == "weight" and "value" in self.form.inputs:
            self.names["value"] = actual
        if parameter is None and actual in self.expressions:
            self.exprs[name] = self.expressions[actual]
            return True
        if parameter is None and "elements" in self.form.inputs and ELEMENTS in actual.meta:
            elements = actual.meta[ELEMENTS]
            self.names["elements"], self.map = elements.numbers, elements.map
            parameter = elements.parameter, Layout(self.shapes[elements.parameter])
        if parameter is None and len(self.form.roles) > 1 and static_shape(actual) is not None:
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
        factors = [node for nodes in steps if "factor" in nodes for node in nodes_of(nodes["factor"])]
        return any(names & parameters_behind(node, self.label) for node in (*self.foreign.values(), *factors))
