"""Golden numbers of TensorFlow's K-FAC in our layout, and what a block says when it is used wrongly.

There the matrix is [in, out] and flattened in that order; here it is its transpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockOperator, make_block, make_groups
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.errors import FactorNotReady, NotRegisteredError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.recording.statistics import sum_of
from tests.runtime.fisher_cases import FORMS, draw, register

ROOTS: tuple[Root, ...] = (-1.0, -0.5, "cholesky", "cholesky_inverse")
A2, G2 = [[5.0, 7.0], [7.0, 10.0]], [[2.0, 1.0], [1.0, 3.0]]
W = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def psd(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.float64) + torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64))


def tensor(values: Sequence[object] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def linear(outputs: int, inputs: int) -> Registration:
    form = MatrixForm(("weight", Layout((outputs, inputs)).reshape((1, outputs, inputs))), None)
    return Registration("linear", form, ("weight",), (), "kron")


def kronecker(
    a: Sequence[object] | Tensor, g: Sequence[object] | Tensor, *, damping: float, positions: int = 1
) -> BlockOperator:
    """A linear layer's block of given factors."""
    a, g = tensor(a), tensor(g)
    weight = torch.zeros(len(g), len(a), dtype=torch.float64)
    block = make_block(linear(len(g), len(a)), parameters={"weight": weight}, damping=damping, roots=ROOTS)
    count = float(positions)
    block.update({"count": tensor([count])[0], "A": count * a[None], "G": count * g[None]}, cases=1, decay=0.95)
    block.update_inverses()
    return block


def result(product: dict[str, Tensor]) -> Tensor:
    """In TensorFlow's layout."""
    return product["weight"].mT


def vector(matrix: Tensor) -> dict[str, Tensor]:
    return {"weight": matrix.mT}


def close(actual: Tensor, expected: Sequence[object] | Tensor) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=0, atol=6e-7)  # the numbers have six digits


def test_golden_kronecker_products() -> None:
    block, v = kronecker(A2, G2, damping=0.5), vector(W)
    close(result(block.multiply_inverse(v)), [[-0.184568, -0.023875], [0.192038, 0.096872]])
    close(result(block.multiply(v)), [[106.013435, 165.086649], [156.852635, 241.416581]])
    close(result(block.multiply_cholesky(v)), [[3.871787, 10.240382], [12.878801, 27.727057]])
    close(result(block.multiply_cholesky(v, transpose=True)), [[27.381012, 28.048282], [13.244589, 12.671459]])
    close(result(block.multiply_cholesky_inverse(v)), [[0.258279, 0.367154], [0.659999, 0.306878]])
    close(result(block.multiply_matpower(v, -0.5)), [[-0.166943, 0.110973], [0.593170, 0.582450]])


def test_golden_damping_of_both_sides() -> None:
    """π = √3 for these factors."""
    block = kronecker(A2, G2, damping=0.5)
    a, g = (block.group.split_damping()[side].item() for side in (block.group.sides[1], block.group.sides[0]))
    assert (a, g) == pytest.approx((1.2247449, 0.4082483), abs=1e-7)


def test_golden_kronecker_products_of_four_positions() -> None:
    block, v = kronecker(A2, G2, damping=0.5, positions=4), vector(W)
    close(result(block.multiply_inverse(v)), [[-0.103512, -0.017751], [0.090087, 0.034311]])
    close(result(block.multiply(v)), [[391.526870, 609.173298], [568.205271, 878.833162]])


def test_golden_identity_factors() -> None:
    """π = 1: every entry is divided by (1 + √λ)², the bias row like the others."""
    block = kronecker(torch.eye(3), torch.eye(2), damping=0.5)
    w = tensor([[2.0, 3.0], [4.0, 5.0], [1.0, 2.0]])
    close(result(block.multiply_inverse(vector(w))), [[0.686291, 1.029437], [1.372583, 1.715729], [0.343146, 0.686291]])


