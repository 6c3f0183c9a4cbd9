"""Losses that are not known: factors come from the gradients in training, what needs a loss is refused at once, and
heads behind no loss are named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.losses.distributions import Unnamed
from kfac_fx.passes.torch_private import pytree
from tests.tables import every
from tests.whole import beside_adamw

X, LABELS, BOXES = torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8, 2)


class Detector(nn.Module):
    """Two heads; `hidden` and `total` are returned, too, as trainers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.box = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"total": h.sum(), "hidden": h, "logits": self.label(h), "box": self.box(h)}


class Trained(Detector):
    """The losses of both heads in forward; that of the boxes is none that the library knows."""

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:  # type: ignore[override]
        outputs = super().forward(x)
        return F.cross_entropy(outputs["logits"], labels) + (outputs["box"] - boxes).abs().mean()


def of_labels(outputs: dict[str, Tensor]) -> Any:
    return kfac_fx.losses.Categorical(outputs["logits"])


def of_both(outputs: dict[str, Tensor]) -> Any:
    return [kfac_fx.losses.Categorical(outputs["logits"]), kfac_fx.losses.Normal(outputs["box"])]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["fx", "export"])
@pytest.mark.parametrize(
    "options",
    [
        {"estimation_mode": "gradients"},
        {"estimation_mode": "exact"},
        {"momentum_type": "qmodel", "damping": 0.1},
        {"fraction": 0.5},
    ],
    ids=str,
)
def test_options_that_need_a_loss_are_refused_without_one(inputs: Any, options: dict[str, Any]) -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), inputs)
    with pytest.raises(kfac_fx.LossError, match=r"no loss is known.*\nName it with compile\(\.\.\., loss=") as refusal:
        kfac_fx.KFAC(net, **options)
    assert "For another loss write KFAC(net) without an estimation_mode" in str(refusal.value)
    assert str(net.report)  # which needs none


# --- a loss without a name --------------------------------------------------------------------------------------------


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def test_the_factors_are_those_of_the_gradients_of_all_examples_of_a_step() -> None:
    layer, x, y = nn.Linear(4, 3), torch.randn(12, 4), torch.randn(12, 3)
    net = kfac_fx.compile(layer, (x,))
    opt = kfac_fx.KFAC(net, cov_ema_decay=0.9)
    rows = []
    for part, target in zip(x.split([8, 4]), y.split([8, 4]), strict=True):  # of one mean over 12 examples
        out = net(part)
        out.register_hook(rows.append)
        (F.huber_loss(out, target, reduction="sum") / 12).backward()
    opt.step()
    d, r = 12 * torch.cat(rows), torch.cat([x, torch.ones(12, 1)], 1)
    block = opt.estimator.blocks["weight", "bias"]
    torch.testing.assert_close(block.factors["G"].value[0], d.T @ d / 12)
    torch.testing.assert_close(block.factors["A"].value[0], r.T @ r / 12)
    assert str(net.report).startswith("kfac_fx takes factors from training gradients because it knows no loss,\n")


def test_the_curvature_of_a_loss_without_a_name_is_the_empirical_fisher_at_its_outputs() -> None:
    rows, vector = torch.randn(6, 3, 2), torch.randn(6, 3, 2)
    loss = Unnamed(torch.randn(6, 3, 2), rows)
    flat = rows.flatten(1)
    fisher = torch.einsum("ni,nj->nij", flat, flat)
    expected = torch.einsum("ni,nij,nj->", vector.flatten(1), fisher, vector.flatten(1))
    torch.testing.assert_close(loss.squared_norm(vector), expected)
    torch.testing.assert_close(loss.multiply_fisher(vector).flatten(1), (fisher @ vector.flatten(1)[..., None])[..., 0])
    torch.testing.assert_close(loss.divergence_from(loss.inputs - vector), expected / 2)
    assert loss.cases == 6 and loss.entropy() is None
    torch.testing.assert_close(loss.squared_unit(), fisher.diagonal(dim1=1, dim2=2).sum())
    several = loss.multiply_fisher_factor_transpose(torch.stack([vector, 2 * vector]))
    torch.testing.assert_close(several[1], 2 * several[0])


