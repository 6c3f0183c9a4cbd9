"""Names and shapes that are drawn: a model trains as one with plain names does, to the last bit.

Shapes are those of tensors with odd strides, sizes of 0 and 1, and several dtypes; a model of them trains as the same
one whose parameters are contiguous.
"""

from __future__ import annotations

import contextlib
import copy
import keyword
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.hostile.grading import Input, Outcome, Torchs
from benchmarks.hostile.settings import RULES, Of

KIND = "names and shapes"
STEPS = 3
PARTS = ("child", "norm", "parameter", "buffer", "container", "list", "dictionary")
WORDS: dict[str, Sequence[str]] = {
    "keywords": keyword.kwlist,
    "soft keywords": ["_", "case", "match", "type"],
    "builtins": ["id", "list", "print", "len", "super", "type", "object", "None_", "Ellipsis", "__debug__x"],
    "methods of a module": ["graph", "code", "meta", "print_readable", "recompile", "add_submodule", "to_folder"],
    "attributes of the compiled module": ["report", "losses", "registrations", "captures", "program", "backend"],
    "attributes of an optimizer": ["state", "param_groups", "defaults", "step", "lr", "params", "velocity"],
    "words of the state": ["A", "G", "moment", "basis", "ready", "kfac", "damping", "average", "inverse", "None"],
    "operations": ["add", "mul", "linear", "relu", "getitem", "torch", "sym_size", "view", "transpose", "tanh"],
    "placeholders": ["x", "input", "input_1", "arg0_1", "self", "args", "kwargs", "primals_1", "output", "p_weight"],
    "punctuation": ["a,b", "a b", "a/b", "a-b", "a:b", "a=b", "[0]", "<lambda>", "$x", "{}", "%s", "a\\b", "'", "#"],
    "white space": [" ", "\t", "a\nb", "\u00a0", "\u200b", "\r", "a\x00b", " a", "a "],
    "scripts": ["é", "e\u0301", "ﬁ", "fi", "Ω", "Ω", "мир", "数", "עברית", "😀", "ß", "İ", "ı", "\u0f0b"],
    "numbers": ["0", "00", "1", "-1", "1e5", "01", "0x1", "½", "²", "٣", "9" * 30],
    "long": ["a" * 300, "b" * 1000, "_" * 50, "__", "___", "a_" * 100, "w" * 99],
    "underscores": ["_a", "__a", "a__", "_0", "_1", "a_1", "a_2", "a", "a_1_1"],
    "twins of patterns": ["*", "?", "a*", "[a]", "[!a]", "**", "a?", "ab", "aa"],
    "roles": ["weight", "bias", "scale", "shift", "in_proj_weight", "original0", "weight_g", "weight_v"],
}  # fmt: skip


