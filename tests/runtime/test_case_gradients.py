"""Functions of the gradients of single cases against these gradients, for rows of every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.recording import case_gradients as module
from kfac_fx.recording.case_gradients import Cases, LowRank, query_products, sum_of_squares, weighted_squares
from kfac_fx.recording.statistics import Rows, canonical, sum_of

CASES, POSITIONS, GROUPS, OUT, IN = 5, 3, 2, 4, 6


def values(positions: int = POSITIONS, groups: int = 1, bias: bool = True, shared: bool = False) -> Rows:
    x = torch.randn(1 if shared else CASES, positions, groups, IN - bias, dtype=torch.float64)
    return canonical(x, torch.randn(CASES, positions, groups, OUT, dtype=torch.float64), bias, (groups, OUT, IN))


def ids(positions: int = POSITIONS, bias: bool = False) -> Rows:
    x = torch.randint(-1, IN - bias, (CASES, positions))
    return canonical(x, torch.randn(CASES, positions, 1, OUT, dtype=torch.float64), bias, (1, OUT, IN))


def in_float32(rows: Rows) -> Rows:
    return replace(rows, x=rows.x.float() if rows.x.is_floating_point() else rows.x, d=rows.d.float())


def padded() -> Rows:
    mask = torch.arange(CASES * POSITIONS).view(CASES, POSITIONS) % 4 != 1
    x, d = torch.randn(CASES, POSITIONS, 1, IN - 1).double(), torch.randn(CASES, POSITIONS, 1, OUT).double()
    return canonical(x, d, True, (1, OUT, IN), mask)


USES = {
    "rows": lambda: (values(),),
    "one row": lambda: (values(1),),
    "groups": lambda: (values(groups=GROUPS),),
    "one row in groups": lambda: (values(1, groups=GROUPS, bias=False),),
    "shared rows": lambda: (values(shared=True),),
    "padding": lambda: (padded(),),
    "ids": lambda: (ids(),),
    "one id": lambda: (ids(1),),
    "ids and bias": lambda: (ids(bias=True),),
    "several uses": lambda: (values(), values(1), padded()),
    "ids and rows": lambda: (ids(), values(bias=False), ids()),
}
every_form = pytest.mark.parametrize("form", USES)


def seen(form: str) -> tuple[Cases, Tensor]:
    """Cases, and their gradients one by one, as sums over all rows of a case."""
    uses = USES[form]()

    def of_case(rows: Rows, n: int) -> Tensor:
        x = rows.x if len(rows.x) == 1 else rows.x[n : n + 1]
        mask = None if rows.mask is None else rows.mask[n : n + 1]
        result: Tensor = sum_of("gradient", x, rows.d[n : n + 1], rows.bias, rows.matrix, mask)
        return result

    each = [torch.stack([of_case(rows, n) for rows in uses]).sum(0) for n in range(CASES)]
    return Cases(uses[0].matrix, uses), torch.stack(each)


@every_form
@pytest.mark.parametrize("chunk", [1 << 24, 30])
def test_all_functions_are_those_of_the_gradients(form: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    cases, each = seen(form)
    whole = Cases(cases.matrix, whole=each)
    weights, queries = torch.rand_like(each[0]), torch.randn(2, *each.shape[1:], dtype=torch.float64)
    low = LowRank.of(queries, 1)
    few = torch.randn(1, *each.shape[1:], dtype=torch.float64)  # for which rows come first
    assert len(cases) == len(whole) == CASES
    for kind in (cases, whole):
        torch.testing.assert_close(kind.gradients(), each)
        torch.testing.assert_close(sum_of_squares(kind), each.square().sum(0))
        torch.testing.assert_close(weighted_squares(kind, weights), (each.square() * weights).sum((1, 2, 3)))
        for wanted in (queries, few):
            torch.testing.assert_close(query_products(kind, wanted), torch.einsum("ngoi,qgoi->qn", each, wanted))
        torch.testing.assert_close(query_products(kind, low), torch.einsum("ngoi,qgoi->qn", each, low.dense()))


@every_form
def test_chunks_are_all_cases_in_order_with_their_numbers_in_the_batch(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, gradients = seen(form)
    monkeypatch.setattr(module, "CHUNK", 2 * gradients[0].numel())
    for of_batch in (replace(cases, first=7), Cases(cases.matrix, whole=gradients, first=7)):
        parts = list(of_batch.chunks())
        assert [(part.first, len(part)) for _, part in parts] == [(7, 2), (9, 2), (11, 1)]
        assert [(place.start, place.stop) for place, _ in parts] == [(0, 2), (2, 4), (4, 5)]
        torch.testing.assert_close(torch.cat([part.gradients() for _, part in parts]), gradients)


@every_form
def test_products_are_in_the_precision_of_the_queries(form: str) -> None:
    cases, each = seen(form)
    less = list(map(in_float32, cases.uses))
    for number in (1, 2):
        queries = torch.randn(number, *each.shape[1:], dtype=torch.float64)
        for kind in (queries, LowRank.of(queries, 1)):
            products = query_products(Cases(cases.matrix, tuple(less)), kind)
            wanted = torch.einsum("ngoi,qgoi->qn", each, kind if isinstance(kind, Tensor) else kind.dense())
            torch.testing.assert_close(products, wanted, rtol=1e-5, atol=1e-5)


@every_form
def test_positions_are_cases_that_add_up(form: str) -> None:
    cases, each = seen(form)
    total = sum(part.gradients().view(CASES, -1, *each.shape[1:]).sum(1) for part in cases.by_position())
    torch.testing.assert_close(total, each)
    whole = Cases(cases.matrix, whole=each)
    assert whole.by_position() == [whole]


def test_uses_with_equally_many_positions_meet_at_these() -> None:
    first, second, other = values(), values(), values(1)
    together, alone = Cases(first.matrix, (first, second, other)).by_position()
    assert len(together) == CASES * POSITIONS and len(together.uses) == 2 and len(alone) == CASES


@every_form
def test_rows_are_turned_as_their_gradients_are(form: str) -> None:
    cases, each = seen(form)
    left, right = torch.randn(OUT, OUT).double(), torch.randn(IN, IN).double()
    turned = cases.turned(lambda x: x @ right, lambda d: d @ left.mT)
    torch.testing.assert_close(turned.gradients(), left @ each @ right)
    outputs_only = cases.turned(None, lambda d: d @ left.mT)
    torch.testing.assert_close(outputs_only.gradients(), left @ each)
    less = replace(cases, uses=tuple(in_float32(rows) for rows in cases.uses))
    torch.testing.assert_close(less.turned(None, lambda d: d.double()).gradients(), each, rtol=1e-5, atol=1e-5)


def test_products_of_large_matrices_keep_the_precision_of_float32() -> None:
    """The tied embedding of GPT-2 has 39 million numbers, and a sum of so many rounded products loses four digits."""
    query, gradient = torch.rand(1, 1, 4096, 4096), torch.rand(1, 1, 4096, 4096)
    expected = (query * gradient).sum(dtype=torch.float64).float().view(1, 1)
    found = query_products(Cases((1, 4096, 4096), whole=gradient), query)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_matrices_of_a_low_rank_are_the_nearest_ones(rank: int) -> None:
    matrices = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    low = LowRank.of(matrices, rank).dense()
    error = (low - matrices).flatten(2).norm(dim=-1)
    torch.testing.assert_close(error, torch.linalg.svdvals(matrices)[..., rank:].norm(dim=-1))
