"""What is recorded, against plain autograd by hand; and what a recording leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import LossError, UntraceableError
from kfac_fx.compiled_module import CompiledModule
from kfac_fx.compiler import compile as compiled
from kfac_fx.losses import Categorical, LossFunction, MultiBernoulli, Normal
from kfac_fx.moments import Moments
from kfac_fx.output_losses import graph_loss
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import capture
from kfac_fx.recorder import Recorder

KEYS = ("count", "A", "G")
Statistics = dict[str, dict[str, Tensor]]


def recorder(model: nn.Module, *inputs: Any, **options: Any) -> Recorder:
    """Of the sums of rows, whatever the blocks would need; without a proof."""
    program = run(capture(model, inputs, layers=LAYERS).program)
    needs = {one.parameters: KEYS for one in program.registrations if not one.generic}
    return Recorder(capture(model, inputs, layers=LAYERS), program, model, None, needs, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# --- by hand --------------------------------------------------------------------------------------------------------


def by_hand(model: nn.Module, inputs: tuple[Any, ...], loss: Any) -> Statistics:
    """Sums of rows of every module with a weight, from its inputs and from the gradients of its outputs; `loss`:
    from the model's output to a sum over cases."""
    seen: list[tuple[str, nn.Module, Any, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):

            def keep(own: nn.Module, given: Any, out: Tensor, name: str = name) -> Tensor:
                out.retain_grad()
                seen.append((name, own, given[0].detach(), out))
                return out.clone()  # what follows may write into it

            hooks.append(module.register_forward_hook(keep))
    before = copy.deepcopy(dict(model.named_buffers()))
    loss(model(*inputs)).backward()
    for hook in hooks:
        hook.remove()
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    model.zero_grad()
    found: Statistics = {}
    for name, module, x, out in seen:
        rows, grads = rows_of(module, x, out.grad)  # type: ignore[arg-type]  # retain_grad
        own = {"count": torch.tensor(float(len(rows))), "A": rows.mT @ rows, "G": grads.mT @ grads}
        found[name] = {key: value + found.get(name, {}).get(key, 0) for key, value in own.items()}
    return found


def rows_of(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.Embedding):
        return F.one_hot(x, module.num_embeddings).flatten(0, -2).float(), grad.flatten(0, -2)
    if isinstance(module, nn.Conv2d):
        x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
        grad = grad.flatten(2).mT
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    bias = getattr(module, "bias", None)
    return (x if bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)), grad


