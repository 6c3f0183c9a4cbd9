"""A captured model, emitted as a module with a tap at every use, and the ways to run it.

    graph:    x -> linear(x, w)
    emitted:  (x, probes) -> tap(linear(x, w), x, probes[0])

`EmittedModel` is all that a `Recorder` knows of the model. One graph of the whole model is an `EmittedGraph`. A model
of which only submodules are captured is a `kfac_fx.recording.emitted_submodules.EmittedSubmodules`.

**Backends**: emitted graphs, training forwards and KFAC's update run in eager mode or under torch.compile.
"""

from __future__ import annotations

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from kfac_fx.linalg.processes import SavedShards, averaged_unsharded, is_divided, unsharded
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.declared import FoundLoss
from kfac_fx.passes import results
from kfac_fx.passes.errors import LossError, first_line, out_of_memory, where
from kfac_fx.passes.graphs.edit import attribute
from kfac_fx.passes.graphs.labels import symbolic_sizes
from kfac_fx.passes.graphs.operations import (
    CASTS,
    OWN_BACKWARD,
    PARTS,
    PERMUTES,
    computed,
    is_random,
    no_grad_region,
    op_name,
)
from kfac_fx.passes.ir import Dims, Program, Registration, Use, Way
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.losses import weights_on
from kfac_fx.passes.rewrite import renamed, rewrite, same_graph, with_taps, without_taps
from kfac_fx.passes.torch_private import COMPILER, GRAD, RECOMPILE_LIMIT, buffers_of, parameters_of, pytree
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.effects import accelerators, same_random
from kfac_fx.passes.tracing.signature import autocast, under_autocast
from kfac_fx.recording.statistics import Key
from kfac_fx.recording.taps import Link, Tap

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


Taps = dict[Key, list[Tap]]  # by registration, one tap a use, in the order of its uses
VALUES_CHANGED = CASTS | {"masked_fill"}  # operations whose elements stay where they are
REARRANGED = VALUES_CHANGED | PARTS | PERMUTES | {"reshape", "view", "flatten", "squeeze", "unsqueeze", "ravel"}
RunOutputs = tuple[Any, tuple[Tensor, ...]]  # what the model returns, flat; the Fisher's outputs

# --- graphs on shards -------------------------------------------------------------------------------------------------


