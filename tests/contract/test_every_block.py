"""The laws of every block, whatever its layer and its approximation: definition, powers, triangular factors."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockOperator, make_block, make_groups
from kfac_fx.fisher.groups import BlockGroup, Inverter
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.recording.statistics import additive
from tests.runtime.fisher_cases import CASES, FORMS, assumed_lag, dense_series, draw, register, trained
from tests.tables import pairs

NAMED = {f"{form}-{approximation}": (form, approximation) for form, approximation in CASES}
every_block = pytest.mark.parametrize(("form", "approximation"), NAMED.values(), ids=NAMED)


def matrix(block: BlockOperator, name: str) -> Tensor:
    """The value of A or G as dense matrices of every group."""
    value = block.factors[name].value
    if value.dim() == 2:
        return torch.diag_embed(value)
    g, o, i = block.group.shape
    width, blocks = {"G": (o, block.registration.blocks[0]), "A": (i, block.registration.blocks[1])}[name]
    groups = value.unflatten(0, (g, blocks))
    return torch.stack([torch.block_diag(*group)[:width, :width] for group in groups])


def patches_of(name: str, pixels: Tensor, kernel: int, bias: bool) -> Tensor:
    """A of a patch whose places are uncorrelated, Σ ⊗ I + m mᵀ, from the second moment of pixels with a 1 appended."""
    mean = pixels[:-1, -1:]
    covariance = pixels[:-1, :-1] - (0 if name == "kron_sua_zero_mean" else mean @ mean.mT)
    mean = mean if name == "kron_sua" else 0 * mean
    spread = torch.kron(covariance, torch.eye(kernel, dtype=pixels.dtype))
    m = mean.repeat_interleave(kernel, dim=0)
    if bias:
        spread = torch.block_diag(spread, spread.new_zeros(1, 1))
        m = torch.cat([m, m.new_ones(1, 1)])
    return spread + m @ m.mT


def input_side(block: BlockOperator) -> Tensor:
    """A as dense matrices [g, i, i]."""
    one, value = block.registration, block.factors["A"].value
    if not one.structure.needs_pixels:
        return matrix(block, "A")
    assert one.matrix is not None
    name, bias = one.approximation, one.matrix.bias is not None
    return torch.stack([patches_of(name, pixels, one.kernel, bias) for pixels in value])


def damped(block: BlockOperator, damping: float) -> Tensor:
    """F + λ I as one dense matrix, written as in the paper: c (G + √(λ/c)/π I) ⊗ (A + π √(λ/c) I), group by group; of
    series, V_0 is such a product."""
    if "F" in block.factors:
        f = block.factors["F"].value
        full = f if f.dim() == 2 else torch.diag(f.flatten())
        return full + damping * torch.eye(len(full), dtype=full.dtype)
    g_all, c = matrix(block, "G"), block.factors["positions"].value
    blocks, one = [], block.registration
    for n, (a, g) in enumerate(zip(input_side(block), g_all, strict=True)):
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        a = a + pi * (damping / c).sqrt() * torch.eye(len(a), dtype=a.dtype)
        g = g + (damping / c).sqrt() / pi * torch.eye(len(g), dtype=g.dtype)
        if not one.structure.series:
            blocks.append(c * torch.kron(g, a))
            continue
        a1, g1 = (block.factors[name].value[n] for name in ("A1", "G1"))
        name, steps = one.approximation, len(one.uses)
        v1 = torch.kron(assumed_lag(name, g, g1), assumed_lag(name, a, a1))
        blocks.append(c / steps * dense_series(name, torch.kron(g, a), v1, steps))
    dense: Tensor = torch.block_diag(*blocks)
    return dense


def flat(block: BlockOperator, vector: dict[str, Tensor]) -> Tensor:
    """In the order of the flattened matrix."""
    return block.group.pack(vector, block.member).flatten()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name])


@pairs(("form, approximation", NAMED), ("exp", (1, -2, -1, -0.5, 0.5)))
def test_powers_are_those_of_the_dense_damped_block(form: str, approximation: str, exp: float) -> None:
    block, vector = trained(form, approximation)
    values, vectors = torch.linalg.eigh(damped(block, 0.3))
    expected = vectors @ (values**exp * (vectors.mT @ flat(block, vector)))
    torch.testing.assert_close(flat(block, block.multiply_matpower(vector, exp)), expected)


@every_block
def test_without_damping_the_block_is_its_full_matrix(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation, damping=0.0)
    full, v = block.full_fisher_block(), flat(block, vector)
    torch.testing.assert_close(flat(block, block.multiply(vector)), full @ v)
    torch.testing.assert_close(flat(block, block.multiply_inverse(vector)), torch.linalg.solve(full, v))


@every_block
def test_the_inverse_undoes_the_product(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    assert_same(block.multiply_inverse(block.multiply(vector)), vector)


@pytest.mark.parametrize(
    ("form", "approximation"), {name: case for case in CASES for name in case[1:]}.values(), ids=str
)
def test_a_copy_of_a_block_multiplies_as_the_block_does(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    copied = copy.deepcopy(block)
    assert_same(copied.multiply(vector), block.multiply(vector))
    assert_same(copied.multiply_inverse(vector), block.multiply_inverse(vector))


@every_block
def test_half_powers_compose(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    twice = block.multiply_matpower(block.multiply_matpower(vector, 0.5), 0.5)
    assert_same(twice, block.multiply(vector))
    twice = block.multiply_matpower(block.multiply_matpower(vector, -0.5), -0.5)
    assert_same(twice, block.multiply_inverse(vector))


@every_block
def test_cholesky_factors_make_the_block_and_its_inverse(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    assert_same(block.multiply_cholesky(block.multiply_cholesky(vector, transpose=True)), block.multiply(vector))
    white = block.multiply_cholesky_inverse(vector)
    assert_same(block.multiply_cholesky_inverse(white, transpose=True), block.multiply_inverse(vector))
    assert_same(block.multiply_cholesky(white), vector)


@every_block
def test_transposed_cholesky_is_the_transpose(form: str, approximation: str) -> None:
    block, v = trained(form, approximation)
    w = {name: torch.randn_like(tensor) for name, tensor in v.items()}
    for multiply in (block.multiply_cholesky, block.multiply_cholesky_inverse):
        left = flat(block, w) @ flat(block, multiply(v))
        right = flat(block, multiply(w, transpose=True)) @ flat(block, v)
        torch.testing.assert_close(left, right)


@every_block
def test_stored_powers_are_of_the_last_inverse_update(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    product, inverse = block.multiply(vector), block.multiply_inverse(vector)
    for _ in range(3):
        block.update(draw(block.registration, FORMS[form], 7), 7, decay=0.5)
    assert_same(block.multiply_inverse(vector), inverse)
    assert not all(torch.equal(block.multiply(vector)[name], product[name]) for name in product)
    block.update_inverses()
    assert_same(block.multiply_inverse(block.multiply(vector)), vector)


@every_block
def test_statistics_that_are_not_finite_leave_the_factors_alone(form: str, approximation: str) -> None:
    block, _ = trained(form, approximation)
    before = {name: (factor.moment.clone(), factor.total_weight.clone()) for name, factor in block.factors.items()}
    for bad in (torch.nan, torch.inf):
        moments = draw(block.registration, FORMS[form], 7)
        for name in moments:
            block.update({**moments, name: torch.full_like(moments[name], bad)}, 7, decay=0.95)
    for name, (moment, total_weight) in before.items():
        assert torch.equal(block.factors[name].moment, moment)
        assert torch.equal(block.factors[name].total_weight, total_weight)
    assert block.failures == (0, 2 * len(moments))


@every_block
def test_a_failed_decomposition_keeps_the_last_good_roots(form: str, approximation: str) -> None:
    block, vector = trained(form, approximation)
    inverse, root = block.multiply_inverse(vector), block.multiply_cholesky(vector)
    good = {name: factor.moment.clone() for name, factor in block.factors.items()}
    name = "G" if "G" in block.factors else "F"
    block.factors[name].moment.fill_(torch.nan)
    block.update_inverses()
    assert_same(block.multiply_inverse(vector), inverse)
    assert_same(block.multiply_cholesky(vector), root)
    assert block.failures == (1, 0)
    block.factors[name].moment.copy_(good[name])
    block.update_inverses()
    assert_same(block.multiply_inverse(vector), inverse)
    assert block.failures == (1, 0)


@every_block
def test_float32_agrees_with_float64(form: str, approximation: str) -> None:
    torch.manual_seed(1)
    single, vector = trained(form, approximation, dtype=torch.float32)
    torch.manual_seed(1)
    double, _ = trained(form, approximation)
    wide = {name: tensor.double() for name, tensor in vector.items()}
    narrow = single.multiply_inverse(vector)
    assert all(tensor.dtype is torch.float32 for tensor in narrow.values())
    for name, exact in double.multiply_inverse(wide).items():
        torch.testing.assert_close(narrow[name].double(), exact, rtol=1e-3, atol=1e-4)


@every_block
def test_the_first_update_is_taken_whole(form: str, approximation: str) -> None:
    """Free of bias from the start: no decay shows in the first value."""
    registration, parameters = register(FORMS[form], approximation), FORMS[form].parameters
    moments = draw(registration, FORMS[form], 7)
    forgetful, lasting = (make_block(registration, parameters=parameters) for _ in range(2))
    forgetful.update(moments, 7, decay=0.0)
    lasting.update(moments, 7, decay=0.95)
    for name in forgetful.factors:
        torch.testing.assert_close(forgetful.factors[name].value, lasting.factors[name].value)


def test_groups_are_blocks_of_their_own() -> None:
    """A grouped layer's block is zero between groups, in the order of the flattened [g, o, i]."""
    block, _ = trained("grouped convolution", "kron")
    full = block.full_fisher_block()
    half = len(full) // 2
    assert not full[:half, half:].any()
    for g in range(2):
        a, o = block.factors["A"].value[g], block.factors["G"].value[g]
        expected = block.factors["positions"].value * torch.kron(o, a)
        torch.testing.assert_close(full[g * half : (g + 1) * half, g * half : (g + 1) * half], expected)


