"""Parameters behind functions of small tensors, and in several roles: every block is the dense Fisher of autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.parametrizations import functions
from tests.compiler.toy import Toy
from tests.runtime.squares import dense_fisher, recorded
from tests.runtime.test_product_blocks import toy

Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("float64")


def differential(x: Tensor, q: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The λ of the DIFF Transformer (Ye et al. 2024)."""
    first, second = torch.softmax(x, -1), torch.tanh(x)
    return first - ((q * k).sum().exp() - (p * p).sum().exp() + 0.3) * second


def branches(x: Tensor, w: Tensor) -> Tensor:
    share = w.softmax(0)
    return share[0] * x + share[1] * torch.tanh(x) + torch.sin(x) * share[2]


def rotated(x: Tensor, q: Tensor) -> Tensor:
    """By Cayley's map of a skew matrix as a series, written into memory of its own (OFT, Qiu et al. 2023)."""
    rows, columns = torch.triu_indices(4, 4, 1)
    upper = torch.zeros(4, 4)
    upper[rows, columns] = q
    skew = upper - upper.T
    series, power = torch.eye(4), skew
    for _ in range(3):
        series.add_(power, alpha=2.0)
        power = power @ skew
    series[0] *= 2
    return x @ series.add_(power)


def by_frequencies(x: Tensor, s: Tensor) -> Tensor:
    """FourierFT (Gao et al. 2024)."""
    spectrum = torch.zeros(3, 4)
    spectrum[torch.tensor([0, 2, 1]), torch.tensor([1, 0, 3])] = s
    return F.linear(x, torch.fft.ifft2(spectrum).real * 5)


def reflected(x: Tensor, v: Tensor) -> Tensor:
    """By Householder's reflections, whose squared lengths are read off all vectors at once."""
    for vector, square in zip(v, (v**2).sum(1), strict=True):
        x = torch.tanh(x - 2 / square * (x @ vector)[..., None] * vector)
    return x


EXACT: list[tuple[Function, dict[str, tuple[int, ...]], int]] = [
    (differential, {"q": (3,), "k": (3,), "p": (2,)}, 1),
    (branches, {"w": (3,)}, 3),
    (lambda x, g: x * g.softmax(0), {"g": (4,)}, 1),
    (lambda x, g: x * g.cumsum(0) + x[..., :1] * g[:3].sum(), {"g": (4,)}, 2),
    (lambda x, w: F.linear(x, w - 2 * w.mean(1, keepdim=True)), {"w": (3, 4)}, 1),
    (lambda x, a, b: F.linear(x, a * b), {"a": (3, 4), "b": (3, 4)}, 1),
    (lambda x, g: F.linear(x, torch.arange(12.0).view(3, 4), g.softmax(0)), {"g": (3,)}, 1),
    (lambda x, g: F.conv1d(x.mT, g.softmax(2) / 2).mT, {"g": (2, 4, 2)}, 1),
    (lambda x, g: x / g.norm(), {"g": (4,)}, 1),
    # in place
    (rotated, {"q": (6,)}, 1),
    (by_frequencies, {"s": (3,)}, 1),
    # quotients
    (lambda x, g: x / g, {"g": (4,)}, 1),
    (lambda x, g: x / (1 + 2 * g.exp()), {"g": (4,)}, 1),
    (lambda x, g: g / (2 + x.square()), {"g": (4,)}, 1),
    (lambda x, g: torch.tanh(x / g) / g + g, {"g": (4,)}, 3),
    (lambda x, g: torch.outer(x.sum((1, 2)), g), {"g": (4,)}, 1),
    # several roles
    (lambda x, g: torch.tanh(x * g + g), {"g": (4,)}, 2),
    (lambda x, g: torch.tanh(x * g.exp() - g.sin()), {"g": (4,)}, 2),
    (lambda x, g: torch.tanh(x.mT * g.view(2, 2).T.reshape(4, 1)).mT * g, {"g": (4,)}, 2),
    (lambda x, g: x * g.sum() + 3 * g, {"g": (4,)}, 2),
    # of every element of a small matrix, as in monotone networks
    (lambda x, w: F.linear(x, w.exp()), {"w": (3, 4)}, 1),
    (lambda x, w: torch.tanh(x @ F.softplus(w)), {"w": (4, 3)}, 1),
    (lambda x, w: F.linear(x, w.abs()), {"w": (3, 4)}, 1),
    (lambda x, w: F.conv1d(x.mT, w.square(), padding=1).mT, {"w": (4, 4, 3)}, 1),
    # a small matrix that a function reads, too
    (lambda x, w: F.linear(x, w) * w.norm(), {"w": (3, 4)}, 2),
    (lambda x, v: (x @ v).square() - x.square() @ v.square(), {"v": (4, 2)}, 2),  # a factorization machine
    (lambda x, v: x - 2 * (x @ v)[..., None] * v / (v @ v), {"v": (4,)}, 3),  # a reflection
    # a shift by a function of two, alone and next to a scale
    (lambda x, a, b: torch.tanh(x + a.exp() * b), {"a": (4,), "b": (4,)}, 1),
    (lambda x, a, b: torch.tanh(x * (a.exp() * b) + a.exp() * b), {"a": (4,), "b": (4,)}, 2),
    (lambda x, a: torch.tanh(x * (1 + a) + a), {"a": (4,)}, 2),
    (lambda x, a: torch.tanh(x * a + a.exp()), {"a": (4,)}, 2),
    # a shift of zeros for every case
    (lambda x, a: torch.tanh(x.new_zeros(x.shape[0], 1, 4) - a) * x, {"a": (4,)}, 1),
    # pieces next to a function of the whole
    (reflected, {"v": (2, 4)}, 6),
    (lambda x, w: torch.tanh(x * w[0]) @ w.softmax(1).mT, {"w": (2, 4)}, 2),
]


