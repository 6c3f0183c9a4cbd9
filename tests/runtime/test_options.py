"""Values of KFAC's options, and errors that say what to write instead. Help and type checkers know the options."""

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules import Adam, Adaptive, EigenMoments, QModel, QModelFixedMomentum, Regular, Rule
from kfac_fx.optim.schedule import Schedule
from kfac_fx.passes.errors import AlreadyAttachedError
from tests.runtime.options_of import options_of
from tests.runtime.slow_kfac import batch, mlp

# Options that the rule does not have: (options next to lr=0.1, each with a line of the error).
NOT_OF_THE_RULE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the default of two numbers": (
        {"damping": 0.1, "overhead": 0.4, "second_moment_decay": 0.9},
        [
            "KFAC with momentum_type='regular' does not have these options:",
            "  overhead, which is one of 'adaptive', 'eigen_moments'.",
            "  second_moment_decay, which is one of 'eigen_moments'.",
        ],
    ),
    "the default of a damping": (
        {"lr": None, "damping": 0.1, "adapt_damping": True},
        [
            "KFAC with momentum_type='adaptive' does not have these options:",
            "  adapt_damping, which is one of 'regular', 'adam', 'qmodel', 'qmodel_fixedmu'.",
            "This rule is that of the arguments: a damping with an lr means 'regular', a damping alone 'adaptive', and "
            "neither of both 'eigen_moments'; momentum_type='...' names another rule.",
        ],
    ),
    "the default without numbers": (
        {"lr": None, "min_damping": 1e-3},
        [
            "KFAC with the default rule does not have these options:",
            "  min_damping, which is one of 'adaptive', 'regular', 'adam', 'qmodel', 'qmodel_fixedmu'.",
        ],
    ),
    "adaptive": (
        {
            "momentum_type": "Adaptive",
            "norm_constraint": 0.1,
            "qmodel_update_rescale": 0.5,
            "l2_reg": 0.1,
            "relative_damping": 0.1,
            "eigenvalue_exponent": 0.5,
        },
        [
            "  norm_constraint, which is one of 'regular', 'adam', 'eigen_moments'.",
            "  qmodel_update_rescale, which is one of 'qmodel', 'qmodel_fixedmu'.",
            "  l2_reg, which is one of 'regular', 'adam', 'qmodel', 'qmodel_fixedmu'.",
            "  relative_damping, which is one of 'regular', 'adam', 'eigen_moments'.",
            "  eigenvalue_exponent, which is one of 'eigen_moments'.",
        ],
    ),
    "eigen_moments": (
        {
            "momentum_type": "eigen_moments",
            "damping": 0.1,
            "precon_damping_mult": 2.0,
            "norm_constraint_form": "gradient",
        },
        [
            "  damping, which is one of 'adaptive', 'regular', 'adam', 'qmodel', 'qmodel_fixedmu'.",
            "  precon_damping_mult, which is one of 'adaptive', 'regular', 'adam', 'qmodel', 'qmodel_fixedmu'.",
            "  norm_constraint_form, which is one of 'regular', 'adam'.",
            "The options of this rule are momentum, second_moment_decay, eigenvalue_exponent, relative_damping, "
            "norm_constraint, overhead, damping_adaptation_interval, exact_steps; all rules have those of KFAC's "
            "signature, such as lr and weight_decay.",
        ],
    ),
    "qmodel": (
        {"momentum_type": "qmodel", "lr": None, "damping": 0.1, "momentum": 0.9, "norm_constraint": 0.1},
        [
            "  momentum, which is one of 'adaptive', 'regular', 'adam', 'qmodel_fixedmu', 'eigen_moments'.",
            "  norm_constraint, which is one of 'regular', 'adam', 'eigen_moments'.",
        ],
    ),
    "of another K-FAC": (
        {"kl_clip": 1e-3, "factor_update_steps": 10, "inv_update_steps": 100, "factor_decay": 0.95},
        [
            "  kl_clip. Write norm_constraint=...; it bounds the squared Fisher norm of a step.",
            "  factor_update_steps. Write cov_update_every=....",
            "  inv_update_steps. Write invert_every=....",
            "  factor_decay. Write cov_ema_decay=....",
        ],
    ),
    "of kfac-jax": (
        {"initial_damping": 1.0, "max_damping": 9.0, "curvature_ema": 0.95, "inverse_update_period": 5}
        | {"damping_lower_threshold": 0.2, "learning_rate_schedule": len, "use_adaptive_momentum": True},
        [
            "  initial_damping. Write damping=....",
            "  max_damping. Leave it out: the damping has no upper bound.",
            "  curvature_ema. Write cov_ema_decay=....",
            "  inverse_update_period. Write invert_every=....",
            "  damping_lower_threshold. Write damping_increase_rho_threshold=....",
            "  learning_rate_schedule. Leave it out: a scheduler of torch.optim.lr_scheduler sets lr.",
            "  use_adaptive_momentum. Write momentum_type='qmodel', which finds both the length of a step and its "
            "momentum.",
        ],
    ),
    "of preconditioners in PyTorch": (
        {"stat_decay": 0.95, "ema_decay": 0.95, "accumulation_steps": 2, "preconditioner_upd_interval": 10}
        | {"shampoo_beta": 0.95, "use_decoupled_weight_decay": True, "lr_decay": 0.1, "momentun": 0.9},
        [
            "  stat_decay. Write cov_ema_decay=....",
            "  ema_decay. Write cov_ema_decay=....",
            "  accumulation_steps. Leave it out: the forwards between two steps are the micro-batches of a step.",
            "  preconditioner_upd_interval. Write invert_every=....",
            "  shampoo_beta. Write cov_ema_decay=....",
            "  use_decoupled_weight_decay. Leave it out: weight_decay is decoupled.",
            "  lr_decay. Leave it out: a scheduler of torch.optim.lr_scheduler sets lr.",
            "  momentun. Did you mean 'momentum'?",
        ],
    ),
    "of no rule": (
        {"momentun": 0.9, "weight_decai": 0.1, "betas": (0.9, 0.99), "dampening": 0.5, "nesterov": True}
        | {"fused": True, "eps": 1e-8, "learning_rate": 1e-3, "max_iter": 20},
        [
            "  momentun. Did you mean 'momentum'?",
            "  weight_decai. Did you mean 'weight_decay'?",
            "  betas. Write momentum=... and second_moment_decay=... instead of betas.",
            "  dampening. Leave it out: momentum has none. If you mean the damping of the Fisher, write damping=....",
            "  nesterov. Leave it out.",
            "  fused. Leave it out.",
            "  eps. Leave it out; rules that need it take a damping instead.",
            "  learning_rate. Write lr=...; it is a factor, 1 by default, and not of the size of Adam's.",
            "  max_iter. Leave it out: step(closure) takes one step, and checks find its length.",
        ],
    ),
}


