"""What the user may write as `loss=`."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfac_fx.losses import Categorical, LossFunction, MultiBernoulli, Normal
from kfac_fx.losses.registered import loss_from
from kfac_fx.passes.errors import LossError

X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("categorical", Categorical),
        ("normal", Normal),
        ("multi_bernoulli", MultiBernoulli),
        (Categorical, Categorical),
        (partial(Normal, var=1.0), Normal),
        (lambda outputs: MultiBernoulli(outputs), MultiBernoulli),
    ],
)
def test_every_spelling_gives_one_loss_with_coefficient_one(spec: Any, kind: type[LossFunction]) -> None:
    ((coefficient, loss),) = loss_from(spec)(X)
    assert coefficient == 1.0
    assert type(loss) is kind
    assert loss.inputs is X
    assert loss.targets is None


def test_a_model_that_returns_a_tuple_of_one_tensor_is_read() -> None:
    assert loss_from("normal")((X,))[0][1].inputs is X


def test_targets_reach_the_loss() -> None:
    targets = torch.tensor([0, 1, 2, 0])
    ((_, loss),) = loss_from("categorical")(X, targets)
    assert loss.targets is targets


def test_several_losses_with_coefficients_and_targets() -> None:
    def spec(outputs: Any) -> Any:
        return [(0.5, Normal(outputs[0])), Categorical(outputs[1])]

    targets = (torch.ones(4, 3), torch.tensor([0, 1, 2, 0]))
    (half, normal), (one, categorical) = loss_from(spec)((X, X), targets)
    assert (half, one) == (0.5, 1.0)
    assert normal.targets is targets[0]
    assert categorical.targets is targets[1]
    with pytest.raises(LossError, match=r"the function given as loss gives 2 losses: pass as many targets, in a tuple"):
        loss_from(spec)((X, X), targets[0])


def test_one_pair_is_one_loss() -> None:
    ((coefficient, loss),) = loss_from(lambda outputs: (2, Normal(outputs)))(X)
    assert (coefficient, type(loss)) == (2.0, Normal)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(LossError, match=r"loss 'categoricl' is none of .*Did you mean 'categorical'\?"):
        loss_from("categoricl")


def test_something_that_is_no_loss_is_refused() -> None:
    for wrong in (3, Normal(X)):
        with pytest.raises(LossError, match=r"loss is a (int|Normal); pass a name, a class of kfac_fx.losses, or"):
            loss_from(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [{"logits": X}, (X, X), 3])
def test_a_named_loss_says_how_to_choose_an_output(outputs: Any) -> None:
    with pytest.raises(
        LossError, match=r"loss='normal' needs one output tensor, and the model returns a (dict|tuple|int): say"
    ):
        loss_from("normal")(outputs)
    if isinstance(outputs, dict):
        with pytest.raises(LossError, match=r"kfac_fx\.losses\.Categorical\(outputs\['logits'\]\)"):
            loss_from("categorical")(outputs)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (nn.CrossEntropyLoss(), "loss=CrossEntropyLoss needs targets, .* loss='categorical'"),
        (nn.MSELoss, "loss=MSELoss needs targets, .* loss='normal'"),
        (F.binary_cross_entropy_with_logits, "loss=binary_cross_entropy_with_logits .* loss='multi_bernoulli'"),
        (F.cross_entropy, "loss=cross_entropy needs targets, .* loss='categorical'"),
        (nn.CTCLoss(), "loss=CTCLoss needs targets, .* one of 'categorical', 'normal', 'multi_bernoulli'"),
    ],
)
def test_a_loss_of_torch_is_told_the_distribution_behind_it(spec: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        loss_from(spec)


def test_logits_without_a_choice_are_refused() -> None:
    """The softmax of one class has no gradient, and a batch of numbers is no batch of distributions."""
    with pytest.raises(
        LossError, match=r"logits of shape \[4, 1\] have one class, .* MultiBernoulli, and another axis"
    ):
        loss_from("categorical")(X[:, :1])
    with pytest.raises(LossError, match=r"needs logits of shape \[cases, ..., classes\], and the model returns \[4\]"):
        loss_from("categorical")(X[:, 0])


def test_a_function_must_return_losses() -> None:
    with pytest.raises(LossError, match=r"the function given as loss returned a Tensor, not a loss of kfac_fx.losses"):
        loss_from(lambda outputs: outputs)(X)


def test_a_coefficient_must_be_positive() -> None:
    with pytest.raises(LossError, match=r"returned the coefficient -1; it must be positive"):
        loss_from(lambda outputs: [(-1, Normal(outputs))])(X)
