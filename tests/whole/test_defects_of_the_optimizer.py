"""Where the optimizer of TensorFlow's K-FAC goes wrong; see `tests/whole/test_defects.py`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfac_fx
from kfac_fx.compiled.layer_collection import LayerCollection, check_geometry
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import Rule
from kfac_fx.optim.rules import RULES
from tests.runtime.slow_kfac import SlowKFAC, batch, loss_of, mlp


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


WITH_OTHERS = ("Batch.__init__", "KFAC.__init__")  # those of the forward, and those of the rule, which refuses others
WORKERS = ("_layer_block", "register_loss_function")  # what those call that do the work of a declared method
OPTIONS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.1},
    "damping": {"damping": 1.0},
    "momentum": {"momentum": 0.5},
    "momentum_type": {"momentum_type": "adam"},
    "cov_ema_decay": {"cov_ema_decay": 0.1},
    "cov_update_every": {"cov_update_every": 2},
    "invert_every": {"invert_every": 5},
    "num_burnin_steps": {"num_burnin_steps": 1},
    "norm_constraint": {"norm_constraint": 1e-3},
    "norm_constraint_form": {"norm_constraint": 1e-3, "norm_constraint_form": "gradient"},
    "weight_decay": {"weight_decay": 0.1},
    "precon_damping_mult": {"precon_damping_mult": 3.0},
    "estimation_mode": {"estimation_mode": "exact"},
    "fraction": {"fraction": 0.5},
    "seed": {"seed": 1},
    "adapt_damping": {"adapt_damping": True},
}
ADAPTED = {"adapt_damping": True, "damping_adaptation_interval": 1}
ADAPTING: dict[str, dict[str, Any]] = {
    "damping_adaptation_interval": {"damping_adaptation_interval": 2},
    "damping_adaptation_decay": {"damping_adaptation_decay": 0.5},
    "damping_decrease_rho_threshold": {"damping_decrease_rho_threshold": 100.0},
    "damping_increase_rho_threshold": {"damping_increase_rho_threshold": 0.75, "damping_decrease_rho_threshold": 100.0},
    "min_damping": {"min_damping": 0.2},
    "l2_reg": {"l2_reg": 0.2},
}


def trained(**options: Any) -> list[float]:
    """The parameters and the damping after five steps."""
    net = kfac_fx.compile(mlp(), loss="categorical")
    opt = kfac_fx.KFAC(net, **{"lr": 0.3, "damping": 0.1, "seed": 0, "invert_every": 1, **options})
    for number in range(5):
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step(evaluate=loss_of(net, x, y))
    return [*torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(), opt.damping.item()]


def test_inverses_are_where_the_parameters_are_and_all_of_them_are_new() -> None:
    """The asynchronous optimizer takes lists of devices and drops them, and what should cap the inverses a round at ten
    makes ten the least."""
    net, x = (
        kfac_fx.compile(nn.Sequential(*(nn.Linear(n + 2, n + 3) for n in range(13))), loss="normal"),
        torch.randn(4, 2),
    )
    for option in ("cov_devices", "inv_devices"):
        with pytest.raises(TypeError, match=f"FisherEstimator has no option '{option}'"):
            kfac_fx.FisherEstimator(net, **{option: ["cpu:0"]})
        with pytest.raises(TypeError, match=rf"does not have these options:\n  {option}\."):
            kfac_fx.KFAC(net, lr=0.1, damping=0.1, **{option: ["cpu:0"]})
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact", damping=0.1)
    est.update_covariances(x)
    est.update_inverses()
    v = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
    torch.testing.assert_close(est.multiply(est.multiply_inverse(v)), v, rtol=1e-3, atol=1e-3)
    for block in est.blocks.values():
        for name, tensor in block.state().items():
            assert name == "ready" or tensor.device == net.get_parameter(block.parameters[0]).device


def test_no_argument_is_taken_and_ignored() -> None:
    """`distribute_transformations` is an argument of a placement that nothing reads. Here every public function reads
    all of its arguments, and no constructor takes unknown ones. KFAC hands its arguments to `KFACOptions`, so those
    that it uses itself stand twice in it. Those of a method that is declared in the table of a LayerCollection are read
    by the functions that do its work."""
    net = kfac_fx.compile(mlp(), loss="categorical")
    for option in ("distribute_transformations", "placement_strategy"):
        with pytest.raises(TypeError, match=rf"does not have these options:\n  {option}\."):
            kfac_fx.KFAC(net, lr=0.1, damping=0.1, **{option: True})
    ignored: list[str] = []
    for name, function in public_functions():
        declared = hasattr(function, "run")
        workers = [getattr(LayerCollection, work) for work in (function.run, *WORKERS)] if declared else [function]
        read = set().union(*(names_read(inspect.unwrap(worker)) for worker in (*workers, check_geometry)))
        if function is kfac_fx.KFAC.__init__:
            read = {
                name for name, count in Counter(all_names(inspect.unwrap(function))).items() if count > 1
            } | options_read()
            read |= {"momentum_type", "of_rule"}.intersection(all_names(KFACOptions.of))
        parameters = inspect.signature(function).parameters.values()
        ignored += [
            f"{name}({parameter.name})" for parameter in parameters if parameter.name not in {*read, "self", "cls"}
        ]
        unknown = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        assert not (name.endswith("__init__") and unknown) or name in WITH_OTHERS, name
    # The one that torch hands to every hook of a join, and that of every function that makes rows.
    assert ignored == ["KFAC.join_hook(kwargs)", "as_rows(attrs)"]


def options_read() -> set[str]:
    """The options that the optimizer reads, as `options.lr`, or `self.lr` in `KFACOptions`."""
    return attributes_read("*.py", ("options", "self")) & {field.name for field in fields(KFACOptions)}


def attributes_read(files: str, owners: Sequence[str]) -> set[str]:
    """The attributes that files in optim/ read of objects with one of these names."""
    folder = Path(kfac_fx.__file__).parent / "optim"
    trees = [ast.parse(path.read_text()) for path in folder.glob(files)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    reads = [node for node in nodes if isinstance(node.ctx, ast.Load)]
    return {node.attr for node in reads if ast.unparse(node.value).split(".")[-1] in owners}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_option_of_a_rule_is_read(rule: type[Rule]) -> None:
    """In a module of a class that has it, or in the common ones, which know `overhead` and
    `damping_adaptation_interval` of rules with checks."""
    owners = [base for base in rule.__mro__ if base.__module__.startswith("kfac_fx.")]
    files = {Path(inspect.getfile(base)).relative_to(Path(kfac_fx.__file__).parent / "optim") for base in owners}
    read = set().union(*(attributes_read(str(file), ("self",)) for file in files), attributes_read("*.py", ("rule",)))
    assert {field.name for field in fields(rule)} - read == set()


def names_read(function: Any) -> set[str]:
    return set(all_names(function))


def all_names(function: Any) -> list[str]:
    """The names of variables in a function, each as often as it stands there."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return [node.id for line in tree.body for node in ast.walk(line) if isinstance(node, ast.Name)]


