"""Float32 products in float32, whatever the user allowed for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

BACKENDS: Any = torch.backends  # not all of it is in torch's type stubs


@contextmanager
def full_precision(everything: bool = False) -> Iterator[None]:
    """Float32 matrix products in float32; all settings are put back.

    A factor is decomposed later: ten bits of mantissa in it are not enough. Inside a compiled region the setting counts
    while the region runs, and for inductor's own kernels while it compiles: enter outside of it.

    everything: convolutions and recurrent layers, too, which cuDNN computes in TF32 unless it is told otherwise.
    """
    backends = [BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul]
    if everything:
        backends += [BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn]
    before = [backend.fp32_precision for backend in backends]
    older = older_settings(everything)
    try:
        for write, _, full in older:
            write(full)
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for write, chosen, _ in older:
            write(chosen)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def older_settings(everything: bool) -> list[tuple[Callable[[Any], None], Any, Any]]:
    """(setter, the user's choice, full precision): torch raises where someone reads these and the newer ones say
    otherwise; so it does here, if the user has set the newer ones, and these are left alone."""
    found: list[tuple[Callable[[Any], None], Any, Any]] = []
    with suppress(RuntimeError):
        found.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest"))
    if everything:
        with suppress(RuntimeError):
            found.append((partial(setattr, BACKENDS.cudnn, "allow_tf32"), BACKENDS.cudnn.allow_tf32, False))
    return found


def full_precision_in_eager() -> AbstractContextManager[None]:
    """Of a backward that a compiler may trace, which knows no settings: then they are those of the whole region."""
    return nullcontext() if torch.compiler.is_compiling() else full_precision()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Not `torch.backends.cudnn.flags`, which sets TF32, too, and raises where the user has set it by the newer API."""
    before = BACKENDS.cudnn.enabled
    BACKENDS.cudnn.enabled = False
    try:
        yield
    finally:
        BACKENDS.cudnn.enabled = before
