"""Divided models whose layers have their cases along another dimension than the first are refused, in words."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.divide import cause_and_answer

N, D, C, WORDS = 5, 4, 3, 9
OTHER_CASES = "has a layer with another dimension of cases than the first"
LENGTHS = torch.tensor([6, 5, 3, 2, 4])
Fields = namedtuple("Fields", "text lengths")


class Encoder(nn.Module):
    """Attention in a part of a model that Python divides: the encoder branches on values in its own forward."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, C)
        self.layer = nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=batch_first)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        h = self.words(ids)
        h = h if float(h.detach().sum()) > -1e9 else -h
        return self.head(self.layer(h, src_key_padding_mask=padding))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """A part that takes indices and a mask of them."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(WORDS, D), nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.dim = 1 if batch_first else 0

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        h = self.words(ids)
        return self.attention(h, h, h, key_padding_mask=padding)[0].mean(self.dim)  # type: ignore[no-any-return]


class Packed(nn.Module):
    """A part that takes indices and the lengths of their sequences, and returns one row a case in both layouts."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, D), nn.LSTM(D, D, batch_first=batch_first)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        first = self.inner.batch_first
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=first, enforce_sorted=False)
        return self.inner(packed)[1][0][-1]  # type: ignore[no-any-return]


class Started(nn.Module):
    """A part that starts from a state [layers, cases, features], and returns only the last one."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, D), nn.GRU(D, D, batch_first=batch_first)

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        cases = ids.shape[0 if self.inner.batch_first else 1]
        return self.inner(self.words(ids), self.words.weight.new_zeros(1, cases, D))[1][0]  # type: ignore[no-any-return]


class Branch(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(D, C)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        h = self.part(ids, other)
        return self.head(h if float(h.detach().sum()) > -1e9 else -h)  # type: ignore[no-any-return]


def branched(part: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
    return lambda batch_first: Branch(part(batch_first))


BUILDS: dict[str, Callable[[bool], nn.Module]] = {
    "attention": Encoder,
    "indices and a mask": branched(Whole),
    "indices and lengths": branched(Packed),
    "a state": branched(Started),
}


def built(name: str, batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    return BUILDS[name](batch_first).double().eval()


def inputs(name: str, positions: int) -> tuple[Tensor, Tensor]:
    """[N, positions] and a mask or lengths."""
    ids = torch.randint(WORDS, (N, positions), generator=torch.Generator().manual_seed(1))
    lengths = LENGTHS.clamp(max=positions)
    return ids, lengths if "lengths" in name else torch.arange(positions) >= lengths[:, None]


def squared_norms(model: nn.Module, losses: list[Tensor]) -> Tensor:
    """The squared norm of the gradient of every loss, by autograd."""
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    return torch.stack([sum(g.square().sum() for g in of_one) for of_one in gradients])  # type: ignore[misc]


def self_scores(net: Any, batch: kfac_fx.Batch) -> Tensor:
    return kfac_fx.fit_spectrum(net, [batch]).at(scale=0.0, damping=1.0).self_scores(batch)


@pytest.mark.parametrize("positions", [6, N])
@pytest.mark.parametrize("name", BUILDS)
def test_positions_first_are_refused_whatever_the_sizes(name: str, positions: int) -> None:
    """A mask [cases, positions] was taken for an input with the cases first, so scores were of positions."""
    ids, other = inputs(name, positions)
    with pytest.raises(UntraceableError, match=OTHER_CASES) as caught:
        kfac_fx.compile(built(name, False), (ids.T.contiguous(), other), loss="categorical")
    assert "torch gave up in" in str(caught.value) and "float(h.detach().sum())" in str(caught.value)
    assert "write batch_first=True" in str(caught.value)


@pytest.mark.parametrize("name", BUILDS)
def test_cases_first_have_the_scores_of_autograd(name: str) -> None:
    model, (ids, other) = built(name, True), inputs(name, 6)
    net = kfac_fx.compile(model, (ids, other), loss="categorical")
    assert net.program.submodules
    outputs = model(ids, other)
    targets = torch.randint(C, outputs.shape[:-1])
    losses = [
        F.cross_entropy(y.view(-1, C), t.view(-1), reduction="sum") for y, t in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(
        self_scores(net, kfac_fx.Batch(ids, other, targets=targets)), squared_norms(model, losses)
    )


def test_the_user_may_say_that_the_first_dimension_counts_the_cases() -> None:
    model, (ids, other) = built("attention", False), inputs("attention", 6)
    args = ids.T.contiguous(), other
    net = kfac_fx.compile(model, args, loss="categorical", batch_dim=0)
    targets = torch.randint(C, (6, N))
    rows = zip(model(*args), targets, strict=True)
    losses = [F.cross_entropy(y, t, reduction="sum") for y, t in rows]
    scores = self_scores(net, kfac_fx.Batch(*args, targets=targets))
    torch.testing.assert_close(scores, squared_norms(model, losses))


class Translator(nn.Module):
    """Positions first. `forced`: Python's random numbers decide whether a step sees the target; they always say yes."""

    def __init__(self, forced: bool) -> None:
        super().__init__()
        self.words, self.encoder, self.decoder = nn.Embedding(WORDS, D), nn.GRU(D, D), nn.GRU(D, D)
        self.head, self.forced = nn.Linear(D, WORDS), forced

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h, token, outputs = self.encoder(self.words(source))[1], target[0], []
        for step in range(1, target.shape[0]):
            y, h = self.decoder(self.words(token).unsqueeze(0), h)
            outputs.append(self.head(y.squeeze(0)))
            sees = random.random() < 2.0 if self.forced else True
            token = target[step] if sees else outputs[-1].argmax(1)
        return torch.stack(outputs)


