"""A model that no single graph holds, divided into the largest submodules that can be captured.

The model runs on the example inputs and is watched; it runs again with other random numbers as long as these reach more
submodules. From the outermost module inwards, a submodule is captured for every kind of call that was seen. If that
fails, it stays Python and its children are tried. A submodule that was never reached is captured without inputs, by
torch.fx.

Parameters that a forward reads in Python are followed to the operations that read them. Tensors that Python computes
from parameters alone are followed. The operation in which such a tensor meets another one, or is expanded to the cases,
is a *read*: a small function of tensors, which is captured like a submodule. Its graph runs instead of the
operation.

    w = self.weight * self.gain     followed
    y = F.linear(x, w)              a read: x -> linear(x, mul(weight, gain))
    h[mask] = self.token            a read: (h, mask) -> index_put(h, mask, token), which is written into h

`Reads` is the mode that follows parameters. `Readers` collects the reads outside of the captured submodules on the
examples; `kfac_fx.recording.emitted_submodules.ServedReads` runs their graphs in a recording.
"""

from __future__ import annotations

import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from .cases import CaseOrder
from .complex_parameters import original
from .errors import UntraceableError, running_line
from .graphs.labels import Label, has_gradient, labels_of
from .graphs.operations import LOOKUPS, NO_GRADIENT, draws, name_of, op_name
from .ir import GENERIC, Note, Options, Program, Submodule
from .pipeline import CAPTURED, run
from .resolve import requested
from .submodules import in_model, join, of_parameters_alone
from .torch_losses import EVERY_NAME
from .torch_private import IS_CAUSAL, pytree, transforms
from .trace import Capture, named_parameters, trace_model
from .tracing.calls import (
    IN_TRANSFORM,
    Call,
    Lent,
    WatchedForwards,
    around_calls,
    hooked_by_user,
    map_tensors,
    modules_around,
    refuse_users_hooks,
    watched,
    without_trace,
    without_users_hooks,
)
from .tracing.effects import written_by
from .tracing.functions import plain_functions
from .tracing.settings import PLAIN, ForwardSettings, computed_weight, plain
from .tracing.signature import autocast, call_key, kinds
from .tracing.substitutes import Apply, Function, functions_applied

ALL_GENERIC = (
    "If you cannot change this code, make all parameters generic, with diagonal blocks; then nothing needs to be "
    'captured: compile(..., approximations={"*": "generic"}).'
)
SAY_CAUSAL = (
    "torch reads the values of the mask, to see whether it is causal. Say it: is_causal=True in the call of the "
    "encoder, tgt_is_causal=True in that of the decoder, src_is_causal and tgt_is_causal in that of nn.Transformer; "
    "False for another mask."
)


@dataclass(frozen=True)
class Division:
    """The captured submodules of a model, and what is left to Python.

    Attributes:
        program: of all submodules, joined; no pass has looked for layers yet.
        left: the ids of modules that stay Python.
        written: the parameters that this Python code writes into.
        reads: whether operations of Python that read parameters are captured.
    """

    program: Program
    captured: tuple[CapturedSubmodule, ...]
    left: frozenset[int]
    written: frozenset[str] = frozenset()
    reads: bool = True

    def why_left(self, subject: str) -> str:
        """Why the model, by the name of its class, or a submodule, by its path, is Python."""
        reasons = (note.reason for note in self.program.left if note.subject == subject)
        return next(reasons, "it was left as Python on earlier inputs")


