"""Rows against autograd: what is right stays, what is wrong becomes generic with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import RegistrationError
from kfac_fx.passes.ir import Options
from kfac_fx.passes.layers import LAYERS, Layer, as_rows, layer
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.proof import Verdict, prove
from kfac_fx.recording.recorder import Recorder
from tests.tables import pairs

X = torch.randn(5, 3)


def proved(model: nn.Module, *inputs: Tensor, layers: tuple[Layer, ...] = (), **options: Any) -> Verdict:
    inputs = inputs or (X,)
    declared = {layer.name: layer for layer in layers} or LAYERS
    traced = trace_model(model, inputs, options=Options(loss_given=True, **options), layers=declared)
    return prove(Recorder(EmittedGraph(traced, run(traced.program), model)), inputs, {})


def wrong(
    rows: Callable[..., Tensor] = as_rows, grad_rows: Callable[..., Tensor] = as_rows, second_moment: Any = None
) -> Layer:
    """A linear layer whose rows are not what they should be."""

    @layer(rows=rows, grad_rows=grad_rows, second_moment=second_moment, example=lambda: (nn.Linear(3, 2), X))
    def linear(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ r rᵀ and Σ r of the rows of a linear layer."""
    return (x.T @ x).unsqueeze(0), x.sum(0).unsqueeze(0)


def test_a_right_second_moment_stays() -> None:
    verdict = proved(nn.Linear(3, 2), layers=(wrong(second_moment=lambda x, attrs: moments(x)),))
    assert verdict.failed == {}


def test_what_is_right_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    verdict = proved(model)
    assert verdict.failed == {} and verdict.conclusive
    assert [registration.layer for registration in verdict.program.registrations] == ["linear", "layer_norm", "linear"]


def raises(x: Tensor, attrs: Any) -> Tensor:
    raise IndexError("no such axis\nsecond line")


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (
            wrong(rows=lambda x, attrs: 2 * as_rows(x, attrs)),
            r"the proof failed: rows give another gradient than autograd",
        ),
        (wrong(grad_rows=lambda x, attrs: as_rows(x, attrs).flip(-1)), r"rows give another .* \(\d+% apart\)"),
        (wrong(rows=raises), "its rows could not be made: no such axis$"),
        (
            wrong(rows=lambda x, attrs: as_rows(x, attrs) * attrs["wieght"]),
            r"its rows could not be made: they read an attribute 'wieght' that the form has not: it has weight, bias\. "
            r"Did you mean 'weight'\?$",
        ),
        (
            wrong(second_moment=lambda x, attrs: moments(x * attrs["degree"])),
            r"they read an attribute 'degree' that the form has not: it has weight, bias\.$",
        ),
        (wrong(grad_rows=lambda x, attrs: {"a": x}["weight"]), r"made: they read a mapping without 'weight'$"),
        (wrong(grad_rows=lambda x, attrs: x.no_such), r"made: 'Tensor' object has no attribute 'no_such'$"),
        (
            wrong(rows=lambda x, attrs: x),
            r"its rows could not be made: rows of shape \[5, 3\], wanted \[N, S, i\] = \[5, 1, 3\]",
        ),
        (
            wrong(grad_rows=lambda x, attrs: as_rows(x, attrs)[..., :1]),
            r"its rows could not be made: gradient rows of shape \[5, 1, 1\], wanted \[N, S, 2\]",
        ),
        (wrong(rows=lambda x, attrs: 3), "its rows could not be made: rows are a int, not a tensor"),  # type: ignore[arg-type,return-value]
        (wrong(second_moment=lambda x, attrs: moments(0 * x)), r"second_moment is not that of its rows \(\d+% apart\)"),
        (wrong(second_moment=lambda x, attrs: moments(2 * x)), r"second_moment is not that of its rows \(\d+% apart\)"),
        (
            wrong(second_moment=lambda x, attrs: moments(x[:, :2])),
            r"its second_moment has the shape \[1, 3, 3\], and that of its rows \[1, 4, 4\]",
        ),
    ],
)
def test_what_is_wrong_becomes_generic_with_its_reason(declared: Layer, reason: str) -> None:
    verdict = proved(nn.Linear(3, 2), layers=(declared,))
    assert list(verdict.failed) == [("weight", "bias")]
    (text,) = verdict.failed.values()
    assert re.search(reason, text)
    generic = verdict.program.registrations
    assert [(registration.layer, registration.parameters, registration.approximation) for registration in generic] == [
        ("generic", ("weight",), "diagonal"), ("generic", ("bias",), "diagonal"),
    ]  # fmt: skip
    assert {registration.reason for registration in generic} == {f"linear: {text}"}


