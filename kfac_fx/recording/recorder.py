"""Recording: an emitted model run on a batch of its own or in the user's training step, and its statistics.

Recording never changes training. `Recorder.record` works on detached parameters, copies of the buffers and a forked
random stream. `Recorder.record_in_training` returns the outputs of the model, and the user's backward fills the probes.

**Gathering**: the rows of all uses of one weight behind each other, so that there is one product for many uses.

    x_0, x_1, ... -> taps, which hand over r_t and d_t -> [r_0, r_1, ...], [d_0, d_1, ...] -> A, G and count in one sum

A recurrent layer uses its weight at every step, with a few rows. A product of few rows takes as long as one of many:
its result is a whole matrix, which is added to the last one. So the taps of a registration with several uses hand their
rows over, and the sums are made of many uses at once.

The probes enter the function `Gather`, which returns a *token*, a single zero. The token enters the taps instead of the
probes. Its "gradient" says nothing, but autograd computes it. So the backward of `Gather` runs behind those of all the
taps, and returns the sums as the gradients of the probes. A tap that the loss leaves out hands over nothing. Autograd
runs first what was made last, so the token is made at the first use: its backward then follows that of this use, and
not those of all layers, and the sums can travel while the backward goes on (`kfac_fx.estimator.estimator`).

The rows wait in a list, which takes memory in addition to that of autograd. So the list is summed up once it has
`TIMES` as many numbers as the factors, and `FEW` at least, and at once if there was one use. A compiler cannot trace
the list, and vmap over cotangents would need a list for itself. So compiled and exact recordings have a sum for every
use.

**Without sampling**: the second moments of all sources, in chunks that fit into a bound on memory.

A source of a loss is one coordinate of its outputs, for all cases at once, which is exact wherever cases are kept
apart. Gradients that are summed over cases, as those of generic parameters, take the coordinates of one case at a time.
So do losses with more rows than the batch has examples, as logits [examples · positions, classes] have, and models in
which cases meet, as in batch normalization.
The cotangents of a chunk go through the graph together by vmap where that is possible, else one by one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nested import nested_tensor_from_jagged

from kfac_fx.linalg.arguments import a_share, several_names, whole_number
from kfac_fx.linalg.matrices import (
    dense_or_zero,
    full_precision,
    full_precision_in_eager,
    pulled,
    strided_parts,
    with_gradient,
)
from kfac_fx.linalg.processes import averaged_unsharded, is_sharded, unsharded
from kfac_fx.linalg.vectors import Tensors, split
from kfac_fx.losses.declared import Division, LossSpec, RegisteredLosses, WeightedLosses
from kfac_fx.losses.distributions import (
    Categorical,
    Cotangents,
    LossPairs,
    axis_of_log_probabilities,
    check_mode,
    exact_sources,
    is_exact,
    number_of_sources,
    one_source,
)
from kfac_fx.passes import results
from kfac_fx.passes.approximations import Approximation, Statistic, named
from kfac_fx.passes.cases import are_placed_by_data, kept_apart
from kfac_fx.passes.complex_parameters import original
from kfac_fx.passes.errors import UntraceableError, fatal, first_line, warn_user
from kfac_fx.passes.graphs.edit import attribute
from kfac_fx.passes.graphs.labels import ancestors, once
from kfac_fx.passes.graphs.operations import AS_COMPLEX, op_name
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.matrix import real_numbers, without_autocast
from kfac_fx.passes.torch_private import backward_here, class_of, pytree, transforms
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.calls import map_tensors
from kfac_fx.passes.tracing.effects import OfOneRun, accelerators, same_random
from kfac_fx.passes.tracing.settings import ForwardSettings
from kfac_fx.passes.tracing.signature import is_nested
from kfac_fx.recording.emitted import EmittedGraph, EmittedModel, RunOutputs, lasting
from kfac_fx.recording.masks import LeftOut, rows_left_out
from kfac_fx.recording.meeting_cases import LossRows, collecting, keys_that_meet
from kfac_fx.recording.model_checks import refuse_without_values
from kfac_fx.recording.output_losses import OutputLosses, probably_mean
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import (
    Key,
    Moments,
    PendingMoments,
    Rows,
    additive,
    behind_each_other,
    flat,
    with_twins,
    without_twins,
)
from kfac_fx.recording.taps import (
    ROBERTS_STEPS,
    WAITING,
    RowsOf,
    Tap,
    make_probes,
    none_is_none,
    with_cached_signature,
    writable,
)

CHUNK_BYTES = 1 << 30  # that a chunk of cotangents may take
VMAP_TOLERANCE = 1e-2  # relative; right gradients agree to the rounding of their dtype, bfloat16's at the worst
Statistics = dict[str, Tensor]  # of one registration, by name


class SavedBytes:
    """Counts the bytes that a forward under `watched` saves for its backward.

    This is about the memory that one cotangent needs on its way back.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        def note(tensor: Tensor) -> Tensor:
            parts = [tensor] if tensor.layout is torch.strided else strided_parts(tensor)
            for storage in (part.untyped_storage() for part in parts):
                self.sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield


