"""Capture: a module and, if given, example inputs -> a flat Program over the module's own parameters.

With inputs: `torch.export`, non-strict, every dimension of every tensor input dynamic where the model allows it; what
is not a tensor is part of the capture's key. Without: `torch.fx.symbolic_trace`, for models that are plain Python.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from . import pytree
from .border import python_random, refuse_drawn, refuse_hidden_tensors, with_left_out, without_objects
from .errors import UntraceableError
from .holder import attribute, holder
from .ir import Options, Program
from .recurrent import packs_in, recurrent_layers, refuse_packed
from .symbolic import symbolic_trace
from .watch import backward_hooks, cumulative_averages, custom_functions, quiet, refuse_custom, untouched, untraceable

PREFIX = "model."
IMAGE = 4  # dimensions of a batch of images; those of videos are more
ASSIGNED = r"The tensor attributes? .* assigned during export"  # torch's words; `untouched` sees it, too


@dataclass(frozen=True)
class Capture:
    """A Program with its calling convention.

    flatten: (args, kwargs) -> the values of the graph's placeholders, in order.
    unflatten: the value of the graph's output node -> what the model returns.
    holds: whether the capture is valid for these (args, kwargs): shape guards, values that were baked in.
    effects: what forward does that the graph does not, as in "sets memory.last".
    """

    program: Program
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
    unflatten: Callable[[Any], Any]
    holds: Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
    effects: tuple[str, ...] = ()


def capture(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    layers: Mapping[str, Any] | None = None,
    every_size: bool = True,
) -> Capture:
    """Trace `model`. Raises UntraceableError, naming the module and the line where torch gave up.

    every_size: also for images of other heights and widths, which takes torch.export several times as long.
    """
    options, layers = options or Options(), layers or {}
    if args is None and not kwargs:
        return by_fx(model, options, layers)
    return exported(model, args or (), kwargs or {}, options, layers, every_size)


def by_fx(model: nn.Module, options: Options, layers: Mapping[str, Any]) -> Capture:
    """Arguments with defaults are taken to be left out: nobody gave others."""
    traced = symbolic_trace(model)
    parameters, aliases = named_parameters(model)
    program = Program(traced.graph, traced.root, parameters, aliases, options, layers)
    return Capture(program, traced.flatten, lambda output: output, traced.holds, traced.effects)


def named_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Trainable parameters by canonical name, and every alias -> canonical name; one entry for one object."""
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        canonical = first.setdefault(id(parameter), name)
        parameters.setdefault(canonical, parameter)
        aliases[name] = canonical
    return parameters, aliases


@dataclass
class _Returned:
    """What a traced forward told beside its tensors; an object of its own, for torch.export puts attributes back."""

    spec: pytree.TreeSpec | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)


class _Flat(nn.Module):
    """The model behind a signature of tensors only; everything else is baked in."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.spec = spec
        self.returned = _Returned()

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.unflatten(leaves, self.spec)
        held = [(owner, name, buffer) for owner in self.model.modules() for name, buffer in owner._buffers.items()]
        with python_random() as drawn:
            result = self.model(*args, **kwargs)
        self.returned.drawn += drawn
        for owner, name, buffer in held:  # a buffer that was assigned, which torch.export overlooks in submodules
            value = owner._buffers[name]
            if value is not buffer and value is not None and buffer is not None and value.shape == buffer.shape:
                owner._buffers[name] = buffer.copy_(value)
        returned, self.returned.spec = pytree.flatten(result)
        kept, self.returned.left_out = without_objects(returned)
        return kept


def exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    layers: Mapping[str, Any],
    every_size: bool,
    longest: Sequence[int] = (),
) -> Capture:
    """longest: see `recurrent_layers`."""
    refuse_packed(type(model).__name__, (args, kwargs))
    leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
    refuse_hidden_tensors(type(model).__name__, leaves)
    flat = _Flat(model, leaves, spec)
    flat.training = model.training  # its own flag only: submodules may be in other modes
    # Of a view torch.export would keep guards on what it is a view of, which the next batch need not be.
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors = tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in given)
    # A size of 1 is static: torch specializes it anyway, and says so on stderr.
    free = [t.dim() if every_size or t.dim() < IMAGE else 2 for t in tensors]
    shapes = tuple({d: Dim.AUTO for d in range(n) if t.shape[d] > 1} for t, n in zip(tensors, free, strict=True))
    names = input_names(model, args, kwargs)
    with untouched(model) as assigned, custom_functions() as custom, quiet():
        averages = cumulative_averages(model)
        try:
            with torch.enable_grad(), recurrent_layers(longest), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=ASSIGNED)
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                dynamic = {"tensors": shapes} if tensors else {}
                program = torch.export.export(flat, tensors, dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            refuse_custom(model, custom)
            raise UntraceableError(untraceable(model, error)) from error
    refuse_custom(model, custom)
    refuse_drawn(type(model).__name__, flat.returned.drawn)
    module = program.module()
    guards = getattr(module, "_guards_fn", None)
    graph, root = flat_graph(module, names)

    def unflatten(output: Any) -> Any:
        assert flat.returned.spec is not None, "bug in kfac_fx: a graph of a forward that did not return"
        return pytree.unflatten(with_left_out(list(output), flat.returned.left_out), flat.returned.spec)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(leaf for leaf in pytree.leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor))

    packs = packs_in(graph, root)
    if packs is not None and (seen := packs.longest(bind(args, kwargs))) != packs.steps:
        return exported(model, args, kwargs, options, layers, every_size, seen)

    def holds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = bind(args, kwargs)
        try:
            if guards is not None:
                guards(*values)
        except AssertionError:
            return False
        return packs is None or packs.longest(values) == packs.steps

    parameters, aliases = named_parameters(model)
    captured = Program(graph, root, parameters, aliases, options, layers)
    returned = (f"returns a {kind}" for kind in flat.returned.left_out.values())
    effects = (*(f"sets {name}" for name in assigned), *averages, *backward_hooks(model), *returned)
    return Capture(captured, bind, unflatten, holds, effects)


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
