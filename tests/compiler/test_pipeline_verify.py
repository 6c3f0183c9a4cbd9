"""Every sentence of the grammar, broken once. The error says that this is our fault, and names the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx, nn

from kfac_fx.passes.ir import Bound, Program, Registration, Use
from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.pipeline import run, verify
from tests.compiler.toy import before

STRANGER = fx.Graph().placeholder("stranger")


def program() -> Program:
    return run(before("check", nn.Linear(3, 2)), ())


def with_use(change: Callable[[Use], Use]) -> Program:
    given = program()
    (one,) = given.registrations
    return given.but(matches=(change(one.uses[0]),), registrations=())


def with_registration(**changes: Any) -> Program:
    given = program()
    return given.but(registrations=(replace(given.registrations[0], **changes),))


def bound_to(name: str, shape: tuple[int, ...]) -> Callable[[Use], Use]:
    return lambda use: replace(use, parameters={"weight": Bound(name, Layout(shape), Layout(shape))})


GENERIC = Registration("generic", None, ("weight",), (), "diagonal")

BROKEN: list[tuple[Program, str]] = [
    (with_registration(parameters=("wight",)), "match registered wight, no parameter of the model"),
    (program().but(registrations=(GENERIC, GENERIC)), "match registered weight twice"),
    (with_registration(uses=()), r"match left linear\(weight, bias\) with the wrong number of uses"),
    (program().but(unused=("bias",)), "match calls bias unused and registered it"),
    (program().but(outputs=(STRANGER,)), "match left the output stranger behind"),
    (with_use(lambda use: replace(use, layer="linaer")), "match left a use of the unknown layer linaer"),
    (
        with_use(lambda use: replace(use, input=STRANGER)),
        r"match left linear\(weight, bias\) without its input stranger",
    ),
    (
        with_use(lambda use: replace(use, output=STRANGER)),
        r"match left linear\(weight, bias\) without its output stranger",
    ),
    (with_use(lambda use: replace(use, parameters={})), "match left linear at linear without parameters"),
    (with_use(bound_to("wight", (2, 3))), "match bound wight, no parameter of the model"),
    (with_use(bound_to("weight", (3, 2))), r"match lays out weight from \(3, 2\), it is \(2, 3\)"),
]


@pytest.mark.parametrize(("broken", "text"), BROKEN, ids=[text.replace("\\", "") for _, text in BROKEN])
def test_what_breaks_the_grammar_is_named_with_its_pass(broken: Program, text: str) -> None:
    with pytest.raises(AssertionError, match=f"bug in kfac_fx: {text}"):
        verify(broken, after="match")


def test_what_is_well_formed_is_returned() -> None:
    given = program()
    assert verify(given, after="match") is given
