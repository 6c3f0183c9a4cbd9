"""The check of the loss: at the first step its gradient tells whether it is the loss whose curvature is estimated.

K-FAC divides the gradient of one loss by the curvature of another. A factor between them, for example a sum over the
batch instead of a mean, is therefore a factor of every step. The gradient that the user's backward sends into the
Fisher's outputs shows the factor, and is watched from the forward on (`watch`). For every registered loss there are
targets that fit this gradient best. If it is a multiple of that loss's own gradient, the multiple is the factor of the
trained loss (`factors`). Residuals, whose gradient is a multiple of the outputs, have targets of zero. Other terms of
the user's loss, such as a penalty on parameters, do not pass through these outputs. If no targets fit, for example with
label smoothing, the gradient of a loss that forward returns tells the factor, and a loss outside of forward has no
warning.

**Squared errors**: their factors, which their gradients alone do not tell.

The gradient of f times a registered loss is that of the loss itself, with other targets: f (m - t) = m - t' with
t' = m - f (m - t). The value of the trained loss tells f. With N cases, the variance v, and the weight w of the loss,

    g = f w (m - t) / (v N),     f w |m - t|² / (2 v N) = s / f,     s = |g|² v N / (2 w)

So the values of several squared errors add up to Σ s_i / f_i, which is what the losses whose factors are known leave
of the value. Other terms, such as a penalty on parameters, hide the factors, as do other losses that are registered as
squared errors, such as Huber's: then the equation gives any number. So a factor counts if it is one that people write.

**Half precision**: a gradient that arrives in it is rounded by half of its eps, so a multiple of the registered loss's
fits to eps. Losses with another term, such as BCE and a tenth of a Dice loss, do not. The factor of a squared error is
known to half of eps, so it tells there only whether micro-batches were divided. A multiple may be the scale of a
GradScaler, but not in bfloat16, which needs none, and not if it is the number of micro-batches.

**Parts** of a trained loss that its curvature does not have: weights of cases, masks, and terms around the losses.

A row of the gradient of a cross entropy is w (p - e), with the weight w of its case. Over more than two classes it
shows the weight and the target. A weight of zero is a case that the trained loss leaves out. Label smoothing changes e
alone, and the curvature does not depend on e. A row of zeros in the gradient of a squared error, or of binary events,
is left out, too: outputs that are exactly their targets are rare. The value of the loss tells weights of residuals from
targets (`weights_of_squares`).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from kfac_fx.compiled.report import fold
from kfac_fx.linalg.matrices import dense, is_differentiable, uneven_numbers, with_gradient
from kfac_fx.linalg.processes import Replicas
from kfac_fx.losses import MultiBernoulli, Normal
from kfac_fx.losses.declared import DIVIDED_BY_CASES, LossSpec, RowsOfLoss, WeightedLosses, expression_of, place_of_leaf
from kfac_fx.losses.distributions import DISTRIBUTIONS, Categorical, LossFunction, NormalMeanVariance, Poisson
from kfac_fx.passes import results
from kfac_fx.passes.errors import LossError, out_of_memory, warn_user, where
from kfac_fx.passes.graphs.labels import ancestors
from kfac_fx.passes.ir import Dims, Program
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.padding import spread
from kfac_fx.passes.torch_losses import TORCH_LOSSES
from kfac_fx.passes.torch_private import backward_here, backward_roots, pytree
from kfac_fx.passes.tracing.effects import RandomState, address, same_random
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.model_checks import names_of_arguments, required_arguments
from kfac_fx.recording.output_losses import real_losses, share_of_real
from kfac_fx.recording.proof import NO_LOSS
from kfac_fx.recording.recorder import Recorder, in_one_memory

ONE_WEIGHT = 5e-2  # of weights, relative; label smoothing of rows that fit moves them by 2e-2, those on purpose more
ROUNDINGS = 16.0  # of a gradient, by which one that is solved for may differ
ON_A_ROW = 1e-2  # relative error of a row that is a multiple of p - e
CERTAIN = 0.999  # a probability
SMALL = 0.1  # a part of the gradient that is not worth a warning
LEFT_OUT = (
    "the trained loss leaves out {} of {} {kind}, whose gradient is zero, and the factors have them: {} of their sums "
    "are of {kind} that are not trained. {}"
)
IF_PADDING = (
    "If they are padding, name it with kfac_fx.compile(..., padding_mask=), as in padding_mask=lambda {}: {}. "
    "An argument of forward that is named, as in padding_mask='mask', must be in every call. Else "
)
IF_MASKED = (
    "If they are padding, padding_mask does not fit these outputs. If the targets are the next tokens, the last real "
    "position has none: padding_mask=lambda {}: ({}) & F.pad({}, (0, 1), value=True), with value=False if the last "
    "position of the longest sequences has no target either. Else "
)
HOW_TO_LEAVE_OUT = (
    "{}let forward compute the loss: F.cross_entropy with targets of -100 for these cases, or (losses * "
    "mask).sum() / mask.sum(); targets of -100 outside of forward change nothing. If they are the same in every batch, "
    "as the nodes of a graph without labels or all tokens but the last, name the outputs of the others: "
    "loss=lambda outputs: kfac_fx.losses.Categorical(outputs[mask])."
)
HOW_TO_LEAVE_OUT_ELEMENTS = (
    '{}let forward compute the loss, as (losses * mask).sum() / mask.sum() with losses of reduction="none". If they '
    "are the same in every batch, name the outputs of the others: loss=lambda outputs: {}."
)
HOW_TO_LEAVE_OUT_INSIDE = (
    "{}select the others in forward, in front of the loss, as in {}(outputs[mask], targets[mask]). Or compute the "
    "mask before the call, and give it to forward: no input tells the one that forward multiplies the loss with, as "
    "where it draws random numbers."
)
TRAINED_AS: Mapping[type[LossFunction], str] = {
    Normal: "F.mse_loss", MultiBernoulli: "F.binary_cross_entropy_with_logits",
}  # fmt: skip
WEIGHED = (
    "the trained loss weighs its cases from {:.3g} to {:.3g} of their mean, and the factors are of cases of one weight."
    " {}"
)
HOW_TO_WEIGH = (
    "If the weights are of classes or examples, as weight=, let forward compute the loss as a product of them and "
    'F.cross_entropy(..., reduction="none"), with weights[y] for those of classes. If they depend on the predictions, '
    'as those of a focal loss do, write KFAC(..., estimation_mode="empirical"), whose factors are of the gradients '
    "themselves; or leave it as it is, if the loss falls."
)
WEIGHED_SQUARES = (
    "the trained loss weighs the squares of residuals from {:.3g} to {:.3g} of their mean, and the factors are of "
    "squares of one weight. Write the weights into the registered loss, as in loss=lambda residuals: "
    "[kfac_fx.losses.Normal(weights.sqrt() * residuals)], or let forward return weights.sqrt() * residuals."
)
AROUND = (
    "{:.0%} of the gradient of the trained loss comes from terms that are no log-likelihood ({}), and the factors have "
    "no curvature of them. Nothing is wrong if they are a small part of the loss; else lower lr, or write "
    'KFAC(..., estimation_mode="empirical"), whose factors are of the whole gradient.'
)

OTHER = (
    "about {:.0%} of the gradient of the trained loss comes from {}, which forward returns and which is no known loss: "
    "the factors have no curvature of it{}. Nothing is wrong if it is a small part of the loss. Else let forward "
    "return the inputs of all losses, and name a distribution that is near for each, as in loss=lambda outputs: "
    "[kfac_fx.losses.Categorical(outputs['classes']), kfac_fx.losses.Normal(outputs['boxes'])]; or write "
    'KFAC(..., estimation_mode="empirical"), whose factors are of the whole gradient.'
)
APART = (
    "about {:.0%} of the gradient of the trained loss comes from {}, which forward returns and which no loss that "
    "forward computes reads: the factors have no curvature of it{}. Nothing is wrong if it is a small part of the "
    "loss. Else let forward compute its loss, too, and return the sum of all, as in return F.cross_entropy(a, y) + "
    'F.mse_loss(b, t); or write KFAC(..., estimation_mode="empirical"), whose factors are of the whole gradient.'
)
ALONE = ", and AdamW moves {}, on which no known loss depends"

UNREAD = (
    "about {:.0%} of the gradient of the trained loss comes from {}, which forward returns and which no registered "
    "loss reads: the factors have no curvature of it. Nothing is wrong if it is a small part of the loss. Else name a "
    "distribution that is near for it, too, as in loss=lambda outputs: [kfac_fx.losses.Categorical(outputs[0]), (0.5, "
    'kfac_fx.losses.Normal(outputs[1]))]; or write KFAC(..., estimation_mode="empirical"), whose factors are of the '
    "whole gradient."
)

STEPPED = (
    "about {:.0%} of the gradient of the trained loss comes from {}, which forward returns and which a later forward "
    "of the step takes, as a state: the factors are those of each forward alone, and have no curvature of the way "
    "through it. Nothing is wrong if the loss falls. Else write the loop over the steps into forward, and return the "
    'outputs of all; or write KFAC(..., estimation_mode="empirical"), whose factors are of the whole gradient.'
)

INVERTED = (
    "the padding mask seems to be inverted: the trained loss has no gradient at the {:,} positions where it is "
    "nonzero, and has some where it is zero. A mask is nonzero where a position is real, so the factors are of the "
    "padding. If yours is True at padding, as src_key_padding_mask is, invert it with a function of what forward "
    "takes, as in padding_mask=lambda ids, pad: ~pad."
)


def size_of(gradients: Iterable[Tensor]) -> float:
    """The length of a gradient by parameters."""
    return math.hypot(*(float(dense(gradient).double().norm()) for gradient in gradients))


@dataclass(frozen=True)
class ReturnedNumber:
    """A number that forward returns next to its losses, and that is no part and no function of these; or such a loss.

    place: its node and line. size: the length of its gradient by the parameters. alone: those of the parameters that no
    known loss depends on.
    """

    place: str
    size: float
    alone: Sequence[str] = ()


def returned_apart(recorder: Recorder, leaves: Sequence[Any]) -> list[int]:
    """The returned tensors with a gradient that are no part and no function of the losses that forward computes, by
    their place among the returned leaves."""
    known = recorder.program.returned_losses
    nodes = results.tree_leaves(recorder.capture.unflatten(recorder.program.returned)) if recorder.whole else []
    if not known or len(nodes) != len(leaves):
        return []
    parts = ancestors(known)
    return [
        n
        for n, (node, leaf) in enumerate(zip(nodes, leaves, strict=True))
        if isinstance(leaf, Tensor)
        and leaf.requires_grad
        and isinstance(node, fx.Node)
        and node not in parts
        and ancestors([node]).isdisjoint(known)
    ]


def passes_around(recorder: Recorder, leaf: int) -> bool:
    """Whether a returned tensor depends on a parameter on a way that does not pass the inputs of the losses."""
    program = recorder.program
    stack: list[Any] = [results.tree_leaves(recorder.capture.unflatten(program.returned))[leaf]]
    seen = {*program.outputs, *stack}
    while stack:
        node = stack.pop()
        if node.op == "get_attr" and node.target in program.parameters:
            return True
        before = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(before)
        stack += before
    return False


def returned_numbers(
    recorder: Recorder, leaves: Sequence[Any], values: tuple[Any, ...]
) -> tuple[dict[int, ReturnedNumber], dict[int, ReturnedNumber]]:
    """The losses that forward returns and the other numbers, by their place among the returned leaves; none without
    others. One forward, and one backward for each of them."""
    others = [n for n in returned_apart(recorder, leaves) if leaves[n].numel() == 1]
    if not others:
        return {}, {}
    known = recorder.program.returned_losses
    nodes = results.tree_leaves(recorder.capture.unflatten(recorder.program.returned))
    live = {name: with_gradient(value.detach()) for name, value in recorder.live_parameters().items()}
    learned = {name: value for name, value in live.items() if value.requires_grad}
    outputs = results.tree_leaves(recorder.outputs(live, values)[0])
    gradients = {
        n: dict(zip(learned, pulled_whole(outputs[n], list(learned.values())), strict=True))
        for n, node in enumerate(nodes)
        if n in others or node in known
    }
    reached = {name for n, of in gradients.items() if n not in others for name, grad in of.items() if grad is not None}
    numbers = {}
    for n, of_number in gradients.items():
        found = {name: gradient for name, gradient in of_number.items() if gradient is not None}
        numbers[n] = ReturnedNumber(
            where(nodes[n]), size_of(found.values()), tuple(name for name in found if name not in reached)
        )
    return {n: of for n, of in numbers.items() if n not in others}, {n: numbers[n] for n in others}


def pulled_whole(root: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(root.sum(), leaves, retain_graph=True, allow_unused=True)


def parts_of_others(
    losses: Mapping[int, ReturnedNumber], others: Mapping[int, ReturnedNumber], factors: Mapping[int, float]
) -> list[str]:
    """The lines of the warning about trained numbers that are no losses. factors: the gradients of the returned
    numbers in the trained loss, of those that it depends on."""
    sizes = {n: abs(factors.get(n, 0.0)) * number.size for n, number in {**losses, **others}.items()}
    total = sum(sizes.values())
    lines = []
    for n, number in others.items():
        if total and sizes[n] > SMALL * total:
            alone = ALONE.format(fold(sorted(number.alone))) if number.alone else ""
            lines.append(OTHER.format(sizes[n] / total, number.place, alone))
    return lines


def weights_of_cases(reached: Reached, if_padding: str) -> list[str]:
    """The lines of the warning about a Categorical loss whose trained cases have other weights than registered.

    With two classes every gradient fits a target and some weight, so only cases that are left out are told.

    if_padding: see `words_of_padding`.
    """
    loss, coefficient, gradient = reached.loss, reached.weight, reached.gradient
    fits = gradient.shape == loss.inputs.shape and gradient.numel() > 0
    if not isinstance(loss, Categorical) or gradient.shape[-1] < 2 or not fits:
        return []
    counted = loss.kept if loss.real is None else loss.real
    kept = torch.ones(gradient.shape[:-1], dtype=torch.bool, device=gradient.device) if counted is None else counted
    rows = torch.where(kept.unsqueeze(-1), gradient, 0).reshape(-1, gradient.shape[-1]).double()
    p = loss.inputs.detach().reshape(rows.shape).double().softmax(-1)
    expected = p - torch.nn.functional.one_hot(rows.argmin(-1), rows.shape[-1])
    if isinstance(coefficient, Tensor) and coefficient.dim():
        expected = expected * coefficient.expand(*loss.inputs.shape[:-1], 1).reshape(-1, 1).double()
    weight = (rows * expected).sum(-1) / expected.square().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    apart = (rows - weight.unsqueeze(-1) * expected).norm(dim=-1) > ON_A_ROW * rows.norm(dim=-1)
    trained = rows.any(-1)
    uncertain = p.max(-1).values < CERTAIN  # the gradient of others is small, and may be rounded to zero
    masked = kept.reshape(-1) & ~trained & uncertain
    told = trained & uncertain
    least, most = (torch.where(told, weight, other) for other in (torch.inf, -torch.inf))
    number, unfit, left_out, cases, low, high, total = torch.stack([
        told.sum(), (trained & apart).any(), masked.sum(), kept.sum(),
        least.min(), most.max(), torch.where(told, weight, 0).sum(),
    ]).tolist()  # fmt: skip
    if not number or unfit or low < 0:
        return []
    lines = []
    if left_out > SMALL * cases:
        remedy = HOW_TO_LEAVE_OUT.format(if_padding)
        if reached.spec is None:
            remedy = HOW_TO_LEAVE_OUT_INSIDE.format(if_padding, "F.cross_entropy")
        share = f"{left_out / cases:.0%}"
        lines.append(LEFT_OUT.format(int(left_out), int(cases), share, begun(remedy), kind="cases"))
    if gradient.shape[-1] > 2 and high - low > ONE_WEIGHT * high:
        mean = total / number
        lines.append(WEIGHED.format(low / mean, high / mean, HOW_TO_WEIGH))
    return lines


def weights_of_squares(reached: Sequence[Reached], value: float | None) -> list[str]:
    """The line of the warning about squares of residuals that the trained loss weighs one by one.

    A loss Σ w m² has the gradient g = 2 w m and the value ½ <g, m>, and no other loss of squares with g m >= 0 in all
    elements has that value: with targets t it is ½ <g, m - t>. So the value tells targets from weights.

    reached: all losses that the trained one reaches. value: of the whole loss, times its scale; None: it is not known.
    """
    losses = [of.loss for of in reached]
    without_targets = all(
        isinstance(loss, Normal) and loss.targets is None and not loss.inputs.is_complex() for loss in losses
    )
    pairs = [(of.loss.inputs.detach().double(), of.gradient.double()) for of in reached if without_targets]
    if value is None or not 0 < value < math.inf or not pairs or any(m.shape != g.shape for m, g in pairs):
        return []
    half = sum(float((m * g).sum()) for m, g in pairs) / 2
    if abs(half - value) > VALUES * value or any(bool((m * g < 0).any()) for m, g in pairs):
        return []
    lines = []
    for m, g in pairs:
        told = (m.abs() > SMALL * m.square().mean().sqrt()) & (g != 0)  # the quotient of others may be rounding
        weights = (g / m)[told]
        if len(weights) <= RESIDUALS:
            continue
        low, high, mean = torch.stack([weights.min(), weights.max(), weights.mean()]).tolist()
        if high - low > ONE_WEIGHT * high:
            lines.append(WEIGHED_SQUARES.format(low / mean, high / mean))
    return lines


def rows_left_out(loss: LossFunction, coefficient: Any, gradient: Tensor) -> tuple[int, int]:
    """(the rows that the trained loss leaves out, the rows that the registered one has) of a Normal or MultiBernoulli
    loss; no rows of another.

    A row is the last axis of the inputs, and a whole case of images; and one number of [cases, positions], if the cases
    begin late or end early, as those with padding do. Rows do not count whose gradient is zero though
    they are trained: those of certain predictions, and outputs of zero, which targets of zero fit.

    coefficient: of the registered loss, a number or one for every case. gradient: the trained one, of its inputs;
        finite.
    """
    inputs = loss.inputs.detach()
    is_known = isinstance(loss, Normal | NormalMeanVariance | MultiBernoulli)
    if not is_known or gradient.shape != inputs.shape or not gradient.numel():
        return 0, 0
    counted = torch.ones_like(inputs, dtype=torch.bool) if loss.real_elements is None else loss.real_elements
    if loss.kept is not None:
        counted = counted & loss.kept.view(*loss.kept.shape, *[1] * (inputs.dim() - loss.kept.dim()))
    if isinstance(coefficient, Tensor) and coefficient.dim():
        counted = counted & (coefficient != 0)
    if isinstance(loss, MultiBernoulli):
        p = inputs.double().sigmoid()
        tells = (p > 1 - CERTAIN) & (p < CERTAIN)
    else:
        tells = inputs != 0
    is_flat = inputs.dim() < 2 or (inputs.dim() == 2 and are_ragged((gradient != 0) | ~counted | ~tells))
    shape = (-1, 1) if is_flat else (len(inputs), -1) if inputs.dim() > 3 else (-1, inputs.shape[-1])
    in_rows, trained, telling = (of.reshape(shape).any(-1) for of in (counted, counted & (gradient != 0), tells))
    zero, rows = torch.stack([(in_rows & ~trained & telling).sum(), in_rows.sum()]).tolist()
    return (zero, rows) if bool(trained.any()) else (0, rows)


def words_of_padding(watched: Watched) -> str:
    """The sentences about cases that may be padding, with the arguments that forward gets. Token 0 is padding; of
    sequences of features, rows of zeros are. Empty if no argument has positions."""
    recorder = watched.recorder
    emitted = recorder.emitted
    pairs = zip(emitted.placeholders, watched.values, strict=True) if isinstance(emitted, EmittedGraph) else ()
    inputs = {str(node.target): value for node, value in pairs}
    given = {*required_arguments(recorder.model), *inputs}
    names = [name for name in names_of_arguments(recorder.model) if name in given] or ["ids"]
    real = dict[str, tuple[str, str]]()  # where an argument is real, and where its next position is
    for name in names:
        value = inputs.get(name)
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            real[name] = f"{name} != 0", f"{name}[:, 1:] != 0"
        elif value.dim() > 2:
            real[name] = f"{name}.any(-1)", f"{name}[:, 1:].any(-1)"
    if not real:
        return ""
    is_real, is_next_real = next(iter(real.values()))
    if recorder.program.mask is None:
        return IF_PADDING.format(", ".join(names), is_real)
    return IF_MASKED.format(", ".join(names), is_real, is_next_real)


def untrained_are_learned(watched: Watched, reached: Reached) -> bool:
    """Whether the elements of a loss's inputs without a gradient depend on parameters that learn; those of a trajectory
    at its first time, which is an input, do not. One forward and one backward; True where these cannot tell."""
    untrained = reached.gradient == 0
    may_tell = watched.recorder.whole and watched.cases is None and bool(untrained.any())
    again = watched.run_again() if may_tell else None
    if again is None:
        return True
    leaves, fisher, learned = again
    values = [leaves[place] for place in watched.places] or fisher
    loss = watched.on(values)[reached.number][1]
    if not loss.inputs.requires_grad or loss.inputs.shape != reached.gradient.shape:
        return True
    sent = torch.where(untrained, uneven_numbers([loss.inputs])[0], 0)
    gradients = torch.autograd.grad(loss.inputs, list(learned.values()), sent, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def begun(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def are_ragged(trained: Tensor) -> bool:
    """Whether the cases of [cases, positions] are trained at first positions only, or at last ones, of which some cases
    have more than others. Two positions do not tell it: one of them is the first."""
    before, after = trained[:, :-1], trained[:, 1:]
    is_part = trained.any(-1) & ~trained.all(-1)
    ordered = bool((before | ~after).all()) or bool((after | ~before).all())
    differs = bool((trained != trained[:1]).any())
    return trained.shape[1] > RESIDUALS and bool(is_part.any()) and differs and ordered


def lines_of_rows(reached: Reached, if_padding: str) -> list[str]:
    """The line of the warning about rows that the trained loss leaves out; see `rows_left_out`."""
    loss, spec = reached.loss, reached.spec
    left_out, rows = rows_left_out(loss, reached.weight, reached.gradient)
    if left_out <= SMALL * rows:
        return []
    of_torch = spec.of_torch if isinstance(spec, LossSpec) else None
    others = f"kfac_fx.losses.{type(loss).__name__}(outputs[mask])"
    written = others if of_torch is None else expression_of(of_torch).format("outputs[mask]")
    remedy = HOW_TO_LEAVE_OUT_ELEMENTS.format(if_padding, written)
    if spec is None:
        remedy = HOW_TO_LEAVE_OUT_INSIDE.format(if_padding, TRAINED_AS.get(type(loss), "loss"))
    dims = loss.inputs.dim()
    kind = "positions" if dims == 3 or (dims == 2 and rows > len(loss.inputs)) else "cases"
    return [LEFT_OUT.format(left_out, rows, f"{left_out / rows:.0%}", begun(remedy), kind=kind)]


def part_around(
    recorder: Recorder,
    roots: Sequence[Tensor],
    fisher: Sequence[Tensor],
    inner: Sequence[Tensor],
    live: dict[str, Tensor],
) -> str | None:
    """The line of the warning about terms of the returned loss that do not pass the inputs of its losses; None if there
    are none to speak of.

    roots: the returned loss. fisher: the inputs of its losses, and inner: its gradients there. live: the parameters.
    """
    program = recorder.program
    if not program.cut or not roots:
        return None
    leaves = [value for value in live.values() if value.requires_grad]
    learned = [(value, gradient) for value, gradient in zip(fisher, inner, strict=True) if value.requires_grad]
    whole = torch.autograd.grad(
        [root.sum() for root in roots], leaves, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    through = torch.autograd.grad(
        [value for value, _ in learned],
        leaves,
        [gradient for _, gradient in learned],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    size = torch.stack([gradient.double().norm() for gradient in whole]).norm()
    rest = torch.stack([(a - b).double().norm() for a, b in zip(whole, through, strict=True)]).norm()
    part = float(rest / size) if float(size) > 0 else 0.0
    if part <= SMALL:
        return None
    return AROUND.format(min(part, 1.0), ", ".join(where(node) for node in program.cut))


EXACT = 1e-4  # relative error of a factor that is a number that people write
OF_EPS = 0.5  # the same in half precision, relative to its eps
VALUES = 1e-5  # of a sum of several values
MANTISSAS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
DECADES = range(-6, 7)


@dataclass(frozen=True)
class SquaredError:
    """A registered squared error on the outputs of one forward.

    Attributes:
        loss: its distribution.
        weight: of its mean over cases.
        gradient: the trained one, of its inputs.
        padded: see `of_padding_too`.
        eps: that of the dtype in which the gradient arrived, if it is of half precision; else 0.
    """

    loss: Normal
    weight: float
    gradient: Tensor
    padded: float | None = None
    eps: float = 0.0

    @property
    def size(self) -> float:
        """s: its value, times its factor."""
        loss = self.loss
        return float(self.gradient.double().square().sum()) * loss.var * loss.all_cases / (2 * self.weight)

    def nominal(self, factor: float, parts: int) -> float | None:
        """The number that people write that this factor is; None if it is none."""
        near_enough = OF_EPS * self.eps
        numbers = self.numbers(parts) if near_enough <= EXACT else (1.0, 1 / parts)
        exact = max(EXACT, near_enough)
        return next((number for number in numbers if abs(factor - number) <= exact * number), None)

    def numbers(self, parts: int) -> Iterator[float]:
        """The factors that people write: those of means and sums, round numbers, and each divided by the number of
        micro-batches."""
        cases, elements = self.loss.all_cases, self.loss.inputs.numel() / self.loss.all_cases
        usual = (1.0, 1 / elements, cases, 0.5, 2.0, 0.5 / elements, cases / 2, cases / elements)
        of_loss = [number / self.weight for number in (1.0, 1 / elements) if self.weight > 0]
        real = real_elements(self.loss)
        of_padding = [] if self.padded is None else [self.padded]
        of_padding += [] if real is None else [1 / real, 0.5 / real]
        powers = [2.0**exponent for exponent in range(-16, 17)]
        tens = [mantissa * 10.0**decade for decade in DECADES for mantissa in MANTISSAS]
        for part in dict.fromkeys((1, parts)):
            yield from (number / part for number in (*usual, *of_loss, *of_padding, *powers, *tens, 1 / 3))


def factors_of_squares(
    squares: Sequence[SquaredError], value: float | None, parts: int = 1
) -> list[tuple[float, bool]] | None:
    """(the factor, whether it is one that people write) of every squared error; None if they are not known.

    Args:
        value: of the squared errors together, as they are trained; None: it is not known.
        parts: the number of micro-batches, which the user may have divided the loss by.
    """
    if not squares or value is None or not 0 < value < math.inf:
        return None
    sizes = [of.size for of in squares]
    if not all(0 < size < math.inf for size in sizes):
        return None
    common = sum(sizes) / value
    number = squares[0].nominal(common, parts)
    if len(squares) == 1:
        return [(common if number is None else number, number is not None)]
    if number is not None and abs(common / number - 1) <= VALUES:
        return [(number, True)] * len(squares)
    for unit in dict.fromkeys((1.0, 1.0 / parts)):
        for place, of in enumerate(squares):
            rest = value - (sum(sizes) - sizes[place]) / unit
            number = of.nominal(sizes[place] / rest, parts) if rest > 0 else None
            if number is not None and abs(sizes[place] / number - rest) <= VALUES * value:
                return [(number if other == place else unit, True) for other in range(len(squares))]
    return None


LIMIT = 1 << 22  # elements of the Fisher's outputs; of more, only the first cases are watched
PROPORTIONAL = 1e-3  # relative error of a gradient that is a multiple of another, in float32
SCALE_TOLERANCE = 1e-2  # of a factor; a weight on purpose is further away from 1
OF_TERMS = 8  # the same in half precision, relative to its eps: another term that fits may be that large
SCALER, LARGE = 2**4, 2**13  # a loss scale is a power of two: from here on it may be one, and it is
NO_CLASSES = 0.1  # of a gradient's size, in its sums over classes; a penalty on logits is a small part of a loss
SMOOTHED = 0.7  # the least part of a target that label smoothing leaves, for all that people write
RESIDUALS = 2  # numbers that are not a multiple of others by chance, up to rounding; an interval has two ends
TORCH_VARIANCE = 0.5  # at which a Normal loss is a sum of squares, as mse_loss with reduction="sum"
WHY = (
    "Curvature and gradient must be those of one loss: damping and step size depend on it. This was seen at the first "
    "step, from the gradient of the model's outputs."
)


SQUARES = (
    "the trained loss is a sum of the squares of {}, and no loss is named. So the factors are those of the gradients "
    "that training sends back, with which residuals train far slower than with those of the squares: write "
    "kfac_fx.compile(model, ..., loss=lambda outputs: {}).{} If that is on purpose, write KFAC(..., "
    'estimation_mode="empirical"). This was seen at the first step.'
)
WITH_TARGETS = " The curvature does not depend on the targets of {}."
NOT_TOLD = " The gradient does not tell the loss of {}: add a distribution that is near for it."
DERIVATIVES_OUTSIDE = (
    "the trained loss has derivatives of the outputs, which torch.autograd.grad(..., create_graph=True) takes outside "
    "of forward, and the registered loss is of the outputs alone: factors and checks do not have these derivatives. If "
    "they are a small part of the loss, such as a penalty, nothing is wrong. Else compute them in forward and return "
    "the residuals, as in loss=lambda residuals: [kfac_fx.losses.Normal(residual) for residual in residuals]; or leave "
    "loss= out, and the factors are those of the gradients that training sends back."
)


class LossScaleWarning(UserWarning):
    """The loss that is trained is a multiple of the registered one, has its classes on another axis, fits no targets of
    it, has derivatives of the outputs, or reaches other parameters; or it is one of residuals, and has no name; or
    forward returns it, and it is not followed."""

    __module__ = "kfac_fx"


# --- the gradient at the Fisher's outputs -----------------------------------------------------------------------------


@dataclass
class Watched:
    """One forward of the first step."""

    recorder: Recorder
    outputs: list[Any]  # the leaves of what the model returned
    spec: Any  # their structure
    places: Sequence[int]  # of the Fisher's outputs among them; () if they are inside the forward
    fisher: list[Tensor]  # the values of the Fisher's outputs
    targets: Any  # those that forward hands to its losses, if they are known
    inner: dict[int, list[Tensor]]  # if () above: the gradients of the Fisher's outputs, of every number returned
    cases: int | None  # how many of them are kept; None for all
    part: float  # of the batch that is kept
    scaled: bool  # ran under an autocast to float16, for which people scale the loss
    gradients: dict[int, Tensor] = field(default_factory=dict)  # arrived so far, by leaf
    direct: dict[int, Tensor] | None = None  # see `direct_gradients`, once they have been asked for
    rows: Sequence[RowsOfLoss] = ()  # see `OutputLosses.rows`
    around: str | None = None  # the line of the warning about terms that do not pass the Fisher's outputs
    losses_at: Sequence[int] = ()  # of the losses that forward computes among the outputs
    thread: int = field(default_factory=threading.get_ident)  # of the forward, and of the backward
    roots: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # differentiated, by backward and identity
    padding: tuple[Tensor, Sequence[Dims | None]] | None = None  # the mask, and its dimensions in the Fisher's outputs
    meet: bool = False  # some of the outputs are computed from others
    numbers: tuple[dict[int, ReturnedNumber], dict[int, ReturnedNumber]] = ({}, {})  # returned: losses, and others
    apart: Sequence[int] = ()  # the other returned tensors that no loss of forward reads, by leaf
    of_numbers: dict[int, Tensor] = field(default_factory=dict)  # the gradients of all these that arrived, by leaf
    values: tuple[Any, ...] = ()  # of the inputs of the graph
    start: RandomState | None = None  # before the forward
    otherwise: Watched | None = None  # of the losses that forward returns, if their gradient does not pass the outputs

    @property
    def as_arrived(self) -> Watched | None:
        """This, or that of the returned losses if gradients arrived there; the sum if they arrived at both, because
        each has a part of the loss then. None if parts of the outputs were kept."""
        other = self.otherwise
        if other is None or not other.gradients:
            return self
        if not self.gradients:
            return other
        if self.cases is not None or len(self.places) != len(other.fisher):
            return None
        gradients = dict(zip(self.places, other.arrived(), strict=True))
        for place, gradient in self.gradients.items():
            gradients[place] = gradients[place] + gradient
        return replace(self, gradients=gradients, direct=None, roots=self.roots | other.roots)

    @torch.compiler.disable(reason="it reads the frames of the backward")  # type: ignore[untyped-decorator]
    def take(self, leaf: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        now = backward_here()
        self.roots |= {(now, id(root)): root.detach() for root in backward_roots(self.thread)}
        gradient = first(gradient.detach(), None if self.inner else self.cases).clone()
        self.direct = None
        self.gradients[leaf] = gradient + self.gradients[leaf] if leaf in self.gradients else gradient

    def take_number(self, leaf: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            gradient = gradient.detach().clone()
            self.of_numbers[leaf] = gradient + self.of_numbers[leaf] if leaf in self.of_numbers else gradient

    @property
    def is_given(self) -> bool:
        """Whether forward divides its loss by a number that does not grow with the batch."""
        return any(rows.divisor is not None for rows in self.rows[:1]) and not self.recorder.losses.is_mean

    def only_output(self, weighted: Sequence[tuple[float, float, LossFunction]]) -> str | None:
        """The expression of the only tensor that the model returns, if there is one loss, of all of it, as a loss by
        its name is; None otherwise."""
        leaves = [leaf for leaf in self.outputs if isinstance(leaf, Tensor)]
        if len(weighted) != 1 or len(leaves) != 1:
            return None
        loss, spec = weighted[0][2], self.recorder.loss
        if isinstance(spec, LossSpec) and not spec.named:
            inputs = loss.inputs
            if not any(in_one_memory(inputs, out) and inputs.numel() == out.numel() for out in self.fisher):
                return None
        return place_of_leaf(results.tree_unflatten(self.outputs, self.spec), leaves[0])

    @property
    def value(self) -> float | None:
        """The value of the loss that was differentiated; None if it was not one number."""
        values = list(self.roots.values())
        return float(values[0]) if len(values) == 1 and values[0].numel() == 1 else None

    @property
    def of_returned(self) -> float | None:
        """The factor of the loss that forward computes in the trained one; None if it is not known, or there are
        several."""
        gradients = [self.gradients[leaf] for leaf in self.losses_at if leaf in self.gradients]
        return float(gradients[0]) if len(gradients) == len(self.losses_at) == 1 and gradients[0].numel() == 1 else None

    def direct_gradients(self) -> dict[int, Tensor]:
        """By leaf the gradient that the user sent there: a loss and its parts are both returned, and the gradient of
        the loss arrives at the parts, too."""
        if self.direct is None:
            again = self.run_again() if self.meet and self.cases is None and len(self.gradients) > 1 else None
            self.direct = dict(self.gradients) if again is None else direct_gradients(again[0], self.gradients)
        return self.direct

    def arrived(self) -> list[Tensor]:
        """The gradient of every one of the Fisher's outputs."""
        gradients = [torch.zeros_like(value) for value in self.fisher]
        for leaf, gradient in self.direct_gradients().items():
            for n, before in enumerate(gradients):
                if self.inner:
                    gradients[n] = before + gradient * self.inner[leaf][n]
                elif self.places[n] == leaf:
                    gradients[n] = gradient
        return gradients

    def left_out(self) -> set[int]:
        """The Fisher's outputs that the trained loss does not depend on, by number.

        If they are inside the forward, those that only returned numbers depend on which no gradient has arrived at.
        """
        if not self.inner:
            return {n for n, place in enumerate(self.places) if place not in self.gradients}
        result = set()
        for n in range(len(self.fisher)):
            leaves = {leaf for leaf, gradients in self.inner.items() if bool(gradients[n].any())}
            result |= {n} if leaves and leaves.isdisjoint(self.gradients) else set()
        return result

    def losses(self) -> tuple[list[Tensor], list[tuple[float, float, LossFunction]]]:
        """The Fisher's outputs as constants, and the losses on them.

        A loss comes as (coefficient as registered, weight of its mean over its own cases, loss).
        """
        constants = [value.detach().requires_grad_(is_differentiable(value)) for value in self.fisher]
        losses = self.recorder.losses
        if self.padding is None:
            pairs = self.on(constants)
        else:
            mask, dims = self.padding
            pairs = real_losses(self.on, constants, dims, mask, losses.averages_elements)
        means = losses.averaged(pairs)
        return constants, [(c, weight, loss) for (c, _), (weight, loss) in zip(pairs, means, strict=True)]

    def run_again(self) -> tuple[list[Any], list[Tensor], dict[str, Tensor]] | None:
        """The leaves that forward returns and the Fisher's outputs, as functions of the parameters that learn, and
        these by name; None if the user's own forward leaves no memory for it, or if it was not begun here."""
        live = {name: with_gradient(value.detach()) for name, value in self.recorder.live_parameters().items()}
        if self.start is None:
            return None
        try:
            with same_random(self.start.devices):
                self.start.restore()
                outputs, fisher = self.recorder.outputs(live, self.values)
        except RuntimeError as error:
            if out_of_memory(error):
                return None
            raise
        learned = {name: value for name, value in live.items() if value.requires_grad}
        return results.tree_leaves(outputs), list(fisher), learned

    def on(self, fisher: Sequence[Tensor]) -> WeightedLosses:
        """The losses on other values of the Fisher's outputs."""
        outputs = list(self.outputs)
        for place, value in zip(self.places, fisher, strict=False):
            outputs[place] = value
        of_losses = fisher[: len(fisher_places(self.recorder, list(self.places)))] if self.places else fisher
        return self.recorder.losses.on(
            results.tree_unflatten(outputs, self.spec), tuple(of_losses), self.targets, self.rows
        )


