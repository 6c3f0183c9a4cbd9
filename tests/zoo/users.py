"""Models of sciences and of sequences, as people write them: graphs, sets, electrons, networks that make networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear
from .derivatives import network


class Molecule(nn.Module):
    """Messages between atoms along bonds, gathered and scattered in plain torch, and a sum over each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.message, self.out = nn.Embedding(5, 4), nn.Linear(9, 4), nn.Linear(4, 1)
        self.state = nn.Linear(8, 4)

    def forward(self, kinds: Tensor, places: Tensor, bonds: Tensor, molecule: Tensor) -> Tensor:
        h, (a, b) = self.kinds(kinds), bonds
        apart = (places[a] - places[b]).norm(dim=-1, keepdim=True)
        for _ in range(2):
            sent = torch.tanh(self.message(torch.cat([h[a], h[b], apart], -1)))
            heard = torch.zeros_like(h).scatter_add(0, b.unsqueeze(-1).expand_as(sent), sent)
            h = torch.tanh(self.state(torch.cat([h, heard], -1)))
        y: Tensor = self.out(h.new_zeros(2, 4).index_add(0, molecule, h))
        return y


def molecules() -> tuple[Tensor, ...]:
    return torch.randint(5, (7,)), torch.randn(7, 3), torch.randint(7, (2, 12)), torch.arange(7) // 4


class WaveFunction(nn.Module):
    """The logarithm of a determinant of orbitals with envelopes, and of a factor for pairs of electrons."""

    def __init__(self) -> None:
        super().__init__()
        self.electron, self.orbitals, self.pairs = network(4, 5, 5), nn.Linear(5, 3), network(1, 4, 1)
        self.width = nn.Parameter(torch.rand(3))

    def forward(self, places: Tensor) -> Tensor:  # [N, 3 electrons, 3]
        r = places.norm(dim=-1, keepdim=True)
        orbitals = self.orbitals(self.electron(torch.cat([places, r], -1))) * torch.exp(-self.width.exp() * r)
        apart = (places[:, :, None] - places[:, None] + torch.eye(3, device=places.device).unsqueeze(-1)).norm(
            dim=-1, keepdim=True
        )
        y: Tensor = torch.linalg.slogdet(orbitals).logabsdet + self.pairs(apart).sum((1, 2, 3))
        return y


class Hypernetwork(nn.Module):
    """A network makes the layers of another, for every case its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.out = network(3, 5, 5 * 4 + 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        made = self.maker(task)
        h = torch.einsum("noi,ni->no", made[:, :20].view(-1, 5, 4), x) + made[:, 20:]
        y: Tensor = self.out(torch.tanh(h))
        return y


class StepByStep(nn.Module):
    """Attention to what came before, token after token, with keys and values kept."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(7, 4), nn.Linear(4, 12), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        kept: list[tuple[Tensor, Tensor]] = []
        said = []
        for step in range(3):
            q, k, v = self.qkv(self.words(ids[:, step : step + 1])).chunk(3, -1)
            kept.append((k, v))
            keys, values = (torch.cat(tensors, 1) for tensors in zip(*kept, strict=True))
            said.append(self.head(F.scaled_dot_product_attention(q, keys, values)))
        return torch.cat(said, 1)


CASES = (
    Case(
        "molecule",
        Molecule,
        molecules,
        (("embedding", ("kinds.weight",), 1), linear("message", 2), linear("state", 2), linear("out")),
    ),
    Case(
        "wave_function",
        WaveFunction,
        lambda: (torch.randn(4, 3, 3),),
        (
            *(linear(name) for name in ("electron.0", "electron.2", "orbitals", "pairs.0", "pairs.2")),
            ("scale_and_shift", ("width",), 1),
        ),
    ),
    Case(
        "hypernetwork",
        Hypernetwork,
        lambda: (torch.randn(4, 4), torch.randn(4, 3)),
        tuple(linear(name) for name in ("maker.0", "maker.2", "out")),
    ),
    Case(
        "step_by_step",
        StepByStep,
        lambda: (torch.randint(7, (3, 3)),),
        (("embedding", ("words.weight",), 3), linear("qkv", 3), linear("head", 3)),
        "categorical",
    ),
)
