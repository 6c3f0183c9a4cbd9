"""K-FAC of other packages, on the tasks whose layers they know: linear layers, 2-D convolutions and norms."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.convergence.tasks import Batch, Task
from benchmarks.convergence.training import Training, first_order, number
from benchmarks.methods import quiet

KNOWN = ("autoencoder", "deep", "resnet2d")
DAMPING = {"asdl": 1e-2, "singd": 1e-3}  # singd's default; asdl has lower losses with 1e-2 on all three tasks


class Loss(nn.Module):
    """The loss of a task, as a mean or a sum over cases: asdl asks for the one and computes with the other."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.reduction = task, "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self.task.loss(output, target)
        return loss * len(output) if self.reduction == "sum" else loss


def asdl(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    """The empirical Fisher, which serves every loss; statistics at every step and inverses at every tenth."""
    with quiet():
        from asdl.precondition import KfacGradientMaker, PreconditioningConfig

    optimizer = torch.optim.SGD(model.parameters(), lr=number(lr), momentum=0.9)
    inputs, _ = next(task.batches(seed))
    config = PreconditioningConfig(
        data_size=len(inputs[0]),
        damping=DAMPING["asdl"],
        ema_decay=0.05,  # the weight of the new
        curvature_upd_interval=1,
        preconditioner_upd_interval=10,
    )
    with quiet():
        maker = KfacGradientMaker(model, config, fisher_type="fisher_emp")

    def step(batch: Batch) -> int:
        inputs, target = batch
        optimizer.zero_grad()
        output = maker.setup_model_call(model, *inputs)
        maker.setup_loss_call(Loss(task), output, target)
        with quiet(), mock.patch("torch.cuda.nvtx.range", lambda name: nullcontext()):  # marks for a profiler of CUDA
            maker.forward_and_backward()
        optimizer.step()
        return 1

    return Training(step, (optimizer,))


def singd(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    """Dense factors, updated at every step without inverses; the parameters of norms follow SGD."""
    with quiet():
        from singd.optim.optimizer import SINGD

        second = SINGD(model, lr=number(lr), damping=DAMPING["singd"], T=1, warn_unsupported=False)
    supported = {parameter for group in second.param_groups for parameter in group["params"]}
    others = [parameter for parameter in model.parameters() if parameter not in supported]
    first = [torch.optim.SGD(others, lr=number(lr), momentum=0.9)] if others else []
    training = first_order(task, model, second, *first)

    def step(batch: Batch) -> int:
        with quiet():
            return training.step(batch)

    return Training(step, training.optimizers)
