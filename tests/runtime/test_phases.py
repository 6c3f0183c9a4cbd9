"""Seconds by phase: sums of the clock, and no clock without a reader."""

import itertools

import pytest

from kfac_fx.diagnostics import phases
from kfac_fx.diagnostics.phases import PhaseSeconds


def test_seconds_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.time, "perf_counter", map(float, itertools.count()).__next__)
    seconds = PhaseSeconds()
    seconds.readers = 1
    for phase in ("record", "update", "record"):
        with seconds.measure(phase):
            pass
    with pytest.raises(KeyError, match="inside"), seconds.measure("inverses"):
        raise KeyError("inside")
    assert seconds.totals == {"record": 2.0, "statistics": 0.0, "inverses": 1.0, "update": 1.0}


def test_without_a_reader_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    seconds = PhaseSeconds()
    with seconds.measure("record"):
        pass
    assert not any(seconds.totals.values())
