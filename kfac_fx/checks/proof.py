"""The tap of the proof: rows that may be wrong, and what of a gradient no rows have.

The registration proof: on one batch, for every structured registration,

    sum over uses of grad_rowsᵀ · rows  ==  the gradient that autograd gives.

It catches a wrong axis, a wrong dilation, a wrong layout and a missed use alike. What fails becomes generic, as does
what is called unused, if a gradient reaches it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.checks.equivalence import coarsest, compare
from kfac_fx.linalg.matrices import dense, full_precision
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.approximations import APPROXIMATIONS, KRON, KRON_INDEP
from kfac_fx.passes.claiming.approximation import requested
from kfac_fx.passes.errors import RegistrationError, fatal, first_line, table
from kfac_fx.passes.ir import KEPT, Program, Registration, Use, tensor_attrs
from kfac_fx.passes.layers import Layer
from kfac_fx.recording.recorder import Recorder
from kfac_fx.statistics.row_sums import named
from kfac_fx.taps.rows import BothRows
from kfac_fx.taps.tap import Tap


class ProofTap(Tap):
    """A tap whose rows may be wrong: it keeps what went wrong instead of raising in the middle of a backward."""

    failure: str | None = None
    remainders: list[Tensor]  # of every use: numbers whose gradients the rows leave out
    kind: tuple[Any, ...] = ()  # of its rows: are they ids, and how many
    reached: bool = False  # whether the last backward sent anything to other cases than the first

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        assert registration.matrix is not None, "bug in kfac_fx: a proof of a generic registration"
        both = super().both_rows(registration, use, layer)
        g, o, i = self.matrix
        inputs = i - (registration.matrix.bias is not None)
        self.cases: set[int] = set()  # of every call
        self.remainders = []
        matrix, names, bias = registration.matrix, tuple(tensor_attrs(use)), registration.matrix.bias is not None
        some = [(number, step) for number, step in enumerate(use.through) if step.left_out]

        def guarded(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            try:
                rows, grad_rows = both(output_grad, input, *tensors)
                check_shapes(rows, grad_rows, (g, o, inputs))
                self.cases.add(grad_rows.shape[0])
                self.reached = self.reached or reaches_others(rows, grad_rows)
                if some:
                    summed = named("gradient").compute(rows, grad_rows, bias, self.matrix, None)
                    (gradient,) = matrix.unpack(summed).values()
                    attrs = dict(zip(names, tensors, strict=True))
                    for number, step in some:
                        remainder = step.remainder(gradient, {key: attrs[f"{number}.{key}"] for key in step.nodes})
                        self.remainders += [] if remainder is None else [remainder]
                self.kind = not rows.is_floating_point(), list(grad_rows.shape[:2])
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if fatal(error):
                    raise
                self.failure = f"its rows could not be made: {first_line(error)}"
                return output_grad.new_zeros(1, 1, g, inputs), output_grad.new_zeros(1, 1, g, o)
            return rows, grad_rows

        return guarded


def reaches_others(rows: Tensor, grad_rows: Tensor) -> bool:
    """Whether the gradient of any case but the first is not zero. Of transposed uses the gradient is in the rows."""
    sides = [grad_rows] + ([rows] if rows.is_floating_point() and rows.shape[0] == grad_rows.shape[0] else [])
    both = torch.stack([side.detach()[1:].flatten(1).any(1) for side in sides])
    return bool(both.all(0).any())


def check_shapes(rows: Tensor, grad_rows: Tensor, sizes: tuple[int, int, int]) -> None:
    """Raises ValueError if these are no rows of a matrix [g, o, i]."""
    g, o, i = sizes
    cases, positions = grad_rows.shape[:2]
    wanted = [cases, positions, g, o] if grad_rows.dim() == 4 else [cases, positions, o]
    if list(grad_rows.shape) != wanted or (grad_rows.dim() == 3 and g > 1):
        raise ValueError(f"gradient rows of shape {list(grad_rows.shape)}, wanted [N, S, {g}, {o}]")
    if rows.is_floating_point():
        ends = ([g, i], [i]) if g == 1 else ([g, i],)
        right = rows.shape[1] == positions and list(rows.shape[2:]) in ends
    else:
        right = rows.shape[1:] == grad_rows.shape[1:2] and g == 1
    if not right or rows.shape[0] not in (1, cases):
        raise ValueError(f"rows of shape {list(rows.shape)}, wanted [{cases}, {positions}, {g}, {i}]")


def inexact(registration: Registration) -> bool:
    """Whether its rows leave something of the gradient out."""
    return any(step.left_out for use in registration.uses for step in use.through)


def gradient_of(parameter: Tensor, remainders: Sequence[Tensor]) -> Tensor:
    """What the rows leave out; see `Parametrization.remainder`."""
    learned = [number for number in remainders if number.requires_grad]
    return torch.autograd.grad(learned, parameter)[0] if learned else torch.zeros_like(parameter)


# --- proof ------------------------------------------------------------------------------------------------------------


Pairs = Iterator[tuple[Registration, Tensor, Tensor, Tensor]]  # autograd's gradient, the rows', a bound on both norms
RELATIVE = 1e-3  # right ones agree to about 1e-6 in float32, wrong ones differ by about 1
MISSED = "a gradient reaches it, and no use of it was found; please report the model"
ROUNDING = 1e-5  # of the largest sum that the rows could make, for gradients that cancel to nothing


@dataclass(frozen=True)
class Verdict:
    """What the proof found: the program with failures demoted, and the reasons by registration."""

    program: Program
    failed: Mapping[tuple[str, ...], str]
    conclusive: bool = True  # False: the batch has no cases, or no finite gradients to compare with


@dataclass(frozen=True)
class Comparison:
    """Of the gradients of one registration, in numbers: the matrices of all of them together are never kept."""

    error: float
    size: float
    bound: float
    finite: bool

    @staticmethod
    def of(wanted: Tensor, got: Tensor, bound: Tensor) -> Comparison:
        error, size = float((got - wanted).norm()), float(wanted.norm())
        return Comparison(error, size, float(bound), bool(wanted.isfinite().all()))


def prove(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
    """Run the proof. Raises UntraceableError if the graph is not the model, RegistrationError under `strict` if a
    registration fails."""
    prover = replace_taps(recorder)
    values = recorder.capture.flatten(args, kwargs)
    with full_precision(everything=True):  # rounding to TF32 is as large as what is looked for
        compare(prover, args, kwargs)
        recorder.capture = prover.capture
        pairs, fisher, missed, mixing = gradients(prover, values)
        compared = {one.parameters: Comparison.of(*rest) for one, *rest in pairs}
    if not all(one.finite for one in compared.values()) or prover.examples(values) == 0:
        return Verdict(recorder.program, {}, conclusive=False)
    coarse = max(1.0, 4 * coarsest(recorder, values) / RELATIVE)  # autograd's gradients are rounded to the dtype
    failed: dict[tuple[str, ...], str] = {(name,): MISSED for name in missed}
    other: dict[tuple[str, ...], tuple[str, str]] = {}  # what fits the rows, and why
    taps, towers = proof_taps(prover), prover.tower_cases(fisher)

    def cases(tap: ProofTap) -> int:
        return towers[tap.tower] if len(towers) > 1 else prover.examples(values)

    for one in recorder.program.registrations:
        if one.generic:
            continue
        reason = next((tap.failure for tap in taps[one.parameters] if tap.failure), None)
        if reason is None:
            found = compared[one.parameters]
            if not found.error <= coarse * (RELATIVE * found.size + ROUNDING * found.bound):
                apart = f"{found.error / found.size:.0%} apart" if found.size else "autograd's is zero"
                reason = f"the proof failed: rows give another gradient than autograd ({apart})"
        if reason is not None:
            failed[one.parameters] = reason
        elif one.structure.needs_cases and any(tap.cases - {cases(tap)} for tap in taps[one.parameters]):
            why = f"cases are merged with positions at its output, so not {one.approximation!r}"
            other[one.parameters] = KRON.name, why
        elif one.parameters in mixing:
            why = f"cases meet between it and the outputs, so {one.approximation!r} leaves out products of two cases"
            other[one.parameters] = one.approximation, why
        elif one.structure.series and (mixed := unlike(taps[one.parameters])):
            other[one.parameters] = KRON_INDEP.name, f"{mixed}, so not {one.approximation!r}"
    if failed and recorder.program.options.strict:
        rows = [(", ".join(names), reason) for names, reason in failed.items()]
        many = "1 registration" if len(failed) == 1 else f"{len(failed)} registrations"
        raise RegistrationError(
            f"{many} failed the proof:\n{table(rows)}\n"
            "Correct the layers' declarations, or let these parameters be generic with compile(..., strict=False)."
        )
    return Verdict(demoted(recorder.program, failed, other, missed), failed)


def unlike(taps: Sequence[ProofTap]) -> str | None:
    """Why these uses have no rows that a series could be made of."""
    if any(tap.kind[0] for tap in taps):
        return "its rows are ids"
    first = {tap.tower: tap.kind for tap in reversed(taps)}
    if any(tap.kind != first[tap.tower] for tap in taps):
        return "its uses have different numbers of rows"
    return None


def replace_taps(recorder: Recorder) -> Recorder:
    needed = {
        one.parameters: ("gradient", "A_diag", "G_diag") for one in recorder.program.registrations if not one.generic
    }
    program = recorder.program.but(registrations=tuple(map(whole, recorder.program.registrations)))
    return replace(recorder, program=program, statistics=needed, backend="eager", make_tap=ProofTap)


def whole(one: Registration) -> Registration:
    """What is proved are the rows of the matrix, all of them."""
    uses = tuple(all_rows(use) if use.mask_dims else use for use in one.uses)
    approximation = KRON.name if one.structure.kronecker else one.approximation
    return replace(one, uses=uses, approximation=approximation, sampling=None, patch_mask=None)


def all_rows(use: Use) -> Use:
    """Without the user's mask, of which autograd knows nothing."""
    return replace(use, attrs={name: value for name, value in use.attrs.items() if name != KEPT}, mask_dims=())


