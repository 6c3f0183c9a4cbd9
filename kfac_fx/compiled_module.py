"""A model that can record its Fisher statistics, as `kfac_fx.compile` returns it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfac_fx.capture_cache import Captures
from kfac_fx.checks.unchanged import unwrapped
from kfac_fx.layer_collection import CapturedModel, LayerCollection
from kfac_fx.losses.registered import LossSpec
from kfac_fx.passes.errors import AlreadyAttachedError
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.trace import Capture
from kfac_fx.recording.agreement import Declared
from kfac_fx.recording.backends import compiled_model
from kfac_fx.recording.recorder import Recorder, replaced
from kfac_fx.report import Report
from kfac_fx.statistics.moments import Moments, Ride


class Listener(Protocol):
    """What a module compiled here tells about its forwards: an optimizer."""

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before every forward in training mode with gradients enabled; returns the outputs, or None to let
        the model compute them."""

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called after it, with what the user is about to get."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Called when the gradients of the module were zeroed."""


class CompiledModule(nn.Module):
    """A model that can record its Fisher statistics. Calls, parameters, buffers, state and modes are the model's own.

    model: the original module, without the wrappers of data parallelism and torch.compile that it came in, through
        which training forwards still go; registrations: one a Fisher block; program: the compiler's last word on the
        capture.
    """

    def __init__(
        self,
        model: nn.Module,
        declared: Declared,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        traced: Capture | None = None,
        wrapper: nn.Module | None = None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a child: names must not gain a prefix
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.backend = declared.backend
        self.captures = Captures(model, declared)
        self._listener: Listener | None = None
        self._collection: LayerCollection | None = None
        outer = model if wrapper is None else wrapper
        object.__setattr__(self, "_wrapper", outer)
        plain = outer if self.backend == "eager" else compiled_model(outer, self.backend)
        object.__setattr__(self, "_plain", plain)  # not a child either: it would be a child of itself
        if traced is not None:
            self.captures.take(traced)
        if args is not None or kwargs:
            self.recorder((args,) if isinstance(args, Tensor) else tuple(args or ()), dict(kwargs or {}))
        elif traced is None:
            self.captures.trace_symbolically()
        self._sealed = True

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return self.captures.program

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return self.program.registrations

    @property
    def report(self) -> Report:
        """What was registered, why, what it costs, and what an attached optimizer counted; print it."""
        return Report(self.program, getattr(self._listener, "counters", None), self._fallbacks)

    def _fallbacks(self) -> list[str]:
        """What was done in another way than it should be since compilation, and why."""
        first = self.captures.first
        looped = [] if first is None or first.loop_reason is None else [first.loop_reason]
        of_optimizer: Callable[[], list[str]] = getattr(self._listener, "fallbacks", list)
        unproved = [] if self.captures.declared.verify else ["no registration was proved: verify=False"]
        sent = [f"sources of the exact modes are sent back one by one: {why}" for why in looped]
        plain = [] if first is None or first.plain_reason is None else [first.plain_reason]
        return [*unproved, *sent, *(f"recordings are not compiled: {why}" for why in plain), *of_optimizer()]

    @property
    def layer_collection(self) -> LayerCollection:
        """What is registered, as a collection that takes no more registrations."""
        if self._collection is None:
            program, loss = self.program, self.captures.declared.loss
            assert self.captures.first is not None, "bug in kfac_fx: a program before the first capture"
            captured = CapturedModel(self.model, self.captures.first.capture, program, None, {})
            self._collection = LayerCollection.of(captured, program, loss if isinstance(loss, LossSpec) else None)
        return self._collection

    # --- running ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; in torch.compile's own wrapper it stays Python, which `backend=` compiles what it can be."""
        if self.model.training and torch.is_grad_enabled():
            self.captures.structure.check()
            if not self.captures.known:
                self.recorder(args, kwargs)
            if self._listener is not None:
                outputs = self._listener.on_forward(args, kwargs)
                if outputs is None:
                    outputs = self._plain(*args, **kwargs)
                self._listener.on_outputs(args, kwargs, outputs)
                return outputs
        return self._plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, through the wrappers that the model came in."""
        return self._wrapper(*args, **kwargs)

    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet."""
        return self.captures.recorder(args, kwargs)

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Moments:
        """Statistics of one batch, from a forward and backward that touch nothing of the model; see Recorder."""

        def recorded(recorder: Recorder, values: tuple[Any, ...]) -> Moments:
            return recorder.record(
                values, mode=mode, targets=targets, fraction=fraction, generator=generator, **options
            )

        return self.captures.run(args, kwargs, recorded)

    def ride(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator | None = None
    ) -> tuple[Any, Ride]:
        """The model's outputs, with taps that record during the user's own backward (the empirical Fisher)."""
        return self.captures.ride(args, kwargs, generator)

    def functional(
        self, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(outputs, the Fisher's outputs) as a pure function of the parameters."""
        return self.captures.run(args, kwargs, lambda recorder, values: recorder.outputs(parameters, values))

    def losses(
        self,
        outputs: Any,
        fisher: tuple[Tensor, ...],
        targets: Any = None,
        call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> list[tuple[float, Any]]:
        """(coefficient, loss) for each output distribution, on what `functional` returned. call: (args, kwargs) that it
        returned that for, whose padding is left out."""
        assert self.captures.first is not None, "bug in kfac_fx: losses before the first capture"
        if call is None or self.program.mask is None:
            recorder = self.captures.first
            return recorder.averaged(recorder.losses(outputs, fisher, targets))
        recorder = self.recorder(*call)
        losses = recorder.real_losses(
            lambda given: recorder.losses(replaced(outputs, fisher, given), tuple(given), targets),
            fisher,
            recorder.capture.flatten(*call),
        )
        return recorder.averaged(losses)

    # --- attachment and change --------------------------------------------------------------------------------------

    def attach(self, listener: Listener) -> None:
        """Tell `listener` about every training forward. Raises AlreadyAttachedError for a second one."""
        if self._listener is not None:
            raise AlreadyAttachedError(
                f"a {type(self._listener).__name__} is attached to this module already: it would record every batch"
                " twice.\nUse net.detach() first, or compile the model again."
            )
        self._listener = listener

    def detach(self) -> None:
        self._listener = None

    # --- the model's own behavior -----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        self._wrapper.train(mode)
        self.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._listener is not None:
            self._listener.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model has is set on the model."""
        own = name in self.__dict__ or hasattr(type(self), name) or "_sealed" not in self.__dict__
        super().__setattr__(name, value) if own else setattr(self.model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A copy of the model, compiled anew with the same declarations; without an optimizer."""
        if self._collection is not None:
            raise TypeError("a module of a LayerCollection is not copied: its registrations are of this model's graph")
        wrapper = copy.deepcopy(self._wrapper, memo)
        return CompiledModule(unwrapped(wrapper), self.captures.declared, None, None, wrapper=wrapper)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compiled module is not pickled: it holds graphs and functions. Save net.state_dict(), or net.model, and "
            "compile what you load."
        )

    def __repr__(self) -> str:
        return f"kfac_fx.compile({self.model!r})"
