"""The registration proof: on one batch, for every structured registration,

    sum over uses of grad_rowsᵀ · rows  ==  the gradient that autograd gives.

It finds a wrong axis, a wrong dilation, a wrong layout and a missed use alike. The second moment that a user's layer
computes without its rows is compared with that of the rows. A parameter that fails becomes generic, and so does a
parameter that is registered as unused and has a gradient.

It also finds a dimension of the inputs that is not that of the cases: one along which the outputs mix.

    x [T, N, C] -> attention over T -> y [T, N, V]      y[0] changes with x[1], and y[:, 0] does not change with x[:, 1]

A batch of sequences with the time first looks like one with the cases first. If no layer and no user says which it is,
the model is run with one place of a dimension changed. If the outputs mix along the conventional dimension and not
along another, the cases would be a guess, which is refused. Batch normalization mixes along all, and is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense_or_zero, full_precision, pulled, with_gradient
from kfac_fx.linalg.vectors import split
from kfac_fx.passes import results
from kfac_fx.passes.approximations import (
    A_DIAG,
    APPROXIMATIONS,
    G_DIAG,
    GRADIENT,
    KRON,
    KRON_INDEP,
    MERGED,
    OTHER_ROWS,
    PIECES,
    POOLED,
    UNREACHED,
    UNTIED,
    A,
)
from kfac_fx.passes.cases import ANSWER, CONVENTION, free_sizes
from kfac_fx.passes.check import refuse_generic
from kfac_fx.passes.divide import Division
from kfac_fx.passes.errors import LossError, RegistrationError, UntraceableError, fatal, first_line, table
from kfac_fx.passes.graphs.labels import ancestors, sizes_of, symbolic_sizes
from kfac_fx.passes.ir import Program, Registration, Use, literal_attrs, tensor_attrs
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.passes.layers.declaration import unknown_attribute
from kfac_fx.passes.losses import has_other_rows
from kfac_fx.passes.matrix import precise
from kfac_fx.passes.resolve import choose, is_piece, refuse_others, requested, without_rows
from kfac_fx.passes.torch_private import class_of, pytree
from kfac_fx.passes.tracing.calls import map_tensors
from kfac_fx.passes.tracing.signature import first_sizes
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from kfac_fx.recording.equivalence import check_equivalence, coarsest_rounding, model_kept, random_cotangents
from kfac_fx.recording.meeting_cases import (
    collecting,
    keys_that_meet_in_outputs,
    leaf_with_rows_of,
    revealing,
    with_all_rows,
)
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key, sum_of
from kfac_fx.recording.taps import BothRows, Tap, check_row_shapes, moment_and_grad_rows

PROOF_TOLERANCE = 1e-3  # right gradients agree to about 1e-6 in float32, wrong ones differ by about 1
ROUNDING = 1e-5  # of the largest sum that the rows could make, for gradients that cancel to nothing
AXIS_TOLERANCE = 1e-4  # of the largest output: rounding is below, another input above
NO_LOSS = (  # why the curvature of a registration is zero
    "outputs depend on it, and no loss does, so it has no curvature: name the losses of all outputs that are trained, "
    "as in loss=lambda outputs: [...]"
)
MISSED = "a gradient reaches it, and no use of it was found; please report the model"
TensorDimensions = list[tuple[int, int]]  # (number of the tensor, dimension)
RunOfValues = Callable[[Sequence[Any]], Sequence[Tensor]]  # inputs -> outputs

# --- taps that keep what the proof compares ---------------------------------------------------------------------------


class ProofTap(Tap):
    """A tap whose rows may be wrong: an error in them is kept, because a backward cannot raise it.

    Attributes:
        failure: the error that the rows raised.
        remainders: of every use, the numbers whose gradients the rows leave out.
        kind: of the rows: whether they are ids, and their numbers of cases and positions.
        cases: the numbers of cases of all calls.
    """

    failure: str | None = None
    remainders: list[Tensor]
    kind: tuple[Any, ...] = ()
    cases: set[int]

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        assert registration.matrix is not None, "bug in kfac_fx: a proof of a generic registration"
        both = super().both_rows(registration, use, layer)
        g, o, i = self.matrix
        inputs = i - (registration.matrix.bias is not None)
        self.cases, self.remainders = set(), []
        matrix, names, bias = registration.matrix, tuple(tensor_attrs(use)), registration.matrix.bias is not None
        of_user = layer is not LAYERS.get(layer.name)
        moment = moment_and_grad_rows(registration, use, layer) if of_user else None
        some = [(number, step) for number, step in enumerate(use.through) if step.left_out]

        def guarded(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            try:
                rows, grad_rows = both(output_grad, input, *tensors)
                check_row_shapes(rows, grad_rows, (g, o, inputs))
                self.cases.add(grad_rows.shape[0])
                if some:
                    summed = sum_of(GRADIENT.name, rows, grad_rows, bias, self.matrix, None)
                    (gradient,) = matrix.unpack(summed).values()
                    attrs = dict(zip(names, tensors, strict=True))
                    for number, step in some:
                        remainder = step.remainder(gradient, {key: attrs[f"{number}.{key}"] for key in step.nodes})
                        self.remainders += [] if remainder is None else [remainder]
                if moment is not None:
                    by_rows = sum_of(A.name, precise(rows), grad_rows, bias, self.matrix, None)
                    self.failure = self.failure or moments_apart(by_rows, moment(output_grad, input)[0])
                self.kind = not rows.is_floating_point(), list(grad_rows.shape[:2])
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                if fatal(error):
                    raise
                known = (*literal_attrs(use), *names)
                missing = f"they read {unknown_attribute(error, known)}" if isinstance(error, KeyError) else ""
                self.failure = f"its rows could not be made: {missing or first_line(error)}"
                return output_grad.new_zeros(1, 1, g, inputs), output_grad.new_zeros(1, 1, g, o)
            return rows, grad_rows

        return guarded


def moments_apart(by_rows: Tensor, declared: Tensor) -> str | None:
    """How the declared second moment of a layer and that of its rows differ; None if they agree."""
    if declared.shape != by_rows.shape:
        return f"its second_moment has the shape {list(declared.shape)}, and that of its rows {list(by_rows.shape)}"
    error, size = float((declared - by_rows).norm()), float(by_rows.norm())
    if error <= PROOF_TOLERANCE * size or not math.isfinite(size):
        return None
    return f"its second_moment is not that of its rows ({f'{error / size:.0%} apart' if size else 'theirs is zero'})"


# --- the proof --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The result of the proof.

    Attributes:
        program: with failed registrations generic.
        failed: the reasons, by registration.
        conclusive: False if the batch has no cases, or no finite gradients to compare with.
        misfits: see `OutputLosses.misfits`; and what hooks of parameters change.
        rows_are_outputs: see `Recorder`.
    """

    program: Program
    failed: Mapping[Key, str]
    conclusive: bool = True
    misfits: Sequence[str] = ()
    rows_are_outputs: bool = False


