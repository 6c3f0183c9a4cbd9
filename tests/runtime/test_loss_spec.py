"""The values that a user may write as `loss=`."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.losses import Categorical, LossFunction, MultiBernoulli, Normal, NormalMeanVariance
from kfac_fx.losses.declared import loss_from
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bce", "bce_with_logits"), ("BCELoss", "bce_with_logits"), ("CE", "cross_entropy"), ("l2", "mse"),
     ("msee", "mse"), ("crossentropy", "cross_entropy"), ("gaussian", "normal")],
)  # fmt: skip
def test_other_names_are_told_what_they_are_here(name: str, meant: str) -> None:
    with pytest.raises(LossError, match=f"loss '{name}' is none of .*'mse'.* Did you mean '{meant}'"):
        loss_from(name)


@pytest.mark.parametrize("name", ["nll", "nll_loss", "NLLLoss"])
def test_a_loss_of_log_probabilities_says_that_they_are_logits(name: str) -> None:
    text = (
        f"loss '{name}' is none of .*F.nll_loss takes logarithms of probabilities, .* write loss=\"cross_entropy\" if"
    )
    with pytest.raises(LossError, match=text):
        loss_from(name)


def test_log_probabilities_are_logits_of_the_loss_that_the_message_names() -> None:
    logits, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    torch.testing.assert_close(F.cross_entropy(logits.log_softmax(1), y), F.nll_loss(logits.log_softmax(1), y))
    ((_, loss),) = loss_from("cross_entropy")(logits.log_softmax(1))
    torch.testing.assert_close(loss.inputs.softmax(-1), logits.softmax(1))


def targets_of(name: str, shape: tuple[int, ...]) -> Tensor:
    if name == "cross_entropy":
        return torch.randint(shape[1], (shape[0], *shape[2:]))
    return torch.randn(shape) if name == "mse" else torch.rand(shape).round()


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)])
@pytest.mark.parametrize(
    ("names", "function"),
    [
        (("mse", "mse_loss"), F.mse_loss),
        (("cross_entropy",), F.cross_entropy),
        (("bce_with_logits", "binary_cross_entropy_with_logits"), F.binary_cross_entropy_with_logits),
    ],
)
def test_the_names_of_torch_mean_torchs_functions(
    names: tuple[str, ...], function: Any, shape: tuple[int, ...]
) -> None:
    """The gradient of the mean over cases is that of torch's mean, whatever the shape."""
    for name in names:
        outputs, targets = torch.randn(shape, requires_grad=True), targets_of(names[0], shape)
        ((coefficient, loss),) = loss_from(name)(outputs, targets)
        (ours,) = torch.autograd.grad(coefficient * loss.evaluate() / loss.cases, outputs)
        (of_torch,) = torch.autograd.grad(function(outputs, targets), outputs)
        torch.testing.assert_close(ours, of_torch)


def test_a_name_of_torch_says_how_to_choose_an_output() -> None:
    expression = r"loss=lambda outputs: \(len\(outputs\[0\]\) / outputs\[0\].numel\(\), kfac_fx.losses.Normal\(outputs"
    with pytest.raises(LossError, match=f"(?s)loss='mse' needs one output tensor, .* {expression}"):
        loss_from("mse")((X, X))
    with pytest.raises(LossError, match=r"needs logits of shape \[cases, ..., classes\], and the model returns \[4\]"):
        loss_from("cross_entropy")(X[:, 0])


def test_something_that_is_no_loss_is_refused() -> None:
    for wrong in (3, Normal(X), dict):
        with pytest.raises(LossError, match=r"loss is a (int|Normal|type); pass a name, a class of kfac_fx.losses, or"):
            loss_from(wrong)  # type: ignore[arg-type]


def test_losses_of_several_outputs_have_their_form_in_the_error() -> None:
    form = (
        ". For several outputs write loss=lambda outputs: [kfac_fx.losses.Categorical(outputs[0]), (0.5, "
        "kfac_fx.losses.Normal(outputs[1]))]\nA number in front of a loss is its coefficient. Normal is a sum over the "
        "k elements of a case, so the mean over them has the coefficient 1 / k"
    )
    for wrong in (["mse"], ("mse", X), "mse"):
        with pytest.raises(LossError, match="the function given as loss returned a (str|tuple)") as error:
            loss_from(lambda outputs, wrong=wrong: wrong)(X)
        assert str(error.value).endswith(form)
    with pytest.raises(LossError) as error:
        loss_from({"kind": "categorical", "box": "mse"})  # type: ignore[arg-type]
    assert str(error.value).endswith(form)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ({"size": X, "loss": X.sum(), "kind": X}, ("outputs['size']", "outputs['kind']")),
        ((X.sum(), X, X), ("outputs[1]", "outputs[2]")),
        ({"kind": X}, ("outputs[0]", "outputs[1]")),
    ],
)
def test_the_form_for_several_outputs_has_those_of_the_model(outputs: Any, names: tuple[str, str]) -> None:
    form = f"[kfac_fx.losses.Categorical({names[0]}), (0.5, kfac_fx.losses.Normal({names[1]}))]"
    with pytest.raises(LossError, match="returned a str") as error:
        loss_from(lambda _: "mse")(outputs)
    assert form in str(error.value)


