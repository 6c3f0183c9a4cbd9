"""The time of the factors, their correction and scores, beside kronfluence.

    python -m benchmarks.statistics

CPU seconds on one thread, the least of three interleaved rounds. Both have the empirical Fisher of the same linear
modules in float32, decompositions in float64, squares of gradients of sequences, and a damping of a tenth of the mean
eigenvalue. kronfluence reads a DataLoader and writes every result to files, which is in its time.

                                          factors   decompositions       correction  pairwise scores      self-scores
    UCI network, kfac_fx                    0.029            0.007            0.026            0.066            0.030
    UCI network, kronfluence                0.395            0.386            0.502            0.793            0.730
    positions, kfac_fx                      0.059            0.015            0.069            0.068            0.078
    positions, kronfluence                  0.447            0.412            0.466            0.839            0.689
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import kfac_fx
from benchmarks.agreement_kronfluence import mlp

PHASES = ("factors", "decompositions", "correction", "pairwise scores", "self-scores")
ROUNDS = 3


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


def positions(examples: int = 128) -> Problem:
    """Three layers at every position of a sequence."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 32)).eval()
    summed = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")  # noqa: E731
    x, y = torch.randn(examples, 32, 64), torch.randint(32, (examples, 32))
    return Problem(model, "categorical", x, y, summed, 16, 16)


def seconds(phases: list[Callable[[], object]]) -> list[float]:
    times = [time.process_time()]
    for phase in phases:
        phase()
        times.append(time.process_time())
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def ours(problem: Problem) -> Callable[[], list[float]]:
    net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=problem.loss)
    names = [
        f"{path}.{role}"
        for path, module in problem.model.named_modules() if isinstance(module, nn.Linear)
        for role in ("weight", "bias")
    ]  # fmt: skip
    queries = problem.x[: problem.queries], problem.y[: problem.queries]

    def run() -> list[float]:
        spectra: list[kfac_fx.ModelSpectrum] = []
        estimator = kfac_fx.FisherEstimator(net, variables=names, exps=(), estimation_mode="empirical")

        def factors() -> None:
            for x, y in problem.batches:
                estimator.update_covariances(x, targets=y, fold=False)
            estimator.fold()

        damping = kfac_fx.Relative(0.1)
        return seconds([
            factors,
            lambda: spectra.append(estimator.spectrum(damping=damping, dtype=torch.float64)),
            lambda: spectra.append(spectra[0].correct(problem.batches, "sequence")),
            lambda: spectra[1].precondition(queries).scores_of_all(problem.batches),
            lambda: [spectra[1].self_scores(batch) for batch in problem.batches],
        ])  # fmt: skip

    return run


def kronfluence(problem: Problem) -> Callable[[], list[float]]:
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

    def run() -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            peer = Analyzer("time", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
            pairs = {**train, "per_device_query_batch_size": problem.queries}
            return seconds([
                lambda: peer.fit_covariance_matrices("f", data, factor_args=factors, **each),
                lambda: peer.perform_eigendecomposition("f", factor_args=factors),
                lambda: peer.fit_lambda_matrices("f", data, factor_args=factors, **each),
                lambda: peer.compute_pairwise_scores("p", "f", queries, data, score_args=scores, **pairs),
                lambda: peer.compute_self_scores("s", "f", data, score_args=scores, **train),
            ])  # fmt: skip

    return run


def table(problems: dict[str, Problem], rounds: int = ROUNDS) -> str:
    lines = [f"{'':<32}" + "".join(f"{phase:>17}" for phase in PHASES)]
    for name, problem in problems.items():
        runs = {"kfac_fx": ours(problem), "kronfluence": kronfluence(problem)}
        found: dict[str, list[list[float]]] = {library: [] for library in runs}
        for _ in range(rounds):
            for library, run in runs.items():
                found[library].append(run())
        for library, times in found.items():
            least = [min(of_phase) for of_phase in zip(*times, strict=True)]
            lines.append(f"{name}, {library:<14}".ljust(32) + "".join(f"{value:17.3f}" for value in least))
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(table({"UCI network": uci(), "positions": positions()}))


if __name__ == "__main__":
    main()
