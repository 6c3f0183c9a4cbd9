"""A loss of squares that forward writes by hand is that of a normal distribution, as F.mse_loss is: alone, and next to
losses of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*have no target:UserWarning"),  # those that a mask leaves out
]
N = 7
Loss = Callable[[Tensor, Tensor, Tensor], Any]


class Trained(nn.Module):
    """Returns its loss of the outputs at points inside and on the border of a domain."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)), loss

    def forward(self, x: Tensor, border: Tensor, y: Tensor) -> Any:
        return self.loss(self.net(x), self.net(border), y)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 2), torch.randn(3, 2), torch.randn(N, 2)


def mask(y: Tensor) -> Tensor:
    return (y[:, :1] > -0.5).to(y.dtype)


def by_torch(z: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y)


def summed(z: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y, reduction="sum")


def two_terms(z: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y) + 3 * F.mse_loss(b, torch.zeros_like(b))


SAME: dict[str, tuple[Loss, Loss]] = {
    "square": (lambda z, b, y: (z - y).square().mean(), by_torch),
    "power": (lambda z, b, y: ((z - y) ** 2).mean(), by_torch),
    "product": (lambda z, b, y: (lambda r: r * r)(z - y).sum(), summed),
    "turned": (lambda z, b, y: torch.mean((y - z).pow(2)), by_torch),
    "half": (lambda z, b, y: 0.5 * torch.square(z - y).sum(1).mean(), by_torch),
    "two terms": (
        lambda z, b, y: (z - y).square().mean() + 3 * (b**2).mean(),
        two_terms,
    ),
    "next to a loss of torch": (
        lambda z, b, y: F.mse_loss(z, y) + 3 * (b**2).mean(),
        two_terms,
    ),
    "next to another kind": (
        lambda z, b, y: F.cross_entropy(z, y[:, 0].gt(0).long()) + 3 * (b - 1).square().mean(),
        lambda z, b, y: F.cross_entropy(z, y[:, 0].gt(0).long()) + 3 * F.mse_loss(b, torch.ones_like(b)),
    ),
    "minus a logarithm": (
        lambda z, b, y: -((-0.5 * (z - y).square()).sum() - 2 * b.square().sum()),
        lambda z, b, y: 0.5 * F.mse_loss(z, y, reduction="sum") + 2 * F.mse_loss(b, 0 * b, reduction="sum"),
    ),
    "columns in another order": (
        lambda z, b, y: (z[:, torch.tensor([1, 0])] - y).square().mean(),
        lambda z, b, y: F.mse_loss(z, y[:, torch.tensor([1, 0])]),
    ),
    "stacked": (
        lambda z, b, y: torch.stack([(z - y).square().mean(), 3 * (b**2).mean()]).sum(),
        two_terms,
    ),
    "named": (
        lambda z, b, y: {"loss": (z - y).square().mean(), "outputs": z},
        lambda z, b, y: {"loss": F.mse_loss(z, y), "outputs": z},
    ),
    "masked": (
        lambda z, b, y: ((z - y).square() * mask(y)).sum() / mask(y).sum(),
        lambda z, b, y: (F.mse_loss(z, y, reduction="none") * mask(y)).sum() / mask(y).sum(),
    ),
    "a squared norm": (
        lambda z, b, y: torch.linalg.vector_norm(z - y) ** 2,
        summed,
    ),
    "a norm times itself": (
        lambda z, b, y: (lambda r: r * r)((z - y).norm()),
        summed,
    ),
    "a squared norm next to a loss of torch": (
        lambda z, b, y: F.mse_loss(z, y) + z.norm() ** 2,
        lambda z, b, y: F.mse_loss(z, y) + F.mse_loss(z, torch.zeros_like(z), reduction="sum"),
    ),
}


NEED_SIZES = (  # those of example inputs
    *("next to a loss of torch", "next to another kind", "stacked", "a squared norm", "a norm times itself"),
    "a squared norm next to a loss of torch",
)


