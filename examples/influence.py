"""The factors themselves, without the optimizer: which training examples made this prediction?

Influence of a training example z on a test example z': -∇L(z')ᵀ (F + λ I)⁻¹ ∇L(z) (Koh & Liang 2017, with the Fisher in
the Hessian's place). One product with the inverse serves all training examples.

    python -m examples.influence
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import kfac_fx


def trained(x: Tensor, y: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def main() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    y[0] = 1 - y[0]  # one wrong label
    model = trained(x, y)

    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-2)
    for _ in range(20):  # each draws targets anew from the model's own distribution
        estimator.update_covariances(x, should_decay=False)
    estimator.update_inverses()

    def loss(parameters: dict[str, Tensor], case: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (case[None],)), label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    test = grad(loss)(parameters, x[0] + 0.05, 1 - y[0])
    direction = estimator.multiply_inverse(test)
    each = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    influence = -torch.stack([(each[name].flatten(1) @ direction[name].flatten()) for name in direction]).sum(0)

    for block in estimator.blocks.values():
        print(
            f"{block.registration}: A {list(block.factors['A'].value.shape)}, G {list(block.factors['G'].value.shape)}"
        )
    worst = influence.argsort(descending=True)[:3].tolist()
    print(f"most harmful training examples: {worst}; the wrong label is at 0")
    return influence


if __name__ == "__main__":
    main()
