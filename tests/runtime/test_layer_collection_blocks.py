"""Every class of Fisher block, as a `LayerCollection` makes it, with all of its products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import FisherBlock
from tests.runtime.collections_of_toys import SHAPES, collection, everything

DAMPING = 0.3


@pytest.fixture(scope="module", autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made_first() -> LayerCollection:
    torch.manual_seed(0)
    x = torch.randint(0, 7, (6, 32)).double() / 1.5
    made = collection(everything, x, **SHAPES)
    made.register_conv2d(("c1", "c1b"), 1, 1, None, "conv2d")
    made.register_conv2d("c2", 1, 0, None, "conv2d_1", approx="diagonal")
    made.register_depthwise_conv2d("dw", None, "conv2d_2", approx="kron")
    made.register_conv2d("pw", 1, 0, None, "conv2d_3", approx="kron_sua")
    made.register_convolution("c3", None, "conv1d")
    made.register_fully_connected(("w1", "b1"), None, "add", approx="kron_both_diag")
    made.register_fully_connected("w2", "tanh", "matmul_1", approx="diagonal")
    made.register_scale_and_shift(("scale", "shift"), "matmul_1", "add_1")
    made.register_fully_connected_multi("w3", None, ["matmul_2", "matmul_3"])
    made.register_embedding("emb", None, "embedding")
    made.register_embedding_multi("emb2", None, ["embedding_1", "embedding_2"])
    made.register_generic("g1")
    made.register_generic("g2", approx="full")
    made.register_categorical_predictive_distribution("add_5")
    return estimated(made, x)


def several(x: Tensor, c: Tensor, s: Tensor, dw: Tensor, scale: Tensor, shift: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Kernels, and a matrix, that are used more than once."""
    for kernel in (c, c, s, s):
        x = torch.tanh(F.conv2d(x, kernel, padding=1))
    h = F.conv2d(x, dw, groups=2).mean((2, 3)) * scale + shift
    for _ in range(3):
        h = torch.tanh(torch.matmul(h, w))
    return torch.matmul(h, v)


def made_second() -> LayerCollection:
    torch.manual_seed(0)
    x, shapes = torch.randn(6, 2, 4, 4), {"scale": (4,), "shift": (4,), "w": (4, 4), "v": (4, 3)}
    made = collection(several, x, c=(2, 2, 3, 3), s=(2, 2, 3, 3), dw=(4, 1, 2, 2), **shapes)
    made.register_conv2d_multi("c", outputs=["conv2d", "conv2d_1"])
    made.register_conv2d_multi("s", outputs=["conv2d_2", "conv2d_3"], approx="kron_sua")
    made.register_depthwise_conv2d("dw", None, "conv2d_4")
    made.register_scale_and_shift(("scale", "shift"), "mean", "add", approx="diagonal")
    made.register_fully_connected_multi("w", None, ["matmul", "matmul_1", "matmul_2"], approx="kron_series_2")
    made.register_fully_connected("v", None, "matmul_3")
    made.register_categorical_predictive_distribution("matmul_3")
    return estimated(made, x)


def estimated(made: LayerCollection, x: Tensor) -> LayerCollection:
    est = kfac_fx.FisherEstimator(
        made, estimation_mode="exact", damping=DAMPING, exps=(-1, 0.5, -0.5), compute_cholesky=True,
        compute_cholesky_inverse=True,
    )  # fmt: skip
    est.update_covariances(x)
    est.update_inverses()
    return made


FIRST = (("c1", "c1b"), "c2", "dw", "pw", "c3", ("w1", "b1"), "w2", ("scale", "shift"), "w3", "emb", "emb2", "g1", "g2")
SECOND = ("c", "s", "dw", ("scale", "shift"), "w", "v")
KEYS = [*(("first", key) for key in FIRST), *(("second", key) for key in SECOND)]


@pytest.fixture(scope="module")
def collections() -> dict[str, LayerCollection]:
    """Nineteen blocks of all classes."""
    return {"first": made_first(), "second": made_second()}


@pytest.fixture(params=KEYS, ids=[f"{name}-{key}" for name, key in KEYS])
def block(collections: dict[str, LayerCollection], request: pytest.FixtureRequest) -> FisherBlock:
    name, key = request.param
    return collections[name].fisher_blocks[key]


def test_no_class_is_left_out(collections: dict[str, LayerCollection]) -> None:
    found = {type(block).__name__ for lc in collections.values() for block in lc.get_blocks()}
    named = {name for name in vars(kfac_fx.fisher_blocks) if name.endswith("FB")}
    assert named - found == {"NaiveFB", "FullFB", "DiagonalFB", "KroneckerProductFB"}  # what the others are made of


def vector(block: FisherBlock) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    parameters = block.layer_collection.parameters
    return {name: torch.randn(parameters[name].shape, generator=generator) for name in block.params}


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(dict(one), dict(other))


