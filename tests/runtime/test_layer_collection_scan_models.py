"""The scan against registration by hand: towers with several losses, recurrent networks, shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.passes.errors import LinkError, RegistrationError
from tests.runtime.collections_of_toys import affine, collection, two_uses


def described(lc: LayerCollection) -> dict[Any, Any]:
    """Class, approximation, and of every tower the inputs and outputs of the uses."""
    return {
        frozenset(key): (
            type(block).__name__,
            block.approximation,
            [[(use.input.name, use.output.name) for use in tower] for tower in block.towers],
        )
        for key, block in lc.fisher_blocks.items()
    }


def kinds(lc: LayerCollection) -> dict[Any, tuple[str, str]]:
    return {key: (type(block).__name__, block.approximation) for key, block in lc.fisher_blocks.items()}


# --- towers ---------------------------------------------------------------------------------------------------------

TOWERS = 5


def two_headed(x: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor) -> list[Tensor]:
    outputs = []
    for tower in range(TOWERS):
        hidden = torch.matmul(x[:, tower], w0) + b0
        outputs += [hidden, torch.matmul(torch.tanh(hidden), w1) + b1]
    return outputs


def headed(*inputs: Tensor) -> tuple[LayerCollection, list[str]]:
    lc = collection(two_headed, *inputs, w0=(3, 4), b0=(4,), w1=(4, 2), b1=(2,))
    (output,) = (node for node in lc.graph.nodes if node.op == "output")
    names = [node.name for node in output.all_input_nodes]
    for tower in range(TOWERS):
        lc.register_categorical_predictive_distribution(names[2 * tower], name="hidden", reuse=tower > 0)
        lc.register_normal_predictive_distribution(names[2 * tower + 1], name="top", reuse=tower > 0)
    return lc, names


def test_five_towers_of_two_losses_are_the_layers_registered_tower_by_tower() -> None:
    x = torch.randn(6, TOWERS, 3)
    scanned, _ = headed(x)
    scanned.auto_register_layers()
    manual, names = headed(x)
    for tower in range(TOWERS):
        with kfac_fx.variable_scope(reuse=tower > 0):
            manual.register_fully_connected(("w0", "b0"), None, names[2 * tower])
            manual.register_fully_connected(("w1", "b1"), None, names[2 * tower + 1])
    assert described(scanned) == described(manual)
    assert {block.num_registered_towers for block in scanned.get_blocks()} == {TOWERS}
    assert [len(towers) for towers in scanned.towers_by_loss] == [TOWERS, TOWERS]
    manual.model.load_state_dict(scanned.model.state_dict())
    estimators = [kfac_fx.FisherEstimator(lc, estimation_mode="exact") for lc in (scanned, manual)]
    for est in estimators:
        est.update_covariances(x)
    for key, block in estimators[0].blocks.items():
        torch.testing.assert_close(block.full_fisher_block(), estimators[1].blocks[key].full_fisher_block())


# --- recurrent networks ---------------------------------------------------------------------------------------------

STEPS = 28


def unrolled(x: Tensor, wi: Tensor, bi: Tensor, wr: Tensor, br: Tensor, wo: Tensor, bo: Tensor) -> list[Tensor]:
    h, outputs = x.new_zeros(x.shape[0], 4), []
    for step in range(STEPS):
        h = torch.tanh((torch.matmul(x[:, step], wi) + bi) + (torch.matmul(h, wr) + br))
        outputs.append(torch.matmul(h, wo) + bo)
    return outputs


def with_losses(lc: LayerCollection) -> LayerCollection:
    (output,) = (node for node in lc.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        lc.register_categorical_predictive_distribution(node)
    return lc


def test_a_recurrent_network_of_28_steps_is_three_lists_of_uses() -> None:
    # With inputs: that the first state depends on the batch shows in its size alone.
    shapes: dict[str, Any] = {"wi": (3, 4), "bi": (4,), "wr": (4, 4), "br": (4,), "wo": (4, 2), "bo": (2,)}
    scanned = with_losses(collection(unrolled, torch.randn(2, STEPS, 3), **shapes))
    manual = with_losses(LayerCollection(scanned.captured))
    scanned.auto_register_layers()
    adds = [node for node in manual.graph.nodes if node.name.startswith("add")]
    layers = {name: [node for node in adds if node.args[1].name == name] for name in ("bi", "br", "bo")}
    for bias, outputs in layers.items():
        inputs = [node.args[0].args[0] for node in outputs]
        manual.register_fully_connected_multi((bias.replace("b", "w"), bias), inputs, outputs)
        assert len(outputs) == STEPS
    manual.check_registration()
    assert described(scanned) == described(manual)
    assert set(kinds(scanned).values()) == {("FullyConnectedMultiIndepFB", "kron_indep")}


# --- shared weights -------------------------------------------------------------------------------------------------


def scanned(lc: LayerCollection, output: str, **options: Any) -> dict[Any, tuple[str, str]]:
    lc.register_normal_predictive_distribution(output)
    lc.auto_register_layers(**options)
    lc.check_registration()
    return kinds(lc)


def test_two_folded_batches_of_one_layer_are_two_uses() -> None:
    """The same weight and bias on two inputs of twice the batch size, as a list of uses that hold two each."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.cat([torch.matmul(x[:, :10], w) + b, torch.matmul(x[:, 10:], w) + b], 1)

    lc = collection(function, torch.zeros(32, 20), w=(10, 10), b=(10,))
    assert scanned(lc, "cat", batch_size=16) == {("w", "b"): ("FullyConnectedMultiIndepFB", "kron_indep")}
    assert lc.fisher_blocks["w", "b"].num_uses == 2 and len(lc.fisher_blocks["w", "b"].registration.uses) == 2


