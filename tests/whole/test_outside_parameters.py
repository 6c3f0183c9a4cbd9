"""Forwards with other tensors instead of the parameters, and inside of transformations of torch.func."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import stateless

import kfac_fx
from kfac_fx import ModelChangedError
from kfac_fx.compiled.compiled_module import CompiledModule, ForwardListener
from tests.tables import pairs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own use of it

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
Values = Mapping[str, Tensor]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def doubled(net: nn.Module) -> dict[str, Tensor]:
    return {name: (2 * value.detach()).requires_grad_() for name, value in net.named_parameters()}


def loss(net: nn.Module, values: Values, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(functional_call(net, dict(values), (x,)), y)


def by_others(net: nn.Module) -> Any:
    values = doubled(net)
    return torch.autograd.grad(loss(net, values), list(values.values()))


def by_some(net: nn.Module) -> Any:
    return functional_call(net, {"0.weight": 2 * net.get_parameter("0.weight")}, (X,))


def by_those_of_another_model(net: nn.Module) -> Any:
    return functional_call(net, parameters_of(network(1)), (X,))


def by_the_older_function(net: nn.Module) -> Any:
    call: Any = stateless.functional_call
    with pytest.warns(FutureWarning):
        return call(net, doubled(net), (X,))


def inside_of_an_outer_module(net: nn.Module) -> Any:
    outer = nn.Sequential(net, nn.Tanh())
    return functional_call(outer, {name: 2 * value for name, value in outer.named_parameters()}, (X,))


def adapted(net: nn.Module) -> Any:
    """MAML (Finn et al. 2017): the gradient behind a step, which is differentiated, too."""
    own = parameters_of(net)
    grads = torch.autograd.grad(loss(net, own, X[:4], Y[:4]), list(own.values()), create_graph=True)
    moved = {name: value - 0.1 * by for (name, value), by in zip(own.items(), grads, strict=True)}
    return torch.autograd.grad(loss(net, moved, X[4:], Y[4:]), list(own.values()))


def of_every_member(net: nn.Module) -> Any:
    members = {name: torch.stack([value, 2 * value]).detach() for name, value in net.named_parameters()}
    return vmap(lambda values: functional_call(net, values, (X,)))(members)


def of_every_example(net: nn.Module) -> Any:
    own = {name: value.detach() for name, value in net.named_parameters()}
    one: Callable[..., Any] = grad(lambda values, x, y: loss(net, values, x[None], y[None]))
    return vmap(one, (None, 0, 0))(own, X, Y)


def along_a_line(net: nn.Module) -> Any:
    own = {name: value.detach() for name, value in net.named_parameters()}
    return jvp(lambda values: loss(net, values), (own,), (own,))


def dual(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(X, torch.ones_like(X))))


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "others": by_others,
    "some": by_some,
    "another model's": by_those_of_another_model,
    "the older function": by_the_older_function,
    "an outer module": inside_of_an_outer_module,
    "functional gradient": lambda net: grad(lambda values: loss(net, values))(parameters_of(net)),
    "ensemble": of_every_member,
    "examples": of_every_example,
    "line": along_a_line,
    "mapped inputs": lambda net: vmap(net)(X),
    "gradient by the input": lambda net: grad(lambda x: net(x).square().sum())(X),
    "Jacobian by the input": lambda net: jacrev(net)(X[:1]),
    "dual numbers": dual,
}


class Listening:
    """A listener that notes forwards, as an optimizer does."""

    def __init__(self) -> None:
        self.forwards = 0

    def forgetting_on_error(self) -> Any:
        return torch.enable_grad()

    def on_call(self) -> None:
        pass

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.forwards += 1

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def listened(in_place: bool) -> tuple[CompiledModule, nn.Module, Listening]:
    """(the compiled module, what the user calls, the listener)"""
    model = network()
    net = kfac_fx.compile(model, (X,), loss="categorical", in_place=in_place)
    listener = Listening()
    assert isinstance(listener, ForwardListener)
    net.attach(listener)
    return net, model if in_place else net, listener


@pairs(("in_place", [False, True]), ("call", OTHERS))
def test_other_tensors_compute_what_the_model_computes_and_record_nothing(
    call: Callable[[nn.Module], Any], in_place: bool
) -> None:
    net, called, listener = listened(in_place)
    torch.testing.assert_close(call(called), call(network()))
    assert listener.forwards == 0
    assert "recorded nothing" in str(net.report)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_nets_own_parameters_are_recorded(in_place: bool) -> None:
    """Also of a step that is differentiated: its first forward is at the own parameters, its second is not."""
    net, called, listener = listened(in_place)
    assert loss(called, parameters_of(called)) == loss(network(), parameters_of(network()))
    assert listener.forwards == 1 and "recorded nothing" not in str(net.report)
    torch.testing.assert_close(adapted(called), adapted(network()))
    assert listener.forwards == 2 and "1 forward had other tensors" in " ".join(str(net.report).split())


def test_the_first_forward_of_all_may_be_with_other_tensors() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(4, 3), nn.Flatten()), loss="categorical")
    values = doubled(net)
    torch.testing.assert_close(functional_call(net, values, (X,)), functional_call(net.model, values, (X,)))
    net(X)
    assert not any(registration.generic for registration in net.registrations)


def test_statistics_at_other_values_are_those_of_a_model_with_these_values() -> None:
    net, values = kfac_fx.compile(network(), (X,), loss="categorical"), doubled(network())
    other = copy.deepcopy(net.model)
    other.load_state_dict(values)
    wanted = kfac_fx.compile(other, (X,), loss="categorical").record((X,), {}, mode="empirical", targets=Y)
    found = net.record((X,), {}, mode="empirical", targets=Y, parameters=values)
    torch.testing.assert_close(found.statistics, wanted.statistics)
    own = net.record((X,), {}, mode="empirical", targets=Y)
    key = next(iter(own.statistics))
    assert not torch.allclose(own.statistics[key]["G"], found.statistics[key]["G"])
    with pytest.raises(ValueError, match="are not in net.named_parameters"):
        net.record((X,), {}, parameters={"weigth": X})
    with pytest.raises(TypeError, match="values that are no tensors: '0.weight'"):
        net.record((X,), {}, parameters={"0.weight": 1.0})


def test_a_recording_inside_of_a_functional_call_says_what_to_write() -> None:
    class Recording(nn.Module):
        def __init__(self, net: CompiledModule) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            return self.net.record((x,), {})

    outer = Recording(kfac_fx.compile(network(), (X,), loss="categorical"))
    with pytest.raises(ModelChangedError) as failure:
        functional_call(outer, doubled(outer), (X,))
    assert str(failure.value).splitlines() == [
        "statistics are recorded of the model's own parameters, and other tensors stand for them in this call, as in "
        "torch.func.functional_call: 0.weight, 0.bias, 2.weight, 2.bias.",
        "Record outside of it, with the values of these tensors: net.record((x,), {}, parameters={name: tensor}).",
    ]


def test_parameters_that_were_replaced_for_good_are_still_refused() -> None:
    net = kfac_fx.compile(network(), (X,), loss="categorical")
    net.model[0] = nn.Linear(4, 5)
    with pytest.raises(ModelChangedError, match="were replaced, added or removed"):
        net(X)


@pytest.mark.slow
def test_other_tensors_under_a_compiler_compute_what_the_model_computes() -> None:
    net = kfac_fx.compile(network(), (X,), loss="categorical", backend="inductor")
    net(X)
    for name in ("others", "ensemble", "examples", "dual numbers"):
        torch.testing.assert_close(OTHERS[name](net), OTHERS[name](network()))
