"""The loss of a step's batch without a closure: its value, its changes, its slope and its exact Fisher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx import losses
from kfac_fx.compiled.compiled_module import compile
from kfac_fx.compiled.jacobian_products import JacobianProducts, fisher_inner_products
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.batch_loss import BatchLoss, ObservedForward
from kfac_fx.passes.tracing.effects import RandomState
from tests.tables import pairs

CASES = 6
X = torch.randn(CASES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.randint(4, (CASES,), generator=torch.Generator().manual_seed(1))
VALUES = torch.rand(CASES, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class WithLoss(nn.Module):
    """Returns its loss, and twice that loss as a decoy that is not trained."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(self.inner(x), y)
        return loss, 2 * loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def smoothed(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, CLASSES, label_smoothing=0.2)


TRAINED: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "categorical": ("categorical", lambda outputs: F.cross_entropy(outputs, CLASSES)),
    "smoothed": ("categorical", smoothed),
    "normal": ("normal", lambda outputs: (outputs - VALUES).square().sum(1).mean()),
    "bernoulli": (
        "multi_bernoulli",
        lambda outputs: F.binary_cross_entropy_with_logits(outputs, VALUES, reduction="sum") / CASES,
    ),
    "scaled": (
        lambda outputs: (0.25, losses.Categorical(outputs)),
        lambda outputs: 0.25 * F.cross_entropy(outputs, CLASSES),
    ),
    "two": (
        lambda outputs: [losses.Categorical(outputs[:, :2]), losses.MultiBernoulli(outputs[:, 2:])],
        lambda outputs: (
            F.cross_entropy(outputs[:, :2], CLASSES % 2)
            + F.binary_cross_entropy_with_logits(outputs[:, 2:], VALUES[:, 2:], reduction="sum") / CASES
        ),
    ),
}


def parameters_of(net: nn.Module, scale: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: p.detach() + scale * torch.randn_like(p) for name, p in net.named_parameters()}


def observed(net: Any, *calls: tuple[tuple[Any, ...], Callable[[Any], Tensor]], loss_scale: float = 1.0) -> BatchLoss:
    """After a forward and a backward of every call."""
    forwards = []
    for args, loss in calls:
        outputs = net(*args)
        forwards.append(ObservedForward.of(net.recorder(args, {}), args, {}, outputs))
        (loss_scale * loss(outputs)).backward()
    arrived = [forward.as_arrived for forward in forwards]
    return BatchLoss(net, arrived, JacobianProducts(), loss_scale, False, Replicas(), (), None)


@pairs(("distribution, loss", TRAINED), ("loss_scale", [1.0, 128.0]))
def test_a_change_of_the_loss_is_that_of_the_users_loss_whose_targets_are_unknown(
    distribution: Any, loss: Callable[[Tensor], Tensor], loss_scale: float
) -> None:
    net = compile(network(), loss=distribution)
    batch = observed(net, ((X,), loss), loss_scale=loss_scale)
    assert batch.observed
    here, there = parameters_of(net), parameters_of(net, 0.5)
    before = batch.at(here)
    expected = loss(torch.func.functional_call(net.model, there, (X,))) - loss(net(X))
    torch.testing.assert_close(batch.change(before, batch.at(there)), expected.detach())
    torch.testing.assert_close(batch.value(before), loss(net(X)).detach())


