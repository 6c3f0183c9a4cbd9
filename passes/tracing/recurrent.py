"""Recurrent layers as single operations while a model is traced.

    nn.LSTM, nn.GRU, nn.RNN, torch.lstm, ...                    recurrent(kind, x, ...)
    nn.LSTMCell, nn.GRUCell, nn.RNNCell, torch.lstm_cell, ...   recurrent_cell(kind, x, ...)
    pack_padded_sequence(x, lengths).data                       packed(x, lengths)
    pad_packed_sequence(sequence)                               unpacked(data, lengths, ...)

torch.export would trace the fused calls step by step, which is slow. It cannot trace packed sequences, whose sizes are
data, nor the fused cells of CUDA, some of which do not run without values. These operations only know shapes; the pass
`unroll` writes them out. The capture holds for one number of steps, which is guarded as every shape is, and for one
length of the longest sequence of every packed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ..errors import UntraceableError
from ..torch_private import EXPECTED_HIDDEN_SIZE, PACK, UNPACK, assert_size
from .substitutes import packed, recurrent, recurrent_cell, replaced_in_thread, unpacked

CELL_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
ATTENTION = F.multi_head_attention_forward.__name__
ToldCases = tuple[str, Any]  # a layer in words, with the layout that it takes; the symbolic size of its cases


@contextmanager
def recurrent_layers(longest: Sequence[int] = ()) -> Iterator[list[ToldCases]]:
    """Inside, torch's recurrent layers and packed sequences are operations that stand for them.

    Yields a list, which is filled with what recurrent layers and attention know of their cases.

    longest: the length of the longest sequence of each packed batch, in the order of packing; by default that of its
        padding.
    """
    mode = RecurrentMode(longest)

    def expected(below: Callable[..., Any], self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> Any:
        if batch_sizes is None or id(batch_sizes) not in mode.batches:
            return below(self, input, batch_sizes)
        layers = self.num_layers * (2 if self.bidirectional else 1)
        return layers, mode.batches[id(batch_sizes)].cases, self.hidden_size

    with replaced_in_thread(nn.RNNBase, EXPECTED_HIDDEN_SIZE, expected), mode:
        yield mode.told


@dataclass(frozen=True)
class PackedBatch:
    """A batch of packed sequences.

    Attributes:
        sizes: [steps], the number of sequences that reach each step; torch keeps this tensor.
        lengths: [N], of the sequences.
        steps: the length of the longest.
    """

    sizes: Tensor
    lengths: Tensor
    steps: int

    @property
    def cases(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True)
class Packs:
    """The packed batches of a graph.

    Attributes:
        steps: the length of the longest sequence of each, for which the capture holds.
        lengths: a function of the graph's inputs to the lengths [N] of the sequences of each batch.
    """

    steps: tuple[int, ...]
    lengths: Callable[..., tuple[Tensor, ...]]

    @torch.no_grad()
    def longest(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The length of the longest sequence of each batch. It waits for the device if the lengths are on one."""
        return tuple(int(lengths.max()) for lengths in self.lengths(*values))


def packs_in(graph: fx.Graph, root: nn.Module) -> Packs | None:
    """The packed batches of a graph, or None if there are none."""
    nodes = [node for node in graph.nodes if node.target is torch.ops.kfac_fx.packed.default]
    if not nodes:
        return None
    copies: dict[fx.Node, fx.Node] = {}
    lengths = fx.Graph()
    lengths.graph_copy(graph, copies)
    lengths.output(tuple(copies[node.args[1]] for node in nodes))
    lengths.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    steps = tuple(int(node.args[0].meta["val"].shape[0]) for node in nodes)
    return Packs(steps, fx.GraphModule(root, lengths))


def refuse_packed(model: str, tree: Any) -> None:
    """Raises UntraceableError for packed sequences among the arguments."""
    if isinstance(tree, PackedSequence):
        raise UntraceableError(
            f"{model} takes a PackedSequence. The number of its sequences is data, which no captured graph knows.\n"
            "Pass the padded batch and a tensor of lengths, and pack inside forward: "
            "pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)."
        )
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    for subtree in inner:
        refuse_packed(model, subtree)


class RecurrentMode(TorchFunctionMode):
    def __init__(self, longest: Sequence[int]) -> None:
        super().__init__()
        self.batches: dict[int, PackedBatch] = {}  # by the id of `sizes`
        self.longest = iter(longest)
        self.told: list[ToldCases] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name == ATTENTION and args and args[0].dim() == 3:
            self.tell("attention of torch takes [positions, cases, features]", args[0].shape[1])
        if kwargs or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if name in CELL_KINDS:
            return self.layer(name, func, args)
        if name.removesuffix("_cell") in CELL_KINDS:
            return self.cell(name.removesuffix("_cell"), *args)
        if name == PACK:
            return self.pack(*args)
        if name == UNPACK and id(args[1]) in self.batches:
            return self.unpack(*args)
        if name == "__getitem__" and id(args[0]) in self.batches and args[1] == 0:
            return self.batches[id(args[0])].cases  # torch would read the number of cases out of a tensor
        return func(*args, **kwargs)

    def tell(self, layer: str, cases: Any) -> None:
        if isinstance(cases, torch.SymInt):
            self.told.append((layer, cases))

    def layer(self, kind: str, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        x, *rest = args
        if isinstance(rest[2], bool):
            state, weights, biases, layers, dropout, train, bidirectional, batch_first = rest
            lengths, steps = None, int(x.shape[1 if batch_first else 0])  # a guard of the capture
            layout = "[cases, steps, features]" if batch_first else "[steps, cases, features]"
            self.tell(f"{kind} takes {layout}", x.shape[0 if batch_first else 1])
        elif id(rest[0]) in self.batches:
            batch = self.batches[id(rest[0])]
            state, weights, biases, layers, dropout, train, bidirectional = rest[1:]
            lengths, steps, batch_first = batch.lengths, batch.steps, False
            self.tell(f"{kind} takes packed sequences", batch.lengths.shape[0])
        else:
            return func(*args)  # packed outside of forward
        states = list(state) if kind == "lstm" else [state]
        chance = dropout if train and layers > 1 else 0.0
        stack = biases, layers, chance, bidirectional, batch_first
        return tuple(recurrent(kind, x, states, list(weights), lengths, steps, *stack))

    def cell(self, kind: str, x: Tensor, state: Any, *weights: Tensor | None) -> Any:
        w, u, b, d = (*weights, None, None)[:4]
        assert w is not None and u is not None, f"bug in kfac_fx: {kind}_cell without weights"
        self.tell(f"{kind}_cell takes [cases, features]", x.shape[0])
        new = recurrent_cell(kind, x, list(state) if kind == "lstm" else [state], w, u, b, d)
        return tuple(new) if kind == "lstm" else new[0]

    def pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        x = x.transpose(0, 1) if batch_first else x
        assert_size(x.shape[1] == lengths.shape[0])  # type: ignore[no-untyped-call]
        steps = next(self.longest, int(x.shape[0]))
        reached = torch.arange(steps, device=lengths.device)[:, None] < lengths
        batch = PackedBatch(reached.sum(1), lengths, steps)
        self.batches[id(batch.sizes)] = batch
        return packed(x[:steps], lengths), batch.sizes

    def unpack(
        self, data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        batch = self.batches[id(sizes)]
        padded = unpacked(data, batch.lengths, int(total), float(padding))
        return padded.transpose(0, 1) if batch_first else padded, batch.lengths
