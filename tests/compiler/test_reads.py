"""Reads as plain data: trees of references, keys that are equal for equal operations, and a read as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.divide import (
    Followed,
    InputRef,
    InputSize,
    Operation,
    ParameterRef,
    Read,
    autocasts_of,
    can_be_kept,
    frozen,
    leaves_of,
    names_of,
    swapped,
    through_mask,
)

W, G = ParameterRef("weight"), ParameterRef("gain")
PARAMETERS = {"weight": nn.Parameter(torch.randn(3, 4)), "gain": nn.Parameter(torch.randn(3, 1))}


def product(under: Any = None) -> Followed:
    return Followed(torch.mul, (W, G), {}, under)


def read(function: Callable[..., Any], *args: Any, written: Tensor | None = None, **kwargs: Any) -> Operation:
    names = tuple(dict.fromkeys(names_of((args, kwargs))))
    return Operation(Read(function, args, kwargs, names, (), written, "key"), PARAMETERS)


def test_every_leaf_of_a_tree_is_swapped_and_its_containers_stay() -> None:
    tree = [1, (2, {"a": 3}), slice(4, None, 5)]
    assert swapped(lambda leaf: leaf and 10 * leaf, tree) == [10, (20, {"a": 30}), slice(40, None, 50)]
    assert leaves_of(tree) == [1, 2, 3, 4, None, 5]


def test_the_names_and_autocasts_behind_a_followed_tensor_are_found() -> None:
    inner = product("float16")
    outer = Followed(torch.add, ([inner], InputRef(0)), {"alpha": 2}, "bfloat16")
    assert list(names_of((outer, {"b": W}))) == ["weight", "gain", "weight"]
    assert list(autocasts_of((outer, W))) == ["bfloat16", "float16"]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ((product(), 1), (product(), 1), True),
        ((product(),), (Followed(torch.mul, (G, W), {}, None),), False),
        ((product(),), (Followed(torch.mul, (W, G), {}, None, place=1),), False),
        ({"a": 1, "b": W}, {"b": W, "a": 1}, True),
        ([W], (W,), False),
        ((W, slice(0, 2)), (W, slice(0, 3)), False),
        (InputRef(0), InputSize(0), False),
    ],
)
def test_equal_operations_have_equal_keys(first: Any, second: Any, equal: bool) -> None:
    assert (frozen(first) == frozen(second)) is equal
    assert not equal or hash(frozen(first)) == hash(frozen(second))


def test_a_read_computes_what_is_behind_its_arguments() -> None:
    x = torch.randn(5, 4)
    operation = read(F.linear, InputRef(0), product())
    assert operation.canonical == {"p0": "weight", "p1": "gain"}
    assert torch.equal(operation(x), F.linear(x, PARAMETERS["weight"] * PARAMETERS["gain"]))


def test_a_followed_tensor_is_computed_once_and_one_of_several_results_is_taken() -> None:
    calls = []

    def halves(tensor: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(tensor)
        return tensor[:2], tensor[2:]

    last = Followed(halves, (W,), {}, None, place=1)
    result = read(torch.stack, [last, last])()
    assert torch.equal(result, PARAMETERS["weight"][2:].expand(2, 1, 4)) and len(calls) == 1


def test_the_first_size_of_an_input_is_an_argument() -> None:
    operation = read(Tensor.expand, G, InputSize(0), 3, 1)
    assert operation(torch.empty(7)).shape == (7, 3, 1)


def test_a_write_into_a_tensor_returns_another_one() -> None:
    target, x = torch.zeros(3, 4), torch.zeros(3, 4)
    written = read(Tensor.add_, InputRef(0), W, alpha=2, written=target)(x)
    assert torch.equal(written, 2 * PARAMETERS["weight"]) and not x.any()


def test_a_write_through_a_mask_takes_the_dtype_of_its_target() -> None:
    x, mask = torch.zeros(3, 4, dtype=torch.float64), torch.tensor([True, False, True])
    operation = read(Tensor.__setitem__, InputRef(0), mask, Followed(torch.select, (W, 0, 1), {}, None), written=x)
    wanted = torch.where(mask[:, None], PARAMETERS["weight"][1], 0).to(torch.float64)
    assert torch.equal(operation(x), wanted) and operation(x).dtype == torch.float64 and not x.any()


@pytest.mark.parametrize(
    ("index", "value", "masked"),
    [
        (torch.tensor([True, False, True]), torch.zeros(4), True),
        (torch.tensor([True, False, True]), torch.zeros(2, 4, 1), False),  # would be broadcast
        (torch.tensor([0, 2]), torch.zeros(4), False),
        (slice(2), torch.zeros(4), False),
        (torch.tensor([True, False, True]), 3.0, False),
    ],
)
def test_which_writes_go_through_a_mask(index: Any, value: Any, masked: bool) -> None:
    assert through_mask(torch.zeros(3, 4), index, value) is masked


@pytest.mark.parametrize(
    ("leaf", "kept"), [(1, True), ("mean", True), (torch.float32, True), (..., True), (None, True), (object(), False)]
)
def test_plain_values_are_kept_in_a_capture(leaf: Any, kept: bool) -> None:
    assert can_be_kept(leaf) is kept
