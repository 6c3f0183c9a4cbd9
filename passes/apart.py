"""The registrations whose cases stay apart on their way to the outputs, as the operations of the graph tell.

    x [N, 4] -> linear -> [N, 5] -> relu -> linear -> [N, 3]            row n of the result depends on row n alone
    x [N, 4] -> linear -> [N, 5] -> batch_norm in training -> [N, 5]    row n depends on all rows

The first dimension counts the cases, in the use, in the outputs and in all between them. The operations below are those
whose row n depends on row n of every operand that follows a use, and on no other row. Where all operations between a
use and the outputs are such, no batch can let its cases meet or change places. This module tells nothing of the other
registrations: a batch decides (`kfac_fx.recording.meeting_cases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from .graphs.labels import ancestors, differentiated, shape_of, symbolic_sizes
from .graphs.operations import CASTS, PERMUTES, changes_memory, dims_after, op_name
from .ir import Program, Registration

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
