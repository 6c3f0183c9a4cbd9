"""Neutral changes change no bit: a training with one ends where the same training without it ends.

Neutral are reports, metrics, forwards in between, closures, in_place, a checkpoint and so on. Model, rule and options
of each training are drawn by a seed, so that the changes meet in combinations that nobody has thought of.
"""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import kfac_fx
from tests.tables import every

STEPS, CASES, CLASSES = 6, 6, 3
DRAWS_OF_SLOW = 40

# --- models -----------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.depthwise, self.head = nn.Conv2d(4, 4, 3, groups=4), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(hidden).flatten(1))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(CLASSES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        return self.head(hidden).flatten(0, 1)  # type: ignore[no-any-return]


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])  # type: ignore[no-any-return]


class Odd(nn.Module):
    """A layer with two uses, a scale, and a number in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.scale, self.temperature = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        hidden = torch.tanh(self.twice(hidden)) + torch.tanh(self.twice(hidden.flip(-1)))
        return self.head(hidden) * self.temperature.exp()  # type: ignore[no-any-return]


class Parametrized(nn.Module):
    """Buffers that every forward moves, and a norm without a derivative in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = spectral_norm(nn.Linear(3, 6)), weight_norm(nn.Linear(6, 6))
        self.slopes, self.head = nn.PReLU(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.slopes(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(3, 6), nn.Linear(6, CLASSES), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.policy(hidden), self.value(hidden)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x)
        return F.cross_entropy(logits, labels), logits


def two_losses(outputs: Any) -> list[Any]:
    return [kfac_fx.losses.Categorical(outputs[0]), kfac_fx.losses.Normal(outputs[1], var=1.0)]


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a case
    loss: Any = "categorical"
    tokens: bool = False


MODELS = {
    "layers": Kind(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)), (3,)),
    "images": Kind(Images, (2, 6, 6)),
    "tokens": Kind(Tokens, (4,), tokens=True),
    "sequences": Kind(Sequences, (4, 3)),
    "odd": Kind(Odd, (3,)),
    "parametrized": Kind(Parametrized, (3,)),
    "two heads": Kind(TwoHeads, (3,), two_losses),
    "own loss": Kind(OwnLoss, (3,), None),
}
RULES: dict[str, dict[str, Any]] = {
    "eigen_moments": {},
    "eigen_moments, often": {"damping_adaptation_interval": 1, "cov_update_every": 1, "invert_every": 1},
    "adaptive": {"momentum_type": "adaptive"},
    "regular": {"momentum_type": "regular", "lr": 0.1, "damping": 0.1},
    "adam": {"momentum_type": "adam", "lr": 0.01, "damping": 0.1},
    "qmodel": {"momentum_type": "qmodel", "damping": 0.1, "momentum": None},
    "qmodel_fixedmu": {"momentum_type": "qmodel_fixedmu", "damping": 0.1},
}
WITHOUT_LR = ("qmodel", "qmodel_fixedmu")

# --- trainings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The model, the rule and the options of a training; drawn by a seed."""

    model: str
    rule: str
    mode: str | None
    micro_batches: int
    weight_decay: float
    dtype: torch.dtype
    autocast: bool
    burn_in: int
    fraction: float
    two_groups: bool
    schedule: bool
    frozen: bool  # the first parameter, always
    freezes: bool  # the second one, from step 3 on
    unfreezes: bool  # the last one, from step 3 on
    other_sizes: bool  # of batches
    saved_at: int  # for the changes that save

    @staticmethod
    def drawn(seed: int) -> Setting:
        draw = random.Random(seed)
        mode = draw.choice([None, None, "empirical", "exact"])
        return Setting(
            model=draw.choice(list(MODELS)),
            rule=draw.choice(list(RULES)),
            mode=mode,
            micro_batches=draw.choice([1, 1, 2]),
            weight_decay=draw.choice([0.0, 0.0, 0.1]),
            dtype=draw.choice([torch.float32, torch.float64]),
            autocast=draw.random() < 0.15,
            burn_in=draw.choice([0, 0, 0, 2]),
            fraction=1.0 if mode == "empirical" else draw.choice([1.0, 1.0, 0.5]),
            two_groups=draw.random() < 0.25,
            schedule=draw.random() < 0.3,
            frozen=draw.random() < 0.2,
            freezes=draw.random() < 0.15,
            unfreezes=draw.random() < 0.15,
            other_sizes=draw.random() < 0.2,
            saved_at=draw.choice([1, 2, 3, 5]),
        )


