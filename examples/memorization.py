"""A network forgets memorized labels when a weight loses the directions in which the loss is flat.

Data that follow a rule curve the loss in directions that they share. Memorized labels are spread over directions that
the other data do not see. So the weight is rotated into the eigenvectors of its Fisher block, entries with small
eigenvalues are set to zero, and the weight is rotated back. A network that learned wrong labels by heart forgets them
before it forgets the rule: 84 % of new data and all wrong labels are right with all directions, 86 % and 40 % with 2 %.

    python -m examples.memorization
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

SHARES = (1.0, 0.2, 0.1, 0.05, 0.02)


def data(n: int, wrong: int) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, labels, whether the label is wrong): two classes by the sign of the first numbers' sum."""
    x = torch.randn(n, 40)
    y = (x[:, :4].sum(1) > 0).long()
    is_wrong = torch.arange(n) < wrong
    return x, torch.where(is_wrong, 1 - y, y), is_wrong


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def leading(spectrum: kfac_fx.ModelSpectrum, weights: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The weights with the largest eigenvalues' directions alone: a share of the directions of every block."""
    kept: dict[str, Tensor] = {}
    for key, (system, index) in spectrum.places().items():
        group, values = system.group, system.values
        threshold = values[index].flatten().quantile(1 - share)
        turned = group.to_eigenbasis(group.pack(weights), system.operators)
        turned = torch.where(values >= threshold, turned, 0)
        parts = group.unpack(group.from_eigenbasis(turned, system.operators), weights)
        kept |= {name: parts[name] for name in key}
    return kept


def main(steps: int = 600) -> dict[float, tuple[float, float]]:
    """By the share of directions that is kept: the accuracy on new data, and on the wrong labels."""
    torch.manual_seed(0)
    x, y, is_wrong = data(400, 20)
    new, labels, _ = data(2000, 0)
    model = trained(x, y, steps)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact", case="row")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = {}
    print(f"{'kept':<10}{'rule':>8}{'by heart':>10}")
    for share in SHARES:
        edited = leading(spectrum, weights, share)
        right = lambda inputs, targets: (  # noqa: E731
            (torch.func.functional_call(model, edited, (inputs,)).argmax(1) == targets).double().mean().item()  # noqa: B023
        )
        found[share] = right(new, labels), right(x[is_wrong], y[is_wrong])
        print(f"{share:<10.0%}{found[share][0]:8.2f}{found[share][1]:10.2f}")
    return found


if __name__ == "__main__":
    main()
