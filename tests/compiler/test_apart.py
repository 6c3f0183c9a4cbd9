"""Which registrations have cases that stay apart, as the graph tells, against gradients from row to row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.cases import kept_apart

Between = Callable[[Tensor], Tensor]  # [N, 4] -> [N, ...]
ORDER = torch.tensor([2, 0, 1, 5, 4, 3])


def normalized(x: Tensor, training: bool) -> Tensor:
    return F.batch_norm(x, torch.zeros(4), torch.ones(4), training=training)


def changed_in_place(x: Tensor) -> Tensor:
    kept = x.clone()
    kept[:, :2] = x.mean(0, keepdim=True)[:, :2]
    return kept


APART: dict[str, Between] = {
    "pointwise": lambda x: torch.where(x > 0, x.tanh() * x.sigmoid(), F.gelu(x)) + 1.0,
    "in place": lambda x: x.mul(2.0).relu_() + x,
    "sums in place": lambda x: x.neg().add_(x * x).relu_(),
    "a number of the batch": lambda x: x * x.shape[0] + x.detach().cumsum(0),
    "a detached mean": lambda x: x - x.mean(0).detach(),
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: x.sum(1, keepdim=True) * x.unflatten(1, (2, 2)).mean((1, 2)).unsqueeze(1),
    "joins": lambda x: torch.cat([x, torch.stack([x, -x], -1).flatten(1)], 1),
    "parts": lambda x: x.chunk(2, 1)[0] * x[:, 2:] + x.select(1, 0).unsqueeze(-1) + x.unbind(1)[1].unsqueeze(1),
    "views": lambda x: x.view(-1, 2, 2).transpose(1, 2).reshape(x.shape[0], -1).unsqueeze(1).expand(-1, 2, 4),
    "products of a matrix a case": lambda x: x.unsqueeze(2) @ x.unsqueeze(1),
    "a product with a constant": lambda x: x @ torch.ones(4, 3),
    "einsum": lambda x: torch.einsum("ni,nj,jk->nik", x, x, torch.ones(4, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 2, 2)] * 3),
    "convolution": lambda x: F.conv1d(x.unsqueeze(1), torch.ones(3, 1, 2)),
    "pooling": lambda x: F.max_pool2d(x.view(-1, 1, 2, 2), 2) + F.adaptive_max_pool2d(x.view(-1, 1, 2, 2), 1),
    "norms": lambda x: F.layer_norm(x, [4]) + F.group_norm(x.unsqueeze(-1), 2).squeeze(-1) + normalized(x, False),
    "other orders of features": lambda x: x.flip(1).cumsum(1),
}
MIXED: dict[str, Between] = {
    "softmax": lambda x: x.softmax(0),
    "sums": lambda x: x - x.mean(0),
    "sums of all": lambda x: x * x.sum(),
    "joins": lambda x: torch.cat([x[3:], x[:3]]),
    "another order": lambda x: x[ORDER],
    "the reversed order": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "cumulative": lambda x: x.cumsum(0),
    "all pairs": lambda x: x @ x.T,
    "all pairs by einsum": lambda x: torch.einsum("ni,mi->nm", x, x),
    "a diagonal by einsum": lambda x: torch.einsum("ni,mi,n->ni", x, x, torch.ones(6)),
    "attention between cases": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3).squeeze(0),
    "a convolution along cases": lambda x: F.conv1d(x.T.unsqueeze(1), torch.ones(1, 1, 3), padding=1).squeeze(1).T,
    "a norm of the batch": lambda x: normalized(x, True),
    "transposed views": lambda x: x.T.reshape(x.shape[0], -1),
    "rows of halves": lambda x: (x.view(2, -1, 4) + x.view(2, -1, 4).flip(0)).reshape(x.shape[0], 4),
    "expanded over cases": lambda x: x.unsqueeze(0).expand(x.shape[0], -1, -1).sum(2),
    "written over": changed_in_place,
    "columns for rows": lambda x: x @ (x.T @ x),
}


class Around(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.head, self.between = nn.Linear(3, 4), nn.LazyLinear(2), between

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self.first(x)).flatten(1))
        return logits


def compiled(between: Between) -> tuple[kfac_fx.CompiledModule, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Around(between), torch.randn(6, 3)
    model(x)
    return kfac_fx.compile(model, (x,), loss="categorical"), model, x


def rows_reached(between: Between) -> Tensor:
    """[row of the result, row of the operand]."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, requires_grad=True)
    out = between(x).flatten(1)
    weights = torch.randn(out.shape[1])
    return torch.stack([torch.autograd.grad(row @ weights, x, retain_graph=True)[0].any(1) for row in out])


@pytest.mark.parametrize("name", APART)
def test_cases_are_apart(name: str) -> None:
    assert torch.equal(rows_reached(APART[name]), torch.eye(6, dtype=torch.bool))
    net, _, _ = compiled(APART[name])
    assert kept_apart(net.program, net.program.outputs) == {
        ("first.weight", "first.bias"),
        ("head.weight", "head.bias"),
    }


@pytest.mark.parametrize("name", MIXED)
def test_cases_that_meet_or_change_places_are_not_told_apart(name: str) -> None:
    assert not torch.equal(rows_reached(MIXED[name]), torch.eye(6, dtype=torch.bool))
    net, _, _ = compiled(MIXED[name])
    assert ("first.weight", "first.bias") not in kept_apart(net.program, net.program.outputs)
