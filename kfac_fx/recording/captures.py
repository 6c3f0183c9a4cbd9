"""The captures of one model: one for every kind of call, made and proved at the first such call.

A capture is one graph, or one for each of the largest submodules that have one, and its proof; `Capturing` makes it.
`CaptureCache` keeps the captures and chooses among them.

Kinds of calls may take different *paths*: an argument, an attribute or a mode decides which modules run. The
registrations of a model are the union of those of its captures, in the order in which calls met them (`united`), and
every capture records those that it has uses of. Where two paths use a parameter in ways that make different blocks, no
block of a layer is right for both. All its captures then have the gradient of the parameter, squared, in a diagonal
block, which takes any use, and the report gives the reason.

**The loss that forward returns**: which of the returned tensors it is, and whether it is a mean over cases or a sum.

A graph tells the first by its nodes (`passes.losses`); the tensors of one run tell it where Python computes the
loss. Numbers tell the second: with every example twice, the gradient of a mean stays as large as it was, and that of a
sum is twice as large.
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kfac_fx.linalg.matrices import with_gradient
from kfac_fx.losses.declared import (
    DIVIDED_BY_CASES,
    Division,
    FoundLoss,
    LossSpec,
    ObservedLoss,
    RegisteredLosses,
    constant_of,
    divisor_of,
    elements_of_case,
)
from kfac_fx.passes import results
from kfac_fx.passes.approximations import longest
from kfac_fx.passes.check import refuse_unmatched, unmatched
from kfac_fx.passes.divide import Division as DividedModel
from kfac_fx.passes.divide import divide, refuse_no_inputs
from kfac_fx.passes.errors import (
    PUBLIC,
    AmbiguousRegistrationError,
    InputError,
    LossError,
    ModelChangedError,
    RegistrationError,
    UntraceableError,
    fatal,
    first_line,
    table,
    warn_user,
    with_users_steps,
)
from kfac_fx.passes.graphs.labels import constant_derivatives, shape_of, without_loss
from kfac_fx.passes.ir import WANTED, LossSite, Options, Program, Registration
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.passes.pipeline import SUBMODULES, run
from kfac_fx.passes.submodules import in_autocast
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.passes.torch_private import class_of, pytree, transforms
from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.calls import map_tensors
from kfac_fx.passes.tracing.effects import accelerators, same_random, values_kept
from kfac_fx.passes.tracing.signature import capture_key, copy_with_strides, first_sizes, is_array, signature_of
from kfac_fx.passes.tracing.substitutes import CAPTURING
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.emitted_submodules import (
    EmittedSubmodules,
    LossWatch,
    UncapturedCall,
    among_returned,
    emitted_division,
    number_of_examples,
)
from kfac_fx.recording.masks import (
    PaddingMask,
    program_with_loss_mask,
    program_with_mask,
    refuse_unfit_mask,
    tell_absent,
)
from kfac_fx.recording.model_checks import (
    NAMED_BY_MAPPING,
    Structure,
    Trained,
    how_to_call,
    how_to_give_examples,
    how_to_give_labels,
    mapping_of_arguments,
    misfit_of_call,
    not_running,
    of_derivatives,
    own_errors_told,
    refuse_inference_mode,
    refuse_unfit,
    refuse_without_values,
    what_to_correct,
)
from kfac_fx.recording.output_losses import probably_mean
from kfac_fx.recording.progress import LOG, phase, working
from kfac_fx.recording.proof import prove
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import ExamplesOf, Key, PendingMoments

ELEMENTS_TOLERANCE = 0.01  # of a number that counts the elements of a batch


def is_mean(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool | None, str | None]:
    """(whether the returned loss is a mean over cases, None if forward computes no loss that is known; why that is a
    guess, None if it is none).

    It runs the model on the batch and on the batch with all examples twice, which leaves no trace.
    """
    sites, whole = recorder.emitted.loss_sites, isinstance(recorder.emitted, EmittedGraph)
    plain = whole and all(isinstance(s, LossSite) and s.way is not None and len(s.way.nodes) == 1 for s in sites)
    if recorder.loss is not None or plain:
        return probably_mean(sites), None
    try:
        once = size_of_gradient(recorder, args, kwargs)
        if math.isnan(once):
            return None, None
        twice = size_of_gradient(recorder, *with_all_twice(recorder, args, kwargs))
    except Exception as error:  # a model of one size of batches, in words of its own
        if fatal(error):
            raise
        return probably_mean(sites), f"the model does not run on a batch with all examples twice ({first_line(error)})"
    if not (0 < once < math.inf and 0 < twice < math.inf):
        return probably_mean(sites), "its gradient is zero, or not finite, on the first batch"
    return twice < math.sqrt(2.0) * once or is_weighed_as_mean(recorder, args, kwargs), None


def is_weighed_as_mean(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum over cases is multiplied with a number of Python that is about 1 / their number in this batch."""
    site = next(iter(recorder.emitted.loss_sites), None)  # None: Python computes it, in the run to come
    weight = None if site is None or site.reduction != "sum" else constant_of(site)
    if site is None or weight is None or abs(weight) == 1 or is_divided(site):
        return False
    values = recorder.capture.flatten(args, kwargs)
    _, fisher = recorder.outputs({}, values)
    cases = recorder.losses.cases(recorder.losses.real(lambda outputs: None, fisher, values))
    least, most = DIVIDED_BY_CASES
    return least <= abs(weight) * int(cases) <= most


def is_divided(site: FoundLoss) -> bool:
    """Whether forward divides a loss by a number, and does not multiply it with an inverse."""
    if isinstance(site, ObservedLoss) or site.way is None:
        return divisor_of(site, Division()) is not None
    return any(exponent > 0 for _, exponent in site.way.divisors)


