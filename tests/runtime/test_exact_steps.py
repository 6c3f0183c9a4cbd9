"""Exact steps of "eigen_moments": the minimum of the quadratic model of a repeated batch, against dense matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx import losses
from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.checks import Check
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rule import Outcome
from kfac_fx.optim.rules import exact_steps
from kfac_fx.optim.rules.exact_steps import LEAST_REACH, MOST_REACH, OMEGA, PROBES, ExactMove
from kfac_fx.optim.rules.momentum import QuadraticModel
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.test_checks_adaptive import fisher, theta
from tests.tables import every, pairs

FULL = (batch(0, cases=24)[0], batch(0, cases=24)[0].argmax(1))
Batch = tuple[Tensor, Tensor]


def made(**options: Any) -> tuple[CompiledModule, KFAC]:
    net = compile(mlp(), loss="categorical")
    return net, KFAC(net, **{"seed": 0, **options})


def gradients(net: CompiledModule, opt: KFAC, of: Batch) -> float:
    opt.zero_grad()
    loss = F.cross_entropy(net(of[0]), of[1])
    loss.backward()
    return float(loss.detach())


def step(net: CompiledModule, opt: KFAC, of: Batch = FULL) -> float:
    loss = gradients(net, opt, of)
    opt.step()
    return loss


def scalar(opt: KFAC, name: str) -> float:
    return float(opt.scalars[name])


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(the step, the bounded move, the bound, the exact move or None) of every check that may make an exact one."""
    seen: list[Any] = []
    original = exact_steps.exact_move

    def spied(step: Any, check: Any, bounded: Any, longest: Tensor) -> ExactMove | None:
        last, before = step.state["last_update"].clone(), {n: float(v) for n, v in step.scalars.items()}
        exact = original(step, check, bounded, longest)
        seen.append(SimpleNamespace(step=step, bounded=bounded, longest=longest, exact=exact, last=last, before=before))
        return exact

    monkeypatch.setattr(exact_steps, "exact_move", spied)
    return seen


# --- against dense matrices -------------------------------------------------------------------------------------------


def test_an_exact_step_minimizes_the_damped_model_along_three_directions(moves: list[Any]) -> None:
    net, opt = made()
    for _ in range(2):
        step(net, opt)
    at, x = theta(net).clone(), FULL[0]
    gradients(net, opt, FULL)
    g = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    opt.step()  # new bases are due in this step, so the factors are those of the bases
    seen = moves[-1]
    assert seen.exact is not None and opt.skipped == 0
    f, damping = fisher(net, at, x), scalar(opt, "exact_damping") / OMEGA
    parts = []
    for number, block in enumerate(opt.estimator.blocks.values()):
        a, gg, c = (block.factors[name].value for name in ("A", "G", "positions"))
        dense = c * torch.kron(gg[0], a[0]) + damping * torch.eye(len(a[0]) * len(gg[0]), dtype=torch.float64)
        layer = [*net.parameters()][2 * number : 2 * number + 2]
        matrix = torch.cat([layer[0].grad, layer[1].grad.unsqueeze(1)], 1)  # type: ignore[list-item,union-attr]
        solved = torch.linalg.solve(dense, matrix.flatten()).view_as(matrix)
        parts += [solved[:, :-1].flatten(), solved[:, -1]]
    basis = torch.stack([torch.cat(parts), seen.bounded.move, seen.last], 1)
    m = basis.T @ (f + damping * torch.eye(len(f), dtype=torch.float64)) @ basis
    best = basis @ -torch.linalg.solve(m, basis.T @ g)
    norm = best @ f @ best
    best = best * min(1.0, float((seen.before["reach"] ** 2 * seen.longest / norm).sqrt()))

    def model(delta: Tensor) -> Tensor:
        return g @ delta + 0.5 * delta @ f @ delta

    torch.testing.assert_close(theta(net) - at, seen.exact.move)
    torch.testing.assert_close(seen.exact.move, best, rtol=1e-3, atol=1e-3 * float(best.abs().max()))
    assert float(model(seen.exact.move)) == pytest.approx(float(model(best)), rel=1e-4)
    assert float(seen.exact.slope + 0.5 * seen.exact.curvature) == pytest.approx(float(model(best)), rel=1e-3)
    assert model(best) < 2 * (seen.bounded.slope + 0.5 * seen.bounded.curvature)


