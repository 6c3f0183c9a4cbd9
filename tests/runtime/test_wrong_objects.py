"""Calls of the statistics with objects of another kind: an error says what a call takes, and what it got."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import losses

WRITE_NET = "write net = kfac_fx.compile(model, ...) and"
Fitted = tuple[kfac_fx.CompiledModule, kfac_fx.ModelSpectrum, kfac_fx.Queries, Any]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    """A net, a spectrum, queries, and a batch."""
    torch.manual_seed(0)
    batch = torch.randn(6, 3), torch.randint(2, (6,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net = kfac_fx.compile(model, batch[:1], loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [batch], damping=0.1)
    return net, spectrum, spectrum.precondition(batch), batch


def test_a_file_of_another_object_is_refused_in_words(fitted: Fitted, tmp_path: Path) -> None:
    net, spectrum, queries, _ = fitted
    for other in (net, queries, kfac_fx.FisherEstimator(net), None):
        wanted = f"save_spectrum takes a ModelSpectrum, and got a {type(other).__name__}: write spectrum = fit_spectrum"
        with pytest.raises(TypeError, match=re.escape(wanted)):
            kfac_fx.save_spectrum(other, tmp_path)  # type: ignore[arg-type]
    for other in (net, spectrum, {}):
        wanted = f"save_queries takes Queries, and got a {type(other).__name__}: write save_queries(spectrum.precond"
        with pytest.raises(TypeError, match=re.escape(wanted)):
            kfac_fx.save_queries(other, tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_another_object_for_a_net_is_refused_in_words(fitted: Fitted, tmp_path: Path) -> None:
    net, spectrum, queries, batch = fitted
    kfac_fx.save_spectrum(spectrum, tmp_path / "spectrum")
    kfac_fx.save_queries(queries, tmp_path / "queries")
    for other in (net.model, spectrum, queries, None):
        calls: dict[str, Callable[[Any], Any]] = {
            "load_spectrum(net, folder)": lambda net: kfac_fx.load_spectrum(net, tmp_path / "spectrum"),
            "load_queries(net, folder)": lambda net: kfac_fx.load_queries(net, tmp_path / "queries"),
            "fit_spectrum(net, ...)": lambda net: kfac_fx.fit_spectrum(net, [batch]),
            "FisherEstimator(net)": kfac_fx.FisherEstimator,
        }
        for call, function in calls.items():
            got = f"takes a compiled module, and got a {type(other).__name__}: {WRITE_NET} {call}"
            with pytest.raises(TypeError, match=re.escape(got)):
                function(other)
    with pytest.raises(TypeError, match=r"Queries takes matrices by block, and got a Sequential: write spectrum\.prec"):
        kfac_fx.Queries(net.model, queries.record)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"record is None; it must be a function"):
        kfac_fx.Queries(queries.matrices, None)  # type: ignore[arg-type]


def test_other_kinds_of_arguments_are_refused_in_words(fitted: Fitted, tmp_path: Path) -> None:
    net, spectrum, _, batch = fitted
    kfac_fx.save_spectrum(spectrum, tmp_path)
    vector = {name: torch.randn_like(parameter) for name, parameter in net.named_parameters()}
    calls: dict[str, Callable[[], Any]] = {
        "factor_dtype is 'float64'; it must be torch.float32 or torch.float64": lambda: kfac_fx.fit_spectrum(
            net, [batch], factor_dtype="float64"
        ),  # type: ignore[arg-type]
        "memory is '1 GB'; it must be a whole number of bytes, at least 1": lambda: kfac_fx.fit_spectrum(
            net, [batch], memory="1 GB"
        ),  # type: ignore[arg-type]
        "product is 3; it must be a function": lambda: spectrum.solve(vector, 3),  # type: ignore[arg-type]
        "outputs is 'logits'; it must be a function": lambda: spectrum.functional_variance(batch, outputs="logits"),  # type: ignore[arg-type]
        "generator is 0; it must be a torch.Generator, as torch.Generator()": lambda: spectrum.correct(
            [batch], generator=0
        ),  # type: ignore[arg-type]
        "any_weights is 1; it must be True or False": lambda: kfac_fx.load_spectrum(net, tmp_path, any_weights=1),  # type: ignore[arg-type]
        "any_weights is 'yes'; it must be True or False": lambda: spectrum.at(any_weights="yes"),  # type: ignore[arg-type]
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    with pytest.raises(TypeError, match=r"load_spectrum takes batches, and got a int: pass a DataLoader, or a list of"):
        kfac_fx.load_spectrum(net, tmp_path, batches=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a vector is a dict of tensors by parameter name, not a int"):
        estimator = kfac_fx.FisherEstimator(net)
        estimator.update_covariances(batch[0])
        estimator.update_inverses()
        estimator.multiply_inverse(3)  # type: ignore[arg-type]


def test_variances_that_are_not_positive_are_among_the_causes_of_sums_that_are_not_finite() -> None:
    x = torch.randn(6, 3)
    model = nn.Linear(3, 4)
    nn.init.constant_(model.bias, -9.0)
    with pytest.warns(UserWarning, match=r"^12 of the 12 variances of the NormalMeanVariance loss are not positive"):
        net = kfac_fx.compile(model, (x,), loss=lambda out: kfac_fx.losses.NormalMeanVariance(out[:, :2], out[:, 2:]))
    with pytest.raises(ValueError, match=r"is finite.*and for variances of a NormalMeanVariance that are not positive"):
        kfac_fx.fit_spectrum(net, [(x, torch.randn(6, 2))])


def test_inputs_and_targets_apart_are_refused_in_words(fitted: Fitted) -> None:
    _, spectrum, queries, (x, y) = fitted
    functional: Any = spectrum.functional_variance
    calls: dict[str, tuple[Callable[..., Any], str]] = {
        "precondition": (spectrum.precondition, "measurement=, rank="),
        "self_scores": (spectrum.self_scores, "by=, measurement="),
        "functional_variance": (functional, "outputs=, diagonal="),
        "scores": (queries.scores, "by=, measurement="),
    }
    for name, (function, options) in calls.items():
        wanted = (
            f"{name} takes one batch, and got 2 arguments without names. Inputs and targets are one batch, as a "
            f"DataLoader yields them: write {name}((x, y)). Arguments of forward are one, too: write "
            f"{name}(kfac_fx.Batch(a, b, targets=y)). All options have names: {options}."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
            function(x, y)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.linear(a + b)
        return out


def test_a_call_that_does_not_fit_a_signature_says_what_to_write(fitted: Fitted) -> None:
    net, spectrum, _, (x, y) = fitted
    compile, fit, estimator = map(cast_any, (kfac_fx.compile, kfac_fx.fit_spectrum, kfac_fx.FisherEstimator))
    of_forward = "Several inputs of forward are one argument: write {}(model, (x, mask))."
    calls: dict[str, Callable[[], Any]] = {
        "compile takes model, example_inputs and example_kwargs, and got 4 arguments without names. "
        + of_forward.format("compile")
        + " All other options have names: loss=, linked=, ": lambda: compile(TwoInputs(), x, x, x),
        "example_kwargs is a Tensor; it must be a dict, as in {'mask': mask}. "
        + of_forward.format("compile"): lambda: compile(TwoInputs(), x, x),
        "example_kwargs is a Tensor; it must be a dict, as in {'mask': mask}. "
        + of_forward.format("capture"): lambda: kfac_fx.capture(TwoInputs(), x, x),  # type: ignore[arg-type]
        "compile has no option 'mask'. Write padding_mask=..., the name ": lambda: compile(TwoInputs(), (x, x), mask=x),
        "compile has no option 'criterion'. Write loss=..., as in loss='cross_entropy'.\n"
        "Its options are model, example_inputs, example_kwargs, loss, ": lambda: compile(net.model, criterion="mse"),
        "compile has no option 'aproximations'. Did you mean 'approximations'?\ncompile has no option 'zzz'.\n"
        "Its options are model, ": lambda: compile(net.model, aproximations={}, zzz=1),
        "fit_spectrum takes net and batches, and got 3 arguments without names. Inputs and targets are one batch of "
        "the data: write fit_spectrum(net, [(x, y)]), or pass a DataLoader. All other options have names: mode=, "
        "case=, ": lambda: fit(net, x, y),
        "fit_spectrum has no option 'estimation_mode'. Write mode=....\nIts options are net, batches, mode, ": lambda: (
            fit(net, [(x, y)], estimation_mode="exact")
        ),
        "fit_spectrum has no option 'dampin'. Did you mean 'damping'?": lambda: fit(net, [(x, y)], dampin=0.1),
        "fit_spectrum needs batches: write fit_spectrum(net, batches=...).": lambda: fit(net),
        "FisherEstimator has no option 'mode'. Write estimation_mode=....\nIts options are net, variables, ": lambda: (
            estimator(net, mode="exact")
        ),
        "at takes no argument without a name, and got 1. All options have names: scale=, damping=, any_weights=.": (
            lambda: cast_any(spectrum).at(0.1)
        ),
        "at has no option 'dampings'. Did you mean 'damping'?": lambda: cast_any(spectrum).at(dampings=0.1),
        "sample needs count: write sample(count=...).": lambda: cast_any(spectrum).sample(),
        "sample takes count and generator, and got 3 arguments without names.": lambda: cast_any(spectrum).sample(
            1, None, None
        ),
        "precondition has no option 'ranks'. Did you mean 'rank'?": (
            lambda: cast_any(spectrum).precondition((x, y), ranks=1)
        ),
    }
    for wanted, call in calls.items():
        with pytest.raises(TypeError, match=f"^{re.escape(wanted)}"):
            call()


def cast_any(value: object) -> Any:
    """For a type checker, which knows that the calls are wrong."""
    return value


def test_a_decorated_function_keeps_its_own_type_errors_and_its_signature(fitted: Fitted) -> None:
    def failing(_: object, __: object) -> Tensor:
        raise TypeError("of the user")

    net, spectrum, _, (x, y) = fitted
    with pytest.raises(TypeError, match="^of the user$"):
        spectrum.precondition((x, y), measurement=cast_any(failing))
    assert list(inspect.signature(kfac_fx.compile).parameters)[:3] == ["model", "example_inputs", "example_kwargs"]
    assert "estimation_mode" in inspect.signature(kfac_fx.FisherEstimator).parameters
    assert spectrum.sample(2)["0.weight"].shape == (2, *net.get_parameter("0.weight").shape)


class Mine(losses.Normal):
    """A loss of the user, whose constructor is the library's."""

    name = ""


