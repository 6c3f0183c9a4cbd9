"""The rows of a use: those of its layer, through scales, regions and parametrizations, held to autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.approximations import A, G
from kfac_fx.passes.ir import Registration, Use
from kfac_fx.passes.layers import LAYERS
from kfac_fx.recording import taps as tap
from kfac_fx.recording.taps import both_rows, check_row_shapes, moment_and_grad_rows, scales
from tests.compiler.toy import Toy, before

pytestmark = pytest.mark.usefixtures("float64")

N, S = 4, 7


def registered(function: Any, x: Tensor, layer: str, **shapes: tuple[int, ...]) -> tuple[Registration, Use]:
    program = before("check", Toy(function, **shapes), x)
    (registration,) = [registration for registration in program.registrations if registration.layer == layer]
    return registration, registration.uses[0]


def test_rows_of_a_linear_layer_multiply_to_its_gradient() -> None:
    x, dy = torch.randn(N, S, 5), torch.randn(N, S, 3)
    registration, use = registered(lambda x, w: F.linear(x, w), x, "linear", w=(3, 5))
    r, d = both_rows(registration, use, LAYERS["linear"])(dy, x)
    assert torch.equal(r, x) and torch.equal(d, dy)


def test_cases_come_first_wherever_they_are_in_the_graph() -> None:
    x, dy = torch.randn(S, N, 5), torch.randn(S, N, 3)
    registration, use = registered(lambda x, w: F.linear(x, w), x, "linear", w=(3, 5))
    r, d = both_rows(registration, replace(use, batch_dim=1), LAYERS["linear"])(dy, x)
    assert torch.equal(r, x.transpose(0, 1)) and torch.equal(d, dy.transpose(0, 1))


def test_a_layer_whose_rows_are_columns_finds_the_cases_itself() -> None:
    x, dy = torch.randn(5, N), torch.randn(3, N)
    registration, use = registered(lambda x, w: w @ x, x, "linear", w=(3, 5))
    r, d = both_rows(registration, replace(use, batch_dim=1), LAYERS["linear"])(dy, x)
    assert torch.equal(r.reshape(N, 5), x.T) and torch.equal(d.reshape(N, 3), dy.T)


@pytest.mark.parametrize(("batch_dim", "moved"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_tensor_without_the_dimension_of_the_cases_is_that_of_all(batch_dim: int, moved: bool) -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(tap.cases_first(x, batch_dim), x.movedim(batch_dim, 0) if moved else x)


@pytest.mark.parametrize(("weight", "bias"), [(2.0, -3.0), (1.0, 1.0), (0.5, 0.5)])
def test_multiples_of_weight_and_bias_are_in_the_rows(weight: float, bias: float) -> None:
    """With W = a V and b = c β, against autograd."""
    x, dy = torch.randn(N, 5), torch.randn(N, 3)
    registration, use = registered(lambda x, w, b: F.linear(x, weight * w, bias * b), x, "linear", w=(3, 5), b=(3,))
    assert scales(use) == (weight / bias, bias)
    r, d = both_rows(registration, use, LAYERS["linear"])(dy, x)
    v, beta = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, requires_grad=True)
    gradients = torch.autograd.grad(F.linear(x, weight * v, bias * beta), (v, beta), dy)
    torch.testing.assert_close(d[:, 0].mT @ r[:, 0], gradients[0])
    torch.testing.assert_close(d.sum((0, 1)), gradients[1])


def test_a_shift_alone_has_rows_without_inputs() -> None:
    x, dy = torch.randn(N, 3), torch.randn(N, 3)
    registration, use = registered(lambda x, b: x + b, x, "scale_and_shift", b=(3,))
    r, d = both_rows(registration, use, LAYERS["scale_and_shift"])(dy, x)
    assert r.shape == (N, 1, 3, 0) and torch.equal(d.flatten(), dy.flatten())
    ids = torch.zeros(N, 2, dtype=torch.long)
    assert tap.without_inputs(ids, torch.randn(N, 2, 3))[0].shape == (N, 2, 0)


def test_what_does_not_see_the_batch_has_positions_only() -> None:
    r, d = tap.shared_by_cases(torch.arange(6.0).view(1, 3, 2), torch.randn(4, 3, 5))
    assert r.shape == (1, 12, 2) and d.shape == (1, 12, 5)
    assert torch.equal(r[0, 3:6], r[0, :3])


def test_a_patch_mask_multiplies_the_rows_and_not_the_gradient_rows() -> None:
    x, dy = torch.randn(N, 5), torch.randn(N, 3)
    registration, use = registered(lambda x, w: F.linear(x, w), x, "linear", w=(3, 5))
    masked = tap.with_patch_mask(both_rows(registration, use, LAYERS["linear"]))
    mask = torch.tensor([1, 0, 1, 0, 0.5], dtype=torch.float32)
    r, d = masked(dy, x, mask)
    assert r.dtype == x.dtype and torch.equal(r[:, 0], x * mask) and torch.equal(d[:, 0], dy)


def test_a_step_of_a_parametrization_has_its_own_tensors_under_its_own_names() -> None:
    """The second one of a use reads "1.index", as `index`."""
    step = tap.with_names(lambda both, tensors: (both[0] + tensors["index"], both[1]), {"index": "1.index"})
    assert step((torch.tensor(1), torch.tensor(2)), {"0.index": 10, "1.index": 20}) == (21, 2)


def test_the_second_moment_of_a_convolution_is_that_of_its_patches() -> None:
    """A multiple of the weight multiplies the gradient rows."""
    x, dy = torch.randn(N, 2, 6, 5), torch.randn(N, 3, 6, 5)
    registration, use = registered(lambda x, w: F.conv2d(x, -2 * w, padding=1), x, "conv2d", w=(3, 2, 3, 3))
    found = moment_and_grad_rows(registration, use, LAYERS["conv2d"])
    assert found is not None
    moment, d = found(dy, x)
    r, wanted = both_rows(registration, use, LAYERS["conv2d"])(dy, x)
    patches = r.flatten(0, -2)
    torch.testing.assert_close(moment, (patches.mT @ patches).unsqueeze(0))
    torch.testing.assert_close(d, wanted)
    assert torch.equal(d.flatten(1, 2).mT.flatten(), -2 * dy.flatten())


def test_the_second_moment_is_float32_at_least() -> None:
    x = torch.randn(N, 2, 6, dtype=torch.bfloat16)
    registration, use = registered(lambda x, w: F.conv1d(x, w.to(x.dtype)), x, "conv1d", w=(3, 2, 3))
    find = moment_and_grad_rows(registration, use, LAYERS["conv1d"])
    assert find is not None
    moment, _ = find(torch.randn(N, 3, 4, dtype=torch.bfloat16), x)
    patches = x.float().unfold(2, 3, 1).movedim(1, 2).flatten(0, 1).flatten(1)
    torch.testing.assert_close(moment, (patches.mT @ patches).unsqueeze(0))


def test_sums_of_inputs_count_once_for_all_sources_in_all_their_variants() -> None:
    names = ("count", "count/reduced", "A", A.in_blocks(2).name, "A_diag", "A1", "pairs")
    names += ("G", G.in_blocks(2).name, "per_case", "gradient")
    sums = tap.over_sources([{name: torch.full((2,), value) for name in names} for value in (1.0, 3.0)])
    assert {name for name in names if sums[name].tolist() == [1.0, 1.0]} == set(names[:7])
    assert sums["G"].tolist() == sums["G/2"].tolist() == [4.0, 4.0]
    assert sums["per_case"].tolist() == sums["gradient"].tolist() == [[1.0, 1.0], [3.0, 3.0]]


def test_rows_that_are_scaled_have_no_short_way() -> None:
    x = torch.randn(N, 2, 6)
    registration, use = registered(lambda x, w, b: F.conv1d(x, w, -2 * b), x, "conv1d", w=(3, 2, 3), b=(3,))
    assert moment_and_grad_rows(registration, use, LAYERS["conv1d"]) is None


def test_the_second_moment_has_a_column_of_ones_with_a_bias() -> None:
    x, dy = torch.randn(N, 2, 6), torch.randn(N, 3, 4)
    registration, use = registered(F.conv1d, x, "conv1d", weight=(3, 2, 3), bias=(3,))
    found = moment_and_grad_rows(registration, use, LAYERS["conv1d"])
    assert found is not None
    r, _ = both_rows(registration, use, LAYERS["conv1d"])(dy, x)
    patches = torch.cat([r, torch.ones_like(r[..., :1])], -1).flatten(0, -2)
    torch.testing.assert_close(found(dy, x)[0], (patches.mT @ patches).unsqueeze(0))


@pytest.mark.parametrize("change", [{"patch_mask": (1.0,) * 6}, {"approximation": "kron_sua"}])
def test_masked_patches_and_pixels_have_no_short_way(change: dict[str, Any]) -> None:
    registration, use = registered(F.conv1d, torch.randn(N, 2, 6), "conv1d", weight=(3, 2, 3), bias=(3,))
    assert moment_and_grad_rows(replace(registration, **change), use, LAYERS["conv1d"]) is None


def test_pixels_are_the_rows_of_sua() -> None:
    x = torch.randn(N, 2, 6)
    registration, use = registered(F.conv1d, x, "conv1d", weight=(3, 2, 3), bias=(3,))
    pixels = replace(registration, approximation="kron_sua")
    r, _ = both_rows(pixels, use, LAYERS["conv1d"])(torch.randn(N, 3, 4), x)
    assert torch.equal(r.flatten(2), x.mT)


@pytest.mark.parametrize(
    ("rows", "grads", "sizes"),
    [((5, 2, 3), (5, 2, 4), (1, 4, 3)), ((1, 2, 3), (5, 2, 1, 4), (1, 4, 3)), ((5, 2, 6, 3), (5, 2, 6, 4), (6, 4, 3))],
)
def test_rows_of_the_right_shape(rows: Any, grads: Any, sizes: Any) -> None:
    check_row_shapes(torch.zeros(rows), torch.zeros(grads), sizes)
    if sizes[0] == 1:
        check_row_shapes(torch.zeros(rows[:2], dtype=torch.long), torch.zeros(grads), sizes)


@pytest.mark.parametrize(
    ("rows", "grads", "sizes"),
    [((5, 3, 3), (5, 2, 4), (1, 4, 3)), ((2, 2, 3), (5, 2, 4), (1, 4, 3)), ((5, 2, 3), (5, 2, 6, 4), (6, 4, 3))],
)
def test_rows_of_a_wrong_shape(rows: Any, grads: Any, sizes: Any) -> None:
    with pytest.raises(ValueError, match="rows of shape .*, wanted"):
        check_row_shapes(torch.zeros(rows), torch.zeros(grads), sizes)
