"""Forwards that take derivatives of a network by its inputs are captured with these derivatives as operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.compiled.jacobian_products import load_forward_mode
from kfac_fx.passes import trace
from kfac_fx.passes.trace import Capture, takes_derivatives, trace_model
from tests.compiler.toy import Toy

X = torch.randn(5, 3)
INSIDE = "inside of torch.func or torch.autograd.forward_ad, which differentiate no tap"
load_forward_mode()


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def by_autograd(x: Tensor, w: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x, w).sum(), x, create_graph=True)
    return slope


def twice(x: Tensor, w: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x, w).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return slope * second


def stopped(x: Tensor, w: Tensor) -> Tensor:
    """Gradients that forward itself stops, in all the ways."""
    x = x.detach().requires_grad_()
    y = layer(x, w)
    with torch.no_grad():
        factor = layer(x, w).sum()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (number,) = torch.autograd.grad(layer(x, w).sum(), x)
    return slope * factor + number + slope.detach() * y.data.mean() + y.mean()


WAYS: list[Callable[[Tensor, Tensor], Tensor]] = [
    by_autograd,
    twice,
    stopped,
    lambda x, w: jvp(lambda x: layer(x, w), (x,), (torch.ones_like(x),))[1],
    lambda x, w: vjp(lambda x: layer(x, w), x)[1](torch.ones(len(x), 2))[0],
    lambda x, w: vmap(grad(lambda row: layer(row, w).sum()))(x),
    lambda x, w: vmap(jacrev(lambda row: layer(row, w)))(x),
    lambda x, w: vmap(jacfwd(lambda row: layer(row, w)))(x),
    lambda x, w: vmap(hessian(lambda row: layer(row, w).sum()))(x),
]


def results(function: Callable[..., Any], weight: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """(what it returns, the gradient of the weight)"""
    out = function(*inputs)
    return out.detach(), torch.autograd.grad(out.square().sum(), weight)[0]


def run(captured: Capture, *args: Any) -> Any:
    module = fx.GraphModule(captured.program.root, captured.program.graph)
    return captured.unflatten(module(*captured.flatten(args, {})))


@pytest.mark.parametrize("way", WAYS)
def test_the_graph_has_the_values_and_the_gradients(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Toy(way, w=(3, 2))
    captured = trace_model(model, (X,))
    for got, wanted in zip(results(lambda *x: run(captured, *x), model.w, X), results(model, model.w, X), strict=True):
        torch.testing.assert_close(got, wanted)
    assert captured.holds((torch.randn(5, 3),), {}) and not captured.holds((torch.randn(4, 3),), {})


@pytest.mark.parametrize("way", [WAYS[n] for n in (0, 2, 3, 5, 8)])
def test_every_use_of_the_weight_is_found_and_proved(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = kfac_fx.compile(Toy(way, w=(3, 2)), (X,), loss="normal", strict=True)
    (one,) = net.registrations
    assert one.layer == "linear" and len(one.uses) >= 2
    for cases in (5, 4):
        assert net.record((torch.randn(cases, 3),), {}).cases == cases


class Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        values = self.net(x)
        (slopes,) = torch.autograd.grad(values.sum(), x, create_graph=True)
        return (slopes.sum(1, keepdim=True) - values).square().mean()


def test_derivatives_without_example_inputs_are_captured_with_the_first_batch() -> None:
    def trained(*examples: Any) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        net = kfac_fx.compile(Equation(), *examples)
        optimizer = kfac_fx.KFAC(net, seed=0)
        for _ in range(3):
            optimizer.zero_grad()
            net(X).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()], [f"{r}: {len(r.uses)}" for r in net.registrations]

    (parameters, blocks), (expected, of_examples) = trained(), trained((X,))
    assert blocks == of_examples and not any("generic" in block for block in blocks)
    assert all(map(torch.equal, parameters, expected))


class Transport(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        values = self.net(torch.cat([x, t], 1))
        (by_x, by_t) = torch.autograd.grad(values, (x, t), torch.ones_like(values), create_graph=True)
        return by_t + values * by_x


def test_derivatives_by_inputs_that_need_gradients_are_captured_without_example_inputs() -> None:
    points = torch.randn(16, 1, requires_grad=True), torch.randn(16, 1, requires_grad=True)

    def trained(*examples: Any) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        net = kfac_fx.compile(Transport(), *examples, loss="mse")
        optimizer = kfac_fx.KFAC(net, seed=0)
        for _ in range(3):
            optimizer.zero_grad()
            net(*points).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()], [f"{r}: {len(r.uses)}" for r in net.registrations]

    (parameters, blocks), (expected, of_examples) = trained(), trained(points)
    assert blocks == of_examples and not any("generic" in block for block in blocks)
    assert all(map(torch.equal, parameters, expected))


class Field(nn.Module):
    """A network that gives back its points, so that others differentiate it by them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        points = x.clone().detach().requires_grad_(True)
        return {"points": points, "values": self.inner(points)}


