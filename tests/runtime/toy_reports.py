"""Programs made by hand, for reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kfac_fx.passes.ir import Bound, Options, PassRecord, Program, Registration, Use
from kfac_fx.passes.matrix import Layout


class Small(nn.Module):
    """Every kind of row: kronecker, per channel, full and linked, several uses, generic."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.dw = nn.Conv2d(16, 16, 3, groups=16)
        self.pw = nn.Conv2d(16, 32, 1)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.stem.weight, self.stem.bias)
        x = F.conv2d(x, self.dw.weight, self.dw.bias, groups=16)
        x = F.conv2d(x, self.pw.weight, self.pw.bias).mean((2, 3))
        x = F.layer_norm(x, (32,)) * self.norm.weight + self.norm.bias
        scores = [F.linear(part, self.head.weight, self.head.bias) for part in (x, -x, 2 * x)]
        return (scores[0] + scores[1] + scores[2]) * torch.exp(self.temperature)


LAYOUTS: Mapping[str, tuple[str, str]] = {
    "conv2d": ("o i h w -> 1 o (i h w)", "o -> 1 o"),
    "depthwise_conv2d": ("g o h w -> g o (h w)", "g -> g 1"),
    "scale_and_shift": ("g -> g 1 1", "g -> g 1"),
    "linear": ("o i -> 1 o i", "o -> 1 o"),
    "embedding": ("i o -> 1 o i", ""),
}


def use_of(layer: str, node: fx.Node, parameters: Mapping[str, tuple[str, Tensor]]) -> Use:
    bound = {}
    for (role, (name, value)), pattern in zip(parameters.items(), LAYOUTS[layer], strict=False):
        stored = Layout(tuple(value.shape))
        bound[role] = Bound(name, stored, stored.rearrange(pattern))
    return Use(layer, 0, node.all_input_nodes[0], node, bound, {}, frozenset({node}))


def registration_of(
    program: Program, layer: str, parameters: tuple[str, ...], outputs: tuple[str, ...], approximation: str = "kron"
) -> Registration:
    nodes = {node.name: node for node in program.graph.nodes}
    roles = {role: (name, program.parameters[name]) for role, name in zip(("weight", "bias"), parameters, strict=False)}
    uses = tuple(use_of(layer, nodes[output], roles) for output in outputs)
    return Registration(layer, uses[0].matrix, parameters, uses, approximation)


def traced(model: nn.Module, **known: Any) -> Program:
    module = fx.symbolic_trace(model)
    parameters = dict(model.named_parameters())
    return Program(module.graph, module, parameters, {name: name for name in parameters}, **known)


def small_program() -> Program:
    program = traced(Small(), options=Options(linked={frozenset({"norm.weight", "norm.bias"}): "full"}))
    generic = Registration(
        "generic", None, ("temperature",), (), "diagonal", "no layer has the form of mul_2 (model.py:41)"
    )
    return program.but(
        registrations=(
            registration_of(program, "conv2d", ("stem.weight", "stem.bias"), ("conv2d",)),
            registration_of(program, "depthwise_conv2d", ("dw.weight", "dw.bias"), ("conv2d_1",)),
            registration_of(program, "conv2d", ("pw.weight", "pw.bias"), ("conv2d_2",)),
            registration_of(program, "scale_and_shift", ("norm.weight", "norm.bias"), ("add",), "full"),
            registration_of(program, "linear", ("head.weight", "head.bias"), ("linear", "linear_1", "linear_2")),
            generic,
        ),
        history=(
            PassRecord("trace", 61, "", 0.25),
            PassRecord("match", 58, "7 uses", 0.5),
            PassRecord("rewrite", 72, "7 taps", 0.125),
        ),
    )
