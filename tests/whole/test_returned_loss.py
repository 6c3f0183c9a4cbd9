"""Scores, corrected eigenvalues and factors are of the loss that forward returns, whatever it does with its losses.

The oracle gives every example parameters of its own, so that the gradient of one returned loss has the part of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import kfac_fx
from kfac_fx import Batch, FisherEstimator, LossError
from tests.tables import pairs

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*have no target:UserWarning"),  # of A, see test_left_out.py
    pytest.mark.filterwarnings("ignore:the gradients of quer.* are zero:UserWarning"),  # of cases that do not count
]
N, T, C = 5, 3, 3
WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


class Body(nn.Module):
    """Logits of two heads, and the activations before. With `odd` parameters, no layer claims some of them."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.odd = nn.Linear(4, 5), nn.Linear(5, C), nn.Linear(5, C), odd
        self.q = nn.Parameter(torch.randn(5, 5)) if odd else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        if self.q is not None:
            h = h + torch.einsum("nti,ij,ntj->ntj", h, torch.sin(self.q), h)
        return self.b(h), h, self.c(h)


class Trained(nn.Module):
    """Returns its loss. If it is `divided`, no single graph holds it."""

    def __init__(self, loss: Loss, odd: bool = False, divided: bool = False) -> None:
        super().__init__()
        self.body, self.loss, self.divided = Body(odd), loss, divided

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Any:
        o, h, c = self.body(x)
        if self.divided and float(h.detach().sum()) > 1e9:
            o = -o
        return self.loss(o, h, c, x, y, m)


def rows(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="none")


def ce(o: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), **options)


def focal(losses: Tensor) -> Tensor:
    return (1 - torch.exp(-losses)) ** 2 * losses


