"""A user's autograd.Function in the graph: one operation with the arguments, results and backward that it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import UntraceableError
from kfac_fx.passes.check import check
from kfac_fx.passes.graphs.labels import Label, labels
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import Capture, trace_model
from tests.compiler.toy import Toy, before, code, found, node

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
OLD = torch.__version__ < "2.12"  # where a Function takes no names


class Scaled(torch.autograd.Function):
    """A backward that is none: three times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float, name: str | None = None, *rest: Any) -> Tensor:
        ctx.save_for_backward(x)
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (3 * gradient,) + (None,) * (len(ctx.needs_input_grad) - 1)


class Several(torch.autograd.Function):
    """x and y scaled, None, where x is largest, and a tensor without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, parts: list[Tensor], sizes: tuple[int, ...]) -> Any:
        ctx.x_only = not ctx.needs_input_grad[1]
        noise = sum(parts) * torch.ones(sizes[0], 1)
        ctx.mark_non_differentiable(noise)
        y = x.new_zeros(sizes[0], 2) if y is None else y
        return x + noise, None, x.argmax(1), 2 * y, noise

    @staticmethod
    def backward(ctx: Any, first: Tensor, none: None, largest: Tensor, second: Tensor, noise: Tensor) -> Any:
        return 5 * first, None if ctx.x_only else 7 * second, None, None


class Named(torch.autograd.Function):
    """The newer way of writing one, called by names."""

    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.bernoulli(torch.full_like(gradient, 0.5)) * gradient


class Tripled(torch.autograd.Function):
    """An `apply` of its own, which must not be called twice."""

    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(3 * x)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.apply(*args, **kwargs)


def several(x: Tensor, w: Tensor, y: Tensor | None = None) -> Any:
    a, _, largest, b, noise = apply(Several, x @ w, y, [w.sum(), x.mean()], (x.shape[0], 1))
    return a * b, largest, noise


def branch(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        scale = apply(Scaled, x @ w, 0.5)
    return apply(Scaled, x @ w, 2.0, "name") * scale


MODELS: dict[str, Callable[..., Any]] = {
    "numbers and texts": lambda x, w: apply(Scaled, x @ w, 0.5, "name", None, [1, "two"], {"three": 3}),
    "several": several,
    "several of parameters": lambda x, w: several(x, w, w[:1, :]),
    **({} if OLD else {"by name": lambda x, w: apply(Named, x @ w, power=3)}),
    "by place": lambda x, w: apply(Named, x @ w, 3),
    "by default": lambda x, w: apply(Named, x @ w),
    "random": lambda x, w: F.dropout(apply(Noisy, x @ w)),
    "of a parameter": lambda x, w: x @ apply(Scaled, w, 2.0),
    "without gradients": branch,
    "an apply of its own": lambda x, w: apply(Tripled, x @ w).tanh(),
    "twice": lambda x, w: apply(Scaled, apply(Scaled, x @ w, 2.0), 3.0),
}


def run(captured: Capture, x: Tensor) -> Any:
    module = torch.fx.GraphModule(captured.program.root, captured.program.graph)
    return captured.unflatten(module(*captured.flatten((x,), {})))


def results(function: Callable[[Tensor], Any], x: Tensor, w: Tensor) -> list[Any]:
    """Its outputs, the gradient of w, and the next number of the random stream."""
    torch.manual_seed(3)
    output = function(x)
    output = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward([tensor.sum() for tensor in output if tensor.requires_grad])
    gradient, w.grad = w.grad, None
    return [*output, gradient, torch.rand(1)]


@pytest.mark.parametrize("kind", MODELS)
def test_the_graph_computes_what_the_model_does_and_sends_back_what_it_does(kind: str) -> None:
    model = Toy(MODELS[kind], w=(3, 2))
    captured = trace_model(model, (X,))
    assert sum(op_name(node) == "own_backward" for node in captured.program.graph.nodes) == (
        2 if kind == "twice" else 1
    )
    for x in (X, torch.randn(8, 3)):  # of another size, too
        wanted = results(model, x, model.w)
        for tensor, other in zip(results(lambda x: run(captured, x), x, model.w), wanted, strict=True):
            assert torch.equal(tensor, other) and tensor.requires_grad == other.requires_grad


def test_the_operation_is_named_after_the_function_and_placed_where_it_is_applied() -> None:
    program = before("match", Toy(lambda x, w: apply(Scaled, x @ w, 0.5), w=(3, 2)), X)
    assert code(program) == ["matmul = matmul(x, w)", "scaled = own_backward(matmul)"]
    assert "toy.py" in node(program, "scaled").meta["stack_trace"]


def test_results_without_gradients_are_constants_and_so_is_what_is_inside_of_lists() -> None:
    program = before("match", Toy(several, w=(3, 2)), X)
    label = labels(program.graph, program.parameters)
    called = next(node for node in program.graph.nodes if op_name(node) == "own_backward")
    assert [op_name(node) for node in program.graph.nodes if op_name(node) == "detach"] == ["detach"]
    assert label[called] is Label.ACT and [str(argument) for argument in called.args] == ["matmul"]


def test_a_parameter_that_enters_is_generic_with_the_place_and_the_rest_is_structured() -> None:
    model = Toy(lambda x, w, v, b: F.linear(x, apply(Scaled, w, 2.0), b) @ v, w=(4, 3), v=(4, 2), b=(4,))
    program = before("check", model, X)
    assert found(program) == [("linear", ("b",), 1), ("linear", ("v",), 1), ("generic", ("w",), 0)]
    reason = program.registrations[-1].reason or ""
    assert re.fullmatch(r"enters Scaled at toy.py:\d+, whose backward is its own", reason)


def test_a_parameter_with_other_uses_beside_is_generic_as_a_whole() -> None:
    model = Toy(lambda x, w: (x @ w) @ apply(Scaled, w, 2.0).t(), w=(3, 2))
    (only,) = check(before("check", model, X)).registrations
    assert only.generic and only.reason is not None and only.reason.startswith("w has 2 uses, 1 of them matched")


# --- refused ----------------------------------------------------------------------------------------------------------


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


class Writes(Dirty):
    """The same without a word."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        return x.clone()


