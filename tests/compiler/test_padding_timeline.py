"""The positions of uses in models that take their sequences step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kfac_fx.passes.ir import Program, Use
from kfac_fx.passes.padding import UNCLEAR, Timeline
from tests.compiler.toy import Toy, before

N, T = 4, 3
X = torch.randn(N, T, 5)


def matched(function: Callable[..., Any]) -> Program:
    """A loop over 3 positions with the weight w [2, 7], up to the pass `resolve`."""
    return before("resolve", Toy(function, w=(2, 7)), X)


def timeline(program: Program, moved: tuple[fx.Node, ...] = ()) -> Timeline:
    """For a mask that no input with positions was computed into: the input x itself stands for it."""
    mask = next(node for node in program.graph.nodes if node.op == "placeholder")
    cases, positions, _ = (str(size) for size in mask.meta["val"].shape)
    return Timeline(mask, cases, positions, moved, frozenset())


def uses(program: Program) -> list[Use]:
    return [use for use in program.matches if use.layer == "linear"]


def loop(x: Tensor, w: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    state = x.new_zeros(x.shape[0], 2)
    for step in order:
        state = torch.tanh(F.linear(torch.cat([x[:, step], state], 1), w))
    return state


def taken_apart(x: Tensor, w: Tensor) -> Tensor:
    """Backward in time, over a number of positions that the capture knows."""
    steps = x.unbind(1)
    state = x.new_zeros(x.shape[0], 2)
    for step in reversed(steps):
        state = torch.tanh(F.linear(torch.cat([step, state], 1), w))
    return state


def test_uses_are_at_the_newest_position_that_they_depend_on() -> None:
    program = matched(loop)
    line = timeline(program)
    assert [line.seen[use.input] for use in uses(program)] == [{0}, {0, 1}, {0, 1, 2}]
    assert line.steps(uses(program)) == ([0, 1, 2], "")


def test_positions_counted_from_the_end_are_those_of_the_sequence() -> None:
    def from_the_end(x: Tensor, w: Tensor) -> Tensor:
        assert x.shape[1] == T  # the capture knows the number
        return loop(x, w, (-3, 1, -1))

    program = matched(from_the_end)
    line = timeline(program)
    assert [line.seen[use.input] for use in uses(program)] == [{0}, {0, 1}, {0, 1, 2}]
    assert line.steps(uses(program)) == ([0, 1, 2], "")


def test_backward_in_time_uses_are_at_the_oldest_position() -> None:
    program = matched(taken_apart)
    assert timeline(program).steps(uses(program)) == ([2, 1, 0], "")


def test_a_state_belongs_to_the_step_behind_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        state = x[:, 0].new_zeros(x.shape[0], 7)
        for step in range(T):
            state = torch.cat([x[:, step], F.linear(state, w)], 1)
        return state

    program = matched(function)
    line = timeline(program)
    assert [max(line.seen.get(use.input, ()), default=-1) for use in uses(program)] == [-1, 0, 1]
    assert line.steps(uses(program)) == ([0, 1, 2], "")


@pytest.mark.parametrize(
    ("take", "positions"),
    [
        (lambda x: x[:, 1], {1}),
        (lambda x: x.select(1, -1), None),
        (lambda x: x.narrow(1, 2, 1)[:, 0], {2}),
        (lambda x: x[:, :1].squeeze(1), {0}),
        (lambda x: x.unbind(1)[1], {1}),
        (lambda x: x[:, :2].sum(1) + x[:, 2].expand_as(x[:, 0]), None),
        (lambda x: x.mean(1), None),
        (lambda x: x[1].sum(0).expand_as(x[:, 0]), None),
    ],
    ids=["index", "from the end", "narrow", "slice", "unbind", "several", "all", "another dimension"],
)
def test_operations_take_positions(take: Callable[[Tensor], Tensor], positions: set[int] | None) -> None:
    program = matched(lambda x, w: F.linear(torch.cat([take(x), take(x)[:, :2]], 1), w))
    line = timeline(program)
    (use,) = uses(program)
    seen = line.seen[use.input]
    assert seen == positions if positions is not None else max(seen) >= T


def test_uses_without_an_order_are_not_clear() -> None:
    program = matched(lambda x, w: loop(x, w, (1, 0, 2)))
    assert timeline(program).steps(uses(program)) == (None, UNCLEAR)


def test_positions_in_another_order_are_strange() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return loop(x.flip(1), w)

    program = matched(function)
    flipped = tuple(node for node in program.graph.nodes if node.name.startswith(("flip", "slice")))
    places, why = timeline(program, flipped).steps(uses(program))
    assert places is None and why == "its steps are of other sequences than the mask's, or in another order"


def test_where_cases_and_positions_have_one_size_no_use_has_a_position() -> None:
    program = matched(loop)
    mask = next(node for node in program.graph.nodes if node.op == "placeholder")
    size = str(mask.meta["val"].shape[1])
    assert Timeline(mask, size, size, (), frozenset()).steps(uses(program)) == (None, UNCLEAR)
