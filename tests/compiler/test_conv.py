"""The second moment of patches by the short way, against the patches themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.layers.conv import patches, second_moment
from kfac_fx.passes.resolve import resolve
from tests.compiler.toy import Toy, before, found

# (channels, groups, sizes, kernel, stride, dilation, padding)
CASES: dict[str, tuple[Any, ...]] = {
    "an ordinary one": (4, 1, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one pixel": (4, 1, (5, 4), (1, 1), (1, 1), (1, 1), (0, 0)),
    "strides and dilations that share lines": (4, 2, (9, 7), (3, 2), (2, 1), (2, 2), (0, 1)),
    "strides and dilations that share none": (2, 1, (12,), (5,), (3,), (2,), (3,)),
    "a stride that leaves lines out": (2, 1, (11,), (2,), (4,), (1,), (0,)),
    "three axes": (2, 2, (7, 6, 5), (3, 2, 1), (1, 2, 3), (2, 3, 1), (0, 1, 0)),
    "depthwise": (4, 4, (9, 7), (3, 3), (1, 2), (2, 1), (2, 2)),
    "as many lines as the kernel has": (3, 1, (4, 4), (3, 3), (1, 1), (1, 1), (0, 0)),
    "an image of one patch": (3, 1, (3, 3), (3, 3), (1, 1), (1, 1), (0, 0)),
    "a kernel wider than the image": (2, 1, (2, 5), (5, 3), (1, 1), (1, 1), (2, 1)),
}


def made(case: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Any]]:
    channels, groups, sizes, kernel, stride, dilation, padding = case
    x = torch.randn(3, channels, *sizes, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weight = (2 * groups, channels // groups, *kernel)
    return x, {"weight": weight, "stride": stride, "dilation": dilation, "padding": padding, "groups": groups}


def over_rows(x: Tensor, attrs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    rows = patches(x, attrs)
    return torch.einsum("nsgi,nsgj->gij", rows, rows), rows.sum((0, 1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_short_way_is_the_sum_over_patches(case: tuple[Any, ...]) -> None:
    x, attrs = made(case)
    torch.testing.assert_close(second_moment(x, attrs), over_rows(x, attrs))


def test_patches_are_those_of_torch() -> None:
    x, attrs = made(CASES["an ordinary one"])
    expected = torch.nn.functional.unfold(x, 3, padding=1).mT.unsqueeze(2)
    assert torch.equal(patches(x, attrs), expected)


def test_a_single_image_is_a_batch_of_one() -> None:
    x, attrs = made(CASES["an ordinary one"])
    torch.testing.assert_close(second_moment(x[0], attrs), over_rows(x[:1], attrs))


def test_it_is_symmetric_to_the_last_bit_off_the_diagonal_blocks() -> None:
    x, attrs = made(CASES["an ordinary one"], torch.float32)
    second, _ = second_moment(x, attrs)
    by_place = second.view(4, 9, 4, 9)
    assert torch.equal(by_place[:, :3, :, 3:], by_place[:, 3:, :, :3].permute(2, 3, 0, 1))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo
def test_it_compiles_without_graph_breaks_for_any_batch() -> None:
    torch.compiler.reset()
    short = torch.compile(second_moment, fullgraph=True, backend="aot_eager")
    x, attrs = made(CASES["a stride that leaves lines out"])
    for size in (2, 3):  # the second time with a free number of cases
        torch.testing.assert_close(short(x[:size], attrs), over_rows(x[:size], attrs))


def grouped(function: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[str, tuple[str, ...], int]]:
    return found(resolve(before("resolve", Toy(lambda x, w: function(x, w, groups=x.size(1)), w=(6, 1, 3)), *inputs)))


def test_a_number_of_groups_that_forward_counts_leaves_the_weight_generic() -> None:
    """The weight fits several numbers, and the matrices of a block have known sizes."""
    x = torch.randn(8, 6, 4)
    assert grouped(F.conv1d) == grouped(F.conv1d, x) == grouped(F.conv_transpose1d) == [("generic", ("w",), 0)]
    assert grouped(F.conv_transpose1d, x) == [("conv_transpose1d", ("w",), 1)]  # the channels are the weight's 6
