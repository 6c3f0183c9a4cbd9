"""Cases: which size of a graph counts them, which dimension of a use's output they are, and which of its rows count.

A case is what the mean of the loss averages over. Their number is a symbolic size, since only a batch knows it.

**Cases that stay apart**: the registrations whose cases stay apart on their way to the outputs, as the operations of
the graph tell.

    x [N, 4] -> linear -> [N, 5] -> relu -> linear -> [N, 3]            row n of the result depends on row n alone
    x [N, 4] -> linear -> [N, 5] -> batch_norm in training -> [N, 5]    row n depends on all rows

The first dimension counts the cases, in the use, in the outputs and in all between them. The operations below are those
whose row n depends on row n of every operand that follows a use, and on no other row. Where all operations between a
use and the outputs are such, no batch can let its cases meet or change places. This module tells nothing of the other
registrations: a batch decides (`kfac_fx.recording.meeting_cases`).

**Order**: the order of the cases in every node: that of the inputs, or one that a sort of the cases has made.

    lengths, order = torch.sort(lengths, descending=True)    in pack_padded_sequence(x, lengths, enforce_sorted=False)
    y = f(x.index_select(0, order))
    z = y.index_select(0, inverse of order)                  in pad_packed_sequence

The cases of z are in the order of the inputs again, so a mask of the inputs fits it. The index of a sort has as many
elements as what it sorts has cases, also where the capture has a symbol for each of these sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor, fx

from .errors import RegistrationError
from .graphs.labels import ancestors, differentiated, in_example, shape_of, sizes_of, symbolic_sizes
from .graphs.operations import CASTS, PERMUTES, SHAPE_ONLY, changes_memory, dims_after, op_name
from .ir import CASES, NUMBER, ROW_MASK, Program, Registration, Use
from .parametrization import Computed
from .torch_private import pytree

OF_ROWS = "[cases, features]"  # the inputs of a recurrent cell, in the words of `Program.told_cases`
CONVENTION = "by convention, as no layer and no batch_dim= says another"
ANSWER = (
    "Write kfac_fx.compile(..., batch_dim=1) if the inputs are [positions, cases, ...], or batch_dim=0 if their first "
    "dimension counts the cases."
)


def size_of_cases(program: Program, outputs: tuple[fx.Node, ...]) -> tuple[str | None, str]:
    """(the size of the cases, why it is this one if there is a choice).

    The size comes from the user's `batch_dim`, from the layers that know which dimension of their inputs counts cases,
    or from the convention of `case_size`.

    Raises RegistrationError if `batch_dim` does not exist, or if layers contradict each other or the outputs.
    """
    inputs = program.inputs
    conventional = case_size(program.graph, outputs)
    if (dim := program.options.batch_dim) is not None:
        return said_by_user(dim, inputs, conventional), f"batch_dim={dim}"
    in_inputs = {size for node in inputs for size in symbolic_sizes(node) if size}
    in_outputs = {size for node in outputs for size in sizes_of(node)}
    told: dict[str, str] = {}
    for layer, size in program.told_cases:
        # The rows of a cell may be nodes of graphs, which the outputs have one row of.
        if size in in_inputs and (size in in_outputs or not layer.endswith(OF_ROWS)):
            told.setdefault(size, layer)
    if not told or conventional is None:
        choice = conventional is not None and any(size != conventional for size in free_sizes(inputs))
        return conventional, CONVENTION if choice else ""
    agreed = told if len(told) == 1 else {size: layer for size, layer in told.items() if size == conventional}
    if len(agreed) != 1:
        raise RegistrationError(
            "which dimension of the inputs counts the cases is not clear, since two layers contradict each other: "
            f"{' and '.join(told.values())}.\n{ANSWER}"
        )
    ((size, layer),) = agreed.items()
    shapes = [sizes_of(node) for node in outputs]
    if not any(size in shape for shape in shapes) and any(shape[:1] == [conventional] for shape in shapes):
        shape = ", ".join(shapes[0])
        raise RegistrationError(
            f"{layer}, and the output [{shape}] has no dimension of these cases: the first dimension of the inputs is "
            f"taken for positions by the layer, and for cases by the output.\n"
            "Write batch_first=True in the layer if its inputs are [cases, positions, features]; or, if all is meant "
            "as it is, kfac_fx.compile(..., batch_dim=0)."
        )
    return size, layer


def said_by_user(dim: int, inputs: list[fx.Node], conventional: str | None) -> str | None:
    """The size of dimension `dim` of the first input that has it. Raises RegistrationError if none has."""
    shapes = [symbolic_sizes(node) for node in inputs if symbolic_sizes(node)]
    long_enough = [sizes for sizes in shapes if len(sizes) > dim]
    if shapes and not long_enough:
        raise RegistrationError(f"batch_dim={dim}, and no input of forward has {dim + 1} dimensions.")
    size = next((sizes[dim] for sizes in long_enough), None)
    if size is None and dim:
        raise RegistrationError(
            f"batch_dim={dim}, and dimension {dim} of the inputs has one size for all batches in the captured graph: "
            "capture and train with batches of at least two cases, as a DataLoader with drop_last=True makes them."
        )
    return conventional if size is None else size


def free_sizes(inputs: list[fx.Node]) -> list[str]:
    """The sizes of the first two dimensions of all inputs that may be another in the next batch."""
    return [size for node in inputs for size in symbolic_sizes(node)[:2] if size and not size.isdigit()]


def case_size(graph: fx.Graph, outputs: tuple[fx.Node, ...]) -> str | None:
    """The size that is first in an output and somewhere in an input; else the first of the first input. None for a
    single case, whose size is a number."""
    inputs = [size for node in graph.find_nodes(op="placeholder") for size in symbolic_sizes(node) if size]
    first = [size for node in outputs for size in symbolic_sizes(node)[:1]]
    if first[:1] == [None] and single(graph):
        return None
    return next((size for size in (*first, *inputs) if size in inputs), None)


def single(graph: fx.Graph) -> bool:
    """Whether the first input was captured with one row, or none: sizes that are numbers in a graph."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next((value.shape[0] <= 1 for value in values if isinstance(value, Tensor) and value.dim()), False)


