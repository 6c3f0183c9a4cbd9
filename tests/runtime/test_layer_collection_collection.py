"""The collection itself: linked parameters, approximations, factors, its estimator, the default collection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import (
    FullyConnectedDiagonalFB,
    FullyConnectedKFACBasicFB,
    NaiveDiagonalFB,
    NaiveFullFB,
)
from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError
from tests.runtime.collections_of_toys import BOTH, W, affine, collection, fully_connected, two_uses


def test_a_model_must_be_captured_first() -> None:
    with pytest.raises(RegistrationError, match=r"got a Linear: LayerCollection\(kfac_fx.capture\(model, example_in"):
        LayerCollection(nn.Linear(2, 3))  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match=r"got none: LayerCollection\(kfac_fx.capture\(model, example_in"):
        LayerCollection()


def test_kinds_of_layers_that_there_are_not_are_named() -> None:
    lc = affine()
    for call in (lambda: lc.default_approximation("convd"), lambda: lc.set_default_approximation("convd", "kron")):
        with pytest.raises(ApproximationError, match="kind of layer 'convd' is none of .* Did you mean 'conv2d'"):
            call()


def test_something_else_than_a_block_is_no_registration() -> None:
    lc = affine()
    with pytest.raises(RegistrationError, match="register_block takes a block of kfac_fx.fisher_blocks, not a str"):
        lc.register_block("w", "kron")  # type: ignore[arg-type]
    assert len(lc.fisher_blocks) == 0


def test_a_new_collection_is_empty() -> None:
    lc = affine()
    assert (len(lc.fisher_blocks), lc.get_factors(), lc.losses) == (0, [], ())


# --- linked parameters and approximations -----------------------------------------------------------------------------


@pytest.mark.parametrize("second", [(W, "b1"), W, (W, "b0")])
def test_a_parameter_is_linked_once(second: Any) -> None:
    lc = two_uses()
    lc.define_linked_parameters((W, "b0"))
    with pytest.raises(LinkError, match=r"cannot be linked: already part of the linked group \(b0, w\)"):
        lc.define_linked_parameters(second)
    assert lc.linked_parameters == {frozenset({W, "b0"}): None}


def test_registered_parameters_are_linked_only_as_they_are_registered() -> None:
    lc = affine()
    fully_connected(lc)
    with pytest.raises(LinkError, match=r"\(w\) cannot be linked: registered already in \('w', 'b'\)"):
        lc.define_linked_parameters(W)
    lc.define_linked_parameters(BOTH, "diagonal")


def test_what_is_asked_for_wins_over_linked_over_default() -> None:
    lc = collection(
        lambda x, w0, w1, b0, b1: (x @ w0 @ w1 + b0.exp()) * b1.exp(), w0=(3, 3), w1=(3, 3), b0=(3,), b1=(3,)
    )
    for name, approximation in (("w0", "diagonal"), ("w1", "diagonal"), ("b0", "full"), ("b1", "full")):
        lc.define_linked_parameters(name, approximation)
    assert type(lc.register_fully_connected("w0", None, "matmul")) is FullyConnectedDiagonalFB
    assert type(lc.register_fully_connected("w1", None, "matmul_1", approx="kron")) is FullyConnectedKFACBasicFB
    assert type(lc.register_generic("b0")) is NaiveFullFB
    assert type(lc.register_generic("b1", approx="diagonal")) is NaiveDiagonalFB


def test_defaults_can_be_set() -> None:
    lc = affine()
    defaults = {
        "generic": ("diagonal", "full"),
        "fully_connected": ("kron", "diagonal"),
        "conv2d": ("kron", "diagonal"),
        "depthwise_conv2d": ("diagonal", "kron"),
        "embedding": ("kron", "diagonal"),
        "scale_and_shift": ("full", "diagonal"),
        "fully_connected_multi": ("kron_indep", "kron_indep_in_diag"),
        "conv2d_multi": ("kron_indep", "kron_indep"),
        "embedding_multi": ("kron_indep", "kron_indep_in_diag"),
    }
    for kind, (first, then) in defaults.items():
        assert getattr(lc, f"default_{kind}_approximation") == first
        getattr(lc, f"set_default_{kind}_approximation")(then)
        assert getattr(lc, f"default_{kind}_approximation") == then
        with pytest.raises(ApproximationError, match=f"{kind}: approximation 'best' is none of '"):
            getattr(lc, f"set_default_{kind}_approximation")("best")
    assert type(fully_connected(lc)) is FullyConnectedDiagonalFB


def test_an_approximation_that_the_layer_has_not_is_refused() -> None:
    text = "w, b: approximation 'kron_sua' is none of 'kron', 'kron_in_diag'"
    with pytest.raises(ValueError, match=text):
        fully_connected(affine(), approx="kron_sua")


def test_an_approximation_that_no_layer_has_cannot_be_linked() -> None:
    lc = affine()
    with pytest.raises(ApproximationError, match="approximation 'krn' is none of 'diagonal', .* Did you mean 'kron'"):
        lc.define_linked_parameters(("w", "b"), "krn")
    assert lc.linked_parameters == {}


# --- factors ----------------------------------------------------------------------------------------------------------


def test_factors_are_made_once_for_equal_arguments() -> None:
    lc = affine()
    first = lc.make_or_get_factor(complex, (1, 2))
    assert lc.make_or_get_factor(complex, (1, 2)) is first and lc.make_or_get_factor(complex, (2, 2)) is not first
    assert len(lc.fisher_factors) == 2
    with pytest.raises(TypeError):
        lc.make_or_get_factor(complex, ([1], 2))


def test_layers_that_read_the_same_rows_share_the_input_factor() -> None:
    lc = collection(lambda x, w0, w1: (x @ w0).sum(1, keepdim=True) + x @ w1, w0=(3, 4), w1=(3, 5))
    lc.register_fully_connected("w0", None, "matmul")
    lc.register_fully_connected("w1", None, "matmul_1")
    factors = lc.get_factors()
    shared = [factor for factor in factors if len(factor.blocks) == 2]
    assert lc.get_factors() == factors and sorted(len(factor.blocks) for factor in factors) == [1, 1, 2]
    assert [factor.name for factor in shared] == ["A"]


def test_parts_of_one_use_have_output_factors_of_their_own() -> None:
    lc = collection(lambda x, w, v: F.linear(x, torch.cat([w, v])), w=(3, 4), v=(3, 4))
    lc.register_fully_connected("w", None, "linear")
    lc.register_fully_connected("v", None, "linear")
    assert sorted(factor.name for factor in lc.get_factors() if len(factor.blocks) == 1) == ["A", "A", "G", "G"]


def test_a_gain_and_its_weight_share_no_factor() -> None:
    """They have one input and one output, and rows of their own."""
    lc = collection(lambda x, w, e: F.linear(x, w * e), w=(3, 4), e=(3, 1))
    lc.register_fully_connected("w", None, "linear")
    lc.register_fully_connected("e", None, "linear")
    assert all(len(factor.blocks) == 1 for factor in lc.get_factors())


# --- an estimator that cannot be built --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cov_ema_decay": 2.0}, "cov_ema_decay is 2.0; it must be between 0 and 1"),
        ({"fraction": 0.0}, "fraction is 0.0; it must be above 0 and at most 1"),
        ({"damping": -1.0}, "damping is -1.0; it must not be negative"),
        ({"estimation_mode": "gradient"}, "gradient"),
        ({"exps": ["half"]}, "a number in exps is 'half'; it must be a number"),
    ],
    ids=["cov_ema_decay", "fraction", "damping", "estimation_mode", "exps"],
)
def test_an_estimator_with_a_wrong_argument_leaves_the_collection_open(wrong: dict[str, Any], message: str) -> None:
    lc = registered()
    with pytest.raises(ValueError, match=message):
        kfac_fx.FisherEstimator(lc, **wrong)
    assert lc.estimator is None
    estimator = kfac_fx.FisherEstimator(lc)
    assert lc.estimator is estimator


def test_a_backend_that_does_not_exist_leaves_the_collection_open() -> None:
    lc = registered()
    with pytest.raises(ValueError, match="backend 'eagr' is none of 'eager', .* Did you mean 'eager'"):
        kfac_fx.compile(lc, backend="eagr")
    assert kfac_fx.compile(lc, backend="eager").registrations == lc.registrations


def test_a_first_capture_that_fails_leaves_the_collection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    lc = registered()
    with monkeypatch.context() as patch, pytest.raises(RegistrationError, match="refuted"):
        patch.setattr("kfac_fx.compiled.compiled_module.CompiledModule.recorder", refuted)
        kfac_fx.FisherEstimator(lc)
    assert lc.estimator is None
    assert kfac_fx.FisherEstimator(lc) is lc.estimator


def registered() -> LayerCollection:
    """One layer and one loss, both registered, with an example batch."""
    lc = affine(torch.randn(6, 10))
    lc.register_normal_predictive_distribution("add")
    lc.register_fully_connected(("w", "b"), None, "add")
    return lc


def refuted(*args: Any) -> None:
    raise RegistrationError("refuted")


# --- the default collection -------------------------------------------------------------------------------------------


def test_there_is_one_default_collection() -> None:
    with pytest.raises(ValueError, match="there is no default LayerCollection"):
        kfac_fx.get_default_layer_collection()
    lc = affine()
    kfac_fx.set_default_layer_collection(lc)
    with pytest.raises(ValueError, match="there is a default LayerCollection already"):
        kfac_fx.set_default_layer_collection(lc)
    assert kfac_fx.get_default_layer_collection() is lc
    kfac_fx.set_default_layer_collection(None)
    with lc.as_default() as given:
        assert kfac_fx.get_default_layer_collection() is lc is given
    with pytest.raises(ValueError, match="there is no default"):
        kfac_fx.get_default_layer_collection()
