"""The arguments of KFAC come from its options: their signature, their help, and their types at a user's call."""

import inspect
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.options import KFACOptions


def test_the_signature_is_that_of_the_options() -> None:
    parameters = inspect.signature(KFAC).parameters
    defaults = {
        field.name: inspect.Parameter.empty if field.default is MISSING else field.default
        for field in fields(KFACOptions)
    }
    assert {name: parameter.default for name, parameter in parameters.items()} == defaults
    assert list(parameters) == list(defaults)
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["net", "lr"]
    assert {parameter.kind for name, parameter in parameters.items() if name not in positional} == {
        inspect.Parameter.KEYWORD_ONLY
    }


def test_the_signature_shows_types_without_checks() -> None:
    text = str(inspect.signature(KFAC))
    assert (
        "lr: float | torch.Tensor | None = None, *, damping: float | torch.Tensor | None = None, momentum: float"
        in text
    )
    assert "Annotated" not in text
    assert not any(isinstance(parameter.annotation, str) for parameter in inspect.signature(KFAC).parameters.values())


def test_help_documents_every_option_in_the_order_of_the_signature() -> None:
    text = inspect.getdoc(KFAC.__init__) or ""
    listed = re.findall(r"^    (\w+(?:, \w+)*): ", text, re.MULTILINE)
    documented = [name for names in listed for name in names.split(", ") if name != "ValueError"]
    assert documented == list(inspect.signature(KFAC).parameters)


def test_a_missing_or_unknown_option_is_told_of_kfac() -> None:
    net = compile(nn.Linear(3, 2), loss="categorical")
    with pytest.raises(TypeError, match=r"^KFAC\.__init__\(\) missing 1 required positional argument: 'net'"):
        KFAC(lr=0.1)  # type: ignore[call-arg]
    unknown = (
        r"^KFAC\.__init__\(\) got an unexpected keyword argument 'dampening', 'betas'\. Did you mean 'damping'\? Write "
        r"momentum=\.\.\. and second_moment_decay=\.\.\. instead of betas\.$"
    )
    with pytest.raises(TypeError, match=unknown):
        KFAC(net, lr=0.1, dampening=0.5, betas=(0.9, 0.99))  # type: ignore[call-arg]


CALLS = """
import torch
from torch import nn
import kfac_fx
net = kfac_fx.compile(nn.Linear(3, 2), loss="categorical")
right = kfac_fx.KFAC(net, 0.1, damping=torch.ones(()), momentum=None, first_order={"lr": 1e-3}, seed=1, params=[])
right = kfac_fx.KFAC(net=net, damping=1.0, lr=None)
kfac_fx.KFAC()
kfac_fx.KFAC(net, damping="1")
kfac_fx.KFAC(net, damping=1.0, dampening=0.5)
number: int = right
"""


def test_a_type_checker_knows_the_arguments_at_a_user_s_call(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(CALLS)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", root / "pyproject.toml", tmp_path / "user.py"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    errors = re.findall(r"user\.py:(\d+): error: (.*)  \[([\w-]+)\]", output)
    assert [(int(line), code) for line, _, code in errors] == [
        (8, "call-arg"),
        (9, "arg-type"),
        (10, "call-arg"),
        (11, "assignment"),
    ]
    texts = [text for _, text, _ in errors]
    assert texts[0] == 'Missing positional argument "net" in call to "KFAC"'
    assert texts[1] == 'Argument "damping" to "KFAC" has incompatible type "str"; expected "float | Tensor | None"'