def test_products_and_powers_belong_together(block: FisherBlock) -> None:
    v = vector(block)
    product, inverse = block.multiply(v), block.multiply_inverse(v)
    close(block.multiply_inverse(product), v)
    close(block.multiply_matpower(v, 1), product)
    close(block.multiply_matpower(v, -1), inverse)
    close(block.multiply_matpower(block.multiply_matpower(v, 0.5), 0.5), product)
    close(block.multiply_matpower(block.multiply_matpower(v, -0.5), -0.5), inverse)


def test_triangular_factors_make_the_block_and_its_inverse(block: FisherBlock) -> None:
    v = vector(block)
    close(block.multiply_cholesky(block.multiply_cholesky(v, transpose=True)), block.multiply(v))
    white = block.multiply_cholesky_inverse(v)
    close(block.multiply_cholesky_inverse(white, transpose=True), block.multiply_inverse(v))
    close(block.multiply_cholesky(white), v)


def test_the_product_is_that_of_the_full_block_and_the_damping(block: FisherBlock) -> None:
    """Exactly λ I where the block is no Kronecker product; of one, the damping of both sides meets in λ, too."""
    registration, v = block.registration, vector(block)
    flat = torch.cat([tensor.flatten() for tensor in v.values()])
    product, full = block.multiply(v), block.full_fisher_block()
    if registration.matrix is not None:
        flat = registration.matrix.pack(v).flatten()
        product_flat = registration.matrix.pack(product).flatten()
    else:
        product_flat = torch.cat([tensor.flatten() for tensor in product.values()])
    without = product_flat - full @ flat
    if "F" in block.operator.factors:
        torch.testing.assert_close(without, DAMPING * flat)
    assert without @ flat >= DAMPING * flat @ flat * (1 - 1e-9)  # the cross terms are positive


@pytest.mark.parametrize("approx", ["full", "diagonal"])
def test_gradients_of_cases_serve_every_layer_and_any_number_of_uses(approx: str) -> None:
    """By hand as compiled, exactly the Fisher of the parameters or its diagonal."""
    torch.manual_seed(0)

    def model(x: Tensor, e: Tensor, c: Tensor, dw: Tensor, w: Tensor, v: Tensor) -> Tensor:
        x = torch.tanh(F.embedding(x, e) + F.embedding(x.flip(1), e)).unflatten(2, (2, 4))
        x = torch.tanh(F.conv2d(torch.tanh(F.conv2d(x, c, padding=1)), c, padding=1))
        x = F.conv2d(x, dw, groups=3).mean((2, 3))
        return torch.tanh(torch.tanh(x @ w) @ w) @ v

    x = torch.randint(5, (4, 3))
    lc = collection(model, x, e=(5, 8), c=(3, 3, 3, 3), dw=(3, 1, 2, 2), w=(3, 3), v=(3, 2))
    lc.register_embedding_multi("e", None, ["embedding", "embedding_1"], approx=approx)
    lc.register_conv2d_multi("c", outputs=["conv2d", "conv2d_1"], approx=approx)
    lc.register_depthwise_conv2d("dw", None, "conv2d_2", approx=approx)
    lc.register_fully_connected_multi("w", None, ["matmul", "matmul_1"], approx=approx)
    lc.register_fully_connected("v", None, "matmul_2", approx=approx)
    lc.register_categorical_predictive_distribution("matmul_2")
    net = kfac_fx.compile(lc.model, (x,), loss="categorical", approximations={"*": approx})
    mine, theirs = (kfac_fx.FisherEstimator(collection, estimation_mode="exact") for collection in (lc, net))
    for est in (mine, theirs):
        est.update_covariances(x)
    assert {block.registration.approximation for block in mine.blocks.values()} == {approx}
    for key, mine_block in mine.blocks.items():
        torch.testing.assert_close(mine_block.full_fisher_block(), theirs.blocks[key].full_fisher_block())


def test_a_vector_is_a_mapping_a_tuple_or_a_tensor(block: FisherBlock) -> None:
    v = vector(block)
    expected = block.multiply_inverse(v)
    parts = tuple(v.values())
    torch.testing.assert_close(block.multiply_inverse(parts), tuple(expected.values()))
    if len(parts) == 1:
        torch.testing.assert_close(block.multiply_inverse(parts[0]), expected[block.params[0]])
    with pytest.raises(ValueError, match=rf"has {len(parts)} tensors, and got {len(parts) + 1}"):
        block.multiply_inverse((*parts, parts[0]))


def test_every_block_knows_its_towers_and_outputs(block: FisherBlock) -> None:
    tensors = block.tensors_to_compute_grads()
    assert block.num_registered_towers == 1
    assert tensors == block.params if block.registration.generic else len(tensors) == 1
