"""Where TensorFlow's K-FAC goes wrong, and what is right: each test is named after the latter, and tells the defect.

Those of its optimizer are in `tests/whole/test_defects_of_the_optimizer.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LayerCollection, losses
from kfac_fx.compiled.fisher_blocks import EmbeddingKFACFB, FullyConnectedSeriesFB
from kfac_fx.compiled.names import LayerParametersDict
from tests.runtime.collections_of_toys import affine, collection

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def estimated(net: Any, *inputs: Tensor, mode: str = "empirical", targets: Any = None, **options: Any) -> Any:
    est = kfac_fx.FisherEstimator(net, estimation_mode=mode, damping=0.1, **options)
    est.update_covariances(*inputs, targets=targets)
    return est


def compiled(model: nn.Module, x: Tensor, loss: Any = "normal", **options: Any) -> Any:
    return kfac_fx.compile(model, (x,), loss=loss, **options)


# --- estimation -----------------------------------------------------------------------------------------------------


def test_the_exact_gauss_newton_mode_runs_and_knows_its_inner_shape() -> None:
    """`exact_GGN` reads an attribute that no loss has, and the static inner shape of a GGN factor is dynamic."""
    x = torch.randn(4, 3)
    net = compiled(nn.Linear(3, 2), x, "categorical")
    (one,), (other,) = (estimated(net, x, mode=mode).blocks.values() for mode in ("exact", "exact_GGN"))
    torch.testing.assert_close(one.full_fisher_block(), other.full_fisher_block())
    loss = losses.Categorical(x)
    assert isinstance(loss.ggn_factor_inner_shape, torch.Size) and loss.ggn_factor_inner_shape == x.shape


@pytest.mark.parametrize("mode", ["curvature_prop", "exact"])
def test_a_normal_with_a_variance_has_every_fisher_mode_and_can_be_registered(mode: str) -> None:
    """Factor products of a mean and a variance are tuples, which two modes cannot take; its static inner shape is
    [outputs, 2 outputs]; and neither it nor the one-hot loss has a register function."""
    x = torch.randn(5, 2)
    lc = collection(lambda x, w, v: (x @ w, torch.exp(x @ v)), x, w=(2, 3), v=(2, 3))
    lc.register_loss_function(losses.NormalMeanVariance, ("matmul", "exp"), "normal")
    lc.auto_register_layers()
    assert losses.NormalMeanVariance(x, x.exp()).fisher_factor_inner_shape == (5, 4)
    assert all(block.full_fisher_block().isfinite().all() for block in estimated(lc, x, mode=mode).blocks.values())
    other = affine(torch.randn(4, 10))
    other.register_loss_function(losses.OnehotCategorical, "add", "one_hot", targets=torch.eye(5)[:4])
    assert other.total_loss().isfinite()


def test_unequal_batches_of_towers_and_sources_are_all_counted() -> None:
    """Batch sizes are compared along the diagonal of sources and towers only, and towers of other sizes weigh wrong."""

    def each(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x) @ w

    x = torch.randn(7, 3)
    found = []
    for parts in ((slice(0, 2), slice(2, 7)), (slice(0, 7),)):
        lc = collection(lambda x, w, parts=parts: [each(x[part], w) for part in parts], x, w=(3, 2))
        (output,) = (node for node in lc.graph.nodes if node.op == "output")
        for tower, node in enumerate(output.all_input_nodes):
            lc.register_normal_predictive_distribution(node, name="loss", reuse=tower > 0)
        lc.auto_register_layers()
        found.append(estimated(lc, x, mode="exact").blocks[("w",)].full_fisher_block())
    torch.testing.assert_close(*found)


def test_an_error_inside_a_loss_is_its_own_and_an_unknown_mode_is_named() -> None:
    """Every KeyError while gradients are taken is reported as an unknown estimation mode."""

    def broken(outputs: Tensor) -> losses.LossFunction:
        raise KeyError("a bug of the user's")

    x = torch.randn(4, 3)
    with pytest.raises(KeyError, match="a bug of the user's"):
        estimated(compiled(nn.Linear(3, 2), x, broken), x, mode="gradients")
    with pytest.raises(ValueError, match="estimation_mode 'gradient' is none of"):
        kfac_fx.FisherEstimator(compiled(nn.Linear(3, 2), x), estimation_mode="gradient")


@pytest.mark.parametrize("kind", [list, tuple, set, iter])
def test_statistics_of_parameters_take_any_collection_of_variables(kind: Callable[[Any], Any]) -> None:
    """`compute_params_stats` adds the variables to a list, and fails for every other collection of them."""
    x, names = torch.randn(4, 3), ("weight", "bias")
    net = compiled(nn.Linear(3, 2), x, "categorical")
    est = estimated(net, x, mode="exact", variables=kind(names), compute_params_stats=True)
    assert set(est.params_stats) == set(names)


# --- layers ---------------------------------------------------------------------------------------------------------


def test_no_input_of_a_shared_convolution_is_left_out() -> None:
    """A convolution with several uses hands its number of uses on as a flag that subsamples the inputs."""
    x = torch.randn(10, 2, 4, 4)
    lc = collection(lambda x, w: F.conv2d(F.conv2d(x, w), w).sum((2, 3)), x, w=(2, 2, 1, 1))
    lc.register_conv2d_multi("w", None, None, None, ["conv2d", "conv2d_1"])
    lc.register_normal_predictive_distribution("sum_1")
    block = estimated(lc, x, targets=torch.zeros(10, 2)).blocks[("w",)]
    pixels = torch.cat([tensor.movedim(1, -1).reshape(-1, 2) for tensor in (x, F.conv2d(x, lc.parameters["w"]))])
    torch.testing.assert_close(block.factors["A"].value[0], (pixels.mT @ pixels / len(pixels)).detach())
    assert block.factors["positions"].value == 32


def test_uses_along_a_first_dimension_of_time_are_counted_by_it() -> None:
    """The scan takes dimension 1 of [time, batch, ...], the batch, for the number of uses."""
    lc = affine(torch.zeros(7, 4, 10))
    lc.register_normal_predictive_distribution("add")
    (block,) = lc.auto_register_layers(batch_size=4).values()
    assert block.num_uses == 7


def test_an_embedding_with_one_use_is_registered_by_the_scan() -> None:
    """The scan asks for an approximation of several uses, which a single use does not have."""
    lc = collection(lambda x, w: F.embedding(x, w), torch.tensor([0, 2, 1]), w=(5, 3))
    lc.register_normal_predictive_distribution("embedding")
    (block,) = lc.auto_register_layers().values()
    assert type(block) is EmbeddingKFACFB


def test_the_scan_reads_the_geometry_of_every_use() -> None:
    """Dilation is dropped, and of several uses only the first one's geometry is looked at: patches are wrong."""
    x = torch.randn(3, 1, 7, 7)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, dilation=2).sum((2, 3)) + F.conv2d(x, w, stride=2, padding=1).sum((2, 3))

    lc = collection(function, x, w=(2, 1, 3, 3))
    lc.register_normal_predictive_distribution("add")
    lc.auto_register_layers()
    a = estimated(lc, x, targets=torch.zeros(3, 2)).blocks[("w",)].factors["A"].value[0]
    rows = torch.cat([
        F.unfold(x, 3, dilation=2).mT.flatten(0, 1), F.unfold(x, 3, stride=2, padding=1).mT.flatten(0, 1)
    ])  # fmt: skip
    torch.testing.assert_close(a, rows.mT @ rows / len(rows))


