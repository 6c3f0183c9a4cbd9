"""The tap: an identity, whose backward leaves statistics of its rows in the probes' gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.approximations import PER_CASE, STATISTICS, A, G
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted_submodules import copy_of_tapped
from kfac_fx.recording.statistics import sum_of
from kfac_fx.recording.taps import Tap, is_tapped, make_probes, saves_time, sums_of, tap_function, without_aliases
from tests.compiler.toy import Toy

X = torch.randn(5, 7, 3)
NAMES = ("count", "A", "G", "gradient", "per_case")


def registered(model: nn.Module, *inputs: Any) -> Registration:
    (registration,) = run(trace_model(model, inputs or None, layers=LAYERS).program).registrations
    return registration


def tap_of(registration: Registration, use: int = 0) -> Tap:
    return Tap(registration, registration.uses[use], LAYERS[registration.uses[use].layer])


def through(
    registration: Registration,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    names: tuple[str, ...] = NAMES,
    cases: int = 5,
) -> dict[str, Tensor]:
    """The probes' gradients after a backward of `(output * weight).sum()` through the tap of the only use."""
    probes = make_probes(registration, names, cases, output)
    (tap_of(registration)(output, input, probes) * weight).sum().backward()
    return {name: probe.grad for name, probe in probes.items() if probe.grad is not None}


def test_a_tap_returns_its_output_and_passes_the_gradient_on() -> None:
    registration = registered(nn.Linear(3, 2))
    output = torch.randn(5, 2, requires_grad=True)
    tap = tap_of(registration)
    assert tap(output, X[:, 0], None) is output and tap(output, X[:, 0], {}) is output
    probes = make_probes(registration, ("A",), 5, output)
    tapped = tap(output, X[:, 0], probes)
    assert torch.equal(tapped, output) and tapped.data_ptr() == output.data_ptr()
    weight = torch.randn(5, 2)
    (grad,) = torch.autograd.grad(tapped, output, weight)
    assert torch.equal(grad, weight)
    assert probes["A"].grad is None


def test_the_output_of_a_tap_is_told_from_that_of_a_function_of_the_same_name() -> None:
    class TapFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    registration = registered(nn.Linear(3, 2))
    output = torch.randn(5, 2, requires_grad=True)
    tapped, other = (
        tap_of(registration)(output, X[:, 0], make_probes(registration, ("A",), 5, output)),
        TapFunction.apply(output),
    )
    assert is_tapped(tapped) and copy_of_tapped(tapped) is not tapped and torch.equal(copy_of_tapped(tapped), tapped)
    assert not is_tapped(other) and copy_of_tapped(other) is other
    assert not is_tapped(output) and copy_of_tapped(output) is output


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (5, 7, 3), (5, 2, 4, 3)])
def test_probes_hold_the_statistics_of_the_rows(shape: tuple[int, ...], bias: bool) -> None:
    model = nn.Linear(3, 2, bias=bias)
    x, weight = torch.randn(shape), torch.randn(*shape[:-1], 2)
    statistics = through(registered(model), model(x), x, weight)
    rows, grad_rows = x.reshape(5, -1, 3), weight.reshape(5, -1, 2)
    assert list(statistics) == list(NAMES)
    for name, value in statistics.items():
        expected = sum_of(name, rows, grad_rows, bias, (1, 2, 3 + bias))
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    grads = [model.weight.grad, *([model.bias.grad[:, None]] if bias else [])]  # type: ignore[index]
    torch.testing.assert_close(statistics["gradient"][0], torch.cat(grads, dim=1))  # type: ignore[arg-type]


def test_a_probe_without_gradient_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = registered(nn.Linear(3, 2))
    output = torch.randn(5, 2, requires_grad=True)
    probes = make_probes(registration, ("A", "per_case"), 5, output)
    probes["per_case"].requires_grad_(False)
    uncomputed = copy.copy(PER_CASE)
    uncomputed.function = None
    monkeypatch.setitem(STATISTICS, "per_case", uncomputed)
    tap_of(registration)(output, X[:, 0], probes).sum().backward()
    assert probes["A"].grad is not None and probes["per_case"].grad is None


