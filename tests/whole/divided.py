"""Models that no single graph holds: three layers around something that torch.export cannot see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from tests.compiler.test_tracing_functions import ByNumpy

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Build = Callable[[], nn.Module]


class Base(nn.Module):
    """Three layers around something that torch.export cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)).tanh())


class Straight(Base):
    """A backward function of its own, and a forward that no graph sees."""

    def between(self, h: Tensor) -> Any:
        return ByNumpy.apply(self.middle(h))  # type: ignore[no-untyped-call]


class Branching(Base):
    def between(self, h: Tensor) -> Any:
        return self.middle(h) if h.sum() > -1e9 else h.exp()


class Rounding(nn.Linear):
    """The gradient passes through its rounding, an autograd.Function. It may assign whether a tensor is trained."""

    checkpointing = False

    def forward(self, h: Tensor) -> Any:
        offset = torch.zeros(h.shape[-1])
        if self.checkpointing:
            offset.requires_grad = True
        return StraightThrough.apply(super().forward(h) + offset)  # type: ignore[no-untyped-call]


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return torch.round(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class Rounded(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Rounding(5, 5)


class Repeated(Base):
    """As many calls as the data say."""

    def between(self, h: Tensor) -> Tensor:
        for _ in range(2 + int(h.detach().abs().sum() < 1e9)):
            h = self.middle(h).tanh()
        return h


class Written(Base):
    """The output of a captured submodule is written into."""

    def between(self, h: Tensor) -> Any:
        h[h.detach().sum(1) > 1e9] = 0.0
        h.mul_(2.0)
        return self.middle(h) if h.sum() > -1e9 else h


class Hooked(Branching):
    """Hooks of a captured submodule, on its inputs and its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.middle.register_forward_hook(lambda module, args, out: out + 1)


class Normalized(Base):
    """Buffers that are updated inside and outside of what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))  # type: ignore[assignment]
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Any:
        self.calls += 1
        self.last_size = float(h.detach().norm())
        return self.norm(self.middle(h)) if h.sum() > -1e9 else h


class Frozen(Base):
    """A submodule that is run without gradients, too, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def between(self, h: Tensor) -> Any:
        with torch.no_grad():
            scale = self.middle(h).norm()
        return self.fixed(self.middle(h / (1 + scale))) if h.sum() > -1e9 else h


class Recomputed(Base):
    def between(self, h: Tensor) -> Any:
        return checkpoint(self.middle, h, use_reentrant=True) if h.sum() > -1e9 else h


class Mixed(Base):
    """Under autocast between the submodules."""

    def between(self, h: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.middle(h)
        return out.float() if h.sum() > -1e9 else h


MODELS: list[Build] = [Straight, Branching, Rounded, Repeated, Written, Hooked, Normalized, Frozen, Recomputed, Mixed]


def compiled(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    return kfac_fx.compile(model, inputs or (X,), **{"loss": "normal", **options})


def submodules_of(net: Any, *inputs: Any) -> EmittedSubmodules:
    """The submodules of the first capture, or of the one for these inputs."""
    emitted = (net.captures.recorder(inputs, {}) if inputs else net.captures.first).emitted
    assert isinstance(emitted, EmittedSubmodules)
    return emitted


class Rare(Base):
    """A branch that the examples do not take."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.rare = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.wrong = wrong

    def between(self, h: Tensor) -> Any:
        if h.abs().sum() > 1e4:
            return F.linear(h, self.middle.weight) if self.wrong else self.middle(self.rare(h))
        return self.middle(h)


class Sizes(nn.Module):
    """A submodule that is another graph for long sequences, called with several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Flipping(), nn.Linear(3, 3)

    def forward(self, xs: list[Tensor]) -> Any:
        hs = [self.inner(x) for x in xs]
        return self.head(torch.cat([h for h in hs if h.sum() > -1e9]))


class Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x if x.shape[0] < 5 else x.flip(0))