@pytest.mark.parametrize(
    ("convolution", "size", "kernel", "strides", "dilations", "locations"),
    [
        (F.conv2d, (9, 8), (3, 3), [1, 1], [2, 3], 5 * 2),
        (F.conv2d, (9, 8), (3, 2), [2, 3], [1, 1], 4 * 3),
        (F.conv3d, (5, 4, 4), (2, 2, 1), [2, 1, 1], [1, 1, 2], 2 * 3 * 4),
        (F.conv1d, (9,), (3,), [2], [2], 3),
    ],
)
def test_locations_are_those_of_the_output(
    convolution: Any, size: Any, kernel: Any, strides: list[int], dilations: list[int], locations: int
) -> None:
    """The number of locations ignores dilation, reads strides of batch and channels that spatial ones lack, and three
    dimensions are refused."""
    x, axes = torch.randn(2, 3, *size), tuple(range(2, 2 + len(size)))
    lc = collection(lambda x, w: convolution(x, w, stride=strides, dilation=dilations).sum(axes), x, w=(2, 3, *kernel))
    lc.register_convolution("w", None, convolution.__name__, strides=strides, dilation_rate=dilations)
    lc.register_normal_predictive_distribution("sum_1")
    assert estimated(lc, x, targets=torch.zeros(2, 2)).blocks[("w",)].factors["positions"].value == locations


