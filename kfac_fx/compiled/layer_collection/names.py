"""The nodes and parameters of a captured model, as a user names them; keys of several parameters; `reuse`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, fx, nn

from kfac_fx.linalg.arguments import refuse_other_inputs, refuse_other_limit, refuse_other_models, refuse_unfit_names
from kfac_fx.linalg.vectors import overlap, piece_of_view, read_piece
from kfac_fx.passes.cases import size_of_cases
from kfac_fx.passes.errors import ModelChangedError, RegistrationError, UntraceableError, nearest
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.pieces import Piece
from kfac_fx.passes.pipeline import CAPTURED, run
from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.signature import PREFIX
from kfac_fx.recording.model_checks import refuse_compiled, refuse_inference_mode, refuse_unfit
from kfac_fx.recording.moments import Key

Entry = TypeVar("Entry")
Reuse = bool | str | None
VARIABLE_SCOPE = "VARIABLE_SCOPE"  # the `reuse` of the innermost `variable_scope`; False outside of any
AUTO_REUSE = "AUTO_REUSE"  # add a tower if there is a registration, else make a new one
ONE_GRAPH = (
    "A LayerCollection is registered on the nodes of one graph. kfac_fx.compile captures such a model in parts: say "
    "there what you would register by hand, with approximations=..., linked=... and layers=...."
)
_reuse: ContextVar[bool | str] = ContextVar("reuse", default=False)


# --- nodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class CapturedModel:
    """A model as a graph whose nodes can be named. `capture` makes it.

    Attributes:
        model: the model itself.
        capture: the trace of the model.
        program: its normalized graph, before any pass has looked for layers.
        args, kwargs: the example inputs; args is None if there are none.
    """

    model: nn.Module
    capture: Capture
    program: Program
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]

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


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Iterable[Layer] = (),
    dense_limit: int = 4096,
) -> CapturedModel:
    """Capture a model as one graph, to register its layers in a `LayerCollection`.

    Args:
        model: the model. Its parameters stay the same objects.
        example_inputs, example_kwargs: inputs to capture with, a tuple or one tensor. Without them torch.fx traces the
            model symbolically, if the model allows it.
        layers: the user's own layer declarations, see `kfac_fx.layer`.
        dense_limit: `auto_register_layers` makes a factor side that is wider than this block-diagonal.

    Raises UntraceableError if no single graph holds the model, LayerError for declarations that contradict others,
    RegistrationError for a compiled module and for a model with compiled submodules.
    """
    refuse_other_models(model, "kfac_fx.capture")
    refuse_compiled(model, "kfac_fx.capture")
    refuse_inference_mode("a model is captured")
    refuse_unfit(model)
    refuse_unfit_names(model)
    refuse_other_limit(dense_limit)
    refuse_other_inputs(example_inputs, example_kwargs)
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    options = Options(
        modules={name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name},
        loss_given=True,
        strict=True,  # a registration by hand that the proof refutes is an error
        dense_limit=dense_limit,
    )
    try:
        traced = trace_model(model, args, example_kwargs, options=options, layers=collect(*LAYERS.values(), *layers))
    except UntraceableError as error:
        raise UntraceableError(f"{error}\n{ONE_GRAPH}") from error
    return CapturedModel(model, traced, run(traced.program, CAPTURED), args, dict(example_kwargs or {}))


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


# --- parameters -----------------------------------------------------------------------------------------------------


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
        self._by_object = {id(parameter): name for name, parameter in program.parameters.items()}

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
            piece = piece_of_view(parameter, self._parameters)
        if piece is not None:
            if piece.stop - piece.start == self._parameters[piece.parameter].shape[piece.dim]:
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


# --- reuse ----------------------------------------------------------------------------------------------------------


@contextmanager
def variable_scope(reuse: bool | str) -> Iterator[None]:
    """Inside, `reuse=VARIABLE_SCOPE`, the default of all register functions, means this `reuse`.

    Raises ValueError if `reuse` is none of True, False, AUTO_REUSE and VARIABLE_SCOPE.
    """
    token = _reuse.set(resolved(reuse))
    try:
        yield
    finally:
        _reuse.reset(token)


def resolved(reuse: Reuse) -> bool | str:
    """True, False or AUTO_REUSE. Raises ValueError for anything else."""
    if reuse == VARIABLE_SCOPE:
        return _reuse.get()
    if reuse is None:
        return False
    if reuse is True or reuse is False or reuse == AUTO_REUSE:
        return reuse
    raise ValueError(f"reuse={reuse!r} is none of True, False, AUTO_REUSE and VARIABLE_SCOPE")
