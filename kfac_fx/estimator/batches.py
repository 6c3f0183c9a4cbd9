"""Batches: what a DataLoader yields, in which order, which data they are, and which of them are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from kfac_fx.estimator.files import digest
from kfac_fx.linalg.arguments import explains_calls
from kfac_fx.passes.errors import warn_user
from kfac_fx.recording.model_checks import misfit_of_call, names_of_arguments, required_arguments, with_targets

A_BATCH = "the batch"
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class Batch:
    """The arguments of one forward, and the targets of its loss.

    Batch(tokens, attention_mask=mask, targets=labels)

    Attributes:
        args, kwargs: of forward.
        targets: one a loss, in a list or tuple, or one for all; None if forward computes the loss. Where forward
            computes it and has an argument of this name, they are that argument.
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
    if isinstance(batch, DataLoader):
        raise TypeError(
            "a batch is one that a DataLoader yields, and this is the DataLoader itself: call the method for every "
            "batch, as in torch.cat([spectrum.self_scores(batch) for batch in loader])."
        )
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise TypeError(
        f"a batch is a tensor, (inputs, targets), or a mapping of forward's arguments, and this is {what}.\n"
        "Name the parts: kfac_fx.Batch(tokens, mask, targets=labels)."
    )


def batch_for(model: nn.Module, batch: Any, name: str = A_BATCH) -> Batch:
    """The batch, read by `as_batch`. Raises TypeError if its arguments do not fit the model's forward, too."""
    read = as_batch(batch)
    wrong = misfit_of_call(model, read.args, with_targets(model, read.args, read.kwargs, read.targets, declared=True))
    if wrong is None:
        return read
    names, targets, item = required_arguments(model), [] if read.targets is None else ["targets=y"], "batch"
    if isinstance(batch, Mapping):
        optional = [name for name in names_of_arguments(model) if name in read.kwargs and name not in names]
        others = [f"batch[{key!r}]" for key in read.kwargs if key not in names and key not in optional]
        parts = [f"batch[{of!r}]" if of in read.kwargs else others.pop(0) if others else of for of in names]
        parts += [f"{name}=batch[{name!r}]" for name in optional]
        targets = [f"targets={others[0]}"] if len(others) == 1 else targets
    else:
        item, parts = f"({', '.join(names)}), {'y' * bool(targets)}".rstrip(), names
    example = f"kfac_fx.Batch({', '.join([*parts, *targets])})"
    if name != A_BATCH:
        example = f"[{example} for {item} in loader]"
    raise TypeError(f"{name} was read as {as_read(read)} and does not fit {wrong}.\nName its parts, as in {example}.")


def of_one_batch(method: MethodT) -> MethodT:
    """Decorate a method whose only argument without a name is a batch: a wrong call raises a TypeError that says how
    several are one batch."""
    function = method.__name__
    return explains_calls(
        "one batch",
        f"Inputs and targets are one batch, as a DataLoader yields them: write {function}((x, y)). Arguments of "
        f"forward are one, too: write {function}(kfac_fx.Batch(a, b, targets=y)).",
    )(method)


