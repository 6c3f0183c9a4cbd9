"""The table of torch's losses: every row against torch, and the distribution that it names."""

import inspect

import pytest
import torch

from kfac_fx.losses.distributions import DISTRIBUTIONS
from kfac_fx.losses.registered import likelihood, loss_from
from kfac_fx.passes.torch_losses import TORCH_LOSSES, TorchLoss
from kfac_fx.passes.trace import trace_model

rows = pytest.mark.parametrize("loss", TORCH_LOSSES, ids=lambda loss: loss.name)
TARGETS = {
    "categorical": lambda: torch.randint(4, (6,)),
    "normal": lambda: torch.randn(6, 4),
    "multi_bernoulli": lambda: torch.rand(6, 4).round(),
}


@rows
def test_the_function_takes_inputs_targets_and_a_reduction(loss: TorchLoss) -> None:
    assert loss.arguments[:2] == ("input", "target") and "reduction" in loss.arguments
    optional = [name for name, p in inspect.signature(loss.function).parameters.items() if p.default is not p.empty]
    assert set(loss.outside) <= set(optional)


@rows
def test_the_module_computes_the_function(loss: TorchLoss) -> None:
    inputs, targets = torch.randn(6, 4), TARGETS[loss.distribution]()
    assert torch.equal(loss.module()(inputs, targets), loss.function(inputs, targets))


@rows
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_is_a_multiple_of_that_of_the_distribution(loss: TorchLoss, reduction: str) -> None:
    inputs, targets = torch.randn(6, 4, requires_grad=True), TARGETS[loss.distribution]()
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

    inputs = torch.randn(6, 4), TARGETS[loss.distribution]()
    targets = {
        str(node.target).split(".")[1]
        for node in trace_model(Model(), inputs).program.graph.nodes
        if "aten" in str(node.target)
    }
    assert loss.aten in targets
