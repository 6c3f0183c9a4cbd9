"""Documents that are packed into rows: positions restart, and attention has a mask of blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

DOCUMENTS, LENGTH, WORDS, WIDTH = 4, 5, 11, 8


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        document, row = (positions == 0).cumsum(1), torch.arange(ids.shape[1])
        seen = (document[:, :, None] == document[:, None]) & (row[:, None] >= row)
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        logits: Tensor = self.head(x + self.mix(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)))
        return logits


def factors(rows: int, mode: str) -> dict[tuple[tuple[str, ...], str], Tensor]:
    """The factors of all blocks, where the documents are in this many rows."""
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(WORDS, (DOCUMENTS, LENGTH), generator=generator).view(rows, -1) for _ in range(2))
    positions = torch.arange(LENGTH).repeat(DOCUMENTS).view(rows, -1)
    torch.manual_seed(0)
    net = kfac_fx.compile(Language(), (ids, positions), loss="categorical", strict=True)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode=mode, damping=1e-3)
    estimator.update_covariances(ids, positions, targets=targets)
    return {(key, name): f.value for key, block in estimator.blocks.items() for name, f in block.factors.items()}


@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_factors_of_packed_documents_are_those_of_documents_in_rows_of_their_own(mode: str) -> None:
    """A term of the loss is a case, and factors add up rows. A full block adds up the gradients of a row first: those
    of its documents are independent under the model's distribution, and not with the targets of the data."""
    apart, packed = factors(DOCUMENTS, mode), factors(DOCUMENTS // 2, mode)
    assert len(apart) > 12 and apart.keys() == packed.keys()
    for (key, name), value in apart.items():
        same = value.shape == packed[key, name].shape and torch.allclose(value, packed[key, name], rtol=1e-4, atol=1e-6)
        assert same is not (mode == "empirical" and key[0] == "norm.weight"), (key, name)
