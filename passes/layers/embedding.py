"""Embeddings and bags of embeddings: fully connected layers on one-hot rows, or on sums of them.

The rows of an embedding stay integers. The row of a bag counts how often every id is in it, or has the ids' shares.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..approximations import EVERY_LAYER
from ..graphs.operations import REQUIRED, Spelling
from ..ir import Attrs
from ..matrix import Layout
from .declaration import Written, as_rows, layer, written


def ids_as_rows(ids: Tensor, attrs: Attrs) -> Tensor:
    """[N, ...] -> [N, S]."""
    return without_padding(torch.atleast_1d(ids).unsqueeze(1).flatten(1), attrs)


def shared_ids(ids: Tensor, attrs: Attrs) -> Tensor:
    """Ids, broadcast against the [N, ...] of the tensor to add to -> [1, S], or [N, S] if they have N themselves."""
    full = torch.broadcast_shapes(ids.shape, attrs["base"].shape[:-1])
    cases = ids.shape[0] if ids.dim() == len(full) and len(full) else 1
    return without_padding(ids.expand(cases, *full[1:]).unsqueeze(1).flatten(1), attrs)


def without_padding(rows: Tensor, attrs: Attrs) -> Tensor:
    padding = attrs["padding_idx"]
    return rows if padding is None else rows.masked_fill(rows == padding % attrs["weight"][0], -1)


def leaves_weight_alone(attrs: Attrs) -> bool:
    """Whether forward leaves the weight as it is, and the gradient is the loss's: no max_norm, no scaled gradients."""
    return attrs["max_norm"] is None and not attrs["scale_grad_by_freq"]


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 5, shape)


@layer(
    rows=ids_as_rows,
    grad_rows=as_rows,
    layouts={"weight": "i o -> o i"},
    where=leaves_weight_alone,
    leading=True,
    default="kron_in_diag",
    approximations=EVERY_LAYER,
    spelled=Spelling(F.embedding),
    tf_kind="embedding",
    example=(
        lambda: (nn.Embedding(5, 3), ids(4)),
        lambda: (nn.Embedding(5, 3), ids(4, 7, 2)),
        lambda: (nn.Embedding(5, 3, padding_idx=2), ids(4, 7)),
        lambda: (nn.Embedding(5, 3, padding_idx=-1), ids(4, 7)),
    ),
)
def embedding(
    ids: Tensor,
    padding_idx: Any,
    max_norm: Any,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    *,
    weight: Tensor,
) -> Tensor:
    return F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


@embedding.form(
    rows=shared_ids,
    leading=False,
    example=(
        written(lambda x, w: x + F.embedding(torch.arange(4), w), (2, 4, 3), w=(5, 3)),
        written(lambda x, w: F.embedding(torch.arange(4).unsqueeze(0), w) + x, (2, 4, 3), w=(5, 3)),
        written(lambda x, w: x + F.embedding(torch.arange(4), w, padding_idx=-3), (2, 7, 4, 3), w=(5, 3)),
        written(lambda x, w: x + F.embedding(x.argmax(-1), w), (2, 4, 3), w=(5, 3)),
        written(lambda x, w: x + F.embedding(x.argmax(-1), w), (4, 3), w=(5, 3)),
    ),
)
def positions_added(
    ids: Tensor,
    base: Tensor,
    padding_idx: Any,
    max_norm: Any,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    *,
    weight: Tensor,
) -> Tensor:
    return base + F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def times_factor(dy: Tensor, attrs: Attrs) -> Tensor:
    return as_rows(dy * attrs["factor"], attrs)


@embedding.form(
    rows=shared_ids,
    grad_rows=times_factor,
    leading=False,
    where=lambda attrs: leaves_weight_alone(attrs) and isinstance(attrs["factor"], int | float),
    example=(
        written(lambda x, w: x + F.embedding(torch.arange(4), w) * 0.5, (2, 4, 3), w=(5, 3)),
        written(lambda x, w: 3 * F.embedding(torch.arange(4).unsqueeze(0), w, padding_idx=1) + x, (2, 4, 3), w=(5, 3)),
    ),
)
def scaled_positions_added(
    ids: Tensor,
    base: Tensor,
    padding_idx: Any,
    max_norm: Any,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    factor: float,
    *,
    weight: Tensor,
) -> Tensor:
    return base + F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse) * factor


# --- a frozen table of which some entries are replaced by trained ones ----------------------------------------------


def replaced_ids(ids: Tensor, attrs: Attrs) -> Tensor:
    """Ids [N, ...] -> their places in `index` [N, S]; -1 for ids that are not in it."""
    rows = torch.atleast_1d(ids).unsqueeze(1).flatten(1)
    if attrs["padding_idx"] is not None:
        rows = rows.masked_fill(rows == attrs["padding_idx"], -1)
    same = rows.unsqueeze(-1) == attrs["index"]
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def trained_tokens(x: Tensor, w: Tensor) -> Tensor:
    return F.embedding(x, torch.index_copy(torch.ones(5, 3), 0, torch.tensor([4, 1]), w), padding_idx=0)


