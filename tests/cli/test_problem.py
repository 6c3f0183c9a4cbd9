"""`kfac_fx.cli.problem`: models and inputs as the command line names them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from kfac_fx.cli.problem import CommandError, Problem, example_input, inputs_of, load, named_value, refuse_ignored
from tests.cli.running import run


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("cli_models", 2, "'cli_models' does not name a model: write it as package.module:Net"),
        (":linear", 2, "does not name a model"),
        ("./mods:ok", 2, "'./mods' is no name of a module: write ./mods.py:ok for a file"),
        ("cli_nowhere:linear", 2, "there is no module 'cli_nowhere'"),
        ("cli_nowhere.deeper:linear", 2, "there is no module 'cli_nowhere'"),
        ("torch.nowhere:linear", 2, "there is no module 'torch.nowhere'"),
        ("cli_models:liner", 2, "module 'cli_models' has no 'liner'. Did you mean 'linear'?"),
        ("cli_models:linear(4)", 2, "has no 'linear(4)'. Write the model's arguments as --arg NAME=VALUE."),
        ("torch.nn:Linear", 1, "'in_features' and 'out_features'. Write the model's arguments as --arg NAME=VALUE."),
        ("cli_models:number", 2, "cli_models:number is of type int, not a callable that builds a model"),
        ("cli_models.py", 2, "'cli_models.py' is a file: name the model in it, as in cli_models.py:Net"),
        ("nowhere.py:Net", 2, "there is no file 'nowhere.py'"),
        ("cli_broken.py:Net", 1, "running cli_broken.py failed: ZeroDivisionError: division by zero"),
        ("transformers/Nothing", 2, "there is no module 'transformers': pip install transformers"),
        ("cli_models:text", 2, "cli_models:text() returned something of type str, not an nn.Module"),
        ("cli_models:broken", 1, "cli_models:broken() failed: OSError: no such checkpoint"),
        ("cli_broken:linear", 1, "importing cli_broken failed: ZeroDivisionError: division by zero"),
        ("cli_needs:linear", 1, "importing cli_needs failed: No module named 'a_package_nobody_has'"),
    ],
)
def test_a_wrong_model_is_said_in_one_line(
    model: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, "report", model, "--input", "4,5")
    assert found == status and out == ""
    assert err.startswith("kfac-fx report: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("2,x", "'2,x' is not a shape: write sizes as in 2,3,224,224"),
        ("", "'' is not a shape"),
        ("2,0", "'2,0' has a size below 1"),
        ("1000000,1000000", "no tensor '1000000,1000000' can be made: "),
        ("2,3:quint8", "no tensor '2,3:quint8' can be made: "),
        ("2,3:flaot32", "'flaot32' is not a dtype of torch. Did you mean 'float32'?"),
        ("2,3:nn", "'nn' is not a dtype of torch"),
        ("2,3:float32:9", "does not end in a bound for integers, as in 2,16:int64:1000"),
        ("2,3:int64:0", "does not end in a bound for integers"),
        ("a b=2,3", "'a b' is not the name of an argument"),
    ],
)
def test_a_wrong_input_says_what_to_write(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", "--input", text)
    assert status == 2 and complaint in err


@pytest.mark.parametrize(
    "model",
    [("torch.nn:Embedding", "--arg", "num_embeddings=5", "--arg", "embedding_dim=3"), ("cli_models:Table",)],
)
def test_ids_with_a_fraction_are_told_how_whole_numbers_are_written(
    model: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "report", *model, "--input", "2,4")
    assert status == 1
    assert err.endswith("\nIds are whole numbers: write --input 2,16:int64:1000 for random ones below 1000.\n")


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("2,3", (2, 3), torch.float32),
        ("7:int64", (7,), torch.int64),
        ("2,2:bool", (2, 2), torch.bool),
        ("3:bfloat16", (3,), torch.bfloat16),
        ("3:complex64", (3,), torch.complex64),
    ],
)
def test_example_inputs_have_the_shape_and_the_dtype(text: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    name, made = example_input(text)
    assert name is None and made.shape == tuple(shape) and made.dtype == dtype
    assert bool(made.abs().sum() if dtype.is_floating_point or dtype.is_complex else not made.any())


def test_integers_are_random_below_a_bound_and_named_inputs_have_their_name() -> None:
    name, value = example_input("ids=50,20:int64:7")
    assert name == "ids" and set(value.unique().tolist()) == set(range(7))


def test_a_file_is_run_with_its_folder_first_and_takes_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "cli_sizes.py").write_text("WIDTH = 3\n")
    (folder / "net.py").write_text(
        "from cli_sizes import WIDTH\nfrom torch import nn\ndef Net(deep=1):\n    return nn.Linear(WIDTH, deep)\n"
    )
    model = load(f"{folder}/net.py:Net", {"deep": 4})
    assert isinstance(model, nn.Linear) and model.weight.shape == (4, 3)


OWN = """
import torch
import kfac_fx
from torch import nn

class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.cosh(x) @ torch.sinh(self.w).diag()

@kfac_fx.layer(
    rows=lambda x, a: torch.cosh(x), grad_rows=lambda dy, a: dy, example=lambda: (Wave(), torch.randn(4, 6))
)
def wave(x, *, weight):
    return torch.cosh(x) @ torch.sinh(weight).diag()