@pytest.mark.parametrize(("function", "shapes", "uses"), EXACT)
def test_every_block_is_the_dense_fisher(function: Function, shapes: Any, uses: int) -> None:
    model, x = toy(function, **shapes), torch.randn(5, 3, 4)
    blocks = recorded(model, x).blocks
    assert set(blocks) == {(name,) for name in shapes}
    for block in blocks.values():
        assert block.registration.approximation == "full" and len(block.registration.uses) == uses
        torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_a_bias_that_scales_too_leaves_its_weight_and_is_exact() -> None:
    model, x = toy(lambda x, w, b: F.linear(x, w, b.exp()) * b, w=(4, 4), b=(4,)), torch.randn(5, 3, 4)
    block = recorded(model, x).blocks["b",]
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_pieces_behind_a_function_of_every_element_are_exact() -> None:
    """EfficientViM's gates: one parameter, a row for every place."""

    def gated(x: Tensor, g: Tensor) -> Tensor:
        gates = torch.sigmoid(2 * g)
        return torch.tanh(x * gates[0]) * gates[1] + x * gates[0]

    model, x = toy(gated, g=(2, 4)), torch.randn(5, 3, 4)
    blocks = recorded(model, x).blocks
    gradients = [torch.autograd.grad((model(case[None]) ** 2).sum(), model.get_parameter("g"))[0] for case in x]
    for n, uses in ((0, 2), (1, 1)):
        block = blocks[f"g[{n}:{n + 1}]",]
        wanted = torch.stack([torch.outer(gradient[n], gradient[n]) for gradient in gradients]).mean(0)
        assert len(block.registration.uses) == uses
        torch.testing.assert_close(block.full_fisher_block(), wanted)


