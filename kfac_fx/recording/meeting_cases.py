"""Whether cases meet between the parameters and the loss, as in batch normalization and in contrastive losses.

    x [N, i] -> linear -> s [N, o] -> normalized over N -> outputs -> loss of N rows      row 0 of the loss reaches s[1]

The gradient rows of a case are then sums over the loss rows of several cases. Where all cases are sent back at once,
the exact modes would keep products of two cases, and the gradient of a single example would contain those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import pulled
from kfac_fx.linalg.sharded import unsharded
from kfac_fx.losses.sources import Cotangents
from kfac_fx.passes.approximations import KRON
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.emitted import EmittedModel
from kfac_fx.recording.moments import Key
from kfac_fx.recording.row_sums import Rows
from kfac_fx.recording.taps import ROWS, CollectingTap


@dataclass(frozen=True)
class LossRows:
    """Tensors behind the outputs of a run, of which every row is of another case; those without dimensions are left
    out.

    outputs: those that gradients are sent to. leaves: the same as constants. tensors: what is computed from these.
    """

    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    tensors: Sequence[Tensor]

    def halves(self) -> Iterator[tuple[Cotangents, Cotangents]]:
        """Random cotangents of the outputs, from one half of the rows and from the other. Any two rows are in different
        halves once: the halves are those of the bits of their numbers."""
        generator = torch.Generator().manual_seed(0)
        for tensor in (tensor for tensor in self.tensors if tensor.dim()):
            vector = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
            row = torch.arange(len(tensor), device=tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            for bit in range(max(0, len(tensor) - 1).bit_length()):
                upper = (row >> bit) % 2 == 1
                low, high = (pulled([tensor], [vector * half], self.leaves, keep=True) for half in (~upper, upper))
                yield low, high


def collecting(emitted: EmittedModel) -> EmittedModel:
    """The same capture with collecting taps, without a compiler."""
    program = emitted.program.but(registrations=tuple(map(with_own_rows, emitted.program.registrations)))
    return emitted.but(program=program, backend="eager", make_tap=CollectingTap)


def with_own_rows(registration: Registration) -> Registration:
    """A registration with the rows of its matrix: patches in place of pixels, no sample of them, and no mask."""
    approximation = KRON.name if registration.structure.kronecker else registration.approximation
    return replace(registration, approximation=approximation, sampling=None, patch_mask=None)


def row_probes(registrations: Sequence[Registration], wanted: Collection[Key], like: Tensor) -> list[dict[str, Tensor]]:
    """One mapping a registration: a probe for those that are wanted."""
    zero = torch.zeros((), device=like.device)
    return [{ROWS: zero.clone().requires_grad_()} if r.parameters in wanted else {} for r in registrations]


def collecting_taps(emitted: EmittedModel, key: Key) -> list[CollectingTap]:
    return [tap for tap in emitted.taps[key] if isinstance(tap, CollectingTap)]


@contextmanager
def collected(sinks: Mapping[CollectingTap, Callable[[Rows], None]]) -> Iterator[None]:
    """Backwards inside hand the rows of every tap to its function."""
    try:
        for tap, sink in sinks.items():
            tap.sink = sink
        yield
    finally:
        for tap in sinks:
            tap.sink = None


def cases_reached(rows: Rows) -> Tensor:
    """[N], the cases with a gradient."""
    has_gradient = (rows.d != 0).flatten(1).any(1)
    return has_gradient if rows.ids else has_gradient & ((rows.expanded() != 0).flatten(1).any(1) | rows.bias)


def keys_that_meet(
    emitted: EmittedModel,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    values: Any,
    loss_rows: Callable[[Any, tuple[Tensor, ...]], LossRows],
) -> frozenset[Key] | None:
    """The registrations with cases that the losses of several examples reach; None if an output is NaN, which hides it.

    It runs one forward, and two backwards for every bit of the number of examples. The host waits. Registrations with
    uses that do not depend on the batch are left out, because their gradients are of all examples.

    Args:
        emitted: with collecting taps.
        parameters, buffers: of the run; zero parameters get other values, because they would hide what is before them.
        loss_rows: from (what the model returns, the Fisher's outputs).
    """
    taps = {
        registration.parameters: collecting_taps(emitted, registration.parameters)
        for registration in emitted.program.registrations
        if not registration.generic and not any(use.batch_independent for use in registration.uses)
    }
    meeting: set[Key] = set()
    if not taps:
        return frozenset()
    with emitted.isolated():
        live = {name: revealing(unsharded(value.detach())).requires_grad_() for name, value in parameters.items()}
        probes = row_probes(emitted.program.registrations, taps, next(iter(live.values())))
        of_loss = loss_rows(*emitted.run(live, buffers, values, probes, compiled=False))
        if any(bool(output.isnan().any()) for output in of_loss.outputs):
            return None
        leaves = [probe for by_name in probes for probe in by_name.values()]

        def cases_of(cotangents: Cotangents) -> dict[tuple[Key, int], Tensor]:
            """[N] by registration and N, the cases that the cotangents reach."""
            cases: dict[tuple[Key, int], Tensor] = {}

            def note(key: Key, rows: Rows) -> None:
                mask = cases_reached(rows)
                place = key, len(mask)
                cases[place] = cases[place] | mask if place in cases else mask

            with collected({tap: partial(note, key) for key, of_key in taps.items() for tap in of_key}):
                pulled(of_loss.outputs, cotangents, leaves, keep=True)
            return cases

        for halves in of_loss.halves():
            low, high = map(cases_of, halves)
            meeting |= {place[0] for place in low.keys() & high.keys() if bool((low[place] & high[place]).any())}
    return frozenset(meeting)


def revealing(value: Tensor) -> Tensor:
    """Small random numbers for a parameter that is all zero, as many are at the start.

    A zero weight hides the gradients of all layers in front of it, and equal zeros on both sides would prove nothing.
    The identities and the zeros that are looked for hold for any values.
    """
    if not value.is_floating_point() or bool(value.any()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return 0.02 * noise.to(value)
