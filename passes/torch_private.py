"""The private names of torch that this library uses. No other module names one.

Every entry says why no public name serves, and what would replace it. tests/compiler/test_torch_private.py has one
guard for each: the name exists, and does what the library relies on. `make guards TORCH=2.11.0` runs the guards with
another version of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.multiprocessing import reductions
from torch.nested._internal import nested_tensor
from torch.nested._internal import ops as nested_operations
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils import _pytree, checkpoint

# --- modules ----------------------------------------------------------------------------------------------------------

# The dictionaries of a module's hooks. The public functions add and remove hooks, but do not list them.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")

# Attributes in which nn.RNNBase keeps its weights a second time. They are torch's own, and must not count as state that
# forward changes. A public list of a module's own state would replace them.
FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})

# The classes that all batch norms and all instance norms share. The public alternative is a list of nine classes each.
NormBase = nn.modules.batchnorm._NormBase
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm


def has_hooks(tensor: Tensor) -> bool:
    """Whether the user registered hooks of the gradient of a tensor. The public functions add and remove hooks, but do
    not list them."""
    return bool(tensor._backward_hooks)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dictionary of parameters. `named_parameters` gives a copy, without its Nones."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dictionary of buffers; assigning to it does not register anything."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dictionary of submodules."""
    return module._modules


def share_state(module: nn.Module, other: nn.Module) -> None:
    """`module` holds the parameters, buffers and submodules of `other`, also those that `other` is given later."""
    module._parameters, module._buffers, module._modules = other._parameters, other._buffers, other._modules


def hold_apart(module: nn.Module, submodules: dict[str, nn.Module | None]) -> None:
    """`module`, a copy whose attributes are those of another one, has these submodules and the other one keeps its own.
    The public functions register one at a time, in the dictionary that both have."""
    module.__dict__["_modules"] = submodules


# The attribute that nn.Module.compile sets: what runs instead of the module's own call, its hooks and its forward.
# Copies and pickles of a module drop it. Public hooks cannot replace a forward, and another `forward` would be copied.
CALL = "_compiled_call_impl"


def replaced_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that runs instead of the module's own call; None if there is none."""
    return module._compiled_call_impl


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Run `call` instead of the module's own call; None gives it its own call back."""
    if call is None:
        module.__dict__.pop(CALL, None)
    else:
        module.__dict__[CALL] = call


def join_around_forward() -> object | None:
    """That of the DistributedDataParallel whose forward runs, if any: an object for every `Join` that it is or was in.
    There processes that have no more batches take part in its messages. No public name tells this inside of a forward.
    """
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    return wrapper._join_config if wrapper is not None and wrapper._join_config.enable else None


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The module's own call: its hooks and its forward."""
    call: Callable[..., Any] = module._call_impl
    return call


# The attributes that fully_shard and parallelize_module set on modules begin with these. They are torch's own, and no
# state of the model.
SHARDING = (
    "__composable_api_state_key_",
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
    "_distribute_module_applied",
)


def class_of(module: object) -> type:
    """The class that a module was made of. fully_shard gives it a subclass, of FSDPModule and of its own class."""
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    kind = type(module)
    return kind.__bases__[1] if fsdp_module is not None and kind.__bases__[0] is fsdp_module else kind


def compiled_from(module: nn.Module) -> Any:
    """The module that torch.compile wrapped, or None. torch.compile has no public way back."""
    return getattr(module, "_orig_mod", None)


# --- tracing ----------------------------------------------------------------------------------------------------------

# torch.export flattens inputs and outputs with this pytree and not with torch.utils.pytree, which it may move to.
pytree = _pytree

# The submodule that torch.export adds to check the sizes of inputs. ExportedProgram has no public check of inputs.
GUARDS = "_guards_fn"

# Traces below autograd. It can go when torch.export captures forwards that take derivatives.
make_fx = proxy_tensor.make_fx

