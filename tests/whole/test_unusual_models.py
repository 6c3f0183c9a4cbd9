"""Models as people write them: the recording is the model's, at other batch sizes and on other paths, and every
registration is proved on those, too."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.proof import prove
from tests.zoo.functions import Reversed

Batch = tuple[Any, ...]


def x(cases: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(cases, 4, generator=torch.Generator().manual_seed(cases))


class Layers(nn.Module):
    """Three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)


class EarlyExit(Layers):
    """As soon as the activations are small."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
            if x.abs().mean() < 0.3:
                break
        return self.head(x)


class StochasticDepth(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + layer(x).tanh()
        return self.head(x)


class Halting(Layers):
    """As many steps as the inputs need."""

    def forward(self, x: Tensor) -> Any:
        steps = 0
        while x.norm() > 1.0 and steps < 5:
            x, steps = 0.5 * self.layers[0](x).tanh(), steps + 1
        return self.head(x)


class Routed(Layers):
    """Every row goes to one expert; some experts get none."""

    def forward(self, x: Tensor) -> Any:
        expert = x[:, :3].argmax(1)
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = (expert == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, layer(x[rows]))
        return self.head(out)


class Masked(Layers):
    """Some rows are computed anew."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers[0](x)
        some = hidden[:, 0] > 0
        out = hidden.clone()
        out[some] = self.layers[1](hidden[some])
        return self.head(out + self.layers[2](x))


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Any:
        return self.first(x).tanh()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.encode(x))


class Reaching(nn.Module):
    """Calls a method of a submodule that is not its forward, and its forward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Encoding(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.inner.encode(x) + self.inner(x)
        return self.head(h if h.sum() > -1e9 else h.exp())


@dataclass
class Example:
    features: Tensor
    scale: float


class TakesObjects(Layers):
    def forward(self, example: Example) -> Any:
        h = example.features
        for layer in self.layers:
            h = layer(h).tanh()
        return self.head(h) * example.scale


class Named(NamedTuple):
    features: Tensor
    mask: Tensor | None


class TakesNested(Layers):
    """Named tuples, dictionaries, lists and None, by keywords only."""

    def forward(self, **given: Any) -> Any:
        h = given["named"].features + given["more"]["of"][0]
        for layer in self.layers:
            h = layer(h).tanh()
        return {"logits": self.head(h), "nothing": given["named"].mask}


class Ragged(Layers):
    def forward(self, sequences: list[Tensor]) -> Any:
        pooled = []
        for sequence in sequences:
            for layer in self.layers:
                sequence = layer(sequence).tanh()
            pooled.append(sequence.mean(0))
        return self.head(torch.stack(pooled))


class ThroughNumpy(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.from_numpy((x.detach().numpy() > 0).astype("float32"))
        return self.head(x)


class Head(Layers):
    """An autograd.Function is the last thing, and one is in the middle."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = Reversed.apply(layer(x).tanh(), 1.0)  # type: ignore[no-untyped-call]
        return Reversed.apply(self.head(x), 1.0)  # type: ignore[no-untyped-call]


class Hooked(Layers):
    """A hook on a tensor, which doubles its gradient."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
            if x.requires_grad:
                x.register_hook(lambda gradient: 2 * gradient)
        return self.head(x)


class Casting(Layers):
    """Autocast between layers, and a branch."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = layer(x)
            x = x.float().tanh() if x.sum() > -1e9 else x
        return self.head(x)


class CastingInside(Layers):
    """The same without a branch, where a graph of the whole hides what is under autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x).tanh()
        return self.head(x.float())


class Frozen(Layers):
    """Layers that run without gradients."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.layers[0](x)
        with torch.inference_mode():
            scale = self.layers[1](x).norm()
        return self.head(self.layers[2](x)) / (1 + scale.clone())


class Adapted(nn.Module):
    """An adapter of low rank beside a frozen layer of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bits", torch.randint(-127, 127, (4, 4), dtype=torch.int8))
        self.down, self.up, self.head = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        weight: Any = self.bits
        return self.head(F.linear(x, weight.float() / 127) + self.up(self.down(x)))


class Stored(nn.Module):
    """Computes on what it holds, and takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("points", torch.randn(5, 4))

    def forward(self) -> Any:
        return self.inner(self.points)


def rows(*batches: Tensor) -> list[tuple[Batch, dict[str, Any]]]:
    return [((batch,), {}) for batch in batches]


ORDINARY = rows(x(6), x(9), x(5, 30.0), x(5, 1e-3))
NESTED = [((), {"named": Named(x(n), None), "more": {"of": [x(n + 1)[:n]]}}) for n in (6, 9)]
CASES: list[tuple[Callable[[], nn.Module], list[tuple[Batch, dict[str, Any]]], bool]] = [
    (EarlyExit, ORDINARY, True), (StochasticDepth, ORDINARY[:3], True), (Halting, ORDINARY[:3], True),
    (Routed, ORDINARY[:2], True), (Masked, ORDINARY[:2], False), (Reaching, ORDINARY[:2], True),
    (TakesObjects, [((Example(x(n), scale),), {}) for n, scale in ((6, 1.0), (9, 2.0))], True),
    (TakesNested, NESTED, False), (Ragged, [(([x(2), x(3), x(n)],), {}) for n in (5, 7)], False),
    (ThroughNumpy, ORDINARY[:2], True), (Head, ORDINARY[:2], False), (Hooked, ORDINARY[:2], True),
    (Casting, ORDINARY[:2], True), (CastingInside, ORDINARY[:2], True),
    (Frozen, ORDINARY[:2], True), (Adapted, ORDINARY[:2], False),
    (Stored, [((), {})], True),
]  # fmt: skip


