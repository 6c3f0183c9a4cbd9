"""Parameters that Python reads between captured submodules: one operation at a time, with uses of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, ModelChangedError
from kfac_fx.passes.parametrizations import functions
from tests.whole.divided import Base, compiled, submodules_of
from tests.whole.training import differences, step

Between = Callable[[Any, Tensor], Tensor]
S = torch.randn(6, 7, 4)


class Reading(nn.Module):
    """A branch, and in it Python that reads parameters of its own. x [n, s, 4]"""

    def __init__(self, between: Between, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.between, self.first, self.last = between, nn.Linear(4, 5), nn.Linear(5, 3)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.last(self.between(self, h) if h.sum() > -1e9 else h).sum(1)


def chain(own: Any, h: Tensor) -> Tensor:
    weight = own.weight.t().unflatten(0, (5, 1))[:, 0]
    return F.linear(h, weight.t(), own.bias)


def often(own: Any, h: Tensor) -> Tensor:
    for _ in range(2 + int(h.abs().sum() < 1e9)):
        h = torch.tanh(h @ own.weight)
    return h


def token(own: Any, h: Tensor) -> Tensor:
    return torch.cat([own.token.expand(h.shape[0], -1, -1), h, own.last_token.repeat(len(h), 1, 1)], 1)


def masked(own: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[h.detach().sum(-1) > 0] = own.spare.to(h.dtype)
    return h


def in_place(own: Any, h: Tensor) -> Tensor:
    h = h.tanh().clone()
    view = h[:, 1:]
    view *= own.gain.exp()
    h += own.shift
    return h


def placed(own: Any, h: Tensor) -> Tensor:
    return h + F.embedding(torch.arange(h.shape[1]), own.table)


def shared(own: Any, h: Tensor) -> Tensor:
    return F.linear(F.linear(h, own.last.weight), own.last.weight.t())


class Wrapper(Reading):
    """Has its weights in containers, too, as wrappers of other libraries have."""

    def __init__(self) -> None:
        super().__init__(held, weight=(5, 5), bias=(5,))
        self.held = {"weight": self.weight, "more": [self.bias]}


def held(own: Any, h: Tensor) -> Tensor:
    weights = {name: value.to(h) for name, value in own.held.items() if name == "weight"}
    return F.linear(h, weights["weight"], own.held["more"][0].type_as(h))


CASES: dict[str, tuple[nn.Module, dict[tuple[str, ...], tuple[str, int]]]] = {
    "a chain of operations": (Reading(chain, weight=(5, 5), bias=(5,)), {("weight", "bias"): ("linear", 1)}),
    "several calls": (Reading(often, weight=(5, 5)), {("weight",): ("linear", 1)}),
    "tokens": (
        Reading(token, token=(1, 1, 5), last_token=(2, 5)),
        {("token",): ("scale_and_shift", 1), ("last_token",): ("scale_and_shift", 1)},
    ),
    "through a mask": (Reading(masked, spare=(5,)), {("spare",): ("scale_and_shift", 1)}),
    "in place": (
        Reading(in_place, gain=(5,), shift=(7, 1)),
        {("gain",): ("scale_and_shift", 1), ("shift",): ("scale_and_shift", 1)},
    ),
    "positions": (Reading(placed, table=(9, 5)), {("table",): ("embedding", 1)}),
    "in containers": (Wrapper(), {("weight", "bias"): ("linear", 1)}),
    "cast to the type of another tensor": (
        Reading(lambda own, h: h.to(own.weight) @ own.weight.to(h), weight=(5, 5)),
        {("weight",): ("linear", 1)},
    ),
    "of a captured submodule": (
        Reading(shared),
        {("last.weight",): ("linear", 3), ("last.bias",): ("linear", 1)},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_reads_are_registered_and_proved(kind: str) -> None:
    model, wanted = CASES[kind]
    net = compiled(copy.deepcopy(model), S)
    found = {
        registration.parameters: (registration.layer, len(registration.uses)) for registration in net.registrations
    }
    assert found.items() >= wanted.items()
    assert not any(registration.generic for registration in net.registrations)
    net.record((torch.randn(9, 7, 4),), {})


@pytest.mark.parametrize("kind", CASES)
def test_rides_are_the_models_own_steps(kind: str) -> None:
    model = copy.deepcopy(CASES[kind][0])
    twin = copy.deepcopy(model)
    net = compiled(model, S)
    assert differences(step(twin, lambda: twin(S)), step(model, lambda: net.record_in_training((S,), {})[0])) == []


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "positions"])
def test_gradients_of_every_case_add_up_over_reads(kind: str) -> None:
    model, wanted = CASES[kind]
    model = copy.deepcopy(model).double()
    x, y = S.double(), torch.randn(6, 3).double()
    net = compiled(model, x, approximations={"*": "full"})
    found = net.record((x,), {}, mode="empirical", targets=y).statistics
    for key in wanted:
        (one,) = (registration for registration in net.registrations if registration.parameters == key)
        expected = []
        for case, target in zip(x, y, strict=True):
            loss = kfac_fx.losses.Normal(model(case[None]), targets=target[None]).evaluate()
            grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in key])
            expected.append(one.matrix.pack(dict(zip(key, grads, strict=True))).flatten())
        torch.testing.assert_close(found[key]["per_case"], torch.stack(expected))


def test_training_with_reads_learns() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 7, 4)
    net = compiled(Reading(chain, weight=(5, 5), bias=(5,)), x, loss="mse")
    opt = KFAC(net, lr=0.1, damping=0.1)
    losses = []
    for _ in range(8):
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


class Longer(Base):
    """Positions that Python cuts to the length of the batch, and branches that read in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.gain = nn.Parameter(torch.randn(9, 5)), nn.Parameter(torch.randn(5))

    def between(self, h: Tensor) -> Any:
        h = (h + self.places[: h.shape[1]]) * self.gain
        if h.shape[1] < 5:
            h = h * self.gain.view(*[1] * (h.shape[1] - 2), 5)
        if h.abs().sum() > 1e4:
            return self.middle(h * F.dropout(self.places[0]))
        return self.middle(h)


