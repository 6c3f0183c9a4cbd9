"""`Metrics`: its values are the optimizer's, and the training does not notice it."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.fisher.block_diagonal import WideGroup
from kfac_fx.optim import state, step
from kfac_fx.optim.metrics import Metrics
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.state import PHASES
from tests.runtime.toy_optimizers import KINDS, assert_same, backward, flat_state, made, train, values
from tests.tables import pairs


def euclidean(tensors: Mapping[str, Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).norm().item()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_values_are_the_optimizers_own(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    metrics = Metrics(opt, every=3)
    train(net, opt, range(2))
    assert (metrics.values, metrics.step) == ({}, 0)
    before = values(net)
    train(net, opt, range(2, 3))
    assert metrics.step == 3
    got = metrics.values
    damped = opt.options.rule.side_damping is None
    scalars = ["damping"] * damped + ["rho", "predicted_change"]
    scalars += ["qmodel_learning_rate", "qmodel_momentum"] * ("qmodel" in options.get("momentum_type", ""))
    scalars += ["multiplier"] * (options.get("momentum_type") == "eigen_moments")
    for name in scalars:
        value = opt.scalars[name] if name in opt.scalars else getattr(opt, name)
        assert got.get(name, math.nan) == pytest.approx(value.item(), rel=0, abs=0, nan_ok=True), name
    for name in ("damping", "qmodel_momentum", "multiplier"):
        assert (name in got) == (name in scalars)
    assert not any(map(math.isnan, got.values()))
    stands = repr(opt).splitlines()[-1]
    assert stands.startswith(f"{opt.options.rule.name}: steps 3, skipped 0, of these undone 0") and "nan" not in stands
    assert got["lr/0"] == opt.param_groups[0]["lr"]
    gradients = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert got["norm/gradient"] == pytest.approx(euclidean(gradients))
    moves = {name: value - before[name] for name, value in values(net).items()}
    assert got["norm/update"] == pytest.approx(euclidean(moves)) and got["norm/update"] > 0
    assert all(type(value) is float for value in got.values())


@pairs(("adapt_damping", [False, True]), ("form", ["update", "gradient"]), ("momentum_type", ["regular", "adam"]))
def test_kappa_is_the_ratio_of_a_step_to_the_one_without_the_constraint(
    momentum_type: str, form: str, adapt_damping: bool
) -> None:
    def first_step(bound: float | None) -> tuple[Tensor, dict[str, float]]:
        constraint = {} if bound is None else {"norm_constraint": bound, "norm_constraint_form": form}
        adapting = {"adapt_damping": adapt_damping, "damping_adaptation_interval": 1} if adapt_damping else {}
        net, opt = made(momentum_type=momentum_type, **adapting, **constraint)
        metrics, before = Metrics(opt, every=1), values(net)
        train(net, opt, range(1))
        return torch.cat([(value - before[name]).flatten() for name, value in values(net).items()]), metrics.values

    (whole, unbounded), (bounded, short), (same, wide) = map(first_step, (None, 1e-4, 1e4))
    assert "kappa" not in unbounded and wide["kappa"] == 1 and short["kappa"] < 0.5
    torch.testing.assert_close(bounded, short["kappa"] * whole)
    assert torch.equal(same, whole)


def test_memory_is_that_of_the_tensors_of_all_blocks() -> None:
    net, opt = made()
    metrics = Metrics(opt, every=1)
    train(net, opt, range(1))
    state = {name: tensor for block in opt.estimator.blocks.values() for name, tensor in of(block).items()}
    factors = [tensor for name, tensor in state.items() if name.endswith(("/moment", "/total_weight"))]
    inverses = [tensor for name, tensor in state.items() if name.endswith("/-1.0")]
    assert len(factors) == 12 and len(inverses) == 4  # A, G and positions of two blocks; A and G
    assert metrics.values["memory/factors"] == sum(tensor.nbytes for tensor in factors)
    assert metrics.values["memory/inverses"] == sum(tensor.nbytes for tensor in inverses)
    assert metrics.values["memory/update"] == sum(parameter.nbytes for parameter in net.parameters())  # velocities


def test_memory_of_inverses_is_that_of_eigen_moments() -> None:
    net, opt = made(**KINDS["eigen_moments"])
    metrics = Metrics(opt, every=1)
    train(net, opt, range(1))
    extras = [tensor for group in opt.estimator.groups for tensor in group.extras.values()]
    assert len(extras) == 16  # the bases and eigenvalues of A and G, and both means with their weights, of two groups
    assert metrics.values["memory/inverses"] == sum(tensor.nbytes for tensor in extras) > 0


def of(block: Any) -> dict[str, Tensor]:
    return {f"{block.registration}/{name}": tensor for name, tensor in block.state().items()}


def test_condition_numbers_are_those_of_the_damped_factors() -> None:
    net, opt = made()
    metrics = Metrics(opt, every=1, condition="each")
    train(net, opt, range(3))
    largest = dict.fromkeys("AG", 0.0)
    for key, block in opt.estimator.blocks.items():
        a, g, c = (block.factors[name].value.squeeze(0) for name in ("A", "G", "positions"))
        pi, root = (a.trace() / a.shape[-1] / (g.trace() / g.shape[-1])).sqrt(), (0.1 / c).sqrt()
        for name, factor, damping in (("A", a, pi * root), ("G", g, root / pi)):
            expected = torch.linalg.cond(factor + damping * torch.eye(len(factor), dtype=factor.dtype)).item()
            assert metrics.values[f"condition/{','.join(key)}/{name}"] == pytest.approx(expected)
            largest[name] = max(largest[name], expected)
    for name, expected in largest.items():
        assert metrics.values[f"condition/{name}"] == pytest.approx(expected)


def test_the_filling_of_wide_sides_is_in_no_condition_number() -> None:
    net = compile(
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double(), loss="categorical", dense_limit=4
    )
    opt = KFAC(net, lr=0.3, damping=1e-6, seed=0)
    metrics = Metrics(opt, every=1, condition="each")
    train(net, opt, range(1))
    group = opt.estimator.blocks["0.weight", "0.bias"].group
    assert isinstance(group, WideGroup) and group.value(group.left).shape == (1, 2, 3, 3)  # 5 rows and one of filling
    side = group.joined_outputs(group.operators(1.0)[0][0])[0]
    eigenvalues = torch.linalg.eigvalsh(side)
    assert eigenvalues.shape == (5,) and eigenvalues[-1] < 0.9  # the filling is 1
    expected = (eigenvalues[-1] / eigenvalues[0]).item()
    assert metrics.values["condition/0.weight,0.bias/G"] == pytest.approx(expected)


@pytest.mark.parametrize(("frozen", "trained"), [("0", "2"), ("2", "0")])
def test_a_block_without_factors_has_no_condition_number(frozen: str, trained: str) -> None:
    net, opt = made()
    metrics = Metrics(opt, every=1, condition="each")
    for parameter in net.get_submodule(frozen).parameters():
        parameter.requires_grad_(False)
    train(net, opt, range(1))
    got = metrics.values
    assert math.isnan(got[f"condition/{frozen}.weight,{frozen}.bias/A"])
    assert got["condition/A"] == got[f"condition/{trained}.weight,{trained}.bias/A"] >= 1


@pytest.mark.parametrize("empty", [0, 1])
def test_the_largest_condition_number_is_that_of_blocks_with_factors(empty: int) -> None:
    net, opt = made()
    metrics = Metrics(opt, every=1, condition="each")
    train(net, opt, range(1))
    groups = opt.estimator.groups
    groups[empty].factors["A"].total_weight.zero_()
    conditions = metrics._conditions(groups)
    other = ",".join(groups[1 - empty].registrations[0].parameters)
    assert conditions["condition/A"] == conditions[f"condition/{other}/A"]


def test_condition_none_decomposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = made()
    monkeypatch.setattr("kfac_fx.optim.metrics.condition_numbers", lambda group: pytest.fail("decomposed"))
    metrics = Metrics(opt, every=1, condition=None)
    train(net, opt, range(1))
    assert metrics.values and not any(name.startswith("condition") for name in metrics.values)


def test_skipped_steps_and_statistics_are_counted() -> None:
    net, opt = made()
    metrics = Metrics(opt, every=1)
    train(net, opt, range(2))
    opt.zero_grad()
    backward(net, 2)
    opt.estimator.groups[0].skipped += 2
    opt.estimator.groups[1].failed += 3
    net.get_parameter("2.bias").grad[0] = torch.nan  # type: ignore[index]
    opt.step()
    skipped = {name: value for name, value in metrics.values.items() if name.startswith("skipped")}
    assert skipped == {"skipped/steps": 1.0, "skipped/undone": 0.0, "skipped/statistics": 2.0, "skipped/inverses": 3.0}
    assert metrics.values["norm/update"] == 0 and math.isnan(metrics.values["norm/gradient"])


def test_seconds_are_the_mean_of_the_steps_since_the_last_values() -> None:
    net, opt = made()
    metrics = Metrics(opt, every=4)
    train(net, opt, range(4))
    assert all(metrics.values[f"seconds/{phase}"] > 0 for phase in PHASES)
    train(net, opt, range(4, 7))
    opt.phases.totals = dict.fromkeys(PHASES, 0.0)
    metrics._seconds = dict.fromkeys(PHASES, -8000.0)
    train(net, opt, range(7, 8))
    for phase in PHASES:
        assert metrics.values[f"seconds/{phase}"] == pytest.approx(2000 + opt.phases.totals[phase] / 4, rel=1e-12)


def test_each_phase_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(state.time, "perf_counter", lambda: now)
    net, opt = made()

    def slow_down(place: Any, name: str, seconds: float) -> None:
        real = getattr(place, name)

        def slow(*args: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return real(*args, **options)

        monkeypatch.setattr(place, name, slow)

    slow_down(opt._forwards, "on_forward", 1.0)
    slow_down(opt.estimator, "fold", 2.0)
    slow_down(opt.estimator, "decompose", 4.0)
    slow_down(step, "moved_in_blocks", 8.0)
    metrics = Metrics(opt, every=1)
    train(net, opt, range(1))
    assert [metrics.values[f"seconds/{phase}"] for phase in PHASES] == [1.0, 2.0, 4.0, 8.0]


def test_steps_are_counted_on_from_a_checkpoint_and_through_the_burn_in() -> None:
    net, opt = made(num_burnin_steps=2)
    metrics = Metrics(opt, every=2)
    train(net, opt, range(3))
    assert metrics.step == 2
    other, resumed = made(num_burnin_steps=2)
    resumed.load_state_dict(opt.state_dict())
    written: list[int] = []
    Metrics(resumed, lambda _, step: written.append(step), every=2)
    train(other, resumed, range(3))
    assert written == [4, 6]


# --- what it does to the training -------------------------------------------------------------------------------------


READ = "aten._local_scalar_dense.default"  # the host reads a number


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations_of_steps(every: int | None, **options: Any) -> list[Counter[str]]:
    net, opt = made(**options)
    if every is not None:
        Metrics(opt, every=every)
    counts = []
    for number in range(4):
        opt.zero_grad()
        backward(net, number)
        with Operations() as operations:
            opt.step()
        counts.append(operations.counts)
    return counts


def test_steps_between_the_intervals_compute_and_read_nothing_more() -> None:
    without, attached = operations_of_steps(None), operations_of_steps(4)
    assert attached[:3] == without[:3]
    assert attached[3] > without[3], "the step that is read"


@pytest.mark.parametrize("form", ["update", "gradient"])
def test_kappa_is_not_read_by_the_host_between_the_intervals(form: str) -> None:
    bounded = operations_of_steps(4, norm_constraint=1e-4, norm_constraint_form=form)
    for with_bound, without in zip(bounded[:3], operations_of_steps(4)[:3], strict=True):
        assert with_bound[READ] == without[READ] and with_bound.total() > without.total()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_training_is_bit_for_bit_the_same(options: dict[str, Any]) -> None:
    states = []
    for every in (None, 1):
        net, opt = made(**options, weight_decay=0.01)
        if every is not None:
            Metrics(opt, every=every, condition="each")
        random = torch.get_rng_state()
        train(net, opt, range(5))
        assert torch.equal(random, torch.get_rng_state())
        states.append({**values(net), **flat_state(opt.state_dict())})
    assert_same(*states)


def test_detach_ends_the_reading_and_keeps_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = made()
    with Metrics(opt, every=1) as metrics, Metrics(opt, every=2) as other:
        train(net, opt, range(2))
        assert (metrics.step, other.step) == (2, 2)
        other.detach()
        train(net, opt, range(2, 4))
    assert (metrics.step, other.step) == (4, 2) and metrics.values
    monkeypatch.setattr(state.time, "perf_counter", lambda: pytest.fail("the clock was read"))
    train(net, opt, range(4, 5))
    assert metrics.step == 4


# --- writers ----------------------------------------------------------------------------------------------------------


def test_write_gets_the_values_and_the_step() -> None:
    net, opt = made()
    calls: list[tuple[Mapping[str, float], int]] = []
    metrics = Metrics(opt, lambda got, step: calls.append((got, step)), every=2, condition=None)
    train(net, opt, range(4))
    assert [step for _, step in calls] == [2, 4] and calls[1][0] == metrics.values != calls[0][0]


def test_to_tensorboard_adds_one_scalar_for_each_value() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars.append((tag, scalar_value, global_step))

    writer = Writer()
    Metrics.to_tensorboard(writer)({"damping": 0.5, "lr/0": 1.0}, 7)
    assert writer.scalars == [("damping", 0.5, 7), ("lr/0", 1.0, 7)]


def test_to_logger_writes_one_line(logged: list[logging.LogRecord]) -> None:
    Metrics.to_logger(logging.getLogger("kfac"))({"damping": 0.5, "rho": math.nan}, 7)
    Metrics.to_logger(logging.getLogger("kfac"), logging.DEBUG)({"damping": 0.5}, 8)
    assert [record.getMessage() for record in logged] == ["step 7: damping 0.5, rho nan"]


def test_an_error_of_write_leaves_the_step_which_was_made() -> None:
    net, opt = made()

    def write(got: object, step: int) -> None:
        raise OSError("disk full")

    Metrics(opt, write, every=1)
    before = values(net)
    with pytest.raises(OSError, match="disk full"):
        train(net, opt, range(1))
    assert opt.counter == 1 and not torch.equal(before["0.weight"], values(net)["0.weight"])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_another_optimizer_is_refused() -> None:
    text = (
        "Metrics takes a kfac_fx.KFAC, and got a SGD. Where a trainer wraps the optimizer, pass the KFAC that you gave "
        "it."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        Metrics(torch.optim.SGD([torch.ones(1)], lr=0.1))  # type: ignore[arg-type]


def test_a_listener_gets_values_and_a_step() -> None:
    net, opt = made()
    text = (
        "write does not take the two arguments of write(values, step), as in write=lambda values, step: "
        "numbers.update(values) for a dict"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Metrics(opt, lambda values: None)  # type: ignore[arg-type,misc]
    numbers: dict[str, float] = {}
    with Metrics(opt, numbers.update, every=1), pytest.raises(TypeError) as error:  # which has no signature
        train(net, opt, range(1))
    assert error.value.__notes__ == [
        "Metrics calls its second argument, write(values, step), as in write=lambda values, step: "
        "numbers.update(values) for a dict."
    ]

    def failing(values: Mapping[str, float], step: int) -> None:
        raise TypeError("of the user's own")

    with Metrics(opt, failing, every=1), pytest.raises(TypeError, match="of the user's own") as error:
        train(net, opt, range(1, 2))
    assert not hasattr(error.value, "__notes__")
    with Metrics(opt, lambda values, step: numbers.update(values), every=1):
        train(net, opt, range(2, 3))
    assert "norm/update" in numbers


@pytest.mark.parametrize("width", [2, 40])
def test_a_condition_number_is_bounded_where_the_mean_eigenvalue_damps(width: int) -> None:
    """By 1 + d / r: rows that are all the same put a whole factor into one direction."""
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Linear(width, 3)), loss="categorical")
    opt = KFAC(net)
    metrics, x = Metrics(opt, every=1), torch.randn(1, width).expand(30, -1)
    for _ in range(2):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), torch.randint(3, (30,))).backward()
        opt.step()
    assert 0.9 < metrics.values["condition/A"] / (1 + (width + 1) / 0.003) < 1.01


def test_all_wrong_arguments_are_named_at_once() -> None:
    _, opt = made()
    text = (
        "write is called as write(values, step), and a dict cannot be called: for a SummaryWriter write "
        "Metrics.to_tensorboard(writer), for a logging.Logger Metrics.to_logger(logger); every must be a positive "
        "integer, got 0; condition must be 'largest', 'each' or None, got 'all'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Metrics(opt, {}, every=0, condition="all")  # type: ignore[arg-type]
    for every in (True, 2.5, -1):
        with pytest.raises(ValueError, match="every must be a positive integer"):
            Metrics(opt, every=every)  # type: ignore[arg-type]
    assert opt.phases.readers == 0


def test_the_text_of_metrics_has_the_step_and_the_first_values() -> None:
    net = compile(nn.Linear(3, 2), (torch.randn(4, 3),), loss="categorical")
    optimizer = KFAC(net, lr=0.1)
    metrics = Metrics(optimizer, every=2)
    assert repr(metrics) == "Metrics(no values before step 2)"
    for _ in range(2):
        torch.nn.functional.cross_entropy(net(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0])).backward()
        optimizer.step()
    assert re.fullmatch(r"Metrics\(step 2: (\S+ \S+, ){8}and \d+ more in \.values\)", repr(metrics))
