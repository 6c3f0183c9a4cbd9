"""The benchmark of convergence: its tasks, its search for learning rates, and its file of runs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import docs, figures, methods, runs, summary, tasks, training
from benchmarks.convergence.equations import Burgers, Equation, Poisson
from benchmarks.convergence.methods import METHODS, Method
from benchmarks.convergence.tasks import TASKS, shortened
from kfac_fx.cli.demo import one_thread


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CACHE", tmp_path / "cache")


def short(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(convergence, "TASKS", {name: shortened(TASKS[name], 2) for name in names})


def test_quick_runs_every_task_and_every_method_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**METHODS, "unheard-of": Method(methods.sgd, "", missing=lambda: "not installed: pip install nothing")}
    monkeypatch.setattr(convergence, "METHODS", known)
    before = convergence.OUT.read_bytes() if convergence.OUT.exists() else None
    convergence.main(["--quick"])
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{shown}" for name in TASKS)
    assert all(name in shown for name in known)
    assert "unheard-of: not installed: pip install nothing" in shown
    assert before == (convergence.OUT.read_bytes() if convergence.OUT.exists() else None)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_same_start_and_the_same_batches_for_every_method(name: str) -> None:
    task = shortened(TASKS[name], 1)
    first, second = task.model(1), task.model(1)
    loss = task.measure(first, 1)
    assert math.isfinite(loss) and loss > 0
    assert loss == task.measure(second, 1)
    assert math.isfinite(task.validate(first))
    for (inputs, target), (others, other), _ in zip(task.batches(1), task.batches(1), range(2), strict=False):
        assert all(map(torch.equal, inputs, others)) and torch.equal(target, other)
        assert bool(torch.isfinite(task.loss(first(*inputs), target)))


def test_losses_are_measured_on_the_scale_of_the_training_loss() -> None:
    """The measured loss is the training loss of a batch, apart from the noise of the batch and the lower bound."""
    for name in ("autoencoder", "gpt", "lstm", "poisson"):
        task = TASKS[name]
        model = task.model(0)
        inputs, target = next(task.batches(0))
        assert task.loss(model(*inputs), target).item() == pytest.approx(task.measure(model, 0), rel=0.1), name


def test_smoothed_labels_have_their_entropy_as_the_lowest_loss() -> None:
    labels = torch.tensor([3])
    smoothed = torch.full((1, 10), tasks.SMOOTHING / 10)
    smoothed[0, 3] += 1 - tasks.SMOOTHING
    assert tasks.smoothed_cross_entropy(smoothed.log(), labels).item() == pytest.approx(tasks.SMOOTHED)


@pytest.mark.parametrize("equation", [Poisson, Burgers])
def test_the_solution_of_an_equation_has_no_residual(equation: type[Equation]) -> None:
    """By autograd, with the solution instead of the network."""
    inside, border = equation.points(50, 20, torch.Generator().manual_seed(0))
    inside[:, 0] = inside[:, 0].clamp(min=0.05)  # a quadrature of 100 nodes needs a little time

    class Exact(equation):  # type: ignore[misc, valid-type]
        def u(self, x: torch.Tensor) -> torch.Tensor:
            return self.solution(x)

        def jet(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            x = x.clone().requires_grad_()
            u = self.solution(x)
            (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            second = sum(
                weight * torch.autograd.grad(slopes[:, k].sum(), x, retain_graph=True)[0][:, k : k + 1]
                for k, weight in enumerate(self.curved)
                if weight
            )
            return u, slopes.unsqueeze(-1), second  # type: ignore[return-value]

    for residual in Exact().forward(inside, border):
        assert residual.abs().max() < 1e-6


@pytest.mark.parametrize("equation", [Poisson, Burgers])
def test_derivatives_that_go_through_the_network_are_those_of_autograd(equation: type[Equation]) -> None:
    model = equation(width=5, hidden=2)
    x = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    u, slopes, second = model.jet(x)
    (gradient,) = torch.autograd.grad(model.u(x).sum(), x, create_graph=True)
    curves = [torch.autograd.grad(gradient[:, k].sum(), x, retain_graph=True)[0][:, k : k + 1] for k in range(2)]
    assert torch.allclose(u, model.u(x)) and torch.allclose(slopes.squeeze(-1), gradient)
    assert torch.allclose(second, model.curved[0] * curves[0] + model.curved[1] * curves[1])


def test_a_fine_tuned_network_is_trained_once_and_only_its_last_block_moves() -> None:
    first = tasks.tuned_gpt(2)
    assert [path.suffix for path in tasks.CACHE.iterdir()] == [".pt"]
    second = tasks.tuned_gpt(2)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    moving = {name.split(".")[0] for name, parameter in first.named_parameters() if parameter.requires_grad}
    assert moving == {"blocks", "norm", "head"}
    assert {name.split(".")[1] for name, p in first.blocks.named_parameters("blocks") if p.requires_grad} == {"2"}


def test_muon_moves_the_network_and_not_a_copy() -> None:
    task = shortened(TASKS["resnet2d"], 1)
    model = task.model(0)
    before = [parameter.clone() for parameter in model.parameters()]
    methods.muon(task, model, 0.1, 0).step(next(task.batches(0)))
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", METHODS)
def test_two_steps_of_a_method_move_every_network_of_its_layers(name: str) -> None:
    method = METHODS[name]
    if reason := method.missing():
        pytest.skip(reason)
    task = shortened(TASKS["autoencoder" if "autoencoder" in method.tasks else method.tasks[0]], 2)
    model = task.model(0)
    before = [parameter.clone() for parameter in model.parameters()]
    trained = method.make(task, model, method.start or method.lrs[0], 0)
    for _, batch in zip(range(2), task.batches(0), strict=False):
        assert trained.step(batch) >= 1
    assert not any(map(torch.equal, before, model.parameters()))
    assert math.isfinite(task.measure(model, 0))


# --- the search for a learning rate -----------------------------------------------------------------------------------


def search(losses: Mapping[float, float], scale: float = 1.0) -> list[float | None]:
    """The learning rates that are tried, in order, where the loss is that of the nearest one."""
    tried: dict[float | None, float] = {}
    while True:
        used, finished, lr = METHODS["AdamW"].next_lr(tried, scale)
        if finished:
            return list(used)
        assert lr is not None
        tried[lr] = losses[min(losses, key=lambda known: abs(math.log(known / lr)))]


def test_the_search_looks_on_both_sides_of_the_best_rate_and_then_between() -> None:
    assert search({3e-3: 1.0, 1e-2: 2.0, 1e-3: 3.0}) == [3e-3, 9.5e-3, 9.5e-4, 5.3e-3]


def test_the_search_follows_the_better_side() -> None:
    assert search({3e-3: 3.0, 1e-2: 2.0, 3e-2: 1.0, 9e-2: 0.5}) == [3e-3, 9.5e-3, 0.03, 0.095]
    assert search({3e-3: math.inf, 1e-2: math.inf, 1e-3: 2.0, 3e-4: 1.0}) == [3e-3, 9.5e-3, 9.5e-4, 3e-4]


def test_the_search_begins_where_the_task_says() -> None:
    assert search({1e-3: 1.0, 3e-3: 2.0, 3e-4: 3.0}, 1 / 3) == [1e-3, 3.2e-3, 3.2e-4, 1.8e-3]


def test_ours_tries_its_two_rates() -> None:
    ours = METHODS["KFAC adaptive"]
    assert ours.next_lr({1.0: 5.0}) == ({1.0: 5.0}, False, 0.3)
    assert ours.next_lr({1.0: 5.0, 0.3: 4.0, 0.1: 1.0}) == ({1.0: 5.0, 0.3: 4.0}, True, None)


def test_a_schedule_warms_up_and_ends_at_zero() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    (schedule,) = training.Training(lambda batch: 1, (optimizer,)).schedules(100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == pytest.approx([2 / 3, 4 / 3, 1.96, 1.94])
    assert rates[-1] == pytest.approx(0.02) and optimizer.param_groups[0]["lr"] == 0


# --- the file of runs -------------------------------------------------------------------------------------------------


def test_a_resumed_run_adds_only_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, "poisson", "classifier")
    out = tmp_path / "runs.jsonl"
    asked = ["--task", "poisson", "--method", "AdamW", "--out", str(out)]
    convergence.main([*asked, "--seed", "1"])
    assert not out.exists()  # the learning rate is tuned on seed 0
    convergence.main([*asked, "--seed", "0", "--seed", "1"])
    records = runs.read(out)
    assert [(record["seed"], record["steps"]) for record in records] == [(0, 2)] * 4 + [(1, 2)]
    best = min(records[:4], key=runs.best_loss)
    assert records[4]["lr"] == best["lr"]
    assert len({tuple(record["points"][0]) for record in records[:4]}) == 1
    assert all("--task poisson" in record["command"] and record["commit"] for record in records)
    written = out.read_bytes()
    convergence.main(asked[:-2] + ["--out", str(out), "--seed", "0", "--seed", "1"])
    assert out.read_bytes() == written
    out.write_bytes(b"".join(written.splitlines(keepends=True)[1:]))  # as after a kill
    convergence.main([*asked, "--seed", "0"])
    assert len(runs.read(out)) == 5


def test_chosen_runs_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, "poisson")
    out = tmp_path / "runs.jsonl"
    out.write_text(
        json.dumps({"task": "deep", "method": "AdamW", "lr": 1.0, "seed": 0, "steps": 2, "points": []}) + "\n"
    )
    asked = ["--task", "poisson", "--method", "SGD", "--seed", "0", "--lr", "0.1", "--out", str(out)]
    convergence.main(asked)
    convergence.main([*asked, "--again"])
    assert [record["task"] for record in runs.read(out)] == ["deep", "poisson"]


def test_a_method_that_diverges_ends_its_run() -> None:
    with one_thread():
        record = runs.train(shortened(TASKS["poisson"], 50), METHODS["SGD"], 1e6, 0)
    assert record["ended"] == "not finite" and record["points"][-1][2] is None
    json.dumps(record, allow_nan=False)


def test_a_run_ends_with_its_seconds() -> None:
    task = tasks.replace(TASKS["poisson"], seconds=1e-3, measure_every=2)
    with one_thread():
        record = runs.train(task, METHODS["SGD"], 1e-3, 0)
    assert record["ended"] == "seconds" and record["points"][-1][0] == 2


# --- the page ---------------------------------------------------------------------------------------------------------


def record(method: str, lr: float | None, seed: int, *losses: float | None, pace: float = 1.0) -> runs.Record:
    """A run on "poisson" that was measured every 10 steps, each of `pace` seconds."""
    points = [[10 * n, 10 * n * pace, loss] for n, loss in enumerate(losses)]
    labels = {"task": "poisson", "method": method, "lr": lr, "seed": seed, "steps": TASKS["poisson"].steps}
    origin = {"command": "python", "commit": "abc", "torch": "2", "python": "3"}
    return labels | {"points": points, "validation": 0.5, "ended": "steps"} | origin


RECORDS = [
    *(record("AdamW", lr, 0, 8.0, 8.0, loss) for lr, loss in ((3e-3, 4.0), (9.5e-3, 5.0), (9.5e-4, 6.0), (5.3e-3, 7))),
    *(record("AdamW", 3e-3, seed, 8.0, 8.0, loss) for seed, loss in ((1, 2.0), (2, 3.0))),
    *(record("KFAC qmodel", None, seed, 8.0, 3.0, loss, pace=5.0) for seed, loss in ((0, 1.0), (1, 0.5), (2, 2.0))),
    record("KFAC adaptive", 1.0, 0, 8.0, 9.0, None),
]


def test_a_method_is_summarized_by_the_seeds_of_its_best_rate() -> None:
    found = summary.entries(RECORDS, TASKS["poisson"])
    adamw, ours, failed = found["AdamW"], found["KFAC qmodel"], found["KFAC adaptive"]
    assert (adamw.lr, adamw.loss, adamw.range, adamw.finished) == (3e-3, 3.0, (2.0, 4.0), True)
    assert not adamw.at_edge and len(adamw.trials) == 4
    assert (ours.loss, ours.last, ours.reached(adamw.loss)) == (1.0, 1.0, (10, 50.0))
    assert failed.last == math.inf
    assert adamw.reached(adamw.loss) == (20, 20.0)
    assert summary.beats(ours, adamw) == (True, False) and summary.beats(adamw, ours) == (False, False)
    assert (ours.loss_at(49.0), ours.loss_at(50.0)) == (8.0, 3.0)
    assert (adamw.diverged, failed.diverged, failed.finished) == (0, 1, False)
    assert failed.reached(3.0) == (math.inf, math.inf)


def test_the_best_rate_at_an_end_of_the_search_is_marked() -> None:
    found = summary.entries(RECORDS[1:3] + RECORDS[:1], TASKS["poisson"])["AdamW"]
    assert (found.lr, found.at_edge) == (3e-3, False)
    edge = summary.entries(RECORDS[:2], TASKS["poisson"])["AdamW"]
    assert (edge.lr, edge.at_edge, edge.finished) == (3e-3, True, False)


def test_the_page_has_the_tables_and_says_which_runs_are_missing() -> None:
    page = docs.page(RECORDS)
    assert "| poisson | 3 | 8 (-, -) | **1** (0.50, 2.50) |" in page
    assert page.startswith("# Training losses") and "| poisson | **3** |  |  |  |  |  |" in page
    assert "| diverged | 0 of 3 | 1 of 1 | 0 of 3 |" in page
    assert "| KFAC qmodel | 1, 0 of 1 |" in page
    assert "| KFAC qmodel |  | 3 | 1 | 0.5 to 2 | 1 | 0.5 | 100.0 | 10 | 50.0 | 8 |" in page
    assert "- SOAP: all." in page and "- KFAC adaptive: no run: autoencoder" in page
    assert "the search is not finished: poisson (1 runs)" in page
    assert "L-BFGS: all." in page


def test_times_of_two_commits_are_not_compared() -> None:
    others = [of | {"commit": "def"} if of["method"] == "KFAC qmodel" else of for of in RECORDS]
    page = docs.page(others)
    assert "| poisson | 3 | 8 (-, -) | **1** (0.50) |" in page and "| KFAC qmodel | 1 of 1 |" in page
    assert "| KFAC qmodel |  | 3 | 1 | 0.5 to 2 | 1 | 0.5 | 100.0 | 10 |  |  |" in page


def test_the_page_of_results_is_made_of_the_runs() -> None:
    assert docs.page(runs.read(convergence.OUT)) == docs.DOCS.read_text(encoding="utf-8"), (
        "run python -m benchmarks.convergence --write-docs"
    )


def test_every_method_has_a_color() -> None:
    assert set(figures.COLORS) == set(METHODS) and len(set(figures.COLORS.values())) == len(METHODS)


def test_every_task_with_runs_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path / "results.md")
    docs.write(RECORDS)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["poisson.png"]
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == docs.page(RECORDS)
