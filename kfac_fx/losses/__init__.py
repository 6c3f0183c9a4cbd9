"""Loss functions: predictive distributions, their registration, and the gradients that are sent back from them."""

from kfac_fx.losses.distributions import (
    Categorical,
    LossFunction,
    MultiBernoulli,
    Normal,
    NormalMeanVariance,
    OnehotCategorical,
)

__all__ = ["Categorical", "LossFunction", "MultiBernoulli", "Normal", "NormalMeanVariance", "OnehotCategorical"]
