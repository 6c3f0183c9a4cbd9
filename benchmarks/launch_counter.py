"""Work that a GPU would be given: operations counted by their shapes, without numbers and without a GPU.

In `fake_accelerator` tensors have a shape and a dtype but no numbers (torch's FakeTensorMode), so a step of any model
takes seconds and hardly any memory. These tensors lie on the CPU, because a build of torch without CUDA makes no
others. Where kfac_fx asks for the device, it is answered as on a GPU (`ANSWERS`); a new place needs a line there.
Autocast is that of the CPU, which casts other operations than CUDA's in some places.

`Counting` sees every operation below autograd and autocast, and asks the schema of each what it reads and writes:

    kernels         all operations but views, allocations and reads by the host. One operation counts as one kernel;
                    a few, such as those on lists of many tensors, are several on a GPU
    waits           reads by the host: `item`, `nonzero`, `equal`; and one for every matrix of an `eigh`
    elements        that kernels read and write, without those of the next line
    operands        that products, convolutions and attention read and write
    flops           of these, by precision, as torch.utils.flop_counter counts them; attention without its mask
    decompositions  matrices by kind and width

Kernels of Triton, products of halves in float32 and CUDA graphs do not run without a GPU. An operation of this module
that reads and writes the same tensors stands for each of the first two, and the host issues no operation of a graph.

Where the host reads a number, it gets the answer of a training without trouble: conditions are true, other numbers
are 1, and nothing is found.
"""

from __future__ import annotations

import bisect
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode  # private, as the next one, and torch's own way to shapes without numbers
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own way to see every operation
from torch.utils.flop_counter import flop_registry, register_flop_formula

from benchmarks.step_models import Problem
from kfac_fx.fisher.bases import StepScalars
from kfac_fx.linalg.matrices import HostCopy, products_are_full
from kfac_fx.optim import padded_step
from kfac_fx.optim.batch_loss import SHARE
from kfac_fx.optim.padded_step import KernelOrPlain
from kfac_fx.optim.schedule import ACCELERATOR, ACCELERATOR_IN_HALVES
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.taps import HALVES

aten: Any = torch.ops.aten


@torch.library.custom_op("launch_counter::product", mutates_args=())
def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of halves whose sums are in `dtype`, which CUDA has and a CPU has not."""
    return left.to(dtype) @ right.to(dtype)


@torch.library.custom_op("launch_counter::graft", mutates_args=("average", "squares", "out"))
def graft(
    h: Tensor,
    average: Tensor,
    squares: Tensor,
    scalars: list[Tensor],
    eigenvalues: list[Tensor],
    exponent: float,
    accept: Tensor,
    out: Tensor,
) -> Tensor:
    """The kernel of `kfac_fx.optim.padded_kernels.graft_by_kernel`: the squared norms of the blocks, [1, 2, L]."""
    arguments = (h, average, squares, StepScalars(*scalars), eigenvalues, exponent, accept, out)
    return padded_step.grafted_direction(*arguments).square().unsqueeze(0)


@torch.library.custom_op("launch_counter::scale", mutates_args=("directions",))
def scale(directions: Tensor, scales: Tensor) -> None:
    """The kernel of `kfac_fx.optim.padded_kernels.scale_by_kernel`."""
    padded_step.scaled_directions(directions, scales)


product.register_fake(lambda left, right, dtype: (left @ right).to(dtype))
graft.register_fake(lambda h, average, *others: h.new_empty(1, 2, len(average)))
scale.register_fake(lambda directions, scales: None)


@register_flop_formula(torch.ops.launch_counter.product, get_raw=True)
def flops_of_product(left: Tensor, right: Tensor, *others: Any, **options: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def half_products(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `kfac_fx.linalg.matrices.half_products`."""
    return left @ right if dtype is None else product(left, right, dtype)


def products_of_columns(left: Tensor, right: Tensor) -> Tensor:
    """As `kfac_fx.passes.matrix.products_of_columns` and `row_products`."""
    return product(left, right.mT, torch.float32) if left.dtype in HALVES else left @ right.mT


class Kernels(KernelOrPlain):
    """The kernels of a padded step, as single operations."""

    def __call__(self, *arguments: Any) -> Any:
        if self.plain is padded_step.scaled_directions:
            return scale(*arguments)
        h, average, squares, scalars, eigenvalues, exponent, accept, out = arguments
        torch.stack([scalar.expand(len(average), 1, 1, 1).flatten() for scalar in scalars], dim=-1)
        return graft(h, average, squares, list(scalars), eigenvalues, exponent, accept, out).sum(0).sqrt()


def difference_of_part(recorder: Recorder, *arguments: Any) -> str | None:
    """Whether the outputs of an example depend on the others, which the library finds out by numbers."""
    normalized = any(isinstance(module, nn.BatchNorm2d) for module in recorder.model.modules())
    return "the outputs of an example depend on the others" if normalized else None


class ArrivedZeros(HostCopy):
    """The host reads zeros without waiting: in a training without trouble no check undoes a step."""

    def wait(self) -> Any:
        return SimpleNamespace(tolist=lambda: [0.0] * self.value.numel())


