"""The gradients of single cases, of the loss or of every output, registration by registration.

`CaseRecorder.record` runs one forward of a batch of N examples, sends sources back, and hands the gradients of the N
examples to a function as soon as all uses of a registration have their rows. It holds the rows of one batch, and no
gradients.

Some registrations have no rows of single examples: generic parameters, uses whose gradient is summed over the batch,
rows that are merged with positions or routed to experts, and parametrizations whose rows leave out a part of the
gradient. Their gradients come from autograd, with one backward for every example. `CaseRecorder.apart` has the reasons.

From the rows of all uses of a registration, the gradient of case n is the matrix W_n [g, o, i] = Σ d rᵀ, summed over
the uses and the positions of the case. A case may also be one position of an example. Functions of these matrices are
computed for a few cases at a time, so that they take no more than `CHUNK` numbers, or one matrix if that is larger.

**Jacobians**: the gradients of all outputs of single examples, registration by registration: the Jacobian of a network
by examples.

The model has C outputs for each of N examples. One backward under `torch.vmap` sends all C back at once, each for all
examples together, to what comes out of the layers. There the layer's declaration makes the rows of a use. Where every
example has a single row, its C gradients are C gradient rows times the same row, so the matrices of a last layer with
many classes are never made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from kfac_fx.linalg.matrices import dense_or_zero, full_precision, is_differentiable, pulled
from kfac_fx.linalg.processes import unsharded
from kfac_fx.linalg.vectors import split, vector_form
from kfac_fx.losses.declared import WeightedLosses
from kfac_fx.losses.distributions import (
    CaseSource,
    Cotangents,
    Measurement,
    check_mode,
    code_of,
    is_exact,
    measurement_source,
    refuse_without_gradient,
    row_by_row,
    source_vectors,
)
from kfac_fx.passes import results
from kfac_fx.passes.approximations import GRADIENT, PER_CASE, Matrix, named
from kfac_fx.passes.errors import LossError, RegistrationError, warn_user, where
from kfac_fx.passes.graphs.labels import differentiated, shape_of, symbolic_sizes
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.matrix import without_autocast
from kfac_fx.passes.resolve import cases_apart
from kfac_fx.passes.torch_private import class_of, pytree
from kfac_fx.recording.emitted import EmittedModel
from kfac_fx.recording.meeting_cases import (
    LossRows,
    by_example,
    cases_reached,
    collected,
    collecting,
    collecting_taps,
    keys_that_meet,
    nodes_of_rows,
    row_probes,
    rows_meet,
)
from kfac_fx.recording.output_losses import share
from kfac_fx.recording.recorder import CHUNK_BYTES, Pullback, Recorder
from kfac_fx.recording.statistics import (
    CHUNK,
    Examples,
    Key,
    Moments,
    Rows,
    additive,
    case_matrices,
    homogeneous,
    squared_sums_of_ids,
    with_bias,
)
from kfac_fx.recording.taps import CALLS, CollectingTap, TappedCall

COMPLETE = 1e-3  # relative, of gradients that are one and the same
ADDED_AT_ONCE = 2**16  # numbers that are added in one product
IN_ORDER, INTERLEAVED = "rows of one example side by side", "rows of one position side by side"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Cases:
    """The gradients of N cases of one registration.

    Attributes:
        matrix: (g, o, i).
        uses: the rows of every use, all with N cases; () if `whole` has the gradients.
        whole: the gradients themselves, [N, g, o, i]; None: they are those of the rows.
        first: the number of the first case in its batch.
    """

    matrix: Matrix
    uses: tuple[Rows, ...] = ()
    whole: Tensor | None = None
    first: int = 0

    def __len__(self) -> int:
        return len(self.uses[0].d) if self.whole is None else len(self.whole)

    @property
    def device(self) -> torch.device:
        return self.uses[0].d.device if self.whole is None else self.whole.device

    @property
    def positions(self) -> int:
        """The number of positions of a case, over all uses."""
        return sum(rows.d.shape[1] for rows in self.uses)

    def chunks(self, numbers: int = 0) -> Iterator[tuple[slice, Cases]]:
        """The cases in parts whose gradients have at most `CHUNK` numbers. numbers: of a case, if more than these."""
        step = max(1, CHUNK // max(1, numbers, math.prod(self.matrix)))
        for start in range(0, len(self), step):
            part = slice(start, min(start + step, len(self)))
            yield part, self.part(part)

    def parts_of(self, together: int) -> Iterator[Cases]:
        """The cases in parts as of `chunks`, which keep every so many neighbors together."""
        step = together * max(1, CHUNK // max(1, together * math.prod(self.matrix)))
        for start in range(0, len(self), step):
            yield self.part(slice(start, start + step))

    def part(self, part: slice) -> Cases:
        return replace(
            self,
            uses=tuple(narrowed(rows, part) for rows in self.uses),
            whole=None if self.whole is None else self.whole[part],
            first=self.first + part.start,
        )

    def gradients(self) -> Tensor:
        """[N, g, o, i]."""
        if self.whole is not None:
            return self.whole
        each = [case_matrices(rows) for rows in side_by_side(self.uses)]
        return each[0] if len(each) == 1 else torch.stack(each).sum(0)

    def by_position(self) -> list[Cases]:
        """With every position as a case of its own, N·S in the order of the examples: the uses with equally many
        positions together, since they meet at these."""
        if self.whole is not None:
            return [self]
        sizes = dict.fromkeys(rows.d.shape[1] for rows in self.uses)
        alike = ([rows for rows in self.uses if rows.d.shape[1] == size] for size in sizes)
        return [replace(self, uses=tuple(map(as_cases, uses))) for uses in alike]

    def turned(self, inputs: Callable[[Tensor], Tensor] | None, outputs: Callable[[Tensor], Tensor]) -> Cases:
        """The cases with functions of their rows [N, S, g, i] and gradient rows [N, S, g, o].

        inputs: None leaves the rows as they are, which may then be ids.
        """
        assert self.whole is None, "bug in kfac_fx: gradients without rows are turned"

        def both(rows: Rows) -> Rows:
            d = outputs(rows.d)
            if inputs is None:
                return replace(rows, d=d, x=rows.x if rows.ids else rows.x.to(d.dtype))
            return Rows(inputs(one_hot(rows) if rows.ids else homogeneous(rows)), d, False, rows.matrix)

        return replace(self, uses=tuple(map(both, self.uses)))


def narrowed(rows: Rows, cases: slice) -> Rows:
    """The rows of some cases; rows that all cases share stay."""
    x = rows.x if rows.x.shape[0] == 1 else rows.x[cases]
    return replace(rows, x=x, d=rows.d[cases], mask=None if rows.mask is None else rows.mask[cases])


def as_cases(rows: Rows) -> Rows:
    """[N, S, ...] -> [N·S, 1, ...]."""
    x = rows.expanded().flatten(0, 1).unsqueeze(1)
    mask = None if rows.mask is None else rows.mask.flatten(0, 1).unsqueeze(1)
    return replace(rows, x=x, d=rows.d.flatten(0, 1).unsqueeze(1), mask=mask)


def one_hot(rows: Rows) -> Tensor:
    """The rows of ids [N, S, 1, i], with the bias column, if there is one."""
    size = rows.matrix[2] - rows.bias
    numbers = torch.arange(size, device=rows.x.device)
    hot = (rows.x.unsqueeze(-1) == numbers).to(rows.d.dtype).unsqueeze(2)
    return homogeneous(replace(rows, x=hot)) if rows.bias else hot


def side_by_side(uses: Sequence[Rows]) -> list[Rows]:
    """The uses whose rows are values as one use, whose positions are theirs one after another; ids stay apart."""
    values, ids = ([rows for rows in uses if rows.ids is of_ids] for of_ids in (False, True))
    if len(values) < 2:
        return [*values, *ids]
    x = torch.cat([homogeneous(rows).expand(len(rows.d), -1, -1, -1) for rows in values], dim=1)
    return [Rows(x, torch.cat([rows.d for rows in values], dim=1), False, values[0].matrix), *ids]


# --- sums and products ------------------------------------------------------------------------------------------------


def sum_of_squares(cases: Cases) -> Tensor:
    """Σ_n W_n², element by element: [g, o, i]."""
    rows = lone_rows(cases)
    if rows is not None:
        return torch.einsum("ngo,ngi->goi", rows.d[:, 0].square(), homogeneous_of_cases(rows).square())
    if cases.whole is None and len(cases.uses) == 1 and cases.uses[0].ids:
        return squares_of_ids(cases.uses[0])
    total = None
    for _, part in cases.chunks():
        squares = part.gradients().square().sum(0)
        total = squares if total is None else total + squares
    assert total is not None, "bug in kfac_fx: squares of no cases"
    return total


def squares_of_ids(rows: Rows) -> Tensor:
    """`sum_of_squares` for one use of ids, without matrices of the size of the vocabulary."""
    step = max(1, CHUNK // max(1, rows.d.shape[1] ** 2))
    parts = zip(torch.split(rows.expanded(), step), torch.split(rows.d, step), strict=True)
    weight = torch.stack([squared_sums_of_ids(x, d, rows.matrix[2] - rows.bias) for x, d in parts]).sum(0)
    return with_bias(rows, weight, rows.d.sum(1).square().sum(0))


def weighted_squares(cases: Cases, weights: Tensor) -> Tensor:
    """Σ W_n² · weights over the elements of every case: [N]. weights: [g, o, i]."""
    rows = lone_rows(cases)
    if rows is not None:
        squares = torch.einsum("goi,ngi->ngo", weights, homogeneous_of_cases(rows).square())
        return (squares * rows.d[:, 0].square()).sum((1, 2))
    return torch.cat([(part.gradients().square() * weights).sum((1, 2, 3)) for _, part in cases.chunks()])


@dataclass(frozen=True, eq=False)
class LowRank:
    """Matrices P = left @ right of a low rank: left [Q, g, o, k], right [Q, g, k, i]."""

    left: Tensor
    right: Tensor

    @staticmethod
    def of(matrices: Tensor, rank: int) -> LowRank:
        """The nearest matrices of this rank to [Q, g, o, i]."""
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
        return LowRank(u[..., :rank] * s[..., None, :rank], vh[..., :rank, :])

    def __len__(self) -> int:
        return len(self.left)

    def dense(self) -> Tensor:
        return self.left @ self.right


QueryGradients = Tensor | LowRank  # [Q, g, o, i]


def query_products(cases: Cases, queries: QueryGradients) -> Tensor:
    """<W_n, P_q> for all cases and queries P: [Q, N]."""
    if cases.whole is not None:
        whole = queries.dense() if isinstance(queries, LowRank) else queries
        return products_of_all(whole, cases.whole)
    each = [products_of_use(Cases(cases.matrix, (rows,)), rows, queries) for rows in side_by_side(cases.uses)]
    return torch.stack(each).sum(0)


def products_of_use(cases: Cases, rows: Rows, queries: QueryGradients) -> Tensor:
    """As `inner_products`, in the cheaper order: P r first, for every position, or d rᵀ first, for every query."""
    positions, many = rows.d.shape[1], len(queries)
    if isinstance(queries, LowRank) or rows.ids or positions * many <= positions + many:
        return torch.cat([part.sum(-1) for part in by_rows(cases, queries)], dim=1)
    return torch.cat([products_of_all(queries, part.gradients()) for _, part in cases.chunks()], dim=1)


def products_of_all(queries: Tensor, gradients: Tensor) -> Tensor:
    """<W_n, P_q> of matrices [N, g, o, i] and [Q, g, o, i]: [Q, N].

    Summed piece by piece: BLAS adds the products of float32 one after another, which loses four digits in an embedding
    of a large vocabulary."""
    pieces = (matrices.flatten(1).split(ADDED_AT_ONCE, dim=1) for matrices in (queries, gradients.to(queries.dtype)))
    return torch.stack([left @ right.mT for left, right in zip(*pieces, strict=True)]).sum(0)


def by_rows(cases: Cases, queries: QueryGradients) -> Iterator[Tensor]:
    """dᵀ P r of every row of one use: [Q, N, S], in parts of the cases."""
    g, o, i = cases.matrix
    wide = queries.left.shape[-1] if isinstance(queries, LowRank) else o
    for _, part in cases.chunks(len(queries) * g * wide * cases.positions):
        (rows,) = part.uses
        yield products_of_low_rank(rows, queries) if isinstance(queries, LowRank) else products_of_rows(rows, queries)


def products_of_rows(rows: Rows, queries: Tensor) -> Tensor:
    d = rows.d.to(queries.dtype)
    if rows.ids:
        return torch.einsum("qgons,nsgo->qns", columns_of_ids(rows, queries), d)
    x = homogeneous(rows).expand(len(d), -1, -1, -1).to(queries.dtype)
    return torch.einsum("qgoi,nsgi,nsgo->qns", queries, x, d)


def products_of_low_rank(rows: Rows, queries: LowRank) -> Tensor:
    outputs = torch.einsum("qgok,nsgo->qgkns", queries.left, rows.d.to(queries.left.dtype))
    if rows.ids:
        inputs = columns_of_ids(rows, queries.right)
    else:
        x = homogeneous(rows).expand(len(rows.d), -1, -1, -1).to(queries.right.dtype)
        inputs = torch.einsum("qgki,nsgi->qgkns", queries.right, x)
    return (outputs * inputs).sum((1, 2))


def columns_of_ids(rows: Rows, matrices: Tensor) -> Tensor:
    """The columns of [Q, 1, o, i] at the ids, with that of the bias added: [Q, 1, o, N, S]."""
    ids = rows.expanded()
    columns = torch.where(ids >= 0, matrices[..., ids.clamp(min=0)], 0)
    return columns + matrices[..., -1, None, None] if rows.bias else columns


def lone_rows(cases: Cases) -> Rows | None:
    """The rows of cases with a single row of values each, and None if a case has more, or has ids."""
    if cases.whole is not None or len(cases.uses) != 1:
        return None
    (rows,) = cases.uses
    return rows if rows.d.shape[1] == 1 and not rows.ids else None


def homogeneous_of_cases(rows: Rows) -> Tensor:
    """The rows of cases with one row each, with the bias column: [N, g, i]."""
    return homogeneous(rows).expand(len(rows.d), -1, -1, -1)[:, 0]


# --- recording --------------------------------------------------------------------------------------------------------

Consumer = Callable[[Key, Cases], None]
RowsConsumer = Callable[[Key, Use, Rows], None]


@dataclass(frozen=True)
class Counts:
    """examples: of a batch. rows: of these examples, the terms in the mean of the loss, without padding."""

    examples: int
    rows: int


@dataclass(frozen=True, eq=False)
class CaseRun:
    """One forward of a batch.

    Attributes:
        output: what the model returned, flat.
        fisher, others: the Fisher's outputs, and the last activations of the other terms of the returned loss.
        examples: their number.
        backward: sends sources back through it.
    """

    output: Any
    fisher: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    examples: int
    backward: Backward


class CaseRecorder:
    """One capture of a model, emitted with collecting taps.

    Attributes:
        apart: by registration, why its gradients come from one backward for every example.
    """

    def __init__(self, recorder: Recorder) -> None:
        warn_of_noise(recorder.model, "gradients of single examples")
        emitted = collecting(recorder.emitted)
        program = emitted.program
        if program.cut:
            emitted = emitted.but(program=program.but(outputs=(*program.outputs, *program.cut)))
        self.plain, self.recorder = recorder, replace(recorder, emitted=emitted)
        self.losses = recorder.losses if emitted.whole else self.recorder.losses
        self.complete: bool | None = None  # whether the inputs of its losses tell all of the returned loss's gradient
        program = self.recorder.program
        # `check` has counted all ways from the parameters to the Fisher's outputs.
        ends = returned_activations(program, emitted) - {*recorder.program.outputs}
        self.apart = {
            registration.parameters: reason
            for registration in program.registrations
            if (reason := reason_apart(program, registration, ends)) is not None
        }
        self.compared: dict[Hashable, set[Key]] = {}  # by kind of source the registrations that were looked at
        self.settled = False  # whether a backward has shown the numbers of rows
        self.grouped = False  # whether a backward has shown that examples of the user's are apart
        self.orders: dict[int, str] = {}  # of the rows of a loss, by their number for every example

    def record(
        self,
        values: Any,
        consume: Consumer,
        *,
        mode: str = "empirical",
        targets: Any = None,
        by_row: bool = False,
        only: Iterable[Key] | None = None,
        measurement: Measurement | None = None,
        generator: torch.Generator | None = None,
        grouped: Examples | None = None,
        consume_rows: RowsConsumer | None = None,
    ) -> Counts:
        """Hand the gradients of all examples to `consume`, once for every source.

        Args:
            values: the model's inputs, as `capture.flatten` returns them.
            mode: see `losses.distributions`; the gradients are those of the sum over rows, with the targets or signs of
                the mode. In the exact modes, every coordinate of every slot is a source.
            by_row: every slot is a source.
            only: the registrations that are wanted; None: all.
            measurement: whose gradients are recorded in place of the loss's, see `measured`.
            grouped: the example of every row, where that is not its place in a dimension.
            consume_rows: gets the rows of every use of the registrations that have some and take one backward for
                every example, in the backward of each.

        Raises:
            ValueError: the mode is unknown, or `measurement` returns something else than a number for every example.
            LossError: no loss or no targets are known, or the order of the rows of the loss is not.
            RegistrationError: a registration has several towers.
        """
        check_mode(mode)
        recorder, losses_of = self.recorder, self.losses
        if grouped is None and not recorder.emitted.examples(values):
            return Counts(0, 0)
        with self.run(values, only, grouped) as run:
            output, fisher, examples, backward = run.output, run.fisher, run.examples, run.backward
            others = run.others
            follows = measurement is None and recorder.follows_returned(mode, targets)

            def measured(output: Any) -> tuple[list[Tensor], CaseSource]:
                assert measurement is not None, "bug in kfac_fx: the source of no measurement"
                leaves = list(filter(is_differentiable, results.tree_leaves(output)))
                constants = [leaf.detach().requires_grad_() for leaf in leaves]
                rebuilt = losses_of.rebuilt(output, leaves, constants)
                return leaves, measurement_source(measurement, rebuilt, targets, constants, examples)

            def rows_of_cases(output: Any, outputs: tuple[Tensor, ...]) -> LossRows:
                if measurement is not None:
                    leaves, source = measured(output)
                    return LossRows(leaves, source.leaves, source.tensors)
                fisher, others = self.apart_from_cut(outputs)
                constants, losses = losses_of.of_constants(output, fisher, values, "" if follows else mode, targets)
                more = [other.detach().requires_grad_() for other in others] if follows else []
                tensors = [
                    *by_examples(losses, losses_of.examples_of_pieces(losses, values, examples), examples),
                    *more,
                ]
                return LossRows((*fisher, *others) if follows else fisher, [*constants, *more], tensors)

            returned = losses_of.returned(output) if follows else []
            if grouped is None:
                kind = "loss" if measurement is None else code_of(measurement)
                nodes = self.nodes_of_outputs if measurement is None else ()
                self.set_meeting_apart(values, rows_of_cases, kind, run, nodes)
            if measurement is not None:
                backward.outputs, source = measured(output)
                sources, rows = iter([source]), examples
            else:
                constants, losses = losses_of.of_constants(output, fisher, values, "" if returned else mode, targets)
                of_forward = examples if grouped is None and not by_row else None
                terms, sums = losses_of.summed(losses, losses_of.terms(losses, of_forward))
                rows, others = int(terms), others if returned else ()
                backward.outputs = (*fisher, *others)
                leaves = [*constants, *(other.detach().requires_grad_() for other in others)]

                @cache
                def layout() -> list[tuple[Tensor, Tensor]]:
                    pieces = losses_of.examples_of_pieces(losses, values, examples) if grouped is None else {}
                    return [
                        self.slots(loss.inputs, loss.case_axes, leaves, backward, pieces.get(number))
                        for number, (_, loss) in enumerate(losses)
                    ]

                if grouped is not None and not self.grouped:
                    self.refuse_other_examples([loss.inputs for _, loss in losses], layout(), leaves, backward)
                    self.grouped = True
                if grouped is not None:
                    of_examples = self.rows_of_examples(losses, [owner for owner, _ in layout()])
                    rows = round(of_examples * share(terms, losses_of.cases(losses)))
                if returned:
                    scale = losses_of.scale(losses, values, terms)
                    sources = self.of_returned(returned, scale, fisher, leaves, losses, layout, by_row, backward)
                else:
                    sources = (
                        CaseSource([loss.inputs for _, loss in sums], vectors, leaves, lambda: [o for o, _ in layout()])
                        for vectors in source_vectors(mode, sums, lambda: [s for _, s in layout()], by_row, generator)
                    )
            for source, last in with_last(sources):
                backward(source, consume, keep=not last, consume_rows=consume_rows)
        return Counts(examples, rows)

    @contextmanager
    def run(
        self,
        values: Any,
        only: Iterable[Key] | None = None,
        grouped: Examples | None = None,
        calls: list[TappedCall] | None = None,
    ) -> Iterator[CaseRun]:
        """One forward of a batch, whose backwards are inside of the context.

        Args:
            values, only, grouped: see `record`.
            calls: gets those of the taps, in the order of the forward.

        Raises RegistrationError if a registration has several towers.
        """
        recorder, emitted, wanted = self.recorder, self.recorder.emitted, None if only is None else set(only)
        registrations = [r for r in recorder.registrations if wanted is None or r.parameters in wanted]
        refuse_towers(registrations)
        with emitted.isolated(), full_precision():
            # Whole, also where they are sharded: a gradient of this process alone, and backwards without messages.
            live = {name: unsharded(value.detach()) for name, value in recorder.live_parameters().items()}
            owners = dict.fromkeys(name for registration in registrations for name in registration.owners)
            live |= {name: live[name].requires_grad_() for name in owners}
            like = next(iter(live.values()))
            keys = {registration.parameters for registration in registrations if not registration.generic}
            with_rows = keys if calls is None or not emitted.whole else ()
            witnesses = [] if calls is not None or keys - self.apart.keys() else self.witnesses
            watched = [*with_rows, *(registration.parameters for registration in witnesses)]
            probes: list[dict[str, Any]] = row_probes(recorder.registrations, watched, like)
            all_probes = [probe for by_use in probes for probe in by_use.values()]
            for registration, by_use in zip(recorder.registrations, probes, strict=True):
                if calls is not None and registration.parameters in keys:
                    by_use[CALLS] = calls
            output, outputs = emitted.run(live, recorder.copied_buffers(), values, probes, compiled=False)
            fisher, others = self.apart_from_cut(outputs)
            examples = emitted.examples(values) if grouped is None else grouped.count
            backward = Backward(self, registrations, live, all_probes, examples, grouped, witnesses)
            yield CaseRun(output, fisher, others, examples, backward)

    def apart_from_cut(self, outputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(the Fisher's outputs, the last activations of the other terms of the returned loss)."""
        number = len(outputs) - len(self.recorder.program.cut)
        return outputs[:number], outputs[number:]

    def of_returned(
        self,
        returned: Sequence[Tensor],
        scale: float | Tensor,
        fisher: Sequence[Tensor],
        leaves: Sequence[Tensor],
        losses: WeightedLosses,
        layout: Callable[[], Sequence[tuple[Tensor, Tensor]]],
        by_row: bool,
        backward: Backward,
    ) -> Iterator[CaseSource]:
        """The sources of the loss that forward returned: its gradient is cut where cases are still apart.

        Args:
            scale: the multiple of the returned loss that is a sum over cases.
            fisher: the inputs of its losses; `backward.outputs` has the last activations of its other terms, too.
            leaves: the same as constants. losses: on these. layout: see `record`.

        Raises LossError for gradients of single rows or examples, if the terms of the loss do not tell them.
        """
        vectors = [torch.ones_like(loss) * scale for loss in returned]
        direct = direct_gradients(returned, vectors, backward.outputs, self.order_of_cut)
        by_row = by_row and any(loss.all_cases != backward.examples for _, loss in losses)
        if not self.recorder.whole and not self.is_complete(returned, vectors, fisher, direct, backward.parameters):
            backward.outputs = returned

            def unknown() -> list[Tensor]:
                raise LossError(WHOLE_ONLY.format(class_of(self.recorder.model).__name__))

            if by_row:
                unknown()
            constants = [loss.detach().requires_grad_() for loss in returned]
            yield CaseSource(constants, vectors, constants, unknown)
            return
        of_losses, of_others = direct[: len(fisher)], direct[len(fisher) :]
        dims = self.recorder.emitted.case_dims[: len(fisher)]
        moved = self.losses.declared.of_run(None, of_losses, dims)  # as `losses` have their inputs
        tensors, vectors = [loss.inputs for _, loss in losses], [loss.inputs for _, loss in moved]
        if by_row:
            if any(bool(vector.any()) for vector in of_others):
                raise LossError(NO_ROWS.format(", ".join(where(node) for node in self.recorder.program.cut)))
            pairs = [(1.0, loss) for _, loss in losses]
            for of_slot in row_by_row(pairs, [slot for _, slot in layout()], vectors):
                yield CaseSource(tensors, of_slot, leaves, lambda: [owner for owner, _ in layout()])
            return
        others = leaves[len(fisher) :]

        def owners() -> list[Tensor]:
            places = [self.case_dim(node) for node in self.recorder.program.cut]
            apart = [
                self.slots(value.movedim(dim, 0), 1, leaves, backward)[0].movedim(0, dim)
                for value, dim in zip(others, places, strict=True)
            ]
            return [*(owner for owner, _ in layout()), *apart]

        yield CaseSource([*tensors, *others], [*vectors, *of_others], leaves, owners)

    @property
    def witnesses(self) -> list[Registration]:
        """The registrations that have rows of single examples, which tell where the rows of a loss come from."""
        return [r for r in self.recorder.registrations if not r.generic and r.parameters not in self.apart]

    @cached_property
    def order_of_cut(self) -> list[int]:
        """The order in which the graph computes the Fisher's outputs and the other nodes of the cut; empty for a
        divided model, where it is that of these."""
        program = self.recorder.program
        if not self.recorder.whole:
            return []
        places = {node: number for number, node in enumerate(program.graph.nodes)}
        return sorted(range(len(program.outputs)), key=lambda number: places[program.outputs[number]])

    def case_dim(self, node: fx.Node) -> int:
        """The dimension of the cases in an activation."""
        sizes = symbolic_sizes(node)
        return sizes.index(self.recorder.program.cases) if self.recorder.program.cases in sizes else 0

    def is_complete(
        self,
        returned: Sequence[Tensor],
        vectors: Sequence[Tensor],
        cut: Sequence[Tensor],
        direct: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> bool:
        """Whether the gradient of the returned loss passes the inputs of its losses alone, of a divided model."""
        if self.complete is None:
            leaves = [value for value in parameters.values() if value.requires_grad]
            whole = pulled(returned, vectors, leaves, keep=True)
            through = pulled(cut, direct, leaves, keep=True)
            pairs = zip(dense_or_zero(whole, leaves), dense_or_zero(through, leaves), strict=True)
            self.complete = all(bool((a - b).norm() <= COMPLETE * a.norm()) for a, b in pairs)
        return self.complete

    @property
    def nodes_of_outputs(self) -> Sequence[fx.Node]:
        """The nodes of the Fisher's outputs and of the other nodes of the cut; () if no single graph is the model."""
        program = self.recorder.program
        return program.outputs if self.recorder.whole else ()

    def set_meeting_apart(
        self, values: Any, loss_rows: Callable[..., LossRows], kind: Hashable, run: CaseRun, nodes: Sequence[fx.Node]
    ) -> None:
        """Let those of the registrations whose cases meet or change places be apart, if the graph does not tell that
        they stay apart: as the first batch of several examples without NaN tells; where the numbers of a batch choose
        its cases, every batch.

        kind: of the source: "loss", "outputs", or the code of a measurement, which may itself mix examples. nodes: of
            the leaves of `loss_rows`; (): not known.
        """
        examples = self.recorder.emitted.examples(values)
        if examples < 2:
            return
        compared = self.compared.setdefault(kind, set())
        if compared and not nodes and kind != "loss" and rows_meet(loss_rows(run.output, (*run.fisher, *run.others))):
            compared.clear()  # a function of the user's, in which examples meet by the numbers of a batch
        unknown = {r.parameters for r in run.backward.registrations} - compared - self.apart.keys()
        if not unknown:
            return
        if nodes:
            rows = loss_rows(run.output, (*run.fisher, *run.others))
            ends = nodes_of_rows(rows, nodes, examples)
            apart = frozenset() if ends is None else self.plain.kept_apart(ends)
            compared |= unknown & apart
            unknown -= apart
        if not unknown:
            return
        parameters, buffers = self.recorder.live_parameters(), self.recorder.copied_buffers()
        meeting: frozenset[Key] | None = frozenset(unknown)
        several = True  # whether a loss has several rows for an example, whose order is not known yet
        for interleaved in (False, True):

            def by_examples(output: Any, outputs: tuple[Tensor, ...], interleaved: bool = interleaved) -> LossRows:
                nonlocal several
                rows = loss_rows(output, outputs)
                whole = [tensor for tensor in rows.tensors if tensor.dim() and len(tensor) % examples == 0]
                several = any(len(tensor) > examples for tensor in whole)
                uneven = [tensor for tensor in rows.tensors if tensor.dim() and len(tensor) % examples]
                tensors = [by_example(tensor, examples, interleaved) for tensor in whole]
                return replace(rows, tensors=tensors, pooled=uneven)

            if meeting and several:
                emitted = self.recorder.emitted
                meeting = keys_that_meet(emitted, parameters, buffers, values, by_examples, meeting, meeting)
        if meeting is None:
            return
        self.apart = dict.fromkeys(meeting, "cases meet or change places between it and the loss") | self.apart
        if not self.plain.places_by_data:
            self.compared[kind] |= unknown
        self.compared[kind] |= meeting

    def slots(
        self,
        inputs: Tensor,
        case_axes: int,
        leaves: Sequence[Tensor],
        backward: Backward,
        owners: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the example, the slot) of every row of a loss, [N] or [N, T, ...], broadcast to the shape of `inputs`.

        owners: the example of every row, flat, if they are known; None: the order of the rows is to be found.
        """
        shape, examples = inputs.shape[:case_axes], backward.examples
        if owners is not None:
            wide = (*shape, *[1] * (inputs.dim() - len(shape)))
            return owners.reshape(wide), Examples(owners, examples).slots(owners).reshape(wide)
        if backward.grouped is not None:
            owners = backward.grouped.owners(shape or (1,))
            if owners is None:
                numbers = backward.grouped.numbers
                raise LossError(
                    f"examples= has numbers of {list(numbers.shape)} rows and {examples} examples, "
                    f"and the loss has inputs of shape {list(inputs.shape)}: it has neither a row for each of these "
                    f"rows nor one for each example.{without_last(numbers, math.prod(shape))}"
                )
            wide = (*shape, *[1] * (inputs.dim() - len(shape)))
            return owners.reshape(wide), backward.grouped.slots(owners).reshape(wide)
        first = shape[0] if shape else 1
        if examples == 0 or first % examples:
            raise LossError(
                f"a batch of {examples} examples has a loss with inputs of shape {list(inputs.shape)}, so the rows of "
                "an example are not known. Let the first dimension of the outputs be that of the examples, or say "
                "which row is of which example, as in kfac_fx.compile(..., examples=lambda x, edges, graph: graph). "
                "A model that takes several sets of points, each with a loss, has no examples: leave case= out."
                + (OF_SOME if first < examples else "")
            )
        per_example = first // examples
        place = torch.arange(first, device=inputs.device)
        owner, slot = place // per_example, place % per_example
        if examples > 1 and (per_example > 1 or len(shape) > 1):
            if per_example not in self.orders:
                self.orders[per_example] = self.order(inputs, per_example, leaves, backward)
            if self.orders[per_example] == INTERLEAVED:
                owner, slot = place % examples, place // examples
        others = prod(shape[1:])
        slot = slot.unsqueeze(-1) * others + torch.arange(others, device=inputs.device)
        wide = (*shape, *[1] * (inputs.dim() - len(shape)))
        return owner.unsqueeze(-1).expand_as(slot).reshape(wide), slot.reshape(wide)

    def rows_of_examples(self, losses: WeightedLosses, owners: Sequence[Tensor]) -> int:
        """The cases of the first loss, of all its pieces, that are of an example.

        owners: of every loss the example of every row; a negative number is of none.
        """
        names = self.losses.declared.names or range(len(losses))
        rows = 0
        for name, (_, loss), owner in zip(names, losses, owners, strict=True):
            if name == names[0]:
                of_example = owner.reshape(loss.inputs.shape[: loss.case_axes]) >= 0
                counted = loss.kept if loss.real is None else loss.real
                rows += int((of_example if counted is None else of_example & counted).sum())
        return rows

    def refuse_other_examples(
        self,
        tensors: Sequence[Tensor],
        layout: Sequence[tuple[Tensor, Tensor]],
        leaves: Sequence[Tensor],
        backward: Backward,
    ) -> None:
        """Raises LossError if the loss of an example reaches rows of others, through any of these tensors. Any two
        examples are in different halves once: the halves are those of the bits of their numbers."""
        every = torch.arange(backward.examples, device=tensors[0].device)
        for tensor, (owner, _) in zip(tensors, layout, strict=True):
            for bit, half in product(range(max(0, backward.examples - 1).bit_length()), (0, 1)):
                vector = torch.randn_like(tensor) * ((owner >= 0) & ((owner >> bit) % 2 == half))
                reached = backward.reached(pulled([tensor], [vector], leaves, keep=True))
                if bool((reached & ((every >> bit) % 2 != half)).any()):
                    raise LossError(
                        "the loss of an example of examples= has a gradient in rows of another one: the numbers are "
                        "not those of the rows, or examples see each other, as packed documents do without a mask of "
                        "attention between them."
                    )

    def order(self, inputs: Tensor, per_example: int, leaves: Sequence[Tensor], backward: Backward) -> str:
        """In which order the rows of a loss belong to the examples. It shows in the rows of the first example, because
        the gradient of its loss is zero in the others; a model without rows is taken at its first dimension. Raises
        LossError if it is neither."""
        if per_example == 1 and not (backward.with_rows or backward.witnesses):
            return IN_ORDER
        place = torch.arange(inputs.shape[0], device=inputs.device)
        orders = {IN_ORDER: place < per_example, INTERLEAVED: place % backward.examples == 0}
        for order, first in orders.items():
            vector = torch.randn_like(inputs) * first.view(-1, *[1] * (inputs.dim() - 1))
            if backward.reaches_first_only(pulled([inputs], [vector], leaves, keep=True)):
                return order
        raise LossError(
            f"the loss has {per_example} rows for every example, and their order is not known: neither the rows of an "
            "example nor those of a position are side by side, or every example depends on the others.\nLet the model "
            "return outputs whose first dimension is that of the examples."
        )


OF_SOME = (
    " If the loss is of some examples alone, as that of logits[labeled], let it be of all, with targets of -100 for "
    "the others."
)
WHOLE_ONLY = (
    "the loss that {} returns has terms beside those that it computes by functions of torch, and no single graph holds "
    "the model, so the parts of single examples or rows in them are not known. Score with measurement=, a function "
    "from what the model returns to one number for every example."
)
NO_ROWS = (
    "the loss that forward returns has terms that belong to no single row of its losses, at {}: its gradient has parts "
    'of examples and not of rows. Write case="sequence".'
)


def direct_gradients(
    roots: Sequence[Tensor], vectors: Sequence[Tensor], cut: Sequence[Tensor], order: Sequence[int] = ()
) -> list[Tensor]:
    """The gradients of the roots with respect to tensors of one graph that reach each of them first: without what
    passes a later one. A tensor that is there twice has its gradient once.

    order: in which the graph computes these; empty: in theirs.
    """
    total = dense_or_zero(pulled(roots, vectors, cut, keep=True), cut)
    later: list[int] = []
    for number in reversed(order or range(len(cut))):
        if any(cut[other] is cut[number] for other in later):
            total[number] = torch.zeros_like(total[number])
            continue
        (passed,) = pulled([cut[o] for o in later], [total[o] for o in later], [cut[number]], keep=True)
        total[number] = total[number] if passed is None else total[number] - passed
        later.append(number)
    return total


class Backward:
    """Backward passes through one forward.

    Attributes:
        outputs: the tensors that a source sends gradients to.
        probes: of the registrations that have taps.
        examples: the number of examples of the batch.
        grouped: the example of every row, where the user gave it.
        witnesses: other registrations, whose rows tell which examples a source reaches; (): those of `registrations`
            tell.
    """

    def __init__(
        self,
        of: CaseRecorder,
        registrations: Sequence[Registration],
        parameters: dict[str, Tensor],
        probes: Sequence[Tensor],
        examples: int,
        grouped: Examples | None = None,
        witnesses: Sequence[Registration] = (),
    ) -> None:
        self.of, self.registrations, self.parameters = of, registrations, parameters
        self.probes, self.examples, self.grouped, self.witnesses = probes, examples, grouped, witnesses
        self.outputs: Sequence[Tensor] = ()
        emitted = of.recorder.emitted
        self.taps = {
            registration.parameters: collecting_taps(emitted, registration.parameters)
            for registration in [*registrations, *witnesses]
            if not registration.generic
        }

    def __call__(
        self, source: CaseSource, consume: Consumer, keep: bool, consume_rows: RowsConsumer | None = None
    ) -> None:
        """Send a source back. keep: another source comes."""
        apart = self.of.apart
        keep_for_examples = keep or not self.of.settled or any(r.parameters in apart for r in self.registrations)
        self.collect(source.cotangents(), consume, keep_for_examples)
        self.of.settled = True
        separate = [registration for registration in self.registrations if registration.parameters in apart]
        if not separate:
            return
        names = list(dict.fromkeys(name for registration in separate for name in registration.owners))
        leaves = [self.parameters[name] for name in names]
        for example in range(self.examples):
            last = not keep and example == self.examples - 1
            with collected({} if consume_rows is None else self.sinks_of(separate, consume_rows)):
                behind = leaves if consume_rows is None else [*leaves, *self.probes]
                grads = self.sent_back(behind, source.cotangents(example), keep=not last)[: len(leaves)]
            parts = split(dict(zip(names, grads, strict=True)), separate)
            for registration in separate:
                form = vector_form(registration, parts)
                gradient = form.pack(parts).to(torch.promote_types(grads[0].dtype, torch.float32))
                consume(registration.parameters, Cases(form.shape, whole=gradient.unsqueeze(0), first=example))

    def sinks_of(
        self, registrations: Iterable[Registration], consume: RowsConsumer
    ) -> dict[CollectingTap, Callable[[Rows], None]]:
        with_taps = [r.parameters for r in registrations if not r.generic]
        return {tap: partial(consume, key, tap.use) for key in with_taps for tap in self.taps[key]}

    def collect(self, cotangents: Cotangents, consume: Consumer, keep: bool) -> None:
        """Hand over the gradients of every registration that has rows of single examples."""
        waiting: dict[Key, list[Rows]] = {}

        def finish(key: Key, tap: CollectingTap) -> None:
            rows = waiting.pop(key)
            if key not in self.of.apart:
                consume(key, Cases(tap.matrix, tuple(rows)))

        def sink(registration: Registration, tap: CollectingTap) -> Callable[[Rows], None]:
            key, uses = registration.parameters, len(self.taps[registration.parameters])

            def collected(rows: Rows) -> None:
                by_example = self.of_examples(rows, tap.use)
                if by_example is None:
                    self.of.apart[key] = f"its rows [{', '.join(map(str, rows.d.shape[:2]))}] are of no single examples"
                waiting.setdefault(key, []).append(rows if by_example is None else by_example)
                if len(waiting[key]) == uses and not registration.called:
                    finish(key, tap)

            return collected

        self.with_sinks(self.with_rows, sink, cotangents, keep)
        for key in list(waiting):  # uses that this source does not reach, or calls without a fixed number
            finish(key, self.taps[key][0])

    def with_sinks(
        self,
        registrations: Sequence[Registration],
        sink: Callable[[Registration, CollectingTap], Callable[[Rows], None]],
        cotangents: Cotangents,
        keep: bool,
    ) -> None:
        """One backward in which every tap of some registrations has a sink."""
        if not registrations:
            return
        with collected({tap: sink(r, tap) for r in registrations for tap in self.taps[r.parameters]}):
            self.sent_back(self.probes, cotangents, keep)

    @property
    def with_rows(self) -> list[Registration]:
        """The registrations whose gradients are made of rows."""
        return [r for r in self.registrations if not r.generic and r.parameters not in self.of.apart]

    def of_examples(self, rows: Rows, use: Use) -> Rows | None:
        """The rows [N, S, ...] of N examples; None if they are of no single examples."""
        return examples_first(rows, use, self.examples) if self.grouped is None else self.grouped.together(rows)

    def reaches_first_only(self, cotangents: Cotangents) -> bool:
        """Whether these cotangents have a gradient for the first example, and none for the others."""
        reached = self.reached(cotangents)
        return bool(reached[:1].any()) and not bool(reached[1:].any())

    def reached(self, cotangents: Cotangents) -> Tensor:
        """[N], the examples that have a gradient in the rows of any use."""
        masks: list[Tensor] = []

        def sink(registration: Registration, tap: CollectingTap) -> Callable[[Rows], None]:
            def seen(rows: Rows) -> None:
                by_example = self.of_examples(rows, tap.use)
                if by_example is not None:
                    masks.append(cases_reached(by_example))

            return seen

        self.with_sinks(self.with_rows or self.witnesses, sink, cotangents, keep=True)
        none = torch.zeros(self.examples, dtype=torch.bool, device=next(iter(self.parameters.values())).device)
        return torch.stack([none, *masks]).any(0)

    def sent_back(self, leaves: Sequence[Tensor], cotangents: Cotangents, keep: bool) -> list[Tensor]:
        """The gradients of the leaves, zero where the source does not reach them."""
        return dense_or_zero(pulled(self.outputs, cotangents, leaves, keep=keep), leaves)


def with_squares_of_examples(
    of: CaseRecorder,
    values: Any,
    moments: Moments,
    *,
    mode: str,
    targets: Any = None,
    generator: torch.Generator | None = None,
    grouped: Examples | None = None,
) -> Moments:
    """The moments of a batch, with sums over its examples of what is a square of the gradient of all of them together,
    and so has the products of any two: see `has_products_of_cases`.

    values, mode, targets, generator, grouped: as of `CaseRecorder.record`. The mode is none of the exact ones.

    Where the parts of single examples are not known, the batch counts as one example, with a warning.
    """
    recorded = moments.statistics
    here = [registration for registration in of.recorder.registrations if registration.parameters in recorded]
    summed = {
        registration.parameters: registration for registration in here if has_products_of_cases(registration, mode)
    }
    if not summed:
        return moments
    sums: dict[Key, dict[str, Tensor]] = {}
    for key, registration in summed.items():
        nothing = {name: torch.zeros_like(value) for name, value in recorded[key].items() if is_square(name)}
        if GRADIENT.name in recorded[key]:
            nothing = squared(registration, torch.zeros_like(recorded[key][GRADIENT.name]))
        sums[key] = nothing

    @torch.no_grad()
    def add(key: Key, cases: Cases) -> None:
        if GRADIENT.name in recorded[key]:
            of_example = squared(summed[key], cases.gradients().flatten())
            sums[key] = {name: value + of_example[name] for name, value in sums[key].items()}

    @torch.no_grad()
    def add_rows(key: Key, use: Use, rows: Rows) -> None:
        with without_autocast(rows.d.device):
            sums[key] = {name: value + named(name).of(rows) for name, value in sums[key].items()}

    try:
        refuse_towers(of.recorder.registrations)
        of.record(
            values,
            add,
            mode=mode,
            targets=targets,
            only=summed,
            generator=generator,
            grouped=grouped,
            consume_rows=add_rows,
        )
    except (LossError, RegistrationError) as error:
        names = ", ".join(name for key in summed for name in key)
        if (told := ("squares", names)) not in of.plain.told:
            of.plain.told.add(told)
            warn_user(UserWarning(TOGETHER.format(names=names, error=error)))
        sums = {
            key: squared(registration, recorded[key][GRADIENT.name]) if GRADIENT.name in recorded[key] else {}
            for key, registration in summed.items()
        }
    kept = {key: {name: value for name, value in recorded[key].items() if name != GRADIENT.name} for key in summed}
    return replace(moments, statistics={**recorded, **{key: kept[key] | sums[key] for key in summed}})


def has_products_of_cases(registration: Registration, mode: str) -> bool:
    """Whether a fit takes the examples of a batch apart, because the statistics of all together have products of two.

    A generic parameter has one gradient for all cases of a fit, whose square is one sample. Uses that do not depend on
    the batch have one for every batch. With targets that are drawn their products vanish in expectation, so they are
    taken apart with true targets alone. G of transposed uses, and of chains over time, stays as it is.
    """
    if registration.generic or mode != "empirical":
        return registration.generic and not is_exact(mode)
    free = any(use.batch_independent for use in registration.uses)
    turned = any(use.transposed for use in registration.uses)
    chained = any(statistic.lagged for statistic in registration.statistics)
    return free and registration.structure.kronecker and registration.towers == 1 and not turned and not chained


def is_square(name: str) -> bool:
    """Whether a statistic of rows is a square of gradients."""
    return named(name).power == 2


def squared(registration: Registration, gradient: Tensor) -> dict[str, Tensor]:
    """The sums of a block from the flat gradient of one example."""
    return additive(registration.structure, {PER_CASE.name: gradient.unsqueeze(0)})


TOGETHER = (
    "the Fisher blocks of {names} are squares of the gradients of whole batches, and not of single examples. With true "
    "targets they depend on the sizes of the batches, and vanish where the gradient of the loss does; with sampled "
    "targets they have the noise of one sample a batch. The gradients of single examples are not known: {error}"
)


def by_examples(losses: WeightedLosses, owners: Mapping[int, Tensor], examples: int) -> list[Tensor]:
    """The inputs of the losses; of pieces, those of all together, with a row for every example.

    owners: of the rows of pieces, by the number of the loss.
    """
    whole = [loss.inputs for number, (_, loss) in enumerate(losses) if number not in owners]
    alike: dict[Any, list[int]] = {}  # pieces whose rows are of one shape
    for number in owners:
        loss = losses[number][1]
        alike.setdefault((loss.inputs.dtype, loss.inputs.shape[loss.case_axes :]), []).append(number)
    for numbers in alike.values():
        rows = torch.cat([losses[n][1].inputs.flatten(0, losses[n][1].case_axes - 1) for n in numbers])
        every = torch.cat([owners[n] for n in numbers])
        whole.append(Examples(every, examples).by_example(rows, every))
    return whole


def with_last(sources: Iterator[CaseSource]) -> Iterator[tuple[CaseSource, bool]]:
    """Every source, and whether it is the last."""
    source = next(sources, None)
    while source is not None:
        following = next(sources, None)
        yield source, following is None
        source = following


def warn_of_noise(model: nn.Module, what: str) -> None:
    """Warn if modules are in training mode whose output for an example is not that of the example alone. what: is
    recorded."""
    if noisy := noisy_modules(model):
        more = f" and {len(noisy) - 3} more" if len(noisy) > 3 else ""
        warn_user(
            UserWarning(
                f"{what} are recorded in training mode, where {', '.join(noisy[:3])}{more} may draw random numbers or "
                "normalize over the batch: every number is that of one draw, and of an example among the others of its "
                "batch. Call net.eval() before."
            )
        )


def without_last(numbers: Tensor, rows: int) -> str:
    """The end of an error about a loss without a row for a position of each sequence.

    numbers: of examples, [cases, positions].
    """
    shifts = numbers.dim() == 2 and rows == numbers.shape[0] * (numbers.shape[1] - 1)
    return (
        " If forward compares logits[:, :-1] with labels[:, 1:], write [:, :-1] behind the numbers, too."
        if shifts
        else ""
    )


def noisy_modules(model: nn.Module) -> list[str]:
    """The modules whose output for an example is one draw, or depends on the rest of the batch."""
    if not any(module.training for module in model.modules()):
        return []

    def is_noisy(module: nn.Module) -> bool:
        if not module.training:
            return False
        drops = isinstance(module, DROPOUTS) and module.p > 0
        drops_between = isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
        return drops or drops_between or isinstance(module, BATCH_NORMS)

    return [name or type(model).__name__ for name, module in model.named_modules() if is_noisy(module)]


# --- rows of single examples ------------------------------------------------------------------------------------------


def returned_activations(program: Program, emitted: EmittedModel) -> set[fx.Node]:
    """The last activations of what forward returns, but for its loss, and of the other terms of the loss."""
    losses = set(program.returned_losses)
    leaves = emitted.leaves if emitted.whole else pytree.tree_leaves(program.returned)
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf not in losses]
    return {*program.cut, *(node for node in nodes if shape_of(node))}


def reason_apart(program: Program, registration: Registration, ends: Collection[fx.Node]) -> str | None:
    """Why the gradients of single examples are not made of rows; None if they may be. ends: `returned_activations`."""
    if registration.generic:
        return "it is generic"
    if any(use.batch_independent for use in registration.uses):
        return "its gradient is summed over the batch"
    if any(step.left_out for use in registration.uses for step in use.through):
        return "its rows leave out a part of the gradient"
    if not all(cases_apart(program.layers, use) for use in registration.uses):
        return "its rows are merged with positions"
    if ends and is_read_elsewhere(program, registration, ends):
        return "other terms of the loss, or other outputs, use it where the distribution of the Fisher does not"
    return None


def is_read_elsewhere(program: Program, registration: Registration, ends: Collection[fx.Node]) -> bool:
    """Whether what forward returns besides the Fisher's outputs depends on the parameters of a registration by other
    ways than its uses, as an auxiliary term of a second pass through the layers does. ends: `returned_activations`."""
    owners = set(registration.owners)
    of_owners = (use for other in program.registrations if owners & {*other.owners} for use in other.uses)
    # The bias of an output that is permuted is added behind it, at the last node of the use.
    uses = {node: use for use in of_owners for node in (use.output, *use.nodes) if use.nodes.isdisjoint(node.users)}

    def operands(node: fx.Node) -> list[fx.Node]:
        return differentiated(node) if node not in uses else [uses[node].input]

    reads = [node for node in program.graph.find_nodes(op="get_attr") if program.owner(str(node.target)) in owners]
    seen = set(reads)
    while reads:
        node = reads.pop()
        if node in ends:
            return True
        following = [user for user in node.users if user not in seen and node in operands(user)]
        seen.update(following)
        reads += following
    return False


def refuse_towers(registrations: Sequence[Registration]) -> None:
    towers = [str(registration) for registration in registrations if registration.towers > 1]
    if towers:
        raise RegistrationError(
            "gradients of single cases are those of one mini-batch, and these registrations have several towers:\n  "
            + "\n  ".join(towers)
            + "\nCompile the model of one mini-batch."
        )


def examples_first(rows: Rows, use: Use, examples: int) -> Rows | None:
    """The rows [N, S, ...] of N examples; None if they are of no single examples. The steps of a recurrent layer are
    positions."""
    cases = rows.d.shape[0]
    if cases == examples:
        return rows
    if use.steps == 1 or use.steps_in_positions or cases != use.steps * examples:
        return None

    def steps_as_positions(tensor: Tensor) -> Tensor:
        by_step: Tensor = tensor.unflatten(0, (use.steps, examples)).movedim(0, 1)
        return by_step.flatten(1, 2)

    return replace(
        rows,
        x=steps_as_positions(rows.expanded()),
        d=steps_as_positions(rows.d),
        mask=None if rows.mask is None else steps_as_positions(rows.mask),
    )


OutputsOf = Callable[[Any], Tensor]  # of what the model returns: [N, C]
REMEDY = "Pass outputs=, a function from what the model returns to [examples, outputs]."


@dataclass(frozen=True)
class OutputGradients:
    """The gradients of C outputs of some examples of one registration.

    Attributes:
        first: the number of the first example.
        cases: N·C cases, those of an example next to each other.
        lone: in place of these, if every example has a single row: this row, [N, 1, g, i], and the gradient rows of its
            outputs, [N, C, g, o], or [1, C, g, o] if all examples have the same.
    """

    first: int
    cases: Cases | None = None
    lone: Rows | None = None

    def one_by_one(self) -> Cases:
        """N·C cases, also of lone rows."""
        if self.lone is None:
            assert self.cases is not None, "bug in kfac_fx: no gradients of outputs"
            return self.cases
        rows, number = self.lone, self.lone.d.shape[1]
        d = rows.d.expand(len(rows.x) if len(rows.d) == 1 else -1, -1, -1, -1).flatten(0, 1).unsqueeze(1)
        return Cases(
            rows.matrix, (replace(rows, x=every_case_repeated(rows.x, number), d=d, mask=of_mask(rows, number)),)
        )


OutputConsumer = Callable[[Key, OutputGradients, int], None]  # the last is C


def record_outputs(
    of: CaseRecorder,
    values: Any,
    consume: OutputConsumer,
    *,
    only: Iterable[Key],
    outputs: OutputsOf | None = None,
    grouped: Examples | None = None,
) -> tuple[int, int]:
    """Hand the gradients of all outputs of the examples of one batch to `consume`. Returns (N, C).

    Args:
        of: the capture with collecting taps.
        values: the model's inputs, as `capture.flatten` returns them.
        only: the registrations that are wanted.
        outputs: a function from what the model returns to [N, C]; None: it returns one tensor, [N, ...].
        grouped: the example of every row, where that is not its place in a dimension.

    Raises ValueError if the outputs are no such tensor, RegistrationError if a registration has several towers.
    """
    calls: list[TappedCall] = []
    with of.run(values, only, grouped, calls) as run:

        def by_example(output: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
            returned = of.recorder.capture.unflatten(output)
            lone = is_differentiable(returned)  # a tensor has no structure to be looked through
            leaves = [returned] if lone else list(filter(is_differentiable, results.tree_leaves(output)))
            constants = [leaf.detach().requires_grad_() for leaf in leaves]
            returned = constants[0] if lone else of.losses.rebuilt(output, leaves, constants)
            return leaves, constants, of_examples(returned, outputs, run.examples)

        leaves, constants, chosen = of_run = by_example(run.output)
        if not run.examples:
            return 0, chosen.shape[1]

        def rows_of_cases(output: Any, _: tuple[Tensor, ...]) -> LossRows:
            leaves, constants, chosen = of_run if output is run.output else by_example(output)
            return LossRows(leaves, constants, [chosen])

        if outputs is not None:  # the outputs themselves have a gradient
            instead = "outputs=lambda outputs: outputs.log_softmax(1)"
            refuse_without_gradient("the function of the outputs", chosen, constants, instead)
        if grouped is None:
            every_node = of.recorder.emitted.leaves
            flat = leaves if len(every_node) == 1 else results.tree_leaves(run.output)
            pairs = zip(every_node, flat, strict=of.recorder.whole)
            nodes = [node for node, leaf in pairs if is_differentiable(leaf)]
            kind = "outputs" if outputs is None else code_of(outputs)
            of.set_meeting_apart(values, rows_of_cases, kind, run, nodes)
        every = torch.eye(chosen.shape[1], dtype=chosen.dtype, device=chosen.device)  # one row for each output

        def cotangents(example: int | None = None) -> Cotangents:
            """The gradients of all outputs, [C, *leaf]: those of one example, or of all examples together."""
            vectors = every.unsqueeze(1).expand(-1, *chosen.shape)
            if example is not None:
                here = torch.arange(run.examples, device=chosen.device) == example
                vectors = vectors * here.unsqueeze(-1)
            if outputs is None:  # they are the numbers of the only leaf
                return [vectors.view(-1, *leaves[0].shape)]
            return pulled([chosen], [vectors], constants, keep=True, batched=True)

        of_all, by_key = cotangents(), calls_by_key(run, calls)
        reason: str | None = None
        for part in in_parts({key: of_key for key, of_key in by_key.items() if key not in of.apart}, len(every)):
            pullback = Pullback(leaves, [call.output for _, call in part], True, reason)
            uses: dict[Key, list[SpreadRows | None]] = {}
            for (key, call), gradients in zip(part, pullback(of_all), strict=True):
                uses.setdefault(key, []).append(SpreadRows.of(call, gradients, run))
            reason = pullback.loop_reason
            for key, of_key in uses.items():
                whole = [rows for rows in of_key if rows is not None]
                if len(whole) < len(of_key):
                    of.apart[key] = "its rows are of no single examples"
                else:
                    consume(key, joined(whole), len(every))
        if separate := [r for r in run.backward.registrations if r.parameters in of.apart]:
            of_parameters(separate, run, leaves, cotangents, reason, consume)
    return run.examples, len(every)


def calls_by_key(run: CaseRun, calls: Sequence[TappedCall]) -> dict[Key, list[TappedCall]]:
    keys: dict[CollectingTap, Key] = {tap: key for key, taps in run.backward.taps.items() for tap in taps}
    by_key: dict[Key, list[TappedCall]] = {}
    for call in calls:
        by_key.setdefault(keys[call.tap], []).append(call)
    return by_key


def of_examples(returned: Any, outputs: OutputsOf | None, examples: int) -> Tensor:
    """The outputs of every example, [N, C]. Raises ValueError."""
    chosen = returned if outputs is None else outputs(returned)
    if not isinstance(chosen, Tensor):
        raise ValueError(
            f"outputs are wanted as a tensor [{examples}, ...], and this is a {type(chosen).__name__}. {REMEDY}"
        )
    if not chosen.dim() or len(chosen) != examples or not chosen.is_floating_point():
        kind = f"{str(chosen.dtype).removeprefix('torch.')} {list(chosen.shape)}"
        raise ValueError(f"outputs are wanted as real numbers [{examples}, ...], and these are {kind}. {REMEDY}")
    return chosen.flatten(1) if chosen.dim() > 1 else chosen.unsqueeze(1)  # of an empty batch, too


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpreadRows:
    """The rows of one use for C outputs of N examples.

    Attributes:
        rows: x [N, S, g, i], or ids, the same for all outputs; d [N, S, g, o·C].
        x: [N, S, g, i·C], if every output has an x of its own, as where a matrix is used transposed; else None.
    """

    rows: Rows
    x: Tensor | None
    outputs: int

    @staticmethod
    def of(call: TappedCall, gradients: Tensor, run: CaseRun) -> SpreadRows | None:
        """gradients: of what came out of the layer, [C, *output]. None if its rows are of no single examples."""
        first = call.rows(gradients[0])
        if len(gradients) == 1:
            alone = run.backward.of_examples(first, call.tap.use)
            return None if alone is None else SpreadRows(alone, None, 1)
        d = spread(torch.vmap(lambda gradient: call.rows(gradient).d)(gradients))
        rows = run.backward.of_examples(replace(first, d=d), call.tap.use)
        if rows is None:
            return None
        try:
            torch.vmap(lambda gradient: call.rows(gradient).x, out_dims=None)(gradients)
        except ValueError:  # of torch, for a tensor that is not the same for all gradients
            x = spread(torch.vmap(lambda gradient: call.rows(gradient).x)(gradients))
            with_all = run.backward.of_examples(replace(first, x=x, d=d), call.tap.use)
            assert with_all is not None, "bug in kfac_fx: rows are of single examples or not as their x is"
            return SpreadRows(rows, with_all.x, len(gradients))
        return SpreadRows(rows, None, len(gradients))

    @property
    def is_lone(self) -> bool:
        return self.x is None and not self.rows.ids and self.rows.d.shape[1] == 1

    def lone(self) -> Rows:
        """x [N, 1, g, i] and d [N, C, g, o]; of several outputs [1, C, g, o] if these are the same for all examples, as
        those of a last layer are, whose rows are the outputs. The host waits for the comparison."""
        if self.outputs == 1:  # whose dimension is that of the position
            return self.rows
        d = self.rows.d.unflatten(-1, (-1, self.outputs)).squeeze(1).movedim(-1, 1)
        same = len(self.rows.x) == len(d) and torch.equal(d, d[:1].expand(d.shape))
        return replace(self.rows, d=d[:1] if same else d)

    def cases(self) -> Rows:
        """N·C cases: x [N·C, S, g, i], d [N·C, S, g, o]."""
        x = every_case_repeated(self.rows.x, self.outputs) if self.x is None else self.apart(self.x)
        return replace(self.rows, x=x, d=self.apart(self.rows.d), mask=of_mask(self.rows, self.outputs))

    def apart(self, side: Tensor) -> Tensor:
        """[N, S, g, d·C] -> [N·C, S, g, d]."""
        apart: Tensor = side.unflatten(-1, (-1, self.outputs)).movedim(-1, 1)
        return apart.flatten(0, 1)


def spread(side: Tensor) -> Tensor:
    """[C, N, S, g, d] -> [N, S, g, d·C]."""
    return side.movedim(0, -1).flatten(-2)


def every_case_repeated(x: Tensor, times: int) -> Tensor:
    """Every case so many times; what all cases share stays."""
    return x if len(x) == 1 else x.repeat_interleave(times, 0)


def of_mask(rows: Rows, times: int) -> Tensor | None:
    return None if rows.mask is None else rows.mask.repeat_interleave(times, 0)


def joined(uses: Sequence[SpreadRows]) -> OutputGradients:
    """The gradients of one registration."""
    if len(uses) == 1 and uses[0].is_lone:
        return OutputGradients(0, lone=uses[0].lone())
    return OutputGradients(0, Cases(uses[0].rows.matrix, tuple(use.cases() for use in uses)))


def in_parts(calls: Mapping[Key, Sequence[TappedCall]], outputs: int) -> Iterator[list[tuple[Key, TappedCall]]]:
    """The calls of neighboring registrations, as many as have room for C gradients of what comes out of them."""
    part: list[tuple[Key, TappedCall]] = []
    room = CHUNK_BYTES
    for key, of_key in calls.items():
        size = outputs * sum(call.output.numel() * call.output.element_size() for call in of_key)
        if part and size > room:
            yield part
            part, room = [], CHUNK_BYTES
        part += [(key, call) for call in of_key]
        room -= size
    if part:
        yield part


# --- registrations without rows of single examples --------------------------------------------------------------------


def of_parameters(
    separate: Sequence[Registration],
    run: CaseRun,
    leaves: Sequence[Tensor],
    cotangents: Callable[[int], Cotangents],
    reason: str | None,
    consume: OutputConsumer,
) -> None:
    """The gradients of registrations by autograd, with one backward for every example.

    leaves: what the model returned. cotangents: of all outputs of one example, [C, *leaf]. reason: see `Pullback`.
    """
    names = list(dict.fromkeys(name for registration in separate for name in registration.owners))
    pullback = Pullback(leaves, [run.backward.parameters[name] for name in names], True, reason)
    of_one = split(run.backward.parameters, separate)
    forms = {registration.parameters: vector_form(registration, of_one) for registration in separate}
    for example in range(run.examples):
        parts = split(dict(zip(names, pullback(cotangents(example)), strict=True)), separate, 1)
        for key, form in forms.items():
            packed = torch.vmap(form.pack)({name: parts[name] for name in key})
            whole = packed.to(torch.promote_types(packed.dtype, torch.float32))
            consume(key, OutputGradients(example, Cases(form.shape, whole=whole)), len(whole))
