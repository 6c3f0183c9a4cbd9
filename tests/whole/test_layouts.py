"""Random numbers are drawn in the order of memory, so a graph must lay tensors out as the model does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import kfac_fx

Function = Callable[[Tensor], Tensor]
SEQUENCE, IMAGE = (4, 6, 8), (3, 4, 5, 6)

# --- layouts of a tensor, and random operations on it -----------------------------------------------------------------


def channels_last(h: Tensor) -> Tensor:
    return h.to(memory_format=torch.channels_last) if h.dim() == 4 else h


def scaled_in_place(h: Tensor) -> Tensor:
    h = h * 1.0
    h[..., 1:].mul_(2.0)
    return h


LAYOUTS: dict[str, Function] = {
    "as it is": lambda h: h,
    "transposed": lambda h: h.transpose(0, 1),
    "turned": lambda h: h.movedim(-1, 1),
    "expanded": lambda h: h.unsqueeze(1).expand(-1, 2, *h.shape[1:]),
    "expanded and turned": lambda h: h.unsqueeze(1).expand(-1, 2, *h.shape[1:]).transpose(1, 2),
    "sliced": lambda h: h[..., ::2],
    "chunked": lambda h: h.chunk(2, 1)[1],
    "channels_last": channels_last,
    "contiguous": lambda h: h.contiguous(),
    "reshaped": lambda h: h.reshape(h.shape[0], -1),
    "in place": scaled_in_place,
}


def drop_path(h: Tensor) -> Tensor:
    return h * torch.rand(h.shape[0], *(1,) * (h.dim() - 1)).round()


def in_place_of(fill: Callable[[Tensor], Tensor]) -> Function:
    return lambda h: h * fill(torch.empty_like(h))


DRAWS: dict[str, Function] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h, 0.5, training=True),
    "dropout in place": lambda h: F.dropout(h * 1.0, 0.5, inplace=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + torch.randn_like(h),
    "randint_like": lambda h: h * torch.randint_like(h, 5),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "normal": lambda h: h + torch.normal(h.detach(), 1.0),
    "gumbel": lambda h: F.gumbel_softmax(h, dim=-1),
    "bernoulli_": in_place_of(lambda noise: noise.bernoulli_(0.5)),
    "normal_": in_place_of(lambda noise: noise.normal_()),
    "uniform_": in_place_of(lambda noise: noise.uniform_()),
    "exponential_": in_place_of(lambda noise: noise.exponential_()),
    "drop path": drop_path,
}

# --- layers that the passes write in another way ----------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Any, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer, self.packed = kind(8, 8, **options), packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            output: Tensor = self.layer(x)[0]
            return output
        lengths = torch.tensor([6, 2, 4, 5])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=7)
        return output


class With(nn.Module):
    """A function of the input and of parameters of these shapes."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return output


def turned(x: Tensor) -> Tensor:
    """The same numbers in memory with the first dimension innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def on_channels_last(layer: nn.Module) -> nn.Module:
    return nn.Sequential(With(lambda x: x.to(memory_format=torch.channels_last)), layer)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True, num_layers=2, dropout=0.5),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True, bidirectional=True),
    "lstm, steps first": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5),
    "lstm, packed": lambda: Recurrent(nn.LSTM, packed=True, batch_first=True, num_layers=2, dropout=0.5),
    "attention": lambda: Attention(batch_first=True, dropout=0.3),
    "attention, positions first": lambda: Attention(dropout=0.3),
    "linear": lambda: nn.Linear(8, 8),
    "weight from left": lambda: With(lambda x, w: (w @ x.mT).mT, (8, 8)),
    "einsum": lambda: With(lambda x, w: torch.einsum("bti,oi->bot", x, w), (8, 8)),
    "table in front": lambda: With(lambda x, w: w + turned(x), (6, 8)),
    "table in front, turned": lambda: With(lambda x, w: w.movedim(0, -1).unsqueeze(0) + turned(x), (8, 6)),
    "table before a product": lambda: With(lambda x, w: w * turned(x), (1, 6, 8)),
    "difference": lambda: With(lambda x, b: b - turned(x), (1, 6, 8)),
    "difference of an expansion": lambda: With(lambda x, b: b.expand(4, 6, 8) - turned(x), (8,)),
    "negative shift": lambda: With(lambda x, b: turned(x) - b, (6, 8)),
    "reversed": lambda: With(lambda x, w: 1 - w * turned(x), (8,)),
    "norm": lambda: nn.Sequential(With(turned), nn.LayerNorm(8)),
    "in place": lambda: nn.Sequential(With(turned), nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "batch norm": lambda: nn.Sequential(With(turned), nn.BatchNorm1d(6)),
    "prelu": lambda: nn.Sequential(With(turned), nn.PReLU(6)),
}
IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: on_channels_last(nn.Conv2d(4, 4, 3, padding=1)),
    "transposed conv": lambda: on_channels_last(nn.ConvTranspose2d(4, 4, 3, padding=1)),
    "conv, bias in front": lambda: on_channels_last(
        With(lambda x, w, b: b + F.conv2d(x, w, padding=1), (4, 4, 3, 3), (1, 4, 5, 6))
    ),
    "batch norm": lambda: on_channels_last(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True))),
    "group norm": lambda: on_channels_last(nn.GroupNorm(2, 4)),
    "instance norm": lambda: on_channels_last(nn.InstanceNorm2d(4, affine=True)),
    "table": lambda: on_channels_last(With(lambda x, w: w + x, (1, 4, 5, 6))),
    "gate": lambda: on_channels_last(With(lambda x, w: w * x, (4, 5, 6))),
}
MODELS = {name: (make, SEQUENCE) for name, make in LAYERS.items()}
MODELS |= {f"images: {name}": (make, IMAGE) for name, make in IMAGE_LAYERS.items()}


Pair = tuple[str, str]  # a random operation and a layout
EVERY_PAIR = [(draw, layout) for draw in DRAWS for layout in LAYOUTS]


class Drawing(nn.Module):
    """Random operations on layouts of what a layer returns."""

    def __init__(self, layer: nn.Module, pairs: Sequence[Pair]) -> None:
        super().__init__()
        self.layer, self.pairs = layer, pairs

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x)
        return {f"{draw}, {layout}": DRAWS[draw](LAYOUTS[layout](h)) for draw, layout in self.pairs}


def other_draws(name: str, pairs: Sequence[Pair]) -> list[str]:
    """The random operations behind the layer of this name whose results differ between the graph and the model."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = Drawing(make(), pairs), torch.randn(shape)
    net = kfac_fx.compile(model, (x,), verify=False)
    assert not net.program.submodules
    torch.manual_seed(1)
    of_graph, _ = net.functional({}, (x,), {})
    torch.manual_seed(1)
    of_model = model(x)
    return [key for key, value in of_model.items() if not torch.allclose(of_graph[key], value, atol=1e-5)]


