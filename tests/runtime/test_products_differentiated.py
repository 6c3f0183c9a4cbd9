"""Derivatives of products with the Fisher by their vector, against those of its dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx

pytestmark = pytest.mark.usefixtures("float64")

Product = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Kinds(nn.Module):
    """A convolution, a tied weight, a series of uses, pieces of a parameter with a rest that nothing reads, a norm, and
    a generic parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.series = nn.Conv1d(2, 3, 2), nn.LayerNorm(3), nn.Linear(3, 3)
        self.pieces, self.gate = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.conv(x)).mean(2))
        for _ in range(3):
            h = torch.tanh(self.series(h))
        h = h * (self.gate @ self.gate).diagonal()
        y: Tensor = F.linear(h, self.pieces[:2]) + F.linear(h.square(), self.pieces[4:])
        return y


@pytest.fixture(scope="module")
def est() -> kfac_fx.FisherEstimator:
    torch.manual_seed(0)
    with torch.autograd.set_grad_enabled(True):
        model = Kinds().double()
        x = torch.randn(5, 2, 4, dtype=torch.float64)
        approximations = {"series": "kron_series_2", "norm": "full", "conv": "kron_sua", "gate": "generic"}
        net = kfac_fx.compile(model, (x,), loss="categorical", approximations=approximations)
    estimator = kfac_fx.FisherEstimator(
        net,
        estimation_mode="exact",
        damping=0.3,
        exps=(-1, -0.5, -2),
        compute_cholesky=True,
        compute_cholesky_inverse=True,
    )
    estimator.update_covariances(x)
    estimator.update_inverses()
    return estimator


PRODUCTS: dict[str, Callable[[Any], Product]] = {
    "multiply": lambda est: est.multiply,
    "multiply_inverse": lambda est: est.multiply_inverse,
    "the power -1/2": lambda est: lambda v: est.multiply_matpower(-0.5, v),
    "the power -2": lambda est: lambda v: est.multiply_matpower(-2, v),
    "cholesky": lambda est: est.multiply_cholesky,
    "cholesky transposed": lambda est: lambda v: est.multiply_cholesky(v, transpose=True),
    "cholesky inverse": lambda est: est.multiply_cholesky_inverse,
    "cholesky inverse transposed": lambda est: lambda v: est.multiply_cholesky_inverse(v, transpose=True),
    "solve": lambda est: lambda v: solve(est, v),
}


def solve(est: kfac_fx.FisherEstimator, v: dict[str, Tensor]) -> dict[str, Tensor]:
    spectrum = est.spectrum(damping=0.5)
    return spectrum.solve(v, spectrum.at(damping=0.0).multiply, tolerance=1e-12).vector


def shapes_of(est: kfac_fx.FisherEstimator) -> dict[str, torch.Size]:
    parameters = dict(est.net.named_parameters())
    return {name: parameters[name].shape for name in est.parameters}


def named(est: kfac_fx.FisherEstimator, vector: Tensor) -> dict[str, Tensor]:
    """[P] -> by name, [..., P] -> by name with these dimensions in front."""
    shapes = shapes_of(est)
    parts = vector.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: part.reshape(*vector.shape[:-1], *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in vector.values()])


def size_of(est: kfac_fx.FisherEstimator) -> int:
    return sum(shape.numel() for shape in shapes_of(est).values())


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives_are_those_of_the_matrix(name: str, est: kfac_fx.FisherEstimator) -> None:
    product, size = PRODUCTS[name](est), size_of(est)

    def of(vector: Tensor) -> Tensor:
        return flat(product(named(est, vector)))

    with torch.no_grad():
        matrix = torch.stack([of(column) for column in torch.eye(size)], 1)
    v, u = torch.randn(size, requires_grad=True), torch.randn(size)
    torch.testing.assert_close(of(v), matrix @ v)
    # The gradient of v·X v, which a penalty is, and the derivative of this gradient.
    (gradient,) = torch.autograd.grad(v @ of(v), v, create_graph=True)
    torch.testing.assert_close(gradient, (matrix + matrix.mT) @ v)
    (second,) = torch.autograd.grad(gradient @ u, v)
    torch.testing.assert_close(second, (matrix + matrix.mT) @ u)
    torch.testing.assert_close(torch.autograd.grad(of(v) @ u, v)[0], matrix.mT @ u)
    with torch.no_grad():
        assert not of(v).requires_grad
    assert not of(u).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of forward mode
