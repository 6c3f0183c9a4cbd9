"""Factors of a stream of chunks: means over all cases so far, also over restarts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from tests.runtime.single_cases import Text, V

pytestmark = pytest.mark.usefixtures("float64")


class Cells(nn.Module):
    """A weight that every step uses, for inputs of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1)
        for _ in range(3):
            h = torch.tanh(self.cell(h))
        y: Tensor = self.head(h)
        return y


def images(n: int, size: int) -> Tensor:
    return torch.randn(n, 2, size, size) * (1 + size)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


SIZES = ((4, 3), (9, 5), (1, 4))
KINDS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        images,
        {},
    ),
    "kron_sua": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        images,
        {"*": "kron_sua"},
    ),
    "full": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 3)), lambda n, _: images(n, 3), {"*": "full"}),
    "series": (Cells, lambda n, s: torch.randn(n, s, 3), {"cell": "kron_series_2"}),
    "kron_reduce": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
        lambda n, s: torch.randn(n, s, 3),
        {"*": "kron_reduce"},
    ),
}


def factors_of(estimator: kfac_fx.FisherEstimator) -> dict[tuple[Any, str], Tensor]:
    return {
        (key, name): factor.value for key, block in estimator.blocks.items() for name, factor in block.factors.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_that_are_folded_by_their_cases_are_one_fold_of_all(kind: str) -> None:
    make, data, approximations = KINDS[kind]
    chunks = [data(n, size) for n, size in SIZES]
    model = make()
    net = kfac_fx.compile(model, (chunks[1],), loss="normal", approximations=approximations)
    whole = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    for chunk in chunks:
        whole.update_covariances(chunk, fold=False)
    whole.fold()
    state: dict[str, Tensor] | None = None
    for chunk in chunks:
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")  # of another process
        if state is not None:
            estimator.load_state_dict(state)
        estimator.update_covariances(chunk, fold=False)
        estimator.fold(weight=len(chunk))
        state = {name: tensor.clone() for name, tensor in estimator.state_dict().items()}
    for name, factor in factors_of(estimator).items():
        torch.testing.assert_close(factor, factors_of(whole)[name], msg=str(name))


def test_a_weight_alone_keeps_the_past_and_a_decay_lowers_it() -> None:
    net = kfac_fx.compile(nn.Linear(2, 1), (torch.randn(2, 2),), loss="normal", approximations={"*": "full"})
    x = [torch.randn(n, 2) for n in (3, 5)]
    each = []
    for chunk in x:
        one = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        one.update_covariances(chunk)
        each.append(factors_of(one)[next(iter(one.blocks)), "F"])
    for decay, past in ((None, 1.0), (0.5, 0.5)):
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", cov_ema_decay=0.9)
        for chunk in x:
            estimator.update_covariances(chunk, fold=False)
            estimator.fold(weight=len(chunk), decay=decay)
        (factor,) = factors_of(estimator).values()
        torch.testing.assert_close(factor, (3 * past * each[0] + 5 * each[1]) / (3 * past + 5))
    for wrong in (0, -1, torch.inf, "many"):
        with pytest.raises(ValueError, match=r"weight is .*; it must be "):
            estimator.fold(weight=wrong)  # type: ignore[arg-type]


def test_an_embedding_and_a_norm_are_means_over_all_cases() -> None:
    torch.manual_seed(0)
    chunks = [torch.randint(V, (n, 4)) for n in (2, 5)]
    net = kfac_fx.compile(Text(), (chunks[0],), loss="categorical", approximations={"places": "diagonal"})
    whole, by_chunk = (kfac_fx.FisherEstimator(net, estimation_mode="exact") for _ in range(2))
    for chunk in chunks:
        whole.update_covariances(chunk, fold=False)
        by_chunk.update_covariances(chunk, fold=False)
        by_chunk.fold(weight=len(chunk))
    whole.fold()
    for name, factor in factors_of(by_chunk).items():
        torch.testing.assert_close(factor, factors_of(whole)[name], msg=str(name))