@pytest.mark.parametrize(("distribution", "loss"), TRAINED.values(), ids=TRAINED)
def test_the_slope_and_the_fisher_along_a_direction_are_those_of_the_loss(
    distribution: Any, loss: Callable[[Tensor], Tensor]
) -> None:
    net = compile(network(), loss=distribution)
    batch, here = observed(net, ((X,), loss)), parameters_of(net)
    d = {name: value - here[name] for name, value in parameters_of(net, 0.5).items()}

    def pairs(at: Mapping[str, Tensor]) -> Any:
        return net.losses(*net.functional(at, (X,), {}))

    fisher, slope, _ = batch.along(here, d)
    torch.testing.assert_close(fisher, fisher_inner_products(pairs, here, [d])[0, 0])
    expected = sum((p.grad * d[name]).sum() for name, p in net.named_parameters() if p.grad is not None)
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize(("distribution", "loss"), TRAINED.values(), ids=TRAINED)
def test_a_difference_quotient_of_the_values_is_the_product_with_the_jacobian_up_to_its_step(
    distribution: Any, loss: Callable[[Tensor], Tensor]
) -> None:
    net = compile(network(), loss=distribution)
    batch, here = observed(net, ((X,), loss)), parameters_of(net)
    d = {name: value - here[name] for name, value in parameters_of(net, 0.5).items()}
    exact, before = torch.stack(batch.along(here, d)[:2]), batch.at(here)
    errors = []
    for step in (1e-3, 1e-5):
        probe = batch.at({name: value + step * d[name] for name, value in here.items()})
        quotient = torch.stack(batch.between(before, probe, torch.tensor(step, dtype=torch.float64)))
        errors.append(((quotient - exact) / exact).abs().max().item())
    assert errors[0] < 0.01
    assert errors[1] < 0.02 * errors[0]  # proportional to the step


@pytest.mark.parametrize(("distribution", "loss"), TRAINED.values(), ids=TRAINED)
def test_what_the_forward_returned_and_the_primals_of_a_product_are_the_values_at_its_parameters(
    distribution: Any, loss: Callable[[Tensor], Tensor]
) -> None:
    net = compile(network(), loss=distribution)
    outputs = net(X)
    forward = ObservedForward.of(net.recorder((X,), {}), (X,), {}, outputs)
    batch = BatchLoss(net, [forward], JacobianProducts(), 1.0, False, Replicas(), (), None)
    with torch.no_grad():
        outputs.zero_()  # as a CUDA graph may
    here, there = parameters_of(net), parameters_of(net, 0.5)
    (expected,) = batch.at(here)
    for (values,) in batch.returned(there), batch.along(here, there)[2]:  # no forward at other parameters
        assert values.cases == expected.cases
        torch.testing.assert_close(values.leaves, expected.leaves)
        for (weight, known), (wanted, at) in zip(values.losses, expected.losses, strict=True):
            assert weight == wanted and type(known) is type(at)
            torch.testing.assert_close(known.inputs, at.inputs)


def test_the_value_of_squared_errors_of_several_outputs_is_known() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 5).double()
            self.first, self.second = nn.Linear(5, 4).double(), nn.Linear(5, 2).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.body(x))
            return self.first(hidden), self.second(hidden)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return (outputs[0] - VALUES).square().sum(1).mean() + 0.3 * outputs[1].square().sum(1).mean()

    net = compile(Heads(), loss=lambda outputs: [losses.Normal(outputs[0]), (0.3, losses.Normal(outputs[1]))])
    batch, here, there = observed(net, ((X,), loss)), parameters_of(net), parameters_of(net, 0.5)
    for values in batch.at(here), batch.returned(here):
        torch.testing.assert_close(batch.value(values), loss(net(X)).detach())
    expected = loss(torch.func.functional_call(net.model, there, (X,))) - loss(net(X))
    torch.testing.assert_close(batch.change(batch.at(here), batch.at(there)), expected.detach())


def squares(outputs: Tensor, part: slice) -> Tensor:
    return (outputs - VALUES)[:, part].square().sum(1).mean()


PARTS: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
    (
        lambda outputs: [losses.Normal(outputs[:, :2]), losses.Normal(outputs[:, 2:])],
        lambda outputs: squares(outputs, slice(0, 4)),
    ),
    (
        lambda outputs: [losses.Normal(outputs[:, :2]), losses.Categorical(outputs[:, 2:])],
        lambda outputs: squares(outputs, slice(0, 2)) + F.cross_entropy(outputs[:, 2:], CLASSES % 2),
    ),
    (lambda outputs: losses.Normal(outputs[:, :2]), lambda outputs: squares(outputs, slice(0, 2))),
]


@pytest.mark.parametrize(("spec", "loss"), PARTS)
def test_the_value_of_squared_errors_of_parts_of_an_output_is_known(
    spec: Any, loss: Callable[[Tensor], Tensor]
) -> None:
    net = compile(network(), loss=spec)
    batch = observed(net, ((X,), loss))
    torch.testing.assert_close(batch.value(batch.at(parameters_of(net))), loss(net(X)).detach())


