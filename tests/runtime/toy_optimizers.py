"""KFAC on a small net, and what tests of it do with it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.optimizer import KFAC
from tests.runtime.slow_kfac import batch, loss_of, mlp

QUADRATIC: dict[str, Any] = {"lr": None, "momentum": None, "momentum_type": "qmodel"}
KINDS: dict[str, dict[str, Any]] = {
    "adaptive": {"momentum_type": "adaptive", "cov_update_every": 1, "damping_adaptation_interval": 3},
    "regular": {},
    "adam": {"momentum_type": "adam"},
    "qmodel": QUADRATIC,
    "qmodel_fixedmu": {"lr": None, "momentum_type": "qmodel_fixedmu"},
    "eigen_moments": {"momentum_type": "eigen_moments", "damping": None},
}


def made(model: nn.Module | None = None, **options: Any) -> tuple[CompiledModule, KFAC]:
    net = compile(mlp() if model is None else model, loss="categorical")
    return net, KFAC(net, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})


def backward(net: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def train(net: CompiledModule, opt: KFAC, numbers: range) -> None:
    for number in numbers:
        opt.zero_grad()
        backward(net, number)
        opt.step(evaluate=loss_of(net, *batch(number)))


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def flat_state(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat_state(value, f"{path}/{key}").items()}
    return {path: tree.clone() if isinstance(tree, Tensor) else copy.deepcopy(tree)}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value.nan_to_num(), second[name].nan_to_num()) if isinstance(value, Tensor) else None
        assert same if same is not None else value == second[name], name
