"""Losses that are not known: the error comes at once, and heads behind no loss are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.torch_private import pytree

X, LABELS, BOXES = torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8, 2)


class Detector(nn.Module):
    """Two heads; `hidden` and `total` are returned, too, as trainers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.box = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"total": h.sum(), "hidden": h, "logits": self.label(h), "box": self.box(h)}


class Trained(Detector):
    """The losses of both heads in forward; that of the boxes is none that the library knows."""

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:  # type: ignore[override]
        outputs = super().forward(x)
        return F.cross_entropy(outputs["logits"], labels) + (outputs["box"] - boxes).abs().mean()


def of_labels(outputs: dict[str, Tensor]) -> Any:
    return kfac_fx.losses.Categorical(outputs["logits"])


def of_both(outputs: dict[str, Tensor]) -> Any:
    return [kfac_fx.losses.Categorical(outputs["logits"]), kfac_fx.losses.Normal(outputs["box"])]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["fx", "export"])
@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact"])
def test_an_optimizer_of_a_captured_model_without_a_loss_is_refused(inputs: Any, mode: str) -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), inputs)
    with pytest.raises(kfac_fx.LossError, match=r"no loss is known.*\nName it with compile\(\.\.\., loss="):
        kfac_fx.KFAC(net, estimation_mode=mode)
    assert str(net.report)  # which needs none


def test_a_model_that_is_captured_in_parts_may_have_its_loss_in_python() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x = x if float(x.sum()) < 1e9 else 2 * x
            return F.cross_entropy(self.layer(x), labels)

    net = kfac_fx.compile(Divided(), (X, LABELS))
    assert net.program.submodules
    optimizer = kfac_fx.KFAC(net)
    net(X, LABELS).backward()
    optimizer.step()


def warned(step: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["fx", "export"])
def test_a_head_in_no_named_loss_is_named(inputs: Any) -> None:
    net = kfac_fx.compile(Detector(), inputs, loss=of_labels)
    optimizer = kfac_fx.KFAC(net)

    def step() -> None:
        outputs = net(X)
        (F.cross_entropy(outputs["logits"], LABELS) + (outputs["box"] - BOXES).abs().pow(1.5).mean()).backward()
        optimizer.step()

    (text,) = warned(step)
    assert text.startswith("the trained loss depends on parameters that no registered loss depends on: box.weight, box")
    assert "saturated" not in text and "body" not in text
    reasons = {row.names: row.reason for row in net.report.rows}
    assert [name for name, reason in reasons.items() if reason is not None] == ["box.{weight, bias}"]
    assert "outputs depend on it, and no loss does, so it has no curvature" in net.report.to_text(width=200)


def test_heads_in_named_losses_have_no_reason() -> None:
    net = kfac_fx.compile(Detector(), (X,), loss=of_both)
    assert [row.reason for row in net.report.rows] == [None] * 3


def test_a_head_whose_loss_in_forward_is_unknown_is_in_the_report() -> None:
    net = kfac_fx.compile(Trained(), (X, LABELS, BOXES))
    report = net.report
    assert report.unused == report.behind_no_loss == ("box.weight", "box.bias")
    assert report.to_dict()["parameters"]["behind no loss"] == ["box.weight", "box.bias"]
    text = report.to_text(width=200)
    assert "unused    none" in text
    assert "no loss   box.{weight, bias}: what forward returns depends on it, and no loss that is known does" in text


def test_parameters_that_nothing_depends_on_are_behind_no_output() -> None:
    model = Trained()
    model.spare = nn.Linear(2, 2)
    report = kfac_fx.compile(model, (X, LABELS, BOXES)).report
    assert report.behind_no_loss == ("box.weight", "box.bias")
    assert "unused    spare.weight" in str(report).splitlines()


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ({"loss": torch.zeros(()), "logits": X}, "outputs['logits']"),
        ({"loss": torch.zeros(()), "scores": X}, "outputs['scores']"),
        ({"hidden": X, "logits": X}, "outputs['logits']"),
        ((torch.zeros(()), X), "outputs[1]"),
        ({"state": [X]}, "outputs['state']"),
    ],
)
def test_the_hint_names_an_output_that_is_there(outputs: Any, named: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return pytree.tree_map(lambda value: value + y.sum() if not value.ndim else value + y, outputs)

    with pytest.raises(kfac_fx.LossError, match="say which, as in loss=lambda outputs:") as error:
        kfac_fx.compile(Returns(), (X,), loss="categorical")
    assert f"kfac_fx.losses.Categorical({named})" in str(error.value)
