"""The rows of all uses of one weight behind each other, so that there is one product for many uses.

    x_0, x_1, ... -> taps, which hand over r_t and d_t -> [r_0, r_1, ...], [d_0, d_1, ...] -> A, G and count in one sum

A recurrent layer uses its weight at every step, with a few rows. A product of few rows takes as long as one of many:
its result is a whole matrix, which is added to the last one. So the taps of a registration with several uses hand their
rows over, and the sums are made of many uses at once.

The probes enter the function `Gather`, which returns a *token*, a single zero. The token enters the taps instead of the
probes. Its "gradient" says nothing, but autograd computes it. So the backward of `Gather` runs behind those of all the
taps, and returns the sums as the gradients of the probes. A tap that the loss leaves out hands over nothing. Autograd
runs first what was made last, so the token is made at the first use: its backward then follows that of this use, and
not those of all layers, and the sums can travel while the backward goes on (`estimator.early_sums`).

The rows wait in a list, which takes memory in addition to that of autograd. So the list is summed up once it has
`TIMES` as many numbers as the factors, and `FEW` at least, and at once if there was one use. A compiler cannot trace
the list, and vmap over cotangents would need a list for itself. So compiled and exact recordings have a sum for every
use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import full_precision_in_eager
from kfac_fx.passes.approximations import Statistic, named
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import without_autocast
from kfac_fx.passes.torch_private import backward_here
from kfac_fx.recording.statistics import Rows, behind_each_other
from kfac_fx.recording.taps import WAITING, RowsOf, none_is_none, with_cached_signature

TIMES = 2  # the numbers of the factors, that may wait
FEW = 1 << 20  # numbers


class WaitingRows:
    """The rows of one forward and one registration that wait to be summed up, by the number of their backward.

    A backward may run inside of another one, as in the hooks of equilibrium models. It brings rows of its own.

    Attributes:
        names: of the statistics that are made of them.
        most: numbers that may wait.
        uses: how many there were so far.
    """

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.names, self.most, self.uses = names, most, 0
        self.of_backward: dict[int, RowsOfBackward] = {}

    def add(self, rows: Rows) -> None:
        now = backward_here()
        if now not in self.of_backward:
            self.of_backward[now] = RowsOfBackward(self.names, self.most if self.uses > 1 else 0)
        self.of_backward[now].add(rows)

    def take(self) -> dict[str, Tensor]:
        """The sums of this backward by name; empty if it brought no rows. Those of backwards inside of it, which did
        not reach the probes, are forgotten."""
        now = backward_here()
        own = self.of_backward.pop(now, None)
        self.of_backward = {number: rows for number, rows in self.of_backward.items() if number < now}
        return {} if own is None else own.take()


class RowsOfBackward:
    """The rows of one backward that wait, and the sums of earlier ones; as of `WaitingRows`."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.names, self.most = names, most
        self.rows: list[Rows] = []
        self.numbers = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, rows: Rows) -> None:
        if rows.repeats != 1 or rows.routed:  # their sums have factors of their own
            self.sum_up(rows)
            return
        if self.rows and not are_alike(self.rows[0], rows):
            self.sum_up_waiting()
        self.rows.append(rows)
        self.numbers += rows.x.numel() + rows.d.numel()
        if self.numbers > self.most:
            self.sum_up_waiting()

    def sum_up_waiting(self) -> None:
        rows = behind_each_other(self.rows)
        self.rows, self.numbers = [], 0
        self.sum_up(rows)

    def sum_up(self, rows: Rows) -> None:
        for name in self.names:
            value = named(name).of(rows)
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def take(self) -> dict[str, Tensor]:
        if self.rows:
            self.sum_up_waiting()
        return self.sums


def are_alike(first: Rows, second: Rows) -> bool:
    """Whether rows fit behind each other: they differ in the number of cases at most."""
    pairs = (first.x, second.x), (first.d, second.d)
    same = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device for a, b in pairs)
    return same and (first.mask is None) == (second.mask is None)


