"""A captured model: its graph, whose nodes a user names by themselves or by the submodules that compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from kfac_fx.passes.cases import size_of_cases
from kfac_fx.passes.errors import ModelChangedError, RegistrationError, nearest
from kfac_fx.passes.ir import Program
from kfac_fx.passes.pipeline import CAPTURED, run
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.signature import PREFIX


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
