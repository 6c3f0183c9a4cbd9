"""The modules and parameters of a model, looked at again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx import ModelChangedError
from kfac_fx.recording.model_checks import Structure


def test_what_stays_is_no_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    structure = Structure(model, lambda: None)
    model.double().eval().requires_grad_(False)
    model[1].reset_running_stats()
    structure.check()


def test_every_name_that_changed_is_in_the_text() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    structure = Structure(model, lambda: None)
    model[1][0] = nn.Linear(2, 2, bias=False)
    model.add_module("new", nn.Tanh())
    with pytest.raises(ModelChangedError) as failure:
        structure.check()
    assert str(failure.value).splitlines() == [
        "3 parameters or modules were replaced, added or removed after kfac_fx.compile: "
        "'1.0.weight', '1.0.bias', 'new'.",
        "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
        "parameter.data.copy_(...) or load_state_dict without assign=True, which replaces parameters.",
    ]


def test_assigned_parameters_are_told_and_a_long_list_is_cut() -> None:
    """The text had all names, and advised to call load_state_dict, as the user had."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    structure = Structure(model, lambda: None)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    with pytest.raises(ModelChangedError, match=r"^10 .*: '0\.weight', .*, '2\.bias' and 4 more\.\n.* without assign="):
        structure.check()


def test_only_parameters_that_were_swapped_for_shards_are_emptied() -> None:
    model = nn.Linear(2, 2)
    structure, before, bias = Structure(model, lambda: None), model.weight, model.bias.detach().clone()
    before.grad = torch.ones(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2))
    structure.follow_shards()
    assert before.isnan().all() and before.grad is None and before.shape == (2, 2)
    assert model.weight.eq(1).all() and torch.equal(model.bias, bias)
    structure.check()


class Adapter(nn.Module):
    """A frozen layer with a trained term of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 1, bias=False)
        self.up = nn.Linear(1, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def with_head(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model[2] = nn.Linear(5, 3)


def with_adapter(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model[0] = Adapter(model[0])  # type: ignore[arg-type]


def compiled() -> tuple[nn.Sequential, kfac_fx.CompiledModule, torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)
    return model, kfac_fx.compile(model, (x,), loss="normal"), x


CHANGES = pytest.mark.parametrize("change", [with_head, with_adapter])


@CHANGES
@pytest.mark.parametrize("steps", [0, 2])
def test_a_new_module_next_to_frozen_ones_is_told_in_the_next_forward(
    change: Callable[[nn.Sequential], None], steps: int
) -> None:
    model, net, x = compiled()
    opt = kfac_fx.KFAC(net)
    for _ in range(steps):
        opt.zero_grad()
        net(x).square().sum(1).mean().backward()
        opt.step()
    change(model)
    with pytest.raises(ModelChangedError, match=r"were replaced, added or removed after kfac_fx\.compile"):
        net(x)


@CHANGES
def test_a_new_module_between_compile_and_kfac_is_told_there(change: Callable[[nn.Sequential], None]) -> None:
    model, net, _ = compiled()
    change(model)
    with pytest.raises(ModelChangedError, match=r"were replaced, added or removed after kfac_fx\.compile"):
        kfac_fx.KFAC(net)


def test_a_frozen_model_without_new_parameters_runs() -> None:
    model, net, x = compiled()
    kfac_fx.KFAC(net)
    model.requires_grad_(False)
    assert torch.equal(net(x), model(x))
