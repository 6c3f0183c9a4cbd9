"""Registration by hand: a block of every kind, and what does not fit the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kfac_fx.compiled.fisher_blocks import (
    ConvDiagonalFB,
    ConvKFCBasicFB,
    ConvKFCBasicMultiIndepFB,
    DepthwiseConvDiagonalFB,
    EmbeddingKFACFB,
    EmbeddingKFACMultiIndepFB,
    FullyConnectedDiagonalFB,
    FullyConnectedKFACBasicFB,
    FullyConnectedMultiIndepFB,
    NaiveDiagonalFB,
    NaiveFullFB,
    ScaleAndShiftDiagonalFB,
    ScaleAndShiftFullFB,
)
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.parametrizations import functions
from tests.runtime.collections_of_toys import (
    BOTH,
    SHAPES,
    B,
    W,
    affine,
    collection,
    everything,
    two_uses,
)

# --- one of each ----------------------------------------------------------------------------------------------------


def test_every_kind_of_layer_registers_under_its_own_class() -> None:
    lc = collection(everything, **SHAPES)
    blocks = [
        lc.register_conv2d(("c1", "c1b"), 1, 1, None, "conv2d"),
        lc.register_conv2d("c2", [1, 1, 1, 1], "VALID", None, "conv2d_1", approx="diagonal"),
        *lc.register_separable_conv2d("dw", "pw", "conv2d_1", "conv2d_2", "conv2d_3", (1, 1), "valid"),
        lc.register_convolution("c3", None, "conv1d"),
        lc.register_fully_connected(("w1", "b1"), None, "add"),
        lc.register_fully_connected("w2", "tanh", "matmul_1", approx="diagonal"),
        lc.register_scale_and_shift(("scale", "shift"), "matmul_1", "add_1"),
        lc.register_fully_connected_multi("w3", ["add_1", "matmul_2"], ["matmul_2", "matmul_3"]),
        lc.register_embedding("emb", None, "embedding"),
        lc.register_embedding_multi("emb2", None, ["embedding_1", "embedding_2"]),
        lc.register_generic("g1", 6),
        lc.register_generic("g2", approx="full"),
    ]
    assert [type(block) for block in blocks] == [
        ConvKFCBasicFB, ConvDiagonalFB, DepthwiseConvDiagonalFB, ConvKFCBasicFB, ConvKFCBasicFB,
        FullyConnectedKFACBasicFB, FullyConnectedDiagonalFB, ScaleAndShiftFullFB, FullyConnectedMultiIndepFB,
        EmbeddingKFACFB, EmbeddingKFACMultiIndepFB, NaiveDiagonalFB, NaiveFullFB,
    ]  # fmt: skip
    assert len(lc.fisher_blocks) == 13 and list(lc.get_blocks()) == blocks
    lc.register_categorical_predictive_distribution("add_5")
    lc.check_registration()
    assert lc.registered_variables == tuple(lc.parameters)


def test_other_ways_to_register_the_same_layers() -> None:
    lc = collection(everything, **SHAPES)
    assert type(lc.register_conv2d_multi("c2", None, None, None, ["conv2d_1"])) is ConvKFCBasicMultiIndepFB
    assert type(lc.register_conv1d("c3", 1, 0, None, "conv1d")) is ConvKFCBasicFB
    assert type(lc.register_depthwise_conv2d("dw", None, "conv2d_2")) is DepthwiseConvDiagonalFB
    assert type(lc.register_fully_connected("emb", None, "embedding", dense_inputs=False)) is EmbeddingKFACFB
    multi = lc.register_fully_connected_multi("emb2", None, ["embedding_1", "embedding_2"], dense_inputs=False)
    assert type(multi) is EmbeddingKFACMultiIndepFB
    block = lc.register_scale_and_shift("scale", None, "mul", "diagonal")
    assert type(block) is ScaleAndShiftDiagonalFB


def test_a_layer_by_itself_may_leave_its_bias_to_another_block() -> None:
    lc = collection(lambda x, w, b: F.linear(x, w, b), w=(5, 3), b=(5,))
    lc.register_fully_connected("w", "x", "linear")
    lc.register_generic("b")
    lc.register_normal_predictive_distribution("linear")
    lc.check_registration(["w", "b"])


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_nodes_that_are_not_such_a_layer_are_refused_with_what_is_there() -> None:
    lc = affine()
    with pytest.raises(RegistrationError) as caught:
        lc.register_fully_connected(BOTH, "x", "matmul")
    assert str(caught.value).startswith("no linear layer with w, b computes matmul (")
    assert "linear(w, b)" in str(caught.value) and "computes add (" in str(caught.value)
    with pytest.raises(RegistrationError, match="from matmul\nThe graph has:"):
        lc.register_fully_connected(BOTH, "matmul", "add")
    with pytest.raises(RegistrationError, match="no conv1d or"):
        lc.register_convolution(BOTH, "x", "add")
    with pytest.raises(RegistrationError, match="no declared layer with b computes x"):
        lc.find_uses((), (B,), None, "x")
    assert len(lc.fisher_blocks) == 0


def test_a_geometry_that_is_not_the_graphs_is_refused() -> None:
    lc = collection(lambda x, c: F.conv2d(x, c, stride=2, padding=1, dilation=3), c=(2, 2, 3, 3))
    with pytest.raises(RegistrationError, match=r"strides=\[1, 1\], but the graph's conv2d\(c\) has \[2, 2\]"):
        lc.register_conv2d("c", 1, 1, "x", "conv2d")
    with pytest.raises(RegistrationError, match=r"dilations=\[2, 2\], but the graph's conv2d\(c\) has \[3, 3\]"):
        lc.register_conv2d("c", [1, 2, 2, 1], 1, "x", "conv2d", dilations=[1, 2, 2, 1])
    with pytest.raises(RegistrationError, match="padding='VALID', but the graph's"):
        lc.register_conv2d("c", 2, "VALID", "x", "conv2d")
    with pytest.raises(RegistrationError, match="data_format='NHWC': the channels of PyTorch's convolutions"):
        lc.register_conv2d("c", 2, 1, "x", "conv2d", "NHWC")
    (use,) = lc.register_conv2d("c", 2, 1, "x", "conv2d", "NCHW", dilations=3).registration.uses
    assert use.attrs["dilation"] == 3


def test_numbers_of_uses_that_contradict_each_other_are_refused() -> None:
    lc = two_uses()
    nodes = ["matmul", "matmul_1"]
    with pytest.raises(RegistrationError, match="num_uses=3, but the lists hold 2 uses"):
        lc.register_fully_connected_multi(W, None, nodes, num_uses=3)
    with pytest.raises(RegistrationError, match="1 inputs and 2 outputs; give one a use"):
        lc.register_fully_connected_multi(W, ["x"], nodes)
    with pytest.raises(RegistrationError, match="You must supply a value for num_uses"):
        lc.register_fully_connected_multi(W, None, "matmul")
    with pytest.raises(RegistrationError, match="num_uses=0 must be at least 1"):
        lc.register_fully_connected_multi(W, None, "matmul", num_uses=0)
    with pytest.raises(RegistrationError, match="several outputs; register them with the _multi function"):
        lc.register_fully_connected(W, None, nodes)
    with pytest.raises(ValueError, match="batch_size is 0; it must be a whole number of cases, at least 1"):
        lc.register_generic("b0", 0)


def test_uses_that_lay_out_the_weight_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)  # small weights have the block of their elements
    lc = collection(lambda x, w, b: torch.matmul(torch.matmul(x, w), w.reshape(3, 2).t()) + b, w=(2, 3), b=(2,))
    with pytest.raises(RegistrationError, match="the use at .* lays them out differently"):
        lc.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])
