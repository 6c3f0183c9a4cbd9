"""Fallbacks of a compiled module, with their reasons."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import RegistrationError
from kfac_fx.compiled.report import fallbacks
from kfac_fx.passes.check import unmatched
from kfac_fx.passes.errors import LayerError
from kfac_fx.passes.layers import as_rows, layer


def test_a_proved_capture_has_no_fallback() -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), (torch.randn(6, 4),), loss="normal")
    assert fallbacks(net.captures.arguments, net.program, net.captures.all, ()) == []


def test_a_capture_without_proof_is_told() -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), (torch.randn(6, 4),), loss="normal", verify=False)
    assert fallbacks(net.captures.arguments, net.program, (), ()) == ["no registration was proved: verify=False"]


def test_a_layer_that_matches_nothing_is_told_with_the_condition_that_fails() -> None:
    @kfac_fx.layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(4, 3), torch.ones(2, 4)))
    def doubled(x: Tensor, *, weight: Tensor) -> Tensor:
        return nn.functional.linear(2 * x, weight)

    words = (
        "the layer 'doubled' of layers=[...] is nowhere in the graph: at {}. `kfac-fx explain MODEL PARAMETER --layer "
        "FILE:NAME` says the same of every place of a parameter"
    )
    of_linear = words.format("linear, its form has the operation mul where the graph has input at input_1")
    with pytest.warns(UserWarning, match=re.escape(of_linear)):
        plain = kfac_fx.compile(nn.Linear(4, 3, bias=False), loss="normal", layers=[doubled])
    assert of_linear in " ".join(str(plain.report).split())
    assert "nowhere in the graph" not in str(kfac_fx.compile(nn.Linear(4, 3), loss="normal").report)

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.centers)

    options: dict[str, Any] = {"loss": "categorical", "strict": True}
    with pytest.raises(RegistrationError, match="are in no structured Fisher block") as error:
        kfac_fx.compile(Distances(), (torch.randn(5, 4),), layers=[doubled], **options)
    other = "no parameter enters one of the operations of its form, mul, linear"
    assert str(error.value).endswith(f"\nBesides, {words.replace('at {}', other)}.")
    with pytest.raises(RegistrationError) as error:
        kfac_fx.compile(Distances(), (torch.randn(5, 4),), **options)
    assert "nowhere in the graph" not in str(error.value)


@pytest.mark.parametrize("inputs", [(), (torch.ones(5, 4),)])
def test_a_layer_that_matches_nothing_is_an_error_under_strict(inputs: tuple[Tensor, ...]) -> None:
    @kfac_fx.layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(4, 3), torch.ones(2, 4)))
    def doubled(x: Tensor, *, weight: Tensor) -> Tensor:
        return nn.functional.linear(2 * x, weight)

    with pytest.raises(RegistrationError, match="'doubled' of layers=.* is nowhere in the graph") as error:
        kfac_fx.compile(nn.Linear(4, 3, bias=False), inputs or None, loss="normal", layers=[doubled], strict=True)
    assert str(error.value).endswith("\nCorrect its form, leave it out of layers=[...], or compile with strict=False.")


def test_a_composite_layer_of_the_users_is_registered_as_its_parts_and_not_missed() -> None:
    program = kfac_fx.compile(nn.Linear(4, 3), loss="normal").program
    simple, composite = SimpleNamespace(parts=()), SimpleNamespace(parts=("linear", "scale_and_shift"))
    (told,) = unmatched({"mine": simple, "joined": composite}, program)  # type: ignore[dict-item]
    assert told.startswith("the layer 'mine' of layers=[...] is nowhere in the graph: ")


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), (torch.ones(3), nn.Linear(3, 2)), (nn.Linear(3, 2), torch.ones(3), 1), None]
)
def test_an_example_is_a_module_and_an_input(wrong: Any) -> None:
    made = layer(rows=as_rows, grad_rows=as_rows, example=lambda: wrong, name="mine")(
        lambda x, *, weight: torch.cdist(x, weight)
    )
    with pytest.raises(LayerError, match=r"example of layer 'mine' .* returns a .* write example=lambda: \(Module"):
        kfac_fx.compile(nn.Linear(3, 2), loss="normal", layers=[made])


@pytest.mark.filterwarnings("ignore:the layer .mine. of layers")
def test_the_example_of_a_layer_uses_up_no_random_numbers() -> None:
    made = layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(3, 2), torch.randn(4, 3)), name="mine")(
        lambda x, *, weight: torch.cdist(x, weight)
    )
    torch.manual_seed(0)
    kfac_fx.compile(nn.Linear(3, 2), loss="normal", layers=[made])
    found = torch.rand(3)
    torch.manual_seed(0)
    kfac_fx.compile(nn.Linear(3, 2), loss="normal")
    assert torch.equal(found, torch.rand(3))


@pytest.mark.parametrize(("derivative", "told"), [(True, True), (False, False)])
def test_many_sizes_with_a_capture_each_are_told(derivative: bool, told: bool, logged: list[logging.LogRecord]) -> None:
    class Slope(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not derivative:
                return super().forward(x)
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(super().forward(x)).sum(), x, create_graph=True)[0]

    net = kfac_fx.compile(Slope(2, 3), (torch.randn(4, 2),), loss="normal")
    for points in (5, 6):
        assert "were captured" not in str(net.report)
        net.record((torch.randn(points, 2),), {})
    assert ("fallback  inputs of 3 sizes were captured, and every capture" in str(net.report)) == told
    net.record((torch.randn(7, 2),), {})
    assert ("fallback  inputs of 4 sizes were captured" in str(net.report)) == told
    texts = [record.getMessage() for record in logged if record.levelno == logging.WARNING]
    assert [text.partition(" were captured")[0] for text in texts] == ["inputs of 3 sizes"] * told  # once
