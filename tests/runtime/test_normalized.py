"""Normalized weights, weights without the mean of their filters or times a number of their own: factors and blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import kfac_fx
from kfac_fx.passes.parametrizations import functions
from kfac_fx.passes.parametrizations.parts import Gain
from kfac_fx.recording import proof
from tests.runtime.squares import dense_fisher, recorded
from tests.zoo.reparametrized import StandardizedConv

pytestmark = pytest.mark.usefixtures("float64")


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the sum of squares for the output."""
    return 2 * model(x).detach()  # type: ignore[no-any-return]


def test_factors_of_a_standardized_convolution() -> None:
    """A: patches without their mean; G: gradients times γ / √(var + ε)."""
    torch.manual_seed(0)
    model, x = StandardizedConv(2, 3, 2, gain=True), torch.randn(5, 2, 4, 4)
    gradient = gradient_of(model, x)
    block = recorded(model, x).blocks["weight",]
    assert block.registration.reason is not None and "projection" in block.registration.reason
    patches = F.unfold(x, 2).mT.flatten(0, 1)
    patches = patches - patches.mean(1, keepdim=True)
    torch.testing.assert_close(block.factors["A"].value[0], patches.mT @ patches / len(patches))
    assert model.gain is not None
    scale = 0.3 * model.gain.flatten() / (model.weight.flatten(1).var(1, unbiased=False) + 1e-6).sqrt()
    rows = gradient.flatten(2).mT.flatten(0, 1) * scale.detach()
    torch.testing.assert_close(block.factors["G"].value[0], rows.mT @ rows / len(rows))


def test_factors_of_a_normalized_weight() -> None:
    torch.manual_seed(0)
    model, x = weight_norm(nn.Linear(4, 3)), torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    g, v = (parameters[f"parametrizations.weight.original{n}"] for n in range(2))
    with torch.no_grad():
        g.mul_(1.7)
    gradient = gradient_of(model, x)
    block = recorded(model, x).blocks["parametrizations.weight.original1",]
    torch.testing.assert_close(block.factors["A"].value[0], x.mT @ x / 5)
    rows = gradient * (g.flatten() / v.norm(dim=1)).detach()
    torch.testing.assert_close(block.factors["G"].value[0], rows.mT @ rows / 5)


def test_the_block_is_that_of_the_gradients_but_for_the_projection() -> None:
    """The Fisher of one case without weight sharing, where K-FAC is exact."""
    torch.manual_seed(0)
    model, x = weight_norm(nn.Linear(4, 3)), torch.randn(1, 4)
    v = dict(model.named_parameters())["parametrizations.weight.original1"]
    (gradient,) = torch.autograd.grad((model(x) ** 2).sum(), v)
    u = (v / v.norm(dim=1, keepdim=True)).detach()
    projection = torch.block_diag(*(torch.eye(4) - torch.outer(row, row) for row in u))
    block = recorded(model, x).blocks["parametrizations.weight.original1",].full_fisher_block()
    exact = torch.outer(gradient.flatten(), gradient.flatten())
    torch.testing.assert_close(projection @ block @ projection, exact)
    assert not torch.allclose(block, exact)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_block_of_a_gain_is_the_dense_fisher(groups: int) -> None:
    torch.manual_seed(0)
    model, x = StandardizedConv(4, 6, 2, gain=True, groups=groups), torch.randn(5, 4, 4, 4)
    block = recorded(model, x).blocks["gain",]
    assert block.registration.approximation == "full"
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_the_block_of_a_normalized_weights_length() -> None:
    torch.manual_seed(0)
    model, x = weight_norm(nn.Linear(4, 3)), torch.randn(5, 2, 4)
    block = recorded(model, x).blocks["parametrizations.weight.original0",]
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


OF_CASES = "forward uses a function of it: its block is made of the gradients of whole examples, so not 'kron'"


