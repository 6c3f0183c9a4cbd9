"""Recordings against plain autograd by hand; and the state that a recording leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import UntraceableError
from kfac_fx.compiled.compiled_module import compile
from kfac_fx.losses import Categorical, LossFunction, MultiBernoulli, Normal
from kfac_fx.losses.declared import loss_from
from tests.runtime.recorded_by_hand import Words, by_hand, generator, mlp, recorder, same


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
    given.loss = loss_from(loss)
    moments = given.record((x,), generator=generator())
    same(moments, by_hand(model, (x,), lambda out: loss(out).evaluate_on_sample(generator())))
    assert moments.cases == loss(model(x)).cases


@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_empirical_statistics_are_those_of_the_true_targets(net: Any, kind: str) -> None:
    model, x = net
    given = recorder(model, x)
    given.loss = loss_from(kind)
    out = model(x)
    targets = torch.randint(3, out.shape[:-1]) if kind == "categorical" else torch.randn(out.shape)

    def loss(out: Tensor) -> Tensor:
        if kind == "categorical":
            return F.cross_entropy(out.flatten(0, -2), targets.flatten(), reduction="sum")
        return F.mse_loss(out, targets, reduction="sum")

    same(given.record((x,), mode="empirical", targets=targets), by_hand(model, (x,), loss))


# --- during training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_ride_equals_an_empirical_recording(net: Any, reduction: str) -> None:
    model, x = net
    given = recorder(model, x)
    given.loss = loss_from("categorical")
    targets = torch.randint(3, model(x).shape[:-1])
    outputs, pending = given.record_in_training((x,))
    F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction=reduction).backward()
    trained, recorded = pending.moments(reduction), given.record((x,), mode="empirical", targets=targets)
    assert trained.cases == recorded.cases
    torch.testing.assert_close(trained.statistics, recorded.statistics, rtol=1e-5, atol=1e-6)


def test_a_ride_keeps_the_gradient_of_generic_parameters_apart() -> None:
    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.t = mlp(), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(self.body(x), self.t)

    model, x, y = Angles(), torch.randn(6, 4), torch.randint(3, (6,))
    given = recorder(model, x)
    given.loss = loss_from("categorical")
    model.t.grad = torch.ones(3)
    outputs, pending = given.record_in_training((x,))
    F.cross_entropy(outputs, y).backward()
    moments = pending.moments()
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
        given.record_in_training((x,))
    assert str(failure.value).splitlines() == [
        "statistics cannot be recorded during training, because the forward of Caching has side effects that the "
        "captured graph does not have:",
        "  sets last",
        "Name the distribution of the loss, kfac_fx.compile(..., loss=...), to record in a separate pass, or return "
        "these values from forward. If only the first forward has them, as one that initializes by its data, call the "
        "model once before kfac_fx.compile.",
    ]


def test_a_ride_of_a_forward_that_changes_its_input_says_how_to_copy_it() -> None:
    class Storing(nn.Linear):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            inputs["y"] = super().forward(inputs["x"])
            return inputs["y"]

    net = compile(Storing(4, 3), ({"x": torch.randn(6, 4)},), loss="mse")
    with pytest.raises(UntraceableError) as failure:
        net.record_in_training(({"x": torch.randn(6, 4)},), {})
    first, effect, answer = str(failure.value).splitlines()
    assert effect == "  changes its input inputs" and answer.startswith("Record in a separate pass, with estimation")
    assert "or let it change a copy, as inputs = dict(inputs) makes one." in answer


# --- parts, cases, nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 6), (0.5, 3), (0.4, 3), (1e-6, 1)])
def test_a_fraction_is_the_first_part_of_batch_and_targets(net: Any, fraction: float, kept: int) -> None:
    model, x = net
    model.eval()
    given = recorder(model, x)
    given.loss = loss_from("categorical")
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
    part = given.emitted.part((x, scale), 0.5)
    assert torch.equal(part[0], x[:, :3]) and part[1] is scale
    assert given.emitted.examples((x, scale)) == 6


def test_per_case_gradients_are_those_of_each_case() -> None:
    model, x = mlp(), torch.randn(6, 4)
    given = recorder(model, x)
    given.loss = loss_from("categorical")
    given.statistics = dict.fromkeys(given.statistics, ("per_case", "square"))
    y = torch.randint(3, (6,))
    moments = given.record((x,), mode="empirical", targets=y)
    for n in range(6):
        alone = given.record((x[n : n + 1],), mode="empirical", targets=y[n : n + 1])
        for key, statistic in alone.statistics.items():
            torch.testing.assert_close(moments.statistics[key]["per_case"][n], statistic["per_case"][0])
    for entry in moments.statistics.values():
        squares = entry["per_case"].square().sum(0)
        torch.testing.assert_close(entry["square"].flatten(), squares)


def test_a_model_with_nothing_to_train_has_no_statistics() -> None:
    x = torch.randn(6, 4)
    for model in (nn.Linear(4, 3).requires_grad_(False), nn.Tanh()):
        given = recorder(model, x)
        given.loss = loss_from("normal")
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
    given.loss = loss_from(lambda outputs: Categorical(outputs[0]))
    moments = given.record((x,))
    assert moments.statistics[("kept.weight", "kept.bias")]["count"] == 6
    assert all(
        float(statistic.abs().sum()) == 0
        for statistic in moments.statistics[("dropped.weight", "dropped.bias")].values()
    )


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
    given.loss = loss_from("categorical")
    model.head.weight.grad = torch.ones(3, 4)
    before = copy.deepcopy((model.state_dict(), x, [p.grad for p in model.parameters()]))
    stream = torch.random.get_rng_state()
    with torch.no_grad():
        given.record((x,), mode=mode, targets=torch.randint(3, (6,), generator=generator()), generator=generator())
    assert torch.equal(torch.random.get_rng_state(), stream)
    after = (model.state_dict(), x, [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not x.requires_grad


@pytest.mark.parametrize("mode", ["gradients", "curvature_prop", "curvature_prop_GGN"])
def test_what_is_sampled_comes_from_the_generator_that_is_given(mode: str) -> None:
    model, x = nn.Linear(4, 3), torch.randn(6, 4)  # without random numbers of its own, for which the stream is kept
    given = recorder(model, x)
    given.loss = loss_from("categorical")
    stream = torch.random.get_rng_state()
    generators = generator(), generator(), generator().manual_seed(5)
    made = [
        given.record((x,), mode=mode, generator=generator).statistics["weight", "bias"]["G"] for generator in generators
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert torch.equal(torch.random.get_rng_state(), stream)


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


def test_a_part_of_the_targets_is_that_of_tensors_with_all_cases() -> None:
    x = torch.randn(6, 4)
    of = recorder(mlp(), x)
    values = of.capture.flatten((x,), {})
    targets = {"classes": torch.arange(6), "weights": torch.arange(4.0), "scale": torch.ones(()), "name": "all"}
    part = of.part(values, targets, 0.5)[1]
    assert part["classes"].tolist() == [0, 1, 2] and part["weights"].tolist() == [0, 1, 2, 3]
    assert part["scale"] is targets["scale"] and part["name"] == "all"
    assert of.part(values, targets, 1.0)[1] is targets


@pytest.mark.parametrize("memory", [0, 1.5])
def test_the_memory_of_a_recording_is_a_whole_number_of_bytes(memory: Any) -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match=f"^memory is {memory}; it must be a whole number of bytes, at least 1$"):
        recorder(mlp(), x).record((x,), mode="exact", memory=memory)
