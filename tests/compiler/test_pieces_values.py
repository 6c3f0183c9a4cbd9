"""Values of a graph: the elements of parameters that a tensor holds after each operation.

`shown` writes out a value by its definition, element by element; torch computes the same on numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kfac_fx.passes import parametrization
from kfac_fx.passes.graphs.operations import dims_after
from kfac_fx.passes.parametrization import ParameterExpr, slice_of, unallocated

NUMBERS = {"w": torch.arange(1.0, 25).view(2, 3, 4), "v": -torch.arange(1.0, 25).view(2, 3, 4)}


def whole(name: str) -> ParameterExpr:
    shape = tuple(NUMBERS[name].shape)
    return ParameterExpr(shape, (slice_of(name, unallocated(shape)),))


def shown(value: ParameterExpr | None) -> Tensor:
    """The tensor that a value stands for: zero where it is constant."""
    assert value is not None
    tensor = torch.zeros(value.shape)
    for part in value.slices:
        elements = NUMBERS[part.parameter].as_strided(part.shape, part.strides, part.offset)
        tensor[tuple(slice(*ends) for ends in part.box)] = part.scale * elements
    return tensor


def node(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args), kwargs)


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[1],
        lambda t: t[:, 1:],
        lambda t: t[:, :, 1:3],
        lambda t: t[1, :, 1],
        lambda t: t[1:, 2, 1:],
        lambda t: t[0, 2, 1],
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_part_of_a_value_is_the_same_part_of_its_slices(part: Callable[[Any], Any], turned: bool) -> None:
    """Also of one that is put together of two, and after its dimensions changed places."""
    value, tensor = parametrization.concatenated([whole("w"), whole("v")], 1), torch.cat([*NUMBERS.values()], 1)
    assert value is not None
    if turned:
        value = ParameterExpr((4, 6, 2), tuple(parametrization.permuted(part, (2, 1, 0)) for part in value.slices))
        tensor = tensor.permute(2, 1, 0)
    assert torch.equal(shown(parametrization.seen_part(value, part(unallocated(value.shape)))), part(tensor))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t[:, ::2],
        lambda t: t.expand(2, 2, 3, 4),
        lambda t: t.as_strided((2, 4, 4), (12, 4, 1)),
    ],
)
def test_a_view_that_is_no_box_of_a_value_is_none(view: Callable[[Any], Any]) -> None:
    assert parametrization.seen_part(whole("w"), view(unallocated((2, 3, 4)))) is None


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_concatenated_slices_keep_their_order(dim: int) -> None:
    value = parametrization.concatenated([whole("w"), ParameterExpr((2, 3, 4), ()), whole("v")], dim)
    zeros = torch.zeros(2, 3, 4)
    assert torch.equal(shown(value), torch.cat([NUMBERS["w"], zeros, NUMBERS["v"]], dim))


def test_constants_by_themselves_have_no_value() -> None:
    assert parametrization.concatenated([ParameterExpr((2, 3), ()), ParameterExpr((1, 3), ())], 0) is None


@pytest.mark.parametrize("dim", [0, 1, 3, -1, -2])
def test_an_unsqueezed_value_has_one_more_dimension(dim: int) -> None:
    assert torch.equal(shown(parametrization.unsqueezed(whole("w"), dim)), NUMBERS["w"].unsqueeze(dim))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_permuted_slice_has_its_dimensions_in_another_order(order: tuple[int, ...]) -> None:
    (part,) = whole("w").slices
    sizes = tuple(NUMBERS["w"].shape[dim] for dim in order)
    assert torch.equal(
        shown(ParameterExpr(sizes, (parametrization.permuted(part, order),))), NUMBERS["w"].permute(order)
    )
    assert dims_after(node(torch.permute, order), 3, (order,)) == order


def test_a_multiple_multiplies_the_scale() -> None:
    value = parametrization.multiple_of(parametrization.multiple_of(whole("w"), 3.0), -0.5)
    assert torch.equal(shown(value), -1.5 * NUMBERS["w"])
    assert parametrization.multiple_of(whole("w"), None) is None and parametrization.multiple_of(None, 2.0) is None


def test_a_view_that_repeats_elements_is_no_expression() -> None:
    (part,) = whole("w").slices
    with pytest.raises(ValueError):
        parametrization.expr_of(unallocated((2, 3, 4)).unsqueeze(0).expand(2, -1, -1, -1), part)
    once = parametrization.expr_of(unallocated((2, 3, 4)).expand(1, -1, -1, -1), part)  # a stride of 0, for one place
    assert torch.equal(shown(once), NUMBERS["w"][None])
    turned = parametrization.expr_of(unallocated((2, 3, 4)).transpose(0, 2), part)
    assert torch.equal(shown(turned), NUMBERS["w"].transpose(0, 2))


def test_arguments_without_data_have_the_shapes_of_their_values() -> None:
    called = node(torch.narrow, 1, 0, 2)
    (x,) = called.all_input_nodes
    tensor, dim, *_ = parametrization.without_data(called.args, {x: whole("w")})
    assert tensor.shape == (2, 3, 4) and tensor.is_meta and dim == 1
    with pytest.raises(ValueError, match="x has no value"):
        parametrization.without_data(called.args, {})
