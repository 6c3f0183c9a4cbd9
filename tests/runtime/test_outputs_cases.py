"""Which dimension of the inputs counts the cases: known by layers, told by the user, or refused where it is a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.errors import LossError, RegistrationError, UntraceableError
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")

T, N, D, C = 4, 6, 4, 3


class Layers(nn.Module):
    """A layer of torch on [T, N, D] and a head at every position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.head(y[0] if isinstance(y, tuple) else y)


class Cells(nn.Module):
    """A loop over the time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], D)
        outputs = []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            outputs.append(self.head(h))
        return torch.stack(outputs)


class Attention(nn.Module):
    """Attention by hand, which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).transpose(0, 1)
        return self.head(((q @ q.mT).softmax(-1) @ q).transpose(0, 1))


class Loop(nn.Module):
    """A recurrent network by hand, which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.Linear(D, D, bias=False), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x[0], []
        for t in range(x.shape[0]):
            h = torch.tanh(self.recurrent(h) + x[t])
            outputs.append(self.head(h))
        return torch.stack(outputs)


class Merged(nn.Module):
    """The cases come second in forward, too, and the model returns its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.loss = nn.RNN(D, D), nn.Linear(D, C), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.layer(x)[0]), y)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "rnn": (lambda: Layers(nn.RNN(D, D)), {}),
    "lstm": (lambda: Layers(nn.LSTM(D, D)), {}),
    "two layers, two directions": (lambda: Layers(nn.GRU(D, D // 2, 2, bidirectional=True)), {}),
    "transformer": (lambda: Layers(nn.TransformerEncoderLayer(D, 2, 5, dropout=0.0)), {}),
    "cells": (Cells, {}),
    "attention by hand": (Attention, {"batch_dim": 1}),
    "loop by hand": (Loop, {"batch_dim": 1}),
}


def dense_fisher(model: nn.Module, outputs: Callable[[], Tensor], kind: str) -> tuple[Tensor, dict[str, slice]]:
    """Jᵀ H J over the number of cases, from the Jacobian of every output by itself."""
    z = outputs()
    parameters = dict(model.named_parameters())
    rows = [
        torch.cat(
            [
                torch.zeros(p.numel()) if g is None else g.flatten()
                for p, g in zip(
                    parameters.values(),
                    torch.autograd.grad(value, [*parameters.values()], retain_graph=True, allow_unused=True),
                    strict=True,
                )
            ]
        )
        for value in z.flatten()
    ]
    jacobian = torch.stack(rows)
    if kind == "categorical":
        p = z.detach().reshape(-1, C).softmax(-1)
        hessian, cases = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)), T * N
    else:
        hessian, cases = 2 * torch.eye(z.numel()), N
    places, start = {}, 0
    for name, p in parameters.items():
        places[name] = slice(start, start + p.numel())
        start += p.numel()
    return jacobian.mT @ hessian @ jacobian / cases, places


def check_blocks(estimator: kfac_fx.FisherEstimator, dense: Tensor, places: dict[str, slice]) -> int:
    """Compare all exact blocks with the dense Fisher, up to the order of a block's elements: traces and norms."""
    compared = 0
    for block in estimator.blocks.values():
        if block.registration.approximation != "full":
            continue
        names = dict.fromkeys(name.split("[")[0] for name in block.registration.parameters)
        if block.registration.pieces:
            continue
        index = torch.cat([torch.arange(places[name].start, places[name].stop) for name in names])
        wanted, found = dense[index][:, index], block.full_fisher_block()
        torch.testing.assert_close(found.trace(), wanted.trace())
        torch.testing.assert_close(torch.linalg.eigvalsh(found), torch.linalg.eigvalsh(wanted))
        compared += 1
    return compared


@pairs(("name", list(MODELS)), ("kind", ["categorical", "normal"]))
def test_time_first_blocks_are_the_dense_fisher(name: str, kind: str) -> None:
    make, options = MODELS[name]
    model, x = make(), torch.randn(T, N, D)
    net = kfac_fx.compile(
        model, (torch.randn(T, 3, D),), loss=kind, approximations={"*": "full"}, dense_limit=10_000, **options
    )
    estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="exact")
    estimator.update_covariances(x)
    dense, places = dense_fisher(model, lambda: model(x), kind)
    assert check_blocks(estimator, dense, places) >= 2


