"""Editing graphs: modules that hold given objects, graphs written by computing, and literals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kfac_fx.passes.graphs.edit import Writer, attribute, holder
from kfac_fx.passes.graphs.operations import op_name
from tests.compiler.toy import Toy, before


def test_the_objects_are_the_same_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = ["0.weight", "1.running_mean", "1.bias"]
    held = holder({name: attribute(model, name) for name in names} | {"taps.a": (tap := nn.Identity())})
    assert all(attribute(held, name) is attribute(model, name) for name in names)
    assert attribute(held, "taps.a") is tap
    assert [name for name, _ in held.named_parameters()] == ["0.weight", "1.bias"]
    assert [name for name, _ in held.named_buffers()] == ["1.running_mean"]


def test_a_module_that_is_held_whole_stays_as_it_is() -> None:
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.ones(3), persistent=False)
    held = holder({"norm": norm, "norm.mask": norm.mask, "norm.weight": norm.weight})
    assert attribute(held, "norm") is norm
    assert "mask" not in norm.state_dict()


X = torch.randn(5, 3)


class Held(Toy):
    """A number in an attribute, which may be written into between forwards."""

    def __init__(self) -> None:
        super().__init__(lambda x, w: x @ w * self.scale, w=(3, 2))
        self.scale = torch.tensor(0.5)


def written(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.tensor(0.5)
    scale.mul_(2)
    return x @ w * scale


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (lambda: Toy(lambda x, w: x @ w * torch.tensor(0.5), w=(3, 2)), 0.5),
        (lambda: Toy(lambda x, w: torch.tensor(3.0) * (x @ w), w=(3, 2)), 3.0),
        (lambda: Toy(lambda x, w: x @ w / torch.tensor(0.3), w=(3, 2)), float(torch.tensor(0.3))),
        (lambda: Toy(lambda x, w: x @ w * torch.tensor(0.5, dtype=torch.float64), w=(3, 2)), None),
        (lambda: Toy(lambda x, w: x @ w * torch.tensor([0.5]), w=(3, 2)), None),
        (lambda: Toy(lambda x, w: x @ w * torch.tensor(2), w=(3, 2)), None),
        (lambda: Toy(written, w=(3, 2)), None),
        (Held, None),
    ],
    ids=["times", "from the left", "divided", "of another type", "a vector", "a whole number", "written into", "held"],
)
def test_a_literal_of_the_same_type_becomes_a_number(build: Callable[[], Any], number: float | None) -> None:
    model = build()
    program = before("find_losses", model, X)
    (node,) = (
        node for node in program.graph.nodes if node.target in (torch.mul, torch.div) and node.meta["val"].dim() == 2
    )
    assert node.args[1] == number if number is not None else isinstance(node.args[1], fx.Node)
    (found,) = fx.GraphModule(program.root, program.graph)(X)
    assert torch.equal(found, model(X))


def test_a_size_that_the_model_fixes_is_a_number_and_the_others_stay_free() -> None:
    model = Toy(lambda x, w: x.view(x.shape[0], x.shape[1], x.shape[2]) * w.view(1, 1, x.size(2)), w=(3,))
    program = before("find_losses", model, torch.randn(4, 5, 3))
    views = [node.args[1] for node in program.graph.nodes if op_name(node) == "view"]
    assert [[size for size in sizes if not isinstance(size, fx.Node)] for sizes in views] == [[3], [1, 1, 3]]
    for x in (torch.randn(4, 5, 3), torch.randn(2, 7, 3)):
        (found,) = fx.GraphModule(program.root, program.graph)(x)
        assert torch.equal(found, model(x))


# --- a graph written by computing -------------------------------------------------------------------------------------


def steps(writer: Writer, node: fx.Node, count: int) -> list[fx.Proxy]:
    """`count` times tanh(x + x) instead of a node of the old graph."""
    writer.begin(node)
    results = []
    for step in range(count):
        writer.at(f"t{step}")
        x = writer(node.args[0])
        results.append(torch.tanh(x + x))
    return results


def old_graph() -> tuple[fx.Node, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, device="meta")
    node = graph.call_function(torch.relu, (x,))
    node.meta |= {"val": x.meta["val"], "stack_trace": "model.py:3", "other": 1}
    return x, node


def test_operations_on_proxies_become_nodes_with_names_origin_and_sizes() -> None:
    x, node = old_graph()
    writer = Writer()
    writer.copy(x)
    first, second = steps(writer, node, 2)
    assert (first.node.name, second.node.name) == ("relu_t0_tanh", "relu_t1_tanh")
    assert first.node.meta == {"stack_trace": "model.py:3", "val": first.node.meta["val"]}
    assert first.node.meta["val"].shape == (2, 3)
    assert writer.copies[x].meta == x.meta


def test_equal_steps_share_their_values() -> None:
    x, node = old_graph()
    writer = Writer()
    writer.copy(x)
    values = {id(step.node.meta["val"]) for step in steps(writer, node, 5)}
    assert len(values) == 1 and len(writer.values) == 2  # an addition and a tanh


def test_sizes_that_are_data_are_given() -> None:
    x, node = old_graph()
    writer = Writer()
    writer.copy(x)
    writer.begin(node)
    with writer.valued(torch.empty(7, device="meta")):
        chosen = writer(x)[writer(x) > 0]
    assert chosen.node.meta["val"].shape == (7,)
    assert (writer(x) > 0).node.meta["val"].shape == (2, 3)
