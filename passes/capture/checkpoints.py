"""Checkpoints that save memory run as what they wrap, where a graph or a recording takes the place of what they would
run again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

# Private: what `torch.utils.checkpoint.checkpoint(use_reentrant=False)` runs around a function. There is no public way
# to switch it off, and users import `checkpoint` itself. Held by tests/compiler/test_checkpoints.py.
AROUND = "_checkpoint_without_reentrant_generator"


@contextmanager
def checkpoints_off() -> Iterator[None]:
    """Those that are not reentrant; `watch.custom_functions` sees the others."""
    original = getattr(checkpoint, AROUND)

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    setattr(checkpoint, AROUND, nothing)
    try:
        yield
    finally:
        setattr(checkpoint, AROUND, original)
