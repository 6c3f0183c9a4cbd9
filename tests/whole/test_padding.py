"""Padding masks: a padded batch has the statistics of its sequences one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, FisherEstimator, LayerCollection, RegistrationError
from kfac_fx.linalg.vectors import Flat
from kfac_fx.losses import Categorical, Normal
from kfac_fx.optim.forwards import MicroBatch
from kfac_fx.recording.model_checks import refuse_misfit_of_function
from tests.tables import pairs
from tests.whole.padded import LENGTHS, MASK, Judge, Small, Translator, batch, masked, nets

Sums = dict[tuple[tuple[str, ...], str], Tensor]
pytestmark = pytest.mark.usefixtures("float64")


def sums(moments: Any) -> Sums:
    """Additive over batches."""
    return {
        (key, "outer" if name == "per_case" else name): value.mT @ value if name == "per_case" else value
        for key, statistic in moments.statistics.items()
        for name, value in statistic.items()
    }


def alone(ids: Tensor, targets: Tensor) -> Iterator[tuple[tuple[Tensor], dict[str, Any], Tensor]]:
    """Every sequence without padding; twice, since torch.export takes a size of 1 as fixed."""
    for sequence, target, length in zip(ids, targets, LENGTHS, strict=True):
        twice = sequence[:length].repeat(2, 1)
        labels = target[:length].repeat(2, 1) if target.dim() else target.repeat(2)
        yield (twice,), {"attention_mask": torch.ones_like(twice)}, labels


def one_by_one(net: kfac_fx.CompiledModule, ids: Tensor, targets: Tensor, mode: str = "empirical") -> tuple[Sums, int]:
    total: Sums = {}
    cases = 0
    for args, kwargs, labels in alone(ids, targets):
        moments = net.record(args, kwargs, mode=mode, targets=labels)
        cases += moments.cases // 2
        for key, value in sums(moments).items():
            total[key] = total.get(key, 0) + value / 2
    return total, cases


def same(found: Sums, expected: Sums) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-10, atol=1e-12, msg=lambda said, key=key: f"{key}: {said}"
        )


@pairs(("mode", ["empirical", "exact"]), ("kind", [Translator, Judge]))
def test_a_padded_batch_is_its_sequences_one_by_one(kind: type[Translator], mode: str) -> None:
    """Rows, gradient rows, how many there are, the bias column, gradients of single cases, and the number of cases."""
    (net, plain), (ids, kwargs) = nets(kind), batch()
    targets = torch.randint(5, (3, 5) if kind is Translator else (3,))
    moments = net.record((ids,), kwargs, mode=mode, targets=targets)
    expected, cases = one_by_one(plain, ids, targets, mode)
    assert moments.cases == cases == (10 if kind is Translator else 3)
    same(sums(moments), expected)
    assert moments.statistics["key.weight",]["count"] == 10
    assert moments.statistics["heads.weight", "heads.bias"]["count"] == 20
    assert len(net.program.unmasked) == (0 if kind is Translator else 1)


def test_what_is_in_the_padding_does_not_matter() -> None:
    """Not the ids there, not the sampled targets there."""
    (net, _), (ids, kwargs) = nets(Translator), batch()
    other = torch.where(MASK, ids, torch.randint(1, 9, (3, 5)))
    assert not torch.equal(ids, other)
    ours, theirs = (net.record((batch,), kwargs, generator=torch.Generator().manual_seed(1)) for batch in (ids, other))
    same(sums(ours), sums(theirs))


def test_without_a_mask_padding_is_in_the_factors() -> None:
    (_, plain), (ids, kwargs) = nets(Translator), batch()
    moments = plain.record((ids,), kwargs)
    assert moments.cases == 15 and moments.statistics["key.weight",]["count"] == 15


# --- ways to run ----------------------------------------------------------------------------------------------------


def test_a_ride_leaves_padding_out() -> None:
    (net, plain), (ids, kwargs) = nets(Translator), batch()
    targets = torch.randint(5, (3, 5))
    outputs, pending = net.record_in_training((ids,), kwargs)
    F.cross_entropy(outputs.flatten(0, 1), torch.where(MASK, targets, -100).flatten()).backward()
    net.zero_grad()
    expected, cases = one_by_one(plain, ids, targets)
    assert pending.cases == cases == 10
    same(sums(pending.moments()), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_masks_compile_into_one_graph() -> None:
    model, (ids, kwargs) = Small(), batch()
    eager, other = masked(model, ids, kwargs), masked(model, ids, kwargs, backend="aot_eager")
    assert not eager.program.unmasked
    ours, theirs = (net.record((ids,), kwargs, generator=torch.Generator().manual_seed(1)) for net in (eager, other))
    same(sums(ours), sums(theirs))


def test_the_quadratic_model_of_the_optimizer_has_no_padding() -> None:
    (net, plain), (ids, kwargs) = nets(Translator), batch()
    v = {name: torch.randn_like(parameter) for name, parameter in net.named_parameters()}
    products = []  # averaged by cases over the calls
    for module, calls in ((net, [((ids,), kwargs)]), (plain, [(args, others) for args, others, _ in alone(ids, ids)])):
        state = KFAC(module, momentum_type="qmodel", momentum=None, damping=0.1)._step_state
        state.forwards.seen.batches = [MicroBatch(call=call) for call in calls]
        flat = Flat({name: tensor.shape for name, tensor in v.items()})
        products.append(state.exact_products(cast(Any, SimpleNamespace(everywhere=flat.parts)), [flat.joined(v)]))
        module.detach()
    torch.testing.assert_close(*products, rtol=1e-10, atol=0)


# --- ways to say it -------------------------------------------------------------------------------------------------


def test_a_function_of_the_inputs_is_a_mask() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor, *, padding: Tensor | None = None) -> Tensor:
            return self.out(torch.tanh(self.table(ids)))

    model, ids = Words(), torch.where(MASK, torch.randint(1, 9, (3, 5)), 0)
    said = {
        "ids": ((), lambda ids: ids != 0),
        "padding": ((("padding", ~MASK),), lambda ids, padding: ~padding),
        "lengths": ((), lambda ids: torch.arange(ids.shape[1]) < (ids != 0).sum(1, keepdim=True)),
    }
    for kwargs, function in said.values():
        net = kfac_fx.compile(model, (ids,), dict(kwargs), loss="categorical", padding_mask=function)
        assert net.record((ids,), dict(kwargs)).cases == 10
        shorter = net.record((ids[:2],), {name: value[:2] for name, value in kwargs})
        assert shorter.cases == 8 and shorter.statistics["table.weight",]["count"] == 8


class Lengths(nn.Module):
    """A head on features of the positions; of the lengths, forward reads at most the shape."""

    def __init__(self, features: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.features, self.head, self.tied = features, nn.Linear(6, 5), tied

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        features = self.features(x)
        out: Tensor = self.head(features[0] if isinstance(features, tuple) else features)
        return out + 0 * lengths[:, None, None] if self.tied else out


def of_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) < lengths[:, None]


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 6), lambda: nn.GRU(4, 6, batch_first=True)])
def test_lengths_that_forward_does_not_read_make_a_mask(make: Callable[[], nn.Module]) -> None:
    """The capture has a symbol for their number and another one for the cases."""
    model = Lengths(make())
    both = Lengths(model.features, tied=True)
    both.head = model.head
    x, lengths = torch.randn(3, 5, 4), torch.tensor(LENGTHS)
    free, tied = (kfac_fx.compile(m, (x, lengths), loss="categorical", padding_mask=of_lengths) for m in (model, both))
    assert not free.program.unmasked and free.report.to_dict()["fallbacks"] == []
    x, lengths = torch.randn(4, 6, 4), torch.tensor([3, 6, 1, 4])
    here, expected = (net.record((x, lengths), {}, mode="exact") for net in (free, tied))
    assert here.cases == expected.cases == 14
    assert here.statistics["head.weight", "head.bias"]["count"] == 14
    same(sums(here), sums(expected))


def test_a_mask_takes_the_length_of_a_tensor() -> None:
    """Also of the one that was built in the function. Later batches have other lengths."""
    x, lengths = torch.randn(3, 5, 4), torch.tensor(LENGTHS)

    def mask(x: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(x.shape[1]).expand(len(x), -1) < lengths[:, None]
        return real & (torch.arange(len(x[0]) + len(lengths))[: x.shape[1]] < lengths[:, None])

    net = kfac_fx.compile(Lengths(nn.Linear(4, 6)), (x, lengths), loss="categorical", padding_mask=mask)
    assert net.record((x, lengths), {}).cases == 10
    assert net.record((torch.randn(2, 7, 4), torch.tensor([7, 1])), {}).cases == 8
    assert len(net.captures.recorders) == 1 and "len" not in globals()


def of_shifted(ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]) < lengths[:, None] - 1


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda ids, lengths: (ids != 0) & F.pad(ids[:, 1:] != 0, (0, 1), value=False), of_shifted),
        (lambda ids, lengths: F.pad((ids != 0).long(), (-1, 1)), of_shifted),
        (lambda ids, lengths: F.pad(ids, (0, 1)).unfold(1, 2, 1).amin(-1) != 0, of_shifted),
        (lambda ids, lengths: F.pad((ids != 0).narrow(1, 1, ids.shape[1] - 1), (0, 1)), of_shifted),
        (lambda ids, lengths: torch.ones(ids.shape[0], ids.shape[1]).cumsum(1) < lengths[:, None], of_shifted),
        (lambda ids, lengths: torch.sort(ids != 0, 1, descending=True).values, of_lengths),
        (lambda ids, lengths: torch.vmap(lambda row: row != 0)(ids), of_lengths),
        (lambda ids, lengths: (torch.arange(ids.shape[1]) < lengths[:, None]) & (ids != 0), of_lengths),
    ],
)
def test_every_operation_of_a_mask_keeps_the_cases(
    mask: Callable[[Tensor, Tensor], Tensor], expected: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Numbers that torch finds in the trace of the mask, or a symbol that it finds to be another one, would make all
    sequences one example."""
    model = Lengths(nn.Embedding(9, 4))
    model.head = nn.Linear(4, 5)
    ids, lengths = torch.where(MASK, torch.randint(1, 9, (3, 5)), 0), torch.tensor(LENGTHS)
    net = kfac_fx.compile(model, (ids, lengths), loss="categorical", padding_mask=mask)
    assert net.captures.all[0].emitted.examples([ids, lengths]) == 3
    longer = F.pad(ids[:2], (0, 2)), lengths[:2]
    for inputs in ((ids, lengths), longer):
        assert net.record(inputs, {}).cases == int(expected(*inputs).sum())
    assert len(net.captures.recorders) == 1


