"""Decompositions of all factors: failures, rescues, and what the host knows of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.estimator import FisherEstimator
from kfac_fx.factors import inverses
from kfac_fx.factors.inverses import FailureWatch, Inverter
from kfac_fx.linalg.matrices import rescued_roots
from tests.runtime.fake_net import batch, deep, exact, noise


def test_only_the_block_that_fails_keeps_its_last_inverse() -> None:
    est = exact(deep(), batch(), damping=0.1)
    est.update_inverses()
    v = noise(est)
    before = est.multiply_inverse(v)
    est.damping = 0.2
    est.blocks["2.weight", "2.bias"].factors["A"].moment.fill_(torch.nan)
    est.update_inverses()
    after = est.multiply_inverse(v)
    assert est.failures == (1, 0)
    assert {name.split(".")[0] for name in v if torch.equal(after[name], before[name])} == {"2"}


def test_a_failed_decomposition_is_rescued_with_more_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    """An indefinite factor, as rounding may leave it."""
    est = exact(deep(), batch(), damping=0.0)
    factor = est.blocks["2.weight", "2.bias"].factors["G"]
    factor.moment.copy_(torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.5])))
    est.damping = 1e-4
    rescued: list[int] = []

    def spy(side: Tensor, *rest: Any) -> Any:
        rescued.append(len(side))
        return rescued_roots(side, *rest)

    monkeypatch.setattr(inverses, "rescued_roots", spy)
    est.update_inverses()
    assert rescued == [1]
    assert est.failures == (0, 0)
    assert all(tensor.isfinite().all() for tensor in est.multiply_inverse(noise(est)).values())


def test_where_the_host_would_have_to_wait_a_rescue_comes_one_update_later() -> None:
    """As on CUDA. The first update waits, for there is no last good inverse yet."""
    est = exact(deep(), batch(), damping=1e-4)
    block = est.blocks["2.weight", "2.bias"]
    good = block.factors["G"].moment.clone()
    indefinite = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.5], dtype=torch.float64))[None]
    inverter, seen = Inverter(est.groups, est.roots, deferred=True), []
    for moment in (indefinite, good, indefinite, indefinite, good):
        block.factors["G"].moment.copy_(moment)
        inverter.update()
        seen.append((est.multiply_inverse(noise_of_ones(est))["2.weight"], block.failures.decompositions))
    assert [count for _, count in seen] == [0, 0, 1, 1, 1]
    first, second, kept, rescued, last = (inverse for inverse, _ in seen)
    assert torch.equal(kept, second)
    Inverter(est.groups, est.roots, deferred=False).update()  # of a good factor: no rescue takes the place of its root
    assert torch.equal(est.multiply_inverse(noise_of_ones(est))["2.weight"], second)
    torch.testing.assert_close(rescued, first)
    assert torch.equal(last, second)


def noise_of_ones(est: FisherEstimator) -> dict[str, Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in noise(est).items()}


@pytest.mark.parametrize(("deferred", "expected"), [(False, [[1], [], [0]]), (True, [[1], [1], []])])
def test_a_deferred_watch_knows_failures_one_call_late_but_for_the_first(
    deferred: bool, expected: list[list[int]]
) -> None:
    watch = FailureWatch(deferred)
    valid = [torch.tensor(flags) for flags in ([True, False], [True, True], [False, True])]
    assert [watch.known_failures(flags).tolist() for flags in valid] == expected


def test_matrices_of_one_size_are_one_batch() -> None:
    est = exact(deep(), batch())
    inverter = Inverter(est.groups, est.roots)
    members = {
        size: [est.groups[g].size(side) for g, side in sides] for (size, _, _), sides in inverter.batches.items()
    }
    assert len(members) == len(inverter.batches) > 1
    assert all(set(sizes) == {size} for size, sizes in members.items())
    assert sum(map(len, members.values())) == sum(len(group.decomposed) for group in est.groups)
