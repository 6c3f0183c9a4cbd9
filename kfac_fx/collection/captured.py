"""A model as a graph whose nodes a user can name: what a `LayerCollection` is built on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from kfac_fx.checks.unchanged import refuse_unfit
from kfac_fx.passes.errors import RegistrationError, UntraceableError, nearest
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.trace import capture as trace
from kfac_fx.passes.tracing.signature import PREFIX
from kfac_fx.passes.unroll import unroll

ONE_GRAPH = (
    "A LayerCollection is registered on the nodes of one graph. kfac_fx.compile captures such a model in parts: say "
    "there what you would register by hand, with approximations=..., linked=... and layers=...."
)


@dataclass(frozen=True, repr=False)
class CapturedModel:
    """A captured model. program: its normalized graph, before any pass looked for layers; args, kwargs: the example."""

    model: nn.Module
    capture: Capture
    program: Program
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]

    def __repr__(self) -> str:
        """The graph as Python, with the names that `node` knows."""
        return f"kfac_fx.capture({type(self.model).__name__}):\n{self.program}"

    @property
    def graph(self) -> fx.Graph:
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

    def calls_of(self, module: str) -> list[list[fx.Node]]:
        """The operations of every call of a submodule, in order. Raises RegistrationError if there is none."""
        calls: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            for call, (path, _) in stack.items():
                prefix = PREFIX if "L__self__" in stack else ""  # torch.export's, of the wrapper around the model
                if node.op != "get_attr" and path == prefix + module:
                    calls.setdefault(call, []).append(node)
        if not calls:
            known = [name for name, _ in self.model.named_modules() if name]
            raise RegistrationError(f"no operation of the graph is in a module {module!r}.{nearest(module, known)}")
        return list(calls.values())

    def outputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """What a submodule computes: a node, or one for every call if it is called several times."""
        return one_or_all([the_one(module, "outputs", leaving(call)) for call in self.calls_of(module)])

    def inputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """What a submodule reads: a node, or one for every call if it is called several times."""
        return one_or_all([the_one(module, "inputs", entering(call)) for call in self.calls_of(module)])


def leaving(call: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in call if any(user not in call for user in node.users)]


def entering(call: Sequence[fx.Node]) -> list[fx.Node]:
    found = (operand for node in call for operand in node.all_input_nodes)
    return list(dict.fromkeys(node for node in found if node not in call and node.op != "get_attr"))


def the_one(module: str, what: str, nodes: Sequence[fx.Node]) -> fx.Node:
    if len(nodes) != 1:
        names = ", ".join(node.name for node in nodes) or "none"
        raise RegistrationError(f"{module} has {len(nodes)} {what} ({names}); choose one with lc.node(name)")
    return nodes[0]


def one_or_all(nodes: list[fx.Node]) -> fx.Node | list[fx.Node]:
    return nodes[0] if len(nodes) == 1 else nodes


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Iterable[Layer] = (),
    dense_limit: int = 4096,
) -> CapturedModel:
    """Capture `model` as a graph to register layers in.

    Args:
        example_inputs, example_kwargs: inputs to capture with; None: by torch.fx alone, if the model allows it.
        layers: the user's own layer declarations.
        dense_limit: `auto_register_layers` makes a factor side that is wider than this block-diagonal.

    Raises UntraceableError, LayerError.
    """
    refuse_unfit(model)
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    options = Options(
        modules={name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name},
        loss_given=True,
        strict=True,  # what a user registered by hand and the proof refutes is an error
        dense_limit=dense_limit,
    )
    try:
        traced = trace(model, args, example_kwargs, options=options, layers=collect(*LAYERS.values(), *layers))
    except UntraceableError as error:
        raise UntraceableError(f"{error}\n{ONE_GRAPH}") from error
    return CapturedModel(model, traced, run(traced.program, (unroll, normalize)), args, dict(example_kwargs or {}))
