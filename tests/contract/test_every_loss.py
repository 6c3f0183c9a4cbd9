"""Every distribution and every loss of torch: what a declaration in their tables promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import losses
from kfac_fx.losses import LossFunction, Normal
from kfac_fx.losses.declared import MEANT, NAMES, check_tables, loss_from
from kfac_fx.losses.distributions import DISTRIBUTIONS, __all__
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.torch_losses import TORCH_LOSSES, TorchLoss

KINDS: list[type[LossFunction]] = [getattr(losses, name) for name in __all__ if name != "LossFunction"]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
DRAWS = 20_000


def made_of(kind: type[LossFunction], outputs: Sequence[Tensor]) -> LossFunction:
    """The distribution as its messages tell a user to write it."""
    if not kind.written:
        return kind(outputs[0])
    loss: LossFunction = eval(kind.written, {"kfac_fx": kfac_fx, "outputs": outputs})
    return loss


@every_kind
def test_the_fisher_is_the_second_moment_of_gradients_of_samples(kind: type[LossFunction]) -> None:
    outputs = [torch.randn(4, dtype=torch.float64).expand(DRAWS, 4) for _ in range(2)]
    loss = made_of(kind, outputs)
    loss.inputs = loss.inputs.detach().requires_grad_()
    drawn = loss.evaluate_on_sample(torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(drawn, loss.inputs)
    products = gradient.unsqueeze(-1) * gradient.unsqueeze(-2)
    basis = torch.eye(gradient.shape[-1], dtype=torch.float64)
    with torch.no_grad():
        fisher = loss.multiply_fisher(basis.unsqueeze(1).expand(-1, DRAWS, -1))[:, 0]
    error = (products.mean(0) - fisher).abs()
    assert (error <= 5 * (products.var(0) / DRAWS).sqrt() + 1e-12).all()


@every_kind
def test_a_class_without_a_name_is_in_no_table(kind: type[LossFunction]) -> None:
    assert DISTRIBUTIONS.get(kind.name) is (kind if kind.name else None)


@every_kind
def test_a_class_is_taken_for_one_output_or_says_how_to_write_it(kind: type[LossFunction]) -> None:
    x = torch.randn(5, 4)
    if kind.written:
        with pytest.raises(LossError, match=f"loss={kind.__name__} needs a .* as in loss=lambda outputs: kfac_fx"):
            loss_from(kind)
        return
    for spec in (kind, kind.name) if kind.name else (kind,):
        ((coefficient, loss),) = loss_from(spec)(x)
        assert (coefficient, type(loss)) == (1.0, kind)
        if kind.of_classes:
            with pytest.raises(LossError, match=r"needs logits of shape \[cases, ..., classes\]"):
                loss_from(spec)(x[:, 0])


def test_tables_of_losses_that_do_not_fit_together_are_told_at_the_import() -> None:
    class Poisson(Normal):
        name, targets_like = "poisson", ""

    class Unfinished(LossFunction):
        name, targets_like = "unfinished", "counts"

    row = replace(TORCH_LOSSES[1], distribution="poison", by_default=("weigth",))
    check_tables(TORCH_LOSSES, DISTRIBUTIONS)
    with pytest.raises(AssertionError) as caught:
        check_tables([row], {"poisson": Poisson, "unfinished": Unfinished})
    of_mse = "the row of F.mse_loss in passes/torch_losses.py names the"
    in_table = "in DISTRIBUTIONS in kfac_fx/losses/distributions.py lacks"
    assert str(caught.value).split("\n") == [
        f"bug in kfac_fx: {of_mse} distribution 'poison', and DISTRIBUTIONS in kfac_fx/losses/distributions.py has "
        "poisson, unfinished: add its class there, with name = 'poison', or correct the row. Did you mean 'poisson'?",
        f"{of_mse} argument 'weigth', and the function has input, target, size_average, reduce, reduction, weight. Did "
        "you mean 'weight'?",
        f"the class Poisson of 'poisson' {in_table} targets_like: write it there",
        f"the class Unfinished of 'unfinished' {in_table} _negative_log_likelihood, _sample, multiply_fisher_factor, "
        "multiply_fisher_factor_transpose: write it there",
    ]


@pytest.mark.parametrize("synonym", MEANT)
def test_a_synonym_is_told_the_name(synonym: str) -> None:
    assert synonym not in NAMES, f"{synonym!r} is a name of a loss, and needs no synonym: take it out of `synonyms`"
    assert MEANT[synonym] in NAMES
    with pytest.raises(LossError, match=f"Did you mean '{MEANT[synonym]}'"):
        loss_from(synonym)


class LossInside(nn.Module):
    def __init__(self, body: nn.Module, loss: TorchLoss) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss.function(self.body(x), y)


@pytest.mark.parametrize("loss", TORCH_LOSSES, ids=lambda loss: loss.name)
def test_a_loss_in_forward_has_the_fisher_of_the_loss_by_name(loss: TorchLoss) -> None:
    body, x = nn.Linear(3, 4), torch.randn(6, 3)
    y = DISTRIBUTIONS[loss.distribution](body(x).detach()).sample()
    inside = kfac_fx.compile(LossInside(body, loss), (x, y)).record((x, y), {}, mode="exact")
    by_name = kfac_fx.compile(body, (x,), loss=loss.short).record((x,), {}, mode="exact")
    (of_inside,), (of_name,) = inside.statistics.values(), by_name.statistics.values()
    for statistic, value in of_name.items():
        torch.testing.assert_close(of_inside[statistic], value)
