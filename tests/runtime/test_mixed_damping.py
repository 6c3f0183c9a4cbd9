"""Blocks with several dampings: everything that a spectrum computes, against dense matrices s F + D."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from tests.runtime.single_cases import of_examples
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")
DAMPING: dict[str, Any] = {"*.bias": 0.3, "*": 2.0}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(torch.tanh(self.cell(torch.tanh(self.cell(x)))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def convolution(groups: int = 2) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 2, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


KINDS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "kron": (mlp, (3,), {}),
    "convolutions": (convolution, (4, 3, 3), {}),
    "full": (mlp, (3,), {"approximations": {"*": "full"}}),
    "diagonal": (mlp, (3,), {"approximations": {"*": "diagonal"}}),
    "kron_in_diag": (mlp, (3,), {"approximations": {"0": "kron_in_diag", "3": "kron_out_diag"}}),
    "kron_both_diag": (mlp, (3,), {"approximations": {"0": "kron_both_diag", "3": "kron_both_diag"}}),
    "kron_sua": (lambda: convolution(1), (4, 3, 3), {"approximations": {"0": "kron_sua"}}),
    "series": (Recurrent, (3,), {"approximations": {"cell": "kron_series_2"}}),
    "wide sides": (mlp, (3,), {"dense_limit": 3}),
}


def made(kind: str, case: str | None = None) -> tuple[nn.Module, Tensor, Tensor, kfac_fx.ModelSpectrum]:
    make, shape, options = KINDS[kind]
    model, x, y = make(), torch.randn(6, *shape), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (x,), loss="categorical", **options)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    spectrum = estimator.spectrum(damping=0.0)
    return model, x, y, spectrum if case is None else spectrum.correct([(x, y)], case)


def flat(vector: dict[str, Tensor], lead: int = 0) -> Tensor:
    return torch.cat([tensor.flatten(lead) for tensor in vector.values()], lead)


def named(spectrum: kfac_fx.Spectrum, vector: Tensor) -> dict[str, Tensor]:
    parts = vector.split([shape.numel() for shape in spectrum.shapes.values()], -1)
    shapes = zip(spectrum.shapes.items(), parts, strict=True)
    return {name: part.reshape(*vector.shape[:-1], *shape) for (name, shape), part in shapes}


def dense(spectrum: kfac_fx.Spectrum, scale: float) -> tuple[Tensor, Tensor]:
    """(s F, D)."""
    size = sum(shape.numel() for shape in spectrum.shapes.values())
    columns = spectrum.at(scale=scale, damping=0.0).multiply(named(spectrum, torch.eye(size)))
    d = {n: torch.full(s, 0.3 if n.endswith("bias") else 2.0) for n, s in spectrum.shapes.items()}
    return flat(columns, 1).mT, flat(d)


@pairs(("kind", list(KINDS)), ("corrected", {"factors": False, "corrected": True}))
def test_everything_is_that_of_the_dense_matrix(kind: str, corrected: bool) -> None:
    model, x, y, plain = made(kind, "row" if corrected else None)
    fisher, d = dense(plain, 5.0)
    matrix = fisher + torch.diag(d)
    inverse = torch.linalg.inv(matrix)
    spectrum: Any = plain.at(scale=5.0, damping=DAMPING)
    v = torch.randn(2, len(d))
    torch.testing.assert_close(flat(spectrum.multiply(named(plain, v)), 1), v @ matrix)
    torch.testing.assert_close(flat(spectrum.multiply_inverse(named(plain, v)), 1), v @ inverse)
    torch.testing.assert_close(spectrum.log_determinant(), torch.logdet(matrix))
    torch.testing.assert_close(spectrum.trace(), matrix.trace())
    torch.testing.assert_close(spectrum.trace(-1), inverse.trace())
    torch.testing.assert_close(flat(spectrum.diagonal(-1)), inverse.diagonal())
    torch.testing.assert_close(flat(spectrum.diagonal()), matrix.diagonal())
    gradients = flat(of_examples(model, x, y), 1)
    torch.testing.assert_close(spectrum.self_scores((x, y)), (gradients @ inverse * gradients).sum(1))
    scores = spectrum.precondition((x[:2], y[:2])).scores((x, y))
    torch.testing.assert_close(scores, gradients[:2] @ inverse @ gradients.mT)
    solution = spectrum.solve(named(plain, v), plain.at(scale=5.0, damping=0.0).multiply, tolerance=1e-12)
    torch.testing.assert_close(flat(solution.vector, 1), v @ inverse)
    assert solution.iterations <= 2  # the preconditioner is the inverse itself


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_covariance_of_the_inverse(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the noise is a unit vector in every draw, the sum of the squares of all samples is the covariance."""
    _, _, _, plain = made(kind)
    fisher, d = dense(plain, 5.0)
    taken = 0

    def units(count: int, *shape: int, **_: Any) -> Tensor:
        nonlocal taken
        size = torch.Size(shape).numel()
        taken += size
        return torch.eye(count)[:, taken - size : taken].reshape(count, *shape)

    monkeypatch.setattr("kfac_fx.fisher.spectrum.torch.randn", units)
    samples = flat(plain.at(scale=5.0, damping=DAMPING).sample(len(d)), 1)
    torch.testing.assert_close(samples.mT @ samples, torch.linalg.inv(fisher + torch.diag(d)))
    assert taken == len(d)


