"""The common part of all parametrizations: their nodes by name, what they allow, and views as literals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrization import (
    Computed,
    Parametrization,
    RowsStep,
    Transposed,
    Value,
    apply_views,
    view_steps,
)

GRAPH = fx.Graph()
X, Y = (GRAPH.placeholder(name) for name in "xy")


@dataclass(frozen=True)
class Scaled(Parametrization):
    by: Value
    others: tuple[Value | int, ...] = ()
    number: int = 3

    def step(self) -> RowsStep:
        return lambda both, tensors: (both[0] * tensors["by"], both[1])


def test_its_nodes_have_the_names_of_their_fields_and_numbers_in_tuples() -> None:
    value = Computed(torch.t, (Y,))
    assert Scaled(X, (value, 5, Y)).nodes == {"by": X, "others0": value, "others2": Y}


def test_unless_it_says_so_it_is_exact_and_serves_every_sample_and_mask_but_no_pixels() -> None:
    step = Scaled(X)
    assert (step.left_out, step.all_rows, step.unmasked, step.default) == (None, None, None, None)
    assert not (step.keeps_pixels or step.keeps_elements or step.merges_groups)
    assert step.remainder(torch.ones(2), {}) is None


def test_a_transposed_weight_swaps_rows_and_gradient_rows() -> None:
    rows, grad_rows = torch.randn(4, 7, 5), torch.randn(4, 7, 3)
    swapped = Transposed().step()((rows, grad_rows), {})
    assert swapped[0] is grad_rows and swapped[1] is rows
    assert Transposed().all_rows == "the gradients of its output are rows" and Transposed().keeps_elements


def test_views_lead_back_through_one_layout_and_on_through_another() -> None:
    """From the matrix of a use to the parameter, and from there to the matrix of another one."""
    stored = Layout((6, 2, 3))
    first, second = stored.rearrange("o c k -> o (c k)"), stored.rearrange("(g o) c k -> g (c k) o", g=2)
    parameter = torch.randn(6, 2, 3)
    steps = view_steps(first, second)
    assert torch.equal(apply_views(first.apply(parameter), steps), second.apply(parameter))
    assert torch.equal(apply_views(second.apply(parameter), view_steps(second, first)), first.apply(parameter))
    assert all(isinstance(number, int) for order, shape in steps for number in (*order, *shape))


def test_views_through_permutations_only_are_inverted_too() -> None:
    turned = Layout((2, 3, 4)).permute((2, 0, 1))
    x: Tensor = torch.randn(4, 2, 3)
    assert torch.equal(apply_views(x, view_steps(turned, Layout((2, 3, 4)))), x.permute(1, 2, 0))
