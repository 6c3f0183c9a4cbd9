"""Mini-batches that one graph computes at once, and several losses, are worth what the whole batch is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LayerCollection, losses
from kfac_fx.compiled.jacobian_products import fisher_inner_products
from tests.runtime.collections_of_toys import collection
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")

Outputs = list[Tensor]


def twice(x: Tensor, w: Tensor, b: Tensor, odd: Tensor) -> Tensor:
    """A layer applied twice, and a parameter of no layer."""
    y: Tensor = torch.atan2(torch.tanh(torch.tanh(x @ w + b) @ w + b), 2 + odd)
    return y


def stacked(x: Tensor, **p: Tensor) -> Outputs:
    return [twice(x[:, tower], **p) for tower in range(2)]


def halves(x: Tensor, **p: Tensor) -> Outputs:
    half = x.shape[0] // 2
    return [twice(x[:half], **p), twice(x[half:], **p)]


def registered(function: Callable[..., Any], x: Tensor, approximation: str) -> LayerCollection:
    lc = collection(function, x, w=(3, 3), b=(3,), odd=(3,))
    with torch.no_grad():
        for parameter in lc.model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    (output,) = (node for node in lc.graph.nodes if node.op == "output")
    for tower, node in enumerate(output.all_input_nodes):
        lc.register_categorical_predictive_distribution(node, name="loss", reuse=tower > 0)
    lc.define_linked_parameters(("w", "b"), approximation)
    lc.auto_register_layers()
    assert len({use.tower for use in lc.fisher_blocks["w", "b"].registration.uses}) == len(output.all_input_nodes)
    return lc


X, Y = torch.randn(7, 3, dtype=torch.float64), torch.randint(3, (7,))
SPLITS: dict[str, tuple[Callable[..., Any], Tensor, tuple[Tensor, ...]]] = {
    "stacked": (stacked, torch.stack([X[:3], X[3:6]], 1), (Y[:3], Y[3:6])),
    "of different sizes": (halves, X, (Y[:3], Y[3:])),
}


@pairs(("split", list(SPLITS)), ("mode", ["empirical", "exact"]), ("approximation", ["diagonal", "full", "kron_indep"]))
def test_uses_of_one_case_add_up_and_those_of_other_towers_do_not(split: str, mode: str, approximation: str) -> None:
    function, x, targets = SPLITS[split]
    whole_targets = torch.cat(targets)
    found = []
    for make, batch, y in ((function, x, targets), (twice, X[: len(whole_targets)], (whole_targets,))):
        est = kfac_fx.FisherEstimator(registered(make, batch, approximation), estimation_mode=mode)
        told = make is function and mode == "empirical"  # of the generic parameter, whose examples are not known
        with (
            pytest.warns(UserWarning, match="blocks of odd are squares of .* several towers") if told else nullcontext()
        ):
            est.update_covariances(batch, targets=y)
        assert [block.registration.approximation for block in est.blocks.values()] == [approximation, "diagonal"]
        found.append([block.full_fisher_block() for block in est.blocks.values()][: 1 if mode == "empirical" else 2])
    torch.testing.assert_close(*found)


def test_the_quadratic_model_is_that_of_the_whole_batch() -> None:
    products = []
    for make in (halves, twice):
        net = kfac_fx.compile(registered(make, X, "kron_indep"))
        parameters = dict(net.named_parameters())
        vectors = [{name: torch.full_like(p, v) for name, p in parameters.items()} for v in (1.0, -0.3)]
        losses_at = partial(losses_of, net)
        products.append(fisher_inner_products(losses_at, parameters, vectors))
    torch.testing.assert_close(*products)


def losses_of(net: Any, at: dict[str, Tensor]) -> Any:
    return net.losses(*net.functional(at, (X,), {}))


def test_factors_of_tensors_keep_towers_apart() -> None:
    lc = registered(halves, X, "full")
    block, whole = lc.fisher_blocks["w", "b"], registered(twice, X, "full").fisher_blocks["w", "b"]
    inputs, grads = torch.randn(2, 7, 3), torch.randn(2, 7, 3)  # of both uses
    whole.instantiate_factors([[list(grads)]], 0.1, [list(inputs)])
    block.instantiate_factors(
        [[list(grads[:, :3]), list(grads[:, 3:])]], 0.1, [list(inputs[:, :3]), list(inputs[:, 3:])], cases=7
    )
    torch.testing.assert_close(block.full_fisher_block(), whole.full_fisher_block())


# --- several losses -------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A class for every position, and two values for the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tags, self.values = nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.tags(h), self.values(h.mean(1))


def of_positions_and_sequences(outputs: Any) -> list[tuple[float, losses.LossFunction]]:
    return [(0.5, losses.Categorical(outputs[0])), (2.0, losses.Normal(outputs[1]))]


def test_every_loss_is_a_mean_over_its_own_cases() -> None:
    """15 cases of the one and 5 of the other: the Fisher of 0.5 mean(first) + 2 mean(second)."""
    model, x = Tagger(), torch.randn(5, 3, 2)
    net = kfac_fx.compile(model, (x,), loss=of_positions_and_sequences, approximations={"*": "full"})
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    est.update_covariances(x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians: Any = torch.func.jacrev(lambda at: torch.func.functional_call(model, at, (x,)))(parameters)
    p = model(x)[0].softmax(-1)
    first = 0.5 / 15 * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    second = (2.0 / 5 / 0.5) * torch.eye(2).expand(5, 2, 2)
    for key, block in est.blocks.items():
        assert block.registration.matrix is not None
        expected = torch.zeros_like(block.full_fisher_block())
        for jacobian, fisher in zip(jacobians, (first, second), strict=True):
            rows = fisher[..., 0, 0].numel()
            flat = [jacobian[name].flatten(0, jacobian[name].dim() - parameters[name].dim() - 1) for name in key]
            each = [dict(zip(key, tensors, strict=True)) for tensors in zip(*flat, strict=True)]
            j = torch.stack([block.registration.matrix.pack(tensor).flatten() for tensor in each]).view(
                rows, -1, len(expected)
            )
            expected = expected + torch.einsum("nki,nkl,nlj->ij", j, fisher.reshape(rows, *fisher.shape[-2:]), j)
        torch.testing.assert_close(block.full_fisher_block(), expected)


def test_the_mean_loss_of_several_is_what_a_ride_records() -> None:
    model, x = Tagger(), torch.randn(5, 3, 2)
    tags, values = torch.randint(4, (5, 3)), torch.randn(5, 2)
    net = kfac_fx.compile(model, (x,), loss=of_positions_and_sequences)
    (tag_scores, found), pending = net.record_in_training((x,), {})
    first = nn.functional.cross_entropy(tag_scores.flatten(0, 1), tags.flatten())
    (0.5 * first + 2.0 * (found - values).square().sum(-1).mean()).backward()
    recorded = net.record((x,), {}, mode="empirical", targets=(tags, values))
    trained = pending.moments()
    assert trained.cases == recorded.cases == 15
    for key, sums in recorded.statistics.items():
        for name, value in sums.items():
            torch.testing.assert_close(trained.statistics[key][name], value)
