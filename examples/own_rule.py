"""An update rule of your own: Adam in the eigenbasis of the input side of the blocks, one-sided SOAP.

Vyas et al. 2024, "SOAP: improving and stabilizing Shampoo using Adam", algorithm 3 and section 7.1. The library keeps
the bases, divides vectors among processes, writes the checkpoint, and guards the steps.

    python -m examples.own_rule
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.rules import BlockStep, Rule, Update, Values, between_0_and_1, zeros_for


@dataclass(frozen=True, kw_only=True, eq=False)
class OneSidedSoap(Rule):
    """m <- β₁ m + (1 - β₁) g, v <- β₂ v + (1 - β₂) (g Q)², Δ = (m Q / √v) Qᵀ, with Q the eigenvectors of A.

    Args:
        momentum, second_moment_decay: β₁ and β₂.
    """

    name: ClassVar[str] = "one_sided_soap"
    has_bases: ClassVar[bool] = True
    values: ClassVar[dict[str, Values]] = {"v": Values(least=0), "age": Values(least=0)}  # in a checkpoint
    momentum: Annotated[float, between_0_and_1] = 0.9
    second_moment_decay: Annotated[float, between_0_and_1] = 0.95

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: zeros_for(parameter) for name in ("m", "v", "age")}

    def direction(self, step: BlockStep) -> Update:
        b1, b2 = self.momentum, self.second_moment_decay
        m, age = b1 * step.state["m"] + (1 - b1) * step.g, step.state["age"] + 1
        v = b2 * step.state["v"] + (1 - b2) * step.to_bases(step.g, outputs=False).square()
        root = (v / (1 - b2**age)).sqrt() + 1e-8
        turned = step.to_bases(m / (1 - b1**age), outputs=False) / root
        return Update(step.from_bases(turned, outputs=False), {"m": m, "v": v, "age": age})


def main(steps: int = 100) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(256, 16)
    y = (x[:, :4] * x[:, 4:8]).argmax(-1)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.03, rule=OneSidedSoap())
    for _ in range(steps):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
