"""The tap: an identity on the output of a use whose backward computes statistics of its rows.

For every statistic a *probe* enters the tap, a zero tensor of the shape of the statistic. The statistic leaves the
backward pass as the gradient of the probe. No tensor is mutated, so the same emitted module serves `autograd.grad` over
probes only, the user's own backward, several cotangents and a compiled graph. A probe that enters several taps sums
over uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.linalg.matrices import full_precision_in_eager
from kfac_fx.passes.ir import CASES, KEPT, Registration, Use, tensor_attrs
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.matrix import Shape
from kfac_fx.passes.padding import real_rows
from kfac_fx.statistics.lagged import LAGGED
from kfac_fx.statistics.moments import TURNED
from kfac_fx.statistics.row_sums import Matrix, Rows, canonical, named, whole_statistic
from kfac_fx.taps.rows import BothRows, both_rows, moment_and_grad_rows, with_patch_mask
from kfac_fx.taps.subsample import SAMPLED, SampledShares, sample, sampled_parts

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
        if registration.patch_mask is not None:
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
        if hasattr(self, "patch_mask"):
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

    def of(name: str, rows: Tensor, grad_rows: Tensor, row_mask: Tensor | None) -> Tensor:
        return named(name).compute(rows, grad_rows, bias, matrix, row_mask)

    def sums(names: Sequence[str], output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> StatisticOf:
        values, phases = (values, None) if sampling is None else (values[:-1], values[-1])
        row_mask = None if mask is None else values[mask]
        row_mask = row_mask if real is None else real(output_grad, row_mask)
        if short is not None and "A" in names and WITHOUT_ROWS.issuperset(names):
            moment, short_rows = short(output_grad, input)
            return lambda name: moment if name == "A" else of(name, short_rows, short_rows, row_mask)
        sampled = sample(both, sampling, phases, axis, output_grad, input, values, row_mask)
        if sampled is None:
            rows, grad_rows = both(output_grad, input, *values)
            return lambda name: of(name, rows, grad_rows, row_mask)
        fewer, fewer_mask, scale = sampled
        _, all_grad_rows = both(output_grad, input.narrow(axis, 0, 1), *values)  # the rows of all cases are not needed
        return lambda name: (
            of(name, fewer, fewer, fewer_mask) * scale
            if whole_statistic(name) in SAMPLED
            else of(name, all_grad_rows, all_grad_rows, row_mask)
        )

    return sums


def tap_function(
    sums: SumsOf, tower: int = 0, towers: int = 1, cases: int | None = None
) -> type[torch.autograd.Function]:
    """The autograd.Function of one tap: its own class, because a compiled graph accepts no object as an argument.

    Its arguments are (output, input, k, k names of statistics, k probes, attributes computed in the graph).
    cases: the index of the attribute that counts the cases that share the rows, if they do.
    """

    def times(name: str, values: list[Any]) -> Any:
        """The number of cases with the same rows; the gradient is already the sum over these cases."""
        return values[cases] if cases is not None and whole_statistic(name) in OF_INPUTS else 1

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
                computed = sums(ctx.names, output_grad, input, values)
                probe_grads = [
                    placed(name, computed(name), shape) * times(name, values) if want else None
                    for name, shape, want in zip(ctx.names, ctx.shapes, wanted, strict=True)
                ]
            return (output_grad, None, None, *(None for _ in ctx.names), *probe_grads, *(None for _ in ctx.sizes))

    return quick(TapFunction)


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
                with torch.autocast(output_grad.device.type, enabled=False):
                    # Saved tensors are part of the graph, and functions of the rows may be differentiated.
                    rows, grad_rows = (side.detach() for side in both(output_grad, input, *values))
                    self.sink(canonical(rows, grad_rows, bias, self.matrix, row_mask))
            return lambda name: output_grad.new_zeros((), dtype=torch.float32)

        return collected
