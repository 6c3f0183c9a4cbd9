"""`kfac-fx report`: the formats, and a sentence and an exit status for everything that can be wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kfac_fx import cli

MODELS = """
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids, scale):
        return self.head(self.words(ids).mean(1) * scale)

class Picky(nn.Linear):
    def forward(self, x):
        if x.shape[1] != 5:
            raise ValueError("I only read five columns")
        return super().forward(x)

def linear():
    return nn.Linear(5, 2)

def picky():
    return Picky(5, 2)

def broken():
    raise OSError("no such checkpoint")

def text():
    return "model"

ready = nn.Linear(5, 2)
number = 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder holds `cli_models.py`, `cli_broken.py`, `cli_needs.py`."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "cli_broken.py").write_text("1 / 0\n")
    (tmp_path / "cli_needs.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    for name in ("cli_models", "cli_broken", "cli_needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr), whether the status is returned or argparse exits with it."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_report_names_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "report", "cli_models:linear", "--input", "4,5")
    assert (status, err) == (0, "")
    assert out.startswith("kfac_fx registered 12 of 12 trainable parameters in 1 Fisher block")
    assert "{weight, bias}" in out


def test_a_module_that_exists_already_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "report", "cli_models:ready", "--input", "4,5")
    assert status == 0 and "12 of 12" in out


def test_inputs_come_in_order_and_with_their_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("report", "cli_models:Words", "--input", "2,16:int64", "--input", "2,4", "--format", "json")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert [each["layer"] for each in json.loads(out)["registrations"]] == ["embedding", "linear"]


@pytest.mark.parametrize(("name", "start"), [("html", "<!doctype html>"), ("dot", "digraph"), ("json", "{")])
def test_the_other_formats_are_complete_documents(name: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "report", "cli_models:linear", "--input", "4,5", "--format", name)
    assert status == 0 and out.startswith(start)


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("cli_models", 2, "'cli_models' does not name a model: write it as package.module:callable"),
        (":linear", 2, "does not name a model"),
        ("cli_nowhere:linear", 2, "there is no module 'cli_nowhere'"),
        ("cli_nowhere.deeper:linear", 2, "there is no module 'cli_nowhere'"),
        ("torch.nowhere:linear", 2, "there is no module 'torch.nowhere'"),
        ("cli_models:liner", 2, "module 'cli_models' has no 'liner'. Did you mean 'linear'?"),
        ("cli_models:number", 2, "cli_models:number is of type int, not a callable that builds a model"),
        ("cli_models:text", 2, "cli_models:text() returned something of type str, not an nn.Module"),
        ("cli_models:broken", 1, "cli_models:broken() failed: OSError: no such checkpoint"),
        ("cli_broken:linear", 1, "importing cli_broken failed: ZeroDivisionError: division by zero"),
        ("cli_needs:linear", 1, "importing cli_needs failed: No module named 'a_package_nobody_has'"),
    ],
)
def test_a_wrong_model_is_said_in_one_line(
    model: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, "report", model, "--input", "4,5")
    assert found == status and out == ""
    assert err.startswith("kfac-fx report: ") and text in err and err.count("\n") == 1


def test_a_model_that_refuses_its_input_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "report", "cli_models:picky", "--input", "4,6")
    assert status == 1 and out == ""
    assert "I only read five columns" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("2,x", "'2,x' is not a shape: write sizes as in 2,3,224,224"),
        ("", "'' is not a shape"),
        ("2,0", "'2,0' has a size below 1"),
        ("2,3:flaot32", "'flaot32' is not a dtype of torch. Did you mean 'float32'?"),
        ("2,3:nn", "'nn' is not a dtype of torch"),
    ],
)
def test_a_wrong_input_says_what_to_write(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", text)
    assert status == 2 and complaint in err


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("2,3", (2, 3), torch.float32),
        ("7:int64", (7,), torch.int64),
        ("2,2:bool", (2, 2), torch.bool),
        ("3:bfloat16", (3,), torch.bfloat16),
        ("3:complex64", (3,), torch.complex64),
    ],
)
def test_example_inputs_have_the_shape_and_the_dtype(text: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    made = cli.example_input(text)
    assert made.shape == tuple(shape) and made.dtype == dtype
    assert bool(made.abs().sum() if dtype.is_floating_point or dtype.is_complex else not made.any())


def test_the_command_runs_as_a_program_and_finds_models_in_the_working_folder() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-m", "kfac_fx.cli", "report", "cli_models:linear", "--input", "4,5"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "12 of 12" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("learn",), ("report", "cli_models:linear")])
def test_an_incomplete_command_line_shows_the_usage(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith("usage: kfac-fx")


def test_an_interrupted_command_has_the_shells_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", "4,5")
    assert status == 130 and err == "kfac-fx report: interrupted\n"
