"""A trained loss that is a multiple of the registered one is told at the first step, and nothing else is."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LossScaleWarning, losses
from kfac_fx.compiled import loss_scale
from kfac_fx.compiled.loss_scale import LossFactor, factor_of_step
from kfac_fx.optim.standstill import LISTED_PARAMETERS, check_coverage
from tests.runtime.collections_of_toys import towers
from tests.tables import pairs

Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CLASSES, VALUES = torch.arange(8) % 4, X.repeat(1, 2)[:, :4]
BITS = (VALUES > 0).float()
COUNTS = VALUES.exp().round()
SOME = torch.where(torch.arange(8) < 3, -100, CLASSES)


def variance(y: Tensor) -> Any:
    return losses.NormalMeanVariance(y[:, :2], y[:, 2:].exp())


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def ce(scale: float = 1.0, **options: Any) -> Loss:
    return lambda y, t, _: scale * F.cross_entropy(y, t, **options)


def bce(reduction: str, scale: float = 1.0) -> Loss:
    return lambda y, t, _: scale * F.binary_cross_entropy_with_logits(y, t, reduction=reduction)


def dice(p: Tensor, t: Tensor) -> Tensor:
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


@cache  # many cases have one loss
def compiled(loss: Any) -> tuple[kfac_fx.CompiledModule, dict[str, Tensor]]:
    """A model, and the parameters that it begins with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 4))
    return kfac_fx.compile(model, loss=loss), copy.deepcopy(model.state_dict())


def warned(
    loss: Any,
    targets: Tensor,
    trained: Loss,
    *,
    forwards: int = 1,
    value: bool = False,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> str:
    """The warning of the first step; "" for none."""
    net, start = compiled(loss)
    net.model.load_state_dict(start)
    net.zero_grad()
    torch.manual_seed(0)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(2):  # steps
            for _ in range(forwards):
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    found = trained(net(X), targets, net.model)
                found.backward()
            optimizer.step(loss=found if value else None)
    texts = [warning for warning in caught if issubclass(warning.category, LossScaleWarning)]
    assert all(warning.filename == __file__ for warning in texts) and len(texts) <= 1
    return str(texts[0].message) if texts else ""


RIGHT: dict[str, dict[str, Any]] = {
    "the mean": {"loss": "categorical", "targets": CLASSES, "trained": ce()},
    "a penalty on parameters": {
        "loss": "categorical", "targets": CLASSES, "trained": lambda *a: ce()(*a) + penalty(a[2]),
    },
    "a sum, declared": {"loss": "categorical", "targets": CLASSES, "trained": ce(reduction="sum"), "reduction": "sum"},
    "micro-batches": {"loss": "categorical", "targets": CLASSES, "trained": ce(0.5), "forwards": 2},
    "a registered factor": {"loss": lambda y: (3.0, losses.Categorical(y)), "targets": CLASSES, "trained": ce(3.0)},
    "binary": {"loss": "multi_bernoulli", "targets": BITS, "trained": bce("sum", 1 / 8)},
    "squares": {
        "loss": "normal", "targets": VALUES, "trained": lambda y, t, _: (y - t).square().sum() / 8, "value": True
    },
    "torch's mean of squares": {"loss": "mse", "targets": VALUES, "trained": lambda y, t, _: F.mse_loss(y, t)},
    "torch's mean of squares in micro-batches": {
        "loss": "mse", "targets": VALUES, "trained": lambda y, t, _: F.mse_loss(y, t) / 2, "forwards": 2
    },
    "torch's cross entropy": {"loss": "cross_entropy", "targets": CLASSES, "trained": ce()},
    "torch's binary cross entropy": {"loss": "bce_with_logits", "targets": BITS, "trained": bce("mean")},
    "statistics of a sum over all cases, some of which have no target": {
        "loss": "categorical", "targets": SOME, "trained": ce(1 / 8, reduction="sum"), "estimation_mode": "empirical",
    },
    "statistics of a sum, some of whose cases have no target": {
        "loss": "categorical", "targets": SOME, "trained": ce(reduction="sum"), "estimation_mode": "empirical",
        "reduction": "sum",
    },
    "a small penalty on logits": {
        "loss": "categorical", "targets": CLASSES,
        "trained": lambda y, t, _: F.cross_entropy(y, t) + 1e-2 * y.logsumexp(-1).square().mean(),
    },
    "distillation": {
        "loss": "categorical", "targets": VALUES,
        "trained": lambda y, t, _: F.kl_div((y / 2).log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    },
    "a mean of squares and a penalty, which hides it": {
        "loss": "normal", "targets": VALUES, "trained": lambda y, t, m: F.mse_loss(y, t) + penalty(m), "value": True
    },
    "another loss, by label smoothing": {
        "loss": "categorical", "targets": CLASSES, "trained": ce(3.0, label_smoothing=0.1)
    },
    "soft targets": {"loss": "multi_bernoulli", "targets": BITS * 0.8, "trained": bce("mean")},
    "a scaler against underflow": {"loss": "categorical", "targets": CLASSES, "trained": ce(2.0**16)},
    "a small scaler under autocast": {
        "loss": "categorical", "targets": CLASSES, "trained": ce(32.0), "autocast": torch.float16
    },
    "micro-batches under a coarse autocast": {
        "loss": "categorical", "targets": CLASSES, "trained": ce(1 / 3), "forwards": 3, "autocast": torch.bfloat16
    },
    "micro-batches of squares under a coarse autocast": {
        "loss": "mse", "targets": VALUES, "trained": lambda y, t, _: F.mse_loss(y, t) / 3, "forwards": 3,
        "autocast": torch.bfloat16,
    },
    "another loss, nearly the registered one, under a coarse autocast": {
        "loss": "multi_bernoulli", "targets": BITS, "autocast": torch.bfloat16,
        "trained": lambda y, t, _: bce("mean")(y, t, _) * 4 + 0.1 * dice(y.float().sigmoid(), t),
    },
}  # fmt: skip


@pytest.mark.parametrize("forwards", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["categorical", "mse"])
def test_micro_batches_that_are_not_divided_are_told_under_autocast(
    loss: str, dtype: torch.dtype, forwards: int
) -> None:
    trained: Loss = ce() if loss == "categorical" else lambda y, t, _: F.mse_loss(y, t)
    text = warned(loss, CLASSES if loss == "categorical" else VALUES, trained, forwards=forwards, autocast=dtype)
    assert text.startswith(f"the trained loss is {forwards} times the mean of the registered ")
    assert f"the step has {forwards} forwards: divide the loss of each by {forwards}." in text


def test_a_power_of_two_under_an_autocast_that_needs_no_scaler_is_told() -> None:
    assert warned("categorical", CLASSES, ce(4.0), autocast=torch.float16) == ""
    told = warned("categorical", CLASSES, ce(4.0), autocast=torch.bfloat16)
    assert told.startswith("the trained loss is 4 times the mean of the registered Categorical loss over its 8 cases;")


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_what_is_right_or_cannot_be_told_is_not_warned_of(case: dict[str, Any]) -> None:
    assert warned(**case) == ""


def test_classes_on_another_axis_than_the_last_are_told() -> None:
    """As in segmentation, where cross_entropy takes axis 1; nothing else would say so."""
    x, targets = torch.randn(2, 3, 6, 5), torch.randint(4, (2, 6, 5))
    for make, texts in (
        (losses.Categorical, ["the trained loss has its classes on axis 1 of [2, 4, 6, 5], and the registered"]),
        (lambda y: losses.Categorical(y.movedim(1, -1)), []),
    ):
        net = kfac_fx.compile(nn.Conv2d(3, 4, 1), (x,), loss=make)
        optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LossScaleWarning)
            F.cross_entropy(net(x), targets, weight=torch.rand(4) if texts else None).backward()
            optimizer.step()
        assert [str(warning.message).partition(" Categorical")[0] for warning in caught] == texts


@pytest.mark.parametrize("outputs", [nn.Linear(3, 5), nn.Sequential(nn.Linear(3, 20), nn.Unflatten(-1, (5, 4)))])
def test_the_classes_of_a_loss_by_name_are_told_on_the_axes_of_the_outputs(outputs: nn.Module) -> None:
    """loss="cross_entropy" has them on axis 1, as torch's function; a tagger that is flattened has them on the last."""
    x = torch.randn(6, 7, 3)
    net = kfac_fx.compile(outputs, (x,), loss="cross_entropy")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    logits = net(x).movedim(2, -1)
    F.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % 5).backward()
    shape = [6, 7, 5] if net(x).ndim == 3 else [6, 7, 5, 4]
    remedy = (
        '"categorical"' if len(shape) == 3 else "lambda outputs: kfac_fx.losses.Categorical(outputs.movedim(2, -1))"
    )
    told = (
        f"the trained loss has its classes on axis 2 of {shape}, and the registered Categorical on axis 1: write loss="
    )
    with pytest.warns(LossScaleWarning, match=re.escape(f"{told}{remedy}.")):
        optimizer.step()


def times(factor: str, name: str, reduction: str = "mean", cases: int = 8) -> str:
    return f"the trained loss is {factor} times the {reduction} of the registered {name} loss over its {cases} cases; "


