"""The site builds without a warning, and every public name is in its reference."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx.optim.rules import EVERY_RULE

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference() -> None:
    from docs.hooks import groups

    assert list(groups()) == ["Compile and report", "Train", "Update rules", "Statistics", "Extend", "Errors"]
    named = [name for names in groups().values() for name in names]
    rules = {name for name in named if name.startswith("rules.")}
    assert all(hasattr(kfac_fx.rules, name.removeprefix("rules.")) for name in rules)
    of_library = {rule.__name__ for rule in EVERY_RULE}
    assert of_library <= {*kfac_fx.rules.__all__}, "a rule is missing in __all__ of kfac_fx/optim/rules/__init__.py"
    assert {f"rules.{name}" for name in of_library} <= rules, "a rule is missing in docs/reference.md"
    assert sorted({*named} - rules | {"rules"}) == sorted(kfac_fx.__all__) and len(named) == len({*named})


def test_the_members_that_pages_of_the_reference_show_exist() -> None:
    from docs.hooks import MEMBERS

    for name, members in MEMBERS.items():
        known = {*dir(getattr(kfac_fx, name)), *vars(getattr(kfac_fx, name)).get("__annotations__", ())}
        assert [member for member in members if member not in known] == [], name


def test_the_makefile_knows_its_targets_and_silences_the_notice_of_the_theme() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(re.findall(r"^([a-z]+):.*## ", text, re.MULTILINE))
    assert "NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build" in text


def test_the_site_builds_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config("mkdocs.yml", site_dir=str(tmp_path)))
    warnings = [record for record in logged if record.levelno >= logging.WARNING]
    assert not [record.getMessage() for record in warnings if record.name.startswith("mkdocs")]
    assert not list(tmp_path.rglob("*.py*"))  # the programs of docs/, and what Python makes of them
    guide = (tmp_path / "contributing" / "index.html").read_text(encoding="utf-8")
    assert "A new Fisher block" in guide and 'href="../examples/own_layer/"' in guide
    pages = {
        name: (tmp_path / name / "index.html").read_text(encoding="utf-8")
        for name in ("", "reference/KFAC", "reference/compile", "reference/errors", "reference", "gallery")
    }
    assert "cov_update_every" in pages["reference/KFAC"] and "example_inputs" in pages["reference/compile"]
    assert "on_forward" not in pages["reference/KFAC"] and "LossError" in pages["reference/errors"]
    assert 'href="KFAC/"' in pages["reference"] and 'href="errors/#losserror"' in pages["reference"]
    text = pages[""][pages[""].index("<article") :]
    places = [text.index(part) for part in ("optimizer", "results/deep.png", "A compiler finds", "Where to begin")]
    assert places == sorted(places), "code, figure and three sentences come first"
    report = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    style = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    for kind in {*re.findall(r"\.(language-\w+)", style)}:
        assert f'class="{kind} highlight"' in report, "the style of printed text meets no block"
    for page in pages.values():
        assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|png|svg)"', page), "nothing is loaded"
        assert (
            f"kfac_fx {kfac_fx.__version__}" in page and "md-footer__link--" in page and "data-md-color-media" in page
        )


def test_the_pictures_are_those_of_the_passes_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs import pictures

    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.main()
    for path in tmp_path.glob("*.svg"):
        kept = ROOT / "docs" / "images" / path.name
        assert path.read_text() == kept.read_text(), f"{kept.name} is out of date: python -m docs.pictures"
    assert len(list(tmp_path.iterdir())) == 4


def test_the_gallery_shows_every_picture_and_every_example() -> None:
    from docs.gallery import IMAGES, NAMES

    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"images/gallery/(\w+)\.png", text)) == sorted(NAMES)
    assert sorted(path.stem for path in IMAGES.iterdir()) == sorted(NAMES)
    examples = {path.stem for path in (ROOT / "examples").glob("[!_]*.py")}
    assert set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", text)) == examples


def test_the_pictures_of_the_gallery_have_the_losses_of_a_training() -> None:
    from docs.gallery import watched

    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    net = kfac_fx.compile(layer, loss="normal")
    optimizers = [kfac_fx.KFAC(net), torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(layer.parameters())]
    losses = []
    with watched() as curves:
        for optimizer in optimizers:
            for _ in range(2):
                loss = net(x).square().sum(1).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert curves == {"K-FAC": losses[:2], "SGD, lr 0.1": losses[2:4], "SGD, lr 0.001": losses[4:]}
    net(x).sum().backward()  # is watched no more
    assert sum(map(len, curves.values())) == 6
