"""Many cotangents through one graph: in chunks by vmap where that is possible, else one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense
from kfac_fx.losses.sources import Cotangents
from kfac_fx.passes.graphs.failures import fatal, first_line

MEMORY = 1 << 30  # bytes that a chunk of cotangents may take


class SavedBytes:
    """What a forward run under `watched` keeps for its backward: about what one cotangent needs on its way back."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield


class Pullback:
    """Vector-Jacobian products of `outputs` with respect to `leaves`, for [k, ...] cotangents at once.

    loop_reason: why cotangents go one by one, once vmap has failed; None as long as it has not. What fails in another
        way than vmap, fails one by one, too.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self.outputs, self.leaves = outputs, leaves
        self.loop_reason: str | None = None

    def __call__(self, cotangents: Cotangents) -> list[Tensor]:
        """[k, *leaf.shape] for every leaf; zeros where nothing depends on it."""
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        outputs, given = [output for output, _ in pairs], [cotangent for _, cotangent in pairs]

        def grad(*one: Tensor) -> tuple[Tensor, ...]:
            grads = torch.autograd.grad(outputs, self.leaves, one, retain_graph=True, allow_unused=True)
            return tuple(
                torch.zeros_like(leaf) if grad is None else dense(grad)
                for leaf, grad in zip(self.leaves, grads, strict=True)
            )

        if self.loop_reason is None:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop because")
                    return list(torch.vmap(grad)(*given))
            except RuntimeError as error:  # of every kind: torch has no word for an operation that vmap does not know
                if fatal(error):
                    raise
                self.loop_reason = f"vmap is not possible here: {first_line(error)}"
        each = [grad(*one) for one in zip(*given, strict=True)]
        return [torch.stack(grads) for grads in zip(*each, strict=True)]
