"""Every error a user can meet: `ValueError` kinds for the model or the arguments, `RuntimeError` kinds for the order of
calls.

Errors that were caught: which of them must go on, and what to say of the others.

Where one way fails there may be another, with its reason in the report. It is no way out of three things: memory
that is gone, a device that failed, and a bug of ours. A capture that fails says at which line of the user's code.
"""

from __future__ import annotations

import difflib
import inspect
import io
import linecache
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from .torch_private import LOGGERS

OWN_FOLDER = str(Path(__file__).parents[1])  # the compiler


class RegistrationError(ValueError):
    """Parameters that are registered wrongly, or not at all; the text names every culprit at once."""


class AmbiguousRegistrationError(RegistrationError):
    """Two registrations claim one parameter and neither contains the other."""


class LinkError(RegistrationError):
    """A linked-parameter declaration that does not fit the model."""


class ReuseError(RegistrationError, KeyError):
    """`reuse` does not fit: nothing of this name is registered yet, or something is. Also a KeyError."""

    def __str__(self) -> str:  # KeyError would print its argument's repr
        return str(self.args[0])


class ApproximationError(RegistrationError):
    """An `approximations` key that names nothing, or a value that the layer does not have."""


class LayerError(ValueError):
    """A layer declaration that contradicts itself or another one."""


class UntraceableError(ValueError):
    """The model, or a part of it, could not be captured as a graph."""


class LossError(ValueError):
    """No output distribution: the Fisher has nothing to be the Fisher of."""


class TargetsMissing(ValueError):
    """An estimation mode that needs the true targets was given none."""


class ModelChangedError(RuntimeError):
    """The model is no longer the one that was compiled."""


class FactorNotReady(RuntimeError):
    """A factor or an inverse was read before its first update."""


class AlreadyAttachedError(RuntimeError):
    """A second optimizer was built on one compiled module."""


class NotRegisteredError(KeyError):
    """A power or Cholesky factor that the estimator does not keep, or a vector or key that does not fit its blocks."""

    def __str__(self) -> str:  # KeyError would print its argument's repr
        return str(self.args[0])


PUBLIC = (
    RegistrationError,
    AmbiguousRegistrationError,
    LinkError,
    ReuseError,
    ApproximationError,
    LayerError,
    UntraceableError,
    LossError,
    TargetsMissing,
    ModelChangedError,
    FactorNotReady,
    AlreadyAttachedError,
    NotRegisteredError,
)
for _error in PUBLIC:  # a traceback shows the name that the user imports
    _error.__module__ = "kfac_fx"


def nearest(name: object, names: Iterable[str]) -> str:
    """The sentence " Did you mean 'x'?" for the closest of `names`, or nothing if none is close or this is no name."""
    near = difflib.get_close_matches(name, list(names), n=1) if isinstance(name, str) else []
    return f" Did you mean {near[0]!r}?" if near else ""


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two indented columns, one line a culprit."""
    rows = list(rows)
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:<{width}}  {right}".rstrip() for left, right in rows)


def plural(number: int, noun: str) -> str:
    """`"1 use"`, `"2 uses"`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# Packages that call the library for the user.
BETWEEN = ("torch", "accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning")


def warn_user(warning: Warning) -> None:
    """Warn, with the file and line of the call that entered the library.

    A `stacklevel` would depend on the depth of our own calls, and of torch's: schedulers, profilers and `no_grad` wrap
    `step`, and trainers call it. Skipped are the frames of the library, of `BETWEEN`, and of generated code, whose
    module has no name.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "torch").split(".")[0] in ("kfac_fx", *BETWEEN):
        frame = frame.f_back
    if frame is None:  # no user's code, as in `python -m kfac_fx.cli`
        warnings.warn(warning, stacklevel=2)
        return
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(warning, type(warning), frame.f_code.co_filename, frame.f_lineno, module, registry)


# --- failures ---------------------------------------------------------------------------------------------------------


OURS = "bug in kfac_fx"
# The words of torch's allocators and of CUDA's libraries. The CPU's allocator has no error class of its own.
MEMORY = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")


def fatal(error: Exception) -> bool:
    """Whether no other way would help, and trying one would hide what is wrong: raise it again."""
    if isinstance(error, AssertionError):
        return str(error).startswith(OURS)
    return isinstance(error, torch.AcceleratorError) or out_of_memory(error)


def out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY)


def first_line(error: Exception) -> str:
    """The error in one line: its own first, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- captures that fail -----------------------------------------------------------------------------------------------


# Words of torch's errors about branches on values of tensors.
VALUE_ERRORS = ("data-dependent", "control flow", "numpy", "Proxy", "Proxies", "unbacked", "boolean value")
SEE_THAT_IT_RUNS = (
    "See that the model runs on these inputs. If it does, write this line with other tensor operations, or compile the "
    "parts of the model that torch.export accepts."
)


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
