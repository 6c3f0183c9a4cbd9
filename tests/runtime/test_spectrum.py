"""The Fisher of a whole model by its eigenvectors: scale, damping, many vectors, and what may not be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import kfac_fx
from kfac_fx import ApproximationError, FactorNotReady, FisherEstimator, NotRegisteredError, RegistrationError, Spectrum
from kfac_fx.fisher import series
from kfac_fx.fisher.block import make_block
from kfac_fx.fisher.spectrum import Relative, System
from tests.runtime.fake_net import FakeNet, batch, deep, exact, mixed, noise
from tests.runtime.fisher_cases import FORMS, draw, register


def dense(est: FisherEstimator) -> Tensor:
    """F of all blocks, in the order of the spectrum's eigenvalues."""
    full: Tensor = torch.block_diag(*(block.full_fisher_block() for block in est.blocks.values()))
    return full


def test_all_blocks_of_a_model_count() -> None:
    est = exact(mixed(), batch())
    spectrum, full = est.spectrum(scale=10, damping=0.5), dense(est)
    precision = 10 * full + 0.5 * torch.eye(len(full), dtype=full.dtype)
    torch.testing.assert_close(spectrum.log_determinant(), torch.logdet(precision))
    torch.testing.assert_close(spectrum.trace(-2), torch.linalg.inv(precision @ precision).trace())
    assert set(spectrum.eigenvalues()) == set(est.blocks)
    total = sum(tensor.sum() for tensor in spectrum.diagonal(-1).values())
    torch.testing.assert_close(total, spectrum.trace(-1))
    v = noise(est)
    back = spectrum.multiply_inverse(spectrum.multiply(v))
    assert list(back) == list(v)
    for name, tensor in v.items():
        torch.testing.assert_close(back[name], tensor)


def test_damping_is_added_as_it_is_where_the_estimator_splits_it() -> None:
    est = exact(deep(), batch(), damping=0.3)
    v = noise(est)
    whole, split = est.spectrum().multiply(v), est.multiply(v)
    alone = est.spectrum(damping=0.0).multiply(v)
    for name, tensor in v.items():
        torch.testing.assert_close(whole[name], alone[name] + 0.3 * tensor)
    assert not all(torch.allclose(whole[name], split[name]) for name in v)


def test_without_damping_it_is_the_estimator() -> None:
    est = exact(mixed(), batch(), damping=0.0)
    v = noise(est)
    ours, theirs = est.spectrum().multiply(v), est.multiply(v)
    for name in v:
        torch.testing.assert_close(ours[name], theirs[name])


def test_another_scale_and_damping_need_no_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    est = exact(mixed(), batch())
    spectrum, fresh = est.spectrum(), est.spectrum(scale=7.0, damping=2.0)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    moved = spectrum.at(scale=7.0).at(damping=2.0)
    assert moved.log_determinant() == fresh.log_determinant()
    assert repr(moved) == "Spectrum(scale=7.0, damping=2.0, 4 blocks)"


def test_factors_come_back_from_a_file_of_safetensors(tmp_path: Path) -> None:
    est = exact(mixed(), batch(), seed=0, damping=0.2)
    save_file(est.state_dict(), tmp_path / "factors.safetensors")
    again = FisherEstimator(est.net, seed=1)
    again.load_state_dict(load_file(tmp_path / "factors.safetensors"))
    assert again.spectrum().log_determinant() == est.spectrum().log_determinant()


def test_later_batches_do_not_enter() -> None:
    net = mixed()
    est = exact(net, batch())
    spectrum = est.spectrum(damping=1.0)
    before = spectrum.log_determinant()
    est.accumulate(net.record((batch(),), {}, mode="exact"))
    est.fold()
    est.damping = 5.0
    assert spectrum.log_determinant() == before != est.spectrum(damping=1.0).log_determinant()


def test_every_block_may_have_a_damping_of_its_own() -> None:
    est = exact(mixed(), batch())
    each = {key: 0.1 * (n + 1) for n, key in enumerate(est.blocks)}
    blocks = [block.full_fisher_block() for block in est.blocks.values()]
    expected = [
        torch.logdet(f + sample * torch.eye(len(f), dtype=f.dtype))
        for f, sample in zip(blocks, each.values(), strict=True)
    ]
    torch.testing.assert_close(est.spectrum(damping=each).log_determinant(), torch.stack(expected).sum())


def test_determinants_are_differentiated_by_scale_and_damping() -> None:
    est = exact(mixed(), batch())
    scale, damping = (torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in (6.0, 0.4))
    spectrum = est.spectrum(scale=scale, damping=damping)
    by_scale, by_damping = torch.autograd.grad(spectrum.log_determinant(), [scale, damping])
    torch.testing.assert_close(by_damping, spectrum.trace(-1).detach())
    inverse = torch.linalg.inv(6 * dense(est) + 0.4 * torch.eye(len(dense(est)), dtype=torch.float64))
    torch.testing.assert_close(by_scale, (inverse @ dense(est)).trace())


