"""Parameters that the trained loss depends on, and none of those that K-FAC knows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LossScaleWarning

X, CLASSES, BOXES = torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8, 2)


class Detector(nn.Module):
    """Its forward computes the loss of a distribution that the library knows, and another one."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        self.branches = branches

    def forward(self, x: Tensor, classes: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        if self.branches and h.sum() > 1e9:
            h = 2 * h
        return {
            "classes": F.cross_entropy(self.classes(h), classes),
            "boxes": F.smooth_l1_loss(self.boxes(h), boxes),
        }


def warned(net: Any, *inputs: Tensor, keys: tuple[str, ...]) -> list[str]:
    """The warnings of two steps."""
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(2):
            optimizer.zero_grad()
            outputs = net(*inputs)
            torch.stack([outputs[key] for key in keys]).sum().backward()
            optimizer.step()
    found = [warning for warning in caught if issubclass(warning.category, LossScaleWarning)]
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message).splitlines()[0] for warning in found]


SAID = "the trained loss depends on parameters that no registered loss depends on: boxes.weight, boxes.bias."


def test_parameters_of_an_unknown_loss_are_named_at_the_first_step() -> None:
    """For a divided model, where no graph shows that the Fisher does not depend on them."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Detector(True), (X, CLASSES, BOXES))
    assert warned(net, X, CLASSES, BOXES, keys=("classes", "boxes")) == [SAID]


def test_parameters_in_no_block_follow_the_first_order_rule() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Detector(False), (X, CLASSES, BOXES))
    assert net.report.unused == ("boxes.weight", "boxes.bias")
    (line,) = warned(net, X, CLASSES, BOXES, keys=("classes", "boxes"))
    assert "comes from smooth_l1_loss" in line and "and AdamW moves boxes.{bias, weight}" in line


def test_the_report_says_that_a_parameter_outside_of_forward_follows_adamw() -> None:
    """As a coefficient of an equation does whose derivatives are taken outside of forward."""
    model = nn.Linear(4, 1)
    model.coefficient = nn.Parameter(torch.zeros(()))
    net = kfac_fx.compile(model)
    optimizer = kfac_fx.KFAC(net, first_order={"lr": 0.03})
    assert "AdamW" not in str(net.report)
    (net(X) - model.coefficient - 3).square().mean().backward()
    optimizer.step()
    assert abs(model.coefficient.item() + 0.03) < 1e-6
    (line,) = [line for line in net.report.to_dict()["fallbacks"] if "AdamW" in line]
    assert line == (
        "coefficient: has gradients, and no forward uses it, so it is in no Fisher block. It follows AdamW, which "
        "moves a number by about 0.03 in a step, whatever the gradient is: write KFAC(..., first_order=dict(lr=...)) "
        "for other steps, or use it in forward"
    )


class WithCoefficient(nn.Linear):
    """Has a parameter that only the loss uses, as the log-variances of several tasks are."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.coefficient = nn.Parameter(torch.zeros(()))