def proof_taps(prover: Recorder) -> dict[tuple[str, ...], list[ProofTap]]:
    return {key: [one for one in taps if isinstance(one, ProofTap)] for key, taps in prover.taps.items()}


def gradients(
    prover: Recorder, values: tuple[Any, ...]
) -> tuple[Pairs, tuple[Tensor, ...], list[str], set[tuple[str, ...]]]:
    """For random cotangents, registration by registration, autograd's gradient and the rows' as matrices; the Fisher's
    outputs; what is called unused, but has a gradient; and what is to have a block of gradients of cases, and has
    cases that meet behind it.

    Beside what a backward needs there is one gradient more, the rows'; of the matrices only those of one registration.
    """
    registrations = [one for one in prover.program.registrations if not one.generic]
    unused = [prover.program.generic(name, None) for name in prover.program.unused]
    with prover.isolated():
        live = {name: revealing(value.detach()).requires_grad_() for name, value in prover.live_parameters().items()}
        idle = [one for one in unused if live.keys() >= set(one.owners)]  # the others are not in the emitted module
        probes = prover.make_probes(prover.examples(values), next(iter(live.values()), torch.empty(())))
        _, fisher = prover.call(live, prover.copied_buffers(), values, probes)
        generator = torch.Generator().manual_seed(0)
        outputs = [out for out in fisher if out.requires_grad]
        cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out) for out in outputs]
        names = list(dict.fromkeys(name for one in (*registrations, *idle) for name in one.owners))
        leaves = [live[name] for name in names] + [probe for one in probes for probe in one.values()]
        recorded = bool(outputs) and bool(leaves)
        taps = [(one, proof_taps(prover)[one.parameters]) for one in registrations if inexact(one)]
        asked = [one for one in registrations if by_case(prover.program, one)]
        grads = (
            torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, retain_graph=bool(taps or asked))
            if recorded
            else [None] * len(leaves)
        )
        changes = {
            one.parameters: gradient_of(live[one.parameters[0]], [number for tap in some for number in tap.remainders])
            for one, some in taps
        }
        mixing = behind_which_cases_meet(prover, asked, outputs, cotangents, leaves[len(names) :]) if asked else set()
    found = [torch.zeros_like(leaf) if grad is None else dense(grad) for leaf, grad in zip(leaves, grads, strict=True)]
    by_name = dict(zip(names, found, strict=False))
    statistics = iter(found[len(names) :])

    def pairs() -> Pairs:
        for one in registrations:
            assert one.matrix is not None, "bug in kfac_fx: a structured registration without a matrix"
            got = next(statistics)
            if one.parameters in changes:
                got = got + one.matrix.pack({one.parameters[0]: changes[one.parameters]})
            bound = (next(statistics).sum() * next(statistics).sum()).sqrt()
            yield one, one.matrix.pack(split(by_name, [one])), got, bound

    return pairs(), fisher, [name for name, slab in split(by_name, idle).items() if bool(slab.any())], mixing


