"""The Fisher of what was registered by hand: towers, formats of several uses, golden numbers, other captures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import EmbeddingKFACMultiIndepFB
from kfac_fx.passes.errors import ModelChangedError, RegistrationError
from tests.runtime.collections_of_toys import affine, collection, towers


def t(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same_fisher(one: kfac_fx.FisherEstimator, other: kfac_fx.FisherEstimator) -> None:
    for mine, its in zip(one.blocks.values(), other.blocks.values(), strict=True):
        torch.testing.assert_close(mine.full_fisher_block(), its.full_fisher_block())


def empirical(net: Any, *inputs: Tensor, targets: Any) -> kfac_fx.FisherEstimator:
    est = kfac_fx.FisherEstimator(net, estimation_mode="empirical", damping=0.1)
    est.update_covariances(*inputs, targets=targets)
    return est


# --- one batch, several ways ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.tanh(self.norm(self.fc1(x))))
        return y


def registered(model: nn.Module, x: Tensor) -> LayerCollection:
    lc = LayerCollection(kfac_fx.capture(model, (x,)))
    for name in ("fc1", "fc2"):
        lc.register_fully_connected((f"{name}.weight", f"{name}.bias"), lc.inputs_of(name), lc.outputs_of(name))
    lc.register_scale_and_shift(("norm.weight", "norm.bias"), lc.inputs_of("norm"), lc.outputs_of("norm"), "diagonal")
    lc.register_categorical_predictive_distribution(lc.outputs_of("fc2"))
    return lc


def test_registered_by_hand_or_compiled_the_fisher_is_the_same() -> None:
    model, x, y = Net(), torch.randn(6, 3), torch.randint(5, (6,))
    lc = registered(model, x)
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"layer_norm": "diagonal"})
    by_key = empirical(net, x, targets=y).blocks
    est = empirical(lc, x, targets=y)
    for key, block in est.blocks.items():
        torch.testing.assert_close(block.full_fisher_block(), by_key[key].full_fisher_block())
    assert list(net.layer_collection.fisher_blocks) == [("fc1.weight", "fc1.bias"), ("norm.weight", "norm.bias"),
                                                       ("fc2.weight", "fc2.bias")]  # fmt: skip
    with pytest.raises(RegistrationError, match="nothing more can be registered"):
        net.layer_collection.register_generic("fc1.bias")


def test_a_collection_can_be_compiled_and_other_batches_captured() -> None:
    model, x = Net(), torch.randn(6, 3)
    lc = registered(model, x)
    with pytest.raises(RegistrationError) as failure:
        kfac_fx.compile(lc, loss="categorical", strict=True, dense_limit=8, sub_sample_inputs=True)
    assert str(failure.value) == (
        "with a LayerCollection, do not pass "
        "loss, strict, dense_limit, sub_sample_inputs: set them on the collection or in kfac_fx.capture(...)"
    )
    net = kfac_fx.compile(lc)
    assert net.layer_collection is lc and net.registrations == lc.registrations
    est = kfac_fx.FisherEstimator(net)
    model.eval()
    est.update_covariances(torch.randn(9, 3))
    model.double()
    est.update_covariances(torch.randn(4, 3, dtype=torch.float64))


def test_inputs_on_another_path_are_refused() -> None:
    class Branch(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.dim() == 2 else x.flatten(0, 1))

    est = kfac_fx.FisherEstimator(registered(Branch(), torch.randn(6, 3)))
    with pytest.raises(ModelChangedError, match="these inputs take another path through Branch"):
        est.update_covariances(torch.randn(2, 3, 3))


def test_multiplying_through_the_collection_is_multiplying_by_the_estimator() -> None:
    model, x = Net(), torch.randn(6, 3)
    lc = registered(model, x)
    est = empirical(lc, x, targets=torch.randint(5, (6,)))
    est.update_inverses()
    key = "fc1.weight", "fc1.bias"
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    whole = est.multiply_inverse(vector)
    weight, bias = lc.fisher_blocks[key].multiply_inverse((vector[key[0]], vector[key[1]]))
    torch.testing.assert_close((weight, bias), (whole[key[0]], whole[key[1]]))
    (first,) = (factor for factor in lc.get_factors() if factor.name == "A" and lc.fisher_blocks[key] in factor.blocks)
    assert first.value.shape == (1, 4, 4)


@pytest.mark.parametrize("approx", ["kron", "diagonal"])
def test_towers_are_the_whole_batch(approx: str) -> None:
    x, y = torch.randn(6, 2, 3), torch.randint(4, (6, 2))
    split = towers(x)
    for tower, output in enumerate(("add", "add_1")):
        split.register_fully_connected(("w", "b"), None, output, approx, reuse=tower > 0)
        split.register_categorical_predictive_distribution(output, name="loss", reuse=tower > 0)
    whole = collection(lambda x, w, b: x @ w + b, x.flatten(0, 1), w=(3, 4), b=(4,))
    whole.register_fully_connected(("w", "b"), None, "add", approx)
    whole.register_categorical_predictive_distribution("add")
    whole.model.load_state_dict(split.model.state_dict())
    same_fisher(empirical(split, x, targets=(y[:, 0], y[:, 1])), empirical(whole, x.flatten(0, 1), targets=y.flatten()))


def test_full_blocks_of_towers_are_those_of_the_whole_batch() -> None:
    x, y = torch.randn(6, 2, 3), torch.randint(3, (6, 2))

    def each(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x * w + b

    split = collection(lambda x, w, b: (each(x[:, 0], w, b), each(x[:, 1], w, b)), x, w=(3,), b=(3,))
    for tower, output in enumerate(("add", "add_1")):
        split.register_scale_and_shift(("w", "b"), None, output, reuse=tower > 0)
        split.register_categorical_predictive_distribution(output, name="loss", reuse=tower > 0)
    whole = collection(each, x.flatten(0, 1), w=(3,), b=(3,))
    whole.register_scale_and_shift(("w", "b"), None, "add")
    whole.register_categorical_predictive_distribution("add")
    whole.model.load_state_dict(split.model.state_dict())
    same_fisher(empirical(split, x, targets=(y[:, 0], y[:, 1])), empirical(whole, x.flatten(0, 1), targets=y.flatten()))


def test_uses_in_a_list_and_in_one_tensor_are_the_same() -> None:
    x, y = torch.randn(3, 5, 2), torch.randn(5, 4)
    listed = collection(lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w, x, w=(2, 4))
    listed.register_fully_connected_multi("w", None, ["matmul", "matmul_1", "matmul_2"])
    listed.register_normal_predictive_distribution("add_1")
    folded = collection(lambda x, w: (x.reshape(-1, 2) @ w).reshape(3, -1, 4).sum(0), x, w=(2, 4))
    folded.register_fully_connected_multi("w", None, "matmul", num_uses=3)
    folded.register_normal_predictive_distribution("sum_1")
    folded.model.load_state_dict(listed.model.state_dict())
    one, other = empirical(listed, x, targets=y), empirical(folded, x, targets=y)
    same_fisher(one, other)
    assert one.blocks[("w",)].factors["positions"].value == 3


def test_coefficients_scale_the_fisher() -> None:
    x, y = torch.randn(6, 10), torch.randn(6, 5)
    plain, scaled = affine(x), affine(x)
    scaled.model.load_state_dict(plain.model.state_dict())
    for lc, coeff in ((plain, 1.0), (scaled, 3.0)):
        lc.register_normal_predictive_distribution("add", coeff=coeff)
        lc.auto_register_layers()
    one, other = (empirical(lc, x, targets=y).blocks[("w", "b")] for lc in (plain, scaled))
    torch.testing.assert_close(other.full_fisher_block(), 9 * one.full_fisher_block())


def test_a_scanned_tied_embedding_has_its_roles_swapped() -> None:
    x, y = torch.randint(7, (6,)), torch.randint(7, (6,))
    lc = collection(lambda x, w: torch.matmul(torch.tanh(F.embedding(x, w)), w.t()), x, w=(7, 4))
    lc.register_categorical_predictive_distribution("matmul", targets=y)
    lc.auto_register_layers()
    assert [use.transposed for use in lc.fisher_blocks["w"].registration.uses] == [False, True]
    empirical(lc, x, targets=None)


@pytest.mark.parametrize("outputs", [["embedding", "matmul"], ["matmul", "embedding"]])
def test_an_embedding_tied_to_the_output_layer_by_hand_is_what_the_scan_finds(outputs: list[str]) -> None:
    x, y = torch.randint(7, (6,)), torch.randint(7, (6,))
    found = []
    for scan in (True, False):
        torch.manual_seed(0)
        lc = collection(lambda x, w: torch.matmul(torch.tanh(F.embedding(x, w)), w.t()), x, w=(7, 4))
        lc.register_categorical_predictive_distribution("matmul", targets=y)
        if scan:
            lc.auto_register_layers()
        else:
            assert type(lc.register_embedding_multi("w", None, outputs)) is EmbeddingKFACMultiIndepFB
        lc.check_registration()
        found.append(empirical(lc, x, targets=None))
    same_fisher(*found)
    with pytest.raises(RegistrationError, match="no embedding or embedding_bag or linear layer with w computes tanh"):
        lc.fisher_blocks["w"].register_additional_tower(None, "tanh")


def test_the_decoder_of_an_autoencoder_may_be_its_encoder_transposed() -> None:
    x = torch.randn(5, 4)
    lc = collection(lambda x, w: torch.tanh(x @ w) @ w.t(), x, w=(4, 3))
    block = lc.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])
    lc.register_normal_predictive_distribution("matmul_1")
    assert [use.transposed for use in block.registration.uses] == [False, True]
    a = empirical(lc, x, targets=torch.zeros(5, 4)).blocks[("w",)].factors["A"].value
    assert a.shape == (1, 4, 4)


def test_every_use_of_a_convolution_has_its_own_geometry_and_all_its_locations_count() -> None:
    x = torch.randn(4, 2, 9, 9)

    def function(x: Tensor, c: Tensor) -> Tensor:
        wide = F.conv2d(x, c, dilation=3)
        return wide.sum((2, 3)) + F.conv2d(x, c, stride=2, padding=1).sum((2, 3))

    lc = collection(function, x, c=(3, 2, 3, 3))
    lc.register_conv2d_multi("c", None, None, None, ["conv2d", "conv2d_1"])
    lc.register_normal_predictive_distribution("add")
    block = empirical(lc, x, targets=torch.zeros(4, 3)).blocks[("c",)]
    assert block.factors["positions"].value == 3 * 3 + 5 * 5  # per case: every pixel of both outputs, none sampled away


def test_a_convolution_of_three_dimensions_works() -> None:
    x = torch.randn(4, 2, 5, 4, 3)
    lc = collection(lambda x, c: F.conv3d(x, c, stride=(2, 1, 1)).flatten(2).sum(2), x, c=(3, 2, 3, 2, 1))
    lc.register_convolution("c", None, "conv3d", 0, [2, 1, 1])
    lc.register_normal_predictive_distribution("sum_1")
    block = empirical(lc, x, targets=torch.zeros(4, 3)).blocks[("c",)]
    assert block.factors["positions"].value == 2 * 3 * 3 and block.factors["A"].value.shape == (1, 12, 12)


def test_an_optimizer_trains_on_a_compiled_collection() -> None:
    model, x = Net(), torch.randn(16, 3)
    y = x.argmax(1)
    net = kfac_fx.compile(registered(model, x))
    optimizer = kfac_fx.KFAC(net, lr=0.3, damping=1e-2, cov_update_every=1, invert_every=1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_loss_that_forward_computes_is_in_the_collection() -> None:
    class Model(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(x), y)

    model, x, y = Model(), torch.randn(6, 3), torch.randint(5, (6,))
    lc = kfac_fx.compile(model, (x, y)).layer_collection
    assert [loss.name for loss in lc.losses] == ["cross_entropy_loss"]
    torch.testing.assert_close(lc.total_loss(x, y) / 6, model(x, y).detach())


def test_a_squared_error_that_forward_computes_keeps_its_mean() -> None:
    class Model(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(super().forward(x), y)

    model, x, y = Model(), torch.randn(6, 3), torch.randn(6, 5)
    lc = kfac_fx.compile(model, (x, y)).layer_collection
    constant = 0.5 * math.log(math.pi)  # of the normal density with variance 0.5
    torch.testing.assert_close(lc.total_loss(x, y) / 6, model(x, y).detach() + constant)


def test_a_loss_that_is_any_function_of_the_outputs_is_not_shown() -> None:
    net = kfac_fx.compile(Net(), (torch.randn(6, 3),), loss=lambda y: kfac_fx.losses.Categorical(y))
    assert net.layer_collection.losses == () and len(net.layer_collection.fisher_blocks) == 3
