"""A count takes operations by their shapes, and needs no numbers."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import launches
from benchmarks.device_models import QUICK
from benchmarks.launch_counter import (
    H100,
    Answering,
    Counting,
    Counts,
    as_on_a_gpu,
    fake_accelerator,
    interpolated,
    is_aligned,
)
from benchmarks.launches import ADAMW, BASES, CHECK, GRADIENT, PLAIN, SHARES, STATISTICS
from benchmarks.step_models import Loss, Problem
from kfac_fx.optim.rule import StepIntervals


def layer() -> Problem:
    """A matrix [3, 5] with its bias, and one case."""
    return Problem(torch.nn.Linear(4, 3), torch.rand(6, 4), torch.randint(3, (6,)), Loss("categorical"))


def counted(run: object, *args: torch.Tensor) -> Counts:
    with Counting() as counting:
        run(*args)  # type: ignore[operator]
    return counting.counts


@pytest.fixture(scope="module", autouse=True)
def kept_shapes() -> Iterator[None]:
    """Whole trainings repeat shapes, so torch keeps those that it worked out, as it does outside of `make test`."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        yield


@pytest.fixture(scope="module")
def without_numbers(kept_shapes: None) -> tuple[dict[str, launches.Sections], StepIntervals, float]:
    """The count of a small GPT."""
    with fake_accelerator(replace(QUICK["gpt2"].make(), cast=torch.bfloat16)) as problem, launches.true_rows(problem):
        return launches.ours(problem)


@pytest.mark.slow
def test_a_quick_count_shows_every_part_and_every_step_and_writes_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without_numbers: tuple[dict[str, launches.Sections], StepIntervals, float],
) -> None:
    monkeypatch.setattr(launches, "ours", lambda problem: without_numbers)
    threads, before = torch.get_num_threads(), launches.OUT.read_bytes()
    try:
        launches.main(["--quick"])
    finally:
        torch.set_num_threads(threads)
    shown = " ".join(capsys.readouterr().out.split())
    assert "P = 54,720 in 16 tensors; counted" in shown and "predicted for an H100" in shown
    assert all(f"│ {name} │" in shown for name in (ADAMW, PLAIN, *SHARES, "mean"))
    assert "cholesky_ex" in shown
    assert torch.get_float32_matmul_precision() == "highest"
    assert before == launches.OUT.read_bytes()


def test_elements_are_those_that_an_operation_reads_and_writes() -> None:
    x, y = torch.ones(4, 6), torch.ones(4, 6)
    for run, elements in (
        (lambda: x + y, 3 * 24),
        (lambda: x.add_(y), 3 * 24),
        (lambda: torch.add(x, y, out=x), 3 * 24),
        (lambda: x.copy_(y), 2 * 24),
        (lambda: x.zero_(), 24),
        (lambda: x.mul_(y[:1, :1].expand(4, 6)), 24 + 1 + 24),
        (lambda: torch._foreach_add_([x, x], [y, y]), 6 * 24),
        (lambda: F.embedding(torch.tensor([1, 2]), x), 2 * 12),
    ):
        counts = counted(run)
        assert (counts.elements, counts.kernels, counts.operands) == (elements, 1, 0)
    assert counted(lambda: torch.empty(3).view(3, 1).expand(3, 2).mT.detach()) == Counts()


def test_products_have_flops_by_precision_and_alignment() -> None:
    left, right = torch.ones(2, 3, 8), torch.ones(2, 8, 16)
    once = counted(torch.bmm, left, right)
    assert once.flops == {"float32": 2 * 2 * 3 * 8 * 16} and once.elements == 0
    assert once.operands == left.numel() + right.numel() + 2 * 3 * 16
    assert counted(torch.bmm, left.bfloat16(), right.bfloat16()).flops.keys() == {"bfloat16"}
    with as_on_a_gpu():
        assert counted(torch.bmm, left, right).flops.keys() == {"TF32"}
    assert is_aligned(torch.ones(3, 8)) and is_aligned(torch.ones(8, 3).mT.contiguous().mT) is True
    assert not is_aligned(torch.ones(3, 9)) and not is_aligned(torch.ones(3, 4, dtype=torch.bfloat16))
    wide = torch.ones(4096, 4096)
    with fake_accelerator(layer()):
        wide = torch.empty(4096, 4097)
        odd, even = (
            counted(torch.mm, wide, wide.mT),
            counted(torch.mm, wide[:, :4096].clone(), wide[:, :4096].clone().mT),
        )
    assert odd.device == pytest.approx(2 * 4096 * 4096 * 4097 / H100.products["TF32", False])
    assert even.device == pytest.approx(2 * 4096**3 / H100.products["TF32", True])


