"""The factors of squared errors, which their gradients alone do not tell.

The gradient of f times a registered loss is that of the loss itself, with other targets: f (m - t) = m - t' with
t' = m - f (m - t). The value of the trained loss tells f. With N cases, the variance v, and the weight w of the loss,

    g = f w (m - t) / (v N),     f w |m - t|² / (2 v N) = s / f,     s = |g|² v N / (2 w)

So the values of several squared errors add up to Σ s_i / f_i, which is what the losses whose factors are known leave
of the value. Other terms, such as a penalty on parameters, hide the factors, as do other losses that are registered as
squared errors, such as Huber's: then the equation gives any number. So a factor counts if it is one that people write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kfac_fx.losses import Normal

EXACT = 1e-4  # relative error of a factor that is a number that people write
VALUES = 1e-5  # of a sum of several values
MANTISSAS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
DECADES = range(-6, 7)


@dataclass(frozen=True)
class SquaredError:
    """A registered squared error on the outputs of one forward.

    Attributes:
        loss: its distribution.
        weight: of its mean over cases.
        gradient: the trained one, of its inputs.
    """

    loss: Normal
    weight: float
    gradient: Tensor

    @property
    def size(self) -> float:
        """s: its value, times its factor."""
        loss = self.loss
        return float(self.gradient.double().square().sum()) * loss.var * loss.all_cases / (2 * self.weight)

    def nominal(self, factor: float, parts: int) -> float | None:
        """The number that people write that this factor is; None if it is none."""
        numbers = self.numbers(parts)
        return next((number for number in numbers if abs(factor - number) <= EXACT * number), None)

    def numbers(self, parts: int) -> Iterator[float]:
        """The factors that people write: those of means and sums, round numbers, and each divided by the number of
        micro-batches."""
        cases, elements = self.loss.all_cases, self.loss.inputs.numel() / self.loss.all_cases
        usual = (1.0, 1 / elements, cases, 0.5, 2.0, 0.5 / elements, cases / 2, cases / elements)
        powers = [2.0**exponent for exponent in range(-16, 17)]
        tens = [mantissa * 10.0**decade for decade in DECADES for mantissa in MANTISSAS]
        for part in dict.fromkeys((1, parts)):
            yield from (number / part for number in (*usual, *powers, *tens, 1 / 3))


def factors_of_squares(
    squares: Sequence[SquaredError], value: float | None, parts: int = 1
) -> list[tuple[float, bool]] | None:
    """(the factor, whether it is one that people write) of every squared error; None if they are not known.

    Args:
        value: of the squared errors together, as they are trained; None: it is not known.
        parts: the number of micro-batches, which the user may have divided the loss by.
    """
    if not squares or value is None or not 0 < value < math.inf:
        return None
    sizes = [of.size for of in squares]
    if not all(0 < size < math.inf for size in sizes):
        return None
    common = sum(sizes) / value
    number = squares[0].nominal(common, parts)
    if len(squares) == 1:
        return [(common if number is None else number, number is not None)]
    if number is not None and abs(common / number - 1) <= VALUES:
        return [(number, True)] * len(squares)
    for unit in dict.fromkeys((1.0, 1.0 / parts)):
        for place, of in enumerate(squares):
            rest = value - (sum(sizes) - sizes[place]) / unit
            number = of.nominal(sizes[place] / rest, parts) if rest > 0 else None
            if number is not None and abs(sizes[place] / number - rest) <= VALUES * value:
                return [(number if other == place else unit, True) for other in range(len(squares))]
    return None
