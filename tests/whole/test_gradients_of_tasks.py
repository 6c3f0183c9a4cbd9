"""Gradients of tasks that the user combines, as PCGrad does, are those of one step, and no warning of it is false."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import LossScaleWarning, losses
from tests.tables import pairs

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
CLASSES, VALUES = torch.arange(40) % 4, X[:, :2]
Differentiate = Callable[[Tensor, Sequence[Tensor], kfac_fx.KFAC], Sequence[Tensor | None]]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.values = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.classes(h), self.values(h)


def by_grad(loss: Tensor, parameters: Sequence[Tensor], optimizer: kfac_fx.KFAC) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)


def by_backward(loss: Tensor, parameters: Sequence[Tensor], optimizer: kfac_fx.KFAC) -> Sequence[Tensor | None]:
    """As the usual PCGrad of torch does."""
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def by_filling(loss: Tensor, parameters: Sequence[Tensor], optimizer: kfac_fx.KFAC) -> Sequence[Tensor | None]:
    """The optimizer is not told that gradients are zeroed."""
    for parameter in parameters:
        parameter.grad = None
    loss.backward(retain_graph=True)
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


EVERY_WAY: dict[str, Differentiate] = {"grad": by_grad, "backward": by_backward, "filling": by_filling}


def of_heads(net: nn.Module) -> list[Tensor]:
    classes, values = net(X)
    return [F.cross_entropy(classes, CLASSES), F.mse_loss(values, VALUES)]


def of_forwards(net: nn.Module) -> Iterator[Tensor]:
    """A forward for each task, behind the gradient of the one before."""
    yield F.cross_entropy(net(X)[0], CLASSES)
    yield F.mse_loss(net(X)[1], VALUES)


def of_halves(net: nn.Module) -> list[Tensor]:
    """Each task has half of the cases."""
    classes, values = net(X)
    others = F.mse_loss(values, VALUES) / 2
    return [F.cross_entropy(classes[half], CLASSES[half]) / 2 + others for half in (slice(20), slice(20, 40))]


def trained(
    tasks: Callable[[nn.Module], Iterable[Tensor]], differentiate: Differentiate, number: int | None = None
) -> str:
    """The warnings of two steps, and the fallbacks of the report. number: of the first tasks that are trained."""
    torch.manual_seed(0)
    net = kfac_fx.compile(TwoHeads(), loss=lambda z: [losses.Categorical(z[0]), losses.Normal(z[1], var=0.5)])
    optimizer, parameters = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0), list(net.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            each = [differentiate(loss, parameters, optimizer) for loss in islice(tasks(net), number)]
            for parameter, *of_tasks in zip(parameters, *each, strict=True):
                found = [gradient for gradient in of_tasks if gradient is not None]
                parameter.grad = torch.stack(found).sum(0) if found else None
            optimizer.step()
    return "\n".join([*(str(warning.message) for warning in caught), *net.report.fallbacks()])


@pairs(("differentiate", list(EVERY_WAY.values())), ("tasks", [of_heads, of_halves]))
def test_tasks_that_are_differentiated_one_by_one_are_all_trained(
    tasks: Callable[[nn.Module], list[Tensor]], differentiate: Differentiate
) -> None:
    told = trained(tasks, differentiate)
    if differentiate is by_grad:
        assert told == ""
    else:
        assert told.startswith("whether the training loss is the registered one was not checked: the gradients of the")
        assert told.endswith("behind several backwards, between which gradients were zeroed")


def test_forwards_of_tasks_are_micro_batches() -> None:
    assert "does not depend on" not in trained(of_forwards, by_grad)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_task_that_no_gradient_is_of_is_told(way: str) -> None:
    told = trained(of_heads, EVERY_WAY[way], 1)
    assert told.startswith("the trained loss does not depend on Normal of [40, 2], 1 of the 2 registered losses")


def test_cases_that_no_task_has_are_told() -> None:
    assert "leaves out 20 of 40 cases" in trained(of_halves, by_grad, 1)


def adversarial(net: kfac_fx.CompiledModule, loss: Callable[[Tensor], Tensor]) -> None:
    """The gradient of the inputs finds an example, and a backward follows."""
    x = X[:10].clone().requires_grad_()
    torch.autograd.grad(F.cross_entropy(net(x), CLASSES[:10], reduction="sum"), x)
    loss(X).backward()


def sharpness_aware(net: kfac_fx.CompiledModule, loss: Callable[[Tensor], Tensor]) -> None:
    """A gradient moves the parameters to where the next one is taken."""
    parameters = list(net.parameters())
    first = torch.autograd.grad(loss(X[:10]), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter += 0.0 * gradient
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss(X), parameters), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("gradients", [adversarial, sharpness_aware])
def test_a_gradient_for_something_else_is_of_no_step(gradients: Callable[..., None]) -> None:
    def steps(more: bool) -> Tensor:
        torch.manual_seed(0)
        net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), loss="categorical")
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, estimation_mode="exact")

        def loss(x: Tensor) -> Tensor:
            return F.cross_entropy(net(x), CLASSES[: len(x)])

        with warnings.catch_warnings():
            warnings.simplefilter("error", LossScaleWarning)
            for _ in range(3):
                optimizer.zero_grad()
                gradients(net, loss) if more else loss(X).backward()
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

    torch.testing.assert_close(steps(True), steps(False))
