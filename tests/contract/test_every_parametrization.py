"""Every parametrization, alone and in pairs, against autograd: for each example, in each kind of use,

    sum over uses of grad_rowsᵀ · rows  +  what the rows leave out  =  autograd's gradient of the parameter

in sum and case by case. A pair that has no such rows is refused: the parameter is generic and the report has a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.linalg.vectors import split
from kfac_fx.passes.ir import Options, Registration, Use, tensor_attrs
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.parametrization import WeightExample
from kfac_fx.passes.parametrizations import (
    functions,
    normalized,
    parts,
    product,
    tables,
)
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.statistics import sum_of
from kfac_fx.recording.taps import both_rows
from tests.contract.values import Values
from tests.tables import every, pairs

pytestmark = pytest.mark.usefixtures("float64")


CASES = 3
MECHANISMS = functions, normalized, parts, product, tables
EXAMPLES: dict[str, WeightExample] = {
    name: example for module in MECHANISMS for name, example in module.EXAMPLES.items()
}
ALONE_ONLY = ("bounds and noise", "stack", "kronecker", "hadamard", "gathered inputs", "standardized")
PAIRED = [name for name in EXAMPLES if name not in ALONE_ONLY]

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x[..., : w.shape[1]], w),
    "transposed": lambda x, w: torch.tanh(F.linear(x[..., : w.shape[1]], w)) @ w,
    "embedding": lambda x, w: F.embedding(x[..., 0].long() % len(w), w),
    "scale": lambda x, w: x[:, : w.shape[0], : w.shape[1]] * w,
    "shift": lambda x, w: x[:, : w.shape[0], : w.shape[1]] + w,
    "scale and shift": lambda x, w: torch.tanh(x[:, : w.shape[0], : w.shape[1]] * w) + w,
}

# Which parameters have rows, where no Jacobian helps, which is of any small function. All others are refused.
LINEAR = {
    "mask": "w",
    "bounds and noise": "w r",
    "exp": "w",
    "slices": "w v",
    "multiple": "w",
    "weight norm": "w g",
    "standardized": "w g",
    "spectral norm": "w",
    "centered": "w",
    "gain": "w e",
    "product": "w b",
    "stack": "w b",
    "kronecker": "w c",
    "hadamard": "w b c d",
    "gathered": "w",
    "gathered inputs": "w",
}
# The mean of a filter is that of one output's inputs, which it is not of a transposed use, an embedding or a scale.
TRANSPOSED = {name: function for name, function in LINEAR.items() if name not in ("standardized", "centered")}
EMBEDDING = {name: function for name, function in TRANSPOSED.items() if name not in ("stack", "kronecker", "hadamard")}
SCALE = {
    "mask": "w",
    "bounds and noise": "w r",
    "exp": "w",
    "slices": "w v",
    "multiple": "w",
    "weight norm": "w g",
    "spectral norm": "w",
    "gain": "w e",
}
SCALE_AND_SHIFT = {**SCALE, "weight norm": "w", "gain": "w"}  # the gain of a shift has no input
SHIFT = {**SCALE_AND_SHIFT, "gathered": "w", "gathered inputs": "w", "linear map": "w"}
ALONE = {
    "linear": LINEAR,
    "transposed": TRANSPOSED,
    "embedding": EMBEDDING,
    "scale": SCALE,
    "shift": SHIFT,
    "scale and shift": SCALE_AND_SHIFT,
}

# The same of pairs: use, outer, inner; "b2" is the outer one's own.
PAIRS: dict[str, dict[str, dict[str, str]]] = {
    "linear": {
        **dict.fromkeys(("exp", "gain"), dict.fromkeys(("mask", "exp", "multiple", "gain"), "w")),
        "mask": {**dict.fromkeys(("mask", "exp", "multiple", "gain"), "w"), "product": "w b"},
        "slices": {"slices": "w v v2", "multiple": "w v2"},
        "multiple": {name: LINEAR[name] for name in PAIRED if name in LINEAR and name != "gathered"},
        "spectral norm": {"centered": "w"},
        "product": {**dict.fromkeys(PAIRED, "b2"), "multiple": "w b2", "product": "w b b2"},
        "gathered": {"gathered": "w"},
    },
    "shift": {
        **dict.fromkeys(("mask", "gain"), dict.fromkeys(("mask", "exp", "multiple", "gain"), "w")),
        "slices": {"slices": "w v v2", **dict.fromkeys(("mask", "exp", "multiple"), "w v2")},
        "multiple": {name: SCALE_AND_SHIFT[name] for name in PAIRED if name in SCALE_AND_SHIFT},
        "exp": dict.fromkeys(("mask", "exp", "multiple", "gain"), "w"),
        "gathered": {"gathered": "w", "linear map": "w"},
        "linear map": {"linear map": "w"},
    },
}

# With Jacobians, of a use that scales and shifts: what is followed on its way, and then has no rows of a case.
REFUSED: dict[str, list[str]] = {
    "slices": ["mask", "weight norm", "spectral norm", "centered", "gain"],
    "gathered": ["linear map"],
    "linear map": ["linear map"],
}


class Composed(nn.Module):
    """One use of a function of parameters, perhaps of what another function made of the first of them."""

    def __init__(self, use: str, outer: WeightExample, inner: WeightExample | None = None) -> None:
        super().__init__()
        rest = dict(list(outer.shapes.items())[1:])
        shapes = outer.shapes if inner is None else {**inner.shapes, **{f"{k}2": size for k, size in rest.items()}}
        self.use, self.outer, self.inner, self.names = USES[use], outer, inner, tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))

    def forward(self, x: Tensor) -> Tensor:
        values = [self.get_parameter(name) for name in self.names]
        if self.inner is not None:
            number = len(self.inner.shapes)
            values = [self.inner.function(*values[:number]), *values[number:]]
        return self.use(x, self.outer.function(*values))


class Side(nn.Module):
    """Models side by side, on one input."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [model(x) for model in self.models.values()]