class Nameless(Rule):
    pass


class Namesake(Rule):
    name = "regular"


class TakenNames(Rule):
    name = "with taken names"
    scalars = {"rho": 0.0, "length": 0.0, "counter": 0.0}


# Arguments that are no options: (options next to lr=0.1, the error).
WRONG_RULES: dict[str, tuple[dict[str, Any], str]] = {
    "a class": (
        {"rule": Regular},
        r"rule is <class '.*\.Regular'>; it must be an object of a subclass of kfac_fx\.rules\.Rule: write Regular\(",
    ),
    "a name": (
        {"rule": "regular"},
        r"rule is 'regular'; it must be an object of a subclass of kfac_fx\.rules\.Rule",
    ),
    "two rules": (
        {"rule": Regular(damping=0.1), "momentum_type": "adam"},
        r"^momentum_type='adam' names a rule, and rule=\.\.\. is one: leave momentum_type out$",
    ),
    "an option of no rule next to the rule": (
        {"rule": Regular(damping=0.1), "dampening": 0.5},
        r"^dampening is an option neither of KFAC nor of Regular: leave it out$",
    ),
    "the name of a rule of the library": (
        {"rule": Namesake()},
        r"^the name of Namesake, 'regular', is that of kfac_fx\.rules\.Regular: take another one, because checkpoints ",
    ),
    "a rule without a name": ({"rule": Nameless()}, r"^Nameless has no name: write name: ClassVar\[str\] = .* in the"),
    "scalars of every optimizer": (
        {"rule": TakenNames()},
        r"^TakenNames\.scalars has names that every optimizer has: rho, counter; take others$",
    ),
    "options next to the rule": (
        {"rule": Regular(damping=0.1), "momentum": 0.5, "damping": 0.1},
        r"^momentum is an option of the rule: write rule=Regular\(momentum=\.\.\.\)\ndamping is an option .*damping=",
    ),
}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown momentum type": (
        {"momentum_type": "regulr"},
        r"momentum_type 'regulr' is none of 'adaptive', .*Did you mean 'regular'\?",
    ),
    "no lr": (
        {"lr": None, "momentum_type": "regular"},
        r"momentum_type='regular' needs lr=\.\.\.; the default, 'eigen_moments', finds its own step size",
    ),
    "no damping": (
        {"damping": None, "momentum_type": "regular"},
        r"momentum_type='regular' needs damping=\.\.\.; 'eigen_moments', the default, needs none",
    ),
    "no overhead at all": ({"lr": None, "overhead": 0}, "overhead is 0; it must be positive"),
    **{
        f"a momentum of 1 with {kind}": (
            {"momentum_type": kind, "momentum": 1.0, "damping": None if kind == "eigen_moments" else 0.1},
            r"momentum is 1\.0; it must be from 0 and below 1",
        )
        for kind in ("adaptive", "eigen_moments", "regular", "adam")
    },
    "a momentum of 1 with qmodel_fixedmu": (
        {"lr": None, "momentum_type": "qmodel_fixedmu", "momentum": 1.0, "damping": 0.1},
        r"momentum is 1\.0; it must be from 0 and below 1",
    ),
    "a relative damping and one that adapts": (
        {"damping": None, "momentum_type": "adam", "relative_damping": 0.1, "adapt_damping": True},
        r"relative_damping is the damping: leave damping and adapt_damping out",
    ),
    "a relative damping of no eigenvalues": (
        {
            "momentum_type": "eigen_moments",
            "damping": None,
            "eigenvalue_exponent": 0.0,
            "relative_damping": 0.1,
        },
        r"relative_damping=0\.1 has no effect without an eigenvalue_exponent above 0: leave it out",
    ),
    "two dampings": (
        {"relative_damping": 0.1},
        r"relative_damping is the damping: leave damping and adapt_damping out",
    ),
    "options of an adapted damping without one": (
        {
            "damping_adaptation_interval": 2,
            "damping_adaptation_decay": 0.9,
            "damping_decrease_rho_threshold": 0.8,
            "damping_increase_rho_threshold": 0.2,
            "update_damping_immediately": False,
            "min_damping": 1e-3,
            "l2_reg": 0.1,
        },
        r"(?s)interval=2 has no effect without adapt_damping=True: leave it out\n.*_decay=0\.9 .*_decrease_rho_.*"
        r"_increase_rho_.*min_damping=0\.001 .*update_damping_immediately=False .*l2_reg=0\.1 has no effect",
    ),
    "a multiple of a relative damping": (
        {"momentum_type": "adam", "damping": None, "relative_damping": 0.1, "precon_damping_mult": 2.0},
        r"precon_damping_mult=2\.0 has no effect without damping instead of relative_damping: leave it out",
    ),
    "the form of a bound that is not given": (
        {"norm_constraint_form": "gradient"},
        r"norm_constraint_form='gradient' has no effect without norm_constraint: leave it out",
    ),
    "adaptive of a sum": ({"momentum_type": "adaptive", "reduction": "sum"}, r"is that of the mean loss"),
    "qmodel with lr": (
        {"momentum_type": "qmodel", "momentum": None},
        r"momentum_type='qmodel' finds its own step size: leave lr out, or .* with qmodel_update_rescale",
    ),
    "unknown reduction": ({"reduction": "none"}, r"reduction 'none' is none of 'mean', 'sum'\."),
    "adapting a sum": (
        {"reduction": "sum", "adapt_damping": True},
        r"the quadratic model is that of the mean loss: .*divide the loss by the number of cases",
    ),
    "a quadratic model of a sum": (
        {"momentum_type": "qmodel", "lr": None, "momentum": None, "reduction": "sum"},
        r"the quadratic model is that of the mean loss: .*reduction='mean'",
    ),
    "a part of the user's own backward": (
        {"estimation_mode": "empirical", "fraction": 0.5},
        r"'empirical' records in the whole training backward: leave fraction at 1\.0",
    ),
    "unknown mode": ({"estimation_mode": "gradient"}, r"estimation_mode 'gradient' is none of 'gradients', "),
    "part of a step": (
        {"cov_update_every": 0},
        r"cov_update_every is 0; it must be a whole number of steps, at least 1",
    ),
    "half a step": ({"invert_every": 2.5}, r"invert_every is 2\.5; it must be a whole number of steps, at least 1"),
    "interval": ({"damping_adaptation_interval": 0}, r"damping_adaptation_interval is 0; it must be a whole number"),
    "burn-in": ({"num_burnin_steps": -1}, r"num_burnin_steps is -1; it must be a whole number of steps, at least 0"),
    "zero damping": ({"damping": 0.0}, r"damping is 0\.0; it must be positive"),
    "damping mult": ({"precon_damping_mult": -1.0}, r"precon_damping_mult is -1\.0; it must be positive"),
    "norm constraint": ({"norm_constraint": 0.0}, r"norm_constraint is 0\.0; it must be positive"),
    "norm constraint form": (
        {"norm_constraint_form": "grad"},
        r"norm_constraint_form 'grad' is none of 'update', 'gradient'\.",
    ),
    "adaptation decay": ({"damping_adaptation_decay": 0.0}, r"damping_adaptation_decay is 0\.0; it must be positive"),
    "weight decay": ({"weight_decay": -0.1}, r"weight_decay is -0\.1; it must not be negative"),
    "min damping": ({"min_damping": -0.1}, r"min_damping is -0\.1; it must not be negative"),
    "l2": ({"l2_reg": float("nan")}, r"l2_reg is nan; it must be finite"),
    "lr": ({"lr": -1.0}, r"lr is -1\.0; it must not be negative"),
    "momentum": ({"momentum": -0.9}, r"momentum is -0\.9; it must be from 0 and below 1"),
    "ema decay": ({"cov_ema_decay": 1.5}, r"cov_ema_decay is 1\.5; it must be between 0 and 1"),
    "thresholds": (
        {"damping_increase_rho_threshold": 0.8},
        r"damping_increase_rho_threshold=0\.8 is above damping_decrease_rho_threshold=0\.75: .*to grow and to shrink",
    ),
    "first order": (
        {"first_order": {"beta": (0.9, 0.99)}},
        r"first_order has no option 'beta', only lr, betas, eps, weight_decay\. Did you mean 'betas'\?",
    ),
    "first order of another kind": (
        {"first_order": 3},
        r"first_order is 3; it must be a dict of options, as in dict\(",
    ),
    "first lr": ({"first_order": {"lr": -1}}, r"first_order\['lr'\] is -1; it must not be negative"),
    "first eps": ({"first_order": {"eps": -1}}, r"first_order\['eps'\] is -1; it must not be negative"),
    "first weight decay": (
        {"first_order": {"weight_decay": "x"}},
        r"first_order\['weight_decay'\] is 'x'; it must be a num",
    ),
    **{
        f"betas {betas}": (
            {"first_order": {"betas": betas}},
            r"first_order\['betas'\] is .*; it must be two numbers, fr",
        )
        for betas in ((0.9, 1.0), (2, 3), 0.9, (0.9,), (0.9, float("nan")))
    },
    **{
        f"{name} of tensor({value})": ({name: torch.tensor(value)}, rf"{name} is tensor\(.*\); it must")
        for name in ("lr", "damping", "norm_constraint")
        for value in (-1.0, float("nan"))
    },
    "damping of tensor(0)": ({"damping": torch.tensor(0.0)}, r"damping is tensor\(0\.\); it must be positive"),
    "lr of several": ({"lr": torch.ones(2)}, r"lr is tensor\(\[1., 1.\]\); it must be a number"),
    **{
        f"{name} of text": ({name: "0.1"}, rf"{name} is '0\.1'; it must be a (whole )?number")
        for name in ("lr", "damping", "momentum", "cov_ema_decay", "damping_decrease_rho_threshold", "seed")
    },
    "a growing decay": ({"damping_adaptation_decay": 2.0}, r"damping_adaptation_decay is 2\.0; it must be between 0"),
    **{
        f"{name} of nan": ({name: float("nan")}, rf"{name} is nan; it must be finite")
        for name in ("damping_decrease_rho_threshold", "damping_increase_rho_threshold")
    },
    **{
        f"rescale {value}": (
            {"momentum_type": "qmodel", "lr": None, "momentum": None, "qmodel_update_rescale": value},
            r"qmodel_update_rescale is (-1\.0|nan); it must be positive",
        )
        for value in (-1.0, float("nan"))
    },
    "a flag of text": ({"adapt_damping": "no"}, r"adapt_damping is 'no'; it must be True or False"),
    "a momentum type of another kind": ({"momentum_type": 3}, r"momentum_type 3 is none of 'adaptive', "),
    "a scale instead of its scaler": (
        {"grad_scaler": 64.0},
        r"grad_scaler is 64\.0; it must be a torch.amp.GradScaler",
    ),
    "fraction": ({"fraction": 0.0}, r"fraction is 0\.0; it must be above 0 and at most 1"),
}


