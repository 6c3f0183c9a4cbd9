"""Models and losses in which cases meet, against gradients of single cases from autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Categorical
from kfac_fx.passes.layers import conv
from kfac_fx.recording import case_gradients
from kfac_fx.recording.meeting_cases import keys_that_meet, leaf_with_rows_of
from kfac_fx.recording.statistics import Key
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")

Logits = Callable[[Tensor], Tensor]


class Pooled(nn.Module):
    """Two nodes make one case of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.node(x).tanh().unflatten(0, (-1, 2)).sum(1))
        return logits


class Paired(nn.Module):
    """Every case meets the one that is half of the batch away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        logits: Tensor = self.head(y + y.roll(len(x) // 2, 0))
        return logits


class Rolled(nn.Module):
    """The identity, of which the graph does not tell that it keeps the cases apart."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(0, 0)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def zero_head() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    nn.init.zeros_(model[2].weight)
    return model


def embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Logits, bool]] = {
    "a norm of the batch": (normalized, lambda z: z, True),
    "a norm of the batch before zeros": (zero_head, lambda z: z, True),
    "a contrastive loss": (embedding, lambda z: z @ z.mT, True),
    "pairs": (Paired, lambda z: z, True),
    "pooled cases": (Pooled, lambda z: z, True),
    "nowhere": (embedding, lambda z: z, False),
}
TOLERANCE = {"rtol": 1e-8, "atol": 1e-12}


