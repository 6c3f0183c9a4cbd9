"""A cross-entropy that forward writes by hand is that of a categorical distribution, as F.cross_entropy is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

pytestmark = pytest.mark.usefixtures("float64")
N, POSITIONS, CLASSES = 7, 4, 3
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of logits, numbers of classes and probabilities


class Trained(nn.Module):
    """Returns its loss of logits [N, POSITIONS, CLASSES], or of those of the first position, [N, CLASSES]."""

    def __init__(self, loss: Loss, positions: bool = False) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, CLASSES)), loss
        self.positions = positions

    def forward(self, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        z = self.net(x)
        return self.loss(z, y, p) if self.positions else self.loss(z[:, 0], y[:, 0], p[:, 0])


def batch(cases: int = N) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(cases)
    shape = cases, POSITIONS
    return torch.randn(*shape, 2), torch.randint(CLASSES, shape), torch.rand(*shape, CLASSES).softmax(-1)


def distilled(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    soft = F.kl_div(F.log_softmax(z / 2, -1), F.log_softmax(p / 2, -1), reduction="batchmean", log_target=True)
    return 0.7 * 4 * soft + 0.3 * F.cross_entropy(z, y)


def distilled_by_torch(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    soft = (p / 2).softmax(-1)
    constant = (soft * soft.log()).sum() / len(z)
    return 0.7 * 4 * (F.cross_entropy(z / 2, soft) + constant) + 0.3 * F.cross_entropy(z, y)


def by_torch(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def of_probabilities(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), p.flatten(0, -2))


def divergence(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return of_probabilities(z, y, p) + (p * p.log()).sum(-1).mean()


def weighted(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return (F.cross_entropy(z, y, reduction="none") * p[:, 0]).sum() / p[:, 0].sum()


EITHER: dict[str, tuple[Loss, Loss]] = {  # with and without positions
    "gather": (lambda z, y, p: -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(), by_torch),
    "gather, squeezed": (
        lambda z, y, p: -1 * torch.gather(F.log_softmax(z, -1), -1, y[..., None]).squeeze(-1).mean(),
        by_torch,
    ),
    "logarithm of a softmax": (lambda z, y, p: -z.softmax(-1).log().gather(-1, y[..., None]).mean(), by_torch),
    "logsumexp": (lambda z, y, p: (z.logsumexp(-1) - z.gather(-1, y[..., None]).squeeze(-1)).mean(), by_torch),
    "logsumexp, kept": (lambda z, y, p: (z.logsumexp(-1, True) - z.gather(-1, y[..., None])).mean(), by_torch),
    "minus both": (lambda z, y, p: -(z.gather(-1, y[..., None]) - z.logsumexp(-1, True)).mean(), by_torch),
    "torch.distributions": (lambda z, y, p: -torch.distributions.Categorical(logits=z).log_prob(y).mean(), by_torch),
    "one-hot": (lambda z, y, p: -(F.one_hot(y, CLASSES) * z.log_softmax(-1)).sum(-1).mean(), by_torch),
    "probabilities": (lambda z, y, p: -(p * z.log_softmax(-1)).sum(-1).mean(), of_probabilities),
    "probabilities, kept": (lambda z, y, p: -(z.log_softmax(-1) * p).sum(-1, True).mean(), of_probabilities),
    "sum of all": (lambda z, y, p: -torch.sum(p * z.log_softmax(-1)) / p[..., 0].numel(), of_probabilities),
    "divergence": (
        lambda z, y, p: F.kl_div(z.log_softmax(-1), p, reduction="sum") / p[..., 0].numel(),
        divergence,
    ),
    "divergence by case": (
        lambda z, y, p: F.kl_div(z.log_softmax(-1), p, reduction="none").sum(-1).mean(),
        divergence,
    ),
}
OF_CASES: dict[str, tuple[Loss, Loss]] = {
    "index": (lambda z, y, p: -z.log_softmax(1)[torch.arange(len(z)), y].mean(), by_torch),
    "logsumexp, index": (lambda z, y, p: (z.logsumexp(1) - z[torch.arange(len(y)), y]).mean(), by_torch),
    "weighted": (
        lambda z, y, p: -(z.log_softmax(1).gather(1, y[:, None])[:, 0] * p[:, 0]).sum() / p[:, 0].sum(),
        weighted,
    ),
    "distillation": (distilled, distilled_by_torch),
}
SAME = [(name, *losses, positions) for name, losses in EITHER.items() for positions in (False, True)]
SAME += [(name, *losses, False) for name, losses in OF_CASES.items()]


@cache  # most rows have the same loss of torch, and both tests of a row the same model
def compiled(loss: Loss, positions: bool) -> kfac_fx.CompiledModule:
    torch.manual_seed(0)
    return kfac_fx.compile(Trained(loss, positions), batch())


@cache
def value_and_factors(loss: Loss, positions: bool) -> tuple[Tensor, list[Tensor]]:
    net, other = compiled(loss, positions), batch(9)  # another number of cases
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(*other)
    assert not [note for note in net.program.dropped if "term" in note.subject]
    assert all(site.way is not None and site.way.linear for site in net.program.losses)
    return net(*other).detach(), [block.full_fisher_block() for block in estimator.blocks.values()]


@pytest.mark.parametrize(("name", "by_hand", "named", "positions"), SAME)
def test_a_cross_entropy_by_hand_has_the_value_and_the_factors_of_torch_s(
    name: str, by_hand: Loss, named: Loss, positions: bool
) -> None:
    torch.testing.assert_close(value_and_factors(by_hand, positions), value_and_factors(named, positions))


@pytest.mark.parametrize(("name", "by_hand", "named", "positions"), SAME)
def test_scores_of_a_cross_entropy_by_hand_are_of_its_gradients(
    name: str, by_hand: Loss, named: Loss, positions: bool
) -> None:
    net, args = compiled(by_hand, positions), batch()
    model, parameters = net.model, list(net.model.parameters())
    case = "sequence" if positions else "row"
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(*args)], case=case).at(scale=0.0, damping=1.0)
    scores = spectrum.self_scores(kfac_fx.Batch(*args))
    # The weights of a normalized sum are those in the batch.
    weights = args[2][:, 0, 0] / args[2][:, 0, 0].mean() if name == "weighted" else torch.ones(N)
    by_example = [model(*(value[n : n + 1] for value in args)) * weights[n] for n in range(N)]
    wanted = torch.stack(
        [sum(g.square().sum() for g in torch.autograd.grad(value, parameters)) for value in by_example]  # type: ignore[misc]
    )
    torch.testing.assert_close(scores, wanted * (POSITIONS**2 if positions else 1))


def test_a_small_loss_by_hand_keeps_its_value() -> None:
    """A cross-entropy rounds otherwise, by a large part of a small loss: training ended in a ModelChangedError."""
    torch.set_default_dtype(torch.float32)  # the fixture brings back what was before

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -self.head(self.table(x).tanh()).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()

    torch.manual_seed(0)
    x = torch.randint(20, (64, 6))
    y = (3 * x + 1) % 20
    torch.manual_seed(0)
    net = kfac_fx.compile(Tokens(), (x, y))
    optimizer = kfac_fx.KFAC(net)
    for step in range(80):
        rows = torch.randint(64, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = net(x[rows], y[rows])
        loss.backward()
        optimizer.step()
    assert 0 < loss < 1e-4


class Pair(Trained):
    """Returns logits and loss, as small GPTs do."""

    def forward(self, x: Tensor, y: Tensor, p: Tensor) -> Any:
        z = self.net(x)[:, 0]
        return z, self.loss(z, y[:, 0], p[:, 0])


def picked(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return -z.log_softmax(1).gather(1, y[:, None]).mean()


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_cross_entropy_by_hand_next_to_the_logits_is_the_loss(penalty: float) -> None:
    def loss(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return picked(z, y, p) + penalty * z.square().mean() if penalty else picked(z, y, p)

    factors = []
    for kind in (Pair, Trained):
        torch.manual_seed(0)
        net = kfac_fx.compile(kind(loss), batch())
        estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
        estimator.update_covariances(*batch(9))
        factors.append([block.full_fisher_block() for block in estimator.blocks.values()])
        names = [site.loss for site in net.program.losses]
        assert names == ["cross_entropy", "mse_loss"][: 2 if penalty else 1]
    torch.testing.assert_close(*factors)


def test_numbers_next_to_outputs_that_may_be_penalties_stay_without_a_name() -> None:
    class Two(Pair):
        def forward(self, x: Tensor, y: Tensor, p: Tensor) -> Any:
            z, loss = super().forward(x, y, p)
            return z, loss, z.square().mean()

    for model in (Pair(lambda z, y, p: 0.1 * z.square().mean()), Two(picked)):
        assert not kfac_fx.compile(model, batch()).program.losses


NO_LOSS: dict[str, Loss] = {
    "log-probabilities of cases": lambda z, y, p: z.log_softmax(1).gather(1, y[:, None])[:, 0],
    "a ratio": lambda z, y, p: -(z.log_softmax(1).gather(1, y[:, None])[:, 0] - p[:, 0]).exp().mean(),
    "entropy": lambda z, y, p: -(z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
    "maximized": lambda z, y, p: z.log_softmax(1).gather(1, y[:, None]).mean(),
    "over cases": lambda z, y, p: -z.log_softmax(0).gather(1, y[:, None]).mean(),
    "two classes": lambda z, y, p: -z.log_softmax(1).gather(1, torch.stack([y, 2 - y], 1)).mean(),
    "over classes and cases": lambda z, y, p: -(p * z.log_softmax(1)).sum(0).mean(),
    "mean over elements": lambda z, y, p: F.kl_div(z.log_softmax(1), p, reduction="mean"),
    "targets with a gradient": lambda z, y, p: F.kl_div(z.log_softmax(1), (2 * z).softmax(1), reduction="batchmean"),
    "no probabilities": lambda z, y, p: -(p * z).sum(1).mean(),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("loss", NO_LOSS.values(), ids=NO_LOSS)
def test_what_is_no_cross_entropy_of_cases_stays_without_a_name(loss: Loss) -> None:
    model = Trained(loss)
    net = kfac_fx.compile(model, batch())
    assert not net.program.losses
    torch.testing.assert_close(net(*batch()), model(*batch()))


def test_an_entropy_next_to_a_cross_entropy_by_hand_is_another_term() -> None:
    """The loss of an actor and a critic; its policy and its entropy had no name, so the head of the policy had no
    block with the curvature of its outputs."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(2, 6), nn.Linear(6, CLASSES), nn.Linear(6, 1)

        def forward(self, x: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
            h = self.body(x).tanh()
            policy, value = torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)[:, 0]
            advantage = (returns - value).detach()
            gain = (policy.log_prob(actions) * advantage).mean() + 0.01 * policy.entropy().mean()
            return 0.5 * F.mse_loss(value, returns) - gain

    args = torch.randn(N, 2), torch.randint(CLASSES, (N,)), torch.randn(N)
    net = kfac_fx.compile(ActorCritic(), args)
    assert {site.loss for site in net.program.losses} == {"mse_loss", "cross_entropy"}
    assert any(
        "in the loss that forward returns, and no part of the Fisher" in note.reason for note in net.program.dropped
    )
