"""Everything that users do, on an accelerator without numbers: what it raises, and where the host waits."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import losses
from tests.devices.accelerator import NAME, Waits, accelerator
from tests.devices.models import CASES, SMALL, Recurrent, Small, mlp

MODES = ("gradients", "empirical", "curvature_prop", "exact", "exact_GGN")
Walk = Callable[[Waits], None]

# Where the host waits on purpose: once, to know what it could not go on without.
FIRST_STEP = {
    "loss_scale.py:factors",  # is the trained loss the registered one?
    "distributions.py:axis_of_log_probabilities",  # are the outputs such, so that gradients may have any sum?
    "loss_scale.py:axis_of_classes",
    "loss_scale.py:is_margin",
    "loss_scale.py:gradients_of",
    "loss_scale.py:rest_of_classes",
    "loss_scale.py:value",
    "loss_scale.py:ratio",
    "loss_scale.py:part_with_targets",
    "loss_scale.py:size",
    "loss_scale.py:weights_of_cases",  # does it weigh or leave out cases?
    "loss_scale.py:inverted_mask",  # is the mask nonzero at padding?
    "loss_scale.py:part_around",  # is much of it no log-likelihood?
    "step.py:take_step",  # without a first factor there is no inverse until the next is due
    "equivalence.py:difference_of_part",  # has a part of the batch the outputs of the batch?
    "batch_loss.py:repeats",  # once a capture: has a second forward the outputs of the first?
    "equivalence.py:against",  # once a capture: have torch's recurrent kernels the outputs of the graph?
    "step.py:choose_intervals",  # how many rows has a batch?
    "standstill.py:check_coverage",  # does it reach other parameters?
    "bases.py:have_equal_weights",  # have all blocks the same past?
    "checkpoint.py:on",  # numbers and random states, into the state by parameter
    "matrices.py:wait",  # of `HostCopy`: for the first decompositions, and whether a check of some steps ago was calm
    "block.py:update_inverses",  # products of a block without an inverse raise
}
MADE = {"estimator.py:__init__", "optimizer.py:__init__"}  # a damping that is a number goes to the device
PROOF = {  # on the first batch; `verify=False` does without
    "equivalence.py:check_equivalence",
    "equivalence.py:equal_up_to_rounding",
    "equivalence.py:close",
    "equivalence.py:difference",
    "equivalence.py:random_cotangents",
    "proof.py:prove",
    "proof.py:difference_in_words",
    "meeting_cases.py:revealing",
    "proof.py:proof_gradients",
    "captures.py:size_of_gradient",  # is the loss that forward returns a mean or a sum?
}
MEETING = {f"meeting_cases.py:{name}" for name in ("revealing", "halves", "keys_that_meet")}  # in the first exact batch
LEFT_OUT = {"recorder.py:tell_left_out"}  # once: has a case no target?
PADDED = {"output_losses.py:real_losses"}  # how many cases are real is a number of the batch
PACKED = {"the model"}  # torch wants the lengths on the host, and moves what it makes of them
BRANCHES = {"the model"}  # on values
DECOMPOSED = {"series.py:store"}  # whether to try again; `eigh` has waited already
SPECTRUM = {  # so it has here
    "matrices.py:rescued_eigh",  # whether to try again
    "groups.py:of",  # whether there is anything to decompose
    "block_diagonal.py:eigensystem",  # a basis of places is made on the host
}
SINGULAR = {  # determinants and inverses refuse blocks with eigenvalues of zero
    "spectrum.py:singular",
    "spectrum.py:not_numbers",
    "spectrum.py:is_far_from_singular",
}
BASES = {  # of "eigen_moments"
    "matrices.py:rescued_eigh",  # whether to try again; `eigh` has waited already
    "matrices.py:renewed_eigh",  # whether an iteration failed
    "bases.py:turn",  # whether there is a basis to iterate from
}


def on_device(small: Small) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device(NAME):
        return small.make(), small.inputs()


def all_on_device(tree: Any) -> None:
    values = tree.values() if isinstance(tree, dict) else tree
    for value in values:
        if isinstance(value, Tensor):
            assert value.device.type == NAME, f"a tensor on {value.device}"
        elif isinstance(value, (dict, list, tuple)):
            all_on_device(value)


def record(small: Small, waits: Waits, *, purpose: set[str]) -> None:
    """Every mode, then an estimator's whole life."""
    model, inputs = on_device(small)
    net = kfac_fx.compile(model, inputs, loss=small.loss, verify=False, **small.options)
    outputs, fisher = net.functional({}, inputs, {})
    targets = [loss.sample(None) for _, loss in net.losses(outputs, fisher, call=(inputs, {}))]
    given = targets[0] if len(targets) == 1 else targets
    waits.clear()
    for mode in MODES:
        moments = net.record(inputs, {}, mode=mode, targets=given if mode == "empirical" else None)
        all_on_device(moments.statistics)
    waits.only(purpose | MEETING | LEFT_OUT)
    outputs, pending = (
        net.record_in_training(inputs, {}) if not net.captures.first.capture.effects else (net(*inputs), None)
    )
    outputs.float().square().sum().backward()
    if pending is not None:
        all_on_device(pending.moments().statistics)
    roots = ("kron_series_2",)
    series = any(registration.approximation in roots for registration in net.registrations)
    waits.only(purpose)
    estimator = kfac_fx.FisherEstimator(
        net, damping=0.1, exps=(-1, -0.5, 0.5), compute_cholesky=not series, compute_cholesky_inverse=not series, seed=0
    )
    if purpose is PACKED:  # the model itself packs its batch, which needs the lengths and not their shape alone
        estimator.outputs.due = lambda: False
    estimator.update_covariances(*inputs)
    estimator.update_inverses()
    waits.only(purpose | FIRST_STEP | MADE)
    vector = {name: torch.ones_like(net.get_parameter(name)) for name in dict(net.named_parameters())}
    vector = {name: vector[name] for name in estimator.parameters}
    estimator.update_covariances(*inputs)
    estimator.update_inverses()
    for root in (-1.0, -0.5, 0.5):
        all_on_device(estimator.multiply_matpower(root, vector))
    all_on_device(estimator.multiply(vector))
    if not series:
        all_on_device(estimator.multiply_cholesky(vector))
        all_on_device(estimator.multiply_cholesky_inverse(vector, transpose=True))
    for block in estimator.blocks.values():
        if block.registration.layer != "scale_and_shift":
            all_on_device([block.full_fisher_block()])
    waits.only(purpose)
    spectrum = estimator.spectrum(scale=CASES)
    waits.only(purpose | SPECTRUM)
    all_on_device([spectrum.log_determinant(), spectrum.trace(-1), spectrum.eigenvalues(), spectrum.diagonal(-1)])
    all_on_device([spectrum.multiply_inverse(vector), spectrum.sample(2)])
    all_on_device(
        spectrum.corrected([{name: tensor.expand(2, *tensor.shape) for name, tensor in vector.items()}]).diagonal()
    )
    waits.only(purpose | SINGULAR)
    with without_numbers():
        estimator.load_state_dict(estimator.state_dict())


