"""The default rule, "eigen_moments": between Adam and K-FAC, in the eigenbasis of the Fisher blocks.

With F = Q Λ Qᵀ of a block (Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product), and its gradient g:

    h = Qᵀ g
    m̂, v̂ = the means of h and h² over the steps so far, with weights 1, β, β², ... from the newest to the oldest
                                     β₁ of m̂: `momentum`; β₂ of v̂: `second_moment_decay`; the squares are elementwise
    β₁ <= 1 - 1 / max(`SHORTEST`, t / 10) at step t: m̂ looks back over a tenth of the training, or over 10 steps
    a = n / (√v̂ + ε)                 Adam's step; n = β₁ m̂ + (1 - β₁) h or n = m̂
    d = n / ((√v̂ + ε)¹⁻ʷ Λ̃ʷ)         w: `eigenvalue_exponent`; Λ̃: the damped eigenvalues
    Δ = Q d |a| / |d|                the norms are those of the block

**w = 0** is Adam in the basis of K-FAC. v̂ is the diagonal of the second moment of gradients in the basis, which George
et al. 2018 ("Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", algorithm 1) take instead
of Λ, here averaged over steps. The first n is Nesterov's momentum in Adam (Dozat 2016, "Incorporating Nesterov
momentum into Adam", algorithm 8, with one bias correction for both terms). Adam in an eigenbasis is SOAP (Vyas et al.
2024, "SOAP: improving and stabilizing Shampoo using Adam", algorithm 3), with n = m̂ and factors that are averages of
g gᵀ and gᵀ g; here they are K-FAC's A and G. Blocks that are no Kronecker product have the basis of their F, and
diagonal blocks that of the parameters.

**w = 1** is the direction of K-FAC, with factored damping as Martens & Grosse 2015, section 6.3, have it:

    Λ̃ = (Λ_G + λ_G) ⊗ (Λ_A + λ_A)   λ_A = δ tr A / dim A, λ_G = δ tr G / dim G; δ: `relative_damping`

It is grafted on Adam's length (Agarwal et al. 2020, "Disentangling adaptive gradient methods from learning rates"), so
the scale of Λ̃ does not matter. `eigenvalues` has Λ_G / λ_G + 1 and Λ_A / λ_A + 1.

**With weight decay** the loss on new data matters, and there the small eigenvalues do harm. They are mostly noise, as
those of pixels that few images have, and a step along their eigenvectors fits the noise of the targets. So δ is at
least the weight decay, if none is given.

**Between them**, w = 1/2 is the geometric mean of both divisors. v̂ has what the Kronecker product leaves out, and the
noise of batches, whose root takes most of the curvature out of a direction; Λ̃ has the curvature alone.

**If no loss is known**, Λ is of the gradients that training sends back. The gradient that all examples have in common
makes an eigenvalue large, whatever the curvature is, and Λ̃ would take its direction out of the step (Kunstner, Balles
& Hennig 2019, "Limitations of the empirical Fisher approximation for natural gradient descent"). So w is 0 there: with
w = 1/2 a variational autoencoder stands still at first.

**The length of a step** is that of Adam's times `RATE`, times a multiplier m, and bounded by the exact Fisher:

    θ <- θ - lr a m Δ / r       a = `RATE`
    m <- m exp(η c lr / lr₀)    c = <g, Δ'> / (|g| |Δ'|), with Δ' the update of the last step, in which weight decay is
                                included: the cosine of the angle between the gradient and the way back. lr₀ is the
                                largest lr so far. η is `GROWTH`, times min(1, `YOUNG` / t) at step t where c > 0.
    r <- max(t, √(r t))         at a check; t = max(1, lr ρ),
                                ρ = a m √(<Δ, F Δ> / (c max(1, h))), with c = T² times the `norm_constraint`

While the loss still falls along the last step, that step was too short, and m grows; where steps swing about a minimum,
c is negative and m shrinks (Baydin et al. 2018, "Online learning rate adaptation with hypergradient descent"). In long
trainings of noisy batches the cosines say little, and their sum drifts. So m grows ever more slowly after `YOUNG`
steps, when it has had the time to find its scale. The factor lr / lr₀ leaves a schedule alone: an lr that falls does
not make m grow instead. While lr is below lr₀, m does not fall below 1 either, because the schedule shortens the steps.
An lr of more than `JUMP` times lr₀ divides m by lr / lr₀, down to 1: m has found the length of steps, and lr is not it.

The length is that for the parameters that move. Where further ones begin to move, as when they are unfrozen, the search
for it begins anew: m is at most 1, T is 1, the next step has a check, and this check counts as the first.

The first check multiplies m by `ADVANCE` / ρ, at least 1 and at most `FIRST`, so that the first step goes a part of
the way that the bound allows: a job without curvature to fear has its scale after one step, and a transformer, whose
first steps must be short, has a large ρ. The rest of the way is left, because the curvature of a deep network without
skips rises in the first steps. The cosine sees the loss along a step and not beyond it. So a check multiplies m by
`OVERSHOT` if the loss of its own batch rose in the step, and by more than twice what the quadratic model says.

**Agreement.** The first check knows one batch alone, so it is careful. The bound suits networks that are far from their
quadratic models, and is too narrow for others. Each later check compares what the steps since the last one did to a
batch that they had not seen with what the last check predicted for its own batch:

    A = the fall of the loss in the steps since the last check / (their number times the predicted fall of one)

Where batches are noise, a step serves its own batch, and A is small. Batches agree if A >= `AGREEMENT` at two checks
in a row. At the checks of the first `EARLY` steps m grows then, because the next check is near, and the bound widens
wherever it limits the steps:

    m <- m min(`AGAIN`, `ADVANCE_AGAIN` / (T ρ)), at least m
    T <- 2 T, at most `MOST_TRUST`    if lr ρ >= 3/4 r, and the loss changes by what the quadratic model predicts, up to
                                      a quarter
    T <- T / 2, at least 1            if the loss falls by less than half of the prediction

T is the radius of a trust region (Conn, Gould & Toint 2000, "Trust region methods", section 6.1), and c is T² times the
`norm_constraint`. The first check without agreement divides m by what it has gained from agreement, because the cosines
alone would take long to do so.

**The best length for others.** The slope of other batches along a step δ is A times that of its own batch, and their
curvature is alike. So a step s times as long is best for them. Where A >= `USEFUL` at two checks in a row, m goes a
part of the way at the checks of the first `YOUTH` steps:

    s = -A <g, δ> / <δ, F δ>
    m <- m min(`AGAIN`, s `PART` lr / lr₀, `ADVANCE_AGAIN` / (T ρ)), at least m

The cosines alone take long to find that steps are too short. In many dimensions most of an update is noise, and its
angle with the gradient is nearly a right one, though the loss falls along it. One check is no ground for this: in a
deep network without skips the curvature may rise many times within the next steps.

**Noise.** A step moves the predictions of its own batch further than those of others, because it learns the noise of
its batch. Where batch normalization meets few cases, it moves them many times as far, so that the bound would hold the
training where it is. So the bound gives way if it shortens steps by much, and they do little to a batch that
they had not seen, neither good nor harm. At the checks of the first `YOUTH` steps, if this batch is not the last one's,

    T <- 8 T, at most `MOST_DOUBT`; r <- 1    if ρ T > `NARROW` at the last check, and -`HARM` <= A <= `UNLIKE`

The quadratic model of a step's own batch says little of others then. So once T is above `MOST_TRUST`, other batches
decide, and the guard:

    T <- T / 2                                if A < -`HARM`, or a check undoes steps

The squared Fisher norm of the step is twice the Kullback-Leibler divergence between the predictions before and after
it. At a check it is at most c max(1, h), as r >= lr ρ. The guard tolerates a rise of h by `RISE` max(1, h), or by
`RISE_AGAIN` h if that is less. A smaller rise is no sign of a bad step: Adam's steps make a small loss rise and fall on
its way, even where the quadratic model predicts a rise.

The mean gradient n in d has Nesterov's momentum, with more weight on the newest gradient, where neither of two signs
speaks against it. n is the plain mean m̂

    if the last two checks had the same batch     gradients without noise gain from a longer mean
    if lr ρ >= 3/4 r at the last check            the curvature and not the noise limits the steps, as in a deep network
                                                  without skips: the bound allows longer ones along a steadier d

A loss without a name may be measured in any unit, and its values are not known. Its F is that of the gradients, so
<Δ, F Δ> is a squared change of the loss, and its bound is c max(1, h, u²). The unit u² is the largest mean over cases
of |g|² at the outputs that a check has seen; of a number that forward returns, its largest square. After the first
check it grows by `LARGER` at most, so that an outlier does not take the bound away.

Checks do not see what is lost of the slope where the user takes derivatives of the outputs outside of forward. If the
first check sees less than `APART` of it, m begins at its least value, and the cosines alone make it grow.

A check is *calm* if it undid nothing and lr ρ <= 0.4 r, so that the squared norm is below a sixth of its bound. The
check after a calm one may come later (`kfac_fx.optim.schedule`).

Adam's rate alone suits many networks, but not deep ones without skips and norms: there the steps of all layers add up,
the loss is far from its quadratic model, and the bound is what makes training possible. The step along d that minimizes
the quadratic model is no substitute: it is several times too short, because directions of large curvature, along which
such steps may oscillate, decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.bases import (
    MEAN_VALUES,
    Means,
    StepScalars,
    combine,
    divide_root,
    has_bases_in_blocks,
    in_new_basis,
    momentum_of,
    moving,
    new_means,
    norms,
    turned,
    update_bases,
    without_basis,
)
from kfac_fx.fisher.block import BlockDiagonalFisher
from kfac_fx.fisher.groups import BlockGroup, FixedMatrices
from kfac_fx.fisher.placement import UNDIVIDED
from kfac_fx.linalg.arguments import (
    A_NUMBER_OF_STEPS,
    NOT_NEGATIVE,
    Values,
    a_decay,
    a_flag,
    a_weight,
    positive,
    whole_number,
)
from kfac_fx.linalg.matrices import all_true, zero_unless_
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.checks import LEAST_RISE, Check, StepSize, tolerated
from kfac_fx.optim.groups import MOST_SUMMED, FlatParameters
from kfac_fx.optim.padded_step import PaddedStep
from kfac_fx.optim.rule import (
    ANY,
    BlockStep,
    CheckedRule,
    MeasuredMove,
    Memory,
    Outcome,
    StepIntervals,
    Update,
    checkpoint_of,
    zeros_for,
)
from kfac_fx.optim.rules import exact_steps
from kfac_fx.passes.errors import ApproximationError, plural, table
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics import Key

RATE = 0.02
EXPONENT, EXPONENT_UNNAMED = 0.5, 0.0  # w by default, and without a loss that is known
GROWTH = 1.0  # η
OVERSHOT = 0.3
YOUNG = 100.0  # steps, after which m grows more slowly
JUMP = 4.0  # of lr, which is more than that of a warm-up from one step to the next
ADVANCE, FIRST = 0.5, 10.0  # the first check takes m to this part of the bound, and at most to `FIRST`
AGREEMENT = 0.75  # of batches, from which steps do what their checks predicted
EARLY = 5  # steps, whose checks take m on if batches agree
APART = 0.5  # of the slope along a step: what the outputs tell at least of a loss that checks see
ADVANCE_AGAIN, AGAIN = 0.75, 2.0  # to this part of the bound, at most times `AGAIN`
USEFUL, PART = 0.4, 0.25  # A, from which m goes to this part of the best length for others
RIGHT, WRONG = 0.25, 0.5  # the change of the loss: as far from the predicted one, or below this part of it
MORE_TRUST, MOST_TRUST = 2.0, 4.0  # T
NARROW = 10.0  # by which a bound shortens steps, if it is to be doubted
UNLIKE = 0.5  # A of batches that are noise, at most
HARM = 0.1  # -A of steps that harm other batches, at least
DOUBT, MOST_DOUBT = 8.0, 64.0  # T, where the bound is that of the noise
YOUTH = 20  # steps, whose checks may find that, and the best length for others
LEAST, MOST = 0.1, 30.0  # of m
LARGER = 4.0  # than the unit of losses without a name: that of a batch with an outlier, at most
SHORTEST, LOOKS_BACK = 10.0, 0.1  # the mean of gradients: over as many steps, or this part of all
CALM, NEAR = 0.4, 0.75  # of the bound, for the norm of a step


@dataclass(frozen=True, kw_only=True, eq=False)
class EigenMoments(CheckedRule):
    """Between Adam's step and K-FAC's in the eigenbasis of the Fisher blocks, as long as Adam's, times 0.02.

    Every few steps the exact Fisher of the batch scales the step, and steps that made the batch's loss rise are undone.
    It needs no number and no closure. Its lr is a multiplier of the step size, and 1 if none is given. The weight decay
    is multiplied by 0.02 m / r, as the whole step is.

    Args:
        momentum: β₁, the weight of the past in the averaged gradient; above 0.9 it is reached when a training has 10 /
            (1 - β₁) steps, and grows towards it from 0.9. Parameter groups may have their own, one for all parameters
            of a block.
        second_moment_decay: β₂, where 1 weighs all steps alike.
        eigenvalue_exponent: w, from 0, Adam in the eigenbasis, to 1, the direction of K-FAC with Adam's length. None
            means 1/2, or 0 if no loss is known.
        relative_damping: every side of a block is damped by this part of its mean eigenvalue, λ_A = c tr A / dim A.
            None means 0.003, or the largest weight decay of the parameter groups if that is more.
        norm_constraint: c; the squared exact Fisher norm of a step is at most c max(1, loss).
        overhead: what statistics, inverses and checks may cost in a step, as a part of the training step. A cost model
            of the network chooses their intervals at the first step (`kfac_fx.optim.schedule`), and net.report prints
            them. Intervals that are given replace those of the model. Exact steps come in addition.
        damping_adaptation_interval: the interval of the checks, which are also made after 1, 2, 5, 10, 20, ... steps
            while that is less. None means what `overhead` allows; they then become up to four times as rare while steps
            are far below their bound.
        exact_steps: whether a step whose batch repeats may minimize the exact quadratic model of the batch
            (`kfac_fx.optim.rules.exact_steps`).
    """

    name: ClassVar[str] = "eigen_moments"
    exps: ClassVar[tuple[float, ...]] = ()
    has_bases: ClassVar[bool] = True
    factor_decay: ClassVar[float] = 0.98
    longest: ClassVar[StepIntervals] = StepIntervals(statistics=30, inverses=ANY, checks=10)
    scalars: ClassVar[Mapping[str, float]] = {
        "multiplier": 1.0,
        "peak_lr": 0.0,
        "steps": 0.0,
        "promised": 0.0,  # the fall of the loss that the last check predicted for its step
        "trust": 1.0,  # T
        "advance": 1.0,  # the part of m that comes from agreement
        "agreement": 1.0,  # A at the last check, from -1 to 1
        "agreed": 0.0,  # the smaller one of the last two
        "unit": 0.0,  # u², of losses without a name
        **exact_steps.EXACT_SCALARS,
    }
    values: ClassVar[Mapping[str, Values]] = {
        "multiplier": Values(LEAST, FIRST * MOST),
        "held": Values(0, FIRST * MOST),
        "peak_lr": NOT_NEGATIVE,
        "steps": A_NUMBER_OF_STEPS,
        "promised": NOT_NEGATIVE,
        "trust": Values(1, MOST_DOUBT),
        "advance": Values(1, MOST / LEAST),
        "agreement": Values(-1, 1),
        "agreed": Values(-1, 1),
        "unit": NOT_NEGATIVE,
        **exact_steps.EXACT_VALUES,
        **MEAN_VALUES,
    }

    momentum: Annotated[float, a_decay] = 0.95
    second_moment_decay: Annotated[float, a_weight] = 0.95
    eigenvalue_exponent: Annotated[float | None, a_weight] = None
    relative_damping: Annotated[float | None, positive] = None
    norm_constraint: Annotated[float, positive] = 0.03
    overhead: Annotated[float, positive] = 0.2
    damping_adaptation_interval: Annotated[int | None, whole_number(1, "steps")] = None
    exact_steps: Annotated[bool, a_flag] = True

    def check_options(self) -> None:
        if self.relative_damping is not None and self.eigenvalue_exponent == 0:
            raise ValueError(
                f"relative_damping={self.relative_damping} has no effect without an eigenvalue_exponent above 0: leave "
                "it out"
            )

    def exponent(self, estimator: FisherEstimator) -> float:
        """w, also if it is not given."""
        if self.eigenvalue_exponent is not None:
            return self.eigenvalue_exponent
        return EXPONENT_UNNAMED if knows_no_loss(estimator) else EXPONENT

    def side_damping_with(self, weight_decay: float) -> float | None:
        """At least the weight decay, if no `relative_damping` is given."""
        damping = self.side_damping
        return damping if damping is None or self.relative_damping is not None else max(damping, weight_decay)

    @property
    def of_groups(self) -> dict[str, float]:
        return {"momentum": self.momentum}

    @property
    def reported(self) -> tuple[str, ...]:
        return ("multiplier", "exact_steps")

    def described(self, scalars: Mapping[str, Tensor]) -> list[str]:
        lines = [f"the rate of steps is {RATE} lr m, and their multiplier m is {float(scalars['multiplier']):.2g}"]
        if (trust := float(scalars["trust"])) > MOST_TRUST:
            lines.append(
                f"steps may be {trust:g} times as long as the bound of their own batch says, because they do little to "
                "batches that they had not seen"
            )
        if number := int(scalars["exact_steps"]):
            steps = plural(number, "step")
            lines.append(f"{steps} minimized the exact quadratic model of a batch that repeats, at a cost of their own")
        return lines

    # --- state --------------------------------------------------------------------------------------------------------

    def new_state(self, parameter: Tensor) -> Tensors:
        """The parameter at the last check, and the last update; both means belong to the blocks."""
        return {**checkpoint_of(parameter), "last_update": zeros_for(parameter)}

    def new_extras(self, groups: Sequence[BlockGroup]) -> list[Tensors]:
        """Zero bases of the dense sides, eigenvalues of 1, and both means before the first update."""
        bases = super().new_extras(groups)
        return [of_group | means for of_group, means in zip(bases, new_means(groups), strict=True)]

    def memory(self, scalar: Tensor, estimator: FisherEstimator) -> EigenMemory:
        return EigenMemory(self, scalar, estimator)

    def decompose(self, estimator: FisherEstimator, keys: Collection[Key] | None) -> None:
        """Blocks whose factors are not finite keep their bases."""
        update_bases(estimator, keys, in_new_basis)

    def refuse_registrations(self, registrations: Iterable[Registration]) -> None:
        wrong = [(str(registration), registration.approximation) for registration in without_basis(registrations)]
        if wrong:
            raise ApproximationError(
                f"{self.written} turns gradients with the eigenvectors of A and G, and these blocks are no "
                f"products of A and G:\n{table(wrong)}\n"
                "Compile with 'kron', 'kron_indep', 'diagonal' or 'full' for them, as in approximations={'name': "
                "'kron'}, or write momentum_type='adaptive'."
            )

    # --- the step -----------------------------------------------------------------------------------------------------

    def admits(self, step: BlockStep, groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str]) -> Tensor:
        refuse_divided_momentum(self.written, groups, names, step.estimator)
        padded = step.memory.padded(step.flat)
        if padded is None:
            return step.flat.gradient_is_finite()
        padded.pack(step.flat)
        return padded.gradient_is_finite()  # type: ignore[no-any-return]

    def has_gradient(self, step: BlockStep) -> Tensor:
        padded = step.memory.padded(step.flat)
        if padded is None:
            return super().has_gradient(step)
        padded.pack(step.flat)
        return padded.has_gradient()  # type: ignore[no-any-return]

    def whole_step(self, step: BlockStep) -> tuple[Tensor, None] | None:
        padded = step.memory.padded(step.flat)
        if padded is None:
            return None
        size = step.size
        most, grow = partial(most_momentum, step.scalars["steps"]), partial(self.grow, step)
        rate = partial(self.rate, step)
        ok = padded.step(step.flat, step.ok, rate, step.of_groups, lambda: nesterov(size), most, grow)
        return ok, None

    def direction(self, step: BlockStep) -> Update:
        """The gradient enters the means if it is taken, and becomes zero if not."""
        flat, memory, beta = step.flat, step.memory, step.of_groups["momentum"]
        padded = memory.padded(flat)
        if padded is not None:
            most, grow = partial(most_momentum, step.scalars["steps"]), partial(self.grow, step)
            update = padded.vector(flat, step.ok, step.of_groups, nesterov(step.size), most, grow)
            return Update(update, ok=padded.accept.clone())
        product, squared, squared_last = flat.products(flat.g, flat.state["last_update"])
        ok = step.ok & (MOST_SUMMED * squared).isfinite()
        self.grow(step, ok, product, squared, squared_last)
        parts = flat.parts(zero_unless_(ok, flat.g))
        gradient, absent, run = flat.division.to_blocks(parts), step.absent, step.compiled(directions)
        # The rule of a user may keep the update.
        fixed = memory.fixed(flat) if run is directions and type(self) is EigenMoments else None
        by_name = step_in_bases(
            step.estimator,
            memory.means,
            {**gradient, **absent},
            beta,
            self.second_moment_decay,
            self.exponent(step.estimator),
            nesterov=nesterov(step.size),
            accept=ok,
            most=most_momentum(step.scalars["steps"]),
            still=absent.keys(),
            run=run if fixed is None else partial(directions, fixed=fixed),
        )
        if fixed is not None:
            update = flat.vectors.update.filled(by_name)
        else:
            wholes = {name: by_name[name] for name in gradient}
            update = flat.flat.joined(flat.division.from_blocks(wholes, parts))
        # The way back, up to a factor: weight decay moves parameters, too, and those whose lr is zero did not move.
        return Update(update, {"last_update": update if flat.one_scale else -flat.displacement(update)}, ok=ok)

    def grow(self, step: BlockStep, ok: Tensor, product: Tensor, squared: Tensor, squared_last: Tensor) -> None:
        """Take the cosine of the gradient and the last update into m where `ok` is true; all are 0-dim.

        product: <g, Δ'>. squared, squared_last: |g|² and |Δ'|².
        """
        multiplier, peak, steps = (step.scalars[name] for name in ("multiplier", "peak_lr", "steps"))
        steps.add_(ok)
        # From the scalars of the groups, which lie where they are: a CUDA graph may hold these operations.
        lr = step.flat.lr
        if lr.dim():
            by_name = step.of_groups["lr"]
            lr = torch.stack([*{id(by_name[name]): by_name[name] for name in step.flat.parameters}.values()]).amax()
        usual = (lr <= JUMP * peak) | (peak == 0)
        if not all_true(usual):
            shorter = torch.maximum(multiplier * peak / lr, multiplier.clamp(max=1.0))
            multiplier.copy_(torch.where(usual | ~ok, multiplier, shorter))
        torch.maximum(peak, lr, out=peak)
        length = (squared * squared_last).sqrt()  # in the dtype of the parameters, which may not be that of the scalars
        cosine = (product / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(-1.0, 1.0)
        weight = GROWTH * torch.where(cosine > 0, YOUNG / steps.clamp(min=YOUNG), 1.0) * lr
        weight = weight / peak.clamp(min=torch.finfo(peak.dtype).tiny)
        least = torch.where(lr < peak, multiplier.clamp(max=1.0), LEAST)
        grown = torch.maximum(multiplier * (weight * cosine).exp(), least).clamp(max=MOST)
        multiplier.copy_(torch.where(ok, grown, multiplier))

    def begin_anew(self, step: BlockStep) -> None:
        scalars, size = step.scalars, step.size
        size.ratio.copy_(torch.where(size.ratio > 0, self.divisor(step).clamp(min=1.0), 0.0))
        size.norm.fill_(torch.inf)
        for name in ("steps", "trust", "advance", "agreement", "agreed"):
            scalars[name].fill_(self.scalars[name])
        for name in ("multiplier", "held"):
            scalars[name].clamp_(max=1.0)

    def move(self, step: BlockStep, update: Update) -> Tensor:
        # Memory of its own costs as much as a product where it is large. The rule of a user may keep the gradient.
        gradient = step.g if type(self) is EigenMoments else None
        return step.flat.displacement(update.vector, self.rate(step), instead=gradient)

    def rate(self, step: BlockStep) -> Tensor:
        """a m / r, 0-dim."""
        return RATE * step.scalars["multiplier"] / step.size.divisor

    def measured_move(self, step: BlockStep, update: Update, check: Check) -> MeasuredMove:
        exact_steps.give_back(step.scalars)
        bounded_move = self.bounded_move(step, update, check)
        if not self.may_be_exact(step, check):
            return bounded_move
        return exact_steps.exact_move(step, check, bounded_move, self.longest_step(step, check)) or bounded_move

    def may_be_exact(self, step: BlockStep, check: Check) -> bool:
        """Whether the step of a check may be exact, which does not change in the step."""
        if check.exact is None:
            check.exact = self.exact_steps and exact_steps.may_be_exact(step, check)
        return check.exact

    def longest_step(self, step: BlockStep, check: Check) -> Tensor:
        """The largest squared Fisher norm of a step without trust, 0-dim."""
        size = torch.where(check.value.isfinite(), check.value, 1.0).clamp(min=1.0)
        if not check.batch.has_names:
            size = torch.maximum(size, self.unit(step, check))
        return self.norm_constraint * size

    def unit(self, step: BlockStep, check: Check) -> Tensor:
        """u², 0-dim, which a check raises to that of its batch, at most by `LARGER`."""
        unit, of_batch = step.scalars["unit"], check.batch.unit(check.before)
        most = torch.where(unit > 0, LARGER * unit, torch.inf)
        unit.copy_(torch.where(of_batch.isfinite(), torch.maximum(unit, torch.minimum(of_batch, most)), unit))
        return unit

    def bounded_move(self, step: BlockStep, update: Update, check: Check) -> MeasuredMove:
        flat, last = step.flat, step.size.divisor
        proposed = flat.displacement(update.vector, RATE * step.scalars["multiplier"])
        if self.may_be_exact(step, check):
            exact_steps.lengthen_probes(step, check)
        fisher, slope, before = check.along(flat, proposed)
        longest = self.longest_step(step, check)
        if self.may_be_exact(step, check):
            longest = exact_steps.longest_bounded(step.scalars, check, longest)
        norm = (fisher / longest).sqrt() / step.scalars["trust"]
        ok = step.ok if update.ok is None else update.ok
        times = self.advance(step, ok, norm, -slope / fisher, self.sees_part(step, check, slope, proposed))
        norm = norm * times
        ratio = next_divisor(last, norm)
        length = times / ratio
        return MeasuredMove(
            proposed * length,
            fisher.isfinite(),
            slope * length,
            fisher * length.square(),
            before,
            tolerated(check.value),
            ratio,
            {"norm": torch.where(norm > 0, norm, step.size.norm)},
            norm,
        )

    def sees_part(self, step: BlockStep, check: Check, slope: Tensor, proposed: Tensor) -> Tensor:
        """Whether the outputs tell less than `APART` of the slope of a loss without a name along a step, 0-dim.

        The rest is that of derivatives of the outputs, which the user took outside of forward, or of the parameters.
        """
        if check.batch.has_names or not check.batch.observed:
            return torch.zeros_like(slope, dtype=torch.bool)
        whole = step.flat.inner(step.flat.g, proposed)
        return (whole < 0) & (slope > APART * whole)

    def advance(self, step: BlockStep, ok: Tensor, norm: Tensor, best: Tensor, in_part: Tensor) -> Tensor:
        """Take m a part of the way that the bound and other batches allow, or back. Returns by how much it was
        multiplied.

        All are 0-dim. ok: whether the gradient was taken. norm: lr ρ. best: the best length for the batch of the check,
            in steps. in_part: see `sees_part`.
        """
        scalars, lr, first = step.scalars, step.flat.largest_lr, step.size.norm.isinf()
        multiplier, gained, steps, least = (scalars[name] for name in ("multiplier", "advance", "steps", "agreed"))
        agreed, early, young = least >= AGREEMENT, steps <= EARLY + 1, steps <= YOUTH + 1  # with the step of this check
        again = torch.minimum(
            multiple(norm * scalars["trust"], lr, ADVANCE_AGAIN, AGAIN), (MOST / multiplier).clamp(min=1.0)
        )
        for_others = (PART * scalars["agreement"] * best * lr / scalars["peak_lr"]).nan_to_num(0.0, 0.0, 0.0)
        for_others = torch.where(young & (least >= USEFUL), torch.minimum(again, for_others).clamp(min=1.0), 1.0)
        back = torch.maximum(1 / gained, (1 / multiplier).clamp(max=1.0))
        later = torch.where(agreed, torch.where(early, again, for_others), torch.where(gained > 1, back, for_others))
        careful = torch.where(in_part, LEAST / multiplier, multiple(norm, lr, ADVANCE, FIRST))
        times = torch.where(ok, torch.where(first, careful, later), 1.0)
        keeps = torch.where(early & ~first, gained * times, gained)
        gained.copy_(torch.where(ok & (first | ~agreed), 1.0, keeps))
        multiplier.mul_(times)
        return times

    def checked_move(self, step: BlockStep, check: Check, measured: MeasuredMove, outcome: Outcome) -> None:
        assert measured.norm is not None, "bug in kfac_fx: a bound without a norm"
        calm = outcome.kept & (measured.norm <= CALM * measured.ratio)
        if self.may_be_exact(step, check):
            exact_steps.note_outcome(step, check, outcome)
            calm &= exact_steps.part_of_bound(step.scalars, check) == 1
        step.size.calm.copy_(calm)
        step.size.near.copy_(~(measured.norm < NEAR * measured.ratio))
        promised = (-outcome.predicted).clamp(min=0.0)
        step.scalars["promised"].copy_(torch.where(outcome.tried & promised.isfinite(), promised, 0.0))
        if isinstance(measured, exact_steps.ExactMove):
            step.size.calm.zero_()
            exact_steps.adapt(step, measured, outcome, holds=self.damping_adaptation_interval is None)
            step.memory.forget_update(outcome.tried)
            return
        self.forget_update(step, outcome.tried & ~outcome.kept)
        trust, limits = step.scalars["trust"], measured.norm >= NEAR * measured.ratio
        right = ((outcome.rho - 1).abs() <= RIGHT) & (step.scalars["agreed"] >= AGREEMENT)
        more = torch.where(
            outcome.kept & limits & right, MORE_TRUST, torch.where(outcome.rho > WRONG, 1.0, 1 / MORE_TRUST)
        )
        doubted = torch.where(outcome.tried & ~outcome.kept, trust / MORE_TRUST, trust)
        trust.copy_(torch.where(trust > MOST_TRUST, doubted, (trust * more).clamp(1.0, MOST_TRUST)))
        rounding = LEAST_RISE * torch.where(check.value.isfinite(), check.value.abs(), 0.0)
        overshot = (outcome.change > rounding) & (outcome.change > 2 * outcome.predicted)
        multiplier = step.scalars["multiplier"]
        multiplier.copy_(torch.where(overshot, (OVERSHOT * multiplier).clamp(min=LEAST), multiplier))

    def tolerated_rise(self, step: BlockStep, was: Tensor, same: Tensor) -> Tensor:
        usual = super().tolerated_rise(step, was, same)
        if step.check is None or not self.may_be_exact(step, step.check):
            return usual
        return exact_steps.tolerated_in_phase(step, usual, was, same)

    def known_rise(self, step: BlockStep, check: Check) -> Tensor | None:
        return exact_steps.known_rise(step, check) if self.may_be_exact(step, check) else None

    def divisor(self, step: BlockStep) -> Tensor:
        """r, without what a large multiplier made of it and the bound takes back, and without what the bound of a small
        loss made of it; 1 for an exact step."""
        divisor = step.size.ratio / step.scalars["multiplier"].clamp(min=1.0)
        if step.check is not None and self.may_be_exact(step, step.check):
            divisor = divisor * exact_steps.part_of_bound(step.scalars, step.check).sqrt()
        return torch.where(step.scalars["held"] > 0, 1.0, divisor)

    def reverted(self, step: BlockStep, check: Check, risen: Tensor) -> None:
        assert check.rise is not None, "bug in kfac_fx: a check that did not look at the last one"
        last, agreed = step.scalars["agreement"], step.scalars["agreed"]
        promised = check.steps * step.scalars["promised"]
        known = (promised > 0) & check.rise.isfinite()
        agreement = torch.where(known, -check.rise / promised, 0.0).clamp(-1.0, 1.0)
        agreed.copy_(torch.minimum(agreement, last))
        last.copy_(agreement)
        self.doubt(step, agreement, known & ~risen)
        if self.may_be_exact(step, check):
            exact_steps.note_batch(step, check, agreement >= exact_steps.AGREES, risen)
        step.memory.means.forget_average(risen)
        self.forget_update(step, risen)

    def doubt(self, step: BlockStep, agreement: Tensor, known: Tensor) -> None:
        """Widen a bound that is that of the noise of batches, and narrow it if steps harm other batches.

        agreement: A, 0-dim. known: whether it is the quotient of two numbers, 0-dim.
        """
        trust, size, lr = step.scalars["trust"], step.size, step.flat.largest_lr
        young = (step.scalars["steps"] <= YOUTH) & size.norm.isfinite()
        narrow = size.norm * trust > NARROW * lr
        noise = young & narrow & known & ~size.same & (agreement >= -HARM) & (agreement <= UNLIKE)
        less = torch.where((trust > MOST_TRUST) & (agreement < -HARM), 1 / MORE_TRUST, 1.0)
        trust.copy_(torch.where(noise, (DOUBT * trust).clamp(max=MOST_DOUBT), trust * less))
        size.ratio.copy_(torch.where(noise, 1.0, size.ratio))

    def forget_update(self, step: BlockStep, where: Tensor) -> None:
        """Forget the last update where `where` is true, 0-dim: the parameters are no longer behind it."""
        step.state["last_update"].masked_fill_(where, 0)
        step.memory.forget_update(where)


class EigenMemory(Memory):
    """The means of the blocks that have factors at present, and the program of a step on an accelerator."""

    def __init__(self, rule: EigenMoments, scalar: Tensor, estimator: FisherEstimator) -> None:
        """scalar: a zero with the dtype and the device of all scalars."""
        self.rule, self.scalar, self.estimator = rule, scalar, estimator
        self._means: Means | None = None
        self._padded: PaddedStep | None = None
        self._fixed: FixedMatrices | None = None
        self._fixed_of: Means | None = None

    @property
    def means(self) -> Means:
        if self._means is None or not self._means.are_of(self.estimator):
            self._means = Means.of(self.estimator)
        return self._means

    def fixed(self, flat: FlatParameters) -> FixedMatrices | None:
        """The matrices of all groups; None if the parameters do not lie in them as views, or if the network is so large
        that the host's time does not count, and the memory does."""
        means = self.means
        if flat.division is not UNDIVIDED or self.scalar.device.type != "cpu" or means.are_large:
            return None
        if self._fixed_of is not means:
            self._fixed_of = means  # in the precision of the bases, in which they are multiplied
            self._fixed = FixedMatrices.of(means.groups, [basis[0].dtype for basis in means.bases])
        return self._fixed if self._fixed is not None and self._fixed.views.keys() == flat.parameters.keys() else None

    def padded(self, flat: FlatParameters) -> PaddedStep | None:
        """The step by products in bfloat16; None where gradients are multiplied as they are."""
        device, dtype = self.scalar.device, self.scalar.dtype
        products = product_dtype(device, dtype)
        if products is None or flat.division is not UNDIVIDED or not (means := self.means).groups:
            return None
        if any(group.dtype is not dtype or group.device != device for group in means.groups):
            return None
        if self._padded is None or self._padded.means is not means:
            if has_bases_in_blocks(means.groups):  # of a state of a CPU
                return None
            decay, exponent = self.rule.second_moment_decay, self.rule.exponent(self.estimator)
            self._padded = PaddedStep.of(means, self.scalar, decay, exponent, products)
        return self._padded if self._padded.fits(means, flat) else None

    def reset(self) -> None:
        self._means = self._padded = None

    def forget_update(self, where: Tensor) -> None:
        if self._padded is not None:
            self._padded.forget_move(where)

    def static(self) -> list[Tensor]:
        """Tensors that stay where they are, for CUDA graphs."""
        return [stack.moment for stack in self.means.joint or ()]

    def described(self) -> list[str]:
        """For the report: the precision of a step, and w where it is not the usual one."""
        lines = [] if self._padded is None else [self._padded.described]
        if self.rule.eigenvalue_exponent is None and knows_no_loss(self.estimator):
            lines.append("steps are those of Adam in the eigenbases, because no loss is known")
        return lines

    def reasons(self) -> list[str]:
        """For the report: why a step is slower than it could be."""
        return [] if self._padded is None else self._padded.reasons