REGISTER = "register it as loss=lambda outputs: ({}, kfac_fx.losses.{}(outputs{}))."
COEFFICIENT = "give it the coefficient of ({}, kfac_fx.losses.{}(...)) in loss=."
ELEMENTS = "it is a mean over the 4 elements of a case, too: sum over them, or "
SUM = "it is their sum: divide it by the number of cases."
SCALER = "if a GradScaler multiplies it, write KFAC(..., grad_scaler=scaler); else take the factor out, or "
LEFT_OUT = (
    "the trained loss leaves out 3 of 8 cases, whose gradient is zero, and the factors have them: 38% of their sums "
    "are of cases that are not trained. Let forward compute the loss: F.cross_entropy with targets of -100 for "
    "these cases, or (losses * mask).sum() / mask.sum(); targets of -100 outside of forward change nothing. If they "
    "are the same in every batch, as the nodes of a graph without labels or all tokens but the last, name the outputs "
    "of the others: loss=lambda outputs: kfac_fx.losses.Categorical(outputs[mask])."
)
WEIGHED = (
    "the trained loss weighs its cases from 0.4 to 1.6 of their mean, and the factors are of cases of one weight. If "
    "the weights are of classes or examples, as weight=, let forward compute the loss as a product of them and "
    'F.cross_entropy(..., reduction="none"), with weights[y] for those of classes. If they depend on the predictions, '
    'as those of a focal loss do, write KFAC(..., estimation_mode="empirical"), whose factors are of the gradients '
    "themselves; or leave it as it is, if the loss falls."
)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "some cases left out": ({"loss": "categorical", "targets": SOME, "trained": ce()}, LEFT_OUT),
    "a sum over the number of labels": (
        {"loss": "categorical", "targets": SOME, "trained": ce(1 / 5, reduction="sum")}, LEFT_OUT
    ),
    "a sum over the number of labels before they are shifted": (
        {"loss": "categorical", "targets": SOME, "trained": ce(1 / 6, reduction="sum")}, LEFT_OUT
    ),
    "micro-batches over the number of their labels": (
        {"loss": "categorical", "targets": SOME, "trained": ce(1 / 10, reduction="sum"), "forwards": 2}, LEFT_OUT
    ),
    "a mask in a product": (
        {"loss": "categorical", "targets": CLASSES, "trained": lambda y, t, _: (
            F.cross_entropy(y, t, reduction="none") * (SOME >= 0)).sum() / 5}, LEFT_OUT
    ),
    "weights of classes": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(weight=torch.arange(1.0, 5.0))}, WEIGHED
    ),
    "cases without a target in statistics of the trained loss": (
        {"loss": "categorical", "targets": SOME, "trained": ce(), "estimation_mode": "empirical"},
        "the trained loss is a mean over the 5 of 8 cases that have a target, and the statistics of its gradients "
        "count 8: the factors G are 1.6 times too large. Let forward compute the loss, name padding with "
        'padding_mask=, or leave out estimation_mode="empirical".',
    ),
    "a scaler that nobody told a pending of": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(2.0**16), "estimation_mode": "empirical"},
        times("6.554e+04", "Categorical") + SCALER + REGISTER.format("6.554e+04", "Categorical", ""),
    ),
    "a factor that is as likely a small scaler's": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(64.0)},
        times("64", "Categorical") + SCALER + REGISTER.format(64, "Categorical", ""),
    ),
    "a sum": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(reduction="sum")},
        times("8", "Categorical") + SUM,
    ),
    "a sum in the training backward": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(reduction="sum"), "estimation_mode": "empirical"},
        times("8", "Categorical") + SUM,
    ),
    "a sum under autocast": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(reduction="sum"), "autocast": torch.bfloat16},
        times("8", "Categorical") + SUM,
    ),
    "a mean, declared a sum": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(), "reduction": "sum"},
        times("0.125", "Categorical", "sum") + "it is their mean: write KFAC(..., reduction='mean').",
    ),
    "a factor, and a penalty": (
        {"loss": "categorical", "targets": CLASSES, "trained": lambda *a: ce(3.0)(*a) + penalty(a[2])},
        times("3", "Categorical") + "take the factor out, or " + REGISTER.format(3, "Categorical", ""),
    ),
    "another factor than the registered one": (
        {"loss": lambda y: (2.0, losses.Categorical(y / 5)), "targets": CLASSES,
             "trained": lambda y, t, _: 6 * F.cross_entropy(y / 5, t)},
        times("3", "Categorical") + "take the factor out, or " + COEFFICIENT.format(6, "Categorical"),
    ),
    "a mean over elements of a part of the output": (
        {"loss": lambda y: losses.Normal(y[:, :2]), "targets": VALUES[:, :2],
             "trained": lambda y, t, _: F.mse_loss(y[:, :2], t)},
        times("0.5", "Normal") + ELEMENTS.replace("4", "2") + COEFFICIENT.format(0.5, "Normal"),
    ),
    "one-hot": (
        {"loss": losses.OnehotCategorical, "targets": CLASSES, "trained": ce(3.0)},
        times("3", "OnehotCategorical") + "take the factor out, or " + REGISTER.format(3, "OnehotCategorical", ""),
    ),
    "a mean over elements": (
        {"loss": "multi_bernoulli", "targets": BITS, "trained": bce("mean")},
        times("0.25", "MultiBernoulli") + ELEMENTS + "register it as loss='bce_with_logits'.",
    ),
    "counts": (
        {"loss": "poisson_nll", "targets": COUNTS, "trained": lambda y, t, _: 3 * F.poisson_nll_loss(y, t)},
        times("3", "Poisson") + "take the factor out, or " + REGISTER.format(0.75, "Poisson", ""),
    ),
    "a mean of counts over elements": (
        {"loss": "poisson", "targets": COUNTS, "trained": lambda y, t, _: F.poisson_nll_loss(y, t, full=True)},
        times("0.25", "Poisson") + ELEMENTS + "register it as loss='poisson_nll'.",
    ),
    "a mean of squares over elements, where the loss is known": (
        {"loss": "normal", "targets": VALUES, "trained": lambda y, t, _: F.mse_loss(y, t), "value": True},
        times("0.25", "Normal") + ELEMENTS + "register it as loss='mse'.",
    ),
    "a mean of squares over elements, without the loss": (
        {"loss": "normal", "targets": VALUES, "trained": lambda y, t, _: F.mse_loss(y, t)},
        times("0.25", "Normal") + ELEMENTS + "register it as loss='mse'.",
    ),
    "half a mean of squares in two backwards": (
        {"loss": "mse", "targets": VALUES, "trained": lambda y, t, _: 0.25 * F.mse_loss(y, t), "forwards": 2},
        times("0.5", "Normal", cases=16) + "take the factor out, or " + REGISTER.format(0.125, "Normal", ", var=0.5"),
    ),
    "a sum of squares, registered as their mean": (
        {"loss": "mse", "targets": VALUES, "trained": lambda y, t, _: (y - t).square().sum() / 8},
        times("4", "Normal") + "take the factor out, or " + REGISTER.format(1, "Normal", ", var=0.5"),
    ),
    "a variance of its own": (
        {"loss": variance, "targets": VALUES[:, :2],
             "trained": lambda y, t, _: F.gaussian_nll_loss(y[:, :2], t, y[:, 2:].exp(), eps=0, reduction="sum") / 4},
        times("2", "NormalMeanVariance") + "take the factor out, or " + COEFFICIENT.format(2, "NormalMeanVariance"),
    ),
    "undivided micro-batches": (
        {"loss": "categorical", "targets": CLASSES, "trained": ce(), "forwards": 2},
        times("2", "Categorical", cases=16) + "the step has 2 forwards: divide the loss of each by 2.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "text"), WRONG.values(), ids=WRONG)
def test_a_factor_is_told_with_what_to_write(case: dict[str, Any], text: str) -> None:
    assert warned(**case).partition("\n")[0] == text


@pytest.mark.parametrize(
    ("factor", "forwards", "rest"),
    [
        (3.0, 1, "take the factor out, or " + REGISTER.format(3, "Categorical", "")),
        (1.0, 4, "the step has 4 forwards: divide the loss of each by 4."),
    ],
)
def test_a_factor_is_that_of_the_mean_over_cases_with_a_target(factor: float, forwards: int, rest: str) -> None:
    text = warned("categorical", SOME, ce(factor), forwards=forwards)
    multiple = factor * forwards
    assert (
        f"is {multiple:g} times the mean of the registered Categorical loss over its {5 * forwards} cases with" in text
    )
    assert f" a target; {rest}" in text


def test_a_forward_whose_gradients_are_set_to_zero_is_no_part_of_the_loss_of_the_step() -> None:
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    for by_hand in (False, True):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        net = kfac_fx.compile(model, loss="categorical")
        optimizer = kfac_fx.KFAC(net, 0.1, damping=0.1, estimation_mode="empirical")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if by_hand:
                    for parameter in model.parameters():
                        parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
                else:
                    optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
            optimizer.step()
        assert not caught


class Divided(nn.Module):
    """Two captured layers around Python, which returns as many tensors as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = self.first(x)
        outputs = self.last(hidden.tanh() if hidden.sum() > -1e9 else hidden)
        return (outputs, outputs.sum(1).detach()) if y is None else (F.cross_entropy(outputs, y), outputs)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_loss_of_a_divided_model_is_followed(factor: float, inside: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    inputs = (x, y) if inside else (x,)
    loss = None if inside else lambda outputs: losses.Categorical(outputs[0])
    net = kfac_fx.compile(Divided(), inputs, loss=loss)
    assert net.program.left, "captured whole"
    optimizer = kfac_fx.KFAC(net, seed=0)
    outputs = net(*inputs)
    (factor * (outputs[0] if inside else F.cross_entropy(outputs[0], y))).backward()
    if factor == 1.0:
        optimizer.step()
        assert not optimizer._step_state.checks.unobserved
    else:
        with pytest.warns(LossScaleWarning, match="the trained loss is 3 times the mean"):
            optimizer.step()


def test_of_a_large_batch_the_first_cases_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "LIMIT", 20)  # five of eight cases
    assert warned("categorical", CLASSES, ce(reduction="sum")).startswith(times("8", "Categorical"))
    assert warned("categorical", CLASSES, ce()) == ""


class Own(nn.Module):
    """Computes its loss, behind noise that must be the same when the step looks again. A factor in forward is one of
    the Fisher, too."""

    def __init__(self, reduction: str, scale: float) -> None:
        super().__init__()
        self.fc, self.noise, self.reduction, self.scale = nn.Linear(3, 4), nn.Dropout(0.3), reduction, scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(self.noise(self.fc(x)), y, reduction=self.reduction)


@pytest.mark.parametrize(
    ("reduction", "inside", "outside", "factor"),
    [("mean", 1, 1, None), ("sum", 1, 1, "8"), ("mean", 2, 1, None), ("mean", 1, 5, "5"), ("mean", 2, 0.5, "0.5")],
)
def test_a_loss_that_forward_computes_is_followed_to_its_inputs(
    reduction: str, inside: float, outside: float, factor: str | None
) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Own(reduction, inside), (X, CLASSES))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    state = torch.get_rng_state()
    loss = net(X, CLASSES)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert torch.equal(net.plain(X, CLASSES), loss) and torch.equal(torch.get_rng_state(), after)
    (outside * loss).backward()
    if factor is None:
        optimizer.step()
        return
    rest = SUM if factor == "8" else f"take the factor out, or let forward multiply its loss by {outside:g}."
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    assert str(caught[0].message).startswith(times(factor, "Categorical") + rest)


class Sequences(nn.Module):
    """Returns its loss and the scores of all positions, of which the loss reads all but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.fc(x)
        loss = F.cross_entropy(scores[:, :-1].reshape(-1, 4), y[:, 1:].reshape(-1))
        return {"loss": loss, "scores": scores}


@pytest.mark.parametrize("factor", [1, 3])
def test_a_loss_returned_beside_other_things_is_followed_too(factor: int) -> None:
    x, y = torch.randn(2, 5, 3), torch.arange(10).view(2, 5) % 4
    net = kfac_fx.compile(Sequences(), (x, y))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    outputs = net(x, y)
    (factor * outputs["loss"] + 0.1 * outputs["scores"].square().mean()).backward()
    if factor == 1:
        optimizer.step()
        return
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    assert str(caught[0].message).startswith(times("3", "Categorical"))


@pytest.mark.parametrize("factor", [1, 3])
def test_losses_of_a_layer_collection_are_looked_at_tower_by_tower(factor: int) -> None:
    lc = towers(torch.randn(6, 2, 3))
    for tower, output in enumerate(("add", "add_1")):
        lc.register_categorical_predictive_distribution(output, name="loss", reuse=tower > 0)
    lc.auto_register_layers()
    net = kfac_fx.compile(lc)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    mean = torch.stack([F.cross_entropy(scores, CLASSES[:6]) for scores in net(torch.randn(6, 2, 3))]).mean()
    (factor * mean).backward()
    if factor == 1:
        optimizer.step()
        return
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    (text,) = str(caught[0].message).splitlines()[:-1]
    assert text.endswith("take the factor out, or register it on a LayerCollection with coeff=3.")


def test_several_losses_are_told_apart() -> None:
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 2)])
    model.forward = lambda x: (model[0](x), model[1](x))  # type: ignore[method-assign, assignment]

    def both(y: Any) -> Any:
        return [(1.0, losses.Categorical(y[0])), (2.0, losses.MultiBernoulli(y[1]))]

    net = kfac_fx.compile(model, (X,), loss=both)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    scores, bits = net(X)
    (F.cross_entropy(scores, CLASSES) + F.binary_cross_entropy_with_logits(bits, BITS[:, :2])).backward()
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    (text,) = str(caught[0].message).splitlines()[:-1]
    shape = f"the trained loss is 0.25 times the mean of the registered MultiBernoulli loss of {[len(X), 2]} over its "
    assert text.startswith(shape) and "(0.5, kfac_fx.losses.MultiBernoulli" in text


