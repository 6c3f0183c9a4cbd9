"""The cost model of a step, and the intervals that it chooses for a stated overhead."""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.fisher import bases
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rule import StepIntervals
from kfac_fx.optim.rules import RULES, EigenMoments
from kfac_fx.optim.schedule import (
    ACCELERATOR,
    ACCELERATOR_IN_HALVES,
    CHECK_FORWARDS,
    CHECK_PASSES,
    HOST,
    PER_CHECK,
    PER_GROUP,
    PER_INVERSE,
    PER_RECORDING,
    PER_TENSOR,
    PER_TRAINING,
    PER_USE,
    PRODUCT,
    LayerFlops,
    Rates,
    StepCosts,
)
from tests.runtime.slow_kfac import batch, mlp

CASES, WIDTHS = 7, (4, 6, 3)
LONGEST = EigenMoments.longest


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def after_a_step(model: nn.Module | None = None, **options: Any) -> KFAC:
    model = perceptron() if model is None else model
    net = compile(model, loss="categorical")
    optimizer = KFAC(net, seed=0, **options)
    F.cross_entropy(net(torch.randn(CASES, 4)), torch.zeros(CASES, dtype=torch.long)).backward()
    optimizer.step()
    return optimizer


def costs_of(optimizer: KFAC, rows: float = CASES, **options: Any) -> StepCosts:
    estimator = optimizer.estimator
    counts = dict.fromkeys(estimator.blocks, float(rows))
    return StepCosts.of(optimizer.net.program, estimator.groups, counts, **options)


@pytest.mark.parametrize(("fraction", "in_training"), [(1.0, False), (0.25, False), (1.0, True)])
def test_the_costs_are_those_of_the_layers_and_of_the_operations(fraction: float, in_training: bool) -> None:
    costs = costs_of(after_a_step(), fraction=fraction, in_training=in_training)
    layers = [(i + 1, o) for i, o in itertools.pairwise(WIDTHS)]  # the bias is a column
    products = sum(2 * CASES * i * o for i, o in layers)
    statistics = sum(2 * CASES * (i**2 + o**2) for i, o in layers)
    decompositions = sum(1800 * d**2 + 8.5 * d**3 for layer in layers for d in layer)
    turning_two_means = 2 * sum(2 * i * o * (i + o) for i, o in layers)
    forward = products + 3 * HOST.operation
    assert costs.training == pytest.approx(3 * forward + PER_TRAINING * HOST.operation)
    recording = fraction * statistics + HOST.operation * (2 * PER_USE + 2 * PER_GROUP + PER_RECORDING)
    recording += 0 if in_training else 2 * fraction * products + 9 * HOST.operation
    assert costs.statistics == pytest.approx(recording)
    assert costs.inverses == pytest.approx(decompositions + turning_two_means + 2 * HOST.operation * PER_INVERSE)
    passes = HOST.element * CHECK_PASSES * sum(i * o for i, o in layers)
    with_product = 5 * products + HOST.operation * (3 * (2 + PRODUCT) + PER_CHECK + 4 * PER_TENSOR)
    assert costs.check == pytest.approx(with_product + passes)
    check = CHECK_FORWARDS * products + HOST.operation * (3 * CHECK_FORWARDS + PER_CHECK + 4 * PER_TENSOR)
    assert costs_of(after_a_step(), with_product=False).check == pytest.approx(check + passes)


@pytest.mark.parametrize("rates", [HOST, ACCELERATOR])
@pytest.mark.parametrize("eigenbases", [True, False])
def test_the_kind_of_machine_decides_what_operations_and_decompositions_cost(rates: Rates, eigenbases: bool) -> None:
    costs = costs_of(after_a_step(), rates=rates, eigenbases=eigenbases)
    sides = [d for i, o in itertools.pairwise(WIDTHS) for d in (i + 1, o)]
    cost = rates.bases if eigenbases else rates.cholesky
    decompositions = sum(cost.linear * d + cost.square * d**2 + cost.cubic * d**3 for d in sides)
    turning = sum(2 * (i + 1) * o * (i + 1 + o) for i, o in itertools.pairwise(WIDTHS)) if eigenbases else 0
    assert costs.inverses == pytest.approx(decompositions + 2 * turning + 2 * rates.operation * PER_INVERSE)
    products = sum(2 * CASES * (i + 1) * o for i, o in itertools.pairwise(WIDTHS))
    assert costs.training == pytest.approx(3 * products + (9 + PER_TRAINING) * rates.operation)


