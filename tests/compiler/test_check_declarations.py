"""The user's declarations against the model; what does not fit is an error that names all of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from kfac_fx import ApproximationError, LinkError
from kfac_fx.passes.check import link
from kfac_fx.passes.ir import Program
from tests.compiler.toy import before


def linked(**options: Any) -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[0].bias.requires_grad_(False)
    return link(before("link", model, **options))


def test_linked_names_become_canonical() -> None:
    program = linked(linked={frozenset({"2.weight", "2.bias"}): "diagonal"})
    assert program.options.linked == {frozenset({"1.weight", "2.bias"}): "diagonal"}


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(LinkError) as failure:
        linked(linked={frozenset({"1.weigth"}): None})
    assert str(failure.value) == (
        "linked parameter '1.weigth' is not a parameter of the model. Did you mean '1.weight'?"
    )


def test_all_unknown_names_come_at_once() -> None:
    with pytest.raises(LinkError) as failure:
        linked(linked={frozenset({"1.weigth", "0.bias"}): None, frozenset({"nonsense", "1.bias"}): None})
    assert str(failure.value).splitlines() == [
        "3 linked parameters are no trainable parameters of the model:",
        "  '0.bias'    is frozen: its requires_grad is False.",
        "  '1.weigth'  is not a parameter of the model. Did you mean '1.weight'?",
        "  'nonsense'  is not a parameter of the model.",
    ]


def test_a_parameter_is_linked_once() -> None:
    groups = [{"1.weight", "1.bias"}, {"2.weight", "2.bias"}]  # one weight under two names
    with pytest.raises(LinkError) as failure:
        linked(linked={frozenset(group): None for group in groups})
    assert str(failure.value).splitlines() == [
        "parameters linked in more than one group:",
        "  1.weight  (1.bias, 1.weight) and (1.weight, 2.bias)",
        "Join the groups, or take the name out of one.",
    ]


def test_approximations_must_exist_and_name_something() -> None:
    with pytest.raises(ApproximationError) as failure:
        linked(
            approximations={"1": "kro", "2.wieght": "kron", nn.Conv2d: "kron", "block.*": "full", "linear": "kron"},
            linked={frozenset({"1.weight"}): "blob"},
        )
    assert str(failure.value).splitlines() == [
        "approximations that cannot be honored:",
        "  1         'kro' is no approximation. Did you mean 'kron'?",
        "  2.wieght  names no parameter, module or layer of the model. Did you mean '2.weight'?",
        "  Conv2d    names no parameter, module or layer of the model. Did you mean 'conv2d'?",
        "  block.*   names no parameter, module or layer of the model.",
        "  1.weight  'blob' is no approximation.",
        "Approximations are kron, kron_in_diag, kron_out_diag, kron_both_diag, kron_indep, diagonal, full, "
        "kron_series_1, kron_series_1_abs, kron_series_2, kron_sua, kron_sua_zero_mean, kron_sua_centered, "
        "kron_reduce, generic.",
    ]


@pytest.mark.parametrize("key", ["1.weight", "2.weight", "1", "*.bias", "linear", "generic", nn.Linear, nn.Module])
def test_what_a_key_may_name(key: Any) -> None:
    linked(approximations={key: "diagonal"})
