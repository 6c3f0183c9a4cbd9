"""Sizes of what a node computes: numbers, or symbols where only the batch knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Of its tensor; empty for what is none."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def sizes_of(node: fx.Node) -> list[str]:
    return [str(size) for size in shape_of(node)]


def number(size: int | torch.SymInt) -> int | None:
    """None of a symbol; one that the capture found to be a number counts as this."""
    return int(str(size)) if str(size).isdigit() else None


def in_example(size: int | torch.SymInt) -> int:
    """What a size was on the inputs of the capture."""
    # Not `int(size)`, which makes the symbol this number everywhere, so that equal numbers look like the same size.
    # torch has no public name for the number behind a symbol.
    return size if isinstance(size, int) else int(size.node.hint)
