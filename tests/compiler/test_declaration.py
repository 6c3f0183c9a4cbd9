"""Declarations of layers, and the errors of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.errors import LayerError
from kfac_fx.passes.layers import LAYERS, as_rows, collect, composite, layer
from kfac_fx.passes.layers.declaration import Example, Layer
from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.trace import trace_model


def example() -> tuple[nn.Module, Tensor]:
    return nn.Linear(5, 3), torch.randn(4, 5)


def dense(name: str = "dense") -> Layer:
    @layer(rows=as_rows, grad_rows=as_rows, example=example, name=name)
    def form(x: Tensor, scale: float, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x * scale, weight, bias)

    return form


def test_a_form_names_its_inputs_and_its_parameters() -> None:
    (form,) = dense().forms
    assert (form.inputs, form.roles) == (("x", "scale"), ("weight", "bias"))


def test_the_usual_layouts_are_one_group() -> None:
    (form,) = dense().forms
    assert form.layout("weight", Layout((3, 5)), {}).result == (1, 3, 5)
    assert form.layout("bias", Layout((3,)), {}).result == (1, 3)


def test_a_layout_starts_where_the_views_in_the_model_end() -> None:
    (form,) = dense().forms
    assert form.layout("weight", Layout((15,)).reshape((3, 5)), {}).shape == (3, 5)


def test_a_second_form_takes_from_the_first_what_it_does_not_say() -> None:
    declared = dense()

    @declared.form(layouts={"weight": "i o -> o i"}, example=(example, example))
    def product(x: Tensor, scale: float, *, weight: Tensor) -> Tensor:
        return torch.matmul(x * scale, weight)

    first, second = declared.forms
    assert second is product
    assert (second.rows, second.layouts["bias"]) == (first.rows, first.layouts["bias"])
    assert second.layout("weight", Layout((5, 3)), {}).result == (1, 3, 5)
    assert len(second.examples) == 2


def without(x: Tensor) -> Tensor:
    return x


def kernel(x: Tensor, *, kernel: Tensor) -> Tensor:
    return x @ kernel


@pytest.mark.parametrize(("function", "found"), [(without, r"\[\]"), (kernel, r"\['kernel'\]")])
def test_parameters_must_be_weight_and_bias(function: Callable[..., Tensor], found: str) -> None:
    text = rf"\(.*test_declaration.py:\d+\) has parameters {found}; its form must take `weight`, `bias` or both"
    with pytest.raises(LayerError, match=f"layer '{function.__name__}' {text}"):
        layer(rows=as_rows, grad_rows=as_rows, example=example)(function)
    with pytest.raises(LayerError, match=f"layer 'dense' {text}"):
        dense().form(example=example)(function)


def test_what_is_no_declaration_is_refused() -> None:
    for wrong, name in ((nn.Linear, "Linear"), (nn.Linear(2, 2), "Linear"), ("dense", "str")):
        with pytest.raises(LayerError, match=rf"takes layers that @kfac_fx.layer\(...\) declares, and got {name}"):
            collect(wrong)  # type: ignore[arg-type]


def test_two_layers_of_one_name_are_an_error_with_both_places() -> None:
    with pytest.raises(
        LayerError, match=r"layer 'dense' is declared twice: .*test_declaration.py:\d+ and .*:\d+\..* name='my_dense'\)"
    ):
        collect(dense(), dense("other"), dense())
    assert list(collect(dense(), dense("other"))) == ["dense", "other"]


def test_a_composite_has_parts_and_no_rows() -> None:
    @composite(parts=("dense", "dense"), example=example)
    def twice(x: Tensor, *, first: Tensor, second: Tensor) -> Tensor:
        return F.linear(F.linear(x, first), second)

    assert (twice.name, twice.parts) == ("twice", ("dense", "dense"))
    with pytest.raises(AssertionError, match="bug in kfac_fx: a composite layer has no rows of its own"):
        twice.forms[0].rows(torch.randn(4, 5), {})


def test_every_part_of_a_composite_is_a_layer() -> None:
    assert all(part in LAYERS for layer in LAYERS.values() for part in layer.parts)


@pytest.mark.parametrize("name", LAYERS)
def test_every_form_has_an_example_and_every_default_is_allowed(name: str) -> None:
    one = LAYERS[name]
    examples: list[Example] = [example for form in one.forms for example in form.examples]
    assert len(examples) >= len(one.forms)
    assert all(form.examples for form in one.forms)
    assert one.parts or one.default in one.approximations


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"layouts": {"wieght": "o i -> o i"}},
            r"a layout for 'wieght', and not weight or bias\..*'weight'",
        ),
        ({"layouts": {"weight": "o i -> o j"}}, r"layout 'o i -> o j' for weight: .* on one side only: i, j$"),
        ({"layouts": {"weight": "o i -> o"}}, r"on one side only: i$"),
        ({"layouts": {"weight": "o i"}}, r"every axis must be on both sides of '->' once"),
        ({"layouts": {"weight": "o i -> o i i"}}, r"every axis must be on both sides of '->' once"),
        ({"default": "krn"}, r"there is no approximation 'krn'\..*'kron'"),
        ({"approximations": ("kron2",)}, r"there is no approximation 'kron2'"),
        ({"approximations": ()}, r"layer 'wrong' has no approximations: name some"),
        (
            {"default": "kron", "approximations": ("diagonal", "full")},
            r"layer 'wrong' has the default 'kron', which is not among its approximations diagonal, full: take one",
        ),
        (
            {"layouts": {"weight": "i -> i"}},
            r"layer 'wrong' \(.*\) has the layout 'i -> i' for weight, which leads to no matrix \[o, i\] or "
            r"\[g, o, i\]: .* a vector of inputs is 'i -> \(\) i'",
        ),
        ({"layouts": {"bias": "o -> () () o"}}, r"has the layout 'o -> \(\) \(\) o' for bias, which leads to no bias"),
    ],
    ids=str,
)
def test_a_typo_in_a_declaration_is_an_error(options: dict[str, Any], text: str) -> None:
    """The layer would match nothing, and no report would say so."""
    with pytest.raises(LayerError, match=text):

        @layer(rows=as_rows, grad_rows=as_rows, example=example, **options)
        def wrong(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return F.linear(x, weight, bias)


def test_without_kron_the_default_is_the_first_approximation() -> None:
    def declared(*names: str) -> str:
        @layer(rows=as_rows, grad_rows=as_rows, example=example, approximations=names)
        def one(x: Tensor, *, weight: Tensor) -> Tensor:
            return F.linear(x, weight)

        return one.default

    assert declared("diagonal", "full") == "diagonal" and declared("diagonal", "kron") == "kron"


def test_a_layout_that_is_a_function_leads_to_a_matrix() -> None:
    @layer(rows=as_rows, grad_rows=as_rows, example=example, layouts={"weight": lambda layout, attrs: layout})
    def one(x: Tensor, *, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    with pytest.raises(LayerError, match=r"the layout of weight leads to \[3\], no matrix"):
        one.forms[0].layout("weight", Layout((3,)), {})


def test_a_typo_in_another_form_is_an_error() -> None:
    with pytest.raises(LayerError, match=r"layer 'dense' .* on one side only: i, j$"):

        @dense().form(layouts={"weight": "o i -> o j"}, example=example)
        def wrong(x: Tensor, scale: float, *, weight: Tensor) -> Tensor:
            return F.linear(x * scale, weight)


def test_groups_and_single_axes_are_no_typos() -> None:
    @layer(
        rows=as_rows,
        grad_rows=as_rows,
        example=example,
        layouts={"weight": "(g o) i -> g o (i 1)", "bias": "(g o) -> g o"},
    )
    def right(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    assert right.name == "right"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rows": 3}, "rows is 3, not a function"),
        ({"grad_rows": 4}, "grad_rows is 4, not a function"),
        ({"example": 3}, "example 0 is 3, not a function"),
        ({"where": 3, "sizes": 4}, "where is 3, not a function; sizes is 4, not a function"),
        ({"second_moment": 3}, "second_moment is 3, not a function"),
        ({"pixels": 3}, "pixels is 3, not a function"),
        ({"layouts": 3}, "layouts is 3, not a dict"),
        (
            {"approximations": "kron"},
            r"approximations is 'kron', not a tuple of names, as in approximations=\('kron', ",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LayerError, match=f"a layer is declared with arguments of another kind: {text}"):
        layer(**{"rows": as_rows, "grad_rows": as_rows, "example": example, **options})


def test_a_form_is_a_function() -> None:
    with pytest.raises(LayerError, match="form is 3, not a function"):
        layer(rows=as_rows, grad_rows=as_rows, example=example)(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "lacks"),
    [
        ({"rows": as_rows, "grad_rows": as_rows}, "example="),
        ({"example": example}, "rows=, grad_rows="),
        ({}, "rows=, grad_rows=, example="),
    ],
)
def test_a_declaration_that_lacks_something_says_what_to_write(arguments: Any, lacks: str) -> None:
    text = rf"^the declaration lacks {lacks}: write @kfac_fx\.layer\(rows=lambda x, attrs: \.\.\., grad_rows="
    with pytest.raises(LayerError, match=text):
        layer(**arguments)


def test_a_declaration_without_brackets_names_its_form() -> None:
    with pytest.raises(LayerError, match="^the declaration of mine lacks rows=, grad_rows=, example=: write"):

        @layer
        def mine(x: Tensor, *, weight: Tensor) -> Tensor:
            return x @ weight


@pytest.mark.parametrize(
    ("options", "reader"),
    [({"where": lambda attrs: attrs["scal"]}, "where="), ({"sizes": lambda attrs: {"k": attrs["scal"]}}, "its layout")],
)
def test_an_attribute_that_the_form_has_not_is_named(options: dict[str, Any], reader: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x * 2.0, self.weight)

    @layer(rows=as_rows, grad_rows=as_rows, example=lambda: (Scaled(5, 3, bias=False), torch.randn(4, 5)), **options)
    def scaled(x: Tensor, scale: float, *, weight: Tensor) -> Tensor:
        return F.linear(x * scale, weight)

    has = r"that the form has not: it has scale, weight\. Did you mean 'scale'\?"
    with pytest.raises(LayerError, match=rf"scaled: {reader} reads an attribute 'scal' {has}"):
        trace_and_match(Scaled(5, 3, bias=False), scaled)


def trace_and_match(model: nn.Module, declared: Layer) -> None:
    traced = trace_model(model, (torch.randn(4, 5),), layers=collect(*LAYERS.values(), declared))
    run(traced.program, PIPELINE)
