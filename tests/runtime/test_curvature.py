"""Exact Fisher inner products against a dense Jacobian, in both ways of differentiating."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from kfac_fx.compiled import jacobian_products
from kfac_fx.compiled.jacobian_products import (
    JacobianProducts,
    by_dual_numbers,
    fisher_inner_products,
    in_forward_mode,
    products_of_tangents,
)
from kfac_fx.linalg.vectors import RELATIVE, in_reverse_mode_twice
from kfac_fx.losses import Categorical, LossFunction, MultiBernoulli, Normal, NormalMeanVariance
from kfac_fx.passes.errors import LossError
from tests.tables import pairs

Losses = Callable[[tuple[Tensor, ...]], list[tuple[float, LossFunction]]]
LOSSES: dict[str, Losses] = {
    "categorical": lambda y: [(1.0, Categorical(y[0]))],
    "normal": lambda y: [(1.0, Normal(y[0], var=0.7))],
    "multi_bernoulli": lambda y: [(3.0, MultiBernoulli(y[0]))],
    "on a part of the output": lambda y: [(1.0, Categorical(y[0][:, :3].movedim(1, -1)))],
    "two losses": lambda y: [(0.5, Normal(y[0])), (2.0, Categorical(y[0][:, 1:]))],
    "normal_mean_variance": lambda y: [(1.0, NormalMeanVariance(y[0][:, :2], y[0][:, 2:4].exp()))],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


def calling(
    net: nn.Module, x: Tensor, losses: Losses
) -> Callable[[dict[str, Tensor]], list[tuple[float, LossFunction]]]:
    return lambda parameters: losses((functional_call(net, parameters, (x,)),))


def directions(net: nn.Module, count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in net.named_parameters()}
        for _ in range(count)
    ]


def dense_products(net: nn.Module, x: Tensor, losses: Losses, vectors: list[dict[str, Tensor]]) -> Tensor:
    """From the whole Jacobian of each loss's inputs, one basis vector of the outputs after another."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    flat = [torch.cat([v.flatten() for v in vector.values()]) for vector in vectors]
    total = torch.zeros(len(vectors), len(vectors), dtype=x.dtype)
    for number, (coefficient, loss) in enumerate(losses((functional_call(net, parameters, (x,)),))):

        def inputs(p: dict[str, Tensor], number: int = number) -> Tensor:
            return losses((functional_call(net, p, (x,)),))[number][1].inputs

        jacobian = torch.cat([j.reshape(loss.inputs.numel(), -1) for j in jacrev(inputs)(parameters).values()], dim=1)
        pushed = [(jacobian @ d).reshape(loss.inputs.shape) for d in flat]
        for i, a in enumerate(pushed):
            for j, b in enumerate(pushed):
                total[i, j] += coefficient * (a * loss.multiply_fisher(b)).sum() / loss.cases
    return total


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pairs(("losses", LOSSES), ("count", [1, 2, 3]))
def test_inner_products_equal_the_dense_ones(net: Net, x: Tensor, losses: Losses, count: int) -> None:
    vectors = directions(net, count)
    parameters = dict(net.named_parameters())
    products = fisher_inner_products(calling(net, x, losses), parameters, vectors)
    assert not products.requires_grad
    torch.testing.assert_close(products, dense_products(net, x, losses, vectors))


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_reverse_mode_twice_equals_forward_mode(net: Net, x: Tensor, losses: Losses) -> None:
    parameters = dict(net.named_parameters())
    point = tuple(p.detach() for p in parameters.values())
    vectors = directions(net, 2)
    stacked = tuple(torch.stack([v[name] for v in vectors]) for name in parameters)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = functional_call(net, dict(zip(parameters, values, strict=True)), (x,))
        return tuple(loss.inputs for _, loss in losses((outputs,)))

    forward = in_forward_mode(function, point, stacked)
    torch.testing.assert_close(in_reverse_mode_twice(function, point, stacked), forward)
    first = tuple(tangent[:1] for tangent in stacked)
    torch.testing.assert_close(by_dual_numbers(function, point, first), (forward[0], tuple(t[:1] for t in forward[1])))


