"""Tiny models for tests of single passes, and graphs as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS, collect
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.trace import trace_model

NAMES = [step.__name__ for step in PIPELINE]


class Toy(nn.Module):
    """`function(*inputs, **parameters)`; parameters are given by their shapes.

    It lies outside of the library, so that the lines of its forward are those of a user.
    """

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})


def before(name: str, model: nn.Module, *inputs: Any, **options: Any) -> Program:
    """The program that the pass `name` of the library's own pipeline is given; captured with `inputs`, or traced
    symbolically without.

    `layers` among the options: declared besides those of the library.
    """
    layers = collect(*LAYERS.values(), *options.pop("layers", ()))
    options.setdefault("loss_given", True)
    paths = model.named_modules(remove_duplicate=False)
    options.setdefault("modules", {path: type(module) for path, module in paths if path})
    traced = trace_model(model, inputs or None, options=Options(**options), layers=layers)
    return run(traced.program, PIPELINE[: NAMES.index(name)])


def node(program: Program | fx.Graph, name: str) -> fx.Node:
    graph = program.graph if isinstance(program, Program) else program
    return next(node for node in graph.nodes if node.name == name)


def code(program: Program | fx.Graph) -> list[str]:
    """One line an operation: what fx prints, without inputs, attributes and the output."""
    graph = program.graph if isinstance(program, Program) else program
    return [line(node) for node in graph.nodes if node.op.startswith("call")]


def line(one: fx.Node) -> str:
    keywords = [f"{key}={value}" for key, value in one.kwargs.items()]
    operation = one.target if one.op == "call_module" else op_name(one)
    return f"{one.name} = {operation}({', '.join([*map(str, one.args), *keywords])})"


def found(program: Program) -> list[tuple[str, tuple[str, ...], int]]:
    """(layer, parameters, number of uses) of every registration."""
    return [
        (registration.layer, registration.parameters, len(registration.uses)) for registration in program.registrations
    ]


def uses(program: Program) -> list[str]:
    """`linear(w, b): x -> linear_1` of every match."""
    return [f"{match}: {match.input} -> {match.output}" for match in program.matches]


def approximations(program: Program) -> dict[Sequence[str], str]:
    return {registration.parameters: registration.approximation for registration in program.registrations}
