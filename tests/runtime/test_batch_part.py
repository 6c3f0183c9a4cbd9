"""The part of a batch that a check takes: its numbers are those of a batch of the first examples alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.compiled.jacobian_products import JacobianProducts
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim import checks
from kfac_fx.optim.batch_loss import SHARE, BatchLoss, ObservedForward, part_of_batch, share_of_checks
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.tracing.effects import RandomState
from tests.tables import pairs

CASES, PART, POSITIONS = 20, 3, 5
X = torch.randn(CASES, POSITIONS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.randint(4, (CASES, POSITIONS), generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(CASES, POSITIONS, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Net(nn.Module):
    """A network of sequences. middle: a layer of 5 features in it. flat: whether outputs are rows [cases * positions].

    With targets it returns the loss."""

    def __init__(self, middle: nn.Module | None = None, flat: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 5), middle or nn.Tanh(), nn.Linear(5, 4)
        self.flat, self.reduction = flat, reduction
        self.double()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        if targets is not None:
            return F.mse_loss(y, targets, reduction=self.reduction)
        return y.flatten(0, 1) if self.flat else y


def categorical(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), CLASSES[: outputs.numel() // (4 * POSITIONS)].flatten())


def squares(outputs: Tensor) -> Tensor:
    return (outputs - VALUES[: len(outputs)]).square().sum((1, 2)).mean()


TRAINED: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Any], Tensor]]] = {
    "categorical": (Net, "categorical", categorical),
    "rows of positions": (lambda: Net(flat=True), "categorical", categorical),
    "normal": (Net, "normal", squares),
}


def point(net: Any, scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: p.detach() + scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in net.named_parameters()
    }


def observed(net: Any, args: tuple[Any, ...], loss: Callable[[Any], Tensor], loss_scale: float = 1.0) -> BatchLoss:
    start = RandomState.now(())
    outputs = net(*args)
    forward = ObservedForward.of(net.recorder(args, {}), args, {}, outputs)
    (loss_scale * loss(outputs)).backward()
    return BatchLoss(net, [forward], JacobianProducts(), loss_scale, False, Replicas(), (), start)


def measures(batch: BatchLoss, net: Any) -> list[Tensor]:
    here, there, step = point(net, 0.0), point(net, 0.3), torch.tensor(1e-4, dtype=torch.float64)
    direction = {name: value - here[name] for name, value in there.items()}
    before, after = batch.at(here), batch.at(there)
    probe = batch.at({name: value + step * direction[name] for name, value in here.items()})
    numbers = [batch.value(before), batch.change(before, after), *batch.between(before, probe, step)]
    return [*numbers, *batch.along(here, direction)[:2]]


@pairs(("model, distribution, loss", TRAINED), ("loss_scale", [1.0, 128.0]))
def test_the_numbers_of_a_part_are_those_of_a_batch_of_its_examples(
    model: Callable[[], nn.Module], distribution: str, loss: Callable[[Any], Tensor], loss_scale: float
) -> None:
    net = compile(model(), (X,), loss=distribution)
    part, reason = part_of_batch(observed(net, (X,), loss, loss_scale), SHARE, point(net, 0.0))
    assert reason is None and part.share == SHARE
    alone = observed(net, (X[:PART],), loss)
    torch.testing.assert_close(measures(part, net), measures(alone, net))
    torch.testing.assert_close(part.value(part.at(point(net, 0.0))), loss(net(X[:PART])).detach())
    assert part.at(point(net, 0.0))[0].cases == alone.at(point(net, 0.0))[0].cases


def test_the_loss_that_forward_returns_is_that_of_the_part() -> None:
    net = compile(Net(), (X, VALUES))
    part, reason = part_of_batch(observed(net, (X, VALUES), lambda loss: loss), SHARE, point(net, 0.0))
    assert reason is None
    torch.testing.assert_close(
        measures(part, net), measures(observed(net, (X[:PART], VALUES[:PART]), lambda loss: loss), net)
    )


def test_cases_on_another_dimension_than_the_first_have_parts() -> None:
    net = compile(Net(), (X.transpose(0, 1),), loss="normal", batch_dim=1)

    def loss(outputs: Tensor) -> Tensor:
        return squares(outputs.transpose(0, 1))

    part, reason = part_of_batch(observed(net, (X.transpose(0, 1),), loss), SHARE, point(net, 0.0))
    assert reason is None
    torch.testing.assert_close(measures(part, net), measures(observed(net, (X[:PART].transpose(0, 1),), loss), net))


def test_micro_batches_have_a_part_each() -> None:
    net = compile(Net(), (X,), loss="normal")
    whole, halves = observed(net, (X,), squares), []
    for cases in slice(0, 4), slice(4, CASES):
        outputs = net(X[cases])
        halves.append(ObservedForward.of(net.recorder((X[cases],), {}), (X[cases],), {}, outputs))
        ((outputs - VALUES[cases]).square().sum() / CASES).backward()
    whole.forwards = halves
    part, reason = part_of_batch(whole, 0.25, point(net, 0.0))
    assert reason is None and [len(forward.args[0]) for forward in part.forwards] == [1, 4]
    first = [0, 4, 5, 6, 7]
    x, y = X[first], VALUES[first]
    alone = observed(net, (x,), lambda outputs: (outputs - y).square().sum((1, 2)).mean())
    torch.testing.assert_close(measures(part, net), measures(alone, net))


def test_noise_in_a_part_is_the_same_at_all_points() -> None:
    net = compile(Net(nn.Dropout(0.5)), (X,), loss="normal")
    batch = observed(net, (X,), squares)
    part, reason = part_of_batch(batch, SHARE, point(net, 0.0))
    assert reason is None
    torch.rand(3)
    before = part.at(point(net, 0.0))
    torch.rand(3)
    again = part.at(point(net, 0.0))
    assert part.change(before, again) == 0 and torch.equal(before[0].leaves[0], again[0].leaves[0])
    exact = part.along(point(net, 0.0), point(net, 0.3))[:2]
    step = torch.tensor(1e-6, dtype=torch.float64)
    here, d = point(net, 0.0), point(net, 0.3)
    quotient = part.between(before, part.at({name: here[name] + step * d[name] for name in here}), step)
    torch.testing.assert_close(quotient, exact, rtol=1e-4, atol=0)


class Contrast(nn.Module):
    """Logits of every example with every example of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x[:, 0])
        return y @ y.mT


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.last(y if float(y.detach().sum()) > 1e9 else 2 * y)
        return z


