"""Series from a model to a block: what links record, in every way that uses are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ApproximationError, FisherEstimator, ModelChangedError, RegistrationError
from tests.runtime.fisher_cases import sequence_statistics
from tests.runtime.series_models import Cell, H, I, N, O, T, by_hand, empirical, normal, same_fisher

KEY = ("cell.weight", "cell.bias")
pytestmark = pytest.mark.usefixtures("float64")


def compiled(approximation: str) -> tuple[kfac_fx.CompiledModule, Tensor]:
    x = torch.randn(N, T, I)
    return kfac_fx.compile(Cell(), (x,), loss=normal, approximations={"cell": approximation}), x


@pytest.mark.parametrize("all_outputs", [False, True])
def test_links_record_what_neighbors_have_in_common(all_outputs: bool) -> None:
    model, x = Cell(all_outputs=all_outputs), torch.randn(N, T, I)
    y = torch.randn(N, T, O) if all_outputs else torch.randn(N, O)
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={"cell": "kron_series_1"})
    moments = net.record((x,), {}, mode="empirical", targets=y)
    expected = by_hand(model, x, y)
    found = moments.statistics[KEY]
    assert set(found) == {"count", "A", "G", "A1", "G1", "pairs"} == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.to(found[name].dtype).view(found[name].shape))


@pytest.mark.parametrize("approximation", ["kron_series_2"])
def test_recorded_in_chunks_of_sources_it_is_the_same_block(approximation: str) -> None:
    """The exact Fisher sends all coordinates of the outputs back, by vmap; summed over them by hand."""
    model, x = Cell(), torch.randn(N, T, I)
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={"cell": approximation})
    found = net.record((x,), {}, mode="exact").statistics[KEY]
    for name in ("G", "G1"):
        each = [by_hand(model, x, model(x).detach() - torch.eye(O)[k])[name] for k in range(O)]
        torch.testing.assert_close(found[name], torch.stack(each).sum(0))
    for name in ("A", "A1", "count", "pairs"):
        torch.testing.assert_close(found[name], by_hand(model, x, model(x).detach())[name].view(found[name].shape))


def test_parts_of_a_batch_add_up() -> None:
    net, x = compiled("kron_series_2")
    whole, parts = (FisherEstimator(net, estimation_mode="empirical") for _ in range(2))
    y = torch.randn(N, O)
    whole.update_covariances(x, targets=y)
    for part in (slice(0, 2), slice(2, N)):
        parts.accumulate(net.record((x[part],), {}, mode="empirical", targets=y[part]))
    parts.fold()
    same_fisher(whole, parts)


def test_a_ride_on_the_training_backward_records_the_same() -> None:
    net, x = compiled("kron_series_1")
    y = torch.randn(N, O)
    output, pending = net.record_in_training((x,), {})
    (0.5 * (output - y) ** 2).sum(1).mean().backward()
    found, wanted = pending.moments().statistics[KEY], net.record((x,), {}, mode="empirical", targets=y).statistics[KEY]
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_uses_without_a_way_from_one_to_the_next_are_a_series_too() -> None:
    """The steps of a sequence that a weight is applied to, each by itself: nothing but the link orders them."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(I, O, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return sum((t + 1.0) * self.fc(x[:, t]) for t in range(T))  # type: ignore[return-value]

    model, x, y = Steps(), torch.randn(N, T, I), torch.randn(N, O)
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={"fc": "kron_series_1"})
    d = torch.stack([(t + 1) * (model(x).detach() - y) for t in range(T)])
    expected = sequence_statistics(x.movedim(1, 0)[:, :, None, None], d[:, :, None, None], False, (1, O, I))
    found = net.record((x,), {}, mode="empirical", targets=y).statistics[("fc.weight",)]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.view(found[name].shape))


# --- what is no series ------------------------------------------------------------------------------------------------


def reason_of(model: nn.Module, x: Tensor, key: Any, **options: Any) -> tuple[str, str]:
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={key: "kron_series_1"}, **options)
    one = next(registration for registration in net.registrations if registration.parameters[0].startswith("fc"))
    return one.approximation, one.reason or ""


class Dense(nn.Module):
    def __init__(self, forward: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(I, I, bias=False), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc, x)


@pytest.mark.parametrize(
    ("forward", "approximation", "reason"),
    [
        (lambda fc, x: fc(x[:, 0]), "kron", "it has one use, so not 'kron_series_1'"),
        (lambda fc, x: F.linear(fc(x[:, 0]), fc.weight.t()), "kron_indep", "is transposed, so not"),
        (lambda fc, x: fc(x).sum(1) + fc(x[:, 0]), "kron_indep", "are not alike, so not"),
    ],
)
def test_uses_that_are_no_series_get_another_block_and_a_reason(
    forward: Callable[[nn.Linear, Tensor], Tensor], approximation: str, reason: str
) -> None:
    chosen, why = reason_of(Dense(forward), torch.randn(N, T, I), "fc")
    assert chosen == approximation and reason in why