def logits(output: Any) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    random.seed(3)
    return function()


def gradients(output: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    value = logits(output)
    loss = kfac_fx.losses.Normal(value, targets=torch.zeros_like(value)).evaluate()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("examples", [None, ()])
def test_a_forward_that_takes_no_tensors_is_told_once(examples: tuple[()] | None) -> None:
    """Without example inputs `compile` ended in an IndexError."""
    with pytest.warns(UserWarning, match=r"^the forward of Stored takes no tensors, .* forward as arguments$") as told:
        net = kfac_fx.compile(Stored(), examples, loss="normal")
        if examples is None:
            with pytest.raises(
                kfac_fx.UntraceableError, match=r"write kfac_fx.compile\(model, \(\), ...\), since forward"
            ):
                str(net.report)
        for _ in range(2):
            net()
    assert len(told) == 1
    assert [(row.names, row.approximation) for row in net.report.rows] == [("inner.{weight, bias}", "kron")]


@pytest.mark.filterwarnings("ignore:the forward of Stored takes no tensors:UserWarning")
@pytest.mark.parametrize(("build", "batches", "divided"), CASES, ids=[build.__name__ for build, *_ in CASES])
def test_what_is_recorded_is_of_the_model(build: Callable[[], nn.Module], batches: Any, divided: bool) -> None:
    torch.manual_seed(0)
    model = build()
    parameters: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    net = kfac_fx.compile(model, *batches[0], loss=lambda output: kfac_fx.losses.Normal(logits(output)))
    assert net.captures.first.whole != divided
    assert [
        (registration.parameters, registration.reason) for registration in net.registrations if registration.generic
    ] == []
    for args, kwargs in batches:
        moments, (recorded, _), trained, original = (
            seeded(partial(function, *given))
            for function, *given in (
                (net.record, args, kwargs),
                (net.functional, parameters, args, kwargs),
                (lambda args, kwargs: net(*args, **kwargs), args, kwargs),
                (lambda args, kwargs: copy.deepcopy(model)(*args, **kwargs), args, kwargs),
            )
        )
        assert moments.cases == len(logits(trained))
        assert torch.equal(logits(trained), logits(original))
        wanted, coarse = gradients(trained, parameters), 2e-2 if build in (Casting, CastingInside) else 1e-4
        for name, gradient in gradients(recorded, parameters).items():
            largest = float(wanted[name].abs().max())
            torch.testing.assert_close(gradient, wanted[name], rtol=coarse, atol=coarse * largest, msg=name)
        assert seeded(partial(prove, net.recorder(args, kwargs), args, kwargs)).failed == {}


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(3, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,bj,ijk->bk", self.first(x), self.second(x), self.weight)


def test_the_second_input_of_a_declared_layer_is_an_attribute() -> None:
    @kfac_fx.layer(
        rows=lambda x, attrs: (x[:, :, None] * attrs["z"][:, None]).reshape(len(x), 1, -1),
        grad_rows=lambda dy, attrs: dy.unsqueeze(1),
        layouts={"weight": "i j k -> k (i j)"},
        example=lambda: (OfTwo(), torch.randn(7, 4)),
    )
    def of_two(x: Tensor, z: Tensor, *, weight: Tensor) -> Tensor:
        return torch.einsum("bi,bj,ijk->bk", x, z, weight)

    model, x = OfTwo(), torch.randn(7, 4)
    symbolic = kfac_fx.compile(model, loss="normal", layers=[of_two], strict=True)
    assert "of_two(weight)" in map(str, symbolic.registrations)
    net = kfac_fx.compile(model, (x,), loss="normal", layers=[of_two], strict=True)
    assert "of_two(weight)" in map(str, net.registrations)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    pairs = torch.einsum("bi,bj->bij", model.first(x), model.second(x)).flatten(1)
    torch.testing.assert_close(estimator.blocks["weight",].factors["A"].value[0], pairs.T @ pairs / len(x))


class AutocastOff(nn.Module):
    """A region that switches autocast off, with a region in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(self.first(x.float())) * self.scale
            with torch.autocast("cpu", enabled=False):
                h = 2 * h + torch.ones(5)
        logits: Tensor = self.last(h)
        return logits


@pytest.mark.parametrize("outside", [False, True])
def test_a_region_without_autocast_is_open_where_autocast_is_off(outside: bool) -> None:
    torch.manual_seed(0)
    model, x = AutocastOff(), torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        net = kfac_fx.compile(model, (x,), loss="categorical", strict=True)
        assert bool(net.program.submodules) is outside
        torch.manual_seed(1)
        of_graph, _ = net.functional({}, (x,), {})
        torch.testing.assert_close(of_graph, model(x))
        assert net.record((x,), {}).cases == 6


class Pooled(nn.Module):
    """A generalized mean (GeM): learned exponents, of zeros, too, and of a learned bound."""

    def __init__(self) -> None:
        super().__init__()
        self.exponents, self.lowest = nn.Parameter(torch.tensor([3.0, 2.0])), nn.Parameter(torch.tensor(0.1))
        self.highest = nn.Parameter(torch.tensor([1.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.max(torch.min(x, self.highest), self.lowest)
        return (torch.relu(x) ** self.exponents).mean(1) + (h**self.exponents).mean(1)


class Relations(nn.Module):
    """The weights of relations that share bases (R-GCN, Schlichtkrull et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.bases, self.mix = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("rb,bio->rio", self.mix, self.bases)
        return torch.einsum("nri,rio->no", x, weights)


class Transitions(nn.Module):
    """A table that is read at two places, and added as a whole, as in a conditional random field."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        tags = x.argmax(-1)
        every = torch.logsumexp(x[:, 0, :, None] + self.table, 1) + x[:, 1]
        return every - self.table[tags[:, 0], tags[:, 1]][:, None]


class Stacked(nn.Module):
    """A symmetric weight that is divided by its norm along two vectors that have no gradients, as in a spectral norm
    upon another parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight + self.weight.T) / 2
        with torch.no_grad():
            v = F.normalize(weight.sum(0), dim=0)
            u = F.normalize(weight @ v, dim=0)
        return F.linear(x, weight / (u @ weight @ v))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Pooled, (6, 4, 2)), (Relations, (6, 5, 4)), (Transitions, (6, 2, 3)), (Stacked, (6, 4))],
)
@pytest.mark.usefixtures("float64")
def test_small_functions_of_data_and_parameters_have_exact_blocks(make: Callable[[], nn.Module], shape: Any) -> None:
    """2 Jᵀ J over the cases: the second derivative of a squared error is 2."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True, approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    assert len(estimator.blocks) == len(list(model.parameters()))
    for (name,), block in estimator.blocks.items():

        def outputs(value: Tensor, name: str = name) -> Tensor:
            result: Tensor = torch.func.functional_call(model, {name: value}, (x,))
            return result

        parameter = model.get_parameter(name).detach()
        jacobian = torch.autograd.functional.jacobian(outputs, parameter).reshape(-1, parameter.numel())
        vector = torch.randn_like(parameter)
        wanted = (2 * jacobian.T @ (jacobian @ vector.flatten()) / len(x)).view_as(parameter)
        torch.testing.assert_close(block.multiply_matpower({name: vector}, 1.0)[name] - 1e-3 * vector, wanted)


class Quantized(nn.Module):
    """Quantization-aware training: the weight and an activation are rounded, with ranges that follow them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.of_weight = torch.ao.quantization.default_fused_per_channel_wt_fake_quant()
        self.of_activation = torch.ao.quantization.default_fused_act_fake_quant()

    def forward(self, x: Tensor) -> Tensor:
        h = self.of_activation(torch.tanh(self.first(x)))
        return F.linear(h, self.of_weight(self.head.weight), self.head.bias)


