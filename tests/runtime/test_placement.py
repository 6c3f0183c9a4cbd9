"""The owner of every block: kfac_fx/fisher/placement.py."""

from itertools import product
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfac_fx.fisher.placement import loads_of, longest_processing_time, makespan, round_robin

COSTS = st.lists(st.integers(0, 50), max_size=7)
RANKS = st.integers(1, 3)


@given(COSTS, RANKS)
def test_longest_processing_time_is_within_a_third_of_the_optimum(costs: list[float], ranks: int) -> None:
    best = min(makespan(costs, owners, ranks) for owners in product(range(ranks), repeat=len(costs)))
    assert 3 * ranks * makespan(costs, longest_processing_time(costs, ranks), ranks) <= (4 * ranks - 1) * best


def test_the_bound_is_reached() -> None:
    """Graham's example for two processes: 7 where 6 can be had, which is 4/3 - 1/6 of it."""
    costs = [3, 3, 2, 2, 2]
    assert makespan(costs, longest_processing_time(costs, 2), 2) == 7
    assert makespan(costs, (0, 0, 1, 1, 1), 2) == 6


@given(st.lists(st.floats(0, 1e30)), st.integers(1, 9))
def test_every_block_has_one_owner_and_loads_add_up(costs: list[float], ranks: int) -> None:
    for place in (longest_processing_time, round_robin):
        owners = place(costs, ranks)
        assert len(owners) == len(costs)
        assert set(owners) <= set(range(ranks))
        assert sum(loads_of(costs, owners, ranks)) == pytest.approx(sum(costs))


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 9))
def test_no_process_idles_while_another_has_two_blocks(costs: list[float], ranks: int) -> None:
    owners = longest_processing_time(costs, ranks)
    assert len(set(owners)) == min(ranks, len(costs))


def test_ties_go_to_the_first() -> None:
    assert longest_processing_time([1, 1, 1, 1, 1], 3) == (0, 1, 2, 0, 1)
    assert longest_processing_time([1, 5, 1], 2) == (1, 0, 1)


def test_round_robin_ignores_the_costs() -> None:
    assert round_robin([9, 1, 9, 1, 1], 2) == (0, 1, 0, 1, 0)


@pytest.mark.parametrize("place", [longest_processing_time, round_robin])
def test_wrong_arguments_are_refused_all_at_once(place) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="`ranks` is 0; give the number of processes"):
        place([1], 0)
    with pytest.raises(ValueError, match="block 1: -2, block 3: nan$"):
        place([1, -2, inf, nan], 2)
