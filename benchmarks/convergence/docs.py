"""docs/results.md and its figures: `python -m benchmarks.convergence --write-docs`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import weight_decay
from benchmarks.convergence.figures import draw
from benchmarks.convergence.methods import METHODS, TRIALS
from benchmarks.convergence.runs import Record
from benchmarks.convergence.summary import Entry, beats, entries
from benchmarks.convergence.tasks import TASKS, Task
from benchmarks.convergence.training import WARM_UP

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
FIGURES = "results"
SEEDS = (0, 1, 2)
PEERS = ("AdamW", "SOAP", "Muon", "L-BFGS")
SHORT = ("AdamW", "SOAP", "Muon", "KFAC")  # the methods of the first table
FIGURE = "deep"  # the task of the first figure
OPENING = """# Training losses of K-FAC and of other optimizers

The lowest training loss of tuned AdamW, SOAP and Muon and of `KFAC(net)` on {tasks} small tasks, as medians over
{seeds} seeds. The last two columns are the steps and the CPU time that KFAC takes to AdamW's lowest loss, as multiples
of AdamW's. The best loss of the four is bold.
"""
MEANS = """\
The next table has geometric means over the tasks: AdamW's steps, or CPU time, to its lowest loss, divided by those of
the method to the same loss. A method that does not reach it on a task counts with its whole run.
"""
CAPTION = """\
![training loss of all methods on the deep network]({figures}/{figure}.png)

