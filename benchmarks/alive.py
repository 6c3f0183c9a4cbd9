"""Bytes of tensors that are alive, counted operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode  # private, and torch's own way to see every operation
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """`with AliveBytes() as alive: ...` gives `alive.peak`, of tensors made inside, but not inside of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}  # by the address of a storage's object, which lives as long as its memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for output in tree_leaves(result):
            storage = output.untyped_storage() if isinstance(output, Tensor) else None
            if storage is not None and id(storage) not in given and id(storage) not in self.known:
                self.count(storage)
        return result

    def count(self, storage: UntypedStorage) -> None:
        if storage.device.type == "meta":  # as while a model is traced
            return
        key, size = id(storage), storage.nbytes()
        self.known[key] = weakref.finalize(storage, self.forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def forget(self, key: int, size: int) -> None:
        del self.known[key]
        self.now -= size
