"""Complex parameters, as they are and by their real and imaginary parts: spectral convolutions, unitary layers, complex
scales."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.errors import NotRegisteredError, UntraceableError

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
    "shift": lambda: With(lambda x, w: x + w.conj(), LENGTH),
    "convolution": lambda: With(lambda x, w: F.conv1d(x, w, padding=1), OUT, IN, 3),
    "grouped": lambda: With(lambda x, w: F.conv1d(x, w, groups=2), OUT + 1, IN // 2, 3),
    "unitary": lambda: With(lambda x, w: x @ torch.matrix_exp(w - w.mH), LENGTH, LENGTH),
    "modulus": lambda: With(lambda x, w: x * (w / w.abs()), LENGTH),
    "real and imaginary": lambda: With(lambda x, w: torch.complex(x.real @ w.real, x.imag @ w.imag), LENGTH, OUT),
    "used twice": lambda: With(lambda x, w: torch.tanh(x @ w) @ w, LENGTH, LENGTH),
}


def test_parameters_that_conjugate_other_numbers_are_refused_by_name() -> None:
    model = LAYERS["linear"]()
    model.weight = nn.Parameter(model.weight.detach().conj())
    text = r"views that conjugate other numbers, .*: weight\.\nWrite p\.data = p\.data\.resolve_conj\(\) for each"
    with pytest.raises(UntraceableError, match=text):
        compiled(model, torch.randn(CASES, LENGTH))
    model.weight.data = model.weight.data.resolve_conj()
    assert compiled(model, torch.randn(CASES, LENGTH)).registrations


def compiled(model: nn.Module, x: Tensor, **options: Any) -> kfac_fx.CompiledModule:
    return kfac_fx.compile(model, (x,), loss="normal", **options)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_complex_layers_are_the_layers_of_their_real_and_imaginary_parts(layer: Callable[[], nn.Module]) -> None:
    """The proof of compile holds the rows against autograd."""
    torch.manual_seed(0)
    (registration,) = compiled(layer(), torch.randn(CASES, IN, LENGTH), strict=True).registrations
    assert not registration.generic and registration.parameters == ("weight",)


class Layers(nn.Module):
    """Complex layers with biases, a frozen scale, a table, and a weight with two uses."""

    def __init__(self, dtype: torch.dtype = torch.complex128, divided: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, OUT, dtype=dtype), nn.Linear(OUT, 2, dtype=dtype)
        self.table = nn.Parameter(torch.randn(3, OUT, dtype=dtype))
        self.mix = self.again = nn.Parameter(torch.randn(OUT, OUT, dtype=dtype) / OUT)
        self.phase = nn.Parameter(torch.randn(OUT, dtype=dtype), requires_grad=False)
        self.divided = divided

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.to(self.mix.dtype))
        if self.divided and h.abs().sum() > 1e9:
            h = h * 2
        h = torch.tanh(h) @ self.mix + self.table[(x[:, 0] > 0).long()] * self.phase
        return self.last(h @ self.again.conj()).abs()


def trained(
    model: nn.Module, x: Tensor, steps: int = 5, state: Any = None, **options: Any
) -> tuple[list[float], kfac_fx.KFAC]:
    net = kfac_fx.compile(model, (x,), loss="mse")
    optimizer, losses = kfac_fx.KFAC(net, **options), list[float]()
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in x.chunk(2):
            loss = F.mse_loss(net(part), torch.ones(len(part), 2).to(part)) / 2
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, optimizer


class RealLayers(nn.Module):
    """The same with real parameters [..., 2], in the same order."""

    def __init__(self, model: Layers) -> None:
        super().__init__()
        self.names = [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            parts = nn.Parameter(torch.view_as_real(p.detach()).clone(), requires_grad=p.requires_grad)
            self.register_parameter(name.replace(".", "_"), parts)

    def forward(self, x: Tensor) -> Tensor:
        table, mix, phase, w, b, v, c = (torch.view_as_complex(getattr(self, n.replace(".", "_"))) for n in self.names)
        h = F.linear(x.to(mix.dtype), w, b)
        h = torch.tanh(h) @ mix + table[(x[:, 0] > 0).long()] * phase
        return F.linear(h @ mix.conj(), v, c).abs()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimation_mode": "empirical", "weight_decay": 0.1},
        {"momentum_type": "adam", "lr": 0.1, "damping": 0.1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("float64")
def test_a_training_is_that_of_real_parameters(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, IN)
    twin = RealLayers(model)
    (losses, optimizer), (wanted, _) = trained(model, x, **options), trained(twin, x, **options)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-12, atol=1e-12)
    for parameter, parts in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(torch.view_as_real(parameter), parts, rtol=1e-12, atol=1e-12)
    layers = sorted((r.layer, *r.parameters) for r in optimizer.net.registrations if not r.generic)
    assert layers == [
        ("embedding", "table"), ("linear", "first.bias"), ("linear", "first.weight"), ("linear", "last.bias"),
        ("linear", "last.weight"), ("linear", "mix"),
    ]  # fmt: skip


@pytest.mark.usefixtures("float64")
def test_the_training_of_a_model_without_a_single_graph_is_that_of_its_real_parameters() -> None:
    torch.manual_seed(0)
    model, x = Layers(divided=True), torch.randn(8, IN)
    twin = kfac_fx.with_real_parameters(copy.deepcopy(model))
    options = {"momentum_type": "adam", "lr": 0.1, "damping": 0.1, "estimation_mode": "empirical"}
    (losses, optimizer), (wanted, _) = trained(model, x, **options), trained(twin, x, **options)
    assert optimizer.net.program.submodules
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_a_state_is_loaded_and_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, IN)
    _, optimizer = trained(model, x, 4)
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    onward = [trained_on(optimizer, x) for _ in range(3)]
    saved.seek(0)
    of_model, of_optimizer = torch.load(saved)
    again = Layers()
    again.load_state_dict(of_model)
    resumed, optimizer = trained(again, x, 3, of_optimizer)
    assert resumed == onward
    before = again.first.weight.requires_grad_(False).detach().clone()
    trained_on(optimizer, x)
    assert torch.equal(before, again.first.weight)
    again.first.weight.requires_grad_(True)
    trained_on(optimizer, x)
    assert not torch.equal(before, again.first.weight)


def trained_on(optimizer: kfac_fx.KFAC, x: Tensor) -> float:
    optimizer.zero_grad()
    for part in x.chunk(2):
        loss = F.mse_loss(optimizer.net(part), torch.ones(len(part), 2).to(part)) / 2
        loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.usefixtures("float64")
def test_full_blocks_are_the_fisher_of_the_parts() -> None:
    """2 Jᵀ J over the cases, with J of the real and imaginary parts."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, IN)
    net = kfac_fx.compile(model, (x,), loss="mse", approximations={"*": "full"}, strict=True)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    for key, block in estimator.blocks.items():
        (name,) = key

        def outputs(parts: Tensor, name: str = name) -> Tensor:
            return net.functional({name: torch.view_as_complex(parts)}, (x,), {})[0]

        parts = torch.view_as_real(net.get_parameter(name).detach())
        jacobian = torch.autograd.functional.jacobian(outputs, parts).flatten(2).flatten(0, 1)
        vector = torch.randn_like(parts)
        wanted = (jacobian.T @ (jacobian @ vector.flatten()) / CASES_OF_LAYERS).view_as(parts)
        torch.testing.assert_close(block.multiply_matpower({name: vector}, 1.0)[name] - 1e-3 * vector, wanted)


