"""Mutants: small changes of the library's code, drawn by seed, and whether a quick test fails for each.

    python -m benchmarks.mutants draw --number 100 --seed 35   the list, in results/mutants.json
    python -m benchmarks.mutants kill                          runs tests for each of the list

A mutant changes one expression: a comparison, an operator, a condition, a number. It is named by its function and the
text of its line, so the list outlives moves of files. `kill` runs the quick tests once with a probe in front of every
changed statement, which notes the tests that reach it. Then it runs these tests on each mutant, until one fails: first
two of every file, then the others, quickest first, for a minute. A mutant that survives may be killed by a slower test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.beside import git

LIST = Path(__file__).parent / "results" / "mutants.json"
FOLDERS = "kfac_fx", "passes"
ON_DEVICES = ("padded_kernels.py",)  # no test without a GPU runs them
SWAPS: Mapping[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.And: "or", ast.Or: "and", ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "*",
}  # fmt: skip
PLUGIN = """
import json, os
reached, seconds, current = {}, {}, [None]
def hit(number):
    reached.setdefault(number, set()).add(current[0])
def pytest_runtest_logstart(nodeid, location):
    current[0] = nodeid
def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        seconds[report.nodeid] = report.duration
def pytest_sessionfinish(session):
    folder, worker = os.environ["REACHED"], os.environ.get("PYTEST_XDIST_WORKER", "main")
    tests = {number: sorted(filter(None, tests)) for number, tests in reached.items()}
    with open(f"{folder}/{worker}.json", "w") as file:
        json.dump({"reached": tests, "seconds": seconds}, file)
