"""Parts of loops around a step besides a trainer: scaled losses, averages of weights, torch.compile, schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.trainers.common import assert_equal, copies, state_of
from tests.trainers.small import cases, classifier, plain_loop


def in_place(**options: Any) -> tuple[nn.Sequential, kfac_fx.KFAC]:
    model = classifier()
    net = kfac_fx.compile(model, loss="categorical", in_place=True)
    return model, kfac_fx.KFAC(net, lr=0.3, damping=0.1, seed=0, **options)


def test_a_grad_scaler_changes_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    model, optimizer = in_place(grad_scaler=scaler)
    for _ in range(2):
        for x, y in cases():
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    expected, _ = plain_loop()
    assert_equal(copies(model), expected)


def test_averages_of_weights_copy_the_model_and_do_not_record() -> None:
    model, optimizer = in_place()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    expected = copies(model)
    for x, y in cases():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(x)  # in training mode, too
        assert optimizer._forwards.seen.forwards == 1
        optimizer.step()
        average.update_parameters(model)
        first = average.n_averaged == 1
        expected = copies(model) if first else [(a + b) / 2 for a, b in zip(expected, copies(model), strict=True)]
    for a, b in zip(expected, copies(average.module), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cycles", [True, False])
def test_schedulers_set_the_groups(cycles: bool) -> None:
    model, optimizer = in_place()
    schedule = torch.optim.lr_scheduler
    scheduler: Any = schedule.CosineAnnealingLR(optimizer, 6)
    if cycles:
        scheduler = schedule.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    seen = []
    for x, y in cases():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step() if len(seen) < 5 else None
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert len({lr for lr, _ in seen}) > 2 and (len({momentum for _, momentum in seen}) > 2) is cycles


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo, about the backward that it does not enter
def test_torch_compile_around_the_step_of_the_user_changes_nothing() -> None:
    """It traces through the call of the model, and not through that of the compiled module."""
    model, optimizer = in_place()
    net = optimizer.net

    @torch.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        for x, y in cases():
            step(x, y)
    expected, state = plain_loop()
    assert_equal(copies(model), expected)
    assert_equal(state_of(optimizer), state)


def test_a_model_of_torch_compile_is_compiled_in_place_around_it() -> None:
    called = torch.compile(classifier(), backend="eager")
    optimizer = kfac_fx.KFAC(kfac_fx.compile(called, loss="categorical", in_place=True), lr=0.3, damping=0.1, seed=0)
    for _ in range(2):
        for x, y in cases():
            optimizer.zero_grad()
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
    expected, _ = plain_loop()
    assert_equal(copies(called), expected)


def test_a_compiled_call_of_a_model_in_place_is_told() -> None:
    model, optimizer = in_place()
    x, y = next(iter(cases()))
    F.cross_entropy(torch.compile(model, backend="eager")(x), y).backward()
    with pytest.raises(kfac_fx.FactorNotReady, match="no batch was ever recorded"):
        optimizer.step()