def test_the_form_for_several_outputs_begins_with_the_distribution_that_was_named() -> None:
    with pytest.raises(LossError) as error:
        loss_from("mse")((X, X))
    form = "[kfac_fx.losses.Normal(outputs[0]), (0.5, kfac_fx.losses.Normal(outputs[1]))]"
    assert form in str(error.value) and "Categorical" not in str(error.value)


@pytest.mark.parametrize("spec", ["gaussian_nll", "GaussianNLLLoss", nn.GaussianNLLLoss(), F.gaussian_nll_loss])
def test_a_loss_of_a_mean_and_a_variance_is_told_its_class(spec: Any) -> None:
    written = "write loss=lambda outputs: kfac_fx.losses.NormalMeanVariance(outputs[0], outputs[1])"
    with pytest.raises(LossError, match="gaussian|Gaussian") as error:
        loss_from(spec)
    assert written in str(error.value)


def test_a_distribution_without_its_last_argument_says_how_all_are_written() -> None:
    with pytest.raises(TypeError, match=r"needs variance: write NormalMeanVariance\(mean, variance=\.\.\.\)"):
        NormalMeanVariance(X)  # type: ignore[call-arg]


def test_a_name_that_is_like_no_other_has_two_ways_on() -> None:
    ways = (
        ". For another loss leave loss= out, and the factors are those of the gradients that training sends back; or "
        "pass the class of a distribution that is near it, see the page on losses of your own."
    )
    for name in ("l1", "hinge"):
        with pytest.raises(LossError) as error:
            loss_from(name)
        assert str(error.value).endswith(ways)
    with pytest.raises(LossError) as error:
        loss_from("crossentropy")
    assert str(error.value).endswith(" Did you mean 'cross_entropy'?")


@pytest.mark.parametrize("outputs", [{"logits": X}, (X, X), 3])
def test_a_named_loss_says_how_to_choose_an_output(outputs: Any) -> None:
    with pytest.raises(
        LossError,
        match=r"loss='normal' needs one output tensor, and the model returns a (dict|tuple|int)( of .*)?\.",
    ):
        loss_from("normal")(outputs)
    if isinstance(outputs, dict):
        with pytest.raises(LossError, match=r"kfac_fx\.losses\.Categorical\(outputs\['logits'\]\)"):
            loss_from("categorical")(outputs)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (nn.CrossEntropyLoss(), "loss=CrossEntropyLoss needs targets, .* loss='cross_entropy'"),
        (nn.MSELoss, "loss=MSELoss needs targets, .* loss='mse'"),
        (F.binary_cross_entropy_with_logits, "loss=binary_cross_entropy_with_logits .* loss='bce_with_logits'"),
        (F.cross_entropy, "loss=cross_entropy needs targets, .* loss='cross_entropy'"),
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


def test_a_coefficient_of_zero_says_to_leave_its_term_out() -> None:
    with pytest.raises(
        LossError, match=r"the coefficient 0; it must be positive. Leave the term out .* \(weight > 0\)"
    ):
        loss_from(lambda outputs: [Normal(outputs), (0.0, Normal(outputs))])(X)


def test_a_coefficient_may_be_a_tensor_that_changes() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    spec = loss_from(lambda outputs: (weight, Normal(outputs)))
    assert spec(X)[0][0] == 2.0
    with torch.no_grad():
        weight.fill_(3.0)
    assert spec(X)[0][0] == 3.0


def test_a_coefficient_behind_its_loss_is_refused() -> None:
    with pytest.raises(LossError) as raised:
        loss_from(lambda outputs: [Normal(outputs, targets=0.5)])(X)
    assert str(raised.value) == (
        "the function given as loss returned a Normal whose targets are the number 0.5. If it is a coefficient, write "
        "it in front of the loss, as in (0.5, kfac_fx.losses.Normal(outputs))"
    )
    with pytest.raises(LossError, match=r"a number in front of a loss is its coefficient"):
        loss_from(lambda outputs: [(Normal(outputs), 0.5)])(X)


