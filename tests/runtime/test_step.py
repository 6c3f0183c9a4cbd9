"""The functions of a step, on a quadratic loss whose curvature a fake estimator knows exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.linalg.processes import Replicas
from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.optim.forwards import MicroBatch, MicroBatches
from kfac_fx.optim.groups import FlatParameters, Vectors
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import BlockStep
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.state import StepState
from kfac_fx.optim.step import Losses, check_losses, measured_move, moved, take_step
from kfac_fx.passes.errors import FactorNotReady
from tests.runtime.options_of import options_of

H = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
START = torch.tensor([1.0, -2.0], dtype=torch.float64)
LR, LAMBDA = 0.5, 0.25
TRUE = torch.tensor(True)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """As in `KFAC.step`."""
    with torch.no_grad():
        yield


@dataclass
class FakeEstimator:
    """Its Fisher is H. Logs what a step asks of it."""

    groups = ()

    log: list[str]
    recorded: bool = True
    ready: bool = True
    agrees: Tensor | None = None
    damping: Tensor = field(default_factory=lambda: torch.tensor(0.0, dtype=torch.float64))

    def accumulate(self, moments: Any) -> None:
        self.log.append("accumulate")

    def usable(self, expected: bool) -> Tensor | None:
        return self.agrees

    def damp_sides(self, part: float | None) -> None:
        """The rules here split λ."""
        assert part is None

    def take_no_cases(self) -> None:
        """There is one process."""

    def fold(self, *, decay: float | None, accept: Tensor) -> bool:
        self.accepted = accept
        self.log.append("fold" if decay is None else f"fold with decay {decay}")
        return self.recorded

    newcomers: frozenset[Any] = frozenset()

    def idle(self, names: Any) -> frozenset[str]:
        return frozenset()

    def decompose(self, keys: Any = None) -> None:
        if not self.ready:
            raise FactorNotReady("A")
        self.log.append(f"invert at {self.damping.item():g}")

    def multiply_kept(self, vector: Tensors) -> Tensors:
        return {"w": (H + LAMBDA * torch.eye(2)) @ vector["w"]}

    def multiply_inverse_kept(self, vector: Tensors) -> Tensors:
        return {"w": torch.linalg.solve(H + LAMBDA * torch.eye(2), vector["w"])}


def one_forward() -> MicroBatches:
    return MicroBatches(forwards=1, batches=[MicroBatch()])


@dataclass
class FakeForwards:
    """Forwards were seen. Measures a closure without further ado."""

    log: list[str]
    seen: MicroBatches = field(default_factory=lambda: one_forward())
    checked: bool = False
    called: bool = False

    def close(self, burning_in: bool) -> None:
        """All forwards had a backward."""

    def note_taken(self) -> None:
        """No state."""

    def check_loss(self, loss: Any, scale: float) -> None:
        self.checked = True
        self.log.append(f"check the loss at scale {scale:g}")

    def check_coverage(self, gradients: Any) -> None:
        self.log.append(f"check the coverage of {', '.join(gradients)}")

    def note_unrecorded(self) -> None:
        self.log.append("unrecorded")

    def measure(self, closure: Callable[[], Tensor], with_backward: bool, start: Any) -> Tensor:
        self.log.append("measure")
        return closure()


class FakeNet(SimpleNamespace):
    """It has the names by which a compiled module is told."""

    attach, registrations, knows_no_loss, training, unrecorded = None, (), False, True, ()


class Problem:
    """Two parameters: `w` in a Fisher block and `free` in none."""

    def __init__(self, free: bool = False, estimator: dict[str, Any] | None = None, **options: Any) -> None:
        self.log: list[str] = []
        self.w, self.free = nn.Parameter(START.clone()), nn.Parameter(torch.ones(1, dtype=torch.float64))
        net = cast(Any, FakeNet(backend="eager", in_place=False, model=nn.Identity()))
        chosen = options_of(net, **{"lr": LR, "damping": LAMBDA, "momentum": 0.0, **options})
        scalar = torch.zeros((), dtype=torch.float64)
        self.forwards = FakeForwards(self.log)
        names, fake, replicas = (
            {self.w: "w", self.free: "free"},
            FakeEstimator(self.log, **(estimator or {})),
            Replicas(),
        )
        fake.estimation_mode = mode = chosen.mode_for(unnamed=False)
        fake.records_in_training = mode == "empirical"
        self.state = StepState(
            net=net,
            options=chosen,
            schedule=Schedule(chosen),
            estimator=cast(Any, fake),
            forwards=cast(Any, self.forwards),
            replicas=replicas,
            vectors=Vectors(
                names, frozenset(["w"]), scalar, chosen.rule.new_state, cast(Any, fake), replicas, shards=None
            ),
            damping=scalar + LAMBDA,
        )
        shared = chosen.of_groups
        shared |= {"first_lr": shared["lr"]} if chosen.rule.keeps_first_lr else {}
        self.groups = [{"params": [self.w], "first_order": False, **shared}]
        self.groups += [{"params": [self.free], "first_order": True, **shared}] if free else []
        self.states: dict[Any, Any] = {self.w: {}, self.free: {}}

    def loss(self) -> Tensor:
        return 0.5 * self.w.detach() @ H @ self.w.detach() + self.free.detach().sum()

    def backward(self) -> None:
        self.w.grad, self.free.grad = H @ self.w.detach(), torch.ones_like(self.free)
        self.forwards.seen = one_forward()

    def vectors(self) -> tuple[BlockStep, FlatParameters | None]:
        in_blocks, others = self.state.vectors.of(self.groups, self.states)
        assert in_blocks is not None
        return self.state.block_step(in_blocks), others

    def step(self, losses: Losses | None = None) -> None:
        take_step(self.state, self.groups, self.states, Losses() if losses is None else losses)


def move_of(problem: Problem) -> Tensor:
    return problem.w.detach() - START


EXPECTED = -LR * torch.linalg.solve(H + LAMBDA * torch.eye(2, dtype=torch.float64), H @ START)

# --- the order of a step --------------------------------------------------------------------------------------------


def test_a_first_step_checks_folds_inverts_and_moves() -> None:
    problem = Problem(precon_damping_mult=2.0)
    problem.backward()
    problem.step()
    assert problem.log == ["check the loss at scale 1", "fold", "invert at 0.5", "check the coverage of w"]
    torch.testing.assert_close(move_of(problem), EXPECTED)
    assert (problem.state.schedule.counter, problem.state.skipped.item()) == (1, 0)


def test_later_steps_do_what_is_due() -> None:
    problem = Problem(invert_every=4)
    for _ in range(5):
        problem.backward()
        problem.step()
    assert problem.log[4:] == ["fold", "invert at 0.25", "fold", "invert at 0.25", "fold", "fold", "invert at 0.25"]


def test_a_burn_in_only_averages() -> None:
    problem = Problem(num_burnin_steps=1)
    problem.backward()
    problem.step()
    assert problem.log == ["check the loss at scale 1", "fold with decay 1.0"]
    assert not move_of(problem).any() and (problem.state.schedule.burned_in, problem.state.schedule.counter) == (1, 0)


def test_a_step_without_gradients_does_nothing() -> None:
    problem = Problem()
    problem.step()
    assert problem.log == [] and problem.state.schedule.counter == 0


@pytest.mark.parametrize("reason", ["no cases", "not finite"])
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_first_step_without_a_factor_is_skipped_and_comes_again(reason: str) -> None:
    problem = Problem(estimator={"recorded": reason != "no cases"})
    problem.backward()
    if reason == "not finite":
        assert problem.w.grad is not None
        problem.w.grad[0] = torch.nan
    problem.step()
    assert not move_of(problem).any() and problem.state.skipped.item() == 1 and problem.state.schedule.counter == 0


def test_an_inverse_before_any_recording_says_what_to_call() -> None:
    problem = Problem(estimator={"ready": False})
    problem.backward()
    with pytest.raises(FactorNotReady, match=r"no batch was ever recorded, .* call the compiled module, net\(x\)"):
        problem.step()


@pytest.mark.parametrize(("lr", "noted"), [(LR, True), (None, False)])
def test_statistics_that_are_due_without_a_forward_are_noted(lr: float | None, noted: bool) -> None:
    """With a quadratic model it is an error, for it needs the batch."""
    problem = Problem(lr=lr, **({} if lr else {"momentum_type": "qmodel", "momentum": None}))
    problem.state.schedule.counter = 1
    problem.backward()
    problem.forwards.seen = MicroBatches()
    if noted:
        problem.step()
    else:
        with pytest.raises(
            RuntimeError, match=r"momentum_type='qmodel' computes this step with the batch of the step, and"
        ):
            problem.step()
    assert ("unrecorded" in problem.log) is noted


# --- the update -----------------------------------------------------------------------------------------------------


def test_a_move_that_is_not_finite_is_not_made() -> None:
    problem = Problem(free=True)
    problem.backward()
    step, others = problem.vectors()
    assert others is not None
    step.g[0] = torch.inf
    ok = moved(problem.state, step, others, TRUE)
    assert not ok and not move_of(problem).any() and problem.free.item() == 1
    assert not step.state["velocity"].any() and not others.state["step"].any()


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_step_whose_loss_is_not_finite_is_counted_and_changes_nothing() -> None:
    problem = Problem()
    problem.state.schedule.counter = 1
    problem.backward()
    problem.step(Losses(loss=torch.inf))
    assert not move_of(problem).any() and (problem.state.schedule.counter, problem.state.skipped.item()) == (2, 1)


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_step_whose_recording_is_of_another_function_changes_nothing() -> None:
    """On an accelerator, where the host learns of it later."""
    problem = Problem()
    problem.state.schedule.counter = 1
    estimator: Any = problem.state.estimator
    estimator.agrees = torch.tensor(False)
    problem.backward()
    problem.step()
    assert not move_of(problem).any() and problem.state.skipped.item() == 1 and not estimator.accepted


def test_parameters_in_no_block_follow_the_first_order_rule() -> None:
    problem = Problem(free=True)
    problem.backward()
    problem.step()
    torch.testing.assert_close(move_of(problem), EXPECTED)
    assert problem.free.item() == pytest.approx(1 - LR, rel=1e-6)  # Adam's first step is lr


def test_a_parameter_of_a_block_without_a_gradient_counts_as_zero() -> None:
    problem = Problem(free=True)
    problem.state.vectors.registered = frozenset(["w", "free"])
    problem.backward()
    step, _ = problem.vectors()
    seen: Tensors = {}
    step.product(lambda vector: seen.update(vector) or vector)(step.g)
    assert seen["free"].tolist() == [0.0] and torch.equal(seen["w"], H @ START)


# --- the damping ----------------------------------------------------------------------------------------------------

ADAPTED: dict[str, Any] = {"adapt_damping": True, "damping_adaptation_interval": 1}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_constraint": 1e-2}, {"momentum_type": "adam"}])
def test_an_exact_model_predicts_the_change_of_the_loss(options: dict[str, Any], free: bool) -> None:
    problem = Problem(free, **ADAPTED, **options)
    before = problem.loss()
    problem.backward()
    problem.step(Losses(problem.loss))
    torch.testing.assert_close(problem.state.scalars["predicted_change"], problem.loss() - before)
    assert problem.state.scalars["rho"].item() == pytest.approx(1.0)
    assert problem.state.damping.item() == pytest.approx(LAMBDA * 0.95)
    assert problem.log.count("measure") == 2


def test_the_l2_term_of_the_loss_is_the_only_damping_in_the_prediction() -> None:
    problem, l2 = Problem(**ADAPTED, l2_reg=0.1), 0.1

    def loss() -> Tensor:
        return problem.loss() + l2 / 2 * problem.w.detach().square().sum()

    before = loss()
    problem.backward()
    assert problem.w.grad is not None
    problem.w.grad += l2 * problem.w.detach()
    problem.step(Losses(loss))
    torch.testing.assert_close(problem.state.scalars["predicted_change"], loss() - before)


def test_a_loss_that_is_known_is_not_measured() -> None:
    problem = Problem(**ADAPTED)
    problem.backward()
    problem.step(Losses(problem.loss, loss=problem.loss()))
    assert problem.log.count("measure") == 1 and problem.state.scalars["rho"].item() == pytest.approx(1.0)


def test_a_late_measurement_gives_the_damping_of_an_immediate_one() -> None:
    late, now = Problem(**ADAPTED, update_damping_immediately=False), Problem(**ADAPTED)
    for n, problem in enumerate((late, now)):
        problem.backward()
        problem.step(Losses(problem.loss, loss=problem.loss()))
        assert problem.state.scalars["rho"].isnan().item() is (n == 0)
    late.backward()
    late.step(Losses(late.loss, loss=late.loss(), previous=late.loss))
    assert (late.state.scalars["rho"].item(), late.state.damping.item()) == pytest.approx(
        (1.0, now.state.damping.item())
    )


@pytest.mark.parametrize("min_damping", [1e-8, 2 * LAMBDA])  # a measured step lifts the damping to its floor
def test_a_measured_step_that_is_not_finite_leaves_the_damping(min_damping: float) -> None:
    problem = Problem(**ADAPTED, min_damping=min_damping)
    problem.backward()
    step, others = problem.vectors()
    step.g[0] = torch.nan
    move = partial(moved, problem.state, step, others, TRUE)
    ok = measured_move(problem.state, move, None, Losses(problem.loss))
    assert not ok and not move_of(problem).any() and problem.state.damping.item() == LAMBDA


def test_losses_that_the_damping_rule_needs_are_asked_for_by_name() -> None:
    options = options_of(cast(Any, FakeNet()), lr=1.0, damping=1.0, **ADAPTED)
    late = options_of(options.net, lr=1.0, damping=1.0, **ADAPTED, update_damping_immediately=False)

    def check(options: KFACOptions, losses: Losses, counter: int = 0) -> None:
        assert options.rule.damping_rule is not None
        check_losses(options.rule.damping_rule, Schedule(options, counter).due(), losses)

    with pytest.raises(
        ValueError, match=r"needs the loss after the update, every 1 steps: call step\(evaluate=closure\)"
    ):
        check(options, Losses(loss=1.0))
    with pytest.raises(ValueError, match=r"needs the loss before the update, every 1 steps: call step\(loss=loss\)"):
        check(late, Losses())
    with pytest.raises(ValueError, match=r"measures a step in the next one, .*\(loss=loss, previous=closure\)"):
        check(late, Losses(loss=1.0), counter=1)
    check(late, Losses(loss=1.0))
    check(options, Losses(lambda: 1.0))


def test_a_gradscaler_is_asked_only_where_its_scale_is_needed() -> None:
    asked: list[int] = []

    class Scaler(torch.amp.GradScaler):
        def get_scale(self) -> float:
            asked.append(1)
            return 8.0

    problem = Problem(grad_scaler=Scaler("cpu"))
    for _ in range(2):
        problem.backward()
        problem.step()
    assert problem.log[0] == "check the loss at scale 8" and len(asked) == 1


def test_exact_products_are_means_over_the_cases_of_all_micro_batches() -> None:
    net, x = compile(nn.Linear(3, 2).double(), loss="normal"), torch.randn(8, 3, dtype=torch.float64)
    state = KFAC(net, momentum_type="qmodel", momentum=None, damping=0.1)._step_state
    flat = SimpleNamespace(everywhere=Flat({name: p.shape for name, p in net.named_parameters()}).parts)
    products = []
    for parts in ([x], [x[:2], x[2:]]):
        state.forwards.seen.batches = [MicroBatch(call=((part,), {})) for part in parts]
        products.append(state.exact_products(cast(Any, flat), list(torch.eye(8, dtype=torch.float64))))
    torch.testing.assert_close(*products)
    rows = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(products[0].diagonal().sum(), 2 * 2 * rows.square().sum() / 8)


def test_exact_products_need_the_forwards_of_the_step() -> None:
    problem = Problem(lr=None, momentum=None, momentum_type="QModel")
    problem.backward()
    step, _ = problem.vectors()
    with pytest.raises(RuntimeError, match="momentum_type='qmodel' computes this step with the batch"):
        step.exact_products([step.g])
