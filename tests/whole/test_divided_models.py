"""Models that no single graph holds: their submodules are captured one by one, and what they record is still right."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx import KFAC, LossError, ModelChangedError, RegistrationError, UntraceableError
from kfac_fx.divided import DividedRecorder
from tests.compiler.test_watch import Negated
from tests.whole.training import differences, step

X = torch.randn(6, 4)
Build = Callable[[], nn.Module]


class Base(nn.Module):
    """Three layers around something that torch.export cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)).tanh())


class Straight(Base):
    """A backward function of its own."""

    def between(self, h: Tensor) -> Any:
        return Negated.apply(self.middle(h))


class Branching(Base):
    def between(self, h: Tensor) -> Any:
        return self.middle(h) if h.sum() > -1e9 else h.exp()


class Repeated(Base):
    """As many calls as the data say."""

    def between(self, h: Tensor) -> Tensor:
        for _ in range(2 + int(h.detach().abs().sum() < 1e9)):
            h = self.middle(h).tanh()
        return h


class Written(Base):
    """What a captured submodule returns is written into."""

    def between(self, h: Tensor) -> Any:
        h[h.detach().sum(1) > 1e9] = 0.0
        h.mul_(2.0)
        return self.middle(h) if h.sum() > -1e9 else h


class Hooked(Branching):
    """Hooks of a captured submodule, on its inputs and its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.middle.register_forward_hook(lambda module, args, out: out + 1)


class Normalized(Base):
    """Buffers that are updated inside and outside of what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))  # type: ignore[assignment]
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Any:
        self.calls += 1
        self.last_size = float(h.detach().norm())
        return self.norm(self.middle(h)) if h.sum() > -1e9 else h


class Frozen(Base):
    """A submodule that is run without gradients, too, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def between(self, h: Tensor) -> Any:
        with torch.no_grad():
            scale = self.middle(h).norm()
        return self.fixed(self.middle(h / (1 + scale))) if h.sum() > -1e9 else h


class Recomputed(Base):
    def between(self, h: Tensor) -> Any:
        return checkpoint(self.middle, h, use_reentrant=True) if h.sum() > -1e9 else h


class Mixed(Base):
    """Under autocast between the submodules."""

    def between(self, h: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.middle(h)
        return out.float() if h.sum() > -1e9 else h


MODELS: list[Build] = [Straight, Branching, Repeated, Written, Hooked, Normalized, Frozen, Recomputed, Mixed]


def compiled(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    return kfac_fx.compile(model, inputs or (X,), **{"loss": "normal", **options})


def recorder_of(net: Any) -> DividedRecorder:
    found = net.captures.first
    assert isinstance(found, DividedRecorder)
    return found


@pytest.mark.parametrize("build", MODELS)
def test_training_with_recordings_is_the_model_bit_for_bit(build: Build) -> None:
    model = build()
    twin = copy.deepcopy(model)
    net = compiled(model)
    recorder_of(net)
    assert [one.reason for one in net.registrations if one.generic] == []
    assert {name for one in net.registrations for name in one.parameters} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for _ in range(2):
        net.record((X,), {})
        assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []
    assert model.__dict__.keys() == twin.__dict__.keys()


@pytest.mark.parametrize("build", [Branching, Repeated, Written])
def test_statistics_are_those_of_the_whole_graph(build: Build) -> None:
    """The same function without its branches can be captured whole, and is the oracle."""

    class Whole(build):  # type: ignore[misc, valid-type]
        def between(self, h: Tensor) -> Any:
            if build is Repeated:
                for _ in range(3):
                    h = self.middle(h).tanh()
                return h
            return self.middle(2.0 * h if build is Written else h)

    model, whole = build().double(), Whole().double()
    whole.load_state_dict(model.state_dict())
    x = X.double()
    parts, graph = compiled(model, x), compiled(whole, x)
    assert not isinstance(graph.captures.first, DividedRecorder)
    one, other = (net.record((x,), {}, generator=torch.Generator().manual_seed(3)) for net in (parts, graph))
    assert one.cases == other.cases
    assert one.statistics.keys() == other.statistics.keys()
    for key, sums in other.statistics.items():
        torch.testing.assert_close(one.statistics[key], sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("approximation", ["diagonal", "full"])
def test_gradients_of_a_case_add_up_over_calls(approximation: str) -> None:
    model = Repeated().double()
    x = X.double()
    net = compiled(model, x, approximations={"middle": approximation})
    (one,) = (one for one in net.registrations if one.parameters[0] == "middle.weight")
    assert one.approximation == approximation and net.report.rows[1].uses == 3
    moments = net.record((x,), {}, mode="empirical", targets=torch.zeros(6, 3, dtype=torch.double))
    wanted = []
    for case in x:
        loss = kfac_fx.losses.Normal(model(case[None]), targets=torch.zeros(1, 3, dtype=torch.double)).evaluate()
        grads = torch.autograd.grad(loss, [model.middle.weight, model.middle.bias])
        wanted.append(torch.cat([grads[0], grads[1][:, None]], 1).flatten())
    torch.testing.assert_close(moments.statistics[one.parameters]["per_case"], torch.stack(wanted))


class Tied(nn.Module):
    """One weight in an embedding and in the head, which are captured apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        h = self.embed(ids)
        h = self.inner(h) if h.sum() > -1e9 else h
        return self.head(h)