def divide(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    layers: Mapping[str, Any],
    error: UntraceableError,
    earlier: Division | None = None,
    cases: int | None = None,
    reads: bool = True,
) -> Division:
    """Divide a model.

    Args:
        error: why the whole model was not captured.
        earlier: the division on other inputs; its captures are kept, and what it left as Python stays so.
        cases: of the inputs.
        reads: whether to capture operations of Python that read parameters, too.

    Raises UntraceableError, with the words of `error`, if nothing can be captured, unless the user asked for generic
    parameters only.
    """
    if options.batch_dim:
        raise UntraceableError(
            f"batch_dim={options.batch_dim} needs one graph of the whole model, and there is none: give the model its "
            f"cases on the first dimension of all inputs.\nThe error of torch.export is:\n{error}"
        )
    with plain_functions():
        seen = watched(model, args, kwargs)
    divider = Divider(seen, options, layers, earlier, modules_around(model))
    divider.left.append((model, Note(type(model).__name__, in_short(error, model))))
    for name, child in model.named_children():
        divider.descend(name, child)
    parameters, aliases = named_parameters(model)
    empty = Program(fx.Graph(), nn.Module(), parameters, aliases, options, layers)
    parameters = {name: original(parameter) for name, parameter in parameters.items()}
    wanted = not all(GENERIC in requested(empty, (name,), "generic") for name in parameters)
    if not divider.captured and wanted:
        raise UntraceableError(f"{error}\n{ALL_GENERIC}") from error
    modules = {id(captured.module): captured.module for captured in divider.captured}.values()
    with without_trace(model):
        readers = read_outside(model, args, kwargs, modules, parameters, cases)
    written = seen.written | (earlier.written if earlier is not None else frozenset())
    reads = reads and wanted and (earlier is None or earlier.reads)
    observed_reads = list(readers.observed.values())
    to_capture = [observed for observed in observed_reads if reads and written.isdisjoint(observed.read.names)]
    captured_before = earlier.captured if earlier is not None and reads else ()
    operations, reasons = captured_reads(to_capture, parameters, options, layers, captured_before)
    reasons |= left_to_python(observed for observed in observed_reads if observed not in to_capture)
    captured = (*without_unreached(divider.captured, operations, parameters), *operations)
    if options.batch_dim is None:
        refuse_other_cases(captured, type(model).__name__, error)
    program = joined_program(empty, captured)
    in_graph = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    python = dict(earlier.program.python) if earlier is not None else {}
    for name, reason in {**readers.places, **reasons}.items():
        python.setdefault(name, reason)
    for name in parameters:
        if name not in in_graph:
            python.setdefault(name, why_not_captured(name, divider))
    notes = tuple(note for _, note in divider.left)
    left = frozenset(id(module) for module, _ in divider.left)
    return Division(program.but(left=notes, python=python), captured, left, written, reads)


def refuse_other_cases(captured: Iterable[CapturedSubmodule], model: str, error: UntraceableError) -> None:
    """Raises UntraceableError if a layer in a submodule knows that its cases are not on a first dimension.

    Only the inputs that layers read decide. A mask of padding is [cases, positions] also where x is [positions, cases,
    features].

    error: why there is no single graph of the model.
    """
    for part in captured:
        program = part.capture.program
        if not program.told_cases:
            continue
        order, read = CaseOrder(program.graph), read_by_layers(program)
        for layer, size in program.told_cases:
            wanted = str(order.same.get(size, size))
            of_layers = [sizes for sizes in map(order.sizes, read) if wanted in sizes]
            inputs = of_layers or [sizes for sizes in map(order.sizes, program.inputs) if wanted in sizes]
            if inputs and not any(sizes[0] == wanted for sizes in inputs):
                raise UntraceableError(
                    f"{part.submodule.path} has a layer with another dimension of cases than the first: {layer}. Only "
                    f"one graph of the whole model can have its cases there, and {model} has none:\n"
                    f"{textwrap.indent(cause_and_answer(error), '  ')}\n"
                    "Change this, and the model is one graph. Or write batch_first=True in the layer, and give it "
                    "inputs [cases, positions, features], because a model that is divided into submodules has its "
                    "cases on the first dimension of all inputs. If the first dimension does count the cases, or to "
                    "train with a loss that is named, write kfac_fx.compile(..., batch_dim=0): Kronecker factors of "
                    "sampled targets add up all rows, wherever the cases are. Scores of examples would be those of "
                    "positions."
                )


def read_by_layers(program: Program) -> list[fx.Node]:
    """The inputs of a submodule that its first layers read: floating-point inputs, and the indices of tables.

    Other inputs meet values behind layers only, as masks do.
    """
    label, raw = labels_of(program), dict[fx.Node, set[fx.Node]]()  # what is behind no layer -> its inputs
    read: set[fx.Node] = set()
    for node in program.graph.nodes:
        operands = [operand for operand in node.all_input_nodes if label[operand].activation]
        if node.op == "placeholder":
            raw[node] = {node}
        elif any(label[operand] is Label.PURE for operand in node.all_input_nodes):
            behind = set[fx.Node]().union(*(raw.get(operand, ()) for operand in operands))
            read |= {entry for entry in behind if has_gradient(entry) or op_name(node) in LOOKUPS}
        elif node.op != "output" and all(operand in raw for operand in operands):
            raw[node] = set[fx.Node]().union(*(raw[operand] for operand in operands))
    return [node for node in program.inputs if node in read]


