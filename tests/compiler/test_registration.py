"""Uses and registrations as plain data: matrices, attributes, and what follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from kfac_fx.passes.ir import Bound, Registration, Sampling, Use, literal_attrs, tensor_attrs
from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrization import Computed, Piece, Transposed
from kfac_fx.passes.parametrizations.tables import Gathered

GRAPH = fx.Graph()
X, Y, Z = (GRAPH.placeholder(name) for name in "xyz")
CONV = Layout((6, 2, 3, 3))
WEIGHT = Bound("w", CONV, CONV.rearrange("o c h w -> 1 o (c h w)"))
BIAS = Bound("b", Layout((6,)), Layout((6,)).reshape((1, 6)))


def use_of(**changes: Any) -> Use:
    attrs = {"weight": (6, 2, 3, 3), "stride": (1, 1)}
    use = Use("conv2d", 0, X, Y, {"weight": WEIGHT, "bias": BIAS}, attrs, frozenset({Y}))
    return replace(use, **changes)


def registration_of(*uses: Use, approximation: str = "kron", **fields: Any) -> Registration:
    return Registration("conv2d", uses[0].matrix, ("w", "b"), uses, approximation, **fields)


# --- uses -----------------------------------------------------------------------------------------------------------


def test_the_matrix_of_a_use_is_that_of_its_roles() -> None:
    use = use_of()
    assert use.matrix.parameters == ("w", "b") and use.matrix.shape == (1, 6, 19)
    weight, bias = torch.randn(6, 2, 3, 3), torch.randn(6)
    packed = use.matrix.pack({"w": weight, "b": bias})
    assert torch.equal(packed[0, 4], torch.cat([weight[4].flatten(), bias[4:5]]))
    assert use_of(parameters={"bias": BIAS}).matrix.shape == (1, 6, 1)
    assert str(use) == "conv2d(w, b)" and use.parameter_set == {"w", "b"}


def test_a_layout_leads_through_the_tensor_that_is_used_to_the_matrix() -> None:
    used = Layout((3, 5)).rearrange("i o -> o i")
    bound = Bound("w", used, Layout((5, 3)).reshape((1, 5, 3)))
    tensor = torch.randn(3, 5)
    assert bound.layout.shape == (3, 5) and torch.equal(bound.layout.apply(tensor)[0], tensor.mT)


def test_attributes_are_tensors_or_literals_and_those_for_matching_are_neither() -> None:
    computed = Computed(torch.t, (X,))
    gathered = Gathered(Z, "outputs", 5)
    attrs = {"eps": 1e-5, "mean": Z, "kept": computed, "other": Z, "_base": Z}
    use = use_of(attrs=attrs, through=(Transposed(), gathered))
    assert tensor_attrs(use) == {
        "mean": Z,
        "kept": computed,
        **{f"1.{key}": node for key, node in gathered.nodes.items()},
    }
    assert literal_attrs(use) == {"eps": 1e-5}


def test_a_use_is_transposed_or_independent_of_the_batch_by_what_it_holds() -> None:
    assert not use_of().transposed and use_of(through=(Transposed(),)).transposed
    assert not use_of().batch_independent and use_of(attrs={"cases": X}).batch_independent


# --- registrations --------------------------------------------------------------------------------------------------


def test_pieces_belong_to_the_parameters_of_the_model() -> None:
    pieces = Piece("w", 0, 0, 2), Piece("w", 0, 2, 6)
    names = (pieces[0].name, pieces[1].name, "b")
    registration = replace(registration_of(use_of()), parameters=names, pieces=pieces)
    assert names[0] == "w[0:2]" and registration.owners == ("w", "b")


@pytest.mark.parametrize(
    ("towers", "called", "single"),
    [
        ((0,), False, True),
        ((0, 1), False, True),
        ((0, 0), False, False),
        ((0, 1, 1), False, False),
        ((0,), True, False),
    ],
)
def test_a_case_has_one_use_if_every_tower_has(towers: tuple[int, ...], called: bool, single: bool) -> None:
    registration = registration_of(*(use_of(tower=tower) for tower in towers), called=called)
    assert registration.one_use_a_case is single
    assert registration.towers == 1 + max(towers)


def test_the_steps_of_a_case_are_those_of_one_tower() -> None:
    assert registration_of(use_of(steps=3), use_of(steps=2), use_of(tower=1, steps=7)).steps == 5


def test_rows_are_those_of_the_matrix_or_of_pixels_with_a_column_of_ones() -> None:
    assert registration_of(use_of()).rows == ((1, 6, 19), True)
    assert registration_of(use_of(parameters={"weight": WEIGHT})).rows == ((1, 6, 18), False)
    pixels = registration_of(use_of(), approximation="kron_sua")
    assert pixels.kernel == 9 and pixels.rows == ((1, 6, 3), True)
    assert registration_of(use_of(parameters={"weight": WEIGHT}), approximation="kron_sua").rows == ((1, 6, 3), True)


def test_a_generic_registration_has_no_matrix() -> None:
    generic = Registration("generic", None, ("w",), (), "diagonal")
    assert generic.generic and generic.towers == 1 and str(generic) == "generic(w)"
    assert not registration_of(use_of()).generic


@pytest.mark.parametrize(
    ("sampling", "text"),
    [(Sampling(0.25), "25% of the cases"), (Sampling(1.0, 3.0), "100% of the cases, at most 3 rows an input")],
)
def test_a_sample_in_words(sampling: Sampling, text: str) -> None:
    assert str(sampling) == text
