"""The data that passes exchange: plain, frozen data about one captured graph.

A `Program` holds the graph and all that is known about it so far; a pass takes one and returns another. No class here
holds a function: a layer is a name, so a Program prints, compares and pickles. The smaller words, of uses and of
registrations, have modules of their own and are read from here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx, nn

from .errors import plural
from .matrix import Shape
from .parametrization import with_nodes
from .pieces import ParameterExpr, Piece
from .registration import (
    CASES,
    GENERIC,
    KEPT,
    STEP,
    UNROLLED,
    WANTED,
    Attrs,
    Bound,
    Dims,
    Registration,
    Sampling,
    Use,
    literal_attrs,
    source_line,
    tensor_attrs,
    where,
)

__all__ = [
    "CASES",
    "GENERIC",
    "KEPT",
    "STEP",
    "UNROLLED",
    "WANTED",
    "Attrs",
    "Bound",
    "Dims",
    "LossSite",
    "Note",
    "Options",
    "Pass",
    "PassRecord",
    "Program",
    "Registration",
    "Sampling",
    "Submodule",
    "Use",
    "literal_attrs",
    "source_line",
    "tensor_attrs",
    "where",
]


@dataclass(frozen=True)
class Note:
    """A match or a declaration that did not become a registration, and why."""

    subject: str
    reason: str


@dataclass(frozen=True)
class Submodule:
    """One that was captured on its own; see `passes.submodules`."""

    path: str
    calls: int  # on the first batch; 0: captured without inputs, for none of the examples reached it
    read: bool = False  # it is one operation of the Python between the others, and `path` says which


@dataclass(frozen=True)
class LossSite:
    """A loss that forward itself computes: its distribution's parameters are a node of the graph."""

    kind: str  # "categorical" | "normal" | "multi_bernoulli"
    inputs: fx.Node
    targets: fx.Node
    reduction: str  # "mean", "sum" or "none", as forward wrote it
    node: fx.Node
    ignored: Any = None  # the target that is no case, a number or a node; None: every target is one


