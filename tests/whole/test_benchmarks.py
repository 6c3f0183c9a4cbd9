"""The benchmarks run, and say what they should; what they measure is no test's business."""

import pytest
import torch

from benchmarks import __main__, agreement, cost_docs, scale, step_time


def test_quick_benchmarks_show_ours_beside_the_floor_and_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    before = [path.read_bytes() if path.exists() else None for path in (step_time.OUT, scale.OUT)]
    try:
        __main__.main(["--quick"])
    finally:
        torch.set_num_threads(threads)
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("quick: step time as a multiple of SGD's", "adamw", "sampled", "empirical", "floor", "qmodel", "1,10"):
        assert text in shown, text
    assert "CPU seconds after capture, by pass" in shown
    assert before == [path.read_bytes() if path.exists() else None for path in (step_time.OUT, scale.OUT)]


def test_a_device_is_timed_by_the_clock_when_it_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", asked.append)
    device = torch.device("cuda")
    times = step_time.measure({"nothing": lambda: None}, rounds=2, device=device)
    assert asked == [device] * 4 and 0 < times["nothing"] < 1


def test_the_mean_step_of_a_cycle_is_made_of_its_phases() -> None:
    times = {"sgd": 1.0, "adamw": 1.1, "plain": 2.0, "inverse": 12.0, "sampled": 4.0, "sampled 1/4": 3.0}
    ratios = step_time.ratios({**times, "empirical": 3.5}, (1, 10))
    assert ratios == pytest.approx({"sgd": 1, "adamw": 1.1, "sampled": 5.0, "sampled 1/4": 4.0, "empirical": 4.5})
    ratios = step_time.ratios({**times, "empirical": 3.5}, (10, 100))
    assert ratios["sampled"] == pytest.approx(2.0 + 0.2 + 0.1)


def test_the_floor_counts_products_of_the_cost_model() -> None:
    """One layer of i = o = 4 with a bias, N = 8: 6 N i o, N (i² + o²), 2 i o (i + o), i³ + o³."""
    make = lambda: (torch.nn.Linear(4, 4), (torch.rand(8, 4), torch.randint(4, (8,))), "categorical")  # noqa: E731
    n, i, o = 8, 5, 4
    once = 2 * i * o * (i + o) + (i**3 + o**3) / 10
    train = 6 * n * i * o
    assert step_time.floor(make, (1, 10), symmetric=True) == pytest.approx(1 + (n * (i**2 + o**2) + once) / train)
    assert step_time.floor(make, (1, 10), symmetric=False) == pytest.approx(1 + (2 * n * (i**2 + o**2) + once) / train)


def test_the_page_of_costs_is_made_of_the_results() -> None:
    assert cost_docs.page() == cost_docs.DOCS.read_text(encoding="utf-8"), "run python -m benchmarks --write-docs"


def test_peers_that_are_not_installed_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(agreement, "MODELS", {"MLP": agreement.MODELS["MLP"]})
    monkeypatch.setattr(agreement, "PEERS", agreement.PEERS[:2])
    lines = [line for line in agreement.page().splitlines() if line.startswith("| MLP |")]
    assert len(lines) == 2
    assert all(line.endswith("| not installed | | |") for line in lines)


def test_what_peers_are_compared_with_is_the_dense_fisher() -> None:
    """Full blocks of a layer that is used twice; a matrix of biases apart, and one of weights alone."""
    one = agreement.task("one layer twice")
    truth, mine = agreement.brute(one, empirical=False), agreement.dense(agreement.ours(one, "full"), one)
    assert agreement.distance(mine, truth) < 1e-12
    kept = agreement.apart(truth, one)
    assert torch.equal(kept[:16, :16], truth[:16, :16]) and not kept[:16, 16:20].any() and truth[:16, 16:20].any()
    kept = agreement.weights(truth, one)
    assert torch.equal(kept[:16, :16], truth[:16, :16]) and not kept[16:20].any() and not kept[:, 16:20].any()
