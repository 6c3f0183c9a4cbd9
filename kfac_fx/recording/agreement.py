"""The captures of one model must have registrations of which the same blocks can be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_fx.blocks.block import statistics_of
from kfac_fx.blocks.series import longest
from kfac_fx.passes.errors import ModelChangedError, table
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.recorder import Recorder
from kfac_fx.statistics.moments import Key


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


def agreeing(recorder: Recorder, known: Sequence[Registration], masked: bool = False) -> Recorder:
    """`recorder` with the approximations of the known registrations, and without those that differ from them.

    Only registrations of which all parameters are frozen may differ: adapters that are switched off.

    known: the registrations of which there are blocks. masked: whether these were captured with a padding mask.

    Raises ModelChangedError if other registrations differ.
    """
    frozen = recorder.frozen
    before = {registration.parameters: registration for registration in known}
    now = {registration.parameters: registration for registration in recorder.registrations}
    rows = {key: other_path(before.get(key), now.get(key)) for key in dict.fromkeys((*before, *now))}
    if recorder.program.mask is not None and masked:
        rows |= {key: rows[key] or other_masks(before[key], now[key]) for key in before if key in now}
    owners = {key: set((before.get(key) or now[key]).owners) for key in rows}
    if differing := [(", ".join(key), text) for key, text in rows.items() if text and not owners[key] <= frozen]:
        name = class_of(recorder.model).__name__
        raise ModelChangedError(
            f"with these inputs {name} uses its parameters differently than with the first inputs:\n"
            f"{table(differing)}\nCompile the model once per control-flow path."
        )
    recorder = with_approximations(recorder, {key: before[key] for key in before if key in now and not rows[key]})
    recorder.absent = frozenset(name for key, text in rows.items() if text for name in owners[key])
    return recorder


def continuing(recorder: Recorder, known: Sequence[Registration]) -> Recorder:
    """A first capture in which more parameters are trained than in those that `known` comes from, with the
    approximations of the blocks that go on."""
    before = {registration.parameters: registration for registration in known}
    same = {
        registration.parameters: before[registration.parameters]
        for registration in recorder.registrations
        if registration.parameters in before and not other_path(before[registration.parameters], registration)
    }
    recorder = with_approximations(recorder, same)
    used = {name for registration in recorder.registrations for name in registration.owners}
    recorder.absent = frozenset(name for registration in known for name in registration.owners) - used
    return recorder


def with_approximations(recorder: Recorder, known: Mapping[Key, Registration]) -> Recorder:
    """The recorder with the approximations of `known`, by the parameters of its registrations."""
    adopted = tuple(
        replace(registration, approximation=known[registration.parameters].approximation)
        if registration.parameters in known
        else registration
        for registration in recorder.registrations
    )
    if adopted == recorder.registrations:
        return recorder
    return recorder.with_program(recorder.program.but(registrations=adopted))


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
