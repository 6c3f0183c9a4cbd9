"""The zoo itself: every model runs, learns from its batch, and its expectations speak of parameters it has."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from kfac_fx.passes.torch_private import pytree
from tests.models import CASES, ZOO, Case


def tensors(outputs: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def test_every_case_has_a_name_of_its_own() -> None:
    assert len(ZOO) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_runs_backward_and_is_covered_by_its_expectations(case: Case) -> None:
    model = case.make()
    outputs = model(*case.inputs(), **case.keywords())
    sum((out.float() ** 2).mean() for out in tensors(outputs)).backward()
    structured = [name for _, names, _ in case.expected for name in names]
    count = Counter([*structured, *case.generic, *case.unused])
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name.partition("[")[0] for name in count}  # `w[0:8]` is a piece of w
    assert expected == trainable, "every trainable parameter is expected somewhere, under its first name"
    assert set(count.values()) == {1}
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved == trainable - set(case.unused)