class Heads(nn.Module):
    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, size) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def told_of_heads(sizes: tuple[int, int], loss: Any, trained: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """The lines of the first warning."""
    net = kfac_fx.compile(Heads(sizes), loss=loss)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    trained(*net(X)).backward()
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    return str(caught[0].message).splitlines()[:-1]


def test_losses_of_one_shape_are_told_apart_by_their_numbers() -> None:
    lines = told_of_heads(
        (1, 1),
        lambda y: [losses.Normal(y[0]), losses.Normal(y[1])],
        lambda u, v: u.square().mean() + 10 * v.square().mean(),
    )
    (line,) = lines
    assert line.startswith("loss 2 of 2: the trained loss is 10 times the mean of the registered Normal loss of [8, 1]")


@pytest.mark.parametrize(
    ("coefficient", "texts"),
    [
        (1.0, ["the trained loss is 8 times the mean of the registered Normal loss", SUM]),
        (0.5, ["behind that division the trained loss is 2 times the mean", "(1, kfac_fx.losses.Normal(...))"]),
    ],
)
def test_where_one_loss_is_a_sum_the_others_are_told_what_is_left_behind_the_division(
    coefficient: float, texts: list[str]
) -> None:
    first, other = told_of_heads(
        (4, 2),
        lambda y: [losses.Categorical(y[0]), (coefficient, losses.Normal(y[1]))],
        lambda u, v: F.cross_entropy(u, CLASSES, reduction="sum") + v.square().sum(),
    )
    assert "8 times the mean of the registered Categorical loss of [8, 4]" in first and first.endswith(SUM)
    assert all(text in other for text in texts)


@pytest.mark.parametrize(
    ("reduction", "factor", "text"),
    [
        ("mean", 1 / 6, "is divided by the number of cases twice: a mean is already"),
        ("sum", 6, "is multiplied by the number of cases: a sum over them needs no factor"),
    ],
)
def test_a_division_too_many_or_too_few_is_not_taken_for_the_other_reduction(
    reduction: str, factor: float, text: str
) -> None:
    net, x = kfac_fx.compile(nn.Linear(3, 4), loss="categorical"), torch.randn(6, 3)
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, reduction=reduction)
    (factor * F.cross_entropy(net(x), torch.zeros(6, dtype=torch.long), reduction=reduction)).backward()
    with pytest.warns(kfac_fx.LossScaleWarning, match=text):
        opt.step()


def test_a_mean_over_as_many_elements_as_cases_may_be_either() -> None:
    """It said that the number of cases divides the loss twice, and in a batch of another size that it is a mean."""
    net, x = kfac_fx.compile(nn.Linear(3, 4), loss="normal"), torch.randn(4, 3)
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    F.mse_loss(net(x), torch.zeros(4, 4)).backward()
    text = (
        "twice: a mean is already; or it is a mean over the 4 elements of a case, too: sum over them, or register it as"
    )
    with pytest.warns(kfac_fx.LossScaleWarning, match=text):
        opt.step()


def in_steps(net: kfac_fx.CompiledModule, loss: Callable[[Tensor], Tensor], *args: Tensor, **options: Any) -> list[str]:
    """The warnings of two steps."""
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(2):
            optimizer.zero_grad()
            loss(net(*args)).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if issubclass(warning.category, LossScaleWarning)]


def contrast(other: Tensor) -> Loss:
    def loss(z: Tensor) -> Tensor:
        scores = F.normalize(z) @ F.normalize(other).T / 0.1
        return F.cross_entropy(scores, torch.arange(len(z)))

    return loss  # type: ignore[return-value]


@pytest.mark.parametrize("loss", [contrast(torch.randn(8, 4)), lambda z: F.mse_loss(z, VALUES)])
@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_a_gradient_that_fits_no_targets_is_told(loss: Any, mode: str) -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="categorical")
    (text,) = in_steps(net, loss, X, estimation_mode=mode)
    assert text.startswith(
        "the trained loss fits no targets of the registered Categorical loss: the outputs [8, 4] have gradients that "
        "do not sum to zero over the classes"
    )
    assert "return F.normalize(f(a)) @ F.normalize(f(b)).T / 0.1, and compile that module" in text
    assert 'write loss="mse"' in text


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_losses_of_a_matrix_and_its_transpose_are_told_as_no_misfit(weight: float) -> None:
    """The gradient of such similarities is that of both losses, so its sums over classes say nothing of one of them."""
    pairs = torch.arange(8)
    both = lambda z: [(weight, losses.Categorical(z)), (weight, losses.Categorical(z.T))]  # noqa: E731
    net = kfac_fx.compile(nn.Linear(3, 8), loss=both)
    trained = lambda z: weight * (F.cross_entropy(9 * z, pairs) + F.cross_entropy(9 * z.T, pairs))  # noqa: E731
    assert not any("fits no targets" in text for text in in_steps(net, trained, X))


def test_a_margin_that_is_registered_as_a_cross_entropy_is_told() -> None:
    """Every class pulls on the true one, so the gradients of a case sum to zero, as those of a cross entropy do."""
    net = kfac_fx.compile(nn.Linear(3, 4), loss="categorical")
    (text,) = in_steps(net, lambda z: F.multi_margin_loss(z, CLASSES), X)
    assert "have one size for all classes, as those of a margin" in text and "leave loss= out" in text
    assert in_steps(net, lambda z: F.cross_entropy(z, CLASSES, label_smoothing=0.3), X) == []


ONE_HOT = F.one_hot(CLASSES % 2, 2).float()


@pytest.mark.parametrize(
    ("loss", "name"),
    [(F.binary_cross_entropy_with_logits, "bce_with_logits"), (F.mse_loss, "mse")],
)
def test_another_loss_of_one_hot_targets_is_told_whatever_its_sums_over_two_classes(loss: Any, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1], model.bias[1] = -model.weight[0], (1.1 if name == "mse" else 0.1) - model.bias[0]
    (text,) = in_steps(kfac_fx.compile(model, loss="categorical"), lambda z: loss(z, ONE_HOT), X)
    assert f'write loss="{name}"' in text


def test_the_target_of_a_squared_error_need_not_have_the_least_gradient() -> None:
    """An output of less than that of the target minus one had the least one, and the warning was missing."""
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([-2.0, 0.0, 1.0, 2.05]))
        model.weight.mul_(0.1)
    net = kfac_fx.compile(model, loss="categorical")
    (text,) = in_steps(net, lambda z: F.mse_loss(z, F.one_hot(CLASSES, 4).float()), X)
    assert 'write loss="mse"' in text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize(
    ("trained", "text"),
    [
        (F.mse_loss, "or give it the coefficient of (0.25, kfac_fx.losses.Normal(...)) in loss="),
        (
            lambda z, t: F.binary_cross_entropy_with_logits(z, (t > 0).float()),
            "write kfac_fx.losses.MultiBernoulli(...) for it in loss=",
        ),
    ],
)
@pytest.mark.parametrize("several", [True, False])
def test_a_loss_of_one_of_several_outputs_has_no_short_name(trained: Any, text: str, several: bool) -> None:
    def of_outputs(outputs: tuple[Tensor, Tensor]) -> Any:
        first = losses.Normal(outputs[0])
        return [first, losses.Categorical(outputs[1])] if several else first

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return trained(outputs[0], VALUES) + (F.cross_entropy(outputs[1], CLASSES) if several else 0.0)

    (told,) = in_steps(kfac_fx.compile(Two(), (X,), loss=of_outputs), loss, X)
    assert text in told and 'loss="' not in told and "loss='" not in told


IGNORED = torch.where(torch.arange(8) < 3, -100, CLASSES)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda z: F.cross_entropy(z, CLASSES), "categorical"),
        (lambda z: F.cross_entropy(z, IGNORED, reduction="sum"), "categorical"),
        (lambda z: F.binary_cross_entropy_with_logits(z, (VALUES > 0).float()), "bce_with_logits"),
        (lambda z: F.binary_cross_entropy(z.sigmoid(), (VALUES > 0).float(), reduction="sum") / 8, "multi_bernoulli"),
    ],
)
@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_a_cross_entropy_that_is_registered_as_a_squared_error_is_told(loss: Any, kind: str, mode: str) -> None:
    text = "\n".join(in_steps(kfac_fx.compile(nn.Linear(3, 4), loss="mse"), loss, X, estimation_mode=mode))
    assert (
        "the trained loss is a cross entropy, which takes the outputs [8, 4] for logits, and the registered Normal "
        f'loss is a squared error: write loss="{kind}".'
    ) in text


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda z: F.binary_cross_entropy_with_logits(z, (VALUES > 0).float()), "bce_with_logits"),
        (lambda z: F.binary_cross_entropy(z.sigmoid(), (VALUES > 0).float()), "bce_with_logits"),
        (lambda z: NAMED["multi_bernoulli"](z, 100 * VALUES, nn.Identity()), "multi_bernoulli"),
    ],
)
def test_binary_cross_entropies_that_are_registered_as_one_over_classes_are_told(loss: Any, name: str) -> None:
    (text,) = in_steps(kfac_fx.compile(nn.Linear(3, 4), loss="categorical"), loss, X)
    assert text.startswith(
        "the trained loss is a binary cross entropy of each of the outputs [8, 4], and the registered Categorical loss "
        f'is a cross entropy over classes: write loss="{name}".'
    )
    assert in_steps(kfac_fx.compile(nn.Linear(3, 4), loss=name), loss, X) == []


