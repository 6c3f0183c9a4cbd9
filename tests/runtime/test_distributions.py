"""Loss functions: golden values, the Fisher's factors against autograd, sampling."""

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn import functional as F

from kfac_fx.losses import (
    Categorical,
    LossFunction,
    MultiBernoulli,
    Normal,
    NormalMeanVariance,
    OnehotCategorical,
    Poisson,
)
from kfac_fx.losses.distributions import number_of_sources
from kfac_fx.passes.errors import LossError, TargetsMissing

NATURAL: dict[str, Callable[[Tensor], LossFunction]] = {
    "categorical": Categorical,
    "onehot": OnehotCategorical,
    "normal": lambda x: Normal(x, var=0.7),
    "multi_bernoulli": MultiBernoulli,
    "poisson": Poisson,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def hessian_of(loss: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    return jacrev(jacrev(loss))(inputs)  # type: ignore[no-any-return]


def factor_matrix(loss: LossFunction) -> Tensor:
    """B of a loss with one case, column by column."""
    basis = torch.eye(loss.inputs.numel(), dtype=torch.float64).reshape(-1, *loss.fisher_factor_inner_shape)
    return torch.stack([loss.multiply_fisher_factor(e).flatten() for e in basis], dim=1)


TARGETS: dict[str, tuple[Callable[[Tensor], LossFunction], Tensor]] = {
    "categorical": (Categorical, torch.tensor([[1, 0, 3], [2, -100, 1]])),
    "onehot": (OnehotCategorical, F.one_hot(torch.tensor([[1, 0, 3], [2, 2, 1]]), 4).double()),
    "multi_bernoulli": (MultiBernoulli, (random(2, 3, 4, seed=1) > 0).double()),
    "poisson": (Poisson, torch.arange(24.0, dtype=torch.float64).view(2, 3, 4) % 5),
    "normal_mean_variance": (
        lambda x: NormalMeanVariance(*x.exp().chunk(2, -1)),
        random(2, 3, 2, seed=1),
    ),
}


@pytest.mark.parametrize(("make", "targets"), TARGETS.values(), ids=TARGETS)
def test_the_targets_behind_a_gradient_are_those_it_is_of(
    make: Callable[[Tensor], LossFunction], targets: Tensor
) -> None:
    loss = make(random(2, 3, 4))
    loss.inputs.requires_grad_()
    (gradient,) = torch.autograd.grad(0.3 * loss.with_targets(targets).evaluate(), loss.inputs)
    torch.testing.assert_close(loss.targets_behind(gradient), targets)


def as_in_torch(name: str, inputs: Tensor) -> torch.distributions.Distribution:
    if name in ("categorical", "onehot"):
        return torch.distributions.Categorical(logits=inputs)
    if name == "normal":
        return torch.distributions.Normal(inputs, math.sqrt(0.7))
    return (
        torch.distributions.Poisson(inputs.exp()) if name == "poisson" else torch.distributions.Bernoulli(logits=inputs)
    )


@pytest.mark.parametrize("name", NATURAL)
def test_divergence_and_entropy_are_those_of_torch(name: str) -> None:
    """KL(p(other) || p(inputs)), as the change of a loss from `other` to `inputs` has it."""
    inputs, other = 2 * random(2, 3, 4), random(2, 3, 4, seed=1)
    loss = NATURAL[name](inputs)
    expected = torch.distributions.kl_divergence(as_in_torch(name, other), as_in_torch(name, inputs)).sum()
    torch.testing.assert_close(loss.divergence_from(other), expected)
    entropy = loss.entropy()
    assert (entropy is None) == (name in ("normal", "poisson"))
    if entropy is not None:
        torch.testing.assert_close(entropy, as_in_torch(name, inputs).entropy().sum())


def test_golden_categorical() -> None:
    loss = Categorical(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), targets=torch.tensor([0, 1]))
    assert loss.evaluate().item() == pytest.approx(1.6265233, abs=1e-6)


def test_golden_normal() -> None:
    mean, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[3.0, 1.0], [4.0, 2.0]])
    assert Normal(mean, var=4.0, targets=targets).evaluate().item() == pytest.approx(7.6983433, abs=1e-6)


