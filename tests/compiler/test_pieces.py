"""Views of parameters by their strides, held to what indexing real elements says."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrization import (
    Piece,
    Slice,
    axis_along,
    layout_in,
    narrowed_slice,
    ranges,
    region_in,
    slice_of,
    unallocated,
    view_of,
    viewed,
)

Shape = tuple[int, ...]


def numbered(shape: Shape) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def test_a_piece_is_named_as_python_writes_it() -> None:
    assert Piece("net.weight", 0, 0, 4).name == "net.weight[0:4]"
    assert Piece("table", 2, 1, 3).name == "table[:, :, 1:3]"
    assert Piece("experts", 1, 0, 1, within=(3,)).name == "experts[3:4, 0:1]"


def test_a_piece_of_a_tensor_is_a_view_of_it() -> None:
    piece, tensor = Piece("w", 1, 1, 3), numbered((2, 4))
    assert torch.equal(piece.of(tensor), tensor[:, 1:3]) and piece.shape((2, 4)) == (2, 2)
    assert torch.equal(piece.of(tensor.expand(5, 2, 4), lead=1), tensor[:, 1:3].expand(5, 2, 2))
    piece.of(tensor).zero_()
    assert tensor.tolist() == [[0, 0, 0, 3], [4, 0, 0, 7]]


def test_a_member_of_a_stack_of_stacks_is_a_view_of_it() -> None:
    piece, tensor = Piece("w", 1, 2, 3, within=(1,)), numbered((2, 3, 4))
    assert torch.equal(piece.of(tensor), tensor[1:2, 2:3]) and piece.shape((2, 3, 4)) == (1, 1, 4)
    assert torch.equal(piece.of(tensor.expand(5, 2, 3, 4), lead=1)[4], tensor[1:2, 2:3])


@st.composite
def views(draw: st.DrawFn) -> tuple[Shape, Tensor, Tensor]:
    """A shape, and the same view of a tensor with numbers and of one without data: slices, permutations, splits and
    merges."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    real, empty = numbered(shape), unallocated(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "permute", "merge", "split"]))
        dim = draw(st.integers(0, real.dim() - 1))
        if kind == "slice":
            start = draw(st.integers(0, real.shape[dim] - 1))
            length = draw(st.integers(1, real.shape[dim] - start))
            real, empty = (model.narrow(dim, start, length) for model in (real, empty))
        elif kind == "permute":
            order = draw(st.permutations(range(real.dim())))
            real, empty = (model.permute(order) for model in (real, empty))
        elif kind == "merge" and dim + 1 < real.dim():
            if real.stride(dim) != real.stride(dim + 1) * real.shape[dim + 1]:
                continue  # that would be a copy
            real, empty = (model.flatten(dim, dim + 1) for model in (real, empty))
        elif kind == "split" and real.shape[dim] % 2 == 0:
            real, empty = (model.unflatten(dim, (2, -1)) for model in (real, empty))
    return shape, real, empty


@given(views(), st.data())
@settings(max_examples=150, deadline=None)
def test_ranges_and_layouts_are_those_of_the_elements(view: tuple[Shape, Tensor, Tensor], data: st.DataObject) -> None:
    shape, real, empty = view
    elements, parameter = real.flatten().sort().values, numbered(shape)
    found = ranges(empty, shape)
    for dim, size in enumerate(shape):
        wanted = {
            (start, stop)
            for start in range(size)
            for stop in range(start + 1, size + 1)
            if torch.equal(parameter.narrow(dim, start, stop - start).flatten().sort().values, elements)
        }
        assert wanted == ({found[dim]} if dim in found else set())
    for dim, (start, stop) in found.items():
        piece = Piece("w", dim, start, stop)
        layout = layout_in(piece, shape, empty)
        assert layout is not None and torch.equal(layout.apply(piece.of(parameter)), real)
        if (along := axis_along(empty, shape, dim, stop - start)) is not None:
            axis, steps = along
            cut = data.draw(st.integers(start, stop - 1))
            first = real.narrow(axis, 0, (cut - start + 1) * steps)
            kept = parameter.narrow(dim, start, cut - start + 1)
            assert set(first.flatten().tolist()) == set(kept.flatten().tolist())


