"""Decompositions of all factors: failures, rescues, and what the host knows of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher import groups as stacks
from kfac_fx.fisher.block import make_groups
from kfac_fx.fisher.groups import FailureWatch, Inverter
from kfac_fx.linalg.matrices import rescued_roots
from kfac_fx.passes.matrix import Layout, MatrixForm
from tests.runtime.fake_net import batch, deep, exact, noise
from tests.runtime.fisher_cases import FORMS, register


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

    monkeypatch.setattr(stacks, "rescued_roots", spy)
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
    members = {key.size: [est.groups[g].size(side) for g, side in sides] for key, sides in inverter.batches.items()}
    assert len(members) == len(inverter.batches) > 1
    assert all(set(sizes) == {size} for size, sizes in members.items())
    assert sum(map(len, members.values())) == sum(len(group.decomposed) for group in est.groups)


def test_wide_matrices_on_a_cpu_are_decomposed_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    est = exact(deep(), batch())
    est.update_inverses()
    expected = est.multiply_inverse(noise_of_ones(est))
    sizes = sorted({group.size(side) for group in est.groups for side in group.decomposed})
    monkeypatch.setattr(stacks, "WORTH_DECOMPOSING_ALONE", sizes[-1])
    inverter = Inverter(est.groups, est.roots)
    wide = [(key, sides) for key, sides in inverter.batches.items() if key.alone]
    assert wide and all(sides == [key.alone] and key.size == sizes[-1] for key, sides in wide)
    assert any(key.alone is None for key in inverter.batches)
    for group in est.groups:
        for operators in group.roots.values():
            for operator in operators:
                operator.zero_()
    inverter.update()
    torch.testing.assert_close(est.multiply_inverse(noise_of_ones(est)), expected)


def test_failures_that_have_not_arrived_on_the_host_are_not_waited_for() -> None:
    """As on CUDA, whose event tells that the copy is complete."""
    watch = FailureWatch(deferred=True)
    good, failed = torch.tensor([True, True]), torch.tensor([True, False])
    watch.known_failures(good)
    watch.known_failures(failed)
    assert watch.failed is not None
    watch.failed.event = SimpleNamespace(query=lambda: False)
    assert watch.known_failures(good).tolist() == []
    watch.known_failures(failed)
    watch.failed.event = SimpleNamespace(query=lambda: True)
    assert watch.known_failures(good).tolist() == [1]


def test_a_rescue_in_vain_leaves_what_has_succeeded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deferred watch names the failures of the update before."""
    matrices, damping = torch.eye(2).repeat(2, 1, 1), torch.ones(2)
    watch = FailureWatch(deferred=True)
    for flags in ([True, True], [False, True]):
        watch.known_failures(torch.tensor(flags))

    def failing(side: Tensor, *_: Any) -> Any:
        return {-1.0: torch.full_like(side, torch.nan)}, torch.zeros(len(side), dtype=torch.bool)

    monkeypatch.setattr(stacks, "rescued_roots", failing)
    roots, valid = Inverter([], (-1.0,)).decompose(matrices, damping, watch)
    assert valid.tolist() == [True, True]
    torch.testing.assert_close(roots[-1.0], matrices / 2)


def test_factors_of_two_precisions_are_decomposed_in_their_own() -> None:
    dtypes = torch.float32, torch.float64
    parameters = {f"{n}.weight": torch.randn(3, 2, dtype=dtype) for n, dtype in enumerate(dtypes)}
    plain, layout = register(FORMS["linear"], "kron"), Layout((3, 2)).reshape((1, 3, 2))
    registrations = [replace(plain, parameters=(name,), matrix=MatrixForm((name, layout), None)) for name in parameters]
    groups = make_groups(registrations, parameters, roots=(-1.0,), damping=torch.tensor(0.1))
    assert {key.dtype for key in Inverter(groups, (-1.0,)).batches} == set(dtypes)