def test_a_number_that_forward_returns_is_the_loss_itself() -> None:
    loss = Unnamed(torch.tensor(2.0), torch.tensor(0.5))
    assert loss.squared_norm(torch.tensor(3.0)) == 1.5**2
    assert loss.divergence_from(torch.tensor(1.0)) == 0 == loss.entropy()
    assert loss.squared_unit() == (2.0 * 0.5) ** 2


class Fused(torch.autograd.Function):
    """A linear layer and its cross entropy, whose logits are nowhere in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        z = x @ weight.t()
        d = (z.softmax(-1) - F.one_hot(y, z.shape[-1])) / len(y)
        ctx.save_for_backward(d @ weight, d.t() @ x)
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return gradient * of_x, gradient * of_weight, None


class PlainlyFused(Fused):
    """One that `plain_function` declares."""


class WithHead(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.body, self.head, self.function = nn.Linear(4, 8), nn.Linear(8, 3, bias=False), function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        function = getattr(self.function, "apply", self.function)
        return function(torch.tanh(self.body(x)), self.head.weight, y)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)), y)


INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
BEST = INPUTS[:, :3].argmax(1)
ADVANTAGE = torch.rand(32, generator=torch.Generator().manual_seed(2))


def of_policy(net: Any) -> Tensor:
    """The loss of a policy gradient."""
    return -(F.log_softmax(net(INPUTS), -1).gather(1, BEST[:, None]).squeeze(1) * ADVANTAGE).mean()


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], Any]] = {
    "fused head": (lambda: WithHead(Fused), lambda net: net(INPUTS, BEST), (INPUTS, BEST)),
    "adaptive softmax": (Adaptive, lambda net: net(INPUTS, BEST * 4).loss, (INPUTS, BEST)),
    "triplets": (
        mlp,
        lambda net: F.triplet_margin_loss(net(INPUTS), net(INPUTS + 0.3), net(INPUTS.flip(0))),
        (INPUTS,),
    ),
    "policy gradient": (mlp, of_policy, (INPUTS,)),
    "captured late": (mlp, lambda net: F.huber_loss(net(INPUTS), INPUTS[:, :3]), None),
}


def trained(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int = 40) -> float:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    return float(loss_of().detach())


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_default_trains_losses_without_a_name_at_least_as_low_as_adamw(name: str) -> None:
    make, loss_of, inputs = SITUATIONS[name]
    torch.manual_seed(0)
    model = make()
    net = kfac_fx.compile(copy.deepcopy(model), inputs)
    plain, first = loss_of(model), loss_of(net)
    plain.backward()
    first.backward()
    for wanted, parameter in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    losses = [
        trained(torch.optim.AdamW(other.parameters(), lr=lr), lambda other=other: loss_of(other))  # type: ignore[misc]
        for lr, other in ((lr, copy.deepcopy(model)) for lr in (1e-2, 3e-2))
    ]
    assert trained(kfac_fx.KFAC(net), lambda: loss_of(net)) <= min(losses)
    report = str(net.report)
    assert report.startswith("kfac_fx takes factors from training gradients because it knows no loss")
    assert "the loss as linear" not in " ".join(report.split())


@pytest.mark.parametrize("name", every(2, SITUATIONS))
def test_a_loss_without_a_name_trains_as_low_in_any_unit(name: str) -> None:
    """A sum over cases and a mean are the same loss in two units."""
    make, loss_of, inputs = SITUATIONS[name]
    torch.manual_seed(0)
    model, losses = make(), {}
    for unit in (1e-3, 1.0, 1e4):
        net = kfac_fx.compile(copy.deepcopy(model), inputs)
        first = float(loss_of(net).detach())
        trained(kfac_fx.KFAC(net), lambda net=net, unit=unit: unit * loss_of(net))  # type: ignore[misc]
        losses[unit] = float(loss_of(net).detach())
    assert max(losses.values()) < min(losses.values()) + 0.01 * first, losses


def test_the_unit_of_a_loss_grows_by_four_at_most_and_does_not_fall() -> None:
    torch.manual_seed(0)
    net, y = kfac_fx.compile(mlp(), (INPUTS,)), torch.randn(32, 3)
    opt = kfac_fx.KFAC(net, damping_adaptation_interval=1, exact_steps=False)
    units = []
    for factor in (10.0, 1e3, 1.0, torch.nan, 1e3):
        opt.zero_grad()
        outputs = net(INPUTS)
        outputs.retain_grad()
        (factor * F.huber_loss(outputs, y, delta=0.1)).backward()
        assert outputs.grad is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
        units.append((float((32 * outputs.grad).square().sum() / 32), float(opt.scalars["unit"])))
    (first, unit), (second, larger), (third, still), (_, of_nan), (_, again) = units
    assert unit == pytest.approx(first, rel=1e-5) and second > 4 * first > third
    assert larger == still == of_nan == pytest.approx(4 * unit, rel=1e-5) and again == pytest.approx(16 * unit)


def test_the_checks_measure_a_loss_that_forward_returns() -> None:
    net = kfac_fx.compile(WithHead(Fused), (INPUTS, BEST))
    opt = kfac_fx.KFAC(net, 2e-2, damping_adaptation_interval=1)
    for _ in range(2):
        before = net(INPUTS, BEST)
        before.backward()
        opt.step()
        opt.zero_grad()
    change = net(INPUTS, BEST) - before
    torch.testing.assert_close(opt.rho * opt.predicted_change, change.detach(), rtol=1e-2, atol=1e-7)
    assert 0.9 < float(opt.rho) < 1.1


def test_cases_on_another_dimension_make_the_same_steps() -> None:
    """The Fisher norm of a step is over the examples, wherever they are."""
    x = torch.randn(3, 16, 4, dtype=torch.float64)
    nets = []
    for cases_first in (False, True):
        torch.manual_seed(0)
        inputs = x.transpose(0, 1) if cases_first else x
        net = kfac_fx.compile(mlp().double(), (inputs,), batch_dim=0 if cases_first else 1)
        opt = kfac_fx.KFAC(net, damping_adaptation_interval=1)
        for _ in range(3):
            opt.zero_grad()
            F.huber_loss(net(inputs), inputs[..., :3]).backward()
            opt.step()
        nets.append((opt.predicted_change, net(x[0])))
    torch.testing.assert_close(nets[0], nets[1])


def test_a_state_continues_bit_for_bit_also_in_a_net_that_is_not_captured_yet() -> None:
    def step(net: Any, opt: kfac_fx.KFAC) -> None:
        opt.zero_grad()
        F.huber_loss(net(INPUTS), INPUTS[:, :3]).backward()
        opt.step()

    torch.manual_seed(0)
    first = kfac_fx.compile(mlp(), (INPUTS,))
    optimizer = kfac_fx.KFAC(first)
    for _ in range(3):
        step(first, optimizer)
    for inputs in (None, (INPUTS,)):
        second = kfac_fx.compile(copy.deepcopy(first.model), inputs)
        other = kfac_fx.KFAC(second)
        other.load_state_dict(optimizer.state_dict())
        expected = copy.deepcopy(first.model)
        net = kfac_fx.compile(expected, (INPUTS,))
        same = kfac_fx.KFAC(net)
        same.load_state_dict(optimizer.state_dict())
        step(second, other)
        step(net, same)
        assert all(map(torch.equal, second.parameters(), expected.parameters()))


def test_a_model_that_computes_its_loss_with_labels_has_a_name_though_it_was_compiled_without_them() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            z: Tensor = self.layer(x)
            return z if y is None else F.cross_entropy(z, y)

    net = kfac_fx.compile(Optional(), (X,))
    opt = kfac_fx.KFAC(net)
    assert opt.estimator.estimation_mode == "empirical"
    net(X, LABELS).backward()
    opt.step()
    assert opt.estimator.estimation_mode == "gradients" and "knows no loss" not in str(net.report)


class Residuals(nn.Module):
    """Their loss is a number, with learned log-variances if `huber` is false."""

    def __init__(self, huber: bool = False) -> None:
        super().__init__()
        self.net, self.log, self.huber = mlp(2), nn.Parameter(torch.tensor(2.0)), huber

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        r = self.net(x) - y
        return F.huber_loss(r, 0 * r) if self.huber else torch.exp(-self.log) * r.square().mean() + self.log


def test_the_first_step_says_why_a_loss_of_forward_is_not_known() -> None:
    net = kfac_fx.compile(Residuals(huber=True), (X, BOXES))
    opt = kfac_fx.KFAC(net)
    net(X, BOXES).backward()
    with pytest.warns(kfac_fx.LossScaleWarning, match=r"not followed at huber_loss \(test_unnamed_losses.py:\d+\)"):
        opt.step()
    assert "not followed at huber_loss" in " ".join(str(net.report).split())


def test_learned_log_variances_weigh_the_fisher_and_follow_adamw() -> None:
    torch.manual_seed(0)
    model, factors = Residuals(), []
    for log in (0.0, 2.0):
        model.log.data.fill_(log)
        net = kfac_fx.compile(copy.deepcopy(model), (X, BOXES))
        opt = kfac_fx.KFAC(net, estimation_mode="exact")
        net(X, BOXES).backward()
        opt.step()
        factors.append(opt.estimator.blocks["net.0.weight", "net.0.bias"].factors["G"].value)
        assert "log" not in opt.registered and "log" in opt.names.values()
    torch.testing.assert_close(factors[1], factors[0] * torch.exp(torch.tensor(-2.0)))


# --- a function that is written out -----------------------------------------------------------------------------------


def test_a_training_without_the_loss_that_compile_saw_is_told() -> None:
    """As that of a trainer, which takes the labels away to smooth them."""

    class Labeled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.layer(x)
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    net = kfac_fx.compile(Labeled(), (X, LABELS))
    optimizer = kfac_fx.KFAC(net)

    def step() -> None:
        F.cross_entropy(net(X)["logits"], LABELS, label_smoothing=0.1).backward()
        optimizer.step()

    (warning,) = warned(step)
    assert warning.startswith("compile captured a call that computes its loss, and the first call in training computes")
    assert "loss=lambda outputs: kfac_fx.losses.Categorical(outputs['logits'])" in warning
    assert optimizer.estimator.estimation_mode == "empirical" and warned(step) == []
    named = kfac_fx.compile(Labeled(), (X,), loss=of_labels)
    assert kfac_fx.KFAC(named).estimator.estimation_mode == "gradients"


def fused(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), y)


@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact", "curvature_prop"])
def test_a_fused_head_that_is_written_out_has_the_fisher_of_the_plain_one(mode: str) -> None:
    kfac_fx.plain_function(PlainlyFused, fused)
    torch.manual_seed(0)
    model = WithHead(PlainlyFused)
    plain = WithHead(fused)
    plain.load_state_dict(model.state_dict())
    nets = [kfac_fx.compile(of, (X, LABELS), strict=True) for of in (model, plain)]
    assert net_loss(nets[0]).grad_fn.name().startswith("PlainlyFused")  # type: ignore[union-attr]  # the model runs it
    moments = [net.record((X, LABELS), {}, mode=mode, generator=torch.Generator().manual_seed(0)) for net in nets]
    for key, sums in moments[0].statistics.items():
        for name, value in sums.items():
            torch.testing.assert_close(value, moments[1].statistics[key][name])
    assert kfac_fx.KFAC(nets[0]).estimator.estimation_mode == "gradients"


def net_loss(net: Any) -> Tensor:
    loss: Tensor = net(X, LABELS)
    return loss


def test_a_written_function_that_computes_something_else_is_refused_by_its_numbers() -> None:
    class Lie(Fused):
        pass

    kfac_fx.plain_function(Lie, lambda x, weight, y: fused(2 * x, weight, y))
    with pytest.raises(
        kfac_fx.UntraceableError, match=r"correct what kfac_fx.plain_function declares for .*\.Lie"
    ) as info:
        kfac_fx.compile(WithHead(Lie), (X, LABELS))
    assert "computes something else than its graph: outputs differ by" in str(info.value.__context__)


def test_only_functions_are_declared() -> None:
    with pytest.raises(TypeError, match=r"takes a subclass of torch\.autograd\.Function, and got Linear"):
        kfac_fx.plain_function(nn.Linear, fused)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"takes a function of the arguments of Fused\.apply .*, and got a int"):
        kfac_fx.plain_function(Fused, 3)  # type: ignore[arg-type]


# --- heads behind no loss ---------------------------------------------------------------------------------------------


def test_a_model_that_is_captured_in_parts_may_have_its_loss_in_python() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x = x if float(x.sum()) < 1e9 else 2 * x
            return F.cross_entropy(self.layer(x), labels)

    net = kfac_fx.compile(Divided(), (X, LABELS))
    assert net.program.submodules
    optimizer = kfac_fx.KFAC(net)
    net(X, LABELS).backward()
    optimizer.step()


def warned(step: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["fx", "export"])
def test_a_head_in_no_named_loss_is_named(inputs: Any) -> None:
    net = kfac_fx.compile(Detector(), inputs, loss=of_labels)
    optimizer = kfac_fx.KFAC(net)

    def step() -> None:
        outputs = net(X)
        (F.cross_entropy(outputs["logits"], LABELS) + (outputs["box"] - BOXES).abs().pow(1.5).mean()).backward()
        optimizer.step()

    (text,) = warned(step)
    assert text.startswith("the trained loss depends on parameters that no registered loss depends on: box.weight, box")
    assert "saturated" not in text and "body" not in text
    reasons = {row.names: row.reason for row in net.report.rows}
    assert [name for name, reason in reasons.items() if reason is not None] == ["box.{weight, bias}"]
    assert "outputs depend on it, and no loss does, so it has no curvature" in net.report.to_text(width=200)


def test_heads_in_named_losses_have_no_reason() -> None:
    net = kfac_fx.compile(Detector(), (X,), loss=of_both)
    assert [row.reason for row in net.report.rows] == [None] * 3


def test_a_head_whose_loss_in_forward_is_unknown_is_in_the_report() -> None:
    net = kfac_fx.compile(Trained(), (X, LABELS, BOXES))
    report = net.report
    assert report.unused == report.behind_no_loss == ("box.weight", "box.bias")
    assert report.to_dict()["parameters"]["behind no loss"] == ["box.weight", "box.bias"]
    text = report.to_text(width=200)
    assert "unused    none" in text
    assert "no loss   box.{weight, bias}: what forward returns depends on it, and no loss that is known does" in text
    assert 'KFAC(net, first_order={"lr": 0.01}) for another lr' in " ".join(text.split())


class Positioned(nn.Module):
    """Positions of which the loss in forward reads a part; forward may return others beside it."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.positions, self.last, self.returns = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2), returns

    def forward(self, x: Tensor, boxes: Tensor) -> Any:
        loss = F.mse_loss(self.last(torch.tanh(x[:, None] + self.positions[1:5])).mean(1), boxes)
        return (loss, self.positions[:1] * x.mean()) if self.returns else loss