def test_a_loss_without_outputs_is_told_to_take_them() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "Categorical is a loss of outputs, and got none: write loss='categorical', or loss=lambda outputs: "
        "kfac_fx.losses.Categorical(outputs)": lambda: cast_any(losses.Categorical)(),
        "Normal is a loss of outputs, and got none: write loss=lambda outputs: kfac_fx.losses.Normal(outputs, "
        "var=1.0)": lambda: cast_any(losses.Normal)(var=1.0),
        "NormalMeanVariance is a loss of outputs, and got none: write loss=lambda outputs: "
        "kfac_fx.losses.NormalMeanVariance(outputs[0], outputs[1].exp())": lambda: cast_any(
            losses.NormalMeanVariance
        )(),
        "Mine is a loss of outputs, and got none: write loss=Mine, or loss=lambda outputs: Mine(outputs)": (
            lambda: cast_any(Mine)()
        ),
        "Normal has no option 'variance'.\nIts options are mean, var, targets, seed.": (
            lambda: cast_any(losses.Normal)(torch.ones(2, 1), variance=1.0)
        ),
    }
    for wanted, call in calls.items():
        with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
            call()
    again = pickle.loads(pickle.dumps(copy.deepcopy(losses.Normal(torch.ones(2, 1), var=2.0))))
    assert torch.equal(again.inputs, torch.ones(2, 1))