def cause_and_answer(error: UntraceableError) -> str:
    """Why there is no single graph, and what to write."""
    if not looks_for_causal_mask(error):
        return str(error)
    return f"{str(error).removesuffix(error.advice).rstrip()}\n{SAY_CAUSAL}"


def looks_for_causal_mask(error: UntraceableError) -> bool:
    """Whether torch's encoder or decoder gave up where it compares a mask with a causal one."""
    steps = traceback.walk_tb(error.__cause__.__traceback__) if error.__cause__ is not None else ()
    return any(frame.f_code.co_name == IS_CAUSAL for frame, _ in steps)


def joined_program(empty: Program, captured: Sequence[CapturedSubmodule]) -> Program:
    """The programs of the captures side by side, with the names of the model. empty: the program of no capture."""
    parts: list[tuple[Submodule, Program]] = []
    for n, part in enumerate(captured):
        path = f"kfac_fx_read_{n}" if part.is_read else part.submodule.path
        program = in_model(part.capture.program, path, empty.parameters, empty.aliases, part.names)
        parts.append((part.submodule, run(program, CAPTURED)))
    return join(empty, parts)


def without_unreached(
    captured: Sequence[CapturedSubmodule], reads: Sequence[CapturedSubmodule], parameters: Mapping[str, nn.Parameter]
) -> list[CapturedSubmodule]:
    """Without submodules that no forward reached, but whose parameters Python reads: a table kept as an embedding."""
    read = {id(parameters[name]) for captured in reads for name in captured.names.values()}
    return [
        part for part in captured
        if part.submodule.calls or read.isdisjoint(id(parameter) for parameter in part.module.parameters())
    ]  # fmt: skip


def why_not_captured(name: str, divider: Divider) -> str:
    """The reason for a parameter that is in no graph, and that Python was not seen to read."""
    left = {note.subject: (module, note.reason) for module, note in divider.left}
    path = name.rpartition(".")[0]
    while path and path not in left:
        path = path.rpartition(".")[0]
    if path and id(left[path][0]) in divider.watched.first:
        return f"in {path}, which is not captured: {left[path][1]}"
    return "in a module that is not captured, and not read on the examples"


