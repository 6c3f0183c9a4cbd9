"""The optimizer's state by parameter, and the vectors that a step computes with."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.groups import (
    FIRST_LR,
    IN_CACHE,
    OF_GROUPS,
    FirstOrder,
    FlatParameters,
    Group,
    GroupedParameters,
    inner,
    keep_first_lr,
    split_group,
)
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules import Regular
from kfac_fx.optim.rules.eigen_moments import EigenMoments
from tests.runtime.toy_optimizers import made, train, values


def members(
    decay: float = 0.0, first_order: bool = False
) -> tuple[GroupedParameters, list[nn.Parameter], dict[Any, Any]]:
    """Two groups with a parameter each."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    groups = [
        {"params": [parameter], "lr": lr, "momentum": 0.9, "weight_decay": decay, "first_order": first_order}
        for parameter, lr in zip(parameters, (0.1, 0.2), strict=True)
    ]
    names = dict(zip(parameters, ("weight", "bias"), strict=True))
    grouped = GroupedParameters.of(groups, names, torch.zeros(()), Regular(damping=1.0).new_state)
    grouped.refresh(groups, names)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return grouped, parameters, {parameter: {} for parameter in parameters}


def flat_of(grouped: GroupedParameters, states: dict[Any, Any]) -> FlatParameters:
    flat = grouped.flat(False, states)
    assert flat is not None and grouped.flat(True, states) is None
    return flat


def test_the_state_of_a_parameter_is_a_view_of_the_vector() -> None:
    grouped, (weight, bias), states = members()
    flat_of(grouped, states).state["velocity"].copy_(torch.arange(10.0))
    assert states[weight]["velocity"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert states[bias]["velocity"].tolist() == [6, 7, 8, 9]
    kept = states[weight]["velocity"]
    assert flat_of(grouped, states).state["velocity"].tolist() == list(range(10))
    assert states[weight]["velocity"] is kept


def test_a_state_that_was_put_in_its_place_counts() -> None:
    grouped, (weight, _), states = members()
    flat_of(grouped, states)
    states[weight]["velocity"] = torch.ones(2, 3)
    assert flat_of(grouped, states).state["velocity"].tolist() == [1] * 6 + [0] * 4


def test_a_parameter_without_a_gradient_keeps_its_state_until_it_has_one() -> None:
    grouped, (weight, bias), states = members()
    flat_of(grouped, states).state["velocity"].copy_(torch.arange(10.0))
    bias.grad = None
    flat = flat_of(grouped, states)
    assert list(flat.parameters) == ["weight"]
    flat.state["velocity"].zero_()
    assert states[bias]["velocity"].tolist() == [6, 7, 8, 9]
    bias.grad = torch.ones(4)
    assert flat_of(grouped, states).state["velocity"].tolist() == [0] * 6 + [6, 7, 8, 9]
    weight.grad = bias.grad = None
    assert grouped.flat(False, states) is None and grouped.flat(True, states) is None


def test_all_parameters_of_a_group_decay_also_if_the_first_has_no_gradient() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    group: Group = {"params": [first, second], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "first_order": False}
    names = {first: "first", second: "second"}
    grouped = GroupedParameters.of([group], names, torch.zeros(()), Regular(damping=1.0).new_state)
    grouped.refresh([group], names)
    second.grad = torch.ones(3)
    decay = flat_of(grouped, {first: {}, second: {}}).weight_decay
    torch.testing.assert_close(decay, torch.tensor(0.3))


def test_groups_have_their_own_learning_rates_in_one_vector() -> None:
    grouped, _, states = members()
    flat = flat_of(grouped, states)
    torch.testing.assert_close(flat.lr, torch.tensor([0.1] * 6 + [0.2] * 4))
    assert flat.weight_decay is None
    grouped, _, states = members(decay=0.3)
    assert flat_of(grouped, states).weight_decay is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_and_state_are_in_single_precision_at_least(dtype: torch.dtype) -> None:
    grouped, parameters, states = members()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones_like(parameter)
    flat = flat_of(grouped, states)
    expected = torch.promote_types(dtype, torch.float32)
    assert {flat.g.dtype, flat.state["velocity"].dtype} == {expected}


def test_the_first_order_rule_counts_steps_for_every_parameter() -> None:
    grouped, (weight, bias), states = members(first_order=True)
    flat = grouped.flat(True, states)
    assert flat is not None
    assert flat.state["step"].shape == (2,)
    flat.state["step"] += 1
    bias.grad = None
    flat = grouped.flat(True, states)
    assert flat is not None
    flat.state["step"] += 1
    assert (states[weight]["step"].item(), states[bias]["step"].item()) == (2, 1)


def test_the_first_lr_of_a_group_stays_when_its_lr_changes_in_place() -> None:
    group: Group = {"lr": torch.tensor(0.5)}
    keep_first_lr(group)
    group["lr"].mul_(0.1)
    keep_first_lr(group)
    assert group[FIRST_LR].item() == 0.5
    older: Group = {"lr": 0.1, "initial_lr": 0.3}
    keep_first_lr(older)
    assert older[FIRST_LR] == 0.3


OUT_OF_RANGE = [
    ("lr", -0.1, "not be negative"),
    ("momentum", -0.1, "be from 0 and below 1"),
    ("momentum", 1.0, "be from 0 and below 1"),
    ("weight_decay", -0.1, "not be negative"),
]


@pytest.mark.parametrize(("option", "value", "wanted"), OUT_OF_RANGE)
def test_the_numbers_of_a_group_are_in_range(option: str, value: float, wanted: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=f"{option} is {value}; it must {wanted}"):
        split_group(
            {"params": [weight], option: value}, {weight: "w"}, (), FirstOrder(), dict.fromkeys(OF_GROUPS, 0.1), ()
        )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lr", math.nan, "lr of a parameter group is nan; it must be finite"),
        ("lr", math.inf, "lr of a parameter group is inf; it must be finite"),
        ("lr", -0.1, "lr of a parameter group is -0.1; it must not be negative"),
        ("momentum", -0.1, "momentum of a parameter group is -0.1; it must be from 0 and below 1"),
        ("momentum", 3.0, "momentum of a parameter group is 3.0; it must be from 0 and below 1"),
        ("weight_decay", math.nan, "weight_decay of a parameter group is nan; it must be finite"),
        ("damping", 0.3, "shares all other options with the rest: KFAC(..., damping=0.3), and not damping in a group"),
    ],
)
def test_numbers_that_a_loop_writes_into_a_group_are_checked_at_the_next_step(
    option: str, value: float, words: str
) -> None:
    net, opt = made()
    train(net, opt, range(1))
    before = values(net)
    opt.param_groups[0][option] = value
    with pytest.raises(ValueError, match=re.escape(words)):
        train(net, opt, range(1, 2))
    assert all(map(torch.equal, values(net).values(), before.values()))


