"""Small compiled modules for tests of what `compile` returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kfac_fx.compiled.compiled_module import CompiledModule, compile

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(5, 3))


def net_of(model: nn.Module, *inputs: Any, **options: Any) -> CompiledModule:
    return compile(model, inputs or None, loss="categorical", **options)


def count(net: CompiledModule) -> int:
    return sum(len(known) for known in net.captures.recorders.values())
