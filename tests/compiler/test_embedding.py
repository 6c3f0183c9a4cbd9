"""Rows of embeddings and bags: which ids a row stands for, and which ids have no row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.layers import embedding as forms
from kfac_fx.passes.matrix import Layout, Shape

WEIGHT: dict[str, Any] = {"weight": (5, 3)}
BAG = {**WEIGHT, "offsets": None, "per_sample_weights": None, "include_last_offset": False, "padding_idx": None}


@pytest.mark.parametrize(("padding", "rows"), [(None, [[0, 2, 4]]), (2, [[0, -1, 4]]), (-1, [[0, 2, -1]])])
def test_padding_has_no_row_also_when_counted_from_the_end(padding: int | None, rows: list[list[int]]) -> None:
    attrs = {**WEIGHT, "padding_idx": padding}
    assert forms.ids_as_rows(torch.tensor([[0, 2, 4]]), attrs).tolist() == rows


def test_ids_of_all_dimensions_but_the_first_are_positions() -> None:
    ids = torch.arange(12).view(2, 3, 2) % 5
    assert torch.equal(forms.ids_as_rows(ids, {**WEIGHT, "padding_idx": None}), ids.view(2, 6))
    assert forms.ids_as_rows(torch.tensor(3), {**WEIGHT, "padding_idx": None}).tolist() == [[3]]


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (torch.arange(4), (1, 4)),  # the same positions in all cases
        (torch.arange(4).unsqueeze(0), (1, 4)),
        (torch.arange(8).view(2, 4), (2, 4)),
    ],
)
def test_ids_without_cases_are_rows_that_all_cases_share(ids: Tensor, rows: Shape) -> None:
    attrs = {**WEIGHT, "padding_idx": None, "base": torch.zeros(2, 4, 3)}
    assert torch.equal(forms.shared_ids(ids, attrs), ids.view(rows))


def test_ids_are_repeated_for_every_position_that_they_are_added_to() -> None:
    attrs = {**WEIGHT, "padding_idx": None, "base": torch.zeros(2, 3, 2, 3)}
    assert forms.shared_ids(torch.tensor([4, 1]), attrs).tolist() == [[4, 1] * 3]


class Scaled(nn.Module):
    """Tokens with positions that are scaled by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(20, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1])) * 4**-0.5
        y: Tensor = self.head(torch.tanh(self.words(ids) + places))
        return y


@pytest.mark.usefixtures("float64")
def test_scaled_positions_have_the_block_of_their_table_and_the_scores_of_autograd() -> None:
    torch.manual_seed(0)
    model, ids = Scaled(), torch.randint(9, (5, 7))
    net = kfac_fx.compile(model, (ids[:3, :6],), loss="categorical", strict=True)
    assert {str(registration) for registration in net.registrations} >= {"embedding(places.weight)"}
    targets = torch.randint(9, (5, 7))
    batch = kfac_fx.Batch(ids, targets=targets)
    scores = kfac_fx.fit_spectrum(net, [batch]).at(scale=0.0, damping=1.0).self_scores(batch)
    losses = F.cross_entropy(model(ids).mT, targets, reduction="none").sum(1)
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    wanted = torch.stack([torch.cat([g.flatten() for g in of_one]).square().sum() for of_one in gradients])
    torch.testing.assert_close(scores, wanted)


def test_trained_tokens_of_a_frozen_table_are_counted_by_their_places() -> None:
    attrs = {"index": torch.tensor([4, 1]), "padding_idx": None}
    assert forms.replaced_ids(torch.tensor([[1, 0, 4, 3]]), attrs).tolist() == [[1, -1, 0, -1]]
    assert forms.replaced_ids(torch.tensor([[1, 0, 4, 3]]), {**attrs, "padding_idx": 4}).tolist() == [[1, -1, -1, -1]]


def test_indices_are_counted_from_the_front() -> None:
    assert forms.places(torch.tensor([[-1, 0], [-5, 3]]), WEIGHT).tolist() == [[4, 0], [0, 3]]


def test_an_entry_of_several_dimensions_is_one_column_of_the_matrix() -> None:
    weight, ids = torch.randn(5, 2, 3), torch.tensor([[4, 0], [1, 1]])
    attrs = {"weight": (5, 2, 3)}
    matrix = forms.flat_entries(Layout((5, 2, 3)), attrs).apply(weight)
    assert matrix.shape == (1, 6, 5)
    assert torch.equal(forms.entry_rows(weight[ids], attrs), matrix[0].mT[ids])


def test_a_whole_table_has_a_row_for_every_entry() -> None:
    table = torch.randn(2, 4, 3)
    assert torch.equal(forms.every_id(table, {}), torch.arange(8).view(1, 8))
    matrix = forms.rows_of_table(Layout((2, 4, 3)), {}).apply(table)
    assert torch.equal(matrix[0].mT, table.view(8, 3))


def test_a_bag_counts_every_id() -> None:
    rows = forms.bag_rows(torch.tensor([[0, 3, 3], [2, 1, 2]]), {**BAG, "mode": "sum"})
    assert rows.tolist() == [[[1, 0, 0, 2, 0]], [[0, 1, 2, 0, 0]]]


def test_the_mean_of_a_bag_has_the_shares_of_its_ids_without_padding() -> None:
    attrs = {**BAG, "mode": "mean", "padding_idx": 3}
    rows = forms.bag_rows(torch.tensor([[0, 3, 3, 1], [3, 3, 3, 3]]), attrs)
    assert rows.tolist() == [[[0.5, 0.5, 0, 0, 0]], [[0, 0, 0, 0, 0]]]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_flat_bags_end_where_the_next_ones_begin(mode: str, last: bool) -> None:
    ids, offsets, weight = torch.tensor([0, 3, 3, 1, 4]), torch.tensor([0, 2, 2, 5][: 3 + last]), torch.randn(5, 3)
    attrs = {**BAG, "mode": mode, "offsets": offsets, "include_last_offset": last}
    wanted = F.embedding_bag(ids, weight, offsets, mode=mode, include_last_offset=last)
    torch.testing.assert_close(forms.bag_rows(ids, attrs)[:, 0] @ weight, wanted)


def test_weights_of_ids_add_up() -> None:
    rows = forms.bag_rows(
        torch.tensor([[0, 3, 3]]), {**BAG, "mode": "sum", "per_sample_weights": torch.tensor([[0.5, 2.0, 3.0]])}
    )
    assert rows.tolist() == [[[0.5, 0, 0, 5, 0]]]


@pytest.mark.parametrize(
    ("changed", "taken"),
    [({}, True), ({"mode": "max"}, False), ({"mode": 2}, False), ({"max_norm": 1.0}, False),
     ({"scale_grad_by_freq": True}, False)],
)  # fmt: skip
def test_which_bags_are_linear(changed: dict[str, Any], taken: bool) -> None:
    assert forms.plain_bag({"mode": "sum", "max_norm": None, "scale_grad_by_freq": False, **changed}) is taken


@pytest.mark.parametrize(
    ("max_norm", "by_frequency", "taken"), [(None, False, True), (1.0, False, False), (None, True, False)]
)
def test_an_embedding_that_changes_its_weight_or_gradient_is_none(
    max_norm: float | None, by_frequency: bool, taken: bool
) -> None:
    assert forms.leaves_weight_alone({"max_norm": max_norm, "scale_grad_by_freq": by_frequency}) is taken
