"""The state of a step: counters and reasons for the report, and the seconds of its phases."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_fx import KFAC, compile
from kfac_fx.optim import state
from kfac_fx.optim.rules import first_three
from kfac_fx.optim.state import PhaseSeconds


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_counters_tell_steps_and_those_that_changed_nothing() -> None:
    net = compile(nn.Linear(3, 2), loss="categorical")
    optimizer = KFAC(net, seed=0)
    for x in (torch.randn(4, 3), torch.full((4, 3), torch.nan)):
        optimizer.zero_grad()
        F.cross_entropy(net(x), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
    counters = optimizer.counters()
    assert (counters["steps"], counters["skipped steps"], counters["failed decompositions"]) == (2, 1, 0)


def test_long_lists_of_blocks_are_cut_behind_the_third() -> None:
    registrations = compile(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), (torch.randn(2, 3),)).registrations
    words = [str(registration) for registration in registrations]
    assert first_three(registrations) == f"{words[0]}, {words[1]}, {words[2]} and 2 more"
    assert first_three(registrations[:3]) == ", ".join(words[:3])


def test_seconds_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.time, "perf_counter", map(float, itertools.count()).__next__)
    seconds = PhaseSeconds()
    seconds.readers = 1
    for phase in ("record", "update", "record"):
        with seconds.measure(phase):
            pass
    with pytest.raises(KeyError, match="inside"), seconds.measure("inverses"):
        raise KeyError("inside")
    assert seconds.totals == {"record": 2.0, "statistics": 0.0, "inverses": 1.0, "update": 1.0}


def test_without_a_reader_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    seconds = PhaseSeconds()
    with seconds.measure("record"):
        pass
    assert not any(seconds.totals.values())
