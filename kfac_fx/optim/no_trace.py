"""Calls of closures that only measure: they leave no trace in buffers, gradients, random streams and other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.tracing.devices import RandomState, same_random
from kfac_fx.passes.tracing.substitutes import address, values_kept, written_by


class WritesUndone(TorchFunctionMode):
    """Restores at the end the tensors that were there before and that functions of torch write into.

    A closure may average the parameters or count its batches; a second call would do so twice. Copies are made where a
    write comes first. Numbers of Python and arrays of other libraries are not restored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()  # the addresses of what was made inside
        # By place in memory: the tensor, its values and the size of its memory.
        self.before: dict[tuple[Any, ...], tuple[Tensor, Tensor, int]] = {}

    @torch.compiler.disable(reason="it remembers tensors")  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            place = address(tensor)
            if place and place not in self.made:
                part = place, tensor.storage_offset(), tensor.shape, tensor.stride()
                if part not in self.before:
                    size = tensor.untyped_storage().nbytes()
                    self.before[part] = tensor.detach(), tensor.detach().clone(), size
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":  # attributes were there before
            given = {address(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            returned = {address(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
            self.made |= returned - given
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for tensor, values, size in reversed(self.before.values()):  # parts that overlap: the first copies are oldest
            if tensor.untyped_storage().nbytes() == size:  # FSDP2 frees the memory of the parameters that it gathered
                tensor.data.copy_(values)


@contextmanager
def without_a_trace(
    buffers: Iterable[Tensor], parameters: Iterable[Tensor], devices: Iterable[torch.device], start: RandomState | None
) -> Iterator[None]:
    """Buffers, gradients, random streams and all other tensors are afterwards what they were before.

    Args:
        devices: the devices that have random streams beside the CPU's.
        start: the state in which the streams begin inside, so that noise is that of the step's forward.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    with same_random(devices), values_kept(buffers), WritesUndone():
        try:
            for parameter, _ in gradients:
                parameter.grad = None  # set aside: a closure that zeroes gradients in place must not reach them
            if start is not None:
                start.restore()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
