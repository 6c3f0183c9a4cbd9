"""Targets that a loss inside forward ignores are no cases, in any mode and with any number for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")
N, C = 8, 4
TOLD = "ignore:.*have no target:UserWarning"  # of their rows in A, see test_left_out.py
Y = torch.tensor([0, 1, 2, 3, 2, 2, 1, 2])


class Trained(nn.Module):
    """Returns its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(3, C), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(x), y)


def estimator(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> kfac_fx.FisherEstimator:
    net = kfac_fx.compile(model, (x[:4], y[:4]), approximations={"*": "full"})
    found = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode=mode)
    found.update_covariances(x, y)
    return found


def of_real_cases(model: Trained, x: Tensor, real: Tensor, targets: Tensor, mode: str) -> Tensor:
    """The Fisher of the mean over the real cases, one case at a time: [out, in + bias] flat."""
    total = torch.zeros(C * 4, C * 4)
    for row, target in zip(x[real], targets[real], strict=True):
        r = torch.cat([row, torch.ones(1)])
        p = model.head(row).detach().softmax(-1)
        d = p - F.one_hot(target, C)
        g = torch.outer(d, d) if mode == "empirical" else torch.diag(p) - torch.outer(p, p)
        total += torch.kron(g, torch.outer(r, r))
    return total / int(real.sum())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the default": lambda z, y: F.cross_entropy(z, torch.where(y == 2, -100, y)),
    "a class": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "another negative number": lambda z, y: F.cross_entropy(z, torch.where(y == 2, -1, y), ignore_index=-1),
    "a module": lambda z, y: nn.CrossEntropyLoss(ignore_index=2)(z, y),
    "a sum over the real ones": lambda z, y: F.cross_entropy(z, y, ignore_index=2, reduction="sum") / (y != 2).sum(),
}


@pairs(("mode", ["exact", "empirical"]), ("name", list(LOSSES)))
def test_ignored_targets_are_no_cases(name: str, mode: str) -> None:
    model, x = Trained(LOSSES[name]), torch.randn(N, 3)
    found = estimator(model, x, Y, mode).blocks["head.weight", "head.bias"].full_fisher_block()
    torch.testing.assert_close(found, of_real_cases(model, x, Y != 2, Y, mode))


def test_ignored_positions_of_sequences_are_no_cases() -> None:
    """The classes are on dimension 1, as torch wants them there."""
    model = Trained(lambda z, y: F.cross_entropy(z.transpose(1, 2), y, ignore_index=2))
    x, y = torch.randn(N, 3), Y.view(4, 2)
    found = estimator(model, x.view(4, 2, 3), y, "exact").blocks["head.weight", "head.bias"].full_fisher_block()
    torch.testing.assert_close(found, of_real_cases(model, x, Y != 2, Y, "exact"))


def declared(kind: str, linear: nn.Linear) -> tuple[nn.Module, kfac_fx.CompiledModule]:
    """A model whose loss is outside, declared in one way or registered on a node."""
    model = nn.Sequential(linear)
    if kind != "collection":
        return model, kfac_fx.compile(model, (torch.randn(4, 3),), loss=kind, approximations={"*": "full"})
    collection = kfac_fx.LayerCollection(kfac_fx.capture(model, (torch.randn(4, 3),)))
    collection.register_fully_connected(
        ("0.weight", "0.bias"), collection.inputs_of("0"), collection.outputs_of("0"), approx="full"
    )
    collection.register_categorical_predictive_distribution(collection.outputs_of("0"))
    return model, kfac_fx.compile(collection)


@pairs(("mode", ["exact", "empirical"]), ("kind", ["categorical", "cross_entropy", "collection"]))
def test_targets_that_are_handed_over_and_ignored_are_no_cases(kind: str, mode: str) -> None:
    """The mean of `F.cross_entropy` outside of the model has no cases with a target of -100."""
    trained, x = Trained(lambda z, y: z), torch.randn(N, 3)
    model, net = declared(kind, trained.head)
    estimator = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode=mode)
    ignored = torch.where(Y == 2, -100, Y)
    for part in (slice(0, 5), slice(5, N)):
        estimator.update_covariances(x[part], targets=ignored[part], fold=False)
    estimator.fold()
    block = estimator.blocks["0.weight", "0.bias"].full_fisher_block()
    torch.testing.assert_close(block, of_real_cases(trained, x, Y != 2, Y, mode))


class Branching(Trained):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(x)
        return self.loss(z if float(z.sum()) > -1e9 else -z, y)


