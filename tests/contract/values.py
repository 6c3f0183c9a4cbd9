"""The values of all nodes of a Program's graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from kfac_fx.passes.ir import Program
from kfac_fx.passes.parametrization import Value


class Values(fx.Interpreter):
    """Runs the graph and keeps what every node computed."""

    def __init__(self, program: Program) -> None:
        super().__init__(fx.GraphModule(program.root, program.graph))
        self.value: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.value[n.name] = super().run_node(n)
        return self.value[n.name]

    def of(self, value: Value) -> Any:
        """The value of a node, or of what `rewrite` computes from nodes."""
        if isinstance(value, fx.Node):
            return self.value[value.name]
        return value.function(*fx.map_arg(value.arguments, lambda node: self.value[node.name]))
