"""Whole parameters outside, pieces inside: gradients, products, statistics of every mode, the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg.vectors import joined, split
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.parametrization import Piece
from kfac_fx.passes.parametrizations.parts import in_region

PIECES = (Piece("w", 0, 0, 2), Piece("w", 0, 3, 4))
REGISTRATIONS = [
    Registration("linear", None, (PIECES[0].name, "b"), (), "full", None, PIECES[:1]),
    Registration("linear", None, (PIECES[1].name,), (), "full", None, PIECES[1:]),
]


class Parts(nn.Module):
    """A layer of two rows, a piece that no layer reads, and rows that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight[:2], self.bias)) @ self.weight[2:4].exp()


@pytest.fixture
def net() -> kfac_fx.CompiledModule:
    torch.manual_seed(0)
    return kfac_fx.compile(Parts().double(), (torch.randn(5, 3, dtype=torch.float64),), loss="normal")


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


def test_split_takes_views_and_joined_puts_them_back() -> None:
    whole = {"b": torch.randn(2), "w": torch.randn(5, 3)}
    parts = split(whole, REGISTRATIONS)
    assert list(parts) == ["w[0:2]", "b", "w[3:4]"]
    assert torch.equal(parts["w[3:4]"], whole["w"][3:4]) and parts["b"] is whole["b"]
    back = joined(parts, REGISTRATIONS, whole)
    assert list(back) == ["b", "w"] and torch.equal(back["b"], whole["b"])
    assert torch.equal(back["w"], torch.stack([*whole["w"][:2], torch.zeros(3), whole["w"][3], torch.zeros(3)]))
    several = split({name: tensor.expand(7, *tensor.shape) for name, tensor in whole.items()}, REGISTRATIONS, lead=1)
    assert several["w[0:2]"].shape == (7, 2, 3)


def test_rows_of_a_part_of_a_matrix() -> None:
    rows, grad_rows = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    some, grads = in_region(rows, grad_rows, ((1, 3), (0, 2), (4, 5)))
    assert torch.equal(some, rows[:, :, 1:3, 4:5]) and torch.equal(grads, grad_rows[:, :, 1:3, :2])
    some, grads = in_region(rows[:, :, 0], grad_rows[:, :, 0], ((0, 1), (0, 2), (4, 5)))
    assert torch.equal(some, rows[:, :, 0, 4:5]) and torch.equal(grads, grad_rows[:, :, 0, :2])
    ids, _ = in_region(torch.tensor([[0, 3, 5, -1]]), grad_rows[:1, :, 0], ((0, 1), (0, 6), (3, 5)))
    assert ids.tolist() == [[-1, 0, -1, -1]]


def test_names_outside_are_the_models_own(net: kfac_fx.CompiledModule) -> None:
    assert [registration.parameters for registration in net.registrations] == [
        ("weight[0:2]", "bias"),
        ("weight[2:6]",),
    ]
    estimator = kfac_fx.FisherEstimator(net)
    assert estimator.parameters == ("weight", "bias")
    assert list(estimator.blocks) == [("weight[0:2]", "bias"), ("weight[2:6]",)]
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    assert optimizer.registered == {"weight", "bias"}
    assert net.report.elements == {"total": 20, "registered": 20, "structured": 8, "generic": 12}


def test_products_are_those_of_the_blocks(net: kfac_fx.CompiledModule) -> None:
    x, y = batch()
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    estimator.update_inverses()
    vector = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    product = estimator.multiply(vector)
    structured, generic = estimator.blocks.values()
    part = {"weight[0:2]": vector["weight"][:2], "bias": vector["bias"]}
    torch.testing.assert_close(structured.multiply(part)["weight[0:2]"], product["weight"][:2])
    torch.testing.assert_close(structured.multiply(part)["bias"], product["bias"])
    part = {"weight[2:6]": vector["weight"][2:]}
    torch.testing.assert_close(generic.multiply(part)["weight[2:6]"], product["weight"][2:])
    back = estimator.multiply_inverse(product)
    torch.testing.assert_close(back, vector)


@pytest.mark.parametrize("mode", ["gradients", "empirical", "curvature_prop", "exact", "exact_GGN"])
def test_every_mode_records_generic_pieces(net: kfac_fx.CompiledModule, mode: str) -> None:
    x, y = batch()
    estimator = kfac_fx.FisherEstimator(net, estimation_mode=mode, compute_params_stats=True, seed=0)
    estimator.update_covariances(x, targets=y)
    factor = estimator.blocks["weight[2:6]",].factors["F"].value.flatten()
    assert factor.shape == (12,) and bool((factor[:6] > 0).all()) and not factor[6:].any()
    assert {name: tuple(t.shape) for name, t in estimator.params_stats.items()} == {"weight": (6, 3), "bias": (2,)}


def test_the_exact_fisher_of_a_generic_piece(net: kfac_fx.CompiledModule) -> None:
    """Its diagonal: 2 Σ_n Σ_k (d out_nk / d w)² / N of a normal with variance one half."""
    x, _ = batch()
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    weight = net.get_parameter("weight")
    wanted = torch.zeros(12, dtype=torch.float64)
    for case in x:
        for output in net.plain(case.unsqueeze(0))[0]:
            wanted += 2 * torch.autograd.grad(output, weight, retain_graph=True)[0][2:].flatten() ** 2 / len(x)
    torch.testing.assert_close(estimator.blocks["weight[2:6]",].factors["F"].value.flatten(), wanted)


def test_a_ride_records_the_pieces_gradients(net: kfac_fx.CompiledModule) -> None:
    x, y = batch()
    wanted = net.record((x,), {}, mode="empirical", targets=y)
    output, pending = net.record_in_training((x,), {})
    ((output - y) ** 2).sum().backward()
    for key, statistics in pending.moments("sum").statistics.items():
        torch.testing.assert_close(statistics, wanted.statistics[key])


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_kfac_trains_and_its_state_comes_back(mode: str) -> None:
    def train(steps: int, state: Any = None) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        model = Parts().double()
        net = kfac_fx.compile(model, batch()[:1], loss="normal")
        optimizer = kfac_fx.KFAC(net, lr=0.05, damping=0.1, estimation_mode=mode, seed=0)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        x, y = batch()
        for _ in range(steps):
            optimizer.zero_grad()
            ((net(x) - y) ** 2).sum(1).mean().backward()
            optimizer.step()
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {name: p.detach().clone() for name, p in model.named_parameters()}, kept

    whole, _ = train(4)
    _, half = train(2)
    resumed, _ = train(2, half)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    torch.manual_seed(0)
    start = Parts().double()
    x, y = batch()
    assert torch.equal(whole["weight"][4:], start.weight[4:]) and not torch.equal(whole["weight"][:4], start.weight[:4])
    after = nn.Module.__call__(load(whole), x)
    assert ((after - y) ** 2).mean() < ((start(x) - y) ** 2).mean()


def load(values: dict[str, Tensor]) -> nn.Module:
    model = Parts().double()
    model.load_state_dict(values)
    return model


def test_variables_are_whole_parameters(net: kfac_fx.CompiledModule) -> None:
    with pytest.raises(kfac_fx.RegistrationError, match="weight  shares a block with bias"):
        kfac_fx.FisherEstimator(net, variables=["weight"]).parameters  # noqa: B018


def test_a_collection_shows_the_pieces(net: kfac_fx.CompiledModule) -> None:
    shown = net.layer_collection
    assert shown.registered_variables == ("weight[0:2]", "bias", "weight[2:6]")
    assert [registration.owners for registration in shown.registrations] == [("weight", "bias"), ("weight",)]
    shown.check_registration()