def test_uncorrelated_activations_follow_the_weight_s_order_stride_and_roots() -> None:
    """`kron_sua` orders channels and kernel positions unlike the weight, takes every stride for 1 and has no Cholesky
    factor."""
    x = torch.randn(4, 2, 5, 5)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, bias=False), nn.Flatten())
    net = compiled(model, x, approximations={"0": "kron_sua"})
    est = estimated(net, x, targets=torch.zeros(4, 12), compute_cholesky=True)
    est.update_inverses()
    (block,) = est.blocks.values()
    pixels = x.movedim(1, -1).reshape(-1, 2)
    mean, second = pixels.mean(0), pixels.mT @ pixels / len(pixels)
    m = mean.repeat_interleave(4)  # channels first, then the four places of the kernel, as in [out, channel, h, w]
    a = torch.kron(second - torch.outer(mean, mean), torch.eye(4)) + torch.outer(m, m)
    full, positions = block.full_fisher_block(), 2 * 2
    d = torch.autograd.functional.jacobian(lambda y: y.square().sum(), model(x)).view(4, 3, 4).mT.flatten(0, 1)
    torch.testing.assert_close(full, positions * torch.kron(d.mT @ d / len(d), a))
    v = {"0.weight": torch.randn(3, 2, 2, 2)}
    torch.testing.assert_close(est.multiply_cholesky(est.multiply_cholesky(v, transpose=True)), est.multiply(v))


@pytest.mark.parametrize("said", [True, False])
def test_a_masked_kernel_has_its_own_diagonal(said: bool) -> None:
    """A mask of patches is broadcast along the wrong axis where the diagonal of a convolution is computed."""
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    x, patch_mask = torch.randn(4, 3, 4, 4), mask.expand(3, 2, 2).clone()
    if said:
        lc = collection(lambda x, w: F.conv2d(x, w).sum((2, 3)), x, w=(2, 3, 2, 2))
        lc.register_conv2d("w", outputs="conv2d", patch_mask=patch_mask, approx="diagonal")
    else:  # the graph has it
        lc = collection(lambda x, w: F.conv2d(x, w * mask).sum((2, 3)), x, w=(2, 3, 2, 2))
    lc.register_normal_predictive_distribution("sum_1")
    lc.auto_register_layers()
    found = estimated(lc, x, mode="exact").blocks[("w",)].full_fisher_block().diagonal().view(2, 3, 2, 2)
    jacobian = torch.autograd.functional.jacobian(lambda w: F.conv2d(x, w * mask).sum((2, 3)), lc.parameters["w"])
    torch.testing.assert_close(found, 2 * jacobian.square().sum((0, 1)) / 4)
    assert not found[..., 0, 1].any() and found[..., 1, 0].all()


# --- series ---------------------------------------------------------------------------------------------------------


def series(x: Tensor, approximation: str = "kron_series_1") -> LayerCollection:
    """A layer at three times, [time, batch, ...]."""
    lc = collection(lambda x, w: torch.tanh(x @ w).sum(0), x, w=(2, 2))
    lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx=approximation)
    lc.register_normal_predictive_distribution("sum_1")
    return lc


@pytest.mark.parametrize("approximation", ["kron_series_1", "kron_series_2"])
def test_series_take_tensors_with_a_dimension_of_time(approximation: str) -> None:
    """Sizes of series factors are read from dimension 1, which is the batch of [time, batch, ...]."""
    x = torch.randn(3, 5, 2)
    lc = series(x, approximation)
    assert type(lc.fisher_blocks["w"]) is FullyConnectedSeriesFB
    assert estimated(lc, x, targets=torch.zeros(5, 2)).blocks[("w",)].factors["A"].value.shape == (1, 2, 2)


