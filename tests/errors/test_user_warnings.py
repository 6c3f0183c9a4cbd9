"""A warning names the file and the line of the user's call, whatever lies between that call and the warning."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx.passes.errors import warn_user
from tests.errors.test_floors import SOURCES
from tests.runtime.slow_kfac import batch, mlp

Step = Callable[[kfac_fx.KFAC, Callable[[], Tensor]], int]


def line() -> int:
    """The line of the call of this function."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def deep(depth: int, name: str | None, inner: Callable[[], None]) -> Callable[[], None]:
    """`inner`, called through `depth` frames of a module of this name; without a name, of generated code."""
    for _ in range(depth):
        scope: dict[str, Any] = {"inner": inner} if name is None else {"inner": inner, "__name__": name}
        exec("def outer():\n    inner()", scope)
        inner = scope["outer"]
    return inner


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize(
    "module",
    [
        "kfac_fx.optim.step",
        "kfac_fx.passes.trace",
        "torch.optim.optimizer",
        "accelerate.optimizer",
        "transformers.trainer",
        "lightning.pytorch.core.optimizer",
        None,
    ],
)
def test_frames_of_the_library_of_torch_of_trainers_and_of_generated_code_are_skipped(
    depth: int, module: str | None
) -> None:
    call = deep(depth, module, library_function())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = (call(), line())[1]
    assert [(str(warning.message), warning.filename, warning.lineno) for warning in caught] == [
        ("text", __file__, expected)
    ]


def library_function() -> Callable[[], None]:
    """One that warns."""
    scope: dict[str, Any] = {"warn_user": warn_user, "__name__": "kfac_fx.optim.forwards"}
    exec("def function():\n    warn_user(UserWarning('text'))", scope)
    function: Callable[[], None] = scope["function"]
    return function


def test_a_module_whose_name_begins_like_ours_is_the_user_s() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deep(1, "kfac_fx_experiments", library_function())()
    assert [warning.filename for warning in caught] == ["<string>"]


def test_the_same_warning_is_shown_once_a_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            library_function()()
    assert len(caught) == 1


# --- warnings of a step ---------------------------------------------------------------------------------------------


def direct(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    closure()
    return (opt.step(), line())[1]


def by_closure(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    return (opt.step(closure), line())[1]


def after_a_scheduler(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    torch.optim.lr_scheduler.StepLR(opt, 1)  # wraps `step`
    closure()
    return (opt.step(), line())[1]


def in_a_profiler(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        closure()
        return (opt.step(), line())[1]


def in_no_grad(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    closure()
    return (torch.no_grad()(opt.step)(), line())[1]


def by_a_scaler(opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> int:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    closure()
    return (scaler.step(opt), line())[1]


STEPS = [direct, by_closure, after_a_scheduler, in_a_profiler, in_no_grad, by_a_scaler]


def warned(step: Step, opt: kfac_fx.KFAC, closure: Callable[[], Tensor]) -> tuple[list[tuple[type, str, int]], int]:
    """(category, file and line of every warning, the line of the step)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = step(opt, closure)
    return [(warning.category, warning.filename, warning.lineno) for warning in caught], expected


@pytest.mark.parametrize("step", STEPS)
def test_a_step_with_a_wrong_loss_is_named(step: Step) -> None:
    net = kfac_fx.compile(mlp(), loss="categorical")
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    x, y = batch(0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y, reduction="sum")
        loss.backward()
        return loss

    found, expected = warned(step, opt, closure)
    assert found == [(kfac_fx.LossScaleWarning, __file__, expected)]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_without_statistics_is_named(step: Step) -> None:
    net = kfac_fx.compile(mlp(), loss="categorical")
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    opt.step()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(net.model(x), y)
        loss.backward()
        return loss

    found, expected = warned(step, opt, closure)
    assert found == [(RuntimeWarning, __file__, expected)]


def test_every_warning_of_the_library_goes_through_warn_user() -> None:
    places = [
        f"{module}:{node.lineno}"
        for module, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit") and module != "passes.errors"
    ]
    assert places == []