def test_a_parameter_of_two_submodules_is_one_registration() -> None:
    ids = torch.randint(7, (5, 3))
    net = compiled(Tied(), ids, loss="categorical")
    uses = {one.parameters: (len(one.uses), one.layer, one.generic) for one in net.registrations}
    assert uses == {("embed.weight",): (2, "embedding", False), ("inner.weight", "inner.bias"): (1, "linear", False)}
    assert net.record((ids,), {}).statistics[("embed.weight",)]["count"] == 30


class Reads(Base):
    """Python that reads parameters of captured submodules, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.spare = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def between(self, h: Tensor) -> Any:
        h = self.middle(h) if h.sum() > -1e9 else h
        return F.linear(h, self.middle.weight) * self.scale


def test_what_python_reads_is_generic_with_the_place() -> None:
    net = compiled(Reads())
    line = Reads.between.__code__.co_firstlineno + 2
    read = f"read at test_divided_models.py:{line}, in Python that is not captured"
    assert {one.parameters: one.reason for one in net.registrations if one.generic} == {
        ("middle.weight",): f"middle.weight is {read}",
        ("middle.bias",): f"middle.weight is {read}",
        ("scale",): f"scale is {read}",
        ("spare",): "spare is in a module that is not captured, and not read on the examples",
    }
    moments = net.record((X,), {})
    assert moments.statistics[("spare",)]["gradient"].abs().max() == 0
    assert moments.statistics[("middle.weight",)]["gradient"].abs().max() > 0
    with pytest.raises(RegistrationError, match="scale +scale is read at test_divided_models.py"):
        compiled(Reads(), strict=True)


# --- what is not the same at every forward --------------------------------------------------------------------------


class Dropped(nn.Module):
    """Layers that are left out at random."""

    def __init__(self, draw: Callable[[], float], probability: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.draw, self.probability = draw, probability

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if self.draw() >= self.probability:
                x = x + layer(x).tanh()
        return self.head(x)


def by_torch() -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("draw", [by_torch, random.random, np.random.rand])
def test_layers_that_are_dropped_at_random(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Dropped(draw)
    net = compiled(model)
    assert [one.layer for one in net.registrations] == ["linear"] * 4
    counts = {one.parameters: set[float]() for one in net.registrations}
    for _ in range(12):
        moments = net.record((X,), {})
        for key, sums in moments.statistics.items():
            counts[key].add(float(sums["count"]))
        draw(), net(X)
    assert counts.pop(("head.weight", "head.bias")) == {6.0}
    assert all(found == {0.0, 6.0} for found in counts.values())


class Gated(Base):
    def between(self, h: Tensor) -> Any:
        return self.middle(h) if h.sum() > 0 else h


def test_a_layer_that_does_not_run_counts_as_no_rows_of_that_batch() -> None:
    """F = c A ⊗ G: A and G are of the batches that it ran in, and c, its rows a case, is of all batches."""
    model = Gated()
    with torch.no_grad():
        model.first.weight.copy_(torch.ones(5, 4))
    x = X.abs()
    est = kfac_fx.FisherEstimator(compiled(model, x), damping=1e-3, cov_ema_decay=1.0)
    factors = est.blocks[("middle.weight", "middle.bias")].factors
    est.update_covariances(x)
    before = factors["A"].value.clone()
    est.update_covariances(-10 * x)
    torch.testing.assert_close(factors["A"].value, before)
    assert factors["positions"].value == 0.5
    assert est.blocks[("last.weight", "last.bias")].factors["positions"].value == 1


class Rare(Base):
    """A branch that the examples do not take."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.rare = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.wrong = wrong

    def between(self, h: Tensor) -> Any:
        if h.abs().sum() > 1e4:
            return F.linear(h, self.middle.weight) if self.wrong else self.middle(self.rare(h))
        return self.middle(h)


