"""Every layer's declaration under autocast: the graph of each of its examples computes what the example computes, in
the same precision. A function of torch may be spelled as another one, and autocast rounds the operands of some."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import kfac_fx
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.layers.declaration import Example
from tests.tables import every


def examples() -> list[Any]:
    return [
        pytest.param(example, id=f"{layer.name}-{form.function.__name__}-{number}")
        for layer in LAYERS.values()
        for form in layer.forms
        for number, example in enumerate(form.examples)
    ]


def results(module: Callable[..., Any], x: Tensor) -> Any:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


def graph_of(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    """The emitted graph as a function."""
    net = kfac_fx.compile(model, (x,), loss="mse")

    def run(x: Tensor) -> Any:
        recorder = net.recorder((x,), {})
        outputs, _ = recorder.outputs(dict(model.named_parameters()), recorder.capture.flatten((x,), {}))
        return outputs

    return run


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("example", every(8, examples()))
def test_the_graph_of_an_example_computes_in_the_precision_of_the_example(example: Example) -> None:
    torch.manual_seed(0)
    module, x = example()
    model = nn.Sequential(module)
    x = x if not x.is_floating_point() else x.float()
    model = model.float()
    expected = results(copy.deepcopy(model), x)
    returned = results(graph_of(model, x), x)
    assert returned.dtype is expected.dtype
    assert torch.equal(returned, expected)


class Spelled(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(5, 5)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mv": lambda x, w: torch.stack([torch.mv(w, row) for row in x.unbind()]),
    "a method mv": lambda x, w: torch.stack([w.mv(row) for row in x.unbind()]),
    "mm": torch.mm,
    "matmul": torch.matmul,
    "an operator": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("bi,io->bo", x, w),
    "einsum of one row": lambda x, w: torch.stack([torch.einsum("i,io->o", row, w) for row in x.unbind()]),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "inner": torch.inner,
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "addmv": lambda x, w: torch.stack([torch.addmv(w[0], w, row) for row in x.unbind()]),
    "a sum of products": lambda x, w: (x.unsqueeze(-1) * w).sum(1),
    "vecdot": lambda x, w: torch.linalg.vecdot(x.unsqueeze(1), w),
    "bmm": lambda x, w: torch.bmm(x.unsqueeze(1), w.expand(len(x), 5, 5)).squeeze(1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_computes_in_its_own_precision(spelling: str) -> None:
    torch.manual_seed(0)
    model, x = Spelled(SPELLINGS[spelling]), torch.randn(4, 5)
    expected, returned = results(copy.deepcopy(model), x), results(graph_of(model, x), x)
    assert returned.dtype is expected.dtype
    assert torch.equal(returned, expected)


def test_a_spectral_norm_trains_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 3), torch.randint(3, (8,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, seed=0)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