def watch(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, start: RandomState
) -> Watched | None:
    """Watch the gradients of `outputs`, what the model returned; None if they would not tell the factor.

    start: the random streams before the forward.
    """
    if not recorder.losses.are_known:
        return None
    leaves, spec = results.tree_flatten(outputs)
    values = recorder.capture.flatten(args, kwargs)
    hooked, at_outputs = hooked_leaves(recorder, leaves)
    watched = watch_leaves(recorder, values, leaves, spec, hooked, at_outputs, start) if hooked else None
    if watched is not None and at_outputs:
        if losses := losses_apart(recorder, leaves, hooked):
            watched.otherwise = watch_leaves(recorder, values, leaves, spec, losses, False, start)
        else:
            for leaf in watched.losses_at:
                take_gradient(leaves[leaf], watched.take, leaf)
    if watched is not None:
        watched.numbers = numbers_of(recorder, leaves, values, start)
        watched.apart = [
            n for n in returned_apart(recorder, leaves) if leaves[n].numel() != 1 and passes_around(recorder, n)
        ]
        of_losses = places_of_losses(recorder, leaves) if watched.apart else ()
        for leaf in {**watched.numbers[0], **watched.numbers[1], **dict.fromkeys((*watched.apart, *of_losses))}:
            take_gradient(leaves[leaf], watched.take_number, leaf)
    return watched