def with_parts(loss: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return loss + penalty, loss, penalty


def with_total(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return first, second, first + 0.3 * second


def chunked(o: Tensor, y: Tensor) -> Tensor:
    parts = zip(o.chunk(3, 1), y.chunk(3, 1), strict=True)
    return torch.stack([ce(a, b, reduction="sum") for a, b in parts]).sum() / y.numel()


LIKELIHOODS: dict[str, tuple[Loss, str]] = {
    "plain": (lambda o, h, c, x, y, m: ce(o, y), "all"),
    "a factor": (lambda o, h, c, x, y, m: 3 * ce(o, y), "all"),
    "a negative": (lambda o, h, c, x, y, m: -ce(o, y), "all"),
    "a sum": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum"), "one"),
    "a sum by a given number": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum") / 7, "seven"),
    "a sum by a number of the batch": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum") / m[0, 0].mul(7), "seven"),
    "a sum times an inverse": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum") * (1 / m[0, 0].mul(7)), "seven"),
    "a sum by size": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum") / x.shape[0], "all"),
    "a sum by len": (lambda o, h, c, x, y, m: ce(o, y, reduction="sum") / len(x), "all"),
    "weights of cases": (lambda o, h, c, x, y, m: (rows(o, y) * (1 + x[..., 0] ** 2).flatten()).mean(), "all"),
    "a product with a mask": (lambda o, h, c, x, y, m: (rows(o, y) * m.flatten()).sum() / m.sum(), "masked"),
    "a mean of a product with a mask": (lambda o, h, c, x, y, m: (rows(o, y) * m.flatten()).mean(), "all"),
    "a mean by size of a product with a mask": (
        lambda o, h, c, x, y, m: (rows(o, y) * m.flatten()).sum() / m.numel(), "all"
    ),
    "a mean of ignored targets": (
        lambda o, h, c, x, y, m: rows(o, torch.where(m > 0, y, -100)).mean(), "all"
    ),
    "where a mask is": (
        lambda o, h, c, x, y, m: torch.where(m.flatten() > 0, rows(o, y), 0.0).sum() / m.sum().clamp(min=1), "masked"
    ),
    "rows of a mask": (lambda o, h, c, x, y, m: rows(o, y)[m.flatten() > 0].mean(), "masked"),
    "a mask in a dot": (lambda o, h, c, x, y, m: rows(o, y) @ m.flatten() / m.sum(), "masked"),
    "means of sequences": (
        lambda o, h, c, x, y, m: ((rows(o, y).view(m.shape) * m).sum(1) / m.sum(1)).mean(), "cases"
    ),
    "two heads": (lambda o, h, c, x, y, m: ce(o, y) + 0.3 * ce(c, y), "all"),
    "two kinds of heads": (lambda o, h, c, x, y, m: ce(o, y) + 0.3 * F.mse_loss(c, x[..., :C]), "all"),
    "parts before their total": (
        lambda o, h, c, x, y, m: with_total(ce(o, y), F.mse_loss(c, x[..., :C])), "all"
    ),
    "squares without a mean": (lambda o, h, c, x, y, m: F.mse_loss(o, x[..., :C], reduction="none").mean(), "cases"),
    "squares and a mask": (
        lambda o, h, c, x, y, m: (F.mse_loss(o, x[..., :C], reduction="none") * m[..., None]).sum() / m.sum(), "cases"
    ),
    "chunks": (lambda o, h, c, x, y, m: chunked(o, y), "all"),
    "steps": (lambda o, h, c, x, y, m: sum(F.cross_entropy(o[:, t], y[:, t]) for t in range(T)) / T, "all"),
    "a number called loss": (lambda o, h, c, x, y, m: {"log": ce(c, y), "loss": 2 * ce(o, y)}, "all"),
}  # fmt: skip
OTHERS: dict[str, tuple[Loss, str]] = {
    "label smoothing": (lambda o, h, c, x, y, m: ce(o, y, label_smoothing=0.2), "all"),
    "weights of classes": (lambda o, h, c, x, y, m: ce(o, y, weight=WEIGHT), "all"),
    "focal": (lambda o, h, c, x, y, m: focal(rows(o, y)).mean(), "all"),
    "focal, twice computed": (lambda o, h, c, x, y, m: ((1 - torch.exp(-rows(o, y))) ** 2 * rows(o, y)).mean(), "all"),
    "focal and a mask": (lambda o, h, c, x, y, m: (focal(rows(o, y)) * m.flatten()).sum() / m.sum(), "masked"),
    "a penalty": (lambda o, h, c, x, y, m: ce(o, y) + 0.5 * h.square().mean(), "all"),
    "a penalty of a fourth power": (lambda o, h, c, x, y, m: ce(o, y) + 0.5 * h.pow(4).mean(), "all"),
    "a penalty of a mean": (lambda o, h, c, x, y, m: ce(o, y) + h.mean((0, 1)).square().sum(), "all"),
    "z-loss": (lambda o, h, c, x, y, m: ce(o, y) + 0.1 * o.logsumexp(-1).square().mean(), "all"),
    "a gate": (lambda o, h, c, x, y, m: (rows(o, y) * h[..., 0].sigmoid().flatten()).mean(), "all"),
    "probabilities": (lambda o, h, c, x, y, m: 2 * ce(o, y) + F.cross_entropy(
        o.flatten(0, 1) / 2, x[..., :C].softmax(-1).flatten(0, 1)), "all"),
    "the hardest cases": (lambda o, h, c, x, y, m: rows(o, y).topk(6).values.mean(), "all"),
    "a total and its parts": (lambda o, h, c, x, y, m: with_parts(ce(o, y), h.square().mean()), "all"),
    "a clamp": (lambda o, h, c, x, y, m: (rows(o, y) - 0.8).clamp(min=0).mean(), "all"),
}  # fmt: skip
KINDS = LIKELIHOODS | OTHERS
QUICK = {
    ("a product with a mask", False, True),
    ("means of sequences", False, False),
    ("means of sequences", False, True),
    ("a mean by size of a product with a mask", False, True),
    ("a mean of a product with a mask", False, False),
    ("a mean of a product with a mask", False, True),
    ("a mean of ignored targets", False, False),
    ("chunks", False, False),
    ("a sum by a given number", False, True),
    ("a sum times an inverse", False, True),
    ("a sum by a number of the batch", False, False),
    ("z-loss", True, False),
    ("weights of classes", True, True),
    ("focal, twice computed", False, False),
}


def marked(names: Any, quick: Any) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    x, y, mask = torch.randn(N, T, 4), torch.randint(C, (N, T)), (torch.rand(N, T) > 0.4).double()
    mask[:, 0] = 1
    return x, y, mask


def number(kind: str, mask: Tensor) -> float:
    """The multiple of the returned loss that is the sum over its rows."""
    return {"all": N * T, "one": 1, "seven": 7, "cases": N, "masked": float(mask.sum())}[KINDS[kind][1]]


def main_number(returned: Any) -> Tensor:
    value: Tensor = returned["loss"] if isinstance(returned, dict) else returned
    return max(value) if isinstance(value, tuple) else value  # the total of terms that are not negative


def gradients(model: Trained, kind: str, args: tuple[Tensor, ...], names: set[str]) -> Tensor:
    """[N, numbers], of the parameters with these names."""
    learned = {name: value.detach() for name, value in model.body.named_parameters()}
    copies = {name: value.expand(N, *value.shape).clone().requires_grad_() for name, value in learned.items()}
    one_by_one = [
        functional_call(model.body, {name: value[n] for name, value in copies.items()}, (args[0][n : n + 1],))
        for n in range(N)
    ]
    o, h, c = (torch.cat(parts) for parts in zip(*one_by_one, strict=True))
    loss = main_number(model.loss(o, h, c, *args))
    kept = [copies[name] for name in learned if f"body.{name}" in names]
    grads = torch.autograd.grad(loss, kept, allow_unused=True, materialize_grads=True)
    return number(kind, args[2]) * torch.cat([grad.flatten(1) for grad in grads], 1)


EVERY = [(kind, odd, divided) for kind in KINDS for odd in (False, True) for divided in (False, True)]


@pytest.mark.parametrize(
    ("kind", "odd", "divided"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY],
)
def test_an_example_has_its_part_of_the_returned_loss(kind: str, odd: bool, divided: bool) -> None:
    if odd and divided and (kind in ("z-loss", "a gate", "a total and its parts") or "penalty" in kind):
        pytest.skip("refused, see below")
    model, args = Trained(KINDS[kind][0], odd, divided).eval(), batch()
    net = kfac_fx.compile(model, tuple(value[:3] for value in args))
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(*args)
    spectrum = estimator.spectrum(damping=1.0)
    wanted = gradients(model, kind, args, {name for block in net.registrations for name in block.owners})
    identity = spectrum.at(scale=0.0, damping=1.0)
    scores = identity.precondition(Batch(*args)).scores(Batch(*args))
    torch.testing.assert_close(scores, wanted @ wanted.T)
    torch.testing.assert_close(identity.self_scores(Batch(*args)), wanted.square().sum(1))
    corrected = spectrum.correct([Batch(*args)], "sequence").at(scale=1.0, damping=0.0)
    trace = sum(values.sum() for values in corrected.eigenvalues().values())
    torch.testing.assert_close(trace, wanted.square().sum(1).mean())


@pytest.mark.parametrize("kind", marked([kind for kind in OTHERS if kind != "the hardest cases"], {"label smoothing"}))
def test_empirical_factors_are_of_the_returned_loss(kind: str) -> None:
    """One position an example, where the full factor is the mean of the squares of the gradients."""
    model, (x, y, mask) = Trained(OTHERS[kind][0]).eval(), batch()
    args = x[:, :1], y[:, :1], mask[:, :1]
    net = kfac_fx.compile(model, tuple(value[:3] for value in args), approximations={"*": "full"})
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(*args)
    wanted = gradients(model, kind, args, {"body.b.weight", "body.b.bias"})
    wanted = wanted * N / number(kind, args[2])  # every mask has the first position
    trace = sum(estimator.spectrum(damping=0.0).eigenvalues()["body.b.weight", "body.b.bias"].flatten())
    torch.testing.assert_close(trace, wanted.square().sum(1).mean())


GIVEN = "a sum by a number of the batch"
WEIGHTS: dict[str, Callable[[Tensor, Tensor], list[tuple[int, Tensor]]]] = {
    "a factor": lambda x, m: [(0, 3 * torch.ones(N * T))],
    "a negative": lambda x, m: [(0, torch.ones(N * T))],
    "a sum by a given number": lambda x, m: [(0, torch.ones(N * T))],
    "a sum by a number of the batch": lambda x, m: [(0, torch.ones(N * T))],
    "a sum by len": lambda x, m: [(0, torch.full((N * T,), float(T)))],
    "weights of cases": lambda x, m: [(0, (1 + x[..., 0] ** 2).flatten())],
    "a product with a mask": lambda x, m: [(0, m.flatten() * (N * T / m.sum()))],
    "rows of a mask": lambda x, m: [(0, m.flatten() * (N * T / m.sum()))],
    "two heads": lambda x, m: [(0, torch.ones(N * T)), (2, torch.full((N * T,), 0.3))],
    "chunks": lambda x, m: [(0, torch.ones(N * T))],
}


@pytest.mark.parametrize("divided", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", marked(WEIGHTS, {"weights of cases", "a product with a mask", GIVEN}))
def test_the_fisher_of_a_weighted_likelihood_has_its_weights(kind: str, divided: bool) -> None:
    model, args = Trained(LIKELIHOODS[kind][0], divided=divided).eval(), batch()
    net = kfac_fx.compile(model, tuple(value[:3] for value in args), approximations={"*": "diagonal"})
    estimator = FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(*args)
    learned = dict(model.body.named_parameters())
    wanted = torch.zeros(learned["b.weight"].shape)
    for place, weights in WEIGHTS[kind](args[0], args[2]):
        jacobian = jacrev(lambda p, place=place: functional_call(model.body, p, (args[0],))[place].flatten(0, 1))(
            learned
        )
        p = model.body(args[0])[place].flatten(0, 1).softmax(-1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        by_row = jacobian["b.weight"] if place == 0 else jacobian["b.weight"] * 0
        wanted += torch.einsum("n,nc...,ncd,nd...->...", weights, by_row, hessian, by_row).detach() / (N * T)
    torch.testing.assert_close(estimator.spectrum(damping=0.0).diagonal()["body.b.weight"], wanted)


@pairs(("divided", [False, True]), ("mode", ["exact", "empirical"]))
def test_a_sum_that_is_divided_by_the_cases_of_a_step_has_the_factors_of_their_mean(mode: str, divided: bool) -> None:
    x, y, mask = batch()
    diagonals = []
    for loss, parts in ((LIKELIHOODS["plain"][0], [N]), (lambda *a: LIKELIHOODS["a sum"][0](*a) / (N * T), [3, 2])):
        torch.manual_seed(0)
        net = kfac_fx.compile(Trained(loss, divided=divided).eval(), (x, y, mask), approximations={"*": "diagonal"})
        estimator = FisherEstimator(net, estimation_mode=mode)
        for args in zip(*(value.split(parts) for value in (x, y, mask)), strict=True):
            estimator.update_covariances(*args, fold=False)
        estimator.fold()
        diagonals.append(estimator.spectrum(damping=0.0).diagonal())
    torch.testing.assert_close(*diagonals)


def test_terms_of_no_row_have_no_rows() -> None:
    x, y, mask = batch()
    penalty = OTHERS["a penalty of a fourth power"][0]
    net = kfac_fx.compile(Trained(penalty).eval(), (x, y, mask))
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, y, mask)
    with pytest.raises(LossError, match=r'belong to no single row of its losses, at pow.*Write case="sequence"'):
        estimator.spectrum().correct([Batch(x, y, mask)], "row")


def test_terms_of_python_are_in_the_scores_of_a_divided_model() -> None:
    x, y, mask = batch()
    scores = []
    for divided in (False, True):
        torch.manual_seed(0)
        net = kfac_fx.compile(Trained(OTHERS["a penalty"][0], odd=True, divided=divided).eval(), (x, y, mask))
        assert net.recorder((x, y, mask), {}).whole is not divided
        estimator = FisherEstimator(net, estimation_mode="empirical")
        estimator.update_covariances(x, y, mask)
        scores.append(estimator.spectrum(damping=1.0).self_scores(Batch(x, y, mask)))
    torch.testing.assert_close(scores[1], scores[0])


class TwoPasses(nn.Module):
    """A term of a second pass through the layers; `second` is of (the module, the first activations, the inputs)."""

    def __init__(self, second: Callable[[Any, Tensor, Tensor], Tensor], python: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.second, self.python = nn.Linear(4, 5), nn.Linear(5, C), second, python

    def logits(self, x: Tensor) -> Tensor:
        z: Tensor = self.b(torch.tanh(self.a(x)))
        return z

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        loss = F.cross_entropy(self.b(h), y, reduction="sum")
        if self.python and loss > 1e9:
            loss = 2 * loss
        return loss + 0.3 * self.second(self, h, x)


SECOND: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "logits": lambda model, h, x: model.logits(x + 0.5).cosh().sum(),
    "one layer": lambda model, h, x: torch.tanh(model.a(2 * x)).pow(3).sum(),
    "behind the first": lambda model, h, x: model.b(h @ model.b.weight.T @ model.b.weight).cosh().sum(),
    "a divergence": lambda model, h, x: F.kl_div(
        model.logits(x + 0.5).log_softmax(-1), model.b(h).softmax(-1), reduction="sum"
    ),
}


@pytest.mark.parametrize(("name", "python"), [*((name, False) for name in SECOND), ("logits", True)])
def test_the_terms_of_a_second_pass_are_in_the_gradients_of_examples(name: str, python: bool) -> None:
    """The Fisher's outputs do not depend on it. The gradients were those without it."""
    model = TwoPasses(SECOND[name], python)
    x, y = torch.randn(N, 4), torch.randint(C, (N,))
    net = kfac_fx.compile(model, (x, y))
    assert bool(net.program.submodules) == python
    loss_of_each = [model(x[n : n + 1], y[n : n + 1]) for n in range(N)]
    parameters = list(model.parameters())
    each = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]) for loss in loss_of_each]
    g = torch.stack(each)
    batch = Batch(x, y)
    spectrum = kfac_fx.fit_spectrum(net, [batch], mode="empirical", case="row", damping=1.0)
    plain = spectrum.at(scale=0.0, damping=1.0)
    torch.testing.assert_close(plain.precondition(batch).scores(batch), g @ g.T)
    torch.testing.assert_close(plain.self_scores(batch), g.square().sum(1))
    trace = torch.stack([values.sum() for values in spectrum.at(damping=0.0).eigenvalues().values()]).sum()
    torch.testing.assert_close(trace, g.square().sum() / N)
    if name == "logits" and not python:
        assert "other terms of the loss, or other outputs, use it where" in str(net.report)


