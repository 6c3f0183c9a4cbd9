"""The Fisher without sampling: the second moments of all sources, in chunks that fit into a bound on memory.

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
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense_or_zero, pulled, strided_parts
from kfac_fx.linalg.vectors import split
from kfac_fx.losses.sources import Cotangents, LossPairs, exact_sources, number_of_sources
from kfac_fx.passes.approximations import Approximation, named
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import Key, additive, without_twins

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
            for storage in (part.untyped_storage() for part in strided_parts(tensor)):
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
