"""The examples run, and do what they say."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from examples import (
    convolution,
    deep_network,
    gpt,
    influence,
    influence_gpt,
    laplace,
    lora,
    memorization,
    own_layer,
    pinn,
    recurrent,
    shared_weights,
    tied_autoencoder,
    vmc,
)


def test_a_convolutional_network_reads_digits(capsys: pytest.CaptureFixture[str]) -> None:
    kfac, _ = convolution.main(steps=30, batch=128).values()
    assert kfac.errors < 0.1  # guessing errs in 90%
    assert capsys.readouterr().out.count("conv2d") == 2


def test_a_tied_decoder_is_the_second_use_of_its_weight(capsys: pytest.CaptureFixture[str]) -> None:
    losses = tied_autoencoder.main(steps=40, batch=256, widths=(64, 32, 8))
    assert losses["K-FAC"] < losses["AdamW"] < 64 * math.log(2)  # of pixels that are told by a coin
    assert re.search(r"linear +encoder\.0\.weight +2 +kronecker, independent", capsys.readouterr().out)


def test_a_deep_network_learns_before_adamw_does() -> None:
    losses = deep_network.main(steps=60, width=16, depth=16)
    assert losses["K-FAC"] < 0.9 * losses["AdamW"] < 0.9 * math.log(3)


def test_a_gpt_learns_the_characters_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    losses = gpt.main(steps=25, width=16, layers=1, length=16, batch=32)
    assert losses[0] > 4 and sum(losses[-5:]) / 5 < 3.3  # guessing costs log 96 = 4.6
    assert "\ndef " in capsys.readouterr().out


def test_low_rank_matrices_beside_frozen_weights_have_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = lora.main(steps=20)
    assert after < before / 2
    report = capsys.readouterr().out
    assert report.count("kronecker") == 6 and "generic   none" in report and "original" not in report


@pytest.mark.skipif(find_spec("deepxde") is None, reason="deepxde is not installed")
def test_deepxde_trains_in_its_own_loop() -> None:
    program = """
from examples import deepxde_poisson
errors = deepxde_poisson.main(steps=60, inside=100, border=40, width=16)
assert errors["K-FAC"] < min(0.6, errors["Adam"]), errors  # it starts at 0.67
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # DeepXDE sets global dtypes
    assert done.returncode == 0, done.stderr
    assert re.search(r"linear +net\.linears\.1\.weight +[2-9] +kronecker", done.stdout)


def test_shared_weights_are_registered_once_with_all_their_uses(capsys: pytest.CaptureFixture[str]) -> None:
    loss = shared_weights.main(steps=30)
    report = capsys.readouterr().out
    assert loss < 1.0  # guessing costs log 17 = 2.8
    # 5 tokens and the output layer; names and blocks are broken into two lines
    assert re.search(r"embedding +embedding\. +6 +kronecker, .*\n +weight +independent", report)
    assert re.search(r"linear +cell\.\{weight, +5 +kronecker, .*\n +bias\} +independent", report)


def test_a_layer_of_ones_own_is_structured(capsys: pytest.CaptureFixture[str]) -> None:
    loss = own_layer.main(steps=60)
    report = capsys.readouterr().out
    assert loss < 0.3  # guessing costs log 4 = 1.4
    assert len(re.findall(r"^\d +circulant", report, re.MULTILINE)) == 2
    assert "generic   none" in report


def test_influence_points_at_the_wrong_label() -> None:
    assert int(influence.main().argmax()) == 0


def test_a_text_that_was_trained_on_has_the_largest_influence_on_itself(capsys: pytest.CaptureFixture[str]) -> None:
    found = influence_gpt.main(steps=40, width=16, retrained=3)
    own = [influence_gpt.TEXTS.index(query) for query in influence_gpt.QUERIES]
    assert found.scores.argmax(1).tolist() == own
    assert found.correlation.shape == (3,) and bool((found.correlation.abs() <= 1 + 1e-9).all())
    printed = capsys.readouterr().out
    assert all(f"{query!r}: {query} (" in printed for query in influence_gpt.QUERIES)


def test_wrong_labels_are_forgotten_before_the_rule() -> None:
    found = memorization.main()
    (rule, by_heart), (edited_rule, left) = found[1.0], found[0.02]
    assert by_heart == 1 and left < 0.7 and edited_rule > rule - 0.02


def test_the_laplace_approximation_knows_where_there_were_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = laplace.main(steps=300)
    alone, last, layers, full = found.values()
    assert 0.15 < layers.noise < 0.3 and 0.15 < full.noise < 0.3  # the data have 0.2
    assert alone.errors["beyond"] > 5  # 1 is calibrated
    for where in laplace.WHERE:
        assert alone.errors[where] > last.errors[where] > full.errors[where]
    assert full.errors["data"] > 0.5  # and no more variance than there must be
    assert [line[: len(name)] for line, name in zip(capsys.readouterr().out.splitlines()[1:], found, strict=True)] == [
        *found
    ]


def test_three_approximations_read_digits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    results = recurrent.main(steps=8, width=8, batch=128, seeds=1)
    assert [result.approximation for result in results] == ["kron_indep", "kron_series_1", "kron_series_2"]
    assert all(result.loss < 2.2 for result in results)  # guessing costs log 10 = 2.3
    assert len({result.loss for result in results}) == 3
    table = capsys.readouterr().out
    assert "a linear layer at each of 8 steps of lstm" in " ".join(table.split())
    assert [line.split()[0] for line in table.splitlines()[-3:]] == list(recurrent.APPROXIMATIONS)


def test_a_differential_equation_is_solved_through_every_use_of_a_weight(capsys: pytest.CaptureFixture[str]) -> None:
    kfac, *adam = pinn.main(steps=200, width=16, inside=64, border=32, adam_steps=200)
    report = capsys.readouterr().out
    assert re.search(r"linear +layers\.1\.weight +4 +kronecker, independent", report)  # value twice, slope, Laplacian
    assert kfac.loss < 3  # it starts at 90
    assert all(run.steps == 200 and kfac.loss < run.loss for run in adam)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # what torch itself loads for jvp
def test_the_energy_of_two_electrons_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    kfac, adam = vmc.main(steps=12, width=8, walkers=128)
    assert "K-FAC's energy is right" in capsys.readouterr().out
    assert kfac.deviation < 0.5
    assert (kfac.name, adam.name) == ("K-FAC", "Adam")
