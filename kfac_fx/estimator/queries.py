"""`Queries`: preconditioned gradients, and their scores with training examples.

The score of a training example z for a query q is ∇m(q)ᵀ (s F + δ I)⁻¹ ∇ℓ(z) (Grosse et al. 2023, "Studying large
language model generalization with influence functions"). The product is linear in ∇ℓ(z) = Σ d rᵀ, so the gradients of a
batch are never held: rows meet the queries in the backward, block by block.

Scores of all batches of a DataLoader can be kept in a folder, one file a batch, so that a run that ends resumes.

**Weights**: whether a model still has the weights that a spectrum, or queries, in memory were made with.

Factors are of the weights of their time, and gradients of examples are of the present ones, so scores of both together
would be of no model. A digest of all weights before every batch would take longer than its scores, and versions of
tensors do not know what is written through `.data`. So a copy of numbers of every tensor tells: of all of a small
tensor, and of `SAMPLED` of a large one, all of which a step or a swap of weights changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.batches import (
    as_batch,
    batch_for,
    digest_of,
    draws_order,
    of_one_batch,
    refuse_no_batches,
    samplers_of,
    telling_how_read,
)
from kfac_fx.estimator.files import (
    FORMAT,
    WITHOUT_DIGESTS,
    Manifest,
    checked_tensors,
    damaged,
    digest,
    is_there,
    is_written,
    made_of,
    metadata_of,
    path_of,
    read_manifest,
    read_tensors,
    refuse_other,
    warn_of_no_digests,
    write_manifest,
    write_tensors,
)
from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.arguments import a_function, a_process_group, choice, optional, wrong_kind
from kfac_fx.linalg.matrices import dense, full_precision
from kfac_fx.linalg.processes import Replicas, shard
from kfac_fx.losses.distributions import Measurement
from kfac_fx.passes.errors import TargetsMissing, warn_user
from kfac_fx.passes.matrix import real_numbers, without_autocast
from kfac_fx.passes.torch_private import buffers_of, parameters_of
from kfac_fx.recording.case_gradients import Cases, Consumer, Counts, LowRank, QueryGradients, by_rows, query_products
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import Key

LISTED = 4  # names in an error
SAMPLED = 4096  # the most numbers of a tensor


@dataclass(frozen=True)
class Weights:
    """The weights of a model at one time: of its parameters, and of the buffers in its state.

    Attributes:
        model: whose they are.
        places: by name of these tensors, the dictionary of the module that holds it, and its key there. A walk through
            the model takes longer than its gradients, if these are few. `Structure.check` tells of replaced modules.
        sizes: how many numbers of each are in the copy.
        numbers: the copy, see `sampled_numbers`, one tensor behind the other.
        buffers: the names of buffers.
    """

    model: nn.Module
    places: Mapping[str, tuple[Mapping[str, Tensor | None], str]]
    sizes: tuple[int, ...]
    numbers: Tensor
    buffers: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> Weights:
        kept, seen = model.state_dict().keys(), set[int]()
        parameters: dict[str, tuple[Mapping[str, Tensor | None], str]] = {}
        buffers: dict[str, tuple[Mapping[str, Tensor | None], str]] = {}
        for path, module in model.named_modules():
            for places, held in ((parameters, parameters_of(module)), (buffers, buffers_of(module))):
                for key, tensor in held.items():
                    name = f"{path}.{key}" if path else key
                    if tensor is not None and not tensor.is_meta and name in kept and id(tensor) not in seen:
                        seen.add(id(tensor))
                        places[name] = held, key
        places = parameters | buffers
        tensors = [tensor for held, key in places.values() if (tensor := held[key]) is not None]
        return Weights(model, places, *copied_numbers(tensors), frozenset(buffers))

    def changed(self) -> list[str]:
        """The names of the tensors that have other numbers now. Waits for the device.

        Buffers count in evaluation mode only: in training they are written, and not read, as in batch normalization.
        """
        now = [held.get(key) for held, key in self.places.values()]
        there = [tensor for tensor in now if tensor is not None and not tensor.is_meta]
        if len(there) < len(now):
            return [name for name, tensor in zip(self.places, now, strict=True) if tensor is None or tensor.is_meta]
        sizes, numbers = copied_numbers(there)
        numbers = numbers.to(self.numbers.device)
        if sizes == self.sizes and numbers.dtype == self.numbers.dtype and torch.equal(numbers, self.numbers):
            return []
        pairs = zip(self.places, numbers.split(sizes), self.numbers.split(self.sizes), strict=True)
        return [
            name
            for name, of_now, of_then in pairs
            if not same_numbers(of_now, of_then) and not (self.model.training and name in self.buffers)
        ]

    def refuse_others(self, things: str, remedy: str) -> None:
        """Raises ValueError if the model has other weights now.

        things: that were made with these weights, as in "this spectrum was". remedy: the words behind "Or".
        """
        if changed := self.changed():
            more = f" and {len(changed) - LISTED} more" if len(changed) > LISTED else ""
            raise ValueError(
                f"the weights have changed since {things} made: {', '.join(changed[:LISTED])}{more}. Gradients of "
                "examples would be of the new weights, and the rest of the old ones. Load the old weights, or make "
                f"anew what is of them. {remedy}"
            )


def copied_numbers(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], Tensor]:
    """(how many numbers of every tensor are taken, a copy of these), in the precision of the finest. A shard has those
    of this process."""
    with torch.no_grad():
        parts = [sampled_numbers(shard(tensor)) for tensor in tensors]
        return tuple(map(len, parts)), torch.cat([part.to(parts[0].device) for part in parts] or [torch.empty(0)])


def sampled_numbers(tensor: Tensor) -> Tensor:
    """At most `SAMPLED` numbers of the tensor, evenly spread, flat; of a complex one its real and imaginary parts. They
    are of every row, column and channel alike, since their step has no factor in common with a size."""
    numbers = real_numbers(dense(tensor))
    numbers = numbers.view(-1) if numbers.is_contiguous() else numbers.flatten()
    if numbers.numel() > SAMPLED:
        step = -(-numbers.numel() // SAMPLED)
        while math.gcd(step, numbers.numel()) > 1:
            step += 1
        numbers = numbers[::step]
    return numbers if numbers.is_floating_point() and numbers.element_size() > 1 else numbers.double()


def same_numbers(numbers: Tensor, others: Tensor) -> bool:
    """Whether both are equal, number by number; NaN is equal to NaN."""
    if numbers.shape != others.shape:
        return False
    return bool(((numbers == others) | (numbers.isnan() & others.isnan())).all())


BY = ("sum", "block", "position")  # how scores are added up
OF_QUERIES = "Or take queries of any weights, by spectrum.at(any_weights=True) or load_queries(..., any_weights=True)."
ZERO = (
    "Usual causes are targets that are all ignored, as those of -100 are, and outputs that depend on no parameter of "
    "the spectrum, as behind units that are not active."
)
NUMBERED = 5  # examples that a warning names
Record = Callable[[Any, Consumer, Measurement | None], Counts]


NO_TARGETS = (
    "the gradient of the loss of an example needs its targets: write batches as (x, y), as in "
    "spectrum.precondition((x, y)), or pass measurement=, a function of the outputs alone. These losses have none:"
)


def recording(net: CompiledModule, keys: Sequence[Key], weights: Weights | None = None) -> Record:
    """A function that hands the gradients of the loss, or of a measurement, of single examples of a batch to a
    consumer, for some blocks.

    Functions of the damping and the scale that the consumer computes are differentiable in these.

    weights: those that the net must still have when the function is called, else it raises ValueError; None: any.
    """

    def record(batch: Any, consume: Consumer, measurement: Measurement | None = None) -> Counts:
        if weights is not None:
            weights.refuse_others("these queries were", OF_QUERIES)
        batch, graph = batch_for(net.model, batch), torch.is_grad_enabled()

        def consume_with_graph(key: Key, cases: Cases) -> None:
            with torch.set_grad_enabled(graph), full_precision(), without_autocast(cases.device):
                consume(key, cases)

        try:
            return net.record_cases(
                batch.args,
                batch.kwargs,
                consume_with_graph,
                mode="empirical",
                targets=batch.targets,
                only=keys,
                measurement=measurement,
            )
        except TargetsMissing as error:  # its words are those of a mode, and no user has chosen one here
            rows = [line for line in str(error).splitlines() if line.startswith("  ")]
            raise TargetsMissing("\n".join([NO_TARGETS, *rows])) from None

    return record


@dataclass(frozen=True, eq=False, repr=False)
class Queries:
    """(s F + δ I)⁻¹ ∇m of Q queries; `ModelSpectrum.precondition` makes it, and `ModelSpectrum.queries` of vectors.

    Attributes:
        matrices: by block [Q, g, o, i], or the factors of matrices of low rank.
        record: hands over the gradients of the examples of a batch; see `recording`.
        net: the compiled module; None: it is not known, so a folder of scores is not compared with its weights.
        weights: those that the module must still have; None: any.
    """

    matrices: Mapping[Key, QueryGradients]
    record: Record
    net: CompiledModule | None = field(default=None, kw_only=True)
    weights: Weights | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raises TypeError for what are no matrices by block, and ValueError for a `record` that is no function."""
        if not isinstance(self.matrices, Mapping):
            written = "spectrum.precondition(batch), or spectrum.queries(vector)"
            raise wrong_kind("Queries", "matrices by block", self.matrices, written)
        a_function("record", self.record)

    def __len__(self) -> int:
        return len(next(iter(self.matrices.values())))

    def __repr__(self) -> str:
        return f"Queries({len(self)} queries, {len(self.matrices)} blocks)"

    @of_one_batch
    def scores(self, batch: Any, *, by: str = "sum", measurement: Measurement | None = None) -> Any:
        """The scores of the examples of a batch for all queries.

        Args:
            by: "sum" over all blocks, [Q, N]; "block": a dict of these; "position": the sum over all blocks of the part
                of every position, [Q, N, S], whose sum over positions is the score.
            measurement: in place of the loss of the examples; see `ModelSpectrum.precondition`.

        Warns of examples whose scores are not finite, and of a batch whose scores are all zero.

        Raises ValueError for another `by`, and for "position" if the blocks have different numbers of positions.
        """
        scores = self.computed(batch, choice("by", by, BY), measurement)
        warn_of_scores(list(scores.values()) if isinstance(scores, dict) else [scores], "this batch")
        return scores

    def computed(self, batch: Any, by: str, measurement: Measurement | None) -> Any:
        """The scores as they are, without a warning."""
        if by == "position":
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
        self,
        batches: Iterable[Any],
        *,
        folder: str | Path | None = None,
        measurement: Measurement | None = None,
        process_group: Any = None,
    ) -> Tensor:
        """The scores of all examples of a DataLoader, [Q, N], with a progress bar on a terminal.

        Args:
            batches: in the order of the examples; a DataLoader that shuffles is refused.
            folder: where the scores of every batch are written; those that are there are not computed again. Batches
                are told by their numbers.
            measurement: see `scores`.
            process_group: of torch.distributed, `group.WORLD` for all. All its processes call this with the same
                batches. Each scores every n-th of them, and all have the scores of all. A folder is one that all of
                them see; the first process writes into it. None: this process alone.

        Raises ValueError if the folder holds the scores of other queries, batches, measurements, weights or losses, or
        a file that is not whole; if a DataLoader shuffles; and if there are no batches.
        """
        refuse_no_batches("scores_of_all", batches)
        if drawn := [sampler for sampler in samplers_of(batches) if draws_order(sampler)]:
            raise ValueError(
                f"the DataLoader has a {type(drawn[0]).__name__}, and its scores would have no order: "
                "pass one with shuffle=False."
            )
        optional(a_process_group, "process_group", process_group)
        replicas = Replicas(process_group) if process_group is not None else None
        ranks, rank = (1, 0) if replicas is None else (replicas.number, replicas.rank)
        together = called if replicas is None else replicas.together
        kept: ScoresFolder | None = None
        if folder is not None:
            manifest = ScoresFolder.of_queries(self, measurement)
            kept = together(partial(ScoresFolder.of, path_of(folder), self, manifest, rank == 0))
        number, device = len(batches) if isinstance(batches, Sized) else 0, self.like(next(iter(self.matrices))).device
        shown = iter(tracked(((1, item) for item in batches), number, f"scores of {len(self)} queries"))
        scores: list[Tensor] = []
        while turn := list(islice(shown, ranks)):
            place = min(rank, len(turn) - 1)  # where batches end, a process takes the last one again
            batch = turn[place]
            there = together(partial(read_all, kept, len(scores), turn))
            if replicas is not None and not all(replicas.told(there is not None)):
                there = None
            if there is None:
                with telling_how_read(batches, as_batch(batch), len(scores) + place + 1):
                    computed = self.computed(batch, "sum", measurement)
                there = [computed] if replicas is None or ranks == 1 else each_of_all(replicas, computed, batch, turn)
                if kept is not None and rank == 0:
                    for n, (of_batch, item) in enumerate(zip(there, turn, strict=True), len(scores)):
                        kept.write(n, item, of_batch)
            scores += [of_batch.to(device) for of_batch in there]
        if not scores:
            raise ValueError("`batches` has no batches.")
        every = torch.cat(scores, dim=1)
        warn_of_scores([every], "`batches`")
        return every

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Queries cannot be copied or pickled, because they have the compiled module. Write "
            "kfac_fx.save_queries(queries, folder) and kfac_fx.load_queries(net, folder)."
        )

    def plain(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of every block by name, by the text of its key."""
        return {
            key_text(key): {"left": matrix.left, "right": matrix.right}
            if isinstance(matrix, LowRank)
            else {"matrix": matrix}
            for key, matrix in self.matrices.items()
        }

    def like(self, key: Key) -> Tensor:
        matrices = self.matrices[key]
        return matrices.left if isinstance(matrices, LowRank) else matrices

    def scores_by_position(self, batch: Any, measurement: Measurement | None) -> Tensor:
        parts: dict[tuple[Key, int], list[tuple[int, Tensor]]] = {}  # by the number of the use

        def add(key: Key, of_examples: Cases) -> None:
            if of_examples.whole is not None:
                products = query_products(of_examples, self.matrices[key])
                parts.setdefault((key, 0), []).append((of_examples.first, products.unsqueeze(-1)))
                return
            for number, rows in enumerate(of_examples.uses):
                use = Cases(of_examples.matrix, (rows,))
                products = torch.cat(list(by_rows(use, self.matrices[key])), dim=1)
                parts.setdefault((key, number), []).append((of_examples.first, products))

        counts = self.record(batch, add, measurement)
        if not parts:  # an empty batch, or one whose loss depends on none of the blocks
            return self.like(next(iter(self.matrices))).new_zeros(len(self), counts.examples, 1)
        whole = {place: in_order(of_use, 1) for place, of_use in parts.items()}
        sizes: dict[int, list[str]] = {}
        for (key, _), product in whole.items():
            sizes.setdefault(product.shape[-1], []).append(", ".join(key))
        if len(sizes) > 1:
            rows = "\n".join(f"  {size:5}  {', '.join(dict.fromkeys(names))}" for size, names in sorted(sizes.items()))
            raise ValueError(
                f"the blocks have different numbers of positions, so their scores have no sum by position:\n{rows}\n"
                'Pass by="block", or make the queries by spectrum.part([...]) of the blocks with the same positions.'
            )
        return torch.stack(list(whole.values())).sum(0)


def warn_of_scores(scores: Sequence[Tensor], of: str) -> None:
    """Warn of examples whose scores are not finite, and of scores that are all zero. The host waits.

    Args:
        scores: [Q, N] or [Q, N, S], or [N] of examples with themselves; several for several blocks.
        of: what the examples are of.
    """
    parts = [part.detach().sum(-1) if part.dim() == 3 else torch.atleast_2d(part.detach()) for part in scores]
    whole = torch.stack([part.to(parts[0].device) for part in parts])  # [blocks, Q, N]
    queries = whole.isfinite().any(-1, keepdim=True)  # a query that is not finite has been told
    wrong = (~whole.isfinite() & queries).any(0).any(0) if bool(queries.any()) else ~whole.isfinite().all(0).all(0)
    if bad := wrong.nonzero().flatten().tolist():
        warn_user(
            UserWarning(
                f"the scores of {numbered('example', bad)} of {of} are not finite, and topk and argsort take NaN for "
                "the largest number. Look for NaN and infinity in these inputs and targets. Leave the examples out, or "
                "write scores.nan_to_num(0.0, 0.0, 0.0)."
            )
        )
    elif whole.numel() and not bool(whole.any()):
        warn_user(
            UserWarning(
                f"all scores of {of} are zero, because the gradients of its examples or of the queries are. {ZERO}"
            )
        )


def warn_of_queries(matrices: Iterable[Tensor]) -> None:
    """Warn of queries that are zero or not finite. The host waits. matrices: [Q, g, o, i]."""
    sizes = torch.stack([matrix.detach().abs().sum((1, 2, 3)) for matrix in matrices]).sum(0)
    if bad := (~sizes.isfinite()).nonzero().flatten().tolist():
        warn_user(
            UserWarning(
                f"the gradients of {numbered('query', bad, 'queries')} of this batch are not finite, and so are all "
                "their scores. Look for NaN and infinity in these inputs and targets."
            )
        )
    if zero := (sizes == 0).nonzero().flatten().tolist():
        warn_user(
            UserWarning(
                f"the gradients of {numbered('query', zero, 'queries')} of this batch are zero, and so are all their "
                f"scores. {ZERO}"
            )
        )


def numbered(noun: str, numbers: Sequence[int], nouns: str = "") -> str:
    """`"example 3"`, `"examples 0, 3 and 7"`, `"examples 0, 1, 2, 3, 4 and 12 more"`, counted from 0."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    few = numbers[:NUMBERED]
    last = f"{len(numbers) - NUMBERED:,} more" if len(numbers) > NUMBERED else str(few[-1])
    listed = few if len(numbers) > NUMBERED else few[:-1]
    return f"{nouns or f'{noun}s'} {', '.join(map(str, listed))} and {last}"


def in_order(parts: Iterable[tuple[int, Tensor]], dim: int = 0) -> Tensor:
    """Results for some examples each, along `dim`, joined in the order of their first examples."""
    ordered = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
    return torch.cat(ordered, dim) if len(ordered) > 1 else ordered[0]


# --- scores in a folder -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoresFolder:
    """The scores of some queries in a folder, one file a batch.

    Attributes:
        path: of the folder.
        queries: the number of queries.
        origin: a digest of all that the scores of a batch depend on besides the batch. Every file holds it, next to
            that of its batch, so that no file of another folder is read.
        sealed: whether every file must hold its own digest.
    """

    path: Path
    queries: int
    origin: str
    sealed: bool

    @staticmethod
    def of_queries(queries: Queries, measurement: Measurement | None) -> Manifest:
        """The manifest of a folder."""
        return {
            "format": FORMAT,
            "queries": len(queries),
            "digest of queries": digest(queries.plain()),
            "measurement": None if measurement is None else digest(measurement),
            **({} if queries.net is None else {"made of": made_of(queries.net)}),
        }

    @staticmethod
    def of(path: Path, queries: Queries, here: Manifest, writes: bool) -> ScoresFolder:
        """Raises ValueError if a folder holds something else.

        Args:
            here: its manifest.
            writes: whether this process writes one, if there is none.
        """
        sealed = True
        if not is_written(path):
            if writes:
                write_manifest(path, here)
        elif (saved := read_manifest(path))["format"] == WITHOUT_DIGESTS:
            norms = {key_text(key): float(queries.like(key).double().norm()) for key in queries.matrices}
            kept = {name: here[name] for name in ("queries", "measurement")}
            refuse_other(path, saved, {**kept, "format": WITHOUT_DIGESTS, "norms": norms})
            warn_of_no_digests(path)
            sealed = False
        else:
            refuse_other(path, saved, here)
        return ScoresFolder(path, len(queries), digest(here), sealed)

    def file(self, number: int) -> Path:
        return self.path / f"scores-{number:06}.safetensors"

    def read(self, number: int, batch: Any) -> Tensor | None:
        """The scores of a batch; None if they are not there. Raises ValueError for those of another batch, and for a
        file that is not whole."""
        path = self.file(number)
        if not is_there(path):
            return None
        if checked_tensors(path) is None and self.sealed:
            raise damaged(path, "holds no digest", REMEDY)
        texts = metadata_of(path)
        if texts.get("batch") != digest_of(batch):
            raise ValueError(f"{str(path)!r} has the scores of another batch: pass another folder.")
        if texts.get("origin", self.origin) != self.origin or (self.sealed and "origin" not in texts):
            raise damaged(path, "has the scores of another folder", REMEDY)
        scores = read_tensors(path)[0].get("scores")
        if scores is None or scores.dim() != 2 or len(scores) != self.queries or not scores.is_floating_point():
            raise damaged(path, f"has no scores of {self.queries} queries", REMEDY)
        return scores

    def write(self, number: int, batch: Any, scores: Tensor) -> None:
        write_tensors(self.file(number), {"scores": scores}, {"batch": digest_of(batch), "origin": self.origin})


REMEDY = "Delete the file, and its scores are computed again."


def read_all(folder: ScoresFolder | None, first: int, batches: Sequence[Any]) -> list[Tensor] | None:
    """The scores of some batches; None if one of them is not in the folder. first: the number of the first batch."""
    if folder is None:
        return None
    found = [folder.read(number, batch) for number, batch in enumerate(batches, first)]
    return None if any(scores is None for scores in found) else [scores for scores in found if scores is not None]


def each_of_all(replicas: Replicas, scores: Tensor, batch: Any, batches: Sequence[Any]) -> list[Tensor]:
    """The scores of every process, which has one of these batches each.

    Raises ValueError if the processes have other batches.
    """
    told = replicas.told((digest_of(batch), [digest_of(item) for item in batches], scores.detach().cpu()))
    if any(others != told[0][1] for _, others, _ in told):
        raise ValueError(
            "the processes have different batches: with a process_group, scores_of_all takes the same batches in all "
            "of them, without a DistributedSampler, and divides them itself."
        )
    return [of_process for _, _, of_process in told[: len(batches)]]


def called(of: Callable[[], Any]) -> Any:
    return of()