@contextmanager
def without_numbers() -> Iterator[None]:
    """A state is checked by its numbers, and this device has none."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("kfac_fx.linalg.arguments.wrong_values", return_value=None))
        stack.enter_context(mock.patch("kfac_fx.fisher.block.BlockOperator.contradicts", return_value=False))
        stack.enter_context(mock.patch("kfac_fx.optim.checkpoint.refuse_other_choices"))
        stack.enter_context(mock.patch("kfac_fx.optim.checkpoint.further_faults", return_value=[]))
        yield


def train(small: Small, waits: Waits, *, options: dict[str, Any], cast: torch.dtype | None = None) -> None:
    """Five steps: the first may wait, the others not, except for new bases.

    A batch without numbers counts as one with NaN, after which the exact modes look again for cases that meet.
    """
    purpose = BASES if options.get("momentum_type") == "eigen_moments" else set()
    purpose = MEETING if options.get("estimation_mode") == "exact" else purpose
    model, inputs = on_device(small)
    net = kfac_fx.compile(model, inputs, loss=small.loss, verify=False, **small.options)
    labels = torch.zeros(CASES, dtype=torch.int64, device=NAME)
    optimizer = kfac_fx.KFAC(net, **{"damping": 0.1, "invert_every": 2, "seed": 0, **options})

    def loss() -> Tensor:
        with torch.autocast(NAME, cast or torch.bfloat16, enabled=cast is not None):
            return F.cross_entropy(net(*inputs), labels)

    for number in range(5):
        waits.clear()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step(evaluate=loss)
        burned = options.get("num_burnin_steps", 0)
        waits.only(purpose | FIRST_STEP if number <= burned else purpose)
        all_on_device(optimizer.state.values())
    all_on_device([optimizer.damping, optimizer.skipped, optimizer.rho, optimizer.predicted_change])
    with without_numbers():
        optimizer.load_state_dict(optimizer.state_dict())


def prove(waits: Waits) -> None:
    model, inputs = on_device(SMALL["image"])
    waits.clear()
    kfac_fx.compile(model, inputs, loss="categorical")
    waits.only(PROOF)


def collect(waits: Waits) -> None:
    """Registrations by hand, and factors of tensors."""
    model, inputs = on_device(Small(mlp, lambda: (torch.randn(CASES, 4),)))
    collection = kfac_fx.LayerCollection(kfac_fx.capture(model, inputs))
    collection.register_categorical_predictive_distribution(logits=collection.node("linear_1"), seed=0)
    collection.auto_register_layers()
    waits.clear()
    block = next(iter(collection.fisher_blocks.values()))
    block.register_inverse()
    block.instantiate_factors(([torch.ones(CASES, 5, device=NAME)],), 0.1, (inputs[0],))
    all_on_device(block.multiply_inverse(tuple(torch.ones_like(model.get_parameter(name)) for name in block.params)))
    waits.only(FIRST_STEP | {"groups.py:split_damping"})  # its damping is a number


def distributions(waits: Waits) -> None:
    """Every loss, sampled with a seed and with a generator, and multiplied."""
    x, positive = torch.randn(CASES, 3, device=NAME), torch.ones(CASES, 3, device=NAME)
    waits.clear()
    for loss in (
        losses.Categorical(x, seed=0),
        losses.OnehotCategorical(x, seed=0),
        losses.Normal(x, seed=0),
        losses.NormalMeanVariance(x, positive, seed=0),
        losses.MultiBernoulli(x, seed=0),
    ):
        all_on_device([loss.evaluate_on_sample(), loss.sample(torch.Generator(NAME))])
        v = torch.ones_like(loss.inputs)
        all_on_device([loss.multiply_fisher(v), loss.multiply_fisher_factor_transpose(v)])
    waits.only(set())


# --- that the walks can fail ------------------------------------------------------------------------------------------


def mix(waits: Waits) -> None:
    torch.ones(2, device=NAME) + torch.ones(2)


def read(waits: Waits) -> None:
    torch.ones(2, device=NAME).sum().item()
    waits.only(set())


def move(waits: Waits) -> None:
    torch.tensor([1.0, 2.0], device=NAME)
    waits.only(set())


def draw(waits: Waits) -> None:
    torch.rand(2, device=NAME, generator=torch.Generator())


TRAINED: dict[str, dict[str, Any]] = {
    "adaptive": {"momentum_type": "adaptive", "damping_adaptation_interval": 2},
    "regular": {"lr": 0.1, "norm_constraint": 1e-3, "weight_decay": 1e-4},
    "adam": {"lr": 0.1, "momentum_type": "adam", "num_burnin_steps": 1},
    "qmodel": {"momentum": None, "momentum_type": "qmodel", "adapt_damping": True, "damping_adaptation_interval": 2},
    "qmodel_fixedmu": {"momentum_type": "qmodel_fixedmu"},
    "eigen_moments": {"lr": 0.1, "damping": None, "momentum_type": "eigen_moments"},
    "adapted": {"lr": 0.1, "adapt_damping": True, "damping_adaptation_interval": 1},
    "exact": {"lr": 0.1, "estimation_mode": "exact", "fraction": 0.5},
}
PURPOSES = {"padding": PADDED, "packed steps": PACKED, "series": DECOMPOSED, "divided": BRANCHES}
PLAIN = Small(mlp, lambda: (torch.randn(CASES, 4),))

WALKS: dict[str, Walk] = {
    **{f"record: {name}": partial(record, small, purpose=PURPOSES.get(name, set())) for name, small in SMALL.items()},
    **{f"train: {name}": partial(train, SMALL["image"], options=options) for name, options in TRAINED.items()},
    "train: recurrent": partial(
        train,
        Small(Recurrent, lambda: (torch.randn(CASES, 5, 3),)),
        options={"lr": 0.1, "damping": None, "momentum_type": "eigen_moments"},
    ),
    **{f"train a plain model: {name}": partial(train, PLAIN, options=TRAINED[name]) for name in ("adaptive", "qmodel")},
    "train: empirical": partial(train, PLAIN, options={"lr": 0.1, "estimation_mode": "empirical"}),
    "train: bfloat16": partial(train, PLAIN, options={"lr": 0.1}, cast=torch.bfloat16),
    "train: float16": partial(train, PLAIN, options={"lr": 0.1}, cast=torch.float16),
    "the proof": prove,
    "a collection": collect,
    "distributions": distributions,
}
QUICK = (
    "record: wide sides", "train a plain model: adaptive", "train a plain model: qmodel", "train: empirical",
    "the proof", "a collection", "distributions",
)  # fmt: skip
WRONG: dict[str, Walk] = {"two devices": mix, "a number read": read, "numbers moved": move, "a generator": draw}


def outcome(walk: Walk) -> str:
    """The error in one line; "" if there was none."""
    try:
        with accelerator() as waits:
            walk(waits)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames if "/kfac_fx/" in f.filename]
        return f"{type(error).__name__}: {str(error).splitlines()[0]} ({', '.join(places[-3:])})"
    return ""
