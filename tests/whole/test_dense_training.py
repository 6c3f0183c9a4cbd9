"""Trainings with all pairs of options, on layers of many kinds, are those of the formulas with dense matrices.

The reference knows nothing of graphs, rows, factors or stacks. It has one matrix for every block, the mean over single
cases of Jᵀ F J or of g gᵀ by autograd, and inverts it. So it is exact where blocks are "full" or "diagonal".
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

import kfac_fx
from kfac_fx.optim.rules.eigen_moments import RATE
from tests.runtime.multiplier import Multiplier

pytestmark = pytest.mark.usefixtures("float64")
STEPS, CASES, CLASSES, DAMPING, DECAY = 6, 6, 3, 0.1, 0.9


# --- models ---------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer of two uses, and a parameter that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.frozen = nn.Linear(3, 3), nn.Linear(3, CLASSES), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(torch.tanh(self.frozen(self.first(x))))))
        return y


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(4, 3), nn.Parameter(torch.randn(2, 3)), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.words((5 * x[:, :2]).long() % 4) + self.places).mean(1))
        return y


class Attention(nn.Module):
    """Over three positions with one number each, and the table of their places."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Parameter(torch.randn(3, 2)), nn.Linear(2, CLASSES)
        self.key, self.query, self.gain = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., None] + self.places
        weights = (self.query(y) @ self.key(y).mT).softmax(-1)
        z: Tensor = self.head((weights @ y).mean(1) * self.gain)
        return z


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x[..., None])[0][:, -1])
        return y


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1, groups=2), nn.GroupNorm(2, 4),
        nn.Tanh(), nn.Flatten(2), nn.Conv1d(4, 2, 4, stride=5), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, CLASSES, bias=False), nn.RMSNorm(CLASSES)
    )


VALUES: dict[str, tuple[Any, ...]] = {
    "model": (Twice, Text, Attention, Recurrent, convolutions, norms),
    "momentum_type": ("regular", "adam", "qmodel", "eigen_moments"),
    "blocks": ("full", "diagonal"),
    "estimation_mode": ("exact", "empirical"),
    "constraint": (None, "update", "gradient"),
    "weight_decay": (0.0, 0.1),
    "cov_update_every": (1, 2),
    "invert_every": (1, 3),
    "momentum": (0.9, 0.0),
    "groups": (False, True),  # with learning rates of their own
    "halves": (False, True),  # micro-batches
    "restarted": (None, 1, 4),  # the step before which everything is saved and loaded
    "bad": (None, 0, 3),  # the step whose gradient is not finite
    "num_burnin_steps": (0, 2),
    "processes": (None, "owners", "shards", "shards of owners"),  # a group of one
}


def sensible(chosen: dict[str, Any]) -> dict[str, Any]:
    """Without what does not fit together, or is not unique: the eigenvectors of a null space, and the second moments
    in their basis."""
    kind = chosen["momentum_type"]
    chosen = chosen | ({"constraint": None} if kind in ("qmodel", "eigen_moments") else {})
    chosen = chosen | ({"blocks": "diagonal"} if kind == "eigen_moments" else {})
    chosen = chosen | ({"momentum": None, "groups": False} if kind == "qmodel" else {})
    return chosen | ({"restarted": None} if str(chosen["processes"]).startswith("shards") else {})


def covering() -> list[dict[str, Any]]:
    """Combinations with almost every pair of values of two options that may go together, chosen greedily."""

    def pairs(chosen: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(chosen.items(), 2))

    draw, rows, covered = random.Random(0), list[dict[str, Any]](), set[Any]()
    while True:
        tried = [sensible({name: draw.choice(values) for name, values in VALUES.items()}) for _ in range(300)]
        best = max(tried, key=lambda chosen: len(pairs(chosen) - covered))
        if len(new := pairs(best) - covered) < 2:
            return rows
        rows.append(best)
        covered |= new


# --- the reference --------------------------------------------------------------------------------------------------