# Appends what is done to a proxy to a graph without tracing a function. fx.Tracer is public, but wants a module.
GraphAppendingTracer = fx.proxy.GraphAppendingTracer

# Loggers that print about a failed capture; the error says it again. TORCH_LOGS can only be set for a whole process.
LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")

# The beginning of the modules of the errors of torch.compile. torch.compiler exports no class of errors.
COMPILER = "torch._dynamo"

# The name of its error for a function that has too many variants.
RECOMPILE_LIMIT = "FailOnRecompileLimitHit"


def mark_static(tensor: Tensor) -> None:
    """Tell the compiler that a tensor stays where it is, as parameters do. A CUDA graph copies its other inputs, and
    torch makes none of a function that writes into one. A place in torch.compiler would replace it."""
    from torch._dynamo import mark_static_address  # which takes seconds to load

    mark_static_address(tensor)


# Checks that torch.fx and torch.export write into graphs.
ASSERT, ASSERT_IS_NONE = "_assert", "_assert_is_none"
ASSERT_METADATA = "_assert_tensor_metadata"

# An argument of softmax and its kin in torch.nn.functional, which has no effect on the result.
STACK_LEVEL = "_stacklevel"

# Raises while a graph is captured and the condition is known to be false, and notes the condition if it is unknown. A
# plain `if` would be a branch on a size.
assert_size = torch._check


def size_hint(size: torch.SymInt) -> int:
    """The size of the example input behind a symbolic size. `int(size)` would add a guard."""
    return int(size.node.hint)


@dataclass(frozen=True)
class Nested:
    """Where torch keeps nested tensors of the layout torch.jagged: their class, its module, that of their operations,
    and that of the question by which the functions that make them refuse to be traced. torch exports functions that
    make nested tensors, and none that tells torch.export to write them by their values."""

    kind: Any = nested_tensor.NestedTensor
    module: Any = nested_tensor
    operations: Any = nested_operations
    tracer: Any = fx._symbolic_trace

    def values(self, documents: Any) -> Tensor:
        """The rows of all documents. The public function gives a view of them, which no tracer traces."""
        values: Tensor = documents._values
        return values

    def offsets(self, documents: Any) -> Tensor:
        offsets: Tensor = documents.offsets()
        return offsets

    def dimension(self, documents: Any) -> int:
        """The dimension of the lengths."""
        dimension: int = documents._ragged_idx
        return dimension

    def longest(self, documents: Any) -> int | None:
        """The length of the longest document, if it was given; else torch pads to the number of all rows."""
        longest: int | None = documents._maybe_max_seqlen
        return longest


NESTED = Nested()


class Lengths(NestedIntNode):
    """A size that stands for the lengths of documents. torch's own has no product with a symbolic size, as a stride."""

    def mul(self, other: Any) -> Lengths:
        return Lengths(self.t_id, self.coeff * (other.constant_int() if other.is_constant() else other.hint))


def nested_int(number: int) -> torch.SymInt:
    """A size that stands for the lengths of documents. Two are equal if their numbers are."""
    return torch.SymInt(Lengths(number, 1))


@dataclass(frozen=True)
class DispatchState:
    """The keys by which this thread dispatches operations, torch.export's among them. No public name changes them."""

    included: Any
    excluded: Any

    @staticmethod
    def now() -> DispatchState:
        return DispatchState(torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())

    def without_tracer(self) -> AbstractContextManager[Any]:
        """Inside, torch.export does not meet operations, and autocast does not cast what it would not meet; both do
        where another state is entered."""
        included, excluded = self.included, self.excluded
        for name in ("PreDispatch", "AutocastCPU", "AutocastCUDA"):
            key = getattr(torch._C.DispatchKey, name)
            included, excluded = included.remove(key), excluded.add(key)
        guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(included, excluded)
        return guard

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, operations are dispatched so, and classes of tensors have a say first."""
        with torch._C._ForceDispatchKeyGuard(self.included, self.excluded), torch._C._EnableTorchFunction():
            yield


def without_functional(tensor: Tensor) -> Tensor:
    """The tensor inside of the wrapper by which torch.export notes writes; it has one for as long as it is traced."""
    plain: Tensor = mb_unwrap_functional_tensor(tensor)
    return plain


# --- operations -------------------------------------------------------------------------------------------------------

OpOverload = torch._ops.OpOverload  # the targets of exported nodes; torch.library names no class for them
OpOverloadPacket = torch._ops.OpOverloadPacket


def schema(overload: Any) -> Any:
    """Names, defaults and aliases of an operation's arguments and results. inspect.signature knows none of them."""
    return overload._schema