@embedding.form(
    rows=replaced_ids,
    where=lambda attrs: (
        leaves_weight_alone(attrs) and (attrs["padding_idx"] or 0) >= 0
    ),  # -1 is the last of an unknown number
    example=lambda: (Written(trained_tokens, {"w": (2, 3)}), ids(4, 7)),
)
def embedding_replaced(
    ids: Tensor,
    _base: Tensor,
    index: Tensor,
    padding_idx: Any,
    max_norm: Any,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    *,
    weight: Tensor,
) -> Tensor:
    table = torch.index_copy(_base, 0, index, weight)
    return F.embedding(ids, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


# --- indexing -------------------------------------------------------------------------------------------------------


def places(ids: Tensor, attrs: Attrs) -> Tensor:
    """Indices [N, ...] -> [N, S], counted from the front."""
    return torch.remainder(torch.atleast_1d(ids).unsqueeze(1).flatten(1), attrs["weight"][0])


def entry_rows(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., *entry] -> [N, S, o]"""
    return as_rows(dy.reshape(*dy.shape[: dy.dim() + 1 - len(attrs["weight"])], -1), attrs)


def flat_entries(weight: Layout, attrs: Attrs) -> Layout:
    number, *entry = weight.result
    return weight.reshape((1, number, math.prod(entry))).permute((0, 2, 1))


INDEXED: dict[str, Any] = {
    "rows": places,
    "grad_rows": entry_rows,
    "where": lambda attrs: len(attrs["weight"]) > 0,
    "layouts": {"weight": flat_entries},
}


@embedding.form(
    **INDEXED,
    example=(
        lambda: (Written(lambda x, w: w[x], {"w": (5, 3)}), ids(4, 7) - 5),
        lambda: (Written(lambda x, w: w[x], {"w": (5, 2, 3)}), ids(4)),
        lambda: (Written(lambda x, w: w[x], {"w": (5,)}), ids(4, 7)),
    ),
)
def indexed(ids: Tensor, *, weight: Tensor) -> Tensor:
    return weight[ids]


@embedding.form(
    **INDEXED, example=lambda: (Written(lambda x, w: torch.ops.aten.index.Tensor(w, [x]), {"w": (5, 3)}), ids(4, 7))
)
def indexed_as_exported(ids: Tensor, *, weight: Tensor) -> Tensor:
    return torch.ops.aten.index.Tensor(weight, [ids])  # type: ignore[no-any-return]


@embedding.form(
    **INDEXED, example=lambda: (Written(lambda x, w: torch.index_select(w, 0, x), {"w": (5, 2, 3)}), ids(4))
)
def index_selected(ids: Tensor, *, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids)  # `torch.index_select` may be a function of another library, see `public`


def places_by_dimensions(ids: Tensor, attrs: Attrs) -> Tensor:
    """Indices of the first two dimensions, which broadcast -> [N, S], places in the flattened table."""
    first, second = torch.broadcast_tensors(ids, attrs["second"])
    rows, columns = attrs["weight"][:2]
    flat: Tensor = torch.atleast_1d(first % rows * columns + second % columns)
    return flat.unsqueeze(1).flatten(1)


def entries_by_dimensions(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., *entry] -> [N, S, o]"""
    return as_rows(dy.reshape(*dy.shape[: dy.dim() + 2 - len(attrs["weight"])], -1), attrs)


def flat_entries_by_dimensions(weight: Layout, attrs: Attrs) -> Layout:
    rows, columns, *entry = weight.result
    return weight.reshape((1, rows * columns, math.prod(entry))).permute((0, 2, 1))


BY_TWO: dict[str, Any] = {
    "rows": places_by_dimensions,
    "grad_rows": entries_by_dimensions,
    "where": lambda attrs: len(attrs["weight"]) > 1,
    "layouts": {"weight": flat_entries_by_dimensions},
}


@embedding.form(
    **BY_TWO,
    example=(
        lambda: (Written(lambda x, w: w[x, (x + 1) % 4], {"w": (5, 4)}), ids(4, 7) - 5),
        lambda: (Written(lambda x, w: w[x, x[:1] % 4 - 4], {"w": (5, 4, 2, 3)}), ids(4)),
    ),
)
def indexed_by_two(ids: Tensor, second: Tensor, *, weight: Tensor) -> Tensor:
    return weight[ids, second]


@embedding.form(
    **BY_TWO,
    example=lambda: (Written(lambda x, w: torch.ops.aten.index.Tensor(w, [x, (x + 1) % 4]), {"w": (5, 4)}), ids(4, 7)),
)
def indexed_by_two_as_exported(ids: Tensor, second: Tensor, *, weight: Tensor) -> Tensor:
    return torch.ops.aten.index.Tensor(weight, [ids, second])  # type: ignore[no-any-return]


# --- a table that is the input of another layer -----------------------------------------------------------------------


def learned(table: Tensor) -> Tensor:
    """The table itself. `normalize` marks a parameter with it that is a layer's input: an embedding of all its rows."""
    return table


fx.wrap("learned")


def every_id(table: Tensor, attrs: Attrs) -> Tensor:
    return torch.arange(math.prod(table.shape[:-1]), device=table.device).unsqueeze(0)


def rows_of_table(table: Layout, attrs: Attrs) -> Layout:
    *entries, outputs = table.result
    inputs = math.prod(entries)
    return table.reshape((inputs, outputs)).rearrange("i o -> o i").reshape((1, outputs, inputs))


@embedding.form(
    rows=every_id,
    grad_rows=lambda dy, attrs: dy.reshape(1, -1, dy.shape[-1]),
    where=lambda attrs: len(attrs["weight"]) > 1,
    layouts={"weight": rows_of_table},
    leading=False,
    example=written(lambda x, w: x @ F.linear(w, w.t()), (4, 5), w=(5, 5)),
)
def whole_table(_output: Any, *, weight: Tensor) -> Tensor:
    return learned(weight)


# --- bags -------------------------------------------------------------------------------------------------------------


def bag_rows(ids: Tensor, attrs: Attrs) -> Tensor:
    """Ids [N, S], or flat with `offsets` -> rows [N, 1, i]: the count of each id in each bag, or its share, or the sum
    of its weights."""
    size, offsets, weights = attrs["weight"][0], attrs["offsets"], attrs["per_sample_weights"]
    if offsets is None:
        bags = ids.shape[0]
        bag = torch.arange(bags, device=ids.device).unsqueeze(1).expand_as(ids)
    else:
        bags = offsets.shape[0] - bool(attrs["include_last_offset"])
        place = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:bags], place, right=True) - 1
    counted = (without_padding(ids, attrs) >= 0).to(torch.get_default_dtype() if weights is None else weights.dtype)
    counted = counted if weights is None else counted * weights
    index = (bag * size + ids).flatten()
    rows = counted.new_zeros(bags * size).index_add(0, index, counted.flatten()).view(bags, 1, size)
    return rows / rows.sum(-1, keepdim=True).clamp(min=1) if attrs["mode"] in ("mean", 1) else rows


