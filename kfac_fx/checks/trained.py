"""Which parameters of a model are trained.

A parameter that was trained once stays registered. While it is frozen its statistics pause, and captures treat it as if
it were trained, so that it keeps its block. A parameter that is trained for the first time after compile needs captures
in which it is registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


class Trained:
    """The parameters of a model that were trained at any time since it was compiled."""

    def __init__(self, model: nn.Module) -> None:
        self.registered = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.dormant = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these in the place of those that FSDP2 has sharded."""
        self.registered = {name: parameters[name] for name in self.registered}
        self.dormant = {name: parameters[name] for name in self.dormant}

    @property
    def any_now(self) -> bool:
        """Whether any parameter is trained at present."""
        return any(p.requires_grad for p in self.registered.values()) or self.unfrozen

    @property
    def unfrozen(self) -> bool:
        """Whether a parameter is trained that was frozen in all captures."""
        return any(p.requires_grad for p in self.dormant.values())

    def take_unfrozen(self) -> list[str]:
        """Register what was unfrozen. Returns the names."""
        names = [name for name, p in self.dormant.items() if p.requires_grad]
        self.registered |= {name: self.dormant.pop(name) for name in names}
        return names

    @contextmanager
    def in_captures(self) -> Iterator[None]:
        """Inside, all that was ever trained requires gradients."""
        frozen = [p for p in self.registered.values() if not p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)
