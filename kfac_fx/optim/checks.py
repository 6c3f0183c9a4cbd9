"""Checks: now and then a step is measured on its own batch, and steps that made its loss rise are undone.

A *check*, every so many steps and before that after 0, 1, 2, 5, 10, 20, 50, ... steps, computes on the step's batch,
with its exact Fisher F and its loss h (`kfac_fx.optim.batch_loss`):

    r, by which steps are divided until the next check
    θ <- θ at the last check    if h has risen by more than is tolerated since then, on the present batch: r grows, and
                                the rule forgets its averaged gradient
    θ <- θ before the step      if h has risen by more than is tolerated in the step

The rule says what r is, and which rise in a step is tolerated. All decisions are made on the device. All state is in
`StepSize` and in the optimizer's state by parameter.

<d, F d> comes from the outputs at the parameters and a small part of the step away, which takes one forward. The
product with the Jacobian costs four. Rules that divide by <d, F d> take the product, and all rules take it where a
quotient is no measure of the batch (`against_quotients`). All forwards of a check compute in the precision of the
parameters (`kfac_fx.optim.batch_loss`). On an accelerator they take a part of the batch (`kfac_fx.optim.batch_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import HostCopy, all_true, copy_if_
from kfac_fx.linalg.processes import in_place_of
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.batch_loss import COARSE, SHARE, BatchLoss, Values, part_of_batch, share_of_checks
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.passes.errors import is_constant_derivative, source_line, warn_user, where
from kfac_fx.passes.graphs.labels import gradient_stop
from kfac_fx.passes.graphs.operations import OWN_BACKWARD, op_name
from kfac_fx.passes.torch_private import versions

RISE = 0.5
RISE_AGAIN = 9.0  # without noise between batches, momentum makes the loss rise threefold and fall again
LEAST_RISE = 1e-3  # of the loss, below which a rise may be one of rounding
SAME = 1e-5  # of itself, by which h of the same batch may differ, for rounding
SHORT, SHORT_STEPS, MOST_UNDONE = 10.0, 20, 3  # of r; in steps; in checks
Tolerance = Callable[[Tensor, Tensor], Tensor]  # from 0-dim tensors to one
STEPS_TO_READ = 5  # from a check to the step in which the host reads it, at least
MOST_SHORTENED = 1e30  # of r, which doubles with every step that is undone, and must come down again
ROUNDED = 1e-3  # of the largest number, by which numbers may differ that were changed and changed back
SAMPLED = 16  # parameters, whose numbers tell whether others than steps have moved them
LEAST_ROUNDING = torch.finfo(torch.float64).eps


@dataclass
class StepSize:
    """The step size between checks, 0-dim tensors that are written in place."""

    ratio: Tensor  # r, by which steps are shortened; 0 before the first check
    norm: Tensor  # a norm of the step of the last check; infinity before
    value: Tensor  # h before the step of the last check; infinity before, and where h was no number
    weight: Tensor  # the sum of the weights of the averaged gradients
    calm: Tensor  # whether the last check found the step far below its bound; a bool
    same: Tensor  # whether the batch of the last check was that of the check before it; a bool
    near: Tensor  # whether the step of the last check was near its bound; a bool

    @staticmethod
    def first(scalar: Tensor) -> StepSize:
        """scalar: a zero."""
        infinity, no = torch.full_like(scalar, torch.inf), scalar.bool()
        return StepSize(scalar.clone(), infinity, infinity.clone(), scalar.clone(), no, no.clone(), no.clone())

    @property
    def divisor(self) -> Tensor:
        """r, and 1 before the first check."""
        return torch.where(self.ratio > 0, self.ratio, 1.0)

    def store(self, ok: Tensor, **scalars: Tensor) -> None:
        """Overwrite these scalars where `ok` is true."""
        for name, value in scalars.items():
            old = getattr(self, name)
            old.copy_(torch.where(ok, value, old))


@dataclass
class Check:
    """A check of one step: the loss of its batch, and its values at the parameters before the step."""

    batch: BatchLoss
    parameters: Tensors  # of the whole model
    before: list[Values]  # up to rounding
    value: Tensor  # of the loss there
    steps: int  # since the last check
    quotient_step: float | Tensor | None = None  # of a difference quotient; None: a product with the Jacobian instead
    rise: Tensor | None = None  # of the loss of this batch since the last check; None at the first
    last: list[Values] | None = None  # at the parameters of the last check; None at the first, and where not asked
    same: bool = False  # whether the host knows that the batch is that of the last check
    probed: Probe | None = None  # of `along`, by a difference quotient
    exact: bool | None = None  # whether its step may be exact; None: no rule has asked

    @staticmethod
    def of(batch: BatchLoss, parameters: Tensors, steps: int, by_quotient: bool = False) -> Check:
        """by_quotient: whether to take a difference quotient instead of a product with the Jacobian."""
        rounding, batch = batch.rounding, replace(batch, differentiated=not by_quotient)
        as_returned = rounding <= COARSE and batch.as_returned and batch.net.repeats_recordings
        returned = batch.returned(parameters) if as_returned else None
        # Both sides of a difference are the same function: of the same weights, under the same noise.
        same = returned is not None and batch.repeats(parameters)
        before = returned if returned is not None and same else batch.at(parameters)
        step = max(rounding, LEAST_ROUNDING) ** (1 / 3) if by_quotient else None
        return Check(batch, parameters, before, batch.value(before if returned is None else returned), steps, step)

    @cached_property
    def norm(self) -> Tensor:
        """That of the outputs at the parameters before the step, 0-dim; see `BatchLoss.norm`."""
        return self.batch.norm(self.before)

    @property
    def is_fitted(self) -> Tensor:
        """Whether the outputs are the targets up to rounding, 0-dim: any step may make such a loss rise."""
        return self.value <= (max(self.batch.rounding, LEAST_ROUNDING) * self.norm) ** 2

    def values_at(self, there: Tensors) -> list[Values]:
        """The values at other parameters, or other shards of them, by name."""
        places = {name: in_place_of(self.parameters[name], tensor) for name, tensor in there.items()}
        return self.batch.at({**self.parameters, **places})

    def along(self, flat: FlatParameters, move: Tensor) -> tuple[Tensor, Tensor, list[Values]]:
        """(<δ, F δ> of a move, the change of the loss by its slope, the values before it).

        Outputs change by a small part of themselves in a step, so a difference quotient with the cube root of the
        rounding errors loses less to these than to the curvature. The probe is as long at every lr.
        """
        if self.quotient_step is None:
            return self.batch.along(self.parameters, flat.everywhere(move))
        step = self.quotient_step / flat.largest_lr.clamp(min=torch.finfo(move.dtype).tiny)
        self.probed = Probe.along(self, flat, move, step)
        return (*self.batch.between(self.before, self.probed.values, step), self.before)

    def inner_products(self, flat: FlatParameters, moves: Sequence[Tensor]) -> Tensor:
        """<δ_i, F δ_j> of moves [P] about as long as a step, [k, k]. That of `along` takes no further forward."""
        if self.quotient_step is None:
            return self.batch.inner_products(self.parameters, [flat.everywhere(move) for move in moves])
        step = torch.as_tensor(self.quotient_step).to(moves[0])
        probes = [
            self.probed if self.probed is not None and self.probed.move is move else Probe.along(self, flat, move, step)
            for move in moves
        ]
        return self.batch.products_between(self.before, [(probe.values, probe.step) for probe in probes])


@dataclass(frozen=True)
class Probe:
    """The values after a small part of a move, for difference quotients."""

    move: Tensor  # δ, [P]
    step: Tensor  # this part, 0-dim
    values: list[Values]

    @staticmethod
    def along(check: Check, flat: FlatParameters, move: Tensor, step: Tensor) -> Probe:
        parts = flat.everywhere(move * step).items()  # in the widest precision of all parameters
        there = {name: (flat.copies[name] + part).to(flat.copies[name].dtype) for name, part in parts}
        return Probe(move, step, check.values_at(there))


class StalledWarning(UserWarning):
    """A training leads nowhere: checks shorten all steps or undo them, or steps cannot be made, have no gradients,
    change no parameter, or diverge."""


@dataclass
class Watch:
    """Warns once of a training that checks hold where it is.

    The host reads a check some steps later, so that it hardly waits.
    """

    unread: list[tuple[int, HostCopy]] = field(default_factory=list)  # the step of a check, its divisor, what it undid
    undone: int = 0  # checks in a row that undid a step
    short_since: int | None = None  # the step of the first check in a row that shortened steps by much
    warned: bool = False

    def look(self, divisor: Tensor, undone: Tensor, step: int) -> None:
        """After the check of a step; tensors are 0-dim.

        divisor: of the rule's steps. undone: whether the check undid this step or those before it.
        """
        self.unread.append((step, HostCopy(torch.stack([divisor, undone.to(divisor.dtype)]))))
        while not self.warned and step - self.unread[0][0] >= STEPS_TO_READ:
            self.read(*self.unread.pop(0))
        if self.warned:
            self.unread.clear()

    def read(self, step: int, copy: HostCopy) -> None:
        divided_by, undone = copy.wait().tolist()
        since = step if self.short_since is None else self.short_since
        self.short_since = since if divided_by > SHORT else None
        self.undone = self.undone + 1 if undone else 0
        if self.undone >= MOST_UNDONE:
            self.tell(f"checks undid steps {self.undone} times in a row, up to step {step}")
        elif self.short_since is not None and step - self.short_since >= SHORT_STEPS:
            self.tell(f"steps are shorter than a tenth of their length from step {self.short_since} on, up to {step}")

    def tell(self, happened: str) -> None:
        self.warned = True
        warn_user(
            StalledWarning(
                f"{happened}: the loss of a step's batch rises along the step, or the predictions move too far in it. "
                "Usual causes are gradients that are not those of the registered loss, such as those of another batch "
                "or other weights than the forward had, a registered loss that is another multiple of the trained one, "
                "such as a sum over elements whose mean is trained, outputs that differ in a second forward pass, and "
                "an lr that is too large. Compare the gradients of net(x) and of the loss that you train, give the "
                "losses of loss= the weights that they have in training, leave out what changes weights between "
                "forward and step, or write a smaller lr; print(net.report) names what the checks could not see. If "
                "the loss goes on falling, the steps have become short enough, and nothing is wrong. If it stands "
                "still and a batch has few cases, the bound of the steps is too narrow: above all with batch "
                "normalization a step moves the predictions of its own batch much further than those of others. Take "
                "more cases, or write norm_constraint=10 for the default rule."
            )
        )


@dataclass
class Place:
    """Where a step has left the parameters, as far as some numbers of some parameters tell.

    Others write into parameters, too, as `load_state_dict` and `nn.init` do. A loss that rises then is no fault of the
    steps. SAM and averaged weights write into all of them and take it back, up to rounding.

    Attributes:
        views: of the sampled numbers, by the parameter.
        values: these numbers behind the step; None before the first.
        versions: of all parameters, by name.
    """

    views: dict[str, Tensor] = field(default_factory=dict)
    values: Tensor | None = None
    versions: dict[str, int] = field(default_factory=dict)

    def sample(self, parameters: Tensors) -> Tensor:
        """The present numbers. The views are made again where the memory of parameters is another one."""
        views = self.views
        if not views or any(
            name not in parameters or parameters[name].data_ptr() != view.data_ptr() for name, view in views.items()
        ):
            first = next(iter(parameters.values()))
            there = [n for n, p in parameters.items() if p.numel() and p.is_contiguous() and p.device == first.device]
            names = dict.fromkeys([*there[:: max(1, len(there) // SAMPLED)], *there[-2:]])
            self.views = views = {name: some_numbers(parameters[name]) for name in names}
        return torch.cat([*views.values()]) if views else torch.zeros(0)

    def note(self, parameters: Tensors) -> None:
        """parameters: by name, as this process has them."""
        self.versions = dict(zip(parameters, versions(parameters.values()), strict=True))
        self.values = self.sample(parameters)

    def left(self, parameters: Tensors) -> Tensor | None:
        """Whether the parameters are at another place now, 0-dim; None if nobody has written into them.

        If none of the written parameters is sampled, they are: what writes into all of them and takes it back writes
        into the sampled ones, too. On a CPU the numbers also tell of writes into `parameter.data`, which change no
        version.
        """
        there = self.values
        if there is None or parameters.keys() != self.versions.keys():
            return None
        now_written = zip(parameters, versions(parameters.values()), strict=True)
        written = [name for name, times in now_written if times != self.versions[name]]
        if not written and there.device.type != "cpu":
            return None
        now = self.sample(parameters)
        if now.shape != there.shape:  # the memory of parameters is another one
            return torch.ones((), dtype=torch.bool, device=there.device)
        if written and self.views.keys().isdisjoint(written):
            return torch.ones((), dtype=torch.bool, device=there.device)
        if not written and torch.equal(now, there):
            return None
        return ((now - there).abs() > ROUNDED * there.abs().max()).any()


@dataclass
class Newcomers:
    """Looks for parameters that begin to move after the first step.

    A rule finds the length of its steps for the parameters that move, and this length may be many times that of a first
    step. So it begins anew where others begin to move.

    Attributes:
        moved_at: the step in which a parameter moved last, by name; those of `present` still move.
        present: the names of the parameters that moved in the last step; None before the first.
        rested: those that were frozen or had an lr of zero since they moved last.
    """

    moved_at: dict[str, int] = field(default_factory=dict)
    present: frozenset[str] | None = None
    rested: set[str] = field(default_factory=set)

    def look(self, moving: frozenset[str], resting: Callable[[], Iterable[str]], step: int, long_ago: int) -> bool:
        """At a step. Returns whether parameters begin to move.

        Args:
            moving: the names of the parameters that move in it.
            resting: the names of those that are frozen, or have an lr of zero.
            step: its number.
            long_ago: a step; parameters that have rested since then begin anew. Shorter rests, as of networks that take
                turns, do not count.
        """
        if moving == self.present:
            return False
        new = set[str]()
        if self.present is not None:
            self.moved_at.update(dict.fromkeys(self.present, step - 1))
            self.rested.update(resting())
            new = {n for n in moving if n not in self.moved_at or (n in self.rested and self.moved_at[n] < long_ago)}
        self.rested -= moving
        self.present = moving
        return bool(new)

    def numbers(self, names: Iterable[str], step: int) -> Tensor:
        """For a checkpoint before a step, [parameters, 2]: 1 + the step in which each parameter moved last, and 0 for
        one that never has; and whether it has rested since."""
        moved_at = {**self.moved_at, **dict.fromkeys(self.present or (), step - 1)}
        return torch.tensor([(1 + moved_at.get(name, -1), name in self.rested) for name in names]).view(-1, 2)

    @staticmethod
    def of(numbers: Tensor, names: Iterable[str], step: int) -> Newcomers:
        """The inverse of `numbers`."""
        by_name = dict(zip(names, numbers.tolist(), strict=True))
        present = frozenset(name for name, (moved, _) in by_name.items() if moved == step) if step else None
        moved_at = {name: moved - 1 for name, (moved, _) in by_name.items() if moved}
        return Newcomers(moved_at, present, {name for name, (_, rested) in by_name.items() if rested})


def some_numbers(parameter: Tensor) -> Tensor:
    """At most five numbers of a contiguous parameter, a view from the first one on."""
    return parameter.detach().view(-1)[:: max(1, parameter.numel() // 4)]


@dataclass
class Checks:
    """The checks of an optimizer: what they keep from one to the next, and why they are not as they should be."""

    size: StepSize
    place: Place = field(default_factory=Place)
    newcomers: Newcomers = field(default_factory=Newcomers)
    watch: Watch = field(default_factory=Watch)
    unobserved: bool = False  # a check did not know the gradient of the outputs
    by_product: str | None = None  # why the last check took a product with the Jacobian
    share: float = 1.0  # the part of the examples that the last check took
    by_whole_batch: str | None = None  # why it took all of them, on an accelerator

    def new(self, batch: BatchLoss, parameters: Tensors, steps: int, by_quotients: bool) -> Check:
        """The check of a step. steps: since the last check. by_quotients: of the rule."""
        self.unobserved = self.unobserved or not batch.observed
        if by_quotients:
            kinds = (parameter.device.type for parameter in parameters.values())
            share = share_of_checks(kinds, batch.replicas.number)
            batch, self.by_whole_batch = part_of_batch(batch, share, parameters)
            self.share = batch.share
            self.by_product = against_quotients(batch)
        return Check.of(batch, parameters, steps, by_quotients and self.by_product is None)

    def fallbacks(self) -> list[str]:
        """For the report: each part of a check that was not done as it should be, and why."""
        reasons = []
        if self.unobserved:
            reasons.append(
                "the checks of the step size take the loss as linear in the parameters beside its curvature, and undo "
                "no steps: no backward was seen to reach the Fisher's outputs, or a loss that forward returns"
            )
        if self.by_product is not None:
            reasons.append(
                "the checks of the step size take a product with the Jacobian, which costs four forwards "
                f"instead of one: {self.by_product}"
            )
        if self.by_whole_batch is not None:
            reasons.append(
                f"the checks of the step size take whole batches and not {Fraction(SHARE)} of their examples, "
                f"which costs time on an accelerator: {self.by_whole_batch}"
            )
        return reasons


def against_quotients(batch: BatchLoss) -> str | None:
    """Why a difference quotient is no measure of this batch; None if it is one.

    In a coarse precision a small part of a step is lost in the rounding of the parameters. Autocast around the user's
    forward and TF32 do not count, because the forwards of a check run without them. Where the outputs jump, as behind
    the choice of an expert or in quantized networks, a few jumps in a small part of a step look like a steep slope.
    """
    if batch.rounding > COARSE:
        return f"parameters and products are rounded by up to {batch.rounding:.0e} of themselves"
    if any(not forward.recorder.whole for forward in batch.forwards):
        return "no single graph holds the model, and what Python does between its graphs may jump"
    stops = (gradient_stop(forward.recorder.program) for forward in batch.forwards)
    stop = next((node for node in stops if node is not None), None)
    if stop is None:
        return None
    if is_constant_derivative(stop):
        line = source_line(stop)
        return f"the derivative at {line} has no create_graph=True, so no gradient passes it"
    if op_name(stop) == OWN_BACKWARD:
        return (
            f"{where(stop)} is an autograd.Function, which may jump where parameters change; if its backward is the "
            "derivative of its forward, kfac_fx.plain_backward(ItsClass) says so"
        )
    return f"{where(stop)} has no gradient, so it may jump where parameters change"


# --- steps that made the loss rise ------------------------------------------------------------------------------------


def tolerated(value: Tensor, same: Tensor | None = None) -> Tensor:
    """The rise of a loss of this value that is left alone.

    same: 0-dim, whether noise between batches is no part of the rise; None counts as true.
    """
    of_same = torch.minimum(RISE * value.abs().clamp(min=1.0), RISE_AGAIN * value.abs())
    return of_same if same is None else torch.where(same, of_same, RISE * value.abs())


def has_risen(
    size: StepSize, last: Tensors, check: Check, rise_tolerated: Tolerance, finite: Tensor, known: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Whether the loss has risen from its value at `last`, the parameters of the last check by name, and whether the
    batch is the same as there; 0-dim.

    Args:
        rise_tolerated: from the loss there, and whether the batch is the same: the rise that is left alone.
        finite: whether the gradient is.
        known: the rise, 0-dim, where the batch is known to be the same, which saves a forward.
    """
    if known is not None:
        check.rise, same = known, torch.ones_like(known, dtype=torch.bool)
        return known > rise_tolerated(check.value - known, same), same
    check.last = there = check.values_at(last)
    check.rise = rise = -check.batch.change(check.before, there)
    was = check.value - rise
    # Where the batch or the user's loss is not finite, going back is no remedy.
    lost = ~check.batch.finite(check.before) | (finite & ~rise.isfinite())
    same = (was + check.batch.drift(check.before, there) - size.value).abs() <= SAME * was.abs()
    return (rise > rise_tolerated(was, same)) | (lost & check.batch.finite(there)), same