def public_functions() -> Iterator[tuple[str, Any]]:
    """The functions of the package, and the methods of its classes that stand in a file."""
    for name in kfac_fx.__all__:
        one = getattr(kfac_fx, name)
        owners = (
            [owner for owner in inspect.getmro(one) if owner.__module__.startswith("kfac_fx")]
            if inspect.isclass(one)
            else []
        )
        found = [(name, one)] if inspect.isfunction(one) else []
        for owner in owners:
            functions = ((key, getattr(value, "__func__", value)) for key, value in vars(owner).items())
            found += [(f"{name}.{key}", value) for key, value in functions if key == "__init__" or key[0] != "_"]
        for text, function in found:
            if inspect.isfunction(function) and not function.__code__.co_filename.startswith("<"):
                yield text, function


def test_every_option_does_something() -> None:
    plain, adapted = trained(), trained(**ADAPTED)
    assert trained() == plain
    ignored = [name for name, options in OPTIONS.items() if name != "adapt_damping" and trained(**options) == plain]
    ignored += [name for name, options in ADAPTING.items() if trained(**{**ADAPTED, **options}) == adapted]
    assert ignored == [] and adapted != plain


def test_nothing_is_set_through_global_constants_and_unknown_options_are_refused() -> None:
    """Constants that are read at import time cannot be changed any more, and an unknown PI_TYPE damps with None."""
    net = kfac_fx.compile(mlp(), loss="categorical")
    with pytest.raises(TypeError, match=r"does not have these options:\n  pi_type\."):
        kfac_fx.KFAC(net, lr=0.1, damping=0.1, pi_type="tracenom")
    with pytest.raises(TypeError, match="FisherEstimator has no option 'init_inverses_at_zero'"):
        kfac_fx.FisherEstimator(net, init_inverses_at_zero=False)  # type: ignore[call-arg]
    assert not [name for name in vars(kfac_fx) if name.startswith("set_") and name != "set_default_layer_collection"]


def test_the_default_decay_of_the_factors_is_per_step_too() -> None:
    """Only a decay that is passed is raised to the power of `cov_update_every`."""
    for given in ({}, {"cov_ema_decay": 0.95}):
        net = kfac_fx.compile(mlp(), loss="categorical")
        opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, cov_update_every=4, **given)  # type: ignore[arg-type]
        assert opt.estimator.cov_ema_decay == 0.95**4


def test_a_loss_that_adapting_needs_is_asked_for_by_name() -> None:
    """`minimize` does not hand the loss on as documented, and a missing training batch is noticed nowhere."""
    net = kfac_fx.compile(mlp(), loss="categorical")
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, **ADAPTED)  # type: ignore[arg-type]
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(
        ValueError, match=r"needs the loss after the update, every 1 steps: call step\(evaluate=closure\)"
    ):
        opt.step()


@pytest.mark.parametrize("momentum_type", ["adam", "regular", "qmodel"])
def test_the_predicted_change_is_that_of_the_step_that_is_made(momentum_type: str) -> None:
    """The prediction forgets weight decay, and of "adam" it is another quadratic than that of the clipped step."""
    options: dict[str, Any] = {"momentum_type": momentum_type, "weight_decay": 0.3, **ADAPTED}
    options |= {"momentum": None} if momentum_type == "qmodel" else {"lr": 0.3, "norm_constraint": 1e-3}
    net, slow = kfac_fx.compile(mlp(), loss="categorical"), SlowKFAC(mlp(), damping=0.1, **options)
    opt = kfac_fx.KFAC(net, damping=0.1, seed=0, **options)
    for number in range(5):
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step(evaluate=loss_of(net, x, y))
        slow.step(x, y, F.cross_entropy)
        torch.testing.assert_close(opt.predicted_change.item(), slow.predicted)
