"""The rewritten model is the original: random models, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from tests.whole.generated import Recipe, Step, recipes


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