@pytest.mark.filterwarnings("ignore:the model is certain of its outputs")
@pytest.mark.parametrize("example", [None, (X.double(),)], ids=["symbolic", "exported"])
@pytest.mark.parametrize("named", [False, True])
def test_points_that_forward_returns_may_be_differentiated_by_in_training(example: Any, named: bool) -> None:
    def trained(net: Any) -> Tensor:
        out = net(X.double())
        (slope,) = torch.autograd.grad(out["values"].sum(), out["points"], create_graph=True)
        return (slope - 1).square().mean() + out["values"].square().mean()

    torch.manual_seed(0)
    model = Field().double()
    loss = (lambda outputs: kfac_fx.losses.Normal(outputs["values"])) if named else None
    net = kfac_fx.compile(model, example, loss=loss, strict=True)
    optimizer = kfac_fx.KFAC(net, cov_update_every=1)
    for _ in range(3):
        optimizer.zero_grad()
        trained(net).backward()
        wanted = torch.autograd.grad(trained(model), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        optimizer.step()


class Potential(nn.Module):
    """The gradient of a network with biases, some of whose derivatives vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.last(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.cat([y, slope], 1)


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "last.weight", "last.bias"])
def test_gradients_of_a_case_add_up_over_values_and_derivatives(name: str) -> None:
    model, x, y = Potential().double(), torch.randn(5, 3).double(), torch.randn(5, 4).double()
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"*": "full"})
    found = net.record((x,), {}, mode="empirical", targets=y).statistics[(name,)]["per_case"]
    wanted = []
    for case, target in zip(x, y, strict=True):
        loss = kfac_fx.losses.Normal(model(case[None]), targets=target[None]).evaluate()
        wanted.append(torch.autograd.grad(loss, model.get_parameter(name))[0].flatten())
    torch.testing.assert_close(found, torch.stack(wanted))


def test_only_forwards_that_take_derivatives_are_taken_for_such() -> None:
    taking, drawing = Toy(by_autograd, w=(3, 2)), Toy(lambda x, w: layer(x, w) * torch.rand(()), w=(3, 2))
    failing, writing = Toy(by_autograd, w=(4, 2)), Toy(lambda x, w: layer(x, w).mul_(2.0), w=(3, 2))
    before = torch.random.get_rng_state()
    taken = [takes_derivatives(model, (X,)) for model in (taking, drawing, failing, writing)]
    assert taken == [True, False, False, False]
    assert torch.equal(torch.random.get_rng_state(), before)


class Branching(nn.Module):
    """Derivatives that no graph holds, for what comes after them depends on their values."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.head, self.way = nn.Linear(3, 3), nn.Linear(3, 2), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.way(self.net, x)
        return self.head(y) if y.sum() > -1e9 else y  # type: ignore[no-any-return]


def by_dual_level(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(dual).tangent  # type: ignore[return-value]


@pytest.mark.parametrize(
    "way",
    [
        lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1],
        lambda net, x: vmap(grad(lambda row: net(row).square().sum()))(x),
        lambda net, x: vmap(grad(lambda row: (net(torch.eye(3)) @ row.square()).sum()))(x),
        by_dual_level,
    ],
)
def test_a_submodule_under_torch_func_stays_python_and_says_so(way: Any) -> None:
    net = kfac_fx.compile(Branching(way), (X,), loss="normal")
    assert not net.captures.first.whole
    assert {registration.parameters for registration in net.registrations if not registration.generic} == {
        ("head.weight", "head.bias")
    }
    (reason,) = {
        registration.reason for registration in net.registrations if registration.parameters == ("net.weight",)
    }
    assert reason is not None and reason.startswith("net.weight is read at ") and reason.endswith(INSIDE)
    assert {part.reason for part in net.program.left if part.subject == "net"} == {f"it is called {INSIDE}"}


class Reading(Branching):
    """Derivatives by the inputs, of what Python makes of a parameter."""

    def __init__(self, way: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__(lambda net, x: net(x) + way(lambda x: self.w * x.square(), x))
        self.w = nn.Parameter(torch.randn(3))


@pytest.mark.parametrize(
    "way",
    [
        lambda read, x: jvp(read, (x,), (torch.ones_like(x),))[1],
        lambda read, x: vmap(grad(lambda row: read(row).sum()))(x),
        lambda read, x: grad(lambda x: read(x).sum())(x) + read(x),
        lambda read, x: vmap(grad(lambda row: (read(torch.ones(3)) * row.square()).sum()))(x),
        by_dual_level,
    ],
)
def test_what_python_reads_under_torch_func_stays_python_and_says_so(way: Any) -> None:
    model, y = Reading(way), torch.randn(5, 2)
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert {registration.parameters for registration in net.registrations if not registration.generic} == {
        ("net.weight", "net.bias"),
        ("head.weight", "head.bias"),
    }
    line = Reading.__init__.__code__.co_firstlineno + 1
    (reason,) = {registration.reason for registration in net.registrations if registration.parameters == ("w",)}
    assert reason == f"w is read at test_derivatives.py:{line}, {INSIDE}"
    (wanted,) = torch.autograd.grad(kfac_fx.losses.Normal(model(X), targets=y).evaluate(), model.w)
    recorded = net.record((X,), {}, mode="empirical", targets=y)
    torch.testing.assert_close(recorded.statistics[("w",)]["gradient"], wanted)


class Lagrangian(nn.Module):
    """Cranmer et al. 2020: the Hessian of a network by some of its inputs, behind a sum of several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        def lagrangian(q: Tensor, v: Tensor) -> Tensor:
            return self.net(torch.cat([q, v])).squeeze(-1) + (v**2).sum()

        def acceleration(x: Tensor) -> Tensor:
            q, v = x.chunk(2)
            return torch.linalg.solve(hessian(lagrangian, 1)(q, v), grad(lagrangian)(q, v))

        return vmap(acceleration)(x)


def test_second_derivatives_are_captured_and_leave_torch_as_it_was() -> None:
    """Fakes met zeros of forward mode that are none; torch's error left the process unable to trace anything else."""
    torch.manual_seed(0)
    model, x = Lagrangian(), torch.randn(5, 4)
    net = kfac_fx.compile(model, (x,), loss="normal")
    assert not any(registration.generic for registration in net.registrations)
    assert net.captures.first.whole
    ones = Toy(lambda x, w: x @ w + torch.ones(2), w=(3, 2))
    assert len(kfac_fx.compile(ones, (X,), loss="normal").registrations) == 1
    torch.testing.assert_close(net(x), model(x))


SYMPLECTIC = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])