def test_ignored_targets_of_a_divided_model_are_no_cases() -> None:
    model, x = Branching(LOSSES["a class"]), torch.randn(N, 3)
    found = estimator(model, x, Y, "exact").blocks["head.weight", "head.bias"].full_fisher_block()
    torch.testing.assert_close(found, of_real_cases(model, x, Y != 2, Y, "exact"))


def test_sampled_targets_are_right_in_expectation() -> None:
    model, x = Trained(lambda z, y: F.cross_entropy(z, y, ignore_index=2)), torch.randn(N, 3)
    net = kfac_fx.compile(model, (x, Y), approximations={"*": "full"})
    found = kfac_fx.FisherEstimator(net, damping=0.0, seed=0)
    for _ in range(30):
        found.update_covariances(x.repeat(100, 1), Y.repeat(100), should_decay=False)
    wanted = of_real_cases(model, x, Y != 2, Y, "exact")
    block = found.blocks["head.weight", "head.bias"].full_fisher_block()
    torch.testing.assert_close(block, wanted, rtol=0.0, atol=0.06 * float(wanted.abs().max()))


def test_the_training_backward_records_the_same_as_a_pass_of_its_own() -> None:
    x, blocks = torch.randn(N, 3), []
    model = Trained(lambda z, y: F.cross_entropy(z, y, ignore_index=2))
    net = kfac_fx.compile(model, (x, Y), approximations={"*": "full"})
    optimizer = kfac_fx.KFAC(net, lr=1e-9, damping=0.1, estimation_mode="empirical")
    net(x, Y).backward()
    optimizer.step()
    blocks.append(optimizer.estimator.blocks["head.weight", "head.bias"].full_fisher_block())
    wanted = of_real_cases(model, x, Y != 2, Y, "empirical")
    torch.testing.assert_close(blocks[0], wanted)


@pytest.mark.filterwarnings(TOLD)
@pairs(("options", [{"lr": 0.1}, {"momentum": None, "momentum_type": "qmodel"}]), ("mode", ["gradients", "empirical"]))
def test_a_model_that_ignores_targets_trains_without_a_warning_of_its_loss(
    options: Mapping[str, Any], mode: str
) -> None:
    x = torch.randn(N, 3)
    net = kfac_fx.compile(Trained(lambda z, y: F.cross_entropy(z, y, ignore_index=2)), (x, Y))
    optimizer = kfac_fx.KFAC(net, damping=0.1, estimation_mode=mode, **options)
    values = []
    for _ in range(8):
        loss = net(x, Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    assert values[-1] < values[0] and int(optimizer.skipped) == 0


@pytest.mark.filterwarnings(TOLD)
def test_a_batch_in_which_all_targets_are_ignored_changes_nothing() -> None:
    x = torch.randn(N, 3)
    net = kfac_fx.compile(Trained(lambda z, y: F.cross_entropy(z, y, ignore_index=2)), (x, Y))
    found = kfac_fx.FisherEstimator(net)
    found.update_covariances(x, Y)
    before = {name: value.clone() for name, value in found.state_dict().items() if "value" in name}
    found.update_covariances(x, torch.full((N,), 2))
    assert all(torch.equal(found.state_dict()[name], value) for name, value in before.items())


# --- rows of ignored targets ------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Classes of every position [N, T]; with `mixed`, a position sees those before it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], mixed: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.loss, self.mixed = nn.Linear(3, 5), nn.Linear(5, C), loss, mixed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.loss(self.head(h.cumsum(1) if self.mixed else h), y)


def flat(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, C), y.reshape(-1), **options)


def every(y: Tensor) -> Tensor:
    return y != -100


def behind(y: Tensor) -> Tensor:
    """The positions whose next target is one."""
    return F.pad(every(y)[:, 1:], (0, 1))


def not_the_first(y: Tensor) -> Tensor:
    return every(y) & (torch.arange(y.shape[1]) > 0)


def two_losses(z: Tensor, y: Tensor) -> Tensor:
    return flat(z, y) + 0.5 * flat(2 * z, y)


