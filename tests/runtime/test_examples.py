"""Examples that are graphs, packed sequences or pairs, against the gradients of their losses one by one, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import Batch, FisherEstimator, LossError, RegistrationError

pytestmark = pytest.mark.usefixtures("float64")


def assert_examples(net: kfac_fx.CompiledModule, batch: Batch, losses: Sequence[Tensor]) -> None:
    """losses: of every example."""
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(*batch.args, targets=batch.targets)
    learned = list(net.model.parameters())
    each = [torch.autograd.grad(loss, learned, retain_graph=True) for loss in losses]
    gradients = torch.stack([torch.cat([grad.flatten() for grad in grads]) for grads in each])
    spectrum = estimator.spectrum(damping=1.0)
    identity = spectrum.at(scale=0.0, damping=1.0)
    torch.testing.assert_close(identity.precondition(batch).scores(batch), gradients @ gradients.T)
    torch.testing.assert_close(identity.self_scores(batch), gradients.square().sum(1))
    corrected = spectrum.correct([batch], "sequence").at(scale=1.0, damping=0.0)
    trace = sum(values.sum() for values in corrected.eigenvalues().values())
    torch.testing.assert_close(trace, gradients.square().sum(1).mean())


class OnGraphs(nn.Module):
    """Nodes see their neighbors; the head is on the sums over graphs, or on every node."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.layer, self.head, self.pooled = nn.Linear(4, 6), nn.Linear(6, 3), pooled

    def forward(self, x: Tensor, source: Tensor, target: Tensor, graph: Tensor, sizes: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        h = h + torch.zeros_like(h).index_add(0, target, h[source])
        if self.pooled:
            h = torch.zeros(len(sizes), 6).index_add(0, graph, h)
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("pooled", [False, True])
def test_graphs_of_several_sizes_are_examples(pooled: bool) -> None:
    sizes = torch.tensor([3, 5, 2])
    graph = torch.repeat_interleave(torch.arange(3), sizes)
    source, target = torch.tensor([0, 1, 3, 4, 6, 8]), torch.tensor([1, 2, 4, 7, 5, 9])
    args = torch.randn(10, 4), source, target, graph, sizes
    y = torch.randint(3, (3 if pooled else 10,))
    model = OnGraphs(pooled)
    net = kfac_fx.compile(model, args, loss="categorical", examples=lambda x, source, target, graph, sizes: graph)
    losses = F.cross_entropy(model(*args), y, reduction="none")
    by_graph = losses if pooled else [losses[graph == number].sum() for number in range(3)]
    assert_examples(net, Batch(*args, targets=y), list(by_graph))


class Messages(nn.Module):
    """Layers on edges, on nodes and on graphs, of which the middle ones alone have a number of an example each."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.edge, self.node, self.head, self.divided = nn.Linear(8, 6), nn.GRUCell(6, 4), nn.Linear(4, 3), divided

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, sizes: Tensor) -> Tensor:
        message = torch.tanh(self.edge(torch.cat([x[edges[0]], x[edges[1]]], 1)))
        h = self.node(torch.zeros(len(x), 6).index_add(0, edges[1], message), x)
        if self.divided and h.sum() > 1e9:
            h = 2 * h
        out: Tensor = self.head(torch.zeros(len(sizes), 4).index_add(0, graph, h) / sizes[:, None])
        return out


@pytest.mark.parametrize("divided", [False, True])
def test_layers_of_edges_nodes_and_graphs_are_of_the_same_examples(divided: bool) -> None:
    sizes = torch.tensor([3, 5, 2])
    graph = torch.repeat_interleave(torch.arange(3), sizes)
    edges = torch.tensor([[0, 1, 3, 4, 6, 8, 2], [1, 2, 4, 7, 5, 9, 0]])
    args, y = (torch.randn(10, 4), edges, graph, sizes), torch.randint(3, (3,))
    model = Messages(divided)
    net = kfac_fx.compile(model, args, loss="categorical", examples=lambda x, edges, graph, sizes: graph)
    assert bool(net.program.submodules) == divided
    assert_examples(net, Batch(*args, targets=y), list(F.cross_entropy(model(*args), y, reduction="none")))


class Pooled(nn.Module):
    """A sum over the nodes of every graph. alone: a batch is one graph; else no input has a row for every graph."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.second, self.head, self.alone = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), alone

    def forward(self, x: Tensor, near: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.second(near @ torch.tanh(self.first(near @ x))))
        if self.alone:
            return cast(Tensor, self.head(h.mean(0, keepdim=True)))
        return cast(Tensor, self.head(torch.zeros(int(graph.max()) + 1, 5).index_add(0, graph, h)))


def graphs(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.randn(len(graph), 4), (graph[:, None] == graph) * torch.rand(len(graph), len(graph)), graph


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("mode", ["exact", "empirical"])
@pytest.mark.parametrize("asked", ["full", "diagonal"])
def test_blocks_of_cases_are_exact_where_a_row_of_the_outputs_is_a_graph_of_many_nodes(
    alone: bool, mode: str, asked: str
) -> None:
    """The rows of nodes and of graphs tell no gradients of cases: the head had a Kronecker block, for a wrong reason,
    and the squares of nodes were summed in the blocks of the others."""
    model = Pooled(alone)
    calls = [graphs(4), graphs(3), graphs(5)] if alone else [graphs(4, 1, 3), graphs(2, 5)]
    batches = [Batch(*args, targets=torch.randint(3, (len(model(*args)),))) for args in calls]
    net = kfac_fx.compile(
        model, calls[0], loss="categorical", approximations={"*": asked}, examples=lambda x, near, graph: graph
    )
    spectrum = kfac_fx.fit_spectrum(net, batches, mode=mode)
    learned = dict(model.named_parameters())
    gradients: list[list[Tensor]] = []  # of every source
    for batch in batches:
        logits = model(*batch.args)
        for row, y in zip(logits, batch.targets, strict=True):
            p = row.detach().softmax(0)
            roots = (
                [F.one_hot(y, 3) - p] if mode == "empirical" else [*(torch.diag(p.sqrt()) - torch.outer(p.sqrt(), p))]
            )
            gradients += [list(torch.autograd.grad(row, learned.values(), root, retain_graph=True)) for root in roots]
    cases = sum(len(batch.targets) for batch in batches)
    for name, value in zip(learned, zip(*gradients, strict=True), strict=True):
        torch.testing.assert_close(spectrum.diagonal(1)[name], torch.stack(value).square().sum(0) / cases)
    losses = [F.cross_entropy(model(*batch.args), batch.targets, reduction="none") for batch in batches]
    assert_examples(net, batches[0], list(losses[0]))
    assert {(row.reason or "").partition(", as ")[0] for row in net.report.rows} == {
        "several of its rows meet in one row of the outputs",
        "its rows are not those of an input",
    }
    assert ("counted by the rows of the outputs" in " ".join(str(net.report).split())) == alone  # the other is in parts


@pytest.mark.parametrize(("asked", "text"), [("full", "in no structured Fisher block"), ("kron_reduce", "honored")])
def test_strict_refuses_what_is_asked_for_and_is_not_honored(asked: str, text: str) -> None:
    with pytest.raises(RegistrationError, match=rf"(?s){text}.*head\.weight.* not those of an input"):
        kfac_fx.compile(
            Pooled(True),
            graphs(4),
            loss="categorical",
            approximations={"head": asked},
            strict=True,
            examples=lambda x, near, graph: graph,
        )


def test_positions_that_a_mask_selects_are_rows_of_the_outputs() -> None:
    """No sequence meets another one, so their layers have gradients of cases."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            h = torch.tanh(self.words(ids))
            return cast(Tensor, self.head((h + h.mean(1, keepdim=True))[mask]))

    ids, mask = torch.randint(7, (4, 5)), torch.rand(4, 5) < 0.6
    model = Masked()
    net = kfac_fx.compile(model, (ids, mask), loss="categorical", approximations={"*": "full"})
    rows = [(row.layer, row.approximation, row.reason is None) for row in net.report.rows]
    assert rows == [("embedding", "full", True), ("generic", "full", False), ("generic", "full", False)]


class Packed(nn.Module):
    """Tokens read those of their own document, whose places begin with zero."""

    def __init__(self, apart: bool = True) -> None:
        super().__init__()
        self.words, self.layer, self.head, self.apart = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7), apart

    def forward(self, ids: Tensor, place: Tensor) -> Tensor:
        document = (place == 0).cumsum(1)
        seen = document[:, :, None] == document[:, None, :]
        x = self.words(ids)
        x = x + (x @ x.transpose(1, 2)).masked_fill(~seen & self.apart, -1e9).softmax(-1) @ x
        out: Tensor = self.head(torch.tanh(self.layer(x)))
        return out


PLACE = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])


def documents(ids: Tensor, place: Tensor) -> Tensor:
    return ((place == 0).flatten().cumsum(0) - 1).view(place.shape)


def test_documents_that_are_packed_into_rows_are_examples() -> None:
    ids, y = torch.randint(7, PLACE.shape), torch.randint(7, PLACE.shape)
    model = Packed()
    net = kfac_fx.compile(model, (ids, PLACE), loss="categorical", examples=documents)
    losses = F.cross_entropy(model(ids, PLACE).flatten(0, 1), y.flatten(), reduction="none")
    numbers = documents(ids, PLACE).flatten()
    assert_examples(net, Batch(ids, PLACE, targets=y), [losses[numbers == number].sum() for number in range(5)])


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")  # of A, in which these rows are
def test_rows_of_no_example_are_in_none() -> None:
    """The rest of a row is padding: the number of its example is -1, and its targets are ignored."""
    ids, y = torch.randint(7, PLACE.shape), torch.randint(7, PLACE.shape)
    y[1, 2:] = -100
    model = Packed()
    numbers = documents(ids, PLACE)
    net = kfac_fx.compile(
        model, (ids, PLACE), loss="categorical", examples=lambda *args: torch.where(numbers == 4, -1, numbers)
    )
    losses = F.cross_entropy(model(ids, PLACE).flatten(0, 1), y.flatten(), reduction="none")
    by_document = [losses[numbers.flatten() == number].sum() for number in range(4)]
    assert_examples(net, Batch(ids, PLACE, targets=y), by_document)


class OnRows(nn.Module):
    """Every row by itself, so that a row is a position, too. With targets it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(x)))
        return out if y is None else F.cross_entropy(out, y)


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")
@pytest.mark.parametrize("case", ["row", "position"])
@pytest.mark.parametrize("inside", [False, True])
def test_corrected_eigenvalues_are_means_over_the_rows_of_examples(case: str, inside: bool) -> None:
    """Neither rows of no example nor those with an ignored target count."""
    x, y, graph = torch.randn(9, 3), torch.randint(4, (9,)), torch.tensor([1, 0, 0, 2, -1, 1, 2, 2, -1])
    y[3] = y[8] = -100
    model = OnRows()
    args, targets = ((x, graph, y), None) if inside else ((x, graph), y)
    loss = {} if inside else {"loss": "categorical"}
    net = kfac_fx.compile(model, args, examples=lambda x, graph, y=None: graph, **cast(Any, loss))
    spectrum = kfac_fx.fit_spectrum(net, [Batch(*args, targets=targets)], case=case, mode="empirical")
    losses = F.cross_entropy(model(x, graph), y, reduction="none")[(graph >= 0) & (y >= 0)]
    assert len(losses) == 6
    for names, values in spectrum.eigenvalues().items():
        learned = [model.get_parameter(name) for name in names]
        each = [torch.autograd.grad(value, learned, retain_graph=True) for value in losses]
        squares = [sum(grad.square().sum() for grad in grads) for grads in each]
        torch.testing.assert_close(values.sum(), sum(squares) / len(losses))


