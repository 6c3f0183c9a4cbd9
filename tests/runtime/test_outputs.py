"""Outputs of recordings are compared with the model's: how much they may differ, which are compared, who is told."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.linalg.matrices import HostCopy
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.recording import equivalence
from kfac_fx.recording.equivalence import OutputWatch, differ, sampled_elements

X = torch.randn(20, 5)


def said(one: torch.Tensor, other: torch.Tensor, rounding: float = 0.0) -> bool:
    return bool(differ([one], [other], rounding))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_half_of_the_digits_must_agree(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    half = torch.finfo(dtype).eps ** 0.5
    largest = float(x.abs().max())
    near, far = x.clone(), x.clone()
    near[0, 0] += 0.3 * half * largest
    far[0, 0] += 3 * half * largest
    assert not said(x, x) and not said(near, x) and said(far, x)


def test_a_coarser_precision_that_took_part_allows_more() -> None:
    assert said(1.001 * X, X) and not said(1.001 * X, X, torch.finfo(torch.bfloat16).eps)


def test_elements_that_are_not_finite_must_be_so_in_both() -> None:
    masked = X.clone()
    masked[0] = -torch.inf
    broken = torch.full_like(X, torch.nan)
    assert not said(masked, masked) and not said(broken, broken)
    assert said(masked, X) and said(X, masked)
    moved = masked.clone()
    moved[1:] *= 2
    assert said(moved, masked)


def test_fillings_do_not_hide_a_difference() -> None:
    masked = X.clone()
    masked[0] = -1e9
    moved = masked.clone()
    moved[1:] *= 1.01
    assert said(moved, masked) and not said(masked * (1 + 1e-7), masked)


def test_outputs_that_are_mostly_zero_are_compared_by_the_largest() -> None:
    sparse = torch.zeros(100)
    sparse[0], sparse[1] = 1.0, 1e-9
    moved = sparse.clone()
    moved[1] = 2e-9
    assert not said(moved, sparse) and said(2 * sparse, sparse)


def test_other_shapes_are_another_function() -> None:
    assert bool(differ([X], [X, X], 0.0)) and said(X, X[:3])
    assert not bool(differ([], [], 0.0)) and not said(X[:0], X[:0])


def test_a_sample_is_of_the_floating_outputs_and_not_of_a_number_beside_them() -> None:
    assert [tuple(tensor.shape) for tensor in sampled_elements([X, X.sum(), X.argmax(1), "text", None])] == [(100,)]
    assert [tuple(tensor.shape) for tensor in sampled_elements([X.sum()])] == [(1,)]


def test_a_sample_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "MOST_ELEMENTS", 10)
    (small,) = sampled_elements([X])
    assert small.numel() <= 10 and torch.equal(small, X.reshape(-1)[::11])


def test_recordings_are_compared_at_first_and_then_every_thousandth() -> None:
    watch = OutputWatch()
    due = [number for number in range(1, 3001) if watch.due()]
    assert due == sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 1000, 2000, 3000})


def test_a_cpu_is_told_at_once() -> None:
    watch = OutputWatch()
    watch.add(torch.tensor(True))
    watch.add(torch.tensor(False))
    assert watch.pending is not None
    with pytest.raises(ModelChangedError, match="Net computes other outputs now than its captured graph"):
        watch.take("Net", watch.pending)
    assert watch.pending is None
    assert bool(watch.take("Net", torch.tensor(False)))


class Event:
    """The event of a copy that arrives when the test says so."""

    arrived = False

    def query(self) -> bool:
        return self.arrived


def test_an_accelerator_tells_the_host_when_the_copy_has_arrived() -> None:
    watch, event = OutputWatch(), Event()
    watch.told = HostCopy(torch.tensor(True))
    watch.told.event = event
    watch.check("Net")
    event.arrived = True
    with pytest.raises(ModelChangedError, match="Nothing of this batch was used"):
        watch.check("Net")
    watch.check("Net")  # it is told once