class Spread(nn.Module):
    """A mean, and a positive number that says how far targets are from it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), F.softplus(self.spread(x))


@pytest.mark.parametrize(
    ("kind", "variance"),
    [
        ("standard deviations", torch.square),
        ("logarithms of variances", torch.exp),
        ("logarithms of standard deviations", lambda spread: (2 * spread).exp()),
        (None, lambda spread: spread),
        (None, lambda spread: spread + 0.1),  # which cannot be told
    ],
)
def test_what_is_no_variance_is_told_with_the_variance(kind: str | None, variance: Callable[[Tensor], Tensor]) -> None:
    def loss(outputs: Any) -> Tensor:
        return 4 * F.gaussian_nll_loss(outputs[0], VALUES, variance(outputs[1]))

    net = kfac_fx.compile(Spread(), loss=lambda outputs: losses.NormalMeanVariance(*outputs))
    told = in_steps(net, loss, X)
    if kind is None:
        assert told == []
        return
    (text,) = told
    start = f"the trained loss takes for {kind} what the registered NormalMeanVariance loss takes for variances: write "
    assert text.startswith(f"{start}loss=")
    spec = eval(text[len(f"{start}loss=") : text.index(".\n")], {"kfac_fx": kfac_fx})
    assert in_steps(kfac_fx.compile(Spread(), loss=spec), loss, X) == []


COUNTS = torch.poisson(2 * torch.rand(8, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["poisson_nll", "poisson"])
def test_expected_counts_that_are_registered_as_their_logarithms_are_told(name: str) -> None:
    def loss(outputs: Tensor, log_input: bool = False) -> Tensor:
        return (1.0 if name == "poisson_nll" else 4.0) * F.poisson_nll_loss(outputs, COUNTS, log_input=log_input)

    def rates() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Softplus())

    (text,) = in_steps(kfac_fx.compile(rates(), loss=name), loss, X)
    start = "the trained loss takes the outputs for expected counts, as F.poisson_nll_loss(..., log_input=False) does, "
    assert text.startswith(start)
    spec = eval(text[text.index("write loss=") + len("write loss=") : text.index(".\n")], {"kfac_fx": kfac_fx})
    assert in_steps(kfac_fx.compile(rates(), loss=spec), loss, X) == []
    of_logarithms = kfac_fx.compile(rates(), loss=name)
    assert (
        in_steps(of_logarithms, lambda z: F.poisson_nll_loss(z, COUNTS) * (1 if name == "poisson_nll" else 4), X) == []
    )


@pytest.mark.parametrize("targets", [VALUES, VALUES.sign(), torch.zeros_like(VALUES), F.one_hot(CLASSES, 4).float()])
def test_a_squared_error_is_no_cross_entropy(targets: Tensor) -> None:
    """Also of the probabilities, whose gradient sums to zero over the classes as that of a cross entropy does."""
    for loss in (lambda z: F.mse_loss(z, targets), lambda z: F.mse_loss(z.softmax(-1), targets)):
        for factor in (1.0, 1e-3, 0.0):  # heads often begin with zeros, where 2 (z - y) is 4 (sigmoid(z) - (1 + y) / 2)
            head = nn.Linear(3, 4)
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.mul_(factor)
            texts = in_steps(kfac_fx.compile(head, loss="mse"), loss, X)
            assert not any("cross entropy" in text for text in texts)


def test_an_absolute_error_of_outputs_at_two_bounds_is_no_cross_entropy() -> None:
    """As behind a saturated tanh: sigmoid(z) - t has one size there, if t is 0 below and 1 above."""
    bounded = nn.Sequential(nn.Linear(3, 4), nn.Hardtanh())
    with torch.no_grad():
        bounded[0].weight.mul_(1e6)
    texts = in_steps(kfac_fx.compile(bounded, loss="mse"), lambda z: 45 * F.l1_loss(z, -3 * z.detach() + 0.1), X)
    texts += in_steps(kfac_fx.compile(bounded, loss="mse"), lambda z: 45 * F.l1_loss(z, 0.1 * z.detach()), X)
    assert not any("cross entropy" in text for text in texts)


PART = torch.arange(8) < 5
POSITIONS = (torch.arange(6) < torch.tensor([[6], [2], [1], [1], [1], [1], [1], [1]])).unsqueeze(
    -1
)  # 14 of 48 are real
NAMED: dict[str, Loss] = {
    "mse": lambda y, t, _: F.mse_loss(y, t),
    "normal": lambda y, t, _: (y - t).square().sum() / len(y),
    "bce_with_logits": lambda y, t, _: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "multi_bernoulli": lambda y, t, _: F.binary_cross_entropy_with_logits(y, t.sigmoid(), reduction="sum") / len(y),
}
WRITTEN = {
    "mse": "(len(outputs[mask]) / outputs[mask].numel(), kfac_fx.losses.Normal(outputs[mask]))",
    "normal": "kfac_fx.losses.Normal(outputs[mask])",
    "bce_with_logits": "(len(outputs[mask]) / outputs[mask].numel(), kfac_fx.losses.MultiBernoulli(outputs[mask]))",
    "multi_bernoulli": "kfac_fx.losses.MultiBernoulli(outputs[mask])",
}


def left_out(number: int, of: int, part: str, kind: str, loss: str) -> str:
    if_padding = (
        "If they are padding, name it with kfac_fx.compile(..., padding_mask=), as in padding_mask=lambda input: "
        "input.any(-1). An argument of forward that is named, as in padding_mask='mask', must be in every call. Else "
    )
    return (
        f"the trained loss leaves out {number} of {of} {kind}, whose gradient is zero, and the factors have them: "
        f"{part} of their sums are of {kind} that are not trained. "
        f"{if_padding + 'let' if kind == 'positions' else 'Let'} forward compute the "
        'loss, as (losses * mask).sum() / mask.sum() with losses of reduction="none". If they are the same in every '
        f"batch, name the outputs of the others: loss=lambda outputs: {WRITTEN[loss]}.\n{loss_scale.WHY}"
    )


@pytest.mark.parametrize("name", NAMED)
def test_cases_that_a_squared_error_or_a_loss_of_events_leaves_out_are_told(name: str) -> None:
    (told,) = in_steps(kfac_fx.compile(nn.Linear(3, 4), loss=name), lambda z: NAMED[name](z[PART], VALUES[PART], z), X)
    assert told == left_out(3, 8, "38%", "cases", name)


@pytest.mark.parametrize(
    ("model", "inputs", "real"),
    [
        (nn.Embedding(9, 4), torch.arange(9)[:8, None].expand(8, 3), "input != 0"),
        (nn.Linear(3, 4), torch.ones(8, 5, 3), "input.any(-1)"),
        (nn.Linear(3, 4), X, None),
    ],
)
def test_cases_that_may_be_padding_have_a_mask_of_what_forward_takes(
    model: nn.Module, inputs: Tensor, real: str | None
) -> None:
    net = kfac_fx.compile(model, loss="normal")
    (told,) = in_steps(net, lambda z: z[:5].square().sum() / 8, inputs)
    expected = f"kfac_fx.compile(..., padding_mask=), as in padding_mask=lambda input: {real}. "
    assert (expected in told) == (real is not None)
    assert (" Else let forward compute the loss" if real else " trained. Let forward compute the loss") in told


class Trajectory(nn.Module):
    """Three steps of Euler's from an initial state, which the outputs begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(4, 4)

    def forward(self, y: Tensor) -> Tensor:
        states = [y]
        for _ in range(3):
            states.append(states[-1] + 0.1 * self.field(states[-1]).tanh())
        return torch.stack(states, 1)


@pytest.mark.parametrize("left_out", [0, 1])
def test_positions_that_no_parameter_moves_are_not_told_as_left_out(left_out: int) -> None:
    """Those of the first time are the inputs, so their gradient is zero, whatever the loss is."""
    net = kfac_fx.compile(Trajectory(), loss="mse")

    def trained(z: Tensor) -> Tensor:
        targets = torch.cat([VALUES[:, None], torch.ones(8, 3, 4)], 1)
        return (z - targets).square()[:, : 4 - left_out].sum() / z.numel()

    told = [text for text in in_steps(net, trained, VALUES) if "leaves out" in text]
    assert len(told) == left_out


class Fitted(Trajectory):
    """Computes its loss, at the times that a mask keeps."""

    def forward(self, y: Tensor, kept: Tensor) -> Tensor:
        states = super().forward(y)
        targets = torch.cat([y[:, None], torch.ones(8, 3, 4)], 1)
        return F.mse_loss(states[kept], targets[kept])


def test_positions_that_no_parameter_moves_are_not_told_in_a_loss_of_forward() -> None:
    kept = torch.arange(4) < torch.tensor([4, 3, 2, 4, 3, 2, 4, 3])[:, None]
    net = kfac_fx.compile(Fitted(), (VALUES, kept))
    assert in_steps(net, lambda loss: loss, VALUES, kept) == []


