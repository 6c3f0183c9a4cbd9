"""Factors of the trained loss that are told, and those that cannot be: residuals, label smoothing, derivatives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, LossScaleWarning
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.loss_scale import WHY
from kfac_fx.losses import Categorical, MultiBernoulli, Normal
from tests.tables import pairs


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inside: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        x = inside.requires_grad_()
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        return slope + torch.sin(3 * x), self.u(ends) - 1


INSIDE, ENDS = torch.rand(20, 1, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 6).unsqueeze(1)


def told(net: CompiledModule, loss: Callable[[], Tensor], parts: int = 1, **options: Any) -> list[str]:
    """The warnings of the first two steps."""
    opt = KFAC(net, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            opt.zero_grad()
            for _ in range(parts):
                loss().backward()
            opt.step()
    return [str(entry.message) for entry in caught if entry.category is LossScaleWarning]


def weighted(net: nn.Module, weights: tuple[float, float]) -> Tensor:
    return sum((w * r.square().mean() for w, r in zip(weights, net(INSIDE, ENDS), strict=True)), torch.zeros(()))


POINTS = torch.linspace(0.1, 2.0, 20).unsqueeze(1)  # weights of the points inside


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda r, ends: (POINTS * r.square()).mean() + ends.square().mean(), ("0.0952", "1.9")),
        (lambda r, ends: (POINTS * r.square()).sum() / POINTS.sum() + 3 * ends.square().mean(), ("0.0952", "1.9")),
        (
            lambda r, ends: (POINTS.round() * r.square()).mean() + ends.square().mean(),
            ("0.714", "1.43"),
        ),  # 9 ones, 6 twos
    ],
    ids=["a mean", "a weighted mean and a weight of the other", "some weights are zero"],
)
def test_weights_of_single_points_are_told(loss: Callable[..., Tensor], expected: tuple[str, str]) -> None:
    """They are in no factor, and nothing said so; weights of whole residuals were told."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS), loss=lambda residuals: [Normal(r) for r in residuals])
    (text,) = told(net, lambda: loss(*net(INSIDE, ENDS)))
    assert (
        "the trained loss weighs the squares of residuals from {} to {} of their mean, and the factors are of squares "
        "of one weight. Write the weights into the registered loss, as in loss=lambda residuals: "
        "[kfac_fx.losses.Normal(weights.sqrt() * residuals)], or let forward".format(*expected)
    ) in text


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, ends: (m - torch.sin(7 * INSIDE)).square().mean() + ends.square().mean(),
        lambda m, ends: (POINTS * (m - torch.sin(7 * INSIDE)).square()).mean() + ends.square().mean(),
        lambda m, ends: m.abs().mean() + ends.square().mean(),
        lambda m, ends: F.smooth_l1_loss(m, torch.zeros_like(m)) + ends.square().mean(),
    ],
    ids=["targets", "weights of errors of targets", "absolute values", "Huber"],
)
def test_targets_and_other_losses_of_residuals_are_no_weights_of_points(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS), loss=lambda residuals: [Normal(r) for r in residuals])
    assert not any("weighs the squares" in text for text in told(net, lambda: loss(*net(INSIDE, ENDS))))


@pytest.mark.parametrize("options", [{}, {"momentum_type": "adaptive"}])
def test_weights_of_residuals_that_loss_does_not_have_are_told(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS), loss=lambda residuals: [Normal(r) for r in residuals])
    assert told(net, lambda: weighted(net, (0.3, 7.7)), **options) == [
        "the trained loss is 0.3 times the mean of the registered Normal loss of [20, 1] over its 20 cases; take the "
        "factor out, or give it the coefficient of (0.3, kfac_fx.losses.Normal(...)) in loss=.\n"
        "the trained loss is 7.7 times the mean of the registered Normal loss of [6, 1] over its 6 cases; take the "
        "factor out, or give it the coefficient of (7.7, kfac_fx.losses.Normal(...)) in loss=.\n" + WHY
    ]


@pytest.mark.parametrize("weight", [12.67, 370.0])
def test_the_weight_of_the_two_ends_of_an_interval_is_told(weight: float) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([[0.0], [1.0]])
    net = kfac_fx.compile(Residuals(), (INSIDE, ends), loss=lambda residuals: [Normal(r) for r in residuals])

    def loss() -> Tensor:
        inside, at_ends = net(INSIDE, ends)
        result: Tensor = inside.square().mean() + weight * at_ends.square().mean()
        return result

    (warning,) = told(net, loss)
    assert warning.startswith(f"the trained loss is {weight:g} times the mean of the registered Normal loss of [2, 1]")