def test_the_minimum_leaves_out_directions_that_are_zero_or_parallel() -> None:
    torch.manual_seed(0)
    root = torch.randn(5, 5, dtype=torch.float64)
    f, g, d = root @ root.T, torch.randn(5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    best = -torch.linalg.solve(d.T @ f @ d, d.T @ g)

    def minimum(directions: list[Tensor]) -> Tensor:
        def products(vectors: Any) -> Tensor:
            stacked = torch.stack(list(vectors))
            return stacked @ f @ stacked.T

        return torch.stack(directions, 1) @ QuadraticModel.along(directions, g, products).minimum(0.0)

    expected = d @ best
    torch.testing.assert_close(minimum([d[:, 0], d[:, 1]]), expected)
    torch.testing.assert_close(minimum([d[:, 0], torch.zeros_like(g), 1e-9 * d[:, 1]]), expected)
    torch.testing.assert_close(minimum([d[:, 0], d[:, 1], -3 * d[:, 0]]), expected)
    assert not minimum([torch.zeros_like(g)] * 2).any()


@pytest.mark.parametrize(
    ("rho", "kept", "limited"), [(1.1, 1, 1), (1.1, 1, 0), (0.6, 1, 1), (0.1, 1, 1), (-2.0, 0, 0), (-2.0, 0, 1)]
)
def test_damping_and_radius_follow_the_quotient_of_changes(rho: float, kept: int, limited: int) -> None:
    tensors = {name: torch.tensor(value) for name, value in exact_steps.EXACT_SCALARS.items()}
    tensors |= {"multiplier": torch.tensor(3.0), "exact_damping": torch.tensor(2.0)}
    state = {"last_update": torch.zeros(2)}
    zero = torch.zeros(())
    move = ExactMove(torch.ones(2), zero, zero, zero, None, zero, zero, limited=torch.tensor(bool(limited)))
    outcome = SimpleNamespace(rho=torch.tensor(rho), kept=torch.tensor(bool(kept)), tried=torch.tensor(True))
    exact_steps.adapt(SimpleNamespace(scalars=tensors, state=state), move, outcome, holds=True)  # type: ignore[arg-type]
    factor = (1 if limited else OMEGA**-4) if not kept else OMEGA if rho > 0.75 else 1 / OMEGA if rho < 0.25 else 1
    assert float(tensors["exact_damping"]) == pytest.approx(2 * factor)
    times = 0.5 if not kept or rho < 0.5 else 2 if abs(rho - 1) <= 0.25 and limited else 1
    assert LEAST_REACH <= float(tensors["reach"]) == 4 * times <= MOST_REACH
    assert tensors["exact_steps"] == 1 and tensors["undone"] == 1 - kept and tensors["held"] == 3
    assert state["last_update"].tolist() == [-kept, -kept]


# --- when -------------------------------------------------------------------------------------------------------------


def trained(batches: Iterator[Batch], steps: int, **options: Any) -> tuple[KFAC, Tensor]:
    net, opt = made(**options)
    for _ in range(steps):
        step(net, opt, next(batches))
    return opt, theta(net)


def repeated() -> Iterator[Batch]:
    while True:
        yield FULL


def fresh() -> Iterator[Batch]:
    number = 0
    while True:
        number += 1
        yield batch(number, cases=24)


def test_a_full_batch_is_fitted_much_further_than_by_bounded_steps() -> None:
    losses = []
    for exact in (True, False):
        net, opt = made(exact_steps=exact)
        for number in range(40):
            opt.param_groups[0]["lr"] = 1 - number / 40
            step(net, opt)
        losses.append(gradients(net, opt, FULL))
        assert (scalar(opt, "exact_steps") > 20) is exact
    assert losses[0] < losses[1] / 10


def test_fresh_batches_are_trained_as_without_exact_steps_to_the_last_bit() -> None:
    (opt, exact), (_, bounded) = trained(fresh(), 45), trained(fresh(), 45, exact_steps=False)
    assert torch.equal(exact, bounded) and scalar(opt, "exact_steps") == 0


def test_a_check_behind_a_check_of_the_same_batch_knows_the_rise_without_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps are those with that forward up to rounding, which is what the change of the loss in a step is."""
    forwards: list[int] = []
    original, known_rise = Check.values_at, exact_steps.known_rise

    def counted(check: Check, there: Any) -> Any:
        forwards[-1] += 1
        return original(check, there)

    monkeypatch.setattr(Check, "values_at", counted)
    ends, numbers, undone = [], [], []
    for known in (True, False):
        monkeypatch.setattr(exact_steps, "known_rise", known_rise if known else lambda step, check: None)
        net, opt = made()
        forwards, of_exact = [], []
        for _ in range(30):
            before = scalar(opt, "exact_steps")
            forwards.append(0)
            step(net, opt)
            of_exact += [forwards[-1]] * (scalar(opt, "exact_steps") > before)
        assert len(of_exact) > 10
        ends.append(theta(net))
        numbers.append(of_exact)
        undone.append(int(opt._step_state.undone))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-7, atol=1e-9)
    assert set(numbers[1]) == {5}  # three directions, the new parameters, and those of the last check
    assert numbers[0][1:].count(4) >= len(numbers[0]) - 1 - undone[0]  # behind steps that were undone nothing is known


def test_a_rise_that_is_known_is_that_of_the_model() -> None:
    net, opt = made()
    for _ in range(12):
        before = gradients(net, opt, FULL)
        opt.step()
        after = gradients(net, opt, FULL)
        assert scalar(opt, "followed") == 1
        assert scalar(opt, "after") == pytest.approx(after, rel=1e-9)
        assert scalar(opt, "change") == pytest.approx(after - before, rel=1e-6, abs=1e-12)
        if not opt._step_state.schedule.checking:
            break
    assert scalar(opt, "exact_steps") > 3


def test_weights_that_change_behind_a_check_are_seen_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss after the last step is not that of these weights, so no rise is known."""
    known: list[Tensor | None] = []
    original = exact_steps.known_rise

    def spied(step: Any, check: Check) -> Tensor | None:
        known.append(original(step, check))
        return known[-1]

    monkeypatch.setattr(exact_steps, "known_rise", spied)
    net, opt = made()
    for _ in range(8):
        step(net, opt)
    assert known[-1] is not None and opt._step_state.schedule.checking
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(3.0)
    step(net, opt)
    assert known[-1] is None


@pytest.mark.parametrize("number", [2, 5])
def test_batches_that_take_turns_have_no_exact_steps_and_few_further_checks(number: int) -> None:
    def turns() -> Iterator[Batch]:
        while True:
            yield from (batch(of, cases=24) for of in range(number))

    net, opt = made()
    checks = 0
    for _, of in zip(range(90), turns(), strict=False):
        checks += opt._step_state.schedule.checking
        step(net, opt, of)
    net, bounded = made(exact_steps=False)
    expected = 0
    for _, of in zip(range(90), turns(), strict=False):
        expected += bounded._step_state.schedule.checking
        step(net, bounded, of)
    assert scalar(opt, "exact_steps") == 0 and checks <= expected + PROBES


def test_exact_steps_go_on_after_points_are_drawn_anew() -> None:
    net, opt = made()
    exact = []
    for number in range(90):
        before = scalar(opt, "exact_steps")
        step(net, opt, batch(number // 30, cases=24))
        exact.append(scalar(opt, "exact_steps") > before)
    assert not exact[30] and not exact[60]
    # Two phases in which exact steps are the rule, and one in which bounded steps take turns with them.
    for drawn, least in ((0, 6), (30, 6), (60, 1)):
        assert sum(exact[drawn : drawn + 30]) >= least


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"exact_steps": False}, {"estimation_mode": "empirical", "loss": False}],
    ids=str,
)
def test_there_are_no_exact_steps_where_they_are_not_defined(options: dict[str, Any]) -> None:
    options = dict(options)
    net = compile(mlp(), loss="categorical") if options.pop("loss", True) else compile(mlp())
    opt = KFAC(net, seed=0, **options)
    for _ in range(12):
        step(net, opt)
    assert scalar(opt, "exact_steps") == 0


