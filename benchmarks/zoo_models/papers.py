"""Kinds of models that the libraries do not have: graph networks, neural operators, flows, detectors, and others.

Every model is written here after a public one, shorter, in the spelling of its authors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import kfac_fx

from .entry import CLASSES, LENGTH, VOCABULARY, Call, Entry, classes, floats, images, keywords, tokens

NODES = 6  # of a graph
WIDTH = 8


def load() -> None:
    """These models need torch alone."""


# --- graphs -----------------------------------------------------------------------------------------------------------


def ring(graphs: int) -> Tensor:
    """The edges [2, edges] of graphs whose nodes are rings with a chord each."""
    first = torch.arange(graphs)[:, None] * NODES
    here = torch.arange(NODES)
    source, target = torch.cat([here, here, here[:1]]), torch.cat([(here + 1) % NODES, (here - 1) % NODES, here[3:4]])
    return torch.stack([(source + first).flatten(), (target + first).flatten()])


def adjacency(graphs: int) -> Tensor:
    edges, size = ring(graphs), graphs * NODES
    loops = torch.arange(size).expand(2, -1)
    both = torch.cat([edges, loops], 1)
    degree = torch.bincount(both[1], minlength=size).float()
    return torch.sparse_coo_tensor(both.flip(0), (degree[both[0]] * degree[both[1]]).rsqrt(), (size, size)).coalesce()


def graph_of(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """(features of nodes, edges, graph of every node)."""
    return torch.randn(batch * NODES, 5), ring(batch), torch.arange(batch).repeat_interleave(NODES)


class GCN(nn.Module):
    """Kipf & Welling 2017, pygcn: a product with a sparse adjacency, an input that is dropped out."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(5, WIDTH) / 5**0.5), nn.Parameter(torch.zeros(WIDTH))
        self.w2, self.b2 = nn.Parameter(torch.randn(WIDTH, 3) / WIDTH**0.5), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(torch.spmm(adj, torch.mm(x, self.w1)) + self.b1)
        x = F.dropout(x, 0.5, training=self.training)
        return F.log_softmax(torch.spmm(adj, torch.mm(x, self.w2)) + self.b2, dim=1)


class GATLayer(nn.Module):
    """Veličković et al. 2018, with a softmax over the edges of every node."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.lin = heads, nn.Linear(inputs, heads * outputs, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, outputs) / outputs)
        self.att_dst = nn.Parameter(torch.randn(1, heads, outputs) / outputs)
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.lin(x).view(len(x), self.heads, -1)
        alpha = F.leaky_relu((h * self.att_src).sum(-1)[source] + (h * self.att_dst).sum(-1)[target], 0.2)
        alpha = (alpha - alpha.max()).exp()
        total = torch.zeros(len(x), self.heads).index_add_(0, target, alpha)
        alpha = alpha / (total[target] + 1e-16)
        out = torch.zeros_like(h).index_add_(0, target, h[source] * alpha[..., None])
        return out.flatten(1) + self.bias


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GATLayer(5, WIDTH, 2), GATLayer(2 * WIDTH, 3, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.conv2(F.elu(self.conv1(x, edges)), edges)
        return out


class GIN(nn.Module):
    """Xu et al. 2019: sums over neighbors, a learned epsilon, and a sum over every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(i, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for i in (5, WIDTH)
        )
        self.eps = nn.Parameter(torch.zeros(2))
        self.lin = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, size: Tensor) -> Tensor:
        pooled = []
        for layer, mlp in enumerate(self.mlps):
            around = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = mlp((1 + self.eps[layer]) * x + around)
            pooled.append(x.new_zeros(size.shape[0], WIDTH).index_add(0, graph, x))
        out: Tensor = self.lin(torch.cat(pooled, 1))
        return out


