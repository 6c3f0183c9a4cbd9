"""The report of hand-made Programs, text by text."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.compiled.report import WIDTH, Report, percent
from kfac_fx.passes.ir import CONTAINED, Note, Program
from tests.models import ZOO
from tests.runtime.toy_reports import registration_of, small_program, traced


@pytest.fixture
def program() -> Program:
    return small_program()


TEXT = """\
kfac_fx registered 1,547 of 1,547 trainable parameters in 6 Fisher blocks,
  99.93 % of them structured

   layer             parameters     uses  Fisher block      factors
-  ----------------  -------------  ----  ----------------  -----------------
0  conv2d            stem.{weight,     1  kronecker         A 28 x 28,
                     bias}                                  G 16 x 16
1  depthwise_conv2d  dw.{weight,       1  kronecker per     16 of (A 10 x 10,
                     bias}                channel           G 1 x 1)
2  conv2d            pw.{weight,       1  kronecker         A 17 x 17,
                     bias}                                  G 32 x 32
3  scale_and_shift   norm.{weight,     1  full (linked)     F 64 x 64
                     bias}
4  linear            head.{weight,     3  kronecker,        A 33 x 33,
                     bias}                independent       G 10 x 10
5  generic           temperature       1  generic diagonal  F diag 1

generic   temperature: no layer has the form of mul_2 (model.py:41)
dropped   none
unused    none
memory    36.2 KiB of factors, 36.2 KiB of inverses (float32)
passes    trace 61 nodes, match 7 uses, rewrite 7 taps"""


def test_the_text_says_what_became_of_every_parameter(program: Program) -> None:
    assert str(Report(program)) == "\n".join(line.rstrip() for line in TEXT.splitlines())


def test_the_text_is_the_same_again_and_as_repr(program: Program) -> None:
    report = Report(program)
    assert str(report) == repr(report) == str(Report(program))


def test_matches_that_larger_ones_contain_are_not_shown_as_dropped(program: Program) -> None:
    program = program.but(dropped=(Note("linear(stem.weight)", CONTAINED.format("linear(stem.weight, stem.bias)")),))
    assert "dropped   none" in str(Report(program)).splitlines()


def test_the_data_has_the_promised_keys(program: Program) -> None:
    program = program.but(dropped=(Note("linear(head.weight)", "splits the linked group"),))
    data = Report(program).to_dict()
    assert list(data) == [
        "parameters",
        "registrations",
        "dropped",
        "submodules",
        "cases",
        "losses",
        "python",
        "paths",
        "sampling",
        "casts",
        "fallbacks",
        "passes",
    ]
    assert data["parameters"] == {
        "total": 1547, "registered": 1547, "structured": 1546, "generic": 1, "unused": [], "behind no loss": [],
        "frozen": [],
    }  # fmt: skip
    assert data["registrations"][1] == {
        "layer": "depthwise_conv2d",
        "parameters": ["dw.weight", "dw.bias"],
        "uses": 1,
        "block": "kronecker per channel",
        "approximation": "kron",
        "factors": {"A": [16, 10, 10], "G": [16, 1, 1]},
        "reason": None,
    }
    assert data["registrations"][5]["reason"] == "no layer has the form of mul_2 (model.py:41)"
    assert data["dropped"] == [{"subject": "linear(head.weight)", "reason": "splits the linked group"}]
    assert data["passes"][0] == {"name": "trace", "nodes": 61, "seconds": 0.25}


def test_json_holds_the_same_data(program: Program) -> None:
    assert json.loads(Report(program).to_json()) == Report(program).to_dict()


def test_unused_parameters_are_counted_and_named(program: Program) -> None:
    program = program.but(registrations=program.registrations[:-1], unused=("temperature",))
    report = Report(program)
    assert str(report).splitlines()[0] == "kfac_fx registered 1,546 of 1,547 trainable parameters in 5 Fisher blocks"
    assert "unused    temperature" in str(report).splitlines()
    assert report.to_dict()["parameters"]["unused"] == ["temperature"]
    assert report.to_dict()["parameters"]["registered"] == 1546


def test_a_reason_for_a_structured_choice_is_told(program: Program) -> None:
    first, *rest = program.registrations
    program = program.but(registrations=(replace(first, reason="proof failed once"), *rest))
    assert "reasons   stem.{weight, bias}: proof failed once" in str(Report(program)).splitlines()


def test_counters_are_read_when_the_report_is_shown(program: Program) -> None:
    counts = {"skipped updates": 0, "failed decompositions": 0}
    report = Report(program, counters=lambda: counts)
    assert str(report).splitlines()[-1] == "runtime   skipped updates 0, failed decompositions 0"
    counts["skipped updates"] = 1234
    assert str(report).splitlines()[-1] == "runtime   skipped updates 1,234, failed decompositions 0"
    assert "runtime" not in json.loads(report.to_json())


def test_what_a_collection_left_out_is_told() -> None:
    x = torch.randn(4, 3)
    lc = kfac_fx.LayerCollection(kfac_fx.capture(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), (x,)))
    lc.register_categorical_predictive_distribution(lc.outputs_of("1"))
    lc.register_fully_connected(("0.weight", "0.bias"), None, lc.outputs_of("0"))
    report = kfac_fx.compile(lc, variables=["0.weight", "0.bias"], verify=False).report
    assert report.left_out == ("1.weight", "1.bias")
    assert "left out  1.weight, 1.bias: not registered, so they follow KFAC's" in str(report)
    assert "fallback  no registration was proved: verify=False" in str(report)


def test_parameters_that_are_frozen_after_compile_are_told() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)
            self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
            self.second.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) + (self.first(x).to(torch.complex64) @ self.weight).abs()

    net = kfac_fx.compile(Complex(), (torch.randn(5, 4),), loss="mse")
    assert net.report.frozen == () and "frozen" not in str(net.report)  # second.bias was never trained
    net.model.first.requires_grad_(False)
    net.model.weight.requires_grad_(False)
    assert net.report.to_dict()["parameters"]["frozen"] == ["weight", "first.weight", "first.bias"]
    line = "weight, first.{weight, bias}: not trained while requires_grad is False"
    assert line in " ".join(str(net.report).split()) and line in net.report.to_html()
    net.model.requires_grad_(True)
    assert net.report.frozen == ()


def test_fallbacks_are_told_once_there_are_any(program: Program) -> None:
    told: list[str] = []
    report = Report(program, fallbacks=lambda: told)
    assert "fallback" not in str(report)
    told.append("slow: no rule for it")
    assert str(report).splitlines()[-1] == "fallback  slow: no rule for it"
    assert report.to_dict()["fallbacks"] == told


def test_embeddings_have_a_diagonal_input_side_and_large_numbers_separators() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(50257, 8))

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding(ids, self.weight)

    program = traced(Table())
    program = program.but(
        registrations=(registration_of(program, "embedding", ("weight",), ("embedding",), "kron_in_diag"),)
    )
    report = Report(program)
    assert report.rows[0].factors_text == "A diag 50,257, G 8 x 8"
    assert report.headline == "kfac_fx registered 402,056 of 402,056 trainable parameters in 1 Fisher block"
    assert report.memory == "196.6 KiB of factors, 196.6 KiB of inverses (float32)"


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        (torch.bfloat16, "36.2 KiB of factors, 36.2 KiB of inverses (float32)"),
        (torch.float64, "72.3 KiB of factors, 72.3 KiB of inverses (float64)"),
    ],
)
def test_factors_are_at_least_float32(program: Program, dtype: torch.dtype, memory: str) -> None:
    parameters = {name: nn.Parameter(value.detach().to(dtype)) for name, value in program.parameters.items()}
    assert Report(program.but(parameters=parameters)).memory == memory


def test_a_report_without_registrations() -> None:
    text = str(Report(Program(fx.Graph(), nn.Module(), {}, {})))
    assert text.splitlines()[0] == "kfac_fx registered 0 of 0 trainable parameters in 0 Fisher blocks"
    assert "memory    0 bytes of factors, 0 bytes of inverses (none)" in text.splitlines()


def test_long_lists_are_cut_in_text_and_whole_on_demand(program: Program) -> None:
    notes = tuple(Note(f"linear(layers.{n}.weight)", f"part of something larger, {'x' * n}") for n in range(1200))
    program = program.but(dropped=notes, unused=tuple("abcdefghi"))
    lines = str(Report(program)).splitlines()
    first = lines.index("dropped   linear(layers.0.weight): part of something larger,")
    assert lines[first + 8] == "          ... and 1,192 more, all in to_text(expand=True)"
    assert lines[first + 9] == "unused    a"
    assert lines[first + 17] == "          i"  # a line that says "1 more" could be the line itself
    assert len(Report(program).to_dict()["dropped"]) == 1200
    assert "linear(layers.1199.weight)" in Report(program).to_text(expand=True)


def test_lists_of_equal_layers_are_one_line(program: Program) -> None:
    notes = tuple(Note(f"linear(layers.{n}.weight)", f"part of add_{n}") for n in range(1200))
    program = program.but(dropped=notes, unused=tuple(f"layers.{n}.bias" for n in range(12)))
    lines = str(Report(program)).splitlines()
    assert "dropped   linear(layers.0..1199.weight) (1,200 x): part of add_0" in lines
    assert "unused    layers.0..11.bias (12 x)" in lines


def test_no_line_is_wider_than_a_terminal(program: Program) -> None:
    long = ".".join(["encoder", *(f"block_{n}" for n in range(30)), "weight"])
    program = program.but(dropped=(Note(f"linear({long})", "it splits the linked parameters " + long),))
    for width in (60, WIDTH, 120):
        assert max(map(len, Report(program).to_text(width=width).splitlines())) <= width
    assert Report(program).to_text(width=120).count("\n") < str(Report(program)).count("\n")


def deep(layers: int) -> Report:
    model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(8, 8), nn.Tanh())))
    return kfac_fx.compile(model, loss="mse", verify=False).report


def test_equal_layers_of_a_deep_model_are_one_row() -> None:
    report = deep(150)
    assert str(report).splitlines()[2:7] == [
        "   layer   parameters                     uses  Fisher block  factors",
        "-  ------  -----------------------------  ----  ------------  ----------------",
        "0  linear  0..298.{weight, bias} (150 x)     1  kronecker     A 9 x 9, G 8 x 8",
        "",
        "generic   none",
    ]
    expanded = report.to_text(expand=True).splitlines()
    assert len(expanded) == 149 + len(str(report).splitlines())
    assert "149  linear  298.{weight, bias}     1  kronecker     A 9 x 9, G 8 x 8" in expanded
    assert len(report.rows) == len(report.to_dict()["registrations"]) == 150


def test_a_short_table_has_all_rows() -> None:
    assert "(19 x)" not in str(deep(19)) and "(20 x)" in str(deep(20))


def test_the_text_is_ascii_whatever_the_names_are(program: Program) -> None:
    program = program.but(dropped=(Note("linear(größe.weight)", "→"),))
    assert str(Report(program)).isascii()
    assert r"linear(gr\xf6\xdfe.weight): \u2192" in str(Report(program))


@pytest.mark.parametrize(("part", "text"), [(1000000, "100 %"), (999999, "99.99 %"), (500000, "50 %"), (0, "0 %")])
def test_only_all_is_a_hundred_percent(part: int, text: str) -> None:
    assert percent(part, 1000000) == text


# --- of compiled models ---------------------------------------------------------------------------------------------


def test_the_report_of_a_compiled_model() -> None:
    case = ZOO["two_biases"]
    net = kfac_fx.compile(case.make(), case.inputs(), loss=case.loss)
    reason = "weight is shared by uses with other parameters"
    assert str(net.report).splitlines()[:-3] == [
        "kfac_fx registered 24 of 24 trainable parameters in 3 Fisher blocks",
        "",
        "   layer   parameters  uses  Fisher block            factors",
        "-  ------  ----------  ----  ----------------------  ----------------",
        "0  linear  weight         2  kronecker, independent  A 4 x 4, G 4 x 4",
        "1  linear  first          1  kronecker               A 1 x 1, G 4 x 4",
        "2  linear  second         1  kronecker               A 1 x 1, G 4 x 4",
        "",
        "generic   none",
        f"reasons   weight: {reason}",
        f"          first: {reason}",
        f"          second: {reason}",
        "dropped   none",
        "unused    none",
        "memory    264 bytes of factors, 264 bytes of inverses (float32)",
    ]


def test_generic_parameters_say_where_they_are_used() -> None:
    case = ZOO["generic"]
    report = kfac_fx.compile(case.make(), case.inputs(), loss=case.loss).report
    (line,) = [line for line in str(report).splitlines() if "temperature: " in line]
    assert re.fullmatch(r" {10}temperature: no layer has the form of atan2 \(odd.py:\d+\) through exp", line)
    assert {row.parameters: row.uses for row in report.rows if row.generic} == {
        ("gate",): 1, ("width",): 1, ("temperature",): 1
    }  # fmt: skip


def test_split_registrations_share_the_node_of_their_use() -> None:
    case = ZOO["two_biases"]
    dot = kfac_fx.compile(case.make(), case.inputs(), loss=case.loss).report.to_dot()
    assert re.findall(r"r\d -> u\d", dot) == ["r0 -> u0", "r0 -> u1", "r1 -> u0", "r2 -> u1"]
    assert re.findall(r"u\d -> u\d", dot) == ["u0 -> u1"]


def test_data_enters_a_use_on_every_side() -> None:
    """A position's embedding is added to a token's: the sum is the position's use, and reads the token's."""
    case = ZOO["gpt"]
    net = kfac_fx.compile(case.make(), case.inputs(), loss=case.loss)
    assert [registration.layer for registration in net.registrations[:2]] == ["embedding", "embedding"]
    assert "u0 -> u1;" in net.report.to_dot()


def test_the_report_counts_what_an_attached_optimizer_met() -> None:
    case = ZOO["mlp"]
    (x,) = case.inputs()
    net = kfac_fx.compile(case.make(), (x,), loss=case.loss)
    assert "runtime" not in str(net.report)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long)).backward()
    optimizer.step()
    counted = "steps 1, skipped steps 0, of these undone by checks 0, skipped statistics 0, failed decompositions 0"
    assert net.report.to_text(width=120).splitlines()[-1] == f"runtime   {counted}"


def test_a_report_is_not_pickled(program: Program) -> None:
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"a Report cannot be copied or pickled.*str\(net.report\)"):
            copied(Report(program))