def test_the_jacobian_is_that_of_the_moment() -> None:
    """The Jacobian of parameters and buffers as they are when a batch is recorded, not when it was captured."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.register_buffer("base", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.softmax(self.w * self.get_buffer("base"), 0).square().sum()

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(5, 3)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    with torch.no_grad():
        model.w.mul_(-2)
        model.get_buffer("base").copy_(torch.tensor([1.0, 2.0, 3.0]))
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=torch.zeros_like(x))
    gradients = [torch.autograd.grad((model(case[None]) ** 2).sum(), model.w)[0] for case in x]
    wanted = torch.stack([torch.outer(gradient, gradient) for gradient in gradients]).mean(0)
    torch.testing.assert_close(estimator.blocks["w",].full_fisher_block(), wanted)


def test_hooks_on_saved_tensors_are_no_matter() -> None:
    """Those of the user's, as of activations that are kept on another device, and those of the exact Fisher."""
    model, x = toy(branches, w=(3,)), torch.randn(5, 4)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    with torch.autograd.graph.save_on_cpu():
        estimator.update_covariances(x)
    block = estimator.blocks["w",]
    jacobians_of_cases = [torch.func.jacrev(lambda w, c=case: branches(c, w))(model.get_parameter("w")) for case in x]
    wanted = torch.stack([2 * j.mT @ j for j in jacobians_of_cases]).mean(0)  # of the loss |target - mean|²
    torch.testing.assert_close(block.full_fisher_block(), wanted)


def reasons(function: Function, **shapes: tuple[int, ...]) -> dict[str, str | None]:
    net = kfac_fx.compile(toy(function, **shapes), (torch.rand(5, 4),), loss="normal")
    return {
        name: registration.reason
        for registration in net.registrations
        if registration.generic
        for name in registration.parameters
    }


def test_large_functions_are_generic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 15)
    (reason,) = reasons(lambda x, g: x * g.softmax(0), g=(4,)).values()
    assert reason is not None and "no layer has the form of mul" in reason
    assert reason.endswith("its Jacobian by g would have 16 elements, which is more than 15")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: x * F.dropout(g.softmax(0), 0.5, True),
        lambda x, g: x * (g * x.shape[0]).softmax(0),
        lambda x, g: torch.hypot(x, g.softmax(0)),
        lambda x, g: g.softmax(0) ** x,
    ],
)
def test_random_numbers_sizes_of_the_batch_and_bases_of_powers_are_generic(function: Function) -> None:
    (reason,) = reasons(function, g=(4,)).values()
    assert reason is not None and "no layer has the form of" in reason


def test_what_is_written_into_a_buffer_on_the_way_is_generic() -> None:
    """A second run of the function would write it again."""

    class Fading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.randn(4))
            self.register_buffer("share", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.g * self.get_buffer("share").mul_(0.9)).softmax(0)

    net = kfac_fx.compile(Fading(), (torch.randn(5, 4),), loss="normal")
    (one,) = net.registrations
    assert one.generic and "no layer has the form of mul" in str(one.reason)


def test_a_weight_that_a_function_reads_too_is_generic_with_both_uses_in_the_reason() -> None:
    model = toy(lambda x, w: F.linear(x, w) * w.norm(), w=(300, 4))  # too large for a block of its elements
    net = kfac_fx.compile(model, (torch.randn(5, 4),), loss="normal")
    (one,) = net.registrations
    assert one.generic and "w has 2 uses, 1 of them matched" in str(one.reason)
    assert ["a matrix elsewhere" in note.reason for note in net.program.dropped] == [True]


def test_a_parameter_in_a_function_and_in_the_layer_it_enters_is_generic() -> None:
    assert set(reasons(lambda x, w, b: F.linear(x, w, w.sum(1) * b), w=(3, 4), b=(3,))) == {"w", "b"}


