"""The nodes, parameters and uses of a captured model, by the names that a user writes.

- A `CapturedModel` has the graph, whose nodes a user names by themselves or by the submodules that compute them.
- Parameters and pieces of them are named one by one, in keys of several, and in arguments.
- A use is named by its parameters and by the node that it computes. The layer's form is laid over the graph at that
  node, as the matcher does, so a use that is registered by hand equals the use that the matcher finds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor, fx, nn

from kfac_fx.fisher.spectrum import matches
from kfac_fx.linalg.vectors import overlap, piece_of_view, read_piece
from kfac_fx.passes.cases import size_of_cases, with_batch_dim, with_mask
from kfac_fx.passes.complex_parameters import original
from kfac_fx.passes.errors import ModelChangedError, RegistrationError, nearest, table, where
from kfac_fx.passes.graphs.labels import Label, labels_of, symbolic_sizes
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import Pattern, held_shapes, lay_over, patterns_at, patterns_by_target
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.parametrization import Piece
from kfac_fx.passes.pipeline import CAPTURED, MATCHED, run
from kfac_fx.passes.resolve import declared_by_user
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.signature import PREFIX
from kfac_fx.recording.statistics import Key

Entry = TypeVar("Entry")
Nodes = Any  # a node, its name, or a list of them, one per use


@dataclass(frozen=True, repr=False)
class CapturedModel:
    """A model as a graph whose nodes can be named. `capture` makes it.

    Attributes:
        model: the model itself.
        capture: the trace of the model.
        program: its normalized graph, before any pass has looked for layers.
        args, kwargs: the example inputs; args is None if there are none.
        wrapper: the model in its wrappers of data parallelism and torch.compile, as the user passed it.
    """

    model: nn.Module
    capture: Capture
    program: Program
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]
    wrapper: nn.Module | None = None

    def __repr__(self) -> str:
        """The graph as Python, with the names that `node` takes."""
        return f"kfac_fx.capture({type(self.model).__name__}):\n{self.program}"

    @property
    def graph(self) -> fx.Graph:
        """The normalized graph."""
        return self.program.graph

    def node(self, name: str | fx.Node) -> fx.Node:
        """The node of this name. Raises RegistrationError if there is none, or for a node of another graph."""
        names: dict[str, fx.Node] = {node.name: node for node in self.graph.nodes}
        if isinstance(name, fx.Node):
            if names.get(name.name) is not name:
                raise RegistrationError(f"the node {name.name} is not one of this graph; take it from lc.graph")
            return name
        if not isinstance(name, str):
            raise RegistrationError(f"a node of the graph is wanted, from lc.graph or by its name, not {name!r}")
        if name not in names:
            raise RegistrationError(f"the graph has no node {name!r}.{nearest(name, names)}")
        return names[name]

    def inputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """The node that a submodule reads; a list with one node per call if it is called several times.

        Raises RegistrationError if no call of it is in the graph, or if a call reads several nodes.
        """

        def read(call: Sequence[fx.Node]) -> list[fx.Node]:
            operands = dict.fromkeys(operand for node in call for operand in node.all_input_nodes)
            return [node for node in operands if node not in call and node.op != "get_attr"]

        return self._node_per_call(module, "inputs", [read(call) for call in self.calls_of(module)])

    def outputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """The node that a submodule computes; a list with one node per call if it is called several times.

        Raises RegistrationError if no call of it is in the graph, or if a call computes several nodes.
        """

        def computed(call: Sequence[fx.Node]) -> list[fx.Node]:
            return [node for node in call if any(user not in call for user in node.users)]

        return self._node_per_call(module, "outputs", [computed(call) for call in self.calls_of(module)])

    def calls_of(self, module: str) -> list[list[fx.Node]]:
        """The operations of every call of a submodule, in order."""
        if not isinstance(module, str):
            raise RegistrationError(
                f"a module is named here, as in outputs_of('layers.0'), and this is a {type(module).__name__}"
            )
        calls: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            for call, (path, _) in stack.items():
                prefix = PREFIX if "L__self__" in stack else ""  # torch.export's, of the wrapper around the model
                if node.op != "get_attr" and path == prefix + module:
                    calls.setdefault(call, []).append(node)
        if not calls:
            paths = [name for name, _ in self.model.named_modules() if name]
            raise RegistrationError(f"no operation of the graph is in a module {module!r}.{nearest(module, paths)}")
        return list(calls.values())

    def _node_per_call(self, module: str, side: str, calls: Sequence[Sequence[fx.Node]]) -> fx.Node | list[fx.Node]:
        for nodes in calls:
            if len(nodes) != 1:
                names = ", ".join(node.name for node in nodes) or "none"
                raise RegistrationError(f"{module} has {len(nodes)} {side} ({names}); choose one with lc.node(name)")
        return calls[0][0] if len(calls) == 1 else [nodes[0] for nodes in calls]


def on_another_capture(program: Program, traced: Program, model: nn.Module) -> Program:
    """The registrations of `program` on the graph of `traced`, another capture of `model`.

    Raises ModelChangedError if the two graphs differ.
    """
    fresh = run(traced, CAPTURED)
    pairs = list(zip(program.graph.nodes, fresh.graph.nodes, strict=False))
    alike = len(program.graph.nodes) == len(fresh.graph.nodes)
    if not alike or any((a.op, a.target) != (b.op, b.target) for a, b in pairs):
        raise ModelChangedError(
            f"these inputs take another path through {type(model).__name__} than those that the "
            "LayerCollection was built on.\nMake a LayerCollection for each path."
        )
    moved = program.on(fresh.graph, dict(pairs))
    return moved.but(
        root=fresh.root,
        parameters=fresh.parameters,
        aliases=fresh.aliases,
        cases=size_of_cases(fresh, moved.outputs)[0],
        history=fresh.history,
    )


# --- names ------------------------------------------------------------------------------------------------------------


class ParameterNames:
    """Canonical names of parameters and of their pieces.

    Users name a parameter by any of its aliases or by the object, and a piece as `"w[0:64]"`, `"table[:, 2:5]"` or as
    a view such as `model.w[0:64]`.

    Attributes:
        pieces: the pieces that were named so far, by name.
    """

    def __init__(self, program: Program) -> None:
        self.pieces: dict[str, Piece] = dict(program.pieces)
        self._aliases, self._parameters = program.aliases, program.parameters
        self._by_object = {id(original(parameter)): name for name, parameter in program.parameters.items()}

    def __call__(self, parameter: Any) -> str:
        """Raises RegistrationError if this is no trainable parameter of the model and no piece of one."""
        if isinstance(parameter, str) and parameter in self._aliases:
            return self._aliases[parameter]
        if id(parameter) in self._by_object:
            return self._by_object[id(parameter)]
        piece: Piece | None = None
        if isinstance(parameter, str):
            piece = self.pieces.get(parameter) or read_piece(parameter, self._aliases, self._parameters)
        elif isinstance(parameter, Tensor):
            piece = piece_of_view(real_numbers(parameter), self._parameters)
        if piece is not None:
            if not piece.within and piece.stop - piece.start == self._parameters[piece.parameter].shape[piece.dim]:
                return piece.parameter
            return self.pieces.setdefault(piece.name, piece).name
        if isinstance(parameter, str):
            hint = nearest(parameter, self._aliases)
            raise RegistrationError(f"{parameter!r} is not a trainable parameter of the model.{hint}")
        raise RegistrationError(f"a {type(parameter).__name__} that is not a trainable parameter of the model")


class LayerParametersDict(MutableMapping[Any, Entry], Generic[Entry]):
    """A mapping from parameters to values. A key is one parameter, or a tuple or list of them in any order.

    No parameter, and no element of one, is in two keys. Iteration gives tuples of names in the order of insertion.

    Args:
        name_of: from a parameter, as users write it, to its name.
        pieces: the pieces of parameters among the names.
    """

    def __init__(self, name_of: Any = str, pieces: Mapping[str, Piece] | None = None) -> None:
        self.name_of, self.pieces = name_of, {} if pieces is None else pieces
        self._values: dict[Key, Entry] = {}
        self._keys: dict[frozenset[str], Key] = {}
        self._by_owner: dict[str, dict[Key, None]] = {}

    def names(self, key: Any) -> Key:
        """The names in a key as users write it."""
        parts = key if isinstance(key, (tuple, list, set, frozenset)) else (key,)
        return tuple(self.name_of(part) for part in parts)

    def overlapping(self, key: Any) -> list[Key]:
        """Keys that share a parameter, or elements of one, with `key` and are not equal to it."""
        names = self.names(key)
        near = dict.fromkeys(other for name in names for other in self._by_owner.get(self.owner(name), ()))
        return [other for other in near if set(other) != set(names) and self.shared(other, names)]

    def shared(self, first: Iterable[str], second: Iterable[str]) -> list[str]:
        """The names in `second` that have elements in common with a name in `first`."""
        return [name for name in second if any(self.meet(other, name) for other in first)]

    def meet(self, first: str, second: str) -> bool:
        """Whether two parameters or pieces have elements in common."""
        if first in self.pieces and second in self.pieces:
            return overlap(self.pieces[first], self.pieces[second])
        return self.owner(first) == self.owner(second)

    def owner(self, name: str) -> str:
        """The parameter that a piece is of; a parameter itself."""
        return self.pieces[name].parameter if name in self.pieces else name

    def __getitem__(self, key: Any) -> Entry:
        names = self.names(key)
        if frozenset(names) not in self._keys:
            raise KeyError(f"no block of exactly ({', '.join(names)})")
        return self._values[self._keys[frozenset(names)]]

    def __setitem__(self, key: Any, value: Entry) -> None:
        """Raises RegistrationError if another key has one of the parameters."""
        names = self.names(key)
        if taken := self.overlapping(names):
            raise RegistrationError(f"key {names} shares parameters with Key(s) already present: {taken}")
        key = self._keys.setdefault(frozenset(names), names)
        self._values[key] = value
        for name in names:
            self._by_owner.setdefault(self.owner(name), {})[key] = None

    def __delitem__(self, key: Any) -> None:
        names = self._keys.pop(frozenset(self.names(key)))
        del self._values[names]
        for owner in {self.owner(name) for name in names}:
            del self._by_owner[owner][names]

    def __contains__(self, key: Any) -> bool:
        return frozenset(self.names(key)) in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"LayerParametersDict({self._values})"


# --- names in arguments -----------------------------------------------------------------------------------------------


def refuse_other_variables(variables: Any, model: Any, argument: str = "variables") -> list[str]:
    """The names. Raises RegistrationError for variables that are no names."""
    if isinstance(variables, (str, Tensor)) or not isinstance(variables, Iterable):
        example = [variables] if isinstance(variables, str) else ["fc.weight", "fc.bias"]
        raise RegistrationError(
            f"{argument} is {variables!r}; it takes a list of names of parameters, as in {argument}={example}"
        )
    names = list(variables)
    if wrong := [variable for variable in names if not isinstance(variable, str)]:
        raise RegistrationError(f"{argument} takes names of parameters: {as_written(wrong, model)}")
    return names


NO_LOSS = " No loss that is known depends on it: name its loss with compile(..., loss=lambda outputs: [...])"


def check_variables(
    variables: frozenset[str],
    registrations: Iterable[Registration],
    argument: str = "variables",
    lost: Container[str] = (),
) -> None:
    """Raises RegistrationError for names registered nowhere, or without those that share their registration.

    lost: names that no known loss depends on.
    """
    registered = [name for registration in registrations for name in registration.owners]
    reasons = {name: NO_LOSS if name in lost else meant(name, registered) for name in variables.difference(registered)}
    wrong = [(name, f"is registered nowhere.{reason}") for name, reason in reasons.items()]
    for owners in (set(registration.owners) for registration in registrations):
        if absent := sorted(owners - variables):
            wrong += [
                (n, f"shares a block with {', '.join(absent)}: name both, or none") for n in sorted(owners & variables)
            ]
    if wrong:
        raise RegistrationError(f"`{argument}` does not fit the registrations:\n{table(sorted(wrong))}")


def with_patterns(names: Iterable[str], registrations: Iterable[Registration]) -> frozenset[str]:
    """The names of parameters, with those that the names of modules and the patterns with `*` stand for. Names that
    fit none stay, for `check_variables`."""
    owners = [name for registration in registrations for name in registration.owners]
    return frozenset(n for name in names for n in ([owner for owner in owners if matches(owner, name)] or [name]))


def refuse_unfit_patterns(patterns: Iterable[str], registered: Sequence[str], argument: str) -> None:
    """Raises RegistrationError for names and patterns that fit no registered parameter, as these are all of them."""
    rows = []
    for pattern in patterns:
        wider = [text for text in (f"*.{pattern}", f"*{pattern}*") if any(fnmatchcase(n, text) for n in registered)]
        more = f" Did you mean {wider[0]!r}?" if wider else nearest(pattern, registered)
        rows.append((pattern, f"fits no parameter in a block.{more}"))
    if rows:
        raise RegistrationError(
            f"`{argument}` takes names of parameters and of modules, and patterns with *, such as '*.bias':\n"
            f"{table(sorted(rows))}"
        )


def meant(name: str, registered: Sequence[str]) -> str:
    """The parameters of a module or of a pattern, or the parameter with the nearest name, as a sentence."""
    within = [other for other in registered if other.startswith(f"{name}.") or fnmatchcase(other, name)]
    few = ", ".join(map(repr, within[:4])) + (", ..." if len(within) > 4 else "")
    return f" Write the names of parameters: {few}" if within else nearest(name, registered)


def as_written(objects: Iterable[Any], model: Any) -> str:
    """The text that a user writes instead of objects: their names, if they are the model's."""
    known = {id(value): name for name, value in (*model.named_parameters(), *model.named_modules())}
    advice = []
    for value in objects:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        advice.append(f"write {known[id(value)]!r} for {kind}" if id(value) in known else f"{kind} is none")
    return "; ".join(advice)


