"""The user's own code: the line of it behind a node, an operation that runs, an error, and a warning.

A file is the user's if it is neither torch's nor this library's, if it is not generated, and if it does not merely run
the code of others, as contextlib does.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import traceback
import warnings
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"  # this library's
# Packages that call the library for the user.
BETWEEN = ("torch", "accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning")


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
