"""Two commits next to each other: `python -m benchmarks.beside OLD NEW`.

Every round runs the benchmarks of both commits, each in a checkout and a process of its own. The two processes take
turns of `TURN` seconds: one is stopped while the other runs. Thus both commits meet the same load and the same clock
rate of the machine. A row is one CPU time of a benchmark: its medians over the rounds, and NEW's as a multiple of
OLD's. Rows that do not use the library (SGD, AdamW, a plain forward) show the noise of the comparison. The last row of
a benchmark is the sum of the others. A commit that does not have a benchmark yet runs the file of this tree.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.program import console, table, versions

OUT = Path(__file__).parent / "results" / "beside.json"
ROOT = Path(__file__).parents[1]
BENCHMARKS = {
    "step_time": ["--no-peers", "--rounds", "3"],
    "host_time": ["--rounds", "10"],
    "compile_time": [],
    "zoo_compile": [],
}
NAMES = ("model", "method")  # the keys that name an entry of a list
TIMES = ("milliseconds", "CPU seconds")  # the keys above the times; beside them stand counts and ratios
COUNTS = ("nodes", "parameters")
TURN = 0.1  # seconds


def times(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """The CPU times in a benchmark's results, each with the path to it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in COUNTS:
                yield from times(value, (*path, key))
    elif isinstance(tree, list):
        for entry in tree:
            names = [entry[name] for name in NAMES if name in entry]
            rest = {key: value for key, value in entry.items() if key not in NAMES}
            yield from times(rest, (*path, *names))
    elif isinstance(tree, int | float) and any(key in path for key in TIMES):
        yield ", ".join(key for key in path if key not in (*TIMES, "results")), float(tree)


def measured(checkouts: Sequence[Path], benchmark: str, options: Sequence[str], python: str) -> list[dict[str, float]]:
    """The times of one benchmark of every checkout, by name, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{number}.json") for number in range(len(checkouts))]
        commands = [
            [python, *program(checkout, benchmark), *options, "--out", str(path)]
            for checkout, path in zip(checkouts, results, strict=True)
        ]
        in_turns(dict(zip(checkouts, commands, strict=True)))
        measurements = [dict(times(json.loads(path.read_text()))) for path in results]
    return [{f"{benchmark}: {name}": value for name, value in by_name.items()} for by_name in measurements]


def program(checkout: Path, benchmark: str) -> list[str]:
    """Python's arguments that run a benchmark. Modules that it imports are those of the checkout."""
    if (checkout / "benchmarks" / f"{benchmark}.py").exists():
        return ["-m", f"benchmarks.{benchmark}"]
    path = str(ROOT / "benchmarks" / f"{benchmark}.py")
    return ["-c", f"import runpy; runpy.run_path({path!r}, run_name='__main__')"]


def in_turns(commands: Mapping[Path, Sequence[str]]) -> None:
    """Run the command of every checkout, one at a time, in turns of `TURN` seconds. CPU times leave out the time in
    which a process is stopped.

    Raises CalledProcessError if a command fails; then none goes on.
    """
    running = []
    try:
        for checkout, command in commands.items():
            environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
            process.send_signal(signal.SIGSTOP)
            running.append(process)
        while running:
            for process in list(running):
                process.send_signal(signal.SIGCONT)
                try:
                    status = process.wait(None if len(running) == 1 else TURN)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGSTOP)
                    continue
                running.remove(process)
                if status:
                    raise subprocess.CalledProcessError(status, process.args)
    finally:
        for process in running:
            process.kill()
            process.wait()


def compare(old: Path, new: Path, benchmarks: Sequence[str], rounds: int, python: str) -> list[dict[str, Any]]:
    """A row a time that both checkouts measure, and one for their sum."""
    seen: dict[Path, dict[str, list[float]]] = {tree: defaultdict(list) for tree in (old, new)}
    for _ in range(rounds):
        for benchmark in benchmarks:
            of_both = measured(list(seen), benchmark, BENCHMARKS[benchmark], python)
            for rows, measurement in zip(seen.values(), of_both, strict=True):
                for name, value in measurement.items():
                    rows[name].append(value)
    both = [name for name in seen[old] if name in seen[new]]
    medians = {name: (median(seen[old][name]), median(seen[new][name])) for name in both}
    for benchmark in benchmarks:
        rows_of_it = [times for name, times in medians.items() if name.startswith(f"{benchmark}: ")]
        medians[f"{benchmark}: sum of {len(rows_of_it)}"] = (
            sum(before for before, _ in rows_of_it),
            sum(after for _, after in rows_of_it),
        )
    return [
        {"time": name, "old": before, "new": after, "new / old": after / before}
        for name, (before, after) in medians.items()
        if before
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a commit")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the libraries of the models")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkouts = [Path(folder, name) for name in ("old", "new")]
        try:
            for checkout, commit in zip(checkouts, (chosen.old, chosen.new), strict=True):
                git("worktree", "add", "--detach", str(checkout), commit)
            rows = compare(*checkouts, chosen.benchmarks, chosen.rounds, chosen.python)
        finally:
            for checkout in checkouts:
                git("worktree", "remove", "--force", str(checkout), check=False)
    console().print(table(f"{chosen.new} compared with {chosen.old}: CPU times", rows))
    command = f"python -m benchmarks.beside {chosen.old} {chosen.new} --rounds {chosen.rounds}"
    chosen.out.write_text(json.dumps({"command": command, **versions(), "rows": rows}, indent=1) + "\n")


def git(*arguments: str, check: bool = True) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=check, capture_output=True)


if __name__ == "__main__":
    main()
