"""The momentum type "eigen_moments": against SOAP, against corrected spectra, and against the formulas of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.bases import EPSILON, Means, basis_of, eigenvalues_of, in_new_basis, means_of, update_bases
from kfac_fx.optim.checks import Check
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules import EigenMoments
from kfac_fx.optim.rules.eigen_moments import step_in_bases
from kfac_fx.passes.errors import ApproximationError
from tests.runtime.multiplier import Multiplier

TRUE, FALSE = torch.tensor(True), torch.tensor(False)
MOMENTUM = torch.tensor(0.9, dtype=torch.float64)


def gradients(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def estimator(model: nn.Module, **approximations: str) -> FisherEstimator:
    net = compile(model.double(), loss="mse", approximations=approximations)
    fisher = FisherEstimator(net, exps=(), estimation_mode="exact")
    fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
    return fisher


def update_of(fisher: FisherEstimator, *arguments: Any) -> dict[str, Tensor]:
    return step_in_bases(fisher, Means.of(fisher), *arguments)


# --- SOAP ----------------------------------------------------------------------------------------------------------


def soap(of_steps: Sequence[Tensor], first: Tensor, beta: float = 0.95) -> list[Tensor]:
    """The updates of SOAP (Vyas et al. 2024, algorithm 3) in the bases of a first gradient, which makes no step."""
    left, right = torch.linalg.eigh(first @ first.T)[1], torch.linalg.eigh(first.T @ first)[1]
    m, v, updates = torch.zeros_like(first), torch.zeros_like(first), []
    for t, gradient in enumerate(of_steps, start=1):
        m = beta * m + (1 - beta) * gradient
        v = beta * v + (1 - beta) * (left.T @ gradient @ right) ** 2
        step_size = (1 - beta**t) ** 0.5 / (1 - beta**t)
        updates.append(step_size * left @ ((left.T @ m @ right) / (v.sqrt() + 1e-8)) @ right.T)
    return updates


def with_factors_of(first: Tensor) -> FisherEstimator:
    """G Gᵀ of a gradient instead of the factor G, and Gᵀ G in that of A."""
    fisher = estimator(nn.Linear(first.shape[1], first.shape[0], bias=False))
    (block,) = fisher.blocks.values()
    moments = {"count": torch.ones(()), "A": (first.T @ first).unsqueeze(0), "G": (first @ first.T).unsqueeze(0)}
    block.update(moments, 1, decay=0.95)
    update_bases(fisher, carried=in_new_basis)
    return fisher


def updates_with_factors_of(first: Tensor, of_steps: Sequence[Tensor], beta: float = 0.95) -> list[Tensor]:
    fisher, momentum = with_factors_of(first), {"weight": torch.tensor(beta, dtype=first.dtype)}
    return [
        update_of(fisher, {"weight": gradient}, momentum, beta, 0.0, FALSE, TRUE)["weight"] for gradient in of_steps
    ]


@pytest.mark.parametrize("shape", [(4, 4), (5, 3)])
def test_with_factors_of_gradients_it_is_soap(shape: tuple[int, int]) -> None:
    first, *of_steps = gradients(7, *shape)
    for ours, soaps in zip(updates_with_factors_of(first, of_steps), soap(of_steps, first), strict=True):
        torch.testing.assert_close(ours, soaps, rtol=1e-5, atol=1e-5)


def test_with_factors_of_gradients_it_is_soap_as_published() -> None:
    """The package takes no step with the first gradient, of which it makes the bases."""
    package = pytest.importorskip("pytorch_optimizer")
    first, *of_steps = gradients(7, 4, 4)
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = package.SOAP([parameter], lr=1.0, weight_decay=0.0, precondition_frequency=1000)
    parameter.grad = first
    optimizer.step()
    assert not parameter.any()
    for gradient, update in zip(of_steps, updates_with_factors_of(first, of_steps), strict=True):
        before, parameter.grad = parameter.detach().clone(), gradient
        optimizer.step()
        torch.testing.assert_close(before - parameter.detach(), update, rtol=1e-5, atol=1e-5)


# --- the second moments --------------------------------------------------------------------------------------------


class Several(nn.Module):
    """Layers of equal shape, a generic parameter and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.steps = nn.LayerNorm(4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.first(x))) + torch.cumsum(self.steps, 0)
        z: Tensor = self.last(torch.tanh(self.second(y)))
        return z


