"""Registration of pieces of parameters: by hand under their names, by the scan, and mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.passes.errors import LinkError, RegistrationError
from kfac_fx.passes.parametrizations.parts import region_of
from tests.runtime.collections_of_toys import collection


class Halves(nn.Module):
    """Two layers whose weights and biases are slices of one parameter each."""

    def __init__(self, learned_bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(5), requires_grad=learned_bias)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = F.linear(x, self.w[:2], self.b[:2]), F.linear(x, self.w[2:], self.b[2:])
        y: Tensor = self.head(torch.tanh(torch.cat(parts, 1)))
        return y


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def with_loss(model: nn.Module, x: Tensor = X, head: str = "head") -> LayerCollection:
    lc = LayerCollection(kfac_fx.capture(model, (x,)))
    lc.register_categorical_predictive_distribution(lc.outputs_of(head))
    return lc


def raises(error: type[Exception], text: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=text):
        function(*args, **options)


def dense_diagonal(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The diagonal of the Fisher of a classifier, from the Jacobians of single cases."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    p = model(x).softmax(1).detach()
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return {name: torch.einsum("nk...,nkl,nl...->...", j, fisher, j) / len(x) for name, j in jacobians.items()}


def test_the_scan_registers_the_pieces_that_compile_does() -> None:
    model = Halves()
    lc = with_loss(model)
    lc.auto_register_layers()
    lc.check_registration()
    net = kfac_fx.compile(model, (X,), loss="categorical")
    estimators = [kfac_fx.FisherEstimator(collection, estimation_mode="exact") for collection in (lc, net)]
    for est in estimators:
        est.update_covariances(X)
    assert list(estimators[0].blocks) == list(estimators[1].blocks)
    assert ("w[0:2]", "b[0:2]") in estimators[0].blocks
    for key, block in estimators[0].blocks.items():
        torch.testing.assert_close(block.full_fisher_block(), estimators[1].blocks[key].full_fisher_block())


def test_pieces_by_name_and_by_view_mix_with_the_scan_and_are_exact() -> None:
    model = Halves()
    lc = with_loss(model)
    lc.register_fully_connected((model.w[:2], "b[:2]"), None, "linear", "diagonal")
    lc.register_generic("w[2:4]")
    lc.set_default_fully_connected_approximation("diagonal")
    assert set(lc.auto_register_layers()) == {("w[4:5]", "b[4:5]"), ("b[2:4]",), ("head.weight", "head.bias")}
    lc.check_registration(["w", "b", model.head.weight, "head.bias"])
    est = kfac_fx.FisherEstimator(lc, estimation_mode="exact", damping=0.0)
    est.update_covariances(X)
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    torch.testing.assert_close(est.multiply(ones), dense_diagonal(model, X))


def test_a_packed_projection_registers_as_the_blocks_of_its_parts() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))
            return y

    model, x = Attention(), torch.randn(3, 5, 4)
    scanned, manual = (with_loss(model, x) for _ in range(2))
    weight, bias = model.mix.in_proj_weight, model.mix.in_proj_bias
    ends = [(0, 4), (4, 8), (8, 12)]
    for start, stop in ends:
        manual.register_fully_connected((weight[start:stop], bias[start:stop]), None, "linear")
    estimators = []
    for lc in (scanned, manual):
        lc.auto_register_layers()
        estimators.append(kfac_fx.FisherEstimator(lc, estimation_mode="exact"))
        estimators[-1].update_covariances(x)
    whole = estimators[0].blocks["mix.in_proj_weight", "mix.in_proj_bias"].factors
    for start, stop in ends:
        names = tuple(f"mix.in_proj_{role}[{start}:{stop}]" for role in ("weight", "bias"))
        part = estimators[1].blocks[names].factors
        torch.testing.assert_close(part["A"].value, whole["A"].value)
        torch.testing.assert_close(part["G"].value, whole["G"].value[:, start:stop, start:stop])


def test_a_piece_at_two_places_of_one_operation_is_two_uses() -> None:
    lc = collection(lambda x, w: F.linear(x, torch.cat([w, w])), torch.randn(6, 3), w=(2, 3))
    block = lc.register_fully_connected("w", None, "linear")
    lc.register_normal_predictive_distribution("linear")
    lc.check_registration()
    assert [region_of(use) for use in block.registration.uses] == [((0, 1), (0, 2), (0, 3)), ((0, 1), (2, 4), (0, 3))]


def test_what_was_registered_whole_leaves_its_partner_in_one_piece() -> None:
    lc = with_loss(Halves())
    lc.register_generic("b")
    assert set(lc.auto_register_layers()) == {("w[0:2]",), ("w[2:5]",), ("head.weight", "head.bias")}
    lc.check_registration()


def test_slices_beside_frozen_slices_are_structured() -> None:
    lc = with_loss(Halves(learned_bias=False))
    assert set(lc.auto_register_layers()) == {("w[0:2]",), ("w[2:5]",), ("head.weight", "head.bias")}
    assert {type(block).__name__ for block in lc.get_blocks()} == {"FullyConnectedKFACBasicFB"}


def test_only_the_pieces_in_the_list_are_scanned_and_the_rest_is_missed() -> None:
    lc = with_loss(Halves())
    assert set(lc.auto_register_layers(["w[0:2]"])) == {("w[0:2]",)}
    raises(RegistrationError, r"w\[2:5\] is not registered; it is used in linear_1", lc.check_registration, ["w"])
    text = r"'w\[0:2\]' is a piece; the variables are whole parameters, here w"
    raises(RegistrationError, text, lc.check_registration, ["w[0:2]"])
    assert set(lc.auto_register_layers(["w"])) == {("w[2:5]",)}
    lc.auto_register_layers()
    lc.check_registration()


def test_pieces_that_are_none_or_taken_are_refused() -> None:
    lc = with_loss(Halves())
    register = lc.register_fully_connected
    raises(RegistrationError, r"'w\[0:9\]': w has shape \[5, 3\]", register, "w[0:9]", None, "linear")
    raises(RegistrationError, r"'w\[:, :, 0:1\]': w has shape \[5, 3\]", register, "w[:, :, 0:1]", None, "linear")
    text = r"w\[0:3\] cannot be registered by itself: in the graph's uses w comes as w\[0:2\], w\[2:5\]"
    raises(RegistrationError, text, register, "w[0:3]", None, "linear")
    raises(RegistrationError, r"w\[:, 0:1\] cannot be registered by itself", lc.register_generic, "w[:, 0:1]")
    text = r"no linear layer with w computes linear .*\nThe graph has:\n  linear\(w\[0:2\], b\[0:2\]\)"
    raises(RegistrationError, text, register, "w", None, "linear")
    raises(RegistrationError, "no linear layer with w.2:5. computes linear ", register, "w[2:5]", None, "linear")
    raises(RegistrationError, "a Tensor that is not a trainable parameter", lc.register_generic, torch.zeros(2, 3))
    register(("w[:2]", "b[:2]"), None, "linear")
    raises(RegistrationError, r"variable w\[0:2\] was already registered in key", lc.register_generic, "w")
    raises(RegistrationError, r"variable w\[0:2\] was already registered in key", lc.register_generic, "w[1:4]")
    assert register((lc.model.w[0:2], "b[0:2]"), None, "linear", reuse=True).num_registered_towers == 2
    assert lc.registered_variables == ("w[0:2]", "b[0:2]")


def test_pieces_can_be_linked() -> None:
    lc = with_loss(Halves())
    lc.define_linked_parameters(("w[2:]", "b[2:]"), "diagonal")
    raises(LinkError, "cannot be linked: already part of the linked group", lc.define_linked_parameters, "w")
    lc.auto_register_layers()
    assert lc.fisher_blocks["w[2:5]", "b[2:5]"].approximation == "diagonal"
    assert lc.fisher_blocks["w[0:2]", "b[0:2]"].approximation == "kron"
    apart = with_loss(Halves())
    apart.define_linked_parameters(("w[0:2]", "w[2:5]"))
    raises(LinkError, r"w\[0:2\] +linked with w\[2:5\]; enters linear", apart.auto_register_layers)


def test_pieces_are_the_same_in_another_capture() -> None:
    model = Halves()
    lc = with_loss(model)
    lc.auto_register_layers()
    est = kfac_fx.FisherEstimator(lc, estimation_mode="exact", cov_ema_decay=0.0)
    est.update_covariances(X)
    first = est.blocks["w[0:2]", "b[0:2]"].full_fisher_block().clone()
    est.update_covariances(X[:1])
    model.eval()
    est.update_covariances(X)
    torch.testing.assert_close(est.blocks["w[0:2]", "b[0:2]"].full_fisher_block(), first)


def test_steps_of_packed_sequences_registered_by_hand_leave_the_padding_out() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y: Tensor = self.head(self.rnn(packed)[1][-1])
            return y

    model, inputs = Sequences(), (torch.randn(3, 4, 2), torch.tensor([4, 1, 2]))
    blocks = []
    for by_hand in (False, True):
        lc = LayerCollection(kfac_fx.capture(model, inputs))
        lc.register_categorical_predictive_distribution(lc.outputs_of("head"))
        if by_hand:
            for block in blocks[0]:
                uses = block.registration.uses
                register = lc.register_fully_connected_multi if len(uses) > 1 else lc.register_fully_connected
                nodes = [[lc.node(node.name) for node in (use.input, use.output)] for use in uses]
                params, (given, made) = block.params, zip(*nodes, strict=True)
                register(params, *((list(given), list(made)) if len(uses) > 1 else (given[0], made[0])))
        else:
            lc.auto_register_layers()
        est = kfac_fx.FisherEstimator(lc, estimation_mode="exact")
        est.update_covariances(*inputs)
        blocks.append(list(lc.get_blocks()))
    assert any(len(block.registration.uses) == 4 for block in blocks[0])
    for scanned, manual in zip(*blocks, strict=True):
        torch.testing.assert_close(manual.full_fisher_block(), scanned.full_fisher_block())


@pytest.mark.parametrize(("default", "blocks"), [("kron", (1, 11)), ("kron_in_diag", (1, 1))])
def test_the_scan_keeps_wide_sides_in_blocks(default: str, blocks: tuple[int, int]) -> None:
    lc = LayerCollection(kfac_fx.capture(nn.Linear(30, 8), (torch.randn(5, 30),), dense_limit=10))
    lc.set_default_fully_connected_approximation(default)
    lc.register_categorical_predictive_distribution("linear")
    (block,) = lc.auto_register_layers().values()
    assert (block.approximation, block.registration.blocks) == (default, blocks)
    kfac_fx.FisherEstimator(lc).update_covariances(torch.randn(5, 30))