def test_a_measurement_of_an_output_of_a_second_pass_has_its_gradients() -> None:
    class Views(TwoPasses):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.logits(x), y), self.logits(x + 0.5)

    model, x, y = Views(SECOND["logits"], False), torch.randn(N, 4), torch.randint(C, (N,))
    spectrum = kfac_fx.fit_spectrum(kfac_fx.compile(model, (x, y)), [Batch(x, y)], mode="exact")

    def first(outputs: Any) -> Tensor:
        logit: Tensor = outputs[1][:, 0]
        return logit

    plain = spectrum.at(scale=0.0, damping=1.0)
    scores = plain.precondition(Batch(x, y), measurement=first).scores(Batch(x, y), measurement=first)
    each = [torch.autograd.grad(model.logits(x[n : n + 1] + 0.5)[0, 0], list(model.parameters())) for n in range(N)]
    g = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
    torch.testing.assert_close(scores, g @ g.T)


def test_outputs_behind_the_layers_of_the_loss_are_no_second_pass() -> None:
    """The bias of a permuted convolution was taken for one: its block took one backward for every example."""

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.bias, self.b = nn.Conv1d(4, 5, 3, bias=False), nn.Parameter(torch.randn(5)), nn.Linear(5, C)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x).mT + self.bias
            return F.cross_entropy(self.b(torch.tanh(h).mean(1)), y), h

    model, x, y = Permuted(), torch.randn(N, 4, 6), torch.randint(C, (N,))
    net = kfac_fx.compile(model, (x, y))
    assert "a.weight, bias" in str(net.report)
    spectrum = kfac_fx.fit_spectrum(net, [Batch(x, y)], mode="empirical", case="row", damping=1.0)
    each = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1])[0], list(model.parameters())) for n in range(N)]
    g = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
    torch.testing.assert_close(spectrum.at(scale=0.0, damping=1.0).self_scores(Batch(x, y)), g.square().sum(1))
    assert "one backward each" not in str(net.report)


