"""The subjects of `benchmarks.agreement`: small models, and the matrix that every peer makes of them.

A matrix is [P, P] over all parameters, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CASES, CLASSES = 12, 3


# --- models -----------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        return out


class Attention(nn.Module):
    """A block of a transformer without norms, which not every peer takes, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.up, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (self.q(x) @ self.k(x).mT / 2).softmax(-1) @ self.v(x)
        out: Tensor = self.head(torch.tanh(self.up(x + self.out(mixed))).mean(1))
        return out


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, CLASSES, bias=bias))


def cnn() -> nn.Module:
    conv = nn.Conv2d(2, 3, 3, padding=1, stride=2)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(3 * 9, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (4,)),
    "MLP without biases": (lambda: mlp(False), (4,)),
    "CNN": (cnn, (2, 5, 5)),
    "one layer twice": (Shared, (4,)),
    "attention": (Attention, (5, 4)),
}


class Task(NamedTuple):
    name: str
    model: nn.Module
    x: Tensor
    y: Tensor


def task(name: str) -> Task:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return Task(name, make().double(), torch.randn(CASES, *shape).double(), torch.randint(CLASSES, (CASES,)))


# --- the dense Fisher -------------------------------------------------------------------------------------------------


def gradients(task: Task, empirical: bool) -> dict[str, Tensor]:
    """[N, k, *shape] by parameter, whose second moments are the Fisher: J B with B Bᵀ that of the outputs, or of the
    true losses."""
    theta = {name: p.detach() for name, p in task.model.named_parameters()}
    apply = lambda p, x: functional_call(task.model, p, (x[None],))[0]  # noqa: E731
    jacobians = vmap(jacrev(apply), (None, 0))(theta, task.x)
    p = task.model(task.x).softmax(-1).detach()
    exact = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
    roots = (p - F.one_hot(task.y, CLASSES)).unsqueeze(-1) if empirical else exact
    return {name: torch.einsum("nc...,nck->nk...", jacobian, roots) for name, jacobian in jacobians.items()}


def brute(task: Task, empirical: bool) -> Tensor:
    """[P, P]: the dense Fisher, of blocks that share a module."""
    rows = torch.cat([gradient.flatten(2) for gradient in gradients(task, empirical).values()], dim=2).flatten(0, 1)
    whole = rows.mT @ rows / CASES
    owner = [i for i, p in enumerate(task.model.parameters()) for _ in range(p.numel())]
    modules = [name.rpartition(".")[0] for name, _ in task.model.named_parameters()]
    same = torch.tensor([[modules[a] == modules[b] for b in owner] for a in owner])
    return torch.where(same, whole, 0)


# --- peers ------------------------------------------------------------------------------------------------------------


def curvlinops(empirical: bool, kind: str, task: Task) -> Tensor:
    from curvlinops import KFACLinearOperator

    return of_operator(KFACLinearOperator, empirical, kind, task)


def of_operator(made: Any, empirical: bool, kind: str, task: Task) -> Tensor:
    operator = made(
        task.model,
        nn.CrossEntropyLoss(),
        list(task.model.parameters()),
        [(task.x, task.y)],
        fisher_type="empirical" if empirical else "type-2",
        kfac_approx=kind,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    found: Tensor = operator @ torch.eye(sum(p.numel() for p in task.model.parameters())).double()
    return found


def corrected(empirical: bool, task: Task) -> Tensor:
    from curvlinops import EKFACLinearOperator

    return of_operator(EKFACLinearOperator, empirical, "expand", task)


def nngeometry(representation: str, task: Task) -> Tensor:
    from nngeometry import metrics
    from nngeometry.object import pspace

    torch.set_default_dtype(torch.float64)  # of its own constants
    try:
        loader = DataLoader(TensorDataset(task.x, task.y), batch_size=CASES)
        found = metrics.FIM(task.model, loader, getattr(pspace, representation), "classif_logits")
    finally:
        torch.set_default_dtype(torch.float32)
    if representation != "PMatKFAC":
        whole: Tensor = found.to_torch()
        return whole
    layers = iter(found.data.values())
    return blocks(task, lambda module: torch.kron(*reversed(next(layers))))


def backpack(extension: str, task: Task) -> Tensor:
    import backpack as library
    from backpack import extensions

    model, loss = library.extend(task.model), library.extend(nn.CrossEntropyLoss())
    with library.backpack(getattr(extensions, extension)()):
        loss(model(task.x), task.y).backward()
    field = {"KFLR": "kflr", "DiagGGNExact": "diag_ggn_exact"}[extension]
    found = [getattr(p, field) for p in model.parameters()]
    if extension == "DiagGGNExact":
        return torch.cat([matrix.flatten() for matrix in found]).diag()
    return torch.block_diag(*(torch.kron(*matrix) if len(matrix) == 2 else matrix[0] for matrix in found))


def asdl(empirical: bool, task: Task) -> Tensor:
    import asdl as library

    kind = library.FISHER_EMP if empirical else library.FISHER_EXACT
    config = library.FisherConfig(kind, [library.SHAPE_KRON], loss_type="cross_entropy", data_size=CASES)
    maker = library.get_fisher_maker(task.model, config)
    outputs = maker.setup_model_call(task.model, task.x)
    maker.setup_loss_call(F.cross_entropy, outputs, task.y, reduction="sum")
    maker.forward_and_backward()
    made = []
    for module in task.model.modules():
        if list(module.parameters(recurse=False)):
            factors: Any = module.fisher
            weight = torch.kron(factors.kron.B, factors.kron.A)
            made += [weight] if module.bias is None else [weight, torch.zeros(len(module.bias), len(module.bias))]
    return torch.block_diag(*made)


def blocks(task: Task, of: Callable[[nn.Module], Tensor]) -> Tensor:
    """[P, P] from a peer's matrix of every module, in the order of [outputs, inputs and the bias]."""
    made = []
    for module in task.model.modules():
        if not list(module.parameters(recurse=False)):
            continue
        block, o = of(module), module.weight.shape[0]  # type: ignore[union-attr]
        i = len(block) // o
        places = torch.arange(o * i).view(o, i)
        has_bias = getattr(module, "bias", None) is not None
        order = torch.cat([places[:, :-1].flatten(), places[:, -1]]) if has_bias else places.flatten()
        made.append(block[order][:, order])
    return torch.block_diag(*made)
