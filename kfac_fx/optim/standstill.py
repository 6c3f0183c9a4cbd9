"""Whether steps lead anywhere: a warning, once, of steps that cannot be made, of parameters that stand still, and of a
training that diverges.

Steps 1, 2, 5, 10, 20, 50 and 100 are looked at, and then every hundredth. A look compares the entries of every
parameter that have the largest gradients before and after the step. The host reads it some steps later, so that it
hardly waits.

A training may diverge within finite numbers. A rule without checks does not know the loss, and checks know that of the
registered distribution, which is not the trained one where there was a LossScaleWarning. |g| |θ| grows as the loss
does: <g, θ> is the loss times its degree, for a loss that is a power of the parameters. A look compares it with that of
the first look. Either factor alone may grow in a training that is well: gradients that leave a saddle point, and
parameters on the way to large targets.

**Coverage**: parameters that have a gradient and no curvature; the first step warns of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_fx.compiled.loss_scale import LossScaleWarning
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.block import BlockOperator
from kfac_fx.linalg.arguments import listed
from kfac_fx.linalg.matrices import HostCopy, dense
from kfac_fx.linalg.processes import shard
from kfac_fx.optim.checks import STEPS_TO_READ, StalledWarning
from kfac_fx.optim.schedule import is_early
from kfac_fx.passes.errors import plural, warn_user
from kfac_fx.passes.matrix import precise, real_numbers
from kfac_fx.recording.proof import NO_LOSS

CERTAINTY = 1e-7  # of the length of a gradient, for the root of the mean squared length of those of sampled targets
LISTED_PARAMETERS = 8  # parameters that a warning names


def check_coverage(
    estimator: FisherEstimator,
    gradients: Mapping[str, Tensor],
    whole: bool,
    named: bool = True,
    has_other_factor: bool = False,
) -> None:
    """Warn of parameters of Fisher blocks that have a gradient and no curvature.

    Their step would follow the gradient alone. This happens if the predictive distributions of the
    whole batch are certain, as those of a saturated softmax; and if forward computes losses of which only some are
    distributions that the library knows. Parameters in no block follow the first-order rule; they are right.

    Curvature is too little if √tr F is below `CERTAINTY` of the gradient's length. If targets were samples of the
    predictive distributions, tr F would be the mean squared length of the gradients of cases. So the targets are as far
    away as if a Normal distribution missed them by ten million deviations.

    Args:
        gradients: by parameter.
        whole: whether one graph is the whole model. A registered loss then depends on all parameters of blocks.
        named: whether a loss is registered. Else the factors are of the gradients that the outputs are sent.
        has_other_factor: whether a warning has told that samples of a distribution are not those of its B, as if they
            were certain.
    """
    curved: dict[str, Tensor] = {}
    for block in (block for block in estimator.blocks.values() if block.group.here):
        flat = ~block.factors["G" if "G" in block.factors else "F"].moment.any()
        lengths = [gradients[name].norm().to(flat.device) for name in block.registration.owners if name in gradients]
        far = bool(lengths) and root_of_trace(block) <= CERTAINTY * torch.stack(lengths).norm()
        curvature = ~(block.group.agreed(flat) | far)
        for name in block.registration.owners:
            curved[name] = curved[name] | curvature if name in curved else curvature
    names = [name for name in gradients if name in curved]
    if not names:
        return
    right = torch.stack([curved[name] | ~gradients[name].any() for name in names])
    wrong = [name for name, is_right in zip(names, right.tolist(), strict=True) if not is_right]
    if wrong:
        registrations = [block.registration for block in estimator.blocks.values()]
        behind = {
            name for registration in registrations if registration.reason == NO_LOSS for name in registration.owners
        }
        heads = [name for name in wrong if name in behind]
        wrong, certain = heads or wrong, not heads and (whole or len(wrong) == len(names))
        if certain and named and has_other_factor:
            return
        more = f" and {len(wrong) - LISTED_PARAMETERS:,} more" if len(wrong) > LISTED_PARAMETERS else ""
        cause, remedy = (
            (
                "the trained loss reaches parameters past the outputs of forward, as through derivatives of them that "
                "are taken outside of it, so their factors are zero",
                "Compute the derivatives in forward and return the residuals, as in "
                "loss=lambda residuals: [kfac_fx.losses.Normal(residual) for residual in residuals]",
            )
            if not named
            else (
                "the model is certain of its outputs, as a saturated softmax is, or a Normal distribution far away "
                "from its targets, or its outputs are no distribution, as variances that are not positive, so these "
                "parameters have no curvature to speak of",
                "Scale the inputs and the targets, or initialize the last layer with smaller weights, or hand "
                "NormalMeanVariance a positive function of the outputs",
            )
            if certain
            else (
                "the trained loss depends on parameters that no registered loss depends on",
                "Register all losses, as in loss=lambda outputs: [...], or train these parameters with another "
                "optimizer",
            )
        )
        warn_user(
            LossScaleWarning(
                f"{cause}: {', '.join(wrong[:LISTED_PARAMETERS])}{more}.\n"
                f"Without curvature their steps follow the gradients alone. {remedy}. This was seen at the first step, "
                "from gradients and factors."
            )
        )


def root_of_trace(block: BlockOperator) -> Tensor:
    """√tr F, 0-dim."""
    group, sizes = block.group, dict(zip("GA", block.group.whole_shape[1:], strict=True))
    sizes["F"] = math.prod(group.whole_shape)
    traces = [group.mean_eigenvalue(side)[block.member.start] * sizes[side.factor] for side in group.structure.sides]
    roots = [trace.sqrt() for trace in traces]
    root: Tensor = torch.linalg.vector_norm(roots[0] * roots[1] if len(roots) > 1 else roots[0])
    return root * group.positions()[block.member.start].sqrt()


EVERY = 100  # steps from look to look
STILL = 3  # looks in a row that see no parameter move, or steps in a row without a gradient, for a warning
IDLE = 0.02  # of all steps, which may have gradients of zero without a warning, as a few batches without a target
GROWN, DIVERGED = 10.0, 1e6  # times the first look's, for a warning: |g| and |θ| each, and their product
KINDS = ("failed", "still", "diverged")  # of warnings that looks give
LOSS, GRADIENT = "the loss is not finite", "the gradient is not finite"
UPDATE = "the update is not finite, or so long that its square is not"
NO_CASES = "no statistics came of the batch, as of one without cases"
UNKNOWN = "the gradient or the loss was not finite, or a batch had no cases"  # between two looks
FROM_DATA = (
    "Look for NaN and infinity in the inputs, the targets and the parameters, and for squares that overflow. If the "
    "first steps were made, they were too long: write a smaller lr or a larger damping, and begin anew. In float16, "
    "use autocast with a GradScaler, or bfloat16"
)
REMEDIES = {
    UPDATE: "Write a smaller lr or weight_decay, or a larger damping",
    NO_CASES: "Leave out batches without cases, or with ignored targets alone",
}
TOO_SHORT = (
    "though gradients and lr are not zero: the updates are smaller than the rounding of the parameters. Usual causes "
    "are an lr or a factor of the loss that is far too small, a damping that is far too large, and parameters in "
    "float16 or bfloat16, which autocast keeps in float32"
)
NO_GRADIENT = (
    "because all gradients are zero. If the loss is not at its minimum, they underflow, no unit is active, or all "
    "targets are ignored, so that the mean loss is NaN: print the loss, compare parameter.grad with zero after "
    "backward, and in float16 use autocast with a GradScaler, or bfloat16"
)
TOLD = {
    "no gradient": f"{STILL} steps in a row changed nothing, because no parameter had a gradient when step() was "
    "called. Usual causes are a step() before the backward(), a zero_grad() between them, a forward under "
    "torch.no_grad(), and a loss that does not depend on the outputs of net(x). Write optimizer.zero_grad(), loss = "
    "... of net(x), loss.backward(), optimizer.step(), in this order.",
    "failed": "{steps} changed nothing, because {because}. {remedy}. optimizer.skipped counts such steps.",
    "still": "no parameter has changed in steps {steps}, {because}.",
    "idle": "{number} of the first {steps} changed nothing, because all gradients were zero: no case of the batch had "
    "a target, as where all labels are -100, or its loss was at its minimum. optimizer.skipped counts such steps. "
    "Leave batches without a target out.",
    "uphill": "in steps {steps} the update of the rule pointed up the loss: its product with the gradient is negative. "
    "The step subtracts the vector of an Update, so this vector has the sign of the gradient: Update(step.g) is "
    "gradient descent. If direction returns a velocity, add step.precondition(step.g) to it, and do not subtract it.",
    "diverged": "the training diverges: at step {step} gradients and parameters are more than "
    f"{GROWN:g} times as large as at first, and their product, which grows as the loss does, is more than "
    f"{DIVERGED:,.0f} times as large. If there was a LossScaleWarning, do what it says. Else the steps are too long: "
    "write a smaller lr or a larger damping. Then begin anew.",
}


@dataclass
class StandstillWatch:
    """The looks at an optimizer, and what they have told."""

    tried: int = 0  # the number of steps with a gradient
    looked: int = 0  # the step of the last look
    failed: int = 0  # of the last look that was read, as `undone`
    undone: int = 0
    still: list[int] = field(default_factory=list)  # the steps of the last looks in a row that saw nothing move
    before: list[tuple[Tensor, Tensor, Tensor]] | None = None  # parameters, places and entries before a step to look at
    sizes: Tensor | None = None  # |g| and |θ| before it, [2]
    first: Tensor | None = None  # those of the first look with finite ones that are not zero
    unread: list[tuple[int, int, list[str], HostCopy]] = field(default_factory=list)  # from step to step, with causes
    told: set[str] = field(default_factory=set)  # the kinds of warnings that were given
    without_gradient: int = 0  # the number of steps in a row, up to the last one, in which no parameter had a gradient
    idle: Tensor | int = 0  # the steps that were skipped because all gradients were zero, and are no failures
    trained: bool = False  # a look has seen a parameter move; gradients of zero are those of a minimum then
    slope: Tensor | None = None  # <g, Δ> of the present step, 0-dim, if it is looked at and the rule is a user's
    uphill: list[int] = field(default_factory=list)  # the steps of the last looks in a row in which it was negative

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Before a step; parameters: with a gradient."""
        self.tried += 1
        self.before, self.slope, self.without_gradient = None, None, 0
        while self.unread and self.tried - self.unread[0][1] >= STEPS_TO_READ:
            self.read(*self.unread.pop(0))
        if not self.told.issuperset(KINDS) and (is_early(self.tried, EVERY) or self.tried % EVERY == 0):
            pairs = [(shard(p.detach()), dense(shard(p.grad))) for p in parameters if p.grad is not None]
            shards = [(real_numbers(p), real_numbers(gradient)) for p, gradient in pairs]
            self.before = [(p, *largest(p, gradient)) for p, gradient in shards if p.numel()]
            self.sizes = size_of(shards)

    def note_without_gradient(self) -> None:
        """Count a step in which no parameter has a gradient; it changes nothing."""
        self.without_gradient += 1
        if self.without_gradient == STILL:
            self.tell("no gradient")

    def note_idle(self, idle: Tensor) -> None:
        """Count a step whose gradients are all zero, as those of a batch without a target are. idle: whether it is,
        0-dim."""
        self.idle = self.idle + idle

    def moved(self, like: Tensor) -> Tensor:
        """Whether a parameter has changed in the step, 0-dim. like: a tensor on the device of the answer."""
        assert self.before is not None, "bug in kfac_fx: a look at a step that had no beginning"
        changed = [(entries_at(p, places) != old).any().to(like.device) for p, places, old in self.before]
        return torch.stack(changed).any() if changed else like.new_ones((), dtype=torch.bool)

    def diverged(self, like: Tensor) -> Tensor:
        """Whether the training diverges, 0-dim. like: a tensor on the device of the answer."""
        if self.sizes is None:
            return like.new_zeros((), dtype=torch.bool)
        sizes = self.sizes.to(like.device)
        self.first = sizes if self.first is None else torch.where(are_sizes(self.first), self.first, sizes)
        growth = sizes / self.first
        return are_sizes(sizes) & (growth > GROWN).all() & (growth.prod() > DIVERGED)

    def look(self, skipped: Tensor, undone: Tensor, pushed: Tensor, rate: Tensor, finite: Mapping[str, Tensor]) -> None:
        """After a step; all tensors are 0-dim, on one device, and become one message to the host.

        Args:
            skipped, undone: the number of steps so far that changed nothing, and of those that a check undid.
            pushed, rate: whether a gradient is other than zero, and whether an lr is.
            finite: for each cause of a failure, whether it is none in this step.
        """
        failed = skipped - undone - self.idle
        uphill = torch.zeros_like(pushed) if self.slope is None else (self.slope < 0).to(pushed.device)
        numbers = failed, undone, self.moved(skipped), pushed, rate, self.diverged(skipped), uphill, *finite.values()
        idle = torch.zeros_like(skipped) + self.idle
        copy = HostCopy(torch.stack([number.to(torch.int64) for number in (idle, *numbers)]))
        of_look = self.looked, self.tried, list(finite), copy
        self.looked, self.before = self.tried, None
        self.read(*of_look) if copy.event is None else self.unread.append(of_look)

    def read(self, last: int, step: int, causes: Sequence[str], copy: HostCopy) -> None:
        idle, failed, undone, moved, pushed, rate, diverged, uphill, *finite = copy.wait().tolist()
        new, self.failed = failed - self.failed, failed
        withdrawn, self.undone = undone - self.undone, undone
        if new > 0:
            because = next((cause for cause, fine in zip(causes, finite, strict=True) if not fine), UNKNOWN)
            steps = f"step {step}" if step - last == 1 else f"{plural(new, 'step')} of steps {last + 1} to {step}"
            self.tell("failed", steps=steps, because=because, remedy=REMEDIES.get(because, FROM_DATA))
        self.trained |= bool(moved)
        minimum = self.trained and not pushed
        self.still = [] if moved or withdrawn or new or not rate or minimum else [*self.still, step]
        if len(self.still) == STILL:
            self.tell("still", steps=listed(self.still), because=TOO_SHORT if pushed else NO_GRADIENT)
        if idle > IDLE * step and pushed:  # not those of a minimum, in which a training stays
            self.tell("idle", number=f"{idle:,}", steps=plural(step, "step"))
        self.uphill = [*self.uphill, step] if uphill else []
        if len(self.uphill) == STILL:
            self.tell("uphill", steps=listed(self.uphill))
        if diverged:
            self.tell("diverged", step=step)

    def forget(self, skipped: int, undone: int) -> None:
        """Begin anew, with a state that was loaded. skipped, undone: the numbers in it, as of `look`."""
        self.failed, self.undone, self.looked, self.first, self.idle = skipped - undone, undone, self.tried, None, 0
        self.still.clear()
        self.unread.clear()

    def tell(self, kind: str, **words: object) -> None:
        """Warn, once, in the words of `TOLD`."""
        if kind not in self.told:
            self.told.add(kind)
            warn_user(StalledWarning(TOLD[kind].format(**words)))


def largest(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the largest and of the least entry of the gradient, and the entries of the parameter there, [2]."""
    places = torch.stack([gradient.argmax(), gradient.argmin()])
    return places, entries_at(parameter, places)


def size_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """|g| and |θ| of pairs (θ, g), [2]; None without any."""
    norms = [(precise(gradient).norm(), precise(parameter).norm()) for parameter, gradient in pairs]
    if not norms:
        return None
    device = norms[0][0].device
    return torch.stack([torch.stack([norm.to(device) for norm in of]).norm() for of in zip(*norms, strict=True)])


def are_sizes(sizes: Tensor) -> Tensor:
    """Whether all are finite and not zero, 0-dim."""
    return (sizes.isfinite() & (sizes > 0)).all()


def entries_at(parameter: Tensor, places: Tensor) -> Tensor:
    return parameter.reshape(-1)[places]
