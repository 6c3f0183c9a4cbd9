"""What the names of a layer's form stand for, found by laying the form's graph over the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ..graphs.labels import Label, parameters_behind
from ..graphs.operations import CASTS, op_name
from ..graphs.views import bound_parameter
from ..layers import Form
from ..matrix import Layout, Shape
from ..parametrizations.gathered import KEY as ELEMENTS
from ..parametrizations.gathered import constant
from ..parametrizations.linear_map import LinearMap
from ..words.pieces import Made
from ..words.slopes import OWN
from .jacobians import by_jacobian, static_shape


@dataclass
class Binding:
    """What the names of a form stand for while it is being laid over the graph."""

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pattern's operation -> graph's
    names: dict[str, Any] = field(default_factory=dict)  # placeholder -> node or literal
    parameters: dict[str, tuple[str, Layout]] = field(default_factory=dict)
    expressions: Mapping[fx.Node, Made] = field(default_factory=dict)  # what may fill a role beside a parameter
    made: dict[str, Made] = field(default_factory=dict)  # the roles that an expression fills
    foreign: dict[str, fx.Node] = field(default_factory=dict)  # roles that something else fills, whatever it is
    free: bool = False  # of the batch: what is computed from parameters alone may be the input
    gathers: nn.Module | None = None  # the weight is what was gathered from a parameter of this model, and no other
    # role has one
    numbers: fx.Node | None = None  # then: of its elements
    map: LinearMap | None = None  # from the parameter to the table in its place


def fits(
    wanted: Any, given: Any, form: Form, binding: Binding, label: Mapping[fx.Node, Label], shapes: Mapping[str, Shape]
) -> bool:
    """Lay the pattern's `wanted` over the graph's `given`, extending `binding`."""
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(given, (list, tuple))
            and len(wanted) == len(given)
            and all(fits(w, g, form, binding, label, shapes) for w, g in zip(wanted, given, strict=True))
        )
    if not isinstance(wanted, fx.Node):
        return not isinstance(given, fx.Node) and wanted == given
    if wanted.op == "placeholder":
        return binds(wanted, given, form, binding, label, shapes)
    given = uncast(given, binding, label)
    if not isinstance(given, fx.Node) or (wanted.op, wanted.target) != (given.op, given.target):
        return False
    if binding.nodes.setdefault(wanted, given) is not given or set(wanted.kwargs) != set(given.kwargs):
        return False
    pairs = [(wanted.args, given.args), *((value, given.kwargs[key]) for key, value in wanted.kwargs.items())]
    return all(fits(w, g, form, binding, label, shapes) for w, g in pairs)


def uncast(given: Any, binding: Binding, label: Mapping[fx.Node, Label]) -> Any:
    """Past casts and copies of what is computed from parameters alone, such as position embeddings: same rows."""
    while isinstance(given, fx.Node) and label[given] is Label.PURE and op_name(given) in CASTS:
        binding.nodes[given] = given
        given = given.args[0]
    return given


def binds(
    wanted: fx.Node,
    given: Any,
    form: Form,
    binding: Binding,
    label: Mapping[fx.Node, Label],
    shapes: Mapping[str, Shape],
) -> bool:
    """Bind a placeholder of the form: a role to a parameter or to None, another name to a node or a literal."""
    name = str(wanted.target)
    if name in binding.names:
        return bool(binding.names[name] is given)
    binding.names[name] = given
    if name not in form.roles:
        return not isinstance(given, fx.Node) or label[given] is not Label.PURE or binding.free
    if given is None:
        return bool(wanted.args)  # optional: the form gives it a default
    if not isinstance(given, fx.Node) or label[given].activation:
        return False
    if binding.gathers is not None:
        return binds_gathered(name, given, binding, label)
    parameter = bound_parameter(given, shapes)
    if name == "weight" and "value" in form.inputs:
        binding.names["value"] = given
    if parameter is None and given in binding.expressions:
        binding.made[name] = binding.expressions[given]
        return True
    if parameter is None and "elements" in form.inputs and ELEMENTS in given.meta:
        elements = given.meta[ELEMENTS]
        binding.names["elements"], binding.map = elements.numbers, elements.map
        parameter = elements.parameter, Layout(shapes[elements.parameter])
    if parameter is None and len(form.roles) > 1 and static_shape(given) is not None:
        binding.foreign[name] = given  # the rows of the other roles do not depend on its values
        return True
    if parameter is None or any(parameter[0] == other for other, _ in binding.parameters.values()):
        return False
    binding.parameters[name] = parameter
    return True


def binds_gathered(name: str, given: fx.Node, binding: Binding, label: Mapping[fx.Node, Label]) -> bool:
    """Bind a role where one weight was gathered: as a parameter of its own shape, for now."""
    if name != "weight":
        binding.foreign[name] = given
        return static_shape(given) is not None
    if ELEMENTS not in given.meta or given in binding.expressions:
        return False
    elements = given.meta[ELEMENTS]
    if elements.map is not None:
        return False
    shape = static_shape(given)
    if shape is None:
        value = constant(elements.numbers, binding.gathers, label)
        if value is None:
            return False
        shape = tuple(value.shape)
    binding.parameters[name], binding.numbers = (elements.parameter, Layout(shape)), elements.numbers
    return True


def reads_itself(binding: Binding, label: Mapping[fx.Node, Label]) -> bool:
    """Whether a parameter of one role is also in what fills another: a use that the match would hide."""
    own = {name for name, _ in binding.parameters.values()}
    slabs = [slab for made in binding.made.values() for slab in made.slabs]
    own |= {slab.parameter for slab in slabs}
    own |= {one.parameter for made in binding.made.values() for one in made.products}
    makers = [{name} for name, _ in binding.parameters.values()]
    makers += [{slab.parameter for slab in made.slabs} for made in binding.made.values()]
    if any(map(by_jacobian, binding.made.values())) and sum(map(len, makers)) > len(own):
        return True
    factors = [one.factor for slab in slabs for one in slab.slopes if one.name not in OWN and one.factor is not None]
    return any(own & parameters_behind(one, label) for one in (*binding.foreign.values(), *factors))