def of_rows(model: nn.Module, logits: Tensor, wanted: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The gradients of `wanted` for every source of every row of the loss: the columns of a root of its Fisher."""
    grads = []
    for row, p in enumerate(logits.detach().softmax(-1)):
        root = torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())
        for column in root.mT:
            cotangent = torch.zeros_like(logits)
            cotangent[row] = column
            grads.append(torch.autograd.grad(logits, wanted, cotangent, retain_graph=True))
    return grads


@pairs(("build, logits_of, meet", MODELS), ("memory", [None, 1]))
def test_exact_modes_are_exact_where_cases_meet(
    build: Callable[[], nn.Module], logits_of: Logits, meet: bool, memory: int | None
) -> None:
    model, x = build(), torch.randn(6, 4)
    sums: list[Tensor] = []
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with layer.register_forward_hook(lambda _, __, output: sums.append(output)):
        logits = logits_of(model(x))
    parameters = list(layer.parameters())
    each = of_rows(model, logits, [*parameters, sums[0]])
    flat = torch.stack([torch.cat([weight, bias.unsqueeze(-1)], dim=-1).flatten() for weight, bias, _ in each])
    g = sum((d.mT @ d for _, _, d in each), torch.zeros(5, 5))
    (weight,) = [f"{name}.weight" for name, module in model.named_modules() if module is layer]
    reports = []

    def loss(outputs: Any) -> Categorical:
        return Categorical(logits_of(outputs))

    for approximation in ("full", None):
        asked = {} if approximation is None else {"*": approximation}
        net = kfac_fx.compile(model, (x[:4],), loss=loss, approximations=asked)
        estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="exact", memory=memory)
        for _ in range(2):
            estimator.update_covariances(x)
        (block,) = [block for key, block in estimator.blocks.items() if weight in key]
        if approximation == "full":
            torch.testing.assert_close(block.full_fisher_block(), flat.mT @ flat / len(logits), **TOLERANCE)
        else:
            torch.testing.assert_close(block.factors["G"].value.squeeze(0), g / len(x), **TOLERANCE)
        reports.append(" ".join(str(net.report).split()))
    assert ["the exact modes send back one row of a loss at a time: cases meet" in text for text in reports] == [
        meet,
        meet and build is not Pooled,  # of which every node is reached by one row of the loss
    ]


def test_cases_that_meet_are_looked_for_in_one_batch_without_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []

    def noted(*args: Any) -> frozenset[Key] | None:
        keys = keys_that_meet(*args)
        known.append(keys is not None)
        return keys

    monkeypatch.setattr("kfac_fx.recording.recorder.keys_that_meet", noted)
    x = torch.randn(6, 4)
    net = kfac_fx.compile(normalized(), (x[:2],), loss="cross_entropy")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    for batch in (torch.full_like(x, torch.nan), x, x):
        estimator.update_covariances(batch)
    assert known == [False, True]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[Key]]:
    """The registrations of which a batch is asked, at every question."""
    asked: list[frozenset[Key]] = []

    def noted(*args: Any) -> frozenset[Key] | None:
        asked.append(frozenset(args[5]))
        return keys_that_meet(*args)

    for module in ("recorder", "case_gradients"):
        monkeypatch.setattr(f"kfac_fx.recording.{module}.keys_that_meet", noted)
    return asked


@pytest.mark.parametrize("what", ["outputs", "exact", "loss"])
def test_cases_that_meet_are_looked_for_in_the_wanted_blocks_alone(what: str, asked: list[frozenset[Key]]) -> None:
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3), Rolled()).eval()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    first, norm, last = (key.parameters for key in net.registrations)
    sums: dict[Key, Tensor] = {}

    def consume(key: Key, of_batch: Any, *_: Any) -> None:
        sums[key] = of_batch

    for wanted in ([last], [last, norm], [last], [first, norm, last], [last]):
        if what == "outputs":
            net.record_outputs((x,), {}, consume, only=wanted)
        elif what == "loss":
            net.record_cases((x,), {}, consume, targets=y, only=wanted)
        else:
            net.record((x,), {}, mode="exact", only=[name for key in wanted for name in key])
    assert asked == [{last}, {norm}, {first}]


def test_no_patches_are_made_to_see_that_cases_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 2, 5, 5)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3), Rolled())
    net = kfac_fx.compile(model, (x,), loss="categorical")
    net.recorder((x,), {})
    made: list[int] = []
    merged = conv.merged
    monkeypatch.setattr(conv, "merged", lambda *args: (made.append(1), merged(*args))[1])
    net.record((x,), {}, mode="exact")  # whose A of a convolution needs no patches either
    assert not made
    net.record_cases((x,), {}, lambda key, cases: None, targets=torch.randint(3, (6,)))
    assert len(made) == 1


@pytest.mark.parametrize("what", ["outputs", "exact", "loss", "measurement"])
def test_no_batch_is_asked_where_the_graph_tells_that_cases_stay_apart(what: str, asked: list[frozenset[Key]]) -> None:
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    net = kfac_fx.compile(embedding(), (x,), loss="categorical")
    measured = {"measurement": lambda z, y: nn.functional.cross_entropy(z, y, reduction="none")}
    for _ in range(2):
        if what == "outputs":
            net.record_outputs((x,), {}, lambda *_: None, only=[key.parameters for key in net.registrations])
        elif what == "exact":
            net.record((x,), {}, mode="exact")
        else:
            net.record_cases((x,), {}, lambda *_: None, targets=y, **(measured if what == "measurement" else {}))
    assert len(asked) == (what == "measurement")  # a function of the user's, of which no graph tells


@pytest.mark.parametrize("loss", [lambda z: Categorical(z @ z.mT), lambda z: Categorical(z.flip(0))])
def test_a_loss_in_which_cases_meet_or_change_places_is_asked_for_a_batch(loss: Any) -> None:
    x, y = torch.randn(3, 4), torch.randint(3, (3,))
    net = kfac_fx.compile(embedding(), (x,), loss=loss)
    assert not net.recorder((x,), {}).rows_are_outputs
    net.record_cases((x,), {}, lambda *_: None, targets=y)
    assert "cases meet or change places between it and the loss" in " ".join(str(net.report).split())


def test_a_model_that_changed_its_mode_is_asked_anew() -> None:
    x = torch.randn(6, 4)
    net = kfac_fx.compile(normalized().eval(), (x,), loss="categorical")
    net.record((x,), {}, mode="exact")
    assert net.recorder((x,), {}).rows_are_outputs and not net.recorder((x,), {}).meeting
    net.train()
    net.record((x,), {}, mode="exact")
    assert net.recorder((x,), {}).meeting == {("0.weight", "0.bias")}


class Switched(nn.Module):
    """An attribute decides whether cases meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.meet = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        logits: Tensor = self.head(hidden - hidden.mean(0) if self.meet else hidden)
        return logits


def test_a_model_that_changed_an_attribute_is_asked_anew() -> None:
    torch.manual_seed(0)
    model, x, y = Switched(), torch.randn(6, 4), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    identity = kfac_fx.fit_spectrum(net, [(x, y)], mode="empirical").at(scale=0.0, damping=1.0)
    for model.meet in (False, True):
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        expected = torch.stack([torch.cat([part.flatten() for part in parts]).square().sum() for parts in each])
        torch.testing.assert_close(identity.self_scores((x, y)), expected)
        net.record((x,), {}, mode="exact")
        assert bool(net.recorder((x,), {}).meeting) is model.meet


class WithFirst(nn.Module):
    """All logits depend on the first case."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5, bias=bias), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        logits: Tensor = self.head(hidden + hidden[:1])
        return logits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_gradient_rows_of_a_row_of_zeros_do_not_meet(zero: bool, bias: bool) -> None:
    x = torch.randn(6, 4)
    x[:1] *= not zero
    net = kfac_fx.compile(WithFirst(bias), (x,), loss="categorical")
    net.record((x,), {}, mode="exact")
    first = net.registrations[0].parameters
    assert (first in net.recorder((x,), {}).meeting) is (bias or not zero)


@pytest.mark.parametrize(
    ("build", "logits_of", "meet"),
    [pytest.param(*model, id=name) for name, model in MODELS.items() if "loss" not in name],
)
def test_the_proof_and_an_exact_recording_agree_where_outputs_are_rows_of_the_loss(
    build: Callable[[], nn.Module], logits_of: Logits, meet: bool
) -> None:
    x = torch.randn(6, 4)
    net = kfac_fx.compile(build(), (x,), loss="categorical", approximations={"*": "full"})
    told = {r.parameters for r in net.registrations if "cases meet between it and the outputs" in (r.reason or "")}
    net.record((x,), {}, mode="exact")
    assert told == net.recorder((x,), {}).meeting
    assert bool(told) is meet


class Averaged(nn.Module):
    """Its outputs depend on padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(x).tanh().mean(1))
        return logits


