"""Blocks against the Fisher matrix of nets on which it can be written out, and stacks of blocks against single ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.block import BlockDiagonalFisher
from tests.runtime.fake_net import EXACT, FakeNet, Mean, Scale, batch, deep, exact, mixed, noise
from tests.tables import pairs

# --- the oracle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["squared error", "categorical"])
def test_one_case_makes_kronecker_blocks_exact(loss: str) -> None:
    net, x = deep(), batch(1)
    net.loss = loss
    est = exact(net, x)
    for key, block in list(net.fisher(x).items())[:3]:
        torch.testing.assert_close(est.blocks[key].full_fisher_block(), block)


def test_deep_linear_nets_under_squared_error_are_exact() -> None:
    """The output gradients of every cotangent are the same for all cases, so they are independent of the inputs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    net, x = FakeNet(model, {"0": "kron", "1": "kron", "2": "kron"}), batch(9)
    est = exact(net, x)
    for key, block in net.fisher(x).items():
        torch.testing.assert_close(est.blocks[key].full_fisher_block(), block)


@pytest.mark.parametrize("loss", ["squared error", "categorical"])
def test_kronecker_blocks_of_many_cases_are_an_approximation(loss: str) -> None:
    """The oracle is not trivially met."""
    net, x = deep(), batch(9)
    net.loss = loss
    est = exact(net, x)
    assert not torch.allclose(est.blocks["0.weight", "0.bias"].full_fisher_block(), net.fisher(x)["0.weight", "0.bias"])


@pairs(("loss", ["squared error", "categorical"]), ("positions", {"vectors": False, "sequences": True}))
def test_diagonal_blocks_are_exact(loss: str, positions: bool) -> None:
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Tanh(), Scale(4), nn.Linear(4, 2)]
    x = torch.randn(7, 5, 3, dtype=torch.float64) if positions else batch(7)
    if positions:
        layers.insert(3, Mean())
    last = str(len(layers) - 1)
    net = FakeNet(nn.Sequential(*layers), {"0": "diagonal", "2": "diagonal", last: "diagonal"}, loss)
    est = exact(net, x)
    for key, block in net.fisher(x).items():
        torch.testing.assert_close(est.blocks[key].full_fisher_block(), torch.diag(block.diagonal()))


@pairs(("loss", ["squared error", "categorical"]), ("positions", {"vectors": False, "sequences": True}))
def test_full_blocks_are_exact(loss: str, positions: bool) -> None:
    layers: list[nn.Module] = [Scale(3), nn.Tanh(), nn.Linear(3, 2)]
    x = torch.randn(7, 5, 3, dtype=torch.float64) if positions else batch(7)
    if positions:
        layers.insert(2, Mean())
    last = str(len(layers) - 1)
    net = FakeNet(nn.Sequential(*layers), {"0": "full", last: "full"}, loss)
    est = exact(net, x)
    for key, block in net.fisher(x).items():
        torch.testing.assert_close(est.blocks[key].full_fisher_block(), block)


def test_positions_are_counted_once() -> None:
    """Shared positions of a linear net: A is a mean over rows, and the block has c = S."""
    net = FakeNet(nn.Sequential(nn.Linear(3, 2), Mean()), {"0": "kron"})
    x = torch.randn(1, 1, 3, dtype=torch.float64).expand(4, 5, 3)  # equal rows: no approximation is left but c
    est = exact(net, x)
    block = est.blocks["0.weight", "0.bias"]
    assert block.factors["positions"].value.item() == 5
    full = net.fisher(x)["0.weight", "0.bias"]
    torch.testing.assert_close(block.full_fisher_block() * 5, full)  # rows of one case are taken as independent


def test_generic_blocks_are_exact_for_one_case() -> None:
    model = nn.Sequential(nn.Linear(3, 2), Scale(2))
    x = batch(1)
    structured = FakeNet(model, {"0": "full", "1": "full"}).fisher(x)
    est = exact(FakeNet(model, {"0": "generic full", "1": "generic"}), x)
    form = FakeNet(model, {"0": "full"}).registrations[0].matrix
    assert form is not None
    order = form.pack({"0.weight": torch.arange(6.0).view(2, 3), "0.bias": torch.tensor([6.0, 7.0])}).flatten().long()
    full = est.blocks["0.weight", "0.bias"].full_fisher_block()
    torch.testing.assert_close(full[order][:, order], structured["0.weight", "0.bias"])
    diagonal = est.blocks["1.scale", "1.shift"].full_fisher_block().diagonal()
    scales_and_shifts = structured["1.scale", "1.shift"].diagonal().view(2, 2).mT.flatten()
    torch.testing.assert_close(diagonal, scales_and_shifts)


def test_sampled_targets_find_the_exact_fisher_in_the_mean() -> None:
    net, x = FakeNet(nn.Sequential(nn.Linear(3, 2)), {"0": "kron"}, "categorical"), batch(4)
    est = FisherEstimator(net, seed=0)
    for _ in range(3):
        est.update_covariances(x.repeat(1000, 1), should_decay=False)
    wanted = exact(net, x).blocks["0.weight", "0.bias"].factors["G"].value
    found = est.blocks["0.weight", "0.bias"].factors["G"].value
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)  # about four standard errors


