"""Scanning the graph for layers: what is found, what the user's own registrations and linked groups change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.passes.errors import AmbiguousRegistrationError, LinkError, LossError, RegistrationError
from kfac_fx.passes.parametrizations import functions
from tests.runtime.collections_of_toys import affine, collection, towers, two_uses

Blocks = dict[tuple[str, ...], tuple[str, str, int]]


def found(lc: LayerCollection) -> Blocks:
    """Class, approximation and number of uses of every block."""
    return {
        key: (type(block).__name__.removesuffix("FB"), block.approximation, len(block.registration.uses))
        for key, block in lc.fisher_blocks.items()
    }


def scanned(lc: LayerCollection, output: str, **options: Any) -> Blocks:
    lc.register_normal_predictive_distribution(output)
    lc.auto_register_layers(**options)
    lc.check_registration()
    return found(lc)


PLAIN = ("FullyConnectedKFACBasic", "kron", 1)


def test_a_layer_is_found_among_things_that_are_not_learned() -> None:
    lc = collection(lambda x, w, b: torch.matmul(x, w) + b + torch.ones(5), w=(10, 5), b=(5,))
    assert scanned(lc, "add_1") == {("w", "b"): PLAIN}


ROWS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], str, Blocks]] = {
    "linear": (lambda x, w: x @ w, {"w": (3, 4)}, "matmul", {("w",): PLAIN}),
    "bias first": (lambda x, w, b: b + x @ w, {"w": (3, 4), "b": (4,)}, "add", {("w", "b"): PLAIN}),
    "convolution, dilated": (
        lambda x, w: F.conv2d(x, w, dilation=2), {"w": (4, 3, 3, 3)}, "conv2d", {("w",): ("ConvKFCBasic", "kron", 1)},
    ),
    "embedding": (
        lambda x, w: F.embedding(x.long(), w), {"w": (7, 4)}, "embedding",
        {("w",): ("EmbeddingKFAC", "kron_in_diag", 1)},
    ),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (3,), w, b), {"w": (3,), "b": (3,)}, "layer_norm",
        {("w", "b"): ("ScaleAndShiftFull", "full", 1)},
    ),
    "leftover": (
        lambda x, w: x + torch.cdist(x, w[None]), {"w": (3,)}, "add", {("w",): ("NaiveDiagonal", "diagonal", 0)},
    ),
    "a function of a parameter": (
        lambda x, w: x + torch.cumsum(w, 0), {"w": (3,)}, "add", {("w",): ("ScaleAndShiftFull", "full", 1)},
    ),
    "shared weight and bias": (
        lambda x, w, b: (x @ w + b) @ w + b, {"w": (3, 3), "b": (3,)}, "add_1",
        {("w", "b"): ("FullyConnectedMultiIndep", "kron_indep", 2)},
    ),
    "a subset of the weight's uses has a bias": (
        lambda x, w, b: (x @ w + b) @ w, {"w": (3, 3), "b": (3,)}, "matmul_1",
        {("w",): ("FullyConnectedMultiIndep", "kron_indep", 2), ("b",): PLAIN},
    ),
    "an intermediate with a second reader": (
        lambda x, w, b: (h := x @ w) + b + h, {"w": (3, 3), "b": (3,)}, "add_1",
        {("w",): PLAIN, ("b",): ("ScaleAndShiftFull", "full", 1)},
    ),
    "weight on the left": (lambda x, w: w @ x, {"w": (4, 3)}, "matmul", {("w",): PLAIN}),
    "the weight twice in one operation": (
        lambda x, w: x + w @ w, {"w": (3, 3)}, "add", {("w",): ("ScaleAndShiftFull", "full", 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_the_scan_finds(name: str) -> None:
    function, shapes, output, expected = ROWS[name]
    assert scanned(collection(function, **shapes), output) == expected


def test_what_nothing_depends_on_is_not_registered() -> None:
    lc = collection(lambda x, w, b: (x @ w, x * b), w=(3, 4), b=(3,))
    assert scanned(lc, "matmul") == {("w",): PLAIN} and lc.program.unused == ("b",)


def test_a_scan_returns_what_is_new_and_leaves_the_rest() -> None:
    lc = two_uses()
    mine = lc.register_fully_connected(("w", "b1"), None, "add_1")
    lc.register_normal_predictive_distribution("cat")
    assert list(lc.auto_register_layers()) == [("b0",)] and lc.fisher_blocks["w", "b1"] is mine
    with pytest.raises(RegistrationError, match=r"w has 2 uses in the graph but 1 in its registration linear\(w, b1\)"):
        lc.check_registration()


def test_only_the_listed_variables_are_registered() -> None:
    lc = collection(lambda x, w, v: x @ w @ v, w=(3, 4), v=(4, 5))
    lc.register_normal_predictive_distribution("matmul_1")
    assert list(lc.auto_register_layers(["v"])) == [("v",)]
    with pytest.raises(RegistrationError, match="w is not registered"):
        lc.check_registration()
    lc.check_registration(["v"])


def test_tied_weights_with_biases_of_their_own_are_split_exactly() -> None:
    assert scanned(two_uses(), "cat") == {
        ("w",): ("FullyConnectedMultiIndep", "kron_indep", 2), ("b0",): PLAIN, ("b1",): PLAIN,
    }  # fmt: skip


def test_a_linked_weight_is_the_manual_multi_registration() -> None:
    lc, manual = two_uses(), two_uses()
    lc.define_linked_parameters("w")
    scanned(lc, "cat")
    manual.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])
    one, other = lc.fisher_blocks["w"], manual.fisher_blocks["w"]
    assert type(one) is type(other) and one.approximation == other.approximation
    assert [str(node) for node in one.tensors_to_compute_grads()] == [str(n) for n in other.tensors_to_compute_grads()]


def test_linked_groups_choose_blocks_and_approximations() -> None:
    lc = collection(lambda x, w0, b0, w1, b1: (x @ w0 + b0) @ w1 + b1, w0=(3, 4), b0=(4,), w1=(4, 5), b1=(5,))
    lc.define_linked_parameters(("w0", "b0"), "kron")
    lc.define_linked_parameters(("w1", "b1"), "diagonal")
    assert scanned(lc, "add_1") == {("w0", "b0"): PLAIN, ("w1", "b1"): ("FullyConnectedDiagonal", "diagonal", 1)}


def test_a_linked_group_that_no_layer_has_is_refused() -> None:
    lc = two_uses()
    lc.register_fully_connected_multi("w", None, ["matmul", "matmul_1"])
    lc.define_linked_parameters(("b0", "b1"))
    with pytest.raises(LinkError, match="linked parameters that no layer matched as a group:\n  b0  linked with b1"):
        scanned(lc, "cat")


def test_a_linked_group_that_is_registered_in_part_is_refused() -> None:
    lc = two_uses()
    lc.define_linked_parameters(("w", "b0"))
    lc.register_generic("w")
    with pytest.raises(LinkError, match=r"b0 in linked group \(b0, w\) was not matched: the others are registered"):
        scanned(lc, "cat")


def test_layouts_that_contradict_each_other_are_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)  # as of a matrix that is not small
    lc = collection(lambda x, w: (x @ w) @ w.reshape(3, 2).t(), w=(2, 3))
    with pytest.raises(AmbiguousRegistrationError, match="matched by .* that lay them out differently"):
        scanned(lc, "matmul_1")


def test_defaults_serve_the_scan_and_several_uses_have_their_own() -> None:
    lc = collection(lambda x, w, v, g: (x @ w @ v) @ v + torch.cdist(x, g[None]), w=(3, 3), v=(3, 3), g=(3,))
    lc.set_default_fully_connected_approximation("diagonal")
    lc.set_default_fully_connected_multi_approximation("kron_indep_in_diag")
    lc.set_default_generic_approximation("full")
    assert scanned(lc, "add") == {
        ("w",): ("FullyConnectedDiagonal", "diagonal", 1),
        ("v",): ("FullyConnectedMultiIndep", "kron_in_diag", 2),
        ("g",): ("NaiveFull", "full", 0),
    }


def test_a_recurrent_network_is_three_blocks_in_the_order_of_time() -> None:
    def rnn(x: Tensor, w_in: Tensor, w_rec: Tensor, w_out: Tensor, b: Tensor) -> list[Tensor]:
        h, outputs = torch.tanh(x[:, 0] @ w_in), []
        for t in range(1, 4):
            h = torch.tanh(x[:, t] @ w_in + h @ w_rec)
            outputs.append(h @ w_out + b)
        return outputs

    lc = collection(rnn, w_in=(3, 4), w_rec=(4, 4), w_out=(4, 2), b=(2,))
    outputs = [node.name for node in lc.graph.nodes if node.op == "call_function" and not node.users.keys() - last(lc)]
    for name in outputs:
        lc.register_categorical_predictive_distribution(name)
    lc.auto_register_layers()
    lc.check_registration()
    assert {key: len(block.registration.uses) for key, block in lc.fisher_blocks.items()} == {
        ("w_in",): 4, ("w_rec",): 3, ("w_out", "b"): 3,
    }  # fmt: skip
    order = {node: i for i, node in enumerate(lc.graph.nodes)}
    for block in lc.fisher_blocks.values():
        places = [order[use.output] for use in block.registration.uses]
        assert places == sorted(places) and type(block).__name__ == "FullyConnectedMultiIndepFB"


def last(lc: LayerCollection) -> set[Any]:
    return {node for node in lc.graph.nodes if node.op == "output"}


# --- batches that hold several uses or towers -----------------------------------------------------------------------


def test_a_multiple_of_the_batch_size_is_several_uses() -> None:
    lc = affine(torch.zeros(32, 10))
    assert scanned(lc, "add", batch_size=16) == {("w", "b"): ("FullyConnectedMultiIndep", "kron_indep", 1)}
    assert lc.fisher_blocks["w", "b"].num_uses == 2
    with pytest.raises(RegistrationError, match=r"has \[32\] rows, which is no multiple of batch_size=12"):
        scanned(affine(torch.zeros(32, 10)), "add", batch_size=12)


def test_uses_along_a_leading_dimension_of_time_are_counted_by_it() -> None:
    lc = affine(torch.zeros(7, 4, 10))
    scanned(lc, "add", batch_size=4)
    assert lc.fisher_blocks["w", "b"].num_uses == 7
    plain = affine(torch.zeros(32, 10))
    scanned(plain, "add", batch_size=32)
    assert plain.fisher_blocks["w", "b"].num_uses is None


def test_towers_are_told_apart_by_their_losses() -> None:
    lc = towers()
    lc.register_categorical_predictive_distribution("add", name="logits")
    lc.register_categorical_predictive_distribution("add_1", name="logits", reuse=True)
    (block,) = lc.auto_register_layers().values()
    assert (type(block).__name__, block.num_registered_towers, block.approximation) == (
        "FullyConnectedKFACBasicFB", 2, "kron",
    )  # fmt: skip
    lc.check_registration()


def test_losses_of_different_numbers_of_towers_are_refused() -> None:
    lc = towers()
    lc.register_categorical_predictive_distribution("add", name="a")
    lc.register_categorical_predictive_distribution("add_1", name="a", reuse=True)
    lc.register_categorical_predictive_distribution("add", name="b")
    with pytest.raises(RegistrationError, match="same number of towers, not a: 2, b: 1"):
        lc.auto_register_layers()


def test_a_scan_needs_a_loss() -> None:
    with pytest.raises(LossError, match="Must have at least one registered loss"):
        affine().auto_register_layers()


# --- check_registration ---------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once() -> None:
    lc = collection(lambda x, w, b, v: (x @ w @ w + b, x * v), w=(3, 3), b=(3,), v=(3,))
    lc.register_fully_connected("w", None, "matmul")
    lc.register_scale_and_shift("v", None, "mul")
    lc.register_normal_predictive_distribution("add")
    with pytest.raises(RegistrationError) as caught:
        lc.check_registration(["w", "b", "wb"])
    for text in (
        "w has 2 uses in the graph but 1 in its registration",
        "b is not registered; it is used in add",
        "'wb' is not a parameter of the model",
        "1 registered parameter was not included in the list: v",
        "v is registered at mul",
        "the losses do not depend on it",
    ):
        assert text in str(caught.value)


def test_a_use_registered_twice_is_refused() -> None:
    lc = affine()
    lc.register_fully_connected(("w", "b"), None, "add")
    lc.register_fully_connected(("w", "b"), None, "add", reuse=True)
    lc.register_normal_predictive_distribution("add")
    with pytest.raises(RegistrationError, match="w, b is registered with 2 uses at add.*, which is 1 use"):
        lc.check_registration()


def test_generic_parameters_may_have_any_number_of_uses_and_aliases_are_looked_through() -> None:
    lc = collection(lambda x, w, v: x @ (v.view(-1).view(3, 3)) @ w @ w, w=(3, 3), v=(3, 3))
    lc.register_generic("w")
    lc.register_fully_connected("v", None, "matmul")
    lc.register_normal_predictive_distribution("matmul_2")
    lc.check_registration([lc.model.w, lc.model.v])


def test_a_collection_serves_one_estimator() -> None:
    lc = affine(torch.randn(6, 10))
    lc.register_normal_predictive_distribution("add")
    with pytest.raises(RegistrationError, match="w is not registered"):
        kfac_fx.FisherEstimator(lc)
    lc.auto_register_layers()
    kfac_fx.FisherEstimator(lc)
    with pytest.raises(RegistrationError, match="serves another estimator already"):
        kfac_fx.FisherEstimator(lc)
    with pytest.raises(RegistrationError, match="serves an estimator already; nothing more can be registered"):
        lc.register_generic("w", reuse=True)
    with pytest.raises(RegistrationError, match="serves an estimator already"):
        lc.auto_register_layers()
