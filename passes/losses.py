"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from .cases import size_of_cases
from .graphs.labels import Label, ancestors, has_gradient, labels
from .graphs.operations import CASTS, PERMUTES, op_name
from .graphs.spelling import order_operands
from .ir import LossSite, Note, Program
from .returned_loss import other_terms, returned_losses, unknowable, way_of
from .torch_losses import BY_NAME
from .torch_private import pytree
from .users_code import where

VIEWED = CASTS | PERMUTES | {"reshape", "view", "flatten", "squeeze", "unsqueeze", "ravel", "masked_fill"}


def find_losses(program: Program) -> Program:
    """Set `outputs` and `cases`; and `losses`, with the way to the loss that forward returns, where the graph computes
    them and the user named none."""
    leaves = pytree.tree_leaves(program.returned)
    returned = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    named = None if program.named_loss is None else leaves[program.named_loss]
    sites = () if program.options.loss_given else loss_sites(program, returned)
    ends = returned_losses(returned, {site.node for site in sites}, named) if sites else []
    behind = ancestors(ends)
    sites = tuple(site for site in sites if site.node in behind)
    outputs = tuple(site.inputs for site in sites) or tuple(node for node in returned if has_gradient(node))
    cases, cases_reason = size_of_cases(program, outputs)
    order_operands(program.graph, program.parameters, cases=cases)  # now that it is known what has a row a case
    program = program.but(outputs=outputs, cases=cases, cases_reason=cases_reason)
    if not sites:
        return program
    unknown = unknowable(program)
    sites = in_chunks(program, [replace(site, way=way_of(site.node, ends, behind, unknown)) for site in sites])
    cut, beside = other_terms(program, ends, set(outputs), behind)
    around, alone = other_terms(program, ends, {site.node for site in sites}, behind)
    notes = left_out(sites, around, alone)
    return program.but(
        losses=sites,
        returned_losses=tuple(ends),
        cut=cut,
        likelihood=not notes and not any(map(has_soft_targets, sites)),
        dropped=(*program.dropped, *notes),
    )


def has_soft_targets(site: LossSite) -> bool:
    """Whether the targets are probabilities of classes, and not their numbers."""
    value = site.targets.meta.get("val")
    return BY_NAME[site.loss].classes_second and isinstance(value, Tensor) and value.is_floating_point()


def left_out(sites: Sequence[LossSite], around: Sequence[fx.Node], beside: Sequence[str]) -> tuple[Note, ...]:
    """One note for everything in the returned loss that is no weighted log-likelihood.

    around: activations of other terms. beside: parameters of other terms.
    """
    notes = []
    for site in sites:
        loss = BY_NAME[op_name(site.node)]
        name, values = f"{loss.name} at {where(site.node)}", dict(zip(loss.arguments, site.node.args, strict=False))
        if any(values.get(argument) not in (None, 0.0) for argument in loss.outside):
            reason = "its weights and label smoothing are no part of the Fisher, which is that of its distribution"
            notes.append(Note(name, reason))
        if site.way is None or not site.way.linear:
            step = "" if site.way is None else " with other weights than those of its cases"
            reason = f"forward returns a function of it{step}; the Fisher is that of its distribution"
            notes.append(Note(name, reason))
    for node in around:
        reason = "it is in the loss that forward returns, and no part of the Fisher, which is that of the distributions"
        notes.append(Note(f"the term of {where(node)}", reason))
    if beside:
        reason = "the loss that forward returns has a term of these parameters alone, which is no part of any case"
        notes.append(Note(", ".join(beside), reason))
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


def in_chunks(program: Program, sites: Sequence[LossSite]) -> tuple[LossSite, ...]:
    """The losses, with the number of the first of those that are one loss, computed over some of its rows each: their
    targets are pieces of one tensor, and their inputs depend on the same parameters."""
    label = labels(program.graph, program.parameters)
    pieces = [piece_of(site.targets) for site in sites]
    learned = [
        {str(node.target) for node in ancestors([site.inputs]) if node.op == "get_attr" and label[node] is Label.PURE}
        for site in sites
    ]
    found: list[LossSite] = []
    for number, (site, piece) in enumerate(zip(sites, pieces, strict=True)):
        first = number
        for other in range(number):
            alike = piece is not None and pieces[other] is not None and site.loss == sites[other].loss
            if alike and piece[0] is pieces[other][0] and learned[number] == learned[other]:  # type: ignore[index]
                same_place = any(
                    pieces[n] == piece for n in range(number) if found[n].chunk_of == found[other].chunk_of
                )
                first = number if same_place else found[other].chunk_of
                break
        found.append(replace(site, chunk_of=first))
    return tuple(found)


def piece_of(node: Any) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """(the tensor that a node is a piece of, which piece); None if it is none."""
    node = without_views(node)
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, name = without_views(node.args[0]), op_name(node)
    if name == "getitem" and op_name(source) in ("chunk", "split", "split_with_sizes", "unbind"):
        return without_views(source.args[0]), (name, source, node.args[1])
    return (source, (name, *node.args[1:])) if name in ("slice", "select", "narrow") else None


def without_views(node: Any) -> Any:
    """The node whose elements in another shape are this one's."""
    while isinstance(node, fx.Node) and node.args and (op_name(node) in VIEWED or is_whole(node)):
        node = node.args[0]
    return node


def is_whole(node: fx.Node) -> bool:
    """Whether a node is a slice of everything, as the first of `y[:, t]` is."""
    if op_name(node) != "slice":
        return False
    start, end, step = (node.args[place] if place < len(node.args) else None for place in (2, 3, 4))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize)) and step in (None, 1)


def of_parameters(inputs: Any, label: Mapping[fx.Node, Label]) -> bool:
    return isinstance(inputs, fx.Node) and any(label[node] is Label.PURE for node in ancestors([inputs]))


def loss_site(node: fx.Node) -> LossSite:
    inputs, targets = (before_broadcast(arg) for arg in node.args[:2])
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    loss = BY_NAME[op_name(node)]
    arguments = dict(zip(loss.arguments, node.args, strict=False))
    ignored, weights = arguments.get("ignore_index"), arguments.get("weight")
    by_class = weights if loss.classes_second else None  # else they are weights of elements
    return LossSite(loss.name, inputs, targets, str(reduction), node, ignored, by_class)


def before_broadcast(node: Any) -> fx.Node:
    """F.mse_loss begins with `broadcast_tensors(inputs, targets)`; where that changes nothing, we look behind it."""
    assert isinstance(node, fx.Node), "bug in kfac_fx: a loss of constants"
    source = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
        return node
    operand = source.all_input_nodes[node.args[1]]  # type: ignore[index]  # getitem's index is a number here
    same = str(operand.meta["val"].shape) == str(node.meta["val"].shape)
    return operand if same else node
