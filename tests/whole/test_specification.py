"""docs/specification.md against the code, and against the names of TF K-FAC's documentation."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kfac_fx
from kfac_fx.optim.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "specification.md"
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|(.*)\|$", re.MULTILINE)
ROWS: list[tuple[str, str, str]] = ROW.findall(PAGE.read_text(encoding="utf-8"))

LAYER = "params inputs outputs approx reuse"
CONV2D = "params strides padding inputs outputs data_format dilations approx reuse"
PLAIN = """
    fisher_blocks fisher_factors losses loss_colocation_ops graph linked_parameters registered_variables subgraph
    towers_by_loss as_default create_subgraph eval_losses eval_losses_on_samples get_blocks get_factors
    total_loss total_sampled_loss default_conv2d_approximation default_conv2d_multi_approximation
    default_embedding_approximation default_embedding_multi_approximation default_generic_approximation
    default_fully_connected_approximation default_fully_connected_multi_approximation num_registered_towers
    num_registered_minibatches full_fisher_block register_cholesky register_cholesky_inverse register_inverse
    tensors_to_compute_grads FisherBlock KroneckerProductFB FullyConnectedKFACBasicFB NaiveDiagonalFB
    FisherFactor LossFunction VARIABLE_SCOPE LayersParamsDict LayerParametersDict FullyConnectedDiagonalFB FullFB
    FullyConnectedMultiIndepFB FullyConnectedSeriesFB ConvKFCBasicMultiIndepFB EmbeddingKFACMultiIndepFB DiagonalFB
    DepthwiseConvDiagonalFB DepthwiseConvKFCBasicFB NaiveFullFB ScaleAndShiftFullFB ScaleAndShiftDiagonalFB
    register_conv1d register_scale_and_shift auto_register_layers register_softmax_cross_entropy_loss
    register_sigmoid_cross_entropy_loss register_squared_error_loss rho qmodel_change blocks damping
    CategoricalLogitsNegativeLogProbLoss OnehotCategoricalLogitsNegativeLogProbLoss MultiBernoulliNegativeLogProbLoss
    NormalMeanNegativeLogProbLoss NormalMeanVarianceNegativeLogProbLoss get_cov_vars get_inv_vars