@pytest.mark.parametrize("mask", [lambda ids: torch.ones(int(ids.shape[0]), 5) * ids, lambda ids: MASK & (ids != 0)])
def test_a_mask_of_one_number_of_cases_is_refused(mask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RegistrationError) as refusal:
        kfac_fx.compile(Small(), (torch.ones(3, 5).long(),), loss="categorical", padding_mask=mask)
    assert str(refusal.value) == (
        "padding_mask holds for batches of 3 cases alone: it reads their number as that of the example, by "
        "int(x.shape[0]) or len(x), or a tensor with a row for each of them that is no argument of forward.\n"
        "Write x.shape[0] for their number, and let forward take each tensor that has a row for each case."
    )


@pytest.mark.parametrize("number", [1, 3, 5])
def test_other_lengths_than_cases_are_refused(number: int) -> None:
    """One length would be that of every case by broadcasting."""
    x, lengths = torch.randn(3, 5, 4), torch.tensor(LENGTHS)
    net = kfac_fx.compile(Lengths(nn.Linear(4, 6)), (x, lengths), loss="categorical", padding_mask=of_lengths)
    x, lengths = torch.randn(4, 5, 4), torch.ones(number, dtype=torch.long)
    text = (
        rf"^padding_mask has shape \[{number}, 5\], and dimension 0 of an output \[4, 5, \d\] counts the cases; "
        r"with the first inputs the mask had as many\.\n"
        r"Pass forward a mask, or the lengths from which padding_mask computes it, of every case of the batch\.$"
    )
    calls: list[Callable[[], Any]] = [
        lambda: net.record((x, lengths), {}),
        lambda: net.fisher_product(x, lengths)({name: torch.ones_like(p) for name, p in net.named_parameters()}),
        lambda: (net(x, lengths).logsumexp(-1).mean().backward(), optimizer.step()),
    ]
    optimizer = KFAC(net)
    for call in calls:
        with pytest.raises(kfac_fx.ModelChangedError, match=text):
            call()


