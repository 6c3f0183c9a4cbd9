"""Divided blocks: those with a diagonal F of which every process keeps the entries of its shards (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.sharded import ShardLayout, Shards
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.errors import NotRegisteredError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.recording.moments import Key


@dataclass(frozen=True)
class DividedForm(MatrixForm):
    """The shards of one process as a matrix, a part of the whole one. layout: how that is divided."""

    layout: ShardLayout

    @staticmethod
    def of(registration: Registration, shards: Shards) -> DividedForm | None:
        """None for a block whose F is not diagonal, or whose matrix is not divided as its parameters are."""
        matrix, structure = registration.matrix, registration.structure
        if matrix is None or structure.kronecker or not structure.diagonal:
            return None
        if not shards.layouts.keys() >= set(registration.parameters):  # slices, or parameters that are not trained
            return None
        cuts = {}
        for name, layout in (entry for entry in (matrix.weight, matrix.bias) if entry is not None):
            whole = shards.layouts[name]
            shard = whole.part(torch.empty(whole.shape, device="meta"), dist.get_rank(whole.group))
            cuts[name] = layout.cut(whole.dim, shard.shape[whole.dim])
        parts = {name: (name, cut[0]) for name, cut in cuts.items() if cut is not None}
        if len(parts) < len(cuts) or len(dims := {cut[1] for cut in cuts.values() if cut is not None}) > 1:
            return None
        weight, bias = (None if entry is None else parts[entry[0]] for entry in (matrix.weight, matrix.bias))
        return DividedForm(weight, bias, replace(whole, shape=torch.Size(matrix.shape), dim=dims.pop()))


def divided_forms(registrations: Iterable[Registration], shards: Shards | None) -> dict[Key, DividedForm]:
    """The forms of the blocks that can be divided, by the names of their parameters."""
    forms = {r.parameters: None if shards is None else DividedForm.of(r, shards) for r in registrations}
    return {key: form for key, form in forms.items() if form is not None}


class DividedGroup(BlockGroup):
    """Blocks with a diagonal F of which this process keeps the entries of its shards, possibly none.

    They are divided as FSDP2 divides their parameters. A diagonal F multiplies element by element, so shards of
    gradients need no message to be multiplied; only the sums of a batch are added up over processes. The matrix [g, o,
    i] of such a block must be divided along one dimension, as all its parameters are: the outputs of a linear layer
    with its bias, or the elements of a norm. Whether the numbers of a block are finite, and their mean, is known to all
    processes together.
    """

    divided = True

    @property
    def layout(self) -> ShardLayout:
        """The division of every matrix."""
        form = self.forms[0]
        assert isinstance(form, DividedForm), "bug in kfac_fx: a divided block with the form of a whole one"
        return form.layout

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        g, o, i = self.layout.shape
        return g, o, i

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.layout.group)
        return values

    def agreed(self, flags: Tensor) -> Tensor:
        return self.total((~flags).to(self.dtype)) == 0

    def mean_eigenvalue(self, side: Side) -> Tensor:
        stack = self.factors[side.factor]
        traces = self.total(stack.moment.flatten(1).sum(1, keepdim=True))
        return traces / math.prod(self.whole_shape) / stack.total_weight.unsqueeze(-1)

    def in_state(self, entry: Tensor) -> Tensor:
        return self.layout.dtensor(super().in_state(entry)) if entry.dim() else entry

    def check_whole(self) -> None:
        raise NotRegisteredError(
            f"the diagonal of {self.registrations[0]} is divided as its parameters are, and every process has its own "
            "rows: write KFAC(..., placement='replicated'), which keeps all of them in every process, or a "
            "FisherEstimator."
        )
