"""Factors of weights that are products: the dense Fisher of cases, from autograd, and what is left generic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.parametrizations import functions
from tests.runtime.squares import dense_fisher, recorded

pytestmark = pytest.mark.usefixtures("float64")

Shapes = dict[str, tuple[int, ...]]


class Product(nn.Module):
    """A function of an input and of parameters `a`, `b`, ... and a frozen `z`."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], shapes: Shapes, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("z", torch.randn(frozen))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


SIGNAL = (3, 5, 4)
ABDE: Shapes = {"a": (6, 2), "b": (2, 4), "d": (6, 3), "e": (3, 4)}
Row = tuple[Callable[[Any, Tensor], Tensor], Shapes, tuple[int, ...]]  # function, parameters, shape of the input
PRODUCTS: dict[str, Row] = {
    "two": (lambda s, x: F.linear(x, s.a @ s.b, s.c), {"a": (6, 2), "b": (2, 4), "c": (6,)}, SIGNAL),
    "from the right": (lambda s, x: x @ (s.a @ s.b) + s.c, {"a": (4, 2), "b": (2, 6), "c": (6,)}, SIGNAL),
    "three": (lambda s, x: F.linear(x, s.a @ s.b @ s.d), {"a": (6, 2), "b": (2, 3), "d": (3, 4)}, SIGNAL),
    "frozen basis": (lambda s, x: F.linear(x, s.z @ s.a), {"a": (6, 4)}, SIGNAL),
    "beside a weight": (
        lambda s, x: F.linear(x, s.w - 0.5 * (s.a @ s.b), s.c),
        {"w": (6, 4), "a": (6, 2), "b": (2, 4), "c": (6,)},
        SIGNAL,
    ),
    "turned": (lambda s, x: F.linear(x, s.z + (s.b.t() @ s.a.t()).t()), {"a": (6, 2), "b": (2, 6)}, (3, 6)),
    "loha": (lambda s, x: F.linear(x, (s.a @ s.b) * (s.d @ s.e) * 0.5), ABDE, SIGNAL),
    "loha turned": (lambda s, x: x @ ((s.a @ s.b) * (s.d @ s.e)).T, ABDE, SIGNAL),
    "loha from the right": (lambda s, x: x.mT @ ((s.a @ s.b) * (s.d @ s.e)), ABDE, (3, 6, 5)),
    "loha with a frozen one": (lambda s, x: F.linear(x, s.z * (s.a @ s.b)), {"a": (6, 2), "b": (2, 6)}, (3, 6)),
    "loha of a convolution": (
        lambda s, x: F.conv1d(x, ((s.a @ s.b) * (s.d @ s.e)).reshape(6, 2, 2)),
        ABDE,
        (3, 2, 5),
    ),
    "lokr": (lambda s, x: F.linear(x, torch.kron(s.a, s.b)), {"a": (2, 3), "b": (4, 2)}, (3, 5, 6)),
    "lokr wide": (lambda s, x: F.linear(x, torch.kron(s.a, s.b)), {"a": (4, 2), "b": (2, 3)}, (3, 5, 6)),
    "lokr of products": (
        lambda s, x: F.linear(x, torch.kron(s.d @ s.e, (s.a @ s.b).contiguous()) * 0.5),
        {"d": (3, 1), "e": (1, 2), "a": (4, 2), "b": (2, 5)},
        (3, 10),
    ),
    "lokr of a convolution": (
        lambda s, x: F.conv2d(x, torch.kron(s.a.unsqueeze(2).unsqueeze(2), s.b)),
        {"a": (3, 2), "b": (2, 2, 3, 2)},
        (3, 4, 4, 3),
    ),
    "embedding": (lambda s, x: F.embedding(x.long(), s.a @ s.b), {"a": (7, 2), "b": (2, 4)}, (3, 5)),
    "symmetric": (lambda s, x: F.linear(x, s.a @ s.a.T), {"a": (4, 2)}, SIGNAL),
    "residual": (lambda s, x: F.linear(x, s.a + s.a @ s.b), {"a": (4, 4), "b": (4, 4)}, SIGNAL),
    "twice": (lambda s, x: F.linear(F.linear(x, w := s.a @ s.b), w), {"a": (4, 2), "b": (2, 4)}, SIGNAL),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    function, shapes, size = PRODUCTS[name]
    x = torch.randint(0, 7, size).double() if name == "embedding" else torch.randn(size)
    return Product(function, shapes, (6, 6)), x


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_full_block_of_a_factor_is_the_dense_fisher(name: str) -> None:
    model, x = built(name)
    for names, block in recorded(model, x, strict=True, approximations={"*": "full"}).blocks.items():
        assert block.registration.approximation == "full"
        if len(names) == 1:
            torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def factors(name: str, of: str) -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """A Kronecker block after one batch with the targets zero, the parameters, the input, the output's gradient."""
    model, x = built(name)
    block = recorded(model, x, strict=True).blocks[of,]
    held = {key: value.detach() for key, value in model.named_parameters()}
    return block, held, x.flatten(0, -2), 2 * model(x).detach().flatten(0, -2)


def test_a_hadamard_product_has_a_group_for_every_output_of_its_left_factor() -> None:
    block, held, x, d = factors("loha", "a")
    other = held["d"] @ held["e"]
    for output in range(6):
        rows = torch.stack([(x * other[output] * column).sum(1) for column in held["b"]], 1)
        torch.testing.assert_close(block.factors["A"].value[output], rows.mT @ rows / len(rows))
        torch.testing.assert_close(block.factors["G"].value[output], (0.5 * d[:, output]).square().mean().view(1, 1))


def test_a_hadamard_product_has_a_group_for_every_input_of_its_right_factor() -> None:
    block, held, x, d = factors("loha", "b")
    other = held["d"] @ held["e"]
    for input in range(4):
        rows = 0.5 * torch.stack([(d * other[:, input] * column).sum(1) for column in held["a"].T], 1)
        torch.testing.assert_close(block.factors["G"].value[input], rows.mT @ rows / len(rows))
        torch.testing.assert_close(block.factors["A"].value[input], x[:, input].square().mean().view(1, 1))


@pytest.mark.parametrize(("name", "of"), [("lokr", "b"), ("lokr wide", "b"), ("lokr", "a")])
def test_a_kronecker_product_gives_its_factors_several_rows_a_position(name: str, of: str) -> None:
    """One for every output of the other factor, or for every input if these are fewer."""
    block, held, x, d = factors(name, of)
    own, other = held[of], held["b" if of == "a" else "a"]
    if of == "b":
        x, d = x.unflatten(1, (other.shape[1], -1)), d.unflatten(1, (other.shape[0], -1))
    else:
        x, d = x.unflatten(1, (-1, other.shape[1])).mT, d.unflatten(1, (-1, other.shape[0])).mT
    x, d = (x, other.T @ d) if other.shape[1] < other.shape[0] else (other @ x, d)
    rows, grad_rows = x.flatten(0, 1), d.flatten(0, 1)
    assert rows.shape[1] == own.shape[1] and grad_rows.shape[1] == own.shape[0]
    torch.testing.assert_close(block.factors["A"].value[0], rows.mT @ rows / len(rows))
    torch.testing.assert_close(block.factors["G"].value[0], grad_rows.mT @ grad_rows / len(rows))


NONE: dict[str, tuple[Row, set[str]]] = {
    "a square": ((lambda s, x: F.linear(x, s.a @ s.a), {"a": (4, 4)}, SIGNAL), {"a"}),
    "a function of itself": (
        (lambda s, x: F.linear(x, s.w + s.a @ s.a.sin()), {"a": (4, 4), "w": (4, 4)}, SIGNAL),
        {"a", "w"},
    ),
    "times itself": ((lambda s, x: F.linear(x, (s.a @ s.b) * s.a), {"a": (4, 4), "b": (4, 4)}, SIGNAL), {"a", "b"}),
    "groups": (
        (lambda s, x: F.conv1d(x, (s.a @ s.b).view(4, 2, 2), groups=2), {"a": (4, 2), "b": (2, 4)}, (3, 4, 5)),
        {"a", "b"},
    ),
    "two forms": (
        (lambda s, x: F.linear(x, (s.a @ s.b) * (s.d @ s.e)) + F.linear(F.linear(x, s.b), s.a), ABDE, SIGNAL),
        {"a", "b"},
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_what_has_no_rows_is_generic_and_not_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is too large for a Jacobian."""
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)
    (function, shapes, size), expected = NONE[name]
    net = kfac_fx.compile(Product(function, shapes, (1,)), (torch.randn(size),), loss="normal")
    assert {parameter for r in net.registrations if r.generic for parameter in r.parameters} == expected
    assert {parameter for r in net.registrations for parameter in r.parameters} == set(shapes)


def test_a_kronecker_product_takes_no_mask_and_says_so() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.linear(x + 0 * mask.unsqueeze(-1), torch.kron(self.a, self.b))

    inputs = torch.randn(3, 5, 6), torch.ones(3, 5)
    with pytest.raises(RegistrationError, match="padding_mask fits none of the 2 uses") as caught:
        kfac_fx.compile(Masked(), inputs, loss="normal", padding_mask="mask")
    reason = "its weight is a Kronecker product, whose factors have several rows a position"
    assert str(caught.value).count(reason) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.parametrize("name", ["loha", "lokr of products"])
def test_a_compiled_graph_records_alike(name: str) -> None:
    model, x = built(name)
    found = []
    for backend in ("eager", "aot_eager"):
        net = kfac_fx.compile(model, (x,), loss="normal", backend=backend)
        found.append(net.record((x,), {}, mode="empirical", targets=torch.zeros_like(model(x))).statistics)
    torch.testing.assert_close(found[1], found[0])
