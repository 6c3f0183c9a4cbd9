"""Examples in arguments of any structure, and the mask as one more input of submodules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.recording.emitted_submodules import MaskedInputs, first_examples, number_of_examples


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


def masked() -> MaskedInputs:
    return MaskedInputs((((0, 1), (1, 0)), None), ("encoder", "head"))


def inputs() -> tuple[Tensor, Tensor]:
    """5 cases in dimension 1 of the first, 7 positions in dimension 0 of the second."""
    return torch.zeros(2, 5), torch.zeros(7, 2)


def test_the_mask_is_the_last_input_of_submodules_that_have_one() -> None:
    mask = torch.ones(5, 7)
    assert masked().of_call(0, inputs(), mask)[-1] is mask
    assert len(masked().of_call(1, inputs(), mask)) == 2


def test_without_a_mask_all_is_real() -> None:
    assert torch.equal(masked().of_call(0, inputs(), None)[-1], torch.ones(5, 7))


def test_a_mask_of_another_shape_names_the_submodule_and_the_sizes() -> None:
    with pytest.raises(ModelChangedError) as failure:
        masked().of_call(0, inputs(), torch.ones(5, 8))
    first, advice = str(failure.value).splitlines()
    assert first.startswith("padding_mask has shape [5, 8], but encoder is called on 5 cases and 7 positions;")
    assert advice.startswith("Compile with an example in which the numbers of cases and positions differ")


def test_the_places_of_the_mask_are_read_off_the_graphs() -> None:
    node, other = SimpleNamespace(meta={"kfac_fx_mask": ((0, 0), (0, 1))}), SimpleNamespace(meta={})
    parts: Any = [SimpleNamespace(graph=SimpleNamespace(nodes=nodes)) for nodes in ([other, node], [])]
    assert MaskedInputs.of(parts, ["a", "b"]).sites == (((0, 0), (0, 1)), None)
