"""`kron_sua`: from real convolutions to products, against the formula written out over all pixels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ApproximationError, FisherEstimator, RegistrationError
from kfac_fx.passes.approximations import FROM_PIXELS
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.layers import conv as patches
from tests.runtime.collections_of_toys import collection

MADE: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "conv1d": (nn.Conv1d, (9,), {"kernel_size": 3, "stride": 2}),
    "conv2d": (nn.Conv2d, (6, 5), {"kernel_size": (3, 2), "padding": 1, "stride": (1, 2)}),
    "conv3d": (nn.Conv3d, (4, 3, 4), {"kernel_size": 2, "dilation": (2, 1, 1), "bias": False}),
    "grouped conv2d": (nn.Conv2d, (5, 5), {"kernel_size": 3, "groups": 2}),
    "pointwise conv2d": (nn.Conv2d, (3, 3), {"kernel_size": 1, "bias": False}),
}


class Summed(nn.Module):
    """A convolution, and the sum of every channel of what it computes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)).flatten(2).sum(2)


def made(name: str) -> tuple[Summed, Tensor]:
    module, size, options = MADE[name]
    layer: nn.Module = module(4, 6, **options)  # type: ignore[call-arg]
    return Summed(layer).double(), torch.randn(5, 4, *size, dtype=torch.float64) + 1


def estimated(model: nn.Module, x: Tensor, y: Tensor, name: str = "kron_sua", **options: Any) -> FisherEstimator:
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={nn.modules.conv._ConvNd: name}, **options)
    est = FisherEstimator(net, damping=0.3, estimation_mode="empirical", exps=(-1, -0.5), compute_cholesky_inverse=True)
    est.update_covariances(x, targets=y)
    est.update_inverses()
    return est


def by_formula(model: Summed, x: Tensor, y: Tensor, assumed: str = "kron_sua") -> tuple[Tensor, Tensor, Tensor]:
    """(A [g, i, i], G [g, o, o], c): every pixel of the input on its own, every output position for the gradients."""
    layer: Any = model.conv
    out = layer(x)
    (grad,) = torch.autograd.grad(F.mse_loss(torch.tanh(out).flatten(2).sum(2), y, reduction="sum"), out)
    a, g, k = [], [], layer.weight[0, 0].numel()
    for pixels, d in zip(x.flatten(2).chunk(layer.groups, 1), grad.flatten(2).chunk(layer.groups, 1), strict=True):
        rows = torch.stack([case[:, p] for case in pixels for p in range(pixels.shape[2])])
        mean = rows.mean(0) * (assumed != "kron_sua_zero_mean")
        covariance = (rows - mean).mT @ (rows - mean) / len(rows)
        mean = mean * (assumed == "kron_sua")
        m = torch.cat([mean.repeat_interleave(k), torch.ones(int(layer.bias is not None), dtype=x.dtype)])
        side = torch.outer(m, m)
        side[: len(mean) * k, : len(mean) * k] += torch.kron(covariance, torch.eye(k, dtype=x.dtype))
        d = d.mT.flatten(0, 1)
        a.append(side)
        g.append(d.mT @ d / len(d))
    return torch.stack(a), torch.stack(g), torch.tensor(grad[0, 0].numel(), dtype=x.dtype)


WITHOUT_MEAN = [(name, assumed) for name in ("conv2d", "grouped conv2d", "conv3d") for assumed in FROM_PIXELS[1:]]


@pytest.mark.parametrize(("name", "assumed"), [*((name, "kron_sua") for name in MADE), *WITHOUT_MEAN])
def test_every_product_is_that_of_the_formula(name: str, assumed: str) -> None:
    model, x = made(name)
    y = torch.randn(5, 6, dtype=torch.float64)
    est = estimated(model, x, y, assumed)
    (block,) = est.blocks.values()
    assert block.registration.approximation == assumed
    a, g, c = by_formula(model, x, y, assumed)
    full = torch.block_diag(*(c * torch.kron(gs, as_) for gs, as_ in zip(g, a, strict=True)))
    close = {"rtol": 1e-10, "atol": 1e-10 * float(full.abs().max())}
    torch.testing.assert_close(block.full_fisher_block(), full, **close)
    damped = []
    for one_a, one_g in zip(a, g, strict=True):
        pi = ((one_a.trace() / len(one_a)) / (one_g.trace() / len(one_g))).sqrt()
        eyes = torch.eye(len(one_a), dtype=x.dtype), torch.eye(len(one_g), dtype=x.dtype)
        damped.append(c * torch.kron(one_g + (0.3 / c).sqrt() / pi * eyes[1], one_a + pi * (0.3 / c).sqrt() * eyes[0]))
    dense = torch.block_diag(*damped)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    v = block.group.pack(vector).flatten()
    values, vectors = torch.linalg.eigh(dense)
    for product, power in ((est.multiply(vector), 1.0), (est.multiply_inverse(vector), -1.0)):
        wanted = vectors @ (values**power * (vectors.mT @ v))
        torch.testing.assert_close(block.group.pack(product).flatten(), wanted, rtol=1e-10, atol=1e-10)
    half = est.multiply_matpower(-0.5, est.multiply_matpower(-0.5, vector))
    torch.testing.assert_close(half, est.multiply_inverse(vector), rtol=1e-10, atol=1e-10)
    noise = est.multiply_cholesky_inverse(est.multiply_cholesky_inverse(vector), transpose=True)
    torch.testing.assert_close(noise, est.multiply_inverse(vector), rtol=1e-10, atol=1e-10)


