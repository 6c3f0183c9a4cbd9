"""One spelling for every operation, in the graphs of models and of the layers' forms. Values never change.

    aten.linear.default(x, w)                                          ->   F.linear(x, w, None)
    x.mean(1), x.mean(dim=1), aten.mean.dim(x, [1], False)             ->   torch.mean(x, [1])
    torch.real(x), aten.real(x)                                        ->   x.real
    native_layer_norm(x, [8], w, b, 1e-05)[0]                          ->   F.layer_norm(x, [8], w, b, 1e-05)
    convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)     ->   F.conv2d(x, w, b, [1, 1], [0, 0], [1, 1], 1)

Operations of `SPELLED_OUT` get all their arguments, by position. Others lose the arguments that equal their defaults.

The last two are ATen's own spelling, in graphs of `run_decompositions` and in traces below autograd: one function for
all dimensions, and norms that also return statistics. Norms stay as they are if a backward reads the statistics,
because these then depend on the input of the norm.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from string import ascii_letters
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .. import torch_private
from ..torch_private import STACK_LEVEL, OpOverload, schema
from .labels import Label, labels
from .operations import REDUCTIONS, RENAMED, REQUIRED, SPELLED_OUT, aten_order, matmul, op_name, overloads, returns_one

COMMUTATIVE = {"add", "mul", "maximum", "minimum"}
ATTRIBUTE_OF = {name: name for name in ("real", "imag", "mT", "mH")} | {
    "numpy_T": "T",
    "matrix_H": "H",
}  # by ATen's name
OF_TWO = {"max": torch.maximum, "min": torch.minimum}  # of two tensors, and not along a dimension
# Keys of a node's meta, for `as_written`.
SWAPPED = "swapped"  # whether the two operands of the node stand in another order than in the model
SUBTRACTED = "subtracted"  # the node is a sum that stands for a difference


def respell(graph: fx.Graph) -> None:
    """Bring every operation to its one spelling."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if is_number(node, numbers):  # torch.add of two sizes would return a tensor
            numbers.add(node)
            continue
        written = op_name(node)
        name = RENAMED.get(written, written)
        if name in SPELLED_OUT and node.target is not F.embedding_bag:  # whose arguments are not torch.embedding_bag's
            spell_out(node, name)
            if written == "mv":
                node.target = matmul
        elif name == "einsum":
            spell_einsum(node)
        elif name == "tensordot":
            spell_tensordot(node)
        elif name == "norm":
            spell_vector_norm(node)
        elif node.target is F.normalize:
            spell_quotient(node)
        elif name == "pad":
            spell_padding(node)
        elif name in ("expand", "repeat", "expand_as"):
            spell_expansion(node, name)
        elif isinstance(node.target, OpOverload):
            respell_aten(node, node.target, name)
        elif node.op == "call_method" or node.target is not getattr:
            respell_python(node, name)
            place_arguments(node, name)
            if node.target is torch.sub and isinstance(node.args[0], (int, float)):  # `1 - x`, which ATen calls rsub
                node.target, node.args = torch.rsub, (*node.args[1::-1], *node.args[2:])
        if name in ATTRIBUTE_OF and node.target is not getattr and len(node.args) == 1 and not node.kwargs:
            node.op, node.target, node.args = "call_function", getattr, (node.args[0], ATTRIBUTE_OF[name])
        if name in OF_TWO and len(node.args) == 2 and isinstance(node.args[1], fx.Node) and node.args[1] not in numbers:
            node.target = OF_TWO[name]


