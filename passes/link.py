"""The user's declarations, checked against the model and brought to canonical parameter names.

Linked parameters belong in one Fisher block; an approximation is asked for by parameter or module name (with `*`), by
layer name or by module class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from .approximations import APPROXIMATIONS
from .errors import ApproximationError, LinkError, nearest, table
from .ir import GENERIC, Program


def link(program: Program) -> Program:
    """Raises LinkError or ApproximationError, each with all its culprits."""
    check_linked_names(program)
    linked = {
        frozenset(program.aliases.get(name, name) for name in group): approximation
        for group, approximation in program.options.linked.items()
    }
    check_disjoint(linked)
    check_approximations(program, linked)
    return program.but(options=replace(program.options, linked=linked))


def check_linked_names(program: Program) -> None:
    names = {*program.aliases, *(piece.name for piece in program.options.pieces)}
    unknown = sorted({name for group in program.options.linked for name in group if name not in names})
    rows = [(repr(name), what_is(name, program)) for name in unknown]
    if len(rows) == 1:
        raise LinkError(f"linked parameter {' '.join(rows[0])}")
    if rows:
        raise LinkError(f"{len(rows)} linked parameters are no trainable parameters of the model:\n{table(rows)}")


def what_is(name: str, program: Program) -> str:
    if name in dict(program.root.named_parameters(remove_duplicate=False)):
        return "is frozen: its requires_grad is False."
    return f"is not a parameter of the model.{nearest(name, program.aliases)}"


def check_disjoint(linked: Mapping[frozenset[str], str | None]) -> None:
    count = Counter(name for group in linked for name in group)
    if twice := [name for name, groups in count.items() if groups > 1]:
        rows = [
            (name, " and ".join(f"({', '.join(sorted(g))})" for g in linked if name in g)) for name in sorted(twice)
        ]
        raise LinkError(
            f"parameters linked in more than one group:\n{table(rows)}\nJoin the groups, or take the name out of one."
        )


def check_approximations(program: Program, linked: Mapping[frozenset[str], str | None]) -> None:
    rows: list[tuple[str, str]] = []
    names = {*program.aliases, *program.options.modules, *program.layers}
    values = (*APPROXIMATIONS, GENERIC)
    for key, value in program.options.approximations.items():
        if value not in values:
            rows.append((shown(key), f"{value!r} is no approximation.{nearest(str(value), values)}"))
        elif key not in names and not names_something(key, program):
            rows.append((shown(key), f"names no parameter, module or layer of the model.{nearest(shown(key), names)}"))
    for group, asked in linked.items():
        if asked is not None and asked not in APPROXIMATIONS:
            rows.append((", ".join(sorted(group)), f"{asked!r} is no approximation.{nearest(asked, APPROXIMATIONS)}"))
    if rows:
        raise ApproximationError(
            f"approximations that cannot be honored:\n{table(rows)}\nApproximations are {', '.join(values)}."
        )


def shown(key: Any) -> str:
    return key.__name__ if isinstance(key, type) else str(key)


def names_something(key: Any, program: Program) -> bool:
    if isinstance(key, type):
        return any(issubclass(kind, key) for kind in program.options.modules.values())
    named = [*program.aliases, *program.options.modules]
    return key == GENERIC or any(fnmatchcase(name, key) for name in named)
