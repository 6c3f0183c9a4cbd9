"""Every estimation mode against the Fisher differentiated case by case, which knows nothing of graphs and factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import kfac_fx
from kfac_fx import losses
from kfac_fx.fisher.block import BlockOperator
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.recording import recorder
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")

Losses = Callable[[Any], list[tuple[float, LossFunction]]]
MONTE_CARLO = ("gradients", "curvature_prop", "curvature_prop_GGN")


class Heads(nn.Module):
    """A convolution, a normalization, a shared layer, parameters of no layer, one of them a number, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(2, 3, 2), nn.LayerNorm(3), nn.Linear(3, 3)
        self.odd, self.heat = nn.Parameter(torch.rand(3)), nn.Parameter(torch.zeros(()))
        self.classes, self.values = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.conv(x).mean(-1))
        h = torch.atan2(torch.tanh(self.fc(torch.tanh(self.fc(h)))), 1 + self.odd)
        h = torch.hypot(h, 1 + self.heat)
        return self.classes(h), self.values(h)


def two_losses(outputs: Any) -> list[tuple[float, LossFunction]]:
    return [(0.5, losses.Categorical(outputs[0])), (2.0, losses.Normal(outputs[1], var=0.3))]


def one_loss(kind: Callable[[Tensor], LossFunction], coefficient: float = 1.0) -> Losses:
    return lambda outputs: [(coefficient, kind(outputs[0]))]


def variance(outputs: Any) -> list[tuple[float, LossFunction]]:
    return [(1.5, losses.NormalMeanVariance(outputs[0], outputs[0].square() + 0.5))]


LOSSES: dict[str, Losses] = {
    "two": two_losses,
    "categorical": one_loss(losses.Categorical, 3.0),
    "onehot": one_loss(losses.OnehotCategorical),
    "bernoulli": one_loss(losses.MultiBernoulli, 0.25),
    "normal": one_loss(losses.Normal),
    "one number": lambda outputs: [(2.0, losses.Normal(outputs[1][:, 0]))],
    "mean and variance": variance,
    "mean and variance of one number": lambda outputs: [
        (1.0, losses.NormalMeanVariance(outputs[1][:, 0], outputs[1][:, 1].exp()))
    ],
}


