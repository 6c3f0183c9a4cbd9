"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from .graphs import pytree
from .graphs.labels import Label, ancestors, has_gradient, labels, symbolic_sizes
from .graphs.operations import op_name
from .graphs.spelling import order_operands
from .ir import LossSite, Note, Program, where
from .torch_losses import BY_NAME


def find_losses(program: Program) -> Program:
    """Set `outputs` and `cases`, and `losses` where the graph computes them and the user named none."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    returned = [leaf for leaf in pytree.leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    sites = () if program.options.loss_given else loss_sites(program, returned)
    outputs = tuple(site.inputs for site in sites) or tuple(node for node in returned if has_gradient(node))
    cases = case_size(program.graph, outputs)
    order_operands(program.graph, program.parameters, cases=cases)  # now that it is known what has a row a case
    return program.but(
        losses=sites,
        outputs=outputs,
        cases=cases,
        dropped=(*program.dropped, *left_out(sites)),
    )


def left_out(sites: tuple[LossSite, ...]) -> tuple[Note, ...]:
    """One note for every loss with weights or label smoothing."""
    notes = []
    for site in sites:
        loss = BY_NAME[op_name(site.node)]
        values = dict(zip(loss.arguments, site.node.args, strict=False))
        if any(values.get(argument) not in (None, 0.0) for argument in loss.outside):
            reason = "its weights and label smoothing are no part of the Fisher, which is that of its distribution"
            notes.append(Note(f"{loss.name} at {where(site.node)}", reason))
    return tuple(notes)


def loss_sites(program: Program, returned: list[fx.Node]) -> tuple[LossSite, ...]:
    """The losses behind what the model returns whose inputs depend on parameters and on the batch."""
    label = labels(program.graph, program.parameters)
    behind = ancestors(returned)
    return tuple(
        loss_site(node)
        for node in program.graph.nodes
        if node in behind and op_name(node) in BY_NAME and label[node] is Label.ACT and learned(node.args[0], label)
    )


def learned(inputs: Any, label: Mapping[fx.Node, Label]) -> bool:
    return isinstance(inputs, fx.Node) and any(label[node] is Label.PURE for node in ancestors([inputs]))


def case_size(graph: fx.Graph, outputs: tuple[fx.Node, ...]) -> str | None:
    """The size that is first in an output and somewhere in an input; else the first of the first input. None for a
    single case, whose size is a number."""
    inputs = [size for node in graph.nodes if node.op == "placeholder" for size in symbolic_sizes(node) if size]
    first = [size for node in outputs for size in symbolic_sizes(node)[:1]]
    if first[:1] == [None] and single(graph):
        return None
    return next((size for size in (*first, *inputs) if size in inputs), None)


def single(graph: fx.Graph) -> bool:
    """Whether the first input was captured with one row, or none: sizes that are numbers in a graph."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    return next((value.shape[0] <= 1 for value in values if isinstance(value, Tensor) and value.dim()), False)


def loss_site(node: fx.Node) -> LossSite:
    inputs, targets = (before_broadcast(arg) for arg in node.args[:2])
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    return LossSite(BY_NAME[op_name(node)].distribution, inputs, targets, str(reduction), node)


def before_broadcast(node: Any) -> fx.Node:
    """F.mse_loss begins with `broadcast_tensors(inputs, targets)`; where that changes nothing, we look behind it."""
    assert isinstance(node, fx.Node), "bug in kfac_fx: a loss of constants"
    source = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
        return node
    operand = source.all_input_nodes[node.args[1]]  # type: ignore[index]  # getitem's index is a number here
    same = str(operand.meta["val"].shape) == str(node.meta["val"].shape)
    return operand if same else node
