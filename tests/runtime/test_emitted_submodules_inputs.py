"""Examples in arguments of any structure."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kfac_fx.recording.emitted_submodules import first_examples, number_of_examples


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


SCALAR, X = torch.tensor(2.0), torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "number"),
    [
        ((X,), {}, 4),
        ((SCALAR, X), {}, 4),
        (([X, X, X],), {}, 3),
        (({"x": X},), {}, 4),
        ((3, "text"), {"x": X}, 4),
        ((UserDict({"scale": SCALAR, "x": X}),), {}, 4),
        ((SimpleNamespace(x=X, edges=torch.zeros(2, 7)),), {}, 4),
        ((3, [1, 2]), {}, 1),
    ],
)
def test_the_first_argument_with_examples_counts_them(args: Any, kwargs: Any, number: int) -> None:
    assert number_of_examples(args, kwargs) == number


def test_the_first_examples_of_lists_and_of_tensors() -> None:
    images = [torch.zeros(n) for n in (1, 2, 3, 4)]
    assert first_examples(images, 4, 2) == images[:2]
    others = first_examples(images, 5, 2)  # a list of another length is no list of the examples
    assert all(image is other for image, other in zip(images, others, strict=True))
    assert torch.equal(first_examples(X, 4, 2), X[:2])
    batch = first_examples({"x": X, "scale": SCALAR, "other": torch.zeros(3), "n": 4}, 4, 2)
    assert torch.equal(batch["x"], X[:2]) and batch["scale"] is SCALAR
    assert batch["other"].shape == (3,) and batch["n"] == 4


def test_a_tuple_with_named_fields_is_no_list_of_examples() -> None:
    pair = Pair(torch.randn(2, 3), torch.randn(2))
    batch = first_examples(pair, 2, 1)
    assert type(batch) is Pair and torch.equal(batch.x, pair.x[:1]) and torch.equal(batch.y, pair.y[:1])