class Contrast(nn.Module):
    """Computes the cross-entropies of its similarities both ways, with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(3, 4), nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.scale.exp() * F.normalize(self.first(x)) @ F.normalize(self.second(y)).T
        pairs = torch.arange(len(z))
        return (F.cross_entropy(z, pairs) + F.cross_entropy(z.T, pairs)) / 2


def test_losses_of_a_matrix_and_its_transpose_in_forward_are_no_misfit() -> None:
    """The gradient of the transposed matrix arrives at the matrix, too."""
    torch.manual_seed(0)
    assert in_steps(kfac_fx.compile(Contrast(), (X, VALUES)), lambda loss: loss, X, VALUES) == []
    (text,) = in_steps(kfac_fx.compile(Contrast(), (X, VALUES)), lambda loss: 3 * loss, X, VALUES)
    assert "the trained loss is 3 times" in text


def test_cases_without_a_number_to_fit_are_told() -> None:
    targets = torch.where(PART.unsqueeze(-1), VALUES, torch.nan)
    known = ~targets.isnan()
    net = kfac_fx.compile(nn.Linear(3, 4), loss="mse")
    (told,) = in_steps(net, lambda z: (z - targets.nan_to_num()).square()[known].mean(), X)
    assert told == left_out(3, 8, "38%", "cases", "mse")


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["mse", "bce_with_logits"])
def test_positions_that_a_loss_leaves_out_are_told(name: str, width: int) -> None:
    kept = POSITIONS.expand(8, 6, width)

    def trained(z: Tensor) -> Tensor:
        return NAMED[name](z[kept], torch.ones_like(z[kept]), nn.Identity())

    (told,) = in_steps(kfac_fx.compile(nn.Linear(3, width), loss=name), trained, X.unsqueeze(1) + torch.ones(8, 6, 3))
    assert told == left_out(34, 48, "71%", "positions", name)


class Numbers(nn.Module):
    """A number at every position, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.classes = nn.Linear(3, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.values(x).squeeze(-1), mask, self.classes(x[:, 0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["Normal", "MultiBernoulli"])
def test_padding_of_a_head_of_numbers_next_to_classes_is_told(name: str, masked: bool) -> None:
    """A case is a row of numbers, of which none is left out as a whole. The mean over real ones was no known factor."""
    torch.manual_seed(0)
    x, mask = torch.randn(8, 6, 3), POSITIONS.squeeze(-1)
    kind = getattr(losses, name)
    value = F.mse_loss if name == "Normal" else F.binary_cross_entropy_with_logits

    def loss(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        values, real, classes = outputs
        return 0.5 * value(values[real], (values[real] > 0.1).float()) + F.cross_entropy(classes, CLASSES)

    def told(of_outputs: Any) -> list[str]:
        padding = {"padding_mask": lambda x, mask: mask} if masked else {}
        return in_steps(kfac_fx.compile(Numbers(), (x, mask), loss=of_outputs, **padding), loss, x, mask)

    (text,) = told(lambda outputs: [(0.5, kind(outputs[0])), losses.Categorical(outputs[2])])
    if masked:
        assert "is a mean over the 14 real elements, whose number differs from batch to batch: return the mask" in text
        assert f"as kfac_fx.losses.{name}(...[mask != 0])" in text
    else:
        assert "leaves out 34 of 48 positions" in text and "padding_mask=" in text
    assert told(lambda outputs: [(0.5, kind(outputs[0][outputs[1]])), losses.Categorical(outputs[2])]) == []


def test_numbers_that_fit_anywhere_are_no_padding() -> None:
    net, some = kfac_fx.compile(nn.Linear(3, 4), loss="mse"), torch.arange(32).reshape(8, 4) % 3 < 2
    assert in_steps(net, lambda z: F.mse_loss(z, torch.where(some, z.detach(), VALUES)), X) == []


def test_tokens_that_a_classifier_of_two_classes_leaves_out_are_told() -> None:
    x, y = X.unsqueeze(1) + torch.randn(8, 6, 3), torch.arange(8) % 2

    def trained(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, -1], y)

    (told,) = in_steps(kfac_fx.compile(nn.Linear(3, 2), loss="categorical"), trained, x)
    assert "leaves out 40 of 48 cases, whose gradient is zero" in told and "all tokens but the last" in told
    net = kfac_fx.compile(nn.Linear(3, 2), loss=lambda z: kfac_fx.losses.Categorical(z[:, -1]))
    assert in_steps(net, trained, x) == []
    weighed = torch.linspace(0.1, 1.0, 8)
    net = kfac_fx.compile(nn.Linear(3, 2), loss="categorical")
    assert in_steps(net, lambda z: (weighed * F.cross_entropy(z, y, reduction="none")).mean(), X) == []


def test_a_function_of_the_trained_outputs_ends_the_warning_about_the_others() -> None:
    for name in NAMED:
        spec = eval(f"lambda outputs: {WRITTEN[name]}", {"mask": PART, "kfac_fx": kfac_fx})
        net = kfac_fx.compile(nn.Linear(3, 4), loss=spec)
        assert in_steps(net, lambda z, name=name: NAMED[name](z[PART], VALUES[PART], z), X) == []


def test_outputs_that_fit_without_a_residual_are_not_left_out() -> None:
    rectified = nn.Sequential(nn.Linear(3, 1), nn.ReLU())
    net = kfac_fx.compile(rectified, loss="mse")
    fits = (net(X) == 0).flatten()
    assert 1 <= fits.sum() < 8
    assert in_steps(net, lambda z: F.mse_loss(z, torch.where(fits.unsqueeze(-1), 0.0, 3.0)), X) == []
    certain = nn.Linear(1, 1)
    with torch.no_grad():
        certain.weight.fill_(100.0), certain.bias.zero_()
    x = torch.linspace(-1, 1, 9).unsqueeze(-1)
    net = kfac_fx.compile(certain, loss="bce_with_logits")
    assert in_steps(net, lambda z: F.binary_cross_entropy_with_logits(z, (x >= 0).float()), x) == []
    net = kfac_fx.compile(nn.Linear(3, 4), loss="mse")
    assert in_steps(net, lambda z: F.mse_loss(z, z.detach()), X) == []


NO_EVENTS: dict[str, tuple[Any, str]] = {
    "a cross entropy": (lambda z: F.cross_entropy(z, CLASSES), "sum to zero over the last axis"),
    "soft classes": (lambda z: F.cross_entropy(z, VALUES.softmax(-1)), "sum to zero over the last axis"),
    "a hinge loss": (lambda z: F.multi_margin_loss(z, CLASSES), "sum to zero over the last axis"),
    "a squared error": (lambda z: F.mse_loss(z, VALUES), "fits no targets"),
    "an absolute error": (lambda z: F.l1_loss(z, VALUES), "fits no targets"),
    "a count": (lambda z: F.poisson_nll_loss(z, torch.full_like(z, 3.0)), "fits no targets"),
    "weighted events": (
        lambda z: F.binary_cross_entropy_with_logits(z, BITS, pos_weight=torch.full((4,), 5.0)), "fits no targets",
    ),
}  # fmt: skip


@pairs(("loss, text", NO_EVENTS), ("mode", ["gradients", "empirical"]))
def test_another_loss_than_the_declared_one_of_events_is_told(loss: Any, text: str, mode: str) -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="bce_with_logits")
    (told,) = in_steps(net, loss, X, estimation_mode=mode)
    assert text in told and "the registered MultiBernoulli loss" in told and "leave loss= out" in told
    assert f'write loss="{"categorical" if "sum" in text else "mse"}"' in told


@pytest.mark.parametrize("factor", [1.0, 0.0])  # heads often begin with zeros
def test_events_with_uncertain_or_ignored_targets_are_not_told(factor: float) -> None:
    head, some = nn.Linear(3, 4), (VALUES > 0).float()
    some[:, 0] = 1.0  # of every case one event counts
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(factor)
    for loss in (
        lambda z: F.binary_cross_entropy_with_logits(z, BITS * 0.9 + 0.05),
        lambda z: F.binary_cross_entropy_with_logits(z, F.one_hot(CLASSES, 4).float()),
        lambda z: F.binary_cross_entropy_with_logits(z, VALUES.softmax(-1), weight=some),
        lambda z: F.binary_cross_entropy_with_logits(z, VALUES.sigmoid()) + 1e-2 * z.square().mean(),
    ):
        assert in_steps(kfac_fx.compile(head, loss="bce_with_logits"), loss, X) == []


class Language(nn.Module):
    """Returns its loss, as models of Hugging Face do; the last positions, and some others, have no target."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.tokens, self.head, self.loss = nn.Embedding(12, 8), nn.Linear(8, 12), loss

    def forward(self, ids: Tensor, labels: Tensor, items: Tensor) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        loss: Tensor = self.loss(self.head(self.tokens(ids)).flatten(0, 1), targets, items)
        return loss


def masked(logits: Tensor, targets: Tensor, items: Tensor) -> Tensor:
    rows = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    return (rows * (targets >= 0)).sum() / items


IDS = torch.randint(12, (6, 7), generator=torch.Generator().manual_seed(0))
LABELS = torch.where((torch.arange(42).view(6, 7) % 10 == 3), -100, IDS)  # 38 labels, of which 32 are targets
WITH_TARGETS: dict[str, tuple[Any, float]] = {  # with the multiple of the mean over targets
    "a mean": (lambda z, y, n: F.cross_entropy(z, y), 1),
    "a sum by the labels of the step": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum") / n, 32 / 38),
    "a sum times an inverse": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum") * (1 / n), 32 / 38),
    "a sum by a number of Python": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum") / 38, 32 / 38),
    "a sum times a number of Python": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum") * (1 / 38), 1),
    "a sum by its own targets": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum(), 1),
    "rows by the labels of the step": (lambda z, y, n: (F.cross_entropy(z, y, reduction="none") / n).sum(), 32 / 38),
    "a mask": (masked, 32 / 38),
    "half a mean, as is written": (lambda z, y, n: 0.5 * F.cross_entropy(z, y), 1),
    "label smoothing": (lambda z, y, n: F.cross_entropy(z, y, label_smoothing=0.1), 1),
    "a smoothed sum": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum", label_smoothing=0.1) / n, 32 / 38),
}


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")  # of A, in which masked cases are
@pytest.mark.parametrize(("loss", "multiple"), WITH_TARGETS.values(), ids=WITH_TARGETS)
def test_the_factor_of_a_loss_in_forward_is_told_if_cases_have_no_target(loss: Any, multiple: float) -> None:
    args = IDS, LABELS, torch.tensor(38)
    net = kfac_fx.compile(Language(loss), args)
    for factor in (1.0, 0.1, 100.0):
        texts = in_steps(net, lambda loss, factor=factor: factor * loss, *args)
        wanted = [f"the trained loss is {factor * multiple:.4g} times the mean of the registered Categorical loss over"]
        assert [text.split(" its 32 cases; ")[0] for text in texts] == ([] if factor == 1 else wanted)


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")
@pairs(
    ("mode", ["gradients", "empirical"]),
    (
        "name, divisor, told",
        [
            ("a sum by the labels of the step", 1, ""),
            ("a sum by the labels of the step", 0.1, "the trained loss is 8.421 times"),
            ("a mask", 1, ""),
            ("a mean", 3, ""),
            (
                "a mean",
                1,
                "the trained loss is 3 times the mean of the registered Categorical loss over its 32 cases; the",
            ),
        ],
    ),
)
def test_a_sum_is_divided_by_the_targets_of_all_micro_batches(name: str, divisor: float, told: str, mode: str) -> None:
    args = IDS, LABELS, torch.tensor(38)
    torch.manual_seed(0)
    optimizer = kfac_fx.KFAC(net := kfac_fx.compile(Language(WITH_TARGETS[name][0]), args), estimation_mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for ids, labels in zip(IDS.split([1, 3, 2]), LABELS.split([1, 3, 2]), strict=True):
            (net(ids, labels, args[2]) / divisor).backward()
        optimizer.step()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, LossScaleWarning)]
    assert len(texts) == bool(told) and all(text.startswith(told) for text in texts)


def first_step(net: kfac_fx.CompiledModule, parts: int, trained: Callable[[Any, Tensor], Tensor]) -> str:
    """The first line of the warning of a step of some micro-batches; "" for none."""
    optimizer = kfac_fx.KFAC(net)
    net.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for x, y in zip(X.chunk(parts), VALUES.chunk(parts), strict=True):
            (trained(net(x), y) / parts).backward()
        optimizer.step()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, LossScaleWarning)]
    assert len(texts) <= 1
    return texts[0].splitlines()[0] if texts else ""


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["mse", "normal"])
def test_the_factor_of_a_squared_error_is_told_by_the_value_of_the_loss(kind: str, parts: int) -> None:
    def trained(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t) if kind == "mse" else (y - t).square().sum(1).mean()

    net = kfac_fx.compile(nn.Linear(3, 4), loss=kind)
    for factor in (1.0, 10.0, 100.0, 0.1, 0.37):
        text = first_step(net, parts, lambda y, t, factor=factor: factor * trained(y, t))
        told = factor not in (1, 0.37)  # the latter is no number that people write
        assert (
            text.startswith(f"the trained loss is {factor:.4g} times the mean of" if told else "")
            and bool(text) == told
        )
    for other in (F.huber_loss, F.l1_loss):  # no squared errors, and the docs name "normal" for them
        for factor in (1, 10):
            assert not first_step(net, parts, lambda y, t, f=other, c=factor: c * f(y, 9 * t))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kind(x), self.size(x)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("smooth", [0.0, 0.1])
@pytest.mark.parametrize("first", ["Categorical", "Normal"])
def test_the_factor_of_a_squared_error_next_to_another_loss_is_told(first: str, smooth: float, parts: int) -> None:
    if smooth and first == "Normal":
        pytest.skip("it has no classes")

    def registered(out: tuple[Tensor, Tensor]) -> list[Any]:
        return [getattr(losses, first)(out[0]), (0.2, losses.Normal(out[1]))]

    def trained(out: tuple[Tensor, Tensor], y: Tensor, factor: float) -> Tensor:
        classes = y.argmax(1)
        of_kind = (
            F.cross_entropy(out[0], classes, label_smoothing=smooth)
            if first == "Categorical"
            else (out[0] - y).square().sum(1).mean()
        )
        return of_kind + factor * 0.2 * (out[1] - y[:, 2:]).square().sum(1).mean()

    net = kfac_fx.compile(TwoHeads(), loss=registered)
    for factor in (1, 10, 0.1):
        text = first_step(net, parts, lambda out, y, c=factor: trained(out, y, c))
        told = factor != 1 and not smooth  # with smoothing the value of the first loss is not known
        loss = f"Normal loss of [{8 // parts}, 2]"
        wanted = f"the trained loss is {factor:.4g} times the mean of the registered {loss} over its 8 cases; "
        assert text.startswith(wanted) if told else not text


def test_half_a_mean_of_squares_is_told_without_the_loss() -> None:
    """As reinforcement learning writes it for value functions."""
    for kind, factor in (("normal", 1 / 8), ("mse", 1 / 2)):
        net = kfac_fx.compile(nn.Linear(3, 4), loss=kind)
        (text,) = in_steps(net, lambda z: 0.5 * F.mse_loss(z, VALUES[:6]), X[:6])
        register = REGISTER.format(0.125, "Normal", ", var=0.5")
        assert text.startswith(times(f"{factor:g}", "Normal", cases=6) + f"take the factor out, or {register}")


class Similarity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.normalize(self.encoder(a)) @ F.normalize(self.encoder(b)).T / 0.1


def test_a_module_of_similarities_is_what_the_warning_asks_for() -> None:
    net = kfac_fx.compile(Similarity(), (X, X + 0.1), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    F.cross_entropy(net(X, X + 0.1), torch.arange(8)).backward()
    optimizer.step()


@pytest.mark.parametrize("scale", [4.0, 128.0, 1024.0, 1000.0])
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("kind", ["categorical", "mse"])
def test_the_scale_of_a_scaler_without_autocast_is_no_factor(scale: float, unscaled: bool, kind: str) -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss=kind)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loss = F.cross_entropy(net(X), CLASSES) if kind == "categorical" else F.mse_loss(net(X), VALUES)
    scaler.scale(loss).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert int(optimizer.skipped) == 0 and optimizer.counter == 1


def test_a_ride_under_a_scaler_that_kfac_does_not_know_says_which_option_names_it() -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, momentum_type="regular", estimation_mode="empirical")
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(F.cross_entropy(net(X), CLASSES)).backward()
    with pytest.warns(
        LossScaleWarning, match=r"if a GradScaler multiplies it, write KFAC\(\.\.\., grad_scaler=scaler\)"
    ):
        scaler.step(optimizer)


def test_a_factor_under_a_scaler_is_told_without_the_scale() -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="normal")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(F.mse_loss(net(X), VALUES)).backward()
    with pytest.warns(LossScaleWarning) as caught:
        scaler.step(optimizer)
    assert str(caught[0].message).startswith(times("0.25", "Normal")) and caught[0].filename == __file__


def test_the_line_of_a_warning_is_the_users_under_schedulers_and_scalers() -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(F.cross_entropy(net(X), CLASSES, reduction="sum")).backward()
    with pytest.warns(LossScaleWarning) as caught:
        scaler.step(optimizer)
    scheduler.step()
    assert [warning.filename for warning in caught if issubclass(warning.category, LossScaleWarning)] == [__file__]


# --- losses that are registered and not trained -----------------------------------------------------------------------


class TwoLosses(nn.Module):
    """Returns two outputs, or the losses of both; the second is zero, and its gradient is, if `met`."""

    def __init__(self, inside: bool, met: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 2)
        self.inside, self.met = inside, met

    def forward(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        a, b = self.a(h), self.b(h)
        if not self.inside:
            return a, b
        return F.cross_entropy(a, classes), F.mse_loss(b, b.detach() if self.met else x[:, :2])


def of_two(kind: str, trained: Callable[..., list[Tensor]], met: bool = False) -> list[str]:
    """The warnings of two steps. trained: from the two losses to those that have a backward each."""
    model: nn.Module = TwoLosses(kind == "in forward", met)

    def pairs(outputs: Any) -> Any:
        return [losses.Categorical(outputs[0]), (0.5, losses.Normal(outputs[1]))]

    net = kfac_fx.compile(model, (X, CLASSES), loss=pairs if kind == "declared" else None)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(2):
            optimizer.zero_grad()
            both = net(X, CLASSES)
            if kind == "declared":
                both = F.cross_entropy(both[0], CLASSES), F.mse_loss(both[1], X[:, :2])
            for loss in trained(*both):
                loss.backward(retain_graph=True)
            optimizer.step()
    return [str(warning.message).splitlines()[0] for warning in caught if warning.category is LossScaleWarning]


@pytest.mark.parametrize(
    "kind, remedy",
    [("in forward", "let forward compute it from detached tensors"), ("declared", "leave it out of loss=")],
)
def test_a_registered_loss_that_is_not_trained_is_told(kind: str, remedy: str) -> None:
    for trained, name in [
        (lambda a, b: [a], "Normal of [8, 2]"),
        (lambda a, b: [3 * b / 3], "Categorical of [8, 4]"),
    ]:
        assert of_two(kind, trained) == [
            f"the trained loss does not depend on {name}, 1 of the 2 registered losses, and its curvature is in the "
            f"factors: train it, or {remedy}."
        ]


@pytest.mark.parametrize("kind", ["in forward", "declared"])
@pytest.mark.parametrize("trained", [lambda a, b: [a + b], lambda a, b: [a, b], lambda a, b: [b, a]])
def test_losses_that_are_trained_in_one_backward_or_two_are_not_told(kind: str, trained: Callable[..., Any]) -> None:
    assert of_two(kind, trained) == []


def test_a_trained_loss_with_a_gradient_of_zero_is_not_told() -> None:
    assert of_two("in forward", lambda a, b: [a + b], met=True) == []


def block(name: str, curvature: float) -> Any:
    factors = {"G": SimpleNamespace(moment=torch.full((2, 2), curvature))}
    group = SimpleNamespace(
        here=True,
        agreed=lambda flags: flags,
        whole_shape=(1, 2, 1),
        structure=SimpleNamespace(sides=[SimpleNamespace(factor="G")]),
        mean_eigenvalue=lambda side: torch.full((1, 1), curvature),
        positions=lambda: torch.ones(1),
    )
    registration = SimpleNamespace(owners=(name,), reason=None)
    return SimpleNamespace(group=group, factors=factors, registration=registration, member=slice(0, 1))


@pytest.mark.parametrize("more", [0, 1])
def test_long_lists_of_parameters_are_cut_off_where_they_become_shorter(more: int) -> None:
    names = [f"p{n}" for n in range(LISTED_PARAMETERS + more)]
    estimator: Any = SimpleNamespace(blocks={(name,): block(name, 0.0) for name in names})
    with pytest.warns(LossScaleWarning, match="p7 and 1 more" if more else r"p6, p7\."):
        check_coverage(estimator, {name: torch.ones(2) for name in names}, whole=True)


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_parameter_without_curvature_is_told_if_it_has_a_gradient(gradient: float) -> None:
    estimator: Any = SimpleNamespace(blocks={("a",): block("a", 1.0), ("b",): block("b", 0.0)})
    gradients = {"a": torch.ones(2), "b": torch.full((2,), gradient), "in no block": torch.ones(2)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_coverage(estimator, gradients, whole=False)
    assert [": b." in str(warning.message) for warning in told] == [True] * bool(gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_forwards_of_a_step_count_by_their_cases(reduction: str) -> None:
    """A mean over eight cases, two of them in one forward and six in another."""
    loss = losses.Normal(torch.zeros(1))
    of_step = [LossFactor(n / 8, loss, 1.0, n, 1.0, None) for n in (2, 6)]
    assert factor_of_step(of_step, reduction, 1.0) == (1.0 if reduction == "mean" else 1 / 8)
    assert factor_of_step([of_step[0], of_step[0]], reduction, 1.0) == (0.5 if reduction == "mean" else 1 / 8)
    of_means = [replace(factor, multiple=0.25) for factor in of_step]  # half a mean of two means
    assert factor_of_step(of_means, reduction, 1.0) == (0.5 if reduction == "mean" else None)
    outside = [replace(factor, spec="a collection") for factor in of_means]
    assert factor_of_step(outside, reduction, 1.0) == (0.5 if reduction == "mean" else None)
    assert factor_of_step([of_step[0], replace(of_step[1], multiple=0.5)], reduction, 1.0) is None


@pytest.mark.parametrize("divisor", [1, 3])
def test_micro_batches_of_other_numbers_of_real_tokens_are_told_if_they_are_not_divided(divisor: int) -> None:
    """Each is a mean over its own tokens, and the three differed, so nothing was told."""
    torch.manual_seed(0)
    ids = torch.randint(1, 9, (3, 4, 10))
    for number, length in enumerate((5, 6, 7)):
        ids[number, :, length:] = 0
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    net = kfac_fx.compile(model, (ids[0],), loss="categorical", padding_mask=lambda ids: ids != 0)
    opt = kfac_fx.KFAC(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for part in ids:
            y = torch.where(part == 0, -100, part.roll(1, 0))
            (F.cross_entropy(net(part).flatten(0, 1), y.flatten(), ignore_index=-100) / divisor).backward()
        opt.step()
    text = "is 3 times the mean of the registered Categorical loss over its 72 cases with a target; the step has 3"
    assert [text in str(warning.message) for warning in caught] == [True] * (divisor == 1)


class Inside(nn.Module):
    """Returns a function of its activations, its logits and their cross entropies."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(3, 5), nn.Linear(5, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        z = self.last(h)
        loss: Tensor = self.loss(h, z, F.cross_entropy(z, y, reduction="none"))
        return loss


MASK = (SOME >= 0).float()
INSIDE: dict[str, tuple[Any, str]] = {
    "a factor": (lambda h, z, ce: 3 * ce.mean(), ""),
    "weights of cases": (lambda h, z, ce: (ce * torch.arange(1.0, 9.0)).mean(), ""),
    "a mask": (lambda h, z, ce: (ce * MASK).sum() / MASK.sum(), ""),
    "a small term": (lambda h, z, ce: ce.mean() + 1e-2 * h.square().mean(), ""),
    "a focal loss": (
        lambda h, z, ce: ((1 - torch.exp(-ce)) ** 2 * ce).mean(),
        "the trained loss weighs its cases from ",
    ),
    "a large term": (lambda h, z, ce: ce.mean() + 3 * h.cosh().mean(), r"\d+% of the gradient of the trained loss"),
}


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")  # of A, in which the masked cases are
@pairs(("loss, text", INSIDE), ("mode", ["gradients", "empirical"]))
def test_terms_and_weights_without_curvature_are_told(loss: Any, text: str, mode: str) -> None:
    """The empirical factors are of the trained gradient itself, so they lack nothing."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Inside(loss), (X, CLASSES))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0, estimation_mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        net(X, CLASSES).backward()
        optimizer.step()
    told = [str(warning.message) for warning in caught if issubclass(warning.category, LossScaleWarning)]
    if not text or mode == "empirical":
        assert not told
        return
    assert re.match(text, told[0])
    if "%" in text:
        assert "(cosh (test_loss_scale.py:" in told[0] and 'estimation_mode="empirical"' in told[0]


class Apart(nn.Module):
    """Returns its two losses by name, of which one is no distribution's, and with them what `more` makes of these."""

    def __init__(self, more: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.body, self.classes, self.boxes, self.more = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 4), more

    def forward(self, x: Tensor, y: Tensor, places: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        z = self.classes(h)
        losses = F.cross_entropy(z, y), F.smooth_l1_loss(self.boxes(h), places)
        return self.more(z, *losses)


APART: dict[str, Callable[..., dict[str, Tensor]]] = {
    "two losses": lambda z, classes, boxes: {"classes": classes, "boxes": boxes},
    "two losses and the outputs": lambda z, classes, boxes: {"z": z, "classes": classes, "boxes": boxes},
}


@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("name", APART)
def test_a_returned_number_that_is_no_known_loss_is_told_if_it_is_trained(name: str, examples: bool) -> None:
    torch.manual_seed(0)
    inputs = X, CLASSES, 3 * VALUES

    net = kfac_fx.compile(Apart(APART[name]), inputs if examples else None)
    start = copy.deepcopy(net.model.state_dict())

    def texts(trained: Callable[[dict[str, Tensor]], Tensor], **options: Any) -> list[str]:
        net.model.load_state_dict(start)
        return in_steps(net, trained, *inputs, **options)  # type: ignore[arg-type]

    (text,) = texts(lambda losses: losses["classes"] + losses["boxes"])
    assert re.match(r"about \d\d% of the gradient of the trained loss comes from smooth_l1_loss \(test_loss_sca", text)
    assert "and AdamW moves boxes.{bias, weight}, on which no known loss depends." in text
    assert texts(lambda losses: losses["classes"] + losses["boxes"], estimation_mode="empirical") == []
    assert texts(lambda losses: losses["classes"]) == []
    assert texts(lambda losses: losses["classes"] + 1e-2 * losses["boxes"]) == []


WITH_PARTS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "a part and a function": lambda z, a, b: {"loss": a + 1e-2 * b, "classes": a, "boxes": b, "perplexity": a.exp()},
    "a part of a part": lambda z, a, b: {"loss": (a + 1e-2 * b) * 1.0, "sum": a + 1e-2 * b, "classes": a},
    "parts first": lambda z, a, b: {"classes": a, "boxes": b, "total": a + 1e-2 * b},
}


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("name", WITH_PARTS)
def test_a_loss_that_is_returned_with_its_parts_counts_once(name: str, factor: int) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Apart(WITH_PARTS[name]), (X, CLASSES, VALUES))
    trained = "loss" if "loss" in WITH_PARTS[name](*torch.ones(3)) else "total"
    told = in_steps(net, lambda losses: factor * losses[trained], X, CLASSES, VALUES)  # type: ignore[call-overload]
    assert len(told) == (factor != 1) and all(text.startswith(times("3", "Categorical")) for text in told)


