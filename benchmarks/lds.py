"""Are the scores any good? They are compared with trainings on random halves of the training set.

    python -m benchmarks.lds                 the figures, in results/lds.json
    python -m benchmarks.lds --write-docs    docs/lds.md, from these figures

The linear datamodeling score (Park et al. 2023, "TRAK: Attributing model behavior at scale", section 2) of a query is
the rank correlation, over random halves of the training set, between the loss of the query after a training on the half
and the loss that the scores predict for it, which is minus the sum of the scores of the examples in the half. The
figure is the mean over the queries. A half is trained with several seeds, and the losses of these are averaged.

All trainings of a task run together: every parameter has a dimension for them, and `torch.func.vmap` gives each its own
batches. Data come with scikit-learn and with Python. kronfluence has a row where it is installed; its factors are of
modules of type Linear alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import kfac_fx
from benchmarks.agreement_kronfluence import scores_of_kronfluence
from benchmarks.convergence.data import CHARACTERS, digits, prose
from benchmarks.program import console, table, versions

OUT = Path(__file__).parent / "results" / "lds.json"
DOCS = Path(__file__).parents[1] / "docs" / "lds.md"
DAMPING = 0.1  # of the mean eigenvalue of a block, as in Grosse et al. (2023)
RESAMPLED = 2000
CEILING = "other trainings on the same halves"
Data = tuple[Tensor, Tensor]
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A network, its data and its training.

    Attributes:
        words: a line for the page.
        case: of the corrected eigenvalues.
        rate: of AdamW, which decays linearly to zero.
        halves: of the training set, at random; seeds: trainings of each half. models: networks that are scored.
    """

    words: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    case: str
    steps: int
    batch: int
    rate: float
    decay: float
    halves: int
    seeds: int
    models: int


# --- the tasks --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention and two linear layers, whose attention is written out, since `vmap` runs it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.other = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        products = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        read = products.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.other(x)))))


class GPT(nn.Module):
    """A small GPT of characters."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, 2) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return torch.as_tensor(self.head(self.norm(self.layers(x))))


def of_digits(examples: int, queries: int) -> tuple[Data, Data]:
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: examples + queries]
    x, y = images[order].flatten(1).float() / 8 - 1, labels[order]
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


def of_prose(examples: int, queries: int, length: int) -> tuple[Data, Data]:
    """Windows of the manual: the queries follow on the examples."""
    ids = prose()[: (examples + queries) * (length + 1)].view(-1, length + 1)
    x, y = ids[:, :-1], ids[:, 1:]
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


TASKS = {
    "digits": Task(
        "a network 64-32-10 reads 500 images of digits; 100 other images are the queries",
        lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
        lambda: of_digits(500, 100), "row", 300, 50, 3e-3, 0.01, 60, 4, 5,
    ),
    "prose": Task(
        "a GPT of two layers reads 256 windows of 32 characters of Python's manual; 64 other windows are the queries",
        lambda: GPT(32, 32, 2), lambda: of_prose(256, 64, 32), "sequence", 300, 32, 3e-3, 0.01, 40, 4, 5,
    ),
}  # fmt: skip


def toy(task: Task) -> Task:
    """The task in a few seconds."""
    (x, y), (qx, qy) = task.data()
    return replace(task, data=lambda: ((x[:24], y[:24]), (qx[:4], qy[:4])), steps=20, batch=8, halves=4, models=2)


# --- trainings --------------------------------------------------------------------------------------------------------


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The losses of the examples, summed over their rows: [N]."""
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).sum(1)


def trained(task: Task, data: Data, subsets: Tensor, seeds: Sequence[int]) -> Parameters:
    """The parameters of one training for each subset, stacked.

    subsets: numbers of examples, [trainings, examples]. seeds: of the networks and of the order of the examples.
    """
    (x, y), starts, orders = data, [], []
    for subset, seed in zip(subsets, seeds, strict=True):
        torch.manual_seed(seed)
        starts.append({name: p.detach() for name, p in task.make().named_parameters()})
        epochs = -(-task.steps * task.batch // len(subset))
        drawn = torch.cat([subset[torch.randperm(len(subset))] for _ in range(epochs)])
        orders.append(drawn[: task.steps * task.batch].view(task.steps, task.batch))
    skeleton, batches = task.make(), torch.stack(orders, 1)
    stacked = {name: torch.stack([start[name] for start in starts]).requires_grad_() for name in starts[0]}
    optimizer = torch.optim.AdamW(stacked.values(), lr=task.rate, weight_decay=task.decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / task.steps)

    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return losses(functional_call(skeleton, parameters, (inputs,)), targets).mean() / targets[0].numel()

    gradients = vmap(grad(loss))
    for chosen in batches:
        of_step = gradients({name: p.detach() for name, p in stacked.items()}, x[chosen], y[chosen])
        for name, parameter in stacked.items():
            parameter.grad = of_step[name]
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in stacked.items()}