def watch_unnamed(recorder: Recorder, outputs: Any) -> Watched | None:
    """Watch the gradients of what the model returned, where no loss is known; None if that is too large, or numbers."""
    leaves, spec = results.tree_flatten(outputs)
    hooked = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and is_differentiable(leaf) and leaf.requires_grad and leaf.numel() >= RESIDUALS
    ]
    if not hooked or sum(leaves[n].numel() for n in hooked) > LIMIT:
        return None
    kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    fisher = [kept[n] for n in hooked]
    watched = Watched(recorder, kept, spec, hooked, fisher, None, {}, None, 1.0, may_be_scaled(fisher))
    for leaf in hooked:
        take_gradient(leaves[leaf], watched.take, leaf)
    return watched


def may_be_scaled(fisher: Sequence[Tensor]) -> bool:
    """Whether forward runs under an autocast to float16."""
    kinds = {value.device.type for value in fisher}
    return any(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds)


def numbers_of(
    recorder: Recorder, leaves: Sequence[Any], values: tuple[Any, ...], start: RandomState
) -> tuple[dict[int, ReturnedNumber], dict[int, ReturnedNumber]]:
    """See `returned_numbers`; none if the user's own forward leaves no memory for these."""
    try:
        with same_random(start.devices):
            start.restore()
            return returned_numbers(recorder, leaves, values)
    except RuntimeError as error:
        if out_of_memory(error):
            return {}, {}
        raise