OF_CLASSES = torch.tensor([0.5, 1.0, 1.5, 3.0])
WEIGHTED: dict[str, tuple[Callable[[Tensor], Tensor], Any, dict[str, Any]]] = {
    "weights of classes": (
        lambda z: F.cross_entropy(z, CLASSES, OF_CLASSES),
        lambda h, z, ce: (ce * OF_CLASSES[CLASSES]).sum() / OF_CLASSES[CLASSES].sum(),
        {},
    ),
    "a focal loss": (
        lambda z: ((1 - z.log_softmax(-1).exp()[torch.arange(8), CLASSES]) ** 2
                   * F.cross_entropy(z, CLASSES, reduction="none")).mean(),
        None, {"estimation_mode": "empirical"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTED)
def test_what_the_warning_about_weights_asks_for_has_none(name: str) -> None:
    outside, inside, options = WEIGHTED[name]
    torch.manual_seed(0)
    texts = in_steps(kfac_fx.compile(nn.Linear(3, 4), loss="categorical"), outside, X)
    assert len(texts) == 1 and texts[0].startswith("the trained loss weighs its cases from ")
    if inside is None:
        assert in_steps(kfac_fx.compile(nn.Linear(3, 4), loss="categorical"), outside, X, **options) == []
    else:
        net = kfac_fx.compile(Inside(inside), (X, CLASSES))
        assert in_steps(net, lambda loss: loss, X, CLASSES, **options) == []


SILENT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a critic": lambda net, x, t: net(x[:4]).mean() - net(x[4:]).mean(),
    "a hinge of two batches": lambda net, x, t: F.relu(1 - net(x[:4])).mean() + F.relu(1 + net(x[4:])).mean(),
    "two views": lambda net, x, t: F.l1_loss(net(x), t) + F.l1_loss(net(x.flip(1)), t),
    "one output of each row": lambda net, x, t: F.mse_loss(net(x)[:, 0], t[:, 0]),
    "chosen outputs": lambda net, x, t: F.mse_loss(net(x).gather(1, torch.arange(8)[:, None] % 4), t[:, :1]),
    "a small penalty": lambda net, x, t: F.mse_loss(net(x), t) + 0.02 * sum(p.square().sum() for p in net.parameters()),
}


@pairs(("steps", {"one batch": 1, "the same batch twice": 2}), ("name", list(SILENT)))
def test_a_loss_next_to_squared_errors_is_not_told_a_factor(name: str, steps: int) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Linear(3, 4), (X,), loss="mse")
    optimizer = kfac_fx.KFAC(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        for _ in range(steps):
            (SILENT[name](net, X, VALUES) / steps).backward()
        optimizer.step()


class SumInForward(nn.Module):
    """Divides its sum of squared errors by a number, a constant or one that is given."""

    def __init__(self, divided: Callable[[Tensor, Any], Tensor], python: bool = False) -> None:
        super().__init__()
        self.layer, self.divided, self.python = nn.Linear(3, 4), divided, python

    def forward(self, x: Tensor, y: Tensor, n: Any) -> Tensor:
        outputs = self.layer(x)
        if self.python and outputs.sum() > 1e9:
            outputs = 2 * outputs
        return self.divided(F.mse_loss(outputs, y, reduction="sum"), n)


BY_NUMBERS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, float]] = {  # with the curvature of one output
    "given elements": (lambda s, n: s / n, torch.tensor(32), 0.5),
    "given cases": (lambda s, n: s / n, torch.tensor(8), 2.0),
    "the inverse of given elements": (lambda s, n: s * (1 / n), torch.tensor(32.0), 0.5),
    "a constant": (lambda s, n: s / 32, torch.tensor(0), 0.5),
    "an inverse constant": (lambda s, n: s * (1 / 32), torch.tensor(0), 0.5),
    "an inverse constant of cases": (lambda s, n: s * (1 / 8), torch.tensor(0), 2.0),
}


