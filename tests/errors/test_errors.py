"""Words of error texts, and which caught errors must go on."""

from __future__ import annotations

import pytest
import torch

import kfac_fx
from kfac_fx.passes.errors import PUBLIC, ReuseError, fatal, first_line, kind_and_line, nearest, plural, table


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("categorial", " Did you mean 'categorical'?"), ("norml", " Did you mean 'normal'?"), ("xyz", "")],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name: str, sentence: str) -> None:
    assert nearest(name, ("categorical", "normal")) == sentence


def test_a_table_has_two_columns_and_no_blanks_at_the_end() -> None:
    assert (
        table(iter([("w", "is frozen"), ("weight", ""), ("", "more")]))
        == "  w       is frozen\n  weight\n          more"
    )
    assert table([]) == ""


@pytest.mark.parametrize(("number", "text"), [(0, "0 uses"), (1, "1 use"), (2, "2 uses"), (12345, "12,345 uses")])
def test_a_number_of_things(number: int, text: str) -> None:
    assert plural(number, "use") == text


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("device-side assert"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (AssertionError("bug in kfac_fx: a use without parameters"), True),
        (AssertionError("the user's own"), False),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_devices_and_our_own_bugs_are_no_reason_for_another_way(error: Exception, goes_on: bool) -> None:
    assert fatal(error) is goes_on


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("first\nsecond"), "first"), (ValueError("\n  first  \nsecond"), "first"), (KeyError(), "KeyError")],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    assert first_line(error).strip() == line


def test_an_error_without_words_is_named_once() -> None:
    assert kind_and_line(ValueError("first\nsecond")) == "ValueError: first"
    assert kind_and_line(AssertionError()) == "AssertionError"


def test_a_reuse_error_prints_its_text_although_it_is_a_key_error() -> None:
    assert str(ReuseError("'w' is registered")) == "'w' is registered"
    assert issubclass(ReuseError, KeyError) and issubclass(ReuseError, ValueError)


def test_every_error_is_imported_from_the_name_that_its_traceback_shows() -> None:
    for error in PUBLIC:
        assert getattr(kfac_fx, error.__name__) is error and error.__module__ == "kfac_fx"