def test_a_view_that_runs_on_behind_a_cut_shows_no_slab() -> None:
    """The first eight elements of [4, 6] are no two columns of it, though they are as many."""
    view = unallocated((4, 6)).as_strided((4, 2), (2, 1))
    assert ranges(view, (4, 6)) == {}
    assert ranges(unallocated((4, 6))[:, :2], (4, 6)) == {1: (0, 2)}
    assert ranges(unallocated((4, 6)).flatten()[:8], (4, 6)) == {}
    assert ranges(unallocated((4, 6)).flatten()[6:18], (4, 6)) == {0: (1, 3)}


def test_repeated_elements_and_steps_are_no_slab() -> None:
    assert ranges(unallocated((4,)).expand(3, 4), (4,)) == {}
    assert ranges(unallocated((4, 2))[::2], (4, 2)) == {}


def test_overlapping_windows_are_no_slab() -> None:
    """Two windows of two elements of [4] are as many as all of it, and show the second element twice."""
    assert ranges(unallocated((4,))[:3].unfold(0, 2, 1), (4,)) == {}


def test_an_axis_of_one_element_does_not_run_on_behind_a_cut() -> None:
    """Its stride is longer than the cut, but no step is taken along it."""
    view = unallocated((4, 6)).unflatten(1, (2, 3))[:, :1, :2]
    assert view.stride() == (6, 3, 1) and ranges(view, (4, 6)) == {1: (0, 2)}


def test_a_scalar_has_a_layout_and_no_dimension_to_cut() -> None:
    view = unallocated(()).view(1, 1)
    layout = layout_in(Piece("w", 0, 0, 1), (), view)
    assert layout is not None and layout.result == (1, 1) and ranges(view, ()) == {}


def test_slabs_keep_a_view() -> None:
    view = unallocated((6, 4))[2:4].t()
    slice_ = slice_of("w", view, 0.5)
    assert slice_ == Slice(((0, 4), (0, 2)), "w", (1, 4), 8, 0.5) and slice_.shape == (4, 2)
    again = view_of(slice_)
    assert (again.shape, again.stride(), again.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
    assert narrowed_slice(slice_, 1, 1, 2) == Slice(((0, 4), (1, 2)), "w", (1, 4), 12, 0.5)


def test_layouts_that_copy_are_no_views() -> None:
    weight = Layout((4, 3, 2))
    assert viewed(weight.rearrange("(g o) c k -> g o (c k)", g=2), unallocated((4, 3, 2))) is not None
    assert viewed(weight.rearrange("(g c) o k -> g o (c k)", g=2), unallocated((4, 3, 2))) is None


@pytest.mark.parametrize("pattern", ["o i -> 1 o i", "i o -> 1 o i"])
def test_a_box_of_a_tensor_is_found_in_its_matrix(pattern: str) -> None:
    layout = Layout((4, 6)).rearrange(pattern)
    matrix = viewed(layout, unallocated((4, 6)))
    box = viewed(Layout((2, 3)).rearrange(pattern), unallocated((4, 6))[1:3, 2:5])
    assert matrix is not None and box is not None
    rows, columns = ((1, 3), (2, 5)) if pattern.startswith("o") else ((2, 5), (1, 3))
    assert region_in(matrix, box) == ((0, 1), rows, columns)


def test_what_is_no_box_of_a_matrix_has_no_place_in_it() -> None:
    matrix = unallocated((1, 4, 6))
    assert region_in(matrix, unallocated((1, 4, 6))[:, ::2]) is None
    assert region_in(matrix, unallocated((1, 30))[:, 3:9].view(1, 1, 6)) is None