class Pullback:
    """Vector-Jacobian products of `outputs` with respect to `leaves`, for [k, ...] cotangents at once; a single one
    goes back without vmap.

    loop_reason: why cotangents go one by one, once vmap has failed; None before that. An error that is not vmap's own
        is raised again when they go one by one.
    verify: whether to compare the first result of vmap with that of cotangents one by one, because the rules of some
        operations of torch are wrong (torch.cdist). The host waits for the comparison.
    """

    def __init__(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], verify: bool = False, loop_reason: str | None = None
    ) -> None:
        self.outputs, self.leaves = outputs, leaves
        self.verify, self.loop_reason = verify, loop_reason

    def __call__(self, cotangents: Cotangents) -> list[Tensor]:
        """[k, *leaf.shape] for every leaf; zeros for a leaf that no output depends on."""
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        if not pairs:  # a loss that no recorded parameter is behind
            number = next(len(cotangent) for cotangent in cotangents if cotangent is not None)
            return [leaf.new_zeros(number, *leaf.shape) for leaf in self.leaves]
        outputs, batched = [output for output, _ in pairs], [cotangent for _, cotangent in pairs]

        def grad(*vectors: Tensor) -> tuple[Tensor, ...]:
            return tuple(dense_or_zero(pulled(outputs, vectors, self.leaves, keep=True), self.leaves))

        if self.loop_reason is None and len(batched[0]) > 1:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop because")
                    together = list(torch.vmap(grad)(*batched))
                self.loop_reason = self.difference(together, grad, batched)
                if self.loop_reason is None:
                    return together
            except RuntimeError as error:  # of any kind: torch has no class for an operation that vmap does not support
                if fatal(error):
                    raise
                self.loop_reason = f"vmap is not possible here: {first_line(error)}"
        if len(batched[0]) == 1:
            return [gradient.unsqueeze(0) for gradient in grad(*(vectors[0] for vectors in batched))]
        each = [grad(*vectors) for vectors in zip(*batched, strict=True)]
        return [torch.stack(grads) for grads in zip(*each, strict=True)]

    def difference(
        self, together: Sequence[Tensor], grad: Callable[..., tuple[Tensor, ...]], batched: Sequence[Tensor]
    ) -> str | None:
        """How the first result differs from that of its first and last cotangent one by one; None if it does not."""
        if not self.verify or not batched:
            return None
        self.verify = False
        for n in dict.fromkeys((0, len(batched[0]) - 1)):
            alone = grad(*(vectors[n] for vectors in batched))
            sizes = [float(gradient.norm()) for gradient in alone]
            for gradients, gradient, size in zip(together, alone, sizes, strict=True):
                error, noise = float((gradients[n] - gradient).norm()), torch.finfo(gradient.dtype).eps ** 0.75
                if error > VMAP_TOLERANCE * size and error > noise * max(sizes):
                    apart = f"{error / size:.0%} apart" if size else "which are zero"
                    return f"vmap gives other gradients than cotangents one by one, {apart}: a fault of torch"
        return None


@dataclass
class ExactPass:
    """One forward, and all sources sent back through it.

    Attributes:
        outputs: the Fisher's outputs.
        leaves: the outputs as constants, on which `losses` are built.
        probes: one mapping a registration.
        parameters: leaves of the forward by name, those of generic registrations at least.
        saved: bytes that one cotangent needs on its way back.
        memory: bytes that a chunk of cotangents may take.
        examples: the number of examples of the batch.
        meeting: the registrations whose cases meet; see `keys_that_meet`.
        verify, loop_reason: see `Pullback`.
        together: whether cotangents went back together.
    """

    mode: str
    registrations: Sequence[Registration]
    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    losses: LossPairs
    probes: Sequence[Mapping[str, Tensor]]
    parameters: Mapping[str, Tensor]
    saved: int
    memory: int
    examples: int
    meeting: frozenset[Key] = frozenset()
    verify: bool = False
    loop_reason: str | None = None
    together: bool = False

    @property
    def rows_reason(self) -> str | None:
        """Why sources are of one row of a loss each, and not of all: the gradients of the rows of an example add up."""
        for _, loss in self.losses:
            if loss.inputs.dim() and 0 < self.examples < loss.inputs.shape[0]:
                return f"a loss of {list(loss.inputs.shape)} has several rows for each of {self.examples} examples"
        if self.meeting:
            names = ", ".join(name for key in sorted(self.meeting)[:2] for name in key)
            more = f" and {len(self.meeting) - 2} more" if len(self.meeting) > 2 else ""
            return (
                f"cases meet or change places between {names}{more} and the loss, as in batch normalization or a "
                "contrastive loss"
            )
        return None

    def statistics(self) -> dict[Key, Statistics]:
        """Additive sums of every registration over all sources."""
        total: dict[Key, Statistics] = {}
        for free in (False, True):
            self.add_structured(total, free)
        whole = [registration for registration in self.registrations if has_whole_gradients(registration, self.meeting)]
        names = list(dict.fromkeys(name for registration in whole for name in registration.owners))
        leaves = [self.parameters[name] for name in names]
        for grads in or_none(self.sources(leaves, by_case=True), leaves):
            parts = split(dict(zip(names, grads, strict=True)), whole, lead=1)
            for registration in whole:
                flat = flat_gradients(registration, parts, len(grads[0]))
                flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
                sums = additive(registration.structure, {"per_case": flat})
                add_chunk(total, registration.parameters, sums)
        return total

    def add_structured(self, total: dict[Key, Statistics], free: bool) -> None:
        """Add the sums of registrations whose gradients are summed over cases (`free`: they have uses that do not
        depend on the batch), or of the others."""
        structured = [
            (registration, probes)
            for registration, probes in zip(self.registrations, self.probes, strict=True)
            if not has_whole_gradients(registration, self.meeting)
            and any(use.batch_independent for use in registration.uses) is free
        ]
        named_leaves = [(name, probe) for _, probes in structured for name, probe in probes.items()]
        of_inputs = [probe for name, probe in named_leaves if named(name).power == 0]
        leaves = [probe for name, probe in named_leaves if named(name).power > 0]
        masked = any(use.mask_dims for registration, _ in structured for use in registration.uses)
        both = bool(leaves) and not masked and self.number_of_sources(free) == 1  # one source reaches what any reaches
        inputs = [] if both else self.of_inputs(of_inputs)
        for grads in or_none(self.sources(leaves + of_inputs if both else leaves, by_case=free), leaves):
            each = iter(grads)
            once = iter([grad[0] for grad in grads[len(leaves) :]] if both else inputs)
            for registration, probes in structured:
                chunk = {name: next(each if named(name).power > 0 else once) for name in probes}
                sums = chunk_sums(registration.structure, chunk, registration.parameters not in total)
                add_chunk(total, registration.parameters, sums)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the parameters, summed over all sources."""
        total: dict[str, Tensor] = {}
        for grads in self.sources(list(self.parameters.values())):
            for name, grad in zip(self.parameters, grads, strict=True):
                total[name] = total.get(name, 0) + grad.sum(0)
        return total

    def of_inputs(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """One source through all losses: statistics of inputs are recorded wherever any loss reaches."""
        if not leaves:
            return []
        inputs = [loss.inputs for _, loss in self.losses]
        cotangents = pulled(inputs, [torch.ones_like(value) for value in inputs], self.leaves, keep=True)
        batched: Cotangents = [None if vector is None else vector.unsqueeze(0) for vector in cotangents]
        return [grad[0] for grad in self.pullback(leaves)(batched)]

    def number_of_sources(self, by_case: bool) -> int:
        return number_of_sources(self.losses, self.mode, by_case or self.rows_reason is not None)

    def pullback(self, leaves: Sequence[Tensor]) -> Pullback:
        return Pullback(self.outputs, leaves, self.verify, self.loop_reason)

    def sources(self, leaves: Sequence[Tensor], by_case: bool = False) -> Iterator[list[Tensor]]:
        """Gradients of the leaves [k, ...], chunk by chunk."""
        if not leaves:
            return
        size = self.saved + sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        total, by_case = self.number_of_sources(by_case), by_case or self.rows_reason is not None
        chunk = max(1, min(self.memory // max(1, size), total))
        pullback = self.pullback(leaves)
        chunks = exact_sources(self.mode, self.losses, self.leaves, chunk, by_case)
        for cotangents in tracked(chunks, total, f"{self.mode}: {total} backward passes"):
            yield pullback(cotangents)
            self.together = self.together or chunk > 1
            self.loop_reason = self.loop_reason or pullback.loop_reason


def has_whole_gradients(registration: Registration, meeting: Collection[Key]) -> bool:
    """Whether an exact pass squares gradients of parameters: without rows, or where cases meet, of which rows are."""
    return registration.generic or (registration.parameters in meeting and not registration.structure.kronecker)


def flat_gradients(registration: Registration, parts: Mapping[str, Tensor], sources: int) -> Tensor:
    """[k, numbers of the block], from the gradients of its parameters [k, ...] by name."""
    if registration.matrix is None:
        of_names = [parts[name] for name in registration.parameters]
        return torch.cat([part.reshape(len(part), math.prod(part.shape[1:])) for part in of_names], dim=1)
    matrix = registration.matrix
    each = [matrix.pack({name: parts[name][k] for name in registration.parameters}) for k in range(sources)]
    return (
        torch.stack(each).flatten(1)
        if each
        else parts[registration.parameters[0]].new_zeros(0, math.prod(matrix.shape))
    )


def or_none(chunks: Iterable[list[Tensor]], leaves: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The chunks; without any, one of the gradients of no source. A batch without cases has sums, too."""
    empty = True
    for chunk in chunks:
        empty = False
        yield chunk
    if empty:
        yield [leaf.new_zeros(0, *leaf.shape) for leaf in leaves]


