"""The time and memory of factors, their correction and scores, beside kronfluence and curvlinops.

    python -m benchmarks.statistics

All have the empirical Fisher of the same linear modules in float32, and squares of the gradients of sequences; scores
have a damping of a tenth of the mean eigenvalue. kfac_fx and kronfluence decompose in float64. Seconds are the least of
three interleaved rounds of CPU time on one thread; MB are those of the tensors that are alive at the peak, in a round
of their own.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import kfac_fx
from benchmarks.agreement_kronfluence import mlp
from benchmarks.alive import AliveBytes
from benchmarks.program import console

OUT = Path(__file__).parent / "results" / "statistics.json"
PHASES = ("factors", "decompositions", "correction", "pairwise scores", "self-scores")
ROUNDS = 3
Phases = list[Callable[[], object]]  # the first of PHASES, or all of them
Run = Callable[[Callable[[Phases], list[float]]], list[float]]  # with a measure of phases


class Problem(NamedTuple):
    """batch: the examples of a batch. queries: their number."""

    model: nn.Module
    loss: str
    x: Tensor
    y: Tensor
    summed: Callable[[Tensor, Tensor], Tensor]
    batch: int
    queries: int

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(self.batch), self.y.split(self.batch), strict=True))


def uci(examples: int = 512) -> Problem:
    summed = lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum")  # noqa: E731
    return Problem(mlp().eval(), "normal", torch.randn(examples, 8), torch.randn(examples, 1), summed, 64, 32)


def positions(examples: int = 128, width: int = 64) -> Problem:
    """Three layers at every position of a sequence."""
    hidden = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(width, 32)).eval()
    summed = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")  # noqa: E731
    x, y = torch.randn(examples, 32, width), torch.randint(32, (examples, 32))
    return Problem(model, "categorical", x, y, summed, 16, 16)


def seconds(phases: Phases) -> list[float]:
    times = [time.process_time()]
    for phase in phases:
        phase()
        times.append(time.process_time())
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def megabytes(phases: Phases) -> list[float]:
    peaks = []
    with AliveBytes() as alive:
        for phase in phases:
            alive.peak = alive.now
            phase()
            peaks.append(alive.peak / 2**20)
    return peaks


def ours(problem: Problem) -> Run:
    net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=problem.loss)
    names = [
        f"{path}.{role}"
        for path, module in problem.model.named_modules() if isinstance(module, nn.Linear)
        for role in ("weight", "bias")
    ]  # fmt: skip
    queries = problem.x[: problem.queries], problem.y[: problem.queries]

    def run(measure: Callable[[Phases], list[float]]) -> list[float]:
        spectra: list[kfac_fx.ModelSpectrum] = []
        estimator = kfac_fx.FisherEstimator(net, variables=names, exps=(), estimation_mode="empirical")

        def factors() -> None:
            for x, y in problem.batches:
                estimator.update_covariances(x, targets=y, fold=False)
            estimator.fold()

        damping = kfac_fx.Relative(0.1)
        return measure([
            factors,
            lambda: spectra.append(estimator.spectrum(damping=damping, dtype=torch.float64)),
            lambda: spectra.append(spectra[0].correct(problem.batches, "sequence")),
            lambda: spectra[1].precondition(queries).scores_of_all(problem.batches),
            lambda: [spectra[1].self_scores(batch) for batch in problem.batches],
        ])  # fmt: skip

    return run


def kronfluence(problem: Problem) -> Run:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Loss(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return problem.summed(model(batch[0]), batch[1])

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task, data = Loss(), TensorDataset(problem.x, problem.y)
    queries = TensorDataset(problem.x[: problem.queries], problem.y[: problem.queries])
    model = prepare_model(copy.deepcopy(problem.model), task)
    factors, scores = FactorArguments("ekfac", use_empirical_fisher=True), ScoreArguments(damping_factor=None)
    each, train = {"per_device_batch_size": problem.batch}, {"per_device_train_batch_size": problem.batch}

    def run(measure: Callable[[Phases], list[float]]) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            peer = Analyzer("time", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
            pairs = {**train, "per_device_query_batch_size": problem.queries}
            return measure([
                lambda: peer.fit_covariance_matrices("f", data, factor_args=factors, **each),
                lambda: peer.perform_eigendecomposition("f", factor_args=factors),
                lambda: peer.fit_lambda_matrices("f", data, factor_args=factors, **each),
                lambda: peer.compute_pairwise_scores("p", "f", queries, data, score_args=scores, **pairs),
                lambda: peer.compute_self_scores("s", "f", data, score_args=scores, **train),
            ])  # fmt: skip

    return run


def curvlinops(problem: Problem) -> Run:
    """It has no scores. Its corrected eigenvalues are for outputs [N, classes] only."""
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    sequences = problem.y.dim() == 2 and problem.loss == "categorical"
    model = nn.Sequential(copy.deepcopy(problem.model), ClassesSecond() if sequences else nn.Identity())
    loss = nn.CrossEntropyLoss() if problem.loss == "categorical" else nn.MSELoss()
    operator = KFACLinearOperator if sequences else EKFACLinearOperator

    def run(measure: Callable[[Phases], list[float]]) -> list[float]:
        peer = operator(
            model,
            loss,
            list(model.parameters()),
            problem.batches,
            fisher_type="empirical",
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        if sequences:
            return measure([peer.compute_kronecker_factors])
        phases = peer.compute_kronecker_factors, peer._compute_eigenvectors, peer.compute_eigenvalue_correction
        return measure(list(phases))

    return run


class ClassesSecond(nn.Module):
    """[N, T, V] to [N, V, T], as torch's cross entropy wants it."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.mT


LIBRARIES = {"kfac_fx": ours, "kronfluence": kronfluence, "curvlinops": curvlinops}


def figures(problem: Problem, rounds: int = ROUNDS) -> dict[str, dict[str, list[float]]]:
    """By library the "seconds" and "MB" of its phases."""
    installed = [library for library in LIBRARIES if importlib.util.find_spec(library) is not None]
    runs = {library: LIBRARIES[library](problem) for library in installed}
    times: dict[str, list[list[float]]] = {library: [] for library in runs}
    for _ in range(rounds):
        for library, run in runs.items():
            times[library].append(run(seconds))
    return {
        library: {"seconds": [min(phase) for phase in zip(*times[library], strict=True)], "MB": run(megabytes)}
        for library, run in runs.items()
    }


def rows(results: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, str]]:
    """One row a library and model: seconds and MB by phase."""
    return [
        {"model": model, "library": library}
        | dict.fromkeys(PHASES, "")
        | {
            phase: f"{time:.3f} s, {peak:.1f} MB"
            for phase, time, peak in zip(PHASES, measured["seconds"], measured["MB"], strict=False)
        }
        for model, libraries in results.items()
        for library, measured in libraries.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problems = {"UCI network": uci(), "positions": positions(), "wide positions": positions(width=256)}
    results = {name: figures(problem) for name, problem in problems.items()}
    shown = Table("model", "library", *PHASES)
    for row in rows(results):
        shown.add_row(*row.values())
    console().print(shown)
    packages = {"kronfluence": "kronfluence", "curvlinops": "curvlinops-for-pytorch"}
    record = {
        "command": "python -m benchmarks.statistics",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peers": {name: metadata.version(packages[name]) for name in packages if name in results["positions"]},
        "results": results,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