@dataclass
class Divider:
    """Captures submodules from the outermost inwards.

    around: for every submodule and each of its paths, the submodules that it is in. left: those that stay Python, and
    why. entered: those whose children are captured apart.
    """

    watched: WatchedForwards
    options: Options
    layers: Mapping[str, Any]
    earlier: Division | None
    around: Mapping[int, Sequence[frozenset[int]]]
    captured: list[CapturedSubmodule] = field(default_factory=list)
    left: list[tuple[nn.Module, Note]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)

    def descend(self, path: str, module: nn.Module, inside: frozenset[int] = frozenset()) -> None:
        """inside: the submodules on the path."""
        if id(module) in self.seen or not any(p.requires_grad for p in module.parameters()):
            return
        # A module that is inside of another one, too, is in its graph, or comes again among its children.
        others = frozenset[int]().union(*self.around[id(module)]) - inside
        if others - self.entered:
            return
        self.seen.add(id(module))
        calls = self.watched.calls.get(id(module), [])
        earlier = self.captures_of(module)
        reached = any(id(inner) in self.watched.calls for inner in module.modules())
        try:
            if self.earlier is not None and id(module) in self.earlier.left:
                raise UntraceableError(self.earlier.why_left(path))
            if id(module) in self.watched.opened:
                raise UntraceableError("Python calls what is inside of it, too")
            refuse_users_hooks(module)
            refuse_attributes(path, module, self.watched.assigned)
            if calls:
                self.captured += self.of_calls(path, module, calls)
            elif earlier or not reached:
                self.captured += earlier or [self.unreached(path, module)]
            if calls or earlier or not reached:
                return
        except UntraceableError as error:
            self.left.append((module, Note(path, in_short(error, module))))
        self.entered.add(id(module))
        for name, child in module.named_children():
            self.descend(f"{path}.{name}", child, inside | {id(module)})

    def of_calls(self, path: str, module: nn.Module, calls: Sequence[Call]) -> list[CapturedSubmodule]:
        """A capture for every kind of call. Raises UntraceableError."""
        if any(call.transformed for call in calls):
            raise UntraceableError(f"it is called {IN_TRANSFORM}")
        number = len(self.watched.first.get(id(module), []))
        captures = self.captures_of(module)
        keys = [under(call, partial(call_key, call.args, call.kwargs)) for call in calls]
        shapes: dict[Any, set[Any]] = {}
        for key, call in zip(keys, calls, strict=True):
            shapes.setdefault(key, set()).add(shapes_of(call))
        for key, call in zip(keys, calls, strict=True):
            if any(captured.serves(call.args, call.kwargs, key) for captured in captures):
                continue
            several = len(shapes[key]) > 1 or any(captured.key == key for captured in captures)
            traced = under(call, partial(self.traced, path, module, call, several))
            if self.watched.written:
                refuse_writes(path, module, call)
            refuse_no_inputs(traced)
            if of_parameters_alone(traced.program):
                raise UntraceableError("all that it returns is computed from parameters, which Python is followed with")
            if not self.options.loss_given and any(op_name(node) in EVERY_NAME for node in traced.program.graph.nodes):
                raise UntraceableError("it computes a loss, whose distribution is looked for between its children")
            settings = traced.settings(module, inside=True)
            captures.append(CapturedSubmodule(Submodule(path, number), module, traced, key, call.autocast, settings))
        return captures

    def unreached(self, path: str, module: nn.Module) -> CapturedSubmodule:
        """A capture without inputs. Raises UntraceableError."""
        traced = self.traced(path, module, None)
        settings = traced.settings(module, inside=True)
        return CapturedSubmodule(Submodule(path, 0), module, traced, None, settings=settings)

    def traced(self, path: str, module: nn.Module, call: Call | None, every_size: bool = True) -> Capture:
        args, kwargs = (None, None) if call is None else (call.args, call.kwargs)
        with without_users_hooks(module):
            traced = trace_model(
                module, args, kwargs, options=self.options, layers=self.layers, every_size=every_size, whole=False
            )
        refuse_attributes(path, module, {f"{path}.{name}" for name in traced.assigned})
        return traced

    def captures_of(self, module: nn.Module) -> list[CapturedSubmodule]:
        """Those from earlier inputs."""
        earlier = () if self.earlier is None else self.earlier.captured
        return [captured for captured in earlier if captured.module is module]


def refuse_attributes(path: str, module: nn.Module, assigned: Collection[str]) -> None:
    """Raises UntraceableError if the module sets attributes, which Python between the submodules may read."""
    inside = [name.removeprefix(f"{path}.") for name in sorted(assigned) if name.startswith(f"{path}.")]
    owners = [(name, *name.rpartition(".")) for name in inside]
    state = [
        f"{path}.{name}" for name, owner, _, attribute in owners
        if not computed_weight(module.get_submodule(owner), attribute)
    ]  # fmt: skip
    if state:
        raise UntraceableError(f"it sets {', '.join(state)}, which Python may read")


def refuse_no_inputs(traced: Capture) -> None:
    """Raises UntraceableError for a graph without inputs."""
    if not traced.program.inputs:
        raise UntraceableError(
            "it takes no tensors, so nothing counts cases: pass what it draws or holds, such as points, as arguments"
        )


def refuse_writes(path: str, module: nn.Module, call: Call) -> None:
    """Raises UntraceableError if the module writes into its parameters, because a graph would repeat that."""
    with without_trace(module) as trace:
        under(call, lambda: module(*map_tensors(Tensor.clone, call.args), **map_tensors(Tensor.clone, call.kwargs)))
    if trace.written:
        raise UntraceableError(f"it writes into parameters: {', '.join(f'{path}.{name}' for name in trace.written)}")


def shapes_of(call: Call) -> Any:
    return tuple(leaf.shape for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor))


