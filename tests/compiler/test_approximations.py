"""The table of approximations: every row names what exists elsewhere, and its questions have the right answers."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from kfac_fx.compiled.fisher_blocks import KINDS
from kfac_fx.fisher.block import group_class
from kfac_fx.fisher.block_diagonal import WideGroup
from kfac_fx.passes import approximations
from kfac_fx.passes.approximations import (
    APPROXIMATIONS,
    EVERY_LAYER,
    FROM_PIXELS,
    KRON,
    OUTPUTS,
    STATISTICS,
    Algebra,
    Approximation,
    G,
    check_filled,
)
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.passes.resolve import check_needs

every_approximation = pytest.mark.parametrize("approximation", APPROXIMATIONS.values(), ids=APPROXIMATIONS)
MATRIX = MatrixForm(("w", Layout((1, 3, 2))), None)


def registration(name: str) -> Registration:
    return Registration("linear", MATRIX, ("w",), (), name)


@every_approximation
def test_a_row_names_statistics_groups_and_kinds_that_exist(approximation: Approximation) -> None:
    assert group_class(registration(approximation.name)) is approximation.algebra.group
    assert approximation.kinds and set(approximation.kinds) <= KINDS.keys()


@every_approximation
def test_every_kind_of_a_row_accepts_it_under_one_of_its_names(approximation: Approximation) -> None:
    for name in approximation.kinds:
        kind = KINDS[name]
        tf_name = approximation.multi_name or approximation.name
        assert kind.ours(tf_name if kind.multi else approximation.name) == approximation.name


@every_approximation
def test_a_registration_knows_the_row_of_its_name_and_pickles_without_it(approximation: Approximation) -> None:
    one = registration(approximation.name)
    assert one.structure is approximation
    assert str(one) == "linear(w)"
    copied = pickle.loads(pickle.dumps(one))
    assert copied == one and copied.structure is approximation


def test_every_row_that_is_written_is_in_the_table() -> None:
    written = {of.name for of in vars(approximations).values() if isinstance(of, Approximation)}
    assert written == APPROXIMATIONS.keys(), "add the row to APPROXIMATIONS in passes/approximations.py"


def test_a_row_that_nothing_fills_in_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_filled()
    uncomputed = replace(G, name="G/new", kind_of=G)
    row = replace(KRON, name="new", left=replace(OUTPUTS, statistic=uncomputed), algebra=Algebra("new blocks"))
    monkeypatch.setitem(APPROXIMATIONS, "new", row)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="no module that is imported fills in new blocks, G/new: write @computes"):
        check_filled()
    for name in ("G/new", "G/new/turned"):
        del STATISTICS[name]


def test_a_need_that_no_use_is_asked_for_is_an_error() -> None:
    text = (
        r"new needs 'case'\. Did you mean 'cases'\? The keys of needs= in passes/approximations.py are batch, cases, "
    )
    with pytest.raises(AssertionError, match=text):
        check_needs([replace(KRON, name="new", needs={"case": "it has none"})])


def test_the_kinds_of_layers_are_those_of_a_layer_collection() -> None:
    assert {layer.tf_kind for layer in LAYERS.values()} - {None} <= KINDS.keys(), "correct tf_kind= of the layer"


def test_a_name_that_is_in_no_row_is_an_error() -> None:
    with pytest.raises(KeyError, match="kro"):
        _ = registration("kro").structure


def test_sides_that_are_cut_into_blocks_have_a_group_of_their_own() -> None:
    assert group_class(replace(registration(KRON.name), blocks=(2, 1))) is WideGroup


def test_layers_of_ids_have_what_every_layer_has_and_convolutions_what_is_made_of_pixels() -> None:
    for name, layer in LAYERS.items():
        ids = name in ("embedding", "embedding_bag", "experts")
        assert layer.dense_rows is not (ids or bool(layer.parts)), name
        if not layer.parts:
            assert set(EVERY_LAYER) <= set(layer.approximations)
            pixels = [form.pixels is not None for form in layer.forms]
            assert pixels == [set(FROM_PIXELS) <= set(layer.approximations)] * len(layer.forms)


def test_diagonal_sides_are_those_of_a_product() -> None:
    diagonal = {
        name: (approximation.diagonal_outputs, approximation.diagonal_inputs)
        for name, approximation in APPROXIMATIONS.items()
    }
    assert {name: sides for name, sides in diagonal.items() if any(sides)} == {
        "kron_in_diag": (False, True),
        "kron_out_diag": (True, False),
        "kron_both_diag": (True, True),
    }