def data(number: int = 0, cases: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(cases, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(cases, 2, generator=generator, dtype=torch.float64)


def of_cases(net: CompiledModule, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of single cases."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(net.model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    found: dict[str, Tensor] = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    return found


@pytest.mark.parametrize(
    "approximations", [{}, {"second": "diagonal"}, {"second": "full"}, {"second": "kron_in_diag"}], ids=str
)
def test_in_a_frozen_basis_the_second_moments_are_those_of_a_corrected_spectrum(approximations: dict[str, str]) -> None:
    torch.manual_seed(0)
    fisher = estimator(Several(), **approximations)
    x, y = data()
    fisher.update_covariances(x)
    update_bases(fisher, carried=in_new_basis)
    net: Any = fisher.net
    every = of_cases(net, x, y)
    for case in range(len(x)):
        gradient = {name: tensor[case] for name, tensor in every.items()}
        update_of(fisher, gradient, {"last.weight": MOMENTUM}, 1.0, 0.0, TRUE, TRUE)  # the mean of all
    corrected = fisher.spectrum().corrected([every])
    for group, system in zip(fisher.groups, corrected.systems, strict=True):
        torch.testing.assert_close(means_of(group)[1].value, system.values)


def dense_basis(fisher: FisherEstimator) -> Tensor:
    """Q of the only block, for flattened [o, i]."""
    left, right = (operator[0, 0] for operator in basis_of(fisher.groups[0]))
    return torch.kron(left, right)


def test_a_new_basis_takes_the_mean_and_the_diagonal_of_the_second_moments_with_it() -> None:
    first, *of_steps, last = gradients(5, 4, 3)
    fisher = with_factors_of(first)
    for gradient in of_steps:
        update_of(fisher, {"weight": gradient}, {"weight": MOMENTUM}, 0.95, 0.0, TRUE, TRUE)
    (group,) = fisher.groups
    old, (m, v) = dense_basis(fisher), [mean.value.flatten() for mean in means_of(group)]
    weights = [0.9**age for age in (2, 1, 0)]
    expected = sum(weight * gradient for weight, gradient in zip(weights, of_steps, strict=True)) / sum(weights)
    torch.testing.assert_close(old @ m, expected.flatten())  # type: ignore[union-attr]
    (block,) = fisher.blocks.values()
    moments = {"count": torch.ones(()), "A": (last.T @ last).unsqueeze(0), "G": (last @ last.T).unsqueeze(0)}
    block.update(moments, 1, decay=0.0)
    update_bases(fisher, carried=in_new_basis)
    new = dense_basis(fisher)
    turned = (new.T @ old @ torch.diag(v) @ old.T @ new).diagonal()
    assert not torch.allclose(old.abs(), new.abs())
    average, squares = means_of(group)
    torch.testing.assert_close(new @ average.value.flatten(), old @ m)
    torch.testing.assert_close(squares.value.flatten(), turned)


def test_factors_that_are_not_finite_leave_the_basis_as_it_was() -> None:
    first, gradient = gradients(2, 4, 3)
    fisher = with_factors_of(first)
    update_of(fisher, {"weight": gradient}, {"weight": MOMENTUM}, 0.95, 0.0, TRUE, TRUE)
    (group,) = fisher.groups
    before = {name: tensor.clone() for name, tensor in group.extras.items()}
    group.factors["A"].moment.fill_(torch.nan)
    update_bases(fisher, carried=in_new_basis)
    for name, tensor in group.extras.items():
        assert torch.equal(tensor, before[name]), name


def test_one_group_of_a_convolution_that_is_not_finite_leaves_the_basis_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 2))
    fisher = estimator(model)
    fisher.update_covariances(torch.randn(5, 4, 3, 3, dtype=torch.float64))
    update_bases(fisher, carried=in_new_basis)
    group = fisher.blocks["0.weight", "0.bias"].group
    before = {name: tensor.clone() for name, tensor in group.extras.items()}
    assert group.factors["G"].moment.shape[:2] == (1, 2)
    group.factors["G"].moment[0, 0] = torch.nan
    update_bases(fisher, carried=in_new_basis)
    assert all(torch.equal(tensor, before[name]) for name, tensor in group.extras.items())


# --- the eigenvalues -----------------------------------------------------------------------------------------------


def relative(side: Tensor, damping: float) -> Tensor:
    """The eigenvalues of a matrix, divided by their damping, and 1."""
    values = torch.linalg.eigvalsh(side)
    return values / (damping * values.mean()) + 1


@pytest.mark.parametrize("dense_limit", [4096, 4], ids=["dense", "diagonal blocks"])
def test_eigenvalues_are_those_of_the_sides_divided_by_their_damping(dense_limit: int) -> None:
    """A wide side has diagonal blocks, and one damping for all of them."""
    torch.manual_seed(0)
    net = compile(
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 2)).double(), loss="mse", dense_limit=dense_limit
    )
    fisher = FisherEstimator(net, exps=(), estimation_mode="exact")
    fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
    fisher.update_covariances(torch.randn(9, 4, dtype=torch.float64))
    update_bases(fisher, carried=in_new_basis)
    block = fisher.blocks[("0.weight",)]
    outputs, inputs = (tensor.flatten() for tensor in eigenvalues_of(block.group))
    sides = {name: block.factors[name].value for name in "AG"}
    widths = {"A": 4, "G": 5}  # the last block is filled up
    moments = {
        name: torch.block_diag(*side.reshape(-1, *side.shape[-2:]))[: widths[name], : widths[name]]
        for name, side in sides.items()
    }
    assert (moments["G"] == 0).any() == (dense_limit == 4)
    torch.testing.assert_close(outputs.sort().values, relative(moments["G"], 0.01))
    torch.testing.assert_close(inputs.sort().values, relative(moments["A"], 0.01))


