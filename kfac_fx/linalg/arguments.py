"""Checks of arguments: an error says what the value is, and what it must be or what to write.

They are functions (name, value) that raise ValueError. The host waits for the device of a tensor, so these are for
arguments that are read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import fatal, nearest

SEEDS = range(-(2**63), 2**64)  # those that a torch.Generator takes


def wrong_value(name: str, value: Any, wanted: str) -> ValueError:
    """The error of an argument; wanted: what follows "it must". A tensor of many numbers is shown by its shape."""
    if isinstance(value, Tensor) and (value.is_meta or value.numel() > 8):
        shown = f"a tensor of shape {list(value.shape)}{' on the meta device' * value.is_meta}"
    else:
        shown = repr(value)
    return ValueError(f"{name} is {shown}; it must {wanted}")


def number(name: str, value: Any) -> float:
    """The value of a number or of a tensor with one element. Raises ValueError for anything else."""
    given = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_value(name, given, "be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is larger than any floating-point number") from None


def one_element(name: str, tensor: Tensor) -> None:
    """A check of a tensor that is not read, because the host would wait for its device."""
    if tensor.numel() != 1 or tensor.is_meta or tensor.is_complex():
        raise wrong_value(name, tensor, "be a number")


def number_that(wanted: str, holds: Callable[[float], bool]) -> Callable[[str, Any], None]:
    """A check of a number. wanted: the words for `holds`."""

    def check(name: str, value: Any) -> None:
        amount = number(name, value)
        if not holds(amount):
            raise wrong_value(name, value, "be finite" if math.isinf(amount) else wanted)

    return check


finite = number_that("be finite", math.isfinite)
positive = number_that("be positive", lambda value: 0 < value < math.inf)
not_negative = number_that("not be negative", lambda value: 0 <= value < math.inf)
a_weight = number_that("be between 0 and 1", lambda value: 0 <= value <= 1)
a_decay = number_that("be from 0 and below 1", lambda value: 0 <= value < 1)
a_share = number_that("be above 0 and at most 1", lambda value: 0 < value <= 1)


def choice(
    name: str,
    value: object,
    known: Iterable[str],
    error: type[ValueError] = ValueError,
    meant: str | None = None,
    otherwise: str = "",
) -> str:
    """The value, if it is one of the names that are known.

    Args:
        meant: the name that somebody who writes this value means; None: the nearest one.
        otherwise: the end of the message where no name is near.

    Raises `error` for anything else, with the name that is meant and with all of them.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    hint = f" Did you mean {meant!r}?" if meant else nearest(value, names)
    raise error(f"{name} {value!r} is none of {', '.join(map(repr, names))}.{hint or otherwise}")


def whole_number(least: int, of: str) -> Callable[[str, Any], None]:
    """A check of a whole number of these, such as "steps"; it must fit into 64 bits."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_value(name, value, f"be a whole number of {of}, at least {least}")
        if value >= 2**63:
            raise ValueError(f"{name} is too large for a number of {of}: it must be below 2**63")

    return check


def a_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong_value(name, value, "be True or False")


def a_seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in SEEDS:
        raise wrong_value(name, value, "be a whole number, from -2**63 and below 2**64")


def a_device(name: str, value: Any) -> None:
    """A device that holds values."""
    try:
        there = torch.empty(0, device=value).device.type != "meta"
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's, for a device that it does not know or have
        if fatal(error):
            raise
        there = False
    if not there:
        raise wrong_value(name, value, "be a device of this machine")


def finite_numbers(name: str, values: Any) -> list[float]:
    """Several numbers. Raises ValueError for anything else."""
    if isinstance(values, (str, Tensor)) or not isinstance(values, Iterable):
        raise wrong_value(name, values, "be several numbers, as in (-1,)")
    values = list(values)
    for value in values:
        finite(f"a number in {name}", value)
    return [float(value) for value in values]


def several_names(name: str, value: Any, known: Collection[str]) -> None:
    """A check of names of parameters; known: those that there are."""
    if isinstance(value, (str, Tensor)) or not isinstance(value, Collection):
        raise wrong_value(name, value, "be several names of parameters, as in {'fc.weight', 'fc.bias'}")
    if others := [entry for entry in value if not isinstance(entry, str) or entry not in known]:
        raise ValueError(
            f"{name} has entries that are no names of trained parameters: {', '.join(map(repr, others))}."
            + nearest(others[0], known)
        )


def a_process_group(name: str, value: Any) -> None:
    if not (torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)):
        raise wrong_value(
            name,
            value,
            "be a group of torch.distributed: torch.distributed.group.WORLD, once init_process_group was called, or a "
            "result of new_group(ranks)",
        )


def optional(check: Callable[[str, Any], object], name: str, value: Any) -> None:
    """A check of an argument that may be left out."""
    if value is not None:
        check(name, value)