@pytest.mark.parametrize(
    ("outputs", "described"),
    [
        ((X, X[:2]), f"a tuple of {list(X.shape)}, {list(X[:2].shape)}"),
        ({"logits": X, "step": 3}, f"a dict of 'logits': {list(X.shape)}, 'step': a int"),
        ([], "a list of nothing"),
        (3, "a int"),
    ],
)
def test_an_error_of_the_function_tells_what_the_model_returned(outputs: Any, described: str) -> None:
    with pytest.raises((TypeError, IndexError, KeyError)) as raised:
        loss_from(lambda outputs: Categorical(outputs["labels" if isinstance(outputs, dict) else 2]))(outputs)
    assert raised.value.__notes__ == [
        f"the function given as loss raised this, called with what the model returned: {described}"
    ]


def test_targets_in_a_list_of_numbers_are_no_sequence_of_targets() -> None:
    ((_, loss),) = loss_from("cross_entropy")(torch.randn(3, 4), [0, 1, 2])
    with pytest.raises(LossError, match=r"targets are a list; write torch\.as_tensor"):
        loss.evaluate()


def test_a_function_whose_arguments_python_cannot_tell_is_taken() -> None:
    ((_, loss),) = loss_from(operator.itemgetter("of the model"))({"of the model": Normal(X)})
    assert loss.inputs is X


@pytest.mark.parametrize("kind", [Categorical, Normal, MultiBernoulli])
@pytest.mark.parametrize(
    ("outputs", "key", "written"),
    [
        ({"loss": torch.tensor(1.0), "logits": X}, "loss", r"outputs\['logits'\]"),
        ((torch.tensor(1.0), X), 0, r"outputs\[1\]"),
        ([torch.tensor(1.0)], 0, "outputs"),
    ],
)
def test_a_distribution_of_the_returned_loss_is_refused(kind: Any, outputs: Any, key: Any, written: str) -> None:
    text = rf"gives a {kind.__name__} of one number, as a loss is.*: write loss=.*{kind.__name__}\({written}\)"
    with pytest.raises(LossError, match=text):
        loss_from(lambda outputs: kind(outputs[key]))(outputs)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("pair", "text"),
    [
        ((Normal(X), 10.0), r"whose coefficient is behind the loss, and a .*: write \(10, kfac_fx.losses.Normal\("),
        (
            (torch.ones(4, 1), Normal(X)),
            r"of shape \[4, 1\], and a coefficient is one number .*Normal\(weights.sqrt\(\)",
        ),
    ],
)
def test_a_pair_in_the_other_order_or_with_weights_of_cases_says_what_to_write(
    pair: Any, text: str, listed: bool
) -> None:
    with pytest.raises(LossError, match=text):
        loss_from(lambda outputs: [pair] if listed else pair)(X)


def test_the_loss_of_a_training_is_no_distribution() -> None:
    text = (
        "returned a tensor, as the loss of a training is. loss= names the distribution of the outputs, without targets"
    )
    with pytest.raises(LossError, match=text):
        loss_from(lambda outputs: outputs.square().mean())(X)


NO_NUMBERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a number in front": (
        lambda a, b: [a, 10 * b],
        r"a pair, as in loss=lambda outputs: \(10, kfac_fx.losses.Normal\(",
    ),
    "a number behind": (lambda a, b: a * 10.0, r"\(10, kfac_fx.losses.Normal\("),
    "a tensor in front": (lambda a, b: torch.tensor(3.0) * a, r"\(weight, kfac_fx.losses.Normal\("),
    "a divisor": (lambda a, b: a / 2, r"\(0\.5, kfac_fx.losses.Normal\("),
    "a sum": (
        lambda a, b: a + b,
        r"loss=lambda outputs: \[kfac_fx.losses.Normal\(\.\.\.\), \(0\.5, kfac_fx.losses.Normal",
    ),
    "a sum of a list": (lambda a, b: sum([a, b]), "several losses are a list"),
    "a difference": (lambda a, b: a - b, "several losses are a list"),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_arithmetic_of_losses_says_how_coefficients_and_several_losses_are_written(case: str) -> None:
    """It ended in a TypeError of Python about unsupported operands."""
    combined, text = NO_NUMBERS[case]
    with pytest.raises(LossError, match=text):
        kfac_fx.compile(
            nn.Linear(3, 2), (torch.randn(4, 3),), loss=lambda r: combined(Normal(r[:, :1]), Normal(r[:, 1:]))
        )