def knows_no_loss(estimator: FisherEstimator) -> bool:
    return isinstance(estimator.net, CompiledModule) and estimator.net.knows_no_loss


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """The precision of products with bases of this precision, where it pays to pad them; None elsewhere."""
    if device.type == "cuda" and dtype is torch.float32 and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return None


def multiple(norm: Tensor, lr: Tensor, part: float, most: float) -> Tensor:
    """By which a check multiplies m: part / ρ, at least 1 and at most `most`; 1 while lr is zero. norm: lr ρ. All are
    0-dim."""
    return torch.where(norm > 0, part * lr / norm, 1.0).clamp(min=1.0, max=most)


def most_momentum(steps: Tensor) -> Tensor:
    """The largest β₁ after as many steps, 0-dim: its mean looks back over a part of the training."""
    return 1 - 1 / (LOOKS_BACK * steps).clamp(min=SHORTEST)


def nesterov(size: StepSize) -> Tensor:
    """Whether the mean gradient has Nesterov's momentum, 0-dim."""
    return ~(size.same | size.near)


def next_divisor(last: Tensor, norm: Tensor) -> Tensor:
    """r; all are 0-dim. last: r at the last check. norm: lr ρ."""
    target = norm.clamp(min=1.0)
    return torch.maximum(target, (last * target).sqrt())


