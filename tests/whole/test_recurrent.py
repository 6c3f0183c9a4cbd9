"""Recurrent modules from compile to factors: what is registered, and that factors are the paper's sums over steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import kfac_fx
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.unroll import CELLS
from kfac_fx.recording import captures
from tests.tables import pairs
from tests.whole.training import apart, step
from tests.zoo.recurrent import Last


def compiled(model: nn.Module, *sizes: int, **options: Any) -> CompiledModule:
    return kfac_fx.compile(model, (torch.randn(sizes),), loss="normal", **options)


def factors(net: CompiledModule, x: Tensor, targets: Tensor) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """The factors of one batch, without decay or damping, for the true targets."""
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(x, targets=targets)
    return {
        key: {name: factor.value for name, factor in block.factors.items()} for key, block in estimator.blocks.items()
    }


def by_hand(model: Last, x: Tensor, targets: Tensor) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """(rows, gradient rows) of every step for both products, from a loop that knows nothing of graphs."""
    inner = model.inner
    cell = CELLS[{"LSTM": "lstm", "GRU": "gru"}.get(inner.mode, "rnn_tanh")]
    state = [x.new_zeros(len(x), inner.hidden_size) for _ in range(2 if inner.mode == "LSTM" else 1)]
    rows: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    products: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    for t in range(x.shape[1]):
        for side, given in (("ih", x[:, t]), ("hh", state[0])):
            weight, bias = (getattr(inner, f"{kind}_{side}_l0") for kind in ("weight", "bias"))
            rows[side].append(torch.cat([given, given.new_ones(len(given), 1)], dim=1).detach())
            products[side].append(F.linear(given, weight, bias))
        state = cell(products["ih"][-1], products["hh"][-1], state)
    loss = kfac_fx.losses.Normal(model.head(state[0]), targets=targets).evaluate()
    grads = torch.autograd.grad(loss, [*products["ih"], *products["hh"]])
    return {
        "ih": (rows["ih"], list(grads[: x.shape[1]])),
        "hh": (rows["hh"], list(grads[x.shape[1] :])),
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_factors_are_means_over_cases_and_steps(kind: Any) -> None:
    """F = T A ⊗ G with A and G over all N T rows; also for a batch and a length that compile never saw."""
    torch.manual_seed(0)
    model = Last(kind(3, 4, batch_first=True))
    net = compiled(model, 5, 4, 3)
    for cases, steps in ((5, 4), (7, 6)):
        x, y = torch.randn(cases, steps, 3), torch.randn(cases, 2)
        found = factors(net, x, y)
        for side, (rows, grads) in by_hand(model, x, y).items():
            r, d = torch.cat(rows), torch.cat(grads)
            block = found[f"inner.weight_{side}_l0", f"inner.bias_{side}_l0"]
            torch.testing.assert_close(block["A"], (r.mT @ r / len(r)).unsqueeze(0))
            torch.testing.assert_close(block["G"], (d.mT @ d / len(d)).unsqueeze(0))
            assert block["positions"].item() == steps


def test_series_have_the_moments_of_consecutive_steps() -> None:
    """A1 = Σ_t r_t+1 r_tᵀ and G1 = Σ_t d_t+1 d_tᵀ over the number of all rows; the steps of an LSTM are their order."""
    torch.manual_seed(0)
    model = Last(nn.LSTM(3, 4, batch_first=True))
    net, x, y = (
        compiled(model, 5, 4, 3, approximations={nn.LSTM: "kron_series_1"}),
        torch.randn(7, 4, 3),
        torch.randn(7, 2),
    )
    found = factors(net, x, y)
    for side, (rows, grads) in by_hand(model, x, y).items():
        block = found[f"inner.weight_{side}_l0", f"inner.bias_{side}_l0"]
        for name, series in (("A1", rows), ("G1", grads)):
            lagged = sum(later.mT @ earlier for earlier, later in zip(series[:-1], series[1:], strict=True))
            torch.testing.assert_close(block[name], (lagged / (7 * 4)).unsqueeze(0))


def test_one_step_of_one_case_is_exact() -> None:
    """A single row makes A ⊗ G the gradient's outer product with itself, the zero state's row included."""
    torch.manual_seed(0)
    model = Last(nn.LSTM(3, 4, batch_first=True)).double()
    x, y = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss="normal"), estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    kfac_fx.losses.Normal(model(x), targets=y).evaluate().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for block in estimator.blocks.values():
        assert block.registration.matrix is not None
        g = block.registration.matrix.pack(gradients).flatten()
        torch.testing.assert_close(block.full_fisher_block(), torch.outer(g, g))


def test_uses_are_in_the_order_in_which_the_steps_are_computed() -> None:
    net = compiled(Last(nn.RNN(3, 4, num_layers=2, bidirectional=True)), 3, 5, 3)
    places = {
        registration.parameters[0]: [use.output.name for use in registration.uses] for registration in net.registrations
    }
    assert places["inner.weight_hh_l0"] == [f"rnn_tanh_l0_t{step}_linear_1" for step in (0, 1, 2)]
    assert places["inner.weight_ih_l1"] == [f"rnn_tanh_l1_t{step}_linear" for step in (0, 1, 2)]
    assert places["inner.weight_hh_l1_reverse"] == [f"rnn_tanh_l1_reverse_t{step}_linear_1" for step in (2, 1, 0)]


@pytest.mark.parametrize("sizes", [(5, 4, 3), (1, 4, 3), (5, 1, 3), (4, 3)])
def test_every_step_counts_whatever_the_batch(sizes: tuple[int, ...]) -> None:
    """One case, one step, no batch at all: the first state is zeros of a fixed size, and its product still a use."""
    model = nn.Sequential(First(nn.LSTM(3, 4, batch_first=True)), nn.Linear(4, 2))
    net = compiled(model, *sizes, strict=True)
    assert [len(registration.uses) for registration in net.registrations] == [sizes[-2], sizes[-2], 1]


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        ({"inner.weight_hh_l0": "diagonal"}, ("kron_indep", "diagonal")),
        ({"inner": "kron_in_diag"}, ("kron_in_diag", "kron_in_diag")),
        ({"inner.*_ih_*": "full"}, ("full", "kron_indep")),
        ({nn.LSTM: "diagonal"}, ("diagonal", "diagonal")),
        ({nn.RNNBase: "diagonal", "inner.weight_hh_l0": "kron"}, ("diagonal", "kron_indep")),
    ],
    ids=str,
)
def test_approximations_are_asked_for_as_of_any_module(asked: Any, blocks: tuple[str, str]) -> None:
    net = compiled(Last(nn.LSTM(3, 4, batch_first=True)), 5, 4, 3, approximations=asked)
    assert tuple(registration.approximation for registration in net.registrations)[:2] == blocks


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])  # torch's LSTM has no bfloat16 under autocast on every processor
def test_under_autocast_the_graph_is_the_model_up_to_the_rounding_of_bfloat16(kind: Any) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net = compiled(Last(kind(3, 4, batch_first=True)), 5, 4, 3, strict=True)
        net.record((torch.randn(5, 4, 3),), {})
    assert [len(registration.uses) for registration in net.registrations] == [4, 4, 1]


def test_a_recurrent_layer_may_be_generic() -> None:
    net = compiled(Last(nn.GRU(3, 4, batch_first=True)), 5, 4, 3, approximations={"inner": "generic"})
    assert [registration.parameters for registration in net.registrations if registration.generic] == [
        ("inner.weight_ih_l0",), ("inner.weight_hh_l0",), ("inner.bias_ih_l0",), ("inner.bias_hh_l0",),
    ]  # fmt: skip


def test_captures_of_many_lengths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_CAPTURES", 2)
    net = compiled(Last(nn.RNN(3, 4, batch_first=True)), 5, 2, 3)
    for steps in (3, 2, 4, 2):  # 2 is used again before 3 would go
        net.record((torch.randn(5, steps, 3),), {})
    (kept,) = net.captures.recorders.values()
    assert [len(recorder.program.registrations[0].uses) for recorder in kept] == [4, 2]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_are_registered() -> None:
    net = compiled(Last(nn.LSTM(3, 4, proj_size=2, num_layers=2)), 4, 5, 3, strict=True)
    uses = {registration.parameters: len(registration.uses) for registration in net.registrations}
    assert uses["inner.weight_hr_l0",] == uses["inner.weight_hr_l1",] == 4


def test_kfac_trains_on_sequences_of_several_lengths() -> None:
    """The sum of a sequence of signs, from 3 to 5 steps: guessing costs their number, 4 in the mean."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Last(nn.LSTM(1, 8, batch_first=True)), (torch.randn(16, 4, 1),), loss="mse")
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    losses = []
    for batch in range(40):
        x = torch.randn(64, 3 + batch % 3, 1).sign()
        loss = F.mse_loss(net(x), x.sum(1).expand(-1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-6:]) / 6 < 2


