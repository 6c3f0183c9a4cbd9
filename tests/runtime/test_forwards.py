"""Forwards between two steps: micro-batches, what a closure is asked for, and that asking leaves no trace."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled_module import CompiledModule
from kfac_fx.compiler import compile
from kfac_fx.optim.forwards import Forwards, MicroBatches, checked, without_a_trace
from kfac_fx.optim.options import Options, Schedule
from kfac_fx.optimizer import KFAC
from kfac_fx.passes.tracing.devices import RandomState
from kfac_fx.statistics.moments import Moments
from tests.runtime.slow_kfac import batch, loss_of, mlp


def setup(**options: Any) -> tuple[CompiledModule, KFAC]:
    net = compile(mlp(), loss="categorical")
    return net, KFAC(net, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})


class Training:
    """A closure as torch's documentation has it; counts its calls."""

    def __init__(self, net: nn.Module, opt: torch.optim.Optimizer) -> None:
        self.net, self.opt, self.calls, self.number = net, opt, 0, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        x, y = batch(self.number)
        self.opt.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        return loss


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("momentum_type", ["regular", "qmodel"])
def test_a_closure_that_does_everything_trains_as_a_loop_does(momentum_type: str, zero_first: bool) -> None:
    options: dict[str, Any] = {"adapt_damping": True, "damping_adaptation_interval": 2, "momentum_type": momentum_type}
    options |= {"momentum": None, "lr": None} if momentum_type == "qmodel" else {}
    net, opt = setup(**options)
    other, loop = setup(**options)
    closure = Training(net, opt)
    for number in range(6):
        closure.number = number
        if zero_first:
            opt.zero_grad()
        loss = opt.step(closure)
        assert isinstance(loss, Tensor)
        x, y = batch(number)
        loop.zero_grad()
        expected = F.cross_entropy(other(x), y)
        expected.backward()
        assert loop.step(loss_of(other, x, y), loss=expected) is expected
        torch.testing.assert_close(loss, expected)
        for (_, p), (_, q) in zip(net.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)  # of the step, not of the closure's second call
    assert closure.calls == 6 + 3
    assert torch.equal(opt.damping, loop.damping)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_closure_is_not_asked_for_gradients_that_are_there(set_to_none: bool) -> None:
    net, opt = setup()
    for number in range(3):
        x, y = batch(number)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none)
        loss.backward()
        assert opt.step(lambda: pytest.fail("asked")) is None


def test_gradients_of_the_last_step_are_not_taken_for_new_ones() -> None:
    net, opt = setup()
    closure = Training(net, opt)
    opt.step(closure)
    net(batch(9)[0])  # a forward to look at the outputs; the gradients are still the last step's
    opt.step(closure)
    assert closure.calls == 2


def test_asking_for_the_loss_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)).double()
    net = compile(model, batch(0)[:1], loss="categorical")
    opt = KFAC(net, lr=0.0, damping=0.1, adapt_damping=True, damping_adaptation_interval=1)
    x, y = batch(0)
    start = torch.get_rng_state()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    random = torch.get_rng_state()
    inside: list[Tensor] = []

    def closure() -> Tensor:
        assert not torch.is_grad_enabled()
        inside.append(torch.get_rng_state())
        inside.append(F.cross_entropy(net(x), y))
        return inside[-1]

    opt.step(closure)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in net.named_buffers():
        assert torch.equal(value, buffers[name]), name
    # lr is 0 and the noise is that of the step's own forward: the same loss, before and after.
    assert len(inside) == 4
    assert torch.equal(inside[0], start) and torch.equal(inside[2], start)
    assert torch.equal(inside[1], loss.detach()) and torch.equal(inside[3], loss.detach())


def test_a_trace_is_wiped_when_the_closure_fails() -> None:
    buffer, parameter = torch.zeros(2), nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), without_a_trace([buffer], [parameter], [], RandomState.now([])):
        assert parameter.grad is None
        buffer += torch.rand(2)
        raise KeyError
    assert parameter.grad is gradient
    assert not buffer.any()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_backward_where_only_the_loss_was_asked_for_is_explained() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=1)
    x, y = batch(0)

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    F.cross_entropy(net(x), y).backward()
    with pytest.raises(
        RuntimeError, match=r"had its gradients already, so it was asked for the loss alone.*zero_grad\(\)"
    ):
        opt.step(closure)