# Higher-order operations, by which torch.export keeps a region of forward as a graph of its own.
REGION = "wrap_with"
NO_GRAD_REGION = "wrap_with_set_grad_enabled"
AUTOCAST_REGION = "wrap_with_autocast"
CHECKPOINT_REGION = "tag_activation_checkpoint"

# Operations of ATen and of torch.func that public functions call. They are met in graphs by these names only.
IS_ALL_TRUE = "_is_all_true"  # by which torch.distributions checks arguments and samples
WEIGHT_NORM = "_weight_norm"  # its function is `weight_normalized(v, g, dim)`
weight_normalized = torch._weight_norm
TO_COPY = "_to_copy"
UNSAFE_VIEW = "_unsafe_view"
GROUPED_MM = "_grouped_mm"
PACK, UNPACK = "_pack_padded_sequence", "_pad_packed_sequence"
BATCH_NORM = "_native_batch_norm_legit"
BATCH_NORM_IN_EVALUATION = "_native_batch_norm_legit_no_training"
BATCH_NORM_FUNCTIONAL = "_native_batch_norm_legit_functional"
ADD_BATCH_DIM, REMOVE_BATCH_DIM = "_add_batch_dim", "_remove_batch_dim"  # of torch.func.vmap
FORWARD_MODE = frozenset({"_make_dual", "_unpack_dual"})  # of torch.autograd.forward_ad

# Add, multiply and copy lists of tensors in place with few kernels. torch's optimizers use them; the public functions
# take one tensor at a time.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_

# --- autograd ---------------------------------------------------------------------------------------------------------

CheckpointFunction = checkpoint.CheckpointFunction  # what a reentrant checkpoint applies
# The function that a checkpoint that is not reentrant runs around another one. In torch.utils.checkpoint it has the
# first of these names up to torch 2.13, and the second from 2.14 on. Users import `checkpoint` itself, so only this
# function can be replaced. A public switch for checkpoints would replace both.
GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
CHECKPOINT_GENERATORS = tuple(name for name in GENERATORS if hasattr(checkpoint, name))

# The names of torch's own autograd.Functions begin like this: operators of torch.library, and an identity for hooks.
OWN_FUNCTIONS = ("GeneratedBackwardFor_", "BackwardHookFunction")

# Two tensors have the same memory if these are equal, also for tensors without data, whose `data_ptr` raises.
StorageWeakRef = reductions.StorageWeakRef


def version(tensor: Tensor) -> int:
    """How often a tensor was written into. A copy of the values would be the public way to notice a write."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """`version` of each."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# Sets the versions of tensors back at the end. Autograd refuses a tensor that it saved and that was written into since,
# even if its values are the same again; no public function tells it so.
versions_kept = torch.autograd.grad_mode._unsafe_preserve_version_counter

debug_unwrap = torch.func.debug_unwrap  # the tensor inside a wrapper of torch.func
TRANSFORMS = "/_functorch/eager_transforms"  # the file that implements grad, jvp, vjp, ... of torch.func
# The code of the functions that begin a backward, and the names of their arguments that hold the losses.
BACKWARD = {Tensor.backward.__code__: "self", torch.autograd.backward.__code__: "tensors"}
GRAD = torch.autograd.grad.__code__
GRAD, UNWRAP, VMAP = torch.autograd.grad.__code__, torch.func.debug_unwrap.__code__, torch.func.vmap.__code__