def test_gradients_of_single_examples_are_those_of_autograd_whatever_is_padding() -> None:
    model, x, y = Averaged(), torch.randn(5, 7, 4), torch.randint(3, (5,))
    real = torch.arange(7) < torch.tensor([7, 3, 5, 2, 6])[:, None]
    net = kfac_fx.compile(model, (x, real), loss="categorical", padding_mask="real")
    gathered: dict[str, Tensor] = {}

    def consume(key: tuple[str, ...], cases: kfac_fx.recording.case_gradients.Cases) -> None:
        gathered[key[0]] = cases.gradients()

    net.record_cases((x, real), {}, consume, targets=y)
    for name, layer in (("first.weight", model.first), ("head.weight", model.head)):
        for n, loss in enumerate(nn.functional.cross_entropy(model(x, real), y, reduction="none")):
            grads = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
            wanted = torch.cat([grads[0], grads[1].unsqueeze(-1)], dim=-1)
            torch.testing.assert_close(gathered[name][n].squeeze(0), wanted, **TOLERANCE)


@pairs(("measured", [False, True]), ("name", ["a contrastive loss", "pairs", "nowhere"]))
def test_gradients_of_single_examples_are_apart_where_cases_meet(name: str, measured: bool) -> None:
    build, logits_of, meet = MODELS[name]
    model, x, y = build(), torch.randn(6, 4), torch.randint(3, (6,))
    net = kfac_fx.compile(model, (x[:2],), loss=lambda z: Categorical(logits_of(z)))
    gathered: dict[str, dict[int, Tensor]] = {}

    def consume(key: tuple[str, ...], cases: kfac_fx.recording.case_gradients.Cases) -> None:
        for number, gradient in enumerate(cases.gradients()):
            gathered.setdefault(key[0], {})[cases.first + number] = gradient

    def losses(z: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_of(z), targets, reduction="none")

    options = {"measurement": losses} if measured else {}
    net.record_cases((x,), {}, consume, targets=y, **options)
    layers = dict(model.named_modules())
    for weight, by_case in gathered.items():
        layer = layers[weight.removesuffix(".weight")]
        for n, loss in enumerate(losses(model(x), y)):
            grads = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
            wanted = torch.cat([grads[0], grads[1].unsqueeze(-1)], dim=-1)
            torch.testing.assert_close(by_case[n].squeeze(0), wanted, **TOLERANCE)
    assert ("cases meet or change places between it and the loss" in " ".join(str(net.report).split())) is meet


