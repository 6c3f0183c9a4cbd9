"""Recurrent modules from compile to factors: what is registered, and that factors are the paper's sums over steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import captures
from kfac_fx.compiler import CompiledModule
from kfac_fx.passes.cells import CELLS
from tests.zoo.recurrent import Last


def compiled(model: nn.Module, *sizes: int, **options: Any) -> CompiledModule:
    return kfac_fx.compile(model, (torch.randn(sizes),), loss="normal", **options)


def factors(net: CompiledModule, x: Tensor, targets: Tensor) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Of one batch, without decay or damping, for the true targets."""
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(x, targets=targets)
    return {
        key: {name: factor.value for name, factor in block.factors.items()} for key, block in estimator.blocks.items()
    }


def by_hand(model: Last, x: Tensor, targets: Tensor) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """(rows, gradient rows) of every step for both products, from a loop that knows nothing of graphs."""
    inner = model.inner
    cell = CELLS[{"LSTM": "lstm", "GRU": "gru"}.get(inner.mode, "rnn_tanh")]
    state = [x.new_zeros(len(x), inner.hidden_size) for _ in range(2 if inner.mode == "LSTM" else 1)]
    rows: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    products: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    for step in range(x.shape[1]):
        for side, given in (("ih", x[:, step]), ("hh", state[0])):
            weight, bias = (getattr(inner, f"{kind}_{side}_l0") for kind in ("weight", "bias"))
            rows[side].append(torch.cat([given, given.new_ones(len(given), 1)], dim=1).detach())
            products[side].append(F.linear(given, weight, bias))
        state = cell(products["ih"][-1], products["hh"][-1], state)
    loss = kfac_fx.losses.Normal(model.head(state[0]), targets=targets).evaluate()
    steps = [*products["ih"], *products["hh"]]
    grads = torch.autograd.grad(loss, steps)
    return {
        "ih": (rows["ih"], list(grads[: x.shape[1]])),
        "hh": (rows["hh"], list(grads[x.shape[1] :])),
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_factors_are_means_over_cases_and_steps(kind: Any) -> None:
    """F = T A ⊗ G with A and G over all N T rows; also for a batch and a length that compile never saw."""
    torch.manual_seed(0)
    model = Last(kind(3, 4, batch_first=True))
    net = compiled(model, 5, 4, 3)
    for cases, steps in ((5, 4), (7, 6)):
        x, y = torch.randn(cases, steps, 3), torch.randn(cases, 2)
        found = factors(net, x, y)
        for side, (rows, grads) in by_hand(model, x, y).items():
            r, d = torch.cat(rows), torch.cat(grads)
            block = found[f"inner.weight_{side}_l0", f"inner.bias_{side}_l0"]
            torch.testing.assert_close(block["A"], (r.mT @ r / len(r)).unsqueeze(0))
            torch.testing.assert_close(block["G"], (d.mT @ d / len(d)).unsqueeze(0))
            assert block["positions"].item() == steps


def test_one_step_of_one_case_is_exact() -> None:
    """A single row makes A ⊗ G the gradient's outer product with itself, the zero state's row included."""
    torch.manual_seed(0)
    model = Last(nn.LSTM(3, 4, batch_first=True)).double()
    x, y = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss="normal"), estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    kfac_fx.losses.Normal(model(x), targets=y).evaluate().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for block in estimator.blocks.values():
        assert block.registration.matrix is not None
        g = block.registration.matrix.pack(gradients).flatten()
        torch.testing.assert_close(block.full_fisher_block(), torch.outer(g, g))


def test_uses_are_in_the_order_in_which_the_steps_are_computed() -> None:
    net = compiled(Last(nn.RNN(3, 4, num_layers=2, bidirectional=True)), 3, 5, 3)
    places = {one.parameters[0]: [use.output.name for use in one.uses] for one in net.registrations}
    assert places["inner.weight_hh_l0"] == [f"rnn_tanh_l0_t{step}_linear_1" for step in (0, 1, 2)]
    assert places["inner.weight_ih_l1"] == [f"rnn_tanh_l1_t{step}_linear" for step in (0, 1, 2)]
    assert places["inner.weight_hh_l1_reverse"] == [f"rnn_tanh_l1_reverse_t{step}_linear_1" for step in (2, 1, 0)]


@pytest.mark.parametrize("sizes", [(5, 4, 3), (1, 4, 3), (5, 1, 3), (4, 3)])
def test_every_step_counts_whatever_the_batch(sizes: tuple[int, ...]) -> None:
    """One case, one step, no batch at all: the first state is zeros of a fixed size, and its product still a use."""
    model = nn.Sequential(First(nn.LSTM(3, 4, batch_first=True)), nn.Linear(4, 2))
    net = compiled(model, *sizes, strict=True)
    assert [len(one.uses) for one in net.registrations] == [sizes[-2], sizes[-2], 1]


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        ({"inner.weight_hh_l0": "diagonal"}, ("kron_indep", "diagonal")),
        ({"inner": "kron_in_diag"}, ("kron_in_diag", "kron_in_diag")),
        ({"inner.*_ih_*": "full"}, ("full", "kron_indep")),
        ({nn.LSTM: "diagonal"}, ("diagonal", "diagonal")),
        ({nn.RNNBase: "diagonal", "inner.weight_hh_l0": "kron"}, ("diagonal", "kron_indep")),
    ],
    ids=str,
)
def test_approximations_are_asked_for_as_of_any_module(asked: Any, blocks: tuple[str, str]) -> None:
    net = compiled(Last(nn.LSTM(3, 4, batch_first=True)), 5, 4, 3, approximations=asked)
    assert tuple(one.approximation for one in net.registrations)[:2] == blocks


def test_a_recurrent_layer_may_be_generic() -> None:
    net = compiled(Last(nn.GRU(3, 4, batch_first=True)), 5, 4, 3, approximations={"inner": "generic"})
    assert [one.parameters for one in net.registrations if one.generic] == [
        ("inner.weight_ih_l0",), ("inner.weight_hh_l0",), ("inner.bias_ih_l0",), ("inner.bias_hh_l0",),
    ]  # fmt: skip


def test_captures_of_many_lengths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "SHAPES", 2)
    net = compiled(Last(nn.RNN(3, 4, batch_first=True)), 5, 2, 3)
    for steps in (3, 2, 4, 2):  # 2 is used again before 3 would go
        net.record((torch.randn(5, steps, 3),), {})
    (kept,) = net.captures.known.values()
    assert [len(one.program.registrations[0].uses) for one in kept] == [4, 2]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_are_registered() -> None:
    net = compiled(Last(nn.LSTM(3, 4, proj_size=2, num_layers=2)), 4, 5, 3, strict=True)
    uses = {one.parameters: len(one.uses) for one in net.registrations}
    assert uses["inner.weight_hr_l0",] == uses["inner.weight_hr_l1",] == 4


def test_kfac_trains_on_sequences_of_several_lengths() -> None:
    """The sum of a sequence of signs, from 3 to 5 steps: guessing costs their number, 4 in the mean."""
    torch.manual_seed(0)
    net = compiled(Last(nn.LSTM(1, 8, batch_first=True)), 16, 4, 1)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    losses = []
    for step in range(40):
        x = torch.randn(64, 3 + step % 3, 1).sign()
        loss = F.mse_loss(net(x), x.sum(1).expand(-1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-6:]) / 6 < 2