class Gather(torch.autograd.Function):
    """(waiting rows, probes) -> a token, behind whose gradient the backward returns the sums."""

    @staticmethod
    def forward(waiting: WaitingRows, *probes: Tensor) -> Tensor:
        return probes[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        none_is_none(ctx)
        ctx.waiting = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = grads
        if token is None:
            return None, *(None for _ in ctx.waiting.names)
        with torch.no_grad(), full_precision_in_eager(), without_autocast(token.device):
            sums = ctx.waiting.take()
        return None, *(sums.get(name) for name in ctx.waiting.names)


class HandOver(torch.autograd.Function):
    """(output, input, waiting rows, their token, the function of the use to its rows, attributes) -> the output."""

    @staticmethod
    def forward(output: Tensor, input: Tensor, waiting: WaitingRows, token: Tensor, *rest: Any) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, input, ctx.waiting, token, ctx.rows_of, *values = inputs
        ctx.is_tap, ctx.zero = True, token.detach()
        none_is_none(ctx)
        ctx.sizes = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(input, *(value for value in values if isinstance(value, Tensor)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (output_grad,) = grads
        if output_grad is None:  # the loss leaves this use out, so it has no rows
            return tuple(None for _ in ctx.needs_input_grad)
        # A view would keep the graph that its base is a part of, which keeps the waiting rows.
        input, *tensors = (tensor.detach() for tensor in ctx.saved_tensors)
        saved, grad = iter(tensors), output_grad.detach() if output_grad.requires_grad else output_grad
        values = [next(saved) if size is None else size for size in ctx.sizes]
        with torch.no_grad(), full_precision_in_eager(), without_autocast(output_grad.device):
            ctx.waiting.add(ctx.rows_of(grad, input, values))
        return output_grad, None, None, ctx.zero, *(None for _ in ctx.needs_input_grad[4:])


with_cached_signature(Gather)
with_cached_signature(HandOver)


class Waiting:
    """The rows of a registration that wait, and their token, as its taps get them among their probes."""

    def __init__(self, probes: Mapping[str, Tensor]) -> None:
        """probes: of the statistics that are made of the rows."""
        self.probes = probes
        self.rows = WaitingRows(tuple(probes), max(FEW, TIMES * sum(probe.numel() for probe in probes.values())))

    @property
    def names(self) -> Sequence[str]:
        return self.rows.names

    @cached_property
    def token(self) -> Tensor:
        with torch.enable_grad():  # the first use may be one without a gradient
            token: Tensor = cast(Any, Gather).apply(self.rows, *self.probes.values())
        return token

    def hand_over(self, output: Tensor, input: Tensor, rows_of: RowsOf, tensors: Sequence[Any]) -> Tensor:
        """The output of a use, whose backward adds its rows to those that wait. tensors: its attributes."""
        self.rows.uses += 1
        handed: Tensor = cast(Any, HandOver).apply(output, input, self.rows, self.token, rows_of, *tensors)
        return handed


def adds_up(statistic: Statistic) -> bool:
    """Whether a statistic is a sum over rows, whatever their order and their uses."""
    return (bool(statistic.side) or not statistic.power) and not (statistic.lagged or statistic.transposed)


def gathered(
    registrations: Iterable[Registration], probes: Iterable[dict[str, Tensor] | None], once: bool
) -> list[dict[str, Any] | None]:
    """The probes of a forward, with `Waiting` for registrations that have several uses.

    once: whether a use is called once in the forward; else one use may have several calls.
    """
    with_waiting: list[dict[str, Any] | None] = []
    for registration, of_registration in zip(registrations, probes, strict=True):
        several = len(registration.uses) > 1 or not once
        sums = {
            name: probe
            for name, probe in (of_registration or {}).items()
            if several and probe.requires_grad and adds_up(named(name))
        }
        with_waiting.append(
            {**of_registration, WAITING: Waiting(sums)} if of_registration and sums else of_registration
        )
    return with_waiting
