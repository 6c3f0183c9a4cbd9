"""A small classifier, its data, and the plain loop that trainers are compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx
from tests.trainers.common import copies, state_of


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cases() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(48) % 3), batch_size=8)


def plain_loop(
    micro_batches: int = 1, autocast: torch.dtype | None = None, clip: float | None = None, epochs: int = 2
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters and the state of the optimizer after training."""
    model = classifier()
    net = kfac_fx.compile(model, loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.3, damping=0.1, seed=0)
    for _ in range(epochs):
        for number, (x, y) in enumerate(cases(), 1):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = F.cross_entropy(net(x), y)
            (loss / micro_batches).backward()
            if number % micro_batches == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return copies(model), state_of(optimizer)