def is_number(node: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether a node is a size, or computed from sizes only. numbers: the nodes before it that are."""
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
    if op_name(node) in ("size", "shape", "dim", "ndim", "numel"):
        return True
    operands = node.all_input_nodes
    return node.op == "call_function" and bool(operands) and numbers.issuperset(operands)


IGNORED = {"inplace": False, STACK_LEVEL: 3}  # arguments of torch.nn.functional that do not change the result


def respell_python(node: fx.Node, name: str) -> None:
    """`x.mean(1)`, `operator.add(x, y)`, `F.softmax(x, dim=1)` -> the function of `torch` with ATen's name."""
    function = public(name)
    kwargs = {key: value for key, value in node.kwargs.items() if (key, value) not in IGNORED.items()}
    if function is None or function is node.target:
        return
    if kwargs.keys() <= argument_names(name):
        if node.op == "call_method" and len(node.args) > 1 and takes_sizes(name):
            node.args = gathered(node.args)
        node.op, node.target, node.kwargs = "call_function", function, kwargs


def place_arguments(node: fx.Node, name: str) -> None:
    """`torch.sum(input=x, dim=-1)` -> `torch.sum(x, [-1])`, as ATen writes a call of the built-in function.

    A call that fits none of the overloads stays as it is, such as one whose dimension is computed in forward.
    """
    if not inspect.isbuiltin(node.target) or (not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)):
        return  # tensors by position are so in every spelling
    for arguments in schemas(name):
        values = values_by_name(node, arguments)
        if values is None:
            continue
        by_position = [argument for argument in arguments if not argument.kwarg_only]
        args = [values.get(argument.name, argument.default_value) for argument in by_position]
        node.args = without_defaults(by_position, args)
        node.kwargs = {
            argument.name: values[argument.name]
            for argument in arguments
            if argument.kwarg_only and argument.name in values and not has_default(argument, values[argument.name])
        }
        return


def values_by_name(node: fx.Node, arguments: list[Any]) -> dict[str, Any] | None:
    """The values of a call by the names of an overload's arguments, as ATen writes them; None if they do not fit it."""
    by_position = [argument for argument in arguments if not argument.kwarg_only]
    if len(node.args) > len(by_position):
        return None
    given = {key: value for key, value in node.kwargs.items() if (key, value) != ("out", None)}
    if "input" in given and by_position and by_position[0].name == "self":
        given["self"] = given.pop("input")
    names = [argument.name for argument in by_position[: len(node.args)]]
    if not given.keys().isdisjoint(names):
        return None
    given |= dict(zip(names, node.args, strict=True))
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return None
            continue
        value = given.pop(argument.name)
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]" * (str(argument.type)[:9] == "Optional["))
        if isinstance(value, int) and not isinstance(value, bool) and kind == "List[int]" and argument.N is not None:
            value = [value] * argument.N
        if not (value is None and kind != str(argument.type)) and not is_kind(value, kind):
            return None
        values[argument.name] = value
    return None if given else values


KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (fx.Node,),
    "int": (int, fx.Node, torch.dtype, torch.layout, torch.memory_format),
    "float": (float, int, fx.Node),
    "number": (float, int, complex, fx.Node),
    "bool": (bool,),
    "str": (str,),
    "Device": (torch.device, str),
}


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value may be an argument of this type in a schema of ATen. A node may be a tensor or a number."""
    if kind.startswith("List["):
        inner = kind[5:-1].removeprefix("Optional[").removesuffix("]" * ("Optional" in kind))
        is_list = isinstance(value, (list, tuple))
        return is_list and all(
            is_kind(element, inner) or (element is None and inner != kind[5:-1]) for element in value
        )
    return isinstance(value, KINDS.get(kind, ())) and (kind == "bool" or not isinstance(value, bool))


@cache
def argument_names(name: str) -> frozenset[str]:
    return frozenset(argument.name for arguments in schemas(name) for argument in arguments)


@cache
def takes_sizes(name: str) -> bool:
    """Whether the second argument is a list of integers. Methods also take these one by one."""
    return all(len(args) > 1 and str(args[1].type) == "List[int]" and args[1].N is None for args in schemas(name))


def gathered(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`x, 2, 3` -> `x, (2, 3)`"""
    return args if isinstance(args[1], (list, tuple)) else (args[0], args[1:])


@cache
def public(name: str) -> Callable[..., Any] | None:
    """The built-in function with the same arguments as the ATen operation `name`: `torch.relu`, `torch.fft.rfft`.

    Libraries replace functions of torch by functions in Python, as torch_geometric does with `torch.index_select`. The
    method stands for these, because libraries leave it alone.
    """
    if not hasattr(torch.ops.aten, name) or (name.startswith("sparse_") and name.endswith("_tensor")):
        return None  # torch's constructors of sparse tensors take other arguments than ATen's
    if inspect.isfunction(getattr(torch, name, None)) and inspect.ismethoddescriptor(getattr(torch.Tensor, name, None)):
        return getattr(torch.Tensor, name)  # type: ignore[no-any-return]
    space, _, rest = name.partition("_")
    homes = [(torch, name), (getattr(torch, space, None), rest), (F, name)]
    functions = (getattr(home, inner, None) for home, inner in homes if home is not None and inner)
    return next((function for function in functions if inspect.isbuiltin(function)), None)