def test_several_uses_of_a_diagonal_block_add_up_before_they_are_squared() -> None:
    form = FORMS["linear"]
    assert trained("linear", "diagonal")[0].statistics == ("square",)
    shared = register(form, "diagonal", uses=2)
    moments = [draw(shared, form, 7), draw(shared, form, 7)]
    assert set(moments[0]) == {"per_case"}
    block, _ = trained("linear", "diagonal")
    total = moments[0]["per_case"] + moments[1]["per_case"]
    block.update({"per_case": total}, 7, decay=0.0)
    torch.testing.assert_close(block.factors["F"].value.flatten(), total.square().mean(0))


# --- stacks -----------------------------------------------------------------------------------------------------------

STACKED = 3  # blocks of a group
ROOTS: tuple[Root, ...] = (-1.0, -0.5, "cholesky", "cholesky_inverse")


def renamed(registration: Registration, number: int) -> Registration:
    """The registration of other parameters of the same shapes."""
    matrix = registration.matrix
    halves = (None, None) if matrix is None else (matrix.weight, matrix.bias)
    weight, bias = (None if half is None else (f"{number}.{half[0]}", half[1]) for half in halves)
    names = tuple(f"{number}.{name}" for name in registration.parameters)
    return replace(registration, matrix=matrix and MatrixForm(weight, bias), parameters=names)