def test_golden_poisson() -> None:
    """Rates 1 and 2 and counts 0 and 3: -log p is 1 and 2 - 3 log 2 + log 6."""
    log_rates, targets = torch.tensor([[0.0, math.log(2)]]), torch.tensor([[0.0, 3.0]])
    loss = Poisson(log_rates, targets)
    assert loss.evaluate().item() == pytest.approx(2.7123180, abs=1e-6)
    torch_loss = F.poisson_nll_loss(log_rates, targets, reduction="sum")
    torch.testing.assert_close(loss.evaluate() - loss.constant(), torch_loss)


def test_a_poisson_gradient_that_is_negative_everywhere_tells_no_counts() -> None:
    """The factor of the loss is known from a count of zero, where the gradient is positive."""
    gradient = random(2, 3).exp() - 100
    assert Poisson(random(2, 3)).targets_behind(gradient) is None


def test_categorical_and_onehot_agree_with_the_log_softmax() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([2, 1])
    expected = -logits.log_softmax(-1)[torch.arange(2), targets].sum()
    torch.testing.assert_close(Categorical(logits, targets).evaluate(), expected)
    torch.testing.assert_close(OnehotCategorical(logits, F.one_hot(targets, 3)).evaluate(), expected)


BEHIND: dict[str, tuple[Callable[[Tensor], LossFunction], Tensor]] = {
    **{name: TARGETS[name] for name in ("categorical", "onehot", "multi_bernoulli")},
    "normal": (NATURAL["normal"], random(2, 3, 4, seed=1)),
    "poisson": TARGETS["poisson"],
    "probabilities of classes": (OnehotCategorical, random(2, 3, 4, seed=1).softmax(-1)),
    "probabilities of events": (MultiBernoulli, random(2, 3, 4, seed=1).sigmoid()),
}


@pytest.mark.parametrize(("make", "targets"), BEHIND.values(), ids=BEHIND)
def test_a_gradient_tells_the_value_of_its_loss_and_how_it_changes(
    make: Callable[[Tensor], LossFunction], targets: Tensor
) -> None:
    """Up to a constant: what ignored cases and a normal's variance add."""
    here, there = 2 * random(2, 3, 4), random(2, 3, 4, seed=2)
    loss, new = make(here.requires_grad_()), make(there)
    value = loss.with_targets(targets).evaluate()
    (gradient,) = torch.autograd.grad(value, here)
    kept = (targets != -100).unsqueeze(-1) if targets.dim() == 2 else torch.ones_like(here, dtype=torch.bool)
    known = make(here.detach()).value_behind(gradient)
    assert known is not None
    if isinstance(loss, Normal):
        known = known + 0.5 * math.log(2 * math.pi * loss.var) * here.numel()
    elif isinstance(loss, Poisson):
        known = known + torch.lgamma(targets + 1).sum()
    elif not kept.all():
        known = known - (here.log_softmax(-1).exp() * -here.log_softmax(-1))[~kept.expand_as(here)].sum()
    torch.testing.assert_close(known, value)
    change = make(here.detach()).change_behind(gradient, make(torch.where(kept, there, here.detach())))
    torch.testing.assert_close(change, new.with_targets(targets).evaluate() - value)


