"""The objects whose methods called `KFAC.step`: a GradScaler, or a Trainer of Hugging Face."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kfac_fx.passes.errors import warn_user
from kfac_fx.passes.torch_private import class_of


def callers() -> Iterator[Any]:
    """The `self` of every frame above, from the nearest on."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def scale_of_caller() -> float:
    """The loss scale of the GradScaler whose `step` called, which has divided the gradients by it; 1 without one."""
    return next((float(caller.get_scale()) for caller in callers() if isinstance(caller, torch.amp.GradScaler)), 1.0)


def warn_of_trainer(net: nn.Module, model: nn.Module) -> None:
    """Warn if a Trainer of Hugging Face that called has the compiled module `net` in the place of its `model`.

    Trainer calls `save_pretrained` of a PreTrainedModel only. Anything else is saved as a state, which safetensors
    refuses if weights are tied, after all the steps to the first checkpoint.
    """
    if not hasattr(model, "save_pretrained"):
        return
    for caller in callers():
        is_trainer = any(
            f"{kind.__module__}.{kind.__name__}" == "transformers.trainer.Trainer" for kind in type(caller).__mro__
        )
        if is_trainer and getattr(caller, "model", None) is net:
            name = class_of(model).__name__
            warn_user(
                UserWarning(
                    f"Trainer has the compiled module in the place of {name}. Checkpoints of it have no configuration, "
                    "and safetensors refuses to save tied weights. Give Trainer the model itself, compiled in place: "
                    "net = kfac_fx.compile(model, ..., in_place=True), and Trainer(model, ...)."
                )
            )
            return
