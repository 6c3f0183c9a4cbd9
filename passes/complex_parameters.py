"""Complex parameters: the compiler and the runtime have the real and imaginary parts instead, as torch's optimizers do.

    y = einsum("bix,iox->box", x, w)        ->   y = einsum("bix,iox->box", x, view_as_complex(w))    w [i, o, x, 2]

The parts lie in the memory of the parameter, and their gradient is that of the parameter as real numbers. So a Fisher
is that of the parts, and a layer of complex numbers is one of real numbers (`parametrization.Complex`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

from .graphs.edit import attribute, holder
from .matrix import real_numbers

T = TypeVar("T")


class RealParts(nn.Parameter):
    """The real and imaginary parts of a complex parameter, in its memory. of: the parameter."""

    of: nn.Parameter


def real_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or the real and imaginary parts of a complex one."""
    if not parameter.is_complex():
        return parameter
    parts = RealParts(real_numbers(parameter.detach()), requires_grad=parameter.requires_grad)
    parts.of = parameter
    return parts


def original(parameter: T) -> T | nn.Parameter:
    """The inverse of `real_parameter`: the parameter that the model holds. Other objects stay as they are."""
    return parameter.of if isinstance(parameter, RealParts) else parameter


def with_real_parts(graph: fx.Graph, root: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Let the graph read the real and imaginary parts of complex parameters; writes into it.

    parameters: those of the model, by all their names.

    Returns the module that the graph then reads.
    """
    read = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    held = {str(node.target): attribute(root, str(node.target)) for node in read}
    parts = {name: real_parameter(parameters[name]) for name in held if name in parameters}
    if all(parts[name] is parameters[name] for name in parts):
        return root
    for node in read:
        name, value = str(node.target), node.meta.get("val")
        if name not in parts or parts[name] is parameters[name]:
            continue
        with graph.inserting_after(node):
            numbers = graph.call_function(torch.view_as_complex, (node,))
        node.replace_all_uses_with(numbers, delete_user_cb=lambda user, numbers=numbers: user is not numbers)
        numbers.meta = dict(node.meta)
        if isinstance(value, Tensor):
            node.meta = {**node.meta, "val": torch.view_as_real(value)}
    return holder({**held, **parts})
