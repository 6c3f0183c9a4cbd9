"""An emitted module that runs on sharded parameters.

The code of a graph reads all parameters first. Here every node gathers what it is the first to read, and the last one
that reads it drops it, so that a process holds a few whole parameters at a time, as it does with FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from kfac_fx.linalg.sharded import SavedShards, averaged_unsharded, is_divided, unsharded


class Unread:
    """A sharded parameter that no node has read yet."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OnShards(fx.Interpreter):
    """Runs a module on tensors by name, instead of its own; `gather` makes sharded ones whole."""

    def __init__(
        self, module: fx.GraphModule, tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(module)
        self.tensors, self.gather = tensors, gather

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.tensors:
            return super().get_attr(target, args, kwargs)
        value = self.tensors[target]
        return Unread(value) if is_divided(value) else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        for node in n.all_input_nodes:
            if isinstance(value := self.env[node], Unread):
                self.env[node] = self.gather(value.value)
        return super().fetch_args_kwargs_from_env(n)


def run_on_shards(
    module: fx.GraphModule, tensors: Mapping[str, Tensor], values: tuple[Any, ...], *, backward: bool, average: bool
) -> Any:
    """The outputs of the module.

    Args:
        backward: whether there will be a backward, which gathers again what it reads.
        average: gradients of shards are means over processes, as those of FSDP2, and not sums.
    """
    if not backward:  # or one in a transformation of torch.func, which has no hooks on saved tensors
        return OnShards(module, tensors, averaged_unsharded if average else unsharded).run(*values)
    saved = SavedShards(average)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return OnShards(module, tensors, saved.unsharded).run(*values)
