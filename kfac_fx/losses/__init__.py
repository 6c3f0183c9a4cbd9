"""Loss functions: predictive distributions, what is registered of them, and what is sent back from them."""

from kfac_fx.losses.distributions import (
    Categorical,
    LossFunction,
    MultiBernoulli,
    Normal,
    NormalMeanVariance,
    OnehotCategorical,
)

__all__ = ["Categorical", "LossFunction", "MultiBernoulli", "Normal", "NormalMeanVariance", "OnehotCategorical"]
