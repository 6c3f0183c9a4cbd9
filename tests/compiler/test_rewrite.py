"""The emitted module: a tap behind every use, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kfac_fx.compiled.jacobian_products import load_forward_mode
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.resolve import resolve
from kfac_fx.passes.rewrite import Numbered, rewrite, tap_name
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before, code, node

X = torch.randn(5, 3)


class Seen(nn.Module):
    """A tap that keeps what it is given. Its result is a view made by a function of its own, as the real one's is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, ...]] = []

    def forward(self, output: Tensor, input: Tensor, probes: Any, *tensors: Tensor) -> Tensor:
        self.calls.append((output, input, probes, *tensors))
        seen: Tensor = Identity.apply(output)
        return seen


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def emitted(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Program, fx.GraphModule]:
    program = run(before("resolve", model, *inputs, **options), (resolve,))
    return program, rewrite(program, lambda registration, use: Seen())


def values(module: fx.GraphModule, program: Program, *inputs: Any) -> Any:
    """(what the model returns, flat; the Fisher's outputs); each registration's probes are its number."""
    return module(*inputs, list(range(len(program.registrations))))


def test_a_tap_stands_behind_every_use_with_output_input_and_probes() -> None:
    model = nn.Sequential(first := nn.Linear(3, 3), nn.Tanh(), first)
    program, module = emitted(model)
    assert code(module.graph) == [
        "linear = linear(input_1, _0_weight, _0_bias)",
        "_0_probes = getitem(probes, 0)",
        "_0_tap = taps.0(linear, input_1, _0_probes)",
        "tanh = tanh(_0_tap)",
        "linear_1 = linear(tanh, _0_weight, _0_bias)",
        "_0_1_probes = getitem(probes, 0)",
        "_0_1_tap = taps.0_1(linear_1, tanh, _0_1_probes)",
    ]
    returned, fisher = values(module, program, X)
    assert torch.equal(returned, model(X)) and fisher == (returned,)
    calls = [child.calls for child in module.taps.children()]
    assert [len(call) for call in calls] == [1, 1] and calls[0][0][2] == calls[1][0][2] == 0
    assert torch.equal(calls[1][0][1], torch.tanh(first(X)))


def test_names_are_those_of_the_model_and_parameters_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    _, module = emitted(model)
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(module.get_parameter(name) is parameter for name, parameter in model.named_parameters())
    assert module.get_buffer("1.running_mean") is model[1].running_mean


def test_the_fishers_outputs_come_second_and_tapped() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x), y)

    y = torch.randint(4, (5,))
    program = run(trace_model(Loss(), (X, y), layers=before("match", Loss()).layers).program)
    module = rewrite(program, lambda registration, use: Seen())
    (loss,), (logits,) = values(module, program, X, y)
    assert logits.shape == (5, 4) and torch.equal(loss, F.cross_entropy(logits, y))
    assert logits.grad_fn is not None and "Identity" in logits.grad_fn.name()


def test_two_registrations_may_share_an_output() -> None:
    """Biases split off a shared weight: one node, two taps, one behind the other."""
    model = Toy(lambda x, w, b, c: F.linear(torch.tanh(F.linear(x, w, b)), w, c), w=(3, 3), b=(3,), c=(3,))
    program, module = emitted(model)
    returned, _ = values(module, program, X)
    assert torch.equal(returned, model(X))
    taps = [line for line in code(module.graph) if "taps." in line]
    assert taps == [
        "w_tap = taps.w(linear, x, w_probes)",
        "b_tap = taps.b(w_tap, x, b_probes)",
        "w_1_tap = taps.w_1(linear_1, tanh, w_1_probes)",
        "c_tap = taps.c(w_1_tap, tanh, c_probes)",
    ]


def test_generic_parameters_have_no_tap_and_unused_ones_no_place() -> None:
    program, module = emitted(Toy(lambda x, v, w, dead: x * F.dropout(v) @ w, v=(3,), w=(3, 3), dead=(3,)))
    assert [name for name, _ in module.taps.named_children()] == ["w"]
    assert sorted(name for name, _ in module.named_parameters()) == ["v", "w"]
    assert len(program.registrations) == 2


def test_a_model_without_inputs_is_given_probes_only() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return 2 * self.w

    program, module = emitted(Constant())
    assert values(module, program)[0].tolist() == [2, 2, 2]