def schemas(name: str) -> list[list[Any]]:
    """The arguments of every overload of an ATen operation."""
    return [schema(overload).arguments for overload in overloads(name)]


def respell_aten(node: fx.Node, overload: OpOverload, name: str) -> None:
    """`aten.mean.dim(x, [1], False)` -> `torch.mean(x, [1])`. Operations without a function of `torch` stay."""
    args = without_defaults([a for a in schema(overload).arguments if not a.kwarg_only], list(node.args))
    function = public(name)
    if function is not None and not any(map(leaves_out, args)):
        node.target, node.args = function, args


def leaves_out(argument: Any) -> bool:
    """Whether a list contains None, as the indices of `x[:, i] = y`; functions of `torch` do not take these."""
    return isinstance(argument, (list, tuple)) and any(element is None for element in argument)


def without_defaults(arguments: list[Any], args: list[Any]) -> tuple[Any, ...]:
    """The values of positional arguments, without the last ones that equal their defaults."""
    while args and len(args) <= len(arguments) and has_default(arguments[len(args) - 1], args[-1]):
        args.pop()
    return tuple(args)


def has_default(argument: Any, value: Any) -> bool:
    return bool(argument.has_default_value()) and not isinstance(value, fx.Node) and value == argument.default_value


def spell_selections(graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = ()) -> None:
    """`w[0]`, `w[:, 0]`, `w[1, 2]` -> `torch.select(w, 0, 0)`, `torch.select(w, 1, 0)`, a selection of a selection, as
    torch.export writes a tensor that integers index. Lists and tuples are indexed by an integer, too: these stay.
    """
    names, tensors = set(parameters), set(pure)
    for node in graph.nodes:
        called = node.op in ("call_function", "call_method") and op_name(node) != "getitem"
        is_parameter = node.op == "get_attr" and node.target in names
        if is_parameter or isinstance(node.meta.get("val"), Tensor) or (called and returns_one(op_name(node))):
            tensors.add(node)
        places = selected(node.args[1]) if op_name(node) == "getitem" and len(node.args) == 2 else []
        operand: Any = node.args[0] if places else None
        if not isinstance(operand, fx.Node) or not (isinstance(node.args[1], tuple) or operand in tensors):
            continue
        for dim, place in places[:-1]:
            with graph.inserting_before(node):
                inner = graph.call_function(torch.select, (operand, dim, place))
            inner.meta = {key: value for key, value in node.meta.items() if key != "val"}
            if isinstance(operand.meta.get("val"), Tensor):
                inner.meta["val"] = operand.meta["val"].select(dim, place)
            operand = inner
        node.op, node.target, node.args = "call_function", torch.select, (operand, *places[-1])
        tensors.add(node)


def selected(index: Any) -> list[tuple[int, int]]:
    """(a dimension of what the selections before leave, the place on it) of every integer of an index; none for an
    index that has other parts than integers and whole dimensions."""
    places: list[tuple[int, int]] = []
    for number, part in enumerate(index if isinstance(index, tuple) else (index,)):
        if isinstance(part, int) and not isinstance(part, bool):
            places.append((number - len(places), part))
        elif part != slice(None):
            return []
    return places


def spell_einsum(node: fx.Node) -> None:
    """`einsum(equation, [x, w])` -> `einsum(equation, x, w)`"""
    equation, *operands = node.args
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    node.op, node.target, node.args, node.kwargs = "call_function", torch.einsum, (equation, *flat), {}


def spell_tensordot(node: fx.Node) -> None:
    """`tensordot(x, w, 2)` -> `aten.tensordot(x, w, [-2, -1], [0, 1])`"""
    if isinstance(node.target, OpOverload) or set(node.kwargs) - {"dims", "out"} or node.kwargs.get("out"):
        return
    dims: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", 2)
    if isinstance(dims, int):
        dims = list(range(-dims, 0)), list(range(dims))
    if isinstance(dims, (list, tuple)) and all(isinstance(side, (list, tuple)) for side in dims):
        node.target, node.kwargs = torch.ops.aten.tensordot.default, {}
        node.args = (*node.args[:2], *dims)


