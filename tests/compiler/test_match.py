"""Every use of every layer, and nothing that only looks like one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import LayerError
from kfac_fx.passes.ir import Program, Use
from kfac_fx.passes.layers import as_rows, collect, layer
from kfac_fx.passes.match import match
from tests.compiler.toy import Toy, before, uses

SQUARE = {"w": (3, 3), "b": (3,)}
X = torch.randn(5, 3)


def matched(model: nn.Module, *inputs: Any) -> Program:
    return match(before("match", model, *inputs))


def largest(function: Callable[..., Any], exported: bool = False, **shapes: tuple[int, ...]) -> list[str]:
    """Matches that no other match contains."""
    program = matched(Toy(function, **shapes), *([X] if exported else []))
    matches = program.matches
    kept = [use for use in matches if not any(use.nodes < other.nodes for other in matches)]
    return uses(program.but(matches=tuple(kept)))


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w, b: F.linear(x, w, b), ["linear(w, b): x -> linear"]),
        (lambda x, w, b: x @ w, ["linear(w): x -> matmul"]),
        (lambda x, w, b: x @ w + b, ["linear(w, b): x -> add"]),
        (lambda x, w, b: b + x @ w, ["linear(w, b): x -> add"]),
        (lambda x, w, b: F.linear(x, w) + b, ["linear(w, b): x -> add"]),
        (lambda x, w, b: b + x * x, ["scale_and_shift(b): mul -> add"]),
        (lambda x, w, b: b + x @ w + b, ["linear(w, b): x -> add", "scale_and_shift(b): add -> add_1"]),
        (lambda x, w, b: torch.addmm(b, x, w.t()), ["linear(w, b): x -> addmm"]),
        (lambda x, w, b: w @ x.mT, ["linear(w): getattr_1 -> matmul", "linear(w): m_t -> matmul"]),
        (lambda x, w, b: F.linear(x, w.to(torch.float64).float()), ["linear(w): x -> linear"]),
        (lambda x, w, b: x * b, ["scale_and_shift(b): x -> mul"]),
        (lambda x, w, b: F.layer_norm(x, (3,), b, b), []),
        (lambda x, w, b: F.layer_norm(x, (3,), b, b * 1), ["layer_norm(b): x -> layer_norm"]),  # for `cut`
        (lambda x, w, b: x @ w.tanh(), ["linear(): x -> matmul"]),  # with an expression of w, for `cut`
        (lambda x, w, b: x @ w.detach(), []),
        (lambda x, w, b: (x @ w).detach() * x, []),
        (lambda x, w, b: torch.addmm(b, x, w, alpha=2), []),
        (lambda x, w, b: torch.add(x @ w, b, alpha=2), ["linear(w): x -> matmul"]),
    ],
)
def test_how_a_layer_is_written(function: Callable[..., Any], expected: list[str], exported: bool) -> None:
    found = largest(function, exported, **SQUARE)
    assert found == expected or (len(expected) == 2 and found == [expected[exported]])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w, b: F.linear(x, w, torch.cumsum(b, 0)), ["linear(w): x -> linear"]),
        (lambda x, w, b: F.linear(x, w.softmax(1), b), ["linear(b): x -> linear"]),
        (lambda x, w, b: F.linear(x, w.softmax(1), w[:, 0]), []),
        (lambda x, w, b: F.linear(x, w.softmax(1)), ["linear(): x -> linear"]),  # by its Jacobian
    ],
)
def test_what_is_computed_in_a_way_of_its_own_leaves_the_other_role_alone(
    function: Callable[..., Any], expected: list[str]
) -> None:
    """Unless it is computed from that, too."""
    assert largest(function, True, **SQUARE) == expected


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_a_cast_between_a_product_and_its_shift_keeps_them_apart(exported: bool) -> None:
    """Its gradient rows are in another precision."""
    matches = largest(lambda x, w, b: F.linear(x, w).double() + b, exported, **SQUARE)
    assert [text.partition(":")[0] for text in matches] == ["linear(w)", "scale_and_shift(b)"]


def test_a_factor_of_the_weight_is_no_bias_beside_it() -> None:
    assert not largest(lambda x, w, b: F.linear(x, w * b[:, None], b), True, **SQUARE)


def shared(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(F.linear(x, w, b))
    return x


def test_every_use_is_a_match_of_its_own_in_graph_order() -> None:
    assert largest(shared, **SQUARE) == [
        "linear(w, b): x -> linear",
        "linear(w, b): tanh -> linear_1",
        "linear(w, b): tanh_1 -> linear_2",
    ]


def test_all_matches_are_kept_for_resolve() -> None:
    program = matched(Toy(lambda x, w, b: x @ w + b, **SQUARE))
    assert uses(program) == [
        "linear(w): x -> matmul",
        "linear(w, b): x -> add",
        "scale_and_shift(b): matmul -> add",
    ]


def second_reader(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x @ w
    return torch.tanh(h + b) * h


def returned(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h + b, h


@pytest.mark.parametrize("function", [second_reader, returned])
def test_an_intermediate_that_is_read_elsewhere_is_not_swallowed(function: Callable[..., Any]) -> None:
    assert largest(function, **SQUARE) == ["linear(w): x -> matmul", "scale_and_shift(b): matmul -> add"]


def test_a_parameter_fills_one_role() -> None:
    assert largest(lambda x, w, b: x * b + b, **SQUARE) == [
        "scale_and_shift(b): x -> mul",
        "scale_and_shift(b): mul -> add",
    ]


def test_a_frozen_parameter_fills_its_role_and_is_not_registered() -> None:
    for frozen, left in (("weight", "bias"), ("bias", "weight")):
        model = nn.Linear(3, 2)
        model.get_parameter(frozen).requires_grad_(False)
        (use,) = matched(model).matches
        assert list(use.parameters) == [left] and use.attrs["weight"] == (2, 3) and use.attrs["bias"] == (2,)


def test_what_the_losses_do_not_depend_on_is_not_matched() -> None:
    assert largest(lambda x, w, b: (x * b, (x @ w).argmax(-1))[0], **SQUARE) == ["scale_and_shift(b): x -> mul"]


def test_the_geometry_of_a_convolution_is_in_its_attributes() -> None:
    model = nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=(2, 1), groups=2)
    for inputs in ((), (torch.randn(5, 2, 9, 9),)):
        (use,) = matched(model, *inputs).matches
        attrs = {key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in use.attrs.items()}
        assert attrs == {
            "stride": (2, 2), "padding": (1, 1), "dilation": (2, 1), "groups": 2, "weight": (4, 1, 3, 3), "bias": (4,),
        }  # fmt: skip
        assert use.matrix.shape == (2, 2, 1 * 9 + 1)


def test_depthwise_and_dense_convolutions_are_told_apart() -> None:
    names = [matched(nn.Conv1d(4, out, 3, groups=groups)).matches[0].layer for out, groups in ((4, 4), (8, 4), (4, 2))]
    assert names == ["depthwise_conv1d", "depthwise_conv1d", "conv1d"]


# --- where the cases are --------------------------------------------------------------------------------------------


def only(model: nn.Module, *inputs: Any) -> Use:
    (use,) = matched(model, *inputs).matches
    return use


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x, w: x @ w, (5, 7, 3), 0),
        (lambda x, w: (x @ w).mean(0), (7, 5, 3), 1),
        (lambda x, w: (x.reshape(-1, 3) @ w).view(*x.shape[:-1], 2), (5, 7, 3), None),
        (lambda x, w: (x.transpose(0, 1) @ w).transpose(0, 1), (5, 7, 3), 1),
        (lambda x, w: x.mean(0) @ w + x[:, :2] * 0, (5, 3), None),
    ],
)
def test_the_dimension_of_the_cases(function: Callable[..., Any], shape: tuple[int, ...], expected: int | None) -> None:
    assert only(Toy(function, w=(3, 2)), torch.randn(shape)).batch_dim == expected


def test_without_sizes_the_cases_are_first() -> None:
    assert only(Toy(lambda x, w: (x @ w).mean(0), w=(3, 2))).batch_dim == 0


def test_zeros_with_a_row_a_case_are_an_input() -> None:
    model = Toy(lambda x, w: torch.tanh(x.new_zeros(x.shape[0], 3) @ w + x) @ w, w=(3, 3))
    assert [use.input.name for use in matched(model, X).matches] == ["new_zeros", "tanh"]


# --- declarations that cannot be used -------------------------------------------------------------------------------


def declared(function: Callable[..., Any], name: str = "mine") -> Any:
    return layer(rows=as_rows, grad_rows=as_rows, name=name, example=lambda: (nn.Linear(2, 2), X))(function)


def use_layers(*layers: Any) -> Program:
    program = before("match", nn.Linear(3, 2))
    return match(program.but(layers=collect(*layers)))


def branching(x: Tensor, *, weight: Tensor) -> Tensor:
    return x @ weight if x.sum() > 0 else x


def identity(x: Tensor, *, weight: Tensor) -> Tensor:
    return x


def pair(x: Tensor, *, weight: Tensor) -> Any:
    return x @ weight, x


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (branching, "cannot be traced: symbolically traced variables cannot be used as inputs to control flow"),
        (identity, "must return one computed tensor"),
        (pair, "must return one computed tensor"),
    ],
)
def test_a_form_must_be_a_graph_with_one_output(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(LayerError) as failure:
        use_layers(declared(function))
    place = f"{__file__}:{function.__code__.co_firstlineno}"
    assert str(failure.value).startswith(f"the form of layer 'mine' ({place}) {text}")


def test_a_layer_of_ones_own_is_matched_like_the_others() -> None:
    @layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(2, 2), X))
    def squared(x: Tensor, *, weight: Tensor) -> Tensor:
        return F.linear(x, weight).square()

    program = before("match", Toy(lambda x, w: F.linear(x, w) ** 2, w=(2, 3)))
    assert match(program.but(layers=collect(squared))).matches == ()
    program = before("match", Toy(lambda x, w: torch.square(F.linear(x, w)), w=(2, 3)))
    assert uses(match(program.but(layers=collect(squared)))) == ["squared(w): x -> square"]


def test_a_difference_in_a_form_is_that_of_the_graph() -> None:
    """`x - weight` is a sum in normalized graphs, and was none in forms."""

    @layer(
        rows=as_rows, grad_rows=as_rows, layouts={"weight": "o -> o ()"}, example=lambda: (nn.Identity(), torch.ones(1))
    )
    def squared(x: Tensor, *, weight: Tensor) -> Tensor:
        return (x - weight).square()

    model = Toy(lambda x, w: (x - w).square(), w=(5,))
    for inputs in ((torch.randn(4, 5),), ()):
        program = match(before("match", model, *inputs, layers=[squared]))
        assert "squared" in [use.layer for use in program.matches]


class Taps(nn.Module):
    """A filter with two taps, whose weight is read by integer indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[0] * x + self.weight[1] * torch.roll(x, 1, -1)


