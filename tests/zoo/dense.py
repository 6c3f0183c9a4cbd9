"""Fully connected models: every spelling of a linear layer, several uses of one, aliases, shared halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / max(1, shape[-1]) ** 0.5)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, 3)
    )


class Spellings(nn.Module):
    """One product and one shift, written in every way that people write them."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(8):
            self.register_parameter(f"w{n}", parameter(5, 5))
            self.register_parameter(f"b{n}", parameter(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.w0, self.b0))
        x = torch.tanh(F.linear(input=x, weight=self.w1) + self.b1)
        x = torch.tanh(x @ self.w2 + self.b2)
        x = torch.tanh(torch.matmul(x, self.w3.t()) + self.b3)
        x = torch.tanh(self.b4 + x.matmul(self.w4.T))
        x = torch.tanh(torch.addmm(self.b5, x, self.w5))
        x = torch.tanh(torch.einsum("ni,oi->no", x, self.w6) + self.b6)
        return x.mm(self.w7.transpose(0, 1)).add(self.b7)


class Batched(nn.Module):
    """Linear layers over further dimensions: matmul and einsum with positions, a bias added after a view."""

    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1, self.w2 = parameter(6, 4), parameter(4, 4), parameter(4, 3)
        self.b0 = parameter(4)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, 6]
        x = torch.tanh(x @ self.w0 + self.b0)
        x = torch.tanh(torch.einsum("nsi,io->nso", x, self.w1))
        return (x.reshape(-1, 4) @ self.w2).reshape(x.shape[0], -1, 3)


class RareProducts(nn.Module):
    """Products that few people write: over several dimensions, inner ones, a weight in a copy a case, a sum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = parameter(3, 4, 5), parameter(6, 5), parameter(6, 4)
        self.fourth, self.fifth, self.bias = parameter(4, 4), parameter(2, 2, 3), parameter(3)
        self.mix, self.size = parameter(4), nn.Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor) -> Tensor:  # [N, 3, 4]
        h = torch.tanh(torch.tensordot(x, self.first, dims=([1, 2], [0, 1])))
        h = torch.tanh(torch.tensordot(torch.inner(h, self.second), self.third, 1)).unsqueeze(1)
        h = torch.bmm(h, self.fourth.expand(x.shape[0], -1, -1)).squeeze(1)
        h = torch.lerp(torch.sin(h), torch.tanh(h), self.mix) / self.size
        return torch.addbmm(self.bias, h.unflatten(1, (2, 2)).transpose(0, 1), self.fifth)


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.head(x)


class SharedFunctional(nn.Module):
    """One weight, read twice: by a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        return F.linear(h, self.inner.weight, self.inner.bias)


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transpose; each half has its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(3, 7)
        self.down, self.up = parameter(3), parameter(7)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(F.linear(x, self.weight, self.down))
        return F.linear(code, self.weight.t(), self.up)


class Siamese(nn.Module):
    """One net on both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.net(a) - self.net(b)).square()


class Aliases(nn.Module):
    """One module under two names, and one parameter under two."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class AliasOnce(nn.Module):
    """Two names, one use: through the second name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(x)
        return y


class SharedBias(nn.Module):
    """Two weights, one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = parameter(4, 6), parameter(4, 4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.first, self.bias)), self.second, self.bias)


class TwoBiases(nn.Module):
    """One weight, two biases: two parameter sets claim the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first, self.second = parameter(4, 4), parameter(4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.first)), self.weight, self.second)


class Residual(nn.Module):
    """An intermediate with two readers between the product and the bias: not one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameter(4, 4), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        return torch.tanh(h + self.bias) * h


def batch(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape),)


CASES = (
    Case("mlp", mlp, lambda: batch(5, 6), (linear("0"), linear("2", bias=False), linear("4")), "categorical"),
    Case(
        "spellings",
        Spellings,
        lambda: batch(7, 5),
        tuple(("linear", (f"w{n}", f"b{n}"), 1) for n in range(8)),
    ),
    Case(
        "rare_products",
        RareProducts,
        lambda: batch(5, 3, 4),
        (
            *(("linear", (name,), 1) for name in ("first", "second", "third", "fourth")),
            ("linear", ("fifth", "bias"), 1),
            *(("scale_and_shift", (name,), 1) for name in ("mix", "size")),
        ),
    ),
    Case(
        "batched",
        Batched,
        lambda: batch(3, 5, 6),
        (("linear", ("w0", "b0"), 1), ("linear", ("w1",), 1), ("linear", ("w2",), 1)),
    ),
    Case("shared_module", SharedModule, lambda: batch(5, 4), (linear("inner", 3), linear("head"))),
    Case("shared_functional", SharedFunctional, lambda: batch(5, 4), (linear("inner", 2),)),
    Case(
        "tied_autoencoder",
        TiedAutoencoder,
        lambda: batch(5, 7),
        (("linear", ("weight",), 2), ("linear", ("down",), 1), ("linear", ("up",), 1)),
        "multi_bernoulli",
    ),
    Case("siamese", Siamese, lambda: (*batch(5, 5), *batch(5, 5)), (linear("net.0", 2), linear("net.2", 2))),
    Case(
        "aliases",
        Aliases,
        lambda: batch(5, 4),
        (("linear", ("a.weight",), 3), ("linear", ("a.bias",), 2), ("linear", ("c.bias",), 1)),
    ),
    Case("alias_once", AliasOnce, lambda: batch(5, 4), (linear("a"),)),
    Case(
        "shared_bias",
        SharedBias,
        lambda: batch(5, 6),
        (("linear", ("first",), 1), ("linear", ("second",), 1), ("linear", ("bias",), 2)),
    ),
    Case(
        "two_biases",
        TwoBiases,
        lambda: batch(5, 4),
        (("linear", ("weight",), 2), ("linear", ("first",), 1), ("linear", ("second",), 1)),
    ),
    Case(
        "residual",
        Residual,
        lambda: batch(5, 4),
        (("linear", ("weight",), 1), ("scale_and_shift", ("bias",), 1)),
    ),
)
