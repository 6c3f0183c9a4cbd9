"""Every statistic against its definition on materialized rows, in every form that rows have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from kfac_fx.passes.approximations import STATISTICS, named
from kfac_fx.recording import statistics as statistics
from kfac_fx.recording.statistics import sum_of

NAMES = [s.name for s in STATISTICS.values() if s.function and not (s.lagged or s.kind_of)]


@dataclass
class Case:
    rows: Tensor
    grad_rows: Tensor
    bias: bool
    matrix: tuple[int, int, int]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, bool, tuple[int, int, int]]:
        return self.rows, self.grad_rows, self.bias, self.matrix


def make(rows: Tensor, groups: int, outputs: int, bias: bool, cases: int = 4, inputs: int | None = None) -> Case:
    """A use with random gradient rows; `inputs` for integer rows."""
    grouped = rows.dim() == 4
    shape = (cases, rows.shape[1], groups, outputs) if grouped else (cases, rows.shape[1], outputs)
    i = rows.shape[-1] if inputs is None else inputs
    return Case(rows, torch.randn(shape, dtype=torch.float64), bias, (groups, outputs, i + bias))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


IDS = torch.tensor([[0, 4, 4], [1, -1, 2], [2, 2, 2], [-1, -1, -1]])
FORMS: dict[str, Callable[[bool], Case]] = {
    "vectors": lambda bias: make(randn(4, 1, 3), 1, 2, bias),
    "sequences": lambda bias: make(randn(4, 5, 3), 1, 2, bias),
    "groups": lambda bias: make(randn(4, 5, 3, 2), 3, 4, bias),
    "one number a group": lambda bias: make(randn(4, 5, 6, 1), 6, 1, bias),
    "shared by all cases": lambda bias: make(randn(1, 5, 3), 1, 2, bias),
    "ids": lambda bias: make(IDS, 1, 2, bias, inputs=5),
    "one id a case": lambda bias: make(IDS[:, :1], 1, 2, bias, inputs=5),
    "ids shared by all cases": lambda bias: make(IDS[:1], 1, 2, bias, inputs=5),
}


def materialized(case: Case) -> tuple[Tensor, Tensor]:
    """The rows with their bias column [N, S, g, i] and the gradient rows [N, S, g, o], as plainly as can be."""
    x, d = case.rows, case.grad_rows
    if not x.is_floating_point():
        one_hot = torch.zeros(*x.shape, case.matrix[2] - case.bias, dtype=d.dtype)
        for n, s in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])):
            if x[n, s] >= 0:
                one_hot[n, s, x[n, s]] = 1
        if not case.bias:
            d = torch.where((x >= 0).unsqueeze(-1), d, 0)
        x = one_hot
    x, d = (t if t.dim() == 4 else t.unsqueeze(2) for t in (x, d))
    x = x.expand(d.shape[0], *x.shape[1:])
    if case.bias:
        x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)
    return x, d


def defined(name: str, case: Case, kept: Tensor | None = None) -> Tensor:
    x, d = materialized(case)
    kept = torch.ones(x.shape[:2], dtype=torch.bool) if kept is None else kept
    x, d = x * kept[..., None, None], d * kept[..., None, None]
    p = torch.einsum("nsgo,nsgi->ngoi", d, x)
    if name == "count":
        present = x.flatten(2).any(2) if not case.rows.is_floating_point() else kept
        return present.sum().to(d.dtype)
    return {
        "A": torch.einsum("nsgi,nsgj->gij", x, x),
        "A_diag": torch.einsum("nsgi,nsgi->gi", x, x),
        "G": torch.einsum("nsgo,nsgp->gop", d, d),
        "G_diag": torch.einsum("nsgo,nsgo->go", d, d),
        "gradient": p.sum(0),
        "per_case": p.flatten(1),
        "outer": p.flatten(1).mT @ p.flatten(1),
        "square": p.square().sum(0),
    }[name]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_statistic_is_its_definition(name: str, form: str, bias: bool) -> None:
    torch.manual_seed(0)
    case = FORMS[form](bias)
    computed = sum_of(name, *case.arguments)
    assert tuple(computed.shape) == named(name).shape(case.matrix, case.grad_rows.shape[0])
    torch.testing.assert_close(computed, defined(name, case))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", NAMES)
def test_groups_with_rows_of_their_own_have_means_of_their_own(name: str, bias: bool) -> None:
    """A over all rows is the mean over the group's; the rest are sums over the group's rows, as ever."""
    torch.manual_seed(0)
    case = make(randn(4, 3, 5, 2), 5, 3, bias)
    kept = torch.rand(4, 3, 5) < 0.4
    kept[..., 0] = False
    computed = sum_of(name, *case.arguments, kept)
    rows = kept.any(-1).sum()
    if name == "count":
        return torch.testing.assert_close(computed, rows.double())
    alone = []
    for group in range(5):
        own = make(case.rows[:, :, group : group + 1], 1, 3, bias)
        own.grad_rows = case.grad_rows[:, :, group : group + 1]
        share = kept[..., group].sum().clamp(min=1)
        alone.append(defined(name, own, kept[..., group]) * (rows / share if name.startswith("A") else 1))
    joined = torch.block_diag(*alone) if name == "outer" else torch.cat(alone, dim=1 if name == "per_case" else 0)
    if name == "outer":  # gradients of two groups of one case meet, too
        inside = torch.block_diag(*(torch.ones_like(tensor) for tensor in alone)).bool()
        computed = torch.where(inside, computed, 0)
    torch.testing.assert_close(computed, joined)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_padding_enters_nothing(name: str, form: str, bias: bool) -> None:
    """Neither the moments nor the number of rows, whatever is in it."""
    torch.manual_seed(0)
    case = FORMS[form](bias)
    kept = torch.rand(case.grad_rows.shape[:2]) < 0.6
    kept[0] = False
    computed = sum_of(name, *case.arguments, kept)
    assert tuple(computed.shape) == named(name).shape(case.matrix, case.grad_rows.shape[0])
    torch.testing.assert_close(computed, defined(name, case, kept))


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_only_shifts_has_rows_without_columns(name: str) -> None:
    case = make(randn(4, 5, 6, 0), 6, 1, True)
    computed = sum_of(name, *case.arguments)
    assert tuple(computed.shape) == named(name).shape(case.matrix, 4)
    torch.testing.assert_close(computed, defined(name, case))


@pytest.mark.parametrize("form", ["sequences", "ids"])
def test_square_in_chunks_of_one_case(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FORMS[form](True)
    monkeypatch.setattr(statistics, "CHUNK", 1)
    torch.testing.assert_close(sum_of("square", *case.arguments), defined("square", case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_halves_of_a_batch_add_up(name: str, form: str) -> None:
    """Additive over micro-batches; per-case gradients are listed one after the other."""
    case, compute = FORMS[form](True), partial(sum_of, name)
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        rows = case.rows if case.rows.shape[0] == 1 else case.rows[part]
        halves.append(compute(rows, case.grad_rows[part], case.bias, case.matrix))
    whole = torch.cat(halves) if name == "per_case" else halves[0] + halves[1]
    torch.testing.assert_close(whole, compute(*case.arguments))


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_is_accumulated_in_float32(name: str) -> None:
    """bfloat16 in, float32 out: sums of thousands of rows keep their digits, under autocast too."""
    x, d = torch.randn(64, 40, 3).bfloat16(), torch.randn(64, 40, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = sum_of(name, x, d, True, (1, 2, 4))
    assert computed.dtype is torch.float32
    exact = defined(name, Case(x.double(), d.double(), True, (1, 2, 4)))
    torch.testing.assert_close(computed, exact.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "bias"),
    [
        *(pytest.param(form, True, marks=[] if form in ("groups", "ids") else pytest.mark.slow) for form in FORMS),
        ("ids", False),
    ],
)
def test_all_statistics_compile_into_one_graph(form: str, bias: bool) -> None:
    case = FORMS[form](bias)

    def everything(rows: Tensor, grad_rows: Tensor) -> list[Tensor]:
        kept = grad_rows.flatten(2)[..., 0] > 0
        given = (rows, grad_rows, case.bias, case.matrix)
        return [sum_of(name, *given, mask) for name in NAMES for mask in (None, kept)]

    torch.compiler.reset()
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(case.rows, case.grad_rows), everything(case.rows, case.grad_rows))


def test_rows_are_widened_unless_both_are_wide() -> None:
    x, d = torch.randn(2, 1, 1, 3), torch.randn(2, 1, 1, 2)
    for of_x, of_d in ((x, d.bfloat16()), (x.bfloat16(), d), (torch.tensor([[0], [2]]), d.bfloat16())):
        wide = statistics.Rows(of_x, of_d, bias=False, matrix=(1, 2, 3)).widened()
        assert wide.d.dtype == torch.float32 and wide.x.dtype in (torch.float32, torch.int64)
    rows = statistics.Rows(x, d, bias=False, matrix=(1, 2, 3))
    assert rows.widened() is rows


def test_golden_fully_connected_diagonal() -> None:
    x, d = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([[[1.0, -1.0]], [[2.0, 0.5]]])
    square = sum_of("square", x, d, True, (1, 2, 3)) / 2
    torch.testing.assert_close(square[0].mT, torch.tensor([[18.5, 1.625], [34.0, 4.0], [2.5, 0.625]]))


def test_golden_pointwise_convolution() -> None:
    x, d = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[1.0], [-1.0]]])
    values = {name: sum_of(name, x, d, False, (1, 1, 2)) for name in NAMES}
    torch.testing.assert_close(values["square"][0].mT, torch.tensor([[4.0], [4.0]]))
    torch.testing.assert_close(values["A"] / values["count"], torch.tensor([[[5.0, 7.0], [7.0, 10.0]]]))
    torch.testing.assert_close(values["G"] / values["count"], torch.tensor([[[1.0]]]))


def test_golden_scale_and_shift() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).view(2, 1, 3, 1)
    d = torch.tensor([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]]).view(2, 1, 3, 1)
    p = sum_of("per_case", x, d, True, (3, 1, 2)).view(2, 3, 2).mT.flatten(1)  # scales before shifts
    torch.testing.assert_close(p, torch.tensor([[1.0, 0, -3, 1, 0, -1], [8.0, 5, 0, 2, 1, 0]]))
    square = sum_of("square", x, d, True, (3, 1, 2)).view(3, 2).mT.flatten() / 2
    torch.testing.assert_close(square, torch.tensor([32.5, 12.5, 4.5, 2.5, 0.5, 0.5]))


def test_golden_ids() -> None:
    ids, d = torch.tensor([[0], [1], [4], [1]]), torch.ones(4, 1, 1)
    values = {name: sum_of(name, ids, d, False, (1, 1, 5)) for name in ("count", "A_diag")}
    torch.testing.assert_close(values["A_diag"] / values["count"], torch.tensor([[0.25, 0.5, 0, 0, 0.25]]))


@pytest.mark.parametrize("bias", [False, True])
def test_without_a_row_all_sums_are_zero(bias: bool) -> None:
    x, d = randn(0, 3, 1, 2), randn(0, 3, 1, 4)
    for name in ("count", "A", "A_diag", "G", "G_diag", "gradient"):
        found = sum_of(name, x, d, bias, (1, 4, 2 + bias))
        assert tuple(found.shape) == named(name).shape((1, 4, 2 + bias), 0)
        assert not found.any()
