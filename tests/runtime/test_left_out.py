"""Cases without a target, whose rows are in input factors: they are told, and only they."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import FisherEstimator
from tests.tables import pairs
from tests.whole.divided import Branching


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.first(x)))
        return logits


class Attending(Net):
    """Every position reads those before it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        logits: Tensor = self.head((hidden @ hidden.mT).masked_fill(~seen, -1e9).softmax(-1) @ hidden)
        return logits


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x).flatten(0, -2), y.flatten())


def targets(*shape: int, kept: int) -> Tensor:
    y = torch.randint(3, shape)
    y.view(-1)[kept:] = -100
    return y


def told(net: kfac_fx.CompiledModule, mode: str, *batches: tuple[Any, ...]) -> list[str]:
    """batches: (arguments, targets)."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        estimator = FisherEstimator(net, estimation_mode=mode)
        for *args, of_batch in batches:
            estimator.update_covariances(*args, targets=of_batch, fold=False)
        estimator.fold()
    return [str(warning.message) for warning in seen]


@pairs(("build", [Net, Branching]), ("shape", [(12,), (12, 5)]), ("mode", ["gradients", "empirical", "exact"]))
def test_targets_from_outside_leave_rows_in_input_factors(
    build: Callable[[], nn.Module], shape: tuple[int, ...], mode: str
) -> None:
    x, net = torch.randn(*shape, 4), kfac_fx.compile(build(), (torch.randn(*shape, 4),), loss="categorical")
    whole, part = targets(*shape, kept=1000), targets(*shape, kept=9)
    cases = whole.numel()
    (message,) = told(net, mode, (x, whole), (x, part), (x, part))
    blocks = len(net.registrations)
    if mode == "empirical":  # which draws no targets: torch's random stream is the user's
        other, before = kfac_fx.compile(build(), (x,), loss="categorical"), torch.get_rng_state()
        assert len(told(other, mode, (x, part))) == 1 and torch.equal(torch.get_rng_state(), before)
    assert message.startswith(
        f"{cases - 9} of {cases} cases of the loss have no target, and the input factors A of {blocks} blocks are "
        f"means over all of their rows: {100 * (cases - 9) / cases:.0f}% of those of "
    )
    assert "Leave cases without a target out of the batch; if they are positions, name them with compile(" in message


@pairs(("build", [Net, Branching]), ("shape", [(12,), (12, 5)]))
def test_losses_in_forward_leave_rows_in_where_no_mask_fits(
    shape: tuple[int, ...], build: Callable[[], nn.Module]
) -> None:
    x, y = torch.randn(*shape, 4), targets(*shape, kept=9)
    net = kfac_fx.compile(WithLoss(build()), (x, y))
    messages = told(net, "exact", (x, y, None))
    estimator = FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x, y)
    rows = torch.cat([x.flatten(0, -2)[:9], torch.ones(9, 1)], 1)
    wanted = rows.T @ rows / 9
    first = estimator.blocks[net.registrations[0].parameters].factors["A"].value[0]
    assert bool(messages) is not torch.allclose(first, wanted, atol=1e-6)


def test_rows_that_cases_with_a_target_read_are_no_such_rows() -> None:
    x, net = torch.randn(7, 5, 4), kfac_fx.compile(Attending(), (torch.randn(7, 5, 4),), loss="categorical")
    prompt = torch.randint(3, (7, 5))
    prompt[:, :3] = -100
    (message,) = told(net, "exact", (x, prompt))  # the head's rows have no gradient, the others have
    assert "of 1 block are" in message and "60% of those of head.weight, head.bias" in message
    behind = torch.randint(3, (7, 5))
    behind[:, 3:] = -100
    (message,) = told(kfac_fx.compile(Attending(), (x,), loss="categorical"), "exact", (x, behind))
    assert "of 2 blocks are" in message and "40% of those of" in message


@pytest.mark.parametrize("approximation", ["full", "diagonal"])
def test_blocks_without_input_factors_have_no_such_rows(approximation: str) -> None:
    x = torch.randn(12, 4)
    net = kfac_fx.compile(Net(), (x,), loss="categorical", approximations={"*": approximation})
    assert told(net, "exact", (x, targets(12, kept=9))) == []


def test_masked_rows_are_no_such_rows() -> None:
    x, y = torch.randn(12, 5, 4), targets(12, 5, kept=9)
    x[..., 0] = torch.where(y < 0, 0, x[..., 0].abs() + 1)
    net = kfac_fx.compile(Net(), (x,), loss="categorical", padding_mask=lambda x: x[..., 0] != 0)
    assert told(net, "exact", (x, y)) == []


@pytest.mark.parametrize("sizes", ["of the inputs", "of the targets", "of the targets' own mask", "in pieces"])
def test_a_mask_in_the_sizes_of_the_inputs_is_followed_as_the_warning_says(sizes: str) -> None:
    class Masked(Net):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(x).flatten(0, 1)
            if sizes == "in pieces":
                pieces = zip(logits.split(9), y.flatten().split(9), mask.flatten().split(9), strict=True)
                kept = [(F.cross_entropy(*piece, reduction="none") * of_piece).sum() for *piece, of_piece in pieces]
                return torch.stack(kept).sum() / mask.sum()
            losses = F.cross_entropy(logits, y.flatten(), reduction="none")
            mask = (y != -100).float() if sizes == "of the targets' own mask" else mask
            return (losses.view((len(x), -1) if sizes == "of the inputs" else y.shape) * mask).sum() / mask.sum()

    x, y, mask = torch.randn(12, 5, 4), torch.randint(3, (12, 5)), (torch.arange(5) < 3).float().expand(12, 5).clone()
    y = torch.where(mask > 0, y, -100)
    net = kfac_fx.compile(Masked(), (x, y, mask))
    messages = told(net, "exact", (x, y, mask, None))
    if sizes in ("of the inputs", "of the targets' own mask"):
        assert not messages
    else:
        (message,) = messages
        assert message.startswith("24 of 60 cases of the loss have no target, and the input factors A of 2 blocks")
        assert message.endswith(
            "in the sizes of the inputs, as (losses.view(len(x), -1) * mask).sum(). Pixels of images take no mask: F "
            "is A of all pixels times G of those with a target."
        )


class OfBiases(Net):
    """The head's weight has no block, and its bias one whose rows are the number 1."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = torch.tanh(self.first(x)).detach() @ self.head.weight.detach().T + self.head.bias
        return logits