def test_golden_identity_factors_of_a_convolution() -> None:
    block = kronecker(torch.eye(9), torch.eye(2), damping=0.5, positions=4)
    w = torch.zeros(9, 2, dtype=torch.float64)
    w[0], w[-1] = tensor([1.0, 2.0]), tensor([2.0, 3.0])
    inverse = result(block.multiply_inverse(vector(w)))
    close(inverse[0], [0.136455, 0.272910])
    close(inverse[-1], [0.272910, 0.409365])


def test_golden_inverse_of_a_full_kronecker_product() -> None:
    v = vector(torch.arange(6.0, dtype=torch.float64).view(3, 2))
    inverse = result(kronecker(psd(3), psd(2), damping=0.0).multiply_inverse(v))
    close(inverse.flatten(), [-0.4, -0.023529, 0.2, 0.188235, 0.4, 0.258824])


def test_golden_inverse_of_a_full_kronecker_product_of_four_positions() -> None:
    v = vector(torch.arange(16.0, dtype=torch.float64).view(8, 2))
    inverse = result(kronecker(psd(8), psd(2), damping=0.0, positions=4).multiply_inverse(v))
    expected = [
        -0.297598, -0.115178, -0.048799, -0.007589, 0.034134, 0.028274, 0.075600, 0.046206,
        0.100480, 0.056964, 0.117067, 0.064137, 0.128915, 0.069260, 0.137800, 0.073103,
    ]  # fmt: skip
    close(inverse.flatten(), expected)


