"""A loss that forward computes piece by piece is one loss: its rows belong to the examples that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.estimator.model_spectrum import ModelSpectrum

Pieces = Callable[[Tensor], Sequence[Tensor]]
CUTS: dict[str, Pieces] = {
    "split": lambda rows: rows.split(3),
    "chunk": lambda rows: rows.chunk(2),
    "slices": lambda rows: [rows[:3], rows[3:5], rows[5:]],
    "every second": lambda rows: [rows[::2], rows[1::2]],
    "sizes of activations": lambda rows: rows.split([rows.shape[0] // 2, rows.shape[0] - rows.shape[0] // 2]),
    "single rows": lambda rows: [row.unsqueeze(0) for row in rows.unbind(0)],
}


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class InPieces(nn.Module):
    """meet: whether cases do, before the loss. function: of torch."""

    def __init__(self, cut: Pieces, meet: bool, function: Callable[..., Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.cut, self.meet, self.function = cut, meet, function

    def outputs(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        logits: Tensor = self.last(hidden - hidden.mean(0) if self.meet else hidden)
        return logits

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.cut(self.outputs(x)), self.cut(y), strict=True)
        return torch.stack(
            [self.function(outputs, targets, reduction="sum") for outputs, targets in pairs]
        ).sum() / len(x)


class Words(nn.Module):
    """Logits [examples, positions, words], whose rows are cut wherever `size` of them are full. `scale` is generic."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words, self.hidden, self.scale = nn.Embedding(6, 4), nn.Linear(4, 6), nn.Parameter(torch.tensor(1.2))
        self.size = size

    def outputs(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.hidden(torch.sin(self.scale * self.words(ids).cumsum(1)))
        return logits.flatten(0, 1)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.outputs(ids).split(self.size), y.view(-1).split(self.size), strict=True)
        losses = [F.cross_entropy(outputs, targets, ignore_index=-1, reduction="sum") for outputs, targets in pairs]
        return torch.stack(losses).sum() / (y != -1).sum()


def gradients(losses: Tensor, model: nn.Module) -> Tensor:
    """[losses, parameters]."""
    parameters = list(model.parameters())
    each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([grad.flatten() for grad in grads]) for grads in each])


def plain_scores(spectrum: ModelSpectrum, batch: Any) -> Tensor:
    """gᵀ g of every example."""
    scores: Tensor = spectrum.at(scale=0.0, damping=1.0).self_scores(batch)
    return scores


def trace(spectrum: ModelSpectrum) -> Tensor:
    return torch.stack([values.sum() for values in spectrum.at(damping=0.0).eigenvalues().values()]).sum()


@pytest.mark.parametrize("meet", [False, True], ids=["cases apart", "cases meet"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_scores_are_of_single_examples_however_the_cases_are_cut(cut: Pieces, meet: bool) -> None:
    model, x, y = InPieces(cut, meet), torch.randn(8, 4), torch.randint(3, (8,))
    net = kfac_fx.compile(model, (x, y))
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(x, y)], mode="empirical", case="row", damping=1.0)
    wanted = gradients(F.cross_entropy(model.outputs(x), y, reduction="none"), model)
    torch.testing.assert_close(plain_scores(spectrum, kfac_fx.Batch(x, y)), wanted.square().sum(1))
    torch.testing.assert_close(trace(spectrum), wanted.square().sum() / 8)


def test_targets_of_several_numbers_are_cut_with_their_cases() -> None:
    model, x, y = InPieces(CUTS["chunk"], False, F.mse_loss), torch.randn(8, 4), torch.randn(8, 3)
    net = kfac_fx.compile(model, (x, y))
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(x, y)], mode="empirical", case="row", damping=1.0)
    wanted = gradients((model.outputs(x) - y).square().sum(1), model)
    torch.testing.assert_close(plain_scores(spectrum, kfac_fx.Batch(x, y)), wanted.square().sum(1))
    torch.testing.assert_close(trace(spectrum), wanted.square().sum() / 8)


