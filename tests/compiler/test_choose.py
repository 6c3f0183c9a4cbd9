"""Which approximation a registration gets, and what wins over what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx import ApproximationError
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.passes.parametrizations import functions
from kfac_fx.passes.resolve import narrow, owners, resolve
from tests.compiler.toy import Toy, before


def net() -> nn.Module:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
            self.again = self.blocks[1]

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Blocks()


def registered(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, Registration]:
    """By the module of the first parameter."""
    program = resolve(before("resolve", model, *inputs, **options))
    return {owners(registration.parameters[0])[0]: registration for registration in program.registrations}


def chosen(**options: Any) -> list[str]:
    return [registration.approximation for registration in registered(net(), **options).values()]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ["kron", "kron", "kron", "kron"]),
        ({"linear": "diagonal"}, ["diagonal"] * 4),
        ({nn.Linear: "full", "linear": "diagonal"}, ["full"] * 4),
        ({"blocks.1.*": "full", nn.Linear: "diagonal"}, ["diagonal", "diagonal", "full", "full"]),
        ({"again.0": "full"}, ["kron", "kron", "full", "kron"]),  # another name of blocks.1.0
        ({"blocks.0": "diagonal", "blocks.0.2": "full", "*": "kron"}, ["diagonal", "full", "kron", "kron"]),
        ({"blocks.0.2.bias": "full", "blocks.0.2": "kron"}, ["kron", "full", "kron", "kron"]),
        ({"blocks.0.0": "kron_out_diag"}, ["kron_out_diag", "kron", "kron", "kron"]),
    ],
)
def test_the_more_specific_key_wins(asked: dict[Any, str], expected: list[str]) -> None:
    assert chosen(approximations=asked) == expected


def test_a_linked_group_may_have_one_and_keys_of_names_win_over_it() -> None:
    group = frozenset({"blocks.0.0.weight", "blocks.0.0.bias"})
    assert chosen(linked={group: "diagonal"})[0] == "diagonal"
    assert chosen(linked={group: "diagonal"}, approximations={nn.Linear: "full"})[:2] == ["diagonal", "full"]
    assert chosen(linked={group: "diagonal"}, approximations={"blocks.0.0": "full"})[0] == "full"


def test_contradictions_and_what_a_layer_has_not_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAYERS["layer_norm"], "approximations", ("full", "diagonal"))
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ApproximationError) as failure:
        registered(model, approximations={"0.weight": "full", "0.bias": "diagonal", "1": "kron"})
    assert str(failure.value).splitlines() == [
        "approximations that cannot be honored:",
        "  0.bias, 0.weight  is asked to be diagonal and full",
        "  1.bias, 1.weight  layer_norm has no 'kron', but full, diagonal, generic",
    ]


def test_the_layers_own_default() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    found = registered(model)
    assert [registration.approximation for registration in found.values()] == ["kron_in_diag", "full", "kron"]
    assert all(registration.reason is None for registration in found.values())


def test_several_uses_are_taken_as_independent() -> None:
    model = nn.Sequential(first := nn.Linear(4, 4), nn.Tanh(), first)
    assert registered(model)["0"].approximation == "kron_indep"


def test_wide_sides_are_cut_into_blocks_within_the_memory_of_the_widest_dense_side() -> None:
    model = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 9), nn.Linear(9, 17), nn.LayerNorm(17))
    found = registered(model, dense_limit=6)
    assert [(registration.approximation, registration.blocks) for registration in found.values()] == [
        ("kron", (1, 4)),  # ten columns, with the bias: at most 36 // 10 = 3 at a time
        ("kron", (3, 1)),
        ("kron", (9, 4)),
        ("diagonal", (1, 1)),
    ]
    assert {registration.reason for registration in found.values()} == {"a side is wider than dense_limit=6"}
    asked = registered(model, dense_limit=6, approximations={nn.Linear: "kron", nn.LayerNorm: "full"})
    assert [(registration.approximation, registration.blocks) for registration in asked.values()] == [
        ("kron", (1, 1))
    ] * 3 + [("full", (1, 1))]


def test_a_bias_makes_no_side_too_wide() -> None:
    found = registered(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), dense_limit=6)
    assert [registration.blocks for registration in found.values()] == [(1, 1), (1, 1)]
    assert all(registration.reason is None for registration in found.values())


def test_a_full_block_that_is_too_wide_to_invert_cheaply_becomes_diagonal_unless_it_is_asked_for() -> None:
    narrow_norm, wide_norm = nn.LayerNorm(256), nn.LayerNorm(257)
    found = registered(nn.Sequential(narrow_norm, nn.Linear(256, 257), wide_norm))
    assert [(registration.approximation, registration.reason) for registration in found.values()] == [
        ("full", None),
        ("kron", None),
        (
            "diagonal",
            "its full block would be 514 wide, and the default ends at 512; approximations={name: 'full'} asks for it",
        ),
    ]
    asked = registered(nn.Sequential(nn.LayerNorm(257)), approximations={"layer_norm": "full"})
    assert [registration.approximation for registration in asked.values()] == ["full"]


def test_the_fishers_own_outputs_and_what_is_too_wide_for_blocks_become_diagonal() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 17), nn.Flatten())
    found = registered(model, dense_limit=6)
    assert [(registration.approximation, registration.blocks) for registration in found.values()] == [
        ("kron", (3, 1)),
        ("kron_out_diag", (1, 4)),
    ]
    assert {registration.reason for registration in found.values()} == {"a side is wider than dense_limit=6"}
    (wide,) = registered(nn.Sequential(nn.Linear(19, 6), nn.ReLU()), dense_limit=6).values()
    assert (wide.approximation, wide.blocks) == ("kron_in_diag", (1, 1))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("kron", "kron_in_diag"),
        ("kron_indep", "kron_in_diag"),
        ("kron_out_diag", "kron_both_diag"),
        ("full", "diagonal"),
        ("diagonal", "diagonal"),
    ],
)
def test_narrowing_keeps_what_is_diagonal_already(chosen: str, expected: str) -> None:
    matrix = MatrixForm(("w", Layout((1, 3, 9))), None)
    assert narrow(APPROXIMATIONS[chosen], matrix, 3).name == expected
    assert narrow(APPROXIMATIONS[chosen], matrix, 30).name == chosen


def merged(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, 3) @ w).view(x.shape[0], -1)


@pytest.mark.parametrize(("asked", "expected"), [("full", "kron"), ("diagonal", "kron"), ("kron", "kron")])
def test_cases_that_are_merged_with_positions_have_no_gradient_of_their_own(asked: str, expected: str) -> None:
    program = before("resolve", Toy(merged, w=(3, 2)), torch.randn(5, 4, 3), approximations={"linear": asked})
    (one,) = resolve(program).registrations
    assert one.approximation == expected
    assert one.reason == (
        f"forward merges its cases with positions, as x.flatten(0, 1) does, so not {asked!r}"
        if asked != "kron"
        else None
    )


def test_generics_are_diagonal_or_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)
    model = Toy(lambda x, v, w: x * (v.cumprod(0) + w.cumprod(0)), v=(3,), w=(3,))
    program = before("resolve", model, approximations={"w": "full", "v": "kron"})
    registrations = resolve(program).registrations
    assert [(registration.parameters, registration.approximation) for registration in registrations] == [
        (("v",), "diagonal"), (("w",), "full"),
    ]  # fmt: skip
    program = before("resolve", model, approximations={"generic": "full"})
    assert {registration.approximation for registration in resolve(program).registrations} == {"full"}