def writes_to_a_tap(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h[:, 0].zero_()
    h.index_fill_(1, torch.tensor([1]), 3.0)
    return torch.tanh(h)


def writes_to_an_input(x: Tensor, w: Tensor) -> Tensor:
    x[:, 0] = 1.0
    return torch.tanh(x @ w)


def builds_from_taps(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 4)
    out[:, :3] = x @ w
    return out * 2


@pytest.mark.parametrize("function", [writes_to_a_tap, writes_to_an_input, builds_from_taps])
def test_writes_neither_break_autograd_nor_change_inputs(function: Callable[..., Tensor]) -> None:
    model = Toy(function, w=(3, 3))
    program, module = emitted(model, X.clone())
    given = X.clone()
    (returned,), _ = values(module, program, given)
    assert torch.equal(given, X)
    expected = model(X.clone())
    assert torch.equal(returned, expected)
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(out, model.w, weight)[0] for out in (returned, expected))
    assert torch.equal(ours, theirs)


def test_updates_of_buffers_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), norm := nn.BatchNorm1d(3))
    program, module = emitted(model, X)
    values(module, program, X)
    assert norm.num_batches_tracked == 1 and norm.running_mean.abs().sum() > 0


def test_tensors_that_rows_need_are_handed_to_the_tap() -> None:
    class Evaluated(nn.Sequential):
        pass

    program, module = emitted(Evaluated(nn.BatchNorm1d(3).eval()), X)
    tap = node(module.graph, "_0_tap")
    assert [str(argument) for argument in tap.args[3:]] == ["_0_running_mean", "_0_running_var"]


def test_taps_are_named_after_modules_and_numbered() -> None:
    _, module = emitted(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)))
    assert [name for name, _ in module.taps.named_children()] == ["0_0", "1"]
    taken = Numbered()
    for _ in range(3):
        taken[taken.fresh("a")] = nn.Identity()
    taken[taken.fresh("a_2")] = nn.Identity()
    assert list(taken) == ["a", "a_1", "a_2", "a_2_1"] and taken.fresh("b") == "b"
    assert tap_name(Registration("generic", None, ("w",), (), "diagonal")) == "w"


def test_a_tap_is_made_for_its_registration_and_use() -> None:
    program, _ = emitted(nn.Linear(3, 3))
    tapped: list[tuple[Registration, Use]] = []

    def make(registration: Registration, use: Use) -> nn.Module:
        tapped.append((registration, use))
        return Seen()

    rewrite(program, make)
    assert tapped == [(program.registrations[0], program.registrations[0].uses[0])]


def test_links_join_uses_in_the_order_of_the_graph() -> None:
    """Whichever order they were registered in."""
    model = Toy(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w) @ w, w=(3, 3))
    program = run(before("resolve", model, approximations={"w": "kron_series_1"}), (resolve,))
    (series,) = program.registrations
    for uses in (series.uses, series.uses[::-1]):
        turned = program.but(registrations=(replace(series, uses=uses),))
        module = rewrite(turned, lambda registration, use: Seen(), lambda registration, use, first, last: Seen())
        links = [node for node in module.graph.nodes if str(node.target).startswith("links.")]
        assert [link.args[3] and link.args[3].args[0] for link in links] == [None, *links[:-1]]


def test_a_jacobian_is_computed_only_where_its_registration_is_recorded() -> None:
    model = Toy(lambda x, w: F.linear(x, w.softmax(1)), w=(4, 3))
    _, module = emitted(model, X)
    tap = module.get_submodule("taps.w")
    assert isinstance(tap, Seen)
    for probes in (None, {}, {"A": torch.zeros(3, 3)}):
        module(X, [probes])
    without, empty, recorded = (tensors for _, _, _, *tensors in tap.calls)
    assert without == empty == [None]
    wanted = torch.autograd.functional.jacobian(lambda w: w.softmax(1), model.w)
    torch.testing.assert_close(recorded, [wanted.reshape(12, 12)])


class Untapped(nn.Module):
    def forward(self, output: Tensor, *rest: Any) -> Tensor:
        return output


def scaled_by_norm(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        norm = w.norm()
    return F.linear(x, w) / norm


def test_a_region_without_gradients_has_no_tangents_either() -> None:
    model = Toy(scaled_by_norm, w=(4, 3))
    program, _ = emitted(model, X)
    module = rewrite(program, lambda registration, use: Untapped())
    w, direction = model.w.detach(), torch.randn(4, 3)

    def run(w: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(module, {"w": w}, (X, [None]))[0][0]
        return output

    load_forward_mode()
    _, tangent = torch.func.jvp(run, (w,), (direction,))
    torch.testing.assert_close(tangent, X @ direction.T / w.norm())


def test_a_region_that_enables_gradients_again_keeps_them() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            norm = w.norm()
            with torch.enable_grad():
                y = F.linear(x, w)
        return y / norm

    model = Toy(function, w=(4, 3))
    _, module = emitted(model, X)
    wanted = torch.autograd.grad(model(X).sum(), model.w)
    torch.testing.assert_close(torch.autograd.grad(module(X, [None])[0][0].sum(), [module.w]), wanted)
