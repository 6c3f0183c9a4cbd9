"""Taps and links: identities on the output of a use whose backward computes statistics of its rows.

For every statistic a *probe* enters the tap, a zero tensor of the shape of the statistic. The statistic leaves the
backward pass as the gradient of the probe. No tensor is mutated, so the same emitted module serves `autograd.grad` over
probes only, the user's own backward, several cotangents and a compiled graph. A probe that enters several taps sums
over uses.

Links bring the gradients of consecutive uses of a weight together, for series blocks. A link stands on the output of a
use, in front of its tap. It returns the output and a *carrier*, a zero tensor of the same shape, which enters the link
of the next use. The "gradient" of the carrier is the gradient of the output of the next use. So the backward of a link
has the gradients of two consecutive outputs, and autograd runs it after the backward of the next link, however the two
uses are connected. The forward has the inputs of both uses. The second moments leave as the gradients of probes, as the
statistics of a tap do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.linalg.matrices import full_precision_in_eager
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import CASES, KEPT, Registration, Use, tensor_attrs, where
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.matrix import HALVES, Shape, without_autocast
from kfac_fx.passes.padding import real_rows
from kfac_fx.recording.statistics.moments import TURNED
from kfac_fx.recording.statistics.row_sums import Matrix, Rows, canonical, in_groups, named, whole_statistic
from kfac_fx.recording.taps.rows import LAGGED, BothRows, both_rows, moment_and_grad_rows, unfolded, with_patch_mask
from kfac_fx.recording.taps.subsample import SAMPLED, SampledShares, sample, sampled_parts

Probes = Mapping[str, Tensor]
OF_INPUTS = ("count", "A", "A_diag")  # sums that do not contain gradient rows
WITHOUT_ROWS = {"count", "A", "G", "G_diag"}  # computed without the rows, if A can be
RealRows = Callable[[Tensor, Any], Tensor]
StatisticOf = Callable[[str], Tensor]
SumsOf = Callable[[Sequence[str], Tensor, Tensor, Sequence[Any]], StatisticOf]


class Tap(nn.Module):
    """One use of one registration. `forward` returns `output` unchanged."""

    def __init__(self, registration: Registration, use: Use, layer: Layer) -> None:
        super().__init__()
        assert registration.matrix is not None, "bug in kfac_fx: a tap on a generic registration"
        self.matrix, bias = registration.rows
        self.tower, self.turned = use.tower, use.transposed
        both = self.both_rows(registration, use, layer)
        names = list(tensor_attrs(use))
        mask, cases = (names.index(key) if key in names else None for key in (KEPT, CASES))
        real = real_rows(use, layer) if use.mask_dims else None
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
        sums = self.sums(both, bias, mask, real, axis, short)
        self.function = tap_function(sums, use.tower, registration.towers, cases)

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        return both_rows(registration, use, layer)

    def sums(
        self, both: BothRows, bias: bool, mask: int | None, real: RealRows | None, axis: int, short: BothRows | None
    ) -> SumsOf:
        return sums_of(both, self.matrix, bias, mask, real, self.sampling, axis, short)

    def forward(self, output: Tensor, input: Tensor, probes: Probes | None, *tensors: Tensor) -> Tensor:
        if not probes:
            return output
        entering = {
            name: probes.get(f"{name}{TURNED}", probe) if self.turned else probe
            for name, probe in probes.items()
            if name not in LAGGED and not name.endswith(TURNED)
        }
        if self.masks_patches:
            tensors = (*tensors, self.patch_mask)  # type: ignore[arg-type]
        if self.sampling is not None:
            tensors = (*tensors, self.phases.clone())  # type: ignore[operator]  # the value of this forward
        input, *rest = apart(output, input, *tensors)
        tapped: Tensor = self.function.apply(output, input, len(entering), *entering, *entering.values(), *rest)
        return tapped

    def extra_repr(self) -> str:
        return str(self.matrix)


def apart(output: Tensor, *others: Any) -> list[Any]:
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

        def of(name: str) -> Tensor:
            statistic = named(name)
            return statistic.of(as_given if statistic.takes_halves else as_given.widened())

        return of

    def sums(names: Sequence[str], output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> StatisticOf:
        values, phases = (values, None) if sampling is None else (values[:-1], values[-1])
        row_mask = None if mask is None else values[mask]
        row_mask = row_mask if real is None else real(output_grad, row_mask)
        if short is not None and "A" in names and WITHOUT_ROWS.issuperset(names) and saves_time(input):
            moment, short_rows = short(output_grad, input)
            others = of_rows(short_rows, short_rows, row_mask)
            return lambda name: moment if name == "A" else others(name)
        sampled = sample(both, sampling, phases, axis, output_grad, input, values, row_mask)
        if sampled is None:
            rows, grad_rows = both(output_grad, input, *values)
            return of_rows(rows, grad_rows, row_mask)
        fewer, fewer_mask, scale = sampled
        _, all_grad_rows = both(output_grad, input.narrow(axis, 0, 1), *values)  # the rows of all cases are not needed
        of_inputs, others = of_rows(fewer, fewer, fewer_mask), of_rows(all_grad_rows, all_grad_rows, row_mask)
        return lambda name: of_inputs(name) * scale if whole_statistic(name) in SAMPLED else others(name)

    return sums


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
        return value * values[cases] if cases is not None and whole_statistic(name) in OF_INPUTS else value

    def placed(name: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Per-case gradients in the rows of their tower: they add up over the uses of a case, not over towers."""
        if name != "per_case" or towers == 1:
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
            ctx.names, ctx.shapes = rest[:number], [probe.shape for probe in rest[number : 2 * number]]
            values = rest[2 * number :]  # of the attributes: tensors, or sizes
            ctx.sizes = [None if isinstance(value, Tensor) else value for value in values]
            ctx.save_for_backward(input, *(value for value in values if isinstance(value, Tensor)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            (output_grad,) = grads
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

    return quick(TapFunction)


def as_computed_with(input: Tensor, output: Tensor) -> Tensor:
    """The input as the layer computes with it. Under autocast a layer rounds its input to the precision of its
    output."""
    return input.to(output.dtype) if input.is_floating_point() and output.dtype in HALVES else input


def is_tapped(output: Tensor) -> bool:
    """Whether a tap returned this tensor. Autograd refuses writes into it, since it is a view that the tap made."""
    return getattr(
        output.grad_fn, "is_tap", False
    )  # set by `setup_context`: the context is the node of autograd's graph


def quick(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Store the signature of `forward`, which torch asks for at every call; computing it takes half of a tap's time."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def make_probes(registration: Registration, names: Iterable[str], cases: int, like: Tensor) -> dict[str, Tensor]:
    """A leaf for every statistic: zeros without memory, because only their shapes are read.

    cases: of the largest tower, or more. like: a tensor of the device and precision of the parameters.
    """
    assert registration.matrix is not None, "bug in kfac_fx: probes for a generic registration"
    matrix, _ = registration.rows
    dtype = torch.promote_types(like.dtype.to_real(), torch.float32)  # a frozen parameter may be complex
    zero = torch.zeros((), dtype=dtype, device=like.device)

    def shape(name: str) -> Shape:
        if name in LAGGED:
            return LAGGED[name].shape(matrix)
        return named(name.removesuffix(TURNED)).shape(
            matrix, cases * registration.towers if name == "per_case" else cases
        )

    return {name: zero.expand(shape(name)).requires_grad_() for name in names}


# --- the collecting tap -----------------------------------------------------------------------------------------------


ROWS = "rows"  # the name of the probe


class CollectingTap(Tap):
    """A tap that hands its rows to the function `sink` in every backward, in place of sums over them.

    Its probe is a single zero, which makes autograd visit the tap; the "gradient" of the probe is zero. A collecting
    tap runs without a compiler and without vmap. Before `sink` is set, rows are not made.
    """

    sink: Callable[[Rows], None] | None = None

    def __init__(self, registration: Registration, use: Use, layer: Layer) -> None:
        super().__init__(registration, use, layer)
        self.use = use

    def sums(
        self, both: BothRows, bias: bool, mask: int | None, real: RealRows | None, axis: int, short: BothRows | None
    ) -> SumsOf:
        def collected(names: Sequence[str], output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> StatisticOf:
            if self.sink is not None:
                row_mask = None if mask is None else values[mask]
                row_mask = row_mask if real is None else real(output_grad, row_mask)
                with without_autocast(output_grad.device):
                    # Saved tensors are part of the graph, and functions of the rows may be differentiated.
                    rows, grad_rows = (side.detach() for side in both(output_grad, input, *values))
                    self.sink(canonical(rows, grad_rows, bias, self.matrix, row_mask))
            return lambda name: output_grad.new_zeros((), dtype=torch.float32)

        return collected


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
        input, carried, earlier, *masks = apart(output, input, carried, earlier, *masks)  # type: ignore[assignment]
        pair: tuple[Tensor, Tensor] = self.function.apply(
            output, input, carried, earlier, *(probes[name] for name in LAGGED), *masks
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
    `LAGGED`, no masks or those of this use, of the use before and of the use behind).

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
            ctx.save_for_backward(input, input if first else earlier, *rest[len(LAGGED) :])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            output_grad, later_grad = grads
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
                a, g, pairs = (LAGGED[name].compute for name in LAGGED)
                if steps > 1:
                    pair = unfolded(here, steps, in_positions)
                    sums = [a(*pair), g(*pair), pairs(*pair)]
                else:
                    # All uses have the same form, so the rows before and the gradients behind are made as those here.
                    # They are zero at padding, and so is the bias column.
                    beside = both(later_grad, earlier, *masks[1:2])
                    before = canonical(beside[0], here.d, bias, matrix, row_masks[1] if row_masks else None)
                    behind = canonical(here.x, beside[1], bias, matrix, row_masks[2] if row_masks else None)
                    sums = [None if first else a(here, before), None if last else g(behind, here)]
                    sums += [None if first else pairs(here, before)]
            return output_grad, None, None if first else output_grad, None, *sums, *(None for _ in masks)

    return quick(LinkFunction)
