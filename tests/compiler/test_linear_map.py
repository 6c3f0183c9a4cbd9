"""Tables that are interpolated on the way: the matrix that does it, and what of them is no such matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx.passes.parametrizations import functions, tables
from kfac_fx.passes.parametrizations.tables import by_entry, matrix_of, of_parameter
from tests.compiler.toy import Toy

Function = Callable[[Tensor], Tensor]


def positions(table: Tensor) -> Tensor:
    grid = table[:, 1:].reshape(1, 3, 3, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(4, 2), mode="bicubic", antialias=True)
    return torch.cat([table[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


TABLES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "positions behind a token's": (positions, (1, 10, 2)),
    "more columns than entries": (positions, (1, 10, 11)),
    "channels first": (lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"), (1, 5, 2, 3)),
    "columns in front": (lambda t: F.interpolate(t[None], size=3, mode="linear")[0].t(), (4, 5)),
    "nearest": (lambda t: F.interpolate(t.t()[None], size=3)[0], (5, 4)),
    "pooled": (lambda t: F.adaptive_avg_pool2d(t.movedim(-1, 0), (2, 2)).movedim(0, -1), (5, 5, 3)),
}


@pytest.mark.parametrize(("function", "shape"), TABLES.values(), ids=TABLES.keys())
def test_a_table_is_a_matrix_times_its_parameter(function: Function, shape: tuple[int, ...]) -> None:
    """And gradients of cases go back through it as autograd sends them."""
    torch.manual_seed(0)
    found = matrix_of(function, shape, torch.float64)
    assert found is not None
    columns, matrix = found
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    made = function(table)
    assert (columns.shape, columns.whole) == (tuple(made.shape), shape)
    torch.testing.assert_close(by_entry(made, columns.dim), matrix @ by_entry(table, columns.column))
    gradients = torch.randn(3, *made.shape, dtype=torch.float64)
    rows, grad_rows = of_parameter(torch.empty(3, 1, made.numel(), 0), gradients.view(3, 1, -1, 1), matrix, columns)
    wanted = [torch.autograd.grad(made, table, gradient, retain_graph=True)[0] for gradient in gradients]
    torch.testing.assert_close(grad_rows, torch.stack(wanted).view(3, 1, -1, 1))
    assert list(rows.shape) == [3, 1, table.numel(), 0]


def test_no_matrix_for_columns_that_are_not_treated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_of(lambda t: t.flip(0, 1), (3, 4), torch.float32) is None
    assert matrix_of(lambda t: t.flip(0), (3, 4), torch.float32) is not None
    monkeypatch.setattr(tables, "LARGEST_MATRIX", 8)
    assert matrix_of(lambda t: t.flip(0), (3, 4), torch.float32) is None


def halved(table: Tensor) -> Tensor:
    return F.interpolate(table.t().unsqueeze(0), size=2, mode="linear")[0].t()


GENERIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a size of the batch": lambda x, w: x + F.interpolate(w.t()[None], size=x.shape[1], mode="linear")[0].t(),
    "a function on the way": lambda x, w: x + halved(w.exp()).repeat(3, 1),
    "a function behind": lambda x, w: x + halved(w).repeat(3, 1).exp(),
    "two parameters": lambda x, w: x + halved(torch.cat([w, x.new_ones(1, 4)])).repeat(3, 1),
}


@pytest.mark.parametrize("function", GENERIC.values(), ids=GENERIC.keys())
def test_what_is_more_than_a_constant_matrix_is_generic(
    function: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)  # as of a parameter that is not small
    net = kfac_fx.compile(Toy(function, w=(5, 4)), (torch.randn(3, 6, 4),), loss="normal")
    (one,) = net.registrations
    assert one.generic and "no layer has the form of" in str(one.reason)


@pytest.mark.parametrize("inputs", [None, (torch.randn(3, 2, 4),)], ids=["symbolic", "exported"])
def test_the_matrix_is_no_buffer_of_the_model(inputs: tuple[Tensor, ...] | None) -> None:
    model = Toy(lambda x, w: x + halved(w), w=(5, 4))
    net = kfac_fx.compile(model, inputs, loss="normal")
    net.train()(torch.randn(3, 2, 4))
    assert [registration.generic for registration in net.registrations] == [False]
    assert not list(model.buffers()) and not list(net.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_table_that_is_made_once_and_used_twice_has_two_uses(dtype: torch.dtype) -> None:
    model = Toy(lambda x, w: (x + halved(w)).tanh() + halved(w)[[0, 0]], w=(5, 4)).to(dtype)
    x = torch.randn(3, 2, 4, dtype=dtype)
    net = kfac_fx.compile(model, (x,), loss="normal")
    assert [(registration.layer, len(registration.uses)) for registration in net.registrations] == [
        ("scale_and_shift", 2)
    ]
    assert all(value.isfinite().all() for value in net.record((x,), {}).statistics["w",].values())