def test_a_pointwise_convolution_of_stride_one_has_the_patches_themselves() -> None:
    """One place a patch, so that nothing is left to be assumed."""
    model, x = made("pointwise conv2d")
    y = torch.randn(5, 6, dtype=torch.float64)
    net = kfac_fx.compile(model, (x,), loss="normal")
    exact = FisherEstimator(net, estimation_mode="empirical")
    exact.update_covariances(x, targets=y)
    ours, theirs = (est.blocks[("conv.weight",)].full_fisher_block() for est in (estimated(model, x, y), exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_micro_batches_and_compiled_recordings_are_the_same_batch() -> None:
    model, x = made("conv2d")
    y = torch.randn(5, 6, dtype=torch.float64)
    whole = estimated(model, x, y)
    parts = FisherEstimator(whole.net, damping=0.3, estimation_mode="empirical")
    for part in (slice(0, 2), slice(2, 5)):
        parts.accumulate(
            parts.net.record((x[part],), {}, mode="empirical", targets=y[part], fraction=1.0, generator=None)
        )
    parts.fold()
    for name, factor in whole.blocks["conv.weight", "conv.bias"].factors.items():
        torch.testing.assert_close(parts.blocks["conv.weight", "conv.bias"].factors[name].value, factor.value)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_statistics_and_products_compile_into_one_graph() -> None:
    model, x = made("conv1d")
    y = torch.randn(5, 6, dtype=torch.float64)
    eager, other = estimated(model, x, y), estimated(model, x, y, backend="aot_eager")
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    multiply = torch.compile(other.multiply_inverse, fullgraph=True, backend="eager")
    torch.testing.assert_close(multiply(vector), eager.multiply_inverse(vector))


def test_no_patches_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("conv2d")
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"conv2d": "kron_sua"})

    def refused(*args: Any) -> Tensor:
        raise AssertionError("patches")

    monkeypatch.setattr(patches, "windows", refused)
    moments = net.record((x,), {})
    assert moments.statistics["conv.weight", "conv.bias"]["A"].shape == (1, 5, 5)  # 4 channels and a 1
    with pytest.raises(AssertionError, match="patches"):
        kfac_fx.compile(model, (x,), loss="normal", verify=False, approximations={"conv2d": "diagonal"}).record(
            (x,), {}
        )


@pytest.mark.parametrize(
    ("name", "mean"),
    [("kron_sua", ""), ("kron_sua_zero_mean", " of zero mean"), ("kron_sua_centered", " less their mean")],
)
def test_the_report_says_what_is_assumed(name: str, mean: str) -> None:
    model, x = made("conv2d")
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"conv": name})
    (row,) = net.report.rows
    assert row.block == f"kronecker, uncorrelated places{mean}" and row.factors_text == "A 5 x 5, G 6 x 6"


# --- where there are no pixels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Linear(5, 5), "linear"),
        (nn.Conv2d(4, 8, 3, groups=4), "depthwise_conv2d"),
        (nn.ConvTranspose2d(4, 6, 3), "conv_transpose2d"),
    ],
)
def test_other_layers_refuse(layer: nn.Module, name: str) -> None:
    x = torch.randn(3, 4, 5, 5)
    with pytest.raises(ApproximationError) as failure:
        kfac_fx.compile(Summed(layer), (x,), loss="normal", approximations={"conv": "kron_sua"})
    assert str(failure.value).splitlines() == [
        "approximations that cannot be honored:",
        f"  conv.bias, conv.weight  {name} has no 'kron_sua', but {', '.join(LAYERS[name].approximations)}, generic",
    ]