@pytest.mark.parametrize("returns", [False, True])
def test_a_part_that_forward_never_reads_is_unused(returns: bool) -> None:
    """Its gradient is 0, whatever the loss; the gradient of a part that forward returns is not."""
    model = Positioned(returns)
    net = kfac_fx.compile(model, (X, BOXES))
    outputs = pytree.tree_leaves(net(X, BOXES))
    (gradient,) = torch.autograd.grad(sum(output.sum() for output in outputs), model.positions)
    assert bool(gradient[0].any()) is returns
    assert net.report.unused == ("positions[0:1]",)
    assert net.report.behind_no_loss == (("positions[0:1]",) if returns else ())
    assert ("no loss   positions[0:1]" if returns else "unused    positions[0:1]") in net.report.to_text(width=200)


def test_a_fit_warns_of_a_head_whose_loss_is_unknown() -> None:
    """Its scores and determinants were those without the head, without a word."""
    net, example = kfac_fx.compile(Trained(), (X, LABELS, BOXES)), kfac_fx.Batch(X, LABELS, BOXES)
    with pytest.warns(UserWarning, match=r"depends on box.\{weight, bias\}, so these parameters have no block"):
        kfac_fx.fit_spectrum(net, [example], mode="exact")
    named = [name for registration in net.registrations for name in registration.owners]
    kfac_fx.fit_spectrum(net, [example], mode="exact", variables=named)
    with pytest.raises(
        kfac_fx.RegistrationError, match="box.bias +is registered nowhere. No loss that is known depends"
    ):
        kfac_fx.fit_spectrum(net, [example], mode="exact", variables=[*named, "box.weight", "box.bias"])