def spell_vector_norm(node: fx.Node) -> None:
    """`x.norm(dim=1)` -> `torch.linalg.vector_norm(x, 2, [1])`, which torch.norm calls. Norms of matrices stay."""
    names = ("input", "p", "dim", "keepdim", "out", "dtype")
    values: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    order = values.get("p", "fro")
    if isinstance(node.target, OpOverload) or values.get("out") is not None or order == "nuc":
        return
    order = 2 if order in ("fro", None) else order
    kept = {key: value for key in ("keepdim", "dtype") if (value := values.get(key))}
    node.op, node.target = "call_function", torch.linalg.vector_norm
    node.args, node.kwargs = (values["input"], order), {**kept, "dim": values.get("dim")}
    place_arguments(node, "linalg_vector_norm")


def spell_quotient(node: fx.Node) -> None:
    """`F.normalize(x, dim=-1)` -> `x / vector_norm(x, 2, [-1], True).clamp_min(1e-12).expand_as(x)`, as torch does."""
    values = dict(zip(inspect.signature(F.normalize).parameters, node.args, strict=False)) | node.kwargs
    if values.get("out") is not None:
        return
    graph, x = node.graph, values["input"]
    with graph.inserting_before(node):
        dim = values.get("dim", 1)
        norm = graph.call_function(torch.linalg.vector_norm, (x, values.get("p", 2.0), [dim], True))
        bounded = graph.call_function(torch.clamp_min, (norm, values.get("eps", 1e-12)))
        divisor = graph.call_method("expand_as", (bounded, x))
    for written in (norm, bounded, divisor):
        written.meta = {key: value for key, value in node.meta.items() if key != "val"}
    node.target, node.args, node.kwargs = torch.div, (x, divisor), {}


def spell_padding(node: fx.Node) -> None:
    """`F.pad(x, (0, 1))` -> `aten.pad(x, [0, 1])`"""
    values = dict(zip(inspect.signature(F.pad).parameters, node.args, strict=False)) | node.kwargs
    values = {"input" if key == "self" else key: value for key, value in values.items()}
    widths, mode, value = (values.get(key) for key in ("pad", "mode", "value"))
    if values.keys() <= {"input", "pad", "mode", "value"} and isinstance(widths, (list, tuple)):
        more = (mode or "constant", value or None)
        node.op, node.target, node.kwargs = "call_function", torch.ops.aten.pad.default, {}
        node.args = (values["input"], [*widths], *(more if more[1] is not None else more[: more[0] != "constant"]))


def spell_expansion(node: fx.Node, name: str) -> None:
    """`x.expand(2, 3)`, `aten.expand(x, [2, 3])` -> `x.expand((2, 3))`"""
    x, *sizes = node.args
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, fx.Node)) else sizes
    if sizes:
        node.op, node.target, node.kwargs = "call_method", name, {}
        node.args = (x, tuple(flat) if isinstance(flat, (list, tuple)) else flat)


def spell_out(node: fx.Node, name: str) -> None:
    """All arguments of an operation of `SPELLED_OUT`, by position; other arguments than it has leave the node alone."""
    function, defaults = SPELLED_OUT[name]
    aten = isinstance(node.target, OpOverload)
    order = aten_order(node.target, name) if aten else tuple(defaults)
    values: dict[str, Any] = dict(zip(order, node.args, strict=False))
    values |= {"input" if key == "self" else key: value for key, value in node.kwargs.items()}
    unknown = values.keys() - defaults.keys() - {"cudnn_enabled", "cudnn_enable"}
    if unknown or any(key not in values for key, default in defaults.items() if default is REQUIRED):
        return
    if isinstance(values.get("reduction"), int):
        values["reduction"] = REDUCTIONS[values["reduction"]]
    if aten and values.get("padding_idx") == -1 and function is F.embedding:
        values["padding_idx"] = None  # ATen writes "none" as -1
    node.op, node.target = "call_function", function
    node.args = tuple(values.get(key, default) for key, default in defaults.items())
    node.kwargs = {}


