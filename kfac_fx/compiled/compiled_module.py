"""A compiled module: a model that can record its Fisher statistics, and the optimizer that is told of its forwards.

A module that is compiled in place takes the calls of its model, as `nn.Module.compile` does: the model stays the object
that users and trainers call, and copies of it have the plain call. kfac_fx calls the model itself, too, to capture it,
to compare it with its graph and to compute its outputs. Those calls run as they are, inside of `running`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from kfac_fx.compiled.captured_model import CapturedModel
from kfac_fx.compiled.layer_collection import LayerCollection
from kfac_fx.compiled.report import Report, fallbacks
from kfac_fx.linalg.matrices import products_are_full
from kfac_fx.linalg.sharded import Shard
from kfac_fx.losses.spec import LossSpec, replaced
from kfac_fx.passes.errors import AlreadyAttachedError, UntraceableError, nearest
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.torch_private import class_of, own_call, replace_call, replaced_call, share_state
from kfac_fx.passes.trace import Capture
from kfac_fx.recording.backends import compiled_model
from kfac_fx.recording.captures import MAX_CAPTURES, CaptureCache, CompileArguments
from kfac_fx.recording.case_recorder import CaseRecorder, Consumer, Counts
from kfac_fx.recording.equivalence import coarsest_rounding, differs_from_model
from kfac_fx.recording.model_checks import averages_gradients, unwrapped
from kfac_fx.recording.moments import Moments, PendingMoments
from kfac_fx.recording.recorder import Recorder

RUNNING: ContextVar[frozenset[int]] = ContextVar("RUNNING", default=frozenset())  # the models that kfac_fx runs itself
OUTSIDE = "kfac_fx records outside of compiled code; kfac_fx.compile(model, backend=...) compiles what can be compiled"
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@runtime_checkable
class ForwardListener(Protocol):
    """An optimizer, which a compiled module tells about its forwards."""

    def forgetting_on_error(self) -> AbstractContextManager[None]:
        """Entered around every forward in training mode with gradients enabled, which may raise."""

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before every forward in training mode with gradients enabled.

        Returns the outputs, or None if the model is to compute them.
        """

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called after every such forward, with the outputs that the user gets."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Called after the gradients of the module are zeroed."""


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Calls of the model inside are no calls of the user."""
    token = RUNNING.set(RUNNING.get() | {id(model)})
    try:
        yield
    finally:
        RUNNING.reset(token)


def is_running(model: nn.Module) -> bool:
    return id(model) in RUNNING.get()


def runs_the_model(
    method: Callable[Concatenate[CompiledModule, P], ResultT],
) -> Callable[Concatenate[CompiledModule, P], ResultT]:
    """Decorate a method that calls the model itself; see `running`."""

    @functools.wraps(method)
    def inside(self: CompiledModule, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with running(self.model):
            return method(self, *args, **kwargs)

    return inside


class CompiledModule(nn.Module):
    """A model that can record its Fisher statistics. Calls, parameters, buffers, state and modes are the model's own.

    If it is compiled in place, the model itself records, too, as long as an optimizer is attached: a call of `model` is
    then a call of this module.

    Attributes:
        in_place: whether the model itself records.
        model: the original module, without wrappers of data parallelism and torch.compile. Forwards go through these
            wrappers.
        program: the captured graph and all that the passes found in it. Raises UntraceableError before the first
            capture.
        registrations: one a Fisher block.
        report: a table of all parameters with their Fisher blocks and reasons; print it.
        captures: the captures of the model, by kind of call.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: CompileArguments,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        traced: Capture | None = None,
        wrapper: nn.Module | None = None,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a child: names must not gain a prefix
        share_state(self, model)
        self.backend = arguments.backend
        self.captures = CaptureCache(model, arguments)
        self._listener: ForwardListener | None = None
        self._replaced: Callable[..., Any] | None = None  # in place of which the model records, if not its own call
        self._collection: LayerCollection | None = None
        self._case_recorders: list[tuple[Recorder, CaseRecorder]] = []
        outer = model if wrapper is None else wrapper
        object.__setattr__(self, "_wrapper", outer)
        self.in_place = in_place
        plain: Callable[..., Any] = self.call_beneath if in_place else outer
        if self.backend != "eager":
            plain = compiled_model(own_call(outer) if in_place else outer, self.backend)
        object.__setattr__(self, "_plain", plain)  # not a child either: it would be a child of itself
        object.__setattr__(self, "forward", MethodType(with_signature_of(model, CompiledModule.forward), self))
        if traced is not None:
            self.captures.take(traced)
        if args is not None or kwargs:
            self.recorder((args,) if isinstance(args, Tensor) else tuple(args or ()), dict(kwargs or {}))
        elif traced is None:
            with running(model):
                self.captures.trace_symbolically()
        self._sealed = True

    # --- the capture ------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The first captured graph and all that the passes found in it.

        Raises UntraceableError if nothing is captured yet.
        """
        return self.captures.program

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """One a Fisher block; also of parameters that are frozen at present, if they were trained before."""
        return self.captures.registrations or self.program.registrations

    @property
    def report(self) -> Report:
        """Every parameter with its Fisher block, the reason and the cost; and the counters and intervals of an attached
        optimizer."""
        counters = getattr(self._listener, "counters", None)
        return Report(self.program, counters, self._fallbacks, getattr(self._listener, "intervals", tuple))

    def _fallbacks(self) -> list[str]:
        cases = [collecting for _, collecting in self._case_recorders]
        of_optimizer: Callable[[], list[str]] = getattr(self._listener, "fallbacks", list)
        return [*fallbacks(self.captures.arguments, self.program, self.captures.all, cases), *of_optimizer()]

    @property
    def layer_collection(self) -> LayerCollection:
        """The registrations as a LayerCollection, which takes no more of them."""
        if self._collection is None:
            program, loss = self.program, self.captures.arguments.loss
            assert self.captures.first is not None, "bug in kfac_fx: a program before the first capture"
            captured = CapturedModel(self.model, self.captures.first.capture, program, None, {})
            self._collection = LayerCollection.of(captured, program, loss if isinstance(loss, LossSpec) else None)
        return self._collection

    # --- running ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable(reason=OUTSIDE)  # type: ignore[untyped-decorator]
    @runs_the_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, which an attached optimizer may replace by one that records.

        A torch.compile of this module does not enter it; `compile(..., backend=...)` compiles what can be compiled.
        """
        captures = self.captures
        if self.model.training and torch.is_grad_enabled() and captures.trained.any_now:
            captures.structure.check()
            if not captures.recorders or captures.trained.unfrozen:
                self.recorder(args, kwargs)
            if self._listener is not None:
                with self._listener.forgetting_on_error():
                    outputs = self._listener.on_forward(args, kwargs)
                    outputs = self._plain(*args, **kwargs) if outputs is None else outputs
                    self._listener.on_outputs(args, kwargs, outputs)
                return outputs
        return self._plain(*args, **kwargs)

    @torch.compiler.disable(reason=OUTSIDE)  # type: ignore[untyped-decorator]
    def call_in_place(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the model itself while an optimizer is attached to a module that was compiled in place."""
        return (own_call(self._wrapper) if is_running(self.model) else self.forward)(*args, **kwargs)

    def call_beneath(self, *args: Any, **kwargs: Any) -> Any:
        """The call in whose place the model records: its own, or that which torch.compile has set."""
        return (self._replaced or own_call(self._wrapper))(*args, **kwargs)

    @runs_the_model
    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, through the wrappers of data parallelism and torch.compile."""
        return self._wrapper(*args, **kwargs)

    @runs_the_model
    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet."""
        return self.captures.recorder(args, kwargs)

    @runs_the_model
    def record(
        self,
        /,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Moments:
        """Statistics of one batch, from a forward and a backward that change nothing of the model.

        Args: see `kfac_fx.recording.recorder.Recorder.record`; `args` and `kwargs` are those of forward.
        """
        record = functools.partial(
            Recorder.record, mode=mode, targets=targets, fraction=fraction, generator=generator, **options
        )
        return self.captures.run(args, kwargs, record)

    @runs_the_model
    def record_cases(
        self, /, args: tuple[Any, ...], kwargs: dict[str, Any], consume: Consumer, **options: Any
    ) -> Counts:
        """Hand the gradients of the examples of one batch to `consume`, registration by registration.

        Args: see `kfac_fx.recording.case_recorder.CaseRecorder.record`; `args` and `kwargs` are those of forward.
        """
        return self.captures.run(
            args, kwargs, lambda recorder, values: self.case_recorder(recorder).record(values, consume, **options)
        )

    def case_recorder(self, recorder: Recorder) -> CaseRecorder:
        """The capture with collecting taps, made once."""
        of_cases = next((collecting for served, collecting in self._case_recorders if served is recorder), None)
        if of_cases is None:
            of_cases = CaseRecorder(recorder)
            self._case_recorders = [*self._case_recorders, (recorder, of_cases)][-MAX_CAPTURES:]
        return of_cases

    @runs_the_model
    def record_in_training(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator | None = None
    ) -> tuple[Any, PendingMoments]:
        """Run forward with taps, which record during the user's own backward (the empirical Fisher).

        Returns (the model's outputs, the statistics to come). Raises UntraceableError if forward has side effects that
        the captured graph does not have.
        """
        if averages_gradients(self._wrapper):
            raise UntraceableError(
                f"statistics cannot be recorded during training with {class_of(self.model).__name__} in "
                "DistributedDataParallel inside of the compiled module: the recorded forward leaves it out, and no "
                "gradient would be averaged.\nWrap the compiled module instead of the model: "
                "net = kfac_fx.compile(model), and train with DistributedDataParallel(net)."
            )
        return self.captures.record_in_training(args, kwargs, generator)

    @runs_the_model
    def functional(
        self, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(the model's outputs, the Fisher's outputs) as a pure function of the parameters.

        parameters: tensors by name; those that are missing are the model's own. Raises TypeError and ValueError for
        anything else.
        """
        refuse_other_parameters(parameters, self.model)
        return self.captures.run(args, kwargs, lambda recorder, values: recorder.outputs(parameters, values))

    @runs_the_model
    def differs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Whether the model computes other outputs than its capture, 0-dim on the device; see `recording.equivalence`.

        Two forwards that leave no trace. The recordings of a sharded model are compared with the user's forwards
        instead, because its units gather and drop parameters.
        """
        self.captures.structure.check()
        if self.captures.structure.sharded:
            return torch.zeros((), dtype=torch.bool, device=next(self.parameters()).device)
        return self.captures.run(
            args, kwargs, lambda recorder, values: differs_from_model(recorder, args, kwargs, values)
        )

    def rounding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """The ε of the coarsest precision that takes part in a forward of the model."""
        assert self.captures.first is not None, "bug in kfac_fx: a recording before the first capture"
        return coarsest_rounding(self.captures.first, (args, kwargs))

    @property
    def repeats_recordings(self) -> bool:
        """Whether a forward behind a recording computes the same with the same kernels, so that outputs are compared.

        A compiler draws and rounds in its own way, as cuDNN does in recurrent layers. Recordings compute products in
        full precision. Data parallelism sends buffers around before a forward.
        """
        wrapper = self._wrapper
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            if wrapper.mixed_precision is not None or any(True for _ in self.buffers()):
                return False
            wrapper = wrapper.module
        compiled = self._replaced if self.in_place else replaced_call(self.model)
        if wrapper is not self.model or compiled is not None or self.backend != "eager" or not products_are_full():
            return False
        return not self.program.unrolled or all(parameter.device.type == "cpu" for parameter in self.parameters())

    @runs_the_model
    def losses(
        self,
        outputs: Any,
        fisher: tuple[Tensor, ...],
        targets: Any = None,
        call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> list[tuple[float, Any]]:
        """(coefficient, loss) of each output distribution, on the outputs that `functional` returned.

        targets: one a loss, in a list or tuple, or one for all.
        call: the (args, kwargs) of those outputs, if padding is to be left out.
        """
        assert self.captures.first is not None, "bug in kfac_fx: losses before the first capture"
        of = self.captures.first.losses
        if call is None or (self.program.mask is None and not of.ignoring):
            return of.averaged(of.on(outputs, fisher, targets))
        recorder = self.recorder(*call)
        of, values = recorder.losses, recorder.capture.flatten(*call)
        return of.averaged(of.real(lambda new: replaced(outputs, fisher, new), fisher, values, targets))

    # --- attachment and change --------------------------------------------------------------------------------------

    def attach(self, listener: ForwardListener) -> None:
        """Tell `listener` about every training forward.

        Raises AlreadyAttachedError for a second one, TypeError for what is no ForwardListener.
        """
        if not isinstance(listener, ForwardListener):
            raise TypeError(
                f"attach takes an optimizer with the methods of ForwardListener, and got a {type(listener).__name__}: "
                "KFAC(net) attaches itself"
            )
        if self._listener is not None:
            raise AlreadyAttachedError(
                f"a {type(self._listener).__name__} is already attached to this module: every batch would be recorded "
                "twice.\nCall net.detach() first, or compile the model again."
            )
        if self.in_place:
            replaced = replaced_call(self._wrapper)
            if isinstance(getattr(replaced, "__self__", None), CompiledModule):
                raise AlreadyAttachedError(
                    f"this {class_of(self.model).__name__} was compiled in place before, and records for the "
                    "optimizer of that module.\nCall detach() of that module first: it gives the model its own call "
                    "back."
                )
            self._replaced = replaced
            replace_call(self._wrapper, self.call_in_place)
        self._listener = listener

    def detach(self) -> None:
        """Stop telling the attached optimizer about forwards. A model compiled in place gets its own call back."""
        if self.in_place and replaced_call(self._wrapper) == self.call_in_place:
            replace_call(self._wrapper, self._replaced)
        self._listener = None

    # --- the model's own behavior -----------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The mode of the model itself. Loops that restore modes one by one do not reach the model but through it."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_wrapper" in self.__dict__:  # torch sets the mode before there is a model
            self._wrapper.training = self.model.training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        self._wrapper.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._listener is not None:
            self._listener.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def __len__(self) -> int:
        return len(cast(Sized, self.model))

    def __getitem__(self, key: Any) -> Any:
        """A member of the model, if it is a container such as `nn.Sequential`."""
        return cast(Any, self.model)[key]

    def __bool__(self) -> bool:
        return True  # whatever its length

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the model's attributes on the model."""
        of_wrapper = name in self.__dict__ or hasattr(type(self), name) or "_sealed" not in self.__dict__
        super().__setattr__(name, value) if of_wrapper else setattr(self.model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A copy of the model, compiled anew with the same arguments; without an optimizer."""
        if self._collection is not None:
            raise TypeError(
                "a module that was compiled from a LayerCollection cannot be copied: its registrations name nodes of "
                "this model's graph"
            )
        wrapper = copy.deepcopy(self._wrapper, memo)
        model, arguments = unwrapped(wrapper), self.captures.arguments
        return CompiledModule(model, arguments, None, None, wrapper=wrapper, in_place=self.in_place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compiled module cannot be pickled, because it holds graphs and functions. Save net.state_dict() or "
            "net.model, and compile the model again after loading."
        )

    def __repr__(self) -> str:
        return f"kfac_fx.compile({self.model!r})"


def with_signature_of(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function `forward(self, ...)` with the signature of the model's forward, which tells trainers the inputs."""

    @functools.wraps(forward)
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a forward that is no Python function
        return forward
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    arguments = [argument for name, argument in signature.parameters.items() if name != "self"]
    cast(Any, with_signature).__signature__ = signature.replace(parameters=[itself, *arguments])
    return with_signature


def refuse_other_parameters(parameters: Any, model: nn.Module) -> None:
    """Raises TypeError unless these are tensors by name, ValueError for names that the model's parameters lack."""
    if not isinstance(parameters, Mapping):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; it must be a dict of tensors by parameter name, as in "
            "dict(net.named_parameters()), or {} for the model's own"
        )
    if others := [name for name, value in parameters.items() if not isinstance(value, Tensor | Shard)]:
        raise TypeError(f"parameters has values that are no tensors: {', '.join(map(repr, others))}")
    names = {name for name, _ in model.named_parameters()}
    if unknown := [name for name in parameters if name not in names]:
        raise ValueError(
            f"parameters has names that are not in net.named_parameters(): {', '.join(map(repr, unknown))}."
            + nearest(unknown[0], names)
        )
