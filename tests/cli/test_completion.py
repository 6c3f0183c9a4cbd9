"""The scripts complete in a shell what the parser knows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kfac_fx.cli.command import parser
from kfac_fx.cli.completion import SHELLS
from tests.cli.running import run

COMMANDS = ["report", "explain", "passes", "bench", "factors", "demo", "completion"]


def completed(*words: str) -> list[str]:
    """The words that bash offers for the last one."""
    _, commands = parser()
    line = f"COMP_WORDS=(kfac-fx {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; _kfac_fx"
    program = f'{SHELLS["bash"](commands)}\n{line}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_commands_are_completed() -> None:
    assert completed("") == [*COMMANDS, "--help", "--version"]
    assert completed("re") == ["report"]


def test_options_are_those_of_the_command() -> None:
    assert completed("report", "mine.py:Net", "--in") == ["--input", "--inputs"]
    assert completed("passes", "--pa") == ["--pass"]
    assert completed("demo", "--in") == []


def test_values_are_choices_or_files() -> None:
    assert completed("report", "mine.py:Net", "--format", "") == ["text", "json", "html", "dot"]
    assert completed("completion", "") == ["--help", "bash", "zsh", "fish"]
    assert completed("demo", "--png", "") == []  # -o default completes files
    assert completed("report", "--strict", "--lo") == ["--loss"]  # an option without a value


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "completion", shell)
    assert (status, err) == (0, "")
    assert all(name in out for name in (*COMMANDS, "train-mode", "overhead", "no-progress"))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell](parser()[1]))
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
