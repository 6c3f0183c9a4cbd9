"""Every model of the zoo, compiled: what is registered, that the rows are right, that recording changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.pipeline import PIPELINE
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.statistics import Moments
from tests.compiler.untouched import run_untouched
from tests.models import CASES, ZOO, Case
from tests.tables import pairs
from tests.whole.training import apart, differences, step


@dataclass(frozen=True)
class Once:
    """A compiled model of the zoo, and the entries of its state that compiling changed."""

    net: CompiledModule
    changed: list[str]


@cache
def compiled(name: str) -> Once:
    torch.manual_seed(0)
    case, model = ZOO[name], ZOO[name].make()
    args, kwargs = case.inputs(), case.keywords()
    before = copy.deepcopy(state_of(model, args, kwargs))
    net = kfac_fx.compile(model, args, kwargs, loss=case.loss, layers=case.layers)
    return Once(net, differences(before, state_of(model, args, kwargs)))


def once(name: str) -> CompiledModule:
    return compiled(name).net


def state_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All that compiling and recording may not touch."""
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    inputs = {f"input {n}": leaf for n, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs))))}
    return {**model.state_dict(), **gradients, **inputs, "random stream": torch.random.get_rng_state()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_expected_registrations_are_found(case: Case) -> None:
    """With the proof on: a registration whose rows are wrong would be generic."""
    net = once(case.name)
    found = [
        (registration.layer, registration.parameters, len(registration.uses))
        for registration in net.registrations
        if not registration.generic
    ]
    assert sorted(found) == sorted(case.expected), net.report
    assert sorted(
        name for registration in net.registrations if registration.generic for name in registration.parameters
    ) == sorted(case.generic)
    assert sorted(net.report.unused) == sorted(case.unused)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_registrations_are_in_the_order_of_the_graph(case: Case) -> None:
    program = once(case.name).program
    order = {node: n for n, node in enumerate(program.graph.nodes)}
    first = [order[registered.uses[0].output] for registered in program.registrations if not registered.generic]
    assert first == sorted(first)
    for entry in program.registrations:
        places = [order[use.output] for use in entry.uses]
        assert places == sorted(places)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_pass_writes_into_the_graph_that_it_is_given(case: Case) -> None:
    captures = once(case.name).captures
    assert captures.first is not None
    program = run_untouched(captures.first.capture.program, PIPELINE)
    assert len(program.registrations) == len(captures.program.registrations)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_report_counts_every_element(case: Case) -> None:
    net = once(case.name)
    count = net.report.to_dict()["parameters"]
    trainable = {name: p.numel() for name, p in net.model.named_parameters() if p.requires_grad}
    sizes = trainable | {name: prod(shape) for name, shape in net.program.shapes.items()}
    assert count["total"] == sum(trainable.values())
    assert count["generic"] == sum(sizes[name] for name in case.generic)
    assert count["structured"] == count["total"] - count["generic"] - sum(sizes[name] for name in case.unused)
    assert count["unused"] == list(case.unused)
    assert str(net.report).splitlines()[0].startswith(f"kfac_fx registered {count['registered']:,} of")


WHOLE = (
    "resnet18",
    "cross_attention",
    "encoder_batch_first",
    "encoder_sequence_first",
    "encoder_by_hand",
    "gpt",
    "gpt_tied",
)


@pytest.mark.parametrize("name", WHOLE)
def test_standard_models_are_structured_to_the_last_element(name: str) -> None:
    count = once(name).report.to_dict()["parameters"]
    assert count["structured"] == count["total"]
    assert "100 %" not in str(once(name).report).splitlines()[0]  # said only where something is generic


@pairs(("way", ["quiet", "recording", "in training"]), ("case", CASES))
def test_a_training_step_is_the_original_bit_for_bit(case: Case, way: str) -> None:
    """Twice in a row: without recording, with one before each step, with the emitted module in the model's place."""
    net = once(case.name)
    twin = copy.deepcopy(net.model)
    args, kwargs = case.inputs(), dict(case.keywords())
    recorded: list[Any] = []

    def forward() -> Any:
        if way != "in training":
            return net(*args, **kwargs)
        outputs, pending = net.record_in_training(args, kwargs)
        recorded.append(pending)
        return outputs

    for _ in range(2):
        if way == "recording":
            all_finite(net, net.record(args, kwargs))
        theirs = step(twin, lambda: twin(*args, **kwargs))
        compare = apart if case.rounded and way == "in training" else differences
        assert compare(theirs, step(net.model, forward)) == []
    for pending in recorded[-1:]:
        all_finite(net, pending.moments())


def all_finite(net: CompiledModule, moments: Moments) -> None:
    """A statistic for every registration, and numbers in all of them."""
    assert set(moments.statistics) == {registration.parameters for registration in net.registrations}
    assert all(value.isfinite().all() for statistic in moments.statistics.values() for value in statistic.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recording_leaves_no_trace(case: Case) -> None:
    """Neither compiling nor recording touches parameters, gradients, buffers, inputs or the random stream."""
    once = compiled(case.name)
    args, kwargs = case.inputs(), case.keywords()
    before = copy.deepcopy(state_of(once.net.model, args, kwargs))
    once.net.record(args, dict(kwargs), generator=torch.Generator().manual_seed(0))
    assert once.changed + differences(before, state_of(once.net.model, args, kwargs)) == []


PRECISIONS = ("autocast", "bfloat16", "float64")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # rms_norm under autocast
@pairs(("name", ["mlp", "conv_options", "norms", "gpt_tied", "recurrent_from_zero"]), ("precision", PRECISIONS))
def test_every_precision_keeps_the_blocks_and_the_bits(name: str, precision: str) -> None:
    case = ZOO[name]
    torch.manual_seed(0)
    model, args = case.make(), case.inputs()
    if precision != "autocast":
        dtype = getattr(torch, precision)
        model, args = model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        net = kfac_fx.compile(model, args, loss=case.loss)
        moments = net.record(args, {})
        assert (
            differences(step(twin, lambda: twin(*args)), step(model, lambda: net.record_in_training(args, {})[0])) == []
        )
    assert {
        (registration.layer, registration.parameters, len(registration.uses)) for registration in net.registrations
    } == set(case.expected)
    dtypes = {value.dtype for statistics in moments.statistics.values() for value in statistics.values()}
    assert dtypes == {torch.float64 if precision == "float64" else torch.float32}
