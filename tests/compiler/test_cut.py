"""Where parameters are cut, what becomes of their uses, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.check import check, check_registration
from kfac_fx.passes.errors import LinkError, RegistrationError
from kfac_fx.passes.expressions import cut
from kfac_fx.passes.ir import Program
from kfac_fx.passes.parametrization import Piece
from kfac_fx.passes.parametrizations.parts import region_of
from kfac_fx.passes.pipeline import verify
from kfac_fx.passes.resolve import resolve
from tests.compiler.toy import Toy, before, found

Function = Callable[..., Any]


def cut_up(model: nn.Module, **options: Any) -> Program:
    """Matches after the cuts."""
    return verify(cut(before("cut", model, **options)), after="cut")


def registered(function: Function, options: dict[str, Any] | None = None, **shapes: tuple[int, ...]) -> Program:
    return check(resolve(cut_up(Toy(function, **shapes), **(options or {}))))


def regions(program: Program) -> list[tuple[tuple[str, ...], Any]]:
    return [
        (registration.parameters, region_of(use)) for registration in program.registrations for use in registration.uses
    ]


def test_nothing_is_cut_where_parameters_are_used_whole() -> None:
    program = cut_up(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)))
    assert program.pieces == {} and program.behind == {} and program.parameter_exprs == {}
    assert all(region_of(use) is None for use in program.matches)


def test_slices_of_one_weight_are_registered_apart() -> None:
    program = registered(lambda x, w, b: F.linear(x, w[:2], b[:2]).sum() + F.linear(x, w[2:], b[2:]), w=(6, 4), b=(6,))
    assert found(program) == [("linear", ("w[0:2]", "b[0:2]"), 1), ("linear", ("w[2:6]", "b[2:6]"), 1)]
    assert regions(program) == [(("w[0:2]", "b[0:2]"), None), (("w[2:6]", "b[2:6]"), None)]
    assert program.shapes == {"w[0:2]": (2, 4), "w[2:6]": (4, 4), "b[0:2]": (2,), "b[2:6]": (4,)}
    assert [registration.owners for registration in program.registrations] == [("w", "b"), ("w", "b")]


def test_what_nothing_reads_is_unused() -> None:
    program = registered(lambda x, w: F.linear(x, w[:2]) + F.linear(x, w[4:]), w=(6, 4))
    assert program.unused == ("w[2:4]",)


def test_a_piece_is_summed_over_in_any_order_of_its_dimensions() -> None:
    """As the weights of the paths of a tensor product are pieces of one vector."""

    def summed(dims: Any) -> Program:
        return registered(lambda x, w: torch.tensordot(x.view(1, 2, 2), w[:12].view(2, 2, 3), dims) + w[12:], w=(15,))

    turned, other = summed(([1, 2], [1, 0])), summed(([2, 1], [0, 1]))
    assert found(turned) == found(other) == [("linear", ("w[0:12]", "w[12:15]"), 1)]
    assert turned.registrations[0].matrix == other.registrations[0].matrix


def test_a_stack_of_stacks_is_cut_into_its_members() -> None:
    """As the weights of experts in layers: no cut along one dimension gives these parts."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, w[0][1], b[0, 1]), w[1, 0]) + F.linear(x, w[0, 1], b[0, 1])

    program = registered(function, w=(2, 2, 4, 4), b=(2, 2, 4))
    assert found(program) == [("linear", ("w[0:1, 1:2]", "b[0:1, 1:2]"), 2), ("linear", ("w[1:2, 0:1]",), 1)]
    unused = {f"{name}[{place}]" for name in "wb" for place in ("0:1, 0:1", "1:2, 0:1", "1:2, 1:2")} - {"w[1:2, 0:1]"}
    assert set(program.unused) == unused and program.shapes["w[0:1, 0:1]"] == (1, 1, 4, 4)
    whole = registered(lambda x, w: F.linear(x, w[0, 1]) + F.linear(x, w.flatten(0, 1).sum(0)), w=(2, 2, 4, 4))
    assert whole.pieces == {}