def test_a_decomposition_takes_what_was_measured_on_an_accelerator() -> None:
    per_second = ACCELERATOR.operation / 5e-6
    for cost, measured in (
        (ACCELERATOR.bases, {784: 0.44e-3, 2304: 4.2e-3, 3072: 8.5e-3}),
        (ACCELERATOR.cholesky, {256: 0.05e-3, 512: 0.09e-3, 1024: 0.26e-3, 2048: 2.3e-3, 3072: 4e-3}),
    ):
        for width, seconds in measured.items():
            flops = cost.flops(LayerFlops(widths=width, squares=width**2, cubes=width**3))
            assert 0.5 < flops / per_second / seconds < 2


@pytest.mark.parametrize("types", [["cpu"], ["cpu", "cpu"]])
def test_parameters_on_the_cpu_have_a_host(types: list[str]) -> None:
    assert Rates.of(types) is HOST


@pytest.mark.parametrize("types", [["cuda"], ["meta"], ["mps", "cpu"]])
def test_parameters_elsewhere_have_an_accelerator(types: list[str]) -> None:
    assert Rates.of(types) is ACCELERATOR
    assert Rates.of(types, halves=True) is ACCELERATOR_IN_HALVES


def test_a_check_of_a_part_of_the_batch_costs_that_part() -> None:
    whole, part = (
        costs_of(after_a_step(), 3000, with_product=False, check_share=share).check for share in (1.0, 0.125)
    )
    numbers = sum((i + 1) * o for i, o in itertools.pairwise(WIDTHS))
    operations = HOST.operation * (3 * CHECK_FORWARDS + PER_CHECK + 4 * PER_TENSOR)
    operations += HOST.element * CHECK_PASSES * numbers
    assert part - operations == pytest.approx(0.125 * (whole - operations))
    without_tf32 = [
        costs_of(after_a_step(), rows, with_product=False, rates=ACCELERATOR_IN_HALVES).check for rows in (0, 3000)
    ]
    assert without_tf32[1] - without_tf32[0] == pytest.approx(ACCELERATOR_IN_HALVES.full * (whole - operations))


@pytest.mark.parametrize(("kind", "overhead"), [("eigen_moments", 0.2), ("adaptive", 0.6)])
def test_the_first_step_takes_the_kind_of_machine_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, kind: str, overhead: float
) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr(Rates, "of", lambda types, halves: asked.append(set(types)) or ACCELERATOR)
    optimizer, bases = after_a_step(momentum_type=kind), kind == "eigen_moments"
    costs = costs_of(optimizer, rates=ACCELERATOR, with_product=not bases, eigenbases=bases)
    assert optimizer._step_state.schedule.intervals == costs.intervals(overhead, RULES[kind].longest)
    assert asked == [{"cpu"}]


def test_wide_layers_rarely_have_new_bases_on_an_accelerator_and_stay_within_the_overhead() -> None:
    layers = nn.Sequential(*(nn.Linear(1536, 1536, bias=False) for _ in range(4)))
    optimizer = KFAC(compile(layers, loss="normal"))
    host = costs_of(optimizer, 20_000, rates=HOST, with_product=False)
    accelerator = costs_of(optimizer, 20_000, rates=ACCELERATOR_IN_HALVES, with_product=False, check_share=0.01)
    on_host, chosen = (costs.intervals(0.2, LONGEST) for costs in (host, accelerator))
    assert host.inverses < 0.15 * host.training and accelerator.inverses > accelerator.training
    assert on_host.inverses == 2 * on_host.statistics and host.overhead(on_host) <= 0.2
    assert chosen.inverses > on_host.inverses and chosen.inverses % chosen.statistics == 0
    assert accelerator.inverses / chosen.inverses <= ACCELERATOR.share * 0.2 * accelerator.training
    assert accelerator.overhead(chosen) <= 0.2
    more = chosen.inverses - chosen.statistics
    assert accelerator.inverses / more > ACCELERATOR.share * 0.2 * accelerator.training  # no rarer than need be


@pytest.mark.parametrize("overhead", [0.01, 0.2, 2.0])
@pytest.mark.parametrize("statistics", [1.0, 30.0])
@pytest.mark.parametrize("inverses", [0.5, 60.0, 5000.0])
def test_inverses_on_an_accelerator_have_their_share_also_where_the_rest_exceeds_the_overhead(
    inverses: float, statistics: float, overhead: float
) -> None:
    host, accelerator = (StepCosts(1.0, statistics, inverses, 1.0, rates.share) for rates in (HOST, ACCELERATOR))
    before, chosen = (costs.intervals(overhead, LONGEST) for costs in (host, accelerator))
    assert inverses / chosen.inverses <= ACCELERATOR.share * overhead
    assert chosen.inverses >= before.inverses and accelerator.overhead(chosen) <= host.overhead(before)
    assert (chosen.statistics, chosen.checks) == (before.statistics, before.checks)