def test_a_branch_that_was_not_taken_is_captured_without_inputs_and_proved_when_it_is() -> None:
    model = Rare()
    net = compiled(model)
    rows = {row.parameters: row for row in net.report.rows}
    assert rows[("rare.0.weight", "rare.0.bias")].uses == 0 and not rows[("rare.0.weight", "rare.0.bias")].generic
    recorder = recorder_of(net)
    assert recorder.checked == {0, 1, 2}
    moments = net.record((1e4 * X,), {})
    assert moments.statistics[("rare.0.weight", "rare.0.bias")]["count"] == 6
    assert recorder.checked == {0, 1, 2, 3}
    assert net.record((X,), {}).statistics[("rare.0.weight", "rare.0.bias")]["count"] == 0


def test_a_parameter_that_python_begins_to_read_is_an_error() -> None:
    net = compiled(Rare(wrong=True))
    with pytest.raises(ModelChangedError) as failure:
        net.record((1e4 * X,), {})
    text = str(failure.value)
    assert text.startswith("on these inputs Rare reads middle.weight outside of its captured submodules, as it did not")
    assert '"middle.weight": "generic"' in text


class Sizes(nn.Module):
    """A submodule that is another graph for long sequences, called with several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Flipping(), nn.Linear(3, 3)

    def forward(self, xs: list[Tensor]) -> Any:
        hs = [self.inner(x) for x in xs]
        return self.head(torch.cat([h for h in hs if h.sum() > -1e9]))


class Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x if x.shape[0] < 5 else x.flip(0))


def test_a_call_that_no_graph_serves_is_captured_when_it_is_met() -> None:
    model = Sizes()
    short, long = [torch.randn(3, 4), torch.randn(2, 4)], [torch.randn(3, 4), torch.randn(7, 4)]
    net = compiled(model, short)
    assert len(recorder_of(net).captured) == 2
    assert net.record((short,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 5
    assert net.record((long,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 10
    (known,) = net.captures.known.values()
    assert [len(one.captured) for one in known] == [3]
    assert net.record((short,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 5


def test_python_that_never_does_the_same_is_refused() -> None:
    class Counting(Sizes):
        sizes = iter(range(2, 1000))

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward([torch.ones(next(Counting.sizes), 4)])

    with pytest.raises(UntraceableError, match=r"Counting (computes something else than its graph|calls inner in)"):
        compiled(Counting())


# --- losses, inputs, fractions --------------------------------------------------------------------------------------


class WithLoss(Branching):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_a_loss_that_python_computes_is_found_with_its_targets() -> None:
    model, y = WithLoss(), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (X, y))
    moments = net.record((X, y), {}, mode="empirical", params_stats=True)
    assert moments.cases == 6
    loss = 6 * model(X, y)["loss"]
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(list(moments.gradients.values()), list(wanted))
    with pytest.raises(LossError, match="no loss is known"):
        kfac_fx.compile(Branching(), (X,)).record((X,), {})


def test_a_part_of_the_batch_is_a_part_of_every_input() -> None:
    net = compiled(Branching())
    assert net.record((X,), {}, fraction=0.5).cases == 3
    net = compiled(Sizes(), [torch.randn(3, 4), torch.randn(2, 4)])
    assert net.record(([torch.randn(3, 4), torch.randn(2, 4)],), {}, fraction=0.5).cases == 3


def test_an_output_without_tensors_has_no_loss() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(Branching):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    net = compiled(Wrapped(), loss=lambda out: kfac_fx.losses.Normal(out.logits))
    with pytest.raises(LossError, match="Wrapped returns no tensor in tuples, lists and dictionaries to build a loss"):
        net.record((X,), {})


def test_a_ride_is_refused_and_says_what_to_do_instead() -> None:
    with pytest.raises(UntraceableError, match="runs Python between its captured submodules(.|\n)*net.record"):
        compiled(Branching()).ride((X,), {})


def test_an_input_that_python_writes_into_is_written_once() -> None:
    class Writes(Branching):
        def forward(self, x: Tensor) -> Any:
            x.add_(1.0)
            return super().forward(x)

    x = torch.randn(6, 4)
    given = x.clone()
    net = compiled(Writes(), given)
    net.record((given,), {})
    assert torch.equal(given, x)


def test_training_and_the_exact_fisher() -> None:
    torch.manual_seed(0)
    model = Repeated()
    net = compiled(model)
    opt = KFAC(net, lr=0.1, damping=0.1, invert_every=2)
    losses = []
    for _ in range(8):
        loss = net(X).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    moments = net.record((X,), {}, mode="exact")
    assert all(sums["G"].isfinite().all() for sums in moments.statistics.values())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of a tap
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
def test_submodules_are_compiled_one_by_one() -> None:
    net = compiled(Repeated(), backend="aot_eager")
    eager = compiled(copy.deepcopy(net.model))
    one, other = (each.record((X,), {}, generator=torch.Generator().manual_seed(3)) for each in (net, eager))
    torch.testing.assert_close(one.statistics, other.statistics)


def test_the_report_says_what_was_captured_and_what_was_left() -> None:
    net = compiled(Repeated())
    line = Repeated.between.__code__.co_firstlineno + 1
    found = net.report.to_dict()
    assert found["submodules"] == [
        {"module": "first", "calls": 1}, {"module": "middle", "calls": 3}, {"module": "last", "calls": 1},
    ]  # fmt: skip
    (left,) = found["python"]
    assert left["module"] == "Repeated"
    assert left["reason"].startswith(f"torch gave up in Repeated (test_divided_models.py:{line})")
    assert [row["uses"] for row in found["registrations"]] == [1, 3, 1]
    assert "captured  3 submodules, one by one: first, middle, last" in str(net.report)
    assert "python    Repeated: torch gave up in" in str(net.report)
    whole = compiled(nn.Linear(4, 3)).report
    assert whole.to_dict()["submodules"] == [] and "captured" not in str(whole)


class Placed(nn.Module):
    """Adds gathered elements of a table, as attention adds relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 3), nn.Parameter(torch.randn(2))
        self.register_buffer("index", torch.tensor([1, 0, 1]))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + self.table[self.index].unsqueeze(0)


def test_a_table_in_a_submodule_is_structured() -> None:
    class Model(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = Placed(), nn.Linear(3, 5)

    net = kfac_fx.compile(Model(), (X,), loss="normal")
    assert {one.parameters: one.layer for one in net.registrations}["first.table",] == "scale_and_shift"
    assert net.report.to_dict()["parameters"]["generic"] == 0
