"""Mixtures of experts: every expert is a group with rows of its own, whoever multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.cases import with_row_mask
from kfac_fx.passes.layers.linear import by_expert, grouped_product, route, routed

X = torch.randn(7, 8)
OFFSETS = torch.tensor([3, 3, 6], dtype=torch.int32)


class Mixture(nn.Module):
    """Sorted by expert as forward sees fit, and multiplied by an operation of torch's or by ours."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel
        self.router, self.weight = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        expert, order = self.router(x).argmax(-1).sort()
        offsets = torch.cumsum(torch.histc(expert.float(), 3, 0, 2), 0, dtype=torch.int32)
        product: Tensor = self.kernel(x[order], self.weight.mT, offs=offsets)
        return product.tanh() * self.router(x)[order].amax(-1, keepdim=True)


def ours(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    product: Tensor = torch.ops.kfac_fx.grouped_mm(x, weight, offs)
    return product


def test_rows_are_in_the_group_before_whose_offset_they_are() -> None:
    assert routed(X, OFFSETS)[:, 0].int().tolist() == [[1, 0, 0]] * 3 + [[0, 0, 1]] * 3 + [[0, 0, 0]]
    rows = by_expert(X, {"offsets": OFFSETS})
    assert torch.equal(rows[0, 0], torch.stack([X[0], 0 * X[0], 0 * X[0]])) and not rows[6].any()


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(ours, torch.float32), (torch.nn.functional.grouped_mm, torch.bfloat16)]
)  # torch's own is captured in no other type
def test_experts_are_groups_of_one_layer(kernel: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Mixture(kernel).to(dtype), (X.to(dtype),), loss="normal")
    (one,) = [registration for registration in net.registrations if registration.parameters == ("weight",)]
    assert one.layer == "experts" and one.matrix is not None and one.matrix.shape == (3, 8, 8), net.report


def test_the_mean_input_of_an_expert_is_over_its_own_rows() -> None:
    torch.manual_seed(0)
    model = Mixture(ours)
    net = kfac_fx.compile(model, (X,), loss="normal")
    found = net.record((X,), {}).statistics["weight",]
    expert = model.router(X).argmax(-1)
    shares = torch.bincount(expert, minlength=3)
    assert float(found["count"]) == len(X) and len(shares.unique()) > 1
    for group, share in enumerate(shares):
        own = X[expert == group]
        torch.testing.assert_close(found["A"][group] / found["count"], own.mT @ own / max(int(share), 1))


@pytest.mark.parametrize(("more", "target"), [((), grouped_product), ((None, torch.float32), None)])
def test_only_plain_products_are_respelled(more: tuple[Any, ...], target: Any) -> None:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("x", "weight", "offs")]
    node = graph.call_function(torch.ops.aten._grouped_mm.default, (*operands, *more))
    graph.output(node)
    route(graph)
    graph.lint()
    assert node.target is (target or torch.ops.aten._grouped_mm.default)
    assert [user.target for user in node.users] == ([with_row_mask] if target else ["output"])
