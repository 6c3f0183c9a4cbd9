"""Capture: a module and, if given, example inputs -> a flat Program over the module's own parameters.

With inputs: `torch.export`, non-strict, every dimension of every tensor input dynamic where the model allows it; what
is not a tensor is part of the capture's key. Without: `torch.fx.symbolic_trace`, for models that are plain Python.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from . import pytree
from .errors import UntraceableError
from .holder import attribute, holder
from .ir import Options, Program

PREFIX = "model."
CHECKED_INPUTS = (  # their forward branches on the rank of the input, which has none under symbolic tracing
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
# What torch says of its own nn.LSTM, nn.GRU and nn.RNN, whose list of weights is put back after the capture.
RECURRENT = r"The tensor attributes (self\.[\w.]+\._flat_weights\[\d+\](, )?)+ were assigned during export"


@dataclass(frozen=True)
class Capture:
    """A Program with its calling convention.

    flatten: (args, kwargs) -> the values of the graph's placeholders, in order.
    unflatten: the value of the graph's output node -> what the model returns.
    holds: whether the capture is valid for these placeholder values (shape guards).
    """

    program: Program
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
    unflatten: Callable[[Any], Any]
    holds: Callable[[tuple[Any, ...]], bool]


def capture(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    layers: Mapping[str, Any] | None = None,
) -> Capture:
    """Trace `model`. Raises UntraceableError, naming the module and the line where torch gave up."""
    options, layers = options or Options(), layers or {}
    if args is None and not kwargs:
        return symbolic(model, options, layers)
    return exported(model, args or (), kwargs or {}, options, layers)


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


class _Flat(nn.Module):
    """The model behind a signature of tensors only; everything else is baked in."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.spec = spec

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.unflatten(leaves, self.spec)
        return self.model(*args, **kwargs)


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options, layers: Mapping[str, Any]
) -> Capture:
    leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
    flat = _Flat(model, leaves, spec)
    flat.training = model.training  # its own flag only: submodules may be in other modes
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    # A size of 1 is static: torch specializes it anyway, and says so on stderr.
    shapes = tuple({d: Dim.AUTO for d, size in enumerate(t.shape) if size > 1} for t in tensors)
    names = input_names(model, args, kwargs)
    with custom_functions() as custom:
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=RECURRENT)
                program = torch.export.export(flat, tensors, dynamic_shapes={"tensors": shapes}, strict=False)
        except Exception as error:
            raise UntraceableError(untraceable(model, error)) from error
    if custom:
        raise UntraceableError(
            f"{type(model).__name__} uses {', '.join(sorted(custom))}, an autograd.Function with its own backward, "
            "which the graph would differentiate differently.\n"
            "Write it with ordinary operations, or register it with torch.library.custom_op and register_autograd."
        )
    module = program.module()
    guards = getattr(module, "_guards_fn", None)
    graph, root = flat_graph(module, names)
    out_spec = module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]  # no public accessor

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(leaf for leaf in pytree.leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor))

    def holds(values: tuple[Any, ...]) -> bool:
        if guards is None:
            return True
        try:
            guards(*values)
        except AssertionError:
            return False
        return True

    parameters, aliases = named_parameters(model)
    captured = Program(graph, root, parameters, aliases, options, layers)
    return Capture(captured, bind, lambda output: pytree.unflatten(list(output), out_spec), holds)


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


class _Tracer(fx.Tracer):
    """Traces into torch's own modules, so that one spelling of an operation is left; buffers stay visible."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True  # errors and the report name the user's line

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, CHECKED_INPUTS)


def symbolic(model: nn.Module, options: Options, layers: Mapping[str, Any]) -> Capture:
    signature = inspect.signature(model.forward)
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise UntraceableError(untraceable(model, error)) from error
    names = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in names)

    parameters, aliases = named_parameters(model)
    program = Program(graph, model, parameters, aliases, options, layers)
    return Capture(program, bind, lambda output: output, lambda values: True)


def untraceable(model: nn.Module, error: Exception) -> str:
    """What failed and where: the innermost line of the traceback that is not torch's own."""
    place, frame = "", error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        owner = frame.tb_frame.f_locals.get("self")
        if "/torch/" not in path and isinstance(owner, nn.Module) and not isinstance(owner, _Flat):
            name = next((n for n, m in model.named_modules() if m is owner), "")
            place = f" in {name or type(owner).__name__} ({path.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
        frame = frame.tb_next
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{type(model).__name__} could not be captured as a graph{place}: {first}\n"
        "Replace what depends on the values of tensors (if, while, .item()) by tensor operations such as torch.where."
    )


@contextmanager
def custom_functions() -> Any:
    """Names of the autograd.Functions applied inside: their own backward would be lost without a word."""
    seen: set[str] = set()
    original = torch.autograd.Function.__dict__["apply"]

    def spy(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__name__.startswith("GeneratedBackwardFor_"):  # torch.library operators, differentiated correctly
            seen.add(cls.__name__)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(spy)  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
