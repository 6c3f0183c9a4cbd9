"""Cross entropies whose targets are probabilities of the classes, as those of mixup and of distillation."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.tables import pairs

WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "weighted": {"weight": WEIGHT},
    "both": {"weight": WEIGHT, "label_smoothing": 0.2},
}
SHAPES = {"rows": (6, 3), "positions": (6, 5, 3)}
RULES = {"default": {}, "regular": {"momentum_type": "regular", "lr": 0.1, "damping": 0.1}}


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5).double(), nn.Linear(5, 4).double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).movedim(-1, 1)


class Inside(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body, self.options = Body(), options

    def forward(self, x, y):
        return F.cross_entropy(self.body(x), y, **self.options)


def data(shape=(6, 3)) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    return x, torch.rand(*shape[:-1], 4, generator=g, dtype=torch.float64).mul(5).softmax(-1).movedim(-1, 1)


def curve(net, loss, rule, steps=30) -> list[float]:
    torch.manual_seed(1)
    optimizer = kfac_fx.KFAC(net, **rule)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


@pairs(("rule", RULES), ("options", OPTIONS), ("shape", SHAPES))
def test_they_train_inside_of_forward_as_outside(shape, options, rule):
    """With class weights the checks of the default rule see the weighted loss inside alone, so its steps differ."""
    (x, y), body = data(shape), Body()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = kfac_fx.compile(Inside(**options), (x, y))
        inside = curve(net, lambda: net(x, y), rule)
        other = kfac_fx.compile(body, (x,), loss="cross_entropy")
        outside = curve(other, lambda: F.cross_entropy(other(x), y, **options), rule)
    assert inside[-1] < inside[0]
    if rule or "weight" not in options:
        assert inside == pytest.approx(outside, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_multiple_of_their_loss_is_told(shape):
    x, y = data(shape)
    net = kfac_fx.compile(Inside(), (x, y))
    with pytest.warns(kfac_fx.LossScaleWarning, match=r"is 3 times the mean of the registered OnehotCategorical loss"):
        curve(net, lambda: 3 * net(x, y), RULES["regular"], 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_of_weight_zero_are_no_cases(shape):
    """The value of the loss, from which factors of other losses are told, has none of these rows."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x, y, mask):
            return (F.cross_entropy(self.body(x), y, reduction="none") * mask).sum() / mask.sum()

    x, y = data(shape)
    mask = torch.ones(x.shape[:-1], dtype=torch.float64)
    mask[1::2] = 0
    net = kfac_fx.compile(Masked(), (x, y, mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error", kfac_fx.LossScaleWarning)
        warnings.filterwarnings("ignore", message=".*have no target")
        masked = curve(net, lambda: net(x, y, mask), RULES["regular"], 3)
    body = Body()
    assert masked[0] == pytest.approx(F.cross_entropy(body(x[::2]), y[::2]).item(), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_scores_take_them(shape):
    """Against the gradients of autograd, example by example."""
    (x, y), body = data(shape), Body().eval()
    net = kfac_fx.compile(body, (x,), loss="cross_entropy")
    batch = kfac_fx.Batch(x, targets=y)
    spectrum = kfac_fx.fit_spectrum(net, [batch], mode="empirical").at(damping=0.1)
    parameters = dict(body.named_parameters())
    gradients = [
        torch.autograd.grad(F.cross_entropy(body(x[n : n + 1]), y[n : n + 1], reduction="sum"), [*parameters.values()])
        for n in range(len(x))
    ]
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    expected = [sum((g * vector[name]).sum() for name, g in zip(parameters, of, strict=True)) for of in gradients]
    torch.testing.assert_close(spectrum.queries(vector).scores(batch).flatten(), torch.stack(expected))
