"""The Fisher of a sum of squares, a normal distribution's loss with the targets zero: recorded, and from autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.fisher.block import BlockOperator


def recorded(model: nn.Module, x: Tensor, **options: Any) -> kfac_fx.FisherEstimator:
    """After one batch, of the empirical Fisher."""
    net = kfac_fx.compile(model, (x,), loss="normal", **options)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=torch.zeros_like(model(x)))
    return estimator


def dense_fisher(model: nn.Module, x: Tensor, block: BlockOperator) -> Tensor:
    """The second moment of the parameter's gradients, in the order of its matrix, which may be transposed."""
    (name,) = block.parameters
    parameter, matrix = model.get_parameter(name), block.registration.matrix
    assert matrix is not None
    gradients = [torch.autograd.grad((model(case[None]) ** 2).sum(), parameter)[0] for case in x]
    flat = [matrix.pack({name: gradient}).flatten() for gradient in gradients]
    return torch.stack([torch.outer(tensor, tensor) for tensor in flat]).mean(0)
