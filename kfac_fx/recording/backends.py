"""Backends: emitted graphs, training forwards and KFAC's update run in eager mode or under torch.compile."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.passes.errors import first_line, out_of_memory
from kfac_fx.passes.torch_private import COMPILER, GRAD, RECOMPILE_LIMIT
from kfac_fx.passes.tracing.signature import autocast

COMPILE_BACKENDS = ("eager", "inductor", "cudagraphs", "aot_eager")
CODE_NUMBERS = itertools.count(1)
TORCH = str(Path(torch.__file__).parent)


def compiled_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """`function` under a backend: "eager", "inductor", "cudagraphs" (inductor with CUDA graphs), or another of
    torch.compile's."""
    return function if backend == "eager" else CompiledOrPlain(function, backend)


class CompiledForward:
    """The training forward under torch.compile, with graph breaks; recordings have none.

    torch.compile has no derivatives of what torch.autograd.grad returns inside of it, and says so in the backward only.
    So the first forward of each mode runs as it is, and all of them do if it takes such derivatives. Those of a later
    forward alone end in torch's error.

    model: whose forward it is. reason: why none is compiled; None if they are.
    """

    def __init__(self, function: Callable[..., Any], backend: str, model: nn.Module) -> None:
        self.function, self.backend, self.model = function, backend, model

        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        self.compiled: Callable[..., Any] = torch.compile(with_own_code(forward), **how(backend))
        self.reason: str | None = None
        self.modes: set[bool] = set()  # of the forwards that were looked at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self.model.training
        if self.reason is not None or mode in self.modes or not torch.is_grad_enabled():
            return (self.compiled if self.reason is None else self.function)(*args, **kwargs)
        self.modes.add(mode)
        with noting_derivatives() as seen:
            outputs = self.function(*args, **kwargs)
        if seen:
            self.reason = (
                f"it takes derivatives with torch.autograd.grad(..., create_graph=True), which {self.backend} cannot "
                "differentiate; torch.func.grad it can"
            )
        return outputs


@contextmanager
def noting_derivatives() -> Iterator[list[str]]:
    """Yields a list with a line for every call of torch.autograd.grad that creates a graph; none under a profiler that
    Python cannot call and set again."""
    seen: list[str] = []
    if sys.getprofile() is not None and not callable(sys.getprofile()):
        yield seen
        return

    def look(frame: FrameType, event: Any, argument: Any) -> None:
        if event == "call" and frame.f_code is GRAD and frame.f_locals.get("create_graph"):
            seen.append(frame.f_code.co_name)
        if before is not None:
            before(frame, event, argument)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def how(backend: str) -> dict[str, Any]:
    """The arguments of torch.compile for a backend."""
    return {"mode": "reduce-overhead"} if backend == "cudagraphs" else {"backend": backend}


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with a code object of its own.

    torch.compile counts graphs by code objects and gives up at the ninth, and the functions of all nets, captures and
    optimizers share their code. So do all functions that torch's decorators return, such as that of
    `@torch.no_grad()`; torch.compile calls those from a function of its own, which would be shared, too.
    """
    if isinstance(function, MethodType):
        return MethodType(with_own_code(function.__func__), function.__self__)
    assert isinstance(function, FunctionType), f"bug in kfac_fx: {function} has no code to compile"
    if function.__code__.co_filename.startswith(TORCH):

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return with_own_code(call)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(CODE_NUMBERS)}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class CompiledOrPlain:
    """`function` under `backend`, in eager mode after the first failure that may happen to any user.

    torch.compile gives up a function at the ninth variant, such as other layers that are frozen, or another set of
    modules that take part in a step. An autograd.Function can hold any Python code.

    Under autocast a graph with statistics runs in eager mode. torch.compile traces its backward under the autocast of
    the forward, which rounds the products of statistics to half precision, and cannot leave autocast in there.

    Args:
        has_functions: whether the function holds an autograd.Function.
        has_statistics: whether its backward computes statistics.

    Attributes:
        reason: why a call ran in eager mode; None if none did.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str,
        has_functions: bool = False,
        has_statistics: bool = False,
    ) -> None:
        self.function, self.backend = function, backend
        self.has_functions, self.has_statistics = has_functions, has_statistics
        self.compiled: Callable[..., Any] | None = torch.compile(
            with_own_code(function), fullgraph=True, **how(backend)
        )
        self.reason: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_statistics and autocast():
            self.reason = self.reason or f"{self.backend} would round statistics under autocast"
        elif self.compiled is not None:
            try:
                return self.compiled(*args, **kwargs)
            except Exception as error:
                if type(error).__name__ == RECOMPILE_LIMIT:
                    self.reason = (
                        f"{self.backend} has compiled {self.function.__name__} for as many variants as torch takes "
                        "(torch._dynamo.config.recompile_limit): it runs in eager mode"
                    )
                elif self.has_functions and type(error).__module__.startswith(COMPILER):
                    self.reason = f"{self.backend} cannot compile an autograd.Function in it: {first_line(error)}"
                else:
                    raise
                self.compiled = None
        return self.function(*args, **kwargs)


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
