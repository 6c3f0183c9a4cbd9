"""Models whose gradients of single cases are compared, and these gradients by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

Gradients = dict[str, Tensor]
V, T, D = 7, 4, 3


class Text(nn.Module):
    """Ids, learned positions, a norm, a layer at every position, and the embedding again as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 5), nn.Linear(5, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        mixed = x.cumsum(1)
        x = x + self.down(torch.tanh(self.up(self.norm(mixed))))
        return x @ self.words.weight.T


class TextWithLoss(nn.Module):
    """The loss of the next word, of rows that are merged, as language models compute it; or position by position."""

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.text, self.time_first = Text(), time_first

    def forward(self, ids: Tensor) -> Tensor:
        logits, targets = self.text(ids)[:, :-1], ids[:, 1:]
        if self.time_first:
            logits, targets = logits.transpose(0, 1), targets.transpose(0, 1)
        return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


class Routed(nn.Module):
    """Experts, each of which sees the positions of all examples that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(2, D, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        expert = (rows[:, 0] > 0).long()
        order = expert.argsort()
        ends = F.one_hot(expert, 2).sum(0).cumsum(0)
        y = torch.ops.kfac_fx.grouped_mm(rows[order], self.weight, ends)
        back = torch.zeros_like(y).index_copy(0, order, y)
        result: Tensor = self.head(torch.tanh(back.view(*x.shape[:2], 4)).mean(1))
        return result


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 3))


def of_each(number: int, loss: Callable[[int], Tensor], parameters: dict[str, Tensor]) -> Gradients:
    """The gradients of `loss(n)` for every n: [number, *shape] by parameter."""
    each = [
        torch.autograd.grad(loss(n), list(parameters.values()), allow_unused=True, materialize_grads=True)
        for n in range(number)
    ]
    return {name: torch.stack([grads[k] for grads in each]) for k, name in enumerate(parameters)}


def of_examples(model: nn.Module, x: Tensor, y: Tensor) -> Gradients:
    """Gradients of the loss of every example, summed over its rows, from a forward of that example alone."""

    def loss(n: int) -> Tensor:
        return F.cross_entropy(model(x[n : n + 1]).flatten(0, -2), y[n : n + 1].flatten(), reduction="sum")

    return of_each(len(x), loss, dict(model.named_parameters()))


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Gradients:
    """Gradients of the loss of every row of every example."""
    rows = y[0].numel()

    def loss(k: int) -> Tensor:
        n, row = divmod(k, rows)
        return F.cross_entropy(model(x[n : n + 1]).flatten(0, -2)[row], y[n].flatten()[row])

    return of_each(len(x) * rows, loss, dict(model.named_parameters()))


def of_positions(model: Text, x: Tensor, y: Tensor) -> Gradients:
    """Gradients of the loss of every example by copies of a weight for every position: [N, T, *shape].

    Both uses of the tied weight share a copy.
    """
    copies = {
        name: model.get_parameter(name)
        .detach()
        .expand(*x.shape, *model.get_parameter(name).shape)
        .clone()
        .requires_grad_()
        for name in ("words.weight", "up.weight", "up.bias")
    }
    words, up, bias = copies.values()
    h = torch.take_along_dim(words, x[..., None, None].expand(*x.shape, 1, D), 2).squeeze(2) + model.places
    z = h + model.down(torch.tanh(torch.einsum("nsoi,nsi->nso", up, model.norm(h.cumsum(1))) + bias))
    logits = torch.einsum("nsvd,nsd->nsv", words, z)
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
    return dict(zip(copies, torch.autograd.grad(total, list(copies.values())), strict=True))


def spectrum_of(model: nn.Module, x: Tensor, y: Tensor | None, **options: Any) -> kfac_fx.ModelSpectrum:
    """The damped inverse of the empirical Fisher of one batch, with a damping of 0.1."""
    loss = None if y is None else "categorical"
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss=loss, **options), estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    return estimator.spectrum(damping=0.1)


def inner(left: Gradients, right: Gradients) -> Tensor:
    """<left_q, right_n> over all parameters: [Q, N]."""
    return torch.stack(
        [left[name].reshape(len(left[name]), -1) @ g.reshape(len(g), -1).mT for name, g in right.items()]
    ).sum(0)


def assert_corrected(found: kfac_fx.Spectrum, spectrum: kfac_fx.Spectrum, oracle: Gradients) -> None:
    expected = spectrum.corrected([{name: oracle[name] for name in spectrum.shapes}]).eigenvalues()
    for key, values in found.eigenvalues().items():
        torch.testing.assert_close(values, expected[key])
