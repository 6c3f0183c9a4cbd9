"""Gains of normalized weights, wherever their slices lie: the dense Fisher of cases, from autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import kfac_fx
from tests.runtime.squares import dense_fisher, recorded

pytestmark = pytest.mark.usefixtures("float64")

GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"


def signal(*shape: int) -> Tensor:
    return torch.randn(3, *shape, dtype=torch.float64)


MODELS = {
    "linear": (lambda: nn.Linear(4, 6), signal(5, 4), (1, None)),
    "conv": (lambda: nn.Conv1d(4, 6, 3), signal(4, 5), (1, 2, None)),
    "grouped": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2), signal(4, 5, 4), (0, 1, 2, 3)),
    "depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4), signal(4, 5), (0, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, 2), signal(4, 5), (0, 1, 2, None)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(4, 6, 2, 2, groups=2), signal(4, 3, 2), (0, 1, 3)),
    "embedding": (lambda: nn.Embedding(7, 6), torch.tensor([[0, 3, 3], [6, 5, 3], [1, 1, 0]]), (0, 1, None)),
}


@pytest.mark.parametrize(("name", "dim"), [(name, dim) for name, (*_, dims) in MODELS.items() for dim in dims])
def test_the_block_of_a_gain_is_the_dense_fisher(name: str, dim: int | None) -> None:
    make, x, _ = MODELS[name]
    torch.manual_seed(0)
    model = weight_norm(make(), dim=dim)
    block = recorded(model, x, strict=True).blocks[GAIN,]
    assert block.registration.approximation == "full"
    of_layer = "kron_in_diag" if block.registration.layer == "embedding" else "kron"
    assert block.registration.reason == f"its elements multiply slices of another parameter, so not {of_layer!r}"
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_the_direction_of_a_transposed_convolution_has_scaled_inputs() -> None:
    """g / |v| belongs to channels of the input, so A has it and G has not."""
    torch.manual_seed(0)
    model, x = weight_norm(nn.ConvTranspose1d(3, 2, 1, bias=False)), signal(3, 4)
    g, v = (dict(model.named_parameters())[name].detach().flatten(1) for name in (GAIN, DIRECTION))
    block = recorded(model, x, strict=True).blocks[DIRECTION,]
    rows = (x.mT * (g / v.norm(dim=1, keepdim=True)).flatten()).flatten(0, 1)
    torch.testing.assert_close(block.factors["A"].value[0], rows.mT @ rows / len(rows))
    d = 2 * model(x).detach().mT.flatten(0, 1)
    torch.testing.assert_close(block.factors["G"].value[0], d.mT @ d / len(d))


def test_the_direction_of_an_embeddings_entries_has_scaled_gradients() -> None:
    """Every id meets a gradient times its own g / |v|."""
    torch.manual_seed(0)
    model, ids = weight_norm(nn.Embedding(5, 3)), torch.tensor([[0, 3], [4, 3]])
    with torch.no_grad():
        dict(model.named_parameters())[GAIN].mul_(1.7)
    g, v = (dict(model.named_parameters())[name].detach() for name in (GAIN, DIRECTION))
    block = recorded(model, ids, strict=True).blocks[DIRECTION,]
    d = 2 * model(ids).detach() * (g / v.norm(dim=1, keepdim=True))[ids]
    torch.testing.assert_close(block.factors["G"].value[0], d.flatten(0, 1).mT @ d.flatten(0, 1) / 4)


def test_the_direction_of_a_convolution_by_places_has_scaled_inputs() -> None:
    torch.manual_seed(0)
    model, x = weight_norm(nn.Conv1d(2, 3, 2, bias=False), dim=2), signal(2, 4)
    g, v = (dict(model.named_parameters())[name].detach() for name in (GAIN, DIRECTION))
    scale = (g / v.norm(dim=(0, 1), keepdim=True)).flatten()
    patches = (x.unfold(2, 2, 1) * scale).permute(0, 2, 1, 3).reshape(-1, 4)
    block = recorded(model, x, strict=True).blocks[DIRECTION,]
    torch.testing.assert_close(block.factors["A"].value[0], patches.mT @ patches / len(patches))


def test_a_gain_of_some_of_a_layers_outputs_sees_only_these() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = weight_norm(nn.Linear(4, 2, bias=False)), weight_norm(nn.Linear(4, 3, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(x, torch.cat([self.first.weight, self.second.weight])))

    torch.manual_seed(0)
    model, x = Joined(), signal(5, 4)
    estimator = recorded(model, x, strict=True)
    for part in ("first", "second"):
        block = estimator.blocks[f"{part}.{GAIN}",]
        torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_a_multiple_of_a_transposed_convolutions_weight_is_structured() -> None:
    class Scaled(nn.ConvTranspose1d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.conv_transpose1d(x, 0.3 * self.weight, self.bias, 2)

    torch.manual_seed(0)
    model, x = Scaled(3, 2, 2), signal(3, 4)
    (one,) = recorded(model, x, strict=True).blocks.values()
    assert one.registration.parameters == ("weight", "bias")
    assert [use.parameters["weight"].scale for use in one.registration.uses] == [0.3]


def test_padding_is_left_out_of_a_gain() -> None:
    """A batch of two lengths, and each sequence on its own (twice, for torch.export takes a size of 1 as fixed)."""

    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = weight_norm(nn.Linear(4, 3), dim=1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.linear(x + 0 * mask.unsqueeze(-1))
            return y

    torch.manual_seed(0)
    x, mask, key = torch.randn(2, 6, 4), torch.ones(2, 6), (f"linear.{GAIN}",)
    mask[1, 4:] = 0
    net = kfac_fx.compile(Tagged(), (x, mask), loss="normal", padding_mask="mask")

    def squares(x: Tensor, mask: Tensor) -> Tensor:
        moments = net.record((x, mask), {}, mode="empirical", targets=torch.zeros(*x.shape[:2], 3))
        return moments.statistics[key]["per_case"].square().sum(0)

    alone = [squares(x[n : n + 1, :size].repeat(2, 1, 1), torch.ones(2, size)) / 2 for n, size in ((0, 6), (1, 4))]
    torch.testing.assert_close(squares(x, mask), alone[0] + alone[1])