def same(moments: Moments, expected: Statistics) -> None:
    got = {names[0].removesuffix(".weight"): one for names, one in moments.statistics.items()}
    assert got.keys() - {"norm"} == expected.keys()
    for name, one in expected.items():
        for key, value in one.items():
            torch.testing.assert_close(got[name][key].squeeze(0), value, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, dilation=2, padding=2, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        x = F.relu(self.second(x), inplace=True)
        return self.head(self.second(x).mean((2, 3)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.table(ids)))
        return self.head(torch.tanh(self.inner(x)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 3)
    )


MODELS: Mapping[str, tuple[Any, Any]] = {
    "mlp": (mlp, lambda: torch.randn(6, 4)),
    "convolutional": (Convolutional, lambda: torch.randn(6, 2, 7, 8)),
    "words": (Words, lambda: torch.randint(7, (6, 5))),
}


@pytest.fixture(params=MODELS)
def net(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, batch = MODELS[request.param]
    return make(), batch()


@pytest.mark.parametrize("loss", [Categorical, Normal, MultiBernoulli])
def test_sampled_statistics_are_those_of_plain_autograd(net: Any, loss: type[LossFunction]) -> None:
    model, x = net
    given = recorder(model, x)
    given.loss = _spec(loss)
    moments = given.record((x,), generator=generator())
    same(moments, by_hand(model, (x,), lambda out: loss(out).evaluate_on_sample(generator())))
    assert moments.cases == loss(model(x)).cases


def _spec(loss: Any) -> Any:
    from kfac_fx.loss_spec import loss_from

    return loss_from(loss)


@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_empirical_statistics_are_those_of_the_true_targets(net: Any, kind: str) -> None:
    model, x = net
    given = recorder(model, x)
    given.loss = _spec(kind)
    out = model(x)
    targets = torch.randint(3, out.shape[:-1]) if kind == "categorical" else torch.randn(out.shape)

    def loss(out: Tensor) -> Tensor:
        if kind == "categorical":
            return F.cross_entropy(out.flatten(0, -2), targets.flatten(), reduction="sum")
        return F.mse_loss(out, targets, reduction="sum")

    same(given.record((x,), mode="empirical", targets=targets), by_hand(model, (x,), loss))


# --- the loss in forward --------------------------------------------------------------------------------------------


class LossInside(nn.Module):
    def __init__(self, kind: str, reduction: str = "mean") -> None:
        super().__init__()
        self.body, self.kind, self.reduction = mlp(), kind, reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        if self.kind == "sequence":
            return F.cross_entropy(out.transpose(1, 2), y, reduction=self.reduction)
        losses = {"class": F.cross_entropy, "square": F.mse_loss, "binary": F.binary_cross_entropy_with_logits}
        return losses[self.kind](out, y, reduction=self.reduction)


def targets_for(kind: str, x: Tensor) -> Tensor:
    if kind in ("class", "sequence"):
        return torch.randint(3, x.shape[:-1])
    return torch.rand(*x.shape[:-1], 3)


CASES_INSIDE = {"class": (6, 6), "sequence": (6 * 5, 6 * 5), "square": (6, 6 * 3), "binary": (6, 6 * 3)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", CASES_INSIDE)
def test_a_loss_in_forward_has_its_own_targets_and_scale(kind: str, reduction: str) -> None:
    """The Fisher is that of `cases` times the mean: its mean over cases is that of the loss as it is written."""
    x = torch.randn(6, 5, 4) if kind == "sequence" else torch.randn(6, 4)
    y = targets_for(kind, x)
    model = LossInside(kind, reduction)
    cases, terms = CASES_INSIDE[kind]
    moments = recorder(model, x, y).record((x, y), mode="empirical")
    scale = cases if reduction == "mean" else 1
    expected = by_hand(model, (x, y), lambda loss: loss * scale)
    assert moments.cases == cases
    same(moments, expected)


def test_coefficients_of_losses_found_in_forward() -> None:
    out = torch.randn(6, 3)
    assert graph_loss("normal", "mean", out, None)[0] == 1 / 3
    assert graph_loss("normal", "sum", out, None)[0] == graph_loss("categorical", "mean", out, None)[0] == 1
    assert graph_loss("categorical", "mean", torch.randn(6, 3, 5), None)[1].cases == 30


def test_targets_that_forward_computes_from_inputs() -> None:
    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.words(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten() % 3)

    model, ids = Next(), torch.randint(7, (6, 5))
    moments = recorder(model, ids).record((ids,), mode="empirical")
    assert moments.cases == 24
    expected = by_hand(model, (ids,), lambda loss: 24 * loss)
    same(moments, expected)


def test_targets_that_forward_computes_from_parameters_must_be_given() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.student(x), self.teacher(x).detach())

    x = torch.randn(6, 4)
    given = recorder(Distilled(), x)
    with pytest.raises(LossError, match="the targets of the loss at teacher_weight are computed from parameters; pass"):
        given.record((x,), mode="empirical")
    given.record((x,))
    assert given.record((x,), mode="empirical", targets=torch.randn(6, 3)).cases == 6


def test_without_a_loss_there_is_no_fisher() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(LossError) as failure:
        recorder(mlp(), x).record((x,))
    assert str(failure.value).splitlines() == [
        "no loss is known: the Fisher is that of an output distribution.",
        'Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli" or a function of the model\'s '
        "outputs, or let forward compute cross_entropy, mse_loss or binary_cross_entropy_with_logits.",
    ]


# --- rides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_ride_equals_an_empirical_recording(net: Any, reduction: str) -> None:
    model, x = net
    given = recorder(model, x)
    given.loss = _spec("categorical")
    targets = torch.randint(3, model(x).shape[:-1])
    outputs, ride = given.ride((x,))
    F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction=reduction).backward()
    rode, recorded = ride.moments(reduction), given.record((x,), mode="empirical", targets=targets)
    assert rode.cases == recorded.cases
    torch.testing.assert_close(rode.statistics, recorded.statistics, rtol=1e-5, atol=1e-6)


def test_a_ride_keeps_the_gradient_of_generic_parameters_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.t = mlp(), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.t.cumsum(0)

    model, x, y = Scaled(), torch.randn(6, 4), torch.randint(3, (6,))
    given = recorder(model, x)
    given.loss = _spec("categorical")
    model.t.grad = torch.ones(3)
    outputs, ride = given.ride((x,))
    F.cross_entropy(outputs, y).backward()
    moments = ride.moments()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model.t)
    torch.testing.assert_close(moments.statistics[("t",)]["gradient"], grad)
    torch.testing.assert_close(model.t.grad, 1 + grad / 6)
    recorded = given.record((x,), mode="empirical", targets=y)
    torch.testing.assert_close(recorded.statistics[("t",)]["gradient"], grad)


def test_a_ride_that_would_lose_what_forward_does_is_refused() -> None:
    class Caching(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            self.last = super().forward(x)
            return self.last

    x = torch.randn(6, 4)
    given = recorder(Caching(*mlp()), x)
    with pytest.raises(UntraceableError) as failure:
        given.ride((x,))
    assert str(failure.value).splitlines() == [
        "a ride runs in the place of Caching, whose forward does more than its graph:",
        "  sets last",
        'Record in a pass of its own, with estimation_mode="gradients" or net.record(...), or return what forward '
        "keeps.",
    ]


# --- parts, cases, nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 6), (0.5, 3), (0.4, 3), (1e-6, 1)])
def test_a_fraction_is_the_first_part_of_batch_and_targets(net: Any, fraction: float, kept: int) -> None:
    model, x = net
    model.eval()
    given = recorder(model, x)
    given.loss = _spec("categorical")
    targets = torch.randint(3, model(x).shape[:-1])
    part = given.record((x,), mode="empirical", targets=targets, fraction=fraction)
    whole = given.record((x[:kept],), mode="empirical", targets=targets[:kept])
    assert part.cases == whole.cases
    torch.testing.assert_close(part.statistics, whole.statistics)


def test_a_fraction_follows_the_cases_wherever_they_are() -> None:
    class SequencesFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(x * scale)).mean(0))

    x, scale = torch.randn(5, 6, 4), torch.randn(4)
    given = recorder(SequencesFirst(), x, scale)
    part = given.part((x, scale), 0.5)
    assert torch.equal(part[0], x[:, :3]) and part[1] is scale
    assert given.examples((x, scale)) == 6


