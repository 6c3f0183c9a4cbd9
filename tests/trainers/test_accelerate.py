"""Accelerate: accumulation and bf16, with the model or the compiled module prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kfac_fx
from tests.trainers.common import WARNINGS, assert_equal, copies, state_of
from tests.trainers.small import cases, classifier, plain_loop

accelerate = pytest.importorskip("accelerate")
pytestmark = WARNINGS


def loop(steps: int, precision: str, in_place: bool, folder: Path | None = None) -> tuple[list[Tensor], list[Tensor]]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision)
    model = classifier()
    net = kfac_fx.compile(model, loss="categorical", in_place=in_place)
    optimizer = kfac_fx.KFAC(net, lr=0.3, damping=0.1, seed=0)
    prepared, wrapped, loader = accelerator.prepare(model if in_place else net, optimizer, cases())
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x), y))
                wrapped.step()
                wrapped.zero_grad()
        if folder is not None and epoch == 0:
            accelerator.save_state(str(folder))
    if folder is not None:  # back to the end of the first epoch, and the second once more
        expected = copies(model), state_of(optimizer)
        accelerator.load_state(str(folder))
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x), y))
                wrapped.step()
                wrapped.zero_grad()
        assert_equal(expected[0], copies(model))
        assert_equal(expected[1], state_of(optimizer))
    return copies(model), state_of(optimizer)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [1, 2])
def test_accelerate_trains_as_a_plain_loop(steps: int, precision: str, in_place: bool) -> None:
    found, state = loop(steps, precision, in_place)
    expected, of_loop = plain_loop(steps, torch.bfloat16 if precision == "bf16" else None)
    assert_equal(found, expected)
    assert_equal(state, of_loop)


def test_accelerate_saves_and_loads_the_state(tmp_path: Path) -> None:
    loop(1, "no", True, tmp_path)
