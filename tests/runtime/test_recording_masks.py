"""Padding masks at record time: from `padding_mask=` to a node or a tensor, and losses without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.losses import Categorical
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Note, Options, Program
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.padding import OTHER_SEQUENCES
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.masks import (
    LISTED_USES,
    dims_in,
    listed_misfits,
    listed_notes,
    mask_of_call,
    program_with_mask,
)
from kfac_fx.recording.output_losses import perturbed, real_losses

X, MASK = torch.randn(5, 7, 3), torch.arange(7) < torch.tensor([7, 3, 5, 2, 6])[:, None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.linear(x) if mask is None else self.linear(x * mask.unsqueeze(-1))


def program(*inputs: Any) -> Program:
    return run(trace_model(Model(), inputs, options=Options(loss_given=True), layers=LAYERS).program)


@pytest.mark.parametrize("declared", ["mask", lambda x, mask: mask != 0], ids=["argument", "function"])
def test_the_mask_is_a_node_of_the_graph_and_every_use_has_it(declared: Any) -> None:
    masked = program_with_mask(program(X, MASK), declared, Model(), (X, MASK), {})
    assert masked.mask is not None and masked.unmasked == ()
    assert [use.mask_dims for registration in masked.registrations for use in registration.uses] == [(0, 1)]


class Distances(nn.Module):
    """Its centers are generic; it returns a loss of shifted tokens, or logits."""

    def __init__(self, returns_loss: bool) -> None:
        super().__init__()
        self.words, self.head, self.centers = nn.Embedding(9, 3), nn.Linear(3, 9), nn.Parameter(torch.randn(3, 3))
        self.returns_loss = returns_loss

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cdist(self.words(ids), self.centers))
        return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:]) if self.returns_loss else logits


@pytest.mark.parametrize("returns_loss", [True, False])
def test_the_report_counts_the_places_of_generic_parameters_beside_a_mask(returns_loss: bool) -> None:
    ids = torch.randint(9, (4, 7))
    masked: dict[str, Any] = {} if returns_loss else {"loss": "categorical", "padding_mask": lambda ids: ids != 0}
    net = kfac_fx.compile(Distances(returns_loss), (ids,), **masked)
    (row,) = (row for row in net.report.rows if row.generic)
    assert row.names == "centers" and row.uses == 1
    assert (net.program.mask is None) is returns_loss
    assert [use.mask_dims for registration in net.registrations for use in registration.uses] == [(0, 1), (0, 1)]


def test_a_call_without_the_argument_has_no_mask() -> None:
    plain = program(X)
    assert program_with_mask(plain, "mask", Model(), (X,), {}) is plain
    assert mask_of_call("mask", Model(), (X,), {}) is None


@pytest.mark.parametrize("call", [((X, MASK), {}), ((X,), {"mask": MASK})], ids=["position", "keyword"])
def test_the_mask_of_a_call_is_its_argument(call: Any) -> None:
    assert mask_of_call("mask", Model(), *call) is MASK


class Open(Model):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        return super().forward(x, **others)


def test_a_mask_may_be_one_of_any_keywords() -> None:
    assert mask_of_call("mask", Open(), (X,), {"mask": MASK}) is MASK
    assert mask_of_call("mask", Open(), (X,), {}) is None


@pytest.mark.parametrize("call", [((X, MASK), {}), ((), {"x": X, "attention_mask": MASK})], ids=["place", "keyword"])
def test_a_mask_that_only_kwargs_take_and_no_call_has_is_told_once(call: Any) -> None:
    net = kfac_fx.compile(Open(), loss="normal", padding_mask="attn_mask")
    args, kwargs = call
    with pytest.warns(UserWarning, match=r"'attn_mask' is in no call so far.*Did you mean 'attention_mask'\?") as told:
        net(*args, **kwargs)
        net(X, mask=MASK)
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [{}, {"mask": MASK}], ids=["without a mask", "with it"])
def test_a_mask_that_kwargs_take_may_be_left_out(first: dict[str, Tensor]) -> None:
    net = kfac_fx.compile(Open(), loss="normal", padding_mask="mask")
    for kwargs in (first, {"mask": MASK}, {"attention_mask": MASK}):
        net(X, **kwargs)


@pytest.mark.parametrize(("notes", "more"), [(LISTED_USES, ""), (LISTED_USES + 1, "  and 1 more, in net.report")])
def test_long_lists_of_uses_are_cut_off_where_they_become_shorter(notes: int, more: str) -> None:
    lines = listed_notes([Note(f"use {n}", "no rows") for n in range(notes)]).splitlines()
    assert lines[:LISTED_USES] == [f"  use {n}  no rows" for n in range(LISTED_USES)]
    assert lines[LISTED_USES:] == ([more] if more else [])


def test_steps_of_other_sequences_are_one_paragraph() -> None:
    others = [
        Note(f"linear({name}.weight) at linear_{n}", OTHER_SEQUENCES) for n in range(9) for name in ("att", "out")
    ]
    lines = listed_misfits([*others, Note("use", "no rows")]).splitlines()
    assert lines[0].split() == ["use", "no", "rows"] and len(lines) == 2
    assert lines[1].startswith("  linear(att.weight), linear(out.weight): their steps are of other sequences than")
    assert "expected of a decoder" in lines[1] and listed_misfits(others) == lines[1]


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ("masks", r"padding_mask='masks' is no argument of Model\.forward\. Did you mean 'mask'\?"),
        ("padding", r"padding_mask='padding' is no argument of Model\.forward\. Its arguments are x and mask\.$"),
        (lambda x, mask: x, r"padding_mask has shape \[.*\], wanted \[cases, positions\], nonzero where a position"),
    ],
)
def test_both_ways_refuse_what_is_no_mask(declared: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        program_with_mask(program(X, MASK), declared, Model(), (X, MASK), {})
    with pytest.raises(RegistrationError, match=reason):
        mask_of_call(declared, Model(), (X, MASK), {})


@pytest.mark.parametrize(
    ("sizes", "dims"), [((5, 7, 2), (0, 1)), ((5, 2, 7), (0, 2)), ((35, 2), (0, 0)), ((5, 2), None), ((7, 5), None)]
)
def test_cases_come_first_in_an_output_of_which_only_sizes_are_known(sizes: Any, dims: Any) -> None:
    assert dims_in(torch.zeros(sizes), MASK) == dims


def test_as_many_cases_as_positions_are_two_dimensions() -> None:
    assert dims_in(torch.zeros(7, 2, 7), torch.ones(7, 7)) == (0, 2)
    assert dims_in(torch.zeros(7, 2), torch.ones(7, 7)) is None


def test_padding_is_no_case_and_sends_nothing_back() -> None:
    logits = torch.randn(5, 7, 4, requires_grad=True)
    ((_, loss),) = real_losses(lambda outputs: [(1.0, Categorical(outputs[0]))], [logits], [(0, 1)], MASK)
    assert loss.cases == int(MASK.sum())
    (gradient,) = torch.autograd.grad(loss.inputs.square().sum(), logits)
    assert torch.equal(gradient.any(-1), MASK)


def test_a_case_is_neither_padding_nor_ignored() -> None:
    logits, kept = torch.randn(5, 7, 4), torch.arange(35).view(5, 7) % 3 > 0
    ((_, loss),) = real_losses(lambda outputs: [(1.0, Categorical(outputs[0]).keeping(kept))], [logits], [(0, 1)], MASK)
    assert loss.cases == int((MASK & kept).sum()) < int(MASK.sum())


def test_without_dimensions_all_of_an_output_is_real() -> None:
    ((_, loss),) = real_losses(lambda outputs: [(1.0, Categorical(outputs[0]))], [torch.randn(5, 4)], [None], MASK)
    assert loss.cases == 5


def test_a_perturbation_is_seen_by_a_softmax() -> None:
    logits = torch.randn(5, 4)
    assert not torch.isclose(perturbed(logits).softmax(-1), logits.softmax(-1)).all(-1).any()
