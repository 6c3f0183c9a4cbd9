"""A model of the zoo with what the compiler is expected to find in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Expected = tuple[str, tuple[str, ...], int]  # layer, parameters, number of uses


@dataclass(frozen=True)
class Case:
    """make: the model; inputs, keywords: one batch for it, drawn anew at every call.

    loss: what `compile` is told; None if forward computes the loss itself. expected: the structured registrations, in
    any order. whole: every element of every used parameter must be in a structured block. rounded: the graph writes
    out what the model computes in one operation, so both are equal up to rounding and not bit for bit.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    expected: tuple[Expected, ...]
    loss: Any = "normal"
    keywords: Callable[[], Mapping[str, Any]] = dict
    generic: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    layers: tuple[Any, ...] = field(default=(), compare=False)
    rounded: bool = False

    @property
    def whole(self) -> bool:
        return not self.generic

    def __str__(self) -> str:
        return self.name


def linear(prefix: str, uses: int = 1, bias: bool = True) -> Expected:
    return affine("linear", prefix, uses, bias)


def affine(layer: str, prefix: str, uses: int = 1, bias: bool = True) -> Expected:
    """The registration of an ordinary module with a weight and, mostly, a bias."""
    return layer, (f"{prefix}.weight", f"{prefix}.bias") if bias else (f"{prefix}.weight",), uses