class Slope(nn.Module):
    """du/dx of a network, as a differential equation has it; draws a number, as dropout would."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.u(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("inside", [True, False])  # does the closure call backward?
def test_the_loss_of_a_forward_that_takes_derivatives_is_measured(inside: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 1, dtype=torch.float64)
    net = compile(Slope(), (x,), loss="normal")
    opt = KFAC(net, lr=0.1, damping=0.1, momentum=0.0, adapt_damping=True, damping_adaptation_interval=1, seed=0)
    noise: list[Tensor] = []

    def loss() -> Tensor:
        noise.append(torch.rand(()))
        return (net(x) - 1).square().sum(1).mean()

    def closure() -> Tensor:
        opt.zero_grad()
        found = loss()
        found.backward()
        return found

    for step in range(2):
        before = loss()
        first = len(noise)
        if not inside:
            opt.zero_grad()
            before = loss()
            before.backward()
        gradients = [p.grad for p in net.parameters()]
        random = torch.get_rng_state()
        opt.step(closure if inside else loss)
        if not inside:
            assert torch.equal(torch.get_rng_state(), random)
            assert all(p.grad is gradient for p, gradient in zip(net.parameters(), gradients, strict=True))
            # The first question finds that gradients are needed, and is asked again with the same random numbers.
            assert len(noise) - first == (4 if step == 0 else 3)
            assert len(set(map(float, noise[first + 1 :]))) == 1
        torch.testing.assert_close(opt.rho, (loss().detach() - before.detach()) / opt.predicted_change)


def test_other_errors_of_a_closure_come_through() -> None:
    def closure() -> Tensor:
        raise RuntimeError("mine")

    _, opt = setup()
    with pytest.raises(RuntimeError, match="^mine$"):
        opt._forwards.measure(closure, with_backward=False, start=None)
    assert not opt._forwards.paused


def test_a_closure_must_return_the_loss() -> None:
    with pytest.raises(ValueError, match="the closure returned None: it must return the loss of the batch"):
        checked(None)
    _, opt = setup()
    with pytest.raises(ValueError, match="returned None"):
        opt.step(lambda: None)  # type: ignore[arg-type, return-value]


def test_adapting_without_a_closure_says_when_one_is_needed() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=2)
    for _ in range(2):
        x, y = batch(0)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if opt.counter == 0:
            opt.step()
    text = r"adapt_damping needs the loss after the update, every 2 steps: call step\(closure\)"
    with pytest.raises(ValueError, match=text):
        opt.step(loss=loss)


def test_a_closure_may_return_a_number() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=1)
    x, y = batch(0)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    assert opt.step(lambda: F.cross_entropy(net(x), y).item(), loss=loss.item()) == loss.item()
    assert opt.rho.isfinite()


# --- micro-batches, on fake rides -----------------------------------------------------------------------------------


def ride(backward: bool, cases: int = 2) -> Any:
    """A forward whose statistic G is 4, and whose backward happened or not."""
    probe = torch.zeros((), requires_grad=True)
    probe.grad = torch.ones(()) if backward else None

    def moments(reduction: str, of_step: int) -> Moments:
        return Moments({("w",): {"G": torch.tensor(4.0), "count": torch.tensor(float(of_step))}}, cases)

    return SimpleNamespace(
        probes=[{"G": probe}], generic={}, cases=cases, moments=moments, check_backwards=lambda: None
    )


def test_only_forwards_with_a_backward_are_micro_batches() -> None:
    seen = MicroBatches(rides=[ride(True), ride(False), ride(True, cases=3)])
    moments = seen.moments("mean", loss_scale=1.0)
    assert [one.cases for one in moments] == [2, 3]
    assert all(one.statistics[("w",)]["count"] == 5 for one in moments)  # the mean is over the cases of both


def test_a_loss_scale_is_taken_out_by_the_power_of_the_gradient() -> None:
    (moments,) = MicroBatches(rides=[ride(True)]).moments("mean", loss_scale=8.0)
    assert moments.statistics[("w",)] == {"G": torch.tensor(4.0 / 64), "count": torch.tensor(2.0)}


def test_zeroed_gradients_drop_the_rides_that_made_them() -> None:
    waiting, done = ride(False), ride(True)
    seen = MicroBatches(rides=[waiting, done], watched=[cast(Any, SimpleNamespace(gradients={0: torch.ones(1)}))])
    seen.gradients_zeroed()
    assert seen.rides == [waiting] and seen.dropped == [done] and seen.watched == []


# --- the listener, on fakes -----------------------------------------------------------------------------------------


class Listening:
    """Forwards of a fake net with one parameter."""

    def __init__(self, **options: Any) -> None:
        self.w, self.log = nn.Parameter(torch.ones(2)), list[str]()
        net = SimpleNamespace(
            attach=None,
            registrations=(),
            named_parameters=lambda: iter([("w", self.w)]),
            buffers=lambda: iter(()),
            record=lambda *_, mode, fraction, **__: self.log.append(f"record {mode} of {fraction}"),
            recorder=lambda args, kwargs: None,
            ride=lambda *_, **__: (self.log.append("ride"), ("outputs", ride(False)))[1],
        )
        self.schedule = Schedule(Options(net, **{"lr": 1.0, "damping": 1.0, **options}))
        estimator = SimpleNamespace(accumulate=lambda _: self.log.append("accumulate"))
        generator = torch.Generator()
        self.forwards = Forwards(cast(Any, net), self.schedule, cast(Any, estimator), generator, ())

    def forward(self) -> Any:
        return self.forwards.on_forward((), {})


def test_a_forward_records_where_statistics_are_due() -> None:
    listening = Listening(fraction=0.5, cov_update_every=2)
    for listening.schedule.counter in range(3):
        assert listening.forward() is None
    assert listening.log == ["record gradients of 0.5", "accumulate"] * 2 and listening.forwards.seen.forwards == 3


def test_a_ride_takes_over_the_forward() -> None:
    listening = Listening(estimation_mode="empirical")
    assert listening.forward() == "outputs" and len(listening.forwards.seen.rides) == 1


@pytest.mark.parametrize(("momentum_type", "kept"), [("qmodel", 1), ("regular", 0)])
def test_only_a_quadratic_model_keeps_the_arguments(momentum_type: str, kept: int) -> None:
    options = {"momentum_type": momentum_type, "lr": None, "momentum": None} if kept else {}
    listening = Listening(**options)
    listening.forward()
    assert len(listening.forwards.seen.calls) == kept


def test_a_forward_while_a_loss_is_measured_is_none() -> None:
    listening = Listening()
    assert listening.forwards.measure(lambda: listening.forward() or 3.0, False, None) == 3.0
    assert listening.log == [] and listening.forwards.seen.forwards == 0


def test_gradients_are_new_after_a_forward_and_until_a_step_used_them() -> None:
    listening = Listening()
    forwards, gradient = listening.forwards, torch.ones(2)
    assert not forwards.has_new({"w": gradient})
    listening.forward()
    assert forwards.has_new({"w": gradient}) and not forwards.has_new({})
    forwards.step_taken({"w": gradient})
    listening.forward()
    assert not forwards.has_new({"w": gradient}) and forwards.has_new({"w": torch.ones(2)})
    forwards.gradients_zeroed()
    assert forwards.has_new({"w": gradient})


def test_a_loss_that_takes_derivatives_is_asked_for_again_with_gradients() -> None:
    listening, asked = Listening(), list[bool]()

    def closure() -> Tensor:
        asked.append(torch.is_grad_enabled())
        (gradient,) = torch.autograd.grad((listening.w**2).sum(), listening.w)
        return gradient.sum()

    for _ in range(2):
        assert listening.forwards.measure(closure, False, None) == 4.0
    assert asked == [False, True, True]


def test_an_unexpected_backward_of_a_closure_is_told() -> None:
    listening = Listening()
    listening.forwards.needs_graph = True
    gradient = listening.w.grad = torch.full((2,), 7.0)

    def closure() -> float:
        (3 * listening.w).sum().backward()
        return 0.0

    with pytest.raises(RuntimeError, match="the closure calls backward, but this step had its gradients already"):
        listening.forwards.measure(closure, False, None)
    assert listening.w.grad is gradient
    assert listening.forwards.measure(closure, True, None) == 0.0


def test_a_step_without_a_recorded_forward_warns_once_and_is_counted() -> None:
    forwards = Listening().forwards
    with pytest.warns(RuntimeWarning, match="no forward was recorded before it"):
        forwards.note_unrecorded()
    forwards.note_unrecorded()
    assert forwards.fallbacks() == ["statistics were due at 2 steps that no forward came before"]
