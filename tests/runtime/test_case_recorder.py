"""Gradients of single cases out of one backward: merged rows of losses, experts, parametrizations, towers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import Batch, FisherEstimator
from tests.models import ZOO
from tests.runtime.single_cases import (
    D,
    Gradients,
    Routed,
    T,
    TextWithLoss,
    V,
    assert_corrected,
    inner,
    of_each,
    of_examples,
    spectrum_of,
)
from tests.whole.test_fisher_is_exact import gradients_by_case, prepared

pytestmark = pytest.mark.usefixtures("float64")


def ids(n: int = 5) -> Tensor:
    return torch.randint(V, (n, T))


@pytest.mark.parametrize("time_first", [False, True])
def test_merged_rows_of_a_loss_are_found_again(time_first: bool) -> None:
    model, x = TextWithLoss(time_first), ids()
    approximations = {"text.norm": "generic"}  # which takes gradients of single examples
    spectrum = spectrum_of(model, x, None, approximations=approximations)
    oracle = shifted(model, x)
    rows = {name: gradient.flatten(0, 1) for name, gradient in oracle.items()}
    examples = {name: gradient.sum(1) for name, gradient in oracle.items()}
    assert_corrected(spectrum.correct([x], "sequence"), spectrum, examples)
    assert_corrected(spectrum.correct([x], "row"), spectrum, rows)


def shifted(model: TextWithLoss, x: Tensor) -> Gradients:
    """The gradients of the rows of a model that computes the loss of the next word: [N, T - 1, *shape]."""

    def loss(k: int) -> Tensor:
        n, row = divmod(k, T - 1)
        return nn.functional.cross_entropy(model.text(x[n : n + 1])[0, row], x[n, row + 1])

    flat = of_each(len(x) * (T - 1), loss, dict(model.named_parameters()))
    return {name: gradient.unflatten(0, (len(x), T - 1)) for name, gradient in flat.items()}


def test_rows_that_belong_to_no_single_example_are_replaced_by_gradients() -> None:
    model, x, y = Routed(), torch.randn(4, 5, D), torch.randint(2, (4,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    assert {registration.layer for registration in net.registrations} == {"experts", "linear"}
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    spectrum, oracle = estimator.spectrum(damping=0.1), of_examples(model, x, y)
    assert_corrected(spectrum.correct([(x, y)], "sequence"), spectrum, oracle)
    expected = inner(spectrum.multiply_inverse(oracle), oracle)
    torch.testing.assert_close(spectrum.precondition((x, y)).scores((x, y)), expected)
    torch.testing.assert_close(spectrum.self_scores((x, y)), expected.diagonal())
    assert "positions" in net.case_recorder(net.recorder((x,), {})).apart["weight",]
    assert "gradients of single examples of weight take one backward each: its rows" in " ".join(
        str(net.report).split()
    )


def test_weights_whose_rows_leave_out_a_part_are_corrected_exactly() -> None:
    case = ZOO["weight_norm"]
    model, args, targets = prepared(case)
    estimator = FisherEstimator(kfac_fx.compile(model, args, loss=case.loss), estimation_mode="empirical")
    estimator.update_covariances(*args, targets=targets)
    spectrum, each = estimator.spectrum(damping=0.1), gradients_by_case(model, case.loss, args, targets)
    oracle = {
        name: torch.stack([row.get(name, torch.zeros(shape)) for row in each])
        for name, shape in spectrum.shapes.items()
    }
    assert_corrected(spectrum.correct([Batch(*args, targets=targets)], "sequence"), spectrum, oracle)


def test_rows_in_an_unknown_order_are_refused() -> None:
    class Shuffled(TextWithLoss):
        def forward(self, ids: Tensor) -> Tensor:
            order = torch.arange(9) * 4 % 9
            logits, targets = self.text(ids)[:, :-1].flatten(0, 1)[order], ids[:, 1:].flatten()[order]
            return nn.functional.cross_entropy(logits, targets)

    x = ids(3)
    spectrum = spectrum_of(Shuffled(), x, None)
    with pytest.raises(kfac_fx.LossError, match=r"3 rows for every example, and their order is not known"):
        spectrum.correct([x])


NOISY: dict[str, tuple[Callable[[], list[nn.Module]], str | None]] = {
    "dropout": (
        lambda: [nn.Linear(4, 4), nn.Dropout(0.5)],
        "where 1 may draw random numbers or normalize over",
    ),
    "batch normalization": (lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4)], "training mode, where 1 may draw"),
    "attention": (
        lambda: [nn.TransformerEncoderLayer(4, 2, 8)],
        r"where 0\.self_attn, 0\.dropout, .* and 1 more may draw",
    ),
    "no dropout": (lambda: [nn.Linear(4, 4), nn.Dropout(0.0), nn.LayerNorm(4)], None),
    "a frozen normalization": (lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4).eval()], None),
}


@pytest.mark.parametrize(("layers", "text"), NOISY.values(), ids=NOISY)
def test_examples_in_training_mode_are_warned_of_where_they_are_not_alone(
    layers: Callable[[], list[nn.Module]], text: str | None
) -> None:
    model = nn.Sequential(*layers(), nn.Linear(4, 3))
    x = torch.randn(2, 6, 4) if isinstance(model[0], nn.TransformerEncoderLayer) else torch.randn(6, 4)
    net = kfac_fx.compile(model, (x,), loss="normal")
    with pytest.warns(UserWarning, match=text) if text else nullcontext():
        spectrum = kfac_fx.fit_spectrum(net, [x], damping=0.1)
    with pytest.warns(UserWarning, match=text) if text else nullcontext():
        spectrum.self_scores(x, measurement=lambda y: y[..., 0] if y.ndim == 2 else y[0, :, 0])
    net.eval()
    spectrum.self_scores(x, measurement=lambda y: y[..., 0] if y.ndim == 2 else y[0, :, 0])
