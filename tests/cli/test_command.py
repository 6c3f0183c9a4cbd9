"""The commands: their output, and a sentence and an exit status for everything that can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kfac_fx import cli
from kfac_fx.cli import command
from kfac_fx.cli.demo import refuse_unwritable
from kfac_fx.cli.problem import CommandError, part
from tests.cli.running import run


def test_the_report_names_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "report", "cli_models:linear", "--input", "4,5")
    assert status == 0 and err.startswith("kfac-fx report: no loss is named") and "--loss categorical" in err
    first = " ".join(out.split())
    assert first.startswith("kfac_fx takes factors from training gradients because it knows no loss, and registered 12")
    assert "{weight, bias}" in out


def test_a_report_with_a_loss_has_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "report", "cli_models:linear", "--input", "4,5", "--loss", "mse")[::2] == (0, "")


def test_a_module_that_exists_already_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "report", "cli_models:ready", "--input", "4,5")
    assert status == 0 and "12 of 12" in out


def test_inputs_come_in_order_and_with_their_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("report", "cli_models:Words", "--input", "2,16:int64", "--input", "2,4", "--format", "json")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert [row["layer"] for row in json.loads(out)["registrations"]] == ["embedding", "linear"]


@pytest.mark.parametrize(("name", "start"), [("html", "<!doctype html>"), ("dot", "digraph"), ("json", "{")])
def test_the_other_formats_are_complete_documents(name: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "report", "cli_models:linear", "--input", "4,5", "--format", name)
    assert status == 0 and out.startswith(start)


def test_a_model_that_refuses_its_input_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "report", "cli_models:picky", "--input", "4,6")
    assert status == 1 and out == ""
    assert "I only read five columns" in err and "Traceback" not in err


def test_the_command_runs_as_a_program_and_finds_models_in_the_working_folder() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    words = [sys.executable, "-m", "kfac_fx", "report", "cli_models:linear", "--input", "4,5"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "12 of 12" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("learn",), ("report",), ("explain", "cli_models:linear")])
def test_an_incomplete_command_line_shows_the_usage(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith("usage: kfac-fx")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["reprot", "cli_models:linear"],
            "there is no command 'reprot'. Did you mean 'report'? The commands are report,",
        ),
        (["learn"], "there is no command 'learn'. The commands are report, explain,"),
        (
            ["report", "cli_models:linear", "--inptu=4,5", "--sctrict"],
            "there is no argument '--inptu=4,5', '--sctrict'. Did you mean '--input'? Did you mean '--strict'?",
        ),
        (["report", "cli_models:linear", "--html"], "there is no argument '--html'. Write --format html."),
        (["report", "cli_models:linear", "--html", "r.html"], "'--html', 'r.html'. Write --format html.\n"),
        (["bench", "cli_models:linear", "--overhead", "-1"], "'-1' is no part such as 0.2 or 20%"),
        (["bench", "cli_models:linear", "--overhead", "20 percent"], "'20 percent' is no part such as 0.2 or 20%"),
    ],
)
def test_a_word_that_is_nearly_right_is_told(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith("usage: kfac-fx") and complaint in err


@pytest.mark.parametrize(("text", "value"), [("0.2", 0.2), ("20%", 0.2), ("0", 0.0)])
def test_a_part_may_be_in_percent(text: str, value: float) -> None:
    assert part(text) == pytest.approx(value)


def test_inputs_of_another_type_than_the_model_takes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", "4,5:int64")
    assert (
        status == 1
        and "Linear does not run on these inputs" in err
        and err.endswith("write x.float() of the inputs.\n")
    )


def test_an_interrupted_command_has_the_shells_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "read", interrupt)
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", "4,5")
    assert status == 130 and err == "kfac-fx report: interrupted\n"


def test_explain_tells_the_uses_the_block_and_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", "cli_models:linear", "weight", "--input", "4,5", "--loss", "normal")
    assert (status, err) == (0, "")
    assert out.startswith("weight: 2 x 5, float32") and "linear, as weight" in out


def test_passes_shows_the_capture_and_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "passes", "cli_models:linear", "--input", "4,5")
    assert status == 0 and all(f"--- {name} -" in out for name in ("capture", "normalize", "match", "check"))


def test_bench_shows_every_method_and_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--input", "4,5", "--loss", "normal", "--rounds", "1", "--overhead", "1e6")
    status, out, _ = run(capsys, "bench", "cli_models:linear", *arguments)
    assert status == 0
    assert all(name in out for name in ("SGD", "AdamW", "K-FAC, plain", "K-FAC, with statistics"))
    assert "cov_update_every=1, invert_every=1" in out


def test_strict_fails_for_a_generic_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:Lonely", "--input", "4,5", "--strict")
    assert status == 1 and "no structured Fisher block" in err
    assert err.rstrip().endswith("Here: leave --strict out, or name a declared layer with --layer FILE:NAME.")


def test_a_wrong_loss_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", "4,5", "--loss", "categorial")
    assert status == 1 and "Did you mean 'categorical'?" in err


def test_a_mode_is_set_before_the_capture(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, mode in (("--train-mode", "training"), ("--eval-mode", "evaluation")):
        of_model = "cli_models:OnlyIn", "--arg", f"mode={mode}", "--input", "4,5", "--loss", "mse"
        status, _, err = run(capsys, "report", *of_model, flag)
        assert (status, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("demo", "--seed", str(2**70)), "is not a whole number from -2**63 and below 2**64"),
        (("demo", "--seed", "a"), "'a' is not a whole number from -2**63 and below 2**64"),
        (("demo", "--device", "meta"), "the meta device has no values to train"),
        (("demo", "--png", "."), "'.' is a folder: name a file in it"),
        (("demo", "--json", "."), "'.' is a folder: name a file in it"),
        (("bench", "torch.nn:Tanh", "--input", "2,3"), "the model has no trained parameters"),
    ],
)
def test_what_cannot_be_trained_or_written_is_refused_before(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status != 0 and out == "" and text in err and "Traceback" not in err


def test_a_folder_that_is_not_there_is_said_before() -> None:
    with pytest.raises(CommandError, match="^there is no folder 'nowhere' to write runs.json into$"):
        refuse_unwritable(Path("nowhere/runs.json"))
