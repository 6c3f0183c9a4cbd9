"""Scores of training examples: by block, by position, of low rank, for measurements; against single gradients."""

from __future__ import annotations

import json
import pickle
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

import kfac_fx
from kfac_fx import Queries
from kfac_fx.estimator import queries as module
from kfac_fx.estimator.files import digest, metadata_of
from kfac_fx.recording.case_gradients import Cases, Counts
from tests.runtime.single_cases import T, Text, V, classifier, inner, of_each, of_examples, of_positions, spectrum_of

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def text() -> tuple[Text, Tensor, Tensor, kfac_fx.ModelSpectrum]:
    model, x, y = Text(), torch.randint(V, (5, T)), torch.randint(V, (5, T))
    return model, x, y, spectrum_of(model, x, y)


Fixture = tuple[Text, Tensor, Tensor, kfac_fx.ModelSpectrum]


def test_scores_of_blocks_add_up_to_the_score(text: Fixture) -> None:
    model, x, y, spectrum = text
    gradients = of_examples(model, x, y)
    directions = spectrum.multiply_inverse({name: g[:2] for name, g in gradients.items()})
    queries = spectrum.precondition((x[:2], y[:2]))
    by_block = queries.scores((x, y), by="block")
    for key, scores in by_block.items():
        expected = inner({n: directions[n] for n in key}, {n: gradients[n] for n in key})
        torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(queries.scores((x, y)), inner(directions, gradients))
    torch.testing.assert_close(torch.stack(list(by_block.values())).sum(0), queries.scores((x, y)))
    own = spectrum.self_scores((x, y), by="block")
    assert own.keys() == by_block.keys()
    assert repr(queries) == f"Queries(2 queries, {len(by_block)} blocks)"


def test_positions_add_up_to_the_score(text: Fixture) -> None:
    model, x, y, spectrum = text
    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(
        net, estimation_mode="empirical", variables=["up.weight", "up.bias", "down.weight", "down.bias", "words.weight"]
    )
    estimator.update_covariances(x, targets=y)
    queries = estimator.spectrum(damping=0.1).precondition((x[:2], y[:2]))
    scores = queries.scores((x, y), by="position")
    assert scores.shape == (2, 5, T)
    torch.testing.assert_close(scores.sum(-1), queries.scores((x, y)))
    rank = estimator.spectrum(damping=0.1).precondition((x[:2], y[:2]), rank=10).scores((x, y), by="position")
    torch.testing.assert_close(rank, scores)


def test_the_score_of_a_position_is_that_of_its_part_of_the_gradient(text: Fixture) -> None:
    model, x, y, spectrum = text
    part = spectrum.part(["words.weight", "up.weight", "up.bias"])
    gradients = of_examples(model, x[:2], y[:2])
    directions = part.multiply_inverse({name: gradients[name] for name in part.shapes})
    positions = {name: of_all.flatten(0, 1) for name, of_all in of_positions(model, x, y).items()}
    expected = inner(directions, positions).unflatten(1, x.shape)
    torch.testing.assert_close(part.precondition((x[:2], y[:2])).scores((x, y), by="position"), expected)


class Merged(nn.Module):
    """A layer whose rows are those of all examples and positions, so that an example takes a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x.view(-1, 3))).view(len(x), -1, 4)
        logits: Tensor = self.head(hidden.sum(1))
        return logits


def test_blocks_without_rows_of_examples_have_one_position_of_every_example() -> None:
    model, x, y = Merged(), torch.randn(5, 6, 3), torch.randint(2, (5,))
    spectrum = spectrum_of(model, x, y)
    for names in (["layer.weight", "layer.bias"], list(dict(model.named_parameters()))):
        queries = spectrum.part(names).precondition((x[:2], y[:2]))
        by_position, scores = queries.scores((x, y), by="position"), queries.scores((x, y))
        assert by_position.shape == (2, 5, 1)
        torch.testing.assert_close(by_position.sum(-1), scores)


class OfObject(nn.Module):
    """The examples are in an object that no graph takes, as those of a tokenizer and of a graph are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, data: Any) -> Tensor:
        logits: Tensor = self.net(data["x"] if isinstance(data, UserDict) else data.x)
        return logits


