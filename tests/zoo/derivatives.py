"""Networks that are trained through their derivatives by the inputs: differential equations and forces."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import jvp

from kfac_fx import losses
from kfac_fx.compiled.jacobian_products import load_forward_mode

from .case import Case, Expected
from .dense import batch

load_forward_mode()


def network(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))[:-1]


class Network(nn.Module):
    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.net = network(inputs, 5, 5, 1)


class Heat(Network):
    """u_t - u_xx of points (t, x), and u itself at others."""

    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
        inside = inside.detach().requires_grad_()
        u = self.net(inside)
        (first,) = torch.autograd.grad(u, inside, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), inside, create_graph=True)
        return first[:, :1] - second[:, 1:], self.net(border)


class Burgers(Network):
    """The same by forward mode, twice: u u_x - u_xx."""

    def forward(self, x: Tensor) -> Tensor:
        along = torch.zeros_like(x)
        along[:, 0] = 1.0

        def slope(x: Tensor) -> tuple[Tensor, Tensor]:
            value, change = jvp(self.net, (x,), (along,))
            return value, change

        (u, first), (_, second) = jvp(slope, (x,), (along,))
        y: Tensor = u * first - second
        return y


class Forces(nn.Module):
    """The energy of three atoms, from their kinds and distances, and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.net = nn.Embedding(4, 3), network(4, 5, 1)

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places = places.requires_grad_()
        apart = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        h = self.kinds(kinds)
        energy = self.net(torch.cat([h[:, :, None] * h[:, None], 1 / (1 + apart)], -1)).sum((1, 2))
        return energy, -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]


def every_output(outputs: tuple[Tensor, ...]) -> list[losses.Normal]:
    return [losses.Normal(output) for output in outputs]


def apart(weights: tuple[int, ...], biases: tuple[int, ...], prefix: str = "net") -> tuple[Expected, ...]:
    """Derivatives pass the weights of the layers and not their biases: uses of either, layer by layer."""
    found = [("linear", (f"{prefix}.{2 * n}.weight",), uses) for n, uses in enumerate(weights)]
    return (*found, *(("linear", (f"{prefix}.{2 * n}.bias",), uses) for n, uses in enumerate(biases)))


CASES = (
    Case(
        "heat",
        Heat,
        lambda: (torch.randn(4, 2), torch.randn(3, 2)),
        apart((5, 5, 2), (2, 2, 1)),
        every_output,
        rounded=True,
    ),
    Case("burgers", Burgers, lambda: batch(4, 2), apart((3, 4, 3), (1, 1, 1)), rounded=True),
    Case(
        "forces",
        Forces,
        lambda: (torch.randint(4, (4, 3)), torch.randn(4, 3, 3)),
        (("embedding", ("kinds.weight",), 1), *apart((2, 2), (1, 1))),
        every_output,
        rounded=True,
    ),
)