def in_short(error: UntraceableError, module: nn.Module) -> str:
    """One sentence of an error about `module`, which the note names, so that it is "it" in the sentence."""
    if error.cause:
        return error.cause
    first, name = str(error).splitlines()[0], f"{type(module).__name__} "
    return f"it {first.removeprefix(name)}" if first.startswith(name) else first


# --- submodules and reads, each captured for one kind of call ---------------------------------------------------------


@dataclass(frozen=True)
class CapturedSubmodule:
    """A submodule and its capture for one kind of call.

    Attributes:
        module: the submodule; an `Operation` if it is a read.
        key: of the calls that it serves; None: of all.
        autocast: (device type, dtype) pairs of the call.
        settings: what the capture is specialized to beside its inputs; None: nothing.
    """

    submodule: Submodule
    module: nn.Module
    capture: Capture
    key: Any
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    settings: ForwardSettings | None = None

    @property
    def effects(self) -> tuple[str, ...]:
        """The effects of its forward that the graph does not have, except for attributes that its own hooks set."""
        sets = {f"sets {name}" for name in self.capture.assigned}
        return tuple(f"{effect}, in {self.submodule.path}" for effect in self.capture.effects if effect not in sets)

    @property
    def names(self) -> Mapping[str, str]:
        """The parameters of an operation: their names in it, and in the model."""
        return dict(self.module.canonical) if isinstance(self.module, Operation) else {}

    @property
    def is_read(self) -> bool:
        return isinstance(self.module, Operation)

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> bool:
        if (self.key is not None and self.key != key) or not self.capture.holds(args, kwargs):
            return False
        return self.settings is None or self.settings.hold()


def key_of_read(key: Any, inputs: tuple[Any, ...]) -> Any:
    return key, call_key(inputs, {})


def under(call: Call, function: Callable[[], Any]) -> Any:
    """`function()` under the autocast of a call."""
    with ExitStack() as stack:
        for kind in kinds():
            dtype = dict(call.autocast).get(kind)
            if dtype is not None or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        return function()


def captured_reads(
    reads: Sequence[ObservedRead],
    parameters: Mapping[str, nn.Parameter],
    options: Options,
    layers: Mapping[str, Any],
    earlier: Iterable[CapturedSubmodule],
) -> tuple[list[CapturedSubmodule], dict[str, str]]:
    """Captures of reads, those from `earlier` inputs included; and of each parameter whose reads cannot be captured,
    the reason."""
    captured, reasons = [captured for captured in earlier if captured.is_read], dict[str, str]()
    calls: Counter[Any] = Counter()
    for observed in reads:
        calls[observed.read.key] += observed.calls
    for observed in reads:
        module, inputs = Operation(observed.read, parameters), observed.call.args
        key = under(observed.call, partial(key_of_read, observed.read.key, inputs))
        if any(other.serves(inputs, {}, key) for other in captured):
            continue
        try:
            trace = partial(trace_model, module, inputs, {}, options=options, layers=layers, whole=False)
            traced = under(observed.call, trace)
        except UntraceableError:
            reasons = {**left_to_python([observed]), **reasons}
            continue
        submodule = Submodule(f"{observed.read} ({observed.where})", calls[observed.read.key], read=True)
        captured.append(CapturedSubmodule(submodule, module, traced, key, observed.call.autocast))
    return captured, reasons


def left_to_python(reads: Iterable[ObservedRead]) -> dict[str, str]:
    """The place of the first read that is not captured, for each parameter."""
    places = [
        (name, f"read at {observed.where}, in Python that is not captured")
        for observed in reads
        for name in observed.read.names
    ]
    return dict(reversed(places))


# --- reads: operations of Python on parameters ------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterRef:
    """A parameter."""

    name: str


@dataclass(frozen=True)
class InputRef:
    """An input of a read."""

    number: int


@dataclass(frozen=True)
class InputSize:
    """The first size of an input that exists for this size only, so that one capture serves all sizes."""

    number: int


@dataclass(frozen=True, eq=False)
class Followed:
    """A tensor that was computed from parameters alone, by `function(*args, **kwargs)`.

    Attributes:
        under: the autocast of the operation.
        place: of the tensor among the results.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    under: Any
    place: int = 0


@dataclass(frozen=True, eq=False)
class Read:
    """An operation that reads parameters.

    Attributes:
        args, kwargs: with references instead of tensors.
        names: of the parameters.
        inputs: the other tensors.
        written: the tensor that the operation writes into.
        key: equal for two reads that one capture may serve.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    written: Tensor | None
    key: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{name_of(self.function)} of {', '.join(self.names)}"


def swapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of every leaf in lists, tuples, dictionaries and slices."""
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(swapped(function, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: swapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, slice):
        return slice(*(swapped(function, bound) for bound in (tree.start, tree.stop, tree.step)))
    return function(tree)


def can_be_kept(leaf: Any) -> bool:
    """Whether a capture may hold an argument: a plain value, unlike an array or a generator."""
    return isinstance(leaf, (Tensor, torch.layout, torch.memory_format, type(...), *PLAIN))


def leaves_of(tree: Any) -> list[Any]:
    """The leaves that `swapped` finds."""
    leaves: list[Any] = []
    swapped(leaves.append, tree)
    return leaves


def frozen(tree: Any) -> Any:
    """Hashable, and equal for equal operations."""
    if isinstance(tree, (list, tuple)):
        return isinstance(tree, list), tuple(map(frozen, tree))
    if isinstance(tree, dict):
        return dict, tuple((key, frozen(branch)) for key, branch in sorted(tree.items()))
    if isinstance(tree, slice):
        return slice, frozen((tree.start, tree.stop, tree.step))
    if isinstance(tree, Followed):
        return tree.function, frozen(tree.args), frozen(tree.kwargs), tree.place
    return tree if isinstance(tree, (ParameterRef, InputRef, InputSize)) else plain(tree)


class Operation(nn.Module):
    """A read as a module: a function of its inputs, with parameters `p0`, `p1`, ... in the order of its names."""

    def __init__(self, read: Read, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.read_key, self.canonical = read.key, {f"p{n}": name for n, name in enumerate(read.names)}
        self.function, self.arguments, self.named_arguments = read.function, read.args, read.kwargs
        self.writes = read.written is not None
        for attribute, name in self.canonical.items():
            self.register_parameter(attribute, parameters[name])

    def forward(self, *inputs: Tensor) -> Any:
        parameters = {name: getattr(self, attribute) for attribute, name in self.canonical.items()}
        computed: dict[int, Any] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ParameterRef):
                return parameters[leaf.name]
            if isinstance(leaf, InputRef):
                return inputs[leaf.number]
            if isinstance(leaf, InputSize):
                return inputs[leaf.number].shape[0]
            if not isinstance(leaf, Followed):
                return leaf
            if id(leaf) not in computed:
                result = leaf.function(*swapped(value, leaf.args), **swapped(value, leaf.kwargs))
                computed[id(leaf)] = pytree.tree_leaves(result)[leaf.place]
            return computed[id(leaf)]

        args = swapped(value, self.arguments)
        if not self.writes:
            return self.function(*args, **swapped(value, self.named_arguments))
        target, *rest = args
        if self.function is Tensor.__setitem__ and through_mask(target, *rest):
            mask, source = rest
            return torch.index_put(target, (mask,), source.to(target.dtype))
        target = target.clone()
        self.function(target, *rest, **swapped(value, self.named_arguments))
        return target


def through_mask(target: Tensor, index: Any, value: Any) -> bool:
    """Whether `target[index] = value` writes a tensor through a boolean mask."""
    mask = isinstance(index, Tensor) and index.dtype == torch.bool
    return mask and isinstance(value, Tensor) and value.dim() <= target.dim() - index.dim()


def names_of(template: Any) -> Iterator[str]:
    """The parameters in a tree of references."""
    for leaf in leaves_of(template):
        if isinstance(leaf, ParameterRef):
            yield leaf.name
        elif isinstance(leaf, Followed):
            yield from names_of((leaf.args, leaf.kwargs))


def autocasts_of(template: Any) -> Iterator[Any]:
    """The autocast of all operations in a tree of references."""
    for leaf in leaves_of(template):
        if isinstance(leaf, Followed):
            yield leaf.under
            yield from autocasts_of((leaf.args, leaf.kwargs))


# --- following parameters through Python ------------------------------------------------------------------------------

EXPANSIONS = {"expand", "repeat", "broadcast_to"}  # whose first size may be the number of cases
SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub"}  # with a table that is cut to the length of the batch
LIKE = {"view_as", "expand_as", "reshape_as"}  # read only the sizes of the second
CASTS_LIKE = {"type_as", "to"}  # read only the device and the dtype of the second
NOT_CAPTURED = "in Python that is not captured"


class Reads(TorchFunctionMode):
    """Follows parameters through a forward and passes every read to `met`.

    Functions of the model under torch.compile run in eager mode: torch.compile would compile this class, too.

    parameters: by name. cases: of the batch; None: no expansion is taken for one to the cases.
    """

    def __init__(self, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__()
        self.values: dict[int, tuple[Tensor, ParameterRef | Followed]] = {
            id(value): (value, ParameterRef(name)) for name, value in parameters.items()
        }
        self.cases: int | None = cases
        self.paused: int | bool = False
        self.around = transforms()
        self.eager = ExitStack()

    def __enter__(self) -> Self:
        self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.eager.close()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        """Called with every read, instead of the operation."""
        return operation()

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """Called with the parameters that are read in a way that cannot be captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if name_of(func) in CASTS_LIKE and len(args) > 1 and isinstance(args[1], Tensor):
            func, args = Tensor.to, (args[0], args[1].device, args[1].dtype, *args[2:])
        leaves = leaves_of((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in tensors if id(tensor) in self.values]
        if not followed or name_of(func) in NO_GRADIENT or (name_of(func) in LIKE and followed[0] is not tensors[0]):
            return func(*args, **kwargs)
        writes = written_by(func, args, kwargs)
        recomputed = [self.values[id(tensor)][1] for tensor in followed]  # by a capture of the operation
        lost = kwargs.get("out") is not None or any(id(tensor) in self.values for tensor in writes)
        inside = transforms() > self.around
        lost |= not all(map(can_be_kept, leaves)) or any(under != autocast() for under in autocasts_of(recomputed))
        if lost or inside or (len(followed) == len(tensors) and draws(name_of(func))):
            self.lost(names_of(recomputed), IN_TRANSFORM if inside else NOT_CAPTURED)
            for tensor in writes:
                self.values.pop(id(tensor), None)
            return func(*args, **kwargs)
        if len(followed) < len(tensors):
            return self.met(self.read(func, args, kwargs, tensors, writes), lambda: func(*args, **kwargs))
        if (to_cases := self.expansion(func, args, kwargs)) is not None:
            return self.met(to_cases, lambda: func(*args, **kwargs))
        return self.follow(func, args, kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on parameters alone, and follow its results."""
        result = func(*args, **kwargs)
        for place, tensor in enumerate(pytree.tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in self.values:
                operands = self.template(args, ()), self.template(kwargs, ())
                self.values[id(tensor)] = tensor, Followed(func, *operands, autocast(), place)
        return result

    def template(self, tree: Any, inputs: Sequence[Tensor]) -> Any:
        """A tree with references instead of tensors."""
        places = {id(tensor): n for n, tensor in enumerate(inputs)}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return InputRef(places[id(value)]) if id(value) in places else self.values[id(value)][1]

        return swapped(leaf, tree)

    def read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], writes: Sequence[Tensor]) -> Read:
        inputs = tuple({id(tensor): tensor for tensor in tensors if id(tensor) not in self.values}.values())
        templates = self.template(args, inputs), self.template(kwargs, inputs)
        if name_of(func).strip("_") in SUMS:
            sizes: list[int] = []
            templates = with_free_lengths(templates[0], sizes, len(inputs)), templates[1]
            inputs = (*inputs, *(torch.empty(size, device=inputs[0].device) for size in sizes))
        return read_of(func, *templates, inputs, writes[0] if writes else None)

    def expansion(self, func: Any, args: Any, kwargs: Any) -> Read | None:
        """`token.expand(n, -1, -1)` to n cases, as a read; its capture has one more input, whose size is n."""
        if name_of(func) not in EXPANSIONS or kwargs or self.cases is None or len(args) < 2:
            return None
        tensor, sizes = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        if not sizes or sizes[0] != self.cases or (tensor.dim() == len(sizes) and tensor.shape[0] != 1):
            return None
        template = self.template(tensor, ()), (InputSize(0), *sizes[1:])
        return read_of(func, template, {}, (torch.empty(self.cases, device=tensor.device),), None)

    def names_in(self, tree: Any) -> list[str]:
        """The parameters that tensors in a tree were computed from."""
        followed = [self.values[id(leaf)][1] for leaf in pytree.tree_leaves(tree) if id(leaf) in self.values]
        return list(dict.fromkeys(names_of(followed)))


def read_of(func: Any, args: Any, kwargs: Any, inputs: tuple[Tensor, ...], written: Tensor | None) -> Read:
    names = tuple(dict.fromkeys(names_of((args, kwargs))))
    return Read(func, args, kwargs, names, inputs, written, (func, frozen(args), frozen(kwargs)))


def with_free_lengths(tree: Any, sizes: list[int], before: int) -> Any:
    """`table[:7]` as `table[:size]`, of any length; `sizes` receives the 7. before: the number of other inputs."""

    def length(bound: Any) -> Any:
        if not isinstance(bound, int) or bound < 2:
            return bound
        sizes.append(bound)
        return InputSize(before + len(sizes) - 1)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Followed):
            return value
        args = with_free_lengths(value.args, sizes, before)
        if value.function is Tensor.__getitem__:
            table, index = args
            several = isinstance(index, tuple)
            index = tuple(
                slice(length(entry.start), length(entry.stop), entry.step) if isinstance(entry, slice) else entry
                for entry in (index if several else (index,))
            )
            args = table, index if several else index[0]
        return replace(value, args=args, kwargs=with_free_lengths(value.kwargs, sizes, before))

    return swapped(leaf, tree)


def differentiable(read: Read, result: Any) -> bool:
    """Whether a gradient of the result would reach the parameters."""
    tensors = pytree.tree_leaves(result if read.written is None else read.written)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


# --- the reads outside of submodules ----------------------------------------------------------------------------------


@dataclass
class ObservedRead:
    """A read on the examples.

    Attributes:
        call: its inputs, detached.
        where: "model.py:12".
        calls: the number of times.
    """

    read: Read
    call: Call
    where: str
    calls: int = 0


class Readers(Reads):
    """Collects the reads outside of given modules.

    Attributes:
        observed: the reads, by their key and the shapes of their inputs.
        places: by parameter that is read in a way that cannot be captured, "read at model.py:12, ...".
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__(parameters, cases)
        self.lent, self.places, self.observed = Lent(model), dict[str, str](), dict[Any, ObservedRead]()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        inputs = tuple(x.detach().clone() if x is read.written else x.detach() for x in read.inputs)
        result = operation()
        if differentiable(read, result):
            kind = read.key, tuple((tensor.shape, tensor.dtype) for tensor in inputs)
            observed = ObservedRead(read, Call(inputs, {}, autocast()), running_line())
            self.observed.setdefault(kind, observed).calls += 1
        return result

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        self.note(names, f"read at {running_line()}, {why}")

    def note(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.places.setdefault(name, reason)

    @contextmanager
    def outside_of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within the modules nothing is collected. Their arguments count as read outside of them, and so do reads by a
        module that runs on other parameters than the model's."""
        inside: list[bool] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.paused and torch.is_grad_enabled():
                self.lost(self.names_in((args, kwargs)))
            inside.append(not self.lent.others(module))
            self.paused += inside[-1]

        def leave(*rest: Any) -> None:
            self.paused -= inside.pop()

        # A user's hooks are Python outside of a module, torch's own are inside.
        with around_calls(modules, enter, leave, hooked_by_user), functions_applied(self.applied):
            yield

    def applied(self, apply: Apply, _: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Notes the arguments of a user's autograd.Function, which no TorchFunctionMode sees."""
        if not self.paused and torch.is_grad_enabled():
            self.lost(self.names_in((args, kwargs)))
        return apply(*args, **kwargs)


def read_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Iterable[nn.Module],
    parameters: Mapping[str, Tensor],
    cases: int | None,
) -> Readers:
    """Run one forward, and collect the reads outside of `modules`."""
    readers = Readers(model, parameters, cases)
    with readers.outside_of(modules), readers, plain_functions():
        output = model(*map_tensors(Tensor.clone, args), **map_tensors(Tensor.clone, dict(kwargs)))
    readers.note(readers.names_in(output), "returned by the model, as no layer's output")
    return readers
