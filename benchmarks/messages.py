"""The messages of a step on many processes, counted: `python -m benchmarks.messages`.

torch's fake process group takes the place of all processes but one, so a whole step of any number of processes runs in
one, with the messages of the real one and without the numbers of the others. The program counts the calls of
torch.distributed inside of a step, and the bytes that this process gives to them, in units of P, the bytes of all
parameters. An all-reduce counts twice, because it sends every number there and back. The gradients that FSDP2 or
DistributedDataParallel averages in the backward are not in it.

The fake group leaves what it receives unset, so the steps train nothing.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private, and torch's own way to see every operation

import kfac_fx
from benchmarks.alive import AliveBytes
from benchmarks.decoder import Decoder
from benchmarks.program import console, table
from kfac_fx.linalg.processes import Replicas

OUT = Path(__file__).parent / "results" / "messages.json"
PLACEMENTS = {  # the options of KFAC, and whether FSDP2 shards the model
    "replicated": ("replicated", False),
    "owners": ("owners", False),
    "FSDP2, replicated": ("replicated", True),
    "FSDP2, owners": ("owners", True),
}
RANKS = (8, 64, 1024)
STEPS = 18
KINDS = {  # of the operations of torch.distributed, with the number of times that a message sends its numbers
    "allreduce_": ("all-reduce", 2),
    "allreduce_coalesced_": ("all-reduce", 2),
    "reduce_": ("reduce", 1),
    "broadcast_": ("broadcast", 1),
    "allgather_": ("all-gather", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
}


class Language(nn.Module):
    """A GPT with an output layer that is tied to its embedding."""

    def __init__(self, depth: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Decoder(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


@dataclass
class Sent:
    """The messages of one step by kind, and the bytes of each kind."""

    messages: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    peak: int = 0  # bytes of tensors that the step made, at once


class Counting(TorchDispatchMode):
    """Counts messages in `of_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.of_step = Sent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            kind, times = KINDS.get(name, (name, 1))
            given = [args[1] if name in TWO_SIDED else args[0]]
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
            self.of_step.messages[kind] += 1
            self.of_step.sent[kind] += times * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return func(*args, **(kwargs or {}))