def test_a_probe_that_enters_several_taps_sums_over_uses() -> None:
    model = nn.Sequential(first := nn.Linear(3, 3), nn.Tanh(), first)
    registration = registered(model)
    probes = make_probes(registration, ("count", "gradient"), 5, X)
    x = X[:, 0]
    h = tap_of(registration, 0)(first(x), x, probes).tanh()
    tap_of(registration, 1)(first(h), h, probes).square().sum().backward()
    assert probes["count"].grad == 10
    assert first.weight.grad is not None and first.bias.grad is not None
    expected = torch.cat([first.weight.grad, first.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(probes["gradient"].grad, expected[None])


def test_cases_in_another_dimension_come_first() -> None:
    model = Toy(lambda x, w: (x @ w).mean(0), w=(3, 2))
    registration = registered(model, X.transpose(0, 1))
    assert registration.uses[0].batch_dim == 1
    x, weight = X.transpose(0, 1), torch.randn(7, 5, 2)
    statistics = through(registration, x @ model.w, x, weight)
    expected = sum_of("per_case", X, weight.transpose(0, 1), False, (1, 2, 3))
    torch.testing.assert_close(statistics["per_case"], expected)


def test_a_transposed_use_changes_sides() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids), self.table.weight)

    model = Tied()
    registration = registered(model)
    assert [use.transposed for use in registration.uses] == [False, True]
    h = X[:, 0].clone().requires_grad_()
    output = F.linear(h, model.table.weight)
    probes = make_probes(registration, ("A", "G", "gradient"), 5, output)
    tap_of(registration, 1)(output, h, probes).square().sum().backward()
    assert probes["A"].shape == (1, 6, 6) and probes["G"].shape == (1, 3, 3)
    torch.testing.assert_close(probes["G"].grad, (h.mT @ h)[None])
    assert model.table.weight.grad is not None
    torch.testing.assert_close(probes["gradient"].grad, model.table.weight.grad.mT[None])


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, b: x + b, {"b": (3,)}),
        (lambda x, w, b: F.linear(torch.tanh(F.linear(x, w, b)), w), {"w": (3, 3), "b": (3,)}),
    ],
)
def test_a_bias_alone_has_rows_of_its_column_only(function: Callable[..., Tensor], shapes: dict[str, Any]) -> None:
    registrations = run(trace_model(Toy(function, **shapes), layers=LAYERS).program).registrations
    registration = next(registration for registration in registrations if registration.parameters == ("b",))
    weight = torch.randn(5, 3)
    statistics = through(
        registration, torch.randn(5, 3, requires_grad=True), X[:, 0], weight, ("count", "A_diag", "gradient")
    )
    assert statistics["count"] == 5
    torch.testing.assert_close(statistics["gradient"].flatten(), weight.sum(0))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_statistics_are_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    x = X[:, 0].to(dtype)
    statistics = through(registered(model), model(x), x, torch.randn(5, 2, dtype=dtype))
    assert {value.dtype for value in statistics.values()} == {expected}