@torch.no_grad()
def step_in_bases(
    fisher: BlockDiagonalFisher,
    means: Means,
    gradient: Tensors,
    momentum: Mapping[str, Tensor],
    decay: float,
    exponent: float,
    nesterov: Tensor,
    accept: Tensor,
    most: Tensor | None = None,
    still: Collection[str] = (),
    run: Callable[..., Tensors] | None = None,
) -> Tensors:
    """Δ by parameter, after the gradient has entered both means.

    Args:
        means: those of `fisher`.
        gradient: g, of all parameters in Fisher blocks of this process that are not idle; zero if `accept` is false.
        momentum: β₁ by parameter, 0-dim. The parameters of a block have the same.
        decay: β₂.
        exponent: w.
        nesterov: 0-dim; whether n is not m̂ alone.
        accept: 0-dim; if it is false, the means stay as they are.
        most: the largest β₁, 0-dim, if there is one.
        still: the parameters without a gradient, which have zeros. Blocks of these alone keep their means.
        run: `directions`, or what a compiler made of it.
    """
    if not means.groups:
        return {}
    accepted, beta = moving(means.groups, accept, still), momentum_of(means.groups, momentum, most)
    scalars = means.advance(accepted, beta, decay, nesterov)
    return (run or directions)(fisher, means, gradient, scalars, exponent, means.bases, means.eigenvalues)


