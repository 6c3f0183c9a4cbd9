"""Lines that a training loop forgets: warnings and errors that name the line to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, StalledWarning
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.errors import FactorNotReady
from tests.tables import pairs

WITHOUT_GRADIENT = (
    "3 steps in a row changed nothing, because no parameter had a gradient when step() was called. Usual causes are a "
    "step() before the backward(), a zero_grad() between them, a forward under torch.no_grad(), and a loss that does "
    "not depend on the outputs of net(x). Write optimizer.zero_grad(), loss = ... of net(x), loss.backward(), "
    "optimizer.step(), in this order."
)
ADDED = (
    "the gradients of this step were added to those of the steps before it, because no gradient was zeroed between "
    "them: write optimizer.zero_grad() before every backward() that begins a step. If steps are meant to have the "
    "gradients of earlier batches, too, nothing is wrong."
)
RULES: list[dict[str, Any]] = [{}, {"momentum_type": "adaptive"}, {"lr": 0.1, "damping": 0.1}]
X, Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2


def made(in_place: bool = False, **options: Any) -> tuple[CompiledModule, KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net = kfac_fx.compile(model, (X,), loss="categorical", in_place=in_place)
    return net, KFAC(net, **options)


def loss_of(module: nn.Module) -> Tensor:
    return F.cross_entropy(module(X), Y)


def said(run: Callable[[], None], number: int = 8) -> list[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(number):
            run()
    return [(entry.category, str(entry.message)) for entry in caught]


def step_first(net: CompiledModule, opt: KFAC) -> None:
    opt.zero_grad()
    loss = loss_of(net)
    opt.step()
    loss.backward()


def zero_late(net: CompiledModule, opt: KFAC) -> None:
    loss_of(net).backward()
    opt.zero_grad()
    opt.step()


def no_backward(net: CompiledModule, opt: KFAC) -> None:
    loss_of(net)
    opt.step()


def no_graph(net: CompiledModule, opt: KFAC) -> None:
    with torch.no_grad():
        outputs = net(X)
    F.cross_entropy(outputs.requires_grad_(), Y).backward()
    opt.step()


@pairs(("options", RULES), ("run", [step_first, zero_late, no_backward, no_graph]))
def test_steps_without_a_gradient_are_told_once(run: Callable[..., None], options: dict[str, Any]) -> None:
    net, opt = made(**options)
    assert said(lambda: run(net, opt)) == [(StalledWarning, WITHOUT_GRADIENT)]


def test_two_steps_without_a_gradient_are_no_reason() -> None:
    net, opt = made()

    def train() -> None:
        for _ in range(2):
            opt.step()
        opt.zero_grad()
        loss_of(net).backward()
        opt.step()
        opt.zero_grad()

    assert said(train, 4) == []


def test_a_net_that_is_frozen_has_no_gradients_and_no_warning() -> None:
    net, opt = made()
    net.requires_grad_(False)
    assert said(opt.step) == []


def add_up(net: CompiledModule, opt: KFAC) -> None:
    loss_of(net).backward()
    opt.step()


@pairs(("in_place", [False, True]), ("options", RULES))
def test_gradients_that_nobody_zeroes_are_told_once(options: dict[str, Any], in_place: bool) -> None:
    net, opt = made(in_place, **options)
    told = said(lambda: add_up(net.model if in_place else net, opt), 6)
    assert [text for category, text in told if category is RuntimeWarning] == [ADDED]


def test_clipped_gradients_that_nobody_zeroes_are_told() -> None:
    net, opt = made()

    def run() -> None:
        loss_of(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()

    assert (RuntimeWarning, ADDED) in said(run)


def by_optimizer(net: CompiledModule, opt: KFAC) -> None:
    opt.zero_grad()


def by_filling(net: CompiledModule, opt: KFAC) -> None:
    opt.zero_grad(set_to_none=False)


def by_model(net: CompiledModule, opt: KFAC) -> None:
    net.model.zero_grad()


def by_none(net: CompiledModule, opt: KFAC) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def by_zero(net: CompiledModule, opt: KFAC) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@pairs(("zero", [by_optimizer, by_filling, by_model, by_none, by_zero]), ("parts", [1, 3]))
def test_gradients_that_are_zeroed_in_any_way_are_not_told(zero: Callable[..., None], parts: int) -> None:
    net, opt = made()

    def run() -> None:
        zero(net, opt)
        for _ in range(parts):
            (loss_of(net) / parts).backward()
        opt.step()

    assert said(run) == []


def test_gradients_that_are_given_anew_are_not_told() -> None:
    net, opt = made()

    def run() -> None:
        parameters = list(net.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(net), parameters), strict=True):
            parameter.grad = gradient

        opt.step()

    assert said(run) == []


@pairs(("in_place", [False, True]), ("zero", [by_optimizer, by_model, by_none, by_zero]))
def test_a_discriminator_that_is_zeroed_behind_its_forward_is_not_told(
    zero: Callable[..., None], in_place: bool
) -> None:
    """The generator's backward passes it, too, and leaves gradients."""
    net, opt = made(in_place)
    called = net.model if in_place else net
    generator = nn.Linear(3, 3)

    def run() -> None:
        loss = loss_of(called)
        zero(net, opt)
        loss.backward()
        opt.step()
        F.cross_entropy(called(generator(X)), Y).backward()

    assert RuntimeWarning not in [category for category, _ in said(run)]


