"""The examples run, and do what they say."""

from __future__ import annotations

import re

import pytest

from examples import influence, own_layer, shared_weights


def test_shared_weights_are_registered_once_with_all_their_uses(capsys: pytest.CaptureFixture[str]) -> None:
    loss = shared_weights.main(steps=30)
    report = capsys.readouterr().out
    assert loss < 1.0  # guessing costs log 17 = 2.8
    assert re.search(
        r"embedding +embedding\.weight +6 +kronecker, independent", report
    )  # 5 tokens and the output layer
    assert re.search(r"linear +cell\.\{weight, bias\} +5 +kronecker, independent", report)


def test_a_layer_of_ones_own_is_structured(capsys: pytest.CaptureFixture[str]) -> None:
    loss = own_layer.main(steps=40)
    report = capsys.readouterr().out
    assert loss < 0.3  # guessing costs log 4 = 1.4
    assert report.count("circulant") == 2
    assert "generic   none" in report


def test_influence_points_at_the_wrong_label() -> None:
    assert int(influence.main().argmax()) == 0
