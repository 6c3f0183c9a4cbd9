"""Updates that are due at each step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.schedule import Schedule
from tests.runtime.options_of import options_of


def test_the_adaptive_type_checks_and_records_early() -> None:
    options = options_of(
        compile(nn.Linear(3, 2), loss="categorical"), damping_adaptation_interval=4, cov_update_every=6
    )
    each = [Schedule(options, counter) for counter in range(13)]
    assert [step.counter for step in each if step.recording] == [0, 1, 2, 5, 6, 12]
    assert checks(Schedule(options), 13) == {0: 1, 1: 1, 2: 1, 4: 2, 8: 4, 12: 4}


def checks(schedule: Schedule, steps: int, calm: Callable[[int], bool] = lambda step: True) -> dict[int, int]:
    """The steps with a check, and how long ago the one before was. calm: whether a check is."""
    since: dict[int, int] = {}
    for step in range(steps):
        if schedule.checking:
            since[step] = schedule.steps_since_check
        schedule.advance(torch.tensor(calm(step)) if schedule.checking else None)
    return since


def test_checks_become_rarer_as_long_as_they_are_calm() -> None:
    schedule = Schedule(options_of(compile(nn.Linear(3, 2), loss="categorical")))
    assert schedule.intervals.checks == 5
    assert [*checks(schedule, 100)] == [0, 1, 2, 5, 10, 15, 20, 30, 45, 65, 85]
    again = Schedule(schedule.options)
    assert [*checks(again, 100, lambda step: step != 45)] == [0, 1, 2, 5, 10, 15, 20, 30, 45, 50, 60, 80]
    assert [*checks(Schedule(schedule.options), 31, lambda step: False)] == [0, 1, 2, 5, 10, 15, 20, 25, 30]
    assert "checks every 5 to 20 steps" in schedule.described()[0]


def test_a_long_first_interval_has_early_checks() -> None:
    schedule = Schedule(options_of(compile(nn.Linear(3, 2), loss="categorical")))
    schedule.intervals = schedule.intervals._replace(checks=15)
    assert [*checks(schedule, 100)] == [0, 1, 2, 5, 10, 15, 30, 45, 60, 90]
    given = Schedule(options_of(schedule.options.net, damping_adaptation_interval=30))
    assert [*checks(given, 100)] == [0, 1, 2, 5, 10, 20, 30, 60, 90]


@pytest.mark.parametrize("every", [4, 10])
@pytest.mark.parametrize("saved", [25, 26, 28])
def test_checks_follow_closely_where_those_of_consecutive_steps_end(every: int, saved: int) -> None:
    options = options_of(compile(nn.Linear(3, 2), loss="categorical"))
    schedule = Schedule(options)
    schedule.intervals = schedule.intervals._replace(checks=every)
    schedule.last_check, schedule.intervals_apart = 19, 0
    schedule.counter, checked = 20, []
    for step in range(20, 70):
        if schedule.checking:
            checked.append(step)
        schedule.advance(torch.tensor(True) if schedule.checking else None, check_next=20 <= step < 23)
        if step == saved:
            restored = Schedule(options, schedule.counter)
            restored.intervals = schedule.intervals
            restored.checked(schedule.last_check, schedule.intervals_apart, torch.tensor(True), schedule.soon)
            schedule = restored
    # Steps 20 to 23 have checks because each asked for the next one.
    expected = {10: [20, 21, 22, 23, 25, 28, 30, 40, 60], 4: [20, 21, 22, 23, 25, 28, 40, 56]}
    assert checked == expected[every]


@pytest.mark.parametrize(
    "options", [{"momentum_type": "adaptive"}, {"damping_adaptation_interval": 5}, {"overhead": 100.0}], ids=str
)
def test_checks_stay_as_frequent_where_the_interval_is_given_or_short_or_scales_the_damping(
    options: dict[str, Any],
) -> None:
    schedule = Schedule(options_of(compile(nn.Linear(3, 2), loss="categorical"), **options))
    if "overhead" in options:
        schedule.intervals = schedule.intervals._replace(checks=2)
    every = schedule.intervals.checks
    assert [*checks(schedule, 31)][3:] == [*range(5 if every == 5 else 4, 31, every)]
    assert f"checks every {every} steps" in schedule.described()[0]


@pytest.mark.parametrize("every", [5, 15])
@pytest.mark.parametrize("saved", range(3, 50, 3))
def test_a_schedule_that_is_restored_checks_at_the_same_steps(saved: int, every: int) -> None:
    options = options_of(compile(nn.Linear(3, 2), loss="categorical"))

    def calm(step: int) -> bool:
        return step != 30

    never_saved, first, restored = Schedule(options), Schedule(options), Schedule(options, saved)
    for schedule in (never_saved, first, restored):
        schedule.intervals = schedule.intervals._replace(checks=every)
    expected = [*checks(never_saved, 90, calm)]
    before = checks(first, saved, calm)
    restored.checked(first.last_check, first.intervals_apart, torch.tensor(calm(first.last_check)))
    after = [saved + step for step in checks(restored, 90 - saved, lambda step: calm(saved + step))]
    assert [*before, *after] == expected


def test_a_schedule_tells_what_is_due() -> None:
    net = compile(nn.Linear(3, 2), loss="categorical")
    options = options_of(
        net,
        lr=0.1,
        damping=0.1,
        cov_update_every=2,
        invert_every=3,
        num_burnin_steps=1,
        adapt_damping=True,
        damping_adaptation_interval=4,
        update_damping_immediately=False,
    )
    assert Schedule(options).burning_in and Schedule(options).recording and not Schedule(options, counter=3).adapting
    each = [Schedule(options, counter, burned_in=1) for counter in range(7)]
    assert [step.counter for step in each if step.recording] == [0, 2, 4, 6]
    assert [step.counter for step in each if step.inverting] == [0, 1, 2, 3, 6]
    assert [step.counter for step in each if step.adapting] == [3]
    assert [step.counter for step in each if step.adapting_late] == [4]
    assert not any(step.burning_in for step in each)


@pytest.mark.parametrize(
    ("every", "inverting"),
    [(1, [*range(130)]), (10, [0, 1, 2, 5, *range(10, 130, 10)]), (60, [0, 1, 2, 5, 10, 20, 50, 60, 120])],
)
def test_inverses_follow_the_first_factors_closely(every: int, inverting: list[int]) -> None:
    options = options_of(compile(nn.Linear(3, 2), loss="categorical"), lr=0.1, damping=0.1, invert_every=every)
    assert [counter for counter in range(130) if Schedule(options, counter).inverting] == inverting
