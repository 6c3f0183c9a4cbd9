"""Recurrent layers are single operations while a model is traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import kfac_fx
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.substitutes import packs_in, recurrent_layers

LENGTHS = torch.tensor([4, 2, 3])


class Packed(nn.Module):
    """A recurrent layer over sequences of these lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        sequences = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y: Tensor = pad_packed_sequence(self.rnn(sequences)[0], batch_first=True)[0]
        return y


def names(captured: Capture) -> list[str]:
    return [op_name(node) for node in captured.program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("layer", [nn.LSTM(2, 3, 2), nn.GRU(2, 3, bidirectional=True), nn.RNN(2, 3)])
def test_a_layer_is_one_operation(layer: nn.Module) -> None:
    captured = trace_model(layer, (torch.randn(4, 3, 2),))
    assert names(captured).count("recurrent") == 1
    assert not {"lstm", "gru", "rnn_tanh"} & set(names(captured))


@pytest.mark.parametrize("cell", [nn.LSTMCell(2, 3), nn.GRUCell(2, 3), nn.RNNCell(2, 3)])
def test_a_cell_is_one_operation(cell: nn.Module) -> None:
    assert names(trace_model(cell, (torch.randn(4, 2),))).count("recurrent_cell") == 1


def test_packed_sequences_are_operations_that_know_the_lengths() -> None:
    x = torch.randn(3, 4, 2)
    captured = trace_model(Packed(), (x, LENGTHS))
    assert {"packed", "recurrent", "unpacked"} <= set(names(captured))
    packs = packs_in(captured.program.graph, captured.program.root)
    assert packs is not None and packs.steps == (4,)
    assert packs.longest(captured.flatten((x, LENGTHS), {})) == (4,)
    assert captured.holds((x, LENGTHS), {}) and not captured.holds((x, LENGTHS.clamp(max=3)), {})


def test_a_graph_without_packed_sequences_has_none() -> None:
    captured = trace_model(nn.GRU(2, 3), (torch.randn(4, 3, 2),))
    assert packs_in(captured.program.graph, captured.program.root) is None


def test_torch_is_itself_again_afterwards() -> None:
    layer, x = nn.GRU(2, 3), torch.randn(4, 3, 2)
    wanted, expected = layer(x)[0], nn.RNNBase.get_expected_hidden_size
    with recurrent_layers():
        assert nn.RNNBase.get_expected_hidden_size is not expected
    assert nn.RNNBase.get_expected_hidden_size is expected and torch.equal(layer(x)[0], wanted)


@pytest.mark.parametrize(("training", "chance"), [(True, 0.25), (False, 0.0)])
def test_dropout_between_layers_is_left_out_in_evaluation(training: bool, chance: float) -> None:
    captured = trace_model(nn.LSTM(2, 3, 2, dropout=0.25).train(training), (torch.randn(4, 3, 2),))
    (node,) = [node for node in captured.program.graph.nodes if op_name(node) == "recurrent"]
    assert node.args[8] == chance


class OfNodes(nn.Module):
    """A cell on the nodes of graphs, of which the outputs have one row a graph; or on cases, behind another layer."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled, self.cell, self.head = pooled, nn.GRUCell(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, graph: Tensor, graphs: Tensor) -> Tensor:
        h = self.cell(x, torch.tanh(x))
        if self.pooled:
            h = h.new_zeros(len(graphs), 4).index_add(0, graph, h)
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("pooled", [True, False])
def test_the_rows_of_a_cell_may_be_others_than_the_cases(pooled: bool) -> None:
    """It was refused, with advice about batch_first, which a cell does not have."""
    graph, graphs = torch.tensor([0, 0, 0, 1, 1]), torch.ones(2)
    net = kfac_fx.compile(OfNodes(pooled), (torch.randn(5, 4), graph, graphs), loss="categorical", strict=True)
    more = torch.randn(7, 4), torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.ones(3)
    assert net.record(more, {}).cases == (3 if pooled else 7)
    assert len(net.captures.all) == 1
