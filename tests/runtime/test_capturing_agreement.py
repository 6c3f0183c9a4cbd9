"""Changes of a model after compile: those that are refused and those that are followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ModelChangedError, RegistrationError
from kfac_fx.passes.approximations import LONGEST
from kfac_fx.recording.captures import other_masks, other_path, shared, with_generic
from tests.runtime.compiled import X, mlp, net_of


def replaced_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(5, 4))


def replaced_module(model: Any) -> None:
    model[4] = nn.Linear(5, 3)


def added(model: Any) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(5)))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced_parameter, "1 parameter or module was .*: '0.weight'"),
        (replaced_module, "2 parameters or modules were .*: '4.weight', '4.bias'"),
        (added, "1 parameter or module was .*: '0.scale'"),
        (lambda model: model.__setitem__(3, nn.Tanh()), "1 parameter or module was .*: '3'"),
    ],
)
def test_a_changed_model_is_noticed_by_name(change: Callable[[nn.Module], None], names: str) -> None:
    net = net_of(mlp(), X)
    net(X)
    change(net.model)
    for call in (lambda: net(X), lambda: net.record((X,), {}), lambda: net.record_in_training((X,), {})):
        with pytest.raises(ModelChangedError, match=rf"{names}\.\n.*Compile again, or change values in place"):
            call()
    net.eval()(X)


def test_values_may_change_in_place() -> None:
    net = net_of(mlp(), X)
    net.model[0].weight.data.copy_(torch.zeros(5, 4))
    net.load_state_dict(mlp().state_dict())
    net(X)
    net.record((X,), {})


def test_what_is_frozen_after_compile_pauses() -> None:
    """See tests/whole/test_freezing.py."""
    net = net_of(mlp(), X)
    net.model[4].requires_grad_(False)
    moments = net.record((X,), {})
    assert ("4.weight", "4.bias") not in moments.statistics and moments.frozen == {"4.weight", "4.bias"}


@pytest.mark.parametrize("part", [0, 4])
def test_what_is_frozen_before_the_first_batch_pauses(part: int) -> None:
    net = kfac_fx.compile(mlp(), loss="normal")
    net.model[part].requires_grad_(False)
    net(X)
    assert (f"{part}.weight", f"{part}.bias") not in net.record((X,), {}).statistics


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, second: bool = False, exp: bool = False) -> Tensor:
        y = F.linear(x, self.first.weight.exp(), self.first.bias) if exp else self.first(x)
        return y + self.second(x) if second else y


def keys(net: Any) -> list[tuple[str, ...]]:
    return [registration.parameters for registration in net.registrations]


FIRST, SECOND = ("first.weight", "first.bias"), ("second.weight", "second.bias")


def test_the_registrations_are_the_union_of_those_of_all_paths_in_the_order_of_the_calls() -> None:
    net = net_of(Heads(), X)
    assert keys(net) == [FIRST] and net.captures.waiting == {*SECOND}
    before = net.registrations
    net.record((X,), {})
    assert net.registrations is before
    assert net.record((X,), {"second": True}).statistics.keys() == {FIRST, SECOND}
    assert keys(net) == [FIRST, SECOND] and net.captures.waiting == set()
    moments = net.record((X,), {})
    assert moments.statistics.keys() == moments.used == {FIRST}
    assert net.report.unused == () and [row.parameters for row in net.report.rows] == [FIRST, SECOND]


def test_parameters_that_paths_use_in_other_ways_have_a_diagonal_block_in_all_captures() -> None:
    model = Heads()
    net = net_of(model, X)
    net.record((X,), {"second": True, "exp": True})
    assert keys(net) == [("first.weight",), ("first.bias",), SECOND]
    reasons = {row.parameters: row.reason for row in net.report.rows}
    assert str(reasons[("first.bias",)]).startswith(
        "calls use it in ways that no block of a layer is right for: linear with 1 use, of first.weight and "
        "first.bias; linear with 1 use, of first.bias"
    )
    assert reasons[SECOND] is None
    for args, exp in (((X,), False), ((X,), True)):
        moments = net.record(args, {"exp": exp}, mode="empirical", targets=torch.arange(len(X)) % 3)
        gradients = torch.autograd.grad(
            F.cross_entropy(model(*args, exp=exp), torch.arange(len(X)) % 3, reduction="sum"),
            [*model.first.parameters()],
        )
        for name, gradient in zip(FIRST, gradients, strict=True):
            torch.testing.assert_close(moments.statistics[(name,)]["gradient"], gradient.flatten())


def test_the_reason_of_parameters_that_many_calls_use_in_other_ways_names_every_way_once() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, way: int) -> Tensor:
            return (x * self.scale, F.linear(x, self.scale[None]), x * self.scale, x.cumsum(1) @ self.scale)[way]

    net = kfac_fx.compile(Ways(), (X, 0), loss="normal")
    for way in (1, 2, 3, 0):
        net.record((X,), {"way": way})
    (row,) = net.report.rows
    assert row.generic and str(row.reason).count("calls use it") == 1
    assert str(row.reason).count("scale_and_shift with 1 use") == 1


def test_under_strict_such_parameters_are_an_error() -> None:
    net = kfac_fx.compile(Either(), (X,), loss="categorical", strict=True)
    with pytest.raises(RegistrationError) as failure:
        net.record((X,), {"scaled": True})
    first, row, advice = str(failure.value).splitlines()
    assert first == "calls of Either use parameters in ways that no block of a layer is right for together:"
    assert row.startswith("  vector  ") and "scale_and_shift with 1 use, of vector" in row
    assert advice.startswith("Compile with strict=False")
    assert keys(net) == [("vector",), ("head.weight", "head.bias")]


def test_what_shares_a_block_with_such_a_parameter_has_a_diagonal_block_too() -> None:
    union = {"a": "why"}
    blocks = [registered("a", "b"), registered("b", "c"), registered("d")]
    assert shared(shared(union, blocks), blocks) == {"a": "why", "b": "why", "c": "why"}


def test_the_number_of_uses_may_change() -> None:
    """One step of a recurrence, then three: the block is that of the first."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[:, 0])
            for row in x.unbind(1):
                h = torch.tanh(self.inner(h + row))
            return self.head(h)

    net = net_of(Recurrent(), torch.randn(6, 1, 4))
    assert [registration.approximation for registration in net.registrations] == ["kron", "kron"]
    moments = net.record((torch.randn(6, 3, 4),), {})
    assert moments.statistics[("inner.weight", "inner.bias")]["count"] == 18
    assert {
        registration.approximation for registration in net.recorder((torch.randn(6, 3, 4),), {}).program.registrations
    } == {"kron"}


