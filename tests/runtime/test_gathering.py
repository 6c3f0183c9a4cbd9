"""Uses of one weight are summed up together: the same sums as one use after another, from few products."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.approximations import STATISTICS
from kfac_fx.recording import recorder, statistics
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Rows, behind_each_other, in_groups
from tests.tables import pairs
from tests.zoo.recurrent import Last

Sums = dict[tuple[str, ...], dict[str, Tensor]]


class Loop(nn.Module):
    """One layer at every step of a state, and a head that reads it."""

    def __init__(self, steps: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.steps, self.layer, self.head = steps, nn.Linear(4, 4, bias=bias), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = torch.tanh(self.layer(x))
        out: Tensor = self.head(x)
        return out


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every tap sums up its own rows."""
    monkeypatch.setattr(Recorder, "gathered", lambda self, probes: probes)


def recorded(net: CompiledModule, x: Any, targets: Tensor | None, mode: str = "empirical") -> Sums:
    generator = torch.Generator().manual_seed(0)
    return net.record((x,), {}, mode=mode, targets=targets, generator=generator).statistics


def same(found: Sums, wanted: Sums) -> None:
    assert found.keys() == wanted.keys()
    for key, sums in wanted.items():
        assert found[key].keys() == sums.keys()
        for name, value in sums.items():
            assert found[key][name].dtype == value.dtype
            torch.testing.assert_close(found[key][name], value)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of every second moment."""
    rows: list[int] = []
    gram: Callable[[Tensor], Tensor] = statistics.gram

    def counted(tensor: Tensor) -> Tensor:
        rows.append(tensor[..., 0, 0].numel())
        return gram(tensor)

    monkeypatch.setattr(statistics, "gram", counted)
    yield rows


def test_a_recurrent_weight_has_one_product_for_all_its_steps(products: list[int]) -> None:
    net = kfac_fx.compile(Last(nn.LSTM(3, 4, batch_first=True)), (torch.randn(5, 7, 3),), loss="normal")
    products.clear()
    recorded(net, torch.randn(5, 7, 3), None, "gradients")
    assert Counter(products) == {5 * 7: 4, 5: 2}  # A and G of both weights; of the head


@pairs(("bias", [True, False]), ("dtype", [torch.float32, torch.float64, torch.bfloat16]))
def test_sums_are_those_of_dense_rows(bias: bool, dtype: torch.dtype) -> None:
    """Against a loop with autograd that knows nothing of taps."""
    torch.manual_seed(0)
    model = Loop(bias=bias).to(dtype)
    x, y = torch.randn(5, 4, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    found = recorded(kfac_fx.compile(model, (x,), loss="normal"), x, y)
    inputs, outputs, state = [], [], x
    for _ in range(model.steps):
        inputs.append(state)
        outputs.append(model.layer(state))
        state = torch.tanh(outputs[-1])
    kfac_fx.losses.Normal(model.head(state), targets=y).evaluate().backward(inputs=outputs)
    wide = torch.promote_types(dtype, torch.float32)
    r = torch.cat(inputs).detach().to(wide)
    r = torch.cat([r, torch.ones(len(r), 1, dtype=wide)], dim=1) if bias else r
    d = torch.cat([output.grad for output in outputs if output.grad is not None]).to(wide)
    sums = found["layer.weight", "layer.bias"] if bias else found["layer.weight",]
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(sums["A"][0], r.mT @ r, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sums["G"][0], d.mT @ d, rtol=tolerance, atol=tolerance)
    assert sums["count"] == 5 * model.steps


class Padded(nn.Module):
    """A recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out: Tensor = self.head(self.inner(packed)[1][0])
        return out


class Ids(nn.Module):
    """A table that is read in several places, and a layer that reads what is shared by all cases, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.start = nn.Parameter(torch.randn(1, 4))

    def forward(self, ids: Tensor) -> Tensor:
        state = self.layer(self.start)
        for step in range(ids.shape[1]):
            state = torch.tanh(self.layer(state + self.table(ids[:, step])))
        return state


class Lengths(nn.Module):
    """Uses of one layer with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # [N, 6, 4]
        return torch.tanh(self.layer(self.layer(x)[:, ::2])).sum(1) + self.layer(x[:, 0])


