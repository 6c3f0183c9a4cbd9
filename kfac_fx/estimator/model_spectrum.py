"""`ModelSpectrum`: s F + δ I of a compiled module, with what needs the gradients of single cases.

The gradients come out of taps (`kfac_fx.recording.case_gradients`), one block at a time, so the memory is that of one
batch.

`Queries` are preconditioned gradients, and have scores with training examples. The score of a training example z for a
query q is ∇m(q)ᵀ (s F + δ I)⁻¹ ∇ℓ(z) (Grosse et al. 2023, "Studying large language model generalization with influence
functions"). The product is linear in ∇ℓ(z) = Σ d rᵀ, so the gradients of a batch are never held: rows meet the queries
in the backward, block by block.

Queries and training examples come as `Batch`es, which are read from what a DataLoader yields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.names import check_variables
from kfac_fx.estimator.manifests import FORMAT, digest, write_manifest
from kfac_fx.fisher.block import key_text
from kfac_fx.fisher.spectrum import Relative, Spectrum, System
from kfac_fx.linalg.arguments import choice
from kfac_fx.linalg.matrices import full_precision
from kfac_fx.linalg.operators import NamedProduct, Solution, conjugate_gradients
from kfac_fx.linalg.vectors import Vector, check_fits, joined
from kfac_fx.losses.sources import Measurement
from kfac_fx.recording.case_gradients import (
    Cases,
    Consumer,
    Counts,
    LowRank,
    QueryGradients,
    by_rows,
    query_products,
    sum_of_squares,
    weighted_squares,
)
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import Key

BY = ("sum", "block", "position")  # how scores are added up
CASE_KINDS = ("row", "position", "sequence")
Record = Callable[[Any, Consumer, Measurement | None], Counts]


@dataclass(frozen=True, eq=False, repr=False)
class ModelSpectrum(Spectrum):
    """s F + δ I by the eigenvectors of its blocks; see `Spectrum`.

    A batch is what a DataLoader yields: a tensor, (inputs, targets), a mapping of forward's arguments, or a
    `kfac_fx.Batch`.

    Attributes:
        net: the compiled module.
        mode: the estimation mode of the factors.
        case: the kind of case of the eigenvalues; None: they are those of the factors.
    """

    net: CompiledModule = field(kw_only=True)
    mode: str = field(default="empirical", kw_only=True)
    case: str | None = field(default=None, kw_only=True)

    def correct(
        self,
        batches: Iterable[Any],
        case: str = "row",
        *,
        mode: str | None = None,
        generator: torch.Generator | None = None,
    ) -> ModelSpectrum:
        """Replace Λ by the mean of the squares of the gradient in the basis Q, case by case (George et al. 2018, "Fast
        approximate natural gradient descent in a Kronecker-factored eigenbasis", section 3).

        The gradient of a case is summed over its uses and, except for positions, over its positions before it is
        squared. The memory is that of one batch.

        Args:
            batches: of the data; every batch is recorded once.
            case: "row": one term of the mean of the loss. An example with T rows takes T backward passes.
                "position": one position of an example; the squares are summed over positions and divided by the number
                of rows, as the factors are. "sequence": one example, with the sum of its rows as the loss; the mean is
                over examples, so the eigenvalues are about T times those of rows. For an example with one row, "row"
                and "sequence" are the same.
            mode: "empirical" takes the true targets, "gradients" samples them, the others are those of
                `FisherEstimator`; None: that of the factors.
            generator: of the samples; None: torch's own.

        Returns a spectrum with the same eigenvectors.

        Raises ValueError for an unknown case or mode, and if there are no batches.
        """
        choice("case", case, CASE_KINDS)
        totals = {key: torch.zeros_like(system.values[index]) for key, (system, index) in self.places().items()}
        number = 0

        @torch.no_grad()
        def add(key: Key, cases: Cases) -> None:
            system, index = self.places()[key]
            for kind in cases.by_position() if case == "position" else [cases]:
                for _, turned in system.in_basis(index, kind):
                    totals[key] += sum_of_squares(turned)

        for item in batches:
            batch = as_batch(item)
            counts = self.net.record_cases(
                batch.args,
                batch.kwargs,
                add,
                mode=mode or self.mode,
                targets=batch.targets,
                by_row=case == "row",
                only=self.keys,
                generator=generator,
            )
            number += counts.examples if case == "sequence" else counts.rows
        if not number:
            raise ValueError("the eigenvalues were to be corrected without cases: `batches` has none.")
        systems = [
            replace(system, values=torch.stack([totals[r.parameters] for r in system.group.registrations]) / number)
            for system in self.systems
        ]
        return replace(self, systems=systems, case=case)

    def places(self) -> Mapping[Key, tuple[System, int]]:
        """By block its system, and its number there."""
        return {
            registration.parameters: (system, index)
            for system in self.systems
            for index, registration in enumerate(system.group.registrations)
        }

    def part(self, names: Iterable[str]) -> ModelSpectrum:
        """The spectrum of the blocks of some parameters, which records these only.

        Raises RegistrationError if a name is in no block, or shares a block or a parameter with one that is not named.
        """
        wanted = frozenset(names)
        check_variables(wanted, self.registrations)
        systems = [
            system.part([n for n, block in enumerate(system.group.registrations) if block.owners[0] in wanted])
            for system in self.systems
        ]
        damping = self.damping
        if isinstance(damping, Mapping):
            damping = {r.parameters: self.amount_of(r.parameters) for r in self.registrations if r.owners[0] in wanted}
        shapes = {name: shape for name, shape in self.shapes.items() if name in wanted}
        return replace(
            self, systems=[system for system in systems if len(system.values)], shapes=shapes, damping=damping
        )

    # --- solving ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def solve(
        self,
        vector: Vector,
        product: NamedProduct,
        *,
        tolerance: float = 1e-8,
        iterations: int = 100,
        exponent: float = 1.0,
    ) -> Solution:
        """(H + δ I)⁻¹ v by conjugate gradients, with this spectrum as the preconditioner.

        The spectrum leaves out what is between blocks. It saves iterations where the condition within blocks is bad,
        as with inputs of different scales. H of a deep network is nearly singular in directions that change several
        layers and keep its function; there the blocks are large, and plain conjugate gradients, exponent=0, take fewer
        iterations.

        Args:
            vector: v; all its tensors may have the same additional dimensions in front, for many right-hand sides.
            product: H v, without the damping, for a vector with the same dimensions as v. s F approximates H.
            tolerance: of the residual, as a part of |v|.
            iterations: the most. If a residual is larger then, there is a ConvergenceWarning.
            exponent: the preconditioner is (s F + δ I)^exponent; 0: none.

        Raises NotRegisteredError if a vector does not fit, ValueError if H + δ I is not positive definite.
        """
        lead, parts = self.many(vector)
        right = self.joined(parts, vector)  # zero in elements that nothing reads

        def damped(vector: dict[str, Tensor]) -> dict[str, Tensor]:
            curved, shift = product(vector), self.shift(vector)
            check_fits(curved, {name: tensor.shape for name, tensor in vector.items()})
            return {name: curved[name].to(tensor.dtype) + shift[name] for name, tensor in vector.items()}

        precondition = partial(self.multiply_matpower, -exponent) if exponent else dict
        return conjugate_gradients(right, damped, precondition, lead, tolerance, iterations)

    def shift(self, vector: Vector) -> dict[str, Tensor]:
        """δ v."""
        if not isinstance(self.damping, (Mapping, Relative)):
            return {name: self.damping * tensor for name, tensor in vector.items()}
        lead, parts = self.many(vector)
        shifted = {
            name: (self.shifted(system)[index] - self.scale * system.values[index]).mean() * parts[name]
            for system, index in self.places().values()
            for name in system.group.registrations[index].parameters
        }
        return self.joined(shifted, vector)

    def joined(self, parts: Vector, like: Vector) -> dict[str, Tensor]:
        """The inverse of `many`, with the dimensions of `like`."""
        flat = {name: tensor.reshape(-1, *self.shapes[name]) for name, tensor in like.items()}
        whole = joined(parts, self.registrations, flat, 1)
        return {name: whole[name].reshape(tensor.shape) for name, tensor in like.items()}

    # --- scores -------------------------------------------------------------------------------------------------------

    def precondition(self, batch: Any, *, measurement: Measurement | None = None, rank: int | None = None) -> Queries:
        """(s F + δ I)⁻¹ ∇m of every example of a batch, to score training examples with.

        Args:
            measurement: a function of (what the model returns, the targets), or of the outputs alone if the batch has
                no targets, to one number m for every example, [Q]; None: the loss, summed over the rows of an example.
            rank: replace the matrix of every block and example by the nearest matrix of this rank, which takes less
                memory and time.

        Raises ValueError if `rank` is not positive, if `measurement` returns something else, or if an eigenvalue of
        s F + δ I is zero.
        """
        if rank is not None and rank < 1:
            raise ValueError(f"rank must be positive, got {rank}.")
        self.refuse_singular()
        parts: dict[Key, list[tuple[int, Tensor]]] = {}

        def keep(key: Key, cases: Cases) -> None:
            system, index = self.places()[key]
            group, operators = system.group, system.group.operators_of(index, system.operators)
            weights = 1 / self.shifted(system)[index]
            for part, turned in system.in_basis(index, cases):
                whole = turned.gradients() * weights
                matrices = group.from_eigenbasis(whole.unsqueeze(1), operators).squeeze(1)
                parts.setdefault(key, []).append((cases.first + part.start, matrices))

        self.record(batch, keep, measurement)
        matrices = {key: in_order(parts[key]) for key in self.keys if key in parts}
        kept = matrices if rank is None else {key: LowRank.of(matrix, rank) for key, matrix in matrices.items()}
        return Queries(kept, self.record)

    def self_scores(self, batch: Any, *, by: str = "sum", measurement: Measurement | None = None) -> Any:
        """∇ℓᵀ (s F + δ I)⁻¹ ∇ℓ of every example: [N], or by block {key: [N]} with by="block".

        Args:
            measurement: in place of the loss, as for `precondition`.

        Raises ValueError if an eigenvalue of s F + δ I is zero.
        """
        choice("by", by, ("sum", "block"))
        self.refuse_singular()
        weights = {key: 1 / self.shifted(system)[index] for key, (system, index) in self.places().items()}
        scores: dict[Key, list[tuple[int, Tensor]]] = {}

        def add(key: Key, cases: Cases) -> None:
            system, index = self.places()[key]
            for part, turned in system.in_basis(index, cases):
                scores.setdefault(key, []).append((cases.first + part.start, weighted_squares(turned, weights[key])))

        counts = self.record(batch, add, measurement)
        by_block = {
            key: in_order(scores[key]) if key in scores else weights[key].new_zeros(counts.examples)
            for key in self.keys
        }
        return by_block if by == "block" else torch.stack(list(by_block.values())).sum(0)

    def refuse_singular(self) -> None:
        """Raises ValueError for blocks with eigenvalues of zero, to rounding, and no damping. Waits for the device."""
        singular = [
            ", ".join(key) for key, (system, index) in self.places().items() if bool(self.zeros(system, index).any())
        ]
        if singular:
            raise ValueError(
                f"{len(singular)} of {len(self.keys)} blocks have eigenvalues of zero, and their inverses have no "
                f"scores: {'; '.join(singular)}.\nAdd a damping, as in "
                "spectrum.at(damping=kfac_fx.Relative(0.1))."
            )

    def zeros(self, system: System, index: int) -> Tensor:
        """Which eigenvalues of a block are zero to rounding, and not damped: [g, o, i].

        An eigenvalue of the factors is rounded to ε of the largest. A corrected one is a mean of squares of coordinates
        that are rounded to ε of the gradient, so its rounding is ε² of the largest.
        """
        shifted = self.shifted(system)[index].detach()
        rounding = torch.finfo(shifted.dtype).eps ** (1 if self.case is None else 2)
        undamped = shifted <= self.scale * system.values[index]
        return (undamped & (shifted <= rounding * shifted.max())) | ~(1 / shifted).isfinite()

    def record(self, batch: Any, consume: Consumer, measurement: Measurement | None = None) -> Counts:
        """Hand the gradients of the loss, or of `measurement`, of single examples to `consume`.

        Functions of the damping and the scale that `consume` computes are differentiable in these."""
        batch, graph = as_batch(batch), torch.is_grad_enabled()

        def consume_with_graph(key: Key, cases: Cases) -> None:
            with torch.set_grad_enabled(graph), full_precision():
                consume(key, cases)

        return self.net.record_cases(
            batch.args,
            batch.kwargs,
            consume_with_graph,
            mode="empirical",
            targets=batch.targets,
            only=self.keys,
            measurement=measurement,
        )


# --- queries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Queries:
    """(s F + δ I)⁻¹ ∇m of Q queries; `ModelSpectrum.precondition` makes it.

    Attributes:
        matrices: by block [Q, g, o, i], or the factors of matrices of low rank.
        record: hands over the gradients of the examples of a batch; see `ModelSpectrum.record`.
    """

    matrices: Mapping[Key, QueryGradients]
    record: Record

    def __len__(self) -> int:
        return len(next(iter(self.matrices.values())))

    def __repr__(self) -> str:
        return f"Queries({len(self)} queries, {len(self.matrices)} blocks)"

    def scores(self, batch: Any, *, by: str = "sum", measurement: Measurement | None = None) -> Any:
        """The scores of the examples of a batch for all queries.

        Args:
            by: "sum" over all blocks, [Q, N]; "block": a dict of these; "position": the sum over all blocks of the part
                of every position, [Q, N, S], whose sum over positions is the score.
            measurement: in place of the loss of the examples; see `ModelSpectrum.precondition`.

        Raises ValueError for another `by`, and for "position" if the blocks have different numbers of positions.
        """
        if choice("by", by, BY) == "position":
            return self.scores_by_position(batch, measurement)
        parts: dict[Key, list[tuple[int, Tensor]]] = {}

        def add(key: Key, of_examples: Cases) -> None:
            products = query_products(of_examples, self.matrices[key])
            parts.setdefault(key, []).append((of_examples.first, products))

        counts = self.record(batch, add, measurement)
        zeros = torch.zeros(len(self), counts.examples)
        by_block = {key: in_order(parts[key], 1) if key in parts else zeros.to(self.like(key)) for key in self.matrices}
        return by_block if by == "block" else torch.stack(list(by_block.values())).sum(0)

    def scores_of_all(
        self, batches: Iterable[Any], *, folder: str | Path | None = None, measurement: Measurement | None = None
    ) -> Tensor:
        """The scores of all examples of a DataLoader, [Q, N], with a progress bar on a terminal.

        Args:
            batches: in the order of the examples; a DataLoader that shuffles is refused.
            folder: where the scores of every batch are written; those that are there are not computed again. Batches
                are told by their numbers.
            measurement: see `scores`.

        Raises ValueError if the folder holds the scores of other queries, batches or measurements, a DataLoader
        shuffles, or there are no batches.
        """
        if drawn := [sampler for sampler in samplers_of(batches) if draws_order(sampler)]:
            raise ValueError(
                f"the DataLoader has a {type(drawn[0]).__name__}, and its scores would have no order: "
                "pass one with shuffle=False."
            )
        path = None if folder is None else Path(folder)
        if path is not None:
            norms = {key_text(key): float(self.like(key).double().norm()) for key in self.matrices}
            told = None if measurement is None else digest(measurement)
            write_manifest(path, {"format": FORMAT, "queries": len(self), "norms": norms, "measurement": told})
        number = len(batches) if isinstance(batches, Sized) else 0
        scores = [
            self.scores_in_file(None if path is None else path / f"scores-{n:06}.safetensors", batch, measurement)
            for n, batch in enumerate(
                tracked(((1, item) for item in batches), number, f"scores of {len(self)} queries")
            )
        ]
        if not scores:
            raise ValueError("`batches` has no batches.")
        return torch.cat(scores, dim=1)

    def scores_in_file(self, path: Path | None, batch: Any, measurement: Measurement | None) -> Tensor:
        told = "" if path is None else digest_of(batch)
        if path is not None and path.is_file():
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("batch") != told:
                    raise ValueError(f"{str(path)!r} has the scores of another batch: pass another folder.")
            return load_file(path)["scores"]
        scores: Tensor = self.scores(batch, measurement=measurement)
        if path is not None:
            part = path.with_suffix(".part")
            save_file({"scores": scores.detach().contiguous()}, part, {"batch": told})
            os.replace(part, path)
        return scores

    def like(self, key: Key) -> Tensor:
        matrices = self.matrices[key]
        return matrices.left if isinstance(matrices, LowRank) else matrices

    def scores_by_position(self, batch: Any, measurement: Measurement | None) -> Tensor:
        parts: dict[Key, list[Tensor]] = {}

        def add(key: Key, of_examples: Cases) -> None:
            if of_examples.whole is not None:
                products = query_products(of_examples, self.matrices[key])
                parts.setdefault(key, []).append(products.unsqueeze(-1))
                return
            for rows in of_examples.uses:
                use = Cases(of_examples.matrix, (rows,))
                parts.setdefault(key, []).append(torch.cat(list(by_rows(use, self.matrices[key])), dim=1))

        self.record(batch, add, measurement)
        sizes: dict[int, list[str]] = {}
        for key, products in parts.items():
            for product in products:
                sizes.setdefault(product.shape[-1], []).append(", ".join(key))
        if len(sizes) > 1:
            rows = "\n".join(f"  {size:5}  {', '.join(dict.fromkeys(names))}" for size, names in sorted(sizes.items()))
            raise ValueError(
                f"the blocks have different numbers of positions, so their scores have no sum by position:\n{rows}\n"
                'Pass by="block", or make the spectrum of the blocks with the same positions: '
                "FisherEstimator(net, variables=...)."
            )
        return torch.stack([product for products in parts.values() for product in products]).sum(0)


def in_order(parts: Iterable[tuple[int, Tensor]], dim: int = 0) -> Tensor:
    """Results for some examples each, along `dim`, joined in the order of their first examples."""
    return torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])], dim)


# --- batches ----------------------------------------------------------------------------------------------------------


class Batch:
    """The arguments of one forward, and the targets of its loss.

    Batch(tokens, attention_mask=mask, targets=labels)

    Attributes:
        args, kwargs: of forward.
        targets: one a loss, in a list or tuple, or one for all; None if forward computes the loss.
    """

    def __init__(self, *args: Any, targets: Any = None, **kwargs: Any) -> None:
        self.args, self.kwargs, self.targets = args, kwargs, targets

    def __repr__(self) -> str:
        return f"Batch({len(self.args)} arguments, {list(self.kwargs)}, targets={type(self.targets).__name__})"


def as_batch(batch: Any) -> Batch:
    """Read what a DataLoader yields.

    A tensor, or a tuple or list of one, is the argument of forward. A tuple or list of two is that argument, and the
    targets. A mapping has the arguments by name. Raises TypeError for anything else.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Tensor):
        return Batch(batch)
    if isinstance(batch, Mapping):
        return Batch(**batch)
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        inputs, targets = batch if len(batch) == 2 else (batch[0], None)
        return Batch(targets=targets, **inputs) if isinstance(inputs, Mapping) else Batch(inputs, targets=targets)
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise TypeError(
        f"a batch is a tensor, (inputs, targets), or a mapping of forward's arguments, and this is {what}.\n"
        "Name the parts: kfac_fx.Batch(tokens, mask, targets=labels)."
    )


def digest_of(batch: Any) -> str:
    """See `digest`."""
    batch = as_batch(batch)
    return digest(batch.args, batch.kwargs, batch.targets)


def samplers_of(loader: Any) -> Iterator[Any]:
    """The samplers of a DataLoader, also those inside of a batch sampler."""
    for sampler in (getattr(loader, name, None) for name in ("sampler", "batch_sampler")):
        if sampler is not None:
            yield sampler
            yield from samplers_of(sampler)


def draws_order(sampler: Any) -> bool:
    """Whether a sampler of torch draws the order. A DistributedSampler says so in its `shuffle`."""
    drawn = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    return drawn or getattr(sampler, "shuffle", False) is True
