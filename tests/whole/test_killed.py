"""Trainings and writers that are killed at random moments (`benchmarks.killed`): nothing is lost, and nothing mixed."""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.hostile.settings import Setting
from benchmarks.killed import SETTINGS, kill_resumed, kill_trainings, kill_writers, run

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"), pytest.mark.forks]


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=str)
def test_a_training_that_is_killed_goes_on_bit_for_bit(setting: Setting) -> None:
    counts = kill_trainings(setting, 4, random.Random(1))
    assert counts["kills"] == 4 and counts["lost"] == counts["other bits"] == 0


def test_folders_of_writers_that_are_killed_have_one_content() -> None:
    for kind in ("spectra", "queries"):
        counts = kill_writers(kind, 8, random.Random(1))
        assert counts["kills"] == 8 and counts["other bits"] == 0


def test_fits_and_scores_that_are_killed_end_with_the_same_bits() -> None:
    for kind in ("fits", "scores"):
        counts = kill_resumed(kind, 4, random.Random(1))
        assert counts["kills"] == 4 and counts["other bits"] == 0


@pytest.mark.slow
def test_200_kills_lose_nothing() -> None:
    rows = run(200)
    assert sum(counts["kills"] for counts in rows.values()) == 400
    assert all(counts["lost"] == counts["other bits"] == 0 for counts in rows.values())
    in_saves = [(name.startswith("training"), counts["in a save"]) for name, counts in rows.items()]
    assert sum(number for of_training, number in in_saves if of_training)  # a save is a small part of a training
    assert all(number for of_training, number in in_saves if not of_training)
