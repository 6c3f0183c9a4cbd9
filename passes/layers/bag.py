"""Bags of embeddings: their rows are how often every id is in a bag, or its share of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import EVERY_LAYER, Attrs
from .declaration import layer
from .embedding import ids, without_padding
from .rows import Written, as_rows


def counts(ids: Tensor, attrs: Attrs) -> Tensor:
    """[N, S], or flat with `offsets`, -> how often each id is in each bag, its share of it, or the sum of its own
    weights: [N, 1, i]."""
    size, offsets, weights = attrs["weight"][0], attrs["offsets"], attrs["per_sample_weights"]
    if offsets is None:
        bags = ids.shape[0]
        bag = torch.arange(bags, device=ids.device).unsqueeze(1).expand_as(ids)
    else:
        bags = offsets.shape[0] - bool(attrs["include_last_offset"])
        place = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:bags], place, right=True) - 1
    kept = (without_padding(ids, attrs) >= 0).to(torch.get_default_dtype() if weights is None else weights.dtype)
    kept = kept if weights is None else kept * weights
    index = (bag * size + ids).flatten()
    found = kept.new_zeros(bags * size).index_add(0, index, kept.flatten()).view(bags, 1, size)
    return found / found.sum(-1, keepdim=True).clamp(min=1) if attrs["mode"] in ("mean", 1) else found


def plain_bag(attrs: Attrs) -> bool:
    known = attrs["mode"] in ("sum", "mean", 0, 1)
    return known and attrs.get("max_norm") is None and not attrs["scale_grad_by_freq"]


class FlatBag(nn.EmbeddingBag):
    """Ids in one flat row, and where each bag begins."""

    def __init__(self, *offsets: int, **options: Any) -> None:
        super().__init__(5, 3, **options)
        self.register_buffer("offsets", torch.tensor(offsets))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, self.offsets)  # type: ignore[arg-type]


class WeightedBag(nn.EmbeddingBag):
    """Every id with a weight of its own."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, None, torch.cos(ids.to(self.weight.dtype)))


@layer(
    rows=counts,
    grad_rows=as_rows,
    layouts={"weight": "i o -> o i"},
    where=plain_bag,
    default="kron_in_diag",
    approximations=EVERY_LAYER,
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
    return F.embedding_bag(
        ids,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )


@embedding_bag.form(
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
    bags = torch.embedding_bag(
        weight, ids, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    )
    return bags[0]