def chunk_sums(approximation: Approximation, chunk: Mapping[str, Tensor], first: bool) -> Statistics:
    """Sums over a chunk of sources. Statistics of inputs count once, in the first chunk; squares are summed over
    sources, gradients stay side by side.

    chunk: by statistic [k, ...]; of inputs the sum of `of_inputs`.
    """
    sums: Statistics = {}
    for name, value in chunk.items():
        power = named(name).power
        sums[name] = value.sum(0) if power == 2 else value if power or first else torch.zeros_like(value)
    return additive(approximation, without_twins(sums))


def add_chunk(total: dict[Key, Statistics], key: Key, sums: Statistics) -> None:
    total[key] = {name: value + sums[name] for name, value in total[key].items()} if key in total else sums


TIMES = 2  # the numbers of the factors, that may wait
FEW = 1 << 20  # numbers


class WaitingRows:
    """The rows of one forward and one registration that wait to be summed up, by the number of their backward.

    A backward may run inside of another one, as in the hooks of equilibrium models. It brings rows of its own.

    Attributes:
        names: of the statistics that are made of them.
        most: numbers that may wait.
        uses: how many there were so far.
    """

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.names, self.most, self.uses = names, most, 0
        self.of_backward: dict[int, RowsOfBackward] = {}

    def add(self, rows: Rows) -> None:
        now = backward_here()
        if now not in self.of_backward:
            self.of_backward[now] = RowsOfBackward(self.names, self.most if self.uses > 1 else 0)
        self.of_backward[now].add(rows)

    def take(self) -> dict[str, Tensor]:
        """The sums of this backward by name; empty if it brought no rows. Those of backwards inside of it, which did
        not reach the probes, are forgotten."""
        now = backward_here()
        own = self.of_backward.pop(now, None)
        self.of_backward = {number: rows for number, rows in self.of_backward.items() if number < now}
        return {} if own is None else own.take()