@pytest.mark.parametrize("name", ["multiply", "multiply_inverse", "cholesky", "the power -1/2"])
def test_transformations_of_functions_pass_through(name: str, est: kfac_fx.FisherEstimator) -> None:
    product, size = PRODUCTS[name](est), size_of(est)

    def of(vector: Tensor) -> Tensor:
        return flat(product(named(est, vector)))

    with torch.no_grad():
        matrix = torch.stack([of(column) for column in torch.eye(size)], 1)
    v, u = torch.randn(size), torch.randn(3, size)
    torch.testing.assert_close(torch.func.grad(lambda w: w @ of(w))(v), (matrix + matrix.mT) @ v)
    torch.testing.assert_close(torch.func.jvp(of, (v,), (u[0],))[1], matrix @ u[0])
    torch.testing.assert_close(torch.func.vmap(of)(u), u @ matrix.mT)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda w: w @ of(w)))(u), u @ (matrix + matrix.mT))
    dual = torch.autograd.forward_ad
    with dual.dual_level():
        pushed = dual.unpack_dual(of(dual.make_dual(v, u[0]))).tangent
        torch.testing.assert_close(pushed, matrix @ u[0])


def test_a_block_differentiates_as_all_blocks_do(est: kfac_fx.FisherEstimator) -> None:
    vector = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes_of(est).items()}
    for key, block in est.blocks.items():
        if not all(name in vector for name in key):  # pieces
            continue
        mine = {name: vector[name] for name in key}
        for product, whole in (
            (block.multiply_inverse(mine), est.multiply_inverse(vector)),
            (block.multiply_cholesky(mine), est.multiply_cholesky(vector)),
        ):
            weights = {name: torch.randn_like(tensor) for name, tensor in mine.items()}
            found, expected = (
                torch.autograd.grad(sum((weights[name] * of[name]).sum() for name in key), list(mine.values()))  # type: ignore[arg-type]
                for of in (product, whole)
            )
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)


def test_one_tensor_of_a_vector_may_have_a_graph_and_others_none(est: kfac_fx.FisherEstimator) -> None:
    vector = {name: torch.randn(2, *shape) for name, shape in shapes_of(est).items()}
    vector["series.weight"].requires_grad_()
    product = est.multiply(vector)
    (gradient,) = torch.autograd.grad(product["series.bias"].sum(), vector["series.weight"])
    others = {name: torch.zeros_like(tensor) for name, tensor in vector.items()}
    others["series.bias"] = torch.ones_like(vector["series.bias"])
    torch.testing.assert_close(gradient, est.multiply(others)["series.weight"])


def test_a_compiled_product_has_the_graph_of_the_plain_one() -> None:
    x = torch.randn(4, 3)
    net = kfac_fx.compile(nn.Linear(3, 2), (x,), loss="normal")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", damping=0.3)
    estimator.update_covariances(x)
    estimator.update_inverses()
    vector = {name: torch.randn_like(p, requires_grad=True) for name, p in net.named_parameters()}
    torch.compiler.reset()
    compiled = torch.compile(estimator.multiply_inverse, backend="aot_eager")
    expected, found = (
        torch.autograd.grad(sum(t.square().sum() for t in of(vector).values()), list(vector.values()))  # type: ignore[arg-type]
        for of in (estimator.multiply_inverse, compiled)
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def test_solve_refuses_a_damping_that_requires_a_gradient(est: kfac_fx.FisherEstimator) -> None:
    vector = {name: torch.randn(shape) for name, shape in shapes_of(est).items()}
    damping = torch.tensor(0.5, requires_grad=True)
    curvature = est.spectrum(damping=0.0).multiply
    for spectrum in (
        est.spectrum(damping=damping),
        est.spectrum(damping=kfac_fx.Relative(damping)),
        est.spectrum(damping={"*": damping}),
        est.spectrum(scale=damping, damping=1.0),
    ):
        with pytest.raises(ValueError, match=r"no derivative by the damping or the scale .*damping\.detach\(\)"):
            spectrum.solve(vector, curvature)
        with torch.no_grad():
            spectrum.solve(vector, curvature)