@pytest.mark.parametrize("penalty", [lambda z: z.logsumexp(-1).square(), lambda z: z.square().sum(-1)])
def test_terms_next_to_a_cross_entropy_change_by_their_slope(penalty: Callable[[Tensor], Tensor]) -> None:
    here = (2 * random(2, 3, 4)).requires_grad_()
    new, targets = here.detach() + 1e-5 * random(2, 3, 4, seed=2), TARGETS["categorical"][1]

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="sum") + 0.5 * penalty(z).sum()

    (gradient,) = torch.autograd.grad(loss(here), here)
    change = Categorical(here.detach()).change_behind(gradient, Categorical(new))
    torch.testing.assert_close(change, (loss(new) - loss(here)).detach(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["categorical", "multi_bernoulli"])
def test_a_small_loss_of_large_logits_keeps_its_relative_precision(name: str) -> None:
    """Where all cases were fitted: the entropy and <g, z> would cancel, and leave 1e-5 of a loss of 1e-7."""
    draws = torch.Generator().manual_seed(0)
    if name == "categorical":
        targets = torch.randint(4, (60,), generator=draws)
        logits = 20 * F.one_hot(targets, 4) + torch.randn(60, 4, generator=draws) + 30
        loss, make = partial(F.cross_entropy, target=targets, reduction="sum"), Categorical
    else:
        targets = torch.randint(2, (60,), generator=draws).float()
        logits = (2 * targets - 1) * (18 + torch.randn(60, generator=draws))
        loss, make = partial(F.binary_cross_entropy_with_logits, target=targets, reduction="sum"), MultiBernoulli
    further = 1.1 * logits
    (gradient,) = torch.autograd.grad(loss(logits.requires_grad_()), logits)  # as users have it, in float32
    exact = {
        of: float(
            loss(z.detach().double())
            if name == "categorical"
            else F.softplus(-(2 * targets.double() - 1) * z.detach().double()).sum()
        )
        for of, z in (("here", logits), ("there", further))
    }
    at = make(logits.detach())
    assert exact["here"] < 1e-5
    assert float(at.value_behind(gradient)) == pytest.approx(exact["here"], rel=1e-4)
    change = float(at.change_behind(gradient, make(further.detach())))
    assert change == pytest.approx(exact["there"] - exact["here"], rel=1e-4)


def test_classes_that_a_logit_of_minus_infinity_rules_out_leave_values_finite() -> None:
    logits = random(3, 4)
    logits[:, 2] = -math.inf
    loss, gradient = Categorical(logits), logits.softmax(-1) - F.one_hot(torch.tensor([0, 1, 3]), 4)
    value = loss.value_behind(gradient)
    assert value is not None
    torch.testing.assert_close(value, F.cross_entropy(logits, torch.tensor([0, 1, 3]), reduction="sum"))
    expected = F.cross_entropy(2 * logits, torch.tensor([0, 1, 3]), reduction="sum") - value
    torch.testing.assert_close(loss.change_behind(gradient, Categorical(2 * logits)), expected)


def test_the_default_normal_is_the_squared_error_and_a_constant() -> None:
    mean, targets = random(3, 4), random(3, 4, seed=1)
    expected = (mean - targets).square().sum() + 12 * 0.5 * math.log(math.pi)
    torch.testing.assert_close(Normal(mean, targets=targets).evaluate(), expected)


def test_multi_bernoulli_is_the_sigmoid_cross_entropy_of_integer_targets() -> None:
    logits, targets = random(3, 4), torch.tensor([[0, 1, 1, 0]] * 3)
    expected = F.binary_cross_entropy(logits.sigmoid(), targets.double(), reduction="sum")
    torch.testing.assert_close(MultiBernoulli(logits, targets).evaluate(), expected)


def test_normal_with_a_variance_is_torch_gaussian_nll() -> None:
    mean, variance, targets = random(3, 2), random(3, 2, seed=1).exp(), random(3, 2, seed=2)
    expected = F.gaussian_nll_loss(mean, targets, variance, full=True, eps=0, reduction="sum")
    torch.testing.assert_close(NormalMeanVariance(mean, variance, targets=targets).evaluate(), expected)


def test_left_out_targets_add_nothing() -> None:
    logits = random(3, 4)
    some = Categorical(logits, torch.tensor([1, -100, 2])).evaluate()
    torch.testing.assert_close(some, Categorical(logits[[0, 2]], torch.tensor([1, 2])).evaluate())


@pytest.mark.parametrize("make", NATURAL.values(), ids=NATURAL)
def test_the_factor_squares_to_the_hessian_of_the_loss(make: Callable[[Tensor], LossFunction]) -> None:
    inputs = random(1, 3)
    targets = make(inputs).sample(torch.Generator().manual_seed(0))
    hessian = hessian_of(lambda x: make(x).with_targets(targets).evaluate(), inputs)
    b = factor_matrix(make(inputs))
    torch.testing.assert_close(b @ b.T, hessian.reshape(3, 3))


def test_the_factor_of_a_normal_with_a_variance_squares_to_the_expected_hessian() -> None:
    mean, variance = random(1, 2), random(1, 2, seed=1).exp()
    inputs = torch.cat([mean, variance], dim=-1)

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return NormalMeanVariance(x[:, :2], x[:, 2:], targets=targets).evaluate()

    # The Hessian is a polynomial of degree 2 in the targets and has no cross terms: three Gauss-Hermite nodes do.
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for node, weight in ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6)):
        targets = mean + node * variance.sqrt()
        hessian = hessian_of(partial(loss, targets=targets), inputs)
        expected += weight * hessian.reshape(4, 4)
    b = factor_matrix(NormalMeanVariance(mean, variance))
    torch.testing.assert_close(b @ b.T, expected)


