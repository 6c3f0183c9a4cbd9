"""Processes without batches inside of torch's Join: kfac_fx/optim/optimizer.py. Several processes train so in
test_owners.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import kfac_fx

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
X, Y = torch.randn(6, 3), torch.randint(2, (6,))


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.barrier()  # a join does not await its last message, and a wrapper in a traceback may outlive the group
    dist.destroy_process_group()


def trained(**options: Any) -> tuple[kfac_fx.KFAC, nn.Module]:
    net = kfac_fx.compile(nn.Linear(3, 2), (X,), loss="categorical")
    return kfac_fx.KFAC(net, seed=0, **options), nn.parallel.DistributedDataParallel(net)


def backward(wrapped: nn.Module) -> None:
    F.cross_entropy(wrapped(X), Y).backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.1, "damping": 0.1, "adapt_damping": True}, "adapt_damping=True, which asks the process for the loss"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "a GradScaler, whose scale that process does not learn"),
    ],
)
def test_options_that_need_batches_are_refused(options: dict[str, Any], words: str) -> None:
    optimizer, wrapped = trained(**options)
    with pytest.raises(ValueError, match="takes the steps of the others, and cannot with\n") as error:
        Join([wrapped, optimizer])  # type: ignore[list-item]
    assert words in str(error.value) and str(error.value).endswith("calls the net with an empty batch, x[:0].")


def test_an_optimizer_comes_behind_its_wrapper() -> None:
    optimizer, wrapped = trained()
    with Join([optimizer, wrapped]), pytest.raises(ValueError, match=r"write Join\(\[wrapped, optimizer\]\)"):  # type: ignore[list-item]
        backward(wrapped)
        optimizer.step()


def test_a_step_has_one_forward() -> None:
    optimizer, wrapped = trained()
    with (
        pytest.raises(ValueError, match=r"a step has one forward, .* and this one has 2: call optimizer.step\(\)"),
        Join([wrapped, optimizer]),  # type: ignore[list-item]
    ):
        backward(wrapped)
        backward(wrapped)
        optimizer.step()


def test_a_process_that_never_had_a_batch_says_so() -> None:
    optimizer, _ = trained()
    with pytest.raises(ValueError, match="process 0 of 1 had no batch inside of Join, .* which may be empty"):
        optimizer.join_hook().main_hook()


def test_the_join_of_the_wrapper_alone_is_refused_also_behind_another(process: None) -> None:
    optimizer, wrapped = trained()
    with Join([wrapped, optimizer]):  # type: ignore[list-item]
        backward(wrapped)
        optimizer.step()
    backward(wrapped)  # torch ends the join of no wrapper
    optimizer.step()
    with pytest.raises(ValueError, match=r"Write Join\(\[wrapped, optimizer\]\) in its place"), wrapped.join():  # type: ignore[operator]
        backward(wrapped)


class Scaled(nn.Module):
    """The cases are on the second dimension of the first input, and the second has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: dict[str, Tensor], scale: Tensor) -> Tensor:
        y: Tensor = self.linear(inputs["x"].transpose(0, 1)).mean(1)
        return y * scale


def test_a_call_without_cases_has_none_where_the_graph_has_cases() -> None:
    x, scale = torch.randn(4, 6, 3), torch.tensor([2.0, 3.0])
    net = kfac_fx.compile(Scaled(), ({"x": x}, scale), loss="normal", batch_dim=1)
    (inputs, same), kwargs = net.recorder(({"x": x}, scale), {}).without_cases(({"x": x}, scale), {})
    assert inputs["x"].shape == (4, 0, 3) and not inputs["x"].untyped_storage().nbytes()
    assert torch.equal(same, scale) and kwargs == {}
