"""Which matches stay, where several claim one use of a parameter.

Rules, in this order; order in the graph or among the layers never decides:

0. a match of parameters that the user wants generic goes;
1. a match that splits a linked group goes;
2. a match of a layer of ours goes where one of the user's own layers claims the same use, unless ours explains more of
   the graph around it;
3. a match goes where it is two others joined and one of their parameters is also used by itself: `x @ w + b`, and `+ b`
   elsewhere;
4. a match whose nodes are a strict subset of another's that shares a parameter goes; inside a composite layer the parts
   stay and the composite goes.

Two that still claim one use are an error: a use that is registered twice counts twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from ..errors import AmbiguousRegistrationError, table
from ..ir import WANTED, Note, Program, Use, where
from ..layers import LAYERS
from .approximation import declared_generic


def claims(program: Program) -> tuple[list[Use], list[Note]]:
    """The matches that stay, and why the others do not. Raises AmbiguousRegistrationError with all culprits."""
    notes: list[Note] = []
    matches = drop_generic(program, program.matches, notes)
    matches = drop_split_groups(program, matches, notes)
    matches = drop_ours(program, matches, notes)
    matches = drop_contained(program, drop_joined(program, matches, notes), notes)
    refuse_claimed_twice(program, matches)
    return matches, notes


def drop_generic(program: Program, matches: Iterable[Use], notes: list[Note]) -> list[Use]:
    kept: list[Use] = []
    for use in matches:
        if declared_generic(program, use):
            notes.append(Note(str(use), WANTED))
        else:
            kept.append(use)
    return kept


def drop_split_groups(program: Program, matches: Iterable[Use], notes: list[Note]) -> list[Use]:
    kept: list[Use] = []
    for use in matches:
        names, owners = use.parameter_set, {program.owner(name) for name in use.parameter_set}
        groups = (program.options.groups.get(name) for name in sorted(owners | names))
        split = [group for group in groups if group is not None and group not in (owners, names)]
        if split and not program.layers[use.layer].parts:
            notes.append(Note(str(use), f"splits the linked group ({', '.join(sorted(split[0]))})"))
        else:
            kept.append(use)
    return kept


def drop_ours(program: Program, matches: Sequence[Use], notes: list[Note]) -> list[Use]:
    owned: dict[fx.Node, list[int]] = defaultdict(list)  # the user's matches that a node is in
    for number, use in enumerate(matches):
        for node in use.nodes if own(program, use) else ():
            owned[node].append(number)
    kept: list[Use] = []
    for use in matches:
        near = set() if own(program, use) else {n for node in use.nodes for n in owned.get(node, ())}
        rival = next((matches[n] for n in sorted(near) if rivals(use, matches[n])), None)
        if rival is None:
            kept.append(use)
        else:
            notes.append(Note(str(use), f"{rival} is of a layer of your own, which wins"))
    return kept


def own(program: Program, use: Use) -> bool:
    """Whether its layer is declared by the user."""
    return program.layers[use.layer] is not LAYERS.get(use.layer)


def rivals(use: Use, other: Use) -> bool:
    """Whether both claim one use, and neither is a part of the other."""
    apart = use.nodes < other.nodes or other.nodes < use.nodes
    return not apart and bool(use.nodes & other.nodes and use.parameter_set & other.parameter_set)


def drop_joined(program: Program, matches: Sequence[Use], notes: list[Note]) -> list[Use]:
    """Of a layer and its shift together, where the shift is one of its own elsewhere: apart, both are exact."""
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    alone: dict[tuple[str, frozenset[str]], list[Use]] = defaultdict(list)
    for use in matches:
        for node in use.nodes:
            by_node[node].append(use)
        if len(use.parameter_set) == 1:
            alone[use.layer, use.parameter_set].append(use)
    kept: list[Use] = []
    for use in matches:
        inside = {id(one): one for node in use.nodes for one in by_node[node] if one.nodes < use.nodes}.values()
        sets = {one.parameter_set for one in inside}
        elsewhere = (
            (one, other)
            for one in inside
            if one.output is use.output and one.layer != use.layer and use.parameter_set - one.parameter_set in sets
            for other in alone[one.layer, one.parameter_set]
            if not any(other.nodes < joined.nodes for joined in by_node[other.output])
        )
        found = next(elsewhere, None) if not program.layers[use.layer].parts else None
        if found is None:
            kept.append(use)
        else:
            notes.append(Note(str(use), f"{found[0]} by itself, as {found[1]} at {where(found[1].output)}"))
    return kept


def drop_contained(program: Program, matches: Sequence[Use], notes: list[Note]) -> list[Use]:
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    for use in matches:
        for node in use.nodes:
            by_node[node].append(use)
    kept: list[Use] = []
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
                kept.append(replace(use, part_of=str(whole)))
                continue
        if larger:
            notes.append(Note(str(use), f"part of {larger[0]}"))
        else:
            kept.append(use)
    return kept


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
                    layers = (program.layers[one.layer] for one in (other, use))
                    said = " and ".join(f"{layer.name} ({layer.location})" for layer in layers)
                    rows[", ".join(shared), f"at {where(use.output)}: {said}"] = None
            by_node[node].append(use)
    if rows:
        many = "1 use is" if len(rows) == 1 else f"{len(rows)} uses are"
        raise AmbiguousRegistrationError(
            f"{many} claimed by two layers:\n{table(rows)}\n"
            "Leave one of them out of layers=[...], or let its `where` refuse what is not meant."
        )
