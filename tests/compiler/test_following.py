"""Parameters are followed through the Python code of a forward to the operations that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.divide import Operation, Readers, read_outside

X = torch.randn(5, 4)


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.weight, self.gain, self.token = (nn.Parameter(torch.randn(*size)) for size in ((3, 4), (3, 1), (1, 4)))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


def readers_of(read: Callable[[Any, Tensor], Any], cases: int | None = None) -> tuple[Reading, Readers]:
    model = Reading(read)
    parameters = dict(model.named_parameters())
    return model, read_outside(model, (X,), {}, [model.inner], parameters, cases)


def test_an_operation_on_a_followed_tensor_and_another_is_one_read_of_all_its_parameters() -> None:
    model, readers = readers_of(lambda own, x: F.linear(x, (own.weight * own.gain).tanh()))
    (observed,) = readers.observed.values()
    assert observed.read.names == ("weight", "gain") and observed.calls == 1
    assert observed.where.startswith("test_following.py:") and readers.places == {}
    assert len(observed.call.args) == 1 and torch.equal(observed.call.args[0], X)


def test_a_read_is_a_module_that_computes_the_same() -> None:
    model, readers = readers_of(lambda own, x: F.linear(x, own.weight * own.gain))
    (observed,) = readers.observed.values()
    operation = Operation(observed.read, dict(model.named_parameters()))
    assert operation.canonical == {"p0": "weight", "p1": "gain"}
    assert torch.equal(operation(*observed.call.args), model(X))


def test_equal_reads_are_one_with_their_number_of_calls() -> None:
    _, readers = readers_of(lambda own, x: sum(x @ own.weight.T for _ in range(3)))
    (observed,) = readers.observed.values()
    assert observed.calls == 3


def test_other_shapes_of_inputs_are_another_read() -> None:
    _, readers = readers_of(lambda own, x: (x @ own.weight.T).sum() + (x[:2] @ own.weight.T).sum())
    assert len(readers.observed) == 2


def test_what_a_module_reads_inside_is_not_collected() -> None:
    _, readers = readers_of(lambda own, x: own.inner(x))
    assert readers.observed == {} and readers.places == {}


def test_an_argument_of_a_module_is_a_place() -> None:
    _, readers = readers_of(lambda own, x: own.inner(own.token))
    assert readers.observed == {} and set(readers.places) == {"token"}
    assert readers.places["token"].endswith("in Python that is not captured")


@pytest.mark.parametrize("cases", [5, None, 6])
def test_an_expansion_to_the_cases_is_a_read_whose_input_has_their_size(cases: int | None) -> None:
    model, readers = readers_of(lambda own, x: own.token.expand(x.shape[0], -1) + x, cases)
    by_function = {reads.read.function.__name__: reads for reads in readers.observed.values()}
    assert set(by_function) == ({"expand"} if cases == 5 else {"add"})
    if cases == 5:
        read = by_function["expand"].read
        assert [value.shape for value in read.inputs] == [(5,)]
        longer = Operation(read, dict(model.named_parameters()))(torch.empty(7))
        assert torch.equal(longer, model.token.expand(7, -1))


def test_a_table_in_a_sum_is_cut_to_any_length() -> None:
    model, readers = readers_of(lambda own, x: x[:2, :3] + own.weight.T[:2])
    (observed,) = readers.observed.values()
    assert [value.shape[0] for value in observed.read.inputs] == [2, 2]
    operation = Operation(observed.read, dict(model.named_parameters()))
    x = torch.randn(4, 3)
    torch.testing.assert_close(operation(x, torch.empty(4)), x + model.weight.T[:4])


def test_random_numbers_of_parameters_alone_cannot_be_computed_again() -> None:
    _, readers = readers_of(lambda own, x: F.linear(x, F.dropout(own.weight)))
    assert readers.observed == {} and set(readers.places) == {"weight"}


def test_a_write_into_a_followed_tensor_ends_the_following() -> None:
    def read(own: Any, x: Tensor) -> Tensor:
        weight = own.weight * 2
        weight[0] = 0
        return F.linear(x, weight)

    _, readers = readers_of(read)
    assert readers.observed == {} and set(readers.places) == {"weight"}


def test_a_read_that_writes_into_another_tensor_returns_it() -> None:
    def read(own: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        h[x > 0] = own.gain[0]
        return h

    model, readers = readers_of(read)
    (observed,) = readers.observed.values()
    assert observed.read.written is not None
    result = Operation(observed.read, dict(model.named_parameters()))(*observed.call.args)
    assert torch.equal(result, torch.where(X > 0, model.gain[0], X))


def test_another_autocast_is_not_followed() -> None:
    def read(own: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight = own.weight * 2
        return F.linear(x, weight)

    _, readers = readers_of(read)
    assert readers.observed == {} and set(readers.places) == {"weight"}


def test_what_the_model_returns_is_a_place() -> None:
    _, readers = readers_of(lambda own, x: (own.inner(x), own.gain.exp()))
    assert readers.places == {"gain": "returned by the model, as no layer's output"}