@pytest.mark.parametrize("inputs", [(), (torch.randn(4, 6),)], ids=["symbolic", "exported"])
@pytest.mark.parametrize(
    "form",
    [
        lambda x, *, weight: weight[0] * x + weight[1] * torch.roll(x, 1, -1),
        lambda x, *, weight: weight.select(0, 0) * x + weight.select(0, 1) * torch.roll(x, 1, -1),
    ],
    ids=["index", "select"],
)
def test_a_form_that_reads_its_weight_by_integers_matches_in_both_graphs(form: Any, inputs: tuple[Tensor, ...]) -> None:
    """A form with `weight[0]` matched without example inputs only, and one with `select` with them only."""
    taps = layer(
        rows=lambda x, attrs: torch.stack([x, torch.roll(x, 1, -1)], -1),
        grad_rows=lambda dy, attrs: dy.unsqueeze(-1),
        layouts={"weight": "i -> () i"},
        example=lambda: (Taps(), torch.randn(4, 6)),
        name="taps",
    )(form)
    program = before("check", nn.Sequential(Taps(), nn.Linear(6, 2)), *inputs, layers=[taps])
    assert {use.layer for registration in program.registrations for use in registration.uses} == {"taps", "linear"}


@pytest.mark.parametrize("layouts", [None, {"weight": "o i k -> o (i k)"}], ids=["without", "another"])
def test_a_parameter_that_a_layout_does_not_fit_is_told_with_what_to_write(layouts: dict[str, str] | None) -> None:
    """The message named neither the parameter nor its shape, and its place twice."""

    @layer(
        rows=lambda x, attrs: x,
        grad_rows=lambda dy, attrs: dy.unsqueeze(-1),
        layouts=layouts,
        example=lambda: (nn.Identity(), torch.randn(4, 6)),
    )
    def rolled(x: Any, *, weight: Any) -> Any:
        return torch.roll(x, 1, -1) * torch.cumsum(weight, 0)

    class Rolled(Taps):
        def forward(self, x: Tensor) -> Tensor:
            return torch.roll(x, 1, -1) * torch.cumsum(self.weight, 0)

    program = before("resolve", Rolled(), torch.randn(4, 2), layers=[rolled])
    of_layout = "'o i -> o i' has 2 axes" if layouts is None else "'o i k -> o (i k)' has 3 axes"
    assert re.fullmatch(
        rf"at mul \(test_match\.py:\d+\), its weight is weight \[2\], and layout {re.escape(of_layout)}, the parameter "
        r"has shape \[2\]: write layouts=\{'weight': 'i -> \(\) i'\} in the declaration for a vector of the inputs of "
        r"one output, .*",
        program.nowhere["rolled"],
    )
