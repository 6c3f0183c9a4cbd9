"""`examples/laplace_torch.py` with the real laplace-torch, in float64. Skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.agreement_kronfluence import GPT, LENGTH, VOCABULARY

pytest.importorskip("laplace", reason="pip install laplace-torch")

from laplace import Laplace, curvature

from examples.laplace_torch import Reader, SpectralLaplace, main, sequences

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*link_approx.*:UserWarning", "ignore:.*torch.jit.*:DeprecationWarning"),
]
REFUSALS = [
    ("CurvlinopsGGN", "curvlinops", r"un-supported layers"),
    ("AsdlGGN", "asdl", r"The size of tensor a|bincount only supports"),
    ("BackPackGGN", "backpack", r"does not have an extension for Module"),
]
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


class NextWord(nn.Module):
    """The logits behind the last position, as laplace-torch wants one row for an example."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt(ids)[:, -1]
        return logits


def mlp(outputs: int) -> nn.Module:
    """Without biases, because laplace-torch has them in blocks of their own."""
    layers = nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(5, outputs, bias=False))


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    if kind == "LSTM":
        return Reader(), *sequences(24)
    if kind == "GPT":
        return NextWord(), torch.randint(VOCABULARY, (24, LENGTH)), torch.randint(VOCABULARY, (24,))
    x = torch.randn(24, 4)
    return mlp(3), x, torch.randn(24, 3) if kind == "regression" else torch.randint(3, (24,))


def fitted(kind: str, structure: str = "kfac_fx", **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model, x, y = problem(kind)
    if kind == "regression":
        options["sigma_noise"] = 0.7
    likelihood = "regression" if kind == "regression" else "classification"
    la = Laplace(model, likelihood, "all", structure, prior_precision=0.8, **options)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    return la, x


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_an_mlp_equals_the_backend_of_curvlinops(kind: str) -> None:
    mine, x = fitted(kind)
    theirs, _ = fitted(kind, "kron", backend=curvature.CurvlinopsGGN)
    assert isinstance(mine, SpectralLaplace)
    for name in ("log_likelihood", "scatter", "log_det_posterior_precision", "log_det_ratio"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), **CLOSE)
    torch.testing.assert_close(mine.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **CLOSE)
    jacobians, _ = mine.backend.jacobians(x[:5])
    torch.testing.assert_close(mine.functional_variance(jacobians), theirs.functional_variance(jacobians), **CLOSE)
    torch.testing.assert_close(mine.functional_covariance(jacobians), theirs.functional_covariance(jacobians), **CLOSE)
    value = mine.mean + torch.randn_like(mine.mean)
    torch.testing.assert_close(mine.log_prob(value), theirs.log_prob(value), **CLOSE)
    torch.testing.assert_close(mine(x[:5]), theirs(x[:5]), **CLOSE)
    for structure in ("scalar", "layerwise"):
        for la in (mine, theirs):
            la.optimize_prior_precision(prior_structure=structure, n_steps=20)
        torch.testing.assert_close(mine.prior_precision, theirs.prior_precision, **CLOSE)
        torch.testing.assert_close(mine.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **CLOSE)
        torch.testing.assert_close(mine(x[:5]), theirs(x[:5]), **CLOSE)


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("kind", ["LSTM", "GPT"])
@pytest.mark.parametrize(("backend", "package", "message"), REFUSALS)
def test_kronecker_backends_of_laplace_torch_refuse_it(kind: str, backend: str, package: str, message: str) -> None:
    pytest.importorskip(package)
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        fitted(kind, "kron", backend=getattr(curvature, backend))


@pytest.mark.parametrize("kind", ["classification", "LSTM", "GPT"])
def test_everything_is_that_of_the_dense_posterior(kind: str) -> None:
    la, x = fitted(kind)
    dense = la.joined(la.posterior_precision.multiply(la.split(torch.eye(la.n_params))))
    torch.testing.assert_close(la.log_det_posterior_precision, torch.logdet(dense))
    jacobians = la.backend.jacobians(x[:3])[0].detach()
    flat = jacobians.flatten(0, 1)
    covariance = flat @ torch.linalg.solve(dense, flat.mT)
    torch.testing.assert_close(la.functional_covariance(jacobians), covariance)
    n, k = jacobians.shape[:2]
    variance = torch.stack([covariance.view(n, k, n, k)[i, :, i] for i in range(n)])
    torch.testing.assert_close(la.functional_variance(jacobians), variance)
    delta = torch.randn(la.n_params)
    torch.testing.assert_close(la.square_norm(la.mean + delta), delta @ dense @ delta)


@pytest.mark.parametrize("kind", ["LSTM", "GPT"])
def test_priors_of_blocks_raise_the_evidence(kind: str) -> None:
    la, x = fitted(kind)
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision(n_steps=50)
    scalar = la.log_marginal_likelihood()
    la.optimize_prior_precision(n_steps=50, prior_structure="layerwise", init_prior_prec=float(la.prior_precision))
    assert before < scalar < la.log_marginal_likelihood()
    assert len(la.prior_precision) == len(la.fitted.keys) > 1 and la.prior_precision_diag.shape == (la.n_params,)
    predictions = la(x[:4])
    assert predictions.shape == (4, la.n_outputs)
    torch.testing.assert_close(predictions.sum(-1), torch.ones(4))


def test_samples_have_the_covariance_of_the_posterior() -> None:
    la, _ = fitted("classification")
    generator = torch.Generator().manual_seed(1)
    samples = la.sample(20000, generator)
    dense = la.joined(la.posterior_precision.multiply(la.split(torch.eye(la.n_params))))
    whitened = (samples - la.mean) @ torch.linalg.cholesky(dense)
    torch.testing.assert_close(whitened.mT @ whitened / len(samples), torch.eye(la.n_params), rtol=0, atol=0.06)
    assert torch.equal(la.sample(3, generator.manual_seed(1)), la.sample(3, generator.manual_seed(1)))


def test_what_it_does_not_do_is_said() -> None:
    la, x = fitted("classification")
    with pytest.raises(ValueError, match=r"one precision, or one for each of 3 blocks"):
        la.prior_precision = torch.ones(la.n_params)
    with pytest.raises(NotImplementedError, match=r"pass all data in one loader"):
        la.fit(DataLoader(TensorDataset(x, x)), override=False)
    with pytest.raises(AttributeError, match=r"not fitted"):
        SpectralLaplace(mlp(3), "classification").log_marginal_likelihood()


def test_the_example_is_less_sure_of_sequences_that_it_has_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    main(steps=60)
    assert "log marginal likelihood" in capsys.readouterr().out