def trained_outside(net: Any, optimizer: Any, factor: float = 1.0) -> list[str]:
    """The warnings of a step on a loss that uses the coefficient."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        (net(X) - factor * net.coefficient - 3).square().mean().backward()
        optimizer.step()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("zeros", [1, 3, 22])
def test_a_parameter_that_no_forward_uses_is_told_though_its_first_gradients_are_zero(zeros: int) -> None:
    """Only the first gradient was read, and a weight of a loss may be zero at first."""
    net = kfac_fx.compile(WithCoefficient())
    optimizer = kfac_fx.KFAC(net)
    assert [text for _ in range(zeros) for text in trained_outside(net, optimizer, factor=0.0)] == []
    (told,) = [text for _ in range(32) for text in trained_outside(net, optimizer)]
    assert told.startswith("coefficient: has gradients, and no forward uses it")


def test_a_parameter_that_no_forward_uses_is_told_once_at_its_first_gradient() -> None:
    net = kfac_fx.compile(WithCoefficient())
    optimizer = kfac_fx.KFAC(net)
    assert trained_outside(net, optimizer, factor=0.0) == []
    net = kfac_fx.compile(WithCoefficient())
    optimizer = kfac_fx.KFAC(net)
    (told,) = trained_outside(net, optimizer)
    assert told == (
        "coefficient: has gradients, and no forward uses it, so it is in no Fisher block. It follows AdamW, which "
        "moves a number by about 0.001 in a step, whatever the gradient is: write KFAC(..., first_order=dict(lr=...)) "
        "for other steps, or use it in forward."
    )
    assert trained_outside(net, optimizer) == []
    other = kfac_fx.compile(WithCoefficient())
    resumed = kfac_fx.KFAC(other)
    resumed.load_state_dict(optimizer.state_dict())
    assert trained_outside(other, resumed) == []


def test_a_chosen_learning_rate_of_a_parameter_that_no_forward_uses_is_not_questioned() -> None:
    net = kfac_fx.compile(WithCoefficient())
    assert trained_outside(net, kfac_fx.KFAC(net, first_order={"lr": 1e-3})) == []
    net = kfac_fx.compile(WithCoefficient())
    groups = [{"params": [net.weight, net.bias]}, {"params": [net.coefficient], "lr": 0.1}]
    assert trained_outside(net, kfac_fx.KFAC(net, params=groups)) == []


@pytest.mark.filterwarnings("ignore:about .* of the gradient of the trained loss:kfac_fx.LossScaleWarning")
@pytest.mark.parametrize(
    ("beside", "own", "rate"),
    [((), 0.05, 0.05), ((), None, 0.01), (("classes",), 0.05, 0.005), (("classes",), torch.tensor(0.2), 0.02)],
)
def test_the_lr_of_a_group_holds_for_parameters_in_no_block(beside: tuple[str, ...], own: Any, rate: float) -> None:
    """It is theirs in a group without others, else it scales theirs as it scales that of all."""
    net = kfac_fx.compile(Detector(False), (X, CLASSES, BOXES))
    apart = [p for name, p in net.named_parameters() if name.startswith(("boxes", *beside))]
    rest = [p for p in net.parameters() if all(p is not other for other in apart)]
    group = {"params": apart} if own is None else {"params": apart, "lr": own}
    optimizer = kfac_fx.KFAC(net, 0.1, damping=0.1, params=[group, {"params": rest}], first_order={"lr": 0.01})
    before = net.get_parameter("boxes.bias").clone()
    outputs = net(X, CLASSES, BOXES)
    (outputs["classes"] + outputs["boxes"]).backward()
    optimizer.step()
    move = (net.get_parameter("boxes.bias") - before).abs().max()
    torch.testing.assert_close(move, torch.tensor(rate, dtype=move.dtype), rtol=1e-3, atol=0.0)  # AdamW's first step


@pytest.mark.parametrize("branches", [False, True])
def test_parameters_that_are_not_trained_are_not_named(branches: bool) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Detector(branches), (X, CLASSES, BOXES))
    assert warned(net, X, CLASSES, BOXES, keys=("classes",)) == []


def test_many_parameters_are_counted() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = nn.Linear(4, 3)
            self.others = nn.ModuleList(nn.Linear(4, 1) for _ in range(6))

        def forward(self, x: Tensor, classes: Tensor) -> dict[str, Tensor]:
            rest = torch.cat([other_module(x) for other_module in self.others], 1)
            rest = 2 * rest if rest.sum() > 1e9 else rest
            return {"loss": F.cross_entropy(self.known(x), classes) + rest.exp().mean()}

    (said,) = warned(kfac_fx.compile(Wide(), (X, CLASSES)), X, CLASSES, keys=("loss",))
    assert said.endswith("others.3.weight, others.3.bias and 4 more.")


@pytest.mark.parametrize("mode", ["gradients", "exact"])
def test_a_saturated_softmax_is_told_as_such(mode: str) -> None:
    """The registered loss depends on all parameters, and the distributions are certain."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(1e4 * torch.eye(3))
    net = kfac_fx.compile(model, loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1, estimation_mode=mode, seed=0)
    F.cross_entropy(net(torch.eye(3)), torch.tensor([1, 2, 1])).backward()
    said = (
        "the model is certain of its outputs, as a saturated softmax is, or a Normal distribution far away from its "
        "targets, or its outputs are no distribution, as variances that are not positive, so these parameters have no "
        r"curvature to speak of: weight, bias.\nWithout curvature .* Scale the inp"
    )
    with pytest.warns(LossScaleWarning, match=said):
        optimizer.step()
