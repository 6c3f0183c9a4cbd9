"""One training run of the demo: when it measures the loss, and when it ends."""

import math

import pytest
import torch

from kfac_fx.demo.tasks import Task, tasks
from kfac_fx.demo.training import one_thread, train


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
