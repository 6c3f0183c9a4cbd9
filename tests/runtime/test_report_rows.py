"""Rows of the report: the words for a block, the shapes of its factors, and where generic parameters are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.compiled.report import (
    ReportRow,
    block_words,
    casts,
    factor_dtype,
    factor_text,
    fold,
    generic_places,
    memory_text,
    row_of,
    rows,
    uses_of,
)
from kfac_fx.passes.ir import Bound, Program, Registration, Use
from kfac_fx.passes.matrix import Layout
from tests.runtime.toy_reports import registration_of, small_program, traced
from tests.tables import pairs


@pytest.fixture
def program() -> Program:
    return small_program()


def head(program: Program, approximation: str = "kron", **changes: object) -> Registration:
    registration = registration_of(program, "linear", ("head.weight", "head.bias"), ("linear",), approximation)
    return replace(registration, **changes)  # type: ignore[arg-type]


def row(program: Program, registration: Registration) -> ReportRow:
    return row_of(registration, program, Counter())


class Rounded(nn.Module):
    """One weight in two precisions."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.cast = nn.Linear(4, 4), cast

    def forward(self, x: Tensor) -> Tensor:
        weight = self.cast(self.a.weight.t()).t()
        return self.a(x) + F.linear(x.to(weight.dtype), weight).to(x.dtype)


@pairs(
    (
        "cast, dtype",
        [
            (lambda w: w.float(), "float32"),
            (lambda w: w.half(), "float16"),
            (lambda w: w.bfloat16(), "bfloat16"),
            (lambda w: w.to(torch.float32), "float32"),
            (lambda w: w.to(dtype=torch.bfloat16), "bfloat16"),
            (lambda w: w.type(torch.float32), "float32"),
        ],
    ),
    ("inputs", {"fx": None, "export": (torch.ones(2, 4, dtype=torch.float64),)}),
)
def test_casts_to_a_coarser_precision_are_told(
    cast: Callable[[Tensor], Tensor], dtype: str, inputs: tuple[Tensor] | None
) -> None:
    net = kfac_fx.compile(Rounded(cast).double(), inputs, loss="normal", verify=False)
    (line,) = casts(net.program)
    assert line.startswith(f"a.weight: cast to {dtype} in ") and "test_report_rows.py:" in line
    assert line in net.report.to_dict()["casts"] and f"casts     a.weight: cast to {dtype}" in str(net.report)


def test_casts_of_data_or_to_a_finer_precision_are_not_told() -> None:
    assert casts(kfac_fx.compile(Rounded(lambda w: w.double()), loss="normal").program) == []
    assert casts(kfac_fx.compile(Rounded(lambda w: w.contiguous()), loss="normal").program) == []


@pytest.mark.parametrize(
    ("approximation", "words", "text", "shapes"),
    [
        ("kron", "kronecker", "A 33 x 33, G 10 x 10", {"A": [1, 33, 33], "G": [1, 10, 10]}),
        ("kron_in_diag", "kronecker", "A diag 33, G 10 x 10", {"A": [1, 33], "G": [1, 10, 10]}),
        ("kron_out_diag", "kronecker", "A 33 x 33, G diag 10", {"A": [1, 33, 33], "G": [1, 10]}),
        ("kron_both_diag", "kronecker", "A diag 33, G diag 10", {"A": [1, 33], "G": [1, 10]}),
        ("diagonal", "diagonal", "F diag 330", {"F": [330]}),
        ("full", "full", "F 330 x 330", {"F": [330, 330]}),
    ],
)
def test_block_and_factors_in_words(
    program: Program, approximation: str, words: str, text: str, shapes: dict[str, list[int]]
) -> None:
    shown = row(program, head(program, approximation))
    assert (shown.block, shown.factors_text, shown.to_dict()["factors"]) == (words, text, shapes)


def test_groups_of_several_outputs_are_called_groups() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.weight, groups=2)

    program = traced(Grouped())
    node = next(node for node in program.graph.nodes if node.name == "conv1d")
    stored = Layout((8, 3, 5))
    bound = Bound("weight", stored, stored.rearrange("(g o) i k -> g o (i k)", g=2))
    use = Use("conv1d", 0, node.all_input_nodes[0], node, {"weight": bound}, {}, frozenset({node}))
    shown = row(program, Registration("conv1d", use.matrix, ("weight",), (use, use), "kron"))
    assert (shown.block, shown.factors_text) == ("kronecker per group, independent", "2 of (A 15 x 15, G 4 x 4)")


@pytest.mark.parametrize(
    ("registration", "words"),
    [
        ("stem", "kronecker"),
        ("dw", "kronecker per channel"),
        ("head", "kronecker, independent"),
        ("norm", "full (linked)"),
        ("temperature", "generic diagonal"),
    ],
)
def test_the_words_for_a_block(program: Program, registration: str, words: str) -> None:
    (found,) = [r for r in program.registrations if r.parameters[0].split(".")[0] == registration]
    assert block_words(found, program) == words


def test_words_that_an_approximation_or_a_mask_adds(program: Program) -> None:
    assert block_words(head(program, "kron_reduce"), program) == "kronecker, reduced"
    assert block_words(head(program, patch_mask=(1.0,)), program) == "kronecker, masked patches"