def test_a_model_without_example_inputs_is_masked_from_its_first_forward() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5))
    net = kfac_fx.compile(model, loss="categorical", padding_mask=lambda ids: ids > 0)
    ids = torch.where(MASK, 1, 0)
    assert net.record((ids,), {}).cases == 10


def test_a_call_without_the_argument_has_no_padding() -> None:
    ids, kwargs = batch()
    net = masked(Small(), ids, kwargs)
    assert net.record((ids,), kwargs).cases == 10
    assert net.record((ids,), {}).cases == 15


def test_a_collection_takes_a_node_of_its_graph() -> None:
    ids = torch.where(MASK, torch.randint(1, 9, (3, 5)), 0)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids) * (ids != 0).unsqueeze(-1))

    lc = LayerCollection(kfac_fx.capture(Words(), (ids,)))
    lc.define_padding_mask("ne")
    lc.register_fully_connected(("out.weight", "out.bias"), lc.inputs_of("out"), lc.outputs_of("out"))
    lc.register_categorical_predictive_distribution(lc.outputs_of("out"))
    lc.auto_register_layers()
    est = FisherEstimator(lc)
    est.update_covariances(ids)
    assert {key: float(block.factors["positions"].value) for key, block in est.blocks.items()} == {
        ("out.weight", "out.bias"): 1.0, ("table.weight",): 1.0,
    }  # fmt: skip
    seen = est.blocks["table.weight",].factors["A"].value
    torch.testing.assert_close(seen[0], torch.bincount(ids[MASK], minlength=9).double() / 10)
    assert "padding   ne masks 2 of 2 uses" in str(est.net.report)


