"""The multiplier m of "eigen_moments" from its formulas, in numbers of Python."""

from __future__ import annotations

import math

from torch import Tensor


class Multiplier:
    def __init__(self) -> None:
        self.value, self.peak, self.steps = 1.0, 0.0, 0

    def grow(self, gradient: Tensor, last_update: Tensor, lr: float) -> None:
        """By the cosine of two vectors, where a zero has none, and the part of lr in the largest one so far.

        It grows more slowly after 100 steps, and does not fall below 1 while lr is below its largest value.
        """
        self.peak, self.steps = max(self.peak, lr), self.steps + 1
        norms = float(gradient.norm() * last_update.norm())
        cosine = float(gradient @ last_update) / norms if norms else 0.0
        weight = min(1.0, 100 / self.steps) if cosine > 0 else 1.0
        least = min(self.value, 1.0) if lr < self.peak else 0.1
        self.value = min(30.0, max(least, self.value * math.exp(weight * cosine * lr / self.peak)))

    def first(self, rho: float) -> float:
        """At the first check of a step with a length: the factor that takes the step half as far as its bound, from 1
        to 10."""
        factor = min(10.0, max(1.0, 0.5 / rho)) if rho else 1.0
        self.value *= factor
        return factor

    def checked(self, change: float, predicted: float) -> None:
        """After a check: of the loss of its batch."""
        if change > 0 and change > 2 * predicted:
            self.value = max(0.1, 0.3 * self.value)
