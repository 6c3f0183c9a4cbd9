"""The layers that match or nearly match at a place of the graph, and the condition that each of the latter fails.

`match` keeps what fits and drops the rest without a word. A user whose parameter is generic asks for the rest: which
layer did the library look for there, and what would have to be different?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .graphs.labels import Label, labels_of
from .graphs.operations import op_name
from .ir import Program, where
from .layers import LAYERS, Form
from .match import Binding, Mismatch, Pattern, held_shapes, lay_over, patterns_by_target
from .torch_private import OpOverload

WORDS = {
    Mismatch.READ: "its intermediate value {place} is read by another operation, too",
    Mismatch.INPUT: "its input is no computed value at {place}",
    Mismatch.LEARNED: "no trainable parameter fills one of its roles at {place}",
    Mismatch.WHERE: "its condition on shapes and settings fails at {place}",
    Mismatch.ITSELF: "a parameter is in two operands of {place}",
    Mismatch.SHAPE: "a parameter has another shape than it takes at {place}",
}


@dataclass(frozen=True)
class NearMatch:
    """A layer at a place.

    Attributes:
        layer: the name of the layer.
        output: the node that would compute the layer's output.
        condition: the condition that fails, in words; None if the layer matches.
        fitted: the number of operations that fitted before.
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


def near_matches(program: Program, place: fx.Node) -> list[NearMatch]:
    """The layers with the operation `place` in one of their forms: those that match, then those that nearly do.

    One entry a layer: of its forms and outputs, the one with the most fitting operations. A layer of the user always
    has an entry. `program` has its expressions, as after the pass `express`.
    """
    label, shapes = labels_of(program), held_shapes(program)
    nearest: dict[str, NearMatch] = {}
    for patterns in patterns_by_target(program.layers).values():
        for pattern in patterns:
            name = pattern.layer.name
            declared = LAYERS.get(name) is not pattern.layer
            if declared:
                nearest.setdefault(name, NearMatch(name, place, missing_output(pattern, place), 0, declared))
            for root in outputs(pattern, place):
                free = label[root] is Label.FREE
                binding = Binding(pattern.form, label, shapes, program.parameter_exprs, free)
                use = lay_over(pattern, root, label, shapes, program.parameters, binding=binding)
                if place not in binding.nodes.values():
                    continue
                words = None if use else condition(binding, pattern.form)
                near = NearMatch(name, root, words, len(binding.nodes), declared)
                if name not in nearest or near.rank > nearest[name].rank:
                    nearest[name] = near
    return sorted(nearest.values(), key=lambda near: near.rank, reverse=True)


def outputs(pattern: Pattern, place: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graph that may compute the pattern's output if `place` is one of its operations."""
    level = [place] if any(node.target == place.target for node in operations(pattern.root)) else []
    for _ in operations(pattern.root):
        yield from (node for node in level if node.target == pattern.root.target)
        level = list(dict.fromkeys(user for node in level for user in node.users))


def operations(root: fx.Node) -> list[fx.Node]:
    """The operations of a pattern."""
    return [node for node in root.graph.nodes if node.op not in ("placeholder", "output")]


def missing_output(pattern: Pattern, place: fx.Node) -> str:
    """The condition that a layer fails if no node that `place` leads to computes its output."""
    if all(node.target != place.target for node in operations(pattern.root)):
        spelling = f", in a form torch.ops.{place.target}" if isinstance(place.target, OpOverload) else ""
        return f"its form has no operation {op_name(place)}{spelling}"
    return f"its form ends with the operation {op_name(pattern.root)}, which does not follow here"


def condition(binding: Binding, form: Form) -> str:
    """The condition that a layer fails, in words."""
    assert binding.mismatch is not None, "bug in kfac_fx: a form that does not fit, and no condition that it fails"
    mismatch, place, wanted = binding.mismatch
    return WORDS[mismatch].format(place=text(place)) if mismatch in WORDS else misfit(wanted, place, form)


def misfit(wanted: Any, place: Any, form: Form) -> str:
    """Words for a part of a form that does not lie over the graph."""
    if not isinstance(wanted, fx.Node):
        return f"its form has {wanted!r} where the graph has {text(place)}"
    name = str(wanted.target)
    if wanted.op != "placeholder":
        return f"its form has the operation {op_name(wanted)} where the graph has {text(place)}"
    if name in form.roles:
        return f"its {name} must be one parameter, or an expression of parameters that is known, not {text(place)}"
    return f"its argument {name} must be computed from the data, and stand for one value only, unlike {text(place)}"


def text(place: Any) -> str:
    """A node with its operation and line, or a literal."""
    if not isinstance(place, fx.Node):
        return repr(place)
    operation = str(place.target) if place.op in ("get_attr", "placeholder") else op_name(place)
    return f"{operation} at {where(place)}"