LOSSES = {**NATURAL, "normal_mean_variance": lambda x: NormalMeanVariance(x[..., :2], x[..., 2:4].exp())}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_factor_products_agree_with_each_other(make: Callable[[Tensor], LossFunction]) -> None:
    loss = make(random(5, 4))
    u, v = random(*loss.fisher_factor_inner_shape, seed=1), random(5, 4, seed=2)
    forward = (loss.multiply_fisher_factor(u) * v).sum()
    torch.testing.assert_close(forward, (u * loss.multiply_fisher_factor_transpose(v)).sum())
    composed = loss.multiply_fisher_factor(loss.multiply_fisher_factor_transpose(v))
    torch.testing.assert_close(loss.multiply_fisher(v), composed)


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_the_replicated_one_hots_sum_to_the_fisher(make: Callable[[Tensor], LossFunction]) -> None:
    loss = make(random(5, 4))
    v = random(5, 4, seed=2)
    columns = [loss.multiply_fisher_factor_replicated_one_hot((k,)) for k in range(4)]
    total = torch.stack([column * (column * v).sum(-1, keepdim=True) for column in columns]).sum(0)
    torch.testing.assert_close(total, loss.multiply_fisher(v))
    torch.testing.assert_close(columns[1], loss.multiply_fisher_factor_replicated_one_hot(1))


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_the_columns_of_the_factor_make_the_fisher(make: Callable[[Tensor], LossFunction]) -> None:
    loss = make(random(5, 4))
    v = random(5, 4, seed=2)
    columns = [loss.multiply_fisher_factor(basis.expand(5, 4)) for basis in torch.eye(4, dtype=v.dtype)]
    total = torch.stack([column * (column * v).sum(-1, keepdim=True) for column in columns]).sum(0)
    torch.testing.assert_close(total, loss.multiply_fisher(v))


@pytest.mark.parametrize("make", NATURAL.values(), ids=NATURAL)
def test_the_gauss_newton_products_are_the_fishers(make: Callable[[Tensor], LossFunction]) -> None:
    loss, v = make(random(5, 3)), random(5, 3, seed=1)
    assert loss.ggn_factor_inner_shape == loss.fisher_factor_inner_shape
    torch.testing.assert_close(loss.multiply_ggn(v), loss.multiply_fisher(v))
    torch.testing.assert_close(loss.multiply_ggn_factor(v), loss.multiply_fisher_factor(v))
    torch.testing.assert_close(loss.multiply_ggn_factor_transpose(v), loss.multiply_fisher_factor_transpose(v))
    one_hot = loss.multiply_fisher_factor_replicated_one_hot(2)
    torch.testing.assert_close(loss.multiply_ggn_factor_replicated_one_hot(2), one_hot)


