"""Values of KFAC's options, and errors that say what to write instead. Help and type checkers know the options."""

from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.schedule import Schedule
from kfac_fx.passes.errors import AlreadyAttachedError

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown momentum type": (
        {"momentum_type": "regulr"},
        r"momentum_type 'regulr' is none of 'adaptive', .*Did you mean 'regular'\?",
    ),
    "no lr": (
        {"lr": None, "momentum_type": "regular"},
        r"momentum_type='regular' needs lr=\.\.\.; 'eigen_moments', 'adaptive', 'qmodel' and 'qmodel_fixedmu' find",
    ),
    "no damping": (
        {"damping": None, "momentum_type": "regular"},
        r"momentum_type='regular' needs damping=\.\.\.; 'eigen_moments' needs none",
    ),
    "overhead and given intervals": (
        {"overhead": 0.4},
        r"momentum_type='regular' has the intervals cov_update_every and invert_every; overhead chooses",
    ),
    "no overhead at all": ({"lr": None, "overhead": 0}, "overhead is 0; it must be positive"),
    "adaptive and adapt_damping": (
        {"lr": None, "adapt_damping": True},
        r"momentum_type='adaptive' adapts the damping itself.*leave adapt_damping out\n'adaptive' is the default",
    ),
    "adaptive with what it does not have": (
        {
            "momentum_type": "adaptive",
            "momentum": 1.0,
            "norm_constraint": 0.1,
            "qmodel_update_rescale": 0.5,
            "l2_reg": 0.1,
        },
        r"momentum is below 1\n.*leave norm_constraint out\n.*takes lr instead of .*\n.*does not know l2_reg",
    ),
    "eigen_moments with all that it does not have": (
        {
            "momentum_type": "eigen_moments",
            "damping": 0.1,
            "adapt_damping": True,
            "precon_damping_mult": 2.0,
            "norm_constraint_form": "gradient",
            "momentum": 1.0,
            "qmodel_update_rescale": 2.0,
            "l2_reg": 0.1,
        },
        r"leave damping out\n.*leave adapt_damping out\n"
        r".*leave precon_damping_mult out\n.*leave norm_constraint_form out\n.*momentum is below 1\n"
        r".*takes lr instead of qmodel_update_rescale\n.*write weight_decay, which is decoupled",
    ),
    "grafted with all that it does not have": (
        {"momentum_type": "grafted", "norm_constraint": 0.1, "adapt_damping": True, "momentum": 1.0},
        r"leave norm_constraint out\n.*leave adapt_damping out\n.*momentum is below 1",
    ),
    "a relative damping of another type": (
        {"momentum_type": "adaptive", "relative_damping": 0.1},
        r"'adaptive' has no relative damping: leave relative_damping out, or write 'regular', 'adam', 'grafted' or "
        r"'eigen_moments'",
    ),
    "an exponent of another type": (
        {"momentum_type": "adaptive", "eigenvalue_exponent": 0.5},
        r"eigenvalue_exponent is an option of 'eigen_moments', and not of 'adaptive': leave it out",
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
    "two dampings": ({"relative_damping": 0.1}, r"takes the place of damping: leave damping and adapt_damping out"),
    "second moments of another type": (
        {"second_moment_decay": 0.9},
        r"momentum_type='regular' has no second moments: leave second_moment_decay out, or write momentum_type=",
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
        r"(?s)damping_adaptation_decay=0\.9 has no effect without adapt_damping=True: leave it out\n.*_decrease_rho_.*"
        r"_increase_rho_.*min_damping=0\.001 .*l2_reg=0\.1 .*interval=2 .*update_damping_immediately=False has no",
    ),
    "an adapted damping of moments": (
        {"momentum_type": "eigen_moments", "damping": None, "min_damping": 1e-3},
        r"min_damping=0\.001 has no effect without adapt_damping=True",
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
    "qmodel with momentum": (
        {"momentum_type": "qmodel", "lr": None, "momentum": 0.9},
        r"finds its own momentum: leave momentum out, or write momentum_type='qmodel_fixedmu' to keep momentum=0\.9",
    ),
    "qmodel with a norm constraint": (
        {"momentum_type": "qmodel", "lr": None, "momentum": None, "norm_constraint": 0.1},
        r"norm_constraint bounds a given lr, and momentum_type='qmodel' has none: leave it out",
    ),
    "rescale without qmodel": (
        {"qmodel_update_rescale": 0.5},
        r"qmodel_update_rescale scales the steps of 'qmodel'; with momentum_type='regular' change lr",
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
    "l2": ({"l2_reg": float("nan")}, r"l2_reg is nan; it must not be negative"),
    "lr": ({"lr": -1.0}, r"lr is -1\.0; it must not be negative"),
    "momentum": ({"momentum": -0.9}, r"momentum is -0\.9; it must not be negative"),
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


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"KFAC needs a compiled module and got a Linear: write net = kfac_fx\.compile\(model, "
    ):
        KFAC(model(), lr=0.1, damping=0.1)


def test_a_second_optimizer_is_refused() -> None:
    net = compile(model(), loss="categorical")
    KFAC(net, lr=0.1, damping=0.1)
    with pytest.raises(AlreadyAttachedError, match="a KFAC is already attached to this module"):
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
    with pytest.raises(
        ValueError, match=r"^lr is a list; groups of parameters are an argument, KFAC\(net, params=...\)$"
    ):
        KFAC(compile(model(), loss="categorical"), [{"params": []}])  # type: ignore[arg-type]


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
    chosen = KFACOptions(compile(model(), loss="categorical"), **options)
    assert chosen.kind == kind
    expected = {"lr": options.get("lr", 1.0), "weight_decay": 0.0}
    momentum = {} if chosen.adaptive else {"momentum": 0.95 if chosen.eigen_moments else 0.9}
    assert chosen.of_groups == {**expected, **momentum}
    assert Schedule(chosen).intervals == ((10, 20, 5) if chosen.checked else (1, 10, 5))


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
    assert opt.options.kind == "adaptive"
    (reason,) = opt.fallbacks()
    assert reason.startswith("momentum_type is 'adaptive', because blocks have no eigenbasis: ") and "lstm" in reason
    assert KFAC(compile(model(), loss="categorical")).fallbacks() == []


@pytest.mark.parametrize(
    ("kind", "momentum"), [("eigen_moments", 0.95), ("adaptive", 0.9), ("qmodel_fixedmu", 0.9), ("qmodel", None)]
)
def test_every_momentum_type_has_its_own_momentum(kind: str, momentum: float | None) -> None:
    damping = None if kind == "eigen_moments" else 0.1
    assert KFACOptions(compile(model(), loss="categorical"), momentum_type=kind, damping=damping).momentum == momentum