# --- uses -------------------------------------------------------------------------------------------------------------


class Finder:
    """Finds uses at the nodes of one captured model."""

    def __init__(self, captured: CapturedModel) -> None:
        self.captured = captured
        self._cut: tuple[Any, Program] | None = None

    @cached_property
    def program(self) -> Program:
        """The captured program, with the cases that the model's outputs have."""
        return find_losses(self.captured.program)

    @cached_property
    def label(self) -> Mapping[fx.Node, Label]:
        return labels_of(self.program)

    @cached_property
    def patterns(self) -> dict[Any, list[Pattern]]:
        return patterns_by_target({name: layer for name, layer in self.program.layers.items() if not layer.parts})

    @cached_property
    def batch_sizes(self) -> list[str]:
        """The symbolic sizes that may count cases: those of the outputs, then the first ones of the inputs."""
        first = [size for node in self.program.inputs for size in symbolic_sizes(node)[:1] if size]
        return list(dict.fromkeys([self.program.cases, *first] if self.program.cases else first))

    def cut(self, scope: Program) -> Program:
        """All uses that the matcher finds, with parameters cut into the pieces that they are used in.

        scope: the graph. Only uses behind its outputs count; its options may ask for more pieces.
        """
        asked = scope.outputs, scope.options.pieces
        if self._cut is None or self._cut[0] != asked:
            self._cut = asked, run(scope, MATCHED)
        return self._cut[1]

    def check_cuts(self, pieces: Iterable[Piece], scope: Program, others: Program) -> None:
        """Raises RegistrationError if one of `pieces` is no piece of its parameter in the graph.

        scope: asks for all of them; others: asks for those that are registered or linked already.
        """
        cut = self.cut(scope)
        for piece in pieces:
            if piece.name not in cut.pieces:
                parts = self.cut(others).parts(piece.parameter)
                raise RegistrationError(
                    f"{piece.name} cannot be registered by itself: in the graph's uses {piece.parameter} comes as "
                    f"{', '.join(parts)}"
                )

    def in_pieces(self, bare: Program, scope: Program, owners: set[str]) -> Program:
        """`bare`, where the parameters in `owners` are cut into pieces."""
        cut = self.cut(scope)
        behind = {
            node: frozenset(name if cut.owner(name) in owners else cut.owner(name) for name in names)
            for node, names in cut.behind.items()
        }
        pieces = {name: piece for name, piece in cut.pieces.items() if piece.parameter in owners}
        return bare.but(pieces=pieces, behind=behind)

    def uses_at(self, output: fx.Node) -> list[Use]:
        """All uses of declared layers whose output is this node."""
        shapes = held_shapes(self.program)
        uses = (
            use
            for pattern in patterns_at(self.patterns, output)
            for use in lay_over(pattern, output, self.label, shapes, self.program.parameters)
        )
        return [with_mask(self.with_batch(use)) for use in uses]

    def parts_at(self, output: fx.Node, scope: Program) -> list[Use]:
        """The same by parts, where parameters are used or asked for in pieces, or several are put together."""
        return [self.with_batch(use) for use in self.cut(scope).matches if use.output is output]

    def with_batch(self, use: Use) -> Use:
        sizes = symbolic_sizes(use.output)
        if not sizes or not self.batch_sizes:
            return use
        return with_batch_dim(use, next((size for size in self.batch_sizes if size in sizes), ""))

    def find(
        self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes, scope: Program
    ) -> tuple[Use, ...]:
        """One use for every output; several where the parameters have several places in its matrix.

        Args:
            layers: names of declared layers; empty: any.
            inputs: the nodes that the uses read, in the order of `outputs`; None: as in the graph.
            scope: see `expressions`.

        Raises RegistrationError, which lists the uses that are there, if a node is not computed by one of `layers` with
        at least these parameters from its input, and for lists of different lengths or without an output.
        """
        to = [self.captured.node(output) for output in listed(outputs)]
        reads = [None] * len(to) if inputs is None else [self.captured.node(node) for node in listed(inputs)]
        if not to or len(reads) != len(to):
            raise RegistrationError(f"{', '.join(params)}: {len(reads)} inputs and {len(to)} outputs; give one a use")
        pairs = zip(reads, to, strict=True)
        return tuple(use for read, output in pairs for use in self.find_at(layers, params, read, output, scope))

    def find_at(
        self, layers: Sequence[str], params: Key, read: fx.Node | None, output: fx.Node, scope: Program
    ) -> list[Use]:
        def rank(use: Use) -> tuple[int, int, bool]:
            return len(use.parameters), -len(use.nodes), not declared_by_user(self.program, use)

        def fitting(uses: Sequence[Use]) -> list[Use]:
            fits = [
                use
                for use in uses
                if (not layers or use.layer in layers)
                and set(params) <= use.parameter_set
                and (read is None or use.input is read)
            ]
            best = min(fits, key=rank, default=None)
            return [use for use in fits if best is not None and identity(use) == identity(best)]

        def identity(use: Use) -> Any:  # equal for the parts of one layer at one node
            return use.layer, use.form, use.nodes, use.parameter_set

        uses = fitting(self.uses_at(output))[:1] or fitting(self.parts_at(output, scope))
        if not uses:
            raise RegistrationError(self.why_not(layers, params, read, output, scope))
        bound = [{role: place for role, place in use.parameters.items() if place.parameter in params} for use in uses]
        return [replace(use, parameters=parameters) for use, parameters in zip(uses, bound, strict=True)]

    def why_not(self, layers: Sequence[str], params: Key, read: fx.Node | None, output: fx.Node, scope: Program) -> str:
        kind = " or ".join(layers) or "declared"
        source = f" from {read.name}" if read is not None else ""
        text = f"no {kind} layer with {', '.join(params)} computes {where(output)}{source}"
        matched = [use for use in self.cut(scope).matches if not scope.layers[use.layer].parts]
        uses = [*self.uses_at(output), *matched]
        near = [use for use in uses if use.output is output or use.parameter_set & set(params)]
        rows = dict.fromkeys((str(use), f"computes {where(use.output)} from {use.input.name}") for use in near)
        return "\n".join([text, "The graph has:", table(rows)]) if rows else text


def listed(nodes: Nodes) -> list[Any]:
    return list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