def test_links_choose_the_approximation_of_every_part() -> None:
    lc = collection(lambda x, w0, b0, w1, b1: (x @ w0 + b0) @ w1 + b1, w0=(3, 4), b0=(4,), w1=(4, 5), b1=(5,))
    for name, approximation in {"w0": "diagonal", "b0": "diagonal", "w1": "kron", "b1": "full"}.items():
        lc.define_linked_parameters(name, approximation)
    found = scanned(lc, "add_1")
    assert {key: approximation for key, (_, approximation) in found.items()} == {
        ("w0",): "diagonal", ("b0",): "diagonal", ("w1",): "kron", ("b1",): "full",
    }  # fmt: skip
    shared = two_uses()
    for name, approximation in {"w": "kron_indep", "b0": "diagonal", "b1": "full"}.items():
        shared.define_linked_parameters(name, approximation)
    found = scanned(shared, "cat", batch_size=1)
    assert found["w",] == ("FullyConnectedMultiIndepFB", "kron_indep")
    assert (found["b0",][1], found["b1",][1]) == ("diagonal", "full")


def test_a_bias_at_some_uses_of_a_linked_weight_is_a_block_of_its_own() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.cat([torch.matmul(x[:, :10], w) + b, torch.matmul(x[:, 10:], w)], 1)

    lc, manual = (collection(function, w=(10, 10), b=(10,)) for _ in range(2))
    lc.define_linked_parameters("w")
    scanned(lc, "cat")
    manual.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])
    assert described(lc)[frozenset("w")] == described(manual)[frozenset("w")] and ("b",) in lc.fisher_blocks


def test_a_bias_linked_alone_leaves_the_weight_to_its_uses() -> None:
    lc = two_uses()
    lc.define_linked_parameters("b1")
    found = scanned(lc, "cat")
    assert found["w",] == ("FullyConnectedMultiIndepFB", "kron_indep") and ("b1",) in found


def test_a_link_that_leaves_a_use_out_makes_no_wrong_block() -> None:
    """The other use has another bias, so the linked pair cannot be a block of all uses of the weight."""
    lc = two_uses()
    lc.define_linked_parameters(("w", "b1"))
    lc.register_normal_predictive_distribution("cat")
    lc.auto_register_layers()
    lc.check_registration()
    assert {key for key, block in lc.fisher_blocks.items() if block.registration.generic} >= {("w",), ("b1",)}
    assert "w has 2 uses, 1 of them matched" in str(lc.fisher_blocks["w"].reason)


