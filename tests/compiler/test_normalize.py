"""The whole pass on small models: what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Program
from kfac_fx.passes.normalize import normalize, shapes_of_computed
from kfac_fx.passes.resolve import resolve
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before, code, found, node

X = torch.randn(4, 3)


def both(model: nn.Module, x: Tensor) -> list[Program]:
    return [normalize(trace_model(model, inputs).program) for inputs in (None, (x,))]


def result(program: Program, x: Tensor) -> Tensor:
    outputs = fx.GraphModule(program.root, program.graph)(x)
    return outputs if isinstance(outputs, Tensor) else outputs[0]


class Cast(nn.Module):
    """Its loss is cast to the dtype of its weight, which it has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        picked = self.head(x).log_softmax(-1).gather(1, y.unsqueeze(1))
        return (-picked.sum() / len(y)).type_as(self.head.weight)


def test_a_cast_to_the_same_dtype_is_none_and_hides_no_loss() -> None:
    y = torch.tensor([0, 3, 1, 2])
    net = kfac_fx.compile(Cast(), (X, y))
    assert "type_as" not in [op_name(node) for node in net.program.graph.nodes]
    assert [site.loss for site in net.program.losses] == ["cross_entropy"]
    (found_in_double,) = kfac_fx.compile(Cast().double(), (X.double(), y)).program.losses
    assert found_in_double.loss == "cross_entropy"


def test_both_captures_speak_one_language() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    symbolic, exported = both(model, X)
    assert code(symbolic) == [
        "linear = linear(input_1, _0_weight, _0_bias)",
        "relu = relu(linear)",
        "linear_1 = linear(relu, _2_weight, _2_bias)",
    ]
    targets = [
        [node.target for node in program.graph.nodes if node.op == "call_function"] for program in (symbolic, exported)
    ]
    assert targets[0] == targets[1]


@pytest.mark.parametrize(
    "function",
    [
        F.normalize,
        lambda w: F.normalize(w, dim=0, eps=1e-6),
        lambda w: w / w.norm(dim=1, keepdim=True),
        lambda w: w.softmax(0),
        lambda w: w * torch.exp(w),
        lambda w: torch.cat([w.narrow(0, 0, 2).tanh(), w[2:].sigmoid()]),
    ],
    ids=["normalize", "normalize along inputs", "norm", "softmax", "product", "parts"],
)
def test_computed_weights_are_registered_alike_with_and_without_sizes(function: Callable[[Tensor], Tensor]) -> None:
    """Sizes of parameters are known without example inputs, and so are those of what is computed from them."""
    model = Toy(lambda x, weight: F.linear(x, function(weight)), weight=(5, 3))
    symbolic, exported = (
        kfac_fx.compile(model, inputs, loss="normal").program.registrations for inputs in (None, (X,))
    )
    assert [str(registration) for registration in symbolic] == [str(registration) for registration in exported]
    assert all(registration.uses for registration in symbolic)
    assert [registration.approximation for registration in symbolic] == [
        registration.approximation for registration in exported
    ]


