"""Forwards that write in place, switch gradients off, keep state, draw numbers for nothing: still the original."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from tests.tables import pairs
from tests.whole.training import differences, step

Function = Callable[[Tensor], Tensor]


def base_read_later(x: Tensor) -> Tensor:
    x.view(x.shape[0], -1).mul_(2.0)
    return x + 1


def view_read_later(x: Tensor) -> Tensor:
    view = x.view(-1)
    x.mul_(2.0)
    return x + view.view_as(x)


def slice_written(x: Tensor) -> Tensor:
    x[..., 0] += 1
    return x


def slice_replaced(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def slice_of_new(x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[:, 1:] = x[:, 1:]
    return z


def half_written(x: Tensor) -> Tensor:
    a, b = x[..., :2], x[..., 2:]
    a.mul_(2)
    return torch.cat([a, b], -1)


def half_written_by_operator(x: Tensor) -> Tensor:
    y = x[:, :2]
    y += 1
    return x * 1.5


def clone_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].mul_(3.0)
    return y + x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.abs().mean()
    return x / (1 + size)


def random_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = F.dropout(x, 0.5)
    return x * mask


def random_for_nothing(x: Tensor) -> Tensor:
    torch.rand_like(x)
    F.dropout(x, 0.5)
    return x


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t() @ x).float()


def masked(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.1 * x).masked_fill(x.isnan(), 0).sort(-1).values


class Running(nn.Module):
    """Statistics of its own, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Assigned(nn.Module):
    """A buffer that is replaced, not written into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda t: F.dropout(torch.tanh(self.inner(t)), 0.3), x, use_reentrant=False)
        return y


class OwnNorm(nn.Module):
    """A weight that is also read outside the graph of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) / self.inner.weight.detach().norm()
        return y


class Between(nn.Module):
    """An operation between two linear layers."""

    def __init__(self, middle: Function) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


MIDDLES: list[Function] = [
    base_read_later,
    view_read_later,
    slice_written,
    slice_replaced,
    slice_of_new,
    half_written,
    half_written_by_operator,
    clone_written,
    without_gradient,
    random_without_gradient,
    random_for_nothing,
    autocast,
    masked,
    Running(),
    Assigned(),
    Checkpointed(),
    OwnNorm(),
]


@pairs(("inputs", {"exported": True, "traced": False}), ("middle", MIDDLES))
def test_the_rewritten_model_is_the_original(middle: Function, inputs: bool) -> None:
    model = Between(copy.deepcopy(middle))
    twin = copy.deepcopy(model)
    net = kfac_fx.compile(model, (torch.randn(5, 4),) if inputs else None, loss="normal")
    x = torch.randn(5, 4)
    for _ in range(2):
        net.record((x,), {})
        assert differences(step(twin, lambda: twin(x)), step(model, lambda: net(x))) == []
    assert differences(step(twin, lambda: twin(x)), step(model, lambda: net.record_in_training((x,), {})[0])) == []
    assert [registration.reason for registration in net.registrations if registration.generic] == []


class Keeping(nn.Module):
    """Keeps what it attends to, for figures, behind noise and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout, self.last = (
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        )  # fmt: skip
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm(self.first(x)))
        self.attention = h.softmax(1)
        y: Tensor = self.last(h)
        return y


@pytest.mark.parametrize("inputs", [True, False], ids=["exported", "traced"])
def test_a_forward_that_keeps_a_tensor_trains_without_a_known_loss(inputs: bool) -> None:
    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(5, 4)
    twin = copy.deepcopy(model)
    net = kfac_fx.compile(model, (x,) if inputs else None)
    assert differences(step(twin, lambda: twin(x)), step(model, lambda: net.record_in_training((x,), {})[0])) == []
    assert model.attention is not None and twin.attention is not None
    assert torch.equal(model.attention, twin.attention)
    optimizer = kfac_fx.KFAC(net)
    for _ in range(3):
        optimizer.zero_grad()
        F.triplet_margin_loss(net(x), net(x.flip(0)), net(-x)).backward()
        optimizer.step()
    assert "because the graph leaves out that it sets attention" in " ".join(str(net.report).split())


@pytest.mark.parametrize("inputs", [True, False], ids=["exported", "traced"])
def test_an_input_that_forward_writes_into_is_written_once(inputs: bool) -> None:
    """By the model, and neither by compiling nor by recording."""

    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.view(-1).add_(1.0)
            y: Tensor = self.linear(x)
            return y

    x = torch.randn(5, 4)
    given = x.clone()
    net = kfac_fx.compile(WritesInput(), (given,) if inputs else None, loss="normal")
    net.record((given,), {})
    assert torch.equal(given, x)
    net(given)
    assert torch.equal(given, x + 1)


class Bag(nn.Module):
    """A bag of ids [cases, positions], which torch makes flat."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.bag, self.head, self.weighted = nn.EmbeddingBag(7, 3, mode="sum"), nn.Linear(3, 3), weighted

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.cos(ids.to(self.head.weight.dtype)) if self.weighted else None
        logits: Tensor = self.head(self.bag(ids, per_sample_weights=weights).tanh())
        return logits


class FirstState(nn.Module):
    """A loop over cells that reads the number of cases, which is a number in the graph then."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 3)
        for row in x.unbind(1):
            state = self.cell(row, state)
        logits: Tensor = self.head(state)
        return logits


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: Bag(weighted=False), torch.randint(7, (6, 4))),
        (lambda: Bag(weighted=True), torch.randint(7, (6, 4))),
        (FirstState, torch.randn(6, 4, 2, dtype=torch.float64)),
    ],
    ids=["bag", "weighted bag", "loop of cells"],
)
def test_full_blocks_where_the_size_of_the_cases_is_no_symbol_of_an_input(
    build: Callable[[], nn.Module], x: Tensor
) -> None:
    model, y = build(), torch.randint(3, (len(x),))
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    losses = F.cross_entropy(model(x), y, reduction="none")
    parameters = dict(model.named_parameters())
    each = [torch.autograd.grad(loss, [*parameters.values()], retain_graph=True) for loss in losses]
    by_case = [dict(zip(parameters, grads, strict=True)) for grads in each]
    for block in estimator.blocks.values():
        assert block.registration.approximation == "full" and block.registration.matrix is not None
        rows = torch.stack([block.registration.matrix.pack(gradients).flatten() for gradients in by_case])
        torch.testing.assert_close(block.full_fisher_block(), rows.mT @ rows / len(x))
