"""`kfac_fx.compile` and what it returns: a compiled module, which is a model that can record its Fisher statistics.

A module that is compiled in place takes the calls of its model, as `nn.Module.compile` does: the model stays the object
that users and trainers call, and copies of it have the plain call. kfac_fx calls the model itself, too, to capture it,
to compare it with its graph and to compute its outputs. Those calls run as they are, inside of `running`.

`capture` returns one graph, to register its layers by hand in a LayerCollection, which `compile` takes instead of a
model. Both check their arguments and make the model ready in the same way.

**Complex parameters**: the compiled module has their real and imaginary parts as its parameters, and the Fisher is that
of the parts.

**Fisher products**: the exact Fisher of one batch times vectors, F v, without a matrix.

F = Σ over the losses of c Jᵀ H J / cases, where J is the Jacobian of the inputs of a loss by the parameters, and H the
Fisher of its distribution, case by case. J v takes a forward in forward mode, and Jᵀ (H J v) another forward and a
backward (Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent"). The blocks of a
`FisherEstimator` approximate this matrix; `ModelSpectrum.solve` takes such a product as its curvature.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import keyword
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import MethodType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from kfac_fx.compiled.layer_collection import LayerCollection
from kfac_fx.compiled.names import CapturedModel, as_written
from kfac_fx.compiled.report import Report, fallbacks
from kfac_fx.fisher.block import one_by_one
from kfac_fx.linalg.arguments import a_flag, choice, explains_calls
from kfac_fx.linalg.matrices import dense, full_precision, products_are_full
from kfac_fx.linalg.processes import Shard, unsharded
from kfac_fx.linalg.vectors import (
    Vector,
    applied,
    check_fits,
    check_kinds,
    in_reverse_mode_twice,
    leading,
    like_vector,
    local,
    real_vector,
)
from kfac_fx.losses.declared import LossSpec, loss_from, replaced
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes import results
from kfac_fx.passes.errors import (
    AlreadyAttachedError,
    ApproximationError,
    LayerError,
    LinkError,
    ModelChangedError,
    RegistrationError,
    UntraceableError,
    fatal,
    first_line,
    nearest,
    plural,
)
from kfac_fx.passes.ir import Options, Program, Registration
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.layers.declaration import refuse_other_examples
from kfac_fx.passes.matrix import precise, real_numbers, real_parameters
from kfac_fx.passes.pipeline import CAPTURED, run
from kfac_fx.passes.torch_private import (
    class_of,
    own_call,
    pytree,
    replace_call,
    replaced_call,
    share_state,
    transforms,
)
from kfac_fx.passes.trace import Capture, forward_mode, trace_model
from kfac_fx.passes.tracing.effects import RandomState, accelerators, same_random
from kfac_fx.passes.tracing.signature import signature_of
from kfac_fx.recording.captures import MAX_CAPTURES, CaptureCache, CompileArguments
from kfac_fx.recording.case_gradients import (
    CaseRecorder,
    Consumer,
    Counts,
    OutputConsumer,
    record_outputs,
    with_squares_of_examples,
)
from kfac_fx.recording.emitted import COMPILE_BACKENDS, CompiledForward
from kfac_fx.recording.equivalence import (
    BAGS,
    BagsByLookups,
    LookupsAsInBackward,
    coarsest_rounding,
    differs_from_model,
    sampled_elements,
)
from kfac_fx.recording.masks import PaddingMask
from kfac_fx.recording.model_checks import (
    averages_gradients,
    call_noted,
    refuse_compiled,
    refuse_inference_mode,
    refuse_unfit,
    unwrapped,
    with_targets,
)
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Examples, ExamplesOf, Moments, PendingMoments
from kfac_fx.recording.taps import read_sampling

LossTerms = Sequence[tuple[float, LossFunction]]


def at_least_one(cases: int | Tensor) -> int | Tensor:
    return cases.clamp(min=1) if isinstance(cases, Tensor) else max(1, cases)


def refuse_batch(by: str, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Raises TypeError for a batch in one object instead of the arguments of forward: a `Batch`, or a dict of them.

    by: the function, as in "net.fisher_product".
    """
    for given in inputs:
        kind = type(given).__name__
        if kind == "Batch" and type(given).__module__.startswith("kfac_fx."):
            instead = "*batch.args, targets=batch.targets, **batch.kwargs"
        elif isinstance(given, Mapping) and given and signature_of(model).parameters.keys() >= given.keys():
            instead = "**batch"
        else:
            continue
        raise TypeError(
            f"{by.rpartition('.')[2]} takes the arguments of forward, and got a {kind} of them: write {by}({instead})"
        )


def arguments_of_call(
    net: CompiledModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any
) -> tuple[dict[str, Any], Any]:
    """The arguments by name of a call, and the targets of its loss. Those that forward computes its loss from are
    arguments alone; see `with_targets`."""
    declared = net.captures.arguments.loss is not None
    named = with_targets(net.model, args, kwargs, targets, declared)
    return named, targets if declared or "targets" in kwargs or "targets" not in named else None


