"""Series from a model to a block: what links record, in every way that uses are written or registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ApproximationError, FisherEstimator, ModelChangedError, RegistrationError
from kfac_fx.fisher_blocks import FullyConnectedSeriesFB
from tests.runtime.collections_of_toys import collection
from tests.runtime.fisher_cases import sequence_statistics

T, N, I, H, O = 4, 6, 3, 2, 2  # noqa: E741
KEY = ("cell.weight", "cell.bias")


class Cell(nn.Module):
    """A recurrent network written as a loop, which hands out the inputs and outputs of every use if asked."""

    def __init__(self, steps: int = T, all_outputs: bool = False) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(I + H, H), nn.Linear(H, O)
        self.steps, self.all_outputs = steps, all_outputs
        self.seen: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h, hs = x.new_zeros(x.shape[0], H), []
        for t in range(self.steps):
            row = torch.cat([x[:, t], h], dim=1)
            y = self.cell(row)
            if self.seen is not None:
                y.retain_grad()
                self.seen.append((row, y))
            h = torch.tanh(y)
            hs.append(self.out(h))
        return torch.stack(hs, dim=1) if self.all_outputs else hs[-1]


def by_hand(model: Cell, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The statistics of the cell, from the gradients of the loss summed over cases at the outputs of all uses."""
    model.seen = []
    (0.5 * (model(x) - y) ** 2).sum().backward()
    rows, grads = (torch.stack(one) for one in zip(*[(r.detach(), o.grad) for r, o in model.seen], strict=True))
    model.seen = None
    return sequence_statistics(rows[:, :, None, None], grads[:, :, None, None], True, (1, H, I + H + 1))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def normal(output: Tensor) -> kfac_fx.losses.Normal:
    return kfac_fx.losses.Normal(output, var=1.0)


def compiled(approximation: str) -> tuple[kfac_fx.CompiledModule, Tensor]:
    x = torch.randn(N, T, I)
    return kfac_fx.compile(Cell(), (x,), loss=normal, approximations={"cell": approximation}), x


def same_fisher(one: FisherEstimator, other: FisherEstimator) -> None:
    for mine, its in zip(one.blocks.values(), other.blocks.values(), strict=True):
        torch.testing.assert_close(mine.full_fisher_block(), its.full_fisher_block())


def empirical(net: Any, *inputs: Tensor, targets: Any) -> FisherEstimator:
    est = FisherEstimator(net, estimation_mode="empirical", damping=0.1)
    est.update_covariances(*inputs, targets=targets)
    return est


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
    output, ride = net.ride((x,), {})
    (0.5 * (output - y) ** 2).sum(1).mean().backward()
    found, wanted = ride.moments().statistics[KEY], net.record((x,), {}, mode="empirical", targets=y).statistics[KEY]
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


# --- a layer collection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approximation", ["kron_series_1"])
def test_uses_in_a_list_folded_and_unfolded_are_the_same_series(approximation: str) -> None:
    x, y = torch.randn(3, 5, 2), torch.randn(5, 4)
    listed = collection(lambda x, w: torch.tanh(x[0] @ w) + 2 * (x[1] @ w) + x[2] @ w, x, w=(2, 4))
    listed.register_fully_connected_multi("w", None, ["matmul", "matmul_1", "matmul_2"], approx=approximation)

    def summed_up(h: Tensor) -> Tensor:
        return torch.tanh(h[0]) + 2 * h[1] + h[2]

    folded = collection(lambda x, w: summed_up((x.reshape(-1, 2) @ w).reshape(3, -1, 4)), x, w=(2, 4))
    unfolded = collection(lambda x, w: summed_up(x @ w), x, w=(2, 4))
    batch_first = collection(lambda x, w: summed_up((x.movedim(1, 0) @ w).movedim(1, 0)), x, w=(2, 4))
    for lc in (folded, unfolded, batch_first):
        block = lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx=approximation)
        assert type(block) is FullyConnectedSeriesFB and block.registration.steps == 3
    found = []
    for lc in (listed, folded, unfolded, batch_first):
        lc.register_normal_predictive_distribution(next(n for n in reversed(lc.graph.nodes) if n.op == "call_function"))
        lc.model.load_state_dict(listed.model.state_dict())
        found.append(empirical(lc, x, targets=y))
    for other in found[1:]:
        same_fisher(found[0], other)
        for name in ("A1", "G1", "positions"):
            factors = [est.blocks[("w",)].factors[name].value for est in (found[0], other)]
            torch.testing.assert_close(*factors)


