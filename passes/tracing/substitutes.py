"""Substitutes for functions of torch that no tracer can trace, while a model is traced.

`replaced_in_thread` replaces a function in the present thread only: others call the original. With `CAPTURING` one
thread captures at a time, because torch's own tracers are not made for more.

`CertainDraws`: a branch on a draw of torch.rand whose outcome is certain, as with a rate of dropped modules that is 0.

    if torch.rand(1) > self.module_dropout: ...        # 0.0

The draw is in [0, 1) and stays in the graph, so that the random stream advances as in the model. The rate is an
attribute, and a capture is valid for one value of it.

`Refusals`: a look at values behind which forward does nothing but raise.

    assert (output == hidden).all()
    if torch.isnan(x).any(): raise ValueError("not a number")

The capture has the other side of the branch. A batch for which forward raises has no step: the model's own run raises.

`SparseProducts`: the product of a sparse matrix and a dense one, which torch.export has no shapes for, is an
operation of its own while the model is traced.

`Bags`: bags of ids [cases, positions] have as many outputs as the ids have rows.

`custom_functions`: applications of a user's autograd.Function are noted, or handed over.

`checkpoints_off`: checkpoints run the function that they wrap. In the backward they would run the original forward
again, although a graph or a recording has replaced it.

`Detached`: `x.data` becomes `x.detach()`. To torch.export the `.data` of a parameter, as adapters read it from other
layers, is a constant without values. Writes through `.data` are seen when the model itself runs (`effects.Writes`).

`WholeNumbers`: `lengths.cpu().numpy()`, as older code gives it to packed sequences, is the tensor.

`ByteMasks`: `torch.where(mask, x, y)` of a mask of bytes, as older code writes masks, has a mask of bools.

`moves_left_out`: `self.layer.to(x.device)` of a layer that is there. A tracer's tensors cannot take its place.

`Substitutes`: one mode in front of `CertainDraws`, `Refusals`, `Detached`, `WholeNumbers`, `ByteMasks`, `Bags`,
`SparseProducts`.

`EverywhereElse`: the tensors that stand for parameters in a trace do so in modules of plain lists, too.

`recurrent_layers`: recurrent layers and packed sequences are single operations, which know shapes and are never run;
the pass `unroll` writes them out.

    nn.LSTM, nn.GRU, nn.RNN, torch.lstm, ...                    recurrent(kind, x, ...)
    nn.LSTMCell, nn.GRUCell, nn.RNNCell, torch.lstm_cell, ...   recurrent_cell(kind, x, ...)
    pack_padded_sequence(x, lengths).data                       packed(x, lengths)
    pad_packed_sequence(sequence)                               unpacked(data, lengths, ...)

torch.export would trace the fused calls step by step, which is slow. It cannot trace packed sequences, whose sizes are
data, nor the fused cells of CUDA, some of which do not run without values, nor the look of nn.TransformerEncoder at its
mask, whether it is causal. The capture holds for one number of steps,
which is guarded as every shape is, and for one length of the longest sequence of every packed batch.

**Kernels**: recurrent layers and packed sequences by torch's kernels, for the operations that stand for them.

Graphs that are evaluated have them (`passes.unroll`), and so have the regions of a forward that stay graphs of their
own, as those under torch.no_grad: no pass reads these.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import currentframe, signature, unwrap
from types import ClassMethodDescriptorType, CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..cases import OF_ROWS
from ..errors import UntraceableError
from ..graphs.operations import op_name
from ..torch_private import (
    CHECKPOINT_GENERATORS,
    EXPECTED_HIDDEN_SIZE,
    IS_ALL_TRUE,
    IS_CAUSAL,
    OWN_FUNCTIONS,
    PACK,
    UNPACK,
    CheckpointFunction,
    assert_size,
)

CLASS_METHODS = (classmethod, ClassMethodDescriptorType)  # of Python and of C
CAPTURING = threading.RLock()  # held by the thread that captures a model


@dataclass
class Replaced:
    """A function that some threads have replaced.

    Attributes:
        original: as the owner held it, a classmethod for instance.
        users: the number of replacements in all threads.
        here: the replacements of the present thread, the innermost last.
    """

    original: Any
    users: int = 0
    here: threading.local = field(default_factory=threading.local)

    def call(self, below: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the innermost replacement of this thread, or what is below all of them."""
        for function in getattr(self.here, "functions", []):
            below = following(function, below)
        return below(*args, **kwargs)