class FisherProduct:
    """F v of the batch behind one call of a model; `CompiledModule.fisher_product` makes it.

    F is that of the gradients, so it is zero in the row that an embedding looks up for its `padding_idx`, as the
    backward is, and has what `scale_grad_by_freq` divides by. Other uses of the same row, as of a tied weight, are in F
    as they are.

    Where an operation has no forward-mode derivative, as that of weight norm has none, J v is made in reverse mode,
    twice.

    The parameters are those at the time of a product; the noise of dropout is that of the time when this was made.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Mapping[str, Tensor]], LossTerms],
        *,
        ggn: bool = False,
        capture: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            losses: from parameters by name to the (coefficient, loss) pairs of the batch; pure.
            ggn: the generalized Gauss-Newton matrix instead of the Fisher.
            capture: captures the call, which is impossible inside of a derivative. The mode of the model may be another
                one at every product.
        """
        self.model, self.losses, self.ggn, self.capture = model, losses, ggn, capture
        self.devices = accelerators(model.parameters())
        self.random = RandomState.now(self.devices)
        self.checked = False  # reverse mode, twice

    def __call__(self, vector: Vector) -> dict[str, Tensor]:
        """F v, without a damping.

        Args:
            vector: by parameter name, of all parameters or of some, whose part of F it is then. All its tensors may
                have the same additional dimensions in front, for many vectors, which are multiplied one by one.

        Raises NotRegisteredError if the vector does not fit, RuntimeError if an operation of the model has neither a
        forward-mode derivative nor a derivative of its backward.
        """
        self.capture()
        named = real_parameters(self.model.named_parameters())
        check_fits(vector, {}, alone=False)
        given, vector = vector, real_vector(vector)
        shapes = {name: parameter.shape for name, parameter in named.items() if name in vector} or {
            name: parameter.shape for name, parameter in named.items()
        }
        check_kinds(vector, shapes)
        lead = leading(vector, shapes)
        check_fits(vector, shapes, alone=True, lead=lead)

        def product(vector: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
            return one_by_one(self.of_one, vector, shapes)  # F is symmetric

        return like_vector(applied(product, {name: dense(unsharded(tensor)) for name, tensor in vector.items()}), given)

    def terms(self, parameters: Mapping[str, Tensor]) -> LossTerms:
        """The losses at these parameters, with the same noise every time."""
        with same_random(self.devices):
            self.random.restore()
            return self.losses(parameters)

    def of_one(self, vector: Vector) -> dict[str, Tensor]:
        """F v of one vector."""
        names = list(vector)
        whole = {name: unsharded(real_numbers(self.model.get_parameter(name).detach())) for name in names}
        point = tuple(whole.values())
        pairs: list[tuple[float, LossFunction]] = []

        def inputs_of_losses(*values: Tensor) -> tuple[Tensor, ...]:
            pairs[:] = self.terms(dict(zip(names, values, strict=True)))
            return tuple(loss.inputs for _, loss in pairs)

        tangents = tuple(vector[name].to(value.dtype) for name, value in whole.items())
        with (
            full_precision(),
            sdpa_kernel(SDPBackend.MATH),
            forward_mode(),
        ):  # attention in pieces has no such derivative
            inputs, pushed = self.forward(inputs_of_losses, point, tangents)
            cotangents = [
                self.of_loss(coefficient, loss.at(at), tangent)
                for (coefficient, loss), at, tangent in zip(pairs, inputs, pushed, strict=True)
            ]
            with torch.enable_grad():
                leaves = [value.detach().requires_grad_() for value in point]
                here = inputs_of_losses(*leaves)
                live = [n for n, value in enumerate(here) if value.requires_grad]
                pulled = torch.autograd.grad(
                    [here[n] for n in live],
                    leaves,
                    [cotangents[n].to(here[n].dtype) for n in live],
                    allow_unused=True,
                    materialize_grads=True,
                )
        return {name: dense(gradient).to(vector[name].dtype) for name, gradient in zip(names, pulled, strict=True)}

    def forward(
        self, function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        try:
            with LookupsAsInBackward():
                values, pushed = torch.func.jvp(function, point, tangents)[:2]
        except (RuntimeError, KeyError) as error:
            if fatal(error) or isinstance(error, ModelChangedError):
                raise
            if BAGS in str(error):
                with BagsByLookups(), LookupsAsInBackward():
                    return torch.func.jvp(function, point, tangents)[:2]
            return self.twice(function, point, tangents, first_line(error))
        return values, pushed

    def twice(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        point: tuple[Tensor, ...],
        tangents: tuple[Tensor, ...],
        reason: str,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`forward` in reverse mode, twice. reason: why forward mode does not work."""
        check = None if self.checked else local
        try:
            values, pushed = in_reverse_mode_twice(function, point, tuple(t.unsqueeze(0) for t in tangents), check)
        except RuntimeError as error:
            if fatal(error) or isinstance(error, ModelChangedError):
                raise
            raise RuntimeError(
                "the exact product F v needs derivatives of the model that torch has not.\n"
                f"  in forward mode: {reason}\n  in reverse mode, twice: {first_line(error)}\n"
                "Take the product of an approximation, FisherEstimator(net).spectrum().multiply."
            ) from error
        self.checked = True
        return values, tuple(product[0] for product in pushed)

    def of_loss(self, coefficient: float, loss: LossFunction, tangent: Tensor) -> Tensor:
        """c H t / cases for a vector t in the space of the inputs."""
        multiply = loss.multiply_ggn if self.ggn else loss.multiply_fisher
        product = multiply(precise(tangent))
        return (
            coefficient / at_least_one(loss.cases) * (product if loss.weights is None else product * loss.weights.abs())
        )


class AsComplex(nn.Module):
    """The parametrization of torch from real and imaginary parts [..., 2] to complex numbers [...]."""

    def forward(self, parts: Tensor) -> Tensor:
        return torch.view_as_complex(parts)

    def right_inverse(self, numbers: Tensor) -> tuple[Tensor]:
        return (torch.view_as_real(numbers.resolve_conj()),)  # a tuple may have another dtype than the numbers


def with_real_parameters(model: nn.Module) -> nn.Module:
    """Let the real and imaginary parts of all trained complex parameters be the parameters.

    Models that are sharded need it; others train with their complex parameters, and have the same Fisher.

    `model.weight` stays complex, and computes from `model.parametrizations.weight.original0` [..., 2], which
    `named_parameters` and `state_dict` list instead; see `torch.nn.utils.parametrize`. Parameters that were tied stay
    tied. Call it before the model is compiled and before an optimizer is made;
    `torch.nn.utils.parametrize.remove_parametrizations(module, name)` takes one back.

    Returns the model itself.
    """
    parts: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not (parameter.requires_grad and parameter.is_complex()):
                continue
            parametrize.register_parametrization(module, name, AsComplex())
            held: Any = module.parametrizations
            held = held[name]
            held.original0 = parts.setdefault(id(parameter), held.original0)
    return model


RUNNING: ContextVar[frozenset[int]] = ContextVar("RUNNING", default=frozenset())  # the models that kfac_fx runs itself
# By a model that is compiled in place and by its wrapper: the module that is attached.
ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[CompiledModule]] = weakref.WeakKeyDictionary()
OUTSIDE = "kfac_fx records outside of compiled code; kfac_fx.compile(model, backend=...) compiles what can be compiled"
NO_NAME = (
    "no loss is known: the factors are those of the gradients that training sends back (the empirical Fisher). Every "
    "example of every forward of a step is a case of them, as in a mean over all. Checks of the step size see the "
    "slope and these gradients, and undo steps only where forward returns the loss as a number"
)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@runtime_checkable
class ForwardListener(Protocol):
    """An optimizer, which a compiled module tells about its forwards."""

    def forgetting_on_error(self) -> AbstractContextManager[None]:
        """Entered around every forward in training mode with gradients enabled, which may raise."""

    def on_call(self) -> None:
        """Called before every forward in training mode, with gradients enabled or not."""

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


@contextmanager
def own_saved_tensors() -> Iterator[None]:
    """Inside, the hooks on saved tensors that are around a forward get none of ours: those of torch.utils.checkpoint
    count them, and compute the user's whole forward anew where one is read."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if hooks_on_saved() else nullcontext():
        yield


def hooks_on_saved() -> bool:
    """Whether there are hooks on saved tensors around this call."""
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError as error:  # of torch, which disables them only where there are none
        if fatal(error):
            raise
        return True


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

    Where the model has an attribute, child, parameter or buffer with a name of this class, such as `report`, it is
    `net.model.report`.

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
        self.model = model
        share_state(self, model)
        self.backend = arguments.backend
        self.captures = CaptureCache(model, arguments)
        self._listening: Callable[[], ForwardListener | None] = nobody
        self._replaced: Callable[..., Any] | None = None  # in place of which the model records, if not its own call
        self._collection: LayerCollection | None = None
        self._case_recorders: list[tuple[Recorder, CaseRecorder]] = []
        self._identity = id(self)  # of a copy with the attributes of this module, that of this module
        self._unrecorded = 0  # forwards with other tensors than the parameters, or inside of transformations
        self._wrapper = outer = model if wrapper is None else wrapper
        self.in_place = in_place
        plain: Callable[..., Any] = self.call_beneath if in_place else outer
        if self.backend != "eager":
            plain = CompiledForward(own_call(outer) if in_place else outer, self.backend, model)
        self._plain = plain
        self.__dict__["forward"] = MethodType(with_signature_of(model, CompiledModule.forward), self)
        if in_place:
            cast(Any, self).register_load_state_dict_pre_hook(keep_state)
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
        intervals = getattr(self._listener, "intervals", tuple)
        return Report(
            self.program,
            counters,
            self._fallbacks,
            intervals,
            self.knows_no_loss,
            self.captures.sources,
            self._without_gradient,
        )

    def _without_gradient(self) -> list[str]:
        return [name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad]

    def _fallbacks(self) -> list[str]:
        cases = [collecting for _, collecting in self._case_recorders]
        of_optimizer: Callable[[], list[str]] = getattr(self._listener, "fallbacks", list)
        of_forwards = [NO_NAME] * self.knows_no_loss + self.unfollowed() + self.unrecorded
        if isinstance(self._plain, CompiledForward) and self._plain.reason is not None:
            of_forwards.append(f"the forward in training is not compiled: {self._plain.reason}")
        of_captures = fallbacks(self.captures.arguments, self.program, self.captures.all, cases)
        return [*of_captures, *self.captures.changes, *of_forwards, *of_optimizer()]

    @property
    def unrecorded(self) -> list[str]:
        """A sentence about the forwards in training that recorded nothing; none if there are none."""
        if not self._unrecorded:
            return []
        return [
            f"{plural(self._unrecorded, 'forward')} had other tensors instead of the parameters "
            "(torch.func.functional_call), or ran inside of a transformation of torch.func: they recorded nothing"
        ]

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of this module; of a copy that shares its attributes and has other parameters, one of a copy of the
        model that has these. Libraries of meta-learning make such copies, whose parameters are no leaves."""
        if self._identity == id(self):
            return super().__call__(*args, **kwargs)
        model = copy.copy(self.model)
        share_state(model, self)
        return model(*args, **kwargs)

    @torch.compiler.disable(reason=OUTSIDE)  # type: ignore[untyped-decorator]
    @runs_the_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, which an attached optimizer may replace by one that records.

        A torch.compile of this module does not enter it; `compile(..., backend=...)` compiles what can be compiled.

        With other tensors instead of the parameters, as in `torch.func.functional_call(net, tensors, x)`, and inside of
        transformations such as `torch.func.vmap`, it is the model's own forward, and nothing is recorded.
        """
        with call_noted(self.model, args, kwargs):
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captures = self.captures
        if self._listener is not None and self.model.training:
            self._listener.on_call()
        if (
            self.model.training
            and torch.is_grad_enabled()
            and (captures.trained.any_now or not captures.structure.same)
        ):
            same = captures.structure.same  # a walk through all modules
            if transforms() or (not same and captures.structure.lent):
                self._unrecorded += 1
                return (self.call_beneath if self.in_place else self._wrapper)(*args, **kwargs)
            captures.structure.check(same)
            if not captures.trained.any_now:
                return self._plain(*args, **kwargs)
            if not captures.recorders or captures.trained.unfrozen or captures.looks_for_path():
                self.recorder(args, kwargs)
            if self._listener is not None:
                with self._listener.forgetting_on_error():
                    outputs = self._listener.on_forward(args, kwargs)
                    outputs = self._plain(*args, **kwargs) if outputs is None else outputs
                    outputs, watched = results.of_values(outputs)
                    self._listener.on_outputs(args, kwargs, watched)
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
    @own_saved_tensors()
    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The capture for these inputs, made and proved if there is none yet."""
        return self.captures.recorder(args, kwargs)

    @runs_the_model
    @own_saved_tensors()
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

        Forwards with other tensors than the parameters record nothing, such as those of
        `torch.func.functional_call(net, tensors, (x,))`. `net.record((x,), {}, parameters=tensors)` takes the
        statistics of such a forward.

        Args: see `kfac_fx.recording.recorder.Recorder.record`; `args` and `kwargs` are those of forward.

        Raises TypeError and ValueError for `parameters` that are no tensors by name.
        """
        refuse_other_parameters(options.get("parameters", {}), self.model)
        record = functools.partial(
            Recorder.record, mode=mode, targets=targets, fraction=fraction, generator=generator, **options
        )
        return self.captures.run(args, kwargs, record)

    @runs_the_model
    @own_saved_tensors()
    def squared_by_example(
        self,
        /,
        moments: Moments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        fraction: float = 1.0,
        **options: Any,
    ) -> Moments:
        """The moments of a batch, with sums over its examples of the squares of their gradients, for the registrations
        without rows. Each takes one backward for every example.

        Args: see `kfac_fx.recording.case_gradients.with_squares_of_examples`; the others are those of `record`.
        """
        function = self.captures.arguments.examples

        def squared(recorder: Recorder, values: tuple[Any, ...]) -> Moments:
            values, options["targets"] = recorder.part(values, options.get("targets"), fraction)
            part = (args, kwargs) if function is None else recorder.part_of_call(args, kwargs, fraction)
            grouped = None if function is None else Examples.of_call(function, *part)
            return with_squares_of_examples(self.case_recorder(recorder), values, moments, grouped=grouped, **options)

        return self.captures.run(args, kwargs, squared)

    @runs_the_model
    @own_saved_tensors()
    def record_compared(
        self, /, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> tuple[Moments, Tensor]:
        """(`record`, whether the model computes other outputs than the recording had); see `differs`."""
        recorded: list[list[Tensor]] = []

        def record(recorder: Recorder, values: tuple[Any, ...]) -> tuple[Moments, Tensor]:
            moments = recorder.record(
                values, on_outputs=lambda outputs: recorded.append(sampled_elements(outputs)), **options
            )
            if self.captures.structure.sharded:
                return moments, self.not_compared
            return moments, differs_from_model(recorder, args, kwargs, values, recorded[-1])

        return self.captures.run(args, kwargs, record)

    @runs_the_model
    def record_cases(
        self, /, args: tuple[Any, ...], kwargs: dict[str, Any], consume: Consumer, **options: Any
    ) -> Counts:
        """Hand the gradients of the examples of one batch to `consume`, registration by registration.

        Args: see `kfac_fx.recording.case_gradients.CaseRecorder.record`; `args` and `kwargs` are those of forward.
        """
        targets = options.get("targets")
        kwargs, of_loss = arguments_of_call(self, args, kwargs, targets)
        of_loss = of_loss if options.get("measurement") is None else targets
        args, kwargs, options["targets"] = self.placed(args, kwargs, of_loss)
        function = self.captures.arguments.examples
        grouped = None if function is None else Examples.of_call(function, args, kwargs)
        return self.captures.run(
            args,
            kwargs,
            lambda recorder, values: self.case_recorder(recorder).record(values, consume, grouped=grouped, **options),
        )

    @runs_the_model
    def record_outputs(
        self, /, args: tuple[Any, ...], kwargs: dict[str, Any], consume: OutputConsumer, **options: Any
    ) -> tuple[int, int]:
        """Hand the gradients of all outputs of the examples of one batch to `consume`, registration by registration.

        Args: see `kfac_fx.recording.case_gradients.record_outputs`; `args` and `kwargs` are those of forward.
        """
        args, kwargs, _ = self.placed(args, kwargs)
        function = self.captures.arguments.examples
        grouped = None if function is None else Examples.of_call(function, args, kwargs)
        return self.captures.run(
            args,
            kwargs,
            lambda recorder, values: record_outputs(
                self.case_recorder(recorder), values, consume, grouped=grouped, **options
            ),
        )

    def placed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """A batch of a DataLoader, moved to the device of the parameters: if these are on one accelerator, and no
        tensor of the batch is. Else everything stays where it is."""
        devices = {parameter.device for parameter in self.captures.structure.parameters}
        if len(devices) != 1 or (device := devices.pop()).type == "cpu":
            return tuple(args), dict(kwargs), targets
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs), targets)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return tuple(args), dict(kwargs), targets
        moved: tuple[tuple[Any, ...], dict[str, Any], Any] = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(device, non_blocking=True), (tuple(args), dict(kwargs), targets)
        )
        return moved

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
        neither the captured graph nor a second run has.
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

    def fisher_product(self, /, *inputs: Any, targets: Any = None, ggn: bool = False, **kwargs: Any) -> FisherProduct:
        """The exact Fisher of the mean loss of a batch, as a function from a vector v to F v; see `FisherProduct`.

        product = net.fisher_product(x)
        step = spectrum.solve(gradient, product).vector     # (F + δ I)⁻¹ g, with the spectrum as the preconditioner

        A spectrum of a scale s needs the product s F v: lambda v: {name: s * t for name, t in product(v).items()}.

        Args:
            inputs, kwargs: the arguments of forward.
            targets: only those of -100 count, which are no cases; None: all rows are cases.
            ggn: the generalized Gauss-Newton matrix instead of the Fisher.

        It does not record, takes no sample and changes nothing of the model. With several processes it is the Fisher of
        the batch of this one.

        Raises TypeError for a `Batch` or a dict of the arguments instead of these, InputError for inputs on which the
        model does not run.
        """
        refuse_batch("net.fisher_product", self.model, inputs)
        kwargs, targets = arguments_of_call(self, inputs, kwargs, targets)
        self.recorder(inputs, kwargs)  # says now that the model does not run on these, and not at the first product

        def losses(parameters: Mapping[str, Tensor]) -> list[tuple[float, Any]]:
            outputs, fisher = self.functional(parameters, inputs, kwargs)
            return self.losses(outputs, fisher, targets, (inputs, kwargs))

        return FisherProduct(self.model, losses, ggn=ggn, capture=lambda: self.recorder(inputs, kwargs))

    @runs_the_model
    @own_saved_tensors()
    def differs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Whether the model computes other outputs than its capture, 0-dim on the device; see `recording.equivalence`.

        Two forwards that leave no trace. The recordings of a sharded model are compared with the user's forwards
        instead, because its units gather and drop parameters.
        """
        self.captures.structure.check()
        if self.captures.structure.sharded:
            return self.not_compared
        return self.captures.run(
            args, kwargs, lambda recorder, values: differs_from_model(recorder, args, kwargs, values)
        )

    @property
    def not_compared(self) -> Tensor:
        """The answer of `differs` where nothing is compared."""
        return torch.zeros((), dtype=torch.bool, device=next(self.parameters()).device)

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
        if call is None or (self.program.mask is None and not of.of_inputs):
            return of.averaged(of.on(outputs, fisher, targets))
        recorder = self.recorder(*call)
        of, values = recorder.losses, recorder.capture.flatten(*call)
        return of.averaged(of.real(lambda new: replaced(outputs, fisher, new), fisher, values, targets))

    @property
    def knows_no_loss(self) -> bool:
        """Whether the model is captured, and no loss is declared or computed by forward."""
        captures = self.captures.all
        return bool(captures) and not any(capture.knows_loss for capture in captures)

    def unfollowed(self, lost: bool = False) -> list[str]:
        """Why no loss is known of those that forward seems to return; none if one is known.

        lost: of those that have terms that are known, or near a known loss.
        """
        programs = [capture.program for capture in self.captures.all] if self.knows_no_loss else []
        texts = [program.unfollowed for program in programs if program.unfollowed and program.lost >= lost]
        return list(dict.fromkeys(texts))

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
        others = [self, *(net for net in nets_of(self._wrapper) if self.in_place and net is not self)]
        if any(net._listener is not None for net in others):
            gc.collect()  # schedulers make circles with an optimizer, which keep it after its last name is gone
        if self._listener is not None:
            raise AlreadyAttachedError(
                f"a {type(self._listener).__name__} is already attached to this module: every batch would be recorded "
                "twice.\nCall net.detach() first, or compile the model again."
            )
        if any(net._listener is not None for net in others):
            raise AlreadyAttachedError(
                f"this {class_of(self.model).__name__} was compiled in place before, and records for the optimizer of "
                "that module, which is still there.\nCall kfac_fx.detach(model) before you compile the model again: "
                "it gives the model its own call back."
            )
        for net in others:
            net.detach()
        if self.in_place:
            self._replaced = replaced_call(self._wrapper)
            replace_call(self._wrapper, self.call_in_place)
            ATTACHED[self.model] = ATTACHED[self._wrapper] = weakref.ref(self)
        # An optimizer ends with its last name. The model has this module, which must not keep it.
        self._listening = weakref.ref(listener) if isinstance(listener, torch.optim.Optimizer) else lambda: listener

    @property
    def _listener(self) -> ForwardListener | None:
        """The attached optimizer; None if there is none, or if it is gone."""
        return self._listening()

    def detach(self) -> None:
        """Stop telling the attached optimizer about forwards. A model compiled in place gets its own call back."""
        if self.in_place and replaced_call(self._wrapper) == self.call_in_place:
            replace_call(self._wrapper, self._replaced)
        for module in (self.model, self._wrapper):
            if module in ATTACHED and ATTACHED[module]() is self:
                del ATTACHED[module]
        self._listening = nobody

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
        """That of the model. In the state of a module that has this one as an attribute, a module that was compiled in
        place has nothing: the model itself is there."""
        if self.in_place and kwargs.get("destination") is not None and kwargs.get("prefix"):
            return kwargs["destination"]
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
        """Set the model's attributes on the model.

        Those of this module are no children of it: names must not gain a prefix, and the model may have such names.
        """
        of_this = name in self.__dict__ or hasattr(type(self), name) or "_sealed" not in self.__dict__
        object.__setattr__(self, name, value) if of_this else setattr(self.model, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        return self.model.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.model.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        return self.model.get_buffer(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A copy of the model, compiled anew with the same arguments; without an optimizer."""
        if self._collection is not None:
            raise TypeError(
                "a module that was compiled from a LayerCollection cannot be copied: its registrations name nodes of "
                "this model's graph"
            )
        wrapper = copy.deepcopy(self._wrapper, memo)
        model, arguments = unwrapped(wrapper), self.captures.arguments
        copied = CompiledModule(model, arguments, None, None, wrapper=wrapper, in_place=self.in_place)
        copied.captures.copied = self.captures.first is not None
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compiled module cannot be pickled, because it holds graphs and functions. Save net.state_dict() or "
            "net.model, and compile the model again after loading. A copy is that of copy.deepcopy(net)."
        )

    def __repr__(self) -> str:
        return f"kfac_fx.compile({self.model!r})"


