"""The losses of torch that are negative log-likelihoods: one table, which all who recognize a loss read.

    logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y

`DISTRIBUTIONS` in `kfac_fx/losses/distributions.py` has the class of each distribution. To add a loss of torch, write
its row here, and the class of its distribution there, if it is a new one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TorchLoss:
    """A loss of torch and the distribution behind it.

    Attributes:
        function: the function; its first two arguments are the inputs and the targets.
        module: the module that calls it.
        distribution: the name of the distribution, as in `compile(..., loss="categorical")`.
        short: the name of this loss with its reduction, as in `compile(..., loss="mse")`; so is `name`.
        aten: the name of ATen's operation, before `normalize`.
        synonyms: names that users try in place of `short`, in small letters and without "loss" at their end.
        outside: arguments that change the loss and do not belong to the distribution, which stays the Fisher's.
        by_default: arguments with another value than the default of which it is the loss of another distribution. Such
            a loss is not found.
        classes_second: the inputs have the classes on dimension 1, and not on the last.
        averages_elements: the reduction "mean" also averages over the elements of a case.
    """

    function: Callable[..., Tensor]
    module: type[nn.Module]
    distribution: str
    short: str
    aten: str
    synonyms: tuple[str, ...] = ()
    outside: tuple[str, ...] = ("weight",)
    by_default: tuple[str, ...] = ()
    classes_second: bool = False
    averages_elements: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments, in the order in which `normalize` writes them."""
        return tuple(inspect.signature(self.function).parameters)

    def changed(self, arguments: Iterable[str], values: Mapping[str, Any]) -> list[str]:
        """Those of the arguments that have another value than the default. values: by argument; others have it."""
        parameters = inspect.signature(self.function).parameters
        given = [argument for argument in arguments if argument in values]
        # Not `!=`, which compares the elements of a tensor.
        return [name for name in given if not same_default(values[name], parameters[name].default)]


def same_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


TORCH_LOSSES = (
    TorchLoss(
        F.cross_entropy,
        nn.CrossEntropyLoss,
        "categorical",
        "cross_entropy",
        "cross_entropy_loss",
        synonyms=("ce",),
        outside=("weight", "label_smoothing"),
        classes_second=True,
        averages_elements=False,
    ),
    TorchLoss(F.mse_loss, nn.MSELoss, "normal", "mse", "mse_loss", synonyms=("l2", "squared_error")),
    TorchLoss(
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
        "multi_bernoulli",
        "bce_with_logits",
        "binary_cross_entropy_with_logits",
        synonyms=("bce",),
        outside=("weight", "pos_weight"),
    ),
    TorchLoss(
        F.poisson_nll_loss,
        nn.PoissonNLLLoss,
        "poisson",
        "poisson_nll",
        "poisson_nll_loss",
        outside=("full",),
        by_default=("log_input",),
    ),
)
BY_NAME: Mapping[str, TorchLoss] = {loss.name: loss for loss in TORCH_LOSSES}
SHORT: Mapping[str, TorchLoss] = {name: loss for loss in TORCH_LOSSES for name in (loss.short, loss.name)}
EVERY_NAME = {name for loss in TORCH_LOSSES for name in (loss.name, loss.aten)}
