"""The statistics of one row a case, against their definition, case by case and group by group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kfac_fx.passes.approximations import named
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.recording.statistics import sum_of

NAMES = ("count/reduced", "A/reduced", "G/reduced")
MATRIX = (3, 4, 2)
KEPT = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]]).bool()


def rows(cases: int = 4, positions: int = 5, shared: bool = False) -> tuple[Tensor, Tensor]:
    """x [N, S, g, i] and d [N, S, g, o] of `MATRIX`."""
    g, o, i = MATRIX
    x = torch.randn(1 if shared else cases, positions, g, i, dtype=torch.float64)
    return x, torch.randn(cases, positions, g, o, dtype=torch.float64)


def computed(x: Tensor, d: Tensor, bias: bool = True, kept: Tensor | None = None) -> list[Tensor]:
    g, o, i = MATRIX
    return [sum_of(name, x, d, bias, (g, o, i + bias), kept) for name in NAMES]


def defined(x: Tensor, d: Tensor, bias: bool, kept: Tensor) -> list[Tensor]:
    g, o, i = MATRIX
    count, a, b = d.new_zeros(()), d.new_zeros(g, i + bias, i + bias), d.new_zeros(g, o, o)
    for n in range(len(d)):
        real = [s for s in range(d.shape[1]) if kept[n, s]]
        count += bool(real)
        for group in range(g if real else 0):
            inputs = [torch.cat([x[n % len(x), s, group], x.new_ones(int(bias))]) for s in real]
            mean = torch.stack(inputs).mean(0)
            total = torch.stack([d[n, s, group] for s in real]).sum(0)
            a[group] += torch.outer(mean, mean)
            b[group] += torch.outer(total, total)
    return [count, a, b]


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared by all cases"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_case_is_the_mean_of_its_rows_and_the_sum_of_its_gradients(bias: bool, masked: bool, shared: bool) -> None:
    x, d = rows(shared=shared)
    expected = defined(x, d, bias, KEPT if masked else torch.ones_like(KEPT))
    found = computed(x, d, bias, KEPT if masked else None)
    torch.testing.assert_close(found, expected)
    g, o, i = MATRIX
    shapes = [named(name).shape((g, o, i + bias), 4) for name in NAMES]
    assert [tuple(tensor.shape) for tensor in found] == shapes


def test_with_one_position_they_are_the_statistics_of_all_rows() -> None:
    x, d = rows(positions=1)
    g, o, i = MATRIX
    whole = [sum_of(name, x, d, True, (g, o, i + 1)) for name in ("count", "A", "G")]
    torch.testing.assert_close(computed(x, d), whole)


def test_a_layer_that_only_shifts_has_a_mean_of_ones() -> None:
    d = torch.randn(4, 5, 3, 2, dtype=torch.float64)
    ones = sum_of("A/reduced", d[..., :0], d, True, (3, 2, 1))
    torch.testing.assert_close(ones, torch.full((3, 1, 1), 4.0, dtype=torch.float64))


@pytest.mark.parametrize(("cases", "positions"), [(0, 5), (4, 0)])
def test_without_a_row_no_pair_is_counted(cases: int, positions: int) -> None:
    count, a, g = computed(*rows(cases, positions), bias=False)
    assert not count and not a.any() and not g.any()


def test_halves_of_a_batch_add_up() -> None:
    x, d = rows()
    halves = [computed(x[part], d[part], kept=KEPT[part]) for part in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close([part + other for part, other in zip(*halves, strict=True)], computed(x, d, kept=KEPT))


def test_low_precision_is_accumulated_in_float32() -> None:
    x, d = (row.bfloat16() for row in rows(64, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = computed(x, d)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    exact = defined(x.double(), d.double(), True, torch.ones(64, 40, dtype=torch.bool))
    torch.testing.assert_close(found, [tensor.float() for tensor in exact], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_they_compile_into_one_graph(masked: bool) -> None:
    x, d = rows()
    kept = KEPT if masked else None
    compiled = torch.compile(lambda x, d: computed(x, d, kept=kept), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, d), computed(x, d, kept=kept))


def test_ids_and_rows_of_experts_have_no_mean() -> None:
    ids, d = torch.randint(3, (4, 5)), torch.randn(4, 5, 2)
    with pytest.raises(RegistrationError, match=r"'kron_reduce' takes the mean of rows over positions, .* take 'kron'"):
        sum_of("A/reduced", ids, d, False, (1, 2, 3))
    x, d = rows()
    with pytest.raises(RegistrationError, match="take 'kron'"):
        computed(x, d, kept=torch.ones(4, 5, 3, dtype=torch.bool))