def test_a_table_is_cut_to_any_length() -> None:
    net = compiled(Longer(), S)
    emitted = submodules_of(net, S)
    assert ("places",) in {registration.parameters for registration in emitted.program.registrations}
    net.record((torch.randn(6, 8, 4),), {})
    assert len(submodules_of(net, S).captured) == len(emitted.captured)


def test_a_read_of_another_kind_is_captured_when_it_is_met() -> None:
    net = compiled(Longer(), S)
    many = len(submodules_of(net).captured)
    assert net.record((torch.randn(6, 3, 4),), {}).statistics["gain",]
    assert len(submodules_of(net, S).captured) == many + 1
    output, pending = net.record_in_training((torch.randn(6, 4, 4),), {})  # which is met behind it
    output.sum().backward()
    assert float(sum(statistic.abs().sum() for statistic in pending.moments().statistics["gain",].values())) == 0.0
    assert len(submodules_of(net, S).captured) == many + 2


def test_a_read_that_nothing_can_capture_is_an_error_later_on() -> None:
    net = compiled(Longer(), S)
    with pytest.raises(ModelChangedError, match="reads places outside of its captured submodules"):
        net.record((1e4 * S,), {})


def test_uses_that_do_not_go_together_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)  # small weights have the block of their elements
    net = compiled(Reading(lambda own, h: F.linear(h, own.first.weight.view(4, 5)) @ own.mix, mix=(4, 5)), S)
    reasons = generic_reasons(net)
    assert set(reasons) == {("first.weight",), ("first.bias",), ("mix",)}
    assert all(" is read at test_python_reads.py" in str(reason) for reason in reasons.values())


