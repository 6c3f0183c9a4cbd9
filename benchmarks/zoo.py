"""Compile the models that people use: `python -m benchmarks.zoo`.

Every model is measured in a process of its own with a limit of time, so that one which hangs or crashes costs itself
only. Results are appended to `benchmarks/results/zoo.jsonl` as they come, and what was killed goes on where it was: a
model that is there already is skipped unless it is asked for `--again`, or by the `--status` or the `--commit` of its
last result. `--merge` adds the results of other files; `--write-docs` turns the results into `docs/zoo.md`.

The models need timm, torchvision, transformers, diffusers and peft; those of "papers" need torch alone. All weights are
random, so no file is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import platform
import re
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import kfac_fx
from benchmarks import zoo_measure
from benchmarks.zoo_docs import DOCS, write
from benchmarks.zoo_models.entry import Entry

PACKAGES = ("timm", "torchvision", "transformers", "diffusers", "peft")
LIBRARIES = (*PACKAGES, "papers")
OUT = Path(__file__).parent / "results" / "zoo.jsonl"
COLORS = {"works": "green", "wrong": "bold red"}


def entries(libraries: Sequence[str], pattern: str) -> list[Entry]:
    tables = [importlib.import_module(f"benchmarks.zoo_models.{library}") for library in libraries]
    for table in tables:
        table.load()
    found = [entry for table in tables for entry in table.ENTRIES if re.search(pattern, entry.key)]
    return sorted(found, key=lambda entry: zlib.crc32(entry.key.encode()))  # so that a part stands for the whole


def versions() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False).stdout.strip()
    found = {"kfac_fx": commit or "unknown", "python": platform.python_version()}
    for name in ("torch", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "uninstalled"
    return found


def warm() -> None:
    """Make the imports of a process's first capture, once for all models."""
    kfac_fx.compile(nn.Linear(2, 2), (torch.zeros(3, 2),), loss="normal")


def child(entry: Entry, end: Connection) -> None:
    zoo_measure.quiet()
    end.send(zoo_measure.measure(entry))


def measured(todo: Sequence[Entry], jobs: int, limit: float) -> Iterator[dict[str, Any]]:
    """Results in the order in which they come, `jobs` models at a time."""
    context = multiprocessing.get_context("fork")  # the children have all libraries imported
    waiting = list(reversed(todo))
    running: dict[Connection, tuple[BaseProcess, Entry, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            entry = waiting.pop()
            mine, its = context.Pipe(duplex=False)
            started = context.Process(target=child, args=(entry, its))
            started.start()
            its.close()
            running[mine] = (started, entry, time.monotonic())
        wait(list(running), timeout=1.0)
        for end in [process for process in running if process.poll()]:
            process, entry, start = running.pop(end)
            try:
                result = end.recv()
            except EOFError:
                process.join()
                result = lost(entry, "crashed", f"the process ended with {process.exitcode}")
            process.join()
            yield result | {"wall": round(time.monotonic() - start, 1)}
        for end, (process, entry, start) in list(running.items()):
            if time.monotonic() - start > limit:
                process.kill()
                process.join()
                del running[end]
                yield lost(entry, "too slow", f"not done after {limit:g} s")


def lost(entry: Entry, status: str, error: str) -> dict[str, Any]:
    return {"model": entry.key, "like": entry.like, "status": status, "error": error}


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of every model."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["model"]: line for line in lines}


def line(result: dict[str, Any]) -> str:
    status, elements = result["status"], result.get("elements")
    share = f"{elements['structured'] / elements['used']:8.3%}" if elements and elements["used"] else " " * 8
    said = result.get("error") or "; ".join(result.get("wrong", [])[:2])
    color = COLORS.get(status, "red")
    seconds = f"{result.get('seconds', 0.0):6.1f} s"
    return (
        f"[{color}]{status:<10}[/] {share} {seconds}  {result['model']:<44} {said.splitlines()[0][:90] if said else ''}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="only models of this library")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only models whose library/name matches")
    parser.add_argument("--status", action="append", help="only models whose last result was this")
    parser.add_argument("--commit", action="append", help="only models whose last result is of this commit of kfac_fx")
    parser.add_argument("--again", action="store_true", help="also those that have a result already")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a model")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="add the results of these files, the last counts, and stop"
    )
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.name} from the results, and stop")
    options = parser.parse_args(arguments)
    if options.merge:
        if missing := [str(path) for path in options.merge if not path.exists()]:
            parser.error(f"there are no results to merge in {', '.join(missing)}")
        tidy(options.out, *options.merge)
    if options.write_docs:
        write(results(options.out).values(), zoo_measure, "python -m benchmarks.zoo")
    if options.merge or options.write_docs:
        return
    torch.set_num_threads(1)
    zoo_measure.quiet()
    chosen = entries(options.library or LIBRARIES, options.only)
    todo = to_do(chosen, results(options.out), options.status, options.commit, again=options.again)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(todo)} of {len(chosen)} models")
    warm()
    origin = {"versions": versions(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for result in measured(todo, options.jobs, options.limit):
            console.print(line(result))
            file.write(json.dumps(result | origin) + "\n")
            file.flush()
    tidy(options.out)


def to_do(
    chosen: Sequence[Entry],
    known: Mapping[str, dict[str, Any]],
    statuses: Sequence[str] | None,
    commits: Sequence[str] | None,
    *,
    again: bool,
) -> list[Entry]:
    """The models without a result; all of them `again`; or those with a last result of these statuses and commits."""
    if not statuses and not commits:
        return [entry for entry in chosen if again or entry.key not in known]
    old = [entry for entry in chosen if entry.key in known]
    old = [entry for entry in old if not statuses or known[entry.key]["status"] in statuses]
    return [entry for entry in old if not commits or known[entry.key].get("versions", {}).get("kfac_fx") in commits]


def tidy(path: Path, *others: Path) -> None:
    """One line a model, in the order of their names; what the others say counts more."""
    latest = {name: line for file in (path, *others) for name, line in results(file).items()}
    text = "".join(json.dumps(latest[key]) + "\n" for key in sorted(latest))
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
