"""Conditions on a CPU, on other devices and in compiled functions; copies on the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kfac_fx.linalg import matrices
from kfac_fx.linalg.matrices import HostCopy, copy_if_, zero_unless_

CONDITIONS = ([True], [False], [True, False, True])


@pytest.fixture(params=["read by the host", "computed with"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "computed with":
        monkeypatch.setattr(matrices, "on_host", lambda condition: False)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("flags", CONDITIONS, ids=str)
def test_tensors_are_zero_where_a_condition_is_false_even_if_they_are_not_finite_there(flags: list[bool]) -> None:
    condition = torch.tensor(flags).view(-1, 1)
    tensor = torch.where(condition, torch.arange(1.0, 7.0).view(3, 2), torch.nan)
    expected = torch.where(condition, tensor, 0)
    assert zero_unless_(condition, tensor) is tensor
    assert torch.equal(tensor, expected)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("flags", CONDITIONS, ids=str)
def test_tensors_are_overwritten_where_a_condition_is_true(flags: list[bool]) -> None:
    condition = torch.tensor(flags).view(-1, 1)
    target, source = torch.arange(6.0).view(3, 2), torch.full((3, 2), torch.nan)
    expected = torch.where(condition, source, target)
    copy_if_(condition, target, source)
    torch.testing.assert_close(target, expected, equal_nan=True)


def test_a_compiled_function_does_not_read_a_condition() -> None:
    condition = torch.tensor(True)
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        assert not matrices.on_host(condition)
    assert not matrices.on_host(condition.to("meta"))


class LateEvent:
    """The event of a copy that arrives when it is waited for."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_a_copy_on_the_host_is_waited_for_only_where_that_is_asked() -> None:
    tensor = torch.tensor([1.0, 2.0])
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.arrived and copy.wait().tolist() == [1.0, 2.0]
    copy.event = LateEvent()
    assert not copy.arrived and copy.value.tolist() == [1.0, 2.0] and not copy.arrived
    assert copy.wait() is copy.value and copy.arrived
