"""laplace-torch with every layer: its Laplace approximation on the eigenvectors of our factors.

laplace-torch computes Kronecker factors for linear layers and convolutions only. `SpectralLaplace` takes them from
kfac_fx, and has the rest of laplace-torch's interface: the log marginal likelihood, tuned priors, the variance of
outputs, samples and predictions. The prior has one precision, or one for every block (`prior_structure="layerwise"`).

    from laplace import Laplace
    import examples.laplace_torch
    la = Laplace(model, "classification", "all", "kfac_fx")
    la.fit(loader)
    la.optimize_prior_precision()
    la(x)

An LSTM that reads whether a sequence of bits has a pair of equal neighbors (`pip install laplace-torch`):

    python -m examples.laplace_torch
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx


class SpectralLaplace(ParametricLaplace):
    """N(θ*, P⁻¹) with P = N F / σ² + the prior's precision, block by block.

    Attributes:
        H: F for a noise of variance 1; None before `fit`.
    """

    _key = ("all", "kfac_fx")

    def _init_H(self) -> None:
        self.H: kfac_fx.ModelSpectrum | None = None

    def fit(self, train_loader: DataLoader[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Record the data of batches (x, y) once. Raises NotImplementedError for override=False."""
        if not override:
            raise NotImplementedError("SpectralLaplace.fit starts anew: pass all data in one loader.")
        self.model.eval()
        self.mean = parameters_to_vector(self.params).detach()
        batches = [(x.to(self._device), y.to(self._device)) for x, y in train_loader]
        regression = self.likelihood == "regression"
        of_unit_noise = lambda outputs: kfac_fx.losses.Normal(outputs, var=1.0)  # noqa: E731
        net = kfac_fx.compile(self.model, (batches[0][0],), loss=of_unit_noise if regression else "categorical")
        self.H = kfac_fx.fit_spectrum(net, [x for x, _ in batches], mode="exact")
        self.n_layers = len(self.H.keys)
        with torch.no_grad():
            outputs = torch.cat([self.model(x) for x, _ in batches])
        targets = torch.cat([y for _, y in batches])
        self.n_data, self.n_outputs = outputs.shape
        squares = lambda: F.mse_loss(outputs, targets, reduction="sum") / 2  # noqa: E731
        self.loss = squares() if regression else F.cross_entropy(outputs, targets, reduction="sum")

    # --- the prior ----------------------------------------------------------------------------------------------------

    @BaseLaplace.prior_precision.setter  # type: ignore[attr-defined, misc]
    def prior_precision(self, prior_precision: float | Tensor) -> None:
        BaseLaplace.prior_precision.fset(self, prior_precision)
        if len(self.prior_precision) not in (1, self.n_layers):
            raise ValueError(f"the prior has one precision, or one for each of {self.n_layers} blocks (after `fit`).")

    @property
    def prior_precision_diag(self) -> Tensor:
        if len(self.prior_precision) == 1:
            return self.prior_precision.expand(self.n_params)
        by_name = {name: self.prior_precision[k] for k, key in enumerate(self.fitted.keys) for name in key}
        return torch.cat([by_name[name].expand(shape.numel()) for name, shape in self.shapes.items()])

    # --- the posterior ------------------------------------------------------------------------------------------------

    @property
    def fitted(self) -> kfac_fx.ModelSpectrum:
        self._check_H_init()
        assert self.H is not None
        return self.H

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def posterior_precision(self) -> kfac_fx.Spectrum:
        prior = self.prior_precision
        damping = prior[0] if len(prior) == 1 else dict(zip(self.fitted.keys, prior, strict=True))
        return self.fitted.at(scale=self.n_data * self._H_factor, damping=damping)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        return self.posterior_precision.log_determinant()

    def square_norm(self, value: Tensor) -> Tensor:
        half = self.joined(self.posterior_precision.multiply_matpower(0.5, self.split(value - self.mean)))
        return half.square().sum(-1)

    def functional_variance(self, Js: Tensor) -> Tensor:
        rows = self.joined(self.posterior_precision.multiply_matpower(-0.5, self.split(Js)))
        return rows @ rows.mT

    def functional_covariance(self, Js: Tensor) -> Tensor:
        return self.functional_variance(Js.flatten(0, 1))

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        return self.mean + self.joined(self.posterior_precision.sample(n_samples, generator))

    # --- vectors ------------------------------------------------------------------------------------------------------

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """[..., P] to tensors by parameter."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        named = zip(parts, self.shapes.items(), strict=True)
        return {name: part.reshape(*flat.shape[:-1], *shape) for part, (name, shape) in named}

    def joined(self, vector: dict[str, Tensor]) -> Tensor:
        """Tensors by parameter, with the same dimensions in front, to [..., P]."""
        parts = (vector[name].unsqueeze(-1).flatten(-1 - len(shape)) for name, shape in self.shapes.items())
        return torch.cat(list(parts), dim=-1)


class Reader(nn.Module):
    """Two logits at the end of a sequence of bits [N, T, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, bits: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(bits)[0][:, -1])
        return logits


def sequences(number: int, length: int = 5) -> tuple[Tensor, Tensor]:
    bits = torch.randint(2, (number, length, 1))
    return bits.to(torch.get_default_dtype()), (bits[:, 1:] == bits[:, :-1]).any(1).squeeze(1).long()


def main(steps: int = 300) -> SpectralLaplace:
    torch.manual_seed(0)
    model, (x, y) = Reader(), sequences(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    la = SpectralLaplace(model, "classification")
    la.fit(DataLoader(TensorDataset(x, y), batch_size=64))
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(prior_structure="layerwise")
    print(f"log marginal likelihood {before:.1f}, with tuned priors {la.log_marginal_likelihood().item():.1f}")
    for key, prior in zip(la.fitted.keys, la.prior_precision, strict=True):
        print(f"  {prior:8.3f}  {', '.join(key)}")
    for name, bits in (("seen lengths", x[:100]), ("three times as long", sequences(100, 15)[0])):
        with torch.no_grad():
            plain = model(bits).softmax(-1).amax(-1).mean()
        print(f"mean confidence, {name}: network {plain:.3f}, Laplace {la(bits).amax(-1).mean():.3f}")
    return la


if __name__ == "__main__":
    main()