def model() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_options_say_what_to_write(options: dict[str, Any], text: str) -> None:
    net = compile(model(), loss="categorical")
    with pytest.raises(ValueError, match=text):
        KFAC(net, **{"lr": 0.1, "damping": 0.1, **options})
    KFAC(net, lr=0.1, damping=0.1)  # the failed one is not attached


@pytest.mark.parametrize(("options", "lines"), NOT_OF_THE_RULE.values(), ids=NOT_OF_THE_RULE)
def test_options_of_another_rule_are_told_with_all_that_have_them(options: dict[str, Any], lines: list[str]) -> None:
    net = compile(model(), loss="categorical")
    with pytest.raises(TypeError) as raised:
        KFAC(net, **{"lr": 0.1, **options})
    text = str(raised.value).splitlines()
    assert [line for line in lines if line not in text] == []
    assert sum(line.startswith("  ") for line in text) == len([line for line in lines if line.startswith("  ")])
    KFAC(net, lr=0.1, damping=0.1)  # the failed one is not attached


@pytest.mark.parametrize(("options", "text"), WRONG_RULES.values(), ids=WRONG_RULES)
def test_a_rule_is_an_object_with_its_own_options(options: dict[str, Any], text: str) -> None:
    net = compile(model(), loss="categorical")
    with pytest.raises(TypeError, match=text):
        KFAC(net, 0.1, **options)
    KFAC(net, lr=0.1, damping=0.1)