@pytest.mark.filterwarnings("ignore::kfac_fx.LossScaleWarning")
def test_a_head_in_no_registered_loss_is_moved_by_bounded_steps() -> None:
    """The quadratic model has no curvature along it, so an exact step was thousands of times too long there."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(10, 3), nn.Linear(10, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    x, y, z = torch.randn(64, 10), torch.randint(3, (64,)), torch.randn(64, 1)
    net = compile(Heads(), loss=lambda outputs: losses.Categorical(outputs[0]))
    opt, values_of_loss = KFAC(net), []
    for _ in range(20):
        opt.zero_grad()
        classes, values = net(x)
        loss = F.cross_entropy(classes, y) + 10 * F.mse_loss(values, z)
        loss.backward()
        opt.step()
        values_of_loss.append(float(loss.detach()))
    assert max(values_of_loss) < 2 * values_of_loss[0] and values_of_loss[-1] < values_of_loss[0]
    assert opt.scalars["exact_steps"] == 0


def test_groups_with_other_learning_rates_have_no_exact_steps() -> None:
    net = compile(mlp(), loss="categorical")
    first, second = net.model[0].parameters(), net.model[2].parameters()
    opt = KFAC(net, params=[{"params": [*first]}, {"params": [*second], "lr": 0.5}], seed=0)
    for _ in range(12):
        step(net, opt)
    assert scalar(opt, "exact_steps") == 0


def test_noise_in_forward_makes_another_batch_of_every_step() -> None:
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 4)).double(), loss="categorical")
    opt = KFAC(net, seed=0)
    for _ in range(12):
        step(net, opt)
    assert scalar(opt, "exact_steps") == 0


class Normalized(nn.Sequential):
    """Outputs whose sum of squares is the same on all batches."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(super().forward(x), dim=-1)


