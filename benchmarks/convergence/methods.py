"""The methods: torch's own, those of pytorch-optimizer, and ours, each with the learning rates that it may try.

Every method has as many runs to be tuned, `TRIALS`, in a search on a logarithmic grid of its learning rate; ours takes
two, 1 and 0.3. All have the same warm-up and the same linear decay to 0, except those that find their own step size.
No method decays weights: the training loss asks for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from benchmarks.convergence import peers
from benchmarks.convergence.tasks import TASKS, Batch, Solving, Task
from benchmarks.convergence.training import Training, first_order, number, trainable

TRIALS = 4
Make = Callable[[Task, nn.Module, float | None, int], Training]


@dataclass(frozen=True)
class Method:
    """A rule with its search for a learning rate.

    Attributes:
        make: of task, network, learning rate and seed.
        start: the learning rate at which the search begins; None: `lrs` are tried, all of them.
        missing: the reason why the method cannot run here, or None.
        tasks: the names of the tasks that the method is for.
        note: a line for the table of methods.
    """

    make: Make
    note: str
    start: float | None = None
    lrs: tuple[float | None, ...] = ()
    missing: Callable[[], str | None] = lambda: None
    tasks: tuple[str, ...] = tuple(TASKS)

    def next_lr(
        self, losses: Mapping[float | None, float], scale: float = 1.0
    ) -> tuple[dict[float | None, float], bool, float | None]:
        """Replay the search with the losses that are known. scale: of the task.

        Returns the trials that the search has used, whether it is finished, and the next learning rate if it is not.
        """
        used: dict[float | None, float] = {}
        for _ in range(TRIALS if self.start is not None else len(self.lrs)):
            lr = self.lrs[len(used)] if self.start is None else searched(scale * self.start, used)
            if lr not in losses:
                return used, False, lr
            used[lr] = losses[lr]
        return used, True, None


def searched(start: float, used: Mapping[float | None, float]) -> float:
    """The next learning rate on a grid of half decades around `start`.

    The search follows the better side until the best rate has worse ones on both sides. Then it tries the middle
    between the best one and the better of its neighbors.
    """

    def grid(k: float) -> float:
        return float(f"{start * 10 ** (k / 2):.2g}")

    known = {k: used[grid(k)] for k in range(-TRIALS, TRIALS + 1) if grid(k) in used}
    if len(known) < 2:
        return grid(len(known))
    best = min(known, key=lambda k: known[k])
    for beside in (best - 1, best + 1):
        if beside not in known:
            return grid(beside)
    better = min(best - 1, best + 1, key=lambda k: known[k])
    return grid((best + better) / 2)


# --- torch and pytorch-optimizer --------------------------------------------------------------------------------------


def sgd(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    return first_order(task, model, torch.optim.SGD(trainable(model), lr=number(lr), momentum=0.9))


def adamw(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    return first_order(task, model, torch.optim.AdamW(trainable(model), lr=number(lr), weight_decay=0.0))


def soap(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    from pytorch_optimizer import SOAP

    return first_order(task, model, SOAP(trainable(model), lr=number(lr), weight_decay=0.0))


def shampoo(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    from pytorch_optimizer import ScalableShampoo

    optimizer = ScalableShampoo(
        trainable(model),
        lr=number(lr),
        preconditioning_compute_steps=10,
        moving_average_for_momentum=True,
        graft_type=3,  # the length of RMSProp's step for every parameter
    )
    return first_order(task, model, optimizer)


def muon(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    optimizers, before = muon_and_adamw(model, number(lr))
    return first_order(task, model, *optimizers, before=before)


def muon_and_adamw(model: nn.Module, lr: float) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    """Muon for hidden matrices, convolutions as [outputs, inputs * kernel], and AdamW for the rest: tables, the output
    layer and vectors. One learning rate serves both (`match_rms_adamw`). The function comes before their steps."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [parameter for parameter in trainable(model) if parameter.dim() > 1 and parameter not in tables][:-1]
    matrices = [nn.Parameter(weight.detach().flatten(1)) for weight in weights]  # share the memory
    hidden = set(weights)
    rest = [parameter for parameter in trainable(model) if parameter not in hidden]

    def copy_gradients() -> None:
        for weight, matrix in zip(weights, matrices, strict=True):
            assert weight.grad is not None
            matrix.grad = weight.grad.flatten(1)

    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return optimizers, copy_gradients