def keep_state(net: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the state of a module that has `net` as an attribute be loaded without one of `net`."""
    for name, tensor in net.state_dict().items():
        state.setdefault(f"{prefix}{name}", tensor)


def nobody() -> None:
    """No listener."""


def nets_of(model: nn.Module) -> list[CompiledModule]:
    """The compiled modules for which modules inside of this one record in place."""
    found = (ATTACHED[module]() for module in model.modules() if module in ATTACHED)
    return list(dict.fromkeys(net for net in found if net is not None))


def detach(model: nn.Module) -> None:
    """Give a model that was compiled in place its own call back; its optimizer records no more.

    For code that runs several times with one model, such as the `configure_optimizers` of a LightningModule: call it
    before the model is compiled again. All modules inside of `model` are meant. A model that does not record stays as
    it is.

    Raises TypeError for what is no module.
    """
    refuse_other_models(model, "kfac_fx.detach")
    for net in [model] if isinstance(model, CompiledModule) else nets_of(model):
        net.detach()


def with_signature_of(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function `forward(self, ...)` with the signature of the model's forward, which tells trainers the inputs."""

    @functools.wraps(forward)
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    try:
        signature = signature_of(model)
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
    names = {name for name, _ in model.named_parameters()} if parameters else set()
    if unknown := [name for name in parameters if name not in names]:
        raise ValueError(
            f"parameters has names that are not in net.named_parameters(): {', '.join(map(repr, unknown))}."
            + nearest(unknown[0], names)
        )


# --- compile ----------------------------------------------------------------------------------------------------------


DENSE_LIMIT = Options.dense_limit
ONE_GRAPH = (
    "A LayerCollection is registered on the nodes of one graph. kfac_fx.compile captures such a model in parts: say "
    "there what you would register by hand, with approximations=..., linked=... and layers=...."
)


WITHOUT_NAMES = "Several inputs of forward are one argument: write {}(model, (x, mask))."
MEANT = {
    "mask": (
        "Write padding_mask=..., the name of the argument of forward that says where a position is real; the mask "
        "itself is an example input, as in example_kwargs={'mask': mask}."
    ),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "Write loss=..., as in loss='cross_entropy'."),
    "inputs": "Write example_inputs=(x,).",
    **dict.fromkeys(("kwargs", "args"), "Write example_inputs=(x,) and example_kwargs={'mask': mask}."),
}


