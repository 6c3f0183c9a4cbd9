"""Recurrent layers, written out for what is recorded, and by torch's kernels for what is evaluated.

**Written out**: at every step a linear layer of the input, one of the state, and the gates.

    y, h = recurrent("rnn_tanh", x, h0, [w, u, b, c])     x_0, x_1, ... = unbind(x)
                                                          h_1 = tanh(linear(h0, u, c) + linear(x_0, w, b))
                                                          h_2 = tanh(linear(h_1, u, c) + linear(x_1, w, b))
                                                          y, h = stack([h_1, h_2, ...]), h_T

With the cases first, y is a transpose of that stack, because torch's own output lies in memory with the steps first and
a dropout behind it draws in the order of memory.

Every weight has one use for each step, in the order of time, which the series approximations need. The weights of the
input could have one use with T positions, with the same sums over rows but no order. Packed sequences are computed with
their padding: a sequence keeps its state beyond its length, and its outputs there are no rows.

A first state that does not depend on the batch is expanded to one row for each case, so that its product with a weight
is a use like the others. A zero state adds nothing to the weight's gradient, but the bias beside it has a gradient.

**Kernels**: recurrent layers as torch computes them, in graphs that are evaluated and neither recorded nor
differentiated.

    recurrent("lstm", x, [h, c], weights, ...)  ->  run_layers("lstm", x, [h, c], weights, ...), which calls torch.lstm

`unroll` writes a node for every operation of every step, because a weight has a use in each. An evaluation needs no
uses, and a kernel of torch takes a part of the time. Packed sequences stay packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from .cases import with_row_mask
from .graphs.edit import Writer
from .graphs.labels import Label, labels
from .graphs.operations import op_name
from .ir import STEP, UNROLLED, Program
from .tracing.substitutes import STACK_OF_LAYERS, compute, run_layers

Stepped = Any  # an fx.Proxy, on which operations become nodes; or a tensor
State = list[Stepped]
Cell = Callable[[Stepped, Stepped, State], State]

# --- cells ------------------------------------------------------------------------------------------------------------
# A cell computes the new state from the products of the input and of the state, each with its bias, and from the state.
# The order of operations is torch's. The first element of a state is the output.


def lstm(x: Stepped, h: Stepped, state: State) -> State:
    """Hochreiter & Schmidhuber 1997, with forget gates."""
    gates = torch.chunk(h + x, 4, -1)
    i, f, g, o = (gates[n] for n in range(4))
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def gru(x: Stepped, h: Stepped, state: State) -> State:
    """Cho et al. 2014. As in torch, the reset gate multiplies the product of the state, not the state."""
    of_x, of_h = torch.chunk(x, 3, -1), torch.chunk(h, 3, -1)
    r = torch.sigmoid(of_h[0] + of_x[0])
    z = torch.sigmoid(of_h[1] + of_x[1])
    n = torch.tanh(of_x[2] + of_h[2] * r)
    return [(state[0] - n) * z + n]


def rnn_tanh(x: Stepped, h: Stepped, state: State) -> State:
    return [torch.tanh(h + x)]


def rnn_relu(x: Stepped, h: Stepped, state: State) -> State:
    return [torch.relu(h + x)]


CELLS: dict[str, Cell] = {"lstm": lstm, "gru": gru, "rnn_tanh": rnn_tanh, "rnn_relu": rnn_relu}

# --- the pass -------------------------------------------------------------------------------------------------------


def unroll(program: Program) -> Program:
    """Write out recurrent layers; see the module's docstring."""
    if not any(map(is_recurrent, program.graph.nodes)):
        return program
    write = Unroller(labels(program.graph, program.parameters))
    results: dict[fx.Node, State] = {}
    for node in program.graph.nodes:
        if is_recurrent(node):
            write.begin(node)
            results[node] = WRITTEN[op_name(node)](write, node)
            write.copies[node] = results[node][0].node  # operations of one result have no getitem
        elif op_name(node) == "getitem" and node.args[0] in results:
            write.copies[node] = results[node.args[0]][node.args[1]].node
        else:
            write.copy(node)
    return program.but(graph=write.graph, outputs=tuple(write.copies[node] for node in program.outputs))


def is_recurrent(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) in WRITTEN and not node.kwargs