def test_a_loss_that_is_a_function_counts_what_is_real_in_it() -> None:
    """Shifted by one, as for the next word."""
    model, (ids, kwargs) = Small(), batch()
    net = kfac_fx.compile(
        model,
        (ids,),
        kwargs,
        loss=lambda out: Categorical(out[:, :-1].log_softmax(-1)),
        padding_mask="attention_mask",
    )
    assert net.record((ids,), kwargs).cases == 3 + 4 + 2
    assert net.record((ids,), kwargs, mode="exact").cases == 9


# --- errors ---------------------------------------------------------------------------------------------------------


X = torch.ones(2, 3)


def test_a_mask_of_a_call_by_names_is_written_with_these_names() -> None:
    with pytest.raises(RegistrationError, match=r"Write padding_mask=lambda input_ids, \*args, \*\*kwargs: \.\.\."):
        refuse_misfit_of_function(
            "padding_mask",
            lambda ids: ids != 0,
            (),
            {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)},
        )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "attention_masks",
            "padding_mask='attention_masks' is no argument of Small.forward. Did you mean 'attention_mask'?",
        ),
        (lambda ids, attention_mask: 0 if ids.sum() > 3 else 1, "padding_mask cannot be traced: "),
        (
            lambda ids: ids != 0,
            "padding_mask is called with all arguments that forward gets, and does not take those of this call: got an "
            "unexpected keyword argument 'attention_mask'. Write padding_mask=lambda ids, *args, **kwargs: ..., with a "
            "default for an argument that a call leaves out.",
        ),
        (
            partial(lambda ids, attention_mask: torch.ones(len(ids), 5) * attention_mask),
            "padding_mask holds for batches of 3 cases alone: it reads their number as that of the example",
        ),
        (lambda ids, attention_mask: torch.ones(3, 5), "padding_mask returned a "),
        (lambda ids, attention_mask: attention_mask[:, None], "padding_mask has shape ["),
    ],
)
def test_what_is_no_mask_is_refused(said: Any, text: str) -> None:
    ids, kwargs = batch()
    with pytest.raises(RegistrationError) as failure:
        kfac_fx.compile(Small(), (ids,), kwargs, loss="categorical", padding_mask=said)
    assert str(failure.value).startswith(text)
    assert isinstance(failure.value, ValueError)


