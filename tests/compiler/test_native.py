"""Graphs that users decomposed to ATen's own operations have the layers that their models have."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.graphs.spelling import spell_native
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.trace import capture

X = torch.randn(3, 4, 6, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ConvTranspose2d(6, 4, 2, 2)
        self.groups, self.batch = nn.GroupNorm(2, 4), nn.BatchNorm2d(4, track_running_stats=False)
        self.layer, self.head = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(self.batch(self.groups(self.up(self.conv(x)))))
        y: Tensor = self.head(h).mean((1, 2))
        return y


def decomposed(model: nn.Module, x: Tensor = X) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # of torch's own making
        return torch.export.export(model, (x,), strict=False).run_decompositions().module()


def test_a_decomposed_model_has_the_registrations_of_the_model() -> None:
    net = kfac_fx.compile(decomposed(Net()), (X,), loss="normal")
    layers = {one.parameters[0].rpartition(".")[0]: one.layer for one in net.registrations}
    assert layers == {
        "conv": "conv2d", "up": "conv_transpose2d", "groups": "group_norm", "batch": "batch_norm",
        "layer": "layer_norm", "head": "linear",
    }  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv1d(4, 6, 3, padding=1, dilation=2),
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
        nn.Conv3d(4, 2, 1),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((6, 8)),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_values_and_statistics_stay_the_same(model: nn.Module) -> None:
    x = X[:, :, 0] if "1d" in str(model) else X[:, :, None] if "3d" in str(model) else X
    training = model.training
    module = decomposed(nn.Sequential(model), x)
    program = normalize(capture(module, (x,)).program)
    assert not any("native" in str(n.target) or "convolution" in str(n.target) for n in reading(program.graph))
    alike = copy.deepcopy(model).train(training)
    (got,) = fx.GraphModule(program.root, program.graph)(x)
    assert torch.equal(got, alike(x))
    left = {name.removeprefix("0."): value for name, value in module.state_dict().items()}
    torch.testing.assert_close(left, dict(alike.state_dict()), rtol=0, atol=0)


def reading(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read parameters."""
    parameters = [node for node in graph.nodes if str(node.target).endswith(("weight", "bias"))]
    return [user for node in parameters for user in node.users]


def test_a_norm_whose_statistics_are_read_is_left() -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, mean, _ = torch.native_layer_norm(x, [4], w, b, 1e-5)
        return y + mean

    graph = fx.symbolic_trace(norm).graph
    before = str(graph)
    spell_native(graph)
    assert str(graph) == before


def test_padding_of_what_is_not_transposed_is_left() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output(graph.call_function(torch.ops.aten.convolution.default, (x, w, None, [1], [0], [1], False, [1], 1)))
    before = str(graph)
    spell_native(graph)
    assert str(graph) == before