class InOtherOrder(nn.Module):
    """`how` takes the cases out of their order and back, or mixes them. The loss is of all positions in a row."""

    def __init__(self, how: str, flat: bool) -> None:
        super().__init__()
        self.how, self.flat = how, flat
        self.first, self.series, self.head = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            hidden, _ = nn.utils.rnn.pad_packed_sequence(self.series(packed)[0], True, total_length=x.shape[1])
        elif self.how == "sorted":
            order = lengths.argsort(stable=True)
            hidden = self.series(hidden[order])[0][order.argsort()]
        elif self.how == "flipped":
            hidden = self.series(hidden.flip(0))[0].flip(0)
        else:
            hidden = self.series(hidden - hidden.mean(0))[0]
        logits: Tensor = self.head(hidden)
        return logits.flatten(0, 1) if self.flat else logits


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("how", "flat"), [("packed", False), ("packed", True), ("sorted", True), ("flipped", True), ("centered", True)]
)
def test_scores_are_of_the_right_examples_where_cases_change_places(how: str, flat: bool) -> None:
    x, y, model = torch.randn(6, 4, 3), torch.randint(3, (6, 4)), InOtherOrder(how, flat)
    sorted_lengths, others = torch.tensor([4, 4, 3, 2, 2, 1]), torch.tensor([2, 4, 1, 3, 4, 2])
    targets = y.flatten() if flat else y
    net = kfac_fx.compile(model, (x, sorted_lengths), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(x, others, targets=targets)], mode="empirical")
    identity = spectrum.at(scale=0.0, damping=1.0)
    for lengths in (sorted_lengths, others) if how in ("packed", "sorted") else (others,):
        batch = kfac_fx.Batch(x, lengths, targets=targets)
        logits = model(x, lengths).view(24, 3)
        losses = nn.functional.cross_entropy(logits, y.flatten(), reduction="none").view(6, 4).sum(1)
        learned = list(model.parameters())
        each = [torch.autograd.grad(loss, learned, retain_graph=True, allow_unused=True) for loss in losses]
        gradients = torch.stack(
            [torch.cat([part.flatten() for part in of_case if part is not None]) for of_case in each]
        )
        torch.testing.assert_close(identity.precondition(batch).scores(batch), gradients @ gradients.T)
        torch.testing.assert_close(identity.self_scores(batch), gradients.square().sum(1))


