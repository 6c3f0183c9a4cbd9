"""The losses of a `LayerCollection`: their registration on nodes of the graph, and their values on a batch.

Towers of one loss have one name. They are summed as the cases of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor, fx

from kfac_fx.layer_collection.find_use import Collection, listed
from kfac_fx.layer_collection.names import AUTO_REUSE, VARIABLE_SCOPE, Reuse, resolved
from kfac_fx.losses.distributions import Normal, check_variance
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.losses.registered import RegisteredLoss, evaluated, likelihood
from kfac_fx.passes.errors import LossError, RegistrationError, ReuseError
from kfac_fx.passes.graphs.sizes import in_example
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_losses import BY_DISTRIBUTION
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.recorder import Recorder

Node = fx.Node | str
Targets = Tensor | Node | None


def register_loss_function(
    self: Collection,
    loss: Callable[..., LossFunction],
    inputs: Node | Sequence[Node],
    base_name: str,
    name: str | None = None,
    coeff: float = 1.0,
    seed: int | None = None,
    targets: Targets = None,
    reuse: Reuse = VARIABLE_SCOPE,
) -> RegisteredLoss:
    """Register any loss.

    Args:
        loss: a class of `kfac_fx.losses`, or a function from the values of `inputs` to one.
        inputs: the nodes that the loss is a function of. Their first dimension counts cases.
        base_name: the name if there is no `name`, with a number if it is taken.
        name: the name of the loss, under which it gets more towers.
        coeff: multiplies the loss and its Fisher.
        seed: of sampled targets; None: torch's own generator.
        targets: a tensor, or a node if the model has them as an input; None if nothing needs them.
        reuse: True adds a tower to the loss of this name, False registers a new loss, AUTO_REUSE either.

    Raises ReuseError if `reuse` is True and there is no loss of this name, or False and there is one; RegistrationError
    if it is True without a name or with a seed, and if the coefficient is not positive or not that of the first tower.
    """
    reuse, by_name = resolved(reuse), self.registered_losses.by_name
    if reuse is True and name is None:
        raise RegistrationError("reuse=True adds a tower to a loss: say to which one with name=")
    if reuse is True and seed is not None:
        raise RegistrationError("reuse=True: a tower has the seed of its loss, give none")
    if not coeff > 0:
        raise RegistrationError(f"coeff={coeff} must be positive")
    name = name or unique(base_name, by_name)
    if reuse is True and name not in by_name:
        raise ReuseError(f"reuse=True, but no loss {name!r} was registered")
    if reuse is False and name in by_name:
        raise ReuseError(f"a loss {name!r} is registered already; reuse=True adds a tower")
    if (reuse is True or reuse == AUTO_REUSE) and name in by_name:
        first = by_name[name][0]
        if coeff != first.coeff:
            raise RegistrationError(f"loss {name!r} has coeff={first.coeff}, its new tower {coeff}")
        seed = first.seed
    nodes = tuple(self.node(node) for node in listed(inputs))
    kind = loss.__name__ if isinstance(loss, type) else base_name
    target = targets if targets is None or isinstance(targets, Tensor) else self.node(targets)
    return self.file_loss(RegisteredLoss(name, kind, nodes, loss, target, float(coeff), seed))


def register_distribution(
    collection: Collection,
    *,
    distribution: type[LossFunction],
    base_name: str,
    name: str | None,
    coeff: float,
    seed: int | None,
    targets: Targets,
    reuse: Reuse,
    var: float = 0.5,
    logits: Node = "",
    mean: Node = "",
    prediction: Node = "",
) -> RegisteredLoss:
    """The one node has the name of the parameter that it is of the distribution."""
    check_variance(var)
    loss = (lambda mean: Normal(mean, var)) if distribution is Normal else distribution
    node = next((node for node in (logits, mean) if node != ""), prediction)
    return register_loss_function(collection, loss, node, base_name, name, coeff, seed, targets, reuse)


def unique(base: str, taken: dict[str, Any]) -> str:
    names = (base, *(f"{base}_{number}" for number in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)


def loss_of_site(site: LossSite) -> RegisteredLoss:
    """A loss that forward computes; a mean over elements shows in the coefficient, where the graph knows the sizes."""
    value = site.inputs.meta.get("val")
    mean = site.kind != "categorical" and site.reduction == "mean" and value is not None
    coefficient = 1.0 / prod(in_example(size) for size in value.shape[1:]) if mean and value is not None else 1.0

    def make(inputs: Tensor) -> LossFunction:
        return likelihood(BY_DISTRIBUTION[site.kind], site.reduction, inputs)[1]

    return RegisteredLoss(site.node.name, site.kind, (site.inputs,), make, site.targets, coefficient, None)


# --- on a batch -----------------------------------------------------------------------------------------------------


def eval_losses(
    self: Collection,
    *inputs: Any,
    targets: Any = None,
    target_mode: str = "data",
    coeff_mode: str = "regular",
    **kwargs: Any,
) -> list[Tensor]:
    """The value of every tower of every loss, a 0-d tensor summed over its cases. Parameters get gradients from it.

    Args:
        inputs, kwargs: the arguments of forward; none: the captured example.
        targets: a tuple with one entry per tower; None: those registered.
        target_mode: "data" or "sample", which draws targets from the predictive distributions.
        coeff_mode: "regular" multiplies by the coefficients, "sqrt" by their roots, "off" by 1.

    Raises LossError without losses or without inputs, TargetsMissing, ValueError for another mode.
    """
    self.create_subgraph()
    captured = self.captured
    args = captured.args if not inputs and not kwargs else inputs
    if args is None and not captured.kwargs:
        raise LossError("the model was captured without an example, so that a batch must be given: lc.total_loss(x)")
    emitted = EmittedGraph(captured.capture, self.bare_program, captured.model)
    recorder = Recorder(emitted, self.registered_losses)
    values = captured.capture.flatten(args or (), kwargs or captured.kwargs)
    _, fisher = recorder.outputs(recorder.live_parameters(), values)
    if target_mode == "data" and targets is None:
        targets = recorder.losses.targets_in_graph(values)
    return evaluated(self.registered_losses.on(fisher, targets), target_mode, coeff_mode)


def eval_losses_on_samples(self: Collection, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> list[Tensor]:
    """As `eval_losses`, with targets drawn from the predictive distributions."""
    return eval_losses(self, *inputs, target_mode="sample", coeff_mode=coeff_mode, **kwargs)


def total_loss(
    self: Collection, *inputs: Any, targets: Any = None, coeff_mode: str = "regular", **kwargs: Any
) -> Tensor:
    """The sum of `eval_losses`, a 0-d tensor."""
    values = eval_losses(self, *inputs, targets=targets, coeff_mode=coeff_mode, **kwargs)
    return sum(values[1:], values[0])


def total_sampled_loss(self: Collection, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
    """The sum of `eval_losses_on_samples`, a 0-d tensor."""
    values = eval_losses_on_samples(self, *inputs, coeff_mode=coeff_mode, **kwargs)
    return sum(values[1:], values[0])