def test_a_layer_of_the_user_that_fails_the_proof_warns() -> None:
    declared = replace(wrong(rows=lambda x, attrs: 2 * as_rows(x, attrs)), name="doubled")
    text = (
        r"^these parameters have no block of a layer of layers=\[\.\.\.\], but a diagonal one each:\n"
        r"  weight, bias  doubled: the proof failed: rows give another gradient than autograd \(\d+% apart\)\n"
        r"Correct the rows and grad_rows of its declaration\. strict=True makes this an error\.$"
    )
    with pytest.warns(UserWarning, match=text):
        kfac_fx.compile(nn.Linear(3, 2), (torch.randn(5, 3),), loss="categorical", layers=[declared])


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_called_unused_must_have_no_gradient(strict: bool) -> None:
    """A third count of uses, by autograd: it does not know the graph that the others read."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.power, self.idle = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.atan2(self.fc(x), self.power)
            return y

    model = Scaled()
    traced = trace_model(model, (X,), options=Options(loss_given=True), layers=LAYERS)
    program = run(traced.program)
    assert program.unused == ("idle",)
    missing = program.but(
        registrations=tuple(registration for registration in program.registrations if not registration.generic),
        unused=("power", "idle"),
        options=Options(loss_given=True, strict=strict),
    )
    recorder = Recorder(EmittedGraph(traced, missing, model))
    if strict:
        with pytest.raises(RegistrationError, match="power *a gradient reaches it, and no use of it was found"):
            prove(recorder, (X,), {})
        return
    verdict = prove(recorder, (X,), {})
    assert verdict.program.unused == ("idle",)
    assert [(registration.parameters, registration.generic) for registration in verdict.program.registrations] == [
        (("fc.weight", "fc.bias"), False),
        (("power",), True),
    ]
    assert verdict.failed["power",] == "a gradient reaches it, and no use of it was found; please report the model"


def test_under_strict_every_failure_is_in_one_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(RegistrationError) as failure:
        proved(model, layers=(wrong(rows=raises),), strict=True)
    assert str(failure.value).splitlines() == [
        "2 registrations failed the proof:",
        "  0.weight, 0.bias  its rows could not be made: no such axis",
        "  1.weight, 1.bias  its rows could not be made: no such axis",
        "Correct the layers' declarations, or let these parameters be generic with compile(..., strict=False).",
    ]


def test_a_gradient_that_cancels_to_nothing_is_no_failure() -> None:
    """A bias in front of a norm has a gradient of rounding errors alone."""
    assert proved(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).failed == {}


def test_rows_against_a_gradient_of_zero() -> None:
    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.inner(x)

    assert proved(Zero()).failed == {}


def test_a_batch_that_is_not_finite_proves_nothing() -> None:
    model = nn.Linear(3, 2)
    verdict = proved(model, torch.full((5, 3), torch.inf), layers=(wrong(rows=raises),))
    assert not verdict.conclusive and verdict.failed == {}


def test_a_batch_without_cases_proves_nothing() -> None:
    assert proved(nn.Linear(3, 2)).conclusive and not proved(nn.Linear(3, 2), torch.zeros(0, 3)).conclusive


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_proof_allows_for_the_dtypes_rounding(dtype: torch.dtype) -> None:
    assert proved(nn.Linear(3, 2).to(dtype), X.to(dtype)).failed == {}


def test_cases_that_turn_out_merged_are_told_apart_from_cases() -> None:
    """Known only when it runs: the graph was traced without sizes."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.reshape(-1, 3)).view(x.shape)

    model = Merged()
    traced = trace_model(model, layers=LAYERS, options=Options(loss_given=True))
    program = run(traced.program)
    assert program.registrations[0].approximation == "full"
    (one,) = prove(Recorder(EmittedGraph(traced, program, model)), (torch.randn(5, 4, 3),), {}).program.registrations
    assert (one.layer, one.approximation) == ("layer_norm", "kron")
    assert one.reason == "forward merges its cases with positions, as x.flatten(0, 1) does, so not 'full'"


