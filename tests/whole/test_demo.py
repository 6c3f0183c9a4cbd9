"""`kfac-fx demo` at small sizes, and the sweep behind its settings."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import sweep
from kfac_fx import cli, demo
from kfac_fx.demo.results import mark, results, results_table, verdict
from kfac_fx.demo.tasks import FEWER, METHODS, SETTINGS, Task, method_steps, tasks
from kfac_fx.demo.training import Point, Run, one_thread, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both() -> dict[str, Task]:
    return {task.name: task for task in tasks(CPU)}


def run_of(method: str, *losses: float) -> Run:
    """A look every 10 steps, each step a tenth of a second."""
    return Run(method, {}, tuple(Point(10 * n, float(n), loss) for n, loss in enumerate(losses)))


# --- the settings ---------------------------------------------------------------------------------------------------


def swept() -> dict[str, dict[str, dict[str, object]]]:
    return json.loads(sweep.OUT.read_text(encoding="utf-8"))


def test_the_demo_trains_with_what_the_sweep_chose() -> None:
    chosen = {task: {method: found["chosen"] for method, found in each.items()} for task, each in swept().items()}
    assert chosen == SETTINGS


def test_the_committed_sweep_is_that_of_the_code(both: dict[str, Task]) -> None:
    for task, each in swept().items():
        for method, found in each.items():
            assert found["grid"] == sweep.GRIDS[task][method]
            assert found["steps"] == method_steps(method, both[task].steps)


def test_every_method_has_the_same_number_of_settings_to_try() -> None:
    for task, each in swept().items():
        tried = {method: [trial["settings"] for trial in found["trials"]] for method, found in each.items()}
        assert tried == {method: list(sweep.settings(grid)) for method, grid in sweep.GRIDS[task].items()}
        assert len({len(one) for one in tried.values()}) == 1


def test_the_sweep_chose_the_lowest_loss() -> None:
    for each in swept().values():
        for found in each.values():
            losses = [trial["best_loss"] for trial in found["trials"]]
            assert found["chosen"] == found["trials"][losses.index(min(losses))]["settings"]


def test_the_sweep_writes_what_it_tried_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep.GRIDS, "classifier", {"sgd": {"lr": [0.1, 1e-9]}, "adamw": {"lr": [1e-3]}})
    path = tmp_path / "sub" / "sweep.json"
    common = ["--task", "classifier", "--steps", "10", "--out", str(path)]
    sweep.main([*common, "--method", "sgd"])
    sweep.main([*common, "--method", "adamw"])
    written = json.loads(path.read_text(encoding="utf-8"))
    sgd, adamw = written["classifier"]["sgd"], written["classifier"]["adamw"]
    assert (sgd["chosen"], adamw["chosen"]) == ({"lr": 0.1}, {"lr": 1e-3})
    assert sgd["command"].endswith("--method sgd") and adamw["command"].endswith("--method adamw")
    assert sgd["versions"]["torch"] == torch.__version__


# --- the tasks ------------------------------------------------------------------------------------------------------


def test_the_methods_share_start_and_batches(both: dict[str, Task]) -> None:
    for task in both.values():
        first, second = task.model(3), task.model(3)
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other)
        for (x, y), (again, same), _ in zip(task.batches(4), task.batches(4), range(5), strict=False):
            assert torch.equal(x, again) and torch.equal(y, same) and len(x) == task.batch


def test_an_epoch_shows_no_image_twice(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    numbered = Task(**{**vars(task), "inputs": torch.arange(1797), "targets": torch.arange(1797)})
    seen = [x for (x, _), _ in zip(numbered.batches(0), range(3), strict=False)]
    assert len(torch.cat(seen).unique()) == 3 * task.batch


def test_the_measured_loss_is_that_of_all_images(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    model = task.model(0)
    p, x = torch.sigmoid(model(task.inputs)).double(), task.inputs.double()
    expected = -(x * p.log() + (1 - x) * (1 - p).log()).sum(1).mean().item()
    assert task.measure(model) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_a_run_is_repeatable_and_looks_at_the_loss_on_schedule(both: dict[str, Task]) -> None:
    task, seen = both["classifier"], []
    runs = [
        train("adamw", task, task.model(0), {"lr": 1e-3}, steps=13, seed=2, listener=lambda *look: seen.append(look))
        for _ in range(2)
    ]
    assert [point.step for point in runs[0].points] == [0, 5, 10, 13]
    assert [point.loss for point in runs[0].points] == [point.loss for point in runs[1].points]
    assert seen[:3] == [(point.step, point.loss) for point in runs[0].points[1:]]
    assert all(a.seconds < b.seconds for a, b in zip(runs[0].points, runs[0].points[1:], strict=False))


def test_a_run_ends_where_the_loss_is_no_number(both: dict[str, Task]) -> None:
    task = both["autoencoder"]
    run = train("sgd", task, task.model(0), {"lr": math.inf}, steps=100, seed=0)
    assert run.final.step < 100 and not math.isfinite(run.final.loss)
    assert run.best == run.points[0]


def test_the_threads_are_afterwards_what_they_were() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# --- what is printed and written ------------------------------------------------------------------------------------


def test_the_mark_is_the_best_first_order_loss_and_kfac_is_compared_with_adamw() -> None:
    runs = {
        "sgd": run_of("sgd", 9, 4, 3),
        "adamw": run_of("adamw", 9, 2, 3),
        "kfac": run_of("kfac", 9, 3, 1.5),
    }
    assert mark(runs) == ("adamw", Point(10, 1.0, 2))
    found = results(runs)
    assert found["adamw"] == {"best_loss": 2, "steps": 10, "seconds": 1.0, "final_loss": 3, "settings": {}}
    assert (found["kfac"]["steps_to_adamw_best"], found["kfac"]["seconds_to_adamw_best"]) == (20, 2.0)
    assert "in 20 steps and 2.0 s; AdamW took 10 steps and 1.0 s" in verdict("toy", runs)


def test_a_mark_that_kfac_missed_is_none_and_said() -> None:
    runs = {"sgd": run_of("sgd", 9, 4), "adamw": run_of("adamw", 9, 2), "kfac": run_of("kfac", 9, math.nan)}
    found = results(runs)["kfac"]
    assert found["steps_to_adamw_best"] is None and found["seconds_to_adamw_best"] is None
    missed, passed = "in 10 steps and 1.0 s", "in 0 steps and 0.0 s"
    expected = f"toy: K-FAC did not reach AdamW's best loss {missed}; AdamW reached K-FAC's {passed}."
    assert verdict("toy", runs) == expected


def test_the_table_shows_every_setting_on_a_narrow_terminal() -> None:
    every = SETTINGS["autoencoder"]
    out = io.StringIO()
    console = Console(width=80, file=out)
    console.print(
        results_table("toy", {method: Run(method, every[method], run_of(method, 9, 2).points) for method in METHODS})
    )
    shown = out.getvalue()
    assert "…" not in shown and "\nK-FAC: damping 10, min_damping 1e-05, invert_every 5" in shown


def test_the_demo_prints_reports_and_tables_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    data, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    assert cli.main(["demo", "--steps", "20", "--no-progress", "--json", str(data), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("kfac_fx registered") == 2
    for layer in ("embedding", "conv2d", "depthwise", "group_norm", "linear"):
        assert layer in out
    for title in METHODS.values():
        assert f"\n  {title} " in out
    written = json.loads(data.read_text(encoding="utf-8"))
    assert list(written) == ["autoencoder", "classifier"]
    for each in written.values():
        assert list(each) == list(METHODS)
        for method, found in each.items():
            assert {"best_loss", "steps", "seconds"} <= found.keys()
            assert found["steps"] <= method_steps(method, 20) == (20 // FEWER if method == "kfac" else 20)
        assert {"steps_to_adamw_best", "seconds_to_adamw_best"} <= each["kfac"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "'0' is not a whole number above 0"),
        (["--steps", "many"], "'many' is not a whole number above 0"),
        (["--device", "abacus"], "no device 'abacus'"),
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
