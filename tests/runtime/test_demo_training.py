"""One training run of the demo: when it measures the loss, and when it ends."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kfac_fx.cli import demo
from kfac_fx.cli.demo import METHODS, Point, Run, Task, draw, one_thread, tasks, train


@pytest.fixture(scope="module")
def both() -> dict[str, Task]:
    return {task.name: task for task in tasks(torch.device("cpu"))}


def test_a_run_is_repeatable_and_looks_at_the_loss_on_schedule(both: dict[str, Task]) -> None:
    task, seen = both["deep plain network"], []
    runs = [
        train("adamw", task, task.model(0), {"lr": 1e-3}, steps=13, seed=2, listener=lambda *look: seen.append(look))
        for _ in range(2)
    ]
    assert [point.step for point in runs[0].points] == [0, 10, 13]
    assert [point.loss for point in runs[0].points] == [point.loss for point in runs[1].points]
    assert seen[:2] == [(point.step, point.loss) for point in runs[0].points[1:]]
    assert all(a.seconds < b.seconds for a, b in zip(runs[0].points, runs[0].points[1:], strict=False))


def test_a_run_ends_where_the_loss_is_no_number(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    run = train("sgd", task, task.model(0), {"lr": math.inf}, steps=100, seed=0)
    assert run.final.step < 100 and not math.isfinite(run.final.loss)
    assert run.best == run.points[0]


def test_the_threads_are_afterwards_what_they_were() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_picture_has_a_curve_and_a_name_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, new_figure = list[Any](), demo.new_figure
    monkeypatch.setattr(
        demo, "new_figure", lambda *size, **sizes: (figures.append(new_figure(*size, **sizes)), figures[-1])[1]
    )
    points = Point(0, 0.0, 2.0), Point(10, 0.5, 1.5), Point(20, 1.0, 1.0)
    draw({"task": {method: Run(method, {}, points) for method in METHODS}}, tmp_path / "curves.png")
    (figure,) = figures
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*METHODS.values()]
    for axes, along in zip(figure.axes, ([10, 20], [0.5, 1.0]), strict=True):
        curves = [line for line in axes.lines if line.get_label() in METHODS.values()]
        assert [list(curve.get_xdata()) for curve in curves] == [along] * len(METHODS)
    assert figure.get_size_inches().tolist() == [11, 3.6 + 0.4] and (tmp_path / "curves.png").stat().st_size