@dataclass
class Training:
    """A training of a setting. The hooks are what neutral changes replace."""

    setting: Setting
    options: dict[str, Any] = field(default_factory=dict)  # of `compile`
    of_optimizer: Callable[[Training], dict[str, Any]] = lambda training: {}
    between: Callable[[Training], object] = lambda training: None  # before steps 2 and 4
    zero: Callable[[Training], object] = lambda training: training.opt.zero_grad()
    before_step: Callable[[Training], object] = lambda training: None
    saving: Callable[[Training], object] = lambda training: None  # before step `saved_at`
    closure: bool = False
    by_name: bool = False  # arguments of forward
    step_in_autocast: bool = False
    made: Callable[[nn.Module], nn.Module] = lambda model: model
    opt: kfac_fx.KFAC = field(init=False)

    def __post_init__(self) -> None:
        self.kind, self.number = MODELS[self.setting.model], 0
        self.model = self.made(self.new_model())
        parameters = list(self.model.parameters())
        parameters[0].requires_grad_(not self.setting.frozen)
        parameters[-1].requires_grad_(not self.setting.unfreezes)
        self.compile()

    def new_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind.make().to(self.setting.dtype)

    def compile(self) -> None:
        self.net = kfac_fx.compile(self.model, self.inputs(0), loss=self.kind.loss, **self.options)
        self.call: Any = self.model if self.options.get("in_place") else self.net
        setting, parameters = self.setting, list(self.net.parameters())
        options = {**RULES[setting.rule], "weight_decay": setting.weight_decay, "num_burnin_steps": setting.burn_in}
        options |= {"estimation_mode": setting.mode, "fraction": setting.fraction, "seed": 0}
        self.has_lr = setting.rule not in WITHOUT_LR
        if setting.two_groups:
            half = len(parameters) // 2
            rate = {"lr": 0.5 * options.get("lr", 1.0)} if self.has_lr else {}
            options["params"] = [{"params": parameters[:half]}, {"params": parameters[half:], **rate}]
        self.opt = kfac_fx.KFAC(self.net, **(options | self.of_optimizer(self)))
        self.scheduler: Any = None
        if setting.schedule and self.has_lr:
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.2, STEPS)

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """(inputs, labels, values)"""
        generator = torch.Generator().manual_seed(number)
        cases = CASES - 2 if self.setting.other_sizes and number % 3 == 2 else CASES
        shape = (cases, *self.kind.shape)
        if self.kind.tokens:
            x = torch.randint(CLASSES, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator).to(self.setting.dtype)
        labels = torch.randint(CLASSES, (cases, 4 if self.kind.tokens else 1), generator=generator)
        return x, labels, torch.randn(cases, 1, generator=generator).to(self.setting.dtype)

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        x, labels, _ = self.batch(number)
        return (x, labels.flatten()) if self.kind.loss is None else (x,)

    def loss(self, x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.autocast):
            if self.kind.loss is None:
                outputs = self.call(x=x, labels=labels.flatten()) if self.by_name else self.call(x, labels.flatten())
                return outputs[0]  # type: ignore[no-any-return]
            outputs = self.call(x)
            if self.kind.loss is not two_losses:
                return F.cross_entropy(outputs, labels.flatten())
            logits, value = outputs
            return F.cross_entropy(logits, labels.flatten()) + 0.5 * F.mse_loss(value, values.to(value.dtype))

    def gradients(self) -> Tensor:
        parts = self.setting.micro_batches
        total = torch.zeros(())
        for part in zip(*(tensor.chunk(parts) for tensor in self.batch(self.number)), strict=True):
            loss = self.loss(*part) / parts
            loss.backward()
            total = total + loss.detach()
        return total

    def all_in_closure(self) -> Tensor:
        self.zero(self)
        return self.gradients()

    def step(self) -> None:
        setting, number = self.setting, self.number
        if number == setting.saved_at:
            self.saving(self)
        parameters = list(self.model.parameters())
        if number == 3 and setting.freezes:
            parameters[1].requires_grad_(False).grad = None
        if number == 3 and setting.unfreezes:
            parameters[-1].requires_grad_(True)
        if number in (2, 4):
            random_state = torch.get_rng_state()
            self.between(self)
            torch.set_rng_state(random_state)
        torch.manual_seed(100 + number)
        if self.closure:
            self.opt.step(self.all_in_closure)
        else:
            self.all_in_closure()
            self.before_step(self)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.step_in_autocast):
                self.opt.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.number += 1

    def train(self) -> tuple[Tensor, list[str]]:
        """(the parameters, the warnings)

        Those of trainings that lead nowhere count the steps since the optimizer was made.
        """
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while self.number < STEPS:
                self.step()
        others = [warning for warning in told if not issubclass(warning.category, kfac_fx.StalledWarning)]
        texts = sorted({str(warning.message) for warning in others})
        return torch.cat([p.detach().double().flatten() for p in self.model.parameters()]), texts

    def save_and_load(self, again: bool) -> None:
        """Go on with a new optimizer. again: of the same model, which is compiled again."""
        file = io.BytesIO()
        schedule = None if self.scheduler is None else self.scheduler.state_dict()
        torch.save({"model": self.model.state_dict(), "optimizer": self.opt.state_dict(), "schedule": schedule}, file)
        file.seek(0)
        state, trained = torch.load(file, weights_only=True), [p.requires_grad for p in self.model.parameters()]
        if again:
            kfac_fx.detach(self.model)
        else:
            self.model = self.made(self.new_model())
            self.model.load_state_dict(state["model"])
        parameters = list(self.model.parameters())
        for parameter, flag in zip(parameters, trained, strict=True):
            parameter.requires_grad_(flag)
        if self.setting.freezes:  # its block is in the state
            parameters[1].requires_grad_(True)
        self.compile()
        self.opt.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["schedule"])
        for parameter, flag in zip(parameters, trained, strict=True):
            parameter.requires_grad_(flag)