OF_POSITIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "flat": (flat, every),
    "classes second": (lambda z, y: F.cross_entropy(z.mT, y), every),
    "another number": (
        lambda z, y: flat(z, torch.where(y == -100, 2, y), ignore_index=2),
        lambda y: every(y) & (y != 2),
    ),
    "a sum": (lambda z, y: flat(z, y, reduction="sum") / (y != -100).sum(), every),
    "an index": (lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]), every),
    "shifted": (lambda z, y: flat(z[..., :-1, :].contiguous(), y[..., 1:].contiguous()), behind),
    "targets shifted": (lambda z, y: flat(z, F.pad(y, (0, 1), value=-100)[..., 1:]), behind),
    "without the first": (lambda z, y: flat(z[:, 1:], y[:, 1:]), not_the_first),
    "two losses": (two_losses, every),
}


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "exact") for name in OF_POSITIONS), ("shifted", "gradients"), ("shifted", "empirical")]
)
def test_rows_whose_targets_are_ignored_are_in_no_factor(name: str, mode: str) -> None:
    torch.manual_seed(0)
    loss, kept_of = OF_POSITIONS[name]
    model, x, y = Tagger(loss), torch.randn(N, 6, 3), torch.randint(C, (N, 6))
    y[torch.arange(6) >= torch.randint(2, 6, (N, 1))] = -100
    net = kfac_fx.compile(model, (x[:3], y[:3]))
    found = kfac_fx.FisherEstimator(net, estimation_mode=mode)
    for part in (slice(0, 3), slice(3, N)):
        found.update_covariances(x[part], y[part], fold=False)
    found.fold()
    kept = kept_of(y)
    for layer, values in (("layer", x), ("head", torch.tanh(model.layer(x)).detach())):
        rows = torch.cat([values[kept], torch.ones(int(kept.sum()), 1)], 1)
        A = found.blocks[f"{layer}.weight", f"{layer}.bias"].factors["A"].value.squeeze(0)
        torch.testing.assert_close(A, rows.T @ rows / len(rows))


class Windows(Tagger):
    """A position sees its window of tokens, which `roll` brings to it; `late`: its hidden state moves as well."""

    def __init__(self, late: bool) -> None:
        super().__init__(flat)
        self.late = late

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x + x.roll(1, 1)))
        return self.loss(self.head(h.roll(1, 1) if self.late else h), y)


@pytest.mark.filterwarnings(TOLD)
@pytest.mark.parametrize("late", [False, True])
def test_rows_that_are_moved_before_a_layer_are_left_out_by_their_targets(late: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Windows(late), torch.randn(N, 6, 3), torch.randint(C, (N, 6))
    y[torch.arange(6) >= torch.randint(2, 6, (N, 1))] = -100
    found = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x[:3], y[:3])), estimation_mode="exact")
    found.update_covariances(x, y)
    windows, all_rows = x + x.roll(1, 1), torch.ones(N, 6, dtype=torch.bool)
    h = torch.tanh(model.layer(windows)).detach()
    kept = every(y)
    for layer, values, of_layer in (
        ("layer", windows, all_rows if late else kept),
        ("head", h.roll(int(late), 1), kept),
    ):
        rows = torch.cat([values[of_layer], torch.ones(int(of_layer.sum()), 1)], 1)
        A = found.blocks[f"{layer}.weight", f"{layer}.bias"].factors["A"].value.squeeze(0)
        torch.testing.assert_close(A, rows.T @ rows / len(rows))


def test_the_fisher_of_rows_without_ignored_targets_is_that_of_the_real_ones_alone() -> None:
    torch.manual_seed(0)
    model, x, y = Tagger(flat), torch.randn(N, 6, 3), torch.randint(C, (N, 6))
    y[:, 3:] = -100
    other = Tagger(flat)
    other.load_state_dict(model.state_dict())
    spectra = []
    for tagger, inputs, targets in ((model, x, y), (other, x[:, :3].contiguous(), y[:, :3].contiguous())):
        net = kfac_fx.compile(tagger, (inputs[:2], targets[:2]))
        spectra.append(kfac_fx.fit_spectrum(net, [kfac_fx.Batch(inputs, targets)], mode="exact"))
    for key, values in spectra[0].eigenvalues().items():
        torch.testing.assert_close(
            values.flatten().sort().values, spectra[1].eigenvalues()[key].flatten().sort().values
        )


def test_rows_of_a_prompt_that_later_positions_read_stay() -> None:
    torch.manual_seed(0)
    model, x, y = Tagger(flat, mixed=True), torch.randn(N, 4, 3), torch.randint(C, (N, 4))
    y[:, [0, 3]] = -100  # a prompt, two tokens, and padding
    found = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x[:3], y[:3])), estimation_mode="exact")
    found.update_covariances(x, y)
    rows = torch.cat([x[:, :3], torch.ones(N, 3, 1)], -1).flatten(0, 1)
    A = found.blocks["layer.weight", "layer.bias"].factors["A"].value.squeeze(0)
    torch.testing.assert_close(A, rows.T @ rows / len(rows))


