"""Models with autograd.Functions of their own: what is recorded is of their backwards, whatever their forwards say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from tests.zoo.functions import Binary, Reversed

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Standardized(torch.autograd.Function):
    """Batch normalization, which mixes cases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = F.batch_norm(ctx.x, None, None, training=True)
        y: Tensor = ctx.y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)[0]


class Talking(torch.autograd.Function):
    """Operations that no compiler takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        print(end="")
        return 3 * gradient


def apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class Net(nn.Module):
    """Two layers around a Function; the second is binarized in the forward."""

    def __init__(self, function: Any = Reversed, *arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(apply(self.function, self.first(x), *self.arguments))
        return F.linear(h, apply(Binary, self.second.weight), self.second.bias)


def reversing() -> Net:
    return Net(Reversed, 0.5)


def dense(model: nn.Module, name: str) -> Tensor:
    """The Fisher of a categorical distribution, with the gradient of every case and every target by itself."""
    parameter = model.get_parameter(name)
    total = torch.zeros(parameter.numel(), parameter.numel())
    for x in X:
        log_p = model(x[None]).log_softmax(1)[0]
        for term in log_p:
            (gradient,) = torch.autograd.grad(term, parameter, retain_graph=True)
            total += term.exp().detach() * torch.outer(gradient.flatten(), gradient.flatten())
    return total / len(X)


def test_the_fisher_has_the_gradients_of_the_backward_that_the_model_has() -> None:
    model = reversing()
    net = kfac_fx.compile(
        model, (X,), loss="categorical", linked=[("first.weight",), ("second.bias",)], approximations={"*": "full"}
    )
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(X)
    for name in ("first.weight", "second.bias"):
        torch.testing.assert_close(estimator.blocks[name,].full_fisher_block(), dense(model, name))
    plain = copy.deepcopy(model)
    plain.function, plain.arguments = Talking, ()  # another backward, and another Fisher
    assert not torch.allclose(dense(plain, "first.weight"), dense(model, "first.weight"), rtol=0.1)


def test_a_weight_that_enters_one_is_generic_with_the_square_of_its_own_gradient() -> None:
    model, targets = reversing(), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (X,), loss="categorical")
    (only,) = [registration for registration in net.registrations if registration.generic]
    assert only.parameters == ("second.weight",)
    assert only.reason is not None and only.reason.startswith("enters Binary at test_own_backwards.py:")
    moments = net.record((X,), {}, mode="empirical", targets=targets)
    loss = F.cross_entropy(model(X), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, model.second.weight)
    torch.testing.assert_close(moments.statistics[only.parameters]["gradient"], gradient.flatten())


def test_one_that_mixes_cases_is_what_batch_normalization_is() -> None:
    """A gradient row of a case is that of the loss summed over all cases, in both."""

    class Plain(Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(F.batch_norm(self.first(x), None, None, training=True))
            return F.linear(h, apply(Binary, self.second.weight), self.second.bias)

    found = []
    for model in (Net(Standardized), Plain()):
        net = kfac_fx.compile(model, (X,), loss="normal", approximations={"linear": "diagonal"})
        assert [registration.layer for registration in net.registrations] == ["linear", "linear", "generic"]
        assert net.recorder((X,), {}).whole
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        estimator.update_covariances(X)
        found.append([factor.value for block in estimator.blocks.values() for factor in block.factors.values()])
    for tensor, other in zip(*found, strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_training_is_that_of_the_model_and_nothing_is_left_behind(mode: str) -> None:
    model, targets = reversing(), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=1e-2, estimation_mode=mode)
    for _ in range(3):
        wanted = copy.deepcopy(model)
        F.cross_entropy(wanted(X), targets).backward()
        optimizer.zero_grad()
        F.cross_entropy(net(X), targets).backward()
        for parameter, other in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=0)
        optimizer.step()
    assert optimizer.fallbacks() == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any Function
def test_a_compiled_recording_is_the_plain_one() -> None:
    found = []
    for backend in ("eager", "aot_eager"):
        net = kfac_fx.compile(reversing(), (X,), loss="categorical", backend=backend)
        moments = net.record((X,), {}, mode="empirical", targets=torch.arange(6) % 3)
        found.append([value for statistic in moments.statistics.values() for value in statistic.values()])
        assert net.report.to_dict()["fallbacks"] == []
    for tensor, other in zip(*found, strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_no_compiler_takes_is_recorded_without_one_with_the_reason() -> None:
    found = []
    for backend in ("eager", "aot_eager"):
        net = kfac_fx.compile(Net(Talking), (X,), loss="categorical", backend=backend)
        moments = net.record((X,), {}, mode="empirical", targets=torch.arange(6) % 3)
        found.append([value for statistic in moments.statistics.values() for value in statistic.values()])
    for tensor, other in zip(*found, strict=True):
        assert torch.equal(tensor, other)
    (said,) = net.report.to_dict()["fallbacks"]
    assert said.startswith("recordings are not compiled: aot_eager cannot compile an autograd.Function in it: ")


class Linear(torch.autograd.Function):
    """A linear layer, as tutorials write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x @ weight.t() + bias, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class OfLinear(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.inner, self.last = function, nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y, _ = apply(self.function, x, self.inner.weight, self.inner.bias)
        return self.last(torch.tanh(y))


def test_a_backward_that_is_declared_plain_is_traced_through_and_its_parameters_are_structured() -> None:
    own = kfac_fx.compile(OfLinear(Linear), (X,), loss="categorical")
    assert {registration.parameters for registration in own.registrations if registration.generic} == {
        ("inner.weight",),
        ("inner.bias",),
    }

    @kfac_fx.plain_backward
    class Plain(Linear):
        pass

    net = kfac_fx.compile(OfLinear(Plain), (X,), loss="categorical", strict=True)
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    reference.load_state_dict(dict(zip(reference.state_dict(), OfLinear(Plain).state_dict().values(), strict=True)))
    its = kfac_fx.compile(reference, (X,), loss="categorical")
    found = [model.record((X,), {}, mode="empirical", targets=torch.arange(6) % 3).statistics for model in (net, its)]
    for statistic, other in zip(found[0].values(), found[1].values(), strict=True):
        for name in statistic:
            torch.testing.assert_close(statistic[name], other[name])


def test_a_backward_that_is_declared_plain_and_is_not_is_refused_by_its_gradients() -> None:
    @kfac_fx.plain_backward
    class Lie(Linear):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: None) -> Any:
            return tuple(-gradient_part for gradient_part in Linear.backward(ctx, gradient, None))

    net = kfac_fx.compile(OfLinear(Lie), (X,), loss="categorical")
    assert not net.recorder((X,), {}).whole
    (said, *_) = net.program.left
    assert said.subject == "OfLinear"
    assert said.reason == "it has other gradients than its graph, in inner.weight, inner.bias."
    assert {registration.parameters for registration in net.registrations if registration.generic} == {
        ("inner.weight",),
        ("inner.bias",),
    }