@pytest.mark.filterwarnings("ignore:.* have no target, and the input factors A")
@pytest.mark.parametrize("size", [4, 7, 10])
def test_rows_of_words_that_are_cut_anywhere_are_of_their_texts(size: int) -> None:
    """Ten rows of 5 texts of 4 words look like two words of each text."""
    model, ids, y = Words(size), torch.randint(6, (5, 4)), torch.randint(6, (5, 4))
    y[torch.rand(5, 4) < 0.3] = -1
    y[:, 0] = 1
    net = kfac_fx.compile(model, (ids, y), approximations={"scale": "generic"})
    batch = kfac_fx.Batch(ids, y)
    spectrum = kfac_fx.fit_spectrum(net, [batch], mode="empirical", damping=1.0)
    losses = F.cross_entropy(model.outputs(ids), y.flatten(), ignore_index=-1, reduction="none")
    of_texts, of_rows = gradients(losses.view(5, 4).sum(1), model), gradients(losses, model)
    torch.testing.assert_close(plain_scores(spectrum, batch), of_texts.square().sum(1))
    torch.testing.assert_close(trace(spectrum.correct([batch], "sequence")), of_texts.square().sum() / 5)
    torch.testing.assert_close(trace(spectrum.correct([batch], "row")), of_rows.square().sum() / (y != -1).sum())


def test_cases_that_meet_are_found_where_the_rows_of_pieces_are_not_known() -> None:
    """The targets are computed, so that nothing tells which rows a piece has."""

    class Computed(InPieces):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y.sort().values)

    model, x, y = Computed(lambda rows: rows.split(3), True), torch.randn(8, 4), torch.randint(3, (8,))
    net = kfac_fx.compile(model, (x, y))
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(x, y)], mode="empirical", damping=1.0)
    with pytest.raises(
        kfac_fx.LossError, match=r"a loss with inputs of shape \[3, 3\], so the rows of an example are not"
    ):
        spectrum.self_scores(kfac_fx.Batch(x, y))


def test_targets_that_are_computed_from_parameters_are_cut_as_before() -> None:
    """As those of a model that teaches itself."""

    class Taught(InPieces):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            outputs = self.outputs(x)
            pairs = zip(self.cut(outputs), self.cut(self.outputs(-x).detach().softmax(-1)), strict=True)
            return torch.stack([F.cross_entropy(*pair, reduction="sum") for pair in pairs]).sum() / len(x)

    model, x = Taught(CUTS["split"], False), torch.randn(8, 4)
    net = kfac_fx.compile(model, (x,))
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="empirical", damping=1.0)
    targets = model.outputs(-x).detach().softmax(-1)
    wanted = gradients(F.cross_entropy(model.outputs(x), targets, reduction="none"), model)
    torch.testing.assert_close(plain_scores(spectrum, x), wanted.square().sum(1))


def test_pieces_whose_sizes_are_those_of_outputs_are_known_or_taken_as_they_are() -> None:
    class Halves(InPieces):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            outputs = self.outputs(x)
            half = outputs.shape[0] // 2
            pairs = (outputs[:half], y[:half]), (outputs[half:], y[half:])
            return torch.stack([F.cross_entropy(*pair, reduction="sum") for pair in pairs]).sum() / len(x)

    model, x, y = Halves(CUTS["split"], False), torch.randn(8, 4), torch.randint(3, (8,))
    net = kfac_fx.compile(model, (x, y))
    for cases in (8, 5):
        batch = kfac_fx.Batch(x[:cases], y[:cases])
        spectrum = kfac_fx.fit_spectrum(net, [batch], mode="empirical", damping=1.0)
        wanted = gradients(F.cross_entropy(model.outputs(x[:cases]), y[:cases], reduction="none"), model)
        torch.testing.assert_close(plain_scores(spectrum, batch), wanted.square().sum(1))
