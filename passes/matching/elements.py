"""Which elements of a parameter a tensor holds that was gathered from it: tables of relative positions, slices whose
length the batch decides.

table[index].view(s, s, h).permute(2, 0, 1)   ->   the same of the elements' numbers, beside it in the graph

The numbers are constants that nothing reads but the tap of a use; without one they are no part of the emitted module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graphs.labels import Label, has_gradient, is_layer_of_data, labels
from ..graphs.operations import CASTS, EXPANDS, PARTS, VIEWS, op_name
from ..layers.embedding import learned
from .linear_maps import Maps

SELECTS = (VIEWS - CASTS) | PARTS | EXPANDS
SELECTS |= {"index", "index_select", "flip", "roll", "take", "unfold", "diagonal", "gather"}
KEY = "elements"  # in a node's meta: (parameter, the node of the numbers, of what is made of it: `linear_maps.Maps.of`)


def note_elements(graph: fx.Graph, parameters: Iterable[str], root: nn.Module) -> None:
    """For every tensor that holds nothing but elements of one parameter, or of a table made of it, and constants. The
    number -1 is none of the elements."""
    label = labels(graph, parameters)
    notes = Notes(graph, label, Maps(graph, label, root))
    for node in list(graph.nodes):
        node.meta.pop(KEY, None)
        if label[node] is Label.PURE and notes.gathered(node) and not merely_viewed(node):
            table = notes.table(node)
            node.meta[KEY] = notes.parameter(table), notes.numbers(node), notes.maps.of(table)


def merely_viewed(node: fx.Node) -> bool:
    """Then matchers need no help."""
    while node.op != "get_attr" and op_name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


class Notes:
    """The numbers of nodes, made when asked for."""

    def __init__(self, graph: fx.Graph, label: Mapping[fx.Node, Label], maps: Maps) -> None:
        self.graph, self.label, self.maps = graph, label, maps
        self.made: dict[fx.Node, fx.Node] = {}
        self.known: dict[fx.Node, bool] = {}

    def gathered(self, node: fx.Node) -> bool:
        if node not in self.known:
            self.known[node] = self.is_table(node) or self.gathers(node)
        return self.known[node] and self.label.get(node) is Label.PURE

    def gathers(self, node: fx.Node) -> bool:
        """Whether the node moves elements of its one operand that is no constant."""
        if op_name(node) not in GATHERS or not has_gradient(node):
            return False
        pure = [operand for operand in node.all_input_nodes if self.label.get(operand) is not Label.CONST]
        return len(pure) == 1 and self.gathered(pure[0]) and source(node) is pure[0]

    def is_table(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or self.maps.of(node) is not None

    def table(self, node: fx.Node) -> fx.Node:
        """What the elements of a node are numbered in."""
        while not self.is_table(node):
            node = source(node)
        return node

    def parameter(self, table: fx.Node) -> str:
        made_of = self.maps.parameter(table)
        assert made_of is not None, "bug in kfac_fx: a table that is made of nothing"
        return str(made_of.target)

    def numbers(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            with self.graph.inserting_after(node):
                self.made[node] = self.make(node)
        return self.made[node]

    def make(self, node: fx.Node) -> fx.Node:
        if self.is_table(node):
            return self.graph.call_function(numbered, (node,))
        before = self.numbers(source(node))
        if op_name(node) in CASTS:
            return before
        special = SPECIAL.get(op_name(node))
        if special is not None:
            return self.graph.call_function(special, (before, *rest(node)))
        return self.graph.node_copy(node, lambda n: before if n is source(node) else n)


def source(node: fx.Node) -> Any:
    """The operand whose elements are moved."""
    return node.args[PLACE.get(op_name(node), 0)]


def rest(node: fx.Node) -> tuple[Any, ...]:
    place = PLACE.get(op_name(node), 0)
    return (*node.args[:place], *node.args[place + 1 :])


# --- numbers --------------------------------------------------------------------------------------------------------


def numbered(parameter: Tensor) -> Tensor:
    """The number of every element, in the shape of the parameter."""
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def looked_up(numbers: Tensor, ids: Tensor, padding_idx: int | None, *_: Any) -> Tensor:
    found = numbers[ids]
    if padding_idx is None:
        return found
    return found.masked_fill((ids == padding_idx % numbers.shape[0]).unsqueeze(-1), -1)


def beside_constant(numbers: Tensor, constant: Any) -> Tensor:
    """Of a sum."""
    shape = constant.shape if isinstance(constant, Tensor) else ()
    return numbers.expand(torch.broadcast_shapes(numbers.shape, shape))


def where_not_masked(numbers: Tensor, mask: Tensor, _: Any) -> Tensor:
    shape = torch.broadcast_shapes(numbers.shape, mask.shape)
    return numbers.expand(shape).masked_fill(mask, -1)


def where_kept(numbers: Tensor, mask: Tensor, _: Any) -> Tensor:
    return where_not_masked(numbers, mask.logical_not(), _)


SPECIAL: dict[str, Callable[..., Any]] = {
    "embedding": looked_up,
    "add": beside_constant,
    "masked_fill": where_not_masked,
    "where": where_kept,
}
PLACE = {"embedding": 1, "where": 1}
GATHERS = SELECTS | CASTS | SPECIAL.keys()


# --- tables that layers are applied to ------------------------------------------------------------------------------


def mark_tables(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """A parameter in the place of a layer's input, or behind it, is an embedding of all its rows.

    layer_norm(table, w, b)           ->   layer_norm(learned(table), w, b)
    linear(dropout(table)[:n], w)     ->   linear(dropout(learned(table))[:n], w)
    """
    label = labels(graph, parameters)
    for node in [node for node in graph.nodes if label[node] is Label.FREE and is_layer_of_data(node, label)]:
        table, reader = node.args[0], node
        if not isinstance(table, fx.Node) or label[table] is not Label.PURE:
            continue
        while not merely_viewed(table):
            before = [operand for operand in table.all_input_nodes if label.get(operand) is Label.PURE]
            if len(before) != 1:
                break
            (table, reader) = before[0], table
        if merely_viewed(table) and (reader is node or has_rows(table)):
            with graph.inserting_before(reader):
                marked = graph.call_function(learned, (table,))
            marked.meta = dict(table.meta) | {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
            reader.replace_input_with(table, marked)


def has_rows(table: fx.Node) -> bool:
    value = table.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 1


# --- masks of attention ---------------------------------------------------------------------------------------------


def expand_masks(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """A mask that is added inside attention has a row for every case, so that its gradient has one, too.

    sdpa(q, k, v, table)   ->   sdpa(q, k, v, table.expand(n, -1, -1, -1))
    """
    attention = [node for node in graph.nodes if op_name(node) == "scaled_dot_product_attention"]
    if not attention:
        return
    label = labels(graph, parameters)
    for node in attention:
        given = [*node.args[3:4], *(value for key, value in node.kwargs.items() if key == "attn_mask")]
        if not given or not isinstance(given[0], fx.Node):
            continue
        query, mask = node.args[0], given[0]
        seen, known = (one.meta.get("val") if isinstance(one, fx.Node) else None for one in (query, mask))
        if label[mask] not in (Label.PURE, Label.FREE) or not isinstance(seen, Tensor) or not isinstance(known, Tensor):
            continue
        new = seen.dim() - known.dim()  # dimensions that the mask lacks
        if new < 0 or (new == 0 and known.shape[0] != 1):
            continue
        rest = [1] * (new - 1) + [-1] * (seen.dim() - max(1, new))
        with graph.inserting_before(node):
            cases: Any = seen.shape[0]
            if not isinstance(cases, int):
                cases = graph.call_function(torch.ops.aten.sym_size.int, (query, 0))
                cases.meta["val"] = seen.shape[0]
            expanded = graph.call_method("expand", (mask, (cases, *rest)))
        expanded.meta = {**node.meta, "val": known.expand(seen.shape[0], *rest)}
        node.replace_input_with(mask, expanded)