@pytest.mark.parametrize("holds", [lambda x: UserDict({"x": x}), lambda x: SimpleNamespace(x=x)])
def test_examples_are_counted_in_an_object_that_holds_tensors(holds: Callable[[Tensor], Any]) -> None:
    model, x, y = OfObject(), torch.randn(5, 3), torch.randint(2, (5,))
    batch = kfac_fx.Batch(holds(x), targets=y)
    net = kfac_fx.compile(model, batch.args, loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [batch], case="row").at(scale=0.0, damping=1.0)
    losses = F.cross_entropy(model(*batch.args), y, reduction="none")
    each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    gradients = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
    torch.testing.assert_close(spectrum.self_scores(batch), gradients.square().sum(1))
    torch.testing.assert_close(spectrum.precondition(batch).scores(batch), gradients @ gradients.T)
    assert spectrum.functional_variance(batch).shape == (5, 2, 2)


def test_blocks_with_different_positions_have_no_sum_by_position() -> None:
    model, x, y = classifier(), torch.randn(4, 2, 3, 3), torch.randint(3, (4,))
    queries = spectrum_of(model, x, y).precondition((x, y))
    with pytest.raises(
        ValueError, match=r"(?s)different numbers of positions.*\n +1  3\.weight.*\n +16  0\.weight.*spectrum\.part"
    ):
        queries.scores((x, y), by="position")
    with pytest.raises(ValueError, match=r"by 'blocks' is none of 'sum', 'block', 'position'\. Did you mean 'block'"):
        queries.scores((x, y), by="blocks")


def test_the_full_rank_changes_nothing_and_a_low_rank_is_the_nearest(text: Fixture) -> None:
    _, x, y, spectrum = text
    queries, full, low = (spectrum.precondition((x[:2], y[:2]), rank=rank) for rank in (None, 100, 1))
    torch.testing.assert_close(full.scores((x, y)), queries.scores((x, y)))
    matrices = queries.matrices["up.weight", "up.bias"]
    assert isinstance(matrices, Tensor)
    u, s, vh = torch.linalg.svd(matrices[1, 0])
    truncated = low.matrices["up.weight", "up.bias"].dense()  # type: ignore[union-attr]
    torch.testing.assert_close(truncated[1, 0], s[0] * torch.outer(u[:, 0], vh[0]))
    key = ("up.weight", "up.bias")
    expected = spectrum.precondition((x[:2], y[:2]))
    dense = {**expected.matrices, key: truncated}
    torch.testing.assert_close(
        low.scores((x, y), by="block")[key],
        type(expected)(dense, expected.record).scores((x, y), by="block")[key],
    )


def test_a_measurement_takes_the_place_of_the_loss(text: Fixture) -> None:
    model, x, y, spectrum = text
    parameters = dict(model.named_parameters())
    last = of_each(2, lambda n: model(x[n : n + 1])[0, -1, 3], parameters)
    gradients = of_examples(model, x, y)
    queries = spectrum.precondition(x[:2], measurement=lambda logits: logits[:, -1, 3])
    torch.testing.assert_close(queries.scores((x, y)), inner(spectrum.multiply_inverse(last), gradients))
    squared = of_each(5, lambda n: model(x[n : n + 1])[0].square().sum(), parameters)
    scores = queries.scores(x, measurement=lambda logits: logits.square().sum((1, 2)))
    torch.testing.assert_close(scores, inner(spectrum.multiply_inverse(last), squared))
    own = spectrum.self_scores(
        (x, y), measurement=lambda logits, labels: logits.square().sum((1, 2)) + 0 * labels[:, 0]
    )
    torch.testing.assert_close(own, inner(spectrum.multiply_inverse(squared), squared).diagonal())


