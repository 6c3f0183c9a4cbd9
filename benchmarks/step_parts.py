"""Where the time of a step goes: `python -m benchmarks.step_parts`.

CPU time of one thread in every part of a step, without that in parts inside of it; medians over steps that have
empirical statistics and inverses, interleaved with the same model's SGD steps. Beside it the floor of the cost model:
what the part's flops take at the rate of the SGD step's.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from benchmarks import program
from benchmarks.flops import Flops, flops_of
from benchmarks.methods import Method, Step, ours, sgd
from benchmarks.step_models import MODELS, QUICK, Make
from benchmarks.step_time import seeded
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.vectors import Flat
from kfac_fx.optim import optimizer
from kfac_fx.recording import taps as tap

OUT = Path(__file__).parent / "results" / "step_parts.json"
TRAINING, STATISTICS = "forward and backward", "statistics"
PARTS: Mapping[str, Sequence[tuple[Any, str]]] = {
    "averages of factors": [(FisherEstimator, "accumulate"), (FisherEstimator, "fold")],
    "inverses": [(FisherEstimator, "decompose")],
    "vectors to matrices and back": [(BlockGroup, "pack"), (BlockGroup, "unpack"), (Flat, "joined"), (Flat, "parts")],
    "preconditioning": [(BlockGroup, "multiply")],
    "momentum and move": [(optimizer, "take_step")],
}


class Clock:
    """CPU seconds by part since the last `read`; of one inside of another, only its own."""

    def __init__(self) -> None:
        self.inside = [TRAINING]
        self.read()

    def read(self) -> dict[str, float]:
        if len(self.inside) == 1 and hasattr(self, "seconds"):
            self.turn()
        found = dict(getattr(self, "seconds", {}))
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = time.process_time()
        return found

    def turn(self) -> None:
        """Add the time since the last call to the innermost part."""
        now = time.process_time()
        self.seconds[self.inside[-1]] += now - self.since
        self.since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.turn()
        self.inside.append(name)
        try:
            yield
        finally:
            self.turn()
            self.inside.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, the library's functions are timed."""
        with ExitStack() as changes:
            for name, functions in PARTS.items():
                for owner, function in functions:
                    timed = self.timed(name, getattr(owner, function))
                    changes.enter_context(mock.patch.object(owner, function, timed))
            of_taps = tap.full_precision_in_eager  # what a tap computes, it computes in this context

            @contextmanager
            def counted() -> Iterator[None]:
                with self.part(STATISTICS), of_taps():
                    yield

            changes.enter_context(mock.patch.object(tap, "full_precision_in_eager", counted))
            yield


def measure(make: Make, rounds: int) -> tuple[float, dict[str, float]]:
    """Median milliseconds of an SGD step, and of every part of ours."""
    plain, step = seeded(make, Method(sgd), (1, 1)), seeded(make, Method(empirical), (1, 1))
    clock, of_sgd, of_parts = Clock(), [], []
    with clock.watching():
        for warm in (*[True] * 2, *[False] * rounds):
            clock.read()
            plain()
            (whole,) = clock.read().values()
            step()
            parts = clock.read()
            if not warm:
                of_sgd.append(whole)
                of_parts.append(parts)
    names = (TRAINING, STATISTICS, *PARTS)
    return 1e3 * statistics.median(of_sgd), {
        name: 1e3 * statistics.median(parts.get(name, 0.0) for parts in of_parts) for name in names
    }


def empirical(problem: Any, n: int, m: int) -> Step:
    return ours(problem, n, m, estimation_mode="empirical")


def floors(flops: Flops) -> dict[str, float]:
    """The times of the parts that have one, over the SGD step's."""
    return {
        TRAINING: 1.0,
        STATISTICS: flops.statistics / flops.training,
        "inverses": flops.inverses / flops.training,
        "preconditioning": flops.preconditioning / flops.training,
    }


def run(models: Mapping[str, Make], rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make in models.items():
        of_sgd, parts = measure(make, rounds)
        floor = floors(flops_of(make))
        rows = [
            {"part": part, "milliseconds": share, "of an SGD step": share / of_sgd, "floor": floor.get(part, 0.0)}
            for part, share in parts.items()
        ]
        results[name] = {"sgd milliseconds": of_sgd, "parts": rows}
    return results


def show(results: Mapping[str, Any], console: Console) -> None:
    for name, result in results.items():
        title = f"{name}: parts of a step ({result['sgd milliseconds']:.1f} ms for SGD's)"
        console.print(program.table(title, result["parts"]))


def main(arguments: Sequence[str] | None = None) -> None:
    program.main(arguments, doc=__doc__, models=MODELS, quick=QUICK, rounds=20, out=OUT, run=run, show=show)


if __name__ == "__main__":
    main()