def test_a_block_without_any_gradient_has_eigenvalues_of_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -1e3)  # type: ignore[arg-type]
    fisher = estimator(model)
    fisher.update_covariances(data()[0])
    update_bases(fisher, carried=in_new_basis)
    assert all((tensor == 1).all() for tensor in eigenvalues_of(fisher.blocks["0.weight", "0.bias"].group)[:1])
    zeros = {name: torch.zeros_like(parameter) for name, parameter in fisher.net.named_parameters()}  # type: ignore[attr-defined]
    step = update_of(fisher, zeros, dict.fromkeys(zeros, MOMENTUM), 0.9, 0.5, TRUE, TRUE)
    assert all(not tensor.any() for tensor in step.values())


# --- whole steps ---------------------------------------------------------------------------------------------------


def two_layers() -> CompiledModule:
    torch.manual_seed(0)
    return compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), loss="mse")


def optimizer(net: CompiledModule, **options: Any) -> KFAC:
    defaults = {
        "lr": 0.5,
        "momentum_type": "eigen_moments",
        "norm_constraint": 1e30,
        "damping_adaptation_interval": 4,
        "cov_update_every": 1,
        "estimation_mode": "empirical",
        "invert_every": 3,
    }
    return KFAC(net, **{**defaults, **options})


def made(**options: Any) -> tuple[CompiledModule, KFAC]:
    net = two_layers()
    return net, optimizer(net, **options)


def step(net: CompiledModule, opt: KFAC, number: int) -> None:
    x, y = data(number)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    along = Check.along

    def noted(check: Check, flat: FlatParameters, move: Tensor) -> Any:
        result = along(check, flat, move)
        BEST[:] = [-float(result[1] / result[0])]
        return result

    with mock.patch.object(Check, "along", noted):
        opt.step()


BEST: list[float] = []  # the best length for the batch of the last check, in steps


