"""The captures of one model must have registrations of which the same blocks can be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kfac_fx.blocks.block import statistics_of
from kfac_fx.blocks.series import longest
from kfac_fx.passes.errors import ModelChangedError, table
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.recording.recorder import Recorder


def with_generic(program: Program, earlier: Program) -> Program:
    """`program` with all parameters generic that were generic in the capture from earlier inputs."""
    reasons = {
        name: registration.reason
        for registration in earlier.registrations
        if registration.generic
        for name in registration.parameters
    }
    registrations: list[Registration] = []
    for registration in program.registrations:
        if any(name in reasons for name in registration.parameters):
            registrations += [program.generic(name, reasons.get(name)) for name in registration.parameters]
        else:
            registrations.append(registration)
    return program.but(registrations=tuple(registrations))


def agreeing(recorder: Recorder, first: Recorder) -> Recorder:
    """`recorder` with the approximations of the first capture of the model.

    Raises ModelChangedError if its registrations are others.
    """
    if recorder is first:
        return recorder
    check_trained(first.program.parameters, recorder.program.parameters)
    before = {registration.parameters: registration for registration in first.registrations}
    now = {registration.parameters: registration for registration in recorder.registrations}
    rows = [(", ".join(key), other_path(before.get(key), now.get(key))) for key in dict.fromkeys((*before, *now))]
    if recorder.program.mask is not None and first.program.mask is not None:
        rows += [(", ".join(key), other_masks(before[key], now[key])) for key in before if key in now]
    if differing := [row for row in rows if row[1]]:
        name = type(recorder.model).__name__
        raise ModelChangedError(
            f"with these inputs {name} uses its parameters differently than with the first inputs:\n"
            f"{table(differing)}\nCompile the model once per control-flow path."
        )
    adopted = tuple(
        replace(registration, approximation=before[registration.parameters].approximation)
        for registration in recorder.registrations
    )
    if adopted == recorder.registrations:
        return recorder
    return recorder.with_program(recorder.program.but(registrations=adopted))


def check_trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ModelChangedError with the names of parameters that are trained in only one of the two."""
    if changed := [name for name in dict.fromkeys((*before, *now)) if (name in before) != (name in now)]:
        raise ModelChangedError(
            f"requires_grad was changed after kfac_fx.compile: {', '.join(changed)}.\nCompile again."
        )


def other_path(first: Registration | None, other: Registration | None) -> str:
    """The difference that two registrations of the same parameters make to their block; "" if there is none."""
    if first is None or other is None:
        return f"{in_words(first)} at first, {in_words(other)} here"
    if first.structure.needs_cases and not other.structure.needs_cases:
        return f"{in_words(first)} and {first.approximation} at first, {in_words(other)} here"
    approximated = replace(other, approximation=first.approximation)
    difference = f"{in_words(first)} at first, {in_words(other)} here"
    if first.structure.series and other.steps > (most := longest(first.steps)):
        return f"{difference}; {first.approximation} is prepared for {most} at most"
    same = first.layer == other.layer and statistics_of(first) == statistics_of(approximated)
    return "" if same else difference


def other_masks(first: Registration, other: Registration) -> str:
    """A sentence if padding would be in the factors of one batch and not in those of another, else ""."""
    fits = [any(use.mask_dims for use in registration.uses) for registration in (first, other)]
    return "" if fits[0] == fits[1] else f"the padding mask fits its uses {'at first' if fits[0] else 'here'} only"


def in_words(registration: Registration | None) -> str:
    if registration is None:
        return "no block of its own"
    number = len(registration.uses)
    uses = "" if registration.generic else f" with {number} use{'s' * (number != 1)}"
    return f"{registration.layer}{uses}{f' ({registration.reason})' if registration.reason else ''}"