def test_the_report_says_that_the_fisher_has_the_absolute_value_of_a_negative_weight() -> None:
    class Pushed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.layer(x)
            return F.mse_loss(z, y) - 0.05 * F.mse_loss(z, torch.zeros_like(z))

    net = kfac_fx.compile(Pushed(), (torch.randn(6, 4), torch.randn(6, 2)))
    (line,) = (line for line in net.report.fallbacks() if "negative" in line)
    assert line.startswith("mse_loss") and line.endswith("the Fisher has the absolute value of the weight")


def test_parameters_that_nothing_depends_on_are_behind_no_output() -> None:
    model = Trained()
    model.spare = nn.Linear(2, 2)
    report = kfac_fx.compile(model, (X, LABELS, BOXES)).report
    assert report.behind_no_loss == ("box.weight", "box.bias")
    assert "unused    spare.weight" in str(report).splitlines()


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ({"loss": torch.zeros(()), "logits": X}, "outputs['logits']"),
        ({"loss": torch.zeros(()), "scores": X}, "outputs['scores']"),
        ({"hidden": X, "logits": X}, "outputs['logits']"),
        ((torch.zeros(()), X), "outputs[1]"),
        ({"state": [X]}, "outputs['state']"),
    ],
)
def test_the_hint_names_an_output_that_is_there(outputs: Any, named: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return pytree.tree_map(lambda value: value + y.sum() if not value.ndim else value + y, outputs)

    with pytest.raises(kfac_fx.LossError, match="For the loss of an output write loss=lambda outputs:") as error:
        kfac_fx.compile(Returns(), (X,), loss="categorical")
    assert f"kfac_fx.losses.Categorical({named})" in str(error.value)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "division": lambda y: y.div_(3.0),
    "sum": lambda y: y.add_(1.0),
    "bounds": lambda y: y.clamp_(-0.5, 0.5),
    "rows": lambda y: y.index_fill_(0, torch.tensor([1]), 0.0),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_user_may_write_into_outputs_as_into_those_of_the_model(
    write: Callable[[Tensor], Tensor], view: bool
) -> None:
    """Taps return views, into which autograd lets nobody write."""
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 6), torch.randn(8, 4)
    model = nn.Sequential(linear, nn.Unflatten(1, (2, 3)) if view else nn.Identity())
    write(model(x)).cosh().sum().backward()
    wanted = linear.weight.grad
    linear.weight.grad = None
    net = kfac_fx.compile(model, (x,))
    optimizer = kfac_fx.KFAC(net)
    write(net(x)).cosh().sum().backward()
    torch.testing.assert_close(linear.weight.grad, wanted)
    optimizer.step()


