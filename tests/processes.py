"""Processes that a test starts. They are forks of a process that has imported the library, and has computed nothing:
an import takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing as mp

FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["kfac_fx"])


def started(target: Callable[..., None], ranks: Iterable[int], *arguments: Any) -> list[BaseProcess]:
    """A process for every rank, which calls `target(rank, *arguments)`."""
    processes: list[BaseProcess] = [
        FORKS.Process(target=target, args=(rank, *arguments), daemon=True) for rank in ranks
    ]
    for process in processes:
        process.start()
    return processes
