"""A model of the zoo with the facts that a measurement needs, and the pieces that the libraries' tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import kfac_fx

Call = tuple[tuple[Any, ...], dict[str, Any]]
CLASSES = 10
VOCABULARY = 97
LENGTH = 11  # of token sequences
KINDS = ("logits", "prediction_logits", "logits_per_image")  # of outputs that are categorical


def predictions(outputs: Any) -> Any:
    """The distribution that a model's outputs stand for: a categorical of what is called logits, else a normal one
    around every floating-point output; scalars (losses) are one."""
    found = next((one for kind in KINDS if isinstance(one := getattr(outputs, kind, None), Tensor)), None)
    if found is not None:
        return kfac_fx.losses.Categorical(found)
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    normals = [kfac_fx.losses.Normal(leaf) for leaf in leaves if leaf.dim()]
    scalars = [leaf for leaf in leaves if not leaf.dim()]
    return [*normals, *([kfac_fx.losses.Normal(torch.stack(scalars)[None])] if scalars else [])]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. build: the model, randomly initialized; call: (args, kwargs) for a batch of this size."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    call: Callable[[int], Call]
    loss: Any = predictions
    like: str = ""  # the well-known architecture that it is, of those that the zoo must hold
    approximations: Mapping[str, str] = field(default_factory=dict)  # of `compile`

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def images(*shape: int) -> Callable[[int], Call]:
    return lambda batch: ((torch.randn(batch, *shape),), {})


def keywords(**makers: Callable[[int], Any]) -> Callable[[int], Call]:
    """Every argument by name, made for a batch size."""
    return lambda batch: ((), {name: make(batch) for name, make in makers.items()})


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(5, vocabulary, (batch, length))  # the first few are special


def ones(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.ones(batch, *shape, dtype=torch.long)


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def classes(count: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(count, (batch, *shape))


def steps(batch: int) -> Tensor:
    """Times in a diffusion, one an example."""
    return torch.randint(1, 1000, (batch,))
