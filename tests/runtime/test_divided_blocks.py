"""Diagonal blocks that are divided as their parameters are (`DividedGroup`). tests/whole/test_fsdp.py trains
with them, on several processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.fisher.placement import DividedGroup, divided_forms
from kfac_fx.linalg.processes import ShardLayout, Shards, unsharded
from kfac_fx.passes.matrix import Layout

pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
X, Y = torch.randn(6, 5), torch.randint(2, (6,))


@pytest.fixture
def trained() -> Iterator[Callable[..., kfac_fx.KFAC]]:
    """Makes an optimizer of a sharded model that has taken a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def optimizer(last: str = "kron", **options: Any) -> kfac_fx.KFAC:
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        net = kfac_fx.compile(model, (X,), loss="categorical", approximations={"0": "diagonal", "2": last})
        fully_shard(net.model, mesh=init_device_mesh("cpu", (1,)))
        opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, placement="owners", **options)
        F.cross_entropy(net(X), Y).backward()
        opt.step()
        return opt

    yield optimizer
    dist.destroy_process_group()


def test_diagonal_blocks_are_divided_and_others_have_an_owner(trained: Callable[..., kfac_fx.KFAC]) -> None:
    first, last = trained().estimator.blocks.values()
    assert isinstance(first.group, DividedGroup) and first.group.owner is None
    assert not isinstance(last.group, DividedGroup) and last.group.owner == 0


LAYOUTS = {  # of parameters with 6 rows along dimension 0: the dimension of the result in which 2 of them are
    "scale": (Layout((6,)).reshape((6, 1, 1)), 0),
    "bias": (Layout((6,)).reshape((1, 6)), 1),
    "linear": (Layout((6, 5)).reshape((1, 6, 5)), 1),
    "convolution": (Layout((6, 3, 2, 2)).rearrange("(g o) c h w -> g o (c h w)", g=1), 1),
    "table": (Layout((6, 5)).permute((1, 0)).reshape((1, 5, 6)), 2),
    "grouped convolution": (Layout((6, 3, 2, 2)).rearrange("(g o) c h w -> g o (c h w)", g=2), None),
    "heads that are merged": (Layout((6, 5, 3)).reshape((1, 30, 3)), None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_parameter_are_rows_of_its_matrix_where_no_step_mixes_them(name: str) -> None:
    layout, dim = LAYOUTS[name]
    cut = layout.cut(0, 2)
    assert (None if cut is None else cut[1]) == dim
    if cut is None:
        return
    whole = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    for start in (0, 2, 4):
        rows = whole[start : start + 2]
        assert torch.equal(cut[0].apply(rows), layout.apply(whole).narrow(cut[1], start, 2))
        assert torch.equal(cut[0].invert(cut[0].apply(rows)), rows)
    empty = layout.cut(0, 0)
    assert empty is not None and empty[0].apply(whole[:0]).numel() == 0


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.zeros(4))
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 6)
        self.steps = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(x @ self.weight + self.shift))
        return self.last(y)[:, :6] + torch.cumsum(self.steps, 0)


def test_blocks_whose_matrix_is_divided_otherwise_have_an_owner(trained: Callable[..., kfac_fx.KFAC]) -> None:
    """The rows of a transposed weight are inputs, and those of its bias outputs."""
    approximations = {"linear": "diagonal", "norm": "diagonal", "last": "kron_both_diag", "steps": "generic"}
    net = kfac_fx.compile(Mixed(), (X,), loss="categorical", approximations=approximations)
    assert all(registration.structure.diagonal for registration in net.registrations)
    layouts = {name: ShardLayout(p.shape, 0, 1, dist.group.WORLD) for name, p in net.named_parameters()}
    assert list(divided_forms(net.registrations, Shards(layouts))) == [("norm.weight", "norm.bias")]
    del layouts["norm.bias"]  # which is frozen
    assert divided_forms(net.registrations, Shards(layouts)) == {}
    assert divided_forms(net.registrations, None) == {}


def test_diagonal_blocks_that_are_not_divided_are_reported(trained: Callable[..., kfac_fx.KFAC]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = nn.Linear(5, 8), nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 2)
    net = kfac_fx.compile(nn.Sequential(*layers), (X,), loss="categorical", approximations={"2": "diagonal"})
    fully_shard(net.model, mesh=init_device_mesh("cpu", (1,)))
    (reason,) = kfac_fx.KFAC(net, lr=0.1, damping=0.1, placement="owners").fallbacks()
    assert reason.startswith("gradients of these diagonal blocks travel to an owner")
    assert reason.endswith("conv1d(2.weight, 2.bias)")


def test_a_part_is_not_given_for_the_whole_block(trained: Callable[..., kfac_fx.KFAC]) -> None:
    opt = trained(last="diagonal", momentum_type="regular")
    block = opt.estimator.blocks["0.weight", "0.bias"]
    vector = block.group.forms[0].unpack(torch.ones(block.group.shape))
    words = re.escape("the diagonal of linear(0.weight, 0.bias) is divided as its parameters are, ")
    for read in (block.full_fisher_block, lambda: block.multiply_inverse(vector), opt.estimator.spectrum):
        with pytest.raises(kfac_fx.NotRegisteredError, match=f"^{words}.* placement='replicated'.* FisherEstimator"):
            read()


def test_metrics_leave_the_condition_of_parts_out(trained: Callable[..., kfac_fx.KFAC]) -> None:
    """Another process may have none, or other extremes."""
    opt = trained(momentum_type="regular")
    metrics = kfac_fx.Metrics(opt, every=1, condition="each")
    F.cross_entropy(opt.net(X), Y).backward()
    opt.step()
    names = {name for name in metrics.values if name.startswith("condition/2") or name.startswith("condition/0")}
    assert names == {"condition/2.weight,2.bias/A", "condition/2.weight,2.bias/G"}


def test_the_state_is_sharded_and_whole_blocks_read_it(trained: Callable[..., kfac_fx.KFAC]) -> None:
    opt = trained(momentum_type="regular")
    name = "0.weight,0.bias/F/-1.0"
    state = opt.estimator.state_dict()
    kinds = {entry: type(tensor).__name__ for entry, tensor in state.items() if entry.startswith("0.weight")}
    assert {entry for entry, kind in kinds.items() if kind == "DTensor"} == {name, "0.weight,0.bias/F/moment"}
    assert state[name].shape == (1, 4, 6)
    whole = kfac_fx.FisherEstimator(opt.net)
    wholes = {entry: unsharded(tensor) for entry, tensor in state.items()}
    whole.load_state_dict(wholes)
    assert torch.equal(whole.state_dict()[name], wholes[name]) and wholes[name].any()