def test_a_series_has_its_lagged_factors_and_is_not_called_independent(program: Program) -> None:
    whole = registration_of(program, "linear", ("head.weight", "head.bias"), ("linear", "linear_1"), "kron_series_1")
    shown = row(program, whole)
    assert shown.block == "kronecker, series 1"
    assert shown.factors == {"A": (1, 33, 33), "G": (1, 10, 10), "A1": (1, 33, 33), "G1": (1, 10, 10)}


def test_a_side_in_diagonal_blocks_is_told_with_their_number(program: Program) -> None:
    shown = row(program, head(program, blocks=(2, 3)))
    assert shown.factors == {"A": (3, 11, 11), "G": (2, 5, 5)}
    assert shown.factors_text == "A 3 blocks of 11 x 11, G 2 blocks of 5 x 5"
    assert shown.bytes == 4 * (3 * 11 * 11 + 2 * 5 * 5)


def test_the_factors_have_the_precision_of_the_parameters_and_float32_at_least(program: Program) -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        parameters = {name: nn.Parameter(value.detach().to(dtype)) for name, value in program.parameters.items()}
        assert factor_dtype(head(program), parameters) == wanted


def test_the_report_says_the_precision_that_the_factors_of_mixed_parameters_have() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.t() + self.b

    x = torch.randn(5, 4)
    net = kfac_fx.compile(Mixed(), (x,), loss="normal")
    est = kfac_fx.FisherEstimator(net)
    est.update_covariances(x)
    (block,) = est.blocks.values()
    assert factor_dtype(block.registration, dict(net.named_parameters())) == block.factors["A"].value.dtype
    assert net.report.rows[0].bytes == sum(4 * block.factors[name].value.numel() for name in "AG")


def test_a_generic_parameter_has_as_many_uses_as_places_where_it_meets_the_data(program: Program) -> None:
    places = generic_places(program)
    assert places["temperature"] == 1 and places["head.weight"] == 3
    (generic,) = [registration for registration in program.registrations if registration.generic]
    assert uses_of(generic, places) == 1
    both = replace(generic, parameters=("temperature", "head.weight"))
    assert uses_of(both, places) == 3  # not 4: the places of two parameters may be the same


def test_uses_in_submodules_count_the_calls_of_the_first_batch(program: Program) -> None:
    called = head(program, called=True)
    (use,) = called.uses
    assert uses_of(replace(called, uses=(replace(use, calls=3), replace(use, calls=None))), Counter()) == 3
    assert uses_of(replace(called, called=False), Counter()) == 1


def test_every_registration_has_a_row_in_its_order(program: Program) -> None:
    shown = rows(program)
    assert [r.parameters for r in shown] == [r.parameters for r in program.registrations]
    assert shown[0].cells == ("conv2d", "stem.{weight, bias}", "1", "kronecker", "A 28 x 28, G 16 x 16")
    assert shown[0].elements == 16 * 3 * 9 + 16 and shown[1].groups == 16


@pytest.mark.parametrize(
    ("shape", "blocks", "text"),
    [((10, 10), 1, "A 10 x 10"), ((50257,), 1, "A diag 50,257"), ((64, 64), 8, "A 8 blocks of 64 x 64")],
)
def test_a_factor_in_words(shape: tuple[int, ...], blocks: int, text: str) -> None:
    assert factor_text("A", shape, blocks) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("stem.weight", "stem.bias"), "stem.{weight, bias}"),
        (("weight", "bias"), "{weight, bias}"),
        (("temperature",), "temperature"),
        (("a.weight", "b.weight"), "a.weight, b.weight"),
        (("a.weight", "b.bias", "a.bias"), "a.{weight, bias}, b.bias"),
    ],
)
def test_names_of_one_module_are_folded(names: tuple[str, ...], text: str) -> None:
    assert fold(names) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (37020, "36.2 KiB"), (3 << 20, "3.0 MiB"),
     (5 << 30, "5.0 GiB"), (7 << 40, "7.0 TiB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert memory_text(count) == text


def test_the_memory_of_factors_is_that_of_their_precision(program: Program) -> None:
    double = program.but(parameters={name: nn.Parameter(p.double()) for name, p in program.parameters.items()})
    single = row(program, head(program))
    assert single.bytes == 4 * (33 * 33 + 10 * 10) and row(double, head(program)).bytes == 2 * single.bytes


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kind(x), self.size(x)


def test_a_head_in_no_loss_is_in_the_headline() -> None:
    x, heads = torch.randn(5, 3), ("kind", "size")
    for left_out, text in ((heads[1:], "1 block without curvature: no loss depends on it"), ((), "")):
        kept = [number for number, name in enumerate(heads) if name not in left_out]
        net = kfac_fx.compile(TwoHeads(), (x,), loss=lambda o, kept=kept: [kfac_fx.losses.Normal(o[n]) for n in kept])
        assert ("without curvature" in net.report.headline) == bool(left_out) and net.report.headline.endswith(text)
        assert " ".join(net.report.to_text().split()).startswith(net.report.headline)


def test_a_report_is_written_where_its_page_is_wanted(tmp_path: Path) -> None:
    report = kfac_fx.compile(nn.Linear(3, 2), (torch.randn(2, 3),), loss="normal").report
    assert report.to_html(tmp_path / "report.html") == report.to_html() == (tmp_path / "report.html").read_text("utf-8")
