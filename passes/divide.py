"""A model that no single graph holds, divided into the largest submodules that can be captured.

The model runs on the example inputs and is watched; it runs again with other random numbers as long as these reach more
submodules. From the outermost module inwards, a submodule is captured for every kind of call that was seen. If that
fails, it stays Python and its children are tried. A submodule that was never reached is captured without inputs, by
torch.fx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from .choose import requested
from .errors import UntraceableError
from .following import ObservedRead, Operation, read_outside
from .graphs.labels import symbolic_sizes
from .graphs.operations import op_name
from .ir import GENERIC, Note, Options, Program, Submodule
from .pipeline import CAPTURED, run
from .submodules import in_model, join, of_parameters_alone
from .torch_losses import EVERY_NAME
from .torch_private import pytree
from .trace import Capture, named_parameters, trace_model
from .tracing.calls import (
    IN_TRANSFORM,
    Call,
    WatchedForwards,
    map_tensors,
    refuse_users_hooks,
    watched,
    without_trace,
    without_users_hooks,
)
from .tracing.settings import ForwardSettings, computed_weight
from .tracing.signature import call_key, kinds

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
            traced = under(observed.call, partial(trace_model, module, inputs, {}, options=options, layers=layers))
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


# --- the division -----------------------------------------------------------------------------------------------------


ALL_GENERIC = (
    "If you cannot change this code, make all parameters generic, with diagonal blocks; then nothing needs to be "
    'captured: compile(..., approximations={"*": "generic"}).'
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
    seen = watched(model, args, kwargs)
    divider = Divider(seen, options, layers, earlier)
    divider.left.append((model, Note(type(model).__name__, in_short(error, model))))
    for name, child in model.named_children():
        divider.descend(name, child)
    parameters, aliases = named_parameters(model)
    empty = Program(fx.Graph(), nn.Module(), parameters, aliases, options, layers)
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


def refuse_other_cases(program: Program, path: str) -> None:
    """Raises UntraceableError if a layer in a submodule knows that its cases are not on a first dimension."""
    inputs = [symbolic_sizes(node) for node in program.inputs]
    for layer, size in program.told_cases:
        if any(size in sizes for sizes in inputs) and not any(sizes[:1] == [size] for sizes in inputs):
            raise UntraceableError(
                f"{path} has a layer with another dimension of cases than the first: {layer}. A model that is divided "
                "into submodules has its cases on the first dimension of all inputs.\n"
                "Write batch_first=True in the layer, and give it inputs [cases, positions, features]."
            )


def joined_program(empty: Program, captured: Sequence[CapturedSubmodule]) -> Program:
    """The programs of the captures side by side, with the names of the model. empty: the program of no capture."""
    parts: list[tuple[Submodule, Program]] = []
    for n, part in enumerate(captured):
        path = f"kfac_fx_read_{n}" if part.is_read else part.submodule.path
        refuse_other_cases(part.capture.program, path)
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
    """Captures submodules from the outermost inwards. left: those that stay Python, and why."""

    watched: WatchedForwards
    options: Options
    layers: Mapping[str, Any]
    earlier: Division | None
    captured: list[CapturedSubmodule] = field(default_factory=list)
    left: list[tuple[nn.Module, Note]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def descend(self, path: str, module: nn.Module) -> None:
        if id(module) in self.seen or not any(p.requires_grad for p in module.parameters()):
            return
        self.seen.add(id(module))
        calls = self.watched.calls.get(id(module), [])
        earlier = self.captures_of(module)
        reached = any(id(inner) in self.watched.calls for inner in module.modules())
        try:
            if self.earlier is not None and id(module) in self.earlier.left:
                raise UntraceableError("it was left as Python on earlier inputs")
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
        for name, child in module.named_children():
            self.descend(f"{path}.{name}", child)

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
            if not traced.program.inputs:
                raise UntraceableError("it takes no tensors")
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
        inputs = (None, None) if call is None else (call.args, call.kwargs)
        with without_users_hooks(module):
            traced = trace_model(module, *inputs, options=self.options, layers=self.layers, every_size=every_size)
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
