"""Calls of the statistics with objects of another kind: an error says what a call takes, and what it got."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kfac_fx

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
