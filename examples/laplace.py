"""How sure is a network? The Laplace approximation of its posterior, with noise and prior chosen by the evidence.

With N cases, a Gaussian prior of precision δ and noise of variance σ² the posterior of the weights is about N(θ*, P⁻¹),
P = N F / σ² + δ I, and the output for an input x, to first order in the weights, about N(f(x), J P⁻¹ Jᵀ), J = ∂f(x)/∂θ
(MacKay 1992, "A practical Bayesian framework for backpropagation networks"; Immer, Korzepa & Bauer 2021, "Improving
predictions of Bayesian neural nets via local linearization"). One decomposition of F serves every σ² and δ.

A curve with a hole in its data; of last layer and whole network, by Kronecker products and by full blocks:

    python -m examples.laplace
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

NOISE = 0.2
WHERE = {"data": (-3.0, -1.0), "between": (-1.0, 1.0), "beyond": (3.0, 4.0)}
LAST = ("4.weight", "4.bias")
KINDS: dict[str, dict[str, Any]] = {
    "last layer": {"variables": LAST},
    "all layers": {},
    "all layers, full blocks": {"approximations": {"*": "full"}},
}


class Fit(NamedTuple):
    """errors: where, the mean of (y - f(x))² over the variance that was expected; 1 is calibrated."""

    noise: float
    prior: float
    errors: dict[str, float]


def curve(x: Tensor) -> Tensor:
    """With noise."""
    return torch.sin(2 * x) + 0.3 * x + NOISE * torch.randn_like(x)


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        (F.mse_loss(model(x), y) + NOISE**2 * penalty / len(x)).backward()
        optimizer.step()
    return model


def fisher(model: nn.Module, x: Tensor, approximations: Any = None, variables: Any = None) -> kfac_fx.ModelSpectrum:
    """F of a noise of variance 1; every case counts alike, whatever its batch."""
    unit = lambda outputs: kfac_fx.losses.Normal(outputs, var=1.0)  # noqa: E731
    net = kfac_fx.compile(model, loss=unit, approximations=approximations, strict=True)
    estimator = kfac_fx.FisherEstimator(net, variables=variables, estimation_mode="exact")
    for part in x.split(64):
        estimator.update_covariances(part, fold=False)
    estimator.fold()
    return estimator.spectrum()


def posterior(spectrum: kfac_fx.ModelSpectrum, theta: dict[str, Tensor], residuals: Tensor, steps: int = 100) -> Any:
    """(P, σ, δ) of the largest evidence, that is of the smallest

    N/2 log σ² + |y - f|² / 2σ² + δ/2 |θ*|² - K/2 log δ + ½ log det P    with K parameters
    """
    n, k = residuals.numel(), sum(p.numel() for p in theta.values())
    error, norm = residuals.square().sum(), torch.stack([p.square().sum() for p in theta.values()]).sum()
    logs = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        variance, prior = logs.exp()
        determinant = spectrum.at(scale=n / variance, damping=prior).log_determinant()
        (n * logs[0] + error / variance + prior * norm - k * logs[1] + determinant).backward()
        optimizer.step()
    variance, prior = logs.exp().tolist()
    return spectrum.at(scale=n / variance, damping=prior), math.sqrt(variance), prior


def main(steps: int = 1500) -> dict[str, Fit]:
    torch.manual_seed(0)
    x = torch.cat([torch.rand(75, 1) * 2 - 3, torch.rand(75, 1) * 2 + 1])
    y = curve(x)
    model = trained(x, y, steps)
    tests = {name: torch.linspace(*ends, 500).unsqueeze(-1) for name, ends in WHERE.items()}
    values = {name: curve(test) for name, test in tests.items()}
    found = {"noise alone": Fit(NOISE, math.inf, {})}  # as of a posterior without variance
    for name, options in KINDS.items():
        spectrum = fisher(model, x, **options)
        theta = {key: p.detach() for key, p in model.named_parameters() if key in spectrum.shapes}
        precision, noise, prior = posterior(spectrum, theta, (y - model(x)).detach())
        found[name] = Fit(noise, prior, {})
        for where, test in tests.items():
            with torch.no_grad():
                errors, variance = (
                    (values[where] - model(test)).square(),
                    precision.functional_variance(test).flatten(1),
                )
            found[name].errors[where] = (errors / (variance + noise**2)).mean().item()
            found["noise alone"].errors[where] = errors.mean().item() / NOISE**2
    print(f"squared errors over expected variances{'':<4}" + "".join(f"{where:>9}" for where in WHERE))
    for name, (noise, prior, method_results) in found.items():
        print(
            f"{name:<24}σ {noise:.2f} δ {prior:4.2f}  " + "".join(f"{value:9.2f}" for value in method_results.values())
        )
    return found


if __name__ == "__main__":
    main()
