"""The marks of all tests on a GPU, and a context in which every wait of the host is an error."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

# Warnings that are no fault of anyone's here; all others are errors in these tests, too.
SAID_BY_TORCH = (
    "TensorFloat32 tensor cores",  # inductor's advice, where factors need them off
    "Synchronization debug mode is a prototype",  # from the tests that want to see every wait
    "Attempting to run cuBLAS, but there was no current CUDA context",  # a backward's thread, before its first product
    "The CUDA Graph is empty",  # when torch begins to capture the first one
    ".*should not be instantiated:DeprecationWarning",  # dynamo, of any tap
    ".*torch.jit:DeprecationWarning",  # inductor's own imports
)
ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(f"ignore:{words}") for words in SAID_BY_TORCH),
]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