@explains_calls(several=WITHOUT_NAMES.format("compile"), meant=MEANT)
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
    dense_limit: int = DENSE_LIMIT,
    padding_mask: PaddingMask | None = None,
    batch_dim: int | None = None,
    examples: ExamplesOf | None = None,
    sub_sample_inputs: bool | float = False,
    sub_sample_patches: bool | float = False,
    variables: Iterable[Any] | None = None,
    in_place: bool = False,
) -> CompiledModule:
    """Capture `model` and register every use of every parameter.

    Args:
        model: any module, also in a wrapper of data parallelism or torch.compile; parameters have the names of the
            module inside, and stay the same objects. Or a LayerCollection, whose registrations and losses are used.
        example_inputs, example_kwargs: inputs to capture with. Without them torch.fx traces the model at once or, if it
            cannot trace all of it, the model is captured at its first training forward.
        loss: the name of a loss of torch with its mean, such as "cross_entropy", "mse" or "bce_with_logits"; the name
            of a distribution whose loss is a sum over the elements of a case, such as "categorical", "normal"
            (variance 0.5), "multi_bernoulli" or "poisson"; a class of `kfac_fx.losses`; or a function of the model's
            outputs that returns a loss. None: the loss is found in the graph of forward.
        linked: groups of parameter names that belong in one Fisher block, or {group: approximation}.
        approximations: {parameter or module name, with *; layer name; module class: approximation}. The table
            `kfac_fx.passes.approximations` lists them: "kron" and its variants with diagonal sides; "kron_reduce", with
            one row per case where positions share a weight; "kron_series_1" and "kron_series_2" for uses in the order
            of time; "kron_sua" for convolutions; "diagonal", "full", and "generic" for parameters of no layer.
        layers: the user's own layer declarations; they win over those of the library with the same form.
        strict: raise an error for a parameter that would become generic.
        verify: compare the graph with the model on the first batch, and prove that rows reproduce the autograd
            gradient. This takes about the time of three training steps and at most the memory of one, one more gradient
            of all parameters, three times the largest matrix and twice the patches of the largest convolution: 1.5
            times a step's tensors for a ResNet-50, 1.2 times for a small GPT. If `approximations` asks for "diagonal"
            or "full", there are two more backwards for every bit of the number of cases. False: nothing is run or
            proved.
        backend: "eager", "inductor" or "cudagraphs" (inductor with CUDA graphs), for recording, training and KFAC.
        dense_limit: the width of the largest dense factor, without a column for the bias. A wider side keeps diagonal
            blocks or, if it makes the Fisher's outputs, its diagonal, which take no more memory; the report says so.
        padding_mask: the name of an argument of forward [cases, positions], nonzero where a position is real, such as
            "attention_mask"; or a function of forward's arguments that computes it, such as lambda ids: ids != 0.
            Padding enters no factor and is no case; a mask that fits no use is an error, and a warning and the report
            say where it does not fit. The mean of the loss should leave padding out, too, as it does with targets of
            -100.
        batch_dim: the dimension of the cases in the inputs, 1 for [positions, cases, features]. None: recurrent layers
            and attention of torch know it, from their `batch_first`; without them it is the first one, and a model
            whose outputs mix along the first dimension and not along another is refused. The report says which.
        examples: a function of forward's arguments that returns the number of the example of every row, counted from 0:
            [rows], as the graph of every node, or [rows, positions], as the document of every token of packed
            sequences; -1 where a row is of no example. Scores and corrections are of these examples. None: an example
            is an entry of the dimension of the cases.
        sub_sample_inputs: compute input factors from this share of the cases. True means 0.2.
        sub_sample_patches: use at most this many rows per input dimension of A, for weights that are shared over
            positions. True means 3. Both samples are right in expectation, and differ in every recording.
        variables: the parameters of a LayerCollection that must be registered, and no others; the rest follows KFAC's
            first-order rule. None: all that its losses depend on.
        in_place: the model itself records, too: while an optimizer is attached, a call of `model` is a call of the
            module that is returned. For trainers, which inspect, wrap and save the object that they call. Copies and
            pickles of the model do not record.

    Returns a module with the calls, parameters, buffers, state and modes of `model`.

    Raises:
        UntraceableError: the model cannot be captured; its kind InputError: the model does not run on these inputs.
        RegistrationError (or a subclass): registrations or arguments contradict each other, or under `strict` a
            parameter would be generic.
        LossError, LayerError: wrong losses or layer declarations.
        ValueError, TypeError: an unknown backend; no module.

    Each error names all culprits.
    """
    for option, flag in {"strict": strict, "verify": verify, "in_place": in_place}.items():
        a_flag(option, flag)
    choice("backend", backend, COMPILE_BACKENDS)
    refuse_inference_mode("a model is compiled")
    refuse_other_inputs("compile", example_inputs, example_kwargs)
    if isinstance(model, LayerCollection):
        of_collection = {
            "example_inputs": example_inputs,
            "example_kwargs": example_kwargs,
            "loss": loss,
            "linked": linked,
            "approximations": approximations,
            "layers": layers,
            "strict": strict,
            "dense_limit": dense_limit != DENSE_LIMIT,
            "padding_mask": padding_mask,
            "batch_dim": batch_dim is not None,
            "examples": examples,
            "sub_sample_inputs": sub_sample_inputs,
            "sub_sample_patches": sub_sample_patches,
        }
        if names := ", ".join(name for name, value in of_collection.items() if value):
            raise RegistrationError(
                f"with a LayerCollection, do not pass {names}: set them on the collection or in kfac_fx.capture(...)"
            )
        return compiled_collection(model, variables, verify=verify, backend=backend, in_place=in_place)
    if variables is not None:
        raise RegistrationError(
            "variables are for a LayerCollection; of a model, every parameter is registered that is not frozen with "
            "requires_grad_(False)"
        )
    if not (padding_mask is None or isinstance(padding_mask, str) or callable(padding_mask)):
        raise TypeError(
            f"padding_mask is a {type(padding_mask).__name__}; it must be the name of an argument of forward, or a "
            "function of what forward takes, as in padding_mask='mask' or padding_mask=lambda ids: ids != 0"
        )
    inside, options, declared = prepared(model, "kfac_fx.compile", layers, dense_limit)
    refuse_keywords(inside, exported=bool(example_inputs is not None or example_kwargs))
    refuse_other_approximations(approximations, inside)
    refuse_other_links(linked, inside)
    groups = linked if isinstance(linked, Mapping) else dict.fromkeys(map(tuple, linked))
    options = replace(
        options,
        linked={frozenset([group] if isinstance(group, str) else group): value for group, value in groups.items()},
        approximations=approximations or {},
        strict=strict,
        loss_given=loss is not None,
        batch_dim=read_batch_dim(batch_dim),
        sampling=read_sampling(sub_sample_inputs, sub_sample_patches),
    )
    arguments = CompileArguments(
        options,
        declared,
        None if loss is None else loss_from(loss),
        verify,
        backend,
        padding_mask=padding_mask,
        examples=examples,
    )
    return CompiledModule(inside, arguments, example_inputs, example_kwargs, wrapper=model, in_place=in_place)


