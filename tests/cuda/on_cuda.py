"""Warnings that are no fault of anyone's here; all others are errors in these tests, too."""

SAID_BY_TORCH = (
    "TensorFloat32 tensor cores",  # inductor's advice, where factors need them off
    "Synchronization debug mode is a prototype",  # from the tests that want to see every wait
    "Attempting to run cuBLAS, but there was no current CUDA context",  # a backward's thread, before its first product
    "The CUDA Graph is empty",  # when torch begins to capture the first one
    ".*should not be instantiated:DeprecationWarning",  # dynamo, of any tap
    ".*torch.jit:DeprecationWarning",  # inductor's own imports
)