The figure shows the training losses of all methods on the task *{figure}*: {title}.
[The large table](#summary) has all methods.
"""
INTRODUCTION = """## How it was measured

- Every method starts from the same network and sees the same batches. The seed sets both.
- The learning rate of a method is tuned in {trials} runs on seed 0, on a logarithmic grid: the search follows the
  better side until the best rate has worse ones on both sides, and then tries the middle between the best rate and the
  better of its neighbors. KFAC has lr=1 and is not tuned; KFAC adaptive tries the learning rates 1 and 0.3, and KFAC
  qmodel has none. The chosen rate is run with three seeds. The constants inside of KFAC's rule were chosen by trials
  on these tasks, some of them on all three seeds.
- All learning rates have a warm-up of {warm_up:.0%} of the steps and a linear decay to 0. L-BFGS and the quadratic
  model find their own step size. No method decays weights.
- The loss is measured on a fixed part of the training set, in eval mode. Losses of smoothed labels are given above
  their lowest value, the entropy of the labels. The tables give the lowest loss of a run.
- CPU time is that of the steps on one thread, without compilation and measurements. Seconds are noisy; ratios within a
  task are better than the seconds, and steps are exact.
- The runs of AdamW, SOAP and Muon at chosen rates and those of KFAC were made at one commit, on one machine, whose
  processor has AVX-512: the four methods of a task and a seed one after another, on each of two cores those of other
  tasks. The runs of the searches and of the other methods were made before, on other machines. Times of two commits are
  not compared, so the other methods have a loss and steps, and no multiple of AdamW's time. Muon has products in
  bfloat16, which take many times as long on processors without AVX-512.
- Results are medians over seeds, with their range.
- Runs of KFAC adaptive whose command says KFAC were made while it was the default.

`benchmarks/results/convergence.jsonl` has a line for each of the {count} runs, with its command and its commit:

    python -m benchmarks.convergence
    python -m benchmarks.convergence --write-docs

The first command makes the runs that are not there, and the second one makes this page. Versions: {versions}; kfac_fx
at {commits}.
"""


def write(records: Sequence[Record]) -> None:
    """Write the page and the figures."""
    DOCS.write_text(page(records), encoding="utf-8")
    for task in TASKS.values():
        if known := entries(records, task):
            draw(task, known, DOCS.parent / FIGURES / f"{task.name}.png")


def page(records: Sequence[Record]) -> str:
    known = {task.name: entries(records, task) for task in TASKS.values()}
    sections = [opening(known), introduction(records), budgets(), methods(), summary(known), missing(known)]
    sections += [details(task, known[task.name]) for task in TASKS.values() if known[task.name]]
    if weight_decay.OUT.exists():
        sections.append("\n".join([*weight_decay.section(json.loads(weight_decay.OUT.read_text())), ""]))
    return "\n".join(section for section in sections if section)


def introduction(records: Sequence[Record]) -> str:
    commits = dict.fromkeys(str(record["commit"]) for record in records)
    versions = dict.fromkeys(f"torch {record['torch']}, python {record['python']}" for record in records)
    return INTRODUCTION.format(
        trials=TRIALS,
        warm_up=WARM_UP,
        count=len(records),
        versions="; ".join(versions),
        commits=", ".join(commits),
    )


def opening(known: Mapping[str, Mapping[str, Entry]]) -> str:
    """The first table, of a few methods, and the figure of one task."""
    rows = [[task, *short_cells(of_task)] for task, of_task in known.items() if of_task]
    columns = ["task", *SHORT, "steps", "CPU time"]
    parts = [OPENING.format(tasks=len(rows), seeds=len(SEEDS)), table(columns, rows)]
    if rows := means(known):
        behind = [task for task, of_task in known.items() if of_task and not kfac_is_lowest(of_task)]
        parts += [f"KFAC does not end lowest on {', '.join(behind)}.\n"] * bool(behind)
        parts += [MEANS, table(["method", "times as fast in steps", "in CPU time"], rows)]
    if known[FIGURE]:
        parts.append(CAPTION.format(figures=FIGURES, figure=FIGURE, title=TASKS[FIGURE].title))
    return "\n".join(parts)


def kfac_is_lowest(of_task: Mapping[str, Entry]) -> bool:
    return min((name for name in SHORT if name in of_task), key=lambda name: of_task[name].loss) == "KFAC"


def means(known: Mapping[str, Mapping[str, Entry]]) -> list[list[str]]:
    """The geometric means of steps and CPU time over tasks that AdamW and all methods of `SHORT` have runs of."""
    whole_tasks = [of_task for of_task in known.values() if set(SHORT) <= of_task.keys()]
    rows = []
    for name in SHORT[1:] if whole_tasks else ():
        ratios = []
        for of_task in whole_tasks:
            adamw, entry = of_task["AdamW"], of_task[name]
            spent = entry.task.steps, entry.seconds
            mine = [min(pair) for pair in zip(entry.reached(adamw.loss), spent, strict=True)]
            ratios.append([its / ours for its, ours in zip(adamw.reached(adamw.loss), mine, strict=True)])
        rows.append([name, *(f"{statistics.geometric_mean(of_kind):.2f}" for of_kind in zip(*ratios, strict=True))])
    return rows


def short_cells(of_task: Mapping[str, Entry]) -> list[str]:
    """The losses of `SHORT`, and the steps and the CPU time of KFAC to AdamW's loss, as multiples of AdamW's."""
    losses = {name: of_task[name].loss for name in SHORT if name in of_task}
    cells = [number(losses[name]) if name in losses else "" for name in SHORT]
    if losses:
        best = SHORT.index(min(losses, key=losses.__getitem__))
        cells[best] = f"**{cells[best]}**"
    if not {"AdamW", "KFAC"} <= losses.keys():
        return [*cells, "", ""]
    adamw, kfac = of_task["AdamW"], of_task["KFAC"]
    pairs = zip(kfac.reached(adamw.loss), adamw.reached(adamw.loss), strict=True)
    return [*cells, *(ratio(mine, its) for mine, its in pairs)]


# --- tables -----------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float) -> str:
    """Three digits, or a dash for what was never reached or is not finite."""
    return f"{value:.3g}" if math.isfinite(value) else "-"


def whole(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "-"


def ratio(value: float, other: float) -> str:
    return f"{value / other:.2f}" if math.isfinite(value) and math.isfinite(other) else "-"


def budgets() -> str:
    rows = [[task.name, task.title, str(task.steps), f"{task.seconds:.0f}"] for task in TASKS.values()]
    text = "A run ends after the steps of its task or, if that is earlier, after its CPU seconds.\n"
    lines = table(["task", "network, data, loss", "steps", "CPU seconds"], rows).splitlines()
    lines[1] = "| --- | --- | --: | --: |"
    return "\n".join(["## Tasks\n", text, *lines, ""])


def methods() -> str:
    rows = [
        [name, method.note, "all" if len(method.tasks) == len(TASKS) else ", ".join(method.tasks)]
        for name, method in METHODS.items()
    ]
    lines = table(["method", "settings", "tasks"], rows).splitlines()
    lines[1] = "| --- | --- | --- |"
    return "\n".join(["## Methods\n", *lines, ""])


SUMMARY = """\
## Summary

Every cell gives the lowest training loss and, in parentheses, the steps and the CPU time until the method reached
AdamW's lowest loss, as multiples of AdamW's. A single number is that of the steps. A dash says that the method did not
reach that loss. The best loss of a task is bold.
*Diverged* counts runs that ended above their first loss.
"""
VERDICTS = """\
The next table counts the tasks on which a method reaches the lowest loss of another one in fewer steps, and in less CPU
time, than the other does, of the tasks on which both were run. A single count is that of the steps.
"""


def summary(known: Mapping[str, Mapping[str, Entry]]) -> str:
    names = [name for name in METHODS if any(name in of_task for of_task in known.values())]
    rows = [[task, *(cell(of_task, name) for name in names)] for task, of_task in known.items() if of_task]
    diverged = []
    for name in names:
        runs = [of_task[name] for of_task in known.values() if name in of_task]
        diverged.append(f"{sum(entry.diverged for entry in runs)} of {sum(len(entry.runs) for entry in runs)}")
    rows.append(["diverged", *diverged])
    verdicts = [[name, *(counts(known, name, peer) for peer in PEERS)] for name in names]
    against = [f"{peer}: steps, CPU time" for peer in PEERS]
    return "\n".join([SUMMARY, table(["task", *names], rows), VERDICTS, table(["method", *against], verdicts)])


def cell(of_task: Mapping[str, Entry], name: str) -> str:
    if name not in of_task:
        return ""
    entry, adamw = of_task[name], of_task.get("AdamW")
    best = len(of_task) > 1 and entry.loss == min(other.loss for other in of_task.values())
    text = f"**{number(entry.loss)}**" if best else number(entry.loss)
    if adamw is None or name == "AdamW":
        return text
    pairs = list(zip(entry.reached(adamw.loss), adamw.reached(adamw.loss), strict=True))
    compared = pairs if entry.commits == adamw.commits else pairs[:1]
    return f"{text} ({', '.join(ratio(mine, its) for mine, its in compared)})"


def counts(known: Mapping[str, Mapping[str, Entry]], name: str, peer: str) -> str:
    if name == peer:
        return ""
    pairs = [(of_task[name], of_task[peer]) for of_task in known.values() if name in of_task and peer in of_task]
    if not pairs:
        return ""
    steps, times = zip(*(beats(entry, other) for entry, other in pairs), strict=True)
    of_time = "" if None in times else f", {sum(times)}"
    return f"{sum(steps)}{of_time} of {len(pairs)}"


def missing(known: Mapping[str, Mapping[str, Entry]]) -> str:
    """The runs that the page does not have."""
    lines = list(gaps(known))
    return "\n".join(["### Runs that are missing\n", *lines, ""]) if lines else ""


def gaps(known: Mapping[str, Mapping[str, Entry]]) -> Iterator[str]:
    for name, method in METHODS.items():
        without, tuning, seeds = [], [], []
        for task in TASKS.values():
            entry = known[task.name].get(name)
            if task.name not in method.tasks:
                continue
            if entry is None:
                without.append(task.name)
            elif not entry.finished:
                tuning.append(f"{task.name} ({len(entry.trials)} runs)")
            elif absent := [str(seed) for seed in SEEDS if seed not in {run["seed"] for run in entry.runs}]:
                seeds.append(f"{task.name} ({', '.join(absent)})")
        if without and not any(name in of_task for of_task in known.values()):
            yield f"- {name}: all."
            continue
        parts = [("no run", without), ("the search is not finished", tuning), ("seeds that are missing", seeds)]
        texts = [f"{title}: {', '.join(tasks)}" for title, tasks in parts if tasks]
        if texts:
            yield f"- {name}: {'; '.join(texts)}."


def details(task: Task, of_task: Mapping[str, Entry]) -> str:
    """The section of a task: its figure and a row for every method."""
    adamw = of_task.get("AdamW")
    time = adamw.seconds if adamw else math.nan
    columns = ["method", "lr", "seeds", "lowest loss", "range", "last loss", task.validation, "CPU seconds"]
    if adamw:
        columns += ["to AdamW's loss: steps", "CPU seconds", f"loss after {time:.1f} CPU seconds"]
    rows = []
    for name, entry in of_task.items():
        low, high = entry.range
        lr = "" if entry.lr is None else f"{entry.lr:g}{'†' if entry.at_edge else ''}"
        spread = f"{number(low)} to {number(high)}" if len(entry.runs) > 1 else ""
        row = [name, lr, str(len(entry.runs)), number(entry.loss), spread]
        row += [number(entry.last), number(entry.validation)]
        row.append(f"{entry.seconds:.1f}")
        if adamw:
            steps, seconds = entry.reached(adamw.loss)
            of_time = [f"{seconds:.1f}" if math.isfinite(seconds) else "-", number(entry.loss_at(time))]
            row += [whole(steps), *(of_time if entry.commits == adamw.commits else ["", ""])]
        rows.append(row)
    sections = [f"## {task.name}\n", f"{task.title}.\n", f"![{task.name}]({FIGURES}/{task.name}.png)\n"]
    sections.append(table(columns, rows))
    if any("†" in row[1] for row in rows):
        sections.append("† the best rate is the lowest or the highest that was tried.\n")
    return "\n".join(sections)