# --- in a use ---------------------------------------------------------------------------------------------------------


def with_batch_dim(use: Use, cases: str, outputs_last: bool = False) -> Use:
    """Where the cases are in the use's output; None if no dimension has their size. A forward that reads the size as a
    number, as `range(len(x))` does, has a number for it; several dimensions may have this.

    outputs_last: the last dimension holds the outputs of the layer, and counts no cases.
    """
    numbers = sizes_of(use.output)[: -1 if outputs_last else None]
    number = cases.isdigit() and numbers.count(cases) == 1
    sizes = numbers if number else symbolic_sizes(use.output)
    if use.batch_independent:
        use = replace(use, attrs={**use.attrs, CASES: number_of_cases(use.output, cases)})
    return replace(use, batch_dim=sizes.index(cases) if cases in sizes else None) if sizes else use


def number_of_cases(output: fx.Node, cases: str | None) -> Computed:
    """The size of the cases; where it is not known, the first size of the first input, of the same submodule.

    A use that does not depend on the batch has the same Fisher with any number of cases: `count` grows with the number,
    and G falls.
    """
    submodule = output.meta.get(NUMBER)
    inputs = [node for node in output.graph.find_nodes(op="placeholder") if node.meta.get(NUMBER) == submodule]
    candidates = [
        (node, symbolic_sizes(node).index(cases)) for node in inputs if cases in symbolic_sizes(node) and cases
    ]
    return Computed(size, candidates[0] if candidates else (inputs[0], 0))


