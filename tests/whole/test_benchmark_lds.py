"""`benchmarks/lds.py`: its correlations against scipy's, trainings against single ones, and the page of figures."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import lds

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def test_rank_correlations_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [stats.spearmanr(a[:, n], a[:, n] + b[:, n]).statistic for n in range(4)]
    torch.testing.assert_close(lds.rank_correlations(a, a + b), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.usefixtures("float64")
def test_trainings_that_run_together_are_those_one_by_one() -> None:
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    task = replace(
        lds.toy(lds.TASKS["digits"]),
        make=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        steps=7,
        batch=3,
    )
    subsets = torch.stack([torch.arange(6), torch.arange(6, 12)])
    together = lds.trained(task, (x, y), subsets, [3, 4])
    for number, (subset, seed) in enumerate(zip(subsets, [3, 4], strict=True)):
        torch.manual_seed(seed)
        model = task.make()
        order = torch.cat([subset[torch.randperm(6)] for _ in range(4)])[:21].view(7, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=task.decay)
        for step, chosen in enumerate(order):
            optimizer.param_groups[0]["lr"] = task.rate * (1 - step / 7)
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(together[name][number], parameter.detach(), **EXACT)


def test_scores_that_are_the_truth_have_the_correlation_1() -> None:
    """If the loss of a query falls by a fixed amount for every example, these amounts are its scores."""
    generator = torch.Generator().manual_seed(0)
    scores, halves = torch.randn(3, 20, generator=generator), torch.stack([torch.randperm(20)[:10] for _ in range(9)])
    losses = torch.stack([5 - scores[:, half].sum(1) for half in halves])
    correlations = lds.rank_correlations(lds.predicted(scores, halves), losses)
    torch.testing.assert_close(correlations, torch.ones(3, dtype=torch.float64))
    found = lds.with_interval(torch.tensor([[0.2, 0.4, 0.6], [0.4, 0.6, 0.8]], dtype=torch.float64))
    assert found["mean"] == pytest.approx(0.5) and found["models"] == pytest.approx([0.4, 0.6])
    assert 0.3 <= found["interval"][0] < 0.5 < found["interval"][1] <= 0.7


@pytest.mark.filterwarnings("ignore")  # of kronfluence
@pytest.mark.parametrize("name", ["digits", pytest.param("prose", marks=pytest.mark.slow)])
def test_a_toy_of_every_task_has_a_figure_for_every_method(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lds.main(["--quick", "--tasks", name, "--out", str(tmp_path / "found.json")])
    methods = json.loads((tmp_path / "found.json").read_text())["tasks"][name]["methods"]
    there = importlib.util.find_spec("kronfluence") is not None
    others = ["EK-FAC of kronfluence"] * there
    assert list(methods) == ["gradient product", "K-FAC", "EK-FAC", *others, lds.CEILING]
    assert all(-1 <= kind["mean"] <= 1 for figures in methods.values() for kind in figures.values())
    assert "EK-FAC" in capsys.readouterr().out


def test_the_page_is_made_of_the_results() -> None:
    results = json.loads(lds.OUT.read_text(encoding="utf-8"))
    assert lds.DOCS.read_text(encoding="utf-8") == lds.page(results), "run python -m benchmarks.lds --write-docs"
    for of_task in results["tasks"].values():
        means = {name: figures["one model"]["mean"] for name, figures in of_task["methods"].items()}
        assert means["EK-FAC"] > means["K-FAC"] > 1.5 * means["gradient product"], "as the page says"
        assert of_task["methods"]["EK-FAC"]["mean of models"]["mean"] > means["EK-FAC"]
