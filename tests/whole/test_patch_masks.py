"""Patch masks: a convolution whose kernel is masked alike for all outputs has masked patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx import FisherEstimator, LayerCollection, RegistrationError
from tests.runtime.collections_of_toys import collection

CAUSAL = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # of PixelCNN: what was drawn already
MASK = torch.stack([CAUSAL, CAUSAL.mT])
X = torch.randn(4, 2, 5, 4, dtype=torch.float64)


def masked(**options: Any) -> LayerCollection:
    lc = collection(lambda x, c, b: F.conv2d(x, c, b, padding=1).flatten(2).sum(2), X.float(), c=(3, 2, 3, 3), b=(3,))
    lc.register_conv2d(("c", "b"), inputs="x", outputs="conv2d", **options)
    lc.register_normal_predictive_distribution("sum_1")
    return lc


def rows() -> Tensor:
    """Masked patches with their bias column [N, S, i + 1], written out."""
    patches = F.unfold(X, 3, padding=1).mT * MASK.flatten()
    return torch.cat([patches, torch.ones(4, 20, 1)], dim=2)


@pytest.mark.parametrize("approx", ["kron", "diagonal"])
def test_statistics_are_of_masked_patches(approx: str) -> None:
    lc, y = masked(patch_mask=MASK, approx=approx), torch.randn(4, 3)
    est = FisherEstimator(lc, estimation_mode="empirical")
    est.update_covariances(X.float(), targets=y)
    block = est.blocks["c", "b"]
    r = rows()
    model = lc.model.double()
    out = F.conv2d(X, model.c, model.b, padding=1)  # type: ignore[arg-type]
    (d,) = torch.autograd.grad(F.mse_loss(out.flatten(2).sum(2), y.double(), reduction="sum"), out)
    if approx == "kron":
        torch.testing.assert_close(
            block.factors["A"].value[0].double(), (r.flatten(0, 1).mT @ r.flatten(0, 1)) / 80, rtol=1e-5, atol=1e-6
        )
        return
    per_case = torch.einsum("nos,nsi->noi", d.flatten(2), r)
    torch.testing.assert_close(block.factors["F"].value[0].double(), per_case.square().mean(0), rtol=1e-4, atol=1e-4)


def test_what_is_masked_is_not_in_the_block() -> None:
    """No curvature and no connection: a step along it is that of the damping alone."""
    est = FisherEstimator(masked(patch_mask=MASK), damping=0.5, estimation_mode="empirical")
    est.update_covariances(X.float(), targets=torch.randn(4, 3))
    full = est.blocks["c", "b"].full_fisher_block().view(3, 19, 3, 19)
    hidden = torch.cat([MASK.flatten(), torch.ones(1)]) == 0
    assert not full[:, hidden].any() and not full[:, :, :, hidden].any() and full[:, ~hidden].any()


def test_the_proof_is_of_the_whole_kernel() -> None:
    """Forward uses the kernel as it is: the rows of the mask are a choice, not what autograd has."""
    net = kfac_fx.compile(masked(patch_mask=MASK))
    net.record((X.float(),), {}, targets=torch.randn(4, 3))
    assert [one.layer for one in net.registrations] == ["conv2d"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"patch_mask": CAUSAL}, "c, b: patch_mask has shape [3, 3], the patches have [2, 3, 3]"),
        ({"patch_mask": MASK, "approx": "kron_sua"}, "c, b: patch_mask needs patches, and 'kron_sua' has pixels"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(options: dict[str, Any], text: str) -> None:
    lc = collection(lambda x, c, b: F.conv2d(x, c, b).flatten(2).sum(2), X.float(), c=(3, 2, 3, 3), b=(3,))
    with pytest.raises(RegistrationError) as failure:
        lc.register_conv2d(("c", "b"), inputs="x", outputs="conv2d", **options)
    assert str(failure.value) == text
    assert not lc.fisher_blocks