@pytest.mark.parametrize(
    "spec",
    [
        lambda outputs: [losses.Normal(outputs[:, :3]), losses.Normal(outputs[:, 2:])],
        lambda outputs: losses.Normal(outputs @ torch.ones(4, 2, dtype=outputs.dtype)),
    ],
)
def test_the_value_of_squared_errors_is_not_known_where_a_number_enters_several(spec: Any) -> None:
    net = compile(network(), loss=spec)
    batch = observed(net, ((X,), lambda outputs: squares(outputs, slice(0, 4))))
    assert batch.value(batch.at(parameters_of(net))).isinf()


def test_a_loss_inside_the_forward_is_that_which_the_user_trains() -> None:
    net = compile(WithLoss(network()), (X, CLASSES))
    batch = observed(net, ((X, CLASSES), lambda outputs: outputs[0]))
    here, there = parameters_of(net), parameters_of(net, 0.5)
    before, (value, _) = batch.at(here), net(X, CLASSES)
    expected = torch.func.functional_call(net.model, there, (X, CLASSES))[0] - value
    torch.testing.assert_close(batch.change(before, batch.at(there)), expected.detach())
    for values in before, batch.returned(here):
        torch.testing.assert_close(batch.value(values), value.detach())


class WithParts(nn.Module):
    """Returns its loss and what else is wanted of the parts of it, a part of a part, and the loss once more."""

    def __init__(self, inner: nn.Module, wanted: Sequence[str]) -> None:
        super().__init__()
        self.inner, self.wanted = inner, wanted

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        error = (self.inner(x) - y).square().mean()
        first, second = 4 * error, (self.inner(2 * x) - y).square().mean()
        loss = 0.5 * first + 0.5 * second
        every = {"error": error, "first": first, "loss": loss, "second": second, "again": loss}
        return {name: value if name in self.wanted else value.detach() for name, value in every.items()}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    ("trained", "alone"),
    [
        (lambda out: out["loss"], True),
        (lambda out: out["loss"] + out["again"], False),
        (lambda out: out["loss"] + 3 * out["error"] + out["second"], False),
        (lambda out: out["error"], False),
    ],
)
def test_parts_of_a_loss_that_are_returned_next_to_it_count_once(
    again: bool, trained: Callable[[Any], Tensor], alone: bool
) -> None:
    """The gradient of the loss passes them. The slope along a direction is that of the loss, whatever is returned."""
    wanted = ["error", "first", "loss", "second"]
    net = compile(WithParts(network(), [*wanted, "again"] if again else wanted), (X, VALUES))
    batch = observed(net, ((X, VALUES), trained))
    assert batch.has_names
    parameters, direction = parameters_of(net), parameters_of(net, 1.0)
    gradients = torch.autograd.grad(trained(net(X, VALUES)), [*net.parameters()])
    expected = sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True))
    fisher, slope, _ = batch.along(parameters, direction)
    torch.testing.assert_close(slope, expected)
    if alone:
        detached = compile(WithParts(net.model.inner, ["loss"]), (X, VALUES))
        same = observed(detached, ((X, VALUES), trained))
        torch.testing.assert_close((fisher, slope), same.along(parameters, direction)[:2])
        torch.testing.assert_close(batch.value(batch.at(parameters)), same.value(same.at(parameters)))


class Similarities(nn.Module):
    """Compares every x with every y, each of which may be as many as the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5, dtype=torch.float64), nn.Linear(4, 5, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.first(x).tanh() @ self.second(y).tanh().T
        return z, z.T


class WithOthers(nn.Module):
    """Returns outputs that are computed from one another, and a parameter that they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = self.inner(x)
        first, second = z.chunk(2, 1)
        return z, z.square() - 1, (z + z.square()).sin(), self.inner[0].weight, z, first, second, second.cos()