@pytest.mark.parametrize(
    ("loss", "kind", "y"),
    [
        (lambda z, y: F.mse_loss(z, y, reduction="sum") / y.shape[1], "normal", torch.randn(T, N, C)),
        (lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y), "categorical", torch.randint(C, (T, N))),
        (lambda z, y: F.cross_entropy(z.permute(1, 2, 0), y.T), "categorical", torch.randint(C, (T, N))),
    ],
)
def test_time_first_losses_in_forward(loss: Any, kind: str, y: Tensor) -> None:
    model, x = Merged(loss), torch.randn(T, N, D)
    y = y.to(torch.get_default_dtype()) if y.is_floating_point() else y
    net = kfac_fx.compile(model, (x[:, :3], y[:, :3]), approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="exact")
    estimator.update_covariances(x, y)
    dense, places = dense_fisher(model, lambda: model.head(model.layer(x)[0]), kind)
    assert check_blocks(estimator, dense, places) == 3


def test_a_function_as_loss_may_keep_or_move_the_cases() -> None:
    torch.manual_seed(0)
    model, x, y = Layers(nn.RNN(D, D)), torch.randn(T, T, D), torch.randn(T, T, C)  # as many cases as positions
    found = []
    for loss in (
        "normal",
        lambda z: kfac_fx.losses.Normal(z),
        lambda z: kfac_fx.losses.Normal(2 * z / 2),
        lambda z: kfac_fx.losses.Normal(z.movedim(1, 0)),
    ):
        net = kfac_fx.compile(model, (x,), loss=loss)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
        moved = callable(loss) and loss(torch.zeros(2, 3, 1)).inputs.shape[0] == 3
        estimator.update_covariances(x, targets=y.movedim(1, 0) if moved else y)
        found.append(estimator.blocks["head.weight", "head.bias"].factors["G"].value)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    with pytest.raises(LossError, match="no axis of it has one place for every case.*movedim"):
        kfac_fx.compile(model, (x,), loss=lambda z: kfac_fx.losses.Normal(z.cumsum(1)))


