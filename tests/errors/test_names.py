"""A name at the top level of a module has one meaning in its room, and a loop variable says what it holds."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.errors.test_floors import SOURCES, place

FILLERS = {"one", "own", "found", "made", "said", "each", "thing", "what", "it", "stuff", "they"}
ROOT, USERS = Path(__file__).parents[2], ("tests", "benchmarks", "examples")
IN_EVERY = {"EXAMPLES": "every parametrization has its own", "_": "a registration of a substitute, which nobody calls"}


def room(module: str) -> str:
    return "passes" if module.startswith("passes.") else place(module)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for name, path in SOURCES.items():
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def top_level_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and variables, without the dunders of the language and the parameters of generic types."""
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec" | "TypeVarTuple"))):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_a_top_level_name_has_one_meaning_in_its_room() -> None:
    modules: dict[tuple[str, str], set[str]] = defaultdict(set)
    for module, tree in trees():
        for name in top_level_names(tree):
            if not name.startswith("__") and name not in IN_EVERY:
                modules[room(module), name].add(module)
    assert {name: sorted(places) for name, places in modules.items() if len(places) > 1} == {}


def test_a_loop_variable_says_what_it_holds() -> None:
    paths = [*SOURCES.values(), *(path for folder in USERS for path in (ROOT / folder).rglob("*.py"))]
    assert [
        f"{path.relative_to(ROOT)}:{target.lineno}: {target.id}"
        for path in paths
        for tree in [ast.parse(path.read_text(encoding="utf-8"))]
        for loop in ast.walk(tree)
        if isinstance(loop, (ast.For, ast.comprehension))
        for target in ast.walk(loop.target)
        if isinstance(target, ast.Name) and target.id in FILLERS
    ] == []