@cache  # many rows have the same loss of torch
def factors_of(loss: Loss, exported: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = kfac_fx.compile(Trained(loss), batch() if exported else None)
    net(*batch())
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(*batch())
    return [block.full_fisher_block() for block in estimator.blocks.values()]


@pytest.mark.parametrize(
    ("name", "exported"), [(name, sized) for name in SAME for sized in (False, True) if sized or name not in NEED_SIZES]
)
def test_squares_by_hand_have_the_factors_of_torch_s_loss(name: str, exported: bool) -> None:
    for mine, wanted in zip(*(factors_of(loss, exported) for loss in SAME[name]), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_a_loss_by_hand_trains_as_one_with_a_name() -> None:
    """Before, the loss had no name, and so no exact steps: 60 steps ended two to nine times higher."""
    torch.manual_seed(0)
    x, border, y = torch.rand(64, 2), torch.rand(3, 2), torch.rand(64, 2)
    y = torch.stack([(6 * x[:, 0] * x[:, 1]).sin(), x[:, 0]], 1)
    ends = []
    for loss in (
        lambda z, b, y: (z - y).square().mean() + 0.1 * b.square().mean(),
        lambda z, b, y: F.mse_loss(z, y) + 0.1 * F.mse_loss(b, torch.zeros_like(b)),
    ):
        torch.manual_seed(0)
        net = kfac_fx.compile(Trained(loss), (x, border, y))
        optimizer = kfac_fx.KFAC(net)
        for _ in range(40):
            optimizer.zero_grad()
            value = net(x, border, y)
            value.backward()
            optimizer.step()
        ends.append(float(value.detach()))
        assert "fallback" not in str(net.report) and optimizer.scalars["exact_steps"] > 20
    assert ends[0] < 2 * ends[1]


NO_LOSS: dict[str, Loss] = {
    "features": lambda z, b, y: z.square().mean(1),
    "squares alone": lambda z, b, y: (z - y).square(),
    "a root": lambda z, b, y: (z - y).square().mean().sqrt(),
    "another term": lambda z, b, y: (z - y).square().mean() + b.abs().mean(),
    "a difference": lambda z, b, y: (z - y).square().mean() - b.square().mean(),
    "a weight that is learned": lambda z, b, y: (z.exp().mean() * (z - y).square()).mean(),
    "a negative weight": lambda z, b, y: (z - y).square().mean() + b.square().mean() * -0.1,
    "a mean of the batch": lambda z, b, y: (z - y).square().mean() + z.mean(0).square().sum(),
    "two outputs": lambda z, b, y: ((z - y).square().mean(), b.square().mean()),
    "moments": lambda z, b, y: (z.mean() - y.mean()) ** 2 + (b.sum() - 1).square(),
    "cubes": lambda z, b, y: ((z - y) ** 3).mean(),
}


SCORED: dict[str, Loss] = {
    "by hand": lambda z, b, y: (z - y).square().mean() + 3 * (b**2).mean(),
    "zeros like the outputs": lambda z, b, y: F.mse_loss(z, y) + 3 * F.mse_loss(b, torch.zeros_like(b)),
    "zeros of the shape of others": lambda z, b, y: F.mse_loss(z - y, torch.zeros_like(b)),
    "a target of the outputs": lambda z, b, y: F.mse_loss(z, y) + F.mse_loss(b, 2 * z.detach()),
    "both": lambda z, b, y: F.cross_entropy(z, y[:, 0].gt(0).long()) + 3 * (b - y).square().mean(),
}


@pytest.mark.parametrize("mode", ["empirical", "exact"])
@pytest.mark.parametrize("loss", SCORED.values(), ids=SCORED)
def test_scores_of_squares_are_of_their_gradients(loss: Loss, mode: str) -> None:
    """Targets such as `torch.zeros_like(residual)` were said to be computed from parameters, and all scores refused."""
    torch.manual_seed(0)
    x, _, y = batch()
    model, args = Trained(loss), (x, torch.randn(N, 2), y)
    parameters = list(model.parameters())
    by_example = [model(*(value[n : n + 1] for value in args)) for n in range(N)]
    gradients = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)]) for value in by_example]
    )
    spectrum = kfac_fx.fit_spectrum(kfac_fx.compile(model, args), [kfac_fx.Batch(*args)], mode=mode)
    scores = spectrum.at(scale=0.0, damping=1.0).self_scores(kfac_fx.Batch(*args))
    torch.testing.assert_close(scores, gradients.square().sum(1))