class Penalized(nn.Module):
    """Returns a number that is computed from parameters alone, as Bayesian layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack([p.sum() for p in self.parameters()]).sum(), self.inner(x)


OF_ONE_ANOTHER: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Any, Callable[[Any], Tensor]]] = {
    "a matrix and its transpose": (
        Similarities,
        (X, VALUES),
        lambda o: [losses.Categorical(o[0]), (2.0, losses.Categorical(o[1]))],
        lambda o: F.cross_entropy(o[0], CLASSES) + 2 * F.cross_entropy(o[1], CLASSES.flip(0)),
    ),
    "outputs of one tensor": (
        WithOthers,
        (X,),
        lambda o: [losses.Categorical(o[0]), losses.Normal(o[1]), (0.5, losses.MultiBernoulli(o[2]))],
        lambda o: (
            F.cross_entropy(o[0], CLASSES) + (o[1] - VALUES).square().sum(1).mean()
            + 0.5 * F.binary_cross_entropy_with_logits(o[2], VALUES, reduction="sum") / CASES
        ),
    ),
    "pieces of one tensor": (
        WithOthers,
        (X,),
        lambda o: [losses.Categorical(o[5]), losses.Normal(o[6]), losses.Normal(o[7])],
        lambda o: (
            F.cross_entropy(o[5], CLASSES % 2) + o[6].square().sum(1).mean() + (o[7] - 2).square().sum(1).mean()
        ),
    ),
    "a penalty of all parameters": (
        Penalized,
        (X,),
        lambda o: losses.Categorical(o[1]),
        lambda o: F.cross_entropy(o[1], CLASSES) + 0.01 * o[0],
    ),
    "a term of a parameter": (
        WithOthers,
        (X,),
        lambda o: losses.Categorical(o[0]),
        lambda o: F.cross_entropy(o[4], CLASSES) + 0.1 * o[3].sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_ANOTHER)
def test_a_gradient_counts_at_the_output_that_the_user_sends_it_to(name: str) -> None:
    """That of x.T passes x, too. If both were measured with all that arrives, x.T would count twice."""
    model, inputs, loss, trained = OF_ONE_ANOTHER[name]
    net = compile(model(), inputs, loss=loss)
    batch = observed(net, (inputs, trained))
    here, there = parameters_of(net), parameters_of(net, 0.5)
    before = batch.at(here)
    expected = trained(torch.func.functional_call(net.model, there, inputs)) - trained(net(*inputs))
    torch.testing.assert_close(batch.change(before, batch.at(there)), expected.detach())
    gradients = torch.autograd.grad(trained(net(*inputs)), [*net.parameters()])
    slope = sum((g * d).sum() for g, d in zip(gradients, there.values(), strict=True))
    torch.testing.assert_close(batch.along(here, there)[1], slope)


def test_classes_are_last_where_cases_are_compared_with_cases() -> None:
    """The rows of x.T are cases. Without a size that both batches must have, the trace took its columns for cases."""
    of_both = lambda z: [losses.Categorical(z[0]), losses.Categorical(z[1])]  # noqa: E731
    inputs, model = (X, VALUES), Similarities()
    vector = parameters_of(model, 1.0)
    product = compile(model, inputs, loss=of_both).fisher_product(*inputs)(vector)
    live = dict(model.named_parameters())
    outputs, tangents = torch.func.jvp(
        lambda parameters: torch.func.functional_call(model, parameters, inputs),
        ({name: p.detach() for name, p in live.items()},),
        (vector,),
    )
    probabilities = [z.softmax(-1) for z in outputs]
    sent = [p * (t - (p * t).sum(-1, keepdim=True)) / len(p) for p, t in zip(probabilities, tangents, strict=True)]
    expected = torch.autograd.grad(model(*inputs), list(live.values()), sent)
    torch.testing.assert_close(product, dict(zip(live, expected, strict=True)))


class Weighed(nn.Module):
    """Weighs its squares by its own residuals, without a gradient: the weights, and a term without them."""

    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        self.inner, self.no_grad = network(), no_grad

    def residuals(self, x: Tensor) -> Tensor:
        z: Tensor = self.inner(x)
        return z - VALUES

    def weights(self, x: Tensor) -> Tensor:
        r = self.residuals(x)
        if not self.no_grad:
            return torch.exp(-torch.cumsum(r.detach().square(), 0))
        with torch.no_grad():
            return torch.exp(-torch.cumsum(r.square(), 0))

    def loss(self, x: Tensor, weights: Tensor) -> Tensor:
        r = self.residuals(x)
        return (weights * r.square()).mean() + 0.3 * F.mse_loss(self.inner(2 * x), VALUES) + 0.1 * r.sin().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, self.weights(x))


@pytest.mark.parametrize("no_grad", [False, True])
def test_a_change_has_the_weights_that_forward_computed_before_the_step(no_grad: bool) -> None:
    """A step lowers the loss with these weights. With those of after it a causal loss rises while it is solved."""
    model = Weighed(no_grad)
    net = compile(model, (X,))
    batch, here, there = observed(net, ((X,), lambda loss: loss)), parameters_of(net), parameters_of(net, 0.5)
    before, after, weights = batch.at(here), batch.at(there), model.weights(X)
    moved = Weighed(no_grad)
    moved.load_state_dict(there)
    expected = moved.loss(X, weights) - model(X)
    torch.testing.assert_close(batch.change(before, after), expected.detach())
    drift = moved(X) - moved.loss(X, weights)
    torch.testing.assert_close(batch.drift(before, after), drift.detach())
    d = {name: value - here[name] for name, value in there.items()}
    step = torch.tensor(1e-6, dtype=torch.float64)
    _, slope = batch.between(before, batch.at({name: value + step * d[name] for name, value in here.items()}), step)
    expected = sum((p.grad * d[name]).sum() for name, p in net.named_parameters() if p.grad is not None)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=0.0)
    if not no_grad:  # torch's products with a Jacobian go through torch.no_grad()
        torch.testing.assert_close(batch.along(here, d)[1], expected)


def test_a_loss_whose_terms_have_a_backward_each_is_their_sum() -> None:
    net = compile(network(), loss="categorical")
    outputs = net(X)
    forward = ObservedForward.of(net.recorder((X,), {}), (X,), {}, outputs)
    loss = TRAINED["categorical"][1]
    (0.25 * loss(outputs)).backward(retain_graph=True)
    (0.75 * loss(outputs)).backward()
    batch = BatchLoss(net, [forward], JacobianProducts(), 1.0, False, Replicas(), (), None)
    here, there = parameters_of(net), parameters_of(net, 0.5)
    expected = loss(torch.func.functional_call(net.model, there, (X,))) - loss(net(X))
    torch.testing.assert_close(batch.change(batch.at(here), batch.at(there)), expected.detach())


def test_noise_is_that_of_the_forward_at_all_points() -> None:
    net = compile(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double(), loss="categorical")
    start = RandomState.now(())
    outputs = net(X)
    forward = ObservedForward.of(net.recorder((X,), {}), (X,), {}, outputs)
    batch = BatchLoss(net, [forward], JacobianProducts(), 1.0, False, lambda tensor: tensor, (), start)
    before = RandomState.now(()).cpu
    for _ in range(2):
        (values,) = batch.at(parameters_of(net))
        assert torch.equal(values.leaves[0], outputs)
        torch.rand(3)
    assert not torch.equal(before, start.cpu)


def summed(kind: str, outputs: Any, cases: slice) -> Tensor:
    """The loss of some cases, in a mean over all."""
    if kind == "normal":
        total = (outputs - VALUES[cases]).square().sum()
    elif kind == "categorical":
        total = F.cross_entropy(outputs, CLASSES[cases], reduction="sum")
    else:
        total = F.cross_entropy(outputs[1], CLASSES[cases] % 2, reduction="sum")
        total = total + F.binary_cross_entropy_with_logits(outputs[0], VALUES[cases, 2:], reduction="sum")
    return total / CASES


class Heads(nn.Module):
    """Returns the four outputs of a network two by two, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y[:, 2:], y[:, :2]