def plain_bag(attrs: Attrs) -> bool:
    """As `plain`; and not with a maximum, which is not linear."""
    linear = attrs["mode"] in ("sum", "mean", 0, 1)
    return linear and attrs.get("max_norm") is None and not attrs["scale_grad_by_freq"]


class FlatBag(nn.EmbeddingBag):
    """A bag layer whose ids are one flat row, with the places where each bag begins."""

    def __init__(self, *offsets: int, **options: Any) -> None:
        super().__init__(5, 3, **options)
        self.register_buffer("offsets", torch.tensor(offsets))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, self.offsets)  # type: ignore[arg-type]


class WeightedBag(nn.EmbeddingBag):
    """A bag layer that weights every id."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, None, torch.cos(ids.to(self.weight.dtype)))


@layer(
    rows=bag_rows,
    grad_rows=as_rows,
    layouts={"weight": "i o -> o i"},
    where=plain_bag,
    default="kron_in_diag",
    approximations=EVERY_LAYER,
    tf_kind="embedding",
    example=(
        lambda: (nn.EmbeddingBag(5, 3, mode="sum"), ids(4, 7)),
        lambda: (nn.EmbeddingBag(5, 3, mode="mean", padding_idx=-2), ids(4, 7)),
        lambda: (FlatBag(0, 2, 2, 7, mode="mean", padding_idx=1), ids(9)),
        lambda: (FlatBag(0, 4, 9, mode="sum", include_last_offset=True), ids(9)),
        lambda: (WeightedBag(5, 3, mode="sum", padding_idx=1), ids(4, 7)),
    ),
)
def embedding_bag(
    ids: Tensor,
    offsets: Any,
    max_norm: Any,
    norm_type: float,
    scale_grad_by_freq: bool,
    mode: str,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    padding_idx: Any,
    *,
    weight: Tensor,
) -> Tensor:
    options = offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse
    return F.embedding_bag(ids, weight, *options, per_sample_weights, include_last_offset, padding_idx)


BAG_ARGUMENTS = {
    "weight": REQUIRED, "indices": REQUIRED, "offsets": REQUIRED, "scale_grad_by_freq": False, "mode": 0,
    "sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": None,
}  # fmt: skip


@embedding_bag.form(
    spelled=Spelling(torch.embedding_bag, BAG_ARGUMENTS),
    example=lambda: (
        Written(lambda x, w: torch.embedding_bag(w, x, torch.tensor([0, 4, 5]), mode=1)[0], {"w": (5, 3)}),
        ids(9),
    ),
)
def first_of_embedding_bag(
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    padding_idx: Any,
    *,
    weight: Tensor,
) -> Tensor:
    options = offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    return torch.embedding_bag(weight, ids, *options)[0]
