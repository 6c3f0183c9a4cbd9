"""The matches that stay, where several claim one use of a parameter.

Rules, in this order; order in the graph or among the layers never decides:

1. a match of parameters that the user wants generic goes;
2. a match that splits a linked group goes;
3. a match of a layer of ours goes where one of the user's own layers claims the same use, unless ours explains more of
   the graph around it;
4. a match goes where it is two others joined and one of their parameters is also used by itself: `x @ w + b`, and `+ b`
   elsewhere;
5. a match whose nodes are a strict subset of another's that shares a parameter goes; inside a composite layer the parts
   stay and the composite goes.

Two that still claim one use are an error: a use that is registered twice counts twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx

from .choose import declared_generic
from .errors import AmbiguousRegistrationError, table
from .ir import WANTED, Note, Program, Use, where
from .layers import LAYERS

Reason = Callable[[Use], str | None]  # why a match goes; None: it stays


def claims(program: Program, notes: list[Note]) -> list[Use]:
    """The matches that stay; a note for each of the others. Raises AmbiguousRegistrationError with all culprits."""
    matches = drop(program.matches, lambda use: WANTED if declared_generic(program, use) else None, notes)
    matches = drop(matches, lambda use: split_linked_group(program, use), notes)
    matches = drop(matches, users_layers(program, matches), notes)
    matches = drop(matches, joined_elsewhere(program, matches), notes)
    matches = drop_contained(program, matches, notes)
    refuse_claimed_twice(program, matches)
    return matches


def drop(matches: Iterable[Use], reason: Reason, notes: list[Note]) -> list[Use]:
    """The matches that have no reason to go; a note with the reason of each of the others."""
    remaining: list[Use] = []
    for use in matches:
        if (words := reason(use)) is None:
            remaining.append(use)
        else:
            notes.append(Note(str(use), words))
    return remaining


def split_linked_group(program: Program, use: Use) -> str | None:
    names, owners = use.parameter_set, {program.owner(name) for name in use.parameter_set}
    groups = (program.options.groups.get(name) for name in sorted(owners | names))
    split = [group for group in groups if group is not None and group not in (owners, names)]
    if not split or program.layers[use.layer].parts:
        return None
    return f"splits the linked group ({', '.join(sorted(split[0]))})"


def users_layers(program: Program, matches: Sequence[Use]) -> Reason:
    """Why a match of a layer of ours goes: one of the user's own layers claims the same use."""
    order = {id(use): number for number, use in enumerate(matches)}
    by_node = uses_by_node(use for use in matches if declared_by_user(program, use))

    def reason(use: Use) -> str | None:
        near = () if declared_by_user(program, use) else (rival for node in use.nodes for rival in by_node[node])
        rival = min((rival for rival in near if rivals(use, rival)), key=lambda rival: order[id(rival)], default=None)
        return None if rival is None else f"{rival} is of a layer of your own, which wins"

    return reason


def uses_by_node(uses: Iterable[Use]) -> dict[fx.Node, list[Use]]:
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    for use in uses:
        for node in use.nodes:
            by_node[node].append(use)
    return by_node


def declared_by_user(program: Program, use: Use) -> bool:
    """Whether its layer is declared by the user."""
    return program.layers[use.layer] is not LAYERS.get(use.layer)


def rivals(use: Use, other: Use) -> bool:
    """Whether both claim one use, and neither is a part of the other."""
    apart = use.nodes < other.nodes or other.nodes < use.nodes
    return not apart and bool(use.nodes & other.nodes and use.parameter_set & other.parameter_set)


def joined_elsewhere(program: Program, matches: Sequence[Use]) -> Reason:
    """Why a match of a layer with its shift goes: the shift is a layer of its own elsewhere. Apart, both are exact."""
    by_node = uses_by_node(matches)
    alone: dict[tuple[str, frozenset[str]], list[Use]] = defaultdict(list)
    for use in matches:
        if len(use.parameter_set) == 1:
            alone[use.layer, use.parameter_set].append(use)

    def reason(use: Use) -> str | None:
        inside = {id(inner): inner for node in use.nodes for inner in by_node[node] if inner.nodes < use.nodes}.values()
        sets = {inner.parameter_set for inner in inside}
        elsewhere = (
            f"{inner} by itself, as {other} at {where(other.output)}"
            for inner in inside
            if inner.output is use.output
            and inner.layer != use.layer
            and use.parameter_set - inner.parameter_set in sets
            for other in alone[inner.layer, inner.parameter_set]
            if not any(other.nodes < joined.nodes for joined in by_node[other.output])
        )
        return None if program.layers[use.layer].parts else next(elsewhere, None)

    return reason


def drop_contained(program: Program, matches: Sequence[Use], notes: list[Note]) -> list[Use]:
    by_node = uses_by_node(matches)
    remaining: list[Use] = []
    for use in matches:
        parts = program.layers[use.layer].parts
        if parts:
            notes.append(Note(str(use), f"registered as its parts, {' and '.join(parts)}"))
            continue
        larger = [
            other
            for other in by_node[use.output]
            if use.parameter_set & other.parameter_set
            and (use.nodes < other.nodes or (use.nodes == other.nodes and use.parameter_set < other.parameter_set))
        ]
        whole = next((other for other in larger if program.layers[other.layer].parts), None)
        if whole is not None and use.layer in program.layers[whole.layer].parts:
            others = [other for other in larger if not program.layers[other.layer].parts]
            if not others:
                remaining.append(replace(use, part_of=str(whole)))
                continue
        if larger:
            container = "a larger match of this layer" if str(use) == str(larger[0]) else str(larger[0])
            notes.append(Note(str(use), f"part of {container}"))
        else:
            remaining.append(use)
    return remaining


def parts_of_one(use: Use, other: Use) -> bool:
    """Whether `cut` made both of one match: of a parameter in two of its roles."""
    return (use.layer, use.form, use.nodes) == (other.layer, other.form, other.nodes)


def refuse_claimed_twice(program: Program, matches: Sequence[Use]) -> None:
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    rows: dict[tuple[str, str], None] = {}
    for use in matches:
        for node in use.nodes:
            for other in by_node[node]:
                shared = sorted(use.parameter_set & other.parameter_set)
                if shared and not parts_of_one(use, other):
                    layers = (program.layers[claim.layer] for claim in (other, use))
                    declared = " and ".join(f"{layer.name} ({layer.location})" for layer in layers)
                    rows[", ".join(shared), f"at {where(use.output)}: {declared}"] = None
            by_node[node].append(use)
    if rows:
        many = "1 use is" if len(rows) == 1 else f"{len(rows)} uses are"
        raise AmbiguousRegistrationError(
            f"{many} claimed by two layers:\n{table(rows)}\n"
            "Leave one of them out of layers=[...], or let its `where` refuse what is not meant."
        )
