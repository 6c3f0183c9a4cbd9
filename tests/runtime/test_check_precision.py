"""The precision of the forwards that check a step: the parameters' own, whatever the user's forward was allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.compiled.jacobian_products import load_forward_mode
from kfac_fx.optim.batch_loss import OWN_PRECISION, CheckPrecision
from kfac_fx.optim.checks import Check
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.tracing.signature import autocast
from tests.tables import pairs

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(4, (64,), generator=torch.Generator().manual_seed(1))


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def middle(self, y: Tensor) -> Tensor:
        return torch.tanh(y)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(self.middle(self.norm(self.first(x))))
        return z


class BackToIts(Net):
    """Goes on in the precision of an earlier activation, as the norms of many language models do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.last(torch.tanh(self.norm(y.float())).to(y.dtype))
        return z


class WithCast(Net):
    def middle(self, y: Tensor) -> Tensor:
        return torch.tanh(y.bfloat16()).float()


class WithRegion(Net):
    def middle(self, y: Tensor) -> Tensor:
        with half():
            mixed = torch.softmax(y @ y.mT, -1) @ y
        return mixed.float()


class WithRegionThatIsOff(Net):
    def middle(self, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(y.float())


class WithCastOfInputs(Net):
    """A cast of what does not follow the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(torch.tanh(self.first(x)) * (x.bfloat16() > 0).float().mean(1, keepdim=True))
        return z


class CoarseProducts(TorchDispatchMode):
    """Products of float32 as a GPU computes them where TF32 is allowed: the operands are rounded to 10 bits."""

    @staticmethod
    def rounded(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            return tensor
        bits = tensor.contiguous().view(torch.int32)
        return ((bits + (1 << 12)) & (-1 << 13)).view(torch.float32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"  # type: ignore[attr-defined]
        if allowed and func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            args = (*args[:-2], *map(self.rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with CoarseProducts():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def checks(
    net: Any, around_forward: Callable[[], Any], around_step: Callable[[], Any], steps: int = 3
) -> list[tuple[Check, Tensor, dict[str, Tensor]]]:
    """The checks of the first steps, their <δ, F δ> and δ by name."""
    found, along, opt = [], Check.along, KFAC(net, seed=0)

    def noted(check: Check, flat: FlatParameters, move: Tensor) -> Any:
        check.parameters = {name: value.clone() for name, value in check.parameters.items()}
        result = along(check, flat, move)
        found.append((check, result[0], dict(flat.everywhere(move))))
        return result

    with mock.patch.object(Check, "along", noted):
        for _ in range(steps):
            with around_forward():
                loss = F.cross_entropy(net(X).float(), CLASSES)
            opt.zero_grad()
            loss.backward()
            with around_step():
                opt.step()
    assert len(found) == steps
    return found


def exact(check: Check, move: dict[str, Tensor]) -> Tensor:
    """<δ, F δ> of `Net` in float64, by a product with the Jacobian."""
    load_forward_mode()
    at = {name: value.double() for name, value in check.parameters.items()}

    def outputs(moved: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(Net(), {**at, **moved}, (X.double(),))
        return result

    point, tangent = {name: at[name] for name in move}, {name: value.double() for name, value in move.items()}
    values, pushed = torch.func.jvp(outputs, (point,), (tangent,))
    p = values.softmax(1)
    return (p * pushed.square()).sum(1).sub((p * pushed).sum(1).square()).mean()


AROUND = {
    "nothing": (nullcontext, nullcontext),
    "autocast of the forward": (half, nullcontext),
    "autocast of all": (half, half),
    "TF32": (tf32, tf32),
    "autocast and TF32": (half, tf32),
}


@pytest.mark.parametrize(("forward", "step"), AROUND.values(), ids=AROUND)
def test_a_check_knows_the_fisher_along_a_step_whatever_precision_the_user_allows(forward: Any, step: Any) -> None:
    """By a difference quotient, up to twice its step."""
    with forward() if forward is half else nullcontext():
        net = compile(Net(), loss="categorical")
    for check, fisher, move in checks(net, forward, step):
        assert check.quotient_step == torch.finfo(torch.float32).eps ** (1 / 3)
        torch.testing.assert_close(fisher.double(), exact(check, move), rtol=2 * check.quotient_step, atol=0)


@pytest.mark.parametrize(("forward", "step"), AROUND.values(), ids=AROUND)
def test_the_settings_of_the_user_are_as_they_were_after_a_check(forward: Any, step: Any) -> None:
    def settings() -> tuple[Any, ...]:
        return autocast(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    net = compile(Net(), loss="categorical")
    found = []
    with step():
        before = settings()
        checks(net, forward, lambda: found.append(settings()) or nullcontext(), 1)
        assert settings() == before == found[0]


@pairs(("forward", [half, nullcontext]), ("step", [half, nullcontext]))
def test_a_graph_that_was_captured_under_autocast_is_checked_under_it(forward: Any, step: Any) -> None:
    """Its casts are to half precision, which meets the parameters only in autocast. <δ, F δ> has the rounding errors of
    its layers."""
    with forward():
        net = compile(BackToIts(), (X,), loss="categorical")
    for check, fisher, move in checks(net, forward, step):
        assert (check.quotient_step is None) is (forward is half)
        rounding = 4 * torch.finfo(torch.bfloat16).eps if check.quotient_step is None else 2 * check.quotient_step
        torch.testing.assert_close(fisher.double(), exact(check, move), rtol=rounding, atol=0)


COARSE = {"cast": WithCast, "region": WithRegion}
FINE = {"region that is off": WithRegionThatIsOff, "cast of inputs": WithCastOfInputs}


@pytest.mark.parametrize("model", [*COARSE.values(), *FINE.values()], ids=[*COARSE, *FINE])
def test_a_check_takes_the_product_where_the_graph_itself_rounds_coarsely(model: Callable[[], nn.Module]) -> None:
    net = compile(model(), loss="categorical")
    assert net.recorder((X,), {}).whole
    for check, _, _ in checks(net, nullcontext, nullcontext, 1):
        assert (check.quotient_step is None) == (model in COARSE.values())


def test_what_the_forward_returned_serves_only_in_the_precision_of_the_check() -> None:
    for forward, taken in ((nullcontext, True), (half, False), (tf32, False)):
        net = compile(Net(), loss="categorical")
        with mock.patch("kfac_fx.optim.batch_loss.BatchLoss.returned", autospec=True) as returned:
            returned.side_effect = lambda batch, parameters: batch.at(parameters)
            checks(net, forward, nullcontext, 1)
        assert returned.called is taken


def test_only_products_with_the_jacobian_need_the_plain_formula_of_attention() -> None:
    """Quotients take forwards, in which attention runs as it does in the user's."""
    net = compile(Net(), loss="categorical")
    with mock.patch("kfac_fx.compiled.jacobian_products.sdpa_kernel", side_effect=AssertionError):
        checks(net, nullcontext, nullcontext, 1)


def test_a_precision_that_is_entered_twice_is_set_once_and_left_at_the_end() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with OWN_PRECISION.entered(), half():
            with OWN_PRECISION.entered():
                assert torch.is_autocast_enabled("cpu")  # nothing was set again
            with CheckPrecision(autocast=(("cpu", torch.float16),)).entered():
                assert torch.get_autocast_dtype("cpu") == torch.float16
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high" and not autocast()
        with OWN_PRECISION.entered():  # it was left
            assert torch.get_float32_matmul_precision() == "highest"
        with pytest.raises(ZeroDivisionError), OWN_PRECISION.entered():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high"
        with half(), OWN_PRECISION.entered():
            assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
