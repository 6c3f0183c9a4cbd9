"""The losses of a `LayerCollection`: what is registered of them, the graph behind them, and their values on a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from kfac_fx.collection.collection import BaseCollection
from kfac_fx.losses.registered import RegisteredLoss, RegisteredLosses, evaluated
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.graphs.labels import ancestors
from kfac_fx.passes.ir import Program
from kfac_fx.passes.losses import case_size
from kfac_fx.recording.recorder import Recorder


class CollectedLosses(BaseCollection):
    """Towers of one loss have one name, and are summed as the cases of one batch."""

    _losses: list[RegisteredLoss]

    @property
    def registered_losses(self) -> RegisteredLosses:
        return RegisteredLosses(tuple(self._losses))

    @property
    def losses(self) -> tuple[RegisteredLoss, ...]:
        """All towers of all losses; the loss to be minimized is their sum."""
        return tuple(self._losses)

    @property
    def towers_by_loss(self) -> tuple[tuple[RegisteredLoss, ...], ...]:
        return tuple(self.registered_losses.by_name.values())

    @property
    def loss_coeffs(self) -> dict[RegisteredLoss, float]:
        return {one: one.coeff for one in self._losses}

    @property
    def loss_colocation_ops(self) -> dict[RegisteredLoss, tuple[fx.Node, ...]]:
        """The nodes that a loss is a function of."""
        return {one: one.inputs for one in self._losses}

    def create_subgraph(self) -> frozenset[fx.Node]:
        """The nodes behind the inputs of the losses. Raises LossError if there are none."""
        if not self._losses:
            raise LossError("Must have at least one registered loss: the Fisher is that of an output distribution")
        return frozenset(ancestors(self.registered_losses.nodes))

    @property
    def subgraph(self) -> frozenset[fx.Node]:
        return self.create_subgraph()

    # --- on a batch -------------------------------------------------------------------------------------------------

    @property
    def bare_program(self) -> Program:
        """The graph with the outputs of the losses, and no registrations."""
        outputs = self.registered_losses.nodes
        return self.captured.program.but(outputs=outputs, cases=case_size(self.graph, outputs))

    def scope(self, *names: str) -> Program:
        whole = super().scope(*names)
        return self.bare_program.but(options=whole.options) if self._losses else whole

    def eval_losses(
        self,
        *inputs: Any,
        targets: Any = None,
        target_mode: str = "data",
        coeff_mode: str = "regular",
        **kwargs: Any,
    ) -> list[Tensor]:
        """Every tower of every loss, differentiable, summed over its cases, on a batch or the captured example.

        Args:
            targets: one a tower, in a tuple; None: those registered.
            target_mode: "data" or "sample". coeff_mode: "regular", "sqrt" or "off".

        Raises LossError without losses or without inputs, TargetsMissing, ValueError for another mode.
        """
        self.create_subgraph()
        captured = self.captured
        given = captured.args if not inputs and not kwargs else inputs
        if given is None and not captured.kwargs:
            raise LossError(
                "the model was captured without an example, so that a batch must be given: lc.total_loss(x)"
            )
        recorder = Recorder(captured.capture, self.bare_program, captured.model, self.registered_losses, {})
        values = captured.capture.flatten(given or (), kwargs or captured.kwargs)
        _, fisher = recorder.outputs(recorder.live_parameters(), values)
        if target_mode == "data" and targets is None:
            targets = recorder.graph_targets(values)
        return evaluated(self.registered_losses.on(fisher, targets), target_mode, coeff_mode)

    def eval_losses_on_samples(self, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> list[Tensor]:
        """As `eval_losses`, with targets drawn from the predictive distributions."""
        return self.eval_losses(*inputs, target_mode="sample", coeff_mode=coeff_mode, **kwargs)

    def total_loss(self, *inputs: Any, targets: Any = None, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
        found = self.eval_losses(*inputs, targets=targets, coeff_mode=coeff_mode, **kwargs)
        return sum(found[1:], found[0])

    def total_sampled_loss(self, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
        found = self.eval_losses_on_samples(*inputs, coeff_mode=coeff_mode, **kwargs)
        return sum(found[1:], found[0])
