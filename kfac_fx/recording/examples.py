"""The examples of a batch in arguments of any structure: how many there are, and the first of them.

A progress bar for what takes long, on terminals only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from kfac_fx.passes.graphs import pytree


def length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in pytree.leaves(value)):
        return len(value)
    leaves = (leaf for leaf in pytree.leaves(value) if isinstance(leaf, Tensor) and leaf.dim())
    return next((leaf.shape[0] for leaf in leaves), None)


def examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the first argument that has any: the length of a list or tuple, the first dimension of a tensor."""
    found = (length(value) for value in (*args, *kwargs.values()))
    return next((n for n in found if n is not None), 1)


def cut(value: Any, total: int, kept: int) -> Any:
    """The first `kept` of `total` examples: of a list as long, of tensors in anything else."""
    if isinstance(value, (list, tuple)) and len(value) == total and type(value) in (list, tuple):
        return value[:kept]
    leaves, spec = pytree.flatten(value)
    whole = (isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total for leaf in leaves)
    return pytree.unflatten([leaf[:kept] if has else leaf for leaf, has in zip(leaves, whole, strict=True)], spec)


# --- progress ---------------------------------------------------------------------------------------------------------


Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before anything is shown


def tracked(
    items: Iterable[tuple[int, Item]], total: int, what: str, console: Console | None = None, after: float = PATIENCE
) -> Iterator[Item]:
    """Yield the second of every (amount, item); what is done of `total` is shown if there is more to do `after` some
    seconds and the console, stderr if None, is a terminal."""
    console = console or Console(file=sys.stderr)
    start, done = time.monotonic(), 0
    bar: Progress | None = None
    try:
        for amount, item in items:
            yield item
            done += amount
            if bar is None and console.is_terminal and done < total and time.monotonic() - start >= after:
                bar = Progress(console=console, transient=True)
                bar.start()
                task = bar.add_task(what, total=total)
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
