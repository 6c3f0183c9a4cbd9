"""`nn.Embedding(sparse=True)`: its sparse gradients are taken wherever dense ones are, and are worth the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from tests.tables import pairs

IDS, CLASSES = torch.tensor([0, 1, 4, 1, 6]), torch.tensor([0, 1, 2, 1, 0])


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc = nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(torch.tanh(self.table(x)))
        return y


def trained(sparse: bool, mode: str, approximation: str | None, momentum_type: str = "regular") -> Words:
    model = Words(sparse)
    approximations = {} if approximation is None else {"table.weight": approximation}
    net = kfac_fx.compile(model, (IDS,), loss="categorical", approximations=approximations)
    rule: dict[str, Any] = {"momentum": None} if momentum_type == "qmodel" else {"lr": 0.1}
    optimizer = kfac_fx.KFAC(net, damping=0.1, estimation_mode=mode, seed=0, momentum_type=momentum_type, **rule)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(IDS), CLASSES).backward()
        assert model.table.weight.grad is not None and model.table.weight.grad.is_sparse == sparse
        optimizer.step()
    return model


def assert_same(one: Words, other: Words) -> None:
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, msg=name)


@pairs(("approximation", [None, "diagonal", "generic"]), ("mode", ["gradients", "empirical", "exact"]))
def test_steps_are_those_of_dense_gradients(mode: str, approximation: str | None) -> None:
    assert_same(trained(True, mode, approximation), trained(False, mode, approximation))


def test_steps_along_the_quadratic_model_too() -> None:
    assert_same(trained(True, "gradients", None, "qmodel"), trained(False, "gradients", None, "qmodel"))


def test_parameters_in_no_block_follow_the_first_order_rule() -> None:
    found = []
    for sparse in (True, False):
        model = Words(sparse)
        lc = kfac_fx.LayerCollection(kfac_fx.capture(model, (IDS,)))
        lc.register_categorical_predictive_distribution("linear")
        lc.auto_register_layers(["fc.weight", "fc.bias"])
        net = kfac_fx.compile(lc, variables=["fc.weight", "fc.bias"])
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0, first_order={"lr": 0.01})
        before = model.table.weight.clone()
        F.cross_entropy(net(IDS), CLASSES).backward()
        optimizer.step()
        assert not torch.equal(model.table.weight, before)
        found.append(model)
    assert_same(*found)


def test_products_take_sparse_vectors_and_are_dense() -> None:
    model = Words(True)
    net = kfac_fx.compile(model, (IDS,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", damping=0.1)
    estimator.update_covariances(IDS)
    estimator.update_inverses()
    F.cross_entropy(net(IDS), CLASSES).backward()
    sparse = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in sparse.items()}
    assert sparse["table.weight"].is_sparse
    products = estimator.multiply_inverse(dense)
    for name, product in estimator.multiply_inverse(sparse).items():
        assert not product.is_sparse
        torch.testing.assert_close(product, products[name])
    (block,) = (block for key, block in estimator.blocks.items() if key == ("table.weight",))
    torch.testing.assert_close(block.multiply(sparse)["table.weight"], block.multiply(dense)["table.weight"])
