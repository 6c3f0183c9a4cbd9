"""The order of the cases in every node: that of the inputs, or one that a sort of the cases has made.

    lengths, order = torch.sort(lengths, descending=True)    in pack_padded_sequence(x, lengths, enforce_sorted=False)
    y = f(x.index_select(0, order))
    z = y.index_select(0, inverse of order)                  in pad_packed_sequence

The cases of z are in the order of the inputs again, so a mask of the inputs fits it. The index of a sort has as many
elements as what it sorts has cases, also where the capture has a symbol for each of these sizes.
"""

from __future__ import annotations

import re
from typing import Any

from torch import SymInt, Tensor, fx

from .graphs.labels import in_example, shape_of
from .graphs.operations import CASTS, SHAPE_ONLY, op_name

Orders = frozenset[fx.Node | None]  # the sorts that orders of cases come from; None: that of the inputs
OF_INPUTS: Orders = frozenset({None})


class CaseOrder:
    """The order of the cases in the nodes of a graph.

    Attributes:
        orders: a node -> the orders of cases that it depends on: none, one, or several that are mixed.
        indexes: the index that a sort of cases returns, or its inverse -> (the sort, whether it is the inverse).
        picked: nodes that pick cases by such an index.
        same: the name of a size -> the size that it is equal to.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.orders: dict[fx.Node, Orders] = {}
        self.indexes: dict[fx.Node, tuple[fx.Node, bool]] = {}
        self.picked: set[fx.Node] = set()
        self.same: dict[str, int | SymInt] = {}
        for node in graph.nodes:
            if (index := self.index(node)) is not None:
                self.indexes[node] = index
            self.orders[node] = self.order(node)

    def sort_of(self, node: fx.Node) -> fx.Node | None:
        """The sort that its cases are in the order of, or mixed with; None: they are in that of the inputs."""
        return next((sort for sort in self.orders[node] if sort is not None), None)

    def size(self, size: int | SymInt) -> int | SymInt:
        """The size, or the one that stands for all that are equal to it."""
        return self.same.get(str(size), size)

    def sizes(self, node: fx.Node) -> list[str]:
        """As `sizes_of`, with one name for sizes that are equal."""
        return [re.sub(r"[a-z]\w*", lambda name: str(self.same.get(name[0], name[0])), str(s)) for s in shape_of(node)]

    def index(self, node: fx.Node) -> tuple[fx.Node, bool] | None:
        """The sort that a node is an index or an inverse of; None if it is neither."""
        name, operands = op_name(node), node.all_input_nodes
        if name in CASTS and operands:
            return self.indexes.get(operands[0])
        if name in ("scatter", "scatter_") and len(node.args) == 4:  # of 0, 1, 2, ... to the places of the index
            _, _, places, numbers = node.args
            sort, inverse = self.indexes.get(places, (None, True)) if isinstance(places, fx.Node) else (None, True)
            return None if sort is None or inverse or not is_arange(numbers) else (sort, True)
        sort = operands[0] if name == "getitem" and node.args[1] == 1 else node
        wanted = "argsort" if sort is node else "sort"
        return (sort, False) if op_name(sort) == wanted and len(shape_of(sort.all_input_nodes[0])) == 1 else None

    def order(self, node: fx.Node) -> Orders:
        value = node.meta.get("val")
        if node.op == "placeholder":
            return OF_INPUTS
        if op_name(node) in SHAPE_ONLY or (isinstance(value, Tensor) and not value.dim()):
            return frozenset()
        if op_name(node) in ("sort", "argsort") and len(shape_of(node.all_input_nodes[0])) == 1:
            return frozenset({node}) if self.orders[node.all_input_nodes[0]] else frozenset()  # of constants
        before: Orders = frozenset().union(*(self.orders[operand] for operand in node.all_input_nodes))
        if op_name(node) != "index_select" or len(node.args) != 3 or node.args[2] not in self.indexes:
            return before
        x, dim, index = node.args
        assert isinstance(x, fx.Node) and isinstance(index, fx.Node), "bug in kfac_fx: an index of no node"
        self.picked.add(node)
        (sort, inverse), shape = self.indexes[index], shape_of(x)
        if shape and isinstance(dim, int):
            rows = self.size(shape_of(index)[0])
            if str(rows) != str(shape[dim]) and in_example(rows) == in_example(shape[dim]):
                self.same[str(shape[dim])] = rows
        if not self.orders[x]:  # rows of a table, in the order of the index
            return self.orders[index]
        if inverse:
            return OF_INPUTS if self.orders[x] == {sort} else self.orders[x] | {sort}
        return frozenset({sort}) if self.orders[x] <= OF_INPUTS else self.orders[x] | {sort}


def is_arange(numbers: Any) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if not isinstance(numbers, fx.Node) or op_name(numbers) != "arange":
        return False
    start = numbers.args[0] if len(numbers.args) == 2 else 0
    return len(numbers.args) in (1, 2) and isinstance(start, int) and start == 0
