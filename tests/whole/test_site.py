"""The site builds without a warning, and every public name is in its reference."""

import logging
import re
from pathlib import Path

import pytest

import kfac_fx

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: kfac_fx\.(\w+)$", text, re.MULTILINE))
    assert named == set(kfac_fx.__all__)


def test_the_site_builds_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    with caplog.at_level(logging.WARNING):
        build(load_config("mkdocs.yml", site_dir=str(tmp_path)))
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")]
    assert not list(tmp_path.rglob("*.py"))
    guide = (tmp_path / "contributing" / "index.html").read_text(encoding="utf-8")
    assert "A new Fisher block" in guide and 'href="../examples/own_layer/"' in guide
    page = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    assert "cov_update_every" in page and "example_inputs" in page
    assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css)"', page), "the site loads nothing from elsewhere"


def test_the_pictures_are_those_of_the_passes_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs import pictures

    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.main()
    for path in tmp_path.glob("*.svg"):
        kept = ROOT / "docs" / "images" / path.name
        assert path.read_text() == kept.read_text(), f"{kept.name} is out of date: python -m docs.pictures"
    assert len(list(tmp_path.iterdir())) == 4