CASES_OF_LAYERS = 8  # times the number of outputs, 2, whose mean the loss has, over the second derivative, 2


@pytest.mark.usefixtures("float64")
def test_vectors_are_of_complex_numbers_or_of_their_parts() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, IN)
    net = kfac_fx.compile(model, (x,), loss="mse")
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="exact")
    estimator.update_covariances(x)
    estimator.update_inverses()
    numbers = {name: torch.randn_like(p) for name, p in net.named_parameters() if p.requires_grad}
    parts = {name: torch.view_as_real(value) for name, value in numbers.items()}
    spectrum, product = estimator.spectrum(), net.fisher_product(x)
    places = {name: p.detach() / 2 for name, p in net.named_parameters()}
    real_places = {name: torch.view_as_real(p) for name, p in places.items()}
    torch.testing.assert_close(net.functional(places, (x,), {})[0], net.functional(real_places, (x,), {})[0])
    for of in (
        estimator.multiply_inverse,
        spectrum.multiply_inverse,
        product,
        lambda v: spectrum.solve(v, product, tolerance=1e-10).vector,
    ):
        found, wanted = of(numbers), of(parts)
        for name in numbers:
            assert found[name].shape == numbers[name].shape
            torch.testing.assert_close(torch.view_as_real(found[name]), wanted[name])
    y = torch.ones(8, 2)
    scores = spectrum.precondition((x, y)).scores((x, y))
    gradients = [torch.autograd.grad(F.mse_loss(model(x[n : n + 1]), y[:1]), list(trainable(model))) for n in range(8)]
    by_name = [dict(zip(numbers, gradient, strict=True)) for gradient in gradients]
    turned = [spectrum.multiply_inverse({n: g.resolve_conj() for n, g in of.items()}) for of in by_name]
    inner = [[sum(float((a[n].conj() * b[n]).real.sum()) for n in numbers) for b in by_name] for a in turned]
    torch.testing.assert_close(scores, torch.tensor(inner))
    with pytest.raises(NotRegisteredError, match=r"table is \[3, 5\], the parameter \[3, 5, 2\]") as error:
        estimator.multiply_inverse({name: value.real for name, value in numbers.items()})
    text = "Of a complex parameter, pass complex numbers, or their real and imaginary parts, [..., 2]."
    assert str(error.value).splitlines()[-1] == text


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_a_weight_and_its_bias_have_a_block_each_and_the_report_says_why() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(4, 3, dtype=COMPLEX), Modulus()), (torch.randn(5, 4, dtype=COMPLEX),))
    assert [(r.parameters, r.reason) for r in net.registrations] == [
        ((name,), "of complex numbers: a weight and its bias have a block each") for name in ("0.weight", "0.bias")
    ]
    assert [row.factors_text for row in net.report.rows] == ["A 8 x 8, G 3 x 3", "A 1 x 1, G 6 x 6"]