def with_last_layer(weight: float, bias: float) -> nn.Module:
    model = mlp()
    nn.init.constant_(model[-1].weight, weight)
    nn.init.constant_(model[-1].bias, bias)
    return model


@pairs(
    (
        "make",
        {
            "zero": lambda: with_last_layer(0.0, 0.0),
            "constant": lambda: with_last_layer(0.0, 0.3),
            "normalized": lambda: Normalized(*mlp()),
        },
    ),
    ("loss", ["categorical", "mse"]),
)
def test_outputs_that_are_alike_on_all_batches_do_not_make_them_one(make: Callable[[], nn.Module], loss: str) -> None:
    torch.manual_seed(0)
    net = compile(make(), loss=loss)
    opt = KFAC(net, seed=0)
    for number in range(6):
        x, y = batch(number, cases=24)
        opt.zero_grad()
        (F.cross_entropy(net(x), y) if loss == "categorical" else F.mse_loss(net(x), x[:, :1].expand(-1, 4))).backward()
        opt.step()
        assert scalar(opt, "repeats") <= 0
    assert scalar(opt, "exact_steps") == 0


@pytest.mark.filterwarnings("ignore:2 steps:kfac_fx.StalledWarning")
def test_a_training_can_be_saved_after_a_batch_that_is_not_finite() -> None:
    net, opt = made()
    for bad in (0.0, 0.0, math.nan):
        step(net, opt, (FULL[0] + bad, FULL[1]))
    again, loaded = made()
    again.model.load_state_dict(net.model.state_dict())
    loaded.load_state_dict(opt.state_dict())
    assert scalar(loaded, "outputs") == scalar(opt, "outputs")


@pytest.mark.filterwarnings("error:checks undid steps")
def test_a_penalty_that_makes_the_loss_rise_is_no_reason_to_undo_steps() -> None:
    totals = []
    for exact in (True, False):
        net, opt = made(exact_steps=exact)
        for _ in range(70):
            opt.zero_grad()
            penalty = sum(p.square().sum() for p in net.parameters())
            loss = F.cross_entropy(net(FULL[0]), FULL[1]) + 1e-3 * penalty
            loss.backward()
            skipped = int(opt.skipped)
            opt.step()
            assert opt.skipped == skipped or (exact and scalar(opt, "others") == 0)
        totals.append(float(loss.detach()))
        assert scalar(opt, "others") == exact
    assert totals[0] < 1.2 * totals[1]


def test_a_clipped_gradient_is_not_that_of_the_loss(moves: list[Any]) -> None:
    net, opt = made()
    for number in range(6):
        gradients(net, opt, FULL)
        if number >= 3:
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.1)
        opt.step()
    assert moves[2].exact is not None and moves[3].exact is None and scalar(opt, "others") == 1


@pytest.mark.filterwarnings("ignore:the state was saved by a KFAC with other options")
def test_a_state_with_a_phase_of_bounded_steps_is_loaded_without_exact_steps() -> None:
    net, opt = made()
    for _ in range(4):
        step(net, opt)
    opt.scalars["bounded"].fill_(1)
    again, loaded = made(exact_steps=False)
    again.model.load_state_dict(net.model.state_dict())
    loaded.load_state_dict(opt.state_dict())
    rises: list[float] = []
    original = type(loaded.options.rule).tolerated_rise

    def spied(rule: Any, of: Any, was: Tensor, same: Tensor) -> Tensor:
        rises.append(float(original(rule, of, was, same) / was))
        return torch.full_like(was, math.inf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.options.rule), "tolerated_rise", spied)
        for _ in range(10):
            step(again, loaded)
    assert rises and min(rises) > 0.1


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.filterwarnings("ignore:the trained loss")
def test_a_loss_whose_value_is_not_known_repeats_by_its_outputs(factor: float) -> None:
    net, opt = made()
    for _ in range(12):
        opt.zero_grad()
        (factor * F.cross_entropy(net(FULL[0]), FULL[1])).backward()
        opt.step()
    assert scalar(opt, "exact_steps") > 3


