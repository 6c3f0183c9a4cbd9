"""Failures that must not become a fallback or another error: no memory, a device that failed, a bug of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx import layer
from kfac_fx.compiled import loss_scale
from kfac_fx.compiled.jacobian_products import JacobianProducts
from kfac_fx.passes.errors import fatal, first_line, out_of_memory
from kfac_fx.passes.expressions import Expressions
from kfac_fx.passes.graphs.labels import labels
from kfac_fx.passes.graphs.operations import bound_parameter
from kfac_fx.passes.ir import Program
from kfac_fx.passes.match import form_graph
from kfac_fx.passes.padding import LENGTH
from kfac_fx.passes.parametrizations.tables import LinearMaps, constant
from kfac_fx.passes.trace import note_sizes, takes_derivatives, trace_model
from kfac_fx.recording import captures, equivalence
from kfac_fx.recording.recorder import Pullback

TOO_MUCH = 1 << 50  # bytes
NO_MEMORY = "can't allocate memory"
OURS = "bug in kfac_fx: a pass lost a node"
X = torch.ones(4, 3)


def bug(*_: Any, **__: Any) -> Any:
    raise AssertionError(OURS)


def greedy(x: Tensor) -> Tensor:
    """Asks for more memory than there is, unless it runs without data."""
    return x + torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)[0]


class Greedy(torch.autograd.Function):
    """An identity whose backward needs more memory than there is."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return greedy(gradient)


