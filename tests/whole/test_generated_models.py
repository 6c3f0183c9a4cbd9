"""The rewritten model is the original: random models, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kfac_fx
from tests.whole.generated import Recipe, Step, recipes
from tests.whole.training import differences, step


@settings(max_examples=100)
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


def a_ride_is_the_original(
    net: kfac_fx.CompiledModule, model: torch.nn.Module, twin: torch.nn.Module, x: torch.Tensor
) -> None:
    """Bit for bit, but for generic parameters: their uses are summed in a view first, which may round differently."""
    theirs, ours = step(twin, lambda: twin(x)), step(model, lambda: net.ride((x,), {})[0])
    generic = {f"gradient of {name}" for one in net.registrations if one.generic for name in one.parameters}
    rounded = set(differences(theirs, ours))
    assert rounded <= generic
    for name in rounded:
        torch.testing.assert_close(ours[name], theirs[name])


def is_the_original(recipe: Recipe, example: tuple[torch.Tensor] | None) -> None:
    """Two steps with a recording before each, then one on the emitted module itself."""
    model, twin, x = recipe.model(), recipe.model(), recipe.inputs()
    net = kfac_fx.compile(model, example, loss="normal")
    for _ in range(2):
        net.record((x,), {})
        assert differences(step(twin, lambda: twin(x)), step(model, lambda: net(x))) == []
    a_ride_is_the_original(net, model, twin, x)


@settings(max_examples=25)
@given(recipes())
def test_the_rewritten_model_is_the_original(recipe: Recipe) -> None:
    is_the_original(recipe, (recipe.inputs(2),))


@settings(max_examples=25)
@given(recipes())
def test_the_model_traced_without_inputs_is_the_original(recipe: Recipe) -> None:
    is_the_original(recipe, None)


@pytest.mark.slow
@settings(max_examples=400)
@given(recipes(largest=12), st.booleans())
def test_many_rewritten_models_are_the_original(recipe: Recipe, traced: bool) -> None:
    is_the_original(recipe, None if traced else (recipe.inputs(2),))


@settings(max_examples=10)
@given(recipes(), st.integers(2, 7))
def test_another_batch_size_is_the_original_too(recipe: Recipe, size: int) -> None:
    model, twin = recipe.model(), recipe.model()
    net = kfac_fx.compile(model, (recipe.inputs(),), loss="normal")
    x = torch.randn(size, *recipe.start)
    net.record((x,), {})
    a_ride_is_the_original(net, model, twin, x)
