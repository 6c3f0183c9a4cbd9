"""Factors of parameters behind functions, from their definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import kfac_fx
from kfac_fx.checks import proof
from kfac_fx.passes.parametrizations.gains import Gain
from tests.runtime.squares import dense_fisher, recorded
from tests.zoo.reparametrized import StandardizedConv

pytestmark = pytest.mark.usefixtures("float64")


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of the sum of squares, for the output."""
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
    """Of one case without weight sharing, where K-FAC is exact."""
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
    """Of one case without weight sharing, where K-FAC is exact but for that: D / σ in the place of the gradient."""
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
    pairs, *_ = proof.gradients(proof.replace_taps(recorder), (torch.randn(5, 2, 4),))
    ((_, wanted, got, _),) = pairs
    torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore:.*deprecated in favor of:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_torchs_older_normalizations_are_structured(norm: Callable[[nn.Module], nn.Module]) -> None:
    net = kfac_fx.compile(norm(nn.Linear(4, 3)), (torch.randn(5, 4),), loss="normal", strict=True)
    assert {one.layer for one in net.registrations} == {"linear"}


@pytest.mark.parametrize(("own", "approximation"), [(False, "kron"), (True, "full")])
def test_a_number_of_other_parameters_is_a_factor_and_one_of_both_a_function(own: bool, approximation: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.v / (self.w.norm() + self.v.norm() if own else self.w.norm()))

    net = kfac_fx.compile(Mixed(), (torch.randn(5, 4),), loss="normal")
    found = {name: (one.approximation, one.reason) for one in net.registrations for name in one.parameters}
    assert found["v"] == (approximation, None)


@pytest.mark.parametrize("asked", ["full", "diagonal", "kron_sua"])
def test_only_kronecker_products_leave_the_projection_out(asked: str) -> None:
    model = StandardizedConv(2, 3, 2, gain=False)
    net = kfac_fx.compile(model, (torch.randn(5, 2, 4, 4),), loss="normal", approximations={"weight": asked})
    (one,) = (one for one in net.registrations if one.parameters == ("weight",))
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
        assert all(not one.generic for one in net.registrations)
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            (net(x) ** 2).sum((1, 2)).mean().backward()
            optimizer.step()
        steps.append(dict(twin.named_parameters()))
    torch.testing.assert_close(steps[1], steps[0])
