"""The optimizer's state by parameter, and the vectors that a step computes with."""

from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.optim.parameter_groups import Members
from kfac_fx.optim.update import Work


def members(decay: float = 0.0, first_order: bool = False) -> tuple[Members, list[nn.Parameter], dict[Any, Any]]:
    """Two groups with a parameter each."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    groups = [
        {"params": [one], "lr": lr, "momentum": 0.9, "weight_decay": decay, "first_order": first_order}
        for one, lr in zip(parameters, (0.1, 0.2), strict=True)
    ]
    names = dict(zip(parameters, ("weight", "bias"), strict=True))
    made = Members.of(groups, names, torch.zeros(()))
    made.refresh(groups, names)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return made, parameters, {parameter: {} for parameter in parameters}


def work_of(made: Members, states: dict[Any, Any]) -> Work:
    work, other = made.works(states)
    assert work is not None and other is None
    return work


def test_the_state_of_a_parameter_is_a_view_of_the_vector() -> None:
    made, (weight, bias), states = members()
    work_of(made, states).state["velocity"].copy_(torch.arange(10.0))
    assert states[weight]["velocity"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert states[bias]["velocity"].tolist() == [6, 7, 8, 9]
    kept = states[weight]["velocity"]
    assert work_of(made, states).state["velocity"].tolist() == list(range(10))
    assert states[weight]["velocity"] is kept


def test_a_state_that_was_put_in_its_place_counts() -> None:
    made, (weight, _), states = members()
    work_of(made, states)
    states[weight]["velocity"] = torch.ones(2, 3)
    assert work_of(made, states).state["velocity"].tolist() == [1] * 6 + [0] * 4


def test_a_parameter_without_a_gradient_keeps_its_state_until_it_has_one() -> None:
    made, (weight, bias), states = members()
    work_of(made, states).state["velocity"].copy_(torch.arange(10.0))
    bias.grad = None
    work = work_of(made, states)
    assert list(work.parameters) == ["weight"]
    work.state["velocity"].zero_()
    assert states[bias]["velocity"].tolist() == [6, 7, 8, 9]
    bias.grad = torch.ones(4)
    assert work_of(made, states).state["velocity"].tolist() == [0] * 6 + [6, 7, 8, 9]
    weight.grad = bias.grad = None
    assert made.works(states) == (None, None)


def test_groups_have_their_own_learning_rates_in_one_vector() -> None:
    made, _, states = members()
    work = work_of(made, states)
    torch.testing.assert_close(work.lr, torch.tensor([0.1] * 6 + [0.2] * 4))
    assert work.weight_decay is None
    made, _, states = members(decay=0.3)
    assert work_of(made, states).weight_decay is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_and_state_are_in_single_precision_at_least(dtype: torch.dtype) -> None:
    made, parameters, states = members()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones_like(parameter)
    work = work_of(made, states)
    expected = torch.promote_types(dtype, torch.float32)
    assert {work.g.dtype, work.state["velocity"].dtype} == {expected}


def test_the_first_order_rule_counts_steps_for_every_parameter() -> None:
    made, (weight, bias), states = members(first_order=True)
    _, work = made.works(states)
    assert work is not None
    assert work.state["step"].shape == (2,)
    work.state["step"] += 1
    bias.grad = None
    _, work = made.works(states)
    assert work is not None
    work.state["step"] += 1
    assert (states[weight]["step"].item(), states[bias]["step"].item()) == (2, 1)
