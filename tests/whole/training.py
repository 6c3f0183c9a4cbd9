"""One training step, and everything that it leaves behind, for comparisons bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.passes.torch_private import pytree

SEED = 7


def tensors(outputs: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def loss_of(outputs: object) -> Tensor:
    """A scalar that every floating-point output has a part in."""
    terms = [out.square().mean() for out in tensors(outputs) if out.is_floating_point()]
    return torch.stack(terms).sum()


def step(model: nn.Module, forward: Callable[[], Any]) -> dict[str, Any]:
    """Run `forward` and a backward from a fixed seed. Returns outputs, gradients, buffers and the random stream."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(SEED)
    outputs = forward()
    loss_of(outputs).backward()
    found: dict[str, Any] = {f"output {n}": out.detach().clone() for n, out in enumerate(tensors(outputs))}
    found["structure"] = str(pytree.tree_flatten(outputs)[1])
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    found["random stream"] = torch.random.get_rng_state()
    return found


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The entries that are not the same, bit for bit."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not same(value, second[name])]


def apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The entries that are not the same up to rounding."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not same(value, second[name]) and not close(value, second[name])]


def close(first: Any, second: Any) -> bool:
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor) and first.is_floating_point()
    return tensors and first.dtype == second.dtype and torch.allclose(first, second, rtol=1e-5, atol=1e-7)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(
            first.nan_to_num(nan=12345.0), second.nan_to_num(nan=12345.0)
        )
    return bool(first == second)
