"""KFAC where gradients are missing, zero or not finite, and parameters that are in no Fisher block."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.compiled.loss_scale import LossScaleWarning
from kfac_fx.linalg import matrices
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.recording import equivalence
from tests.runtime.slow_kfac import batch, loss_of
from tests.runtime.toy_optimizers import KINDS, QUADRATIC, assert_same, backward, flat_state, made, train, values
from tests.tables import pairs

# --- gradients that are missing, zero, or not finite ------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_parameter_without_a_gradient_stands_still_and_counts_as_zero(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    other, same = made(**options)
    for model in (net, other):
        backward(model, 0)
    absent, zeroed = net.get_parameter("0.bias"), other.get_parameter("0.bias")
    absent.grad = None
    assert zeroed.grad is not None
    zeroed.grad.zero_()
    before = absent.detach().clone()
    opt.step()
    assert torch.equal(absent, before)
    kind = options.get("momentum_type", "regular")
    if kind != "eigen_moments":  # the average of its block is
        assert not opt.state[absent]["velocity"].any()
    if kind in ("regular", "adam"):  # the others know the directions that move
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


@pairs(("value", [torch.nan, torch.inf]), ("where", ["gradient", "inputs", "loss"]), ("options", KINDS))
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_step_that_is_not_finite_changes_nothing(options: dict[str, Any], where: str, value: float) -> None:
    net, opt = made(**options, invert_every=5, weight_decay=0.1)
    train(net, opt, range(3))
    before, state = values(net), flat_state(opt.state_dict())
    opt.zero_grad()
    x, y = batch(3)
    if where == "inputs":
        x = x * value
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if where == "gradient":
        net.get_parameter("2.bias").grad[0] = value  # type: ignore[index]
    opt.step(loss=torch.tensor(value) if where == "loss" else None)
    assert_same(before, values(net))
    now = flat_state(opt.state_dict())
    counts = ("/counter", "/skipped", "/checks", "/moved")
    moves_on = (*counts, "/generator", "/predicted_change", "/qmodel_learning_rate", "/qmodel_momentum")
    kept = {name: v for name, v in state.items() if not name.endswith(moves_on)}
    assert_same(kept, {name: now[name] for name in kept})
    assert opt.skipped.item() == 1
    train(net, opt, range(3, 4))
    assert all(not torch.equal(value, before[name]) for name, value in values(net).items())
    assert opt.skipped.item() == 1


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
@pytest.mark.filterwarnings("ignore:the model is certain of its outputs")
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


@pairs(("factor", [torch.nan, 0.0]), ("on_host", [True, False]), ("options", KINDS))
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_first_step_without_a_gradient_to_follow_is_taken_again(
    options: dict[str, Any], on_host: bool, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setattr(matrices, "on_host", lambda condition: False)
    net, opt = made(**options)
    x, y = batch(7)
    (F.cross_entropy(net(x), y) * factor).backward()
    opt.step()
    other, same = made(**options)
    same.generator.set_state(opt.generator.get_state())
    for model, optimizer in ((net, opt), (other, same)):
        train(model, optimizer, range(2))
    assert_same(values(net), values(other))
    assert (opt.counter, opt.skipped.item()) == (2, 1)


@pairs(("on_host", [True, False]), ("options", KINDS))
def test_a_step_whose_gradients_are_zero_changes_nothing(
    options: dict[str, Any], on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a batch without targets are. In the averages they would count as a gradient."""
    if not on_host:
        monkeypatch.setattr(matrices, "on_host", lambda condition: False)
    net, opt = made(**options, invert_every=5, weight_decay=0.1)
    train(net, opt, range(3))
    before, state = values(net), flat_state(opt.state_dict())
    opt.zero_grad()
    x, y = batch(3)
    (F.cross_entropy(net(x), y) * 0).backward()
    opt.step()
    assert_same(before, values(net))
    now, moves_on = flat_state(opt.state_dict()), ("/skipped", "/generator")
    if not on_host:
        moves_on += ("/counter", "/checks", "/moved", "/predicted_change", "/qmodel_learning_rate", "/qmodel_momentum")
        moves_on += ("/promised", "/calm", "/near", "/agreement", "/agreed", "/same")
    kept = {name: value for name, value in state.items() if not name.endswith(moves_on)}
    assert_same(kept, {name: now[name] for name in kept})
    assert opt.skipped.item() == 1 and opt.counter == (3 if on_host else 4)