class RowsOfBackward:
    """The rows of one backward that wait, and the sums of earlier ones; as of `WaitingRows`."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.names, self.most = names, most
        self.rows: list[Rows] = []
        self.numbers = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, rows: Rows) -> None:
        if rows.repeats != 1 or rows.routed:  # their sums have factors of their own
            self.sum_up(rows)
            return
        if self.rows and not are_alike(self.rows[0], rows):
            self.sum_up_waiting()
        self.rows.append(rows)
        self.numbers += rows.x.numel() + rows.d.numel()
        if self.numbers > self.most:
            self.sum_up_waiting()

    def sum_up_waiting(self) -> None:
        rows = behind_each_other(self.rows)
        self.rows, self.numbers = [], 0
        self.sum_up(rows)

    def sum_up(self, rows: Rows) -> None:
        for name in self.names:
            value = named(name).of(rows)
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def take(self) -> dict[str, Tensor]:
        if self.rows:
            self.sum_up_waiting()
        return self.sums


def are_alike(first: Rows, second: Rows) -> bool:
    """Whether rows fit behind each other: they differ in the number of cases at most."""
    pairs = (first.x, second.x), (first.d, second.d)
    same = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device for a, b in pairs)
    return same and (first.mask is None) == (second.mask is None)


class Gather(torch.autograd.Function):
    """(waiting rows, probes) -> a token, behind whose gradient the backward returns the sums."""

    @staticmethod
    def forward(waiting: WaitingRows, *probes: Tensor) -> Tensor:
        return probes[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        none_is_none(ctx)
        ctx.waiting = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = grads
        if token is None:
            return None, *(None for _ in ctx.waiting.names)
        with torch.no_grad(), full_precision_in_eager(), without_autocast(token.device):
            sums = ctx.waiting.take()
        return None, *(sums.get(name) for name in ctx.waiting.names)


class HandOver(torch.autograd.Function):
    """(output, input, waiting rows, their token, the function of the use to its rows, attributes) -> the output."""

    @staticmethod
    def forward(output: Tensor, input: Tensor, waiting: WaitingRows, token: Tensor, *rest: Any) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, input, ctx.waiting, token, ctx.rows_of, *values = inputs
        ctx.is_tap, ctx.zero = True, token.detach()
        none_is_none(ctx)
        ctx.sizes = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(input, *(value for value in values if isinstance(value, Tensor)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (output_grad,) = grads
        if output_grad is None:  # the loss leaves this use out, so it has no rows
            return tuple(None for _ in ctx.needs_input_grad)
        # A view would keep the graph that its base is a part of, which keeps the waiting rows.
        input, *tensors = (tensor.detach() for tensor in ctx.saved_tensors)
        saved, grad = iter(tensors), output_grad.detach() if output_grad.requires_grad else output_grad
        values = [next(saved) if size is None else size for size in ctx.sizes]
        with torch.no_grad(), full_precision_in_eager(), without_autocast(output_grad.device):
            ctx.waiting.add(ctx.rows_of(grad, input, values))
        return output_grad, None, None, ctx.zero, *(None for _ in ctx.needs_input_grad[4:])


with_cached_signature(Gather)
with_cached_signature(HandOver)


class Waiting:
    """The rows of a registration that wait, and their token, as its taps get them among their probes."""

    def __init__(self, probes: Mapping[str, Tensor]) -> None:
        """probes: of the statistics that are made of the rows."""
        self.probes = probes
        self.rows = WaitingRows(tuple(probes), max(FEW, TIMES * sum(probe.numel() for probe in probes.values())))

    @property
    def names(self) -> Sequence[str]:
        return self.rows.names

    @cached_property
    def token(self) -> Tensor:
        with torch.enable_grad():  # the first use may be one without a gradient
            token: Tensor = cast(Any, Gather).apply(self.rows, *self.probes.values())
        return token

    def hand_over(self, output: Tensor, input: Tensor, rows_of: RowsOf, tensors: Sequence[Any]) -> Tensor:
        """The output of a use, whose backward adds its rows to those that wait. tensors: its attributes."""
        self.rows.uses += 1
        handed: Tensor = cast(Any, HandOver).apply(output, input, self.rows, self.token, rows_of, *tensors)
        return handed


def adds_up(statistic: Statistic) -> bool:
    """Whether a statistic is a sum over rows, whatever their order and their uses."""
    return (bool(statistic.side) or not statistic.power) and not (statistic.lagged or statistic.transposed)


def gathered(
    registrations: Iterable[Registration], probes: Iterable[dict[str, Tensor] | None], once: bool
) -> list[dict[str, Any] | None]:
    """The probes of a forward, with `Waiting` for registrations that have several uses.

    once: whether a use is called once in the forward; else one use may have several calls.
    """
    with_waiting: list[dict[str, Any] | None] = []
    for registration, of_registration in zip(registrations, probes, strict=True):
        several = len(registration.uses) > 1 or not once
        sums = {
            name: probe
            for name, probe in (of_registration or {}).items()
            if several and probe.requires_grad and adds_up(named(name))
        }
        with_waiting.append(
            {**of_registration, WAITING: Waiting(sums)} if of_registration and sums else of_registration
        )
    return with_waiting


some_bytes = whole_number(1, "bytes")


@dataclass
class Recorder:
    """One capture of a model, with the ways to record from it.

    Attributes:
        emitted: the model with its taps, and how it runs.
        loss: the user's; None if forward computes it.
        statistics: the names of the statistics by registration (its parameters); None: those that its block needs.
        proven: whether the registration proof was conclusive.
        settings: what the capture is specialized to beside its inputs; None: nothing.
        apart: parameters whose block this capture cannot record, because it uses them in another way; all of them are
            frozen.
        loop_reason: why exact passes send their sources back one by one; see `Pullback`.
        misfits: see `OutputLosses.misfits`.
        rows_reason: why they send back one row of a loss at a time; see `ExactPass`.
        meeting: the registrations whose cases meet, see `keys_that_meet`, among those that were looked at.
        verify: whether exact passes are to be verified.
        parts_differ: how the outputs of a part of a batch differ from those of the batch, in words; empty: they do not;
            None: not looked for yet.
        looked_for_left_out: whether rows of cases without a target were looked for in factors, as `tell_left_out` does.
        repeats: whether a second forward has the outputs of the first; None: not looked for yet.
        by_hand: whether the layers were registered by hand, on nodes of the graph.
        told: the blocks and the kinds of warnings that a capture of this model has warned of; shared by all of them.
        kernels: the capture with torch's kernels of recurrent layers, for evaluations; see `recording.equivalence`.
        kernels_reason: why evaluations have the steps of these layers written out.
        looked_for_kernels: whether `kernels` is known.
        exact_verified: the registrations of which an exact pass has compared vmap with cotangents one by one.
        recordings: the number of samples of rows so far.
        log_axes: see `axes_of_log_probabilities`; None: not looked for yet.
        is_mean: whether the loss that forward returns is a mean over cases, and not a sum; None: not known, or there is
            no loss.
        mean_reason: why that is a guess; None: it is none.
        division: how the number is read that forward divides a sum by; None: no batch has told it.
        rows_are_outputs: whether the rows of the losses are those of the Fisher's outputs, as the proof has seen.
        apart_up_to: what `kept_apart` found, by nodes.
        repeated: the effects for which recordings in training run the model's own forward, too.
    """

    emitted: EmittedModel
    loss: LossSpec | RegisteredLosses | None = None
    statistics: Mapping[Key, tuple[str, ...]] | None = None
    proven: bool = False
    settings: ForwardSettings | None = None
    apart: frozenset[str] = frozenset()
    verify: bool = True
    by_hand: bool = False
    told: set[object] = field(default_factory=set)
    kernels: EmittedGraph | None = field(default=None, init=False)
    kernels_reason: str | None = field(default=None, init=False)
    looked_for_kernels: bool = field(default=False, init=False)
    loop_reason: str | None = field(default=None, init=False)
    misfits: list[str] = field(default_factory=list, init=False)
    rows_reason: str | None = field(default=None, init=False)
    meeting: set[Key] = field(default_factory=set, init=False)
    looked_at: set[Key] = field(default_factory=set, init=False)
    looked_for_left_out: bool = field(default=False, init=False)
    parts_differ: str | None = field(default=None, init=False)
    repeats: bool | None = field(default=None, init=False)
    exact_verified: set[Key] = field(default_factory=set, init=False)
    recordings: int = field(default=0, init=False)
    log_axes: Mapping[int, int] | None = field(default=None, init=False)
    is_mean: bool | None = None
    mean_reason: str | None = None
    division: Division | None = None
    rows_are_outputs: bool = False
    apart_up_to: dict[tuple[fx.Node, ...], frozenset[Key]] = field(default_factory=dict, init=False, repr=False)
    repeated: tuple[str, ...] = field(default=(), init=False)

    @property
    def capture(self) -> Capture:
        return self.emitted.capture

    @property
    def program(self) -> Program:
        return self.emitted.program

    @property
    def model(self) -> nn.Module:
        return self.emitted.model

    @property
    def losses(self) -> OutputLosses:
        """The losses on the outputs of a run."""
        sites = self.emitted.loss_sites
        is_mean = probably_mean(sites) if self.is_mean is None else self.is_mean
        return OutputLosses(self.emitted, self.loss, is_mean, self.division or Division())

    @property
    def knows_loss(self) -> bool:
        """Whether a loss is known: it was declared, or forward computes it."""
        declared = self.loss is not None  # every step asks
        return declared or self.losses.are_known or (not self.whole and self.is_mean is not None)

    @property
    def whole(self) -> bool:
        """Whether one graph is the whole model."""
        return self.emitted.whole

    def axes_of_log_probabilities(self, returned: Any, places: Sequence[int]) -> Mapping[int, int]:
        """The axis of the classes of every output that is the logarithms of their probabilities, as for `F.nll_loss`,
        by its place among the leaves of what the model returned.

        They are logits, too, so a registered Categorical loss is right. But the gradient that a loss sends into them
        may have any sum over the classes. The first outputs tell; the host waits for them.

        places: of the Fisher's outputs.
        """
        if self.losses.given is None or not places:
            return {}
        if self.log_axes is None:
            leaves, spec = results.tree_flatten(returned)
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            fisher = tuple(leaves[place] for place in places)
            losses = [loss for _, loss in self.losses.on(results.tree_unflatten(leaves, spec), fisher)]
            of_classes = [loss.inputs for loss in losses if isinstance(loss, Categorical)]
            known = {place: axis_of_log_probabilities(leaves[place]) for place in places} if of_classes else {}
            every = len(of_classes) == len(losses)
            axes = {
                place: axis
                for place, axis in known.items()
                if axis is not None and (every or any(in_one_memory(leaves[place], inputs) for inputs in of_classes))
            }
            if not all(leaf.numel() for leaf in fisher):  # an empty batch tells nothing
                return axes
            self.log_axes = axes
        return self.log_axes

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return self.program.registrations

    @cached_property
    def used(self) -> frozenset[Key]:
        """The registrations that these calls use, by parameters."""
        return frozenset(registration.parameters for registration in self.registrations)

    def with_program(self, program: Program) -> Recorder:
        """The same capture with other registrations."""
        return replace(self, emitted=self.emitted.but(program=program))

    @property
    def frozen(self) -> frozenset[str]:
        """The registered parameters that are frozen at present."""
        return frozenset(name for name, p in self.program.parameters.items() if not original(p).requires_grad)

    # --- what a run is given ----------------------------------------------------------------------------------------

    def live_parameters(self) -> dict[str, Tensor]:
        return {name: real_numbers(holder[key]) for name, holder, key in self.emitted.holders}

    @cached_property
    def in_pairs(self) -> frozenset[str]:
        """The parameters that the model has or the graph reads as complex numbers, whose parts torch wants at even
        places in memory."""
        graph = self.program.graph
        behind = ancestors(node for node in graph.nodes if op_name(node) == AS_COMPLEX)
        complex_in_model = (name for name, parameter in self.model.named_parameters() if parameter.is_complex())
        return frozenset([*(str(node.target) for node in behind if node.op == "get_attr"), *complex_in_model])

    def given(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values for some parameters, of complex ones the real and imaginary parts. Those `in_pairs` have memory of
        their own: they may be parts of one vector, anywhere in it. Shards get it where they are gathered."""

        def given(name: str, value: Tensor) -> Tensor:
            real = real_numbers(value) if isinstance(value, Tensor) else value
            return real.clone() if name in self.in_pairs and isinstance(real, Tensor) else real

        return {name: given(name, value) for name, value in parameters.items()}

    def live_buffers(self) -> dict[str, Tensor]:
        return {name: attribute(self.model, name) for name in self.emitted.buffer_names}

    def copied_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.live_buffers().items()}

    def make_probes(
        self, values: Any, parameters: Mapping[str, Tensor], only: Collection[str] | None = None
    ) -> list[dict[str, Tensor] | None]:
        """Zeros for the statistics of one batch, on the device of `parameters`; None for registrations that pause, and
        for those of other parameters than `only`."""
        examples, like = self.emitted.examples(values), next(iter(parameters.values()), torch.empty(()))
        frozen, names = self.frozen, self.names_of_blocks if self.statistics is None else self.statistics
        return [
            None if pauses(registration, frozen) or not is_among(registration, only)
            else {} if registration.generic
            else make_probes(registration, names[registration.parameters], examples, like)
            for registration in self.registrations
        ]  # fmt: skip

    def gathered(self, probes: Sequence[dict[str, Tensor] | None]) -> Sequence[dict[str, Any] | None]:
        """The probes as they enter the emitted model: uses of one weight are summed up together, without a compiler."""
        if self.emitted.backend != "eager" or torch.compiler.is_compiling():
            return probes
        return gathered(self.registrations, probes, once=self.whole)

    @cached_property
    def names_of_blocks(self) -> dict[Key, Sequence[str]]:
        """The names of the statistics that the block of each registration needs."""
        return {
            r.parameters: [statistic.name for statistic in with_twins(r, r.statistics)]
            for r in self.registrations
            if not r.generic
        }

    def generic_parameters(
        self, only: Collection[str] | None = None, meeting: Collection[Key] = frozenset()
    ) -> list[str]:
        """The parameters whose own gradients are squared, see `has_whole_gradients`, among `only`, and not frozen."""
        blocks = [r for r in self.registrations if has_whole_gradients(r, meeting) and is_among(r, only)]
        generic = [name for registration in blocks for name in registration.owners]
        frozen = self.frozen if generic else ()
        return [name for name in generic if name not in frozen]

    @property
    def sampled(self) -> list[Tap]:
        """Taps whose input factors are computed from a part of the rows."""
        return [tap for taps in self.emitted.taps.values() for tap in taps if tap.sampling is not None]

    def sample_anew(self, generator: torch.Generator | None) -> None:
        """Choose the rows of the next recording for input factors that are computed from a part of them."""
        if not self.sampled:
            return
        self.recordings += 1
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if generator is not None:
            phases = torch.rand(2, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        else:  # written there by a kernel each, since the host would wait for a copy
            numbers = (self.recordings * step % 1.0 for step in ROBERTS_STEPS)
            phases = torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])
        for tap in self.sampled:
            tap.phases = phases

    def without_cases(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward with an empty batch instead of theirs."""
        copied: tuple[tuple[Any, ...], dict[str, Any]]
        empty = self.part_of_call(args, kwargs, 0.0)
        copied = pytree.tree_map_only(Tensor, lambda leaf: leaf.clone(), empty)  # a view is all
        return copied

    def part_of_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], fraction: float
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward with the first `fraction` of their examples, rounded up."""
        values = self.capture.flatten(args, kwargs)
        call: Any = self.emitted.part(values, fraction)
        if self.emitted.whole:
            by_tensor = {id(value): part for value, part in zip(values, call, strict=True) if part is not value}
            leaves, parts = pytree.tree_leaves((args, dict(kwargs))), iter(call)
            for leaf in leaves if any(map(is_nested, leaves)) else ():
                part = next(parts) if isinstance(leaf, Tensor) else None
                if part is not None and leaf.is_nested:
                    by_tensor[id(leaf)] = nested_tensor_from_jagged(part, next(parts).clamp(max=len(part)))
            call = pytree.tree_map(lambda leaf: by_tensor.get(id(leaf), leaf), (args, dict(kwargs)))
        of_part: tuple[tuple[Any, ...], dict[str, Any]] = call
        return of_part

    def part(self, values: Any, targets: Any, fraction: float) -> tuple[Any, Any]:
        """The first `fraction` of the examples, rounded up: the inputs and the targets, whose cases are on the
        dimension of the first output's."""
        if fraction >= 1.0:
            return values, targets
        dim = next(iter(self.emitted.case_dims), 0)
        total, part = self.emitted.examples(values), self.emitted.part(values, fraction)
        wanted = self.emitted.examples(part)

        def shortened(value: Any) -> Any:
            has_all = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == total
            return value.narrow(dim, 0, wanted) if has_all else value

        return part, targets if wanted == total else pytree.tree_map(shortened, targets)

    # --- recording --------------------------------------------------------------------------------------------------

    def record(
        self,
        values: Any,
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        params_stats: bool = False,
        memory: int = CHUNK_BYTES,
        only: Collection[str] | None = None,
        parameters: Mapping[str, Tensor] = MappingProxyType({}),
        on_outputs: Callable[[list[Any]], None] | None = None,
        on_sum: Callable[[Key, str, Tensor], Tensor | None] | None = None,
    ) -> Moments:
        """Statistics of one batch, from a forward and a backward of our own.

        Args:
            values: the model's inputs, as `capture.flatten` returns them.
            mode: "gradients" samples the targets from the model's own distribution (Martens & Grosse 2015, §5);
                "empirical" takes the true ones, from `targets` or, where forward computes the loss, from its inputs;
                "curvature_prop", "exact" and either with "_GGN": see `losses.distributions`. The exact modes run
                without a compiler.
            fraction: the part of the examples to record.
            generator: of the sampled targets, and of the sampled rows of input factors; None: torch's own.
            params_stats: also sum the gradients of the parameters.
            memory: bytes that a chunk of the exact modes' sources may take.
            only: the parameters whose registrations are recorded; None: all. The others have no probes.
            parameters: the values of some parameters, by name, at which the statistics are taken; the other parameters
                have the model's.
            on_outputs: called with what the model returns, in a list.
            on_sum: called in the backward with a registration, the name of a statistic and its finished sum, returns
                what takes its place, or None for the sum itself. The exact modes do not call it.

        Raises ValueError for an unknown mode or an option out of range, LossError if no loss or no targets are known.
        """
        check_mode(mode)
        a_share("fraction", fraction)
        some_bytes("memory", memory)
        if only is not None:
            several_names("only", only, self.program.parameters)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ValueError(f"generator is {generator!r}; it must be a torch.Generator")
        self.sample_anew(generator)
        values, targets = self.part(values, targets, fraction)
        losses_of, saved = self.losses, SavedBytes() if is_exact(mode) else None
        meeting = frozenset() if saved is None else self.meeting_cases(values, targets, only)
        own = self.live_parameters()
        if any(value.is_meta for value in own.values()):
            refuse_without_values(self.model)
        with self.emitted.isolated(), full_precision():
            given = self.given(parameters)
            live = {name: given.get(name, value).detach() for name, value in own.items()}
            every = [name for name in self.program.parameters if name in live] if params_stats else []
            summed_over = every or self.generic_parameters(only, meeting)
            learned = {name: unsharded(live[name]).requires_grad_() for name in summed_over}
            probes_or_none = self.make_probes(values, live, only)
            registrations, probes = recorded(self.registrations, probes_or_none)
            if on_sum is not None and saved is None:
                for registration, by_name in zip(registrations, probes, strict=True):
                    for name, probe in by_name.items():
                        probe.register_hook(partial(on_sum, registration.parameters, name))
            with nullcontext() if saved is None else saved.watched():
                entering = probes_or_none if saved is not None else self.gathered(probes_or_none)
                output, fisher = self.emitted.run(
                    live | learned, self.copied_buffers(), values, entering, compiled=saved is None
                )
            if on_outputs is not None:
                on_outputs(results.tree_leaves(self.capture.unflatten(output)))
            returned = losses_of.returned(output) if self.follows_returned(mode, targets) else []
            constants, losses = losses_of.of_constants(output, fisher, values, "" if returned else mode, targets)
            cases, sums = losses_of.summed(losses)
            self.tell_left_out(losses, values, targets, "" if returned else mode, only)
            if saved is not None:
                exact = ExactPass(
                    mode,
                    registrations,
                    fisher,
                    constants,
                    sums,
                    probes,
                    learned,
                    saved.total,
                    memory,
                    self.emitted.examples(values),
                    meeting,
                    verify=self.verify and not self.exact_verified.issuperset(r.parameters for r in registrations),
                    loop_reason=self.loop_reason,
                )
                statistics, gradients = exact.statistics(), exact.gradients() if params_stats else {}
                self.loop_reason, self.rows_reason = exact.loop_reason, exact.rows_reason
                if exact.together:
                    self.exact_verified.update(r.parameters for r in registrations)
                return Moments(statistics, cases, gradients, self.frozen, used=self.used)
            sent_from: Sequence[Tensor] = returned or fisher
            if returned:
                cotangents: Cotangents = [torch.ones_like(loss) * losses_of.scale(losses, values) for loss in returned]
            else:
                cotangents = one_source(mode, sums, constants, generator)
            leaves = [*(probe for by_name in probes for probe in by_name.values()), *learned.values()]
            grads = pulled(sent_from, cotangents, leaves)
        grads_or_zeros = [lasting(grad, self.emitted.backend) for grad in dense_or_zero(grads, leaves)]
        gradients = dict(zip(learned, grads_or_zeros[len(leaves) - len(learned) :], strict=True))
        statistics = {}
        of_probes = iter(grads_or_zeros)
        for registration, names in zip(registrations, probes, strict=True):
            if registration.generic:
                gradient = flat(list(split(gradients, [registration]).values()))
                statistics[registration.parameters] = {"gradient": gradient}
            else:
                statistics[registration.parameters] = without_twins({name: next(of_probes) for name in names})
        return Moments(statistics, cases, gradients if params_stats else {}, self.frozen, used=self.used)

    def follows_returned(self, mode: str, targets: Any) -> bool:
        """Whether the gradient of the loss that forward returns is sent back, instead of that of its distributions."""
        return mode == "empirical" and targets is None and not self.losses.are_likelihoods

    def meeting_cases(self, values: Any, targets: Any, only: Collection[str] | None = None) -> frozenset[Key]:
        """The registrations whose cases meet, if the graph does not tell that they stay apart: looked for in the first
        batch of several examples without NaN; where the numbers of a batch choose its cases, in every batch. Blocks of
        the gradients of cases are among them, if the loss has another number of rows than the batch has examples.

        only: the names of the parameters whose registrations are wanted; None: all.
        """
        examples = self.emitted.examples(values)
        unknown = {r.parameters: r for r in self.registrations if is_among(r, only)}
        unknown = {key: registration for key, registration in unknown.items() if key not in self.looked_at}
        if unknown and examples > 1 and self.rows_are_outputs:
            apart = self.kept_apart(self.program.outputs)
            self.looked_at |= unknown.keys() & apart
            unknown = {key: registration for key, registration in unknown.items() if key not in apart}
        if unknown and examples > 1:
            emitted = collecting(self.emitted)
            losses_of = replace(self.losses, emitted=emitted)
            uneven: list[Tensor] = []

            def loss_rows(output: Any, fisher: tuple[Tensor, ...]) -> LossRows:
                leaves, losses = losses_of.of_constants(output, fisher, values, "exact", targets)
                tensors = [loss.inputs for _, loss in losses]
                uneven.extend(tensor for tensor in tensors if tensor.dim() and len(tensor) != examples)
                return LossRows(fisher, leaves, tensors)

            parameters, buffers = self.live_parameters(), self.copied_buffers()
            # The numbers of cases matter where the gradients of several uses add up case by case.
            of_cases = {key for key, r in unknown.items() if not (r.generic or r.structure.kronecker)}
            several = {key for key in of_cases if len(unknown[key].uses) > 1}
            meeting = keys_that_meet(emitted, parameters, buffers, values, loss_rows, unknown, several)
            if meeting is not None:
                self.looked_at |= meeting if self.places_by_data else unknown.keys()
                self.meeting |= meeting
                if uneven:
                    self.meeting |= of_cases
        return frozenset(self.meeting)

    @property
    def places_by_data(self) -> bool:
        """See `are_placed_by_data`. Python between the submodules of a divided model may do so, too."""
        if not self.whole:
            return True
        return once(are_placed_by_data, self.program, lambda: are_placed_by_data(self.program))

    def kept_apart(self, ends: Sequence[fx.Node]) -> frozenset[Key]:
        """The registrations whose cases stay apart up to these nodes in every batch, as the graph tells."""
        nodes = tuple(ends)
        if nodes not in self.apart_up_to:
            self.apart_up_to[nodes] = kept_apart(self.program, nodes)
        return self.apart_up_to[nodes]

    def tell_left_out(
        self, losses: WeightedLosses, values: Any, targets: Any, mode: str, only: Collection[str] | None
    ) -> None:
        """Warn if rows of cases without a target are in input factors, as the first batch with such cases tells.

        On a CPU every batch may be the first; elsewhere it is the first recording, because the host waits. Sharded
        parameters are not looked at: only some processes may have such cases, and all would have to gather them.
        """
        kept = [loss.kept for _, loss in losses if loss.kept is not None]
        if self.looked_for_left_out or not kept or any(map(is_sharded, self.live_parameters().values())):
            return
        self.looked_for_left_out = kept[0].device.type != "cpu"
        if all(bool(of_loss.all()) for of_loss in kept):
            return
        self.looked_for_left_out = True
        emitted = collecting(self.emitted)

        def losses_of(output: Any, fisher: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], WeightedLosses]:
            return replace(self.losses, emitted=emitted).of_constants(output, fisher, values, mode, targets)

        of_misfit = {note.subject.partition(" at ")[0] for note in self.program.padded}  # told by `refuse_unfit_mask`
        new = [r for r in self.registrations if r.parameters not in self.told and str(r) not in of_misfit]
        registrations = [registration for registration in new if is_among(registration, only)]
        parameters, buffers = self.live_parameters(), self.copied_buffers()
        rows = rows_left_out(emitted, parameters, buffers, values, losses_of, registrations)
        if rows:
            with_target, cases = sum(int(of_loss.sum()) for of_loss in kept), sum(of_loss.numel() for of_loss in kept)
            self.told.update(rows)
            given = self.losses.given is not None or targets is not None
            warn_user(UserWarning(str(LeftOut(cases - with_target, cases, rows, not given))))

    def record_in_training(
        self, values: Any, generator: torch.Generator | None = None, forward: Callable[[], Any] | None = None
    ) -> tuple[Any, PendingMoments]:
        """Run the emitted model instead of the model's own forward; the user's backward fills the probes.

        generator: of the sampled rows of input factors; None: torch's own. forward: the model's own forward, which runs
            behind the emitted model for the effects that this does not have, with the same random numbers.

        Returns (what the model returns, the statistics to come).

        Raises UntraceableError if forward has effects that the emitted model does not have and that are lost.
        """
        effects = self.capture.effects
        repeats = forward is not None and self.whole and not any(isinstance(effect, OfOneRun) for effect in effects)
        if not effects or not repeats or forward is None:
            return self.ride(values, generator, self.live_buffers(), effects)
        self.repeated = effects
        with same_random(accelerators(self.model.parameters())):
            recorded = self.ride(values, generator, self.copied_buffers(), ())
        forward()
        return recorded

    def ride(
        self, values: Any, generator: torch.Generator | None, buffers: Tensors, lost: Sequence[str]
    ) -> tuple[Any, PendingMoments]:
        """See `record_in_training`. lost: the effects of forward that nothing has."""
        if effects := "\n".join(f"  {effect}" for effect in lost):
            name = class_of(self.model).__name__
            if self.losses.are_known:
                answer = 'Record in a separate pass, with estimation_mode="gradients" or net.record(...)'
            else:
                answer = (
                    "Name the distribution of the loss, kfac_fx.compile(..., loss=...), to record in a separate pass"
                )
            copied = ", or let it change a copy, as inputs = dict(inputs) makes one" if "its input" in effects else ""
            raise UntraceableError(
                f"statistics cannot be recorded during training, because the forward of {name} "
                f"has side effects that the captured graph does not have:\n{effects}\n"
                f"{answer}, or return these values from forward{copied}. If only the first forward has them, as one "
                "that initializes by its data, call the model once before kfac_fx.compile."
            )
        self.sample_anew(generator)
        live = self.live_parameters()
        # Not `view_as`: gradients may be sparse.
        views = {name: averaged_unsharded(live[name])[...] for name in self.generic_parameters()}
        for view in views.values():
            view.retain_grad()  # the part of this forward in the parameter's gradient, whatever happens to `.grad`
        live |= views
        probes_or_none = self.make_probes(values, live)
        registrations, probes = recorded(self.registrations, probes_or_none)
        if self.emitted.backend == "cudagraphs":
            for leaf in (*views.values(), *(probe for by_name in probes for probe in by_name.values())):
                leaf.register_hook(lambda grad: None if grad is None else lasting(grad, "cudagraphs"))
        entering = self.gathered(probes_or_none)
        output, fisher = self.emitted.run_in_training(live, buffers, values, entering)
        losses_of = self.losses
        cases: int | Tensor = self.emitted.examples(values)
        if losses_of.are_known:
            losses = losses_of.real(lambda outputs: losses_of.rebuilt(output, fisher, outputs), fisher, values)
            cases = losses_of.cases(losses)
        pending = PendingMoments(probes, registrations, views, cases, self.frozen, used=self.used)
        return map_tensors(writable, self.capture.as_returned(output)), pending

    def run_without_taps(self, parameters: Tensors, buffers: Tensors, values: Any) -> RunOutputs:
        return self.emitted.run(parameters, buffers, values, [None] * len(self.registrations), compiled=False)

    def outputs(
        self,
        parameters: Mapping[str, Tensor],
        values: Any,
        kernels: EmittedGraph | None = None,
        taps: bool = True,
    ) -> RunOutputs:
        """(what the model returns, the Fisher's outputs) at other parameters; nothing of the model changes.

        kernels: `self.kernels` to run that. taps: whether to run the graph that recordings run.
        """
        emitted, given = self.emitted if kernels is None else kernels, self.given(parameters)
        live = {
            name: given[name] if name in given else real_numbers(self.model.get_parameter(name).detach())
            for name in emitted.parameter_names
        }
        # The Python of a divided model may take derivatives by what its parameters make; shards are gathered later.
        in_python = not self.whole and not transforms()
        constant = in_python and all(isinstance(value, Tensor) and not value.requires_grad for value in live.values())
        if constant:
            live = {name: with_gradient(value.detach()) for name, value in live.items()}
        with self.emitted.isolated():
            buffers = self.copied_buffers()
            if taps or not isinstance(emitted, EmittedGraph):
                probes = [None] * len(emitted.program.registrations)
                output, fisher = emitted.run(live, buffers, values, probes, compiled=False)
            else:
                output, fisher = emitted.evaluate(live, buffers, values)
        if constant:
            output, fisher = map_tensors(Tensor.detach, (output, fisher))
        return self.capture.unflatten(output), fisher


def pauses(registration: Registration, frozen: Collection[str]) -> bool:
    """Whether the statistics of a registration pause: all its parameters are frozen."""
    return bool(frozen) and all(name in frozen for name in registration.owners)


def recorded(
    registrations: Sequence[Registration], probes: Sequence[dict[str, Tensor] | None]
) -> tuple[tuple[Registration, ...], list[dict[str, Tensor]]]:
    """The registrations that are recorded, and their probes."""
    pairs = [(r, of_r) for r, of_r in zip(registrations, probes, strict=True) if of_r is not None]
    return tuple(registration for registration, _ in pairs), [of_registration for _, of_registration in pairs]


def in_one_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether one is a view of the other, or both are views."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def is_among(registration: Registration, parameters: Collection[str] | None) -> bool:
    """Whether the registration is of some of these parameters; None: of all."""
    return parameters is None or any(name in parameters for name in registration.owners)
