"""Steps that cannot be made and parameters that stand still are said once, with cause and remedy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import KFAC, StalledWarning
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.optim.groups import FlatParameters, longest_squared
from kfac_fx.optim.standstill import StandstillWatch, largest
from tests.tables import pairs


def made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[CompiledModule, KFAC, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    x, y = torch.randn(16, 3).to(dtype), torch.arange(16) % 2
    net = kfac_fx.compile(model, (x,), loss="categorical")
    return net, KFAC(net, **{"lr": 0.1, "damping": 0.1, "momentum_type": "regular", "seed": 0, **options}), x, y


def step(net: CompiledModule, opt: KFAC, x: Tensor, y: Tensor, scale: float = 1.0, **given: Any) -> None:
    opt.zero_grad()
    (F.cross_entropy(net(x), y) * scale).backward()
    opt.step(**given)


def told(opt: KFAC, run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(entry.message) for entry in caught if entry.category is StalledWarning]


def test_a_batch_that_is_not_finite_is_told_once_at_the_next_look() -> None:
    net, opt, x, y = made()
    infinite = x.clone()
    infinite[0, 0] = math.inf

    def train() -> None:
        for number in range(1, 24):
            step(net, opt, infinite * 0 if number in (4, 13) else x, y)

    assert told(opt, train) == [
        "1 step of steps 3 to 5 changed nothing, because the gradient or the loss was not finite, or a batch had no "
        "cases. Look for NaN and infinity in the inputs, the targets and the parameters, and for squares that "
        "overflow. If the first steps were made, they were too long: write a smaller lr or a larger damping, and begin "
        "anew. In float16, use autocast with a GradScaler, or bfloat16. optimizer.skipped counts such steps."
    ]
    assert opt.skipped == 2


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        ({"loss": math.nan}, {}, "step 1 changed nothing, because the loss is not finite. Look for NaN"),
        (
            {"loss": 1.0},
            {"lr": 1e30},
            "step 1 changed nothing, because the update is not finite, or so long that its sq",
        ),
        (
            {},
            {"weight_decay": 1e30},
            "because the update is not finite, or so long that its square is not. Write a small",
        ),
    ],
)
def test_the_cause_is_told(given: dict[str, Any], options: dict[str, Any], text: str) -> None:
    net, opt, x, y = made(**options)
    before = [parameter.clone() for parameter in net.parameters()]
    with pytest.warns(StalledWarning, match=text) as caught:
        for _ in range(12):
            step(net, opt, x, y, **given)
    assert len(caught) == 1 and opt.skipped == 12
    assert all(map(torch.equal, before, net.parameters()))


def test_a_gradient_that_is_not_finite_is_told_in_the_first_step() -> None:
    net, opt, x, y = made()
    with pytest.warns(StalledWarning, match="step 1 changed nothing, because the gradient is not finite. Look for"):
        step(net, opt, x * math.nan, y)


@pairs(("rule", ["regular", "eigen_moments", "adaptive", "qmodel"]), ("dtype", [torch.float32, torch.bfloat16]))
@pytest.mark.filterwarnings("ignore:lr=1e-30 is of the size of Adam's")
def test_parameters_that_stand_still_are_told(rule: str, dtype: torch.dtype) -> None:
    options = {"qmodel": {"lr": None, "qmodel_update_rescale": 1e-30}, "eigen_moments": {"damping": None, "lr": 1e-30}}
    net, opt, x, y = made(dtype, momentum_type=rule, **options.get(rule, {"lr": 1e-30}))
    text = "no parameter has changed in steps 1, 2 and 5, though gradients and lr are not zero: the updates are small"
    with pytest.warns(StalledWarning, match=text) as caught:
        for _ in range(10):
            step(net, opt, x, y)
    assert len([entry for entry in caught if entry.category is StalledWarning]) == 1


def test_gradients_of_zero_are_told_and_an_lr_of_zero_is_not() -> None:
    net, opt, x, y = made()
    text = "no parameter has changed in steps 1, 2 and 5, because all gradients are zero. If the loss is not at its min"
    with pytest.warns(StalledWarning, match=text):
        for _ in range(5):
            step(net, opt, x, y, scale=0.0)
    net, opt, x, y = made(lr=0.0)
    assert told(opt, lambda: [step(net, opt, x, y) for _ in range(12)]) == []


def test_gradients_of_zero_behind_other_steps_are_those_of_a_minimum() -> None:
    net, opt, x, y = made()
    assert told(opt, lambda: [step(net, opt, x, y, scale=float(number < 3)) for number in range(60)]) == []
    assert opt.skipped == 57 and opt.counter == 3


def test_a_batch_in_which_every_target_is_ignored_is_told_once() -> None:
    """It was skipped without a word."""
    net, opt, x, y = made()

    def train() -> None:
        for number in range(1, 24):
            opt.zero_grad()
            targets = torch.full_like(y, -100) if number in (4, 8) else y
            (F.cross_entropy(net(x), targets, reduction="sum") / len(y)).backward()
            opt.step()

    (text,) = told(opt, train)
    assert text.startswith(
        "1 of the first 5 steps changed nothing, because all gradients were zero: no case of the batch"
    )
    assert opt.skipped == 2 and opt.undone == 0


def test_a_few_batches_without_a_gradient_are_no_standstill() -> None:
    """A loss of triplets is zero where all are far enough apart. The look of step 100 sees it."""
    net, opt, x, y = made()
    assert told(opt, lambda: [step(net, opt, x, y, scale=float(number != 60)) for number in range(110)]) == []
    assert opt.skipped == 1


def test_steps_that_checks_undo_and_those_of_a_loaded_state_are_no_failures() -> None:
    net, opt, x, y = made(damping=None, momentum_type="eigen_moments")
    state = opt._step_state
    for number in range(12):
        step(net, opt, x, y)
        if number == 5:  # as checks count them
            state.skipped += 2
            state.undone += 2
    opt.load_state_dict(opt.state_dict())
    assert state.standstill.failed == 0 and state.undone == opt.undone == 2
    for _ in range(10):
        step(net, opt, x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_move_may_be_as_long_as_a_number_of_the_parameters_with_a_finite_square(dtype: torch.dtype) -> None:
    net, opt, x, y = made(torch.float32 if dtype is torch.float16 else dtype)
    step(net, opt, x, y)
    of_blocks, _ = opt._step_state.vectors.of(opt.param_groups, opt.state)
    assert isinstance(of_blocks, FlatParameters)
    flat = FlatParameters(**{**vars_of(of_blocks), "longest_squared": longest_squared(frozenset([dtype]))})
    wide = torch.promote_types(dtype, torch.float32)
    longest = min(torch.finfo(dtype).max, math.sqrt(torch.finfo(wide).max))
    for length, fits in ((0.99, True), (1.01, False), (math.inf, False), (math.nan, False), (0.0, True)):
        move = torch.zeros(of_blocks.g.numel(), dtype=wide)
        move[1] = length * longest
        assert bool(flat.may_be_added(move)) is fits, length


def vars_of(flat: FlatParameters) -> dict[str, Any]:
    return {name: getattr(flat, name) for name in FlatParameters.__dataclass_fields__}


def test_the_entries_with_the_largest_gradients_are_compared() -> None:
    """Most rows of an embedding have no gradient in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 3))
    words = torch.randint(0, 5000, (8,))
    net = kfac_fx.compile(model, (words,), loss="categorical")
    opt = KFAC(net, lr=0.1, damping=0.1, momentum_type="regular", momentum=0.0)
    for number in range(12):
        step(net, opt, words + number, torch.arange(8) % 3)
    gradient = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, -7.0]])
    places, entries = largest(torch.arange(6.0).view(3, 2).t(), gradient)
    assert places.tolist() == [1, 5] and entries.tolist() == [2.0, 5.0]