def test_a_rule_by_its_name_is_the_object_of_its_class() -> None:
    net = compile(model(), loss="categorical")
    by_name = options_of(net, 0.1, momentum_type="regular", damping=0.2, momentum=0.5, norm_constraint=None).rule
    assert repr(by_name) == repr(Regular(damping=0.2, momentum=0.5))
    rule = Adam(damping=0.2)
    assert options_of(net, 0.1, rule=rule).rule is rule


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"KFAC needs a compiled module and got a Linear: write net = kfac_fx\.compile\(model, "
    ):
        KFAC(model(), lr=0.1, damping=0.1)
    with pytest.raises(ValueError, match=r"got a list: .*If a trainer makes the optimizer, give it a function that co"):
        KFAC(list(model().parameters()))  # type: ignore[arg-type]


def test_a_second_optimizer_is_refused() -> None:
    net = compile(model(), loss="categorical")
    first = KFAC(net, lr=0.1, damping=0.1)
    with pytest.raises(AlreadyAttachedError, match="a KFAC is already attached to this module"):
        KFAC(net, lr=0.1, damping=0.1)
    del first
    KFAC(net, lr=0.1, damping=0.1)


def test_parameters_of_another_model_are_refused() -> None:
    net, other = compile(model(), loss="categorical"), nn.Linear(4, 2)
    text = r"2 parameters are not of the compiled module, the first of shape \[2, 4\].*compile the model again"
    with pytest.raises(ValueError, match=text):
        KFAC(net, lr=0.1, damping=0.1, params=other.parameters())
    opt = KFAC(net, lr=0.1, damping=0.1)
    with pytest.raises(ValueError, match=text):
        opt.add_param_group({"params": other.parameters()})


