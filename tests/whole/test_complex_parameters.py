"""Complex parameters by their real and imaginary parts: spectral convolutions, unitary layers, complex scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

CASES, MODES, OUT, IN, LENGTH = 6, 3, 5, 4, 10
COMPLEX = torch.complex64


class Spectral1d(nn.Module):
    """The layer of a Fourier neural operator (Li et al. 2021), as its authors write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IN, OUT, MODES, dtype=COMPLEX) / IN)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], OUT, spectrum.shape[-1], dtype=COMPLEX)
        out[:, :, :MODES] = torch.einsum("bix,iox->box", spectrum[:, :, :MODES], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class Spectral2d(nn.Module):
    """The same with two corners of the spectrum, whose weights are indexed as neuralop indexes them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(IN, OUT, MODES, MODES, dtype=COMPLEX) / IN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], OUT, *spectrum.shape[-2:], dtype=COMPLEX)
        m, whole = MODES, slice(None)
        low = self.low[whole, whole, slice(0, None), slice(None, m)]
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class With(nn.Module):
    """A function of the input as complex numbers, and of a complex weight; real and imaginary parts of the result."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape, dtype=COMPLEX)), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.function(x.to(self.weight.dtype), self.weight)).flatten(-2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: With(F.linear, OUT, LENGTH),
    "matmul": lambda: With(lambda x, w: x @ w, LENGTH, OUT),
    "transposed": lambda: With(lambda x, w: x @ w.mT, OUT, LENGTH),
    "adjoint": lambda: With(lambda x, w: x @ w.mT.conj(), OUT, LENGTH),
    "einsum": lambda: With(lambda x, w: torch.einsum("bgi,goi->bgo", x, w), IN, OUT, LENGTH),
    "from the left": lambda: With(lambda x, w: w @ x, OUT, IN),
    "scale": lambda: With(lambda x, w: x * w, LENGTH),
    "used twice": lambda: With(lambda x, w: torch.tanh(x @ w) @ w, LENGTH, LENGTH),
}


def compiled(model: nn.Module, x: Tensor, **options: Any) -> kfac_fx.CompiledModule:
    return kfac_fx.compile(kfac_fx.with_real_parameters(model), (x,), loss="normal", **options)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_complex_layers_are_the_layers_of_their_real_and_imaginary_parts(layer: Callable[[], nn.Module]) -> None:
    """The proof of compile holds the rows against autograd."""
    torch.manual_seed(0)
    (registration,) = compiled(layer(), torch.randn(CASES, IN, LENGTH), strict=True).registrations
    assert not registration.generic


@pytest.mark.parametrize(("make", "dims"), [(Spectral1d, 1), (Spectral2d, 2)])
def test_a_spectral_convolution_has_a_block_for_every_mode(make: Callable[[], nn.Module], dims: int) -> None:
    torch.manual_seed(0)
    net = compiled(make(), torch.randn(CASES, IN, *[LENGTH] * dims), strict=True)
    shapes = {r.matrix.shape for r in net.registrations if r.matrix is not None and r.approximation == "kron"}
    assert shapes == {(MODES**dims, OUT, 2 * IN)} and len(net.registrations) == dims


def test_factors_are_those_of_a_real_layer_at_two_positions() -> None:
    """Re y = [Re x, -Im x] (Re w, Im w) and Im y = [Im x, Re x] (Re w, Im w)."""

    class Real(nn.Module):
        def __init__(self, parts: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(parts.flatten(-2))

        def forward(self, x: Tensor) -> Tensor:  # [cases, groups, inputs] of complex numbers
            re, im = x.real, x.imag
            positions = torch.stack([torch.stack(pair, -1).flatten(-2) for pair in ((re, -im), (im, re))], 1)
            return torch.einsum("nsgi,goi->nsgo", positions, self.weight)

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(MODES, OUT, IN, dtype=COMPLEX))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.einsum("ngi,goi->ngo", x, self.weight)
            return torch.stack([y.real, y.imag], 1)

    torch.manual_seed(0)
    model, x = kfac_fx.with_real_parameters(Complex()), torch.randn(CASES, MODES, IN, dtype=COMPLEX)
    twin, targets = Real(next(model.parameters()).detach().clone()), torch.randn(CASES, 2, MODES, OUT)
    torch.testing.assert_close(model(x), twin(x))
    for mode in ("empirical", "exact"):
        found, wanted = (
            kfac_fx.compile(net, (x,), loss="normal").record((x,), {}, mode=mode, targets=targets).statistics
            for net in (model, twin)
        )
        torch.testing.assert_close(next(iter(found.values())), next(iter(wanted.values())))


def test_the_parts_are_the_parameters_and_ties_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.randn(4, 4, dtype=COMPLEX))
            self.frozen = nn.Parameter(torch.randn(4, dtype=COMPLEX), requires_grad=False)
            self.inside = nn.ParameterList([torch.randn(4, dtype=COMPLEX)])

        def forward(self, x: Tensor) -> Tensor:
            return ((x.to(COMPLEX) @ self.first * self.frozen) @ self.second * self.inside[0]).abs()

    model, x = Tied(), torch.randn(CASES, 4)
    before = model(x)
    assert kfac_fx.with_real_parameters(model) is model
    torch.testing.assert_close(model(x), before)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "inside.parametrizations.0.original0", "parametrizations.first.original0",
    ]  # fmt: skip
    assert model.first.is_complex() and torch.equal(model.first, model.second)
    registered = [name for r in compiled(model, x).registrations for name in r.parameters]
    assert sorted(registered) == ["inside.parametrizations.0.original0", "parametrizations.first.original0"]
    assert kfac_fx.with_real_parameters(model) is model  # there is nothing left to do


def test_a_fourier_neural_operator_trains() -> None:
    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.spectral, self.head = nn.Conv1d(1, IN, 1), Spectral1d(), nn.Conv1d(OUT, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(F.gelu(self.spectral(self.lift(x))))
            return y

    torch.manual_seed(0)
    x = torch.sin(torch.arange(LENGTH) + 6 * torch.rand(CASES, 1, 1))
    net = kfac_fx.compile(kfac_fx.with_real_parameters(Operator()), (x,), loss="mse", strict=True)
    optimizer, losses = kfac_fx.KFAC(net), list[float]()
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), x.roll(1, -1) ** 2)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