def test_factors_that_underflow_have_the_damping_of_zeros() -> None:
    """A softmax that is nearly certain has a G of the smallest numbers, whose part would be zero."""
    net, opt, x, y = made(damping=None, momentum_type="eigen_moments")
    step(net, opt, x, y)
    (group, *_) = opt.estimator.groups
    smallest = torch.tensor([0.0, 1e-45, 1e-38, 1e-30])
    expected = torch.tensor([1.0, 1.0, 1.0, 0.003 * 1e-30])
    torch.testing.assert_close(group.part_of_mean(smallest), expected)


# --- trainings that diverge -------------------------------------------------------------------------------------------


def regression(
    steps: int, targets: float = 1.0, zeros: bool = False, factor: float = 1.0, **options: Any
) -> tuple[list[float], KFAC]:
    """The losses of a training by the squared error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    if zeros:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    x = torch.randn(16, 3).double()
    y, losses = targets * x[:, :2].sin(), []
    net = kfac_fx.compile(model, (x,), loss="normal")
    opt = KFAC(net, **{"momentum_type": "regular", "seed": 0, "damping": 0.1, **options})
    for _ in range(steps):
        opt.zero_grad()
        loss = factor * (net(x) - y).square().sum(-1).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, opt


@pytest.mark.parametrize("rule", ["regular", "adam"])
def test_a_training_that_diverges_is_told_once(rule: str) -> None:
    with pytest.warns(StalledWarning) as caught:
        losses, opt = regression(24, momentum_type=rule, lr=10.0)
    assert losses[-1] > 1e6 * losses[0] and math.isfinite(losses[-1]) and opt.skipped == 0
    (text,) = [str(entry.message) for entry in caught]
    assert text == (
        "the training diverges: at step 5 gradients and parameters are more than 10 times as large as at first, and "
        "their product, which grows as the loss does, is more than 1,000,000 times as large. If there was a "
        "LossScaleWarning, do what it says. Else the steps are too long: write a smaller lr or a larger damping. Then "
        "begin anew."
    )


def test_checks_of_another_loss_than_the_trained_one_do_not_hide_that_it_diverges() -> None:
    """They compute the change of the registered loss, which a factor of the trained one makes fall."""
    with pytest.warns() as caught:
        losses, _ = regression(24, momentum_type="adaptive", damping=None, factor=100.0)
    assert losses[-1] > 1e6 * losses[0] and math.isfinite(losses[-1])
    first, then = [str(entry.message) for entry in caught]
    assert first.startswith("the trained loss is 100 times") and then.startswith("the training diverges: at step ")


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.3, "targets": 1e8},  # the last layer grows 10^8 times
        {"lr": 0.3, "zeros": True},
        {"lr": 0.3, "zeros": True, "targets": 1e8},
        {"lr": 10.0, "damping": 1e4},
        {"momentum_type": "adaptive", "damping": None, "zeros": True, "targets": 1e4},
        {"momentum_type": "eigen_moments", "damping": None, "zeros": True, "targets": 1e8},
    ],
)
def test_a_training_that_grows_well_is_not_told(given: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", StalledWarning)
        losses, _ = regression(60, **given)
    assert losses[-1] < losses[0]


def test_a_batch_that_is_not_finite_is_no_training_that_diverges() -> None:
    watch = StandstillWatch()
    parameter = nn.Parameter(torch.ones(3))
    told_of = []
    for size in (math.inf, 0.0, 1.0, math.inf, 9.0, 1e4):
        parameter.grad = torch.full((3,), size)
        parameter.data.fill_(max(min(size, 1e4), 1.0))
        watch.tried = 0
        watch.begin([parameter])
        told_of.append(bool(watch.diverged(parameter)))
    assert told_of == [False, False, False, False, False, True]
    watch.forget(0, 0)
    watch.tried = 0
    watch.begin([parameter])
    assert not watch.diverged(parameter)
