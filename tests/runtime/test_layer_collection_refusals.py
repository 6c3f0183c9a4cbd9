"""Calls that a collection refuses at once, and not only when a batch meets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.passes.errors import ApproximationError, LossError, RegistrationError
from tests.runtime.collections_of_toys import affine, collection, two_uses


@pytest.mark.parametrize("var", [-1.0, 0.0, torch.tensor(1.0)])
def test_a_variance_is_looked_at_when_it_is_registered(var: Any) -> None:
    lc = affine()
    with pytest.raises(LossError, match="it must be a positive float"):
        lc.register_normal_predictive_distribution("add", var=var)
    assert lc.losses == ()


# --- approximations of linked groups --------------------------------------------------------------------------------


def scanned(lc: LayerCollection, output: str, *params: str, linked: str) -> str:
    lc.define_linked_parameters(params, linked)
    lc.register_normal_predictive_distribution(output)
    lc.auto_register_layers()
    return lc.fisher_blocks[params].approximation


def test_a_scan_refuses_a_link_to_what_the_layer_has_not() -> None:
    text = r"the linked generic\(g\), which no layer has: approximation 'kron' is none of 'diagonal', 'full'\."
    with pytest.raises(ApproximationError, match=text):
        scanned(collection(lambda x, g: x * torch.cdist(x, g[None]), g=(3,)), "mul", "g", linked="kron")
    with pytest.raises(ApproximationError, match="b, w  linear has no 'kron_sua', but"):
        scanned(affine(), "add", "w", "b", linked="kron_sua")


def test_a_linked_approximation_means_what_it_means_at_a_registration() -> None:
    embedding = collection(lambda x, w: F.embedding(x, w), torch.tensor([1, 2]), w=(5, 3))
    assert scanned(embedding, "embedding", "w", linked="kron") == "kron_in_diag"
    assert scanned(two_uses(), "cat", "w", linked="kron_indep_in_diag") == "kron_in_diag"
    assert scanned(two_uses(), "cat", "w", linked="kron") == "kron_indep"


# --- losses on a batch ----------------------------------------------------------------------------------------------


def test_the_total_loss_can_be_trained() -> None:
    model, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.randint(4, (6,))
    lc = LayerCollection(kfac_fx.capture(model, (x,)))
    lc.register_categorical_predictive_distribution("linear", coeff=0.5, targets=y)
    found = torch.autograd.grad(lc.total_loss(), list(model.parameters()))
    expected = torch.autograd.grad(0.5 * F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    assert torch.autograd.grad(lc.total_sampled_loss(torch.randn(2, 3)), model.weight)[0].any()


# --- uses and geometry ----------------------------------------------------------------------------------------------


def test_uses_of_one_mini_batch_are_no_towers() -> None:
    lc = collection(lambda x, w: x[:, 0] @ w + x[:, 1] @ w, torch.randn(6, 2, 3), w=(3, 4))
    lc.register_normal_predictive_distribution("add")
    lc.register_fully_connected("w", None, "matmul")
    lc.register_fully_connected("w", None, "matmul_1", reuse=True)
    with pytest.raises(
        RegistrationError, match="w has 2 towers, .* all cases of the losses at each of matmul .*_multi"
    ):
        lc.check_registration()


def test_towers_that_are_joined_before_one_loss_are_towers() -> None:
    lc = collection(lambda x, w: torch.cat([x[::2] @ w, x[1::2] @ w]), torch.randn(6, 3), w=(3, 4))
    lc.register_normal_predictive_distribution("cat")
    lc.register_fully_connected("w", None, "matmul")
    lc.register_fully_connected("w", None, "matmul_1", reuse=True)
    lc.check_registration()


@pytest.mark.parametrize("sizes", [[2, 3], [1, 2, 3, 1], [1, 1, 2, 3]])
def test_strides_are_read_as_ours_or_with_the_batch_and_channels_of_either_order(sizes: list[int]) -> None:
    lc = collection(lambda x, c: F.conv2d(x, c, stride=(2, 3)), c=(2, 2, 1, 1))
    assert lc.register_conv2d("c", sizes, None, None, "conv2d").num_registered_towers == 1


@pytest.mark.parametrize("sizes", [[], [2, 3, 1], [2, 2, 3, 2]])
def test_strides_of_another_number_of_axes_are_refused(sizes: list[int]) -> None:
    lc = collection(lambda x, c: F.conv2d(x, c, stride=(2, 3)), c=(2, 2, 1, 1))
    with pytest.raises(RegistrationError, match=r"strides=\[.*\], but the graph's conv2d\(c\) has \[2, 3\]"):
        lc.register_conv2d("c", sizes, None, None, "conv2d")


@pytest.mark.parametrize(
    ("method", "args", "before"),
    [
        ("multiply_inverse", (), "register_inverse()"),
        ("multiply_matpower", (0.5,), "register_matpower(exp)"),
        ("multiply_cholesky", (), "register_cholesky()"),
        ("multiply_cholesky_inverse", (), "register_cholesky_inverse()"),
    ],
)
def test_a_block_without_an_estimator_says_what_to_register(method: str, args: tuple[float, ...], before: str) -> None:
    block = affine().register_fully_connected(("w", "b"), None, "add")
    block.instantiate_factors([[torch.randn(6, 5)]], 0.1, [torch.randn(6, 10)])
    vector = torch.ones(10, 5), torch.ones(5)
    with pytest.raises(kfac_fx.NotRegisteredError) as caught:
        getattr(block, method)(vector, *args)
    assert str(caught.value).endswith(f"does not keep what {method} needs: call {before} before")
    getattr(block, before.replace("(exp)", "").replace("()", ""))(*args)
    assert [part.shape for part in getattr(block, method)(vector, *args)] == [(10, 5), (5,)]


@pytest.mark.parametrize("approx", ["diagonal", "full"])
def test_a_gradient_of_every_case_needs_cases_apart_from_positions(approx: str) -> None:
    lc = collection(
        lambda x, w: (x.reshape(-1, 3) @ w).reshape(x.shape[0], 5, 2).sum(1), torch.randn(4, 5, 3), w=(3, 2)
    )
    with pytest.raises(
        ApproximationError, match="w at matmul: the cases are merged with positions there, and '(dia|ful)"
    ):
        lc.register_block("w", with_use(lc, approx))
    lc.register_fully_connected("w", None, "matmul")


def with_use(lc: LayerCollection, approx: str) -> Any:
    block = kfac_fx.fisher_blocks.FisherBlock(lc, "w", approx)
    block.register_additional_tower(None, "matmul")
    return block


def test_a_model_captured_with_a_single_case_has_its_cases_apart() -> None:
    lc = collection(lambda x, w: x @ w, torch.randn(1, 3), w=(3, 2))
    assert lc.register_fully_connected("w", None, "matmul", approx="diagonal").approximation == "diagonal"


def test_a_part_of_a_convolution_has_no_pixels_of_its_own() -> None:
    lc = collection(lambda x, c: F.conv2d(x, c), torch.randn(2, 3, 4, 4), c=(4, 3, 2, 2))
    with pytest.raises(ApproximationError, match=r"c\[0:2\] at conv2d: a part of a conv2d has no 'kron_sua', but"):
        lc.register_conv2d("c[0:2]", None, None, None, "conv2d", approx="kron_sua")


def test_what_was_captured_without_an_example_needs_a_batch() -> None:
    lc = affine()
    lc.register_normal_predictive_distribution("add")
    with pytest.raises(
        LossError, match=r"captured without an example, so that a batch must be given: lc.total_loss\(x"
    ):
        lc.total_sampled_loss()
    assert lc.total_sampled_loss(torch.randn(6, 10)).isfinite()


@pytest.mark.parametrize("approximation", ["full", "diagonal"])
def test_a_normalized_weight_has_no_block_that_needs_its_whole_gradient(approximation: str) -> None:
    lc = collection(lambda x, w: F.linear(x, w / w.norm()), torch.randn(5, 4), w=(3, 4))
    with pytest.raises(ApproximationError, match=rf"w at linear: .* of rank one; '{approximation}' needs the whole"):
        lc.register_fully_connected("w", None, "linear", approx=approximation)
    lc.register_fully_connected("w", None, "linear", approx="kron")


# --- modules that are compiled already ------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [kfac_fx.compile, kfac_fx.capture])
def test_compiled_modules_are_refused_alike(take: Any) -> None:
    """Without this, `capture` told of parameters that were replaced, and nobody had replaced any."""
    net = kfac_fx.compile(nn.Linear(3, 3), (torch.ones(2, 3),), loss="mse")
    text = f"the module is already compiled; pass the original model, net.model, to kfac_fx.{take.__name__}"
    with pytest.raises(RegistrationError, match=text):
        take(net, (torch.ones(2, 3),))
    outer = nn.Sequential(nn.Linear(3, 3), nn.Sequential(net))
    with pytest.raises(
        RegistrationError, match=r"already compiled and would be captured twice: 1\.0; use their .model"
    ):
        take(outer, (torch.ones(2, 3),))