def raised(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_memory_and_devices_and_bugs_of_ours_are_fatal() -> None:
    assert fatal(raised(lambda: greedy(torch.zeros(1)))) and fatal(MemoryError()) and fatal(torch.OutOfMemoryError())
    assert fatal(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert fatal(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    assert fatal(AssertionError("bug in kfac_fx: two of one name"))


def test_what_a_model_does_wrong_is_not_fatal() -> None:
    assert not fatal(raised(lambda: torch.zeros(2) @ torch.zeros(3)))
    assert not fatal(AssertionError("inputs must be images")) and not fatal(NotImplementedError())
    assert not fatal(ValueError("out of memory cells")) and not out_of_memory(torch.AcceleratorError("unspecified"))


def test_an_error_is_said_in_one_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(NotImplementedError()) == "NotImplementedError"


def test_cotangents_are_not_sent_back_one_by_one_for_want_of_memory() -> None:
    x = torch.zeros(2, requires_grad=True)
    output: Tensor = Greedy.apply(x)  # type: ignore[no-untyped-call]
    pullback = Pullback([output], [x])
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        pullback([torch.ones(3, 2)])
    assert pullback.loop_reason is None


def test_reverse_mode_is_no_way_out_of_memory() -> None:
    tried: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        tried.append(x)
        return (greedy(x),)

    products = JacobianProducts()
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        products(function, (torch.zeros(2),), (torch.ones(1, 2),))
    assert len(tried) == 1 and products.reason is None


def test_memory_that_only_reverse_mode_lacks_is_said_as_such() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y: Tensor = Greedy.apply(x)  # type: ignore[no-untyped-call]  # knows no forward mode
        return (y,)

    with pytest.raises(RuntimeError, match=NO_MEMORY) as caught:
        JacobianProducts()(function, (torch.zeros(2),), (torch.ones(1, 2),))
    assert "momentum_type" not in str(caught.value)


class Model(nn.Module):
    """A linear layer behind `before`."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.fc = before, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.before(x))
        return y


def test_rows_that_take_too_much_memory_do_not_make_a_layer_generic() -> None:
    @layer(
        rows=lambda input, attrs: greedy(input).unsqueeze(1),
        grad_rows=kfac_fx.as_rows,
        layouts={"weight": "o i -> o i"},
        example=lambda: (nn.Linear(3, 2, bias=False), torch.ones(2, 3)),
    )
    def hungry(input: Tensor, *, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, weight).relu()

    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        kfac_fx.compile(model, (torch.ones(4, 3),), loss="normal", layers=[hungry])


def test_a_model_without_memory_to_run_is_neither_divided_nor_called_untraceable() -> None:
    def value(x: Tensor) -> Tensor:  # which no graph holds, so that the model itself runs
        return greedy(x) if x.sum().item() > 0 else x

    with pytest.raises(RuntimeError, match=NO_MEMORY):
        kfac_fx.compile(Model(value), (torch.ones(4, 3),), loss="normal")


@pytest.mark.parametrize("example", [(X,), None])
def test_a_bug_of_ours_is_not_taken_for_the_model_s(example: tuple[Tensor] | None) -> None:
    with pytest.raises(AssertionError, match=OURS):
        kfac_fx.compile(Model(bug), example, loss="normal")


# --- each place that catches errors, by itself: the next one would hide that it let them through ---------------------


def interpolate(table: Tensor) -> Tensor:
    """By its name, an operation that mixes the entries of a table."""
    return greedy(table)


def table_made_by_it() -> tuple[nn.Module, fx.Node]:
    root, graph = nn.Module(), fx.Graph()
    root.register_parameter("table", nn.Parameter(torch.ones(3, 2)))
    return root, graph.call_function(interpolate, (graph.get_attr("table"),))


def matrix_of_a_table() -> object:
    root, made = table_made_by_it()
    return LinearMaps(made.graph, labels(made.graph, ["table"]), root).of(made)


def constant_indices() -> object:
    root, made = table_made_by_it()
    return constant(made, root, {})  # no node is an activation


def rows_of_a_mask() -> object:
    """Rows that take too much memory where they are tried, on `LENGTH` cases."""

    @layer(
        rows=kfac_fx.as_rows,
        grad_rows=lambda dy, attrs: kfac_fx.as_rows(greedy(dy) if len(dy) == LENGTH else dy, attrs),
        example=lambda: (nn.Linear(3, 2, bias=False), torch.ones(2, 3)),
    )
    def hungry(input: Tensor, *, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, weight).relu()

    model, x = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU()), torch.ones(4, 5, 3)
    return kfac_fx.compile(model, (x,), loss="normal", layers=[hungry], padding_mask=lambda x: x[..., 0] != 0)


def viewed(error: Callable[[], object]) -> fx.Node:
    """A node of a view of the parameter `weight`, whose computation raises an error."""

    def reshape(*_: Any) -> object:
        return error()

    graph = fx.Graph()
    return graph.call_function(reshape, (graph.get_attr("weight"), (6,)))


def layout_of_a_view() -> object:
    return bound_parameter(viewed(lambda: greedy(X)), {"weight": (3, 2)})


def expressed(error: Callable[[], object]) -> Expressions:
    model, node = nn.Linear(2, 3), viewed(error)
    return Expressions(Program(node.graph, model, dict(model.named_parameters()), {"weight": "weight"}))


def expression_of_parameters() -> object:
    return expressed(lambda: greedy(X))


LOOKS = [matrix_of_a_table, constant_indices, rows_of_a_mask, layout_of_a_view, expression_of_parameters]


@pytest.mark.parametrize("look", LOOKS)
def test_what_there_is_no_memory_to_look_at_is_not_taken_for_something_else(look: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        look()


@pytest.mark.parametrize("kind", [AttributeError, KeyError, IndexError, AssertionError])
def test_an_error_that_only_a_bug_of_ours_can_be_does_not_make_a_parameter_generic(kind: type[Exception]) -> None:
    def wrong() -> object:
        raise kind(OURS)

    with pytest.raises(kind, match=OURS):
        expressed(wrong)


def failing_form() -> object:
    @layer(rows=kfac_fx.as_rows, grad_rows=kfac_fx.as_rows, example=lambda: (nn.Linear(3, 2), X))
    def broken(input: Tensor, *, weight: Tensor) -> Tensor:
        return bug()  # type: ignore[no-any-return]

    return form_graph(broken, broken.forms[0])


def failing_export_of_derivatives() -> object:
    """Which would succeed in the way that is taken for derivatives."""

    def slope(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.requires_grad_().square().sum(), x, create_graph=True)
        return bug() if torch.compiler.is_exporting() else found  # type: ignore[no-any-return]

    return trace_model(Model(slope), (X,))


CAUGHT: dict[str, Callable[[], object]] = {
    "an export": lambda: trace_model(Model(bug), (X,)),
    "an export of derivatives": failing_export_of_derivatives,
    "whether forward takes derivatives": lambda: takes_derivatives(Model(bug), (X,)),
    "a batch of one case more": lambda: note_sizes(fx.symbolic_trace(nn.Identity()), bug, [X]),
    "a form": failing_form,
    "a mask of padding": lambda: kfac_fx.compile(Model(torch.relu), (X,), loss="normal", padding_mask=bug),
}


@pytest.mark.parametrize("trace", CAUGHT.values(), ids=CAUGHT.keys())
def test_a_bug_of_ours_that_shows_in_a_trace_is_not_taken_for_something_else(trace: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match=OURS):
        trace()


def test_a_bug_of_ours_in_a_division_is_not_taken_for_inputs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "divide", bug)
    with pytest.raises(AssertionError, match=OURS):
        kfac_fx.compile(Model(lambda x: x if x.sum().item() > 0 else -x), (X,), loss="normal")


def test_a_graph_without_memory_to_run_is_not_called_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "results_of_graph", lambda *_: greedy(torch.zeros(1)))
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        kfac_fx.compile(nn.Linear(3, 2), (X,), loss="normal")


class OwnLoss(nn.Module):
    """Returns its loss, so that the Fisher's output is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.fc(x), y)


def first_step(monkeypatch: pytest.MonkeyPatch, within: Callable[..., Any]) -> kfac_fx.KFAC:
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    net = kfac_fx.compile(OwnLoss(), (x, y))
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    monkeypatch.setattr(loss_scale, "within", within)
    net(x, y).backward()
    opt.step()
    return opt


def test_a_loss_that_there_is_no_memory_to_look_at_is_told_and_trained_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opt = first_step(monkeypatch, lambda *_: greedy(torch.zeros(1)))
    (said,) = opt.net.report.to_dict()["fallbacks"]  # type: ignore[attr-defined]
    assert said.startswith("whether the training loss is the registered one was not checked") and opt.counter == 1


def test_another_error_of_looking_at_the_loss_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        first_step(monkeypatch, lambda *_: torch.zeros(2, 2) @ torch.zeros(3, 3))


# --- batches and inverses of an estimator that fail -----------------------------------------------------------------


def an_estimator(**options: Any) -> kfac_fx.FisherEstimator:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net = kfac_fx.compile(model, loss="categorical")
    return kfac_fx.FisherEstimator(net, **{"damping": 0.1, "estimation_mode": "exact", **options})


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_a_batch_that_is_not_finite_leaves_the_others_that_are_folded_with_it(wrong: int) -> None:
    batches = list(torch.randn(4, 6, 4, dtype=torch.float64))
    est, without = (an_estimator(compute_params_stats=True, **options) for options in ({"batch_size": 24}, {}))
    for number, x in enumerate(batches):
        est.update_covariances(torch.full_like(x, torch.nan) if number == wrong else x, fold=False)
        if number != wrong:
            without.update_covariances(x, fold=False)
    assert est.fold() and without.fold()
    states = est.state_dict(), without.state_dict()
    skipped = {name for name in states[0] if name.endswith("/skipped")}
    assert len(skipped) == 2 and all(states[0][name] == 1 for name in skipped)
    for name in states[1].keys() - skipped:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0)
    torch.testing.assert_close(est.params_stats, without.params_stats, rtol=0, atol=0)
    assert est.params_stats


def test_batches_that_are_all_not_finite_change_nothing() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    est = an_estimator()
    est.update_covariances(x)
    before = {name: value.clone() for name, value in est.state_dict().items() if "/skipped" not in name}
    for _ in range(2):
        est.update_covariances(x * torch.nan, fold=False)
    est.fold()
    after = est.state_dict()
    torch.testing.assert_close({name: after[name] for name in before}, before, rtol=0, atol=0)
    assert est.failures.updates >= 4


@pytest.mark.parametrize("cause", ["no damping and one case", "only NaN"])
def test_products_with_an_inverse_that_never_was_are_an_error(cause: str) -> None:
    est = an_estimator(damping=0.0 if cause == "no damping and one case" else 0.1)
    vector = {name: torch.ones_like(parameter) for name, parameter in est.net.named_parameters()}
    x = torch.randn(1, 4, dtype=torch.float64)
    est.update_covariances(x if cause == "no damping and one case" else x * torch.nan)
    est.update_inverses()
    for _ in range(2):  # an update that fails again changes nothing
        with pytest.raises(
            kfac_fx.FactorNotReady, match=r"have no inverse:\n  linear\(0\.weight, .*\n(.*\n)+.* larger damping"
        ):
            est.multiply_inverse(vector)
        est.update_inverses()
    est.damping = 0.1
    est.update_covariances(torch.randn(6, 4, dtype=torch.float64))
    est.update_inverses()
    product = est.multiply_inverse(vector)
    assert all(bool(value.any()) for value in product.values())
    est.update_covariances(x * torch.nan)
    est.damping.fill_(torch.nan)
    est.update_inverses()  # it fails, and the last one is kept
    torch.testing.assert_close(est.multiply_inverse(vector), product)
