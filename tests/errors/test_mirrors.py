"""Test files mirror modules: a failure says by its file where to look.

The file of `passes/cut.py` is `test_cut.py`. Modules of one name in several folders have the folder in the name:
`test_taps_rows.py`. More words name one side of a module, as in `test_proof_memory.py`, or of a folder, as in
`test_layer_collection_reuse.py`. Files in `tests/whole` test the library as users call it; other names are free there.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.errors.test_floors import ROOT, SOURCES

OF_MODULES = ("cli", "compiler", "runtime")  # the folders of tests whose files all bear the name of a module
FOLDERS = (*OF_MODULES, "errors", "whole")

ELSEWHERE = {
    "kfac_fx.optim.padded_kernels": "tests/cuda/test_padded_step_on_cuda.py runs them, which need a GPU",
    "kfac_fx.recording.emitted_submodules": "test_recording_emitted.py runs both, which have one protocol",
}


def has_logic(path: Path) -> bool:
    """Whether the module computes anything. One that imports or lists, and the front of a folder, do not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = any(isinstance(node, (ast.FunctionDef, ast.Lambda)) for node in ast.walk(tree))
    return functions and path.name != "__init__.py"


def names_of(module: str, modules: list[str]) -> set[str]:
    """The names that the test file of a module may have, without the ending."""
    *_, folder, name = module.split(".")
    unique = sum(other.split(".")[-1] == name for other in modules) == 1
    return {f"test_{folder}_{name}", *([f"test_{name}"] if unique or top_level(module) else [])}


def top_level(module: str) -> bool:
    return module.count(".") == 1


MODULES = [module for module, path in SOURCES.items() if path.name != "__init__.py"]
TESTS = {path.stem: path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))}


def without_test(modules: list[str], tests: set[str]) -> list[str]:
    return [module for module in modules if not names_of(module, modules) & tests]


def without_module(tests: set[str], modules: list[str]) -> list[str]:
    known = set().union(*(names_of(module, modules) for module in modules))
    known |= {f"test_{module.split('.')[-2]}" for module in modules if not top_level(module)}
    return [test for test in sorted(tests) if not any(test == name or test.startswith(f"{name}_") for name in known)]


def test_every_module_with_logic_has_a_test_file() -> None:
    missing = without_test(MODULES, set(TESTS))
    assert [module for module in missing if has_logic(SOURCES[module]) and module not in ELSEWHERE] == []


def test_the_list_of_exceptions_is_needed() -> None:
    assert set(ELSEWHERE) <= set(without_test(MODULES, set(TESTS)))


def test_no_test_file_outlives_its_module() -> None:
    of_modules = {name for name, path in TESTS.items() if path.parent.name in OF_MODULES}
    assert without_module(of_modules, MODULES) == []


@pytest.mark.parametrize(
    ("tests", "modules", "tests_left"),
    [
        ({"test_cut"}, [], []),
        ({"test_passes_cut"}, [], []),
        ({"test_cut_again"}, ["passes.cut"], []),  # a side of it is not all of it
        ({"test_other"}, ["passes.cut"], ["test_other"]),
    ],
)
def test_a_module_is_found_by_its_own_name(tests: set[str], modules: list[str], tests_left: list[str]) -> None:
    assert without_test(["passes.cut"], tests) == modules
    assert without_module(tests, ["passes.cut"]) == tests_left


def test_modules_of_one_name_are_told_by_their_folders() -> None:
    both = ["kfac_fx.report.rows", "kfac_fx.taps.rows"]
    assert without_test(both, {"test_rows"}) == both and without_module({"test_rows"}, both) == ["test_rows"]
    assert without_test(both, {"test_report_rows", "test_taps_rows"}) == []
    assert without_test(["passes.link", "kfac_fx.taps.link"], {"test_link"}) == ["kfac_fx.taps.link"]