class Unroller(Writer):
    """Writes the steps of recurrent layers. label: the labels of the old graph."""

    def __init__(self, label: Mapping[fx.Node, Label]) -> None:
        super().__init__()
        self.label = label
        self.padded: dict[fx.Node, Stepped] = {}  # packed data -> its padded form [steps, N, ...]
        self.masks: dict[tuple[fx.Node, int], Stepped] = {}

    def first(self, state: fx.Node, number: int | None, product: Stepped) -> Stepped:
        """A first state with one row for each case; see the module's docstring.

        Args:
            state: a node of the old graph, [N, h], or [layers, N, h].
            number: the layer's index; None if the state is [N, h].
            product: the product of the first input, [N, ...].
        """
        first = self(state) if number is None else self(state)[number]
        if self.label[state] is Label.ACT or "val" not in first.node.meta:
            return first
        return first.expand_as(product[..., : first.node.meta["val"].shape[-1]])

    def reached(self, lengths: Stepped, steps: int, like: Stepped) -> Stepped:
        """[steps, N]: whether the sequence has the step."""
        key = (lengths.node, steps)
        if key not in self.masks:
            device = like.node.meta["val"].device
            step: Stepped = self.create_proxy("call_function", torch.arange, (steps,), {"device": device})
            self.masks[key] = torch.lt(step.unsqueeze(-1), lengths.to(device))
        return self.masks[key]

    def linear(self, x: Stepped, weight: Stepped, bias: Stepped | None, reached: Stepped | None) -> Stepped:
        """A linear layer of one step. reached: [N, 1], whether the sequence has the step."""
        y = F.linear(x, weight, bias)
        return y if reached is None else self.create_proxy("call_function", with_row_mask, (y, reached), {})

    def pack(self, y: Stepped, mask: Stepped, rows: Any) -> Stepped:
        """[steps, N, ...] -> [rows, ...]. The number of rows is data."""
        value = y.node.meta["val"]
        with self.valued(value.new_empty(rows, *value.shape[2:])):
            data = y[mask]
        self.padded[data.node] = y
        return data

    def unpack(self, data: Stepped, mask: Stepped) -> Stepped:
        """[rows, ...] -> [steps, N, ...], with arbitrary values beyond the lengths."""
        if data.node in self.padded:
            return self.padded[data.node]
        place = mask.flatten().cumsum(0).view_as(mask) - 1
        return data[place.clamp(min=0)]


# --- operations of `tracing.substitutes`, written out -----------------------------------------------------------------


def write_cell(write: Unroller, node: fx.Node) -> State:
    """lstm_cell(x, [h, c], w, u, b, d), ..., and `recurrent_cell`: one step."""
    stands = op_name(node) == "recurrent_cell"
    arguments: Any = (*node.args[stands:], None, None)
    kind = str(node.args[0]) if stands else op_name(node).removesuffix("_cell")
    x, state, w, u, b, d = arguments[:6]
    write.meta[UNROLLED] = f"a linear layer in each {kind}_cell"
    product = F.linear(write(x), write(w), write(b))
    first = [write.first(tensor, None, product) for tensor in (state if isinstance(state, (list, tuple)) else [state])]
    return CELLS[kind](product, F.linear(first[0], write(u), write(d)), first)


def write_layers(write: Unroller, node: fx.Node) -> State:
    """`recurrent`: a stack of layers, with all their steps."""
    arguments: Any = node.args
    kind, x, state, weights, lengths, steps, biases, layers, dropout, bidirectional, batch_first = arguments
    write.begin(node, node.name.replace("recurrent", kind))
    write.meta[UNROLLED] = f"a linear layer at each of {steps} steps of {kind}"
    directions = 2 if bidirectional else 1
    count = len(weights) // (layers * directions)  # weights of one layer and direction
    y, mask, rows = write(x), None, None
    if lengths is not None:
        rows = y.node.meta["val"].shape[0]
        mask = write.reached(write(lengths), steps, y)
        y = write.unpack(y, mask)
    inputs = by_step(write, y, steps, 1 if batch_first else 0)
    reached = None if mask is None else by_step(write, mask.unsqueeze(-1), steps)
    last: list[State] = []
    for layer in range(layers):
        outputs: list[list[Stepped]] = []
        for reverse in range(directions):
            number = directions * layer + reverse
            its_weights = Weights(*arranged(write(weights[number * count : (number + 1) * count]), biases))
            direction = Direction(CELLS[kind], its_weights, reached, bool(reverse), f"l{layer}{'_reverse' * reverse}")
            output, end = through_time(write, direction, inputs, [(tensor, number) for tensor in state])
            outputs.append(output)
            last.append(end)
        write.at("")
        inputs = outputs[0] if directions == 1 else [torch.cat(both, -1) for both in zip(*outputs, strict=True)]
        if dropout and layer < layers - 1:
            inputs = by_step(write, dropped(write, torch.stack(inputs), dropout, mask, rows), steps)
    y = torch.stack(inputs)
    y = y.transpose(0, 1) if batch_first else y
    ends = [torch.stack(states) for states in zip(*last, strict=True)]
    return [y if mask is None else write.pack(y, mask, rows), *ends]