def test_a_block_that_no_spectrum_has_is_told_as_that_of_an_estimator(fitted: Fitted) -> None:
    net, spectrum, _, _ = fitted
    for blocks in (spectrum.eigenvalues(), kfac_fx.FisherEstimator(net).blocks):
        wanted = "there is no block '0.weight': a key is the tuple of all parameters of a block, in their order, as in"
        with pytest.raises(kfac_fx.NotRegisteredError, match=rf"^{wanted}\n  \('0\.weight', '0\.bias'\)$"):
            blocks["0.weight"]  # type: ignore[index]
    factors = kfac_fx.FisherEstimator(net).blocks["0.weight", "0.bias"].factors
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"^this block has no factor 'B', but 'G', 'A', 'positions'$"):
        factors["B"]


def test_scores_without_targets_do_not_speak_of_a_mode(fitted: Fitted) -> None:
    _, spectrum, queries, (x, _) = fitted
    wanted = (
        "the gradient of the loss of an example needs its targets: write batches as (x, y), as in "
        "spectrum.precondition((x, y)), or pass measurement=, a function of the outputs alone. These losses have "
        "none:\n  Categorical of [6, 2]  wants class numbers, one for each distribution"
    )
    for call in (spectrum.precondition, spectrum.self_scores, queries.scores):
        with pytest.raises(kfac_fx.TargetsMissing, match=f"^{re.escape(wanted)}$"):
            call(x)
    spectrum.precondition(x, measurement=lambda outputs: outputs[:, 0])


