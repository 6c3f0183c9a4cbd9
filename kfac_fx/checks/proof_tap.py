"""The tap of the registration proof: it checks the shapes of rows, and keeps what the proof compares."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kfac_fx.losses.loss_function import precise
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration, Use, tensor_attrs
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.statistics.row_sums import named
from kfac_fx.taps.rows import BothRows, moment_and_grad_rows
from kfac_fx.taps.tap import Tap

PROOF_TOLERANCE = 1e-3  # right gradients agree to about 1e-6 in float32, wrong ones differ by about 1


class ProofTap(Tap):
    """A tap whose rows may be wrong: an error in them is kept, because a backward cannot raise it.

    Attributes:
        failure: the error that the rows raised.
        remainders: of every use, the numbers whose gradients the rows leave out.
        kind: of the rows: whether they are ids, and their numbers of cases and positions.
        reached: whether the last backward sent a gradient to any case but the first.
        cases: the numbers of cases of all calls.
    """

    failure: str | None = None
    remainders: list[Tensor]
    kind: tuple[Any, ...] = ()
    reached: bool = False
    cases: set[int]

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        assert registration.matrix is not None, "bug in kfac_fx: a proof of a generic registration"
        both = super().both_rows(registration, use, layer)
        g, o, i = self.matrix
        inputs = i - (registration.matrix.bias is not None)
        self.cases, self.remainders = set(), []
        matrix, names, bias = registration.matrix, tuple(tensor_attrs(use)), registration.matrix.bias is not None
        of_user = layer is not LAYERS.get(layer.name)
        moment = moment_and_grad_rows(registration, use, layer) if of_user else None
        some = [(number, step) for number, step in enumerate(use.through) if step.left_out]

        def guarded(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            try:
                rows, grad_rows = both(output_grad, input, *tensors)
                check_row_shapes(rows, grad_rows, (g, o, inputs))
                self.cases.add(grad_rows.shape[0])
                self.reached = self.reached or reaches_others(rows, grad_rows)
                if some:
                    summed = named("gradient").compute(rows, grad_rows, bias, self.matrix, None)
                    (gradient,) = matrix.unpack(summed).values()
                    attrs = dict(zip(names, tensors, strict=True))
                    for number, step in some:
                        remainder = step.remainder(gradient, {key: attrs[f"{number}.{key}"] for key in step.nodes})
                        self.remainders += [] if remainder is None else [remainder]
                if moment is not None:
                    by_rows = named("A").compute(precise(rows), grad_rows, bias, self.matrix, None)
                    self.failure = self.failure or moments_apart(by_rows, moment(output_grad, input)[0])
                self.kind = not rows.is_floating_point(), list(grad_rows.shape[:2])
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if fatal(error):
                    raise
                self.failure = f"its rows could not be made: {first_line(error)}"
                return output_grad.new_zeros(1, 1, g, inputs), output_grad.new_zeros(1, 1, g, o)
            return rows, grad_rows

        return guarded


def moments_apart(by_rows: Tensor, declared: Tensor) -> str | None:
    """How the declared second moment of a layer and that of its rows differ; None if they agree."""
    if declared.shape != by_rows.shape:
        return f"its second_moment has the shape {list(declared.shape)}, and that of its rows {list(by_rows.shape)}"
    error, size = float((declared - by_rows).norm()), float(by_rows.norm())
    if error <= PROOF_TOLERANCE * size or not math.isfinite(size):
        return None
    return f"its second_moment is not that of its rows ({f'{error / size:.0%} apart' if size else 'theirs is zero'})"


def reaches_others(rows: Tensor, grad_rows: Tensor) -> bool:
    """Whether any case but the first has a gradient. The gradient of a transposed use is in its rows."""
    sides = [grad_rows] + ([rows] if rows.is_floating_point() and rows.shape[0] == grad_rows.shape[0] else [])
    both = torch.stack([side.detach()[1:].flatten(1).any(1) for side in sides])
    return bool(both.all(0).any())


def check_row_shapes(rows: Tensor, grad_rows: Tensor, sizes: tuple[int, int, int]) -> None:
    """Raises ValueError if these are no rows of a matrix [g, o, i]."""
    if others := [type(side).__name__ for side in (rows, grad_rows) if not isinstance(side, Tensor)]:
        raise ValueError(f"rows are a {others[0]}, not a tensor")
    g, o, i = sizes
    cases, positions = grad_rows.shape[:2]
    wanted = [cases, positions, g, o] if grad_rows.dim() == 4 else [cases, positions, o]
    if list(grad_rows.shape) != wanted or (grad_rows.dim() == 3 and g > 1):
        raise ValueError(f"gradient rows of shape {list(grad_rows.shape)}, wanted [N, S, {g}, {o}]")
    if rows.is_floating_point():
        ends = ([g, i], [i]) if g == 1 else ([g, i],)
        right = rows.shape[1] == positions and list(rows.shape[2:]) in ends
    else:
        right = rows.shape[1:] == grad_rows.shape[1:2] and g == 1
    if not right or rows.shape[0] not in (1, cases):
        raise ValueError(f"rows of shape {list(rows.shape)}, wanted [{cases}, {positions}, {g}, {i}]")
