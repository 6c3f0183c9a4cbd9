"""The momentum type "adaptive": against the formulas, its guards, and its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from kfac_fx.compiler import compile
from kfac_fx.optim.adaptive import GROWTH, LEAST_STEP
from kfac_fx.optimizer import KFAC
from tests.runtime.slow_kfac import batch, mlp


def made(**options: Any) -> tuple[Any, KFAC]:
    net = compile(mlp(), loss="categorical")
    return net, KFAC(
        net, **{"seed": 0, "damping_adaptation_interval": 4, "cov_update_every": 10, "invert_every": 20, **options}
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
            alpha *= min(1.0, GROWTH * math.sqrt(norm / (alpha**2 * slope)))
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


def test_a_loss_that_has_risen_since_the_last_check_is_undone() -> None:
    net, opt = made()
    for number in range(6):
        step(net, opt, number)
    checkpoint = torch.cat([opt.state[p]["checkpoint"].flatten() for p in net.parameters()])
    damping, size = opt.damping.clone(), opt._step_state.size
    ratio = size.ratio.clone()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(30)
    for number in (6, 7):
        step(net, opt, number)
    assert not torch.equal(theta(net), checkpoint)
    skipped = opt.skipped.item()
    step(net, opt, 8)  # a check
    torch.testing.assert_close(theta(net), checkpoint, rtol=0, atol=0)
    assert opt.skipped.item() == skipped + 1 and size.weight == 0 and size.ratio >= 2 * ratio
    torch.testing.assert_close(opt.damping, damping * 0.9**-8)
    assert not any(opt.state[p]["velocity"].any() for p in net.parameters())
    step(net, opt, 9)
    assert theta(net).isfinite().all() and not torch.equal(theta(net), checkpoint)


@pytest.mark.parametrize(("loss_there", "factor", "undone"), [(0.03, 4, 0), (0.03, 12, 1), (0.3, 4, 1), (3.0, 1.6, 1)])
def test_a_rise_of_the_loss_of_the_same_batch_is_undone_from_a_half_or_ninefold(
    loss_there: float, factor: float, undone: int
) -> None:
    """Without noise a small loss goes up and down on its way."""
    x, y = torch.eye(3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    net = compile(model, loss="normal")
    opt = KFAC(net, lr=1e-6, damping_adaptation_interval=4)
    with torch.no_grad():
        model.weight.copy_(torch.full((2, 3), math.sqrt(loss_there / 2)))
        model.bias.zero_()
    for number in range(9):
        opt.zero_grad()
        (net(x) - y).square().sum(1).mean().backward()
        if number == 7:
            skipped = opt.skipped.item()
            with torch.no_grad():
                model.weight.mul_(math.sqrt(factor))
                model.bias.mul_(math.sqrt(factor))
        opt.step()  # the ninth is a check
    assert opt.skipped.item() - skipped == undone


def test_parameters_that_are_not_finite_are_undone_at_the_next_check() -> None:
    net, opt = made()
    for number in range(6):
        step(net, opt, number)
    with torch.no_grad():
        next(net.parameters())[0, 0] = torch.nan
    for number in range(6, 9):
        step(net, opt, number)
    assert theta(net).isfinite().all()


def test_a_loss_that_is_too_large_for_a_number_is_undone_at_the_next_check() -> None:
    """The outputs and the gradient are finite, the change of the loss is not."""
    net = compile(nn.Linear(3, 1), loss="mse")
    opt = KFAC(net, seed=0, damping_adaptation_interval=4)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for number in range(9):  # checks in steps 4 and 8
        if number == 8:
            checkpoint = opt.state[net.model.weight]["checkpoint"].clone()
            with torch.no_grad():
                net.model.weight.mul_(1e25)
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
    torch.testing.assert_close(net.model.weight.detach(), checkpoint, rtol=0, atol=0)


def test_a_check_whose_gradient_is_not_finite_leaves_everything_as_it_was() -> None:
    net, opt = made()
    for number in range(8):
        step(net, opt, number)
    x, y = batch(8)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    next(net.parameters()).grad[0, 0] = torch.inf
    before = [p.clone() for p in net.parameters()], [opt.state[p]["velocity"].clone() for p in net.parameters()]
    skipped = opt.skipped.item()
    opt.step()  # the parameters of the last check are those of step 4
    after = list(net.parameters()), [opt.state[p]["velocity"] for p in net.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert opt.skipped.item() == skipped + 1


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
    torch.testing.assert_close(opt._step_state.size.ratio.double(), 2 * ratio, rtol=1e-6, atol=0)


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
    assert 1 / opt._step_state.size.ratio < LEAST_STEP
    assert opt.rho > 0.75 if lr == 1.0 else (opt.rho < 0 and opt.predicted_change > 0)
    assert opt.skipped == 0 and opt.damping == 1e-4


def test_it_resumes_bit_for_bit() -> None:
    net, opt = made()
    for number in range(7):
        step(net, opt, number)
    state, parameters = opt.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    state = torch.load(save(state), weights_only=True)
    expected = [step(net, opt, number).item() for number in range(7, 18)]
    other, resumed = made()
    other.load_state_dict(parameters)
    resumed.load_state_dict(state)
    assert [step(other, resumed, number).item() for number in range(7, 18)] == expected
    assert torch.equal(theta(other), theta(net))


def save(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_check_without_a_forward_says_what_is_missing() -> None:
    net, opt = made()
    x, y = batch(0)
    step(net, opt, 0)
    opt.zero_grad()
    F.cross_entropy(net.model(x), y).backward()
    with pytest.raises(RuntimeError, match="momentum_type='adaptive' checks its step size with the step's batch"):
        opt.step()


def test_a_forward_that_measures_the_accuracy_is_not_checked() -> None:
    (net, opt), (other, same) = made(), made()
    for number in range(4):
        step(other, same, number)
        step(net, opt, number)
    step(other, same, 4)
    x, y = batch(4)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    net(3 * x)
    opt.step()
    torch.testing.assert_close((opt.rho, theta(net)), (same.rho, theta(other)), rtol=0, atol=0)


def test_without_gradients_of_the_outputs_it_trains_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = made()
    step(net, opt, 0)
    assert not any("the checks of the step size" in line for line in opt.fallbacks())
    monkeypatch.setattr("kfac_fx.optim.batch_loss.hooked_leaves", lambda recorder, leaves: ([], False))
    first, *_, last = [step(net, opt, 1).item() for _ in range(20)]
    assert last < first and opt.damping < 1 and opt.rho.isfinite()
    assert "the checks of the step size take the loss as linear" in str(net.report)