def compiled_collection(
    collection: LayerCollection,
    variables: Iterable[Any] | None = None,
    *,
    verify: bool = True,
    backend: str = "eager",
    in_place: bool = False,
) -> CompiledModule:
    """A module with the registrations and the losses of a collection, which becomes final if no error is raised.

    variables: the parameters that must be registered, and no others; None: all that the losses depend on.

    Raises RegistrationError and its kinds, LossError.
    """
    collection.check_final(variables)
    captured = collection.captured
    arguments = CompileArguments(
        captured.program.options, collection.layers, collection.registered_losses, verify, backend, collection.on
    )
    net = CompiledModule(
        captured.model,
        arguments,
        captured.args,
        captured.kwargs,
        captured.capture,
        wrapper=captured.wrapper,
        in_place=in_place,
    )
    net._collection, collection.finalized = collection, True
    return net


@explains_calls(several=WITHOUT_NAMES.format("capture"), meant=MEANT)
def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Sequence[Layer] = (),
    dense_limit: int = DENSE_LIMIT,
) -> CapturedModel:
    """Capture a model as one graph, to register its layers in a `LayerCollection`.

    Args:
        model: the model, also in a wrapper of data parallelism or torch.compile. Its parameters stay the same objects,
            and have the names of the module inside.
        example_inputs, example_kwargs: inputs to capture with, a tuple or one tensor. Without them torch.fx traces the
            model symbolically, if the model allows it.
        layers: the user's own layer declarations, see `kfac_fx.layer`.
        dense_limit: `auto_register_layers` makes a factor side that is wider than this block-diagonal.

    Raises UntraceableError if no single graph holds the model, LayerError for declarations that contradict others,
    RegistrationError for a compiled module and for a model with compiled submodules.
    """
    refuse_inference_mode("a model is captured")
    refuse_other_inputs("capture", example_inputs, example_kwargs)
    inside, options, declared = prepared(model, "kfac_fx.capture", layers, dense_limit)
    refuse_keywords(inside, exported=bool(example_inputs is not None or example_kwargs))
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    options = replace(options, loss_given=True, strict=True)  # a registration that the proof refutes is an error
    try:
        traced = trace_model(inside, args, example_kwargs, options=options, layers=declared)
    except UntraceableError as error:
        raise UntraceableError(f"{error}\n{ONE_GRAPH}") from error
    return CapturedModel(inside, traced, run(traced.program, CAPTURED), args, dict(example_kwargs or {}), model)


