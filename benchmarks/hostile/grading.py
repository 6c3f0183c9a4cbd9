"""The grade of a hostile input: what its user sees of it.

    right      the result is that of an independent way to it, or the loss fell, and no message said anything
    warned     a warning of the library
    refused    an error of the library, raised on purpose
    silent     another result, or a loss that did not fall, and no message
    raw        an error of something else, or a bug

An error is the library's if the line that raised it is one of its own `raise` statements. One that plain torch raises
for the same input, with the same words, is right.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import kfac_fx.passes.errors

RIGHT, WARNED, REFUSED, SILENT, RAW = GRADES = ("right", "warned", "refused", "silent", "raw")
ON_PURPOSE = (*kfac_fx.passes.errors.PUBLIC, ValueError, TypeError, RuntimeError, FileNotFoundError, KeyError)
LONGEST = 200  # characters of what a table says of an input


@dataclass(frozen=True)
class Outcome:
    """right: whether the result is as it should be. text: what it was."""

    right: bool
    text: str = ""


@dataclass(frozen=True)
class Input:
    """An input of one of the six kinds.

    Attributes:
        name: says what it is, and is that of no other one of the kind.
        run: does it. An error of plain torch is a `Torchs`.
    """

    kind: str
    name: str
    run: Callable[[], Outcome]


class Torchs(Exception):
    """An error that plain torch raises, too."""


@contextlib.contextmanager
def warnings_of_kfac_fx() -> Iterator[list[str]]:
    """The warnings that the library gives inside. Others are dropped."""
    told: list[str] = []
    give = warnings.warn_explicit

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals.get("__name__") == kfac_fx.passes.errors.__name__:
            told.append(first_line(message))
        give(message, *args, **kwargs)

    with warnings.catch_warnings(), mock.patch.object(warnings, "warn_explicit", listen):
        warnings.simplefilter("ignore")
        yield told


def first_line(text: object) -> str:
    return next(iter(str(text).splitlines()), "")


def shown(text: str) -> str:
    """Without the names of temporary folders and ports, which are others in every run."""
    folders = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")
    return re.sub(r"\[127\.0\.0\.1\]:\d+", "[...]", folders.sub("...", text))[:LONGEST]


def is_on_purpose(error: BaseException) -> bool:
    if isinstance(error, AssertionError) or not isinstance(error, ON_PURPOSE) or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    in_library = last.tb_frame.f_globals.get("__name__", "").startswith("kfac_fx.")
    return in_library and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def graded(run: Callable[[], Outcome]) -> tuple[str, str]:
    """(the grade, what happened)."""
    with warnings_of_kfac_fx() as told:
        try:
            outcome = run()
        except Torchs as error:
            return RIGHT, shown(f"torch raises the same: {first_line(error)}")
        except Exception as error:
            grade = REFUSED if is_on_purpose(error) else RAW
            return grade, shown(f"{type(error).__name__}: {first_line(error)}")
    text = shown("; ".join(filter(None, (outcome.text, *told[:1]))))
    if outcome.right and not told:
        return RIGHT, text
    return (WARNED if told else SILENT), text
