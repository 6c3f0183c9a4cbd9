"""The results of the demo's runs: the mark, the data, the sentence and the table."""

import io
import math

from rich.console import Console

from kfac_fx.cli.demo import METHODS, SETTINGS, Point, Run, mark, results, results_table, verdict


def run_of(method: str, *losses: float) -> Run:
    """A look every 10 steps, each step a tenth of a second."""
    return Run(method, {}, tuple(Point(10 * n, float(n), loss) for n, loss in enumerate(losses)))


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
    expected = "in 20 steps and 2.0 s; AdamW took 10 steps and 1.0 s. These are 2.00 of its steps and 2.00 of its time."
    assert verdict("toy", runs).endswith(expected)


def test_an_adamw_that_was_best_before_its_first_step_is_no_measure() -> None:
    runs = {"adamw": run_of("adamw", 1, 2), "kfac": run_of("kfac", 3, 1)}
    sentence = "K-FAC reached AdamW's best loss in 10 steps and 1.0 s; AdamW took 0 steps and 0.0 s."
    assert verdict("toy", runs) == f"toy: {sentence}"


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
    assert "…" not in shown and "\nAdamW: lr 0.01, weight_decay 0.01" in shown and "\nK-FAC: no settings" in shown
