"""Submodules of a divided model that read parameters alone: layers of constants, and tables that they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC
from kfac_fx.passes.check import check
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.pipeline import SUBMODULES
from tests.compiler.untouched import run_untouched
from tests.whole.divided import Base, compiled, submodules_of

X, LONGER = torch.randn(6, 7, 4), torch.randn(5, 9, 4)


class Constant(nn.Module):
    """Two layers of one constant row each, beside one of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 5, bias=False)
        self.register_buffer("row", torch.randn(1, 2))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h + self.second(torch.tanh(self.first(self.row))))


class Biased(nn.Module):
    """As T5's first block: what it adds to its scores is for the other blocks, too. distances: the longest of all."""

    def __init__(self, kind: str = "embedding", distances: int = 4) -> None:
        super().__init__()
        self.kind, self.distances = kind, distances
        self.table = nn.Embedding(distances, 5)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(h.shape[1], device=h.device).clamp(max=self.distances - 1)
        if self.kind == "embedding":
            bias = self.table(at)
        else:
            bias = self.table.weight[at] if self.kind == "index" else self.table.weight.index_select(0, at)
        bias = bias.unsqueeze(0)
        if self.kind == "read twice":
            h = h * self.table.weight[0]
        return torch.tanh(h + bias), bias


class Between(Base):
    """A submodule in a branch. x [n, s, 4]"""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle = middle  # type: ignore[assignment]

    def between(self, h: Tensor) -> Any:
        if h.sum() < -1e9:
            return h
        found = self.middle(h)
        return found if isinstance(found, Tensor) else found[0] * (1 + found[1])

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum(1)


class Positions(nn.Module):
    """Looks at nothing but the length of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(9, 5))

    def forward(self, h: Tensor) -> Tensor:
        return self.places[: h.shape[1]]


class Placed(Between):
    def between(self, h: Tensor) -> Any:
        return h + self.middle(h) if h.sum() > -1e9 else h


def of(net: Any, *names: str) -> Registration:
    (found,) = (registration for registration in net.registrations if registration.parameters == names)
    return found  # type: ignore[no-any-return]


def dense(model: nn.Module, x: Tensor, one: Registration) -> Tensor:
    """Σ_n J_nᵀ 2 I J_n / N of a normal with variance ½, in the order of the registration's matrix."""
    assert one.matrix is not None
    total = torch.zeros(())
    for case in x:
        for output in model(case.unsqueeze(0)).squeeze(0):
            grads = torch.autograd.grad(
                output, [model.get_parameter(name) for name in one.parameters], retain_graph=True
            )
            flat = one.matrix.pack(dict(zip(one.parameters, grads, strict=True))).flatten()
            total = total + 2 * torch.outer(flat, flat) / len(x)
    return total


@pytest.mark.parametrize(
    ("middle", "names"),
    [
        (Constant(), ("middle.first.weight", "middle.first.bias")),
        (Constant(), ("middle.second.weight",)),
        (Biased(distances=1), ("middle.table.weight",)),
    ],
    ids=["a layer", "a layer without a bias", "a lookup"],
)
def test_one_row_that_all_cases_share_is_exact(middle: nn.Module, names: tuple[str, ...]) -> None:
    """F = E[r rᵀ] ⊗ E[d dᵀ] if there is one r, and one position of it."""
    torch.manual_seed(0)
    model, x = Between(middle).double(), X[:, :1].double()
    net = compiled(model, x)
    one = of(net, *names)
    assert one.reason is not None and one.reason.startswith("free of the batch") and len(one.uses) == 1
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    torch.testing.assert_close(estimator.blocks[names].full_fisher_block(), dense(model, x, one))


