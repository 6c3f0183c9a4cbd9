"""Batches: from what a DataLoader yields to the arguments of forward and the targets of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Batch:
    """The arguments of one forward, and the targets of its loss.

    Batch(tokens, attention_mask=mask, targets=labels)

    Attributes:
        args, kwargs: of forward.
        targets: one a loss, in a list or tuple, or one for all; None if forward computes the loss.
    """

    def __init__(self, *args: Any, targets: Any = None, **kwargs: Any) -> None:
        self.args, self.kwargs, self.targets = args, kwargs, targets

    def __repr__(self) -> str:
        return f"Batch({len(self.args)} arguments, {list(self.kwargs)}, targets={type(self.targets).__name__})"


def as_batch(batch: Any) -> Batch:
    """Read what a DataLoader yields.

    A tensor, or a tuple or list of one, is the argument of forward. A tuple or list of two is that argument, and the
    targets. A mapping has the arguments by name. Raises TypeError for anything else.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Tensor):
        return Batch(batch)
    if isinstance(batch, Mapping):
        return Batch(**batch)
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        inputs, targets = batch if len(batch) == 2 else (batch[0], None)
        return Batch(targets=targets, **inputs) if isinstance(inputs, Mapping) else Batch(inputs, targets=targets)
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise TypeError(
        f"a batch is a tensor, (inputs, targets), or a mapping of forward's arguments, and this is {what}.\n"
        "Name the parts: kfac_fx.Batch(tokens, mask, targets=labels)."
    )
