"""Random models for "the rewritten model is the original".

A `Recipe` is plain data that prints as what to build, so that a failing example can be read and shrinks to few steps:

    Recipe((4, 3), (Step("linear", (5, True)), Step("residual", (), (Step("relu_", ()),))))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Shape = tuple[int, ...]  # of one case: (D,), (S, D) or (C, H, W)
Draw = Callable[[st.SearchStrategy[Any]], Any]
BATCH = 3
LARGEST = 400  # elements of one case


@dataclass(frozen=True)
class Step:
    op: str
    options: tuple[Any, ...] = ()
    inner: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Recipe:
    start: Shape
    steps: tuple[Step, ...]

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = Chain(self.steps, self.start)
        with torch.no_grad():
            for parameter in model.parameters():  # norms' ones and zeros would hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def inputs(self, seed: int = 1) -> Tensor:
        return torch.randn(BATCH, *self.start, generator=torch.Generator().manual_seed(seed))

    def out_of_place(self) -> Recipe:
        return replace(self, steps=tuple(map(without_in_place, self.steps)))


def without_in_place(step: Step) -> Step:
    op = {"relu_": "relu", "residual_": "residual"}.get(step.op, step.op)
    options = (False,) if op in ("relu_module", "dropout_module") else step.options
    return Step(op, options, tuple(map(without_in_place, step.inner)))


# --- what a step is -------------------------------------------------------------------------------------------------


class Function(nn.Module):
    """An operation without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Chain(nn.Module):
    """Steps one after the other. "again" applies the latest module before it that keeps the shape."""

    def __init__(self, steps: tuple[Step, ...], shape: Shape) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        for step in steps:
            self.steps.append(build(step, shape, self))
            shape = shape_after(self.steps[-1], shape)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Merge(nn.Module):
    """Two ways from one tensor, and their sum; an empty way is a shortcut."""

    def __init__(self, left: nn.Module, right: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.left, self.right, self.in_place = left, right, in_place

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        right = self.right(x)
        if self.in_place:
            left += right
            return left
        return left + right


class Spelled(nn.Module):
    """A linear layer in one of the ways that people write it."""

    def __init__(self, inputs: int, outputs: int, spelling: str) -> None:
        super().__init__()
        stored = (inputs, outputs) if spelling in ("matmul", "einsum") else (outputs, inputs)
        self.weight = nn.Parameter(torch.randn(stored) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        match self.spelling:
            case "functional":
                return F.linear(x, self.weight, self.bias)
            case "matmul":
                return x @ self.weight + self.bias
            case "transposed":
                return self.bias + torch.matmul(x, self.weight.t())
            case "einsum":
                return torch.einsum("...i,io->...o", x, self.weight) + self.bias
        raise AssertionError(self.spelling)


class Elementwise(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        size = shape[-1:] if kind != "position" else shape
        if kind in ("scale", "affine"):
            self.scale = nn.Parameter(torch.ones(size))
        if kind in ("position", "shift", "affine"):
            self.shift = nn.Parameter(torch.zeros(size))
        if kind == "temperature":
            self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "scale":
                return self.scale * x
            case "affine":
                return x * self.scale + self.shift
            case "temperature":
                return torch.exp(self.temperature) * x
        return x + self.shift


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = F.dropout(torch.softmax(q @ k.transpose(1, 2), dim=-1), self.dropout, self.training)
        y: Tensor = self.out(weights @ v)
        return y


def build(step: Step, shape: Shape, chain: Chain) -> nn.Module:
    """The module of a step on cases of `shape`; `chain` holds the modules before it."""
    width, options = shape[-1] if len(shape) < 3 else shape[0], step.options
    match step.op:
        case "linear":
            return nn.Linear(width, options[0], bias=options[1])
        case "spelled":
            return Spelled(width, *options)
        case "conv":
            outputs, kernel, stride, padding, dilation, groups, bias = options
            return nn.Conv2d(width, outputs, kernel, stride, padding, dilation, groups, bias)
        case "depthwise":
            return nn.Conv2d(width, width * options[0], 3, padding=1, groups=width)
        case "norm":
            return norm(options[0], shape)
        case "elementwise":
            return Elementwise(shape, options[0])
        case "attention":
            return Attention(width, options[0])
        case "relu_module":
            return nn.ReLU(inplace=options[0])
        case "dropout_module":
            return nn.Dropout(0.3, inplace=options[0])
        case "residual" | "residual_":
            return Merge(Chain(step.inner, shape), nn.Identity(), step.op == "residual_")
        case "branches":
            half = len(step.inner) // 2
            return Merge(Chain(step.inner[:half], shape), Chain(step.inner[half:], shape), False)
        case "twice":
            return Twice(Chain(step.inner, shape))
        case "again":
            return chain.steps[options[0]]
    return Function(FUNCTIONS[step.op])


class Twice(nn.Module):
    """One module applied to its own output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.inner(x))
        return y


def norm(kind: str, shape: Shape) -> nn.Module:
    width = shape[-1] if len(shape) < 3 else shape[0]
    if kind == "batch":
        return nn.BatchNorm2d(width) if len(shape) == 3 else nn.BatchNorm1d(shape[0])
    if kind == "group":
        return nn.GroupNorm(1, width)
    if kind == "instance":
        return nn.InstanceNorm2d(width, affine=True)
    return nn.RMSNorm(shape[-1:]) if kind == "rms" else nn.LayerNorm(shape[-1:] if len(shape) < 3 else shape)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu_": lambda x: x.relu_(),
    "gelu": F.gelu,
    "tanh": lambda x: x.tanh(),
    "silu": F.silu,
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "mask": lambda x: x * torch.rand_like(x).ge(0.2),
    "flatten": lambda x: x.flatten(1),
    "swap": lambda x: x.transpose(1, 2),
    "positions": lambda x: x.flatten(2).transpose(1, 2),
    "pool": lambda x: F.avg_pool2d(x, 2),
    "mean": lambda x: x.mean(tuple(range(2, x.dim()))) if x.dim() == 4 else x.mean(1),
    "normalize": lambda x: x / (1 + x.detach().square().mean()),
    "first": lambda x: x[:, 0],
    "wasted": lambda x: (torch.rand_like(x), x)[1],  # moves the random stream, and nothing reads it
}
ACTIVATIONS = ("relu", "relu_", "gelu", "tanh", "silu", "noise", "mask", "normalize", "wasted")


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """Found by running it, in evaluation mode so that no buffer moves."""
    training = module.training
    with torch.no_grad():
        result = module.eval()(torch.zeros(BATCH, *shape)).shape[1:]
    module.train(training)
    return tuple(result)


# --- drawing --------------------------------------------------------------------------------------------------------


@st.composite
def recipes(draw: Draw, largest: int = 6) -> Recipe:
    """Models that run and can be differentiated; at most `largest` steps on the main way."""
    start = draw(st.sampled_from([(5,), (4, 6), (3, 6, 6)]))
    stem = Step("conv", (4, 3, 1, 1, 1, 1, True)) if len(start) == 3 else Step("linear", (6, True))
    steps, shape = [stem], shape_after(build(stem, start, Chain((), start)), start)
    for _ in range(draw(st.integers(1, largest))):
        step = draw_step(draw, shape, steps, start)
        steps.append(step)
        shape = Chain(tuple(steps), start).shape
    recipe = Recipe(start, (*steps, Step("linear", (3, True))) if len(shape) < 3 else (*steps, Step("mean")))
    return recipe if differentiable(recipe) else recipe.out_of_place()


def draw_step(draw: Draw, shape: Shape, before: list[Step], start: Shape) -> Step:
    image, sequence = len(shape) == 3, len(shape) == 2
    if draw(st.integers(0, 3)) == 0:
        return draw_composite(draw, shape)
    again = reusable(before, start, shape)
    ops = ["keep", "keep", "keep", "wide"]
    ops += ["pool", "positions", "flatten", "mean"] if image else ["spelled"]
    ops += ["swap", "flatten", "first", "attention"] if sequence else []
    ops += ["again"] if again else []
    op = draw(st.sampled_from(ops))
    if op == "keep":
        return draw_keeping(draw, shape)
    if op == "again":
        return Step("again", (draw(st.sampled_from(again)),))
    if op == "attention":
        return Step("attention", (draw(st.sampled_from([0.0, 0.2])),))
    if op == "spelled":
        return Step("spelled", (draw(st.integers(2, 6)), draw(st.sampled_from(SPELLINGS))))
    if op == "wide":
        return draw_conv(draw, shape) if image else Step("linear", (draw(st.integers(2, 8)), draw(st.booleans())))
    too_small = op == "pool" and min(shape[1:]) < 2
    return Step("relu") if too_small else Step(op)


SPELLINGS = ("functional", "matmul", "transposed", "einsum")


def draw_conv(draw: Draw, shape: Shape) -> Step:
    channels, height, width = shape
    if draw(st.booleans()) and min(height, width) >= 5 and channels % 2 == 0:
        return Step("conv", (2 * draw(st.integers(1, 3)), 3, 2, 2, 2, 2, draw(st.booleans())))
    if channels * height * width <= LARGEST // 2 and draw(st.booleans()):
        return Step("depthwise", (draw(st.integers(1, 2)),))
    return Step("conv", (draw(st.integers(2, 5)), 1, 1, 0, 1, 1, draw(st.booleans())))


def draw_keeping(draw: Draw, shape: Shape) -> Step:
    """A step that keeps the shape."""
    image = len(shape) == 3
    kinds = ["activation", "norm", "relu_module", "dropout_module", "same"] + ([] if image else ["elementwise"])
    kind = draw(st.sampled_from(kinds))
    if kind == "activation":
        return Step(draw(st.sampled_from(ACTIVATIONS)))
    if kind == "norm":
        several = image and min(shape[1:]) > 1
        norms = ["batch", "group", *(["instance"] if several else [])] if image else ["layer", "rms", "batch"]
        return Step("norm", (draw(st.sampled_from(norms)),))
    if kind == "elementwise":
        kinds = ["position", "scale", "shift", "affine", "temperature"]
        return Step("elementwise", (draw(st.sampled_from(kinds)),))
    if kind == "same":
        return Step("conv", (shape[0], 3, 1, 1, 1, 1, True)) if image else Step("linear", (shape[-1], True))
    return Step(kind, (draw(st.booleans()),))


def draw_composite(draw: Draw, shape: Shape) -> Step:
    op = draw(st.sampled_from(["residual", "residual_", "branches", "twice"]))
    count = 2 * draw(st.integers(1, 2)) if op == "branches" else draw(st.integers(1, 3))
    return Step(op, (), tuple(draw_keeping(draw, shape) for _ in range(count)))


def reusable(before: list[Step], start: Shape, shape: Shape) -> list[int]:
    """The modules with parameters that fit `shape` and keep it."""
    found, current = [], start
    chain = Chain((), start)
    for n, step in enumerate(before):
        module = build(step, current, chain)
        chain.steps.append(module)
        after = shape_after(module, current)
        if current == after == shape and list(module.parameters()):
            found.append(n)
        current = after
    return found


def differentiable(recipe: Recipe) -> bool:
    """False where an in-place operation overwrites what the backward pass needs."""
    try:
        recipe.model()(recipe.inputs()).sum().backward()
    except RuntimeError as error:
        if "inplace operation" in str(error):
            return False
        raise
    return True