@pytest.mark.parametrize(
    ("name", "parts", "python"),
    [(name, 1, python) for name in BY_NUMBERS for python in (False, True)]
    + [(name, parts, False) for name, (*_, curvature) in BY_NUMBERS.items() for parts in (2, 8) if curvature == 2],
)
def test_a_sum_of_squares_may_be_divided_by_its_elements_or_by_its_cases(name: str, parts: int, python: bool) -> None:
    """The curvature is that of the mean over the cases of all micro-batches: 2 / 4 for one over 4 elements.

    The cases of 8 micro-batches are more than the elements of one."""
    torch.manual_seed(0)
    divided, number, curvature = BY_NUMBERS[name]
    first = len(X) // parts
    model = SumInForward(divided, python)
    net = kfac_fx.compile(model, (X[:first], VALUES[:first], number))
    assert bool(net.program.submodules) == python
    optimizer = kfac_fx.KFAC(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        for x, y in zip(X.chunk(parts), VALUES.chunk(parts), strict=True):
            net(x, y, number).backward()
        optimizer.step()
    for mode in ("exact", "empirical"):
        moments = net.record((X, VALUES, number), {}, mode=mode)
        g = moments.statistics["layer.weight", "layer.bias"]["G"][0] / float(moments.cases)
        rows = model.layer(X) - VALUES
        wanted = curvature * torch.eye(4) if mode == "exact" else (curvature**2 * rows.mT @ rows / 8).detach()
        torch.testing.assert_close(g, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("divided", "number", "first", "told"),
    [
        (lambda s, n: s / n, torch.tensor(8), 2, "the trained loss is 4 times the mean of the registered Normal loss "
         "over its 8 cases; the number by which forward divides its sum may count cases, elements or something else: "
         "return the sum, and divide behind forward: (net(...) / number).backward()."),
        (lambda s, n: s / n, torch.tensor(32), 4, "the trained loss is 0.25 times the mean of the registered Normal "
         "loss over its 8 cases; the number by which forward divides its sum may count cases, elements or something "
         "else: return the sum, and divide behind forward: (net(...) / number).backward()."),
        (lambda s, n: s * 0.127, torch.tensor(0), 1, "the trained loss is 8 times the mean of the registered Normal "
         "loss over its 8 cases; 0.127 may be a weight of the loss: return the sum, and divide behind forward: "
         "(net(...) / 7.874).backward()."),
    ],
)  # fmt: skip
def test_a_number_that_may_be_another_one_is_told_with_what_to_write(
    divided: Any, number: Tensor, first: int, told: str
) -> None:
    """The cases of four micro-batches are as many as the elements of one."""

    def lines(divided: Any, behind: float) -> list[str]:
        net = kfac_fx.compile(SumInForward(divided), (X[:first], VALUES[:first], number))
        optimizer = kfac_fx.KFAC(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LossScaleWarning)
            for x, y in zip(X.split(first), VALUES.split(first), strict=True):
                (net(x, y, number) / behind).backward()
            optimizer.step()
        return [str(warning.message).splitlines()[0] for warning in caught]

    assert lines(divided, 1.0) == [told]
    assert lines(lambda s, n: s, 8.0) == []  # as it says


def test_captures_read_the_number_that_divides_a_sum_alike() -> None:
    """The first one reads cases. The second alone would read elements."""
    torch.manual_seed(0)
    model = SumInForward(lambda s, n: s / n)
    net = kfac_fx.compile(model, (X, VALUES, torch.tensor(8)))
    model.eval()
    moments = net.record((X[:4], VALUES[:4], torch.tensor(16)), {}, mode="exact")
    assert len(net.captures.all) == 2
    told = " ".join(str(net.report).split())
    assert (
        "which is read as that of cases, also of several micro-batches together, and nothing is wrong if it is" in told
    )
    g = moments.statistics["layer.weight", "layer.bias"]["G"][0] / float(moments.cases)
    torch.testing.assert_close(g, 2.0 * torch.eye(4))


class WeightedSum(nn.Module):
    """Divides or multiplies a sum of cross entropies with targets that are not certain."""

    def __init__(self, weighted: Callable[[Tensor], Tensor], python: bool, beside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weighted, self.python, self.beside = nn.Linear(3, 4), weighted, python, beside

    def forward(self, x: Tensor, y: Tensor) -> Any:
        outputs = self.layer(x)
        if self.python and outputs.sum() > 1e9:
            outputs = 2 * outputs
        loss = self.weighted(F.cross_entropy(outputs, y, reduction="sum", label_smoothing=0.1))
        return (loss, outputs) if self.beside else loss


@pytest.mark.parametrize(
    ("weighted", "weight", "python"),
    [
        (lambda s: 0.05 * s, 0.05, False),
        (lambda s: 0.05 * s, 0.05, True),
        (lambda s: 0.25 * s / 32, 0.25, False),
        (lambda s: 0.25 * s * (1 / 32), 0.25, False),
        (lambda s: s * (1 / 32) * 0.25, 0.25, False),
        (lambda s: s * (1 / 64), 1.0, False),
    ],
)
def test_an_inverse_of_fewer_than_the_cases_is_a_weight_of_a_sum(weighted: Any, weight: float, python: bool) -> None:
    """64 may be the cases of two batches; 4 and 20 are fewer than those of one."""
    x, y = X.repeat(4, 1), CLASSES.repeat(4)

    def g(weighted: Any) -> Tensor:
        net = kfac_fx.compile(WeightedSum(weighted, python), (x, y))
        assert bool(net.program.submodules) == python
        moments = net.record((x, y), {}, mode="exact")
        return moments.statistics["layer.weight", "layer.bias"]["G"][0] / float(moments.cases)

    torch.testing.assert_close(g(weighted), weight * g(lambda s: s))


@pairs(
    (
        "weighted, cases, factor, told",
        [
            (lambda s: 0.05 * s, 4, 1.0, "0.2 times"),
            (lambda s: s / 32, 4, 1.0, "0.125 times"),
            (lambda s: s / 8, 4, 2.0, ""),
            (lambda s: s / 8, 8, 1.0, ""),
            (lambda s: s / 8, 8, 3.0, "3 times"),
            (lambda s: s, 8, 1 / 8, ""),
            (lambda s: s, 8, 1.0, "8 times"),
        ],
    ),
    ("python, beside", [(False, False), (True, False), (False, True)]),
)
def test_the_factor_of_a_loss_in_forward_that_fits_no_targets_is_told(
    weighted: Any, cases: int, factor: float, told: str, python: bool, beside: bool
) -> None:
    """Label smoothing. 0.05 and 1 / 32 may divide by the cases of several micro-batches.

    beside: forward also returns the logits."""
    net = kfac_fx.compile(WeightedSum(weighted, python, beside), (X[:cases], CLASSES[:cases]))
    assert bool(net.program.submodules) == python

    def trained(returned: Any) -> Tensor:
        return factor * (returned[0] if beside else returned)

    texts = in_steps(net, trained, X[:cases], CLASSES[:cases])
    first = [text.split(" the mean of the registered Categorical loss over its ")[0] for text in texts]
    assert first == ([f"the trained loss is {told}"] if told else [])


@pytest.mark.parametrize("kind", ["mse", "normal"])
def test_the_factor_of_a_squared_error_of_two_forwards_is_told(kind: str) -> None:
    """One forward is the target of the other: the gradient of one is minus that of the other."""
    net = kfac_fx.compile(nn.Linear(3, 4), loss=kind)
    for factor, wanted in ((1.0, ""), (2.0, "2"), (8.0, "8"), (0.1, "0.1")):

        def loss(factor: float = factor) -> Tensor:
            a, b = net(X), net(X.flip(0) + 1)
            return factor * (F.mse_loss(a, b) if kind == "mse" else (a - b).square().sum(1).mean())

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LossScaleWarning)
            optimizer = kfac_fx.KFAC(net)
            net.zero_grad()
            loss().backward()
            optimizer.step()
        net.detach()
        texts = [str(warning.message).split(" the mean of")[0] for warning in caught]
        assert texts == ([f"the trained loss is {wanted} times"] if wanted else [])


class OneHead(nn.Module):
    """Returns what `parts` makes of the hidden state and of the outputs of a single head."""

    def __init__(self, parts: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.body, self.head, self.parts = nn.Linear(3, 5), nn.Linear(5, 5), parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x).tanh()
        return self.parts(h, self.head(h))


def of_classes(outputs: tuple[Tensor, ...]) -> losses.Categorical:
    return losses.Categorical(outputs[0])


def trained_with(weight: float, place: int = 1) -> Any:
    return lambda outputs: F.cross_entropy(outputs[0], CLASSES) + weight * outputs[place].square().mean()


class Stepped(nn.Module):
    """One step of a network over time, which the training loop calls with the state of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(X.shape[1], 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.of_input(x) + self.of_state(state))
        return self.head(state), state


def test_a_state_that_a_later_forward_takes_is_told_as_such() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Stepped(), loss=of_classes)
    optimizer, state, total = kfac_fx.KFAC(net), torch.zeros(len(X), 8), torch.zeros(())
    for _ in range(3):
        logits, state = net(X, state)
        total = total + F.cross_entropy(logits, CLASSES) / 3
    total.backward()
    with pytest.warns(
        LossScaleWarning, match="a later forward of the step takes, as a state.*loop over the steps into"
    ):
        optimizer.step()


@pytest.mark.parametrize("examples", [False, True])
def test_an_output_that_is_trained_and_that_no_loss_reads_is_told(examples: bool) -> None:
    """Its head is that of a registered loss, so no parameter is without a block."""

    def texts(parts: Any, trained: Any, loss: Any = of_classes, **options: Any) -> list[str]:
        torch.manual_seed(0)
        net = kfac_fx.compile(OneHead(parts), (X,) if examples else None, loss=loss)
        return in_steps(net, trained, X, **options)

    def two(h: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return z[:, :4], z[:, 4:]

    (text,) = texts(two, trained_with(3.0))
    assert re.match(r"about \d\d% of the gradient of the trained loss comes from \w+ \(test_loss_scale", text)
    assert "which forward returns and which no registered loss reads: the factors have no curvature of it." in text
    assert 'estimation_mode="empirical"' in text
    assert texts(two, trained_with(3.0), estimation_mode="empirical") == []
    assert (
        texts(two, trained_with(3.0), lambda o: [losses.Categorical(o[0]), (3.0, losses.Normal(o[1], var=0.5))]) == []
    )
    assert texts(two, trained_with(0.0)) == texts(two, trained_with(1e-3)) == []
    assert texts(lambda h, z: (z[:, :4], z), trained_with(0.0)) == []  # what it is a part of
    (text,) = texts(lambda h, z: (z[:, :4], h), trained_with(30.0))
    assert " comes from tanh (test_loss_scale.py" in text
    assert texts(lambda h, z: (z[:, :4], h), trained_with(0.0)) == []  # its gradient is that of the outputs


@pytest.mark.parametrize("trained", [0.0, 1.0])
def test_a_function_of_registered_outputs_is_no_output_that_no_loss_reads(trained: float) -> None:
    """Its gradient arrives at the registered outputs."""

    def with_functions(h: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        z = z[:, :4]
        return z, z.softmax(-1), z.max(-1).values, z.reshape(-1), z.argmax(-1)

    for inputs in ((X,), None):  # without them, the classes at the end are outputs, too, which ended in torch's error
        torch.manual_seed(0)
        net = kfac_fx.compile(OneHead(with_functions), inputs, loss=of_classes)
        assert not [text for text in in_steps(net, trained_with(trained), X) if "no registered loss reads" in text]


@pytest.mark.parametrize("examples", [False, True])
def test_an_output_with_a_head_of_its_own_is_told_once(examples: bool) -> None:
    """Its head has no curvature, of which the first step warns."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classes, self.other = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            return self.classes(h), self.other(h)

    net = kfac_fx.compile(TwoHeads(), (X,) if examples else None, loss=of_classes)
    (text,) = in_steps(net, trained_with(3.0), X)
    assert text.startswith("the trained loss depends on parameters that no registered loss depends on: other.")


class LossAndHead(nn.Module):
    """Returns a loss of classes, the values of another head, and what `more` makes of the logits."""

    def __init__(self, more: Callable[[Tensor], Tensor] = torch.exp) -> None:
        super().__init__()
        self.body, self.classes, self.values, self.more = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 2), more

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        z = self.classes(h)
        return {"loss": F.cross_entropy(z, y), "values": self.values(h), "more": self.more(z)}


