"""Input factors from a part of the rows: some of the cases, and of their patches no more than a few a column.

A factor of `d` inputs needs not much more than `d` rows, and a convolution of a batch of images has a thousand times as
many. What is left out is made up for by a factor, so that the sums are right in expectation: the sample is systematic,

    rows floor((u + j) · total / kept),  j = 0 ... kept - 1,  u uniform in [0, 1),

which takes every row with the same probability and needs one number u. It is no business of the user's random streams:
it comes from the generator of the recording or, without one, from a sequence of equidistributed numbers. Only input
factors are sampled: gradient rows, how many there are, and gradients of cases are of all rows. Cases and then rows take
a number each, for one would make the second choice depend on the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import KEPT, Program, Registration, Sampling, Use, tensor_attrs
from kfac_fx.passes.layers import Layer

INPUTS, PATCHES = 0.2, 3.0  # of TF K-FAC
PHASES = (0.7548776662466927, 0.5698402909980532)  # multiples of these fill the unit square evenly (Roberts, 2018)
SHARES = 10_000  # the smallest share is one of so many; part_of rounds up, so at least one case or row is taken
SAMPLED = ("A", "A_diag")

ALL = Sampling()
Ratio = tuple[int, int]  # whole numbers, since what they are a share of may be symbolic
Parts = tuple[Ratio, Ratio | None]  # of the cases; rows an input


def read_sampling(inputs: bool | float, patches: bool | float) -> Sampling | None:
    """inputs: the share of the cases, True for 0.2. patches: the most rows an input, True for 3. False: all.

    Raises RegistrationError for numbers out of range.
    """
    share = INPUTS if inputs is True else 1.0 if inputs is False else inputs
    most = PATCHES if patches is True else None if patches is False else patches
    if not 0 < share <= 1:
        raise RegistrationError(f"sub_sample_inputs={inputs!r} is the share of the cases: above 0 and at most 1")
    if most is not None and not most > 0:
        raise RegistrationError(f"sub_sample_patches={patches!r} is how many rows an input: it must be positive")
    return None if share == 1 and most is None else Sampling(float(share), most)


def parts_of(registration: Registration, use: Use, layer: Layer) -> Parts | None:
    """None where all rows are taken."""
    sampling = registration.sampling
    if sampling is None or sampling == ALL or why_all_rows(registration, use, layer):
        return None
    return ratio(sampling.inputs), None if sampling.patches is None else ratio(sampling.patches)


def why_all_rows(registration: Registration, use: Use, layer: Layer) -> str | None:
    """Why a use cannot do with a part of its rows; None if it can."""
    if (why := registration.structure.needs_all_rows) is not None:
        return f"{registration.approximation!r} {why}"
    if not layer.dense_rows:
        return "its rows are ids, which cost nothing"
    if reason := next((step.all_rows for step in use.through if step.all_rows), None):
        return reason
    if set(tensor_attrs(use)) - {KEPT}:
        return "its rows depend on more than its input"
    return None


def described(program: Program) -> list[str]:
    """For the report: how many input factors are sampled, and of which registrations the rows are all taken."""
    wanted = [one for one in program.registrations if one.sampling not in (None, ALL)]
    reasons = {
        one.parameters: [why_all_rows(one, use, program.layers[use.layer]) for use in one.uses] for one in wanted
    }
    some = Counter(str(one.sampling) for one in wanted if None in reasons[one.parameters])
    whole = [
        f"{one}: all rows of {len(why)} of {len(one.uses)} uses, {', '.join(dict.fromkeys(why))}"
        for one in wanted
        if (why := [reason for reason in reasons[one.parameters] if reason is not None])
    ]
    return [f"{many:,} input factors from {said}" for said, many in some.items()] + whole


def ratio(number: float) -> Ratio:
    return max(Fraction(number).limit_denominator(SHARES), Fraction(1, SHARES)).as_integer_ratio()


def part_of(total: int, share: Ratio) -> int:
    """The share, rounded up."""
    return -((-total * share[0]) // share[1])


def sample(
    both: Callable[..., tuple[Tensor, Tensor]],
    parts: Parts | None,
    phases: Tensor | None,
    axis: int,
    output_grad: Tensor,
    input: Tensor,
    attrs: Sequence[Any],
    kept: Tensor | None,
) -> tuple[Tensor, Tensor | None, float] | None:
    """(rows, mask, what their sums are multiplied with) of a use; None: all rows, since none are left out, or they are
    ids, or cases share them. both: makes rows. axis: of the cases."""
    if parts is None or phases is None or not input.is_floating_point() or input.dim() <= axis:
        return None
    total = output_grad.shape[axis]
    if input.shape[axis] != total:
        return None
    cases, scale = fewer_cases(parts[0], phases[0], total)
    rows, _ = both(output_grad.index_select(axis, cases), input.index_select(axis, cases), *attrs)
    if rows.shape[0] != cases.shape[0]:
        return None
    kept = None if kept is None else kept.index_select(0, cases)
    rows, kept, more = fewer_rows(parts[1], phases[1], rows, kept)
    return rows, kept, scale * more


def systematic(phase: Tensor, total: int, kept: int) -> Tensor:
    """`kept` of `total` rows, [kept]: each with the same probability, for a phase uniform in [0, 1)."""
    steps = phase + torch.arange(kept, dtype=torch.float64, device=phase.device)
    return (steps * (total / kept)).long().clamp(max=total - 1)


def fewer_cases(share: Ratio, phase: Tensor, total: int) -> tuple[Tensor, float]:
    """(which cases, what their sums are multiplied with)."""
    number = part_of(total, share)
    return systematic(phase, total, number), total / number


def fewer_rows(
    most: Ratio | None, phase: Tensor, rows: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor | None, float]:
    """(rows, mask, factor) of rows [N, S, ...] and a mask [N, S]: any of their N S rows, [n, 1, ...]."""
    total = rows.shape[0] * rows.shape[1]
    number = total if most is None or rows.shape[1] == 1 else part_of(rows.shape[-1], most)
    if number >= total:
        return rows, kept, 1.0
    chosen = systematic(phase, total, number)
    fewer = rows.flatten(0, 1).index_select(0, chosen).unsqueeze(1)
    return fewer, None if kept is None else kept.flatten().index_select(0, chosen).unsqueeze(1), total / number