def test_the_fisher_of_logits_without_a_batch_axis() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    p, v = logits.softmax(0), random(4, 3)
    expected = v @ (torch.diag(p) - torch.outer(p, p))
    torch.testing.assert_close(Categorical(logits).multiply_fisher(v), expected)
    torch.testing.assert_close(Categorical(logits).multiply_fisher(v[0]), expected[0])
    assert Categorical(logits).cases == 1


def test_cases_are_distributions_for_classes_and_rows_for_the_rest() -> None:
    x = random(4, 5, 3)
    assert Categorical(x).cases == 20
    assert Normal(x).cases == MultiBernoulli(x).cases == 4


@pytest.mark.parametrize("make", [Normal, MultiBernoulli, lambda x: NormalMeanVariance(x, x.exp())])
def test_cases_of_one_number_each_may_have_no_axis_for_it(make: Callable[[Tensor], LossFunction]) -> None:
    flat, column = make(random(5)), make(random(5, 1))
    assert flat.cases == column.cases == 5 and number_of_sources([(1.0, flat)], "exact") == flat.inputs.numel() // 5
    drawn = flat.sample(torch.Generator().manual_seed(0))
    assert drawn.shape == (5,)
    torch.testing.assert_close(flat.with_targets(drawn).evaluate(), column.with_targets(drawn.unsqueeze(-1)).evaluate())


def check_mean(values: Tensor, expected: Tensor, variance: Tensor) -> None:
    """The mean of n draws lies within five of its own standard errors."""
    error = (values.double().mean(0) - expected).abs()
    assert (error <= 5 * (variance / len(values)).sqrt()).all(), error


def test_samples_have_the_moments_of_the_distribution() -> None:
    n, generator = 20_000, torch.Generator().manual_seed(0)
    logits = random(3)
    p = logits.softmax(0)
    classes = Categorical(logits.expand(n, 3)).sample(generator)
    assert classes.shape == (n,)
    check_mean(F.one_hot(classes, 3), p, p * (1 - p))
    check_mean(OnehotCategorical(logits.expand(n, 3)).sample(generator), p, p * (1 - p))
    q = logits.sigmoid()
    check_mean(MultiBernoulli(logits.expand(n, 3)).sample(generator), q, q * (1 - q))
    values = Normal(logits.expand(n, 3), var=0.3).sample(generator)
    check_mean(values, logits, torch.full((3,), 0.3))
    check_mean((values - logits).square(), torch.full((3,), 0.3), torch.full((3,), 2 * 0.3**2))
    variance = p
    values = NormalMeanVariance(logits.expand(n, 3), variance.expand(n, 3)).sample(generator)
    check_mean((values - logits).square(), variance, 2 * variance.square())


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_sampling_is_reproducible_and_leaves_torchs_own_stream(make: Callable[[Tensor], LossFunction]) -> None:
    loss = make(random(6, 4))
    before = torch.get_rng_state()
    first = loss.sample(torch.Generator().manual_seed(3))
    assert torch.equal(first, loss.sample(torch.Generator().manual_seed(3)))
    loss.seed = 3
    assert torch.equal(first, loss.sample())
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(loss.evaluate_on_sample(), loss.with_targets(first).evaluate())


