"""The table of torch's losses: every row against torch, and the distribution that it names."""

import inspect

import pytest
import torch
from torch import Tensor

from kfac_fx.losses.declared import likelihood, loss_from
from kfac_fx.losses.distributions import DISTRIBUTIONS
from kfac_fx.passes.torch_losses import TORCH_LOSSES, TorchLoss
from kfac_fx.passes.trace import trace_model

rows = pytest.mark.parametrize("loss", TORCH_LOSSES, ids=lambda loss: loss.name)


def targets_of(loss: TorchLoss, inputs: Tensor) -> Tensor:
    """Drawn from the distribution behind the loss."""
    return DISTRIBUTIONS[loss.distribution](inputs.detach()).sample()


@rows
def test_the_function_takes_inputs_targets_and_a_reduction(loss: TorchLoss) -> None:
    assert loss.arguments[:2] == ("input", "target") and "reduction" in loss.arguments
    optional = [name for name, p in inspect.signature(loss.function).parameters.items() if p.default is not p.empty]
    assert set(loss.outside) <= set(optional), f"`outside` of {loss.name} names arguments of the function"


@rows
def test_the_module_computes_the_function(loss: TorchLoss) -> None:
    inputs = torch.randn(6, 4)
    targets = targets_of(loss, inputs)
    assert torch.equal(loss.module()(inputs, targets), loss.function(inputs, targets))


@rows
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_is_a_multiple_of_that_of_the_distribution(loss: TorchLoss, reduction: str) -> None:
    inputs = torch.randn(6, 4, requires_grad=True)
    targets = targets_of(loss, inputs)
    weight, behind = likelihood(loss, reduction, inputs, targets)
    assert type(behind) is DISTRIBUTIONS[loss.distribution]
    cases = behind.cases if reduction == "mean" else 1
    (ours,) = torch.autograd.grad(weight * behind.evaluate() / cases, inputs)
    (of_torch,) = torch.autograd.grad(loss.function(inputs, targets, reduction=reduction), inputs)
    torch.testing.assert_close(ours, of_torch)


@rows
def test_a_name_of_torch_is_told_what_to_write(loss: TorchLoss) -> None:
    for wrong in (loss.function, loss.module(), loss.module):
        with pytest.raises(ValueError, match=f"loss={loss.short!r}"):
            loss_from(wrong)


@rows
def test_aten_has_the_operation_under_the_name_of_the_row(loss: TorchLoss) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss.function(x, y)

    x = torch.randn(6, 4)
    inputs = x, targets_of(loss, x)
    operations = {
        str(node.target).split(".")[1]
        for node in trace_model(Model(), inputs).program.graph.nodes
        if "aten" in str(node.target)
    }
    assert loss.aten in operations
