"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .cases import size_of_cases
from .graphs.labels import Label, ancestors, has_gradient, labels
from .graphs.operations import op_name
from .graphs.spelling import order_operands
from .ir import LossSite, Note, Program
from .torch_losses import BY_NAME
from .torch_private import pytree
from .users_code import where


def find_losses(program: Program) -> Program:
    """Set `outputs` and `cases`, and `losses` where the graph computes them and the user named none."""
    returned = [leaf for leaf in pytree.tree_leaves(program.returned) if isinstance(leaf, fx.Node)]
    sites = () if program.options.loss_given else loss_sites(program, returned)
    outputs = tuple(site.inputs for site in sites) or tuple(node for node in returned if has_gradient(node))
    cases, cases_reason = size_of_cases(program, outputs)
    order_operands(program.graph, program.parameters, cases=cases)  # now that it is known what has a row a case
    return program.but(
        losses=sites,
        outputs=outputs,
        cases=cases,
        cases_reason=cases_reason,
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
        if node in behind
        and op_name(node) in BY_NAME
        and label[node] is Label.ACT
        and of_parameters(node.args[0], label)
    )


def of_parameters(inputs: Any, label: Mapping[fx.Node, Label]) -> bool:
    return isinstance(inputs, fx.Node) and any(label[node] is Label.PURE for node in ancestors([inputs]))


def loss_site(node: fx.Node) -> LossSite:
    inputs, targets = (before_broadcast(arg) for arg in node.args[:2])
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    loss = BY_NAME[op_name(node)]
    ignored = dict(zip(loss.arguments, node.args, strict=False)).get("ignore_index")
    return LossSite(loss.name, inputs, targets, str(reduction), node, ignored)


def before_broadcast(node: Any) -> fx.Node:
    """F.mse_loss begins with `broadcast_tensors(inputs, targets)`; where that changes nothing, we look behind it."""
    assert isinstance(node, fx.Node), "bug in kfac_fx: a loss of constants"
    source = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
        return node
    operand = source.all_input_nodes[node.args[1]]  # type: ignore[index]  # getitem's index is a number here
    same = str(operand.meta["val"].shape) == str(node.meta["val"].shape)
    return operand if same else node
