"""KFAC as a torch optimizer: state, schedulers, scaling, clipping, missing gradients, values that are not finite."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_fx.compiled_module import CompiledModule
from kfac_fx.compiler import compile
from kfac_fx.losses import Categorical
from kfac_fx.optimizer import KFAC
from kfac_fx.passes.errors import FactorNotReady
from tests.runtime.slow_kfac import batch, loss_of, mlp

QUADRATIC: dict[str, Any] = {"lr": None, "momentum": None, "momentum_type": "qmodel"}
KINDS: dict[str, dict[str, Any]] = {
    "regular": {},
    "adam": {"momentum_type": "adam"},
    "qmodel": QUADRATIC,
    "qmodel_fixedmu": {"lr": None, "momentum_type": "qmodel_fixedmu"},
}


def made(model: nn.Module | None = None, **options: Any) -> tuple[CompiledModule, KFAC]:
    net = compile(mlp() if model is None else model, loss="categorical")
    return net, KFAC(net, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})


def backward(net: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def train(net: CompiledModule, opt: KFAC, numbers: range) -> None:
    for number in numbers:
        opt.zero_grad()
        backward(net, number)
        opt.step(loss_of(net, *batch(number)))


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def flat_state(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat_state(value, f"{path}/{key}").items()}
    return {path: tree.clone() if isinstance(tree, Tensor) else copy.deepcopy(tree)}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value.nan_to_num(), second[name].nan_to_num()) if isinstance(value, Tensor) else None
        assert same if same is not None else value == second[name], name


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_checkpoint_resumes_bit_for_bit(options: dict[str, Any]) -> None:
    options = {**options, "adapt_damping": True, "damping_adaptation_interval": 2, "invert_every": 3, "seed": 5}
    net, opt = made(**options)
    train(net, opt, range(5))
    stored = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, stored)
    train(net, opt, range(5, 10))

    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    resumed, again = made(**{**options, "damping": 7.0, "seed": 6})
    resumed.load_state_dict(loaded["net"])
    again.load_state_dict(loaded["opt"])
    train(resumed, again, range(5, 10))
    for name, value in values(net).items():
        assert torch.equal(value, values(resumed)[name]), name
    assert_same(flat_state(opt.state_dict()), flat_state(again.state_dict()))


def test_a_checkpoint_resumes_within_a_burn_in() -> None:
    net, opt = made(num_burnin_steps=3)
    train(net, opt, range(2))
    resumed, again = made(num_burnin_steps=3)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    resumed.load_state_dict(net.state_dict())
    train(net, opt, range(2, 6))
    train(resumed, again, range(2, 6))
    assert (again.burned_in, again.counter) == (3, 3)
    assert_same(values(net), values(resumed))


def test_a_loaded_state_shares_nothing_with_its_source_and_keeps_its_precision() -> None:
    net, other = (compile(mlp().bfloat16(), loss="categorical", verify=False) for _ in range(2))
    opt, loading = (KFAC(one, lr=0.3, damping=0.1) for one in (net, other))
    x, y = batch(0)
    F.cross_entropy(net(x.bfloat16()), y).backward()
    opt.step()
    velocity = opt.state[next(net.parameters())]["velocity"]
    assert velocity.dtype is torch.float32
    loading.load_state_dict(opt.state_dict())
    loaded = loading.state[next(other.parameters())]["velocity"]
    assert torch.equal(loaded, velocity)
    loaded.zero_()
    assert velocity.any()


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    net, opt = made()
    with pytest.raises(ValueError, match="the state has no 'kfac' entry: it is that of another kind of optimizer"):
        opt.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())


# --- what a loop does with an optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum_type", ["regular", "qmodel"])
@pytest.mark.parametrize("estimation_mode", ["gradients", "empirical"])
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
    for one in (net, other):
        backward(one, 0)
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
    text = r"KFAC\(..., damping=3.0, momentum=0.5\), and not damping, momentum in a group"
    with pytest.raises(ValueError, match=text):
        KFAC(net, lr=0.1, damping=0.1, params=groups)


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
    for one, optimizer in ((net, opt), (other, same)):
        train(one, optimizer, range(2))
    assert_same(values(net), values(other))


# --- gradients that are missing, zero, or not finite ------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_parameter_without_a_gradient_stands_still_and_counts_as_zero(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    other, same = made(**options)
    for one in (net, other):
        backward(one, 0)
    absent, zeroed = net.get_parameter("0.bias"), other.get_parameter("0.bias")
    absent.grad = None
    assert zeroed.grad is not None
    zeroed.grad.zero_()
    before = absent.detach().clone()
    opt.step()
    assert torch.equal(absent, before)
    assert absent not in opt.state
    if "qmodel" not in options.get("momentum_type", ""):
        same.step()
        torch.testing.assert_close(net.get_parameter("0.weight"), other.get_parameter("0.weight"))
    backward(net, 1)
    opt.step()
    assert not torch.equal(absent, before)


def test_a_step_without_any_gradient_does_nothing() -> None:
    net, opt = made()
    net(batch(0)[0])
    before = flat_state(opt.state_dict())
    assert opt.step() is None
    assert_same(before, flat_state(opt.state_dict()))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("where", ["gradient", "inputs", "loss"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_changes_nothing(options: dict[str, Any], where: str, value: float) -> None:
    net, opt = made(**options, invert_every=5, weight_decay=0.1)
    train(net, opt, range(2))
    before, state = values(net), flat_state(opt.state_dict())
    opt.zero_grad()
    x, y = batch(2)
    if where == "inputs":
        x = x * value
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if where == "gradient":
        net.get_parameter("2.bias").grad[0] = value  # type: ignore[index]
    opt.step(loss=torch.tensor(value) if where == "loss" else None)
    assert_same(before, values(net))
    now = flat_state(opt.state_dict())
    moves_on = ("/counter", "/skipped", "/generator", "/predicted_change", "/qmodel_learning_rate", "/qmodel_momentum")
    kept = {name: v for name, v in state.items() if not name.endswith(moves_on)}
    assert_same(kept, {name: now[name] for name in kept})
    assert opt.skipped.item() == 1
    train(net, opt, range(3, 4))
    assert all(not torch.equal(value, before[name]) for name, value in values(net).items())
    assert opt.skipped.item() == 1


def test_an_update_that_is_not_finite_is_not_made() -> None:
    net, opt = made(lr=1e300, momentum=0.0)
    train(net, opt, range(0))
    before = values(net)
    backward(net, 0)
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1e200
    opt.step()
    assert_same(before, values(net))
    assert opt.skipped.item() == 1


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_first_step_that_is_not_finite_is_taken_again(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    x, y = batch(7)
    (F.cross_entropy(net(x), y) * torch.nan).backward()
    opt.step()
    other, same = made(**options)
    same.generator.set_state(opt.generator.get_state())
    for one, optimizer in ((net, opt), (other, same)):
        train(one, optimizer, range(2))
    assert_same(values(net), values(other))
    assert (opt.counter, opt.skipped.item()) == (2, 1)


def test_the_damping_stays_where_the_step_is_skipped() -> None:
    net, opt = made(adapt_damping=True, damping_adaptation_interval=1)
    backward(net, 0)
    net.get_parameter("2.bias").grad[0] = torch.nan  # type: ignore[index]
    opt.step(loss_of(net, *batch(0)))
    assert opt.damping.item() == pytest.approx(0.1)


class NoHostReads(TorchDispatchMode):
    """Fails where the host waits for a value of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_an_ordinary_step_reads_nothing_back_from_the_device(options: dict[str, Any]) -> None:
    net, opt = made(**options, weight_decay=0.1)
    train(net, opt, range(2))
    backward(net, 2)
    with NoHostReads():  # type: ignore[no-untyped-call]
        opt.step(loss=torch.tensor(1.0))
    assert opt.counter == 3


