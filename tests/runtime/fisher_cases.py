"""Registrations without a graph, and the moments of random rows, for the tests of blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from kfac_fx.fisher.block import BlockOperator, make_block
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.approximations import APPROXIMATIONS, FROM_PIXELS, LAGGED
from kfac_fx.passes.ir import Registration, Use
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.recording.statistics import canonical, sum_of

SERIES = tuple(name for name, approximation in APPROXIMATIONS.items() if approximation.series)
ALL_ROOTS: tuple[Root, ...] = (-2.0, -1.0, -0.5, 0.5, "cholesky", "cholesky_inverse")


def weight(shape: tuple[int, ...], pattern: str, **sizes: int) -> tuple[str, Layout]:
    layout = Layout(shape).rearrange(pattern, **sizes)
    return "weight", layout if len(layout.result) == 3 else layout.reshape((1, *layout.result))


def bias(shape: tuple[int, ...], pattern: str, **sizes: int) -> tuple[str, Layout]:
    layout = Layout(shape).rearrange(pattern, **sizes)
    return "bias", layout if len(layout.result) == 2 else layout.reshape((1, *layout.result))


@dataclass(frozen=True)
class Form:
    """A matrix form, the shapes of its parameters, and whether its rows are ids."""

    matrix: MatrixForm | None
    shapes: dict[str, tuple[int, ...]]
    ids: bool = False

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in self.shapes.items()}


FORMS = {
    "linear": Form(MatrixForm(weight((3, 2), "o i -> o i"), None), {"weight": (3, 2)}),
    "linear with bias": Form(
        MatrixForm(weight((3, 2), "o i -> o i"), bias((3,), "o -> o")), {"weight": (3, 2), "bias": (3,)}
    ),
    "convolution": Form(
        MatrixForm(weight((2, 2, 1, 2), "o c h w -> o (c h w)"), bias((2,), "o -> o")),
        {"weight": (2, 2, 1, 2), "bias": (2,)},
    ),
    "grouped convolution": Form(
        MatrixForm(weight((4, 2, 2), "(g o) c k -> g o (c k)", g=2), bias((4,), "(g o) -> g o", g=2)),
        {"weight": (4, 2, 2), "bias": (4,)},
    ),
    "depthwise convolution": Form(MatrixForm(weight((3, 1, 2), "g c k -> g c k"), None), {"weight": (3, 1, 2)}),
    "embedding": Form(MatrixForm(weight((5, 2), "v d -> d v"), None), {"weight": (5, 2)}, ids=True),
    "scale and shift": Form(
        MatrixForm(("weight", Layout((4,)).reshape((4, 1, 1))), ("bias", Layout((4,)).reshape((4, 1)))),
        {"weight": (4,), "bias": (4,)},
    ),
    "shift": Form(MatrixForm(None, ("bias", Layout((4,)).reshape((4, 1)))), {"bias": (4,)}),
    "generic": Form(None, {"weight": (2, 3), "bias": ()}),
}
CONVOLUTIONS = {
    "convolution": FORMS["convolution"],
    "grouped convolution": FORMS["grouped convolution"],
    "pointwise convolution": Form(MatrixForm(weight((3, 2, 1), "o c k -> o (c k)"), None), {"weight": (3, 2, 1)}),
    "wide convolution": Form(MatrixForm(weight((2, 3, 3, 2), "o c h w -> o (c h w)"), None), {"weight": (2, 3, 3, 2)}),
}
EVERYWHERE = (
    "kron", "kron_in_diag", "kron_out_diag", "kron_both_diag", "kron_indep", "diagonal", "full",
)  # fmt: skip
CASES = [
    (form, approximation)
    for form in FORMS
    for approximation in EVERYWHERE
    if form != "generic" or approximation in ("diagonal", "full")
]
CASES += [(form, "kron_sua") for form in CONVOLUTIONS]
CASES += [(form, name) for form in ("convolution", "grouped convolution") for name in FROM_PIXELS[1:]]
IN_BLOCKS = {  # (approximation, diagonal blocks of the output and the input side)
    "kron in blocks": ("kron", (2, 3)),
    "kron_in_diag in blocks": ("kron_in_diag", (2, 1)),
    "kron_out_diag in blocks": ("kron_out_diag", (1, 2)),
}
CASES += [
    (form, approximation)
    for form in ("linear", "linear with bias", "convolution", "grouped convolution")
    for approximation in IN_BLOCKS
]
CASES += [(form, "kron_reduce") for form, of in FORMS.items() if of.matrix is not None and not of.ids]
STEPS = 4  # of series
CASES += [
    (form, approximation)
    for form in ("linear with bias", "grouped convolution", "shift")
    for approximation in ("kron_series_1", "kron_series_2")
]
CASES += [("linear with bias", "kron_series_1_abs")]
FORMS |= CONVOLUTIONS


def register(form: Form, approximation: str, uses: int = 1) -> Registration:
    use = use_of("layer", form.shapes)
    uses = STEPS if approximation in SERIES else uses
    approximation, blocks = IN_BLOCKS.get(approximation, (approximation, (1, 1)))
    return Registration("layer", form.matrix, tuple(form.shapes), (use,) * uses, approximation, blocks=blocks)


def use_of(layer: str, attrs: Mapping[str, Any]) -> Use:
    """A use that is nowhere in a graph."""
    nowhere = cast(fx.Node, None)
    return Use(layer, 0, nowhere, nowhere, {}, attrs, frozenset())


def draw(registration: Registration, form: Form, cases: int, positions: int = 2) -> dict[str, Tensor]:
    """The statistics that the registration needs, of random rows."""
    if registration.matrix is None:
        return {"gradient": torch.randn(sum(t.numel() for t in form.parameters.values()), dtype=torch.float64)}
    (g, o, i), has_bias = registration.rows
    if registration.structure.series:
        x, d = sequences(registration.steps, (cases, positions, g), i - has_bias, o)
        return sequence_statistics(x, d, has_bias, (g, o, i))
    d = torch.randn(cases, positions, g, o, dtype=torch.float64)
    x = torch.randn(cases, positions, g, i - has_bias, dtype=torch.float64)
    rows = torch.randint(i, (cases, positions)) if form.ids else x
    return {s.name: sum_of(s.name, rows, d, has_bias, (g, o, i)) for s in registration.statistics}


def sequences(steps: int, shape: tuple[int, ...], inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Rows [T, *shape, i] and gradient rows [T, *shape, o] that remember the step before, and change places."""
    x, d = (torch.randn(steps, *shape, size, dtype=torch.float64) for size in (inputs, outputs))
    for t in range(1, steps):
        x[t] += 0.8 * x[t - 1].roll(1, -1)
        d[t] -= 0.7 * d[t - 1].flip(-1)
    return x, d


