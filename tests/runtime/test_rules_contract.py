"""Every update rule has checked options, a training and a checkpoint, whoever wrote it, and no part of the step asks
which rule it is."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kfac_fx
from kfac_fx.linalg.arguments import positive, whole_number
from kfac_fx.optim import rules
from kfac_fx.optim.checks import Check
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules import EVERY_RULE, RULES, BlockStep, CheckedRule, MeasuredMove, Outcome, Rule, Update
from kfac_fx.optim.rules.momentum import Regular
from tests.runtime.options_of import options_of
from tests.runtime.slow_kfac import batch, loss_of
from tests.runtime.test_options_signature import documented
from tests.runtime.toy_optimizers import assert_same, flat_state, made, train, values

PACKAGE = Path(kfac_fx.__file__).parent
OTHER_MEANINGS = {
    ("regular", "losses/declared.py"),
    ("regular", "compiled/layer_collection.py"),
}  # TF K-FAC's coeff_mode


# --- rules of a user --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Clipped(Rule):
    """Momentum whose updates are at most as long as the longest so far, times `growth`.

    Args:
        growth: the largest ratio to the longest update so far.
        every: the longest update falls by half every so many steps.
    """

    name: ClassVar[str] = "clipped"
    scalars: ClassVar[Mapping[str, float]] = {"longest": math.nan}
    relative_damping: Annotated[float, positive] = 0.1
    growth: Annotated[float, positive] = 2.0
    every: Annotated[int, whole_number(1, "steps")] = 100

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {**super().new_state(parameter), "total": torch.zeros_like(parameter)}

    def direction(self, step: BlockStep) -> Update:
        velocity = 0.5 * step.state["velocity"] + step.precondition(step.g)
        length, longest = velocity.norm(), step.scalars["longest"]
        most = torch.where(longest.isnan(), length, self.growth * longest)
        step.scalars["longest"].copy_(torch.fmax(0.5 ** (1 / self.every) * longest, length.clamp(max=most)))
        total = step.state["total"] + velocity.abs()
        update = velocity * (most / length).clamp(max=1.0) / (1 + 1e-3 * total)
        return Update(update, {"velocity": velocity, "total": total})


@dataclass(frozen=True, kw_only=True, eq=False)
class LineSearch(CheckedRule):
    """The gradient, as long as the exact Fisher of a batch says at a check."""

    name: ClassVar[str] = "line_search"
    scalars: ClassVar[Mapping[str, float]] = {"kept": 0.0, "undone": 0.0}
    relative_damping: Annotated[float, positive] = 0.1
    damping_adaptation_interval: Annotated[int, whole_number(1, "steps")] = 3

    def direction(self, step: BlockStep) -> Update:
        return Update(step.precondition(step.g), {"velocity": step.g})

    def move(self, step: BlockStep, update: Update) -> Tensor:
        return step.flat.displacement(update.vector, 1 / step.size.divisor)

    def measured_move(self, step: BlockStep, update: Update, check: Check) -> MeasuredMove:
        whole = step.flat.displacement(update.vector)
        fisher, slope, before = check.along(step.flat, whole)
        best = (-slope / fisher).clamp(0.01, 1.0)
        rise = 0.5 * check.value.abs()
        finite = fisher.isfinite()
        return MeasuredMove(best * whole, finite, best * slope, best.square() * fisher, before, rise, 1 / best)

    def checked_move(self, step: BlockStep, check: Check, measured: MeasuredMove, outcome: Outcome) -> None:
        step.scalars["kept"].add_(outcome.kept)

    def reverted(self, step: BlockStep, check: Check, risen: Tensor) -> None:
        step.scalars["undone"].add_(risen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Turned(Regular):
    """A rule of the library, changed in one method, and with another name."""

    name: ClassVar[str] = "turned"
    has_bases: ClassVar[bool] = True
    relative_damping: Annotated[float | None, positive] = 0.1

    def direction(self, step: BlockStep) -> Update:
        signs = step.to_bases(step.g).sign()
        return Update(0.1 * step.from_bases(signs), {"velocity": step.state["velocity"] + step.g})

    def whole_step(self, step: BlockStep) -> None:  # type: ignore[override]  # of the library's own program
        return None


LIBRARY: dict[str, dict[str, Any]] = {
    "adaptive": {"damping": 0.1, "damping_adaptation_interval": 3},
    "regular": {"damping": 0.1, "norm_constraint": 1e-2},
    "adam": {"damping": 0.1, "adapt_damping": True, "damping_adaptation_interval": 2},
    "qmodel": {"damping": 0.1},
    "qmodel_fixedmu": {"damping": 0.1, "momentum": 0.5},
    "eigen_moments": {"damping_adaptation_interval": 3},
}
MADE: dict[str, Rule] = {name: RULES[name](**options) for name, options in LIBRARY.items()}
MADE |= {rule.name: rule for rule in (Clipped(), LineSearch(), Turned())}


def of_rule(name: str, **options: Any) -> tuple[Any, KFAC]:
    rule = MADE[name]
    lr = None if rule.is_exact else 1.0 if rule.checked else 0.1
    return made(lr=lr, damping=None, rule=rule, **options)


# --- options ----------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_library_is_tested_here() -> None:
    assert LIBRARY.keys() == RULES.keys(), "add the rule to LIBRARY, with options of a short training"
    assert all(rule.name == name for name, rule in RULES.items())


def test_every_rule_in_a_module_of_rules_is_listed() -> None:
    modules = [import_module(f"{rules.__name__}.{module.name}") for module in pkgutil.iter_modules(rules.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    named = {kind for kind in found if issubclass(kind, Rule) and "name" in vars(kind)}
    assert named == set(EVERY_RULE), "add the class at the end of EVERY_RULE in kfac_fx/optim/rules/__init__.py"


@pytest.mark.parametrize("name", MADE)
def test_options_are_checked_fields(name: str) -> None:
    rule = type(MADE[name])
    annotations = get_type_hints(rule, include_extras=True)
    for option in fields(rule):
        assert all(callable(check) for check in annotations[option.name].__metadata__), option.name
        with pytest.raises(ValueError, match=rf"^{option.name} (is )?<object"):
            rule(**{**LIBRARY.get(name, {}), option.name: object()})


@pytest.mark.parametrize("name", RULES)
def test_options_are_documented_in_the_class_or_in_a_base_that_has_them(name: str) -> None:
    rule = RULES[name]
    names = {option for base in rule.__mro__ if base.__doc__ for option in documented(base)}
    options = {option.name for option in fields(rule)}
    assert options - names == set() and set(documented(rule)) <= options


@pytest.mark.parametrize("name", RULES)
def test_options_are_given_by_name_alone(name: str) -> None:
    parameters = inspect.signature(RULES[name]).parameters
    assert list(parameters) == [option.name for option in fields(RULES[name])]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_name_with_options_makes_the_same_rule(name: str) -> None:
    net, lr = made(damping=0.1)[0], None if MADE[name].is_exact else 0.1
    assert repr(options_of(net, lr, momentum_type=name.upper(), **LIBRARY[name]).rule) == repr(MADE[name])


def test_a_rule_without_its_methods_says_what_to_write() -> None:
    class Empty(Rule):
        name = "empty"
        relative_damping = 0.1

    class Unmeasured(CheckedRule):
        name = "unmeasured"
        relative_damping = 0.1

        def direction(self, step: BlockStep) -> Update:
            return Update(step.precondition(step.g))

    wanted: list[tuple[Rule, str]] = [
        (Empty(), r"Empty has no direction: write direction\(self, step\) -> Update"),
        (Unmeasured(), r"Unmeasured .* write measured_move\(self, step, update, check\) -> MeasuredMove"),
    ]
    for rule, text in wanted:
        net, opt = made(lr=0.1, damping=None, rule=rule)
        with pytest.raises(NotImplementedError, match=text):
            train(net, opt, range(1))


class WithoutState(Rule):
    name = "without state"
    relative_damping = 0.1

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}

    def direction(self, step: BlockStep) -> Update:
        return Update(step.g)


def test_a_rule_whose_methods_do_not_fit_says_what_to_write() -> None:
    class Bare(WithoutState):
        def direction(self, step: BlockStep) -> Update:
            return step.g  # type: ignore[return-value]

    class OtherState(WithoutState):
        def direction(self, step: BlockStep) -> Update:
            return Update(step.g, {"v": step.g})

    class WithoutBases(WithoutState):
        def direction(self, step: BlockStep) -> Update:
            return Update(step.from_bases(step.to_bases(step.g)))

    class WithoutExact(WithoutState):
        def direction(self, step: BlockStep) -> Update:
            return Update(step.g * step.exact_products([step.g]).sum())

    wanted: list[tuple[Rule, type[Exception], str]] = [
        (Bare(), TypeError, r"direction of Bare returns a Tensor: write return Update\(vector, state\)"),
        (OtherState(), ValueError, r"of OtherState returns a state with 'v', and OtherState\.new_state has none"),
        (WithoutExact(), ValueError, r"write is_exact: ClassVar\[bool\] = True in its class"),
        (WithoutBases(), ValueError, r"write has_bases: ClassVar\[bool\] = True in its class"),
    ]
    for rule, kind, text in wanted:
        net, opt = made(lr=0.1, damping=None, rule=rule)
        with pytest.raises(kind, match=text):
            train(net, opt, range(1))


def test_scalars_of_a_rule_without_first_values_are_refused() -> None:
    class Listed(WithoutState):
        scalars = ("total",)  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Listed\.scalars is \('total',\): write first values by name, as in {'total'"):
        made(lr=0.1, damping=None, rule=Listed())


def test_the_state_of_a_rule_that_keeps_nothing_loads_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    net, opt = made(lr=0.1, damping=None, rule=WithoutState())
    train(net, opt, range(1))
    opt.load_state_dict(opt.state_dict())
    assert not recwarn.list


# --- no part of the library asks which rule it is ---------------------------------------------------------------------


def modules() -> dict[str, str]:
    """The text of those outside of optim/rules/, which knows the rules by their names."""
    paths = (*PACKAGE.rglob("*.py"), *(PACKAGE / "passes").rglob("*.py"))  # the latter is a link in a checkout
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in texts.items() if not name.startswith("optim/rules/")}


def docstrings(tree: ast.Module) -> set[int]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def asks_which_rule(name: str, text: str) -> list[str]:
    """Where a module has the name of a rule as a value, compares one, or knows a class of one."""
    words = (*(quote + rule + quote for rule in RULES for quote in "\"'"), "rule.name", "kind.name", "optim.rules")
    if not any(word in text for word in words):
        return []
    tree, classes, places = ast.parse(text), {rule.__name__ for rule in RULES.values()}, []
    comments = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in RULES and id(node) not in comments:
            if (node.value, name) not in OTHER_MEANINGS:
                places.append(f"{name}:{node.lineno} has {node.value!r}")
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.endswith(("rule.name", "kind.name")) for side in sides):
                places.append(f"{name}:{node.lineno} compares {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kfac_fx.optim.rules"):
            known = [alias.name for alias in node.names if alias.name in classes]
            if known or node.module != "kfac_fx.optim.rules":
                places.append(f"{name}:{node.lineno} imports {ast.unparse(node)}")
    return places


@pytest.mark.parametrize(
    "text",
    [
        "if options.rule.name == written: pass",
        "if kind in ('adam', other): pass",
        "from kfac_fx.optim.rules import Adaptive",
        "from kfac_fx.optim.rules.adaptive import GROWTH",
        "match kind:\n    case 'qmodel': pass",
    ],
)
def test_a_question_which_rule_it_is_would_be_seen(text: str) -> None:
    assert len(asks_which_rule("optim/step.py", text)) == 1


def test_no_module_asks_which_rule_it_is() -> None:
    found = modules()
    assert {"optim/step.py", "optim/optimizer.py", "cli/bench.py", "passes/ir.py"} <= found.keys()
    assert [place for name, text in found.items() for place in asks_which_rule(name, text)] == []


# --- a training and its checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_a_rule_trains_and_resumes_bit_for_bit(name: str) -> None:
    net, opt = of_rule(name, seed=5, invert_every=3)
    before = values(net)
    train(net, opt, range(5))
    stored = copy.deepcopy((net.state_dict(), opt.state_dict()))
    train(net, opt, range(5, 10))
    assert opt.skipped == 0 and all(not torch.equal(value, before[name]) for name, value in values(net).items())
    resumed, again = of_rule(name, seed=6, invert_every=3)
    resumed.load_state_dict(stored[0])
    again.load_state_dict(stored[1])
    train(resumed, again, range(5, 10))
    assert_same(values(net), values(resumed))
    assert_same(flat_state(opt.state_dict()), flat_state(again.state_dict()))


@pytest.mark.parametrize("name", MADE)
def test_a_model_that_is_converted_before_the_first_step_trains(name: str) -> None:
    """The optimizer has made its scalars in the old precision."""
    net, opt = of_rule(name)
    net.float()
    before, x = values(net), batch(0)[0].float()
    for number in range(5):
        y = batch(number)[1]
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step(evaluate=loss_of(net, x, y))
    assert opt.skipped == 0 and all(not torch.equal(value, before[name]) for name, value in values(net).items())


@functools.cache
def optimizers() -> dict[str, KFAC]:
    return {name: of_rule(name)[1] for name in MADE}


@pytest.mark.parametrize("name", MADE)
def test_a_rule_refuses_the_state_of_every_other(name: str) -> None:
    """Before anything of it is loaded."""
    opt = optimizers()[name]
    before = flat_state(opt.state_dict())
    for other in MADE.keys() - {name}:
        with pytest.raises(ValueError, match=rf"(?s)other options:.*momentum_type  .* in the state, '{name}' here"):
            opt.load_state_dict(optimizers()[other].state_dict())
    assert_same(before, flat_state(opt.state_dict()))


def test_the_state_and_the_scalars_of_a_user_s_rule_are_in_the_checkpoint() -> None:
    net, opt = of_rule("clipped")
    assert opt.scalars["longest"].isnan()
    train(net, opt, range(3))
    states = opt.state_dict()["state"]
    assert all({"velocity", "total"} <= states[place].keys() for place in range(4))
    assert opt.scalars["longest"] > 0 and torch.equal(states[0]["kfac/longest"], opt.scalars["longest"])


def test_a_checked_rule_of_a_user_is_told_of_its_checks_and_of_steps_that_were_undone() -> None:
    net, opt = of_rule("line_search")
    train(net, opt, range(6))  # checks after 0, 1, 2 and 3 steps
    assert opt.scalars["kept"] == 4 and opt.scalars["undone"] == 0
    good = [opt.state[parameter]["checkpoint"].clone() for parameter in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(30)
    opt._step_state.checks.place.values = None  # as wrong steps do
    train(net, opt, range(6, 7))
    assert opt.scalars["undone"] == 1 and opt.skipped == 1
    assert all(map(torch.equal, net.parameters(), good))


def test_the_page_of_training_has_every_number_of_a_step() -> None:
    page = (PACKAGE.parent / "docs" / "training.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page.partition("## The numbers of a step")[2], re.MULTILINE)
    scalars: dict[str, None] = {}
    for name in ("regular", "qmodel", "eigen_moments"):
        net, opt = of_rule(name)
        train(net, opt, range(1))
        scalars |= dict.fromkeys(opt.scalars)
    assert sorted(listed) == sorted(scalars)
    assert scalars.keys() >= {scalar for rule in RULES.values() for scalar in rule.scalars}
