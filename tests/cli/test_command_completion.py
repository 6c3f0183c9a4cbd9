"""The scripts complete in a shell what the parser knows."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kfac_fx.cli.command import SHELLS, parser
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


LINES = [
    ("kfac-fx rep", "kfac-fx report"),
    ("kfac-fx report mine.py:Net --lo", "kfac-fx report mine.py:Net --loss"),
    ("kfac-fx report mine.py:Net --format h", "kfac-fx report mine.py:Net --format html"),
    ("kfac-fx completion f", "kfac-fx completion fish"),
    ("kfac-fx demo --png a_f", "kfac-fx demo --png a_file"),
]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize("start", ["", "autoload -U compinit; compinit -u; "], ids=["no compinit before", "compinit"])
def test_zsh_completes_what_is_typed(start: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "script").write_text(SHELLS["zsh"](parser()[1]))
    keyboard, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)}
    shell = ["zsh", "-f", "-i"]  # reads no file of the user's
    process = subprocess.Popen(
        shell, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=environment, start_new_session=True
    )

    def type_and_wait(keys: str, pattern: str) -> str:
        os.write(keyboard, keys.encode())
        shown, end = "", time.monotonic() + 60
        while (match := re.search(pattern, shown, re.MULTILINE)) is None:
            ready = select.select([keyboard], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"zsh answers {shown!r}"
            shown += os.read(keyboard, 4096).decode(errors="replace")
        return match[1]

    try:
        type_and_wait(f"bindkey -e; {start}source ./script; print -r -- READ''Y:\n", "^READY(:)")
        # The line is completed by a tab, and printed by a command that is put before it.
        after = "\t\x01print -r -- DON''E:\x05:END\n"
        assert [type_and_wait(line + after, "^DONE:(.*?) ?:END") for line, _ in LINES] == [full for _, full in LINES]
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
        os.close(terminal)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "script").write_text(SHELLS["fish"](parser()[1]))
    for line, full in LINES:
        command = f"source script; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert full.split()[-1] in done.stdout.split()


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