@torch.no_grad()
def directions(
    fisher: BlockDiagonalFisher,
    means: Means,
    gradient: Tensors,
    scalars: Sequence[StepScalars],
    exponent: float,
    bases: Sequence[Sequence[Tensor]],
    eigenvalues: Sequence[Sequence[Tensor]],
    fixed: FixedMatrices | None = None,
) -> Tensors:
    """Δ by parameter; the gradient enters the sums of both means.

    Args:
        scalars: of `Means.advance`.
        bases, eigenvalues: of every group.
        fixed: memory for the matrices of all groups, which has Δ then; None: new memory.
    """

    def updates(groups: Sequence[BlockGroup], matrices: Iterable[Tensor]) -> list[Tensor]:
        each = zip(groups, matrices, bases, strict=True)
        in_bases = [turned(group, g, q, transpose=True) for group, g, q in each]
        if means.worth_parts:
            directions = means.directions_by_parts(in_bases, scalars, eigenvalues, exponent)
        else:
            pairs = means.adam_steps(in_bases, scalars)
            by_group = means.pairs_by_group(pairs)
            if exponent:
                graft(means, pairs, by_group, eigenvalues, exponent)
            directions = [pair[1 if exponent else 0] for pair in by_group]
        return [turned(group, d, q) for group, d, q in zip(groups, directions, bases, strict=True)]

    if fixed is None:
        return fisher.of_groups(means.groups, updates, gradient, kept=True)
    for matrices, update in zip(fixed.matrices, updates(means.groups, fixed.filled(gradient)), strict=True):
        matrices.copy_(update)
    return fixed.views