def test_examples_without_a_target_and_with_nan_are_told() -> None:
    """Their scores are zero, and NaN, which topk takes for the largest number."""
    model, x, y = classifier(), torch.randn(6, 2, 3, 3), torch.randint(3, (6,))
    spectrum, bad, none = spectrum_of(model, x, y), x.clone(), torch.full_like(y, -100)
    queries = spectrum.precondition((x, y))
    bad[4] = torch.nan
    for by in ("sum", "block"):
        with pytest.warns(UserWarning, match=r"the scores of example 4 of this batch are not finite, and topk and"):
            queries.scores((bad, y), by=by)
        with pytest.warns(UserWarning, match=r"the scores of example 4 of this batch are not finite, and topk and"):
            spectrum.self_scores((bad, y), by=by)
    with pytest.warns(UserWarning, match=r"the scores of examples 4 and 16 of `batches` are not finite"):
        queries.scores_of_all([(bad, y), (x, y), (bad, y)])
    with pytest.warns(UserWarning, match=r"the gradients of query 4 of this batch are not finite, and so are all"):
        with_nan = spectrum.precondition((bad, y))
    with_nan.scores((x, y))  # which was told
    ignored = r"targets that are all ignored, as those of -100 are"
    with pytest.warns(UserWarning, match=rf"queries 0, 1, 2, 3, 4 and 1 more of this batch are zero.*{ignored}"):
        spectrum.precondition((x, none))
    with pytest.warns(UserWarning, match=rf"the gradients of queries 1 and 2 of this batch are zero, and.*{ignored}"):
        spectrum.precondition((x, torch.where((torch.arange(6) - 1) // 2 == 0, none, y)))
    with pytest.warns(UserWarning, match=rf"all scores of this batch are zero, because the gradients.*{ignored}"):
        queries.scores((x, none))
    queries.scores((x, torch.where(torch.arange(6) < 3, none, y)))  # some examples are padding alone


class WithBoxes(nn.Module):
    """Its loss has a term that is no log-likelihood, on a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.boxes = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return F.cross_entropy(self.classes(h), y) + F.smooth_l1_loss(self.boxes(h), places)


def test_scores_of_a_loss_in_forward_are_those_of_all_its_terms_without_example_inputs_too() -> None:
    inputs = torch.randn(6, 4), torch.randint(3, (6,)), torch.randn(6, 2)
    model, batch = WithBoxes(), kfac_fx.Batch(*inputs)
    learned = [*model.body.parameters(), *model.classes.parameters()]  # those with a block
    gradients = torch.stack([
        torch.cat([g.flatten() for g in torch.autograd.grad(model(*(value[n : n + 1] for value in inputs)), learned)])
        for n in range(6)
    ])  # fmt: skip
    for examples in (None, inputs):
        net = kfac_fx.compile(model, examples)
        with pytest.warns(UserWarning, match=r"no loss that is known depends on boxes.\{weight, bias\}"):
            spectrum = kfac_fx.fit_spectrum(net, [batch], damping=1.0)
        queries = spectrum.at(damping=1e12).precondition(batch)
        torch.testing.assert_close(1e12 * queries.scores(batch), gradients @ gradients.T)


MIXED: dict[str, Any] = {
    "a mean": lambda out, y: out[:, 0] - out[:, 0].mean(),
    "pairs": lambda out, y: (out @ out.T).sum(1),
    "another order": lambda out, y: out[:, 0].flip(0),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_a_measurement_may_mix_the_examples_of_a_batch_after_one_that_does_not(mixed: Any) -> None:
    model, x, y = classifier(), torch.randn(3, 2, 3, 3), torch.randint(3, (3,))
    spectrum = spectrum_of(model, x, y).at(damping=1e12)
    spectrum.precondition((x, y), measurement=lambda out, y: out[:, 0])
    scores = 1e12 * spectrum.precondition((x, y), measurement=mixed).scores((x, y), measurement=mixed)
    flat = torch.stack([
        torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])
        for value in mixed(model(x), y)
    ])  # fmt: skip
    torch.testing.assert_close(scores, flat @ flat.T)


def test_a_scale_multiplies_the_fisher_and_not_the_damping(text: Fixture) -> None:
    model, x, y, spectrum = text
    gradients, many = of_examples(model, x, y), spectrum.at(scale=40.0, damping=2.0)
    expected = inner(many.multiply_inverse(gradients), gradients)
    torch.testing.assert_close(many.precondition((x, y)).scores((x, y)), expected)


def test_queries_without_graph_keep_none(text: Fixture) -> None:
    _, x, y, spectrum = text
    assert not spectrum.precondition((x, y)).scores((x, y)).requires_grad


def test_scores_of_a_loader_are_written_and_resumed(
    text: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x, y, spectrum = text
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    queries = spectrum.precondition((x[:2], y[:2]))
    expected = queries.scores((x, y))
    shown: list[tuple[int, str]] = []
    tracked = module.tracked

    def watched(items: Any, total: int, what: str) -> Any:
        shown.append((total, what))
        return tracked(items, total, what)

    monkeypatch.setattr(module, "tracked", watched)
    torch.testing.assert_close(queries.scores_of_all(loader), expected)
    assert shown == [(len(loader), "scores of 2 queries")] and len(loader) == 3
    done: list[int] = []
    computed = Queries.computed

    def killed(self: Queries, batch: Any, *options: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return computed(self, batch, *options)

    monkeypatch.setattr(Queries, "computed", killed)
    with pytest.raises(KeyboardInterrupt):
        queries.scores_of_all(loader, folder=tmp_path)
    done.pop()  # room for the last batch alone
    torch.testing.assert_close(queries.scores_of_all(loader, folder=tmp_path), expected)
    other = spectrum.precondition((x[1:3], y[1:3]))
    with pytest.raises(ValueError, match=r"holds something else:"):
        other.scores_of_all(loader, folder=tmp_path)
    with pytest.raises(ValueError, match=r"`batches` has no batches"):
        other.scores_of_all([])


def test_loaders_that_shuffle_have_no_scores(text: Fixture) -> None:
    _, x, y, spectrum = text
    data, random = TensorDataset(x, y), RandomSampler(x)
    queries = spectrum.precondition((x[:2], y[:2]))
    for shuffled in (
        DataLoader(data, shuffle=True),
        DataLoader(data, sampler=random),
        DataLoader(data, batch_sampler=BatchSampler(random, 2, drop_last=False)),
    ):
        with pytest.raises(ValueError, match=r"a RandomSampler, and its scores would have no order: .* shuffle=False"):
            queries.scores_of_all(shuffled)
    with pytest.raises(ValueError, match=r"the DataLoader has a DistributedSampler, and its scores"):
        queries.scores_of_all(DataLoader(data, sampler=DistributedSampler(x, 1, 0, shuffle=True)))
    part = DataLoader(data, sampler=DistributedSampler(x, 2, 1, shuffle=False))
    torch.testing.assert_close(queries.scores_of_all(part), queries.scores((x, y))[:, [1, 3, 0]])


def test_scores_of_other_batches_or_measurements_are_not_taken_from_a_folder(text: Fixture, tmp_path: Path) -> None:
    _, x, y, spectrum = text
    queries = spectrum.precondition((x[:2], y[:2]))
    queries.scores_of_all([(x[:3], y[:3]), (x[3:], y[3:])], folder=tmp_path)
    for other in ((x[3:], y[:2]), (x[2:4], y[3:])):
        with pytest.raises(ValueError, match=r"scores-000001.safetensors' has the scores of another batch: pass"):
            queries.scores_of_all([(x[:3], y[:3]), other], folder=tmp_path)
    with pytest.raises(ValueError, match=r"(?s)holds something else:.* measurement  is None in the folder, and '"):
        queries.scores_of_all([x[:3], x[3:]], folder=tmp_path, measurement=lambda logits: logits[:, 0, 0])


def test_scores_come_in_the_order_of_the_examples() -> None:
    """A use of fewer examples may hand over the later ones first."""
    gradients = torch.randn(5, 1, 2, 3)

    def record(batch: Any, add: Any, measurement: Any) -> Counts:
        for first, stop in ((3, 5), (0, 3)):
            add(("w",), Cases((1, 2, 3), whole=gradients[first:stop], first=first))
        return Counts(5, 5)

    matrices = torch.randn(2, 1, 2, 3)
    expected = torch.einsum("qgoi,ngoi->qn", matrices, gradients)
    torch.testing.assert_close(Queries({("w",): matrices}, record).scores(None), expected)


def test_scores_of_other_weights_are_not_taken_from_a_folder(text: Fixture, tmp_path: Path) -> None:
    model, x, y, spectrum = text
    queries = spectrum.precondition((x[:2], y[:2]))
    queries.scores_of_all([(x, y)], folder=tmp_path)
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(ValueError, match=r"(?s)holds something else:.*made of: weights  is '\w+' in the folder, and"):
        queries.scores_of_all([(x, y)], folder=tmp_path)


def test_a_folder_of_scores_of_format_1_is_read_with_a_warning(text: Fixture, tmp_path: Path) -> None:
    _, x, y, spectrum = text
    queries = spectrum.precondition((x[:2], y[:2]))
    expected = queries.scores_of_all([(x, y)], folder=tmp_path)
    norms = {",".join(key): float(queries.like(key).norm()) for key in queries.matrices}
    manifest = {"format": 1, "queries": 2, "norms": norms, "measurement": None}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "scores-000000.safetensors"
    save_file({"scores": 2 * expected}, path, {"batch": metadata_of(path)["batch"]})
    with pytest.warns(UserWarning, match="without digests"):
        torch.testing.assert_close(queries.scores_of_all([(x, y)], folder=tmp_path), 2 * expected)
    with pytest.raises(ValueError, match="holds something else"):
        spectrum.precondition((x[1:3], y[1:3])).scores_of_all([(x, y)], folder=tmp_path)


# --- vectors as queries -----------------------------------------------------------------------------------------------


def test_a_vector_scores_an_example_by_its_product_with_the_gradient(text: Fixture) -> None:
    model, x, y, spectrum = text
    gradients = of_examples(model, x, y)
    vector = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    queries = spectrum.queries(vector)
    assert len(queries) == 3
    torch.testing.assert_close(queries.scores((x, y)), inner(vector, gradients))
    one = spectrum.queries({name: tensor[1] for name, tensor in vector.items()})
    torch.testing.assert_close(one.scores((x, y)), inner(vector, gradients)[1:2])
    torch.testing.assert_close(spectrum.queries(vector, rank=100).scores((x, y)), inner(vector, gradients))
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"missing  words\.weight"):
        spectrum.queries({name: tensor for name, tensor in vector.items() if name != "words.weight"})
    with pytest.raises(ValueError, match="rank is 0; it must be a whole number, at least 1"):
        spectrum.queries(vector, rank=0)


def test_an_aggregated_gradient_scores_as_the_sum_of_its_queries(text: Fixture) -> None:
    model, x, y, spectrum = text
    total = {name: gradient[:3].sum(0) for name, gradient in of_examples(model, x, y).items()}
    aggregated = spectrum.queries(spectrum.multiply_inverse(total)).scores((x, y))
    torch.testing.assert_close(aggregated, spectrum.precondition((x[:3], y[:3])).scores((x, y)).sum(0, keepdim=True))


@pytest.mark.parametrize("rank", [None, 1])
def test_queries_come_back_from_a_folder(rank: int | None, text: Fixture, tmp_path: Path) -> None:
    model, x, y, spectrum = text
    queries = spectrum.precondition((x[:2], y[:2]), rank=rank)
    kfac_fx.save_queries(queries, tmp_path)
    again = kfac_fx.load_queries(spectrum.net, tmp_path)
    torch.testing.assert_close(again.scores((x, y)), queries.scores((x, y)))  # other strides, other rounding
    assert digest(again.plain()) == digest(queries.plain()) and len(again) == 2
    again.scores_of_all([(x, y)], folder=tmp_path / "scores")
    other = spectrum.precondition((x[2:5], y[2:5]))
    kfac_fx.save_queries(other, tmp_path)
    assert digest(kfac_fx.load_queries(spectrum.net, tmp_path).plain()) == digest(other.plain())
    assert len(list(tmp_path.glob("block*"))) == len(queries.matrices)
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(ValueError, match="has queries of other weights"):
        kfac_fx.load_queries(spectrum.net, tmp_path)
    with pytest.warns(UserWarning, match=r"(?s)has queries of other weights.*any_weights=True"):
        kfac_fx.load_queries(spectrum.net, tmp_path, any_weights=True)


def test_queries_of_another_model_are_refused(text: Fixture, tmp_path: Path) -> None:
    _, x, y, spectrum = text
    queries = spectrum.precondition((x[:2], y[:2]))
    kfac_fx.save_queries(queries, tmp_path)
    net = kfac_fx.compile(classifier(), (torch.randn(4, 2, 3, 3),), loss="categorical")
    with pytest.raises(ValueError, match=r"has queries of blocks that this Sequential has not: words\.weight"):
        kfac_fx.load_queries(net, tmp_path)
    with pytest.raises(ValueError, match="is not of queries"):
        kfac_fx.save_spectrum(spectrum, tmp_path / "spectrum")
        kfac_fx.load_queries(spectrum.net, tmp_path / "spectrum")
    with pytest.raises(ValueError, match="is not of a spectrum"):
        kfac_fx.load_spectrum(spectrum.net, tmp_path)
    with pytest.raises(ValueError, match="made by hand know no compiled module"):
        kfac_fx.save_queries(Queries(queries.matrices, queries.record), tmp_path)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*save_queries\(queries, folder\)"):
        pickle.dumps(queries)
