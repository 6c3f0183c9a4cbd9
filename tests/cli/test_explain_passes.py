"""`passes`: the graph and the changes of every pass."""

import pytest
import torch
from torch import nn

from kfac_fx.cli.explain import passes
from kfac_fx.cli.problem import CommandError, Problem
from kfac_fx.passes.pipeline import PIPELINE


def problem(model: nn.Module, **options: object) -> Problem:
    return Problem(model, (torch.randn(4, 5),), {}, "normal", strict=bool(options.get("strict", False)))


def test_every_pass_is_shown_after_the_capture_in_order() -> None:
    sections = list(passes(problem(nn.Linear(5, 2))))
    assert [section.split()[1] for section in sections] == ["capture", *(step.__name__ for step in PIPELINE)]
    assert "+registration  linear(weight, bias) kron, 1 use" in "".join(sections)


def test_one_pass_is_shown_whole_before_and_after() -> None:
    before, after = passes(problem(nn.Linear(5, 2)), "match")
    assert "match         linear" not in before and "match         linear(weight, bias)" in after


def test_a_wrong_pass_has_a_suggestion() -> None:
    with pytest.raises(CommandError, match="there is no pass 'mach', only unroll, .*Did you mean 'match'?"):
        next(passes(problem(nn.Linear(5, 2)), "mach"))


def test_the_error_of_a_pass_names_the_pass() -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x, self.centers)

    with pytest.raises(CommandError, match="check: RegistrationError"):
        list(passes(problem(Far(), strict=True)))


def test_a_model_in_parts_is_refused_with_the_reason() -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(CommandError, match="the model cannot be captured whole"):
        next(passes(problem(Branches(5, 2))))