def test_factors_of_a_model_with_positions_first_do_not_depend_on_what_counts_the_cases() -> None:
    """Without random numbers of Python it is one graph, which knows that its cases are second."""
    args = torch.randint(WORDS, (6, N)), torch.randint(WORDS, (4, N))
    factors = []
    for forced in (True, False):
        torch.manual_seed(0)
        model = Translator(forced).double()
        if forced:
            with pytest.raises(UntraceableError, match="or to train with a loss that is named, write .*batch_dim=0"):
                kfac_fx.compile(model, args, loss="categorical")
        net = kfac_fx.compile(model, args, loss="categorical", batch_dim=0 if forced else None)
        assert bool(net.program.submodules) is forced
        found = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="exact")
        found.update_covariances(*args)
        keys = [registration.parameters for registration in net.registrations]
        factors.append({key: {side: found.blocks[key].factors[side].value for side in "AG"} for key in keys})
    assert factors[0].keys() == factors[1].keys()
    for key, sides in factors[0].items():
        torch.testing.assert_close(sides, factors[1][key])


class OwnAttention(nn.Module):
    """Attention without a layer of torch; `positions` is their dimension."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.words, self.mix, self.head, self.positions = (
            nn.Embedding(WORDS, D),
            nn.Linear(D, D),
            nn.Linear(D, C),
            positions,
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        rows = self.mix(h if float(h.detach().sum()) > -1e9 else -h).transpose(0, 1 - self.positions)
        attended = F.scaled_dot_product_attention(rows, rows, rows).transpose(0, 1 - self.positions)
        return self.head(attended + h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [6, N])
def test_outputs_that_mix_along_the_first_dimension_alone_are_refused(length: int) -> None:
    torch.manual_seed(0)
    ids = inputs("attention", length)[0]
    model = OwnAttention(0).double()
    with pytest.raises(UntraceableError, match="would be a guess.* not along dimension 1") as caught:
        kfac_fx.compile(model, (ids.T.contiguous(),), loss="categorical")
    assert "and there is none: torch gave up in" in str(caught.value)
    assert kfac_fx.compile(model, (ids.T.contiguous(),), loss="categorical", batch_dim=0).program.submodules
    model = OwnAttention(1).double()
    net, targets = kfac_fx.compile(model, (ids,), loss="categorical"), torch.randint(C, ids.shape)
    assert net.program.submodules
    losses = [F.cross_entropy(y, t, reduction="sum") for y, t in zip(model(ids), targets, strict=True)]
    scores = self_scores(net, kfac_fx.Batch(ids, targets=targets))
    torch.testing.assert_close(scores, squared_norms(model, losses))


class OfFields(nn.Module):
    """Its batch has fields, as those of torchtext do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(WORDS, D), nn.LSTM(D, D), nn.Linear(D, C)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.inner(self.words(batch.text))[1][0][-1])  # type: ignore[no-any-return]


class Plain:
    def __init__(self, text: Tensor) -> None:
        self.text = text