class Dense:
    """An optimizer of flat vectors of all trained parameters, in the order of their blocks."""

    def __init__(self, model: nn.Module, blocks: list[tuple[str, ...]], chosen: dict[str, Any]) -> None:
        self.model, self.chosen = model, chosen
        named = dict(self.model.named_parameters())
        self.parameters = {name: named[name] for block in blocks for name in block}
        self.sizes = [sum(named[name].numel() for name in block) for block in blocks]
        self.k = -chosen["num_burnin_steps"]
        self.total, self.weight, self.t = torch.zeros(()), 0.0, 0
        self.velocity = self.squares = torch.zeros(sum(self.sizes))
        self.lr = torch.cat([torch.full((p.numel(),), lr_of(name, chosen)) for name, p in self.parameters.items()])
        self.multiplier, self.last = Multiplier(), torch.zeros_like(self.lr)

    def flat(self, tensors: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        return torch.cat([tensors[name].detach().flatten(lead) for name in self.parameters], -1)

    def fisher(self, x: Tensor, y: Tensor, mode: str) -> Tensor:
        """The mean over cases, of all parameters."""
        values = {name: p.detach() for name, p in self.parameters.items()}
        products = []
        for case, target in zip(x.split(1), y.split(1), strict=True):

            def outputs(at: dict[str, Tensor], case: Tensor = case) -> Tensor:
                return functional_call(self.model, at, (case,))[0]

            if mode == "exact":
                rows, p = self.flat(jacrev(outputs)(values), 1), outputs(values).detach().softmax(0)
                products.append(rows.mT @ (p.diag() - p.outer(p)) @ rows)
            else:
                rows = self.flat(grad(lambda at, y=target, f=outputs: F.cross_entropy(f(at)[None], y))(values))
                products.append(rows.outer(rows))
        return torch.stack(products).mean(0)

    def of_blocks(self, matrix: Tensor) -> Tensor:
        """The blocks of a matrix, or its diagonal."""
        if self.chosen["blocks"] == "diagonal":
            return matrix.diag().diag()
        ends = list(itertools.accumulate(self.sizes))
        return torch.block_diag(
            *(matrix[end - n : end, end - n : end] for end, n in zip(ends, self.sizes, strict=True))
        )

    def step(self, x: Tensor, y: Tensor, finite: bool) -> None:
        """finite: whether the gradient is. If not, the batch is in no average, and a first step is not counted."""
        chosen, k = self.chosen, self.k
        burning = k < 0
        self.k += finite or k > 0
        early = k == 1 and chosen["momentum_type"] == "eigen_moments"  # as its first bases
        if finite and (burning or early or k % chosen["cov_update_every"] == 0):
            decay = 1.0 if burning else DECAY ** chosen["cov_update_every"]
            recorded = self.of_blocks(self.fisher(x, y, chosen["estimation_mode"]))
            self.total, self.weight = decay * self.total + recorded, decay * self.weight + 1
        if burning or self.k == 0:
            return
        damped = self.total / self.weight + DAMPING * torch.eye(len(self.lr))
        if k % chosen["invert_every"] == 0 or k in (1, 2):
            self.inverse, self.eigenvalues = damped.inverse(), (self.total / self.weight).diag()
        loss = F.cross_entropy(self.model(x), y)
        g = self.flat(dict(zip(self.parameters, torch.autograd.grad(loss, [*self.parameters.values()]), strict=True)))
        if finite:
            update, decay = self.update(g, damped, x, y), chosen["weight_decay"] * self.flat(self.parameters)
            if chosen["momentum_type"] != "eigen_moments":
                self.move(self.lr * (update + decay))
                return
            self.multiplier.grow(g, self.last, 0.5)
            self.last = self.lr * (update + decay)
            self.checked_move(RATE * self.multiplier.value * self.lr * (update + decay), g, loss, x, y)

    def move(self, delta: Tensor) -> None:
        with torch.no_grad():
            parameters = list(self.parameters.values())
            for p, part in zip(parameters, delta.split([p.numel() for p in parameters]), strict=True):
                p.sub_(part.view_as(p))

    def update(self, g: Tensor, damped: Tensor, x: Tensor, y: Tensor) -> Tensor:
        chosen, mu, lr = self.chosen, self.chosen["momentum"], self.lr
        match chosen["momentum_type"]:
            case "regular":
                u = self.inverse @ g
                self.velocity = mu * self.velocity + self.kappa(lr * g, lr * u) * u
                return self.bounded(self.velocity, damped)
            case "adam":
                self.velocity = mu * self.velocity + g
                u = self.inverse @ self.velocity
                return self.bounded(self.kappa(lr * self.velocity, lr * u) * u, damped)
            case "qmodel":
                d = torch.stack([self.inverse @ g, self.velocity])
                m = d @ (self.fisher(x, y, "exact") + DAMPING * torch.eye(len(g))) @ d.T
                alpha, mu = torch.linalg.lstsq(m, d @ g).solution if self.t else (d[0] @ g / m[0, 0], 0.0)
                self.velocity, self.t = alpha * d[0] + mu * self.velocity, 1
                return self.velocity
        self.t += 1
        self.velocity, self.squares = mu * self.velocity + (1 - mu) * g, 0.95 * self.squares + 0.05 * g.square()
        mean, square = self.velocity / (1 - mu**self.t), self.squares / (1 - 0.95**self.t)
        n, root = mu * mean + (1 - mu) * g, square.sqrt() + 1e-8
        parts, damping = (
            (v.split(self.sizes) for v in (n, root, self.eigenvalues)),
            max(0.003, self.chosen["weight_decay"]),
        )
        return torch.cat([between_adam_and_kfac(*of_block, damping) for of_block in zip(*parts, strict=True)])

    def checked_move(self, delta: Tensor, g: Tensor, loss: Tensor, x: Tensor, y: Tensor) -> None:
        """Far below the bound, with checks after 0, 1, 2 and 5 steps."""
        if self.k - 1 not in (0, 1, 2, 5):
            self.move(delta)
            return
        fisher = self.fisher(x, y, "exact")
        rho, here = math.sqrt(float(delta @ fisher @ delta) / 1e30) / 0.5, [*map(torch.clone, self.parameters.values())]
        if self.k == 1:
            delta = self.multiplier.first(rho) * delta
        else:
            at = dict(zip(self.parameters, self.at_last, strict=True))
            fall = F.cross_entropy(functional_call(self.model, at, (x,)), y).item() - loss.item()
            self.multiplier.arrived(fall, self.k - 1 - self.last_check)
            best = float(g @ delta) / float(delta @ fisher @ delta)
            delta = self.multiplier.later(rho, best, 0.5) * delta
        self.last_check, self.at_last = self.k - 1, here
        self.move(delta)
        change = F.cross_entropy(self.model(x), y).item() - loss.item()
        self.multiplier.checked(change, float(0.5 * delta @ fisher @ delta - g @ delta))

    def kappa(self, a: Tensor, u: Tensor) -> float:
        return min(1.0, math.sqrt(1e-3 / float(a @ u))) if self.chosen["constraint"] == "gradient" else 1.0

    def bounded(self, update: Tensor, damped: Tensor) -> Tensor:
        if self.chosen["constraint"] != "update":
            return update
        step = self.lr * update
        return min(1.0, math.sqrt(1e-3 / float(step @ damped @ step))) * update


def between_adam_and_kfac(n: Tensor, root: Tensor, eigenvalues: Tensor, part: float) -> Tensor:
    """The step of a block with a diagonal F: as long as Adam's, n / root."""
    mean = eigenvalues.mean()
    damped = eigenvalues + torch.where(mean > 0, part * mean, 1.0)
    direction = n / (root * damped).sqrt()
    return direction * (n / root).norm() / direction.norm().clamp(min=1e-300)


# --- the trainings --------------------------------------------------------------------------------------------------


def lr_of(name: str, chosen: dict[str, Any]) -> float:
    return 1.0 if chosen["momentum_type"] == "qmodel" else 0.2 if chosen["groups"] and name.endswith("weight") else 0.5


def made(model: nn.Module, x: Tensor, chosen: dict[str, Any]) -> tuple[kfac_fx.CompiledModule, kfac_fx.KFAC]:
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"*": chosen["blocks"]})
    if str(chosen["processes"]).startswith("shards"):
        fully_shard(net.model, mesh=init_device_mesh("cpu", (1,)))
    names = "momentum_type estimation_mode weight_decay cov_update_every invert_every momentum num_burnin_steps"
    options = {name: chosen[name] for name in names.split()} | {"cov_ema_decay": DECAY, "lr": 0.5, "seed": 0}
    options |= {"placement": "owners"} if str(chosen["processes"]).endswith("owners") else {}
    match chosen["momentum_type"]:
        case "eigen_moments":
            options |= {"norm_constraint": 1e30, "damping_adaptation_interval": 100}
        case kind:
            options |= {"damping": DAMPING} | ({"lr": None} if kind == "qmodel" else {})
    if chosen["constraint"] is not None:
        options |= {"norm_constraint": 1e-3, "norm_constraint_form": chosen["constraint"]}
    if chosen["groups"]:
        by_lr = itertools.groupby(
            sorted(net.named_parameters(), key=lambda named: lr_of(named[0], chosen)),
            lambda named: lr_of(named[0], chosen),
        )
        options["params"] = [{"params": [p for _, p in named], "lr": lr} for lr, named in by_lr]
    return net, kfac_fx.KFAC(net, **options)


