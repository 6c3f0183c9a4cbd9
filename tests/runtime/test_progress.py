"""Bars on a terminal, one at a time, and lines in the log."""

from __future__ import annotations

import io
import logging
import re
import time

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy

import kfac_fx
from kfac_fx.recording import progress
from kfac_fx.recording.progress import SHOWN, phase, tracked, working


def screen(terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80)


def text_of(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def test_a_long_block_shows_its_phase_and_ends_in_one_line_of_the_log(logged: list[logging.LogRecord]) -> None:
    console = screen()
    with working("capturing Net", console, after=0.02):
        phase("proof")
        time.sleep(0.2)
        with working("another one", console, after=0.0):  # inside, which shows nothing of its own
            phase("proof of this")
            time.sleep(0.2)
    assert "capturing Net: proof" in text_of(console) and "proof of this" in text_of(console)
    assert "another" not in text_of(console)
    assert [record.getMessage() for record in logged] == ["capturing Net, 0 s"]
    assert not SHOWN.locked()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_short_block_and_one_without_a_terminal_show_nothing(terminal: bool, logged: list[logging.LogRecord]) -> None:
    console = screen(terminal)
    with working("capturing Net", console, after=30.0 if terminal else 0.0):
        time.sleep(0.02)
    assert text_of(console) == "" and len(logged) == (not terminal)


def test_an_error_ends_the_bar() -> None:
    console = screen()
    with pytest.raises(ZeroDivisionError), working("capturing Net", console, after=0.0):
        time.sleep(0.05)
        1 / 0  # noqa: B018
    assert not SHOWN.locked()
    phase("of no block")


@pytest.mark.parametrize("total", [0, 3])
def test_a_loop_shows_its_share_and_logs_a_line(total: int, logged: list[logging.LogRecord]) -> None:
    console = screen()
    assert list(tracked([(1, "a"), (1, "b"), (1, "c")], total, "scores", console, after=0.0)) == ["a", "b", "c"]
    assert "scores" in text_of(console)
    assert [record.getMessage() for record in logged] == ["scores: 3 of 3, 0 s"]


def test_a_loop_inside_of_a_loop_shows_no_second_bar() -> None:
    outer, inner = screen(), screen()
    steps = tracked([(1, 0), (1, 1), (1, 2)], 3, "outer", outer, after=0.0)
    assert (next(steps), next(steps)) == (0, 1) and SHOWN.locked()  # the bar of the outer one is there
    list(tracked([(1, 0), (1, 1)], 2, "inner", inner, after=0.0))
    assert list(steps) == [2] and not SHOWN.locked()
    assert "outer" in text_of(outer) and text_of(inner) == ""


def test_long_work_of_the_library_is_in_the_log(
    logged: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working.__wrapped__, "__defaults__", (None, 0.0))  # type: ignore[attr-defined]
    monkeypatch.setattr(tracked, "__defaults__", (None, 0.0))
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 2)), (x,), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [(x, y), (x, y)], case="row")
    spectrum.at(damping=0.1).precondition((x, y)).scores_of_all([(x, y)])
    lines = [re.sub(r", \d+ s$", "", record.getMessage()) for record in logged]
    assert lines == [
        "capturing Sequential",
        "factors of 2 parameters: 2 of 2",
        "correction of 2 parameters: 2 of 2",
        "scores of 8 queries: 1 of 1",
    ]


@pytest.mark.parametrize(
    ("momentum_type", "damping", "what"), [("eigen_moments", None, "eigenvectors"), ("adaptive", None, "inverses")]
)
def test_a_step_that_decomposes_wide_factors_is_in_the_log(
    momentum_type: str,
    damping: float | None,
    what: str,
    logged: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(working.__wrapped__, "__defaults__", (None, 0.0))  # type: ignore[attr-defined]
    net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 2)), loss="categorical")
    optimizer = kfac_fx.KFAC(net, momentum_type=momentum_type, damping=damping)
    cross_entropy(net(torch.randn(8, 3)), torch.randint(2, (8,))).backward()
    optimizer.step()
    lines = [re.sub(r", \d+ s$", "", record.getMessage()) for record in logged]
    assert lines == ["capturing Sequential", f"KFAC.step: new {what} of the Fisher blocks"]
