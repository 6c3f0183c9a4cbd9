"""`as_kernels`: a captured graph computes its recurrent layers and packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.substitutes import COMPUTED, padded_again, rows_within
from kfac_fx.passes.unroll import as_kernels, draws_noise, lengths_of, recurrent_stacks
from tests.zoo.recurrent import Cells, Everything, Last

LENGTHS = torch.tensor([5, 4, 4, 1])


def run(capture: Capture, *inputs: Tensor) -> list[Any]:
    program = as_kernels(capture.program)
    values = capture.flatten(inputs, {})
    return fx.graph_module.GraphModule(program.root, program.graph)(*values)


@pytest.mark.parametrize("model", [Last(nn.LSTM(3, 4)), Last(nn.GRU(3, 4, batch_first=True)), Cells()])
def test_the_graph_computes_what_the_model_does(model: nn.Module) -> None:
    x = torch.randn(5, 4, 3)
    capture = trace_model(model, (x,))
    torch.testing.assert_close(capture.unflatten(run(capture, x)), model(x))


def test_the_captured_graph_stays_as_it_was() -> None:
    capture = trace_model(Last(nn.LSTM(3, 4)), (torch.randn(5, 4, 3),))
    before = [node.target for node in capture.program.graph.nodes]
    as_kernels(capture.program)
    assert [node.target for node in capture.program.graph.nodes] == before
    assert not set(COMPUTED.values()) & set(before)


def test_a_stack_tells_its_noise() -> None:
    inputs = torch.randn(5, 3, 3), torch.zeros(4, 3, 4)
    for training in (True, False):
        capture = trace_model(Everything().train(training), inputs)
        for graph in (capture.program.graph, as_kernels(capture.program).graph):
            (stack,) = recurrent_stacks(graph)
            assert draws_noise(stack) is training and lengths_of(stack) is None


def test_packed_sequences_are_those_of_torch() -> None:
    x = torch.randn(6, 4, 3)
    rows = pack_padded_sequence(x, LENGTHS)
    assert torch.equal(rows_within(x[:5], LENGTHS), rows.data)
    padded, _ = pad_packed_sequence(rows, padding_value=-2.0, total_length=6)
    assert torch.equal(padded_again(rows.data, LENGTHS, 6, -2.0), padded)
    one = pack_padded_sequence(x[..., 0], LENGTHS)
    assert torch.equal(padded_again(one.data, LENGTHS, 5, 0.0), pad_packed_sequence(one)[0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y, _ = self.inner(pack_padded_sequence(x, lengths))
        padded: Tensor = pad_packed_sequence(y)[0]
        return padded


def test_a_stack_over_packed_sequences_tells_their_lengths() -> None:
    x = torch.randn(5, 4, 3)
    model = Packed()
    capture = trace_model(model, (x, LENGTHS))
    (stack,) = recurrent_stacks(capture.program.graph)
    assert lengths_of(stack) is not None
    torch.testing.assert_close(capture.unflatten(run(capture, x, LENGTHS)), model(x, LENGTHS))
