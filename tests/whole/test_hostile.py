"""Trainings with hostile numbers (`benchmarks.hostile`): none fails without a message."""

from __future__ import annotations

import random

import pytest

from benchmarks.hostile.grading import RAW, SILENT
from benchmarks.hostile.numbers import DTYPES, RULES, SITUATIONS, grade

ALL = [(rule, situation, dtype) for rule in RULES for situation in SITUATIONS for dtype in DTYPES]
DRAWN = random.Random(3).sample(ALL, 10)


def check(rule: str, situation: str, dtype: str) -> None:
    graded = grade(rule, situation, dtype)
    assert graded is None or graded[0] not in (RAW, SILENT), graded


@pytest.mark.parametrize(("rule", "situation", "dtype"), DRAWN)
def test_a_hostile_training_that_was_drawn_is_right_or_told(rule: str, situation: str, dtype: str) -> None:
    check(rule, situation, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_training_is_right_or_told(rule: str, situation: str, dtype: str) -> None:
    check(rule, situation, dtype)


@pytest.mark.parametrize("rule", RULES)
def test_the_usual_training_is_right(rule: str) -> None:
    """The grades tell trainings apart."""
    assert grade(rule, "usual", "float32")[0] == "right"  # type: ignore[index]