def test_what_is_free_of_the_batch_has_no_gradient_of_a_case() -> None:
    def table(x: Tensor, t: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return x @ (F.layer_norm(t, (4,), w) * g.softmax(0)).T

    net = kfac_fx.compile(toy(table, t=(3, 4), w=(4,), g=(4,)), (torch.randn(5, 4),), loss="normal")
    (one,) = (registration for registration in net.registrations if registration.parameters == ("g",))
    assert one.approximation == "kron" and "summed over cases" in str(one.reason) and not one.generic


def test_padding_does_not_go_with_gradients_of_cases() -> None:
    model = toy(lambda x, mask, g: x * g.softmax(0), g=(4,))
    x, mask = torch.randn(5, 3, 4), torch.ones(5, 3)
    with pytest.raises(kfac_fx.RegistrationError, match="its rows are gradients of whole cases"):
        kfac_fx.compile(Masked(model), (x, mask), loss="normal", padding_mask="mask")


class Masked(nn.Module):
    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.model.function(x, mask, self.model.get_parameter("g"))
        return y


def test_the_quadratic_model_goes_through() -> None:
    model, x = toy(differential, q=(3,), k=(3,), p=(2,)), torch.randn(5, 3, 4)
    net = kfac_fx.compile(model, (x,), loss="normal")
    optimizer = kfac_fx.KFAC(net, damping=0.1, momentum=None, momentum_type="qmodel", seed=0)
    before = copy.deepcopy(dict(model.named_parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        loss = (net(x) ** 2).sum((1, 2)).mean()
        loss.backward()
        optimizer.step(evaluate=lambda: (net(x) ** 2).sum((1, 2)).mean())
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.parametrize(
    ("function", "shapes"), [(differential, {"q": (3,), "k": (3,), "p": (2,)}), (rotated, {"q": (6,)})]
)
def test_a_compiled_graph_records_alike(function: Function, shapes: Any) -> None:
    model, x = toy(function, **shapes), torch.randn(5, 3, 4)
    found = []
    for backend in ("eager", "aot_eager"):
        net = kfac_fx.compile(copy.deepcopy(model), (x,), loss="normal", backend=backend)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
        estimator.update_covariances(x, targets=torch.zeros_like(x))
        found.append([block.full_fisher_block() for block in estimator.blocks.values()])
    torch.testing.assert_close(found[1], found[0])


def test_a_collection_takes_its_functions_to_every_capture() -> None:
    """With the model in evaluation, and back, the graphs are others."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate, self.dropout = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.dropout(self.linear(x)) * self.gate.softmax(0)
            return y

    model, x = Gated(), torch.randn(5, 4)
    captured = kfac_fx.capture(model, (x,))
    lc = kfac_fx.LayerCollection(captured)
    lc.register_normal_predictive_distribution("mul")
    lc.auto_register_layers()
    net = kfac_fx.compile(lc)
    for training in (True, False):
        net.train(training)
        assert {("gate",), ("linear.weight", "linear.bias")} == set(net.record((x,), {}).statistics)


def test_the_gradients_of_cases_of_ids_are_those_of_one_hot_rows() -> None:
    """The id -1 is no row."""
    ids, d = torch.tensor([[0, 2, 2], [1, -1, 0]]), torch.randn(2, 3, 4)
    hot = F.one_hot(ids.clamp(min=0), 5).double() * (ids >= 0).unsqueeze(-1)
    torch.testing.assert_close(functions.of_cases(ids, d, 5), functions.of_cases(hot, d, 5))
    torch.testing.assert_close(functions.of_cases(ids, d, 5), torch.einsum("nso,nsi->noi", d, hot).unsqueeze(1))


def test_gradient_rows_have_groups_and_are_float32_at_least() -> None:
    for shape in ((2, 3, 4), (2, 3, 1, 4)):
        rows = functions.with_groups(torch.ones(shape, dtype=torch.bfloat16))
        assert rows.shape == (2, 3, 1, 4) and rows.dtype is torch.float32


class LongFilter(nn.Module):
    """A filter that is as long as the inputs, as of a state space."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.rate, self.gain, self.length = nn.Parameter(torch.rand(3)), nn.Parameter(torch.randn(3)), length

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.length is None else x.reshape(len(x), 3, self.length)
        steps = torch.arange(x.shape[-1])
        spectrum = torch.fft.rfft(self.gain[:, None] * torch.exp(-self.rate[:, None] * steps))
        return torch.fft.irfft(torch.fft.rfft(x) * spectrum, n=x.shape[-1])


def test_a_function_with_a_size_of_the_inputs_says_how_to_fix_the_size() -> None:
    x = torch.randn(5, 3, 8)
    varying, fixed = (kfac_fx.compile(LongFilter(length), (x,), loss="mse") for length in (None, 8))
    assert not any(registration.generic for registration in fixed.registrations)
    for registration in varying.registrations:
        assert registration.generic and registration.reason is not None
        assert registration.reason.endswith(
            ": what enters is a function of parameters, and has a size of the inputs, which may vary. If it does not, "
            "fix it in forward, as in x = x.reshape(len(x), 128, 64) for inputs of 128 positions: the block is exact "
            "where it is small"
        )
