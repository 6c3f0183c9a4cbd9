"""Many cotangents through one graph: in chunks by vmap where that is possible, else one by one.

The Fisher without sampling: the second moments of all sources, in chunks that fit into a bound on memory.

A source of a loss is the same coordinate of every case at once, which is exact for whatever keeps cases apart. A
gradient that is summed over cases, as that of generic parameters, does not: its sources are coordinates of one case.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_fx.factors.factor import additive
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.vectors import split
from kfac_fx.losses.sources import Cotangents, Losses, exact_sources, number_of_sources, pulled_back
from kfac_fx.passes.approximations import Approximation
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.examples import tracked
from kfac_fx.statistics.moments import Key, power_of_gradient

MEMORY = 1 << 30  # bytes that a chunk of cotangents may take


class SavedBytes:
    """What a forward run under `watched` keeps for its backward: about what one cotangent needs on its way back."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield


class Pullback:
    """Vector-Jacobian products of `outputs` with respect to `leaves`, for [k, ...] cotangents at once.

    loop_reason: why cotangents go one by one, once vmap has failed; None as long as it has not. What fails in another
        way than vmap, fails one by one, too.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self.outputs, self.leaves = outputs, leaves
        self.loop_reason: str | None = None

    def __call__(self, cotangents: Cotangents) -> list[Tensor]:
        """[k, *leaf.shape] for every leaf; zeros where nothing depends on it."""
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        outputs, given = [output for output, _ in pairs], [cotangent for _, cotangent in pairs]

        def grad(*one: Tensor) -> tuple[Tensor, ...]:
            grads = torch.autograd.grad(outputs, self.leaves, one, retain_graph=True, allow_unused=True)
            return tuple(
                torch.zeros_like(leaf) if grad is None else dense(grad)
                for leaf, grad in zip(self.leaves, grads, strict=True)
            )

        if self.loop_reason is None:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop because")
                    return list(torch.vmap(grad)(*given))
            except RuntimeError as error:  # of every kind: torch has no word for an operation that vmap does not know
                if fatal(error):
                    raise
                self.loop_reason = f"vmap is not possible here: {first_line(error)}"
        each = [grad(*one) for one in zip(*given, strict=True)]
        return [torch.stack(grads) for grads in zip(*each, strict=True)]


# --- exact ------------------------------------------------------------------------------------------------------------


Sums = dict[str, Tensor]


@dataclass
class ExactPass:
    """One forward, and all that is sent back through it.

    outputs, leaves: the Fisher's outputs, and the same as constants, of which `losses` are made.
    probes: of every registration; parameters: leaves of the forward by name, those of generic registrations at least.
    saved: bytes that one cotangent needs on its way back; memory: bytes that a chunk may take.
    """

    mode: str
    registrations: Sequence[Registration]
    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    losses: Losses
    probes: Sequence[Mapping[str, Tensor]]
    parameters: Mapping[str, Tensor]
    saved: int
    memory: int
    loop_reason: str | None = field(default=None, init=False)

    def statistics(self) -> dict[Key, Sums]:
        """Additive sums of every registration over all sources."""
        found: dict[Key, Sums] = {}
        for free in (False, True):
            self.add_structured(found, free)
        generic = [one for one in self.registrations if one.generic]
        names = list(dict.fromkeys(name for one in generic for name in one.owners))
        for grads in self.sources([self.parameters[name] for name in names], by_case=True):
            parts = split(dict(zip(names, grads, strict=True)), generic, lead=1)
            for one in generic:
                flat = torch.cat([parts[name].reshape(len(parts[name]), -1) for name in one.parameters], dim=1)
                flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
                sums = additive(one.structure, {"per_case": flat})
                found[one.parameters] = joined(found[one.parameters], sums) if one.parameters in found else sums
        return found

    def add_structured(self, found: dict[Key, Sums], free: bool) -> None:
        """Sums of the registrations that have uses `free` of the batch, whose gradients are summed over cases, or of
        the others."""
        structured = [
            (one, mine)
            for one, mine in zip(self.registrations, self.probes, strict=True)
            if not one.generic and any(use.batch_independent for use in one.uses) is free
        ]
        probes = [probe for _, mine in structured for probe in mine.values()]
        inputs = self.everywhere(probes)
        for grads in self.sources(probes, by_case=free):
            each, once = iter(grads), iter(inputs)
            for one, mine in structured:
                chunk = {name: (next(each), next(once)) for name in mine}
                sums = summed(one.structure, chunk)
                found[one.parameters] = joined(found[one.parameters], sums) if one.parameters in found else sums

    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters, summed over all sources."""
        total: dict[str, Tensor] = {}
        for grads in self.sources(list(self.parameters.values())):
            for name, grad in zip(self.parameters, grads, strict=True):
                total[name] = total.get(name, 0) + grad.sum(0)
        return total

    def everywhere(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """One source through all losses: what comes of inputs alone is recorded wherever any loss reaches."""
        made = [loss.inputs for _, loss in self.losses]
        cotangents = pulled_back(made, [torch.ones_like(one) for one in made], self.leaves)
        batched: Cotangents = [None if one is None else one.unsqueeze(0) for one in cotangents]
        return [grad[0] for grad in Pullback(self.outputs, leaves)(batched)] if leaves else []

    def sources(self, leaves: Sequence[Tensor], by_case: bool = False) -> Iterator[list[Tensor]]:
        if not leaves:
            return
        size = self.saved + sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        total = number_of_sources(self.losses, self.mode, by_case)
        chunk = max(1, min(self.memory // max(1, size), total))
        pullback = Pullback(self.outputs, leaves)
        cotangents = exact_sources(self.mode, self.losses, self.leaves, chunk, by_case)
        for one in tracked(cotangents, total, f"{self.mode}: {total} backward passes"):
            yield pullback(one)
            self.loop_reason = pullback.loop_reason


def summed(approximation: Approximation, chunk: Mapping[str, tuple[Tensor, Tensor]]) -> Sums:
    """Of a chunk of sources, ([k, ...], the same of one source through all losses): what comes of inputs alone is taken
    from the latter, squares are summed, gradients stay side by side."""
    sums: Sums = {}
    for name, (each, once) in chunk.items():
        sums[name] = {0: once, 1: each, 2: each.sum(0)}[power_of_gradient(name)]
    return additive(approximation, sums)


def joined(before: Sums, more: Sums) -> Sums:
    """Over chunks."""
    return {name: value + more[name] if power_of_gradient(name) else value for name, value in before.items()}