def graft(
    means: Means,
    pairs: Sequence[Tensor],
    by_group: Sequence[Tensor],
    eigenvalues: Sequence[Sequence[Tensor]],
    exponent: float,
) -> None:
    """Overwrite √v̂ with d |a| / |d|; d is a (√v̂ / Λ̃)ʷ, up to a factor for each block.

    pairs: the result of `Means.adam_steps`. by_group: views of it, of `Means.pairs_by_group`.
    """
    for of_group, pair in zip(eigenvalues, by_group, strict=True):
        divide_root(pair, of_group)
    for pair in pairs:
        combine(pair, exponent)
    of_blocks = [norms(group, pair) for group, pair in zip(means.groups, by_group, strict=True)]
    for pair, scale in zip(by_group, means.grafting_scales(of_blocks), strict=True):
        pair[1].mul_(scale)


def refuse_divided_momentum(
    rule: str, groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], fisher: BlockDiagonalFisher
) -> None:
    """Raises ValueError for blocks whose parameters have different momenta in the parameter groups.

    rule: as the user wrote it. names: of the parameters in the groups. With one momentum for all it costs nothing.
    """
    in_blocks = [group for group in groups if not group["first_order"]]
    if all(equal_numbers(group["momentum"], in_blocks[0]["momentum"]) for group in in_blocks):
        return
    momenta = {names[parameter]: group["momentum"] for group in in_blocks for parameter in group["params"]}
    rows = []
    for block in fisher.blocks.values():
        of_block = {name: momenta[name] for name in block.registration.owners if name in momenta}
        if any(not equal_numbers(beta, next(iter(of_block.values()))) for beta in of_block.values()):
            described = ", ".join(f"{float(beta)} of {name}" for name, beta in of_block.items())
            rows.append((str(block.registration), described))
    if rows:
        raise ValueError(
            f"{rule} averages the gradient of a Fisher block in the block's eigenbasis, so all "
            f"parameters of a block have one momentum. {len(rows)} blocks have several:\n{table(rows)}\n"
            "Give the parameter groups of these parameters the same momentum."
        )


def equal_numbers(first: float | Tensor, second: float | Tensor) -> bool:
    """Whether two numbers are equal; waits for the device only for different tensors."""
    return first is second or float(first) == float(second)