@pytest.mark.parametrize("rule", [{"lr": 0.1, "damping": 0.1}, {}], ids=["regular", "default"])
def test_a_head_whose_loss_is_outside_of_forward_next_to_a_loss_inside_is_told(rule: dict[str, Any]) -> None:
    """The report had it as a head without a loss, and nothing said that it is trained."""

    def texts(weight: float, key: str = "values", **options: Any) -> list[str]:
        torch.manual_seed(0)
        net = kfac_fx.compile(LossAndHead(), (X, CLASSES))
        assert "no loss   values.{weight, bias}" in str(net.report)
        optimizer = kfac_fx.KFAC(net, seed=0, **rule, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LossScaleWarning)
            for _ in range(2):
                optimizer.zero_grad()
                outputs = net(X, CLASSES)
                (outputs["loss"] + weight * outputs[key].square().mean()).backward()
                optimizer.step()
        return [str(warning.message) for warning in caught if warning.category is LossScaleWarning]

    (text,) = texts(3.0)
    assert re.match(r"about \d\d% of the gradient of the trained loss comes from linear_2 \(test_loss_scale.py:", text)
    assert (
        "AdamW moves values.{bias, weight}, on which no known loss depends. Nothing is wrong if it is a small" in text
    )
    assert texts(0.0) == texts(1e-3) == texts(3.0, estimation_mode="empirical") == []
    assert not [text for text in texts(3.0, "more") if "no loss that forward computes reads" in text]  # of the logits


def test_an_output_of_many_cases_that_no_loss_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the first cases are compared."""
    monkeypatch.setattr(loss_scale, "LIMIT", 15)
    torch.manual_seed(0)
    net = kfac_fx.compile(OneHead(lambda h, z: (z[:, :4], z[:, 4:])), (X,), loss=of_classes)
    (text,) = in_steps(net, trained_with(3.0), X)
    assert "which no registered loss reads" in text


class Tokens(nn.Module):
    """Takes two arguments of other names than those of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, segments: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.table(input_ids) + self.table(segments)))
        return out


@pytest.mark.parametrize("by_name", [False, True])
def test_the_mask_that_a_warning_writes_takes_the_arguments_of_forward(by_name: bool) -> None:
    """It was `lambda ids: ids != 0` for every model, which the next call refused."""
    ids = torch.randint(1, 20, (8, 6))
    ids[:, 4:] = 0
    targets = torch.where(ids > 0, ids % 5, -100)
    args, kwargs = ((), {"input_ids": ids, "segments": ids}) if by_name else ((ids, ids), {})
    net = kfac_fx.compile(Tokens(), args, kwargs, loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1)
    with pytest.warns(LossScaleWarning, match=r"padding_mask=lambda input_ids, segments: input_ids != 0\. "):
        F.cross_entropy(net(*args, **kwargs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    masked = kfac_fx.compile(Tokens(), args, kwargs, padding_mask=lambda input_ids, segments: input_ids != 0)
    assert masked.program.mask is not None


class InDictionary(nn.Module):
    """Logits of every position in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.table(ids))}


@pytest.mark.parametrize("per_example", [True, False])
def test_the_remedy_for_a_factor_of_positions_holds_in_every_batch_and_names_the_output(per_example: bool) -> None:
    ids, y = torch.randint(6, (3, 7)), torch.randint(5, (3, 7))
    y[0, 4:] = -100
    net = kfac_fx.compile(InDictionary(), (ids,), loss=lambda outputs: losses.Categorical(outputs["logits"]))
    optimizer = kfac_fx.KFAC(net)
    total = F.cross_entropy(net(ids)["logits"].flatten(0, 1), y.flatten(), reduction="sum")
    (total / 3 if per_example else total / 9).backward()
    with pytest.warns(LossScaleWarning) as caught:
        optimizer.step()
    told = "\n".join(str(warning.message) for warning in caught)
    if per_example:
        assert (
            "is 6 times the mean of the registered Categorical loss over its 18 cases with a target; it is the sum "
            "over all cases, divided by the 3 examples of the batch: divide it by the number of cases, as a mean does. "
            "6 cases for an example are no constant if examples have different lengths."
        ) in told
    else:
        assert "register it as loss=lambda outputs: (2, kfac_fx.losses.Categorical(outputs['logits']))." in told


def test_a_sum_of_binary_events_with_soft_targets_is_named() -> None:
    net = kfac_fx.compile(nn.Linear(4, 6), (torch.randn(16, 4),), loss=losses.MultiBernoulli)
    optimizer, targets = kfac_fx.KFAC(net), torch.rand(16, 6)
    F.binary_cross_entropy_with_logits(net(torch.randn(16, 4)), targets, reduction="sum").backward()
    with pytest.warns(LossScaleWarning, match="If it is a sum over the batch, divide it by its 16 cases"):
        optimizer.step()


def test_a_mean_of_squares_over_more_axes_is_told_though_the_registered_loss_has_a_coefficient() -> None:
    net = kfac_fx.compile(
        nn.Sequential(nn.Linear(4, 24), nn.Unflatten(1, (12, 2))),
        (torch.randn(8, 4),),
        loss=lambda outputs: (0.5, losses.Normal(outputs)),
    )
    optimizer = kfac_fx.KFAC(net)
    F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 12, 2)).backward()
    with pytest.warns(
        LossScaleWarning, match=r"0\.08333 times .*\(0\.04167, kfac_fx\.losses\.Normal\(outputs, var=0\.5\)\)"
    ):
        optimizer.step()


class Masked(nn.Module):
    """Reconstructs tokens that forward draws."""

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.first, self.last, self.selects = nn.Linear(4, 6), nn.Linear(6, 4), selects

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.rand(x.shape[:2]) < 0.5
        outputs = self.last(torch.tanh(self.first(torch.where(hidden[..., None], 0, x))))
        if self.selects:
            return F.mse_loss(outputs[hidden], x[hidden])
        losses_of = F.mse_loss(outputs, x, reduction="none").mean(-1)
        return (losses_of * hidden).sum() / hidden.sum()


@pytest.mark.parametrize("selects", [True, False])
def test_the_remedy_for_a_mask_that_forward_draws_takes_the_warning_away(selects: bool) -> None:
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Masked(selects), (torch.randn(8, 16, 4),)), torch.randn(8, 16, 4)
    optimizer = kfac_fx.KFAC(net)
    net(x).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told = " ".join(str(warning.message) for warning in caught)
    assert ("leaves out" in told) != selects
    assert selects or "Else select the others in forward, in front of the loss, as in F.mse_loss(outputs[mask]" in told


@pytest.mark.parametrize("function", [torch.sqrt, torch.log, torch.square], ids=lambda function: function.__name__)
def test_a_function_of_a_loss_is_not_told_as_a_multiple(function: Callable[[Tensor], Tensor]) -> None:
    """The ratio of the gradients is another one at every step, so no coefficient is right."""

    class Curved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return function(F.cross_entropy(3 * self.head(x), y))

    torch.manual_seed(0)
    net = kfac_fx.compile(Curved(), (X, CLASSES))
    optimizer = kfac_fx.KFAC(net)
    net(X, CLASSES).backward()
    with pytest.warns(LossScaleWarning) as told:
        optimizer.step()
    assert re.match(
        r"the gradient of the trained loss is [\d.]+ times that of the mean of the registered Categorical loss over "
        r"its 8 cases in this step, as forward returns a function of that loss, such as its root or its logarithm: let "
        r"it return the loss itself\.",
        str(told[0].message),
    )