def test_no_function_of_the_user_is_called_for_a_shape() -> None:
    called: list[Tensor] = []

    def logged(weight: Tensor) -> Tensor:
        called.append(weight)
        return weight.exp()

    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    graph.output(graph.call_function(F.linear, (x, graph.call_function(logged, (weight,)))))
    root = nn.Module()
    root.weight = nn.Parameter(torch.randn(5, 3))
    shapes_of_computed(graph, ["weight"], root)
    assert not called


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (4, 3)),
        (nn.BatchNorm1d(3).eval(), (4, 3)),
        (nn.BatchNorm2d(3, affine=False, momentum=0.3), (4, 3, 2, 2)),
        (nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), (4, 3)),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (4, 3, 5)),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), (4, 3, 5)),
        (nn.InstanceNorm2d(3), (4, 3, 2, 2)),
        (nn.InstanceNorm2d(3).eval(), (4, 3, 2, 2)),
    ],
    ids=str,
)
def test_norms_are_called_as_functions_and_keep_their_statistics(norm: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for program in both(nn.Sequential(norm), x):
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        got = result(program, x)
        after = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        for name, buffer in norm.named_buffers():
            buffer.copy_(before[name])
        assert torch.equal(got, norm(x))
        torch.testing.assert_close(dict(norm.named_buffers()), after, rtol=0, atol=0)


def test_a_norm_that_averages_over_all_batches_is_captured_but_not_averaged() -> None:
    norm = nn.BatchNorm1d(3, momentum=None)
    model = nn.Sequential(norm)
    for inputs in (None, (X,)):
        captured = trace_model(model, inputs)
        assert captured.effects == ("averages over all batches in 0",)
        assert norm.momentum is None
        torch.testing.assert_close(result(normalize(captured.program), X), nn.BatchNorm1d(3)(X))


def test_parameters_are_read_once_under_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for program in both(model, X):
        targets = [str(node.target) for node in program.graph.nodes if node.op == "get_attr"]
        assert sorted(targets) == ["0.bias", "0.weight", "1.bias"]


def test_what_nobody_reads_goes_and_what_has_an_effect_stays() -> None:
    def idle(x: Tensor, w: Tensor) -> Tensor:
        x.exp() @ w
        torch.nn.functional.dropout(x)
        return x + 1

    for program in both(Toy(idle, w=(3, 3)), X):
        assert [line.partition(" ")[0] for line in code(program)] == ["dropout", "add"]


def test_stack_traces_and_values_stay_with_their_nodes() -> None:
    program = both(nn.Linear(3, 2), X)[1]
    (linear,) = (node for node in program.graph.nodes if node.op == "call_function")
    assert tuple(linear.meta["val"].shape)[1] == 2


@pytest.mark.parametrize("function", [lambda x, b: x - b, lambda x, b: b - x, lambda x, b: x * 3 - 2 * b])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64], ids=str)
def test_differences_from_a_parameter_become_sums_of_the_same_bits(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    model, x = Toy(function, b=(3,)), torch.arange(12).view(4, 3).to(dtype)
    for program in both(model, x):
        assert "sub" not in {op_name(node) for node in program.graph.nodes}
        got, wanted = result(program, x), model(x)
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype


# --- tables and masks of parameters -----------------------------------------------------------------------------------


def normal(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Program:
    return normalize(trace_model(Toy(function, **shapes), inputs or None).program)


def test_a_mask_of_parameters_gets_a_row_for_every_case() -> None:
    def attention(x: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=table)

    program = before("match", Toy(attention, table=(2, 5, 5)), torch.randn(3, 2, 5, 4))
    (call,) = (node for node in program.graph.nodes if "scaled" in node.name)
    expanded = call.args[3]
    assert [str(size) for size in expanded.meta["val"].shape] == [program.cases, "2", "5", "5"]
    assert expanded.args[0].target == "table"
    own = before("match", Toy(attention, table=(3, 2, 5, 5)), torch.randn(3, 2, 5, 4))  # has a row for every case
    assert not any("expand" in line for line in code(own))
    masked = Toy(lambda x, w: F.scaled_dot_product_attention(x, x @ w, x), w=(4, 4))
    program = before("match", masked, torch.randn(3, 5, 4))
    assert not any("expand" in line for line in code(program))


def test_a_parameter_that_a_layer_is_applied_to_is_marked() -> None:
    program = normal(lambda x, t, w: x + F.linear(F.layer_norm(t.view(1, 2, 3), (3,), w[0]), w), t=(2, 3), w=(3, 3))
    assert [line.split(" = ")[1] for line in code(program) if "learned" in line][0] == "learned(view)"
    assert node(program, "learned").users.keys() == {node(program, "layer_norm")}


def test_a_parameter_behind_a_layers_input_is_marked_where_it_is_read() -> None:
    def function(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        table = torch.dropout(t, 0.5, True)[:2]
        return x + F.linear(table, w) + F.linear(table.exp(), w) + t[0]

    program = normal(function, torch.randn(2, 3), t=(4, 3), w=(3, 3))
    assert [line for line in code(program) if "learned" in line][0] == "learned = learned(t)"
    assert node(program, "learned").users.keys() == {node(program, "dropout")}
    vector = normal(lambda x, t, w: x + F.linear(t * 2, w), torch.randn(2, 3), t=(3,), w=(3, 3))
    assert not any("learned" in line for line in code(vector))


def test_weights_are_no_tables() -> None:
    """A product of two parameters is one more parameter, as in low-rank adapters."""
    program = normal(lambda x, a, b: F.linear(x, b @ a), a=(2, 3), b=(3, 2))
    assert not any("learned" in line for line in code(program))


def test_a_token_captured_with_one_case_is_registered_as_with_many() -> None:
    def with_token(x: Tensor, token: Tensor, w: Tensor) -> Tensor:
        return torch.cat([token.expand(x.shape[0], -1, -1), F.linear(x, w)], dim=1)

    model = Toy(with_token, token=(1, 1, 3), w=(3, 4))
    expected = [("scale_and_shift", ("token",), 1), ("linear", ("w",), 1)]
    for inputs in ((torch.randn(1, 5, 4),), (torch.randn(3, 5, 4),), ()):
        assert found(resolve(before("resolve", model, *inputs))) == expected