def test_overlapping_slices_are_cut_at_all_their_ends() -> None:
    program = registered(lambda x, w: F.linear(x, w[:4]).sum() + F.linear(x, w[2:]), w=(6, 4))
    assert found(program) == [("linear", ("w[0:2]",), 1), ("linear", ("w[2:4]",), 2), ("linear", ("w[4:6]",), 1)]
    every = (0, 4)
    assert regions(program) == [
        (("w[0:2]",), ((0, 1), (0, 2), every)),
        (("w[2:4]",), ((0, 1), (2, 4), every)),
        (("w[2:4]",), ((0, 1), (0, 2), every)),
        (("w[4:6]",), ((0, 1), (2, 4), every)),
    ]


def test_a_whole_use_is_taken_apart_where_a_slice_is_used_too() -> None:
    program = registered(lambda x, w, b: F.linear(x, w[:2], b[:2]).sum() + F.linear(x, w, b), w=(6, 4), b=(6,))
    assert found(program) == [("linear", ("w[0:2]", "b[0:2]"), 2), ("linear", ("w[2:6]", "b[2:6]"), 1)]


def test_a_bias_is_cut_as_its_weight_is_in_every_use_of_it() -> None:
    """The cut of w goes over to b, and from there to v."""
    program = registered(
        lambda x, w, b, v: F.linear(x, w[:2]).sum() + F.linear(x, w, b) + F.linear(x, v, b), w=(6, 4), b=(6,), v=(6, 4)
    )
    assert set(program.pieces) == {f"{name}[{ends}]" for name in "wbv" for ends in ("0:2", "2:6")}
    assert found(program) == [
        ("linear", ("w[0:2]",), 2),
        *(("linear", (name,), uses) for name, uses in (("b[0:2]", 2), ("w[2:6]", 1), ("b[2:6]", 2))),
        *(("linear", (name,), 1) for name in ("v[0:2]", "v[2:6]")),
    ]


def test_inputs_are_cut_as_well_as_outputs() -> None:
    program = registered(lambda x, w, b: F.linear(x[..., :1], w[:, :1]).sum() + F.linear(x, w, b), w=(6, 4), b=(6,))
    assert found(program) == [("linear", ("w[:, 0:1]",), 2), ("linear", ("b",), 1), ("linear", ("w[:, 1:4]",), 1)]


def test_a_bias_put_together_cuts_the_weight() -> None:
    program = registered(
        lambda x, w, q, v: F.linear(x, w, torch.cat([q, torch.zeros_like(v), v])), w=(6, 4), q=(2,), v=(2,)
    )
    names = [("w[0:2]", "q"), ("w[2:4]",), ("w[4:6]", "v")]
    reasons = {registration.reason and registration.reason.partition(" (")[0] for registration in program.registrations}
    assert reasons == {"it is in some of the outputs or inputs of the linear at linear"}
    assert found(program) == [("linear", parameters, 1) for parameters in names]
    assert regions(program) == [
        (parameters, ((0, 1), (2 * n, 2 * n + 2), (0, 4))) for n, parameters in enumerate(names)
    ]


def test_a_bias_put_together_cuts_a_weight_whose_outputs_have_two_dimensions() -> None:
    """As heads have: three outputs are one step along the first dimension."""
    program = registered(
        lambda x, w, q, v: F.linear(x, w.reshape(12, 4), torch.cat([q, v])), w=(4, 3, 4), q=(3,), v=(9,)
    )
    assert found(program) == [("linear", ("w[0:1]", "q"), 1), ("linear", ("w[1:4]", "v"), 1)]
    within = registered(
        lambda x, w, q, v: F.linear(x, w.reshape(12, 4), torch.cat([q, v])), w=(4, 3, 4), q=(2,), v=(10,)
    )
    assert {name for _, names, _ in found(within) for name in names} == {"w", "q", "v"}


def test_a_bias_put_together_is_registered_apart_from_a_weight_that_cannot_be_cut() -> None:
    program = registered(
        lambda x, w, q, v: F.linear(x, w, torch.cat([q, v])) + torch.cdist(x, w), w=(4, 4), q=(2,), v=(2,)
    )
    assert found(program) == [("generic", ("w",), 0), ("linear", ("q",), 1), ("linear", ("v",), 1)]


def test_weights_put_together_along_the_inputs() -> None:
    program = registered(lambda x, w, v, b: x @ torch.cat([w.t(), v], 0) + b, w=(6, 3), v=(1, 6), b=(6,))
    assert found(program) == [("linear", ("w", "b"), 1), ("linear", ("v",), 1)]
    assert regions(program) == [(("w", "b"), ((0, 1), (0, 6), (0, 3))), (("v",), ((0, 1), (0, 6), (3, 4)))]


