"""Where the Fisher's outputs are, and which of an output's sizes counts the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.errors import LossError, where
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.torch_losses import BY_NAME, TorchLoss
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before

X = torch.randn(5, 3)


class WithTargets(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x @ self.w, y)


def program(
    function: Callable[..., Any], x: Tensor, y: Tensor, loss_given: bool = False, exported: bool = True
) -> Program:
    traced = trace_model(WithTargets(function), (x, y) if exported else None, options=Options(loss_given=loss_given))
    return find_losses(normalize(traced.program))


def named(function: Callable[..., Any], reduction: str) -> Callable[..., Any]:
    return lambda out, y: {"loss": function(out, y, reduction=reduction), "out": out}


CLASSES = torch.randint(4, (5,))
KINDS: list[tuple[Callable[..., Any], Tensor, Tensor, str, str]] = [
    (lambda out, y: F.cross_entropy(out, y), X, CLASSES, "categorical", "mean"),
    (named(F.cross_entropy, "sum"), X, CLASSES, "categorical", "sum"),
    (lambda out, y: F.cross_entropy(out.mT, y), torch.randn(5, 2, 3), CLASSES.expand(2, 5).T, "categorical", "mean"),
    (lambda out, y: (F.mse_loss(out, y), out), X, torch.randn(5, 4), "normal", "mean"),
    (named(F.mse_loss, "none"), X, torch.randn(5, 4), "normal", "none"),
    (F.binary_cross_entropy_with_logits, X, torch.rand(5, 4), "multi_bernoulli", "mean"),
]


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("function", "x", "y", "kind", "reduction"), KINDS)
def test_a_loss_inside_forward_is_found(
    function: Callable[..., Any], x: Tensor, y: Tensor, kind: str, reduction: str, exported: bool
) -> None:
    found = program(function, x, y, exported=exported)
    (site,) = found.losses
    assert (BY_NAME[site.loss].distribution, site.reduction) == (kind, reduction)
    assert found.outputs == (site.inputs,)
    assert site.targets.name in ("y", "expand")
    assert site.inputs.name in ("matmul", "getattr_1", "m_t")


def test_a_named_loss_is_on_what_the_model_returns() -> None:
    found = program(lambda out, y: (F.cross_entropy(out, y), out, out.argmax(-1)), X, CLASSES, loss_given=True)
    assert [node.name for node in found.outputs] == ["cross_entropy_loss", "matmul"] and found.losses == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda out, y: out,
        lambda out, y: (out, F.mse_loss(out.detach(), y).item())[0],
        lambda out, y: out + 0 * F.mse_loss(y, y),  # of no output
    ],
)
def test_without_a_loss_the_outputs_are_what_the_model_returns(function: Callable[..., Any]) -> None:
    found = program(function, X, torch.randn(5, 4))
    assert found.losses == () and len(found.outputs) == 1


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_a_loss_of_another_distribution_by_an_argument_is_not_found(
    exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `log_input=False` makes another loss of F.poisson_nll_loss, whose Fisher was that of the declared one."""
    loss = replace(BY_NAME["cross_entropy"], outside=(), by_default=("label_smoothing",))
    monkeypatch.setitem(BY_NAME, loss.name, loss)  # type: ignore[arg-type]  # a Mapping for all others
    (_,) = program(lambda out, y: F.cross_entropy(out, y), X, CLASSES, exported=exported).losses
    found = program(lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), X, CLASSES, exported=exported)
    assert not found.losses


def test_an_argument_is_changed_if_it_is_not_the_default() -> None:
    loss = TorchLoss(F.poisson_nll_loss, nn.PoissonNLLLoss, "poisson", "poisson", "poisson", by_default=("log_input",))
    names = ("log_input", "full", "eps")
    assert loss.changed(names, {"log_input": True, "full": False, "eps": 1e-8, "reduction": "sum"}) == []
    assert loss.changed(names, {"log_input": False, "full": True, "eps": torch.ones(2)}) == [*names]


