"""Operations by their names, whichever way a graph spells them, and what the compiler knows of each.

The names are those of torch's functions; layers and losses are made of these. `SPELLED_OUT` has the arguments of the
operations that `spelling` writes out in full: those of losses, and those that declarations of layers name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..errors import LayerError, fatal
from ..matrix import Layout, Shape, Step
from ..torch_losses import TORCH_LOSSES
from ..torch_private import (
    ASSERT,
    ASSERT_METADATA,
    AUTOCAST_REGION,
    CHECKPOINT_REGION,
    NO_GRAD_REGION,
    REGION,
    TO_COPY,
    OpOverload,
    OpOverloadPacket,
    schema,
)

SHAPE_ONLY = {  # read the size, the dtype or the device of their operands, never the values
    "size", "dim", "numel", "shape", "ndim", "dtype", "device", "sym_size", "sym_numel", "sym_stride",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", ASSERT_METADATA, ASSERT, "numbered",
}  # fmt: skip
STOPS_GRADIENT = {
    "detach", "detach_", "data", "argmax", "argmin", "argsort", "item", "long", "int", "bool", "sign", "round",
    "floor", "ceil", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isfinite", "isinf", "logical_not", "logical_and",
    "logical_or", "asks_gradient",
}  # fmt: skip
# Random numbers, which have no gradient by the parameters of their distribution: in memory of their own, and in other.
DRAWN = {"randn", "rand", "randn_like", "rand_like", "randint", "randint_like", "bernoulli", "normal", "poisson"}
FILLED = {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
NO_GRADIENT = SHAPE_ONLY | STOPS_GRADIENT | DRAWN
RANDOM = {  # operations that draw random numbers, beside those of ATen, which have a tag for it
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax", "multi_head_attention_forward",
    "fractional_max_pool2d", "fractional_max_pool3d", NO_GRAD_REGION, AUTOCAST_REGION,
    CHECKPOINT_REGION, "own_backward",
}  # fmt: skip
OWN_BACKWARD = "own_backward"  # a call of a user's autograd.Function; only operands that are arguments have a gradient
IN_PLACE = {  # Python's operators, whose names do not say it
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem",
}  # fmt: skip
AS = {"expand_as", "view_as", "reshape_as", "type_as"}  # they read the shape or type of their second operand only
EXPANDS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type", TO_COPY, "contiguous", "clone", "alias"}
PARTS = {"select", "slice", "narrow", "getitem", "split", "split_with_sizes", "chunk", "unbind"}
JOINS = {"cat", "concat", "concatenate", "stack"}
AS_COMPLEX, CONJUGATES = "view_as_complex", {"conj", "_conj", "conj_physical"}
MAKES_COMPLEX = {"complex", "polar", AS_COMPLEX, *(f"fft_{name}" for name in ("fft", "fft2", "fftn", "ifft", "rfft"))}
OF_REAL_NUMBERS = {"real", "imag", "abs", "angle", "view_as_real", "fft_irfft", "fft_irfft2", "fft_irfftn"}
PERMUTES = {"t", "T", "mT", "transpose", "permute", "numpy_T", "movedim"}
LOOKUPS = {"embedding", "index", "index_select"}
KINDS_OF_CALLS = ("call_function", "call_method")  # kinds of nodes whose targets are operations
# Keys of a node's meta.
SIZED_BY_CASES = "sized by cases"  # whether its size goes with the number of cases, in a graph without symbolic sizes
LOOKED_UP = "looked up"  # the node looks a table up for all its readers, and counts as an embedding of data
VIEWS = CASTS | PERMUTES | {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"}


def op_name(node: fx.Node) -> str:
    """The operation without its spelling: `aten.add.Tensor`, `torch.add`, `operator.add`, `x.add` are all "add".

    A node that is no call has its kind instead, such as "placeholder", because its target is a name of the user's.
    """
    if node.op not in KINDS_OF_CALLS:
        return node.op
    return str(node.args[1]) if node.target is getattr else name_of(node.target)


def computed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of the node's operation on these arguments."""
    method = node.op == "call_method"
    function: Any = getattr(args[0], str(node.target)) if method else node.target
    return function(*args[method:], **kwargs)


