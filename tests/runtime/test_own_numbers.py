"""Weights without the mean of their filters, and times a number of their own, from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.checks import proof
from kfac_fx.passes.parametrizations import jacobian as jacobians
from tests.runtime.squares import dense_fisher, recorded

Function = Callable[[Tensor], Tensor]
ALONE = nn.Parameter(torch.randn(3, 1, dtype=torch.float64))


class Behind(nn.Module):
    """`x · f(v)`"""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        self.v, self.function = nn.Parameter(torch.randn(*(shape or (3, 4)), dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        w = self.function(self.v)
        return F.linear(x, w) if w.dim() == 2 else x * w


def centered(v: Tensor) -> Tensor:
    return v - v.mean(1, keepdim=True)


SCALED: list[tuple[Function, Function]] = [  # f, and the number that it multiplies by, or divides by
    (lambda v: centered(v) / (v.std(1, keepdim=True) + 1e-5), lambda v: 1 / (v.std(1, keepdim=True) + 1e-5)),
    (lambda v: v.norm() * centered(v), lambda v: v.norm()),
    (lambda v: v * torch.rsqrt(v.square().sum(1, keepdim=True)), lambda v: v.norm(dim=1, keepdim=True).reciprocal()),
]


@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_block_leaves_out_the_change_of_the_number_alone(case: int) -> None:
    """Of one case without weight sharing, where K-FAC is exact but for that: s C D in the place of the gradient."""
    torch.manual_seed(0)
    function, number = SCALED[case]
    model, x = Behind(function), torch.randn(1, 4, dtype=torch.float64)
    block = recorded(model, x, strict=True).blocks["v",]
    assert block.registration.reason is not None and "of rank one" in block.registration.reason
    w = function(model.v).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.linear(x, w).square().sum(), w)
    gradient = gradient * number(model.v).detach()
    without = (gradient if case == 2 else centered(gradient)).flatten()
    torch.testing.assert_close(block.full_fisher_block(), torch.outer(without, without))


@pytest.mark.parametrize("function", [*(one for one, _ in SCALED), centered])
def test_the_proof_has_the_whole_gradient(function: Function) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Behind(function), (torch.randn(5, 2, 4, dtype=torch.float64),), loss="normal")
    recorder = net.captures.first
    assert recorder is not None and not net.registrations[0].generic
    pairs, *_ = proof.gradients(proof.replace_taps(recorder), (torch.randn(5, 2, 4, dtype=torch.float64),))
    ((_, wanted, got, _),) = pairs
    torch.testing.assert_close(got, wanted)


def test_a_centered_weight_may_have_any_block() -> None:
    """Nothing is left out there."""
    x = torch.randn(5, 4, dtype=torch.float64)
    for asked in ("full", "diagonal", "kron"):
        net = kfac_fx.compile(Behind(centered), (x,), loss="normal", approximations={"v": asked}, strict=True)
        assert (net.registrations[0].approximation, net.registrations[0].reason) == (asked, None)


OTHERS: list[Function] = [
    lambda v: v - v.mean(0, keepdim=True),  # of inputs
    lambda v: v - v.mean(),
    lambda v: v - v.mean(1),  # [3] against [3, 3]: of other filters
    lambda v: v - 0.5 * v.mean(1, keepdim=True),
    lambda v: torch.sub(v, v.mean(1, keepdim=True), alpha=0.5),
    lambda v: v - v.tanh().mean(1, keepdim=True),
    lambda v: v - v.amax(1, keepdim=True),
    lambda v: v - v.t().reshape(3, -1).mean(1, keepdim=True),
    lambda v: v - ALONE * v.mean(1, keepdim=True),
    lambda v: 2 * v - v.mean(1, keepdim=True),
    lambda v: centered(v).exp(),
    lambda v: centered(centered(v)),
]


NUMBERS: list[Function] = [lambda v: v / (1 + v.abs()), lambda v: v * v.sigmoid(), lambda v: v * v]  # of every element


def behind_other(function: Function) -> tuple[Behind, Tensor]:
    shape = (3, 3) if function is OTHERS[2] else (3, 4)
    return Behind(function, *shape), torch.randn(5, shape[1], dtype=torch.float64)


@pytest.mark.parametrize("function", OTHERS)
def test_what_is_no_mean_of_filters_is_not_taken_for_one(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the matcher alone, without the proof, where the function is too large for its Jacobian."""
    monkeypatch.setattr(jacobians, "LARGEST", 0)
    model, x = behind_other(function)
    net = kfac_fx.compile(model, (x,), loss="normal", verify=False)
    assert net.registrations[0].generic


@pytest.mark.parametrize("function", NUMBERS)
@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_a_number_for_every_element_is_no_number_to_leave_out(
    function: Function, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change is as large as what would be kept: softsign, or a square."""
    monkeypatch.setattr(jacobians, "LARGEST", 0)
    net = kfac_fx.compile(Behind(function, *shape), (torch.randn(5, 4, dtype=torch.float64),), loss="normal")
    assert net.registrations[0].generic


@pytest.mark.parametrize("function", [*OTHERS, *NUMBERS])
def test_small_ones_are_exact_by_their_jacobians(function: Function) -> None:
    """Nothing of them is left out."""
    torch.manual_seed(0)
    model, x = behind_other(function) if function in OTHERS else (Behind(function, 4), torch.randn(5, 4).double())
    block = recorded(model, x).blocks["v",]
    assert (block.registration.approximation, block.registration.reason) == ("full", None)
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))