def test_multiples_are_noted_in_the_use() -> None:
    program = registered(lambda x, w, b: F.linear(x, w / 2, 1 - 3 * b), w=(6, 4), b=(6,))
    (one,) = program.registrations
    assert {role: bound.scale for role, bound in one.uses[0].parameters.items()} == {"weight": 0.5, "bias": -3.0}
    assert one.parameters == ("w", "b") and region_of(one.uses[0]) is None and program.pieces == {}


LARGE = (200_000, 4)  # too large for the Jacobian of two rows; a smaller parameter has an exact block


def test_a_parameter_read_whole_by_no_layer_stays_whole() -> None:
    """Its slice goes with it, and the partner of the slice."""
    program = registered(lambda x, w, b: F.linear(x, w[:2], b[:2]) + w.exp().sum(), w=LARGE, b=(6,))
    assert [(registration.parameters, registration.generic) for registration in program.registrations] == [
        (("w",), True),
        (("b",), True),
    ]
    assert [str(note.reason) for note in program.dropped] == ["takes a part of w, which cannot be cut there"]


def test_a_parameter_read_whole_beside_a_slice_of_another_stays_whole() -> None:
    program = registered(lambda x, w, u: F.linear(x, w[:2]) + torch.atan2(w.exp().sum(), u[:1].sum()), w=LARGE, u=(3,))
    assert [(registration.parameters, registration.generic) for registration in program.registrations] == [
        (("w",), True),
        (("u",), True),
    ]


def test_slices_along_two_dimensions_stay_whole() -> None:
    program = registered(lambda x, w: F.linear(x, w[:2]).sum() + F.linear(x[..., :2], w[:, :2]), w=(6, 4))
    assert found(program) == [("generic", ("w",), 0)]
    assert len(program.dropped) == 2


def test_a_piece_that_no_layer_reads_is_generic_and_the_others_are_not() -> None:
    program = registered(lambda x, w: F.linear(x, w[2:].exp()).sum() + F.linear(x, w[:2]), w=(6, 4))
    assert found(program) == [("linear", ("w[0:2]",), 1), ("generic", ("w[2:6]",), 0)]
    reason = program.registrations[1].reason
    assert reason is not None and reason.startswith("no layer has the form of linear")


def test_a_slice_that_no_layer_reads_makes_all_pieces_generic_that_it_may_be_of() -> None:
    program = registered(lambda x, w: F.linear(x[..., :2], w[:, 1:3].exp()).sum() + F.linear(x, w[:2]), w=(6, 4))
    assert [(registration.parameters, registration.generic) for registration in program.registrations] == [
        (("w[0:2]",), True),
        (("w[2:6]",), True),
    ]
    assert program.registrations[0].reason is not None
    assert program.registrations[0].reason.startswith("w[0:2] has 2 uses, 1 of them matched")


def test_the_own_name_of_a_parameter_asks_for_all_its_pieces() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w[:2]).sum() + F.linear(x, w[2:])

    asked = registered(function, {"approximations": {"w": "diagonal"}}, w=(6, 4))
    assert [registration.approximation for registration in asked.registrations] == ["diagonal", "diagonal"]
    generic = registered(function, {"approximations": {"w": "generic"}}, w=(6, 4))
    assert [registration.reason for registration in generic.registrations] == ["declared generic", "declared generic"]


def test_linked_parameters_are_linked_piece_by_piece() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w[:2], b[:2]).sum() + F.linear(x, w[2:], b[2:])

    linked: dict[str, Any] = {"linked": {frozenset({"w", "b"}): "diagonal"}}
    program = registered(function, linked, w=(6, 4), b=(6,))
    assert [(registration.parameters, registration.approximation) for registration in program.registrations] == [
        (("w[0:2]", "b[0:2]"), "diagonal"),
        (("w[2:6]", "b[2:6]"), "diagonal"),
    ]
    with pytest.raises(LinkError, match=r"(?s)w\[0:2\]  linked with b.*w\[2:6\]  linked with b"):
        registered(lambda x, w, b: F.linear(x, w[:2]).sum() + F.linear(x, w[2:]) * b.exp(), linked, w=(6, 4), b=(4,))


