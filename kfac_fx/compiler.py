"""`kfac_fx.compile`: from a model to a module of the same signature that can record its Fisher statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfac_fx.passes.errors import AlreadyAttachedError, LinkError, RegistrationError, nearest
from kfac_fx.passes.ir import Options, Program, Registration
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.trace import Capture

from .captured import CapturedModel
from .captures import Captures, Declared
from .layer_collection import LayerCollection
from .loss_spec import LossSpec, loss_from
from .masks import PaddingMask
from .moments import Moments, Ride
from .recorder import Recorder, replaced
from .report import Report
from .subsample import read_sampling
from .wrappers import compiled_model, refuse_scripted, unwrapped

BACKENDS = ("eager", "inductor", "cudagraphs", "aot_eager")


class Listener(Protocol):
    """What a module compiled here tells about its forwards: an optimizer."""

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before every forward in training mode with gradients enabled; returns the outputs, or None to let
        the model compute them."""

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called after it, with what the user is about to get."""


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
    padding_mask: PaddingMask | None = None,
    sub_sample_inputs: bool | float = False,
    sub_sample_patches: bool | float = False,
    variables: Iterable[Any] | None = None,
) -> CompiledModule:
    """Capture `model` and register every use of every parameter.

    Args:
        model: any module; its parameters stay the same objects. In a wrapper of data parallelism or torch.compile,
            names are those of the module inside. Or a LayerCollection, which says the rest, too.
        example_inputs, example_kwargs: inputs to capture with; without them the model is traced symbolically at once
            or, where that cannot see it whole, captured at its first training forward.
        loss: "categorical", "normal", "multi_bernoulli", a class of `kfac_fx.losses`, or a function of the model's
            outputs that returns a loss; None: found in the graph where forward computes it.
        linked: groups of parameter names that belong in one Fisher block, or {group: approximation}.
        approximations: {parameter or module name, with *; layer name; module class: approximation}.
        layers: the user's own layer declarations.
        strict: a parameter that would become generic is an error.
        verify: compare the graph with the model on the first batch, and prove that rows reproduce the autograd
            gradient. Takes about three training steps' time, and the memory of one and of two gradients.
        backend: "eager", "inductor" or "cudagraphs" (inductor with CUDA graphs), for recording, training and KFAC.
        dense_limit: no factor takes more memory than a dense one of this width: a wider side keeps diagonal blocks
            only, or its diagonal if it makes the Fisher's outputs, and the report says so.
        padding_mask: the name of an argument of forward, [cases, positions], nonzero where a position is real, such as
            "attention_mask"; or a function of forward's arguments that computes it, such as lambda ids: ids != 0. What
            is padding enters no factor and is no case; the report says where the mask does not fit. The loss's mean
            should leave padding out, too, as with targets of -100.
        sub_sample_inputs: compute input factors from this share of the cases; True: 0.2.
        sub_sample_patches: and from so many rows for each of their inputs at most, as there are many where a weight is
            shared by positions; True: 3. Both are right in expectation, with other rows at every recording.
        variables: of a LayerCollection, the parameters that must be registered, and no others; None: all that its
            losses depend on. What is left out follows KFAC's first-order rule.

    Raises UntraceableError, RegistrationError and its kinds, LossError, LayerError; each names all culprits.
    """
    if isinstance(model, LayerCollection):
        if example_inputs or example_kwargs or loss or linked or approximations or layers or padding_mask:
            raise RegistrationError("a LayerCollection has its own inputs, losses, layers and mask; give none of them")
        return compiled(model, variables, verify=verify, backend=backend)
    if variables is not None:
        raise RegistrationError(
            "variables belong to a LayerCollection; of a model every parameter is registered, but for those that are "
            "frozen with requires_grad_(False)"
        )
    if isinstance(model, CompiledModule):
        raise RegistrationError("the module is compiled already; hand kfac_fx.compile the original model, net.model")
    if not isinstance(model, nn.Module):
        raise TypeError(f"kfac_fx.compile takes a torch.nn.Module, not a {type(model).__name__}")
    wrapper, model = model, unwrapped(model)
    refuse_scripted(model)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}.{nearest(backend, BACKENDS)}")
    if isinstance(linked, str) or (not isinstance(linked, Mapping) and any(isinstance(group, str) for group in linked)):
        raise LinkError('linked takes groups of names, as in linked=[("fc.weight", "fc.bias")]; names were given')
    groups = linked if isinstance(linked, Mapping) else dict.fromkeys(map(tuple, linked))
    options = Options(
        linked={frozenset([group] if isinstance(group, str) else group): value for group, value in groups.items()},
        approximations=approximations or {},
        strict=strict,
        loss_given=loss is not None,
        modules={name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name},
        dense_limit=dense_limit,
        sampling=read_sampling(sub_sample_inputs, sub_sample_patches),
    )
    declared = Declared(
        options,
        collect(*LAYERS.values(), *layers),
        None if loss is None else loss_from(loss),
        verify,
        backend,
        padding_mask=padding_mask,
    )
    return CompiledModule(model, declared, example_inputs, example_kwargs, wrapper=wrapper)


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
        return Report(self.program, getattr(self._listener, "counters", None))

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
        recorder = self.recorder(args, kwargs)
        return recorder.ride(recorder.capture.flatten(args, kwargs), generator)

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