@lru_cache(maxsize=10_000)
def name_of(target: Any) -> str:
    """The name of a node's target, without its spelling."""
    if isinstance(target, OpOverload):
        return str(schema(target).name).split("::")[-1]
    return str(getattr(target, "__name__", target))


def is_random(node: fx.Node) -> bool:
    """Whether running the node may draw from the global random stream."""
    return draws(op_name(node))


@cache
def draws(name: str) -> bool:
    aten = overloads(name) or overloads(name.rstrip("_"))
    return name.rstrip("_") in RANDOM or any(torch.Tag.nondeterministic_seeded in overload.tags for overload in aten)


@cache
def returns_view(name: str) -> bool:
    """Whether the schema of an ATen operation says that it returns a view of its first argument."""
    schemas = [schema(overload) for overload in overloads(name)]
    pairs = [(s.arguments[0].alias_info, s.returns[0].alias_info) for s in schemas if s.arguments and s.returns]
    return any(first and result and not first.is_write for first, result in pairs)


@cache
def returns_one(name: str) -> bool:
    """Whether the schemas of an ATen operation say that it returns one tensor."""
    returns = [[str(result.type) for result in schema(overload).returns] for overload in overloads(name)]
    return bool(returns) and all(types == ["Tensor"] for types in returns)


def overloads(name: str) -> list[OpOverload]:
    """The overloads of the ATen operation of this name; none if there is no such operation."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return [getattr(packet, name) for name in names]


def changes_memory(node: fx.Node) -> bool:
    """Whether the node writes into its first argument."""
    name = op_name(node)
    return name in IN_PLACE or name.endswith("_") and not name.endswith("__") or node.kwargs.get("inplace") is True


@cache
def writes_elsewhere(name: str) -> bool:
    """Whether the schema of an ATen operation says that it writes into another argument than its first, as a fake
    quantization does into the ranges that it has observed."""
    schemas = [schema(overload) for overload in overloads(name)]
    others = [argument for s in schemas for argument in s.arguments[1:] if not argument.kwarg_only]  # without `out`
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in others)


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay even if no node reads it: inputs, outputs, writes, and draws of random numbers, which
    move the stream."""
    fixed = node.op in ("placeholder", "output") or op_name(node).startswith(REGION)
    return fixed or changes_memory(node) or writes_elsewhere(op_name(node)) or is_random(node)


def no_grad_region(node: fx.Node) -> bool:
    return op_name(node) == NO_GRAD_REGION and not node.args[0]


# --- arguments --------------------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
Defaults = dict[str, Any]  # parameter -> default, in the function's own order


@dataclass(frozen=True)
class Spelling:
    """A function of torch that a layer is made of, so that calls with and without its optional arguments are one.

    Attributes:
        arguments: name -> default, in the function's own order; None: those of its signature.
        data_first: whether the first argument is the layer's input: what stands there is data, even if it is a
            parameter.
    """

    function: Callable[..., Any]
    arguments: Defaults | None = None
    data_first: bool = False


SPELLED_OUT: dict[str, tuple[Callable[..., Any], Defaults]] = {}
DATA_FIRST: set[str] = set()  # the operations that a declaration says this of
X, XW = {"input": REQUIRED}, {"input": REQUIRED, "weight": REQUIRED}


def spell(spelling: Spelling) -> None:
    """Write a function out in all graphs. Raises LayerError if a declaration gave it other arguments."""
    function, arguments = spelling.function, spelling.arguments
    if arguments is None:
        arguments = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    name = function.__name__
    if SPELLED_OUT.setdefault(name, (function, arguments)) != (function, arguments):
        raise LayerError(f"{name} is spelled with other arguments than {list(SPELLED_OUT[name][1])}")
    if spelling.data_first:
        DATA_FIRST.add(name)


