"""The tasks of the demo: equal starts, shuffled batches, and the loss of the whole training set."""

import pytest
import torch

from kfac_fx.cli.demo import Task, method_steps, shifted_shapes, tasks


@pytest.fixture(scope="module")
def both() -> dict[str, Task]:
    return {task.name: task for task in tasks(torch.device("cpu"))}


def test_k_fac_takes_a_fifth_of_the_steps_and_at_least_one() -> None:
    assert [method_steps(method, 100) for method in ("sgd", "adamw", "kfac")] == [100, 100, 20]
    assert method_steps("kfac", 3) == 1


def test_the_methods_share_start_and_batches(both: dict[str, Task]) -> None:
    for task in both.values():
        first, second = task.model(3), task.model(3)
        for parameter, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(parameter, other)
        for (x, y), (again, same), _ in zip(task.batches(4), task.batches(4), range(5), strict=False):
            assert torch.equal(x, again) and torch.equal(y, same) and len(x) == task.batch


def test_an_epoch_shows_no_image_twice(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    numbered = Task(**{**vars(task), "inputs": torch.arange(1797), "targets": torch.arange(1797)})
    seen = [x for (x, _), _ in zip(numbered.batches(0), range(3), strict=False)]
    assert len(torch.cat(seen).unique()) == 3 * task.batch


def test_the_shapes_of_a_class_are_alike_up_to_their_place() -> None:
    shapes, labels = shifted_shapes(cases=200)
    again, same = shifted_shapes(cases=200)
    assert torch.equal(shapes, again) and torch.equal(labels, same) and shapes.shape == (200, 40)
    spectra = torch.fft.rfft(shapes).abs()  # a shift changes the phase only
    spectra = spectra / spectra.norm(dim=1, keepdim=True)
    alike = spectra @ spectra.T
    equal = labels[:, None] == labels
    assert alike[equal].mean() > alike[~equal].mean() + 0.1


def test_the_measured_loss_is_that_of_all_images(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    model = task.model(0)
    p, x = torch.sigmoid(model(task.inputs)).double(), task.inputs.double()
    expected = -(x * p.log() + (1 - x) * (1 - p).log()).sum(1).mean().item()
    assert task.measure(model) == pytest.approx(expected, rel=1e-5)
    assert model.training