def test_a_measurement_is_squared_where_the_loss_is_outside() -> None:
    x, y, model = torch.randn(6, 4), torch.randint(3, (6,)), nn.Linear(4, 3)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = FisherEstimator(net)
    estimator.update_covariances(x)

    def weighed(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=WEIGHT, reduction="none")

    corrected = estimator.spectrum(damping=0.0).correct([(x[:4], y[:4]), (x[4:], y[4:])], measurement=weighed)
    squares = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)]
        ).square()
        for value in weighed(model(x), y)
    ]
    trace = sum(values.sum() for values in corrected.eigenvalues().values())
    torch.testing.assert_close(trace, torch.stack(squares).sum(1).mean())
    with pytest.raises(ValueError, match="mode='exact' is of the distributions of a loss, and a measurement has none"):
        corrected.correct([(x, y)], measurement=weighed, mode="exact")


class Mixing(nn.Module):
    """A layer of every position, the sums of all positions before it if it is `mixed`, and the head."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.layer, self.head, self.mixed = nn.Linear(4, 5), nn.Linear(5, C), mixed

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        h = h.cumsum(1) if self.mixed else h
        return (rows(self.head(h), y) * m.flatten()).sum() / m.sum()


@pytest.mark.parametrize("mode", marked(["exact", "gradients", "empirical"], {"exact"}))
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_that_a_mask_leaves_out_and_nothing_reads_are_in_no_factor(mixed: bool, mode: str) -> None:
    """Rows of a prompt, which later positions read, have gradients; those of padding have none."""
    model, x, y = Mixing(mixed), torch.randn(N, 4, 4), torch.randint(C, (N, 4))
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(N, 1)  # a prompt, two tokens, and padding
    net = kfac_fx.compile(model, (x[:3], y[:3], mask[:3]))
    estimator = FisherEstimator(net, estimation_mode=mode)
    estimator.update_covariances(x, y, mask)
    seen = x[:, :3] if mixed else x[:, 1:3]
    inputs = torch.cat([seen, torch.ones(N, seen.shape[1], 1)], -1).flatten(0, 1)
    A = estimator.blocks["layer.weight", "layer.bias"].factors["A"].value
    torch.testing.assert_close(A.squeeze(0), inputs.T @ inputs / len(inputs))
    h = torch.tanh(model.layer(x))
    h = (h.cumsum(1) if mixed else h)[:, 1:3].detach()
    inputs = torch.cat([h, torch.ones(N, 2, 1)], -1).flatten(0, 1)
    A = estimator.blocks["head.weight", "head.bias"].factors["A"].value
    torch.testing.assert_close(A.squeeze(0), inputs.T @ inputs / len(inputs))


def test_a_model_of_one_size_of_batches_is_taken_as_it_is_written() -> None:
    """With every example twice it does not run, so the number of divisions tells whether the loss is a mean."""

    class OfFour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, C)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if len(x) != 4:
                raise ValueError("batches of four only")
            return 2 * F.cross_entropy(self.layer(x), y, reduction="sum") / 4

    x, y = torch.randn(4, 4), torch.randint(C, (4,))
    net = kfac_fx.compile(OfFour(), (x, y))
    recorder = net.recorder((x, y), {})
    assert recorder.is_mean
    told = "the loss that forward returns is taken for a mean over its cases, as it is written: the model does not run"
    (line,) = (line for line in net.report.fallbacks() if "as it is written" in line)
    assert line.startswith(told) and "(batches of four only)" in line


class TwoLosses(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.number, self.kind, self.by_hand = nn.Linear(4, 1), nn.Linear(4, 3), by_hand

    def forward(self, x: Tensor, y: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        out = self.number(x).squeeze(-1)
        squares = (out - y).square() if self.by_hand else F.mse_loss(out, y, reduction="none")
        return (squares * mask).sum() / mask.sum() + F.cross_entropy(self.kind(x), kinds)


@pytest.mark.filterwarnings("error::kfac_fx.LossScaleWarning")
@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")  # the mask leaves them out
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_squares_by_hand_next_to_a_loss_of_torch_are_a_loss(by_hand: bool, exported: bool) -> None:
    """Their head had no Fisher block, and a warning said to write them as F.mse_loss."""
    torch.manual_seed(0)
    batch = torch.randn(8, 4), 5 * torch.randn(8), torch.randint(3, (8,)), torch.arange(8) < 6
    net = kfac_fx.compile(TwoLosses(by_hand), batch if exported else None)
    optimizer = kfac_fx.KFAC(net)
    net(*batch).backward()
    optimizer.step()
    assert len(net.program.losses) == len(net.registrations) == 2
    first, second = net.report.sections()[0][1]
    assert first.startswith(("square (", "mse_loss (")) and first.endswith("): normal")
    assert second.startswith("cross_entropy") and second.endswith("): categorical")


class Weighed(nn.Module):
    """Weighs classes, one of them with zero, and smooths labels; in one graph, or with a loss that Python computes."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.head, self.divided = nn.Linear(4, 3), divided

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.head(x)
        if self.divided:
            out = out if float(x.sum()) < 1e9 else -out
        return F.cross_entropy(out, y, weight=torch.tensor([1.0, 0.0, 3.0]), label_smoothing=0.1)


