"""Preconditioned gradients of queries, and their scores with training examples.

The score of a training example z for a query q is ∇m(q)ᵀ (s F + δ I)⁻¹ ∇ℓ(z) (Grosse et al. 2023, "Studying large
language model generalization with influence functions"). The product is linear in ∇ℓ(z) = Σ d rᵀ, so the gradients of a
batch are never held: rows meet the queries in the backward, block by block.

Queries and training examples come as `Batch`es, which are read from what a DataLoader yields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from kfac_fx.estimator.manifests import FORMAT, digest, write_manifest
from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.arguments import choice
from kfac_fx.losses.sources import Measurement
from kfac_fx.recording import case_gradients
from kfac_fx.recording.case_gradients import Cases, LowRank, by_rows, query_products
from kfac_fx.recording.case_recorder import Consumer, Counts
from kfac_fx.recording.moments import Key
from kfac_fx.recording.progress import tracked


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


# --- queries ----------------------------------------------------------------------------------------------------------


BY = ("sum", "block", "position")
Record = Callable[[Any, Consumer, Measurement | None], Counts]


@dataclass(frozen=True, eq=False, repr=False)
class Queries:
    """(s F + δ I)⁻¹ ∇m of Q queries; `ModelSpectrum.precondition` makes it.

    Attributes:
        matrices: by block [Q, g, o, i], or the factors of matrices of low rank.
        record: hands over the gradients of the examples of a batch; see `ModelSpectrum.record`.
    """

    matrices: Mapping[Key, case_gradients.QueryGradients]
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
