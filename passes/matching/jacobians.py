"""Small parameters whose use is a function of them: any function, given by its Jacobian at the time of recording.

    λ = exp(Σ q1 k1) - exp(Σ q2 k2) + c,  y = x λ        DIFF Transformer (Ye et al. 2024)
    softmax(w)[i] * x                                    one of several branches

With d_n the gradient of a case for the tensor T(p) in the use, Jᵀ d_n is that for p, exactly: the block is made of the
gradients of cases. J is computed beside the use, once in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graphs.inplace import memory
from ..graphs.labels import Label, everything_behind, parameters_behind
from ..graphs.operations import changes_memory, is_random, op_name
from ..ir import Program
from ..matrix import Layout, Shape
from ..words.pieces import Made, Slope, slab_of, whole
from ..words.slopes import JACOBIAN

LARGEST = 1 << 20  # elements of a Jacobian
KEY = "jacobian"  # in the meta of its node: (the function, which of its arguments)


def small_functions(
    program: Program, label: Mapping[fx.Node, Label], nodes: Iterable[fx.Node], in_pieces: AbstractSet[str]
) -> dict[fx.Node, Made]:
    """Those of the nodes that are functions of parameters and constants alone, and small, as expressions: a slab for
    every parameter, all of it; not where other uses have one of them in pieces."""
    found: dict[fx.Node, Made] = {}
    for node in nodes:
        shape = static_shape(node)
        sizes = {name: tuple(program.parameters[name].shape) for name in sorted(parameters_behind(node, label))}
        if shape is None or not all(0 < math.prod((*shape, *own)) <= LARGEST for own in sizes.values()):
            continue
        if in_pieces.isdisjoint(sizes) and node.meta["val"].is_floating_point() and is_function(node):
            slopes = {name: Slope(JACOBIAN, node, Layout(own)) for name, own in sizes.items()}
            slabs = [slab_of(name, whole(own), slopes=(slopes[name],)) for name, own in sizes.items()]
            found[node] = Made(shape, tuple(slabs))
    return found


def by_jacobian(made: Made) -> bool:
    return any(one.name == JACOBIAN for slab in made.slabs for one in slab.slopes)


def static_shape(node: fx.Node) -> Shape | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def is_function(node: fx.Node) -> bool:
    """Whether nothing but parameters and constants goes into it, and nothing but its value comes out: what is written
    in place is memory that is made on the way, and made again where the function is run. Inside of torch.func.vmap a
    function has a value for every one that is mapped over, and no Jacobian of its own."""
    inside = [one for one in behind(node) if one.op != "get_attr"]
    plain = all(one.op in ("call_function", "call_method") for one in inside)
    return plain and not any(
        is_random(one)
        or op_name(one).startswith(("wrap_with", "_add_batch_dim"))
        or (changes_memory(one) and memory(one).op == "get_attr")
        for one in inside
    )


def behind(node: fx.Node) -> list[fx.Node]:
    """The node and all that it is computed from, in graph order."""
    return sorted(everything_behind([node]))  # nodes compare by their places


def jacobian_of(node: fx.Node, parameter: str) -> fx.Node:
    """A node of the Jacobian, [elements of the node's tensor, elements of the parameter]."""
    leaves = [one for one in behind(node) if one.op == "get_attr"]
    number = next(n for n, one in enumerate(leaves) if one.target == parameter)
    with node.graph.inserting_after(node):
        made = node.graph.call_function(jacobian, tuple(leaves))
    made.meta = {KEY: (function_of(node), number)}
    return made


def jacobian(*leaves: Tensor) -> Tensor:
    """Stands for a Jacobian until the module is emitted, which gets a `Jacobian` in its place."""
    raise AssertionError("bug in kfac_fx: a Jacobian in a graph that was not emitted")


def function_of(node: fx.Node) -> fx.GraphModule:
    """Of the leaves behind a node, in graph order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for n, one in enumerate(leaf for leaf in behind(node) if leaf.op == "get_attr"):
        copies[one] = graph.placeholder(f"leaf_{n}")
    for one in behind(node):
        if one not in copies:
            copies[one] = graph.node_copy(one, lambda other: copies[other])
    graph.output(copies[node])
    return fx.GraphModule(nn.Module(), graph)


class Jacobian(nn.Module):
    """Of a function by one of its arguments, row by row of its value."""

    def __init__(self, function: nn.Module, number: int) -> None:
        super().__init__()
        self.function, self.number = function, number

    def forward(self, *leaves: Tensor) -> Tensor:
        fixed = [leaf.detach() for leaf in leaves]
        at = fixed[self.number]

        def value(changed: Tensor) -> Any:
            return self.function(*fixed[: self.number], changed, *fixed[self.number + 1 :]).reshape(-1)

        if torch.compiler.is_compiling():  # autograd's own function cannot be compiled
            found: Tensor = torch.func.jacrev(value)(at).flatten(1)
            return found.detach()
        with torch.enable_grad():  # torch.func refuses to run where hooks look at what is saved for a backward
            result = value(at.requires_grad_())
            rows = torch.eye(result.numel(), dtype=result.dtype, device=result.device)
            (rowwise,) = torch.autograd.grad(result, at, rows, is_grads_batched=True, materialize_grads=True)
        return rowwise.flatten(1)
