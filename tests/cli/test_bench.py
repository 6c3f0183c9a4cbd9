"""`bench`: contestants, and the schedule that fits an overhead."""

import logging
import time
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from kfac_fx.cli.bench import (
    CHECKS,
    INVERSES,
    PLAIN,
    STATISTICS,
    Contestant,
    bench,
    fitting_schedule,
    scalar_loss,
    schedule,
    table_of_times,
)
from kfac_fx.cli.demo import clock
from kfac_fx.cli.problem import CommandError, Problem

SECONDS = {"AdamW": 1.0, PLAIN: 1.0, STATISTICS: 2.0, INVERSES: 11.0, CHECKS: 2.0}  # a fifth of the steps is checked


def test_the_schedule_is_the_most_frequent_that_fits() -> None:
    fitting = schedule(SECONDS, overhead=0.5)
    assert fitting is not None
    assert (fitting.statistics, fitting.inverses) == (10, 50)
    assert fitting.ratio == pytest.approx(1.2 + 1.0 / 10 + 10.0 / 50)


def test_no_schedule_fits_less_than_a_plain_step() -> None:
    assert schedule(SECONDS, overhead=0.1) is None


def contestants_of(seconds: Mapping[str, float]) -> dict[str, Contestant]:
    model = nn.Linear(5, 2)
    problem = Problem(model, (torch.randn(4, 5),), {}, "normal", strict=False)
    optimizer = torch.optim.SGD(model.parameters())
    return {name: Contestant(model, optimizer, problem, [mean]) for name, mean in seconds.items()}


def test_the_schedule_that_fits_is_told_as_a_call_of_kfac() -> None:
    assert fitting_schedule(contestants_of(SECONDS), overhead=0.5) == (
        "within 50% of AdamW's step: KFAC(net, cov_update_every=10, invert_every=50, damping_adaptation_interval=5), "
        "whose mean step takes 1.50 of AdamW's"
    )


def test_where_no_schedule_fits_the_least_overhead_and_two_remedies_are_told() -> None:
    assert fitting_schedule(contestants_of(SECONDS), overhead=0.1) == (
        "no schedule stays within 10% of AdamW's step: without statistics and inverses, and with a check every 5 "
        "steps, K-FAC takes 20% more. A larger batch makes this share smaller, and --overhead allows more"
    )


def test_a_scalar_output_is_the_loss_and_other_outputs_are_squared() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert scalar_loss({"loss": x.sum(), "logits": x}).item() == 3.0
    assert scalar_loss((x, x)).item() == 5.0
    with pytest.raises(CommandError, match="no output of the model has a gradient"):
        scalar_loss(x.detach())


def test_another_device_is_timed_by_the_clock_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    assert clock(torch.device("cpu")) == 1.0 and not waited
    assert clock(torch.device("cuda")) == 7.0 and waited == [torch.device("cuda")]


def test_the_times_of_a_table_are_named_after_what_they_are() -> None:
    for device, name in (("cpu", "CPU ms"), ("meta", "ms")):
        model = nn.Linear(5, 2, device=device)
        problem = Problem(model, (torch.empty(4, 5, device=device),), {}, "normal", strict=False)
        contestant = Contestant(model, torch.optim.AdamW(model.parameters()), problem, seconds=[0.01])
        assert [column.header for column in table_of_times({"AdamW": contestant}).columns][1] == name


def test_contestants_train_copies_and_count_their_state() -> None:
    model = nn.Linear(5, 2)
    before = model.weight.clone()
    contestants = bench(Problem(model, (torch.randn(4, 5),), {}, "normal", strict=False), rounds=2)
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert all(len(contestant.seconds) == 2 for contestant in contestants.values())
    assert contestants["SGD"].state == 0
    assert contestants["AdamW"].state == 4 * (2 * 12 + 2)  # two moments of 12 elements, and two counters of steps
    factors = 4 * 2 * (6 * 6 + 2 * 2)  # and their inverses
    assert contestants[PLAIN].state >= factors


def test_the_steps_are_those_of_the_default_and_each_kind_does_its_own_work(logged: list[logging.LogRecord]) -> None:
    problem = Problem(nn.Linear(5, 2), (torch.randn(4, 5),), {}, "normal", strict=False)
    contestants = bench(problem, rounds=1)
    said = [record.getMessage().rpartition(",")[0] for record in logged if record.name == "kfac_fx"]
    assert said == ["kfac-fx bench: compiling the model", "first steps: 6 of 6", "rounds: 1 of 1"]  # shown at once, too
    options = [contestant.optimizer.options for name, contestant in contestants.items() if name.startswith("K-FAC")]
    assert [option.rule.name for option in options] == ["eigen_moments"] * 4
    intervals = [(o.cov_update_every, o.invert_every, o.rule.damping_adaptation_interval) for o in options]
    assert [[every == 1 for every in of_kind] for of_kind in intervals] == [
        [False, False, False], [True, False, False], [False, True, False], [False, False, True],
    ]  # fmt: skip


def test_a_model_without_a_loss_is_told_the_option() -> None:
    with pytest.raises(CommandError, match=r"no loss is known: .*\n.*\nHere: --loss categorical, or, if forward"):
        bench(Problem(nn.Linear(5, 2), (torch.randn(4, 5),), {}, None, strict=False), rounds=1)
