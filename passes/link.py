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

from .errors import ApproximationError, LinkError, nearest, table
from .ir import APPROXIMATIONS, Program


def link(program: Program) -> Program:
    """Raises LinkError or ApproximationError, each with all its culprits."""
    check_linked_names(program)
    linked = {
        frozenset(program.aliases[name] for name in group): approximation
        for group, approximation in program.options.linked.items()
    }
    check_disjoint(linked)
    check_approximations(program, linked)
    return program.but(options=replace(program.options, linked=linked))


def check_linked_names(program: Program) -> None:
    unknown = sorted({name for group in program.options.linked for name in group if name not in program.aliases})
    if not unknown:
        return
    if len(unknown) == 1:
        (name,) = unknown
        raise LinkError(f"linked parameter {name!r} is not a parameter of the model.{nearest(name, program.aliases)}")
    rows = [(repr(name), nearest(name, program.aliases).strip()) for name in unknown]
    raise LinkError(f"{len(unknown)} linked parameters are not trainable parameters of the model:\n{table(rows)}")


def check_disjoint(linked: Mapping[frozenset[str], str | None]) -> None:
    count = Counter(name for group in linked for name in group)
    if twice := [name for name, groups in count.items() if groups > 1]:
        rows = [(name, " and ".join(str(tuple(sorted(g))) for g in linked if name in g)) for name in sorted(twice)]
        raise LinkError(
            f"parameters linked in more than one group:\n{table(rows)}\nJoin the groups, or take the name out of one."
        )


def check_approximations(program: Program, linked: Mapping[frozenset[str], str | None]) -> None:
    rows: list[tuple[str, str]] = []
    known = {*program.aliases, *program.options.modules, *program.layers, "generic"}
    for key, value in program.options.approximations.items():
        if value not in APPROXIMATIONS:
            rows.append((repr(key), f"{value!r} is no approximation.{nearest(str(value), APPROXIMATIONS)}"))
        elif not names_something(key, program):
            shown = key.__name__ if isinstance(key, type) else str(key)
            rows.append((shown, f"names no parameter, module or layer.{nearest(shown, known)}"))
    for group, asked in linked.items():
        if asked is not None and asked not in APPROXIMATIONS:
            rows.append((str(tuple(sorted(group))), f"{asked!r} is no approximation.{nearest(asked, APPROXIMATIONS)}"))
    if rows:
        raise ApproximationError(
            f"approximations that cannot be honored:\n{table(rows)}\nApproximations are {', '.join(APPROXIMATIONS)}."
        )


def names_something(key: Any, program: Program) -> bool:
    if isinstance(key, type):
        return any(issubclass(kind, key) for kind in program.options.modules.values())
    named = [*program.aliases, *program.options.modules]
    return key in program.layers or key == "generic" or any(fnmatchcase(name, key) for name in named)