class Modulus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


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
    model, x = Complex(), torch.randn(CASES, MODES, IN, dtype=COMPLEX)
    twin, targets = Real(torch.view_as_real(model.weight.detach()).clone()), torch.randn(CASES, 2, MODES, OUT)
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
    net = kfac_fx.compile(Operator(), (x,), loss="mse", strict=True)
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
    "phases": (lambda: Real(lambda x, p: (x.mT * torch.exp(1j * p)).real, (IN,)), "full"),
    "imaginary": (lambda: Real(lambda x, p: (x.mT * (1j * p)).abs(), (IN,)), "full"),
    "turned": (lambda: Real(lambda x, p: (x.mT * (torch.tensor(2j) * p)).imag, (IN,)), "full"),
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


@pytest.mark.parametrize("example", [False, True], ids=["symbolic", "exported"])
def test_real_parameters_of_complex_functions_train(example: bool) -> None:
    """torch.autograd.grad refuses a complex derivative with a raw error, at the first recording."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(IN, OUT), Real(lambda x, p, c: (x * torch.exp(1j * p) * (1j * c)).imag, (OUT,), (OUT,))
    )
    x, losses = torch.randn(CASES, IN), list[float]()
    net = kfac_fx.compile(model, (x,) if example else None, loss="mse")
    optimizer = kfac_fx.KFAC(net)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), x[:, :1].sin().expand(-1, OUT))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


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