def sort_operands(graph: fx.Graph, parameters: Mapping[str, Tensor], cases: str | None = None) -> None:
    """Spell differences and commutative operations anew, when it is known what has a row a case: `zeros - b` of zeros
    for every case is a shift."""
    subtract_by_adding(graph, parameters, cases=cases)
    order_operands(graph, parameters, cases=cases)


def order_operands(
    graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = (), cases: str | None = None
) -> None:
    """Sort the operands of sums, products, maxima and minima: activations first, then functions of parameters,
    constants, numbers."""
    label = labels(graph, parameters, pure, cases)

    def rank(operand: Any) -> int:
        return label[operand] if isinstance(operand, fx.Node) else len(Label)

    for node in graph.nodes:
        if op_name(node) in COMMUTATIVE and len(node.args) == 2 and not node.kwargs:
            first, second = node.args
            if rank(second) < rank(first):
                node.args = (second, first)
                node.meta[SWAPPED] = not node.meta.get(SWAPPED, False)


def subtract_by_adding(
    graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = (), cases: str | None = None
) -> None:
    """`x - b` -> `x + b * -1.0`, bit for bit, if one of the two is a parameter: layers are declared with sums only.

    The factor is -1.0, because `neg` of unsigned integers wraps around.
    """
    label = labels(graph, parameters, pure, cases)
    for node in graph.nodes:
        if op_name(node) != "sub" or node.kwargs or len(node.args) != 2:
            continue
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            continue
        if {label[left], label[right]} != {Label.ACT, Label.PURE}:
            continue
        with graph.inserting_before(node):
            negative = graph.call_function(torch.mul, (right, -1.0))
        negative.meta = {key: value for key, value in right.meta.items() if key == "stack_trace"}
        if "val" in right.meta:
            negative.meta["val"] = right.meta["val"] * -1.0
        label[negative] = label[right]
        node.target, node.args = torch.add, (left, negative)
        node.meta[SUBTRACTED] = True


def as_written(graph: fx.Graph) -> None:
    """Undo `order_operands` and `subtract_by_adding` in a graph that is going to run, and let it run in any layout.

    The first operand decides how the result lies in memory, and random numbers are drawn in the order of memory: a
    dropout behind a sum would have another mask.

    A capture drops `contiguous` where it copies nothing. Kernels that run later may lay out their results otherwise, as
    the plain formula of attention does, and then torch refuses a view. `reshape` is that view, or else a copy.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.reshape
        if node.meta.get(SWAPPED):
            node.args = node.args[::-1]
        if node.meta.get(SUBTRACTED):
            left, negative = node.args
            node.target, node.args = torch.sub, (left, negative.args[0])


# --- equations of einsum ----------------------------------------------------------------------------------------------


ELLIPSIS = "..."


def terms_of(equation: str) -> tuple[list[str], str]:
    """(the indices of every operand, those of the result). Without an arrow, these are the indices that occur once, in
    the order of the alphabet."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "..." * ("..." in terms) + "".join(sorted(k for k in terms if k.isalpha() and terms.count(k) == 1))
    return terms.split(","), result


def in_order_of_letters(equation: Any) -> Any:
    """The equation with its letters named anew, in their order: `"oi,ni->no"` -> `"ab,cb->ca"`. Itself if it is none,
    as the attribute of a form that takes every equation."""
    if not isinstance(equation, str):
        return equation
    terms, result = terms_of(equation)
    written = f"{','.join(terms)}->{result}"
    letters = "".join(dict.fromkeys(filter(str.isalpha, written)))
    return written.translate(str.maketrans(letters, ascii_letters[: len(letters)]))


