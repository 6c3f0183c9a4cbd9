"""The arguments of KFAC and of the rules: their signatures, their help, and their types at a user's call."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rules import RULES

MOST_OPTIONS = 20  # before those of the rule


def test_every_kfac_has_few_options_and_the_rest_are_those_of_its_rule() -> None:
    *shared, of_rule = inspect.signature(KFAC).parameters.values()
    assert of_rule.kind is of_rule.VAR_KEYWORD and len(shared) <= MOST_OPTIONS
    positional = [parameter.name for parameter in shared if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["net", "lr"]
    assert {parameter.kind for parameter in shared[2:]} == {of_rule.KEYWORD_ONLY}
    names = {parameter.name for parameter in shared}
    assert names - {"momentum_type"} == {option.name for option in fields(KFACOptions)} - {"because"}
    assert names.isdisjoint(option.name for rule in RULES.values() for option in fields(rule))


def documented(owner: Any) -> list[str]:
    """The names before a colon in the docstring, at the depth of arguments, in their order."""
    lines = (inspect.getdoc(owner) or "").splitlines()
    listed = [match[1] for line in lines if (match := re.match(r"    (\w+(?:, \w+)*): ", line))]
    return [name for names in listed for name in names.split(", ")]


def test_help_documents_every_option_in_the_order_of_the_signature() -> None:
    names = [name for name in documented(KFAC.__init__) if not name.endswith("Error")]
    assert names == list(inspect.signature(KFAC).parameters)


def test_a_missing_option_is_told_of_kfac() -> None:
    with pytest.raises(TypeError, match=r"^KFAC needs net: write KFAC\(net=\.\.\.\)\.$"):
        KFAC(lr=0.1)  # type: ignore[call-arg]
    net = compile(nn.Linear(3, 2), loss="categorical")
    with pytest.raises(
        TypeError, match=r"^KFAC takes net and lr, and got 3 arguments without names\. All other options"
    ):
        KFAC(net, 0.1, 0.1)  # type: ignore[misc]


def test_parameters_next_to_a_learning_rate_are_told_their_name() -> None:
    """As every optimizer of torch takes them: KFAC(net, net.parameters(), lr=1.0)."""
    net = compile(nn.Linear(3, 2), loss="categorical")
    with pytest.raises(TypeError) as error:
        KFAC(net, net.parameters(), lr=1.0)  # type: ignore[misc, arg-type]
    assert str(error.value) == (
        "KFAC got lr twice, as argument 2 and as lr=. If it is parameters, groups of parameters are an argument, "
        "KFAC(net, params=...), and all parameters of the net are trained without it."
    )


CALLS = """
import torch
from torch import nn
import kfac_fx
from kfac_fx.optim.rules import Adaptive, Regular
net = kfac_fx.compile(nn.Linear(3, 2), loss="categorical")
right = kfac_fx.KFAC(net, 0.1, damping=torch.ones(()), momentum=None, first_order={"lr": 1e-3}, seed=1, params=[])
right = kfac_fx.KFAC(net=net, lr=None, rule=Adaptive(damping=torch.ones(())), cov_update_every=None)
kfac_fx.KFAC()
kfac_fx.KFAC(net, weight_decay="1")
kfac_fx.KFAC(net, rule=Regular)
Regular(damping="1")
Regular(damping=1.0, dampening=0.5)
Regular(1.0)
number: int = right
"""


def test_a_type_checker_knows_the_arguments_at_a_user_s_call(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(CALLS)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", root / "pyproject.toml", tmp_path / "user.py"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    errors = re.findall(r"user\.py:(\d+): error: (.*)  \[([\w-]+)\]", output)
    assert [(int(line), code) for line, _, code in errors] == [
        (9, "call-arg"),
        (10, "arg-type"),
        (11, "arg-type"),
        (12, "arg-type"),
        (13, "call-arg"),
        (14, "call-arg"),
        (15, "assignment"),
    ]
    texts = [text for _, text, _ in errors]
    assert texts[0] == 'Missing positional argument "net" in call to "KFAC"'
    assert texts[1] == 'Argument "weight_decay" to "KFAC" has incompatible type "str"; expected "float"'
    assert texts[3] == 'Argument "damping" to "Regular" has incompatible type "str"; expected "float | Tensor | None"'