def refuse_no_batches(function: str, batches: Any) -> None:
    """Raises TypeError for what is no series of batches, though it can be iterated: a tensor and a Dataset yield
    examples, without the dimension of the cases; (inputs, targets) are one batch, told by two tensors of as many rows,
    or by a mapping and a tensor. Two batches of inputs may differ in their lengths and sizes, and those of one shape
    that x.split makes share the memory of x. So for one batch alone, and for what cannot be iterated."""
    if isinstance(batches, (Mapping, Batch)):
        raise TypeError(f"{function} takes batches, and this is one, {as_read(as_batch(batches))}: write [batch].")
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(
            f"{function} takes batches, and got a {type(batches).__name__}: pass a DataLoader, or a list of batches."
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise TypeError(
            f"{function} takes batches, and a {type(batches).__name__} yields single examples: write "
            f"{function}(DataLoader(dataset, batch_size=64)), or batch_size=None if its items are batches."
        )
    if isinstance(batches, Tensor):
        raise TypeError(
            f"{function} takes batches, and got a tensor, {described(batches)}, whose items may be examples: write [x] "
            "if it is one batch, x.split(64) if it is all of the data, or list(x) if its items are batches."
        )
    refusal = f"{function} takes batches, and this is one, {{}}: write [(x, y)], or pass a DataLoader."
    are_two = isinstance(batches, (tuple, list)) and len(batches) == 2
    if are_two and isinstance(batches[0], Mapping) and isinstance(batches[1], Tensor):
        raise TypeError(refusal.format(as_read(as_batch(batches))))
    pair = pair_of_rows(batches)
    if pair is None:
        return
    inputs, targets = pair
    if inputs.dtype != targets.dtype or targets.ndim < inputs.ndim:
        raise TypeError(refusal.format(as_read(as_batch(batches))))
    if not isinstance(batches, tuple):
        return
    lengths = inputs.shape != targets.shape and not inputs.is_floating_point()  # two batches of tokens
    if not lengths and inputs.untyped_storage().data_ptr() != targets.untyped_storage().data_ptr():
        raise TypeError(
            f"{function} takes batches, and got a tuple of {described(inputs)} and {described(targets)}, which may be "
            f"one batch or two: {ONE_OR_TWO}."
        )


ONE_OR_TWO = "write [(x, y)] if these are inputs and their targets, and [x1, x2] if they are the inputs of two batches"


def pair_of_rows(batches: Any) -> tuple[Tensor, Tensor] | None:
    """Two tensors of as many rows, which may be the inputs and targets of one batch; None for all others."""
    if not (isinstance(batches, (tuple, list)) and len(batches) == 2):
        return None
    first, second = batches[0], batches[1]
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None
    return (first, second) if first.ndim and second.ndim and len(first) == len(second) else None


@contextmanager
def telling_how_read(batches: Any, batch: Batch, number: int) -> Iterator[None]:
    """Add to an error how a batch of `batches` was understood; number: its place in the data, from 1 on."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        pair = pair_of_rows(batches)
        error.add_note(
            f"Batch {number} of `batches` was read as {as_read(batch)}. A list or a DataLoader yields batches: a "
            "tensor, a pair (inputs, targets), or a mapping of forward's arguments. For all others make a list of "
            "kfac_fx.Batch(inputs, targets=labels)."
        )
        if pair is not None:
            error.add_note(
                f"`batches` are {described(pair[0])} and {described(pair[1])}, which look like one batch: {ONE_OR_TWO}."
            )
        raise


def as_read(batch: Batch) -> str:
    """How a batch was understood, for errors: `net(float32 [50, 8], mask=bool [50]) with targets int64 [50]`."""
    arguments = [*map(described, batch.args), *(f"{name}={described(value)}" for name, value in batch.kwargs.items())]
    targets = "without targets" if batch.targets is None else f"with targets {described(batch.targets)}"
    return f"net({', '.join(arguments)}) {targets}"


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


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


# --- which data -------------------------------------------------------------------------------------------------------

NO_DATA = digest()


def digest_of(batch: Any) -> str:
    """See `digest`."""
    batch = as_batch(batch)
    return digest(batch.args, batch.kwargs, batch.targets)


def with_batch(before: str, batch: Any) -> str:
    """The digest of batches and of one more behind them. before: `NO_DATA` at first."""
    return digest(before, digest_of(batch))


def digest_of_data(batches: Iterable[Any]) -> str:
    """The digest of all batches in their order."""
    total = NO_DATA
    for batch in batches:
        total = with_batch(total, batch)
    return total


# --- which are left out -----------------------------------------------------------------------------------------------

SHOWN = 10  # numbers of batches in a warning


class NotFinite:
    """The batches that passes over the data left out, because their sums were not finite.

    Attributes:
        numbers: their places in the data, from 1 on.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._told: set[int] = set()
        self._unread: list[tuple[int, Tensor]] = []
        self._taken = 0

    def add(self, number: int, finite: Tensor | None) -> None:
        """finite: whether the sums of a batch are, 0-dim; it is read later, so that the host does not wait."""
        self._taken = max(self._taken, number)
        if finite is not None:
            self._unread.append((number, finite))

    def tell(self, refuse: bool) -> None:
        """Warn once of every batch that was left out; waits for the device.

        Args:
            refuse: raise ValueError if all batches so far were left out, as behind a pass of one process.
        """
        self.numbers |= {number for number, finite in self._unread if not bool(finite)}
        self._unread = []
        if refuse and self.numbers and len(self.numbers) == self._taken:
            raise ValueError(f"no batch of `batches` is finite, so there is nothing to record. {LOOK}")
        if self.numbers - self._told:
            self._told |= self.numbers
            first, more = sorted(self.numbers)[:SHOWN], len(self.numbers) - SHOWN
            which = ", ".join(map(str, first)) + (f" and {more} more" if more > 0 else "")
            warn_user(
                UserWarning(
                    f"of {self._taken} batches of `batches`, these are not finite, and are left out with all their "
                    f"examples: number {which}. {LOOK}"
                )
            )


LOOK = (
    "Look for NaN and infinity in inputs, targets, parameters and what forward returns, and for variances of a "
    "NormalMeanVariance that are not positive. In float16, squares of gradients overflow: use bfloat16 or float32."
)
