"""A spectrum, or queries, in memory are of the weights that they were made with, and others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import FisherEstimator
from kfac_fx.estimator.queries import SAMPLED, Weights

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def fitted() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).eval()
    return kfac_fx.fit_spectrum(kfac_fx.compile(model, (X,), loss="categorical"), [(X, Y)], damping=0.1)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def other_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data + 1  # type: ignore[index,operator]


def permuted(model: nn.Module) -> None:
    with torch.no_grad():
        model[3].weight.copy_(model[3].weight[[1, 0, 2]])  # type: ignore[index]


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a step": (train, "0.weight, 0.bias, 1.weight, 1.bias and 2 more"),
    "other data": (other_data, "0.weight"),
    "a write into the data": (lambda model: model[3].bias.data.sub_(0.1), "3.bias"),  # type: ignore[index]
    "a permutation": (permuted, "3.weight"),
    "other statistics": (lambda model: model[1].running_mean.add_(1.0), "1.running_mean"),  # type: ignore[index]
}
USES: dict[str, Callable[[Any, Any], Any]] = {
    "precondition": lambda spectrum, queries: spectrum.precondition((X, Y)),
    "self_scores": lambda spectrum, queries: spectrum.self_scores((X, Y)),
    "functional_variance": lambda spectrum, queries: spectrum.functional_variance(X),
    "correct": lambda spectrum, queries: spectrum.at(damping=0.3).part(["0.weight", "0.bias"]).correct([(X, Y)]),
    "scores": lambda spectrum, queries: queries.scores((X, Y)),
    "positions": lambda spectrum, queries: queries.scores((X, Y), by="position"),
    "all scores": lambda spectrum, queries: queries.scores_of_all([(X, Y)]),
}


@pytest.mark.parametrize(("change", "names"), CHANGES.values(), ids=CHANGES)
def test_uses_after_a_change_of_the_weights_are_refused(change: Any, names: str, tmp_path: Path) -> None:
    spectrum = fitted()
    queries = spectrum.precondition((X, Y))
    vector = {name: torch.ones_like(p) for name, p in spectrum.net.named_parameters()}
    by_hand = spectrum.queries(vector)
    change(spectrum.net.model)
    for name, use in USES.items():
        things = (
            "this spectrum was"
            if name in ("precondition", "self_scores", "functional_variance", "correct")
            else "these"
        )
        with pytest.raises(ValueError, match=rf"^the weights have changed since {things}.*: {names}\. Gradients of"):
            use(spectrum, queries)
    with pytest.raises(ValueError, match="the weights have changed"):
        by_hand.scores((X, Y))
    for save, of in ((kfac_fx.save_spectrum, spectrum), (kfac_fx.save_queries, queries)):
        with pytest.raises(ValueError, match="the weights have changed"):
            save(of, tmp_path / "made")
    moved = spectrum.multiply(vector)  # products are of the old weights, as a penalty needs them
    assert all(bool(tensor.isfinite().all()) for tensor in moved.values())
    free = spectrum.at(any_weights=True).at(damping=0.2)
    assert free.any_weights and free.self_scores((X, Y)).shape == (6,)
    assert free.precondition((X, Y)).scores((X, Y)).shape == (6, 6)
    with pytest.raises(ValueError, match="not known any more which weights"):
        free.at(any_weights=False)


def test_the_same_weights_again_are_the_same_weights() -> None:
    spectrum = fitted()
    model, queries = spectrum.net.model, spectrum.precondition((X, Y))
    before, state = spectrum.self_scores((X, Y)), copy.deepcopy(model.state_dict())
    train(model)
    with pytest.raises(ValueError, match=r"Or take it as it is, by spectrum\.at\(any_weights=True\)\.$"):
        spectrum.self_scores((X, Y))
    with pytest.raises(
        ValueError, match=r"Or take queries of any weights, by spectrum\.at\(any_weights=True\) or load_q"
    ):
        queries.scores((X, Y))
    model.load_state_dict(state)
    assert torch.equal(spectrum.self_scores((X, Y)), before)
    model.train()
    model(X)  # statistics that a training forward writes and does not read
    with pytest.warns(UserWarning, match="in training mode"):
        spectrum.self_scores((X, Y))


def test_loaded_ones_are_refused_after_a_change_unless_any_weights_are_asked_for(tmp_path: Path) -> None:
    spectrum = fitted()
    net = spectrum.net
    kfac_fx.save_spectrum(spectrum, tmp_path / "spectrum")
    kfac_fx.save_queries(spectrum.precondition((X, Y)), tmp_path / "queries")
    loaded, queries = kfac_fx.load_spectrum(net, tmp_path / "spectrum"), kfac_fx.load_queries(net, tmp_path / "queries")
    other_data(net.model)
    for use in (lambda: loaded.at(damping=0.1).self_scores((X, Y)), lambda: queries.scores((X, Y))):
        with pytest.raises(ValueError, match="the weights have changed"):
            use()
    with pytest.warns(UserWarning, match="any_weights=True"):
        free = kfac_fx.load_spectrum(net, tmp_path / "spectrum", damping=0.1, any_weights=True)
        of_any = kfac_fx.load_queries(net, tmp_path / "queries", any_weights=True)
    other_data(net.model)
    assert free.self_scores((X, Y)).shape == (6,) and of_any.scores((X, Y)).shape == (6, 6)


def test_an_estimator_s_spectrum_is_of_the_weights_of_its_time() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    estimator = FisherEstimator(kfac_fx.compile(model, (X,), loss="categorical"))
    estimator.update_covariances(X)
    spectrum = estimator.spectrum(damping=0.1)
    train(model)
    with pytest.raises(ValueError, match="the weights have changed since this spectrum was made: weight, bias"):
        spectrum.self_scores((X, Y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
def test_every_small_change_of_a_tensor_of_any_precision_is_told(dtype: torch.dtype) -> None:
    def told(change: Callable[[Tensor], Tensor], beside: Tensor) -> list[str]:
        model = nn.Module()
        numbers = torch.arange(12).view(3, 4).remainder(5).to(dtype)
        model.register_buffer("numbers", numbers.clone())
        model.register_buffer("beside", beside)
        weights = Weights.of(model.eval())
        model.numbers.copy_(change(numbers))
        return weights.changed()

    for beside in (torch.tensor([1.0, torch.nan]), torch.arange(3), torch.ones(2, dtype=torch.float64)):
        assert told(lambda numbers: numbers.clone(), beside) == []
        assert told(lambda numbers: numbers.flip(0), beside) == ["numbers"]
        assert told(lambda numbers: numbers.roll(1, 1), beside) == ["numbers"]


def test_numbers_that_swap_places_with_equal_sums_are_told() -> None:
    model = nn.Linear(4, 3)
    weights = Weights.of(model)
    with torch.no_grad():
        row = model.weight[0].clone()
        model.weight[0] = row[[3, 1, 2, 0]]  # every third number has the same sum
    assert weights.changed() == ["weight"]


def test_a_tensor_of_another_size_is_told_and_another_precision_is_not() -> None:
    model = nn.Linear(4, 3)
    weights = Weights.of(model)
    model.double()
    assert weights.changed() == []
    model.bias = nn.Parameter(torch.zeros(5))
    assert weights.changed() == ["bias"]


def test_large_tensors_are_told_by_a_part_of_their_numbers() -> None:
    model = nn.Linear(300, 40)
    weights = Weights.of(model)
    assert len(weights.numbers) <= SAMPLED + 40
    with torch.no_grad():
        model.weight.mul_(1.001)
    assert weights.changed() == ["weight"]


@pytest.mark.parametrize("shape", [(100, 200), (5000, 4), (64, 30, 3, 3), (96, 96)])
def test_a_change_of_any_column_of_a_large_weight_is_noticed(shape: tuple[int, ...]) -> None:
    """The samples of a [100, 200] were five apart, so four of five columns could change without a word."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(shape))
    assert module.weight.numel() > SAMPLED
    before, numbers = Weights.of(module), module.weight.detach().clone()
    for dim in range(1, len(shape)):
        for place in range(shape[dim]):
            with torch.no_grad():
                module.weight.copy_(numbers).select(dim, place).mul_(0.5)
            assert before.changed() == ["weight"]
