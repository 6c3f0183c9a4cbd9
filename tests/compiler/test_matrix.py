"""Layouts are invertible views in named axes, and a matrix form packs parameters into one matrix and back."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfac_fx.passes.errors import LayerError
from kfac_fx.passes.matrix import AlikeForms, Layout, MatrixForm, Shape

# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "pattern", "sizes", "result"),
    [
        ((3, 5), "o i -> o i", {}, (3, 5)),
        ((5, 3), "i o -> o i", {}, (3, 5)),
        ((6, 2, 3, 4), "(g o) c h w -> g o (c h w)", {"g": 2}, (2, 3, 24)),
        ((6, 2, 3), "(g c) o l -> g o (c l)", {"g": 3}, (3, 2, 6)),
        ((5,), "i -> 1 i", {}, (1, 5)),
        ((5, 1), "o 1 -> () o", {}, (1, 5)),
        ((2, 3), "g o -> g o", {"g": 2, "unused": 7}, (2, 3)),
        ((), "-> 1", {}, (1,)),
    ],
)
def test_a_pattern_gives_the_shape(shape: Shape, pattern: str, sizes: dict[str, int], result: Shape) -> None:
    assert Layout(shape).rearrange(pattern, **sizes).result == result


def sides(axes: list[str]) -> st.SearchStrategy[list[list[str]]]:
    """The axes in any order, neighbors merged in any way, with axes of size 1 in between."""

    def merged(order: list[str]) -> st.SearchStrategy[list[list[str]]]:
        cuts = st.lists(st.integers(0, len(order)), max_size=4).map(lambda ends: sorted({0, *ends, len(order)}))
        split = cuts.map(lambda ends: [order[a:b] for a, b in itertools.pairwise(ends)])
        return st.tuples(split, st.integers(0, 5)).map(lambda both: [*both[0][: both[1]], [], *both[0][both[1] :]])

    return st.permutations(axes).flatmap(merged)


def written(side: list[list[str]]) -> str:
    return " ".join(f"({' '.join(axis)})" for axis in side)


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[dict[str, int], list[list[str]], list[list[str]]]:
    axes = list("abcd")[: draw(st.integers(1, 4))]
    sizes = {name: draw(st.integers(1, 4)) for name in axes}
    return sizes, draw(sides(axes)), draw(sides(axes))


@given(rearrangements())
def test_a_pattern_moves_every_element_by_the_names_of_its_axes(
    case: tuple[dict[str, int], list[list[str]], list[list[str]]],
) -> None:
    sizes, left, right = case
    shape = tuple(math.prod(sizes[name] for name in axis) for axis in left)
    layout = Layout(shape).rearrange(f"{written(left)} -> {written(right)}", **sizes)
    tensor = torch.arange(math.prod(shape)).reshape(shape)

    moved = layout.apply(tensor)

    assert moved.shape == layout.result
    assert torch.equal(layout.invert(moved), tensor)
    for index in itertools.product(*(range(size) for size in sizes.values())):
        place = dict(zip(sizes, index, strict=True))
        assert moved[offsets(right, sizes, place)] == tensor[offsets(left, sizes, place)]


def offsets(side: list[list[str]], sizes: dict[str, int], place: dict[str, int]) -> tuple[int, ...]:
    """Where an element of the named axes lies on one side of the pattern."""
    found = []
    for axis in side:
        offset = 0
        for name in axis:
            offset = offset * sizes[name] + place[name]
        found.append(offset)
    return tuple(found)


def test_layouts_chain_and_come_back() -> None:
    layout = Layout((4, 6)).reshape((4, 2, 3)).permute((2, 0, 1)).rearrange("a (b c) d -> (d a) c b", b=2)
    tensor = torch.randn(4, 6)
    assert layout.apply(tensor).shape == layout.result == (6, 2, 2)
    assert torch.equal(layout.invert(layout.apply(tensor)), tensor)


def test_views_that_change_nothing_leave_no_step() -> None:
    assert Layout((3, 5)).reshape((3, 5)).permute((0, 1)).rearrange("o i -> o i").steps == ()


@pytest.mark.parametrize(
    ("shape", "pattern", "sizes", "text"),
    [
        ((3, 5), "o i -> o", {}, r"'o i -> o' must name the same axes on both sides, each once"),
        ((3, 5), "o o -> o o", {}, r"must name the same axes on both sides, each once"),
        ((3, 5), "o i", {}, r"must name the same axes on both sides, each once"),
        ((3, 5, 2), "o i -> o i", {}, r"'o i -> o i' has 2 axes, the parameter has shape \[3, 5, 2\]"),
        ((6, 5), "(g o) i -> g o i", {}, r"'\(g o\) i -> g o i' with {} does not fit shape \[6, 5\]"),
        ((6, 5), "(g o) i -> g o i", {"g": 4}, r"with {'g': 4} does not fit shape \[6, 5\]"),
        ((6, 5), "g o -> g o", {"g": 3}, r"with {'g': 3} does not fit shape \[6, 5\]"),
        ((6, 5), "o 1 -> o", {}, r"'o 1 -> o' with {} does not fit shape \[6, 5\]"),
    ],
)
def test_a_pattern_that_does_not_fit_is_an_error(shape: Shape, pattern: str, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(LayerError, match=text):
        Layout(shape).rearrange(pattern, **sizes)


def test_a_reshape_that_loses_elements_is_an_error() -> None:
    with pytest.raises(LayerError, match=r"shape \[3, 5\] cannot be laid out as \[4, 4\]"):
        Layout((3, 5)).reshape((4, 4))


# --- matrix forms ---------------------------------------------------------------------------------------------------

WEIGHT = ("w", Layout((6, 2, 3)).rearrange("(g o) c l -> g o (c l)", g=2))
BIAS = ("b", Layout((6,)).rearrange("(g o) -> g o", g=2))


@pytest.mark.parametrize(
    ("form", "parameters", "shape"),
    [
        (MatrixForm(WEIGHT, BIAS), ("w", "b"), (2, 3, 7)),
        (MatrixForm(WEIGHT, None), ("w",), (2, 3, 6)),
        (MatrixForm(None, BIAS), ("b",), (2, 3, 1)),
    ],
)
def test_packing_and_unpacking_are_inverse(form: MatrixForm, parameters: tuple[str, ...], shape: Shape) -> None:
    tensors = {name: torch.randn(6, 2, 3) if name == "w" else torch.randn(6) for name in parameters}

    matrix = form.pack(tensors)
    again = form.unpack(matrix)

    assert form.parameters == parameters
    assert form.shape == matrix.shape == shape
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def renamed(form: MatrixForm, number: int, turned: bool) -> MatrixForm:
    """The same of parameters of its own; turned: every other one is stored the other way round."""
    weight, bias = form.weight, form.bias
    layout = Layout((6, 3, 2)).rearrange("(g o) l c -> g o (c l)", g=2) if turned and number % 2 else WEIGHT[1]
    return MatrixForm(weight and (f"w{number}", layout), bias and (f"b{number}", bias[1]))


@pytest.mark.parametrize("form", [MatrixForm(WEIGHT, BIAS), MatrixForm(WEIGHT, None), MatrixForm(None, BIAS)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_forms_that_are_alike_are_packed_at_once(form: MatrixForm, turned: bool, count: int) -> None:
    forms = [renamed(form, number, turned) for number in range(count)]
    tensors = {name: torch.randn(shape) for form in forms for name, shape in form.shapes.items()}
    together = AlikeForms.of(forms)
    assert together is not None

    for members in (slice(None), slice(count - 1, count)):
        chosen = {name: tensors[name] for form in forms[members] for name in form.parameters}
        matrices = together[members].pack(chosen)
        assert torch.equal(matrices, torch.stack([form.pack(chosen) for form in forms[members]]))
        again = together[members].unpack(matrices)
        assert again.keys() == chosen.keys() and all(torch.equal(again[name], chosen[name]) for name in chosen)


def test_stacks_of_equal_layouts_that_permute_are_packed_one_by_one() -> None:
    layout = Layout((2, 3, 4)).rearrange("i g o -> g o i")
    forms = [MatrixForm((f"w{number}", layout), None) for number in range(2)]
    tensors = {f"w{number}": torch.randn(2, 3, 4) for number in range(2)}
    together = AlikeForms.of(forms)
    assert together is not None and together.weights is not None and together.weights.common is None

    matrices = together.pack(tensors)

    assert torch.equal(matrices, torch.stack([tensor.permute(1, 2, 0) for tensor in tensors.values()]))
    again = together.unpack(matrices)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_forms_with_and_without_a_bias_are_not_alike() -> None:
    form = MatrixForm(WEIGHT, BIAS)
    assert AlikeForms.of([form, MatrixForm(WEIGHT, None)]) is None
    assert AlikeForms.of([form, object()]) is None


def test_the_bias_is_the_last_column() -> None:
    matrix = MatrixForm(WEIGHT, BIAS).pack({"w": torch.zeros(6, 2, 3), "b": torch.arange(6.0)})
    assert torch.equal(matrix[..., -1], torch.arange(6.0).reshape(2, 3))
    assert not matrix[..., :-1].any()


def test_packing_is_differentiable() -> None:
    tensors = {"w": torch.randn(6, 2, 3, requires_grad=True), "b": torch.randn(6, requires_grad=True)}
    form, weight = MatrixForm(WEIGHT, BIAS), torch.randn(2, 3, 7)
    grads = torch.autograd.grad((form.pack(tensors) * weight).sum(), list(tensors.values()))
    torch.testing.assert_close(dict(zip(tensors, grads, strict=True)), form.unpack(weight))


def test_a_matrix_of_nothing_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="bug in kfac_fx: a matrix form without parameters"):
        _ = MatrixForm(None, None).shape
    with pytest.raises(AssertionError, match="bug in kfac_fx: a matrix form without parameters"):
        MatrixForm(None, None).pack({})
