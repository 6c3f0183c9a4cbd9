"""Documents of any lengths as nested tensors: arguments, outputs, and made by forward of values and offsets."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested import nested_tensor_from_jagged

import kfac_fx
from kfac_fx.passes.errors import UntraceableError
from kfac_fx.passes.torch_private import NESTED
from kfac_fx.passes.trace import attention, nested
from tests.tables import pairs

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype.*:UserWarning")
LENGTHS, OTHERS = (5, 9, 1), (3, 7, 2, 8)
WIDTH, CLASSES = 8, 3


def documents(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, WIDTH, generator=generator) for length in lengths]


def jagged(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(values, offsets)."""
    return torch.cat(documents(lengths)), torch.tensor([0, *lengths]).cumsum(0)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)


class Rows(Base):
    """Layers that look at one position at a time."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        x = nested_tensor_from_jagged(values, offsets)
        x = x + self.norm(F.gelu(self.first(x))) * 2
        rows: Tensor = self.last(x).values()
        return rows


class Attending(Base):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        x = nested_tensor_from_jagged(values, offsets)
        q, k, v = (layer(x).unflatten(-1, [2, 4]).transpose(1, 2) for layer in (self.query, self.key, self.first))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        rows: Tensor = self.last(self.norm(seen)).values()
        return rows


class Padding(Base):
    """Padded inside of forward: a term for each document."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(nested_tensor_from_jagged(values, offsets)))
        logits: Tensor = self.last(self.norm(hidden.to_padded_tensor(0.0).sum(1)))
        return logits


class RoundTrip(Base):
    """Padded and back."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        padded = nested_tensor_from_jagged(self.first(values), offsets).to_padded_tensor(0.0)
        inside = torch.arange(padded.shape[1]) < offsets.diff()[:, None]
        mixed = torch.tanh(padded + padded.sum(1, keepdim=True))
        rows: Tensor = self.last(self.norm(nested_tensor_from_jagged(mixed[inside], offsets))).values()
        return rows


class Firsts(Base):
    """The first position of every document, as a class token."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(nested_tensor_from_jagged(values, offsets))))
        logits: Tensor = self.last(hidden.values()[offsets[:-1]])
        return logits