class Checked:
    """A model after the passes, with values and gradients of one batch. structured: the parameters that have rows."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        traced = trace_model(model, (x,), options=Options(loss_given=True), layers=LAYERS)
        self.program, self.parameters = run(traced.program), dict(model.named_parameters())
        self.values = Values(self.program)
        returned = self.values.run(x)
        products = [output * torch.randn_like(output) for output in returned]
        self.total, self.first = (sum(product[:cases].sum() for product in products) for cases in (None, 1))

    @property
    def structured(self) -> dict[str, Registration]:
        return {
            name: registration
            for registration in self.program.registrations
            if not registration.generic
            for name in registration.parameters
        }

    def autograd(self, registration: Registration, loss: Any) -> dict[str, Tensor]:
        owners = {name: self.parameters[name] for name in registration.owners}
        found = torch.autograd.grad(loss, list(owners.values()), retain_graph=True)
        return split(dict(zip(owners, found, strict=True)), [registration])

    def rows_of(
        self, registration: Registration, use: Use
    ) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
        """The function that makes the rows of a use, and its arguments."""
        (gradient,) = torch.autograd.grad(self.total, self.values.value[use.output.name], retain_graph=True)
        needed = [use.input, *tensor_attrs(use).values()]
        tensors = [gradient, *(self.values.of(value).detach() for value in needed)]
        return both_rows(registration, use, LAYERS[use.layer]), tensors

    def check(self, registration: Registration) -> None:
        """The rows of all cases make the gradient, and those of the first its own."""
        matrix = registration.matrix
        assert matrix is not None
        layout: Any = (matrix.bias is not None, matrix.shape)
        for loss, cases in ((self.total, slice(None)), (self.first, slice(1))):
            found: Any = 0
            for use in registration.uses:
                function, arguments = self.rows_of(registration, use)
                rows, grad_rows = (tensor[cases] if len(tensor) == CASES else tensor for tensor in function(*arguments))
                summed = sum_of("gradient", rows, grad_rows, *layout)
                found = found + self.with_remainder(registration, use, summed)
            wanted = matrix.pack(self.autograd(registration, loss))
            torch.testing.assert_close(found, wanted, msg=lambda text: f"{registration}: {text}")

    def with_remainder(self, registration: Registration, use: Use, summed: Tensor) -> Tensor:
        """With what the rows leave out."""
        matrix = registration.matrix
        assert matrix is not None
        gradient = next(iter(matrix.unpack(summed).values()))
        for step in use.through:
            tensors = {key: self.values.of(value) for key, value in step.nodes.items()}
            number = step.remainder(gradient, tensors)
            assert (number is None) == (step.left_out is None)
            if number is not None:
                (name,) = registration.parameters
                (more,) = torch.autograd.grad(number, self.parameters[name], retain_graph=True)
                summed = summed + matrix.pack({name: more})
        return summed


def batch() -> Tensor:
    return 4 * torch.rand(CASES, 8, 8)


def beside(use: str, outer: str | None, names: Iterable[str]) -> Checked:
    """Models of these examples side by side, or of the outer example around each of them."""
    torch.manual_seed(0)
    pairs = {name: (EXAMPLES[outer or name], EXAMPLES[name] if outer else None) for name in names}
    return Checked(Side({name: Composed(use, *pair) for name, pair in pairs.items()}), batch())


def check_reasons_and_rows(checked: Checked) -> None:
    """Every parameter has rows that are right, or a reason to be generic."""
    for registration in checked.program.registrations:
        if registration.generic:
            assert registration.reason, f"{registration} is generic without a reason"
        else:
            checked.check(registration)


def check_all(checked: Checked, expected: Mapping[str, str], names: Iterable[str]) -> None:
    """The parameters that are expected to have rows have them."""
    check_reasons_and_rows(checked)
    found: dict[str, set[str]] = {name: set() for name in names}
    for parameter in checked.structured:
        _, model, name = parameter.split(".")
        found[model].add(name.partition("[")[0])
    assert found == {name: set(expected.get(name, "").split()) for name in names}


@pytest.fixture
def no_jacobians(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of parameters that are not small."""
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)


