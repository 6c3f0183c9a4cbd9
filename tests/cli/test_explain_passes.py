"""`passes`: the graph and the changes of every pass."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx.cli.explain import explain, passes
from kfac_fx.cli.problem import CommandError, Problem
from kfac_fx.passes.pipeline import PIPELINE, SUBMODULES


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


class Branches(nn.Module):
    """Captured in parts. Its first layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(self.mix(x))
        return self.head(h if h.sum().item() > 0 else -h)


def test_the_passes_of_a_model_in_parts_are_those_of_its_joined_graphs() -> None:
    sections = list(passes(problem(Branches())))
    assert [section.split()[1] for section in sections] == ["capture", *(step.__name__ for step in SUBMODULES)]
    assert "+registration  linear(mix.weight, mix.bias)" in "".join(sections)


def test_a_model_that_does_not_run_has_no_passes() -> None:
    with pytest.raises(CommandError, match="mat1 and mat2 shapes"):
        next(passes(problem(nn.Sequential(nn.Linear(4, 3)))))


def test_calls_of_a_part_are_uses() -> None:
    net = kfac_fx.compile(Branches(), (torch.randn(4, 5),), loss="normal")
    assert [(row.uses, row.block) for row in net.report.rows] == [(2, "kronecker, independent"), (1, "kronecker")]
    text = explain(net.program, "mix.weight")
    assert "linear at linear in mix: linear, as weight, 2 calls" in text
    lacking = "not kron_series_1, kron_series_1_abs, kron_series_2: the order of its uses is known at run time only"
    assert lacking in " ".join(text.split())


def test_the_users_layers_are_those_of_the_passes() -> None:
    @kfac_fx.layer(
        rows=lambda x, attrs: kfac_fx.as_rows(x.sin(), attrs),
        grad_rows=kfac_fx.as_rows,
        example=lambda: (nn.Linear(3, 2), torch.randn(4, 3)),
    )
    def of_sine(x: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.sin(), weight)

    class Sine(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x.sin(), self.weight)

    mine = replace(problem(Sine(5, 2, bias=False)), layers=(of_sine,))
    assert "match         of_sine(weight)" in list(passes(mine, "match"))[1]
