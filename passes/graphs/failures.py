"""Errors that were caught: which of them must go on, and what to say of the others.

Where one way fails there may be another, with its reason in the report. It is no way out of three things: memory
that is gone, a device that failed, and a bug of ours.
"""

from __future__ import annotations

import torch

OURS = "bug in kfac_fx"
# Of torch's allocators, the CPU's among them, which have no error of their own, and of CUDA's libraries.
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