DATA, WEIGHTS = torch.linspace(-1, 1, 12).view(12, 1), torch.linspace(0, 2, 12).view(12, 1)
Arithmetic = Callable[[Tensor], list[Tensor]]


@pytest.mark.parametrize(
    "means",
    [
        lambda out: [out[:, :1] - DATA, out[:, 1:]],
        lambda out: [WEIGHTS.sqrt() * (out - DATA), (out - DATA)[:, :0]],
        lambda out: [out.mean(1, keepdim=True).flip(0) - DATA],
        lambda out: [(2 * out.T - 1).reshape(3, 8), torch.zeros(12, 1)],
    ],
)
def test_the_value_of_a_loss_of_computed_means_is_that_of_the_trained_loss(means: Arithmetic) -> None:
    values = values_of_checks(means, steps=3, exact=2)
    assert len(values) == 3
    for trained, known in values:
        torch.testing.assert_close(known, trained)


def test_the_value_of_a_loss_of_computed_means_is_known_of_outputs_in_half_precision() -> None:
    values = values_of_checks(lambda out: [2 * out - DATA], steps=1, exact=0, dtype=torch.bfloat16)
    torch.testing.assert_close(values[0][1], values[0][0], rtol=0.02, atol=0)


@pytest.mark.parametrize("means", [lambda out: [out, out - DATA], lambda out: [out @ torch.ones(2, 2).triu()]])
def test_the_value_of_losses_that_share_numbers_is_not_known(means: Arithmetic) -> None:
    assert all(known.isinf() for _, known in values_of_checks(means, steps=1, exact=0))


def values_of_checks(
    means: Arithmetic, steps: int, exact: int, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """(the trained loss, its value for the check) of each step. exact: the least number of exact steps in 12."""
    x, model = torch.randn(12, 3).to(dtype), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)

    def loss(out: Tensor) -> list[Any]:
        return [(1.0 + place, losses.Normal(mean)) for place, mean in enumerate(means(out)) if mean.numel()]

    net = compile(model, (x,), loss=loss)
    opt, seen = KFAC(net, seed=0), []
    original = Check.of

    def spied(*args: Any, **options: Any) -> Check:
        check = original(*args, **options)
        seen.append(check.value)
        return check

    trained: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Check, "of", spied)
        for _ in range(12):
            opt.zero_grad()
            terms = [(1.0 + n) * of.square().sum(1).mean() for n, of in enumerate(means(net(x))) if of.numel()]
            total = torch.stack(terms).sum()
            total.backward()
            trained.append(total.detach())
            opt.step()
    assert scalar(opt, "exact_steps") >= exact
    return list(zip(trained[:steps], seen[:steps], strict=True))


def test_a_small_lr_shortens_an_exact_step_and_a_large_one_does_not_lengthen_it() -> None:
    lengths = []
    for lr in (0.25, 1.0, 2.0):
        net, opt = made()
        for _ in range(2):
            step(net, opt)
        state = copy.deepcopy(opt.state_dict())
        at = theta(net).clone()
        opt.load_state_dict(state)
        opt.param_groups[0]["lr"] = lr
        before = scalar(opt, "exact_steps")
        step(net, opt)
        assert scalar(opt, "exact_steps") == before + 1
        lengths.append(float((theta(net) - at).norm()))
    # The bounded step is one of the directions, and the bound gives it other lengths at other rates.
    assert lengths[0] == pytest.approx(0.25 * lengths[1], rel=0.2) and lengths[2] == pytest.approx(lengths[1], rel=0.2)


# --- phases -----------------------------------------------------------------------------------------------------------


def phased(**values: float) -> dict[str, Tensor]:
    start = {**exact_steps.EXACT_SCALARS, **values}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}


def followed(scalars: dict[str, Tensor], losses: list[float], steps: int = 1, risen: bool = False) -> None:
    """After checks with these losses, `steps` apart."""
    for before, after in zip(losses, losses[1:], strict=False):
        value, rise = torch.tensor(after, dtype=torch.float64), torch.tensor(after - before, dtype=torch.float64)
        check: Any = SimpleNamespace(steps=steps, value=value, rise=rise)
        exact_steps.follow_phase(scalars, check, risen)


def falling(rate: float, steps: int, start: float = 1.0) -> list[float]:
    return [start * math.exp(-rate * number) for number in range(steps + 1)]