def test_per_case_gradients_are_those_of_each_case() -> None:
    model, x = mlp(), torch.randn(6, 4)
    given = recorder(model, x)
    given.loss = _spec("categorical")
    given.statistics = dict.fromkeys(given.statistics, ("per_case", "square"))
    y = torch.randint(3, (6,))
    moments = given.record((x,), mode="empirical", targets=y)
    for n in range(6):
        alone = given.record((x[n : n + 1],), mode="empirical", targets=y[n : n + 1])
        for key, one in alone.statistics.items():
            torch.testing.assert_close(moments.statistics[key]["per_case"][n], one["per_case"][0])
    for one in moments.statistics.values():
        squares = one["per_case"].square().sum(0)
        torch.testing.assert_close(one["square"].flatten(), squares)


def test_a_model_with_nothing_to_train_has_no_statistics() -> None:
    x = torch.randn(6, 4)
    for model in (nn.Linear(4, 3).requires_grad_(False), nn.Tanh()):
        given = recorder(model, x)
        given.loss = _spec("normal")
        moments = given.record((x,))
        assert moments.statistics == {} and moments.cases == 6


def test_a_use_that_no_gradient_reaches_has_sums_of_zero() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.dropped = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.kept(x), self.dropped(x)

    x = torch.randn(6, 4)
    given = recorder(Dropped(), x)
    given.loss = _spec(lambda outputs: Categorical(outputs[0]))
    moments = given.record((x,))
    assert moments.statistics[("kept.weight", "kept.bias")]["count"] == 6
    assert all(float(one.abs().sum()) == 0 for one in moments.statistics[("dropped.weight", "dropped.bias")].values())


# --- what stays as it was -------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, BatchNorm with its counter, a buffer that forward adds to, an in-place operation on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.seen.add_(x.detach().sum(0))
        return self.head(self.drop(self.norm(self.inner(x))))


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_recording_leaves_everything_as_it_was(mode: str) -> None:
    model, x = Everything(), torch.randn(6, 4)
    given = recorder(model, x.clone())
    given.loss = _spec("categorical")
    model.head.weight.grad = torch.ones(3, 4)
    before = copy.deepcopy((model.state_dict(), x, [p.grad for p in model.parameters()]))
    stream = torch.random.get_rng_state()
    with torch.no_grad():
        given.record((x,), mode=mode, targets=torch.randint(3, (6,), generator=generator()), generator=generator())
    assert torch.equal(torch.random.get_rng_state(), stream)
    after = (model.state_dict(), x, [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not x.requires_grad


def test_the_functional_forward_is_pure() -> None:
    model, x = Everything(), torch.randn(6, 4)
    given = recorder(model, x.clone())
    before = copy.deepcopy((model.state_dict(), x))
    stream = torch.random.get_rng_state()
    weight = model.head.weight.detach().clone().requires_grad_()
    outputs, fisher = given.outputs({"head.weight": weight}, (x,))
    (grad,) = torch.autograd.grad(outputs.sum(), weight)
    assert fisher[0] is outputs and grad.shape == (3, 4)
    assert torch.equal(torch.random.get_rng_state(), stream)
    torch.testing.assert_close((model.state_dict(), x), before, rtol=0, atol=0)
    torch.testing.assert_close(outputs, model(x.clone()))


# --- compiled -------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Convolution, norm, embedding, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3)) + self.table(ids).sum(1)
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def mixed(backend: str) -> CompiledModule:
    torch.manual_seed(0)
    return compiled(Mixed(), (torch.randn(6, 1, 6, 6), torch.randint(7, (6, 3))), loss="categorical", backend=backend)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    """For two batch sizes, with one capture and one compilation."""
    eager, other = mixed("eager"), mixed(backend)
    for cases in (6, 4):
        args = (torch.randn(cases, 1, 6, 6), torch.randint(7, (cases, 3)))
        sampled = [net.record(args, {}, generator=generator()) for net in (eager, other)]
        torch.testing.assert_close(sampled[0].statistics, sampled[1].statistics, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_ride_equals_an_eager_one(backend: str) -> None:
    eager, other = mixed("eager"), mixed(backend)
    args = (torch.randn(6, 1, 6, 6), torch.randint(7, (6, 3)))
    rides = []
    for net in (eager, other):
        outputs, ride = net.ride(args, {})
        F.cross_entropy(outputs, torch.arange(6) % 3).backward()
        rides.append(ride.moments())
    torch.testing.assert_close(rides[0].statistics, rides[1].statistics, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(eager.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-5)