@pytest.mark.parametrize("second", [lambda w, v: torch.cat([v, w]), lambda w, v: torch.cat([2 * w, v])])
def test_uses_of_a_part_in_other_places_or_multiples_are_no_series(second: Callable[..., Tensor]) -> None:
    """The rows of one use are made as those of the next one."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.more = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(F.linear(x, torch.cat([self.fc, self.more])))
            return F.linear(h, second(self.fc, self.more))

    chosen, why = reason_of(Joined(), torch.randn(N, 4), "fc")
    assert chosen == "kron_indep" and "are not alike, so not" in why


def test_rows_that_differ_at_run_time_are_seen_by_the_proof() -> None:
    """torch.fx knows no sizes."""
    model = Dense(lambda fc, x: fc(x[:, :2]).sum(1) + fc(x).sum(1))
    net = kfac_fx.compile(model, loss=normal, approximations={"fc": "kron_series_1"})
    assert net.registrations[0].approximation == "kron_series_1"
    net(torch.randn(N, T, I))
    (one,) = net.registrations
    assert one.approximation == "kron_indep"
    assert one.reason == "its uses have different numbers of rows, so not 'kron_series_1'"
    unproven = kfac_fx.compile(model, loss=normal, approximations={"fc": "kron_series_1"}, verify=False)
    with pytest.raises(RegistrationError, match=r"linear\(fc.weight\) at .* has an output of shape \[6, 4, 3\]"):
        unproven.record((torch.randn(N, T, I),), {})


def test_an_embedding_has_no_series() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ApproximationError, match="embedding has no 'kron_series_1', but"):
        kfac_fx.compile(model, (torch.zeros(4, 2, dtype=torch.long),), approximations={"0": "kron_series_1"})


def test_ids_of_a_layer_of_ones_own_are_no_series() -> None:
    def taken(table: Tensor, ids: Tensor) -> Tensor:
        return torch.take_along_dim(table, ids, 0)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return taken(self.fc, x[:, :1]) + taken(self.fc, x[:, 1:])

    @kfac_fx.layer(
        rows=lambda ids, attrs: ids,
        grad_rows=lambda d, attrs: d.unsqueeze(1),
        layouts={"weight": "i o -> o i"},
        example=lambda: (Table(), torch.zeros(4, 2, dtype=torch.long)),
    )
    def look_up(ids: Tensor, *, weight: Tensor) -> Tensor:
        return taken(weight, ids)

    x = torch.randint(5, (4, 2))
    options = {"layers": [look_up], "loss": normal, "approximations": {"look_up": "kron_series_1"}}
    net = kfac_fx.compile(Table(), (x,), **options)
    assert net.registrations[0].reason == "its rows are ids, so not 'kron_series_1'"
    with pytest.raises(RegistrationError, match=r"look_up\(fc\) at .* has ids as rows, which have no series"):
        kfac_fx.compile(Table(), (x,), verify=False, **options).record((x,), {})


class Loop(Cell):
    """As long as its input."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps = x.shape[1]
        return super().forward(x)


def test_batches_of_other_lengths_are_averaged() -> None:
    """T is the mean length of all sequences."""
    model, x, y = Loop(), torch.randn(N, T, I), torch.randn(N, O)
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={"cell": "kron_series_1"})
    est = FisherEstimator(net, estimation_mode="empirical", damping=0.1)
    for part in (x, x[:, :2]):
        est.update_covariances(part, targets=y, should_decay=False)
    sums = [by_hand(model, part, y) for part in (x, x[:, :2])]
    factors = est.blocks[KEY].factors
    for name in ("A", "A1", "G", "G1"):
        means = [total[name] / total["count"] for total in sums]
        torch.testing.assert_close(factors[name].value, (means[0] + means[1]) / 2)
    assert factors["positions"].value == 3 and factors["pairs"].value == 2
    assert est.blocks[KEY].group.steps().tolist() == [3]


def test_series_longer_than_prepared_for_are_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.passes.approximations.LONGEST", 4)
    net = kfac_fx.compile(Loop(), (torch.randn(N, 3, I),), loss=normal, approximations={"cell": "kron_series_1"})
    net.record((torch.randn(N, 4, I),), {})
    text = "with 3 uses at first, linear with 5 uses here; kron_series_1 is prepared for 4 at most"
    with pytest.raises(ModelChangedError, match=text):
        net.record((torch.randn(N, 5, I),), {})