@pytest.mark.parametrize("options", [{}, {"var": 2.0}])
def test_the_weight_of_a_single_residual_is_told_next_to_others(options: dict[str, Any]) -> None:
    """The gradient of a single number is a multiple of it for every target, so the value of the loss tells."""
    torch.manual_seed(0)
    points = INSIDE.double(), ENDS[:1].double()
    net = kfac_fx.compile(Residuals().double(), points, loss=lambda out: [Normal(out[0], **options), Normal(out[1])])

    def loss(weight: float) -> Tensor:
        inside, end = net(*points)
        result: Tensor = inside.square().mean() / (2 * options.get("var", 0.5)) + weight * end.square().mean()
        return result

    assert told(net, lambda: loss(1.0)) == []
    assert told(net, lambda: loss(10.0)) == [
        "the trained loss is 10 times the mean of the registered Normal loss of [1, 1] over its 1 case; take the "
        "factor out, or give it the coefficient of (10, kfac_fx.losses.Normal(...)) in loss=.\n" + WHY
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_of_residuals_that_loss_has_are_right(parts: int) -> None:
    torch.manual_seed(0)
    model = Residuals().double()
    points = INSIDE.double(), ENDS.double()
    net = kfac_fx.compile(model, points, loss=lambda out: [(0.3, Normal(out[0])), (7.7, Normal(out[1]))])

    def loss() -> Tensor:
        inside, ends = net(*points)
        return (0.3 * inside.square().mean() + 7.7 * ends.square().mean()) / parts

    assert told(net, loss, parts) == []


def test_targets_that_are_a_multiple_of_constant_outputs_are_no_residuals() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    x = torch.randn(12, 3)
    net = kfac_fx.compile(layer, (x,), loss="mse")
    assert told(net, lambda: F.mse_loss(net(x), torch.full((12, 1), 2.0))) == []


# --- label smoothing --------------------------------------------------------------------------------------------------


def classifier(head: float, dtype: torch.dtype) -> tuple[CompiledModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(head)
    x = torch.randn(24, 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        return kfac_fx.compile(model, (x,), loss="categorical"), x, torch.arange(24) % 6


@pairs(
    ("head, dtype", [(0.0, torch.float32), (0.3, torch.bfloat16), (1.0, torch.float32)]),
    ("smoothing", [0.05, 0.1, 0.2]),
)
def test_label_smoothing_is_no_factor(head: float, dtype: torch.dtype, smoothing: float) -> None:
    net, x, y = classifier(head, dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return F.cross_entropy(net(x).float(), y, label_smoothing=smoothing)

    assert told(net, loss) == []


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_factor_of_uniform_predictions_is_told(factor: float) -> None:
    net, x, y = classifier(0.0, torch.float32)
    (text,) = told(net, lambda: factor * F.cross_entropy(net(x), y))
    assert text.startswith(
        f"the trained loss is {factor:g} times the mean of the registered Categorical loss over its 24"
    )


def test_a_small_factor_of_predictions_that_are_not_uniform_is_told() -> None:
    net, x, y = classifier(1.0, torch.float32)
    (text,) = told(net, lambda: 0.9 * F.cross_entropy(net(x), y))
    assert text.startswith(
        "the trained loss is 0.9 times the mean of the registered Categorical loss over its 24 cases;"
    )


# --- several heads ----------------------------------------------------------------------------------------------------


def test_the_remedy_for_one_of_several_losses_keeps_the_others() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.yes = nn.Linear(5, 3), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.kind(x), self.yes(x)

    torch.manual_seed(0)
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    net = kfac_fx.compile(Heads(), (x,), loss=lambda out: [Categorical(out[0]), MultiBernoulli(out[1])])

    def loss() -> Tensor:
        kind, yes = net(x)
        return 3 * F.cross_entropy(kind, y) + F.binary_cross_entropy_with_logits(yes[:, 0], (y == 1).float())

    assert told(net, loss) == [
        "the trained loss is 3 times the mean of the registered Categorical loss of [12, 3] over its 12 cases; take "
        "the factor out, or give it the coefficient of (3, kfac_fx.losses.Categorical(...)) in loss=.\n" + WHY
    ]


# --- derivatives that forward does not take --------------------------------------------------------------------------

OUTSIDE = (
    "the trained loss has derivatives of the outputs, which torch.autograd.grad(..., create_graph=True) takes outside "
    "of forward, and the registered loss is of the outputs alone: factors and checks do not have these derivatives. If "
    "they are a small part of the loss, such as a penalty, nothing is wrong. Else compute them in forward and return "
    "the residuals, as in loss=lambda residuals: [kfac_fx.losses.Normal(residual) for residual in residuals]; or leave "
    "loss= out, and the factors are those of the gradients that training sends back.\n" + WHY
)


@pytest.mark.parametrize("ends", [True, False])
def test_derivatives_outside_of_forward_are_told(ends: bool) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals().u, (INSIDE,), loss="mse")
    x = INSIDE.clone().requires_grad_()

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        rest = net(ENDS).square().mean() if ends else 0.0
        return (slope - math.pi).square().mean() + rest

    assert told(net, loss, momentum_type="adaptive") == [OUTSIDE]


def test_derivatives_outside_of_a_forward_without_a_loss_are_right() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals().u, (INSIDE,))
    x = INSIDE.clone().requires_grad_()

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return (slope - math.pi).square().mean() + net(ENDS).square().mean()

    assert told(net, loss) == []


@pytest.mark.parametrize("factor", [1.0, 12.0])
def test_a_penalty_on_the_slope_of_a_classifier_is_not_told_and_hides_no_factor(factor: float) -> None:
    torch.manual_seed(0)
    net, y = kfac_fx.compile(nn.Linear(5, 2), (torch.randn(12, 5),), loss="categorical"), torch.arange(12) % 2
    x = torch.randn(12, 5, requires_grad=True)

    def loss() -> Tensor:
        outputs = net(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return factor * F.cross_entropy(outputs, y) + slope.square().sum(1).mean()

    lines = told(net, loss)
    assert len(lines) == (factor != 1) and all(line.startswith("the trained loss is 12 times") for line in lines)


def test_a_penalty_on_gradients_of_parameters_has_no_derivatives_by_inputs() -> None:
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Residuals().u, (INSIDE,), loss="mse"), INSIDE.detach().clone()

    def loss() -> Tensor:
        value = F.mse_loss(net(x), x.sin())
        gradients = torch.autograd.grad(value, list(net.parameters()), create_graph=True)
        return value + 0.1 * sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))

    assert told(net, loss) == []