# --- neutral changes --------------------------------------------------------------------------------------------------


def evaluate(training: Training) -> None:
    training.net.eval()
    with torch.no_grad():
        training.call(*training.inputs(50))
    training.call(*training.inputs(50))
    training.net.train()


def measure(training: Training) -> None:
    """An accuracy in training mode, which moves the buffers of some models."""
    if training.setting.model not in ("images", "parametrized"):
        with torch.no_grad():
            training.call(*training.inputs(50))


def attach_metrics(training: Training) -> None:
    training.metrics = kfac_fx.Metrics(training.opt)  # type: ignore[attr-defined]


def show(training: Training) -> None:
    str(training.net.report)
    training.net.report.to_dict()
    repr(training.opt), repr(training.net)


def tensor_rate(training: Training) -> dict[str, Any]:
    rate = RULES[training.setting.rule].get("lr")
    return {} if rate is None else {"lr": torch.tensor(rate, dtype=torch.float64)}


def same_groups(training: Training) -> dict[str, Any]:
    return {} if training.setting.two_groups else {"params": [{"params": list(training.net.parameters())}]}


CHANGES: dict[str, dict[str, Any]] = {
    "in place": {"options": {"in_place": True}},
    "a closure": {"closure": True},
    "gradients of zero": {"zero": lambda training: training.opt.zero_grad(set_to_none=False)},
    "zero_grad of the net": {"zero": lambda training: training.net.zero_grad()},
    "zero_grad of the model": {"zero": lambda training: training.model.zero_grad()},
    "a report": {"between": show},
    "metrics": {"between": attach_metrics},
    "states that are read": {"between": lambda training: (training.opt.state_dict(), training.net.state_dict())},
    "forwards in evaluation mode": {"between": evaluate},
    "a forward without gradients": {"between": measure},
    "a new process": {"saving": lambda training: training.save_and_load(again=False)},
    "a new optimizer": {"saving": lambda training: training.save_and_load(again=True)},
    "a copy of the model": {"made": copy.deepcopy},
    "clipping at infinity": {
        "before_step": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)
    },
    "a rate that is a tensor": {"of_optimizer": tensor_rate},
    "one group": {"of_optimizer": same_groups},
    "arguments by name": {"by_name": True},
    "a step under autocast": {"step_in_autocast": True},
}


@cache
def plain(seed: int) -> tuple[Tensor, list[str]]:
    return Training(Setting.drawn(seed)).train()


def check(change: str, seed: int) -> None:
    setting = Setting.drawn(seed)
    parameters, texts = Training(setting, **CHANGES[change]).train()
    expected, expected_texts = plain(seed)
    assert expected.isfinite().all(), setting
    assert torch.equal(parameters, expected), setting
    assert texts == expected_texts, setting


@pytest.mark.parametrize("change", every(2, CHANGES))
def test_a_neutral_change_changes_no_bit(change: str) -> None:
    check(change, 7 * list(CHANGES).index(change))


def test_a_product_that_forward_mode_refuses_leaves_the_buffers_of_the_model() -> None:
    setting = replace(Setting.drawn(0), model="parametrized", rule="qmodel", saved_at=1)
    resumed, _ = Training(setting, **CHANGES["a new optimizer"]).train()
    assert torch.equal(resumed, Training(setting).train()[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + DRAWS_OF_SLOW))
def test_no_neutral_change_changes_a_bit(seed: int) -> None:
    for change in CHANGES:
        check(change, seed)