def test_a_first_gradient_of_zero_does_not_spend_the_check_of_the_loss() -> None:
    net, opt = made()
    x, y = batch(0)
    for factor in (0.0, 0.0, 20.0):
        opt.zero_grad()
        (F.cross_entropy(net(x), y) * factor).backward()
        if factor:
            with pytest.warns(LossScaleWarning, match="20"):
                opt.step()
        else:
            opt.step()


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_the_damping_stays_where_the_step_is_skipped() -> None:
    net, opt = made(adapt_damping=True, damping_adaptation_interval=1)
    backward(net, 0)
    net.get_parameter("2.bias").grad[0] = torch.nan  # type: ignore[index]
    opt.step(evaluate=loss_of(net, *batch(0)))
    assert opt.damping.item() == pytest.approx(0.1)


class NoHostReads(TorchDispatchMode):
    """Fails where the host waits for a value of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_an_ordinary_step_reads_nothing_back_from_the_device(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU reads these, because it need not wait.
    monkeypatch.setattr(equivalence, "refuse_changed_model", lambda differs, model: None)
    monkeypatch.setattr(matrices, "on_host", lambda condition: False)
    net, opt = made(**options, weight_decay=0.1)
    train(net, opt, range(3))
    backward(net, 3)  # no inverses are due, and "adaptive" checks its step size
    with NoHostReads():  # type: ignore[no-untyped-call]
        opt.step(loss=torch.tensor(1.0))
    assert opt.counter == 4


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


@pairs(("momentum_type", ["regular", "qmodel"]), ("adapt_damping", [False, True]))
def test_parameters_in_no_block_follow_adamw(momentum_type: str, adapt_damping: bool) -> None:
    torch.manual_seed(0)
    kind: dict[str, Any] = QUADRATIC if momentum_type == "qmodel" else {}
    first_order: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    adapt: dict[str, Any] = {"adapt_damping": True, "damping_adaptation_interval": 1} if adapt_damping else {}
    net, opt = made(WithSpare(), first_order=first_order, **kind, **adapt)
    assert [(len(group["params"]), group["first_order"]) for group in opt.param_groups] == [(2, False), (1, True)]
    reference = nn.Parameter(net.get_parameter("spare").detach().clone())
    adamw = torch.optim.AdamW([reference], **first_order)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (opt, adamw)]
    for number in range(4):
        opt.zero_grad()
        spare_loss(net, number).backward()
        opt.step(evaluate=partial(spare_loss, net, number))
        adamw.zero_grad()
        reference.sin().sum().backward()
        adamw.step()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(net.get_parameter("spare"), reference)
    if adapt_damping:
        assert 0.5 < opt.rho.item() < 2


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_parameters_in_no_block_are_skipped_with_the_rest_and_resumed() -> None:
    torch.manual_seed(0)
    net, opt = made(WithSpare(), first_order={"lr": 1e-3})
    spare_loss(net, 0).backward()
    opt.step()
    before = flat_state(opt.state_dict()["state"])
    spare_loss(net, 0).backward()
    net.get_parameter("spare").grad[0] = torch.nan  # type: ignore[index]
    opt.step()
    after = flat_state(opt.state_dict()["state"])
    assert after["/0/kfac/skipped"] == before["/0/kfac/skipped"] + 1
    of_rules = [name for name in before if "/kfac/" not in name]  # the others count steps
    assert of_rules
    assert_same({name: before[name] for name in of_rules}, {name: after[name] for name in of_rules})
    _, other = made(WithSpare())
    other.load_state_dict(opt.state_dict())
    assert_same(after, flat_state(other.state_dict()["state"]))


@pytest.mark.parametrize("kind", ["regular", "adaptive", "eigen_moments"])
def test_parameters_in_no_block_may_be_all_that_is_trained(kind: str) -> None:
    torch.manual_seed(0)
    net = compile(WithSpare(), loss="categorical")
    spare = net.get_parameter("spare")
    numbers = {"damping": 0.1} if kind == "regular" else {}
    opt = KFAC(net, params=[{"params": [spare], "lr": 0.05}], lr=0.1, momentum_type=kind, **numbers)
    reference = nn.Parameter(spare.detach().clone())
    adamw = torch.optim.AdamW([reference], lr=0.05, weight_decay=0.0)
    layer = net.get_parameter("layer.weight").detach().clone()
    for number in range(3):
        for optimizer, loss in ((opt, spare_loss(net, number)), (adamw, reference.sin().sum())):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(spare, reference)
    assert torch.equal(net.get_parameter("layer.weight"), layer)