@dataclass(frozen=True)
class Gradients:
    """Gradients of one backward with random cotangents.

    Attributes:
        pairs: of every registration, autograd's gradient, the rows' gradient (both as matrices), and a bound on their
            norms. One registration at a time is in memory.
        fisher: the Fisher's outputs.
        missed: the parameters that are registered as unused and have a gradient.
        misfits: see `OutputLosses.misfits`.
        unreached: the Fisher's outputs that no loss depends on, by number.
        rows_are_outputs: see `Recorder`.
    """

    pairs: Iterator[tuple[Registration, Tensor, Tensor, Tensor]]
    fisher: tuple[Tensor, ...]
    missed: list[str]
    misfits: list[str]
    unreached: frozenset[int]
    rows_are_outputs: bool


def prove(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
    """Run the proof.

    Raises UntraceableError if the graph is not the model, RegistrationError under `strict` if a registration fails.
    """
    prover = with_proof_taps(recorder)
    values = recorder.capture.flatten(args, kwargs)
    examples = prover.emitted.examples(values)
    differs: dict[Key, str | None] = {}  # why autograd's gradient and the rows' differ
    conclusive = examples > 0
    with full_precision(everything=True):  # rounding to TF32 is as large as the errors that the proof looks for
        of_hooks = check_equivalence(prover, args, kwargs)
        is_divided = isinstance(recorder.emitted, EmittedSubmodules)  # Python may send a gradient there in a later call
        if isinstance(prover.emitted, EmittedSubmodules):
            refuse_guess_of_parts(prover, prover.emitted.division, args, kwargs)
        else:
            refuse_guess(prover, values)
        recorder.emitted.capture = prover.capture
        rounding = max(1.0, 4 * coarsest_rounding(recorder, values) / PROOF_TOLERANCE)  # autograd's, to the dtype
        gradients = proof_gradients(prover, values)
        if isinstance(recorder.emitted, EmittedSubmodules) and isinstance(prover.emitted, EmittedSubmodules):
            recorder.emitted.has_losses_of(prover.emitted)
        for registration, wanted, computed, bound in gradients.pairs:
            conclusive = conclusive and bool(wanted.isfinite().all())
            differs[registration.parameters] = difference_in_words(wanted, computed, rounding, float(bound))
        mixing = mixing_cases(recorder, values, gradients.fisher) if conclusive else frozenset()
    if not conclusive:
        return Verdict(recorder.program, {}, conclusive=False)
    taps, towers = proof_taps(prover), prover.losses.declared.tower_cases(gradients.fisher)
    silent = behind_no_loss(recorder.program, gradients.unreached)
    failed: dict[Key, str] = {(name,): MISSED for name in gradients.missed}
    changed: dict[Key, tuple[str, str]] = {}
    lengths = set(first_sizes(args, kwargs))
    pooled = len(towers) < 2 and are_pooled(recorder, gradients.fisher, examples)
    for registration in recorder.registrations:
        if registration.generic:
            continue
        key = registration.parameters
        cases = [towers[tap.tower] if len(towers) > 1 else examples for tap in taps[key]]
        failure = next((tap.failure for tap in taps[key] if tap.failure), None)
        if reason := failure or differs[key]:
            failed[key] = reason
        elif silent.issuperset(registration.owners):
            changed[key] = registration.approximation, NO_LOSS
        elif registration.structure.needs_cases and is_divided and not all(tap.cases for tap in taps[key]):
            changed[key] = KRON.name, f"{UNREACHED}, so not {registration.approximation!r}"
        elif other := fitting_approximation(registration, taps[key], cases, lengths, key in mixing, pooled):
            changed[key] = other
    if failed and recorder.program.options.strict:
        rows = [(", ".join(names), reason) for names, reason in failed.items()]
        many = "1 registration" if len(failed) == 1 else f"{len(failed)} registrations"
        raise RegistrationError(
            f"{many} failed the proof:\n{table(rows)}\n"
            "Correct the layers' declarations, or let these parameters be generic with compile(..., strict=False)."
        )
    program = demoted(recorder.program, failed, changed, gradients.missed)
    misfits = [*of_hooks, *gradients.misfits]
    return Verdict(program, failed, misfits=misfits, rows_are_outputs=gradients.rows_are_outputs)


def difference_in_words(wanted: Tensor, computed: Tensor, rounding: float, bound: float) -> str | None:
    """How autograd's gradient and the rows' differ; None if they agree."""
    error, size = float((computed - wanted).norm()), float(wanted.norm())
    if error <= rounding * (PROOF_TOLERANCE * size + ROUNDING * bound):
        return None
    apart = f"{error / size:.0%} apart" if size else "autograd's is zero"
    return f"the proof failed: rows give another gradient than autograd ({apart})"


def fitting_approximation(
    registration: Registration,
    taps: Sequence[ProofTap],
    cases: Sequence[int],
    lengths: set[int],
    mixing: bool,
    pooled: bool,
) -> tuple[str, str] | None:
    """The approximation that fits the rows, and why; None if that of the registration does.

    Args:
        cases: the number of cases of every tap.
        lengths: the first sizes of the inputs.
        mixing: whether its cases meet between it and the outputs.
        pooled: see `are_pooled`.
    """
    name = registration.approximation
    if registration.structure.needs_cases:
        others = {number for tap, n in zip(taps, cases, strict=True) for number in tap.cases - {n}}
        if others:
            merged = all(
                tap.cases <= {n * (number // n) for number in tap.cases} for tap, n in zip(taps, cases, strict=True)
            )
            if all(map(is_piece, registration.uses)):
                why = PIECES
            else:
                why = UNTIED if others.issubset(lengths) else MERGED if merged else OTHER_ROWS
            return KRON.name, f"{why}, so not {name!r}"
        if mixing and pooled:
            return KRON.name, f"{POOLED}, so not {name!r}"
    if "dense rows" in registration.structure.needs and any(tap.kind[0] for tap in taps):
        return KRON.name, f"its rows are ids, so not {name!r}"
    if mixing:
        return name, (
            f"cases meet between it and the outputs, so {name!r} leaves out products of two cases, except in the exact "
            "modes"
        )
    if registration.structure.series and (mixed := no_series(taps)):
        return KRON_INDEP.name, f"{mixed}, so not {name!r}"
    return None


def no_series(taps: Sequence[ProofTap]) -> str | None:
    """Why no series can be made of the rows of these uses."""
    if any(tap.kind[0] for tap in taps):
        return "its rows are ids"
    first = {tap.tower: tap.kind for tap in reversed(taps)}
    if any(tap.kind != first[tap.tower] for tap in taps):
        return "its uses have different numbers of rows"
    return None


def with_proof_taps(recorder: Recorder) -> Recorder:
    """A recorder that computes the gradients of all rows, without a compiler."""
    statistics = {
        registration.parameters: (GRADIENT.name, A_DIAG.name, G_DIAG.name)
        for registration in recorder.registrations
        if not registration.generic
    }
    return replace(recorder, emitted=with_all_rows(recorder.emitted, ProofTap), statistics=statistics)


def proof_taps(prover: Recorder) -> dict[Key, list[ProofTap]]:
    return {key: [tap for tap in taps if isinstance(tap, ProofTap)] for key, taps in prover.emitted.taps.items()}


def proof_gradients(prover: Recorder, values: Any) -> Gradients:
    """Run one backward with random cotangents.

    It keeps one gradient of all parameters more than a training step, and the matrices of one registration.
    """
    registrations = [registration for registration in prover.registrations if not registration.generic]
    unused = [prover.program.generic(name, None) for name in prover.program.unused]
    taps = proof_taps(prover)
    with prover.emitted.isolated():
        live = {name: with_gradient(revealing(value.detach())) for name, value in prover.live_parameters().items()}
        idle = [
            registration for registration in unused if live.keys() >= set(registration.owners)
        ]  # the others are not in the emitted module
        probes = prover.make_probes(values, live)
        output, fisher = prover.emitted.run(live, prover.copied_buffers(), values, probes, compiled=False)
        misfits = prover.losses.misfits(output, fisher, values) if prover.emitted.examples(values) else []
        outputs = [out for out in fisher if out.requires_grad]
        unreached = unreached_outputs(prover, output, fisher) if prover.emitted.examples(values) else frozenset()
        rows_are_outputs = loss_rows_are_outputs(prover, output, fisher, values)
        if registrations and fisher and not outputs:
            name = class_of(prover.model).__name__
            raise UntraceableError(f"the graph of {name} has uses of parameters, and its outputs have no gradient")
        cotangents = random_cotangents(dict(enumerate(outputs)))
        names = list(dict.fromkeys(name for registration in (*registrations, *idle) for name in registration.owners))
        leaves = [live[name] for name in names] + [probe for by_name in probes if by_name for probe in by_name.values()]
        inexact = [
            registration
            for registration in registrations
            if any(step.left_out for use in registration.uses for step in use.through)
        ]
        grads = pulled(outputs, cotangents, leaves, keep=bool(inexact))
        left_out = {
            registration.parameters: gradient_left_out(live[registration.parameters[0]], taps[registration.parameters])
            for registration in inexact
        }
    gradients = dense_or_zero(grads, leaves)
    by_name = dict(zip(names, gradients, strict=False))
    statistics = iter(gradients[len(names) :])

    def pairs() -> Iterator[tuple[Registration, Tensor, Tensor, Tensor]]:
        for registration in registrations:
            assert registration.matrix is not None, "bug in kfac_fx: a structured registration without a matrix"
            computed = next(statistics)
            if registration.parameters in left_out:
                computed = computed + registration.matrix.pack(
                    {registration.parameters[0]: left_out[registration.parameters]}
                )
            bound = (next(statistics).sum() * next(statistics).sum()).sqrt()
            yield registration, registration.matrix.pack(split(by_name, [registration])), computed, bound

    missed = [name for name, gradient in split(by_name, idle).items() if bool(gradient.any())]
    return Gradients(pairs(), fisher, missed, misfits, unreached, rows_are_outputs)


def loss_rows_are_outputs(prover: Recorder, output: Any, fisher: tuple[Tensor, ...], values: Any) -> bool:
    """See `Recorder.rows_are_outputs`. A batch of one example does not tell it."""
    examples = prover.emitted.examples(values)
    if examples < 2 or not prover.whole or not prover.losses.are_known:
        return False
    leaves, losses = prover.losses.of_constants(output, fisher, values, "exact", None)
    return all(leaf_with_rows_of(loss.inputs, leaves, examples) == place for place, (_, loss) in enumerate(losses))


READS_PENALTY = (
    "the function given as loss reads a number that forward computes from parameters alone, and that is taken for a "
    "penalty, because these parameters are behind other outputs, too: return it with the size of such an output, as in "
    "return mean, scale.expand_as(mean)"
)


def unreached_outputs(prover: Recorder, output: Any, fisher: tuple[Tensor, ...]) -> frozenset[int]:
    """The Fisher's outputs that no declared loss depends on, by number. Raises LossError for a loss that depends on
    another value with a gradient."""
    if not prover.losses.declared.of_outputs:
        return frozenset()
    fixed = tuple(value.detach() for value in fisher)
    learned_numbers = [
        leaf
        for leaf in results.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.dim()
    ]
    if any(all(number is not value for value in fisher) for number in learned_numbers):
        read = prover.losses.on(prover.losses.rebuilt(output, fisher, fixed), fixed)
        if any(loss.inputs.requires_grad for _, loss in read):
            raise LossError(READS_PENALTY)
    leaves = [with_gradient(value) for value in fixed]
    pairs = prover.losses.on(prover.losses.rebuilt(output, fisher, leaves), tuple(leaves))
    inputs = [loss.inputs.sum() for _, loss in pairs if loss.inputs.requires_grad]
    learned = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
    wanted = [leaves[number] for number in learned]
    gradients = torch.autograd.grad(inputs, wanted, allow_unused=True) if inputs and wanted else ()
    return frozenset(number for number, gradient in zip(learned, gradients, strict=False) if gradient is None)


def behind_no_loss(program: Program, unreached: frozenset[int]) -> frozenset[str]:
    """The parameters that only those of the Fisher's outputs depend on that no loss depends on."""
    if not unreached or program.submodules:
        return frozenset()
    nodes = [node for number, node in enumerate(program.outputs) if number not in unreached]
    reached = {str(node.target) for node in ancestors(nodes) if node.op == "get_attr"}
    return frozenset(program.parameters.keys() - reached)


def gradient_left_out(parameter: Tensor, taps: Sequence[ProofTap]) -> Tensor:
    """The part of a parameter's gradient that the rows leave out; see `Parametrization.remainder`."""
    learned = [number for tap in taps for number in tap.remainders if number.requires_grad]
    return torch.autograd.grad(learned, parameter)[0] if learned else torch.zeros_like(parameter)


def mixing_cases(recorder: Recorder, values: Any, fisher: Sequence[Tensor]) -> frozenset[Key]:
    """Among the registrations for which the user asked for a block made of gradients of cases, those whose cases meet
    between them and the outputs. fisher: the Fisher's outputs."""
    structured = (registration for registration in recorder.registrations if not registration.generic)
    asked = {registration.parameters for registration in structured if by_case(recorder.program, registration)}
    if not asked or recorder.emitted.examples(values) < 2:
        return frozenset()
    parameters, buffers = recorder.live_parameters(), recorder.copied_buffers()
    towers = len(recorder.losses.declared.tower_cases(fisher)) > 1
    return keys_that_meet_in_outputs(collecting(recorder.emitted), parameters, buffers, values, fisher, asked, towers)


def are_pooled(recorder: Recorder, fisher: Sequence[Tensor], examples: int) -> bool:
    """Whether no output has a row for every example of the inputs. fisher: the Fisher's outputs."""
    if recorder.program.cases is not None and not recorder.program.submodules:
        return has_other_rows(recorder.program)
    dims = recorder.emitted.dims_of_cases(len(fisher))
    return all(output.dim() and output.shape[dim] % examples for output, dim in zip(fisher, dims, strict=True))


def by_case(program: Program, registration: Registration) -> bool:
    """Whether the user asked for a block made of gradients of cases."""
    asked = requested(program, registration.parameters, registration.layer) & APPROXIMATIONS.keys()
    return not registration.structure.kronecker and any(not APPROXIMATIONS[name].kronecker for name in asked)


def demoted(
    program: Program, failed: Mapping[Key, str], changed: Mapping[Key, tuple[str, str]], missed: Sequence[str]
) -> Program:
    """The program with failed registrations generic, and others with another approximation. Under `strict` raises
    RegistrationError for the generic ones, and ApproximationError if the user asked for another approximation."""
    registrations: list[Registration] = []
    for registration in program.registrations:
        if registration.parameters in failed:
            reason = f"{registration.layer}: {failed[registration.parameters]}"
            registrations += [program.generic(name, reason) for name in registration.parameters]
        elif registration.parameters in changed:
            approximation, why = changed[registration.parameters]
            other = replace(registration, approximation=approximation, reason=why)
            if words := without_rows(program, other):
                diagonal_or_full = [choose(program, other.layer, None, (), name)[0] for name in other.parameters]
                pairs = zip(other.parameters, diagonal_or_full, strict=True)
                registrations += [program.generic(name, words, chosen.name) for name, chosen in pairs]
            else:
                registrations.append(other)
        else:
            registrations.append(registration)
    registrations += [program.generic(name, MISSED) for name in missed]
    unused = tuple(name for name in program.unused if name not in missed)
    result = program.but(registrations=tuple(registrations), unused=unused)
    if program.options.strict:
        refuse_generic(result, program.registrations)
        refuse_others(result, (registration for registration in registrations if not registration.generic))
    return result


# --- the dimension of the cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One size of a batch: the dimensions that have it, of the inputs and of the Fisher's outputs."""

    inputs: TensorDimensions
    outputs: TensorDimensions


def refuse_guess(recorder: Recorder, values: Sequence[Any]) -> None:
    """Run the model on changed inputs, if its cases are those of the convention and another dimension may be it.

    Raises RegistrationError if the model mixes along the first dimension and not along another; UntraceableError
    instead for a graph without sizes, in which the other dimension cannot be followed.
    """
    program = recorder.program
    if program.cases is not None and program.cases_reason != CONVENTION:
        return

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return recorder.outputs({}, tuple(values))[1]

    outputs = run(values)
    axes = with_sizes(recorder) if program.cases is not None else without_sizes(values, outputs)
    if axes is None or not mixes_cases(run, values, outputs, axes[0]):
        return
    for other in axes[1:]:
        in_all = {number for number, _ in other.outputs} == {*range(len(outputs))}  # each loss is one of cases
        if in_all and not mixes_cases(run, values, outputs, other):
            number, dim = other.inputs[0]
            name = program.inputs[number].target
            if program.cases is None:
                raise UntraceableError(f"dimension {dim} of {name} may count the cases, and the graph has no sizes")
            raise RegistrationError(
                f"which dimension of {name} counts the cases would be a guess: the outputs mix its values along the "
                f"first dimension, as they do with positions, and not along dimension {dim}.\n{ANSWER}"
            )


def refuse_guess_of_parts(
    recorder: Recorder, division: Division, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """`refuse_guess` of a divided model, none of whose layers knows its cases: the model itself runs.

    Raises UntraceableError. A model that does not run on changed inputs, or returns other sizes, is no evidence.
    """
    if recorder.program.options.batch_dim is not None or any(p.capture.program.told_cases for p in division.captured):
        return
    values, structure = pytree.tree_flatten((args, dict(kwargs)))

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        args, kwargs = map_tensors(Tensor.clone, pytree.tree_unflatten(list(values), structure))
        with model_kept(recorder):
            returned = results.tree_leaves(recorder.model(*args, **kwargs))
        return [leaf.detach() for leaf in returned if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    outputs = run(values)
    if (axes := without_sizes(values, outputs)) is None:
        return
    try:
        guess = mixes_cases(run, values, outputs, axes[0]) and not mixes_cases(run, values, outputs, axes[1])
    except (RuntimeError, ValueError, IndexError) as error:
        if fatal(error):
            raise
        return
    if guess:
        why = "".join(f", and there is none: {note.reason}" for note in recorder.program.left[:1])
        raise UntraceableError(
            "which dimension of the inputs counts the cases would be a guess: the outputs mix their values along the "
            "first dimension, as they do with positions, and not along dimension 1. A model that is divided into "
            "submodules has its cases on the first dimension of all inputs.\n"
            "Give it inputs [cases, positions, ...], or write kfac_fx.compile(..., batch_dim=0) if their first "
            f"dimension counts the cases. One graph of the whole model can have them on another{why}"
        )


def with_sizes(recorder: Recorder) -> list[Axis] | None:
    """The axis of the cases and those that may be it instead, by their symbolic sizes."""
    program = recorder.program
    inputs = program.inputs
    axes = []
    for size in dict.fromkeys((program.cases, *free_sizes(inputs))):
        its_inputs = [
            (n, symbolic_sizes(node).index(size)) for n, node in enumerate(inputs) if size in symbolic_sizes(node)
        ]
        shapes = [sizes_of(node) for node in program.outputs]  # where a size that was met as a number is one
        its_outputs = [(n, sizes.index(size)) for n, sizes in enumerate(shapes) if size in sizes]
        if size is not None and its_inputs and its_outputs:
            axes.append(Axis(its_inputs, its_outputs))
    return axes if len(axes) > 1 and axes[0].inputs[0][1] == 0 else None


def without_sizes(values: Sequence[Any], outputs: Sequence[Tensor]) -> list[Axis] | None:
    """The first two dimensions of the first input, if an output has two of these sizes."""
    first = next((n for n, value in enumerate(values) if isinstance(value, Tensor) and value.dim() > 1), None)
    if first is None:
        return None
    shape = values[first].shape
    both = [n for n, out in enumerate(outputs) if out.shape[:2] == shape[:2]]
    return [Axis([(first, dim)], [(n, dim) for n in both]) for dim in (0, 1)] if both else None


def mixes_cases(run: RunOfValues, values: Sequence[Any], before: Sequence[Tensor], axis: Axis) -> bool:
    """Whether outputs at other places of the axis change with the first or with the last place of the inputs.

    Forward may differentiate by its inputs, so the changed ones need gradients where the given ones do.
    """
    number, dim = axis.inputs[0]
    size = values[number].shape[dim]
    if size < 2:
        return False
    for place, other in ((0, 1), (size - 1, size - 2)):
        changed = list(values)
        for number, dim in axis.inputs:
            given = values[number].detach()
            moved = given.clone()
            moved.select(dim, place).copy_(given.select(dim, other))
            changed[number] = moved.requires_grad_(values[number].requires_grad)
        after = run(changed)
        for number, dim in axis.outputs:
            was = before[number].detach()
            apart = (after[number].detach() - was).abs()
            apart.select(dim, place).zero_()
            if bool(apart.max() > AXIS_TOLERANCE * was.abs().max()):
                return True
    return False