def test_pairs_of_two_halves_are_examples() -> None:
    class Rewards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            chosen, rejected = self.head(torch.tanh(self.layer(x)))[:, 0].chunk(2)
            return chosen - rejected

    x, model = torch.randn(8, 4), Rewards()
    net = kfac_fx.compile(model, (x,), loss="multi_bernoulli", examples=lambda x: torch.arange(len(x)) % (len(x) // 2))
    assert_examples(net, Batch(x, targets=torch.ones(4)), list(-F.logsigmoid(model(x))))


WRONG: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (
        lambda ids: PLACE,
        RegistrationError,
        "examples is called with all arguments that forward gets, and does not take those of this call: too many pos"
        r".*Write examples=lambda ids, \*args, \*\*kwargs: \.\.\.",
    ),
    (lambda *args: PLACE.double(), RegistrationError, r"examples= returned a torch.float64 \[2, 6\], wanted whole"),
    (lambda *args: [0, 1], RegistrationError, r"examples= returned a list, wanted whole numbers, \[rows\] or"),
    (lambda *args: torch.arange(7), LossError, r"numbers of \[7\] rows and 7 examples, and the loss has inputs of"),
    (lambda *args: torch.arange(12).view(2, 6), LossError, "an example of examples= has a gradient in rows of another"),
]


@pytest.mark.parametrize(("function", "error", "text"), WRONG)
def test_wrong_examples_are_refused(function: Callable[..., Any], error: type[Exception], text: str) -> None:
    ids = torch.randint(7, PLACE.shape)
    net = kfac_fx.compile(Packed(), (ids, PLACE), loss="categorical", examples=function)
    estimator = FisherEstimator(net)
    estimator.update_covariances(ids, PLACE)
    with pytest.raises(error, match=text):
        estimator.spectrum(damping=1.0).self_scores(Batch(ids, PLACE, targets=ids))


def test_a_shift_inside_of_forward_is_told_where_examples_lack_it() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = Packed()

        def forward(self, ids: Tensor, place: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.packed(ids, place)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    ids = torch.randint(7, PLACE.shape)
    for end, text in ((6, r"write \[:, :-1\] behind the numbers, too\.$"), (5, ""), (4, "nor one for each example.$")):
        net = kfac_fx.compile(
            Shifted(), (ids, PLACE, ids), examples=lambda ids, place, y, end=end: numbered(place, end)
        )
        estimator = FisherEstimator(net)
        estimator.update_covariances(ids, PLACE, ids)
        with pytest.raises(LossError, match=text) if text else contextlib.nullcontext():
            estimator.spectrum(damping=1.0).self_scores(Batch(ids, PLACE, ids))


def numbered(place: Tensor, end: int) -> Tensor:
    """The numbers of packed documents, at the positions before `end`."""
    return ((place == 0).flatten().cumsum(0) - 1).view_as(place)[:, :end]


def test_a_batch_on_the_cpu_moves_to_the_device_of_the_parameters() -> None:
    """A batch that has tensors elsewhere stays as it is: the user has placed it."""

    def placed(device: str, *args: Any) -> Any:
        structure = SimpleNamespace(parameters=nn.Linear(2, 2, device=device).parameters())
        net = cast(Any, SimpleNamespace(captures=SimpleNamespace(structure=structure)))
        return kfac_fx.CompiledModule.placed(net, args, {"mask": torch.ones(3), "flag": True}, [torch.ones(1)])

    (x, name), kwargs, (y,) = placed("meta", torch.ones(3), "text")
    assert x.is_meta and kwargs["mask"].is_meta and y.is_meta and (name, kwargs["flag"]) == ("text", True)
    (x, there), kwargs, _ = placed("meta", torch.ones(3), torch.ones(2, device="meta"))
    assert not x.is_meta and there.is_meta and not kwargs["mask"].is_meta
    given = torch.ones(3)
    assert placed("cpu", given)[0][0] is given