@pytest.mark.parametrize(("exact", "of_bounded", "next_is_bounded"), [(0.3, 0.1, 0), (0.3, 0.25, 1)])
def test_the_next_long_phase_is_of_the_kind_whose_loss_fell_faster(
    exact: float, of_bounded: float, next_is_bounded: int
) -> None:
    scalars = phased()
    losses = falling(exact, 20)
    followed(scalars, losses[:20])
    assert scalars["long"] == 1 and scalars["bounded"] == 0 and scalars["taken"] == 19
    followed(scalars, losses[19:])
    assert scalars["long"] == 0 and scalars["bounded"] == 1 and scalars["taken"] == 0
    followed(scalars, falling(of_bounded, 10)[::10], steps=10)
    assert scalars["long"] == 1 and scalars["bounded"] == next_is_bounded and scalars["phase"] == 40
    followed(scalars, falling(0.1, 40))
    assert float(scalars["rate"]) == pytest.approx(0.1) and scalars["bounded"] == 1 - next_is_bounded
    steps = 10 if scalars["bounded"] else 15  # of a short phase
    followed(scalars, falling(0.1, steps - 1))
    assert scalars["long"] == 0
    followed(scalars, falling(0.1, 1))
    assert scalars["long"] == 1 and scalars["phase"] == 80


def test_the_logarithm_of_the_loss_counts_and_steps_that_were_undone_count_as_none() -> None:
    scalars = phased()
    followed(scalars, falling(0.2, 20, start=7.0))
    assert float(scalars["rate"]) == pytest.approx(0.2)
    followed(scalars, [1.0, 5.0], risen=True)  # the phase of bounded steps is over with the first check
    assert scalars["bounded"] == 0 and scalars["long"] == 1 and scalars["fallen"] == 0


@pytest.mark.parametrize(
    ("bounded", "lr", "same", "strict"),
    [(1, 1.0, True, True), (1, 1.0, False, False), (0, 1.0, True, False), (0, 0.01, True, True)],
)
def test_a_rise_of_the_repeated_batch_is_undone_where_steps_are_bounded(
    bounded: float, lr: float, same: bool, strict: bool
) -> None:
    was, usual = torch.tensor(2.0), torch.tensor(0.7)
    flat = SimpleNamespace(largest_lr=torch.tensor(lr))
    step: Any = SimpleNamespace(scalars=phased(bounded=bounded, repeats=1.0), flat=flat)
    tolerance = exact_steps.tolerated_in_phase(step, usual, was, torch.tensor(same))
    assert float(tolerance) == pytest.approx(2e-3 if strict else 0.7)


# --- around them ------------------------------------------------------------------------------------------------------


