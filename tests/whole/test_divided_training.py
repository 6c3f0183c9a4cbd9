"""Recording during training on divided models: their forward with graphs for submodules, and the user's backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx import KFAC, ModelChangedError, UntraceableError
from tests.whole.divided import MODELS, Base, Branching, Build, Rare, Repeated, Sizes, X, compiled
from tests.whole.test_divided_models import Reads
from tests.whole.training import differences, step


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    loss = kfac_fx.losses.Normal(output, targets=targets)
    return loss.evaluate() / loss.cases


class Checkpointed(Base):
    def between(self, h: Tensor) -> Any:
        return checkpoint(self.middle, h, use_reentrant=False) if h.sum() > -1e9 else h


@pytest.mark.parametrize("build", [*MODELS, Checkpointed])
def test_a_ride_is_the_models_own_training_step_bit_for_bit(build: Build) -> None:
    model = build()
    twin = copy.deepcopy(model)
    net = compiled(model)
    for _ in range(2):
        assert differences(step(twin, lambda: twin(X)), step(model, lambda: net.record_in_training((X,), {})[0])) == []
    assert model.__dict__.keys() == twin.__dict__.keys()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("build", [Branching, Repeated, Reads, Checkpointed])
def test_a_ride_records_what_a_pass_with_the_true_targets_does(build: Build) -> None:
    model = build().double()
    x, targets = torch.randn(9, 4).double(), torch.randn(9, 3).double()
    net = compiled(model, X.double())
    wanted = net.record((x,), {}, mode="empirical", targets=targets)
    output, pending = net.record_in_training((x,), {})
    loss_of(output, targets).backward()
    found = pending.moments()
    assert found.cases == wanted.cases
    assert found.statistics.keys() == wanted.statistics.keys()
    for key, sums in wanted.statistics.items():
        torch.testing.assert_close(found.statistics[key], sums)


def test_two_rides_before_one_backward_are_kept_apart() -> None:
    model, targets = Repeated().double(), torch.zeros(6, 3).double()
    net, x = compiled(model, X.double()), X.double()
    (one, first), (other, second) = (net.record_in_training((batch,), {}) for batch in (x, 3 * x))
    (loss_of(one, targets) + loss_of(other, targets)).backward()
    for pending, batch in ((first, x), (second, 3 * x)):
        wanted = net.record((batch,), {}, mode="empirical", targets=targets).statistics
        torch.testing.assert_close(pending.moments().statistics, wanted)


def test_a_call_that_is_new_rides_for_nothing_once() -> None:
    model = Sizes()
    twin = copy.deepcopy(model)
    net = compiled(model, [torch.randn(3, 4), torch.randn(2, 4)])
    longer = [torch.randn(3, 4), torch.randn(7, 4)]
    key = "inner.linear.weight", "inner.linear.bias"
    counts = []
    for _ in range(2):
        output, pending = net.record_in_training((longer,), {})
        assert torch.equal(output, twin(longer))
        output.sum().backward()
        counts.append(float(pending.moments().statistics[key]["count"]))
    assert counts == [0.0, 10.0]


def test_a_ride_that_recorded_nothing_enters_no_factor() -> None:
    net = compiled(Sizes(), [torch.randn(3, 4), torch.randn(2, 4)])
    opt = KFAC(net, lr=0.1, damping=0.1, estimation_mode="empirical", cov_update_every=1, invert_every=1)
    factors = opt.estimator.blocks["inner.linear.weight", "inner.linear.bias"].factors
    for size, weight in ((2, 1.0), (2, 1.95), (7, 1.95)):  # the third recording is not compared, so its size is new
        outputs = net([torch.randn(3, 4), torch.randn(size, 4)])
        loss_of(outputs, torch.zeros_like(outputs)).backward()
        opt.step()
        opt.zero_grad()
        assert float(factors["A"].total_weight) == pytest.approx(weight)


def test_the_empirical_fisher_trains_a_divided_model() -> None:
    torch.manual_seed(0)
    model = Repeated()
    net = compiled(model)
    opt = KFAC(net, lr=0.1, damping=0.1, estimation_mode="empirical", invert_every=2)
    losses = []
    for _ in range(8):
        loss = loss_of(net(X), torch.zeros(6, 3))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_a_parameter_that_python_reads_in_a_ride_is_an_error() -> None:
    net = compiled(Rare(wrong=True))
    with pytest.raises(ModelChangedError, match="reads middle.weight outside of its captured"):
        net.record_in_training((1e4 * X,), {})


def test_what_a_submodule_does_beside_its_graph_is_refused_with_its_name() -> None:
    class Looking(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.middle.register_full_backward_hook(lambda module, before, after: None)

    net = compiled(Looking())
    with pytest.raises(UntraceableError) as failure:
        net.record_in_training((X,), {})
    said = str(failure.value).splitlines()
    assert said[1] == "  calls the backward hooks of Linear, in middle"
    assert said[2].startswith('Record in a separate pass, with estimation_mode="gradients" or net.record(...)')


def test_the_model_is_itself_again_after_an_error() -> None:
    class Failing(Branching):
        fails = False

        def between(self, h: Tensor) -> Any:
            if self.fails:
                raise KeyError("of the user")
            return super().between(h)

    model = Failing()
    net = compiled(model)
    Failing.fails = True
    with pytest.raises(KeyError, match="of the user"):
        net.record_in_training((X,), {})
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(
        isinstance(parameter, nn.Parameter) for module in model.modules() for parameter in module._parameters.values()
    )


class Descending(nn.Module):
    """A step of its own along a network's slope by what another layer makes, in Python that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 3)
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(x)
        if x.sum() > 1e6:
            z = -z
        (slope,) = torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)
        y: Tensor = self.leave(z + slope)
        return y


def test_checks_of_a_divided_model_take_its_derivatives() -> None:
    torch.manual_seed(0)
    model, x = Descending(), torch.randn(6, 3)
    net = kfac_fx.compile(model, (x,), loss="mse")
    optimizer, losses = kfac_fx.KFAC(net), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (net(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not optimizer.skipped