class Cube(torch.autograd.Function):
    """An operation of a user's, with a backward and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * gradient


def cube(x: Tensor) -> Tensor:
    y: Tensor = Cube.apply(x)  # type: ignore[no-untyped-call]
    return y


class Odd(Net):
    """With `odd` between its layers; some operations know no forward mode."""

    def __init__(self, odd: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.odd(self.first(x)))
        return y


def attention(x: Tensor) -> Tensor:
    y: Tensor = F.scaled_dot_product_attention(x[None], x[None], x[None]).squeeze(0)
    return y


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "custom function": cube,
    "in place": lambda x: torch.zeros_like(x.detach()).add_(x),
    "group norm": lambda x: F.group_norm(x, 2),
}


@pairs(("count", [1, 2]), ("odd", ODD))
def test_operations_without_forward_mode_are_handled(x: Tensor, odd: Callable[[Tensor], Tensor], count: int) -> None:
    torch.manual_seed(0)
    net = Odd(odd).double()
    vectors = directions(net, count)
    losses = LOSSES["categorical"]
    products = fisher_inner_products(calling(net, x, losses), dict(net.named_parameters()), vectors)

    # The oracle: central differences of the outputs, with the error of a double at this step.
    step = 1e-6
    pushed = []
    for vector in vectors:
        ends = [{n: p.detach() + s * step * vector[n] for n, p in net.named_parameters()} for s in (1, -1)]
        plus, minus = (functional_call(net, end, (x,)) for end in ends)
        pushed.append((plus - minus) / (2 * step))
    loss = Categorical(net(x))
    expected = torch.stack([torch.stack([(a * loss.multiply_fisher(b)).sum() / 5 for b in pushed]) for a in pushed])
    torch.testing.assert_close(products, expected.detach(), rtol=1e-7, atol=1e-7)


def test_the_primal_pass_runs_once_for_all_vectors(net: Net, x: Tensor) -> None:
    calls = []

    def losses(parameters: dict[str, Tensor]) -> list[tuple[float, LossFunction]]:
        calls.append(1)
        return calling(net, x, LOSSES["normal"])(parameters)

    fisher_inner_products(losses, dict(net.named_parameters()), directions(net, 3))
    assert len(calls) == 1


def test_running_out_of_memory_is_not_taken_for_a_missing_derivative(net: Net, x: Tensor) -> None:
    def losses(parameters: dict[str, Tensor]) -> list[tuple[float, LossFunction]]:
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        fisher_inner_products(losses, dict(net.named_parameters()), directions(net, 2))


def test_parameters_without_a_direction_are_constants(net: Net, x: Tensor) -> None:
    vectors = directions(net, 2)
    only = [{name: vector[name] for name in ("second.weight", "second.bias")} for vector in vectors]
    padded = [{name: v if name in only[0] else torch.zeros_like(v) for name, v in vector.items()} for vector in vectors]
    parameters, losses = dict(net.named_parameters()), LOSSES["categorical"]
    few = fisher_inner_products(calling(net, x, losses), parameters, only)
    torch.testing.assert_close(few, fisher_inner_products(calling(net, x, losses), parameters, padded))


def test_batch_norm_and_dropout_in_training_mode(x: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double()

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        buffers = {name: value.clone() for name, value in net.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            y: Tensor = functional_call(net, {**parameters, **buffers}, (x,))
            return y

    vectors, parameters = directions(net, 2), dict(net.named_parameters())
    products = fisher_inner_products(lambda p: LOSSES["normal"]((outputs(p),)), parameters, vectors)

    flat = [torch.cat([v.flatten() for v in vector.values()]) for vector in vectors]
    jacobians = jacrev(outputs)({n: p.detach() for n, p in parameters.items()})
    jacobian = torch.cat([j.reshape(20, -1) for j in jacobians.values()], dim=1)
    pushed = torch.stack([jacobian @ d for d in flat])
    torch.testing.assert_close(products, pushed @ pushed.T / (0.7 * 5))


def test_half_precision_parameters_give_single_precision_products() -> None:
    torch.manual_seed(0)
    net = Net().bfloat16()
    vectors = [{n: v.float() for n, v in vector.items()} for vector in directions(net, 2)]
    losses = calling(net, torch.randn(5, 3).bfloat16(), LOSSES["categorical"])
    products = fisher_inner_products(losses, dict(net.named_parameters()), vectors)
    assert products.dtype is torch.float32
    assert products[0, 0] > 0


def test_gauss_newton_products(net: Net, x: Tensor) -> None:
    parameters, vectors = dict(net.named_parameters()), directions(net, 2)
    for name in ("categorical", "normal"):
        products = fisher_inner_products(calling(net, x, LOSSES[name]), parameters, vectors, ggn=True)
        torch.testing.assert_close(products, dense_products(net, x, LOSSES[name], vectors))
    with pytest.raises(LossError, match="no generalized Gauss-Newton factor"):
        fisher_inner_products(calling(net, x, LOSSES["normal_mean_variance"]), parameters, vectors, ggn=True)


def test_the_fallback_is_taken_where_it_is_needed_and_forward_mode_is_tried_once(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            taken.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(jacobian_products, "in_reverse_mode_twice", noted("reverse", in_reverse_mode_twice))
    monkeypatch.setattr(jacobian_products, "in_forward_mode", noted("forward", in_forward_mode))
    for name, odd in ODD.items():
        net, multiply_jacobian = Odd(odd).double(), JacobianProducts()
        losses, parameters = calling(net, x, LOSSES["normal"]), dict(net.named_parameters())
        for _ in range(2):
            fisher_inner_products(losses, parameters, directions(net, 2), multiply_jacobian=multiply_jacobian)
        if name == "custom function":
            assert taken == ["forward", "reverse", "reverse"]
            assert multiply_jacobian.reason is not None
            assert multiply_jacobian.reason.startswith("In order to use an autograd.Function with functorch transforms")
        else:
            assert taken == ["forward", "forward"], name
            assert multiply_jacobian.reason is None
        taken.clear()


def test_a_model_with_a_forward_derivative_of_its_own_tries_dual_numbers_once(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[None] = []

    def noted(*args: Any) -> Any:
        tried.append(None)
        return by_dual_numbers(*args)

    def tangent(y: Tensor) -> Tensor:
        pushed: Tensor = torch.func.jvp(torch.sin, (y,), (y.cos(),))[1]
        return pushed

    monkeypatch.setattr(jacobian_products, "by_dual_numbers", noted)
    torch.manual_seed(0)
    net, multiply_jacobian = Odd(tangent).double(), JacobianProducts()
    plain = Odd(lambda y: y.cos().square()).double()
    plain.load_state_dict(net.state_dict())
    (vector,) = directions(net, 1)
    for _ in range(2):
        nested, expected = (
            fisher_inner_products(
                calling(model, x, LOSSES["normal"]),
                dict(model.named_parameters()),
                [vector],
                multiply_jacobian=products,
            )
            for model, products in ((net, multiply_jacobian), (plain, None))
        )
        torch.testing.assert_close(nested, expected)
    assert len(tried) == 3  # two of the model without
    assert multiply_jacobian.reason is None


def with_ctc(y: Tensor) -> Tensor:
    """A loss of torch with neither a forward-mode derivative nor a second one."""
    ones = torch.ones(len(y), dtype=torch.long)
    loss = F.ctc_loss(y.log_softmax(-1).unsqueeze(0), ones.unsqueeze(1), ones, ones, reduction="none")
    return y + loss.unsqueeze(1)


def test_a_model_without_either_mode_has_differences(x: Tensor) -> None:
    net, multiply_jacobian = Odd(with_ctc).double(), JacobianProducts()
    losses, parameters, vectors = calling(net, x, LOSSES["normal"]), dict(net.named_parameters()), directions(net, 2)
    ((weight, loss),) = losses(parameters)
    outputs, leaves = net(x).flatten(), list(parameters.values())
    rows = [torch.autograd.grad(output, leaves, retain_graph=True, materialize_grads=True) for output in outputs]
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    tangents = jacobian @ torch.stack([torch.cat([part.flatten() for part in v.values()]) for v in vectors], 1)
    wanted = products_of_tangents([(weight, loss)], [tangents.t().reshape(2, *loss.inputs.shape)], ggn=False)
    for _ in range(2):
        found = fisher_inner_products(losses, parameters, vectors, multiply_jacobian=multiply_jacobian)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)
    assert multiply_jacobian.fallbacks() == [
        "the exact quadratic model takes differences of two forwards for every direction, with their rounding error, "
        "because torch has no derivative in forward mode: Trying to use forward AD with _ctc_loss that does not "
        "support it because it has not been implemented yet.\nand none in reverse mode, twice: derivative for "
        "aten::_ctc_loss_backward is not implemented"
    ]


class Once(torch.autograd.Function):
    """It keeps the graph of its forward, as Functions do that save memory. So its backward runs once."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.y = y.detach().requires_grad_()
            ctx.result = ctx.y.sin()
        return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.result, ctx.y, gradient)[0]


