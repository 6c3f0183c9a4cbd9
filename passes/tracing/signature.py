"""The signature of a captured model: tensors in, tensors and plain values out, and the facts that all its calls share.

`FlatModel` puts the model behind a signature of tensors only, and `flat_graph` brings the exported graph back to the
model's own names. Other objects are left out of the outputs, or refused among the inputs with an error that says what
to pass. `call_key` has the facts about a call that a capture holds for, except sizes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nested import nested_tensor_from_jagged

from .. import results
from ..errors import UntraceableError
from ..graphs.edit import attribute, holder
from ..ir import Autocast, copy_nodes
from ..torch_private import GUARDS, buffers_of, pytree, submodules_of
from .effects import python_random, untouched
from .settings import ATOMS, SYMBOLS, Observer, Walk
from .substitutes import EverywhereElse

RETURNED = (Tensor, bool, int, float, complex, str, type(None), *SYMBOLS)
ARGUMENT_DEPTH = 3  # objects inside of an argument are searched for tensors down to this depth
SIGNATURES: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()  # of functions that are methods


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of the model's forward. To read one takes as long as some ten operations of torch, so it is kept.

    Raises TypeError or ValueError if forward is a callable of C.
    """
    function = getattr(model.forward, "__func__", None)
    if function is None:
        return inspect.signature(model.forward)
    if function not in SIGNATURES:
        SIGNATURES[function] = inspect.signature(model.forward)
    return SIGNATURES[function]


class LeftOut:
    """Stands for an object in the model's outputs that no graph computes, such as a cache of past keys."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(
            f"a captured graph does not return the {self._kind}, so its attribute {name!r} cannot be read.\n"
            "Build the loss on the tensors that the model returns."
        )

    def __repr__(self) -> str:
        return f"<{self._kind}, left out of the graph>"


def without_objects(leaves: list[Any]) -> tuple[list[Any], dict[int, str]]:
    """(leaves with None instead of other objects than tensors and plain values, position -> class of these)."""
    left_out = {n: type(leaf).__name__ for n, leaf in enumerate(leaves) if not isinstance(leaf, RETURNED)}
    return [None if n in left_out else leaf for n, leaf in enumerate(leaves)], left_out


def with_objects(leaves: list[Any], left_out: Mapping[int, str]) -> list[Any]:
    return [LeftOut(left_out[n]) if n in left_out else leaf for n, leaf in enumerate(leaves)]


def is_nested(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_nested


def refuse_nested(model: str, leaves: list[Any], whole: bool) -> None:
    """Raises UntraceableError for nested tensors among the arguments that are no values and offsets.

    whole: whether the model is the user's; Python calls a submodule with nested tensors and wants some back.
    """
    nested = list(filter(is_nested, leaves))
    if any(leaf.layout is not torch.jagged for leaf in nested):
        raise UntraceableError(
            f"{model} takes a nested tensor of the layout torch.strided, whose sizes are no tensors.\n"
            "Make nested tensors with layout=torch.jagged, which have values and offsets."
        )
    if any(not leaf.is_contiguous() for leaf in nested):
        raise UntraceableError(
            f"{model} takes a nested tensor with gaps between its documents, or with its dimensions in another order, "
            "and a captured graph takes values and offsets alone.\n"
            "Give it nested.contiguous(), or let forward transpose it."
        )
    if nested and not whole:
        raise UntraceableError(
            f"{model} takes a nested tensor, and a captured graph takes plain ones: its values and offsets.\n"
            "Let the whole model be one graph: replace what depends on the values of tensors by tensor operations."
        )


def refuse_nested_outputs(model: str, leaves: list[Any]) -> None:
    """Raises UntraceableError for nested tensors that a submodule returns to Python."""
    if any(map(is_nested, leaves)):
        raise UntraceableError(
            f"{model} returns a nested tensor, and a captured graph returns plain ones.\n"
            "Return its values, x.values(): one row for every position of every document, one document behind another."
        )


def refuse_no_tensors(model: str, does: str, leaves: list[Any]) -> None:
    """Raises UntraceableError if no leaf is a tensor. does: what the model does with the leaves."""
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves))
        others = f", but {kinds}" if kinds else ""
        raise UntraceableError(
            f"{model} {does} no tensors{others}.\n"
            "The cases are counted in its inputs, and the loss is a function of its outputs: both must be tensors, or "
            "tuples, lists or dictionaries of tensors."
        )


def places_of_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that a model holds, under every name. A model may have another method `parameters`."""
    return [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]