class Backward(Loop):
    """The same from the last place to the first: no other output sees the first place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(0)).flip(0)


@pairs(("inputs", {"inputs0": (T, 3, D), "inputs1": (T, T, D)}), ("model", [Attention, Loop, Backward]))
def test_a_guess_is_refused(model: Callable[[], nn.Module], inputs: tuple[int, ...]) -> None:
    with pytest.raises(RegistrationError, match="would be a guess.*not along dimension 1") as caught:
        kfac_fx.compile(model(), (torch.randn(inputs),), loss="categorical")
    assert "kfac_fx.compile(..., batch_dim=1)" in str(caught.value)


def test_a_guess_is_refused_at_the_first_batch() -> None:
    net = kfac_fx.compile(Attention(), loss="categorical")
    with pytest.raises(RegistrationError, match="would be a guess"):
        net(torch.randn(T, N, D))


def test_a_dimension_that_one_of_several_outputs_lacks_counts_no_cases() -> None:
    """Atoms of a molecule have features and coordinates, whose rows and axes are sizes of their own."""

    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.move = nn.Linear(D + 1, C), nn.Linear(D, 1)

        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            distances = (x[:, None] - x).square().sum(-1).mean(1, keepdim=True)
            return self.layer(torch.cat([h, distances], 1)).cumsum(0), x + 1e-5 * self.move(h) * x

    def both(outputs: Any) -> list[Any]:
        return [kfac_fx.losses.Normal(output) for output in outputs]

    net = kfac_fx.compile(Equivariant(), (torch.randn(6, D), torch.randn(6, 3)), loss=both, strict=True)
    assert len(net.registrations) == 2


def test_batches_whose_cases_mix_everywhere_follow_the_convention() -> None:
    class Centered(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - y.mean((0, 1))

    net = kfac_fx.compile(Centered(D, C), (torch.randn(5, N, D),), loss="categorical")
    assert net.program.case_dims == (0,)


def test_a_size_that_is_fixed_counts_no_cases() -> None:
    """The channels of a batch normalization are kept apart, and its cases are not."""
    model = nn.Sequential(nn.BatchNorm1d(N), nn.Linear(D, C))
    assert kfac_fx.compile(model, (torch.randn(5, N, D),), loss="categorical").program.case_dims == (0,)


@pytest.mark.parametrize(
    ("make", "options", "line"),
    [
        (lambda: Layers(nn.RNN(D, D)), {}, "dimension 1 of x: rnn_tanh takes [steps, cases, features]"),
        (
            lambda: Layers(nn.RNN(D, D, batch_first=True)),
            {},
            "dimension 0 of x: rnn_tanh takes [cases, steps, features]",
        ),
        (Attention, {"batch_dim": 1}, "dimension 1 of x: batch_dim=1"),
        (
            lambda: nn.TransformerEncoderLayer(D, 1, D),
            {},
            "dimension 1 of src: attention of torch takes [positions, cases, features]",
        ),
        (
            lambda: nn.TransformerEncoderLayer(D, 1, D, batch_first=True),
            {},
            "dimension 0 of src: attention of torch takes [cases, positions, features]",
        ),
        (
            lambda: nn.Linear(D, C),
            {},
            "dimension 0 of input: by convention, as no layer and no batch_dim= says another",
        ),
    ],
)
def test_the_report_says_the_dimension_and_why(
    make: Callable[[], nn.Module], options: dict[str, int], line: str
) -> None:
    report = kfac_fx.compile(make(), (torch.randn(T, N, D),), loss="categorical", **options).report
    assert line in " ".join(str(report).split())
    assert line in report.to_dict()["cases"][0]


def test_one_dimension_alone_needs_no_reason() -> None:
    report = kfac_fx.compile(nn.Linear(D, C), (torch.randn(N, D),), loss="categorical").report
    assert report.to_dict()["cases"] == [] and "cases" not in str(report)


def test_the_number_that_forward_returns_for_an_unknown_loss_has_no_rows_to_count() -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).logsumexp(1).mean()

    assert kfac_fx.compile(Loss(D, C), (torch.randn(N, D),)).report.to_dict()["cases"] == []


class LastOfTheWrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def test_a_layer_that_contradicts_the_outputs_is_refused() -> None:
    """The most common mistake with recurrent layers: their inputs are [cases, positions], without batch_first."""
    with pytest.raises(RegistrationError, match="Write batch_first=True") as caught:
        kfac_fx.compile(LastOfTheWrong(), (torch.randn(T, N, D),), loss="categorical")
    assert "lstm takes [steps, cases, features], and the output" in str(caught.value)
    net = kfac_fx.compile(LastOfTheWrong(), (torch.randn(T, N, D),), loss="categorical", batch_dim=0)
    assert net.program.case_dims == (0,)


@pytest.mark.parametrize("dim", [-1, "1", 1.0, True])
def test_batch_dim_is_a_dimension(dim: Any) -> None:
    with pytest.raises(RegistrationError, match="batch_dim is .*counted from 0, as in batch_dim=1"):
        kfac_fx.compile(nn.Linear(D, C), (torch.randn(N, D),), loss="categorical", batch_dim=dim)


def test_batch_dim_must_exist_and_vary() -> None:
    with pytest.raises(RegistrationError, match="batch_dim=3, and no input of forward has 4 dimensions"):
        kfac_fx.compile(Attention(), (torch.randn(T, N, D),), loss="categorical", batch_dim=3)
    with pytest.raises(RegistrationError, match="batches of at least two cases"):
        kfac_fx.compile(Attention(), (torch.randn(T, 1, D),), loss="categorical", batch_dim=1)


class Branch(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)[0]
        return self.head(y if float(y.sum()) > 0 else -y)


def test_divided_models_have_their_cases_first() -> None:
    x = torch.randn(T, N, D)
    with pytest.raises(UntraceableError, match="write batch_first=True"):
        kfac_fx.compile(Branch(nn.RNN(D, D)), (x,), loss="categorical")
    with pytest.raises(UntraceableError, match="batch_dim=1 needs one graph of the whole model"):
        kfac_fx.compile(Branch(nn.RNN(D, D)), (x,), loss="categorical", batch_dim=1)
    assert kfac_fx.compile(Branch(nn.RNN(D, D, batch_first=True)), (x,), loss="categorical").program.submodules


def test_a_part_of_a_batch_is_a_part_of_its_cases() -> None:
    model, x, y = Layers(nn.RNN(D, D)), torch.randn(N, N, D), torch.randint(C, (N, N))
    factors = []
    for inputs, targets, fraction in ((x, y, 0.5), (x[:, :3], y[:, :3], 1.0)):
        net = kfac_fx.compile(model, (x,), loss="categorical")
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical", fraction=fraction)
        estimator.update_covariances(inputs, targets=targets)
        factors.append(estimator.blocks["head.weight", "head.bias"].factors["G"].value)
    torch.testing.assert_close(*factors)


def test_a_time_first_model_trains_without_a_warning() -> None:
    model, x, y = Layers(nn.LSTM(D, D)), torch.randn(T, N, D), torch.randint(C, (T, N))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, norm_constraint=1e-2)
    first = None
    for _ in range(20):
        loss = F.cross_entropy(net(x).permute(0, 2, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.detach() if first is None else first
    assert loss.detach() < first
