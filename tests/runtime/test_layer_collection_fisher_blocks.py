"""The Fisher blocks of TF K-FAC on tensors of one's own, held to golden numbers, and which class a layer gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx.compiled.fisher_blocks import (
    DiagonalFB,
    FullFB,
    FullyConnectedKFACBasicFB,
    KroneckerProductFB,
    NaiveDiagonalFB,
    NaiveFullFB,
    ScaleAndShiftDiagonalFB,
    ScaleAndShiftFullFB,
    block_class,
)
from kfac_fx.passes.errors import FactorNotReady
from tests.runtime.collections_of_toys import affine, collection


def t(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def golden(cases: int = 1) -> FullyConnectedKFACBasicFB:
    """A = [[5, 7], [7, 10]] and G = [[2, 1], [1, 3]], of two rows that span them."""
    lc = collection(lambda x, w: F.linear(x, w), w=(2, 2))
    block = lc.register_fully_connected("w", None, "linear")
    assert isinstance(block, FullyConnectedKFACBasicFB)
    for root in (block.register_inverse, block.register_cholesky, block.register_cholesky_inverse):
        root()
    block.register_matpower(-0.5)
    block.register_matpower(1)
    a, g = t([5, 7], [7, 10]), t([2, 1], [1, 3])
    rows, grads = (torch.linalg.cholesky(2 * matrix).mT for matrix in (a, g))
    block.instantiate_factors([[grads]], 0.5, [rows], cases)
    return block


# In the order [in, out] of TensorFlow's weights.
GOLDEN = {
    "multiply_inverse": [[-0.184568, -0.023875], [0.192038, 0.096872]],
    "multiply": [[106.013435, 165.086649], [156.852635, 241.416581]],
    "multiply_cholesky": [[3.871787, 10.240382], [12.878801, 27.727057]],
    "multiply_cholesky_inverse": [[0.258279, 0.367154], [0.659999, 0.306878]],
}


@pytest.mark.parametrize("method", GOLDEN)
def test_the_golden_products(method: str) -> None:
    product = getattr(golden(2), method)(t([1, 2], [3, 4]).mT)
    torch.testing.assert_close(product.mT, t(*GOLDEN[method]), rtol=1e-5, atol=1e-6)


def test_the_golden_transpose_and_power() -> None:
    block, w = golden(2), t([1, 2], [3, 4]).mT
    transposed = block.multiply_cholesky((w,), transpose=True)[0].mT
    torch.testing.assert_close(transposed, t([27.381012, 28.048282], [13.244589, 12.671459]), rtol=1e-5, atol=1e-6)
    power = block.multiply_matpower({"w": w}, -0.5)["w"].mT
    torch.testing.assert_close(power, t([-0.166943, 0.110973], [0.593170, 0.582450]), rtol=1e-5, atol=1e-6)


def test_sources_add_up_and_inputs_count_once() -> None:
    lc = collection(lambda x, w: F.linear(x, w), w=(3, 2))
    block = lc.register_fully_connected("w", None, "linear")
    x, d = torch.randn(5, 2), torch.randn(2, 5, 3)
    block.instantiate_factors([[d[0]], [d[1]]], 0.0, [x])
    a, g = x.mT @ x / 5, (d[0].mT @ d[0] + d[1].mT @ d[1]) / 5
    torch.testing.assert_close(block.full_fisher_block(), torch.kron(g, a))
    with pytest.raises(ValueError, match="has 1 use in its towers, and inputs has 2 tensors"):
        block.instantiate_factors([[d[0]]], 0.0, [x, x])


def test_tensors_in_the_place_of_lists_are_told_from_other_numbers_of_them() -> None:
    lc = collection(lambda x, w: F.linear(x, w), w=(3, 2))
    block = lc.register_fully_connected("w", None, "linear")
    x, d = torch.randn(5, 2), torch.randn(5, 3)
    nested = r"; write instantiate_factors\(\[\[gradient\]\], damping, \[input\]\) for one source"
    one = r" of FullyConnectedKFACBasicFB\(w, .* is one tensor, instead of a list with one for every tower"
    for grads, inputs, text in (
        (d, [x], "grads_list of .* must hold a list for every source" + nested),
        ([], [x], "grads_list of .* must hold a list for every source" + nested),
        ([d], [x], r"^grads_list\[0\]" + one + nested),
        ([[d]], x, "^inputs" + one + nested),
        ([[d]], [], "has 1 use in its towers, and inputs has 0 tensors" + nested),
    ):
        with pytest.raises(ValueError, match=text):
            block.instantiate_factors(grads, 0.0, inputs)


def test_tensors_that_are_not_of_the_use_are_refused() -> None:
    lc = collection(lambda x, w: F.linear(x, w), w=(3, 2))
    block = lc.register_fully_connected("w", None, "linear")
    place = r"linear\(w\) at linear.*: an input of shape \[{}, 2\] and an output's gradient of shape \[{}, {}\] are not"
    for cases, rows, outputs in ((5, 4, 3), (5, 5, 2), (1, 5, 4)):
        with pytest.raises(ValueError, match=place.format(cases, rows, outputs)):
            block.instantiate_factors([[torch.randn(rows, outputs)]], 0.0, [torch.randn(cases, 2)])
    generic = collection(lambda x, w: F.linear(x, w), w=(3, 2)).register_generic("w")
    with pytest.raises(
        ValueError, match=r"grads_list\[0\] of .* tensors of shapes \[\[2, 3\]\], and .* have \[\[3, 2\]\]"
    ):
        generic.instantiate_factors([[torch.randn(2, 3)]], 0.0, cases=5)


@pytest.mark.parametrize(("approx", "kind"), [("full", ScaleAndShiftFullFB), ("diagonal", ScaleAndShiftDiagonalFB)])
def test_the_golden_scale_and_shift(approx: str, kind: type) -> None:
    lc = collection(lambda x, w, b: x * w + b, w=(3,), b=(3,))
    block = lc.register_scale_and_shift(("w", "b"), None, "add", approx)
    x, d = t([1, 2, 3], [4, 5, 6]), t([1, 0, -1], [2, 1, 0])
    block.instantiate_factors([[d]], 0.0, [x])
    p = t([1, 0, -3, 1, 0, -1], [8, 5, 0, 2, 1, 0]).view(2, 2, 3).mT.flatten(1)  # a scale, its shift, ...
    full = p.mT @ p / 2
    expected = full if approx == "full" else full.diag().diag()
    torch.testing.assert_close(block.full_fisher_block(), expected)
    assert isinstance(block, kind)


def test_the_golden_generic_blocks() -> None:
    lc = collection(lambda x, w: x * torch.exp(w), w=(2,))
    full, diagonal = NaiveFullFB(lc, "w"), NaiveDiagonalFB(lc, "w")
    gradient = t(1, 2)
    for block, expected in ((full, t([0.5, 1], [1, 2])), (diagonal, t([0.5, 0], [0, 2]))):
        block.register_additional_tower()
        assert block.tensors_to_compute_grads() == ("w",)
        with pytest.raises(ValueError, match="how many cases were summed over .* pass cases="):
            block.instantiate_factors([gradient], 0.5)
        block.instantiate_factors([gradient], 0.5, cases=2)
        torch.testing.assert_close(block.full_fisher_block(), expected)


def test_a_block_without_factors_says_what_to_do() -> None:
    lc = affine()
    block = lc.register_fully_connected(("w", "b"), None, "add")
    with pytest.raises(FactorNotReady, match="has no factors yet: build a FisherEstimator on its layer collection"):
        block.multiply((torch.zeros(10, 5), torch.zeros(5)))


def test_what_tf_kfac_has_no_class_for_gets_one_of_its_kind() -> None:
    assert block_class("linear", "full", False) is FullFB
    assert block_class("embedding", "diagonal", False) is DiagonalFB
    assert block_class("layer_norm", "kron", False) is KroneckerProductFB
    assert block_class("a user's", "kron_indep", True) is KroneckerProductFB


def test_the_public_module_has_every_class_and_nothing_else() -> None:
    classes = {name for name in vars(kfac_fx.fisher_blocks) if name.endswith("FB")}
    assert set(kfac_fx.fisher_blocks.__all__) == classes | {"FisherBlock", "FisherFactor"}