def test_an_exact_step_that_makes_the_loss_rise_is_undone_and_the_next_step_is_bounded(
    moves: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, opt = made()
    for _ in range(3):
        step(net, opt)
    spied = exact_steps.exact_move

    def backwards(*args: Any) -> ExactMove | None:
        exact = spied(*args)
        assert exact is not None
        exact.move.neg_()
        return exact

    monkeypatch.setattr(exact_steps, "exact_move", backwards)
    at, damping = theta(net).clone(), scalar(opt, "exact_damping")
    step(net, opt)
    assert torch.equal(theta(net), at) and opt.skipped == opt.undone == 1 and scalar(opt, "undone") == 1
    assert "skipped 1, of these undone 1" in repr(opt)  # a failure and an attempt looked the same
    assert scalar(opt, "exact_damping") == pytest.approx(damping / OMEGA**4)
    monkeypatch.setattr(exact_steps, "exact_move", spied)
    step(net, opt)
    assert moves[-1].exact is None and opt._step_state.schedule.checking
    for _ in range(20):
        step(net, opt)
    assert any(seen.exact is not None for seen in moves[-20:])


def test_exact_steps_leave_the_multiplier_alone() -> None:
    net, opt = made()
    for _ in range(10):
        before, made_before = scalar(opt, "multiplier"), scalar(opt, "exact_steps")
        held = scalar(opt, "held")
        step(net, opt)
        if held and scalar(opt, "exact_steps") > made_before and scalar(opt, "steps") > 6:
            assert scalar(opt, "multiplier") == before == held
    assert scalar(opt, "exact_steps") > 5


def test_a_training_with_exact_steps_goes_on_from_its_state_bit_for_bit() -> None:
    net, opt = made()
    for _ in range(9):
        step(net, opt)
    assert opt._step_state.schedule.checking and scalar(opt, "exact_steps") > 3
    weights, state = copy.deepcopy(net.model.state_dict()), copy.deepcopy(opt.state_dict())
    for _ in range(9):
        step(net, opt)
    again, loaded = made()
    again.model.load_state_dict(weights)
    loaded.load_state_dict(state)
    for _ in range(9):
        step(again, loaded)
    assert torch.equal(theta(net), theta(again))
    assert scalar(loaded, "exact_steps") == scalar(opt, "exact_steps") > 10


def test_statistics_and_bases_are_denser_where_every_step_has_a_check() -> None:
    net, opt = made()
    for _ in range(4):
        step(net, opt)
    schedule = opt._step_state.schedule
    chosen, present = schedule.intervals, schedule.present
    assert schedule.intervals_apart == 0 and chosen.statistics > 5
    assert present == (math.ceil(chosen.statistics / 5), math.ceil(chosen.inverses / 5), chosen.checks)
    assert schedule.present_decay == pytest.approx(0.98**present.statistics)
    assert schedule.decay == pytest.approx(0.98**chosen.statistics)
    recorded = []
    for _ in range(12):
        recorded.append(schedule.recording)
        step(net, opt)
    assert sum(recorded) >= 3


def test_given_intervals_stay_where_every_step_has_a_check() -> None:
    net, opt = made(cov_update_every=20, invert_every=40)
    for _ in range(4):
        step(net, opt)
    schedule = opt._step_state.schedule
    assert schedule.intervals_apart == 0 and schedule.present == schedule.intervals
    assert schedule.present[:2] == (20, 40) and schedule.present_decay == pytest.approx(0.98**20)


def test_the_report_counts_exact_steps() -> None:
    net, opt = made()
    for _ in range(8):
        step(net, opt)
    number = int(scalar(opt, "exact_steps"))
    told = f"{number} steps minimized the exact quadratic model of a batch that repeats, at a cost of their own"
    assert told in " ".join(str(net.report).split())


def test_micro_batches_of_a_full_batch_have_exact_steps() -> None:
    net, opt = made()
    losses = []
    for _ in range(15):
        opt.zero_grad()
        total = 0.0
        for part in (slice(0, 12), slice(12, 24)):
            loss = F.cross_entropy(net(FULL[0][part]), FULL[1][part]) / 2
            loss.backward()
            total += float(loss.detach())
        opt.step()
        losses.append(total)
    whole = losses_of(lambda: made())
    assert scalar(opt, "exact_steps") > 5
    assert losses[:4] == pytest.approx(whole[:4], rel=1e-3) and math.log(losses[-1] / whole[-1]) < 1


def losses_of(make: Callable[[], tuple[CompiledModule, KFAC]]) -> list[float]:
    net, opt = make()
    return [step(net, opt) for _ in range(15)]


# --- bounded steps that made the loss rise ----------------------------------------------------------------------------


def noted(change: float, kept: bool, **values: float) -> tuple[bool, dict[str, Tensor]]:
    """After the step of a check: (whether the next step has a check, the scalars)."""
    scalars, true, false = phased(**values), torch.tensor(True), torch.tensor(False)
    step: Any = SimpleNamespace(scalars=scalars, check_next=False)
    check: Any = SimpleNamespace(
        value=torch.tensor(1.0, dtype=torch.float64), is_fitted=false, batch=SimpleNamespace(agreed=bool)
    )
    of_change = torch.tensor(change, dtype=torch.float64)
    exact_steps.note_outcome(step, check, Outcome(true, torch.tensor(kept), of_change, of_change))
    return step.check_next, scalars


def test_a_bounded_step_that_was_undone_ends_the_phase_of_such_steps() -> None:
    check_next, scalars = noted(5.0, kept=False, repeats=1, bounded=1, long=0, rate=0.1, taken=3, fallen=0.1)
    assert check_next
    assert (scalars["bounded"], scalars["long"], scalars["taken"], scalars["fallen"]) == (0, 1, 0, 0)


@pytest.mark.parametrize("change", [0.5, math.nan])
def test_a_step_that_made_the_loss_of_a_repeating_batch_rise_has_a_check_behind_it(change: float) -> None:
    check_next, scalars = noted(change, kept=True, repeats=1, bounded=1, long=0, rate=0.1, taken=3)
    assert check_next and (scalars["bounded"], scalars["taken"]) == (1, 3)
    assert not noted(-0.5, kept=True, repeats=1, bounded=1)[0]
    assert not noted(change, kept=True, repeats=0)[0]  # noise makes it rise, too
    assert not noted(change, kept=True, repeats=1, others=1)[0]  # another term may have fallen


def test_a_bounded_step_goes_no_further_than_a_small_loss_that_repeats() -> None:
    bound = torch.tensor(0.03)
    for value, repeats, wanted in ((1e-4, 1, 9e-5), (1e-4, 0, 0.03), (0.5, 1, 0.03), (-2.0, 1, 0.03)):
        check: Any = SimpleNamespace(value=torch.tensor(value))
        longest = exact_steps.longest_bounded(phased(repeats=repeats), check, bound)
        torch.testing.assert_close(longest, torch.tensor(wanted))


def test_behind_steps_that_were_undone_the_next_step_has_a_check() -> None:
    scalars = phased(repeats=1)
    batch = SimpleNamespace(agreed=bool)
    check: Any = SimpleNamespace(norm=torch.tensor(1.0), batch=batch, same=True)
    step: Any = SimpleNamespace(scalars=scalars, flat=None, risen=torch.tensor(True), check_next=False)
    unused: Any = None
    assert exact_steps.exact_move(step, check, unused, unused) is None and step.check_next


def losses_of_repeating(model: nn.Module, x: Tensor, y: Tensor, name: str, steps: int, decays: bool = False) -> Tensor:
    """The losses of a training whose batch repeats, [steps], in float32. decays: whether the lr decays to zero."""
    loss_of = F.cross_entropy if name == "cross_entropy" else F.mse_loss
    net = compile(model, loss=name)
    opt, values = KFAC(net), []
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        if decays:
            opt.param_groups[0]["lr"] = 1 - len(values) / steps
        opt.step()
        values.append(loss.detach())
    return torch.stack(values)


@pytest.mark.parametrize("seed", every(2, range(2)))
def test_a_regression_in_float32_does_not_rise_where_its_loss_is_small(seed: int) -> None:
    """Rounding in a part of a short step looked like another term of the loss, so its steps were not watched: losses
    of 1e-5 rose 400 and 2,300 times."""
    torch.manual_seed(3 * seed)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.randn(80, 2)
    values = losses_of_repeating(model, x, (2 * x[:, :1]).sin() * x[:, 1:], "mse", 200)
    assert (values < 10 * values.cummin(0).values).all()
    assert values[-1] < 1e-6  # 3e-6 and 4e-6 before


@pytest.mark.parametrize("seed", every(2, range(2)))
def test_a_loss_does_not_rise_where_a_schedule_ends(seed: int) -> None:
    """With an lr below `LEAST_LR` there are no exact steps; the bounded ones were those of a batch with noise."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.randn(80, 2)
    values = losses_of_repeating(model, x, (2 * x[:, :1]).sin() * x[:, 1:], "mse", 400, decays=True)
    assert values[-1] < 1.2 * values.min()


def test_a_batch_that_a_classifier_has_fitted_stays_fitted() -> None:
    """The loss of 1e-7 was known up to 1e-5, so its batch did not count as one that repeats; the loss rose to 7."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 4))
    values = losses_of_repeating(model, torch.randn(60, 5), torch.randint(4, (60,)), "cross_entropy", 400)
    fitted = values[values.cummin(0).values < 1e-6]
    assert len(fitted) > 300 and fitted.max() < 1e-4


def test_probes_are_longer_where_the_loss_of_a_repeating_batch_is_small() -> None:
    for value, repeats, divisor, wanted in (
        (1e-5, 1, 1.0, 0.005 / math.sqrt(3e-4)),
        (1e-5, 1, 10.0, 0.1),
        (1e-5, 0, 1.0, 0.005),
        (0.5, 1, 1.0, 0.005),
        (1e-5, 1, 1e4, 0.005),
    ):
        step: Any = SimpleNamespace(
            scalars=phased(repeats=repeats), size=SimpleNamespace(divisor=torch.tensor(divisor, dtype=torch.float64))
        )
        check: Any = SimpleNamespace(value=torch.tensor(value, dtype=torch.float64), quotient_step=0.005)
        exact_steps.lengthen_probes(step, check)
        assert float(check.quotient_step) == pytest.approx(wanted)


@pytest.mark.filterwarnings("error::kfac_fx.StalledWarning")
@pytest.mark.parametrize("kind", ["a linear layer", "float64"])
def test_a_batch_that_is_fitted_up_to_rounding_is_not_said_to_stall(kind: str) -> None:
    """Steps become as short as the loss allows, and those at a loss of rounding are undone."""
    torch.manual_seed(1 if kind == "a linear layer" else 0)
    x = torch.randn(64, 6)
    if kind == "a linear layer":
        values = losses_of_repeating(nn.Linear(6, 2), x, x @ torch.randn(6, 2), "mse", 300)
        assert values.min() < 1e-13
    else:
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
        values = losses_of_repeating(model, x.double(), torch.sin(2 * x[:, :2].double()), "mse", 180)
        assert values.min() < 1e-28