@pytest.mark.parametrize("approximation", ["kron_series_2"])
def test_towers_are_series_of_their_own(approximation: str) -> None:
    """Two mini-batches of one graph are the whole batch: no step of one follows a step of the other."""
    x, y = torch.randn(6, 2, 2, 3), torch.randn(6, 2, 4)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x[:, 0] @ w) + 3 * (x[:, 1] @ w)

    split = collection(lambda x, w: (run(x[:, 0], w), run(x[:, 1], w)), x, w=(3, 4))
    for tower, nodes in enumerate((["matmul", "matmul_1"], ["matmul_2", "matmul_3"])):
        split.register_fully_connected_multi("w", None, nodes, approx=approximation, reuse=tower > 0)
        split.register_normal_predictive_distribution(("add", "add_1")[tower], name="loss", reuse=tower > 0)
    whole = collection(run, x.flatten(0, 1), w=(3, 4))
    whole.register_fully_connected_multi("w", None, ["matmul", "matmul_1"], approx=approximation)
    whole.register_normal_predictive_distribution("add")
    whole.model.load_state_dict(split.model.state_dict())
    one = empirical(split, x, targets=(y[:, 0], y[:, 1]))
    other = empirical(whole, x.flatten(0, 1), targets=y.flatten(0, 1))
    same_fisher(one, other)
    assert one.blocks[("w",)].registration.steps == 2


@pytest.mark.parametrize("folded", [False, True])
def test_a_block_of_tensors_of_ones_own(folded: bool) -> None:
    x, d = torch.randn(3, 5, 2), torch.randn(3, 5, 4)
    if folded:
        lc = collection(lambda x, w: (x.reshape(-1, 2) @ w).reshape(3, -1, 4).sum(0), x, w=(2, 4))
        block = lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx="kron_series_1")
        block.register_inverse()
        block.instantiate_factors([[d.flatten(0, 1)]], 0.1, [x.flatten(0, 1)])
    else:
        lc = collection(lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w, x, w=(2, 4))
        nodes = ["matmul", "matmul_1", "matmul_2"]
        block = lc.register_fully_connected_multi("w", None, nodes, approx="kron_series_1")
        block.register_inverse()
        block.instantiate_factors([[list(d)]], 0.1, [list(x)])
    sums = sequence_statistics(x[:, :, None, None], d[:, :, None, None], False, (1, 4, 2))
    for name in ("A", "G", "A1", "G1"):
        torch.testing.assert_close(block.operator.factors[name].value, sums[name] / 15)
    v = torch.randn(2, 4)
    torch.testing.assert_close(block.multiply_inverse(block.multiply(v)), v)


def test_default_series_are_found_by_the_scan_and_named_where_they_do_not_fit() -> None:
    x = torch.randn(5, 3, 4)
    lc = collection(lambda x, w, v: (x[:, 0] @ w + x[:, 1] @ w) @ v @ v.t(), x, w=(4, 4), v=(4, 3))
    lc.set_default_fully_connected_multi_approximation("kron_series_2")
    lc.register_normal_predictive_distribution("matmul_3")
    lc.auto_register_layers()
    assert lc.fisher_blocks["w"].approximation == "kron_series_2"
    assert lc.fisher_blocks["v"].approximation == "kron_indep"
    assert "its use at matmul_3" in str(lc.fisher_blocks["v"].reason)


# --- what is no series ------------------------------------------------------------------------------------------------


