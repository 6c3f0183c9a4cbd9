"""The exact modes: a progress bar for many backward passes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kfac_fx.recording.exact import tracked


@pytest.mark.parametrize(("terminal", "after", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_progress_is_shown_on_a_terminal_once_it_takes_long(terminal: bool, after: float, shown: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal)
    items = tracked([(2, "a"), (2, "b"), (1, "c")], 5, "exact: 5 backward passes", console, after)
    assert list(items) == ["a", "b", "c"]
    assert ("exact: 5 backward passes" in file.getvalue()) is shown
