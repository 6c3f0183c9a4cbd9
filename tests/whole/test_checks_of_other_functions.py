"""A check sees the forward of its step: trainings whose forwards do not repeat, or had other weights, are as good as
without that.

A forward between two steps may be another function than the graph at the parameters before the step: at weights that
were moved for it, under noise that was drawn since, with statistics that it changed, in another precision. The values
of such a forward are no side of a difference, because they differ from the other side by more than the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kfac_fx
from tests.tables import pairs

STEPS, CASES, EXAMPLES = 60, 64, 1024
WORSE = 1.3  # times the loss of the training without the disturbance


# --- models -----------------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """A residual branch that some cases leave out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + torch.tanh(self.linear(x))
        kept = (torch.rand(len(x), 1) > 0.1).to(x) / 0.9
        return x + kept * torch.tanh(self.linear(x))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.Linear(32, 32), nn.Tanh()],
    "dropout": lambda: [nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)],
    "drop path": lambda: [DropPath(32)],
    "noise": lambda: [Noise(), nn.Linear(32, 32), nn.Tanh()],
    "batch norm": lambda: [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()],
    "checkpointed": lambda: [Checkpointed(nn.Sequential(*MIDDLES["dropout"]()))],
}


def made(middle: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), *MIDDLES[middle](), nn.Linear(32, 3))


# --- what happens in a step -------------------------------------------------------------------------------------------


@dataclass
class Step:
    """The state of a training in one step."""

    net: nn.Module
    x: Tensor
    y: Tensor
    average: list[Tensor]  # of the parameters over the steps

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def backward(self, parts: int = 1) -> None:
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            (F.cross_entropy(self.net(x).float(), y) / parts).backward()

    def ascent(self) -> list[Tensor]:
        """A short way along the gradient, which is forgotten."""
        self.backward()
        gradients = [parameter.grad.clone() for parameter in self.parameters]  # type: ignore[union-attr]
        self.net.zero_grad()
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        return [0.05 * gradient / norm for gradient in gradients]


@torch.no_grad()
def add(parameters: list[nn.Parameter], moves: list[Tensor], factor: float = 1.0) -> None:
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.add_(move, alpha=factor)


def sam(step: Step) -> None:
    """Sharpness-aware minimization: the gradient is that of other weights."""
    moves = step.ascent()
    add(step.parameters, moves)
    step.backward()
    add(step.parameters, moves, -1.0)


def sam_by_data(step: Step) -> None:
    moves, kept = step.ascent(), [parameter.data for parameter in step.parameters]
    for parameter, move in zip(step.parameters, moves, strict=True):
        parameter.data = parameter.data + move
    step.backward()
    for parameter, data in zip(step.parameters, kept, strict=True):
        parameter.data = data


def posterior_sample(step: Step) -> None:
    kept = [parameter.detach().clone() for parameter in step.parameters]
    add(step.parameters, [0.02 * torch.randn_like(parameter) for parameter in kept])
    step.backward()
    with torch.no_grad():
        for parameter, old in zip(step.parameters, kept, strict=True):
            parameter.copy_(old)


def evaluated_behind(step: Step) -> None:
    step.backward()
    step.net.eval()
    step.net(step.x[:16])
    step.net.train()


def forward_before(step: Step) -> None:
    step.net(step.x[:16])
    step.backward()


def forward_behind(step: Step) -> None:
    step.backward()
    step.net(step.x[:16])


def average_by_copy(step: Step) -> None:
    """The parameters are averages while the net is evaluated, between backward and step."""
    step.backward()
    kept = [parameter.detach().clone() for parameter in step.parameters]
    for values in (step.average, kept):
        with torch.no_grad():
            for parameter, value in zip(step.parameters, values, strict=True):
                parameter.copy_(value)
            step.net.eval()(step.x)
    step.net.train()


def average_by_data(step: Step) -> None:
    step.backward()
    kept = [parameter.data for parameter in step.parameters]
    for values in (step.average, kept):
        for parameter, value in zip(step.parameters, values, strict=True):
            parameter.data = value
        with torch.no_grad():
            step.net.eval()(step.x)
    step.net.train()


