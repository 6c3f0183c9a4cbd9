"""Losses, inputs and parts of the batch of divided models."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LossError, UntraceableError
from tests.whole.divided import (
    Branching,
    Sizes,
    X,
    compiled,
)


class WithLoss(Branching):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_a_loss_that_python_computes_is_found_with_its_targets() -> None:
    model, y = WithLoss(), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (X, y))
    moments = net.record((X, y), {}, mode="empirical", params_stats=True)
    assert moments.cases == 6
    loss = 6 * model(X, y)["loss"]
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(list(moments.gradients.values()), list(wanted))
    with pytest.raises(LossError, match="no loss is known"):
        kfac_fx.compile(Branching(), (X,)).record((X,), {})


class OfCodes(nn.Module):
    """A vector-quantized autoencoder, whose commitment loss has its targets first."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.encoder(x)
        if not self.codes.isfinite().all():  # a branch on values: there is no graph of the whole
            self.codes.zero_()
        nearest = self.codes[torch.cdist(h, self.codes).argmin(1)]
        commitment = F.mse_loss(nearest.detach(), h)
        logits = self.decoder(h + (nearest - h).detach())
        return (logits, commitment) if y is None else commitment + F.cross_entropy(logits, y)


def test_a_loss_whose_targets_alone_have_a_gradient_is_no_known_one() -> None:
    net = kfac_fx.compile(OfCodes(), (X,))
    assert net.knows_no_loss
    optimizer = kfac_fx.KFAC(net)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        out, commitment = net(X)
        loss = F.mse_loss(out, X) + commitment
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_loss_next_to_one_whose_targets_alone_have_a_gradient_is_found() -> None:
    y = torch.randint(4, (6,))
    net = kfac_fx.compile(OfCodes(), (X, y))
    for _ in range(2):
        assert net.fisher_product(X, y)({name: torch.ones_like(p) for name, p in net.named_parameters()})
    (loss,) = net.recorder((X, y), {}).emitted.loss_sites
    assert loss.loss == "cross_entropy"


class Denoiser(nn.Module):
    """A denoiser of images, [N, 2, 3, 3], with a weight for each image. With a coin it has no single graph."""

    def __init__(self, coin: bool) -> None:
        super().__init__()
        self.first, self.last, self.coin = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1), coin

    def forward(self, x: Tensor) -> Tensor:
        noise = x if self.coin and random.random() < -1.0 else torch.sin(5 * x)
        loss = F.mse_loss(self.last(torch.tanh(self.first(x + noise))), noise, reduction="none")
        return (loss.flatten(1).mean(1) * (1.0 + x[:, 0, 0, 0].sigmoid())).mean()


def test_checks_of_a_divided_model_weigh_its_losses_as_those_of_one_graph() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(12, 2, 3, 3), Denoiser(False)
    changes = []
    for coin in (False, True):
        copied = Denoiser(coin)
        copied.load_state_dict(model.state_dict())
        net = kfac_fx.compile(copied, (x,))
        assert net.recorder((x,), {}).whole is not coin
        optimizer = kfac_fx.KFAC(net, seed=0)
        net(x).backward()
        optimizer.step()
        changes.append(float(optimizer.scalars["predicted_change"]))
        assert 0.7 < float(optimizer.rho) < 1.4
    assert 0.8 < changes[1] / changes[0] < 1.25


def test_a_part_of_the_batch_is_a_part_of_every_input() -> None:
    net = compiled(Branching())
    assert net.record((X,), {}, fraction=0.5).cases == 3
    net = compiled(Sizes(), [torch.randn(3, 4), torch.randn(2, 4)])
    assert net.record(([torch.randn(3, 4), torch.randn(2, 4)],), {}, fraction=0.5).cases == 3


def test_an_output_without_tensors_has_no_loss() -> None:
    class Wrapped(Branching):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return lambda: logits

    with pytest.raises(LossError, match="Wrapped returns no tensor in tuples, lists, dictionaries and attributes"):
        compiled(Wrapped(), loss=lambda out: kfac_fx.losses.Normal(out()))


def test_an_input_that_python_writes_into_is_written_once() -> None:
    class Writes(Branching):
        def forward(self, x: Tensor) -> Any:
            x.add_(1.0)
            return super().forward(x)

    x = torch.randn(6, 4)
    given = x.clone()
    net = compiled(Writes(), given)
    net.record((given,), {})
    assert torch.equal(given, x)


def test_a_collection_needs_one_graph_and_says_what_to_do_instead() -> None:
    with pytest.raises(UntraceableError) as failure:
        kfac_fx.capture(Branching(), (X,))
    said = str(failure.value).splitlines()
    assert said[0].startswith("Branching could not be captured as a graph; torch gave up in Branching (divided.py:")
    assert said[-1].startswith(
        "A LayerCollection is registered on the nodes of one graph. kfac_fx.compile captures such"
    )
    assert "approximations=..., linked=... and layers=...." in said[-1]


def test_what_was_registered_of_the_parts_is_shown_as_a_collection() -> None:
    collection = compiled(Branching()).layer_collection
    assert list(collection.fisher_blocks) == [("first.weight", "first.bias"), ("middle.weight", "middle.bias"), (
        "last.weight", "last.bias"
    )]  # fmt: skip


def test_autocast_over_what_has_no_parts_is_captured_whole() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ self.weight
            return y.float()

    net = compiled(Bare())
    assert net.report.to_dict()["submodules"] == []
    assert [registration.layer for registration in net.registrations] == ["linear"]
