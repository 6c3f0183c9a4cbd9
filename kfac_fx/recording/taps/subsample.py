"""Input factors from a sample of the rows: a share of the cases, and at most a few of their patches per column.

A factor of d inputs needs little more than d rows, but a convolution of a batch of images has a thousand times more.
The sums over a sample are multiplied by a constant, so that they are right in expectation. The sample is systematic,

    rows floor((u + j) · total / n),  j = 0 ... n - 1,  u uniform in [0, 1),

so every row has the same probability, and one number u suffices. u comes from the generator of the recording or,
without one, from a sequence of equidistributed numbers, so the user's random streams do not change. Only input factors
are sampled: gradient rows, `count` and per-case gradients use all rows. Cases and rows have a number u each, so that
the two choices are independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import RegistrationError, plural
from kfac_fx.passes.ir import KEPT, Program, Registration, Sampling, Use, tensor_attrs
from kfac_fx.passes.layers import Layer

TF_INPUTS, TF_PATCHES = 0.2, 3.0  # the defaults of TF K-FAC
ROBERTS_STEPS = (
    0.7548776662466927,
    0.5698402909980532,
)  # multiples of these fill the unit square evenly (Roberts, 2018)
SHARES = 10_000  # the smallest share is 1 / SHARES; `share_of` rounds up, so at least one case or row is taken
SAMPLED = ("A", "A_diag")

ALL_ROWS = Sampling()
Ratio = tuple[int, int]  # whole numbers, because sizes may be symbolic
SampledShares = tuple[Ratio, Ratio | None]  # the share of the cases; the rows for every input


def read_sampling(inputs: bool | float, patches: bool | float) -> Sampling | None:
    """Read `sub_sample_inputs` and `sub_sample_patches`; None: use all rows. Raises RegistrationError if out of range.

    inputs: the share of the cases; True: 0.2. patches: at most this many rows for every input; True: 3. False: all.
    """
    share = TF_INPUTS if inputs is True else 1.0 if inputs is False else inputs
    most = TF_PATCHES if patches is True else None if patches is False else patches
    for name, value in (("sub_sample_inputs", inputs), ("sub_sample_patches", patches)):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RegistrationError(f"{name} is {value!r}; it must be True, False or a finite number")
    if not 0 < share <= 1:
        raise RegistrationError(
            f"sub_sample_inputs={inputs!r} is the share of the cases: it must be above 0 and at most 1"
        )
    if most is not None and not most > 0:
        raise RegistrationError(f"sub_sample_patches={patches!r} is a number of rows per input: it must be positive")
    return None if share == 1 and most is None else Sampling(float(share), most)


def sampled_parts(registration: Registration, use: Use, layer: Layer) -> SampledShares | None:
    """The parts that a tap samples; None if it uses all rows."""
    sampling = registration.sampling
    if sampling is None or sampling == ALL_ROWS or why_all_rows(registration, use, layer):
        return None
    return as_ratio(sampling.inputs), None if sampling.patches is None else as_ratio(sampling.patches)


def why_all_rows(registration: Registration, use: Use, layer: Layer) -> str | None:
    """The reason why a use needs all its rows; None if it does not."""
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
    """Lines of the report: how many input factors are sampled, and which registrations use all rows, and why."""
    sampled: Counter[str] = Counter()
    lines = []
    for registration in program.registrations:
        if registration.sampling in (None, ALL_ROWS):
            continue
        uses = registration.uses
        reasons = [why_all_rows(registration, use, program.layers[use.layer]) for use in uses]
        sampled[str(registration.sampling)] += None in reasons
        if why := [reason for reason in reasons if reason is not None]:
            which = "all rows" if len(uses) == 1 else f"all rows of {len(why)} of {len(uses)} uses"
            lines.append(f"{registration}: {which}, {', '.join(dict.fromkeys(why))}")
    return [
        f"{plural(number, 'input factor')} from {sampling}" for sampling, number in sampled.items() if number
    ] + lines


def as_ratio(number: float) -> Ratio:
    return max(Fraction(number).limit_denominator(SHARES), Fraction(1, SHARES)).as_integer_ratio()


def share_of(total: int, share: Ratio) -> int:
    """The share of a total, rounded up."""
    return -((-total * share[0]) // share[1])


def sample(
    both: Callable[..., tuple[Tensor, Tensor]],
    parts: SampledShares | None,
    phases: Tensor | None,
    axis: int,
    output_grad: Tensor,
    input: Tensor,
    attrs: Sequence[Any],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None, float] | None:
    """(sampled rows, their mask, the multiplier of their sums) of a use; None if all rows are used, because none are
    left out, or they are ids, or cases share them. both: makes the rows and gradient rows. axis: of the cases."""
    if parts is None or phases is None or not input.is_floating_point() or input.dim() <= axis:
        return None
    total = output_grad.shape[axis]
    if input.shape[axis] != total:
        return None
    cases, scale = fewer_cases(parts[0], phases[0], total)
    rows, _ = both(output_grad.index_select(axis, cases), input.index_select(axis, cases), *attrs)
    if rows.shape[0] != cases.shape[0]:
        return None
    mask = None if mask is None else mask.index_select(0, cases)
    rows, mask, more = fewer_rows(parts[1], phases[1], rows, mask)
    return rows, mask, scale * more


def systematic(phase: Tensor, total: int, number: int) -> Tensor:
    """The indices of `number` out of `total` rows. Each has the same probability if the phase is uniform in [0, 1)."""
    steps = phase + torch.arange(number, dtype=torch.float64, device=phase.device)
    return (steps * (total / number)).long().clamp(max=total - 1)


def fewer_cases(share: Ratio, phase: Tensor, total: int) -> tuple[Tensor, float]:
    """(the indices of the cases, the multiplier of their sums)."""
    number = share_of(total, share)
    return systematic(phase, total, number), total / number


def fewer_rows(
    most: Ratio | None, phase: Tensor, rows: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, float]:
    """(rows [n, 1, ...], their mask, the multiplier of their sums), sampled from rows [N, S, ...] and a mask [N, S]."""
    total = rows.shape[0] * rows.shape[1]
    number = total if most is None or rows.shape[1] == 1 else share_of(rows.shape[-1], most)
    if number >= total:
        return rows, mask, 1.0
    chosen = systematic(phase, total, number)
    fewer = rows.flatten(0, 1).index_select(0, chosen).unsqueeze(1)
    return fewer, None if mask is None else mask.flatten().index_select(0, chosen).unsqueeze(1), total / number