def test_what_alternates_in_time_makes_the_fisher_smaller_and_what_stays_the_same_is_finite() -> None:
    """Eigenvalues lose their sign, so that what alternates counts as what persists; at 1 the weights are 0 / 0."""
    x, grads = torch.randn(2, 5, 2, dtype=torch.float64)
    sizes = []
    for sign in (-1.0, 1.0):
        block = series(torch.zeros(3, 5, 2)).fisher_blocks["w"]
        block.register_inverse()
        inputs = torch.stack([sign**t * x for t in range(3)])
        block.instantiate_factors([[grads.expand(3, 5, 2)]], 1e-9, [inputs], cases=5)
        sizes.append(block.full_fisher_block().trace())
        assert block.multiply_inverse(torch.ones(2, 2, dtype=torch.float64)).isfinite().all()
        assert block.operator.failures == (0, 0)
    assert sizes[0] < sizes[1]


def test_series_have_products_and_transposed_roots_so_damping_adapts_with_them() -> None:
    """`multiply` is impossible for series, so regular momentum with an adapted damping crashes; `multiply_cholesky`
    lacks its `transpose`."""
    x, y = torch.randn(3, 5, 2), torch.zeros(5, 2)
    est = estimated(series(x), x, targets=y, compute_cholesky=True)
    est.update_inverses()
    v = {"w": torch.randn(2, 2)}
    torch.testing.assert_close(est.multiply_cholesky(est.multiply_cholesky(v, transpose=True)), est.multiply(v))
    net = kfac_fx.compile(series(x))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, adapt_damping=True, damping_adaptation_interval=1)
    net(x).square().sum(1).mean().backward()
    optimizer.step(evaluate=lambda: net(x).square().sum(1).mean())
    assert optimizer.predicted_change < 0 and optimizer.rho.isfinite()


# --- the collection -------------------------------------------------------------------------------------------------


def test_reuse_of_a_block_of_another_kind_is_refused() -> None:
    """Only classes are compared: another approximation of one class, or another geometry, passes."""
    lc = affine()
    lc.register_fully_connected(("w", "b"), None, "add", approx="kron")
    with pytest.raises(ValueError, match=r"of type FullyConnectedKFACBasicFB \(kron_in_diag\)"):
        lc.register_fully_connected(("w", "b"), None, "add", approx="kron_in_diag", reuse=True)
    lc = affine(torch.zeros(12, 10))
    lc.register_fully_connected_multi(("w", "b"), None, "add", num_uses=3)
    with pytest.raises(
        ValueError, match=r"kron_indep, num_uses=2\) for \(w, b\), which has .*kron_indep, num_uses=3\)"
    ):
        lc.register_fully_connected_multi(("w", "b"), None, "add", num_uses=2, reuse=True)
    x = torch.randn(4, 3, 5, 5)
    lc = collection(lambda x, w: F.conv2d(x, w).sum((2, 3)) + F.conv2d(x, w, stride=2).sum((2, 3)), x, w=(2, 3, 2, 2))
    lc.register_conv2d("w", strides=1, outputs="conv2d")
    with pytest.raises(ValueError, match=r"strides=\[1, 1\], but the graph's conv2d\(w\) has \[2, 2\]"):
        lc.register_conv2d("w", strides=1, outputs="conv2d_1", reuse=True)


def test_a_key_of_several_parameters_is_deleted_with_all_of_them() -> None:
    """Deleting a tuple from the dictionary of blocks fails halfway."""
    blocks: LayerParametersDict[str] = LayerParametersDict()
    blocks["w", "b"] = "block"
    del blocks["b", "w"]
    blocks["w"] = "another"
    assert list(blocks) == [("w",)]


def test_errors_and_defaults_are_what_is_documented() -> None:
    """A missing key is a KeyError in the text and a ValueError in the code, `reuse` without a name is said to be an
    error and is none, and a decay is .95 and said to be .99."""
    assert issubclass(kfac_fx.ReuseError, KeyError) and issubclass(kfac_fx.ReuseError, ValueError)
    with pytest.raises(ValueError, match="say to which one with name="):
        affine().register_normal_predictive_distribution("add", reuse=True)
    documented = (ROOT / "docs" / "specification.md").read_text(encoding="utf-8")
    for name, option in inspect.signature(kfac_fx.KFAC.__init__).parameters.items():
        for documented_default in re.findall(rf"`{name}=([\d.e-]+)`", documented):
            assert float(documented_default) == option.default


def test_every_name_that_the_documents_and_examples_use_exists() -> None:
    """Examples and documents call functions that were removed."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    used = {name for path in texts for name in re.findall(r"kfac_fx\.(\w+)\(", path.read_text(encoding="utf-8"))}
    assert "compile" in used and [name for name in sorted(used) if not hasattr(kfac_fx, name)] == []