class Unread:
    """A sharded parameter that no node has read yet."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OnShards(fx.Interpreter):
    """Runs a module on tensors by name, instead of its own; `gather` makes sharded ones whole.

    The code of a graph reads all parameters first. Here every node gathers what it is the first to read, and the last
    one that reads it drops it, so that a process holds a few whole parameters at a time, as it does with FSDP2.
    """

    def __init__(
        self, module: fx.GraphModule, tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(module)
        self.tensors, self.gather = tensors, gather

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.tensors:
            return super().get_attr(target, args, kwargs)
        value = self.tensors[target]
        return Unread(value) if is_divided(value) else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        for node in n.all_input_nodes:
            if isinstance(value := self.env[node], Unread):
                self.env[node] = self.gather(value.value)
        return super().fetch_args_kwargs_from_env(n)


def run_on_shards(
    module: fx.GraphModule, tensors: Mapping[str, Tensor], values: tuple[Any, ...], *, backward: bool, average: bool
) -> Any:
    """The outputs of the module.

    Args:
        backward: whether there will be a backward, which gathers again what it reads.
        average: gradients of shards are means over processes, as those of FSDP2, and not sums.
    """
    if not backward:  # or one in a transformation of torch.func, which has no hooks on saved tensors
        return OnShards(module, tensors, averaged_unsharded if average else unsharded).run(*values)
    saved = SavedShards(average)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return OnShards(module, tensors, saved.unsharded).run(*values)


# --- emitted models ---------------------------------------------------------------------------------------------------


@dataclass
class EmittedModel(ABC):
    """A captured model with taps in it.

    A run changes nothing of the model: it works on the parameters and buffers that it is given.

    Attributes:
        capture: the calling convention, and the effects of forward that the graph does not have.
        program: the graph and its registrations.
        model: the original module.
        backend: of `run`; see `compiled_graph`.
        make_tap: the kind of taps.
        like: the same capture emitted before, whose code may serve; None once this one is emitted.
        taps: those of the emitted module.
        collecting: the same capture with collecting taps, if it was asked for; see `meeting_cases.collecting`.
        parameter_names, buffer_names: those that a run reads.
        whole: whether one graph is the whole model, so that none of its Python code runs.
        case_dims: the dimension of the cases in every one of the Fisher's outputs; empty if it is the first in all.
        leaves: the nodes that a graph of the whole model returns, flat.
        loss_sites: the losses that forward computes; of a divided model, those of the last run.
    """

    capture: Capture
    program: Program
    model: nn.Module
    backend: str = "eager"
    make_tap: type[Tap] = Tap
    like: Self | None = field(default=None, repr=False)
    taps: Taps = field(default_factory=dict, init=False)
    collecting: EmittedModel | None = field(default=None, init=False, repr=False)
    parameter_names: list[str] = field(init=False)
    buffer_names: list[str] = field(init=False)
    case_dims: tuple[int, ...] = field(default=(), init=False)
    leaves: Sequence[Any] = field(default=(), init=False, repr=False)

    whole: ClassVar[bool]

    @property
    @abstractmethod
    def loss_sites(self) -> Sequence[FoundLoss]: ...

    @property
    @abstractmethod
    def graphs(self) -> Sequence[Callable[..., Any]]:
        """The functions that run the graphs under `backend`."""

    @property
    def plain_reason(self) -> str | None:
        """Why a graph runs without `backend`; None if none does."""
        return next((reason for graph in self.graphs if (reason := getattr(graph, "reason", None))), None)

    @cached_property
    def holders(self) -> list[tuple[str, dict[str, Any], str]]:
        """(name, the dictionary of its module that holds it, its key there) of every parameter that a run reads.

        Modules stay those of the capture, or `Structure.check` raises an error."""
        ends = [(name, *name.rpartition(".")[::2]) for name in self.parameter_names]
        return [(name, parameters_of(self.model.get_submodule(path)), key) for name, path, key in ends]

    def but(self, **changes: Any) -> Self:
        """The same capture emitted again, with another program, backend or kind of tap (`make_tap`)."""
        return replace(self, **changes, like=self)

    @abstractmethod
    def run(
        self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any], compiled: bool = True
    ) -> RunOutputs:
        """Run the model as a pure function, except for what it writes into `buffers`.

        values: the model's inputs, as `capture.flatten` returns them. probes: one mapping a registration, or None.
        compiled: whether to run under `backend`.
        """

    @abstractmethod
    def run_in_training(self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any]) -> RunOutputs:
        """As `run`, instead of the model's own forward."""

    @abstractmethod
    def isolated(self) -> AbstractContextManager[None]:
        """Gradients on; the random streams are restored afterwards."""

    def autocast_dtypes(self) -> set[torch.dtype]:
        """The dtypes that autocast inside of forward casts to, as far as the captures tell."""
        return set()

    @abstractmethod
    def examples(self, values: Any) -> int:
        """The number of examples in a batch."""

    def part(self, values: Any, fraction: float) -> Any:
        """The first `fraction` of the examples of every input that has them, rounded up."""
        if fraction >= 1.0:
            return values
        total = self.examples(values)
        return self.first_examples(values, total, math.ceil(total * fraction))

    @abstractmethod
    def first_examples(self, values: Any, total: int, wanted: int) -> Any:
        """The first `wanted` of `total` examples of every input that has them."""

    def dims_of_cases(self, outputs: int) -> Sequence[int]:
        """The dimension of the cases in each of the Fisher's outputs, and 0 for further ones."""
        return [*self.case_dims, *[0] * (outputs - len(self.case_dims))]

    @abstractmethod
    def padding(self, values: Any, fisher: Sequence[Tensor]) -> tuple[Tensor, Sequence[Dims | None]] | None:
        """The padding mask [cases, positions], and where its two dimensions are in each of the Fisher's outputs. None
        if nothing is padding."""

    def target_values(self, targets: Any, values: Any, known: Mapping[Any, Tensor] | None = None) -> Any:
        """The targets of a loss site on these inputs. Raises LossError if they are computed from parameters.

        known: values of nodes in a run on these inputs, such as that of which `torch.zeros_like` takes the shape.
        """
        return targets

    def weights(self, way: Way, leaf: Tensor, values: Any, known: Mapping[Any, Tensor]) -> Tensor:
        """The gradient of the returned loss with respect to a loss with the value `leaf`. Raises LossError if other
        values on the way are computed from parameters. known: see `target_values`."""
        raise AssertionError("bug in kfac_fx: a loss that is followed outside of a graph")


