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


# --- real parameters of complex activations ---------------------------------------------------------------------------


def filtered(x: Tensor, k: Tensor) -> Tensor:
    """A long filter, as in Hyena (Poli et al. 2023)."""
    return torch.fft.irfft(torch.fft.rfft(x, n=2 * LENGTH) * torch.fft.rfft(k, n=2 * LENGTH), n=2 * LENGTH)[
        ..., :LENGTH
    ]


def circular(x: Tensor, k: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(k)).real


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bil,oi->bol", x, w.to(x.dtype))


def oscillating(x: Tensor, decay: Tensor, frequency: Tensor) -> Tensor:
    """The kernel of a diagonal state space (Gupta et al. 2022)."""
    states = torch.exp(torch.complex(-torch.exp(decay), frequency))
    return filtered(x, (states[:, None] ** torch.arange(LENGTH)).real)


class Real(nn.Module):
    """A function of the input and of real parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def spectrum(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: torch.view_as_real(function(torch.fft.rfft(x), w)).flatten(-2)


REAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "long filter": (lambda: Real(filtered, (IN, LENGTH)), "full"),
    "circulant": (lambda: Real(circular, (LENGTH,)), "full"),
    "state space": (lambda: Real(oscillating, (IN,), (IN,)), "full"),
    "complex of two": (
        lambda: Real(lambda x, a, b: (x.mT.to(COMPLEX) @ torch.complex(a, b)).abs(), (IN, 2), (IN, 2)), "full",
    ),
    "scaled spectrum": (lambda: Real(spectrum(lambda f, w: f * w), (IN, 1)), "full"),
    "mixed spectrum": (lambda: Real(spectrum(mixed), (OUT, IN)), "kron"),
    "convolved spectrum": (lambda: Real(spectrum(lambda f, w: F.conv1d(f, w.to(f.dtype))), (OUT, IN, 2)), "kron"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "approximation"), REAL.values(), ids=REAL)
def test_real_parameters_of_complex_numbers_have_blocks(make: Callable[[], nn.Module], approximation: str) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(make(), (torch.randn(CASES, IN, LENGTH),), loss="normal", strict=True)
    assert {registration.approximation for registration in net.registrations} == {approximation}


@pytest.mark.parametrize("name", ["long filter", "scaled spectrum"])
def test_full_blocks_are_the_fisher(name: str) -> None:
    """2 Jᵀ J over the cases: the second derivative of a squared error is 2."""
    torch.manual_seed(0)
    model, x = REAL[name][0](), torch.randn(CASES, IN, LENGTH)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    jacobian = torch.autograd.functional.jacobian(lambda w: model.function(x, w), model.weights[0])
    jacobian = jacobian.flatten(-2).flatten(0, -2)
    (block,) = estimator.blocks.values()
    torch.testing.assert_close(block.full_fisher_block(), 2 * jacobian.T @ jacobian / CASES, rtol=1e-4, atol=1e-4)


class Read(nn.Module):
    """It reads pairs of real parameters as complex numbers, behind a view and without one."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.odd, self.scale = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(OUT, 2))
        self.shift, self.divided = nn.Parameter(torch.randn(2 * OUT)), divided
        self.layer = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * self.odd
        if self.divided and h.sum() > 1e9:
            h = h * 2
        y = h * torch.view_as_complex(self.scale) + torch.view_as_complex(self.shift.view(OUT, 2))
        return torch.cat([y.real, y.imag], 1)


@pytest.mark.parametrize("divided", [False, True])
def test_values_of_parameters_may_be_parts_of_one_vector(divided: bool) -> None:
    """torch reads complex numbers at even places of memory alone, and such parts begin anywhere."""
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Read(divided), (torch.randn(CASES, IN),), loss="normal"), torch.randn(CASES, IN)
    assert bool(net.program.submodules) == divided
    vector = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    parts = dict(zip(dict(net.named_parameters()), vector.split([p.numel() for p in net.parameters()]), strict=True))
    places = {name: part.view_as(net.get_parameter(name)) for name, part in parts.items()}
    assert places["scale"].storage_offset() % 2
    torch.testing.assert_close(net.functional(places, (x,), {})[0], net(x))
    assert net.record((x,), {}, mode="exact", parameters=places).cases == CASES
    optimizer = kfac_fx.KFAC(net)  # a check asks for the loss at the parameters before the step
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(net(x), torch.ones(CASES, 2 * OUT), reduction="sum").div(CASES).backward()
        optimizer.step()
