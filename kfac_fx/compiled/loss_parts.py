"""The parts of a trained loss that its curvature does not have: weights of cases, masks, and terms around the losses.

A row of the gradient of a cross entropy is w (p - e), with the weight w of its case. Over more than two classes it
shows the weight and the target. A weight of zero is a case that the trained loss leaves out. Label smoothing changes e
alone, and the curvature does not depend on e.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.losses.distributions import Categorical, LossFunction
from kfac_fx.passes.users_code import where
from kfac_fx.recording.recorder import Recorder

ONE_WEIGHT = 5e-2  # of weights, relative; label smoothing of rows that fit moves them by 2e-2, those on purpose more
ON_A_ROW = 1e-2  # relative error of a row that is a multiple of p - e
CERTAIN = 0.999  # a probability
SMALL = 0.1  # a part of the gradient that is not worth a warning
LEFT_OUT = (
    "the trained loss leaves out {} of {} cases, whose gradient is zero, and the factors have them: {} of their sums "
    "are of cases that are not trained. {}"
)
IF_PADDING = (
    "If they are padding, name it with kfac_fx.compile(..., padding_mask=), as in padding_mask=lambda ids: ids != 0. "
    "Else"
)
IF_MASKED = "If they are padding, padding_mask does not fit these outputs, so"
HOW_TO_LEAVE_OUT = (
    "{} let forward compute the loss: F.cross_entropy with targets of -100 for these cases, or (losses * "
    "mask).sum() / mask.sum(); targets of -100 outside of forward change nothing. If they are the same in every batch, "
    "as the nodes of a graph without labels, name the outputs of the others: "
    "loss=lambda outputs: kfac_fx.losses.Categorical(outputs[mask])."
)
WEIGHED = (
    "the trained loss weighs its cases from {:.3g} to {:.3g} of their mean, and the factors are of cases of one weight."
    " {}"
)
HOW_TO_WEIGH = (
    'Let forward compute the loss as a product of F.cross_entropy(..., reduction="none") and weights that depend on '
    'the inputs alone; or write KFAC(..., estimation_mode="empirical"), whose factors are of the gradients themselves.'
)
AROUND = (
    "{:.0%} of the gradient of the trained loss comes from terms that are no log-likelihood ({}), and the factors have "
    "no curvature of them. Nothing is wrong if they are a small part of the loss; else lower lr, or write "
    'KFAC(..., estimation_mode="empirical"), whose factors are of the whole gradient.'
)


def weights_of_cases(loss: LossFunction, coefficient: Any, gradient: Tensor, has_mask: bool) -> list[str]:
    """The lines of the warning about a Categorical loss whose trained cases have other weights than registered.

    coefficient: of the registered loss, a number or one for every case. gradient: the trained one, of its inputs;
        finite. has_mask: whether there is a padding mask.
    """
    fits = gradient.shape == loss.inputs.shape and gradient.numel() > 0
    if not isinstance(loss, Categorical) or gradient.shape[-1] < 3 or not fits:
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
        remedy = HOW_TO_LEAVE_OUT.format(IF_MASKED if has_mask else IF_PADDING)
        lines.append(LEFT_OUT.format(int(left_out), int(cases), f"{left_out / cases:.0%}", remedy))
    if high - low > ONE_WEIGHT * high:
        mean = total / number
        lines.append(WEIGHED.format(low / mean, high / mean, HOW_TO_WEIGH))
    return lines


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
    return AROUND.format(min(part, 1.0), ", ".join(where(node) for node in program.cut)) if part > SMALL else None