@pytest.mark.parametrize("batch_size", [None, 6])
def test_a_batch_norm_is_a_block_of_its_normalized_input(batch_size: int | None) -> None:
    def function(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(torch.matmul(x, w), None, None, s, b, training=True)

    lc = collection(function, torch.randn(6, 3), w=(3, 4), s=(4,), b=(4,))
    found = scanned(lc, "batch_norm", batch_size=batch_size)
    assert found["s", "b"] == ("ScaleAndShiftFullFB", "full")


def test_leftovers_need_no_batch_size_and_links_of_nothing_are_refused() -> None:
    lc = collection(lambda x, g, h: x * torch.cdist(x, g[None]) + torch.cdist(x, h[None]), g=(3,), h=(3,))
    assert set(scanned(lc, "add").values()) == {("NaiveDiagonalFB", "diagonal")}
    lc = collection(lambda x, g, h: x * torch.cdist(x, g[None]) + torch.cdist(x, h[None]), g=(3,), h=(3,))
    lc.define_linked_parameters(("g", "h"))
    with pytest.raises(LinkError, match="g +linked with h; enters cdist"):
        scanned(lc, "add")


# --- uses as check_registration counts them -------------------------------------------------------------------------


def test_several_uses_in_one_tensor_are_one_operation() -> None:
    lc = collection(lambda x, w: (x.reshape(-1, 2) @ w).reshape(3, -1, 4).sum(0), torch.randn(3, 5, 2), w=(2, 4))
    lc.register_fully_connected_multi("w", None, "matmul", num_uses=3)
    lc.register_normal_predictive_distribution("sum_1")
    lc.check_registration(["w"])


def test_a_lookup_is_one_use_and_a_view_is_none() -> None:
    lc = collection(lambda x, w: F.embedding(x, w.view(5, 3)), torch.tensor([1, 2]), w=(15,))
    lc.register_embedding("w", None, "embedding")
    lc.register_normal_predictive_distribution("embedding")
    lc.check_registration()
    lc = collection(lambda x, a, b: (v := a.view(3, 3), x @ v @ b, x @ v)[1:], a=(9,), b=(3, 3))
    lc.register_fully_connected("a", None, "matmul")
    lc.register_fully_connected("b", None, "matmul_1")
    lc.register_normal_predictive_distribution("matmul_1")
    lc.register_normal_predictive_distribution("matmul_2")
    with pytest.raises(RegistrationError, match="a has 2 uses in the graph but 1 in its registration"):
        lc.check_registration()


def test_variables_must_be_those_that_are_registered() -> None:
    lc = affine(torch.randn(6, 10))
    lc.register_fully_connected("w", "x", "matmul")
    lc.register_normal_predictive_distribution("add")
    lc.check_registration(["w"])
    with pytest.raises(RegistrationError, match="b is not registered; it is used in add"):
        kfac_fx.FisherEstimator(lc, variables=["w", "b"])
    with pytest.raises(RegistrationError, match="1 registered parameter was not included in the list: w"):
        kfac_fx.FisherEstimator(lc, variables=[])
    est = kfac_fx.FisherEstimator(lc, variables=["w"])
    est.update_covariances(torch.randn(6, 10))
    assert list(est.blocks) == [("w",)]


@pytest.mark.parametrize("convolution", [False, True])
def test_reuse_means_the_same_for_every_layer(convolution: bool) -> None:
    lc = collection(lambda x, w, b: F.conv2d(x, w, b), w=(3, 10, 1, 1), b=(3,)) if convolution else affine()

    def register(**options: Any) -> Any:
        if convolution:
            return lc.register_conv2d(("w", "b"), None, None, None, "conv2d", **options)
        return lc.register_fully_connected(("w", "b"), None, "add", **options)

    with pytest.raises(KeyError, match="reuse=True, but no FisherBlock"):
        register(reuse=True)
    register(reuse=False, approx="kron")
    for options in ({"reuse": False}, {"reuse": kfac_fx.VARIABLE_SCOPE}):
        with pytest.raises(ValueError, match="already in LayerCollection"):
            register(**options)
    with pytest.raises(ValueError, match="Attempted to register FisherBlock of type"):
        register(reuse=True, approx="diagonal")
    register(reuse=True)
    with kfac_fx.variable_scope(reuse=True):
        assert register().num_registered_towers == 3