def test_a_batch_in_one_object_is_told_to_be_arguments_of_update_covariances(fitted: Fitted) -> None:
    net, _, _, (x, y) = fitted
    for mode, alone in (
        ("gradients", "update_covariances(x), because this mode draws targets, or "),
        ("empirical", ""),
    ):
        estimator = kfac_fx.FisherEstimator(net, estimation_mode=mode)
        with pytest.raises(kfac_fx.UntraceableError) as error:
            estimator.update_covariances((x, y))
        assert error.value.__notes__ == [
            "update_covariances takes the arguments of forward, and got a tuple of 2. If this is a batch (x, y), write "
            f"{alone}update_covariances(x, targets=y)."
        ]
        with pytest.raises(TypeError, match=r"write estimator\.update_covariances\(\*batch\.args, targets=batch\.tar"):
            estimator.update_covariances(kfac_fx.Batch(x, targets=y))
        with pytest.raises(TypeError, match=r"got a dict of them: write estimator\.update_covariances\(\*\*batch\)"):
            estimator.update_covariances({"input": x})


def test_an_index_beyond_a_table_is_of_the_example_inputs() -> None:
    wanted = (
        "Sequential does not run on these inputs: IndexError: index out of range in self\nThe error is of 0, which got "
        "[1, 2].\nCorrect the inputs or the model: an index must be below the number of entries, as a token below "
        "num_embeddings of its nn.Embedding."
    )
    model = nn.Sequential(nn.Embedding(5, 4))
    with pytest.raises(kfac_fx.InputError, match=f"^{re.escape(wanted)}$"):
        kfac_fx.compile(model, (torch.tensor([[1, 7]]),), loss="categorical")
    net = kfac_fx.compile(model, (torch.tensor([[1, 2]]),), loss="categorical")
    with pytest.raises(IndexError):  # the model's own, as without the library
        net(torch.tensor([[1, 7]]))


class Silent(nn.Module):
    """With an assertion that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            raise AssertionError  # pytest would give words to an assert
        out: Tensor = self.linear(x)
        return out


def test_an_assertion_without_words_is_quoted_once() -> None:
    with pytest.raises(kfac_fx.UntraceableError) as error:
        kfac_fx.compile(Silent(), (torch.randn(6, 3),), loss="categorical")
    first, *_, last = str(error.value).splitlines()
    assert first == "Silent does not run on these inputs: AssertionError" and last == "Correct the inputs or the model."


def test_a_model_that_waits_for_its_first_forward_says_what_to_write() -> None:
    net = kfac_fx.compile(Silent(), loss="categorical")
    with pytest.raises(kfac_fx.UntraceableError, match=r"write kfac_fx\.compile\(model, \(x,\), \.\.\.\) for"):
        kfac_fx.KFAC(net)


class Agent(nn.Module):
    """Is called by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.frozen = nn.Linear(3, 2), nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

    def values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def test_a_module_without_a_forward_is_told_to_have_one() -> None:
    for inputs in (None, (torch.randn(6, 3),)):
        with pytest.raises(
            kfac_fx.UntraceableError, match=r"^Agent has no forward, and a capture is one of forward: "
        ) as e:
            kfac_fx.compile(Agent(), inputs)
        assert str(e.value).endswith(
            "or compile the submodules that the training calls, of actor, critic, each with an optimizer of its own"
        )
    agent = Agent()
    vars(agent)["forward"] = agent.values
    assert len(kfac_fx.compile(agent, (torch.randn(6, 3),)).registrations) == 2
