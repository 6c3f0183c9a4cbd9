"""What a collection refuses at the call that is wrong, and not only when a batch meets it."""

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


def test_a_model_must_be_captured_first() -> None:
    with pytest.raises(RegistrationError, match=r"got a Linear: LayerCollection\(kfac_fx.capture\(model, example_in"):
        LayerCollection(nn.Linear(2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("var", [-1.0, 0.0, torch.tensor(1.0)])
def test_a_variance_is_looked_at_when_it_is_registered(var: Any) -> None:
    lc = affine()
    with pytest.raises(LossError, match="it must be a positive float"):
        lc.register_normal_predictive_distribution("add", var=var)
    assert lc.losses == ()


def test_kinds_of_layers_that_there_are_not_are_named() -> None:
    lc = affine()
    for call in (lambda: lc.default_approximation("convd"), lambda: lc.set_default_approximation("convd", "kron")):
        with pytest.raises(ApproximationError, match="there are no layers 'convd', but .* Did you mean 'conv2d'"):
            call()


def test_something_else_than_a_block_is_no_registration() -> None:
    lc = affine()
    with pytest.raises(RegistrationError, match="register_block takes a block of kfac_fx.fisher_blocks, not a str"):
        lc.register_block("w", "kron")  # type: ignore[arg-type]
    assert len(lc.fisher_blocks) == 0


# --- approximations of linked groups --------------------------------------------------------------------------------


def test_an_approximation_that_no_layer_has_cannot_be_linked() -> None:
    lc = affine()
    with pytest.raises(ApproximationError, match="'krn' is no approximation. Did you mean 'kron'"):
        lc.define_linked_parameters(("w", "b"), "krn")
    assert lc.linked_parameters == {}


def scanned(lc: LayerCollection, output: str, *params: str, linked: str) -> str:
    lc.define_linked_parameters(params, linked)
    lc.register_normal_predictive_distribution(output)
    lc.auto_register_layers()
    return lc.fisher_blocks[params].approximation


def test_a_scan_refuses_a_link_to_what_the_layer_has_not() -> None:
    with pytest.raises(ApproximationError, match=r"Bad value 'kron_indep' for the linked generic\(g\); generic have"):
        scanned(collection(lambda x, g: x * torch.cumsum(g, 0), g=(3,)), "mul", "g", linked="kron_indep")
    with pytest.raises(ApproximationError, match=r"Bad value 'full' for the linked linear\(w, b\); fully_connected"):
        scanned(affine(), "add", "w", "b", linked="full")


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
