"""The losses on the outputs of one run: of which distributions, over how many cases, without what is padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from kfac_fx.losses import LossFunction
from kfac_fx.losses.loss_spec import NAMES, LossSpec
from kfac_fx.losses.registered_losses import RegisteredLosses, WeightedLosses, cases_by_loss
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.graphs import pytree
from kfac_fx.recording.emitted import Emitted
from kfac_fx.recording.masks import real_losses


class OutputLosses(Emitted):
    """An emitted module that knows the losses behind what it returns."""

    @property
    def has_loss(self) -> bool:
        """Whether it is known what the Fisher is of."""
        return bool(self.loss or self.program.losses)

    def losses(self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None) -> WeightedLosses:
        """(coefficient, loss) for each output distribution.

        Args:
            output: what the model returned; the user's loss is built on it.
            fisher: the Fisher's outputs; a loss that the graph computes is built on them.
        """
        if isinstance(self.loss, RegisteredLosses):
            return self.loss.on(fisher, targets)
        if self.loss is None and not self.program.losses:
            raise LossError(
                "no loss is known: the Fisher is that of an output distribution.\n"
                'Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli" or a function of the '
                "model's outputs, or let forward compute cross_entropy, mse_loss or binary_cross_entropy_with_logits."
            )
        if self.loss is not None:
            return self.loss(output, targets)
        given = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        sites = zip(self.program.losses, fisher, given, strict=True)
        return [graph_loss(site.kind, site.reduction, inputs, target) for site, inputs, target in sites]

    def cases_by_loss(self, losses: WeightedLosses) -> list[int]:
        return cases_by_loss(losses, self.loss.names if isinstance(self.loss, RegisteredLosses) else None)

    def cases(self, losses: WeightedLosses) -> int:
        """Of a batch: how many terms the mean of the loss has; of several losses, the first."""
        return self.cases_by_loss(losses)[0]

    def summed(self, losses: WeightedLosses) -> WeightedLosses:
        """With coefficients that make the sum over cases `cases` times the mean loss, where every loss is a mean over
        its own cases: losses of as many cases keep theirs."""
        each = self.cases_by_loss(losses)
        return [(c if n == each[0] else c * each[0] / n, loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """With coefficients for means over the cases of every tower: a tower weighs as much as it has cases."""
        each = self.cases_by_loss(losses)
        return [(c if n == loss.cases else c * loss.cases / n, loss) for (c, loss), n in zip(losses, each, strict=True)]

    def tower_cases(self, fisher: tuple[Tensor, ...]) -> list[int]:
        """The first dimension of every tower's outputs; one entry if towers were not registered."""
        if not isinstance(self.loss, RegisteredLosses):
            return [0]
        found = zip(self.loss.names, self.loss.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in found if name == self.loss.names[0]]

    def losses_of_constants(
        self, output: Any, fisher: tuple[Tensor, ...], values: tuple[Any, ...], mode: str, targets: Any
    ) -> tuple[list[Tensor], WeightedLosses]:
        """The Fisher's outputs as leaves of a graph of their own, and the losses made of those."""
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in fisher]
        if mode == "empirical" and targets is None and not isinstance(self.loss, LossSpec):
            targets = self.graph_targets(values)
        return leaves, self.real_losses(
            lambda given: self.losses(self.rebuilt(output, fisher, given), tuple(given), targets), leaves, values
        )

    def real_losses(
        self, build: Callable[[Sequence[Tensor]], WeightedLosses], fisher: Sequence[Tensor], values: tuple[Any, ...]
    ) -> WeightedLosses:
        """The losses that `build` makes of the Fisher's outputs, without what is padding for these inputs."""
        if self.program.mask is None:
            return build(fisher)
        mask = evaluated(self.program.mask, dict(zip(self.placeholders, values, strict=True)))
        return real_losses(build, fisher, self.program.mask_dims, mask)

    def rebuilt(self, output: Any, fisher: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """What the model returned, with the Fisher's outputs replaced by `leaves`."""
        return self.capture.unflatten(replaced(output, fisher, leaves))

    def graph_targets(self, values: tuple[Any, ...]) -> list[Any]:
        """The targets that forward hands to the losses it computes, which must be inputs of the model."""
        known = dict(zip(self.placeholders, values, strict=True))
        sites = self.loss.losses if isinstance(self.loss, RegisteredLosses) else self.program.losses
        return [evaluated(s.targets, known) if isinstance(s.targets, fx.Node) else s.targets for s in sites]


def replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    by_id = {id(before): after for before, after in zip(old, new, strict=True)}
    return pytree.mapped(lambda value: by_id.get(id(value), value), tree)


def graph_loss(kind: str, reduction: str, inputs: Tensor, targets: Any) -> tuple[float, LossFunction]:
    """The distribution behind a loss that forward computes, and its weight in the mean over cases."""
    if kind == "categorical" and inputs.dim() > 2:
        inputs = inputs.movedim(1, -1)  # F.cross_entropy has the classes second
    loss = NAMES[kind](inputs, targets=targets)
    if kind == "categorical" or reduction != "mean":
        return 1.0, loss
    return loss.cases / inputs.numel(), loss  # F.mse_loss and the like also average over a case's elements


def evaluated(node: Any, known: dict[Any, Any]) -> Any:
    """The value of a node that depends on inputs only through operations without parameters."""
    if node in known:
        return known[node]
    args = fx.map_arg(node.args, lambda n: evaluated(n, known))
    kwargs = fx.map_arg(node.kwargs, lambda n: evaluated(n, known))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.op != "call_function":
        raise LossError(f"the targets of the loss at {node.name} are computed from parameters; pass `targets`")
    return node.target(*args, **kwargs)
