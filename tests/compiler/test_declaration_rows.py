"""From tensors to rows, by element: which dimension counts the cases, which the groups, and which are positions."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.passes.layers.declaration import Written, as_rows, biases, by_group, elements, weights, written
from kfac_fx.passes.matrix import Layout, Shape


def test_all_dimensions_between_the_first_and_the_last_are_positions() -> None:
    x = torch.randn(2, 3, 4, 5)
    rows = as_rows(x, {})
    assert rows.shape == (2, 12, 5) and torch.equal(rows[1, 4 * 2 + 3], x[1, 2, 3])


def test_a_vector_is_a_single_case() -> None:
    assert as_rows(torch.arange(5.0), {}).tolist() == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("shape", "rows", "place"),
    [
        ((3,), (2, 4, 3), lambda n, s, g: (n, s, g)),
        ((4, 3), (2, 1, 12), lambda n, s, g: (n, g // 3, g % 3)),
        ((1, 4, 1), (2, 3, 4), lambda n, s, g: (n, g, s)),
        ((2, 1, 3), (1, 4, 6), lambda n, s, g: (g // 3, s, g % 3)),  # varies along what else counts the cases
        ((), (2, 12, 1), lambda n, s, g: (n, s // 3, s % 3)),
    ],
)
def test_every_element_of_a_parameter_is_a_group_and_the_other_dimensions_are_positions(
    shape: Shape, rows: Shape, place: object
) -> None:
    x = torch.randn(2, 4, 3, 5)
    grouped = by_group(x, shape)
    assert grouped.shape == (*rows, 5)
    for index in torch.cartesian_prod(*map(torch.arange, rows)).tolist():
        assert torch.equal(grouped[tuple(index)], x[place(*index)])  # type: ignore[operator]


def test_a_parameter_with_more_dimensions_is_broadcast_with_the_tensor() -> None:
    x = torch.randn(2, 3, 5)
    grouped = by_group(x, (4, 1, 3))
    assert grouped.shape == (1, 2, 12, 5) and torch.equal(grouped[0, 1, 3 * 2 + 1], x[1, 1])


def test_the_row_of_an_element_is_its_number() -> None:
    x = torch.randn(2, 4, 3)
    assert torch.equal(elements(x, {"weight": (3,)}), x.unsqueeze(-1))


def test_each_element_of_a_weight_or_bias_is_a_matrix_of_its_own() -> None:
    assert weights(Layout((2, 3)), {}).result == (6, 1, 1)
    assert biases(Layout((2, 3)), {}).result == (6, 1)


def test_an_example_passes_its_parameters_by_name() -> None:
    module, x = written(lambda x, b, w: x * w + b, (4, 3), w=(3,), b=(1,))()
    assert isinstance(module, Written) and x.shape == (4, 3)
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {"w": (3,), "b": (1,)}
    torch.testing.assert_close(module(x), x * module.get_parameter("w") + module.get_parameter("b"))