def begin_here(place: Place, flat: FlatParameters) -> None:
    """Take the present parameters for those of the last check, if they have left the place of the last step: what has
    moved them was no step, so the next check does not undo it."""
    if (left := place.left(flat.copies)) is not None:
        copy_if_(left, flat.state["checkpoint"], flat.flat.joined(flat.parameters).to(flat.state["checkpoint"].dtype))


def revert(
    size: StepSize,
    flat: FlatParameters,
    check: Check,
    rise_tolerated: Tolerance,
    finite: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    """Go back to the last check if the loss has risen since. Returns whether that happened, 0-dim.

    rise_tolerated, finite, known: as of `has_risen`.
    """
    last = {n: part.to(flat.copies[n].dtype) for n, part in flat.everywhere(flat.state["checkpoint"]).items()}
    risen, same = has_risen(size, last, check, rise_tolerated, finite, known)
    size.same.copy_(same)
    go_back(flat, last, risen)
    size.ratio.mul_(torch.where(risen, 2.0, 1.0)).clamp_(max=MOST_SHORTENED)
    return risen


def go_back(flat: FlatParameters, there: Tensors, where: Tensor) -> None:
    """Return to other parameters, by name, where `where` is true."""
    if all_true(~where):  # as behind most checks
        return
    for name, copy in flat.copies.items():
        copy_if_(where, copy, there[name])


def take(
    flat: FlatParameters,
    move: Tensor,
    state: Tensors,
    check: Check,
    before: list[Values],
    linear: Tensor,
    rise: Tensor,
    ok: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Commit a move and the new state where `ok` is true, and go back where the loss rises by more than `rise`.

    before: at the parameters before the step. linear: the change by the slope, for a batch that does not know it.
    Returns (whether the move was kept, the change of the loss, its drift), 0-dim; see `BatchLoss.drift`.
    """
    flat.state["checkpoint"].copy_(torch.where(ok, flat.flat.joined(flat.parameters), flat.state["checkpoint"]))
    here = {name: copy.clone() for name, copy in flat.copies.items()}
    flat.commit(move, state, ok)
    after = check.values_at(flat.copies)
    change, drift = check.batch.change(before, after), check.batch.drift(before, after)
    change = change if check.batch.observed else change + linear
    kept = ok & ~(change > rise) & change.isfinite()
    go_back(flat, here, ok & ~kept)
    return kept, change, drift