for _loss in TORCH_LOSSES:
    spell(Spelling(_loss.function))
ATEN_NAMES = {"self": "input", "indices": "input", "mat2": "other", "vec": "other"}  # ATen's name -> the function's
RENAMED = {
    **{loss.aten: loss.name for loss in TORCH_LOSSES if loss.aten != loss.name},
    "mm": "matmul", "bmm": "matmul", "mv": "matmul", "__matmul__": "matmul",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "truediv": "div", "_conj": "conj",
    # what torch has under two names
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs",
    "multiply_": "mul_", "divide_": "div_", "true_divide_": "div_", "subtract_": "sub_", "negative_": "neg_",
    "absolute_": "abs_", "clip": "clamp", "clip_": "clamp_", "ger": "outer", "linalg_matmul": "matmul",
    "swapdims": "transpose", "swapaxes": "transpose", "moveaxis": "movedim", "special_expit": "sigmoid",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
}  # fmt: skip
REDUCTIONS = ("none", "mean", "sum")


def matmul(matrix: Tensor, vector: Tensor) -> Tensor:
    """torch.mv under the name that passes know it by. torch.matmul is another function: autocast on a CPU rounds its
    operands, and leaves those of torch.mv."""
    return torch.mv(matrix, vector)


def function_matched(node: fx.Node) -> Any:
    """The target of a node, and torch.matmul for the function above."""
    return torch.matmul if node.target is matmul else node.target


@cache
def aten_order(overload: Any, name: str) -> tuple[str, ...]:
    """The arguments of an ATen operation in ATen's order, under the names that `SPELLED_OUT[name]` has for them."""
    defaults = SPELLED_OUT[name][1]
    names = [argument.name for argument in schema(overload).arguments]
    return tuple(name if name in defaults else ATEN_NAMES.get(name, name) for name in names)


# --- views: the parameter behind a chain of them, and the layout that they make ---------------------------------------


def bound_parameter(
    node: fx.Node, shapes: Mapping[str, Shape], source: fx.Node | None = None
) -> tuple[str, Layout] | None:
    """The parameter behind `node` if only invertible views lie between, and the layout they make; else None.

    source: the node that stands for a parameter of complex numbers.
    """
    chain: list[fx.Node] = []
    while node.op != "get_attr" and node is not source:
        operands = node.all_input_nodes
        kept = source is not None and keeps_place(node)
        if not (kept or op_name(node) in VIEWS) or not operands or operands[0] is not node.args[0]:
            return None
        chain += [] if kept else [node]
        node = operands[0]
    name = str((node if source is None else node.all_input_nodes[0]).target)
    if name not in shapes:
        return None
    layout = Layout(shapes[name])
    for view in reversed(chain):
        step = view_step(view, layout.result)
        if step is None:
            return None
        layout = Layout(layout.shape, (*layout.steps, step)) if step.before != step.after or step.order else layout
    return name, layout


def complex_parameter(node: fx.Node, shapes: Mapping[str, Shape]) -> tuple[str, Layout, bool] | None:
    """The parameter [..., 2] behind views of `view_as_complex(parameter)`, the layout of the complex numbers, and
    whether they are conjugated."""
    source, conjugated = node, False
    while (op_name(source) in VIEWS or keeps_place(source)) and source.all_input_nodes == [source.args[0]]:
        conjugated ^= op_name(source) in CONJUGATES
        source = source.all_input_nodes[0]
    parameter = source.args[0] if op_name(source) == AS_COMPLEX and source.args else None
    if not isinstance(parameter, fx.Node) or parameter.op != "get_attr" or parameter.target not in shapes:
        return None
    numbers = {str(parameter.target): shapes[str(parameter.target)][:-1]}
    bound = bound_parameter(node, numbers, source)
    return None if bound is None else (str(parameter.target), bound[1], conjugated)