def test_a_node_without_a_shape_or_of_parameters_is_no_mask() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    lc = LayerCollection(kfac_fx.capture(model))
    with pytest.raises(RegistrationError, match="has no shape in this graph: capture the model with example inputs"):
        lc.define_padding_mask("tanh")
    lc = LayerCollection(kfac_fx.capture(model, (torch.randn(3, 4),)))
    with pytest.raises(RegistrationError, match="the padding mask at tanh.* must be computed from inputs alone"):
        lc.define_padding_mask("tanh")


def test_a_collection_has_its_own_mask() -> None:
    ids, kwargs = batch()
    lc = LayerCollection(kfac_fx.capture(Small(), (ids,), kwargs))
    with pytest.raises(
        RegistrationError,
        match="with a LayerCollection, do not pass padding_mask: set",
    ):
        kfac_fx.compile(lc, padding_mask="attention_mask")


class Cached(nn.Module):
    """As GPT-2 with a cache: the length of its mask is that of the keys, which nothing ties to that of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.key, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        keys = torch.cat([x.new_empty(x.shape[0], 0, 4), self.key(x)], 1)
        scores = (x @ keys.mT) + attention_mask.view(attention_mask.shape[0], 1, -1).log()
        return F.cross_entropy(self.out(scores.softmax(-1) @ keys).flatten(0, 1), labels.reshape(-1))


@pytest.mark.parametrize("cases", [3, 5])
def test_a_mask_is_as_long_as_the_positions_of_the_uses(cases: int) -> None:
    ids = torch.arange(cases * 5).view(cases, 5) % 9
    mask = torch.ones(cases, 5)
    mask[0, 3:] = 0
    net = kfac_fx.compile(Cached(), (ids, mask, ids % 5), padding_mask="attention_mask")
    assert not net.program.unmasked
    moments = net.record((ids, mask, ids % 5), {})
    assert float(moments.statistics["key.weight", "key.bias"]["count"]) == float(mask.sum())


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc(x)


def test_a_mask_that_fits_no_use_is_an_error() -> None:
    with pytest.raises(RegistrationError, match=r"padding_mask fits none of the 1 use, so padding") as e:
        kfac_fx.compile(Other(), (torch.randn(3, 7, 4), torch.ones(3, 5)), loss="categorical", padding_mask="mask")
    assert "linear(fc.weight, fc.bias) at linear" in str(e.value) and "leave padding_mask out" in str(e.value)


def test_rows_behind_a_mean_over_positions_have_no_padding_to_warn_of() -> None:
    """Warnings are errors here."""
    assert len(nets(Judge)[0].program.unmasked) == 1 and not nets(Judge)[0].program.padded


class WithLoss(Translator):
    def forward(self, ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(ids, attention_mask)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pairs(("in_forward", [False, True]), ("mode", ["gradients", "empirical"]))
def test_an_inverted_mask_is_told_with_what_to_write(in_forward: bool, mode: str) -> None:
    """There is no saturated softmax. In a loss of forward no case is left, so that the step changes nothing."""
    ids, kwargs = batch()
    targets = torch.where(MASK, torch.randint(5, MASK.shape), -100)
    model = WithLoss() if in_forward else Translator()
    args = (ids, kwargs["attention_mask"], targets) if in_forward else (ids, kwargs["attention_mask"])
    for mask, told in ((lambda ids, attention_mask, *_: attention_mask == 0, True), ("attention_mask", False)):
        net = kfac_fx.compile(model, args, loss=None if in_forward else "categorical", padding_mask=cast(Any, mask))
        optimizer = KFAC(net, estimation_mode=mode)
        value = net(*args) if in_forward else F.cross_entropy(net(*args).flatten(0, 1), targets.flatten())
        value.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
        assert len(texts) == told * (1 + in_forward) and all("no statistics came" in text for text in texts[1:]), texts
        if told:
            assert "the padding mask seems to be inverted" in texts[0] and "at the 5 positions" in texts[0]
            assert "padding_mask=lambda ids, pad: ~pad" in texts[0] and "saturated" not in texts[0]


class Logits(nn.Module):
    """Logits of positions, or a function of them."""

    def __init__(self, of_logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.head, self.of_logits = nn.Embedding(7, 4), nn.Linear(4, 6), of_logits

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.of_logits(self.head(torch.tanh(self.words(ids))))


@pytest.mark.parametrize(
    ("of_logits", "cases"),
    [
        (lambda logits: logits[:, :-1], 9),
        (lambda logits: logits.flip(1), 12),
        (lambda logits: logits, None),
        (lambda logits: logits.flatten(0, 1), None),
        (lambda logits: logits.mean(1), None),
    ],
)
def test_padding_among_the_cases_of_a_loss_is_warned_of(
    of_logits: Callable[[Tensor], Tensor], cases: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    ids, mask = torch.randint(7, (3, 4)), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    net = kfac_fx.compile(Logits(of_logits), (ids, mask), loss="categorical", padding_mask="mask")
    told = [str(warning.message) for warning in recwarn if "may count as cases" in str(warning.message)]
    assert bool(told) is (cases is not None)
    if cases is not None:
        assert told[0].startswith("padding may count as cases of the Categorical loss, whose rows are not the cases an")
        assert told[0] in " ".join(str(net.report).split()) and net.record((ids, mask), {}).cases == cases


REAL = torch.tensor([[position < length for position in range(5)] for length in (3, 5, 2, 0)])  # the last is padding
TRAINED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mse": (lambda z: torch.full_like(z, 2.0), F.mse_loss),
    "bce_with_logits": (
        lambda z: z.sigmoid() * (1 - z.sigmoid()),
        lambda z, t: F.binary_cross_entropy_with_logits(z, (t > 0).to(z)),
    ),
}


@pairs(("name", list(TRAINED)), ("cases", {"some padding": 3, "an example of padding": 4}))
def test_a_mean_over_elements_is_that_over_the_real_ones(name: str, cases: int) -> None:
    """The product with the Fisher of the mean over real elements is that of plain autograd, and training that mean
    warns of nothing."""
    hessian, trained = TRAINED[name]
    model, ids, real = Small(), torch.randint(1, 9, (cases, 5)), REAL[:cases]
    kwargs = {"attention_mask": real.long()}
    net = kfac_fx.compile(model, (ids,), kwargs, loss=name, padding_mask="attention_mask")
    parameters = dict(model.named_parameters())
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    z = model(ids, **kwargs)[real]
    expected = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for element, curvature in zip(z.flatten(), hessian(z).flatten(), strict=True):
        row = dict(zip(parameters, torch.autograd.grad(element, parameters.values(), retain_graph=True), strict=True))
        along = sum((row[name] * vector[name]).sum() for name in row)
        expected = {name: expected[name] + curvature * along * row[name] / z.numel() for name in row}
    torch.testing.assert_close(net.fisher_product(ids, **kwargs)(vector), expected)
    optimizer = KFAC(net)
    for _ in range(2):
        optimizer.zero_grad()
        z = net(ids, **kwargs)[real]
        trained(z, torch.randn_like(z)).backward()
        optimizer.step()


def test_the_factors_of_a_mean_over_elements_have_the_real_ones_alone() -> None:
    """They are those of the sums over the elements of a case, times the cases, divided by the real elements."""
    model, (ids, kwargs) = Small(), batch()
    of_elements, of_sums = (
        kfac_fx.compile(model, (ids,), kwargs, loss=loss, padding_mask="attention_mask") for loss in ("mse", "normal")
    )
    for mask in (MASK, torch.ones_like(MASK)):
        moments = [net.record((ids,), {"attention_mask": mask.long()}, mode="exact") for net in (of_elements, of_sums)]
        assert moments[0].cases == moments[1].cases == 3
        found, expected = (sums(of) for of in moments)
        weight = 3 / (5 * int(mask.sum()))  # five outputs of each real position
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key] * (weight if key[1] == "G" else 1.0))


@pytest.mark.parametrize("name", TRAINED)
def test_a_mean_over_padding_is_told_with_what_to_write(name: str) -> None:
    model, (ids, kwargs) = Small(), batch()
    net = kfac_fx.compile(model, (ids,), kwargs, loss=name, padding_mask="attention_mask")
    optimizer = KFAC(net)
    z = net(ids, **kwargs)[MASK]
    (TRAINED[name][1](z, torch.randn_like(z)) * MASK.sum() / MASK.numel()).backward()
    text = r"0\.6667 times the mean .*; it is a mean over padding, too: .* real elements, as losses\[mask\]\.mean"
    with pytest.warns(kfac_fx.LossScaleWarning, match=text):
        optimizer.step()


class Numbers(nn.Module):
    """A number for every position, and a class for every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.number, self.kind = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h, real = torch.tanh(self.body(x)), mask.unsqueeze(-1)
        pooled = (h * real).sum(1) / real.sum(1)
        return {"number": self.number(h).squeeze(-1), "kind": self.kind(pooled), "mask": mask}


