"""Layers behind packed sequences: a padding mask and targets of -100 fit them, and nothing is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import kfac_fx
from kfac_fx import KFAC
from tests.tables import pairs

LENGTHS = torch.tensor([3, 5, 2, 4])


class Reader(nn.Module):
    """The head reads the padding again."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(7, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 7)
        if tied:
            self.out.weight = self.words.weight

    def hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.out(self.hidden(ids, lengths))
        return logits


class WithLoss(Reader):
    def forward(self, ids: Tensor, lengths: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return F.cross_entropy(super().forward(ids, lengths).flatten(0, 1), y.flatten())


class OfOtherCases(Reader):
    """The sequences stay in the order of their lengths."""

    def hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        rows = self.lstm(packed)[0]
        return pad_packed_sequence(PackedSequence(rows.data, rows.batch_sizes), batch_first=True)[0]


def batch(lengths: Tensor = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    ids, y = torch.randint(1, 7, real.shape), torch.randint(7, real.shape)
    return torch.where(real, ids, 0), lengths, torch.where(real, y, -100)


def statistics(net: kfac_fx.CompiledModule, *args: Tensor, y: Tensor | None) -> dict[Any, Tensor]:
    moments = net.record(args, {}, mode="empirical", targets=y)
    named = {(key, name): value for key, of in moments.statistics.items() for name, value in of.items()}
    return named | {("", "cases"): torch.tensor(float(moments.cases))}


def one_by_one(net: kfac_fx.CompiledModule, *args: Tensor, in_forward: bool) -> dict[Any, Tensor]:
    """The sums over the sequences alone; each twice, since torch.export takes a size of 1 as fixed."""
    total: dict[Any, Tensor] = {}
    for n, length in enumerate(LENGTHS.tolist()):
        ids, lengths, y = (value[n : n + 1].repeat(2, *[1] * (value.dim() - 1)) for value in args)
        ids, y = ids[:, :length], y[:, :length]
        given = (ids, lengths, y) if in_forward else (ids, lengths)
        for key, value in statistics(net, *given, y=None if in_forward else y).items():
            total[key] = total.get(key, 0) + value / 2
    return total


class OfArrays(Reader):
    """Lengths are an array, as older code gives them."""

    def hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths.cpu().numpy(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return hidden


class Halved(Reader):
    """Numpy computes with the lengths, which is no part of a graph."""

    def hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        half = np.maximum(lengths.cpu().numpy() // 2, 1)
        packed = pack_padded_sequence(self.words(ids), torch.from_numpy(half), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])[0]


def test_lengths_may_be_an_array() -> None:
    torch.manual_seed(0)
    found = {}
    args, other = batch(), batch(torch.tensor([4, 1, 2, 4]))
    for kind in (Reader, OfArrays):
        torch.manual_seed(1)
        net = kfac_fx.compile(kind(), args[:2], loss="categorical", padding_mask=MASKS["of ids"], strict=True)
        found[kind] = statistics(net, *other[:2], y=other[2])
    for key, value in found[Reader].items():
        torch.testing.assert_close(found[OfArrays][key], value, rtol=0, atol=0)
    halved = kfac_fx.compile(Halved(), args[:2], loss="categorical")
    assert [row.names for row in halved.report.rows if not row.generic] == ["words.weight", "out.{weight, bias}"]


MASKS: dict[str, Callable[..., Tensor]] = {
    "of ids": lambda ids, lengths: ids != 0,
    "of lengths": lambda ids, lengths: torch.arange(ids.shape[1]) < lengths[:, None],
}


@pytest.mark.usefixtures("float64")
@pairs(("tied", [False, True]), ("mask", [*MASKS, None]))
def test_a_packed_batch_is_its_sequences_one_by_one(tied: bool, mask: str | None) -> None:
    """None: the targets in forward tell what is padding."""
    args = batch()
    if mask is None:
        net = kfac_fx.compile(WithLoss(tied), args)
        found = statistics(net, *args, y=None)
    else:
        net = kfac_fx.compile(Reader(tied), args[:2], loss="categorical", padding_mask=MASKS[mask])
        assert not net.program.unmasked
        found = statistics(net, *args[:2], y=args[2])
    expected = one_by_one(net, *args, in_forward=mask is None)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


def told(model: nn.Module, in_forward: bool, **options: Any) -> list[str]:
    """The warnings of a training on batches of several lengths."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = batch()
        net = kfac_fx.compile(model, first if in_forward else first[:2], **options)
        optimizer = KFAC(net)
        for lengths in (LENGTHS, LENGTHS + 1, LENGTHS + 2, LENGTHS):
            optimizer.zero_grad()
            ids, _, y = batch(lengths)
            loss = net(ids, lengths, y) if in_forward else F.cross_entropy(net(ids, lengths).mT, y)
            loss.backward()
            optimizer.step()
    return [str(warning.message) for warning in seen]


@pairs(("mask", [None, *MASKS]), ("tied", [True, False]))  # quick are other pairs than above
def test_training_with_a_mask_or_with_targets_in_forward_warns_of_nothing(tied: bool, mask: str | None) -> None:
    if mask is None:
        assert told(WithLoss(tied), True) == []
    else:
        assert told(Reader(tied), False, loss="categorical", padding_mask=MASKS[mask]) == []


def test_padding_that_nobody_names_is_told_once_with_remedies_that_end_it() -> None:
    (message,) = told(Reader(), False, loss="categorical")
    assert message.startswith("the trained loss leaves out 6 of 20 cases") and "padding_mask=" in message


def test_padding_among_cases_is_told_once_for_all_lengths() -> None:
    messages = told(OfOtherCases(), False, loss="categorical", padding_mask=MASKS["of ids"])
    assert sum(message.startswith("padding may count as cases") for message in messages) == 1
    assert len(messages) == len({message[:30] for message in messages})


def test_a_mask_does_not_fit_cases_that_stay_sorted() -> None:
    ids, lengths, _ = batch()
    with pytest.warns(UserWarning, match="padding"):
        net = kfac_fx.compile(OfOtherCases(), (ids, lengths), loss="categorical", padding_mask=MASKS["of ids"])
    (note,) = net.program.unmasked
    assert "out.weight" in note.subject and note.reason.startswith("positions are moved by sort")


class Copying(nn.Module):
    """An encoder of x, and a decoder of another sequence that is as long, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.step, self.out = nn.RNN(4, 4, batch_first=True), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        state, states = (self.read(x)[0] * mask.unsqueeze(-1)).sum(1), []
        for step in range(other.shape[1]):
            state = torch.tanh(self.step(torch.cat([other[:, step], state], 1)))
            states.append(state)
        logits: Tensor = self.out(torch.stack(states, 1))
        return logits


def test_the_mask_of_an_encoder_is_none_of_its_decoder() -> None:
    """Also where both sequences are equally long: their padding is another."""
    x, other, mask = torch.randn(4, 5, 4), torch.randn(4, 5, 4), torch.ones(4, 5)
    with pytest.warns(UserWarning) as seen:
        net = kfac_fx.compile(Copying(), (x, other, mask), loss="categorical", padding_mask=of_x)
    fit, cases = (str(warning.message) for warning in seen)
    assert "linear(step.weight, step.bias), linear(out.weight, out.bias): their steps are of other sequences" in fit
    assert cases.startswith("padding may count as cases of the Categorical loss")
    masked = {name for r in net.registrations for use in r.uses if use.mask_dims for name in r.parameters}
    assert masked == {name for name, _ in net.model.named_parameters() if name.startswith("read.")}


class CopyingLoss(Copying):
    def forward(self, x: Tensor, other: Tensor, mask: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return F.cross_entropy(super().forward(x, other, mask).flatten(0, 1), y.flatten())


def of_x(x: Tensor, *_: Tensor) -> Tensor:
    return x.abs().sum(-1) > 0


def trained_decoder(model: nn.Module, in_forward: bool, **options: Any) -> list[str]:
    x, other, mask = torch.randn(4, 5, 4), torch.randn(4, 5, 4), torch.ones(4, 5)
    y = torch.randint(3, (4, 5)).masked_fill(torch.arange(5) > 2, -100)
    args = (x, other, mask, y) if in_forward else (x, other, mask)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = kfac_fx.compile(model, args, padding_mask=of_x, **options)
        optimizer = KFAC(net)
        loss = net(*args) if in_forward else F.cross_entropy(net(*args).mT, y)
        loss.backward()
        optimizer.step()
    return [str(warning.message) for warning in seen]


def test_a_decoder_whose_padding_is_left_out_has_a_remedy() -> None:
    *_, last = trained_decoder(Copying(), False, loss="categorical")
    assert "padding_mask does not fit these outputs. If the targets are the next tokens, the last real position" in last
    (message,) = trained_decoder(CopyingLoss(), True)
    assert message.endswith("It is in nothing else if forward computes the loss, from targets of -100.")
