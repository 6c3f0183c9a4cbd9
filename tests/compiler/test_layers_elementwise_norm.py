"""Rows of normalization layers: one group an element of the gain, and in it the normalized input."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.passes.layers.elementwise import batch_norm, channels, group_norm, instance_norm, layer_norm, rms_norm

EPS = 1e-3


def normalized(x: Tensor, dims: tuple[int, ...], center: bool = True) -> Tensor:
    """By the mean and the biased variance over `dims`."""
    x = x - x.mean(dims, keepdim=True) if center else x
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def test_layer_norm_normalizes_every_position_over_the_shape_of_its_gain() -> None:
    x = torch.randn(4, 7, 2, 5)
    rows = layer_norm.forms[0].rows(x, {"eps": EPS, "weight": (2, 5)})
    torch.testing.assert_close(rows, normalized(x, (2, 3)).flatten(2).unsqueeze(-1))


def test_rms_norm_does_not_center() -> None:
    x = torch.randn(4, 7, 5)
    rows = rms_norm.forms[0].rows(x, {"eps": EPS, "weight": (5,)})
    torch.testing.assert_close(rows, normalized(x, (2,), center=False).unsqueeze(-1))


def test_group_norm_normalizes_groups_of_channels_in_each_case() -> None:
    x = torch.randn(4, 6, 5)
    rows = group_norm.forms[0].rows(x, {"num_groups": 2, "eps": EPS, "weight": (6,)})
    wanted = normalized(x.unflatten(1, (2, 3)), (2, 3)).flatten(1, 2)
    torch.testing.assert_close(rows, wanted.mT.unsqueeze(-1))


def test_batch_norm_in_training_normalizes_over_cases_and_positions() -> None:
    x = torch.randn(4, 3, 5)
    rows = batch_norm.forms[0].rows(x, {"eps": EPS, "weight": (3,)})
    torch.testing.assert_close(rows, normalized(x, (0, 2)).mT.unsqueeze(-1))


def test_batch_norm_in_evaluation_normalizes_by_its_running_statistics() -> None:
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3) + 0.5
    rows = batch_norm.forms[1].rows(x, {"eps": EPS, "weight": (3,), "mean": mean, "var": var})
    wanted = (x - mean[:, None]) / (var[:, None] + EPS).sqrt()
    torch.testing.assert_close(rows, wanted.mT.unsqueeze(-1))


def test_instance_norm_normalizes_every_case_by_itself() -> None:
    x = torch.randn(4, 3, 5)
    rows = instance_norm.forms[0].rows(x, {"eps": EPS, "weight": (3,)})
    torch.testing.assert_close(rows, normalized(x, (2,)).mT.unsqueeze(-1))


def test_the_parameters_of_channels_lie_along_the_second_dimension() -> None:
    dy = torch.randn(4, 3, 2, 5)
    rows = channels(dy, {"weight": (3,)})
    assert rows.shape == (4, 10, 3, 1) and rows[2, 5 * 1 + 4, 0, 0] == dy[2, 0, 1, 4]