# --- arguments --------------------------------------------------------------------------------------------------------


def prepared(
    model: nn.Module, by: str, layers: Sequence[Layer], dense_limit: int
) -> tuple[nn.Module, Options, dict[str, Layer]]:
    """(the module inside of wrappers, the options that all captures of it have, all layers by name).

    by: the function that takes the model.

    Raises TypeError for anything but a module, UntraceableError for one that no capture can do anything with,
    RegistrationError for a compiled one and for another limit, LayerError for other layers.
    """
    refuse_other_models(model, by)
    model = unwrapped(model)
    refuse_compiled(model, by)
    refuse_unfit(model)
    refuse_unfit_names(model)
    refuse_other_limit(dense_limit)
    modules = {name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name}
    mine = refuse_other_layers(layers)
    declared = collect(*LAYERS.values(), *mine)
    with same_random(accelerators(model.parameters())):
        refuse_other_examples(mine)
    return model, Options(modules=modules, dense_limit=dense_limit), declared


def refuse_other_models(model: Any, by: str) -> None:
    """Raises TypeError for anything but a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, and got the class: write {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, not a {type(model).__name__}")


UNFIT = "\"'\\\n\r\0"  # characters that generated code does not quote
HALVES_OF_LETTERS = {chr(code) for code in range(0xD800, 0xE000)}  # surrogates, which no text in UTF-8 has
OF_STATE = "kfac/"  # begins the names of what KFAC keeps of no parameter


def refuse_unfit_names(model: nn.Module) -> None:
    """Raises UntraceableError for names that torch cannot write into the code of a graph, of modules, parameters and
    buffers.

    Quotes in a name would be executed as code.
    """
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    names = dict.fromkeys(name for name, _ in named)
    unfit = [name for name in names if any(c in UNFIT or c in HALVES_OF_LETTERS for c in name)]
    if unfit:
        raise UntraceableError(
            f"torch cannot write these names into the code of a graph: {', '.join(map(ascii, unfit))}.\n"
            "Rename the modules, parameters and buffers, without quotes, backslashes, line breaks and surrogates."
        )
    if taken := [name for name, _ in model.named_parameters() if f"{name}/".startswith(OF_STATE)]:
        raise UntraceableError(
            f"the state of KFAC has names of its own that begin with {OF_STATE!r}, and those of the states of these "
            f"parameters would, too: {', '.join(taken)}.\nRename the parameters or their modules."
        )


def refuse_keywords(model: nn.Module, exported: bool) -> None:
    """Raises UntraceableError for names of modules and parameters that torch.export cannot write into code."""
    names = dict.fromkeys(name for name, _ in (*model.named_modules(), *model.named_parameters()))
    keywords = [name for name in names if any(map(keyword.iskeyword, name.split(".")))]
    if keywords and exported:
        raise UntraceableError(
            "torch.export cannot write these names into the code of a graph, because they have keywords of Python: "
            f"{', '.join(keywords)}.\nRename the modules and parameters, or leave the example inputs out: torch.fx may "
            "capture the model without them."
        )


def refuse_other_inputs(by: str, args: Any, kwargs: Any) -> None:
    """Raises TypeError unless these are the arguments of a call: several or one tensor, and some by name.

    by: the function that takes them.
    """
    if args is not None and not isinstance(args, (tuple, list, Tensor)):
        wanted = (
            "example_kwargs={'x': x} for arguments by name, and (batch,) for one argument that is a dict"
            if isinstance(args, Mapping)
            else "(x,) for one tensor"
        )
        raise TypeError(f"example_inputs is a {type(args).__name__}; it must be a tuple: write {wanted}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        text = f"example_kwargs is a {type(kwargs).__name__}; it must be a dict, as in {{'mask': mask}}"
        raise TypeError(f"{text}. {WITHOUT_NAMES.format(by)}" if isinstance(kwargs, Tensor) else text)


def refuse_other_layers(layers: Any) -> list[Any]:
    """The layers. Raises LayerError unless there are several; what they are is checked where they are collected."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        kind = type(layers).__name__
        raise LayerError(f"layers takes a list of layers that @kfac_fx.layer(...) declares, and got a {kind}")
    return list(layers)


