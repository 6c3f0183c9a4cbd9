"""Watching a trace: the model's autograd.Functions, effects that no graph has, and the place of a failure."""

from __future__ import annotations

import io
import linecache
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableError, first_line
from ..registration import OWN_FOLDER
from ..torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, LOGGERS, OWN_FUNCTIONS, CheckpointFunction, NormBase
from .settings import is_torchs
from .substitutes import checkpoints_off, replaced_in_thread

# Words of torch's errors about branches on values of tensors.
VALUE_ERRORS = ("data-dependent", "control flow", "numpy", "Proxy", "Proxies", "unbacked", "boolean value")

Function = type[torch.autograd.Function]
Apply = Callable[..., Any]
Exported = Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def custom_functions(exported: Exported | None = None) -> Iterator[set[str]]:
    """Yields the names of the user's autograd.Functions that are applied inside; a trace would lose their backward.

    Checkpoints run the function that they wrap, which has the same gradients.

    exported: called instead of a Function while torch.export traces; names are not collected then.
    """
    seen: set[str] = set()

    def apply(original: Apply, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is CheckpointFunction:
            wrapped, _, *inputs = args
            return wrapped(*inputs)
        if function.__name__.startswith(OWN_FUNCTIONS):
            return original(*args, **kwargs)
        if exported is not None and torch.compiler.is_exporting():
            return exported(function, args, kwargs)
        if exported is None:
            seen.add(function.__name__)
        return original(*args, **kwargs)

    with functions_applied(apply), checkpoints_off():
        yield seen


@contextmanager
def functions_applied(apply: Callable[[Apply, Function, tuple[Any, ...], Mapping[str, Any]], Any]) -> Iterator[None]:
    """Inside, and in this thread, applying an autograd.Function calls `apply(torch's apply, the Function, args,
    kwargs)`."""

    def instead(below: Apply, cls: Function, *args: Any, **kwargs: Any) -> Any:
        return apply(partial(below, cls), cls, args, kwargs)

    with replaced_in_thread(torch.autograd.Function, "apply", instead):
        yield


def refuse_custom(model: nn.Module, custom: set[str], *, exported: bool = True) -> None:
    """Raises UntraceableError for autograd.Functions that were applied.

    exported: whether the model was traced with inputs; Functions are refused then because forward takes derivatives.
    """
    if custom:
        where = ", and its forward takes derivatives" if exported else ""
        advice = "Write it" if exported else "Give kfac_fx.compile example inputs, or write it"
        raise UntraceableError(
            f"{type(model).__name__} uses {', '.join(sorted(custom))}, an autograd.Function with its own backward, "
            f"which the graph would differentiate differently{where}.\n"
            f"{advice} with ordinary operations, or register it with torch.library.custom_op and register_autograd."
        )


def cumulative_averages(model: nn.Module) -> list[str]:
    """Set the momentum of norms that average over all batches (momentum=None), as no graph can change it each batch.

    Returns the effects that the graph therefore lacks.
    """
    norms = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, NormBase) and module.momentum is None
    ]
    for _, module in norms:
        module.momentum = 0.0
    return [f"averages over all batches in {path}" for path, module in norms if module.track_running_stats]


def backward_hooks(model: nn.Module) -> list[str]:
    """The effects of backward hooks, which an emitted module would not call."""
    return [
        f"calls the backward hooks of {path or type(model).__name__}"
        for path, module in model.named_modules()
        if any(module.__dict__[name] for name in BACKWARD_HOOKS)
    ]


def forward_hooks(model: nn.Module) -> list[str]:
    """The effects of the user's forward hooks. Their computations are in the graph; their other effects are not."""
    return [
        f"calls the forward hooks of {path or type(model).__name__}"
        for path, module in model.named_modules()
        if any(not is_torchs(hook) for name in FORWARD_HOOKS for hook in module.__dict__[name].values())
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch prints nothing about a failed capture; the error that follows says it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    printed = io.StringIO()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


SEE_THAT_IT_RUNS = (
    "See that the model runs on these inputs. If it does, write this line with other tensor operations, or compile the "
    "parts of the model that torch.export accepts."
)


def untraceable(model: nn.Module, error: Exception) -> str:
    """The text of an error: what failed, the innermost module, and the innermost line that is not torch's own."""
    line, source = "", ""
    path, frame = None, error.__traceback__
    while frame is not None:
        owner = first_argument(frame.tb_frame)
        named = next((name for name, module in model.named_modules() if module is owner), None)
        path = named if named is not None else path
        file = frame.tb_frame.f_code.co_filename
        if path is not None and not any(part in file for part in ("/torch/", OWN_FOLDER, "contextlib.py", "<")):
            line = f" ({file.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
            source = linecache.getline(file, frame.tb_lineno).strip()
        frame = frame.tb_next
    place = "" if path is None else f"; torch gave up in {path or type(model).__name__}{line}"
    shown = "".join(f"  {text}\n" for text in (source, f"{type(error).__name__}: {first_line(error)}") if text)
    if any(word in str(error) for word in VALUE_ERRORS):
        advice = (
            "Replace what depends on the values of tensors (if, while, .item(), .numpy()) by tensor operations such as "
            "torch.where."
        )
    else:
        advice = SEE_THAT_IT_RUNS
    return f"{type(model).__name__} could not be captured as a graph{place}:\n{shown}{advice}"


def first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if frame.f_code.co_argcount and names else None
