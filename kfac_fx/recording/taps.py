"""Taps: identities on the output of a use whose backward computes statistics of its rows; and links, for series.

For every statistic a *probe* enters the tap, a zero tensor of the shape of the statistic. The statistic leaves the
backward pass as the gradient of the probe. No tensor is mutated, so the same emitted module serves `autograd.grad` over
probes only, the user's own backward, several cotangents and a compiled graph. A probe that enters several taps sums
over uses. Where the rows of several uses wait for each other (`recording.recorder`), the taps hand them over instead.

Rows and gradient rows come from the layer's declaration and the parametrizations that the use goes through, as one
function (`both_rows`). Input factors may come from a sample of the rows (`sample`). A *collecting* tap hands its rows
to a function in place of sums over them.

Links bring the gradients of consecutive uses of a weight together, for series blocks. A link stands on the output of a
use, in front of its tap. It returns the output and a *carrier*, a zero tensor of the same shape, which enters the link
of the next use. The "gradient" of the carrier is the gradient of the output of the next use. So the backward of a link
has the gradients of two consecutive outputs, and autograd runs it after the backward of the next link, however the two
uses are connected. The forward has the inputs of both uses. The sums over pairs leave as the gradients of probes, as
the statistics of a tap do.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.linalg.matrices import at_least_float32, bordered, full_precision_in_eager
from kfac_fx.passes.approximations import A1, G1, LAGGED, PAIRS, A, Matrix, Statistic, named
from kfac_fx.passes.errors import RegistrationError, fatal, first_line, plural, where
from kfac_fx.passes.ir import CASES, ROW_MASK, Program, Registration, Sampling, Use, literal_attrs, tensor_attrs
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.matrix import HALVES, precise, without_autocast
from kfac_fx.passes.padding import spread_rows
from kfac_fx.passes.parametrization import RowPair, RowsStep, as_complex, in_real_positions
from kfac_fx.recording.statistics import Rows, canonical, in_groups, sum_of

Probes = Mapping[str, Any]  # by the name of the statistic; and `WAITING`, if the rows of several uses wait; and `CALLS`
BothRows = Callable[..., RowPair]  # (gradient of the output, input, attributes) -> (rows, gradient rows) of a use
UseStep = Callable[[RowPair, Mapping[str, Any]], RowPair]
RealRows = Callable[[Tensor, Any], Tensor]
StatisticOf = Callable[[str], Tensor]
SumsOf = Callable[[Sequence[str], Tensor, Tensor, Sequence[Any]], StatisticOf]
RowsOf = Callable[
    [Tensor, Tensor, Sequence[Any]], Rows
]  # (gradient of the output, input, attributes) -> those of a use
Ratio = tuple[int, int]  # whole numbers, because sizes may be symbolic
SampledShares = tuple[Ratio, Ratio | None]  # the share of the cases; the rows for every input

UNSCALED = (1.0, 1.0)
TF_INPUTS, TF_PATCHES = 0.2, 3.0  # the defaults of TF K-FAC
ROBERTS_STEPS = 0.7548776662466927, 0.5698402909980532  # whose multiples fill the unit square evenly (Roberts, 2018)
SHARES = 10_000  # the smallest share is 1 / SHARES; `share_of` rounds up, so at least one case or row is taken
ALL_ROWS = Sampling()
WAITING = "waiting"  # the key of a `recording.recorder.Waiting` among the probes of a registration

# --- the rows of a use ------------------------------------------------------------------------------------------------


def both_rows(registration: Registration, use: Use, layer: Layer) -> BothRows:
    """The function of one use: (gradient of the output, input, tensor attributes) -> (rows, gradient rows) of the
    registration's matrix. It closes over functions and literals only, so that a compiled graph can hold it."""
    form, steps = layer.forms[use.form], tuple(steps_of(registration, use))
    make_rows, make_grad_rows = form.rows, form.grad_rows
    if registration.structure.needs_pixels:
        assert form.pixels is not None, f"bug in kfac_fx: {registration} has no pixels"
        make_rows = form.pixels
    literals = literal_attrs(use)
    names = tuple(tensor_attrs(use))
    batch_dim = (use.batch_dim or 0) if form.leading else 0
    has_weight = registration.matrix is not None and registration.matrix.weight is not None

    def both(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> RowPair:
        attrs = {**literals, **dict(zip(names, tensors, strict=True))}
        input, output_grad = (cases_first(tensor, batch_dim) for tensor in (input, output_grad))
        pair = make_rows(input, attrs), make_grad_rows(output_grad, attrs)
        for step in steps:
            pair = step(pair, attrs)
        if not pair[1].is_complex():
            return pair
        return in_real_positions(*pair) if has_weight else (pair[0].real, as_complex(pair[1]).real)

    return both


def lone_grad_rows(registration: Registration, use: Use, layer: Layer) -> BothRows | None:
    """As `both_rows`, but with the gradient rows on both sides, which takes no time of patches. None if a step changes
    the rows."""
    if list(steps_of(registration, use)) or use.is_complex:
        return None
    form = layer.forms[use.form]
    make_grad_rows, literals, names = form.grad_rows, literal_attrs(use), tuple(tensor_attrs(use))
    batch_dim = (use.batch_dim or 0) if form.leading else 0

    def both(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> RowPair:
        attrs = {**literals, **dict(zip(names, tensors, strict=True))}
        grad_rows = make_grad_rows(cases_first(output_grad, batch_dim), attrs)
        return grad_rows, grad_rows

    return both


def steps_of(registration: Registration, use: Use) -> Iterator[UseStep]:
    """The functions that turn the rows of the layer into those of the registration's matrix, in their order."""
    assert registration.matrix is not None, "bug in kfac_fx: rows of a generic registration"
    if (by := scales(use)) != UNSCALED:
        yield lambda both, attrs: scaled_rows(both, by)
    if registration.matrix.weight is None:
        yield lambda both, attrs: without_inputs(*both)
    if use.batch_independent:
        yield lambda both, attrs: shared_by_cases(*both)
    for number, parametrization in enumerate(use.through):
        yield with_names(parametrization.step(), {key: f"{number}.{key}" for key in parametrization.nodes})


def with_names(step: RowsStep, names: Mapping[str, str]) -> UseStep:
    """A parametrization's step, which knows its tensors by its own names, as one that takes all tensors of the use."""
    return lambda both, attrs: step(both, {key: attrs[name] for key, name in names.items()})


def moment_and_grad_rows(registration: Registration, use: Use, layer: Layer) -> BothRows | None:
    """The function of one use: (gradient of the output, input) -> (A of its layer's rows, gradient rows). None unless
    the layer declares a second moment and no step changes its rows."""
    assert registration.matrix is not None, "bug in kfac_fx: rows of a generic registration"
    form, (by, grad_by) = layer.forms[use.form], scales(use)
    steps = len(list(steps_of(registration, use))) - ((by, grad_by) != UNSCALED)
    special = (
        use.is_complex
        or registration.structure.needs_pixels
        or registration.patch_mask is not None
        or tensor_attrs(use)
    )
    if form.second_moment is None or steps or by != 1.0 or special:
        return None
    find, make_grad_rows, attrs = form.second_moment, form.grad_rows, dict(use.attrs)
    bias = registration.rows[1]

    def moment_and_rows(output_grad: Tensor, input: Tensor) -> RowPair:
        grad_rows = make_grad_rows(output_grad, attrs)
        with without_autocast(input.device):
            body, total = find(input if input.dtype in HALVES else precise(input), attrs)
            count = body.new_full((len(body),), grad_rows.shape[0] * grad_rows.shape[1])
            return bordered(body, total, count) if bias else body, grad_rows * grad_by if grad_by != 1.0 else grad_rows

    return moment_and_rows


def cases_first(tensor: Tensor, batch_dim: int) -> Tensor:
    """One without that dimension is the same for all cases."""
    return tensor.movedim(batch_dim, 0) if 0 < batch_dim < tensor.dim() else tensor


def shared_by_cases(rows: Tensor, grad_rows: Tensor) -> RowPair:
    """[1, M, ...] both: what does not see the batch has positions only."""
    rows = rows.expand(grad_rows.shape[0], *rows.shape[1:])
    return rows.flatten(0, 1).unsqueeze(0), grad_rows.flatten(0, 1).unsqueeze(0)


def with_patch_mask(both: BothRows) -> BothRows:
    """With rows that are multiplied with the last of the attributes."""

    def masked(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> RowPair:
        rows, grad_rows = both(output_grad, input, *tensors[:-1])
        return rows * tensors[-1].to(rows), grad_rows

    return masked


def scales(use: Use) -> tuple[float, float]:
    """The factors of rows and of gradient rows, for a use that sees multiples of its parameters.

    With `W = a V` and `b = c β`, the gradient of `[V, β]` is `Σ c d [(a / c) r, 1]ᵀ`.
    """
    roles = {role: bound.scale for role, bound in use.parameters.items()}
    bias = roles.get("bias", roles.get("weight", 1.0))
    return roles.get("weight", bias) / bias, bias


def scaled_rows(both: RowPair, by: tuple[float, float]) -> RowPair:
    rows, grad_rows = (side if scale == 1.0 else side * scale for side, scale in zip(both, by, strict=True))
    return rows, grad_rows


def without_inputs(rows: Tensor, grad_rows: Tensor) -> RowPair:
    """The rows of a bias alone: [N, S, 0], or [N, S, g, 0]."""
    return (rows if rows.is_floating_point() else grad_rows)[..., :0], grad_rows


def check_row_shapes(rows: Tensor, grad_rows: Tensor, sizes: tuple[int, int, int]) -> None:
    """Raises ValueError if these are no rows of a matrix [g, o, i]."""
    if others := [type(side).__name__ for side in (rows, grad_rows) if not isinstance(side, Tensor)]:
        raise ValueError(f"rows are a {others[0]}, not a tensor")
    g, o, i = sizes
    cases, positions = grad_rows.shape[:2]
    wanted = [cases, positions, g, o] if grad_rows.dim() == 4 else [cases, positions, o]
    if list(grad_rows.shape) != wanted or (grad_rows.dim() == 3 and g > 1):
        of_group = "" if g == 1 else f"{g}, "
        raise ValueError(f"gradient rows of shape {list(grad_rows.shape)}, wanted [N, S, {of_group}{o}]")
    if rows.is_floating_point():
        ends = ([g, i], [i]) if g == 1 else ([g, i],)
        right = rows.shape[1] == positions and list(rows.shape[2:]) in ends
    else:
        right = rows.shape[1:] == grad_rows.shape[1:2] and g == 1
    if not right or rows.shape[0] not in (1, cases):
        axes, of_group = ("[N, S, i]", "") if g == 1 else ("[N, S, g, i]", f"{g}, ")
        raise ValueError(f"rows of shape {list(rows.shape)}, wanted {axes} = [{cases}, {positions}, {of_group}{i}]")


# --- statistics without a graph -------------------------------------------------------------------------------------


def over_uses(
    registration: Registration, grads: Sequence[Tensor], inputs: Sequence[Tensor], layers: Mapping[str, Layer]
) -> dict[str, Tensor]:
    """The statistics of one source over all uses, as taps and links compute them in a backward.

    Gradients of single cases add up within a tower; towers are concatenated.
    """
    total: dict[tuple[str, int], Tensor] = {}
    towers: defaultdict[int, list[Rows]] = defaultdict(list)
    matrix, bias = registration.rows
    statistics = registration.statistics
    for use, grad, value in zip(registration.uses, grads, inputs, strict=True):
        rows, grad_rows = checked_rows(registration, use, layers[use.layer], grad, value)
        towers[use.tower].append(canonical(rows, grad_rows, bias, matrix))
        for statistic in statistics:
            if not statistic.lagged:
                value = sum_of(statistic.name, rows, grad_rows, bias, matrix)
                key = statistic.name, use.tower if statistic.per_case else 0
                total[key] = total[key] + value if key in total else value
    sums = {
        statistic.name: torch.cat([value for key, value in total.items() if key[0] == statistic.name])
        if statistic.per_case
        else total[statistic.name, 0]
        for statistic in statistics
        if not statistic.lagged
    }
    first = registration.uses[0]
    pairs = [pair for tower in towers.values() for pair in zip(tower[1:], tower, strict=False)]
    if first.steps > 1:
        pairs = [unfolded(rows, first.steps, first.steps_in_positions) for tower in towers.values() for rows in tower]
    zero = towers[first.tower][0].d.new_zeros(())
    lagged = {
        statistic.name: sum((statistic.of(*pair) for pair in pairs), zero.expand(statistic.shape(matrix)))
        for statistic in statistics
        if statistic.lagged
    }
    return sums | lagged


def checked_rows(registration: Registration, use: Use, layer: Layer, grad: Tensor, value: Tensor) -> list[Tensor]:
    """Rows and gradient rows. Raises ValueError for tensors that are not those of this use."""
    (g, o, i), bias = registration.rows
    try:
        rows, grad_rows = both_rows(registration, use, layer)(grad, value)
        if not registration.structure.needs_pixels:  # pixels are not as many as output positions
            check_row_shapes(rows, grad_rows, (g, o, i - bias))
    except (RuntimeError, ValueError, IndexError) as error:
        if fatal(error):
            raise
        raise ValueError(
            f"{registration} at {where(use.output)}: an input of shape {list(value.shape)} and an output's gradient of "
            f"shape {list(grad.shape)} are not of one {use.layer}: {first_line(error)}"
        ) from error
    return [rows, grad_rows]


def over_sources(sources: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over sources: inputs count once, second moments of gradients add up, gradients of single cases are listed."""
    total = {}
    for name, first in sources[0].items():
        power = named(name).power
        listed = torch.stack([sums[name] for sums in sources]) if power else first
        total[name] = listed.sum(0) if power == 2 else listed
    return total


# --- a sample of the rows ---------------------------------------------------------------------------------------------
#
# A factor of d inputs needs little more than d rows, but a convolution of a batch of images has a thousand times more.
# The sums over a sample are multiplied by a constant, so that they are right in expectation. The sample is systematic,
#
#     rows floor((u + j) · total / n),  j = 0 ... n - 1,  u uniform in [0, 1),
#
# so every row has the same probability, and one number u suffices. u comes from the generator of the recording or,
# without one, from a sequence of equidistributed numbers, so the user's random streams do not change. Only input
# factors are sampled: gradient rows, `count` and per-case gradients use all rows. Cases and rows have a number u each,
# so that the two choices are independent.


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
    if set(tensor_attrs(use)) - {ROW_MASK}:
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


# --- taps -------------------------------------------------------------------------------------------------------------


def real_rows(use: Use, layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    """(output or its gradient, mask) -> which of the use's rows are real: [N, S]."""
    rows = spread_rows(use, layer)

    form, literals = layer.forms[use.form], literal_attrs(use)
    make_grad_rows, batch_dim, of_loss = form.grad_rows, (use.batch_dim or 0) if form.leading else 0, use.loss_mask

    def real(output: Tensor, mask: Tensor) -> Tensor:
        kept = rows(output, (mask != 0).to(torch.float32)).flatten(2)[..., 0] != 0
        if not of_loss:
            return kept
        grad_rows = make_grad_rows(cases_first(output, batch_dim), literals)
        return kept | (grad_rows != 0).flatten(2).any(-1)

    return real


class Tap(nn.Module):
    """One use of one registration. `forward` returns `output` unchanged."""

    def __init__(self, registration: Registration, use: Use, layer: Layer) -> None:
        super().__init__()
        assert registration.matrix is not None, "bug in kfac_fx: a tap on a generic registration"
        self.matrix, bias = registration.rows
        self.tower, self.transposed = use.tower, use.transposed
        names = list(tensor_attrs(use))
        places = (names.index(key) if key in names else None for key in (ROW_MASK, CASES))
        self.place_of_mask, self.place_of_cases = places
        self.real: RealRows | None = real_rows(use, layer) if use.mask_dims else None
        self.prepare(registration, use, layer, self.both_rows(registration, use, layer), bias)

    def prepare(self, registration: Registration, use: Use, layer: Layer, both: BothRows, bias: bool) -> None:
        """Set up what happens in a backward. both: see `both_rows`. bias: whether the matrix has a bias column."""
        self.sampling = sampled_parts(registration, use, layer)
        if self.sampling is not None:
            self.register_buffer("phases", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.masks_patches = registration.patch_mask is not None
        if self.masks_patches:
            self.register_buffer(
                "patch_mask", torch.tensor(registration.patch_mask, dtype=torch.float64), persistent=False
            )
            both = with_patch_mask(both)
        axis = (use.batch_dim or 0) if layer.forms[use.form].leading else 0
        short = moment_and_grad_rows(registration, use, layer) if self.sampling is None else None
        sums = sums_of(both, self.matrix, bias, self.place_of_mask, self.real, self.sampling, axis, short)
        self.function = tap_function(sums, use.tower, registration.towers, self.place_of_cases)
        summed = short is not None or self.place_of_cases is not None or self.transposed or self.sampling is not None
        self.waiting_rows = None if summed else waiting_rows(both, self.matrix, bias, self.place_of_mask, self.real)

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        return both_rows(registration, use, layer)

    def forward(self, output: Tensor, input: Tensor, probes: Probes | None, *tensors: Tensor) -> Tensor:
        if not probes:
            return output
        if self.masks_patches:
            tensors = (*tensors, self.patch_mask)  # type: ignore[arg-type]
        waiting, handed_over = probes.get(WAITING), ()
        if waiting is not None and self.waiting_rows is not None:
            output, handed_over = waiting.hand_over(output, input, self.waiting_rows, tensors), waiting.names
        entering = {
            name: probes.get(twin.name, probe) if self.transposed and (twin := named(name).twin) is not None else probe
            for name, probe in probes.items()
            if name not in handed_over and name != WAITING and not (named(name).lagged or named(name).transposed)
        }
        if not entering:
            return output
        if self.sampling is not None:
            tensors = (*tensors, self.phases.clone())  # type: ignore[operator]  # the value of this forward
        input, *rest = without_aliases(output, input, *tensors)
        tapped: Tensor = self.function.apply(output, input, len(entering), *entering, *entering.values(), *rest)
        return tapped

    def extra_repr(self) -> str:
        return str(self.matrix)


def without_aliases(output: Tensor, *others: Any) -> list[Any]:
    """`others`, with a view for every tensor that comes twice: torch.compile accepts a tensor as one argument only."""
    arguments: list[Any] = [output]
    for value in others:
        twice = isinstance(value, Tensor) and any(value is argument for argument in arguments)
        arguments.append(value.view_as(value) if twice else value)
    return arguments[1:]


def sums_of(
    both: BothRows,
    matrix: Matrix,
    bias: bool,
    mask: int | None,
    real: RealRows | None,
    sampling: SampledShares | None,
    axis: int,
    short: BothRows | None,
) -> SumsOf:
    """The function from (names of the statistics, gradient of the output, input, attributes) to the statistics of one
    use by name.

    mask: the index of the attribute that masks padding. real: from (output, mask) to the mask of the rows, if the mask
        is not of rows. sampling: of the rows of input factors; its phases are then the last attribute.
    axis: of the cases in the output. short: makes A and the gradient rows, if no other statistic needs the rows.
    """

    def of_rows(rows: Tensor, grad_rows: Tensor, row_mask: Tensor | None) -> StatisticOf:
        as_given = in_groups(rows, grad_rows, bias, matrix, row_mask)

        return lambda name: named(name).of(as_given)

    def sums(names: Sequence[str], output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> StatisticOf:
        values, phases = (values, None) if sampling is None else (values[:-1], values[-1])
        row_mask = None if mask is None else values[mask]
        row_mask = row_mask if real is None else real(output_grad, row_mask)
        if (
            short is not None
            and A.name in names
            and not any(named(name).needs_rows for name in names if name != A.name)
            and saves_time(input)
        ):
            moment, short_rows = short(output_grad, input)
            others = of_rows(short_rows, short_rows, row_mask)
            return lambda name: moment if name == A.name else others(name)
        sampled = sample(both, sampling, phases, axis, output_grad, input, values, row_mask)
        if sampled is None:
            rows, grad_rows = both(output_grad, input, *values)
            return of_rows(rows, grad_rows, row_mask)
        fewer, fewer_mask, scale = sampled
        _, all_grad_rows = both(output_grad, input.narrow(axis, 0, 1), *values)  # the rows of all cases are not needed
        of_inputs, others = of_rows(fewer, fewer, fewer_mask), of_rows(all_grad_rows, all_grad_rows, row_mask)
        return lambda name: of_inputs(name) * scale if named(name).side == "A" else others(name)

    return sums


def waiting_rows(both: BothRows, matrix: Matrix, bias: bool, mask: int | None, real: RealRows | None) -> RowsOf:
    """The function of one use to its rows. The arguments are those of `sums_of`."""

    def rows(output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> Rows:
        row_mask = None if mask is None else values[mask]
        row_mask = row_mask if real is None else real(output_grad, row_mask)
        return in_groups(*both(output_grad, as_computed_with(input, output_grad), *values), bias, matrix, row_mask)

    return rows


def saves_time(input: Tensor) -> bool:
    """Whether the short way to A does: it has fewer products, and many more operations. Products of halves on CUDA take
    no time, and compiled code has fewer operations for rows."""
    return not input.is_cuda or (input.dtype not in HALVES and not torch.compiler.is_compiling())


def tap_function(
    sums: SumsOf, tower: int = 0, towers: int = 1, cases: int | None = None
) -> type[torch.autograd.Function]:
    """The autograd.Function of one tap: its own class, because a compiled graph accepts no object as an argument.

    Its arguments are (output, input, k, k names of statistics, k probes, attributes computed in the graph).
    cases: the index of the attribute that counts the cases that share the rows, if they do.
    """

    def over_cases(name: str, value: Tensor, values: list[Any]) -> Tensor:
        """A sum over all cases that share the rows; the gradient is already the sum over these cases."""
        return value * values[cases] if cases is not None and named(name).power == 0 else value

    def placed(name: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Per-case gradients in the rows of their tower: they add up over the uses of a case, not over towers."""
        if towers == 1 or not named(name).per_case:
            return value
        rows = shape[0] // towers
        return F.pad(value, (0, 0, tower * rows, (towers - tower) * rows - value.shape[0]))

    class TapFunction(torch.autograd.Function):
        @staticmethod
        def forward(output: Tensor, input: Tensor, number: int, *rest: Any) -> Tensor:
            return output.view_as(output)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, input, number, *rest = inputs
            ctx.is_tap = True
            none_is_none(ctx)
            ctx.names, ctx.shapes = rest[:number], [probe.shape for probe in rest[number : 2 * number]]
            values = rest[2 * number :]  # of the attributes: tensors, or sizes
            ctx.sizes = [None if isinstance(value, Tensor) else value for value in values]
            ctx.save_for_backward(input, *(value for value in values if isinstance(value, Tensor)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            (output_grad,) = grads
            if output_grad is None:  # the loss leaves this use out, so it has no rows
                return tuple(None for _ in ctx.needs_input_grad)
            input, *tensors = ctx.saved_tensors
            number, saved = len(ctx.names), iter(tensors)
            values = [next(saved) if size is None else size for size in ctx.sizes]
            wanted = ctx.needs_input_grad[3 + number : 3 + 2 * number]
            # `detach` does not work under vmap over several cotangents.
            with torch.no_grad(), full_precision_in_eager():
                computed = sums(ctx.names, output_grad, as_computed_with(input, output_grad), values)
                with without_autocast(output_grad.device):
                    probe_grads = [
                        over_cases(name, placed(name, computed(name), shape), values) if want else None
                        for name, shape, want in zip(ctx.names, ctx.shapes, wanted, strict=True)
                    ]
            return (output_grad, None, None, *(None for _ in ctx.names), *probe_grads, *(None for _ in ctx.sizes))

    return with_cached_signature(TapFunction)


def as_computed_with(input: Tensor, output: Tensor) -> Tensor:
    """The input as the layer computes with it. Under autocast a layer rounds its input to the precision of its
    output."""
    return input.to(output.dtype) if input.is_floating_point() and output.dtype in HALVES else input


def is_tapped(output: Tensor) -> bool:
    """Whether a tap returned this tensor. Autograd refuses writes into it, since it is a view that the tap made."""
    return getattr(output.grad_fn, "is_tap", False)  # of the context in `setup_context`, which is this node


def writable(output: Tensor) -> Tensor:
    """A tensor into which a user may write, as into what the model returns: it is no view of a tap to autograd.

    It shares the memory, so it costs nothing.
    """
    differs = isinstance(output, Tensor) and output.grad_fn is not None and not output.is_nested
    return cast(Tensor, cast(Any, Alias).apply(output)) if differs and output.layout is torch.strided else output


class Alias(torch.autograd.Function):
    """See `writable`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def none_is_none(ctx: Any) -> None:
    """A backward gets None instead of zeros. DistributedDataParallel sends None to outputs that the loss leaves out. A
    compiler sends zeros, and cannot trace this."""
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


class Positional(inspect.Signature):
    """The signature of a function that is called with all of its arguments, by their places: there is nothing to bind,
    which takes as long as a small product."""

    def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        assert not kwargs, "bug in kfac_fx: a tap that is called with arguments by name"
        return cast(inspect.BoundArguments, AllGiven(args))


class AllGiven(NamedTuple):
    """Bound arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def apply_defaults(self) -> None:
        """There are no defaults."""


def with_cached_signature(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Store the signature of `forward`, which torch asks for and binds at every call: this takes half of a tap's
    time."""
    parameters = inspect.signature(function.forward).parameters.values()
    assert all(parameter.default is parameter.empty for parameter in parameters), "bug in kfac_fx: a tap with defaults"
    function.forward.__signature__ = Positional(list(parameters))  # type: ignore[attr-defined]
    return function


def make_probes(registration: Registration, names: Iterable[str], cases: int, like: Tensor) -> dict[str, Tensor]:
    """A leaf for every statistic: zeros without memory, because only their shapes are read.

    cases: of the largest tower, or more. like: a tensor of the device and precision of the parameters.
    """
    assert registration.matrix is not None, "bug in kfac_fx: probes for a generic registration"
    matrix, _ = registration.rows
    zero = torch.zeros((), dtype=at_least_float32(like.dtype), device=like.device)

    cases *= registration.towers
    return {name: zero.expand(named(name).shape(matrix, cases)).requires_grad_() for name in names}


# --- the collecting tap -----------------------------------------------------------------------------------------------


ROWS = Statistic("rows", lambda g, o, i, n: (), power=1).name  # of the probe, whose sum is zero
CALLS = "calls"  # the key of a list among the probes, which gets the calls of the taps


class CollectingTap(Tap):
    """A tap that hands its rows to the function `sink` in every backward, in place of sums over them.

    Its probe is a single zero, which makes autograd visit the tap; the "gradient" of the probe is zero. A collecting
    tap runs without a compiler, and its sink without vmap. Before `sink` is set, rows are not made.

    A tap without this probe, and with `CALLS`, has no rows in a backward, and returns a plain view, which takes less
    time. Autograd lets one write into such a view, so this serves whole graphs alone: they write into copies of what
    comes out of a tap (`passes.rewrite`).

    Attributes:
        reads_x: whether `sink` reads `Rows.x`, which takes the time of patches.
    """

    sink: Callable[[Rows], None] | None = None
    reads_x: bool = True

    sampling = None  # it gets all rows

    def prepare(self, registration: Registration, use: Use, layer: Layer, both: BothRows, bias: bool) -> None:
        self.use = use

        def rows_of(output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> Rows:
            row_mask = None if self.place_of_mask is None else values[self.place_of_mask]
            row_mask = row_mask if self.real is None else self.real(output_grad, row_mask)
            with without_autocast(output_grad.device):
                rows, grad_rows = both(output_grad, input, *values)
                return canonical(rows, grad_rows, bias, self.matrix, row_mask)

        self.rows_of = rows_of

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        whole = both_rows(registration, use, layer)
        short = cache(lambda: lone_grad_rows(registration, use, layer))

        def both(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> RowPair:
            find = whole if self.reads_x else short() or whole
            return find(output_grad, input, *tensors)

        return both

    def forward(self, output: Tensor, input: Tensor, probes: Probes | None, *tensors: Tensor) -> Tensor:
        if not probes:
            return output
        tapped: Tensor
        if ROWS not in probes and output.requires_grad:
            tapped = output.view_as(output)
        else:
            probe = probes[ROWS] if ROWS in probes else torch.zeros((), device=output.device).requires_grad_()
            tapped = Collected.apply(output, input, probe, self, *tensors)  # type: ignore[no-untyped-call]
        if CALLS in probes:
            probes[CALLS].append(TappedCall(self, tapped, input.detach(), tensors))
        return tapped


class Collected(torch.autograd.Function):
    """The function of all collecting taps. It runs without a compiler and in no transformation of torch.func, so the
    tap is one of its arguments."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, input: Tensor, probe: Tensor, tap: CollectingTap, *values: Any) -> Tensor:
        ctx.is_tap, ctx.tap = True, tap
        ctx.set_materialize_grads(False)
        ctx.sizes = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(input, *(value for value in values if isinstance(value, Tensor)))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (output_grad,) = grads
        if output_grad is None:  # the loss leaves this use out, so it has no rows
            return tuple(None for _ in ctx.needs_input_grad)
        tap: CollectingTap = ctx.tap
        if tap.sink is not None:
            input, *tensors = ctx.saved_tensors
            saved = iter(tensors)
            values = [next(saved) if size is None else size for size in ctx.sizes]
            with torch.no_grad(), full_precision_in_eager():
                rows = tap.rows_of(output_grad, as_computed_with(input, output_grad), values)
                # Saved tensors are part of the graph, and functions of the rows may be differentiated.
                tap.sink(replace(rows, x=rows.x.detach(), d=rows.d.detach()))
        zero = output_grad.new_zeros((), dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return output_grad, None, zero, None, *(None for _ in ctx.sizes)


@dataclass(frozen=True, eq=False)
class TappedCall:
    """One call of a collecting tap in a forward: what came out of the layer, as a tensor of the graph."""

    tap: CollectingTap
    output: Tensor
    input: Tensor
    values: Sequence[Any]

    def rows(self, output_grad: Tensor) -> Rows:
        """The rows of this use for a gradient of its output; without side effects, so it runs under vmap, too. Products
        have the precision that is set."""
        with torch.no_grad():
            return self.tap.rows_of(output_grad, as_computed_with(self.input, output_grad), self.values)


# --- links ------------------------------------------------------------------------------------------------------------


class Link(nn.Module):
    """One use of a series. first, last: whether no use is before it, and none behind it."""

    def __init__(self, registration: Registration, use: Use, layer: Layer, first: bool, last: bool) -> None:
        super().__init__()
        assert registration.matrix is not None, "bug in kfac_fx: a link in a generic registration"
        self.owner, self.place = str(registration), where(use.output)
        self.function = link_function(
            both_rows(registration, use, layer),
            registration.matrix.shape,
            registration.matrix.bias is not None,
            (first, last, use.steps, use.steps_in_positions),
            (
                f"{self.owner} at {self.place} has ids as rows, which have no series: use 'kron_indep'",
                f"{self.owner} at {self.place} should hold {use.steps} uses, but its rows are not a multiple of that",
            ),
            real_rows(use, layer) if use.mask_dims else None,
        )

    def forward(
        self,
        output: Tensor,
        input: Tensor,
        probes: Probes | None,
        carried: Tensor | None,
        earlier: Tensor | None,
        *masks: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """`output` unchanged, and the carrier for the next use. Raises RegistrationError if the use before has another
        shape. carried, earlier: the carrier and the input of the use before. masks: of the rows without padding, of
        this use, the use before and the use behind."""
        if not probes:
            return output, None
        if carried is not None and carried.shape != output.shape:
            raise RegistrationError(
                f"{self.owner} at {self.place} has an output of shape {list(output.shape)}, but "
                f"{list(carried.shape)} one use before, so its uses are not a series: use 'kron_indep'"
            )
        input, carried, earlier, *masks = without_aliases(output, input, carried, earlier, *masks)  # type: ignore[assignment]
        pair: tuple[Tensor, Tensor] = self.function.apply(
            output, input, carried, earlier, *(probes[statistic.name] for statistic in LAGGED), *masks
        )
        return pair

    def extra_repr(self) -> str:
        return self.place


def link_function(
    both: BothRows,
    matrix: Matrix,
    bias: bool,
    place: tuple[bool, bool, int, bool],
    errors: tuple[str, str],
    real: RealRows | None = None,
) -> type[torch.autograd.Function]:
    """The autograd.Function of one link. Each link has its own class, which closes over functions and literals only.

    The arguments of the function are (output, input, carrier and input of the use before or None, the probes of
    A1, G1 and pairs, no masks or those of this use, of the use before and of the use behind).

    place: (first, last, the number of uses in these rows one after another, whether they lie along the positions).
    errors: for rows that are ids, and for rows that do not hold this number of uses.
    real: from (output, mask) to the mask of the rows, if the masks are not of rows.
    """
    first, last, steps, in_positions = place
    of_ids, uneven = errors

    class LinkFunction(torch.autograd.Function):
        @staticmethod
        def forward(
            output: Tensor, input: Tensor, carried: Tensor | None, earlier: Tensor | None, *rest: Tensor
        ) -> tuple[Tensor, Tensor]:
            return output.view_as(output), output.new_zeros(()).expand(output.shape)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, input, _, earlier, *rest = inputs
            none_is_none(ctx)
            ctx.save_for_backward(input, input if first else earlier, *rest[len(LAGGED) :])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            given = next((grad for grad in grads if grad is not None), None)
            if given is None:
                return tuple(None for _ in ctx.needs_input_grad)
            output_grad, later_grad = (torch.zeros_like(given) if grad is None else grad for grad in grads)
            input, earlier, *masks = ctx.saved_tensors
            input, earlier = (as_computed_with(value, output_grad) for value in (input, earlier))
            row_masks = [mask if real is None else real(output_grad, mask) for mask in masks]
            with torch.no_grad(), without_autocast(output_grad.device), full_precision_in_eager():
                here = canonical(
                    *both(output_grad, input, *masks[:1]), bias, matrix, row_masks[0] if row_masks else None
                )
                if not here.x.is_floating_point():
                    raise RegistrationError(of_ids)
                if here.d.shape[in_positions] % steps:
                    raise RegistrationError(uneven)
                sums: list[Tensor | None]
                if steps > 1:
                    pair = unfolded(here, steps, in_positions)
                    sums = [A1.of(*pair), G1.of(*pair), PAIRS.of(*pair)]
                else:
                    # All uses have the same form, so the rows before and the gradients behind are made as those here.
                    # They are zero at padding, and so is the bias column.
                    beside = both(later_grad, earlier, *masks[1:2])
                    before = canonical(beside[0], here.d, bias, matrix, row_masks[1] if row_masks else None)
                    behind = canonical(here.x, beside[1], bias, matrix, row_masks[2] if row_masks else None)
                    sums = [None if first else A1.of(here, before), None if last else G1.of(behind, here)]
                    sums += [None if first else PAIRS.of(here, before)]
            return output_grad, None, None if first else output_grad, None, *sums, *(None for _ in masks)

    return with_cached_signature(LinkFunction)


def unfolded(rows: Rows, steps: int, in_positions: bool) -> tuple[Rows, Rows]:
    """(the rows of all later uses, the rows of all earlier ones) of `steps` uses whose rows lie behind each other.

    The order is time-major: along the cases [T·N, S], or along the positions [N, T·S] if `in_positions`.
    """

    def by_time(tensor: Tensor) -> Tensor:
        by_step: Tensor = tensor.unflatten(int(in_positions), (steps, -1))
        return by_step.movedim(int(in_positions), 0)

    x, d = by_time(rows.expanded()), by_time(rows.d)
    mask = None if rows.mask is None else by_time(rows.mask)

    def at(steps: slice) -> Rows:
        mask_at = None if mask is None else mask[steps].flatten(0, 1)
        return Rows(x[steps].flatten(0, 1), d[steps].flatten(0, 1), rows.bias, rows.matrix, mask_at)

    return at(slice(1, None)), at(slice(None, -1))
