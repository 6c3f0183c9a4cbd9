"""`benchmarks/peer_examples.py`: our numbers against dense ones, a run with each peer that is there, and the page."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import peer_examples, peer_runs
from benchmarks.peer_examples import EXAMPLES, PEERS
from benchmarks.peer_runs import Found, Posterior, Problem, Run, cross_entropies, squared_errors

CLASSES = 3


def chain(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [nn.Linear(i, o, bias) for i, o in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))[:-1]


def small(loss: str, *widths: int, bias: bool = True) -> Problem:
    torch.manual_seed(0)
    x, queries = torch.randn(12, widths[0]), torch.randn(5, widths[0])
    y: Callable[[int], torch.Tensor] = lambda cases: (  # noqa: E731
        torch.randint(widths[-1], (cases,)) if loss == "categorical" else torch.randn(cases, widths[-1])
    )
    losses = cross_entropies if loss == "categorical" else squared_errors
    return Problem(chain(*widths, bias=bias).eval(), loss, losses, x, y(12), queries, y(5), 4).to(torch.float64)


DENSE: dict[str, tuple[Callable[[Problem], Run], Callable[[Problem], Found], Problem]] = {
    "EK-FAC, relative": (
        peer_runs.scores_of_ours, partial(peer_runs.dense_ekfac, True), small("normal", 4, 5, 2)
    ),
    "EK-FAC": (
        peer_runs.ekfac_of_ours, partial(peer_runs.dense_ekfac, False), small("categorical", 4, 5, CLASSES)
    ),
    "EK-FAC without biases": (
        peer_runs.ekfac_of_ours,
        partial(peer_runs.dense_ekfac, False),
        small("categorical", 4, 5, CLASSES, bias=False),
    ),
    "Hessian": (peer_runs.influence_of_ours, peer_runs.dense_influence, small("categorical", 4, CLASSES)),
    "last layer": (
        partial(peer_runs.posterior_of_ours, Posterior("full", last=True, steps=2)),
        partial(peer_runs.dense_posterior, Posterior("full", last=True)),
        small("categorical", 4, 5, CLASSES),
    ),
    "one layer of a regression": (
        partial(peer_runs.posterior_of_ours, Posterior("full", last=False, steps=2)),
        partial(peer_runs.dense_posterior, Posterior("full", last=False)),
        small("normal", 4, 2),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", DENSE)
def test_our_numbers_are_the_dense_ones(name: str) -> None:
    ours, dense, problem = DENSE[name]
    run = ours(problem)
    for phase in run.phases.values():
        phase()
    expected = dense(problem)
    assert expected.keys() & run.found.keys() == expected.keys()
    for number, values in expected.items():
        torch.testing.assert_close(run.found[number], values, msg=number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs_and_is_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec(PEERS[EXAMPLES[name].library]) is None:
        pytest.skip(f"{EXAMPLES[name].library} is not installed")
    out = tmp_path / "found.json"
    peer_examples.main(["--examples", name, "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))["results"][name]
    assert found["seconds"]["prepare"].keys() == {"peer", "ours"}
    assert "relative distances in float64" in capsys.readouterr().out


def test_an_example_that_is_measured_again_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_examples, "PEERS", dict.fromkeys(PEERS, "json"))
    monkeypatch.setattr(peer_examples.metadata, "version", lambda name: "1")
    seconds = [2.0, 1.0]
    spent = {"prepare": {"peer": 1.0, "ours": 1.0}}
    monkeypatch.setattr(
        peer_examples,
        "measure",
        lambda *_: {
            "agreement": {"scores": {"peer from ours": 1.0}},
            "seconds": spent | {"fit": {"peer": 3.0, "ours": seconds.pop()}},
        },
    )
    out = tmp_path / "found.json"
    for name in ("dattri, noisy labels, cg", "dattri, MLP without biases"):
        peer_examples.main(["--examples", name, "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [example["seconds"]["fit"]["ours"] for example in found.values()] == [1.0, 2.0]
    assert peer_examples.days(found) == ""
    found["dattri, noisy labels, cg"]["day"] = "2026-01-02"
    assert "2026-01-02: *dattri, noisy labels, cg*" in peer_examples.days(found)
    monkeypatch.setattr(peer_examples.metadata, "version", lambda name: "2")
    seconds.append(4.0)
    peer_examples.main(["--examples", "dattri, noisy labels, cg", "--out", str(out)])
    assert list(json.loads(out.read_text(encoding="utf-8"))["results"]) == ["dattri, noisy labels, cg"]


def test_an_example_without_its_library_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_examples, "PEERS", dict.fromkeys(PEERS, "a_library_that_is_not_there"))
    peer_examples.main(["--examples", "dattri, noisy labels, cg", "--out", str(tmp_path / "found.json")])
    assert capsys.readouterr().out == "dattri, noisy labels, cg: dattri is not installed\n"
    assert json.loads((tmp_path / "found.json").read_text())["results"] == {}


def test_the_page_is_made_of_the_results() -> None:
    results = json.loads(peer_examples.OUT.read_text(encoding="utf-8"))
    text = peer_examples.DOCS.read_text(encoding="utf-8")
    assert text == peer_examples.page(results), "run python -m benchmarks.peer_examples --write-docs"
    assert results["results"].keys() == EXAMPLES.keys()


def test_what_the_page_says_of_the_numbers() -> None:
    found = {
        name: example["agreement"]
        for name, example in json.loads(peer_examples.OUT.read_text(encoding="utf-8"))["results"].items()
    }
    equal = [name for name in found if re.search("kronfluence|diag|full|explicit", name)]
    assert len(equal) == 6
    for name in equal:
        assert all(of["peer from ours"] < 1e-11 for of in found[name].values()), name
    for name in ("dattri, MLP with EK-FAC", "dattri, MLP without biases"):
        scores = found[name]["pairwise scores"]
        assert scores["ours from dense"] < 1e-12 and scores["peer from dense"] > 0.1
    assert found["dattri, noisy labels, cg"]["pairwise scores"]["ours from dense"] < 1e-12