@pytest.mark.filterwarnings(TOLD)
def test_losses_that_ignore_different_targets_leave_no_row_out() -> None:
    torch.manual_seed(0)
    model = Tagger(lambda z, y: flat(z, y) + flat(z, F.pad(y, (0, 1), value=-100)[:, 1:]))
    x, y = torch.randn(N, 4, 3), torch.randint(C, (N, 4))
    y[:, 2:] = -100
    found = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x[:3], y[:3])), estimation_mode="exact")
    found.update_covariances(x, y)
    rows = torch.cat([x, torch.ones(N, 4, 1)], -1).flatten(0, 1)
    A = found.blocks["layer.weight", "layer.bias"].factors["A"].value.squeeze(0)
    torch.testing.assert_close(A, rows.T @ rows / len(rows))


def test_a_training_with_ignored_targets_has_the_factors_of_the_real_rows() -> None:
    torch.manual_seed(0)
    model, x, y = Tagger(flat), torch.randn(N, 6, 3), torch.randint(C, (N, 6))
    y[:, 2:] = -100
    net = kfac_fx.compile(model, (x[:3], y[:3]))
    optimizer = kfac_fx.KFAC(net)
    net(x, y).backward()
    optimizer.step()
    rows = torch.cat([x[:, :2], torch.ones(N, 2, 1)], -1).flatten(0, 1)
    A = optimizer.estimator.blocks["layer.weight", "layer.bias"].factors["A"].value.squeeze(0)
    torch.testing.assert_close(A, rows.T @ rows / len(rows))


class Words(nn.Module):
    """With a table of its own or a tied one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.layer(self.words(ids)))).flatten(0, 1), y.flatten())


@pairs(("tied", [False, True]), ("approximations", [None, {"*": "kron_out_diag"}]))
def test_ignored_targets_are_as_padding_that_is_named(tied: bool, approximations: Mapping[str, str] | None) -> None:
    torch.manual_seed(0)
    ids, y = torch.randint(1, 7, (N, 6)), torch.randint(7, (N, 6))
    padding = torch.arange(6) >= torch.randint(2, 6, (N, 1))
    ids[padding], y[padding] = 0, -100
    model, found = Words(tied), []
    for options in ({}, {"padding_mask": lambda ids, y: y != -100}):
        net = kfac_fx.compile(copy.deepcopy(model), (ids[:3], y[:3]), approximations=approximations, **options)
        found.append(kfac_fx.FisherEstimator(net, estimation_mode="exact"))
        found[-1].update_covariances(ids, y)
    for key, block in found[0].blocks.items():
        for name, factor in block.factors.items():
            torch.testing.assert_close(factor.value, found[1].blocks[key].factors[name].value)
    words = next(block for key, block in found[0].blocks.items() if key[0] == "words.weight")
    if not tied:
        counts = torch.bincount(ids[~padding], minlength=7) / (~padding).sum()
        A = words.factors["A"].value[0]
        torch.testing.assert_close(A if A.dim() == 1 else A.diagonal(), counts)


class InParts(Tagger):
    """Python reads a number between the layers, so no single graph holds the model."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.loss(self.head(h if float(h.detach().sum()) > -1e9 else -h), y)


@pytest.mark.parametrize("kind", ["handed over", "in parts"])
def test_rows_stay_in_A_where_the_graph_does_not_see_the_targets(kind: str) -> None:
    """G has the real rows alone, and `padding_mask` takes the others out of A."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 6, 3), torch.randint(C, (N, 6))
    y[:, 3:] = -100
    within = kind == "in parts"
    model = InParts(flat) if within else Tagger(lambda z, y: z)
    rows = torch.cat([x, torch.ones(N, 6, 1)], -1)
    masked: list[tuple[dict[str, Any], Tensor]] = [({"padding_mask": lambda x, y: y != -100}, rows[:, :3])]
    for options, seen in [({}, rows), *masked * within]:
        net = kfac_fx.compile(copy.deepcopy(model), (x[:4], y[:4]), loss=None if within else "categorical", **options)
        found = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        with nullcontext() if options else pytest.warns(UserWarning, match="50% of those of"):
            found.update_covariances(x, y, targets=None if within else y)
        block = found.blocks["layer.weight", "layer.bias"]
        flat_rows = seen.flatten(0, 1)
        A = flat_rows.T @ flat_rows / len(flat_rows)
        torch.testing.assert_close(block.factors["A"].value.squeeze(0), A)
        h = torch.tanh(model.layer(x[:, :3]))
        p = model.head(h).softmax(-1)
        back = model.head.weight * (1 - h.square()).unsqueeze(-2)  # [N, 3, C, 5]
        G = torch.einsum("ntca,ntcd,ntdb->ab", back, torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2), back)
        torch.testing.assert_close(block.factors["G"].value.squeeze(0), G.detach() / len(flat_rows))
