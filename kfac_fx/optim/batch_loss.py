"""The loss of a step's batch as a function of the parameters, without a closure.

The user's loss is known only through the gradient g that its backward sends into the outputs z of the forward. Where z
are the natural parameters of the registered loss, a loss with this gradient is known up to a constant: between two
points it changes by

    h(z') - h(z) = <g, z' - z> + KL(p(z) || p(z'))

for all targets (the Bregman divergence of the log-partition function; Wainwright & Jordan 2008, section 5.2.2). For
other distributions this holds to second order. If the forward returns the loss itself, h(z') - h(z) = <g, z' - z>.

**A part of the batch.** On an accelerator a check takes the first eighth of the examples (`part_of_batch`). The norm of
a step is a mean over cases, and so is the loss. A bound and a guard need neither to more than a few digits, so an
eighth of the cases tells them. On a CPU a check takes the whole batch.

A part is a batch of its own. It has the first examples of all inputs, and the gradients g that the user's backward sent
into their outputs. These are multiplied by (all examples) / (those of the part), because the user's loss is a mean over
all of them. Where forward returns the loss itself, that of a part is a mean over its own cases, and its gradient stays.
Noise is the same at all points of a check, but not that of the user's forward, which draws numbers for all examples.

Where the outputs of an example depend on the others, as behind a batch normalization, the outputs of a part are others,
and the whole batch stays. One comparison a capture finds that out; the host waits for it.

**Precision.** A difference quotient of outputs loses its digits where the forward rounds coarsely. So the forwards of a
check compute in the precision of the parameters, whatever the user's forward was allowed: autocast around them is off,
and products of float32 are computed in float32. Where the user's forward rounded more coarsely, g is the gradient at
outputs that differ by this rounding.

Three things still round coarsely: parameters and inputs of half precision, casts that the graph has, and autocast in a
part of forward. Where casts or inputs need the autocast that was around the user's forward, so that their dtypes meet
those of the parameters, the check's forwards have it, too. So have models without a single graph, whose submodules were
captured under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule, LossTerms, at_least_one
from kfac_fx.compiled.jacobian_products import JacobianProducts, fisher_inner_products, products_of_tangents
from kfac_fx.compiled.loss_scale import (
    direct_gradients,
    fisher_places,
    hooked_leaves,
    losses_apart,
    meet,
    rounding_of_gradient,
    take_gradient,
)
from kfac_fx.linalg.matrices import (
    convolutions_are_full,
    full_precision,
    products_are_full,
    uneven_numbers,
    with_gradient,
)
from kfac_fx.linalg.processes import Replicas, is_sharded
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses import Normal
from kfac_fx.losses.declared import replaced
from kfac_fx.losses.distributions import LossFunction, Unnamed
from kfac_fx.passes import results
from kfac_fx.passes.graphs.labels import named_dtypes
from kfac_fx.passes.matrix import precise, real_numbers
from kfac_fx.passes.torch_private import pytree, version
from kfac_fx.passes.tracing.effects import RandomState, same_random
from kfac_fx.passes.tracing.signature import autocast, ignoring_autocast_of_graphs, kinds
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.equivalence import (
    coarsest_rounding,
    differ,
    difference_of_part,
    evaluated,
    first_rows,
    sampled_elements,
)
from kfac_fx.recording.recorder import Recorder

COARSE = 1e-6  # of itself, by which a rounding changes a number
# The autocast of the precision that is entered at present; None: none is.
ENTERED: ContextVar[tuple[tuple[str, torch.dtype], ...] | None] = ContextVar("ENTERED", default=None)


@dataclass(frozen=True)
class CheckPrecision:
    """How the check's forwards of one call compute."""

    rounding: float = 0.0  # the ε of the coarsest precision that takes part in them
    as_returned: bool = True  # the user's forward computed in the same one, so a check may take what it returned
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # (kind of device, dtype) around them; usually none

    @staticmethod
    def of_call(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckPrecision:
        """That for a call of the model, in the settings of which the user's forward has just run."""
        around = tuple((dict(autocast()) | dict(recorder.program.autocast)).items())
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if is_real(leaf)]
        cast = max_rounding(named_dtypes(recorder.program)) if recorder.whole else 0.0
        mixed = not recorder.whole or max(cast, max_rounding({leaf.dtype for leaf in tensors})) > COARSE
        around_check = around if mixed else ()
        rounding = max(cast, coarsest_rounding(recorder, (args, kwargs), around=bool(around_check)))
        devices = {parameter.device.type for parameter in recorder.model.parameters()}
        full = products_are_full() and convolutions_are_full(devices)
        return CheckPrecision(rounding, full and around == around_check, around_check)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Forwards inside have this precision. All settings are restored at the end."""
        if ENTERED.get() == self.autocast:  # nothing would change
            yield
            return
        with full_precision(everything=True), ignoring_autocast_of_graphs(), ExitStack() as stack:
            stack.callback(ENTERED.reset, ENTERED.set(self.autocast))
            chosen = dict(self.autocast)
            for kind in kinds():
                # Without a cache: dual numbers and tensors of a transformation must not outlive their level.
                dtype = chosen.get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
            yield


OWN_PRECISION = CheckPrecision()  # of parameters and inputs that do not round


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def max_rounding(dtypes: set[torch.dtype]) -> float:
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


SHARE = 1 / 8  # of the examples, that a check takes on an accelerator
NamedTensors = Mapping[str, Tensor]


@dataclass(eq=False)
class ObservedForward:
    """One forward of a step whose loss is measured."""

    recorder: Recorder
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: Any  # what the model returned, detached
    leaves: list[int]  # the returned leaves through which the loss is trained
    at_outputs: bool  # whether the first of these are the Fisher's outputs
    precision: CheckPrecision = OWN_PRECISION
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of the user's loss, by leaf
    weights: Weights | None = None  # of the forward
    otherwise: ObservedForward | None = None  # at the losses that forward returns: see `losses_apart`
    between: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)  # see `derivatives_between`
    meet: bool = False  # some of the Fisher's outputs are computed from others
    start: RandomState | None = None  # before the forward
    direct: dict[int, Tensor] | None = None  # see `direct_gradients`, once they have been asked for

    @cached_property
    def inputs(self) -> Any:
        """Those of the captured graph."""
        return self.recorder.capture.flatten(self.args, self.kwargs)

    @property
    def as_arrived(self) -> ObservedForward:
        """This, or that of the returned losses if gradients arrived there; at the leaves of both if each has a part of
        the loss, as that of forward and a term of the outputs have."""
        other, direct = self.otherwise, self.direct_gradients()
        if other is None or not other.gradients:
            return replace(self, gradients=direct)
        if not direct:
            return other
        return replace(other, leaves=[*other.leaves, *self.leaves], gradients={**other.gradients, **direct})

    def direct_gradients(self) -> dict[int, Tensor]:
        """The gradients that the user sends into each leaf. Into a part of a loss that is returned, too, the loss sends
        another one, which would count the part twice; so does x.T into x."""
        if self.meet and len(self.gradients) > 1:
            if self.direct is None:
                self.direct = direct_gradients(self.outputs_again(), self.gradients)
            return self.direct
        direct = dict(self.gradients)
        for later in sorted(self.between, key=lambda leaf: -len(self.between[leaf])):  # has all that an earlier one has
            for earlier, derivative in self.between[later].items():
                if later in direct and earlier in direct:
                    arrived = self.gradients[earlier]
                    rest = direct[earlier] - direct[later] * derivative.view_as(arrived)
                    direct[earlier] = torch.where(rest.abs() <= rounding_of_gradient(arrived), 0, rest)
        return direct

    def outputs_again(self) -> list[Any]:
        """The leaves that forward returns, as functions of the parameters."""
        live = {name: with_gradient(value.detach()) for name, value in self.recorder.live_parameters().items()}
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.precision.entered())
            if self.start is not None:
                stack.enter_context(same_random(self.start.devices))
                self.start.restore()
            return results.tree_leaves(self.recorder.outputs(live, self.inputs)[0])

    @staticmethod
    def of(
        recorder: Recorder,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        precision: CheckPrecision = OWN_PRECISION,
        start: RandomState | None = None,
    ) -> ObservedForward:
        """Observe the gradients that the backward sends into `outputs`, what the model returned.

        start: the random streams before the forward.
        """
        returned, spec = results.tree_flatten(outputs)
        leaves, at_outputs = hooked_leaves(recorder, returned)
        kept = [value.detach() if isinstance(value, Tensor) else value for value in returned]
        for leaf in leaves if at_outputs else ():
            kept[leaf] = kept[leaf].clone()  # the user or a CUDA graph may write over it before the step
        tree, weights = results.tree_unflatten(kept, spec), Weights.of(recorder)

        def at(leaves: list[int], at_outputs: bool) -> ObservedForward:
            forward = ObservedForward(recorder, args, kwargs, tree, leaves, at_outputs, precision, weights=weights)
            axes = recorder.axes_of_log_probabilities(outputs, fisher_places(recorder, leaves)) if at_outputs else {}
            for leaf in dict.fromkeys(leaves):
                take_gradient(returned[leaf], forward.take, leaf, axes.get(leaf))
            return forward

        between = derivatives_between(returned, leaves)
        forward = at(leaves, at_outputs)
        forward.between, forward.start = between, start
        forward.meet = at_outputs and recorder.whole and meet([returned[n] for n in leaves])
        if at_outputs and (losses := losses_apart(recorder, returned, leaves)):
            forward.otherwise = at(losses, False)
        return forward

    def gradient(self, leaf: int, like: Tensor) -> Tensor:
        """The gradient at a leaf as a tensor like its value; zero where none came."""
        return self.gradients.get(leaf, torch.zeros_like(like)).to(like)

    def take(self, leaf: int, gradient: Tensor | None) -> None:
        """gradient: None behind the node of a DistributedDataParallel, if the loss leaves this output out."""
        if gradient is None:
            return
        taken, self.direct = gradient.detach().clone(), None
        self.gradients[leaf] = taken + self.gradients[leaf] if leaf in self.gradients else taken


def derivatives_between(returned: Sequence[Any], leaves: Sequence[int]) -> dict[int, dict[int, Tensor]]:
    """The derivatives of returned numbers by those that they are computed from: of a loss by its parts. {leaf: {earlier
    leaf: derivative}}."""
    numbers = [leaf for leaf in dict.fromkeys(leaves) if returned[leaf].numel() == 1 and returned[leaf].requires_grad]
    found: dict[int, dict[int, Tensor]] = {}
    for leaf in numbers if len(numbers) > 1 else ():
        others = [other for other in numbers if other != leaf]
        derivatives = torch.autograd.grad(
            returned[leaf].sum(), [returned[other] for other in others], retain_graph=True, allow_unused=True
        )
        pairs = zip(others, derivatives, strict=True)
        if of_leaf := {other: derivative for other, derivative in pairs if derivative is not None}:
            found[leaf] = of_leaf
    return found


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters that a capture reads, at one time: where they lie, how often they were written, and on a CPU their
    norms, which alone tell of writes through `.data`."""

    places: tuple[tuple[int, int], ...]
    norms: Tensor | None  # None: none is on a CPU

    @staticmethod
    def of(recorder: Recorder) -> Weights:
        # FSDP2 moves sharded ones without a change.
        parameters = [p.detach() for p in recorder.live_parameters().values() if not is_sharded(p)]
        on_cpu = [p for p in parameters if p.device.type == "cpu" and p.is_floating_point() and p.element_size() > 1]
        norms = torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in on_cpu]) if on_cpu else None
        return Weights(tuple((p.data_ptr(), version(p)) for p in parameters), norms)

    def are(self, others: Weights) -> bool:
        """Whether none has changed from one time to the other."""
        if self.norms is None or others.norms is None:
            return self.norms is others.norms and self.places == others.places
        return self.places == others.places and torch.equal(self.norms, others.norms)


