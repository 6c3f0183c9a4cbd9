"""Parameters that no match claims: generic where a loss depends on them, unused where none does."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from ..errors import LinkError, table
from ..graphs.labels import Edge, ancestors, entries
from ..graphs.operations import OWN_BACKWARD, PARTS, VIEWS, op_name
from ..ir import GENERIC, WANTED, Program, Registration, source_line, where
from .approximation import choose, declared_generic, requested

MOVES = VIEWS | PARTS | {"expand", "reshape_as"}


def leftovers(program: Program, taken: set[str]) -> tuple[list[Registration], tuple[str, ...]]:
    """Generic registrations for what is used but unclaimed, and the names of what is not used at all."""
    edges: dict[str, list[Edge]] = defaultdict(list)
    for edge, names in entries(program).items():
        for name in names:
            edges[name].append(edge)
    wanted = {name: WANTED for use in program.matches if declared_generic(program, use) for name in use.parameter_set}
    generics: list[Registration] = []
    unmatched: list[tuple[str, str]] = []
    for name in program.shapes:
        if name in taken or name not in edges:
            continue
        owner = program.owner(name)
        group = program.options.groups.get(owner) or program.options.groups.get(name, frozenset())
        if len(group) > 1:
            others = ", ".join(sorted(group - {owner, name}))
            unmatched.append((name, f"linked with {others}; enters {enters(edges[name])}"))
        if GENERIC in requested(program, (name,), "generic"):
            wanted[name] = WANTED
        approximation, _ = choose(program, "generic", None, (), name)
        unknown = own_backward(edges[name], owner) or f"no layer has the form of {enters(edges[name])}"
        generics.append(program.generic(name, wanted.get(name, unknown), approximation))
    if unmatched:
        raise LinkError(
            f"linked parameters that no layer matched as a group:\n{table(unmatched)}\n"
            "Take them out of `linked`, or declare a layer of this form: compile(..., layers=[...])."
        )
    return generics, tuple(name for name in program.shapes if name not in taken and name not in edges)


def own_backward(edges: list[Edge], parameter: str) -> str | None:
    """The first autograd.Function of a user's that the parameter enters, if it does."""
    for pure, act in edges:
        between = [act, *ancestors([pure])]
        for node in (one for one in between if op_name(one) == OWN_BACKWARD):
            if any(one.op == "get_attr" and one.target == parameter for one in ancestors([node])):
                name, more = node.target.function.__name__, len(edges) - 1  # type: ignore[union-attr]  # see `own_backwards`
                others = f", and has {more} more use{'s' if more > 1 else ''}" if more else ""
                return f"enters {name} at {source_line(node) or node.name}, whose backward is its own{others}"
    return None


def enters(edges: list[Edge]) -> str:
    more = f" and {len(edges) - 1} more" if len(edges) > 1 else ""
    (pure, act), *_ = edges
    while pure.op != "get_attr" and op_name(pure) in MOVES and isinstance(pure.args[0], fx.Node):
        pure = pure.args[0]
    through = f" through {op_name(pure)}" if pure.op != "get_attr" else ""
    return where(act) + through + more
