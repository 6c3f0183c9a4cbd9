"""The work of the passes grows with the graph, no faster: their lines are counted, so other processes do not matter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.errors import OWN_FOLDER
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.match import patterns_by_target
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.trace import trace_model


class Layers(nn.Module):
    """`number` layers of one kind, or of one weight, applied one after another."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(number))
        self.norms = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)), inplace=True)
        return x


class Steps(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in self.layers:
            x = torch.tanh(self.layers[0](x))
        return x


class Pairs(Layers):
    """Every layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(torch.tanh(layer(x))))
        return x


class Written(Layers):
    """Column by column into one memory."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], len(self.layers))
        for column, layer in enumerate(self.layers):
            out[:, column].copy_(layer(x)[:, 0])
        return out


class Sliced(nn.Module):
    """Slices of one weight and of one bias."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight, self.bias = nn.Parameter(torch.randn(2 * number, 2)), nn.Parameter(torch.randn(2 * number))

    def forward(self, x: Tensor) -> Tensor:
        for n in range(0, 2 * self.number, 2):
            x = torch.tanh(F.linear(x, self.weight[n : n + 2], self.bias[n : n + 2]))
        return x


class Half(nn.Module):
    """Parameters that are matched in one place and not in another."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = torch.tanh(x * gain) * gain.cumsum(0)
        return x


def linked(number: int) -> Options:
    return Options(linked={frozenset({f"layers.{n}.weight", f"layers.{n}.bias"}): None for n in range(number)})


def asked(number: int) -> Options:
    asked = {f"layers.{n}": "kron" for n in range(number)} | {"norms.*": "diagonal"}
    return Options(approximations=asked, modules={f"layers.{n}": nn.Linear for n in range(number)})


def series(number: int) -> Options:
    return Options(approximations={"linear": "kron_series_1"})


def plain(number: int) -> Options:
    return Options()


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """Lines of the passes that run inside, by function; not what they call, where Python collects garbage, too."""
    lines: Counter[CodeType] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith((OWN_FOLDER, __file__)):
            return None
        lines[frame.f_code] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def effort(model: type[nn.Module], options: Callable[[int], Options], number: int) -> dict[str, int]:
    """Lines of every pass and of the emitted module."""
    program = trace_model(model(number), None, options=options(number), layers=LAYERS).program
    found: dict[str, int] = {}
    for step in PIPELINE:
        with counted() as lines:
            program = run(program, [step])
        found[step.__name__] = lines.total()
    with counted() as lines:
        rewrite(program, lambda registration, use: Passing(), lambda *_: Passing())
    return {**found, "rewrite": lines.total()}


class Passing(nn.Module):
    """In the place of taps and links."""

    def forward(self, output: Tensor, *rest: Any) -> Tensor:
        return output


CASES = {
    "many layers": (Layers, plain),
    "linked groups": (Layers, linked),
    "requests by name": (Layers, asked),
    "uses of one layer": (Steps, plain),
    "a series": (Steps, series),
    "many series": (Pairs, series),
    "writes into one memory": (Written, plain),
    "pieces of one parameter": (Sliced, plain),
    "uses that no layer has": (Half, plain),
}


@pytest.mark.parametrize("case", CASES)
def test_twice_the_graph_takes_twice_the_effort(case: str) -> None:
    patterns_by_target(LAYERS)  # which are kept
    few, some, many = (effort(*CASES[case], number) for number in (4, 8, 16))
    first = {name: some[name] - few[name] for name in few}
    then = {name: many[name] - some[name] for name in few}  # twice as much if linear, four times if quadratic
    grows = {name: (first[name], then[name]) for name in few if then[name] > 2.2 * first[name] + 50}
    assert not grows


def test_what_grows_faster_is_seen() -> None:
    def quadratic(program: Program) -> Program:
        for _ in program.graph.nodes:
            for _ in program.graph.nodes:
                pass
        return program

    def lines(number: int) -> int:
        program = trace_model(Layers(number), None, layers=LAYERS).program
        with counted() as found:
            quadratic(program)
        return found.total()

    assert lines(32) - lines(16) > 3.5 * (lines(16) - lines(8))