class SchNet(nn.Module):
    """Schütt et al. 2017: filters of distances; forces are derivatives of the energy."""

    def __init__(self, atoms: int = 4, gaussians: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.register_buffer("offset", torch.linspace(0, 3, gaussians))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(gaussians, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH)) for _ in range(layers)
        )
        self.lin1 = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.lin2 = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH // 2), nn.Softplus(), nn.Linear(WIDTH // 2, 1))

    def forward(self, z: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        distance = ((pos[:, :, None] - pos[:, None]) ** 2).sum(-1).add(1e-6).sqrt()
        smeared = torch.exp(-2 * (distance[..., None] - self.offset) ** 2)
        cut = 0.5 * (torch.cos(distance * math.pi / 3) + 1) * (distance < 3) * (1 - torch.eye(z.shape[1]))
        h = self.embedding(z)
        for filters, lin1, lin2 in zip(self.filters, self.lin1, self.lin2, strict=True):
            weight = filters(smeared) * cut[..., None]
            h = h + lin2(F.softplus((weight * lin1(h)[:, None]).sum(2)))
        energy = self.out(h).sum((1, 2))
        (force,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return energy[:, None], -force


class EGNN(nn.Module):
    """Satorras et al. 2021: messages from distances, which move the places, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1, 16), nn.SiLU(), nn.Linear(16, WIDTH), nn.SiLU())
        self.gate = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())
        self.move = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, places: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edges
        h = self.inside(x)
        for _ in range(2):
            between = places[target] - places[source]
            m = self.edge(torch.cat([h[target], h[source], between.square().sum(-1, keepdim=True)], -1))
            m = m * self.gate(m)
            places = torch.index_add(
                places, 0, target, between / (between.norm(dim=-1, keepdim=True) + 1) * self.move(m)
            )
            h = h + self.node(torch.cat([h, torch.zeros_like(h).index_add(0, target, m)], -1))
        return self.head(h), places


class MPNN(nn.Module):
    """Gilmer et al. 2017: messages along edges, a cell that is shared over the steps, a readout of every graph."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.steps, self.embed = steps, nn.Linear(5, WIDTH)
        self.message = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.update, self.readout = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, size: Tensor) -> Tensor:
        h = torch.relu(self.embed(x))
        source, target = edges
        length = (x[source] - x[target]).norm(dim=1, keepdim=True)
        for _ in range(self.steps):
            messages = self.message(torch.cat([h[source], h[target], length], 1))
            h = self.update(torch.zeros(len(h), WIDTH).index_add(0, target, messages), h)
        out: Tensor = self.readout(torch.zeros(len(size), WIDTH).index_add(0, graph, h) / NODES)
        return out


class PointNet(nn.Module):
    """Qi et al. 2017: a network that aligns the points, shared layers, and a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.align_out = nn.Linear(WIDTH, 9)
        self.shared = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, 16, 1))
        self.head = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.align_out(self.align(x).max(2)[0]).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        out: Tensor = self.head(self.shared(x).max(2)[0])
        return out


# --- operators and fields ---------------------------------------------------------------------------------------------


class SpectralConv2d(nn.Module):
    """Li et al. 2021: complex weights of the lowest modes, of both signs."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights1 = nn.Parameter(torch.rand(width, width, modes, modes, dtype=torch.cfloat) / width**2)
        self.weights2 = nn.Parameter(torch.rand(width, width, modes, modes, dtype=torch.cfloat) / width**2)

    def forward(self, x: Tensor) -> Tensor:
        m, x_ft = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(x_ft)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :m, :m], self.weights1)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, -m:, :m], self.weights2)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO2d(nn.Module):
    def __init__(self, width: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.p = nn.Linear(3, width)
        self.convs = nn.ModuleList(SpectralConv2d(width, modes) for _ in range(2))
        self.ws = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))
        self.q = nn.Sequential(nn.Conv2d(width, WIDTH, 1), nn.GELU(), nn.Conv2d(WIDTH, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        across = torch.linspace(0, 1, x.shape[1]).view(1, -1, 1, 1).expand(len(x), -1, x.shape[2], 1)
        along = torch.linspace(0, 1, x.shape[2]).view(1, 1, -1, 1).expand(len(x), x.shape[1], -1, 1)
        x = self.p(torch.cat([x, across, along], -1)).permute(0, 3, 1, 2)
        for conv, w in zip(self.convs, self.ws, strict=True):
            x = F.gelu(conv(x) + w(x))
        out: Tensor = self.q(x).permute(0, 2, 3, 1)
        return out


class DeepONet(nn.Module):
    """Lu et al. 2021: a network of the function, one of the places, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, WIDTH), nn.Tanh())
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        out: Tensor = torch.einsum("bi,ni->bn", self.branch(u), self.trunk(y[0])) + self.b
        return out


class NeRF(nn.Module):
    """Mildenhall et al. 2020: a field of frequencies, skipped to its middle, and a color along every ray."""

    def __init__(self, frequencies: int = 3) -> None:
        super().__init__()
        inside = 3 + 6 * frequencies
        self.frequencies = 2.0 ** torch.arange(frequencies)
        self.first, self.second = nn.Linear(inside, 16), nn.Linear(16 + inside, 16)
        self.density, self.feature = nn.Linear(16, 1), nn.Linear(16, 16)
        self.view, self.color = nn.Linear(16 + 3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        depth = torch.linspace(2, 6, 7)
        points = origins[:, None] + directions[:, None] * depth[:, None]
        scaled = (points[..., None] * self.frequencies).flatten(-2)
        encoded = torch.cat([points, scaled.sin(), scaled.cos()], -1)
        h = F.relu(self.second(torch.cat([F.relu(self.first(encoded)), encoded], -1)))
        sigma = F.relu(self.density(h))[..., 0]
        seen = torch.cat([self.feature(h), directions[:, None].expand(-1, len(depth), -1)], -1)
        rgb = torch.sigmoid(self.color(F.relu(self.view(seen))))
        alpha = 1 - torch.exp(-sigma * 0.5)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * passed)[..., None] * rgb).sum(1)


class NeuralODE(nn.Module):
    """Chen et al. 2018: one field, four evaluations a step, the time as an input."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)

    def field(self, t: float, y: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.stem(x), 1 / self.steps
        for n in range(self.steps):
            k1 = self.field(n * h, y)
            k2 = self.field(n * h + h / 2, y + h / 2 * k1)
            k3 = self.field(n * h + h / 2, y + h / 2 * k2)
            k4 = self.field(n * h + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        out: Tensor = self.head(y)
        return out


class DEQ(nn.Module):
    """Bai et al. 2019: a fixed point without gradients, and one step through it with them."""

    def __init__(self, iterations: int = 8) -> None:
        super().__init__()
        self.iterations = iterations
        self.inject, self.weight = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.weight(z) + self.inject(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        z = x.new_zeros(x.shape[0], WIDTH)
        with torch.no_grad():
            for _ in range(self.iterations):
                z = self.step(z, x)
        out: Tensor = self.head(self.step(z.detach(), x))
        return out


class ImplicitDEQ(DEQ):
    """Bai et al. 2019, as their tutorial: Anderson's method, and a hook that solves for the gradient by it, too."""

    def solve(self, f: Callable[[Tensor], Tensor], x: Tensor, memory: int = 3) -> Tensor:
        cases, width = x.shape
        points, values = x.new_zeros(cases, memory, width), x.new_zeros(cases, memory, width)
        points[:, 0], values[:, 0] = x, f(x)
        points[:, 1], values[:, 1] = values[:, 0], f(values[:, 0])
        normal, target = x.new_zeros(cases, memory + 1, memory + 1), x.new_zeros(cases, memory + 1, 1)
        normal[:, 0, 1:] = normal[:, 1:, 0] = target[:, 0] = 1
        for k in range(2, self.iterations):
            n = min(k, memory)
            gap = values[:, :n] - points[:, :n]
            normal[:, 1 : n + 1, 1 : n + 1] = torch.bmm(gap, gap.mT) + 1e-4 * torch.eye(n)
            weights = torch.linalg.solve(normal[:, : n + 1, : n + 1], target[:, : n + 1])[:, 1 : n + 1].mT
            points[:, k % memory] = torch.bmm(weights, values[:, :n])[:, 0]
            values[:, k % memory] = f(points[:, k % memory].clone())
        return values[:, (self.iterations - 1) % memory].clone()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.solve(lambda z: self.step(z, x), x.new_zeros(x.shape[0], WIDTH))
        z = self.step(z, x)
        at = z.detach().requires_grad_()
        value = self.step(at, x)
        if z.requires_grad:
            z.register_hook(
                lambda y: self.solve(lambda g: torch.autograd.grad(value, at, g, retain_graph=True)[0] + y, y)
            )
        out: Tensor = self.head(z)
        return out


class FactorizedFNO(nn.Module):
    """Tran et al. 2023: one axis after the other, with the parts of complex weights in real parameters."""

    def __init__(self, width: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.lift = modes, nn.Linear(2, width)
        self.weights = nn.ParameterList(torch.randn(width, width, modes, 2) / width for _ in range(2))
        self.mlp, self.head = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width)), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, m = self.lift(x).permute(0, 3, 1, 2), self.modes
        along, across = map(torch.view_as_complex, self.weights)
        f = torch.fft.rfft(h, norm="ortho")
        low = torch.zeros_like(f)
        low[..., :m] = torch.einsum("bixy,ioy->boxy", f[..., :m], along)
        g = torch.fft.rfft(h, dim=-2, norm="ortho")
        deep = torch.zeros_like(g)
        deep[:, :, :m] = torch.einsum("bixy,iox->boxy", g[:, :, :m], across)
        y = torch.fft.irfft(low, n=h.shape[-1], norm="ortho") + torch.fft.irfft(
            deep, n=h.shape[-2], dim=-2, norm="ortho"
        )
        out: Tensor = self.head((h + self.mlp(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return out


class Hyena(nn.Module):
    """Poli et al. 2023: a long filter that a network of positions makes, by the FFT, and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inside = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.filter = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, WIDTH, bias=False))
        self.bias, self.outside = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        u = self.short(self.inside(self.embedding(ids)).transpose(1, 2))[..., :length]
        v, first, second = u.chunk(3, 1)
        t = torch.linspace(0, 1, length)[:, None]
        h = (self.filter(torch.cat([t, torch.sin(6 * t), torch.cos(6 * t)], 1)) * torch.exp(-3 * t)).T
        v = v * first
        spectrum = torch.fft.rfft(v, n=2 * length) * torch.fft.rfft(h, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + v * self.bias[:, None]
        out: Tensor = self.head(self.outside((y * second).transpose(1, 2)))
        return out


# --- generators, flows and codes --------------------------------------------------------------------------------------


class DCGAN(nn.Module):
    """Radford et al. 2016: generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 1, 4, bias=False),
        )  # fmt: skip

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(z[:, :, None, None])
        return self.discriminator(real).view(-1, 1), self.discriminator(fake).view(-1, 1)


class ModulatedConv2d(nn.Module):
    """Karras et al. 2020: a convolution whose weights every image scales and normalizes."""

    def __init__(self, inputs: int, outputs: int, kernel: int, demodulate: bool = True) -> None:
        super().__init__()
        self.demodulate, self.padding = demodulate, kernel // 2
        self.weight = nn.Parameter(torch.randn(1, outputs, inputs, kernel, kernel))
        self.scale = 1 / math.sqrt(inputs * kernel**2)
        self.modulation = nn.Linear(WIDTH, inputs)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        weight = self.scale * self.weight * (self.modulation(style) + 1).view(batch, 1, channels, 1, 1)
        if self.demodulate:
            weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        weight = weight.view(-1, channels, *weight.shape[3:])
        out = F.conv2d(x.reshape(1, batch * channels, height, width), weight, padding=self.padding, groups=batch)
        return out.view(batch, -1, height, width)


class StyleGAN2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH))
        self.constant = nn.Parameter(torch.randn(1, 4, 4, 4))
        self.conv1, self.conv2 = ModulatedConv2d(4, 6, 3), ModulatedConv2d(6, 4, 3)
        self.noise = nn.Parameter(torch.zeros(2))
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(4))
        self.to_rgb = ModulatedConv2d(4, 3, 1, demodulate=False)

    def forward(self, z: Tensor) -> Tensor:
        style = self.mapping(z * torch.rsqrt(z.pow(2).mean(1, keepdim=True) + 1e-8))
        x = self.conv1(self.constant.repeat(z.shape[0], 1, 1, 1), style)
        x = F.leaky_relu(x + self.noise[0] * torch.randn_like(x[:, :1]) + self.bias1.view(1, -1, 1, 1), 0.2)
        x = self.conv2(F.interpolate(x, scale_factor=2, mode="bilinear"), style)
        x = F.leaky_relu(x + self.noise[1] * torch.randn_like(x[:, :1]) + self.bias2.view(1, -1, 1, 1), 0.2)
        out: Tensor = self.to_rgb(x, style)
        return out


class RealNVP(nn.Module):
    """Dinh et al. 2017: coupled halves, and the logarithm of the determinant."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]] * (layers // 2)))
        self.s = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 4), nn.Tanh()) for _ in range(layers)
        )
        self.t = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 4)) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            kept = self.mask[i] * z
            s, t = self.s[i](kept) * (1 - self.mask[i]), self.t[i](kept) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + kept
            log_det = log_det - s.sum(1)
        return z, log_det[:, None]


class Glow(nn.Module):
    """Kingma & Dhariwal 2018: actnorm, an invertible convolution, and a coupling."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.loc = nn.ParameterList(nn.Parameter(torch.zeros(1, channels, 1, 1)) for _ in range(2))
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1, 1)) for _ in range(2))
        self.weight = nn.ParameterList(torch.linalg.qr(torch.randn(channels, channels))[0] for _ in range(2))
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels // 2, WIDTH, 3, padding=1), nn.ReLU(),
                nn.Conv2d(WIDTH, WIDTH, 1), nn.ReLU(), nn.Conv2d(WIDTH, channels, 3, padding=1),
            )
            for _ in range(2)
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pixels, log_det = x.shape[2] * x.shape[3], x.new_zeros(x.shape[0])
        for loc, scale, weight, net in zip(self.loc, self.scale, self.weight, self.nets, strict=True):
            x = scale * (x + loc)
            log_det = log_det + pixels * scale.abs().log().sum()
            x = F.conv2d(x, weight[:, :, None, None])
            log_det = log_det + pixels * torch.slogdet(weight)[1]
            kept, moved = x.chunk(2, 1)
            log_s, t = net(kept).chunk(2, 1)
            s = torch.sigmoid(log_s + 2)
            x = torch.cat([kept, (moved + t) * s], 1)
            log_det = log_det + s.log().sum((1, 2, 3))
        return x, log_det[:, None]


