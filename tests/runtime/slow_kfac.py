"""K-FAC from the formulas, on dense matrices and flat vectors, for nets of linear layers: the oracle of the optimizer.

The library is used for the sampling of targets alone, which must draw the same numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from kfac_fx.losses import Categorical

Loss = Callable[[Tensor, Tensor], Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def batch(number: int, cases: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(cases, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (cases,), generator=generator)


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """A closure that returns the loss and nothing else."""
    return lambda: nn.functional.cross_entropy(net(x), y)


@dataclass
class SlowKFAC:
    """A classifier's optimizer; the vector of all parameters has, layer by layer, the rows of [weight | bias]."""

    model: nn.Sequential
    damping: float
    lr: float | None = None
    momentum: Any = 0.9
    momentum_type: str = "regular"
    cov_ema_decay: float = 0.95
    cov_update_every: int = 1
    invert_every: int = 10
    num_burnin_steps: int = 0
    norm_constraint: float | None = None
    norm_constraint_form: str = "update"
    weight_decay: float = 0.0
    adapt_damping: bool = False
    damping_adaptation_interval: int = 5
    damping_adaptation_decay: float = 0.95
    min_damping: float = 1e-8
    l2_reg: float = 0.0
    precon_damping_mult: float = 1.0
    qmodel_update_rescale: float | None = None
    seed: int = 0
    step_count: int = 0
    averages: dict[tuple[int, str], tuple[Tensor, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.layers: list[Any] = [layer for layer in self.model if isinstance(layer, nn.Linear)]
        self.generator = torch.Generator().manual_seed(self.seed)
        self.v = torch.zeros_like(self.theta())

    # --- flat vectors -----------------------------------------------------------------------------------------------

    def flat(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [torch.cat([of(layer.weight), of(layer.bias)[:, None]], dim=1).flatten() for layer in self.layers]
        return torch.cat(parts).detach().clone()

    def theta(self) -> Tensor:
        return self.flat(lambda parameter: parameter)

    def move(self, delta: Tensor) -> None:
        with torch.no_grad():
            for layer in self.layers:
                o, i = layer.weight.shape
                part, delta = delta[: o * (i + 1)].view(o, i + 1), delta[o * (i + 1) :]
                layer.weight += part[:, :-1]
                layer.bias += part[:, -1]

    # --- the Fisher -------------------------------------------------------------------------------------------------

    def record(self, x: Tensor) -> None:
        """A and G of every layer from one sample of targets a case."""
        inputs, outputs = [], []
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                inputs.append(torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1).detach())
            x = layer(x)
            if isinstance(layer, nn.Linear):
                outputs.append(x)
        targets = Categorical(x.detach()).sample(self.generator)
        loss = nn.functional.cross_entropy(x, targets, reduction="sum")
        for number, (a, d) in enumerate(zip(inputs, torch.autograd.grad(loss, outputs), strict=True)):
            self.average(number, "A", a.T @ a / len(a))
            self.average(number, "G", d.T @ d / len(d))

    def average(self, number: int, name: str, value: Tensor) -> None:
        decay = 1.0 if self.step_count < 0 else self.cov_ema_decay**self.cov_update_every
        total, weight = self.averages.get((number, name), (torch.zeros_like(value), 0.0))
        self.averages[number, name] = decay * total + value, decay * weight + 1.0

    def damped_fisher(self, damping: float) -> Tensor:
        blocks = []
        for number in range(len(self.layers)):
            a, g = (total / weight for total, weight in (self.averages[number, name] for name in ("A", "G")))
            pi = math.sqrt((a.trace() / len(a)) / (g.trace() / len(g)))
            a = a + pi * math.sqrt(damping) * torch.eye(len(a), dtype=a.dtype)
            g = g + math.sqrt(damping) / pi * torch.eye(len(g), dtype=g.dtype)
            blocks.append(torch.kron(g, a))
        fisher: Tensor = torch.block_diag(*blocks)
        return fisher

    def exact_fisher(self, x: Tensor) -> Tensor:
        """The Fisher of the mean over cases, from the Jacobian of all logits."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        jacobians = jacrev(lambda p: functional_call(self.model, p, (x,)))(parameters)
        columns = []
        for number, layer in enumerate(self.model):
            if isinstance(layer, nn.Linear):
                weight, bias = (jacobians[f"{number}.{role}"] for role in ("weight", "bias"))
                columns.append(torch.cat([weight, bias.unsqueeze(-1)], dim=-1).flatten(2))
        j = torch.cat(columns, dim=2)
        p = self.model(x).softmax(1).detach()
        h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        total: Tensor = torch.einsum("nki,nkl,nlj->ij", j, h, j)
        return total / len(x)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, loss_of: Loss, scale: float = 1.0) -> Tensor:
        """Returns the loss before the step. scale: of the learning rate, as by a scheduler."""
        k = self.step_count
        if self.num_burnin_steps > 0:
            self.step_count = -1
            self.record(x)
            self.step_count, self.num_burnin_steps, self.adapted = 0, self.num_burnin_steps - 1, False
            return loss_of(self.model(x), y).detach()
        if k % self.cov_update_every == 0:
            self.record(x)
        if k % self.invert_every == 0 or (k < self.invert_every and k in (1, 2, 5, 10, 20, 50)):
            self.inverse = self.damped_fisher(self.damping * self.precon_damping_mult).inverse()
        before = loss_of(self.model(x), y)
        self.model.zero_grad()
        before.backward()
        g = self.flat(lambda parameter: parameter.grad)  # type: ignore[arg-type, return-value]
        adapting = self.adapt_damping and (k + 1) % self.damping_adaptation_interval == 0
        theta = self.theta()
        if self.momentum_type.startswith("qmodel"):
            lr = scale * (1.0 if self.qmodel_update_rescale is None else self.qmodel_update_rescale)
            update = self.quadratic(g, x)
        else:
            assert self.lr is not None
            lr = scale * self.lr
            update = self.regular(g, lr) if self.momentum_type == "regular" else self.adam(g, lr)
        delta = -lr * (update + self.weight_decay * theta)
        self.adapted = adapting
        if adapting:
            if self.momentum_type.startswith("qmodel"):
                curvature = self.exact_fisher(x)
            else:
                damping = self.damping * self.precon_damping_mult
                curvature = self.damped_fisher(damping) - damping * torch.eye(len(g), dtype=g.dtype)
            curvature = curvature + self.l2_reg * torch.eye(len(g), dtype=g.dtype)
            self.predicted = (g @ delta + 0.5 * delta @ curvature @ delta).item()
        self.move(delta)
        if adapting:
            self.adapt(before.item(), loss_of(self.model(x), y).item())
        self.step_count += 1
        return before.detach()

    def regular(self, g: Tensor, lr: float) -> Tensor:
        u = self.inverse @ g
        self.v = self.momentum * self.v + self.kappa(g, u, lr) * u
        return self.bounded(self.v)

    def adam(self, g: Tensor, lr: float) -> Tensor:
        self.v = self.momentum * self.v + g
        u = self.inverse @ self.v
        return self.bounded(self.kappa(self.v, u, lr) * u)

    def bounded(self, update: Tensor) -> Tensor:
        if self.norm_constraint is None or self.norm_constraint_form == "gradient":
            return update
        fisher = self.damped_fisher(self.damping * self.precon_damping_mult)
        assert self.lr is not None
        return min(1.0, math.sqrt(self.norm_constraint / float(self.lr**2 * update @ fisher @ update))) * update

    def kappa(self, a: Tensor, u: Tensor, lr: float) -> float:
        if self.norm_constraint is None or self.norm_constraint_form == "update":
            return 1.0
        return min(1.0, math.sqrt(self.norm_constraint / float(lr**2 * a @ u)))

    def quadratic(self, g: Tensor, x: Tensor) -> Tensor:
        d = torch.stack([self.inverse @ g, -self.v])
        m = d @ (self.exact_fisher(x) + self.damping * torch.eye(len(g), dtype=g.dtype)) @ d.T
        c = d @ g
        if self.momentum_type == "qmodel_fixedmu":
            mu = self.momentum
            alpha = -(mu * m[0, 1] + c[0]) / m[0, 0]
        elif not self.v.any():
            alpha, mu = -c[0] / m[0, 0], 0.0
        else:
            alpha, mu = -torch.linalg.solve(m, c)
        self.v = mu * self.v - alpha * d[0]
        return self.v

    def adapt(self, before: float, after: float) -> None:
        omega = self.damping_adaptation_decay**self.damping_adaptation_interval
        self.rho = (after - before) / self.predicted
        if (after < before and self.predicted > 0) or self.rho > 0.75:
            self.damping *= omega
        elif self.rho < 0.25:
            self.damping /= omega
        self.damping = max(self.damping, self.min_damping + self.l2_reg)