class ThreadTracer(fx.Tracer):
    """Traces the thread that made it. While torch.fx traces, the modules of all threads call the tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    @property
    def traces_this_thread(self) -> bool:
        return threading.get_ident() == self.thread

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return super().call_module(m, forward, args, kwargs) if self.traces_this_thread else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if self.traces_this_thread else attr_val


_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], Replaced] = {}  # by the owner's id and the function's name


@contextmanager
def replaced_in_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, and in this thread, `owner.name(...)` calls `function(below, ...)`.

    below: what is called without the replacement; of a classmethod, with the class bound. The class is then the next
        argument of `function`.
    """
    with _LOCK:
        entry = _REPLACED.get((id(owner), name))
        if entry is None:
            entry = _REPLACED[id(owner), name] = Replaced(vars(owner)[name])
            setattr(owner, name, dispatcher(entry))
        entry.users += 1
    functions = entry.here.__dict__.setdefault("functions", [])
    functions.append(function)
    try:
        yield
    finally:
        functions.remove(function)
        with _LOCK:
            entry.users -= 1
            if not entry.users:
                setattr(owner, name, entry.original)
                del _REPLACED[id(owner), name]


def dispatcher(entry: Replaced) -> Any:
    """A function, or a classmethod as the original, that calls what this thread has put in its place."""
    if not isinstance(entry.original, CLASS_METHODS):
        return lambda *args, **kwargs: entry.call(entry.original, args, kwargs)

    def of_class(cls: type, *args: Any, **kwargs: Any) -> Any:
        bound = entry.original.__get__(None, cls)
        return entry.call(lambda cls, *args, **kwargs: bound(*args, **kwargs), (cls, *args), kwargs)

    return classmethod(of_class)


