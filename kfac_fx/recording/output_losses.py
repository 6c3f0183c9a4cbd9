"""The losses on the outputs of one run: of which distributions, over how many cases, and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import is_differentiable
from kfac_fx.losses import Categorical, LossFunction
from kfac_fx.losses.distributions import IGNORE_INDEX
from kfac_fx.losses.registered import LossSpec, RegisteredLosses, WeightedLosses, cases_by_loss, likelihood
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_losses import BY_DISTRIBUTION, BY_NAME
from kfac_fx.passes.torch_private import class_of, pytree
from kfac_fx.recording.emitted import EmittedModel, ObservedLoss
from kfac_fx.recording.masks import perturbed, real_losses


@dataclass(frozen=True)
class OutputLosses:
    """The losses whose Fisher is recorded.

    Attributes:
        emitted: the model that computes the outputs.
        declared: the user's losses, on the model's outputs or on nodes of the graph; None: those that forward computes.
    """

    emitted: EmittedModel
    declared: LossSpec | RegisteredLosses | None

    @property
    def are_known(self) -> bool:
        return bool(self.declared or self.emitted.loss_sites)

    def on(
        self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None, kept: Sequence[Tensor | None] = ()
    ) -> WeightedLosses:
        """(coefficient, loss) of each output distribution.

        Args:
            output: what the model returned; a `LossSpec` is applied to it.
            fisher: the Fisher's outputs; registered losses, and losses that forward computes, are applied to these.
            targets: one a loss, in a list or tuple, or one for all; None: there are none.
            kept: see `kept`.

        Raises LossError if no loss is known.
        """
        dims = self.emitted.case_dims
        if isinstance(self.declared, RegisteredLosses):
            pairs, nodes = self.declared.on(fisher, targets), 0
            for registered, (_, loss) in zip(self.declared.losses, pairs, strict=True):
                loss.with_cases_at(dims[nodes] if dims else 0)
                nodes += len(registered.inputs)
            return without_ignored(pairs)
        if self.declared is not None:
            if not fisher and not self.emitted.whole:
                name = class_of(self.emitted.model).__name__
                raise LossError(f"{name} returns no tensor in tuples, lists and dictionaries to build a loss on")
            pairs = self.declared(output, targets, next(iter(dims), 0))
            for number, (_, loss) in enumerate(pairs if dims and not self.declared.places_cases else ()):
                loss.with_cases_at(self.axis_of_cases(number, loss, output, fisher))
            return without_ignored(pairs)
        sites = self.emitted.loss_sites
        if not sites:
            *others, last = BY_NAME
            raise LossError(
                "no loss is known: the Fisher is that of an output distribution.\n"
                'Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli" or a function of the '
                f"model's outputs, or let forward compute {', '.join(others)} or {last}."
            )
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        each = zip(sites, fisher, by_site, dims or [0] * len(sites), kept or [None] * len(sites), strict=True)
        return [
            likelihood(BY_DISTRIBUTION[site.kind], site.reduction, inputs, target, dim, its_kept)
            for site, inputs, target, dim, its_kept in each
        ]

    def misfits(self, output: Any, fisher: tuple[Tensor, ...], values: Any) -> list[str]:
        """Sentences about declared losses with rows that the padding mask does not tell apart.

        Raises LossError, or the error of the user's function, for losses that do not fit the outputs of a run.
        """
        if not isinstance(self.declared, LossSpec):
            return []
        losses = self.on(self.rebuilt(output, (), ()), fisher)
        padding = self.emitted.padding(values, fisher)
        if padding is None or any(dims is not None for dims in padding[1]):
            return []
        return [
            f"padding may count as cases of the {type(loss).__name__} loss, whose rows are not the cases and positions "
            "of padding_mask: return outputs [cases, positions, ...] of all positions, in their order. Nothing is "
            "wrong if these rows are never padding, or have targets of -100 there"
            for _, loss in losses
            if loss.all_cases > len(padding[0])
        ]

    def axis_of_cases(self, number: int, loss: LossFunction, output: Any, fisher: Sequence[Tensor]) -> int:
        """The axis of the cases in the inputs of a declared loss, where they are not the first in all outputs.

        It is that of the output that the inputs are; or, of inputs that are computed from outputs, the one along which
        only the first place changes if the first case does.

        Raises LossError if there is none.
        """
        assert isinstance(self.declared, LossSpec), "bug in kfac_fx: the cases of a loss that is not declared"
        placed = list(zip(fisher, self.emitted.case_dims, strict=True))
        for value, dim in placed:
            if loss.inputs is value:
                return dim
        with torch.no_grad():
            changed = [value.clone() for value, _ in placed]
            for value, (_, dim) in zip(changed, placed, strict=True):
                value.select(dim, 0).copy_(perturbed(value.select(dim, 0)))
            other = self.declared(replaced(output, fisher, changed))[number][1]
            differs = (
                (loss.inputs != other.inputs).movedim(-1, 0).any(0)
                if loss.inputs.ndim > 1
                else loss.inputs != other.inputs
            )
            axes = [axis for axis in range(differs.ndim) if not differs.movedim(axis, 0)[1:].any()]
        if len(axes) == 1 or (axes and differs.shape[axes[0]] > 1):
            return axes[0]
        raise LossError(
            f"{self.declared.name} gives a {type(loss).__name__} of inputs {list(loss.inputs.shape)}, and no axis of "
            "it has one place for every case. The cases of the model are on another dimension than the first "
            "(net.report): keep them apart, as in loss=lambda outputs: "
            f"kfac_fx.losses.{type(loss).__name__}(outputs.movedim(1, 0))."
        )

    # --- cases ------------------------------------------------------------------------------------------------------

    @property
    def ignoring(self) -> bool:
        """Whether forward computes losses that ignore some targets."""
        return self.declared is None and any(site.ignored is not None for site in self.emitted.loss_sites)

    def kept(self, values: Any, targets: Any = None) -> list[Tensor | None]:
        """A mask of the targets that are not ignored, for every loss that forward computes; None: all, or not known.

        targets: as of `on`; None: those that forward hands to its losses.
        """
        if not self.ignoring:
            return []
        sites = self.emitted.loss_sites
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(sites)
        return [self.not_ignored(site, values, target) for site, target in zip(sites, by_site, strict=True)]

    def not_ignored(self, site: LossSite | ObservedLoss, values: Any, target: Any) -> Tensor | None:
        if site.ignored is None:
            return None
        try:
            target = self.emitted.target_values(site.targets, values) if target is None else target
        except LossError:
            return None
        if not isinstance(target, Tensor) or target.is_floating_point():  # probabilities of classes
            return None
        kept: Tensor = target != self.emitted.target_values(site.ignored, values)
        return kept

    def cases_by_loss(self, losses: WeightedLosses) -> list[int | Tensor]:
        return cases_by_loss(losses, self.declared.names if isinstance(self.declared, RegisteredLosses) else None)

    def cases(self, losses: WeightedLosses) -> int | Tensor:
        """The number of terms in the mean of the first loss, which is the number of cases of the batch."""
        return self.cases_by_loss(losses)[0]

    def summed(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients with which the sum over cases is `cases` times the mean loss, where every loss is a mean over
        its own cases. Losses of equally many cases keep theirs."""
        each = self.cases_by_loss(losses)
        return [(c * share(each[0], n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients of means over the cases of all towers: a tower has the weight of its cases."""
        if not isinstance(self.declared, RegisteredLosses):
            return losses
        each = self.cases_by_loss(losses)
        return [(c * share(loss.cases, n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def tower_cases(self, fisher: tuple[Tensor, ...]) -> list[int]:
        """The first dimension of every tower's outputs; one entry if no towers were registered."""
        if not isinstance(self.declared, RegisteredLosses):
            return [0]
        losses = zip(self.declared.names, self.declared.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in losses if name == self.declared.names[0]]

    # --- on one batch -----------------------------------------------------------------------------------------------

    def real(
        self, rebuilt: Callable[[Sequence[Tensor]], Any], fisher: Sequence[Tensor], values: Any, targets: Any = None
    ) -> WeightedLosses:
        """The losses without padding and without ignored targets.

        Args:
            rebuilt: from values of the Fisher's outputs to what the model returns.
            values: the model's inputs, which tell what is padding.
        """

        kept = self.kept(values, targets)

        def build(outputs: Sequence[Tensor]) -> WeightedLosses:
            return self.on(rebuilt(outputs), tuple(outputs), targets, kept)

        padding = self.emitted.padding(values, fisher)
        if padding is None:
            return build(fisher)
        mask, dims = padding
        return real_losses(build, fisher, dims, mask)

    def rebuilt(self, output: Any, fisher: Sequence[Tensor], replacements: Sequence[Tensor]) -> Any:
        """The model's result with other tensors for the Fisher's outputs. output: flat, as a run returns it."""
        return self.emitted.capture.unflatten(replaced(output, fisher, replacements))

    def of_constants(
        self, output: Any, fisher: tuple[Tensor, ...], values: Any, mode: str, targets: Any
    ) -> tuple[list[Tensor], WeightedLosses]:
        """The Fisher's outputs as leaves of a graph of their own, and the losses on these."""
        leaves = [value.detach().requires_grad_(is_differentiable(value)) for value in fisher]
        if mode == "empirical" and targets is None and not isinstance(self.declared, LossSpec):
            targets = self.targets_in_graph(values)
        return leaves, self.real(lambda outputs: self.rebuilt(output, fisher, outputs), leaves, values, targets)

    def targets_in_graph(self, values: Any) -> list[Any]:
        """The targets of registered losses, or of those that forward computes. Raises LossError unless they are
        computed from inputs alone."""
        declared = self.declared
        sites = declared.losses if isinstance(declared, RegisteredLosses) else self.emitted.loss_sites
        return [self.emitted.target_values(site.targets, values) for site in sites]


def without_ignored(pairs: WeightedLosses) -> WeightedLosses:
    """The losses, of which targets of -100 are no cases, as in the means of `F.cross_entropy`."""
    for _, loss in pairs:
        targets = loss.targets
        if not isinstance(loss, Categorical) or not isinstance(targets, Tensor) or targets.is_floating_point():
            continue
        if targets.shape == loss.inputs.shape[:-1] and targets.device == loss.inputs.device:  # else `evaluate` raises
            loss.keeping(targets.ne(IGNORE_INDEX))
    return pairs


def replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    """A tree with `new` tensors for `old` ones."""
    by_id = {id(before): after for before, after in zip(old, new, strict=True)}
    return pytree.tree_map(lambda value: by_id.get(id(value), value), tree)


def share(cases: int | Tensor, of: int | Tensor) -> Any:
    """cases / of; exactly 1 for one number of cases, without a look at what only the device knows."""
    return 1.0 if cases is of or (isinstance(cases, int) and cases == of) else cases / of