def watch_leaves(
    recorder: Recorder,
    values: tuple[Any, ...],
    leaves: Sequence[Any],
    spec: Any,
    hooked: list[int],
    at_outputs: bool,
    start: RandomState,
) -> Watched | None:
    """Watch the gradients of some of the returned leaves. hooked, at_outputs: as `hooked_leaves` has them."""
    inner: dict[int, list[Tensor]] = {}
    around: str | None = None
    places = hooked if at_outputs else []
    if places:
        fisher = [leaves[n].detach() for n in places]
    else:
        try:
            fisher, inner, around = within(recorder, values, hooked, start)
        except RuntimeError as error:
            if out_of_memory(error):  # the user's own forward is in memory, too
                return None
            raise
    of_cases = fisher[: len(fisher_places(recorder, places))] if places else fisher
    cases, part = enough(of_cases) if not recorder.emitted.case_dims else (None, 1.0)
    if cases == 0:
        return None
    watched = Watched(
        recorder,
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        spec,
        places,
        [first(value, cases).clone() for value in fisher],  # a CUDA graph may write over them before the step
        pytree.tree_map_only(Tensor, lambda leaf: first(leaf, cases), targets(recorder, values)),
        {leaf: [first(gradient, cases) for gradient in gradients] for leaf, gradients in inner.items()},
        cases,
        part,
        may_be_scaled(fisher),
        rows=recorder.losses.first_rows(of_cases, values, cases, part),
        around=around,
        padding=first_padding(recorder.emitted.padding(values, of_cases), cases, len(fisher)),
        losses_at=places_of_losses(recorder, leaves) or ([] if at_outputs else hooked),
        values=values,
        start=start,
        meet=recorder.whole and meet([leaves[n] for n in hooked]),
    )
    of_outputs = fisher_places(recorder, places)
    axes = recorder.axes_of_log_probabilities(results.tree_unflatten(list(leaves), spec), of_outputs)
    for leaf in hooked:
        take_gradient(leaves[leaf], watched.take, leaf, axes.get(leaf))
    return watched


def take_gradient(
    output: Tensor, take: Callable[[int, Tensor | None], None], leaf: int, log_softmax: int | None = None
) -> None:
    """Call `take(leaf, gradient)` in the backward.

    The hook of another tensor ends with its graph. That of a parameter, which the model returns, has no such end.

    Args:
        take: a method of an object, with which the hook ends.
        log_softmax: the axis of the classes, of an output that is logarithms of probabilities. Its gradient is then
            taken as that of the same loss of any logits, whose sum over the classes is zero: in front of the
            log_softmax they are equal.
    """
    if not output.requires_grad:
        return
    if log_softmax is not None:
        logarithms = output.detach()

        def take_of_logits(gradient: Tensor | None) -> None:
            take(
                leaf,
                None if gradient is None else gradient - logarithms.exp() * gradient.sum(log_softmax, keepdim=True),
            )

        output.register_hook(take_of_logits)
        return
    if not output.is_leaf:
        output.register_hook(partial(take, leaf))
        return
    method = weakref.WeakMethod(take)

    def hook(gradient: Tensor | None) -> None:
        if (bound := method()) is not None:
            bound(leaf, gradient)

    weakref.finalize(cast(Any, take).__self__, output.register_hook(hook).remove)


