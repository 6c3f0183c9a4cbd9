"""From a step's gradients to moved parameters and, on the steps where it is due, to an adapted damping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.distributed import Replicas
from kfac_fx.estimator import FisherEstimator
from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.optim.curvature import JacobianProducts, fisher_inner_products
from kfac_fx.optim.micro_batches import Call
from kfac_fx.optim.momentum import MomentumRule, Preconditioner
from kfac_fx.optim.options import Options
from kfac_fx.optim.parameter_groups import CompiledNet
from kfac_fx.optim.quadratic import inner
from kfac_fx.optim.update import (
    Proposal,
    Work,
    advance,
    advance_first_order,
    is_finite,
    predict_by_blocks,
    predict_exactly,
    propose,
    propose_first_order,
    propose_quadratic,
)
from kfac_fx.recording.backends import compiled_function

SCALARS = ("rho", "predicted_change", "qmodel_learning_rate", "qmodel_momentum", "loss_before")


class Updater:
    """Moves parameters; see KFAC for the rules, `Work` for what goes in.

    damping: λ, adapted in place. rho, predicted_change, qmodel_learning_rate, qmodel_momentum, loss_before: of the last
    step that computed them; NaN before. replicas: the processes that take the same step.
    """

    def __init__(self, net: CompiledNet, options: Options, estimator: FisherEstimator, damping: Tensor) -> None:
        self.net, self.options, self.estimator, self.damping = net, options, estimator, damping
        self.rho, self.predicted_change, self.qmodel_learning_rate, self.qmodel_momentum, self.loss_before = (
            torch.full_like(damping, torch.nan) for _ in SCALARS
        )
        self.replicas = estimator.replicas or Replicas()
        self.multiply_jacobian = JacobianProducts()
        self.rule = MomentumRule(options.momentum_type, options.norm_constraint)
        self.advance = compiled_function(advance, net.backend)
        self.advance_first_order = compiled_function(advance_first_order, net.backend)
        self.multiply_inverse = compiled_function(estimator.multiply_inverse, net.backend)

    def fallbacks(self) -> list[str]:
        """What is done in a slower way than it should be, and why."""
        if self.multiply_jacobian.reason is None:
            return []
        return [
            "the exact quadratic model runs in reverse mode twice, a multiple of the time and memory of forward mode: "
            f"{self.multiply_jacobian.reason}"
        ]

    def update_inverses(self) -> None:
        self.set_estimator_damping()
        self.estimator.update_inverses()

    def set_estimator_damping(self) -> None:
        self.estimator.damping.copy_(self.damping * self.options.precon_damping_mult)

    def update(
        self, work: Work | None, absent: Tensors, first_order: Work | None, calls: Sequence[Call], ok: Tensor
    ) -> Tensor:
        """A step that nobody measures; returns whether it was made.

        absent: zeros for parameters in the estimator without a gradient. calls: the step's forwards, for "qmodel".
        """
        if work is not None and self.options.quadratic:
            proposal = self.propose(work, absent, calls)
            ok = ok & is_finite(proposal.move)
            work.commit(proposal, ok)
        elif work is not None:
            precondition = Preconditioner(self.estimator.multiply_inverse, work.flat, absent)
            ok = self.advance(self.rule, work, precondition, ok)
        if first_order is not None:
            self.advance_first_order(self.options.first_order, first_order, ok)
        return ok

    def measured_update(
        self,
        work: Work | None,
        absent: Tensors,
        first_order: Work | None,
        calls: Sequence[Call],
        ok: Tensor,
        before: Tensor,
        ask: Callable[[], Tensor] | None,
    ) -> Tensor:
        """The same step, with the damping adapted to what came of it: now, or later by `adapt` if `ask` is None.

        before, ask(): the loss before and after, averaged over processes.
        """
        made = [] if work is None else [(work, self.propose(work, absent, calls))]
        change = self.predict(*made[0], absent, calls) if made else torch.zeros_like(before)
        if first_order is not None:
            proposal = propose_first_order(self.options.first_order, first_order)
            made.append((first_order, proposal))
            change = change + inner(first_order.g, proposal.move)  # no Fisher block: only the slope is known
        for _, proposal in made:
            ok = ok & is_finite(proposal.move)
        for one, proposal in made:
            one.commit(proposal, ok)
        self.predicted_change.copy_(change)
        self.loss_before.copy_(torch.where(ok, before, torch.nan))
        if ask is not None:
            self.adapt(ask())
        return ok

    def adapt(self, after: Tensor) -> None:
        """The damping, from the loss after the last measured update; it stays where that was not made."""
        damping, rho = self.options.damping_rule(self.damping, self.loss_before, after, self.predicted_change)
        self.damping.copy_(torch.where(self.loss_before.isfinite(), damping, self.damping))
        self.rho.copy_(rho)

    def propose(self, work: Work, absent: Tensors, calls: Sequence[Call]) -> Proposal:
        precondition = Preconditioner(self.multiply_inverse, work.flat, absent)
        if not self.options.quadratic:
            return propose(self.rule, work, precondition)
        momentum = self.options.momentum if self.options.momentum_type == "qmodel_fixedmu" else None
        products = self.flat_products(calls, work.flat)
        proposal, model, s = propose_quadratic(work, precondition, products, self.damping, momentum)
        self.qmodel_learning_rate.copy_(-s[0])
        self.qmodel_momentum.copy_(s[1])
        if one_scale(work):
            self.predicted_change.copy_(model.change(work.lr * s, self.options.damping_rule.l2_reg))
        return proposal

    def predict(self, work: Work, proposal: Proposal, absent: Tensors, calls: Sequence[Call]) -> Tensor:
        """The change of the loss that the quadratic model predicts for the proposed move.

        Without the part of the damping that is no curvature; with weight decay, clipping and all that a group adds.
        """
        l2_reg = self.options.damping_rule.l2_reg
        if not self.options.quadratic:
            self.set_estimator_damping()
            multiply = Preconditioner(self.estimator.multiply, work.flat, absent)
            return predict_by_blocks(work, proposal.move, multiply, self.estimator.damping - l2_reg)
        if one_scale(work):
            return self.predicted_change.clone()
        return predict_exactly(work, proposal.move, self.flat_products(calls, work.flat), l2_reg)

    def flat_products(self, calls: Sequence[Call], flat: Flat) -> Callable[[Sequence[Tensor]], Tensor]:
        """`products` of vectors over all parameters."""
        products = self.products(calls)
        return lambda vectors: products([flat.parts(vector) for vector in vectors])

    def products(self, calls: Sequence[Call]) -> Callable[[Sequence[Tensors]], Tensor]:
        """Inner products in the exact Fisher of all micro-batches, averaged by cases."""
        if not calls:
            raise RuntimeError(
                f"momentum_type={self.options.momentum_type!r} computes with the step's batch, and net(x) was not "
                "called in training mode with gradients enabled since the last step"
            )

        def of(vectors: Sequence[Tensors]) -> Tensor:
            total, cases = torch.zeros_like(self.damping), 0
            parameters = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
            for args, kwargs in calls:
                found: list[tuple[float, LossFunction]] = []

                def losses(at: Tensors, call: Any = (args, kwargs), found: Any = found) -> Any:
                    found[:] = self.net.losses(*self.net.functional(at, *call), call=call)
                    return found

                products = fisher_inner_products(
                    losses,
                    parameters,
                    vectors,
                    ggn=self.options.estimation_mode.endswith("GGN"),
                    multiply_jacobian=self.multiply_jacobian,
                )
                total, cases = total + found[0][1].cases * products, cases + found[0][1].cases
            return self.replicas.mean(total / max(1, cases))

        return of


def one_scale(work: Work) -> bool:
    """Is the move a multiple of the update? True with one parameter group and no weight decay."""
    return work.weight_decay is None and work.lr.dim() == 0
