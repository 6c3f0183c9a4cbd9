"""Updates that are due at each step."""

import pytest
from torch import nn

from kfac_fx.compiler import compile
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.schedule import Schedule


def test_the_adaptive_type_checks_and_records_early() -> None:
    options = KFACOptions(
        compile(nn.Linear(3, 2), loss="categorical"), damping_adaptation_interval=4, cov_update_every=6
    )
    each = [Schedule(options, counter) for counter in range(13)]
    assert [step.counter for step in each if step.checking] == [0, 1, 2, 4, 8, 12]
    assert [step.steps_since_check for step in each if step.checking] == [1, 1, 1, 2, 4, 4]
    assert [step.counter for step in each if step.recording] == [0, 1, 2, 5, 6, 12]


def test_a_schedule_tells_what_is_due() -> None:
    net = compile(nn.Linear(3, 2), loss="categorical")
    options = KFACOptions(
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
    options = KFACOptions(compile(nn.Linear(3, 2), loss="categorical"), lr=0.1, damping=0.1, invert_every=every)
    assert [counter for counter in range(130) if Schedule(options, counter).inverting] == inverting
