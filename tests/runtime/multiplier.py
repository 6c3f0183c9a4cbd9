"""The multiplier m of "eigen_moments" from its formulas, in numbers of Python."""

from __future__ import annotations

import math

from torch import Tensor


class Multiplier:
    """
    Attributes:
        trust: T, by which the bound is wider.
        agreement, least: A at the last check, and the smaller one of the last two.
        gained: the factor in m that comes from agreement.
        promised: the fall of the loss that the last check predicted for its step.
    """

    def __init__(self) -> None:
        self.value, self.peak, self.steps = 1.0, 0.0, 0
        self.trust, self.agreement, self.least, self.gained, self.promised = 1.0, 1.0, 0.0, 1.0, 0.0

    @property
    def agreed(self) -> bool:
        return self.least >= 0.75

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

    def arrived(self, fall: float, steps: int, narrow: bool = False) -> bool:
        """At a later check of another batch. Returns whether the bound gives way, so that r begins anew.

        fall: of the loss of its batch in the steps since the last check. narrow: whether the step of the last check was
            ten times too long for a bound without trust.
        """
        agreement = max(-1.0, min(1.0, fall / (steps * self.promised))) if self.promised else 0.0
        self.least, self.agreement = min(agreement, self.agreement), agreement
        gives_way = narrow and self.promised > 0 and self.steps <= 21 and -0.1 <= agreement <= 0.5
        if gives_way:
            self.trust = min(64.0, 8 * self.trust)
        elif self.trust > 4 and agreement < -0.1:
            self.trust /= 2
        return gives_way

    def later(self, rho: float, best: float, lr: float) -> float:
        """The factor of m at a later check. rho: under the bound without trust. best: the length for its batch at which
        the quadratic model is least, in steps."""
        by_bound = max(1.0, min(2.0, 0.75 / rho, 30 / self.value)) if rho else 1.0
        quarter = 0.25 * self.agreement * best * lr / self.peak
        factor = max(1.0, min(by_bound, quarter)) if self.steps <= 21 and self.least >= 0.4 else 1.0
        if self.agreed and self.steps <= 6:
            factor = by_bound
            self.gained *= factor
        elif not self.agreed:
            factor = max(1 / self.gained, min(1.0, 1 / self.value)) if self.gained > 1 else factor
            self.gained = 1.0
        self.value *= factor
        return factor

    def checked(self, change: float, predicted: float, limits: bool = False) -> None:
        """After a check: of the loss of its batch. limits: whether the bound limits the step."""
        self.promised = max(0.0, -predicted)
        if self.trust > 4:  # other batches decide
            pass
        elif limits and self.agreed and abs(change / predicted - 1) <= 0.25:
            self.trust = min(4.0, 2 * self.trust)
        elif not change / predicted > 0.5:
            self.trust = max(1.0, self.trust / 2)
        if change > 0 and change > 2 * predicted:
            self.value = max(0.1, 0.3 * self.value)
