"""The register functions of a `LayerCollection` for predictive distributions, and the losses on a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from kfac_fx.collection.collection import BaseCollection
from kfac_fx.collection.find_use import listed
from kfac_fx.collection.registry import AUTO_REUSE, VARIABLE_SCOPE, resolved
from kfac_fx.losses.distributions import Categorical, MultiBernoulli, Normal, check_variance
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.losses.registered_losses import RegisteredLoss, RegisteredLosses, evaluated
from kfac_fx.passes.errors import LossError, RegistrationError, ReuseError
from kfac_fx.passes.graphs.labels import ancestors
from kfac_fx.passes.ir import Program
from kfac_fx.passes.losses import case_size
from kfac_fx.recording.recorder import Recorder

Reuse = bool | str | None
Node = fx.Node | str
Targets = Tensor | Node | None


class LossRegistrations(BaseCollection):
    """Distributions are registered on the nodes that are their parameters. The first dimension counts cases.

    Arguments of all: seed (of samples, for debugging), targets (a tensor, or a node if the model gets them as an input;
    None if nothing needs them), name, coeff (multiplies the loss and the Fisher), and reuse: True adds a tower to the
    loss of this name. Raises ReuseError, a KeyError, if there is none, or if there is one and reuse is False.
    """

    _losses: list[RegisteredLoss]

    def register_categorical_predictive_distribution(
        self,
        logits: Node,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        base = "categorical_predictive_distribution"
        return self.register_loss_function(Categorical, logits, base, name, coeff, seed, targets, reuse)

    def register_softmax_cross_entropy_loss(
        self,
        logits: Node,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        base = "sparse_softmax_cross_entropy_loss"
        return self.register_loss_function(Categorical, logits, base, name, coeff, seed, targets, reuse)

    def register_normal_predictive_distribution(
        self,
        mean: Node,
        var: float = 0.5,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        """var=0.5: the loss is |target - mean|²; var=1.0: half of it."""
        base = "normal_predictive_distribution"
        return self.register_loss_function(of_variance(var), mean, base, name, coeff, seed, targets, reuse)

    def register_squared_error_loss(
        self,
        prediction: Node,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        base = "squared_error_loss"
        return self.register_loss_function(of_variance(0.5), prediction, base, name, coeff, seed, targets, reuse)

    def register_multi_bernoulli_predictive_distribution(
        self,
        logits: Node,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        base = "multi_bernoulli_predictive_distribution"
        return self.register_loss_function(MultiBernoulli, logits, base, name, coeff, seed, targets, reuse)

    def register_sigmoid_cross_entropy_loss(
        self,
        logits: Node,
        seed: int | None = None,
        targets: Targets = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        base = "sigmoid_cross_entropy_loss"
        return self.register_loss_function(MultiBernoulli, logits, base, name, coeff, seed, targets, reuse)

    def register_loss_function(
        self,
        loss: Callable[..., LossFunction],
        inputs: Node | Sequence[Node],
        base_name: str,
        name: str | None = None,
        coeff: float = 1.0,
        seed: int | None = None,
        targets: Targets = None,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> RegisteredLoss:
        """Any loss: a class of `kfac_fx.losses`, or a function from the values of `inputs` to one.

        Raises, besides, RegistrationError if reuse is True and there is no name or there is a seed, or if the
        coefficient is not positive or not that of the first tower.
        """
        self.check_open()
        reuse = resolved(reuse)
        known = self.registered_losses.by_name
        if reuse is True and name is None:
            raise RegistrationError("reuse=True adds a tower to a loss: say to which one with name=")
        if reuse is True and seed is not None:
            raise RegistrationError("reuse=True: a tower has the seed of its loss, give none")
        if not coeff > 0:
            raise RegistrationError(f"coeff={coeff} must be positive")
        name = name or unique(base_name, known)
        if reuse is True and name not in known:
            raise ReuseError(f"reuse=True, but no loss {name!r} was registered")
        if reuse is False and name in known:
            raise ReuseError(f"a loss {name!r} is registered already; reuse=True adds a tower")
        if (reuse is True or reuse == AUTO_REUSE) and name in known:
            first = known[name][0]
            if coeff != first.coeff:
                raise RegistrationError(f"loss {name!r} has coeff={first.coeff}, its new tower {coeff}")
            seed = first.seed
        nodes = tuple(self.node(one) for one in listed(inputs))
        kind = loss.__name__ if isinstance(loss, type) else base_name
        target = targets if targets is None or isinstance(targets, Tensor) else self.node(targets)
        made = RegisteredLoss(name, kind, nodes, loss, target, float(coeff), seed)
        self._losses.append(made)
        return made

    # --- what is registered -----------------------------------------------------------------------------------------

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


def of_variance(var: float) -> Callable[[Tensor], LossFunction]:
    """Raises LossError for what is no variance."""
    check_variance(var)
    return lambda mean: Normal(mean, var)


def unique(base: str, taken: Any) -> str:
    names = (base, *(f"{base}_{number}" for number in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)