# --- packed sequences -----------------------------------------------------------------------------------------------

LENGTHS = torch.tensor([2, 6, 1, 4, 6])


class Packed(Last):
    """The last output within each sequence's length, or all of them: padded, or still packed."""

    def __init__(self, inner: nn.RNNBase, returns: str = "last", enforce_sorted: bool = False) -> None:
        super().__init__(inner)
        self.returns, self.enforce_sorted = returns, enforce_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, self.inner.batch_first, self.enforce_sorted)
        y, last = self.inner(packed)
        if self.returns == "last":
            last = last[0] if isinstance(last, tuple) else last
            last = last.unflatten(0, (self.inner.num_layers, -1))[-1]
            y = last.transpose(0, 1).flatten(1)
        elif self.returns == "packed":
            y = torch.relu(y.data)
        else:
            total = x.shape[1] if self.returns == "total" else None
            y, _ = pad_packed_sequence(y, True, padding_value=0.25, total_length=total)
        out: Tensor = self.head(y)
        return out


def packed(model: Packed, lengths: Tensor = LENGTHS, **options: Any) -> CompiledModule:
    return kfac_fx.compile(model, (torch.randn(len(lengths), 6, 3), lengths), loss="normal", strict=True, **options)


@pytest.mark.parametrize(
    ("kind", "returns"), [(nn.LSTM, "last"), (nn.GRU, "padded"), (nn.RNN, "total"), (nn.LSTM, "packed")]
)
def test_packed_sequences_are_captured_exactly(kind: Any, returns: str) -> None:
    """Outputs, gradients and random numbers are torch's, dropout on the packed data included; the check of equivalence
    and the proof run on the first batch, and here on another one."""
    net = packed(Packed(kind(3, 4, num_layers=2, bidirectional=True, dropout=0.4, batch_first=True), returns))
    twin, x = copy.deepcopy(net.model), torch.randn(3, 6, 3)
    lengths = torch.tensor([3, 6, 5])
    theirs = step(twin, lambda: twin(x, lengths))
    assert apart(theirs, step(net.model, lambda: net.record_in_training((x, lengths), {})[0])) == []
    assert len(net.captures.recorders) == 1


