"""The exact modes: a progress bar for many backward passes, and vmap against cotangents one by one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import kfac_fx
from kfac_fx import Batch, fit_spectrum
from kfac_fx.losses import Categorical, Normal
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.recorder import Pullback
from tests.compiler.toy import Toy


@pytest.mark.parametrize(("terminal", "after", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_progress_is_shown_on_a_terminal_once_it_takes_long(terminal: bool, after: float, shown: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal)
    items = tracked([(2, "a"), (2, "b"), (1, "c")], 5, "exact: 5 backward passes", console, after)
    assert list(items) == ["a", "b", "c"]
    assert ("exact: 5 backward passes" in file.getvalue()) is shown


class Prototypes(nn.Module):
    """torch.vmap of the backward of torch.cdist gives wrong gradients for its second argument (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.prototypes = nn.Linear(3, 3), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.features(x), self.prototypes)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("memory", [None, 1])
def test_a_wrong_rule_of_vmap_is_found_on_the_first_batch(memory: int | None) -> None:
    model, x = Prototypes(), torch.randn(5, 3)
    z = model(x)
    rows = [torch.autograd.grad(value, model.prototypes, retain_graph=True)[0].flatten() for value in z.flatten()]
    jacobian, p = torch.stack(rows), z.detach().softmax(-1)
    dense = jacobian.T @ torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)) @ jacobian / len(x)
    net = kfac_fx.compile(model, (x[:3],), loss="categorical", approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="exact", memory=memory)
    for _ in range(2):
        estimator.update_covariances(x)
        torch.testing.assert_close(estimator.blocks["prototypes",].full_fisher_block(), dense)
    if memory is None:
        assert "vmap gives other gradients than cotangents one by one" in " ".join(str(net.report).split())


@pytest.mark.usefixtures("float64")
def test_a_wrong_rule_of_vmap_is_found_after_a_batch_whose_cotangents_went_back_alone() -> None:
    net = kfac_fx.compile(Prototypes(), (torch.randn(3, 3),), loss="categorical", approximations={"*": "full"})
    x, found = torch.randn(5, 3), []
    for memory in (1, 1 << 30, 1):
        found.append(net.record((x,), {}, mode="exact", memory=memory).statistics["prototypes",])
        assert (net.recorder((x,), {}).loop_reason is None) is (len(found) == 1)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_right_rules_of_vmap_are_compared_once() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), loss="categorical")
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        compare = Pullback.difference

        def counted(self: Pullback, *args: Any) -> str | None:
            calls.append(self.verify)
            return compare(self, *args)

        patch.setattr(Pullback, "difference", counted)
        for _ in range(2):
            net.record((torch.randn(5, 3),), {}, mode="exact")
    assert any(calls) and not any(calls[len(calls) // 2 :])
    assert net.recorder((torch.randn(5, 3),), {}).loop_reason is None


def test_a_gradient_that_is_zero_up_to_rounding_is_no_wrong_rule() -> None:
    leaves = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    for noise, differs in ((1e-8, False), (1e-2, True)):
        together, alone = [torch.full((2, 3), noise), torch.ones(2, 3)], (torch.zeros(3), torch.ones(3))
        reason = Pullback([], leaves, verify=True).difference(together, lambda *_, a=alone: a, [torch.ones(2, 1)])
        assert (reason is not None) is differs


@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_first_and_the_last_cotangent_are_compared(place: int) -> None:
    together = torch.ones(4, 3)
    together[place] = 2.0
    pullback = Pullback([], [torch.ones(3)], verify=True)
    assert (pullback.difference([together], lambda *_: (torch.ones(3),), [torch.ones(4, 1)]) is None) is (place == 1)


def test_generic_parameters_of_low_precision_have_float32_sums() -> None:
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    model = Toy(lambda x, p: torch.hypot(x.unsqueeze(1), p).sum(-1), p=(4, 3)).to(torch.bfloat16)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    assert all(registration.generic for registration in net.registrations)
    moments = net.record((x,), {}, mode="exact")
    assert {t.dtype for sums in moments.statistics.values() for t in sums.values()} == {torch.float32}


@pytest.mark.parametrize("mode", ["exact", "exact_GGN", "gradients", "empirical"])
def test_parts_that_a_loss_does_not_depend_on_have_zeros_of_it(mode: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.body(x))
            return self.policy(hidden), self.value(hidden)

    torch.manual_seed(0)
    model = TwoHeads().double()
    x, labels, values = torch.randn(5, 3).double(), torch.randint(2, (5,)), torch.randn(5, 1).double()
    net = kfac_fx.compile(model, (x,), loss=lambda o: [Categorical(o[0]), Normal(o[1])])
    batches = [Batch(x, targets=[labels, values])]
    parts = [[f"{layer}.weight", f"{layer}.bias"] for layer in ("body", "policy", "value")]
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    products = [
        fit_spectrum(net, batches, mode=mode, parts=division, damping=0.1).multiply(vector) for division in (1, parts)
    ]
    for name in vector:
        if mode == "gradients":  # each part has samples of its own
            assert products[1][name].isfinite().all()
        else:
            torch.testing.assert_close(products[1][name], products[0][name])
