"""The losses on the outputs of one run: of which distributions, over how many cases, and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import is_differentiable
from kfac_fx.losses.declared import (
    DeclaredLosses,
    FoundLoss,
    LossesInForward,
    LossSpec,
    RegisteredLosses,
    WeightedLosses,
    perturbed,
    replaced,
)
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.ir import Dims
from kfac_fx.passes.padding import spread
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.emitted import EmittedModel


@dataclass(frozen=True)
class OutputLosses:
    """The losses whose Fisher is recorded.

    Attributes:
        emitted: the model that computes the outputs.
        given: the user's losses, on the model's outputs or on nodes of the graph; None: those that forward computes.
    """

    emitted: EmittedModel
    given: LossSpec | RegisteredLosses | None

    @property
    def declared(self) -> DeclaredLosses:
        return LossesInForward(self.emitted.loss_sites) if self.given is None else self.given

    @property
    def are_known(self) -> bool:
        return self.given is not None or bool(self.emitted.loss_sites)

    def on(
        self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None, kept: Sequence[Tensor | None] = ()
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
        return declared.of_run(output, fisher, self.emitted.case_dims, targets, kept)

    def misfits(self, output: Any, fisher: tuple[Tensor, ...], values: Any) -> list[str]:
        """Sentences about declared losses with rows that the padding mask does not tell apart.

        Raises LossError, or the error of the user's function, for losses that do not fit the outputs of a run.
        """
        if not self.declared.of_outputs:
            return []
        losses = self.on(self.rebuilt(output, (), ()), fisher)
        padding = self.emitted.padding(values, fisher)
        if padding is None or any(dims is not None for dims in padding[1]):
            return []
        return [
            f"padding may count as cases of the {type(loss).__name__} loss, whose rows are not the cases and positions "
            "of padding_mask: return outputs [cases, positions, ...] of all positions, in their order. Nothing is "
            "wrong if these rows are never padding"
            + ("" if loss.ignored is None else f", or have targets of {loss.ignored} there")
            for _, loss in losses
            if loss.all_cases > len(padding[0])
        ]

    # --- cases ------------------------------------------------------------------------------------------------------

    @property
    def ignoring(self) -> bool:
        """Whether forward computes losses that ignore some targets."""
        return self.declared.ignoring

    def kept(self, values: Any, targets: Any = None) -> list[Tensor | None]:
        """A mask of the targets that are not ignored, for every loss that forward computes; None: all, or not known.

        targets: as of `on`; None: those that forward hands to its losses.
        """
        if not self.ignoring:
            return []
        sites = self.emitted.loss_sites
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(sites)
        return [self.not_ignored(site, values, target) for site, target in zip(sites, by_site, strict=True)]

    def not_ignored(self, site: FoundLoss, values: Any, target: Any) -> Tensor | None:
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

    def cases(self, losses: WeightedLosses) -> int | Tensor:
        """The number of terms in the mean of the first loss, which is the number of cases of the batch."""
        return self.declared.cases_by_loss(losses)[0]

    def summed(self, losses: WeightedLosses) -> tuple[int | Tensor, WeightedLosses]:
        """(`cases`, the losses with the coefficients of the sum over cases, which is `cases` times the mean loss).

        Every loss is a mean over its own cases. Losses of as many cases as the first keep their coefficients.
        """
        each = self.declared.cases_by_loss(losses)
        return each[0], [(c * share(each[0], n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients of means over the cases of all towers: a tower has the weight of its cases."""
        each = self.declared.cases_by_loss(losses)
        return [(c * share(loss.cases, n), loss) for (c, loss), n in zip(losses, each, strict=True)]

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
        if mode == "empirical" and targets is None and not self.declared.of_outputs:
            targets = self.targets_in_graph(values)
        return leaves, self.real(lambda outputs: self.rebuilt(output, fisher, outputs), leaves, values, targets)

    def targets_in_graph(self, values: Any) -> list[Any]:
        """The targets of registered losses, or of those that forward computes. Raises LossError unless they are
        computed from inputs alone."""
        return [self.emitted.target_values(site.targets, values) for site in self.declared.sites]


def share(cases: int | Tensor, of: int | Tensor) -> Any:
    """cases / of; exactly 1 for one number of cases, without a look at what only the device knows."""
    return 1.0 if cases is of or (isinstance(cases, int) and cases == of) else cases / of


def real_losses(
    build: Callable[[Sequence[Tensor]], WeightedLosses],
    outputs: Sequence[Tensor],
    dims: Sequence[Dims | None],
    mask: Tensor,
) -> WeightedLosses:
    """The losses without padding, which is a constant of them and no case.

    build: from values of the Fisher's outputs to the losses.
    dims: the dimensions of every output along which the mask goes; None: all of it is real.
    """
    real = [None if d is None else spread(mask != 0, d, output.shape) for output, d in zip(outputs, dims, strict=True)]
    pairs = list(zip(outputs, real, strict=True))
    losses = build([output if r is None else torch.where(r, output, output.detach()) for output, r in pairs])
    with torch.no_grad():  # a case is real if it changes with the real values, whatever the losses make of these
        changed = build([perturbed(o) if r is None else torch.where(r, perturbed(o), o) for o, r in pairs])
    for (_, loss), (_, other) in zip(losses, changed, strict=True):
        differs = loss.inputs != other.inputs
        real_cases = differs.reshape(*differs.shape[: loss.case_axes], -1).any(-1)
        loss.real_cases = int((real_cases if loss.kept is None else real_cases & loss.kept).sum())
    return losses
