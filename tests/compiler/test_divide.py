"""Which submodules of a model are captured, and why the others are left as Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.divide import Division, divide
from kfac_fx.passes.errors import UntraceableError
from kfac_fx.passes.ir import GENERIC, Options
from kfac_fx.passes.layers import LAYERS
from tests.compiler.test_substitutes import Negated
from tests.compiler.test_tracing_functions import Dirty

X = torch.randn(5, 3)
WHOLE = UntraceableError("why the whole was not captured\nadvice")


class Named(nn.Module):
    """`use(self, x)` of named submodules."""

    def __init__(self, use: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def in_turn(own: nn.Module, x: Any) -> Any:
    for child in own.children():
        x = child(x)
    return x


def branching(own: nn.Module, x: Tensor) -> Any:
    x = in_turn(own, x)
    return x if x.sum() > -1e9 else x.exp()


def division(model: nn.Module, *inputs: Any, known: Division | None = None, loss_given: bool = True) -> Division:
    return divide(model, inputs or (X,), {}, Options(loss_given=loss_given), LAYERS, WHOLE, known)


def captured(found: Division) -> list[tuple[str, int]]:
    return [(submodule.submodule.path, submodule.submodule.calls) for submodule in found.captured]


def left(found: Division) -> dict[str, str]:
    return {note.subject: note.reason for note in found.program.left}


def test_the_largest_submodules_are_captured() -> None:
    model = Named(in_turn, first=nn.Sequential(linear(), linear()), last=linear())
    found = division(model)
    assert captured(found) == [("first", 1), ("last", 1)]
    assert left(found) == {"Named": "why the whole was not captured"}


def test_what_cannot_be_captured_is_left_and_its_children_are_tried() -> None:
    model = Named(in_turn, first=Named(branching, a=linear(), b=linear()), last=linear())
    found = division(model)
    assert captured(found) == [("first.a", 1), ("first.b", 1), ("last", 1)]
    assert left(found)["first"].startswith("torch gave up in Named (test_divide.py:")


def test_every_call_of_the_first_forward_is_counted() -> None:
    model = Named(lambda own, x: own.a(own.a(own.b(x))), a=linear(), b=linear())
    assert captured(division(model)) == [("a", 2), ("b", 1)]


def test_a_kind_of_call_has_a_capture_of_its_own() -> None:
    def use(own: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = own.a(x)
        return own.a(low.float())

    found = division(Named(use, a=linear()))
    assert captured(found) == [("a", 2), ("a", 2)]
    assert [submodule.autocast for submodule in found.captured] == [(("cpu", torch.bfloat16),), ()]


def test_what_no_forward_reaches_is_captured_without_inputs() -> None:
    model = Named(lambda own, x: own.a(x), a=linear(), never=nn.Sequential(linear(), nn.Tanh()))
    found = division(model)
    assert captured(found) == [("a", 1), ("never", 0)]
    assert [submodule.key is None for submodule in found.captured] == [False, True]


def test_frozen_submodules_are_left_out() -> None:
    found = division(Named(in_turn, a=linear(), frozen=linear().requires_grad_(False)))
    assert captured(found) == [("a", 1)]


def test_a_submodule_under_two_names_is_captured_once() -> None:
    shared = linear()
    assert captured(division(Named(in_turn, a=shared, b=shared))) == [("a", 1)]


REASONS: dict[str, tuple[nn.Module, str]] = {
    "a backward of its own": (
        Named(lambda own, x: Dirty.apply(own.inner(x)), inner=linear()),  # type: ignore[no-untyped-call]
        "it applies Dirty (test_tracing_functions.py), an autograd.Function that writes into its arguments. A graph "
        "cannot call it as one operation.",
    ),
    "state": (
        Named(lambda own, x: setattr(own, "last", x) or own.inner(x), inner=linear()),
        "it sets part.last, which Python may read",
    ),
    "a loss": (
        Named(lambda own, x: F.mse_loss(own.inner(x), x), inner=linear()),
        "it computes a loss, whose distribution is looked for between its children",
    ),
}


@pytest.mark.parametrize("kind", REASONS)
def test_why_a_submodule_is_left(kind: str) -> None:
    part, reason = REASONS[kind]
    found = division(
        Named(lambda own, x: own.last(own.part(x).expand(5, 3)), part=part, last=linear()), loss_given=False
    )
    assert re.sub(r"py:\d+\), an", "py), an", left(found)["part"]) == reason
    assert captured(found) == [("part.inner", 1), ("last", 1)]


def test_a_submodule_that_a_transformation_calls_beside_others_is_left() -> None:
    found = division(
        Named(lambda own, x: own.last(own.part(x) + torch.func.vmap(own.part)(x)), part=linear(), last=linear())
    )
    assert left(found)["part"].startswith("it is called inside")


def test_a_submodule_whose_inside_is_called_too_is_left() -> None:
    part = nn.Sequential(linear(), linear())
    found = division(Named(lambda own, x: own.part(x) + own.part[0](x), part=part))
    assert left(found)["part"] == "Python calls what is inside of it, too"
    assert captured(found) == [("part.0", 2), ("part.1", 1)]


def test_a_submodule_that_writes_into_its_parameters_is_left() -> None:
    def use(own: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            own.inner.weight.clamp_(-0.5, 0.5)
        return own.inner(x)

    found = division(Named(in_turn, part=Named(use, inner=linear())))
    assert left(found)["part"] == "it writes into parameters: part.inner.weight"
    assert found.written == {"part.inner.weight"}


def test_operations_of_python_on_parameters_are_captured_one_by_one() -> None:
    model = Named(lambda own, x: own.b(own.a(x) * own.a.bias) * own.a.bias, a=linear(), b=linear())
    found, line = division(model), model.use.__code__.co_firstlineno
    assert captured(found) == [("a", 1), ("b", 1), (f"mul of a.bias (test_divide.py:{line})", 2)]
    assert [submodule.read for submodule in found.program.submodules] == [False, False, True]
    assert not found.program.python


def test_a_module_that_only_holds_what_python_reads_is_not_captured() -> None:
    model = Named(lambda own, x: own.a(x) + own.table.weight[0], a=linear(), table=nn.Embedding(2, 3))
    line = model.use.__code__.co_firstlineno
    assert captured(division(model)) == [("a", 1), (f"add of table.weight (test_divide.py:{line})", 1)]


def test_what_cannot_be_captured_of_python_is_told_with_the_place() -> None:
    model = Named(lambda own, x: own.a(x) * F.dropout(own.a.bias), a=linear())
    line = model.use.__code__.co_firstlineno
    said = {"a.bias": f"read at test_divide.py:{line}, in Python that is not captured"}
    assert dict(division(model).program.python) == said


def test_parameters_that_an_autograd_function_is_given_are_read() -> None:
    found = division(Named(lambda own, x: own.a(x) * Negated.apply(own.a.bias), a=linear()))
    assert list(found.program.python) == ["a.bias"]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def test_a_model_without_submodules_is_refused_as_the_whole_was() -> None:
    for approximations in ({}, {"weight": GENERIC}):
        options = Options(loss_given=True, approximations=approximations)
        with pytest.raises(UntraceableError, match="^why the whole was not captured\nadvice\n"):
            divide(Bare(), (X,), {}, options, LAYERS, WHOLE, None)


def test_a_model_without_submodules_has_generic_parameters_if_all_are_asked_for_so() -> None:
    options = Options(loss_given=True, approximations={"weight": GENERIC, "bias": GENERIC})
    assert divide(Bare(), (X,), {}, options, LAYERS, WHOLE, None).program.python.keys() == {"weight", "bias"}


def test_what_was_captured_on_earlier_inputs_stays() -> None:
    model = Named(lambda own, x: own.b(own.a(x)), a=Named(lambda own, x: own.inner(x), inner=linear()), b=linear())
    first = division(model)
    again = division(model, 2 * X, known=first)
    assert [id(submodule) for submodule in again.captured] == [id(submodule) for submodule in first.captured]


def test_what_was_left_on_earlier_inputs_stays_python_for_the_reason_of_then() -> None:
    model = Named(in_turn, part=Named(branching, inner=linear()))
    first = division(model)
    assert left(division(model, 2 * X, known=first))["part"] == left(first)["part"]
    assert "torch gave up" in left(first)["part"]
