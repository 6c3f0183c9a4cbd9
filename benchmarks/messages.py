"""The messages of a step on many processes, counted: `python -m benchmarks.messages`.

torch's fake process group takes the place of all processes but one, so a whole step of any number of processes runs in
one, with the messages of the real one and without the numbers of the others. The program counts the calls of
torch.distributed, and the bytes that this process gives to them or gets from them, whichever are more, in units of P,
the bytes of all parameters. An all-reduce counts twice, because it sends every number there and back. Messages of the
forward and backward in a step without anything due are left out: FSDP2 sends them for every optimizer.

The model is a GPT of 12 blocks and width 64, small enough for a laptop; its factors take 4.2 P. So that it behaves as a
large one, its sums travel in messages of P / 25, and dense ones in the backward.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # private; its import makes the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode  # private, and torch's own way to see every operation
from torch.utils._pytree import tree_leaves

import kfac_fx
from benchmarks.alive import AliveBytes
from benchmarks.decoder import Decoder
from benchmarks.program import console, table
from kfac_fx.estimator import estimator
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.rule import StepIntervals

OUT = Path(__file__).parent / "results" / "messages.json"
PLACEMENTS = {  # of KFAC, and whether FSDP2 shards the model
    "replicated": ("replicated", False),
    "owners": ("owners", False),
    "FSDP2, replicated": ("replicated", True),
    "FSDP2, owners": ("owners", True),
}
RANKS = (8, 64)
KINDS = {  # of the operations of torch.distributed, with the number of times that a message sends its numbers
    "allreduce_": ("all-reduce", 2),
    "reduce_": ("reduce", 1),
    "broadcast_": ("broadcast", 1),
    "allgather_": ("all-gather", 1),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
}
Sent = Counter[str]  # messages and bytes, by kind


class Language(nn.Module):
    """A GPT whose output layer is tied to its embedding."""

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


class Counting(TorchDispatchMode):
    """Counts messages, until `taken` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in KINDS:
            kind, times = KINDS[func.overloadpacket.__name__]
            sides = ([leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args[:2])
            self.sent[f"messages, {kind}"] += 1
            self.sent[f"bytes, {kind}"] += times * max(
                sum(t.numel() * t.element_size() for t in side) for side in sides
            )
        if func.namespace == "kfac_fx" and func.overloadpacket.__name__ == "fill_shares":  # an operation that sends
            whole, sizes, _ = args
            self.sent["messages, broadcast"] += sum(map(bool, sizes))
            self.sent["bytes, broadcast"] += whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))

    def taken(self) -> Sent:
        sent, self.sent = self.sent, Counter()
        return sent


@contextmanager
def fake_processes(ranks: int) -> Iterator[None]:
    """The first of so many processes, which nobody answers: options, gradients and paths are not compared."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    unasked = {"check_options": lambda *_: None, "check_gradients": lambda *_: None}
    try:
        with patch.multiple(Replicas, **unasked), patch.object(estimator, "MARKS", 1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def large_sums(bucket: int) -> Iterator[None]:
    """Inside, sums of a batch count as large, and travel in messages of so many bytes."""
    with (
        patch.object(estimator, "EARLY", 0),
        patch.object(estimator, "BUCKET", bucket),
        patch.object(estimator, "BUCKET", bucket),
    ):
        yield


def steps(depth: int, ranks: int, placement: str) -> Iterator[dict[str, Any]]:
    """The first step of every kind: what is due, its messages and bytes in units of P, and the most memory that its
    tensors take at once besides parameters and state, in the same units."""
    how, sharded = PLACEMENTS[placement]
    torch.manual_seed(0)
    model, ids = Language(depth, 64, 512, 64), torch.randint(512, (2, 16))
    unit = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with fake_processes(ranks), large_sums(unit // 25):
        net = kfac_fx.compile(model, (ids,), loss="categorical", in_place=True)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        optimizer = kfac_fx.KFAC(net, placement=how, seed=0)
        optimizer.param_groups[0]["lr"] = 1e-6  # short steps, which send as much
        schedule, kinds = optimizer._step_state.schedule, dict[str, tuple[Sent, Sent, int]]()
        for step in range(12):
            if step == 3:  # everything is due in some of the steps before
                schedule.intervals = StepIntervals(statistics=3, inverses=6, checks=4)
            due = {"statistics": schedule.recording, "a check": schedule.checking}
            kind = ", ".join(name for name, is_due in due.items() if is_due) or "nothing"
            optimizer.zero_grad()
            with AliveBytes() as alive, Counting() as counting:
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                before = counting.taken()
                optimizer.step()
            if step >= 3:
                kinds.setdefault(kind, (before, counting.taken(), alive.peak))
    of_model = kinds["nothing"][0]
    for kind, (before, in_step, peak) in kinds.items():
        sent = before - of_model + in_step
        yield {
            "processes": ranks,
            "placement": placement,
            "due": kind,
            "messages": {k.removeprefix("messages, "): n for k, n in sent.items() if k.startswith("messages")},
            "P": {k.removeprefix("bytes, "): round(n / unit, 3) for k, n in sent.items() if k.startswith("bytes")},
            "memory": round(peak / unit, 2),
        }


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table: kinds that carry less than a hundredth of P are counted together."""
    small = sum(n for kind, n in row["messages"].items() if row["P"][kind] < 0.01)
    large = [f"{n} {kind} {row['P'][kind]:.2f}" for kind, n in row["messages"].items() if row["P"][kind] >= 0.01]
    return {
        "processes": str(row["processes"]),
        "placement": row["placement"],
        "due": row["due"],
        "messages, P": ", ".join([*large, *[f"{small} of numbers"] * bool(small)]),
        "memory, P": f"{row['memory']:.2f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--depth", type=int, default=12, help="blocks of the model")
    parser.add_argument("--out", type=Path, help=f"write the results there; docs/placement.md takes {OUT.name}")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for ranks in chosen.ranks for name in PLACEMENTS for row in steps(chosen.depth, ranks, name)]
    console().print(table("messages of a step", [shown(row) for row in rows]))
    if chosen.out is not None:
        command = f"python -m benchmarks.messages --out benchmarks/results/{chosen.out.name}"
        chosen.out.write_text(json.dumps({"command": command, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
