"""Two Kronecker-factored blocks of equal shapes in one group, with the sums of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.fisher.block import make_groups
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.recording.statistics import additive
from tests.runtime.fisher_cases import Form as ToyForm
from tests.runtime.fisher_cases import draw, register, weight

NAMES = ("first", "second")
FORMS = [ToyForm(MatrixForm((name, weight((3, 2), "o i -> o i")[1]), None), {name: (3, 2)}) for name in NAMES]
PARAMETERS = {name: torch.zeros(3, 2, dtype=torch.float64) for name in NAMES}


def group_of(approximation: str = "kron", cases: int = 5) -> tuple[BlockGroup, list[dict[str, Tensor]]]:
    """A group of two blocks, and the sums of one batch."""
    torch.manual_seed(0)
    registrations = [register(form, approximation) for form in FORMS]
    (group,) = make_groups(registrations, PARAMETERS, roots=(-1.0, "cholesky"), damping=torch.tensor(0.3))
    sums = [
        additive(registration.structure, draw(registration, form, cases))
        for registration, form in zip(registrations, FORMS, strict=True)
    ]
    return group, sums


def vector() -> dict[str, Tensor]:
    return {name: torch.randn(3, 2) for name in NAMES}