def of_heads(outputs: Any) -> Any:
    return [losses.Categorical(outputs[1]), losses.MultiBernoulli(outputs[0])]


@pytest.mark.parametrize("kind", ["normal", "categorical", "two outputs"])
def test_micro_batches_of_different_sizes_are_one_batch(kind: str) -> None:
    net = compile(Heads(), loss=of_heads) if kind == "two outputs" else compile(network(), loss=kind)

    def part(start: int, stop: int) -> tuple[tuple[Any, ...], Callable[[Any], Tensor]]:
        return (X[start:stop],), lambda outputs: summed(kind, outputs, slice(start, stop))

    whole, parts = observed(net, part(0, CASES)), observed(net, part(0, 2), part(2, CASES))
    here, there = parameters_of(net), parameters_of(net, 0.5)
    d = {name: value - here[name] for name, value in there.items()}
    for measure in (
        lambda batch: batch.value(batch.at(here)),
        lambda batch: batch.change(batch.at(here), batch.at(there)),
        lambda batch: torch.stack(batch.along(here, d)[:2]),
        lambda batch: torch.stack(batch.between(batch.at(here), batch.at(there), torch.ones((), dtype=torch.float64))),
    ):
        torch.testing.assert_close(measure(parts), measure(whole))
    value = summed(kind, net(X), slice(None)).detach()
    torch.testing.assert_close(whole.value(whole.at(here)), value)
    expected = summed(kind, torch.func.functional_call(net.model, there, (X,)), slice(None)) - value
    torch.testing.assert_close(parts.change(parts.at(here), parts.at(there)), expected.detach())


