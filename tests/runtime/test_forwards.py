"""Forwards between two steps: micro-batches, what a closure is asked for, and that asking leaves no trace."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.losses import Normal
from kfac_fx.optim.forwards import Forwards, MicroBatch, MicroBatches, checked
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.schedule import Schedule
from kfac_fx.passes.tracing.effects import RandomState, closure_undone
from kfac_fx.recording.equivalence import OutputWatch
from kfac_fx.recording.statistics import Moments
from tests.runtime.options_of import options_of
from tests.runtime.slow_kfac import batch, loss_of, mlp
from tests.tables import pairs


def setup(**options: Any) -> tuple[CompiledModule, KFAC]:
    net = compile(mlp(), loss="categorical")
    return net, KFAC(net, **{"lr": 0.3, "damping": 0.1, "seed": 0, **options})


class Training:
    """A closure as torch's documentation has it; counts its calls."""

    def __init__(self, net: nn.Module, opt: torch.optim.Optimizer) -> None:
        self.net, self.opt, self.calls, self.number, self.set_to_none = net, opt, 0, 0, True

    def __call__(self) -> Tensor:
        self.calls += 1
        x, y = batch(self.number)
        self.opt.zero_grad(self.set_to_none)
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        return loss


@pairs(("zero_first", [False, True]), ("momentum_type", ["regular", "qmodel"]))
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
        assert loop.step(evaluate=loss_of(other, x, y), loss=expected) is expected
        torch.testing.assert_close(loss, expected)
        for (_, p), (_, q) in zip(net.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)  # of the step, not of the closure's second call
    assert closure.calls == 6 + 3
    assert torch.equal(opt.damping, loop.damping)


@pairs(("set_to_none", [False, True]), ("options", [{}, {"adapt_damping": True, "damping_adaptation_interval": 1}]))
def test_a_closure_is_called_though_gradients_are_there(options: dict[str, Any], set_to_none: bool) -> None:
    """It zeroes them: the forward before it was one to look at, and is a micro-batch of the statistics alone."""
    net, opt = setup(**options)
    closure = Training(net, opt)
    closure.set_to_none = set_to_none
    for step in range(3):
        F.cross_entropy(net(batch(9)[0]), batch(9)[1]).backward()
        assert opt.step(closure) is not None
        assert closure.calls == (step + 1) * (2 if options else 1)


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_micro_batches_before_the_closure_are_those_of_the_step(mode: str) -> None:
    """A trainer that accumulates runs the first ones itself, and only the last one inside the step."""
    net, opt = setup(estimation_mode=mode)
    other, loop = setup(estimation_mode=mode)

    def micro_batch(of: CompiledModule, number: int) -> Tensor:
        x, y = batch(number)
        loss = F.cross_entropy(of(x), y) / 2
        loss.backward()
        return loss

    for number in range(0, 6, 2):
        opt.zero_grad()
        micro_batch(net, number)
        opt.step(lambda number=number: micro_batch(net, number + 1))  # type: ignore[misc]
        loop.zero_grad()
        micro_batch(other, number)
        micro_batch(other, number + 1)
        loop.step()
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
    assert all(map(torch.equal, opt.estimator.state_dict().values(), loop.estimator.state_dict().values()))


@pairs(("earlier", {"alone": False, "after a micro-batch": True}), ("mode", ["gradients", "empirical"]))
def test_a_step_whose_closure_failed_is_tried_again_as_if_it_had_not_been(mode: str, earlier: bool) -> None:
    """A trainer that ran out of memory tries the step again, in smaller parts."""

    def train(fails: bool) -> tuple[CompiledModule, KFAC]:
        net, opt = setup(estimation_mode=mode)
        parts, fatal = (4, 0) if earlier else (2, 3)  # gradients of an earlier micro-batch cannot be told from new ones
        for number in range(3):
            opt.zero_grad()
            if earlier:
                (F.cross_entropy(net(batch(7)[0]), batch(7)[1]) / 2).backward()
            (x, y), failures = batch(number), [MemoryError()] * fails

            def closure(x: Tensor = x, y: Tensor = y, failures: list[MemoryError] = failures) -> Tensor:
                if not earlier:
                    opt.zero_grad()
                for first in (0, 3):
                    loss = F.cross_entropy(net(x[first : first + 3]), y[first : first + 3]) / parts
                    if first == fatal and failures:
                        raise failures.pop()
                    loss.backward()
                return loss

            if fails:
                with pytest.raises(MemoryError):
                    opt.step(closure)
            opt.step(closure)
        return net, opt

    (net, opt), (other, loop) = train(True), train(False)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert all(map(torch.equal, opt.estimator.state_dict().values(), loop.estimator.state_dict().values()))
    assert opt.counter == loop.counter == 3