class Weights(NamedTuple):
    """The weights of a layer and direction: w of the input, u of the state, their biases b and d, the projection r."""

    w: Stepped
    u: Stepped
    b: Stepped | None
    d: Stepped | None
    r: Stepped | None


def arranged(weights: Sequence[Stepped], biases: bool) -> list[Stepped | None]:
    """torch's order w, u[, b, d][, r] -> the order of `Weights`."""
    w, u, *rest = weights
    b, d, *r = rest if biases else (None, None, *rest)
    return [w, u, b, d, r[0] if r else None]


class Direction(NamedTuple):
    """One layer in one direction. reached: [N, 1] for every step, if sequences have lengths; see `Unroller.reached`."""

    cell: Cell
    weights: Weights
    reached: Sequence[Stepped] | None
    reverse: bool
    name: str


def through_time(
    write: Unroller, layer: Direction, inputs: Sequence[Stepped], first: Sequence[tuple[fx.Node, int]]
) -> tuple[list[Stepped], State]:
    """All steps of a layer: (outputs in the order of the inputs, last state)."""
    (w, u, b, d, r), reached = layer.weights, layer.reached
    outputs: list[Stepped] = [None] * len(inputs)
    state: State = []
    for step in reversed(range(len(inputs))) if layer.reverse else range(len(inputs)):
        write.at(f"{layer.name}_t{step}")
        write.meta[STEP] = step, len(inputs)
        alive = None if reached is None else reached[step]
        product = write.linear(inputs[step], w, b, alive)
        state = state or [write.first(tensor, number, product) for tensor, number in first]
        new = layer.cell(product, write.linear(state[0], u, d, alive), state)
        if r is not None:  # the state is a projection of the output gate's result: Sak et al. 2014
            new[0] = write.linear(new[0], r, None, alive)
        state = new if alive is None else [torch.where(alive, *both) for both in zip(new, state, strict=True)]
        outputs[step] = state[0]
    del write.meta[STEP]
    return outputs, state


def dropped(write: Unroller, y: Stepped, chance: float, mask: Stepped | None, rows: Any) -> Stepped:
    """Dropout between layers, with torch's random numbers, which are drawn for the packed data of packed sequences."""
    if mask is None:
        return F.dropout(y, chance, True)
    data = write.pack(y, mask, rows)
    with write.valued(data.node.meta["val"]):
        data = F.dropout(data, chance, True)
    return write.unpack(data, mask)


def by_step(write: Unroller, x: Stepped, steps: int, dim: int = 0) -> list[Stepped]:
    """The steps of x along a dimension."""
    step = write.representative(x.node.meta["val"].select(dim, 0))
    with write.valued((step,) * steps):  # torch.unbind of a value would make a slice for every step
        parts = torch.unbind(x, dim)
    return [parts[n] for n in range(steps)]


def write_packed(write: Unroller, node: fx.Node) -> State:
    """`packed`"""
    x, lengths = write(node.args)
    steps = x.node.meta["val"].shape[0]
    return [write.pack(x, write.reached(lengths, steps, x), node.meta["val"].shape[0])]


def write_unpacked(write: Unroller, node: fx.Node) -> State:
    """`unpacked`"""
    data, lengths, steps, padding = write(node.args)
    mask = write.reached(lengths, steps, data)
    y = write.unpack(data, mask)
    missing = steps - y.node.meta["val"].shape[0]
    rest = y.node.meta["val"].dim() - 2
    if missing:
        y = F.pad(y, (0, 0) * (rest + 1) + (0, missing))
    return [torch.where(mask[(..., *(None,) * rest)], y, padding)]


WRITTEN: dict[str, Callable[[Unroller, fx.Node], State]] = {
    **{f"{name}_cell": write_cell for name in CELLS},
    "recurrent": write_layers,
    "recurrent_cell": write_cell,
    "packed": write_packed,
    "unpacked": write_unpacked,
}


def as_kernels(program: Program) -> Program:
    """Let the operations of `tracing.substitutes` that stand for recurrent layers and packed sequences compute."""
    program = program.copied()
    compute(program.graph)
    return program


def recurrent_stacks(graph: fx.Graph) -> list[fx.Node]:
    """The stacks of recurrent layers in a captured graph, or in one `as_kernels`."""
    return [node for node in graph.nodes if op_name(node) in (STACK_OF_LAYERS, run_layers.__name__)]


def lengths_of(stack: fx.Node) -> fx.Node | None:
    """The node of the lengths of packed sequences."""
    lengths: fx.Node | None = argument(stack, "lengths")
    return lengths


def draws_noise(stack: fx.Node) -> bool:
    """Whether there is dropout between the layers of a stack."""
    return bool(argument(stack, "dropout"))


def argument(stack: fx.Node, name: str) -> Any:
    return signature(run_layers).bind(*stack.args).arguments[name]