def test_operations_decide_the_intervals_of_a_small_network_on_an_accelerator() -> None:
    optimizer = after_a_step()
    for rates in (HOST, ACCELERATOR):
        few, many = (
            costs_of(optimizer, rows, rates=rates, with_product=False).intervals(3.0, LONGEST)
            for rows in (CASES, 3000 * CASES)
        )
        assert (few == many) == (rates is ACCELERATOR)
    costs = costs_of(optimizer, rates=ACCELERATOR)
    operations = 2 * PER_USE + 2 * PER_GROUP + PER_RECORDING + 9
    assert costs.training == pytest.approx((9 + PER_TRAINING) * ACCELERATOR.operation, rel=1e-3)
    assert costs.statistics == pytest.approx(operations * ACCELERATOR.operation, rel=1e-3)


def test_layers_in_one_group_cost_what_they_cost_apart() -> None:
    alike = [nn.Linear(5, 5, bias=False) for _ in range(3)]
    estimator = after_a_step(nn.Sequential(nn.Linear(4, 5, bias=False), *alike)).estimator
    rows = dict.fromkeys(estimator.blocks, float(CASES))
    apart = [LayerFlops.of(estimator.groups, {key: n}) for key, n in rows.items()]
    together = LayerFlops.of(estimator.groups, rows)
    assert len(estimator.groups) == 2 and astuple(together) == tuple(map(sum, zip(*map(astuple, apart), strict=True)))
    products, sums = 2 * CASES * 5**2, 2 * CASES * 2 * 5**2
    assert astuple(apart[-1]) == (products, sums, 2 * 2 * 5**3, 2 * 5, 2 * 5**2, 2 * 5**3, 5**2)


def test_wide_bases_are_decomposed_and_turned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bases.WIDEST, "cpu", 4)
    estimator = after_a_step(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).estimator
    rows = dict.fromkeys(estimator.blocks, float(CASES))
    flops = LayerFlops.of(estimator.groups, rows, eigenbases=True)
    widths = [(5, 5), (8, 4), (9, 5), (3, 3)]  # of a side, and of its blocks; 9 has one of 5 and one of 4
    assert flops.cubes == sum(side * block**2 for side, block in widths)
    assert flops.turning == 2 * (5 * 8 * (5 + 4) + 9 * 3 * (5 + 3))
    assert LayerFlops.of(estimator.groups, rows).cubes == sum(side**3 for side, _ in widths)


@pytest.mark.parametrize("overhead", [0.2, 0.4, 2.0, 500.0])
@pytest.mark.parametrize(("statistics", "inverses", "check"), [(1.0, 0.5, 0.2), (0.3, 60.0, 0.01), (3.0, 1.0, 0.1)])
def test_intervals_stay_within_the_overhead_and_none_with_a_smaller_sum_do(
    statistics: float, inverses: float, check: float, overhead: float
) -> None:
    costs = StepCosts(1.0, statistics, inverses, check)
    chosen = costs.intervals(overhead, LONGEST)
    assert min(chosen) >= 1 and chosen.statistics <= LONGEST.statistics and chosen.checks <= LONGEST.checks
    updates = chosen.inverses // chosen.statistics
    assert chosen.inverses % chosen.statistics == 0
    assert updates == max(2, round(math.sqrt(inverses / statistics)))
    together = statistics + inverses / updates
    rooms = {n: overhead - together / n for n in range(1, LONGEST.statistics + 1)}
    fitting = {n: math.ceil(check / room) for n, room in rooms.items() if room > 0}
    sums = [n + checks for n, checks in fitting.items() if checks <= LONGEST.checks]
    if sums:
        assert costs.overhead(chosen) <= overhead
        assert chosen.statistics + chosen.checks <= min(sums) + 2  # two numbers are rounded up
    else:
        assert chosen.statistics == LONGEST.statistics and costs.overhead(chosen) > overhead


def test_where_checks_are_more_frequent_than_their_best_interval_statistics_take_what_is_left() -> None:
    costs = StepCosts(1.0, 1.45, 0.0, 2.0)
    chosen = costs.intervals(0.3, LONGEST)
    assert chosen == (15, 30, LONGEST.checks)
    assert costs.overhead(chosen) == pytest.approx(1.45 / 15 + 2 / 10)
    longest = (LONGEST.statistics, 2 * LONGEST.statistics, LONGEST.checks)
    assert costs.intervals(0.21, LONGEST) == costs.intervals(0.1, LONGEST) == longest


def test_small_networks_invert_with_every_second_statistics_and_wide_ones_less_often() -> None:
    small, wide = (
        after_a_step(nn.Sequential(nn.Linear(4, d), nn.Linear(d, 3)))._step_state.schedule for d in (8, 2000)
    )
    assert small.intervals.inverses == 2 * small.intervals.statistics
    assert wide.intervals.inverses > 2 * wide.intervals.statistics