class Detached(torch.autograd.Function):
    """A backward that hides its gradient from a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient.data


class Clipped(Detached):
    """A backward that is not linear."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-0.1, 0.1)


def quadratic(model: nn.Module, x: Tensor = X) -> kfac_fx.KFAC:
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=None, momentum=None, momentum_type="qmodel", damping=1e-2)
    F.cross_entropy(net(x), torch.arange(6) % 3).backward()
    optimizer.step()
    return optimizer


def test_the_quadratic_model_runs_in_reverse_mode_twice_with_the_reason() -> None:
    (said,) = quadratic(reversing()).fallbacks()
    assert said.startswith("the exact quadratic model runs in reverse mode twice")


@pytest.mark.parametrize("function", [Detached, Clipped])
def test_a_backward_that_is_no_linear_map_of_its_gradient_has_no_quadratic_model(function: Any) -> None:
    with pytest.raises(
        RuntimeError, match="reverse mode, twice: the backward of an autograd.Function is not linear in t"
    ):
        quadratic(Net(function))


def test_a_hidden_gradient_shows_where_its_part_of_a_sum_of_outputs_is_almost_zero() -> None:
    torch.manual_seed(53)
    x = torch.randn(6, 3)
    torch.manual_seed(1053)
    with pytest.raises(RuntimeError, match="is not linear in t"):
        quadratic(Net(Detached), x)


class Equilibrium(nn.Module):
    """z = tanh(w z + u x), whose hook solves for the gradient, and writes in place, so that it has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        with torch.no_grad():
            self.w.weight.mul_(0.3)

    def inside(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.w(z) + self.u(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = x.new_zeros(len(x), 4)
            for _ in range(40):
                z = self.inside(z, x)
        z = self.inside(z, x)
        at = z.detach().requires_grad_()
        value = self.inside(at, x)

        def solve(gradient: Tensor) -> Tensor:
            solutions = gradient.new_zeros(41, *gradient.shape)
            for k in range(40):
                (behind,) = torch.autograd.grad(value, at, solutions[k], retain_graph=True)
                solutions[k + 1] = behind + gradient
            return solutions[40]

        if z.requires_grad:
            z.register_hook(solve)
        out: Tensor = self.head(z)
        return out


def test_an_equilibrium_model_trains_by_default_with_the_reason() -> None:
    torch.manual_seed(0)
    model, targets = Equilibrium(), torch.arange(6) % 3
    net = kfac_fx.compile(model, (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, exact_steps=False)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    (said,) = quadratic(Equilibrium()).fallbacks()
    assert said.startswith("the exact quadratic model takes differences of two forwards for every direction")


class Recomputing(torch.autograd.Function):
    """A residual whose backward runs the module again, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.x, ctx.module, ctx.parameters = x, module, parameters
        with torch.no_grad():
            return x + module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            of_x, *rest = torch.autograd.grad(x + ctx.module(x), (x, *ctx.parameters), gradient)
        return of_x, None, *rest