@pytest.mark.filterwarnings("error:.*have no target:UserWarning")
@pytest.mark.parametrize("divided", [False, True])
def test_a_smoothed_target_of_a_class_without_weight_is_a_target(divided: bool) -> None:
    """It has a part of the other classes. It was taken for an ignored one: its score was zero, and others too small."""
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 1, 0, 2])
    model = Weighed(divided).eval()
    net = kfac_fx.compile(model, (x, y))
    spectrum = kfac_fx.fit_spectrum(net, [Batch(x, y)], mode="empirical")
    weight = torch.tensor([1.0, 0.0, 3.0])
    each = 6 * F.cross_entropy(model.head(x), y, weight, label_smoothing=0.1, reduction="none") / weight[y].sum()
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(value, parameters, retain_graph=True) for value in each]
    g = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in gradients])
    scores = spectrum.at(scale=0.0, damping=1.0).self_scores(Batch(x, y))
    torch.testing.assert_close(scores, g.square().sum(1))


@pytest.mark.parametrize("smoothing", [0.0, 1e-9])
def test_the_rows_of_two_heads_are_the_same_rows(smoothing: float) -> None:
    """Without smoothing the gradient of each head was squared apart, and with 1e-9 that of both."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kind, self.place = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
            h = self.body(x).tanh()
            return F.cross_entropy(self.kind(h), y, label_smoothing=smoothing) + F.mse_loss(self.place(h), places)

    model, args = Heads().eval(), (torch.randn(6, 4), torch.randint(3, (6,)), torch.randn(6, 2))
    net = kfac_fx.compile(model, args)
    spectrum = kfac_fx.fit_spectrum(net, [Batch(*args)], mode="empirical", case="row", damping=0.0)
    parameters = list(model.parameters())
    each = [torch.autograd.grad(model(*(value[n : n + 1] for value in args)), parameters) for n in range(6)]
    squares = torch.stack([torch.cat([part.flatten() for part in parts]).square().sum() for parts in each])
    trace = sum(values.sum() for values in spectrum.eigenvalues().values())
    torch.testing.assert_close(trace, squares.mean(), rtol=1e-6, atol=0.0)
