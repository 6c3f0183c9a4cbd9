"""Models that no single graph holds: their submodules are captured one by one, and what they record is still right."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, RegistrationError, UntraceableError
from kfac_fx.passes.pipeline import CAPTURED, SUBMODULES
from tests.compiler.untouched import run_untouched
from tests.whole.divided import (
    MODELS,
    Base,
    Branching,
    Build,
    Repeated,
    Written,
    X,
    compiled,
    submodules_of,
)
from tests.whole.training import differences, step


@pytest.mark.parametrize("build", MODELS)
def test_training_with_recordings_is_the_model_bit_for_bit(build: Build) -> None:
    model = build()
    twin = copy.deepcopy(model)
    net = compiled(model)
    submodules_of(net)
    assert [registration.reason for registration in net.registrations if registration.generic] == []
    assert {name for registration in net.registrations for name in registration.parameters} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for _ in range(2):
        net.record((X,), {})
        assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []
    assert model.__dict__.keys() == twin.__dict__.keys()


@pytest.mark.parametrize("build", MODELS)
def test_no_pass_writes_into_the_graph_that_it_is_given(build: Build) -> None:
    division = submodules_of(compiled(build())).division
    for submodule in division.captured:
        run_untouched(submodule.capture.program, CAPTURED)
    program = run_untouched(division.program, SUBMODULES)
    assert [registration.reason for registration in program.registrations if registration.generic] == []


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
    assert graph.captures.first.whole
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
    (one,) = (registration for registration in net.registrations if registration.parameters[0] == "middle.weight")
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
    uses = {
        registration.parameters: (len(registration.uses), registration.layer, registration.generic)
        for registration in net.registrations
    }
    assert uses == {("embed.weight",): (2, "embedding", False), ("inner.weight", "inner.bias"): (1, "linear", False)}
    assert net.record((ids,), {}).statistics[("embed.weight",)]["count"] == 30


class Reads(Base):
    """Python that reads parameters of captured submodules, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.spare = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def between(self, h: Tensor) -> Any:
        h = self.middle(h) if h.sum() > -1e9 else h
        return h @ F.dropout(self.middle.weight, 0.1) * F.dropout(self.scale, 0.1)


def test_what_python_reads_is_generic_with_the_place() -> None:
    net = compiled(Reads())
    line = Reads.between.__code__.co_firstlineno + 2
    read = f"read at test_divided_models.py:{line}, in Python that is not captured"
    assert {
        registration.parameters: registration.reason for registration in net.registrations if registration.generic
    } == {
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


def test_training_and_the_exact_fisher() -> None:
    torch.manual_seed(0)
    model = Repeated()
    net = compiled(model, loss="mse")
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
    one, other = (model.record((X,), {}, generator=torch.Generator().manual_seed(3)) for model in (net, eager))
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
    assert left["reason"].startswith(f"torch gave up in Repeated (divided.py:{line})")
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
    assert {registration.parameters: registration.layer for registration in net.registrations}[
        "first.table",
    ] == "scale_and_shift"
    assert net.report.to_dict()["parameters"]["generic"] == 0


class Coin(nn.Module):
    """A branch on a random number in a module that holds all the parameters there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if torch.rand(()) > 0.3 else 2 * y


def test_where_nothing_can_be_captured_the_error_says_what_is_left() -> None:
    with pytest.raises(UntraceableError, match=r"Replace what(.|\n)*approximations=\{\"\*\": \"generic\"\}\)\."):
        compiled(Coin())


def test_a_model_whose_parameters_are_generic_by_request_needs_no_graph() -> None:
    model = Coin()
    twin = copy.deepcopy(model)
    net = compiled(model, X, approximations={"*": "generic"})
    (one,) = net.registrations
    assert one.generic and one.reason is not None and "weight is read at test_divided_models.py" in one.reason
    for _ in range(4):
        found = net.record((X,), {}).statistics[one.parameters]["gradient"]
        assert found.shape == (12,) and found.any()
        assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []


# --- modules under two names ------------------------------------------------------------------------------------------


class Around(nn.Module):
    """Calls a network that its model holds, too; or returns what a hook has seen of it."""

    def __init__(self, net: nn.Sequential, hook: bool = False) -> None:
        super().__init__()
        self.net, self.hook = net, hook
        if hook:
            net[1].register_forward_hook(self.see)

    def see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen = output

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return self.seen if self.hook else y


class TwoNames(nn.Module):
    """kind: how the network under two names is called. before: whether the model's own name of it comes first."""

    def __init__(self, kind: str, before: bool) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        if before:
            self.net = net
        self.encoder, self.kind = Around(net, kind == "hook"), kind
        if kind == "apart":
            self.other = Around(net)
        if not before and kind != "apart":
            self.net = net
        self.head = nn.Linear(6 if kind == "hook" else 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = 2 * x
        if self.kind == "apart":
            return cast(Tensor, self.head(self.encoder.net(x)))
        y = self.head(self.encoder(x))
        return cast(Tensor, y + self.net(x) if self.kind == "both" else y)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["inside", "hook", "both", "apart"])
def test_a_network_under_two_names_is_captured_once_and_keeps_its_parameters(kind: str, before: bool) -> None:
    torch.manual_seed(0)
    model, x, y = TwoNames(kind, before), torch.randn(8, 4), torch.randn(8, 3)
    parameters = dict(model.named_parameters())
    net = kfac_fx.compile(model, (x,), loss="mse")
    used = {name for registration in net.program.registrations if registration.uses for name in registration.owners}
    assert used == parameters.keys()
    optimizer, losses = kfac_fx.KFAC(net), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
