"""Variational Monte Carlo: two electrons in a harmonic trap, whose ground state has an energy of exactly 2.

Hooke's atom (Taut 1993): H = Σ (-Δ/2 + ω² r²/2) + 1/|r₁ - r₂| with ω = 1/2. A network gives log ψ; Metropolis walkers
x ~ ψ² are the batch. The energy's gradient is a covariance, 2 Cov(E_loc, ∇ log ψ), so that the mean of
2 (E_loc - E) log ψ over the walkers, with E_loc a constant, has it: that is the loss.

The Fisher is that of the wave function's own distribution p = ψ² / Z, F = 4 Cov(∇ log ψ). It is the Fisher of a normal
distribution of variance 1 around 2 (log ψ - its mean over the walkers), whatever the targets are: so it is registered.
The mean takes the place of log Z, and mixes the cases, which the sampled "gradients" mode is right with.

    python -m examples.vmc

With the default sizes, from an energy of 2.10 and a deviation of 0.48; after 20 steps the deviation is 0.07 with K-FAC
and 0.10 with Adam:

    K-FAC  energy 1.99998 ± 0.00026  (exact: 2)  deviation 0.0372
    Adam   energy 1.99953 ± 0.00030  (exact: 2)  deviation 0.0425
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

import kfac_fx

OMEGA, EXACT = 0.5, 2.0


class LogPsi(nn.Module):
    """log |ψ|, symmetric in the two electrons: one network is applied to both, another to the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.both = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:  # [N, 2, 3] -> [N, 1]
        squares = x.square().sum(-1, keepdim=True)  # [N, 2, 1]
        apart = (x[:, :1] - x[:, 1:]).square().sum(-1, keepdim=True).sqrt().expand(-1, 2, 1)
        inner = (x[:, :1] * x[:, 1:]).sum(-1, keepdim=True).expand(-1, 2, 1)
        features = self.each(torch.cat([squares, inner, apart], -1))
        log_psi: Tensor = self.both(features.sum(1)) - OMEGA / 2 * squares.sum(1)
        return log_psi


def local_energy(model: nn.Module, x: Tensor) -> Tensor:
    """H ψ / ψ at every walker: [N]. Its variance is zero in an eigenstate."""

    def log_psi(place: Tensor) -> Tensor:
        return model(place.view(1, 2, 3)).squeeze()  # type: ignore[no-any-return]

    places = x.flatten(1)
    kinetic = -0.5 * vmap(lambda place: hessian(log_psi)(place).trace() + grad(log_psi)(place).square().sum())(places)
    potential = OMEGA**2 / 2 * places.square().sum(1) + 1 / (x[:, 0] - x[:, 1]).norm(dim=1)
    return (kinetic + potential).detach()


@torch.no_grad()
def moved(model: nn.Module, x: Tensor, moves: int) -> Tensor:
    """The walkers after Metropolis moves, whose distribution stays ψ²."""
    log_psi = model(x)
    for _ in range(moves):
        proposed = x + 0.8 * torch.randn_like(x)
        new = model(proposed)
        accepted = torch.rand_like(new).log() < 2 * (new - log_psi)
        x, log_psi = torch.where(accepted.unsqueeze(-1), proposed, x), torch.where(accepted, new, log_psi)
    return x


@dataclass(frozen=True)
class Result:
    """energy, its standard error, and the standard deviation of the local energy, with the final parameters."""

    name: str
    energy: float
    error: float
    deviation: float
    seconds: float

    def __str__(self) -> str:
        found = f"energy {self.energy:.5f} ± {self.error:.5f}  (exact: {EXACT:g})"
        return f"{self.name:6} {found}  deviation {self.deviation:.4f}  {self.seconds:4.0f} s"


def optimized(name: str, steps: int, width: int, walkers: int) -> Result:
    torch.manual_seed(0)
    model = LogPsi(width).double()
    x = moved(model, torch.randn(walkers, 2, 3, dtype=torch.float64), 100)
    net: nn.Module = model
    optimizer: torch.optim.Optimizer
    if name == "K-FAC":
        net = kfac_fx.compile(
            model, (x,), loss=lambda out: kfac_fx.losses.Normal(2 * (out - out.mean()), var=1.0), strict=True
        )
        print(net.report, "\n")
        # As in FermiNet (Pfau et al. 2020): inverses at every step, no momentum, and no step far from the distribution
        # that the walkers are of.
        optimizer = kfac_fx.KFAC(net, lr=0.3, damping=1e-3, momentum=0.0, norm_constraint=1e-3, invert_every=1, seed=0)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    started = time.perf_counter()
    for step in range(steps):
        energies = local_energy(model, x)
        if step % max(1, steps // 5) == 0:
            print(f"{name:6} step {step:4}  energy {energies.mean():.4f}  deviation {energies.std():.4f}")
        middle = energies.median()  # two walkers that meet must not decide: local energies are cut at five deviations
        width_of = (energies - middle).abs().mean()
        energies = energies.clamp(middle - 5 * width_of, middle + 5 * width_of)
        optimizer.zero_grad()
        loss = (2 * (energies - energies.mean()).unsqueeze(1) * net(x)).mean()
        loss.backward()
        optimizer.step()
        x = moved(model, x, 10)
    seconds = time.perf_counter() - started
    found = []
    for _ in range(40):
        x = moved(model, x, 10)
        found.append(local_energy(model, x))
    energies = torch.cat(found)
    deviation = energies.std().item()
    return Result(name, energies.mean().item(), deviation / len(energies) ** 0.5, deviation, seconds)


def main(steps: int = 100, width: int = 16, walkers: int = 512) -> list[Result]:
    results = [optimized(name, steps, width, walkers) for name in ("K-FAC", "Adam")]
    print(*results, sep="\n")
    best = results[0]
    close = abs(best.energy - EXACT) < max(1e-3, 4 * best.error)
    print("K-FAC's energy is", "right" if close else "WRONG", "to a thousandth, or its statistical error")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 100), ("width", 16), ("walkers", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