class Tied(nn.Module):
    """A weight, its transpose and its double."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(torch.tanh(F.linear(x, self.weight)), 2 * self.weight))
        return F.linear(torch.tanh(F.linear(x, self.weight.t())), self.weight.t())


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))).sum(-1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "packed": (Padded, (torch.randn(5, 4, 3), torch.tensor([5, 2, 3, 1])), {}),
    "ids and shared rows": (Ids, (torch.randint(6, (5, 3)),), {}),
    "different lengths": (Lengths, (torch.randn(5, 6, 4),), {}),
    "transposed": (Tied, (torch.randn(5, 4),), {}),
    "convolutions": (Convolved, (torch.randn(5, 2, 6),), {}),
    "diagonal sides": (Loop, (torch.randn(5, 4),), {"approximations": {"layer": "kron_both_diag"}}),
    "series": (lambda: Last(nn.RNN(3, 4)), (torch.randn(5, 3, 3),), {"approximations": {nn.RNN: "kron_series_1"}}),
    "gradients of cases": (Loop, (torch.randn(5, 4),), {"approximations": {"layer": "diagonal"}}),
    "reduced": (Lengths, (torch.randn(5, 6, 4),), {"approximations": {"layer": "kron_reduce"}}),
    "in blocks": (Loop, (torch.randn(5, 4),), {"dense_limit": 2}),
    "sampled": (Loop, (torch.randn(8, 4),), {"sub_sample_inputs": 0.5}),
    "no cases": (Loop, (torch.randn(5, 4),), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_one_use_after_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, inputs, options = MODELS[name]
    net = kfac_fx.compile(make(), inputs, loss="normal", **options)
    if name == "no cases":
        inputs = (inputs[0][:0],)

    def sums() -> Sums:
        return net.record(inputs, {}, generator=torch.Generator().manual_seed(0)).statistics

    together = [sums()]
    monkeypatch.setattr(recorder, "FEW", 0)
    monkeypatch.setattr(recorder, "TIMES", 0)
    together.append(sums())  # no rows wait, so they are summed up many times
    one_by_one(monkeypatch)
    wanted = sums()
    for of_batch in together:
        same(of_batch, wanted)


def test_rows_of_uses_that_are_not_alike_do_not_wait_behind_each_other() -> None:
    def rows(*sizes: int, dtype: torch.dtype = torch.float32, masked: bool = False) -> Rows:
        n, s = sizes
        mask = torch.ones(n, s, dtype=torch.bool) if masked else None
        return in_groups(torch.randn(n, s, 3, dtype=dtype), torch.randn(n, s, 2, dtype=dtype), True, (1, 2, 4), mask)

    first = rows(5, 2)
    assert recorder.are_alike(first, rows(7, 2))
    others = rows(5, 3), rows(5, 2, dtype=torch.float64), rows(5, 2, masked=True)
    assert not any(recorder.are_alike(first, other) for other in others)
    both = behind_each_other([rows(5, 2, masked=True), rows(7, 2, masked=True)])
    assert both.x.shape == (12, 2, 1, 3) and both.d.shape == (12, 2, 1, 2) and both.mask is not None
    assert both.mask.shape == (12, 2)


def test_a_use_that_the_loss_leaves_out_has_no_rows() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer(2 * x)

    net = kfac_fx.compile(Both(), (torch.randn(5, 4),), loss=lambda outputs: kfac_fx.losses.Normal(outputs[0]))
    assert recorded(net, torch.randn(5, 4), None, "gradients")["layer.weight", "layer.bias"]["count"] == 5


def in_training(net: CompiledModule, x: Tensor) -> tuple[Tensor, Any]:
    outputs, pending = net.record_in_training((x,), {})
    return outputs.square().sum(), pending


def test_rows_that_another_backward_has_left_are_forgotten() -> None:
    """A gradient of the parameters alone reaches the taps and not the probes."""
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Loop(), (torch.randn(5, 4),), loss="normal"), torch.randn(5, 4)
    loss, pending = in_training(net, x)
    torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    loss.backward()
    found = pending.moments("sum").statistics
    loss, pending = in_training(net, x)
    loss.backward()
    same(found, pending.moments("sum").statistics)


def test_nothing_keeps_the_rows_of_a_forward_that_is_given_up() -> None:
    def waiting() -> list[recorder.WaitingRows]:
        return [value for value in gc.get_objects() if type(value) is recorder.WaitingRows]

    net = kfac_fx.compile(Loop(), (torch.randn(5, 4),), loss="normal")
    gc.collect()
    gc.disable()
    try:
        # Tests before this one may have left rows: in a circle, or in a forward that a fixture keeps.
        others = {id(value) for value in waiting()}
        loss, pending = in_training(net, torch.randn(5, 4))
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        held = [weakref.ref(value) for value in waiting() if id(value) not in others]
        assert held and any(value().of_backward for value in held)  # type: ignore[union-attr]
        del loss, pending
        assert not any(value() for value in held)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_compiled_recordings_have_a_sum_for_every_use() -> None:
    """A compiler cannot trace the list."""
    torch.manual_seed(0)
    model, x, y = Loop(3), torch.randn(5, 4), torch.randn(5, 2)
    eager, other = (kfac_fx.compile(model, (x,), loss="normal", backend=backend) for backend in ("eager", "aot_eager"))
    same(recorded(other, x, y), recorded(eager, x, y))
    probes = other.recorder((x,), {}).make_probes((x,), {"": x})
    assert other.recorder((x,), {}).gathered(probes) is probes
    assert eager.recorder((x,), {}).gathered(probes) is not probes


def test_exact_recordings_have_a_sum_for_every_use(products: list[int]) -> None:
    """vmap over several cotangents would need a list for itself."""
    net, x = kfac_fx.compile(Loop(2), (torch.randn(5, 4),), loss="normal"), torch.randn(3, 4)
    products.clear()
    recorded(net, x, None, "exact")
    assert set(products) == {3}


def test_gradients_of_gradients_come_through() -> None:
    torch.manual_seed(0)
    net, x = kfac_fx.compile(Loop(2), (torch.randn(5, 4),), loss="normal"), torch.randn(5, 4)
    weight, seconds = net.model.layer.weight, []
    for outputs in (net.record_in_training((x,), {})[0], net.model(x)):
        (first,) = torch.autograd.grad(outputs.square().sum(), weight, create_graph=True)
        seconds += torch.autograd.grad(first.square().sum(), weight)
    torch.testing.assert_close(*seconds)


class PythonLoop(nn.Module):
    """A submodule that Python calls as often as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3 + int(x.sum() > 1e9)):
            x = self.cell(x)
        out: Tensor = self.head(x)
        return out


