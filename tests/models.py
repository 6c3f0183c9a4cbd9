"""The zoo of small models, each with its expected registrations beside it; the families are in tests/zoo/."""

from __future__ import annotations

from tests.zoo import (
    attention,
    convolution,
    dense,
    derivatives,
    functions,
    idioms,
    odd,
    parts,
    recurrent,
    reparametrized,
    tables,
    users,
)
from tests.zoo.case import Case, Expected

CASES: tuple[Case, ...] = (
    *dense.CASES,
    *convolution.CASES,
    *attention.CASES,
    *derivatives.CASES,
    *functions.CASES,
    *parts.CASES,
    *reparametrized.CASES,
    *tables.CASES,
    *recurrent.CASES,
    *odd.CASES,
    *users.CASES,
    *idioms.CASES,
)
ZOO: dict[str, Case] = {case.name: case for case in CASES}

__all__ = ["CASES", "ZOO", "Case", "Expected"]