def test_the_first_step_chooses_the_intervals_and_the_report_prints_them() -> None:
    net = compile(mlp(), loss="categorical")
    optimizer = KFAC(net, overhead=9.0)
    assert "until the first step chooses the intervals for an overhead of 900%" in " ".join(str(net.report).split())
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    schedule = optimizer._step_state.schedule
    rows = dict.fromkeys(optimizer.estimator.blocks, float(len(x)))
    costs = StepCosts.of(net.program, optimizer.estimator.groups, rows, with_product=False)
    chosen = costs.intervals(9.0, LONGEST)
    assert schedule.intervals == chosen and schedule.overhead == costs.overhead(chosen) <= 9.0
    assert optimizer.estimator.cov_ema_decay == pytest.approx(0.98**chosen.statistics)
    text = (
        f"statistics every {chosen.statistics}, inverses every {chosen.inverses}, checks every {chosen.checks} to "
        f"{4 * chosen.checks} steps. By a count of operations this adds {schedule.overhead:.0%} to a training step; "
        "overhead=9 allows 900%"
    )
    assert text in " ".join(str(net.report).split())


@pytest.mark.parametrize(("kind", "longest"), [("eigen_moments", (30, 10)), ("adaptive", (10, 5))])
def test_the_report_says_why_a_stated_overhead_is_exceeded(kind: str, longest: tuple[int, int]) -> None:
    optimizer = after_a_step(overhead=0.01, momentum_type=kind)
    schedule, report = optimizer._step_state.schedule, " ".join(str(optimizer.net.report).split())
    assert schedule.overhead > 0.01 and (schedule.intervals.statistics, schedule.intervals.checks) == longest
    assert (
        f"By a count of operations this adds {schedule.overhead:.0%} to a training step, more than the 1% of "
        f"overhead=0.01, because statistics at every {longest[0]}th step and checks at every {longest[1]}th are the "
        "rarest. A training step of this network is short, so nothing is wrong" in report
    )
    optimizer = after_a_step(overhead=0.01, momentum_type=kind, cov_update_every=2)
    report = " ".join(str(optimizer.net.report).split())
    assert (
        "more than the 1% of overhead=0.01, because intervals are given" in report and "nothing is wrong" not in report
    )


def test_intervals_that_are_given_win_over_the_model() -> None:
    given = after_a_step(cov_update_every=3, damping_adaptation_interval=4)._step_state.schedule.intervals
    assert (given.statistics, given.checks) == (3, 4)
    assert given.inverses == after_a_step()._step_state.schedule.intervals.inverses
    fixed = after_a_step(lr=0.1, damping=0.1)._step_state.schedule
    assert fixed.intervals == StepIntervals(1, 10, 5) and not fixed.described()


def test_a_state_continues_with_its_intervals() -> None:
    trained, fresh = after_a_step(overhead=1.5), KFAC(compile(perceptron(), loss="categorical"))
    with pytest.warns(UserWarning, match="overhead was 1.5 and is 0.2 here"):
        fresh.load_state_dict(trained.state_dict())
    assert fresh._step_state.schedule.intervals == trained._step_state.schedule.intervals
    assert fresh.intervals() != KFAC(compile(perceptron(), loss="categorical")).intervals()
    assert fresh.estimator.cov_ema_decay == trained.estimator.cov_ema_decay


def test_a_recurrent_layer_counts_as_its_kernel_where_that_runs() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.lstm(x.unsqueeze(1).expand(-1, 9, -1))[0]
            scores: torch.Tensor = self.head(outputs[:, -1])
            return scores

    model = Recurrent()
    net = compile(model, (torch.randn(CASES, 4),), loss="categorical")
    optimizer = KFAC(net)
    F.cross_entropy(net(torch.randn(CASES, 4)), torch.zeros(CASES, dtype=torch.long)).backward()
    optimizer.step()
    calls = sum(node.op.startswith("call_") for node in net.program.graph.nodes)
    with_product, of_kernels = (costs_of(optimizer, with_product=product) for product in (True, False))
    assert with_product.check > 5 * HOST.operation * calls  # forwards of the graph, in which every step is written out
    assert of_kernels.training == with_product.training < HOST.operation * calls
    others = HOST.operation * (PER_CHECK + PER_TENSOR * len(net.program.parameters))
    assert of_kernels.check - others < HOST.operation * calls


def test_steps_without_statistics_have_no_inverses_but_the_early_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first factors of a block call for inverses once, and not in every step until the next statistics."""
    net = compile(nn.Linear(3, 2), loss="categorical")
    opt = KFAC(net, lr=0.1, damping=0.1, momentum_type="regular", cov_update_every=30, invert_every=30)
    inverted: list[int] = []
    decompose = opt.estimator.decompose
    monkeypatch.setattr(opt.estimator, "decompose", lambda keys: inverted.append(opt.counter) or decompose(keys))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    for _ in range(31):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    assert inverted == [0, 1, 2, 5, 10, 20, 30]