class Slow:
    """The same from the formulas, with dense matrices, for two layers."""

    def __init__(
        self,
        net: CompiledModule,
        momentum: tuple[float, float],
        decay: float,
        nesterov: bool = True,
        exponent: float = 0.5,
        damping: float = 0.003,
        bound: float = 1e30,
        interval: int = 4,
    ) -> None:
        """bound: far above the norm of the first step, or far below it. interval: of the checks."""
        self.w = [net.model[n].weight.detach().clone() for n in (0, 2)]  # type: ignore[index, union-attr]
        self.b = [net.model[n].bias.detach().clone() for n in (0, 2)]  # type: ignore[index, union-attr]
        self.m, self.v = [0.0, 0.0], [0.0, 0.0]
        self.a, self.g = [0.0, 0.0], [0.0, 0.0]
        self.q: Any = [None, None]
        self.values: Any = [None, None]
        self.exponent, self.damping = exponent, damping
        self.momentum, self.decay, self.nesterov, self.t = momentum, decay, nesterov, 0
        self.multiplier, self.last = Multiplier(), torch.zeros(sum(map(torch.numel, [*self.w, *self.b])))
        self.bound, self.interval = bound, interval

    def step(self, number: int, opt: KFAC, weight_decay: float = 0.0) -> None:
        """opt: an optimizer after the same step, which knows r and what its check saw."""
        x, y = data(number)
        hidden = torch.tanh(x @ self.w[0].T + self.b[0])
        d1 = 2 * (hidden @ self.w[1].T + self.b[1] - y) / y.numel()
        d0 = (d1 @ self.w[1]) * (1 - hidden**2)
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        self.t += 1
        both, updates = list[Tensor](), list[Tensor]()
        for n, (rows, d) in enumerate([(torch.cat([x, ones], 1), d0), (torch.cat([hidden, ones], 1), d1)]):
            self.a[n], self.g[n] = 0.98 * self.a[n] + rows.T @ rows, 0.98 * self.g[n] + d.T @ d
            if self.t - 1 in (0, 1, 2, 3, 6, 9):
                sides = [torch.linalg.eigh(side) for side in (self.g[n], self.a[n])]
                q = torch.kron(*(vectors for _, vectors in sides))
                self.values[n] = torch.kron(*(values + self.damping * values.mean() for values, _ in sides))
                if self.t > 1:
                    self.v[n] = (q.T @ self.q[n] @ torch.diag(self.v[n]) @ self.q[n].T @ q).diagonal()
                self.q[n] = q
            gradient = (d.T @ rows).flatten()
            momentum = self.momentum[n]
            self.m[n] = momentum * self.m[n] + (1 - momentum) * gradient
            self.v[n] = self.decay * self.v[n] + (1 - self.decay) * (self.q[n].T @ gradient) ** 2
            root = (self.v[n] / (1 - self.decay**self.t)) ** 0.5
            mean = self.m[n] / (1 - momentum**self.t)
            if self.nesterov:
                mean = momentum * mean + (1 - momentum) * gradient
            turned, divisor = self.q[n].T @ mean, root + EPSILON
            adam = turned / divisor
            direction = turned / (divisor ** (1 - self.exponent) * self.values[n] ** self.exponent)
            both.append(gradient)
            updates.append(self.q[n] @ direction * adam.norm() / direction.norm())
        rate = 0.01 * self.multiplier_of_step(torch.cat(both), opt) / opt._step_state.checks.size.ratio
        if self.checks:
            self.multiplier.checked(float(opt.rho * opt.predicted_change), float(opt.predicted_change))
        moves = []
        for n, flat in enumerate(updates):
            parameters = torch.cat([self.w[n], self.b[n].unsqueeze(1)], 1)
            moves.append(flat.view_as(parameters) + weight_decay * parameters)
            self.w[n], self.b[n] = self.w[n] - rate * moves[n][:, :-1], self.b[n] - rate * moves[n][:, -1]
        self.last = torch.cat([move.flatten() for move in moves])

    @property
    def checks(self) -> bool:
        return self.t <= 3 or (self.t - 1) % self.interval == 0

    def multiplier_of_step(self, gradient: Tensor, opt: KFAC) -> float:
        self.multiplier.grow(gradient, self.last, 0.5)
        if self.t == 1:
            self.multiplier.first(1 / self.bound)
        elif self.checks:
            self.multiplier.agreement, self.multiplier.least = (float(opt.scalars[k]) for k in ("agreement", "agreed"))
            self.multiplier.later(1 / self.bound, BEST[0], 0.5)
        return self.multiplier.value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"second_moment_decay": 0.5, "weight_decay": 0.1},
        {"weight_decay": 0.001},
        {"weight_decay": 0.1, "relative_damping": 0.01},
        {"eigenvalue_exponent": 0.0},
        {"eigenvalue_exponent": 1.0, "relative_damping": 0.1},
    ],
    ids=str,
)
def test_steps_are_those_of_the_formulas(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    momentum = options.get("momentum", 0.9)
    exponent, damping = options.get("eigenvalue_exponent", 0.5), options.get("relative_damping", 0.003)
    if "relative_damping" not in options:
        damping = max(damping, options.get("weight_decay", 0.0))
    slow = Slow(net, (momentum, momentum), options.get("second_moment_decay", 0.95), exponent=exponent, damping=damping)
    for number in range(10):
        step(net, opt, number)
        slow.step(number, opt, options.get("weight_decay", 0.0))
        for name, parameter in zip(("w", "b"), (net.model[2].weight, net.model[2].bias), strict=True):
            torch.testing.assert_close(parameter.detach(), getattr(slow, name)[1], rtol=1e-6, atol=1e-8)
    assert opt.skipped == 0


def test_the_damping_of_sides_follows_the_largest_weight_decay_of_the_groups() -> None:
    """Bases that come after a change have the new damping; a `relative_damping` that is given stays."""
    net = two_layers()
    layers = [list(net.model[n].parameters()) for n in (0, 2)]  # type: ignore[index, union-attr]
    opt = optimizer(net, params=[{"params": layers[0], "weight_decay": 0.2}, {"params": layers[1]}])
    step(net, opt, 0)
    assert {group.relative_damping for group in opt.estimator.groups} == {0.2}
    opt.param_groups[1]["weight_decay"] = 0.5
    for number in range(1, 4):
        step(net, opt, number)
    assert {group.relative_damping for group in opt.estimator.groups} == {0.5}
    net, opt = made(weight_decay=0.5, relative_damping=0.01)
    step(net, opt, 0)
    assert {group.relative_damping for group in opt.estimator.groups} == {0.01}


@pytest.mark.parametrize(
    ("batches", "bound", "nesterov"),
    [("others", 1e30, True), ("same", 1e30, False), ("others", 1e-9, False)],
    ids=["noise", "the same batch", "a step at its bound"],
)
def test_momentum_is_nesterovs_where_noise_limits_steps(batches: str, bound: float, nesterov: bool) -> None:
    """The first step has one gradient, so its mean is that gradient either way. Above 1, r is lr ρ if that is more than
    the last r, and the root of the product of both if it is less. Where the bound gives way, r begins anew."""
    net, opt = made(norm_constraint=bound, damping_adaptation_interval=2)
    slow, divisor, decided = Slow(net, (0.9, 0.9), 0.95, nesterov, bound=bound, interval=2), 1.0, []
    for number in range(8):
        of, trust = number if batches == "others" else 0, float(opt.scalars["trust"])
        step(net, opt, of)
        slow.step(of, opt)
        torch.testing.assert_close(net.model[2].weight.detach(), slow.w[1], rtol=1e-6, atol=1e-12)  # type: ignore[index, union-attr]
        if bound < 1 and slow.checks:
            last, divisor = divisor, float(opt._step_state.checks.size.ratio)
            last = 1.0 if opt.scalars["trust"] > trust else last
            slow.nesterov = divisor / last < 0.75
            decided.append(slow.nesterov)
    assert decided.count(False) >= len(decided) - 1


def test_blocks_have_the_momentum_of_their_parameter_group() -> None:
    net = two_layers()
    layers = [list(net.model[n].parameters()) for n in (0, 2)]  # type: ignore[index, union-attr]
    groups = [{"params": layers[0], "momentum": 0.5}, {"params": layers[1], "momentum": torch.tensor(0.8)}]
    opt = optimizer(net, params=groups)
    slow = Slow(net, (0.5, 0.8), 0.95)
    for number in range(6):
        step(net, opt, number)
        slow.step(number, opt)
        for parameters, expected in zip(layers, zip(slow.w, slow.b, strict=True), strict=True):
            torch.testing.assert_close([p.detach() for p in parameters], list(expected), rtol=1e-6, atol=1e-8)


def test_several_momenta_in_a_block_are_refused_with_all_blocks() -> None:
    net = two_layers()
    weights, biases = ([p for p in net.parameters() if p.dim() == dim] for dim in (2, 1))
    opt = optimizer(net, params=[{"params": weights}, {"params": biases, "momentum": 0.5}])
    with pytest.raises(ValueError, match="all parameters of a block have one momentum") as error:
        step(net, opt, 0)
    assert str(error.value) == (
        "momentum_type='eigen_moments' averages the gradient of a Fisher block in the block's eigenbasis, so all "
        "parameters of a block have one momentum. 2 blocks have several:\n"
        "  linear(0.weight, 0.bias)  0.95 of 0.weight, 0.5 of 0.bias\n"
        "  linear(2.weight, 2.bias)  0.95 of 2.weight, 0.5 of 2.bias\n"
        "Give the parameter groups of these parameters the same momentum."
    )
    opt.param_groups[1]["momentum"] = 0.95
    step(net, opt, 0)
    assert opt.skipped == 0


def test_blocks_that_are_unfrozen_leave_the_moments_of_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().requires_grad_(False)
    model[0].requires_grad_(True)
    net = compile(model, loss="mse")
    opt = KFAC(net, lr=5.0, momentum_type="eigen_moments", estimation_mode="empirical", invert_every=100)
    for number in range(6):
        step(net, opt, number)
    (first,) = opt.estimator.blocks.values()
    before = {name: tensor.clone() for name, tensor in first.state().items() if "basis" in name}
    weight = means_of(first.group)[1].total_weight.clone()
    model[2].requires_grad_(True)
    step(net, opt, 6)
    first, new = opt.estimator.blocks.values()
    for name, tensor in before.items():
        assert tensor.any() and torch.equal(first.state()[name], tensor), name
    torch.testing.assert_close(means_of(first.group)[1].total_weight, 0.95 * weight + 1)
    assert means_of(new.group)[1].total_weight == 1


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    net, opt = made()
    for number in range(5):  # the next step makes no bases, and is no check
        step(net, opt, number)
    state = opt.state_dict()["state"]
    before = {(n, name): tensor.clone() for n, values in state.items() for name, tensor in values.items()}
    x, y = data(5)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    next(net.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
    opt.step()
    after = opt.state_dict()["state"]
    changed = {
        name for (n, name), old in before.items() if not torch.equal(old.nan_to_num(), after[n][name].nan_to_num())
    }
    assert changed == {"kfac/counter", "kfac/skipped", "kfac/moved"}
    assert opt.skipped == 1


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_gradient_whose_squares_overflow_moves_nothing_and_is_in_no_mean() -> None:
    net, opt = made()
    for number in range(4):
        step(net, opt, number)
    stacks = [stack for group in opt.estimator.groups for stack in means_of(group)]
    tensors = [*net.parameters(), *(tensor for stack in stacks for tensor in (stack.moment, stack.total_weight))]
    before = [tensor.detach().clone() for tensor in tensors]
    x, y = data(4)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    next(net.parameters()).grad.fill_(1e160)  # type: ignore[union-attr]
    opt.step()
    assert all(map(torch.equal, tensors, before))
    assert opt.skipped == 1
    step(net, opt, 5)
    assert opt.skipped == 1 and not torch.equal(tensors[0], before[0])


def test_blocks_without_a_gradient_stand_still_and_keep_their_second_moments() -> None:
    net, opt = made()
    for number in range(2):
        step(net, opt, number)
    first, last = opt.estimator.blocks.values()
    last_parameters = [parameter.detach().clone() for parameter in net.model[2].parameters()]  # type: ignore[index, union-attr]
    before = [means_of(block.group)[1].total_weight[block.member].clone() for block in (first, last)]
    x, y = data(2)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    for parameter in net.model[2].parameters():  # type: ignore[index, union-attr]
        parameter.grad = None
    opt.step()
    after = [means_of(block.group)[1].total_weight[block.member] for block in (first, last)]
    assert after[0] > before[0] and after[1] == before[1]
    for parameter, old in zip(net.model[2].parameters(), last_parameters, strict=True):  # type: ignore[index, union-attr]
        assert torch.equal(parameter, old)


def test_blocks_without_an_eigenbasis_are_refused_all_at_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.last(self.lstm(x)[0][-1])
            return z

    net = compile(Recurrent(), (torch.randn(5, 6, 3),), loss="mse", approximations={"lstm": "kron_series_1"})
    with pytest.raises(ApproximationError, match=r"no products of A and G:\n  .*lstm(.|\n)*Compile with 'kron'"):
        KFAC(net, lr=0.1, momentum_type="eigen_moments")