def test_a_second_gradient_at_another_place_and_a_backward_that_is_only_logged_are_not_told() -> None:
    net, opt = made()

    def run() -> None:
        opt.zero_grad()
        loss_of(net).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01 * parameter.grad)
        second = loss_of(net)
        second.backward(retain_graph=True)  # for a norm that is logged
        net.model.zero_grad()
        second.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.01 * parameter.grad)
        opt.step()

    assert RuntimeWarning not in [category for category, _ in said(run)]


def test_steps_between_which_the_net_was_not_called_have_no_gradient_by_intention() -> None:
    """As those of an actor that learns at every fourth step of its critic, with both optimizers stepped."""
    net, opt = made()
    number = 0

    def run() -> None:
        nonlocal number
        opt.zero_grad()
        if number % 4 == 0:
            loss_of(net).backward()
        opt.step()
        number += 1

    assert said(run, 16) == []


# --- a damping that no step reads ------------------------------------------------------------------------------------


def test_a_damping_that_the_rule_does_not_have_cannot_be_changed() -> None:
    text = (
        "{} has no damping to change: sides of blocks are damped by {} of their mean eigenvalue, the option "
        "relative_damping. For shorter steps write a smaller lr in optimizer.param_groups; for a damping of your own, "
        "make the optimizer with KFAC(net, damping=...)"
    )
    for options, written, part in (
        ({}, "the default rule", 0.003),
        ({"momentum_type": "eigen_moments"}, "momentum_type='eigen_moments'", 0.003),
        ({"momentum_type": "regular", "lr": 0.1, "relative_damping": 0.1}, "momentum_type='regular'", 0.1),
    ):
        _, opt = made(**options)
        with pytest.raises(ValueError) as error:
            opt.damping = 0.5
        assert str(error.value) == text.format(written, part)
        assert opt.damping == 0


# --- forwards that were not recorded --------------------------------------------------------------------------------

EVALUATING = "The net is in evaluation mode now: write net.train()"


def test_a_net_in_evaluation_mode_is_named() -> None:
    net, opt = made()
    net.eval()
    loss_of(net).backward()
    with pytest.raises(FactorNotReady, match="no batch was ever recorded") as error:
        opt.step()
    assert str(error.value).endswith(f". {EVALUATING}")


def test_forwards_with_other_tensors_are_named() -> None:
    net, opt = made()
    for _ in range(2):
        noisy = {name: parameter + 0.01 for name, parameter in net.named_parameters()}
        torch.func.functional_call(net, noisy, torch.randn(5, 3)).sum().backward()
    with pytest.raises(FactorNotReady, match=r"\. 2 forwards had other tensors instead of the parameters"):
        opt.step()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_optimizer_that_is_made_after_the_forward_says_so(in_place: bool) -> None:
    net = kfac_fx.compile(nn.Linear(3, 4), loss="categorical", in_place=in_place)
    loss_of(net).backward()
    with pytest.raises(FactorNotReady, match=r"Make KFAC\(net\) before that call: forwards before"):
        kfac_fx.KFAC(net).step()


def test_a_step_without_its_batch_says_what_to_call() -> None:
    net, opt = made()
    loss_of(net).backward()
    opt.step()
    opt.zero_grad()
    loss_of(net.model).backward()
    text = (
        "the default rule checks the length of this step with the batch of the step, and has none: since the last step"
        " net(x) was not called in training mode with gradients enabled, or no backward came to its "
        "outputs. Before every step(), call the compiled module, net(x) and not the model it was made of, and "
        "backward() on a loss of its outputs"
    )
    with pytest.raises(RuntimeError) as error:
        opt.step()
    assert str(error.value) == text
    net.eval()
    with pytest.raises(RuntimeError) as error:
        opt.step()
    assert str(error.value) == f"{text}. {EVALUATING}"


def test_a_method_of_the_model_records_nothing_and_the_error_says_so() -> None:
    class Model(nn.Linear):
        def loss(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self(x), Y)

    net = kfac_fx.compile(Model(3, 2), (X,), loss="categorical")
    opt = KFAC(net)
    net.loss(X).backward()
    with pytest.raises(FactorNotReady, match=r"as in net\.loss\(x\): let forward compute their results"):
        opt.step()


def test_torch_compile_of_a_model_in_place_is_named() -> None:
    net, opt = made(in_place=True)
    loss_of(torch.compile(net.model, backend="eager")).backward()
    with pytest.raises(FactorNotReady, match=r"torch\.compile\(model\), ..., in_place=True\) and call net\(x\)"):
        opt.step()
