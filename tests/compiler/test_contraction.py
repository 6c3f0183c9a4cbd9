"""Equations of einsum as contractions: which index is a group, an input, an output or a position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.layers import linear as forms
from kfac_fx.passes.layers.linear import Contraction, contraction
from kfac_fx.passes.matrix import Layout, Shape
from tests.compiler.toy import Toy
from tests.tables import pairs


@pytest.mark.parametrize(
    ("equation", "weight_first", "terms"),
    [
        ("bti,oi->bto", False, ("bti", "oi", "bto")),
        ("oi, nij -> noj", True, ("nij", "oi", "noj")),
        ("bi,io", False, ("bi", "io", "bo")),
        ("bi,ao", False, ("bi", "ao", "abio")),  # without an arrow in the order of the alphabet
        ("...i,oi", False, ("...i", "oi", "...o")),
    ],
)
def test_the_terms_of_an_equation(equation: str, weight_first: bool, terms: tuple[str, str, str]) -> None:
    weight = tuple(range(2, 2 + len(terms[1])))
    assert contraction({"equation": equation, "weight": weight}, weight_first) == Contraction(*terms, weight)


@pytest.mark.parametrize(
    ("x", "weight", "y", "sizes", "roles"),
    [
        ("bti", "oi", "bto", (3, 5), ("", "o", "i")),
        ("bnhk", "khd", "bnd", (3, 2, 5), ("", "d", "kh")),
        ("...hi", "hio", "...ho", (2, 5, 3), ("h", "o", "i")),
        ("btd", "d", "btd", (5,), ("d", "", "")),
        ("bhi", "hio", "bho", (1, 5, 3), ("", "o", "i")),  # the h of the input is a position
        ("bi", "hio", "bho", (1, 5, 3), ("", "ho", "i")),  # the weight alone has an h
    ],
)
def test_the_roles_of_the_indices_of_the_weight(
    x: str, weight: str, y: str, sizes: Shape, roles: tuple[str, str, str]
) -> None:
    terms = Contraction(x, weight, y, sizes)
    assert tuple("".join(role) for role in (terms.groups, terms.outputs, terms.inputs)) == roles


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("equation", "x_shape", "w_shape"),
    [
        ("bti,oi->bto", (4, 7, 5), (3, 5)),
        ("btd,dhk->bhtk", (4, 7, 5), (5, 2, 3)),
        ("bnhk,khd->bnd", (4, 7, 2, 3), (3, 2, 5)),
        ("...hi,hio->...ho", (4, 7, 2, 5), (2, 5, 3)),
        ("btd,d->btd", (4, 7, 5), (5,)),
        ("bhi,hio->bho", (4, 1, 5), (2, 5, 3)),  # the input is broadcast to the groups
        ("bhi,hio->bho", (4, 2, 5), (1, 5, 3)),
    ],
)
def test_the_matrix_times_the_rows_is_the_output(equation: str, x_shape: Shape, w_shape: Shape) -> None:
    x, w = torch.randn(x_shape), torch.randn(w_shape)
    terms = contraction({"equation": equation, "weight": w_shape}, False)
    matrix = terms.weight_layout(Layout(w_shape)).apply(w)
    outputs = torch.einsum("goi,nsgi->nsgo", matrix, terms.rows(x))
    torch.testing.assert_close(outputs, terms.grad_rows(torch.einsum(equation, x, w)))


def test_a_position_that_is_summed_leaves_one_row_a_case() -> None:
    x = torch.randn(4, 7, 5)
    rows = contraction({"equation": "bsi,io->bo", "weight": (5, 3)}, False).rows(x)
    torch.testing.assert_close(rows, x.sum(1)[:, None, None])


@pytest.mark.parametrize(
    ("terms", "linear"),
    [
        (("bi", "io", "bo"), True),
        (("bii", "io", "bo"), False),  # a diagonal of the input
        (("bi", "iio", "bo"), False),  # a diagonal of the weight
        (("bi", "ioz", "bo"), False),  # a sum over the weight alone
        (("bi", "...o", "b...o"), False),
    ],
)
def test_which_contractions_hold_every_element_of_the_weight_once(terms: tuple[str, str, str], linear: bool) -> None:
    assert Contraction(*terms, tuple(range(2, 2 + len(terms[1])))).linear() is linear


@pytest.mark.parametrize(
    ("bias", "taken"),
    [
        ((2, 1, 3), True),
        ((2, 7, 3), False),  # varies along the positions
        ((1, 1, 3), False),  # not along all outputs
        ((1, 2, 1, 3), True),
        ((1, 1, 2, 1, 3), False),  # has more dimensions than the output
        ((3,), False),
    ],
)
def test_which_biases_belong_to_the_layer(bias: Shape, taken: bool) -> None:
    attrs = {"equation": "btd,dhk->bhtk", "weight": (5, 2, 3), "bias": bias}
    assert forms.einsum.takes_bias(attrs, None) is taken
    assert forms.einsum.takes_bias(attrs, (0, 1, 2, 3)) is taken


def test_a_bias_is_laid_out_as_the_outputs_of_the_weight() -> None:
    terms = Contraction("btd", "dkh", "bhtk", (5, 3, 2))
    bias = torch.arange(6.0).view(2, 1, 3)  # [h, t, k]; the matrix has the outputs in the order of the weight, (k h)
    assert terms.bias_layout(Layout((2, 1, 3))).apply(bias).tolist() == [[0, 3, 1, 4, 2, 5]]


# --- of several operands ----------------------------------------------------------------------------------------------


class Einsum(nn.Module):
    """An equation of an activation, "x", and of parameters of these sizes, with a layer before and behind it."""

    def __init__(self, equation: str, operands: tuple[Any, ...]) -> None:
        super().__init__()
        self.equation, self.operands, self.before = equation, operands, nn.Linear(4, 4)
        self.weights = nn.ParameterList(torch.randn(sizes) for sizes in operands if isinstance(sizes, tuple))

    def forward(self, x: Tensor) -> Tensor:
        x, weights = torch.tanh(self.before(x)), iter(self.weights)
        operands = {"x": x, "gate": x.mean(-1), "mask": torch.tensor([1.0, 0.0, 1.0, 1.0])}
        values = [operands[name] if isinstance(name, str) else next(weights) for name in self.operands]
        return torch.tanh(torch.einsum(self.equation, *values))


SEVERAL: dict[str, tuple[str, tuple[Any, ...], list[Shape]]] = {
    "low rank": ("bni,ir,or->bno", ("x", (4, 2), (5, 2)), [(1, 2, 4), (1, 5, 2)]),
    "parameters first": ("ir, or, bni", ((4, 2), (5, 2), "x"), [(1, 2, 4), (1, 5, 2)]),
    "with any dimensions": ("...i,ir,ro->...o", ("x", (4, 2), (2, 5)), [(1, 2, 4), (1, 5, 2)]),
    "twice an activation": ("bid,dk,ek,bje->bij", ("x", (4, 2), (4, 2), "x"), [(1, 2, 4), (1, 4, 2)]),
    "a form": ("bid,de,bje->bij", ("x", (4, 4), "x"), [(1, 4, 4)]),
    "scaled in the middle": ("bni,ri,r,or->bno", ("x", (2, 4), (2,), (5, 2)), [(1, 2, 4), (2, 1, 1), (1, 5, 2)]),
    "gated": ("bni,bn,oi->bno", ("x", "gate", (5, 4)), [(1, 5, 4)]),
    "masked": ("bni,oi,i->bno", ("x", (5, 4), "mask"), [(1, 5, 4)]),
    "a core": ("bni,ir,rst,sj->bntj", ("x", (4, 2), (2, 3, 2), (3, 5)), [(1, 2, 4), (1, 6, 2), (1, 5, 3)]),
}


@pairs(("equation, operands, shapes", SEVERAL), ("exported", [True, False]))
def test_an_einsum_of_several_operands_is_layers(
    equation: str, operands: tuple[Any, ...], shapes: list[Shape], exported: bool
) -> None:
    """They were in diagonal blocks. The graph computes what the model does, and rows make its gradients."""
    if not exported and "mask" in operands:
        pytest.skip("torch.fx keeps the mask as an attribute, which changes no equation")
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4)
    net = kfac_fx.compile(Einsum(equation, operands), (x,) if exported else None, loss="normal", strict=True)
    net.record((x,), {})
    blocks = {r.parameters[0]: r for r in net.registrations}
    found = [blocks[f"weights.{n}"] for n in range(len(shapes))]
    assert [block.matrix.shape for block in found if block.matrix] == shapes
    assert {block.approximation for block in found} == {"kron"}
    assert all(len(node.args) == 3 for node in net.program.graph.nodes if op_name(node) == "einsum")


DOTTED: dict[str, tuple[str, Shape, Shape, Shape, bool]] = {  # equation, sizes of x and w, matrix, without inputs, too
    "no axes": ("...bnd,...de->...bne", (6, 3, 4), (4, 5), (1, 5, 4), True),
    "a weight for an input without": ("bnd,...de->...bne", (6, 3, 4), (4, 5), (1, 5, 4), True),
    "experts": ("...nd,...dh->...nh", (6, 2, 3, 4), (2, 4, 5), (2, 5, 4), False),
    "two axes": ("...d,...dh->...h", (6, 3, 2, 4), (3, 2, 4, 5), (6, 5, 4), False),
    "fewer axes of the input": ("n...d,...dh->n...h", (6, 2, 4), (3, 2, 4, 5), (2, 15, 4), False),
    "the weight first": ("...ed,...bd->...be", (2, 5, 4), (2, 6, 4), (2, 5, 4), False),
    "without an arrow": ("...nd,...dh", (6, 3, 4), (4, 5), (1, 5, 4), True),
}


@pairs(("equation, x_shape, w_shape, matrix, symbolic", DOTTED), ("exported", [True, False]))
def test_dots_in_the_indices_of_a_weight_are_axes_that_have_letters(
    equation: str, x_shape: Shape, w_shape: Shape, matrix: Shape, symbolic: bool, exported: bool
) -> None:
    """The weight was in a diagonal block."""
    if not exported and not symbolic:
        pytest.skip("how many axes the input has is not known without example inputs")
    weight_first = equation.startswith("...ed")
    if weight_first:
        x_shape, w_shape = w_shape, x_shape

    class Dotted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(w_shape))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            return torch.einsum(equation, *((self.weight, x) if weight_first else (x, self.weight)))

    torch.manual_seed(0)
    x = torch.randn(x_shape)
    options: dict[str, Any] = {"batch_dim": 1} if weight_first else {}
    net = kfac_fx.compile(Dotted(), (x,) if exported else None, loss="normal", strict=True, **options)
    net.record((x,), {})  # the rows of the first batch make autograd's gradient
    (block,) = net.registrations
    assert block.matrix is not None and block.matrix.shape == matrix
    assert block.approximation == "kron"


@pytest.mark.parametrize(
    ("of_form", "of_model"),
    [
        ("oab,na,nb->no", "kij,bi,bj->bk"),
        ("kij,bi,bj->bk", "kij,bi,bj->bk"),
        ("oab,...a,...b->...o", "kij,...i,...j->...k"),
    ],
)
def test_letters_of_a_declared_einsum_are_names(of_form: str, of_model: str) -> None:
    """Another letter was another einsum, so the layer was nowhere in the graph."""
    net = kfac_fx.compile(Squares(of_model), (torch.randn(6, 4),), loss="normal", layers=[squares(of_form)])
    assert [row.layer for row in net.report.rows] == ["squared"]


def test_other_letters_of_a_declared_einsum_make_another_one() -> None:
    with pytest.warns(UserWarning, match="the layer 'squared' of layers=.* is nowhere in the graph"):
        kfac_fx.compile(
            Squares("kij,bi,bj->bk"), (torch.randn(6, 4),), loss="normal", layers=[squares("kij,bj,bi->bk")]
        )


class Squares(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, self.weight, x, x)


def squares(equation: str) -> Any:
    @kfac_fx.layer(
        rows=lambda x, attrs: (x[:, :, None] * x[:, None, :]).reshape(len(x), 1, -1),
        grad_rows=lambda dy, attrs: dy.unsqueeze(1),
        layouts={"weight": "k i j -> k (i j)"},
        example=lambda: (Squares(equation), torch.randn(6, 4)),
    )
    def squared(x: Tensor, *, weight: Tensor) -> Tensor:
        return torch.einsum(equation, weight, x, x)

    return squared


@pytest.mark.parametrize(
    ("equation", "operands"), [("bni,bnj,bnk->bnijk", ("x", "x", "x")), ("bni,iii,i->bn", ("x", (4, 4, 4), (4,)))]
)
def test_other_einsums_stay_as_they_are(equation: str, operands: tuple[Any, ...]) -> None:
    """One without parameters, whose order is torch's to choose, and one of an index that a weight has three times."""
    net = kfac_fx.compile(Einsum(equation, operands), (torch.randn(6, 3, 4),), loss="normal")
    assert [len(node.args) for node in net.program.graph.nodes if op_name(node) == "einsum"] == [4]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("exported", [True, False])