class Divided(nn.Module):
    """`x · v / σ(v)`, σ perhaps by rows."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.v, self.norm = nn.Parameter(torch.randn(3, 4)), norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.v / self.norm(self.v))


NORMS: list[Callable[[Tensor], Tensor]] = [
    lambda v: torch.linalg.matrix_norm(v, 2),
    lambda v: v.norm(),
    lambda v: v.square().sum(1, keepdim=True),
    lambda v: v.abs().max().expand_as(v),
]


@pytest.mark.parametrize("norm", NORMS)
def test_the_block_of_a_divided_weight_leaves_out_the_change_of_the_number(norm: Callable[[Tensor], Tensor]) -> None:
    """For one case without weight sharing K-FAC is exact but for that: D / σ instead of the gradient."""
    torch.manual_seed(0)
    model, x = Divided(norm), torch.randn(1, 4)
    block = recorded(model, x).blocks["v",]
    assert block.registration.reason is not None and "of rank one" in block.registration.reason
    number = norm(model.v).detach()
    weight = (model.v / number).detach().requires_grad_()
    (gradient,) = torch.autograd.grad((F.linear(x, weight) ** 2).sum(), weight)
    without = (gradient / number).flatten()
    torch.testing.assert_close(block.full_fisher_block(), torch.outer(without, without))


@pytest.mark.parametrize("norm", NORMS)
def test_the_proof_has_the_change_of_the_number(norm: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Divided(norm), (torch.randn(5, 2, 4),), loss="normal")
    recorder = net.captures.first
    assert recorder is not None and not net.registrations[0].generic
    pairs = proof.proof_gradients(proof.with_proof_taps(recorder), (torch.randn(5, 2, 4),)).pairs
    ((_, wanted, got, _),) = pairs
    torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore:.*deprecated in favor of:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_torchs_older_normalizations_are_structured(norm: Callable[[nn.Module], nn.Module]) -> None:
    net = kfac_fx.compile(norm(nn.Linear(4, 3)), (torch.randn(5, 4),), loss="normal", strict=True)
    assert {registration.layer for registration in net.registrations} == {"linear"}


@pytest.mark.parametrize(("own", "approximation"), [(False, "kron"), (True, "full")])
def test_a_number_of_other_parameters_is_a_factor_and_one_of_both_a_function(
    own: bool, approximation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)  # small ones have exact blocks

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.v / (self.w.norm() + self.v.norm() if own else self.w.norm()))

    net = kfac_fx.compile(Mixed(), (torch.randn(5, 4),), loss="normal")
    found = {
        name: (registration.approximation, registration.reason)
        for registration in net.registrations
        for name in registration.parameters
    }
    assert found["v"] == (approximation, OF_CASES if own else None)


@pytest.mark.parametrize("asked", ["full", "diagonal", "kron_sua"])
def test_only_kronecker_products_leave_the_projection_out(asked: str) -> None:
    model = StandardizedConv(2, 3, 2, gain=False)
    net = kfac_fx.compile(model, (torch.randn(5, 2, 4, 4),), loss="normal", approximations={"weight": asked})
    (one,) = (registration for registration in net.registrations if registration.parameters == ("weight",))
    assert one.approximation == "kron" and one.reason is not None and f"so not {asked!r}" in one.reason


def test_a_sloped_weight_may_be_tied_and_transposed() -> None:
    """An autoencoder whose decoder is the encoder's normalized weight transposed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = weight_norm(nn.Linear(4, 3, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.encoder.weight
            return torch.tanh(F.linear(x, weight)) @ weight

    torch.manual_seed(0)
    net = kfac_fx.compile(Tied(), (torch.randn(5, 4),), loss="normal")
    direction, gain = net.registrations
    assert [use.transposed for use in direction.uses].count(True) == 1 and direction.approximation == "kron_indep"
    assert [step.side for use in gain.uses for step in use.through if isinstance(step, Gain)] == ["outputs", "inputs"]