def test_full_block_is_the_kronecker_product_in_our_order() -> None:
    block = kronecker(psd(3), psd(2), damping=0.5, positions=4)
    torch.testing.assert_close(block.full_fisher_block(), 4 * torch.kron(psd(2), psd(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_generic_blocks(dtype: torch.dtype) -> None:
    """A vector and a scalar in one block, against numbers of the explicit inverse."""
    parameters = {"a": torch.zeros(2, dtype=dtype), "b": torch.zeros((), dtype=dtype)}
    v = {"a": torch.tensor([4.0, 5.0], dtype=dtype), "b": torch.tensor(6.0, dtype=dtype)}
    numbers = {"full": [0.8583, 0.91498, 0.939271], "diagonal": [1.6, 1.428571, 1.333333]}
    for approximation, expected in numbers.items():
        registration = Registration("generic", None, ("a", "b"), (), approximation)
        block = make_block(registration, parameters=parameters, damping=0.5)
        factor = psd(3) if approximation == "full" else tensor([[[2.0], [3.0], [4.0]]])
        block.update({"gradient": torch.ones(3, dtype=dtype)}, 1, decay=1.0)
        block.factors["F"].moment.copy_(factor)
        block.update_inverses()
        inverse = block.multiply_inverse(v)
        assert {name: t.shape for name, t in inverse.items()} == {"a": (2,), "b": ()}
        close(torch.cat([inverse["a"], inverse["b"][None]]).double(), expected)


def test_golden_generic_block_of_a_constant_diagonal() -> None:
    """Identity, λ = ½: two thirds of the vector."""
    registration = Registration("generic", None, ("a",), (), "diagonal")
    block = make_block(registration, parameters={"a": torch.zeros(3)}, damping=0.5)
    block.update({"gradient": torch.ones(3)}, 1, decay=0.95)
    block.update_inverses()
    torch.testing.assert_close(block.multiply_inverse({"a": 2 * torch.ones(3)})["a"], torch.full((3,), 4 / 3))


def test_golden_fully_connected_diagonal() -> None:
    x, d = tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), tensor([[[1.0, -1.0]], [[2.0, 0.5]]])
    form = MatrixForm(("weight", Layout((2, 2)).reshape((1, 2, 2))), ("bias", Layout((2,)).reshape((1, 2))))
    registration = Registration("linear", form, ("weight", "bias"), (), "diagonal")
    parameters = {"weight": W, "bias": W[0]}
    block = make_block(registration, parameters=parameters)
    block.update({"square": sum_of("square", x, d, True, (1, 2, 3))}, 2, decay=0.95)
    product = block.multiply({name: torch.ones_like(p) for name, p in parameters.items()})
    close(product["weight"].mT, [[18.5, 1.625], [34.0, 4.0]])
    close(product["bias"], [2.5, 0.625])


def test_golden_scale_and_shift() -> None:
    """Full block of three scales and three shifts; p lists the scales first, our matrix pairs them."""
    p = tensor([[1.0, 0, -3, 1, 0, -1], [8.0, 5, 0, 2, 1, 0]])
    x, d = tensor([[1.0, 2, 3], [4.0, 5, 6]]).view(2, 1, 3, 1), tensor([[1.0, 0, -1], [2.0, 1, 0]]).view(2, 1, 3, 1)
    form = MatrixForm(("scale", Layout((3,)).reshape((3, 1, 1))), ("shift", Layout((3,)).reshape((3, 1))))
    for approximation, expected in (("full", p.mT @ p / 2), ("diagonal", torch.diag(p.square().mean(0)))):
        registration = Registration("scale_and_shift", form, ("scale", "shift"), (), approximation)
        block = make_block(registration, parameters={"scale": tensor([0.0] * 3), "shift": tensor([0.0] * 3)})
        block.update({"per_case": sum_of("per_case", x, d, True, (3, 1, 2))}, 2, decay=0.95)
        for k, unit in enumerate(torch.eye(6, dtype=torch.float64)):
            column = block.multiply({"scale": unit[:3], "shift": unit[3:]})
            close(torch.cat([column["scale"], column["shift"]]), expected[k])


def test_embedding_rows_that_never_occur_are_only_damped() -> None:
    """Diagonal input side: the rows of unseen ids are zero, and the inverse scales row by row."""
    form = FORMS["embedding"]
    registration = register(form, "kron_in_diag")
    assert registration.matrix is not None
    ids, d = torch.tensor([[1], [3], [4]]), torch.randn(3, 1, 2, dtype=torch.float64)
    moments = {s.name: sum_of(s.name, ids, d, False, (1, 2, 5)) for s in registration.statistics}
    block = make_block(registration, parameters=form.parameters, damping=0.1)
    block.update(moments, 3, decay=0.95)
    block.update_inverses()
    a, g = block.factors["A"].value[0], block.factors["G"].value[0]
    assert a.tolist() == pytest.approx([0, 1 / 3, 0, 1 / 3, 1 / 3])
    pi = (a.mean() / (g.trace() / 2)).sqrt()
    root = torch.tensor(0.1, dtype=torch.float64).sqrt()
    inverse_g = torch.linalg.inv(g + root / pi * torch.eye(2, dtype=torch.float64))
    v = torch.randn(5, 2, dtype=torch.float64)
    expected = (v @ inverse_g) / (a + pi * root)[:, None]
    torch.testing.assert_close(block.multiply_inverse({"weight": v})["weight"], expected)


def test_a_zero_side_is_damped_evenly() -> None:
    """π = 1 where a trace is zero: dead outputs do not make the damping infinite."""
    block = kronecker(A2, torch.zeros(2, 2), damping=0.5)
    a, g = tensor(A2) + 0.5**0.5 * torch.eye(2), torch.eye(2, dtype=torch.float64) * 0.5**0.5
    torch.testing.assert_close(result(block.multiply(vector(W))), a @ W @ g)


def test_low_precision_parameters_have_float32_factors() -> None:
    block = make_block(linear(2, 2), parameters={"weight": W.bfloat16()}, damping=0.5)
    block.update({"count": torch.tensor(1.0), "A": torch.eye(2)[None], "G": torch.eye(2)[None]}, 1, decay=0.9)
    block.update_inverses()
    assert block.factors["A"].moment.dtype is torch.float32
    assert block.multiply_inverse({"weight": W.bfloat16()})["weight"].dtype is torch.bfloat16


def test_blocks_of_equal_shape_and_approximation_share_a_group() -> None:
    names = ["linear", "linear with bias", "embedding", "linear", "linear"]
    approximations = ["kron", "kron", "kron_in_diag", "kron_indep", "diagonal"]
    registrations, parameters = [], dict[str, Tensor]()
    for k, (name, approximation) in enumerate(zip(names, approximations, strict=True)):
        plain = register(FORMS[name], approximation)
        renamed = tuple(f"{k}.{p}" for p in plain.parameters)
        parameters |= {f"{k}.{p}": t for p, t in FORMS[name].parameters.items()}
        registrations.append(Registration("layer", plain.matrix, renamed, plain.uses, approximation))
    groups = make_groups(registrations, parameters, roots=(-1.0,), damping=torch.tensor(0.1))
    assert [[registration.parameters[0] for registration in group.registrations] for group in groups] == [
        ["0.weight", "3.weight"], ["1.weight"], ["2.weight"], ["4.weight"],
    ]  # fmt: skip


@pytest.mark.parametrize("updated", [False, True])
def test_a_block_of_another_process_is_as_ready_as_its_group(updated: bool) -> None:
    registration, parameters = register(FORMS["linear"], "kron"), FORMS["linear"].parameters
    (group,) = make_groups([registration], parameters, roots=(-1.0,), damping=torch.tensor(0.1))
    group.here, group.updated = False, updated
    assert BlockOperator(group, 0).has_factors is updated


def test_a_power_that_is_not_kept_says_how_to_keep_it() -> None:
    block = kronecker(A2, G2, damping=0.5)
    with pytest.raises(
        KeyError, match=r"the power -0\.25 is not kept: pass exps=\(-1\.0, -0\.5, -0\.25\) to FisherEst"
    ):
        block.multiply_matpower(vector(W), -0.25)
    plain = make_block(linear(2, 2), parameters={"weight": W})
    plain.update({"count": tensor([1.0])[0], "A": tensor(A2)[None], "G": tensor(G2)[None]}, 1, decay=0.9)
    with pytest.raises(NotRegisteredError, match=r"no cholesky is kept: pass compute_cholesky=True"):
        plain.multiply_cholesky(vector(W))
    with pytest.raises(NotRegisteredError, match=r"no cholesky inverse is kept: pass compute_cholesky_inverse=True"):
        plain.multiply_cholesky_inverse(vector(W))


def test_a_vector_of_another_shape_or_without_a_name_is_refused() -> None:
    """A weight [in, out] has as many elements as one [out, in], and would be read in another order."""
    block = kronecker(torch.eye(3), torch.eye(2), damping=0.5)
    with pytest.raises(NotRegisteredError) as failure:
        block.multiply({"weight": torch.ones(3, 2)})
    assert str(failure.value).splitlines() == [
        "the vector does not fit the registered parameters:",
        "  weight is [3, 2], the parameter [2, 3]",
    ]
    with pytest.raises(NotRegisteredError, match=r"the registered parameters:\n  missing  weight"):
        block.multiply_inverse({"wieght": torch.ones(2, 3)})
    with pytest.raises(TypeError, match="a vector is a dict of tensors by parameter name, not a list"):
        block.multiply([torch.ones(2, 3)])  # type: ignore[arg-type]
    more = {"weight": torch.ones(2, 3), "of another block": torch.ones(1)}
    assert list(block.multiply(more)) == ["weight"]


def test_products_before_the_first_update_say_what_to_call() -> None:
    block = make_block(linear(2, 2), parameters={"weight": W}, damping=0.5)
    for early in (block.multiply, block.multiply_inverse):
        with pytest.raises(
            FactorNotReady,
            match=r"factors of linear\(weight\) read before .*: call estimator\.update_covariances\(inputs\)",
        ):
            early(vector(W))
    with pytest.raises(FactorNotReady, match="factors of linear"):
        block.full_fisher_block()
    block.update({"count": tensor([1.0])[0], "A": tensor(A2)[None], "G": tensor(G2)[None]}, 1, decay=0.9)
    block.multiply(vector(W))
    with pytest.raises(
        FactorNotReady, match=r"inverse of linear\(weight\) .* call estimator\.update_inverses\(\) first"
    ):
        block.multiply_inverse(vector(W))


def test_a_block_without_any_good_inverse_stands_still() -> None:
    block = make_block(linear(2, 2), parameters={"weight": W}, damping=0.5)
    bad = torch.full((1, 2, 2), torch.nan, dtype=torch.float64)
    block.update({"count": tensor([1.0])[0], "A": bad, "G": bad}, 1, decay=0.9)
    block.update_inverses()
    assert not block.multiply_inverse(vector(W))["weight"].any()
    assert block.failures == (1, 1)


def test_a_batch_without_rows_is_no_failure_and_lowers_only_the_rows_a_case() -> None:
    """An embedding whose ids are all masked: there is nothing to average into A and G, and c of this batch is 0."""
    form = FORMS["embedding"]
    registration = register(form, "kron_in_diag")
    block = make_block(registration, parameters=form.parameters)
    block.update(draw(registration, form, 4), 4, decay=0.9)
    before = {name: factor.moment.clone() for name, factor in block.factors.items()}
    ids, d = torch.full((4, 2), -1), torch.randn(4, 2, 2, dtype=torch.float64)
    nothing = {s.name: sum_of(s.name, ids, d, False, (1, 2, 5)) for s in registration.statistics}
    positions = block.factors["positions"].value.clone()
    block.update(nothing, 4, decay=0.9)
    assert all(torch.equal(block.factors[name].moment, before[name]) for name in ("A", "G"))
    torch.testing.assert_close(block.factors["positions"].value, positions * 0.9 / 1.9)
    assert block.failures == (0, 0)


NO_ROWS = [
    ("linear with bias", "kron"), ("linear with bias", "kron_series_1"), ("linear with bias", "kron_series_2"),
    ("convolution", "kron_sua"), ("convolution", "kron_sua_centered"), ("embedding", "kron_in_diag"),
    ("linear", "kron in blocks"), ("linear with bias", "kron_both_diag"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "approximation"), NO_ROWS)
def test_a_block_that_had_no_rows_yet_is_its_damping(form: str, approximation: str) -> None:
    """As of an output that no loss reads, or a submodule that was not called. F is zero, so F + λ I is λ I; the first
    rows make the factors of their batch alone, and only the rows a case know of the batches without."""
    case, generator = FORMS[form], torch.Generator().manual_seed(0)
    registration = register(case, approximation)
    vector = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in case.parameters.items()}
    block, plain = (make_block(registration, parameters=case.parameters, damping=0.25, roots=ROOTS) for _ in range(2))
    sums = draw(registration, case, 4)
    nothing = {name: torch.zeros_like(value) for name, value in sums.items()}
    for _ in range(2):
        block.update(nothing, 4, decay=0.5)
    block.update_inverses()
    for product, power in (
        (block.multiply(vector), 1), (block.multiply_inverse(vector), -1),
        (block.multiply_matpower(vector, -0.5), -0.5), (block.multiply_cholesky(vector), 0.5),
        (block.multiply_cholesky_inverse(vector, transpose=True), -0.5),
    ):  # fmt: skip
        torch.testing.assert_close(product, {name: tensor * 0.25**power for name, tensor in vector.items()})
    assert not block.full_fisher_block().any() and block.failures == (0, 0)
    block.update(sums, 4, decay=0.5)
    plain.update(sums, 4, decay=0.5)
    seen = 1 / (1 + 0.5 + 0.25)  # the weight of this batch among three
    for name, factor in plain.factors.items():
        known = factor.value * (seen if name in ("positions", "pairs") else 1)
        torch.testing.assert_close(block.factors[name].value, known)
    torch.testing.assert_close(block.full_fisher_block(), plain.full_fisher_block() * seen)
    block.update(nothing, 4, decay=0.0)  # the last batch alone counts
    assert not block.full_fisher_block().any()
    torch.testing.assert_close(block.multiply(vector), {name: tensor * 0.25 for name, tensor in vector.items()})


def test_a_block_shows_what_it_is() -> None:
    assert repr(kronecker(A2, G2, damping=0.5)) == "BlockOperator(linear(weight), kron, [1, 2, 2])"