def test_cases_of_inputs_of_different_lengths_are_told_apart_from_merged_ones() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            return self.norm(first), self.norm(second)

    model = Twins()
    traced = trace_model(model, layers=LAYERS, options=Options(loss_given=True))
    recorder = Recorder(EmittedGraph(traced, run(traced.program), model))
    (one,) = prove(recorder, (torch.randn(5, 3), torch.randn(4, 3)), {}).program.registrations
    assert one.approximation == "kron"
    assert one.reason is not None and one.reason.startswith("it is used on another input")


def test_what_nothing_trains_is_proved() -> None:
    assert proved(nn.Linear(3, 2).requires_grad_(False)).program.registrations == ()


def test_a_head_that_starts_at_zero_hides_nothing() -> None:
    """All gradients in front of it are zero, in rows and in autograd alike."""
    declared = wrong(rows=lambda x, attrs: 2 * as_rows(x, attrs))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    nn.init.zeros_(model[2].weight)
    assert list(proved(model, layers=(declared,)).failed) == [("0.weight", "0.bias"), ("2.weight",)]
    assert not model[2].weight.any()


class Tied(nn.Module):
    """An autoencoder with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() @ self.first.weight


class Contrast(Tied):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y @ y.mT


class AllButTheFirst(Tied):
    """The first case is on its own; the others are centered."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return torch.cat([y[:1], y[1:] - y[1:].mean(0)])


class InRows(nn.Module):
    """Outputs with two rows for every example, which are centered over the batch or not."""

    def __init__(self, interleaved: bool, centered: bool) -> None:
        super().__init__()
        self.first, self.interleaved, self.centered = nn.Linear(4, 6), interleaved, centered

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).unflatten(1, (2, 3))
        y = y - y.mean(0) if self.centered else y
        return (y.movedim(1, 0) if self.interleaved else y).flatten(0, 1)


class Pooled(Tied):
    """Two examples make one row of the output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).unflatten(0, (-1, 2)).sum(1)  # type: ignore[no-any-return]


MEETING: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "in a norm of the batch": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "0.weight", "2.weight"
    ),
    "in a norm of every case": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), "", "0.weight"
    ),
    "in a contrast": (Contrast, "first.weight", ""),
    "all but the first": (AllButTheFirst, "first.weight", ""),
    "in rows side by side": (lambda: InRows(interleaved=False, centered=True), "first.weight", ""),
    "in rows by position": (lambda: InRows(interleaved=True, centered=True), "first.weight", ""),
    "in rows of no others": (lambda: InRows(interleaved=False, centered=False), "", "first.weight"),
    "in rows of no others by position": (lambda: InRows(interleaved=True, centered=False), "", "first.weight"),
    "in a sum of two": (Pooled, "first.weight", ""),
    "nowhere, with a weight turned round": (Tied, "", "first.weight"),
}  # fmt: skip


@pairs(("approximation", ["full", "diagonal", None]), ("build, meeting, apart", MEETING))
def test_cases_that_meet_are_told_where_blocks_of_their_gradients_were_asked_for(
    build: Callable[[], nn.Module], meeting: str, apart: str, approximation: str | None
) -> None:
    asked = {} if approximation is None else {"*": approximation}
    net = kfac_fx.compile(build(), (torch.randn(6, 4),), loss="normal", approximations=asked)
    reasons = {name: registration.reason for registration in net.registrations for name in registration.owners}
    said = (
        f"cases meet between it and the outputs, so {approximation!r} leaves out products of two cases, except in the "
        "exact modes"
    )
    if meeting:
        assert reasons[meeting] == (said if asked else None)
    if apart:
        assert reasons[apart] != said
