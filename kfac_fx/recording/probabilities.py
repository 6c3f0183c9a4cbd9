"""Probabilities that a loss takes for logits, as those behind a sigmoid: the loss is another one than its user means.

    return torch.sigmoid(self.head(h))      with loss="bce_with_logits": a sigmoid of a sigmoid

Such a training runs, and its factors are right for the loss as it is written, so no other check would say so. A
logarithm of probabilities is a logit, so a log_softmax is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from kfac_fx.losses.declared import LossSpec, expression_of
from kfac_fx.losses.distributions import Categorical, LossFunction, MultiBernoulli
from kfac_fx.passes.graphs.operations import PARTS, VIEWS, op_name
from kfac_fx.passes.users_code import module_of, where

SIGMOIDS, SOFTMAXES = ("sigmoid", "special_expit", "expit", "hardsigmoid"), ("softmax", "_softmax")
SAME_NUMBERS = VIEWS | PARTS | {"clamp", "clip", "clamp_min", "clamp_max", "ravel"}
MAKERS: Mapping[type[LossFunction], tuple[str, ...]] = {
    MultiBernoulli: (*SIGMOIDS, *SOFTMAXES),
    Categorical: SOFTMAXES,
}
TRAINED = {MultiBernoulli: "F.binary_cross_entropy_with_logits", Categorical: "F.cross_entropy"}
LOGITS = "torch.logit(outputs)"
ONE = 1e-5  # how far sums of probabilities may be from 1


def kind_of(loss: LossFunction) -> type[LossFunction] | None:
    """The distribution of logits that a loss is; None if it has none."""
    return next((kind for kind in MAKERS if isinstance(loss, kind)), None)


def makes_probabilities(node: fx.Node, kind: type[LossFunction]) -> fx.Node | None:
    """The operation that makes probabilities of the values of a node, whose loss is of this kind; None if none does."""
    while op_name(node) in SAME_NUMBERS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if op_name(node) in MAKERS[kind] else None


def are_probabilities(values: Tensor, kind: type[LossFunction]) -> bool:
    """Whether values that no graph tells of are those of a softmax."""
    if kind is not Categorical or values.dim() < 2 or not values.numel() or bool((values < 0).any()):
        return False
    return bool((values.double().sum(-1) - 1).abs().max() <= ONE)


def sentence_of(node: fx.Node | None, loss: LossFunction, spec: object) -> str:
    """The sentence of the warning.

    node: that makes the probabilities; None: it is not known. spec: of the loss; None: forward computes it.
    """
    kind = kind_of(loss)
    assert kind is not None, "bug in kfac_fx: probabilities of a loss without logits"
    what = "softmax" if node is None else op_name(node).strip("_")
    path = None if node is None else module_of(node)
    place = "" if node is None else f" by {where(node)}" + (f" in the module {path!r}" if path else "")
    made = f"{list(loss.inputs.shape)} are made probabilities{place or ' by a softmax'}"
    if spec is None:
        return (
            f"{TRAINED[kind]} in forward takes logits, and its inputs {made}, so it takes the {what} of a {what}: "
            f"leave the {what} in front of it out."
        )
    of_torch = spec.of_torch if isinstance(spec, LossSpec) else None
    other = "Or return F.log_softmax, and train with F.nll_loss."
    if kind is MultiBernoulli:
        written = f"kfac_fx.losses.MultiBernoulli({LOGITS})" if of_torch is None else expression_of(of_torch)
        other = (
            f"If you train with F.binary_cross_entropy, keep the {what} and write loss=lambda outputs: "
            f"{written.format(LOGITS)}."
        )
    return (
        f"the registered {type(loss).__name__} loss takes logits, and the outputs {made}: return what is before the "
        f"{what}, and train with {TRAINED[kind]}. {other}"
    )


def taken_for_logits(
    losses: Sequence[LossFunction], fisher: Sequence[Tensor], nodes: Sequence[fx.Node], spec: object
) -> list[str]:
    """A sentence about every loss of logits whose inputs are probabilities.

    Args:
        losses: on the Fisher's outputs.
        fisher, nodes: these outputs, and their nodes in one graph of the whole model; no nodes if there is none.
        spec: see `sentence_of`.
    """
    sentences = []
    for loss in losses:
        kind = kind_of(loss)
        if kind is None:
            continue
        made = [
            makes_probabilities(node, kind)
            for value, node in zip(fisher, nodes, strict=False)
            if of_same_numbers(value, loss.inputs)
        ]
        found = next((node for node in made if node is not None), None)
        with torch.no_grad():
            told = found is not None or (not nodes and are_probabilities(loss.inputs.detach(), kind))
        if told:
            sentences.append(sentence_of(found, loss, spec))
    return list(dict.fromkeys(sentences))


def of_same_numbers(output: Tensor, inputs: Tensor) -> bool:
    """Whether the inputs of a loss are an output, or a view of it."""
    return output.numel() == inputs.numel() and output.data_ptr() == inputs.data_ptr()
