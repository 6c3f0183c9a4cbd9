"""Input factors from a part of the rows: right in expectation, nothing else touched, no random number of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, FisherEstimator, LayerCollection, RegistrationError
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.ir import Sampling
from tests.runtime.collections_of_toys import collection

KEY = ("conv.weight", "conv.bias")
pytestmark = pytest.mark.usefixtures("float64")


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.head = nn.Conv2d(2, 3, 2), nn.Dropout(), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).mean((2, 3))
        out: Tensor = self.head(self.drop(x))
        return out


def net(model: nn.Module, x: Tensor, **options: Any) -> CompiledModule:
    return kfac_fx.compile(model, (x,), loss="categorical", **options)


def with_phases(one: CompiledModule, x: Tensor, y: Tensor, phases: tuple[float, float]) -> dict[Any, dict[str, Tensor]]:
    """The statistics with a sample of one's own choice."""
    recorder = one.recorder((x,), {})
    assert recorder.sampled
    recorder.sample_anew = lambda generator: None  # type: ignore[method-assign]
    for tap in recorder.sampled:
        tap.phases = torch.tensor(phases)
    return one.record((x,), {}, mode="empirical", targets=y).statistics


# --- the sample -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approximation", ["kron", "kron_in_diag", "kron_sua"])
def test_input_factors_are_right_in_expectation_and_all_else_is_as_it_was(approximation: str) -> None:
    """The mean over all phases is the whole: of half of the cases, and of 2 of their 12 rows."""
    model, x, y = Vision().eval(), torch.randn(6, 2, 3, 3), torch.randint(4, (6,))
    options = {"approximations": {"conv2d": approximation}}
    whole = net(model, x, **options).record((x,), {}, mode="empirical", targets=y).statistics
    part = net(model, x, sub_sample_inputs=0.5, sub_sample_patches=0.25, **options)
    side = "A_diag" if approximation == "kron_in_diag" else "A"
    cases, rows = 2, 3 * (9 if approximation == "kron_sua" else 4)  # phases that tell all samples apart
    mean = {key: torch.zeros_like(whole[key][name]) for key, name in ((KEY, side), (("head.weight",), "A"))}
    seen = set()
    for i in range(cases):
        for j in range(rows):
            found = with_phases(part, x, y, ((i + 0.5) / cases, (j + 0.5) / rows))
            for key, total in mean.items():
                total += found[key][side if key == KEY else "A"] / (cases * rows)
            seen.add(float(found[KEY][side].sum()))
            for key, statistic in found.items():
                for name in statistic.keys() - {"A", "A_diag"}:
                    assert torch.equal(statistic[name], whole[key][name])
    assert len(seen) > 3
    torch.testing.assert_close(mean[KEY], whole[KEY][side], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mean["head.weight",], whole["head.weight",]["A"], rtol=1e-10, atol=1e-12)


def test_no_more_rows_are_taken_than_were_asked_for() -> None:
    model, x, y = Vision().eval(), torch.randn(10, 2, 4, 4), torch.randint(4, (10,))
    few = net(model, x, sub_sample_inputs=True).record((x,), {}, mode="empirical", targets=y).statistics
    assert torch.linalg.matrix_rank(few["head.weight",]["A"][0]) == 2  # a fifth of ten cases
    rows = net(model, x, sub_sample_patches=0.5).record((x,), {}, mode="empirical", targets=y).statistics
    assert torch.linalg.matrix_rank(rows[KEY]["A"][0]) == 4  # half as many as 8 inputs
    assert torch.linalg.matrix_rank(rows["head.weight",]["A"][0]) == 3  # one row a case: nothing to choose from
    plenty = net(model, x, sub_sample_patches=1000.0).record((x,), {}, mode="empirical", targets=y).statistics
    whole = net(model, x).record((x,), {}, mode="empirical", targets=y).statistics
    torch.testing.assert_close(plenty, whole)  # all rows, whose moment is then summed in another order