def reason_of(model: nn.Module, x: Tensor, key: Any, **options: Any) -> tuple[str, str]:
    net = kfac_fx.compile(model, (x,), loss=normal, approximations={key: "kron_series_1"}, **options)
    one = next(one for one in net.registrations if one.parameters[0].startswith("fc"))
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
    with pytest.raises(RegistrationError, match=r"look_up\(fc\) at .* has ids for rows, of which there is no series"):
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
        means = [one[name] / one["count"] for one in sums]
        torch.testing.assert_close(factors[name].value, (means[0] + means[1]) / 2)
    assert factors["positions"].value == 3 and factors["pairs"].value == 2
    assert est.blocks[KEY].group.steps().tolist() == [3]


def test_series_longer_than_prepared_for_are_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.series.LONGEST", 4)
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
        mine = next(one for names, one in found.items() if names[0] == key)
        for name, value in wanted.items():
            torch.testing.assert_close(mine[name], value.view(mine[name].shape))


def test_what_a_collection_is_told_must_be_a_series() -> None:
    def nodes(*inputs: Tensor) -> kfac_fx.LayerCollection:
        return collection(lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w, *inputs, w=(2, 4))

    def multi(lc: kfac_fx.LayerCollection, outputs: Any, **options: Any) -> None:
        lc.register_fully_connected_multi("w", None, outputs, approx="kron_series_1", **options)

    x = torch.randn(3, 5, 2)
    with pytest.raises(RegistrationError, match="takes its uses in the order of time, and the graph computes matmul, "):
        multi(nodes(x), ["matmul", "matmul_2", "matmul_1"])
    multi(nodes(x), ["matmul_2", "matmul_1", "matmul"])  # backward in time is as good
    lc = nodes(x)
    multi(lc, ["matmul", "matmul_1"], reuse=False)
    with pytest.raises(ApproximationError, match="w: its towers have 1 and 2 uses, so not 'kron_series_1'"):
        multi(lc, ["matmul_2"], reuse=True)
    with pytest.raises(ApproximationError, match="transposed"):
        multi(collection(lambda x, w: x @ w @ w.t(), x[0], w=(2, 4)), ["matmul", "matmul_1"])
    whole = collection(lambda x, w: (x @ w).sum(0), x, w=(2, 4))
    with pytest.raises(RegistrationError, match=r"\[3, 5\] rows do not hold num_uses=4 one after another"):
        multi(whole, "matmul", num_uses=4)
    square = collection(lambda x, w: (x @ w).sum(0), torch.randn(3, 3, 2), w=(2, 4))
    with pytest.raises(RegistrationError, match=r"num_uses=3 is the size of dimensions \[0, 1\]"):
        multi(square, "matmul", num_uses=3)
    left = collection(lambda x, w: (w @ x).sum(1), torch.randn(2, 6), w=(4, 2))
    with pytest.raises(RegistrationError, match="register the uses as a list; they cannot be told apart"):
        multi(left, "matmul", num_uses=3)


def test_a_tensor_that_does_not_hold_the_uses_at_run_time() -> None:
    lc = collection(lambda x, w: x @ w, w=(2, 4))
    lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx="kron_series_2")
    lc.register_normal_predictive_distribution("matmul")
    net = kfac_fx.compile(lc, verify=False)
    with pytest.raises(RegistrationError, match="was to hold 3 uses, and its rows are no multiple of that"):
        net.record((torch.randn(7, 2),), {})


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
        opt.step(closure) if options else opt.step()
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
@pytest.mark.parametrize("approximation", [pytest.param("kron_series_1_abs", marks=pytest.mark.slow), "kron_series_2"])
def test_compiled_as_eager(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording and products, without a graph break."""
    monkeypatch.setattr("kfac_fx.series.LONGEST", 2)  # for shorter graphs of products
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
        for found, wanted in zip(product(v).values(), getattr(eager, method)(v).values(), strict=True):
            torch.testing.assert_close(found, wanted)
