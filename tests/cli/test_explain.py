"""`explain`: the uses of one parameter, its block and the choices."""

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.cli.explain import explain
from kfac_fx.cli.problem import CommandError


class Mixed(nn.Module):
    """A tied weight, a parameter that no layer takes, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.centers = nn.Parameter(torch.randn(4, 4))
        self.spare = nn.Parameter(torch.randn(2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cdist(self.embedding(ids), self.centers))


@pytest.fixture(scope="module")
def program() -> kfac_fx.passes.ir.Program:
    return kfac_fx.compile(Mixed(), (torch.randint(7, (3, 5)),), loss="categorical").program


def test_every_use_of_a_tied_weight_has_its_layer_and_its_line(program: kfac_fx.passes.ir.Program) -> None:
    text = explain(program, "head.weight")
    assert text.startswith("embedding.weight: 7 x 4, float32\nother names: head.weight\n")
    assert "2 places where it meets the data:" in text
    assert "(test_explain.py:24): embedding, as weight" in text


def test_a_generic_parameter_has_its_reason_and_what_to_write(program: kfac_fx.passes.ir.Program) -> None:
    text = explain(program, "centers")
    assert "generic diagonal, F diag 16" in text and "cdist at" in text and ": no layer" in text
    assert "kfac_fx.compile(model, layers=[...])" in text
    assert "approximations={'centers': 'full'}: F 16 x 16" in text


def test_an_unused_parameter_says_so(program: kfac_fx.passes.ir.Program) -> None:
    assert "no Fisher block: no loss depends on this parameter" in explain(program, "spare")


def test_approximations_that_do_not_apply_say_why(program: kfac_fx.passes.ir.Program) -> None:
    text = explain(program, "head.bias")
    assert "for another block write approximations={'head.bias': " in text
    assert "  not kron_series_1, kron_series_1_abs, kron_series_2: it has one use\n" in text


class Twice(nn.Module):
    """A matrix that also scales: too wide for one block of both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(40, 40)), nn.Linear(40, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x @ self.weight, self.weight.sum() * self.scale(x))


def test_a_layer_that_matches_and_is_not_used_says_the_reason_itself() -> None:
    text = " ".join(explain(kfac_fx.compile(Twice(), (torch.randn(5, 40),), loss="normal").program, "weight").split())
    assert "linear matches here, but is not used: weight has 2 uses, 1 of them matched; missing mul (" in text
    assert "scale_and_shift matches here, but is not used: a function of a parameter that is a matrix elsewhere" in text


def test_a_parameter_has_not_the_notes_of_one_whose_name_ends_as_its() -> None:
    net = kfac_fx.compile(Twice(), (torch.randn(5, 40),), loss="normal", approximations={"scale.weight": "generic"})
    assert "dropped: linear(scale.weight): declared generic" in explain(net.program, "scale.weight")
    assert "declared generic" not in explain(net.program, "weight")


def test_the_steps_of_a_recurrent_module_are_one_line() -> None:
    net = kfac_fx.compile(
        nn.RNN(3, 4, batch_first=True), (torch.randn(2, 9, 3),), loss=lambda out: kfac_fx.losses.Normal(out[0])
    )
    text = explain(net.program, "weight_hh_l0")
    assert "9 places where it meets the data:\n  linear at " in text
    assert text.count("linear, as weight") == 1


def test_a_wrong_name_has_a_suggestion(program: kfac_fx.passes.ir.Program) -> None:
    with pytest.raises(CommandError, match="no trainable parameter 'head.wieght'. Did you mean 'head.weight'?"):
        explain(program, "head.wieght")


def test_the_name_of_a_module_is_answered_with_its_parameters(program: kfac_fx.passes.ir.Program) -> None:
    with pytest.raises(CommandError, match="'head'. head has the parameters head.weight, head.bias.$"):
        explain(program, "head")


def test_a_name_that_is_near_to_none_is_answered_with_all_names(program: kfac_fx.passes.ir.Program) -> None:
    names = ", ".join(program.parameters)
    with pytest.raises(CommandError, match=f"has no trainable parameter 'q'. It has {names}.$"):
        explain(program, "q")


def test_a_name_that_is_near_to_none_of_many_is_answered_with_the_first() -> None:
    deep = kfac_fx.compile(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))), (torch.randn(3, 2),), loss="normal")
    with pytest.raises(CommandError, match=r"It has 0.weight, .*, 5.bias and 8 more, as kfac-fx report shows.$"):
        explain(deep.program, "q")


def test_a_pattern_explains_every_parameter_once(program: kfac_fx.passes.ir.Program) -> None:
    assert explain(program, "head.*") == f"{explain(program, 'embedding.weight')}\n\n{explain(program, 'head.bias')}"
    assert explain(program, "*").count("float32") == len(program.parameters)


def test_a_pattern_that_fits_nothing_is_refused(program: kfac_fx.passes.ir.Program) -> None:
    with pytest.raises(CommandError, match=r"no trainable parameter 'haed\.\*'"):
        explain(program, "haed.*")


def test_a_compiled_model_is_told_that_its_program_is_explained() -> None:
    net = kfac_fx.compile(nn.Linear(3, 2), (torch.randn(4, 3),), loss="mse")
    with pytest.raises(TypeError, match=r"takes the program of a compiled model.*explain\(net.program, 'weight'\)"):
        explain(net, "weight")  # type: ignore[arg-type]