def keeps_place(node: fx.Node) -> bool:
    """Whether it is a conjugate, or a slice from end to end."""
    if op_name(node) in CONJUGATES | {"resolve_conj"}:
        return True
    if op_name(node) not in ("slice", "narrow", "getitem") or len(node.all_input_nodes) != 1:
        return False
    part, whole = (n.meta.get("val") for n in (node, node.all_input_nodes[0]))
    return isinstance(part, Tensor) and isinstance(whole, Tensor) and part.shape == whole.shape


def view_step(node: fx.Node, before: Shape) -> Step | None:
    """`node` as a Step on a tensor of shape `before`, found by running it without data; None if it does not keep every
    element or needs sizes that only the batch knows."""
    name = op_name(node)
    if name in CASTS:
        return Step(before, before)
    if len(node.all_input_nodes) > 1 or any(isinstance(arg, torch.dtype) for arg in node.args):
        return None
    probe = torch.empty(before, device="meta")
    try:
        result = computed(node, (probe, *node.args[1:]), node.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        if fatal(error):
            raise
        return None
    if not isinstance(result, Tensor) or result.numel() != probe.numel():
        return None
    if name not in PERMUTES:
        return Step(before, tuple(result.shape))
    return Step(before, tuple(result.shape), dims_after(node, len(before), node.args[1:]))


def dims_after(node: fx.Node, dims: int, arguments: Sequence[Any]) -> Shape:
    """The order that a permuting node with these further arguments leaves the dimensions of a tensor in."""
    distinct = torch.empty(tuple(range(2, dims + 2)), device="meta")  # every dimension has its own size
    return tuple(int(size) - 2 for size in computed(node, (distinct, *arguments), node.kwargs).shape)


# --- logarithms of probabilities --------------------------------------------------------------------------------------


def dims_of(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, Tensor) else 0


def adds_up(node: Any, axis: int, dims: int) -> bool:
    """Whether the probabilities along an axis add up to one, of which these are the logarithms."""
    if not isinstance(node, fx.Node) or not 0 <= axis < dims or not node.args:
        return False
    name, args = op_name(node), cast(Any, node.args)
    source, before = args[0], dims_of(args[0])
    if name == "log_softmax":
        return along(node, axis, dims)
    if name == "log":
        while isinstance(source, fx.Node) and op_name(source) in CASTS:
            source = source.args[0]
        return isinstance(source, fx.Node) and op_name(source) == "softmax" and along(source, axis, dims)
    if name == "sub":
        total = args[1]
        alone = len(args) == 2 and not node.kwargs and isinstance(total, fx.Node) and len(total.args) > 1
        return alone and op_name(total) == "logsumexp" and total.args[0] is source and sums(total, axis, dims)
    if name in CASTS:
        return adds_up(source, axis, dims)
    if name in PERMUTES and before == dims:
        return adds_up(source, dims_after(node, dims, args[1:])[axis], dims)
    if name in ("reshape", "view", "flatten") and before and axis == dims - 1:
        last, of_source = node.meta["val"].shape[-1], source.meta["val"].shape[-1]
        return str(last) == str(of_source) and adds_up(source, before - 1, before)
    if name in ("select", "slice") and before and len(args) > 1:
        dim = args[1] % before
        place = axis + (name == "select" and axis >= dim)
        return bool(place != dim) and adds_up(source, place, before)
    return False


def along(node: fx.Node, axis: int, dims: int) -> bool:
    """Whether a softmax is along this axis."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(dim, int) and dim % dims == axis


def sums(node: fx.Node, axis: int, dims: int) -> bool:
    """Whether a logsumexp is along this axis, which it keeps."""
    args = cast(Any, node.args)
    along_these = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    keeps = (*args[2:], node.kwargs.get("keepdim"))[:1] == (True,)
    return keeps and [dim % dims for dim in along_these] == [axis]
