"""Padding masks where a model takes its sequences step by step: the statistics of every sequence on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import kfac_fx
from kfac_fx import FisherEstimator, LayerCollection, ModelChangedError
from kfac_fx.passes.approximations import named
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.graphs.labels import in_example, known_number
from tests.runtime.fisher_cases import sequence_statistics

LENGTHS = (4, 2)
N, T = len(LENGTHS), max(LENGTHS)
I, H, O = 2, 5, 6  # noqa: E741
MASK = torch.tensor([[position < length for position in range(T)] for length in LENGTHS])
pytestmark = pytest.mark.usefixtures("float64")


class Tagger(nn.Module):
    """A prediction at every position."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(H * (1 + rnn.bidirectional), O)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


class Loop(nn.Module):
    """Written out by hand, backward in time if so said; every way to take a position."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.rows, self.state, self.head = nn.Linear(I, H), nn.Linear(H, H), nn.Linear(H, O)
        self.both, self.backward = nn.Linear(H + I, H), backward

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, steps = x.new_zeros(x.shape[0], H), x.shape[1]
        outputs: list[Tensor] = []
        for t in reversed(range(steps)) if self.backward else range(steps):
            now = x[:, t] if t % 2 else x[:, t : t + 1].squeeze(1)
            h = torch.where(mask[:, t : t + 1], torch.tanh(self.rows(now) + self.state(h)), h)
            outputs.append(self.head(torch.tanh(self.both(torch.cat([h, x.select(1, t)], 1)))))
        return torch.stack(outputs[::-1] if self.backward else outputs, 1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(I, H), nn.Linear(H, O)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], H)
        outputs = []
        for row in x.unbind(1):
            h, c = self.cell(row, (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


def statistics(net: kfac_fx.CompiledModule, x: Tensor, mask: Tensor, targets: Tensor) -> dict[Any, Tensor]:
    found = net.record((x, mask), {}, mode="empirical", targets=targets).statistics
    return {(key, name): value for key, statistic in found.items() for name, value in statistic.items()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Tagger(nn.GRU(I, H, batch_first=True)),
    "loop": Loop,
    "cells": Cells,
}


@pytest.mark.parametrize(
    ("name", "approximation"), [("GRU", "kron_series_1"), ("loop", "kron_series_1"), ("cells", "kron_indep")]
)
def test_the_statistics_are_those_of_every_sequence_on_its_own(name: str, approximation: str) -> None:
    model, x = MODELS[name](), torch.randn(N, T, I)
    x[~MASK] = 100.0  # whatever it is
    options: dict[str, Any] = {"loss": "categorical", "approximations": {"*": approximation}, "strict": True}
    net = kfac_fx.compile(model, (x, MASK), padding_mask="mask", **options)
    assert not net.program.unmasked
    plain = kfac_fx.compile(model, (x, MASK), **options)
    targets = torch.randint(O, (N, T))
    expected: dict[Any, Tensor] = {}
    for n, length in enumerate(LENGTHS):  # twice, since torch.export takes a size of 1 as fixed
        own = [tensor[n, :length].repeat(2, *[1] * (tensor.dim() - 1)) for tensor in (x, MASK, targets)]
        for key, value in statistics(plain, *own).items():
            expected[key] = expected.get(key, 0) + value / 2
    found = statistics(net, x, MASK, targets)
    lagged = {key for key, statistic in found if named(statistic).lagged}
    assert found.keys() == expected.keys() and bool(lagged) is (approximation == "kron_series_1")
    for key, value in expected.items():
        if key[1] == "count":
            assert found[key] == value == sum(LENGTHS)
        if key[1] == "pairs":
            assert found[key] == sum(LENGTHS) - len(LENGTHS)
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


def test_steps_backward_in_time_have_the_positions_backward() -> None:
    """The steps after a sequence are seen first, so that it is not on its own; padding enters nothing all the same."""
    model, x = Loop(backward=True), torch.randn(N, T, I)
    kinds = {"*": "kron_series_2"}
    net = kfac_fx.compile(model, (x, MASK), loss="categorical", padding_mask="mask", approximations=kinds)
    found = statistics(net, x, MASK, torch.randint(O, (N, T)))
    real = torch.cat([x[MASK], torch.ones(6, 1)], 1)
    key = "rows.weight", "rows.bias"
    torch.testing.assert_close(found[key, "A"][0], real.mT @ real)
    ones = torch.cat([x, torch.ones(N, T, 1)], 2)
    lag = sum(ones[n, t, :, None] * ones[n, t + 1] for n, length in enumerate(LENGTHS) for t in range(length - 1))
    torch.testing.assert_close(found[key, "A1"][0], lag)


def test_both_directions_of_all_layers_have_their_positions() -> None:
    model, x = Tagger(nn.LSTM(I, H, batch_first=True, num_layers=2, bidirectional=True)), torch.randn(N, T, I)
    net = kfac_fx.compile(model, (x, MASK), loss="categorical", padding_mask="mask")
    assert not net.program.unmasked
    for registration in net.program.registrations[:-1]:
        places = [use.attrs["kept"].arguments[2] for use in registration.uses]  # type: ignore[union-attr]
        assert places == ([3, 2, 1, 0] if "reverse" in registration.parameters[0] else [0, 1, 2, 3])
    found = statistics(net, x, MASK, torch.randint(O, (N, T)))
    assert all(value == 6 for (_, name), value in found.items() if name == "count")


def test_gradients_of_padding_do_not_enter_either() -> None:
    """A prediction from the state behind the padding: its gradient goes through all steps."""

    class Last(Tagger):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0][:, -1])
            return out

    model, x, y = Last(nn.RNN(I, H, batch_first=True)), torch.randn(N, T, I), torch.randint(O, (N,))
    kinds = {nn.RNN: "kron_series_1"}
    net = kfac_fx.compile(model, (x, MASK), loss="categorical", padding_mask="mask", approximations=kinds)
    assert [note.subject.split(" at ")[0] for note in net.program.unmasked] == ["linear(head.weight, head.bias)"]
    found = statistics(net, x, MASK, y)
    w, u, b, c = (p.detach() for p in model.rnn.parameters())
    h, outputs = torch.zeros(N, H), []
    for t in range(T):
        outputs.append((x[:, t] @ w.mT + b + h @ u.mT + c).requires_grad_())
        h = torch.tanh(outputs[-1])
    d = torch.stack(torch.autograd.grad(F.cross_entropy(model.head(h), y, reduction="sum"), outputs), 1)
    assert d[~MASK].abs().max() > 1e-6
    d = d * MASK.unsqueeze(-1)
    key = "rnn.weight_ih_l0", "rnn.bias_ih_l0"
    torch.testing.assert_close(found[key, "G"][0], torch.einsum("nto,ntp->op", d, d))
    torch.testing.assert_close(found[key, "G1"][0], torch.einsum("nto,ntp->op", d[:, 1:], d[:, :-1]))


class OneWeight(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(I, H))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.function(x, self.w)) * mask.unsqueeze(-1)


@pytest.mark.parametrize("form", ["folded", "unfolded", "batch first", "listed"])
def test_a_series_of_ones_own_is_masked_in_every_form(form: str) -> None:
    """Inputs of `register_fully_connected_multi`: a list, or one tensor with a dimension of time."""
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "folded": lambda x, w: (x.transpose(0, 1).reshape(-1, I) @ w).view(T, -1, H).transpose(0, 1),
        "unfolded": lambda x, w: (x.transpose(0, 1) @ w).transpose(0, 1),
        "batch first": lambda x, w: x @ w,
        "listed": lambda x, w: torch.stack([x[:, t] @ w for t in range(T)], 1),
    }
    x, y = torch.randn(N, T, I), torch.randn(N, T, H)
    lc = LayerCollection(kfac_fx.capture(OneWeight(forms[form]), (x, MASK)))
    nodes = [node.name for node in lc.graph.nodes if node.name.startswith("matmul")]
    lc.define_padding_mask("mask")
    uses = nodes if form == "listed" else nodes[0]
    lc.register_fully_connected_multi("w", None, uses, num_uses=None if form == "listed" else T, approx="kron_series_2")
    lc.register_normal_predictive_distribution("mul")
    assert not lc.program.unmasked and not lc.program.unmasked  # a second time, the graph holds parts of the mask
    est = FisherEstimator(lc, estimation_mode="empirical")
    est.update_covariances(x, MASK, targets=y)
    w = dict(lc.model.named_parameters())["w"]
    z = (x @ w).detach().requires_grad_()
    kfac_fx.losses.Normal(torch.tanh(z) * MASK.unsqueeze(-1), targets=y).evaluate().backward()
    assert z.grad is not None
    sums: dict[str, Tensor] = {}
    for n, length in enumerate(LENGTHS):
        rows, grads = (tensor[n, :length, None, None, None] for tensor in (x, z.grad))
        for name, value in sequence_statistics(rows, grads, False, (1, H, I)).items():
            sums[name] = sums.get(name, 0) + value
    factors = est.blocks["w",].factors
    for name in ("A", "G", "A1", "G1"):
        torch.testing.assert_close(factors[name].value, sums[name].view(factors[name].value.shape) / 6)
    assert (factors["positions"].value, factors["pairs"].value) == (6 / 2, 4 / 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_masks_of_steps_compile_into_one_graph() -> None:
    """Whose taps and links take every tensor once: at the first step there is no mask before."""
    model, x, mask = Tagger(nn.RNN(I, H, batch_first=True)), torch.randn(5, 2, I), torch.ones(5, 2)
    mask[1:3, 1] = 0
    options: dict[str, Any] = {"approximations": {nn.RNN: "kron_series_1"}, "padding_mask": "mask"}
    eager, other = (
        kfac_fx.compile(model, (x, mask), loss="categorical", backend=backend, **options)
        for backend in ("eager", "aot_eager")
    )
    targets = torch.randint(O, (5, 2))
    found = statistics(eager, x, mask, targets)
    assert found[("rnn.weight_hh_l0", "rnn.bias_hh_l0"), "pairs"] == 3
    torch.testing.assert_close(statistics(other, x, mask, targets), found)


# --- where it is not clear ------------------------------------------------------------------------------------------


class Refined(nn.Module):
    """As many applications as there are positions, none of which is at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(I, I)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x[:, 0]
        for _ in range(x.shape[1]):
            h = torch.tanh(self.fc(h))
        return h