def test_padding_does_not_count_as_rows() -> None:
    """The factors of a packed batch are those of its sequences one by one."""
    torch.manual_seed(0)
    model = Packed(nn.LSTM(3, 4, batch_first=True))
    net, x, y = packed(model), torch.randn(5, 6, 3), torch.randn(5, 2)
    x[LENGTHS[:, None] <= torch.arange(6)] = 100.0  # whatever it is
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(x, LENGTHS, targets=y)
    rows: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    grads: dict[str, list[Tensor]] = {"ih": [], "hh": []}
    for n, length in enumerate(LENGTHS.tolist()):
        for side, (r, d) in by_hand(model, x[n : n + 1, :length], y[n : n + 1]).items():
            rows[side] += r
            grads[side] += d
    for side in ("ih", "hh"):
        r, d = torch.cat(rows[side]), torch.cat(grads[side])
        block = estimator.blocks[f"inner.weight_{side}_l0", f"inner.bias_{side}_l0"].factors
        torch.testing.assert_close(block["A"].value, (r.mT @ r / len(r)).unsqueeze(0))
        torch.testing.assert_close(block["G"].value, (d.mT @ d / len(d)).unsqueeze(0))
        assert block["positions"].value.item() == pytest.approx(LENGTHS.sum().item() / 5)