def size(value: Any, dim: int) -> int:
    """The size of an input along `dim`. The input is a tensor, or a container; its first tensor counts."""
    return next(
        (int(leaf.shape[dim]) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()), 1
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def with_row_mask(output: Tensor, mask: Tensor) -> Tensor:
    """`output`; of its rows [N, S] only those count where `mask` is true, whatever the others hold.

    It stands behind the output of a use in a graph: `f(linear(x, w, b))` -> `f(with_row_mask(linear(x, w, b), mask))`.
    """
    return output


def with_mask(use: Use) -> Use:
    """The use with its mask among its attributes, if the graph says one."""
    readers = list(use.output.users)
    if len(readers) != 1 or readers[0].target is not with_row_mask or readers[0].args[0] is not use.output:
        return use
    return replace(use, attrs={**use.attrs, ROW_MASK: readers[0].args[1]})


def without_mask(use: Use) -> Use:
    """The use with all of its rows."""
    return replace(use, attrs={name: value for name, value in use.attrs.items() if name != ROW_MASK}, mask_dims=())


POINTWISE = CASTS | {
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "celu", "clamp",
    "clamp_max", "clamp_min", "cos", "cosh", "div", "dropout", "elu", "erf", "erfc", "exp", "exp2", "expm1",
    "feature_dropout", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lerp", "log",
    "log10", "log1p", "log2", "log_sigmoid", "logaddexp", "logsigmoid", "masked_fill", "maximum", "minimum", "mish",
    "mul", "nan_to_num", "neg", "pow", "prelu", "reciprocal", "relu", "relu6", "rsqrt", "rsub", "selu", "sigmoid",
    "silu", "sin", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "tan", "tanh", "tanhshrink",
    "threshold", "where", "xlogy",
}  # fmt: skip
IN_ORDER = {  # all rows are in order if there are as many as before
    "reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "slice", "narrow",
}  # fmt: skip
ALONG = {  # operations along dimensions -> the place of these in their arguments
    "softmax": 1, "log_softmax": 1, "softmin": 1, "cumsum": 1, "sum": 1, "mean": 1, "amax": 1, "amin": 1, "prod": 1,
    "logsumexp": 1, "glu": 1, "select": 1, "unbind": 1, "cat": 1, "stack": 1, "flip": 1,
    "chunk": 2, "split": 2, "split_with_sizes": 2,
}  # fmt: skip
OF_FIRST = {  # of one operand with a row a case, the first -> its fewest dimensions
    "linear": 2, "conv1d": 3, "conv2d": 4, "conv3d": 5, "conv_transpose1d": 3, "conv_transpose2d": 4,
    "conv_transpose3d": 5, "max_pool1d": 3, "max_pool2d": 4, "max_pool3d": 5, "avg_pool1d": 3, "avg_pool2d": 4,
    "avg_pool3d": 5, "adaptive_max_pool1d": 3, "adaptive_max_pool2d": 4, "adaptive_max_pool3d": 5,
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_avg_pool3d": 5, "group_norm": 3,
}  # fmt: skip


SORTING = {"sort": 1, "argsort": 1, "msort": None, "topk": 2}  # -> the place of the dimension; None: the first
CHOOSING = {  # operations that numbers tell which rows to take or to write -> the place of the dimension; None: any
    "gather": 1, "index_add": 1, "index_copy": 1, "index_fill": 1, "index_reduce": 1, "index_select": 1, "scatter": 1,
    "scatter_add": 1, "scatter_reduce": 1, "take_along_dim": 2, "index": None, "index_put": None, "_sparse_mm": None,
    "masked_scatter": None, "masked_select": None, "repeat_interleave": None, "segment_reduce": None, "take": None,
}  # fmt: skip


def kept_apart(program: Program, ends: Iterable[fx.Node]) -> frozenset[tuple[str, ...]]:
    """The registrations, by parameters, whose cases stay apart up to `ends`, nodes of the graph, in every batch."""
    cases, ends = program.cases, list(ends)
    if cases is None or program.submodules:
        return frozenset()
    uses = {use.output for registration in program.registrations for use in registration.uses}
    following, rows, mixing = set[fx.Node](), set[fx.Node](), set[fx.Node]()  # uses; with a row a case; mixing rows
    for node in program.graph.nodes:
        operands = [operand for operand in differentiated(node) if operand in following]
        if operands and node.op != "output":
            if changes_memory(node):  # which other nodes may read; `normalize` leaves no others
                return frozenset()
            following.add(node)
            (rows if rows.issuperset(operands) and keeps_rows(node, operands, cases) else mixing).add(node)
        if node in uses:
            following.add(node)
            if symbolic_sizes(node)[:1] == [cases]:
                rows.add(node)
    read_by_mixing = [operand for node in ancestors(ends) & mixing for operand in differentiated(node)]
    mixed = ancestors([*read_by_mixing, *(end for end in ends if end in following and end not in rows)])
    apart = rows - mixed
    return frozenset(
        registration.parameters
        for registration in program.registrations
        if is_plain(registration) and apart.issuperset(use.output for use in registration.uses)
    )


def are_placed_by_data(program: Program) -> bool:
    """Whether the numbers of a batch choose which cases meet or change places, as the edges of a graph do. Another
    batch may then let others meet."""
    uses = {use.output for registration in program.registrations for use in registration.uses}
    following = set[fx.Node]()  # uses
    for node in program.graph.nodes:
        if op_name(node) in SORTING and may_sort_cases(node, program.cases):
            return True
        if node.op != "output" and not following.isdisjoint(differentiated(node)):
            following.add(node)
            if chooses_cases(node, program.cases):
                return True
        if node in uses:
            following.add(node)
    return False


def chooses_cases(node: fx.Node, cases: str | None) -> bool:
    """Whether an operation takes or writes cases that numbers choose: by an index of cases, or by a matrix with a row
    and a column for each of them, as of edges, masks or similarities. cases: their symbolic number; None: not known."""
    name, tensors = op_name(node).removesuffix("_"), [node, *node.all_input_nodes]
    if cases is not None and any(symbolic_sizes(tensor).count(cases) > 1 for tensor in tensors):
        return True
    if name == "scaled_dot_product_attention":
        return symbolic_sizes(node)[-2:-1] == [cases]
    if name not in CHOOSING:
        return False
    place, indexes = CHOOSING[name], node.args[1] if len(node.args) > 1 else None
    if place is None and not isinstance(indexes, (list, tuple)):
        return True
    for tensor in tensors:
        sizes = [re.findall(r"[a-z]+\d+", size or "") for size in symbolic_sizes(tensor)]
        if isinstance(indexes, (list, tuple)):  # an index of 0, 1, 2, ... leaves all cases where they are
            chosen = [dim for dim, index in enumerate(indexes) if index is not None and not is_arange(index)]
        else:
            dim = node.kwargs.get("dim", node.args[place] if place is not None and len(node.args) > place else None)
            chosen = [dim] if isinstance(dim, int) and -len(sizes) <= dim < len(sizes) else []
        if any(cases is None or cases in sizes[dim] for dim in chosen if dim < len(sizes)):
            return True
    return False


def may_sort_cases(node: fx.Node, cases: str | None) -> bool:
    """Whether an operation of `SORTING` may be along cases. It is not if another dimension of its tensor has these.

    cases: their symbolic number; None: not known.
    """
    sizes = symbolic_sizes(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else []
    place = SORTING[op_name(node)]
    dim = 0 if place is None else node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    if cases is None or not sizes or not isinstance(dim, int):
        return True
    symbols = [set(re.findall(r"[a-z]+\d+", size or "")) for size in sizes]
    along = symbols.pop(dim)
    unknown = any(symbol.startswith("u") for symbol in along)  # u0 is a number that data have
    return unknown or cases in along or not any(cases in elsewhere for elsewhere in symbols)


def is_plain(registration: Registration) -> bool:
    """Whether every use has a row a case, along the first dimension of its output."""
    return (
        not (registration.generic or registration.called)
        and registration.towers == 1
        and all(use.batch_dim == 0 and use.steps == 1 and not use.batch_independent for use in registration.uses)
    )


def keeps_rows(node: fx.Node, operands: Sequence[fx.Node], cases: str) -> bool:
    """Whether row n of the result depends on the rows n of these operands alone, each of which has a row a case."""
    name, sizes = op_name(node), symbolic_sizes(node)
    if not sizes:  # several tensors, of which `getitem` takes one
        return name in SEVERAL and along_others(node, len(shape_of(operands[0])))
    if sizes[:1] != [cases]:
        return False
    if name == "getitem":
        return not shape_of(operands[0])
    dims = {len(shape_of(operand)) for operand in operands}
    if name in ALONG:
        return len(dims) == 1 and along_others(node, len(sizes) if name == "stack" else dims.pop())
    if name in POINTWISE or name == "scaled_dot_product_attention":
        return dims == {len(sizes)} and (name in POINTWISE or len(sizes) > 2)
    if name in OF_MATRICES:
        return OF_MATRICES[name](node, operands)
    return operands == [node.args[0]] and of_first(node, name, dims.pop())


def along_others(node: fx.Node, dims: int) -> bool:
    """Whether an operation of `ALONG` names its dimensions, and the first is none of them. dims: their number."""
    place = ALONG.get(op_name(node))
    if place is None:  # pooling
        return dims >= OF_FIRST[op_name(node)]
    along = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    named = [*along] if isinstance(along, (list, tuple)) else [along]
    return bool(named) and all(isinstance(dim, int) and dim % dims for dim in named)


def of_first(node: fx.Node, name: str, dims: int) -> bool:
    """`keeps_rows` of an operation whose first operand alone follows a use. dims: of that."""
    if name in PERMUTES:
        return dims_after(node, dims, node.args[1:])[0] == 0
    if name == "expand":
        return dims == len(shape_of(node))
    if name == "batch_norm":
        return len(node.args) > 5 and node.args[5] is False
    if name in ("layer_norm", "rms_norm"):
        return isinstance(node.args[1], (list, tuple)) and len(node.args[1]) < dims
    return name in IN_ORDER or dims >= OF_FIRST.get(name, dims + 1)


def product_of_matrices(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Products of the rows of cases with one matrix for all, or of a matrix a case."""
    left, right = node.args[:2]
    if operands == [left] and isinstance(right, fx.Node) and len(shape_of(right)) < 3:
        return len(shape_of(operands[0])) > 1
    dims = len(shape_of(node))
    return dims > 2 and all(len(shape_of(operand)) == dims for operand in operands)


def product_of_letters(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """An einsum in which the first letter of these operands is the first of the result, and no other letter is it."""
    equation, *factors = node.args
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return False
    terms, _, result = equation.replace(" ", "").partition("->")
    of_operands = [term for term, factor in zip(terms.split(","), factors, strict=True) if factor in operands]
    return all(term[:1] == result[:1] and term.count(term[0]) == 1 for term in of_operands)


SEVERAL = {"unbind", "chunk", "split", "split_with_sizes"} | {name for name in OF_FIRST if "max_pool" in name}
OF_MATRICES: dict[str, Callable[[fx.Node, Sequence[fx.Node]], bool]] = {
    "matmul": product_of_matrices,
    "einsum": product_of_letters,
}


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