class Flipped(Refined):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([self.fc(row) for row in x.flip(1).unbind(1)]).sum(0)


class Attended(Refined):
    """Every step sees all positions."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x.mean(1)
        for t in range(x.shape[1]):
            h = torch.tanh(self.fc(h + (x * h.unsqueeze(1)).sum(1) + x[:, t]))
        return h


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Refined, "which of the positions it is at is not clear"),
        (Flipped, "its steps are of other sequences than the mask's, or in another order"),
        (Attended, "which of the positions it is at is not clear"),
    ],
)
def test_uses_whose_positions_are_not_clear_are_named(model: type[nn.Module], reason: str) -> None:
    with pytest.raises(RegistrationError, match=f"padding_mask fits none of the {T} uses") as caught:
        kfac_fx.compile(model(), (torch.randn(N, T, I), MASK), loss="normal", padding_mask="mask")
    assert str(caught.value).count(reason) == T


class Translator(nn.Module):
    """An encoder and a decoder with teacher forcing, each a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.out = nn.RNN(I, H), nn.RNN(I, H), nn.Linear(H, O)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        _, state = self.source(source.transpose(0, 1))
        out: Tensor = self.out(self.target(target.transpose(0, 1), state)[0].transpose(0, 1))
        return out


def masked_of(net: kfac_fx.CompiledModule) -> set[str]:
    return {
        registration.parameters[0]
        for registration in net.program.registrations
        if any(use.mask_dims for use in registration.uses)
    }