ANSWERS: Mapping[str, Any] = {  # what differs from the answers for tensors on a CPU
    "kfac_fx.linalg.matrices.on_host": lambda condition: False,
    "kfac_fx.linalg.matrices.WORTH_STRIPS": sys.maxsize,
    "kfac_fx.linalg.matrices.WORTH_ALIGNING": sys.maxsize,
    "kfac_fx.recording.taps.saves_time": lambda input: input.dtype not in HALVES,
    "kfac_fx.optim.schedule.Rates.of": lambda device_types, halves: ACCELERATOR_IN_HALVES if halves else ACCELERATOR,
    "kfac_fx.optim.checks.share_of_checks": lambda kinds, processes: SHARE,
    "kfac_fx.optim.batch_loss.difference_of_part": difference_of_part,
    "kfac_fx.linalg.matrices.products_of_columns": products_of_columns,
    "kfac_fx.linalg.matrices.row_products": products_of_columns,
    "kfac_fx.fisher.bases.iterates_bases": lambda device: True,
    "kfac_fx.optim.rules.eigen_moments.product_dtype": lambda device, dtype: torch.bfloat16,
    "kfac_fx.optim.padded_step.half_products": half_products,
    "kfac_fx.optim.padded_step.KernelOrPlain": Kernels,
    "kfac_fx.recording.emitted.CudaGraph.__call__": lambda graph, function, key: Counting.as_a_graph(function),
    # Comparisons of outputs follow the recordings 1, 2, 4, 8, ... and are in no kind of step here.
    "kfac_fx.recording.equivalence.OutputWatch.due": lambda watch: False,
    "kfac_fx.recording.equivalence.refuse_changed_model": lambda differs, model: None,
    "kfac_fx.optim.checks.HostCopy": ArrivedZeros,
}
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "detach", "lift_fresh", "resize_")
OVERWRITING = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")  # do not read what they write
GATHERING = ("embedding", "gather", "index", "index_select")  # read as much as they write
UNTOUCHED = {"_fused_adamw_": "grads"}  # declared as written, for the scale of a GradScaler
UNREAD = {"graft": "out"}  # written and not read
HOST_READS = ("_local_scalar_dense", "nonzero", "equal")
SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
DECOMPOSITIONS = {  # flops of one matrix of width d, in d³
    "_linalg_eigh": 9.0,
    "linalg_cholesky_ex": 1 / 3,
    "linalg_solve_triangular": 1.0,
    "linalg_qr": 10 / 3,
    "cholesky_inverse": 2 / 3,
}
VECTOR = 16  # bytes; tensor cores load rows that begin at multiples of them without a detour


@dataclass(frozen=True)
class Speed:
    """Rates of a GPU.

    Attributes:
        bytes: read and written a second.
        products: flops a second by precision and whether all rows of the operands begin at multiples of `VECTOR`.
        kernel: seconds from one kernel to the next, at least.
        host: seconds for which the host issues a kernel outside of autograd.
        host_with_autograd: the same in a forward and its backward.
        eigh: seconds of one matrix of float32 by width.
        cholesky: flops a second of Cholesky decompositions and triangular solves in stacks, by width.
    """

    bytes: float
    products: Mapping[tuple[str, bool], float]
    kernel: float
    host: float
    host_with_autograd: float
    eigh: Mapping[int, float]
    cholesky: Mapping[int, float]


# All measured on one H100 80GB HBM3, torch 2.11.0+cu130.
H100 = Speed(
    bytes=2.9e12,  # a copy; fused AdamW and foreach operations of 124M parameters reach 1.7e12 and 2.4e12
    products={  # bmm of 12 x [2304..3072, 784] and of sides of 769, which are not aligned
        ("bfloat16", True): 450e12,
        ("bfloat16", False): 90e12,
        ("TF32", True): 200e12,
        ("TF32", False): 85e12,
        ("float32", True): 38e12,
        ("float32", False): 38e12,
    },
    kernel=4.5e-6,  # a series of empty kernels
    host=10e-6,  # a series of small operations in eager mode, without and with autograd
    host_with_autograd=30e-6,
    # Up to 512 on the host: benchmarks/results/decompositions_cuda.json. Beyond: torch.linalg.eigh.
    eigh={64: 0.68e-3, 128: 1.4e-3, 256: 3.9e-3, 512: 14.3e-3, 768: 9.9e-3, 2304: 45e-3, 3072: 77e-3},
    # QR by two Cholesky decompositions of stacks of 12, in 5.3, 50 and 104 ms, without the time of its products (8 d³
    # a matrix, in float32).
    cholesky={784: 3.8e12, 2304: 2.0e13, 3088: 3.1e13},
)


def interpolated(points: Mapping[int, float], width: int) -> float:
    """Between points on a double logarithmic scale, and beyond them along the last two."""
    widths = sorted(points)
    right = min(max(bisect.bisect_left(widths, width), 1), len(widths) - 1)
    a, b = widths[right - 1], widths[right]
    slope = math.log(points[b] / points[a]) / math.log(b / a)
    return float(points[a] * (width / a) ** slope)


