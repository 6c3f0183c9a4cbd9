"""Loss functions: predictive distributions, their declaration, and the gradients that are sent back from them."""

from kfac_fx.losses.distributions import *  # noqa: F403  # its __all__, which has every class
