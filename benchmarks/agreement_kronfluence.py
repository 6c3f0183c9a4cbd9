"""kronfluence beside our spectrum: corrected eigenvalues, pairwise scores and self-scores of two models in float64.

Both take the empirical Fisher, squares of the gradients of sequences, and a damping of a tenth of the mean eigenvalue.
kronfluence sees modules of type Linear and Conv2d, so the comparison is over these.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import kfac_fx

QUERIES, EXAMPLES, BATCH = 5, 24, 8
VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class Layer(nn.Module):
    """A block of a decoder, with the projections in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True))
        result: Tensor = x + self.down(F.gelu(self.up(self.other(x))))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.layers(x))
        return logits


def mlp() -> nn.Module:
    """The network of kronfluence's own UCI example."""
    return nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


class Problem(NamedTuple):
    make: Callable[[], nn.Module]
    loss: str
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    summed: Callable[[Tensor, Tensor], Tensor]


PROBLEMS = {
    "UCI network": Problem(
        mlp,
        "normal",
        lambda: torch.randn(EXAMPLES, 8),
        lambda: torch.randn(EXAMPLES, 1),
        lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"),
    ),
    "GPT of two layers": Problem(
        GPT,
        "categorical",
        lambda: torch.randint(VOCABULARY, (EXAMPLES, LENGTH)),
        lambda: torch.randint(VOCABULARY, (EXAMPLES, LENGTH)),
        lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),
    ),
}


class Result(NamedTuple):
    """eigenvalues: corrected, of every module, sorted; scores: [queries, examples]; own: [examples]."""

    eigenvalues: dict[str, Tensor]
    scores: Tensor
    own: Tensor


def ours(problem: Problem, model: nn.Module, x: Tensor, y: Tensor) -> Result:
    net = kfac_fx.compile(model, (x[:2],), loss=problem.loss)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    linear = [
        name for path, module in model.named_modules() if isinstance(module, nn.Linear)
        for name in (f"{path}.weight", f"{path}.bias")
    ]  # fmt: skip
    spectrum = kfac_fx.fit_spectrum(net, batches, mode="empirical", case="sequence", variables=linear)
    damped = spectrum.at(damping=kfac_fx.Relative(0.1))
    queries = damped.precondition((x[:QUERIES], y[:QUERIES]))
    eigenvalues = {key[0].removesuffix(".weight"): values for key, values in spectrum.eigenvalues().items()}
    own = torch.cat([damped.self_scores(batch) for batch in batches])
    return Result(eigenvalues, queries.scores_of_all(batches), own)


def kronfluence(problem: Problem, model: nn.Module, x: Tensor, y: Tensor) -> Result:
    exact, data = torch.float64, TensorDataset(x, y)
    with analyzed(model, problem.summed) as analyzer:
        fit(analyzer, data, BATCH, exact, use_empirical_fisher=True)
        pairs = pairwise(analyzer, TensorDataset(x[:QUERIES], y[:QUERIES]), data, BATCH, exact, damping=None)
        scores = score_arguments(exact, damping=None)
        analyzer.compute_self_scores("own", "factors", data, per_device_train_batch_size=BATCH, score_args=scores)
        found = analyzer.load_lambda_matrices("factors")
        sums, numbers = found["lambda_matrix"], found["num_lambda_processed"]
        return Result(
            {name: values / numbers[name] for name, values in sums.items()},
            pairs,
            analyzer.load_self_scores("own")["all_modules"],
        )


def scores_of_kronfluence(
    summed: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    data: TensorDataset,
    queries: TensorDataset,
    *,
    batch: int,
    damping: float | None = None,
) -> Tensor:
    """EK-FAC scores of the sampled Fisher in float32, [queries, examples].

    Args:
        summed: the loss of a batch, from logits and targets, summed over its rows.
        damping: None: a tenth of the mean eigenvalue of every module.
    """
    with analyzed(model, summed) as analyzer:
        fit(analyzer, data, batch, torch.float32, use_empirical_fisher=False)
        return pairwise(analyzer, queries, data, batch, torch.float32, damping)


@contextlib.contextmanager
def analyzed(model: nn.Module, summed: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Any]:
    """An analyzer of a copy of the model, with a folder as long as the context."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Loss(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, targets = model(batch[0]), batch[1]
            if sample:
                with torch.no_grad():
                    targets = torch.distributions.Categorical(logits=logits).sample()
            return summed(logits, targets)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Loss()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(copy.deepcopy(model), task)
        yield Analyzer("agreement", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)


def fit(analyzer: Any, data: TensorDataset, batch: int, dtype: torch.dtype, *, use_empirical_fisher: bool) -> None:
    from kronfluence.arguments import FactorArguments

    arguments = FactorArguments(
        strategy="ekfac",
        use_empirical_fisher=use_empirical_fisher,
        activation_covariance_dtype=dtype,
        gradient_covariance_dtype=dtype,
        per_sample_gradient_dtype=dtype,
        lambda_dtype=dtype,
    )
    analyzer.fit_all_factors("factors", data, per_device_batch_size=batch, factor_args=arguments)


def score_arguments(dtype: torch.dtype, damping: float | None) -> Any:
    from kronfluence.arguments import ScoreArguments

    precise = {"score_dtype": dtype, "per_sample_gradient_dtype": dtype, "precondition_dtype": dtype}
    return ScoreArguments(damping_factor=damping, **precise)


def pairwise(
    analyzer: Any, queries: TensorDataset, data: TensorDataset, batch: int, dtype: torch.dtype, damping: float | None
) -> Tensor:
    """[queries, examples]"""
    sizes = {"per_device_query_batch_size": len(queries), "per_device_train_batch_size": batch}
    arguments = score_arguments(dtype, damping)
    analyzer.compute_pairwise_scores("pairs", "factors", queries, data, score_args=arguments, **sizes)
    scores: Tensor = analyzer.load_pairwise_scores("pairs")["all_modules"]
    return scores


def rows(name: str) -> str:
    """The distances of kronfluence from ours: "eigenvalues | pairwise scores | self-scores"."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        problem = PROBLEMS[name]
        model, x, y = problem.make().eval(), problem.inputs(), problem.targets()
        mine, theirs = ours(problem, model, x, y), kronfluence(problem, model, x, y)
    finally:
        torch.set_default_dtype(before)
    assert mine.eigenvalues.keys() == theirs.eigenvalues.keys()
    values = [
        torch.cat([result.eigenvalues[module].flatten().sort().values for module in mine.eigenvalues])
        for result in (theirs, mine)
    ]
    pairs = (values, (theirs.scores, mine.scores), (theirs.own, mine.own))
    return " | ".join(f"{float((peer - ours).norm() / ours.norm()):.0e}" for peer, ours in pairs)
