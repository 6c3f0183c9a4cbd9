"""The benchmarks run, and say what they should; what they measure is no test's business."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import (
    __main__,
    agreement,
    agreement_attribution,
    agreement_kronfluence,
    basis_products,
    beside,
    check_precision,
    conjugate_gradients,
    cost_docs,
    decompositions,
    default_step,
    device_models,
    device_step,
    device_training,
    gpt2_factors,
    host_time,
    methods,
    scale,
    statistics,
    step_parts,
    step_time,
)
from benchmarks.flops import flops_of
from benchmarks.methods import Method
from benchmarks.step_models import Loss, Problem
from kfac_fx.optim.schedule import is_early
from kfac_fx.recording.equivalence import OutputWatch
from tests.tables import pairs

FILES = tuple(benchmark.OUT for benchmark in (step_time, default_step, step_parts, host_time, scale))


@pytest.mark.slow
def test_quick_benchmarks_show_ours_beside_the_floor_and_write_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "PEERS", {"unheard-of": Method(methods.sgd, "a-package-that-nobody-has")})
    threads = torch.get_num_threads()
    before = [path.read_bytes() if path.exists() else None for path in FILES]
    try:
        __main__.main(["--quick"])
    finally:
        torch.set_num_threads(threads)
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "quick: step time as a multiple of SGD's",
        "comparison of outputs",
        "adamw",
        "sampled",
        "empirical",
        "floor",
        "qmodel",
        "1,10",
    ):
        assert text in shown, text
    assert "unheard-of: not installed: pip install a-package-that-nobody-has" in shown
    assert "of the default and of AdamW" in shown and "of plain steps" in shown
    assert "quick: parts of a step" in shown
    assert all(part in shown for part in ("forward and backward", *step_parts.PARTS))
    assert "quick: CPU milliseconds of a step of 18 small parameters" in shown
    assert "CPU seconds after capture, by pass" in shown
    assert before == [path.read_bytes() if path.exists() else None for path in FILES]


def test_quick_decompositions_show_every_method_that_a_cpu_has_and_write_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = torch.get_num_threads()
    before = decompositions.OUT.read_bytes() if decompositions.OUT.exists() else None
    try:
        decompositions.main(["--quick"])
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    for name in decompositions.METHODS:
        found = f"┃ {name} ┃" in " ".join(shown.split())
        assert found == (name in decompositions.available(torch.device("cpu"))), name
    assert before == (decompositions.OUT.read_bytes() if decompositions.OUT.exists() else None)


@pytest.fixture
def from_descending_eigh(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library's place: a function that accepts the first matrix of a stack only."""

    def iterated_basis(matrix: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last = (basis.mT @ matrix @ basis).diagonal(dim1=-2, dim2=-1)
        assert bool((last[:, 0] > last[:, -1]).all())
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(-1), vectors.flip(-1), torch.arange(len(matrix)) == 0

    monkeypatch.setattr(decompositions.matrices, decompositions.FUNCTION, iterated_basis, raising=False)


@pytest.mark.usefixtures("from_descending_eigh")
def test_orthogonal_iteration_begins_with_the_eigenvectors_of_a_matrix_nearby() -> None:
    torch.manual_seed(0)
    given = decompositions.case(16, 4, torch.device("cpu"), with_basis=True)
    assert given.basis is not None
    values = (given.basis.mT @ given.covariance @ given.basis).diagonal(dim1=-2, dim2=-1)
    assert 1e-3 < decompositions.residual((values, given.basis), given) < 0.2  # nearby, and another one
    _, residual, accepted = decompositions.measure(decompositions.ITERATION, given, torch.device("cpu"))
    assert residual < 1e-5 and accepted == 0.25


@pytest.mark.usefixtures("from_descending_eigh")
def test_decompositions_take_the_widths_stacks_and_methods_that_are_given(tmp_path: Path) -> None:
    threads, out = torch.get_num_threads(), tmp_path / "found.json"
    methods = ["eigh", decompositions.ITERATION]
    try:
        decompositions.main(["--widths", "9", "--stacks", "2", "3", "--methods", *methods, "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text())["results"]
    assert [(row["width"], row["stack"], list(row["milliseconds"])) for row in rows] == [
        (9, 2, methods),
        (9, 3, methods),
    ]
    assert [row["accepted"] for row in rows] == pytest.approx([1 / 2, 1 / 3])


@pytest.mark.slow
def test_quick_steps_on_a_device_show_every_method_and_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = device_step.OUT.read_bytes() if device_step.OUT.exists() else None
    others = ("sgd", "kfac_fx, sampled", "kfac_fx, empirical", device_step.FACTORS)
    device_step.main(["--quick", "--methods", *device_step.USUAL, *others])
    shown = capsys.readouterr().out
    for name in ("adamw", device_step.MUON, device_step.KFAC, device_step.GRADIENT, *others):
        assert name in shown, name
    assert "factors of one batch take" in shown and "Error" not in shown
    assert torch.get_float32_matmul_precision() == "highest"
    assert before == (device_step.OUT.read_bytes() if device_step.OUT.exists() else None)


class Fake:
    """A step of 1 ms on a clock of its own, and of more at every n-th and m-th step, counted from `start`."""

    now = 0.0
    statistics, inverses = 20, 300

    def __init__(self, start: int, n: int, m: int) -> None:
        self.counter, self.every = start, (n, m)

    def __call__(self) -> None:
        due = [self.counter % every == 0 for every in self.every]
        Fake.now += 1e-3 * (1 + self.statistics * due[0] + self.inverses * due[1])
        self.counter += 1


@pairs(("start", [0, 1]), ("parts", [methods.SECOND_ORDER, ("inverses",), ("statistics",), ()]))
def test_turns_tell_what_each_part_of_a_step_costs(
    start: int, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a method counts its steps from 0 or from 1."""
    monkeypatch.setattr(device_step, "clock", lambda device: Fake.now)
    monkeypatch.setattr(Fake, "statistics", 20 if "statistics" in parts else 0)
    monkeypatch.setattr(Fake, "inverses", 300 if "inverses" in parts else 0)
    method = Method(lambda problem, n, m: Fake(start, n, m), parts=parts)
    reference = device_step.Contestant(Method(methods.sgd), Fake(1, 10**6, 10**6), torch.device("cpu"))
    row = device_step.row(method, lambda: None, reference, rounds=2)  # type: ignore[arg-type, return-value]
    costs = {"statistics": 20, "inverses": 300}
    assert row["milliseconds"] == pytest.approx({"plain": 1, **{part: costs[part] for part in parts}})
    each = (20 * ("statistics" in parts), 300 * ("inverses" in parts))
    assert row["mean steps"]["10,100"] == pytest.approx(1 + each[0] / 10 + each[1] / 100)


def test_a_turn_of_the_default_has_the_steps_that_it_is_for() -> None:
    torch.manual_seed(0)
    step = device_step.Default(device_models.QUICK["pinn"].make(), 0, 0, "eager")
    step()
    chosen, number = step.schedule.intervals, {"statistics": 0, "bases": 1, "check": 2}
    for kind in device_step.OF_DEFAULT:
        device_step.due_only(step.schedule, kind)
        found = []
        for _ in range(device_step.TURN):
            found.append((step.schedule.recording, step.schedule.inverting, step.schedule.checking))
            step()
        expected = tuple(number.get(kind) == n for n in range(3))
        assert found == [expected, *[(False, False, False)] * (device_step.TURN - 1)], kind
    assert not step.optimizer.skipped and chosen != step.schedule.intervals


def test_the_mean_step_of_the_default_follows_from_its_intervals() -> None:
    torch.manual_seed(0)
    step = device_step.Default(device_models.QUICK["pinn"].make(), 0, 0, "eager")
    contestant = device_step.Contestant(Method(methods.sgd), step, torch.device("cpu"))
    contestant.seconds = {"plain": [0.08], "statistics": [0.11], "bases": [0.68], "check": [0.10]}
    assert contestant.milliseconds() == pytest.approx({"plain": 10, "statistics": 30, "bases": 600, "check": 20})
    means = contestant.mean_steps(device_step.StepIntervals(10, 100, 5))
    assert means == pytest.approx({"amortised": 10 + 3 + 6 + 4, "calm": 10 + 3 + 6 + 1})


@pytest.mark.parametrize(
    ("benchmark", "words"),
    [
        (basis_products, ["float32, milliseconds", "TF32, milliseconds", "bfloat16, Tflop/s", "[2, 8, 9] [2, 9, 9]"]),
        (check_precision, ["predicted_change, highest", "rho, high"]),
        pytest.param(
            device_training, ["KFAC(net)", "AdamW", "Muon", "SOAP", "steps to AdamW's loss"], marks=pytest.mark.slow
        ),
    ],
    ids=["basis_products", "check_precision", "device_training"],
)
def test_quick_benchmarks_of_a_device_show_their_figures_and_write_them_only_where_told(
    benchmark: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = benchmark.OUT.read_bytes() if benchmark.OUT.exists() else None
    benchmark.main(["--quick", "--out", str(tmp_path / "found.json")])
    shown = capsys.readouterr().out
    assert all(word in shown for word in words) and "Error" not in shown
    assert json.loads((tmp_path / "found.json").read_text())["results"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert before == (benchmark.OUT.read_bytes() if benchmark.OUT.exists() else None)


def test_the_known_loss_of_the_language_is_the_loss_of_its_own_probabilities() -> None:
    """By counting: the frequencies of what follows one pair of tokens."""
    generator = torch.Generator().manual_seed(0)
    language = device_training.Language.of(4, torch.device("cpu"), generator)
    texts = language.texts(100_000, 3, generator)
    pair = texts[(texts[:, 0] == 0) & (texts[:, 1] == 1)]
    counted = torch.bincount(pair[:, 2], minlength=4) / len(pair)
    each = [language.loss(torch.tensor([[0, 1, token]])) for token in range(4)]
    probabilities = torch.tensor(each).neg().exp()
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-6)
    deviation = (probabilities * (1 - probabilities) / len(pair)).sqrt()
    assert bool(((counted - probabilities).abs() < 5 * deviation).all())


def test_the_script_for_a_device_writes_an_entry_for_every_part_and_skips_what_no_longer_fits(tmp_path: Path) -> None:
    script = Path(device_step.__file__).parent / "on_device.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "QUICK": "1"}
    done = subprocess.run([script, str(tmp_path), "0"], env=environment, check=True, capture_output=True, text=True)
    entries = json.loads((tmp_path / "on_device.json").read_text())
    assert len(entries) == 8 and all(entry["status"].startswith("skipped: ") for entry in entries.values())
    assert done.stdout.count(": skipped, ") == 8


def test_decompositions_are_exact_up_to_rounding() -> None:
    torch.manual_seed(0)
    given = decompositions.case(16, 3, torch.device("cpu"))
    for name, method in decompositions.METHODS.items():
        if name == decompositions.ITERATION:
            continue
        allowed = decompositions.RESIDUAL if name == "Newton-Schulz" else 1e-4
        assert decompositions.residual(method(given), given) < allowed, name
    fewer = given._replace(iterations=given.iterations - 3)
    assert decompositions.residual(decompositions.newton_schulz(fewer), fewer) > decompositions.RESIDUAL


def test_a_decomposition_is_left_out_by_the_times_of_smaller_ones() -> None:
    assert decompositions.estimate({}, 64, 1) == 0
    known = {(64, 1): 1.0, (64, 4): 2.0, (128, 1): 3.0}
    assert decompositions.estimate(known, 128, 4) == min(1.0 * 4 * 8, 2.0 * 8, 3.0 * 4)
    assert decompositions.estimate({(64, 4): 2.0}, 128, 1) == float("inf")


def test_no_timed_step_of_a_short_run_inverts_early_or_compares_outputs() -> None:
    watch = OutputWatch()
    special = [watch.due() or is_early(step, step_time.NEVER) for step in range(step_time.WARMUP + 10)]
    rounds = {name: int(options[-1]) for name, options in beside.BENCHMARKS.items() if "--rounds" in options}
    timed = {name: special[step_time.WARMUP :][:number] for name, number in rounds.items()}
    assert not any(timed["step_time"]) and len(timed["step_time"]) == 3
    assert sum(timed["host_time"]) < (len(timed["host_time"]) - 1) // 2  # a median is of the others


def test_a_device_is_timed_by_the_clock_when_it_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", asked.append)
    device = torch.device("cuda")
    times = step_time.measure({"nothing": lambda: None}, rounds=2, device=device)
    assert asked == [device] * 4 and 0 < times["nothing"] < 1


def test_the_mean_step_of_a_cycle_is_made_of_its_parts() -> None:
    first, second = Method(methods.sgd), Method(methods.adamw, parts=("statistics", "inverses"))
    known = {"sgd": first, "ours": second, "riding": Method(methods.adamw, None, second.parts, "ours")}
    times = {("sgd", "plain"): 1.0, ("ours", "plain"): 2.0, ("ours", "inverses"): 12.0, ("ours", "statistics"): 4.0}
    ratios = step_time.ratios({**times, ("riding", "statistics"): 3.5}, known, (1, 10))
    assert ratios == pytest.approx({"sgd": 1, "ours": 5.0, "riding": 4.5})
    ratios = step_time.ratios({**times, ("riding", "statistics"): 3.5}, known, (10, 100))
    assert ratios["ours"] == pytest.approx(2.0 + 0.2 + 0.1)


def test_of_parts_one_in_another_only_their_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 31.0))
    monkeypatch.setattr(step_parts.time, "process_time", lambda: next(now))
    clock = step_parts.Clock()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.read() == {"forward and backward": 1 + 16, "outer": 2 + 8, "inner": 4}


def test_the_floor_counts_products_of_the_cost_model() -> None:
    """One layer of i = o = 4 with a bias, N = 8: 6 N i o, N (i² + o²), 2 i o (i + o), i³ + o³."""

    def make() -> Problem:
        return Problem(torch.nn.Linear(4, 4), torch.rand(8, 4), torch.randint(4, (8,)), Loss("categorical"))

    n, i, o = 8, 5, 4
    once = 2 * i * o * (i + o) + (i**3 + o**3) / 10
    train, flops = 6 * n * i * o, flops_of(make)
    assert flops.floor((1, 10), symmetric=True) == pytest.approx(1 + (n * (i**2 + o**2) + once) / train)
    assert flops.floor((1, 10), symmetric=False) == pytest.approx(1 + (2 * n * (i**2 + o**2) + once) / train)


def test_the_page_of_costs_is_made_of_the_results() -> None:
    assert cost_docs.page() == cost_docs.DOCS.read_text(encoding="utf-8"), "run python -m benchmarks --write-docs"


@pytest.mark.slow
def test_the_page_of_costs_has_sections_on_a_gpu_where_there_are_results(tmp_path: Path) -> None:
    steps, trainings = tmp_path / "device_step.json", tmp_path / "device_training.json"
    of_steps = partial(cost_docs.device_steps, introduction=cost_docs.DEVICE_STEP)
    assert [*of_steps(steps), *cost_docs.device_trainings(trainings)] == []
    device_step.main(["--quick", "--out", str(steps), "--methods", device_step.KFAC])
    device_training.main(["--quick", "--out", str(trainings)])
    shown = "\n".join([*of_steps(steps), *cost_docs.device_trainings(trainings)])
    assert "## A step on a GPU" in shown and "a small GPT (torch" in shown
    assert "| method | plain | statistics | bases | check | intervals | plain / AdamW | amortised | calm |" in shown
    assert "## A training on a GPU" in shown and "| KFAC(net) | 1 | " in shown


def test_peers_that_are_not_installed_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(agreement, "MODELS", {"MLP": agreement.MODELS["MLP"]})
    monkeypatch.setattr(agreement, "PEERS", agreement.PEERS[:2])
    starts = ("| MLP |", "| MLP without biases |", "| softmax regression |", "| UCI network |", "| GPT of")
    lines = [line for line in agreement.page().splitlines() if line.startswith(starts)]
    assert len(lines) == 2 + 2 + 6  # matrices, kronfluence, dattri and pyDVL
    assert all(line.rstrip(" |").endswith("not installed") for line in lines)


@pytest.mark.filterwarnings("ignore")  # of kronfluence
@pytest.mark.parametrize("name", agreement_kronfluence.PROBLEMS)
def test_scores_are_those_of_kronfluence(name: str) -> None:
    pytest.importorskip("kronfluence")
    assert all(float(distance) < 1e-6 for distance in agreement_kronfluence.rows(name).split(" | "))


def test_what_peers_are_compared_with_is_the_dense_fisher() -> None:
    """Full blocks of a layer that is used twice; a matrix of biases apart, and one of weights alone."""
    one = agreement.task("one layer twice")
    truth, mine = agreement.brute(one, empirical=False), agreement.dense(agreement.ours(one, "full"), one)
    assert agreement.distance(mine, truth) < 1e-12
    kept = agreement.apart(truth, one)
    assert torch.equal(kept[:16, :16], truth[:16, :16]) and not kept[:16, 16:20].any() and truth[:16, 16:20].any()
    kept = agreement.weights(truth, one)
    assert torch.equal(kept[:16, :16], truth[:16, :16]) and not kept[16:20].any() and not kept[:, 16:20].any()


def test_every_phase_of_a_spectrum_takes_time() -> None:
    for problem in (statistics.uci(64), statistics.positions(16)):
        times = statistics.ours(problem)(statistics.seconds)
        assert len(times) == len(statistics.PHASES) and all(second >= 0 for second in times) and sum(times) > 0


@pytest.mark.filterwarnings("ignore")  # of the peers
def test_all_libraries_that_are_installed_have_a_row() -> None:
    figures = statistics.figures(statistics.uci(64), rounds=1)
    assert "kfac_fx" in figures and all(min(measured["MB"]) > 0 for measured in figures.values())
    rows = statistics.rows({"UCI network": figures})
    assert [row["library"] for row in rows] == list(figures)
    assert all(rows[0][phase].endswith(" MB") for phase in statistics.PHASES)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # what torch loads for jvp
def test_the_preconditioner_of_one_layer_is_its_matrix() -> None:
    (row,) = conjugate_gradients.iterations(1, scaled=True, dampings=[1e-2])
    assert row["factors"] == row["blocks"] == 1 < row["none"]


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("package", agreement_attribution.PEERS)
def test_scores_by_the_hessian_of_a_softmax_regression_agree(package: str) -> None:
    pytest.importorskip(package)
    assert float(agreement_attribution.distances("softmax regression", package).split(" | ")[-1]) < 1e-6


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
def test_dattri_corrects_along_the_transposed_eigenvectors() -> None:
    pytest.importorskip("dattri")
    problem = agreement_attribution.data(hidden=True, bias=False)
    peer, mine = agreement_attribution.dattri(problem), agreement_attribution.ours(problem, "empirical")
    for pair in ("inputs", "gradients"):
        for theirs, ours in zip(getattr(peer, pair), getattr(mine, pair), strict=True):
            torch.testing.assert_close(theirs, ours)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(problem.model, parameters, (x,)), y)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
        dict(problem.model.named_parameters()), problem.x[:, None], problem.y[:, None]
    )
    for layer, gradients in enumerate(each.values()):
        vectors = [torch.linalg.eigh(getattr(peer, side)[layer], UPLO="U")[1] for side in ("gradients", "inputs")]
        right, wrong = (
            (left @ gradients @ other.mT).square().mean(0).flatten().sort().values
            for left, other in ([v.mT for v in vectors], vectors)
        )
        torch.testing.assert_close(mine.eigenvalues[layer], right)
        torch.testing.assert_close(peer.eigenvalues[layer], wrong)
        assert agreement.distance(wrong, right) > 0.05


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
def test_pydvl_sends_the_gradients_of_all_labels_back_in_one_sum() -> None:
    pytest.importorskip("pydvl")
    problem = agreement_attribution.data(hidden=True, bias=True)
    peer, mine = agreement_attribution.pydvl(problem), agreement_attribution.ours(problem, "exact")
    p = problem.model(problem.x).softmax(-1)
    columns = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(1)  # √p_k (e_k - p), by label k
    apart = torch.einsum("nik,njk->ij", columns, columns) / len(p)
    together = torch.einsum("ni,nj->ij", columns.sum(2), columns.sum(2)) / len(p)
    torch.testing.assert_close(mine.gradients[-1], apart)
    torch.testing.assert_close(peer.gradients[-1], together)
    assert agreement.distance(together, apart) > 0.05


def test_the_committed_run_has_the_shapes_of_gpt2_small_and_stays_within_12_gb() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in gpt2_factors.GPT2().parameters())
    parts, whole = json.loads(gpt2_factors.OUT.read_text(encoding="utf-8"))["results"]
    assert parts["parameters"] == parts["eigenvalues"] == parameters == 124_439_808
    assert all(figures["peak GB"] < 12 for figures in parts["phases"].values())
    assert parts["phases"]["fit"]["peak GB"] < whole["phases"]["fit"]["peak GB"]
    assert parts["self-scores"] == pytest.approx(whole["self-scores"], rel=1e-5)


@pytest.mark.slow
def test_three_layers_of_gpt2_are_the_same_in_parts_within_12_gb() -> None:
    parts, whole = (gpt2_factors.in_own_process(layers=3, parts=parts, number=1) for parts in (4, 1))
    assert parts["eigenvalues"] == parts["parameters"] > 60e6
    assert all(figures["peak GB"] < 12 for figures in parts["phases"].values())
    assert parts["self-scores"] == pytest.approx(whole["self-scores"], rel=1e-5)