def test_the_host_waits_for_numbers_and_for_every_eigh() -> None:
    x = torch.eye(4).expand(3, 4, 4).clone()
    assert counted(lambda: x.sum().item()).waits == counted(lambda: x.nonzero()).waits == 1
    assert counted(lambda: bool(x.isfinite().all())).waits == counted(lambda: torch.equal(x, x)).waits == 1
    counts = counted(torch.linalg.eigh, x)
    assert counts.waits == 3 and counts.decompositions == {"eigh 4": 3}
    assert counts.decomposition_flops == 3 * 9 * 4**3
    assert counts.device == pytest.approx(3 * interpolated(H100.eigh, 4))


def test_a_rate_between_two_widths_lies_on_a_power() -> None:
    points = {10: 1.0, 20: 8.0, 40: 16.0}
    assert [interpolated(points, width) for width in points] == pytest.approx([1, 8, 16])
    assert interpolated(points, 5) == pytest.approx(1 / 8) and interpolated(points, 80) == pytest.approx(32)


def test_answers_are_those_of_a_training_without_trouble() -> None:
    with fake_accelerator(layer()), Answering():
        x = torch.randn(3)
        assert bool((x > 0).all()) and x.sum().item() == 1.0 and torch.equal(x, x) and len(x.nonzero()) == 0


def test_a_plain_step_turns_the_gradient_and_the_step_of_a_layer() -> None:
    """4 O I (O + I) flops, with both sides padded to 16. The outputs' basis turns four columns of weights and one of
    biases instead of 16. AdamW reads and writes 7 P."""
    with fake_accelerator(layer()) as problem:
        assert launches.rows_of(problem) == {"weight": 6, "bias": 6}
        first = launches.adamw(problem)
        assert first[ADAMW].elements == 7 * 15 + 2 * 3  # both numbers of steps: read and written, and read
        with launches.true_rows(problem):
            kinds, intervals, _ = launches.ours(problem)
    assert kinds[PLAIN]["step()"].flops == {"bfloat16": 4 * 16 * 16 * (16 + (4 + 1))}
    decompositions = {f"{kind} {width}": 2 for kind in ("cholesky_ex", "solve_triangular") for width in (5, 3)}
    assert kinds[BASES]["step()"].decompositions == decompositions
    assert not kinds[STATISTICS]["step()"].decompositions and intervals != launches.APART
    more = kinds[STATISTICS][GRADIENT].kernels, kinds[PLAIN][GRADIENT].kernels
    assert more[0] > more[1] and kinds[CHECK]["step()"].kernels > kinds[PLAIN]["step()"].kernels


def test_a_step_launches_without_numbers_what_it_launches_with_numbers(
    without_numbers: tuple[dict[str, launches.Sections], StepIntervals, float],
) -> None:
    with as_on_a_gpu():
        with_numbers, _, _ = launches.ours(replace(QUICK["gpt2"].make(), cast=torch.bfloat16))
    for kind, sections in with_numbers.items():
        for name, counts in sections.items():
            assert counts.record() == without_numbers[0][kind][name].record(), (kind, name)


def test_the_committed_count_is_of_the_models_of_the_device_benchmark() -> None:
    results = json.loads(launches.OUT.read_text(encoding="utf-8"))["results"]
    assert {name: (result["parameters"], result["tensors"]) for name, result in results.items()} == {
        "gpt2": (124_475_904, 148),
        "resnet50": (25_557_032, 161),
    }
    for result in results.values():
        times, every = result["milliseconds"], StepIntervals(**result["intervals"])
        shares = [(times[kind] - times[PLAIN]) / getattr(every, name) for kind, name in SHARES.items()]
        assert times["mean"] == pytest.approx(times[PLAIN] + sum(shares))
        assert times[ADAMW] < times[PLAIN] < times["mean"]