def test_groups_of_parameters_in_the_place_of_lr_are_told_their_name() -> None:
    net = compile(model(), loss="categorical")
    for groups, kind in (([{"params": []}], "list"), (net.parameters(), "generator")):
        with pytest.raises(
            ValueError,
            match=rf"^lr is a {kind}; groups of parameters are an argument, KFAC\(net, params=...\), and all "
            "parameters of the net are trained without it$",
        ):
            KFAC(net, groups)  # type: ignore[arg-type]


def test_numbers_may_be_tensors() -> None:
    opt = KFAC(compile(model(), loss="categorical"), lr=torch.tensor(0.1), damping=torch.tensor(0.2))
    assert opt.damping.item() == pytest.approx(0.2)
    opt.damping = 0.3
    assert opt.damping.item() == pytest.approx(0.3)


@pytest.mark.parametrize("damping", [-1.0, 0, float("nan")])
def test_a_damping_that_is_assigned_is_positive(damping: float) -> None:
    opt = KFAC(compile(model(), loss="categorical"), lr=0.1, damping=0.1)
    with pytest.raises(ValueError, match=r"damping is .*; it must be positive"):
        opt.damping = damping
    assert opt.damping.item() == pytest.approx(0.1)


def test_the_decay_of_the_factors_is_per_step() -> None:
    opt = KFAC(compile(model(), loss="categorical"), lr=0.1, damping=0.1, cov_ema_decay=0.9, cov_update_every=3)
    assert opt.estimator.cov_ema_decay == pytest.approx(0.9**3)


