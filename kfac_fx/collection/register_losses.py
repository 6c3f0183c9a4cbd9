"""The register functions of a `LayerCollection` for predictive distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from kfac_fx.collection.collected_losses import CollectedLosses
from kfac_fx.collection.find_use import listed
from kfac_fx.collection.registry import AUTO_REUSE, VARIABLE_SCOPE, Reuse, resolved
from kfac_fx.losses.distributions import Categorical, MultiBernoulli, Normal, check_variance
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.losses.registered import RegisteredLoss
from kfac_fx.passes.errors import RegistrationError, ReuseError

Node = fx.Node | str
Targets = Tensor | Node | None


class LossRegistrations(CollectedLosses):
    """Distributions are registered on the nodes that are their parameters. The first dimension counts cases.

    Arguments of all: seed (of samples, for debugging), targets (a tensor, or a node if the model gets them as an input;
    None if nothing needs them), name, coeff (multiplies the loss and the Fisher), and reuse: True adds a tower to the
    loss of this name. Raises ReuseError, a KeyError, if there is none, or if there is one and reuse is False.
    """

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


def of_variance(var: float) -> Callable[[Tensor], LossFunction]:
    """Raises LossError for what is no variance."""
    check_variance(var)
    return lambda mean: Normal(mean, var)


def unique(base: str, taken: Any) -> str:
    names = (base, *(f"{base}_{number}" for number in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)
