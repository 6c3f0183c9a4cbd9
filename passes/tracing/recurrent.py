"""Recurrent layers as single operations: what torch's fused calls become while a model is traced.

    nn.LSTM, nn.GRU, nn.RNN, torch.lstm, ...                    recurrent(kind, x, ...)
    nn.LSTMCell, nn.GRUCell, nn.RNNCell, torch.lstm_cell, ...   recurrent_cell(kind, x, ...)
    pack_padded_sequence(x, lengths).data                       packed(x, lengths)
    pad_packed_sequence(sequence)                               unpacked(data, lengths, ...)

Traced as they are, the fused calls cost torch.export a pass through every step, and packed sequences do not trace at
all, for their sizes are data; nor do the fused cells of CUDA, not all of which have shapes without numbers. These
operations only know shapes; the pass `unroll` writes them out. The number of steps is a fact of the capture, guarded as
every shape; so are the lengths of packed sequences as far as they are sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ..errors import UntraceableError
from ..torch_private import PACK, UNPACK, assert_size
from .substitutes import packed, recurrent, recurrent_cell, unpacked

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def recurrent_layers(longest: Sequence[int] = ()) -> Iterator[None]:
    """Inside, torch's recurrent layers and packed sequences are operations that stand for them.

    longest: the longest sequence of each packed batch, in the order of packing; else all of its padding.
    """
    mode = _Recurrent(longest)
    original = nn.RNNBase.get_expected_hidden_size

    def expected(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> tuple[int, int, int]:
        if batch_sizes is None or id(batch_sizes) not in mode.known:
            return original(self, input, batch_sizes)
        width = self.proj_size or self.hidden_size
        return self.num_layers * (2 if self.bidirectional else 1), mode.known[id(batch_sizes)].cases, width

    nn.RNNBase.get_expected_hidden_size = expected  # type: ignore[method-assign]  # it reads a size out of a tensor
    try:
        with mode:
            yield
    finally:
        nn.RNNBase.get_expected_hidden_size = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Batch:
    """A batch of packed sequences: `sizes` [steps] is what torch keeps of it, how many sequences reach each step."""

    sizes: Tensor
    lengths: Tensor
    steps: int

    @property
    def cases(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True)
class Packs:
    """The packed batches of a graph. steps: of the longest sequence of each, a fact of the capture; lengths: computes
    those of all sequences from the graph's inputs."""

    steps: tuple[int, ...]
    lengths: Callable[..., tuple[Tensor, ...]]

    @torch.no_grad()
    def longest(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Waits for the device, if the lengths are there."""
        return tuple(int(one.max()) for one in self.lengths(*values))


def packs_in(graph: fx.Graph, root: nn.Module) -> Packs | None:
    found = [node for node in graph.nodes if node.target is torch.ops.kfac_fx.packed.default]
    if not found:
        return None
    copies: dict[fx.Node, fx.Node] = {}
    own = fx.Graph()
    own.graph_copy(graph, copies)
    own.output(tuple(copies[node.args[1]] for node in found))
    own.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    steps = tuple(int(node.args[0].meta["val"].shape[0]) for node in found)
    return Packs(steps, fx.GraphModule(root, own))


def refuse_packed(model: str, tree: Any) -> None:
    """Raises UntraceableError for packed sequences among the arguments: how many there are is in their data."""
    if isinstance(tree, PackedSequence):
        raise UntraceableError(
            f"{model} takes a PackedSequence, whose number of sequences is data and no size, so no graph knows it.\n"
            "Hand in the padded batch and a tensor of lengths, and pack inside forward: "
            "pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)."
        )
    for one in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ():
        refuse_packed(model, one)


class _Recurrent(TorchFunctionMode):
    def __init__(self, longest: Sequence[int]) -> None:
        super().__init__()
        self.known: dict[int, _Batch] = {}  # by the id of `sizes`
        self.longest = iter(longest)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if kwargs or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if name in KINDS:
            return self.layer(name, func, args)
        if name.removesuffix("_cell") in KINDS:
            return self.cell(name.removesuffix("_cell"), *args)
        if name == PACK:
            return self.pack(*args)
        if name == UNPACK and id(args[1]) in self.known:
            return self.unpack(*args)
        if name == "__getitem__" and id(args[0]) in self.known and args[1] == 0:
            return self.known[id(args[0])].cases  # the size of the batch, where torch would read it out of a tensor
        return func(*args, **kwargs)

    def layer(self, kind: str, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        x, *rest = args
        if isinstance(rest[2], bool):
            state, weights, biases, layers, dropout, train, bidirectional, batch_first = rest
            lengths, steps = None, int(x.shape[1 if batch_first else 0])  # a guard of the capture
        elif id(rest[0]) in self.known:
            batch = self.known[id(rest[0])]
            state, weights, biases, layers, dropout, train, bidirectional = rest[1:]
            lengths, steps, batch_first = batch.lengths, batch.steps, False
        else:
            return func(*args)  # packed outside of forward
        states = list(state) if kind == "lstm" else [state]
        chance = dropout if train and layers > 1 else 0.0
        found = recurrent(
            kind, x, states, list(weights), lengths, steps, biases, layers, chance, bidirectional, batch_first
        )
        return tuple(found)

    def cell(self, kind: str, x: Tensor, state: Any, *weights: Tensor | None) -> Any:
        w, u, b, d = (*weights, None, None)[:4]
        assert w is not None and u is not None, f"bug in kfac_fx: {kind}_cell without weights"
        found = recurrent_cell(kind, x, list(state) if kind == "lstm" else [state], w, u, b, d)
        return tuple(found) if kind == "lstm" else found[0]

    def pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        x = x.transpose(0, 1) if batch_first else x
        assert_size(x.shape[1] == lengths.shape[0])  # type: ignore[no-untyped-call]
        steps = next(self.longest, int(x.shape[0]))
        reached = torch.arange(steps, device=lengths.device)[:, None] < lengths
        batch = _Batch(reached.sum(1), lengths, steps)
        self.known[id(batch.sizes)] = batch
        return packed(x[:steps], lengths), batch.sizes

    def unpack(
        self, data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        batch = self.known[id(sizes)]
        padded = unpacked(data, batch.lengths, int(total), float(padding))
        return padded.transpose(0, 1) if batch_first else padded, batch.lengths