@pytest.fixture
def processes(chosen: dict[str, Any]) -> Iterator[None]:
    if chosen["processes"] is None:
        yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield torch.randn(CASES, 3, generator=generator), torch.randint(CLASSES, (CASES,), generator=generator)


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")  # of gradients that are infinite
@pytest.mark.parametrize(
    "chosen",
    [pytest.param(chosen, marks=pytest.mark.slow if n >= 11 else ()) for n, chosen in enumerate(covering())],
    ids=lambda c: "-".join(getattr(v, "__name__", str(v)) for v in c.values()),
)
def test_training_is_that_of_the_formulas(chosen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = chosen["model"]()
    twin = copy.deepcopy(model)
    burnin, data = chosen["num_burnin_steps"], list(batches(STEPS + chosen["num_burnin_steps"]))
    net, opt = made(model, data[0][0], chosen)
    assert {registration.approximation for registration in net.registrations} == {chosen["blocks"]}, net.report
    dense = Dense(twin, [registration.parameters for registration in net.registrations], chosen)
    for number, (x, y) in enumerate(data, -burnin):
        if number == chosen["restarted"]:
            states = copy.deepcopy((net.state_dict(), opt.state_dict()))
            net, opt = made(chosen["model"](), x, chosen)
            net.load_state_dict(states[0])
            opt.load_state_dict(states[1])
        opt.zero_grad()
        parts = 2 if chosen["halves"] else 1
        for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(net(part), targets) / parts).backward()
        if number == chosen["bad"]:
            next(p for p in net.parameters() if p.requires_grad).grad.mul_(torch.inf)  # type: ignore[union-attr]
        opt.step()
        dense.step(x, y, number != chosen["bad"])
        found = {name: whole(p) for name, p in net.named_parameters() if p.requires_grad}
        expected = {name: dense.parameters[name].detach() for name in found}
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=lambda text: f"step {number}: {text}")  # noqa: B023