def sequence_statistics(x: Tensor, d: Tensor, bias: bool, matrix: tuple[int, int, int]) -> dict[str, Tensor]:
    """The sums that a series block takes from rows [T, N, S, g, i] and gradient rows [T, N, S, g, o], use by use."""
    uses = [(rows, grad_rows) for rows, grad_rows in zip(x, d, strict=True)]
    sums = {name: sum(sum_of(name, *use, bias, matrix) for use in uses) for name in ("count", "A", "G")}
    pairs = [[canonical(*use, bias, matrix) for use in uses[t : t + 2]] for t in range(len(uses) - 1)]
    for lagged in LAGGED:
        zero = torch.zeros(lagged.shape(matrix), dtype=d.dtype)
        sums[lagged.name] = zero + sum(lagged.of(later, earlier) for earlier, later in pairs)
    return cast(dict[str, Tensor], sums)


def assumed_lag(approximation: str, c: Tensor, c1: Tensor) -> Tensor:
    """C1 as the approximation takes it to be: symmetric, its correlations C^-½ C1 C^-½ perhaps without their signs."""
    if approximation == "kron_series_2":
        return c1
    c1 = (c1 + c1.mT) / 2
    if approximation == "kron_series_1":
        return c1
    values, vectors = torch.linalg.eigh(c)
    root = vectors @ values.sqrt().diag() @ vectors.mT
    white = torch.linalg.inv(root) @ c1 @ torch.linalg.inv(root)
    psi, u = torch.linalg.eigh(white)
    return root @ u @ psi.abs().diag() @ u.mT @ root


def dense_series(approximation: str, v0: Tensor, v1: Tensor, steps: int) -> Tensor:
    """F over the number of positions, from V_0 and V_1 [K, K]: the sum of all V_s-t, s and t from 1 to T, or T times
    the sum of all V_d."""
    if approximation != "kron_series_2":
        lags = [torch.linalg.matrix_power(v1 @ torch.linalg.inv(v0), d) @ v0 for d in range(steps)]
        pairs = [(s, t) for s in range(steps) for t in range(steps)]
        return torch.stack([lags[s - t] if s >= t else lags[t - s].mT for s, t in pairs]).sum(0)
    identity = torch.eye(len(v0), dtype=v0.dtype)
    one_way = torch.linalg.solve(identity - v1 @ torch.linalg.inv(v0), v0)  # V_0 + V_1 + V_2 + ...
    return steps * (one_way + one_way.mT - v0)


def trained(
    name: str, approximation: str, *, damping: float = 0.3, dtype: torch.dtype = torch.float64
) -> tuple[BlockOperator, dict[str, Tensor]]:
    """A block that has seen twenty batches of seven cases, with all its roots; and a vector for it."""
    vector = {name: torch.randn_like(p).to(dtype) for name, p in FORMS[name].parameters.items()}
    block = trained_once(name, approximation, damping, dtype)
    return copy.deepcopy(block, {id(block.registration): block.registration}), vector


@cache
def trained_once(name: str, approximation: str, damping: float, dtype: torch.dtype) -> BlockOperator:
    """The block of `trained`, which is made once in a process and must not be changed."""
    form = FORMS[name]
    registration = register(form, approximation)
    block = make_block(registration, parameters=form.parameters, dtype=dtype, damping=damping, roots=ALL_ROOTS)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for _ in range(20):
            block.update(draw(registration, form, 7), 7, decay=0.95)
    block.update_inverses()
    return block
