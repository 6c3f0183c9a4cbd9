"""The rewritten model is the original: random models, bit for bit.

The emitted graph has no operation in place. Such an operation leaves a part of a tensor where it is, `x[:, 0].relu_()`,
and out of place the result has memory of its own: the same values with other strides, of which a matrix product may add
up the terms in another order. So recorded of models that do this are compared in double precision, up to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import kfac_fx
from tests.whole.generated import BATCH, Recipe, Step, recipes
from tests.whole.training import differences, step


@settings(max_examples=40)  # of the generator: no model is compiled
@given(recipes())
def test_a_generated_model_runs_and_every_parameter_moves(recipe: Recipe) -> None:
    model = recipe.model()
    out = model(recipe.inputs())
    assert out.shape[0] == recipe.inputs().shape[0]
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_a_recipe_is_the_model() -> None:
    recipe = Recipe((4, 3), (Step("linear", (5, True)), Step("residual", (), (Step("relu_"),)), Step("again", (1,))))
    assert repr(recipe.model()) == repr(recipe.model())
    first, second = recipe.model()(recipe.inputs()), recipe.model()(recipe.inputs())
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert "relu_" not in repr(recipe.out_of_place())


class WritesIntoParts(TorchDispatchMode):
    """found: was something written into a part of a tensor?"""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self.found |= not args[0].is_contiguous()
        return func(*args, **(kwargs or {}))


def writes_into_parts(recipe: Recipe) -> bool:
    with torch.no_grad(), WritesIntoParts() as writes:
        recipe.model()(recipe.inputs())
    return writes.found


def a_ride_is_the_original(net: kfac_fx.CompiledModule, twin: torch.nn.Module, x: torch.Tensor, rounded: bool) -> None:
    """Bit for bit, but for generic parameters: their uses are summed in a view first, which may round differently.

    rounded: up to rounding in double precision only.
    """
    theirs, ours = step(twin, lambda: twin(x)), step(net.model, lambda: net.record_in_training((x,), {})[0])
    generic = {
        f"gradient of {name}"
        for registration in net.registrations
        if registration.generic
        for name in registration.parameters
    }
    apart = set(differences(theirs, ours))
    assert rounded or apart <= generic
    for name in apart:
        torch.testing.assert_close(ours[name], theirs[name])


def is_the_original(recipe: Recipe, example: torch.Tensor | None, size: int = BATCH) -> None:
    """Two steps with a recording before each, then one on the emitted module itself."""
    dtype = torch.float64 if (rounded := writes_into_parts(recipe)) else torch.float32
    model, twin, x = recipe.model().to(dtype), recipe.model().to(dtype), torch.randn(size, *recipe.start, dtype=dtype)
    net = kfac_fx.compile(model, None if example is None else (example.to(dtype),), loss="normal")
    for _ in range(2):
        net.record((x,), {})
        assert differences(step(twin, lambda: twin(x)), step(model, lambda: net(x))) == []
    a_ride_is_the_original(net, twin, x, rounded)


def test_writing_into_a_part_of_a_tensor_is_noticed() -> None:
    first = Step("linear", (6, True))
    assert writes_into_parts(Recipe((4, 6), (first, Step("first"), Step("relu_"))))
    assert not writes_into_parts(Recipe((4, 6), (first, Step("relu_"), Step("first"), Step("relu"))))


@settings(max_examples=25)
@given(recipes())
def test_the_rewritten_model_is_the_original(recipe: Recipe) -> None:
    is_the_original(recipe, recipe.inputs(2))


@settings(max_examples=25)
@given(recipes())
def test_the_model_traced_without_inputs_is_the_original(recipe: Recipe) -> None:
    is_the_original(recipe, None)


@pytest.mark.slow
@settings(max_examples=400)
@given(recipes(largest=12), st.booleans())
def test_many_rewritten_models_are_the_original(recipe: Recipe, traced: bool) -> None:
    is_the_original(recipe, None if traced else recipe.inputs(2))


@settings(max_examples=10)
@given(recipes(), st.integers(2, 7))
def test_another_batch_size_is_the_original_too(recipe: Recipe, size: int) -> None:
    is_the_original(recipe, recipe.inputs(), size)
