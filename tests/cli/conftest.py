"""Models in the working folder, as a user has them."""

import sys
from pathlib import Path

import pytest

MODELS = """
import torch
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

class Lonely(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return torch.cdist(x, self.matrix)

class OnlyIn(nn.Linear):
    def __init__(self, mode):
        super().__init__(5, 2)
        self.mode = mode

    def forward(self, x):
        assert self.training == (self.mode == "training")
        return super().forward(x)

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(11, 4))

    def forward(self, ids):
        return self.rows[ids]

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