def test_the_check_takes_the_parameters_own_names() -> None:
    program = registered(lambda x, w, v: F.linear(x, w[:2]) + F.linear(x, w[4:]) * v, w=(6, 4), v=(2,))
    check_registration(program, ["w", "v"])
    check_registration(program)
    with pytest.raises(RegistrationError, match=r"1 registered parameter was not included in the list: v"):
        check_registration(program, ["w"])
    less = program.but(
        registrations=tuple(
            registration for registration in program.registrations if "w[4:6]" not in registration.parameters
        )
    )
    with pytest.raises(RegistrationError, match=r"w\[4:6\] is not registered; it is used in linear_1"):
        check_registration(less)


def test_parts_of_a_convolution_along_channels() -> None:
    program = registered(
        lambda x, w, b: F.conv1d(x, w[:2], b[:2]).sum() + F.conv1d(x, w, b).sum() + F.conv1d(x[:, :1], w[:, :1]).sum(),
        w=(4, 3, 2),
        b=(4,),
    )
    assert found(program)[-1][0] == "generic"  # two dimensions
    program = registered(
        lambda x, w, b: F.conv1d(x, w, b).sum() + F.conv1d(x[:, :1], w[:, :1]).sum(), w=(4, 3, 2), b=(4,)
    )
    assert regions(program) == [
        (("w[:, 0:1]",), ((0, 1), (0, 4), (0, 2))),
        (("w[:, 0:1]",), None),
        (("b",), ((0, 1), (0, 4), (0, 2))),
        (("w[:, 1:3]",), ((0, 1), (0, 4), (2, 6))),
    ]


def test_a_layout_that_copies_keeps_its_parameters_whole() -> None:
    """A transposed convolution with groups lays its weight out as no view of it."""
    program = registered(
        lambda x, w: F.conv_transpose1d(x, w, groups=2).sum() + F.linear(x, w[:2].flatten(1)).sum(), w=(4, 3, 2)
    )
    assert [registration.parameters for registration in program.registrations] == [("w",)]


def test_a_separable_convolution_is_its_parts_when_one_is_cut() -> None:
    program = registered(
        lambda x, w, v: F.conv1d(F.conv1d(x, w, groups=4), v).sum() + F.conv1d(x, v[:1]).sum(), w=(4, 1, 2), v=(3, 4, 1)
    )
    assert found(program) == [
        ("depthwise_conv1d", ("w",), 1),
        ("conv1d", ("v[0:1]",), 2),
        ("conv1d", ("v[1:3]",), 1),
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.layer_norm(x, (4,), w, 2 * w),
        lambda x, w: F.layer_norm(x, (4,), -w, w),
        lambda x, w: F.layer_norm(x, (4,), 3 * w, 2 * w),
        lambda x, w: F.conv_transpose1d(x[:, None], w[:1, None, None], 2 * w[:1]),
    ],
)
def test_a_parameter_in_two_roles_of_one_use_has_a_use_in_each(function: Function) -> None:
    program = registered(function, w=(4,))
    assert [(registration.parameters[0][0], len(registration.uses)) for registration in program.registrations] == [
        ("w", 2)
    ]


def test_a_factor_of_a_product_may_be_used_transposed_elsewhere() -> None:
    """Both uses have one group of rows, although the outputs of one are the inputs of the other."""
    inputs = torch.randn(5, 7)
    program = verify(cut(before("cut", Toy(lambda x, a, b: (x @ (a @ b)) @ b.T, a=(7, 2), b=(2, 3)), inputs)), "cut")
    program = check(resolve(program))
    assert not any("has a use of another form" in note.reason for note in program.dropped)
    assert {registration.parameters: len(registration.uses) for registration in program.registrations} == {
        ("a",): 1,
        ("b",): 2,
    }


@pytest.mark.parametrize("asked", [False, True])
def test_a_gain_is_not_cut(asked: bool) -> None:
    """It multiplies all filters of another parameter in one use, which would read pieces of it."""

    def function(x: Tensor, v: Tensor, g: Tensor) -> Tensor:
        y = F.linear(x, torch._weight_norm(v, g, 0))
        return y if asked else y[..., :2] + F.linear(x[..., :1], g[:2])

    program = registered(function, {"pieces": (Piece("g", 0, 0, 2),) * asked}, v=(6, 4), g=(6, 1))
    assert program.pieces == {}
    assert found(program) == [("linear", ("v",), 1), ("linear", ("g",), 1) if asked else ("generic", ("g",), 0)]