@dataclass
class EmittedGraph(EmittedModel):
    """One graph of the whole model.

    Attributes:
        module: with the taps.
        renamed: see `passes.rewrite.renamed`.
        tied: whether it reads parameters or buffers under several names.
        random: whether it draws random numbers.
        case_axes: the dimension of the cases in every input.
    """

    module: fx.GraphModule = field(init=False, repr=False)
    renamed: dict[str, str] = field(init=False, repr=False)
    tied: bool = field(init=False)
    random: bool = field(init=False)
    case_axes: list[int | None] = field(init=False, repr=False)

    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        layers, like, self.like = self.program.layers, self.like, None
        make_tap = tap_factory(self.taps, self.make_tap, layers)
        if like is not None and self.backend == "eager" and same_graph(self.program, like.program):
            self.module = with_taps(like.module, self.program, make_tap)
            self.renamed, self.tied, self.random = like.renamed, like.tied, like.random
            self.parameter_names, self.buffer_names = like.parameter_names, like.buffer_names
            self.holders, self.slots = like.holders, like.slots
        else:
            self.module = rewrite(
                self.program,
                make_tap,
                lambda registration, use, first, last: Link(registration, use, layers[use.layer], first, last),
            )
            self.renamed, read = renamed(self.module), attributes_read(self.module)
            parameters = dict(self.model.named_parameters())
            averages = [name for name in dict.fromkeys(averages_written(self.program.graph)) if name in parameters]
            self.parameter_names = [name for name in parameters if name in read and name not in averages]
            buffers = (name for name, _ in self.model.named_buffers(remove_duplicate=False))
            self.buffer_names = [*(name for name in buffers if name in read), *averages]
            self.tied = not read <= {*self.parameter_names, *self.buffer_names}  # read under other names, too
            self.random = any(is_random(node) for node in self.module.graph.nodes)
        self.placeholders = self.program.inputs
        sizes_of_inputs = map(symbolic_sizes, self.placeholders)
        cases = self.program.cases
        self.case_axes = [sizes.index(cases) if cases in sizes else None for sizes in sizes_of_inputs]
        self.case_dims = self.program.case_dims if any(self.program.case_dims) else ()
        eager = self.backend == "eager"
        self.compiled = self.run_eagerly if eager else compiled_graph(self.call, self.module.graph, self.backend)
        self.leaves = results.tree_leaves(self.program.returned)
        places = {node: place for place, node in enumerate(self.leaves)}
        self.places_of_losses = [places[node] for node in self.program.returned_losses]

    @property
    def loss_sites(self) -> Sequence[FoundLoss]:
        return self.program.losses

    @property
    def graphs(self) -> Sequence[Callable[..., Any]]:
        return (self.compiled,)

    @cached_property
    def slots(self) -> list[tuple[str, dict[str, Any], str]]:
        """(name, the dictionary that holds it, its key there) of every tensor of a run, in the emitted module. A tensor
        that has another name there, too, is in both places."""
        names = {self.renamed.get(name, name): name for name in (*self.parameter_names, *self.buffer_names)}
        of_tensor = {id(attribute(self.module, place)): name for place, name in names.items()}
        return [
            (names[place] if place in names else of_tensor[id(tensor)], held, key)
            for path, module in self.module.named_modules()
            for held in (parameters_of(module), buffers_of(module))
            for key, tensor in held.items()
            if (place := f"{path}.{key}" if path else key) in names or id(tensor) in of_tensor
        ]

    def run_eagerly(self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any]) -> RunOutputs:
        """As `call`. functional_call looks for the places of all tensors in every call, which takes longer than a small
        graph."""
        tensors = {**parameters, **buffers}
        places = [(held, key, tensors[name]) for name, held, key in self.slots if name in tensors]
        before = [held[key] for held, key, _ in places]
        try:
            for held, key, tensor in places:
                held[key] = tensor
            outputs: RunOutputs = self.module(*values, probes)
        finally:
            for (held, key, _), tensor in zip(places, before, strict=True):
                held[key] = tensor
        return outputs

    def call(self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any]) -> RunOutputs:
        """For torch.compile."""
        results: RunOutputs = functional_call(
            self.module, self.held(parameters, buffers), (*values, probes), tie_weights=self.tied
        )
        return results

    def held(self, parameters: Tensors, buffers: Tensors) -> Tensors:
        """The tensors of a run by the names that the emitted module has for them."""
        tensors = {**parameters, **buffers}
        return renamed_tensors(tensors, self.renamed) if self.renamed else tensors

    def run(
        self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any], compiled: bool = True
    ) -> RunOutputs:
        if any(map(is_divided, parameters.values())):
            return self.run_on_shards(parameters, buffers, values, probes, average=False)
        with under_autocast(self.program.autocast):
            return (self.compiled if compiled else self.run_eagerly)(parameters, buffers, values, probes)

    def evaluate(self, parameters: Tensors, buffers: Tensors, values: Any) -> RunOutputs:
        """As `run` without taps, which takes less time in small graphs; nothing is recorded."""
        if any(map(is_divided, parameters.values())):
            return self.run(parameters, buffers, values, [None] * len(self.program.registrations), compiled=False)
        module, names = self.bare
        tensors = {**parameters, **buffers}
        with under_autocast(self.program.autocast):
            outputs: RunOutputs = module(*(tensors[name] for name in names), *values, None)
        return outputs

    @cached_property
    def bare(self) -> tuple[fx.GraphModule, list[str]]:
        """The graph without taps, and the names of the tensors that are its first inputs."""
        return without_taps(self.program, (*self.parameter_names, *self.buffer_names))

    def run_in_training(self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any]) -> RunOutputs:
        if any(map(is_divided, parameters.values())):
            return self.run_on_shards(parameters, buffers, values, probes, average=True)
        return self.run(parameters, buffers, values, probes)

    def run_on_shards(
        self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any], average: bool
    ) -> RunOutputs:
        tensors, backward = self.held(parameters, buffers), any(probe is not None for probe in probes)
        inputs = (*values, probes)
        with under_autocast(self.program.autocast):
            result: RunOutputs = run_on_shards(self.module, tensors, inputs, backward=backward, average=average)
        return result

    def isolated(self) -> AbstractContextManager[None]:
        return isolated(self.model, self.random)

    def autocast_dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype in self.program.autocast}

    # --- the batch --------------------------------------------------------------------------------------------------

    def case_axis(self, position: int, value: Any) -> int | None:
        """The dimension of the cases in an input; the first one if the graph has no symbolic sizes."""
        if not isinstance(value, Tensor):
            return None
        if self.program.cases is None:
            return 0 if value.dim() else None
        return self.case_axes[position]

    def examples(self, values: Any) -> int:
        axes = ((value, self.case_axis(position, value)) for position, value in enumerate(values))
        numbers = [value.shape[axis] for value, axis in axes if axis is not None]
        if not numbers and self.program.cases is None:  # torch.fx takes a list or a dictionary of tensors as one input
            numbers = [leaf.shape[0] for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
        return numbers[0] if numbers else 1

    def first_examples(self, values: Any, total: int, wanted: int) -> Any:
        def shortened(position: int, value: Any) -> Any:
            axis = self.case_axis(position, value)
            return value if axis is None or value.shape[axis] != total else value.narrow(axis, 0, wanted)

        return tuple(shortened(position, value) for position, value in enumerate(values))

    def repeated_examples(self, values: Any, total: int, wanted: int) -> Any:
        """The inputs with copies of the first `wanted` of `total` examples where the other ones were."""

        def again(position: int, value: Any) -> Any:
            axis = self.case_axis(position, value)
            if axis is None or value.shape[axis] != total:
                return value
            copies = [value.narrow(axis, 0, wanted)] * math.ceil(total / wanted)
            return torch.cat(copies, dim=axis).narrow(axis, 0, total)

        return tuple(again(position, value) for position, value in enumerate(values))

    def padding(self, values: Any, fisher: Sequence[Tensor]) -> tuple[Tensor, Sequence[Dims | None]] | None:
        if self.program.mask is None:
            return None
        return self.value(self.program.mask, values), self.program.mask_dims

    def target_values(self, targets: Any, values: Any, known: Mapping[Any, Tensor] | None = None) -> Any:
        return self.value(targets, values, known) if isinstance(targets, fx.Node) else targets

    def weights(self, way: Way, leaf: Tensor, values: Any, known: Mapping[Any, Tensor]) -> Tensor:
        known = dict(zip(self.placeholders, values, strict=True)) | dict(known)
        return weights_on(way, leaf, lambda node: value_of(node, known, self.constant_or_parameter))

    def places(self, node: Any, values: Any, examples: int) -> Tensor | None:
        """The example of every element of a tensor that is made of parts of an input with a dimension of the cases, in
        another order; None if it is no such tensor, or if a parameter tells which parts these are."""
        steps: list[fx.Node] = []
        while isinstance(node, fx.Node) and op_name(node) in REARRANGED and isinstance(node.args[0], fx.Node):
            steps.append(node)
            node = node.args[0]
        sizes = symbolic_sizes(node) if isinstance(node, fx.Node) and node.op == "placeholder" else []
        first = not self.case_dims and not any(self.case_axes)  # targets may have a symbol of their own
        if self.program.cases is None or not sizes or not (first or self.program.cases in sizes):
            return None
        source, dim = self.value(node, values), sizes.index(self.program.cases) if self.program.cases in sizes else 0
        numbers: Any = torch.arange(examples, device=source.device).view(-1, *[1] * (source.dim() - dim - 1))
        numbers = numbers.expand(source.shape).contiguous() if source.shape[dim] == examples else None
        try:
            for step in reversed(steps) if numbers is not None else ():
                if op_name(step) not in VALUES_CHANGED:
                    rest = fx.map_arg(step.args[1:], lambda n: self.value(n, values))
                    kwargs = fx.map_arg(step.kwargs, lambda n: self.value(n, values))
                    numbers = computed(step, (numbers, *rest), kwargs)
        except LossError:
            return None
        return numbers if isinstance(numbers, Tensor) else None

    def value(self, node: fx.Node, values: Any, known: Mapping[Any, Tensor] | None = None) -> Any:
        return value_of(node, dict(zip(self.placeholders, values, strict=True)) | dict(known or {}), self.constant)

    def constant(self, name: str) -> Any:
        """A buffer, or another object that the graph reads and that is no parameter. Raises LookupError for one."""
        if name in self.program.parameters:
            raise LookupError(name)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        return buffers[name] if name in buffers else attribute(self.program.root, name)

    def constant_or_parameter(self, name: str) -> Any:
        """As `constant`; of a parameter the present values."""
        parameter = self.program.parameters.get(name)
        return self.constant(name) if parameter is None else parameter.detach()


def tap_factory(taps: Taps, make_tap: type[Tap], layers: Mapping[str, Layer]) -> Callable[[Registration, Use], Tap]:
    """Makes the tap of a use, and notes it in `taps`."""

    def tap_of(registration: Registration, use: Use) -> Tap:
        tap = make_tap(registration, use, layers[use.layer])
        taps.setdefault(registration.parameters, []).append(tap)
        return tap

    return tap_of


def averages_written(graph: fx.Graph) -> Iterator[str]:
    """The names of the averages that norms of batches and instances write into. A frozen parameter among these is a
    buffer of a run, so that a recording writes into a copy."""
    for node in graph.nodes:
        if op_name(node) in ("batch_norm", "instance_norm") and len(node.args) > 5 and node.args[5] is True:
            averages = (operand for operand in node.args[1:3] if isinstance(operand, fx.Node))
            yield from (str(average.target) for average in averages if average.op == "get_attr")


def attributes_read(module: fx.GraphModule) -> set[str]:
    """The names in the model of the parameters and buffers that an emitted module reads."""
    names = {target: name for name, target in renamed(module).items()}
    targets = (str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    return {names.get(target, target) for target in targets}


def renamed_tensors(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """The tensors, some of them under other names."""
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def compiled_graph(function: Callable[..., Any], graph: fx.Graph, backend: str) -> Callable[..., Any]:
    """`function`, which runs `graph`, under `backend`."""
    if backend == "eager":
        return function
    has_functions = any(op_name(node) == OWN_BACKWARD for node in graph.nodes)
    return CompiledOrPlain(function, backend, has_functions, has_statistics=True)


def isolated(model: nn.Module, random: bool = True) -> AbstractContextManager[None]:
    """Gradients on; torch's random streams are restored afterwards, if the run is `random`."""
    return random_isolated(model) if random else torch.enable_grad()


@contextmanager
def random_isolated(model: nn.Module) -> Iterator[None]:
    with torch.enable_grad(), same_random(accelerators(model.parameters())):
        yield


def value_of(node: fx.Node, values: dict[fx.Node, Any], constant: Callable[[str], Any]) -> Any:
    """The value of a node that is computed from inputs and constants.

    values: of the placeholders; those that are computed are added. constant: what the graph reads under a name; raises
        LookupError for parameters.
    """
    if node in values:
        return values[node]
    if node.op == "get_attr":
        try:
            values[node] = constant(str(node.target))
        except LookupError:
            text = f"the targets of the loss at {node.name} are computed from parameters; pass `targets`"
            raise LossError(text) from None
    elif is_random(node) and not no_grad_region(node):  # which may draw none
        raise LossError(f"the targets of the loss depend on random numbers that {where(node)} draws; pass `targets`")
    else:
        args: Any = fx.map_arg(node.args, lambda n: value_of(n, values, constant))
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: value_of(n, values, constant))
        values[node] = computed(node, args, kwargs)
    return values[node]