class Ignoring(Net):
    """Returns a loss without the cases whose target is -100."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        return F.cross_entropy(super().forward(x).flatten(0, 1), targets.flatten())


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()


def rows(outputs: Tensor) -> Tensor:
    return outputs.square().sum() / len(outputs)


WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Any, Callable[[Any], Tensor], str]] = {
    "batch norm": (normed, (X,), "normal", rows, "the outputs of an example depend on the others"),
    "with noise": (
        lambda: Net(nn.Sequential(Centered(), nn.Dropout(0.5))), (X,), "normal", squares,
        "the outputs of an example depend on the others",
    ),
    "contrast": (Contrast, (X,), "normal", rows, r"outputs \[6, 6\] of 6 examples are \[3, 3\] of 3"),
    "divided": (Divided, (X,), "normal", squares, "no single graph holds the model"),
    "ignored targets": (Ignoring, (X, CLASSES), None, lambda loss: loss, "a loss that ignores some targets"),
    "sum": (lambda: Net(reduction="sum"), (X, VALUES), None, lambda loss: loss, "a loss that is a sum over cases"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "args", "distribution", "loss", "words"), WHOLE.values(), ids=WHOLE)
def test_where_a_part_is_no_measure_of_the_batch_the_whole_stays(
    model: Callable[[], nn.Module], args: tuple[Any, ...], distribution: Any, loss: Callable[[Any], Tensor], words: str
) -> None:
    net = compile(model(), args, loss=distribution, batch_dim=0)
    batch = observed(net, args, loss)
    for _ in range(2):  # the second time it is known
        part, reason = part_of_batch(batch, SHARE, point(net, 0.0))
        assert part is batch and reason is not None
        assert re.search(words, reason), reason


def test_the_noise_of_the_user_is_not_drawn_to_find_out_whether_a_part_is_a_measure() -> None:
    net = compile(Net(nn.Dropout(0.5)), (X,), loss="normal")
    batch, before = observed(net, (X,), squares), torch.get_rng_state()
    part_of_batch(batch, SHARE, point(net, 0.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_of_one_example_is_its_own_part() -> None:
    net = compile(Net(), (X,), loss="normal")
    batch = observed(net, (X[:1],), squares)
    part, reason = part_of_batch(batch, SHARE, point(net, 0.0))
    assert reason is None
    torch.testing.assert_close(measures(part, net), measures(batch, net), rtol=0, atol=0)


def test_the_part_of_all_examples_is_the_batch_itself() -> None:
    net = compile(Net(), (X,), loss="normal")
    batch = observed(net, (X,), squares)
    part, reason = part_of_batch(batch, 1.0, point(net, 0.0))
    assert part is batch and reason is None


def test_checks_take_a_part_on_accelerators_and_in_one_process() -> None:
    assert share_of_checks(["cuda", "cuda"], 1) == 1 / 8
    assert share_of_checks(["cuda"], 2) == share_of_checks(["cpu"], 1) == share_of_checks(["cuda", "cpu"], 1) == 1.0


def train(net: Any, opt: KFAC, steps: int, loss: Callable[[Any], Tensor] = squares) -> list[float]:
    values = []
    for _ in range(steps):
        opt.zero_grad()
        value = loss(net(X))
        value.backward()
        opt.step()
        values.append(value.item())
    return values


def test_a_training_whose_checks_take_a_part_descends_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "share_of_checks", lambda kinds, processes: SHARE)
    net = compile(Net(), (X,), loss="normal")
    target = X @ torch.ones(3, 4, dtype=torch.float64)
    optimizer = KFAC(net, seed=0)
    losses = train(net, optimizer, 40, lambda outputs: rows(outputs - target))
    assert losses[-1] < 0.5 * losses[0]
    report = " ".join(str(net.report).split())
    assert "checks take the first 1/8 of the examples of a batch, rounded up" in report
    assert "whole batches" not in report


def test_the_report_says_why_the_checks_take_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "share_of_checks", lambda kinds, processes: SHARE)
    net = compile(normed(), (X,), loss="normal")
    optimizer = KFAC(net, seed=0)
    train(net, optimizer, 2, rows)
    report = " ".join(str(net.report).split())
    assert "take whole batches and not 1/8 of their examples" in report
    assert "the outputs of an example depend on the others" in report and "checks take the first" not in report


class LossAndOutputs(Net):
    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return F.mse_loss(outputs, targets), outputs


def test_a_term_of_the_outputs_next_to_the_loss_of_a_compiled_forward_takes_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradients at the outputs have rows of all examples, and that at the loss has none."""
    monkeypatch.setattr(checks, "share_of_checks", lambda kinds, processes: SHARE)
    for penalty, words in ((0.01, "the loss has a term of the outputs next to that of forward"), (0.0, None)):
        compiled: Any = torch.compile(LossAndOutputs(), backend="aot_eager")
        net = compile(compiled, (X, VALUES))
        optimizer = KFAC(net, seed=0)
        for _ in range(3):
            optimizer.zero_grad()
            loss, outputs = net(X, VALUES)
            (loss + penalty * outputs.square().mean() if penalty else loss).backward()
            optimizer.step()
        report = " ".join(str(net.report).split())
        assert words in report if words else "checks take the first 1/8" in report