def test_every_property_of_the_optimizer_is_documented() -> None:
    properties = {name: value for name, value in vars(KFAC).items() if isinstance(value, property)}
    assert {"rho", "predicted_change", "qmodel_learning_rate", "qmodel_momentum", "skipped", "counter"} <= {*properties}
    assert [name for name, value in properties.items() if not value.__doc__] == []


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "eigen_moments"),
        ({"lr": 0.3}, "eigen_moments"),
        ({"damping": 0.3}, "adaptive"),
        ({"lr": 0.1, "damping": 0.1}, "regular"),
        ({"lr": 0.1, "damping": 0.1, "momentum_type": "Adaptive"}, "adaptive"),
    ],
)
def test_the_momentum_type_follows_from_the_numbers_that_are_given(options: dict[str, Any], kind: str) -> None:
    chosen = options_of(compile(model(), loss="categorical"), **options)
    assert chosen.rule.name == kind
    expected = {"lr": options.get("lr", 1.0), "weight_decay": 0.0}
    momentum = {"eigen_moments": {"momentum": 0.95}, "regular": {"momentum": 0.9}, "adaptive": {}}[kind]
    assert chosen.of_groups == {**expected, **momentum}
    assert Schedule(chosen).intervals == ((1, 10, 5) if kind == "regular" else (10, 20, 5))


def test_a_net_with_blocks_without_an_eigenbasis_takes_the_adaptive_type() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z: torch.Tensor = self.last(self.lstm(x)[0][-1])
            return z

    net = compile(Recurrent(), (torch.randn(5, 6, 3),), loss="mse", approximations={"lstm": "kron_series_1"})
    opt = KFAC(net)
    assert opt.options.rule.name == "adaptive"
    (reason,) = opt.fallbacks()
    assert reason.startswith("momentum_type is 'adaptive', because blocks have no eigenbasis: ") and "lstm" in reason
    assert KFAC(compile(model(), loss="categorical")).fallbacks() == []