class Looked(Base):
    """Ids in a nested tensor of one dimension less."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        ids = nested_tensor_from_jagged(values.argmax(-1), offsets)
        rows: Tensor = self.last(self.norm(self.first(self.table(ids)))).values()
        return rows


MODELS: dict[str, Callable[[], nn.Module]] = {
    "rows": Rows,
    "attention": Attending,
    "padding": Padding,
    "round trip": RoundTrip,
    "first positions": Firsts,
    "embedding": Looked,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_documents_of_all_lengths_are_one_graph_with_a_layer_for_every_parameter(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(make(), jagged(LENGTHS), loss="categorical", strict=True)
    assert not net.program.submodules and not any(registration.generic for registration in net.registrations)
    assert net.record(jagged(OTHERS), {}).cases == len(net(*jagged(OTHERS)))
    assert len(net.captures.all) == 1


def by_documents(model: Base, lengths: Sequence[int], targets: Tensor) -> dict[str, Tensor]:
    """A and G of both linear layers by a loop over documents, in plain torch."""
    rows: dict[str, list[Tensor]] = {"first": [], "last": []}
    grads: dict[str, list[Tensor]] = {"first": [], "last": []}
    for document, target in zip(documents(lengths), targets, strict=True):
        inputs = torch.cat([document, torch.ones(len(document), 1)], 1)
        product = (document @ model.first.weight.T + model.first.bias).detach().requires_grad_()
        h = model.norm(torch.tanh(product).sum(0))
        logits = h @ model.last.weight.T + model.last.bias
        loss = F.cross_entropy(logits, target)
        of_product, of_logits = torch.autograd.grad(loss, (product, logits))
        rows["first"].append(inputs)
        rows["last"].append(torch.cat([h.detach(), torch.ones(1)])[None])
        grads["first"].append(of_product)
        grads["last"].append(of_logits[None])
    stacked = {f"{name}.A": torch.cat(parts) for name, parts in rows.items()}
    stacked |= {f"{name}.G": torch.cat(parts) for name, parts in grads.items()}
    return {name: matrix.T @ matrix / len(matrix) for name, matrix in stacked.items()}


def test_cases_are_documents_where_the_loss_has_a_term_for_each_and_rows_are_tokens() -> None:
    torch.manual_seed(0)
    model, targets = Padding(), torch.arange(len(OTHERS)) % CLASSES
    net = kfac_fx.compile(copy.deepcopy(model), jagged(LENGTHS), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical", damping=1e-12)
    estimator.update_covariances(*jagged(OTHERS), targets=targets)
    wanted = by_documents(model, OTHERS, targets)
    for name in ("first", "last"):
        block = estimator.blocks[f"{name}.weight", f"{name}.bias"]
        for side in ("A", "G"):
            torch.testing.assert_close(block.factors[side].value[0], wanted[f"{name}.{side}"])
        scale = sum(OTHERS) / len(OTHERS) if name == "first" else 1.0  # rows of a case
        vector = torch.randn(block.factors["G"].value.shape[-1], block.factors["A"].value.shape[-1])
        product = estimator.multiply({f"{name}.weight": vector[:, :-1], f"{name}.bias": vector[:, -1]})
        by_hand = scale * wanted[f"{name}.G"] @ vector @ wanted[f"{name}.A"]
        torch.testing.assert_close(product[f"{name}.weight"], by_hand[:, :-1], rtol=1e-4, atol=1e-5)


class Documents(Base):
    """A nested tensor in, and one out, in a dictionary, or a row for each document."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.query, self.key = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (layer(x).unflatten(-1, [2, 4]).transpose(1, 2) for layer in (self.query, self.key, self.first))
        hidden = self.norm(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        if self.how == "pooled":
            return self.last(hidden.to_padded_tensor(0.0).sum(1))
        logits = self.last(hidden)
        return {"logits": logits, "lengths": x.offsets().diff()} if self.how == "dictionary" else logits


def nested_documents(lengths: Sequence[int]) -> Tensor:
    return torch.nested.nested_tensor(documents(lengths), layout=torch.jagged)


def loss_of_documents(outputs: Any, lengths: Sequence[int]) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    rows = logits.values() if logits.is_nested else logits
    targets = torch.cat([(document[:, 0] > 0).long() for document in documents(lengths)])
    return F.cross_entropy(rows, targets[: len(rows)])


HOW: dict[str, Any] = {
    "nested": "categorical",
    "dictionary": lambda outputs: kfac_fx.losses.Categorical(outputs["logits"]),
    "pooled": "categorical",
}


@pairs(("options", [{}, {"estimation_mode": "empirical"}, {"estimation_mode": "exact"}]), ("how", list(HOW)))
def test_nested_arguments_and_outputs_train(how: str, options: dict[str, Any]) -> None:
    """The user's loss is of the nested outputs. The gradients are those of the plain model."""
    torch.manual_seed(0)
    model = Documents(how)
    plain = copy.deepcopy(model)
    net = kfac_fx.compile(model, (nested_documents(LENGTHS),), loss=HOW[how], strict=True)
    optimizer, losses = kfac_fx.KFAC(net, seed=0, **options), list[float]()
    for step in range(12):
        lengths = (LENGTHS, OTHERS)[step % 2]
        plain.load_state_dict(model.state_dict())
        for of in (plain, net):
            of.zero_grad()
            loss = loss_of_documents(of(nested_documents(lengths)), lengths)
            loss.backward()
        for (name, parameter), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, wanted.grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[1]
    assert float(optimizer.rho) > 0.5  # checks have seen the gradients of the values
    assert len(net.captures.all) == 1 and not net.program.submodules


def test_statistics_of_nested_arguments_are_those_of_values_and_offsets() -> None:
    torch.manual_seed(0)
    rows = Rows()

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, x: Tensor) -> Tensor:
            return nested_tensor_from_jagged(self.rows(x.values(), x.offsets()), x.offsets())

    net = kfac_fx.compile(Nested(), (nested_documents(LENGTHS),), loss="categorical")
    wanted = kfac_fx.compile(rows, jagged(LENGTHS), loss="categorical").record(jagged(OTHERS), {}, mode="exact")
    found = net.record((nested_documents(OTHERS),), {}, mode="exact")
    assert found.cases == wanted.cases
    for mine, its in zip(found.statistics.values(), wanted.statistics.values(), strict=True):
        torch.testing.assert_close(mine, its)
    outputs, _ = net.functional({}, (nested_documents(OTHERS),), {})
    torch.testing.assert_close(outputs, net(nested_documents(OTHERS)).values())
    part = net.recorder((nested_documents(OTHERS),), {}).part_of_call((nested_documents(OTHERS),), {}, 0.5)[0][0]
    assert part.is_nested and len(part.values()) == 10
    batch = kfac_fx.Batch(nested_documents(OTHERS), targets=torch.arange(20) % CLASSES)
    plain = kfac_fx.Batch(*jagged(OTHERS), targets=batch.targets)
    of_values = kfac_fx.compile(rows, jagged(LENGTHS), loss="categorical")
    mine, its = (
        kfac_fx.fit_spectrum(of, [data], mode="exact").at(scale=1.0, damping=0.1).self_scores(data)
        for of, data in ((net, batch), (of_values, plain))
    )
    torch.testing.assert_close(mine, its)


def test_layers_of_nested_tensors_are_captured_under_autocast() -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        net = kfac_fx.compile(Documents("nested"), (nested_documents(LENGTHS),), loss="categorical", strict=True)
        assert net(nested_documents(OTHERS)).dtype == torch.bfloat16
        assert net.record((nested_documents(OTHERS),), {}).cases == 20
    assert not net.program.submodules


