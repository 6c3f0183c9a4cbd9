"""The content of the report: a row for every registration, in numbers and in words; sentences for fallbacks; a graph.

The graph, of networkx, leads from parameters, or pieces of them, to uses and on to Fisher blocks:

    "stem.weight" --parameter--> "use conv2d" --block--> ("stem.weight", "stem.bias")

Uses are also connected along the data of the model. Operations between uses are nodes only if data of different origin
meets there, or if they read a parameter with a generic block, which has no uses; they lead to this block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from kfac_fx.passes.graphs.labels import labels_of, parameters_behind, use_edges
from kfac_fx.passes.graphs.operations import CASTS, VIEWS, op_name
from kfac_fx.passes.ir import Program, Registration, source_line, where
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.recording.capturing import CompileArguments
from kfac_fx.recording.case_recorder import CaseRecorder
from kfac_fx.recording.recorder import Recorder

if TYPE_CHECKING:
    import networkx

Shapes = dict[str, tuple[int, ...]]
CASTS_TO = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}  # by name, without an argument


@dataclass(frozen=True)
class ReportRow:
    """One registration.

    Attributes:
        uses: the number of uses; of generic parameters, the number of places where they meet the data.
        block: the approximation in words, such as "kronecker, independent".
        approximation: its name.
        factors: the shape of each factor: A [g, i, i] or [g, i], G [g, o, o] or [g, o], F [p, p] or [p]; a diagonal
            side has no last dimension.
        elements: the number of elements of the parameters.
        bytes: the memory of the factors.
        groups: g.
    """

    layer: str
    parameters: tuple[str, ...]
    uses: int
    block: str
    approximation: str
    factors: Shapes
    reason: str | None
    generic: bool
    elements: int
    bytes: int
    groups: int

    @property
    def names(self) -> str:
        """The names of the parameters, folded: `"stem.{weight, bias}"`."""
        return fold(self.parameters)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table: layer, names, uses, block and factors."""
        return self.layer, self.names, f"{self.uses:,}", self.block, self.factors_text

    @property
    def factors_text(self) -> str:
        """`"A 28 x 28, G 16 x 16"`, `"16 of (A 10 x 10, G 1 x 1)"`, `"A diag 50, G 8 x 8"`, `"F diag 320"`."""
        if "F" in self.factors:
            return factor_text("F", self.factors["F"])
        text = ", ".join(factor_text(name, shape[1:], shape[0] // self.groups) for name, shape in self.factors.items())
        return text if self.groups == 1 else f"{self.groups:,} of ({text})"

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data: layer, parameters, uses, block, approximation, shapes of the factors, reason."""
        return {
            "layer": self.layer,
            "parameters": list(self.parameters),
            "uses": self.uses,
            "block": self.block,
            "approximation": self.approximation,
            "factors": {name: list(shape) for name, shape in self.factors.items()},
            "reason": self.reason,
        }


def rows(program: Program) -> tuple[ReportRow, ...]:
    places = generic_places(program) if any(r.generic for r in program.registrations) else Counter()
    return tuple(row_of(registration, program, places) for registration in program.registrations)


def row_of(registration: Registration, program: Program, places: Counter[str]) -> ReportRow:
    shapes = registration.factor_shapes(elements_of(registration, program))
    dtype = factor_dtype(registration, program)
    return ReportRow(
        layer=registration.layer,
        parameters=registration.parameters,
        uses=uses_of(registration, places),
        block=block_words(registration, program),
        approximation=registration.approximation,
        factors=shapes,
        reason=registration.reason,
        generic=registration.generic,
        elements=elements_of(registration, program),
        bytes=sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize,
        groups=1 if registration.matrix is None else registration.matrix.shape[0],
    )


def uses_of(registration: Registration, places: Counter[str]) -> int:
    """The number of uses in the graph; in submodules that were captured one by one, those of the first batch."""
    if registration.generic:
        return max(places[name] for name in registration.parameters)
    return sum(use.calls or 0 for use in registration.uses) if registration.called else len(registration.uses)


def elements_of(registration: Registration, program: Program) -> int:
    return sum(math.prod(program.shapes[name]) for name in registration.parameters)


def generic_places(program: Program) -> Counter[str]:
    """The number of places where each parameter meets the data; generic registrations list no uses."""
    label = labels_of(program)
    outputs = program.outputs or tuple(node for node in program.graph.nodes if node.op == "output")
    edges = use_edges(program.graph, label, outputs)
    return Counter(name for source, _ in edges for name in parameters_behind(source, label, program.behind))


def factor_dtype(registration: Registration, program: Program) -> torch.dtype:
    """The precision of the factors: that of the parameters, but at least float32."""
    dtype = torch.float32
    for name in registration.owners:
        dtype = torch.promote_types(dtype, program.parameters[name].dtype)
    return dtype


def block_words(registration: Registration, program: Program) -> str:
    """See `ReportRow.block`: `"kronecker"`, `"kronecker per channel"`, `"diagonal"`, `"full (linked)"`, ..."""
    approximation, words = registration.structure, registration.approximation
    if registration.matrix is not None and approximation.kronecker:
        groups, outputs, _ = registration.matrix.shape
        words = "kronecker"
        if groups > 1:
            words += " per channel" if outputs == 1 else " per group"
        if uses_of(registration, Counter()) > 1 and not approximation.series:
            words += ", independent"
        if approximation.words:
            words += f", {approximation.words}"
    elif registration.generic:
        words = f"generic {words}"
    if registration.patch_mask is not None:
        words += ", masked patches"
    return f"{words} (linked)" if frozenset(registration.owners) in program.options.linked else words


def casts(program: Program) -> list[str]:
    """Where forward casts parameters to a coarser precision: one line a cast.

    The uses behind it, and their part of the gradient, have that precision; sums of uses agree up to its rounding.
    """
    lines = []
    for node in program.graph.nodes:
        source = node
        while source.op != "get_attr" and op_name(source) in VIEWS and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        name = program.owner(str(source.target))
        if op_name(node) not in CASTS or source.op != "get_attr" or name not in program.parameters:
            continue
        given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
        dtype = next(iter(given), CASTS_TO.get(op_name(node)))
        of = program.parameters[name].dtype
        if dtype is not None and dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(of).eps:
            text = f"{name}: cast to {str(dtype).removeprefix('torch.')} in {where(node)}"
            lines.append(f"{text}; what is recorded behind it is rounded to that, as its gradient is")
    return lines


# --- words ------------------------------------------------------------------------------------------------------------


def fold(names: Iterable[str]) -> str:
    """`("stem.weight", "stem.bias")` -> `"stem.{weight, bias}"`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, dot, last = name.rpartition(".")
        groups.setdefault(prefix + dot, []).append(last)
    return ", ".join(p + (lasts[0] if len(lasts) == 1 else f"{{{', '.join(lasts)}}}") for p, lasts in groups.items())


def factor_text(name: str, shape: tuple[int, ...], blocks: int = 1) -> str:
    """`"A 10 x 10"`, `"A diag 50"`, `"A 8 blocks of 64 x 64"`."""
    if len(shape) == 1:
        return f"{name} diag {shape[0]:,}"
    return f"{name} {f'{blocks:,} blocks of ' if blocks > 1 else ''}{shape[0]:,} x {shape[1]:,}"


def memory_text(count: float) -> str:
    """`"36.2 KiB"`; numbers below one KiB in bytes."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:,.1f} {unit}"
    return f"{count / 1024:,.1f} TiB"


# --- fallbacks --------------------------------------------------------------------------------------------------------


def fallbacks(
    arguments: CompileArguments, program: Program, captures: Iterable[Recorder], cases: Iterable[CaseRecorder]
) -> list[str]:
    """A sentence for every slower or unproved way that a compiled module has taken, with the reason.

    captures: of all kinds of calls so far. cases: the recorders of gradients of single examples.
    """
    sentences = [] if arguments.verify else ["no registration was proved: verify=False"]
    sentences += [
        f"the layer {name!r} of layers=[...] is nowhere in the graph: no operation has its form. "
        "`kfac-fx explain MODEL PARAMETER --layer FILE:NAME` says which condition fails"
        for name in unmatched(arguments.layers, program)
    ]
    for capture in captures:
        if capture.loop_reason is not None:
            sentences.append(f"sources of the exact modes are sent back one by one: {capture.loop_reason}")
        sentences += capture.misfits
        if capture.rows_reason is not None:
            sentences.append(f"the exact modes send back one row of a loss at a time: {capture.rows_reason}")
        if capture.emitted.plain_reason is not None:
            sentences.append(f"recordings are not compiled: {capture.emitted.plain_reason}")
    apart = {key: reason for recorder in cases for key, reason in recorder.apart.items()}
    sentences += [
        f"gradients of single examples of {', '.join(key)} take one backward each: {reason}"
        for key, reason in apart.items()
    ]
    return list(dict.fromkeys(sentences))


def unmatched(layers: Mapping[str, Layer], program: Program) -> list[str]:
    """The user's layers that no use has, and that no reason speaks of."""
    used = {use.layer for registration in program.registrations for use in registration.uses}
    reasons = [registration.reason or "" for registration in program.registrations]
    told = " ".join([*reasons, *map(str, program.dropped)])
    mine = [name for name, layer in layers.items() if LAYERS.get(name) is not layer and not layer.parts]
    return [name for name in mine if name not in used and f"{name}:" not in told and f"{name}(" not in told]


# --- the graph --------------------------------------------------------------------------------------------------------


def block_graph(program: Program, rows: Sequence[ReportRow]) -> networkx.DiGraph:
    """The graph of `Report.to_networkx`."""
    import networkx

    graph = networkx.DiGraph()
    for name, parameter in program.parameters.items():
        graph.add_node(name, kind="parameter", label=name, shape=tuple(parameter.shape))
    for number, (registration, row) in enumerate(zip(program.registrations, rows, strict=True)):
        block, label = registration.parameters, f"{number}  {row.layer}\n{row.names}\n{row.block}: {row.factors_text}"
        graph.add_node(block, kind="block", label=label, generic=row.generic, **row.to_dict())
        for piece in registration.pieces:
            graph.add_node(piece.name, kind="piece", label=piece.name, shape=program.shapes[piece.name])
            graph.add_edge(piece.parameter, piece.name, kind="piece")
        for use in registration.uses:
            line, key = source_line(use.output), f"use {use.output.name}"  # registrations that were split share it
            graph.add_node(key, kind="use", label="\n".join(filter(None, (use.output.name, line))), line=line)
            graph.add_edges_from([(name, key) for name in sorted(use.parameter_set)], kind="parameter")
            graph.add_edge(key, block, kind="block")
        if registration.generic:
            graph.add_edges_from([(name, block) for name in block], kind="block")
    add_data(program, graph)
    return graph


def add_data(program: Program, graph: networkx.DiGraph) -> None:
    """Add the edges along the data, and the operations where data meets."""
    uses = {use.output: use.nodes for registration in program.registrations for use in registration.uses}
    inside = {node for nodes in uses.values() for node in nodes}
    generic = {name: block.parameters for block in program.registrations if block.generic for name in block.owners}
    origin: dict[fx.Node, str | None] = {}  # of the data in a node: the last node of `graph` on its way
    for node in program.graph.nodes:
        entered = sorted(uses.get(node, [node]))
        operands = [
            operand for inner in entered for operand in inner.all_input_nodes if operand not in uses.get(node, ())
        ]
        origins = list(dict.fromkeys(key for operand in operands if (key := origin.get(operand)) is not None))
        read = [str(operand.target) for operand in operands if operand.op == "get_attr" and operand.target in generic]
        if node in uses:
            key = f"use {node.name}"
        elif (len(origins) > 1 or read) and node not in inside and node.op != "output":
            key = f"operation {node.name}"
            graph.add_node(key, kind="operation", label=op_name(node), line=source_line(node))
            graph.add_edges_from([(name, key) for name in read], kind="parameter")
            graph.add_edges_from([(key, generic[name]) for name in read], kind="block")
        else:
            origin[node] = origins[0] if origins else None
            continue
        graph.add_edges_from([(source, key) for source in origins], kind="data")
        origin[node] = key
