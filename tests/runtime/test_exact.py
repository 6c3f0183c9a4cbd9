"""The exact modes: a progress bar for many backward passes, and vmap against cotangents one by one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import kfac_fx
from kfac_fx.recording.exact import Pullback, tracked


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
