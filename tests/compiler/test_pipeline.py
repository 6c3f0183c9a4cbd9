"""The passes in their order, what each says of itself, and a Program as text."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx.passes
from kfac_fx.passes.check import check
from kfac_fx.passes.errors import TORCH, source_line, where
from kfac_fx.passes.ir import Program
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.match import match
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.pipeline import PIPELINE, SUBMODULES, SUMMARIES, after_registrations, run
from kfac_fx.passes.submodules import give_lookups
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.unroll import unroll
from tests.compiler.toy import Toy, before, node


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    return net


def test_every_pass_leaves_a_record() -> None:
    program = run(trace_model(model(), layers=LAYERS).program)
    assert [entry.name for entry in program.history] == [step.__name__ for step in PIPELINE]
    assert [(entry.nodes, entry.summary) for entry in program.history] == [
        (8, "8 nodes"), (8, "8 nodes"), (8, "1 output"), (8, "0 groups"), (8, "0 expressions"), (8, "2 uses"),
        (8, "0 pieces"), (8, "3 registrations, 0 dropped"), (8, "ok"),
    ]  # fmt: skip
    assert all(0 <= entry.seconds < 60 for entry in program.history)


def test_one_pass_alone() -> None:
    program = run(before("match", model()), (match,))
    assert [entry.name for entry in program.history][-1] == "match" and len(program.matches) == 2


def test_a_pass_that_breaks_the_grammar_is_named() -> None:
    def careless(program: Program) -> Program:
        return program.but(unused=("0.weight",), registrations=before("check", model()).registrations)

    with pytest.raises(AssertionError, match="bug in kfac_fx: careless"):
        run(before("check", model()), (careless,))


def test_a_program_is_readable() -> None:
    line = Path(nn.modules.linear.__file__).name
    graph, _, found = str(before("resolve", model())).partition("\n\n")
    assert graph.startswith("def forward(self, input):") and "tanh = torch.tanh(linear)" in graph
    lines = found.splitlines()
    assert lines[0] == "8 nodes, 4 parameters"
    assert lines[1].startswith("match         linear(0.weight, 0.bias) at linear")
    lines = str(run(trace_model(model(), layers=LAYERS).program)).partition("\n\n")[2].splitlines()
    assert lines[1:] == [
        "registration  linear(0.weight) kron_indep, 2 uses",
        "registration  linear(0.bias) kron, 1 use",
        "registration  linear(2.bias) kron, 1 use",
        "unused        spare",
    ]
    assert line not in "".join(lines)
    dropped = run(trace_model(Toy(lambda x, w, b: x @ w + b, w=(3, 3), b=(3,)), layers=LAYERS).program)
    assert "dropped       linear(w): contained in linear(w, b), which is kept" in str(dropped).splitlines()


def inner(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def test_a_node_is_placed_at_the_users_own_line() -> None:
    program = before("match", Toy(inner, w=(3, 3)))
    place = f"test_pipeline.py:{inner.__code__.co_firstlineno + 1}"
    assert source_line(node(program, "linear")) == place
    assert where(node(program, "linear")) == f"linear ({place})"
    node(program, "linear").meta["stack_trace"] = (
        '  File "/user/model.py", line 3, in forward\n    y = self.linear(x)\n'
        f'  File "{TORCH}nn/modules/linear.py", line 9, in forward\n    return F.linear(input, self.weight)\n'
    )
    assert source_line(node(program, "linear")) == "model.py:3"
    node(program, "linear").meta.clear()
    assert where(node(program, "linear")) == "linear"


def test_torch_export_knows_the_lines_of_forward() -> None:
    program = before("match", Toy(inner, w=(3, 3)), torch.randn(4, 3))
    assert where(node(program, "linear")) == f"linear (toy.py:{Toy.forward.__code__.co_firstlineno + 1})"


def test_both_names_of_the_package_are_one_set_of_modules() -> None:
    import passes

    assert passes is kfac_fx.passes and passes.pipeline.run is run


def test_what_passes_say_to_each_other_is_data() -> None:
    (one,) = before("match", nn.Linear(3, 2)).outputs
    assert isinstance(one, torch.fx.Node)
    record = run(before("match", nn.Linear(3, 2)), PIPELINE[3:4]).history[-1]
    assert pickle.loads(pickle.dumps(record)) == record


def test_every_summary_is_of_a_pass_that_runs() -> None:
    known = {*PIPELINE, *SUBMODULES, *after_registrations(check)}
    assert SUMMARIES.keys() <= known and known - SUMMARIES.keys() == {unroll, normalize, give_lookups}


def sequences(source: str) -> list[str]:
    """The calls of `run` with a sequence that has no name."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    runs = (call for call in calls if getattr(call.func, "id", "") == "run")
    return [
        ast.unparse(call)
        for call in runs
        if any(isinstance(argument, ast.Tuple | ast.List) for argument in call.args[1:])
    ]


def test_no_sequence_of_passes_is_written_elsewhere() -> None:
    assert sequences("run(program, (match, cut))") == ["run(program, (match, cut))"]
    root = Path(__file__).parents[2]
    files = [path for folder in ("kfac_fx", "passes") for path in (root / folder).rglob("*.py")]
    assert len(files) > 100 and [call for path in files for call in sequences(path.read_text())] == []
