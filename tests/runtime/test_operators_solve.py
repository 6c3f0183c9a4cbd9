"""Conjugate gradients with a spectrum as the preconditioner, against dense solves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import kfac_fx
from kfac_fx import ConvergenceWarning, ModelSpectrum, Relative
from kfac_fx.linalg.vectors import NamedProduct, conjugate_gradients
from tests.runtime.single_cases import Gradients

pytestmark = pytest.mark.usefixtures("float64")


def curved(hidden: int = 2) -> tuple[ModelSpectrum, NamedProduct, Tensor, list[str]]:
    """The spectrum of a network with so many hidden layers and badly scaled inputs, products with its Gauss-Newton
    matrix, and that matrix."""
    widths = (4, *[5] * hidden)
    layers = [part for i, o in zip(widths, widths[1:], strict=False) for part in (nn.Linear(i, o), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(5, 2))
    x = torch.randn(40, 4) * torch.tensor([10.0, 1.0, 0.1, 3.0])
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss="normal"), estimation_mode="exact")
    estimator.update_covariances(x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    names = list(parameters)

    def outputs(values: Gradients) -> Tensor:
        result: Tensor = functional_call(model, values, (x,))
        return result

    jacobian = torch.func.jacrev(outputs)(parameters)

    def product(vector: Gradients) -> Gradients:
        """The Gauss-Newton matrix of the mean of squared errors: 2 Jᵀ J v / N."""
        pushed = torch.stack([(jacobian[n] * vector[n]).flatten(2).sum(2) for n in names]).sum(0)
        return {n: 2 / len(x) * torch.einsum("no,no...->...", pushed, jacobian[n]) for n in names}

    j = torch.cat([jacobian[name].flatten(2) for name in names], dim=2).flatten(0, 1)
    return estimator.spectrum(damping=1e-2), product, 2 * j.mT @ j / len(x), names


def flat(vector: Gradients, names: list[str], lead: int = 0) -> Tensor:
    return torch.cat([vector[name].flatten(lead) for name in names], dim=lead)


def damped(product: NamedProduct) -> NamedProduct:
    return lambda vector: {name: part + 1e-2 * vector[name] for name, part in product(vector).items()}


def test_the_solution_is_that_of_the_dense_matrix() -> None:
    spectrum, product, h, names = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    found = spectrum.solve(v, product, tolerance=1e-10)
    expected = torch.linalg.solve(h + 1e-2 * torch.eye(len(h)), flat(v, names))
    torch.testing.assert_close(flat(found.vector, names), expected, rtol=1e-6, atol=1e-8)
    assert found.converged and found.residuals[-1] <= 1e-10 and found.residuals[0] == 1


def test_a_number_is_a_parameter_like_others() -> None:
    """As a coefficient that is learned next to a network."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    x = torch.randn(10, 3)
    net = kfac_fx.compile(Scaled(), (x,), loss="mse")
    spectrum, product = kfac_fx.fit_spectrum(net, [x], mode="exact"), net.fisher_product(x)
    v = {name: torch.randn_like(parameter) for name, parameter in net.named_parameters()}
    solution = spectrum.at(damping=0.1).solve(v, product, tolerance=1e-12).vector
    back = product(solution)
    for name, vector in v.items():
        torch.testing.assert_close(back[name] + 0.1 * solution[name], vector)


def test_a_matrix_of_kronecker_products_takes_one_iteration() -> None:
    spectrum, _, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    undamped = spectrum.at(damping=0.0).multiply
    assert spectrum.solve(v, undamped).iterations == 1
    assert conjugate_gradients(v, damped(undamped), dict, (), 1e-8, 1000).iterations > 10


def test_bad_scales_within_blocks_take_few_iterations() -> None:
    spectrum, product, h, names = curved(hidden=1)
    spectrum = spectrum.at(damping=1e-4)
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    preconditioned, plain = (
        spectrum.solve(v, product, tolerance=1e-8, iterations=2000, exponent=exponent) for exponent in (1.0, 0.0)
    )
    expected = torch.linalg.solve(h + 1e-4 * torch.eye(len(h)), flat(v, names))
    for solution in (preconditioned, plain):
        torch.testing.assert_close(flat(solution.vector, names), expected, rtol=1e-5, atol=1e-3)
    assert 2 * preconditioned.iterations < plain.iterations


def test_an_exponent_of_zero_is_no_preconditioner() -> None:
    spectrum, product, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    expected = conjugate_gradients(v, damped(product), dict, (), 1e-8, 1000)
    found = spectrum.solve(v, product, iterations=1000, exponent=0.0)
    assert torch.equal(found.residuals, expected.residuals)