@pytest.mark.parametrize("lr", [-1e-12, torch.tensor(-1e-12)])
def test_a_schedule_may_end_at_an_lr_that_is_zero_up_to_rounding(lr: Any) -> None:
    """The step moved nothing, because its length was the root of a negative number."""
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), loss="categorical")
    opt, x = KFAC(net, seed=0), torch.randn(16, 4)
    for rate in (1.0, lr, lr):
        opt.param_groups[0]["lr"] = rate
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), torch.arange(16) % 3).backward()
        opt.step()
    assert opt.skipped == 0


def test_groups_without_parameters_are_refused() -> None:
    net, _ = made()
    net.detach()
    with pytest.raises(ValueError, match="params has groups without parameters alone: leave params out"):
        KFAC(net, lr=0.1, damping=0.1, params=[{"params": []}])


def test_parameters_in_no_group_do_not_move_and_are_in_the_report() -> None:
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), loss="categorical")
    opt, x, y = KFAC(net, params=net.model[0].parameters()), torch.randn(8, 4), torch.randint(3, (8,))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for _ in range(2):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
    moved = [not torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)]
    assert moved == [True, True, False, False]
    assert "2.{bias, weight}: in no parameter group of KFAC, which leaves such parameters as they are" in " ".join(
        str(net.report).split()
    )
    opt.add_param_group({"params": net.model[2].parameters()})
    assert "in no parameter group" not in str(net.report)


def test_a_group_of_parameters_that_another_one_has_is_told_what_is_enough() -> None:
    net = compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), (torch.randn(8, 4),), loss="categorical")
    opt = KFAC(net)
    text = r"more than one parameter group: 0.weight, 0.bias. To train frozen ones .*requires_grad_\(True\) is enough"
    with pytest.raises(ValueError, match=text):
        opt.add_param_group({"params": net.model[0].parameters()})


@pytest.mark.parametrize("number", [5, IN_CACHE, IN_CACHE + 1, 3 * IN_CACHE + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_products_of_long_vectors_are_exact_up_to_rounding(number: int, dtype: torch.dtype) -> None:
    """A sum of terms of one sign loses most where terms are added up one after another."""
    first, second = (torch.rand(number, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    expected = (first.double() * second.double()).sum()
    found = inner(first, second)
    assert found.dtype == torch.float32 and float(found) == pytest.approx(float(expected), rel=3e-7)


def test_the_move_of_a_plain_step_takes_the_memory_of_the_gradient_and_changes_no_other_number() -> None:
    """Two trainings, one of a class of a user that may keep the gradient; `.grad` stays what it was."""

    class Kept(EigenMoments):
        pass

    ends, gradients = [], []
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    for rule in (EigenMoments(), Kept()):
        torch.manual_seed(0)
        net = compile(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), (x,), loss="normal")
        optimizer = KFAC(net, rule=rule, seed=0)
        for _ in range(25):
            optimizer.zero_grad()
            (net(x + 0.1 * torch.randn_like(x)).square().sum() / len(x)).backward()
            before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
            optimizer.step()
            after = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            assert all(map(torch.equal, before, after))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
        gradients.append(before)
    assert torch.equal(*ends) and len(gradients[0]) == 4