def by_case(program: Program, one: Registration) -> bool:
    """Whether the user asked for a block made of gradients of cases."""
    asked = requested(program, one.parameters, one.layer) & APPROXIMATIONS.keys()
    return not one.structure.kronecker and any(not APPROXIMATIONS[name].kronecker for name in asked)


def behind_which_cases_meet(
    prover: Recorder,
    asked: Sequence[Registration],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    probes: Sequence[Tensor],
) -> set[tuple[str, ...]]:
    """Those where the first case's outputs have a gradient for rows of others: batch normalization, contrasts."""
    taps = proof_taps(prover)
    for one in asked:
        for tap in taps[one.parameters]:
            tap.reached = False
    first = [torch.cat([one[:1], torch.zeros_like(one[1:])]) if one.dim() else one for one in cotangents]
    torch.autograd.grad(outputs, probes, first, allow_unused=True, retain_graph=True)
    return {one.parameters for one in asked if any(tap.reached for tap in taps[one.parameters])}


def revealing(value: Tensor) -> Tensor:
    """Small random numbers for a parameter that is all zero, as many are at the start: there is no gradient in front of
    it, and what is zero on both sides would prove nothing. What is proved holds for any numbers."""
    if not value.is_floating_point() or bool(value.any()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return 0.02 * noise.to(value)


def demoted(
    program: Program,
    failed: Mapping[tuple[str, ...], str],
    other: Mapping[tuple[str, ...], tuple[str, str]],
    missed: Sequence[str],
) -> Program:
    kept: list[Registration] = []
    for one in program.registrations:
        if one.parameters in failed:
            reason = f"{one.layer}: {failed[one.parameters]}"
            kept += [program.generic(name, reason) for name in one.parameters]
        elif one.parameters in other:
            approximation, why = other[one.parameters]
            kept.append(replace(one, approximation=approximation, reason=why))
        else:
            kept.append(copy.copy(one))
    kept += [program.generic(name, MISSED) for name in missed]
    unused = tuple(name for name in program.unused if name not in missed)
    return program.but(registrations=tuple(kept), unused=unused)
