"""Graph networks: sparse adjacencies and sparse features, as arguments, as buffers, and made in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

pytestmark = pytest.mark.filterwarnings("ignore:Sparse.*:UserWarning")  # of torch: its layouts are in beta
Product = Callable[[Tensor, Tensor], Tensor]
CASES = 12


def nodes(number: int = CASES) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(number))


def adjacency(number: int = CASES, layout: torch.layout = torch.sparse_coo) -> Tensor:
    """Every node with its neighbor."""
    dense = torch.eye(number) + torch.diag(torch.ones(number - 1), 1)
    return (dense / dense.sum(1, keepdim=True)).to_sparse(layout=layout)


class Convolution(nn.Module):
    """A layer as in Kipf & Welling 2017, in its authors' own spelling."""

    def __init__(self, inputs: int, outputs: int, product: Product) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 2), nn.Parameter(torch.zeros(outputs))
        self.product = product

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        return self.product(adjacent, torch.mm(x, self.weight)) + self.bias


class Network(nn.Module):
    def __init__(self, product: Product = torch.sparse.mm) -> None:
        super().__init__()
        self.first, self.last = Convolution(4, 5, product), Convolution(5, 3, product)

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        h = F.dropout(torch.relu(self.first(x, adjacent)), 0.2, training=self.training)
        logits: Tensor = self.last(h, adjacent)
        return logits


class Attending(nn.Module):
    """Edges whose weights are learned, as in Veličković et al. 2018."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores, self.head = nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.values(x)
        source, target = edges
        weights = torch.tanh(self.scores(h)[source] + self.scores(h)[target])[:, 0]
        mixing = torch.sparse_coo_tensor(edges, weights, (x.shape[0], x.shape[0]))
        logits: Tensor = self.head(torch.relu(torch.sparse.mm(mixing, h)))
        return logits


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacent", adjacency())
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.adjacent @ self.first(x)))
        return logits


class SparseFeatures(nn.Module):
    def __init__(self, product: Product = torch.sparse.mm) -> None:
        super().__init__()
        self.product = product
        self.weight, self.head = nn.Parameter(torch.randn(4, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.product(x, self.weight)))
        return logits


def with_layout(layout: torch.layout) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda number: (nodes(number), adjacency(number, layout))


Make, Batch = Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]
MODELS: dict[str, tuple[Make, Batch]] = {
    "torch.sparse.mm": (Network, with_layout(torch.sparse_coo)),
    "torch.spmm": (lambda: Network(torch.spmm), with_layout(torch.sparse_coo)),
    "matmul": (lambda: Network(torch.matmul), with_layout(torch.sparse_coo)),
    "CSR": (lambda: Network(torch.matmul), with_layout(torch.sparse_csr)),
    "learned edges": (Attending, lambda number: (nodes(number), adjacency(number).coalesce().indices())),
    "buffer": (Buffered, lambda number: (nodes(CASES),)),
    "features": (SparseFeatures, lambda number: (nodes(number).relu().to_sparse(),)),
    "features in CSR": (lambda: SparseFeatures(torch.matmul), lambda number: (nodes(number).relu().to_sparse_csr(),)),
}


@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_a_graph_network_is_one_graph_with_a_layer_for_every_parameter(make: Make, batch: Batch) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(make(), batch(CASES), loss="categorical", strict=True)
    assert not net.program.submodules and not any(registration.generic for registration in net.registrations)
    for number in (CASES, CASES - 3):  # another graph
        targets = torch.arange(len(batch(number)[0])) % 3
        for mode in ("gradients", "empirical", "exact"):
            assert net.record(batch(number), {}, mode=mode, targets=targets).cases == len(targets)


def test_factors_are_means_over_the_nodes() -> None:
    """Those of the first layer, by a loop over nodes: its rows are the nodes, and the adjacency mixes its outputs."""
    torch.manual_seed(0)
    model = Network().eval()
    x, adjacent, targets = nodes(), adjacency(), torch.arange(CASES) % 3
    net = kfac_fx.compile(model, (x, adjacent), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical", damping=1e-3)
    estimator.update_covariances(x, adjacent, targets=targets)
    product = (x @ model.first.weight).detach().requires_grad_()
    h = torch.relu(adjacent.to_dense() @ product + model.first.bias)
    loss = F.cross_entropy(adjacent.to_dense() @ (h @ model.last.weight) + model.last.bias, targets, reduction="sum")
    (grad,) = torch.autograd.grad(loss, product)
    factors = estimator.blocks["first.weight",].factors
    torch.testing.assert_close(factors["A"].value[0], x.T @ x / CASES)
    torch.testing.assert_close(factors["G"].value[0], grad.T @ grad / CASES)


def test_the_fisher_of_some_nodes_is_that_of_their_outputs() -> None:
    """As in a semi-supervised training: `loss` names the outputs of the nodes with labels. By a dense matrix."""
    torch.manual_seed(0)
    model = Network().double().eval()
    x, adjacent, trained = nodes().double(), adjacency().double(), torch.arange(CASES) % 3 > 0
    weights = {"first.weight": "full", "last.weight": "full"}
    net = kfac_fx.compile(
        model,
        (x, adjacent),
        loss=lambda logits: kfac_fx.losses.Categorical(logits[trained]),
        approximations=weights,
    )
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", damping=1e-3)
    estimator.update_covariances(x, adjacent)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (x, adjacent.to_dense()))[trained]
        return result

    jacobians = torch.func.jacrev(outputs)(values)
    shares = model(x, adjacent)[trained].softmax(1).detach()
    hessians = torch.diag_embed(shares) - shares.unsqueeze(2) * shares.unsqueeze(1)
    for name in weights:
        rows = jacobians[name].transpose(2, 3).flatten(2)  # the weight is [inputs, outputs], and its matrix [o, i]
        expected = torch.einsum("ncp,ncd,ndq->pq", rows, hessians, rows) / trained.sum()
        torch.testing.assert_close(estimator.blocks[name,].factors["F"].value.view_as(expected), expected)


def test_a_model_that_writes_into_a_sparse_input_is_noticed() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, adjacent: Tensor) -> Any:
            logits = self.layer(torch.sparse.mm(adjacent, x))
            adjacent.mul_(0.5)
            return logits

    net = kfac_fx.compile(Writing(), (nodes(), adjacency()), loss="categorical")
    assert any("writes into its input adjacent" in recorder.capture.effects for recorder in net.captures.all)


def test_a_network_with_an_adjacency_trains() -> None:
    torch.manual_seed(0)
    x, adjacent = nodes(), adjacency()
    targets = x[:, :3].argmax(1)
    net = kfac_fx.compile(Network(), (x, adjacent), loss="categorical")
    optimizer, losses = kfac_fx.KFAC(net), list[float]()
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, adjacent), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
