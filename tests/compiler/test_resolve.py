"""From matches to registrations, rule by rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import AmbiguousRegistrationError, LinkError
from kfac_fx.passes.ir import Program
from kfac_fx.passes.parametrizations import functions
from kfac_fx.passes.resolve import resolve
from tests.compiler.toy import Toy, before, found


def resolved(function: Callable[..., Any], options: dict[str, Any] | None = None, **shapes: tuple[int, ...]) -> Program:
    return resolve(before("resolve", Toy(function, **shapes), **(options or {})))


def dropped(program: Program) -> list[tuple[str, str]]:
    return [(note.subject, note.reason) for note in program.dropped]


def two(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b) @ w + b


SQUARE = {"w": (3, 3), "b": (3,)}


def test_the_larger_match_wins_and_what_it_holds_is_dropped() -> None:
    program = resolved(lambda x, w, b: x @ w + b, **SQUARE)
    assert found(program) == [("linear", ("w", "b"), 1)]
    assert dropped(program) == [
        ("linear(w)", "contained in linear(w, b), which is kept"),
        ("scale_and_shift(b)", "contained in linear(w, b), which is kept"),
    ]


def test_several_uses_of_one_set_are_one_registration_in_graph_order() -> None:
    program = resolved(two, **SQUARE)
    assert found(program) == [("linear", ("w", "b"), 2)]
    assert [use.output.name for use in program.registrations[0].uses] == ["add", "add_1"]


def test_an_intermediate_with_a_second_reader_is_not_swallowed() -> None:
    def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = x @ w
        return torch.tanh(h + b) * h

    assert found(resolved(twice, **SQUARE)) == [("linear", ("w",), 1), ("scale_and_shift", ("b",), 1)]


# --- shared by different sets ---------------------------------------------------------------------------------------


def tied(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(x @ w + b) @ w + c


TIED = {"w": (3, 3), "b": (3,), "c": (3,)}


def test_biases_leave_a_shared_weight_and_the_report_says_so() -> None:
    program = resolved(tied, **TIED)
    assert found(program) == [("linear", ("w",), 2), ("linear", ("b",), 1), ("linear", ("c",), 1)]
    assert {registration.reason for registration in program.registrations} == {
        "w is shared by uses with other parameters"
    }


def test_a_shared_bias_leaves_its_weights() -> None:
    program = resolved(lambda x, v, w, b: torch.tanh(x @ v + b) @ w + b, v=(3, 3), w=(3, 3), b=(3,))
    assert found(program) == [("linear", ("v",), 1), ("linear", ("b",), 2), ("linear", ("w",), 1)]
    assert {registration.reason for registration in program.registrations} == {
        "b is shared by uses with other parameters"
    }


def test_a_weight_that_is_used_with_and_without_its_bias() -> None:
    program = resolved(lambda x, w, b: torch.tanh(x @ w + b) @ w, **SQUARE)
    assert found(program) == [("linear", ("w",), 2), ("linear", ("b",), 1)]


def test_linking_the_weight_alone_splits_the_biases_off() -> None:
    program = resolved(tied, {"linked": {frozenset({"w"}): None}}, **TIED)
    assert found(program) == [("linear", ("w",), 2), ("scale_and_shift", ("b",), 1), ("scale_and_shift", ("c",), 1)]
    assert ("linear(w, b)", "splits the linked group (w)") in dropped(program)


def test_a_linked_group_wins_and_the_rest_is_claimed_otherwise() -> None:
    program = resolved(lambda x, w, b, c: x @ w + b + c, {"linked": {frozenset({"w", "b"}): None}}, **TIED)
    assert found(program)[0] == ("linear", ("w", "b"), 1)


def test_a_linked_group_that_no_layer_matches_is_an_error() -> None:
    groups = {frozenset({"b", "c"}): None}
    with pytest.raises(LinkError) as failure:
        resolved(tied, {"linked": groups}, **TIED)
    assert str(failure.value).splitlines() == [
        "linked parameters that no layer matched as a group:",
        f"  b  linked with c; enters add (test_resolve.py:{tied.__code__.co_firstlineno + 1})",
        f"  c  linked with b; enters add_1 (test_resolve.py:{tied.__code__.co_firstlineno + 1})",
        "A block has one matrix, of a weight, of a bias, or of both, with one bias for each output: other groups "
        "cannot be linked. Take them out of `linked`; or, for a weight and its bias, declare a layer that has both in "
        "its form: compile(..., layers=[...]).",
    ]


# --- two layouts ----------------------------------------------------------------------------------------------------


def test_a_tied_output_layer_is_the_embedding_with_its_sides_swapped() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    (one,) = resolve(before("resolve", model)).registrations
    assert (one.layer, one.matrix and one.matrix.shape) == ("embedding", (1, 3, 5))
    assert [use.transposed for use in one.uses] == [False, True]
    assert one.reason == (
        "some uses have its transpose, as derivatives by the inputs and tied output layers do; there its inputs and "
        "output gradients change sides"
    )


def test_the_report_says_tied_of_a_tied_weight_that_has_left_its_biases_behind() -> None:
    program = resolved(lambda x, w, b, c: torch.tanh(x @ w + b) @ w.T + c, **TIED)
    reasons = {registration.parameters: str(registration.reason) for registration in program.registrations}
    assert reasons[("w",)].startswith("some uses have its transpose")
    assert reasons[("b",)] == reasons[("c",)] == "w is shared by uses with other parameters"


def test_the_embedding_is_first_wherever_it_stands() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return F.linear(x, self.table)[:, :3] * F.embedding(ids, self.table)

    (one,) = resolve(before("resolve", Backwards())).registrations
    assert one.layer == "embedding" and [use.transposed for use in one.uses] == [True, False]


def test_transposed_uses_of_one_weight() -> None:
    program = resolved(lambda x, w: F.linear(torch.tanh(x @ w), w), w=(3, 2))
    (one,) = program.registrations
    assert [use.transposed for use in one.uses] == [False, True]


def test_other_layouts_are_ambiguous_and_all_of_them_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of small matrices have the block of their elements."""

    def both(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, w.view(2, 6)))
        h = torch.tanh(F.linear(h, w.view(6, 2)))
        return torch.tanh(F.linear(torch.tanh(F.linear(h, v.view(2, 6))), v)) + u

    program = resolved(both, w=(3, 4), v=(6, 2), u=(6,))
    assert found(program) == [("linear", ("w",), 2), ("linear", ("v",), 2), ("scale_and_shift", ("u",), 1)]
    assert [registration.approximation for registration in program.registrations] == ["full"] * 3
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)
    with pytest.raises(AmbiguousRegistrationError) as failure:
        resolved(both, w=(3, 4), v=(6, 2), u=(6,))
    at = [f"(test_resolve.py:{both.__code__.co_firstlineno + n})" for n in range(4)]
    assert str(failure.value).splitlines() == [
        "2 parameters are matched by uses that lay them out differently:",
        f"  w  linear (linear {at[1]}) and linear (linear_1 {at[2]})",
        f"  v  linear (linear_2 {at[3]}) and linear (linear_3 {at[3]})",
        "Use separate parameters, or let them be generic: "
        'compile(..., approximations={"w": "generic", "v": "generic"}).',
    ]
    wanted = {"approximations": {"w": "generic", "v": "generic"}}
    program = resolved(both, wanted, w=(3, 4), v=(6, 2), u=(6,))
    assert found(program) == [("scale_and_shift", ("u",), 1), ("generic", ("w",), 0), ("generic", ("v",), 0)]


