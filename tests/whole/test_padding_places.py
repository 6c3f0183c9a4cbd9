"""Where a padding mask goes in the graph, and where it does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Normal
from kfac_fx.passes.errors import ModelChangedError, RegistrationError
from kfac_fx.passes.padding import spread
from tests.whole.padded import MASK, Judge, batch, masked, nets

pytestmark = pytest.mark.usefixtures("float64")

FITS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "as many outputs as positions": (lambda x, w: x @ w, (4, 5)),
    "positions first": (lambda x, w: x.transpose(0, 1) @ w, (4, 2)),
    "merged in a view": (lambda x, w: (x.reshape(-1, 4).tanh() @ w).tanh(), (4, 2)),
    "merged position by position": (lambda x, w: (x.transpose(0, 1).reshape(-1, 4) @ w).tanh(), (4, 2)),
    "convolution": (lambda x, w: F.conv1d(x.mT, w, padding=1), (2, 4, 3)),
    "scale": (lambda x, w: x * w, (4,)),
    "gathered": (lambda x, w: x @ w[:, [2, 0, 2]], (4, 3)),
    "behind a mean of moved ones": (lambda x, w: (x + x.flip(1).mean(1, keepdim=True)).tanh() @ w, (4, 2)),
    "channels picked": (lambda x, w: F.conv1d(x.mT[:, torch.tensor([2, 0])], w, padding=1), (2, 2, 3)),
    "beams": (lambda x, w: x.unsqueeze(1).expand(-1, 2, -1, -1) @ w, (4, 2)),
}
DOES_NOT: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "pooled": (lambda x, w: x.mean(1) @ w, (4, 5), "has no rows"),
    "shorter": (lambda x, w: x[:, 1:] @ w, (4, 2), "has no rows"),
    "valid convolution": (lambda x, w: F.conv1d(x.mT, w), (2, 4, 3), "has no rows"),
    "flipped": (lambda x, w: x.flip(1).tanh() @ w, (4, 2), "positions are moved by flip"),
    "rolled": (lambda x, w: (x + x.roll(1, 1)) @ w, (4, 2), "positions are moved by roll"),
    "picked": (lambda x, w: x[:, torch.arange(x.shape[1]).neg()] @ w, (4, 2), "positions are moved by index"),
    "rolled where merged": (lambda x, w: x.reshape(-1, 4).roll(1, 0) @ w, (4, 2), "has no rows"),
    "merged in halves": (lambda x, w: x.reshape(-1, 2) @ w, (2, 2), "has no rows"),
}


@pytest.mark.filterwarnings("ignore:padding_mask does not fit")
def test_the_mask_goes_where_positions_are_known() -> None:
    """Also a mask that forward does not read."""
    everything = {name: (function, shape) for name, (function, shape, *_) in (FITS | DOES_NOT).items()}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, (_, shape) in everything.items():
                self.register_parameter(name.replace(" ", "_"), nn.Parameter(torch.randn(shape)))

        def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
            return [function(x, self.get_parameter(n.replace(" ", "_"))) for n, (function, _) in everything.items()]

    net = kfac_fx.compile(Model(), (torch.randn(3, 5, 4), MASK), loss=lambda outs: Normal(outs[0]), padding_mask="mask")
    notes = {note.subject.partition("(")[2].partition(")")[0]: note.reason for note in net.program.unmasked}
    assert notes.keys() == {name.replace(" ", "_") for name in DOES_NOT}
    for name, (_, _, reason) in DOES_NOT.items():
        assert reason in notes[name.replace(" ", "_")]
    dims = {registration.parameters[0]: registration.uses[0].mask_dims for registration in net.registrations}
    assert [dims[name.replace(" ", "_")] for name in FITS] == [
        (0, 1),
        (1, 0),
        (0, 0),
        (0, 0),
        (0, 2),
        (0, 1),
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 2),
    ]
    padded = {note.subject.partition("(")[2].partition(")")[0] for note in net.program.padded}
    assert padded == notes.keys() - {"pooled"}  # which has one row a case


def test_an_output_with_moved_positions_has_no_mask() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, y.flip(1)

    def losses(outputs: tuple[Tensor, Tensor]) -> list[Normal]:
        return [Normal(output) for output in outputs]

    net = kfac_fx.compile(Backwards(), (torch.randn(3, 5, 4), MASK), loss=losses, padding_mask="mask")
    assert net.program.mask_dims == ((0, 1), None)


@pytest.mark.parametrize("positions_first", [False, True])
def test_merged_rows_are_masked_in_their_order(positions_first: bool) -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            turned = x.transpose(0, 1) if positions_first else x
            y = torch.tanh(self.linear(turned.reshape(-1, 4))).view(*turned.shape[:2], 2)
            return y.transpose(0, 1) if positions_first else y

    x = torch.randn(3, 5, 4)
    net = kfac_fx.compile(Merged(), (x, MASK), loss="normal", padding_mask="mask")
    statistics = net.record((x, MASK), {}).statistics["linear.weight",]
    real = x[MASK.bool()]
    assert statistics["count"] == len(real)
    torch.testing.assert_close(statistics["A"][0], real.mT @ real)


def test_outputs_that_are_merged_position_by_position_have_no_mask() -> None:
    """It was that of outputs case by case, so other rows than the padding were no cases."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1).reshape(-1, 4))

    x = torch.randn(3, 5, 4)
    with pytest.warns(UserWarning, match="padding may count as cases of the Normal loss"):
        net = kfac_fx.compile(Merged(), (x, MASK), loss="normal", padding_mask="mask")
    assert net.program.mask_dims == (None,) and net.record((x, MASK), {}).cases == 15


