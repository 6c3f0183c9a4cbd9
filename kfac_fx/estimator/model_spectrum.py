"""`ModelSpectrum`: s F + δ I of a compiled module, with what needs the gradients of single cases.

The gradients come out of taps (`kfac_fx.recording.case_gradients`), one block at a time, so the memory is that of one
batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.func import vmap

from kfac_fx.compiled.compiled_module import CompiledModule, arguments_of_call
from kfac_fx.compiled.names import check_variables, refuse_other_variables, refuse_unfit_patterns
from kfac_fx.estimator.batches import NotFinite, batch_for, of_one_batch, refuse_no_batches, telling_how_read
from kfac_fx.estimator.queries import Queries, Weights, in_order, recording, warn_of_queries, warn_of_scores
from kfac_fx.fisher.block import key_text
from kfac_fx.fisher.groups import System
from kfac_fx.fisher.spectrum import Damping, Relative, Spectrum, amounts_in, matches
from kfac_fx.linalg.arguments import (
    a_flag,
    a_function,
    a_generator,
    choice,
    explains_calls,
    finite,
    not_negative,
    optional,
    whole_number,
    wrong_value,
)
from kfac_fx.linalg.matrices import are_finite
from kfac_fx.linalg.processes import Replicas
from kfac_fx.linalg.vectors import (
    NamedProduct,
    Solution,
    Vector,
    applied,
    check_fits,
    conjugate_gradients,
    joined,
    like_vector,
    real_vector,
)
from kfac_fx.losses.distributions import Measurement
from kfac_fx.passes.errors import RegistrationError, warn_user
from kfac_fx.passes.matrix import without_autocast
from kfac_fx.recording.case_gradients import (
    Cases,
    Consumer,
    Counts,
    LowRank,
    OutputGradients,
    OutputsOf,
    QueryGradients,
    sum_of_squares,
    weighted_squares,
)
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import Key, Rows, homogeneous

FAR = 30.0  # a scale, or its inverse, above which a product without it is told from one with it
CASE_KINDS = ("row", "position", "sequence")
UNMEASURED = (
    "a measurement made the eigenvalues of this spectrum, and these gradients are of the loss that the module knows: "
    "pass the same measurement= here and in the scores of these queries, or nothing is wrong if another loss is meant"
)


@dataclass(frozen=True, eq=False, repr=False)
class ModelSpectrum(Spectrum):
    """s F + δ I by the eigenvectors of its blocks; see `Spectrum`.

    A batch is what a DataLoader yields: a tensor, (inputs, targets), a mapping of forward's arguments, or a
    `kfac_fx.Batch`.

    Attributes:
        net: the compiled module.
        mode: the estimation mode of the factors.
        case: the kind of case of the eigenvalues; None: they are those of the factors.
        replicas: the processes over which its sums are; None: this process alone.
        measured: whether a measurement made the eigenvalues.
        data: the digest of the data, if `fit_spectrum` wrote it into a folder.
        any_weights: whether it may be used after the weights of the module have changed.
        weights: those that it was made with; None: any.
    """

    net: CompiledModule = field(kw_only=True)
    mode: str = field(default="empirical", kw_only=True)
    case: str | None = field(default=None, kw_only=True)
    measured: bool = field(default=False, kw_only=True)
    replicas: Replicas | None = field(default=None, kw_only=True)
    data: str | None = field(default=None, kw_only=True)
    any_weights: bool = field(default=False, kw_only=True)
    weights: Weights | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = None if self.any_weights else self.weights or Weights.of(self.net.model)
        object.__setattr__(self, "weights", weights)

    @explains_calls()
    def at(
        self,
        *,
        scale: float | Tensor | None = None,
        damping: Damping | None = None,
        any_weights: bool | None = None,
    ) -> Self:
        """The same spectrum with another s or δ, without a decomposition.

        Args:
            any_weights: whether it may be used after the weights of the module have changed. Gradients of examples are
                then those of the new weights, and the blocks those of the old ones. None: as before.

        Raises ValueError if the weights have changed already, for any_weights=False.
        """
        optional(a_flag, "any_weights", any_weights)
        moved = super().at(scale=scale, damping=damping)
        if any_weights is None or any_weights == self.any_weights:
            return moved
        if not any_weights:
            raise ValueError("any_weights=False: it is not known any more which weights this spectrum was made with")
        return replace(moved, any_weights=True)

    def refuse_other_weights(self) -> None:
        """Raises ValueError if the weights of the module have changed since the spectrum was made."""
        if self.weights is not None:
            remedy = "Or take it as it is, by spectrum.at(any_weights=True)."
            self.weights.refuse_others("this spectrum was", remedy)

    def correct(
        self,
        batches: Iterable[Any],
        case: str = "row",
        *,
        mode: str | None = None,
        measurement: Measurement | None = None,
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
            measurement: whose gradient is squared instead of the loss's, see `precondition`; it has one row an example.
            generator: of the samples; None: torch's own.

        Returns a spectrum with the same eigenvectors. If its factors are sums over processes, so are these squares: all
        processes call this, each with its own part of the data, and have the same result.

        A batch whose squares are not finite is left out, with a warning that names its place.

        Raises ValueError for an unknown case or mode, for a mode beside a measurement, which has none, and if there are
        no batches, or none that is finite.
        """
        refuse_no_batches("correct", batches)
        correction = Correction(self, case, mode, measurement, generator)
        total, not_finite = len(batches) if isinstance(batches, Sized) else 0, NotFinite()
        shown = tracked(((1, item) for item in batches), total, "corrected eigenvalues")
        for number, item in enumerate(shown, 1):
            batch = batch_for(self.net.model, item, f"batch {number} of `batches`")
            with telling_how_read(batches, batch, number):
                not_finite.add(number, correction.add(batch))
        not_finite.tell(refuse=self.replicas is None or self.replicas.number == 1)
        return correction.result()

    def places(self) -> Mapping[Key, tuple[System, int]]:
        """By block its system, and its number there; see `used`."""
        return places_of(self.used)

    def part(self, names: Iterable[str]) -> ModelSpectrum:
        """The spectrum of the blocks of some parameters, which records these only.

        Args:
            names: of parameters, of modules with parameters, or patterns with `*`, as those of `damping`.

        Raises RegistrationError if there is no name, or one that fits no parameter in a block, or that shares a block
        or a parameter with one that is not named.
        """
        given = refuse_other_variables(names, self.net, "names")
        if not given:
            raise RegistrationError(f"names is empty: name parameters of the spectrum, {', '.join(self.shapes)}")
        owners = [name for registration in self.registrations for name in registration.owners]
        fitting = {pattern: [name for name in owners if matches(name, pattern)] for pattern in given}
        refuse_unfit_patterns([pattern for pattern, names_found in fitting.items() if not names_found], owners, "names")
        wanted = frozenset(name for names_found in fitting.values() for name in names_found)
        check_variables(wanted, self.registrations, "names")
        systems = [
            system.part([n for n, block in enumerate(system.group.registrations) if block.owners[0] in wanted])
            for system in self.systems
        ]
        damping = self.damping
        if isinstance(damping, Mapping):
            kept = [r.parameters for r in self.registrations if r.owners[0] in wanted]

            def is_kept(key: Any) -> bool:
                return key in kept or (isinstance(key, str) and any(matches(n, key) for names in kept for n in names))

            damping = cast(Damping, {key: amount for key, amount in damping.items() if is_kept(key)})
        shapes = {name: shape for name, shape in self.shapes.items() if name in wanted}
        return replace(
            self, systems=[system for system in systems if len(system.values)], shapes=shapes, damping=damping
        )

    # --- solving ------------------------------------------------------------------------------------------------------

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
            product: H v, without the damping, for a vector with the same dimensions as v. s F approximates H, so with a
                scale of N it is N times `net.fisher_product(x)`; a product that lacks the scale has a warning.
            tolerance: of the residual, as a part of |v|.
            iterations: the most. If a residual is larger then, there is a ConvergenceWarning.
            exponent: the preconditioner is (s F + δ I)^exponent; 0: none.

        The result is differentiable in v, with H and δ as constants: its backward is one more solve.

        Raises NotRegisteredError if a vector does not fit, ValueError for numbers out of range, if H + δ I is not
        positive definite, or if δ or s requires a gradient, which the solution has not.
        """
        a_function("product", product)
        not_negative("tolerance", tolerance)
        whole_number(1, "iterations")("iterations", iterations)
        finite("exponent", exponent)
        numbers = [self.scale, *amounts_in(self.damping)]
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in numbers):
            raise ValueError(
                "solve has no derivative by the damping or the scale of the spectrum, and one of them requires a "
                "gradient: pass its value, as in spectrum.at(damping=damping.detach()).solve(...), or use "
                "multiply_inverse, which is differentiable in both."
            )
        solutions: list[Solution] = []

        def of_real(real: dict[str, Tensor]) -> Vector:
            return real_vector(product(like_vector(real, given)))

        def solved(vector: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
            solutions.append(self.solved(vector, of_real, tolerance, iterations, exponent))
            return solutions[-1].vector

        given, vector = vector, real_vector(vector)
        self.many(vector)  # is checked before it is differentiated
        self.warn_of_scale(vector, of_real)
        x = applied(solved, vector)
        return Solution(like_vector(x, given), *solutions[0][1:])

    @torch.no_grad()
    def warn_of_scale(self, like: Vector, product: NamedProduct) -> None:
        """Warn if the product lacks the scale of the spectrum. Waits for the device.

        For random signs z, the means of zᵀ H z and s zᵀ F z are the traces of H and s F, which are about the same if
        the one approximates the other. Only a scale far from 1 can be told from an approximation that is rough.
        """
        scale = float(self.scale)
        if not scale or 1 / FAR < scale < FAR:
            return
        generator = torch.Generator(next(iter(like.values())).device).manual_seed(0)
        halves = {name: torch.full_like(tensor, 0.5) for name, tensor in like.items()}
        signs = {name: 2 * torch.bernoulli(half, generator=generator) - 1 for name, half in halves.items()}
        curved, of_blocks = product(signs), self.at(damping=0.0).multiply(signs)
        check_fits(curved, {name: tensor.shape for name, tensor in signs.items()})
        traces = [sum(float((signs[n] * of[n]).sum()) for n in signs) for of in (curved, of_blocks)]
        if min(traces) <= 0 or not all(map(math.isfinite, traces)):
            return
        ratio = math.log(traces[0] / traces[1])
        if abs(ratio + math.log(scale)) < abs(ratio):
            warn_user(
                UserWarning(
                    f"solve has a spectrum s F of scale {scale:g}, and a product H v of about {math.exp(ratio):.1g} "
                    f"times its size: it seems to lack the scale, so that the damping counts {scale:g} times as "
                    "much. Write lambda v: {name: s * t for name, t in product(v).items()} for the product, or take "
                    "spectrum.at(scale=1.0) if damping and product are meant without it."
                )
            )

    def solved(
        self, vector: Vector, product: NamedProduct, tolerance: float, iterations: int, exponent: float
    ) -> Solution:
        """See `solve`; without a graph."""
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
        _, parts = self.many(vector)
        shifted: dict[str, Tensor] = {}
        for system in self.systems:
            for index, registration in enumerate(system.group.registrations):
                mean = (self.scale * system.values[index]).mean()
                for name, amount in zip(registration.parameters, self.amounts_of(registration.parameters), strict=True):
                    number = amount.factor * mean if isinstance(amount, Relative) else amount
                    shifted[name] = number * parts[name]
        return self.joined(shifted, vector)

    def joined(self, parts: Vector, like: Vector) -> dict[str, Tensor]:
        """The inverse of `many`, with the dimensions of `like`."""
        flat = {name: tensor.reshape(-1, *self.shapes[name]) for name, tensor in like.items()}
        whole = joined(parts, self.registrations, flat, 1)
        return {name: whole[name].reshape(tensor.shape) for name, tensor in like.items()}

    # --- scores -------------------------------------------------------------------------------------------------------

    @of_one_batch
    def precondition(self, batch: Any, *, measurement: Measurement | None = None, rank: int | None = None) -> Queries:
        """(s F + δ I)⁻¹ ∇m of every example of a batch, to score training examples with.

        Args:
            measurement: a function of (what the model returns, the targets), or of the outputs alone if the batch has
                no targets, to one number m for every example, [Q]; None: the loss, summed over the rows of an example.
            rank: replace the matrix of every block and example by the nearest matrix of this rank, which takes less
                memory and time.

        Raises ValueError if `rank` is not positive, if `measurement` returns something else or has no gradient, if no
        parameter of the spectrum is behind it, or if an eigenvalue of s F + δ I is zero.
        """
        check_rank(rank)
        self.refuse_singular()
        parts: dict[Key, list[tuple[int, Tensor]]] = {}

        def keep(key: Key, cases: Cases) -> None:
            system, index = self.places()[key]
            group, operators = system.group, system.group.operators_of(index, system.operators)
            weights, root = 1 / self.shifted(system)[index], self.root_of(system, -1)
            for part, turned in system.in_basis(index, cases):
                whole = turned.gradients() * weights
                matrices = group.from_eigenbasis(whole.unsqueeze(1), operators).squeeze(1)
                matrices = matrices if root is None else matrices * root[index]
                parts.setdefault(key, []).append((cases.first + part.start, matrices))

        counts = self.record(batch, keep, measurement)
        matrices = {key: in_order(parts[key]) for key in self.keys if key in parts}
        if not counts.examples:
            raise ValueError("a batch of queries has no examples: its tensors are of length 0.")
        if not matrices:
            names = ", ".join(name for key in self.keys for name in key)
            raise ValueError(
                f"{'the loss' if measurement is None else 'the measurement'} of these examples depends on no parameter "
                f"of this spectrum, so their queries are zero: {names}. Take the spectrum of the whole model, or of "
                "the parameters behind it."
            )
        warn_of_queries(matrices.values())
        # Blocks that this path of the model does not use are zero in the queries.
        return Queries(
            of_rank(matrices, rank), recording(self.net, [*matrices], self.weights), net=self.net, weights=self.weights
        )

    def queries(self, vector: Vector, *, rank: int | None = None) -> Queries:
        """Vectors of your own as queries: the score of an example is its gradient times the vector.

        They are taken as they are. With (s F + δ I)⁻¹ of your own in it, such as the result of `solve`, the scores are
        influences; with a difference of weights they are first-order changes of the losses.

        Args:
            vector: one query, or several with additional dimensions in front, which are flattened into one.
            rank: as of `precondition`.

        Raises NotRegisteredError if the vector does not fit, ValueError if `rank` is not positive.
        """
        check_rank(rank)
        _, parts = self.many(vector)
        matrices: dict[Key, Tensor] = {}
        for system in self.systems:
            packed = vmap(system.group.pack)(parts)
            matrices |= {r.parameters: packed[:, index] for index, r in enumerate(system.group.registrations)}
        ordered = of_rank({key: matrices[key] for key in self.keys}, rank)
        return Queries(ordered, recording(self.net, self.keys, self.weights), net=self.net, weights=self.weights)

    @of_one_batch
    def self_scores(self, batch: Any, *, by: str = "sum", measurement: Measurement | None = None) -> Any:
        """∇ℓᵀ (s F + δ I)⁻¹ ∇ℓ of every example: [N], or by block {key: [N]} with by="block".

        Args:
            measurement: in place of the loss, as for `precondition`.

        Raises ValueError if an eigenvalue of s F + δ I is zero.
        """
        choice("by", by, ("sum", "block"))
        self.refuse_singular()
        weights = {key: self.shifted(system)[index].reciprocal() for key, (system, index) in self.places().items()}
        for system in self.used:
            self.root_of(system, -1)  # which refuses a derivative by several dampings
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
        warn_of_scores(list(by_block.values()), "this batch")
        return by_block if by == "block" else torch.stack(list(by_block.values())).sum(0)

    # --- outputs ------------------------------------------------------------------------------------------------------

    @of_one_batch
    def functional_variance(self, batch: Any, *, outputs: OutputsOf | None = None, diagonal: bool = False) -> Tensor:
        """J (s F + δ I)⁻¹ Jᵀ of every example, with J the Jacobian of its outputs: their covariance, to first order,
        under the Laplace approximation of the posterior, whose precision is s F + δ I (Immer, Korzepa & Bauer 2021,
        "Improving predictions of Bayesian neural nets via local linearization").

        All outputs are sent back together. Where every example has a single row, as in a last layer, no matrix of a
        gradient is made: `spectrum.part(["head.weight", "head.bias"])` serves thousands of classes.

        Args:
            batch: its targets are not read.
            outputs: a function from what the model returns to [N, C]; None: it returns one tensor, [N, ...], whose
                numbers behind the examples are the C outputs.
            diagonal: the variances alone.

        Returns [N, C, C], or [N, C] with `diagonal`.

        Raises ValueError if the outputs are something else, or if an eigenvalue of s F + δ I is zero.
        """
        optional(a_function, "outputs", outputs)
        self.refuse_other_weights()
        self.refuse_singular()
        places = self.places()
        weights = {key: self.shifted(system)[index].reciprocal() for key, (system, index) in places.items()}
        for system in self.used:
            self.root_of(system, -1)  # which refuses a derivative by several dampings
        batch, graph = batch_for(self.net.model, batch), torch.is_grad_enabled()
        parts: dict[Key, list[tuple[int, Tensor]]] = {}

        def add(key: Key, gradients: OutputGradients, outputs: int) -> None:
            system, index = places[key]
            with torch.set_grad_enabled(graph), without_autocast(weights[key].device):  # as all recordings
                found = variance_of_outputs(system, index, weights[key], gradients, outputs, diagonal)
            parts.setdefault(key, []).append((gradients.first, found))

        kwargs, _ = arguments_of_call(self.net, batch.args, batch.kwargs, batch.targets)
        examples, number = self.net.record_outputs(batch.args, kwargs, add, only=self.keys, outputs=outputs)
        shape = (examples, number) if diagonal else (examples, number, number)
        by_block = [in_order(parts[key]) if key in parts else weights[key].new_zeros(shape) for key in self.keys]
        return torch.stack(by_block).sum(0)

    @property
    def squared(self) -> bool:
        return self.case is not None

    def record(self, batch: Any, consume: Consumer, measurement: Measurement | None = None) -> Counts:
        """See `queries.recording`."""
        self.refuse_other_weights()
        if self.measured and measurement is None:
            warn_user(UserWarning(UNMEASURED))
        return recording(self.net, self.keys)(batch, consume, measurement)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ModelSpectrum cannot be copied or pickled, because it has the compiled module. Write "
            "kfac_fx.save_spectrum(spectrum, folder) and kfac_fx.load_spectrum(net, folder); at(...) makes the same "
            "spectrum with another damping."
        )


def places_of(systems: Iterable[System]) -> Mapping[Key, tuple[System, int]]:
    """By block its system, and its number there."""
    return {
        registration.parameters: (system, index)
        for system in systems
        for index, registration in enumerate(system.group.registrations)
    }


def with_common_vectors(spectrum: ModelSpectrum) -> ModelSpectrum:
    """With the eigenvectors of the first process in all of them.

    Those of equal eigenvalues depend on the last bits, and squares of coordinates in several bases have no sum.
    """
    if spectrum.replicas is None or spectrum.replicas.number == 1:
        return spectrum
    common = spectrum.replicas.broadcast
    systems = [
        replace(system, operators=common([operator.contiguous() for operator in system.operators], 0))
        for system in spectrum.systems
    ]
    return replace(spectrum, systems=systems)


def variance_of_outputs(
    system: System, index: int, weights: Tensor, gradients: OutputGradients, outputs: int, diagonal: bool
) -> Tensor:
    """J (s F + δ I)⁻¹ Jᵀ of one block for some examples, [n, C, C], or its diagonal [n, C].

    weights: (s Λ + δ)⁻¹, [g, o, i].
    """
    if gradients.lone is not None and system.turns_rows:
        lone = Cases(gradients.lone.matrix, (gradients.lone,))
        (rows,) = system.turned_rows(lone, index).uses
        # The matrix of output c is d_c rᵀ, so the sum over its inputs is the same for all outputs.
        inputs = homogeneous(rows).squeeze(1).square()
        if len(weights) == 1:  # a product of two matrices takes less time than one of two batches of one
            of_row = inputs.flatten(1) @ weights[0].mT
        else:
            of_row = (inputs.transpose(0, 1) @ weights.mT).transpose(0, 1).flatten(1)
        return product_with_itself(rows.d.flatten(2), of_row, diagonal)
    if gradients.lone is not None and len(gradients.lone.d) == 1 and many_rows(gradients.lone, diagonal):
        return variance_of_common_rows(system, index, weights, gradients.lone, diagonal)
    found = []
    for part in gradients.one_by_one().parts_of(outputs):
        each = torch.cat([turned.gradients() for _, turned in system.in_basis(index, part)])
        found.append(product_with_itself(each.view(-1, outputs, weights.numel()), weights.view(1, -1), diagonal))
    return torch.cat(found)


def many_rows(rows: Rows, diagonal: bool) -> bool:
    """Whether `variance_of_common_rows` takes fewer multiplications than the gradients of all outputs and examples."""
    (g, o, i), examples, outputs = rows.matrix, len(rows.x), rows.d.shape[1]
    pairs, inputs, numbers = outputs if diagonal else outputs**2, g * i, g * o * i
    of_gradients = examples * (outputs * numbers**2 + pairs * numbers)
    return outputs * inputs * numbers**2 + pairs * inputs**2 * (numbers + examples) < of_gradients


def variance_of_common_rows(system: System, index: int, weights: Tensor, rows: Rows, diagonal: bool) -> Tensor:
    """`variance_of_outputs` of the rows r of examples whose gradient rows are the same, as in a last layer.

    The matrix of output c is d_c rᵀ, which is linear in r. So the product of two outputs is a form rᵀ B r, with the
    same B for all examples, from the matrices d_c e_jᵀ of unit vectors.
    """
    d, r = rows.d[0], homogeneous(rows)[:, 0].flatten(1)  # [C, g, o], [N, g·i]
    g, _, i = rows.matrix
    units = torch.eye(g * i, dtype=d.dtype, device=d.device).view(g * i, g, 1, i)
    each = Cases(rows.matrix, whole=(d.unsqueeze(1).unsqueeze(-1) * units).flatten(0, 1))
    turned = torch.cat([part.gradients() for _, part in system.in_basis(index, each)])
    sides = turned.view(len(d), g * i, weights.numel())
    weighted, r = sides * weights.flatten(), r.to(sides.dtype)
    if diagonal:
        return torch.einsum("nj,cjk,nk->nc", r, weighted @ sides.mT, r)
    forms = weighted.flatten(0, 1) @ sides.flatten(0, 1).mT
    return torch.einsum("nj,cjek,nk->nce", r, forms.view(len(d), g * i, len(d), g * i), r)


def product_with_itself(rows: Tensor, weights: Tensor, diagonal: bool) -> Tensor:
    """Σ_p rows_p rows_pᵀ weights_p, [n, C, C], or its diagonal [n, C]. rows: [n, C, p]; weights: [n, p]; either may be
    the same for all, with n = 1."""
    if diagonal and rows.shape[1] == 1:  # one matrix product for every number is slow
        return (rows.square().squeeze(1) * weights).sum(1, keepdim=True)
    if diagonal:
        return torch.einsum("ncp,np->nc", rows.square(), weights)
    return (rows * weights.unsqueeze(1)) @ rows.mT


def check_rank(rank: int | None) -> None:
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise wrong_value("rank", rank, "be a whole number, at least 1")


def of_rank(matrices: Mapping[Key, Tensor], rank: int | None) -> Mapping[Key, QueryGradients]:
    """The nearest matrices of this rank; None: the matrices themselves."""
    return matrices if rank is None else {key: LowRank.of(matrix, rank) for key, matrix in matrices.items()}


class Correction:
    """The sums of `ModelSpectrum.correct`, batch by batch.

    Attributes:
        totals: the sums of squares by block, of this process.
        number: the number of cases that the mean is over, of this process; a tensor, because only the device knows
            which batches are finite.
    """

    def __init__(
        self,
        spectrum: ModelSpectrum,
        case: str,
        mode: str | None = None,
        measurement: Measurement | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        optional(a_generator, "generator", generator)
        if measurement is not None and mode not in (None, "empirical"):
            raise ValueError(
                f"mode={mode!r} is of the distributions of a loss, and a measurement has none: leave mode out."
            )
        self.spectrum, self.case = with_common_vectors(spectrum), choice("case", case, CASE_KINDS)
        self.mode = "empirical" if measurement is not None else mode or spectrum.mode
        self.measurement, self.generator = measurement, generator
        self.places = places_of(self.spectrum.systems)  # of F, whatever its damping
        self.totals = {key: torch.zeros_like(system.values[n]) for key, (system, n) in self.places.items()}
        self.number = torch.zeros((), dtype=torch.int64, device=next(iter(self.totals.values())).device)

    def add(self, batch: Any) -> Tensor:
        """Record a batch. Returns whether its squares are finite, 0-dim; if not, it is left out.

        The squares of one batch take the memory of `totals`.
        """
        self.spectrum.refuse_other_weights()
        by_row, batch = self.case == "row", batch_for(self.spectrum.net.model, batch)
        squares: dict[Key, Tensor] = {}

        @torch.no_grad()
        def add(key: Key, cases: Cases) -> None:
            system, index = self.places[key]
            for kind in cases.by_position() if self.case == "position" else [cases]:
                for _, turned in system.in_basis(index, kind):
                    of_part = sum_of_squares(turned)
                    squares[key] = squares[key] + of_part if key in squares else of_part

        counts = self.spectrum.net.record_cases(
            batch.args,
            batch.kwargs,
            add,
            mode=self.mode,
            targets=batch.targets,
            by_row=by_row,
            only=self.spectrum.keys,
            measurement=self.measurement,
            generator=self.generator,
        )
        device = self.number.device
        each = [are_finite(value.unsqueeze(0)).to(device) for value in squares.values()]
        finite = torch.cat(each).all() if each else torch.ones((), dtype=torch.bool, device=device)
        known = device.type == "cpu" and bool(finite)  # on a CPU nothing waits, and most batches are finite
        for key, value in squares.items():
            self.totals[key] += value if known else torch.where(finite.to(value.device), value, 0)
        self.number += torch.where(finite, counts.examples if self.case == "sequence" else counts.rows, 0)
        return finite

    def state(self) -> dict[str, Tensor]:
        """The sums as tensors by name, and the state of the random stream."""
        generator = {} if self.generator is None else {"generator": self.generator.get_state()}
        sums = {f"{key_text(key)}/squares": total for key, total in self.totals.items()}
        return {**sums, "cases": self.number, **generator}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state()` of the same blocks."""
        for key, total in self.totals.items():
            total.copy_(state[f"{key_text(key)}/squares"])
        self.number = state["cases"].to(self.number.device)
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())

    def result(self) -> ModelSpectrum:
        """The spectrum with the mean as its eigenvalues. Raises ValueError if there were no cases."""
        totals, count = self.totals, self.number
        if self.spectrum.replicas is not None:
            *each, count = self.spectrum.replicas.total([*totals.values(), count])
            totals = dict(zip(totals, each, strict=True))
        if not (number := int(count)):
            raise ValueError(
                "the eigenvalues were to be corrected without cases: `batches` has none, or none that is finite."
            )
        systems = [
            replace(system, values=torch.stack([totals[r.parameters] for r in system.group.registrations]) / number)
            for system in self.spectrum.systems
        ]
        return replace(self.spectrum, systems=systems, case=self.case, measured=self.measurement is not None)
