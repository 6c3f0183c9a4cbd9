"""What a model comes in, and what it may not be made of: wrappers of data parallelism, torch.compile, TorchScript."""

from __future__ import annotations

import torch
from torch import nn

from kfac_fx.passes.errors import UntraceableError


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of data parallelism and of torch.compile."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    original = getattr(model, "_orig_mod", None)  # of torch.compile, which has no public name for it
    return unwrapped(original) if isinstance(original, nn.Module) else model


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
