"""Errors: those that a user can meet, the words that their texts are made of, and which caught ones must go on.

Errors of the model and of arguments are kinds of `ValueError`, those of the order of calls kinds of `RuntimeError`.

**The user's own code**: the line of it behind a node, an operation that runs, an error, and a warning.

A file is the user's if it is neither torch's nor this library's, if it is not generated, and if it does not merely run
the code of others, as contextlib does.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import linecache
import os
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

__all__ = [
    "AlreadyAttachedError",
    "AmbiguousRegistrationError",
    "ApproximationError",
    "FactorNotReady",
    "InputError",
    "LayerError",
    "LinkError",
    "LossError",
    "ModelChangedError",
    "NotRegisteredError",
    "RegistrationError",
    "ReuseError",
    "TargetsMissing",
    "UntraceableError",
]


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
    """The model, or a part of it, could not be captured as a graph.

    Attributes:
        cause: the place and the message of the tracer's own error, in one line; empty for a refusal of ours.
        advice: the last line of the message, which says what to write; empty for a refusal of ours.
    """

    cause = ""
    advice = ""


class InputError(UntraceableError):
    """The model itself does not run on these inputs, so there is no graph of it: the inputs or the model are wrong."""


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


PUBLIC: tuple[type[Exception], ...] = tuple(globals()[name] for name in __all__)
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


# --- errors that were caught ------------------------------------------------------------------------------------------
#
# Where one way fails there may be another, with its reason in the report. It is no way out of three things: memory that
# is gone, a device that failed, and a bug of ours.

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


def kind_and_line(error: Exception) -> str:
    """`"ValueError: its first line"`; the type alone where the error says nothing, as a plain `assert` does."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"  # this library's
# Packages that call the library for the user.
BETWEEN = ("torch", "contextlib", "accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning")


def is_users(file: str) -> bool:
    return not file.startswith((TORCH, OWN_FOLDER, "<")) and file != contextlib.__file__


def file_line(file: str, line: object) -> str:
    """`"model.py:33"`"""
    return f"{Path(file).name}:{line}"


def source_line(node: fx.Node) -> str | None:
    """`"model.py:33"`, the innermost line of the user's behind a node; None when the capture kept no stack."""
    innermost = None
    for frame in (node.meta.get("stack_trace") or "").splitlines():
        start, _, rest = frame.strip().partition('", line ')
        file = start.removeprefix('File "')
        if rest and file != start and is_users(file):  # source may have the words, too
            innermost = file_line(file, rest.split(",")[0])
    return innermost


def is_constant_derivative(node: fx.Node) -> bool:
    """Whether a node is a torch.autograd.grad without create_graph=True, as in a trace without inputs; or detaches the
    result of one, by the user's line."""
    if node.target is torch.autograd.grad:
        return not node.kwargs.get("create_graph", False)
    frames = (node.meta.get("stack_trace") or "").strip().splitlines()
    return node.name.startswith("detach_copy") and source_line(node) is not None and "grad(" in frames[-1]


def where(node: fx.Node) -> str:
    """`"linear_1 (model.py:33)"`: the node and the innermost line of the user's behind it."""
    line = source_line(node)
    return f"{node.name} ({line})" if line else node.name


def module_of(node: fx.Node) -> str | None:
    """The path of the innermost module that a node was computed in; None if the capture kept none."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path.removeprefix("model").lstrip(".") if "L__self__" in stack else path for path, _ in stack.values()]
    return next((path for path in reversed(paths) if path), None)


def running_line() -> str:
    """`"model.py:33"`, the innermost line of the user's that runs now."""
    frames = (frame for frame in reversed(traceback.extract_stack()) if is_users(frame.filename))
    return next((file_line(frame.filename, frame.lineno) for frame in frames), "an unknown line")


def line_of(step: TracebackType) -> tuple[str, str] | None:
    """(`"model.py:33"`, its source) of one step of a traceback; None if it is not the user's."""
    file = step.tb_frame.f_code.co_filename
    return (
        (file_line(file, step.tb_lineno), linecache.getline(file, step.tb_lineno).strip()) if is_users(file) else None
    )


def users_line(error: Exception) -> str:
    """`"model.py:33"`, the innermost line of the user's in an error's traceback; empty without one."""
    line, step = "", error.__traceback__
    while step is not None:
        found = line_of(step)
        line, step = found[0] if found else line, step.tb_next
    return line


def with_users_steps(error: Exception, before: Exception | None = None) -> Exception:
    """The error with the steps of its traceback that are in the user's code, as far as there are some: those of torch
    and of this library are hundreds of lines.

    before: an error of this library's that was handled when this one was raised; it is no longer told above it.
    """
    steps, step = [], error.__traceback__
    while step is not None:
        steps += [step] if is_users(step.tb_frame.f_code.co_filename) else []
        step = step.tb_next
    kept = None
    for step in reversed(steps):
        kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = kept or error.__traceback__
    last: BaseException = error
    while before is not None and last.__context__ is not None:
        last.__context__ = None if last.__context__ is before else last.__context__
        last = last.__context__ or last
    return error


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
