"""`kfac-fx demo` at small sizes, and the sweep behind its settings."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import sweep
from kfac_fx import cli
from kfac_fx.cli import demo
from kfac_fx.cli.demo import FEWER, METHODS, SETTINGS, Task, method_steps, tasks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both() -> dict[str, Task]:
    return {task.name: task for task in tasks(CPU)}


# --- the settings ---------------------------------------------------------------------------------------------------


def swept() -> dict[str, dict[str, dict[str, object]]]:
    return json.loads(sweep.OUT.read_text(encoding="utf-8"))


def test_the_demo_trains_with_what_the_sweep_chose() -> None:
    chosen = {task: {method: run["chosen"] for method, run in methods.items()} for task, methods in swept().items()}
    assert {task: {**methods, "kfac": {}} for task, methods in chosen.items()} == SETTINGS


def test_the_committed_sweep_is_that_of_the_code(both: dict[str, Task]) -> None:
    for task, methods in swept().items():
        for method, run in methods.items():
            assert run["grid"] == sweep.GRIDS[task][method]
            assert run["steps"] == method_steps(method, both[task].steps)


def test_every_method_has_the_same_number_of_settings_to_try() -> None:
    for task, methods in swept().items():
        tried = {method: [trial["settings"] for trial in run["trials"]] for method, run in methods.items()}
        assert tried == {method: list(sweep.settings(grid)) for method, grid in sweep.GRIDS[task].items()}
        assert len({len(run) for run in tried.values()}) == 1


def test_the_sweep_chose_the_lowest_loss() -> None:
    for methods in swept().values():
        for method in methods.values():
            losses = [trial["best_loss"] for trial in method["trials"]]
            assert method["chosen"] == method["trials"][losses.index(min(losses))]["settings"]


def test_the_sweep_writes_what_it_tried_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep.GRIDS, "deep plain network", {"sgd": {"lr": [0.1, 1e-9]}, "adamw": {"lr": [1e-3]}})
    path = tmp_path / "sub" / "sweep.json"
    common = ["--task", "deep plain network", "--steps", "10", "--out", str(path)]
    sweep.main([*common, "--method", "sgd"])
    sweep.main([*common, "--method", "adamw"])
    written = json.loads(path.read_text(encoding="utf-8"))
    sgd, adamw = (written["deep plain network"][method] for method in ("sgd", "adamw"))
    assert (sgd["chosen"], adamw["chosen"]) == ({"lr": 0.1}, {"lr": 1e-3})
    assert sgd["command"].endswith("--method sgd") and adamw["command"].endswith("--method adamw")
    assert sgd["versions"]["torch"] == torch.__version__


# --- what is printed and written ------------------------------------------------------------------------------------


def test_the_demo_prints_reports_and_tables_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    data, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    assert cli.main(["demo", "--steps", "20", "--no-progress", "--json", str(data), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())  # the console breaks the headline
    assert "in 8 Fisher blocks" in words and "13.{weight, bias}" in out
    assert "in 34 Fisher blocks" in words and "66.{weight, bias}" not in out  # 34 equal rows are not printed
    for title in METHODS.values():
        assert f"\n  {title} " in out
    written = json.loads(data.read_text(encoding="utf-8"))
    assert list(written) == ["autoencoder", "deep plain network"]
    for methods in written.values():
        assert list(methods) == list(METHODS)
        for method, run in methods.items():
            assert {"best_loss", "steps", "seconds"} <= run.keys()
            assert run["steps"] <= method_steps(method, 20) == (20 // FEWER if method == "kfac" else 20)
        assert {"steps_to_adamw_best", "seconds_to_adamw_best"} <= methods["kfac"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_quick_demo_says_that_it_ran_and_compares_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(demo, "QUICK", 10_000)
    assert cli.main(["demo", "--quick", "--no-progress"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "All methods ran, 1/10000 of their steps: too few to compare them. `kfac-fx demo` takes all." in out
    assert "did not reach" not in out and "reached AdamW's best loss in" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "'0' is not a whole number above 0"),
        (["--steps", "many"], "'many' is not a whole number above 0"),
        (["--device", "abacus"], "no device 'abacus'"),
        (["--quick", "--steps", "5"], "not allowed with argument --quick"),
    ],
)
def test_an_impossible_option_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", *arguments])
    assert end.value.code == 2 and complaint in capsys.readouterr().err


def test_a_missing_folder_is_said_before_the_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["demo", "--png", str(tmp_path / "nowhere" / "demo.png")]) == 2
    assert "there is no folder" in (err := capsys.readouterr().err) and "to write demo.png into" in err


def test_missing_packages_are_said_with_the_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NEEDED", {"torch": "torch", "a_package_nobody_has": "nothing"})
    assert cli.main(["demo"]) == 1
    assert "needs nothing: pip install 'kfac_fx[demo]'" in capsys.readouterr().err