def division_of(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Division | None:
    """How the number is read that forward divides a sum over cases by; None if there is none, or no case.

    It may be that of a whole step of micro-batches. So a constant factor 1 / n is a division if n may be the cases of
    this batch, or of several; a smaller n makes a weight of the loss. The number counts elements only if it is that of
    the elements of this batch: a larger one may as well be the cases of several micro-batches.
    """
    if recorder.is_mean is not False or recorder.loss is not None:
        return None
    values = recorder.capture.flatten(args, kwargs)
    learned = {name: with_gradient(value.detach()) for name, value in recorder.live_parameters().items()}
    _, fisher = recorder.outputs(learned, values)  # losses that Python computes have weights where there are gradients
    sites = recorder.emitted.loss_sites
    if not sites:
        return None
    (_, loss), *_ = recorder.losses.real(lambda outputs: None, fisher, values)
    cases = int(loss.cases)
    division = Division(inverses_from=DIVIDED_BY_CASES[0] * cases)
    divisor = replace(recorder.losses, division=division).rows(fisher, values)[0].divisor
    if divisor is None or not cases:
        return None
    elements = elements_of_case(loss)
    counted = BY_NAME[sites[0].loss].averages_elements and elements > 1
    return replace(division, of_elements=counted and abs(float(divisor) / (elements * cases) - 1) < ELEMENTS_TOLERANCE)


def size_of_gradient(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The sum of the absolute values of the gradient of the returned loss with respect to the inputs of torch's losses,
    or to the parameters if forward writes its squares by hand; NaN if there are none."""
    from kfac_fx.recording.equivalence import copies, model_kept

    copied_args, copied_kwargs = copies(args, kwargs)
    with model_kept(recorder), LossWatch() as watch:
        returned = recorder.model(*copied_args, **copied_kwargs)
        learned = [loss for loss in watch.losses if loss.inputs.requires_grad]
        inputs = [loss.inputs for loss in learned] or [
            parameter for parameter in recorder.model.parameters() if parameter.requires_grad
        ]
        if isinstance(recorder.emitted, EmittedGraph):
            leaves = results.tree_leaves(returned)
            losses = [leaves[place] for place in recorder.emitted.places_of_losses]
        else:
            losses = among_returned(returned, [loss.result for loss in learned])
        roots = [loss.sum() for loss in losses if isinstance(loss, Tensor) and loss.requires_grad]
        if not roots or not inputs:
            return math.nan
        grads = torch.autograd.grad(torch.stack(roots).sum(), inputs, allow_unused=True)
    return float(sum(grad.abs().sum(dtype=torch.float64) for grad in grads if grad is not None))


def with_all_twice(
    recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of forward with every example twice."""
    emitted, values = recorder.emitted, recorder.capture.flatten(args, kwargs)
    total = emitted.examples(values)
    axes: dict[int, int] = {}
    if isinstance(emitted, EmittedGraph):
        places = ((value, emitted.case_axis(place, value)) for place, value in enumerate(values))
        axes = {id(value): axis for value, axis in places if axis is not None and value.shape[axis] == total}

    def twice(leaf: Any) -> Any:
        if isinstance(leaf, (list, tuple)):
            return type(leaf)([*leaf, *leaf])
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        axis = axes.get(id(leaf), 0)
        return torch.cat([leaf, leaf], dim=axis) if leaf.shape[axis] == total else leaf

    def lists(value: Any) -> bool:
        return type(value) in (list, tuple) and len(value) == total and not emitted.whole

    doubled: tuple[Any, ...] = tuple(pytree.tree_map(twice, value, is_leaf=lists) for value in args)
    return doubled, {name: pytree.tree_map(twice, value, is_leaf=lists) for name, value in kwargs.items()}


MAX_KINDS = 8  # of calls in the cache: modes, dtypes, devices, structures; the least recently used goes first
MANY_VALUES = 3  # of an argument, from which on it is said that each makes a capture
NUMBER = (
    "argument {name} of forward has had {count} values as {kind}, and every one is a capture of its own, "
    "which takes time: pass a tensor, torch.tensor({name}), if forward only computes with it"
)
SETTING = (
    "{name}, which forward may read, has had {count} values, and every one is a capture of its own, which takes time: "
    "let it be a buffer that is written in place, if forward only computes with it"
)
OBJECT = (
    "{name}, which forward may read, has had {count} values, and every one is a capture of its own, which takes time: "
    "compile a module that has no such attribute and computes the outputs, as kfac_fx.compile(self.model, ..., "
    "in_place=True) does inside of a module that a trainer writes it to"
)
CAPTURED_SIZES = (
    "inputs of {count} sizes were captured, and every capture is a pause of the training: forward has derivatives or "
    "other parts that are captured for one size, so each size that a recording or a check meets first is captured "
    "anew. Keep the sizes equal, such as the lengths of sequences or the number of points, as by padding to a few "
    "lengths"
)
AUTOCAST = (
    "calls under autocast and calls without it, or with another dtype, were captured one by one, which takes time: "
    "compile with example inputs inside of the torch.autocast of the training"
)
NO_TENSORS = (
    "the forward of {} takes no tensors, so it has no graph of its own: losses that it computes are not known, and "
    "parameters behind derivatives have diagonal blocks. Pass what it draws or holds, such as points, to forward as "
    "arguments"
)
WAYS_OF_USE = "calls use it in ways that no block of a layer is right for: "
MAX_CAPTURES = 32  # of one kind of call, where one capture does not serve all, as with lengths of sequences
LOOKS = 20  # a look takes some percent of a training step; recordings and checks look, too
MAX_ROUNDS = 4  # of captures for the same inputs, before a model counts as unstable

Result = TypeVar("Result")


# --- one capture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of `compile`, checked.

    passes: from a fresh capture to a program with registrations; not `run` if layers were registered by hand.
    """

    options: Options
    layers: Mapping[str, Layer]
    loss: LossSpec | RegisteredLosses | None
    verify: bool
    backend: str
    passes: Callable[[Program], Program] = run
    padding_mask: PaddingMask | None = None
    examples: ExamplesOf | None = None


@dataclass(frozen=True)
class Capturing:
    """Captures of `model` as `arguments` say. Every method returns a new one and keeps none.

    told: see `Recorder.told`.
    """

    model: nn.Module
    arguments: CompileArguments
    told: set[object] = field(default_factory=set)

    @property
    def by_hand(self) -> bool:
        """Whether the layers were registered by hand, on the nodes of one graph."""
        return self.arguments.passes is not run

    def registered(self, traced: Capture) -> Recorder:
        """A capture of the whole model with its registrations, not proved."""
        return self.emitted(traced, self.arguments.passes(traced.program))

    def exported(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], every_size: bool, first: bool) -> Recorder:
        """One graph of the whole model, or one for each of the largest submodules that have one.

        every_size: the sizes of images were seen to change. first: no capture was made before, with which this one
            must agree.
        """
        arguments = self.arguments
        phase("graph")
        try:
            traced = trace_model(
                self.model, args, kwargs, options=arguments.options, layers=arguments.layers, every_size=every_size
            )
            refuse_no_inputs(traced)
            phase("registrations")
            parts = self.around_autocast(traced.program, args, kwargs)
            if parts is not None and not generic_parameters(parts):
                return parts
            program = arguments.passes(traced.program)
            if arguments.padding_mask is None:
                program = program_with_loss_mask(program)
            else:
                program = program_with_mask(program, arguments.padding_mask, self.model, args, kwargs)
                if first:
                    refuse_unfit_mask(program)
            whole = self.proved(self.emitted(traced, program), args, kwargs)
            return parts if parts is not None and generic_parameters(parts) < generic_parameters(whole) else whole
        except UntraceableError as error:
            if self.by_hand:
                raise
            recorder = self.divided(args, kwargs, error)
            if first and all(isinstance(leaf, (int, float)) for leaf in pytree.tree_leaves((args, kwargs))):
                warn_user(UserWarning(NO_TENSORS.format(class_of(self.model).__name__)))
            return recorder

    def around_autocast(self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder | None:
        """The model divided around layers that its graph hides inside of autocast; None if there are none, or if it
        cannot be divided."""
        if self.by_hand or not (names := in_autocast(program)):
            return None
        name = type(self.model).__name__
        try:
            return self.divided(
                args,
                kwargs,
                UntraceableError(
                    f"{name} runs {', '.join(names)} under autocast of its own, which is closed to passes."
                ),
            )
        except (UntraceableError, RegistrationError):  # the graph of the whole model says what is wrong
            return None

    def divided(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        error: UntraceableError,
        earlier: EmittedSubmodules | None = None,
    ) -> Recorder:
        """Capture the largest submodules that can be captured.

        error: why the whole model was not captured. earlier: the captures from other inputs, which are kept.
        """
        phase("submodules")
        division, program = self.division(args, kwargs, error, None if earlier is None else earlier.division)
        if earlier is not None:
            program = with_generic(program, earlier.program)
        arguments = self.arguments
        emitted = emitted_division(
            division,
            program,
            self.model,
            args,
            kwargs,
            backend=arguments.backend,
            returns_loss=arguments.loss is not None,
            padding_mask=arguments.padding_mask,
            earlier=earlier,
        )
        try:
            return self.proved(Recorder(emitted, arguments.loss, verify=arguments.verify, told=self.told), args, kwargs)
        except UncapturedCall as uncaptured:
            raise self.unstable(uncaptured) from None

    def division(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: UntraceableError, earlier: DividedModel | None
    ) -> tuple[DividedModel, Program]:
        """A division of the model, and its program with registrations.

        Operations of Python that read parameters are not captured where their uses are ambiguous beside those in the
        submodules.
        """
        options, layers = self.arguments.options, self.arguments.layers
        for reads in (True, False):
            try:
                cases = number_of_examples(args, kwargs)
                with torch.compiler.set_stance("force_eager"):  # torch.compile would compile what watches the model
                    division = divide(self.model, args, kwargs, options, layers, error, earlier, cases, reads)
            except UntraceableError:
                raise
            except Exception as failure:
                if fatal(failure):
                    raise
                if wrong := misfit_of_call(self.model, args, kwargs):
                    raise InputError(
                        f"these inputs do not fit {wrong}.\n{how_to_call(self.model, args, kwargs)}"
                    ) from with_users_steps(failure, before=error)
                if mapping_of_arguments(self.model, args) is not None:
                    advice = NAMED_BY_MAPPING
                else:
                    advice = of_derivatives(self.model, args, kwargs, failure) or what_to_correct(self.model, failure)
                text = f"{not_running(self.model, failure)}\n{advice}"
                raise InputError(text) from with_users_steps(failure, before=error)
            try:
                return division, run(division.program, SUBMODULES)
            except AmbiguousRegistrationError:
                if not any(captured.is_read for captured in division.captured):
                    raise
        raise AssertionError("bug in kfac_fx: a division without reads that has some")

    def emitted(self, traced: Capture, program: Program) -> Recorder:
        emitted = EmittedGraph(traced, program, self.model, self.arguments.backend)
        settings, arguments = traced.settings(self.model), self.arguments
        verify, by_hand = arguments.verify, self.by_hand
        return Recorder(emitted, arguments.loss, settings=settings, verify=verify, by_hand=by_hand, told=self.told)

    def proved(self, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
        """The recorder with what the proof has shown, if `verify`."""
        phase("proof")
        verdict = prove(recorder, args, kwargs) if self.arguments.verify else None
        registrations = recorder.registrations
        if verdict is not None and verdict.program.registrations != recorder.program.registrations:
            recorder = recorder.with_program(verdict.program)
        recorder.proven = verdict is None or verdict.conclusive
        recorder.misfits = [] if verdict is None else [*verdict.misfits]
        recorder.rows_are_outputs = verdict is not None and verdict.rows_are_outputs
        if recorder.rows_are_outputs:  # now, and not in the first recording of a pass that asks for it
            recorder.kept_apart(recorder.program.outputs)
        for misfit in recorder.misfits:
            kind = re.sub(r"[\d,]+", "", misfit)  # another capture has other sizes
            if kind not in recorder.told:
                recorder.told.add(kind)
                warn_user(UserWarning(misfit))
        self.tell_constant_derivatives(recorder)
        self.tell_absent_mask(args, kwargs)
        self.tell_own_layers(recorder, {} if verdict is None else verdict.failed, registrations)
        recorder.is_mean, recorder.mean_reason = is_mean(recorder, args, kwargs)
        recorder.division = recorder.division or division_of(recorder, args, kwargs)
        if isinstance(recorder.emitted, EmittedSubmodules):
            recorder.emitted.checked = None if verdict is None else set(recorder.emitted.ran)
        return recorder

    def tell_constant_derivatives(self, recorder: Recorder) -> None:
        """Warn, once, of derivatives that training takes for constants; an evaluation needs no others."""
        known = self.arguments.loss is not None or recorder.program.losses  # else any output may be no part of it
        lines = constant_derivatives(recorder.program) if known and self.model.training else []
        if lines and constant_derivatives not in recorder.told:
            recorder.told.add(constant_derivatives)
            many = "derivative at {} has" if len(lines) == 1 else "derivatives at {} have"
            warn_user(
                UserWarning(
                    f"the {many.format(', '.join(lines))} no create_graph=True, so the loss takes the result for a "
                    "constant, and the parameters get no gradient through it: write torch.autograd.grad(..., "
                    "create_graph=True), or detach the result if a constant is meant."
                )
            )

    def tell_absent_mask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn, once, of a padding mask that the `**kwargs` of forward take, before a call has it."""
        mask = self.arguments.padding_mask
        if mask is not None and tell_absent not in self.told and tell_absent(mask, self.model, args, kwargs):
            self.told.add(tell_absent)

    def tell_own_layers(
        self, recorder: Recorder, failed: Mapping[Key, str], registrations: Iterable[Registration]
    ) -> None:
        """Warn of layers of the user that failed the proof; those of the library are in the report alone.

        failed: the reasons, by registration. registrations: those before the proof.
        """
        layers = self.arguments.layers
        of_user = [
            r for r in registrations if r.parameters in failed and layers.get(r.layer) is not LAYERS.get(r.layer)
        ]
        rows = [(", ".join(r.parameters), f"{r.layer}: {failed[r.parameters]}") for r in of_user]
        if rows and str(rows) not in recorder.told:
            recorder.told.add(str(rows))
            warn_user(
                UserWarning(
                    "these parameters have no block of a layer of layers=[...], but a diagonal one each:\n"
                    f"{table(rows)}\n"
                    "Correct the rows and grad_rows of its declaration. strict=True makes this an error."
                )
            )

    def unstable(self, uncaptured: UncapturedCall) -> UntraceableError:
        name, path = type(self.model).__name__, uncaptured.path
        if uncaptured.asks:
            return UntraceableError(
                f"{path} asks in forward whether a tensor needs a gradient (requires_grad, is_leaf or grad_fn), and "
                f"{name} is captured in submodules, which run with gradients and without.\n"
                f"Let {path} decide by self.training, by an attribute of its own, or by an argument."
            )
        return UntraceableError(
            f"{name} calls {path} differently in every forward pass, even with identical inputs "
            "and random seeds.\nLet forward depend only on its inputs, its attributes and torch's random numbers."
        )


def generic_parameters(recorder: Recorder) -> int:
    """How many parameters are generic for a reason, and not because the user declared them so."""
    generic = (registration for registration in recorder.registrations if registration.generic)
    return sum(len(registration.parameters) for registration in generic if registration.reason != WANTED)


# --- the captures of a model ------------------------------------------------------------------------------------------


class CaptureCache:
    """The captures of one model.

    Attributes:
        first: the first capture; None as long as there is none. When a parameter is trained for the first time, a new
            capture replaces it.
        registrations: those of which there are blocks: the union of those of all captures so far.
        sources: a program that has each of them, also of a capture that is gone.
        waiting: the trained parameters that no call has used so far, as far as the captures tell; they have no block.
        stale: those among them, by parameters, that no capture has since parameters were unfrozen.
        trained: the parameters that were trained at any time.
        refusal: the error of torch.fx, if it could not trace the whole model.
        copied: whether the model is that of a copy, whose original was captured with inputs.
        recorders: by kind of call, the least recently used first.
        numbers: the values of every argument of forward that is a Python number or an array, by its name and by what is
            alike in the captured calls.
        changing: how many values made many captures by nothing else, by the sentence that tells it and the name, which
            is empty where the sentence has none.
    """

    def __init__(self, model: nn.Module, arguments: CompileArguments) -> None:
        self.model, self.arguments, self.capturing = model, arguments, Capturing(model, arguments)
        self.structure = Structure(model, self.follow_shards)
        self.trained = Trained(model)
        self.first: Recorder | None = None
        self.registrations: tuple[Registration, ...] = ()
        self.stale: frozenset[Key] = frozenset()
        self.sources: dict[Key, Program] = {}
        self.waiting: frozenset[str] = frozenset()
        self.reached: set[str] = set()  # those of them that had a gradient
        self.looks = LOOKS  # training forwards in which another path is looked for, while parameters wait
        self.refusal = ""
        self.copied = False
        self.recorders: OrderedDict[Any, list[Recorder]] = OrderedDict()
        self.outdated = False  # parameters were unfrozen since the first capture
        self.numbers: dict[tuple[str, Any], set[float]] = {}
        self.changing: dict[tuple[str, str], int] = {}

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
            refuse_no_inputs(traced)
        except UntraceableError as error:
            self.refusal = str(error).removesuffix(f"\n{error.advice}")  # example inputs are the advice
            return
        self.take(traced)

    def take(self, traced: Capture) -> None:
        """Take over a first capture."""
        with CAPTURING:
            self.make_first(self.capturing.registered(traced))

    def make_first(self, recorder: Recorder) -> None:
        if self.first is None:  # a further kind of calls may go without a layer
            refuse_unmatched(recorder.program)
            for sentence in unmatched(recorder.program.layers, recorder.program):
                warn_user(UserWarning(f"{sentence}. Correct its form, or leave it out of layers=[...]."))
        used = {name for registration in recorder.registrations for name in registration.owners}
        rest = [registration for registration in self.registrations if used.isdisjoint(registration.owners)]
        self.first, self.registrations = recorder, (*recorder.registrations, *rest)
        self.stale &= {registration.parameters for registration in rest}
        self.note_blocks()

    def joined(self, recorder: Recorder) -> Recorder:
        """A further capture, with the blocks that there are, and new ones for what it uses first.

        Raises ModelChangedError for other uses than those that were registered by hand, for padding that one capture
        leaves out and another one does not, and for a series that is too long; RegistrationError under `strict` for
        uses that no block of a layer is right for.
        """
        if self.capturing.by_hand or (self.masked and recorder.program.mask is not None):
            refuse_other_uses(recorder, self.registrations, by_hand=self.capturing.by_hand)
        recorder.division = next((other.division for other in self.all if other.division), recorder.division)
        union = united(recorder, self.registrations, self.stale)
        if union.reasons and self.arguments.options.strict:
            raise RegistrationError(
                f"calls of {class_of(self.model).__name__} use parameters in ways that no block of a layer is right "
                f"for together:\n{table(union.reasons.items())}\n"
                "Compile with strict=False, which gives them a diagonal block, or let all calls use them alike."
            )
        if union.reasons:
            for cached in self.recorders.values():
                cached[:] = [self.renewed(other, with_reasons(other, union.reasons)) for other in cached]
        if union.registrations != self.registrations:
            self.registrations = union.registrations
        self.stale -= union.recorder.used
        self.note_blocks()
        return union.recorder

    def renewed(self, recorder: Recorder, other: Recorder) -> Recorder:
        """`other`, which takes the place of a capture."""
        self.first = other if self.first is recorder else self.first
        return other

    def note_blocks(self) -> None:
        """Note where the registrations come from, and which parameters have none."""
        present = {r.parameters: capture.program for capture in reversed(self.all) for r in capture.registrations}
        sources = {**self.sources, **present}
        self.sources = {r.parameters: sources[r.parameters] for r in self.registrations if r.parameters in sources}
        blocks = {name for registration in self.registrations for name in registration.owners}
        lost = {capture.program.owner(name) for capture in self.all for name in without_loss(capture.program)}
        waiting = frozenset() if self.capturing.by_hand else frozenset(self.trained.registered) - blocks - lost
        self.looks = self.looks if waiting == self.waiting else LOOKS
        self.waiting = waiting

    def look_for_gradients(self) -> list[str]:
        """Look for another path again if a parameter that waits has its first gradient. It may also be trained outside
        of forward, and then no path has it. Returns these parameters."""
        new = self.waiting - self.reached
        if found := [name for name in new if self.trained.registered[name].grad is not None]:
            self.reached.update(found)
            self.look_again()
        return found

    def look_again(self) -> None:
        """Look for another path in the next training forwards."""
        self.looks = LOOKS

    def looks_for_path(self) -> bool:
        """Count a training forward. Returns whether to look for its capture, though it may record nothing."""
        if not self.waiting or not self.looks:
            return False
        self.looks -= 1
        return True

    @property
    def program(self) -> Program:
        if self.first is None and self.copied:
            raise UntraceableError(
                f"this copy of {class_of(self.model).__name__} has no capture, because captures are not copied: call "
                "it once in training mode, as in copy(x) for a batch x, before its report is read or an optimizer is "
                "made of it"
            )
        if self.first is None:
            name = class_of(self.model).__name__
            raise UntraceableError(
                f"{name} has no graph yet: torch.fx alone cannot trace all of it, so the first training forward makes "
                "the graph. KFAC(net), FisherEstimator(net) and net.report read it: call net once before them, or "
                f"{how_to_give_examples(self.model)}.\n{self.refusal}"
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

    def too_late(self, call: str, advice: str) -> UntraceableError:
        """The error for a call that has to be captured and cannot be any more."""
        return UntraceableError(
            f"{call} in a way that was not captured before it was sharded, and it cannot be captured now that no "
            f"process has its whole parameters.\n{advice}"
        )

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
        key = capture_key(self.structure.modules, self.structure.parameters, args, kwargs)
        cached = self.recorders.get(key, [])
        for place, recorder in enumerate(cached):
            if recorder.capture.holds(args, kwargs) and self.has_settings_of(recorder):
                self.recorders.move_to_end(key)
                cached.append(cached.pop(place))
                if not recorder.proven:  # its first batch was empty, or not finite
                    with CAPTURING, self.trained.in_captures():
                        cached[-1] = self.capturing.proved(recorder, *off_graph(args, kwargs))
                    if self.first is recorder:
                        self.make_first(cached[-1])
                    else:
                        cached[-1] = self.joined(cached[-1])
                if recorder.apart and not recorder.apart <= recorder.frozen:
                    cached[-1] = self.renewed(cached[-1], self.joined(cached[-1]))
                return cached[-1]
        if self.structure.sharded:
            raise self.too_late(
                f"{class_of(self.model).__name__} is called",
                "Compile it with example inputs of the same structure, dtypes and modes, kfac_fx.compile(model, (x,)), "
                "and call net.recorder((x,), {}) for every further kind of call, before fully_shard.",
            )
        if self.arguments.verify:
            refuse_without_values(self.model)
        args, kwargs = off_graph(args, kwargs)
        what = f"capturing {class_of(self.model).__name__}"
        if any(key[2:] == other[2:] and key[0] == other[0] for other in self.recorders if key[1] != other[1]):
            what += " again, under autocast" if key[1] else " again, without autocast"
            self.changing[AUTOCAST, ""] = len(self.recorders)
        with (
            CAPTURING,
            self.trained.in_captures(),
            working(what),
            own_errors_told(self.model, self.structure.parameters, args, kwargs, first=self.first is None),
        ):
            recorder = (None if self.recorders else self.first_symbolic(args, kwargs)) or self.capturing.exported(
                args, kwargs, every_size=any(map(self.has_settings_of, cached)), first=self.first is None
            )
        if self.recorders:
            recorder = self.joined(recorder)
        else:
            if self.outdated:
                recorder = continuing(recorder, self.registrations)
            self.make_first(recorder)
            self.outdated = False
        self.recorders[key] = [*cached, recorder][-MAX_CAPTURES:]
        self.note_blocks()
        self.recorders.move_to_end(key)
        if len(self.recorders) > MAX_KINDS:
            self.recorders.popitem(last=False)
        alike = {shapes_of_inputs(other.program) for other in self.recorders[key]}
        self.tell_many(CAPTURED_SIZES, "", len(alike))
        self.note_numbers(args, kwargs)
        self.note_settings([other for other in (*cached, recorder) if other.capture.holds(args, kwargs)])
        return recorder

    def note_numbers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the Python numbers and the arrays among the arguments of a call that was captured; log those that
        change."""
        try:
            call = signature_of(self.model).bind(*args, **kwargs)
        except TypeError:  # a signature that is not that of the call
            return
        for name, value in [*call.arguments.items()]:
            if type(value) in (int, float) or is_array(value):
                call.arguments[name] = None
                alike = capture_key(self.structure.modules, self.structure.parameters, call.args, call.kwargs)
                call.arguments[name] = value
                values = self.numbers.setdefault((name, alike), set())
                values.add(hash(value.tobytes()) if is_array(value) else value)
                kind = "an array of numpy" if is_array(value) else "a Python number"
                self.tell_many(NUMBER.replace("{kind}", kind), name, len(values))

    def note_settings(self, captures: Sequence[Recorder]) -> None:
        """Note what forward reads next to its arguments, if it has another value in the last one of these captures of
        one call than in the one before; log what changes."""
        every = [capture.settings.values for capture in captures if capture.settings is not None]
        if len(every) < MANY_VALUES:
            return
        for name in [name for name in every[-1] if name not in every[-2] or every[-1][name] != every[-2][name]]:
            values: list[Any] = []
            for settings in every:
                values += [settings[name]] if name in settings and settings[name] not in values else []
            numbers = all(type(value) is tuple and value[0] in (bool, int, float) for value in values)
            self.tell_many(SETTING if numbers else OBJECT, name, len(values))

    def tell_many(self, text: str, name: str, count: int) -> None:
        """Log once that so many values made a capture each."""
        if MANY_VALUES <= count > self.changing.get((text, name), 0):
            if (text, name) not in self.changing:
                LOG.warning(text.format(name=name, count=f"{count:,}"))
            self.changing[text, name] = count

    @property
    def changes(self) -> list[str]:
        """A sentence for each name in `changing`."""
        return [text.format(name=name, count=f"{count:,}") for (text, name), count in self.changing.items()]

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
        self.stale = frozenset(registration.parameters for registration in self.registrations)

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
            except LossError as error:
                self.raise_of_missing_loss(error, recorder, args, kwargs)
                raise
            except RuntimeError as error:
                self.raise_the_models_own(error, args, kwargs)
                raise
        raise self.capturing.unstable(last)

    def raise_of_missing_loss(
        self, error: LossError, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Say that the call lacks the arguments of a loss that forward computes in other calls."""
        others = (of.program.losses for recorders in self.recorders.values() for of in recorders)
        if self.arguments.loss is None and not recorder.program.losses and any(others):
            raise LossError(
                f"the forward of {class_of(self.model).__name__} computes no loss in this call, and computes one in "
                "other calls of this net: the inputs lack what the loss is computed from, such as labels. "
                f"{how_to_give_labels(self.model, args, kwargs)}"
            ) from error

    def raise_the_models_own(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run the model on inputs on which its graph has failed: its own error names its modules and lines."""
        if isinstance(error, PUBLIC) or fatal(error):
            return
        if transforms():  # an operation without a derivative; the buffers of the model could not be put back
            return
        refuse_without_values(self.model)
        with same_random(accelerators(self.model.parameters())), values_kept(self.model.buffers()):
            try:
                self.model(*args, **kwargs)
            except Exception as models_own:
                raise with_users_steps(models_own) from None
            finally:
                if self.structure.sharded:
                    drop_gathered(self.model)

    def record_in_training(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], generator: torch.Generator | None
    ) -> tuple[Any, PendingMoments]:
        """See `Recorder`. A call that no graph serves is captured afterwards, and nothing was recorded then."""
        recorder = self.recorder(args, kwargs)
        forward = None if self.structure.sharded else partial(self.model, *args, **kwargs)
        try:
            outputs, pending = recorder.record_in_training(recorder.capture.flatten(args, kwargs), generator, forward)
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
            raise self.too_late(
                f"on these inputs {class_of(self.model).__name__} calls {uncaptured.path or 'a submodule'}",
                "Call net.record((x,), {}) with inputs that take every branch of its Python, before fully_shard; or "
                "leave it whole and train in DistributedDataParallel(net), with KFAC(net, placement='owners').",
            )
        emitted = recorder.emitted
        assert isinstance(emitted, EmittedSubmodules), (
            "bug in kfac_fx: an uncaptured call in a graph of the whole model"
        )
        args, kwargs = off_graph(args, kwargs)
        with CAPTURING, self.trained.in_captures():
            if uncaptured.captured:
                emitted.checked = None
                extended = self.capturing.proved(recorder, args, kwargs)
            else:
                error = UntraceableError(emitted.division.why_left(type(self.model).__name__))
                extended = self.capturing.divided(args, kwargs, error, emitted)
        assert self.first is not None, "bug in kfac_fx: an uncaptured call before the first capture"
        kinds = [cached for cached in self.recorders.values() if any(other is recorder for other in cached)]
        places = [next(n for n, other in enumerate(cached) if other is recorder) for cached in kinds]
        extended = self.joined(extended)
        for cached, place in zip(kinds, places, strict=True):
            cached[place] = self.renewed(cached[place], extended)

    # --- capturing --------------------------------------------------------------------------------------------------

    def first_symbolic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder | None:
        """The capture without inputs, if it holds for these; None: torch.export has to capture the model.

        Derivatives that forward takes are one call in a trace without inputs, which hides uses in it, and some layers
        are told by sizes alone. So where the proof finds other gradients, or no layer has a parameter, the model is
        captured again, with these inputs.
        """
        if self.first is None or self.outdated:
            return None
        if not self.first.capture.holds(args, kwargs) or not self.has_settings_of(self.first):
            return None
        if self.first.program.unsized:  # the terms of the returned loss have no rows without the sizes of a batch
            return None
        try:
            recorder = self.capturing.proved(self.first, args, kwargs)
        except UntraceableError:
            return None
        if not generic_parameters(recorder):
            return with_cases_alike(recorder, args, kwargs)
        try:
            again = self.capturing.exported(args, kwargs, every_size=False, first=True)
        except (UntraceableError, RegistrationError):
            return with_cases_alike(recorder, args, kwargs)
        fewer = generic_parameters(again) < generic_parameters(recorder)
        return again if fewer else with_cases_alike(recorder, args, kwargs)


def with_cases_alike(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder:
    """A capture without sizes, which was proved with these inputs, and holds for those of which as many are as long as
    each other: a block of the gradients of whole examples adds up the rows of all uses, example by example."""
    several = (registration for registration in recorder.registrations if len(registration.uses) > 1)
    if any(registration.structure.needs_cases for registration in several):
        holds, sizes = recorder.capture.holds, first_sizes(args, kwargs)

        def holds_for(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
            now = first_sizes(args, kwargs)
            return holds(args, kwargs) and all(n == now[sizes.index(size)] for n, size in zip(now, sizes, strict=True))

        recorder.emitted.capture = replace(recorder.capture, holds=holds_for)
    return recorder


def shapes_of_inputs(program: Program) -> tuple[tuple[str, ...], ...]:
    """The sizes of the tensors that a capture takes, by name where they may vary."""
    return tuple(tuple(map(str, shape_of(node))) for node in program.inputs)


def off_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with copies of the tensors that were computed with gradients, as a hidden state is by an
    earlier forward: a capture takes gradients, which must neither reach that forward nor use up its graph."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.is_leaf or tensor.is_nested:
            return tensor
        return copy_with_strides(tensor.detach().requires_grad_())  # no leaf, either

    parts: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(copied, (tuple(args), dict(kwargs)))
    return parts


def drop_gathered(model: nn.Module) -> None:
    """The units of FSDP2 drop the parameters that they gathered: the root keeps them behind a forward without backward,
    and would not notice that an optimizer moves the shards."""
    fsdp_module: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, fsdp_module):
            module.reshard()


# --- agreement of captures --------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Union:
    """The registrations of all captures so far.

    Attributes:
        recorder: the capture that was added, with the approximations of the blocks that there are.
        registrations: one a block; those that were known come first.
        reasons: by parameter, why no block of a layer is right for all its uses.
    """

    recorder: Recorder
    registrations: tuple[Registration, ...]
    reasons: Mapping[str, str]


def united(recorder: Recorder, known: Sequence[Registration], stale: Collection[Key] = ()) -> Union:
    """Add a capture to the registrations that are known.

    Registrations of frozen parameters alone may differ, as those of adapters that are switched off: this capture does
    not record them, and `recorder.apart` names them. They are compared again when the parameters are trained.

    stale: those of the known registrations, by parameters, that are of a time when fewer parameters were trained.

    Raises ModelChangedError for a series that is longer than its block is prepared for.
    """
    before, frozen = {registration.parameters: registration for registration in known}, recorder.frozen
    now = {registration.parameters: registration for registration in recorder.registrations}
    texts = {key: other_path(before[key], now[key]) for key in now if key in before}
    apart, replaced, reasons = set[str](), set[Key](), dict[str, str]()
    for key, registration in now.items():
        if texts.get(key) == "":
            continue
        met = [other for other in before.values() if not set(other.owners).isdisjoint(registration.owners)]
        names = {name for other in (registration, *met) for name in other.owners}
        if met and names <= frozen:
            apart |= names
        elif all(other.parameters in stale for other in met):
            replaced |= {other.parameters for other in met}
        else:
            uses = "; ".join(dict.fromkeys(text for other in (*met, registration) for text in ways_of_use(other)))
            reasons |= dict.fromkeys(names, f"{WAYS_OF_USE}{uses}")
    registrations = [registration for key, registration in before.items() if key not in replaced]
    if reasons:
        grown = True
        while grown:  # what shares a block with them
            reasons, size = shared(shared(reasons, registrations), recorder.registrations), len(reasons)
            grown = len(reasons) > size
        recorder = with_reasons(recorder, reasons)
        registrations = made_generic(recorder.program, registrations, reasons)
        before = {registration.parameters: registration for registration in registrations}
    same = {key: before[key] for key in now if key in before and texts.get(key, "") == ""}
    recorder = with_approximations(recorder, same)
    recorder.apart = frozenset(apart)
    taken = {name for registration in registrations for name in registration.owners}
    new = (registration for registration in recorder.registrations if taken.isdisjoint(registration.owners))
    return Union(recorder, (*registrations, *new), reasons)


def shared(reasons: Mapping[str, str], registrations: Iterable[Registration]) -> dict[str, str]:
    """The reasons of parameters, and of those that share a registration with them."""
    more = dict(reasons)
    for registration in registrations:
        reason = next((more[name] for name in registration.owners if name in more), None)
        if reason is not None:
            more = dict.fromkeys(registration.owners, reason) | more
    return more


def made_generic(
    program: Program, registrations: Iterable[Registration], reasons: Mapping[str, str]
) -> list[Registration]:
    """The registrations, with a generic one for each of these parameters in place of theirs."""
    kept: list[Registration] = []
    found = dict[str, None]()
    for registration in registrations:
        if reasons.keys().isdisjoint(registration.owners):
            kept.append(registration)
            continue
        for name in registration.owners:
            if name not in found:
                found[name] = None
                kept.append(program.generic(name, reasons[name]))
    return kept


def with_reasons(recorder: Recorder, reasons: Mapping[str, str]) -> Recorder:
    """The capture with generic registrations of these parameters."""
    registrations = tuple(made_generic(recorder.program, recorder.registrations, reasons))
    if registrations == recorder.registrations:
        return recorder
    return recorder.with_program(recorder.program.but(registrations=registrations))


def refuse_other_uses(recorder: Recorder, known: Sequence[Registration], by_hand: bool) -> None:
    """Raises ModelChangedError for other uses than those that were registered by hand; or if padding would be in the
    factors of some calls and not of others."""
    before = {registration.parameters: registration for registration in known}
    now = {registration.parameters: registration for registration in recorder.registrations}
    rows = {key: other_masks(before[key], now[key]) for key in before if key in now}
    if by_hand:
        every = dict.fromkeys((*before, *now))
        rows = {key: other_path(before.get(key), now.get(key)) or rows.get(key, "") for key in every}
    trained = {key: set((before.get(key) or now[key]).owners) - recorder.frozen for key in rows}
    if differing := [(", ".join(key), text) for key, text in rows.items() if text and trained[key]]:
        name = class_of(recorder.model).__name__
        advice = (
            "Register them in a LayerCollection on the graph of these calls." if by_hand
            else "Compile with inputs whose padding the mask tells in the same uses."
        )  # fmt: skip
        raise ModelChangedError(
            f"with these inputs {name} uses its parameters differently than with the first inputs:\n"
            f"{table(differing)}\n{advice}"
        )


def continuing(recorder: Recorder, known: Sequence[Registration]) -> Recorder:
    """A first capture in which more parameters are trained than in those that `known` comes from, with the
    approximations of the blocks that go on."""
    before = {registration.parameters: registration for registration in known}
    same = {
        registration.parameters: before[registration.parameters]
        for registration in recorder.registrations
        if registration.parameters in before and not other_path(before[registration.parameters], registration)
    }
    return with_approximations(recorder, same)


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
    """The difference that two registrations of the same parameters make to their block; "" if there is none.

    Raises ModelChangedError for a series that is longer than its block is prepared for.
    """
    if first is None or other is None:
        return f"{in_words(first)} at first, {in_words(other)} here"
    if first.structure.needs_cases and not other.structure.needs_cases:
        return f"{in_words(first)} and {first.approximation} at first, {in_words(other)} here"
    approximated = replace(other, approximation=first.approximation)
    difference = f"{in_words(first)} at first, {in_words(other)} here"
    if first.structure.series and other.steps > (most := longest(first.steps)):
        raise ModelChangedError(
            f"{', '.join(other.parameters)}: {difference}; {first.approximation} is prepared for {most} at most.\n"
            "Compile with an example of the longest sequence."
        )
    same = first.layer == other.layer and first.statistics == approximated.statistics
    return "" if same else difference


def other_masks(first: Registration, other: Registration) -> str:
    """A sentence if padding would be in the factors of one batch and not in those of another, else ""."""
    fits = [any(use.mask_dims for use in registration.uses) for registration in (first, other)]
    return "" if fits[0] == fits[1] else f"the padding mask fits its uses {'at first' if fits[0] else 'here'} only"


def ways_of_use(registration: Registration) -> list[str]:
    """A registration in words; if calls made it generic, the words of those that they had."""
    if registration.generic and registration.reason and registration.reason.startswith(WAYS_OF_USE):
        return registration.reason.removeprefix(WAYS_OF_USE).split("; ")
    return [f"{in_words(registration)}, of {' and '.join(registration.parameters)}"]


def in_words(registration: Registration | None) -> str:
    if registration is None:
        return "no block of its own"
    number = len(registration.uses)
    uses = "" if registration.generic else f" with {number} use{'s' * (number != 1)}"
    return f"{registration.layer}{uses}{f' ({registration.reason})' if registration.reason else ''}"