class Reversible(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.head, self.function = nn.Linear(3, 3), nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(apply(self.function, x, self.inside, *self.inside.parameters()))
        return y


class Accumulating(torch.autograd.Function):
    """Its backward adds to the gradients of the parameters, as those of RevTorch and of its descendants do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.x, ctx.module = x, module
        with torch.no_grad():
            return x + module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(x + ctx.module(x), gradient)
        return x.grad, *[None] * (1 + len([*ctx.module.parameters()]))


def test_a_backward_that_adds_to_gradients_has_the_gradients_of_what_is_declared() -> None:
    kfac_fx.plain_function(Accumulating, lambda x, module, *parameters: x + module(x))
    model = Reversible(Accumulating)
    kept = model.inside.weight.grad = torch.ones(3, 3)
    net = kfac_fx.compile(model, (X,), loss="mse", strict=True)
    assert [row.approximation for row in net.report.rows] == ["kron", "kron"]
    assert model.inside.weight.grad is kept and bool((kept == 1).all()) and model.inside.bias.grad is None
    optimizer, losses = kfac_fx.KFAC(net), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_backward_that_runs_modules_again_is_told_what_to_declare() -> None:
    with pytest.raises(kfac_fx.UntraceableError) as caught:
        kfac_fx.compile(Reversible(Recomputing), (X,), loss="mse")
    advice = str(caught.value).splitlines()[-1]
    assert advice == (
        "A recording runs on other tensors than the parameters, and a backward of an autograd.Function that runs "
        "modules again, as those of reversible layers and of adjoint solvers do, finds the parameters in them. Say "
        "what the Function computes: kfac_fx.plain_function(MyFunction, lambda *arguments: ...). Or let autograd take "
        "the gradient, as with odeint for the odeint_adjoint of torchdiffeq, and adjoint=False for torchcde and "
        "torchsde."
    )

    class Declared(Recomputing):
        """Declarations are of a class."""

    kfac_fx.plain_function(Declared, lambda x, module, *parameters: x + module(x))
    model = Reversible(Declared)
    plain = copy.deepcopy(model)
    net = kfac_fx.compile(model, (X,), loss="mse", strict=True)
    assert [row.approximation for row in net.report.rows] == ["kron", "kron"]
    for of in (net, plain):
        of(X).square().mean().backward()
    for parameter, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)


class Adjoint(torch.autograd.Function):
    """A residual whose backward runs the module again, as adjoint solvers do. A tensor that the module does not compute
    with has the gradient zero, so on copies of the parameters all of them are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return x + module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inputs = x, *parameters
            of_x, *rest = torch.autograd.grad(x + ctx.module(x), inputs, gradient, allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, rest, strict=True))
        return of_x, None, *zeros


class SolvedInPython(Reversible):
    """No single graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.isfinite().all()) else x


def test_a_backward_that_finds_no_copies_of_parameters_is_no_hook() -> None:
    with pytest.raises(kfac_fx.UntraceableError) as caught:
        kfac_fx.compile(SolvedInPython(Adjoint), (X,), loss="mse")
    first, advice = str(caught.value).splitlines()
    assert first == (
        "the gradients of SolvedInPython for inside.weight, inside.bias are others where it runs on copies of its "
        "parameters."
    )
    assert "adjoint=False for torchcde" in advice


def test_what_a_function_computes_is_declared_for_a_divided_model_too() -> None:
    class Declared(Adjoint):
        """Declarations are of a class."""

    kfac_fx.plain_function(Declared, lambda x, module, *parameters: x + module(x))
    net = kfac_fx.compile(SolvedInPython(Declared), (X,), loss="mse", strict=True)
    assert [row.approximation for row in net.report.rows] == ["kron", "kron"]
    whole = kfac_fx.compile(Reversible(Declared), (X,), loss="mse", strict=True)
    for key, of_whole in whole.record((X,), {}, mode="exact").statistics.items():
        for name, value in net.record((X,), {}, mode="exact").statistics[key].items():
            torch.testing.assert_close(value, of_whole[name])
