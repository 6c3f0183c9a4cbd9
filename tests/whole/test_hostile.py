"""Hostile inputs (`benchmarks.hostile`): none fails without a message."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import kfac_fx
from benchmarks.hostile.__main__ import DOCS, KINDS, OUT, inputs, read, written_page
from benchmarks.hostile.grading import RAW, REFUSED, RIGHT, SILENT, WARNED, Outcome, Torchs, graded, warnings_of_kfac_fx
from benchmarks.hostile.numbers import DTYPES, RULES, SITUATIONS, grade
from kfac_fx.passes.errors import warn_user

ALL = [(rule, situation, dtype) for rule in RULES for situation in SITUATIONS for dtype in DTYPES]
DRAWN = random.Random(3).sample(ALL, 5)


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


# --- all kinds --------------------------------------------------------------------------------------------------------


def test_the_results_are_of_all_inputs_and_none_is_silent_or_raw() -> None:
    rows = read(OUT)["inputs"]
    names = [(row["kind"], row["name"]) for row in rows]
    assert sorted(names) == sorted((given.kind, given.name) for given in inputs(list(KINDS)))
    assert len(set(names)) == len(names) >= 600
    assert [row["name"] for row in rows if row["grade"] in (RAW, SILENT)] == []


def test_the_page_is_that_of_the_results() -> None:
    assert DOCS.read_text() == written_page()


@pytest.mark.forks
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_were_drawn_have_the_grades_of_the_results(kind: str) -> None:
    grades = {row["name"]: row["grade"] for row in read(OUT)["inputs"]}
    drawn = random.Random(kind).choice(list(inputs([kind])))
    assert graded(drawn.run)[0] == grades[drawn.name]


def test_the_grades_tell_errors_apart() -> None:
    """An error is the library's if its own `raise` made it."""
    model = torch.nn.Linear(2, 2)

    def raises(error: Exception) -> Outcome:
        raise error

    assert graded(lambda: Outcome(True)) == (RIGHT, "")
    assert graded(lambda: Outcome(False, "other numbers")) == (SILENT, "other numbers")
    assert graded(lambda: raises(ValueError("of a test"))) == (RAW, "ValueError: of a test")
    assert graded(lambda: raises(Torchs("of torch")))[0] == RIGHT
    assert graded(lambda: Outcome(bool(torch.zeros(2) @ torch.zeros(3))))[0] == RAW
    assert graded(lambda: Outcome(bool(kfac_fx.KFAC(model))))[0] == REFUSED  # type: ignore[arg-type]
    assert graded(lambda: Outcome(bool(kfac_fx.compile(model, loss="nothing"))))[0] == REFUSED

    def warns() -> Outcome:
        warn_user(UserWarning("of the library"))
        return Outcome(False)

    assert graded(warns) == (WARNED, "of the library")
    with warnings_of_kfac_fx() as told:
        warnings.warn("of another one", stacklevel=1)
    assert told == []