def test_a_kernel_that_is_a_matrix_elsewhere_has_patches() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight).mean((2, 3)) + F.linear(x.mean((2, 3)), self.weight.flatten(1))

    x = torch.randn(3, 4, 5, 5)
    net = kfac_fx.compile(Shared(), (x,), loss="normal", approximations={"weight": "kron_sua"})
    (one,) = net.registrations
    assert len(one.uses) == 2 and one.approximation == "kron_indep"
    assert re.fullmatch(r"its use as linear at linear \(\S+\) has no pixels, so not 'kron_sua'", one.reason or "")


# --- by hand --------------------------------------------------------------------------------------------------------


def test_a_collection_takes_it_for_convolutions() -> None:
    x = torch.randn(4, 2, 5, 5)
    lc = collection(lambda x, c, b: F.conv2d(x, c, b, stride=2).flatten(2).sum(2), x, c=(3, 2, 3, 3), b=(3,))
    block = lc.register_conv2d(("c", "b"), None, None, "x", "conv2d", approx="kron_sua")
    lc.register_normal_predictive_distribution("sum_1")
    assert type(block).__name__ == "ConvKFCBasicFB"
    est = FisherEstimator(lc, damping=0.1)
    est.update_covariances(x)
    pixels = torch.cat([x.flatten(2).mT.flatten(0, 1), torch.ones(100, 1)], dim=1)
    torch.testing.assert_close(est.blocks["c", "b"].factors["A"].value[0], pixels.mT @ pixels / 100)
    assert est.blocks["c", "b"].factors["positions"].value == 4
    assert [factor.name for factor in lc.get_factors()] == ["G", "A"]


@pytest.mark.parametrize("approx", FROM_PIXELS)
def test_all_uses_of_a_shared_kernel_put_their_pixels_in_one_factor(approx: str) -> None:
    """By hand and compiled: 4 x 25 pixels of the first use, 4 x 16 of the second, and as many positions as outputs."""
    x = torch.randn(4, 2, 5, 5)

    def twice(x: Tensor, c: Tensor) -> Tensor:
        return F.conv2d(torch.tanh(F.conv2d(x, c)), c).flatten(2).sum(2)

    lc = collection(twice, x, c=(2, 2, 2, 2))
    block = lc.register_conv2d_multi("c", outputs=["conv2d", "conv2d_1"], approx=approx)
    lc.register_normal_predictive_distribution("sum_1")
    assert type(block).__name__ == "ConvKFCBasicMultiIndepFB"
    net = kfac_fx.compile(lc.model, (x,), loss="normal", approximations={"c": approx})
    found = []
    for source in (lc, net):
        est = FisherEstimator(source, damping=0.1, estimation_mode="exact")
        est.update_covariances(x)
        found.append(est.blocks["c",])
    pixels = [x, torch.tanh(F.conv2d(x, lc.parameters["c"]))]
    rows = torch.cat(
        [torch.cat([p.flatten(2).mT.flatten(0, 1), torch.ones(4 * p[0, 0].numel(), 1)], 1) for p in pixels]
    )
    torch.testing.assert_close(found[0].factors["A"].value[0], (rows.mT @ rows / len(rows)).detach())
    assert found[0].factors["positions"].value == 16 + 9
    torch.testing.assert_close(found[0].full_fisher_block(), found[1].full_fisher_block())


def test_two_kernels_over_one_input_have_one_factor_of_its_pixels() -> None:
    x = torch.randn(4, 2, 5, 5)

    def both(x: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return F.conv2d(x, c).flatten(2).sum(2) + F.conv2d(x, d).flatten(2).sum(2)

    lc = collection(both, x, c=(3, 2, 3, 3), d=(3, 2, 2, 1))
    lc.set_default_conv2d_approximation("kron_sua")
    for name, node in (("c", "conv2d"), ("d", "conv2d_1")):
        lc.register_conv2d(name, inputs="x", outputs=node)
    assert [len(factor.blocks) for factor in lc.get_factors() if factor.name == "A"] == [2]


def test_a_collection_refuses_it_for_a_transposed_convolution() -> None:
    x = torch.randn(4, 2, 5, 5)
    lc = collection(lambda x, c: F.conv_transpose2d(x, c).flatten(2).sum(2), x, c=(2, 3, 3, 3))
    with pytest.raises(ApproximationError) as failure:
        lc.register_convolution("c", "x", "conv_transpose2d", approx="kron_sua")
    assert str(failure.value) == (
        f"c at conv_transpose2d: conv_transpose2d has no 'kron_sua', but {', '.join(LAYERS['linear'].approximations)}"
    )
    assert not lc.fisher_blocks
    assert issubclass(ApproximationError, ValueError) and not issubclass(ApproximationError, type(RegistrationError))