def autocast(step: Step) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step.backward()


def in_high_precision(step: Step) -> None:
    """Products in float32 may then be rounded to the precision of TF32."""
    torch.set_float32_matmul_precision("high")
    try:
        step.backward()
    finally:
        torch.set_float32_matmul_precision("highest")


def in_parts(parts: int) -> Callable[[Step], None]:
    return partial(Step.backward, parts=parts)


# --- trainings --------------------------------------------------------------------------------------------------------


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 10, generator=generator)
    y = (x @ torch.randn(10, 3, generator=generator) + 0.5 * x[:, :3] * x[:, 3:6]).argmax(1)
    y[::10] = torch.randint(3, (len(y[::10]),), generator=generator)  # so that no loss is near zero
    return x, y


@cache
def trained(middle: str, run: Callable[[Step], None]) -> tuple[float, int]:
    """The loss of all examples after the training, and the number of steps that were undone."""
    x, y = examples()
    model, generator = made(middle), torch.Generator().manual_seed(1)
    net = kfac_fx.compile(model, (x[:CASES],), loss="categorical")
    optimizer = kfac_fx.KFAC(net, seed=0)
    average = [parameter.detach().clone() for parameter in net.parameters()]
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1 - number / STEPS
        chosen = torch.randint(EXAMPLES, (CASES,), generator=generator)
        optimizer.zero_grad()
        run(Step(net, x[chosen], y[chosen], average))
        optimizer.step()
        for mean, parameter in zip(average, net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(x), y)), int(optimizer.skipped)


UNDISTURBED = Step.backward
PARTS = {parts: in_parts(parts) for parts in (2, 4, 8)}
QUICK: list[tuple[str, Callable[[Step], None], str]] = [
    # the model, what happens in a step, and the model of the training to compare with
    ("plain", sam, "plain"),
    ("plain", sam_by_data, "plain"),
    ("plain", posterior_sample, "plain"),
    ("plain", forward_before, "plain"),
    ("plain", autocast, "plain"),
    ("plain", in_high_precision, "plain"),
    ("dropout", PARTS[4], "dropout"),
    ("batch norm", PARTS[4], "batch norm"),
    ("batch norm", forward_behind, "batch norm"),
    ("checkpointed", PARTS[4], "dropout"),
]
SLOW = [
    ("plain", forward_behind, "plain"),
    ("drop path", PARTS[4], "drop path"),
    ("noise", PARTS[4], "noise"),
    ("batch norm", forward_before, "batch norm"),
    ("checkpointed", UNDISTURBED, "dropout"),
    *((middle, PARTS[parts], middle) for middle in ("dropout", "drop path", "noise", "batch norm") for parts in (2, 8)),
    *((middle, sam, middle) for middle in ("dropout", "drop path", "noise", "batch norm")),
    *((middle, posterior_sample, middle) for middle in ("dropout", "batch norm")),
    *((middle, autocast, middle) for middle in ("dropout", "batch norm")),
]


def described(value: object) -> str:
    if isinstance(value, partial):
        return f"in {value.keywords['parts']} parts"
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(
    ("middle", "run", "other"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=described,
)
def test_a_training_is_about_as_good_as_without_the_disturbance(
    middle: str, run: Callable[[Step], None], other: str
) -> None:
    (loss, undone), (expected, _) = trained(middle, run), trained(other, UNDISTURBED)
    assert undone == 0
    assert loss < WORSE * expected < 0.6  # of about 1.1 at first


@pairs(("middle", ["plain", "batch norm"]), ("run", [evaluated_behind, average_by_copy, average_by_data]))
def test_an_evaluation_between_backward_and_step_changes_nothing(middle: str, run: Callable[[Step], None]) -> None:
    """The parameters are again what they were in the forward."""
    loss, undone = trained(middle, run)
    assert undone == 0
    assert loss == pytest.approx(trained(middle, UNDISTURBED)[0], rel=1e-3)
