"""Decompositions and products of an estimator inside of a user's autocast are those outside of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kfac_fx

LAYERS = {
    "linear": lambda: (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 3)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(2, 4), nn.Flatten()),
        torch.randn(16, 2, 6, 6),
    ),
}


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in vector.values()])


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_those_outside_of_autocast(name: str) -> None:
    torch.manual_seed(0)
    model, x = LAYERS[name]()
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    results = []
    for enabled in (False, True):
        net = kfac_fx.compile(model, (x,), loss="categorical")
        estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="exact", exps=(-1, 0.5))
        estimator.update_covariances(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            estimator.update_inverses()
            spectrum = estimator.spectrum(damping=0.1)
            vectors = [
                estimator.multiply(vector),
                estimator.multiply_inverse(vector),
                estimator.multiply_matpower(0.5, vector),
                spectrum.multiply_inverse(vector),
                spectrum.multiply_matpower(-0.5, vector),
            ]
            results.append([*map(flat, vectors), spectrum.log_determinant()])
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


def test_scores_under_autocast_are_products_of_its_rows_in_full_precision() -> None:
    """Autocast rounds the rows of the model. It rounded their products with the queries, too."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(6, 3, bias=False), torch.randn(16, 6), torch.randint(3, (16,))
    net = kfac_fx.compile(layer, (x,), loss="categorical")
    queries = kfac_fx.fit_spectrum(net, [x], mode="exact").queries({"weight": (vector := torch.randn(2, 3, 6))})
    with torch.autocast("cpu", torch.bfloat16):
        scores, by_position = queries.scores((x, y)), queries.scores((x, y), by="position")
        outputs = layer(x).detach().float()
    rows = x.bfloat16().double()
    gradients = (outputs.softmax(1) - nn.functional.one_hot(y, 3)).bfloat16().double()
    expected = torch.einsum("no,ni,qoi->qn", gradients, rows, vector.double()).float()
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(by_position.squeeze(2), expected)


def test_several_dampings_in_a_block_are_those_outside_of_autocast() -> None:
    torch.manual_seed(0)
    model, x = LAYERS["linear"]()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact")
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            damped = spectrum.at(damping={"*.bias": 0.1, "*": 0.2})
            results.append([damped.log_determinant(), flat(damped.multiply_inverse(vector))])
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)