def test_the_sample_is_a_constant() -> None:
    mean = random(3, 2).requires_grad_()
    sample = Normal(mean).sample(torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(Normal(mean).evaluate_on_sample(torch.Generator().manual_seed(0)), mean)
    torch.testing.assert_close(gradient, 2 * (mean - sample).detach())


@pytest.mark.parametrize("make", NATURAL.values(), ids=NATURAL)
def test_half_precision_is_computed_in_single(make: Callable[[Tensor], LossFunction]) -> None:
    inputs = random(5, 4).bfloat16()
    loss, v = make(inputs), random(5, 4, seed=1).float()
    assert loss.evaluate_on_sample(torch.Generator().manual_seed(0)).dtype is torch.float32
    assert torch.equal(loss.multiply_fisher_factor(v), make(inputs.float()).multiply_fisher_factor(v))
    assert loss.multiply_fisher_factor(v.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_missing_targets_say_what_to_pass(make: Callable[[Tensor], LossFunction]) -> None:
    text = r"a \w+ loss of inputs \[2, \d\] is evaluated and has no targets: build .*\(\.\.\., targets=y\), .* with y "
    with pytest.raises(TargetsMissing, match=text):
        make(random(2, 4)).evaluate()


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_targets_of_a_wrong_shape_are_refused(make: Callable[[Tensor], LossFunction]) -> None:
    with pytest.raises(LossError, match=r"targets have shape \[7, 7, 7\], expected \[2"):
        make(random(2, 4)).with_targets(torch.zeros(7, 7, 7)).evaluate()


def test_a_variance_must_be_a_positive_float() -> None:
    for var in (0.0, -1.0, math.nan, torch.tensor(1.0)):
        with pytest.raises(LossError, match=r"Normal: var is .*; it must be a positive float"):
            Normal(random(2, 2), var=var)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1,), (5, 1)])
def test_a_single_class_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LossError, match=rf"logits of shape {re.escape(str(list(shape)))} have one class"):
        Categorical(torch.zeros(shape))


def test_mean_and_variance_must_fit() -> None:
    with pytest.raises(LossError, match=r"the mean has shape \[2, 3\], the variance \[2, 1\]"):
        NormalMeanVariance(random(2, 3), random(2, 1))


def test_a_variance_has_no_gauss_newton_factor() -> None:
    loss, v = NormalMeanVariance(random(2, 2), random(2, 2).exp()), random(2, 4)
    calls: list[Callable[[], object]] = [
        lambda: loss.multiply_ggn(v),
        lambda: loss.multiply_ggn_factor(v),
        lambda: loss.multiply_ggn_factor_transpose(v),
        lambda: loss.multiply_ggn_factor_replicated_one_hot(0),
        lambda: loss.ggn_factor_inner_shape,
    ]
    for call in calls:
        with pytest.raises(LossError, match=r"no generalized Gauss-Newton factor.*'curvature_prop' or 'exact'"):
            call()


@pytest.mark.parametrize("index", [(0, 1), 3, (-1,), ()])
def test_an_index_outside_a_case_is_refused(index: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"names no coordinate of a case of shape \[3\]"):
        Categorical(random(2, 3)).multiply_fisher_factor_replicated_one_hot(index)


def test_targets_behind_no_gradient_are_the_mean() -> None:
    """As of a case that the trained loss leaves out."""
    loss = NormalMeanVariance(random(2, 3), random(2, 3, seed=1).exp())
    gradient = torch.zeros_like(loss.inputs)
    gradient[0] = random(6)
    targets = loss.targets_behind(gradient)
    assert targets is not None and targets.isfinite().all()
    assert torch.equal(targets[1], loss.inputs[1, :3])


def test_targets_behind_no_gradient_are_left_out_of_one_hot_classes() -> None:
    gradient = torch.tensor([[0.5, -1.0, 0.5], [0.0, 0.0, 0.0]])
    assert OnehotCategorical(random(2, 3)).targets_behind(gradient).tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_mean_and_a_variance_move_with_the_cases() -> None:
    mean, variance, targets = random(5, 4, 3), random(5, 4, 3, seed=1).exp(), random(5, 4, 3, seed=2)
    loss = NormalMeanVariance(mean, variance, targets)
    expected = loss.evaluate()
    moved = NormalMeanVariance(mean, variance, targets).with_cases_at(1)
    torch.testing.assert_close(moved.evaluate(), expected)
    assert moved.sample().shape == (4, 5, 3) and moved.cases == 4


def test_the_one_hot_of_logits_without_a_batch_axis_is_at_a_class() -> None:
    loss = Categorical(random(4))
    column = loss.multiply_fisher_factor(torch.eye(4, dtype=loss.inputs.dtype)[2])
    torch.testing.assert_close(loss.multiply_fisher_factor_replicated_one_hot(2), column)
