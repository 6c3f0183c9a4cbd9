"""Methods whose steps are timed side by side: torch's own, ours, and what else pip installs, each as it is to be used.

Every method takes the same batch in float32 and, where it knows schedules, statistics at every n-th step and inverses
at every m-th. Their settings are untuned: what is compared is what a step costs. Peers that are not installed are left
out by name: `pip install "kfac_fx[peers]"`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import torch
from torch import nn

import kfac_fx
from benchmarks.step_models import Problem
from kfac_fx.recording.emitted import CompiledForward

LR = 1e-8  # nobody gets anywhere: all are timed where they began, and no gradient vanishes into slow tiny numbers
Step = Callable[[], None]
Make = Callable[[Problem, int, int], Step]


@dataclass(frozen=True)
class Method:
    """make: (problem, statistics every, inverses every) -> a step. package: None for torch and us.

    parts: what a step may do beside its plain work, so "statistics", which cost at every n-th step, and "inverses", at
    every m-th. like: the method whose plain steps and inverses are its own, too.
    """

    make: Make
    package: str | None = None
    parts: tuple[str, ...] = ()
    like: str | None = None

    def version(self) -> str | None:
        """The version of the package; None if it is not installed."""
        try:
            return version(self.package or "torch")
        except PackageNotFoundError:
            return None


def training_step(problem: Problem, optimizer: torch.optim.Optimizer, backend: str = "eager") -> Step:
    run = problem.model if backend == "eager" else CompiledForward(problem.model, backend, problem.model)

    def step() -> None:
        optimizer.zero_grad()
        problem.backward(run)
        optimizer.step()

    return step


# --- torch ------------------------------------------------------------------------------------------------------------


def sgd(problem: Problem, n: int, m: int, backend: str = "eager") -> Step:
    return training_step(problem, torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=0.9), backend)


def adamw(problem: Problem, n: int, m: int, backend: str = "eager", **options: Any) -> Step:
    return training_step(problem, torch.optim.AdamW(problem.model.parameters(), lr=LR, **options), backend)


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(problem: Problem, n: int, m: int, backend: str = "eager", **options: Any) -> Step:
    with problem.autocast():
        net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind, backend=backend)
    regular = {"lr": LR, "damping": 1.0, "momentum_type": "regular", "cov_update_every": n, "invert_every": m}
    optimizer = kfac_fx.KFAC(net, **{**regular, **options})

    def step() -> None:
        optimizer.zero_grad()
        problem.backward(net)
        optimizer.step()

    return step


def comparison(problem: Problem, n: int, m: int) -> Step:
    """A comparison of the model's outputs with those of its graph: two forwards."""
    net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind)

    def step() -> None:
        net.differs((problem.x,), {})

    return step


# --- peers ------------------------------------------------------------------------------------------------------------


def asdl(problem: Problem, n: int, m: int, fisher_type: str) -> Step:
    """It knows no Bernoulli targets, and samples Gaussian ones there, which cost the same."""
    from asdl.precondition import KfacGradientMaker, PreconditioningConfig

    optimizer = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=0.9)
    config = PreconditioningConfig(
        data_size=len(problem.x),
        damping=1e-7,  # its default: added to the factors and taken off again, more would round them away
        ema_decay=0.05,  # the weight of the new, so that 0.95 is kept
        curvature_upd_interval=n,
        preconditioner_upd_interval=m,
    )
    loss_type = "cross_entropy" if problem.loss.kind == "categorical" else "mse"
    maker = KfacGradientMaker(problem.model, config, fisher_type=fisher_type, loss_type=loss_type)

    def step() -> None:
        optimizer.zero_grad()
        output = maker.setup_model_call(problem.model, problem.x)
        maker.setup_loss_call(problem.loss, output, problem.y)
        with mock.patch("torch.cuda.nvtx.range", lambda name: nullcontext()):  # its marks for a profiler need CUDA
            maker.forward_and_backward()
        optimizer.step()

    return step