WEIGHED = {
    "mean": lambda r, b: (torch.exp(-r.detach().square()) * r**2).mean() + 10 * (b**2).mean(),
    "sum over cases": lambda r, b: ((torch.exp(-r.detach().square()) * r**2).sum() + 10 * (b**2).sum()) / len(r),
}


@pytest.mark.filterwarnings("error::kfac_fx.LossScaleWarning")
@pytest.mark.parametrize("loss", WEIGHED.values(), ids=WEIGHED)
def test_weights_that_the_outputs_make_do_not_hide_a_mean(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Causal and residual-based weights of equations: whether the loss is a mean was asked of torch's losses alone, and
    a false warning said that it is a sum."""
    x, border, y = torch.randn(64, 2), torch.randn(64, 2), torch.randn(64, 2)
    net = kfac_fx.compile(Trained(lambda z, b, y: loss(z[:, :1] - y[:, :1], b[:, :1])), (x, border, y))
    assert net.recorder((x, border, y), {}).is_mean
    optimizer = kfac_fx.KFAC(net)
    net(x, border, y).backward()
    optimizer.step()


def weights_without_gradient(r: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 / (1 + r.abs())


OF_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": lambda r: torch.exp(-0.2 * torch.cumsum(r.detach().square().sum(1, keepdim=True), 0)),
    "without a gradient": weights_without_gradient,
    "of the residual": lambda r: r.detach().abs() / r.detach().abs().max(),
}


@pytest.mark.parametrize("weights", OF_OUTPUTS.values(), ids=OF_OUTPUTS)
def test_weights_of_outputs_are_in_the_factors_as_weights_that_are_passed(weights: Callable[[Tensor], Tensor]) -> None:
    """They were left out, with a note in the report, because forward computes them from its own outputs."""

    class Passed(Trained):
        def forward(self, x: Tensor, border: Tensor, y: Tensor, w: Tensor) -> Any:  # type: ignore[override]
            return (w * (self.net(x) - y).square()).mean() + 3 * self.net(border).square().mean()

    inside = Trained(lambda z, b, y: (weights(z - y) * (z - y).square()).mean() + 3 * b.square().mean())
    passed, args = Passed(inside.loss), batch()
    passed.load_state_dict(inside.state_dict())
    factors, scores = [], []
    for model, more in ((inside, ()), (passed, (weights(inside.net(args[0]) - args[2]),))):
        net = kfac_fx.compile(model, (*args, *more))
        assert not net.program.dropped
        estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
        estimator.update_covariances(*args, *more)
        factors.append([block.full_fisher_block() for block in estimator.blocks.values()])
        estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
        estimator.update_covariances(*args, *more)
        scores.append([block.full_fisher_block() for block in estimator.blocks.values()])
    torch.testing.assert_close(factors[0], factors[1])
    torch.testing.assert_close(scores[0], scores[1])


def grouped_first(r: Tensor) -> Tensor:
    return r.view(-1, 2).detach()


def detached_first(r: Tensor) -> Tensor:
    return r.detach().reshape(-1, 2)


def without_gradient(r: Tensor) -> Tensor:
    with torch.no_grad():
        return r.view(-1, 2)


def of_fixed_size(r: Tensor) -> Tensor:
    return r.detach().view(N, 2)


@pytest.mark.parametrize("grouped", [grouped_first, detached_first, without_gradient, of_fixed_size])
def test_weights_of_grouped_residuals_are_in_the_fisher(grouped: Callable[[Tensor], Tensor]) -> None:
    """The residuals of the loss are a reshape of those that the weights are made of, which a run tells, too."""

    def weights(z: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-grouped((z - y).flatten()).square().mean(1).cumsum(0))

    def loss(z: Tensor, b: Tensor, y: Tensor) -> Tensor:
        r = (z - y).flatten()
        groups = r.view(N, 2) if grouped is of_fixed_size else r.view(-1, 2)
        return (weights(z, y)[:, None] * groups**2).mean() + 5 * F.mse_loss(b, torch.ones_like(b))

    torch.manual_seed(0)
    model, args = Trained(loss), batch()
    net = kfac_fx.compile(model, args)
    assert not net.program.dropped
    vector = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    product = net.fisher_product(*args)(vector)
    parameters = {name.removeprefix("net."): p.detach() for name, p in model.named_parameters()}
    tangent = {name.removeprefix("net."): v for name, v in vector.items()}

    def along(x: Tensor) -> Tensor:
        function = partial(torch.func.functional_call, model.net, args=(x,))
        return torch.func.jvp(lambda p: function(parameter_and_buffer_dicts=p), (parameters,), (tangent,))[1]

    w = weights(model.net(args[0]), args[2])[:, None]
    wanted = 2 * (w * along(args[0]) ** 2).mean() + 10 * (along(args[1]) ** 2).mean()
    torch.testing.assert_close(sum((product[name] * vector[name]).sum() for name in vector), wanted)


REPEATED: dict[str, Loss] = {
    "by hand": lambda z, b, y: (z[:, :1] - y[:, 0]).square().mean(),
    "mse_loss": lambda z, b, y: F.mse_loss(z[:, :1], y[:, 0]),
    "rows": lambda z, b, y: F.mse_loss(z[:, :1], y[:, 0], reduction="none").mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("loss", REPEATED.values(), ids=REPEATED)
def test_outputs_that_are_compared_with_the_targets_of_all_cases_are_as_many_cases(loss: Loss) -> None:
    """A column of outputs minus a row of targets is a matrix of all differences."""
    for ours, wanted in zip(
        factors_of(loss, True), factors_of(lambda z, b, y: F.mse_loss(z[:, :1], y[:, :1]), True), strict=True
    ):
        torch.testing.assert_close(ours, wanted)


Weighted = Callable[[Tensor, Tensor], Tensor]
WITH_ONES: dict[str, tuple[Weighted, Weighted]] = {  # of squares and of the weights of their rows; without the weights
    "mean": (lambda s, w: (w * s).mean(), lambda s, w: s.mean()),
    "rows first": (lambda s, w: (s.sum(1) * w[:, 0]).mean() / 4, lambda s, w: s.sum(1).mean() / 4),
    "divided": (lambda s, w: (s / w).mean(), lambda s, w: s.mean()),
    "normalized": (lambda s, w: (w * s).sum() / w.sum(), lambda s, w: s.sum() / len(s)),
    "sum": (lambda s, w: (w * s).sum(), lambda s, w: s.sum()),
    "shares": (lambda s, w: (w.softmax(0) * s).sum(), lambda s, w: s.sum() / len(s)),
    "a learned number": (lambda s, w: w.mean() * s.mean(), lambda s, w: s.mean()),
}


@pytest.mark.parametrize(("weighted", "without"), WITH_ONES.values(), ids=WITH_ONES)
def test_weights_that_nothing_tells_count_as_one(weighted: Weighted, without: Weighted) -> None:
    """The Fisher was that of a mean over cases of sums over elements, whatever forward returned."""

    class AtOthers(Trained):
        """Weights of a second run at other points."""

        def forward(self, x: Tensor, border: Tensor, y: Tensor) -> Any:
            return self.loss(self.net(x), torch.exp(-self.net(x + 1)[:, :1].detach().abs()), y)

    args, factors = batch(), []
    for number, loss in enumerate((weighted, without)):
        torch.manual_seed(0)
        net = kfac_fx.compile(AtOthers(lambda z, w, y, loss=loss: loss((z - y).square(), w)), args)
        assert len(net.program.dropped) == (number == 0)
        estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
        estimator.update_covariances(*args)
        factors.append([block.full_fisher_block() for block in estimator.blocks.values()])
    torch.testing.assert_close(*factors)


def test_a_loss_with_weights_of_outputs_has_exact_steps() -> None:
    torch.manual_seed(0)
    x, border, y = torch.rand(64, 2), torch.rand(3, 2), torch.rand(64, 2)
    y = torch.stack([(6 * x[:, 0] * x[:, 1]).sin(), x[:, 0]], 1)
    weights = OF_OUTPUTS["causal"]
    net = kfac_fx.compile(Trained(lambda z, b, y: (weights(z - y) * (z - y).square()).mean()), (x, border, y))
    optimizer = kfac_fx.KFAC(net)
    for _ in range(60):
        optimizer.zero_grad()
        loss = net(x, border, y)
        loss.backward()
        optimizer.step()
    assert optimizer.scalars["exact_steps"] > 30


ROWS: dict[str, tuple[Loss, Loss]] = {
    "mean": (lambda z, b, y: F.mse_loss(z, y, reduction="none").mean(), SAME["square"][1]),
    "sums": (lambda z, b, y: F.mse_loss(z, y, reduction="none").sum(1).mean(), lambda z, b, y: 2 * F.mse_loss(z, y)),
    "classes": (
        lambda z, b, y: F.cross_entropy(z, y[:, 0].gt(0).long(), reduction="none").mean(),
        lambda z, b, y: F.cross_entropy(z, y[:, 0].gt(0).long()),
    ),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("rows", "mean"), ROWS.values(), ids=ROWS)
def test_a_mean_behind_the_rows_of_a_loss_is_its_mean(rows: Loss, mean: Loss, exported: bool) -> None:
    """Without example inputs, the mean over rows of unknown number was taken for one over a single row."""
    wanted, of_rows = (factors_of(loss, exported) for loss in (mean, rows))
    for mine, other in zip(of_rows, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize("loss", NO_LOSS.values(), ids=NO_LOSS)
def test_other_functions_of_squares_have_no_name(loss: Loss, exported: bool) -> None:
    if loss is NO_LOSS["a mean of the batch"] and not exported:
        pytest.skip("a graph without sizes does not tell it")
    net = kfac_fx.compile(Trained(loss), batch() if exported else None)
    assert not net.program.losses


def distances(d: Tensor) -> Tensor:
    return d.mean() + (1 - d.sqrt()).relu().mean()


OTHER_TERMS: dict[str, Loss] = {
    "a difference": lambda z, b, y: F.mse_loss(z, y) - 0.1 * b.square().mean(),
    "a negative weight": lambda z, b, y: F.mse_loss(z, y) + -0.1 * b.square().mean(),
    "a root": lambda z, b, y: F.mse_loss(z, y) + b.square().mean().sqrt(),
    "a mean of the batch": lambda z, b, y: F.mse_loss(z, y) + z.mean(0).square().sum(),
    "a distance and a function of it": lambda z, b, y: F.mse_loss(b, 0 * b) + distances((z - y).square().sum(1)),
}


@pytest.mark.parametrize("loss", OTHER_TERMS.values(), ids=OTHER_TERMS)
def test_what_is_no_sum_of_squares_next_to_a_loss_of_torch_has_no_name(loss: Loss) -> None:
    assert len(kfac_fx.compile(Trained(loss), batch()).program.losses) == 1
