"""The owners of blocks: kfac_fx/fisher/placement.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kfac_fx
from kfac_fx.fisher.block import make_groups
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.placement import BlockOwners, loads_of, longest_processing_time, makespan, most
from kfac_fx.linalg.processes import Replicas


class Group(Replicas):
    """A group of processes that sends no messages."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    @property
    def number(self) -> int:
        return self._number


class Several(nn.Module):
    """One large layer, and many small ones."""

    def __init__(self, large: int, small: int) -> None:
        super().__init__()
        self.large = nn.Linear(large, large)
        self.small = nn.ModuleList(nn.Linear(3, 3) for _ in range(small))

    def forward(self, x: Tensor) -> Tensor:
        y = self.large(x)
        return y + sum(layer(x[:, :3]).sum() for layer in self.small)


def blocks_of(model: nn.Module, *inputs: Tensor) -> list[BlockGroup]:
    net = kfac_fx.compile(model, inputs, loss="normal")
    parameters, damping = dict(net.named_parameters()), torch.zeros(())
    return [make_groups([r], parameters, roots=[-1.0], damping=damping)[0] for r in net.registrations]


def test_the_cost_of_a_block_is_that_of_its_decompositions() -> None:
    (block,) = blocks_of(nn.Linear(4, 3), torch.zeros(2, 4))
    assert block.cost == 5**3 + 3**3
    assert block.elements == 2 * (5**2 + 3**2) + 1  # factors, inverses, and the number of positions


def blocks_of_sizes(sizes: Sequence[tuple[int, int]]) -> list[Any]:
    """Blocks of the given costs and elements, of one parameter each."""
    return [
        SimpleNamespace(
            cost=cost, elements=elements, shape=(1, 1, 1), registrations=[SimpleNamespace(owners=(f"{n}",))]
        )
        for n, (cost, elements) in enumerate(sizes)
    ]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)), min_size=1, max_size=12), st.integers(1, 4))
def test_no_process_has_more_than_its_part_and_a_largest_block(sizes: list[tuple[int, int]], number: int) -> None:
    owners = BlockOwners(Group(number), "owners").assign(blocks_of_sizes(sizes), {})
    elements = [elements for _, elements in sizes]
    assert max(loads_of(elements, owners, number)) <= most(elements, number)


def test_many_small_blocks_are_not_all_in_one_process() -> None:
    sizes = [(1000, 10), *[(1, 1)] * 100]
    elements, costs = [elements for _, elements in sizes], [cost + elements for cost, elements in sizes]
    assert makespan(elements, longest_processing_time(costs, 2), 2) == 100  # by costs alone
    owners = BlockOwners(Group(2), "owners").assign(blocks_of_sizes(sizes), {})
    assert loads_of(elements, owners, 2) == [55, 55]


def test_large_blocks_come_first_and_blocks_in_turn_do_not() -> None:
    blocks = blocks_of(Several(8, 3), torch.zeros(2, 8))
    assert BlockOwners(Group(2), "round_robin").assign(blocks, {}) == [0, 1, 0, 1]
    assert BlockOwners(Group(2), "owners").assign(blocks, {}) == [0, 1, 1, 1]


class Halves(nn.Module):
    """The two halves of a weight are two blocks of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 4)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(x @ self.weight[:3].T) * torch.sigmoid(x @ self.weight[3:].T))
        return y


def test_blocks_with_a_parameter_in_common_have_one_owner() -> None:
    blocks = blocks_of(Halves(), torch.zeros(5, 4))
    names = [block.registrations[0].parameters for block in blocks]
    assert names == [("weight[0:3]",), ("weight[3:6]",), ("last.weight", "last.bias")]
    for strategy in ("owners", "round_robin"):
        first, second, last = BlockOwners(Group(2), strategy).assign(blocks, {})
        assert first == second != last


def test_a_parameter_keeps_its_owner() -> None:
    blocks = blocks_of(Several(8, 3), torch.zeros(2, 8))
    owners = BlockOwners(Group(2), "owners").assign(blocks, {"large.weight": 1, "small.0.bias": 0})
    assert owners[:2] == [1, 0]
    assert sorted(owners[2:]) == [0, 1]


def test_owners_are_chosen_by_all_that_a_block_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bases, the eigenvalues and both means of "eigen_moments", too."""
    net = kfac_fx.compile(Several(8, 3), (torch.zeros(2, 8),), loss="normal")
    estimator = kfac_fx.KFAC(net, lr=0.1, momentum_type="eigen_moments", placement="owners").estimator
    seen: list[int] = []
    assign = BlockOwners.assign

    def watched(owners: BlockOwners, blocks: Sequence[BlockGroup], known: Any) -> list[int]:
        seen.extend(block.elements for block in blocks)
        return assign(owners, blocks, known)

    monkeypatch.setattr(BlockOwners, "assign", watched)
    estimator.build()
    assert sum(seen) == sum(group.elements for group in estimator.groups)
    # Factors and bases, eigenvalues, both means with their weights, and positions.
    assert max(seen) == 2 * (9**2 + 8**2) + 9 + 8 + 2 * (8 * 9 + 1) + 1


@pytest.mark.parametrize("wrong", ["owner", ""])
def test_an_unknown_placement_is_refused(wrong: str) -> None:
    net = kfac_fx.compile(nn.Linear(2, 2), (torch.zeros(3, 2),), loss="normal")
    with pytest.raises(ValueError, match="placement .* is none of 'replicated', 'owners', 'round_robin'"):
        kfac_fx.KFAC(net, placement=wrong)  # type: ignore[arg-type]


def test_one_process_keeps_all_its_blocks() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    weights = []
    for placement in ("replicated", "owners"):
        torch.manual_seed(0)
        net = kfac_fx.compile(Halves(), (x,), loss="normal")
        opt = kfac_fx.KFAC(net, placement=placement, seed=0)
        for _ in range(3):
            opt.zero_grad()
            net(x).square().sum(1).mean().backward()
            opt.step()
        assert all(group.here for group in opt.estimator.groups)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    assert torch.equal(*weights)


def test_blocks_that_share_a_parameter_go_to_its_owner_together() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, self.weight[:3])), self.weight[3:])

    blocks = blocks_of(Halves(), torch.randn(4, 3))
    assert BlockOwners(Group(4), "owners").assign(blocks, {"weight": 2}) == [2, 2]