def test_padding_is_in_no_sample() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(self.inner(x)) * mask.unsqueeze(-1))
            return out

    x, mask = torch.randn(4, 6, 3), torch.arange(6) < torch.tensor([[2], [6], [3], [5]])
    key, model, spoiled = ("inner.weight", "inner.bias"), Words(), x.masked_fill(~mask.unsqueeze(-1), 1e6)
    one = kfac_fx.compile(
        model, (x, mask), loss="categorical", padding_mask="mask", sub_sample_inputs=0.5, sub_sample_patches=2.0
    )
    recorder, total = one.recorder((x, mask), {}), torch.zeros(1, 4, 4)
    recorder.sample_anew = lambda generator: None  # type: ignore[method-assign]
    for i in range(4):
        for j in range(12):
            for tap in recorder.sampled:
                tap.phases = torch.tensor([(i + 0.5) / 4, (j + 0.5) / 12])
            total += one.record((spoiled, mask), {}).statistics[key]["A"] / 48
    rows = torch.cat([x[mask], torch.ones(16, 1)], dim=1)
    torch.testing.assert_close(total[0], rows.mT @ rows)


# --- random streams -------------------------------------------------------------------------------------------------


def trained(mode: str, **options: Any) -> tuple[list[Tensor], Tensor, CompiledModule]:
    torch.manual_seed(0)
    model, x, y = Vision(), torch.randn(8, 2, 3, 3), torch.randint(4, (8,))
    one = net(model, x, **options)
    optimizer = KFAC(one, lr=0.0, damping=0.1, estimation_mode=mode, cov_update_every=1, invert_every=1)
    grads = []
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(one(x), y).backward()
        grads += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return grads, torch.random.get_rng_state(), one


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_training_draws_the_same_random_numbers(mode: str) -> None:
    """Bit for bit: dropout is that of a training without samples, in passes of our own and during training."""
    whole, stream, _ = trained(mode)
    part, sampled_stream, one = trained(mode, sub_sample_inputs=True, sub_sample_patches=True)
    assert one.captures.first is not None and one.captures.first.sampled
    assert torch.equal(stream, sampled_stream)
    assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))