@lru_cache
def stack_of(form: str, approximation: str) -> tuple[BlockGroup, list[BlockOperator], dict[str, Tensor]]:
    """A group of blocks that have seen different batches, the same blocks in groups of their own, and a vector."""
    torch.manual_seed(0)
    plain = register(FORMS[form], approximation)
    members = [renamed(plain, number) for number in range(STACKED)]
    parameters = {f"{n}.{name}": t for n in range(STACKED) for name, t in FORMS[form].parameters.items()}
    (group,) = make_groups(members, parameters, roots=ROOTS, damping=torch.tensor(0.3))
    blocks = [make_block(member, parameters=parameters, roots=ROOTS, damping=0.3) for member in members]
    for _ in range(2):
        moments = [draw(plain, FORMS[form], 7) for _ in blocks]
        group.update([additive(plain.structure, of_block) for of_block in moments], 7, decay=0.5)
        for block, of_block in zip(blocks, moments, strict=True):
            block.update(of_block, 7, decay=0.5)
    Inverter([group], ROOTS).update()
    for block in blocks:
        block.update_inverses()
    return group, blocks, {name: torch.randn_like(parameter) for name, parameter in parameters.items()}


@every_block
def test_a_stack_multiplies_as_its_blocks_do(form: str, approximation: str) -> None:
    group, blocks, vector = stack_of(form, approximation)
    for root in (1.0, *ROOTS):
        for transpose in (False, True):
            product = group.unpack(group.multiply(group.pack(vector), root, transpose), vector)
            for number, block in enumerate(blocks):
                alone, member = block._multiply(vector, root, transpose), slice(number, number + 1)
                torch.testing.assert_close({name: product[name] for name in alone}, alone)
                part = group.multiply(group.pack(vector, member), root, transpose, member)
                torch.testing.assert_close(group.unpack(part, vector, member), alone)
    for number, block in enumerate(blocks):
        torch.testing.assert_close(group.dense(number), block.full_fisher_block())


