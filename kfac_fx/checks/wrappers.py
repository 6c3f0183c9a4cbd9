"""What a model comes in, and what it may not be made of: wrappers of data parallelism, torch.compile, TorchScript."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from kfac_fx.passes.errors import UntraceableError


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of data parallelism and of torch.compile."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    original = getattr(model, "_orig_mod", None)  # of torch.compile, which has no public name for it
    return unwrapped(original) if isinstance(original, nn.Module) else model


def refuse_unfit(model: nn.Module) -> None:
    """Raises UntraceableError for what no capture can do anything with, with all culprits."""
    refuse_sharded(model)
    refuse_scripted(model)
    refuse_without_shapes(model)
    refuse_complex(model)


def refuse_sharded(model: nn.Module) -> None:
    flat, sharded = (
        loaded("torch.distributed.fsdp", "FullyShardedDataParallel"),
        loaded("torch.distributed.tensor", "DTensor"),
    )
    modules = [name or "the model itself" for name, one in model.named_modules() if flat and isinstance(one, flat)]
    parameters = [name for name, one in model.named_parameters() if sharded and isinstance(one, sharded)]
    if found := [*modules, *parameters]:
        raise UntraceableError(
            f"parameters that are spread over processes have no factors in any: {', '.join(found)}.\n"
            "Compile the model with whole parameters, in DistributedDataParallel for several processes."
        )


def loaded(module: str, name: str) -> Any:
    """A class, if anybody has imported it."""
    return getattr(sys.modules.get(module), name, None)


def refuse_without_shapes(model: nn.Module) -> None:
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    named = (*model.named_parameters(), *model.named_buffers())
    if names := [name for name, one in named if isinstance(one, lazy)]:
        raise UntraceableError(
            f"these parameters have no shape yet: {', '.join(names)}.\n"
            "Run the model once on a batch, as in model(*example_inputs), and compile it then."
        )


def refuse_complex(model: nn.Module) -> None:
    names = [name for name, one in model.named_parameters() if one.requires_grad and one.is_complex()]
    if names:
        raise UntraceableError(
            f"the Fisher is of real parameters, and these are complex: {', '.join(names)}.\n"
            "Keep torch.view_as_real(w) as the parameter, and let forward compute with torch.view_as_complex of it."
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raises UntraceableError with the outermost of them."""
    scripted = [name for name, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    outer = [name for name in scripted if not any(other == "" or name.startswith(f"{other}.") for other in scripted)]
    if scripted:
        names = ", ".join(outer) or "the model itself"
        raise UntraceableError(
            f"a TorchScript module, whose Python is gone, cannot be captured: {names}.\n"
            "Hand kfac_fx.compile the module that torch.jit.script or torch.jit.trace was given."
        )