@dataclass
class Values:
    """The values that the loss of one forward depends on, at one point."""

    losses: LossTerms  # with the weights of their means over cases
    leaves: list[Tensor]
    fisher: tuple[Tensor, ...] = ()  # the Fisher's outputs, where forward returns a loss that is weighed by them
    losses_of: Callable[[Sequence[Tensor]], LossTerms] | None = None  # of other leaves; None: none has a computed mean

    @property
    def cases(self) -> int | Tensor:
        return self.losses[0][1].cases

    def leaf_of(self, loss: LossFunction) -> int | None:
        """The number of the leaf that is the inputs of this loss, and of no other one; None: there is none."""
        if sum(other.inputs is loss.inputs for _, other in self.losses) > 1:
            return None
        return next((number for number, leaf in enumerate(self.leaves) if leaf is loss.inputs), None)

    @property
    def computed(self) -> list[int]:
        """The places of the normal losses whose mean is computed from the leaves."""
        pairs = enumerate(self.losses)
        return [place for place, (_, loss) in pairs if isinstance(loss, Normal) and self.leaf_of(loss) is None]


@dataclass
class BatchLoss:
    """The mean loss over all observed forwards of a step.

    All values of a check are computed with the steps of recurrent layers written out if one of them is differentiated,
    and else by torch's kernels (`recording.equivalence`).
    """

    net: CompiledModule
    forwards: Sequence[ObservedForward]
    multiply_jacobian: JacobianProducts
    loss_scale: float  # the factor of the loss in the user's backward, as that of a GradScaler
    ggn: bool
    replicas: Replicas  # the processes that have parts of the batch, which may be of different sizes
    devices: tuple[torch.device, ...]
    start: RandomState | None  # the random streams before the first forward, so that noise is the same at all points
    alone: bool = True  # there was no other forward since the last step
    share: float = 1.0  # the part of the examples that `forwards` hold; see `part_of_batch`
    differentiated: bool = True  # values are differentiated, and not only compared

    @property
    def observed(self) -> bool:
        """Whether the gradient of every forward's outputs is known. Otherwise the loss is taken as linear in the
        parameters beside its curvature."""
        return all(forward.gradients for forward in self.forwards)

    @property
    def has_names(self) -> bool:
        """Whether all losses have names, and so an exact Fisher."""
        return all(forward.recorder.losses.are_known for forward in self.forwards)

    @property
    def rounding(self) -> float:
        """The ε of the coarsest precision that takes part in the forwards of a check."""
        return max(forward.precision.rounding for forward in self.forwards)

    @property
    def as_returned(self) -> bool:
        """Whether the user's forwards computed in the precision of those of a check."""
        return all(forward.precision.as_returned for forward in self.forwards)

    def agreed(self, flag: Tensor) -> bool:
        """Whether a flag, 0-dim, is true in all processes, which take the same decisions. The host waits."""
        return bool(self.replicas.mean(flag.to(torch.float32)) == 1)

    @contextmanager
    def same_noise(self) -> Iterator[None]:
        """Forwards inside have the noise of the user's forwards, and products are in full precision."""
        with same_random(self.devices), OWN_PRECISION.entered():
            if self.start is not None:
                self.start.restore()
            yield

    def at(self, parameters: NamedTensors) -> list[Values]:
        """The values at `parameters`, by name."""
        with self.same_noise():
            return [self.values(forward, parameters) for forward in self.forwards]

    def returned(self, parameters: NamedTensors) -> list[Values]:
        """The values at the parameters of the forwards, `parameters`, up to rounding: those that the forwards returned,
        if they returned the Fisher's outputs."""
        with self.same_noise():
            return [
                self.values_of(forward, forward.returned) if forward.at_outputs else self.values(forward, parameters)
                for forward in self.forwards
            ]

    def repeats(self, parameters: NamedTensors) -> bool:
        """Whether the forwards returned the values at `parameters`, those before the step.

        They did not if the weights were changed between forward and step, as by SAM or a sample of a posterior; if
        noise enters and there were several forwards, because others may have drawn in between; and if a forward
        changes a buffer that the next one reads. One comparison a capture finds the latter; the host waits.
        """
        for forward in self.forwards:
            recorder = forward.recorder
            if not isinstance(recorder.emitted, EmittedGraph) or (recorder.emitted.random and not self.alone):
                return False
            if forward.weights is None or not forward.weights.are(Weights.of(recorder)):
                return False
            if recorder.repeats is None and forward.at_outputs:
                with self.same_noise():
                    again = self.values(forward, parameters)
                    first = self.values_of(forward, forward.returned)
                of_first, of_second = (sampled_elements(list(values.leaves)) for values in (first, again))
                recorder.repeats = not bool(differ(of_first, of_second, forward.precision.rounding))
            if recorder.repeats is False:
                return False
        return True

    def values(self, forward: ObservedForward, parameters: NamedTensors) -> Values:
        recorder = forward.recorder
        with forward.precision.entered():
            if recorder.whole:
                outputs_at = recorder.outputs if self.differentiated else partial(evaluated, recorder)
                outputs, fisher = outputs_at(parameters, forward.inputs)
            else:  # a call that was not captured may come
                outputs, fisher = self.net.functional(parameters, forward.args, forward.kwargs)
            return self.values_of(forward, outputs, fisher)

    def values_of(self, forward: ObservedForward, outputs: Any, fisher: tuple[Tensor, ...] | None = None) -> Values:
        """The values of what the model returned. fisher: the Fisher's outputs; None: the observed leaves."""
        returned = results.tree_flatten(outputs)[0]
        leaves = [returned[n] for n in forward.leaves]
        if fisher is None:
            fisher = tuple(leaves[: len(fisher_places(forward.recorder, forward.leaves))])
        if not forward.recorder.losses.are_known:
            return Values(self.unnamed(forward, leaves), leaves)
        # Not `net.losses` for a whole graph, which looks for a capture of the call: a part may have a single example.
        whole, of = forward.recorder.whole, forward.recorder.losses

        def losses_of(others: Sequence[Tensor]) -> LossTerms:
            outputs_there, fisher_there = replaced(outputs, leaves, others), replaced(fisher, leaves, others)
            if not whole:
                return self.net.losses(outputs_there, fisher_there, call=(forward.args, forward.kwargs))
            return of.averaged(
                of.real(lambda new: replaced(outputs_there, fisher_there, new), fisher_there, forward.inputs)
            )

        weighed = whole and of.weigh_by_outputs and not forward.at_outputs
        values = Values(losses_of(leaves), leaves, fisher if weighed else ())
        if forward.at_outputs and values.computed:
            values.losses_of = losses_of
        return values

    def unnamed(self, forward: ObservedForward, leaves: Sequence[Tensor]) -> LossTerms:
        """The loss without a name on every output that a gradient has arrived at; or on the first, without any."""
        dims = dict(zip(forward.leaves, forward.recorder.emitted.dims_of_cases(len(leaves)), strict=True))
        outputs = dict(zip(forward.leaves, leaves, strict=True))
        arrived = [leaf for leaf in outputs if leaf in forward.gradients] or [*outputs][:1]
        terms = []
        for leaf in arrived:
            value, dim = outputs[leaf], dims[leaf]
            shapes = [other.gradients[leaf].shape for other in self.forwards if leaf in other.gradients]
            cases = sum(shape[dim] if shape else 1 for shape in shapes)
            gradient = forward.gradient(leaf, value)
            if value.dim():
                value, gradient = value.movedim(dim, 0), gradient.movedim(dim, 0)
            rows = precise(real_numbers(gradient)) * (cases / self.loss_scale)
            terms.append((1.0, Unnamed(real_numbers(value), rows)))
        return terms

    @OWN_PRECISION.entered()
    def change(self, before: Sequence[Values], after: Sequence[Values]) -> Tensor:
        """h(after) - h(before), []. `before`: where the gradients were observed. Without observed gradients: its
        curvature only."""
        total = self.cases(values.cases for values in before)
        change = self.zero(before)
        for forward, old, new in zip(self.forwards, before, after, strict=True):
            moved = differences(old.leaves, self.reweighted(forward, old, new))
            if forward.at_outputs or not forward.leaves:
                for (_, was), (weight, loss) in zip(old.losses, new.losses, strict=True):
                    share = weight / at_least_one(loss.cases) * old.cases / at_least_one(total)
                    number = old.leaf_of(was)
                    if number is None:
                        change = change + share * loss.divergence_from(was.inputs)
                    else:
                        gradient = self.gradient(forward, old, number, share)
                        change = change + share * was.change_behind(gradient, loss)
                        moved[number] = torch.zeros_like(moved[number])  # no part of the slope
            change = change + self.slope(forward, moved)
        return self.replicas.mean(change)

    @OWN_PRECISION.entered()
    def drift(self, before: Sequence[Values], after: Sequence[Values]) -> Tensor:
        """By how much more than `change` the returned loss changes, []. It is zero unless forward weighs its cases by
        its own outputs, without a gradient, as causal losses do: a step lowers the loss with the weights of before."""
        drift = self.zero(before)
        if not any(forward.recorder.losses.weigh_by_outputs for forward in self.forwards):
            return drift  # without a message between processes
        for forward, old, new in zip(self.forwards, before, after, strict=True):
            leaves = self.reweighted(forward, old, new)
            if leaves is not new.leaves:
                drift = drift + self.slope(forward, differences(leaves, new.leaves))
        return self.replicas.mean(drift)

    @OWN_PRECISION.entered()
    def value(self, at: Sequence[Values]) -> Tensor:
        """h where the gradients were observed, []; infinity where the gradient does not tell it."""
        total, value = self.cases(values.cases for values in at), self.zero(at)
        for forward, values in zip(self.forwards, at, strict=True):
            if not forward.gradients:
                return self.replicas.mean(torch.full_like(value, torch.inf))
            share, leaves = values.cases / at_least_one(total), list(values.leaves)
            solved = None
            if forward.at_outputs and values.computed:
                pairs = zip(forward.leaves, values.leaves, strict=True)
                solved = SolvedGradients.of(values, [forward.gradient(number, leaf) for number, leaf in pairs])
            for place, (weight, loss) in enumerate(values.losses if forward.at_outputs else ()):
                of_case = share * weight / at_least_one(loss.cases)
                number = values.leaf_of(loss)
                if solved is not None and place in solved.gradients:
                    gradient = precise(solved.gradients[place]) / self.loss_scale
                    of_loss = loss.value_behind(quotient_or_zero(gradient, of_case))
                    value = value + torch.where(solved.known[place], 0.0, torch.inf)
                elif number is None:
                    of_loss = loss.entropy()
                else:
                    of_loss = loss.value_behind(self.gradient(forward, values, number, of_case))
                    leaves[number] = torch.zeros_like(leaves[number])  # no part of the slope
                value = value + (torch.inf if of_loss is None else of_case * of_loss)
            if solved is not None:
                leaves = [torch.where(of, 0, leaf) for of, leaf in zip(solved.explained, leaves, strict=True)]
            value = value + self.slope(forward, leaves)
        return self.replicas.mean(value)

    @OWN_PRECISION.entered()
    def unit(self, at: Sequence[Values]) -> Tensor:
        """The square of the unit that losses without a name are measured in, [], because <d, F d> of their empirical
        Fisher is a squared change of the loss: the mean over cases of |N g_n|². A number that is the loss itself
        has its square."""
        total, squared = self.cases(values.cases for values in at), self.zero(at)
        for values in at:
            for _, loss in values.losses:
                if isinstance(loss, Unnamed):
                    share = values.cases / at_least_one(total) / at_least_one(loss.cases)
                    squared = squared + share * loss.squared_unit()
        return self.replicas.mean(squared)

    def gradient(self, forward: ObservedForward, at: Values, number: int, of_case: float | Tensor) -> Tensor:
        """That of the loss of a case at leaf `number`, of which the step's loss has `of_case`; zero where none came."""
        gradient = forward.gradient(forward.leaves[number], at.leaves[number])
        return quotient_or_zero(precise(real_numbers(gradient)) / self.loss_scale, of_case)

    def finite(self, at: Sequence[Values]) -> Tensor:
        """Whether the inputs of all losses are finite, in all processes; a 0-dim bool."""
        sums = [loss.inputs.sum() for values in at for _, loss in values.losses]
        return self.replicas.mean(torch.stack(sums).isfinite().all().to(sums[0].dtype)) == 1

    def along(self, parameters: NamedTensors, direction: NamedTensors) -> tuple[Tensor, Tensor, list[Values]]:
        """(<d, F d> with the exact Fisher of the batch, <∇h, d> through the observed outputs, [] each; the values at
        `parameters`)."""
        results: list[tuple[Tensor, Tensor, int | Tensor]] = []
        here: list[Values] = []
        with self.same_noise():
            for forward in self.forwards:
                found: list[Values] = []

                def inputs_of_losses(
                    at: Tensors, forward: ObservedForward = forward, found: list[Values] = found
                ) -> tuple[Tensor, ...]:
                    found[:] = [self.values(forward, at)]
                    return (*(loss.inputs for _, loss in found[0].losses), *found[0].leaves, *found[0].fisher)

                primals, pushed = self.multiply_jacobian.along(inputs_of_losses, parameters, [direction])
                number = len(found[0].losses) + len(found[0].leaves)
                results.append(self.products(forward, found[0], primals, [product[0] for product in pushed[:number]]))
                losses = [(weight, loss.at(at)) for (weight, loss), at in zip(found[0].losses, primals, strict=False)]
                here.append(Values(losses, list(primals[len(losses) : number]), tuple(primals[number:])))
        return (*self.mean_products(results), here)

    def inner_products(self, parameters: NamedTensors, directions: Sequence[NamedTensors]) -> Tensor:
        """<d_i, F d_j> with the exact Fisher of the batch, [k, k]. directions: by name."""
        differentiated, results = replace(self, differentiated=True), []
        with self.same_noise():
            for forward in self.forwards:
                here: list[Values] = []

                def losses(at: Tensors, forward: ObservedForward = forward, here: list[Values] = here) -> LossTerms:
                    here[:] = [differentiated.values(forward, at)]
                    return here[0].losses

                of_forward = fisher_inner_products(
                    losses, parameters, directions, ggn=self.ggn, multiply_jacobian=self.multiply_jacobian
                )
                results.append((of_forward, here[0].cases))
        return self.averaged(results)

    @OWN_PRECISION.entered()
    def norm(self, at: Sequence[Values]) -> Tensor:
        """A norm of the outputs that tells one batch from another, [] in float64: the fourth root of the sum of fourth
        powers, because normalized outputs have the same sum of squares on all batches, and probabilities the same sum.

        Zero where nothing tells batches apart: outputs that do not depend on the case, as those of a last layer whose
        weights are zero, and outputs that are not finite.
        """
        powers = [self.zero(at).double()]
        for values in at:
            for _, loss in values.losses:
                inputs = precise(real_numbers(loss.inputs.detach())).double()
                depends = loss.all_cases == 1 or (inputs != inputs[:1]).any()
                powers.append(torch.where(torch.as_tensor(depends), inputs.pow(4).sum(), 0.0))
        norm = self.replicas.mean(torch.stack(powers).sum()) ** 0.25
        return torch.where(norm.isfinite(), norm, 0.0)

    @OWN_PRECISION.entered()
    def between(self, before: Sequence[Values], after: Sequence[Values], step: Tensor) -> tuple[Tensor, Tensor]:
        """(<d, F d>, <∇h, d>) as `along`, by difference quotients: `after` is `before` a small `step` along d.

        It takes no derivative, so it costs one forward. Its relative error is that of a first-order quotient, `step`
        times the ratio of the second and the first derivative along d.
        """
        results = []
        for forward, old, new in zip(self.forwards, before, after, strict=True):
            primals, pushed = quotients(old, replace(new, leaves=self.reweighted(forward, old, new)), step)
            results.append(self.products(forward, old, primals, pushed))
        return self.mean_products(results)

    @OWN_PRECISION.entered()
    def products_between(self, before: Sequence[Values], after: Sequence[tuple[Sequence[Values], Tensor]]) -> Tensor:
        """<d_i, F d_j>, [k, k], as `inner_products`, by difference quotients as `between`. after: of k directions, the
        values a small step along them, and this step."""
        results = []
        steps = [step for _, step in after]
        for old, *new in zip(before, *(values for values, _ in after), strict=True):
            of_directions = [quotients(old, there, step)[1] for there, step in zip(new, steps, strict=True)]
            tangents = [torch.stack(of_loss) for of_loss in zip(*of_directions, strict=True)]
            losses = [(weight, loss.at(loss.inputs)) for weight, loss in old.losses]
            of_forward = products_of_tangents(losses, tangents[: len(losses)], self.ggn)
            results.append((of_forward, old.cases))
        return self.averaged(results)

    def averaged(self, results: Sequence[tuple[Tensor, int | Tensor]]) -> Tensor:
        """From (products, cases) of every forward: the products of the batch, averaged by cases."""
        total = self.cases(cases for _, cases in results)
        products = [of_forward * (cases / at_least_one(total)) for of_forward, cases in results]
        return self.replicas.mean(torch.stack(products).sum(0))

    def mean_products(self, results: Sequence[tuple[Tensor, Tensor, int | Tensor]]) -> tuple[Tensor, Tensor]:
        """From (<d, F d>, slope, cases) of every forward: those of the batch."""
        fisher = self.averaged([(of_forward, cases) for of_forward, _, cases in results])
        return fisher, self.replicas.mean(torch.stack([slope for _, slope, _ in results]).sum())

    def products(
        self, forward: ObservedForward, values: Values, primals: Sequence[Tensor], pushed: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, int | Tensor]:
        """(<d, F d>, slope, cases) of one forward."""
        fisher = torch.zeros((), device=primals[0].device)
        for (weight, loss), at, tangent in zip(values.losses, primals, pushed, strict=False):
            here = loss.at(at)
            fisher = fisher + weight / at_least_one(here.cases) * here.squared_norm(precise(tangent), self.ggn)
        return fisher, self.slope(forward, pushed[len(values.losses) :]), values.cases

    def slope(self, forward: ObservedForward, vectors: Sequence[Tensor]) -> Tensor:
        """The inner product of the observed gradients and vectors over the leaves, each once."""
        pairs = [
            (real_numbers(forward.gradients[leaf].to(vector)), real_numbers(vector))
            for place, (leaf, vector) in enumerate(zip(forward.leaves, vectors, strict=True))
            if leaf in forward.gradients and leaf not in forward.leaves[:place]
        ]
        terms = [(g * v).sum(dtype=torch.promote_types(v.dtype, torch.float32)) for g, v in pairs]
        device = next((vector.device for vector in vectors), next(self.net.parameters()).device)
        return torch.stack(terms).sum() / self.loss_scale if terms else torch.zeros((), device=device)

    def cases(self, of_forwards: Iterable[int | Tensor]) -> int | Tensor:
        """The number of cases in this process; of several, their mean, by which the terms of a case are divided."""
        total = sum(of_forwards)
        if self.replicas.number == 1:
            return total
        return self.replicas.mean(
            torch.as_tensor(total, dtype=torch.float32, device=next(self.net.parameters()).device)
        )

    def reweighted(self, forward: ObservedForward, before: Values, after: Values) -> list[Tensor]:
        """The leaves after a step. A returned loss has the weights of before, of which its gradient is."""
        if not after.fisher or sum(leaf.numel() == 1 for leaf in after.leaves) != 1:
            return after.leaves
        change = forward.recorder.losses.reweighted(before.fisher, after.fisher, forward.inputs)
        return [leaf + change.view_as(leaf) if leaf.numel() == 1 else leaf for leaf in after.leaves]

    def zero(self, values: Sequence[Values]) -> Tensor:
        return torch.zeros((), device=values[0].losses[0][1].inputs.device)


