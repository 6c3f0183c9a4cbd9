"""A model behind a signature of tensors only, and a graph of that back under the model's own names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from ..errors import UntraceableError
from ..graphs import pytree
from ..graphs.holder import attribute, holder
from .attributes import untouched
from .border import python_random, with_left_out, without_objects

PREFIX = "model."


@dataclass
class Returned:
    """What a traced forward told beside its tensors; an object of its own, for torch.export puts attributes back."""

    spec: pytree.TreeSpec | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    assigned: list[str] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)


class Flat(nn.Module):
    """A model behind a signature of tensors only; everything else is baked in."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.spec = spec
        self.returned = Returned()

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.unflatten(leaves, self.spec)
        held = [(owner, name, buffer) for owner in self.model.modules() for name, buffer in owner._buffers.items()]
        with untouched(self.model) as assigned:
            with python_random() as drawn:
                result = self.model(*args, **kwargs)
            for owner, name, buffer in held:  # a buffer that was assigned, which torch.export overlooks in submodules
                value = owner._buffers[name]
                if value is not buffer and value is not None and buffer is not None and value.shape == buffer.shape:
                    owner._buffers[name] = buffer.copy_(value)
        self.returned.drawn += drawn
        self.returned.assigned += assigned
        returned, self.returned.spec = pytree.flatten(result)
        kept, self.returned.left_out = without_objects(returned)
        self.returned.leaves = returned
        return kept

    def unflatten(self, output: Any) -> Any:
        """What the graph of this returned, as the model returns it."""
        assert self.returned.spec is not None, "bug in kfac_fx: a graph of a forward that did not return"
        return pytree.unflatten(with_left_out(list(output), self.returned.left_out), self.returned.spec)


def flat_graph(module: fx.GraphModule, names: list[str]) -> tuple[fx.Graph, nn.Module]:
    """Copy the exported graph without guards and without the wrapper's prefix; the names are the model's."""
    graph, copies = fx.Graph(), {}
    held: dict[str, Any] = {}
    placeholders = iter(names)
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target == "_guards_fn":
            continue
        if node.op == "placeholder":
            name = next(placeholders)
            copies[node] = graph.create_node("placeholder", name, name=name)
        elif node.op == "get_attr":
            target = str(node.target).removeprefix(PREFIX)
            held[target] = attribute(module, str(node.target))
            copies[node] = graph.get_attr(target)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = dict(node.meta)
    return graph, holder(held)


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every tensor leaf: the argument's own, numbered where an argument holds several."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UntraceableError(
            f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from error
    named: list[tuple[str, Any]] = []
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named += list(value.items())
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named += [(f"{name}_{i}", one) for i, one in enumerate(value)]
        else:
            named.append((name, value))
    order = {id(leaf): name for name, value in named for leaf in pytree.leaves(value) if isinstance(leaf, Tensor)}
    names: list[str] = []
    for leaf in pytree.leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, Tensor):
            base = order.get(id(leaf), "x")
            names.append(base if base not in names else f"{base}_{len(names)}")
    return names