def test_two_losses_are_two_outputs() -> None:
    found = program(lambda out, y: F.cross_entropy(out, y) + 0.1 * F.cross_entropy(out.exp(), y), X, CLASSES)
    assert [node.name for node in found.outputs] == ["matmul", "exp"]


@pytest.mark.parametrize(
    ("function", "y", "noted"),
    [
        (lambda out, y: F.cross_entropy(out, y), CLASSES, ""),
        (lambda out, y: F.cross_entropy(out, y, weight=torch.ones(4)), CLASSES, "its weight is"),
        (
            lambda out, y: F.cross_entropy(out, y, weight=torch.ones(4), label_smoothing=0.1),
            CLASSES,
            "its weight and label_smoothing are",
        ),
        (lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), CLASSES, "its label_smoothing is"),
        (lambda out, y: F.mse_loss(out, y), torch.randn(5, 4), ""),
        (lambda out, y: F.binary_cross_entropy_with_logits(out, y), torch.rand(5, 4), ""),
        (
            lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=torch.ones(4)),
            torch.rand(5, 4),
            "its pos_weight is",
        ),
    ],
)
@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_what_a_loss_has_beside_its_distribution_is_noted(
    function: Callable[..., Any], y: Tensor, noted: str, exported: bool
) -> None:
    notes = program(function, X, y, exported=exported).dropped
    assert [note.reason for note in notes] == bool(noted) * [
        f"{noted} no part of the Fisher, which is that of its distribution"
    ]
    assert all("_losses.py:" in note.subject for note in notes)


@pytest.mark.parametrize(
    ("function", "shape", "axis"),
    [
        (lambda x, w: x @ w, (5, 7, 3), 0),
        (lambda x, w: (x @ w).mean(0), (7, 5, 3), 1),  # sequences first
        (lambda x, w: (x @ w).reshape(-1, 2), (5, 7, 3), 0),  # merged: the first size of the first input
        (lambda x, w: (x @ w).sum(), (5, 7, 3), 0),
        (lambda x, w: (x @ w).t(), (5, 3), 0),  # the first size of the output is a number
    ],
)
def test_the_size_of_the_cases(function: Callable[..., Any], shape: tuple[int, ...], axis: int) -> None:
    found = find_losses(before("find_losses", Toy(function, w=(3, 2)), torch.randn(shape)))
    (x,) = (node for node in found.graph.nodes if node.op == "placeholder")
    assert found.cases == str(x.meta["val"].shape[axis])


def test_a_graph_without_sizes_has_no_cases() -> None:
    assert find_losses(before("find_losses", nn.Linear(3, 2))).cases is None
    assert find_losses(before("find_losses", nn.Linear(1, 2), torch.randn(1, 1))).cases is None


def test_the_users_dimension_of_the_cases_is_that_of_the_first_input_that_has_it() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, weights: Tensor, x: Tensor) -> Tensor:
            return self.linear(x) * weights[:2]

    program = before("find_losses", Weighted(), torch.randn(4), torch.randn(7, 5, 3), batch_dim=1)
    _, x = (node for node in program.graph.nodes if node.op == "placeholder")
    assert find_losses(program).cases == str(x.meta["val"].shape[1])


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_the_value_that_forward_calls_loss_is_the_loss(exported: bool) -> None:
    def both(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"log": F.cross_entropy(out.exp(), y), "loss": F.cross_entropy(out, y), "out": out}

    found = program(both, X, CLASSES, exported=exported)
    assert [site.inputs.name for site in found.losses] == ["matmul"] and len(found.returned_losses) == 1
    found = program(lambda out, y: (F.cross_entropy(out.exp(), y), F.cross_entropy(out, y)), X, CLASSES)
    assert len(found.losses) == len(found.returned_losses) == 2


