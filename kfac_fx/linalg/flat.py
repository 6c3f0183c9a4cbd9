"""Tensors by name as one vector: an update is a handful of operations, however many layers there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Flat:
    """Where tensors lie in a vector [P], one behind the other. shapes: theirs, by name."""

    shapes: Mapping[str, torch.Size]

    def joined(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """[P], in the widest of their precisions or that of `out`, where it then is. Others may be among them."""
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes], out=out)

    def parts(self, vector: Tensor) -> Tensors:
        """The inverse: views of the vector."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def spread(self, scalars: Mapping[str, Tensor]) -> Tensor:
        """A 0-dim tensor for each as what to multiply a vector with: [P], or 0-dim where it is one for all."""
        first, *others = (scalars[name] for name in self.shapes)
        if all(one is first for one in others):
            return first
        return torch.cat([scalars[name].expand(shape.numel()) for name, shape in self.shapes.items()])

    def add_to(self, tensors: Mapping[str, Tensor], vector: Tensor) -> None:
        """Add a vector to the tensors, in place and in their own precision."""
        parts = self.parts(vector)
        # torch documents its operations on lists under these names; on CUDA they are one kernel.
        torch._foreach_add_([tensors[name] for name in parts], list(parts.values()))