def test_a_closure_without_a_backward_is_told_what_to_write() -> None:
    net, opt = setup()
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"called no backward.*step\(\), or step\(evaluate=closure\)"):
        opt.step(loss_of(net, x, y))
    assert all(map(torch.equal, before, net.parameters())) and opt.counter == 0
    opt.step()  # the forward before the closure is still there
    assert opt.counter == 1


def test_a_closure_that_skips_its_batch_skips_the_step() -> None:
    """As a trainer does if the user returns no loss: torch's optimizers find no gradient then."""
    net, opt = setup()
    before = [p.clone() for p in net.parameters()]
    assert opt.step(lambda: opt.zero_grad()) is None
    assert all(map(torch.equal, before, net.parameters())) and opt.counter == 0


def test_a_closure_of_the_last_micro_batch_does_not_measure_the_step() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=1)
    x, y = batch(0)

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y) / 2
        loss.backward()
        return loss

    for _ in range(2):
        closure()
        with pytest.raises(ValueError, match=r"that of its last micro-batch.*step\(closure, evaluate=\.\.\.\)"):
            opt.step(closure)
    opt.zero_grad()
    closure()
    opt.step(closure, evaluate=loss_of(net, x, y))
    assert opt.rho.isfinite()


def test_a_closure_inside_a_step_of_a_grad_scaler_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    _, opt = setup(grad_scaler=scaler)
    with pytest.raises(ValueError, match=r"scaler\.step\(optimizer, evaluate=closure\)"):
        opt.step(lambda: pytest.fail("called"))


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

    opt.step(evaluate=closure)
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
    with pytest.raises(KeyError), closure_undone([buffer], [parameter], [], RandomState.now([])):
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
    with pytest.raises(RuntimeError, match=r"calls backward, but it is asked for a loss alone.*zero_grad\(\)"):
        opt.step(evaluate=closure)


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
        opt.step(closure) if inside else opt.step(evaluate=loss)
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
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=1)
    F.cross_entropy(net(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(ValueError, match="returned None"):
        opt.step(evaluate=lambda: None)  # type: ignore[arg-type, return-value]


def test_adapting_without_a_closure_says_when_one_is_needed() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=2)
    for _ in range(2):
        x, y = batch(0)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if opt.counter == 0:
            opt.step()
    text = r"adapt_damping needs the loss after the update, every 2 steps: call step\(evaluate=closure\)"
    with pytest.raises(ValueError, match=text):
        opt.step(loss=loss)


def test_a_closure_may_return_a_number() -> None:
    net, opt = setup(adapt_damping=True, damping_adaptation_interval=1)
    x, y = batch(0)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    assert opt.step(evaluate=lambda: F.cross_entropy(net(x), y).item(), loss=loss.item()) == loss.item()
    assert opt.rho.isfinite()


# --- micro-batches, on fake records -----------------------------------------------------------------------------------


def pending(backward: bool, cases: int = 2) -> Any:
    """A forward whose statistic G is 4 for a loss scale of 1, and whose backward happened or not."""

    def moments(reduction: str, of_step: int, loss_scale: float) -> Moments:
        sums = {"G": torch.tensor(4.0 / loss_scale**2), "count": torch.tensor(float(of_step))}
        return Moments({("w",): sums}, cases)

    return SimpleNamespace(filled=backward, cases=cases, moments=moments)


def seen_of(*of_forwards: Any) -> MicroBatches:
    return MicroBatches(batches=[MicroBatch(pending=pending) for pending in of_forwards])


def test_only_forwards_with_a_backward_are_micro_batches() -> None:
    seen = seen_of(pending(True), pending(False), pending(True, cases=3))
    seen.close(lenient=False)
    moments = seen.take_moments("mean", loss_scale=1.0)
    assert [recording.cases for recording in moments] == [2, 3]
    assert all(
        recording.statistics[("w",)]["count"] == 5 for recording in moments
    )  # the mean is over the cases of both


def test_micro_batches_know_the_loss_scale() -> None:
    (moments,) = seen_of(pending(True)).take_moments("mean", loss_scale=8.0)
    assert moments.statistics[("w",)] == {"G": torch.tensor(4.0 / 64), "count": torch.tensor(2.0)}


# --- the listener, on fakes -----------------------------------------------------------------------------------------


class FakeNet(SimpleNamespace):
    """It has the names by which a compiled module is told."""

    attach, registrations, knows_no_loss = None, (), False


class Listening:
    """Forwards of a fake net with one parameter."""

    def __init__(self, **options: Any) -> None:
        self.w, self.log = nn.Parameter(torch.ones(2)), list[str]()
        net = FakeNet(
            named_parameters=lambda: iter([("w", self.w)]),
            buffers=lambda: iter(()),
            record=lambda *_, mode, fraction, **__: self.log.append(f"record {mode} of {fraction}"),
            recorder=lambda args, kwargs: SimpleNamespace(used=frozenset(self.unrecorded)) if self.unrecorded else None,
            repeats_recordings=False,
            differs=lambda args, kwargs: (self.compared.append(self.forwards.seen.forwards), torch.tensor(False))[1],
            record_in_training=lambda *_, **__: (self.log.append("ride"), ("outputs", pending(False)))[1],
        )
        options = {"lr": 1.0, "damping": 1.0, "estimation_mode": "gradients", **options}
        self.schedule = Schedule(options_of(net, **options))
        self.compared: list[int] = []
        estimator = SimpleNamespace(
            outputs=OutputWatch(),
            estimation_mode=options["estimation_mode"],
            records_in_training=options["estimation_mode"] == "empirical",
            replicas=None,
            accumulate=lambda _, into: self.log.append("accumulate"),
            early_sums=lambda _: nullcontext(),
            unrecorded=lambda: frozenset(self.unrecorded),
        )
        self.unrecorded: list[tuple[str, ...]] = []
        generator = torch.Generator()
        self.forwards = Forwards(cast(Any, net), self.schedule, cast(Any, estimator), generator, ())

    def forward(self) -> Any:
        return self.forwards.on_forward((), {})


def test_a_forward_records_where_statistics_are_due() -> None:
    listening = Listening(fraction=0.5, cov_update_every=2)
    for listening.schedule.counter in range(3):
        assert listening.forward() is None
    assert listening.log == ["record gradients of 0.5", "accumulate"] * 2 and listening.forwards.seen.forwards == 3


@pytest.mark.parametrize(
    "options",
    [{"estimation_mode": "empirical"}, {"fraction": 0.5}, {"momentum_type": "qmodel", "lr": None, "momentum": None}],
    ids=str,
)
def test_forwards_without_another_beside_them_are_compared_more_and_more_rarely(options: dict[str, Any]) -> None:
    listening = Listening(**{"cov_update_every": 100 if "momentum_type" in options else 1, **options})
    for listening.schedule.counter in range(9):
        listening.forward()
    assert listening.compared == [1, 2, 4, 8]


def test_outputs_are_compared_with_those_of_the_recording_before() -> None:
    listening = Listening()
    net: Any = listening.forwards.net
    net.repeats_recordings, net.rounding = True, lambda args, kwargs: 0.0
    net.record = lambda *_, on_outputs, **__: on_outputs([torch.ones(3)])
    listening.forwards.checked = True
    for outputs, differs in ((torch.ones(3), False), ({"logits": 2 * torch.ones(3)}, True)):
        listening.forward()
        listening.forwards.on_outputs((), {}, outputs)
        assert bool(listening.forwards.estimator.outputs.pending) is differs
    assert listening.compared == []


def test_large_outputs_of_different_numbers_of_cases_are_not_watched_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.linear(x[::2])

    def loss(outputs: tuple[Tensor, Tensor]) -> list[tuple[float, Normal]]:
        return [(1.0, Normal(output, 0.5)) for output in outputs]

    for limit, unchecked in ((1 << 22, False), (8, True)):
        monkeypatch.setattr("kfac_fx.compiled.loss_scale.LIMIT", limit)
        net = compile(Two(), (torch.randn(6, 4),), loss=loss)
        opt = KFAC(net, 0.1, damping=1.0, momentum_type="regular")
        sum(output.square().sum(1).mean() for output in net(torch.randn(6, 4))).backward()
        opt.step()
        assert ("the training loss is the registered one was not checked" in str(net.report)) is unchecked


def test_a_registration_without_factors_is_recorded_at_once() -> None:
    listening = Listening(cov_update_every=2)
    listening.schedule.counter, listening.unrecorded = 1, [("w",)]
    only: list[Any] = []
    listening.forwards.estimator.accumulate = lambda moments, into: only.append(moments.only)  # type: ignore[method-assign]
    listening.forwards.net.record = lambda *_, **__: Moments({}, 2)  # type: ignore[method-assign]
    listening.forward()
    assert only == [{("w",)}]


def test_a_ride_takes_over_the_forward() -> None:
    listening = Listening(estimation_mode="empirical")
    assert listening.forward() == "outputs" and len(listening.forwards.seen.pending) == 1


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

    with pytest.raises(RuntimeError, match="calls backward, but it is asked for a loss alone"):
        listening.forwards.measure(closure, False, None)
    assert listening.w.grad is gradient
    assert listening.forwards.measure(closure, True, None) == 0.0


def test_a_step_without_a_recorded_forward_warns_once_and_is_counted() -> None:
    forwards = Listening().forwards
    with pytest.warns(RuntimeWarning, match="no forward was recorded before it"):
        forwards.note_unrecorded()
    forwards.note_unrecorded()
    assert forwards.fallbacks() == ["statistics were due at 2 steps that no forward with a backward came before"]
