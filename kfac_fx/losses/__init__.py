"""Loss functions: predictive distributions, their declaration, and the gradients that are sent back from them.

A *case* is what the mean of the loss is over: one distribution. Every position of logits [B, T, V] is a case of a
categorical loss, as in `F.cross_entropy`. For the other distributions a case is an element of the dimension of the
cases. The Fisher is a mean over the same cases, so it is that of a mean loss.

- Losses move the dimension of the cases to the front.
- A target that is ignored, and padding, is a constant and no case. The number of the others is a tensor, so that the
  host does not wait for it.
- Several losses are means over their own cases each. The towers of one loss are one mean, over the cases of all.
"""

from kfac_fx.losses.distributions import (
    Categorical,
    LossFunction,
    MultiBernoulli,
    Normal,
    NormalMeanVariance,
    OnehotCategorical,
)

__all__ = ["Categorical", "LossFunction", "MultiBernoulli", "Normal", "NormalMeanVariance", "OnehotCategorical"]