@pytest.mark.parametrize("total_first", [False, True])
def test_of_a_loss_and_a_function_of_it_the_first_is_the_loss(total_first: bool) -> None:
    def both(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(out, y)
        return (loss + out.square().mean(), loss) if total_first else (loss, loss.exp())

    found = program(both, X, CLASSES)
    assert [node.name for node in found.returned_losses] == ["add" if total_first else "cross_entropy_loss"]


def rows(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


WAYS: dict[str, tuple[Callable[..., Any], bool, bool, float | None]] = {  # linear, elementwise, constant
    "itself": (lambda out, y: F.cross_entropy(out, y), True, True, 1.0),
    "a factor and a sum": (lambda out, y: (2 * F.cross_entropy(out, y) + out.exp().mean()) / 4, True, True, 0.5),
    "a product": (lambda out, y: (rows(out, y) * y).mean(), True, True, None),
    "a choice": (lambda out, y: torch.where(y > 1, rows(out, y), 0.0).sum(), True, True, None),
    "a square": (lambda out, y: rows(out, y).square().mean(), False, True, None),
    "a product with itself": (lambda out, y: (lambda ce: (ce * ce).mean())(rows(out, y)), False, True, None),
    "a clamp": (lambda out, y: rows(out, y).clamp(min=1).mean(), False, False, None),
    "the largest": (lambda out, y: rows(out, y).topk(2).values.mean(), False, False, None),
}


@pytest.mark.parametrize(("function", "linear", "elementwise", "constant"), WAYS.values(), ids=WAYS)
def test_the_way_of_a_loss_tells_its_weight(
    function: Callable[..., Any], linear: bool, elementwise: bool, constant: float | None
) -> None:
    (site,) = program(function, X, CLASSES).losses
    assert site.way is not None
    assert (site.way.linear, site.way.elementwise, site.way.constant) == (linear, elementwise, constant)


def test_something_learned_that_a_loss_is_multiplied_with_counts_as_one() -> None:
    found = program(lambda out, y: (rows(out, y) * out[:, 0].sigmoid()).mean(), X, CLASSES)
    way = found.losses[0].way
    assert way is not None and [node.name for node in way.unknown] == ["sigmoid"]
    assert not found.cut  # all of it passes the logits
    (note, around) = found.dropped
    assert note.reason == (
        f"its factors at {where(way.unknown[0])} are not computed from the inputs of the model and of the loss alone, "
        "so they count as one in the Fisher, whose scale may be off, as by their mean. To have them in it, compute "
        "them before the call, and give them to forward"
    )
    assert (
        around.subject.startswith("the term of sigmoid (test_losses.py:") and "no part of the Fisher" in around.reason
    )


class OfTwoRuns(WithTargets):
    """The outputs do not tell what the second run returns."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(rows(x @ self.w, y), ((x + 1) @ self.w).detach().exp())


NO_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number that may count cases": lambda ce, w: ce.sum() / w.sum(),
    "a product that adds up": lambda ce, w: ce @ w.sum(1),
    "a product that repeats": lambda ce, w: (ce[:, None] * w).mean(),
    "no linear function": lambda ce, w: (ce * w.sum(1)).mean().log(),
    "no product": lambda ce, w: torch.maximum(ce, w.sum(1)).mean(),
}


@pytest.mark.parametrize("function", NO_WAYS.values(), ids=NO_WAYS)
def test_another_function_of_a_loss_and_something_learned_has_no_way(function: Callable[..., Any]) -> None:
    found = find_losses(normalize(trace_model(OfTwoRuns(function), (X, CLASSES), options=Options()).program))
    assert found.losses[0].way is None
    assert found.dropped[0].reason == (
        "forward returns a function of it; the Fisher is that of its distribution, whose scale may be another one. For "
        "the right one return the inputs of the loss, and write its coefficient, as in loss=lambda outputs: (0.5, "
        "kfac_fx.losses.Normal(outputs))"
    )


def test_terms_of_parameters_alone_are_noted() -> None:
    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.w, y) + self.w.square().sum()

    found = find_losses(normalize(trace_model(Decayed(), (X, CLASSES), options=Options()).program))
    (note,) = found.dropped
    assert note.subject == "w" and "a term of these parameters alone, which is no part of any case" in note.reason


def test_a_graph_without_sizes_has_terms_of_unknown_size_and_none_of_parameters_alone() -> None:
    class Around(WithTargets):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.function(x @ self.w, y) + x.mm(self.w).sin().mean() + self.w.square().sum()

    model = Around(lambda out, y: F.cross_entropy(out, y) + out.tanh().mean())
    found, sized = (
        find_losses(normalize(trace_model(model, inputs, options=Options()).program)) for inputs in (None, (X, CLASSES))
    )
    assert [node.name for node in found.unsized] == ["mean_1"] and found.cut == ()  # tanh passes the logits
    assert [node.name for node in sized.cut] == ["sin"] and sized.unsized == ()
    assert [note.subject.split(" (")[0] for note in found.dropped] == ["the term of mean", "the term of mean_1", "w"]
    assert [note.subject.split(" (")[0] for note in sized.dropped] == ["the term of tanh", "the term of sin", "w"]


def parts(count: int, dim: int) -> Callable[..., Any]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        pairs = zip(out.chunk(count, dim), y.chunk(count, dim), strict=True)
        return torch.stack([F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in pairs]).sum()

    return loss


def test_losses_over_chunks_of_the_rows_are_one() -> None:
    x, y = torch.randn(5, 4, 3), torch.randint(4, (5, 4))
    assert [site.chunk_of for site in program(parts(2, 1), x, y).losses] == [0, 0]

    def steps(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out[:, 0], y[:, 0]) + F.cross_entropy(out[:, 1], y[:, 1])

    assert [site.chunk_of for site in program(steps, x, y).losses] == [0, 0]

    def heads(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out[:, 0], y[:, 0]) + F.cross_entropy(out[:, 1], y[:, 0])

    assert [site.chunk_of for site in program(heads, x, y).losses] == [0, 1]


class Weighed(nn.Module):
    """A loss of two residuals, with learned log-variances."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.w, self.logs = function, nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x @ self.w - y)

    def variances(self, r: Tensor) -> Tensor:
        return torch.stack([r[:, :2].square().mean(), r[:, 2:].square().mean()])


def weighed(function: Callable[..., Any]) -> Program:
    return find_losses(normalize(trace_model(Weighed(function), (X, torch.randn(5, 4)), options=Options()).program))


FOLLOWED: dict[str, Callable[[Weighed, Tensor], Any]] = {
    "detached parts": lambda m, r: (r.square().mean(), [r.square().mean().detach(), r.detach()]),
    "parts": lambda m, r: (m.variances(r).sum(), m.variances(r)[0]),
    "parts of it": lambda m, r: (lambda part: (3 * part, part))(r.square().mean()),
    "a squared norm": lambda m, r: r.norm() ** 2 / len(r),
    "a squared norm of torch.linalg": lambda m, r: torch.linalg.norm(r).square() / len(r),
    "squared norms": lambda m, r: (r.norm(dim=1) ** 2).mean(),
    "a penalty on parameters": lambda m, r: r.square().mean() + 1e-3 * sum(p.abs().sum() for p in m.parameters()),
    "log-variances": lambda m, r: (torch.exp(-m.logs) * m.variances(r) + m.logs).sum(),
    "standard deviations": lambda m, r: (m.variances(r) / (2 * m.logs**2)).sum() + m.logs.log().sum(),
    "weights of terms": lambda m, r: torch.dot(torch.tensor([1.0, 2.0]), m.variances(r)),
}


@pytest.mark.parametrize("name", [name for name in FOLLOWED if name != "parts"])
def test_a_loss_by_hand_is_found_next_to_parts_of_it_and_to_terms_of_parameters_alone(name: str) -> None:
    found = weighed(FOLLOWED[name])
    assert {site.loss for site in found.losses} == {"mse_loss"} and not found.unfollowed
    assert all(site.way is not None and site.way.linear and not site.way.unknown for site in found.losses)
    assert all(not site.way.divisors for site in found.losses if site.way is not None) or name.startswith("a squared")
    assert len(found.returned_losses) == 1


def test_numbers_that_are_no_parts_of_each_other_are_told() -> None:
    found = weighed(FOLLOWED["parts"])
    assert not found.losses
    assert found.unfollowed == (
        "forward returns 2 values with a gradient, and does not say which is the loss: if one is, name it and detach "
        'the others, as in return {"loss": loss, "part": part.detach()}'
    )


@pytest.mark.parametrize(
    ("function", "place", "lost"),
    [
        (lambda m, r: F.huber_loss(r, torch.zeros_like(r)), "huber_loss", True),
        (lambda m, r: {"loss": r.square().mean() + r.abs().mean(), "out": r}, "abs_1", True),
        (lambda m, r: r.square().mean().sqrt(), "sqrt", False),
    ],
    ids=["huber", "another term", "root"],
)
def test_an_operation_that_loses_the_loss_of_forward_is_named(
    function: Callable[..., Any], place: str, lost: bool
) -> None:
    found = weighed(function)
    assert not found.losses and found.lost == lost
    assert found.unfollowed.startswith(f"the loss that forward returns is not followed at {place} (test_losses.py:")
    assert "loss=lambda outputs: [kfac_fx.losses.Normal(outputs[0])" in found.unfollowed


def test_a_loop_names_its_line_once_and_few_lines_are_named() -> None:
    def function(m: Weighed, r: Tensor) -> Tensor:
        return sum((r[:, step].abs().mean() for step in (0, 1)), r.sqrt().mean()) + r.exp().mean() + r.sin().mean()

    said = weighed(function).unfollowed.partition(": known")[0]
    assert said.count("abs") == 1 and said.count(" (test_losses.py:") == 3 and said.endswith(" and 1 more")


class Penalized(nn.Module):
    """It returns outputs, and a number of its parameters alone."""

    def __init__(self, number: Callable[[Penalized], Tensor], scaled: bool = False) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.3))
        self.number, self.scaled = number, scaled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y * self.scale if self.scaled else y, self.number(self)