class Ranked(nn.Module):
    """A layer on the cases in the order of a key, or on features in theirs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second, self.head = how, nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.how == "features":
            hidden = hidden.sort()[0] + hidden.topk(2, 1)[0].sum(1, keepdim=True) + hidden.argsort(1).to(hidden)
            out: Tensor = self.head(self.second(hidden))
            return out
        order = key.topk(len(key))[1] if self.how == "topk" else key.sort(descending=True)[1]
        back = torch.zeros_like(order).index_put((order,), torch.ones_like(order).cumsum(0) - 1)
        out = self.head(torch.tanh(self.second(hidden[order]))[back])
        return out


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", ["sort", "topk", "features"])
def test_places_are_looked_for_in_every_batch_if_cases_are_sorted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is in order. A sort of features moves no case, as the graph tells."""
    searches: list[bool] = []

    def counted(*args: Any) -> Any:
        searches.append(True)
        return keys_that_meet(*args)

    monkeypatch.setattr(case_gradients, "keys_that_meet", counted)
    x, y, model = torch.randn(5, 3), torch.randint(3, (5,)), Ranked(how)
    ordered, others = torch.arange(5).flip(0), torch.tensor([2, 0, 4, 1, 3])
    net = kfac_fx.compile(model, (x, ordered), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [kfac_fx.Batch(x, ordered, targets=y)], mode="empirical")
    identity = spectrum.at(scale=0.0, damping=1.0)
    for key in (ordered, others):
        losses = nn.functional.cross_entropy(model(x, key), y, reduction="none")
        each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        gradients = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
        torch.testing.assert_close(identity.self_scores(kfac_fx.Batch(x, key, targets=y)), gradients.square().sum(1))
    assert len(searches) == (1 if how == "features" else 2)