def test_every_rule_has_its_own_defaults() -> None:
    """Those of TF K-FAC for its rules."""
    assert (EigenMoments().momentum, EigenMoments().second_moment_decay) == (0.95, 0.95)
    assert {rule(damping=0.1).momentum for rule in (Regular, Adam, Adaptive, QModelFixedMomentum)} == {0.9}
    assert (Adaptive().damping, Adaptive().overhead, EigenMoments().overhead) == (1.0, 0.6, 0.2)
    assert (Adaptive().damping_adaptation_decay, QModel(damping=0.1).damping_adaptation_decay) == (0.9, 0.95)
    decays = [options_of(compile(model(), loss="categorical"), **of).factor_decay for of in ({}, {"damping": 1.0})]
    assert decays == [0.98, 0.95]


@pytest.mark.parametrize("number", [Fraction(1, 10), np.float32(0.1), np.float64(0.1)])
def test_numbers_of_other_types_train_as_floats(number: Any) -> None:
    net = compile(mlp(), loss="categorical")
    params = [{"params": list(net.parameters()), "lr": number}]
    opt = KFAC(net, lr=number, damping=number, weight_decay=number, params=params, momentum_type="regular")
    assert type(opt.options.weight_decay) is float or isinstance(number, np.float64)
    assert float(opt.damping) == pytest.approx(0.1)
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    opt.step()
    assert opt.counter == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 10**400}, "lr is larger than any floating-point number"),
        ({"momentum": 10**400}, "momentum is larger than any floating-point number"),
        ({"invert_every": 2**63}, r"invert_every is too large for a number of steps: it must be below 2\*\*63"),
        (
            {"params": 3},
            r"params is 3; it must be parameters, or groups of them, as in \[\{'params': \[...\], 'lr': 0.1",
        ),
        ({"params": torch.ones(2)}, r"params is tensor\(\[1., 1.\]\); it must be parameters, or groups of them, as in"),
    ],
)
def test_numbers_that_are_too_large_and_parameters_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KFAC(compile(mlp(), loss="categorical"), **{"lr": 0.1, "damping": 0.1, **options})


def test_a_large_whole_number_is_a_float() -> None:
    opt = KFAC(compile(mlp(), loss="categorical"), lr=0.1, damping=10**20)
    assert float(opt.damping) == 1e20


@pytest.mark.parametrize(("momentum_type", "lr"), [(None, 1e-3), ("adaptive", 1e-3), (None, 0.01)])
def test_an_lr_of_adams_size_is_told_at_once(momentum_type: str | None, lr: float) -> None:
    net = compile(nn.Linear(3, 2), loss="normal")
    with pytest.warns(UserWarning, match=rf"^lr={lr} is of the size of Adam's, .* between 0\.3 and 1\.$"):
        KFAC(net, lr=lr, momentum_type=momentum_type)


@pytest.mark.parametrize(("written", "told"), [(3e-4, True), (0.3, False)])
def test_an_lr_of_adams_size_that_a_trainer_writes_is_told(written: float, told: bool) -> None:
    """As stable-baselines3 does before every update, whatever lr the optimizer was made with."""
    net = compile(nn.Linear(3, 2), loss="mse")
    optimizer, x = KFAC(net), torch.randn(8, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            optimizer.param_groups[0]["lr"] = written
            optimizer.zero_grad()
            net(x).sub(x[:, :2]).square().mean().backward()
            optimizer.step()
    texts = [str(warning.message) for warning in caught]
    assert [text.startswith("the largest lr of 20 steps is 0.0003, of the size of Adam's") for text in texts] == [
        True
    ] * told


@pytest.mark.parametrize("options", [{"lr": 0.02}, {"lr": 1e-3, "momentum_type": "regular", "damping": 0.1}])
def test_another_lr_is_not(options: dict[str, Any]) -> None:
    KFAC(compile(nn.Linear(3, 2), loss="normal"), **options)