def curvlinops(problem: Problem, n: int, m: int, fisher_type: str) -> Step:
    """Linear operators of one batch: there is no average over batches, which is a little less to do."""
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    supported = [module for module in problem.model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    parameters = [parameter for kind in supported for parameter in kind.parameters()]
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=0.9)
    loss = nn.CrossEntropyLoss() if problem.loss.kind == "categorical" else nn.BCEWithLogitsLoss()
    fisher: Any = None
    inverse: Any = None
    taken = 0

    def step() -> None:
        nonlocal fisher, inverse, taken
        if taken % n == 0:
            fisher = KFACLinearOperator(
                problem.model,
                loss,
                parameters,
                [(problem.x, problem.y)],
                check_deterministic=False,
                fisher_type=fisher_type,
                separate_weight_and_bias=False,
                num_per_example_loss_terms=1,
                num_data=len(problem.x),
            )
            fisher.compute_kronecker_factors()
        if taken % m == 0:
            inverse = KFACInverseLinearOperator(fisher, damping=1.0, use_heuristic_damping=True)
        optimizer.zero_grad()
        problem.backward()
        gradients = [parameter.grad for parameter in parameters]
        for parameter, direction in zip(parameters, inverse @ gradients, strict=True):
            parameter.grad = direction
        optimizer.step()
        taken += 1

    return step


def singd(problem: Problem, n: int, m: int) -> Step:
    """Free of inverses: their roots are updated with the statistics."""
    from singd.optim.optimizer import SINGD

    second = SINGD(problem.model, lr=LR, damping=1.0, T=n, lr_cov=1e-3, warn_unsupported=False)
    supported = {parameter for group in second.param_groups for parameter in group["params"]}
    others = [parameter for parameter in problem.model.parameters() if parameter not in supported]
    first = torch.optim.SGD(others, lr=LR, momentum=0.9) if others else None

    def step() -> None:
        problem.model.zero_grad()
        problem.backward()
        second.step()
        if first is not None:
            first.step()

    return step


def soap(problem: Problem, n: int, m: int) -> Step:
    """Statistics of gradients, at every step; m: its bases."""
    from pytorch_optimizer import SOAP

    return training_step(problem, SOAP(problem.model.parameters(), lr=LR, precondition_frequency=m))


SECOND_ORDER = ("statistics", "inverses")
OURS = "kfac_fx, sampled"


def first_order(backend: str) -> dict[str, Method]:
    """Under the same compiler as ours."""
    return {"sgd": Method(partial(sgd, backend=backend)), "adamw": Method(partial(adamw, backend=backend))}


def our_methods(backend: str) -> dict[str, Method]:
    def method(like: str | None = OURS, **options: Any) -> Method:
        return Method(partial(ours, backend=backend, **options), None, SECOND_ORDER, like)

    return {
        OURS: method(None),
        "kfac_fx, sampled 1/4": method(fraction=0.25),
        "kfac_fx, empirical": method(estimation_mode="empirical"),
        "kfac_fx, sampled, qmodel": method(None, lr=None, momentum=None, momentum_type="qmodel"),
    }


def peer(package: str, make: Make, parts: tuple[str, ...], like: str | None = None) -> Method:
    """One that may warn of what torch has deprecated since."""

    def silent(problem: Problem, n: int, m: int) -> Step:
        with quiet():
            noisy = make(problem, n, m)

        def step() -> None:
            with quiet():
                noisy()

        return step

    return Method(silent, package, parts, like)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


PEERS: dict[str, Method] = {
    "asdl, sampled": peer("asdfghjkl", partial(asdl, fisher_type="fisher_mc"), SECOND_ORDER),
    "asdl, empirical": peer("asdfghjkl", partial(asdl, fisher_type="fisher_emp"), SECOND_ORDER, "asdl, sampled"),
    "curvlinops, sampled": peer("curvlinops-for-pytorch", partial(curvlinops, fisher_type="mc"), SECOND_ORDER),
    "curvlinops, empirical": peer(
        "curvlinops-for-pytorch", partial(curvlinops, fisher_type="empirical"), SECOND_ORDER, "curvlinops, sampled"
    ),
    "singd, dense": peer("singd", singd, ("statistics",)),
    "soap": peer("pytorch-optimizer", soap, ("inverses",)),
}


def installed(methods: Mapping[str, Method]) -> tuple[dict[str, Method], dict[str, str]]:
    """Those that can run; and of the others, what to install."""
    found = {name: run for name, run in methods.items() if run.version() is not None}
    absent = {name: f"not installed: pip install {run.package}" for name, run in methods.items() if name not in found}
    return found, absent