def hooked_leaves(recorder: Recorder, leaves: Sequence[Any]) -> tuple[list[int], bool]:
    """(numbers of the returned leaves through which the loss is trained, whether the first are the Fisher's outputs).

    Otherwise they are the numbers that forward returns, such as the loss; none if the structure tells nothing. The
    joined graph of a divided model has the outputs of its submodules, which do not tell what forward returns. A tensor
    that is returned twice has one number.
    """
    numbered = {id(leaf): (n, leaf) for n, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
    tensors = dict(sorted(numbered.values(), key=lambda pair: pair[0]))
    numbers = [n for n, leaf in tensors.items() if leaf.requires_grad and leaf.numel() == 1]
    if not recorder.whole:
        if recorder.losses.given is None and recorder.losses.are_known:  # Python computes the loss inside
            return numbers, False
        return [n for n, leaf in tensors.items() if is_differentiable(leaf)], True
    nodes = results.tree_leaves(recorder.capture.unflatten(recorder.program.returned))
    wanted = recorder.program.outputs
    if not wanted or len(nodes) != len(leaves):
        return [], False
    place = {node: number for number, node in enumerate(nodes) if isinstance(node, fx.Node)}
    if not all(node in place for node in wanted):
        return numbers, False
    places = [place[node] for node in wanted]
    penalties = [n for n in numbers if n not in places] if not recorder.program.losses else []
    return places + penalties, True


def fisher_places(recorder: Recorder, places: list[int]) -> list[int]:
    """Those of the Fisher's outputs among the watched leaves: without numbers that are computed from parameters alone,
    such as the divergence of Bayesian layers from their prior."""
    return places[: len(recorder.program.outputs)] if recorder.whole else places


def direct_gradients(leaves: Sequence[Any], arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The gradients that the user sends into outputs that may be computed from one another, by leaf. The gradient of
    x.T arrives at x, too.

    With all that arrived at x, g_x, and the derivative J of a later output y by x, the user sent g_x - Jᵀ g_y.

    leaves: what forward returns, as functions of the parameters. arrived: by leaf.
    """
    direct = dict(arrived)
    learned = [n for n in arrived if leaves[n].requires_grad]
    before = {n: [m for m in learned if m != n and is_behind(leaves[n], leaves[m])] for n in learned}
    for n in sorted(learned, key=lambda n: -len(before[n])):  # the last one has all that is before an earlier one
        others = [leaves[m] for m in before[n]]
        vector = direct[n].to(leaves[n]).view_as(leaves[n])
        pulled = torch.autograd.grad(leaves[n], others, vector, retain_graph=True, allow_unused=True) if others else ()
        for m, gradient in zip(before[n], pulled, strict=True):
            if gradient is None:  # a piece of the same tensor is before it
                continue
            rest = direct[m] - gradient.view_as(direct[m])
            direct[m] = torch.where(rest.abs() <= rounding_of_gradient(arrived[m]), 0, rest)
    return direct


def rounding_of_gradient(gradient: Tensor) -> Tensor:
    return ROUNDINGS * torch.finfo(gradient.dtype).eps * gradient.abs()


def is_behind(result: Tensor, output: Tensor) -> bool:
    """Whether a result is computed from an output, which may be a parameter."""
    if result.grad_fn is None:
        return False
    if output.grad_fn is not None:
        return comes_from(result.grad_fn, [output.grad_fn])
    return any(getattr(before, "variable", None) is output for before in nodes_before([result.grad_fn]))


def meet(outputs: Sequence[Tensor]) -> bool:
    """Whether some of the outputs are computed from others of them."""
    learned = [output for output in outputs if output.requires_grad]
    if len(learned) < 2:
        return False
    nodes = {output.grad_fn for output in learned} - {None}
    parameters = [output for output in learned if output.grad_fn is None]
    return any(
        before in nodes or any(getattr(before, "variable", None) is parameter for parameter in parameters)
        for before in nodes_before(nodes)
    )


def losses_apart(recorder: Recorder, leaves: Sequence[Any], places: Sequence[int]) -> list[int]:
    """The returned losses whose gradient does not pass the returned outputs at these places, by number.

    A forward that torch.compile made one function of has such losses: the outputs next to them are results, too.
    """
    outputs = [node for place in places if (node := leaves[place].grad_fn) is not None]
    return [n for n in places_of_losses(recorder, leaves) if not comes_from(leaves[n].grad_fn, outputs)]


def places_of_losses(recorder: Recorder, leaves: Sequence[Any]) -> list[int]:
    """The losses that forward computes and returns, by number."""
    losses = recorder.losses.returned(leaves)
    return [n for n, leaf in enumerate(leaves) if any(leaf is loss for loss in losses)]


def comes_from(result: Any, nodes: Sequence[Any]) -> bool:
    """Whether one of these nodes of autograd's graph is before a node `result`."""
    return any(before in nodes for before in nodes_before([result]))


def nodes_before(results: Iterable[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph before others, from these on: the outputs of a model are a few nodes before its
    loss. One of the others is among them if it is before another one."""
    waiting = deque(results)
    seen: set[Any] = set()
    while waiting:
        for before, _ in waiting.popleft().next_functions:
            if before is not None and before not in seen:
                yield before
                seen.add(before)
                waiting.append(before)


def enough(fisher: Sequence[Tensor]) -> tuple[int | None, float]:
    """(how many cases to keep, their part of all): None for all cases, 0 if a part of them is not possible."""
    elements, sizes = sum(value.numel() for value in fisher), {value.shape[:1] for value in fisher}
    if elements <= LIMIT:
        return None, 1.0
    if len(sizes) > 1 or not min(sizes):
        return 0, 0.0
    ((all_cases,),) = sizes
    cases = max(1, all_cases * LIMIT // elements)
    return cases, cases / all_cases


def first(tensor: Tensor, cases: int | None) -> Tensor:
    """The first cases, in memory of their own, so that the rest can go."""
    return tensor if cases is None or not tensor.dim() else tensor[:cases].clone()


def first_padding(
    padding: tuple[Tensor, Sequence[Dims | None]] | None, cases: int | None, outputs: int
) -> tuple[Tensor, Sequence[Dims | None]] | None:
    """The padding of the first cases, with dimensions for so many outputs; None if nothing is padding, or if these are
    not told apart along dimension 0."""
    if padding is None:
        return None
    mask, dims = padding
    dims = [*dims, *[None] * (outputs - len(dims))]
    if cases is None:
        return mask, dims
    wanted = [of_output for of_output in dims if of_output is not None]
    if all(len(set(of_output)) == 1 for of_output in wanted):  # cases and positions are merged
        return mask.reshape(-1)[:cases], dims
    return (mask[:cases], dims) if all(len(set(of)) == 2 and of[0] == 0 for of in wanted) else None


def targets(recorder: Recorder, values: tuple[Any, ...]) -> Any:
    """Those that forward hands to its losses; None if they depend on parameters, or are not all known."""
    try:
        of_losses = recorder.losses.targets_in_graph(values)
    except LossError:
        return None
    return of_losses if of_losses and all(target is not None for target in of_losses) else None


def within(
    recorder: Recorder, values: tuple[Any, ...], hooked: Sequence[int], start: RandomState
) -> tuple[list[Tensor], dict[int, list[Tensor]], str | None]:
    """The Fisher's outputs inside a forward that returns numbers, the gradients of those numbers, and `part_around`."""
    live = {name: with_gradient(value.detach()) for name, value in recorder.live_parameters().items()}
    with same_random(start.devices):
        start.restore()
        output, fisher = recorder.outputs(live, values)
    leaves, learned = results.tree_leaves(output), [value for value in fisher if value.requires_grad]
    inner = {}
    for n in hooked:
        arrived = torch.autograd.grad(leaves[n], learned, retain_graph=True, allow_unused=True, materialize_grads=True)
        grads = iter(direct_gradients(learned, dict(enumerate(arrived))).values() if meet(learned) else arrived)
        inner[n] = [next(grads) if value.requires_grad else torch.zeros_like(value) for value in fisher]
    trained = [n for n in hooked if any(leaves[n] is loss for loss in recorder.losses.returned(output))]
    around = part_around(recorder, [leaves[n] for n in trained], fisher, inner[trained[0]], live) if trained else None
    return [value.detach() for value in fisher], inner, around


# --- factors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossFactor:
    """The trained loss as a multiple of the mean of a registered loss."""

    multiple: float
    loss: LossFunction  # the registered one
    coefficient: float  # its weight, that of a mean case where they differ
    cases: int  # of the whole batch, also those without a target unless forward computes the loss
    with_targets: float  # the part of these cases that has a target
    spec: object  # the origin of the loss
    sure: bool = True  # not a number that only agrees with other forwards tell
    given: bool = False  # forward divides the loss by a number that is given, such as that of all targets of a step
    of: int = 1  # the number of registered losses
    place: int = 1  # among them, from 1
    alike: int = 1  # how many of them have its class and its shape
    unevenness: float = math.inf  # how far the gradient of a uniform distribution is from this one, in its roundings
    in_sum: bool = False  # forward computes the loss, a sum over cases
    curved: bool = False  # forward returns a function of the loss that is no multiple of it, such as its root
    is_single: bool = True  # there is one loss, of all of the only output
    output: str = "outputs"  # the expression of the only tensor, if it is single
    eps: float = 0.0  # as of `SquaredError`


def factors(watched: Watched, value: float | None, parts: int = 1, loss_scale: float = 1.0) -> list[LossFactor]:
    """The factors of the registered losses, as far as they can be told.

    Args:
        value: of the user's whole loss, if known, without a loss scale.
        parts: the number of losses that the user may have divided it into.
        loss_scale: the factor of the loss in the backward, if it is known.
    """
    arrived, spec = watched.arrived(), watched.recorder.loss
    leaves, weighted = watched.losses()
    eps = eps_of_halves(arrived)
    known: list[LossFactor] = []
    squares: list[tuple[SquaredError, LossFactor]] = []
    taken: set[int] = set()
    rest = value if watched.part == 1 else None  # of the value, which the known losses do not explain
    forms = [(type(loss), loss.inputs.shape) for *_, loss in weighted]
    for number, (registered, weight, loss) in enumerate(weighted):
        gradient = gradient_behind(loss.inputs, leaves, arrived)
        cases = loss.all_cases if spec is not None or loss.kept is None else int(loss.cases)
        if gradient is None or not bool(gradient.isfinite().all()) or not cases:
            continue
        if loss.targets is None:
            targets = loss.targets_behind(gradient)
            if targets is None and isinstance(loss, Normal):
                if are_residuals(loss.inputs.detach(), gradient):
                    targets = torch.zeros_like(gradient)
                elif all_trained(gradient, loss, eps):
                    unknown = LossFactor(
                        loss_scale,
                        loss,
                        registered,
                        loss.all_cases,
                        1.0,
                        spec,
                        of=len(weighted),
                        place=number + 1,
                        alike=forms.count(forms[number]),
                        eps=eps,
                    )
                    square = SquaredError(loss, weight, gradient / loss_scale, of_padding_too(loss, spec), eps)
                    squares.append((square, unknown))
            if targets is None:
                rest = rest if isinstance(loss, Normal) else None
                continue
            loss.with_targets(targets)
        (of_sum,) = torch.autograd.grad(loss.evaluate(), loss.inputs, retain_graph=True)
        rows = of_sum * weight / cases if loss.weights is None else of_sum * loss.weights * weight / cases
        expected = by_leaves(loss.inputs, leaves, rows.to(loss.inputs.dtype))
        reached = {n: gradient for n, gradient in enumerate(expected) if gradient is not None}
        multiple = None if taken & {*reached} else ratio([arrived[n] for n in reached], [*reached.values()])
        taken |= {*reached}
        if multiple is None:
            rest = None
        else:
            explained = multiple / loss_scale * weight * value_of(loss) / cases
            rest = None if rest is None else rest - explained
            known.append(
                LossFactor(
                    multiple / watched.part,
                    loss,
                    coefficient=float(weight) if isinstance(registered, Tensor) else registered,
                    cases=round(cases / watched.part),
                    with_targets=part_with_targets(loss) if cases == loss.all_cases else 1.0,
                    spec=spec,
                    given=watched.is_given,
                    of=len(weighted),
                    place=number + 1,
                    alike=forms.count(forms[number]),
                    unevenness=unevenness(loss, of_sum) / rounding_of(arrived),
                    in_sum=spec is None and not watched.recorder.losses.is_mean,
                    curved=is_curved(watched.recorder.program, number) if spec is None else False,
                    eps=eps,
                )
            )
    told = factors_of_squares([of for of, _ in squares], rest, parts)
    if told is not None:
        pairs = zip(told, (unknown for _, unknown in squares), strict=True)
        known += [replace(of, multiple=of.multiple * factor, sure=sure) for (factor, sure), of in pairs]
    output = watched.only_output(weighted)
    single = {"is_single": False} if output is None else {"is_single": True, "output": output}
    return [replace(of, **single) for of in known or factor_of_returned(watched, weighted)]


def is_curved(program: Program, number: int) -> bool:
    """Whether forward returns a function of one of its losses that is not linear in it."""
    way = program.losses[number].way if number < len(program.losses) else None
    return number < len(program.losses) and (way is None or not way.linear)


def all_trained(gradient: Tensor, loss: LossFunction, eps: float) -> bool:
    """Whether the trained loss leaves no element out, of which the gradient would be zero. In half precision a few are
    rounded to zero. eps: as of `SquaredError`."""
    zero = (gradient == 0) & ~torch.as_tensor(is_padding(loss), device=gradient.device)
    return int(zero.sum()) <= OF_EPS * eps * zero.numel()


def is_padding(loss: LossFunction) -> Tensor | bool:
    """[inputs...], the elements that are padding; False: none of them."""
    return False if loss.real_elements is None else ~loss.real_elements


def real_elements(loss: LossFunction) -> float | None:
    """The number of real elements of a case, on average; None if there is no padding among them."""
    real = 0 if loss.real_elements is None else int(loss.real_elements.sum())
    return real / loss.all_cases if 0 < real < loss.inputs.numel() else None


def of_padding_too(loss: LossFunction, spec: object) -> float | None:
    """The factor of a mean over all elements, of which some are padding; None if the declared loss is no such mean, or
    there is no padding."""
    of_torch = spec.of_torch if isinstance(spec, LossSpec) else None
    if of_torch is None or not of_torch.averages_elements or loss.real_elements is None:
        return None
    return 1 / share_of_real(loss)


def value_of(loss: LossFunction) -> float:
    """The value of a loss of torch, summed over cases."""
    return float(loss.evaluate().detach() - loss.constant())


def factor_of_returned(watched: Watched, weighted: Sequence[tuple[float, float, LossFunction]]) -> list[LossFactor]:
    """The factor of the first loss that forward computes, by the gradient of what forward returns; none if it is not
    known.

    It tells a factor where no targets fit the gradient of the outputs, as with label smoothing.

    weighted: see `Watched.losses`.
    """
    outer = watched.of_returned
    if outer is None or not weighted:
        return []
    losses = watched.recorder.losses
    registered, _, loss = weighted[0]
    cases = round((loss.all_cases if loss.kept is None else int(loss.cases)) / watched.part)
    of_mean = cases if losses.is_mean else float(losses.in_forward.undivided(loss, watched.rows))
    if not cases or not of_mean or not math.isfinite(outer) or outer <= 0:
        return []
    coefficient = 1.0 if isinstance(registered, Tensor) else registered
    factor = LossFactor(
        outer * cases / of_mean, loss, coefficient, cases, 1.0, None, given=watched.is_given, in_sum=not losses.is_mean
    )
    return [replace(factor, of=len(weighted))]


def gradient_behind(inputs: Tensor, leaves: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
    """The gradient g of `inputs` that arrives at the leaves as `vectors`, v = Jᵀ g.

    Every element of `inputs` must be a function of one element of the leaves. Then g = J v / diag(J Jᵀ). Products with
    J are those of reverse mode, twice. Elements that are constant, as those of cases without a target, have a g of
    zero. None if `inputs` needs no gradient, or none of the leaves is behind it.
    """
    if not inputs.requires_grad:
        return None
    dummy = torch.zeros_like(inputs, requires_grad=True)
    wanted = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    pulled = torch.autograd.grad(
        inputs, [leaves[n] for n in wanted], dummy, create_graph=True, retain_graph=True, allow_unused=True
    )
    pairs = zip(pulled, wanted, strict=True)
    live = [(product, n) for product, n in pairs if product is not None and product.requires_grad]
    if not live:
        return None

    def derivative(directions: Sequence[Tensor]) -> Tensor:
        cotangents = [directions[n].to(product) for product, n in live]
        (result,) = torch.autograd.grad([product for product, _ in live], dummy, cotangents, retain_graph=True)
        return result

    ones = by_leaves(inputs, leaves, torch.ones_like(inputs))
    squares = derivative([torch.zeros_like(leaf) if of is None else of for leaf, of in zip(leaves, ones, strict=True)])
    return torch.where(squares == 0, 0, derivative(vectors) / squares)


def by_leaves(result: Tensor, leaves: Sequence[Tensor], vector: Tensor) -> list[Tensor | None]:
    """The gradient of `result` times `vector` by every leaf; None by those that it does not depend on, as integers."""
    learnable = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(result, learnable, vector, retain_graph=True, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def ratio(arrived: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """f if the first gradient is f times the second."""
    d, r = (torch.cat([real_numbers(g).flatten().double() for g in gradients]) for gradients in (arrived, expected))
    size = float(r @ r)
    if not size or not bool(d.isfinite().all()) or not float(d.norm()):
        return None
    factor = float(d @ r) / size
    apart = float((d - factor * r).norm())
    return factor if factor > 0 and apart <= rounding_of(arrived) * float(d.norm()) else None


def rounding_of(gradients: Sequence[Tensor]) -> float:
    """The relative error of a gradient that is a multiple of another."""
    return max(PROPORTIONAL, eps_of_halves(gradients))


def eps_of_halves(gradients: Sequence[Tensor]) -> float:
    """The eps of the coarsest dtype of gradients in half precision; 0 if there are none."""
    return max(
        (torch.finfo(of.dtype).eps for of in gradients if of.dtype in (torch.bfloat16, torch.float16)), default=0.0
    )


def are_residuals(outputs: Tensor, gradient: Tensor) -> bool:
    """Whether the targets of a squared error are zero, because its gradient is a multiple of the outputs.

    Other targets t would have to be a multiple of the outputs m, as where both are constants: m varies.
    """
    numbers = outputs.double().flatten()
    if numbers.is_complex() or numbers.numel() < RESIDUALS:
        return False
    varies = float((numbers - numbers.mean()).norm()) > SCALE_TOLERANCE * float(numbers.norm())
    return varies and ratio([gradient], [outputs]) is not None


@dataclass(frozen=True)
class SquaredOutput:
    """An output of a forward without a named loss, as if its loss were a squared error.

    factor: of the mean of its squares over the cases of this forward, if its gradient is a multiple of the output; None
    if it has targets, or another loss.
    """

    place: str
    square: SquaredError
    factor: float | None

    @property
    def value(self) -> float:
        """Its part of the trained loss, as far as it is known."""
        loss = self.square.loss
        return (self.factor or 0.0) * float(loss.inputs.double().square().sum()) / loss.all_cases

    @property
    def is_of_logits(self) -> bool:
        loss, gradient = self.square.loss, self.square.gradient
        return any(factor_of_logits(kind, loss.inputs, gradient) for kind in ("categorical", "multi_bernoulli"))


def squared_outputs(forward: Watched, loss_scale: float) -> list[SquaredOutput]:
    """The outputs of a forward that have a gradient; none if `loss=` could not name one of them."""
    outputs, found = results.tree_unflatten(forward.outputs, forward.spec), []
    for n, gradient in sorted(forward.gradients.items()):
        output = forward.outputs[n]
        place = place_of_leaf(outputs, output)
        if place is None or output.is_complex() or not bool(gradient.isfinite().all()):
            return []
        square = SquaredError(Normal(output), 1.0, gradient / loss_scale, eps=eps_of_halves([gradient]))
        multiple = ratio([square.gradient], [output]) if are_residuals(output, gradient) else None
        factor = None if multiple is None else multiple * square.loss.all_cases / 2
        found.append(SquaredOutput(place, square, factor))
    return found


def squares_without_a_name(forwards: Sequence[Watched], loss_scale: float, derived: bool) -> list[str]:
    """The line of the warning about a loss without a name that is a sum of the mean squares of the trained outputs.

    The gradient of a norm, or of its logarithm, is a multiple of the outputs, too: the value tells, or weights that
    people write. Outputs with targets need both. Derivatives that the user takes of outputs do not pass these, and the
    value tells of other terms. All forwards of a step have one `loss=`, so they have to agree.

    derived: as of `check_scale`.
    """
    each = [squared_outputs(forward, loss_scale) for forward in forwards]
    if derived or not each or not all(any(of.factor is not None for of in outputs) for outputs in each):
        return []
    parts, by_value = len(forwards), True
    compared: set[str] = set()
    unknown: set[str] = set()
    for roots in dict.fromkeys(frozenset(forward.roots) for forward in forwards):
        group = [n for n, forward in enumerate(forwards) if forward.roots.keys() == roots]
        outputs, value = [of for n in group for of in each[n]], forwards[group[0]].value
        others, known = [of for of in outputs if of.factor is None], sum(of.value for of in outputs)
        rest = None if value is None else value / loss_scale - known
        by_value = by_value and rest is not None and not others
        if not others:
            if rest is not None and abs(rest) > SCALE_TOLERANCE * known:
                return []
        elif rest is None or len(group) > 1 or any(of.is_of_logits for of in others):
            return []
        else:
            ((n,), squares) = group, [of.square for of in others]
            are_whole = all(all_trained(square.gradient, square.loss, square.eps) for square in squares)
            factors = factors_of_squares(squares, rest, parts) if are_whole else None
            if factors is not None and all(sure for _, sure in factors):
                told = iter(factor for factor, _ in factors)
                each[n] = [replace(of, factor=next(told)) if of.factor is None else of for of in outputs]
                compared |= {of.place for of in others}
            elif rest <= known:
                unknown |= {of.place for of in others}
            else:
                return []
    terms = []
    if any([of.place for of in outputs] != [of.place for of in each[0]] for outputs in each):
        return []
    for of_place in zip(*each, strict=True):
        place, square = of_place[0].place, of_place[0].square
        if place in unknown:
            continue
        counts = [of.square.loss.all_cases for of in of_place]
        weight = multiple_of_all([of.factor or 0.0 for of in of_place], counts)
        number = None if weight is None else square.nominal(weight, parts)
        is_odd = number is None and not by_value
        if weight is None or is_odd or is_loss_scale(weight, any(forward.scaled for forward in forwards)):
            return []
        normal, written = f"kfac_fx.losses.Normal({place})", weight if number is None else number
        terms.append(normal if number == 1.0 else f"({written:.4g}, {normal})")
    places = [of.place for of in each[0]]
    names = "what forward returns"
    if unknown:
        names = f"{' and '.join(place for place in places if place not in unknown)} and another loss"
    rest_of_text = "".join(
        text.format(" and ".join(place for place in places if place in of))
        for text, of in ((WITH_TARGETS, compared), (NOT_TOLD, unknown))
        if of
    )
    written = terms[0] if len(terms) == 1 and not unknown else f"[{', '.join(terms)}]"
    return [SQUARES.format(names, written, rest_of_text)]


def unevenness(loss: LossFunction, of_sum: Tensor) -> float:
    """How far the predictions p of a Categorical or MultiBernoulli loss are from uniform, relative to its gradient
    p - t.

    For predictions that are uniform, label smoothing by s has the gradient of 1 - s times the loss.
    """
    outputs = loss.inputs.detach()
    if isinstance(loss, Categorical):
        deviation = outputs.softmax(-1) - 1 / outputs.shape[-1]
    elif isinstance(loss, MultiBernoulli):
        deviation = outputs.sigmoid() - 0.5
    else:
        return math.inf
    counted = of_sum.any(-1, keepdim=True)  # not those of ignored targets
    size = float(torch.where(counted, deviation, 0).norm())
    return size / max(float(of_sum.norm()), torch.finfo(of_sum.dtype).tiny)


def part_with_targets(loss: LossFunction) -> float:
    """The part of the cases that has a target, and of those of other losses the part that is no padding."""
    kept = loss.real if loss.ignored is None else loss.not_ignored()
    return 1.0 if kept is None else max(1, int(kept.sum())) / loss.all_cases


# --- a multiple of the registered loss ------------------------------------------------------------------------------


def check_scale(
    watched: Sequence[Watched],
    *,
    reduction: str,
    loss_scale: float,
    value: float | None,
    in_training: bool,
    recorded: float | None = None,
    derived: bool = False,
    replicas: Replicas | None = None,
) -> bool:
    """Warn of a trained loss that is a multiple of the registered one, or has its classes on another axis.

    Returns whether the padding mask seems to be inverted, of which alone it warns then.

    Args:
        watched: the forwards of a step.
        reduction: "mean" or "sum", as the user declared the loss.
        loss_scale: the factor of the loss in the backward, if the optimizer was told of it.
        value: of the whole loss, if known.
        in_training: the statistics come from the gradients of that backward, as they are.
        recorded: the number of cases that these statistics count.
        derived: the loss has derivatives of the outputs, which the user took outside of forward.
        replicas: the processes whose gradients are averaged. All of them call this.
    """
    unnamed = [forward for forward in watched if forward.gradients and not forward.recorder.losses.are_known]
    for told in squares_without_a_name(unnamed, loss_scale, derived):
        warn_user(LossScaleWarning(told))
    used = [forward for forward in watched if forward.gradients and forward.recorder.losses.are_known]
    of_losses = used[:1] if are_compared(used) else used
    roots = Counter(root for forward in of_losses for root in forward.roots)
    each: list[list[LossFactor]] = []
    if inverted := [line for forward in used[:1] for line in inverted_mask(forward)]:
        warn_user(LossScaleWarning("\n".join([*inverted, WHY])))
        return True
    with torch.enable_grad():
        reached = gradients_of(used[0], reduction, loss_scale) if used else []
        unread = [] if in_training else [line for forward in used[:1] for line in unread_outputs(forward, used[1:])]
        kinds = misplaced_classes, without_targets, cross_entropies, no_events, other_spread, rates
        of_kinds = ([line for reach in reached if (line := kind(reach)) is not None] for kind in kinds)
        lines = next(filter(None, of_kinds), [])
        known: float | None = None
        for forward in () if lines else of_losses:
            alone = all(roots[root] == 1 for root in forward.roots)  # no other has a part of its value
            seen = forward.value / loss_scale if alone and forward.value is not None else None
            known = value if value is not None and len(of_losses) == 1 else seen
            each.append(factors(forward, known, len(of_losses), loss_scale))
        if not lines and not in_training:
            if_padding = words_of_padding(used[0]) if used else ""
            # The report tells the weights in a loss that forward computes.
            declared = len(of_losses) == 1 and used[0].recorder.loss is not None
            lines += weights_of_squares(reached, known * loss_scale if known is not None and declared else None)
            for reach in reached:
                of_cases = [*weights_of_cases(reach, if_padding), *lines_of_rows(reach, if_padding)]
                lines += of_cases if of_cases and untrained_are_learned(used[0], reach) else []
            lines += [forward.around for forward in used[:1] if forward.around is not None]
            for forward in used[:1]:
                lines += unread
                lines += outputs_apart(forward)
                numbers = {n: float(of) for n, of in forward.of_numbers.items() if n not in forward.apart}
                lines += parts_of_others(*forward.numbers, numbers)
    same_losses = not any(len(of_forward) != len(each[0]) for of_forward in each)
    by_loss = list(zip(*each, strict=True)) if same_losses else []
    here: list[tuple[int, float | None]] = []
    for of_loss in by_loss:
        cases = sum(factor.cases for factor in of_loss)
        here.append((cases, factor_of_step(of_loss, reduction, loss_scale)))
    shared = [here] if replicas is None else replicas.told(here)
    wrong: list[tuple[float, Sequence[LossFactor], int]] = []
    for number, of_loss in enumerate(by_loss):
        cases, multiple = of_processes(number, here, shared) if reduction == "mean" else here[number]
        if multiple is not None and recorded and reduction == "mean":
            lines += counted_without_target(multiple, of_loss, recorded)
        if multiple is None or is_right(multiple, of_loss) or may_be_smoothing(multiple, of_loss):
            continue
        divided = not in_training and is_loss_scale(multiple, any(forward.scaled for forward in used))
        per_case = multiple, multiple / cases_per_target(of_loss)
        undivided = near(multiple, cases) or (len(of_loss) > 1 and any(near(of, len(of_loss)) for of in per_case))
        if not divided or undivided:
            wrong.append((multiple, of_loss, cases))
    lines += advised(wrong, reduction)
    with torch.enable_grad():
        lines += untrained(used)
        # The derivatives of a classifier are a penalty, and its curvature is not that of the loss anyway.
        if (
            derived
            and used
            and not lines
            and all(isinstance(loss, Normal) for of in used[:1] for *_, loss in of.losses()[1])
        ):
            lines.append(DERIVATIVES_OUTSIDE)
    if lines:
        warn_user(LossScaleWarning("\n".join([*dict.fromkeys(lines), WHY])))
    return False


def inverted_mask(watched: Watched) -> list[str]:
    """The line of the warning, for a padding mask that is nonzero at padding, if all gradients are at its zeros."""
    if watched.padding is None:
        return []
    mask, dims = watched.padding
    found = [
        torch.stack([torch.where(spread(kept, along, grad.shape), grad, 0).any() for kept in (mask != 0, mask == 0)])
        for grad, along in zip(watched.arrived(), dims, strict=True)
        if along is not None
    ]
    at_ones, at_zeros = torch.stack(found).any(0).tolist() if found else (False, False)
    return [INVERTED.format(int((mask != 0).sum()))] if at_zeros and not at_ones else []


def are_compared(used: Sequence[Watched]) -> bool:
    """Whether the only forwards are the two sides of one squared error, as in F.mse_loss(net(a), net(b)): the gradients
    of one side are those of the other with the other sign. Then a case of the loss is one of each side."""
    if len(used) != 2 or used[0].roots.keys() != used[1].roots.keys():
        return False
    sides = [forward.arrived() for forward in used]
    return len(sides[0]) == len(sides[1]) and all(
        left.shape == right.shape and torch.equal(left, -right) for left, right in zip(*sides, strict=True)
    )


def factor_of_step(of_loss: Sequence[LossFactor], reduction: str, loss_scale: float) -> float | None:
    """The factor of one loss in all forwards of a step, relative to its mean, or sum, over all cases.

    It may also be a mean of means over different numbers of cases, or of cases with a target. None if the forwards
    differ in another way.
    """
    if not all(factor.sure for factor in of_loss):
        return None
    multiples, counts = [factor.multiple / loss_scale for factor in of_loss], [factor.cases for factor in of_loss]
    if reduction == "sum":
        scales = [multiple / count for multiple, count in zip(multiples, counts, strict=True)]
        return agreed(scales)
    of_means = multiple_of_all(multiples, counts)
    if of_means is not None:
        return of_means
    per_target = agreed(
        [multiple * of.with_targets * len(of_loss) for multiple, of in zip(multiples, of_loss, strict=True)]
    )
    return None if per_target is None else per_target * cases_per_target(of_loss)


def multiple_of_all(multiples: Sequence[float], cases: Sequence[int]) -> float | None:
    """The multiple of the mean over all cases of a step that the multiples of means over the cases of its forwards are;
    of the mean of these means, if that is the one on which they agree; None if they agree on neither."""
    of_cases = agreed([multiple * sum(cases) / number for multiple, number in zip(multiples, cases, strict=True)])
    return agreed([multiple * len(cases) for multiple in multiples]) if of_cases is None else of_cases


def agreed(numbers: Sequence[float]) -> float | None:
    """The mean of numbers that are all near to it; else None."""
    mean = sum(numbers) / len(numbers)
    return mean if all(near(number, mean) for number in numbers) else None


def of_processes(
    number: int, here: Sequence[tuple[int, float | None]], shared: Sequence[Sequence[tuple[int, float | None]]]
) -> tuple[int, float | None]:
    """(cases, multiple of the mean over them) of a loss of which the gradients are averaged over processes.

    A sum over the cases of a process, times the number of processes and divided by the cases of all, is a part of the
    mean over all, and another multiple of the process's own mean in every process.

    number: of the loss. here, shared: of this process and of all, by loss.
    """
    of_loss = [of_process[number] for of_process in shared if number < len(of_process)]
    multiples = [multiple for _, multiple in of_loss if multiple is not None]
    if len(multiples) < len(shared) or all(near(multiple, multiples[0]) for multiple in multiples):
        return here[number]
    total = sum(cases for cases, _ in of_loss)
    of_all = [multiple * total / len(of_loss) / cases for (cases, _), multiple in zip(of_loss, multiples, strict=True)]
    alike = all(near(multiple, of_all[0]) for multiple in of_all)
    return (total, of_all[0]) if alike else here[number]


def is_right(multiple: float, of_loss: Sequence[LossFactor]) -> bool:
    """Cases without a target may count, or not.

    The divisor may also be between the two numbers: the labels of sequences are counted before they are shifted, as for
    the `num_items_in_batch` of Hugging Face's Trainer. Where forward divides by it, it may be that of all processes,
    and only a number of another size is told.
    """
    if all(factor.given for factor in of_loss):
        return DIVIDED_BY_CASES[0] <= multiple <= DIVIDED_BY_CASES[1]
    tolerance = max(SCALE_TOLERANCE, OF_TERMS * max(factor.eps for factor in of_loss))
    return 1.0 - tolerance <= multiple <= (1.0 + tolerance) * cases_per_target(of_loss)


def cases_per_target(of_loss: Sequence[LossFactor]) -> float:
    return sum(f.cases for f in of_loss) / sum(f.with_targets * f.cases for f in of_loss)


def may_be_smoothing(multiple: float, of_loss: Sequence[LossFactor]) -> bool:
    """Whether label smoothing has this gradient, too: predictions are uniform as far as roundings tell."""
    return SMOOTHED <= multiple < 1 and all((1 - multiple) * factor.unevenness <= 1 for factor in of_loss)


def counted_without_target(multiple: float, of_loss: Sequence[LossFactor], recorded: float) -> list[str]:
    """The line of the warning, for statistics of the trained loss's gradients that count cases without a target, which
    its mean does not: the gradients are multiplied by all cases before they are squared."""
    labels, cases = sum(f.with_targets * f.cases for f in of_loss), sum(f.cases for f in of_loss)
    if near(labels, cases) or multiple * recorded <= (1.0 + SCALE_TOLERANCE) * cases:
        return []
    return [
        f"the trained loss is a mean over the {labels:.0f} of {cases} cases that have a target, and the statistics of "
        f"its gradients count {recorded:.0f}: the factors G are {multiple * recorded / cases:.3g} times too large. "
        'Let forward compute the loss, name padding with padding_mask=, or leave out estimation_mode="empirical".'
    ]


def near(number: float, other: float) -> bool:
    return abs(number - other) <= SCALE_TOLERANCE * other


def is_loss_scale(multiple: float, scaled: bool) -> bool:
    """Whether it may be that of a GradScaler, which divides the gradients before the step. scaled: as of `Watched`."""
    return is_power_of_two(multiple) and (scaled or multiple >= LARGE)


def is_power_of_two(multiple: float) -> bool:
    power = round(math.log2(multiple))
    return power > 0 and abs(multiple / 2**power - 1) < PROPORTIONAL


def advised(wrong: Sequence[tuple[float, Sequence[LossFactor], int]], reduction: str) -> list[str]:
    """The lines of the warning, for (multiple, factors in the forwards, cases) of every loss that has another multiple.

    If one of them is a sum, the whole loss is to be divided, and the others are told what is left then.
    """
    sums = [reduction == "mean" and near(multiple, cases) for multiple, _, cases in wrong]
    lines: list[tuple[str, LossFactor]] = []
    for (multiple, of_loss, cases), is_sum in zip(wrong, sums, strict=True):
        left = multiple / cases
        if is_sum or not any(sums) or left < SMOOTHED:
            lines.append((advice(multiple, of_loss, cases, reduction), of_loss[0]))
        elif not is_right(left, of_loss):
            lines.append((f"behind that division {advice(left, of_loss, cases, reduction)}", of_loss[0]))
    texts = [line for line, _ in lines]
    return [
        line if texts.count(line) == factor.alike else f"loss {factor.place} of {factor.of}: {line}"
        for line, factor in lines
    ]


def advice(multiple: float, of_loss: Sequence[LossFactor], cases: int, reduction: str) -> str:
    """The line of the warning: the multiple, its usual cause, and the code to write instead.

    The mean may be that over the cases that have a target, as torch takes it, or over all: that with a usual cause.
    """
    per_target = cases_per_target(of_loss)
    means = [(multiple, cases)]
    if reduction == "mean" and not near(per_target, 1.0):
        means.insert(0, (multiple / per_target, round(cases / per_target)))
    texts = [usual_cause(of_mean, of_loss[0], number, len(of_loss), reduction) for of_mean, number in means]
    of_mean, number = next((mean for mean, text in zip(means, texts, strict=True) if text), means[0])
    factor, several = of_loss[0], of_loss[0].of > 1
    which = f"of {list(factor.loss.inputs.shape)} " if several else ""
    with_target = " with a target" if number != cases else ""
    if factor.curved:
        return (
            f"the gradient of the trained loss is {of_mean:.4g} times that of the {reduction} of the registered "
            f"{type(factor.loss).__name__} loss {which}over its {number} {'case' if number == 1 else 'cases'}"
            f"{with_target} in this step, as forward returns a function of that loss, such as its root or its "
            "logarithm: let it return the loss itself."
        )
    return (
        f"the trained loss is {of_mean:.4g} times the {reduction} of the registered {type(factor.loss).__name__} loss "
        f"{which}over its {number} {'case' if number == 1 else 'cases'}{with_target}; "
        f"{next(filter(None, texts), None) or other_cause(of_mean, factor)}."
    )


def registered_as(multiple: float, factor: LossFactor) -> str:
    """The change that makes the registered loss that many times as large, as a part of a sentence."""
    name, weight = type(factor.loss).__name__, factor.coefficient * multiple
    variance = f", var={factor.loss.var:g}" if isinstance(factor.loss, Normal) else ""
    if isinstance(factor.spec, LossSpec) and not factor.is_single:
        return f"give it the coefficient of ({weight:.4g}, kfac_fx.losses.{name}(...)) in loss="
    if isinstance(factor.spec, LossSpec):
        made = factor.loss.written or f"kfac_fx.losses.{name}({factor.output}{variance})"
        return f"register it as loss=lambda outputs: ({weight:.4g}, {made})"
    if factor.spec is not None:
        return f"register it on a LayerCollection with coeff={weight:.4g}"
    return f"let forward multiply its loss by {multiple:.4g}"


def other_cause(multiple: float, factor: LossFactor) -> str:
    may_be_scaler = is_power_of_two(multiple) and multiple >= SCALER
    scaler = "if a GradScaler multiplies it, write KFAC(..., grad_scaler=scaler); else " if may_be_scaler else ""
    return f"{scaler}take the factor out, or {registered_as(multiple, factor)}"


def usual_cause(multiple: float, factor: LossFactor, cases: int, forwards: int, reduction: str) -> str:
    """The usual cause of a multiple of the mean, or sum, over so many cases; empty if there is none."""
    loss, elements = factor.loss, factor.loss.inputs.numel() / factor.loss.all_cases
    mean, is_mean = short_name(factor), near(factor.coefficient * multiple * elements, 1.0)
    is_named = mean and is_mean and factor.is_single
    by_name = f"register it as loss={mean!r}" if is_named else registered_as(multiple, factor)
    inside = "divide by them inside of forward, and by the number of cases behind it"
    over = inside if factor.in_sum else f"sum over them, or {by_name}"
    of_elements = f"it is a mean over the {elements:.0f} elements of a case, too: {over}"
    if reduction == "mean":
        twice = "it is divided by the number of cases twice: a mean is already"
        usual = [
            (cases, "it is their sum: divide it by the number of cases"),
            (1 / cases, f"{twice}; or {of_elements}" if near(elements, cases) else twice),
        ]
    else:
        usual = [
            (cases, "it is multiplied by the number of cases: a sum over them needs no factor"),
            (1 / cases, "it is their mean: write KFAC(..., reduction='mean')"),
        ]
    if factor.in_sum and (
        factor.given
        or (near(multiple, cases) and DIVIDED_BY_CASES[0] <= factor.coefficient * cases <= DIVIDED_BY_CASES[1])
    ):
        divisor = "the number by which forward divides its sum" if factor.given else f"{factor.coefficient:.4g}"
        outside = f"net(...) / {'number' if factor.given else f'{1 / factor.coefficient:.4g}'}"
        reason = "may count cases, elements or something else" if factor.given else "may be a weight of the loss"
        usual = [(multiple, f"{divisor} {reason}: return the sum, and divide behind forward: ({outside}).backward()")]
    usual += [
        (forwards, f"the step has {forwards} forwards: divide the loss of each by {forwards}"),
        (1 / elements, of_elements),
    ]
    if (
        reduction == "mean"
        and loss.case_axes > 1
        and (examples := len(loss.inputs) * factor.cases / loss.all_cases) > 1
    ):
        each = cases / examples
        usual.append(
            (
                each,
                f"it is the sum over all cases, divided by the {examples:.0f} examples of the batch: divide it by the "
                f"number of cases, as a mean does. {each:.4g} cases for an example are no constant if examples have "
                "different lengths",
            )
        )
    if reduction == "mean" and (padded := of_padding_too(loss, factor.spec)) is not None:
        usual.append((padded, "it is a mean over padding, too: take it over the real elements, as losses[mask].mean()"))
    if (real := real_elements(loss)) is not None:
        usual.append(
            (
                1 / real,
                f"it is a mean over the {real * loss.all_cases:.0f} real elements, whose number differs from batch to "
                "batch: return the mask, too, and name these alone, as "
                f"kfac_fx.losses.{type(loss).__name__}(...[mask != 0])",
            )
        )
    return next((text for number, text in usual if near(multiple, number)), "")


def short_name(factor: LossFactor) -> str | None:
    """The name of the loss of torch that averages the elements of the registered distribution, if there is one."""
    kinds = {DISTRIBUTIONS[of_torch.distribution]: of_torch for of_torch in TORCH_LOSSES}
    of_torch = kinds.get(type(factor.loss)) if isinstance(factor.spec, LossSpec) else None
    other = isinstance(factor.loss, Normal) and factor.loss.var != TORCH_VARIANCE
    return None if of_torch is None or not of_torch.averages_elements or other else of_torch.short


# --- losses that are registered and not trained -----------------------------------------------------------------------


def untrained(used: Sequence[Watched]) -> list[str]:
    """The lines of the warning, for losses whose curvature is recorded and that no gradient of any forward reaches.

    used: the forwards of a step whose outputs have gradients.
    """
    names: dict[int, str] = {}
    silent: set[int] | None = None
    for watched in used:
        leaves, weighted = watched.losses()
        left_out, in_forward = watched.left_out(), set()
        for number, (_, _, loss) in enumerate(weighted):
            names[number] = f"{type(loss).__name__} of {list(loss.inputs.shape)}"
            if loss.inputs.requires_grad:
                reached = by_leaves(loss.inputs, leaves, torch.ones_like(loss.inputs))
                behind = {n for n, gradient in enumerate(reached) if gradient is not None}
                in_forward |= {number} if behind <= left_out else set()
        silent = in_forward if silent is None else silent & in_forward
    if not silent:
        return []
    spec = used[0].recorder.loss
    remedy = (
        "let forward compute it from detached tensors"
        if spec is None
        else f"leave it out of {'loss=' if isinstance(spec, LossSpec) else 'the LayerCollection'}"
    )
    these = ", ".join(names[number] for number in sorted(silent))
    return [
        f"the trained loss does not depend on {these}, {len(silent)} of the {len(names)} registered losses, and its "
        f"curvature is in the factors: train it, or {remedy}."
    ]


# --- outputs that are trained and that no loss reads ------------------------------------------------------------------


def unread_outputs(watched: Watched, later: Sequence[Watched]) -> list[str]:
    """The line of the warning about returned outputs that the trained loss depends on and no registered loss reads.

    later: the forwards of the step after this one, which may take its outputs.

    Their gradient counts as far as the way to the parameters does not pass the outputs that losses read. One forward
    and a backward for each output, if the trained loss depends on an output that no loss reads.
    """
    recorder = watched.recorder
    if recorder.losses.given is None or not recorder.whole or not watched.places:
        return []
    constants, weighted = watched.losses()
    read = set[int]()
    for *_, loss in weighted:
        if loss.inputs.requires_grad:
            of_loss = by_leaves(loss.inputs, constants, torch.ones_like(loss.inputs))
            read |= {place for place, of in zip(watched.places, of_loss, strict=True) if of is not None}
    trained = watched.gradients.keys() - read
    if not trained or read.isdisjoint(watched.gradients):
        return []
    again = watched.run_again()
    if again is None:
        return []
    leaves, learned = again[0], list(again[2].values())
    nodes = results.tree_leaves(recorder.capture.unflatten(recorder.program.returned))

    def pulled(leaf: int, gradient: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = torch.zeros_like(leaves[leaf])
        (whole if watched.cases is None or not whole.dim() else whole[: watched.cases]).copy_(gradient)
        return torch.autograd.grad(
            leaves[leaf], inputs, whole, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    through, around = [torch.zeros_like(value) for value in learned], dict[int, list[Tensor]]()
    others = sorted(read)
    for leaf, arrived in watched.direct_gradients().items():
        if leaf in read:
            through = [a + b for a, b in zip(through, pulled(leaf, arrived, learned), strict=True)]
            continue
        found = pulled(leaf, arrived, [*learned, *(leaves[other] for other in others)])
        around[leaf] = list(found[: len(learned)])
        for other, gradient in zip(others, found[len(learned) :], strict=True):
            passing = pulled(other, first(gradient, watched.cases), learned)
            around[leaf] = [a - b for a, b in zip(around[leaf], passing, strict=True)]
            through = [a + b for a, b in zip(through, passing, strict=True)]
    sizes = {leaf: size_of(gradients) for leaf, gradients in around.items()}
    total = size_of(through) + sum(sizes.values())  # NaN has no warning
    told = sorted(
        leaf for leaf, size in sizes.items() if size > SMALL * total and not has_own_head(recorder, nodes[leaf])
    )
    if not told:
        return []
    names = " and ".join(dict.fromkeys(where(nodes[leaf]) for leaf in told))
    taken = {address(value) for forward in later for value in forward.values if isinstance(value, Tensor)} - {0}
    into_later = taken.issuperset(address(watched.outputs[leaf]) for leaf in told)
    return [(STEPPED if into_later else UNREAD).format(sum(sizes[leaf] for leaf in told) / total, names)]


def outputs_apart(watched: Watched) -> list[str]:
    """The line of the warning about returned outputs that the trained loss depends on, next to losses that forward
    computes and that do not read them. One forward, and a backward for each loss and output, if there are some."""
    recorder, arrived = watched.recorder, watched.of_numbers
    trained = [n for n in watched.apart if n in arrived and bool(arrived[n].any())]
    again = watched.run_again() if trained else None
    if again is None:
        return []
    leaves, _, learned = again
    by_output: dict[int, dict[str, Tensor]] = {}
    for n in (*trained, *(n for n in places_of_losses(recorder, leaves) if n in arrived)):
        gradients = torch.autograd.grad(
            leaves[n], list(learned.values()), arrived[n], retain_graph=True, allow_unused=True
        )
        by_output[n] = {name: of for name, of in zip(learned, gradients, strict=True) if of is not None}
    reached = {name for n, of in by_output.items() if n not in trained for name in of}
    sizes = {n: size_of(gradients.values()) for n, gradients in by_output.items()}
    total = sum(sizes.values())
    told = [n for n in trained if sizes[n] > SMALL * total]  # NaN has no warning
    if not told:
        return []
    nodes = results.tree_leaves(recorder.capture.unflatten(recorder.program.returned))
    alone = sorted({name for n in told for name in by_output[n]} - reached)
    names = " and ".join(dict.fromkeys(where(nodes[n]) for n in told))
    return [APART.format(sum(sizes[n] for n in told) / total, names, ALONE.format(fold(alone)) if alone else "")]


def has_own_head(recorder: Recorder, node: fx.Node) -> bool:
    """Whether an output has parameters that no registered loss depends on, of which the first step tells anyway."""
    registrations = recorder.program.registrations
    silent = {name for registration in registrations if registration.reason == NO_LOSS for name in registration.owners}
    return not silent.isdisjoint(str(source.target) for source in ancestors([node]) if source.op == "get_attr")


# --- gradients that fit no targets ------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """A registered loss that the trained one reaches."""

    loss: LossFunction
    weight: float | Tensor  # as registered
    gradient: Tensor  # of its inputs, in the trained loss; finite
    number: int  # among the registered losses
    spec: object  # the origin of the loss
    of_case: float | None  # the factor of one case in the trained loss, if that is the registered one; None: unknown
    is_single: bool = True  # there is one loss, of all of the only output

    def write(self, name: str) -> str:
        """The change that makes the registered loss that of a name, as a part of a sentence."""
        if self.is_single:
            return f'write loss="{name}"'
        of_torch = next((of for of in TORCH_LOSSES if of.short == name), None)
        kind = DISTRIBUTIONS[name if of_torch is None else of_torch.distribution]
        return f"write kfac_fx.losses.{kind.__name__}(...) for it in loss="


def gradients_of(watched: Watched, reduction: str, loss_scale: float) -> list[Reached]:
    """The losses whose inputs have a gradient of the trained loss that is finite, and that no other loss is in.

    reduction, loss_scale: as of `check_scale`.
    """
    leaves, weighted = watched.losses()
    arrived, spec = watched.arrived(), watched.recorder.loss
    shared = {id(loss) for loss in on_shared_elements([loss for _, _, loss in weighted], leaves)}
    apart = [(number, weight, loss) for number, (weight, _, loss) in enumerate(weighted) if id(loss) not in shared]
    found = []
    for number, weight, loss in apart:
        gradient = gradient_behind(loss.inputs, leaves, arrived)
        if gradient is not None and bool(gradient.isfinite().all()):
            cases = int(loss.cases) / watched.part if reduction == "mean" else 1.0
            is_known = spec is not None and not isinstance(weight, Tensor) and loss.weights is None and cases
            of_case = float(weight) * loss_scale / cases if is_known else None
            found.append(
                Reached(loss, weight, gradient, number, spec, of_case, watched.only_output(weighted) is not None)
            )
    return found


def on_shared_elements(losses: Sequence[LossFunction], leaves: Sequence[Tensor]) -> list[LossFunction]:
    """The losses that depend on an element of the leaves on which another one depends, too, as the two cross-entropies
    of a matrix of similarities and its transpose. A gradient that arrives there is of their sum."""
    if len(losses) < 2:
        return []
    learned = [loss for loss in losses if loss.inputs.requires_grad]
    number = [torch.zeros_like(leaf, dtype=torch.int64) for leaf in leaves]  # of the losses that depend on an element
    each = []
    for loss in learned:
        gradients = by_leaves(loss.inputs, leaves, torch.ones_like(loss.inputs))
        each.append([(n, gradient != 0) for n, gradient in enumerate(gradients) if gradient is not None])
        for n, behind in each[-1]:
            number[n] += behind
    pairs = zip(learned, each, strict=True)
    return [loss for loss, of_loss in pairs if any(bool((number[n][behind] > 1).any()) for n, behind in of_loss)]


def without_targets(reached: Reached) -> str | None:
    """The line of the warning, for a Categorical loss on outputs that the trained loss does not take for logits.

    Over the classes of a case the gradient of every cross entropy sums to zero, with any targets, weights, smoothing.
    """
    loss = reached.loss
    if not isinstance(loss, Categorical):
        return None
    outputs, name = f"the outputs {list(loss.inputs.shape)}", type(loss).__name__
    rest = rest_of_classes(reached.gradient)
    has_rest = rest > rounding_of([reached.gradient])
    if has_rest and factor_of_logits("multi_bernoulli", loss.inputs, reached.gradient):
        return (
            f"the trained loss is a binary cross entropy of each of {outputs}, and the registered {name} loss is a "
            f"cross entropy over classes: {reached.write(name_of_events(reached))}."
        )
    if not has_rest and is_margin(loss.inputs, reached.gradient):
        return (
            f"the trained loss fits no targets of the registered {name} loss: the gradients of {outputs} have one size "
            "for all classes, as those of a margin, such as F.multi_margin_loss, and not for each its probability. "
            "Train with F.cross_entropy; or leave loss= out, and the factors are those of the gradients that training "
            "sends back."
        )
    if rest <= NO_CLASSES and not (has_rest and is_square_of_classes(loss.inputs, reached.gradient)):
        return None
    return (
        f"the trained loss fits no targets of the registered {name} loss: {outputs} have gradients that do not sum to "
        "zero over the classes, so the loss takes them for something else than logits of classes. If it is a binary "
        f"cross entropy of each of them, {reached.write('bce_with_logits')}. If it compares cases (contrastive "
        "losses), compute the similarities in forward, as in return F.normalize(f(a)) @ F.normalize(f(b)).T / 0.1, and "
        f"compile that module, whose outputs are the logits. If it is a squared error, {reached.write('mse')}."
    )


def cross_entropies(reached: Reached) -> str | None:
    """The line of the warning, for a Normal loss on outputs that the trained loss takes for logits.

    A gradient fits a squared error with any targets, so the loss is known by its form: that of a cross entropy is a
    multiple of softmax(outputs), or of sigmoid(outputs), but for the targets.
    """
    outputs = reached.loss.inputs
    for kind in ("categorical", "multi_bernoulli") if isinstance(reached.loss, Normal) else ():
        if factor_of_logits(kind, outputs, reached.gradient):
            name = kind if kind == "categorical" else name_of_events(reached)
            return (
                f"the trained loss is a cross entropy, which takes the outputs {list(outputs.shape)} for logits, and "
                f"the registered Normal loss is a squared error: {reached.write(name)}."
            )
    return None


def name_of_events(reached: Reached) -> str:
    """The name of the mean of binary cross entropies over elements, or over cases if that is the trained one."""
    factor, cases = factor_of_logits("multi_bernoulli", reached.loss.inputs, reached.gradient), reached.loss.all_cases
    of_sum = factor is not None and near(factor * cases, 1.0) and reached.loss.inputs.numel() > cases
    return "multi_bernoulli" if of_sum else "bce_with_logits"


def factor_of_logits(kind: str, outputs: Tensor, gradient: Tensor) -> float | None:
    """The factor of the sum of cross entropies of these logits, with certain targets, that has this gradient; None if
    none has."""
    with torch.no_grad():
        categorical = kind == "categorical"
        probabilities = outputs.softmax(-1) if categorical else outputs.sigmoid()
        deviations = probabilities - probabilities.mean()
        if bool(deviations.abs().sum() <= 10 * PROPORTIONAL * probabilities.sum()):
            return None  # all outputs are nearly zero, and squared errors have gradients of this form, too
        counted = gradient.any(-1, keepdim=True).expand_as(gradient)  # not those of ignored targets
        others, targets = counted & (gradient > 0), counted & (gradient < 0)
        if not (others.any() and targets.any()) or (categorical and bool((targets.sum(-1) > 1).any())):
            return None
        sizes = (probabilities - targets.to(probabilities.dtype)).abs()[counted]
        if bool((sizes - sizes.mean()).abs().sum() <= 10 * PROPORTIONAL * sizes.sum()):
            return None  # an absolute error has gradients of one size, too
        scale = gradient[others].sum() / probabilities[others].sum()
        expected = torch.where(counted, scale * (probabilities - targets.to(probabilities.dtype)), 0)
        is_multiple = bool((gradient - expected).abs().sum() <= rounding_of([gradient]) * gradient.abs().sum())
        return float(scale) if is_multiple else None


def no_events(reached: Reached) -> str | None:
    """The line of the warning, for a declared MultiBernoulli loss that is not the trained one.

    With targets t from 0 to 1 its gradient is s (p - t), so it is between s (p - 1) and s p, with the factor s of a
    case of those that are trained. It sums to zero over the last axis by chance alone. Targets of 0 and 1 fit, whatever
    s is.
    """
    loss, gradient, s = reached.loss, reached.gradient, reached.of_case
    if not isinstance(loss, MultiBernoulli) or not s or not gradient.any() or gradient.shape != loss.inputs.shape:
        return None
    if factor_of_logits("multi_bernoulli", loss.inputs, gradient):
        return None
    outputs = f"the gradients of the outputs {list(gradient.shape)}"
    if gradient.shape[-1] > 1 and rest_of_classes(gradient) <= PROPORTIONAL:
        return (
            f"{outputs} sum to zero over the last axis, as those of a cross entropy over classes do, and those of the "
            f"registered MultiBernoulli loss do not: {reached.write('categorical')}. If the trained loss is no cross "
            "entropy either, leave loss= out, and the factors are those of the gradients that training sends back."
        )
    probabilities = loss.inputs.detach().sigmoid()
    left_out, rows = rows_left_out(loss, reached.weight, gradient)
    parts = gradient / s * ((rows - left_out) / rows)  # a mean over the rows that are trained
    beyond = (parts - probabilities).clamp(min=0) + (probabilities - 1 - parts).clamp(min=0)
    part = float(beyond.sum() / parts.abs().sum())
    if part <= NO_CLASSES or float(parts.abs().max()) >= LARGE:  # those of a GradScaler are larger
        return None
    return (
        f"the trained loss fits no targets of the registered MultiBernoulli loss: {outputs} are larger than those of "
        "targets from 0 to 1. So it is another loss, or one with weights, such as pos_weight, or with another factor. "
        f"If it is a sum over the batch, divide it by its {loss.all_cases} cases. If it is a squared error, "
        f"{reached.write('mse')}. Else leave loss= out, and the factors are those of the gradients that training sends "
        "back."
    )


# By what the trained loss takes the variances v for: (the variance, its derivative by v).
SPREADS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "variances": (lambda v: v, torch.ones_like, ""),
    "standard deviations": (lambda v: v.square(), lambda v: 2 * v, "outputs[1].square()"),
    "logarithms of variances": (torch.exp, torch.exp, "outputs[1].exp()"),
    "logarithms of standard deviations": (
        lambda v: (2 * v).exp(), lambda v: 2 * (2 * v).exp(), "(2 * outputs[1]).exp()",
    ),
}  # fmt: skip


def other_spread(reached: Reached) -> str | None:
    """The line of the warning, for a NormalMeanVariance loss of what the trained one takes for something else.

    With the residual u and the variance V of the trained loss its gradient is (s u / V, s (1 / 2V - u² / 2V²) V'), with
    one factor s for all cases. That is a quadratic equation for s, and only the right V(v) has one solution for all.
    """
    loss = reached.loss
    if not isinstance(loss, NormalMeanVariance) or reached.gradient.shape != loss.inputs.shape:
        return None
    inputs, gradient = loss.inputs.detach().double(), reached.gradient.double()
    (_, spread), (of_mean, of_spread) = inputs.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
    if spread.numel() <= RESIDUALS or not bool((of_mean != 0).all()):
        return None
    for kind, (variance_of, derivative_of, written) in SPREADS.items():
        variance, by_variance = variance_of(spread), of_spread / derivative_of(spread)
        factors = variance * (by_variance + (by_variance.square() + of_mean.square() / variance).sqrt())
        mean = factors.mean()
        if not mean > 0 or (factors - mean).norm() > rounding_of([reached.gradient]) * factors.norm():
            continue
        if not written:
            return None
        return (
            f"the trained loss takes for {kind} what the registered NormalMeanVariance loss takes for variances: write "
            f"loss=lambda outputs: kfac_fx.losses.NormalMeanVariance(outputs[0], {written})."
        )
    return None


def rates(reached: Reached) -> str | None:
    """The line of the warning, for a Poisson loss of outputs that the trained one takes for expected counts r.

    Its gradient is s (1 - t / r), and that of the registered loss is s (exp(r) - t): t is a count in one of the two.
    """
    loss, gradient = reached.loss, reached.gradient.double()
    if not isinstance(loss, Poisson) or gradient.shape != loss.inputs.shape or gradient.numel() <= RESIDUALS:
        return None
    outputs = loss.inputs.detach().double()
    if not bool((outputs > 0).all()):
        return None
    near_count = rounding_of([reached.gradient])
    elements = loss.inputs.numel() / loss.all_cases
    factors = (s := reached.of_case) and (s, s / elements, s * elements)
    for factor in (float(gradient.max()), *(factors or ())):
        if not factor > 0:
            continue
        if are_counts(outputs.exp() - gradient / factor, near_count):
            return None
        counts = outputs * (1 - gradient / factor)
        if are_counts(counts, near_count) and bool(counts.round().any()):
            by_mean = near(factor * loss.all_cases * elements, 1.0) and elements > 1
            poisson = "kfac_fx.losses.Poisson(outputs.log())"
            written = f"({1 / elements:.4g}, {poisson})" if by_mean else poisson
            return (
                "the trained loss takes the outputs for expected counts, as F.poisson_nll_loss(..., log_input=False) "
                "does, and the registered Poisson loss for their logarithms: return logarithms, and leave log_input "
                f"out; or write loss=lambda outputs: {written}."
            )
    return None


def are_counts(values: Tensor, tolerance: float) -> bool:
    """Whether these are numbers of events, up to a tolerance relative to them."""
    counts = values.round()
    return bool((values - counts).abs().le(tolerance * counts.clamp(min=1)).all()) and not bool((counts < 0).any())


def rest_of_classes(gradient: Tensor) -> float:
    """The sums of a gradient over the last axis, relative to its size: from 0 to 1."""
    size = float(gradient.abs().sum())
    return float(gradient.sum(-1).abs().sum()) / size if size else 0.0


def is_square_of_classes(outputs: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is that of the squared error of outputs m against one-hot targets e: a multiple of m - e.

    The gradients of a case sum to this multiple of Σ m - 1, whatever its class. With it they tell the class, which is
    not always that of the least gradient.
    """
    if gradient.shape != outputs.shape:
        return False
    counted = gradient.any(-1)
    m, g = outputs.detach()[counted].double(), gradient[counted].double()
    sums, excess = g.sum(-1), m.sum(-1) - 1
    multiple = float(sums @ excess) / max(float(excess @ excess), torch.finfo(torch.float64).tiny)
    if not multiple > 0:
        return False
    classes = torch.nn.functional.one_hot((m - g / multiple).argmax(-1), m.shape[-1])
    return ratio([gradient[counted]], [m - classes]) is not None


def is_margin(outputs: Tensor, gradient: Tensor) -> bool:
    """Whether the gradients of classes but the target are of one size or zero, though their probabilities differ."""
    others = gradient > 0
    if gradient.shape != outputs.shape or not others.any() or bool(((gradient < 0).sum(-1) > 1).any()):
        return False
    sizes, probabilities = gradient[others].double(), outputs.detach().softmax(-1)[others].double()
    spread_of_sizes, spread_of_probabilities = (
        float((of - of.mean()).abs().mean() / of.mean()) for of in (sizes, probabilities)
    )
    rounding = rounding_of([gradient])
    return spread_of_sizes <= rounding and spread_of_probabilities > 10 * rounding


def misplaced_classes(reached: Reached) -> str | None:
    """The line of the warning, for a Categorical loss whose classes the trained loss has on another axis.

    Over the axis of its classes the gradient of a cross entropy sums to zero, for all targets and weights.
    """
    loss, spec = reached.loss, reached.spec
    axis = axis_of_classes(reached.gradient) if isinstance(loss, Categorical) else None
    if axis is None:
        return None
    name, shape, place = type(loss).__name__, list(loss.inputs.shape), "the last"
    if isinstance(spec, LossSpec) and spec.of_torch is not None:  # its inputs have axis 1 of the outputs last
        axis, shape, place = axis + 1, list(loss.inputs.movedim(-1, 1).shape), "axis 1"
    by_axis = f"lambda outputs: kfac_fx.losses.{name}(outputs.movedim({axis}, -1))"
    remedy = f"write loss={by_axis}" if reached.is_single else f"move its axis {axis} to the last one in loss="
    if axis == len(shape) - 1:
        remedy = reached.write("categorical")
    return (
        f"the trained loss has its classes on axis {axis} of {shape}, and the registered {name} on {place}: {remedy}."
    )


def axis_of_classes(gradient: Tensor) -> int | None:
    """The axis between the first and the last that a gradient sums to zero over, if it does not over the last."""
    if gradient.ndim < 3:
        return None
    size = float(gradient.abs().sum())
    if not size:
        return None
    rest = {axis: float(gradient.sum(axis).abs().sum()) / size for axis in range(1, gradient.ndim)}
    *between, last = rest
    return next((axis for axis in between if rest[axis] <= PROPORTIONAL < SCALE_TOLERANCE < rest[last]), None)