@dataclass
class Counts:
    """device, host: seconds for which the device computes, and for which the host issues. Others: see the module."""

    kernels: int = 0
    waits: int = 0
    elements: int = 0
    operands: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    decompositions: Counter[str] = field(default_factory=Counter)
    decomposition_flops: float = 0.0
    device: float = 0.0
    host: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def record(self) -> dict[str, Any]:
        return {name: dict(count) if isinstance(count, Counter) else count for name, count in vars(self).items()}

    @property
    def seconds(self) -> float:
        """The longer of both times: the host runs ahead of the device where it does not wait."""
        return max(self.device, self.host)


class Counting(TorchDispatchMode):
    """Counts the operations inside of `with`. with_autograd: whether they belong to a forward or a backward."""

    graphs = 0  # that are issued now

    @staticmethod
    def as_a_graph(function: Callable[[], None]) -> None:
        """The host issues a graph, and none of its operations."""
        Counting.graphs += 1
        try:
            function()
        finally:
            Counting.graphs -= 1

    def __init__(self, speed: Speed = H100, with_autograd: bool = False) -> None:
        super().__init__()
        self.counts, self.speed = Counts(), speed
        self.host = speed.host_with_autograd if with_autograd else speed.host

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        if name in HOST_READS:
            self.counts.waits += 1
        if name == "_local_scalar_dense" or name in FREE or func.is_view or func.namespace in ("prim", "profiler"):
            return result
        reads, writes = traffic(func, name, args, kwargs, result)
        elements, sizes = (
            sum(of(tensor) for tensor in (*reads, *writes)) for of in (stored, lambda t: stored(t) * t.element_size())
        )
        counts, speed = self.counts, self.speed
        counts.kernels += 1
        counts.host += 0.0 if Counting.graphs else self.host
        packet, seconds = SAME_FLOPS.get(func.overloadpacket, func.overloadpacket), sizes / speed.bytes
        if name in DECOMPOSITIONS:
            seconds = self.decomposed(name, args[0])
        elif packet in flop_registry:
            given = {key: value for key, value in kwargs.items() if key != "out"}
            flops, (precision, aligned) = flop_registry[packet](*args, **given, out_val=result), kind_of(reads)
            counts.operands += elements
            counts.flops[precision] += flops
            seconds = max(seconds, flops / speed.products[precision, aligned])
        else:
            counts.elements += elements
        counts.device += max(seconds, speed.kernel)
        return result

    def decomposed(self, name: str, matrix: Tensor) -> float:
        """Seconds of the decompositions of a stack [..., d, d]."""
        width, number = matrix.shape[-1], matrix[..., 0, 0].numel()
        flops = number * DECOMPOSITIONS[name] * width**3
        self.counts.decompositions[f"{name.removeprefix('_').removeprefix('linalg_')} {width}"] += number
        self.counts.decomposition_flops += flops
        if name == "_linalg_eigh":
            self.counts.waits += number
            return number * interpolated(self.speed.eigh, width)
        return flops / interpolated(self.speed.cholesky, width)


def traffic(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads and writes. Where it is written in place, a tensor is in both."""
    reads, writes = [], []
    for n, argument in enumerate(func._schema.arguments):
        given = args[n] if n < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not (written and (argument.is_out or name in OVERWRITING or UNREAD.get(name) == argument.name)):
            reads += tensors
        if written and UNTOUCHED.get(name) != argument.name:
            writes += tensors
    writes = writes or [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return (writes if name in GATHERING else reads), writes


def stored(tensor: Tensor) -> int:
    """The number of elements in memory. Expanded dimensions have one."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def kind_of(operands: Sequence[Tensor]) -> tuple[str, bool]:
    """The precision of a product, and whether its operands are aligned."""
    halves = operands[0].dtype in HALVES
    precision = "bfloat16" if halves else "float32" if products_are_full() else "TF32"
    return precision, all(is_aligned(tensor) for tensor in operands if tensor.dim() > 1)


def is_aligned(tensor: Tensor) -> bool:
    """Whether all rows, or columns, begin at multiples of `VECTOR`."""
    apart = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if stride > 1 and size > 1]
    return all(stride * tensor.element_size() % VECTOR == 0 for stride in apart)


class Answering(TorchDispatchMode):
    """Answers the host's reads of tensors without numbers. Fake tensors take no generators."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if name == "nonzero":
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name == "equal":
            return True
        return func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "generator"})


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """kfac_fx does what it does on a GPU, with TF32 allowed for products, as docs/training.md says."""
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        for target, answer in ANSWERS.items():
            stack.enter_context(mock.patch(target, answer))
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision("high")
        yield


@contextmanager
def fake_accelerator(problem: Problem) -> Iterator[Problem]:
    """The problem without numbers, on which kfac_fx does what it does on a GPU. Its model is changed in place."""
    mode = FakeTensorMode()
    for module in problem.model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, mode.from_tensor(tensor))
    faked = replace(problem, x=mode.from_tensor(problem.x), y=mode.from_tensor(problem.y))
    with warnings.catch_warnings(), as_on_a_gpu(), mode, Answering():
        warnings.simplefilter("ignore")  # of what the answers look like, such as the gradient of another loss
        yield faked