def test_cases_that_are_merged_later_are_no_diagonal_of_cases() -> None:
    (one,) = net_of(nn.Sequential(nn.Linear(4, 3)), X, approximations={"0": "diagonal"}).registrations
    assert other_path(one, one) == ""
    assert other_path(one, replace(one, approximation="kron", reason="merged")) == (
        "linear with 1 use and diagonal at first, linear with 1 use (merged) here"
    )


def registered(*names: str, layer: str = "linear", approximation: str = "kron", reason: str | None = None) -> Any:
    """The registration of a linear layer, as its parts of a report are."""
    one = net_of(nn.Linear(4, 3), X).registrations[0]
    return replace(one, parameters=names, layer=layer, approximation=approximation, reason=reason)


def test_equal_registrations_make_equal_blocks() -> None:
    one = registered("w", "b")
    assert other_path(one, one) == "" and other_path(one, replace(one, reason="another")) == ""


def test_a_block_that_only_one_capture_has_is_described() -> None:
    assert other_path(registered("w"), None) == "linear with 1 use at first, no block of its own here"
    assert (
        other_path(None, registered("w", reason="why")) == "no block of its own at first, linear with 1 use (why) here"
    )


def test_another_layer_makes_another_block() -> None:
    assert other_path(registered("w"), registered("w", layer="conv2d")) == (
        "linear with 1 use at first, conv2d with 1 use here"
    )