@dataclass(frozen=True)
class Options:
    """The declarations of the user, which the `link` pass checks."""

    linked: Mapping[frozenset[str], str | None] = field(default_factory=dict)
    approximations: Mapping[Any, str] = field(default_factory=dict)
    strict: bool = False
    loss_given: bool = False  # the user named the loss: do not look for one in the graph
    batch_dim: int | None = None  # the dimension of the cases in the inputs, as the user said
    modules: Mapping[str, type] = field(default_factory=dict)  # module path -> class, for approximations by module
    dense_limit: int = 4096  # no factor takes more memory than a dense one of this width
    sampling: Sampling | None = None  # of all input factors
    pieces: tuple[Piece, ...] = ()  # asked for by name: parameters are cut here, too, if their uses allow it

    @cached_property
    def groups(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the linked group that it is in."""
        return {name: group for group in self.linked for name in group}

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Those keys of `approximations` that have wildcards."""
        return tuple(key for key in self.approximations if isinstance(key, str) and any(c in key for c in "*?["))

    @cached_property
    def classes(self) -> tuple[type, ...]:
        """Those keys of `approximations` that are classes of modules."""
        return tuple(key for key in self.approximations if isinstance(key, type))


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass, for the report."""

    name: str
    nodes: int
    summary: str
    seconds: float


ELEMENTS = "elements"  # in a node's meta, with nodes in it: see `passes.parametrizations.gathered`
# The fields of a Program that refer to nodes.
WITH_NODES = ("losses", "outputs", "mask", "parameter_exprs", "behind", "matches", "registrations")


LABELED_BY = {"graph", "parameters", "cases"}  # the fields of a Program that labels depend on


@dataclass(frozen=True)
class Program:
    """A captured graph and what is known of it.

    graph: flat; placeholders are the model's inputs, `get_attr` nodes its parameters and buffers under their names in
        the model, the output node returns what the model returns.
    parameters: trainable parameters by canonical name, the first of its aliases; the same objects as the model's.
    aliases: every name of every trainable parameter -> its canonical name.
    """

    graph: fx.Graph
    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    aliases: Mapping[str, str]
    options: Options = field(default_factory=Options)
    layers: Mapping[str, Any] = field(default_factory=dict)  # name -> passes.layers.Layer, opaque to the IR
    losses: tuple[LossSite, ...] = ()
    outputs: tuple[fx.Node, ...] = ()  # the nodes behind the losses: the Fisher's outputs
    cases: str | None = None  # the symbolic size of the cases; None if the graph knows no sizes
    cases_reason: str = ""  # why this size, where there was a choice
    told_cases: tuple[tuple[str, str], ...] = ()  # the layers that know their cases, in words, and the size of these
    mask: fx.Node | None = None  # [N, S], nonzero where a position of a case is no padding; None: everywhere
    mask_dims: tuple[Dims | None, ...] = ()  # of every output, along which the mask goes
    unmasked: tuple[Note, ...] = ()  # uses that the mask does not fit
    padded: tuple[Note, ...] = ()  # those of them that may have padding in their rows
    parameter_exprs: Mapping[fx.Node, ParameterExpr] = field(
        default_factory=dict
    )  # expressions of parameters that layers may be made of
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # of parameters that are used in pieces, by their names
    behind: Mapping[fx.Node, frozenset[str]] = field(default_factory=dict)  # the pieces that a node is made of
    matches: tuple[Use, ...] = ()
    registrations: tuple[Registration, ...] = ()
    unused: tuple[str, ...] = ()
    dropped: tuple[Note, ...] = ()
    history: tuple[PassRecord, ...] = ()
    submodules: tuple[Submodule, ...] = ()  # whose graphs these are; none: the graph is the whole model
    left: tuple[Note, ...] = ()  # modules that stay Python, and why
    python: Mapping[str, str] = field(default_factory=dict)  # parameters that this Python reads, "read at net.py:12"
    labeled: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # by `graphs.labels.labels_of`

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Canonical name -> all of a parameter's names."""
        names: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            names.setdefault(name, []).append(alias)
        return {name: tuple(all_) for name, all_ in names.items()}

    @cached_property
    def unrolled(self) -> bool:
        """Whether the graph has the steps of recurrent layers."""
        return any(UNROLLED in node.meta for node in self.graph.nodes)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of parameters, and of pieces instead of the parameters that are used in pieces."""
        shapes: dict[str, Shape] = {}
        for name, parameter in self.parameters.items():
            whole = tuple(parameter.shape)
            for part in self.parts(name):
                shapes[part] = self.pieces[part].shape(whole) if part in self.pieces else whole
        return shapes

    @cached_property
    def case_dims(self) -> tuple[int, ...]:
        """The dimension of the cases in every one of `outputs`; 0 where no dimension has their size."""
        sizes = [[str(size) for size in getattr(node.meta.get("val"), "shape", ())] for node in self.outputs]
        return tuple(shape.index(self.cases) if self.cases in shape else 0 for shape in sizes)

    def owner(self, name: str) -> str:
        """The parameter that a name in `shapes` belongs to."""
        return self.pieces[name].parameter if name in self.pieces else name

    def parts(self, parameter: str) -> tuple[str, ...]:
        """The names in `shapes` of a parameter: those of its pieces in their order, or its own."""
        return tuple(self.pieces_of.get(parameter, (parameter,)))

    @cached_property
    def pieces_of(self) -> Mapping[str, list[str]]:
        """Parameter that is used in pieces -> their names in their order."""
        names: dict[str, list[str]] = {}
        for name, piece in self.pieces.items():
            names.setdefault(piece.parameter, []).append(name)
        return names

    def generic(self, name: str, reason: str | None, approximation: str = "diagonal") -> Registration:
        return Registration("generic", None, (name,), (), approximation, reason, self.pieces_among([name]))

    def pieces_among(self, names: Iterable[str]) -> tuple[Piece, ...]:
        return tuple(self.pieces[name] for name in names if name in self.pieces)

    def but(self, **changes: Any) -> Program:
        """The same Program with other values of some fields."""
        if LABELED_BY.isdisjoint(changes):
            return replace(self, **changes)
        return replace(self, **{"labeled": {}, **changes})

    def on(self, graph: fx.Graph, nodes: Mapping[fx.Node, fx.Node]) -> Program:
        """The same Program on another graph. nodes: the nodes of the other graph, by those of this one."""
        return self.but(graph=graph, **{name: with_nodes(getattr(self, name), nodes) for name in WITH_NODES})

    def copied(self) -> Program:
        """The same on a graph of its own, for passes that write into it: other Programs may share the one of this."""
        graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self.graph, nodes))
        (old,), (new,) = (version.find_nodes(op="output") for version in (self.graph, graph))
        nodes[old], new.meta = new, dict(old.meta)
        for node in nodes.values():
            if ELEMENTS in node.meta:
                node.meta[ELEMENTS] = with_nodes(node.meta[ELEMENTS], nodes)
        return self.on(graph, nodes)

    def __str__(self) -> str:
        """The graph as Python, without torch's deletions of names, then what the passes have found in it."""
        source = self.graph.python_code("self").src.strip()
        lines = [re.sub(r";  [\w = ]+ = None$", "", source, flags=re.MULTILINE), ""]
        lines += [f"{len(self.graph.nodes)} nodes, {len(self.parameters)} parameters"]
        lines += [f"match         {use} at {where(use.output)}" for use in self.matches]
        lines += [f"registration  {r} {r.approximation}, {plural(len(r.uses), 'use')}" for r in self.registrations]
        lines += [f"dropped       {note.subject}: {note.reason}" for note in self.dropped]
        lines += [f"unused        {name}" for name in self.unused]
        return "\n".join(lines)


Pass = Callable[[Program], Program]
