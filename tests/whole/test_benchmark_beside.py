"""`benchmarks.beside` compares the same times of two checkouts."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import beside


def test_times_are_named_by_the_path_to_them_and_counts_are_left_out() -> None:
    steps = {"results": {"mlp": {"milliseconds": {"sgd": {"plain": 2.0}}, "MB": {"sgd": 5.0}, "ratios": {"1,10": 1.0}}}}
    assert dict(beside.times(steps)) == {"mlp, sgd, plain": 2.0}
    host = {"results": {"chain": {"parameters": 3, "milliseconds": [{"method": "adamw", "step": 4.0}]}}}
    assert dict(beside.times(host)) == {"chain, adamw, step": 4.0}
    compiled = {"python": "3.11", "CPU seconds": [{"model": "vit", "nodes": 9, "capture": 1.5}]}
    assert dict(beside.times(compiled)) == {"vit, capture": 1.5}


def test_rows_are_medians_over_rounds_and_those_of_one_commit_only_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([({"step": 1.0, "gone": 1.0}, {"step": 3.0}), ({"step": 9.0}, {"step": 1.0}), ({"step": 2.0},) * 2])
    monkeypatch.setattr(beside, "measured", lambda *arguments: next(rounds))
    rows = beside.compare(Path("old"), Path("new"), ["step_time"], rounds=3, python="python3")
    assert rows == [{"time": "step", "old": 2.0, "new": 2.0, "new / old": 1.0}]


BUSY = """
import sys, time
with open(sys.argv[1], "w") as file:
    while (cpu := time.process_time()) < 0.3:
        while time.process_time() < cpu + 0.01:
            pass
        print(time.time(), file=file)
"""


def test_two_commands_take_turns_and_never_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "TURN", 0.05)
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    beside.in_turns({folder: [sys.executable, "-c", BUSY, str(folder / "times")] for folder in folders})
    old, new = (np.loadtxt(folder / "times") for folder in folders)
    assert old[0] < new[-1] and new[0] < old[-1]  # neither waited for the end of the other
    # Where one was stopped, it has a gap. So the time that both took together is that of one after the other.
    busy = len(old) + len(new)
    assert max(old[-1], new[-1]) - min(old[0], new[0]) >= 0.9 * 0.01 * busy


def test_a_command_that_fails_ends_the_other(tmp_path: Path) -> None:
    commands = {tmp_path: [sys.executable, "-c", "raise SystemExit(3)"]}
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        beside.in_turns({**commands, tmp_path.parent: [sys.executable, "-c", "import time; time.sleep(60)"]})
