"""Corrected eigenvalues and scores that come out of taps, against autograd on single cases, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kfac_fx
from kfac_fx import Batch, FisherEstimator, RegistrationError, Relative
from kfac_fx.losses import Normal
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.recording.case_gradients import CaseRecorder
from tests.models import ZOO
from tests.runtime.single_cases import (
    D,
    T,
    Text,
    V,
    assert_corrected,
    classifier,
    inner,
    of_each,
    of_examples,
    of_positions,
    of_rows,
    spectrum_of,
)
from tests.whole.test_fisher_is_exact import SEPARATE_CASES, gradients_by_case, prepared

pytestmark = pytest.mark.usefixtures("float64")

QUICK = {
    "shared_functional",
    "tied_autoencoder",
    "conv1d",
    "conv_options",
    "depthwise",
    "tables",
    "lstm",
    "elementwise",
}


def ids(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(V, (n, T)), torch.randint(V, (n, T))


def images(n: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 3, 3), torch.randint(3, (n,))


# --- corrected eigenvalues --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SEPARATE_CASES]
)
def test_every_layer_is_corrected_and_scored_as_single_gradients_say(name: str) -> None:
    case = ZOO[name]
    model, args, targets = prepared(case)
    estimator = FisherEstimator(kfac_fx.compile(model, args, loss=case.loss), estimation_mode="empirical")
    estimator.update_covariances(*args, targets=targets)
    spectrum, batch = estimator.spectrum(damping=0.1), Batch(*args, targets=targets)
    each = gradients_by_case(model, case.loss, args, targets)
    oracle = {
        name: torch.stack([part.get(name, torch.zeros(shape)) for part in each])
        for name, shape in spectrum.shapes.items()
    }
    assert_corrected(spectrum.correct([batch], "sequence"), spectrum, oracle)
    expected = inner(spectrum.multiply_inverse(oracle), oracle)
    torch.testing.assert_close(spectrum.precondition(batch).scores(batch), expected)
    torch.testing.assert_close(spectrum.self_scores(batch), expected.diagonal())


@pytest.mark.parametrize("case", ["row", "sequence"])
def test_batches_add_up_to_the_mean_over_rows_or_sequences(case: str) -> None:
    model, (x, y) = Text(), ids()
    spectrum = spectrum_of(model, x, y)
    oracle = (of_rows if case == "row" else of_examples)(model, x, y)
    corrected = spectrum.correct([(x[:2], y[:2]), (x[2:], y[2:])], case)
    assert_corrected(corrected, spectrum, oracle)
    assert corrected.case == case and spectrum.case is None


def test_an_example_with_one_row_is_a_row_and_a_sequence() -> None:
    model, (x, y) = classifier(), images()
    spectrum = spectrum_of(model, x, y)
    for case in ("row", "sequence"):
        assert_corrected(spectrum.correct([(x, y)], case), spectrum, of_examples(model, x, y))


def test_positions_are_squared_apart_and_uses_together() -> None:
    """Against a copy of every weight for every position, which both uses of the tied weight share."""
    model, (x, y) = Text(), ids(3)
    spectrum = spectrum_of(model, x, y)
    corrected = spectrum.correct([(x, y)], "position")
    oracle = of_positions(model, x, y)
    for key in (("words.weight",), ("up.weight", "up.bias")):
        vectors = {n: torch.zeros(x.numel(), *shape) for n, shape in spectrum.shapes.items()}
        vectors |= {n: oracle[n].flatten(0, 1) for n in key}
        expected = spectrum.corrected([vectors]).eigenvalues()[key]
        torch.testing.assert_close(corrected.eigenvalues()[key], expected)


def test_all_labels_make_the_exact_fisher_in_the_basis() -> None:
    """Σ_k p_k (∂ log p_k)² in place of the sum over columns of B."""
    model, (x, y) = Text(), ids(3)
    spectrum = spectrum_of(model, x, y)
    total: dict[Any, Tensor] = {}
    for n in range(len(x)):
        for row in range(T):
            probabilities = model(x[n : n + 1])[0, row].softmax(-1)
            labels = of_each(
                V,
                lambda k, n=n, row=row: -model(x[n : n + 1])[0, row].log_softmax(-1)[k],
                dict(model.named_parameters()),
            )
            weighted = {
                name: g * probabilities.detach().sqrt().view(-1, *[1] * (g.dim() - 1)) for name, g in labels.items()
            }
            for key, values in spectrum.at(damping=0.0).corrected([weighted]).eigenvalues().items():
                total[key] = total.get(key, 0) + values * V / x.numel()
    found = spectrum.at(damping=0.0).correct([(x, None)], "row", mode="exact").eigenvalues()
    for key, values in found.items():
        torch.testing.assert_close(values, total[key])


def test_sampled_targets_follow_their_generator_and_are_right_in_the_mean() -> None:
    model, (x, y) = Text(), ids(3)
    spectrum = spectrum_of(model, x, y).at(damping=0.0)
    generator = torch.Generator().manual_seed(0)
    first = spectrum.correct([x], mode="gradients", generator=generator.manual_seed(1)).eigenvalues()
    again = spectrum.correct([x], mode="gradients", generator=generator.manual_seed(1)).eigenvalues()
    assert all(torch.equal(first[key], again[key]) for key in first)
    # Labels of different rows are independent with mean-zero gradients, so a sequence has the sum of its rows.
    exact = spectrum.correct([x], mode="exact").trace() * T
    sampled = spectrum.correct([x] * 60, "sequence", mode="gradients", generator=generator).trace()
    assert abs(sampled / exact - 1) < 0.1


def test_padding_is_no_row_and_no_position() -> None:
    class Padded(Text):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids * mask) * mask.unsqueeze(-1)

    model, (x, y) = Padded(), ids(3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    net = kfac_fx.compile(model, (x, mask), loss="categorical", padding_mask="mask")
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, mask, targets=y)
    spectrum, real = estimator.spectrum(damping=0.1), mask.bool()

    def loss(k: int) -> Tensor:
        n, row = real.nonzero()[k].tolist()
        return nn.functional.cross_entropy(model(x[n : n + 1], mask[n : n + 1])[0, row], y[n, row])

    oracle = of_each(int(real.sum()), loss, dict(model.named_parameters()))
    assert_corrected(spectrum.correct([Batch(x, mask, targets=y)], "row"), spectrum, oracle)


class Largest(TorchDispatchMode):
    """The largest number of elements of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_gradients_of_a_batch_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 examples of a weight with 1600 numbers would be 102400 numbers."""
    monkeypatch.setattr("kfac_fx.recording.case_gradients.CHUNK", 4000)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    x, y = torch.randn(64, 40), torch.randint(3, (64,))
    spectrum = spectrum_of(model, x, y)
    queries = spectrum.precondition((x[:2], y[:2]))
    for action in (
        lambda: spectrum.correct([(x, y)]),
        lambda: queries.scores((x, y)),
        lambda: spectrum.self_scores((x, y)),
    ):
        action()
        with Largest() as numbers:
            action()
        assert numbers.largest <= 6000


def test_a_spectrum_of_some_parameters_records_those_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = Text(), ids(3)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = FisherEstimator(net, variables=["up.weight", "up.bias"], estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    spectrum, oracle = estimator.spectrum(damping=0.1), of_examples(model, x, y)
    seen: list[Any] = []
    record = CaseRecorder.record
    monkeypatch.setattr(
        CaseRecorder,
        "record",
        lambda self, values, consume, **options: record(
            self, values, lambda key, cases: (seen.append(key), consume(key, cases))[1], **options
        ),
    )
    assert_corrected(spectrum.correct([(x, y)], "sequence"), spectrum, oracle)
    assert seen == [("up.weight", "up.bias")]


@pytest.mark.parametrize("approximation", ["kron_series_1", "kron_reduce", "diagonal", "full", "kron_in_diag"])
def test_every_kind_of_block_is_corrected(approximation: str) -> None:
    case = ZOO["lstm"] if approximation.startswith("kron_series") else None
    if case is not None:
        model, args, targets = prepared(case)
        net = kfac_fx.compile(model, args, loss=case.loss, approximations={nn.LSTM: approximation})
        each = gradients_by_case(model, case.loss, args, targets)
        oracle = {name: torch.stack([part[name] for part in each]) for name in each[0]}
    else:
        model, (x, targets) = Text(), ids()
        args, oracle = (x,), of_examples(model, x, targets)
        net = kfac_fx.compile(
            model, args, loss="categorical", approximations={"up": approximation, "down": approximation}
        )
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(*args, targets=targets)
    spectrum = estimator.spectrum(damping=0.1)
    assert any(registration.approximation == approximation for registration in net.registrations)
    assert_corrected(spectrum.correct([Batch(*args, targets=targets)], "sequence"), spectrum, oracle)


@pytest.mark.parametrize("approximation", ["kron_in_diag", "kron", "kron_both_diag"])
def test_embeddings_are_corrected_along_dense_and_diagonal_sides(approximation: str) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(V, D), nn.Linear(D, 3)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.tanh(self.words(ids).cumsum(1)))
            return logits

    model, x, y = Bag(), torch.randint(V, (5, T)), torch.randint(3, (5, T))
    spectrum = spectrum_of(model, x, y, approximations={"words": approximation})
    assert approximation in {registration.approximation for registration in spectrum.registrations}

    def loss(parameters: Any, ids: Tensor, labels: Tensor, row: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (ids[None],))[0]
        return nn.functional.cross_entropy(logits, labels, reduction="none") @ row

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))
    rows = each(parameters, x.repeat_interleave(T, 0), y.repeat_interleave(T, 0), torch.eye(T).repeat(len(x), 1))
    examples = {name: gradient.unflatten(0, x.shape).sum(1) for name, gradient in rows.items()}
    assert_corrected(spectrum.correct([(x, y)], "row"), spectrum, rows)
    assert_corrected(spectrum.correct([(x, y)], "sequence"), spectrum, examples)
    expected = inner(spectrum.multiply_inverse(examples), examples)
    torch.testing.assert_close(spectrum.precondition((x, y)).scores((x, y)), expected)
    torch.testing.assert_close(spectrum.self_scores((x, y)), expected.diagonal())


@pytest.mark.parametrize("options", [{"approximations": {"0": "kron_sua"}}, {"dense_limit": 8}])
def test_sides_in_parts_are_corrected(options: dict[str, Any]) -> None:
    """Pixels, and diagonal blocks of a wide side."""
    model, (x, y) = classifier(), images()
    spectrum = spectrum_of(model, x, y, **options)
    assert_corrected(spectrum.correct([(x, y)]), spectrum, of_examples(model, x, y))


# --- precision and place ----------------------------------------------------------------------------------------------


def test_decompositions_take_the_precision_and_the_place_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    net = kfac_fx.compile(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), (x,), loss="categorical")
    estimator = FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    seen: list[tuple[torch.dtype, str]] = []
    eigh = torch.linalg.eigh

    def watched(matrix: Tensor) -> Any:
        seen.append((matrix.dtype, matrix.device.type))
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    fine = estimator.spectrum(damping=0.1, dtype=torch.float64, device="cpu")
    assert set(seen) == {(torch.float64, "cpu")}
    assert {system.values.dtype for system in fine.systems} == {torch.float32}
    for key, values in estimator.spectrum(damping=0.1).eigenvalues().items():
        torch.testing.assert_close(fine.eigenvalues()[key], values, atol=1e-5, rtol=1e-4)


def test_a_model_in_bfloat16_has_factors_in_the_precision_that_was_asked_for() -> None:
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(6, 5).bfloat16(), torch.randint(3, (6,))
    net = kfac_fx.compile(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).bfloat16(), (x,), loss="categorical"
    )
    for dtype in (None, torch.float32, torch.float64):
        estimator = FisherEstimator(net, estimation_mode="empirical", factor_dtype=dtype)
        estimator.update_covariances(x, targets=y)
        wanted = dtype or torch.float32
        block = estimator.blocks["0.weight", "0.bias"]
        assert block.factors["A"].value.dtype is wanted
        a = torch.cat([x.to(wanted), torch.ones(6, 1)], dim=1)
        torch.testing.assert_close(block.factors["A"].value[0], (a.mT @ a / 6).to(wanted))
        spectrum = estimator.spectrum(damping=0.1).correct([(x, y)])
        assert {system.values.dtype for system in spectrum.systems} == {wanted}
        assert spectrum.self_scores((x, y)).dtype is wanted
    with pytest.raises(ValueError, match=r"factor_dtype is torch\.bfloat16; it must be torch\.float32 or torch\.fl"):
        FisherEstimator(net, factor_dtype=torch.bfloat16)


def test_a_part_of_a_spectrum_has_the_scores_of_its_blocks() -> None:
    model, (x, y) = Text(), ids()
    spectrum = spectrum_of(model, x, y).at(damping={"up": 0.3, "*": 0.1})
    blocks = spectrum.self_scores((x, y), by="block")
    part = spectrum.part(["up.weight", "up.bias", "places"])
    assert set(part.keys) == {("up.weight", "up.bias"), ("places",)} == set(part.self_scores((x, y), by="block"))
    for key, scores in part.self_scores((x, y), by="block").items():
        torch.testing.assert_close(scores, blocks[key])
    with pytest.raises(RegistrationError, match=r"up\.weight.*shares a block with up\.bias"):
        spectrum.part(["up.weight"])


# --- damping ----------------------------------------------------------------------------------------------------------


def test_relative_damping_is_a_share_of_the_mean_eigenvalue_of_every_block() -> None:
    model, (x, y) = Text(), ids()
    spectrum = spectrum_of(model, x, y).at(scale=3.0, damping=0.0)
    relative = spectrum.at(damping=Relative(0.1)).eigenvalues()
    for key, values in spectrum.eigenvalues().items():
        torch.testing.assert_close(relative[key], values + 0.1 * values.mean())


def test_groups_of_parameters_have_dampings_of_their_own() -> None:
    model, (x, y) = Text(), ids()
    spectrum = spectrum_of(model, x, y).at(damping=0.0)
    damped = spectrum.at(damping={"up": 0.5, "norm": 1.0, "down": Relative(2.0), "*": 0.25}).eigenvalues()
    for key, values in spectrum.eigenvalues().items():
        added = {"up": 0.5, "norm": 1.0, "down": 2 * values.mean()}.get(key[0].split(".")[0], 0.25)
        torch.testing.assert_close(damped[key], values + added)
    with pytest.raises(RegistrationError, match=r"'upp'.*matches no parameter"):
        spectrum.at(damping={"upp": 1.0, "*": 0.5})
    with pytest.raises(RegistrationError, match=r"is missing"):
        spectrum.at(damping={"up": 1.0})
    with pytest.raises(ValueError, match=r"the factor of Relative is -1.*; it must not be negative"):
        spectrum.at(damping=Relative(-1))


def test_scores_are_differentiated_by_the_damping() -> None:
    model, (x, y) = Text(), ids(3)
    spectrum, oracle = spectrum_of(model, x, y), of_examples(model, x, y)
    damping = torch.tensor(0.3, requires_grad=True)
    twice = spectrum.at(damping=0.3).multiply_matpower(-2, oracle)
    expected = -inner(twice, oracle)
    scores = spectrum.at(damping=damping).precondition((x, y)).scores((x, y))
    torch.testing.assert_close(torch.autograd.grad(scores[0, 1], damping)[0], expected[0, 1])
    own = spectrum.at(damping=damping).self_scores((x, y))
    torch.testing.assert_close(torch.autograd.grad(own.sum(), damping)[0], expected.diagonal().sum())
    factor = torch.tensor(0.2, requires_grad=True)
    spectrum.at(damping=Relative(factor)).log_determinant().backward()
    assert factor.grad is not None and factor.grad > 0


# --- what may not be asked --------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    model, (x, y) = Text(), ids(3)
    spectrum = spectrum_of(model, x, y)
    with pytest.raises(ValueError, match=r"case 'rows' is none of 'row', 'position', 'sequence'\..*'row'"):
        spectrum.correct([(x, y)], "rows")
    with pytest.raises(ValueError, match=r"corrected without cases: `batches` has none"):
        spectrum.correct([])
    with pytest.raises(ValueError, match=r"mode 'sampled' is none of"):
        spectrum.correct([(x, y)], mode="sampled")
    with pytest.raises(kfac_fx.TargetsMissing):
        spectrum.correct([x])
    with pytest.raises(ValueError, match=r"by 'position' is none of 'sum', 'block'\."):
        spectrum.self_scores((x, y), by="position")
    with pytest.raises(ValueError, match=r"rank is 0; it must be a whole number, at least 1"):
        spectrum.precondition((x, y), rank=0)
    with pytest.raises(ValueError, match=r"one number for every example, \[3\], and this one returned \[\]"):
        spectrum.precondition(x, measurement=lambda logits: logits.sum())
    with pytest.raises(
        ValueError,
        match=r"alone, because the batch has no targets=, and .*lambda outputs: .*Batch\(x, labels=y, targets=y\)",
    ):
        spectrum.precondition(x, measurement=lambda logits, targets: logits)
    with pytest.raises(
        ValueError, match=r"called with the outputs and targets, .*: too many.*lambda outputs, targets: "
    ):
        spectrum.precondition((x, y), measurement=lambda logits: logits)


def test_a_measurement_without_a_gradient_is_refused_wherever_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [x], damping=0.1)

    def right(logits: Tensor) -> Tensor:
        return (logits.argmax(1) == 1).float()

    for use in (
        lambda: spectrum.precondition(x, measurement=right),
        lambda: spectrum.self_scores(x, measurement=right),
        lambda: spectrum.correct([x], "row", measurement=right),
        lambda: kfac_fx.fit_spectrum(net, [x], case="row", measurement=right),
        lambda: spectrum.precondition(x, measurement=lambda z: z[:, 0]).scores_of_all([x], measurement=right),
    ):
        with pytest.raises(ValueError, match="the measurement has no gradient by the outputs of the model: it cuts it"):
            use()  # type: ignore[no-untyped-call]


def test_queries_that_no_parameter_of_the_spectrum_is_behind_are_refused() -> None:
    model, x = nn.Linear(3, 4), torch.randn(5, 3)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    categorical = kfac_fx.losses.Categorical
    net = kfac_fx.compile(Two(), (x,), loss=lambda outputs: [categorical(outputs[0]), categorical(outputs[1])])
    of_a = kfac_fx.fit_spectrum(net, [x], damping=0.1).part(["a.weight", "a.bias"])
    with pytest.raises(
        ValueError, match=r"the measurement of these .* no parameter of this .* zero: a.weight, a.bias\."
    ):
        of_a.precondition(x, measurement=lambda outputs: outputs[1][:, 0])


def test_scores_without_inverses_are_refused_with_the_blocks() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    x[:, 0] = 0.0
    estimator = FisherEstimator(kfac_fx.compile(model, (x,), loss="categorical"), damping=0.1)
    estimator.update_covariances(x)
    factors = estimator.spectrum(damping=0.0)
    corrected = factors.correct([(x, y)])
    text = (
        r"^2 of 2 blocks have eigenvalues of zero, so they have no inverse: 0\.weight, 0\.bias; 2\.weight, "
        r"2\.bias\.\nAdd a damping, as in spectrum\.at\(damping=kfac_fx\.Relative\(0\.1\)\)\.$"
    )
    for scores in (factors.self_scores, corrected.precondition, corrected.self_scores):
        with pytest.raises(ValueError, match=text):
            scores((x, y))
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    for spectrum in (factors, corrected):
        for inverse in (
            lambda of: of.multiply_inverse(vector),
            lambda of: of.multiply_matpower(-0.5, vector),
            lambda of: of.trace(-1),
            lambda of: of.diagonal(-1),
            lambda of: of.sample(3),
            lambda of: of.solve(vector, of.multiply),
        ):
            with pytest.raises(ValueError, match=text):
                inverse(spectrum)
        with pytest.raises(ValueError, match="^2 of 2 blocks have eigenvalues of zero, so they have no logarithm of a"):
            spectrum.log_determinant()
        damped = spectrum.at(damping=0.1)
        values = torch.cat([values.flatten() for values in spectrum.eigenvalues().values()])
        torch.testing.assert_close(damped.log_determinant(), (values + 0.1).log().sum())
        assert float(spectrum.trace(0.5)) > 0
    for spectrum in (factors, corrected):  # a damping that is asked for is used, however small
        assert bool(spectrum.at(damping=1e-12).self_scores((x, y)).isfinite().all())


def test_zeros_that_rounding_left_positive_are_zeros() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    estimator = FisherEstimator(kfac_fx.compile(model, (torch.randn(4, 3),), loss="normal"), damping=0.1)
    estimator.update_covariances(torch.randn(4, 3))
    factors, key = estimator.spectrum(damping=0.0), ("0.weight",)
    system, index = factors.places()[key]
    eps = torch.finfo(system.values.dtype).eps
    system.values[index] = torch.tensor([[1.0, 2 * eps, eps / 2], [2 * eps**2, eps**2 / 2, 0.0]])
    zeros, squares = (kind.zeros(system, index).squeeze(0).tolist() for kind in (factors, replace(factors, case="row")))
    assert zeros == [[False, False, True], [True, True, True]]
    assert squares == [[False, False, False], [False, True, True]]
    assert not factors.at(damping=eps**2).zeros(system, index).any()


def test_two_equal_losses_score_and_correct_as_one_of_twice_the_coefficient() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4), torch.randn(6, 3)
    results = []
    for coefficients in ([2.0], [1.0, 1.0]):
        targets = [y] * len(coefficients)

        def losses(z: Tensor, coefficients: list[float] = coefficients) -> list[tuple[float, LossFunction]]:
            return [(coefficient, Normal(z)) for coefficient in coefficients]

        estimator = FisherEstimator(kfac_fx.compile(model, (x[:2],), loss=losses), estimation_mode="exact")
        estimator.update_covariances(x, targets=targets)
        spectrum, batch = estimator.spectrum(damping=0.1), Batch(x, targets=targets)
        corrected = spectrum.correct([batch], "sequence", mode="empirical")
        results.append((spectrum.self_scores(batch), *corrected.eigenvalues().values()))
    for of_two, of_one in zip(*reversed(results), strict=True):
        torch.testing.assert_close(of_two, of_one)


def test_a_correction_squares_the_gradients_of_a_measurement() -> None:
    model, (x, y) = Text(), ids()
    spectrum = spectrum_of(model, x, y)

    def measured(logits: Tensor, labels: Tensor) -> Tensor:
        return 3 * logits[:, -1, 2] + 0 * labels[:, 0]

    gradients = of_each(len(x), lambda n: 3 * model(x[n : n + 1])[0, -1, 2], dict(model.named_parameters()))
    found = spectrum.correct([(x, y)], "sequence", measurement=measured)
    assert_corrected(found, spectrum, gradients)
    with pytest.raises(ValueError, match="mode='exact' is of the distributions of a loss, and a measurement has none"):
        spectrum.correct([(x, y)], mode="exact", measurement=measured)
    with pytest.warns(
        UserWarning, match="a measurement made the eigenvalues of this spectrum, and these gradients are"
    ):
        found.precondition((x, y))
    found.precondition((x, y), measurement=measured)
    found.correct([(x, y)], "sequence").precondition((x, y))  # the loss again