def test_a_backward_that_makes_a_graph_is_no_derivative_of_the_outputs() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals().u, (INSIDE,), loss="mse")
    opt = KFAC(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        F.mse_loss(net(INSIDE), INSIDE.sin()).backward(create_graph=True)
        opt.step()
    opt.zero_grad()  # ends the cycle of gradients and their graph
    assert not [entry for entry in caught if entry.category is LossScaleWarning]


TRAINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "mean squares": (lambda a, b: a.square().mean() + b.square().mean(), "[Normal(outputs[0]), Normal(outputs[1])]"),
    "weighted": (
        lambda a, b: a.square().mean() + 10 * b.square().mean(),
        "[Normal(outputs[0]), (10, Normal(outputs[1]))]",
    ),
    "an odd weight": (lambda a, b: 0.123 * a.square().sum() / 20, "(0.123, Normal(outputs[0]))"),
    "torch's": (lambda a, b: F.mse_loss(b, torch.zeros_like(b)), "Normal(outputs[1])"),
    "targets": (
        lambda a, b: a.square().mean() + 100 * (b - 0.3).square().mean(),
        "[Normal(outputs[0]), (100, Normal(outputs[1]))]). The curvature does not depend on the targets of outputs[1",
    ),
    "a loss that the gradient does not tell": (
        lambda a, b: 10 * a.square().mean() + 0.1 * (b - 0.3).abs().mean(),
        "[(10, Normal(outputs[0]))]). The gradient does not tell the loss of outputs[1]: add a distribution that is "
        "near for it.",
    ),
    "a small penalty next to another loss": (lambda a, b: 0.1 * a.square().mean() + (b - 0.3).abs().mean(), ""),
    "a penalty next to a cross entropy": (
        lambda a, b: 10 * a.square().mean() + F.binary_cross_entropy_with_logits(b, (ENDS > 0.5).float()),
        "",
    ),
    "targets and a penalty on parameters": (
        lambda a, b: a.square().mean() + 0.123 * (b - 0.3).square().mean() + 0.0377,
        "[Normal(outputs[0])]). The gradient does not tell the loss of outputs[1]",
    ),
    "a norm": (lambda a, b: a.norm(), ""),
    "a logarithm": (lambda a, b: a.square().mean().log(), ""),
    "a root": (lambda a, b: a.square().mean().sqrt(), ""),
    "absolute": (lambda a, b: a.abs().mean(), ""),
    "huber": (lambda a, b: F.huber_loss(a, torch.zeros_like(a), delta=0.1), ""),
    "weights of cases": (lambda a, b: (torch.linspace(0, 1, 20).unsqueeze(1) * a.square()).mean(), ""),
    "logits": (lambda a, b: F.binary_cross_entropy_with_logits(a, (a > 0).float()), ""),
}