class Variational(nn.Module):
    """The variational autoencoder of torch's examples, small."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(100, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder, self.pixels = nn.Linear(8, 64), nn.Linear(64, 100)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).relu()
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.pixels(self.decoder(z).relu()).sigmoid(), mean, log_variance


def images(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    directions = torch.randn(3, 100, generator=torch.Generator().manual_seed(99))
    return torch.sigmoid(3 * torch.randn(64, 3, generator=generator) @ directions).round().clamp(0.02, 0.98)


def of_variational(net: Any, step: int) -> Tensor:
    x = images(step)
    pixels, mean, log_variance = net(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return F.binary_cross_entropy(pixels, x, reduction="sum") + divergence


def test_a_variational_autoencoder_trains_about_as_fast_as_with_adamw() -> None:
    """Eigenvalues of training gradients take out of a step what all examples have in common: it stood still."""
    torch.manual_seed(0)
    model = Variational()
    first = float(of_variational(model, 0).detach())
    by_adamw = beside_adamw.by_adamw(copy.deepcopy(model), of_variational, 60, 10, rates=(1e-3, 3e-3, 1e-2))
    net = kfac_fx.compile(model, (images(0),))
    optimizer = kfac_fx.KFAC(net)
    assert first - beside_adamw.trained(net, optimizer, of_variational, 60, 10) > 0.9 * (first - by_adamw)
    assert "steps are those of Adam in the eigenbases, because no loss is known" in " ".join(str(net.report).split())
