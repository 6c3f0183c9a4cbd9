"""`kfac_fx.compile`: from a model to a module of the same signature that can record its Fisher statistics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfac_fx.passes import pytree
from kfac_fx.passes.errors import AlreadyAttachedError, ModelChangedError, RegistrationError, UntraceableError
from kfac_fx.passes.ir import Options, Program, Registration
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import Capture, capture

from .blocks import statistics_of
from .captured import CapturedModel
from .layer_collection import LayerCollection
from .loss_spec import LossSpec, loss_from
from .moments import Key, Moments, Ride
from .proof import prove
from .recorder import Recorder
from .registered_losses import RegisteredLosses
from .report import Report

CAPTURES = 8  # kept for other shapes, dtypes, devices and training flags; the least recently used goes first
BACKENDS = ("eager", "inductor", "cudagraphs", "aot_eager")


class Listener(Protocol):
    """What a module compiled here tells about its forwards: an optimizer."""

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before every forward in training mode with gradients enabled; returns the outputs, or None to let
        the model compute them."""


@dataclass(frozen=True)
class Declared:
    """The arguments of `compile`, checked."""

    options: Options
    layers: Mapping[str, Layer]
    loss: LossSpec | RegisteredLosses | None
    verify: bool
    backend: str
    passes: Callable[[Program], Program] = run  # from a fresh capture to a program with registrations


def compile(
    model: nn.Module | LayerCollection,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Any = None,
    linked: Sequence[Iterable[str]] | Mapping[Sequence[str], str] = (),
    approximations: Mapping[Any, str] | None = None,
    layers: Sequence[Layer] = (),
    strict: bool = False,
    verify: bool = True,
    backend: str = "eager",
    dense_limit: int = 4096,
) -> CompiledModule:
    """Capture `model` and register every use of every parameter.

    Args:
        model: any module; its parameters stay the same objects. Or a LayerCollection, which says the rest, too.
        example_inputs, example_kwargs: inputs to capture with; without them the model is traced symbolically at once
            or, where that cannot see it whole, captured at its first training forward.
        loss: "categorical", "normal", "multi_bernoulli", a class of `kfac_fx.losses`, or a function of the model's
            outputs that returns a loss; None: found in the graph where forward computes it.
        linked: groups of parameter names that belong in one Fisher block, or {group: approximation}.
        approximations: {parameter or module name, with *; layer name; module class: approximation}.
        layers: the user's own layer declarations.
        strict: a parameter that would become generic is an error.
        verify: prove on the first batch that rows reproduce the autograd gradient.
        backend: "eager", "inductor" or "cudagraphs" (inductor with CUDA graphs), for recording, training and KFAC.
        dense_limit: a factor side wider than this becomes diagonal, and the report says so.

    Raises UntraceableError, RegistrationError and its kinds, LossError, LayerError; each names all culprits.
    """
    if isinstance(model, LayerCollection):
        if example_inputs or example_kwargs or loss or linked or approximations or layers:
            raise RegistrationError("a LayerCollection has its own inputs, losses and layers; give none of them")
        return compiled(model, verify=verify, backend=backend)
    if isinstance(model, CompiledModule):
        raise RegistrationError("the module is compiled already; hand kfac_fx.compile the original model")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}")
    groups = linked if isinstance(linked, Mapping) else dict.fromkeys(map(tuple, linked))
    options = Options(
        linked={frozenset([group] if isinstance(group, str) else group): value for group, value in groups.items()},
        approximations=approximations or {},
        strict=strict,
        loss_given=loss is not None,
        modules={name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name},
        dense_limit=dense_limit,
    )
    declared = Declared(
        options, collect(*LAYERS.values(), *layers), None if loss is None else loss_from(loss), verify, backend
    )
    return CompiledModule(model, declared, example_inputs, example_kwargs)


