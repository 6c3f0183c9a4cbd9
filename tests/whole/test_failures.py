"""What must not become a fallback, or another error: no memory, a device that failed, a bug of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import layer
from kfac_fx.optim import watched
from kfac_fx.optim.curvature import JacobianProducts
from kfac_fx.passes.graphs.failures import fatal, first_line, out_of_memory
from kfac_fx.recording.pullback import Pullback

TOO_MUCH = 1 << 50  # bytes
NO_MEMORY = "can't allocate memory"


def greedy(x: Tensor) -> Tensor:
    """Asks for more memory than there is, unless it runs without data."""
    return x + torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)[0]


class Greedy(torch.autograd.Function):
    """An identity whose backward needs more memory than there is."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return greedy(gradient)


def raised(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_memory_and_devices_and_bugs_of_ours_are_fatal() -> None:
    assert fatal(raised(lambda: greedy(torch.zeros(1)))) and fatal(MemoryError()) and fatal(torch.OutOfMemoryError())
    assert fatal(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert fatal(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    assert fatal(AssertionError("bug in kfac_fx: two of one name"))


def test_what_a_model_does_wrong_is_not_fatal() -> None:
    assert not fatal(raised(lambda: torch.zeros(2) @ torch.zeros(3)))
    assert not fatal(AssertionError("inputs must be images")) and not fatal(NotImplementedError())
    assert not fatal(ValueError("out of memory cells")) and not out_of_memory(torch.AcceleratorError("unspecified"))


def test_an_error_is_said_in_one_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(NotImplementedError()) == "NotImplementedError"


def test_cotangents_are_not_sent_back_one_by_one_for_want_of_memory() -> None:
    x = torch.zeros(2, requires_grad=True)
    output: Tensor = Greedy.apply(x)  # type: ignore[no-untyped-call]
    pullback = Pullback([output], [x])
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        pullback([torch.ones(3, 2)])
    assert pullback.loop_reason is None


def test_reverse_mode_is_no_way_out_of_memory() -> None:
    tried: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        tried.append(x)
        return (greedy(x),)

    products = JacobianProducts()
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        products(function, (torch.zeros(2),), (torch.ones(1, 2),))
    assert len(tried) == 1 and products.reason is None


def test_memory_that_only_reverse_mode_lacks_is_said_as_such() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y: Tensor = Greedy.apply(x)  # type: ignore[no-untyped-call]  # knows no forward mode
        return (y,)

    with pytest.raises(RuntimeError, match=NO_MEMORY) as caught:
        JacobianProducts()(function, (torch.zeros(2),), (torch.ones(1, 2),))
    assert "momentum_type" not in str(caught.value)


class Model(nn.Module):
    """A linear layer behind `before`."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.fc = before, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.before(x))
        return y


def test_rows_that_take_too_much_memory_do_not_make_a_layer_generic() -> None:
    @layer(
        rows=lambda input, attrs: greedy(input).unsqueeze(1),
        grad_rows=kfac_fx.as_rows,
        layouts={"weight": "o i -> o i"},
        example=lambda: (nn.Linear(3, 2, bias=False), torch.ones(2, 3)),
    )
    def hungry(input: Tensor, *, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, weight).relu()

    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        kfac_fx.compile(model, (torch.ones(4, 3),), loss="normal", layers=[hungry])


def test_a_model_without_memory_to_run_is_neither_divided_nor_called_untraceable() -> None:
    def value(x: Tensor) -> Tensor:  # which no graph holds, so that the model itself runs
        return greedy(x) if x.sum().item() > 0 else x

    with pytest.raises(RuntimeError, match=NO_MEMORY):
        kfac_fx.compile(Model(value), (torch.ones(4, 3),), loss="normal")


@pytest.mark.parametrize("example", [(torch.ones(4, 3),), None])
def test_a_bug_of_ours_is_not_taken_for_the_model_s(example: tuple[Tensor] | None) -> None:
    def bug(x: Tensor) -> Tensor:
        raise AssertionError("bug in kfac_fx: a pass lost a node")

    with pytest.raises(AssertionError, match="bug in kfac_fx: a pass lost a node"):
        kfac_fx.compile(Model(bug), example, loss="normal")


class OwnLoss(nn.Module):
    """Returns its loss, so that the Fisher's output is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.fc(x), y)


def first_step(monkeypatch: pytest.MonkeyPatch, within: Callable[..., Any]) -> kfac_fx.KFAC:
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    net = kfac_fx.compile(OwnLoss(), (x, y))
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    monkeypatch.setattr(watched, "within", within)
    net(x, y).backward()
    opt.step()
    return opt


def test_a_loss_that_there_is_no_memory_to_look_at_is_told_and_trained_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opt = first_step(monkeypatch, lambda *_: greedy(torch.zeros(1)))
    (said,) = opt.net.report.to_dict()["fallbacks"]  # type: ignore[attr-defined]
    assert said.startswith("whether the training loss is the registered one was not checked") and opt.counter == 1


def test_another_error_of_looking_at_the_loss_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        first_step(monkeypatch, lambda *_: torch.zeros(2, 2) @ torch.zeros(3, 3))