@pytest.mark.filterwarnings("ignore:padding_mask does not fit")  # the uses of the other input
def test_a_mask_of_one_of_two_inputs_must_say_of_which() -> None:
    """Unless they have different lengths."""
    source, target = torch.randn(N, T, I), torch.randn(N, T, I)
    options: dict[str, Any] = {"loss": "categorical", "padding_mask": "mask"}
    with pytest.warns(UserWarning, match="padding_mask does not fit") as caught:
        net = kfac_fx.compile(Translator(), (source, target, MASK), **options)
    reason = (
        "its steps may be those of source or of target, and so may the mask; write it as a function of one of them, as "
        "in padding_mask=lambda x, y: x != 0"
    )
    assert reason in {note.reason for note in net.program.unmasked}
    assert reason in str(caught[0].message) and "source.weight_ih_l0" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert not any(name.startswith(("source", "target")) for name in masked_of(net))
    encoder = {"source.weight_ih_l0", "source.weight_hh_l0"}
    with pytest.warns(UserWarning, match="padding may count as cases .* if these rows are never padding"):
        shorter = kfac_fx.compile(Translator(), (source, target[:, :3], MASK), **options)
    assert masked_of(shorter) == encoder
    text = r"source.weight_ih_l0, source.bias_ih_l0  the padding mask fits its uses at first only"
    with pytest.raises(ModelChangedError, match=text):
        shorter.record((source, target, MASK), {})
    with pytest.warns(UserWarning, match="padding may count as cases"):  # outputs are at the positions of the target
        own = kfac_fx.compile(
            Translator(), (source, target, MASK), loss="categorical", padding_mask=lambda s, t, m: s[..., 0] != 0
        )
    assert own.program.mask_dims == (None,)
    assert masked_of(own) >= encoder and not any(name.startswith("target") for name in masked_of(own))


class Packed(nn.Module):
    """A head on the last states of packed sequences: its rows are of cases, and none is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(I, H, batch_first=True), nn.Linear(H, O)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = self.head(self.lstm(packed)[1][0][-1])
        return out


def test_a_head_on_the_last_states_of_packed_sequences_has_no_padding_to_warn_of() -> None:
    """Warnings are errors here."""
    x, lengths = torch.randn(N, T, I), torch.tensor([T, 2, 3, 1, T, 2, 3][:N])
    net = kfac_fx.compile(
        Packed(), (x, lengths), loss="categorical",
        padding_mask=lambda x, lengths: torch.arange(x.shape[1]) < lengths[:, None],
    )  # fmt: skip
    assert not net.program.padded and "other sequences" not in str(net.report)
    assert {note.subject.partition(" at ")[0] for note in net.program.unmasked} == {"linear(head.weight, head.bias)"}


def test_sizes_of_the_example_stay_symbols() -> None:
    """Beside a public way to read them, which ties a symbol to its number in all of the graph."""
    captured = kfac_fx.capture(nn.Linear(I, H), (torch.randn(N, T, I),))
    (x,) = (node for node in captured.program.graph.nodes if node.op == "placeholder")
    cases, *_, width = x.meta["val"].shape
    assert in_example(cases) == N and known_number(cases) is None and str(cases).startswith("s")
    assert in_example(width) == known_number(width) == I and in_example(7) == 7
