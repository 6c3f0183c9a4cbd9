"""Mistakes in rules of one's own are errors that name the rule, the vector and what to write."""

from __future__ import annotations

import copy
import pickle
import re
import textwrap
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.optim.rule import OF_RULES
from kfac_fx.rules import BlockStep, Damped, EigenMoments, Regular, Rule, Update, zeros_for

X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Mine(Rule):
    """A rule whose direction and first state are given."""

    name: ClassVar[str] = "mine"
    exps: ClassVar[tuple[float, ...]] = ()
    returned: Any = None
    first: Any = None

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        made: dict[str, Tensor] = super().new_state(parameter) if self.first is None else self.first(parameter)
        return made

    def direction(self, step: BlockStep) -> Update:
        update: Update = self.returned(step)
        return update


def step_with(rule: Rule, steps: int = 2) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)), (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, rule=rule)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()


OTHER = "^direction of Mine returns other shapes than those of step.g, step.state and numbers:\n"
WRONG: dict[str, tuple[Any, str]] = {
    "an undeclared vector": (
        lambda s: Update(s.g + s.state["m"]),
        "^direction reads 'm', and Mine.new_state has 'velocity': declare it there$",
    ),
    "an undeclared number": (
        lambda s: Update(s.g * s.scalars["m"]), "^direction reads 'm', and Mine.scalars has .*: declare it there$"
    ),
    "a short update": (lambda s: Update(s.g[:-1]), OTHER + r"  the update  is \[33\], expected \[34\]$"),
    "a row": (lambda s: Update(s.g[None]), OTHER + r"  the update  is \[1, 34\], expected"),
    "no tensor": (lambda s: Update({"a": s.g}), OTHER + r"  the update  is a dict, expected"),
    "a short state, too": (
        lambda s: Update(s.g.sum(), {"velocity": s.g[:-1]}),
        OTHER + r"  the update        is \[\], expected \[34\]\n  state 'velocity'  is \[33\], expected \[34\]$",
    ),
    "a number as state": (lambda s: Update(s.g, {"velocity": 1.0}), OTHER + "  state 'velocity'  is a float, expected"),
    "a vector as number": (lambda s: Update(s.g, kappa=s.g), OTHER + r"  'kappa'  is \[34\], expected \[\]$"),
    "an unknown number": (
        lambda s: Update(s.g, {}, {"q": s.g.sum()}), r"^direction of Mine returns scalars with 'q': those of an Update"
    ),
    "a forgotten state": (
        lambda s: Update(s.g + s.state["velocity"], {}),
        "^direction of Mine returns a state without 'velocity', which Mine.new_state has, so it would never change: "
        r"name the same vectors in both, and write 'velocity': step\.state\['velocity'\] for one that stays$",
    ),
    "an inverse without damping": (
        lambda s: Update(s.precondition(s.g)),
        r"^direction of Mine multiplies with powers of F \+ λ I, and Mine has no λ, so that it is 0: write class M",
    ),
    "a power without damping": (lambda s: Update(s.power(-0.5, s.g)), "has no λ, so that it is 0: write class Mine"),
    "λ without damping": (
        lambda s: Update(s.damping * s.g), "^direction of Mine reads step.damping, and Mine has no λ, so that it is 0: "
    ),
    "ρ without checks": (
        lambda s: Update(s.g * s.scalars["rho"]),
        "^direction reads 'rho', which only checks and adapt_damping measure, and this rule has none of them: Mine",
    ),
    "exact products of a vector": (
        lambda s: Update(s.g * s.exact_products(s.g)),
        r"^step.exact_products got a Tensor, and it takes a list of k vectors \[P\] and gives their products \[k, k\]",
    ),
    "exact products of numbers": (
        lambda s: Update(s.g * s.exact_products([s.g, s.g.sum()])),
        r"^step.exact_products got a list of other things than vectors \[34\], and it .*\n  number 1  is \[\]$",
    ),
    "exact products of nothing": (lambda s: Update(s.g * s.exact_products([]).sum()), "  nothing  is in it$"),
    "exact products that are not declared": (
        lambda s: Update(s.g * s.exact_products([s.g])[0, 0]), r"write is_exact: ClassVar\[bool\] = True in its class$"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("returned", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_direction_is_told(returned: Any, text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=f"(?s){text}"):
        step_with(Mine(returned=returned))


@pytest.mark.parametrize(("base", "more"), [(Rule, ""), (Regular, r"\*\*super\(\)\.new_state\(parameter\), ")])
def test_a_class_without_a_state_of_its_own_is_told_to_write_one(base: type[Rule], more: str) -> None:
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Stateless(base):  # type: ignore[valid-type, misc]
        name: ClassVar[str] = "stateless"

        def direction(self, step: BlockStep) -> Update:
            return Update(step.state["m"])

    text = (
        "^direction reads 'm', and Stateless has no new_state, so that its state has 'velocity': write def "
        rf"new_state\(self, parameter\): return {{{more}'m': kfac_fx.rules.zeros_for\(parameter\)}} in the class$"
    )
    with pytest.raises(ValueError, match=text):
        step_with(Stateless(**({"damping": 0.1} if base is Regular else {})))


def test_a_rule_may_multiply_with_the_fisher_of_the_blocks_without_damping() -> None:
    step_with(Mine(returned=lambda s: Update(s.fisher_product(s.g), {"velocity": s.g})))


@dataclass(frozen=True, kw_only=True, eq=False)
class Started(Mine):
    """With a damping that it defines itself."""

    name: ClassVar[str] = "started"

    @property
    def first_damping(self) -> float:
        return 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Sided(Mine):
    """Its sides are damped by a part of their mean eigenvalue."""

    name: ClassVar[str] = "sided"
    relative_damping: float = 0.1


def test_a_power_that_is_not_declared_is_told() -> None:
    with pytest.raises(
        (ValueError, KeyError), match=r"or write exps: ClassVar = \(-0\.5,\) in the class of your rule\."
    ):
        step_with(Started(returned=lambda s: Update(s.power(-0.5, s.g))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Solving(Damped):
    """Solves in the eigenbases, with the option `damping` as λ."""

    name: ClassVar[str] = "solving"
    has_bases: ClassVar[bool] = True
    seen: Any = None

    def direction(self, step: BlockStep) -> Update:
        solved = step.solved(step.g, step.damping)
        self.seen.append([of.clone() for of in (step.g, solved, step.precondition(step.g), step.damping)])
        return Update(solved)


@pytest.mark.parametrize("damping", [0.05, 1e8])
def test_a_rule_with_bases_takes_a_damping(damping: float) -> None:
    """It was refused for an option `relative_damping` that the rule has not, and λ was 0 without it."""
    seen: list[Any] = []
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Linear(5, 4), (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.1, rule=Solving(damping=damping, seen=seen), cov_update_every=1, invert_every=1)
    optimizer.zero_grad()
    F.cross_entropy(net(X), Y).backward()
    optimizer.step()
    (block,) = optimizer.estimator.blocks.values()
    fisher = torch.kron(*(block.factors[side].value[0] for side in "GA"))
    g, solved, preconditioned, given = seen[-1]
    assert given == optimizer.damping == damping

    def as_matrix(vector: Tensor) -> Tensor:
        return torch.cat([vector[:20].view(4, 5), vector[20:].view(4, 1)], 1).flatten()

    expected = torch.linalg.solve(fisher + damping * torch.eye(24), as_matrix(g))
    torch.testing.assert_close(as_matrix(solved), expected, rtol=1e-3, atol=1e-5 / damping)
    if damping > 1:  # where (F + λ)⁻¹ is 1 / λ, however λ is divided among the sides
        torch.testing.assert_close(preconditioned * damping, g, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", [Started, Sided])
def test_a_rule_with_a_damping_of_its_own_multiplies_with_inverses(kind: type[Mine]) -> None:
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Inverts(kind):  # type: ignore[valid-type, misc]
        name: ClassVar[str] = "inverts"
        exps: ClassVar[tuple[float, ...]] = (-1,)

    step_with(Inverts(returned=lambda s: Update(s.precondition(s.g), {"velocity": s.g})))


FIRST: dict[str, tuple[Any, str]] = {
    "another shape": (
        lambda p: {"m": torch.zeros(2)},
        r"the parameter, \[3, 5\], or \[\]:\n  'm'  is \[2\]\nWrite kfac_fx",
    ),
    "a number": (lambda p: {"m": 0.0}, r"of the shape of the parameter, \[3, 5\], or \[\]:\n  'm'  is a float\nWrite"),
    "nothing": (lambda p: None, r"^new_state of Mine returns a NoneType: return tensors by name, \{\} for none$"),
    "sometimes": (
        lambda p: {"m": zeros_for(p)} if p.dim() > 1 else {},
        "^new_state of Mine has nothing for a parameter, and 'm' for another: return the same names for all$",
    ),
}


@pytest.mark.parametrize(("first", "text"), FIRST.values(), ids=FIRST)
def test_a_wrong_first_state_is_told(first: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        step_with(Mine(returned=lambda step: Update(step.g), first=first))


def test_a_key_error_of_the_rule_s_own_stays_one() -> None:
    with pytest.raises(KeyError, match="own"):
        step_with(Mine(returned=lambda step: {}["own"]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Choosy(Regular):
    """It takes no gradient."""

    name: ClassVar[str] = "choosy"

    def direction(self, step: BlockStep) -> Update:
        return replace(super().direction(step), ok=torch.zeros_like(step.ok))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_gradient_that_a_rule_does_not_take_moves_nothing(measured: bool) -> None:
    """Also where a closure measures the loss before and after the step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    net = kfac_fx.compile(model, (X,), loss="categorical")
    rule = Choosy(damping=0.1, adapt_damping=measured, damping_adaptation_interval=1 if measured else None)
    optimizer = kfac_fx.KFAC(net, lr=0.1, rule=rule)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert all(map(torch.equal, before, model.parameters())) and int(optimizer.skipped) == 1


def test_a_rule_without_a_state_of_its_own_need_not_return_the_usual_velocity() -> None:
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Plain(Rule):
        name: ClassVar[str] = "plain"
        exps: ClassVar[tuple[float, ...]] = ()

        def direction(self, step: BlockStep) -> Update:
            return Update(step.g)

    step_with(Plain())


def test_an_attribute_that_a_step_has_not_is_told_with_those_that_it_has() -> None:
    texts = {
        "grad": r"a step has no attribute 'grad'\. Write step\.g\. Rules compute with g, state, .*, exact_products\.",
        "preconditon": r"a step has no attribute 'preconditon'\. Did you mean 'precondition'\? Rules compute with g, ",
        "_grad": "object has no attribute '_grad'",
    }
    for name, text in texts.items():
        with pytest.raises(AttributeError, match=text):
            step_with(Mine(returned=lambda step, name=name: Update(getattr(step, name))))


def test_an_error_inside_of_a_property_of_a_step_is_its_own() -> None:
    def returned(step: BlockStep) -> Update:
        del step.flat
        return Update(step.g)

    with pytest.raises(AttributeError, match="no attribute 'flat'"):
        step_with(Mine(returned=returned))


def test_an_unknown_option_of_a_rule_is_told_with_those_that_it_has() -> None:
    texts: dict[type[Rule], tuple[dict[str, Any], str]] = {
        EigenMoments: (
            {"beta1": 0.9, "lr": 0.1, "momentun": 0.5},
            r"^EigenMoments does not have these options:\n  beta1\. Write momentum=\.\.\.\.\n  lr\.\n  momentun\. Did "
            r"you mean 'momentum'\?\nThe options of EigenMoments are momentum, second_moment_decay, .*; those of all "
            r"rules, such as lr and weight_decay, are options of KFAC: "
            r"KFAC\(net, lr=\.\.\., rule=EigenMoments\(\.\.\.\)\)\.$",
        ),
        Mine: ({"first": None, "lr": 0.1}, r"^Mine does not have these options:\n  lr\.\nThe options of Mine are ret"),
    }
    for kind, (options, text) in texts.items():
        with pytest.raises(TypeError, match=text):
            kind(**options)
    rule = EigenMoments(momentum=0.5)
    assert copy.deepcopy(rule).momentum == pickle.loads(pickle.dumps(rule)).momentum == 0.5
    assert replace(rule, momentum=0.25).momentum == 0.25


def velocity(step: BlockStep, sign: int) -> Update:
    v = 0.9 * step.state["velocity"] + sign * step.g
    return Update(v, {"velocity": v})


def test_a_rule_that_goes_up_the_loss_is_told_once() -> None:
    """Only the divergence of the training was told, twenty steps later, and its remedies were those of long steps."""
    text = (
        r"^in steps 1, 2 and 5 the update of the rule pointed up the loss: .* add step\.precondition\(step\.g\) to it"
    )
    with pytest.warns(kfac_fx.StalledWarning, match=text) as caught:
        step_with(Mine(returned=lambda step: velocity(step, -1)), steps=10)
    assert len(caught) == 1


def test_a_rule_that_goes_up_now_and_then_is_not_told() -> None:
    signs = iter([-1, -1, 1, 1, 1, -1, -1, -1, -1, -1])
    step_with(Mine(returned=lambda step: Update(next(signs) * step.g, {"velocity": step.g})), steps=10)
    step_with(Mine(returned=lambda step: velocity(step, 1)), steps=10)


def test_a_rule_with_options_and_without_the_decorator_is_told() -> None:
    """Its options were unknown, though the class declared them, or kept the values of the class."""

    class Heavy(Mine):
        momentum: float = 0.9

    class Light(Heavy):
        name: ClassVar[str] = "light"

    for kind, options in ((Heavy, {"momentum": 0.5}), (Heavy, {}), (Light, {"momentum": 0.5})):
        text = rf"^Heavy declares momentum and is no dataclass, so {kind.__name__}\(\.\.\.\) takes no such options: "
        with pytest.raises(TypeError, match=text):
            kind(**options)


def test_what_is_right_steps() -> None:
    step_with(Mine(returned=lambda step: Update(step.g + step.state["velocity"], {"velocity": step.g})))


def test_the_rule_of_the_guide_for_contributors_trains() -> None:
    guide = (Path(kfac_fx.__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^   ```\n(   from dataclasses.*?)^   ```$", guide, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(textwrap.dedent(code), "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    net = kfac_fx.compile(torch.nn.Linear(3, 2), loss="mse")
    optimizer = kfac_fx.KFAC(net, lr=0.1, rule=names["Heavy"](damping=0.1))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.mse_loss(net(x), x[:, :2]))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_the_attributes_that_an_error_names_are_there_and_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    for name in OF_RULES:
        assert f"`{name}`" in page or f"`{name}(" in page, name
        assert name in {*dir(BlockStep), *(field.name for field in fields(BlockStep))}


def test_the_page_of_rules_has_the_decorator_that_a_plain_dataclass_lacks() -> None:
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclass(type("Plain", (Rule,), {"__module__": __name__}))
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    for wanted in (
        "cannot inherit non-frozen dataclass from a frozen one",
        "@dataclass(frozen=True, kw_only=True, eq=False)\nclass RootWithMomentum(Damped):",
        "exps: ClassVar",
        "zeros_for(parameter)",
    ):
        assert wanted in page, wanted
