"""How the vectors of a step are divided: kfac_fx/fisher/placement.py. Several processes train in test_owners.py and
test_fsdp.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.fisher.placement import UNDIVIDED, DivisionByOwners, VectorDivision
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.groups import FlatParameters, GroupedParameters, Preconditioner
from kfac_fx.optim.rules import Regular

OWNERS = {"a": 1, "b": 0, "c": 1}
PARAMETERS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0), "c": torch.tensor([2.0, 5.0])}


class FirstOfTwo(Replicas):
    """The first of two processes. The second one sends what is given."""

    def __init__(self, sent: dict[str, Tensor]) -> None:
        super().__init__()
        self.sent = sent

    @property
    def number(self) -> int:
        return 2

    @property
    def rank(self) -> int:
        return 0

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor + 100 for tensor in tensors]

    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        assert [[list(tensor.shape) for tensor in of_process] for of_process in like] == [[[4]], [[2, 3], [2]]]
        return [*tensors, self.sent["a"], self.sent["c"]]


@pytest.fixture
def by_owners() -> DivisionByOwners:
    return DivisionByOwners(FirstOfTwo({name: -tensor for name, tensor in PARAMETERS.items()}), OWNERS)


def flat_of(division: VectorDivision) -> tuple[FlatParameters, dict[Any, Any], dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in PARAMETERS.items()}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    group = {"params": [*parameters.values()], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "first_order": False}
    names = {parameter: name for name, parameter in parameters.items()}
    grouped = GroupedParameters.of([group], names, torch.zeros(()), Regular(damping=1.0).new_state, division)
    grouped.refresh([group], names)
    states: dict[Any, Any] = {parameter: {} for parameter in parameters.values()}
    flat = grouped.flat(False, states)
    assert flat is not None
    return flat, states, parameters


def test_whole_vectors_are_what_they_are() -> None:
    assert all(UNDIVIDED.keeps(name) and UNDIVIDED.multiplies(name) for name in PARAMETERS)
    for name, parameter in PARAMETERS.items():
        assert UNDIVIDED.part(name, parameter) is parameter and UNDIVIDED.in_blocks(name, parameter) == parameter.shape
    for result in (
        UNDIVIDED.to_blocks(PARAMETERS),
        UNDIVIDED.from_blocks(PARAMETERS, {}),
        UNDIVIDED.to_copies(PARAMETERS, {}),
    ):
        assert result is PARAMETERS
    assert UNDIVIDED.total(PARAMETERS["a"]) is PARAMETERS["a"]


def test_a_process_has_state_of_the_parameters_that_it_owns_and_of_no_others(by_owners: DivisionByOwners) -> None:
    flat, states, parameters = flat_of(by_owners)
    assert flat.g.tolist() == [1, 1, 1, 1]
    assert {name: list(part.shape) for name, part in flat.parameters.items()} == {"a": [0], "b": [4], "c": [0]}
    assert {name: [*states[parameter]] for name, parameter in parameters.items()} == {
        "a": [],
        "b": ["velocity"],
        "c": [],
    }


def test_the_blocks_of_a_process_multiply_its_parts(by_owners: DivisionByOwners) -> None:
    flat, _, _ = flat_of(by_owners)
    seen: dict[str, Tensor] = {}

    def multiply(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(vector)
        return {name: 3 * tensor for name, tensor in vector.items()}

    product = Preconditioner(multiply, flat.flat, {}, by_owners)(torch.arange(4.0))
    assert [*seen] == ["b"] and product.tolist() == [0, 3, 6, 9]


def test_the_moves_of_all_owners_reach_all_copies(by_owners: DivisionByOwners) -> None:
    flat, _, parameters = flat_of(by_owners)
    with torch.no_grad():
        flat.commit(torch.full((4,), 2.0), {"velocity": torch.full((4,), 7.0)}, torch.tensor(True))
    assert parameters["b"].tolist() == [2, 3, 4, 5]
    assert not parameters["a"].any() and not parameters["c"].any()  # the other process sent -a and -c
    assert flat.state["velocity"].tolist() == [7, 7, 7, 7]


def test_inner_products_are_sums_over_processes(by_owners: DivisionByOwners) -> None:
    flat, _, _ = flat_of(by_owners)
    assert flat.inner(flat.g, flat.g) == 104
    assert flat.gradient_is_finite() and flat.has_gradient()
    infinite = replace(flat, gradients={name: g / 0 for name, g in flat.gradients.items()})
    assert not infinite.gradient_is_finite()


def test_a_process_that_owns_nothing_has_empty_vectors(by_owners: DivisionByOwners) -> None:
    flat, states, _ = flat_of(DivisionByOwners(by_owners.replicas, dict.fromkeys(OWNERS, 1)))
    assert flat.g.tolist() == [] and flat.one_scale and not any(states.values())
    assert flat.inner(flat.g, flat.g) == 100