@pytest.mark.parametrize("case", TRAINED)
def test_squares_of_residuals_without_a_loss_are_told(case: str) -> None:
    """The factors were those of the empirical Fisher, without a word."""
    torch.manual_seed(0)
    loss, expected = TRAINED[case]
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS))
    lines = told(net, lambda: loss(*net(INSIDE, ENDS)))
    assert len(lines) == bool(expected)
    if expected:
        assert f"loss=lambda outputs: {expected.replace('Normal', 'kfac_fx.losses.Normal')}" in lines[0]


OTHERS: dict[str, Callable[[CompiledModule, Tensor], Tensor]] = {
    "other weights": lambda net, x: net(x).square().mean() + 10 * net(ENDS).square().mean(),
    "targets": lambda net, x: net(x).square().mean() + (net(ENDS) - ENDS).square().mean(),
    "a penalty": lambda net, x: net(x).square().mean() + net(ENDS).square().mean() + 0.1 * net.model[0].weight.norm(),
    "derivatives": lambda net, x: slope_of(net, x).square().mean() + 10 * net(ENDS).square().mean(),
    "derivatives and targets": lambda net, x: (
        slope_of(net, x).square().mean() + 10 * net(ENDS).square().mean() + 100 * (net(x) - x).square().mean()
    ),
}


def slope_of(net: CompiledModule, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return slope


@pytest.mark.parametrize("name", OTHERS)
def test_forwards_of_which_each_has_another_loss_are_no_sum_of_squares(name: str) -> None:
    """One of them told for all: write (20, Normal(outputs))."""
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Residuals().u, (INSIDE,)), INSIDE.clone().requires_grad_()
    assert told(net, lambda: OTHERS[name](net, x)) == []


def test_forwards_of_one_sum_of_squares_are_told() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Residuals().u, (INSIDE,))
    (line,) = told(net, lambda: (net(INSIDE).square().mean() + net(ENDS).square().mean()) / 2)
    assert "loss=lambda outputs: kfac_fx.losses.Normal(outputs))." in line


def test_squares_of_residuals_are_told_once_for_all_parts_and_not_where_the_mode_is_named() -> None:
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS))
    (line,) = told(net, lambda: sum(r.square().mean() for r in net(INSIDE, ENDS)) / 2, parts=2)
    assert "[kfac_fx.losses.Normal(outputs[0]), kfac_fx.losses.Normal(outputs[1])]" in line
    net = kfac_fx.compile(Residuals(), (INSIDE, ENDS))
    assert told(net, lambda: sum(r.square().mean() for r in net(INSIDE, ENDS)), estimation_mode="empirical") == []


@pytest.mark.parametrize("size", [0.03, 0.1, 1.0])
def test_a_squared_error_against_one_hot_targets_is_told_whatever_its_sums_over_classes(size: float) -> None:
    """The sums of the gradient over the classes are a few percent of it where the outputs sum to about one, and the
    warning depended on them."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 5), torch.randint(10, (64,))
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 10))
    with torch.no_grad():
        model[2].weight.mul_(size)
        model[2].bias.fill_(0.1)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    (line,) = told(net, lambda: F.mse_loss(net(x), F.one_hot(y, 10).float()))
    assert 'write loss="mse"' in line