def test_calls_of_one_submodule_are_summed_up_together(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x, y = kfac_fx.compile(PythonLoop(), (torch.randn(5, 4),), loss="normal"), torch.randn(5, 4), torch.randn(5, 2)
    assert net.program.submodules
    products.clear()
    together = recorded(net, x, y)
    assert Counter(products) == {15: 2, 5: 2}
    one_by_one(monkeypatch)
    same(together, recorded(net, x, y))


def test_statistics_that_know_cases_uses_or_an_order_do_not_add_up() -> None:
    adding = {name for name, statistic in STATISTICS.items() if recorder.adds_up(statistic)}
    assert adding == {"count", "A", "A_diag", "G", "G_diag", "count/reduced", "A/reduced", "G/reduced"}


def test_a_backward_inside_of_another_one_leaves_its_rows_alone() -> None:
    """The hook of an equilibrium model differentiates a use of the layer of its own."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            if hidden.sum() < torch.inf:  # Python divides the model
                point = torch.tanh(self.middle(hidden))
                if point.requires_grad:
                    other = point.detach().requires_grad_()
                    again = torch.tanh(self.middle(other))
                    point.register_hook(lambda g: g + torch.autograd.grad(again, other, g, retain_graph=True)[0])
                hidden = torch.tanh(self.middle(point))
            return self.head(hidden)

    torch.manual_seed(0)
    model, x, y = Equilibrium().double(), torch.randn(8, 4).double(), torch.randint(3, (8,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    sums = net.record((x,), {}, mode="empirical", targets=y).statistics["middle.weight", "middle.bias"]
    assert float(sums["count"]) == 16.0
    rows: list[Tensor] = []
    hooks = [model.middle.register_full_backward_hook(lambda layer, inputs, outputs: rows.append(outputs[0] * len(x)))]
    F.cross_entropy(model(x), y).backward()
    hooks[0].remove()
    expected = sum(row.T @ row for row in (rows[0], rows[-1]))
    torch.testing.assert_close(sums["G"].squeeze(), expected)


class Recurring(nn.Module):
    """Layers with one use around one with several, each in a submodule that can be captured alone."""

    def __init__(self, python: bool) -> None:
        super().__init__()
        self.python, self.first, self.cell, self.head = python, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3 + (int(x.sum() > 1e9) if self.python else 0)):
            x = torch.tanh(self.cell(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("python", [False, True])
def test_sums_of_several_uses_are_finished_before_the_backward_goes_on_to_earlier_layers(python: bool) -> None:
    """They travel to their owners while it does."""
    net = kfac_fx.compile(Recurring(python), (torch.randn(5, 4),), loss="normal")
    order: list[str] = []

    def on_sum(key: tuple[str, ...], name: str, value: Tensor) -> None:
        order.append(key[0])

    net.record((torch.randn(5, 4),), {}, on_sum=on_sum)
    assert list(dict.fromkeys(order)) == ["head.weight", "cell.weight", "first.weight"]
    assert order == sorted(order, key=["head.weight", "cell.weight", "first.weight"].index)


def test_rows_of_one_use_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may call a submodule several times; the layers that it called once keep no rows."""
    net = kfac_fx.compile(Recurring(python=True), (torch.randn(5, 4),), loss="normal")
    net.record((torch.randn(5, 4),), {})
    left: list[int] = []
    add = recorder.RowsOfBackward.add

    def watched(self: recorder.RowsOfBackward, rows: Rows) -> None:
        add(self, rows)
        left.append(self.numbers)

    monkeypatch.setattr(recorder.RowsOfBackward, "add", watched)
    net.record((torch.randn(5, 4),), {})
    assert left == [0, 40, 80, 120, 0]


def test_a_use_that_is_called_once_has_nothing_to_wait_for() -> None:
    net, x = kfac_fx.compile(nn.Linear(4, 2), (torch.randn(5, 4),), loss="normal"), torch.randn(5, 4)
    probes = net.recorder((x,), {}).make_probes((x,), {"": x})
    (given,), (called_again,) = (recorder.gathered(net.registrations, probes, once) for once in (True, False))
    assert given is probes[0] and recorder.WAITING in called_again


def test_a_first_use_without_a_gradient_loses_no_sums() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                start = self.layer(x)
            return self.layer(torch.tanh(self.layer(start)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x, y = Target().double(), torch.randn(5, 4).double(), torch.randn(5, 4).double()
    sums = recorded(kfac_fx.compile(model, (x,), loss="normal"), x, y)["layer.weight", "layer.bias"]
    outputs = [model.layer(model.layer(x).detach())]
    outputs.append(model.layer(torch.tanh(outputs[0])))
    rows = torch.autograd.grad(kfac_fx.losses.Normal(outputs[1], targets=y).evaluate(), outputs)
    assert sums["count"] == 10
    torch.testing.assert_close(sums["G"][0], sum(row.mT @ row for row in rows))


@pytest.mark.parametrize("function", [recorder.Gather, recorder.HandOver])
def test_a_tap_binds_its_arguments_as_a_function_does(function: Any) -> None:
    signature, arguments = inspect.signature(function.forward), tuple(range(7))
    bound, plain = (of.bind(*arguments) for of in (signature, inspect.Signature(list(signature.parameters.values()))))
    for arguments_of in (bound, plain):
        arguments_of.apply_defaults()
    assert (bound.args, dict(bound.kwargs)) == (plain.args, plain.kwargs)
    with pytest.raises(AssertionError, match="bug in kfac_fx: a tap that is called with arguments by name"):
        signature.bind(*arguments, more=1)