def dense_fisher(model: nn.Module, x: Tensor, make: Losses, blocks: dict[Any, BlockOperator]) -> dict[Any, Tensor]:
    """(1/N) Σ_n J_nᵀ F_n J_n of every block, one case at a time, with F_n from the definition, E[∇ log p ∇ log pᵀ]."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    total: dict[Any, Tensor] = {}
    for n in range(len(x)):
        for number in range(len(make(model(x[:1])))):

            def inputs(at: dict[str, Tensor], n: int = n, number: int = number) -> Tensor:
                return make(functional_call(model, at, (x[n : n + 1],)))[number][1].inputs.flatten()

            jacobian: dict[str, Tensor] = torch.func.jacrev(inputs)(parameters)  # type: ignore[assignment]
            coefficient, loss = make(model(x[n : n + 1]))[number]
            fisher = coefficient * output_fisher(loss)
            for key, block in blocks.items():
                form = block.group.forms[block.member.start]
                j = torch.stack([form.pack({k: jacobian[k][row] for k in key}).flatten() for row in range(len(fisher))])
                total[key] = total.get(key, 0) + j.mT @ fisher @ j / len(x)
    return total


def output_fisher(loss: LossFunction) -> Tensor:
    z = loss.inputs.detach().flatten()
    if isinstance(loss, losses.Categorical):
        p = z.softmax(0)
        return torch.diag(p) - torch.outer(p, p)
    if isinstance(loss, losses.MultiBernoulli):
        return torch.diag(z.sigmoid() * (1 - z.sigmoid()))
    if isinstance(loss, losses.Normal):
        return torch.eye(len(z)) / loss.var
    v = z[len(z) // 2 :]
    return torch.diag(torch.cat([1 / v, 1 / (2 * v**2)]))


def case() -> tuple[Heads, Tensor]:
    torch.manual_seed(0)
    return Heads(), torch.randn(4, 2, 5)


def estimator(model: nn.Module, x: Tensor, make: Losses, approximation: str, mode: str, **more: Any) -> Any:
    inputs = (x,) if isinstance(model, Guarded) else None  # torch.fx traces the others in a fifth of the time
    net = kfac_fx.compile(model, inputs, loss=make, approximations={"*": approximation})
    return kfac_fx.FisherEstimator(net, estimation_mode=mode, **more)


@pairs(("approximation", ["full", "diagonal"]), ("name", list(LOSSES)))
def test_exact_is_the_dense_fisher_in_every_block(name: str, approximation: str) -> None:
    """Also of generic parameters, whose sources are coordinates of single cases."""
    model, x = case()
    est = estimator(model, x, LOSSES[name], approximation, "exact")
    est.update_covariances(x)
    dense = dense_fisher(model, x, LOSSES[name], est.blocks)
    assert any(block.registration.generic for block in est.blocks.values())
    for key, block in est.blocks.items():
        found, expected = block.full_fisher_block(), dense[key]
        torch.testing.assert_close(found, expected if approximation == "full" else torch.diag(expected.diagonal()))


@pytest.mark.parametrize("name", [name for name in LOSSES if "variance" not in name])
def test_the_gauss_newton_matrix_is_the_fisher_for_natural_parameters(name: str) -> None:
    model, x = case()
    one, other = (estimator(model, x, LOSSES[name], "kron", mode) for mode in ("exact", "exact_GGN"))
    for est in (one, other):
        est.update_covariances(x)
    assert_same(one, other)


def assert_same(one: Any, other: Any) -> None:
    for key, block in one.blocks.items():
        for name, factor in block.factors.items():
            torch.testing.assert_close(other.blocks[key].factors[name].moment, factor.moment)


@pytest.mark.parametrize("mode", ["exact_GGN", "curvature_prop_GGN"])
def test_a_distribution_without_natural_parameters_has_no_gauss_newton_modes(mode: str) -> None:
    model, x = case()
    with pytest.raises(kfac_fx.LossError, match="NormalMeanVariance has no generalized Gauss-Newton factor"):
        estimator(model, x, variance, "kron", mode).update_covariances(x)


def test_one_layer_under_a_softmax_has_the_kronecker_factors_of_the_formula() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    net = kfac_fx.compile(model, (x,), loss=lambda logits: (2.0, losses.Categorical(logits)))
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    est.update_covariances(x)
    (block,) = est.blocks.values()
    p, ones = model(x).softmax(-1), torch.cat([x, torch.ones(5, 1)], 1)
    torch.testing.assert_close(block.factors["A"].value[0], ones.mT @ ones / 5)
    torch.testing.assert_close(
        block.factors["G"].value[0], 2 * (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    )


@pairs(("approximation", ["kron", "diagonal", "full"]), ("mode", MONTE_CARLO))
def test_monte_carlo_modes_agree_with_exact(mode: str, approximation: str) -> None:
    model, x = case()
    hold_to_its_own_variance(mode, estimator(model, x, two_losses, approximation, "exact"), x)


KINDS = {
    "fc": "kron_series_1",
    "conv": "kron_sua",
    "classes": "kron_in_diag",
    "values": "kron_both_diag",
    "odd": "full",
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [("gradients", "mean and variance"), ("curvature_prop", "mean and variance"), ("gradients", "two")],
)
def test_monte_carlo_modes_agree_with_exact_in_factors_of_every_kind(mode: str, name: str) -> None:
    """Lagged ones of a series, of pixels, of diagonal sides, of generic parameters; and with a variance."""
    model, x = case()
    net = kfac_fx.compile(model, (x,), loss=LOSSES[name], approximations=KINDS)
    used = {"fc", "conv", "classes", "values", "odd"} if name == "two" else {"fc", "conv", "classes", "odd"}
    found = {
        registration.parameters[0].partition(".")[0]: registration.approximation for registration in net.registrations
    }
    assert {key: found[key] for key in used} == {key: KINDS[key] for key in used}
    hold_to_its_own_variance(mode, kfac_fx.FisherEstimator(net, estimation_mode="exact"), x)


def hold_to_its_own_variance(mode: str, exact: Any, x: Tensor) -> None:
    """The mean over rounds is held to five of its own standard errors, in the norm of every factor."""
    exact.update_covariances(x)
    net, generator, rounds = exact.net, torch.Generator().manual_seed(0), 100
    samples: dict[Any, list[Tensor]] = {}
    for _ in range(rounds):
        est = kfac_fx.FisherEstimator(net, estimation_mode=mode)
        est.accumulate(net.record((x,), {}, mode=mode, generator=generator))
        est.fold()
        for key, block in est.blocks.items():
            for name, factor in block.factors.items():
                samples.setdefault((key, name), []).append(factor.value)
    for (key, name), values in samples.items():
        drawn = torch.stack(values)
        error = (drawn.var(0).sum() / rounds).sqrt()
        expected = exact.blocks[key].factors[name].value
        assert (drawn.mean(0) - expected).norm() <= 5 * error + 1e-9 * expected.norm(), (key, name)
        assert error <= 0.3 * expected.norm()  # the bound means something; both are zero where no loss reads an output


def test_chunks_of_any_size_give_the_same_sums() -> None:
    model, x = case()
    found = [estimator(model, x, two_losses, "diagonal", "exact", memory=memory) for memory in (1, 1 << 13, 1 << 30)]
    for est in found:
        est.update_covariances(x)
    for est in found[1:]:
        assert_same(found[0], est)
    assert found[0].net.captures.first.loop_reason is None


def test_chunks_report_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str, list[int]]] = []

    def tracked(items: Any, total: int, what: str) -> Iterator[Any]:
        done: list[int] = []
        seen.append((total, what, done))
        for amount, item in items:
            done.append(amount)
            yield item

    monkeypatch.setattr(recorder, "tracked", tracked)
    model, x = case()
    estimator(model, x, two_losses, "kron", "exact", memory=1).update_covariances(x)
    (total, what, done), (by_case, _, _) = seen
    assert (total, what) == (3 + 2, "exact: 5 backward passes") and done == [1] * 5  # coordinates of both outputs
    assert by_case == 4 * (3 + 2)  # of every case, for the parameters of no layer


@torch.library.custom_op("kfac_fx_tests::guarded", mutates_args=())
def guarded(x: Tensor) -> Tensor:
    """An identity whose backward looks at the values of the gradient."""
    return x.clone()


def look(ctx: Any, gradient: Tensor) -> Tensor:
    assert not gradient.isnan().any().item()
    return gradient


guarded.register_fake(torch.empty_like)
guarded.register_autograd(look)


class Guarded(nn.Sequential):
    def __init__(self, guard: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(4, 5), nn.Linear(5, 3))
        self.guard = guard

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](self.guard(self[0](x)))
        return y


def test_where_vmap_fails_sources_go_one_by_one_and_the_report_says_why() -> None:
    x, found = torch.randn(6, 4), []
    for guard in (Tensor.clone, guarded):
        torch.manual_seed(0)
        found.append(estimator(Guarded(guard), x, "categorical", "kron", "exact"))
        assert found[-1].net.report.to_dict()["fallbacks"] == []
        found[-1].update_covariances(x)
    assert_same(*found)
    expected, looped = (est.net.report for est in found)
    assert expected.to_dict()["fallbacks"] == []
    (said,) = looped.to_dict()["fallbacks"]
    assert said.startswith("sources of the exact modes are sent back one by one: vmap is not possible here: vmap: It")
    assert "calling .item() on a Tensor" in said and "\n" not in said
    assert "fallback  sources of the exact modes are sent back one by one" in str(looped)


def test_an_unknown_mode_is_refused() -> None:
    model, x = case()
    net = kfac_fx.compile(model, (x,), loss=two_losses)
    text = r"^mode 'exakt' is none of 'gradients', .*'exact_GGN'\. Did you mean 'exact'"
    with pytest.raises(ValueError, match=text):
        net.record((x,), {}, mode="exakt")


# --- the parameters' gradients ----------------------------------------------------------------------------------------


def test_empirical_params_stats_are_the_gradient_of_the_mean_loss() -> None:
    model, x = case()
    targets = (torch.tensor([0, 2, 1, 1]), torch.randn(4, 2))
    est = estimator(model, x, two_losses, "kron", "empirical", compute_params_stats=True)
    assert est.params_stats == {}
    est.update_covariances(x, targets=targets)
    pairs = zip(two_losses(model(x)), targets, strict=True)
    total = sum(c * loss.with_targets(y).evaluate() for (c, loss), y in pairs) / len(x)
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(est.params_stats[name], parameter.grad)


def test_exact_params_stats_sum_over_sources() -> None:
    model, x = case()
    est = estimator(model, x, one_loss(losses.Normal, 4.0), "kron", "exact", compute_params_stats=True)
    est.update_covariances(x)
    (2 * model(x)[0].sum() / 0.5**0.5 / len(x)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(est.params_stats[name], parameter.grad)


@pytest.mark.parametrize("mode", ["exact", "curvature_prop_GGN"])
def test_the_optimizer_takes_the_mode(mode: str) -> None:
    model, x = case()
    net = kfac_fx.compile(model, (x,), loss=two_losses)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, estimation_mode=mode)
    before = losses.Normal(net(x)[1], targets=torch.zeros(4, 2)).evaluate() / 4
    before.backward()
    with pytest.warns(kfac_fx.LossScaleWarning, match=r"does not depend on Categorical of \[4, 3\], 1 of the 2"):
        optimizer.step()
    assert losses.Normal(model(x)[1], targets=torch.zeros(4, 2)).evaluate() / 4 < before


class Steps(nn.Module):
    """Logits of positions that depend on earlier ones, [N, T, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(x)).cumsum(1))
        return logits


class Flat(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


class Interleaved(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1).flatten(0, 1)


FLATTENED: dict[str, tuple[type[Steps], Any]] = {
    "by the model": (Flat, "categorical"),
    "by the model, positions first": (Interleaved, "categorical"),
    "by the loss": (Steps, lambda logits: losses.Categorical(logits.flatten(0, 1))),
}


@pytest.mark.usefixtures("float64")
@pairs(("mode", ["exact", "exact_GGN"]), ("kind, loss", FLATTENED))
def test_exact_fishers_have_no_products_of_two_rows_of_an_example(kind: type[Steps], loss: Any, mode: str) -> None:
    x, fishers = torch.randn(4, 5, 3), []
    for model, of_model in ((Steps(), "categorical"), (kind(), loss)):
        model.load_state_dict(
            {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in model.state_dict().items()}
        )
        net = kfac_fx.compile(model, (x,), loss=of_model, approximations={"hidden": "full"})
        estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode=mode)
        estimator.update_covariances(x)
        fishers.append([block.full_fisher_block() for block in estimator.blocks.values()])
    torch.testing.assert_close(*fishers)
    assert "the exact modes send back one row of a loss at a time: a loss of [20, 3] has several rows for " in " ".join(
        str(net.report).split()
    )