"""
SPECIFICATION = {  # name: arguments
    **dict.fromkeys(PLAIN.split(), ""),
    "LayerCollection": "graph name",
    "check_registration": "variables",
    "define_linked_parameters": "params approximation",
    "make_or_get_factor": "cls args",
    "register_block": "layer_key fisher_block reuse",
    "register_loss_function": "loss colocation_op base_name name reuse",
    "register_categorical_predictive_distribution": "logits seed targets name reuse",
    "register_multi_bernoulli_predictive_distribution": "logits seed targets name reuse",
    "register_normal_predictive_distribution": "mean var seed targets name reuse",
    "register_conv2d": CONV2D,
    "register_conv2d_multi": f"{CONV2D} num_uses",
    "register_convolution": f"{LAYER} padding strides dilation_rate data_format",
    "register_depthwise_conv2d": f"{LAYER} strides padding rate data_format",
    "register_separable_conv2d": "depthwise_params pointwise_params inputs depthwise_outputs pointwise_outputs strides "
    "padding rate data_format approx reuse",
    "register_embedding": LAYER,
    "register_embedding_multi": f"{LAYER} num_uses",
    "register_fully_connected": LAYER,
    "register_fully_connected_multi": f"{LAYER} num_uses",
    "register_generic": "params batch_size approx reuse",
    "set_default_conv2d_approximation": "value",
    "set_default_embedding_approximation": "value",
    "set_default_fully_connected_approximation": "value",
    "set_default_fully_connected_multi_approximation": "value",
    "set_default_generic_approximation": "value",
    "ConvKFCBasicFB": "layer_collection params padding strides dilation_rate data_format extract_patches_fn",
    "ConvDiagonalFB": "layer_collection params strides padding",
    "EmbeddingKFACFB": "layer_collection vocab_size",
    "instantiate_factors": "grads_list damping",
    "multiply": "vector",
    "multiply_inverse": "vector",
    "multiply_matpower": "vector exp",
    "multiply_cholesky": "vector transpose",
    "multiply_cholesky_inverse": "vector transpose",
    "register_additional_tower": "inputs outputs",
    "register_additional_minibatch": "inputs outputs",
    "register_matpower": "exp",
    "KfacOptimizer": "learning_rate damping layer_collection cov_ema_decay var_list momentum momentum_type "
    "use_weight_decay weight_decay_coeff qmodel_update_rescale norm_constraint name estimation_mode dtype "
    "colocate_gradients_with_ops batch_size placement_strategy compute_params_stats print_logs adapt_damping loss "
    "update_damping_immediately is_chief prev_train_batch train_batch min_damping l2_reg damping_adaptation_decay "
    "damping_adaptation_interval damping_decrease_rho_threshold damping_increase_rho_threshold precon_damping_mult "
    "use_passed_loss tf_replicator loss_fn",
    "PeriodicInvCovUpdateKfacOpt": "invert_every cov_update_every num_burnin_steps",
    "FisherEstimator": "variables cov_ema_decay damping layer_collection exps estimation_mode compute_cholesky "
    "colocate_gradients_with_ops name compute_cholesky_inverse compute_params_stats batch_size",
}


def parsed(cell: str) -> tuple[str, list[str]]:
    """`"f(a, b)"` -> `("f", ["a", "b"])`."""
    name, _, arguments = cell.rstrip(")").partition("(")
    return name, [argument.strip() for argument in arguments.split(",") if argument.strip()]


def named(path: str) -> Any:
    """The object of a dotted path below kfac_fx; a module on the way is imported."""
    found: Any = kfac_fx
    for part in path.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SPECIFICATION)
def test_every_name_of_the_specification_has_a_row(name: str) -> None:
    rows = [(theirs, ours, difference) for theirs, ours, difference in ROWS if parsed(theirs)[0] == name]
    assert rows, f"{name} is not in {PAGE.name}"
    theirs, ours, difference = rows[0]
    assert set(parsed(theirs)[1]) == set(SPECIFICATION[name].split())
    unsaid = set(SPECIFICATION[name].split()) - set(parsed(ours)[1]) - set(re.findall(r"`(\w+)`", difference))
    assert not unsaid, f"{PAGE.name} does not say what became of {sorted(unsaid)} of {name}"


@pytest.mark.parametrize("ours", dict.fromkeys(ours for _, ours, _ in ROWS))
def test_every_name_of_ours_exists(ours: str) -> None:
    path, arguments = parsed(ours)
    found = named(path)
    if arguments:
        options = {option.name for rule in RULES.values() for option in fields(rule)} if path == "KFAC" else set()
        missing = [name for name in arguments if name not in {*inspect.signature(found).parameters, *options}]
        assert not missing, f"{path} has no {missing}"


def test_every_register_function_and_default_of_ours_is_on_the_page() -> None:
    kinds = ("register_", "default_", "set_default_", "total_", "eval_", "get_")
    ours = {name for name in dir(kfac_fx.LayerCollection) if name.startswith(kinds)}
    said = {parsed(cell)[0].removeprefix("LayerCollection.") for _, cell, _ in ROWS}
    assert sorted(ours - said) == []


def test_every_class_of_block_is_on_the_page() -> None:
    ours = {name for name in vars(kfac_fx.fisher_blocks) if name.endswith("FB")}
    assert sorted(ours - {"NaiveFB"} - {parsed(theirs)[0] for theirs, _, _ in ROWS}) == []


@pytest.mark.parametrize("ours", [kfac_fx.KFAC, kfac_fx.FisherEstimator, kfac_fx.LayerCollection])
def test_every_argument_of_ours_is_on_the_page(ours: type) -> None:
    said = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    parameters = inspect.signature(ours).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in said] == []