class Named(nn.Module):
    """A chain of parts of these names and a layer."""

    def __init__(self, parts: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.layer_of_all, self.parts_of_all = nn.Linear(3, 2), list(parts)
        for name, part in parts:
            match part:
                case "child":
                    self.add_module(name, nn.Linear(3, 3))
                case "norm":
                    self.add_module(name, nn.BatchNorm1d(3))
                case "container":
                    self.add_module(name, nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, bias=False))))
                case "list":
                    self.add_module(name, nn.ParameterList([torch.rand(3), torch.rand(3)]))
                case "dictionary":
                    self.add_module(name, nn.ParameterDict({name.replace(".", ""): torch.rand(3)}))
                case "parameter":
                    self.register_parameter(name, nn.Parameter(torch.rand(3)))
                case "buffer":
                    self.register_buffer(name, torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.parts_of_all:
            held = getattr(self, name)
            match part:
                case "child" | "norm" | "container":
                    y = held(x)
                case "list":
                    y = x * held[0] + held[1]
                case "dictionary":
                    y = x * next(iter(held.values()))
                case _:
                    y = x * held
            x = x + 0.1 * torch.tanh(y)
        outputs: Tensor = self.layer_of_all(x)
        return outputs


def train(
    model: nn.Module, x: Tensor, y: Tensor, *, rule: str, in_place: bool, inputs: bool, mode: str
) -> list[Tensor]:
    """The parameters after some steps, of which the last ones come behind a checkpoint."""
    net = kfac_fx.compile(model, (x,) if inputs else None, loss="normal", in_place=in_place)
    options: dict[str, Any] = {**RULES[rule], "seed": 0, "estimation_mode": mode}
    optimizer = kfac_fx.KFAC(net, **options)
    called = model if in_place else net
    assert str(net.report) and net.report.to_json() and net.report.to_html() and net.report.to_dot()
    for step in range(STEPS):
        optimizer.zero_grad()
        (called(x) - y).square().sum(-1).mean().backward()
        optimizer.step()
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            weights = copy.deepcopy(net.state_dict())
    optimizer.load_state_dict(state)
    net.load_state_dict(weights)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (called(x) - y).square().sum(-1).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def data(features: int = 3, outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, features, generator=generator), torch.randn(6, outputs, generator=generator)


def run_named(parts: Sequence[tuple[str, str]], options: dict[str, Any]) -> Outcome:
    torch.manual_seed(0)
    try:
        model = Named(parts)
    except (KeyError, TypeError) as error:  # torch has no such names
        raise Torchs(str(error)) from error
    torch.manual_seed(0)
    plain = Named([(f"part{number}", part) for number, (_, part) in enumerate(parts)])
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    x, y = data()
    trained, expected = train(model, x, y, **options), train(plain, x, y, **options)
    distance = max(float((of - to).abs().max()) for of, to in zip(trained, expected, strict=True))
    return Outcome(distance == 0.0, f"parameters differ by {distance:.2g}")


# --- shapes -----------------------------------------------------------------------------------------------------------


def layer(**options: Any) -> nn.Module:
    return nn.Linear(4, 2, **options)


def with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A layer whose weight lies in memory in another way."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        first = model[0]
        assert isinstance(first, nn.Linear)
        first.weight = nn.Parameter(change(first.weight.detach()))
        return model

    return make


def padded(tensor: Tensor) -> Tensor:
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def every_second(tensor: Tensor) -> Tensor:
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def of_one_storage() -> nn.Module:
    """Two layers whose parameters are views of one vector, as flat optimizers make them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    start = 0
    for name, old in list(model.named_parameters()):
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, nn.Parameter(flat[start : start + old.numel()].view_as(old)))
        start += old.numel()
    return model


def images(module: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), module, nn.Flatten(), nn.Linear(width, 2))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "a transposed weight": with_weight(lambda w: w.t().contiguous().t()),
    "a weight in a wider one": with_weight(padded),
    "every second column": with_weight(every_second),
    "a weight behind an offset": with_weight(lambda w: torch.cat([torch.zeros(7), w.flatten()])[7:].view_as(w)),
    "all parameters in one vector": of_one_storage,
    "one feature": lambda: Of(lambda m, x: m.b(m.a(x[:, :1])), a=nn.Linear(1, 1), b=nn.Linear(1, 2)),
    "a scalar parameter": lambda: Of(lambda m, x: m.b(x * m.s), s=nn.Parameter(torch.tensor(0.7)), b=layer()),
    "a parameter of 5 dimensions": lambda: Of(
        lambda m, x: m.b(x * m.s.flatten()), s=nn.Parameter(torch.rand(1, 2, 1, 2, 1)), b=layer()
    ),
    "a weight of 3 dimensions": lambda: Of(
        lambda m, x: torch.einsum("ni,aio->nao", x, m.w).sum(1), w=nn.Parameter(torch.rand(2, 4, 2))
    ),
    "a layer of 0 outputs": lambda: Of(lambda m, x: m.b(x) + m.a(x).sum(-1, True), a=nn.Linear(4, 0), b=layer()),
    "a kernel as large as the image": lambda: images(nn.Conv2d(1, 3, 2), 3),
    "a kernel of 1": lambda: images(nn.Conv2d(1, 3, 1), 12),
    "padding wider than the image": lambda: images(nn.Conv2d(1, 2, 3, padding=2), 32),
    "a stride past the image": lambda: images(nn.Conv2d(1, 2, 1, stride=3), 2),
    "a dilated kernel": lambda: images(nn.Conv2d(1, 2, 2, dilation=2, padding=1), 8),
    "circular padding": lambda: images(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 8),
    "a transposed convolution": lambda: images(nn.ConvTranspose2d(1, 2, 2, stride=2, output_padding=1), 50),
    "channels last": lambda: images(nn.Conv2d(1, 3, 2), 3).to(memory_format=torch.channels_last),
    "half of a weight": lambda: Of(lambda m, x: F.linear(x, m.w[:2]), w=nn.Parameter(torch.rand(4, 4))),
    "rows of a weight in another order": lambda: Of(
        lambda m, x: F.linear(x, m.w[torch.tensor([2, 0])]), w=nn.Parameter(torch.rand(4, 4))
    ),
    "a weight as sum of two": lambda: Of(
        lambda m, x: F.linear(x, m.w + m.v), w=nn.Parameter(torch.rand(2, 4)), v=nn.Parameter(torch.rand(2, 1))
    ),
    "a bias that is a weight elsewhere": lambda: Of(
        lambda m, x: F.linear(x * m.b.repeat(2), m.w, m.b),
        w=nn.Parameter(torch.rand(2, 4)), b=nn.Parameter(torch.rand(2)),
    ),
    "a layer called 9 times": lambda: Of(
        lambda m, x: m.b(repeated(m.a, x, 9)), a=nn.Linear(4, 4), b=layer()
    ),
    "a norm without parameters": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), layer()
    ),
    "a norm of one feature": lambda: Of(lambda m, x: m.b(m.n(m.a(x).unsqueeze(-1)).squeeze(-1)),
        a=nn.Linear(4, 4), n=nn.LayerNorm(1), b=layer()),
    "an embedding of one row": lambda: Of(
        lambda m, x: m.b(x + m.e((x[:, 0] * 0).long())), e=nn.Embedding(1, 4), b=layer()
    ),
    "an embedding bag": lambda: Of(
        lambda m, x: m.b(m.e((x > 0).long())), e=nn.EmbeddingBag(2, 3, mode="sum"), b=nn.Linear(3, 2)
    ),
    "a padding index": lambda: Of(
        lambda m, x: m.b(m.e((x > 0).long()).flatten(1)), e=nn.Embedding(2, 3, padding_idx=0), b=nn.Linear(12, 2)
    ),
    "a batch norm without averages": lambda: nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)
    ),
    "bilinear": lambda: Of(lambda m, x: m.a(x[:, :2], x[:, 2:]), a=nn.Bilinear(2, 2, 2)),
    "PReLU": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.PReLU(), nn.Linear(3, 2)),
    "float32 and float64": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x)).double()).float(), a=nn.Linear(4, 3), b=nn.Linear(3, 2).double()
    ),
    "a mask of a parameter": lambda: Of(
        lambda m, x: F.linear(x, m.w * m.mask), w=nn.Parameter(torch.rand(2, 4)), mask=(torch.rand(2, 4) > 0.4).float()
    ),
    "an exponential": lambda: Of(lambda m, x: F.linear(x, m.w.exp()), w=nn.Parameter(torch.rand(2, 4))),
    "a triangle": lambda: Of(
        lambda m, x: m.b(F.linear(x, torch.tril(m.w))), w=nn.Parameter(torch.rand(4, 4)), b=layer()
    ),
    "a sparse gradient": lambda: Of(
        lambda m, x: m.b(m.e((x > 0).long()).flatten(1)), e=nn.Embedding(2, 3, sparse=True), b=nn.Linear(12, 2)
    ),
}  # fmt: skip


def repeated(module: nn.Module, x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = torch.tanh(module(x))
    return x


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """That of new tensors inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_shape(name: str, options: dict[str, Any]) -> Outcome:
    """The loss falls in float32, and in float64 the parameters are those of a copy whose parameters are contiguous
    tensors of their own. Rounding decides the basis of equal eigenvalues, which in float32 makes other trainings."""
    before, after, _ = trained_shape(name, options, torch.float32)
    *_, distance = trained_shape(name, options, torch.float64)
    return Outcome(distance < 1e-4 and after < before, f"loss {before:.4g} -> {after:.4g}, differs by {distance:.2g}")


def trained_shape(name: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[float, float, float]:
    """(the loss before a training, that after it, how far the parameters are from those of the copy)."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        model, (x, y) = SHAPES[name](), data(4)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def loss(of: nn.Module) -> float:
        with torch.no_grad():
            return float((of(x) - y).square().sum(-1).mean())

    before = loss(model)
    trained, expected = train(model, x, y, **options), train(plain, x, y, **options)
    distance = max((float((of - to).abs().max()) for of, to in zip(trained, expected, strict=True) if of.numel()))
    return before, loss(model), distance


def inputs() -> Iterator[Input]:
    rng, rules = random.Random(44), list(RULES)

    def options() -> dict[str, Any]:
        return {
            "rule": rng.choice(rules),
            "in_place": rng.random() < 0.5,
            "inputs": rng.random() < 0.5,
            "mode": rng.choice(("exact", "empirical")),
        }

    def shown(given: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value}" if isinstance(value, bool) else value for key, value in given.items())

    for words, names in WORDS.items():
        for number in range(5):
            chosen = rng.sample(list(dict.fromkeys(names)), min(len(names), 4))
            parts = [(name, PARTS[(number + place) % len(PARTS)]) for place, name in enumerate(chosen)]
            given = options()
            named = ", ".join(f"{part} {name[:20]!r}" for name, part in parts)
            yield Input(KIND, f"{words}: {named}; {shown(given)}", lambda p=parts, o=given: run_named(p, o))
    for name in SHAPES:
        for _ in range(2):
            given = options()
            if given["rule"] == "qmodel_fixedmu":
                given["rule"] = "qmodel"  # with a fixed momentum the loss goes up and down in the first steps
            if given["rule"] == "qmodel":
                given["mode"] = "exact"  # a quadratic model of the empirical Fisher is one of no loss
            yield Input(KIND, f"{name}; {shown(given)}", lambda n=name, o=given: run_shape(n, o))
