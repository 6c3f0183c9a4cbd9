"""The text of a capture that failed, and the place that it names."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.passes.trace import quiet, untraceable, without_symbols


def test_torch_is_quiet_about_a_failure_only(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = logging.getLogger("torch._subclasses.fake_tensor")
    level = speaker.level
    with pytest.raises(ValueError), quiet():
        print("torch's graph", file=sys.stderr)
        raise ValueError
    assert capsys.readouterr().err == "" and speaker.level == level
    with quiet():
        print("a note", file=sys.stderr)
    assert capsys.readouterr().err == "a note\n"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            raise TypeError("symbolically traced variables cannot be used as inputs to control flow")
        y: Tensor = self.inner(x)
        return y


def text(x: Tensor) -> str:
    model = nn.Sequential(nn.Tanh(), Branches())
    with pytest.raises(Exception) as failure:  # noqa: B017
        model(x)
    return str(untraceable(model, failure.value))


def test_a_failure_names_module_line_and_source() -> None:
    line = Branches.forward.__code__.co_firstlineno + 2
    assert text(torch.ones(2, 2)).splitlines() == [
        f"Sequential could not be captured as a graph; torch gave up in 1 (test_errors_of_captures.py:{line}):",
        '  raise TypeError("symbolically traced variables cannot be used as inputs to control flow")',
        "  TypeError: symbolically traced variables cannot be used as inputs to control flow",
        "Replace what depends on the values of tensors (if, while, .item(), .numpy()) by tensor operations such as "
        "torch.where.",
    ]


def test_a_failure_inside_torch_names_the_users_line() -> None:
    line = Branches.forward.__code__.co_firstlineno + 3
    first, source, said, advice = text(-torch.ones(2, 3)).splitlines()
    assert first.endswith(f"torch gave up in 1.inner (test_errors_of_captures.py:{line}):")
    assert source == "  y: Tensor = self.inner(x)"
    assert said.startswith("  RuntimeError: ") and "mat1 and mat2 shapes cannot be multiplied" in said
    assert advice.startswith("See that the model runs on these inputs.")


def test_an_error_of_torch_shows_no_symbols_of_sizes() -> None:
    assert without_symbols("a size (torch.Size([s87, 4])) and [s1*s2, 3] of s3") == (
        "a size (torch.Size([any size, 4])) and [any size*any size, 3] of s3"
    )