class Marks(Dirty):
    """A word and no write, as where only some calls write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x


class ByNumpy(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class Hides(Dirty):
    """A parameter that its backward may send gradients to, unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Any:
        return layer(x)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Objects(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: Holder) -> Any:
        return x * holder.tensor


class Odd(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone(), Holder


class Sized(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Any:
        return x * by


class Nothing(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return 3.0


class Own(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x + 1)


WHERE = r"\(test_tracing_functions.py:\d+\), an autograd.Function that"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "dirty": (
        lambda own, x: apply(Dirty, own.inner(x)),
        f"applies Dirty {WHERE} writes into its arguments\\. A graph cannot call it",
    ),
    "writes": (
        lambda own, x: apply(Writes, own.inner(x)),
        f"applies Writes {WHERE} writes into its arguments\\. A graph",
    ),
    "marks": (
        lambda own, x: apply(Marks, own.inner(x)),
        f"applies Marks {WHERE} writes into its arguments\\. A graph",
    ),
    "numpy": (
        lambda own, x: apply(ByNumpy, own.inner(x)),
        f"applies ByNumpy {WHERE} does not run on tensors without numbers: [A-Za-z]+: .*\\. A graph cannot call it",
    ),
    "hides": (
        lambda own, x: apply(Hides, x, own.inner),
        f"applies Hides {WHERE} reads inner.weight, inner.bias, beside its arguments\\. A graph cannot call it",
    ),
    "objects": (
        lambda own, x: apply(Objects, own.inner(x), Holder(x)),
        f"applies Objects {WHERE} takes a Holder, an object that holds tensors\\. A graph",
    ),
    "odd": (
        lambda own, x: apply(Odd, own.inner(x))[0],
        f"applies Odd {WHERE} returns a type beside tensors\\. A graph",
    ),
    "nothing": (lambda own, x: apply(Nothing, own.inner(x)), f"applies Nothing {WHERE} returns no tensor\\. A graph"),
    "sized": (
        lambda own, x: apply(Sized, own.inner(x), x.shape[0] / 2),
        f"applies Sized {WHERE} takes a number that is computed from sizes\\. A graph",
    ),
    "all": (
        lambda own, x: apply(Dirty, apply(Writes, own.inner(x))),
        f"applies Writes {WHERE} writes into its arguments, and Dirty {WHERE} writes into its arguments\\. A",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_function_that_is_no_operation_is_refused_by_name_with_the_reason(kind: str) -> None:
    use, text = REFUSED[kind]
    with pytest.raises(UntraceableError, match=f"^Own {text}(.|\n)*torch.library.custom_op, register_fake and"):
        trace_model(Own(use), (X,))


def test_without_inputs_it_is_refused_for_its_shapes_are_not_known() -> None:
    with pytest.raises(
        UntraceableError, match="Own uses Scaled, an autograd.Function (.|\n)*Give kfac_fx.compile example inputs, or"
    ):
        trace_model(Own(lambda own, x: apply(Scaled, own.inner(x), 2.0)))


def test_in_a_forward_that_takes_derivatives_it_is_refused() -> None:
    def energy(own: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(apply(Scaled, own.inner(x), 2.0).sum(), x, create_graph=True)
        return force

    with pytest.raises(UntraceableError, match="Own uses Scaled, (.|\n)* differently, and its forward takes derivat"):
        trace_model(Own(energy), (X,))
