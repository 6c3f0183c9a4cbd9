"""Registering again: `reuse`, and blocks that are filed under their parameters."""

from __future__ import annotations

import pytest

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import (
    ConvKFCBasicFB,
    FisherBlock,
    FullyConnectedKFACBasicFB,
    NaiveFullFB,
)
from kfac_fx.passes.errors import ApproximationError, RegistrationError, ReuseError
from tests.runtime.collections_of_toys import BOTH, W, affine, collection, fully_connected

# --- reuse ----------------------------------------------------------------------------------------------------------


def test_a_second_registration_needs_reuse() -> None:
    lc = affine()
    fully_connected(lc)
    with pytest.raises(ReuseError, match=r"FisherBlock for \(w, b\) is already in LayerCollection"):
        fully_connected(lc, reuse=False)
    with pytest.raises(ReuseError, match="already in LayerCollection"):
        fully_connected(lc)
    with pytest.raises(ValueError, match="already in LayerCollection"):
        lc.register_generic(BOTH)
    fully_connected(lc, reuse=True)
    fully_connected(lc, reuse=kfac_fx.AUTO_REUSE)
    with kfac_fx.variable_scope(reuse=True):
        fully_connected(lc)
        fully_connected(lc, reuse=kfac_fx.VARIABLE_SCOPE)
    assert lc.fisher_blocks[BOTH].num_registered_towers == 5


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_reuse_of_nothing_is_a_key_error_and_a_value_error(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"reuse=True, but no FisherBlock for \(w, b\) was registered"):
        fully_connected(affine(), reuse=True)


def test_reuse_of_another_approximation_is_refused() -> None:
    lc = affine()
    fully_connected(lc, approx="kron")
    for other in ("diagonal", "kron_in_diag"):
        with pytest.raises(ValueError, match=r"Attempted to register FisherBlock of type .* \(w, b\), which has Fully"):
            fully_connected(lc, approx=other, reuse=True)


def test_reuse_of_other_parameters_changes_nothing() -> None:
    lc = affine()
    first = lc.register_fully_connected(W, "x", "matmul")
    with pytest.raises(ValueError, match="reuse=True, but no FisherBlock"):
        fully_connected(lc, reuse=True)
    assert BOTH not in lc.fisher_blocks and first.num_registered_towers == 1
    lc.register_fully_connected(W, "x", "matmul", reuse=True)
    assert first.num_registered_towers == first.num_registered_minibatches == 2


def test_an_unknown_reuse_is_refused() -> None:
    with pytest.raises(ValueError, match="reuse='yes' is none of True, False, AUTO_REUSE and VARIABLE_SCOPE"):
        fully_connected(affine(), reuse="yes")
    fully_connected(affine(), reuse=None)


# --- register_block -------------------------------------------------------------------------------------------------


def names() -> LayerCollection:
    return collection(lambda x, **p: sum(p.values(), x), x_=(3,), y=(3,), z=(3,), w=(3,))


def block(lc: LayerCollection, *params: str) -> FisherBlock:
    return lc.register_block(params, NaiveFullFB(lc, params))


def test_blocks_of_other_parameters_do_not_meet() -> None:
    lc = names()
    block(lc, "y")
    block(lc, "x_")
    block(lc, "z", "w")
    assert list(lc.fisher_blocks) == [("y",), ("x_",), ("z", "w")]


@pytest.mark.parametrize(
    ("known", "new", "text"),
    [
        ([("x_",)], ("x_",), "already in LayerCollection"),
        ([("x_", "y")], ("x_",), "variable x_ was already registered in key"),
        ([("x_", "y")], ("x_", "y"), "already in LayerCollection"),
        ([("x_", "y", "z")], ("x_", "y"), "was already registered"),
        ([("x_",), ("z",)], ("x_", "y"), "was already registered"),
        ([("x_", "z"), ("w",)], ("x_", "y"), "was already registered"),
    ],
)
def test_blocks_that_share_parameters_are_refused(
    known: list[tuple[str, ...]], new: tuple[str, ...], text: str
) -> None:
    lc = names()
    for params in known:
        block(lc, *params)
    with pytest.raises(ValueError, match=text):
        block(lc, *new)
    assert list(lc.fisher_blocks) == known


def test_a_block_made_by_hand_finds_its_uses() -> None:
    lc = affine()
    made = FullyConnectedKFACBasicFB(lc, BOTH, "kron_in_diag")
    made.register_additional_tower("x", "add")
    assert lc.register_block(BOTH, made) is made and made.tensors_to_compute_grads() == [[lc.node("add")]]
    assert (made.diagonal_approx_for_input, made.diagonal_approx_for_output) == (True, False)
    with pytest.raises(RegistrationError, match="no conv1d or"):
        ConvKFCBasicFB(lc, BOTH).register_additional_tower("x", "add")
    with pytest.raises(ApproximationError, match="approximation 'full rank' is none of 'kron', "):
        FullyConnectedKFACBasicFB(lc, BOTH, "full rank")