QUICK = (
    "lstm", "gru", "rnn", "lstm, packed", "attention", "table in front, turned", "difference of an expansion",
    "in place", "images: conv, bias in front", "images: gate",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_graph_draws_the_numbers_of_its_model(name: str) -> None:
    """A dropout, and some other random operations by a seed."""
    assert not other_draws(name, [("dropout", "as it is"), *random.Random(name).sample(EVERY_PAIR, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_random_operation_on_every_layout_draws_the_numbers_of_the_model(name: str) -> None:
    assert not other_draws(name, EVERY_PAIR)


# --- views of what a kernel lays out ----------------------------------------------------------------------------------


class GPTAttention(nn.Module):
    """`contiguous` copies nothing behind a fused kernel, and is needed behind the plain formula of attention."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.table, self.qkv, self.head, self.views = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9), views

    def forward(self, ids: Tensor) -> Tensor:
        cases, places = ids.shape
        q, k, v = (part.view(cases, places, 2, 4).transpose(1, 2) for part in self.qkv(self.table(ids)).split(8, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y.contiguous().view(cases, places, 8) if self.views else y.flatten(2)
        logits: Tensor = self.head(y)
        return logits


def test_views_behind_an_attention_are_those_of_its_plain_formula() -> None:
    products = []
    for views in (True, False):
        torch.manual_seed(0)
        model, ids = GPTAttention(views).double(), torch.randint(9, (5, 6))
        net = kfac_fx.compile(model, (ids,), loss="categorical")
        vector = {name: torch.randn_like(parameter) for name, parameter in net.named_parameters()}
        products.append(net.fisher_product(ids)(vector))
    torch.testing.assert_close(*products)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"momentum_type": "adaptive"}),
        (torch.float32, {"momentum_type": "qmodel", "momentum": None, "damping": 1.0}),
    ],
    ids=["bfloat16", "adaptive", "qmodel"],
)
def test_rules_train_through_views_behind_an_attention(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, ids = GPTAttention(True).to(dtype), torch.randint(9, (8, 6))
    net = kfac_fx.compile(model, (ids,), loss="categorical")
    optimizer, losses = kfac_fx.KFAC(net, **options), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids).flatten(0, 1), (3 * ids + 1).flatten() % 9)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


class Encoder(nn.Module):
    """torch's encoder with a mask that is causal, or not; positions first."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.table, self.head, self.causal = nn.Embedding(9, 8), nn.Linear(8, 9), causal
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64)
        mask = mask if self.causal else mask + mask.T.nan_to_num(neginf=-0.5)
        logits: Tensor = self.head(self.layers(self.table(ids), mask=mask))
        return logits


@pytest.mark.parametrize("causal", [True, False])
def test_an_encoder_of_torch_with_a_mask_is_one_graph(causal: bool) -> None:
    """The encoder reads the values of its mask, which no trace allows: it was captured in parts."""
    torch.manual_seed(0)
    model, ids = Encoder(causal).double(), torch.randint(9, (6, 5))
    net = kfac_fx.compile(model, (ids,), loss="categorical", batch_dim=1)
    assert len(net.program.registrations) == 14 and not net.program.submodules
    other = torch.randint(9, (4, 3))  # other numbers of positions and of sequences
    torch.testing.assert_close(net(other), model(other))
    spectrum = kfac_fx.fit_spectrum(net, [(other, other)], case="sequence").at(scale=0.0, damping=1.0)
    parameters, wanted = list(model.parameters()), []
    for n in range(3):
        loss = F.cross_entropy(model(other[:, n : n + 1]).flatten(0, 1), other[:, n], reduction="sum")
        wanted.append(sum(g.square().sum() for g in torch.autograd.grad(loss, parameters)))  # type: ignore[misc]
    torch.testing.assert_close(spectrum.self_scores((other, other)), torch.stack(wanted))  # type: ignore[arg-type]


class Styled(nn.Module):
    """Reads how its input lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, style: Tensor) -> Tensor:
        return self.layer(style if style.is_contiguous() else style.contiguous()).sum(1)


def test_an_input_that_an_earlier_network_expanded_is_captured_once() -> None:
    """As a generator is given one style for all its layers. A dense copy would be another kind of call."""
    before, net = nn.Linear(5, 8), kfac_fx.compile(Styled(), (torch.randn(4, 6, 8),), loss="normal")
    for _ in range(3):
        net.recorder((before(torch.randn(4, 5)).unsqueeze(1).expand(-1, 6, -1),), {})
    assert len(net.captures.all) == 2
