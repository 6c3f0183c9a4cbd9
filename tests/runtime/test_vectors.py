"""Tensors by name as one vector."""

import pytest
import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat, connected, joint_view

FLAT = Flat({"weight": torch.Size([2, 3]), "step": torch.Size([]), "bias": torch.Size([2])})


def tensors() -> dict[str, Tensor]:
    return {"bias": torch.tensor([8.0, 9.0]), "weight": torch.arange(6.0).view(2, 3), "step": torch.tensor(7.0)}


def test_a_vector_has_the_tensors_in_the_order_of_their_places() -> None:
    vector = FLAT.joined(tensors())
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    for name, part in FLAT.parts(vector).items():
        assert torch.equal(part, tensors()[name])
        assert part.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


def test_a_vector_is_in_the_order_of_elements_whatever_the_strides() -> None:
    image = torch.arange(24.0).view(2, 3, 2, 2)
    flat = Flat({"image": image.shape})
    assert torch.equal(flat.joined({"image": image.to(memory_format=torch.channels_last)}), torch.arange(24.0))


@pytest.mark.parametrize("contiguous", [True, False])
def test_precisions_become_the_widest(contiguous: bool) -> None:
    mixed = {**tensors(), "bias": torch.tensor([8.0, 9.0], dtype=torch.float64)}
    if not contiguous:
        mixed["weight"] = torch.arange(6.0).view(3, 2).T
    vector = FLAT.joined(mixed)
    assert vector.dtype is torch.float64
    assert torch.equal(vector[:6], mixed["weight"].flatten()) and vector[6:].tolist() == [7, 8, 9]


def test_a_vector_is_written_where_it_is_asked_for() -> None:
    for weight in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).T):
        out = torch.empty(9)
        assert FLAT.joined({**tensors(), "weight": weight}, out=out) is out
        assert torch.equal(out[:6], weight.flatten()) and out[6:].tolist() == [7, 8, 9]


def test_tensors_that_lie_one_behind_another_have_one_view() -> None:
    memory = torch.arange(12.0)
    view = joint_view([memory[2:4], memory[4:10].view(2, 3)])
    assert view is not None and view.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    view.zero_()
    assert memory.tolist() == [0, 1] + [0] * 8 + [10, 11]


def test_tensors_that_lie_apart_have_no_view() -> None:
    memory = torch.arange(12.0)
    assert joint_view([memory[2:4], memory[5:10]]) is None
    assert joint_view([memory[4:10], memory[2:4]]) is None
    assert joint_view([memory[:6].view(2, 3).T, memory[6:]]) is None
    assert joint_view([memory[:6], torch.empty(12)[6:]]) is None
    assert joint_view([memory[:6], memory.view(torch.int32)[6:]]) is None


def test_scalars_of_groups_are_spread_over_their_parameters_and_one_for_all_stays_one() -> None:
    one, other = torch.tensor(0.1), torch.tensor(0.2)
    assert FLAT.spread(dict.fromkeys(FLAT.shapes, one)) is one
    spread = FLAT.spread({"weight": one, "step": other, "bias": one})
    assert torch.equal(spread, torch.tensor([0.1] * 6 + [0.2] + [0.1] * 2))


def test_groups_that_only_a_third_group_connects_are_in_one_set() -> None:
    groups = [("p", "s"), ("q",), ("p", "q"), ("t",), ("s", "u")]
    assert connected(groups) == [[0, 1, 2, 4], [3]]
    assert connected(groups[:4]) == [[0, 1, 2], [3]]
    assert connected([]) == []
