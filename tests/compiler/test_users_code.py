"""Which lines are the user's own, wherever they are asked for."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
from torch import fx, nn

from kfac_fx.passes.errors import OWN_FOLDER, TORCH, running_line, source_line, where
from kfac_fx.passes.trace import untraceable
from kfac_fx.passes.tracing.settings import followed

BESIDE = f"{OWN_FOLDER[:-1]}_experiments/model.py"  # a package of the user's, beside the library
FOREIGN = [f"{TORCH}nn/functional.py", f"{OWN_FOLDER}passes/normalize.py", "<eval_with_key>.0", contextlib.__file__]


def stack(*paths: str) -> str:
    return "\n".join(f'  File "{path}", line {10 + n}, in forward\n    code' for n, path in enumerate(paths))


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (stack("/home/me/model.py"), "model.py:10"),
        (stack("/home/me/model.py", "/home/me/block.py"), "block.py:11"),
        *((stack("/home/me/model.py", file), "model.py:10") for file in FOREIGN),
        (stack(*FOREIGN), None),
        (stack("/home/me/torch/model.py"), "model.py:10"),
        (stack(BESIDE), "model.py:10"),
        (f'{stack("/home/me/model.py")}\n    y = self.draw("y", line * x)', "model.py:10"),  # source, and no frame
        (None, None),
    ],
)
def test_the_line_behind_a_node_is_the_innermost_of_the_user(trace: str | None, line: str | None) -> None:
    node = fx.Graph().placeholder("linear_1")
    node.meta["stack_trace"] = trace
    assert source_line(node) == line
    assert where(node) == (f"linear_1 ({line})" if line else "linear_1")


def called_from(file: str, function: Any) -> Any:
    """`function()`, called at the second line of a file."""
    scope = {"function": function}
    exec(compile("def call():\n    return function()", file, "exec"), scope)
    return scope["call"]()  # type: ignore[operator]


@pytest.mark.parametrize("file", ["/home/me/torch/model.py", BESIDE])
def test_the_line_that_runs_is_the_innermost_of_the_user(file: str) -> None:
    assert called_from(file, running_line) == "model.py:2"
    for foreign in FOREIGN:
        assert called_from(file, partial(called_from, foreign, running_line)).startswith("test_users_code.py:")


@pytest.mark.parametrize("file", ["/home/me/torch/model.py", BESIDE])
def test_the_line_of_an_error_is_the_innermost_of_the_user(file: str) -> None:
    model = nn.Identity()
    model.forward = lambda x: called_from(file, partial(int, "x"))  # type: ignore[method-assign]
    with pytest.raises(ValueError) as failure:
        model(None)
    assert untraceable(model, failure.value).cause.startswith("torch gave up in Identity (model.py:2): ValueError: ")


def test_a_package_whose_name_begins_like_ours_is_watched_as_the_user_s() -> None:
    assert followed(BESIDE, "kfac_fx_experiments.model")
    assert not followed(f"{OWN_FOLDER}passes/normalize.py", "kfac_fx.passes.normalize")