class Mixing(nn.Module):
    """The numbers of a batch choose which of its cases meet."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second, self.head = how, nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, partner: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.how == "python" and float(x.sum()) > 1e9:
            hidden = 2.0 * hidden
        if self.how in ("mixup", "python"):
            mixed = 0.7 * hidden + 0.3 * hidden[partner]
        elif self.how == "edges":
            mixed = torch.zeros_like(hidden).index_add_(0, partner, hidden)
        else:
            allowed = torch.arange(len(x)) == partner.unsqueeze(1)
            similar = (self.second(hidden) @ hidden.T).masked_fill(~allowed, -1e9)
            mixed = similar.softmax(-1) @ hidden + hidden
        logits: Tensor = self.head(mixed + self.second(hidden))
        return logits


@pytest.mark.parametrize("mode", ["empirical", "exact"])
@pytest.mark.parametrize("how", ["mixup", "edges", "mask", "python"])
def test_cases_that_meet_in_a_later_batch_alone_are_found(how: str, mode: str) -> None:
    """In the first batch every case is its own partner, so that none of them meet."""
    model = Mixing(how)
    alone, others = torch.arange(5), torch.tensor([2, 0, 0, 1, 3])
    batches = [kfac_fx.Batch(torch.randn(5, 3), p, targets=torch.randint(3, (5,))) for p in (alone, others)]
    net = kfac_fx.compile(model, batches[0].args, loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, batches, case="row", mode=mode)
    identity, learned = spectrum.at(scale=0.0, damping=1.0), list(model.parameters())
    trace = torch.zeros(())
    for batch in batches:
        logits = model(*batch.args)
        losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        each = [torch.autograd.grad(loss, learned, retain_graph=True, allow_unused=True) for loss in losses]
        squares = torch.stack([sum(p.square().sum() for p in parts if p is not None) for parts in each])
        torch.testing.assert_close(identity.self_scores(batch), squares)
        if mode == "exact":
            rows = of_rows(model, logits, learned)
            squares = torch.stack([sum(p.square().sum() for p in parts) for parts in rows])
        trace = trace + squares.sum() / 10
    torch.testing.assert_close(spectrum.trace(), trace)


@pytest.mark.filterwarnings("ignore:2 of 5 cases of the loss have no target")
def test_nodes_without_a_label_have_a_score_of_zero_and_the_error_says_how() -> None:
    model, labeled = Mixing("edges"), torch.tensor([0, 2, 3])
    x, partner = torch.randn(5, 3), torch.tensor([2, 0, 0, 1, 3])
    y = torch.tensor([1, -100, 0, 2, -100])
    picked = kfac_fx.compile(model, (x, partner), loss=lambda logits: Categorical(logits[labeled]))
    with pytest.raises(kfac_fx.LossError, match=r"of some examples alone.* targets of -100"):
        kfac_fx.fit_spectrum(picked, [kfac_fx.Batch(x, partner, targets=y[labeled])], case="row")
    batch, learned = kfac_fx.Batch(x, partner, targets=y), list(model.parameters())
    net = kfac_fx.compile(model, (x, partner), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [batch], case="row").at(scale=0.0, damping=1.0)
    losses = nn.functional.cross_entropy(model(x, partner), y, reduction="none")
    each = [torch.autograd.grad(loss, learned, retain_graph=True) for loss in losses]
    squares = torch.stack([sum(part.square().sum() for part in parts) for parts in each])
    torch.testing.assert_close(spectrum.self_scores(batch), squares)


def test_examples_that_meet_in_a_measurement_of_a_later_batch_alone_are_found() -> None:
    """Every example is compared with the mean of its class, which is itself in the first batch."""

    def from_mean(z: Tensor, y: Tensor) -> Tensor:
        same = (y.unsqueeze(1) == y).to(z)
        distance: Tensor = (2 * z - same @ z / same.sum(1, keepdim=True)).square().sum(1)
        return distance

    model = embedding()
    net = kfac_fx.compile(model, (torch.randn(5, 4),), loss="categorical")
    batches = [(torch.randn(5, 4), torch.arange(5) % classes) for classes in (5, 2)]
    spectrum = kfac_fx.fit_spectrum(net, batches, case="sequence", measurement=from_mean).at(scale=0.0, damping=1.0)
    for x, y in batches:
        measured = from_mean(model(x), y)
        each = [torch.autograd.grad(number, list(model.parameters()), retain_graph=True) for number in measured]
        squares = torch.stack([sum(part.square().sum() for part in parts) for parts in each])
        torch.testing.assert_close(spectrum.self_scores((x, y), measurement=from_mean), squares)


@pytest.mark.parametrize(
    ("of_leaf", "expected"),
    [
        (lambda z: z, 1),
        (lambda z: z.flatten(1), 1),
        (lambda z: z.unsqueeze(0).squeeze(0), 1),
        (lambda z: torch.where(torch.arange(4).view(4, 1, 1) > 1, z, 0.0), 1),
        (lambda z: z.flatten(0, 1), None),
        (lambda z: z[:2], None),
        (lambda z: z.transpose(0, 1), None),
        (lambda z: z.transpose(0, 2).transpose(0, 1), None),
        (lambda z: z.flip(0), None),
        (lambda z: z.clone(), None),
        (lambda z: z.detach(), None),
        (lambda z: torch.where(torch.arange(4).view(4, 1, 1) > 1, z, z.flip(0)), None),
        (lambda z: torch.where(torch.arange(4).view(4, 1, 1) > 1, z[:1], 0.0), None),
        (lambda z: torch.where(torch.arange(4).view(4, 1, 1) > 1, z.transpose(0, 1), 0.0), None),
        (lambda z: Backwards.apply(z), None),
    ],
)
def test_which_leaf_has_the_rows_of_a_tensor(of_leaf: Logits, expected: int | None) -> None:
    leaves = [torch.randn(4, 4, 2, requires_grad=True) for _ in range(3)]
    assert leaf_with_rows_of(of_leaf(leaves[1]), leaves, 4) == expected
    assert leaf_with_rows_of(of_leaf(leaves[1]), leaves, 2) is None


class Backwards(torch.autograd.Function):
    """The identity with a backward that sends gradients to other cases."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.flip(0)