class Everything(nn.Module):
    """Pieces, a gate, a standardized convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = StandardizedConv(2, 3, 2, gain=True)
        self.gate, self.weight = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x).flatten(2)) * torch.sigmoid(self.gate)
        return F.linear(torch.tanh(F.linear(h, self.weight[:4])), self.weight[4:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_a_compiled_graph_records_and_steps_alike() -> None:
    torch.manual_seed(0)
    model, x = Everything(), torch.randn(5, 2, 3, 3)
    steps = []
    for backend in ("eager", "aot_eager"):
        twin = copy.deepcopy(model)
        net = kfac_fx.compile(twin, (x,), loss="normal", backend=backend)
        assert all(not registration.generic for registration in net.registrations)
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            (net(x) ** 2).sum((1, 2)).mean().backward()
            optimizer.step()
        steps.append(dict(twin.named_parameters()))
    torch.testing.assert_close(steps[1], steps[0])


# --- a number of its own ----------------------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]
ALONE = nn.Parameter(torch.randn(3, 1, dtype=torch.float64))


class Behind(nn.Module):
    """`x · f(v)`"""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        self.v, self.function = nn.Parameter(torch.randn(*(shape or (3, 4)), dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        w = self.function(self.v)
        return F.linear(x, w) if w.dim() == 2 else x * w


def centered(v: Tensor) -> Tensor:
    return v - v.mean(1, keepdim=True)


SCALED: list[tuple[Function, Function]] = [  # f, and the number that it multiplies by, or divides by
    (lambda v: centered(v) / (v.std(1, keepdim=True) + 1e-5), lambda v: 1 / (v.std(1, keepdim=True) + 1e-5)),
    (lambda v: v.norm() * centered(v), lambda v: v.norm()),
    (lambda v: v * torch.rsqrt(v.square().sum(1, keepdim=True)), lambda v: v.norm(dim=1, keepdim=True).reciprocal()),
]


@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_block_leaves_out_the_change_of_the_number_alone(case: int) -> None:
    """For one case without weight sharing K-FAC is exact but for that: s C D instead of the gradient."""
    torch.manual_seed(0)
    function, number = SCALED[case]
    model, x = Behind(function), torch.randn(1, 4, dtype=torch.float64)
    block = recorded(model, x, strict=True).blocks["v",]
    assert block.registration.reason is not None and "of rank one" in block.registration.reason
    w = function(model.v).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.linear(x, w).square().sum(), w)
    gradient = gradient * number(model.v).detach()
    without = (gradient if case == 2 else centered(gradient)).flatten()
    torch.testing.assert_close(block.full_fisher_block(), torch.outer(without, without))


@pytest.mark.parametrize("function", [*(scaled for scaled, _ in SCALED), centered])
def test_the_proof_has_the_whole_gradient(function: Function) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Behind(function), (torch.randn(5, 2, 4, dtype=torch.float64),), loss="normal")
    recorder = net.captures.first
    assert recorder is not None and not net.registrations[0].generic
    values = (torch.randn(5, 2, 4, dtype=torch.float64),)
    pairs = proof.proof_gradients(proof.with_proof_taps(recorder), values).pairs
    ((_, wanted, got, _),) = pairs
    torch.testing.assert_close(got, wanted)


def test_a_centered_weight_may_have_any_block() -> None:
    """No part of the gradient is left out there."""
    x = torch.randn(5, 4, dtype=torch.float64)
    for asked in ("full", "diagonal", "kron"):
        net = kfac_fx.compile(Behind(centered), (x,), loss="normal", approximations={"v": asked}, strict=True)
        assert (net.registrations[0].approximation, net.registrations[0].reason) == (asked, None)


OTHERS: list[Function] = [
    lambda v: v - v.mean(0, keepdim=True),  # of inputs
    lambda v: v - v.mean(),
    lambda v: v - v.mean(1),  # [3] against [3, 3]: of other filters
    lambda v: v - 0.5 * v.mean(1, keepdim=True),
    lambda v: torch.sub(v, v.mean(1, keepdim=True), alpha=0.5),
    lambda v: v - v.tanh().mean(1, keepdim=True),
    lambda v: v - v.amax(1, keepdim=True),
    lambda v: v - v.t().reshape(3, -1).mean(1, keepdim=True),
    lambda v: v - ALONE * v.mean(1, keepdim=True),
    lambda v: 2 * v - v.mean(1, keepdim=True),
    lambda v: centered(v).exp(),
    lambda v: centered(centered(v)),
]


NUMBERS: list[Function] = [lambda v: v / (1 + v.abs()), lambda v: v * v.sigmoid(), lambda v: v * v]  # of every element


def behind_other(function: Function) -> tuple[Behind, Tensor]:
    shape = (3, 3) if function is OTHERS[2] else (3, 4)
    return Behind(function, *shape), torch.randn(5, shape[1], dtype=torch.float64)


@pytest.mark.parametrize("function", OTHERS)
def test_what_is_no_mean_of_filters_is_not_taken_for_one(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the matcher alone, without the proof, where the function is too large for its Jacobian."""
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)
    model, x = behind_other(function)
    net = kfac_fx.compile(model, (x,), loss="normal", verify=False)
    assert net.registrations[0].generic


@pytest.mark.parametrize("function", NUMBERS[:2])
@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_a_number_for_every_element_is_no_number_to_leave_out(
    function: Function, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change is as large as what would be kept, as for softsign."""
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)
    net = kfac_fx.compile(Behind(function, *shape), (torch.randn(5, 4, dtype=torch.float64),), loss="normal")
    assert net.registrations[0].generic


@pytest.mark.parametrize("function", [*OTHERS, *NUMBERS])
def test_small_ones_are_exact_by_their_jacobians(function: Function) -> None:
    """No part of them is left out, and the report says why they are no Kronecker products."""
    torch.manual_seed(0)
    model, x = behind_other(function) if function in OTHERS else (Behind(function, 4), torch.randn(5, 4).double())
    block = recorded(model, x).blocks["v",]
    reason = OF_CASES if block.registration.layer == "linear" else None
    assert (block.registration.approximation, block.registration.reason) == ("full", reason)
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))
