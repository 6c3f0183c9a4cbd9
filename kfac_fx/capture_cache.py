"""The captures of one model: one for every kind of call, made and proved when first met, all for one set of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from kfac_fx.checks.proof import prove
from kfac_fx.checks.unchanged import Structure, refuse_without_values
from kfac_fx.divided.frames import Unmet
from kfac_fx.divided.recorder import DividedRecorder, division_of, recorder_of
from kfac_fx.passes.errors import RegistrationError, UntraceableError
from kfac_fx.passes.ir import Program
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.submodules import in_autocast
from kfac_fx.passes.trace import Capture, capture, named_parameters
from kfac_fx.passes.tracing.attributes import settings
from kfac_fx.passes.tracing.calls import called
from kfac_fx.passes.tracing.signature import capture_key
from kfac_fx.recording.agreement import Declared, agreeing, check_trained, needs, with_generic, with_program
from kfac_fx.recording.masks import with_mask
from kfac_fx.recording.recorder import Recorder
from kfac_fx.statistics.moments import Ride

KINDS = 8  # of calls that are kept: modes, dtypes, devices, structures; the least recently used goes first
ROUNDS = 4  # of meeting new calls on the same inputs
SHAPES = 32  # of one kind that are kept, where one capture does not serve all, such as the lengths of sequences

Result = TypeVar("Result")


class Captures:
    """first: what the blocks are made for; None as long as nothing could be captured without inputs."""

    def __init__(self, model: nn.Module, declared: Declared) -> None:
        self.model, self.declared = model, declared
        self.structure = Structure(model)
        self.first: Recorder | None = None
        self.refusal = ""  # of torch.fx, if it did not see the whole model
        self.known: OrderedDict[Any, list[Recorder]] = OrderedDict()

    def trace_symbolically(self) -> None:
        """Without inputs: at once if torch.fx sees the whole model, else at the first training forward."""
        if self.declared.padding_mask is not None:
            self.refusal = "padding_mask needs the sizes of a batch, to know what it masks."
            return
        try:
            traced = capture(self.model, options=self.declared.options, layers=self.declared.layers)
        except UntraceableError as error:
            self.refusal = str(error)
            return
        self.first = self.built(traced)

    def take(self, traced: Capture) -> None:
        """A capture that was made elsewhere is the first."""
        self.first = self.built(traced)

    @property
    def program(self) -> Program:
        if self.first is None:
            raise UntraceableError(
                f"{type(self.model).__name__} is captured at its first training forward, for torch.fx alone cannot see "
                f"it whole. Give kfac_fx.compile example inputs to capture it now. What torch.fx says:\n{self.refusal}"
            )
        return self.first.program

    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet."""
        self.structure.check()
        key = capture_key(self.model, args, kwargs)
        known = self.known.get(key, [])
        for place, one in enumerate(known):
            if one.capture.holds(args, kwargs) and self.set_as(one):
                self.known.move_to_end(key)
                known.append(known.pop(place))
                if not one.proven:  # its first batch was empty, or not finite
                    known[-1] = self.proved(one, args, kwargs)
                    self.first = known[-1] if self.first is one else self.first
                return known[-1]
        refuse_without_values(self.model, self.declared.verify)
        symbolic = None if self.known else self.first_symbolic(args, kwargs)
        made = symbolic or self.exported(args, kwargs, every_size=any(map(self.set_as, known)))
        if self.first is None or not self.known:
            self.first = made
        made = agreeing(made, self.first)
        self.known[key] = [*known, made][-SHAPES:]
        self.known.move_to_end(key)
        if len(self.known) > KINDS:
            self.known.popitem(last=False)
        return made

    def set_as(self, recorder: Recorder) -> bool:
        """Whether all attributes are what they were when this was captured, but for those that forward itself sets; and
        classes, functions and hooks."""
        return recorder.settings is None or recorder.settings == self.held(recorder.capture)

    def held(self, traced: Capture) -> tuple[dict[str, Any], dict[str, Any]]:
        return settings(self.model, traced.assigned), called(self.model)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        action: Callable[[Recorder, tuple[Any, ...]], Result],
    ) -> Result:
        """`action` on the capture for these inputs and on its inputs, as often as it meets calls that are new."""
        for _ in range(ROUNDS):
            recorder = self.recorder(args, kwargs)
            try:
                return action(recorder, recorder.capture.flatten(args, kwargs))
            except Unmet as unmet:
                assert isinstance(recorder, DividedRecorder), "bug in kfac_fx: a call in a graph of the whole"
                self.meet(recorder, args, kwargs, unmet.captured)
                path = unmet.path
        raise self.restless(path)

    def ride(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], generator: torch.Generator | None
    ) -> tuple[Any, Ride]:
        """See `Recorder.ride`; a divided model's new calls are met behind a ride that recorded nothing."""
        recorder = self.recorder(args, kwargs)
        outputs, ride = recorder.ride(recorder.capture.flatten(args, kwargs), generator)
        if isinstance(recorder, DividedRecorder) and recorder.unmet is not None:
            self.meet(recorder, args, kwargs, recorder.unmet.captured)
            unfilled = [{name: probe.detach().clone() for name, probe in one.items()} for one in ride.probes]
            ride = replace(ride, probes=unfilled)
        return outputs, ride

    def restless(self, path: str) -> UntraceableError:
        return UntraceableError(
            f"{type(self.model).__name__} calls {path} in another way at every forward, on the same inputs and with "
            "the same random numbers.\nLet forward depend on its inputs, its attributes and random numbers only."
        )

    def first_symbolic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder | None:
        """What was captured without inputs, if it holds on real ones; else None, and torch.export decides."""
        if self.first is None:
            return None
        check_trained(self.first.program.parameters, named_parameters(self.model)[0])
        if not self.first.capture.holds(args, kwargs) or not self.set_as(self.first):
            return None
        try:
            return self.proved(self.first, args, kwargs)
        except UntraceableError:
            return None

    def exported(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], every_size: bool) -> Recorder:
        """One graph of the whole model, or one for each of the largest submodules that have one.

        every_size: the sizes of images were seen to change.
        """
        options, layers = self.declared.options, self.declared.layers
        try:
            traced = capture(self.model, args, kwargs, options=options, layers=layers, every_size=every_size)
            parts = self.around_autocast(traced.program, args, kwargs)
            if parts is not None and not generic(parts):
                return parts
            program, said = self.declared.passes(traced.program), self.declared.padding_mask
            if said is not None:
                program = with_mask(program, said, self.model, args, kwargs)
            whole = self.proved(self.emit(traced, program), args, kwargs)
            return parts if parts is not None and generic(parts) < generic(whole) else whole
        except UntraceableError as error:
            if self.declared.passes is not run:
                raise  # registered by hand, on the nodes of one graph
            return self.divided(args, kwargs, error)

    def around_autocast(self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder | None:
        """The parts of a model of which a graph hides layers, inside of autocast; None if it hides none, or has no
        parts."""
        if self.declared.passes is not run or not (names := in_autocast(program)):
            return None
        said = (
            f"{type(self.model).__name__} runs {', '.join(names)} under autocast of its own, which is closed to passes."
        )
        try:
            return self.divided(args, kwargs, UntraceableError(said))
        except (UntraceableError, RegistrationError):  # the whole says what is wrong
            return None

    def divided(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        error: UntraceableError,
        earlier: DividedRecorder | None = None,
    ) -> Recorder:
        """error: why the whole was not captured; earlier: what was captured on other inputs, to be kept."""
        known = earlier.division if earlier is not None else None
        division, program = division_of(self.model, self.declared, args, kwargs, error, known)
        if earlier is not None:
            program = with_generic(program, earlier.program)
        recorder = recorder_of(division, program, self.model, self.declared, earlier, args, kwargs)
        if earlier is not None:
            recorder.extends(earlier)
        try:
            return self.proved(recorder, args, kwargs)
        except Unmet as unmet:
            raise self.restless(unmet.path) from None

    def meet(self, recorder: DividedRecorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], captured: bool) -> None:
        """Capture, if they are not, and prove the calls that these inputs make of submodules, beside those known."""
        if captured:
            recorder.checked = None
            made = self.proved(recorder, args, kwargs)
        else:
            made = self.divided(args, kwargs, UntraceableError("it was divided on earlier inputs"), recorder)
        assert self.first is not None, "bug in kfac_fx: calls met before the first capture"
        made = agreeing(made, self.first)
        for known in self.known.values():
            known[:] = [made if one is recorder else one for one in known]

    def built(self, traced: Capture) -> Recorder:
        return self.emit(traced, self.declared.passes(traced.program))

    def emit(self, traced: Capture, program: Program) -> Recorder:
        loss, backend = self.declared.loss, self.declared.backend
        return Recorder(traced, program, self.model, loss, needs(program), backend, settings=self.held(traced))

    def proved(self, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        verdict = prove(recorder, args, kwargs) if self.declared.verify else None
        if verdict is not None and verdict.program.registrations != recorder.program.registrations:
            recorder = with_program(recorder, verdict.program)
        recorder.proven = verdict is None or verdict.conclusive
        recorder.note_proof(verdict is not None)
        return recorder


def generic(recorder: Recorder) -> int:
    """How many parameters are claimed by no layer."""
    return sum(len(one.parameters) for one in recorder.program.registrations if one.generic)
