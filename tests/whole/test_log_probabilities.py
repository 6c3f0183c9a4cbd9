"""Models that return log-probabilities, and are trained with `F.nll_loss`: they train as those that return logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Categorical, LossFunction, Normal
from kfac_fx.losses.distributions import axis_of_log_probabilities
from tests.tables import pairs

Head = Callable[[Tensor, int], Any]
HEADS: dict[str, Head] = {
    "log_softmax": F.log_softmax,
    "module": lambda z, axis: nn.LogSoftmax(axis)(z),
    "logsumexp": lambda z, axis: z - torch.logsumexp(z, axis, keepdim=True),
    "sum of exp": lambda z, axis: z - z.exp().sum(axis, keepdim=True).log(),
    "log of softmax": lambda z, axis: torch.log(torch.softmax(z, axis)),
    "never infinite": lambda z, axis: (F.softmax(z, axis) + 1e-12).log(),
    "flat": lambda z, axis: F.log_softmax(z.movedim(axis, -1).flatten(0, -2), -1).view(z.movedim(axis, -1).shape)
    .movedim(-1, axis).contiguous(),
    "turned": lambda z, axis: F.log_softmax(z.transpose(0, axis), 0).transpose(0, axis).contiguous(),
    "in a dictionary": lambda z, axis: {"hidden": z.detach(), "out": F.log_softmax(z, axis)},
    "in two": lambda z, axis: torch.cat([F.log_softmax(part, axis) for part in z.chunk(2)]),
    "in Python": lambda z, axis: F.log_softmax(z if z.sum() < 1e9 else 2 * z, axis),
}  # fmt: skip


class Classifier(nn.Module):
    """It has rows, or pixels with the classes on axis 1."""

    def __init__(self, pixels: bool, logarithms: bool, head: Head = F.log_softmax) -> None:
        super().__init__()
        self.axis, self.logarithms, self.head = 1 if pixels else -1, logarithms, head
        first, last = (nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 1)) if pixels else (nn.Linear(5, 4), nn.Linear(4, 3))
        self.layers = nn.Sequential(first, nn.Tanh(), last).double()

    def forward(self, x: Tensor) -> Any:
        logits: Tensor = self.layers(x)
        return self.head(logits, self.axis) if self.logarithms else logits


@cache  # many tests compare with one training of logits
def trained(
    pixels: bool,
    logarithms: bool,
    loss: Any,
    parts: int,
    factor: float = 1.0,
    head: Head = F.log_softmax,
    steps: int = 7,
) -> tuple[list[float], list[str]]:
    """Losses, ρ and predicted changes of some steps; and the warnings."""
    torch.manual_seed(0)
    model = Classifier(pixels, logarithms, head)
    shape = (2, 3, 3) if pixels else (5,)
    x, y = torch.randn(12, *shape).double(), torch.randint(3, (12, *shape[1:]))
    net = kfac_fx.compile(model, (x,), loss=loss)
    optimizer = kfac_fx.KFAC(net, seed=0)
    numbers = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                outputs = net(part)
                outputs = outputs["out"] if isinstance(outputs, dict) else outputs
                value = (F.nll_loss if logarithms else F.cross_entropy)(outputs, targets) * factor / parts
                value.backward()
                numbers.append(value.item())
            optimizer.step()
            numbers += [float(optimizer.rho), float(optimizer.predicted_change)]
    return numbers, [str(warning.message) for warning in told]


@pairs(
    ("parts", [1, 2]),
    ("pixels, loss", [(False, "categorical"), (False, "cross_entropy"), (False, Categorical), (True, "cross_entropy")]),
)
def test_they_train_as_logits_do(pixels: bool, loss: Any, parts: int) -> None:
    """The gradient of `nll_loss` at its inputs is another one, which is equal in front of the log_softmax."""
    (of_logits, _), (numbers, told) = (trained(pixels, logarithms, loss, parts) for logarithms in (False, True))
    assert numbers == pytest.approx(of_logits, rel=1e-6) and told == []


@cache
def by_function(axis: int) -> Callable[[Any], LossFunction]:
    return lambda out: Categorical((out["out"] if isinstance(out, dict) else out).movedim(axis, -1))


@pytest.mark.parametrize("name", HEADS)
def test_every_spelling_trains_as_logits_do(name: str) -> None:
    """Also with a function as the loss, and where no single graph is the model."""
    pixels = list(HEADS).index(name) % 2 == 0
    loss = by_function(1 if pixels else -1)
    of_logits, _ = trained(pixels, False, loss, 1, steps=3)
    numbers, told = trained(pixels, True, loss, 1, head=HEADS[name], steps=3)
    assert numbers == pytest.approx(of_logits, rel=1e-4) and told == []


def test_other_outputs_keep_their_gradients() -> None:
    """A normal distribution around the same numbers sends other gradients, of any sum over the axis."""

    def two(out: Mapping[str, Tensor]) -> list[LossFunction]:
        return [Categorical(out["a"]), Normal(out["b"])]

    class Both(Classifier):
        def forward(self, x: Tensor) -> Any:
            return {"a": F.log_softmax(self.layers(x), -1), "b": F.log_softmax(self.layers(-x), -1)}

    torch.manual_seed(0)
    x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
    net = kfac_fx.compile(Both(False, True), (x,), loss=two)
    optimizer = kfac_fx.KFAC(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            out = net(x)
            (F.nll_loss(out["a"], y) + (out["b"] + 1).square().sum(1).mean()).backward()
            optimizer.step()
    recorder = net.recorder((x,), {})
    assert recorder.axes_of_log_probabilities(net(x), [0, 1]) == {0: 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logarithms_in_halves_are_told_from_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(50, 40, 5)).to(dtype)
    assert axis_of_log_probabilities(F.log_softmax(logits, 1)) == 1
    assert axis_of_log_probabilities(F.log_softmax(logits, -1)) == 2
    assert axis_of_log_probabilities(F.log_softmax(logits, -1, dtype=torch.float32)) == 2
    assert axis_of_log_probabilities(logits) is None and axis_of_log_probabilities(logits.softmax(-1)) is None


class Inside(Classifier):
    """Forward computes the loss."""

    def __init__(self, pixels: bool, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__(pixels, True)
        self.function, self.options = function, options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layers(x), y, **self.options)


def words(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Logarithms of all pixels below one another, without the first column."""
    rows = F.log_softmax(z, 1).permute(0, 2, 3, 1)[:, :, 1:]
    return F.nll_loss(rows.reshape(-1, 3), y[:, :, 1:].reshape(-1), **options)


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")  # of A, in which their rows are
@pytest.mark.parametrize(
    ("pixels", "options"),
    [
        (False, {"reduction": "sum"}),
        (False, {"ignore_index": 0}),
        (True, {"weight": torch.tensor([1.0, 2.0, 3.0]).double()}),
        (True, {}),
    ],
)
def test_losses_of_logarithms_in_forward_are_those_of_logits(pixels: bool, options: dict[str, Any]) -> None:
    """The same loss is found, with the same statistics."""
    torch.manual_seed(0)
    shape = (2, 3, 3) if pixels else (5,)
    x, y = torch.randn(12, *shape).double(), torch.randint(3, (12, *shape[1:]))
    spellings: list[Callable[..., Tensor]] = [
        F.cross_entropy,
        lambda z, y, **kwargs: F.nll_loss(F.log_softmax(z, 1), y, **kwargs),
        lambda z, y, **kwargs: F.nll_loss(z - z.logsumexp(1, keepdim=True), y, **kwargs),
        lambda z, y, **kwargs: nn.NLLLoss(**kwargs)(torch.softmax(z, 1).log(), y),
    ]
    if pixels:
        spellings += [lambda z, y, **kwargs: F.cross_entropy(z[..., 1:], y[..., 1:], **kwargs), words]
    found = []
    for function in spellings:
        torch.manual_seed(0)
        net = kfac_fx.compile(Inside(pixels, function, **options), (x, y), verify=False)
        assert len(net.program.losses) == 1 and len(net.program.dropped) == ("weight" in options)
        found.append(net.record((x, y), {}, mode="exact"))
    for moments, wanted in zip(found, [found[0]] * 4 + [found[-2]] * (len(found) - 4), strict=True):
        assert moments.cases == wanted.cases
        torch.testing.assert_close(moments.statistics, wanted.statistics)


def test_a_factor_of_their_loss_is_told() -> None:
    _, (text,) = trained(False, True, "categorical", 1, factor=2.0)
    assert text.startswith("the trained loss is 2 times the mean of the registered Categorical loss over its 12 cases")


def test_probabilities_are_no_logits() -> None:
    """Another function of the outputs still fits no targets."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    with pytest.warns(UserWarning, match="the registered Categorical loss takes logits"):
        net = kfac_fx.compile(nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1)), (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net)
    F.nll_loss(net(x).log(), y).backward()
    with pytest.warns(kfac_fx.LossScaleWarning, match="fits no targets of the registered Categorical loss"):
        optimizer.step()