def test_many_right_hand_sides_are_solved_at_once() -> None:
    spectrum, product, h, names = curved()
    v = {name: torch.randn(2, 3, *shape) for name, shape in spectrum.shapes.items()}
    v = {
        name: tensor * torch.tensor([[1.0, 0.0, 1e-3], [2, 3, 4]]).view(2, 3, *[1] * (tensor.dim() - 2))
        for name, tensor in v.items()
    }
    found = spectrum.solve(v, vmap(vmap(product)), tolerance=1e-9)
    expected = torch.linalg.solve(h + 1e-2 * torch.eye(len(h)), flat(v, names, 2).flatten(0, 1).mT).mT
    torch.testing.assert_close(flat(found.vector, names, 2).flatten(0, 1), expected, rtol=1e-5, atol=1e-7)
    assert found.converged.shape == (2, 3) and bool(found.converged.all())
    assert found.residuals.shape == (found.iterations + 1, 2, 3) and not found.residuals[:, 0, 1].any()


def test_every_block_is_damped_as_the_spectrum_is() -> None:
    spectrum, product, h, names = curved()
    damped = spectrum.at(damping={"0": 0.3, "2": Relative(0.5), "4": 1.0})
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    mean = next(values.mean() for key, values in spectrum.at(damping=0.0).eigenvalues().items() if "2.weight" in key)
    amounts = {"0": torch.tensor(0.3), "2": 0.5 * mean, "4": torch.tensor(1.0)}
    shift = flat({name: amounts[name[0]].expand(shape) for name, shape in spectrum.shapes.items()}, names)
    expected = torch.linalg.solve(h + torch.diag(shift), flat(v, names))
    torch.testing.assert_close(flat(damped.solve(v, product).vector, names), expected, rtol=1e-5, atol=1e-7)


def test_a_solve_that_stops_early_says_so() -> None:
    spectrum, product, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    text = (
        r"^1 of 1 right-hand sides have a residual of up to .* after 2 iterations, .* Write more iterations= or a larg"
    )
    with pytest.warns(ConvergenceWarning, match=text):
        found = spectrum.solve(v, product, iterations=2)
    assert found.iterations == 2 and not found.converged


def test_what_is_not_positive_definite_is_refused() -> None:
    spectrum, product, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    with pytest.raises(ValueError, match=r"direction without positive curvature: `product` is not that of"):
        spectrum.solve(v, lambda u: {name: -tensor for name, tensor in u.items()})
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"missing  0\.weight"):
        spectrum.solve(v, lambda u: {})
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"missing  0\.weight"):
        spectrum.solve({}, product)


def test_options_that_cannot_be_are_refused() -> None:
    spectrum, product, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    with pytest.raises(ValueError, match=r"^tolerance is -1; it must not be negative$"):
        spectrum.solve(v, product, tolerance=-1)
    with pytest.raises(ValueError, match=r"^iterations is 0; it must be a whole number of iterations, at least 1$"):
        spectrum.solve(v, product, iterations=0)
    with pytest.raises(ValueError, match=r"^exponent is nan; it must be finite$"):
        spectrum.solve(v, product, exponent=float("nan"))


@pytest.mark.parametrize("scale", [1 / 50, 50.0, 4000.0])
def test_a_product_that_lacks_the_scale_of_the_spectrum_has_a_warning(scale: float) -> None:
    spectrum, product, h, names = curved()
    scaled = spectrum.at(scale=scale, damping=scale * 1e-2)
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    with pytest.warns(
        UserWarning, match=rf"of scale {scale:g}, and a product .* it seems to lack the scale, .*\. Write lam"
    ):
        scaled.solve(v, product, iterations=1000)
    found = scaled.solve(v, lambda v: {n: scale * t for n, t in product(v).items()}, tolerance=1e-10, iterations=1000)
    expected = torch.linalg.solve(scale * (h + 1e-2 * torch.eye(len(h))), flat(v, names))
    torch.testing.assert_close(flat(found.vector, names), expected, rtol=1e-6, atol=1e-8 / scale)


def test_products_of_other_matrices_have_no_warning_of_the_scale() -> None:
    spectrum, product, _, _ = curved()
    v = {name: torch.randn(shape) for name, shape in spectrum.shapes.items()}
    for scale in (1.0, 100.0):
        for factor in (0.3, 1.0, 3.0):  # as of other data, or of some parameters alone

            def other(v: Gradients, factor: float = scale * factor) -> Gradients:
                return {name: factor * tensor for name, tensor in product(v).items()}

            spectrum.at(scale=scale).solve(v, other, iterations=1000)
    spectrum.at(scale=100.0).solve(v, lambda v: {name: 0 * tensor for name, tensor in v.items()}, exponent=0.0)
