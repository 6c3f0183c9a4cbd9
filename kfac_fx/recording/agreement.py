"""What the user said to `compile`.

What the captures of one model must have in common: registrations that the same blocks can be made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kfac_fx.blocks.block import statistics_of
from kfac_fx.blocks.series import longest
from kfac_fx.losses.registered import LossSpec, RegisteredLosses
from kfac_fx.passes.errors import ModelChangedError, table
from kfac_fx.passes.ir import Options, Program, Registration
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.pipeline import run
from kfac_fx.recording.masks import PaddingMask
from kfac_fx.recording.recorder import Recorder
from kfac_fx.statistics.moments import Key


@dataclass(frozen=True)
class Declared:
    """The arguments of `compile`, checked."""

    options: Options
    layers: Mapping[str, Layer]
    loss: LossSpec | RegisteredLosses | None
    verify: bool
    backend: str
    passes: Callable[[Program], Program] = run  # from a fresh capture to a program with registrations
    padding_mask: PaddingMask | None = None


# --- agreement --------------------------------------------------------------------------------------------------------


def needs(program: Program) -> dict[Key, tuple[str, ...]]:
    return {one.parameters: statistics_of(one) for one in program.registrations if not one.generic}


def with_program(recorder: Recorder, program: Program) -> Recorder:
    return replace(recorder, program=program, statistics=needs(program))


def with_generic(program: Program, earlier: Program) -> Program:
    """What was generic stays it."""
    reasons = {name: one.reason for one in earlier.registrations if one.generic for name in one.parameters}
    kept: list[Registration] = []
    for one in program.registrations:
        again = any(name in reasons for name in one.parameters)
        kept += [program.generic(name, reasons.get(name)) for name in one.parameters] if again else [one]
    return program.but(registrations=tuple(kept))


def agreeing(made: Recorder, first: Recorder) -> Recorder:
    """`made` with the approximations of the first capture of the model. Raises ModelChangedError if its registrations
    are others."""
    if made is first:
        return made
    check_trained(first.program.parameters, made.program.parameters)
    known = {one.parameters: one for one in first.program.registrations}
    other = {one.parameters: one for one in made.program.registrations}
    rows = [(", ".join(key), other_path(known.get(key), other.get(key))) for key in dict.fromkeys((*known, *other))]
    if made.program.mask is not None and first.program.mask is not None:
        rows += [(", ".join(key), other_masks(known[key], other[key])) for key in known if key in other]
    if apart := [row for row in rows if row[1]]:
        raise ModelChangedError(
            f"these inputs take another path through {type(made.model).__name__} than the first:\n{table(apart)}\n"
            "Compile one module for each path."
        )
    adopted = tuple(
        replace(one, approximation=known[one.parameters].approximation) for one in made.program.registrations
    )
    if adopted == made.program.registrations:
        return made
    return with_program(made, made.program.but(registrations=adopted))


def check_trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ModelChangedError with the names of parameters that are trained in one of both only."""
    if changed := [name for name in dict.fromkeys((*before, *now)) if (name in before) != (name in now)]:
        raise ModelChangedError(
            f"requires_grad was changed after kfac_fx.compile: {', '.join(changed)}.\nCompile again."
        )


def other_path(first: Registration | None, other: Registration | None) -> str:
    """How two registrations of the same parameters differ in what a block is made of; "" if they do not."""
    if first is None or other is None:
        return f"{said(first)} at first, {said(other)} here"
    if first.structure.needs_cases and not other.structure.needs_cases:
        return f"{said(first)} and {first.approximation} at first, {said(other)} here"
    approximated = replace(other, approximation=first.approximation)
    if first.structure.series and other.steps > (most := longest(first.steps)):
        return f"{said(first)} at first, {said(other)} here; {first.approximation} is prepared for {most} at most"
    if first.layer == other.layer and statistics_of(first) == statistics_of(approximated):
        return ""
    return f"{said(first)} at first, {said(other)} here"


def other_masks(first: Registration, other: Registration) -> str:
    """Whether padding would be in the factors of one batch and not in those of another; "" if not."""
    fits = [any(use.mask_dims for use in one.uses) for one in (first, other)]
    return "" if fits[0] == fits[1] else f"the padding mask fits its uses {'at first' if fits[0] else 'here'} only"


def said(one: Registration | None) -> str:
    if one is None:
        return "no block of its own"
    uses = "" if one.generic else f" with {len(one.uses)} use{'s' * (len(one.uses) != 1)}"
    return f"{one.layer}{uses}{f' ({one.reason})' if one.reason else ''}"
