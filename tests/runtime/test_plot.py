"""The figures show the numbers of the training, and errors say what to write."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.optim import plot
from kfac_fx.optim.metrics import Metrics
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.errors import FactorNotReady


@pytest.fixture(scope="module")
def trained() -> tuple[KFAC, plot.History]:
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)), loss="categorical")
    optimizer = KFAC(net, momentum_type="adaptive", cov_update_every=1, invert_every=1)
    history = plot.History()
    Metrics(optimizer, history, every=2)
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 5)
        nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    return optimizer, history


def test_a_history_has_the_values_of_every_reading_by_name(trained: tuple[KFAC, plot.History]) -> None:
    optimizer, history = trained
    assert history.steps == [2, 4, 6] and len(history["damping"]) == 3
    assert history["damping"][-1] == optimizer.damping.item()
    history = plot.History()
    history({"a": 1.0}, 1)
    history({"b": 2.0}, 2)
    assert history["a"][0] == 1.0 and math.isnan(history["a"][1])
    with pytest.raises(KeyError, match=r"no step has a value 'dampin'"):
        history["dampin"]


def test_damping_and_rho_are_drawn_over_the_steps(trained: tuple[KFAC, plot.History]) -> None:
    _, history = trained
    figure = plot.training(history)
    damping, rho = figure.axes
    assert figure.get_size_inches().tolist() == [7.0, 4.8]
    assert list(damping.lines[0].get_xdata()) == history.steps
    assert list(damping.lines[0].get_ydata()) == history["damping"] and damping.get_yscale() == "log"
    assert list(rho.lines[0].get_ydata()) == history["rho"]


def test_a_training_without_damping_shows_the_norm_of_its_updates() -> None:
    history = plot.History()
    for step in range(1, 4):
        history({"norm/update": 0.5} | ({"rho": 1.0} if step > 1 else {}), step)
    update, rho = plot.training(history).axes
    assert list(update.lines[0].get_ydata()) == [0.5] * 3 and update.get_ylabel() == "norm of the update"
    assert [line.get_ydata()[0] for line in rho.lines[1:]] == [1.0], "no damping is adapted at other bounds"


def test_one_bad_step_does_not_hide_the_others() -> None:
    history = plot.History()
    for step in range(1, 101):
        history({"damping": 1.0, "rho": -1e6 if step == 50 else math.nan if step < 5 else 1.0}, step)
    _, rho = plot.training(history).axes
    assert rho.get_ylim() == (-0.1, 1.5)


def test_the_share_of_a_phase_counts_steps_and_not_readings() -> None:
    history = plot.History()
    for step, record, update in ((10, 9.0, 9.0), (20, 0.3, 0.1), (50, 0.0, 0.1)):  # a mean of 10, and one of 30 steps
        history(
            {"seconds/record": record, "seconds/statistics": 0, "seconds/inverses": 0, "seconds/update": update}, step
        )
    figure = plot.phases(history)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "record 43%",  # 3 of 7 seconds, without the first values
        "statistics 0%",
        "inverses 0%",
        "update 57%",
    ]
    (axes,) = figure.axes
    assert axes.get_ylim()[1] == pytest.approx(1.05 * 400)
    record, *_, update = axes.patches
    assert list(record.get_data().values) == pytest.approx([9000, 300, 0])
    assert list(update.get_data().values) == pytest.approx([18000, 400, 100])  # on top of the others


def test_the_spectra_are_the_eigenvalues_of_every_factor(trained: tuple[KFAC, plot.History]) -> None:
    optimizer, _ = trained
    figure = plot.spectra(optimizer)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["factor A", "factor F", "factor G"]
    axes = figure.axes[0]
    curves = {line.get_label(): torch.tensor(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 1}
    for block in optimizer.estimator.blocks.values():
        if "A" in block.factors:
            expected = torch.linalg.eigvalsh(block.factors["A"].value[0].double()).flip(0)
            torch.testing.assert_close(curves[str(block.registration)], expected, rtol=1e-4, atol=1e-6)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [str(block.registration) for block in optimizer.estimator.blocks.values()]


def test_a_point_is_the_last_eigenvalue_above_the_damping() -> None:
    net = compile(nn.Linear(3, 2, bias=False), loss="normal", approximations={"*": "full"})
    estimator = FisherEstimator(net, damping=0.5, estimation_mode="exact")
    estimator.update_covariances(torch.diag(torch.tensor([6.0, 2.0, 0.1])))
    (axes,) = plot.spectra(estimator).axes
    curve, point = axes.lines
    assert len(curve.get_ydata()) == 6
    assert list(point.get_xdata()) == [4]  # 12, 12, 1.3 and 1.3 are above 0.5
    assert point.get_ydata()[0] == pytest.approx(float(curve.get_ydata()[3]))


def test_many_blocks_have_a_scale_of_colors() -> None:
    net = compile(nn.Sequential(*(nn.Linear(3, 3) for _ in range(plot.NAMED + 1))), loss="normal")
    estimator = FisherEstimator(net, damping=1e-2)
    estimator.update_covariances(torch.randn(8, 3))
    figure = plot.spectra(estimator)
    assert not figure.legends
    assert [text.get_text() for text in figure.axes[-1].get_yticklabels()] == [
        "linear(0.weight, 0.bias)",
        f"linear({plot.NAMED}.weight, {plot.NAMED}.bias)",
    ]


def test_what_is_missing_is_said(trained: tuple[KFAC, plot.History], monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in (plot.training, plot.phases):
        with pytest.raises(ValueError, match=re.escape("kfac_fx.Metrics(optimizer, history, every=n)")):
            draw(plot.History())
    with pytest.raises(TypeError, match="spectra takes a kfac_fx.KFAC or a FisherEstimator, and got a Adam"):
        plot.spectra(torch.optim.Adam([torch.zeros(1)]))  # type: ignore[arg-type]
    net = compile(nn.Linear(3, 2), loss="normal")
    with pytest.raises(FactorNotReady, match="call estimator.update_covariances"):
        plot.spectra(FisherEstimator(net, damping=1.0))
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for draw, source in ((plot.training, trained[1]), (plot.phases, trained[1]), (plot.spectra, trained[0])):
        with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'kfac_fx[plot]'")):
            draw(source)  # type: ignore[operator]
