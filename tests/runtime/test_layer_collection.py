"""Registration by hand: blocks, linked parameters, approximations, what does not fit the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.fisher_blocks import (
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
from kfac_fx.layer_collection import LayerParametersDict
from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError
from tests.runtime.collections_of_toys import BOTH, B, W, affine, collection, fully_connected, two_uses

# --- the dictionary of blocks ---------------------------------------------------------------------------------------


def test_a_key_is_one_parameter_or_several_in_any_order() -> None:
    d: LayerParametersDict[str] = LayerParametersDict()
    d["x"] = "a"
    d["y0", "y1"] = "b"
    d[["z0", "z1"]] = "c"
    assert (d["x"], d["y1", "y0"], d[("z0", "z1")]) == ("a", "b", "c")
    assert "x" in d and ("y0",) not in d and list(d) == [("x",), ("y0", "y1"), ("z0", "z1")]


def test_a_key_that_overlaps_another_is_refused_and_nothing_is_inserted() -> None:
    d: LayerParametersDict[str] = LayerParametersDict()
    d["x"] = "a"
    with pytest.raises(ValueError, match=r"Key\(s\) already present: \[\('x',\)\]"):
        d["x", "y"] = "b"
    assert "y" not in d and len(d) == 1


def test_a_key_of_several_parameters_can_be_deleted() -> None:
    d: LayerParametersDict[str] = LayerParametersDict()
    d["x", "y"] = "a"
    del d["x", "y"]
    d["y"] = "b"
    assert list(d) == [("y",)]


# --- the graph ------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.fc2(self.fc1(x)))
        return y


@pytest.mark.parametrize("inputs", [None, (torch.zeros(6, 3),)], ids=["torch.fx", "torch.export"])
def test_nodes_are_found_by_module(inputs: Any) -> None:
    lc = LayerCollection(kfac_fx.capture(Twice(), inputs))
    assert lc.inputs_of("fc1") is lc.node("x") and lc.outputs_of("fc1") is lc.node("tanh")
    assert lc.inputs_of("fc2") == [lc.node("tanh"), lc.node("linear_1")]
    assert lc.outputs_of("fc2") == [lc.node("linear_1"), lc.node("linear_2")]
    with pytest.raises(RegistrationError, match=r"no operation of the graph is in a module 'fc3'. Did you mean 'fc"):
        lc.inputs_of("fc3")
    with pytest.raises(RegistrationError, match=r"the graph has no node 'tan'. Did you mean 'tanh'"):
        lc.node("tan")
    with pytest.raises(
        RegistrationError, match="a node of the graph is wanted, from lc.graph or by its name, not None"
    ):
        lc.node(None)  # type: ignore[arg-type]


def test_a_captured_model_prints_the_graph_whose_nodes_it_names() -> None:
    captured = kfac_fx.capture(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (torch.randn(4, 3),))
    said = repr(captured)
    assert said.startswith("kfac_fx.capture(Sequential):\ndef forward(self, input):")
    assert f"{captured.node('tanh').name} = torch.tanh(linear)" in said


def test_a_module_with_several_inputs_and_a_node_of_another_graph_are_refused() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.fc = Both(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.both(x, self.fc(x))
            return y

    lc = LayerCollection(kfac_fx.capture(Model()))
    with pytest.raises(RegistrationError, match=r"both has 2 inputs \(.*\); choose one with lc.node"):
        lc.inputs_of("both")
    with pytest.raises(RegistrationError, match="the node x is not one of this graph"):
        lc.node(affine().node("x"))


def test_parameters_may_be_given_as_objects() -> None:
    model = nn.Linear(3, 4)
    lc = LayerCollection(kfac_fx.capture(model))
    lc.register_fully_connected((model.weight, model.bias), "input_1", "linear")
    assert lc.registered_variables == ("weight", "bias")
    assert (model.weight, model.bias) in lc.fisher_blocks
    with pytest.raises(RegistrationError, match="a Parameter that is not a trainable parameter of the model"):
        lc.register_generic(nn.Parameter(torch.zeros(1)))
    with pytest.raises(RegistrationError, match=r"'wight' is not a trainable parameter of the model. Did you mean"):
        lc.register_generic("wight")


# --- one of each ----------------------------------------------------------------------------------------------------


def test_a_new_collection_is_empty() -> None:
    lc = affine()
    assert (len(lc.fisher_blocks), lc.get_factors(), lc.losses) == (0, [], ())


def everything(x: Tensor, **p: Tensor) -> Tensor:
    image = x.view(-1, 2, 4, 4)
    image = F.conv2d(image, p["c1"], p["c1b"], padding=1)
    image = F.conv2d(image, p["c2"])
    image = F.conv2d(F.conv2d(image, p["dw"], groups=2), p["pw"])
    row = F.conv1d(image.flatten(2), p["c3"])
    h = torch.matmul(row.flatten(1), p["w1"]) + p["b1"]
    h = torch.matmul(torch.tanh(h), p["w2"]) * p["scale"] + p["shift"]
    h = torch.matmul(torch.matmul(h, p["w3"]), p["w3"])
    e = F.embedding(x[:, 0].long(), p["emb"]) + F.embedding(x[:, 1].long(), p["emb2"])
    return (h + e + F.embedding(x[:, 2].long(), p["emb2"])) * torch.exp(p["g1"]) + torch.sin(p["g2"])


SHAPES: dict[str, tuple[int, ...]] = {
    "c1": (2, 2, 3, 3), "c1b": (2,), "c2": (2, 2, 1, 1), "dw": (2, 1, 1, 1), "pw": (2, 2, 1, 1), "c3": (2, 2, 1),
    "w1": (32, 5), "b1": (5,), "w2": (5, 5), "scale": (5,), "shift": (5,), "w3": (5, 5), "emb": (7, 5), "emb2": (7, 5),
    "g1": (5,), "g2": (5,),
}  # fmt: skip


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
    with pytest.raises(RegistrationError, match="batch_size=0 must be at least 1"):
        lc.register_generic("b0", 0)


def test_uses_that_lay_out_the_weight_differently_are_refused() -> None:
    lc = collection(lambda x, w, b: torch.matmul(torch.matmul(x, w), w.reshape(3, 2).t()) + b, w=(2, 3), b=(2,))
    with pytest.raises(RegistrationError, match="the use at .* lays them out differently"):
        lc.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])


# --- linked parameters and approximations ---------------------------------------------------------------------------


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
        with pytest.raises(ApproximationError, match=f"'best' is not a valid approximation for {kind}; valid are"):
            getattr(lc, f"set_default_{kind}_approximation")("best")
    assert type(fully_connected(lc)) is FullyConnectedDiagonalFB


def test_an_approximation_that_the_layer_has_not_is_refused() -> None:
    text = "Bad value 'kron_sua' for approx of w, b; fully_connected has kron, kron_in_diag"
    with pytest.raises(ValueError, match=text):
        fully_connected(affine(), approx="kron_sua")


# --- factors --------------------------------------------------------------------------------------------------------


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
    shared = [factor for factor in lc.get_factors() if len(factor.blocks) == 2]
    assert len(lc.get_factors()) == 3 and [factor.name for factor in shared] == ["A"]


# --- the default collection -----------------------------------------------------------------------------------------


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