def test_many_vectors_are_multiplied_at_once() -> None:
    est = exact(mixed(), batch())
    spectrum = est.spectrum(damping=0.1)
    vectors = [noise(est) for _ in range(6)]
    together = {name: torch.stack([vector[name] for vector in vectors]).unflatten(0, (2, 3)) for name in vectors[0]}
    native = spectrum.multiply_inverse(together)
    mapped = vmap(vmap(spectrum.multiply_inverse))(together)
    for n, single in enumerate(vectors):
        for name, expected in spectrum.multiply_inverse(single).items():
            torch.testing.assert_close(native[name][n // 3, n % 3], expected)
            torch.testing.assert_close(mapped[name][n // 3, n % 3], expected)


def test_many_vectors_of_generic_parameters_lie_in_any_order_in_memory() -> None:
    net = kfac_fx.compile(nn.Linear(3, 2), (torch.randn(4, 3),), loss="normal", approximations={"*": "generic"})
    spectrum = kfac_fx.fit_spectrum(net, [torch.randn(4, 3)]).at(damping=0.1)
    many = {"weight": torch.randn(3, 5, 2).permute(1, 2, 0), "bias": torch.randn(2, 5).T}
    product = spectrum.multiply_inverse(many)
    for n in range(5):
        alone = spectrum.multiply_inverse({name: tensor[n].clone() for name, tensor in many.items()})
        torch.testing.assert_close({name: tensor[n] for name, tensor in product.items()}, alone)


def test_samples_follow_their_generator() -> None:
    spectrum = exact(mixed(), batch()).spectrum(damping=0.1)
    first, again = (spectrum.sample(2, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(draws[0], draws[1]) for draws in first.values())


def rows_of(net: FakeNet, x: Tensor) -> dict[str, Tensor]:
    """Gradients of every case for every column of B, B Bᵀ the Fisher of its outputs: [N, k, *shape] by parameter."""
    theta = {name: p.detach() for name, p in net.named_parameters()}
    jacobians = vmap(jacrev(lambda p, one: functional_call(net.model, p, (one[None],))[0]), (None, 0))(theta, x)
    roots = net.roots(net.model(x).detach())
    return {name: torch.einsum("no...,nok->nk...", j, roots) for name, j in jacobians.items()}


def test_corrected_eigenvalues_are_the_diagonal_of_the_fisher_along_the_eigenvectors() -> None:
    net, x = deep(), batch(9)
    net.loss = "categorical"
    est, fisher = exact(net, x), net.fisher(x)
    rows, v = rows_of(net, x), noise(est)
    batches = [{name: row[part] for name, row in rows.items()} for part in (slice(0, 4), slice(4, 9))]
    product = est.spectrum(damping=0.0).corrected(batches).multiply(v)
    for key in list(est.blocks)[:2]:
        block, full = est.blocks[key], fisher[key]
        kronecker = block.full_fisher_block()
        _, vectors = torch.linalg.eigh(kronecker)
        expected = vectors @ (vectors.mT @ full @ vectors).diagonal().diag() @ vectors.mT
        mine, vector = (block.group.pack(tensors, block.member).flatten() for tensors in (product, v))
        torch.testing.assert_close(mine, expected @ vector)
        assert (expected - full).norm() < (kronecker - full).norm()


def test_corrected_without_an_approximation_changes_nothing() -> None:
    """One case makes Kronecker products exact."""
    net, x = FakeNet(deep().model[:1], {"0": "kron"}), batch(1)
    spectrum = exact(net, x).spectrum(damping=0.3)
    corrected = spectrum.corrected([rows_of(net, x)])
    torch.testing.assert_close(corrected.log_determinant(), spectrum.log_determinant())
    assert corrected.damping == spectrum.damping


def test_corrections_without_cases_are_refused() -> None:
    est = exact(mixed(), batch())
    for gradients in ([], [noise(est)]):
        with pytest.raises(ValueError, match="the gradients have no cases: every tensor needs a first dimension"):
            est.spectrum().corrected(gradients)


class Sliced(nn.Module):
    """Two of three parts of a projection are used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w[0:2].T + (x @ self.w[4:6].T).tanh()


def test_pieces_of_a_parameter_are_put_together_again() -> None:
    model, x = Sliced(), torch.randn(8, 3)
    est = FisherEstimator(kfac_fx.compile(model, loss="normal"), seed=0)
    est.update_covariances(x)
    assert len(est.blocks) == 2
    spectrum = est.spectrum(damping=0.1)
    product, diagonal = spectrum.multiply({"w": torch.ones(6, 3)}), spectrum.diagonal()
    sample = spectrum.sample(5)["w"]
    assert sample.shape == (5, 6, 3) and diagonal["w"].shape == (6, 3)
    for tensor in (product["w"], diagonal["w"], sample[0]):
        assert not tensor[2:4].any() and tensor[:2].all() and tensor[4:].all()


@pytest.mark.parametrize("approximation", ["kron", "kron in blocks"])
def test_what_had_no_rows_is_its_damping(approximation: str) -> None:
    registration, parameters = register(FORMS["linear"], approximation), FORMS["linear"].parameters
    block = make_block(registration, parameters=parameters)
    block.update(
        {name: torch.zeros_like(tensor) for name, tensor in draw(registration, FORMS["linear"], 3).items()},
        3,
        decay=0.9,
    )
    spectrum = Spectrum([System.of(block.group)], {n: p.shape for n, p in parameters.items()}, 5.0, 0.25)
    assert all((values == 0.25).all() for values in spectrum.eigenvalues().values())
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    torch.testing.assert_close(spectrum.multiply(vector), {name: 0.25 * tensor for name, tensor in vector.items()})


def test_a_decomposition_that_fails_is_tried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 3)
    est = FisherEstimator(kfac_fx.compile(nn.Linear(3, 2), loss="normal"))
    est.update_covariances(x)
    expected, eigh = est.spectrum().log_determinant(), torch.linalg.eigh

    def narrow_fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError  # type: ignore[attr-defined]
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", narrow_fails)
    torch.testing.assert_close(est.spectrum().log_determinant(), expected)


def test_series_too_wide_for_a_dense_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registration, parameters = (
        register(FORMS["linear with bias"], "kron_series_1"),
        FORMS["linear with bias"].parameters,
    )
    block = make_block(registration, parameters=parameters)
    block.update(draw(registration, FORMS["linear with bias"], 3), 3, decay=0.9)
    monkeypatch.setattr(series, "DENSE_ROWS", 8)
    text = r"layer\(weight, bias\): kron_series_1 has no structured eigenvectors.*3 \* 3 parameters.*\nUse 'kron_indep'"
    with pytest.raises(ApproximationError, match=text):
        System.of(block.group)


def test_factors_that_are_not_there_are_named() -> None:
    net = mixed()
    est = FisherEstimator(net)
    with pytest.raises(FactorNotReady, match=r"read before their first update: call estimator\.update_covariances"):
        est.spectrum()
    est.accumulate(net.record((batch() * torch.nan,), {}, mode="exact"))
    est.fold()
    with pytest.raises(FactorNotReady, match=r"(?s)every batch was skipped as not finite.*0\.weight.*Look for NaN in"):
        est.spectrum()


def test_numbers_and_blocks_that_cannot_be_are_refused() -> None:
    est = exact(mixed(), batch())
    with pytest.raises(ValueError, match=r"^damping is -1; it must not be negative$"):
        est.spectrum(damping=-1)
    with pytest.raises(ValueError, match=r"^damping is nan; it must be finite$"):
        est.spectrum().at(damping=float("nan"))
    with pytest.raises(
        RegistrationError, match=r'is missing\nGive the rest one .* as in \{"fc\.\*": 0\.1, "\*": 0\.01\}'
    ):
        est.spectrum().at(damping={"0.*": 0.1})
    with pytest.raises(ValueError, match=r"^scale is -2\.0; it must not be negative$"):
        est.spectrum().at(scale=-2.0)
    one = next(iter(est.blocks))
    with pytest.raises(
        RegistrationError, match=r"(?s)`damping` does not fit the blocks:.*'0\.weight'.*is not a block.*missing"
    ):
        est.spectrum(damping={("0.weight",): 1.0, one: 2.0})
    with pytest.raises(NotRegisteredError, match=r"(?s)does not fit.*missing  0\.weight"):
        est.spectrum().multiply({})
    many = {name: sample.expand(5, *sample.shape) for name, sample in noise(est).items()}
    many["0.weight"] = many["0.weight"][0]
    others = r"The other tensors of the vector have the additional dimensions \[5\] in front; all must have the same\.$"
    with pytest.raises(NotRegisteredError, match=rf":\n  0\.weight is \[(.+)\], the parameter \[\1\]\n{others}"):
        est.spectrum().multiply(many)
    with pytest.raises(TypeError, match="a vector is a dict of tensors by parameter name, not a list"):
        est.spectrum().multiply([torch.ones(1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^exp is nan; it must be finite$"):
        est.spectrum().multiply_matpower(float("nan"), noise(est))
    with pytest.raises(ValueError, match=r"^exp is inf; it must be finite$"):
        est.spectrum().trace(float("inf"))
    with pytest.raises(ValueError, match=r"^exp is '1'; it must be a number$"):
        est.spectrum().diagonal("1")  # type: ignore[arg-type]


def test_a_relative_damping_is_a_part_of_the_mean_eigenvalue_of_each_block() -> None:
    est = exact(mixed(), batch())
    plain, damped = est.spectrum(scale=2.0, damping=0.0), est.spectrum(scale=2.0, damping=Relative(0.1))
    for key, values in plain.eigenvalues().items():
        torch.testing.assert_close(damped.eigenvalues()[key], values + 0.1 * values.mean())


def test_a_damping_for_a_part_of_a_block_is_refused() -> None:
    est = exact(deep(), batch())
    for part, other in (("*.weight", "0.bias"), ("*.bias", "0.weight")):
        with pytest.raises(RegistrationError, match=rf"is one block, of which {other} has no damping") as failure:
            est.spectrum(damping={part: 0.1})
        assert "matches no parameter" not in str(failure.value)
