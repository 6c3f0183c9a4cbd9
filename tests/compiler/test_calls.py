"""How submodules are called in one forward, told from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jvp, vmap

from kfac_fx.compiled.jacobian_products import load_forward_mode
from kfac_fx.passes.torch_private import transforms
from kfac_fx.passes.tracing import calls
from kfac_fx.passes.tracing.calls import Lent, calls_of, map_tensors, watched, without_trace

X = torch.ones(2, 3)
load_forward_mode()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Any:
        return self.first(x)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.encode(x))


class Outer(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.other = Inner(), nn.Linear(3, 3)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def names(model: nn.Module, found: Any) -> list[str]:
    return [name for name, module in model.named_modules() if id(module) in found]


def test_calls_are_found_with_their_arguments_detached() -> None:
    model = Outer(lambda own, x: own.other(own.inner(x)))
    calls, opened = calls_of(model, (X,), {})
    assert names(model, calls) == ["inner", "inner.first", "inner.last", "other"]
    (call,) = calls[id(model.other)]
    assert call.args[0].shape == (2, 3) and not call.args[0].requires_grad
    assert opened == set()


def test_keywords_and_several_calls_are_kept_in_order() -> None:
    model = Outer(lambda own, x: own.other(input=x) + own.other(2 * x))
    calls, _ = calls_of(model, (X,), {})
    one, other = calls[id(model.other)]
    assert torch.equal(one.kwargs["input"], X) and one.args == ()
    assert torch.equal(other.args[0], 2 * X)


def test_calls_without_gradients_are_none() -> None:
    def use(own: Outer, x: Tensor) -> Any:
        with torch.no_grad():
            x = own.other(x)
        return own.inner(x)

    model = Outer(use)
    assert names(model, calls_of(model, (X,), {})[0]) == ["inner", "inner.first", "inner.last"]


def test_calls_inside_of_torch_func_are_marked_and_keep_nothing() -> None:
    model = Outer(lambda own, x: own.inner(x) + vmap(lambda row: row * own.other(torch.ones(3)))(x))
    calls, _ = calls_of(model, (X,), {})
    ((inner,), (other,)) = calls[id(model.inner)], calls[id(model.other)]
    assert (inner.transformed, other.transformed, other.args) == (False, True, ())


def test_a_forward_that_is_itself_inside_of_torch_func_has_calls() -> None:
    model = Outer(lambda own, x: own.inner(own.other(x)))
    found: list[Any] = []
    vmap(lambda row: found.append(calls_of(model, (X,), {})[0]) or row)(X)
    assert [call.transformed for (call,) in found[0].values()] == [False] * 4


def test_transformations_of_torch_func_and_levels_of_forward_mode_are_counted() -> None:
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(transforms())
        return x.sum()

    vmap(function)(X)
    grad(function)(X)
    vmap(grad(function))(X)
    functionalize(function)(X)
    with forward_ad.dual_level():
        function(X)
    assert seen == [1, 1, 2, 1, 1]
    jvp(function, (X,), (X,))
    assert seen.pop() > 0
    function(X)
    assert seen.pop() == 0


def test_a_call_on_other_parameters_is_none() -> None:
    model = Outer(lambda own, x: own.inner(functional_call(own.other, {"weight": torch.ones(3, 3)}, (x,))))
    assert names(model, calls_of(model, (X,), {})[0]) == ["inner", "inner.first", "inner.last"]


def test_arguments_are_those_behind_the_users_hooks() -> None:
    model = Outer(lambda own, x: own.other(x))
    model.other.register_forward_pre_hook(lambda module, args: (5 * args[0],))
    (call,) = calls_of(model, (X,), {})[0][id(model.other)]
    assert torch.equal(call.args[0], 5 * X)


def test_a_module_whose_inside_is_called_from_outside_is_opened() -> None:
    model = Outer(lambda own, x: own.inner(x) + own.inner.encode(x))
    assert names(model, calls_of(model, (X,), {})[1]) == ["inner"]


def test_a_module_that_only_a_later_forward_opens_is_opened() -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.other = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return self.other(self.block[0](y)) if torch.rand(()) < 0.5 else y

    model, x = Drawn(), torch.randn(2, 3)
    torch.manual_seed(1)  # draws .76 first
    forwards = watched(model, (x,), {})
    assert id(model.other) not in forwards.first and id(model.other) in forwards.calls
    assert forwards.opened == {id(model.block)}


def test_forwards_in_vain_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            drawn = float(torch.rand(()))
            expert: Tensor = self.experts[0 if drawn < 0.6 else 1 if drawn > 0.7 else 2](x)
            return expert

    monkeypatch.setattr(calls, "IN_VAIN", 1)
    model, x = Experts(), torch.randn(2, 3)
    torch.manual_seed(4)  # draws .56; the next forwards draw .76, .61
    forwards = watched(model, (x,), {})
    assert {id(expert) for expert in model.experts} <= forwards.calls.keys()


def test_a_module_that_is_never_called_itself_is_not_opened() -> None:
    model = Outer(lambda own, x: own.other(own.inner.encode(x)))
    assert calls_of(model, (X,), {})[1] == set()


def test_a_child_of_two_modules_opens_neither() -> None:
    model = Outer(lambda own, x: own.second(own.inner(x)))
    model.second = Inner()
    model.second.first = model.inner.first
    assert calls_of(model, (X,), {})[1] == set()


def test_lent_parameters_are_told_from_stand_ins() -> None:
    layer = nn.Linear(3, 3)
    given = {"weight": torch.ones(3, 3), "bias": torch.zeros(3)}
    own, stand_ins = Lent(layer), Lent(layer, given)
    assert not own.others(layer) and stand_ins.others(layer)
    said = []
    layer.register_forward_pre_hook(lambda *_: said.append((own.others(layer), stand_ins.others(layer))))
    functional_call(layer, given, (X,))
    assert said == [(True, False)]


def test_a_forward_leaves_no_trace_and_says_what_it_would_have() -> None:
    def use(own: Outer, x: Tensor) -> Any:
        own.seen = x
        with torch.no_grad():
            own.other.weight.zero_()
        return own.other(x) * torch.rand(())

    model = Outer(use)
    weight, state = model.other.weight.detach().clone(), torch.random.get_rng_state()
    with without_trace(model) as trace:
        model(X)
    assert (trace.assigned, trace.written) == (["seen"], ["other.weight"])
    assert torch.equal(model.other.weight, weight) and torch.equal(torch.random.get_rng_state(), state)
    assert not hasattr(model, "seen")


def test_forwards_are_repeated_until_all_is_reached() -> None:
    model = Outer(lambda own, x: own.inner(x) if torch.rand(()) < 0.5 else own.other(x))
    torch.manual_seed(0)
    found = watched(model, (X,), {})
    assert names(model, found.calls) == ["inner", "inner.first", "inner.last", "other"]
    assert set(found.first) < set(found.calls)


@pytest.mark.parametrize("tree", [[X], {"x": (X, 1)}, X, None])
def test_mapped_changes_tensors_only(tree: Any) -> None:
    doubled = map_tensors(lambda leaf: 2 * leaf, tree)
    assert str(doubled) == str(tree).replace("1., 1., 1.", "2., 2., 2.")
