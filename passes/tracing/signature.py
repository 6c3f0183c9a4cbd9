"""What crosses the border of a captured module: tensors and plain values do; other objects are left out, or refused.

A model behind a signature of tensors only, and a graph of that back under the model's own names.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from ..errors import UntraceableError
from ..graphs import pytree
from ..graphs.edit import attribute, holder
from ..torch_private import GUARDS, buffers_of
from .attributes import SYMBOLS, untouched
from .devices import autocast

RETURNED = (Tensor, bool, int, float, complex, str, type(None), *SYMBOLS)
DEPTH = 3  # of objects inside an argument that are looked through for tensors


class LeftOut:
    """Stands in what a graph returns for an object that it cannot compute, such as a cache of past keys."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(
            f"a graph returns no {self._kind}, so that its {name!r} cannot be read.\n"
            "Build the loss on the tensors that the model returns."
        )

    def __repr__(self) -> str:
        return f"<{self._kind}, left out of the graph>"


def without_objects(leaves: list[Any]) -> tuple[list[Any], dict[int, str]]:
    """(`leaves` with None for what is neither a tensor nor a plain value, the class of those by position)."""
    left_out = {n: type(leaf).__name__ for n, leaf in enumerate(leaves) if not isinstance(leaf, RETURNED)}
    return [None if n in left_out else leaf for n, leaf in enumerate(leaves)], left_out


def with_left_out(leaves: list[Any], left_out: Mapping[int, str]) -> list[Any]:
    return [LeftOut(left_out[n]) if n in left_out else leaf for n, leaf in enumerate(leaves)]


def refuse_nested(model: str, leaves: list[Any]) -> None:
    """Raises UntraceableError for tensors of rows of different lengths."""
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise UntraceableError(
            f"{model} takes a nested tensor, whose lengths a graph would keep.\n"
            "Hand over nested.to_padded_tensor(0.0) and a mask, and name it: compile(..., padding_mask=...)."
        )


def refuse_no_tensors(model: str, what: str, leaves: list[Any]) -> None:
    """Raises UntraceableError if none is `what`, "taken" or "returned"."""
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves))
        given = f", but {kinds}" if kinds else ""
        raise UntraceableError(
            f"no tensor is {what} by {model}{given}.\n"
            "Its inputs say what the cases are, and its outputs what the loss is of: hand them over as tensors, in "
            "tuples, lists or dictionaries."
        )


def refuse_hidden_tensors(model: str, leaves: list[Any]) -> None:
    """Raises UntraceableError for arguments whose tensors torch.export would take for constants."""
    hidden = dict.fromkeys(
        type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor) and holds_tensor(leaf)
    )
    if hidden:
        raise UntraceableError(
            f"{model} takes {' and '.join(hidden)}, objects that hold tensors, which a graph would take for constants."
            "\nHand over the tensors themselves, in tuples, lists or dictionaries, or register the class with "
            "torch.export.register_dataclass."
        )


def holds_tensor(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (nn.Module, type)):
        return False
    inside = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots(value))]
    return any(holds_tensor(leaf, depth - 1) for one in inside for leaf in pytree.leaves(one))


def slots(value: Any) -> list[str]:
    found = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    return [name for names in found for name in ((names,) if isinstance(names, str) else names)]


def call_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a capture is specialized to in its inputs beside shapes: structure, dtypes, devices, values, autocast."""
    leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
    kinds = tuple((leaf.dtype, leaf.device, leaf.dim()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return autocast(), str(spec), kinds


def capture_key(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a capture is specialized to beside shapes: modes, trainability, dtypes and devices, too."""
    parameters = tuple((p.requires_grad, p.dtype, p.device) for p in model.parameters())
    modes = tuple(module.training for module in model.modules())
    return hash((modes, parameters)), *call_key(args, kwargs)


@contextmanager
def python_random() -> Iterator[list[str]]:
    """The random streams of Python and numpy, put back at the end; yields a list that is filled with those that were
    drawn from: a graph would keep the numbers, not the drawing."""
    numpy = sys.modules.get("numpy")
    before, array = random.getstate(), numpy.random.get_state() if numpy else ()
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        if random.getstate() != before:
            drawn.append("random")
            random.setstate(before)
        if numpy and not all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), array, strict=True)):
            drawn.append("numpy.random")
            numpy.random.set_state(array)


def refuse_drawn(model: str, drawn: list[str]) -> None:
    if drawn:
        raise UntraceableError(
            f"{model} draws random numbers from {' and '.join(dict.fromkeys(drawn))}, which a graph would keep.\n"
            "Draw them with torch, or hand them in as inputs."
        )


# --- flat -------------------------------------------------------------------------------------------------------------


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
        held = [(owner, name, buffer) for owner in self.model.modules() for name, buffer in buffers_of(owner).items()]
        with untouched(self.model) as assigned:
            with python_random() as drawn:
                result = self.model(*args, **kwargs)
            for owner, name, buffer in held:  # a buffer that was assigned, which torch.export overlooks in submodules
                value = buffers_of(owner)[name]
                if value is not buffer and value is not None and buffer is not None and value.shape == buffer.shape:
                    buffers_of(owner)[name] = buffer.copy_(value)
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
        if node.op == "call_module" and node.target == GUARDS:
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