def differentiates(code: CodeType) -> bool:
    """Whether this is the code of torch.autograd.grad or of a derivative of torch.func. Neither announces its calls."""
    return code is GRAD or (code is not UNWRAP and TRANSFORMS in code.co_filename)


# The class of modes that see every operation; torch documents it, and has it in a private module alone.
DispatchMode = torch.utils._python_dispatch.TorchDispatchMode


def differentiates_forward(code: CodeType) -> bool:
    """Whether this is the code that begins forward-mode derivatives: of torch.autograd.forward_ad, or of jvp, jacfwd
    and hessian of torch.func."""
    of_func = code.co_name == "_jvp_with_argnums" and TRANSFORMS in code.co_filename
    return of_func or code is forward_ad.enter_dual_level.__code__


def transforms() -> int:
    """The number of transformations of torch.func, and levels of forward-mode derivatives, that are active.

    torch has no public way to ask. Tensors do not tell either: inside of a transformation, all of them are wrapped.
    """
    return torch._C._functorch.get_dynamic_layer_stack_depth() + forward_ad._current_level + 1


# torch.func.functional_call and its older twin call it. They let other tensors stand for the parameters of a module.
FUNCTIONAL_CALL = nn.utils.stateless._functional_call.__code__


def in_functional_call() -> bool:
    """Whether this thread is inside of a functional call, which no public name tells. The parameters of another model,
    which such a call may be given, look like parameters that were replaced for good."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not FUNCTIONAL_CALL:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def is_batched(*tensors: Tensor) -> bool:
    """Whether one of the tensors has a dimension of torch.func.vmap, which some operations do not know yet."""
    return any(map(torch._C._functorch.is_batchedtensor, tensors))


def backward_roots(thread: int) -> tuple[Tensor, ...]:
    """The tensors that `Tensor.backward` or `torch.autograd.backward` was called on, if one of them runs in `thread`.

    Hooks of tensors are not told which loss is differentiated. The frames of the thread have it; on an accelerator the
    hooks run in a thread of their own.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code not in BACKWARD:
        frame = frame.f_back
    roots = () if frame is None else frame.f_locals.get(BACKWARD[frame.f_code], ())
    return (roots,) if isinstance(roots, Tensor) else tuple(root for root in roots if isinstance(root, Tensor))


def grad_runs(thread: int) -> bool:
    """Whether the backward that runs in `thread` is that of `torch.autograd.grad`. A hook is not told, see
    `backward_roots`."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not GRAD and frame.f_code not in BACKWARD:
        frame = frame.f_back
    return frame is not None and frame.f_code is GRAD


def backward_here() -> int:
    """The number of the backward that runs in this thread, also that of torch.autograd.grad; -1 if there is none. No
    public name tells a hook which of several backwards it is in."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function behind the backward that runs in this thread. Public hooks are called before a backward has added
    its gradients up, or once for every parameter."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def function_apply() -> Any:
    """The classmethod behind `torch.autograd.Function.apply`, as it is now. Attribute access would bind it. It is a
    method of Python up to torch 2.13, and one of C in 2.15."""
    return torch.autograd.Function.__dict__["apply"]


# Reads the number of sequences out of a tensor, which no trace allows. An option of torch.export would replace it.
EXPECTED_HIDDEN_SIZE = "get_expected_hidden_size"  # of nn.RNNBase

# Whether the mask of nn.TransformerEncoder or nn.TransformerDecoder is causal. It reads the values of a mask, which no
# trace allows. `is_causal=` of their forward would replace it, where a user writes it.
IS_CAUSAL = "_detect_is_causal_mask"  # of torch.nn.modules.transformer
