"""Uses taken apart: the places of parameters in the matrix of a use, and a use for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kfac_fx.passes.ir import Program, Use
from kfac_fx.passes.matrix import Shape
from kfac_fx.passes.parametrization import Piece, unallocated
from kfac_fx.passes.parametrizations.functions import Elementwise
from kfac_fx.passes.parametrizations.parts import (
    Part,
    Sliced,
    in_region,
    partial,
    parts_of,
    region_of,
    share_elements,
    taken_apart,
    whole_uses,
)
from tests.compiler.toy import Toy, before

Function = Callable[..., Any]
REGION = ((0, 2), (1, 3), (2, 5))  # of groups, outputs and inputs


def matched(function: Function, **shapes: Shape) -> tuple[Use, Program]:
    """The last match, as `cut` finds it."""
    program = before("cut", Toy(function, **shapes))
    return program.matches[-1], program


def parts(function: Function, **shapes: Shape) -> list[Part]:
    found = parts_of(*matched(function, **shapes))
    assert found is not None
    return found


def apart(function: Function, **shapes: Shape) -> list[tuple[tuple[str, ...], Any]]:
    use, program = matched(function, **shapes)
    found = parts_of(use, program)
    assert found is not None
    return [
        (tuple(bound.parameter for bound in alone.parameters.values()), region_of(alone))
        for alone in taken_apart(use, found, program.shapes)
    ]


def test_whole_parameters_have_all_of_the_matrix() -> None:
    weight, bias = parts(F.linear, weight=(6, 4), bias=(6,))
    assert (weight.role, weight.region) == ("weight", ((0, 1), (0, 6), (0, 4)))
    assert (bias.role, bias.region) == ("bias", ((0, 1), (0, 6), (0, 1)))


def test_parts_that_are_put_together_have_their_places_and_scales() -> None:
    first, second = parts(lambda x, w, v: F.linear(x, torch.cat([w, -2 * v[1:]])), w=(2, 4), v=(5, 4))
    assert (first.parameter, first.region, first.scale) == ("w", ((0, 1), (0, 2), (0, 4)), 1.0)
    assert (second.parameter, second.region, second.scale) == ("v", ((0, 1), (2, 6), (0, 4)), -2.0)
    assert second.view.shape == (1, 4, 4) and second.view.storage_offset() == 4


def test_parts_of_a_transposed_weight_are_turned_with_it() -> None:
    """Columns of w, as the outputs of the matrix."""
    (part,) = parts(lambda x, w: x @ w[:, 1:], w=(4, 6))
    assert part.region == ((0, 1), (0, 5), (0, 4)) and part.view.stride()[1:] == (1, 6)


def test_a_parameter_that_is_copied_on_the_way_has_no_parts() -> None:
    use, program = matched(lambda x, w: F.conv_transpose1d(x, w, groups=2), w=(4, 3, 2))
    assert parts_of(use, program) is None


def test_a_bias_goes_with_the_weight_of_its_outputs() -> None:
    assert apart(lambda x, w, v, b: F.linear(x, torch.cat([w, v]), b), w=(2, 4), v=(4, 4), b=(6,)) == [
        (("w",), ((0, 1), (0, 2), (0, 4))),
        (("v",), ((0, 1), (2, 6), (0, 4))),
        (("b",), ((0, 1), (0, 6), (0, 0))),
    ]
    assert apart(lambda x, w, b, c: F.linear(x, w, torch.cat([b, c])), w=(6, 4), b=(2,), c=(4,)) == [
        (("w",), None),
        (("b",), ((0, 1), (0, 2), (0, 0))),
        (("c",), ((0, 1), (2, 6), (0, 0))),
    ]
    assert apart(lambda x, w, b: F.linear(x, 2 * w, b), w=(6, 4), b=(6,)) == [(("w", "b"), None)]


def test_a_bias_behind_a_function_is_on_its_own() -> None:
    use, program = matched(lambda x, w, b: F.linear(x, w, b.exp()), w=(6, 4), b=(6,))
    found = parts_of(use, program)
    assert found is not None
    weight, bias = taken_apart(use, found, program.shapes)
    assert weight.through == () and weight.parameter_set == {"w"}
    assert region_of(bias) == ((0, 1), (0, 6), (0, 0)) and isinstance(bias.through[-1], Elementwise)


def test_a_product_of_matrices_has_whole_uses_and_a_slice_has_none() -> None:
    use, program = matched(lambda x, a, b: F.linear(x, a @ b), a=(6, 2), b=(2, 4))
    uses = whole_uses(use, program.shapes)
    assert uses is not None
    assert sorted(name for alone in uses for name in alone.parameter_set) == ["a", "b"]
    assert whole_uses(*sliced()) is None


def test_whole_parameters_in_another_order_have_a_use_with_their_layout() -> None:
    """The matrix of a grouped transposed convolution is no view of its weight."""
    use, program = matched(lambda x, w: F.conv_transpose1d(x, 3 * w.transpose(0, 1), groups=2), w=(3, 4, 2))
    (alone,) = whole_uses(use, program.shapes) or ()
    bound = alone.parameters["weight"]
    assert (bound.parameter, bound.used.result, bound.scale) == ("w", (4, 3, 2), 3.0)
    assert alone.exprs == {} and alone.through == use.through == ()


def test_a_whole_weight_behind_a_gain_has_a_use_and_the_gain_another() -> None:
    use, program = matched(lambda x, w, e: F.conv_transpose1d(x, w * e[:, None, None], groups=2), w=(4, 3, 2), e=(4,))
    weight, gain = whole_uses(use, program.shapes) or ()
    assert [set(alone.parameter_set) for alone in (weight, gain)] == [{"w"}, {"e"}]
    assert [type(step).__name__ for step in weight.through] == ["Scaled"]
    assert [type(step).__name__ for step in gain.through] == ["Gain"]


def test_a_whole_bias_behind_a_function_has_no_whole_use() -> None:
    use, program = matched(lambda x, w, b: F.conv_transpose1d(x, w, b.exp()), w=(4, 3, 2), b=(3,))
    assert whole_uses(use, program.shapes) is None


def sliced() -> tuple[Use, Any]:
    use, program = matched(lambda x, w: F.linear(x, w[:2]), w=(6, 4))
    return use, program.shapes


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (Part("bias", "w", unallocated((1, 2, 1)), ((0, 1), (0, 2), (0, 1))), True),
        (Part("bias", "b", unallocated((1, 2, 1)), ((0, 1), (0, 2), (0, 1))), False),
        (Part("bias", "w", unallocated((1, 2, 1)), ((0, 1), (0, 2), (0, 1)), piece=Piece("w", 0, 0, 2)), False),
    ],
)
def test_a_bias_that_is_the_weight_itself_shares_its_elements(other: Part, shared: bool) -> None:
    weight = Part("weight", "w", unallocated((1, 2, 1)), ((0, 1), (0, 2), (0, 1)))
    assert share_elements(weight, other) is shared


def test_a_part_has_fewer_elements_than_its_parameter() -> None:
    assert partial(unallocated((2, 4)), (6, 4)) and not partial(unallocated((4, 6)), (6, 4))


def test_a_region_has_the_inputs_of_the_rows_and_the_outputs_of_the_gradient_rows() -> None:
    rows, grad_rows = torch.randn(4, 7, 6), torch.randn(4, 7, 3)
    part = Sliced(((0, 1), *REGION[1:])).step()((rows, grad_rows), {})
    assert torch.equal(part[0], rows[..., 2:5]) and torch.equal(part[1], grad_rows[..., 1:3])


def test_a_region_has_its_groups_of_both() -> None:
    rows, grad_rows = torch.randn(4, 7, 3, 6), torch.randn(4, 7, 3, 4)
    part = in_region(rows, grad_rows, REGION)
    assert torch.equal(part[0], rows[:, :, :2, 2:5]) and torch.equal(part[1], grad_rows[:, :, :2, 1:3])


def test_ids_outside_a_region_have_no_row_and_the_others_are_counted_from_its_start() -> None:
    ids, _ = in_region(torch.tensor([[1, 2, 4, 5, -1]]), torch.zeros(1, 5, 3), REGION)
    assert ids.tolist() == [[-1, 0, 2, -1, -1]]
