"""Batches that are given up in odd trainings: the training is the same to the last bit as one that never saw them."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.hostile.grading import Input, Outcome
from benchmarks.hostile.settings import MODELS, RULES, Setting, Training, drawn

STEPS = 4


class Failure(Exception):
    """A hook raises it in a backward."""


def fail(gradient: Tensor) -> None:
    raise Failure


def raises(training: Training, loss: Tensor, at: Tensor) -> None:
    hook = at.register_hook(fail)
    with contextlib.suppress(Failure):
        training.backward(loss)
    hook.remove()
    training.opt.zero_grad()


def backward_and(then: Callable[[Training], object]) -> Callable[[Training, Tensor], None]:
    def give_up(training: Training, loss: Tensor) -> None:
        training.backward(loss)
        then(training)

    return give_up


def none_by_hand(training: Training) -> None:
    for parameter in training.net.parameters():
        parameter.grad = None


def zeros_by_hand(training: Training) -> None:
    for parameter in training.net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def scaled_to_nothing(training: Training) -> None:
    gradients = [p.grad for p in training.net.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, 0.0)
    training.opt.zero_grad()


def first_trained(training: Training) -> nn.Parameter:
    return next(p for p in training.net.parameters() if p.requires_grad)


def evaluated(training: Training, loss: Tensor) -> None:
    training.called.eval()
    training.backward(training.loss(77))
    training.opt.zero_grad()
    training.called.train()


def interrupted(training: Training, loss: Tensor) -> None:
    """A forward with another shape that the model does not take, as a last batch may be."""
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        training.called(training.batch(0)[0][:, :-1])


WAYS: dict[str, Callable[[Training, Tensor], object]] = {
    "a guard of the loss": lambda training, loss: None,
    "a loss that goes and takes its graph": lambda training, loss: gc.collect(),
    "a backward that fails at once": lambda training, loss: raises(training, loss, loss),
    "a backward that fails late": lambda training, loss: raises(training, loss, first_trained(training)),
    "a guard of the norm": backward_and(lambda training: training.opt.zero_grad()),
    "zeros of the optimizer": backward_and(lambda training: training.opt.zero_grad(set_to_none=False)),
    "the zero_grad of the net": backward_and(lambda training: training.net.zero_grad()),
    "the zero_grad of the model": backward_and(lambda training: training.model.zero_grad(set_to_none=False)),
    "gradients of None": backward_and(none_by_hand),
    "gradients of zero": backward_and(zeros_by_hand),
    "gradients times zero": backward_and(scaled_to_nothing),
    "a gradient of the input alone": lambda training, loss: torch.autograd.grad(
        training.loss(55), first_trained(training)
    ),
    "a batch in evaluation mode": evaluated,
    "a forward that raises": interrupted,
    "two forwards": lambda training, loss: training.loss(66, 3.0),
    "a forward without gradients": lambda training, loss: torch.no_grad()(training.loss)(66),
    "a forward in inference mode": lambda training, loss: torch.inference_mode()(training.loss)(66),
    "a checkpoint of it": lambda training, loss: training.checkpoint(),
}


def run(setting: Setting, ways: tuple[str, str]) -> Outcome:
    """Between steps a batch is given up, once in either way, and all is compared with a training without it."""
    plain = Training(setting).steps(range(STEPS))
    training = Training(setting)
    for number in range(STEPS):
        if number != 1:
            way = WAYS[ways[number % 2]]
            before = training.opt.generator.get_state(), buffers(training)
            loss = training.loss(100 + number, 5.0)
            way(training, loss)
            training.opt.generator.set_state(before[0])
            for buffer, old in zip(training.model.buffers(), before[1], strict=True):
                buffer.copy_(old)  # statistics of norms
            del loss
        training.step(number)
    distance = float((training.parameters - plain.parameters).abs().max())
    return Outcome(distance == 0.0, f"parameters differ by {distance:.2g}")


def buffers(training: Training) -> list[Tensor]:
    return [buffer.clone() for buffer in training.model.buffers()]


def inputs() -> Iterator[Input]:
    rng = random.Random(40)
    models, rules, names = list(MODELS), list(RULES), list(WAYS)
    for number in range(len(models) * len(rules)):
        # Every model with every rule, and every way as often as any other.
        setting = drawn(rng, model=models[number % len(models)], rule=rules[number // len(models)])
        ways = names[number % len(names)], rng.choice(names)
        if number % 40 == 39:
            setting = Setting(setting.model, setting.rule, backend="aot_eager", inputs=True)
        yield Input("given-up batches", f"{' and '.join(ways)}: {setting}", lambda s=setting, w=ways: run(s, w))
