"""The rows of a use: its layer's declaration and the parametrizations that it goes through, in one function; the
statistics of given rows, without a graph; and those of pairs of rows, for series blocks.

    A1  Σ r_t+1 r_tᵀ        G1  Σ d_t+1 d_tᵀ        pairs  Σ 1

are sums over all cases, positions and pairs of uses one step apart, the later use on the left. They are divided by the
`count` of all rows. They are thus moments of sequences with zeros before and behind: a use without a neighbor has a
neighbor of zeros. So [[A, A1ᵀ], [A1, A]] has no negative eigenvalues in any batch. A sequence has one pair less than
rows, so the mean length of the sequences is count / (count - pairs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import bordered
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration, Use, literal_attrs, tensor_attrs, where
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.matrix import HALVES, Shape, precise, without_autocast
from kfac_fx.passes.parametrization import RowPair, RowsStep
from kfac_fx.recording.statistics.moments import statistics_of
from kfac_fx.recording.statistics.row_sums import Matrix, Rows, canonical, homogeneous, named, whole_statistic


@dataclass(frozen=True)
class Lagged:
    """`compute(later, earlier)` returns a tensor of the shape `shape(matrix)`; matrix: (g, o, i) with the bias."""

    shape: Callable[[Matrix], Shape]
    compute: Callable[[Rows, Rows], Tensor]


def input_lag(later: Rows, earlier: Rows) -> Tensor:
    if later.x.shape[0] == earlier.x.shape[0] == 1:  # without a mask, or of one case
        return cross(homogeneous(later), homogeneous(earlier)) * later.repeats
    return cross(*(homogeneous(rows).expand(rows.d.shape[0], -1, -1, -1) for rows in (later, earlier)))


def pairs(later: Rows, earlier: Rows) -> Tensor:
    if later.mask is None or earlier.mask is None:
        return later.d.new_full((), later.d.shape[0] * later.d.shape[1])
    return (later.mask & earlier.mask).sum().to(later.d.dtype)


LAGGED = {
    "A1": Lagged(lambda matrix: (matrix[0], matrix[2], matrix[2]), input_lag),
    "G1": Lagged(lambda matrix: (matrix[0], matrix[1], matrix[1]), lambda later, earlier: cross(later.d, earlier.d)),
    "pairs": Lagged(lambda matrix: (), pairs),
}


def cross(later: Tensor, earlier: Tensor) -> Tensor:
    """Σ later earlierᵀ in every group: [N, S, g, d] twice -> [g, d, d]."""
    if later.shape[2] == 1:  # `mm` is as fast as can be
        return (later.flatten(0, 2).mT @ earlier.flatten(0, 2)).unsqueeze(0)
    return torch.einsum("nsgi,nsgj->gij", later, earlier)


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


BothRows = Callable[..., RowPair]
UseStep = Callable[[RowPair, Mapping[str, Any]], RowPair]
UNSCALED = (1.0, 1.0)


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

    def both(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> RowPair:
        attrs = {**literals, **dict(zip(names, tensors, strict=True))}
        input, output_grad = (cases_first(tensor, batch_dim) for tensor in (input, output_grad))
        pair = make_rows(input, attrs), make_grad_rows(output_grad, attrs)
        for step in steps:
            pair = step(pair, attrs)
        return pair

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
    special = registration.structure.needs_pixels or registration.patch_mask is not None or tensor_attrs(use)
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
    names = statistics_of(registration)
    for use, grad, value in zip(registration.uses, grads, inputs, strict=True):
        rows, grad_rows = checked_rows(registration, use, layers[use.layer], grad, value)
        towers[use.tower].append(canonical(rows, grad_rows, bias, matrix))
        for name in names:
            if name not in LAGGED:
                statistic = named(name).compute(rows, grad_rows, bias, matrix)
                key = name, use.tower if name == "per_case" else 0
                total[key] = total[key] + statistic if key in total else statistic
    sums = {
        name: torch.cat([value for key, value in total.items() if key[0] == name]) if name == "per_case"
        else total[name, 0]
        for name in names if name not in LAGGED
    }  # fmt: skip
    first = registration.uses[0]
    pairs = [pair for tower in towers.values() for pair in zip(tower[1:], tower, strict=False)]
    if first.steps > 1:
        pairs = [unfolded(rows, first.steps, first.steps_in_positions) for tower in towers.values() for rows in tower]
    zero = towers[first.tower][0].d.new_zeros(())
    lagged = {
        name: sum((LAGGED[name].compute(*pair) for pair in pairs), zero.expand(LAGGED[name].shape(matrix)))
        for name in names
        if name in LAGGED
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
    once, listed = ("count", "A", "A_diag", "A1", "pairs"), ("per_case", "gradient")
    return {
        name: first if whole_statistic(name) in once else torch.stack([s[name] for s in sources]) if name in listed
        else torch.stack([s[name] for s in sources]).sum(0)
        for name, first in sources[0].items()
    }  # fmt: skip
