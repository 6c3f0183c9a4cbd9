"""The losses on the outputs of one run: of which distributions, over how many cases, and without padding.

**Distributions of the user**: checks of a distribution that the user declares, on the outputs of the first batch.

The Fisher of a distribution is the mean of g gᵀ over its own samples, for the gradient g of their loss by the outputs,
and also B Bᵀ. So a class that contradicts itself is told: by the shapes that its methods return, by its two products
with B, and by the squares of sampled gradients.

**Probabilities** that a loss takes for logits, as those behind a sigmoid: the loss is another one than its user means.

    return torch.sigmoid(self.head(h))      with loss="bce_with_logits": a sigmoid of a sigmoid

Such a training runs, and its factors are right for the loss as it is written, so no other check would say so. A
logarithm of probabilities is a logit, so a log_softmax is right.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kfac_fx.linalg.matrices import is_differentiable
from kfac_fx.losses.declared import (
    DeclaredLosses,
    Division,
    FoundLoss,
    LossesInForward,
    LossSpec,
    ObservedLoss,
    RegisteredLosses,
    RowsOfLoss,
    WeightedLosses,
    constant_of,
    divisor_of,
    expression_of,
    perturbed,
    replaced,
    structure,
)
from kfac_fx.losses.distributions import Categorical, LossFunction, MultiBernoulli
from kfac_fx.passes import results
from kfac_fx.passes.errors import LossError, fatal, first_line, module_of, where
from kfac_fx.passes.graphs.labels import once, shape_of
from kfac_fx.passes.graphs.operations import PARTS, SHAPE_ONLY, VIEWS, op_name
from kfac_fx.passes.ir import Dims, LossSite, Way
from kfac_fx.passes.losses import averages_cases, counts_left_out, shape_on, told_by
from kfac_fx.passes.matrix import precise
from kfac_fx.passes.padding import spread
from kfac_fx.passes.torch_losses import BY_NAME, TorchLoss
from kfac_fx.passes.torch_private import class_of
from kfac_fx.passes.tracing.effects import accelerators, same_random
from kfac_fx.recording.emitted import EmittedGraph, EmittedModel
from kfac_fx.recording.emitted_submodules import among_returned

SIGMOIDS, SOFTMAXES = ("sigmoid", "special_expit", "expit", "hardsigmoid"), ("softmax", "_softmax")
SAME_NUMBERS = VIEWS | PARTS | {"clamp", "clip", "clamp_min", "clamp_max", "ravel"}
MAKERS: Mapping[type[LossFunction], tuple[str, ...]] = {
    MultiBernoulli: (*SIGMOIDS, *SOFTMAXES),
    Categorical: SOFTMAXES,
}
TRAINED = {MultiBernoulli: "F.binary_cross_entropy_with_logits", Categorical: "F.cross_entropy"}
LOGITS = "torch.logit(outputs, 1e-6)"  # an event that is certain has infinite logits
ONE = 1e-5  # how far sums of probabilities may be from 1


def kind_of(loss: LossFunction) -> type[LossFunction] | None:
    """The distribution of logits that a loss is; None if it has none."""
    return next((kind for kind in MAKERS if isinstance(loss, kind)), None)


def makes_probabilities(node: fx.Node, kind: type[LossFunction]) -> fx.Node | None:
    """The operation that makes probabilities of the values of a node, whose loss is of this kind; None if none does."""
    while op_name(node) in SAME_NUMBERS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if op_name(node) in MAKERS[kind] else None


def are_probabilities(values: Tensor, kind: type[LossFunction]) -> bool:
    """Whether values that no graph tells of are those of a softmax."""
    if kind is not Categorical or values.dim() < 2 or not values.numel() or bool((values < 0).any()):
        return False
    return bool((values.double().sum(-1) - 1).abs().max() <= ONE)


def sentence_of(node: fx.Node | None, loss: LossFunction, spec: object) -> str:
    """The sentence of the warning.

    node: that makes the probabilities; None: it is not known. spec: of the loss; None: forward computes it.
    """
    kind = kind_of(loss)
    assert kind is not None, "bug in kfac_fx: probabilities of a loss without logits"
    what = "softmax" if node is None else op_name(node).strip("_")
    path = None if node is None else module_of(node)
    place = "" if node is None else f" by {where(node)}" + (f" in the module {path!r}" if path else "")
    made = f"{list(loss.inputs.shape)} are made probabilities{place or ' by a softmax'}"
    if spec is None:
        return (
            f"{TRAINED[kind]} in forward takes logits, and its inputs {made}, so it takes the {what} of a {what}: "
            f"leave the {what} in front of it out."
        )
    of_torch = spec.of_torch if isinstance(spec, LossSpec) else None
    other = "Or return F.log_softmax, and train with F.nll_loss."
    if kind is MultiBernoulli:
        written = f"kfac_fx.losses.MultiBernoulli({LOGITS})" if of_torch is None else expression_of(of_torch)
        other = (
            f"If you train with F.binary_cross_entropy, keep the {what} and write loss=lambda outputs: "
            f"{written.format(LOGITS)}."
        )
    return (
        f"the registered {type(loss).__name__} loss takes logits, and the outputs {made}: return what is before the "
        f"{what}, and train with {TRAINED[kind]}. {other}"
    )


def taken_for_logits(
    losses: Sequence[LossFunction], fisher: Sequence[Tensor], nodes: Sequence[fx.Node], spec: object
) -> list[str]:
    """A sentence about every loss of logits whose inputs are probabilities.

    Args:
        losses: on the Fisher's outputs.
        fisher, nodes: these outputs, and their nodes in one graph of the whole model; no nodes if there is none.
        spec: see `sentence_of`.
    """
    sentences = []
    for loss in losses:
        kind = kind_of(loss)
        if kind is None:
            continue
        made = [
            makes_probabilities(node, kind)
            for value, node in zip(fisher, nodes, strict=False)
            if of_same_numbers(value, loss.inputs)
        ]
        found = next((node for node in made if node is not None), None)
        with torch.no_grad():
            told = found is not None or (not nodes and are_probabilities(loss.inputs.detach(), kind))
        if told:
            sentences.append(sentence_of(found, loss, spec))
    return list(dict.fromkeys(sentences))


def of_same_numbers(output: Tensor, inputs: Tensor) -> bool:
    """Whether the inputs of a loss are an output, or a view of it."""
    return output.numel() == inputs.numel() and output.data_ptr() == inputs.data_ptr()


DRAWS, NUMBERS = 64, 2**24  # of samples for one comparison, and of numbers in all of them
CERTAIN = 10.0  # standard errors of a difference
FACTOR = 2.0  # between the squares of sampled gradients and those of B, above which they are told
TRANSPOSED = 1e-2  # relative; right products agree to the rounding of their dtype
ROUGHLY = 0.2  # relative, of a factor that a mean makes of a sum
OTHER_FACTOR = "is not that of its samples"


def misfits_of_own(losses: Sequence[LossFunction]) -> list[str]:
    """A sentence about every distribution of the user whose B is not that of its samples.

    losses: on the outputs of one batch. Outputs that are not finite tell nothing.

    Raises LossError for a method that returns something else than its kind of numbers, in its shape.
    """
    sentences = []
    for loss in losses:
        if type(loss).__module__.startswith("kfac_fx.") or not loss.inputs.numel():
            continue
        if not bool(loss.inputs.isfinite().all()):
            continue
        with same_random(accelerators([loss.inputs])):
            check_samples(loss)
            check_factor(loss)
            if loss.inputs.requires_grad and loss.weights is None and loss.kept is None and loss.real is None:
                sentences += other_factor(loss)
    return list(dict.fromkeys(sentences))


def check_samples(loss: LossFunction) -> None:
    """Raises LossError for samples, or a loss of them, that are not those of all cases."""
    name, wanted = type(loss).__name__, list(loss._target_shape())
    drawn = called(loss, "_sample", generator_for(loss))
    if not isinstance(drawn, Tensor) or list(drawn.shape) != wanted:
        raise LossError(
            f"{name}._sample returned {structure(drawn)}, and targets of all cases are of shape {wanted}, as the "
            "outputs. Draw one target for each of them; for targets of another shape define _target_shape(self), too."
        )
    if drawn.is_floating_point() and not bool(drawn.isfinite().all()):
        raise LossError(f"{name}._sample drew targets that are not finite, for outputs that are.")
    value = called(loss, "_negative_log_likelihood", drawn)
    if not isinstance(value, Tensor) or value.dim():
        raise LossError(
            f"{name}._negative_log_likelihood returned {structure(value)}, and the loss is one number, the sum over "
            "all cases and elements: end it with .sum(), without a mean."
        )
    if loss.inputs.requires_grad and not value.requires_grad:
        raise LossError(
            f"{name}._negative_log_likelihood has no gradient by self.inputs: compute it from self.inputs, without "
            "detach() and torch.no_grad()."
        )


def check_factor(loss: LossFunction) -> None:
    """Raises LossError for products with B and Bᵀ of other shapes, or of another matrix each."""
    name, outputs, inner = type(loss).__name__, loss.inputs.shape, loss.fisher_factor_inner_shape
    hint = "" if inner != outputs else "; for a B that is not square define the property fisher_factor_inner_shape, too"
    v, w = (torch.randn(shape, dtype=loss.inputs.dtype, device=loss.inputs.device) for shape in (inner, outputs))
    with torch.no_grad():
        for vector, wanted in ((v, outputs), (v.expand(2, *inner), torch.Size([2, *outputs]))):
            product = called(loss, "multiply_fisher_factor", vector)
            if not isinstance(product, Tensor) or product.shape != wanted:
                raise LossError(
                    f"{name}.multiply_fisher_factor returned {structure(product)} for a vector {list(vector.shape)}, "
                    f"and B v is of shape {list(wanted)}: that of the outputs, behind the dimensions that the vector "
                    f"has in front{hint}."
                )
        transposed = called(loss, "multiply_fisher_factor_transpose", w)
        if not isinstance(transposed, Tensor) or transposed.shape != inner:
            raise LossError(
                f"{name}.multiply_fisher_factor_transpose returned {structure(transposed)} for a vector "
                f"{list(outputs)} of the shape of the outputs, and Bᵀ v is of shape {list(inner)}{hint}."
            )
        left = precise(called(loss, "multiply_fisher_factor", v)) * precise(w)
        right = precise(v) * precise(transposed)
        size = float(left.square().sum().sqrt() + right.square().sum().sqrt())
        if float((left.sum() - right.sum()).abs()) > TRANSPOSED * size:
            raise LossError(
                f"{name}.multiply_fisher_factor_transpose is not the transpose of {name}.multiply_fisher_factor: "
                "(B v) · w and v · (Bᵀ w) differ. If B is diagonal or symmetric, write "
                "multiply_fisher_factor_transpose = multiply_fisher_factor."
            )


def other_factor(loss: LossFunction) -> list[str]:
    """The sentence about a B whose B Bᵀ is not the second moment of sampled gradients, if it is none.

    For random signs z, (zᵀ g)² has the mean |Bᵀ z|² over samples.
    """
    generator = generator_for(loss)
    draws = max(8, min(DRAWS, NUMBERS // loss.inputs.numel()))
    of_samples, of_factor = [], []
    for _ in range(draws):
        z = torch.randint(2, loss.inputs.shape, device=loss.inputs.device).to(loss.inputs.dtype) * 2 - 1
        value = loss._negative_log_likelihood(loss.sample(generator))
        (gradient,) = torch.autograd.grad(value, loss.inputs, retain_graph=True)
        by_case = precise(z * gradient).reshape(loss.all_cases, -1).sum(1)
        of_samples.append(by_case.square().sum())
        with torch.no_grad():
            of_factor.append(precise(loss.multiply_fisher_factor_transpose(z)).square().sum())
    sampled, of_b = torch.stack(of_samples).double(), torch.stack(of_factor).double()
    difference = sampled - of_b
    error = float(difference.std()) / draws**0.5
    one, other = float(sampled.mean()), float(of_b.mean())
    if not (abs(one - other) > CERTAIN * error and max(one, other) > FACTOR * min(one, other)):
        return []
    name, times = type(loss).__name__, f"{one / other:.2g} times" if other else "no multiple of"
    cases, numbers = loss.all_cases, loss.inputs.numel()
    counts = {numbers // cases: "outputs of a case", numbers: "outputs", cases: "cases"}
    mean = next((n for n in counts if n > 1 and other and abs(one / other * n**2 - 1) < ROUGHLY), None)
    look = (
        f"Look at the factors in {name}._negative_log_likelihood, {name}._sample and {name}.multiply_fisher_factor."
        if mean is None
        else f"That is 1 / {mean}², for {mean} {counts[mean]}: {name}._negative_log_likelihood must be the sum over "
        "all cases and elements, and no mean. Write .sum() there; kfac_fx divides by the number of cases."
    )
    return [
        f"the B of {name} {OTHER_FACTOR}: the squares of the gradients of sampled targets are {times} those of B Bᵀ, "
        "on average over cases and samples, and should be the same. The modes with samples and those "
        f"with B have other Fishers. {look} Nothing is wrong if B is meant to be another matrix"
    ]


def called(loss: LossFunction, method: str, *args: Any) -> Any:
    """A method of the user's. Raises LossError if it does not take the arguments; its own errors get a note."""
    name, function = type(loss).__name__, getattr(loss, method)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise LossError(
            f"{name}.{method} does not take what it is called with: {error}. Write {signature_of(method)}."
        ) from error
    try:
        with torch.set_grad_enabled(method == "_negative_log_likelihood"):
            return function(*args)
    except Exception as error:
        if not fatal(error):
            given = ", ".join(structure(argument) for argument in args)
            error.add_note(
                f"{name}.{method} raised this, called with {given}, for outputs {list(loss.inputs.shape)}. "
                "kfac_fx calls the methods of a distribution once on the first batch, to check them."
            )
        raise


