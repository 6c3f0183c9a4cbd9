"""The momentum type "adaptive": against the formulas, its guards, and its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules.adaptive import LEAST_STEP, NORM_GROWTH
from tests.runtime.slow_kfac import batch, mlp


def made(**options: Any) -> tuple[Any, KFAC]:
    net = compile(mlp(), loss="categorical")
    return net, KFAC(
        net,
        momentum_type="adaptive",
        **{"seed": 0, "damping_adaptation_interval": 4, "cov_update_every": 10, "invert_every": 20, **options},
    )


def step(net: Any, opt: KFAC, number: int) -> Tensor:
    x, y = batch(number)
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def theta(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def parts(net: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    sizes = [p.numel() for p in net.parameters()]
    return {
        name: part.view(p.shape) for (name, p), part in zip(net.named_parameters(), vector.split(sizes), strict=True)
    }


def fisher(net: nn.Module, at: Tensor, x: Tensor) -> Tensor:
    """The exact Fisher of a classifier, dense."""

    def outputs(vector: Tensor) -> Tensor:
        return functional_call(net, parts(net, vector), (x,))

    jacobian, p = jacrev(outputs)(at), outputs(at).softmax(-1)
    middle = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("nop,nor,nrq->pq", jacobian, middle, jacobian) / len(x)


@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"damping": 1e-3, "momentum": 0.5}, {"weight_decay": 0.1}])
def test_steps_are_those_of_the_formulas(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    beta, lr, damping = options.get("momentum", 0.9), options.get("lr", 1.0), options.get("damping", 1.0)
    velocity, weight, ratio, norm, last = torch.zeros_like(theta(net)), 0.0, 0.0, math.inf, 0
    for number in range(14):
        x, y = batch(number)
        at = theta(net)

        def loss(vector: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(functional_call(net.model, parts(net, vector), (x,)), y)

        step(net, opt, number)
        g = torch.func.grad(loss)(at)
        velocity, weight = beta * velocity + (1 - beta) * g, beta * weight + (1 - beta)
        m = velocity / weight
        product = opt.estimator.multiply_inverse(parts(net, m))
        d = torch.cat([product[name].flatten() for name, _ in net.named_parameters()])
        slope = m @ d
        if number < 3 or number % 4 == 0:
            f = fisher(net.model, at, x)
            now = (d @ f @ d + damping * d @ d) / slope
            ratio = max(now, math.sqrt(ratio * now))
            alpha = min(1.0, 1 / ratio)
            alpha *= min(1.0, math.sqrt(max(1.0, loss(at).item()) / (alpha**2 * (d @ f @ d))))
            norm = alpha**2 * slope
        else:
            alpha = min(1.0, 1 / ratio)
            alpha *= min(1.0, NORM_GROWTH * math.sqrt(norm / (alpha**2 * slope)))
        move = -lr * (alpha * d + options.get("weight_decay", 0.0) * at)
        torch.testing.assert_close(theta(net), at + move)
        if number < 3 or number % 4 == 0:
            predicted, change = g @ move + 0.5 * move @ f @ move, loss(at + move) - loss(at)
            rho = change / predicted
            torch.testing.assert_close(opt.rho, rho)
            torch.testing.assert_close(opt.predicted_change, predicted)
            steps, last = max(1, number - last), number
            fell = change < 0 if predicted >= 0 else rho > 0.75
            if fell and 1 / ratio > LEAST_STEP:
                damping *= 0.9**steps
            elif not fell and rho < 0.25:
                damping /= 0.9**steps
            assert opt.damping.item() == pytest.approx(damping)


def test_a_step_that_makes_the_loss_rise_is_undone_at_once() -> None:
    """The quadratic model cannot know a network whose outputs explode behind the tangent."""

    class Cliff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y + 1e6 * F.relu(y - y.detach().mean() * 0 - 0.5) ** 3

    model = Cliff()
    nn.init.zeros_(model.linear.weight)
    net = compile(model, loss="normal")
    opt = KFAC(net, damping=1e-6)
    x = torch.eye(2, dtype=torch.float64)
    loss = (net(x) - 10.0).square().sum(1).mean()
    loss.backward()
    opt.step()
    assert torch.equal(model.linear.weight, torch.zeros(1, 2, dtype=torch.float64))
    assert opt.damping > 1e-6 and opt.skipped == 1 and opt.rho < 0
    g = model.linear.weight.grad
    assert g is not None
    d = opt.estimator.multiply_inverse({"linear.weight": g})["linear.weight"]
    ratio = (1 + 1e-6) * d.square().sum() / (g * d).sum()  # the Fisher of these two cases is I
    torch.testing.assert_close(opt._step_state.checks.size.ratio.double(), 2 * ratio, rtol=1e-6, atol=0)


class Committee(nn.Module):
    """The mean of many layers: the blocks miss their correlation, so the best step is far below 1."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(3, 2, bias=False).double() for _ in range(40))
        for member in self.members:
            nn.init.zeros_(member.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).sum(0)


@pytest.mark.parametrize("lr", [1.0, 3.0])
def test_damping_does_not_fall_where_the_step_is_short_already(lr: float) -> None:
    """With lr=3 the model predicts a rise and the loss falls, which is no reason for more damping either."""
    net = compile(Committee(), loss="categorical")
    opt = KFAC(net, lr=lr, damping=1e-4, momentum_type="adaptive", estimation_mode="exact")
    x = torch.eye(3, dtype=torch.float64)[torch.arange(12) % 2]
    F.cross_entropy(net(x), torch.arange(12) % 2).backward()
    opt.step()
    assert 1 / opt._step_state.checks.size.ratio < LEAST_STEP
    assert opt.rho > 0.75 if lr == 1.0 else (opt.rho < 0 and opt.predicted_change > 0)
    assert opt.skipped == 0 and opt.damping == 1e-4


class Curved(nn.Module):
    """A linear layer that begins at zero, and a curve of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.curve(self.linear(x))

    def curve(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Edge(Curved):
    """Outputs that are no numbers a little further on."""

    def curve(self, y: Tensor) -> Tensor:
        return torch.where(y > 1e-4, torch.nan, y)


@pytest.mark.parametrize("kind", ["adaptive", "eigen_moments"])
def test_a_step_to_where_the_loss_is_no_number_is_undone_at_once(kind: str) -> None:
    model = Edge()
    net = compile(model, loss="normal")
    opt = KFAC(net, momentum_type=kind, **({"damping": 1.0} if kind == "adaptive" else {}))
    (net(torch.eye(2, dtype=torch.float64)) - 10.0).square().sum(1).mean().backward()
    opt.step()
    assert not model.linear.weight.any() and opt.skipped == 1


def test_the_step_to_the_minimum_of_a_small_loss_is_taken_whole() -> None:
    """Its squared Fisher norm, twice the loss, is bounded by one and not by the loss."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    net = compile(model, loss="normal")
    opt = KFAC(net, momentum_type="adaptive", damping=1e-9, estimation_mode="exact")
    (net(torch.ones(4, 1, dtype=torch.float64)) - 0.1).square().mean().backward()
    opt.step()
    assert model.weight.item() == pytest.approx(0.1, rel=1e-3)
