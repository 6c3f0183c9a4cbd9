"""Odd trainings: ordinary models and options in combinations that are drawn."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import kfac_fx

CASES, INPUTS, CLASSES = 8, 6, 3
RULES: dict[str, dict[str, Any]] = {
    "eigen_moments": {"cov_update_every": 1},
    "eigen_moments, checked": {"damping_adaptation_interval": 1},
    "adaptive": {"momentum_type": "adaptive", "damping_adaptation_interval": 1},
    "regular": {"momentum_type": "regular", "lr": 0.05, "damping": 0.1},
    "regular, norm_constraint": {"momentum_type": "regular", "lr": 0.1, "damping": 0.1, "norm_constraint": 0.01},
    "adam": {"momentum_type": "adam", "lr": 0.01, "damping": 0.1},
    "qmodel": {"momentum_type": "qmodel", "damping": 0.1, "momentum": None},
    "qmodel_fixedmu": {"momentum_type": "qmodel_fixedmu", "damping": 0.1},
}


class Of(nn.Module):
    """A function of children, parameters and buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def spectral() -> nn.Module:
    layer = nn.Linear(INPUTS, 5)
    parametrizations.orthogonal(layer)
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
    "a weight that is used twice": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(INPUTS, INPUTS), b=nn.Linear(INPUTS, CLASSES)
    ),
    "a weight and its transpose": lambda: Of(
        lambda m, x: m.b(F.linear(torch.tanh(m.a(x)), m.a.weight.t())),
        a=nn.Linear(INPUTS, 5), b=nn.Linear(INPUTS, CLASSES),
    ),
    "weight norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(INPUTS, 5)), nn.Tanh(), nn.Linear(5, CLASSES)
    ),
    "an orthogonal weight": lambda: nn.Sequential(spectral(), nn.Tanh(), nn.Linear(5, CLASSES)),
    "a scale and a spare": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x * m.scale))) + torch.cumsum(m.spare.sin(), 0),
        a=nn.Linear(INPUTS, 5), b=nn.Linear(5, CLASSES),
        scale=nn.Parameter(torch.ones(INPUTS)), spare=parameter(CLASSES),
    ),
    "a frozen base": lambda: Of(
        lambda m, x: m.c(torch.tanh(m.a(x) + m.up(m.down(x)))),
        a=frozen(nn.Linear(INPUTS, 5)), down=nn.Linear(INPUTS, 2, bias=False), up=nn.Linear(2, 5, bias=False),
        c=nn.Linear(5, CLASSES),
    ),
    "a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * (INPUTS - 2), CLASSES),
    ),
    "a depthwise convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, INPUTS // 2)), nn.Conv1d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES)
    ),
    "dropout": lambda: nn.Sequential(
        nn.Linear(INPUTS, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, CLASSES)
    ),
    "an embedding": lambda: Of(
        lambda m, x: m.b(m.a((x[:, :3] > 0).long() + torch.arange(3)).flatten(1)),
        a=nn.Embedding(4, 3), b=nn.Linear(9, CLASSES),
    ),
    "a recurrent layer": lambda: Of(
        lambda m, x: m.b(m.a(x.unflatten(1, (3, 2)))[0][:, -1]),
        a=nn.GRU(2, 4, batch_first=True), b=nn.Linear(4, CLASSES),
    ),
    "attention": lambda: Of(
        lambda m, x: m.b(m.a(*[x.unflatten(1, (3, 2))] * 3, need_weights=False)[0].flatten(1)),
        a=nn.MultiheadAttention(2, 1, batch_first=True), b=nn.Linear(6, CLASSES),
    ),
    "a branch of Python": lambda: Of(
        lambda m, x: m.b(torch.relu(m.a(x))) if float(x.detach().sum()) < 1e9 else m.b(m.a(x)),
        a=nn.Linear(INPUTS, 5), b=nn.Linear(5, CLASSES),
    ),
    "a layer that is not used": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(INPUTS, 5), b=nn.Linear(5, CLASSES), c=nn.Linear(2, 2)
    ),
    "one layer without a bias": lambda: nn.Linear(INPUTS, CLASSES, bias=False),
    "experts": lambda: Of(
        lambda m, x: m.b(torch.einsum("ni,eio->neo", x, m.w).tanh().mean(1)),
        w=parameter(2, INPUTS, 4), b=nn.Linear(4, CLASSES),
    ),
}  # fmt: skip


WITH_INPUTS = ("an orthogonal weight", "a recurrent layer", "attention", "a branch of Python")  # no graphs of torch.fx


@dataclass(frozen=True)
class Setting:
    """A training. Its fields are what is drawn."""

    model: str = "two layers"
    rule: str = "regular"
    mode: str = "exact"
    dtype: str = "float64"
    micro_batches: int = 1
    scaler: bool = False
    groups: str = "one"
    frozen: bool = False  # the first parameter
    in_place: bool = False
    backend: str = "eager"
    inputs: bool = False  # whether compile gets example inputs
    closure: bool = False
    weight_decay: float = 0.0
    burn_in: int = 0
    every: int | None = None  # invert_every
    repeated: bool = False  # whether every step has the batch of the first one

    def __str__(self) -> str:
        usual = Setting()
        changed = [
            value if isinstance(value := getattr(self, f.name), str) else f"{f.name}={value}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(usual, f.name) or f.name in ("model", "rule")
        ]
        return ", ".join(changed)