def refuse_shadowed_names(model: nn.Module) -> None:
    """Raises UntraceableError for submodules with tensors and with the names of attributes of their class: torch looks
    for submodules by their names, and finds the attributes."""
    shadowed = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, inner in submodules_of(module).items()
        if inner is not None and hasattr(type(module), name) and getattr(module, name) is not inner
        if next(chain(inner.parameters(), inner.buffers()), None) is not None
    ]
    if shadowed:
        raise UntraceableError(
            f"{type(model).__name__} has submodules with the names of attributes of their class, such as methods: "
            f"{', '.join(shadowed)}. So torch does not find their parameters by name.\n"
            f"Give each another name: self.{shadowed[0].split('.')[-1]}_ = ..."
        )


def refuse_hidden_tensors(model: str, leaves: list[Any]) -> None:
    """Raises UntraceableError for objects that hold tensors; torch.export would treat these as constants."""
    hidden = dict.fromkeys(
        type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor) and holds_tensor(leaf)
    )
    if hidden:
        raise UntraceableError(
            f"{model} takes {' and '.join(hidden)}, objects that hold tensors. A captured graph would treat these "
            "tensors as constants.\nPass the tensors as arguments of forward, in tuples, lists or dictionaries, or "
            "register the class with torch.export.register_dataclass. A collections.namedtuple keeps names such as "
            "batch.text."
        )


def holds_tensor(value: Any) -> bool:
    return any(True for _ in tensors_held(value))


def tensors_held(value: Any, depth: int = ARGUMENT_DEPTH) -> Iterator[Tensor]:
    """The tensors of a structure, and those in the attributes of its objects."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            for attribute in results.attributes_of(leaf).values():
                yield from tensors_held(attribute, depth - 1)


def kinds() -> tuple[str, ...]:
    """The kinds of devices that this machine has and that autocast supports."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast() -> Autocast:
    """The kinds of devices for which autocast is on, with its dtypes."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind))


IGNORES_GRAPHS = ContextVar("IGNORES_GRAPHS", default=False)  # whether graphs run without the autocast of their own


def under_autocast(settings: Autocast) -> AbstractContextManager[Any]:
    """Inside, these are on, too, unless the autocast of graphs is ignored."""
    return nullcontext() if not settings or IGNORES_GRAPHS.get() else all_on(settings)


@contextmanager
def all_on(settings: Autocast) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in settings:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


@contextmanager
def ignoring_autocast_of_graphs() -> Iterator[None]:
    """Inside, graphs that have an autocast of their own run under that which is on around them, and no other."""
    before = IGNORES_GRAPHS.set(True)
    try:
        yield
    finally:
        IGNORES_GRAPHS.reset(before)


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec | None]:
    """(the leaves of the arguments of a call, their structure; None: tensors by position, as most calls have)."""
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        return [*args], None
    return pytree.tree_flatten((tuple(args), dict(kwargs)))


def call_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The facts about a call that a capture holds for, except shapes: structure, dtypes, sparse layouts, devices,
    values, which nested tensors have the same lengths, autocast, and the default dtype.

    The contents of a batch that are no tensors are left out: the numbers of arrays, lists of texts, and objects with
    tensors. In a divided model Python reads them, as it reads the values of tensors, so a capture holds for all of a
    kind. A graph takes no objects with tensors, and arrays and texts are among the `constants` that it holds for.
    """
    args, kwargs = tuple(map(texts_by_kind, args)), {name: texts_by_kind(value) for name, value in kwargs.items()}
    leaves, spec = flattened(args, kwargs)
    walk = Walk(identity=False)

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.dtype, leaf.layout, leaf.device, leaf.dim()
        if is_array(leaf):
            return type(leaf), leaf.dtype.str, leaf.ndim
        return type(leaf) if type(leaf) not in ATOMS and holds_tensor(leaf) else walk.of(leaf, named=True)

    kinds = tuple(map(kind, leaves))
    return autocast(), torch.get_default_dtype(), str(spec), kinds, tuple(first_with_offsets(leaves).items())