def test_the_refusal_says_that_the_batch_is_an_object_and_what_to_write() -> None:
    torch.manual_seed(0)
    model, ids = OfFields().double(), inputs("lengths", 6)[0].T.contiguous()
    with pytest.raises(UntraceableError, match=OTHER_CASES) as caught:
        kfac_fx.compile(model, (Plain(ids),), loss="categorical")
    said = str(caught.value)
    assert "OfFields takes Plain, objects that hold tensors" in said and "namedtuple" in said
    assert said.index("namedtuple") < said.index("Change this, and the model is one graph.")
    fields = Fields(ids, LENGTHS)
    net = kfac_fx.compile(model, (fields,), loss="categorical")
    assert not net.program.submodules
    targets = torch.randint(C, (N,))
    losses = [F.cross_entropy(y, t, reduction="sum") for y, t in zip(model(fields), targets, strict=True)]
    scores = self_scores(net, kfac_fx.Batch(fields, targets=targets))
    torch.testing.assert_close(scores, squared_norms(model, losses))


def test_the_cause_names_is_causal_where_torch_looks_for_a_causal_mask() -> None:
    def _detect_is_causal_mask() -> None:
        raise RuntimeError("Could not guard on data-dependent expression")

    error = UntraceableError("Model could not be captured as a graph\nWrite it otherwise.")
    error.advice = "Write it otherwise."
    assert cause_and_answer(error) == str(error)
    try:
        _detect_is_causal_mask()
    except RuntimeError as failure:
        error.__cause__ = failure
    assert cause_and_answer(error).startswith(
        "Model could not be captured as a graph\ntorch reads the values of the mask"
    )
    assert "is_causal=True" in cause_and_answer(error) and error.advice not in cause_and_answer(error)


class Equal(nn.Module):
    """Python takes the second part alone while both are equal, so the first batch sends no gradient through `key`."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.head = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        key, query = self.key(rows), self.query(rows)
        h = query if torch.equal(key, query) else key * query
        return self.head(h.reshape(x.shape).mean(1))  # type: ignore[no-any-return]


def test_a_layer_that_the_first_gradient_does_not_reach_needs_no_cases() -> None:
    """Its rows are cases and positions in one, which the proof cannot see. A block of gradients of cases raised torch's
    error of a wrong shape at the first step whose gradient reached it."""
    torch.manual_seed(0)
    model = Equal()
    net = kfac_fx.compile(model, (torch.randn(N, 3, D),), loss="categorical")
    (of_key,) = (registration for registration in net.registrations if "key.weight" in registration.parameters)
    assert of_key.approximation == "kron"
    assert of_key.reason == "the first batch sent no gradient through it, which would tell its cases, so not 'full'"
    with torch.no_grad():
        model.key.weight.mul_(1.5)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3)
    x = torch.randn(N, 3, D)
    estimator.update_covariances(x)
    factors = estimator.blocks[of_key.parameters].factors
    normal = F.layer_norm(x, (D,)).reshape(-1, D)
    torch.testing.assert_close(factors["A"].value[:, 0, 0], normal.square().mean(0), rtol=1e-4, atol=1e-5)
    assert bool((factors["G"].value > 0).all())


class Ghost(nn.Module):
    """Ghost batch normalization: the statistics are those of pieces of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(piece) for piece in x.chunk(-(-len(x) // 4), 0)])


class InPieces(nn.Module):
    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.layer, self.ghost, self.head = nn.Linear(D, D), Ghost(), nn.Linear(D, C)
        self.divided = divided

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.divided and float(h.detach().sum()) < -1e9:
            h = -h
        return self.head(self.ghost(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("divided", [False, True])
def test_pieces_of_a_batch_are_not_taken_for_positions_or_for_nodes(divided: bool) -> None:
    """The pieces have no case in common, so their rows are independent. In a divided model the normalization was
    generic, as if a case had several uses of it."""
    torch.manual_seed(0)
    net = kfac_fx.compile(InPieces(divided), (torch.randn(12, D),), loss="categorical")
    (of_norm,) = (registration for registration in net.registrations if "ghost.norm.weight" in registration.parameters)
    assert of_norm.reason == "forward takes its cases in pieces, as those of x.chunk(4), so not 'full'"
    assert of_norm.approximation in ("kron", "kron_indep") and len(of_norm.uses) == 3
