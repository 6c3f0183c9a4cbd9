"""One forward in which submodules run as their graphs: which capture serves a call, and what is seen between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.compiled.jacobian_products import by_dual_numbers, in_forward_mode
from kfac_fx.linalg.vectors import in_reverse_mode_twice
from kfac_fx.passes.divide import CapturedSubmodule
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.ir import Options, Submodule
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.tracing.calls import Lent
from kfac_fx.passes.tracing.signature import call_key
from kfac_fx.recording.emitted_submodules import Frames, LossWatch, UncapturedCall, one_call, reached, refuse_read
from tests.whole.divided import Branching, compiled
from tests.whole.divided import X as INPUTS

X = torch.randn(5, 4)


class Doubled(nn.Linear):
    """Its graph is that of the layer alone, so that a test sees which of the two ran."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def frames(model: nn.Module, **changes: Any) -> Frames:
    """Frames of all children of a model, whose graphs compute half of what they do."""
    captured, functions, held = [], [], []
    for path, module in model.named_children():
        half = nn.Linear(4, 4)
        half.load_state_dict(module.state_dict())
        traced = trace_model(half, (X,), options=Options(loss_given=True), layers=LAYERS)
        captured.append(
            CapturedSubmodule(
                Submodule(path, 1), module, traced, call_key((X,), {}), (), traced.settings(module, inside=True)
            )
        )
        graph = rewrite(traced.program, lambda registration, use: nn.Identity())
        functions.append(lambda held, values, probes, graph=graph: (one_call(graph)(held, values, [])[0], ()))
        held.append(dict(module.named_parameters()))
    arguments: dict[str, Any] = {
        "checked": None,
        "ran": set(),
        "functions": functions,
        "held": held,
        "probes": [],
        "inputs": lambda number, values: values,
        "lent": Lent(model),
        "tolerant": False,
    }
    return Frames(captured, **{**arguments, **changes})


def model() -> nn.Sequential:
    return nn.Sequential(Doubled(4, 4), Doubled(4, 4))


def test_submodules_run_as_their_graphs_and_are_themselves_again() -> None:
    net = model()
    plain, one = net(X), frames(net)
    with one.in_place():
        torch.testing.assert_close(net[0](X), F.linear(X, net[0].weight, net[0].bias))
        assert not torch.allclose(net(X), plain)
    assert one.ran == {0, 1} and torch.equal(net(X), plain)
    assert all("forward" not in module.__dict__ for module in net)


def test_they_are_themselves_again_after_an_error() -> None:
    net = model()
    with pytest.raises(ZeroDivisionError), frames(net).in_place():
        raise ZeroDivisionError
    assert all("forward" not in module.__dict__ for module in net)


@pytest.mark.parametrize(("x", "checked", "captured"), [(X.double(), None, False), (X, {1}, True)])
def test_a_call_that_no_capture_serves_has_its_path_and_whether_it_is_to_be_proved(
    x: Tensor, checked: set[int] | None, captured: bool
) -> None:
    net = model()
    if x.dtype == torch.float64:
        net.double()
    with frames(net, checked=checked).in_place(), pytest.raises(UncapturedCall) as failure:
        net(x)
    assert (failure.value.path, failure.value.captured) == ("0", captured)


def test_a_tolerant_forward_runs_such_a_call_as_it_is_and_keeps_it() -> None:
    net, one = (made := model()), frames(made, checked={1}, tolerant=True)
    with one.in_place():
        torch.testing.assert_close(net[0](X), 2 * F.linear(X, net[0].weight, net[0].bias))
    assert one.uncaptured is not None and one.uncaptured.path == "0" and one.ran == set()


def test_without_gradients_nothing_is_served() -> None:
    net, one = (made := model()), frames(made)
    plain = net(X)
    with one.in_place(), torch.no_grad():
        assert torch.equal(net(X), plain)
    assert one.ran == set()


@pytest.mark.parametrize("serves", [True, False])
def test_a_users_hook_runs_once_a_call(serves: bool) -> None:
    net, calls = model(), []
    net[0].register_forward_hook(lambda module, inputs, output: calls.append(output))
    with frames(net).in_place(), torch.set_grad_enabled(serves):
        net(X)
    assert len(calls) == 1


def test_an_uncaptured_call_passes_the_models_own_handlers() -> None:
    assert not issubclass(UncapturedCall, Exception)


def test_losses_outside_of_graphs_are_noted_with_their_arguments() -> None:
    watch, logits, targets = LossWatch(), torch.randn(5, 3, requires_grad=True), torch.arange(5) % 3
    with watch:
        F.cross_entropy(logits, targets, reduction="sum")
        F.mse_loss(input=logits, target=logits.detach())
        with torch.no_grad():
            F.cross_entropy(logits, targets)  # a metric
        watch.paused = True
        F.mse_loss(logits, logits.detach())
    first, second = watch.losses
    assert (first.loss, first.reduction, second.loss, second.reduction) == ("cross_entropy", "sum", "mse_loss", "mean")
    assert first.inputs is logits and first.targets is targets


def test_gradients_reach_the_tensors_that_roots_are_computed_from() -> None:
    used, view, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)[...], torch.ones(2)
    other = unused.requires_grad_()
    roots = ((used * 2).exp(), view.sum())
    assert reached(roots, {"used": used, "view": view, "other": other}) == ["used", "view"]
    assert reached((used,), {"used": used, "other": other}) == ["used"]


def test_a_parameter_that_python_reads_is_refused_by_name_with_a_way_out() -> None:
    read = torch.ones(2, requires_grad=True)
    refuse_read(nn.Linear(2, 2), {"w": read}, (torch.ones(2, requires_grad=True).sum(),))
    with pytest.raises(ModelChangedError) as failure:
        refuse_read(nn.Linear(2, 2), {"w": read}, (read.sum(),))
    first, advice = str(failure.value).splitlines()
    assert first.startswith("on these inputs Linear reads w outside of its captured submodules")
    assert advice.endswith('compile(..., approximations={"w": "generic"}).')


def test_python_without_gradients_has_no_tangents_either() -> None:
    class Scaled(Branching):
        def between(self, h: Tensor) -> Any:
            with torch.no_grad():
                norm = h.norm()
                norm.mul_(2.0)
            return super().between(h) / norm

    net = compiled(Scaled())
    point = {name: parameter.detach() for name, parameter in net.named_parameters()}
    tangents = tuple(torch.randn_like(value).unsqueeze(0) for value in point.values())

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        return net.functional(dict(zip(point, values, strict=True)), (INPUTS,), {})[1]

    wanted = in_reverse_mode_twice(outputs, tuple(point.values()), tangents)
    for mode in (by_dual_numbers, in_forward_mode):
        torch.testing.assert_close(mode(outputs, tuple(point.values()), tangents), wanted)
