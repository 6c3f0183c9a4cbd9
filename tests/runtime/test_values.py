"""Every check of an argument takes what it should, and says of anything else what it is and what it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kfac_fx.linalg.arguments import (
    a_device,
    a_flag,
    a_process_group,
    a_seed,
    a_share,
    a_weight,
    finite,
    finite_numbers,
    not_negative,
    number,
    one_element,
    optional,
    positive,
    whole_number,
)

Check = Callable[[str, Any], object]

TAKEN: dict[Check, list[Any]] = {
    number: [1, 0.5, -1.0, np.float32(2.0), torch.tensor(3.0), torch.tensor([4]), math.nan],
    finite: [0, -1e30],
    positive: [1e-300, torch.tensor(2)],
    not_negative: [0, 0.0, torch.tensor(0.0)],
    a_weight: [0, 1, 0.95],
    a_share: [1, 1e-6],
    whole_number(0, "steps"): [0, 5],
    a_flag: [True, False],
    a_device: ["cpu", torch.device("cpu")],
    a_seed: [0, -(2**63), 2**64 - 1],
    finite_numbers: [(), (-1, 0.5), [2]],
    one_element: [torch.tensor(1.0), torch.tensor([2.0])],
}
META = torch.empty((), device="meta")
REFUSED: list[tuple[Check, Any, str]] = [
    *[(number, value, "be a number") for value in ("0.1", None, True, 1j, torch.ones(2), META, [1.0])],
    *[(finite, value, "be finite") for value in (math.nan, math.inf, -math.inf)],
    *[(positive, value, "be positive") for value in (0, -1, math.nan, torch.tensor(-1.0))],
    (positive, math.inf, "be finite"),
    (not_negative, -1e-9, "not be negative"),
    *[(not_negative, value, "be finite") for value in (math.nan, torch.tensor(math.nan))],
    *[(a_weight, value, "be between 0 and 1") for value in (-0.1, 1.1, math.nan)],
    *[(a_share, value, "be above 0 and at most 1") for value in (0, 1.1, math.nan)],
    *[
        (whole_number(1, "cases"), value, "be a whole number of cases, at least 1")
        for value in (0, 1.5, "a", True, None)
    ],
    *[(a_device, value, "be a device of this machine") for value in ("nope", "meta", 1.5)],
    *[(a_flag, value, "be True or False") for value in (0, "no", None)],
    *[(a_seed, value, "be a whole number, from -2**63 and below 2**64") for value in (1.5, "a", True, 2**64)],
    *[(finite_numbers, value, "be several numbers, as in (-1,)") for value in (-1, "a", None, torch.ones(2))],
    *[(one_element, value, "be a number") for value in (torch.ones(2), META, torch.tensor(1j))],
    *[(a_process_group, value, "be a group of torch.distributed: ") for value in ("world", 3)],
]


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, values in TAKEN.items() for value in values])
def test_what_fits_is_taken(check: Check, value: Any) -> None:
    check("option", value)
    optional(check, "option", None)


@pytest.mark.parametrize(("check", "value", "wanted"), REFUSED)
def test_anything_else_is_named_with_what_it_must_be(check: Check, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError) as raised:
        check("option", value)
    assert str(raised.value).startswith("option is ") and f"; it must {wanted}" in str(raised.value)


def test_one_wrong_number_of_several_is_shown() -> None:
    with pytest.raises(ValueError, match="a number in exps is 'a'; it must be a number"):
        finite_numbers("exps", [1, "a"])


def test_large_tensors_are_shown_by_their_shape() -> None:
    with pytest.raises(ValueError, match=r"^lr is a tensor of shape \[3, 4\]; it must be a number$"):
        number("lr", torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"^lr is a tensor of shape \[\] on the meta device; it must be a number$"):
        number("lr", META)