print("read")
"""


@pytest.mark.filterwarnings("ignore:the layer .* is nowhere in the graph")
def test_a_declared_layer_comes_from_the_file_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cli_own.py").write_text(OWN)
    common = ("report", "cli_own.py:Wave", "--input", "4,6", "--loss", "normal")
    status, out, err = run(capsys, *common, "--layer", "cli_own.py:wave")
    assert (status, err) == (0, "") and "wave" in out and "nowhere in the graph" in " ".join(out.split())
    assert out.count("read\n") == 1  # the file of the model and of the layer runs once
    for wrong in ("cli_own.py:Wave", "wave"):
        status, _, err = run(capsys, *common, "--layer", wrong)
        assert status == 2 and f"--layer {wrong}: write file.py:name, the name of a function below @kfac_fx" in err


HEADS = """
import torch
from torch import nn
from kfac_fx.losses import Categorical, Normal

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.first(x), self.second(x)

def both(outputs):
    return [Categorical(outputs[0]), Normal(outputs[1])]
"""


def test_a_loss_of_several_outputs_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cli_heads.py").write_text(HEADS)
    common = ("report", "cli_heads.py:Heads", "--input", "4,6", "--loss")
    status, out, err = run(capsys, *common, "cli_heads.py:both")
    assert (status, err) == (0, "") and "35 of 35 trainable parameters" in out
    status, _, err = run(capsys, *common, "categorical")
    assert status == 1 and err.endswith(
        "Here: --loss FILE:NAME, the name of such a function of the outputs in a file.\n"
    )
    status, _, err = run(capsys, *common, "cli_heads.py:torch")
    assert status == 2 and "write file.py:name, the name of a function of the model's outputs" in err


def test_a_model_that_exists_takes_no_arguments() -> None:
    with pytest.raises(CommandError, match="cli_models:ready is a model already, so it takes no --arg"):
        load("cli_models:ready", {"width": 3})


@pytest.mark.parametrize(
    ("text", "value"), [("a=3", 3), ("a=(1, 2)", (1, 2)), ("a=relu", "relu"), ("a=None", None), ("a=", "")]
)
def test_arguments_are_literals_or_text(text: str, value: object) -> None:
    assert named_value(text) == ("a", value)


@pytest.mark.parametrize("text", ["width", "=3", "a b=3"])
def test_an_argument_without_a_name_says_what_to_write(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", "--arg", text, "--input", "4,5")
    assert status == 2 and f"{text!r} is not NAME=VALUE, as in width=64" in err


def test_files_hold_inputs_by_order_or_by_name(tmp_path: Path) -> None:
    x, mask = torch.randn(4, 5), torch.ones(4)
    torch.save(x, tmp_path / "one.pt")
    torch.save((x, mask), tmp_path / "two.pt")
    torch.save({"x": x}, tmp_path / "named.pt")
    np.savez(tmp_path / "named.npz", x=x.numpy())
    np.savez(tmp_path / "two.npz", x.numpy(), mask.numpy())
    for file, count, names in (
        ("one.pt", 1, []),
        ("two.pt", 2, []),
        ("named.pt", 0, ["x"]),
        ("named.npz", 0, ["x"]),
        ("two.npz", 2, []),
    ):
        args, kwargs = inputs_of(tmp_path / file)
        assert len(args) == count and list(kwargs) == names, file
        torch.testing.assert_close(args[0] if args else kwargs["x"], x)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"x": nn.Linear(2, 2)}, tmp_path / "pickled.pt")
    with pytest.raises(CommandError, match="reading .*pickled.pt failed: UnpicklingError"):
        inputs_of(tmp_path / "pickled.pt")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "write --input 2,3,224,224 for every input, 2,16:int64:1000 for ids, or --inputs FILE"),
        (("--inputs", "nowhere.pt"), "there is no file 'nowhere.pt'"),
        (("--input", "4,5", "--inputs", "nowhere.pt"), "with --input or in the file of --inputs, not both"),
        (("--input", "x=4,5", "--input", "x=4,5"), "--input names x twice"),
    ],
)
def test_inputs_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "report", "cli_models:linear", *arguments)
    assert status == 2 and text in err


def test_an_argument_that_a_configuration_would_ignore_is_refused() -> None:
    class Config:
        attribute_map: ClassVar = {"hidden_size": "n_embd"}

        def __init__(self) -> None:
            self.n_embd, self._attn_implementation = 8, "eager"

    refuse_ignored(Config, {"n_embd": 4, "hidden_size": 4, "attn_implementation": "sdpa"})
    with pytest.raises(CommandError, match=r"^Config has no 'n_embed', 'width'\. Did you mean 'n_embd'\?$"):
        refuse_ignored(Config, {"n_embed": 4, "width": 2})


def test_a_colon_before_a_model_of_a_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    with pytest.raises(
        CommandError, match=r"^module 'timm' has no 'resnet18'\. A model of timm is written timm/resnet18\.$"
    ):
        load("timm:resnet18", {})


def test_models_of_libraries_are_found_by_name() -> None:
    pytest.importorskip("transformers")
    small = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    assert type(load("transformers/GPT2LMHeadModel", small)).__name__ == "GPT2LMHeadModel"
    with pytest.raises(CommandError, match="Did you mean 'GPT2LMHeadModel'"):
        load("transformers/GPT2LMHeadMode", {})


def test_a_configuration_of_no_class_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("transformers")
    library.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(architectures=None))
    monkeypatch.setitem(sys.modules, "transformers", library)
    with pytest.raises(CommandError, match=r"^the configuration in '.+' names no class under 'architectures'$"):
        load(f"transformers/{tmp_path}", {})


def test_a_problem_moves_with_all_its_inputs() -> None:
    tensor = torch.zeros(2)
    problem = Problem(nn.Linear(2, 1), (tensor, [tensor, 3]), {"mask": {"a": tensor}}, None, strict=False)
    moved = problem.on(torch.device("meta"))
    assert moved.args[0].is_meta and moved.args[1][0].is_meta and moved.args[1][1] == 3
    assert moved.kwargs["mask"]["a"].is_meta and next(moved.model.parameters()).is_meta
    assert not problem.args[0].is_meta
