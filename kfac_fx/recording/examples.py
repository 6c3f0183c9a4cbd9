"""Examples that are not the entries of one dimension: graphs of many nodes, documents that are packed into one row, and
pairs in two halves of a batch.

`compile(..., examples=...)` gives a function of forward's arguments that returns the number of the example of every
row: [rows], or [rows, positions] of packed sequences; a negative number is of no example, as padding is. The rows of an
example are brought together, so that its gradient is one matrix, with zeros behind those of smaller examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import RegistrationError
from kfac_fx.recording.statistics import Rows

ExamplesOf = Callable[..., Tensor]
WANTED = "whole numbers, [rows] or [rows, positions], counted from 0; -1 where a row is of no example"


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one batch.

    Attributes:
        numbers: of the example of every row, [rows] or [rows, positions].
        count: how many examples there are.
    """

    numbers: Tensor
    count: int

    @staticmethod
    def of_call(function: ExamplesOf, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Examples:
        """Raises RegistrationError if the function returns something else than numbers of examples."""
        numbers = function(*args, **kwargs)
        whole = isinstance(numbers, Tensor) and not numbers.is_floating_point() and not numbers.is_complex()
        if not whole or numbers.dim() not in (1, 2):
            what = f"{numbers.dtype} {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
            raise RegistrationError(f"examples= returned a {what}, wanted {WANTED}")
        return Examples(numbers, 1 + int(numbers.max()) if numbers.numel() else 0)

    def owners(self, shape: Sequence[int]) -> Tensor | None:
        """The example of every row of a tensor with these leading sizes; None if they are not those of rows."""
        numbers, shape = self.numbers, tuple(shape)
        if shape == tuple(numbers.shape):
            return numbers
        if numbers.dim() == 2:
            if shape == tuple(numbers.shape[::-1]):
                return numbers.T
            if math.prod(shape) == numbers.numel() and shape[0] == numbers.numel():
                return numbers.reshape(shape)
        elif shape[:1] == tuple(numbers.shape):
            return numbers.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        if shape[:1] == (self.count,):  # one row for every example already
            every = torch.arange(self.count, device=numbers.device)
            return every.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        return None

    def places(self, owners: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows that are of an example, in the order of the examples; the place of each within its example).

        owners: of every row, flat.
        """
        order = owners.argsort(stable=True)
        order = order[int((owners < 0).sum()) :]
        of_row = owners[order]
        starts = torch.bincount(of_row, minlength=self.count).cumsum(0).roll(1)
        starts[:1] = 0
        return order, torch.arange(len(order), device=owners.device) - starts[of_row]

    def together(self, rows: Rows) -> Rows | None:
        """The rows [N, S, ...] of a use as those of examples, [examples, most rows, ...]; None if they are of none."""
        owners = None if rows.routed else self.owners(rows.d.shape[:2])
        if owners is None:
            return None
        owners = owners.reshape(-1)
        order, place = self.places(owners)
        of_row, most = owners[order], 1 + int(place.max()) if len(place) else 1

        def placed(tensor: Tensor, empty: Any) -> Tensor:
            flat = tensor.flatten(0, 1)
            result = flat.new_full((self.count, most, *flat.shape[1:]), empty)
            result[of_row, place] = flat[order]
            return result

        mask = torch.ones_like(rows.d[..., 0, 0], dtype=torch.bool) if rows.mask is None else rows.mask
        return replace(
            rows,
            x=placed(rows.expanded(), -1 if rows.ids else 0),
            d=placed(rows.d, 0),
            mask=placed(mask, False),
        )

    def by_example(self, rows: Tensor, owners: Tensor) -> Tensor:
        """The rows [rows, ...] of all examples as [examples, most rows, ...], zero where an example has fewer."""
        order, place = self.places(owners)
        most = 1 + int(place.max()) if len(place) else 1
        empty = rows.new_zeros(self.count, most, *rows.shape[1:])
        return empty.index_put((owners[order], place), rows[order])

    def slots(self, owners: Tensor) -> Tensor:
        """The place of every row within its example; 0 for rows of none."""
        flat = owners.reshape(-1)
        order, place = self.places(flat)
        slots = torch.zeros_like(flat)
        slots[order] = place
        return slots.view(owners.shape)
