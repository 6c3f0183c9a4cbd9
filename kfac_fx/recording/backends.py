"""Backends: emitted graphs, training forwards and KFAC's update run in eager mode or under torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.passes.errors import first_line, out_of_memory
from kfac_fx.passes.torch_private import COMPILER

COMPILE_BACKENDS = ("eager", "inductor", "cudagraphs", "aot_eager")
CODE_NUMBERS = itertools.count(1)


def compiled_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """`function` under a backend: "eager", "inductor", "cudagraphs" (inductor with CUDA graphs), or another of
    torch.compile's."""
    return function if backend == "eager" else torch.compile(with_own_code(function), fullgraph=True, **how(backend))


def compiled_model(model: nn.Module | Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The training forward under torch.compile, with graph breaks; recordings have none."""
    return torch.compile(model, **how(backend))


def how(backend: str) -> dict[str, Any]:
    """The arguments of torch.compile for a backend."""
    return {"mode": "reduce-overhead"} if backend == "cudagraphs" else {"backend": backend}


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with a code object of its own.

    torch.compile counts graphs by code objects and gives up at the ninth, and the functions of all nets, captures and
    optimizers share their code.
    """
    if isinstance(function, MethodType):
        return MethodType(with_own_code(function.__func__), function.__self__)
    assert isinstance(function, FunctionType), f"bug in kfac_fx: {function} has no code to compile"
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(CODE_NUMBERS)}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class CompiledOrPlain:
    """`function` under `backend`, in eager mode after the first failure: an autograd.Function can hold any Python code.

    reason: the compiler's message then; None as long as it has not failed.
    """

    def __init__(self, function: Callable[..., Any], backend: str) -> None:
        self.function, self.backend = function, backend
        self.compiled: Callable[..., Any] | None = compiled_function(function, backend)
        self.reason: str | None = None

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            try:
                return self.compiled(*args)
            except Exception as error:
                if not type(error).__module__.startswith(COMPILER):
                    raise
                self.compiled = None
                self.reason = f"{self.backend} cannot compile an autograd.Function in it: {first_line(error)}"
        return self.function(*args)


class CudaGraph:
    """Runs a function as one CUDA graph, from the second call with equal keys on.

    The function reads and writes tensors that lie where they are as long as the key stays. At the first call it runs as
    it is, so that what is compiled or allocated once is so before the capture. If the capture fails, it runs as it is
    from then on.

    Attributes:
        reason: the message of a capture that failed.
    """

    def __init__(self) -> None:
        self.key: Hashable = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.reason: str | None = None

    def __call__(self, function: Callable[[], None], key: Hashable) -> None:
        if self.reason is not None or not torch.cuda.is_available() or key != self.key:
            self.key, self.graph = key, None
            function()
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads, such as those of a DataLoader, may do meanwhile what a capture must not.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    function()
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                self.reason = f"a CUDA graph cannot hold the operations of a step: {first_line(error)}"
                function()
                return
            self.graph = graph
        self.graph.replay()


def lasting(result: Tensor, backend: str) -> Tensor:
    """A copy under "cudagraphs", because the next run of a CUDA graph overwrites the results of this one."""
    return result.clone() if backend == "cudagraphs" else result
