"""The batches that a DataLoader may yield."""

from __future__ import annotations

import pytest
import torch

from kfac_fx import Batch
from kfac_fx.estimator.batches import as_batch

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