def following(function: Callable[..., Any], below: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(below, *args, **kwargs)


# --- draws whose outcome is certain -----------------------------------------------------------------------------------

DRAWS = {"rand", "rand_like"}
COMPARISONS = {
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
READS = {"__bool__", "item"}
FINE = (torch.float32, torch.float64)  # their draws are 0 at most once in 2^24 times, which counts as never


class CertainDraws(TorchFunctionMode):
    """Inside, a comparison of a draw with a number is a Python bool when it is read, if its outcome is certain.

    So is the question by which torch.distributions looks for arguments and samples that it refuses. A model that runs
    has none, and the model's own run raises the error of another batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[int, Tensor] = {}  # by id; held, so that no other tensor gets the id
        self.outcomes: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and id(args[0]) in self.outcomes:
            return self.outcomes[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if name == IS_ALL_TRUE:
            self.outcomes[id(result)] = result, True
        elif name in DRAWS:
            self.draws[id(result)] = result
        elif name in COMPARISONS and len(args) == 2 and not kwargs and id(args[0]) in self.draws:
            truth = outcome(COMPARISONS[name], args[1], draw=self.draws[id(args[0])])
            if truth is not None:
                self.outcomes[id(result)] = result, truth
        return result


def outcome(comparison: str, number: Any, draw: Tensor) -> bool | None:
    """The outcome of comparing a draw in [0, 1) with a number; None if it depends on the draw."""
    if not isinstance(number, (int, float)):
        return None
    if number >= 1:
        return comparison in ("lt", "le")
    if number < 0 or (number == 0 and (comparison in ("lt", "ge") or draw.dtype in FINE)):
        return comparison in ("gt", "ge")
    return None


# --- looks at values that forward refuses -----------------------------------------------------------------------------

LOOKS = {"__bool__", "is_nonzero", "allclose", "equal"}
BETWEEN_LOOK_AND_BRANCH = {"CALL", "PRECALL", "TO_BOOL", "EXTENDED_ARG"}


class Refusals(TorchFunctionMode):
    """Inside, a look at values that decides whether forward raises says that it does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOOKS:
            frame = currentframe()
            while frame is not None and frame.f_code.co_name == "__torch_function__":  # this one, and other modes
                frame = frame.f_back
            truth = None if frame is None else without_raise(frame.f_code, frame.f_lasti)
            if truth is not None:
                return truth
        return func(*args, **(kwargs or {}))


@cache
def without_raise(code: CodeType, at: int) -> bool | None:
    """The truth of what the instruction at this offset computes, or asks the truth of, if the other truth only raises
    an error that the function does not handle; None if there is no such branch."""
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    place = places.get(at)
    if place is None:
        return None
    while instructions[place].opname in BETWEEN_LOOK_AND_BRANCH:
        place += 1
    branch = instructions[place]
    jumps_if = next((truth for word, truth in (("IF_TRUE", True), ("IF_FALSE", False)) if word in branch.opname), None)
    if jumps_if is None or "OR_POP" in branch.opname or code.co_exceptiontable:
        return None
    otherwise = instructions[places[branch.argval] :]
    if raises(instructions[place + 1 :], lambda offset: same_until_return(instructions[places[offset] :], otherwise)):
        return jumps_if
    return not jumps_if if raises(otherwise) else None


def raises(
    instructions: Iterable[dis.Instruction], is_without_error: Callable[[int], bool] = lambda offset: False
) -> bool:
    """Whether an error is raised before anything else is decided, returned or kept.

    is_without_error: whether a jump to an offset goes where no error is raised. Further looks may lead there, as in
        `assert x.all() or (~x).all()`.
    """
    for instruction in instructions:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.opname.startswith("POP_JUMP") and is_without_error(instruction.argval):
            continue
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs) or instruction.opname.startswith(("RETURN", "STORE")):
            return False
    return False


def same_until_return(first: Iterable[dis.Instruction], second: Iterable[dis.Instruction]) -> bool:
    """Whether two places of a function are one, or do the same until they return: Python writes the last return for
    each of the jumps to it."""
    for instruction, other in zip(first, second, strict=False):
        if instruction.offset == other.offset:
            return True
        if (instruction.opname, instruction.argval) != (other.opname, other.argval):
            return False
        if instruction.opname.startswith("RETURN"):
            return True
    return False


# --- checkpoints ------------------------------------------------------------------------------------------------------


@contextmanager
def checkpoints_off() -> Iterator[None]:
    """Inside, checkpoints that are not reentrant do nothing. `custom_functions` handles the others."""

    def nothing(below: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        for name in CHECKPOINT_GENERATORS:
            stack.enter_context(replaced_in_thread(checkpoint, name, nothing))
        yield


# --- a user's autograd.Functions --------------------------------------------------------------------------------------

Function = type[torch.autograd.Function]
Apply = Callable[..., Any]
Exported = Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def custom_functions(exported: Exported | None = None) -> Iterator[set[str]]:
    """Yields the names of the user's autograd.Functions that are applied inside; a trace would lose their backward.

    Checkpoints run the function that they wrap, which has the same gradients.

    exported: called instead of a Function while torch.export traces; names are not collected then.
    """
    seen: set[str] = set()

    def apply(original: Apply, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is CheckpointFunction:
            wrapped, _, *inputs = args
            return wrapped(*inputs)
        if function.__name__.startswith(OWN_FUNCTIONS):
            return original(*args, **kwargs)
        if exported is not None and torch.compiler.is_exporting():
            return exported(function, args, kwargs)
        if exported is None:
            seen.add(function.__name__)
        return original(*args, **kwargs)

    with functions_applied(apply), checkpoints_off():
        yield seen


@contextmanager
def functions_applied(apply: Callable[[Apply, Function, tuple[Any, ...], Mapping[str, Any]], Any]) -> Iterator[None]:
    """Inside, and in this thread, applying an autograd.Function calls `apply(torch's apply, the Function, args,
    kwargs)`."""

    def instead(below: Apply, cls: Function, *args: Any, **kwargs: Any) -> Any:
        return apply(partial(below, cls), cls, args, kwargs)

    with replaced_in_thread(torch.autograd.Function, "apply", instead):
        yield


def refuse_custom(model: nn.Module, custom: set[str], *, exported: bool = True) -> None:
    """Raises UntraceableError for autograd.Functions that were applied.

    exported: whether the model was traced with inputs; Functions are refused then because forward takes derivatives.
    """
    if custom:
        where = ", and its forward takes derivatives" if exported else ""
        advice = "Write it" if exported else "Give kfac_fx.compile example inputs, or write it"
        raise UntraceableError(
            f"{type(model).__name__} uses {', '.join(sorted(custom))}, an autograd.Function with its own backward, "
            f"which the graph would differentiate differently{where}.\n"
            f"{advice} with ordinary operations, or register it with torch.library.custom_op and register_autograd."
        )


# --- `.data` ----------------------------------------------------------------------------------------------------------

DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a property, which torch's types do not say


class Detached(TorchFunctionMode):
    """Inside, `x.data` is `x.detach()`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))


class WholeNumbers(TorchFunctionMode):
    """Inside, `lengths.numpy()` of whole numbers [N] is the tensor, which packing takes, too.

    torch.export has no arrays. Code that needs one raises an error, and the outputs of the graph are compared with the
    model's.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == Tensor.numpy and args[0].dim() == 1 and args[0].dtype in (torch.int32, torch.int64):
            return args[0]
        return func(*args, **(kwargs or {}))


class ByteMasks(TorchFunctionMode):
    """Inside, the condition of `torch.where` may be of bytes: torch computes with one, and torch.export refuses it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "where":
            return func(*args, **(kwargs or {}))
        given = [value.bool() if is_bytes(value) else value for value in args]
        named = {name: value.bool() if is_bytes(value) else value for name, value in (kwargs or {}).items()}
        return func(*given, **named)


def is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.uint8


class EverywhereElse(TorchFunctionMode):
    """Inside, tensors stand for parameters also where a model holds these in no module of its own: in plain lists, or
    in modules of plain lists whose parameters are in an nn.ParameterList. torch swaps those of submodules alone.

    originals: a model's parameters. instead: the tensors that stand for them, in this order.
    """

    def __init__(self, originals: Iterable[Tensor], instead: Iterable[Tensor]) -> None:
        super().__init__()
        pairs = [(original, other) for original, other in zip(originals, instead, strict=True) if original is not other]
        self.pairs = {id(original): (original, other) for original, other in pairs}  # held, so that ids stay theirs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*self.swapped(args), **self.swapped(kwargs or {}))

    def swapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.pairs.get(id(value), (value, value))[1]
        if type(value) in (tuple, list):
            return type(value)(map(self.swapped, value))
        return {key: self.swapped(inner) for key, inner in value.items()} if type(value) is dict else value


# --- bags -------------------------------------------------------------------------------------------------------------

BAG = signature(F.embedding_bag)


class Bags(TorchFunctionMode):
    """Inside, `F.embedding_bag` of ids [cases, positions] has one bag for each case, by the size of the ids.

    torch makes flat ids of them, with the offsets `arange(0, cases · positions, positions)`. The number of these is a
    quotient of symbols, so that no layer behind the bags would know the cases.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.embedding_bag:
            return func(*args, **(kwargs or {}))
        call = BAG.bind(*args, **(kwargs or {})).arguments
        ids, weights = call["input"], call.get("per_sample_weights")
        if ids.dim() == 2 and call.get("offsets") is None and (weights is None or weights.shape == ids.shape):
            call["offsets"] = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
            call["input"] = ids.reshape(-1)
            if weights is not None:
                call["per_sample_weights"] = weights.reshape(-1)
        return func(**call)


# --- lengths ----------------------------------------------------------------------------------------------------------


def symbolic_lengths(model: nn.Module) -> AbstractContextManager[list[Any]]:
    """`lengths_in` the files that define the model's classes."""
    return lengths_in(function for module in model.modules() for function in forwards_of(module))


@contextmanager
def lengths_in(functions: Iterable[Callable[..., Any]]) -> Iterator[list[Any]]:
    """Inside, `len(x)` is `x.shape[0]` in the files of these functions. Python's own is a number, so that the graph
    would hold for batches of one size alone, and a proxy of torch.fx has none.

    Yields the sizes that were given where Python's own is a number, and which code may refuse: `cache[len(x)]`.
    """
    given: list[Any] = []

    def length(value: Any) -> Any:
        symbolic = isinstance(value, fx.Proxy) or (isinstance(value, Tensor) and value.dim())
        size = value.shape[0] if symbolic else len(value)
        given.extend([size] if isinstance(size, torch.SymInt) else [])
        return size

    scopes = {id(scope): scope for scope in (getattr(unwrap(function), "__globals__", {}) for function in functions)}
    replaced = [scope for scope in scopes.values() if "len" not in scope and not of_torch(scope)]
    for scope in replaced:
        scope["len"] = length
    try:
        yield given
    finally:
        for scope in replaced:
            scope.pop("len", None)


def forwards_of(module: nn.Module) -> list[Any]:
    """The forward of a module and those that it overrides."""
    own = vars(module).get("forward")
    classes = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    return [*([] if own is None else [own]), *classes]


def of_torch(scope: Mapping[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "torch"


# --- products with sparse matrices ------------------------------------------------------------------------------------

SPARSE_MM = torch.sparse.mm.__name__
MULTIPLY = {"mm", "spmm", "mv", "matmul", "__matmul__", SPARSE_MM}


class SparseProducts(TorchFunctionMode):
    """Inside, torch.export meets a sparse matrix times a dense one as an operation of which only the shapes are known;
    see `with_sparse_products`. A square matrix has one size, so that the rows behind the product are as many as before.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        operands = name in MULTIPLY and not kwargs and len(args) == 2 and all(isinstance(arg, Tensor) for arg in args)
        if not operands or not torch.compiler.is_exporting():
            return func(*args, **(kwargs or {}))
        matrix, x = args
        if matrix.layout is torch.strided or x.layout is not torch.strided or x.dim() > 2:
            return func(*args)
        assert_size(matrix.shape[1] == x.shape[0])  # type: ignore[no-untyped-call]
        if matrix.shape[0] == matrix.shape[1]:
            assert_size(matrix.shape[0] == matrix.shape[1])  # type: ignore[no-untyped-call]
        return sparse_product(matrix, x, name == SPARSE_MM)


CHANGED = {IS_ALL_TRUE, "numpy", "where", "embedding_bag", *READS, *DRAWS, *COMPARISONS, *LOOKS, *MULTIPLY}


class Substitutes(TorchFunctionMode):
    """The modes above, around the calls of functions that one of them changes. torch.export makes tens of thousands of
    other calls, most of them of properties, and every mode takes its time of each."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = CertainDraws(), Refusals(), Detached(), WholeNumbers(), ByteMasks(), Bags(), SparseProducts()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in CHANGED and func != DATA:
            return func(*args, **(kwargs or {}))
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            return func(*args, **(kwargs or {}))


CONVERSIONS = ("to", "cuda", "cpu", "float", "double", "half", "bfloat16")  # of a module, and of a tensor


@contextmanager
def moves_left_out() -> Iterator[None]:
    """Inside, modules that are moved to where they are, or cast to the type that they have, stay as they are."""

    def moved(name: str, below: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for tensor in (*module.parameters(), *module.buffers()):
            new = getattr(tensor.detach(), name)(*args, **kwargs)
            changed = (new.dtype, new.stride()) != (tensor.dtype, tensor.stride()) and tensor.is_floating_point()
            if changed or new.device != tensor.device:
                return below(module, *args, **kwargs)
        return module

    with ExitStack() as stack:
        for name in CONVERSIONS:
            stack.enter_context(replaced_in_thread(nn.Module, name, partial(moved, name)))
        yield


def with_sparse_products(graph: fx.Graph) -> None:
    """Let a traced graph compute the products that `SparseProducts` has left out. torch.sparse.mm is the one spelling
    for matrices that are given, as sparse features are, which a weight may be multiplied with."""
    for node in graph.nodes:
        if node.target is torch.ops.kfac_fx.sparse_product.default:
            matrix, x, by_sparse_mm = node.args
            given = matrix.op in ("placeholder", "get_attr") and x.meta["val"].dim() == 2
            node.target, node.args = torch.sparse.mm if by_sparse_mm or given else torch.matmul, (matrix, x)


# --- operations that only know shapes ---------------------------------------------------------------------------------

NOT_RUN = "bug in kfac_fx: an operation that only stands for another one was run"


@torch.library.custom_op("kfac_fx::sparse_product", mutates_args=())
def sparse_product(matrix: Tensor, x: Tensor, by_sparse_mm: bool) -> Tensor:
    """A sparse matrix [n, m] times x [m, ...], by torch.sparse.mm or torch.matmul: their gradients by the matrix
    differ."""
    raise AssertionError(NOT_RUN)


@sparse_product.register_fake
def _(matrix: Tensor, x: Tensor, by_sparse_mm: bool) -> Tensor:
    return x.new_empty(matrix.shape[0], *x.shape[1:])


@torch.library.custom_op("kfac_fx::recurrent", mutates_args=())
def recurrent(
    kind: str,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    steps: int,
    biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """[output, last state, ...] of a stack of recurrent layers, as torch.lstm, torch.gru, ... return them.

    Args:
        x: [steps, N, i], or [N, steps, i] if `batch_first`, or packed [rows, i] if there are `lengths`.
        state, weights: in torch's order.
        dropout: between the layers; 0 outside of training.
    """
    raise AssertionError(NOT_RUN)


@recurrent.register_fake
def _(kind: str, x: Tensor, state: Sequence[Tensor], *options: Any) -> list[Tensor]:
    *_, bidirectional, batch_first = options
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    steps_first = x.transpose(0, 1) if batch_first else x
    output = x.new_empty(*steps_first.shape[:-1], width)
    ends = (tensor.new_empty(tensor.shape) for tensor in state)
    return [output.transpose(0, 1) if batch_first else output, *ends]


@torch.library.custom_op("kfac_fx::recurrent_cell", mutates_args=())
def recurrent_cell(
    kind: str,
    x: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None,
    state_bias: Tensor | None,
) -> list[Tensor]:
    """The next state after one step, as torch.lstm_cell, ... return it: x [N, i], state [N, o]."""
    raise AssertionError(NOT_RUN)


@recurrent_cell.register_fake
def _(kind: str, x: Tensor, state: Sequence[Tensor], weight: Tensor, state_weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], state_weight.shape[1]) for _ in state]


@torch.library.custom_op("kfac_fx::packed", mutates_args=())
def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """The positions of x [steps, N, ...] within the lengths [N], step by step: [rows, ...]."""
    raise AssertionError(NOT_RUN)


@packed.register_fake
def _(x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[2:])


@torch.library.custom_op("kfac_fx::unpacked", mutates_args=())
def unpacked(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    """The inverse of `packed`: [rows, ...] -> [steps, N, ...], with `padding` beyond the lengths."""
    raise AssertionError(NOT_RUN)


@unpacked.register_fake
def _(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    return data.new_empty(steps, lengths.shape[0], *data.shape[1:])


SHAPES: dict[int, Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]] = {}  # of the calls of `own_backward`


@torch.library.custom_op("kfac_fx::own_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def own_backward(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A call of a user's torch.autograd.Function, by its number; see `functions`. It may draw random numbers."""
    raise AssertionError(NOT_RUN)


@own_backward.register_fake
def _(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return SHAPES[number](tensors, sizes)


# --- recurrent layers -------------------------------------------------------------------------------------------------


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

    def attention(below: Callable[..., Any], self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        mode.batch_first = self.batch_first
        try:
            return below(self, *args, **kwargs)
        finally:
            mode.batch_first = False

    def is_causal(below: Callable[..., Any], mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        # Attention then adds the mask, which is the same, causal or not. On an accelerator another kernel runs for a
        # causal mask, whose dropout draws other numbers.
        if is_causal is None and isinstance(mask, Tensor) and mask.device.type == "cpu":
            return False
        return bool(below(mask, is_causal, size))

    with (
        replaced_in_thread(nn.modules.transformer, IS_CAUSAL, is_causal),
        replaced_in_thread(nn.RNNBase, EXPECTED_HIDDEN_SIZE, expected),
        replaced_in_thread(nn.MultiheadAttention, "forward", attention),
        mode,
    ):
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
        self.batch_first = (
            False  # of the attention that runs, whose function gets its inputs as [positions, cases, ...]
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name == ATTENTION and args and args[0].dim() == 3:
            layout = "[cases, positions, features]" if self.batch_first else "[positions, cases, features]"
            self.tell(f"attention of torch takes {layout}", args[0].shape[1])
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
        self.tell(f"{kind}_cell takes {OF_ROWS}", x.shape[0])
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


STACK_OF_LAYERS = "recurrent"  # the operation that stands for a stack of recurrent layers
TORCH_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
TORCH_CELLS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm_cell,
    "gru": torch.gru_cell,
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
}


def run_layers(
    kind: str,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    steps: int,
    biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> Sequence[Tensor]:
    """See `recurrent`."""
    first: Any = list(state) if kind == "lstm" else state[0]
    stack = biases, layers, dropout, dropout > 0, bidirectional
    results: Sequence[Tensor]
    if lengths is None:
        results = TORCH_LAYERS[kind](x, first, list(weights), *stack, batch_first)
    else:
        sizes = reached(lengths, steps, lengths.device).sum(1).cpu()
        results = TORCH_LAYERS[kind](x, sizes, first, list(weights), *stack)
    return results


def run_cell(kind: str, x: Tensor, state: Sequence[Tensor], *weights: Tensor | None) -> Sequence[Tensor]:
    """See `recurrent_cell`."""
    new: Any = TORCH_CELLS[kind](x, list(state) if kind == "lstm" else state[0], *weights)
    return new if kind == "lstm" else [new]


def reached(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """[steps, N]: whether the sequence has the step."""
    return torch.arange(steps, device=device).unsqueeze(-1) < lengths.to(device)


def rows_within(x: Tensor, lengths: Tensor) -> Tensor:
    """See `packed`."""
    return x[reached(lengths, x.shape[0], x.device)]


def padded_again(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    """See `unpacked`."""
    mask = reached(lengths, steps, data.device)
    place = (mask.flatten().cumsum(0).view_as(mask) - 1).clamp(min=0)
    return torch.where(mask[(..., *(None,) * (data.dim() - 1))], data[place], padding)


COMPUTED: dict[str, Callable[..., Any]] = {
    STACK_OF_LAYERS: run_layers,
    "recurrent_cell": run_cell,
    "packed": rows_within,
    "unpacked": padded_again,
}


def compute(graph: fx.Graph) -> None:
    """Let the operations that stand for recurrent layers and packed sequences compute."""
    for node in graph.nodes:
        if (function := COMPUTED.get(op_name(node))) is not None:
            node.target = function