def name_axes(graph: fx.Graph, parameters: Mapping[str, Tensor]) -> None:
    """Give letters to the axes of parameters that an equation writes as dots, because layers read letters.

    einsum("...nd,...dh->...nh", x, w)      einsum("...And,Adh->...Anh", x, w) for w [A, d, h]
    einsum("...d,...dh->...h", x, w)        einsum("...d,dh->...h", x, w) for w [d, h]
    """
    found = [node for node in graph.nodes if op_name(node) == "einsum" and ELLIPSIS in str(node.args[0])]
    label = labels(graph, parameters) if found else {}
    for node in found:
        equation, *operands = cast(Any, node.args)
        terms, result = terms_of(equation)
        dotted = [n for n, term in enumerate(terms) if ELLIPSIS in term]
        hidden = {n: hidden_axes(terms[n], operands[n], parameters) for n in dotted}
        learned = {n for n in dotted if label.get(operands[n]) is Label.PURE}
        if not learned or any(hidden[n] is None for n in learned):
            continue
        most = max(hidden[n] or 0 for n in learned)
        if most and None in hidden.values():
            continue
        names = "".join(sorted(set(ascii_letters) - set(equation))[:most])
        for n in dotted:
            axes = hidden[n] or 0
            dots = ELLIPSIS if n not in learned and axes >= most else ""
            terms[n] = terms[n].replace(ELLIPSIS, dots + names[most - min(axes, most) :])
        dots = ELLIPSIS if any(ELLIPSIS in term for term in terms) else ""
        node.args = (f"{','.join(terms)}->{result.replace(ELLIPSIS, dots + names)}", *operands)


def hidden_axes(term: str, operand: fx.Node, parameters: Mapping[str, Tensor]) -> int | None:
    """How many axes of the operand the dots of its indices stand for; None if its axes are not known."""
    value = operand.meta.get("val", parameters.get(str(operand.target)) if operand.op == "get_attr" else None)
    return value.dim() - len(term.replace(ELLIPSIS, "")) if isinstance(value, Tensor) else None