@dataclass(frozen=True)
class SolvedGradients:
    """The gradients at the inputs of losses, solved from those at the leaves that the inputs are computed from.

    Let J be the derivative of the inputs z of all losses with respect to the leaves, so that a gradient g at z is Jᵀ g
    at the leaves. Differences from data, weights of cases, slices and other orders make every number of the leaves a
    part of at most one number of z. Then J Jᵀ is a diagonal D, and g = D⁻¹ J Jᵀ g.
    """

    gradients: dict[int, Tensor]  # by the place of a loss, of the shape of its inputs; zero where these have no leaf
    known: dict[int, Tensor]  # by the place of a loss, whether J Jᵀ is diagonal in its rows, 0-dim
    explained: list[Tensor]  # of each leaf, where its gradient is Jᵀ g up to rounding

    @staticmethod
    @torch.enable_grad()
    def of(values: Values, gradients: Sequence[Tensor]) -> SolvedGradients:
        """Those at the means that are computed from the leaves. gradients: at the leaves."""
        assert values.losses_of is not None, "bug in kfac_fx: no losses of other leaves"
        leaves = [leaf.detach().requires_grad_() for leaf in values.leaves]
        inputs = [loss.inputs for _, loss in values.losses_of(leaves)]
        tied = [place for place, z in enumerate(inputs) if z.requires_grad]
        zs = [inputs[place] for place in tied]
        ones = [torch.ones_like(z, requires_grad=True) for z in zs]

        def pull(of_inputs: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
            sent = torch.autograd.grad(
                zs, leaves, of_inputs, retain_graph=True, create_graph=create_graph, materialize_grads=True
            )
            return list(sent)

        pulled = pull(ones, create_graph=True) if zs else []
        linked = [place for place, of_leaf in enumerate(pulled) if of_leaf.requires_grad]

        def push(of_leaves: Sequence[Tensor]) -> list[Tensor]:
            if not linked:
                return [torch.zeros_like(z) for z in zs]
            sent = [of_leaves[place].to(pulled[place].dtype) for place in linked]
            of = [pulled[place] for place in linked]
            return list(torch.autograd.grad(of, ones, sent, retain_graph=True, materialize_grads=True))

        uneven = uneven_numbers(zs)
        diagonal, mixed = push([of.detach() for of in pulled]), push(pull(uneven) if zs else [])
        of_inputs = push(gradients)
        rounding = max_rounding({tensor.dtype for tensor in (*leaves, *zs)})
        solved = {place: torch.zeros_like(inputs[place]) for place in values.computed}
        known = {place: torch.ones((), dtype=torch.bool, device=inputs[place].device) for place in values.computed}
        for place, d, m, u, g in zip(tied, diagonal, mixed, uneven, of_inputs, strict=True):
            if place in solved:
                solved[place] = torch.where(d > 0, g / torch.where(d > 0, d, 1), 0)
                known[place] = ((m - d * u).abs() <= rounding**0.5 * d).all()
        sent = [solved.get(place, torch.zeros_like(inputs[place])) for place in tied]
        again = pull(sent) if zs else [torch.zeros_like(leaf) for leaf in leaves]
        explained = [(there - g).abs() <= rounding_of_gradient(g) for there, g in zip(again, gradients, strict=True)]
        return SolvedGradients(solved, known, explained)


def quotients(old: Values, new: Values, step: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(the inputs of the losses, the difference quotients of these and of the leaves)."""
    primals = [loss.inputs for _, loss in old.losses]
    there = [loss.inputs for _, loss in new.losses]
    changes = [*(b - a for a, b in zip(primals, there, strict=True)), *differences(old.leaves, new.leaves)]
    return primals, [change / step for change in changes]


def differences(old: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """new - old. A number that is NaN at both is the mean of a loss over no cases, as of targets that are all ignored:
    it is NaN at all parameters, with a gradient of zero, so it does not change."""
    pairs = zip(old, new, strict=True)
    return [b - a if a.numel() > 1 else torch.where(a.isnan() & b.isnan(), 0.0, b - a) for a, b in pairs]


def quotient_or_zero(number: Tensor, share: float | Tensor) -> Tensor:
    """number / share; 0 for the share of a forward without cases, which is 0."""
    if isinstance(share, Tensor):
        return torch.where(share == 0, 0, number / share)
    return number / share if share else torch.zeros_like(number)


# --- the part of a batch that a check takes ---------------------------------------------------------------------------


def share_of_checks(kinds: Iterable[str], processes: int) -> float:
    """The part of the examples that the checks of "eigen_moments" take.

    Args:
        kinds: of the devices that hold the parameters.
        processes: that take the same step. The parts of several would have to be parts for all of them.
    """
    return SHARE if processes == 1 and "cpu" not in set(kinds) else 1.0


def part_of_batch(batch: BatchLoss, share: float, parameters: Mapping[str, Tensor]) -> tuple[BatchLoss, str | None]:
    """(the loss of the first `share` of the examples of every forward, None), or (`batch`, why it is no measure).

    share: it is rounded up to whole examples. parameters: by name, of the forwards.
    """
    if share >= 1.0:
        return batch, None
    for forward in batch.forwards:
        reason = against_part(forward, share, parameters)
        if reason is not None:
            return batch, reason
    return replace(batch, forwards=[part_of_forward(forward, share) for forward in batch.forwards], share=share), None


def part_of_forward(forward: ObservedForward, share: float) -> ObservedForward:
    """The forward of the first examples, with the gradients of their mean loss."""
    recorder, gradients = forward.recorder, forward.gradients
    total, wanted = examples_of(forward, share)
    if wanted == total:
        return forward
    if forward.at_outputs:
        dims = dict(zip(forward.leaves, recorder.emitted.dims_of_cases(len(forward.leaves)), strict=True))
        factor = total / wanted
        gradients = {
            leaf: precise(first_rows(gradient, dims[leaf], total, wanted)) * factor if gradient.dim() else gradient
            for leaf, gradient in gradients.items()
        }
    args, kwargs = recorder.part_of_call(forward.args, forward.kwargs, share)
    precision = replace(forward.precision, as_returned=False)
    return replace(forward, args=args, kwargs=kwargs, returned=None, gradients=gradients, precision=precision)


def examples_of(forward: ObservedForward, share: float) -> tuple[int, int]:
    """The numbers of examples in the batch of a forward and in a part of it."""
    recorder = forward.recorder
    values = forward.inputs
    return recorder.emitted.examples(values), recorder.emitted.examples(recorder.emitted.part(values, share))


def against_part(forward: ObservedForward, share: float, parameters: Mapping[str, Tensor]) -> str | None:
    """Why a part of the batch of a forward is no measure of it; None if it is one."""
    recorder = forward.recorder
    if not isinstance(recorder.emitted, EmittedGraph):
        return "no single graph holds the model"
    if recorder.program.mask is not None:
        return "of padded positions a part may hold others than the batch"
    if not recorder.losses.are_known and any(forward.gradients[leaf].dim() == 0 for leaf in forward.gradients):
        return "the loss that forward returns has no name, and a part may have another one"
    if not forward.at_outputs and any(gradient.numel() > 1 for gradient in forward.gradients.values()):
        return "the loss has a term of the outputs next to that of forward"
    if recorder.losses.given is None:
        if any(site.reduction == "sum" for site in recorder.emitted.loss_sites):
            return "forward computes a loss that is a sum over cases"
        if recorder.losses.of_inputs:
            return "forward computes a loss that ignores some targets, or weighs them, and a part may have no others"
    total, wanted = examples_of(forward, share)
    if wanted == total:
        return None
    if recorder.parts_differ is None:
        with forward.precision.entered():
            differs = difference_of_part(recorder, forward.inputs, wanted, parameters, forward.precision.rounding)
        recorder.parts_differ = differs or ""
    return recorder.parts_differ or None