def lbfgs(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    """20 iterations a step. Every evaluation counts as a step of the budget."""
    optimizer = torch.optim.LBFGS(trainable(model), lr=number(lr), history_size=100, line_search_fn="strong_wolfe")

    def step(batch: Batch) -> int:
        inputs, target = batch
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = task.loss(model(*inputs), target)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        return evaluations

    return Training(step)


# --- ours -------------------------------------------------------------------------------------------------------------


def compiled(task: Task, model: nn.Module, seed: int) -> kfac_fx.CompiledModule:
    inputs, _ = next(task.batches(seed))
    return kfac_fx.compile(model, inputs, loss=task.distribution)


def kfac(task: Task, model: nn.Module, lr: float | None, seed: int, **options: Any) -> Training:
    net = compiled(task, model, seed)
    optimizer = kfac_fx.KFAC(net, lr=lr, seed=seed, **options)

    def step(batch: Batch) -> int:
        inputs, target = batch
        task.loss(net(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1

    return Training(step, (optimizer,))


def kfac_adaptive(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    return kfac(task, model, lr, seed, momentum_type="adaptive")


def kfac_qmodel(task: Task, model: nn.Module, lr: float | None, seed: int) -> Training:
    net = compiled(task, model, seed)
    optimizer = kfac_fx.KFAC(net, damping=1.0, momentum=None, momentum_type="qmodel", adapt_damping=True, seed=seed)

    def step(batch: Batch) -> int:
        inputs, target = batch
        loss = task.loss(net(*inputs), target)
        loss.backward()
        optimizer.step(evaluate=lambda: task.loss(net(*inputs), target), loss=loss)
        optimizer.zero_grad()
        return 1

    return Training(step)


def not_installed(package: str) -> str | None:
    try:
        version(package)
    except PackageNotFoundError:
        return f"not installed: pip install {package}"
    return None


EQUATIONS = tuple(name for name, task in TASKS.items() if isinstance(task, Solving))
METHODS: dict[str, Method] = {
    "AdamW": Method(adamw, "torch.optim.AdamW", start=3e-3),
    "SOAP": Method(
        soap,
        "pytorch_optimizer.SOAP, bases every 10 steps",
        start=3e-3,
        missing=partial(not_installed, "pytorch-optimizer"),
    ),
    "Muon": Method(muon, "torch.optim.Muon for hidden matrices, AdamW for the rest", start=3e-3),
    "L-BFGS": Method(lbfgs, "torch.optim.LBFGS, strong Wolfe, history 100", start=1.0, tasks=EQUATIONS),
    "KFAC": Method(kfac, "`KFAC(net)`, which takes lr=1: nothing is tuned", lrs=(1.0,)),
    "KFAC adaptive": Method(kfac_adaptive, "`KFAC(net, lr, momentum_type='adaptive')`", lrs=(1.0, 0.3)),
    "KFAC qmodel": Method(
        kfac_qmodel,
        "`KFAC(net, damping=1.0, momentum=None, momentum_type='qmodel', adapt_damping=True)`, no schedule",
        lrs=(None,),
    ),
    "Shampoo": Method(
        shampoo,
        "pytorch_optimizer.ScalableShampoo, roots every 10 steps, grafted on RMSProp",
        start=3e-3,
        missing=partial(not_installed, "pytorch-optimizer"),
    ),
    "asdl": Method(
        peers.asdl,
        f"K-FAC of asdl, empirical, statistics at every step, inverses every 10 steps, damping {peers.DAMPING['asdl']}",
        start=1e-3,
        missing=partial(not_installed, "asdfghjkl"),
        tasks=peers.KNOWN,
    ),
    "singd": Method(
        peers.singd,
        f"inverse-free K-FAC of singd, dense, statistics at every step, damping {peers.DAMPING['singd']}",
        start=1e-2,
        missing=partial(not_installed, "singd"),
        tasks=peers.KNOWN,
    ),
    "SGD": Method(sgd, "torch.optim.SGD, momentum 0.9", start=0.1),
}