def test_nested_tensors_of_the_same_lengths_meet() -> None:
    """torch wants one tensor of offsets for both. Two with other lengths are another kind of call."""

    class Weighted(Base):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = batch["x"]
            hidden = self.norm(torch.tanh(self.first(x)) * batch["weights"].unsqueeze(-1))
            logits: Tensor = self.last(hidden)
            return logits

    def weighted(lengths: Sequence[int]) -> dict[str, Tensor]:
        x = nested_documents(lengths)
        return {"x": x, "weights": nested_tensor_from_jagged(torch.rand(sum(lengths)), x.offsets())}

    net = kfac_fx.compile(Weighted(), (weighted(LENGTHS),), loss="categorical", strict=True)
    assert net.record((weighted(OTHERS),), {}).cases == 20 and len(net.captures.all) == 1
    apart = weighted(OTHERS) | {"weights": nested_tensor_from_jagged(torch.rand(20), jagged(OTHERS)[1])}
    with pytest.raises(UntraceableError, match="does not run on these inputs"):
        net.record((apart,), {})


def test_a_loss_is_given_the_values_of_nested_outputs() -> None:
    def loss(outputs: Tensor) -> Any:
        return kfac_fx.losses.Categorical(outputs.values())  # type: ignore[operator]

    with pytest.raises(kfac_fx.LossError, match=r"It is given the values of the nested tensors that the model returns"):
        kfac_fx.compile(Documents("nested"), (nested_documents(LENGTHS),), loss=loss)


def test_a_model_that_torch_fx_has_traced_is_captured_anew_for_nested_tensors() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    net = kfac_fx.compile(model, loss="categorical")
    optimizer = kfac_fx.KFAC(net)
    loss_of_documents(net(nested_documents(LENGTHS)), LENGTHS).backward()
    optimizer.step()
    assert net.record((nested_documents(OTHERS),), {}).cases == 20


def test_nested_tensors_that_are_no_values_and_offsets_are_refused() -> None:
    class Turned(Base):
        def forward(self, x: Tensor) -> Tensor:
            rows: Tensor = self.last(x.transpose(1, 2)).values()
            return rows

    with pytest.raises(UntraceableError, match=r"its dimensions in another order.*\n.*nested\.contiguous\(\)"):
        kfac_fx.capture(Turned(), (nested_documents(LENGTHS).transpose(1, 2),))


def test_a_model_that_is_divided_says_which_submodules_take_nested_tensors() -> None:
    """They stay Python, and the others have blocks. Saved nested tensors have no memory of their own."""

    class Branching(Padding):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            logits = super().forward(values, offsets)
            return logits if logits.sum() < 1e9 else 2 * logits

    torch.manual_seed(0)
    net = kfac_fx.compile(Branching(), jagged(LENGTHS), loss="categorical")
    assert {registration.parameters[0] for registration in net.registrations if not registration.generic} == {
        "norm.weight",
        "last.weight",
    }
    assert "first: it takes a nested tensor" in str(net.report)
    for mode in ("gradients", "exact"):
        assert net.record(jagged(OTHERS), {}, mode=mode).cases == len(OTHERS)


def test_a_nested_tensor_without_offsets_is_refused() -> None:
    with pytest.raises(UntraceableError, match=r"layout torch\.strided.*\n.*layout=torch\.jagged"):
        kfac_fx.capture(nn.Linear(WIDTH, 2), (torch.nested.nested_tensor(documents(LENGTHS)),))


def test_gaps_between_documents_are_refused() -> None:
    class Gaps(Base):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            x = nested_tensor_from_jagged(values, offsets, offsets.diff())
            rows: Tensor = self.last(x).values()
            return rows

    with pytest.raises(UntraceableError, match="gaps between its documents"):
        kfac_fx.capture(Gaps(), jagged(LENGTHS))


@pytest.mark.parametrize(("causal", "shared"), [(False, False), (True, False), (True, True)])
def test_attention_is_that_of_every_document(causal: bool, shared: bool) -> None:
    """Also causal, and with heads that share keys: torch has kernels for these on accelerators alone."""
    values, offsets = jagged(OTHERS)
    query = values.view(-1, 4, 2).transpose(0, 1)
    key = query[:2].flip(0) if shared else query.flip(0)
    result = NESTED.values(
        attention(*(nested(part, offsets, 2) for part in (query, key, key)), is_causal=causal, enable_gqa=shared)
    )
    for start, end in itertools.pairwise(offsets.tolist()):
        q, k = query[None, :, start:end], key[None, :, start:end]
        wanted = F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=shared)
        torch.testing.assert_close(result[:, start:end], wanted[0])


def test_attention_with_dropout_is_refused() -> None:
    class Dropping(Attending):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            q, k, v = (
                nested_tensor_from_jagged(layer(values), offsets).unflatten(-1, [2, 4]).transpose(1, 2)
                for layer in (self.query, self.key, self.first)
            )
            rows = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(-2).values()
            logits: Tensor = self.last(self.norm(rows))
            return logits

    with pytest.raises(UntraceableError, match=r"attention of nested tensors with dropout is not captured"):
        kfac_fx.capture(Dropping(), jagged(LENGTHS))
