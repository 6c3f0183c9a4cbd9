"""Writes into parameters and buffers in a forward that the user did not ask for are undone, with their versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfac_fx
from kfac_fx.passes.tracing.effects import buffers_kept, parameters_kept, values_kept

Write = Callable[[nn.Linear], object]
WRITES: dict[str, Write] = {
    "in place": lambda layer: layer.weight.clamp_(-0.1, 0.1),
    "through data": lambda layer: layer.weight.data.mul_(0.5),
    "into a slice": lambda layer: layer.weight.__setitem__(0, 1.0),
    "into a view": lambda layer: layer.weight.detach().view(-1).add_(1.0),
    "of a list": lambda layer: torch._foreach_mul_([layer.weight, layer.bias], 0.5),
    "as a result": lambda layer: torch.add(layer.weight, 1.0, out=layer.weight),
    "by init": lambda layer: nn.init.zeros_(layer.weight),
    "by an init of torch's that hands over names": lambda layer: nn.init.normal_(layer.weight),
    "by an activation in place": lambda layer: F.relu(layer.weight, inplace=True),
    "of the data": lambda layer: setattr(layer.weight, "data", torch.zeros(2, 3)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_named_and_undone(write: str) -> None:
    layer = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.no_grad(), parameters_kept(layer) as written:
        WRITES[write](layer)
    assert list(written)[0] == "weight"
    assert all(torch.equal(parameter, other) for parameter, other in zip(layer.parameters(), before, strict=True))


def aliased(first: nn.Linear, second: nn.Linear) -> None:
    second.weight.data = first.weight.data


def cut(first: nn.Linear, second: nn.Linear) -> None:
    second.weight.data = second.weight.data[:1]


def halved(first: nn.Linear, second: nn.Linear) -> None:
    second.weight.data = second.weight.data.half()


@pytest.mark.parametrize("write", [aliased, cut, halved])
@pytest.mark.parametrize("kept", ["parameters", "buffers"])
def test_a_tensor_whose_data_is_set_has_its_own_memory_again(
    write: Callable[[nn.Linear, nn.Linear], None], kept: str
) -> None:
    layers = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])
    if kept == "buffers":
        for layer in layers:
            weight = layer.weight.detach()
            del layer.weight
            layer.register_buffer("weight", weight)
    weights = [layer.weight for layer in layers]
    before = [(weight.detach().clone(), weight.data_ptr()) for weight in weights]
    with torch.no_grad(), parameters_kept(layers), buffers_kept(layers):
        write(*layers)  # type: ignore[arg-type]
    for weight, (values, address) in zip(weights, before, strict=True):
        assert weight.dtype == values.dtype and torch.equal(weight, values)
        assert weight.data_ptr() == address


def test_a_write_is_undone_after_an_error() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), parameters_kept(layer):
        layer.weight.zero_()
        1 / 0  # noqa: B018
    assert torch.equal(layer.weight, before)


def test_what_is_read_or_written_elsewhere_is_no_write() -> None:
    layer = nn.Linear(3, 2)
    with parameters_kept(layer) as written:
        layer(torch.ones(1, 3)).relu_()
        layer.weight.detach().clone().zero_()
        layer.to(torch.float32)  # sets `.data` to what it is
        layer.weight.data = layer.weight.data
    assert not written


class Router(nn.Module):
    """As in Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(x.dtype)
        return self.classifier(x).softmax(-1)


def test_a_module_that_forward_moves_to_the_dtype_that_it_has_keeps_its_block() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(4, 4), Router()), (torch.randn(2, 4),), loss="normal")
    assert [row.layer for row in net.report.rows] == ["linear", "linear"]


def test_values_are_put_back_and_count_as_not_written() -> None:
    x = torch.randn(3, requires_grad=True)
    norm, weight = nn.BatchNorm1d(3), nn.Linear(3, 2).weight
    for kept in (values_kept([norm.running_mean]), buffers_kept(norm)):
        assert norm.running_mean is not None
        before = norm.running_mean.clone()
        loss = (x * norm.running_mean).sum()
        with kept:
            norm.running_mean.fill_(5.0)
        assert torch.equal(norm.running_mean, before)
        assert torch.equal(torch.autograd.grad(loss, x)[0], before)
    loss = (weight @ x).square().sum()
    layer = nn.Module()
    layer.weight = weight
    with parameters_kept(layer), torch.no_grad():
        weight.zero_()
    loss.backward()


def test_a_buffer_that_is_assigned_is_the_old_one_again() -> None:
    norm = nn.BatchNorm1d(3)
    before = norm.running_mean
    with buffers_kept(norm):
        norm.running_mean = torch.ones(3)
    assert norm.running_mean is before


def test_tensors_of_inference_mode_have_no_versions_to_keep() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
        with values_kept([tensor]):
            tensor.fill_(1.0)
    assert not tensor.any()