def test_a_large_matrix_that_is_also_added_as_it_is_is_generic_with_its_places() -> None:
    """As in `w - lr * gradient`, a step inside of forward. A small one has the block of its elements."""

    def stepped(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ (w - x.mean(0)[:, None]).T

    assert found(resolved(stepped, w=(3, 2))) == [("linear", ("w",), 2)]
    (one,) = resolved(stepped, w=(3, 400)).registrations
    assert one.generic and one.parameters == ("w",)
    assert re.sub(r" \([\w./]+:\d+\)", "", str(one.reason)) == (
        "a matrix in one use, and scaled or added in another: linear (matmul) and scale_and_shift (sub)"
    )


# --- generic and unused ---------------------------------------------------------------------------------------------


def test_what_no_layer_claims_is_generic_with_its_places() -> None:
    def odd(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        h = x * F.dropout(t)
        return h / F.dropout(t) + x @ w

    program = resolved(odd, w=(3, 3), t=(3,))
    assert found(program) == [("linear", ("w",), 1), ("generic", ("t",), 0)]
    line = odd.__code__.co_firstlineno + 1
    assert (
        program.registrations[1].reason
        == f"no layer has the form of mul (test_resolve.py:{line}) through dropout and 1 more use"
    )


def test_what_the_user_wants_generic_is() -> None:
    program = resolved(two, {"approximations": {"w": "generic"}}, **SQUARE)
    assert found(program) == [("scale_and_shift", ("b",), 2), ("generic", ("w",), 0)]
    assert program.registrations[1].reason == "declared generic"
    assert ("linear(w, b)", "declared generic") in dropped(program)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, dead: x @ w,
        lambda x, w, dead: x @ w + (x @ dead).detach(),
        lambda x, w, dead: x @ w + dead.detach().sum(),
        lambda x, w, dead: x @ w + x.view_as(dead),
        lambda x, w, dead: torch.where(x @ dead > 0, x, -x) @ w,
    ],
)
def test_what_the_losses_do_not_depend_on_is_unused(function: Callable[..., Any]) -> None:
    program = resolved(function, w=(3, 3), dead=(3, 3))
    assert found(program) == [("linear", ("w",), 1)] and program.unused == ("dead",)


