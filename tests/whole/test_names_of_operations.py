"""Arguments, parameters, buffers and submodules that are named as operations of torch are none of them."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.graphs import operations

PLAIN = nn.Module()
KINDS = ("parameter", "buffer", "submodule")


def legal(name: str) -> bool:
    """Whether it is a name of an argument, and torch takes it for a parameter: it refuses `float` and `half`."""
    return name.isidentifier() and not keyword.iskeyword(name) and not hasattr(PLAIN, name)


TABLES = [table for table in vars(operations).values() if isinstance(table, (set, frozenset))]
KNOWN = sorted(filter(legal, set().union(*TABLES, operations.SPELLED_OUT)))
OF_MODULES = ["float", "half", "type", "to", "double", "bfloat16"]  # names of casts, as arguments only
EVERY = sorted(n for n in {*dir(torch), *dir(Tensor)} if legal(n) and "__" not in n and hasattr(torch.ops.aten, n))


class Named(nn.Module):
    """Every argument meets the parameter, the buffer or the batch norm of its name."""

    def __init__(self, kind: str, names: Sequence[str]) -> None:
        super().__init__()
        self.head, self.kind, self.names_of_kind = nn.Linear(2, 1), kind, names
        for name in names:
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.rand(2)))
            elif kind == "buffer":
                self.register_buffer(name, torch.rand(2))
            else:
                self.add_module(name, nn.BatchNorm1d(2))

    def computed(self, x: Tensor, *arguments: Tensor) -> Tensor:
        for argument, name in zip(arguments, self.names_of_kind, strict=False):
            inside = getattr(self, name)
            x = inside(x + argument) if self.kind == "submodule" else (x + argument) * inside
        return self.head(x + sum(arguments[len(self.names_of_kind) :]))  # type: ignore[no-any-return]


def model_with(kind: str, names: Sequence[str], more: Sequence[str] = ()) -> nn.Module:
    """`Named`, whose forward has these names as arguments, and `more`."""
    space: dict[str, type[nn.Module]] = {"Named": Named}
    arguments = ", ".join(["x", *names, *more])
    exec(f"class Model(Named):\n  def forward(self, {arguments}):\n    return self.computed({arguments})\n", space)
    return space["Model"](kind, names)


def check(kind: str, names: Sequence[str], exported: bool, more: Sequence[str] = ()) -> None:
    model, inputs = model_with(kind, names, more), tuple(torch.randn(3, 2) for _ in range(1 + len(names) + len(more)))
    net = kfac_fx.compile(model, inputs if exported else None, loss="mse", strict=True)
    net.recorder(inputs, {})  # proves the registrations
    report = net.report
    scales = {"parameter": ["scale_and_shift"], "buffer": [], "submodule": ["batch_norm"]}[kind]
    assert sorted(row.layer for row in report.rows) == sorted([*scales * len(names), "linear"])
    assert report.elements["structured"] == sum(parameter.numel() for parameter in model.parameters())
    assert report.to_dict()["casts"] == [] and str(report)
    assert "<table" in report.to_html() and "digraph" in report.to_dot()


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_operations_are_names_of_anything(kind: str) -> None:
    assert {"t", "view", "detach", "permute", "alias", "mT", "squeeze"} <= {*KNOWN}
    for start in range(0, len(KNOWN), 50):
        check(kind, KNOWN[start : start + 50], exported=False, more=OF_MODULES)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_in_an_exported_graph_too(kind: str) -> None:
    names = sorted(filter(legal, operations.VIEWS | operations.PARTS | {"detach", "item", "dropout", "linear"}))
    check(kind, names, exported=True, more=OF_MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("exported", [False, True], ids=["fx", "export"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_an_operation(kind: str, exported: bool) -> None:
    for start in range(0, len(EVERY), 100):
        check(kind, EVERY[start : start + 100], exported)
