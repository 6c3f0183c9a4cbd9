"""A module that holds given objects under their dotted names, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def attribute(module: nn.Module, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def holder(held: Mapping[str, Any]) -> nn.Module:
    """Parameters and modules stay what they are; other tensors become buffers. The objects are the same ones."""
    root = nn.Module()
    for target, value in held.items():
        *path, last = target.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if getattr(owner, last, None) is value:
            continue  # in a module that is held whole
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(last, value)
        else:
            setattr(owner, last, value)
    return root
