"""Running averages, and the one division of the project."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfac_fx.fisher.groups import Factor, Stack, batch_values
from kfac_fx.passes.approximations import APPROXIMATIONS, DIAGONAL, FULL, KRON
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.recording.statistics import additive

YES, NO = torch.tensor([True]), torch.tensor([False])


def scalar() -> Stack:
    return Stack.zeros(1, (), torch.float64, torch.device("cpu"))


def test_average_is_free_of_bias() -> None:
    stack, seen = scalar(), []
    for value in (1.0, 2.0, 4.0):
        stack.update(torch.tensor([value], dtype=torch.float64), YES, 0.5, 1.0)
        seen.append(stack.value.item())
    assert seen == pytest.approx([1, 5 / 3, 3])


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans(), st.floats(0.1, 3)), min_size=1, max_size=8), st.floats(0, 1))
def test_average_is_the_weighted_mean_of_what_was_accepted(
    updates: list[tuple[float, bool, float]], decay: float
) -> None:
    stack = scalar()
    for value, accepted, weight in updates:
        stack.update(torch.tensor([value], dtype=torch.float64), torch.tensor([accepted]), decay, weight)
    taken = [(value, weight) for value, accepted, weight in updates if accepted]
    weights = [weight * decay ** (len(taken) - 1 - k) for k, (_, weight) in enumerate(taken)]
    assert stack.total_weight.item() == pytest.approx(sum(weights))
    assert stack.moment.item() == pytest.approx(sum(w * v for w, (v, _) in zip(weights, taken, strict=True)), abs=1e-9)


def test_what_is_not_accepted_does_not_touch_the_average() -> None:
    stack = scalar()
    stack.update(torch.tensor([3.0], dtype=torch.float64), YES, 0.5, 1.0)
    stack.update(torch.tensor([torch.nan], dtype=torch.float64), NO, 0.5, 1.0)
    assert (stack.moment.item(), stack.total_weight.item()) == (3.0, 1.0)


def test_decay_one_is_a_plain_average() -> None:
    stack = scalar()
    for value in (1.0, 2.0, 6.0):
        stack.update(torch.tensor([value], dtype=torch.float64), YES, 1.0, 1.0)
    assert stack.value.item() == 3.0


def test_a_factor_is_a_view_into_its_stack() -> None:
    stack = Stack.zeros(2, (3,), torch.float64, torch.device("cpu"))
    factor = Factor("A", "linear(w)", stack, 1)
    factor.moment.fill_(6.0)
    factor.total_weight.fill_(2.0)
    assert factor.value.tolist() == [3.0, 3.0, 3.0]
    assert stack.moment.tolist() == [[0.0] * 3, [6.0] * 3]


def test_reading_before_the_first_update_says_what_to_call() -> None:
    factor = Factor("A", "linear(fc.weight)", scalar(), 0)
    text = (
        r"factor A of linear\(fc\.weight\) read before its first update: call estimator\.update_covariances\(inputs\) "
        r"first, or estimator\.fold\(\) if batches were recorded with fold=False\."
    )
    with pytest.raises(FactorNotReady, match=text):
        _ = factor.value


def test_kronecker_factors_are_means_over_rows_and_count_their_positions() -> None:
    sums = {"count": torch.tensor([8.0]), "A": torch.full((1, 1, 2, 2), 16.0), "G": torch.full((1, 1, 3, 3), 4.0)}
    values = batch_values(KRON, sums, cases=4)
    assert values["positions"].tolist() == [2.0]
    assert (values["A"] == 2.0).all() and (values["G"] == 0.5).all()


def test_generic_blocks_square_the_gradient_of_the_sum() -> None:
    sums = {"gradient": torch.tensor([[1.0, 2.0]])}
    assert batch_values(FULL, sums, cases=2)["F"].tolist() == [[[0.5, 1.0], [1.0, 2.0]]]
    assert batch_values(DIAGONAL, sums, cases=2)["F"].tolist() == [[0.5, 2.0]]


def test_generic_blocks_sum_over_cotangents() -> None:
    sums = {"gradient": torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])}
    assert batch_values(FULL, sums, cases=2)["F"].tolist() == [[[5.0, 1.0], [1.0, 2.0]]]
    assert batch_values(DIAGONAL, sums, cases=2)["F"].tolist() == [[5.0, 2.0]]


def test_per_case_gradients_become_sums() -> None:
    p = torch.tensor([[1.0, 0.0, -3.0], [8.0, 5.0, 0.0]])
    torch.testing.assert_close(additive(FULL, {"per_case": p})["outer"], p.mT @ p)
    torch.testing.assert_close(additive(DIAGONAL, {"per_case": p})["square"], torch.tensor([65.0, 25.0, 9.0]))


def test_sums_over_parts_of_a_batch_are_those_of_the_whole() -> None:
    p = torch.randn(6, 4, dtype=torch.float64)
    for approximation, name in ((FULL, "outer"), (DIAGONAL, "square")):
        parts = [additive(approximation, {"per_case": part})[name] for part in (p[:2], p[2:])]
        torch.testing.assert_close(parts[0] + parts[1], additive(approximation, {"per_case": p})[name])


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_the_statistic_of_a_side_has_the_shape_of_its_factor(approximation: str) -> None:
    left, right = APPROXIMATIONS[approximation].left, APPROXIMATIONS[approximation].right
    matrix = (2, 3, 4)
    if right is None:
        assert left.statistic.shape(matrix) == (matrix if left.diagonal else (24, 24))
        return
    assert left.statistic.shape(matrix) == ((2, 3) if left.diagonal else (2, 3, 3))
    assert right.statistic.shape(matrix) == ((2, 4) if right.diagonal else (2, 4, 4))


def test_the_mean_of_a_single_row_is_the_row() -> None:
    sums = {"count": torch.tensor([1.0]), "A": torch.full((1, 1, 1, 1), 6.0), "G": torch.full((1, 1, 1, 1), 4.0)}
    values = batch_values(KRON, sums, cases=2)
    assert (values["A"].item(), values["G"].item(), values["positions"].item()) == (6.0, 4.0, 0.5)


def test_a_block_that_starts_anew_drops_its_past() -> None:
    stack = Stack.zeros(2, (), torch.float64, torch.device("cpu"))
    both, anew = torch.tensor([True, True]), torch.tensor([True, False])
    for value in (2.0, 8.0):
        stack.update(torch.full((2,), value, dtype=torch.float64), both, 1.0, 1.0, anew)
    assert stack.value.tolist() == [8.0, 5.0]


@pytest.mark.parametrize("anew", [None, [False, False], [True, False], [True, True]])
@pytest.mark.parametrize("accepted", [[True, True], [True, False]])
def test_a_decay_that_is_a_number_is_one_for_all_blocks(accepted: list[bool], anew: list[bool] | None) -> None:
    of_number, of_tensor = (Stack.zeros(2, (3,), torch.float64, torch.device("cpu")) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        batch = torch.randn(2, 3, dtype=torch.float64, generator=generator)
        flags = torch.tensor(accepted) if number else torch.tensor([True, True])
        past = None if anew is None else torch.tensor(anew)
        of_number.update(batch.clone(), flags, 0.7, 2.0, past)
        of_tensor.update(batch.clone(), flags, torch.full((2,), 0.7, dtype=torch.float64), 2.0, past)
    torch.testing.assert_close(of_number.moment, of_tensor.moment)
    torch.testing.assert_close(of_number.total_weight, of_tensor.total_weight)