def refuse_other_approximations(approximations: Any, model: nn.Module) -> None:
    """Raises ApproximationError unless this is {name or class: approximation}."""
    if approximations is None:
        return
    if not isinstance(approximations, Mapping):
        raise ApproximationError(
            'approximations takes {name of a parameter or a module: approximation}, as in approximations={"*": '
            f'"diagonal"}}, and got {approximations!r}'
        )
    if wrong := [key for key in approximations if not isinstance(key, (str, type))]:
        raise ApproximationError(
            f"the keys of approximations are names or classes of modules: {as_written(wrong, model)}"
        )


def refuse_other_links(linked: Any, model: nn.Module) -> None:
    """Raises LinkError unless these are groups of names; a key of a mapping may be one name."""
    groups = list(linked) if isinstance(linked, Iterable) and not isinstance(linked, (str, Tensor)) else [linked]
    groups = [(group,) if isinstance(group, str) and isinstance(linked, Mapping) else group for group in groups]
    if wrong := [group for group in groups if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable)]:
        kind = "names" if isinstance(wrong[0], str) else f"a {type(wrong[0]).__name__}"
        raise LinkError(f'linked takes groups of names, as in linked=[("fc.weight", "fc.bias")], not {kind}')
    members = [member for group in groups for member in group]
    if wrong := [member for member in members if not isinstance(member, str)]:
        raise LinkError(f"linked takes groups of names: {as_written(wrong, model)}")


def refuse_other_limit(limit: Any) -> None:
    """Raises RegistrationError unless the width of a factor is a whole number, at least 1."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RegistrationError(f"dense_limit is {limit!r}; it must be a whole number of columns, at least 1")


def read_batch_dim(dim: Any) -> int | None:
    """Raises RegistrationError for anything but a dimension."""
    if dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0):
        return dim
    raise RegistrationError(
        f"batch_dim is {dim!r}; it must be the number of a dimension of the inputs, counted from 0, as in batch_dim=1 "
        "for [positions, cases, features]"
    )
