"""kronfluence beside our spectrum: corrected eigenvalues, pairwise scores and self-scores of two models in float64.

Both take the empirical Fisher, squares of the gradients of sequences, and a damping of a tenth of the mean eigenvalue.
kronfluence sees modules of type Linear and Conv2d, so the comparison is over these.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
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
    spectrum = kfac_fx.fit_spectrum(net, batches, mode="empirical", case="sequence", parts=[linear])
    damped = spectrum.at(damping=kfac_fx.Relative(0.1))
    queries = damped.precondition((x[:QUERIES], y[:QUERIES]))
    eigenvalues = {key[0].removesuffix(".weight"): values for key, values in spectrum.eigenvalues().items()}
    own = torch.cat([damped.self_scores(batch) for batch in batches])
    return Result(eigenvalues, queries.scores_of_all(batches), own)


def kronfluence(problem: Problem, model: nn.Module, x: Tensor, y: Tensor) -> Result:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Loss(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return problem.summed(model(batch[0]), batch[1])

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task, exact = Loss(), torch.float64
    data, queries = TensorDataset(x, y), TensorDataset(x[:QUERIES], y[:QUERIES])
    factors = FactorArguments(
        strategy="ekfac",
        use_empirical_fisher=True,
        activation_covariance_dtype=exact,
        gradient_covariance_dtype=exact,
        per_sample_gradient_dtype=exact,
        lambda_dtype=exact,
    )
    scores = ScoreArguments(
        damping_factor=None, score_dtype=exact, per_sample_gradient_dtype=exact, precondition_dtype=exact
    )
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("agreement", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, per_device_batch_size=BATCH, factor_args=factors)
        sizes = {"per_device_query_batch_size": QUERIES, "per_device_train_batch_size": BATCH}
        analyzer.compute_pairwise_scores("pairs", "factors", queries, data, score_args=scores, **sizes)
        analyzer.compute_self_scores("own", "factors", data, per_device_train_batch_size=BATCH, score_args=scores)
        found = analyzer.load_lambda_matrices("factors")
        sums, numbers = found["lambda_matrix"], found["num_lambda_processed"]
        return Result(
            {name: values / numbers[name] for name, values in sums.items()},
            analyzer.load_pairwise_scores("pairs")["all_modules"],
            analyzer.load_self_scores("own")["all_modules"],
        )


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