@pytest.mark.usefixtures("no_jacobians")
@pytest.mark.parametrize("use", USES)
def test_rows_make_the_gradient(use: str) -> None:
    check_all(beside(use, None, EXAMPLES), ALONE[use], EXAMPLES)


@pytest.mark.usefixtures("no_jacobians")
@pairs(("outer", PAIRED), ("use", list(PAIRS)))
def test_pairs_make_the_gradient_or_are_refused(use: str, outer: str) -> None:
    check_all(beside(use, outer, PAIRED), PAIRS[use].get(outer, {}), PAIRED)


@pytest.mark.parametrize("outer", every(2, PAIRED))
def test_small_pairs_make_the_gradients_of_cases(outer: str) -> None:
    """A parameter that scales and shifts has no other rows, and any function of it has these."""
    checked = beside("scale and shift", outer, PAIRED)
    refused = {
        registration.owners[0].split(".")[1] for registration in checked.program.registrations if registration.generic
    }
    assert refused == set(REFUSED.get(outer, ()))
    check_reasons_and_rows(checked)


@pytest.mark.parametrize("use", [pytest.param("linear", marks=pytest.mark.slow), "scale"])
def test_rows_compile_without_graph_breaks(use: str) -> None:
    checked = beside(use, None, EXAMPLES)
    for registration in checked.structured.values():
        for tap_use in registration.uses:
            torch.compiler.reset()
            function, arguments = checked.rows_of(registration, tap_use)
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(*arguments), function(*arguments))


class Shared(nn.Module):
    """Two uses of one parameter, through two functions of it."""

    def __init__(self, first: WeightExample, second: WeightExample) -> None:
        super().__init__()
        self.functions, self.numbers = (first.function, second.function), (len(first.shapes), len(second.shapes))
        rest = [*list(first.shapes.items())[1:], *((f"{k}2", size) for k, size in list(second.shapes.items())[1:])]
        shapes = {"w": first.shapes["w"], **dict(rest)}
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))

    def forward(self, x: Tensor) -> Tensor:
        w, *rest = (self.get_parameter(name) for name in self.names)
        number = self.numbers[0] - 1
        first, second = self.functions[0](w, *rest[:number]), self.functions[1](w, *rest[number:])
        return F.linear(x[..., :4], first).sum(-1, keepdim=True) + F.linear(torch.tanh(x[..., :4]), second)


ALONE_OR_IN_PIECES = {"slices", "jacobian"}
SHARED = [name for name in EXAMPLES if EXAMPLES[name].shapes["w"] == (4, 4) and name != "stack"]


@pytest.mark.usefixtures("no_jacobians")
@pytest.mark.parametrize("first", every(3, SHARED))
def test_a_parameter_with_two_uses_has_the_rows_of_both_or_is_refused(first: str) -> None:
    torch.manual_seed(0)
    models = {name: Shared(EXAMPLES[first], EXAMPLES[name]) for name in SHARED}
    checked = Checked(Side(models), batch())
    check_reasons_and_rows(checked)
    whole = {name for name in SHARED if f"models.{name}.w" in checked.structured}
    assert whole == (set() if first in ALONE_OR_IN_PIECES else set(SHARED) - ALONE_OR_IN_PIECES)
