"""Fallbacks of a compiled module, with their reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import RegistrationError
from kfac_fx.compiled.report import fallbacks
from kfac_fx.passes.check import unmatched
from kfac_fx.passes.layers import as_rows


def test_a_proved_capture_has_no_fallback() -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), (torch.randn(6, 4),), loss="normal")
    assert fallbacks(net.captures.arguments, net.program, net.captures.all, ()) == []


def test_a_capture_without_proof_is_told() -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), (torch.randn(6, 4),), loss="normal", verify=False)
    assert fallbacks(net.captures.arguments, net.program, (), ()) == ["no registration was proved: verify=False"]


def test_a_layer_that_matches_nothing_is_in_the_report() -> None:
    @kfac_fx.layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(4, 3), torch.ones(2, 4)))
    def doubled(x: Tensor, *, weight: Tensor) -> Tensor:
        return nn.functional.linear(2 * x, weight)

    words = (
        "the layer 'doubled' of layers=[...] is nowhere in the graph: no operation has its form, with "
        "parameters that its layouts fit. "
        "`kfac-fx explain MODEL PARAMETER --layer FILE:NAME` says which condition fails"
    )
    plain = kfac_fx.compile(nn.Linear(4, 3, bias=False), loss="normal", layers=[doubled])
    assert words in " ".join(str(plain.report).split())
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
    assert str(error.value).endswith(f"\nBesides, {words}.")
    with pytest.raises(RegistrationError) as error:
        kfac_fx.compile(Distances(), (torch.randn(5, 4),), **options)
    assert "nowhere in the graph" not in str(error.value)


def test_a_composite_layer_of_the_users_is_registered_as_its_parts_and_not_missed() -> None:
    program = kfac_fx.compile(nn.Linear(4, 3), loss="normal").program
    simple, composite = SimpleNamespace(parts=()), SimpleNamespace(parts=("linear", "scale_and_shift"))
    assert unmatched({"mine": simple, "joined": composite}, program) == ["mine"]  # type: ignore[dict-item]