class NumbersWithLoss(Numbers):
    def forward(self, x: Tensor, mask: Tensor, y: Tensor, kinds: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x, mask)
        squares = F.mse_loss(out["number"], y, reduction="none")
        return (squares * mask).sum() / mask.sum() + F.cross_entropy(out["kind"], kinds)


def test_the_real_positions_of_one_head_are_those_of_a_loss_in_forward() -> None:
    """As docs/models.md says; the number of real positions differs from batch to batch."""
    model, of_forward = Numbers(), NumbersWithLoss()
    of_forward.load_state_dict(model.state_dict())

    def both(out: dict[str, Tensor]) -> list[Any]:
        return [Normal(out["number"][out["mask"]]), Categorical(out["kind"])]

    x, y, kinds = torch.randn(3, 5, 3), torch.randn(3, 5), torch.tensor([0, 3, 1])
    net = kfac_fx.compile(model, (x, MASK), loss=both, padding_mask="mask")
    plain = kfac_fx.compile(of_forward, (x, MASK, y, kinds), padding_mask="mask")
    for mask in (MASK, MASK.flip(0), MASK | MASK.flip(0)):
        moments, wanted = (
            of.record(args, {}, mode="exact") for of, args in ((net, (x, mask)), (plain, (x, mask, y, kinds)))
        )
        for key, statistic in wanted.statistics.items():
            found = moments.statistics[key]
            torch.testing.assert_close(found["G"] / moments.cases, statistic["G"] / wanted.cases)
            torch.testing.assert_close(found["A"] / found["count"], statistic["A"] / statistic["count"])


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda ids: (torch.arange(6) < 5) & (ids != 0),
    "an operand": lambda ids: torch.logical_and(ids != 0, torch.arange(6) < 5),
    "a factor": lambda ids: (ids != 0) * (torch.arange(6) < 5),
    "two": lambda ids: (torch.arange(6) < 5) & (torch.arange(6) >= 0) & (ids != 0),
}


@pytest.mark.parametrize("mask", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_in_a_mask_is_in_the_graph(mask: Callable[[Tensor], Tensor]) -> None:
    """It was written into the code of the graph, which ended in a raw TypeError at the first recording."""
    ids, factors = torch.randint(0, 4, (4, 6)), []
    for padding_mask in (mask, lambda ids: (ids != 0) & (torch.arange(6) < 5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        net = kfac_fx.compile(model, (ids,), loss="categorical", padding_mask=padding_mask)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        estimator.update_covariances(ids)
        factors.append([block.full_fisher_block() for block in estimator.blocks.values()])
    for mine, wanted in zip(*factors, strict=True):
        torch.testing.assert_close(mine, wanted)
