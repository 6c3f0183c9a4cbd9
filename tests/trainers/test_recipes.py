"""The recipes of docs/trainers.md run as a user copies them."""

from pathlib import Path

import pytest

from tests.trainers.common import WARNINGS
from tests.whole.test_docs import ROOT, run_blocks

pytestmark = WARNINGS
PACKAGES = ("transformers", "accelerate", "lightning")


def test_the_recipes_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    assert run_blocks((ROOT / "docs/trainers.md").read_text(encoding="utf-8"), "trainers.md") >= 8