def test_a_series_may_be_as_long_as_its_block_is_prepared_for() -> None:
    series = registered("w", approximation="kron_series_1")

    def of_steps(steps: int) -> Any:
        return replace(series, uses=tuple(replace(use, steps=steps) for use in series.uses))

    assert other_path(series, of_steps(LONGEST)) == ""
    with pytest.raises(ModelChangedError, match=f"^w: .*; kron_series_1 is prepared for {LONGEST} at most"):
        other_path(series, of_steps(LONGEST + 1))


class Either(nn.Module):
    """Its vector is a linear layer of one output, or a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scaled: bool = False) -> Tensor:
        return self.head(torch.tanh(x * self.vector if scaled else x + (x @ self.vector).unsqueeze(-1)))


def test_another_use_of_a_parameter_makes_its_block_diagonal_where_its_padding_mask_fits_as_before() -> None:
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    net = kfac_fx.compile(Either(), (x, mask), loss="categorical", padding_mask="mask")
    net.record((x, mask), {})
    net.record((x, mask), {"scaled": True})
    (row, _) = net.report.rows
    assert row.generic and "linear with 1 use, of vector; scale_and_shift with 1 use, of vector" in str(row.reason)


def test_a_first_mask_after_batches_without_one_is_no_other_use() -> None:
    x, mask = torch.randn(3, 5, 4), torch.arange(5) < torch.tensor([[5], [3], [1]])
    net = kfac_fx.compile(Either(), (x,), loss="categorical", padding_mask="mask")
    key = ("head.weight", "head.bias")
    counts = [net.record(args, {}).statistics[key]["count"] for args in ((x,), (x, mask))]
    assert counts == [15, 9]


def test_a_frozen_parameter_that_is_used_in_another_way_has_the_approximation_of_that_use() -> None:
    net = kfac_fx.compile(Either(), (X,), loss="categorical", approximations={"linear": "kron_both_diag"})
    net.model.vector.requires_grad_(False)
    recorder = net.recorder((X,), {"scaled": True})
    assert {registration.parameters: registration.approximation for registration in recorder.registrations} == {
        ("vector",): "full", ("head.weight", "head.bias"): "kron_both_diag",
    }  # fmt: skip


def test_what_was_generic_stays_generic_with_its_reason() -> None:
    program = net_of(nn.Linear(4, 3), X).program
    earlier = program.but(registrations=tuple(program.generic(name, f"why {name}") for name in ("weight", "bias")))
    merged = with_generic(program, earlier)
    assert [
        (registration.parameters, registration.generic, registration.reason) for registration in merged.registrations
    ] == [
        (("weight",), True, "why weight"),
        (("bias",), True, "why bias"),
    ]
    assert with_generic(program, program).registrations == program.registrations


def test_a_mask_that_fits_in_one_batch_only_is_told() -> None:
    one = registered("w")
    masked = replace(one, uses=tuple(replace(use, mask_dims=(0, 1)) for use in one.uses))
    assert other_masks(one, one) == "" and other_masks(masked, masked) == ""
    assert other_masks(masked, one) == "the padding mask fits its uses at first only"
    assert other_masks(one, masked) == "the padding mask fits its uses here only"


def test_a_frozen_parameter_that_is_used_in_another_way_is_compared_when_it_is_trained_again() -> None:
    net = kfac_fx.compile(Either(), (X,), loss="categorical")
    net.model.vector.requires_grad_(False)
    assert net.recorder((X,), {"scaled": True}).apart == {"vector"}
    assert not net.registrations[0].generic
    net.model.vector.requires_grad_(True)
    assert not net.recorder((X,), {"scaled": True}).apart
    assert net.registrations[0].generic


@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias")])
def test_a_block_that_a_path_does_not_use_has_no_statistics_of_it(frozen: tuple[str, ...]) -> None:
    net = kfac_fx.compile(Heads(), (X,), {"second": True}, loss="categorical")
    for name in frozen:
        getattr(net.model.second, name).requires_grad_(False)
    assert net.record((X,), {"second": False}).statistics.keys() == {FIRST}
