"""The report on a rich terminal."""

from __future__ import annotations

import io
import re

import pytest
import rich
from rich.console import Console

from kfac_fx.compiled.report import Report
from kfac_fx.passes.ir import Note, Program
from tests.runtime.toy_reports import small_program


@pytest.fixture
def program() -> Program:
    return small_program()


def shown_by_rich(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system="truecolor")
    console.print(report)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_rich_shows_a_table_in_color_and_plain_text_stays_plain(program: Program) -> None:
    report = Report(program, counters=lambda: {"skipped updates": 2})
    shown = shown_by_rich(report)
    assert "\x1b[" in shown and "\x1b[" not in str(report)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for text in ("kfac_fx registered 1,547", "16 of (A 10 x 10, G 1 x 1)", "generic diagonal", "skipped updates 2"):
        assert text in plain


def test_rich_takes_names_literally(program: Program) -> None:
    program = program.but(dropped=(Note("linear([bold]w[/bold])", "[red]"),))
    assert "linear([bold]w[/bold]): [red]" in re.sub(r"\x1b\[[0-9;]*m", "", shown_by_rich(Report(program)))


def test_rich_print_finds_the_rich_form(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    rich.print(Report(program))
    assert "Fisher block" in capsys.readouterr().out
