"""The zoo's measurement tells right from wrong, and its page is what its results say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from benchmarks import zoo_docs, zoo_measure
from benchmarks.zoo import LIBRARIES, OUT, main, results, to_do
from benchmarks.zoo_models.entry import Entry, images, predictions
from kfac_fx.passes.errors import UntraceableError
from kfac_fx.recording import equivalence, proof

KNOWN = (("toys/one", "works", "1"), ("toys/two", "bug", "2"))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.side = nn.Parameter(torch.ones(3))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.hypot(self.layer(x).sin(), self.side)


def entry(features: int = 4) -> Entry:
    return Entry("toys", "small", Small, images(features), predictions)


def test_a_model_that_works_is_measured() -> None:
    found = zoo_measure.measure(entry())
    assert found["status"] == "works" and found["wrong"] == [], found
    assert found["tensors"] == {"used": 3, "structured": 2, "unused": 1}
    assert found["elements"] == {"used": 18, "structured": 15, "unused": 2}
    assert [(names, elements) for names, elements, _ in found["generic"]] == [("side", 3)]
    assert found["captured"] == "whole" and found["proven"] == 1 and not found["anew"]
    assert max(found["outputs"], found["gradients"], found["rows"]) < 1e-5


def test_a_model_that_does_not_run_is_no_model() -> None:
    found = zoo_measure.measure(entry(features=5))
    assert found["status"] == "no model" and "shapes cannot be multiplied" in found["error"]


def test_an_exception_that_is_no_refusal_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_measure.kfac_fx, "compile", lambda *args, **kwargs: 1 / 0)
    assert zoo_measure.measure(entry())["status"] == "bug"


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UntraceableError("no")

    monkeypatch.setattr(zoo_measure.kfac_fx, "compile", refuse)
    found = zoo_measure.measure(entry())
    assert found["status"] == "refused" and found["error"] == "UntraceableError: no"


@pytest.mark.parametrize("spoiled", [0, 1])
def test_other_outputs_or_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch, spoiled: int) -> None:
    original = equivalence.results_of_graph

    def spoil(*args: Any) -> Any:
        found = original(*args)
        if args[1][0].shape[0] == zoo_measure.OTHER:
            (found[0][0] if spoiled == 0 else found[1]["layer.weight"]).mul_(1.1)
        return found

    monkeypatch.setattr(equivalence, "results_of_graph", spoil)
    found = zoo_measure.measure(entry())
    assert found["status"] == "wrong" and ("outputs", "layer.weight")[spoiled] in found["wrong"][0]


def test_rows_of_another_gradient_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = proof.proof_gradients

    def spoil(prover: Any, values: Any) -> Any:
        gradients = original(prover, values)
        by = 1.1 if values[0].shape[0] == zoo_measure.OTHER else 1.0
        pairs = [(parameter, wanted, computed * by, bound) for parameter, wanted, computed, bound in gradients.pairs]
        return replace(gradients, pairs=iter(pairs))

    monkeypatch.setattr(proof, "proof_gradients", spoil)
    found = zoo_measure.measure(entry())
    assert found["status"] == "wrong" and "rows of layer.weight, layer.bias" in found["wrong"][0]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.both[:2].t()) @ self.both[:2] @ self.both[2:].t()


def test_the_gradient_of_a_piece_in_no_block_is_found() -> None:
    program = kfac_fx.compile(Halves(), (torch.randn(3, 4),), loss="normal").program
    gradient = torch.ones(6, 4)
    assert len(program.registrations) == 2 and not zoo_measure.outside(program, "both", gradient).any()
    found = zoo_measure.outside(program.but(registrations=program.registrations[:1]), "both", gradient)
    assert sorted(found.sum(1).tolist()) in ([0, 0, 4, 4, 4, 4], [0, 0, 0, 0, 4, 4])
    assert bool(zoo_measure.outside(program.but(registrations=()), "both", gradient).all())


def test_what_differs_from_model_to_model_is_no_other_reason() -> None:
    one, two = (
        "no layer has the form of add_3 (swin.py:384) and 2 more",
        "no layer has the form of add (vit.py:9) and 5 more",
    )
    assert zoo_docs.general(one) == zoo_docs.general(two) == "no layer has the form of add and more"


def test_shares_are_rounded_down() -> None:
    assert zoo_docs.percent(999_999, 1_000_000) == "99.999 %" and zoo_docs.percent(3, 3) == "100 %"


def test_the_last_result_of_a_model_counts(tmp_path: Any) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps({"model": "a/b", "status": status}) + "\n" for status in ("bug", "works")))
    assert results(path) == {"a/b": {"model": "a/b", "status": "works"}}


def lines(*found: tuple[str, str, str]) -> str:
    rows = [{"model": name, "status": status, "versions": {"kfac_fx": commit}} for name, status, commit in found]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_results_of_other_files_are_added_and_count_more(tmp_path: Any) -> None:
    out, others = tmp_path / "out.jsonl", [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    out.write_text(lines(("b", "bug", "1"), ("c", "works", "1")))
    others[0].write_text(lines(("b", "refused", "2"), ("a", "bug", "2")))
    others[1].write_text(lines(("a", "works", "3")))
    main(["--out", str(out), "--merge", *map(str, others)])
    assert out.read_text() == lines(("a", "works", "3"), ("b", "refused", "2"), ("c", "works", "1"))


def test_a_file_that_is_not_there_is_not_merged(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--merge", str(tmp_path / "absent.jsonl")])
    assert "no results to merge in" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("status", "commit", "again", "names"),
    [
        (None, None, False, ["new"]),
        (None, None, True, ["one", "two", "new"]),
        (["bug"], None, False, ["two"]),
        (None, ["1"], False, ["one"]),
        (None, ["1", "2"], False, ["one", "two"]),
        (["bug"], ["1"], False, []),
    ],
)
def test_what_is_measured_follows_from_the_last_results(
    status: list[str] | None, commit: list[str] | None, again: bool, names: list[str]
) -> None:
    chosen = [Entry("toys", name, Small, images(4), predictions) for name in ("one", "two", "new")]
    known = {json.loads(row)["model"]: json.loads(row) for row in lines(*KNOWN).splitlines()}
    assert [entry.name for entry in to_do(chosen, known, status, commit, again=again)] == names


def test_the_page_is_made_of_the_results(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_docs, "DOCS", tmp_path / "zoo.md")
    main(["--write-docs"])
    committed = (OUT.parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert zoo_docs.DOCS.read_text(encoding="utf-8") == committed, "run python -m benchmarks.zoo --write-docs"


def test_nothing_in_the_results_is_silently_wrong() -> None:
    found = results(OUT)
    assert len(found) >= 250 and {line.partition("/")[0] for line in found} == set(LIBRARIES)
    assert [name for name, result in found.items() if result["status"] == "wrong"] == []
