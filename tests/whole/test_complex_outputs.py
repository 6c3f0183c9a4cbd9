"""Models with complex outputs, whose loss is declared on the real and imaginary parts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import kfac_fx
from kfac_fx import LossError, LossScaleWarning, losses
from kfac_fx.compiled.jacobian_products import JacobianProducts
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.batch_loss import BatchLoss, ObservedForward

pytestmark = pytest.mark.usefixtures("float64")
N = 6


class Wave(nn.Module):
    """A complex number for every case, beside a real one."""

    def __init__(self, divided: bool = False) -> None:
        super().__init__()
        self.hidden, self.head, self.divided = nn.Linear(3, 4), nn.Linear(4, 3), divided

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.hidden(x))
        if self.divided and float(hidden.detach().sum()) < -1e9:
            hidden = -hidden
        y = self.head(hidden)
        return {"psi": torch.view_as_complex(y[:, :2].contiguous()), "energy": y[:, 2:]}


class Psi(Wave):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)["psi"]


def registered(outputs: dict[str, Tensor]) -> list[Any]:
    parts = torch.view_as_real(outputs["psi"])
    return [losses.Normal(parts, var=0.5), (0.3, losses.Normal(outputs["energy"], var=0.5))]


def trained(outputs: dict[str, Tensor]) -> Tensor:
    return (outputs["psi"] - 1j).abs().square().mean() + 0.3 * outputs["energy"].square().mean()


@pytest.mark.parametrize("divided", [False, True])
def test_the_fisher_has_all_outputs(divided: bool) -> None:
    model, x = Wave(divided), torch.randn(N, 3)
    net = kfac_fx.compile(model, (x,), loss=registered, approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(at: dict[str, Tensor]) -> Tensor:
        hidden = torch.tanh(functional_call(model.hidden, {k: at[f"hidden.{k}"] for k in ("weight", "bias")}, (x,)))
        y = functional_call(model.head, {k: at[f"head.{k}"] for k in ("weight", "bias")}, (hidden,))
        return y * torch.tensor([1.0, 1.0, 0.3]).sqrt()

    jacobians = jacrev(outputs)(parameters)
    for key, block in estimator.blocks.items():
        weight, bias = (jacobians[name] for name in key)
        rows = torch.cat([weight, bias.unsqueeze(-1)], dim=-1).reshape(N * 3, -1)
        torch.testing.assert_close(block.full_fisher_block(), 2 * rows.mT @ rows / N)


def test_scores_are_those_of_a_measurement_of_complex_outputs() -> None:
    model, x = Wave(), torch.randn(N, 3)
    net = kfac_fx.compile(model, (x,), loss=registered)
    spectrum = kfac_fx.fit_spectrum(net, [x], damping=0.1)

    def phase(outputs: dict[str, Tensor]) -> Tensor:
        return outputs["psi"].angle() * outputs["energy"][:, 0]

    scores = spectrum.self_scores(x, measurement=phase)
    for n in range(N):
        model.zero_grad()
        phase(model(x))[n].backward()
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        product = spectrum.multiply_inverse(gradient)
        torch.testing.assert_close(scores[n], sum((gradient[k] * product[k]).sum() for k in gradient))


def test_the_loss_of_a_step_is_known_from_its_gradient() -> None:
    model, x = Wave(), torch.randn(N, 3)
    net = kfac_fx.compile(model, (x,), loss=registered)
    outputs = net(x)
    forward = ObservedForward.of(net.recorder((x,), {}), (x,), {}, outputs)
    trained(outputs).backward()
    batch = BatchLoss(net, [forward], JacobianProducts(), 1.0, False, Replicas(), (), None)
    here = {name: p.detach() for name, p in net.named_parameters()}
    there = {name: p + 0.3 * torch.randn_like(p) for name, p in here.items()}
    expected = (trained(functional_call(model, there, (x,))) - trained(outputs)).detach()
    torch.testing.assert_close(batch.change(batch.at(here), batch.at(there)), expected)
    gradient = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    slope = sum((gradient[name] * there[name]).sum() for name in here)
    torch.testing.assert_close(batch.along(here, there)[1], slope)


def test_the_default_trains_without_a_warning() -> None:
    x = torch.randn(N, 3)
    net = kfac_fx.compile(Psi(), (x,), loss=lambda psi: losses.Normal(torch.view_as_real(psi)))
    optimizer, values = kfac_fx.KFAC(net), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (net(x) - 1j).abs().square().mean()
            loss.backward()
            optimizer.step()
            values.append(float(loss.detach()))
    assert values[-1] < 0.7 * values[0] and int(optimizer.skipped) == 0
    assert not [w for w in caught if issubclass(w.category, LossScaleWarning)]


@pytest.mark.parametrize("name", ["normal", "mse"])
def test_a_name_of_a_loss_does_not_say_what_it_is_of(name: str) -> None:
    x = torch.randn(N, 3)
    with pytest.raises(LossError, match=r"takes real tensors, and got a complex one: .*view_as_real\(outputs\)"):
        kfac_fx.compile(Psi(), (x,), loss=name)
