"""The batches that a DataLoader may yield."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import Batch
from kfac_fx.estimator.batches import as_batch, batch_for

X, Y = torch.ones(2, 3), torch.zeros(2)


def test_inputs_and_targets_are_told_apart() -> None:
    for batch in ((X, Y), [X, Y], Batch(X, targets=Y)):
        read = as_batch(batch)
        assert read.args == (X,) and read.kwargs == {} and read.targets is Y
    for batch in (X, (X,), [X], Batch(X)):
        read = as_batch(batch)
        assert read.args == (X,) and read.targets is None


def test_mappings_are_the_arguments_of_forward() -> None:
    for batch, targets in (({"ids": X}, None), (({"ids": X}, Y), Y), (Batch(ids=X, targets=Y), Y)):
        read = as_batch(batch)
        assert read.args == () and read.kwargs == {"ids": X} and read.targets is targets
    assert repr(Batch(X, mask=Y)) == "Batch(1 arguments, ['mask'], targets=NoneType)"


def test_other_batches_are_refused() -> None:
    with pytest.raises(TypeError, match=r"this is a tuple of 3\.\nName the parts: kfac_fx\.Batch\("):
        as_batch((X, X, Y))
    with pytest.raises(TypeError, match=r"and this is a str\."):
        as_batch("x")


class Two(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return ids * mask * scale


NOT_OF_TWO: dict[str, tuple[Any, str, str]] = {
    "a pair of a tuple and targets": (
        ((X, X), Y),
        r"read as net\(tuple\) with targets float32 \[2\] and does not fit Two.forward\(ids, mask, scale\): mask is ",
        "kfac_fx.Batch(ids, mask, targets=y)",
    ),
    "a mapping with targets": (
        {"ids": X, "mask": X, "labels": Y},
        "it has no argument labels.$",
        "kfac_fx.Batch(batch['ids'], batch['mask'], targets=batch['labels'])",
    ),
    "a mapping with other names": (
        {"image": X, "mask": X, "label": Y},
        "ids is missing, and it has no argument image and label.$",
        "kfac_fx.Batch(batch['image'], batch['mask'], targets=batch['label'])",
    ),
    "a mapping with too little": ({"mask": X}, "ids is missing.$", "kfac_fx.Batch(ids, batch['mask'])"),
    "a tensor": (X, "mask is missing.$", "kfac_fx.Batch(ids, mask)"),
    "several faults": (
        Batch(X, ids=X, a=X, b=X),
        "mask is missing, and it has no argument a and b, and ids is given twice.$",
        "kfac_fx.Batch(ids, mask)",
    ),
    "too many": (Batch(X, X, 1.0, X), "it takes 3 by their places, and got 4.$", "kfac_fx.Batch(ids, mask)"),
}


@pytest.mark.parametrize("case", NOT_OF_TWO)
def test_a_batch_that_does_not_fit_forward_says_what_to_write(case: str) -> None:
    batch, fault, instead = NOT_OF_TWO[case]
    with pytest.raises(TypeError) as error:
        batch_for(Two(), batch)
    first, last = str(error.value).splitlines()
    assert first.startswith("the batch was read as net(") and re.search(fault, first)
    assert last == f"Name its parts, as in {instead}."


def test_a_series_with_a_batch_that_does_not_fit_is_told_how_to_write_all_of_them() -> None:
    net = kfac_fx.compile(nn.Bilinear(3, 3, 2), (X, X), loss="categorical")
    with pytest.raises(TypeError, match="batch 1 of `batches` was read as .*: input2 is missing") as error:
        kfac_fx.fit_spectrum(net, [((X, X), torch.zeros(2).long())])
    last = "as in [kfac_fx.Batch(input1, input2, targets=y) for (input1, input2), y in loader]."
    assert str(error.value).endswith(last)


def test_batches_that_fit_forward_are_read() -> None:
    for batch in (Batch(X, X), {"ids": X, "mask": X}, Batch(X, mask=X, scale=2.0)):
        read = batch_for(Two(), batch)
        assert (*read.args, *read.kwargs.values())[:2] == (X, X)
    assert batch_for(nn.Linear(3, 2), (X, Y)).targets is Y


def test_an_empty_batch_has_no_scores_by_position() -> None:
    """It was an error of torch, about a list of tensors."""
    net, x, y = kfac_fx.compile(nn.Linear(4, 3), loss="categorical"), torch.randn(8, 4), torch.randint(3, (8,))
    queries = kfac_fx.fit_spectrum(net, [(x, y)], damping=0.1).precondition((x, y))
    assert queries.scores((x[:0], y[:0]), by="position").shape == (8, 0, 1)
    assert queries.scores((x[:0], y[:0])).shape == (8, 0)