def test_differences_are_compared_with_a_backward_that_runs_once(x: Tensor) -> None:
    once, sine = Odd(Once.apply).double(), Odd(torch.sin).double()
    sine.load_state_dict(once.state_dict())
    found, wanted = (
        fisher_inner_products(calling(net, x, LOSSES["normal"]), dict(net.named_parameters()), directions(net, 2))
        for net in (once, sine)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)


def test_differences_that_are_not_those_of_the_backward_are_told_what_to_do(x: Tensor) -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    net = Odd(Straight.apply).double()
    with pytest.raises(RuntimeError) as caught:
        fisher_inner_products(calling(net, x, LOSSES["normal"]), dict(net.named_parameters()), directions(net, 2))
    first, _, *rest = str(caught.value).splitlines()
    assert first == "the exact quadratic model needs products with the Jacobian, and torch has none for this model."
    assert rest == [
        "  in reverse mode, twice: the backward of an autograd.Function is not linear in the gradient, or hides it",
        "  by differences: they are not those of the backward",
        "momentum_type='regular' and 'adam' need none.",
    ]


def test_differences_of_a_function_that_bends_are_shorter() -> None:
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return (30 * y).sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return 30 * (30 * y).cos() * gradient

    def bent(y: Tensor) -> tuple[Tensor, ...]:
        return (Bent.apply(y),)

    point, multiply_jacobian = torch.tensor([0.1, 0.2, 0.3, 2.0]), JacobianProducts()
    wanted = 30 * (30 * point).cos()
    for _ in range(2):
        ((product,),) = multiply_jacobian(bent, (point,), (torch.ones(1, 4),))[1]
        assert float((product - wanted).norm()) <= RELATIVE * float(wanted.norm())
    assert multiply_jacobian.length == 1 / 4


def test_an_operation_of_higher_order_without_a_rule_is_named(x: Tensor) -> None:
    """torch.cond has no rule in the table of its forward derivatives, which is a KeyError of torch."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 5), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.left(x), lambda x: self.right(x), (x,))

    net = Branches().double()
    graph = torch.export.export(net, (x,)).module()
    multiply_jacobian = JacobianProducts()
    losses, parameters = calling(graph, x, LOSSES["normal"]), dict(graph.named_parameters())
    fisher_inner_products(losses, parameters, directions(graph, 2), multiply_jacobian=multiply_jacobian)
    (said,) = multiply_jacobian.fallbacks()
    assert re.search("in forward mode: an operation of higher order has no rule for .*Jvp", said)


def test_constants_of_the_inner_products_leave_no_graph() -> None:
    x, parameters = torch.randn(5, 3), {"w": nn.Parameter(torch.randn(3, 4)), "b": nn.Parameter(torch.randn(4))}
    vectors = [{"w": torch.randn(3, 4)}]
    products = fisher_inner_products(lambda p: [(1.0, Categorical(x @ p["w"] + p["b"]))], parameters, vectors)
    assert products.shape == (1, 1) and not products.requires_grad