def test_every_recording_takes_other_rows_and_a_generator_the_same_again() -> None:
    model, x = Vision().eval(), torch.randn(10, 2, 3, 3)
    one = net(model, x, sub_sample_inputs=True)
    before = torch.random.get_rng_state()
    first, second = (one.record((x,), {}).statistics[KEY]["A"] for _ in range(2))
    assert not torch.equal(first, second)
    given = [one.record((x,), {}, generator=torch.Generator().manual_seed(5)).statistics[KEY]["A"] for _ in range(2)]
    assert torch.equal(*given)
    torch.random.set_rng_state(before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_samples_compile_into_one_graph() -> None:
    model, x, y = Vision().eval(), torch.randn(6, 2, 3, 3), torch.randint(4, (6,))
    options = {"sub_sample_inputs": 0.5, "sub_sample_patches": 0.5}
    eager, other = net(model, x, **options), net(model, x, backend="aot_eager", **options)
    for phases in ((0.1, 0.2), (0.6, 0.9)):
        torch.testing.assert_close(with_phases(other, x, y, phases), with_phases(eager, x, y, phases))


# --- where there is nothing to sample -------------------------------------------------------------------------------


def test_ids_transposed_uses_and_gradients_of_cases_are_taken_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(6, 3), nn.LayerNorm(3)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.norm(self.table(ids)), self.table.weight)

    model, ids = Tied(), torch.randint(6, (8, 4))
    y = torch.randint(6, (8, 4))
    whole, part = (
        kfac_fx.compile(model, (ids,), loss="categorical", sub_sample_inputs=share, sub_sample_patches=most)
        for share, most in ((False, False), (True, 0.1))
    )
    found = [recorder.record((ids,), {}, mode="empirical", targets=y).statistics for recorder in (whole, part)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    reasons = [
        "embedding(table.weight): all rows of 2 of 2 uses, its rows are ids, which cost nothing, the gradients of its "
        "output are rows",
        "layer_norm(norm.weight, norm.bias): all rows, 'full' needs the gradients of all cases",
    ]
    assert part.report.to_dict()["sampling"] == reasons and whole.report.to_dict()["sampling"] == []


def test_the_report_counts_what_is_sampled_and_says_why_the_rest_is_not() -> None:
    model, x = Vision(), torch.randn(6, 2, 3, 3)
    one = net(model, x, sub_sample_inputs=0.5, approximations={"head": "diagonal"})
    assert one.report.to_dict()["sampling"] == [
        "1 input factor from 50% of the cases",
        "linear(head.weight): all rows, 'diagonal' needs the gradients of all cases",
    ]


def test_the_smallest_share_is_one_case() -> None:
    model, x, y = Vision().eval(), torch.randn(5, 2, 3, 3), torch.randint(4, (5,))
    found = net(model, x, sub_sample_inputs=1e-9, sub_sample_patches=1e-9).record((x,), {}, mode="empirical", targets=y)
    assert torch.linalg.matrix_rank(found.statistics[KEY]["A"][0]) == 1
    assert torch.linalg.matrix_rank(found.statistics["head.weight",]["A"][0]) == 1


# --- ways to say it -------------------------------------------------------------------------------------------------


def test_a_collection_has_defaults_and_every_convolution_its_own() -> None:
    x = torch.randn(10, 2, 5, 5)

    def both(x: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return (F.conv2d(F.conv2d(F.conv2d(x, c), d), e)).flatten(1)

    lc: LayerCollection = collection(both, x, c=(3, 2, 2, 2), d=(2, 3, 1, 1), e=(1, 2, 2, 2))
    lc.register_conv2d("d", inputs="conv2d", outputs="conv2d_1", sub_sample_inputs=False, sub_sample_patches=2.0)
    lc.set_default_sub_sampling(inputs=True)
    lc.register_convolution("c", "x", "conv2d")
    lc.register_normal_predictive_distribution("flatten")
    lc.auto_register_layers()
    assert {registration.parameters[0]: registration.sampling for registration in lc.registrations} == {
        "d": Sampling(1.0, 2.0), "c": Sampling(0.2, None), "e": Sampling(0.2, None),
    }  # fmt: skip
    est = FisherEstimator(lc)
    est.update_covariances(x)
    assert est.blocks["c",].factors["positions"].value == 16
    assert "sampling  1 input factor from 100% of the cases, at most 2 rows an input" in str(est.net.report)
    assert "2 input factors from 20% of the cases" in str(est.net.report)


def test_a_convolution_may_take_all_in_spite_of_the_default() -> None:
    x = torch.randn(10, 2, 3, 3)
    lc: LayerCollection = collection(lambda x, c: F.conv2d(x, c).flatten(1), x, c=(3, 2, 3, 3))
    lc.set_default_sub_sampling(inputs=True)
    lc.register_conv2d("c", inputs="x", outputs="conv2d", sub_sample_inputs=False)
    lc.register_normal_predictive_distribution("flatten")
    est = FisherEstimator(lc)
    est.update_covariances(x)
    torch.testing.assert_close(est.blocks["c",].factors["A"].value[0], x.flatten(1).mT @ x.flatten(1) / 10)
    assert "sampling" not in str(est.net.report)


@pytest.mark.parametrize(
    ("inputs", "patches", "text"),
    [
        (0.0, False, "sub_sample_inputs=0.0 is the share of the cases: it must be above 0 and at most 1"),
        (1.5, False, "sub_sample_inputs=1.5 is the share of the cases: it must be above 0 and at most 1"),
        (False, -1.0, "sub_sample_patches=-1.0 is a number of rows per input: it must be positive"),
    ],
)
def test_shares_out_of_range_are_refused(inputs: float, patches: float, text: str) -> None:
    with pytest.raises(RegistrationError) as failure:
        kfac_fx.compile(Vision(), sub_sample_inputs=inputs, sub_sample_patches=patches)
    assert str(failure.value) == text