@pytest.mark.parametrize(("width", "block"), [(8, "full"), (600, "kron")])
def test_ranges_of_a_fake_quantization_follow_once_in_a_forward(width: int, block: str) -> None:
    torch.manual_seed(0)
    model, x = Quantized(width), torch.randn(16, 3)
    plain = copy.deepcopy(model)
    net = kfac_fx.compile(model, (x,), loss="mse")
    optimizer = kfac_fx.KFAC(net, cov_update_every=1)
    (row,) = (row for row in net.report.rows if row.parameters == ("head.weight",))
    assert row.approximation == block
    for _ in range(4):
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad(), plain.zero_grad()
        F.mse_loss(net(x), x[:, :2].sin()).backward()
        F.mse_loss(plain(x), x[:, :2].sin()).backward()
        for (name, parameter), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad, msg=name)
        for (name, buffer), same in zip(net.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, same), name
        optimizer.step()  # raises ModelChangedError if a recording has other outputs than the model


class Listening(Layers):
    """Hooks on an activation, which torch takes only where there is a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x))
        if self.training:
            h.register_hook(lambda gradient: -gradient)
            h.retain_grad()
        return self.head(h)  # type: ignore[no-any-return]


def test_hooks_on_activations_stay_out_of_forwards_without_gradients() -> None:
    torch.manual_seed(0)
    model, inputs = Listening(), x(16)
    plain = copy.deepcopy(model)
    net = kfac_fx.compile(model, (inputs,), loss="mse")
    assert net.program.submodules, "gradients that the hook turns around are in no graph of the whole model"
    optimizer = kfac_fx.KFAC(net)
    for step in range(3):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        if step == 0:
            plain(inputs).square().mean().backward()
            for parameter, of_plain in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, of_plain.grad)
        optimizer.step()