def test_without_gradients_only_the_curvature_is_known() -> None:
    net = compile(network(), loss="normal")
    batch = observed(net)
    batch.forwards = [ObservedForward(net.recorder((X,), {}), (X,), {}, None, [], False)]
    here, there = parameters_of(net), parameters_of(net, 0.5)
    before = batch.at(here)
    assert not batch.observed and batch.value(before) == torch.inf
    moved = torch.func.functional_call(net.model, there, (X,)) - net(X)
    torch.testing.assert_close(batch.change(before, batch.at(there)), moved.square().sum(1).mean().detach())


def test_the_divergence_of_two_variances_is_right_to_second_order() -> None:
    mean, variance = torch.randn(5, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64) + 1
    step = 1e-4
    here = losses.NormalMeanVariance(mean, variance)
    there = losses.NormalMeanVariance(mean + step, variance - step)
    p = torch.distributions.Normal(mean, variance.sqrt())
    q = torch.distributions.Normal(mean + step, (variance - step).sqrt())
    expected = torch.distributions.kl_divergence(p, q).sum()
    torch.testing.assert_close(there.divergence_from(here.inputs), expected, rtol=1e-3, atol=0)
    assert here.entropy() is None


COUNTED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "ignored targets": (
        lambda z, y: F.cross_entropy(z, torch.where(y > 0, y, -100)), lambda y: (y > 0).double() / (y > 0).sum()
    ),
    "a mask": (
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
        lambda y: (y > 0).double() / (y > 0).sum(),
    ),
    "weights": (
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * (1 + y)).mean(), lambda y: (1 + y).double() / len(y)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "weights"), COUNTED.values(), ids=COUNTED)
def test_the_fisher_along_a_step_counts_cases_as_forward_does(
    loss: Callable[[Tensor, Tensor], Tensor], weights: Callable[[Tensor], Tensor]
) -> None:
    """By derivatives and by difference quotients, which cases that are left out must not enter."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.fc(x), y)

    model, x, y = Inside().double(), torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 4
    net = compile(model, (x, y))
    batch = observed(net, ((x, y), lambda value: value))
    here = {name: value.detach() for name, value in net.named_parameters()}
    direction = {name: torch.randn_like(value) for name, value in here.items()}
    step = torch.tensor(1e-6, dtype=torch.float64)
    there = {name: value + step * direction[name] for name, value in here.items()}
    p, moved = model.fc(x).softmax(-1), x @ direction["fc.weight"].T + direction["fc.bias"]
    expected = (weights(y) * ((p * moved.square()).sum(-1) - (p * moved).sum(-1).square())).sum().detach()
    assert float(batch.along(here, direction)[0]) == pytest.approx(float(expected), rel=1e-6)
    quotient = batch.between(batch.at(here), batch.at(there), step)[0]
    assert float(quotient) == pytest.approx(float(expected), rel=1e-4)
    product = net.fisher_product(x, y)(direction)
    inner = sum(float((product[name] * direction[name]).sum()) for name in direction)
    assert inner == pytest.approx(float(expected), rel=1e-6)
