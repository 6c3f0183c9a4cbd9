"""Whether a model still has the weights that a spectrum, or queries, in memory were made with.

Factors are of the weights of their time, and gradients of examples are of the present ones, so scores of both together
would be of no model. A digest of all weights before every batch would take longer than its scores, and versions of
tensors do not know what is written through `.data`. So three sums over numbers of every tensor tell: over all of a
small tensor, and over `SAMPLED` of a large one, all of which a step or a swap of weights changes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.processes import shard
from kfac_fx.passes.matrix import real_numbers

LISTED = 4  # names in an error
SAMPLED = 4096  # numbers of a tensor
STRIDE = 3  # a sum over every third number tells permutations apart


@dataclass(frozen=True)
class Weights:
    """The weights of a model at one time: of its parameters, and of the buffers in its state.

    Attributes:
        names: of these tensors.
        sums: see `sums_of`, [tensors, 3].
        buffers: the names of buffers.
    """

    names: tuple[str, ...]
    sums: Tensor
    buffers: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> Weights:
        tensors = tensors_of(model, model.state_dict().keys())
        buffers = frozenset(tensors) - {name for name, _ in model.named_parameters()}
        return Weights(tuple(tensors), stacked(tensors), buffers)

    def changed(self, model: nn.Module) -> list[str]:
        """The names of the tensors that have other numbers now. Waits for the device.

        Buffers count in evaluation mode only: in training they are written, and not read, as in batch normalization.
        """
        now = tensors_of(model, self.names)
        if tuple(now) != self.names:
            return [name for name in self.names if name not in now]
        other = (stacked(now).to(self.sums.device) != self.sums).any(1).tolist()
        return [
            name
            for name, differs in zip(self.names, other, strict=True)
            if differs and not (model.training and name in self.buffers)
        ]

    def refuse_others(self, model: nn.Module, things: str, remedy: str) -> None:
        """Raises ValueError if the model has other weights now.

        things: that were made with these weights, as in "this spectrum was". remedy: the words behind "Or".
        """
        if changed := self.changed(model):
            more = f" and {len(changed) - LISTED} more" if len(changed) > LISTED else ""
            raise ValueError(
                f"the weights have changed since {things} made: {', '.join(changed[:LISTED])}{more}. Gradients of "
                "examples would be of the new weights, and the rest of the old ones. Load the old weights, or make "
                f"anew what is of them. {remedy}"
            )


def tensors_of(model: nn.Module, names: Container[str]) -> dict[str, Tensor]:
    """The parts of this process of the parameters and buffers with these names."""
    both = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: shard(tensor.detach()) for name, tensor in both.items() if name in names and not tensor.is_meta}


def stacked(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sums over several tensors, [tensors, 3]."""
    sums = [of_one for tensor in tensors.values() for of_one in sums_of(tensor)]
    if not sums:
        return torch.zeros(0, 3)
    return torch.nan_to_num(torch.stack([of_one.to(sums[0].device) for of_one in sums])).view(-1, 3)


def sums_of(tensor: Tensor) -> list[Tensor]:
    """The sum of the sampled numbers, that of every third, and the root of that of the squares, in double precision."""
    numbers = real_numbers(dense(tensor))
    numbers = numbers.view(-1) if numbers.is_contiguous() else numbers.flatten()
    numbers = numbers[:: max(1, -(-numbers.numel() // SAMPLED))]
    numbers = numbers if numbers.is_floating_point() and numbers.element_size() > 1 else numbers.double()
    sums = [part.sum(dtype=torch.float64) for part in (numbers, numbers[::STRIDE])]
    return [*sums, torch.linalg.vector_norm(numbers, dtype=torch.float64)]
