"""Recurrent layers as torch computes them, in graphs that are evaluated and neither recorded nor differentiated.

    recurrent("lstm", x, [h, c], weights, ...)  ->  run_layers("lstm", x, [h, c], weights, ...), which calls torch.lstm

`unroll` writes a node for every operation of every step, because a weight has a use in each. An evaluation needs no
uses, and a kernel of torch takes a part of the time. Packed sequences stay packed.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import fx

from .graphs.operations import op_name
from .ir import Program
from .tracing.kernels import STACK_OF_LAYERS, compute, run_layers


def as_kernels(program: Program) -> Program:
    """Let the operations of `tracing.substitutes` that stand for recurrent layers and packed sequences compute."""
    program = program.copied()
    compute(program.graph)
    return program


def recurrent_stacks(graph: fx.Graph) -> list[fx.Node]:
    """The stacks of recurrent layers in a captured graph, or in one `as_kernels`."""
    return [node for node in graph.nodes if op_name(node) in (STACK_OF_LAYERS, run_layers.__name__)]


def lengths_of(stack: fx.Node) -> fx.Node | None:
    """The node of the lengths of packed sequences."""
    lengths: fx.Node | None = argument(stack, "lengths")
    return lengths


def draws_noise(stack: fx.Node) -> bool:
    """Whether there is dropout between the layers of a stack."""
    return bool(argument(stack, "dropout"))


def argument(stack: fx.Node, name: str) -> Any:
    return signature(run_layers).bind(*stack.args).arguments[name]