class VQVAE(nn.Module):
    """van den Oord et al. 2017: the nearest code, with the gradient of the encoder's output."""

    def __init__(self, codes: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, 4, 3, padding=1))
        self.codebook = nn.Embedding(codes, 4)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, WIDTH, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 4)
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.weight.t()
        nearest = (distance + self.codebook.weight.pow(2).sum(1)).argmin(1)
        quantized = self.codebook(nearest).view(z.shape)
        straight = z + (quantized - z).detach()
        return self.decoder(straight.permute(0, 3, 1, 2)), quantized - z.detach(), z - quantized.detach()


# --- detection --------------------------------------------------------------------------------------------------------


class CenterNet(nn.Module):
    """Zhou et al. 2019: maps of centers, sizes and offsets, on deconvolutions of a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.Conv2d(WIDTH, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        )  # fmt: skip
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True)
        )
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(True), nn.Conv2d(WIDTH, size, 1))
                for name, size in (("hm", 4), ("wh", 2), ("reg", 2))
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.up(self.down(x))
        return {name: head(features) for name, head in self.heads.items()}


class DETR(nn.Module):
    """Carion et al. 2020, in the fifty lines of its appendix: learned queries, and positions of rows and columns."""

    def __init__(self, queries: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.conv = nn.Conv2d(16, WIDTH, 1)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, dim_feedforward=16, dropout=0.0)
        self.linear_class, self.linear_bbox = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)
        self.query_pos = nn.Parameter(torch.rand(queries, WIDTH))
        self.row_embed = nn.Parameter(torch.rand(10, WIDTH // 2))
        self.col_embed = nn.Parameter(torch.rand(10, WIDTH // 2))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(self.backbone(inputs))
        height, width = h.shape[-2:]
        pos = torch.cat(
            [
                self.col_embed[:width].unsqueeze(0).repeat(height, 1, 1),
                self.row_embed[:height].unsqueeze(1).repeat(1, width, 1),
            ],
            dim=-1,
        ).flatten(0, 1).unsqueeze(1)  # fmt: skip
        queries = self.query_pos.unsqueeze(1).repeat(1, inputs.shape[0], 1)
        h = self.transformer(pos + 0.1 * h.flatten(2).permute(2, 0, 1), queries).transpose(0, 1)
        return self.linear_class(h), self.linear_bbox(h).sigmoid()


# --- networks of networks ---------------------------------------------------------------------------------------------


class MAML(nn.Module):
    """Finn et al. 2017: a step on the support inside of forward, and the logits of the query."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr, self.net = lr, nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        parameters = dict(self.net.named_parameters())
        loss = F.cross_entropy(functional_call(self.net, parameters, (support,)), labels)
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        fast = {name: p - self.lr * g for (name, p), g in zip(parameters.items(), grads, strict=True)}
        out: Tensor = functional_call(self.net, fast, (query,))
        return out