def along_diagonals(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """Spell an index that a parameter has twice as one of its diagonal, because layers read every index once.

    einsum("bd,dd->bd", x, w)      einsum("bd,d->bd", x, torch.diagonal(w, 0, 0, 1))
    """
    found = [node for node in graph.nodes if op_name(node) == "einsum" and isinstance(node.args[0], str)]
    label = labels(graph, parameters) if found else {}
    for node in found:
        equation, *operands = cast(Any, node.args)
        terms, result = terms_of(equation)
        for n, operand in enumerate(operands):
            while label.get(operand) is Label.PURE and (twice := twice_in(terms[n])) is not None:
                index, first, second = twice
                with graph.inserting_before(node):
                    operands[n] = graph.call_function(torch.diagonal, (operands[n], 0, first, second))
                operands[n].meta = {key: value for key, value in node.meta.items() if key != "val"}
                before = operand.meta.get("val")
                if isinstance(before, Tensor):
                    operands[n].meta["val"] = torch.diagonal(before, 0, first, second)
                label[operands[n]], operand = Label.PURE, operands[n]
                terms[n] = terms[n].replace(index, "") + index
        node.args = (f"{','.join(terms)}->{result}", *operands)


def twice_in(term: str) -> tuple[str, int, int] | None:
    """An index that a term without dots has twice, with its two places; None if there is none."""
    index = next((index for index in term if term.count(index) == 2), None)
    return None if index is None or ELLIPSIS in term else (index, term.index(index), term.rindex(index))


def in_pairs(graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = ()) -> None:
    """Spell an einsum of parameters with two other operands or more as einsums of two, which layers are.

    The first activation meets the others one by one: that next, with which the product has the fewest indices.
    """
    found = [node for node in graph.nodes if op_name(node) == "einsum" and len(node.args) > 3]
    label = labels(graph, parameters, pure) if found else {}
    for node in found:
        equation, *operands = cast(Any, node.args)
        terms, result = terms_of(equation) if isinstance(equation, str) else ([], "")
        twice = any(len(set(term) - {"."}) < len(term.replace("...", "")) for term in terms)
        if twice or len(terms) != len(operands) or not any(label.get(value) is Label.PURE for value in operands):
            continue
        pairs = list(zip(terms, operands, strict=True))
        first = next((n for n, operand in enumerate(operands) if label.get(operand) is Label.ACT), 0)
        term, product = pairs.pop(first)
        while pairs:
            others = [other for other, _ in pairs]
            products = [of_two(term, other, [*others[:n], *others[n + 1 :], result]) for n, other in enumerate(others)]
            n = min(range(len(products)), key=lambda n: len(products[n]))
            after = products[n] if len(pairs) > 1 else result
            other, operand = pairs.pop(n)
            with graph.inserting_before(node):
                contraction = graph.call_function(torch.einsum, (f"{term},{other}->{after}", product, operand))
            contraction.meta = {key: value for key, value in node.meta.items() if key != "val"}
            values = [value.meta.get("val") for value in (product, operand)]
            if all(isinstance(value, Tensor) for value in values):
                contraction.meta["val"] = torch.einsum(contraction.args[0], *values)
            term, product = after, contraction
        node.replace_all_uses_with(product)
        product.meta = dict(node.meta)
        graph.erase_node(node)


def of_two(term: str, other: str, rest: Iterable[str]) -> str:
    """The indices of a product of two operands, of which the rest of the equation needs some."""
    both, needed = term + other, set().union(*rest) - {"."}
    return "..." * ("..." in both) + "".join(dict.fromkeys(index for index in both if index in needed))


# --- ATen's own spelling ----------------------------------------------------------------------------------------------

Spelled = tuple[Callable[..., Any], tuple[Any, ...]]
NEW_STATISTICS = (3, 4)  # the results of a functional batch norm that its buffers become


def spelled_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Spelled:
    return F.layer_norm, (x, shape, weight, bias, eps)


def spelled_group_norm(
    x: Any, weight: Any, bias: Any, cases: Any, channels: Any, pixels: Any, groups: int, eps: float
) -> Any:
    return F.group_norm, (x, groups, weight, bias, eps)


def spelled_batch_norm(x: Any, weight: Any, bias: Any, *rest: Any) -> Spelled:
    mean, var, training, momentum, eps = rest if len(rest) == 5 else (None, None, *rest)
    return F.batch_norm, (x, mean, var, weight, bias, training, momentum, eps)


def by_running(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Spelled:
    return F.batch_norm, (x, mean, var, weight, bias, False, momentum, eps)


def by_batch(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    """The functional form, which returns new statistics and writes none."""
    statistics = (None, None) if training else (mean, var)
    return F.batch_norm, (x, *statistics, weight, bias, training, momentum, eps)


NORMS: dict[str, Callable[..., Spelled]] = {
    "native_layer_norm": spelled_layer_norm,
    "native_group_norm": spelled_group_norm,
    "native_batch_norm": spelled_batch_norm,
    torch_private.BATCH_NORM: spelled_batch_norm,
    torch_private.BATCH_NORM_IN_EVALUATION: by_running,
    torch_private.BATCH_NORM_FUNCTIONAL: by_batch,
}
CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
CONVOLVE_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def spell_native(graph: fx.Graph) -> None:
    """Bring ATen's convolutions and norms to the functions of torch.nn.functional."""
    for node in list(graph.nodes):
        name = op_name(node)
        if node.kwargs or node.op != "call_function":
            continue
        if name == "convolution" and len(node.args) == 9:
            spell_convolution(node, *node.args)
        elif name in NORMS:
            spell_norm(graph, node, NORMS[name])


def spell_convolution(
    node: fx.Node, x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, more: Any, g: Any
) -> None:
    dims = len(stride)
    if not 1 <= dims <= 3 or (any(more) and not transposed):
        return
    node.target = (CONVOLVE_TRANSPOSED if transposed else CONVOLVE)[dims - 1]
    node.args = (x, w, b, stride, padding, more, g, dilation) if transposed else (x, w, b, stride, padding, dilation, g)


def spell_norm(graph: fx.Graph, node: fx.Node, spelled: Callable[..., Spelled]) -> None:
    reads = [user for user in node.users if user.target is operator.getitem]
    allowed = (0, *NEW_STATISTICS) if spelled is by_batch else (0,)
    if len(reads) < len(node.users) or any(user.args[1] not in allowed for user in reads):
        return
    results = [user for user in reads if user.args[1] == 0]
    if not results:
        return
    with graph.inserting_before(node):
        function, args = spelled(*node.args)
        norm = graph.call_function(function, args)
    norm.meta = {**node.meta, "val": results[0].meta["val"]} if "val" in results[0].meta else dict(node.meta)
    for user in results:
        user.replace_all_uses_with(norm)
        graph.erase_node(user)
    if len(results) == len(reads):
        graph.erase_node(node)
    else:  # the running statistics do not depend on gain and shift
        node.args = (node.args[0], None, None, *node.args[3:])
