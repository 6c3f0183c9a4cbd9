"""Capture of forwards that take derivatives of a network by its inputs, with torch.autograd.grad or torch.func.

torch.export captures forward above autograd. Here the model is traced below autograd, so that its derivatives are
ordinary operations that contain uses of the parameters:

    u = linear(x, w)                                        u = matmul(x, w.t())
    (du,) = torch.autograd.grad(u.sum(), x, ...)            du = matmul(ones, w)

The graph can be differentiated again. The trace has no symbolic sizes, so a capture holds for the sizes of the example.
In such a trace autograd detaches the tensors that it saves. These detachments are removed; forward's own are marked and
stay.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..errors import fatal
from ..graphs.edit import attribute, holder
from ..graphs.operations import SIZED_BY_CASES, op_name
from ..ir import Copies, copy_nodes
from ..torch_private import ADD_BATCH_DIM, REMOVE_BATCH_DIM, UNSAFE_VIEW, VMAP, differentiates, make_fx, pytree
from .calls import map_tensors, without_trace

DETACH, MARKED = torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default
RESHAPED = {"view", UNSAFE_VIEW, "reshape", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "alias"}
STOPS = {torch.detach, Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]  # they stop gradients


def maps_parameters(module: fx.GraphModule) -> bool:
    """Whether trained parameters enter operations inside of torch.func.vmap, as those of a network that is mapped over
    the cases. torch.export writes the region without the mapping, so it cannot run with taps, or at other sizes."""
    inside: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in module.graph.nodes:
        operands, name = node.all_input_nodes, op_name(node)
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            trained |= {node} if isinstance(value, nn.Parameter) and value.requires_grad else set()
        elif not trained.isdisjoint(operands):
            trained.add(node)
        if name == ADD_BATCH_DIM or (name != REMOVE_BATCH_DIM and not inside.isdisjoint(operands)):
            inside.add(node)
            if node in trained:
                return True
    return False


def takes_derivatives(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether forward calls torch.autograd.grad, a function of torch.func that differentiates, or torch.func.vmap.

    It runs once, without a trace. False if it fails.
    """
    seen: set[bool] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (differentiates(frame.f_code) or frame.f_code is VMAP):
            seen.add(True)

    before = sys.getprofile()
    try:
        with without_trace(model), forward_mode():
            sys.setprofile(look)
            model(*map_tensors(Tensor.clone, tuple(tensors)))
    except Exception as error:
        if fatal(error):
            raise
        return False  # the caller reports the failure of its own run
    finally:
        sys.setprofile(before)
    return bool(seen)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Inside, torch does not warn about its own use of torch.jit.script, which loads the forward-mode formulas."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        yield


class Marked(TorchFunctionMode):
    """Follows every detachment that forward makes by `detach_copy`, an operation that autograd itself never writes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stops = func in STOPS or not torch.is_grad_enabled()
        stops |= func is torch.autograd.grad and not (kwargs or {}).get("create_graph", False)
        result = func(*args, **(kwargs or {}))
        return map_tensors(marked, result) if stops else result


def marked(value: Tensor) -> Tensor:
    return torch.detach_copy(value.detach()) if value.is_floating_point() or value.is_complex() else value


def traced_below_autograd(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[fx.GraphModule, Callable[..., None]]:
    """Trace a model below autograd.

    Returns:
        A module like those of torch.export, with the model's tensors as attributes; and a function of the inputs that
        raises AssertionError if their sizes differ from the example's.

    Raises:
        Exception: torch's own, if the model cannot be traced.
    """
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sizes = [tensor.shape for tensor in tensors]
    module = traced(model, held, tensors)
    note_sizes(module, lambda inputs: traced(model, held, inputs), tensors)

    def guards(*values: Tensor) -> None:
        if [value.shape for value in values] != sizes:
            raise AssertionError(f"captured for inputs of sizes {sizes}")

    return below_autograd(module, held), guards


def traced(model: nn.Module, held: dict[str, Tensor], tensors: Sequence[Tensor]) -> fx.GraphModule:
    def forward(held: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Any:
        with Marked():
            return functional_call(model, held, tensors)

    with torch.enable_grad(), forward_mode():  # forward mode fails with symbolic sizes, hence "fake"
        return make_fx(forward, tracing_mode="fake", record_stack_traces=True)(held, tuple(tensors))


def note_sizes(
    module: fx.GraphModule, again: Callable[[Sequence[Tensor]], fx.GraphModule], tensors: Sequence[Tensor]
) -> None:
    """Mark the nodes whose size depends on the number of cases: it changes in a trace with one case more."""
    cases = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    for grows in (lambda t: t.dim() > 0, lambda t: t.shape[:1] == (cases,)):
        try:
            other = again([torch.cat([t, t[:1]]) if grows(t) else t for t in tensors])  # type: ignore[no-untyped-call]
        except Exception as error:
            if fatal(error):
                raise
            continue  # the first dimension of some inputs may not count cases
        pairs = list(zip(module.graph.nodes, other.graph.nodes, strict=False))
        if len(module.graph.nodes) == len(other.graph.nodes) and all(a.target == b.target for a, b in pairs):
            for node, twin in pairs:
                node.meta[SIZED_BY_CASES] = shape(node) != shape(twin)
            return


def below_autograd(module: fx.GraphModule, held: Mapping[str, Any]) -> fx.GraphModule:
    """The module with attributes in the place of its first inputs, without autograd's own detachments and sizes."""
    graph, copies = fx.Graph(), Copies()
    waiting, held = iter(held), dict(held)

    def write(node: fx.Node) -> fx.Node | None:
        name = next(waiting, None) if node.op == "placeholder" else None
        if name is not None:
            copy = graph.get_attr(name)
        elif node.op == "get_attr":
            held[str(node.target)] = attribute(module, str(node.target))
            copy = graph.get_attr(str(node.target))
        elif node.target is DETACH or unchanged(node):
            return copies[unchanged(node) or node.all_input_nodes[0]]
        elif node.op == "output":
            copy = graph.output([copies.get(leaf, leaf) for leaf in pytree.tree_leaves(node.args[0])])
        else:
            return None
        copy.meta = {key: node.meta[key] for key in ("stack_trace", SIZED_BY_CASES) if key in node.meta}
        return copy

    for node, copy in copy_nodes(module.graph.nodes, graph, write, copies).items():
        if node.target is MARKED:
            copy.target = DETACH
    return fx.GraphModule(holder(held), graph)


def unchanged(node: fx.Node) -> fx.Node | None:
    """The node that `node` is a view of with the same shape, if any; torch.func.vmap writes such views."""
    source = node
    while op_name(source) in RESHAPED:
        (source,) = source.all_input_nodes
        if shape(source) == shape(node):
            return source
    return None


def shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""
