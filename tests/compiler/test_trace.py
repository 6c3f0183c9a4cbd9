"""Capture: with inputs by torch.export, without by torch.fx; what comes in, what goes out, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import LayerError, UntraceableError
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import Capture, trace_model
from tests.compiler.test_effects import Memory
from tests.compiler.toy import Toy, code

X = torch.randn(5, 3)


def run(captured: Capture, *args: Any, **kwargs: Any) -> Any:
    """The captured graph on new inputs, from the model's arguments to what the model returns."""
    module = torch.fx.GraphModule(captured.program.root, captured.program.graph)
    return captured.unflatten(module(*captured.flatten(args, kwargs)))


class Nested(nn.Module):
    """Dictionaries, tuples and lists in and out; keywords, defaults, None and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(
        self, batch: Any, *, scale: float | None = None, mask: Tensor | None = None, **rest: Tensor
    ) -> dict[str, Any]:
        y = self.a(batch["x"][0]) + self.b(batch["z"])
        y = y if scale is None else y * scale
        y = y if mask is None else y * mask
        for name in sorted(rest):
            y = y + rest[name]
        return {"y": y, "parts": (y, [2 * y, None])}


def nested() -> tuple[Nested, dict[str, Any]]:
    return Nested(), {"x": [torch.randn(5, 3)], "z": torch.randn(5, 2)}


@pytest.mark.parametrize(
    "keywords",
    [{}, {"scale": 2.0}, {"mask": torch.ones(4)}, {"extra": torch.ones(5, 4), "scale": None, "more": torch.ones(4)}],
)
def test_nested_inputs_and_outputs(keywords: dict[str, Any]) -> None:
    model, batch = nested()
    captured = trace_model(model, (batch,), keywords)
    torch.testing.assert_close(run(captured, batch, **keywords), model(batch, **keywords), rtol=0, atol=0)


def test_inputs_are_named_after_the_arguments() -> None:
    model, batch = nested()
    graph = trace_model(model, (batch,), {"mask": torch.ones(4), "extra": torch.ones(4)}).program.graph
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["batch", "batch_1", "mask", "extra"]


def test_positions_that_are_collected_are_numbered() -> None:
    class Sum(nn.Module):
        def forward(self, *terms: Tensor) -> Tensor:
            return torch.stack(terms).sum(0)

    graph = trace_model(Sum(), (X, X + 1)).program.graph
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["terms_0", "terms_1"]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
def test_parameters_are_the_same_objects_under_their_first_names(inputs: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.add_module("again", model[0])
    program = trace_model(model, inputs).program
    assert list(program.parameters) == ["0.weight", "0.bias", "1.bias"]
    assert all(program.parameters[name] is model.get_parameter(name) for name in program.parameters)
    assert program.aliases["1.weight"] == program.aliases["again.weight"] == "0.weight"
    held = dict(program.root.named_parameters())
    assert all(held[name] is model.get_parameter(name) for name in held)


def test_frozen_parameters_are_constants() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert list(trace_model(model, (X,)).program.parameters) == ["weight"]


# --- what a capture is valid for ------------------------------------------------------------------------------------


def test_sizes_are_free_and_a_guard_that_fails_is_noticed() -> None:
    free = trace_model(Toy(lambda x, w: x @ w, w=(3, 2)), (X,))
    assert free.holds((torch.randn(7, 3),), {})
    branching = trace_model(Toy(lambda x, w: x @ w if x.shape[0] > 4 else x @ w.exp(), w=(3, 2)), (X,))
    assert branching.holds((torch.randn(5, 3),), {}) and not branching.holds((torch.randn(4, 3),), {})


@pytest.mark.parametrize(("every_size", "free"), [(True, (4, 3, 7, 9)), (False, (4, 3, 5, 6))])
def test_sizes_of_images_are_free_if_asked_for(every_size: bool, free: tuple[int, ...]) -> None:
    captured = trace_model(nn.Conv2d(3, 2, 3), (torch.randn(2, 3, 5, 6),), every_size=every_size)
    assert captured.holds((torch.randn(free),), {})
    assert captured.holds((torch.randn(4, 3, 7, 9),), {}) == every_size
    assert not captured.holds((torch.randn(4, 2, 5, 6),), {})


def test_a_size_of_one_is_not_free() -> None:
    captured = trace_model(nn.Linear(3, 2), (torch.randn(1, 3),))
    assert captured.holds((torch.randn(1, 3),), {}) and not captured.holds((torch.randn(2, 3),), {})


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        y: Tensor = self.inner(x) * scale
        return y if mask is None else y * mask


def test_without_inputs_arguments_have_their_defaults() -> None:
    model = Optional()
    captured = trace_model(model)
    assert code(captured.program) == ["linear = linear(x, inner_weight, inner_bias)", "mul = mul(linear, 2.0)"]
    assert torch.equal(run(captured, X), model(X))
    assert captured.holds((X,), {}) and captured.holds((X, None), {"scale": 2.0})
    assert not captured.holds((X, torch.ones(3)), {}) and not captured.holds((X,), {"scale": 3.0})


# --- what happens in forward ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["whole", "submodule"])
def test_buffers_are_updated_in_place_or_not(wrap: Callable[[nn.Module], nn.Module]) -> None:
    counting = Counting()
    captured = trace_model(wrap(counting), (X,))
    assert counting.seen == 0
    for _ in range(2):
        run(captured, X)
    assert counting.seen == 2
    torch.testing.assert_close(counting.mean, 1.5 * X.mean(0))


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
def test_modes_of_submodules_decide_and_stay(inputs: Any) -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3), nn.Dropout())
    model[0].eval()
    graph = trace_model(model, inputs).program.graph
    assert [module.training for module in model] == [False, True, True]
    modes = [node.kwargs.get("training", node.args[-1]) for node in graph.nodes if op_name(node) == "dropout"]
    assert modes == [False, True]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
def test_what_the_graph_does_not_do_is_said(inputs: Any) -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    model = nn.Sequential(caching := Caching(), nn.Linear(3, 3))
    model[1].register_full_backward_hook(lambda module, before, after: None)
    assert trace_model(model, inputs).effects == ("sets 0.last", "calls the backward hooks of 1")
    assert not hasattr(caching, "last")
    assert trace_model(nn.Linear(3, 3), inputs).effects == ()


def test_regions_without_gradients_are_no_uses() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.inner(x)
            return y + self.inner(x)

    program = trace_model(Region(), (X,)).program
    assert code(program)[0].startswith("linear = wrap_with_set_grad_enabled(False, submod")
    with pytest.raises(UntraceableError, match=r"torch gave up in inner \(test_trace.py:\d+\)"):
        trace_model(Region())


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
def test_a_capture_draws_no_random_numbers_and_keeps_no_gradient(inputs: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    stream = torch.random.get_rng_state()
    trace_model(model, inputs)
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_capture_under_no_grad_is_a_capture_with_gradients() -> None:
    with torch.no_grad():
        graph = trace_model(nn.Linear(3, 3), (X,)).program.graph
    assert [op_name(node) for node in graph.nodes if node.op == "call_function"] == ["linear"]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_operator_of_torch_library_is_taken() -> None:
    @torch.library.custom_op("kfac_fx_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda context, grad: 2 * grad)
    captured = trace_model(Toy(lambda x, w: twice(x @ w), w=(3, 2)), (X,))
    assert code(captured.program)[-1] == "twice = twice(matmul)"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = 2 * x
        y: Tensor = self.inner(x)
        return y


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
def test_control_flow_on_values_is_refused_with_its_place(inputs: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(Branches()))
    line = Branches.forward.__code__.co_firstlineno + 1
    with pytest.raises(UntraceableError) as failure:
        trace_model(model, inputs)
    first, source, _, advice = str(failure.value).splitlines()
    place = f"torch gave up in 1.0 (test_trace.py:{line})"
    assert first == f"Sequential could not be captured as a graph; {place}:"
    assert source == "  if x.sum() > 0:"
    assert advice.startswith("Replace what depends on the values of tensors (if, while, .item(), .numpy())")


def test_recurrent_layers_beside_what_is_refused_are_none_of_ours() -> None:
    """They only stand for operations while torch.export traces, and are not run when that fails."""
    model = nn.Sequential(nn.LSTM(3, 2), Toy(lambda found: Branches()(found[0])))
    with pytest.raises(UntraceableError, match=r"torch gave up in 1 \(test_trace.py:\d+\)"):
        trace_model(model, (torch.randn(4, 5, 3),))


def test_inputs_that_the_model_cannot_take_are_refused() -> None:
    with pytest.raises(
        UntraceableError, match=r"the example inputs do not fit Linear.forward\(input.*: too many positional arguments"
    ):
        trace_model(nn.Linear(3, 3), (X, X))
    with pytest.raises(UntraceableError, match="See that the model runs on these inputs"):
        trace_model(nn.Linear(4, 3), (X,))


def test_a_new_tensor_as_a_buffer_needs_inputs() -> None:
    with pytest.raises(UntraceableError, match=r"assigns a new tensor to its buffer 0.mean, .*\n.*example inputs"):
        trace_model(nn.Sequential(Memory()))


def test_random_numbers_of_no_input_need_inputs() -> None:
    model = Toy(lambda x, w: x @ w + torch.rand(2), w=(3, 2))
    with pytest.raises(UntraceableError, match="torch.fx does not see random numbers"):
        trace_model(model)
    assert "rand" in [op_name(node) for node in trace_model(model, (X,)).program.graph.nodes]


def test_a_mean_loss_inside_is_captured_with_its_targets() -> None:
    model = Toy(lambda x, w: F.mse_loss(x @ w, x[:, :2].detach()), w=(3, 2))
    assert [op_name(node) for node in trace_model(model, (X,)).program.graph.nodes][-2] == "mse_loss"


def test_an_example_that_is_a_view_stands_for_batches_that_are_none() -> None:
    """torch.export would keep guards on what it is a view of."""
    ids = torch.randint(9, (8, 7))
    captured = trace_model(nn.Embedding(9, 4), (ids[:4, :3],))
    assert captured.holds((torch.randint(9, (5, 2)),), {})
    assert captured.holds((ids,), {})


def test_a_recurrent_layer_beside_what_no_graph_holds_is_run_as_it_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)[0]
            return y if x.sum() > -1e9 else x

    with pytest.raises(UntraceableError, match=r"return y if x\.sum\(\) > -1e9 else x"):
        trace_model(Model(), (torch.randn(4, 5, 3),))


@pytest.mark.parametrize(
    ("read", "same", "another"),
    [
        (lambda x: x.requires_grad, torch.randn(5, 3), torch.randn(5, 3, requires_grad=True)),
        (lambda x: x.is_contiguous(), torch.randn(6, 3), torch.randn(3, 6).t()),
    ],
    ids=["gradients", "layout"],
)
def test_a_capture_holds_for_inputs_that_are_alike_in_what_forward_reads_of_them(
    read: Callable[[Tensor], bool], same: Tensor, another: Tensor
) -> None:
    captured = trace_model(Toy(lambda x, w: x @ (w if read(x) else w.exp()), w=(3, 2)), (X,))
    assert captured.holds((same,), {}) and not captured.holds((another,), {})


def test_a_graph_is_the_same_with_and_without_torchs_cache_of_shapes() -> None:
    """`make test` captures without it, and users with it."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)) for _ in range(2)]
    model, x = nn.Sequential(nn.Embedding(5, 4), *layers, nn.Linear(4, 3)), torch.randint(5, (6, 7))
    graphs = []
    for cached in (True, False):
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=cached):
            captured = trace_model(model, (x,))
        shapes = [str(getattr(node.meta.get("val"), "shape", None)) for node in captured.program.graph.nodes]
        graphs.append((str(captured.program.graph), shapes, captured.holds((x[:4],), {}), captured.holds((x.t(),), {})))
    assert graphs[0] == graphs[1]
    assert any("s" in shape for shape in graphs[0][1])


def test_layers_that_are_no_dict_are_refused_with_what_to_write() -> None:
    with pytest.raises(LayerError, match=r"takes layers by name and got a list: write layers=collect\(\*LAYERS"):
        trace_model(nn.Linear(2, 3), layers=[])  # type: ignore[arg-type]
