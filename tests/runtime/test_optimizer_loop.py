"""KFAC in an ordinary loop: scaled and clipped gradients, groups, the order of calls, compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.losses import Categorical
from kfac_fx.optim import step
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.errors import FactorNotReady
from tests.runtime.slow_kfac import batch, loss_of, mlp
from tests.runtime.toy_optimizers import KINDS, QUADRATIC, assert_same, backward, made, train, values
from tests.tables import pairs

# --- what a loop does with an optimizer -------------------------------------------------------------------------------


@pairs(("momentum_type", ["regular", "qmodel"]), ("estimation_mode", ["gradients", "empirical"]))
def test_a_grad_scaler_changes_nothing_but_the_scale(momentum_type: str, estimation_mode: str) -> None:
    options: dict[str, Any] = {"estimation_mode": estimation_mode, **(QUADRATIC if momentum_type == "qmodel" else {})}
    plain, opt = made(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    net, scaled = made(grad_scaler=scaler, **options)
    for number in range(4):
        opt.zero_grad()
        backward(plain, number)
        opt.step()
        scaled.zero_grad()
        x, y = batch(number)
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        if number % 2:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() > 64.0
    torch.testing.assert_close(values(net), values(plain))


@pytest.mark.parametrize(
    ("momentum_type", "scale"), [("eigen_moments", 2.0**16), ("eigen_moments", 2.0), ("adaptive", 2.0**16)]
)
def test_checks_know_the_scale_of_a_scaler_that_is_not_given(momentum_type: str, scale: float) -> None:
    """They see the gradients of the outputs, which the scaler does not divide."""
    options: dict[str, Any] = {"lr": None, "damping": None, "momentum_type": momentum_type}
    (plain, opt), (net, scaled) = made(**options), made(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    for number in range(6):
        opt.zero_grad()
        backward(plain, number)
        opt.step()
        scaled.zero_grad()
        x, y = batch(number)
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        scaler.step(scaled)
        scaler.update()
    torch.testing.assert_close(scaled.scalars["predicted_change"], opt.scalars["predicted_change"])
    torch.testing.assert_close(values(net), values(plain))


def test_a_scaler_is_looked_for_once_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = made(lr=None, damping=None, momentum_type="eigen_moments")
    looked: list[float] = []

    def look() -> float:
        looked.append(1.0)
        return 1.0

    monkeypatch.setattr(step, "scale_of_caller", look)
    for number in range(3):  # each has a check
        opt.zero_grad()
        backward(net, number)
        opt.step()
    assert looked == [1.0]


@pytest.mark.parametrize("options", [QUADRATIC, {}], ids=["qmodel", "regular"])
def test_a_grad_scaler_hands_a_closure_on(options: dict[str, Any]) -> None:
    adapting = {**options, "adapt_damping": True, "damping_adaptation_interval": 2}
    plain, opt = made(**adapting)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    net, scaled = made(grad_scaler=scaler, **adapting)
    train(plain, opt, range(4))
    for number in range(4):
        scaled.zero_grad()
        x, y = batch(number)
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        scaler.step(scaled, evaluate=loss_of(net, x, y))
        scaler.update()
    assert scaler.get_scale() > 64.0 and opt.rho.isfinite()
    torch.testing.assert_close(values(net), values(plain))
    torch.testing.assert_close(scaled.damping, opt.damping)


@pairs(("zeroed_by", ["optimizer", "net", "model"]), ("approximations", {"layers": None, "generic": {"*": "generic"}}))
def test_a_step_that_is_left_out_leaves_no_statistics_of_the_backward(
    zeroed_by: str, approximations: dict[str, str] | None
) -> None:
    """Its record is no micro-batch of the next step, whose statistics would be those of a gradient twice as long."""
    found = []
    for numbers in ([0, 1], [1]):
        net = compile(mlp(), loss="categorical", approximations=approximations)
        opt = KFAC(net, lr=0.3, damping=0.1, estimation_mode="empirical")
        for number in numbers:
            {"optimizer": opt, "net": net, "model": net.model}[zeroed_by].zero_grad()
            backward(net, number)
        opt.step()
        found.append({str(key): block.full_fisher_block() for key, block in opt.estimator.blocks.items()})
    torch.testing.assert_close(*found)


def test_a_step_that_the_grad_scaler_skips_changes_nothing() -> None:
    net, opt = made(mlp().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    before = values(net)
    for number in range(2):
        opt.zero_grad()
        x, y = batch(number)
        scaler.scale(1e12 * F.cross_entropy(net(x.float()), y)).backward()
        scaler.step(opt)
        scaler.update()
    assert_same(before, values(net))
    assert opt.counter == 0


def test_clipped_gradients_are_those_that_are_preconditioned() -> None:
    net, opt = made(momentum=0.0)
    other, same = made(momentum=0.0)
    backward(net, 0)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    backward(other, 0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
    before = values(net)
    opt.step()
    same.step()
    for name, value in before.items():
        torch.testing.assert_close(values(net)[name] - value, (values(other)[name] - value) * 0.01 / norm)


def test_parameter_groups_have_their_own_lr_and_weight_decay() -> None:
    net, opt = made()
    named = dict(net.named_parameters())
    other = compile(mlp(), loss="categorical")
    mine = dict(other.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [mine["0.weight"], mine["0.bias"]]},
        {"params": [("2.weight", mine["2.weight"]), ("2.bias", mine["2.bias"])], "lr": 0.1, "weight_decay": 0.5},
    ]
    grouped = KFAC(other, lr=0.3, damping=0.1, seed=0, params=groups)
    assert [group["lr"] for group in grouped.param_groups] == [0.3, 0.1]
    before = values(net)
    for model in (net, other):
        backward(model, 0)
    opt.step()
    grouped.step()
    torch.testing.assert_close(mine["0.weight"], named["0.weight"])
    update = (named["2.weight"] - before["2.weight"]) / -0.3
    torch.testing.assert_close(mine["2.weight"], before["2.weight"] - 0.1 * (update + 0.5 * before["2.weight"]))


@pytest.mark.parametrize("options", [QUADRATIC, {}], ids=["qmodel", "regular"])
def test_the_predicted_change_knows_groups_and_weight_decay(options: dict[str, Any]) -> None:
    """With a small step the quadratic model predicts the change of the loss, whatever makes the step."""
    net = compile(mlp(), loss="categorical")
    first, *rest = net.parameters()
    groups = [{"params": [first], "lr": 1e-4, "weight_decay": 0.5}, {"params": rest, "lr": 3e-4}]
    adapting = {"adapt_damping": True, "damping_adaptation_interval": 1, "invert_every": 1}
    opt = KFAC(net, **{"lr": 0.1, "damping": 0.1, **adapting, **options}, params=groups)
    train(net, opt, range(3))
    assert opt.rho.item() == pytest.approx(1.0, abs=1e-2)


def test_an_option_of_the_whole_optimizer_is_none_of_a_group() -> None:
    net = compile(mlp(), loss="categorical")
    groups = [{"params": list(net.parameters()), "damping": 3.0, "momentum": 0.5, "name": "all"}]
    text = r"its own lr, momentum, weight_decay, and shares .* KFAC\(..., damping=3.0\), and not damping in a group"
    with pytest.raises(ValueError, match=text):
        KFAC(net, lr=0.1, damping=0.1, params=groups)
    text = r"its own lr, weight_decay, .* KFAC\(..., damping=3.0, momentum=0.5\), and not damping, momentum in a group"
    with pytest.raises(ValueError, match=text):
        KFAC(net, damping=0.1, params=groups, momentum=None, momentum_type="qmodel")


@pytest.mark.parametrize("option", ["lr", "momentum", "weight_decay"])
def test_an_option_of_a_group_is_not_negative(option: str) -> None:
    net = compile(mlp(), loss="categorical")
    with pytest.raises(ValueError, match=f"{option} is -0.1; it must "):
        KFAC(net, lr=0.1, damping=0.1, params=[{"params": list(net.parameters()), option: -0.1}])


@pytest.mark.parametrize(
    ("key", "meant"),
    [("Lr", "lr"), ("weigth_decay", "weight_decay"), ("weightdecay", "weight_decay"), ("Damping", "damping")],
)
def test_a_misspelled_option_of_a_group_is_refused(key: str, meant: str) -> None:
    net = compile(mlp(), loss="categorical")
    text = f"a parameter group has an option {key!r}, which is none. Did you mean {meant!r}\\?"
    with pytest.raises(ValueError, match=text):
        KFAC(net, lr=0.1, damping=0.1, params=[{"params": list(net.parameters()), key: 0.3}])


def test_a_group_may_have_entries_of_schedulers_and_of_the_user() -> None:
    net = compile(mlp(), loss="categorical")
    others = dict.fromkeys(
        ("name", "initial_lr", "max_lr", "base_momentum", "max_momentum", "lr_scale", "wd_mult"), 1.0
    )
    opt = KFAC(net, lr=0.1, damping=0.1, params=[{"params": list(net.parameters()), **others}])
    assert others.items() <= opt.param_groups[0].items()


def test_a_parameter_group_may_come_later() -> None:
    net = compile(mlp(), loss="categorical")
    named = dict(net.named_parameters())
    opt = KFAC(net, lr=0.3, damping=0.1, seed=0, params=[named["0.weight"]])
    before = values(net)
    train(net, opt, range(1))
    moved = [name for name, value in values(net).items() if not torch.equal(value, before[name])]
    assert moved == ["0.weight"]
    opt.add_param_group({"params": [named["2.bias"]], "lr": 0.1})
    train(net, opt, range(1, 2))
    moved = [name for name, value in values(net).items() if not torch.equal(value, before[name])]
    assert moved == ["0.weight", "2.bias"]


def test_a_learning_rate_may_be_a_tensor() -> None:
    net, opt = made(lr=torch.tensor(0.3, dtype=torch.float64))
    other, same = made()
    for model, optimizer in ((net, opt), (other, same)):
        train(model, optimizer, range(2))
    assert_same(values(net), values(other))


# --- order of calls ---------------------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[KFAC], Any]] = {
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.3, total_steps=9, cycle_momentum=False),
    "cyclic": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 0.3, step_size_up=2, cycle_momentum=False),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 9),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_step_is_as_long_as_the_scheduler_says(make: Callable[[KFAC], Any]) -> None:
    net, opt = made(momentum=0.0)
    scheduler = make(opt)
    for number in range(3):
        opt.zero_grad()
        backward(net, number)
        before = values(net)
        opt.step()
        moved = torch.cat([(before[name] - p).flatten() for name, p in net.named_parameters()]).detach()
        g = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        product = torch.cat([tensor.flatten() for tensor in opt.estimator.multiply_inverse(g).values()])
        torch.testing.assert_close(moved, opt.param_groups[0]["lr"] * product)
        scheduler.step()


@pytest.mark.parametrize("momentum_type", ["regular", "adam"])
def test_a_velocity_lasts_as_long_as_the_scheduler_says(momentum_type: str) -> None:
    net, opt = made(momentum_type=momentum_type)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.3, total_steps=9)
    v = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    seen = []
    for number in range(4):
        opt.zero_grad()
        backward(net, number)
        opt.step()
        g = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        added = opt.estimator.multiply_inverse(g) if momentum_type == "regular" else g
        seen.append(opt.param_groups[0]["momentum"])
        v = {name: seen[-1] * tensor + added[name] for name, tensor in v.items()}
        for name, p in net.named_parameters():
            torch.testing.assert_close(opt.state[p]["velocity"], v[name])
        scheduler.step()
    assert seen[0] == 0.95 and len(set(seen)) == 4


@pytest.mark.parametrize("kind", ["qmodel", "qmodel_fixedmu"])
def test_a_momentum_of_the_quadratic_model_is_no_option_that_a_scheduler_cycles(kind: str) -> None:
    with pytest.raises(ValueError, match="cycle_momentum"):
        torch.optim.lr_scheduler.OneCycleLR(made(**KINDS[kind])[1], 0.3, total_steps=9)


def test_training_the_original_model_is_explained() -> None:
    net, opt = made()
    backward(net.model, 0)
    with pytest.raises(FactorNotReady, match=r"no batch was ever recorded.*net\(x\) and not the model it was made of"):
        opt.step()


def test_the_quadratic_model_needs_the_batch() -> None:
    net, opt = made(**QUADRATIC)
    train(net, opt, range(1))
    opt.zero_grad()
    backward(net.model, 1)
    with pytest.raises(
        RuntimeError, match=r"momentum_type='qmodel' computes this step with the batch of the step, and has none"
    ):
        opt.step()


def test_evaluation_forwards_are_not_recorded() -> None:
    net, opt = made()
    other, same = made()
    for number in range(2):
        for model, optimizer in ((net, opt), (other, same)):
            optimizer.zero_grad()
            backward(model, number)
        net.eval()
        net(batch(7)[0])
        net.train()
        with torch.no_grad():
            net(batch(8)[0])
        opt.step()
        same.step()
    assert_same(values(net), values(other))


@pytest.mark.parametrize("estimation_mode", ["gradients", "empirical"])
def test_steps_without_the_statistics_that_are_due_are_warned_of_once_and_counted(estimation_mode: str) -> None:
    net = compile(mlp(), loss="categorical")
    opt = KFAC(net, lr=0.1, damping=0.1, cov_update_every=2, estimation_mode=estimation_mode)
    x, y = batch(0)

    def step(forward: Callable[..., torch.Tensor]) -> None:
        opt.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        opt.step()

    for forward in (net, net.model):  # at the second none are due
        step(forward)
    with pytest.warns(RuntimeWarning, match=r"factors of earlier batches, .*\n.*net\(x\).*after net\.train\(\)"):
        step(net.model)
    net.eval()
    for _ in range(2):
        step(net)
    assert opt.fallbacks() == ["statistics were due at 2 steps that no forward with a backward came before"]


def test_the_step_drops_its_batch() -> None:
    net, opt = made(**QUADRATIC)
    backward(net, 0)
    assert len(opt._forwards.seen.calls) == 1
    opt.step()
    assert not opt._forwards.seen.calls


@pytest.mark.parametrize("estimation_mode", ["gradients", "empirical"])
def test_statistics_are_recorded_on_the_steps_where_they_are_due(estimation_mode: str) -> None:
    net, opt = made(cov_update_every=3, estimation_mode=estimation_mode)
    weights = []
    for number in range(7):
        train(net, opt, range(number, number + 1))
        weights.append(opt.estimator.blocks[("0.weight", "0.bias")].factors["A"].total_weight.item())
    decay = 0.95**3
    assert weights == pytest.approx([1.0] * 3 + [1 + decay] * 3 + [1 + decay + decay**2])


def test_burn_in_steps_only_average_statistics() -> None:
    net, opt = made(num_burnin_steps=2, cov_update_every=4)
    before = values(net)
    train(net, opt, range(2))
    assert_same(before, values(net))
    factor = opt.estimator.blocks[("0.weight", "0.bias")].factors["A"]
    assert factor.total_weight.item() == 2.0
    rows = torch.cat([torch.cat([batch(n)[0], torch.ones(6, 1)], dim=1) for n in range(2)])
    torch.testing.assert_close(factor.value[0], rows.T @ rows / 12)
    assert opt.counter == 0


def test_a_fraction_of_the_batch_is_recorded() -> None:
    net, opt = made(fraction=0.5)
    train(net, opt, range(1))
    x = torch.cat([batch(0)[0][:3], torch.ones(3, 1)], dim=1)
    factor = opt.estimator.blocks[("0.weight", "0.bias")].factors["A"].value
    torch.testing.assert_close(factor[0], x.T @ x / 3)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "adaptive" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_compiled_step_is_the_eager_step(kind: str) -> None:
    torch.compiler.reset()
    options = {**KINDS[kind], "weight_decay": 0.01, "invert_every": 2}
    net, opt = made(**options)
    other = compile(mlp(), loss="categorical", backend="aot_eager")
    compiled = KFAC(other, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})
    scheduler, same = (torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (opt, compiled))
    for number in range(4):
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            train(net, opt, range(number, number + 1))
            train(other, compiled, range(number, number + 1))
        scheduler.step()
        same.step()
        for group in (*opt.param_groups, *compiled.param_groups):
            group |= {"momentum": 0.9 * group["momentum"]} if "momentum" in group else {}
    torch.testing.assert_close(values(other), values(net))


def test_the_losses_before_and_after_a_step_are_averaged_over_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/whole/test_owners.py holds the quadratic model, whose sums over the cases of several processes are sent."""
    net, opt = made(**QUADRATIC, adapt_damping=True, damping_adaptation_interval=1)
    other, same = made(**QUADRATIC, adapt_damping=True, damping_adaptation_interval=1)
    averaged: list[tuple[int, ...]] = []

    def average(tensor: Tensor) -> Tensor:
        """As if the losses of the other replicas were three times as large."""
        averaged.append(tuple(tensor.shape))
        return 2 * tensor

    monkeypatch.setattr(opt._step_state.replicas, "mean", average)
    for of_training, optimizer in ((net, opt), (other, same)):
        train(of_training, optimizer, range(1))
    assert averaged == [(), ()]
    torch.testing.assert_close(opt.rho, 2 * same.rho)


