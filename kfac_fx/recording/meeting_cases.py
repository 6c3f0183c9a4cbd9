"""Whether cases meet between the parameters and the loss, as in batch normalization and in contrastive losses.

    x [N, i] -> linear -> s [N, o] -> normalized over N -> outputs -> loss of N rows      row 0 of the loss reaches s[1]

The gradient rows of a case are then sums over the loss rows of several cases. Or cases change places, as sequences do
that are sorted by their lengths: a row then has the gradient of another case than its number says. Where all cases are
sent back at once, the exact modes would keep products of two cases, and the gradient of a single example would contain
those of others.

Three ask for the registrations of which this is true: an exact recording and a recording of single examples, for cases
that meet before the loss, and the proof, for cases that meet before the outputs. The operations of the graph tell of
most registrations that their cases stay apart (`passes.cases`). A batch tells it of the others (`keys_that_meet`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from kfac_fx.linalg.matrices import pulled, with_gradient
from kfac_fx.linalg.processes import unsharded
from kfac_fx.losses.distributions import Cotangents
from kfac_fx.passes.approximations import KRON
from kfac_fx.passes.cases import without_mask
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.losses import has_other_rows
from kfac_fx.recording.emitted import EmittedModel
from kfac_fx.recording.statistics import Key, Rows
from kfac_fx.recording.taps import ROWS, CollectingTap, Tap


@dataclass(frozen=True)
class LossRows:
    """Tensors that are computed from the outputs of a run, with a row for every case. Those without dimensions are left
    out.

    outputs: those that gradients are sent to. leaves: the same as constants. tensors: what is computed from these.
    pooled: others, with fewer rows than there are cases, so that a row may be of several cases.
    """

    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    tensors: Sequence[Tensor]
    pooled: Sequence[Tensor] = ()

    def halves(self) -> Iterator[tuple[Tensor, Cotangents, Cotangents]]:
        """(which rows are in the second half, random cotangents of the outputs from the first half of the rows, and
        from the second). Any two rows are in different halves once: the halves are those of the bits of their
        numbers."""
        generator = torch.Generator().manual_seed(0)
        for tensor in (tensor for tensor in self.tensors if tensor.dim()):
            vector = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
            row = torch.arange(len(tensor), device=tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            for bit in range(max(0, len(tensor) - 1).bit_length()):
                upper = (row >> bit) % 2 == 1
                low, high = (pulled([tensor], [vector * half], self.leaves, keep=True) for half in (~upper, upper))
                yield upper.flatten(), low, high

    def weighed(self) -> Iterator[tuple[Tensor, Cotangents, Cotangents]]:
        """(weights of the rows, random cotangents of the outputs, the same of the weighed rows). The weights are powers
        of two, which change no digit of a number. Any two rows have different weights once: the weights are those of
        the digits of their numbers."""
        generator = torch.Generator().manual_seed(0)
        for tensor in (tensor for tensor in self.tensors if tensor.dim()):
            vector = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
            row, plain = torch.arange(len(tensor), device=tensor.device), None
            for bit in range(0, max(0, len(tensor) - 1).bit_length(), DIGIT):
                weights = torch.exp2(((row >> bit) % 2**DIGIT - 2 ** (DIGIT - 1)).to(torch.float32)).to(tensor.dtype)
                weighed = vector * weights.view(-1, *[1] * (tensor.dim() - 1))
                plain = pulled([tensor], [vector], self.leaves, keep=True) if plain is None else plain
                yield weights, plain, pulled([tensor], [weighed], self.leaves, keep=True)

    def single_rows(self) -> Iterator[Cotangents]:
        """Random cotangents of the outputs, from some single rows of each of the pooled tensors."""
        generator = torch.Generator().manual_seed(0)
        for tensor in self.pooled:
            for row in range(0, len(tensor), -(-len(tensor) // POOLED_ROWS) or 1):
                vector = torch.zeros_like(tensor)
                vector[row] = torch.randn(tensor[row].shape, generator=generator, dtype=torch.float32).to(tensor)
                yield pulled([tensor], [vector], self.leaves, keep=True)


POOLED_ROWS = 4  # that are sent back one by one: a row may be of a graph with a single node
DIGIT = 4  # bits of a digit of a number of a row

VIEWS = {  # names of the backwards of views in torch's graph
    "AliasBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "TransposeBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip


def leaf_with_rows_of(tensor: Tensor, leaves: Sequence[Tensor], examples: int) -> int | None:
    """The number of the leaf whose row n is row n of the tensor, for every example: of the tensor itself, of one that
    it is a view of, or of one some of whose numbers are constants in it. None if there is none."""
    node, one_place = tensor.grad_fn, True
    if node is not None and node.name() == "WhereBackward0":
        chosen = [before for before, _ in node.next_functions if before is not None]
        node, one_place = (chosen[0], False) if len(chosen) == 1 else (node, True)
    while one_place and node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    source = tensor if tensor.grad_fn is None else getattr(node, "variable", None)
    for number, leaf in enumerate(leaves):
        if leaf is source and tensor.shape[:1] == leaf.shape[:1] == (examples,):
            return number if (in_one_order(tensor, leaf) if one_place else tensor.shape == leaf.shape) else None
    return None


def in_one_order(view: Tensor, tensor: Tensor) -> bool:
    """Whether both have the same numbers of one memory, row by row."""
    if view is tensor:
        return True
    whole = view.data_ptr() == tensor.data_ptr() and view.numel() == tensor.numel()
    return whole and view.is_contiguous() and tensor.is_contiguous()


def nodes_of_rows(rows: LossRows, nodes: Sequence[fx.Node], examples: int) -> list[fx.Node] | None:
    """The nodes whose row n is a row of the loss, for every example; None if they are not known.

    nodes: of the leaves.
    """
    places = [leaf_with_rows_of(tensor, rows.leaves, examples) for tensor in rows.tensors if tensor.dim()]
    if not nodes or any(place is None for place in places):
        return None
    return [nodes[place] for place in places if place is not None]


def collecting(emitted: EmittedModel) -> EmittedModel:
    """The same capture with collecting taps, without a compiler. One graph has one for all that ask."""
    if not emitted.whole:  # its submodules may be captured and proved later
        return with_all_rows(emitted, CollectingTap)
    if emitted.collecting is None:
        emitted.collecting = with_all_rows(emitted, CollectingTap)
    return emitted.collecting


def with_all_rows(emitted: EmittedModel, make_tap: type[Tap]) -> EmittedModel:
    """The same capture with other taps, which get all rows of every matrix, without a compiler: patches in place of
    pixels, no sample of them, and no mask, which autograd does not know."""
    registrations = []
    for registration in emitted.program.registrations:
        uses = tuple(without_mask(use) if use.mask_dims else use for use in registration.uses)
        approximation = KRON.name if registration.structure.kronecker else registration.approximation
        registrations.append(
            replace(registration, uses=uses, approximation=approximation, sampling=None, patch_mask=None)
        )
    program = emitted.program.but(registrations=tuple(registrations))
    return emitted.but(program=program, backend="eager", make_tap=make_tap)


def row_probes(registrations: Sequence[Registration], wanted: Collection[Key], like: Tensor) -> list[dict[str, Any]]:
    """One mapping a registration: a probe for those that are wanted."""
    return [
        {ROWS: torch.zeros((), device=like.device, requires_grad=True)} if r.parameters in wanted else {}
        for r in registrations
    ]


def collecting_taps(emitted: EmittedModel, key: Key) -> list[CollectingTap]:
    return [tap for tap in emitted.taps[key] if isinstance(tap, CollectingTap)]


@contextmanager
def collected(sinks: Mapping[CollectingTap, Callable[[Rows], None]], reads_x: bool = True) -> Iterator[None]:
    """Backwards inside hand the rows of every tap to its function.

    reads_x: False lets `Rows.x` be anything, where that saves the time of patches.
    """
    try:
        for tap, sink in sinks.items():
            tap.sink, tap.reads_x = sink, reads_x
        yield
    finally:
        for tap in sinks:
            tap.sink, tap.reads_x = None, True


def has_numbers(rows: Tensor) -> Tensor:
    """[N], the cases with a number other than zero."""
    return (rows != 0).any(dim=tuple(range(1, rows.dim())))


def cases_reached(rows: Rows) -> Tensor:
    """[N], the cases with a gradient."""
    reached = has_numbers(rows.d)
    return reached if rows.ids or rows.bias else reached & has_numbers(rows.expanded())


def keys_that_meet(
    emitted: EmittedModel,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    values: Any,
    loss_rows: Callable[[Any, tuple[Tensor, ...]], LossRows],
    only: Collection[Key] | None = None,
    in_order: Collection[Key] = (),
) -> frozenset[Key] | None:
    """The registrations with cases that the losses of several examples reach; None if an output is NaN, which hides it.

    It runs one forward, and two backwards or a few more: gradient rows of a loss whose rows are weighed by powers of
    two are those without weights, times the weight of one row, digit for digit. If some are not, it runs two backwards
    for every bit of the number of examples, or four if cases seem to meet. The host waits. Registrations with uses that
    do not depend on the batch are left out, because their gradients are of all examples.

    Args:
        emitted: with collecting taps.
        parameters, buffers: of the run; zero parameters get other values, because they would hide what is before them.
        loss_rows: from (what the model returns, the Fisher's outputs).
        only: the registrations that are looked at; None: all.
        in_order: among them, those that count also if the loss of an example reaches the case of another one, as where
            sequences are sorted by their lengths and come back in their order.
    """
    taps = {
        registration.parameters: collecting_taps(emitted, registration.parameters)
        for registration in emitted.program.registrations
        if (only is None or registration.parameters in only)
        and not registration.generic
        and not any(use.batch_independent for use in registration.uses)
    }
    if not taps:
        return frozenset()
    with emitted.isolated():
        live = {name: with_gradient(revealing(unsharded(value.detach()))) for name, value in parameters.items()}
        probes = row_probes(emitted.program.registrations, taps, next(iter(live.values())))
        of_loss = loss_rows(*emitted.run(live, buffers, values, probes, compiled=False))
        if any(bool(output.isnan().any()) for output in of_loss.outputs):
            return None
        leaves = [probe for by_name in probes for probe in by_name.values()]

        def of_steps(key: Key, cases: Tensor) -> Tensor:
            """[examples], for the rows of the steps of a recurrent layer, which are one behind another."""
            examples = emitted.examples(values)
            steps = {tap.use.steps for tap in taps[key] if not tap.use.steps_in_positions} - {1}
            return cases.view(-1, examples).any(0) if len(cases) in {n * examples for n in steps} else cases

        def meeting(among: Collection[Key], reads_x: bool) -> set[Key]:
            """Those with gradient rows, or gradients, of a case for the losses of several examples."""
            reached = cases_reached if reads_x else lambda rows: has_numbers(rows.d)
            found: set[Key] = set()

            def cases_of(cotangents: Cotangents) -> dict[tuple[Key, int], Tensor]:
                """[N] by registration and N, the cases that the cotangents reach."""
                cases: dict[tuple[Key, int], Tensor] = {}

                def note(key: Key, rows: Rows) -> None:
                    mask = reached(rows)
                    place = key, len(mask)
                    cases[place] = cases[place] | mask if place in cases else mask

                with collected({tap: partial(note, key) for key in among for tap in taps[key]}, reads_x):
                    pulled(of_loss.outputs, cotangents, leaves, keep=True)
                return cases

            for upper, *cotangents in of_loss.halves():
                low, high = map(cases_of, cotangents)
                found |= {place[0] for place in low.keys() & high.keys() if bool((low[place] & high[place]).any())}
                for cases, others in ((low, upper), (high, ~upper)):
                    found |= {
                        key for (key, number), mask in cases.items()
                        if key in in_order and number == len(others) and bool((mask & others).any())
                    }  # fmt: skip
            for of_row in of_loss.single_rows():
                found |= {key for (key, _), cases in cases_of(of_row).items() if int(of_steps(key, cases).sum()) > 1}
            return found

        def otherwise_weighed() -> set[Key]:
            """Those with gradient rows whose sizes change otherwise than by the weight of one row of the loss."""

            def sizes_of(cotangents: Cotangents) -> dict[tuple[Key, int], Tensor]:
                sizes: dict[tuple[Key, int], Tensor] = {}

                def note(key: Key, rows: Rows) -> None:
                    size = rows.d.abs().flatten(1).sum(1)
                    place = key, len(size)
                    sizes[place] = sizes[place] + size if place in sizes else size

                with collected({tap: partial(note, key) for key in taps for tap in taps[key]}, reads_x=False):
                    pulled(of_loss.outputs, cotangents, leaves, keep=True)
                return sizes

            found: set[Key] = set()
            last: Cotangents | None = None
            for weights, plain, weighed in of_loss.weighed():
                if plain is not last:
                    last, before = plain, sizes_of(plain)
                after = sizes_of(weighed)
                for place in before.keys() | after.keys():
                    none = torch.zeros_like(before[place] if place in before else after[place])
                    old, new = before.get(place, none), after.get(place, none)
                    factor, ordered = new / old, place[0] in in_order and place[1] == len(weights)
                    as_one = factor == weights if ordered else torch.frexp(factor).mantissa == 0.5
                    if not bool((as_one | ((old == 0) & (new == 0))).all()):
                        found.add(place[0])
            return found

        suspects = set(taps) if of_loss.pooled else otherwise_weighed()
        # A case without gradient rows has no gradient, so most models need no second look, and no patches.
        suspects = meeting(suspects, reads_x=False) if suspects else suspects
        return frozenset(meeting(suspects, reads_x=True) if suspects else ())


def rows_meet(rows: LossRows) -> bool:
    """Whether a row of a loss has a gradient in another row of the outputs, in this batch. The host waits."""
    for weights, plain, weighed in rows.weighed():
        for old, new in zip(plain, weighed, strict=True):
            if old is None and new is None:
                continue
            if old is None or new is None or old.shape[:1] != weights.shape:
                return True
            if not torch.equal(new, old * weights.view(-1, *[1] * (old.dim() - 1))):
                return True
    return False


def keys_that_meet_in_outputs(
    emitted: EmittedModel,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    values: Any,
    fisher: Sequence[Tensor],
    only: Collection[Key],
    towers: bool = False,
) -> frozenset[Key]:
    """`keys_that_meet` without a loss: the registrations with cases that the outputs of several examples reach.

    An output with several rows for each example does not tell their order: those of one example or those of one
    position may be side by side. Cases meet if they do in both orders.

    fisher: the Fisher's outputs of any run. towers: whether they are those of several mini-batches.
    """
    examples, dims = emitted.examples(values), emitted.dims_of_cases(len(fisher))
    selected = has_other_rows(emitted.program)  # any number of rows of an example, as those that a mask selects

    def outputs_by_case(interleaved: bool, _: Any, fisher: tuple[Tensor, ...]) -> LossRows:
        leaves = [output.detach().requires_grad_(output.requires_grad) for output in fisher]
        rows = [leaf.movedim(dim, 0) for leaf, dim in zip(leaves, dims, strict=True) if leaf.dim()]
        pooled = [] if towers else [tensor for tensor in rows if selected or 0 < len(tensor) < examples]
        by_row = [] if selected else [by_example(tensor, examples, interleaved) for tensor in rows]
        return LossRows(fisher, leaves, by_row, pooled)

    several = any(output.dim() and output.shape[dim] > examples for output, dim in zip(fisher, dims, strict=True))
    meeting = frozenset(only)
    for interleaved in (False, True) if several else (False,):
        rows = partial(outputs_by_case, interleaved)
        meeting = keys_that_meet(emitted, parameters, buffers, values, rows, meeting) or frozenset()
    return meeting


def by_example(tensor: Tensor, examples: int, interleaved: bool) -> Tensor:
    """The tensor with one row for every example, if it has several."""
    if examples == 0 or len(tensor) <= examples or len(tensor) % examples:
        return tensor
    rows = tensor.shape[1:]
    return tensor.view(-1, examples, *rows).movedim(1, 0) if interleaved else tensor.view(examples, -1, *rows)


def revealing(value: Tensor) -> Tensor:
    """Small random numbers for a parameter that is all zero, as many are at the start.

    A zero weight hides the gradients of all layers in front of it, and equal zeros on both sides would prove nothing.
    The identities and the zeros that are looked for hold for any values.
    """
    if not value.is_floating_point() or bool(value.any()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return 0.02 * noise.to(value)