"""
QUICK = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not cuda"]


@dataclass(frozen=True)
class Mutant:
    """path, function: where it was drawn. line: its text. column, end: the characters of it that `after` replaces."""

    path: str
    function: str
    line: str
    column: int
    end: int
    after: str

    def place(self, root: Path) -> tuple[Path, int] | None:
        """The file and the number, from 0, of the line now; None if no function of this name has the line."""
        wanted = self.function.split(".")[-2:]
        for path in sorted(modules(root), key=lambda path: str(path.relative_to(root)) != self.path):
            source = path.read_text(encoding="utf-8")
            if self.line not in source:
                continue
            lines = source.splitlines()
            for name, function in functions(ast.parse(source)):
                if name.split(".")[-len(wanted) :] == wanted:
                    for number in range(function.lineno - 1, function.end_lineno or function.lineno):
                        if lines[number].strip() == self.line:
                            return path, number
        return None

    def write(self, path: Path, number: int) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines[number] = f"{indent}{self.line[: self.column]}({self.after}){self.line[self.end :]}"
        path.write_text("\n".join(lines), encoding="utf-8")


def modules(root: Path) -> list[Path]:
    """The files of the library. The compiler's appear once, although a link shows them twice."""
    paths = (path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return sorted(path for path in paths if path.relative_to(root).parts[:2] != ("kfac_fx", "passes"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its full name, such as `Class.method`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        inner = f"{prefix}{child.name}." if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix
        yield from functions(child, inner)


def expressions(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, without functions inside it, types, and texts of errors."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.AnnAssign):
            waiting += [] if node.value is None else [node.value]
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def changes(node: ast.AST, source: str) -> Iterator[tuple[ast.expr, str]]:
    """(the expression to replace, its replacement)."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPS:
            yield node, f"{text(left)} {SWAPS[type(op)]} {text(right)}"
        case ast.BinOp(left=ast.Constant(value=str())):
            pass  # a text
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield node, f"({text(left)}) {SWAPS[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=values):
            yield node, f" {SWAPS[type(op)]} ".join(f"({text(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"bool({text(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, f"({text(orelse)}) if ({text(test)}) else ({text(body)})"
        case ast.If(test=test):
            yield test, f"not ({text(test)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, f"{value} + 1"


def candidates(root: Path) -> Iterator[Mutant]:
    """All mutants of expressions that lie on one line."""
    for path in modules(root):
        if path.name in ON_DEVICES:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for name, function in functions(ast.parse(source)):
            for node in expressions(function):
                for target, after in changes(node, source):
                    if target.lineno == target.end_lineno:
                        line = lines[target.lineno - 1]
                        indent = len(line) - len(line.lstrip())
                        column, end = (
                            len(line.encode()[:offset].decode()) - indent
                            for offset in (target.col_offset, target.end_col_offset or 0)
                        )
                        yield Mutant(str(path.relative_to(root)), name, line.strip(), column, end, after)


def write_probe(path: Path, line: int, number: int) -> None:
    """A call of the plugin's `hit` in front of the statement at a line, counted from 0."""
    lines = path.read_text(encoding="utf-8").split("\n")
    statements = [
        node
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.stmt) and node.lineno <= line + 1 <= (node.end_lineno or node.lineno)
    ]
    start = max(node.lineno for node in statements) - 1
    call, indent = f"__import__('reached_plugin').hit({number})", len(lines[start]) - len(lines[start].lstrip())
    if lines[start].lstrip().startswith("elif "):  # in front of it no statement may stand
        lines[start] = f"{' ' * indent}elif {call} or {lines[start].lstrip().removeprefix('elif ')}"
    else:
        lines.insert(start, " " * indent + call)
    path.write_text("\n".join(lines), encoding="utf-8")


def reached(checkout: Path, mutants: Sequence[Mutant], python: str) -> tuple[dict[int, list[str]], dict[str, float]]:
    """(the quick tests that reach each mutant, the seconds of each test that passes)."""
    for number, mutant in enumerate(mutants):
        if (place := mutant.place(checkout)) is not None:
            write_probe(*place, number)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reached_plugin.py").write_text(PLUGIN)
        environment = os.environ | {"PYTHONPATH": f".:{folder}", "OMP_NUM_THREADS": "1", "REACHED": folder}
        command = [python, *QUICK, "-n", "auto", "--dist", "loadfile", "-p", "reached_plugin"]
        subprocess.run(command, cwd=checkout, env=environment, check=False, stdout=subprocess.DEVNULL)
        runs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    seconds = {test: time for run in runs for test, time in run["seconds"].items()}
    tests = {
        number: sorted({test for run in runs for test in run["reached"].get(str(number), ()) if test in seconds})
        for number in range(len(mutants))
    }
    return tests, seconds


def stages(tests: Sequence[str], seconds: Mapping[str, float], limit: float) -> list[list[str]]:
    """Two tests of every file, and then the quickest others that take `limit` seconds together."""
    by_file: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: seconds[test]):
        by_file.setdefault(test.partition("::")[0], []).append(test)
    first = [test for of_file in by_file.values() for test in of_file[:2]]
    others, left = [], limit
    for test in sorted(set(tests) - set(first), key=lambda test: seconds[test]):
        left -= seconds[test]
        if left < 0:
            break
        others.append(test)
    return [first, others]


def killer(checkout: Path, tests: Sequence[str], limit: float, python: str) -> str | None:
    """The test that fails, or "timeout"; None if all pass."""
    arguments = checkout / "tests_of_a_mutant.txt"
    arguments.write_text("\n".join(tests) + "\n")
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, *QUICK, "-x", "--tb=no", f"@{arguments.name}"]
    try:
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "timeout"
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else None if run.returncode in (0, 5) else "a crash"


def killed(checkouts: Sequence[Path], mutants: Sequence[Mutant], limit: float, python: str) -> Iterator[dict[str, Any]]:
    """A row a mutant. checkouts: two of one commit, for probes and for mutants."""
    tests, seconds = reached(checkouts[0], mutants, python)
    for number, mutant in enumerate(mutants):
        place = mutant.place(checkouts[1])
        if place is None:
            yield {"number": number, "verdict": "gone"}
            continue
        path, line = place
        before = path.read_text(encoding="utf-8")
        mutant.write(path, line)
        runs = (killer(checkouts[1], stage, 60 + 5 * limit, python) for stage in stages(tests[number], seconds, limit))
        test = next((test for test in runs if test is not None), None)
        path.write_text(before, encoding="utf-8")
        verdict = "survives" if test is None else "killed"
        yield {"number": number, "verdict": verdict, "by": test, "tests": len(tests[number])}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["draw", "kill"])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for a mutant")
    parser.add_argument("--list", type=Path, default=LIST)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkouts = [Path(folder, name) for name in ("probes", "mutants")]
        try:
            for checkout in checkouts:
                git("worktree", "add", "--detach", str(checkout), chosen.commit)
            if chosen.action == "draw":
                drawn = random.Random(chosen.seed).sample(list(candidates(checkouts[0])), chosen.number)
                chosen.list.write_text(json.dumps([asdict(mutant) for mutant in drawn], indent=1) + "\n")
                return
            mutants = [Mutant(**row) for row in json.loads(chosen.list.read_text())]
            rows = []
            for row in killed(checkouts, mutants, chosen.limit, sys.executable):
                rows.append(row)
                print(json.dumps(row), flush=True)
            verdicts = [row["verdict"] for row in rows]
            print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("killed", "survives", "gone")))
        finally:
            for checkout in checkouts:
                git("worktree", "remove", "--force", str(checkout), check=False)


if __name__ == "__main__":
    main()