def test_the_sampled_targets_are_the_optimizer_s_own() -> None:
    net, opt = made(seed=4)
    expected = torch.Generator().manual_seed(4)
    before = torch.get_rng_state()
    train(net, opt, range(1))
    assert torch.equal(before, torch.get_rng_state())
    Categorical(mlp()(batch(0)[0]).detach()).sample(expected)
    assert torch.equal(opt.generator.get_state(), expected.get_state())


@pytest.mark.parametrize("seed", [0, 1])
def test_early_inverses_keep_plain_settings_bounded(seed: int) -> None:
    """With inverses every tenth step only, the first batch's inverse alone makes ten steps: the loss passes 1e6."""
    torch.manual_seed(seed)
    target = torch.randn(16, 1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    net = compile(model, loss="normal")
    opt, generator, losses = KFAC(net, lr=0.1, damping=1e-2, seed=0), torch.Generator().manual_seed(1), []
    for _ in range(60):
        x = torch.randn(32, 16, generator=generator)
        opt.zero_grad()
        loss = (net(x) - torch.tanh(x @ target)).square().sum(1).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert max(losses) < 100 * losses[0] and sum(losses[-5:]) / 5 < 0.5 * max(losses)


class Fails(Exception):
    pass


@pytest.mark.parametrize("options", [*KINDS.values(), {"estimation_mode": "empirical"}], ids=[*KINDS, "empirical"])
def test_a_forward_that_fails_leaves_no_batch_for_the_step(options: dict[str, Any]) -> None:
    """As one that runs out of memory, and is given up."""
    after = []
    for failing in (False, True):
        net, opt = made(**options)
        train(net, opt, range(2))
        opt.zero_grad()
        if failing:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(opt._forwards, "on_outputs", raising)
                with pytest.raises(Fails):
                    net(3 * batch(7)[0])
        train(net, opt, range(2, 5))
        after.append(values(net))
    assert_same(*after)


def raising(*_: Any) -> None:
    raise Fails


@pytest.mark.parametrize("late", [False, True])
def test_losses_of_single_cases_are_refused_before_anything_moves(late: bool) -> None:
    net, opt = made(adapt_damping=True, damping_adaptation_interval=1)
    before = values(net)
    x, y = batch(0)

    def closure() -> Tensor:
        losses = F.cross_entropy(net(x), y, reduction="none")
        if not late:
            opt.zero_grad()
            losses.mean().backward()
        return losses

    if late:
        backward(net, 0)
    with pytest.raises(
        ValueError, match=r"the loss has the shape \[\d+\], and a step takes one number: write loss\.mean"
    ):
        opt.step(**{"evaluate" if late else "closure": closure})
    with pytest.raises(ValueError, match=r"the loss has the shape"):
        opt.step(loss=torch.zeros(3))
    assert_same(before, values(net))
    assert opt.counter == 0


def test_a_loss_in_the_place_of_a_closure_is_explained() -> None:
    net, opt = made()
    loss: Any = backward(net, 0)
    with pytest.raises(TypeError, match=r"a closure by position, and got a Tensor: write step\(loss=loss\)"):
        opt.step(loss)