def test_the_empirical_mode_takes_the_targets() -> None:
    net, x, targets = FakeNet(nn.Sequential(nn.Linear(3, 2)), {"0": "diagonal"}), batch(5), torch.zeros(5, 2).double()
    est = FisherEstimator(net, estimation_mode="empirical")
    est.update_covariances(x, targets=targets)
    d = net.model(x).detach() - targets
    expected = torch.einsum("no,ni->oi", d**2, torch.cat([x, torch.ones(5, 1).double()], 1) ** 2) / 5
    torch.testing.assert_close(est.blocks["0.weight", "0.bias"].factors["F"].value[0], expected)


# --- stacks are blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [deep, mixed])
def test_the_estimator_is_the_sum_of_its_blocks(make: Callable[[], FakeNet]) -> None:
    est = exact(make(), batch(), damping=0.1, exps=(-1, -0.5), compute_cholesky=True, compute_cholesky_inverse=True)
    est.update_inverses()
    v = noise(est)
    pairs: list[tuple[Any, Any]] = [
        (est.multiply(v), lambda block, mine: block.multiply(mine)),
        (est.multiply_inverse(v), lambda block, mine: block.multiply_inverse(mine)),
        (est.multiply_matpower(-0.5, v), lambda block, mine: block.multiply_matpower(mine, -0.5)),
        (est.multiply_cholesky(v, transpose=True), lambda block, mine: block.multiply_cholesky(mine, transpose=True)),
        (est.multiply_cholesky_inverse(v), lambda block, mine: block.multiply_cholesky_inverse(mine)),
    ]
    for whole, part in pairs:
        assert list(whole) == list(v)
        for key, block in est.blocks.items():
            for name, tensor in part(block, {name: v[name] for name in key}).items():
                torch.testing.assert_close(whole[name], tensor)


def test_layers_of_one_shape_are_one_group_and_one_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes 4 and 5 (with bias): G of all layers and A of two in two batches, however many layers there are."""
    est, batches = exact(deep(), batch()), []
    decompose = torch.linalg.cholesky_ex

    def spy(matrix: Tensor) -> Any:
        batches.append(tuple(matrix.shape))
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", spy)
    est.update_inverses()
    assert sorted(batches) == [(2, 5, 5), (4, 4, 4)]  # A of layer 0 has size 4, too
    assert [len(group) for group in est.groups] == [1, 2, 1]


@pytest.mark.parametrize("make", [pytest.param(deep, marks=pytest.mark.slow), mixed])
def test_products_compile_into_one_graph_once(make: Callable[[], FakeNet]) -> None:
    """New factors, new inverses and another damping need no new graph."""
    est = exact(make(), batch(), damping=0.1)
    est.update_inverses()
    v = noise(est)
    for product in (est.multiply_inverse, est.multiply):
        torch.compiler.reset()
        compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(v), product(v), rtol=0, atol=0)
        est.damping = 0.2
        est.accumulate(est.net.record((batch(),), {}, **EXACT))
        est.fold()
        est.update_inverses()
        with torch.compiler.set_stance("fail_on_recompile"):
            again = compiled(v)
        torch.testing.assert_close(again, product(v), rtol=0, atol=0)


@pytest.mark.parametrize("make", [deep, mixed])
def test_many_vectors_are_multiplied_as_single_ones_are(make: Callable[[], FakeNet]) -> None:
    est = exact(make(), batch(), damping=0.1, exps=(-1,))
    est.update_inverses()
    vectors = [noise(est) for _ in range(6)]
    many = {name: torch.stack([vector[name] for vector in vectors]).unflatten(0, (2, 3)) for name in vectors[0]}
    for products in (est.multiply, est.multiply_inverse):
        found = products(many)
        for n, vector in enumerate(vectors):
            for name, expected in products(vector).items():
                torch.testing.assert_close(found[name][n // 3, n % 3], expected)


def test_the_damping_of_products_is_split_between_the_sides() -> None:
    """As the docstring of `multiply` says: c (G + λ_G I) ⊗ (A + λ_A I)."""
    est = exact(FakeNet(deep().model[:1], {"0": "kron"}), batch(), damping=0.3)
    (block,), v = est.blocks.values(), noise(est)
    a, g, c = (block.factors[name].value for name in ("A", "G", "positions"))
    pi = ((a[0].trace() / a.shape[-1]) / (g[0].trace() / g.shape[-1])).sqrt()
    damped_a, damped_g = a[0] + pi * (0.3 / c).sqrt() * torch.eye(4), g[0] + (0.3 / c).sqrt() / pi * torch.eye(4)
    expected = c * damped_g @ block.group.pack(v)[0, 0] @ damped_a
    torch.testing.assert_close(block.group.pack(est.multiply(v))[0, 0], expected)


def test_products_are_gathered_in_the_order_of_all_processes_also_of_those_without_blocks() -> None:
    """The second of three processes is the only one with blocks that are not idle."""
    sent: list[Any] = []

    def gather(mine: list[Tensor], like: list[list[Tensor]]) -> list[Tensor]:
        sent.append((mine, [len(tensors) for tensors in like]))
        return [tensor for tensors in like for tensor in tensors]

    w, v = torch.ones(2), torch.zeros(3)
    groups = [SimpleNamespace(owner=1, registrations=[SimpleNamespace(parameters=(name,))]) for name in ("w", "v")]
    for rank, mine in ((1, [w, v]), (2, [])):
        fisher: Any = SimpleNamespace(owners=SimpleNamespace(rank=rank, gather=gather))
        everything = BlockDiagonalFisher._gathered(fisher, {"w": w, "v": v}, groups, {"w": w, "v": v})  # type: ignore[arg-type]
        assert list(everything) == ["w", "v"] and everything["w"] is w
        assert sent.pop() == (mine, [0, 2])
