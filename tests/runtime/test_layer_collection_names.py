"""Names of nodes, parameters and pieces; keys of several parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.names import LayerParametersDict
from kfac_fx.passes.errors import RegistrationError
from tests.runtime.collections_of_toys import affine

# --- keys -------------------------------------------------------------------------------------------------------------


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


def test_keys_and_values_are_shown() -> None:
    d: LayerParametersDict[str] = LayerParametersDict()
    d["x", "y"] = "a"
    assert repr(d).startswith("LayerParametersDict(") and "('x', 'y')" in repr(d) and "'a'" in repr(d)


def test_a_key_that_is_not_registered_is_named() -> None:
    lc = affine()
    lc.register_fully_connected(("w", "b"), None, "add")
    with pytest.raises(KeyError, match=r"no block of exactly \(w\)"):
        lc.fisher_blocks["w"]
    assert lc.fisher_blocks.get("w") is None


# --- nodes and parameters ---------------------------------------------------------------------------------------------


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


def test_nodes_in_another_order_than_that_of_the_arguments_are_told_with_the_order() -> None:
    lc = LayerCollection(kfac_fx.capture(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (torch.zeros(4, 1, 6, 6),)))
    x, y = lc.inputs_of("0"), lc.outputs_of("0")
    order = (
        r"Its arguments are \(params, strides, padding, inputs, outputs, data_format, .*: give inputs= and outputs= by"
    )
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((x, y), {}, "register_conv2d has a node as strides and padding. "),
        ((x,), {"outputs": y}, "register_conv2d has a node as strides. "),
        ((), {"inputs": x}, "register_conv2d lacks outputs=, the node that the layer computes, or its name. "),
    ]
    for nodes, named, text in wrong:
        with pytest.raises(RegistrationError, match=text + order):
            lc.register_conv2d(("0.weight", "0.bias"), *nodes, **named)
    lc.register_conv2d(("0.weight", "0.bias"), inputs=x, outputs=y)