@pytest.mark.parametrize("kind", ["embedding", "index", "index_select"])
def test_what_a_submodule_looks_up_and_returns_is_one_embedding(kind: str) -> None:
    """The gradient of its own sum and of all that Python does with it; every place is a row, of every case."""
    net = compiled(Between(Biased(kind)), X)
    one = of(net, "middle.table.weight")
    assert (one.layer, one.approximation, len(one.uses)) == ("embedding", "kron_in_diag", 1)
    run_untouched(submodules_of(net).division.program, SUBMODULES)
    statistics = net.record((LONGER,), {}).statistics[one.parameters]
    assert float(statistics["count"]) == 5 * 9
    torch.testing.assert_close(statistics["A_diag"], 5.0 * torch.tensor([[1.0, 1.0, 1.0, 6.0]]))


def test_a_table_that_is_read_in_other_ways_too_stays_generic() -> None:
    net = compiled(Between(Biased("read twice")), X)
    one = of(net, "middle.table.weight")
    assert one.generic and "has 3 uses, 1 of them matched" in str(one.reason)


def test_python_is_followed_with_what_a_submodule_makes_of_parameters_alone() -> None:
    """So that every case has a gradient of its own, and any length its part of the table."""
    torch.manual_seed(0)
    model, x = Placed(Positions()).double(), X.double()
    net = compiled(model, x)
    assert {submodule.submodule.path for submodule in submodules_of(net).captured if not submodule.is_read} == {
        "first",
        "last",
    }
    assert "middle: all that it returns is computed from parameters" in " ".join(str(net.report).split())
    one = of(net, "middle.places")
    assert (one.layer, one.approximation) == ("scale_and_shift", "full")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    torch.testing.assert_close(estimator.blocks[one.parameters].full_fisher_block(), dense(model, x, one))
    net.record((LONGER.double(),), {})
    assert len(submodules_of(net, LONGER.double()).captured) == len(submodules_of(net).captured)


class Resized(nn.Module):
    """Positions for another length, as vision transformers make them for smaller images."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 4, 5))

    def forward(self, h: Tensor) -> Tensor:
        return h + F.interpolate(self.places.transpose(1, 2), size=7, mode="linear").transpose(1, 2)


def test_a_table_that_a_submodule_resizes_is_exact() -> None:
    """No operation of the graph reads the matrix of the interpolation: only the use of the table does."""
    torch.manual_seed(0)
    model, x = Between(Resized()).double(), X.double()
    net = compiled(model, x)
    one = of(net, "middle.places")
    assert not one.generic and one.approximation == "full"
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    torch.testing.assert_close(estimator.blocks[one.parameters].full_fisher_block(), dense(model, x, one))


class Apart(Base):
    """A token and a table in one parameter, of which Python reads the table as nothing can capture it."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 4, 5))

    def between(self, h: Tensor) -> Any:
        token = self.places[:, :1].expand(h.shape[0], -1, -1)
        table = F.interpolate(self.places[:, 1:].transpose(1, 2), size=int(h.shape[1] + (h.sum() < -1e9)))
        h = torch.cat([token, h + F.dropout(table, 0.0).transpose(1, 2)], 1)
        return self.middle(h) if h.sum() > -1e9 else h

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum(1)


def test_all_pieces_of_what_python_reads_are_in_blocks_and_train() -> None:
    torch.manual_seed(0)
    model = Apart()
    net = compiled(model, X)
    pieces = [registration for registration in net.registrations if registration.owners == ("places",)]
    assert [piece.parameters for piece in pieces] == [("places[:, 0:1]",), ("places[:, 1:4]",)]
    assert all(piece.generic and "not captured" in str(piece.reason) for piece in pieces)
    left = tuple(registration for registration in net.registrations if registration is not pieces[1])
    with pytest.raises(RegistrationError, match=r"places\[:, 1:4\] is not registered"):
        check(net.program.but(registrations=left))
    before = model.places.detach().clone()
    opt = KFAC(net, lr=0.1, damping=0.1)
    net(X).square().sum(1).mean().backward()
    opt.step()
    assert bool((model.places != before).all())