class Hamiltonian(nn.Module):
    """The field of an energy, with its matrix as a tensor that is neither a parameter nor a buffer."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
        self.matrix = SYMPLECTIC.clone() if attribute else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return slope @ (SYMPLECTIC if self.matrix is None else self.matrix).t()


@pytest.mark.parametrize("attribute", [True, False])
def test_derivatives_may_meet_tensors_of_no_module(attribute: bool) -> None:
    torch.manual_seed(0)
    model, x = Hamiltonian(attribute), torch.randn(5, 2)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    assert net.captures.first.whole and len(net.registrations) == 3
    assert net.record((torch.randn(4, 2),), {}).cases == 4
    torch.testing.assert_close(net(x), model(x))


def test_a_trace_of_derivatives_writes_nothing_and_draws_nothing() -> None:
    """It computes with real tensors."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            y = torch.nn.functional.dropout(self.norm(self.layer(x)), 0.5, self.training)
            return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(5, 3)
    state, seed = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    kfac_fx.compile(model, (x,), loss="normal")
    assert torch.equal(torch.get_rng_state(), seed)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


def test_derivatives_of_a_forward_that_cannot_be_captured_are_refused() -> None:
    def branch(x: Tensor, w: Tensor) -> Tensor:
        y = by_autograd(x, w)
        return y if y.sum() > 0 else 2 * y

    with pytest.raises(UntraceableError, match=r"Replace what depends on the values of tensors"):
        trace_model(Toy(branch, w=(3, 2)), (X,))


# --- values and sizes that depend on data -----------------------------------------------------------------------------


def largest_by_numpy(x: Tensor) -> Any:
    return float(np.abs(x.detach().numpy()).max())


def largest_of_a_list(x: Tensor) -> Any:
    return max(map(max, x.detach().tolist()))


def positive_rows(x: Tensor) -> Any:
    return (x[:, 0] > 0).nonzero().shape[0]


class Forces(nn.Module):
    """The slope of a network by its inputs, times a number that depends on their values."""

    def __init__(self, number: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.number = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), number

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(at).sum(), at, create_graph=True)
        result: Tensor = slope * self.number(x)
        return result


@pytest.mark.parametrize("number", [largest_by_numpy, largest_of_a_list, positive_rows])
def test_numbers_that_a_forward_with_derivatives_reads_are_those_of_every_batch(number: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Forces(number)
    first = torch.randn(8, 3)
    net = kfac_fx.compile(model, (first,), loss="mse")
    opt = kfac_fx.KFAC(net)
    for n in range(3):
        x = first if n == 0 else torch.randn(8, 3) + n / 2
        torch.testing.assert_close(net(x), model(x))
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    assert opt.skipped == 0


def test_a_model_is_not_traced_on_inputs_that_it_does_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace with one case more that fails inside of forward mode can leave the process without autograd."""
    data, modes, make_fx = torch.randn(4), list[str](), trace.make_fx

    def watched(function: Any, tracing_mode: str, **options: Any) -> Any:
        modes.append(tracing_mode)
        return make_fx(function, tracing_mode=tracing_mode, **options)

    monkeypatch.setattr(trace, "make_fx", watched)

    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
            second = vmap(hessian(lambda q: q[0] * q[1] * self.inner(q)[0]))(x)
            return second[:, 1, 1] - second[:, 0, 0], self.inner(observed)[:, 0] - data

    net = kfac_fx.compile(Wave(), (X, torch.randn(4, 3)), loss=lambda out: [kfac_fx.losses.Normal(o) for o in out])
    assert not any(registration.generic for registration in net.registrations)
    assert "real" in modes and "fake" not in modes