def test_padding_has_no_neighbors() -> None:
    """Packed sequences of different lengths: pairs of rows of one sequence, and nothing of its padding."""
    torch.manual_seed(0)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(I, H, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, h = self.rnn(packed)
            return h[0]  # type: ignore[no-any-return]

    model, lengths = Packed(), torch.tensor([4, 2, 3, 4, 1, 2])
    x, y = torch.randn(N, T, I), torch.randn(N, H)
    net = kfac_fx.compile(model, (x, lengths), loss=normal, approximations={"rnn": "kron_series_2"})
    found = net.record((x, lengths), {}, mode="empirical", targets=y).statistics
    w_x, w_h, b_x, b_h = (p.detach() for p in model.rnn.parameters())
    sums: dict[str, dict[str, Tensor]] = {}
    for case, length in enumerate(lengths):
        h, rows, outputs = torch.zeros(1, H), [], []
        for t in range(int(length)):
            inputs = x[case, t][None]
            z = (inputs @ w_x.t() + b_x + h @ w_h.t() + b_h).requires_grad_()
            rows.append((inputs, h))
            outputs.append(z)
            h = torch.tanh(z)
        grads = torch.autograd.grad((0.5 * (h - y[case]) ** 2).sum(), outputs)
        d = torch.stack(grads).view(-1, 1, 1, 1, H)
        for n, (key, size) in enumerate((("rnn.weight_ih_l0", I), ("rnn.weight_hh_l0", H))):
            one = torch.stack([row[n].detach() for row in rows]).view(-1, 1, 1, 1, size)
            for name, value in sequence_statistics(one, d, True, (1, H, size + 1)).items():
                sums.setdefault(key, {})
                sums[key][name] = sums[key].get(name, 0) + value
    for key, wanted in sums.items():
        mine = next(statistic for names, statistic in found.items() if names[0] == key)
        for name, value in wanted.items():
            torch.testing.assert_close(mine[name], value.view(mine[name].shape))


# --- a training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("approximation", "options"),
    [("kron_series_1", {"adapt_damping": True, "momentum_type": "regular"}), ("kron_series_2", {})],
)
def test_a_recurrent_network_trains_with_it(approximation: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, _ = compiled(approximation)
    x = torch.randn(32, T, I)
    y = Cell()(x).detach()
    opt = kfac_fx.KFAC(net, lr=0.3, damping=0.1, cov_update_every=1, invert_every=1, **options)

    def closure() -> Tensor:
        loss: Tensor = 0.5 * (net(x) - y).square().sum(1).mean()
        return loss

    first = closure().item()
    for _ in range(15):
        loss = closure()
        loss.backward()
        opt.step(evaluate=closure) if options else opt.step()
        opt.zero_grad()
    assert closure().item() < 0.5 * first


def test_a_state_continues_bit_for_bit() -> None:
    net, x = compiled("kron_series_2")
    est, other = (FisherEstimator(net, damping=0.1, compute_cholesky=True, seed=3) for _ in range(2))
    for _ in range(2):
        est.update_covariances(x)
    est.update_inverses()
    other.load_state_dict({name: tensor.clone() for name, tensor in est.state_dict().items()})
    v = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    for method in ("multiply", "multiply_inverse", "multiply_cholesky"):
        mine, its = getattr(est, method)(v), getattr(other, method)(v)
        assert all(torch.equal(mine[name], its[name]) for name in v)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.slow
@pytest.mark.parametrize("approximation", ["kron_series_1_abs", "kron_series_2"])
def test_compiled_as_eager(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording and products, without a graph break."""
    monkeypatch.setattr("kfac_fx.passes.approximations.LONGEST", 2)  # for shorter graphs of products
    model, x, y = Cell(steps=2), torch.randn(N, 2, I), torch.randn(N, O)
    nets = [
        kfac_fx.compile(model, (x,), loss=normal, approximations={"cell": approximation}, backend=backend)
        for backend in ("eager", "aot_eager")
    ]
    eager, other = (empirical(net, x, targets=y) for net in nets)
    for est in (eager, other):
        est.update_inverses()
    same_fisher(eager, other)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for method in ("multiply", "multiply_inverse"):
        product = torch.compile(getattr(other, method), fullgraph=True, backend="aot_eager")
        for tensor, wanted in zip(product(v).values(), getattr(eager, method)(v).values(), strict=True):
            torch.testing.assert_close(tensor, wanted)