@every_block
def test_a_stack_has_the_eigenvectors_of_its_blocks(form: str, approximation: str) -> None:
    group, blocks, vector = stack_of(form, approximation)
    values, operators = group.eigensystem()
    torch.testing.assert_close(values, torch.cat([block.group.eigensystem()[0] for block in blocks]))
    matrices, parts = group.pack(vector), [group.operators_of(number, operators) for number in range(STACKED)]
    for tensor, again in zip(operators, group.stack_operators(parts), strict=True):
        assert torch.equal(tensor, again)
    turned = group.to_eigenbasis(matrices, operators)
    torch.testing.assert_close(group.from_eigenbasis(turned, operators), matrices)
    products = torch.stack([block.group.dense(0) @ row.flatten() for block, row in zip(blocks, matrices, strict=True)])
    torch.testing.assert_close(group.from_eigenbasis(values * turned, operators).flatten(1), products)
    some = [2, 0]  # of the blocks, in another order
    others = group.without_factors(some)
    assert others.registrations == tuple(group.registrations[number] for number in some)
    assert torch.equal(others.pack(vector), matrices[some])
    of_some = group.stack_operators([parts[number] for number in some])
    torch.testing.assert_close(others.to_eigenbasis(others.pack(vector), of_some), turned[some])


@every_block
def test_the_shapes_of_factors_are_known_without_them(form: str, approximation: str) -> None:
    """The report and `fit_spectrum(memory=...)` read the shapes; a diagonal F has those of its matrix."""
    block, vector = trained(form, approximation)
    known = block.registration.factor_shapes(sum(tensor.numel() for tensor in vector.values()))
    factors = {name: factor.moment.shape for name, factor in block.factors.items() if not factor.stack.per_case}
    assert factors.keys() == known.keys()
    for name, shape in factors.items():
        expected = (shape.numel(),) if name == "F" and block.registration.structure.left.diagonal else tuple(shape)
        assert known[name] == expected