def test_a_mask_that_attention_alone_reads_has_the_sizes_of_the_other_inputs() -> None:
    """torch.export does not tie its number of cases to theirs."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.inner(self.words(ids)).unsqueeze(1)
            cases, length = ids.shape
            read = attention_mask.bool()[torch.arange(cases)[:, None], torch.arange(length)]  # as transformers does
            real = read[:, None, None].expand(-1, 1, length, length)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=real).squeeze(1)

    ids, kwargs = batch()
    net = masked(Attention(), ids, kwargs)
    assert not net.program.unmasked
    assert net.record((ids,), kwargs).statistics["inner.weight", "inner.bias"]["count"] == 10


def test_an_image_of_pixels_is_masked_where_they_are_the_positions() -> None:
    for padding, wanted in ((1, 0), (0, 1)):

        class Wave(nn.Module):
            def __init__(self, padding: int = padding) -> None:
                super().__init__()
                self.conv = nn.Conv1d(4, 2, 3, padding=padding)

            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                out: Tensor = self.conv(x)
                return out

        x = torch.randn(3, 4, 5)
        options: dict[str, Any] = {"padding_mask": "mask", "approximations": {"conv1d": "kron_sua"}}
        if wanted:
            with pytest.raises(RegistrationError, match="its pixels are not its output positions"):
                kfac_fx.compile(Wave(), (x, MASK), loss="normal", **options)
            continue
        net = kfac_fx.compile(Wave(), (x, MASK), loss="normal", **options)
        assert not net.program.unmasked
        a = net.record((x, MASK), {}).statistics["conv.weight", "conv.bias"]["A"][0]
        pixels = torch.cat([x.mT[MASK], torch.ones(10, 1)], dim=1)
        torch.testing.assert_close(a, pixels.mT @ pixels)


def test_the_report_says_what_is_masked() -> None:
    text = str(nets(Judge)[0].report).splitlines()
    (line,) = [number for number, line in enumerate(text) if line.startswith("padding")]
    assert text[line] == "padding   attention_mask masks 9 of 10 uses"
    assert text[line + 1].startswith("          linear(out.weight, out.bias) at linear")
    reason = " ".join(part.strip() for part in text[line + 1 : line + 3])
    assert re.search(r"its output \[\d+, \d+\] has no rows of \d+ cases and \d+ positions", reason)  # as in the example


class InPieces(nn.Module):
    """Its loss is computed over a part of the positions at a time, without the memory of all logits."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.table, self.body, self.head, self.pieces = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7), pieces

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = self.body(self.table(ids)).tanh()
        if self.pieces == 1:
            return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        rows, targets = h.flatten(0, 1), y.flatten()
        parts = zip(rows.chunk(self.pieces), targets.chunk(self.pieces), strict=True)
        return torch.stack([F.cross_entropy(self.head(x), t, reduction="sum") for x, t in parts]).sum() / (y >= 0).sum()


def test_a_loss_in_pieces_has_a_mask_that_does_not_fit_and_one_piece_has_none() -> None:
    ids = torch.randint(1, 7, (4, 6)) * (torch.arange(6) < torch.tensor([[6], [4], [3], [6]]))
    inputs = ids, torch.where(ids == 0, -100, ids)
    with pytest.warns(UserWarning) as caught:
        kfac_fx.compile(InPieces(3), inputs, padding_mask=lambda ids, y: ids != 0)
    (text,) = [str(entry.message) for entry in caught]
    assert text.startswith("padding_mask does not fit 3 of 5 uses, whose factors may have padding:\n")
    assert text.count("its output [8, 7] has no rows of 4 cases and 6 positions\n") == 3
    assert "Compute the loss in one piece, as in F.cross_entropy(head(x).flatten(0, 1), y.flatten())." in text
    net = kfac_fx.compile(InPieces(1), inputs, padding_mask=lambda ids, y: ids != 0)
    assert not net.program.padded


def test_spreading_a_mask() -> None:
    mask = torch.arange(6.0).view(2, 3)
    assert torch.equal(spread(mask, (0, 1), (2, 3, 4)), mask.unsqueeze(-1).expand(2, 3, 4))
    assert torch.equal(spread(mask, (2, 0), (3, 4, 2)), mask.mT.unsqueeze(1).expand(3, 4, 2))
    assert torch.equal(spread(mask, (1, 1), (4, 6)), mask.flatten().expand(4, 6))
    with pytest.raises(ModelChangedError, match=r"0 of an output \[8, 4\] counts the positions of all cases;"):
        spread(mask, (0, 0), (8, 4))


class Positions(nn.Module):
    """A table of learned positions, whose first ones are added to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(7, 3), nn.Parameter(torch.randn(9, 3))
        self.head = nn.Linear(3, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embedding(ids) + self.positions[: ids.shape[1]]))
        return logits


@pytest.mark.filterwarnings("error:padding_mask does not fit")
def test_learned_positions_need_no_mask() -> None:
    """Their row of a case has the gradients of all positions, and those of padding are zero."""
    torch.manual_seed(0)
    ids, mask = torch.randint(7, (6, 5)), (torch.arange(5) < 3).long().expand(6, 5).clone()
    net = kfac_fx.compile(Positions(), (ids, mask), loss="categorical", padding_mask="mask")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(ids, mask)
    (block,) = (block for names, block in estimator.blocks.items() if names == ("positions",))
    diagonal = block.full_fisher_block().diagonal().view(9, 3)
    assert (diagonal[:3] > 0).all() and not diagonal[3:].any()