def test_a_piece_that_is_a_row_of_a_matrix_and_scales_has_the_block_of_its_elements() -> None:
    net = compiled(Reading(lambda own, h: h[..., :4] * own.first.weight[0] @ own.mix, mix=(4, 5)), S)
    (piece,) = (registration for registration in net.registrations if registration.parameters == ("first.weight[0:1]",))
    assert piece.approximation == "full" and len(piece.uses) == 2 and not generic_reasons(net)


def generic_reasons(net: Any) -> dict[tuple[str, ...], str | None]:
    return {registration.parameters: registration.reason for registration in net.registrations if registration.generic}


@pytest.mark.parametrize(
    "between",
    [
        lambda own, h: h * F.dropout(own.gain, 0.1),
        lambda own, h: h * own.gain.clone().mul_(2.0),
        lambda own, h: torch.mul(h, 2.0) * torch.exp(own.gain, out=None).clone().neg_(),
    ],
    ids=["random", "in place", "in place at the end"],
)
def test_what_is_not_followed_is_generic(between: Between) -> None:
    net = compiled(Reading(between, gain=(5,)), S)
    (reason,) = (str(registration.reason) for registration in net.registrations if registration.parameters == ("gain",))
    assert "gain is read at test_python_reads.py" in reason


class Late(Reading):
    """On large inputs what was computed from a parameter is changed behind the back of what follows."""

    def __init__(self) -> None:
        super().__init__(late, gain=(2, 5))


def late(own: Any, h: Tensor) -> Tensor:
    gain = own.gain * 2.0
    if h.abs().max() > 100:
        gain[0].mul_(3.0)
    return h * gain[0]


def test_what_is_changed_later_on_is_never_served() -> None:
    net = compiled(Late(), S)
    assert ("gain[0:1]",) in {registration.parameters for registration in net.registrations if not registration.generic}
    with pytest.raises(ModelChangedError, match="reads gain outside of its captured"):
        net.record((1e4 * S,), {})


def under_autocast(own: Any, h: Tensor) -> Tensor:
    weight = own.weight @ own.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(h, weight).float()


def clamped(own: Any, h: Tensor) -> Tensor:
    scale = own.gain * 2.0
    with torch.no_grad():
        own.gain.clamp_(-0.5, 0.5)
    return h * scale


def times(gain: Tensor, by: Any) -> Tensor:
    """A function of a user's own that torch dispatches."""
    if torch.overrides.has_torch_function((gain,)):
        found: Tensor = torch.overrides.handle_torch_function(times, (gain,), gain, by)
        return found
    return gain * by.value


def of_an_object(own: Any, h: Tensor) -> Tensor:
    return h * times(own.gain, SimpleNamespace(value=2.0))


@pytest.mark.parametrize(
    ("between", "name", "shape"),
    [(under_autocast, "weight", (5, 5)), (clamped, "gain", (5,)), (of_an_object, "gain", (5,))],
)
def test_what_would_be_computed_in_another_way_is_left_to_python(
    between: Between, name: str, shape: tuple[int, ...]
) -> None:
    net = compiled(Reading(between, **{name: shape}), S)
    (reason,) = (str(registration.reason) for registration in net.registrations if registration.parameters == (name,))
    assert f"{name} is read at test_python_reads.py" in reason


def test_a_parameter_that_the_model_returns_is_generic() -> None:
    class Returning(Reading):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.gain.exp()

    net = compiled(
        Returning(lambda own, h: h * own.gain, gain=(5,)), S, loss=lambda outputs: kfac_fx.losses.Normal(outputs[0])
    )
    (one,) = (registration for registration in net.registrations if registration.parameters == ("gain",))
    assert one.reason == "gain is returned by the model, as no layer's output"


def test_the_report_names_the_operations() -> None:
    net = compiled(copy.deepcopy(CASES["a chain of operations"][0]), S)
    line = chain.__code__.co_firstlineno + 2
    said = f"linear of weight, bias (test_python_reads.py:{line})"
    assert f"and of Python between them: {said}" in " ".join(str(net.report).split())
    assert net.report.to_dict()["submodules"][-1] == {"module": said, "calls": 1}