def measured(task: Task, parameters: Parameters, queries: Data) -> Tensor:
    """The losses of the queries after every training: [trainings, queries]."""
    skeleton = task.make()
    each = vmap(lambda one: losses(functional_call(skeleton, one, (queries[0],)), queries[1]))
    return each(parameters)


# --- scores -----------------------------------------------------------------------------------------------------------


def scores_of(task: Task, model: nn.Module, data: Data, queries: Data) -> dict[str, Tensor]:
    """By method [queries, examples]."""
    net = kfac_fx.compile(model, (data[0][:2],), loss="categorical")
    batches = list(zip(*(part.split(task.batch) for part in data), strict=True))
    plain = kfac_fx.fit_spectrum(net, batches)
    relative = kfac_fx.Relative(DAMPING)
    spectra = {
        "gradient product": plain.at(scale=0.0, damping=1.0),
        "K-FAC": plain.at(damping=relative),
        "EK-FAC": kfac_fx.fit_spectrum(net, batches, case=task.case).at(damping=relative),
    }
    found = {name: spectrum.precondition(queries).scores_of_all(batches) for name, spectrum in spectra.items()}
    if importlib.util.find_spec("kronfluence") is not None:
        found["EK-FAC of kronfluence"] = scores_of_kronfluence(
            lambda logits, targets: losses(logits, targets).sum(),
            model, TensorDataset(*data), TensorDataset(*queries), batch=task.batch,
        )  # fmt: skip
    return found


# --- correlations -----------------------------------------------------------------------------------------------------


def ranks(values: Tensor) -> Tensor:
    """Along the first dimension."""
    return values.argsort(0).argsort(0).double()


