"""Sources of single cases: what is sent back from a slot, from an example, and for a measurement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kfac_fx.losses import Categorical, Normal
from kfac_fx.losses.distributions import measurement_source, source_vectors


def test_slots_of_a_loss_are_sent_back_one_after_another_and_add_up() -> None:
    logits, other = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    losses = [
        (2.0, Categorical(logits, targets=torch.randint(4, (2, 3)))),
        (1.0, Normal(other, targets=torch.zeros(2, 5))),
    ]
    slots = [torch.arange(3).view(1, 3, 1).expand(2, 3, 1), torch.zeros(2, 1, dtype=torch.int64)]
    (whole,) = source_vectors("empirical", losses, lambda: slots, False, None)
    by_row = list(source_vectors("empirical", losses, lambda: slots, True, None))
    assert len(by_row) == 4
    for number in (0, 1):
        torch.testing.assert_close(torch.stack([vectors[number] for vectors in by_row]).sum(0), whole[number])
    assert all(not vectors[0][:, [k for k in range(3) if k != slot]].any() for slot, vectors in enumerate(by_row[:3]))
    assert not any(vectors[1].any() for vectors in by_row[:3]) and not by_row[3][0].any()


def test_exact_sources_are_the_columns_of_the_factor() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = Categorical(logits)
    slots = [torch.arange(3).view(1, 3, 1).expand(2, 3, 1)]
    vectors = torch.stack(
        [vectors[0] for vectors in source_vectors("exact", [(0.25, loss)], lambda: slots, False, None)]
    )
    assert len(vectors) == 4 * 3
    p = logits.detach().softmax(-1)
    fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    torch.testing.assert_close(torch.einsum("knti,kntj->ntij", vectors, vectors), 0.25 * fisher)


def test_one_example_is_sent_back_alone() -> None:
    leaf = torch.randn(3, 2, requires_grad=True)
    source = measurement_source(lambda outputs: outputs.square().sum(1), leaf, None, [leaf], 3)
    (everything,), (one,) = source.cotangents(), source.cotangents(1)
    torch.testing.assert_close(everything, 2 * leaf.detach())
    torch.testing.assert_close(one[1], 2 * leaf.detach()[1])
    assert one is not None and not one[[0, 2]].any()


def test_a_measurement_is_one_number_for_every_example() -> None:
    leaf = torch.randn(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"\[3\], and this one returned \[3, 2\]"):
        measurement_source(lambda outputs: outputs, leaf, None, [leaf], 3)
    with pytest.raises(ValueError, match=r"\[3\], and this one returned a float"):
        measurement_source(lambda outputs, targets: 1.0, leaf, 0, [leaf], 3)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("measurement", "why"),
    [
        (lambda outputs: outputs.argmax(1), "it returned int64, which has none, as argmax and comparisons do"),
        (lambda outputs: outputs[:, 0] > 0, "it returned bool"),
        (lambda outputs: (outputs[:, 0] > 0).float(), "it cuts it off, as detach"),
        (lambda outputs: outputs[:, 0].detach(), "it cuts it off, as detach"),
        (lambda outputs: torch.zeros(3, requires_grad=True), "it is computed from other tensors"),
        (
            lambda outputs: torch.complex(outputs[:, 0], outputs[:, 1]),
            "complex numbers have no derivative, and need abs",
        ),
    ],
)
def test_a_measurement_without_a_gradient_is_refused(measurement: Callable[[Tensor], Tensor], why: str) -> None:
    leaf = torch.randn(3, 2, requires_grad=True)
    with pytest.raises(
        ValueError, match=rf"the measurement has no gradient by the outputs of the model: {why}.* Write a"
    ):
        measurement_source(measurement, leaf, None, [leaf], 3)