CHOICES: Mapping[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "rule": tuple(RULES),
    "mode": ("exact", "exact", "empirical"),
    "dtype": ("float64", "float64", "float32", "bfloat16"),
    "micro_batches": (1, 1, 2, 3),
    "scaler": (False, False, True),
    "groups": ("one", "one", "two groups", "by name", "another order"),
    "frozen": (False, False, True),
    "in_place": (False, True),
    "inputs": (False, True),
    "closure": (False, False, True),
    "weight_decay": (0.0, 0.1),
    "burn_in": (0, 0, 2),
    "every": (None, 1, 3),
}


def drawn(rng: random.Random, **given: Any) -> Setting:
    """A setting that torch itself can train: a closure and a GradScaler exclude each other."""
    chosen = {name: rng.choice(values) for name, values in CHOICES.items()} | given
    chosen["inputs"] |= chosen["model"] in WITH_INPUTS
    if chosen["model"] == "an orthogonal weight" and chosen["dtype"] == "bfloat16":
        chosen["dtype"] = "float32"  # torch has no Householder products in bfloat16
    if chosen["scaler"]:
        chosen["closure"] = False
    return Setting(**chosen)


class Training:
    """The training of a setting, by numbered batches."""

    def __init__(self, setting: Setting, model: nn.Module | None = None, **options: Any) -> None:
        self.setting = setting
        torch.manual_seed(0)
        self.dtype: torch.dtype = getattr(torch, setting.dtype)
        self.model = (MODELS[setting.model]() if model is None else model).to(self.dtype)
        if setting.frozen:
            next(self.model.parameters()).requires_grad_(False)
        examples = (self.batch(0)[0],) if setting.inputs else None
        self.net = kfac_fx.compile(
            self.model, examples, loss="categorical", in_place=setting.in_place, backend=setting.backend
        )
        self.called: nn.Module = self.model if setting.in_place else self.net
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if setting.scaler else None
        self.opt = kfac_fx.KFAC(
            self.net,
            **{
                "seed": 0,
                "estimation_mode": setting.mode,
                "weight_decay": setting.weight_decay,
                "num_burnin_steps": setting.burn_in,
                "invert_every": setting.every,
                "grad_scaler": self.scaler,
                "params": self.groups(),
                **RULES[setting.rule],
                **options,
            },
        )

    def groups(self) -> Any:
        named = dict(self.net.named_parameters())
        half = len(named) // 2
        match self.setting.groups:
            case "two groups":
                parts = list(named.values())
                return [{"params": parts[:half], "weight_decay": 0.2}, {"params": parts[half:]}]
            case "by name":
                return list(named.items())
            case "another order":
                return [{"params": list(named.values())[::-1]}]
        return None

    def batch(self, number: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(CASES, INPUTS, generator=generator, dtype=torch.float64)
        return (size * x).to(self.dtype), torch.randint(CLASSES, (CASES,), generator=generator)

    def loss(self, number: int, size: float = 1.0) -> Tensor:
        torch.manual_seed(number)  # of dropout
        x, y = self.batch(number, size)
        return F.cross_entropy(self.called(x), y)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, number: int) -> None:
        """Forward, backward and step with as many micro-batches as the setting has."""
        parts = range(self.setting.micro_batches)
        if self.setting.repeated:
            number = 0

        def gradients() -> Tensor:
            self.opt.zero_grad()
            losses = []
            for part in parts:
                loss = self.loss(1000 * (part + 1) + number) / len(parts)
                self.backward(loss)
                losses.append(loss.detach())
            return torch.stack(losses).sum()

        if self.setting.closure:
            self.opt.step(gradients)
            return
        gradients()
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()

    def steps(self, numbers: Iterable[int]) -> Training:
        for number in numbers:
            self.step(number)
        return self

    @torch.no_grad()
    def value(self, numbers: Iterable[int] = range(3)) -> float:
        """The mean loss of the first batches, in evaluation mode."""
        self.called.eval()
        losses = [float(self.loss(1000 + number)) for number in numbers]
        self.called.train()
        return sum(losses) / len(losses)

    @property
    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().double().flatten() for parameter in self.net.parameters()])

    def checkpoint(self) -> dict[str, Any]:
        """As users write it."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return copy.deepcopy({"model": self.net.state_dict(), "optimizer": self.opt.state_dict(), "scaler": scaler})

    def resume(self, checkpoint: Mapping[str, Any]) -> Training:
        self.net.load_state_dict(checkpoint["model"])
        self.opt.load_state_dict(checkpoint["optimizer"])
        if self.scaler is not None and checkpoint["scaler"] is not None:
            self.scaler.load_state_dict(checkpoint["scaler"])
        return self


def many(seed: int, number: int, **given: Any) -> list[Setting]:
    """So many settings that differ."""
    rng, settings = random.Random(seed), dict[Setting, None]()
    while len(settings) < number:
        settings[drawn(rng, **given)] = None
    return list(settings)
