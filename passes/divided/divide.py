"""A model that no single graph can hold, divided into the largest submodules that graphs can hold.

The model runs on the example inputs, watched, and again with other random numbers as long as that reaches more of it.
From the outermost module inwards, a submodule is captured if it can be, for every kind of call that was seen, or else
left as Python and its children are tried. One that was never reached is captured without inputs, by torch.fx.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..claiming.approximation import requested
from ..errors import UntraceableError
from ..graphs import pytree
from ..graphs.operations import op_name
from ..ir import GENERIC, Note, Options, Program, Submodule
from ..losses import KINDS
from ..normalize import normalize
from ..pipeline import run
from ..submodules import in_model, join, of_parameters_alone
from ..trace import Capture, capture, named_parameters
from ..tracing.attributes import computed_weight
from ..tracing.calls import (
    IN_TRANSFORM,
    Call,
    Watched,
    mapped,
    refuse_users_hooks,
    watched,
    without_trace,
    without_users_hooks,
)
from ..unroll import unroll
from .captured import Captured, captured_reads, key_of, left_to_python, under
from .following import read_outside

LAST = (
    "If that is the code of others: with all parameters generic, in diagonal blocks, nothing needs to be captured; "
    'compile(..., approximations={"*": "generic"}).'
)
LOSSES = {"cross_entropy_loss", *KINDS}


@dataclass(frozen=True)
class Division:
    """program: joined, before any pass looked for layers. left: modules (their ids) that stay Python. written: the
    parameters that this Python writes into. reads: whether its operations on parameters are captured."""

    program: Program
    captured: tuple[Captured, ...]
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
    known: Division | None = None,
    cases: int | None = None,
    reads: bool = True,
) -> Division:
    """Raises UntraceableError if there is nothing to capture, and the user did not ask for generic parameters only:
    `error`, which says why the whole was not captured.

    known: of earlier inputs; what was captured then stays, and so does what was left as Python. cases: how many the
    inputs have. reads: whether to capture operations of Python on parameters, too.
    """
    seen = watched(model, args, kwargs)
    divider = Divider(seen, options, layers, known)
    divider.left.append((model, Note(type(model).__name__, in_short(error, model))))
    for name, child in model.named_children():
        divider.descend(name, child)
    parameters, aliases = named_parameters(model)
    nothing = Program(fx.Graph(), nn.Module(), parameters, aliases, options, layers)
    wanted = not all(GENERIC in requested(nothing, (name,), "generic") for name in parameters)
    if not divider.captured and wanted:
        raise UntraceableError(f"{error}\n{LAST}") from error
    modules = {id(one.module): one.module for one in divider.captured}.values()
    with without_trace(model):
        read = read_outside(model, args, kwargs, modules, parameters, cases)
    written = seen.written | (known.written if known is not None else frozenset())
    reads = reads and wanted and (known is None or known.reads)
    earlier = known.captured if known is not None and reads else ()
    found = [one for one in read.found.values() if reads and written.isdisjoint(one.read.names)]
    taken, refused = captured_reads(found, parameters, options, layers, earlier)
    refused |= left_to_python(one for one in read.found.values() if one not in found)
    captured = (*without_unreached(divider.captured, taken, parameters), *taken)
    program = joined(nothing, captured)
    inside = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    python = dict(known.program.python) if known is not None else {}
    for name, said in {**read.places, **refused}.items():
        python.setdefault(name, said)
    for name in parameters:
        if name not in inside:
            python.setdefault(name, why_not(name, divider))
    notes = tuple(note for _, note in divider.left)
    left = frozenset(id(module) for module, _ in divider.left)
    return Division(program.but(left=notes, python=python), captured, left, written, reads)


def joined(nothing: Program, captured: Sequence[Captured]) -> Program:
    """Their programs side by side, under the names of the model; `nothing` is that of none."""
    parts: list[tuple[Submodule, Program]] = []
    for n, one in enumerate(captured):
        path = f"kfac_fx_read_{n}" if one.is_read else one.submodule.path
        own = in_model(one.capture.program, path, nothing.parameters, nothing.aliases, one.names)
        parts.append((one.submodule, run(own, (unroll, normalize))))
    return join(nothing, parts)


def without_unreached(
    captured: Sequence[Captured], reads: Sequence[Captured], parameters: Mapping[str, nn.Parameter]
) -> list[Captured]:
    """Without modules that no forward reached, but whose parameters Python reads: a table kept as an embedding."""
    read = {id(parameters[name]) for one in reads for name in one.names.values()}
    return [
        one for one in captured
        if one.submodule.calls or read.isdisjoint(id(parameter) for parameter in one.module.parameters())
    ]  # fmt: skip


def why_not(name: str, divider: Divider) -> str:
    """Of a parameter that is in no graph, and that no Python was seen to read."""
    left = {note.subject: (module, note.reason) for module, note in divider.left}
    path = name.rpartition(".")[0]
    while path and path not in left:
        path = path.rpartition(".")[0]
    if path and id(left[path][0]) in divider.watched.first:
        return f"in {path}, which is not captured: {left[path][1]}"
    return "in a module that is not captured, and not read on the examples"


@dataclass
class Divider:
    """From the outermost modules inwards. left: those that stay Python, and why."""

    watched: Watched
    options: Options
    layers: Mapping[str, Any]
    known: Division | None
    captured: list[Captured] = field(default_factory=list)
    left: list[tuple[nn.Module, Note]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def descend(self, path: str, module: nn.Module) -> None:
        if id(module) in self.seen or not any(p.requires_grad for p in module.parameters()):
            return
        self.seen.add(id(module))
        calls = self.watched.calls.get(id(module), [])
        known = self.earlier(module)
        reached = any(id(one) in self.watched.calls for one in module.modules())
        try:
            if self.known is not None and id(module) in self.known.left:
                raise UntraceableError("it was left as Python on earlier inputs")
            if id(module) in self.watched.opened:
                raise UntraceableError("Python calls what is inside of it, too")
            refuse_users_hooks(module)
            refuse_state(path, module, self.watched.assigned)
            if calls or known or not reached:
                self.captured += self.of_calls(path, module, calls) if calls else known or self.no_calls(path, module)
                return
        except UntraceableError as error:
            self.left.append((module, Note(path, in_short(error, module))))
        for name, child in module.named_children():
            self.descend(f"{path}.{name}", child)

    def of_calls(self, path: str, module: nn.Module, calls: Sequence[Call]) -> list[Captured]:
        """A capture for every kind of call. Raises UntraceableError."""
        if any(call.transformed for call in calls):
            raise UntraceableError(f"it is called {IN_TRANSFORM}")
        number = len(self.watched.first.get(id(module), []))
        mine = self.earlier(module)
        shapes: dict[Any, set[Any]] = {}
        for call in calls:
            shapes.setdefault(self.key(module, call), set()).add(sizes(call))
        for call in calls:
            key = self.key(module, call)
            if any(one.serves(call.args, call.kwargs, key) for one in mine):
                continue
            several = len(shapes[key]) > 1 or any(one.key == key for one in mine)
            traced = under(call, lambda call=call, several=several: self.traced(path, module, call, several))  # type: ignore[misc]
            if self.watched.written:
                refuse_writes(path, module, call)
            if not any(node.op == "placeholder" for node in traced.program.graph.nodes):
                raise UntraceableError("it takes no tensors")
            if of_parameters_alone(traced.program):
                raise UntraceableError("all that it returns is computed from parameters, which Python is followed with")
            if not self.options.loss_given and any(op_name(node) in LOSSES for node in traced.program.graph.nodes):
                raise UntraceableError("it computes a loss, whose distribution is looked for between its children")
            mine.append(Captured(Submodule(path, number), module, traced, key, call.autocast))
        return mine

    def traced(self, path: str, module: nn.Module, call: Call, every_size: bool) -> Capture:
        args, kwargs = call.args, call.kwargs
        with without_users_hooks(module):
            traced = capture(module, args, kwargs, options=self.options, layers=self.layers, every_size=every_size)
        refuse_state(path, module, {f"{path}.{name}" for name in traced.assigned})
        return traced

    def key(self, module: nn.Module, call: Call) -> Any:
        return under(call, lambda: key_of(module, call.args, call.kwargs))

    def no_calls(self, path: str, module: nn.Module) -> list[Captured]:
        """Without inputs. Raises UntraceableError."""
        with without_users_hooks(module):
            traced = capture(module, options=self.options, layers=self.layers)
        refuse_state(path, module, {f"{path}.{name}" for name in traced.assigned})
        return [Captured(Submodule(path, 0), module, traced, None)]

    def earlier(self, module: nn.Module) -> list[Captured]:
        return [one for one in self.known.captured if one.module is module] if self.known is not None else []


def refuse_state(path: str, module: nn.Module, assigned: Collection[str]) -> None:
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
    """Raises UntraceableError if the module writes into its parameters, which a graph would do on top of it."""
    with without_trace(module) as trace:
        under(call, lambda: module(*mapped(Tensor.clone, call.args), **mapped(Tensor.clone, call.kwargs)))
    if trace.written:
        raise UntraceableError(f"it writes into parameters: {', '.join(f'{path}.{name}' for name in trace.written)}")


def sizes(call: Call) -> Any:
    return tuple(leaf.shape for leaf in pytree.leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor))


def in_short(error: UntraceableError, module: nn.Module) -> str:
    """One sentence of an error that `passes.tracing.watch.untraceable` made, or the first line of another, of which the
    module, that the note names, is "it"."""
    first, *rest = str(error).splitlines()
    _, gave_up, place = first.partition("; torch gave up in ")
    if gave_up and rest:
        return f"torch gave up in {place.rstrip(':')}: {rest[0].strip()}"
    name, said = f"{type(module).__name__} ", first
    return f"it {said.removeprefix(name)}" if said.startswith(name) else said