def test_rows_that_are_all_one_number_say_nothing_of_an_input_factor() -> None:
    x = torch.randn(12, 5, 4)
    net = kfac_fx.compile(OfBiases(), (x,), loss="categorical")
    assert "head.bias" in str(net.report)
    assert told(net, "exact", (x, targets(12, 5, kept=9))) == []


def test_a_block_is_told_once_for_all_captures() -> None:
    x, longer = torch.randn(12, 5, 4), torch.randn(12, 7, 4)
    net = kfac_fx.compile(Unrolled(), (x,), loss="categorical")
    batches = [(of, targets(*of.shape[:2], kept=9)) for of in (x, longer)]
    (message,) = told(net, "exact", *batches)
    assert "of 2 blocks are" in message and "or let the forward of a model that one graph holds" in message


class Unrolled(Net):
    """Captured anew for every number of positions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Unrolled, self).forward(x[:, step]) for step in range(x.shape[1])], 1)


def test_losses_in_forward_are_no_remedy_where_forward_computes_them() -> None:
    x, y = torch.randn(12, 4), targets(12, kept=9)
    (message,) = told(kfac_fx.compile(WithLoss(Net()), (x, y)), "exact", (x, y, None))
    assert "let the forward" not in message
    assert (
        "name them with compile(..., padding_mask=). If forward multiplies the losses with a mask, compute" in message
    )