def rank_correlations(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, along the first dimension of [halves, queries]: [queries]. Losses have no ties."""
    a, b = (r - r.mean(0) for r in (ranks(a), ranks(b)))
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def with_interval(correlations: Tensor) -> dict[str, Any]:
    """The mean over queries, and its interval of 95 % by a bootstrap of the queries. correlations: [models, queries],
    averaged over the models first."""
    by_query = correlations.mean(0)
    drawn = torch.randint(len(by_query), (RESAMPLED, len(by_query)), generator=torch.Generator().manual_seed(0))
    ends = by_query[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=by_query.dtype))
    return {
        "mean": by_query.mean().item(),
        "interval": ends.tolist(),
        "models": correlations.mean(1).tolist(),
    }


def measure(task: Task) -> dict[str, Any]:
    started = time.perf_counter()
    data, queries = task.data()
    number = len(data[0])
    generator = torch.Generator().manual_seed(1)
    halves = torch.stack([torch.randperm(number, generator=generator)[: number // 2] for _ in range(task.halves)])
    by_seed = []
    for seed in range(task.seeds):
        seeds = [1000 * (seed + 1) + n for n in range(task.halves)]
        by_seed.append(measured(task, trained(task, data, halves, seeds), queries))
    truth = torch.stack(by_seed)  # [seeds, halves, queries]
    everything = torch.arange(number).expand(task.models, -1)
    models = trained(task, data, everything, range(task.models))
    found: dict[str, list[Tensor]] = {}
    for n in range(task.models):
        model = task.make()
        model.load_state_dict({name: stacked[n] for name, stacked in models.items()})
        for name, scores in scores_of(task, model.eval(), data, queries).items():
            found.setdefault(name, []).append(scores)
    methods = {}
    for name, of_models in found.items():
        each, together = torch.stack(of_models), torch.stack(of_models).mean(0, keepdim=True)
        methods[name] = {
            kind: with_interval(torch.stack([rank_correlations(predicted(s, halves), truth.mean(0)) for s in scores]))
            for kind, scores in (("one model", each), ("mean of models", together))
        }
    first, second = truth[: task.seeds // 2].mean(0), truth[task.seeds // 2 :].mean(0)
    same = {CEILING: {"one model": with_interval(rank_correlations(first, second).unsqueeze(0))}}
    of_trainings = {"training": measured(task, models, data).mean().item(), "query": truth.mean().item()}
    return {
        "methods": methods | same,
        "losses": {name: value / data[1][0].numel() for name, value in of_trainings.items()},
        "seconds": time.perf_counter() - started,
    }


def predicted(scores: Tensor, halves: Tensor) -> Tensor:
    """The losses of the queries after a training on every half, up to a constant: [halves, queries]."""
    return torch.stack([-scores[:, half].sum(1) for half in halves])


# --- the page ---------------------------------------------------------------------------------------------------------


def shown(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    low, high = figure["interval"]
    return f"{figure['mean']:.2f} ({low:.2f} to {high:.2f})"


def page(results: Mapping[str, Any]) -> str:
    lines = [
        "# Scores and retraining",
        "",
        "A score predicts what happens to the loss of a query if a training example is left out. This page tests the "
        "prediction by training without some of the data. A network is trained on random halves of its training set. "
        "The *linear datamodeling score* of a query is the rank correlation, over the halves, between its loss after "
        "these trainings and minus the sum of the scores of the examples in the half (Park et al. 2023, "
        "[TRAK](https://arxiv.org/abs/2303.14186)). 1 is a perfect order, 0 is chance.",
        "",
        "- The figures are means over the queries, with intervals of 95 % by a bootstrap of the queries.",
        "- *One model* is the mean over models of several seeds, each with its own scores. *From and to* are the "
        "lowest and the highest of them. *Mean of models* has the scores averaged over these models first.",
        f"- K-FAC and EK-FAC have a damping of {DAMPING:g} times the mean eigenvalue of every block, as Grosse et al. "
        "2023 have it. No number was tuned.",
    ]
    for name, task in TASKS.items():
        of_task = results["tasks"][name]
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"{task.words[0].upper()}{task.words[1:]}. {task.halves} halves are trained with {task.seeds} seeds each, "
            f"and {task.models} models are scored. The loss is {of_task['losses']['training']:.2f} on the examples, "
            f"and {of_task['losses']['query']:.2f} on the queries after training on a half.",
            "",
            "| scores | one model | from | to | mean of models |",
            "|---|---|---|---|---|",
        ]
        for method, figures in of_task["methods"].items():
            models = figures["one model"]["models"]
            ends = [f"{end:.2f}" if len(models) > 1 else "" for end in (min(models), max(models))]
            cells = [shown(figures["one model"]), *ends, shown(figures.get("mean of models"))]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    means = [
        {method: figures["one model"]["mean"] for method, figures in of_task["methods"].items()}
        for of_task in results["tasks"].values()
    ]
    gains = " and ".join(f"{of_task['EK-FAC'] / of_task['gradient product']:.1f}" for of_task in means)
    lines += [
        "",
        "## What to expect",
        "",
        f"- Scores by EK-FAC have {gains} times the correlation of the gradient product, the dot product of two "
        "gradients, which is `spectrum.at(scale=0.0, damping=1.0)`. They are a little ahead of K-FAC, whose "
        "eigenvalues are not corrected.",
        "- The scores of several models, averaged, predict better than those of one.",
        f"- *{CEILING.capitalize()}* is the correlation between the losses by one half of the seeds and those by the "
        "other half. It says how much of the order is the data and not the seed. A score may lie above it, because "
        "the score is compared with the mean over all seeds.",
        "- kronfluence has factors for modules of type Linear alone, so embeddings and norms are not in its scores. It "
        "samples the targets with other random numbers.",
        "- For a GPT-2 that is fine-tuned on WikiText-2, the authors of kronfluence "
        "[report](https://github.com/pomonam/kronfluence/tree/main/examples/wikitext) 0.44 for EK-FAC and 0.12 for the "
        "gradient product, with 100 subsets and five seeds each.",
        "",
        f"`{results['command']}`; torch {results['torch']}, kronfluence {results['kronfluence']}.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="toys of the tasks, whose figures mean nothing")
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.write_docs:
        DOCS.write_text(page(json.loads(chosen.out.read_text())))
        return
    torch.set_num_threads(1)
    found = {}
    for name in chosen.tasks:
        found[name] = measure(toy(TASKS[name]) if chosen.quick else TASKS[name])
        rows = [
            {"scores": method, **{kind: shown(figures.get(kind)) for kind in ("one model", "mean of models")}}
            for method, figures in found[name]["methods"].items()
        ]
        console().print(table(f"{name}: linear datamodeling scores, {found[name]['seconds']:.0f} seconds", rows))
    there = importlib.util.find_spec("kronfluence") is not None
    made = {"kronfluence": metadata.version("kronfluence") if there else None, **versions()}
    results = {"command": "python -m benchmarks.lds", **made, "tasks": found}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