class HyperNetwork(nn.Module):
    """Ha et al. 2017: an embedding of a layer makes the weights of its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(2, 4))
        self.w2, self.b2 = nn.Parameter(torch.randn(4, WIDTH * 4) / 2), nn.Parameter(torch.zeros(WIDTH * 4))
        self.w1, self.b1 = nn.Parameter(torch.randn(4, WIDTH * 9) / 2), nn.Parameter(torch.zeros(WIDTH * 9))
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, CLASSES)

    def kernel(self, z: Tensor) -> Tensor:
        inside = (z @ self.w2 + self.b2).view(WIDTH, 4)
        return (inside @ self.w1 + self.b1).view(WIDTH, WIDTH, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for z in self.z:
            x = x + F.relu(F.conv2d(x, self.kernel(z), padding=1))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class HoulsbyAdapters(nn.Module):
    """Houlsby et al. 2019: bottlenecks behind the parts of a frozen encoder; norms and head train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2), nn.GELU(), nn.Linear(2, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = self.attention(x, x, x, need_weights=False)[0]
        x = self.norms[0](x + h + self.adapters[0](h))
        h = self.mlp(x)
        x = self.norms[1](x + h + self.adapters[1](h))
        out: Tensor = self.head(x[:, 0])
        return out


class BranchyNet(nn.Module):
    """Teerapittayanon et al. 2016: an exit behind every stage; all of them train."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, WIDTH, 12, 16)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in zip(sizes, sizes[1:], strict=False)
        )
        self.exits = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(o, CLASSES)) for o in sizes[1:]
        )

    def forward(self, x: Tensor, threshold: float = 0.0) -> list[Tensor]:
        logits = []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            x = stage(x)
            logits.append(leave(x))
            if not self.training and bool((logits[-1].softmax(1).max(1)[0] > threshold).all()):
                break
        return logits


class DLRM(nn.Module):
    """Naumov et al. 2019: bags of ids, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(4 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(table(sparse[:, n]) for n, table in enumerate(self.tables))], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        out: Tensor = self.top(torch.cat([x, products[:, rows, columns]], 1))
        return out


class KAN(nn.Module):
    """Liu et al. 2024, as efficient-kan: splines of every input next to a linear layer."""

    def __init__(self, sizes: tuple[int, ...] = (5, WIDTH, 3), grid: int = 4, order: int = 3) -> None:
        super().__init__()
        self.order = order
        step = 2 / grid
        self.register_buffer("grid", torch.arange(-order, grid + order + 1) * step - 1)
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.base = nn.ParameterList(torch.randn(o, i) / i**0.5 for i, o in pairs)
        self.spline = nn.ParameterList(torch.randn(o, i, grid + order) / i for i, o in pairs)
        self.scaler = nn.ParameterList(torch.ones(o, i) for i, o in pairs)

    def splines(self, x: Tensor) -> Tensor:
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * bases[..., :-1]
            bases = left + (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
        return bases

    def forward(self, x: Tensor) -> Tensor:
        for base, spline, scaler in zip(self.base, self.spline, self.scaler, strict=True):
            weight = (spline * scaler.unsqueeze(-1)).view(len(spline), -1)
            x = F.linear(F.silu(x), base) + F.linear(self.splines(torch.tanh(x)).flatten(1), weight)
        return x


class CapsNet(nn.Module):
    """Sabour et al. 2017: a matrix for every pair of capsules, and three rounds of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, WIDTH, 3, 2), nn.Conv2d(WIDTH, WIDTH, 3, 2)
        self.W = nn.Parameter(0.1 * torch.randn(1, 8, CLASSES, 6, 4))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        return norm**2 / (1 + norm**2) * x / (norm + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.squash(self.primary(F.relu(self.conv(x))).view(x.size(0), -1, 4)[:, :8])
        votes = torch.matmul(self.W, u[:, :, None, :, None]).squeeze(-1)
        apart, b = votes.detach(), votes.new_zeros(*votes.shape[:3], 1)
        for _ in range(2):
            v = self.squash((b.softmax(2) * apart).sum(1, keepdim=True))
            b = b + (apart * v).sum(-1, keepdim=True)
        return self.squash((b.softmax(2) * votes).sum(1)).norm(dim=-1)


class MUTAN(nn.Module):
    """Ben-younes et al. 2017: products of two inputs by a core tensor of low rank, each in one equation."""

    def __init__(self, rank: int = 3, inside: int = 5) -> None:
        super().__init__()
        self.question, self.image = nn.Parameter(torch.randn(6, inside) / 3), nn.Parameter(torch.randn(7, inside) / 3)
        self.core = nn.Parameter(torch.randn(rank, inside, WIDTH) / 3)
        self.other = nn.Parameter(torch.randn(rank, inside, WIDTH) / 3)
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, question: Tensor, image: Tensor) -> Tensor:
        q = torch.einsum("bi,id,rdo->bro", question, self.question, self.core)
        v = torch.einsum("bi,id,rdo,o->bro", image, self.image, self.other, self.scale)
        out: Tensor = self.head(torch.tanh(q * v).sum(1))
        return out


class GCNN(nn.Module):
    """Cohen & Welling 2016: a filter in all four directions, and a maximum over these."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 2, 3, 3) / 4), nn.Parameter(torch.zeros(4))
        self.circulant, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.stack([torch.rot90(self.weight, quarter, (2, 3)) for quarter in range(4)], 1)
        y = F.conv2d(x, turned.flatten(0, 1)).unflatten(1, (4, 4)) + self.bias[:, None, None, None]
        pooled = F.relu(y).amax(2).mean((2, 3))
        places = (torch.arange(4)[:, None] - torch.arange(4)) % 4
        out: Tensor = self.head(torch.tanh(pooled @ self.circulant[places]))
        return out


class MaskedLinear(nn.Linear):
    """An output sees inputs of a smaller number, or of the same one."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__(len(inputs), len(outputs))
        self.register_buffer("mask", (outputs[:, None] >= inputs).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


class NAM(nn.Module):
    """Agarwal et al. 2021: a network for every feature, and the sum of all, in one equation a layer."""

    def __init__(self, features: int = 5, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(features, 1, width))
        self.second = nn.Parameter(torch.randn(features, width, width) / 3)
        self.shifts = nn.ParameterList(torch.zeros(features, width) for _ in range(2))
        self.third, self.bias = (
            nn.Parameter(torch.randn(features, width, CLASSES) / 3),
            nn.Parameter(torch.zeros(CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(torch.einsum("bf,fih->bfh", x, self.first) + self.shifts[0])
        y = F.relu(torch.einsum("bfi,fih->bfh", y, self.second) + self.shifts[1])
        return torch.einsum("bfi,fik->bk", y, self.third) + self.bias


class CRF(nn.Module):
    """Lample et al. 2016: the scores of a recurrent network, and the logarithm of a path's probability."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, 6, bidirectional=True, batch_first=True)
        self.emit, self.transitions = nn.Linear(12, tags), nn.Parameter(torch.randn(tags, tags) / 4)
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        emissions = self.emit(self.lstm(self.words(ids))[0])
        scores = emissions.gather(2, tags[..., None])[..., 0]
        path, every = self.start[tags[:, 0]] + scores[:, 0], self.start + emissions[:, 0]
        for t in range(1, ids.shape[1]):
            path = path + self.transitions[tags[:, t - 1], tags[:, t]] + scores[:, t]
            every = torch.logsumexp(every[:, :, None] + self.transitions, 1) + emissions[:, t]
        return (path + self.end[tags[:, -1]] - torch.logsumexp(every + self.end, 1))[:, None]


class MADE(nn.Module):
    """Germain et al. 2015: an autoencoder whose masks let every output see the inputs before it."""

    def __init__(self, inputs: int = 16, width: int = 96) -> None:
        super().__init__()
        places, hidden = torch.arange(1, inputs + 1), torch.arange(width) % (inputs - 1) + 1
        self.net = nn.Sequential(
            MaskedLinear(places, hidden), nn.ReLU(), MaskedLinear(hidden, hidden), nn.ReLU(),
            MaskedLinear(hidden, places - 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class LagrangianNetwork(nn.Module):
    """Cranmer et al. 2020: accelerations from the Hessian of a learned Lagrangian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1))

    def lagrangian(self, q: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([q, v])).squeeze(-1) + (v**2).sum()
        return out

    def acceleration(self, state: Tensor) -> Tensor:
        q, v = state.chunk(2)
        mixed = torch.func.jacrev(torch.func.grad(self.lagrangian, 1))(q, v)
        force = torch.func.grad(self.lagrangian)(q, v) - mixed @ v
        out: Tensor = torch.linalg.solve(torch.func.hessian(self.lagrangian, 1)(q, v), force)
        return out

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(self.acceleration)(states)
        return out


class HMM(nn.Module):
    """Rabiner 1989, trained by gradients: the logarithm of the probability of a sequence, by the forward algorithm."""

    def __init__(self, states: int = 5) -> None:
        super().__init__()
        self.start, self.transitions = nn.Parameter(torch.zeros(states)), nn.Parameter(torch.randn(states, states))
        self.emissions = nn.Parameter(torch.randn(states, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        transitions, emissions = self.transitions.log_softmax(1), self.emissions.log_softmax(1)
        alpha = self.start.log_softmax(0) + emissions[:, ids[:, 0]].T
        for t in range(1, ids.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + transitions, 1) + emissions[:, ids[:, t]].T
        return torch.logsumexp(alpha, 1, keepdim=True)


class HashGrid(nn.Module):
    """Instant NGP, Müller et al. 2022, in the plane: features at hashed corners of grids, interpolated."""

    def __init__(self, levels: int = 3, size: int = 64) -> None:
        super().__init__()
        self.tables, self.size = nn.ModuleList(nn.Embedding(size, 2) for _ in range(levels)), size
        self.register_buffer("corners", torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))
        self.net = nn.Sequential(nn.Linear(2 * levels, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        features = []
        for level, table in enumerate(self.tables):
            place = torch.sigmoid(x) * 4 * 2**level
            low = place.floor().long()
            corners = low[:, None] + self.corners
            found = table((corners[..., 0] ^ (corners[..., 1] * 2654435761)) % self.size)
            inside = (place - low)[:, None]
            weights = torch.where(self.corners.bool(), inside, 1 - inside).prod(-1, keepdim=True)
            features.append((found * weights).sum(1))
        out: Tensor = self.net(torch.cat(features, 1))
        return out


class DeformableConv(nn.Module):
    """Zhu et al. 2019, by sampling: a convolution whose places have learned offsets and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.gates = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(3, 9, 3, padding=1)
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, 3, 3, 3) / 5), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        cases, channels, height, width = x.shape
        offsets, gates = self.offsets(x).view(cases, 9, 2, height, width), torch.sigmoid(self.gates(x))
        y, x_of = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        grid, columns = torch.stack([x_of, y], -1), []
        for k in range(9):
            place = grid + 2 / width * (torch.tensor([k % 3 - 1.0, k // 3 - 1.0]) + offsets[:, k].permute(0, 2, 3, 1))
            columns.append(F.grid_sample(x, place, align_corners=True) * gates[:, k : k + 1])
        patches = torch.stack(columns, 2).view(cases, channels * 9, height * width)
        out: Tensor = self.head(F.relu(self.weight.view(WIDTH, -1) @ patches).mean(2))
        return out


class SetAttention(nn.Module):
    """Set Transformer, Lee et al. 2019: induced points that attend to a set, and that the set attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 3, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))
        self.outputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def attend(self, number: int, query: Tensor, keys: Tensor) -> Tensor:
        h = query + self.blocks[number](query, keys, keys, need_weights=False)[0]
        return h + F.relu(self.outputs[number](h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        induced = self.attend(0, self.points.repeat(len(x), 1, 1), h)
        h = self.attend(1, h, induced)
        out: Tensor = self.head(self.attend(2, self.seed.repeat(len(x), 1, 1), h)[:, 0])
        return out


class ActorCritic(nn.Module):
    """Proximal policy optimization, Schulman et al. 2017: a policy, which is a distribution, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)


# --- the table --------------------------------------------------------------------------------------------------------


def gcn(batch: int) -> Call:
    return (torch.randn(batch * NODES, 5), adjacency(batch)), {}


def gat(batch: int) -> Call:
    return graph_of(batch)[:2], {}


def gin(batch: int) -> Call:
    return (*graph_of(batch), torch.ones(batch)), {}


def egnn(batch: int) -> Call:
    x, edges, _ = graph_of(batch)
    return (x, torch.randn(len(x), 3), edges), {}


def functions_at_places(batch: int) -> Call:
    places = torch.linspace(0, 1, 7)[:, None]
    return (torch.randn(batch, 10), places.expand(batch, -1, -1)), {}


def tasks(batch: int) -> Call:
    return (torch.randn(4, 5), torch.arange(4) % 3, torch.randn(batch, 5)), {}


def distribution_of_log_softmax(outputs: Tensor) -> Any:
    return kfac_fx.losses.Categorical(outputs)


def policy_and_value(outputs: tuple[torch.distributions.Categorical, Tensor]) -> Any:
    return [kfac_fx.losses.Categorical(outputs[0].logits), kfac_fx.losses.Normal(outputs[1])]


def all_exits(outputs: list[Tensor]) -> Any:
    return [kfac_fx.losses.Categorical(logits) for logits in outputs]


Build = Callable[[], nn.Module]
# name: (model, inputs, loss or None)
MODELS: dict[str, tuple[Build, Callable[[int], Call], Any]] = {
    "actor_critic": (ActorCritic, images(5), policy_and_value),
    "branchynet": (BranchyNet, images(3, 16, 16), all_exits),
    "capsnet": (CapsNet, images(1, 12, 12), None),
    "centernet": (CenterNet, images(3, 16, 16), None),
    "crf": (CRF, keywords(ids=tokens(6), tags=classes(4, 6)), None),
    "dcgan": (DCGAN, keywords(z=floats(WIDTH), real=floats(3, 16, 16)), None),
    "deeponet": (DeepONet, functions_at_places, None),
    "deformable_conv": (DeformableConv, images(3, 8, 8), "categorical"),
    "deq": (DEQ, images(5), "categorical"),
    "deq_implicit": (ImplicitDEQ, images(5), "categorical"),
    "detr": (DETR, images(3, 16, 16), None),
    "dlrm": (DLRM, keywords(dense=floats(5), sparse=classes(20, 3, 2)), "bce_with_logits"),
    "egnn": (EGNN, egnn, None),
    "ffno": (FactorizedFNO, images(8, 8, 2), None),
    "fno2d": (lambda: kfac_fx.with_real_parameters(FNO2d()), images(12, 12, 1), None),
    "gat": (GAT, gat, "categorical"),
    "gcn": (GCN, gcn, distribution_of_log_softmax),
    "gcnn": (GCNN, images(2, 9, 9), "categorical"),
    "gin": (GIN, gin, "categorical"),
    "glow": (Glow, images(4, 6, 6), None),
    "hash_grid": (HashGrid, images(2), None),
    "hmm": (HMM, keywords(ids=tokens(5)), None),
    "houlsby_adapters": (HoulsbyAdapters, keywords(ids=tokens()), "categorical"),
    "hyena": (Hyena, keywords(ids=tokens(LENGTH)), "categorical"),
    "hypernetwork": (HyperNetwork, images(3, 8, 8), "categorical"),
    "kan": (KAN, images(5), None),
    "lagrangian": (LagrangianNetwork, images(4), None),
    "made": (MADE, images(16), "bce_with_logits"),
    "maml": (MAML, tasks, "categorical"),
    "mpnn": (MPNN, gin, "categorical"),
    "mutan": (MUTAN, keywords(question=floats(6), image=floats(7)), "categorical"),
    "nam": (NAM, images(5), "categorical"),
    "nerf": (NeRF, keywords(origins=floats(3), directions=floats(3)), None),
    "neural_ode": (NeuralODE, images(5), "categorical"),
    "pointnet": (PointNet, images(3, 20), "categorical"),
    "realnvp": (RealNVP, images(4), None),
    "schnet": (SchNet, keywords(z=classes(10, 4), pos=floats(4, 3)), None),
    "set_transformer": (SetAttention, images(6, 5), "categorical"),
    "stylegan2": (StyleGAN2, images(WIDTH), None),
    "vqvae": (VQVAE, images(3, 8, 8), None),
}  # fmt: skip

ENTRIES = tuple(
    Entry("papers", name, build, call) if loss is None else Entry("papers", name, build, call, loss)
    for name, (build, call, loss) in MODELS.items()
)
