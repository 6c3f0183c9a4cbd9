"""`kfac-fx factors`: the spectrum of a user's model over the user's batches, in a folder."""

import logging
from pathlib import Path

import pytest
import torch

import kfac_fx
from tests.cli.running import run

MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
batches = [(torch.randn(6, 4), torch.randint(3, (6,))), (torch.randn(2, 4), torch.randint(3, (2,)))]
stream = lambda: iter(batches)
empty = []

def loader():
    return batches

def broken():
    raise OSError("no disk")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_folder_holds_the_spectrum_of_the_model(
    mine: Path, capsys: pytest.CaptureFixture[str], logged: list[logging.LogRecord]
) -> None:
    arguments = ["factors", "mine.py:net", "--loss", "categorical", "--mode", "empirical", "--case", "sequence"]
    more = ["--parts", "2", "--factors", "float64", "--decompositions", "float64", "--memory", "1"]
    for data in ("loader", "batches"):
        status, out, err = run(capsys, *arguments, *more, "--data", f"mine.py:{data}", "--out", "factors")
        assert (status, err) == (0, "") and out == "factors: 2 blocks of 43 parameters\n"
    said = [record.getMessage() for record in logged]
    for part in ("reading the model and the data", "compiling the model"):  # shown at once on a terminal
        assert any(line.startswith(f"kfac-fx factors: {part}, ") for line in said)
    names: dict[str, object] = {}
    exec(MODULE, names)
    net, batches = names["net"], names["batches"]
    compiled = kfac_fx.compile(net, batches[0][:1], loss="categorical")  # type: ignore[index, arg-type]
    loaded = kfac_fx.load_spectrum(compiled, mine / "factors", damping=0.1)
    options = {"mode": "empirical", "case": "sequence", "factor_dtype": torch.float64, "damping": 0.1}
    expected = kfac_fx.fit_spectrum(compiled, batches, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(loaded.log_determinant(), expected.log_determinant())


def test_the_default_seed_is_zero(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["factors", "mine.py:net", "--loss", "categorical", "--data", "mine.py:batches", "--out"]
    for folder, seed in (("default", []), ("zero", ["--seed", "0"])):
        assert run(capsys, *arguments, folder, *seed)[0] == 0
    names: dict[str, object] = {}
    exec(MODULE, names)
    net = kfac_fx.compile(names["net"], names["batches"][0][:1], loss="categorical")  # type: ignore[index, arg-type]
    default, zero = (kfac_fx.load_spectrum(net, mine / name, damping=0.1) for name in ("default", "zero"))
    assert torch.equal(default.log_determinant(), zero.log_determinant())


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({"--data": "mine.py"}, 2, "'mine.py' names no data: write it as package.module:callable or file.py:callable"),
        ({"--data": "mine.py:load"}, 2, "module 'mine.py' has no 'load'. Did you mean 'loader'?"),
        ({"--data": "mine.py:broken"}, 1, "mine.py:broken() failed: OSError: no disk"),
        ({"--data": "mine.py:stream"}, 1, "mine.py:stream is of type list_iterator, not a DataLoader or a list"),
        ({"--data": "mine.py:empty"}, 1, "mine.py:empty has no batches"),
        ({"--mode": "sampled"}, 1, "ValueError: mode 'sampled' is none of"),
        ({"--case": "word"}, 2, "argument --case: invalid choice: 'word'"),
        ({"--memory": "1e-9"}, 1, "RegistrationError: memory=1 bytes are too few"),
    ],
)
def test_what_is_wrong_is_said(
    changed: dict[str, str], status: int, text: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--data": "mine.py:loader", "--out": "factors", "--loss": "categorical"} | changed
    found, _, err = run(capsys, "factors", "mine.py:net", *(word for pair in options.items() for word in pair))
    assert found == status
    assert text.replace(" Did you mean 'loader'?", "") in err
