"""Recurrent layers written out: the graph, its values against the fused module's, and what does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kfac_fx.passes import pipeline
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.trace import Capture, trace_model
from kfac_fx.passes.tracing.substitutes import packed, recurrent, unpacked
from kfac_fx.passes.unroll import unroll
from tests.compiler.toy import Toy, code


class Only(nn.Module):
    """A recurrent module and all that it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def unrolled(model: nn.Module, *inputs: Any) -> tuple[Capture, fx.Graph]:
    captured = trace_model(model, inputs, layers=LAYERS)
    return captured, unroll(captured.program).graph


def run(captured: Capture, graph: fx.Graph, *inputs: Any) -> list[Tensor]:
    graph.lint()
    outputs = fx.GraphModule(captured.program.root, graph)(*captured.flatten(inputs, {}))
    return [leaf for leaf in pytree.tree_leaves(captured.unflatten(outputs)) if isinstance(leaf, Tensor)]


def test_an_rnn_is_two_linear_layers_a_step() -> None:
    _, graph = unrolled(Only(nn.RNN(3, 4, batch_first=True)), torch.randn(5, 2, 3))
    assert code(graph)[2:] == [  # after the zeros
        "rnn_tanh_unbind = unbind(inputs_0, 1)",
        "rnn_tanh_getitem = getitem(rnn_tanh_unbind, 0)",
        "rnn_tanh_getitem_1 = getitem(rnn_tanh_unbind, 1)",
        "rnn_tanh_l0_t0_linear = linear(rnn_tanh_getitem, inner_weight_ih_l0, inner_bias_ih_l0)",
        "rnn_tanh_l0_t0_getitem = getitem(zeros, 0)",
        "rnn_tanh_l0_t0_getitem_1 = getitem(rnn_tanh_l0_t0_linear, (Ellipsis, slice(None, 4, None)))",
        "rnn_tanh_l0_t0_expand_as = expand_as(rnn_tanh_l0_t0_getitem, rnn_tanh_l0_t0_getitem_1)",
        "rnn_tanh_l0_t0_linear_1 = linear(rnn_tanh_l0_t0_expand_as, inner_weight_hh_l0, inner_bias_hh_l0)",
        "rnn_tanh_l0_t0_add = add(rnn_tanh_l0_t0_linear_1, rnn_tanh_l0_t0_linear)",
        "rnn_tanh_l0_t0_tanh = tanh(rnn_tanh_l0_t0_add)",
        "rnn_tanh_l0_t1_linear = linear(rnn_tanh_getitem_1, inner_weight_ih_l0, inner_bias_ih_l0)",
        "rnn_tanh_l0_t1_linear_1 = linear(rnn_tanh_l0_t0_tanh, inner_weight_hh_l0, inner_bias_hh_l0)",
        "rnn_tanh_l0_t1_add = add(rnn_tanh_l0_t1_linear_1, rnn_tanh_l0_t1_linear)",
        "rnn_tanh_l0_t1_tanh = tanh(rnn_tanh_l0_t1_add)",
        "rnn_tanh_stack = stack([rnn_tanh_l0_t0_tanh, rnn_tanh_l0_t1_tanh])",
        "rnn_tanh_transpose = transpose(rnn_tanh_stack, 0, 1)",  # as torch's output lies in memory
        "rnn_tanh_stack_1 = stack((rnn_tanh_l0_t1_tanh,))",
    ]


STACKS = {
    "plain": {},
    "unbiased": {"bias": False, "batch_first": True, "num_layers": 2},
    "both ways": {"bidirectional": True, "num_layers": 3, "dropout": 0.5},
}
MODULES = (nn.LSTM, nn.GRU, nn.RNN, lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options))
every_module = pytest.mark.parametrize("kind", MODULES, ids=["lstm", "gru", "rnn_tanh", "rnn_relu"])


@every_module
@pytest.mark.parametrize("options", STACKS.values(), ids=STACKS)
def test_outputs_and_states_are_those_of_the_module(kind: Any, options: dict[str, Any]) -> None:
    """With the same random numbers; at the captured batch size and at others."""
    model = Only(kind(3, 4, **options))
    sizes = [(5, 4, 3), (1, 4, 3)] if options.get("batch_first") else [(4, 5, 3), (4, 1, 3)]
    captured, graph = unrolled(model, torch.randn(sizes[0]))
    for size in sizes:
        x = torch.randn(size)
        torch.manual_seed(1)
        theirs = pytree.tree_leaves(model(x))
        stream = torch.random.get_rng_state()
        torch.manual_seed(1)
        torch.testing.assert_close(run(captured, graph, x), theirs)
        assert torch.equal(torch.random.get_rng_state(), stream)


@every_module
def test_evaluation_drops_nothing(kind: Any) -> None:
    _, graph = unrolled(Only(kind(3, 4, num_layers=2, dropout=0.5)).eval(), torch.randn(4, 5, 3))
    assert "dropout" not in {op_name(node) for node in graph.nodes}


