"""The captures of one model: one for every kind of call, made and proved at the first such call, all for one set of
blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from kfac_fx.linalg.sharded import drop_gathered
from kfac_fx.passes.errors import PUBLIC, ModelChangedError, UntraceableError, fatal
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.torch_private import class_of
from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.effects import accelerators, same_random, values_kept
from kfac_fx.passes.tracing.signature import capture_key
from kfac_fx.passes.tracing.substitutes import CAPTURING
from kfac_fx.recording.capturing import Capturing, CompileArguments, agreeing, continuing
from kfac_fx.recording.checks.unchanged import (
    Structure,
    Trained,
    refuse_inference_mode,
    refuse_unfit,
    refuse_without_values,
)
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from kfac_fx.recording.frames import UncapturedCall
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics.moments import PendingMoments

MAX_KINDS = 8  # of calls in the cache: modes, dtypes, devices, structures; the least recently used goes first
MAX_CAPTURES = 32  # of one kind of call, where one capture does not serve all, as with lengths of sequences
MAX_ROUNDS = 4  # of captures for the same inputs, before a model counts as unstable

Result = TypeVar("Result")


class CaptureCache:
    """The captures of one model.

    Attributes:
        first: the capture that the blocks are made for; None as long as there is none. Another one takes its place when
            a parameter is unfrozen that was never trained before.
        registrations: those of which there are blocks: of `first`, and of parameters that are frozen and that `first`
            does not use.
        trained: the parameters that were trained at any time.
        refusal: the error of torch.fx, if it could not trace the whole model.
        recorders: by kind of call, the least recently used first.
    """

    def __init__(self, model: nn.Module, arguments: CompileArguments) -> None:
        self.model, self.arguments, self.capturing = model, arguments, Capturing(model, arguments)
        self.structure = Structure(model, self.follow_shards)
        self.trained = Trained(model)
        self.first: Recorder | None = None
        self.registrations: tuple[Registration, ...] = ()
        self.refusal = ""
        self.recorders: OrderedDict[Any, list[Recorder]] = OrderedDict()
        self.outdated = False  # parameters were unfrozen since the first capture

    def trace_symbolically(self) -> None:
        """Capture without inputs. If torch.fx cannot trace the whole model, the first training forward decides."""
        if self.arguments.padding_mask is not None:
            self.refusal = "padding_mask needs the sizes of a batch, to know what it masks."
            return
        if self.arguments.options.batch_dim:
            self.refusal = "batch_dim needs the sizes of a batch, to know which of them counts the cases."
            return
        try:
            with CAPTURING:
                traced = trace_model(self.model, options=self.arguments.options, layers=self.arguments.layers)
        except UntraceableError as error:
            self.refusal = str(error)
            return
        self.take(traced)

    def take(self, traced: Capture) -> None:
        """Take over a first capture."""
        with CAPTURING:
            self.make_first(self.capturing.registered(traced))

    def make_first(self, recorder: Recorder) -> None:
        rest = (registration for registration in self.registrations if recorder.absent.issuperset(registration.owners))
        self.first, self.registrations = recorder, (*recorder.registrations, *rest)

    @property
    def program(self) -> Program:
        if self.first is None:
            raise UntraceableError(
                f"{class_of(self.model).__name__} is captured at its first training forward, because torch.fx alone "
                "cannot trace all of it. Give kfac_fx.compile example inputs to capture it now. The error of torch.fx "
                "is:\n"
                f"{self.refusal}"
            )
        return self.first.program

    @property
    def all(self) -> tuple[Recorder, ...]:
        """The captures of all kinds of calls, the first one before the others."""
        first = () if self.first is None else (self.first,)
        return *first, *(
            recorder for kind in self.recorders.values() for recorder in kind if recorder is not self.first
        )

    # --- what happened to the model since ---------------------------------------------------------------------------

    def follow_shards(self) -> None:
        """The model was sharded: the captures that were made of whole parameters run on their shards.

        Raises UntraceableError for captures that cannot.
        """
        name = class_of(self.model).__name__
        if self.arguments.backend != "eager":
            raise UntraceableError(
                f"{name} was sharded, and backend={self.arguments.backend!r} cannot gather its parameters where its "
                'graph reads them.\nCompile it with backend="eager", before it is sharded.'
            )
        self.structure.follow_shards()
        parameters = dict(self.model.named_parameters())
        self.trained.follow(parameters)
        for cached in self.recorders.values():
            for place, recorder in enumerate(cached):
                trained = {name: parameters[name] for name in recorder.program.parameters}
                cached[place] = recorder.with_program(replace(recorder.program, parameters=trained))
                self.first = cached[place] if self.first is recorder else self.first

    # --- which capture ----------------------------------------------------------------------------------------------

    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet.

        Raises ModelChangedError, UntraceableError, RegistrationError and its kinds.
        """
        if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
            raise TypeError(
                f"the inputs of forward are a tuple and a dict, and not a {type(args).__name__} and a "
                f"{type(kwargs).__name__}: write (x,) and {{}} for one tensor, as in net.record((x,), {{}})"
            )
        refuse_inference_mode("a batch is recorded")
        self.structure.check()
        if self.trained.unfrozen:
            self.register_unfrozen()
        key = capture_key(self.model, args, kwargs)
        cached = self.recorders.get(key, [])
        for place, recorder in enumerate(cached):
            if recorder.capture.holds(args, kwargs) and self.has_settings_of(recorder):
                self.recorders.move_to_end(key)
                cached.append(cached.pop(place))
                if not recorder.proven:  # its first batch was empty, or not finite
                    with CAPTURING, self.trained.in_captures():
                        cached[-1] = self.capturing.proved(recorder, args, kwargs)
                    if self.first is recorder:
                        self.make_first(cached[-1])
                if not recorder.absent <= recorder.frozen:
                    cached[-1] = agreeing(cached[-1], self.registrations, masked=self.masked)
                return cached[-1]
        if self.structure.sharded:
            name = class_of(self.model).__name__
            raise UntraceableError(
                f"{name} is called in a way that was not captured before it was sharded, and it "
                "cannot be captured now that no process has its whole parameters.\nCompile it with example inputs of "
                "the same structure, dtypes and modes, kfac_fx.compile(model, (x,)), and call net.recorder((x,), {}) "
                "for every further kind of call, before fully_shard."
            )
        if self.arguments.verify:
            refuse_without_values(self.model)
        with CAPTURING, self.trained.in_captures():
            recorder = (None if self.recorders else self.first_symbolic(args, kwargs)) or self.capturing.exported(
                args, kwargs, every_size=any(map(self.has_settings_of, cached)), first=self.first is None
            )
        if self.recorders:
            recorder = agreeing(recorder, self.registrations, masked=self.masked)
        else:
            if self.outdated:
                recorder = continuing(recorder, self.registrations)
            self.make_first(recorder)
            self.outdated = False
        self.recorders[key] = [*cached, recorder][-MAX_CAPTURES:]
        self.recorders.move_to_end(key)
        if len(self.recorders) > MAX_KINDS:
            self.recorders.popitem(last=False)
        return recorder

    @property
    def masked(self) -> bool:
        """Whether the first capture has a padding mask."""
        return self.first is not None and self.first.program.mask is not None

    def register_unfrozen(self) -> None:
        """Capture anew: parameters are trained that no capture has registered. Raises ModelChangedError if that is
        impossible, because the registrations were made by hand."""
        names = self.trained.take_unfrozen()
        if self.capturing.by_hand:
            raise ModelChangedError(
                f"parameters were unfrozen after a LayerCollection was compiled: {', '.join(names)}.\n"
                "Its registrations were made without them. Register them in a new LayerCollection."
            )
        refuse_unfit(self.model)
        self.recorders.clear()
        self.outdated = True

    def has_settings_of(self, recorder: Recorder) -> bool:
        """Whether everything that the capture is specialized to still has its values; see `ForwardSettings`."""
        return recorder.settings is None or recorder.settings.hold()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], action: Callable[[Recorder, tuple[Any, ...]], Result]
    ) -> Result:
        """`action` on the capture for these inputs and on its inputs, again after every call that had to be captured.

        Raises UntraceableError if the model calls its submodules differently each time, and the model's own error if
        it does not run on these inputs.
        """
        for _ in range(MAX_ROUNDS):
            recorder = self.recorder(args, kwargs)
            try:
                return action(recorder, recorder.capture.flatten(args, kwargs))
            except UncapturedCall as uncaptured:
                self.capture_call(recorder, args, kwargs, uncaptured)
                last = uncaptured
            except RuntimeError as error:
                self.raise_the_models_own(error, args, kwargs)
                raise
        raise self.capturing.unstable(last)

    def raise_the_models_own(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run the model on inputs on which its graph has failed: its own error names its modules and lines."""
        if isinstance(error, PUBLIC) or fatal(error):
            return
        refuse_without_values(self.model)
        with same_random(accelerators(self.model.parameters())), values_kept(self.model.buffers()):
            try:
                self.model(*args, **kwargs)
            except Exception as models_own:
                raise models_own from None
            finally:
                if self.structure.sharded:
                    drop_gathered(self.model)

    def record_in_training(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], generator: torch.Generator | None
    ) -> tuple[Any, PendingMoments]:
        """See `Recorder`. A call that no graph serves is captured afterwards, and nothing was recorded then."""
        recorder = self.recorder(args, kwargs)
        try:
            outputs, pending = recorder.record_in_training(recorder.capture.flatten(args, kwargs), generator)
        except RuntimeError as error:
            self.raise_the_models_own(error, args, kwargs)
            raise
        emitted = recorder.emitted
        if isinstance(emitted, EmittedSubmodules) and emitted.uncaptured is not None:
            self.capture_call(recorder, args, kwargs, emitted.uncaptured)
            unfilled = [{name: probe.detach().clone() for name, probe in probes.items()} for probes in pending.probes]
            pending = replace(pending, probes=unfilled)
        return outputs, pending

    def capture_call(
        self, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], uncaptured: UncapturedCall
    ) -> None:
        """Capture, if necessary, and prove the calls that a divided model makes with these inputs.

        Raises UntraceableError if the model is sharded.
        """
        if self.structure.sharded:
            name = class_of(self.model).__name__
            raise UntraceableError(
                f"on these inputs {name} calls {uncaptured.path or 'a submodule'} in a way that "
                "was not captured before it was sharded, and it cannot be captured now that no process has its whole "
                "parameters.\nCall net.record((x,), {}) with inputs that take every branch of its Python, before "
                "fully_shard; or leave it whole and train in DistributedDataParallel(net), with "
                "KFAC(net, placement='owners')."
            )
        emitted = recorder.emitted
        assert isinstance(emitted, EmittedSubmodules), (
            "bug in kfac_fx: an uncaptured call in a graph of the whole model"
        )
        with CAPTURING, self.trained.in_captures():
            if uncaptured.captured:
                emitted.checked = None
                extended = self.capturing.proved(recorder, args, kwargs)
            else:
                error = UntraceableError("it was divided on earlier inputs")
                extended = self.capturing.divided(args, kwargs, error, emitted)
        assert self.first is not None, "bug in kfac_fx: an uncaptured call before the first capture"
        extended = agreeing(extended, self.registrations, masked=self.masked)
        for cached in self.recorders.values():
            cached[:] = [extended if other is recorder else other for other in cached]

    # --- capturing --------------------------------------------------------------------------------------------------

    def first_symbolic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder | None:
        """The capture without inputs, if it holds for these; None: torch.export has to capture the model."""
        if self.first is None or self.outdated:
            return None
        if not self.first.capture.holds(args, kwargs) or not self.has_settings_of(self.first):
            return None
        try:
            return self.capturing.proved(self.first, args, kwargs)
        except UntraceableError:
            return None
