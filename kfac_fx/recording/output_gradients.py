"""The gradients of all outputs of single examples, registration by registration: the Jacobian of a network by examples.

The model has C outputs for each of N examples. One backward under `torch.vmap` sends all C back at once, each for all
examples together, to what comes out of the layers. There the layer's declaration makes the rows of a use. Where every
example has a single row, its C gradients are C gradient rows times the same row, so the matrices of a last layer with
many classes are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import is_differentiable, pulled
from kfac_fx.linalg.vectors import split, vector_form
from kfac_fx.losses.sources import Cotangents, refuse_without_gradient
from kfac_fx.passes import results
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.case_gradients import CaseRecorder, CaseRun, Cases
from kfac_fx.recording.exact import CHUNK_BYTES, Pullback
from kfac_fx.recording.examples import Examples
from kfac_fx.recording.meeting_cases import LossRows
from kfac_fx.recording.statistics import Key, Rows
from kfac_fx.recording.taps import CollectingTap, TappedCall

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
            leaves = list(filter(is_differentiable, results.tree_leaves(output)))
            constants = [leaf.detach().requires_grad_() for leaf in leaves]
            returned = of.losses.rebuilt(output, leaves, constants)
            return leaves, constants, of_examples(returned, outputs, run.examples)

        def rows_of_cases(output: Any, _: tuple[Tensor, ...]) -> LossRows:
            leaves, constants, chosen = by_example(output)
            return LossRows(leaves, constants, [chosen])

        leaves, constants, chosen = by_example(run.output)
        instead = "outputs=lambda outputs: outputs.log_softmax(1)"
        refuse_without_gradient("the function of the outputs", chosen, constants, instead)
        if grouped is None:
            leaves_of_graph = results.tree_leaves(of.recorder.program.returned) if of.recorder.whole else []
            pairs = zip(leaves_of_graph, results.tree_leaves(run.output), strict=of.recorder.whole)
            nodes = [node for node, leaf in pairs if is_differentiable(leaf)]
            of.set_meeting_apart(values, rows_of_cases, "outputs", run, nodes)
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
        verify, reason = True, None
        for part in in_parts({key: of_key for key, of_key in by_key.items() if key not in of.apart}, len(every)):
            pullback = Pullback(leaves, [call.output for _, call in part], verify, reason)
            uses: dict[Key, list[SpreadRows | None]] = {}
            for (key, call), gradients in zip(part, pullback(of_all), strict=True):
                uses.setdefault(key, []).append(SpreadRows.of(call, gradients, run))
            verify, reason = False, pullback.loop_reason
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
    return chosen.reshape(examples, -1)


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
        """x [N, 1, g, i] and d [N, C, g, o], or [1, C, g, o] if these are the same for all examples, as those of a last
        layer are, whose rows are the outputs. The host waits for the comparison."""
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
    pullback = Pullback(leaves, [run.backward.parameters[name] for name in names], loop_reason=reason)
    for example in range(run.examples):
        parts = split(dict(zip(names, pullback(cotangents(example)), strict=True)), separate, 1)
        for registration in separate:
            form = vector_form(registration, parts)
            packed = torch.vmap(form.pack)({name: parts[name] for name in registration.parameters})
            whole = packed.to(torch.promote_types(packed.dtype, torch.float32))
            gradients = OutputGradients(example, Cases(form.shape, whole=whole))
            consume(registration.parameters, gradients, len(whole))
