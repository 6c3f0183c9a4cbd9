"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from . import pytree
from .ir import LossSite, Program
from .labels import Label, ancestors, labels, op_name

KINDS = {
    "cross_entropy": "categorical",
    "mse_loss": "normal",
    "binary_cross_entropy_with_logits": "multi_bernoulli",
}


def find_losses(program: Program) -> Program:
    """Set `outputs`, and `losses` where the graph computes them and the user named none."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    returned = [leaf for leaf in pytree.leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    if program.options.loss_given:
        return program.but(outputs=tuple(node for node in returned if is_float(node)))
    label = labels(program.graph, program.parameters)
    behind = ancestors(returned)
    sites = [
        site(node)
        for node in program.graph.nodes
        if node in behind and op_name(node) in KINDS and label[node] is Label.ACT
    ]
    if sites:
        return program.but(losses=tuple(sites), outputs=tuple(one.inputs for one in sites))
    return program.but(outputs=tuple(node for node in returned if is_float(node)))


def site(node: fx.Node) -> LossSite:
    inputs, targets = node.args[:2]
    assert isinstance(inputs, fx.Node) and isinstance(targets, fx.Node), "bug in kfac_fx: a loss of constants"
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    return LossSite(KINDS[op_name(node)], inputs, targets, str(reduction), node)


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype == torch.bool
