"""Tables of which `make test` runs a part, and `make slow` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every(step: int, rows: Iterable[Any], first: int = 0) -> list[Any]:
    """The rows, or names of cases, of which every `step`-th is quick. first: the number of the first quick one."""
    params = [row if isinstance(row, ParameterSet) else pytest.param(row) for row in rows]
    return [
        param
        if number % step == first
        else pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.slow])
        for number, param in enumerate(params)
    ]


def pairs(*tables: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with all combinations. Quick are as many of them as the longest table has rows, with
    every row of every table. A table has a name or several, and rows; those of a dictionary are named by its keys."""
    named = [
        [(str(key), value) for key, value in rows.items()]
        if isinstance(rows, dict)
        else [(text_of(row, number), row) for number, row in enumerate(rows)]
        for _, rows in tables
    ]
    quick = {
        tuple((turn + turn // len(rows) * number) % len(rows) for number, rows in enumerate(named))
        for turn in range(max(map(len, named)))
    }
    params = []
    for places in product(*(range(len(rows)) for rows in named)):
        chosen = [rows[place] for rows, place in zip(named, places, strict=True)]
        values: list[Any] = []
        for (names, _), (_, value) in zip(tables, chosen, strict=True):
            values += value if "," in names else [value]
        marks = () if places in quick else pytest.mark.slow
        params.append(pytest.param(*values, id="-".join(name for name, _ in chosen), marks=marks))
    return pytest.mark.parametrize(", ".join(names for names, _ in tables), params)


def text_of(row: Any, number: int) -> str:
    """The name of a row: its number where its text has the address of a function."""
    text = getattr(row, "__name__", str(row))
    return str(number) if " at 0x" in text else text


ParameterSet = type(pytest.param())