def test_rows_are_rounded_as_the_layer_rounds_them_under_autocast() -> None:
    model, x, weight = nn.Linear(3, 2), X[:, 0], torch.randn(5, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert output.dtype is torch.bfloat16
    statistics = through(registered(model), output, x, weight, ("A", "gradient"))
    rows = x.bfloat16().float()
    torch.testing.assert_close(statistics["A"][0, :-1, :-1], rows.mT @ rows)
    torch.testing.assert_close(statistics["gradient"][0, :, :-1], weight.float().mT @ rows)
    assert not torch.equal(rows, x)


@pytest.mark.parametrize("blocks", [1, 2])
def test_an_output_side_in_blocks_needs_no_patches_either(blocks: int) -> None:
    def no_rows(*_: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("the rows were made")

    def short(output_grad: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(3)[None], output_grad

    sums = sums_of(no_rows, (1, 2, 3), False, None, None, None, 0, short)
    output_grad, name = torch.randn(5, 7, 2), G.in_blocks(blocks).name
    value = sums(("count", "A", name), output_grad, X, ())(name)
    torch.testing.assert_close(value, sum_of(name, output_grad, output_grad, False, (1, 2, 3)))


def test_the_short_way_saves_time_except_for_halves_on_cuda_and_compiled_code_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def saves(is_cuda: bool, dtype: torch.dtype) -> bool:
        return saves_time(cast(Any, SimpleNamespace(is_cuda=is_cuda, dtype=dtype)))

    half, single = torch.bfloat16, torch.float32
    assert saves(False, half) and saves(False, single) and saves(True, single) and not saves(True, half)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert saves(False, single) and not saves(True, single)


def test_statistics_are_those_without_autocast() -> None:
    registration, output, weight = registered(nn.Linear(3, 2)), torch.randn(5, 2, requires_grad=True), torch.randn(5, 2)
    expected = through(registration, output, X[:, 0], weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = through(registration, output, X[:, 0], weight)
    assert computed.keys() == expected.keys() and all(torch.equal(computed[name], expected[name]) for name in expected)


def test_probes_take_no_memory() -> None:
    registration = registered(nn.Linear(3, 2))
    probes = make_probes(registration, ("A", "per_case"), 5, X)
    assert [tuple(probe.shape) for probe in probes.values()] == [(1, 4, 4), (5, 8)]
    assert all(probe.untyped_storage().nbytes() == 4 and probe.is_leaf for probe in probes.values())


def test_probes_for_complex_parameters_are_real() -> None:
    (probe,) = make_probes(registered(nn.Linear(3, 2)), ("A",), 5, torch.zeros((), dtype=torch.complex64)).values()
    assert probe.dtype is torch.float32


def test_a_convolution_has_its_gradient_beside_its_moments() -> None:
    """Its moments alone are computed without patches; with a statistic that needs these, everything is from them."""
    model, x = nn.Conv1d(3, 2, 3), torch.randn(5, 3, 6)
    weight = torch.randn(5, 2, 4)
    registration = registered(model, x)
    statistics, moments = (through(registration, model(x), x, weight, names) for names in (NAMES, NAMES[:3]))
    torch.testing.assert_close({name: statistics[name] for name in moments}, moments)
    wanted = torch.autograd.grad((model(x) * weight).sum(), [model.weight, model.bias])
    torch.testing.assert_close(
        statistics["gradient"], torch.cat([wanted[0].flatten(1), wanted[1].unsqueeze(1)], 1)[None]
    )


def test_a_tap_prints_its_matrix() -> None:
    assert str(tap_of(registered(nn.Linear(3, 2)))) == "Tap((1, 2, 4))"


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo, of any autograd.Function
def test_a_tap_compiles_without_a_break() -> None:
    model = nn.Linear(3, 2)
    registration = registered(model)
    tap = tap_of(registration)

    def statistics(x: Tensor, probes: dict[str, Tensor]) -> Tensor:
        return tap(model(x), x, probes).square().sum()

    x = X[:, 0]
    gradients = []
    for function in (statistics, torch.compile(statistics, fullgraph=True, backend="aot_eager")):
        probes = make_probes(registration, NAMES, 5, x)
        gradients.append(torch.autograd.grad(function(x, probes), list(probes.values())))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_generic_registrations_have_no_tap() -> None:
    generic = Registration("generic", None, ("w",), (), "diagonal")
    with pytest.raises(AssertionError, match="bug in kfac_fx: a tap on a generic registration"):
        Tap(generic, registered(nn.Linear(3, 2)).uses[0], LAYERS["linear"])
    with pytest.raises(AssertionError, match="bug in kfac_fx: probes for a generic registration"):
        make_probes(generic, ("A",), 5, X)


def test_attributes_keep_their_order_whether_tensors_or_sizes() -> None:
    seen: list[Any] = []

    def sums(names: Any, output_grad: Tensor, input: Tensor, values: Any) -> Any:
        seen.extend(values)
        return lambda name: output_grad.sum()

    output, probe = torch.randn(3, requires_grad=True), torch.zeros((), requires_grad=True)
    first, last = torch.randn(2), torch.randn(3)
    apply = tap_function(sums).apply
    apply(output, torch.randn(3), 1, "count", probe, 5, first, 7, last).sum().backward()  # type: ignore[no-untyped-call]
    assert seen[0] == 5 and seen[2] == 7 and torch.equal(seen[1], first) and torch.equal(seen[3], last)
    assert probe.grad == 3


def test_sums_over_rows_that_cases_share_count_every_case() -> None:
    """In all their variants; in sums with gradient rows the gradient is that of all cases already."""
    of_inputs, others = (
        ("count", "count/reduced", "A", A.in_blocks(2).name, "A/reduced", "A_diag"),
        ("G", G.in_blocks(2).name, "G_diag", "gradient"),
    )
    names = (*of_inputs, *others)
    output, probes = torch.zeros(2, requires_grad=True), [torch.zeros((), requires_grad=True) for _ in names]
    apply = tap_function(lambda *_: lambda name: torch.ones(()), cases=0).apply
    apply(output, torch.zeros(2), len(names), *names, *probes, 5).sum().backward()  # type: ignore[no-untyped-call]
    assert [float(probe.grad or 0) for probe in probes] == [5] * len(of_inputs) + [1] * len(others)


def test_a_tensor_that_comes_twice_comes_once_and_as_a_view() -> None:
    output, x, y = (torch.randn(2) for _ in range(3))
    first, second, same, other, nothing = without_aliases(output, x, x, output, y, None)
    assert first is x and other is y and nothing is None
    for view, of in ((second, x), (same, output)):
        assert view is not of and view.data_ptr() == of.data_ptr()
