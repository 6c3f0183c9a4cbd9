"""Eigensystems: F = Q Λ Qᵀ of the blocks of one group, and the gradients of cases in this basis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import Place
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.recording.case_gradients import Cases


@dataclass(frozen=True)
class System:
    """F = Q Λ Qᵀ of the blocks of one group.

    Attributes:
        values: Λ [L, g, o, i].
        operators: the tensors that Q consists of.
        factors: A, G and the positions, or F, [L, ...] each, of the time of the decomposition; none where nobody needs
            them any more.
        root: R [L, g, o, i] if Q and Λ are those of R⁻¹ F R⁻¹ (`kfac_fx.fisher.mixed_damping`); None: they are F's.
    """

    group: BlockGroup
    values: Tensor
    operators: Sequence[Tensor]
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    root: Tensor | None = None

    @staticmethod
    def of(group: BlockGroup, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> System:
        """Decompose a group. dtype, device: of the decompositions, see `FisherEstimator.spectrum`.

        Raises FactorNotReady if its factors are missing or not finite; waits for the device."""
        group.check_whole()
        values, operators = group.eigensystem(Place(dtype, device))
        finite = values.flatten(1).isfinite().all(1).tolist()
        if failed := [str(block) for block, fine in zip(group.registrations, finite, strict=True) if not fine]:
            raise FactorNotReady(
                "every batch was skipped as not finite, or no eigenvalues were found, for\n  "
                + "\n  ".join(failed)
                + "\nLook for NaN in inputs, outputs and parameters, and record a finite batch."
            )
        factors = {name: stack.value for name, stack in group.factors.items()}
        return System(group.without_factors(range(len(group))), values, operators, factors)

    def part(self, members: Sequence[int]) -> System:
        """Some of the blocks."""
        operators = [self.group.operators_of(index, self.operators) for index in members]
        stacked = self.group.stack_operators(operators) if members else []
        factors = {name: factor[list(members)] for name, factor in self.factors.items()}
        return System(self.group.without_factors(members), self.values[list(members)], stacked, factors)

    @property
    def turns_rows(self) -> bool:
        """Whether Qᵀ turns rows and gradient rows apart: it is a product of two sides, or unit vectors."""
        return self.root is None and (self.group.separable or (len(self.group.sides) == 1 and self.group.left.diagonal))

    def in_basis(self, index: int, cases: Cases) -> Iterator[tuple[slice, Cases]]:
        """Qᵀ times the gradients of cases of one block, divided by R: (which cases, these cases) in parts.

        Rows are turned before they are multiplied if that takes fewer operations.
        """
        group, (o, i) = self.group, self.values.shape[-2:]
        operators = group.operators_of(index, self.operators)
        of_rows = cases.positions * (o * o + i * i) < o * i * (o + i)
        if cases.whole is None and self.turns_rows and (of_rows or not group.separable):
            yield slice(0, len(cases)), self.turned_rows(cases, operators)
            return
        for part, some in cases.chunks():
            # A group of one block, in whose place the operators of that block stand.
            whole = some.gradients().to(self.values.dtype)
            scaled = whole if self.root is None else whole / self.root[index]
            turned = group.to_eigenbasis(scaled.unsqueeze(1), operators)
            yield part, replace(some, uses=(), whole=turned.squeeze(1))

    def turned_rows(self, cases: Cases, operators: Sequence[Tensor]) -> Cases:
        """With Q_Aᵀ r for every row and Q_Gᵀ d for every gradient row. Diagonal sides have unit vectors as Q."""
        group, (left, *right) = self.group, operators

        def outputs(d: Tensor) -> Tensor:
            if group.left.diagonal:
                return d.to(left.dtype)
            columns = d.to(left.dtype).flatten(0, 1).movedim(0, -1).unsqueeze(0)
            turned = group.multiply_outputs(columns, left.mT)[0].movedim(-1, 0)
            return turned.reshape(d.shape)

        def inputs(x: Tensor) -> Tensor:
            rows = x.to(left.dtype).flatten(0, 1).movedim(0, 1).unsqueeze(0)
            turned = group.multiply_inputs(rows, right)[0].movedim(1, 0)
            return turned.reshape(x.shape)

        return cases.turned(None if all(side.diagonal for side in group.sides[1:]) else inputs, outputs)