@pytest.mark.parametrize("kind", ["kron", "full", "diagonal", "kron_in_diag", "series", "kron_sua"])
def test_the_determinant_is_differentiable_in_the_dampings_and_the_scale(kind: str) -> None:
    _, _, _, plain = made(kind)
    fisher, _ = dense(plain, 1.0)
    numbers = [torch.tensor(value, requires_grad=True) for value in (0.3, 2.0, 5.0)]
    bias, weight, scale = numbers
    found = plain.at(scale=scale, damping={"*.bias": bias, "*": weight}).log_determinant()
    d = {n: (bias if n.endswith("bias") else weight).expand(s) for n, s in plain.shapes.items()}
    expected = torch.logdet(scale * fisher + torch.diag(flat(d)))
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, numbers), torch.autograd.grad(expected, numbers), strict=True):
        torch.testing.assert_close(a, b)


def test_derivatives_by_several_dampings_that_would_be_wrong_are_refused() -> None:
    model, x, y, plain = made("kron")
    bias = torch.tensor(0.3, requires_grad=True)
    spectrum: Any = plain.at(damping={"*.bias": bias, "*": 2.0})
    v = named(plain, torch.randn(sum(shape.numel() for shape in plain.shapes.values())))
    for call in (
        lambda: spectrum.multiply_inverse(v),
        lambda: spectrum.diagonal(-1),
        lambda: spectrum.trace(-1),
        lambda: spectrum.sample(2),
        lambda: spectrum.self_scores((x, y)),
        lambda: spectrum.precondition((x, y)),
    ):
        with pytest.raises(ValueError, match=r"has several dampings, and in these only the determinant is differ"):
            call()
        with torch.no_grad():
            call()
    scale = torch.tensor(5.0, requires_grad=True)
    mixed = plain.at(scale=scale, damping=DAMPING)
    fisher, d = dense(plain, 1.0)
    found = flat(mixed.multiply_inverse(v)).sum()
    expected = torch.linalg.solve(scale * fisher + torch.diag(d), flat(v)).sum()
    torch.testing.assert_close(torch.autograd.grad(found, scale), torch.autograd.grad(expected, scale))


def test_relative_and_equal_dampings_parts_and_corrections() -> None:
    model, x, y, plain = made("kron")
    relative = plain.at(damping={"*.bias": kfac_fx.Relative(0.1), "*": kfac_fx.Relative(0.5)})
    means = {key: values.mean() for key, values in plain.eigenvalues().items()}
    d = torch.cat(
        [
            torch.full((shape.numel(),), float((0.1 if name.endswith("bias") else 0.5) * means[key]))
            for key in plain.keys
            for name, shape in ((name, plain.shapes[name]) for name in key)
        ]
    )
    fisher, _ = dense(plain, 1.0)
    torch.testing.assert_close(relative.log_determinant(), torch.logdet(fisher + torch.diag(d)))
    equal = plain.at(damping={"*.bias": 2.0, "*": 2.0})
    assert equal.used is not equal.systems and equal.eigenvalues().keys() == set(plain.keys)
    torch.testing.assert_close(equal.log_determinant(), plain.at(damping=2.0).log_determinant())
    mixed: Any = plain.at(damping={"3.bias": 0.3, **DAMPING})
    part = mixed.part(["3.weight", "3.bias"])
    v = {name: torch.randn(shape) for name, shape in plain.shapes.items()}
    whole = mixed.multiply_inverse(v)
    for name, tensor in part.multiply_inverse({name: v[name] for name in part.shapes}).items():
        torch.testing.assert_close(tensor, whole[name])
    again = mixed.correct([(x, y)]).at(damping=0.0)
    for key, values in plain.correct([(x, y)]).eigenvalues().items():
        torch.testing.assert_close(again.eigenvalues()[key], values)


def test_blocks_that_have_no_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, plain = made("kron", "row")
    spectrum = plain.at(damping=DAMPING)
    v = named(plain, torch.randn(sum(shape.numel() for shape in plain.shapes.values())))
    with pytest.raises(ValueError, match=r"has several dampings, and the power -0\.5 of s F \+ D has no form"):
        spectrum.multiply_matpower(-0.5, v)
    with pytest.raises(
        ValueError, match=r"eigenvalues of s F \+ D are not known for blocks with several dampings: linear"
    ):
        spectrum.eigenvalues()
    with pytest.raises(ValueError, match="has several dampings, and one of them is zero"):
        plain.at(damping={"*.bias": 0.0, "*": 1.0}).log_determinant()
    monkeypatch.setattr("kfac_fx.fisher.spectrum.WRITTEN_OUT", 10)
    with pytest.raises(kfac_fx.ApproximationError, match=r"several dampings and 16 elements, of which at most 10 can"):
        plain.at(damping=DAMPING).log_determinant()
