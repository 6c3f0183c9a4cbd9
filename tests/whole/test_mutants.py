"""`benchmarks.mutants` changes one expression at a time, and finds it again when files have moved."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutants import Mutant

SOURCE = """class Box:
    def holds(self, x: int | None = None) -> bool:
        big: int = 3
        if x is None:
            raise ValueError("no" + "thing")
        elif x == 7:
            return not big
        return x < big and True
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "kfac_fx").mkdir()
    (tmp_path / "kfac_fx" / "box.py").write_text(SOURCE)
    return tmp_path


def changed(checkout: Path, mutant: Mutant) -> str:
    place = mutant.place(checkout)
    assert place is not None
    before = place[0].read_text()
    mutant.write(*place)
    after = place[0].read_text()
    place[0].write_text(before)
    compile(after, "box.py", "exec")
    return next(line.strip() for line, old in zip(after.splitlines(), before.splitlines(), strict=True) if line != old)


def test_every_expression_of_a_line_is_changed_but_types_and_errors(checkout: Path) -> None:
    assert {changed(checkout, mutant) for mutant in mutants.candidates(checkout)} == {
        "big: int = (3 + 1)",
        "if (not (x is None)):",
        "if (x is not None):",
        "elif (not (x == 7)):",
        "elif (x != 7):",
        "elif x == (7 + 1):",
        "return (bool(big))",
        "return ((x < big) or (True))",
        "return (x <= big) and True",
        "return x < big and (False)",
    }


def test_a_mutant_is_found_again_in_another_file_and_is_gone_with_its_line(checkout: Path) -> None:
    mutant = next(mutants.candidates(checkout))
    (checkout / "kfac_fx" / "box.py").rename(checkout / "kfac_fx" / "chest.py")
    assert mutant.place(checkout) == (
        checkout / "kfac_fx" / "chest.py",
        SOURCE.splitlines().index(f"        {mutant.line}"),
    )
    (checkout / "kfac_fx" / "chest.py").write_text(SOURCE.replace(mutant.line, "pass"))
    assert mutant.place(checkout) is None


@pytest.mark.slow
def test_tests_are_run_on_mutants_that_they_reach_until_one_fails(checkout: Path) -> None:
    (checkout / "kfac_fx" / "__init__.py").write_text("")
    (checkout / "test_box.py").write_text(
        "from kfac_fx.box import Box\n"
        "def test_small():\n    assert Box().holds(2)\n"
        "def test_large():\n    assert Box().holds(9) in (True, False)\n"
        "def test_nothing():\n    pass\n"
    )
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    cuda\n")
    drawn = [
        mutant
        for mutant in mutants.candidates(checkout)
        if mutant.after in ("x <= big", "(x < big) or (True)", "False")
    ]
    probed = checkout.with_name("probed")
    shutil.copytree(checkout, probed)
    rows = list(mutants.killed([probed, checkout], drawn, 60, sys.executable))
    assert {drawn[row["number"]].after: row["verdict"] for row in rows} == {
        "x <= big": "survives",
        "(x < big) or (True)": "survives",
        "False": "killed",
    }
    assert all(row["tests"] == 2 for row in rows)


def test_the_first_stage_has_two_tests_of_every_file_and_the_second_the_quickest() -> None:
    seconds = {"a.py::1": 3.0, "a.py::2": 1.0, "a.py::3": 2.0, "a.py::4": 9.0, "b.py::1": 5.0}
    assert mutants.stages(list(seconds), seconds, 4.0) == [["a.py::2", "a.py::3", "b.py::1"], ["a.py::1"]]