def test_a_first_state_that_is_an_input_is_read_as_it_is() -> None:
    state = (torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    model, x = Only(nn.LSTM(3, 4, 2)), torch.randn(3, 5, 3)
    captured, graph = unrolled(model, x, state)
    torch.testing.assert_close(run(captured, graph, x, state), pytree.tree_leaves(model(x, state)))
    assert "expand_as" not in {op_name(node) for node in graph.nodes}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_states() -> None:
    model, x = Only(nn.LSTM(3, 5, 2, proj_size=2, bidirectional=True)), torch.randn(3, 4, 3)
    captured, graph = unrolled(model, x)
    torch.testing.assert_close(run(captured, graph, x), pytree.tree_leaves(model(x)))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(kind: Any, bias: bool) -> None:
    model, x = Only(kind(3, 4, bias=bias)), torch.randn(5, 3)
    captured, graph = unrolled(model, x)
    torch.testing.assert_close(run(captured, graph, x), pytree.tree_leaves(model(x)))
    assert [op_name(node) for node in graph.nodes].count("linear") == 2


def test_a_sequence_without_a_batch() -> None:
    model, x = Only(nn.GRU(3, 4)), torch.randn(6, 3)
    captured, graph = unrolled(model, x)
    torch.testing.assert_close(run(captured, graph, x), pytree.tree_leaves(model(x)))


def test_functions_of_torch_are_written_out_as_modules_are() -> None:
    def layer(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        zeros = x.new_zeros(1, x.shape[1], 4)
        y: Tensor = torch.rnn_relu(x, zeros, [w, u], False, 1, 0.0, True, False, False)[0]
        return torch.rnn_tanh_cell(y[-1], y[-1], u, u)

    model, x = Toy(layer, w=(4, 3), u=(4, 4)), torch.randn(2, 5, 3)
    captured, graph = unrolled(model, x)
    torch.testing.assert_close(run(captured, graph, x), [model(x)])
    assert [op_name(node) for node in graph.nodes].count("linear") == 6


def test_nodes_know_their_sizes_and_the_line_of_the_layer() -> None:
    _, graph = unrolled(Only(nn.LSTM(3, 4, batch_first=True)), torch.randn(5, 6, 3))
    written = [node for node in graph.nodes if node.name.startswith("lstm")]
    cases = next(str(node.meta["val"].shape[0]) for node in graph.nodes if node.op == "placeholder")
    for node in written:
        assert "test_unroll.py" in node.meta["stack_trace"]
        assert "inner" in str(node.meta["nn_module_stack"])
        if op_name(node) == "linear":
            assert [str(size) for size in node.meta["val"].shape] == [cases, "16"]


def test_the_number_of_steps_is_a_fact_of_the_capture_and_the_batch_is_not() -> None:
    captured = trace_model(Only(nn.LSTM(3, 4, batch_first=True)), (torch.randn(5, 6, 3),), layers=LAYERS)
    assert captured.holds((torch.randn(9, 6, 3),), {})
    assert not captured.holds((torch.randn(5, 7, 3),), {})


def test_other_graphs_are_left_alone() -> None:
    program = trace_model(nn.Linear(3, 4), (torch.randn(5, 3),), layers=LAYERS).program
    assert unroll(program) is program


def test_capture_and_graph_are_linear_in_the_steps() -> None:
    """Fused as torch traces it, capture alone would take a node for every operation of every step."""
    _, graph = unrolled(Only(nn.LSTM(3, 4, batch_first=True)), torch.randn(5, 40, 3))
    assert len(graph.nodes) < 40 * 19 + 30


def test_torch_is_as_it_was_after_a_capture() -> None:
    before = nn.RNNBase.get_expected_hidden_size
    trace_model(Only(nn.LSTM(3, 4)), (torch.randn(4, 5, 3),), layers=LAYERS)
    assert nn.RNNBase.get_expected_hidden_size is before
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        nn.LSTM(3, 4)(torch.randn(4, 5, 2))


def test_the_report_says_what_the_uses_are() -> None:
    program = pipeline.run(trace_model(Only(nn.LSTM(3, 4)), (torch.randn(6, 5, 3),), layers=LAYERS).program)
    assert [registration.reason for registration in program.registrations] == [
        "a linear layer at each of 6 steps of lstm"
    ] * 2
    program = pipeline.run(trace_model(Only(nn.GRUCell(3, 4)), (torch.randn(5, 3),), layers=LAYERS).program)
    assert [registration.reason for registration in program.registrations] == ["a linear layer in each gru_cell"] * 2


def test_what_stands_for_another_operation_is_never_run() -> None:
    with pytest.raises(AssertionError, match="an operation that only stands for another one was run"):
        packed(torch.randn(4, 2, 3), torch.tensor([4, 1]))
    with pytest.raises(AssertionError, match="bug in kfac_fx"):
        unpacked(torch.randn(5, 3), torch.tensor([4, 1]), 4, 0.0)
    weights = [torch.randn(4, 3), torch.randn(4, 4)]
    with pytest.raises(AssertionError, match="bug in kfac_fx"):
        recurrent("gru", torch.randn(4, 2, 3), [torch.zeros(1, 2, 4)], weights, None, 4, False, 1, 0.0, False, False)
