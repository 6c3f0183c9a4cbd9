"""Masks of padding on models that are captured in parts: the same statistics as of the whole graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ModelChangedError, RegistrationError
from tests.tables import pairs


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        h = self.inner(x)
        return self.last((h if mask is None else h * mask.unsqueeze(-1)).tanh())


class Tagger(nn.Module):
    """branching: no graph holds it whole; told: its encoder is told what is padding."""

    def __init__(self, branching: bool = True, told: bool = True) -> None:
        super().__init__()
        self.branching, self.told = branching, told
        self.embed, self.encoder, self.head = nn.Embedding(9, 4), Encoder(), nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        h = self.encoder(self.embed(ids), mask if self.told else None)
        if self.branching and h.sum() < -1e9:
            h = h.exp()
        return self.head(h)


class Reader(Tagger):
    """Step by step, and position by position merged."""

    def __init__(self, branching: bool = True, told: bool = True) -> None:
        super().__init__(branching, told)
        self.encoder = Steps()


class Steps(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        h = self.rnn(self.inner(x))[0].transpose(0, 1)
        return self.last(h.reshape(-1, 4)).view(x.shape[1], -1, 4).transpose(0, 1)


class Halves(Tagger):
    """Half of the positions at once, when there are many."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        parts = [ids] if ids.shape[1] < 10 else [*ids.chunk(2, 1)]
        h = torch.cat([self.embed(part) for part in parts], 1)
        return self.head(h if h.sum() > -1e9 else h.exp())


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    longest = max(lengths)
    ids = torch.arange(len(lengths) * longest).view(len(lengths), longest) % 9
    return ids, (torch.arange(longest) < torch.tensor(lengths)[:, None]).double()


FIRST, OTHER = batch(7, 3, 5, 2, 6), batch(6, 3, 5)


def compiled(model: nn.Module, inputs: Any = FIRST, mask: Any = "mask") -> Any:
    return kfac_fx.compile(model.double(), inputs, loss="categorical", padding_mask=mask)


def recorded(net: Any, inputs: Any) -> Any:
    return net.record(inputs, {}, generator=torch.Generator().manual_seed(1))


@pairs(("told", [True, False]), ("mask", {"argument": "mask", "function": lambda ids, mask: mask != 0}))
def test_statistics_are_those_of_the_whole_graph(told: bool, mask: Any) -> None:
    model, whole = Tagger(told=told), Tagger(branching=False, told=told)
    whole.load_state_dict(model.state_dict())
    parts, graph = compiled(model, mask=mask), compiled(whole, mask=mask)
    assert not parts.captures.first.whole
    assert "padding_mask masks 4 of 4 uses" in str(parts.report)
    for inputs in (FIRST, OTHER):
        one, other = recorded(parts, inputs), recorded(graph, inputs)
        assert one.cases == other.cases == int(inputs[1].sum())
        torch.testing.assert_close(one.statistics, other.statistics)


def test_submodules_that_go_step_by_step_are_masked_as_in_the_whole_graph() -> None:
    model, whole = Reader(), Reader(branching=False)
    whole.load_state_dict(model.state_dict())
    parts, graph = compiled(model), compiled(whole)
    assert "padding_mask masks 18 of 18 uses" in str(parts.report) and not graph.program.unmasked
    for inputs in (FIRST, OTHER):
        one, other = recorded(parts, inputs), recorded(graph, inputs)
        torch.testing.assert_close(one.statistics, other.statistics)
        assert float(one.statistics["encoder.rnn.weight_hh_l0", "encoder.rnn.bias_hh_l0"]["count"]) == one.cases


def test_a_ride_leaves_padding_out_too() -> None:
    net, (ids, mask) = compiled(Tagger()), FIRST
    targets = torch.where(mask != 0, ids % 3, -100)
    output, pending = net.record_in_training(FIRST, {})
    torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    found, wanted = pending.moments(), net.record(FIRST, {}, mode="empirical", targets=targets)
    assert found.cases == wanted.cases == 23
    torch.testing.assert_close(found.statistics, wanted.statistics)


def test_a_call_without_a_mask_has_no_padding() -> None:
    net, key = compiled(Tagger(told=False)), ("head.weight", "head.bias")
    assert float(net.record(FIRST, {}).statistics[key]["count"]) == 23
    alone = net.record(FIRST[:1], {})
    assert alone.cases == 35 and float(alone.statistics[key]["count"]) == 35


def test_a_part_of_the_batch_has_its_part_of_the_mask() -> None:
    assert compiled(Tagger()).record(FIRST, {}, fraction=0.4).cases == 10


def test_sizes_that_are_not_clear_are_an_error_with_a_way_out() -> None:
    with pytest.raises(RegistrationError) as failure:
        compiled(Tagger(), batch(3, 2, 1))
    first, advice = str(failure.value).splitlines()
    assert first.startswith("padding_mask has 3 cases and 3 positions, and no captured submodule has inputs of exactly")
    assert advice.startswith("Compile with an example in which the numbers of cases and positions differ")


def test_a_submodule_that_is_called_on_something_else_later_is_an_error() -> None:
    with pytest.warns(UserWarning, match="it is not clear which sizes of encoder are cases and positions"):
        net = compiled(Halves())
    with pytest.raises(ModelChangedError, match=r"has shape \[2, 12\], but embed is called on 2 cases and 6 "):
        net.record(batch(12, 9), {})


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("masks", r"padding_mask='masks' is no argument of Tagger\.forward\. Did you mean 'mask'\?"),
        (lambda ids, mask: ids.unsqueeze(-1), r"padding_mask has shape \[5, 7, 1\], wanted \[cases, positions\]"),
        (lambda ids, mask: 3, r"padding_mask has the type int, wanted \[cases, positions\]"),
    ],
)
def test_what_is_no_mask_is_refused(mask: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        compiled(Tagger(), mask=mask)