# --- parameters in no Fisher block ------------------------------------------------------------------------------------


class WithSpare(nn.Module):
    """`spare` acts on the loss alone, so the graph of the model does not have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.spare = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def spare_loss(net: CompiledModule, number: int) -> Tensor:
    x, y = batch(number)
    return F.cross_entropy(net(x), y) + net.get_parameter("spare").sin().sum()


@pytest.mark.parametrize("momentum_type", ["regular", "qmodel"])
@pytest.mark.parametrize("adapt_damping", [False, True])
def test_parameters_in_no_block_follow_adamw(momentum_type: str, adapt_damping: bool) -> None:
    torch.manual_seed(0)
    kind: dict[str, Any] = QUADRATIC if momentum_type == "qmodel" else {}
    first_order: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    adapt: dict[str, Any] = {"adapt_damping": adapt_damping, "damping_adaptation_interval": 1}
    net, opt = made(WithSpare(), first_order=first_order, **kind, **adapt)
    assert [(len(group["params"]), group["first_order"]) for group in opt.param_groups] == [(2, False), (1, True)]
    reference = nn.Parameter(net.get_parameter("spare").detach().clone())
    adamw = torch.optim.AdamW([reference], **first_order)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (opt, adamw)]
    for number in range(4):
        opt.zero_grad()
        spare_loss(net, number).backward()
        opt.step(partial(spare_loss, net, number))
        adamw.zero_grad()
        reference.sin().sum().backward()
        adamw.step()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(net.get_parameter("spare"), reference)
    if adapt_damping:
        assert 0.5 < opt.rho.item() < 2


def test_parameters_in_no_block_are_skipped_with_the_rest_and_resumed() -> None:
    torch.manual_seed(0)
    net, opt = made(WithSpare())
    spare_loss(net, 0).backward()
    opt.step()
    before = flat_state(opt.state_dict()["state"])
    net.get_parameter("spare").grad[0] = torch.nan  # type: ignore[index]
    opt.step()
    assert_same(before, flat_state(opt.state_dict()["state"]))
    _, other = made(WithSpare())
    other.load_state_dict(opt.state_dict())
    assert_same(before, flat_state(other.state_dict()["state"]))


# --- order of calls ---------------------------------------------------------------------------------------------------


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
        RuntimeError, match=r"momentum_type='qmodel' computes with the step's batch, and net\(x\) was not"
    ):
        opt.step()


def test_evaluation_forwards_are_not_recorded() -> None:
    net, opt = made()
    other, same = made()
    for number in range(2):
        for one, optimizer in ((net, opt), (other, same)):
            optimizer.zero_grad()
            backward(one, number)
        net.eval()
        net(batch(7)[0])
        net.train()
        with torch.no_grad():
            net(batch(8)[0])
        opt.step()
        same.step()
    assert_same(values(net), values(other))


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
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_compiled_step_is_the_eager_step(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    options = {**options, "weight_decay": 0.01, "invert_every": 2}
    net, opt = made(**options)
    other = compile(mlp(), loss="categorical", backend="aot_eager")
    compiled = KFAC(other, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})
    scheduler, same = (torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (opt, compiled))
    for number in range(4):
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            train(net, opt, range(number, number + 1))
            train(other, compiled, range(number, number + 1))
        scheduler.step()
        same.step()
    torch.testing.assert_close(values(other), values(net))


def test_what_replicas_must_agree_on_is_averaged_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the other replicas' losses and curvatures were three times as large."""
    net, opt = made(**QUADRATIC, adapt_damping=True, damping_adaptation_interval=1)
    other, same = made(**QUADRATIC, adapt_damping=True, damping_adaptation_interval=1)
    averaged: list[tuple[int, ...]] = []

    def average(tensor: Tensor) -> Tensor:
        averaged.append(tuple(tensor.shape))
        return 2 * tensor

    monkeypatch.setattr(opt.updater.replicas, "mean", average)
    for one, optimizer in ((net, opt), (other, same)):
        train(one, optimizer, range(1))
    assert averaged == [(), (2, 2), ()]  # the loss before, the quadratic model, the loss after
    assert opt.qmodel_learning_rate < same.qmodel_learning_rate


def test_the_sampled_targets_are_the_optimizer_s_own() -> None:
    net, opt = made(seed=4)
    expected = torch.Generator().manual_seed(4)
    before = torch.get_rng_state()
    train(net, opt, range(1))
    assert torch.equal(before, torch.get_rng_state())
    Categorical(mlp()(batch(0)[0]).detach()).sample(expected)
    assert torch.equal(opt.generator.get_state(), expected.get_state())
