"""The collecting tap: rows go to its sink, once for every backward that asks for them."""

from __future__ import annotations

import torch
from torch import nn

import kfac_fx
from kfac_fx.recording.statistics import Rows
from kfac_fx.recording.taps import CALLS, ROWS, CollectingTap, TappedCall


def collecting() -> tuple[nn.Module, CollectingTap]:
    model = nn.Linear(3, 2)
    net = kfac_fx.compile(model, (torch.randn(4, 3),), loss="normal")
    recorder = net.case_recorder(net.recorder((torch.randn(4, 3),), {})).recorder
    ((tap,),) = recorder.emitted.taps.values()
    assert isinstance(tap, CollectingTap)
    return model, tap


def test_rows_and_gradient_rows_make_the_gradient() -> None:
    model, tap = collecting()
    seen: list[Rows] = []
    tap.sink = seen.append
    x, probe = torch.randn(4, 3), torch.zeros((), requires_grad=True)
    output = model(x)
    tapped = tap(output, x, {ROWS: probe})
    assert torch.equal(tapped, output)
    loss = tapped.square().sum()
    (nothing,) = torch.autograd.grad(loss, [probe], retain_graph=True)
    assert nothing == 0 and len(seen) == 1
    (rows,) = seen
    (expected,) = torch.autograd.grad(loss, [model.get_parameter("weight")])
    torch.testing.assert_close(torch.einsum("nsgo,nsgi->oi", rows.d, rows.x), expected)
    assert not rows.x.requires_grad


def test_without_a_sink_or_a_probe_nothing_is_made() -> None:
    model, tap = collecting()
    x, probe = torch.randn(4, 3), torch.zeros((), requires_grad=True)
    torch.autograd.grad(tap(model(x), x, {ROWS: probe}).sum(), [probe])
    output = model(x)
    assert tap(output, x, {}) is output


def test_calls_are_told_with_a_gradient_of_what_came_out_whether_the_layer_has_one_or_not() -> None:
    model, tap = collecting()
    x = torch.randn(4, 3)
    for output in (model(x), model(x).detach()):
        calls: list[TappedCall] = []
        tapped = tap(output, x, {CALLS: calls})
        (call,) = calls
        assert call.output is tapped and torch.equal(tapped, output)
        (gradient,) = torch.autograd.grad(tapped.square().sum(), [call.output])
        torch.testing.assert_close(call.rows(gradient).d.view(4, 2), 2 * output)