def signature_of(method: str) -> str:
    """The first line of a method as it is to be written."""
    parameters = list(inspect.signature(getattr(LossFunction, method)).parameters)
    return f"def {method}({', '.join(parameters)})"


def generator_for(loss: LossFunction) -> torch.Generator:
    return torch.Generator(loss.inputs.device).manual_seed(0)


TYPICAL = 1.0  # a value of a loss, at which the way to what forward returns is differentiated


@dataclass(frozen=True)
class OutputLosses:
    """The losses whose Fisher is recorded.

    Attributes:
        emitted: the model that computes the outputs.
        given: the user's losses, on the model's outputs or on nodes of the graph; None: those that forward computes.
        is_mean: whether what forward returns is a mean over cases, and not a sum.
        division: how the number is read that a sum is divided by; see `LossesInForward`.
    """

    emitted: EmittedModel
    given: LossSpec | RegisteredLosses | None
    is_mean: bool = True
    division: Division = Division()

    @property
    def declared(self) -> DeclaredLosses:
        return self.in_forward if self.given is None else self.given

    @property
    def in_forward(self) -> LossesInForward:
        return LossesInForward(self.emitted.loss_sites, self.is_mean, self.division)

    @property
    def are_known(self) -> bool:
        return self.given is not None or bool(self.emitted.loss_sites)

    def on(
        self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None, rows: Sequence[RowsOfLoss] = ()
    ) -> WeightedLosses:
        """(coefficient, loss) of each output distribution; see `DeclaredLosses.of_run`.

        Raises LossError if no loss is known.
        """
        declared = self.declared
        if declared.of_outputs and not fisher and not self.emitted.whole:
            name = class_of(self.emitted.model).__name__
            raise LossError(
                f"{name} returns no tensor in tuples, lists, dictionaries and attributes to build a loss on"
            )
        try:
            return declared.of_run(output, fisher, self.emitted.case_dims, targets, rows)
        except RuntimeError as error:
            if not self.emitted.capture.nested or isinstance(error, LossError) or fatal(error):
                raise
            raise LossError(
                f"the function given as loss failed: {first_line(error)}\nIt is given the values of the nested tensors "
                "that the model returns, one row for every position of every document. Write loss=lambda outputs: "
                "kfac_fx.losses.Categorical(outputs), without outputs.values()."
            ) from error

    def misfits(self, output: Any, fisher: tuple[Tensor, ...], values: Any) -> list[str]:
        """Sentences about losses that take probabilities for logits, about distributions of the user whose B is not
        that of their samples, about outputs that no distribution has, and about declared losses with rows that the
        padding mask does not tell apart.

        Raises LossError, or the error of the user's function, for losses that do not fit the outputs of a run.
        """
        if not self.are_known:
            return []
        losses = self.on(self.rebuilt(output, (), ()), fisher)
        program = self.emitted.program
        nodes = program.outputs if self.emitted.whole else ()
        distributions = [loss for _, loss in losses]
        sentences = [
            *misfits_of_own(distributions),
            *taken_for_logits(distributions, fisher, nodes, self.given),
            *(text for loss in distributions if (text := loss.out_of_range())),
        ]
        return sentences + (self.misfits_of_padding(losses, fisher, values) if self.declared.of_outputs else [])

    def misfits_of_padding(self, losses: WeightedLosses, fisher: tuple[Tensor, ...], values: Any) -> list[str]:
        """See `misfits`."""
        padding = self.emitted.padding(values, fisher)
        if padding is None or any(dims is not None for dims in padding[1]):
            return []
        return [
            f"padding may count as cases of the {type(loss).__name__} loss, whose rows are not the cases and positions "
            "of padding_mask: return outputs [cases, positions, ...] of all positions, in their order, or let "
            "forward compute the loss. Nothing is wrong if these rows are never padding"
            + ("" if loss.ignored is None else f", or have targets of {loss.ignored} there")
            for _, loss in losses
            if loss.all_cases > len(padding[0])
        ]

    # --- cases ------------------------------------------------------------------------------------------------------

    @property
    def of_inputs(self) -> bool:
        """Whether inputs tell which rows of the losses that forward computes count, and with which weights."""
        return self.declared.of_inputs

    def rows(self, fisher: Sequence[Tensor], values: Any, targets: Any = None) -> list[RowsOfLoss]:
        """Which rows of every loss that forward computes count, and with which weights.

        targets: as of `on`; None: those that forward hands to its losses.
        """
        sites = self.emitted.loss_sites
        if self.given is not None or not sites:
            return []
        by_site, known = (
            targets if isinstance(targets, (list, tuple)) else [targets] * len(sites),
            self.of_run(fisher, values),
        )
        return [
            self.rows_of(site, inputs, values, target, known)
            for site, inputs, target in zip(sites, fisher, by_site, strict=True)
        ]

    def first_rows(self, fisher: Sequence[Tensor], values: Any, cases: int | None, part: float) -> list[RowsOfLoss]:
        """`rows` of the first cases, which are this part of all; None: of all."""
        pairs = zip(self.rows(fisher, values), self.emitted.loss_sites, strict=True) if self.given is None else ()
        return [rows.first(cases, part, self.is_mean and site.reduction != "mean") for rows, site in pairs]

    def rows_of(
        self, site: FoundLoss, inputs: Tensor, values: Any, target: Any, known: Mapping[Any, Tensor]
    ) -> RowsOfLoss:
        kept = self.not_ignored(site, values, target)
        weights = self.weights(site, inputs, values, known)
        way = site if isinstance(site, ObservedLoss) else site.way
        told = way is not None and way.elementwise and BY_NAME[site.loss].classes_second
        if told and isinstance(weights, Tensor) and weights.dim():
            counted = weights != 0
            kept = counted if kept is None else kept & counted
        return RowsOfLoss(kept, weights if way is not None and way.linear else None, self.divisor(site, values))

    def divisor(self, site: FoundLoss, values: Any) -> Tensor | float | None:
        """The number that the returned sum over cases is divided by; None if there is none."""
        if self.is_mean or isinstance(site, ObservedLoss) or site.way is None:
            return None if self.is_mean else divisor_of(site, self.division)
        divisor: Tensor | float | None = None
        for number, exponent in (pair for pair in site.way.divisors if self.division.divides(*pair)):
            given = self.emitted.target_values(number, values)
            divisor = (1.0 if divisor is None else divisor) * (given if exponent == 1 else 1.0 / given)
        return divisor

    def weights(
        self, site: FoundLoss, inputs: Tensor, values: Any, known: Mapping[Any, Tensor]
    ) -> Tensor | float | None:
        """The gradient of the returned loss with respect to a loss of forward; None if the inputs and the Fisher's
        outputs do not tell it. Factors that nothing tells count as one, if the loss then is a mean or a sum as it is.

        known: see `of_run`.
        """
        if isinstance(site, ObservedLoss):
            return site.weights
        if site.way is None or site.way.constant is not None:
            return constant_of(site)
        shape = unreduced(inputs.shape, BY_NAME[site.loss]) if site.reduction == "none" else ()
        leaf = inputs.new_full(shape, TYPICAL, dtype=torch.promote_types(inputs.dtype, torch.float32))
        if site.way.unknown and probably_mean([site]) != self.is_mean:
            return None  # as weights that are a softmax over the cases, of which a sum is a mean
        program = self.emitted.program
        ones = {node: leaf.new_ones(shape_on(program, node, values)) for node in site.way.unknown}
        try:
            return self.emitted.weights(site.way, leaf, values, {**known, **ones})
        except LossError:
            return None

    def not_ignored(self, site: FoundLoss, values: Any, target: Any) -> Tensor | None:
        """[cases...], the targets that are not ignored and whose class has a weight; None: all, or not known."""
        if site.ignored is None:
            return None
        try:
            target = self.emitted.target_values(site.targets, values) if target is None else target
            if not isinstance(target, Tensor) or target.is_floating_point():  # probabilities of classes
                return None
            kept: Tensor = target != self.emitted.target_values(site.ignored, values)
            if site.class_weights is not None:
                of_class = self.emitted.target_values(site.class_weights, values)
                kept = kept & (of_class[torch.where(kept, target, 0)] != 0)
        except LossError:
            return None
        return kept

    def cases(self, losses: WeightedLosses) -> int | Tensor:
        """The number of terms in the mean of the first loss, which is the number of cases of the batch."""
        return self.declared.cases_by_loss(losses)[0]

    def terms(self, losses: WeightedLosses, examples: int | None = None) -> int | Tensor:
        """`cases`, and with them the rows that a mask leaves out, if the mean that forward returns counts these; or the
        examples, if the mean is over them.

        examples: their number; None: an example is a row, or none of forward's.
        """
        first = next(iter(self.emitted.loss_sites), None) if self.given is None and self.is_mean else None
        if isinstance(first, ObservedLoss):
            counted, by_case = first.counts_left_out, first.averages_cases
        elif first is None or first.way is None:
            counted = by_case = False
        else:
            counted, by_case = counts_left_out(first.way), averages_cases(first.way)
        if by_case and examples is not None:
            return examples
        if first is None or first.reduction == "mean" or not counted:
            return self.cases(losses)
        pieces = zip(self.emitted.loss_sites, losses, strict=True)
        return sum(loss.all_cases for site, (_, loss) in pieces if site.chunk_of == first.chunk_of)

    def summed(self, losses: WeightedLosses, terms: int | Tensor | None = None) -> tuple[int | Tensor, WeightedLosses]:
        """(`cases`, the losses with the coefficients of the sum over cases, which is `cases` times the mean loss).

        Every loss is a mean over its own cases. Losses of as many cases as the first keep their coefficients.

        terms: another multiple of the mean loss than `cases`.
        """
        each = self.declared.cases_by_loss(losses)
        multiple = each[0] if terms is None else terms
        return multiple, [(c * share(multiple, n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients of means over the cases of all towers: a tower has the weight of its cases. Weights of single
        cases are those of the loss."""
        each = self.declared.cases_by_loss(losses)
        pairs = [(with_mean_weight(c, loss), n) for (c, loss), n in zip(losses, each, strict=True)]
        return [(c * share(loss.cases, n), loss) for (c, loss), n in pairs]

    def examples_of_pieces(self, losses: WeightedLosses, values: Any, examples: int) -> dict[int, Tensor]:
        """By the number of a loss the example of each of its rows, [rows], for those that forward computes over some
        rows of one loss each: the pieces of the targets tell which rows these are."""
        sites, emitted = self.emitted.loss_sites, self.emitted
        if self.given is not None or not isinstance(emitted, EmittedGraph):
            return {}
        pieces = Counter(site.chunk_of for site in sites)
        found: dict[int, Tensor] = {}
        for number, (site, (_, loss)) in enumerate(zip(sites, losses, strict=True)):
            if pieces[site.chunk_of] == 1 or not isinstance(site, LossSite):
                continue
            numbers = emitted.places(site.targets, values, examples)
            rows = loss.inputs.shape[: loss.case_axes]
            if numbers is not None and numbers.shape[: loss.case_axes] == rows:
                found[number] = (
                    numbers.flatten(loss.case_axes)[..., 0].flatten()
                    if numbers.dim() > len(rows)
                    else numbers.flatten()
                )
        return found

    # --- the loss that forward returns ------------------------------------------------------------------------------

    def returned(self, output: Any) -> list[Tensor]:
        """The losses that forward returned, if it computes some and the user named none. output: flat."""
        if self.given is not None or not self.emitted.loss_sites:
            return []
        if not isinstance(self.emitted, EmittedGraph):
            return among_returned(
                output, [loss.result for loss in self.emitted.loss_sites if isinstance(loss, ObservedLoss)]
            )
        leaves = results.tree_leaves(output)
        losses = [leaves[place] for place in self.emitted.places_of_losses]
        return [loss for loss in losses if isinstance(loss, Tensor) and loss.requires_grad]

    @property
    def are_likelihoods(self) -> bool:
        """Whether the returned loss is known to be a weighted sum of log-likelihoods, and nothing else."""
        return self.given is not None or (self.emitted.whole and self.emitted.program.likelihood)

    def scale(self, losses: WeightedLosses, values: Any, terms: int | Tensor | None = None) -> float | Tensor:
        """The multiple of the returned loss that is the sum over the cases of the first loss.

        values: the inputs. terms: of the mean, if these are not `cases`.
        """
        if self.is_mean:
            return self.cases(losses) if terms is None else terms
        divisor = self.divisor(self.emitted.loss_sites[0], values)
        return self.in_forward.undivided(losses[0][1], [RowsOfLoss(divisor=divisor)])

    # --- on one batch -----------------------------------------------------------------------------------------------

    def real(
        self, rebuilt: Callable[[Sequence[Tensor]], Any], fisher: Sequence[Tensor], values: Any, targets: Any = None
    ) -> WeightedLosses:
        """The losses without padding and without ignored targets.

        Args:
            rebuilt: from values of the Fisher's outputs to what the model returns.
            values: the model's inputs, which tell what is padding.
        """

        rows = self.rows(fisher, values, targets)

        def build(outputs: Sequence[Tensor]) -> WeightedLosses:
            return self.on(rebuilt(outputs), tuple(outputs), targets, rows)

        padding = self.emitted.padding(values, fisher)
        if padding is None:
            return build(fisher)
        mask, dims = padding
        return real_losses(build, fisher, dims, mask, self.averages_elements)

    @property
    def averages_elements(self) -> bool:
        """Whether the declared loss is torch's mean over elements."""
        given = self.given
        return isinstance(given, LossSpec) and given.of_torch is not None and given.of_torch.averages_elements

    def rebuilt(self, output: Any, fisher: Sequence[Tensor], replacements: Sequence[Tensor]) -> Any:
        """The model's result with other tensors for the Fisher's outputs. output: flat, as a run returns it."""
        return self.emitted.capture.unflatten(replaced(output, fisher, replacements))

    def of_constants(
        self, output: Any, fisher: tuple[Tensor, ...], values: Any, mode: str, targets: Any
    ) -> tuple[list[Tensor], WeightedLosses]:
        """The Fisher's outputs as leaves of a graph of their own, and the losses on these."""
        leaves = [value.detach().requires_grad_(is_differentiable(value)) for value in fisher]
        if mode == "empirical" and targets is None and not self.declared.of_outputs:
            targets = self.targets_in_graph(values, leaves)
        return leaves, self.real(lambda outputs: self.rebuilt(output, fisher, outputs), leaves, values, targets)

    def targets_in_graph(self, values: Any, fisher: Sequence[Tensor] = ()) -> list[Any]:
        """The targets of registered losses, or of those that forward computes. Raises LossError unless they are
        computed from inputs and the Fisher's outputs alone.

        fisher: these outputs in a run on these inputs.
        """
        sites = self.declared.sites
        known = self.of_run(fisher, values)
        each = ((site.targets, known | shaped_as(site.targets, known)) for site in sites)
        return [self.emitted.target_values(targets, values, of_run) for targets, of_run in each]

    def of_run(self, fisher: Sequence[Tensor], values: Any) -> dict[Any, Tensor]:
        """The values of nodes that a run on these inputs tells by the Fisher's outputs."""
        if not self.emitted.whole:
            return {}
        outputs = self.emitted.program.outputs[: len(fisher)]  # the rest are those of other terms
        known = {node: output.detach() for node, output in zip(outputs, fisher, strict=True)}
        if not known or not self.weigh_by_outputs:
            return known
        program = self.emitted.program
        told = once(told_by, program, lambda: told_by(program, outputs))
        reshaped = {node: output for node, output in told.items() if shape_of(node) != shape_of(output)}
        others = {node: known[of].reshape(shape_on(program, node, values)) for node, of in reshaped.items()}
        return {node: known[of] for node, of in told.items() if node not in reshaped} | others

    @property
    def sites_weighed_by_outputs(self) -> list[tuple[LossSite, Way]]:
        """The losses that forward weighs by its own outputs, without a gradient, as causal ones; with their ways."""
        sites = [site for site in self.emitted.loss_sites if isinstance(site, LossSite)] if self.emitted.whole else []
        return [(site, way) for site in sites if (way := site.way) is not None and way.linear and way.of_outputs]

    @property
    def weigh_by_outputs(self) -> bool:
        return bool(self.sites_weighed_by_outputs)

    def reweighted(self, before: Sequence[Tensor], after: Sequence[Tensor], values: Any) -> Tensor:
        """Σ <w(before) - w(after), loss(after)> over the losses. If it is added to the returned loss after a step, this
        has the weights of before.

        before, after: the Fisher's outputs on these inputs.
        """
        old, new = (self.of_run(outputs, values) for outputs in (before, after))
        total = torch.zeros((), device=after[0].device)
        for site, way in self.sites_weighed_by_outputs:
            loss = self.emitted.target_values(site.node, values, new)
            was, now = (self.emitted.weights(way, loss, values, known) for known in (old, new))
            total = total + ((was - now) * loss).sum()
        return total


def shaped_as(targets: Any, known: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """For targets such as `torch.zeros_like(u)` a value that stands for u, of which they have the shape alone."""
    if not isinstance(targets, fx.Node) or op_name(targets) not in SHAPE_ONLY or targets.args[0] in known:
        return {}
    shape = str(shape_of(targets.all_input_nodes[0]))
    same = [value for node, value in known.items() if shape_of(node) and str(shape_of(node)) == shape]
    return {targets.args[0]: same[0]} if same else {}


def probably_mean(sites: Sequence[FoundLoss]) -> bool:
    """Whether the returned loss is a mean, by what is written in forward."""
    site = next(iter(sites), None)
    if site is None or site.reduction == "mean":
        return True
    if isinstance(site, ObservedLoss):
        return False
    return site.way is not None and any(op_name(node) in ("mean", "div") for node in site.way.nodes[1:])


def unreduced(shape: torch.Size, of_torch: TorchLoss) -> tuple[int, ...]:
    """The shape of a loss of torch that is not reduced."""
    axis = min(1, len(shape) - 1)
    return (*shape[:axis], *shape[axis + 1 :]) if of_torch.classes_second else tuple(shape)


def with_mean_weight(coefficient: Any, loss: LossFunction) -> tuple[Any, LossFunction]:
    """A coefficient as one number for all cases, and the loss with their weights relative to it."""
    if not isinstance(coefficient, Tensor) or not coefficient.dim():
        return coefficient, loss
    mean = coefficient.sum() * loss.all_cases / (coefficient.numel() * loss.cases)
    weighed = loss.at(loss.inputs)
    weighed.weights = coefficient / mean
    return mean, weighed


def share(cases: int | Tensor, of: int | Tensor) -> Any:
    """cases / of; exactly 1 for one number of cases, without a look at what only the device knows."""
    return 1.0 if cases is of or (isinstance(cases, int) and cases == of) else cases / of


def real_losses(
    build: Callable[[Sequence[Tensor]], WeightedLosses],
    outputs: Sequence[Tensor],
    dims: Sequence[Dims | None],
    mask: Tensor,
    averages_elements: bool = False,
) -> WeightedLosses:
    """The losses without padding, which is a constant of them and no case.

    Args:
        build: from values of the Fisher's outputs to the losses.
        dims: the dimensions of every output along which the mask goes; None: all of it is real.
        averages_elements: the losses are means over elements, of which padding is none, either.
    """
    real = [None if d is None else spread(mask != 0, d, output.shape) for output, d in zip(outputs, dims, strict=True)]
    pairs = list(zip(outputs, real, strict=True))
    losses = build([output if r is None else torch.where(r, output, output.detach()) for output, r in pairs])
    with torch.no_grad():  # a case is real if it changes with the real values, whatever the losses make of these
        changed = build([perturbed(o) if r is None else torch.where(r, perturbed(o), o) for o, r in pairs])
    for (_, loss), (_, other) in zip(losses, changed, strict=True):
        differs = loss.inputs != other.inputs
        real_cases = differs.reshape(*differs.shape[: loss.case_axes], -1).any(-1)
        loss.real_elements = differs
        loss.real = real_cases if loss.kept is None else real_cases & loss.kept
        loss.real_cases = int(loss.real.sum())
    return [(c * share_of_real(loss), loss) for c, loss in losses] if averages_elements else losses


def share_of_real(loss: LossFunction) -> float:
    """The mean over the elements of a case, relative to that over its real elements, in the mean over cases."""
    assert loss.real_elements is not None, "bug in kfac_fx: no padding is known"
    return (int(loss.cases) / loss.all_cases) / (max(1, int(loss.real_elements.sum())) / loss.inputs.numel())
