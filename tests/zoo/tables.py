"""Parameters that enter the batch as they are: tokens, sinks, positions, biases of attention; and layers that do not
see the batch, which make such tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, affine, linear
from .dense import batch, parameter


class Tokens(nn.Module):
    """A class token, registers, and a sink for attention, in front of a sequence of any length with its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.token, self.registers = parameter(1, 1, 4), parameter(2, 4)
        self.sinks, self.position = parameter(2), parameter(1, 9, 4)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, 5]
        n = x.shape[0]
        x = self.embed(x)
        x = x + self.position[:, : x.shape[1]]
        x = torch.cat([self.token.expand(n, -1, -1), self.registers.unsqueeze(0).repeat(n, 1, 1), x], dim=1)
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)  # [N, 2, S, 2]
        scores = heads @ heads.transpose(-2, -1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(n, -1, scores.shape[-2], -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        x = x + (weights @ heads).transpose(1, 2).flatten(2)
        y: Tensor = self.head(x[:, 0])
        return y


class RelativePositions(nn.Module):
    """A table of biases, looked up by the distance of two positions, as an embedding or with an index."""

    def __init__(self, fused: bool, looked_up: bool) -> None:
        super().__init__()
        self.fused, self.looked_up = fused, looked_up
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.table = parameter(6, 2)
        place = torch.arange(5)
        self.register_buffer("distance", (place[:, None] - place[None]).abs().clamp(max=3))

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 4]
        q, k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.looked_up:
            bias = F.embedding(self.distance, self.table).permute(2, 0, 1)
        else:
            bias = self.table[self.distance.flatten()].view(5, 5, 2).permute(2, 0, 1).contiguous()
        bias = bias.unsqueeze(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + F.scaled_dot_product_attention(x, k, v, attn_mask=bias)  # as in later layers of T5
        else:
            x = torch.softmax(q @ k.transpose(-2, -1) + bias, dim=-1) @ v
        y: Tensor = self.head(x.transpose(1, 2).flatten(2).mean(1))
        return y


class RelativeQueries(nn.Module):
    """Positions relative to a query that meet the query itself, in several spellings; and some of a weight's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(4, 4), nn.Linear(3, 3)
        self.rows, self.columns, self.turned, self.chosen = (
            parameter(9, 2),
            parameter(1, 9, 2),
            parameter(2, 9),
            parameter(3, 6),
        )
        self.looked_up = nn.Embedding(9, 2)
        place = torch.arange(5)
        self.register_buffer("distance", place[:, None] - place[None] + 4)
        self.register_buffer("inputs", torch.tensor([5, 0, 0, 3]))

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 4]
        q = self.query(x).unflatten(-1, (2, 2)).transpose(1, 2)  # [N, 2, 5, 2]
        scores = q @ q.transpose(-2, -1)
        scores = scores + torch.einsum("bhqd,qkd->bhqk", q, self.rows[self.distance.long()])
        scores = scores + torch.einsum("bhkd,qkd->bhqk", q, self.looked_up(self.distance))
        by_query = q.transpose(1, 2) @ self.columns[0].flip(0)[self.distance].transpose(1, 2)  # [N, 5, 2, 5]
        scores = scores + by_query.transpose(1, 2) + q @ self.turned[:, torch.tensor([3, 4, 8, 4, 0])]
        x = scores.softmax(-1).mean(1) @ x
        y: Tensor = self.head(F.linear(x, self.chosen[:, self.inputs]).mean(1))
        return y


class OtherSizes(nn.Module):
    """Positions and biases of attention that were made for another number of positions, and are interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.token, self.positions, self.grid = parameter(1, 1, 4), parameter(1, 10, 4), parameter(4, 2, 3)
        self.table = parameter(9, 2)
        place = torch.arange(5)
        self.register_buffer("distance", (place[:, None] - place[None]).abs().clamp(max=3))

    def forward(self, x: Tensor) -> Tensor:  # [N, 4, 3]
        n = x.shape[0]
        first, rest = self.positions[:, :1], self.positions[:, 1:].reshape(1, 3, 3, -1).permute(0, 3, 1, 2)
        rest = F.interpolate(rest, size=(2, 2), mode="bicubic", antialias=True, align_corners=False)
        positions = torch.cat([first, rest.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
        grid = F.interpolate(self.grid.unsqueeze(0), size=(1, 5), mode="bilinear").flatten(2)
        x = torch.cat([self.token.expand(n, -1, -1), self.embed(x)], dim=1) + positions
        x = x + grid.mT
        table = F.interpolate(self.table.t().unsqueeze(0), size=4, mode="linear")[0].t()
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        bias = table[self.distance.view(-1)].view(5, 5, 2).permute(2, 0, 1)
        x = (heads @ heads.mT + bias).softmax(-1) @ heads
        y: Tensor = self.head(x.transpose(1, 2).flatten(2).mean(1))
        return y


class TokenWithPosition(nn.Module):
    """The token has a position, too: a slice of the table is added to it, the rest is a shift of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.token, self.positions = parameter(1, 1, 4), parameter(1, 6, 4)

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 3]
        token = (self.token + self.positions[:, :1]).expand(x.shape[0], -1, -1)
        y: Tensor = self.head(torch.cat([token, self.embed(x) + self.positions[:, 1:]], dim=1).tanh().mean(1))
        return y


class MadeByNetwork(nn.Module):
    """Biases of attention from the coordinates of positions, by a small network, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
        self.value, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        place = torch.arange(5)
        self.register_buffer("coordinates", torch.linspace(-1, 1, 9).unsqueeze(-1))
        self.register_buffer("index", place[:, None] - place[None] + 4)

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 4]
        bias = 2 * torch.sigmoid(self.network(self.coordinates)[self.index].permute(2, 0, 1))
        value = self.value(x).unflatten(-1, (2, 2)).transpose(1, 2)
        x = torch.softmax(value @ value.transpose(-2, -1) + bias.unsqueeze(0), dim=-1) @ value
        y: Tensor = self.head(x.transpose(1, 2).flatten(2).mean(1))
        return y


class SharedKey(nn.Module):
    """One projection of the sequence and of a learned table of positions behind a norm, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.query, self.key, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 4]
        query, content = self.query(x), self.key(x)
        places = self.key(self.norm(self.positions.weight))
        scores = query @ content.transpose(1, 2) + query @ places.t()
        y: Tensor = self.head((scores.softmax(-1) @ x).mean(1))
        return y


class Disentangled(nn.Module):
    """Positions behind dropout and a slice, projected as the sequence is; sines projected by a kernel of heads, as in
    DeBERTa and Funnel; positions that take the number of cases from the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.added, self.dropout = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Dropout(0.1)
        self.query, self.key, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.kernel = parameter(3, 2, 2)
        self.register_buffer("sines", torch.linspace(0, 9, 15).view(5, 3).sin())
        self.register_buffer("places", torch.arange(5).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 4]
        x = x + self.added(self.places).expand_as(x)
        query, content = self.query(x), self.key(x)
        scores = query @ content.transpose(1, 2)
        scores = scores + query @ self.key(self.dropout(self.positions.weight)[2:7]).t()
        heads = torch.einsum("td,dnh->tnh", self.sines, self.kernel)
        scores = scores + torch.einsum("binh,tnh->bnit", query.unflatten(-1, (2, 2)), heads).sum(1)
        y: Tensor = self.head((scores.softmax(-1) @ x).mean(1))
        return y


ATTENTION = (linear("query"), linear("key"), linear("value"), linear("head"))


class TrainedTokens(nn.Module):
    """Some entries of a frozen vocabulary train, and its output layer is tied, as peft's trainable tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4).requires_grad_(False)
        self.tokens, self.inner = nn.Parameter(torch.randn(2, 4)), nn.Linear(4, 4)
        self.register_buffer("index", torch.tensor([4, 1]))

    def forward(self, ids: Tensor) -> Tensor:
        h = F.embedding(ids, self.table.weight.index_copy(0, self.index, self.tokens))
        return F.linear(torch.tanh(self.inner(h)), self.table.weight.index_copy(0, self.index, self.tokens))


CASES = (
    Case(
        "trained_tokens",
        TrainedTokens,
        lambda: (torch.randint(6, (3, 5)),),
        (("embedding", ("tokens",), 2), linear("inner")),
        "categorical",
    ),
    Case(
        "tokens",
        Tokens,
        lambda: batch(3, 5, 5),
        (
            linear("embed"),
            linear("head"),
            *(("scale_and_shift", (name,), 1) for name in ("token", "registers", "sinks", "position")),
        ),
        "categorical",
    ),
    Case(
        "relative_positions",
        lambda: RelativePositions(fused=False, looked_up=False),
        lambda: batch(3, 5, 4),
        (*ATTENTION, ("scale_and_shift", ("table",), 1)),
    ),
    Case(
        "relative_positions_embedded",
        lambda: RelativePositions(fused=False, looked_up=True),
        lambda: batch(3, 5, 4),
        (*ATTENTION, ("scale_and_shift", ("table",), 1)),
    ),
    Case(
        "relative_positions_in_fused_attention",
        lambda: RelativePositions(fused=True, looked_up=False),
        lambda: batch(3, 5, 4),
        (*ATTENTION, ("scale_and_shift", ("table",), 2)),
    ),
    Case(
        "relative_queries",
        RelativeQueries,
        lambda: batch(3, 5, 4),
        (
            linear("query"),
            linear("head"),
            *(("linear", (name,), 1) for name in ("rows", "columns", "turned", "chosen", "looked_up.weight")),
        ),
    ),
    Case(
        "other_sizes",
        OtherSizes,
        lambda: batch(3, 4, 3),
        (
            linear("embed"),
            linear("head"),
            *(("scale_and_shift", (name,), 1) for name in ("token", "positions", "grid", "table")),
        ),
    ),
    Case(
        "token_with_position",
        TokenWithPosition,
        lambda: batch(3, 5, 3),
        (
            linear("embed"),
            linear("head"),
            *(("scale_and_shift", (name,), 1) for name in ("token", "positions[:, 0:1]", "positions[:, 1:6]")),
        ),
    ),
    Case(
        "table_made_by_a_network",
        MadeByNetwork,
        lambda: batch(3, 5, 4),
        (linear("network.0"), linear("network.2", bias=False), linear("value"), linear("head")),
    ),
    Case(
        "disentangled",
        Disentangled,
        lambda: batch(3, 5, 4),
        (
            affine("embedding", "positions", bias=False),
            ("scale_and_shift", ("added.weight",), 1),
            ("linear", ("kernel",), 1),
            linear("query"),
            linear("key", 2),
            linear("head"),
        ),
    ),
    Case(
        "projection_of_a_table",
        SharedKey,
        lambda: batch(3, 5, 4),
        (
            affine("embedding", "positions", bias=False),
            affine("layer_norm", "norm"),
            linear("query"),
            linear("key", 2),
            linear("head"),
        ),
        "categorical",
    ),
)