def of_first(outputs: tuple[Tensor, Tensor]) -> kfac_fx.losses.Normal:
    return kfac_fx.losses.Normal(outputs[0])


def test_a_penalty_on_parameters_that_is_returned_next_to_outputs_is_no_use() -> None:
    """Such as the divergence of Bayesian layers from their prior. It has no cases. All parameters were generic."""
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    net = kfac_fx.compile(Penalized(lambda model: model.layer.weight.square().sum(), True), (x,), loss=of_first)
    assert not any(registration.generic for registration in net.registrations)
    assert len(net.program.outputs) == 1
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3)
    estimator.update_covariances(x)
    rows = torch.cat([x, torch.ones(5, 1)], 1)
    A = estimator.blocks["layer.weight", "layer.bias"].factors["A"].value[0]
    torch.testing.assert_close(A, rows.T @ rows / 5)


def test_a_number_with_parameters_of_its_own_may_be_an_argument_of_the_loss() -> None:
    net = kfac_fx.compile(
        Penalized(lambda model: model.scale.exp()),
        (torch.randn(5, 4),),
        loss=lambda outputs: kfac_fx.losses.Normal(outputs[0] * outputs[1]),
    )
    assert len(net.program.outputs) == 2 and not net.program.unused


def test_a_loss_that_reads_a_number_that_was_taken_for_a_penalty_is_refused() -> None:
    with pytest.raises(
        LossError, match=r"reads a number .* taken for a penalty.* return mean, scale.expand_as\(mean\)"
    ):
        kfac_fx.compile(
            Penalized(lambda model: model.scale.exp(), scaled=True),
            (torch.randn(5, 4),),
            loss=lambda outputs: kfac_fx.losses.Normal(outputs[0] * outputs[1]),
        )
