"""Values that forward reads from outside, as the functions that run in it name them."""

from __future__ import annotations

import cProfile
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.tracing.settings import Observer, Outside, OutsideName, Walk

SCALE = 1.0
TABLE = {"scale": 1.0}
CALLS: list[int] = []
CONFIG = SimpleNamespace(scale=1.0)


class Constants:
    scale = 1.0


class Doubled(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Doubled.factor * x


def observed(function: Callable[[], Any]) -> Outside:
    observer = Observer()
    with observer.observing():
        function()
    return observer.outside()


def labels(function: Callable[[], Any]) -> list[str]:
    return [point.label for point in observed(function).points]


def inner() -> float:
    return SCALE


def test_globals_are_read_by_every_function_that_runs() -> None:
    assert "the global SCALE of test_outside.py" in labels(lambda: inner())
    assert "the global SCALE of test_outside.py" not in labels(lambda: None)


def test_globals_of_one_name_in_several_modules_are_all_read(tmp_path: Path) -> None:
    functions = []
    for value in (2.0, 3.0):
        namespace: dict[str, Any] = {"__name__": f"layers_{value:g}"}
        source = f"SCALE = {value}\ndef scale():\n    return SCALE"
        exec(compile(source, str(tmp_path / f"layers_{value:g}.py"), "exec"), namespace)
        functions.append(namespace["scale"])
    points = observed(lambda: [inner(), *(function() for function in functions)]).points
    assert sorted(point.value for point in points if point.name == "SCALE") == [1.0, 2.0, 3.0]


def test_values_of_classes_and_modules_are_read() -> None:
    assert "Constants.scale" in labels(lambda: Constants.scale)
    assert "torch.tanh" in labels(lambda: torch.tanh)


def test_a_module_that_a_function_imports_is_read() -> None:
    def function() -> Any:
        from tests.whole import stale_library

        return stale_library.SCALE

    assert any(label.endswith("stale_library.SCALE") for label in labels(function))


def test_the_environment_is_read_through_functions_of_python() -> None:
    points = observed(lambda: os.getenv("HOME")).points
    assert any(point.value is os.environ for point in points)


def test_the_cells_of_a_closure_are_those_of_the_function_that_ran() -> None:
    def make(factor: float) -> Callable[[], float]:
        return lambda: factor

    first, other = make(1.5), make(2.5)
    (point,) = [point for point in observed(first).points if "factor" in point.label]
    assert point.value == 1.5 and other() == 2.5
    both = [point.value for point in observed(lambda: first() + other()).points if "factor" in point.label]
    assert sorted(both) == [1.5, 2.5]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_cells_of_a_generator_that_waits_are_found(frozen: bool) -> None:
    def make(factor: float) -> Iterator[float]:
        while True:
            yield (lambda: factor)()

    def numbers() -> Iterator[float]:
        while True:
            yield scale

    scale, first = 1.5, make(2.5)
    second = numbers()
    if frozen:
        gc.freeze()
    try:
        assert any("scale in the closure of numbers" in label for label in labels(lambda: next(first) * next(second)))
    finally:
        gc.unfreeze()


def test_functions_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search through all objects of the process takes longer than the capture of a small model."""
    monkeypatch.delattr(gc, "get_referrers")

    def function() -> Any:
        scale = 2.0
        by = [n * scale for n in range(2)], {n * scale for n in range(2)}, {n: n * scale for n in range(2)}
        return *by, sum(n * scale for n in range(2))

    (label,) = [label for label in labels(lambda: function()) if "in the closure" in label]
    assert label.startswith("function in the closure of <lambda> ")


def test_functions_of_torch_are_followed_in_its_modules_only() -> None:
    points = labels(lambda: nn.Linear(2, 2)(torch.ones(1, 2)))
    assert "F.linear" in points and not any("_C" in label and "global" in label for label in points)


def test_names_are_attributes_and_strings() -> None:
    assert {"shape", "width"} <= observed(lambda: getattr(torch.ones(2).shape, "width", None)).names


def test_what_is_changed_is_put_back() -> None:
    def function() -> None:
        global SCALE, LATER
        SCALE, LATER = 5.0, 1
        CALLS.append(1)
        TABLE["new"] = 2.0
        CONFIG.scale = 3.0

    observed(function)
    assert (SCALE, CALLS, TABLE, CONFIG.scale) == (1.0, [], {"scale": 1.0}, 1.0)
    assert "LATER" not in globals()


def test_a_function_that_prints_has_an_effect() -> None:
    (effect,) = observed(lambda: print("a line")).effects
    assert effect.startswith("prints (test_outside.py:")
    assert observed(lambda: str(print)).effects == ()
    (effect,) = observed(lambda: print("a line", file=sys.stderr)).effects
    assert effect.startswith("prints (test_outside.py:")


def test_what_a_library_writes_where_errors_go_is_no_print(capsys: pytest.CaptureFixture[str]) -> None:
    """torch warns of what it does in forward."""
    handler = logging.lastResort
    assert handler is not None
    record = logging.makeLogRecord({"msg": "of a library", "levelno": logging.WARNING})
    assert observed(lambda: handler.handle(record)).effects == ()
    assert capsys.readouterr().err == "of a library\n"


@pytest.mark.parametrize("read", ["is_contiguous", "stride", "as_strided"])
def test_a_forward_that_asks_for_the_layout_is_told(read: str) -> None:
    functions: dict[str, Callable[[], Any]] = {
        "is_contiguous": lambda: torch.ones(2).is_contiguous(),
        "stride": lambda: torch.ones(2).stride(),
        "as_strided": lambda: torch.ones(2).as_strided((1,), (1,)),
    }
    assert observed(functions[read]).reads_layout
    assert not observed(lambda: torch.ones(2).contiguous()).reads_layout
    assert observed(lambda: torch.ones(2).requires_grad).reads_trained


def test_a_forward_that_sets_whether_a_tensor_is_trained_does_not_ask() -> None:
    def forward() -> None:
        torch.ones(2).requires_grad = True

    outside = observed(forward)
    assert "requires_grad" in outside.names and not outside.reads_trained


def test_entries_of_torchs_classes_are_not_read_through_a_users_class() -> None:
    """They are replaced while a model runs, and what is replaced is not another forward."""
    labels = [point.label for point in observed(lambda: Doubled.apply(torch.ones(2))).points]  # type: ignore[no-untyped-call]
    assert "Doubled.apply" not in labels and "Doubled.factor" in labels


def test_a_tracer_and_a_profiler_go_on_afterwards() -> None:
    calls: list[str] = []

    def tracer(frame: Any, event: str, argument: Any) -> None:
        calls.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with cProfile.Profile() as profile:
            observed(lambda: None)
            calls.clear()
            inner()
    finally:
        sys.settrace(before)
    profile.create_stats()
    assert "inner" in calls
    assert any(name == "inner" for _, _, name in profile.stats)  # type: ignore[attr-defined]


class Branches(nn.Module):
    """A condition of torch whose branches are methods, partial functions or modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Linear(3, 3), nn.Linear(3, 3)

    def on_the_left(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x)
        return y

    def on_the_right(self, x: Tensor) -> Tensor:
        y: Tensor = self.right(x)
        return y

    def forward(self, x: Tensor) -> Any:
        methods = self.on_the_left, self.on_the_right
        branches = {
            "methods": methods,
            "partial functions": tuple(partial(method) for method in methods),
            "modules": (self.left, self.right),
        }
        return torch.cond(x.sum() > 0, *branches[self.kind], (x,))


@pytest.mark.parametrize("kind", ["methods", "partial functions", "modules"])
def test_the_observer_is_not_in_the_way_of_functions_that_torch_calls(kind: str) -> None:
    """torch.cond compiles its branches, and Dynamo follows no `sys.gettrace`."""
    capture = trace_model(Branches(kind), (torch.randn(4, 3),))
    assert "cond" in [op_name(node) for node in capture.program.graph.nodes]


def test_a_name_that_is_none_is_not_missing() -> None:
    holder: dict[str, Any] = {}
    name = OutsideName("the global SCALE", holder, "SCALE")
    missing = name.summary(Walk())
    holder["SCALE"] = None
    assert name.summary(Walk()) != missing


def test_functions_of_the_garbage_collector_are_no_part_of_forward() -> None:
    def collected(phase: str, _: dict[str, Any]) -> None:
        CALLS.append(len(phase))

    def cycles() -> None:
        for _ in range(10 * gc.get_threshold()[0]):
            cycle: list[Any] = []
            cycle.append(cycle)

    gc.callbacks.append(collected)
    try:
        assert "the global CALLS of test_outside.py" not in labels(cycles)
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(collected)
        CALLS.clear()