def compiled(
    collection: LayerCollection,
    variables: Iterable[Any] | None = None,
    *,
    verify: bool = True,
    backend: str = "eager",
) -> CompiledModule:
    """A module with the registrations and the losses of a collection, which becomes final.

    variables: the parameters that must be registered, and no others; None: all that the losses depend on.
    """
    collection.finalize(variables)
    captured = collection.captured
    declared = Declared(
        captured.program.options, collection.layers, collection.registered_losses, verify, backend, collection.on
    )
    net = CompiledModule(captured.model, declared, captured.args, captured.kwargs, captured.capture)
    net._collection = collection
    return net


class CompiledModule(nn.Module):
    """A model that can record its Fisher statistics. Calls, parameters, buffers, state and modes are the model's own.

    model: the original module; registrations: one a Fisher block; program: the compiler's last word on the capture.
    """

    def __init__(
        self,
        model: nn.Module,
        declared: Declared,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        traced: Capture | None = None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a child: names must not gain a prefix
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.declared = declared
        self.backend = declared.backend
        self._listener: Listener | None = None
        self._captures: OrderedDict[Any, list[Recorder]] = OrderedDict()
        self._first: Recorder | None = None
        self._collection: LayerCollection | None = None
        self._places = parameter_places(model)
        plain = model if self.backend == "eager" else compiled_model(model, self.backend)
        object.__setattr__(self, "_plain", plain)  # not a child either: it would be a child of itself
        if traced is not None:
            self._first = self.built(traced)
        if args is not None or kwargs:
            if isinstance(args, Tensor):
                args = (args,)
            self.recorder(args or (), dict(kwargs or {}))
        elif traced is None:
            self.trace_symbolically()

    # --- capture ----------------------------------------------------------------------------------------------------

    def trace_symbolically(self) -> None:
        """Without inputs: at once if torch.fx sees the whole model, else at the first training forward."""
        try:
            traced = capture(self.model, options=self.declared.options, layers=self.declared.layers)
        except UntraceableError:
            return
        self._first = self.built(traced)

    def recorder(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet."""
        key = capture_key(self.model, args, kwargs)
        known = self._captures.setdefault(key, [])
        self._captures.move_to_end(key)
        for place, one in enumerate(known):
            if one.capture.holds(args, kwargs):
                if not one.proven:  # its first batch was not finite
                    known[place] = self.proved(one, args, kwargs)
                    self._first = known[place] if self._first is one else self._first
                return known[place]
        made = self.first_symbolic(args, kwargs) if not self._captures_made() else None
        if made is None:
            traced = capture(self.model, args, kwargs, options=self.declared.options, layers=self.declared.layers)
            made = self.proved(self.built(traced), args, kwargs)
        if self._first is None or not self._captures_made():
            self._first = made
        self.must_agree(made)
        known.append(made)
        if len(self._captures) > CAPTURES:
            self._captures.popitem(last=False)
        return made

    def _captures_made(self) -> int:
        return sum(len(known) for known in self._captures.values())

    def first_symbolic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
        """The symbolic trace, if it holds on real inputs; else None, and torch.export decides."""
        if self._first is None:
            return None
        try:
            return self.proved(self._first, args, kwargs)
        except UntraceableError:
            return None

    def built(self, traced: Capture) -> Recorder:
        program = self.declared.passes(traced.program)
        return self.emit(traced, program)

    def emit(self, traced: Capture, program: Program) -> Recorder:
        needs: dict[Key, tuple[str, ...]] = {
            one.parameters: statistics_of(one) for one in program.registrations if not one.generic
        }
        return Recorder(traced, program, self.model, self.declared.loss, needs, self.backend)

    def proved(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder:
        verdict = prove(recorder, args, kwargs) if self.declared.verify else None
        if verdict is not None and verdict.program.registrations != recorder.program.registrations:
            recorder = self.emit(recorder.capture, verdict.program)
        recorder.proven = verdict is None or verdict.conclusive
        return recorder

    def must_agree(self, made: Recorder) -> None:
        """All captures feed the same Fisher blocks."""
        assert self._first is not None, "bug in kfac_fx: a capture before the first"
        first = {one.parameters: (one.layer, one.approximation) for one in self._first.program.registrations}
        other = {one.parameters: (one.layer, one.approximation) for one in made.program.registrations}
        if first != other:
            apart = dict.fromkeys(", ".join(names) for names, _ in set(first.items()) ^ set(other.items()))
            raise ModelChangedError(
                f"these inputs take another path through {type(self.model).__name__}, with other registrations: "
                f"{'; '.join(sorted(apart))}.\nCompile one module for each path."
            )

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        if self._first is None:
            raise UntraceableError(
                f"{type(self.model).__name__} is captured at its first training forward: torch.fx alone cannot see it "
                "whole.\nGive kfac_fx.compile example inputs to capture it now."
            )
        return self._first.program

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return self.program.registrations

    @property
    def report(self) -> Report:
        """What was registered, why, what it costs, and what an attached optimizer counted; print it."""
        return Report(self.program, getattr(self._listener, "counters", None))

    @property
    def layer_collection(self) -> LayerCollection:
        """What is registered, as a collection that takes no more registrations."""
        if self._collection is None:
            program, loss = self.program, self.declared.loss
            assert self._first is not None, "bug in kfac_fx: a program before the first capture"
            captured = CapturedModel(self.model, self._first.capture, program, None, {})
            self._collection = LayerCollection.of(captured, program, loss if isinstance(loss, LossSpec) else None)
        return self._collection

    # --- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            self.check_unchanged()
            if self._first is None or not self._captures:
                self.recorder(args, kwargs)
            if self._listener is not None:
                outputs = self._listener.on_forward(args, kwargs)
                if outputs is not None:
                    return outputs
        return self._plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward."""
        return self.model(*args, **kwargs)

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Moments:
        """Statistics of one batch, from a forward and backward that touch nothing of the model."""
        recorder = self.recorder(args, kwargs)
        values = recorder.capture.flatten(args, kwargs)
        return recorder.record(values, mode=mode, targets=targets, fraction=fraction, generator=generator)

    def ride(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Ride]:
        """The model's outputs, with taps that record during the user's own backward (the empirical Fisher)."""
        recorder = self.recorder(args, kwargs)
        return recorder.ride(recorder.capture.flatten(args, kwargs))

    def functional(
        self, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(outputs, the Fisher's outputs) as a pure function of the parameters."""
        recorder = self.recorder(args, kwargs)
        return recorder.outputs(parameters, recorder.capture.flatten(args, kwargs))

    def losses(self, outputs: Any, fisher: tuple[Tensor, ...], targets: Any = None) -> list[tuple[float, Any]]:
        """(coefficient, loss) for each output distribution, on what `functional` returned."""
        assert self._first is not None, "bug in kfac_fx: losses before the first capture"
        return self._first.losses(outputs, fisher, targets)

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

    def check_unchanged(self) -> None:
        """Raises ModelChangedError if a parameter was replaced since `compile`."""
        changed = [
            name for name, module, key, parameter in self._places if module._parameters.get(key) is not parameter
        ]
        if changed:
            raise ModelChangedError(
                f"{len(changed)} parameters were replaced after kfac_fx.compile: {', '.join(changed)}.\n"
                "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
                "parameter.data.copy_(...) or load_state_dict."
            )

    # --- the model's own behavior -----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        self.model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)

    def __repr__(self) -> str:
        return f"kfac_fx.compile({self.model!r})"


def parameter_places(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    return [
        (f"{path}.{key}" if path else key, module, key, parameter)
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def capture_key(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a capture is specialized to beside shapes: modes, trainability, dtypes, devices, autocast, structure."""
    leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
    kinds = tuple((leaf.dtype, leaf.device, leaf.dim()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    parameters = tuple((p.requires_grad, p.dtype, p.device) for p in model.parameters())
    modes = tuple(module.training for module in model.modules())
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return hash((modes, parameters)), autocast, str(spec), kinds


def compiled_model(model: nn.Module, backend: str) -> Callable[..., Any]:
    """The training forward under torch.compile; graph breaks are allowed here, the recording has none."""
    if backend == "cudagraphs":
        return torch.compile(model, mode="reduce-overhead")
    return torch.compile(model, backend=backend)
