"""Nested tensors inside of forward, while a model is traced.

    x = torch.nested.nested_tensor_from_jagged(values, offsets)
    self.layer(x)             ->  linear(values, weight, bias)
    x.to_padded_tensor(0.0)   ->  new_full(values, ...).index_put((document, place), values)

torch computes with a nested tensor by operations on its values, the rows of all documents below one another.
torch.export meets operations before torch has written them so. `nested_values` lets torch do that first: an operation
on a nested tensor is dispatched without the tracer, and those on its values with it. So the graph has the rows of all
documents in one tensor, and holds for any number and any lengths of documents.

Attention is written as attention over all rows with a mask of blocks, because torch's own kernels read lengths. It has
the same result, and needs memory for the square of the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UntraceableError
from ..torch_private import NESTED, DispatchState, nested_int, without_functional
from .substitutes import replaced_in_thread

RAGGED = 1  # the dimension of documents' lengths in [documents, lengths, ...]


@contextmanager
def nested_values() -> Iterator[None]:
    """Inside, and in this thread, operations on nested tensors are traced as those on their values."""
    states: list[DispatchState] = []  # that of the tracer
    sizes: dict[int, tuple[Tensor, Any]] = {}  # id of offsets -> (the offsets, the size that stands for the lengths)
    numbers = itertools.count()

    def function(below: Callable[..., Any], cls: type, *call: Any, **kwargs: Any) -> Any:
        state = DispatchState.now()
        outermost = not states
        states.extend([state] if outermost else [])
        try:
            with state.without_tracer():
                return below(cls, *call, **kwargs)
        finally:
            del states[:outermost]

    def dispatch(below: Callable[..., Any], cls: type, *call: Any, **kwargs: Any) -> Any:
        with states[0].entered() if states else nullcontext():
            if call[0] is torch.ops.aten.to_padded_tensor.default:
                return as_padded(*call[2], **(call[3] or {}))
            return below(cls, *call, **kwargs)

    def attended(below: Callable[..., Any], *call: Any, **kwargs: Any) -> Any:
        with states[0].entered() if states else nullcontext():
            return attention(*call, **kwargs)

    def size_of(below: Callable[..., Any], offsets: Tensor, *, coeff: int = 1) -> Any:
        plain = without_functional(offsets)
        if id(plain) not in sizes:
            sizes[id(plain)] = plain, nested_int(-1 - next(numbers))
        return sizes[id(plain)][1] * coeff

    replaced = (
        (NESTED.kind, "__torch_function__", function),
        (NESTED.kind, "__torch_dispatch__", dispatch),
        (NESTED.kind, "values", lambda below, documents: NESTED.values(documents)),
        (NESTED.module, "get_tensor_symint", size_of),
        (NESTED.module, "nested_view_from_values_offsets", of_values_and_offsets),
        (NESTED.module, "nested_view_from_values_offsets_lengths", of_lengths),
        (NESTED.operations, "jagged_scaled_dot_product_attention", attended),
        (NESTED.tracer, "is_fx_tracing", lambda below: False),  # which refuses to make nested tensors
    )
    with ExitStack() as stack:
        known = all(
            hasattr(owner, name) for owner, name, _ in replaced
        )  # else torch is another, and refuses them itself
        for owner, name, instead in replaced if known else ():
            stack.enter_context(replaced_in_thread(owner, name, instead))
        yield


def of_values_and_offsets(
    below: Callable[..., Any], values: Tensor, offsets: Tensor, *more: Any, **sizes: Any
) -> Tensor:
    return nested(values, offsets, *more, **sizes)


def of_lengths(
    below: Callable[..., Any], values: Tensor, offsets: Tensor, lengths: Tensor | None, *more: Any, **sizes: Any
) -> Tensor:
    if lengths is not None:
        raise with_gaps()
    return nested(values, offsets, *more, **sizes)


def with_gaps() -> UntraceableError:
    return UntraceableError(
        "a nested tensor with both offsets and lengths has gaps between its documents, which no graph keeps.\n"
        "Leave the rows of the gaps out: torch.nested.nested_tensor_from_jagged(values, offsets)."
    )


def nested(
    values: Tensor,
    offsets: Tensor,
    ragged_idx: int = RAGGED,
    min_seqlen: int | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """A nested tensor around these values themselves; torch's own is a view, which the tracer would meet."""
    known = {"min_seqlen": min_seqlen, "max_seqlen": max_seqlen}
    cache = {name: values.new_empty(size, 0) for name, size in known.items() if size is not None}
    result: Tensor = NESTED.kind(values, offsets, _ragged_idx=ragged_idx, _metadata_cache=cache)
    return result


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """That of nested [documents, heads, lengths, features]: all rows [1, heads, rows, features], where a row sees those
    of its document."""
    if attn_mask is not None or dropout_p:
        raise UntraceableError(
            f"attention of nested tensors with {'a mask' if attn_mask is not None else 'dropout'} is not captured.\n"
            "Write it for padded documents, nested.to_padded_tensor(0.0), or use attention without it."
        )
    (q, q_document, q_place), (k, k_document, k_place), (v, _, _) = map(rows_of, (query, key, value))
    mask = q_document[:, None] == k_document
    if is_causal:
        mask = mask & (q_place[:, None] >= k_place)
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return nested(result[0], NESTED.offsets(query), 2)


def rows_of(documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the rows [1, heads, rows, features], the document of every row, the place of every row in its document)."""
    values, offsets = NESTED.values(documents), NESTED.offsets(documents)
    return (values[None], *document_and_place(offsets, values.shape[-2]))


def as_padded(documents: Tensor, padding: float, output_size: list[int] | None = None) -> Tensor:
    """[documents, longest, ...] of a nested tensor. torch's own operation for it has no derivative by its values."""
    offsets, ragged, known = NESTED.offsets(documents), NESTED.dimension(documents), NESTED.longest(documents)
    rows = NESTED.values(documents).movedim(ragged - 1, 0)
    document, place = document_and_place(offsets, rows.shape[0])
    longest = output_size[ragged] if output_size is not None else rows.shape[0] if known is None else known
    empty = rows.new_full((offsets.shape[0] - 1, longest, *rows.shape[1:]), padding)
    return empty.index_put((document, place), rows).movedim(1, ragged)


def document_and_place(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the document of every row, the place of every row in its document)."""
    numbers = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets, numbers, right=True) - 1
    return document, numbers - offsets[document]