def test_gradients_of_packed_cases_are_those_of_the_dense_fisher() -> None:
    torch.manual_seed(0)
    model = Packed(nn.GRU(3, 4, batch_first=True)).double()
    x, y = torch.randn(5, 6, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    asked = {"*": "full", "inner.weight_hh_l0": "diagonal"}
    net = kfac_fx.compile(model, (x, LENGTHS), loss="normal", approximations=asked)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(x, LENGTHS, targets=y)
    for block in estimator.blocks.values():
        assert block.registration.matrix is not None
        gradients = []
        for n in range(5):
            model.zero_grad()
            output = model(x[n : n + 1], LENGTHS[n : n + 1])
            kfac_fx.losses.Normal(output, targets=y[n : n + 1]).evaluate().backward()
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            gradients.append(block.registration.matrix.pack(own).flatten())
        dense = torch.stack(gradients).mT @ torch.stack(gradients) / 5
        found = block.full_fisher_block()
        full = block.registration.approximation == "full"
        torch.testing.assert_close(found, dense if full else dense.diagonal().diag())


def test_a_longest_sequence_of_another_length_is_another_capture() -> None:
    """The steps and the padding of the output are as many as the longest sequence has."""
    net = packed(Packed(nn.RNN(3, 4, batch_first=True), "padded"))
    x, lengths = torch.randn(5, 6, 3), LENGTHS.clamp(max=4)
    net.record((x, lengths), {})
    (kept,) = net.captures.recorders.values()
    assert [len(recorder.program.registrations[0].uses) for recorder in kept] == [6, 4]


def test_outputs_may_be_padded_beyond_the_longest_sequence() -> None:
    net = packed(Packed(nn.GRU(3, 4, batch_first=True), "total"), LENGTHS.clamp(max=4))
    x = torch.randn(5, 6, 3)
    outputs, _ = net.record_in_training((x, LENGTHS.clamp(max=4)), {})
    torch.testing.assert_close(outputs, net.model(x, LENGTHS.clamp(max=4)))
    assert outputs.shape[1] == 6 and len(net.registrations[0].uses) == 4


def test_sorted_sequences_need_no_sorting() -> None:
    net = packed(Packed(nn.LSTM(3, 4, batch_first=True), "padded", enforce_sorted=True), LENGTHS.sort().values.flip(0))
    assert [len(registration.uses) for registration in net.registrations] == [6, 6, 1]


def test_packed_sequences_among_the_arguments_are_told_by_name() -> None:
    class Given(Last):
        def forward(self, x: Any) -> Tensor:
            return self.head(self.inner(x["x"][0])[1][-1])

    sequence = pack_padded_sequence(torch.randn(5, 6, 3), LENGTHS, True, False)
    net = kfac_fx.compile(Given(nn.RNN(3, 4)), ({"x": [sequence]},), loss="normal")
    report = " ".join(str(net.report).split())
    assert "Given: it takes a PackedSequence. The number of its sequences is data, which no captured graph" in report
    assert [registration.generic for registration in net.registrations] == [False, True, True, True, True]


def test_cudnn_is_off_while_the_graph_is_compared_with_the_model() -> None:
    """It draws dropout from a stream of its own and rounds to TF32, which no graph could repeat."""
    seen: list[bool] = []

    class Watched(Last):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.enabled)
            return super().forward(x)

    assert torch.backends.cudnn.enabled
    net = compiled(Watched(nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True)), 5, 4, 3)
    assert seen[-1] is False and torch.backends.cudnn.enabled
    net(torch.randn(5, 4, 3))
    assert seen[-1] is True


class Distilled(nn.Module):
    """A student of a recurrent teacher, which runs without gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.teacher: Any = getattr(nn, kind)(3, 5)
        self.student, self.kind = nn.Linear(3, 5), kind

    def hidden(self, x: Tensor) -> Tensor:
        if self.kind == "LSTMCell":
            return self.teacher(x[0])[0]  # type: ignore[no-any-return]
        if self.kind == "GRU":
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 3]), enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.teacher(packed)[0])[0].sum(0)
        return self.teacher(x)[0][-1]  # type: ignore[no-any-return]

    def forward(self, x: Tensor, autocast: bool = False) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            taught = self.hidden(x)
        return self.student(x).sum(0) + taught  # type: ignore[no-any-return]


@pairs(("autocast", [False, True]), ("kind", ["LSTM", "GRU", "LSTMCell"]))
def test_a_recurrent_layer_that_runs_without_gradients_is_computed(kind: str, autocast: bool) -> None:
    """torch.export keeps such a region as a graph of its own, in which nothing was written out."""
    torch.manual_seed(0)
    model, x = Distilled(kind), torch.randn(4, 3, 3)
    net = kfac_fx.compile(model, (x, autocast), loss=lambda outputs: kfac_fx.losses.Normal(outputs))
    outputs, _ = net.functional({}, (x, autocast), {})
    torch.testing.assert_close(outputs, model(x, autocast))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    net(x, autocast).square().sum(1).mean().backward()
    optimizer.step()
    assert net.record((x, autocast), {}, mode="exact").statistics["student.weight", "student.bias"]["A"].any()