@pytest.mark.parametrize(
    ("equation", "w_shape"),
    [("bd,dd->bd", (4, 4)), ("bd,dd", (4, 4)), ("bd,dde->be", (4, 4, 3)), ("bd,dede->bde", (4, 3, 4, 3))],
)
def test_an_index_that_a_weight_has_twice_is_one_of_its_diagonal(equation: str, w_shape: Shape, exported: bool) -> None:
    model, x = Toy(lambda x, w: torch.tanh(torch.einsum(equation, x, w)).flatten(1), w=w_shape), torch.randn(5, 4)
    if equation == "bd,dd":
        model = Toy(lambda x, w: torch.tanh(torch.einsum(equation, x, w))[:, None], w=w_shape)
    net = kfac_fx.compile(model, (x,) if exported else None, loss="normal", approximations={"w": "full"})
    y = model(x).detach() + 1
    found = net.record((x,), {}, mode="empirical", targets=y).statistics["w",]["per_case"]
    assert not any(registration.generic for registration in net.registrations)
    wanted = [
        torch.autograd.grad(kfac_fx.losses.Normal(model(case), targets=target).evaluate(), model.w)[0].flatten()
        for case, target in zip(x.split(1), y.split(1), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(wanted))


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_product_that_is_summed_has_the_block_of_the_same_einsum(keepdim: bool) -> None:
    """As the attention of a graph network: cases are merged with edges, so its scale would have a diagonal block."""

    def by_heads(x: Tensor) -> Tensor:
        return torch.tanh(x).flatten(0, 1).unflatten(-1, (2, 3))

    def back(y: Tensor) -> Tensor:
        return y.reshape(-1, 4, 2)

    written = Toy(lambda x, w: back((by_heads(x) * w).sum(-1, keepdim=keepdim)), w=(1, 2, 3))
    einsum = Toy(lambda x, w: back(torch.einsum("nhi,phi->nh", by_heads(x), w)), w=(1, 2, 3))
    einsum.load_state_dict(written.state_dict())
    x = torch.randn(5, 4, 6)
    first, second = (kfac_fx.compile(model, (x,), loss="normal", strict=True) for model in (written, einsum))
    assert [str(r) for r in first.registrations] == [str(r) for r in second.registrations] == ["linear(w)"]
    shapes = [row.factors for net in (first, second) for row in net.report.rows]
    assert shapes == [{"A": (2, 3, 3), "G": (2, 1, 1)}] * 2
