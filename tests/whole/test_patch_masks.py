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
    assert [registration.layer for registration in net.registrations] == ["conv2d"]
    assert [row.block for row in net.report.rows] == ["kronecker, masked patches"]


def test_a_mask_is_of_all_uses_of_a_shared_kernel() -> None:
    x, y = X.float(), torch.randn(4, 2)

    def twice(x: Tensor, c: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, c, padding=1), c).flatten(2).sum(2)

    lc = collection(twice, x, c=(2, 2, 3, 3))
    lc.register_conv2d_multi("c", outputs=["conv2d", "conv2d_1"], patch_mask=MASK)
    lc.register_normal_predictive_distribution("sum_1")
    est = FisherEstimator(lc, estimation_mode="empirical")
    est.update_covariances(x, targets=y)
    first, second = F.unfold(x, 3, padding=1), F.unfold(F.conv2d(x, lc.parameters["c"], padding=1), 3)
    rows = torch.cat([first, second], dim=2).mT.flatten(0, 1).detach() * MASK.flatten()
    torch.testing.assert_close(est.blocks["c",].factors["A"].value[0], rows.mT @ rows / len(rows))


def towers(x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return F.conv2d(x[:2], c).flatten(2).sum(2), F.conv2d(x[2:], c).flatten(2).sum(2)


def test_another_tower_has_the_same_rows_or_is_refused() -> None:
    lc = collection(towers, X.float(), c=(3, 2, 3, 3))
    block = lc.register_conv2d("c", outputs="conv2d", patch_mask=MASK, sub_sample_inputs=0.5)
    for options, text in (
        ({"patch_mask": MASK.mT}, "c: its first registration has another patch_mask; all towers have one"),
        ({"sub_sample_inputs": 0.2}, "c: its input factor is of 50% of the cases, not of 20% of the cases"),
    ):
        with pytest.raises(RegistrationError) as failure:
            lc.register_conv2d("c", outputs="conv2d_1", reuse=True, **options)  # type: ignore[arg-type]
        assert str(failure.value) == text
    assert block.num_registered_towers == 1
    lc.register_conv2d("c", outputs="conv2d_1", reuse=True)
    assert block.num_registered_towers == 2 and block.registration.patch_mask == tuple(MASK.flatten().tolist())
    lc = collection(towers, X.float(), c=(3, 2, 3, 3))
    lc.register_conv2d("c", outputs="conv2d")
    with pytest.raises(RegistrationError, match="c: its first registration has no patch_mask; all towers have one"):
        lc.register_conv2d("c", outputs="conv2d_1", reuse=True, patch_mask=MASK)


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