def texts_by_kind(argument: Any) -> Any:
    """An argument, or `str` for a list of texts."""
    return str if type(argument) in (list, tuple) and argument and set(map(type, argument)) == {str} else argument


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def constants(names: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The values of arguments that are no tensors. names: what forward names; deep in them, it reads no more."""
    walk = Walk(names, identity=False)
    leaves, _ = flattened(args, kwargs)
    return tuple(walk.of(leaf, named=True) for leaf in leaves if not isinstance(leaf, Tensor))


def layouts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """How tensors lie in memory: the order of their dimensions where they are dense, else their strides."""
    return tuple(map(layout, tensors_in(args, kwargs)))


def layout(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.layout
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted((d for d in range(tensor.dim()) if sizes[d] != 1), key=lambda d: strides[d])
    expected = 1
    for d in order:
        if strides[d] != expected:
            return strides
        expected *= sizes[d]
    return tuple(order)


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does, also where gaps are between its elements, or where it is expanded.
    `clone` closes gaps, and writes an expansion out.

    Other elements that overlap are copied apart.
    """
    if tensor.layout is not torch.strided:
        return tensor.clone()
    several = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    extent = 1
    for d in sorted((d for d in several if tensor.stride(d)), key=lambda d: tensor.stride(d)):
        if tensor.stride(d) < extent:
            return tensor.clone()
        extent += (tensor.shape[d] - 1) * tensor.stride(d)
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    written, once = copy, tensor
    for d in several:
        if not tensor.stride(d):
            written, once = written.narrow(d, 0, 1), once.narrow(d, 0, 1)
    written.copy_(once)
    return copy


def trained(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Which tensors need gradients, and which of them are leaves."""
    return tuple((tensor.requires_grad, tensor.is_leaf) for tensor in tensors_in(args, kwargs))


def first_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """The first size of every tensor among the arguments that has dimensions."""
    return [tensor.shape[0] for tensor in tensors_in(args, kwargs) if tensor.dim()]


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors of a call; of a nested one its values and offsets."""
    tensors = (leaf for leaf in flattened(args, kwargs)[0] if isinstance(leaf, Tensor))
    return tuple(part for tensor in tensors for part in plain_parts(tensor))


def first_with_offsets(leaves: list[Any]) -> dict[int, int]:
    """The place of every nested tensor -> that of the first one with the same tensor of offsets."""
    first: dict[int, int] = {}
    return {place: first.setdefault(id(leaf.offsets()), place) for place, leaf in enumerate(leaves) if is_nested(leaf)}


def plain_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor.values(), tensor.offsets()) if tensor.is_nested else (tensor,)  # type: ignore[attr-defined]


def capture_key(
    modules: Iterable[nn.Module], parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`call_key`, and the facts about the model: modes of its modules, dtypes and devices of its parameters."""
    kinds, modes = tuple((p.dtype, p.device) for p in parameters), tuple(module.training for module in modules)
    return hash((modes, kinds)), *call_key(args, kwargs)


@contextmanager
def objects_kept(arguments: Mapping[str, Any]) -> Iterator[list[str]]:
    """Restore at the end what objects in the arguments hold. Tensors and containers are copied where that is needed.

    Yields a list, which is filled at the end with the names of the arguments that were changed.
    """
    walks = {name: Walk(identity=False) for name in arguments}
    for name, argument in arguments.items():
        for leaf in pytree.tree_leaves(argument):
            if not isinstance(leaf, Tensor):
                walks[name].of(leaf, named=True)
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, walk in walks.items():
            changed += [] if walk.same() else [name]
            walk.put_back()


def refuse_drawn(model: str, drawn: list[str]) -> None:
    """Raises UntraceableError if forward drew from these random streams."""
    if drawn:
        raise UntraceableError(
            f"{model} draws random numbers from module {' and module '.join(dict.fromkeys(drawn))}. A captured graph "
            "would repeat the same numbers.\nDraw them with torch, or pass them as inputs."
        )


# --- a signature of tensors only --------------------------------------------------------------------------------------

PREFIX = "model."


@dataclass
class Returned:
    """The values that a traced forward leaves beside its tensors.

    torch.export restores attributes of `FlatModel`, but not of this object.

    Attributes:
        spec: the structure of the outputs.
        left_out: position -> class of the outputs that no graph computes.
        drawn: the random streams of Python that forward draws from.
        assigned: the attributes that forward sets.
        observer: of the functions that forward runs.
        leaves: all outputs.
        told: see `passes.tracing.substitutes.recurrent_layers`.
        nested: which outputs are the values of nested tensors.
        asking: which outputs are no results of operations and require a gradient.
    """

    spec: results.TreeSpec | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    assigned: list[str] = field(default_factory=list)
    observer: Observer = field(default_factory=Observer)
    leaves: list[Any] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    nested: list[int] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)


class FlatModel(nn.Module):
    """The model with plain tensors as its only inputs and outputs; all other arguments are constants. Behind its
    outputs are the offsets of those that are nested.

    whole: see `refuse_nested`.
    """

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, whole: bool = True) -> None:
        super().__init__()
        self.model, self.whole = model, whole
        self.originals = places_of_parameters(model)  # in a plain list: torch.export puts other tensors into the model
        self.nested = first_with_offsets(leaves)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.spec = spec
        self.returned = Returned()

    def forward(self, *tensors: Tensor) -> Any:
        leaves: list[Any] = list(self.leaves)
        parts, offsets = iter(tensors), dict[int, Tensor]()
        for position in self.positions:
            leaves[position] = next(parts)
            if position in self.nested:  # tensors of the same lengths have one tensor of offsets, as torch wants
                shared = offsets.setdefault(self.nested[position], next(parts))
                leaves[position] = nested_tensor_from_jagged(leaves[position], shared)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        held = [(owner, name, buffer) for owner in self.model.modules() for name, buffer in buffers_of(owner).items()]
        with untouched(self.model) as assigned, objects_kept({"": (args, kwargs)}):
            elsewhere = EverywhereElse(self.originals, places_of_parameters(self.model))
            with python_random() as drawn, self.returned.observer.observing(), elsewhere:
                result = self.model(*args, **kwargs)
            for owner, name, buffer in held:  # torch.export overlooks assignments to buffers of submodules
                value = buffers_of(owner)[name]
                if value is not buffer and value is not None and buffer is not None and value.shape == buffer.shape:
                    buffers_of(owner)[name] = buffer.copy_(value)
        self.returned.drawn += drawn
        self.returned.assigned += assigned
        given, _ = results.tree_flatten(result, plain=False)
        if not self.whole:
            refuse_nested_outputs(type(self.model).__name__, given)
        returned, self.returned.spec = results.tree_flatten(result)
        outputs, self.returned.left_out = without_objects(returned)
        self.returned.leaves = returned
        self.returned.asking = [
            place for place, leaf in enumerate(returned)
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
        ]  # fmt: skip
        self.returned.nested = [place for place, leaf in enumerate(given) if is_nested(leaf)]
        return [*outputs, *(given[place].offsets() for place in self.returned.nested)]

    def unflatten(self, output: Any) -> Any:
        """The outputs of this module's graph, in the structure that the model returns, with values for nested ones."""
        assert self.returned.spec is not None, "bug in kfac_fx: a graph of a forward that did not return"
        leaves = list(output)[: self.returned.spec.num_leaves]
        return results.tree_unflatten(with_objects(leaves, self.returned.left_out), self.returned.spec)

    def as_returned(self, output: Any) -> Any:
        """`unflatten` with the nested tensors that the model returns."""
        leaves, number = list(output), len(list(output)) - len(self.returned.nested)
        for place, offsets in zip(self.returned.nested, leaves[number:], strict=True):
            leaves[place] = nested_tensor_from_jagged(leaves[place], offsets)
        return self.unflatten(leaves)


def flat_graph(module: fx.GraphModule, names: list[str], model: nn.Module) -> tuple[fx.Graph, nn.Module]:
    """Copy the exported graph without guards and without the wrapper's prefix; the names are the model's.

    A tensor of the model that forward reads from a container of its own, as `self.weights["w"]`, is a constant of
    torch.export, which has the memory of the tensor. It gets the tensor's name.
    """
    graph, placeholders = fx.Graph(), iter(names)
    tensors = own_tensors(model)
    held: dict[str, Any] = {}

    def write(node: fx.Node) -> fx.Node | None:
        if node.op == "placeholder":
            name = next(placeholders)
            copy = graph.create_node("placeholder", name, name=name)
        elif node.op == "get_attr":
            target, value = str(node.target).removeprefix(PREFIX), attribute(module, str(node.target))
            if target not in tensors and isinstance(value, Tensor):
                same = next((name for name, tensor in tensors.items() if same_memory(value, tensor)), target)
                target, value = same, tensors.get(same, value)
            held[target] = value
            copy = graph.get_attr(target)
        else:
            return None
        copy.meta = dict(node.meta)
        return copy

    copy_nodes((node for node in module.graph.nodes if node.op != "call_module" or node.target != GUARDS), graph, write)
    return graph, holder(held)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are one memory in one layout."""
    plain = all(
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided for tensor in (a, b)
    )
    return plain and a.numel() > 0 and a.dtype == b.dtype and a.device == b.device and a.is_set_to(b)


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call with their names. Raises UntraceableError if they do not fit forward."""
    signature = signature_of(model)
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
            named += [(f"{name}_{i}", element) for i, element in enumerate(value)]
        else:
            named.append((name, value))
    return named


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every tensor leaf: the argument's name, with a number if the argument holds several tensors."""
    named = named_arguments(model, args, kwargs)
    order = {id(leaf): name for name, value in named for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    names: list[str] = []
    for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, Tensor):
            base = order.get(id(leaf), "x")
            names.append(base if base not in names else f"{base}_{len(names)}")
            names += [f"{names[-1]}_offsets"] if leaf.is_nested else []
    return names