class Doubled(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


def test_a_function_that_a_parameter_enters_is_named_with_the_number_of_its_other_uses() -> None:
    """And not for the parameter that is multiplied with its result."""

    def applied(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(u)  # type: ignore[no-untyped-call]
        return F.linear(x, w.cumsum(0) * doubled) + F.linear(x, doubled)

    program = resolve(before("resolve", Toy(applied, w=(4, 3), u=(4, 3)), torch.randn(5, 3)))
    assert {
        registration.parameters[0]: re.sub(r"toy\.py:\d+", "HERE", registration.reason or "")
        for registration in program.registrations
    } == {
        "w": "no layer has the form of linear (HERE) through mul",
        "u": "enters Doubled at HERE, whose backward is its own, and has 1 more use",
    }


def test_a_function_of_a_parameter_that_is_also_used_as_it_is_shares_its_block() -> None:
    program = resolve(
        before("resolve", Toy(lambda x, g: x * g.softmax(0) + torch.tanh(x * g), g=(3,)), torch.ones(5, 3))
    )
    assert found(program) == [("scale_and_shift", ("g",), 2)]


def test_a_scale_and_its_shift_that_is_used_by_itself_too_are_split_by_the_shared_parameter() -> None:
    program = resolved(lambda x, g, b: torch.tanh(x * g + b) + b, g=(3,), b=(3,))
    assert found(program) == [("scale_and_shift", ("g",), 1), ("scale_and_shift", ("b",), 2)]
    assert {registration.reason for registration in program.registrations} == {
        "b is shared by uses with other parameters"
    }


def test_an_output_that_is_a_parameter_is_generic() -> None:
    program = resolved(lambda x, w, s: (x @ w, s), w=(3, 3), s=(3,))
    assert found(program) == [("linear", ("w",), 1), ("generic", ("s",), 0)]
