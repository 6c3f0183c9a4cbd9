"""Several processes: the messages between replicas of a model, and the tensors that are divided among them.

*Replicas* each have a copy of the model and a part of every batch. As in DistributedDataParallel, the gradient is the
mean over processes, and so must be everything else that a step is computed from. Statistics are sums over cases, so
those of the whole batch are the sums over processes. From equal sums every process computes equal factors and inverses,
and takes the same step.

A *shard* is the part of one process, a run of rows along one dimension. K-FAC's operations on single elements work on
shards. A graph reads a parameter as a whole: it is gathered at its first use, and dropped after the last one, as FSDP2
does in a unit. All processes run the same graph, so they gather the same parameters in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_fx.linalg.vectors import Tensors
from kfac_fx.passes.errors import RegistrationError, fatal, first_line, table
from kfac_fx.passes.matrix import real_numbers

ValueT = TypeVar("ValueT")
NORM_TOLERANCE = 1e-3  # relative difference of the norms of one gradient, as the processes compute it
WHOLE_OUTPUTS = (
    "Tensor parallelism must leave the outputs of the model whole in every process: write output_layouts=Replicate() "
    "in the plan of the modules that compute them, and leave use_local_output at True."
)
USUAL_TYPES = (Tensor, nn.Parameter)  # of nearly all tensors

# Newer torch has other names for these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- replicas ---------------------------------------------------------------------------------------------------------


class Replicas:
    """The processes of `group` of torch.distributed; None: those of the default group, once it is initialized."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.name = str(next(NUMBERS))
        BY_NAME[self.name] = self

    @property
    def number(self) -> int:
        """The number of processes; 1 if torch.distributed is not initialized."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return dist.get_rank(self.group) if self.number > 1 else 0

    def stream(self, common: torch.Generator, *place: int) -> torch.Generator:
        """The random stream of this process at a place of the training, such as the number of the step.

        With one process it is `common`, wherever that stands. Several have streams of their own, which depend on the
        seed of `common`, the place and the process alone: `common` stays the same in all of them, so one copy of it in
        a checkpoint restores the streams of any number of processes.
        """
        if self.number == 1:
            return common
        digest = hashlib.blake2b(repr((common.initial_seed(), *place, self.rank)).encode(), digest_size=8).digest()
        return torch.Generator(common.device).manual_seed(int.from_bytes(digest) >> 1)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes."""
        if self.number == 1:
            return tensor
        (total,) = self.total([tensor])
        return total / self.number

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, in one message for every dtype and device."""
        if self.number == 1:
            return list(tensors)
        totals: dict[int, Tensor] = {}
        for members in fitting_together(tensors):
            message = message_of(tensors, members)
            with self.exchanging("sums"):
                dist.all_reduce(message, group=self.group)
            totals |= zip(members, parts(message, [tensors[n] for n in members]), strict=True)
        return [totals[n] for n in range(len(tensors))]

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
        """The tensors of one process, in one message for every dtype and device. All pass tensors of its shapes."""
        received: dict[int, Tensor] = {}
        for members in fitting_together(tensors):
            message = message_of(tensors, members)
            with self.exchanging("gradients"):
                dist.broadcast(message, group=self.group, group_src=source)
            received |= zip(members, parts(message, [tensors[n] for n in members]), strict=True)
        return [received[n] for n in range(len(tensors))]

    def reduce(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Sums over processes, each in one process only: those of tensors[n] in process n, and here of one's own.

        One message for every process, dtype and device. Every process passes tensors of the same shapes.
        """
        totals: dict[int, Tensor] = {}
        waiting: list[Any] = []
        for process, of_process in enumerate(tensors):
            for members in fitting_together(of_process):
                message = message_of(of_process, members)
                with self.exchanging("statistics"):
                    waiting.append(dist.reduce(message, group=self.group, group_dst=process, async_op=True))
                if process == self.rank:
                    totals |= zip(members, parts(message, [of_process[n] for n in members]), strict=True)
        with self.exchanging("statistics"):
            for work in waiting:
                work.wait()
        return [totals[n] for n in range(len(totals))]

    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The tensors of all processes in all processes, behind each other in the order of `like`.

        tensors: of this process. like[n]: tensors of the shapes and dtypes of those of process n.
        """
        everything = [tensor for of_process in like for tensor in of_process]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in everything))
        sizes = [sum(tensor.numel() for tensor in of_process) for of_process in like]
        sizes += [0] * (self.number - len(sizes))
        whole = torch.empty(sum(sizes), dtype=dtype, device=everything[0].device)
        if tensors:
            whole.split(sizes)[self.rank].copy_(torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]))
        with self.exchanging("products"):
            fill_shares(whole, sizes, self.name)
        return [part.to(tensor.dtype) for part, tensor in zip(parts(whole, everything), everything, strict=True)]

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """Around a message; torch's error is raised again with the part of the step that it ended."""
        return nullcontext() if torch.compiler.is_compiling() else self.explained(what)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if fatal(error):
                raise
            raise RuntimeError(
                f"process {self.rank} of {self.number} could not exchange {what} with the others: {first_line(error)}\n"
                "Another process has ended or raised an error, was slower than the timeout of the process group, or "
                "left a step out: see the first error of all processes. All of them take every step; one without cases "
                "calls the net with an empty batch. Start all processes again, from the last checkpoint."
            ) from error

    def told(self, value: ValueT) -> list[ValueT]:
        """The values of all processes, plain data, in their order."""
        if self.number == 1:
            return [value]
        everywhere: list[Any] = [None] * self.number
        with self.exchanging("values"):
            dist.all_gather_object(everywhere, value, group=self.group)
        return everywhere

    def together(self, of: Callable[[], ValueT]) -> ValueT:
        """The result of a function in this process, if it raises no error in any of them; else all processes raise."""
        if self.number == 1:
            return of()
        failure: Exception | None = None
        try:
            result = of()
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            if fatal(error):
                raise
            failure = error
        texts = self.told("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if failed := [(n, text) for n, text in enumerate(texts) if text]:
            raise RuntimeError(f"process {failed[0][0]} of {self.number} raised {failed[0][1]}")
        return result

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the processes have different options, with all of them. options: by name, as text."""
        if self.number == 1:
            return
        everywhere: list[dict[str, str]] = [{} for _ in range(self.number)]
        with self.exchanging("options"):
            dist.all_gather_object(everywhere, dict(options), group=self.group)
        by_name = {name: [of_process.get(name, "nothing") for of_process in everywhere] for name in options}
        if rows := [
            (name, " and ".join(dict.fromkeys(texts))) for name, texts in by_name.items() if len(set(texts)) > 1
        ]:
            raise ValueError(
                f"{self.number} processes train one model with different options:\n{table(rows)}\n"
                "Give kfac_fx.compile and KFAC the same options in all processes. They take the same steps from common "
                "factors, so other options would make their parameters drift apart."
            )

    def check_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the processes have different gradients. Waits for the device."""
        self.check_norms(
            gradients,
            "gradients",
            "Average the gradients, as torch.nn.parallel.DistributedDataParallel(net) does, or train the processes "
            "independently with KFAC(..., process_group=g), where g = torch.distributed.new_group([rank], "
            "use_local_synchronization=True).",
        )

    def check_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the processes have different parameters. Waits for the device."""
        self.check_norms(
            parameters,
            "parameters",
            "All processes take the same steps, so they would stay apart. Begin with those of one process, as "
            "torch.nn.parallel.DistributedDataParallel(net) does, or load one checkpoint in all of them.",
        )

    def check_norms(self, tensors: Sequence[Tensor], kind: str, remedy: str) -> None:
        if self.number == 1 or not tensors:
            return
        norm = torch.stack([real_numbers(tensor).double().norm().to(tensors[0].device) for tensor in tensors]).norm()
        ends = torch.stack([norm, -norm])
        with self.exchanging(f"the norms of {kind}"):
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        most, least = ends[0].item(), -ends[1].item()
        if most - least > NORM_TOLERANCE * most:
            raise RuntimeError(
                f"the {kind} of {self.number} processes differ: their norms are {least:.4g} to {most:.4g}. {remedy}"
            )


NUMBERS = itertools.count()
BY_NAME: weakref.WeakValueDictionary[str, Replicas] = weakref.WeakValueDictionary()  # for operations of torch


@torch.library.custom_op("kfac_fx::fill_shares", mutates_args=("whole",))
def fill_shares(whole: Tensor, sizes: Sequence[int], replicas: str) -> None:
    """Fill the shares of the other processes in `whole`, of these sizes, with what they have there.

    Every element is sent once. NCCL gathers unequal shares in one message. Other backends do so for equal ones only, so
    each process with a share sends it. An operation of its own, because torch.compile knows neither of the two.

    replicas: the name of the processes.
    """
    here, shares = BY_NAME[replicas], whole.split(list(sizes))
    if f"{whole.device.type}:nccl" in dist.get_backend_config(here.group):
        dist.all_gather(list(shares), shares[here.rank].clone(), group=here.group)
        return
    waiting = [
        dist.broadcast(share, group=here.group, group_src=process, async_op=True)
        for process, share in enumerate(shares)
        if share.numel()
    ]
    for work in waiting:
        work.wait()


@fill_shares.register_fake
def no_shares(whole: Tensor, sizes: Sequence[int], replicas: str) -> None: ...


def fitting_together(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors that fit into one message, by dtype and device."""
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, tensor in enumerate(tensors):
        members.setdefault((tensor.dtype, tensor.device), []).append(n)
    return list(members.values())


def message_of(tensors: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    return torch.cat([tensors[n].detach().reshape(-1) for n in members])


def parts(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message that was made of tensors of these shapes."""
    split = message.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(split, like, strict=True)]


# --- sharded tensors --------------------------------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor. torch's module of them is not imported only to know that there is none."""
    if type(tensor) in USUAL_TYPES:
        return False
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def shard(tensor: Tensor) -> Tensor:
    """The part of this process, in the memory of the tensor; a tensor that is not sharded is its own part."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = cast(Any, tensor).to_local()
    return local


def divided_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, divided among processes as its parameter is.

    Tensor parallelism leaves the gradient of a whole parameter as parts of a sum where its layer has parts of the rows.
    """
    if not is_sharded(gradient) or not is_sharded(parameter):
        return gradient
    wanted = cast(Any, parameter).placements
    return gradient if cast(Any, gradient).placements == wanted else cast(Any, gradient).redistribute(placements=wanted)


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is divided: process r of a group has rows r · c to (r + 1) · c along `dim`, with c = ⌈rows / ranks⌉.

    The processes are a mesh. Along one of its dimensions are those of a group; along the others the shards repeat, as
    in hybrid sharding.
    """

    shape: torch.Size  # of the whole tensor
    dim: int | None  # None: every process of the group has the whole tensor
    ranks: int
    group: Any
    mesh: Any = None  # None: a tensor that is no DTensor
    along: int = 0  # the dimension of the mesh

    @staticmethod
    def of(tensor: Tensor) -> ShardLayout:
        """The layout of a DTensor for which `problem` returns nothing."""
        mesh, placements = cast(Any, tensor).device_mesh, cast(Any, tensor).placements
        cuts = [n for n, placement in enumerate(placements) if not placement.is_replicate()]
        along = cuts[0] if cuts else mesh.ndim - 1
        size, group = mesh.size(along), mesh.get_group(along)
        if len(cuts) > 1 or type(placements[along]).__name__ not in ("Shard", "Replicate"):
            return GridLayout(tensor.shape, placements[along].dim, size, group, mesh, along, tuple(placements))
        return ShardLayout(tensor.shape, placements[along].dim if cuts else None, size, group, mesh, along)

    @property
    def pieces(self) -> int:
        """The number of parts that no two of them have in common."""
        return 1 if self.dim is None else self.ranks

    @property
    def repeating(self) -> list[Any]:
        """The groups of processes that have the same shards."""
        dims = range(0 if self.mesh is None else self.mesh.ndim)
        return [self.mesh.get_group(dim) for dim in dims if dim != self.along and self.mesh.size(dim) > 1]

    @property
    def rows(self) -> int:
        """c, the rows of every process but the last ones."""
        assert self.dim is not None, "bug in kfac_fx: the rows of a tensor that is not divided"
        return -(-self.shape[self.dim] // self.ranks)

    @property
    def filled(self) -> torch.Size:
        """The shape of a shard with `dim` in front, filled up to c rows."""
        if self.dim is None:
            return self.shape
        return torch.Size([self.rows, *self.shape[: self.dim], *self.shape[self.dim + 1 :]])

    def fill(self, local: Tensor) -> Tensor:
        """A shard with the shape `filled`; missing rows are zero."""
        if self.dim is None:
            return local
        rows = local.movedim(self.dim, 0)
        if rows.shape == self.filled:
            return rows.contiguous()
        full = rows.new_zeros(self.filled)
        full[: rows.shape[0]] = rows
        return full

    def by_process(self, whole: Tensor) -> Tensor:
        """The filled shards of all processes, [processes, elements]."""
        if self.dim is None:
            return whole.reshape(1, -1).expand(self.ranks, -1)
        rows = whole.movedim(self.dim, 0)
        full = rows.new_zeros((self.ranks * self.rows, *rows.shape[1:]))
        full[: rows.shape[0]] = rows
        return full.view(self.ranks, -1)

    def join(self, filled: Tensor) -> Tensor:
        """The whole tensor from the filled shards of all processes, [processes, *filled]."""
        if self.dim is None:
            return filled[0]
        return filled.flatten(0, 1)[: self.shape[self.dim]].movedim(0, self.dim)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The shard of a process, a view."""
        if self.dim is None:
            return whole
        rows = self.shape[self.dim]
        start = min(rank * self.rows, rows)
        return whole.narrow(self.dim, start, min(start + self.rows, rows) - start)

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor, from all processes."""
        if self.dim is None:
            return local
        filled = self.fill(local)
        everything = filled.new_empty((self.ranks * filled.shape[0], *filled.shape[1:]))
        all_gather(everything, filled, group=self.group)
        return self.join(everything.unflatten(0, (self.ranks, -1)))

    def dtensor(self, local: Tensor) -> Tensor:
        """A DTensor of this layout, in the memory of the shard `local`; that itself if the tensor is none."""
        if self.mesh is None:
            return local
        from torch.distributed.tensor import Placement, Replicate, Shard

        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.dim is not None:
            placements[self.along] = Shard(self.dim)
        return self.dtensor_as(local, placements)

    def dtensor_as(self, local: Tensor, placements: Sequence[Any]) -> Tensor:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=self.shape, stride=stride)

    def summed(self, whole: Tensor) -> Tensor:
        """The shard of the sum of all whole tensors in the group; the tensor itself if it is not divided."""
        return whole.view_as(whole) if self.dim is None else scattered([whole], [self])[0]

    def unfill(self, filled: Tensor, rank: int) -> Tensor:
        """The inverse of `fill` for the shard of a process."""
        if self.dim is None:
            return filled
        rows = self.shape[self.dim]
        return filled[: max(0, min(self.rows, rows - rank * self.rows))].movedim(0, self.dim)


@dataclass(frozen=True)
class GridLayout(ShardLayout):
    """How a tensor is divided along several dimensions of a mesh, by tensor parallelism and FSDP2. Every message is
    torch's own."""

    placements: tuple[Any, ...] = ()

    @property
    def cuts(self) -> list[int]:
        """The dimensions of the mesh."""
        return [n for n, placement in enumerate(self.placements) if not placement.is_replicate()]

    @property
    def pieces(self) -> int:
        return math.prod(self.mesh.size(n) for n in self.cuts)

    @property
    def repeating(self) -> list[Any]:
        dims = range(self.mesh.ndim)
        return [self.mesh.get_group(dim) for dim in dims if dim not in self.cuts and self.mesh.size(dim) > 1]

    def gather(self, local: Tensor) -> Tensor:
        whole: Tensor = cast(Any, self.dtensor(local)).full_tensor()
        return whole

    def part(self, whole: Tensor, rank: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        everywhere: Any = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        part: Tensor = everywhere.redistribute(placements=self.placements).to_local()
        return part

    def dtensor(self, local: Tensor) -> Tensor:
        return self.dtensor_as(local, self.placements)

    def summed(self, whole: Tensor) -> Tensor:
        """The shard of the sum of all whole tensors in the processes that have the other shards."""
        total = whole.clone()
        for dim in self.cuts:
            dist.all_reduce(total, group=self.mesh.get_group(dim))
        return self.part(total, 0).clone()


def scattered(wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> list[Tensor]:
    """The shards of the sums of all processes' whole tensors, in one message."""
    group = layouts[0].group
    filled = [layout.by_process(whole) for whole, layout in zip(wholes, layouts, strict=True)]
    message = torch.cat(filled, 1)
    mine = message.new_empty(message.shape[1])
    reduce_scatter(mine, message.flatten(), group=group)
    return [
        layout.unfill(part.view(layout.filled), dist.get_rank(group)).to(whole.dtype)
        for part, whole, layout in zip(mine.split([tensor.shape[1] for tensor in filled]), wholes, layouts, strict=True)
    ]


class Whole(torch.autograd.Function):
    """The whole tensor of shards.

    The gradient of a shard is the sum of the gradients of the whole in the processes that have the other shards; with
    `average`, the mean over the processes that have the others or the same.
    """

    @staticmethod
    def forward(local: Tensor, layout: ShardLayout, average: bool) -> Tensor:
        return layout.gather(local).view_as(local) if layout.dim is None else layout.gather(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.layout, ctx.average = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = cast(Any, Summed).apply(gradient, ctx.layout)
        if not ctx.average:
            return total, None, None
        total = total / ctx.layout.pieces
        for group in ctx.layout.repeating:
            total = total / dist.get_world_size(group)
            dist.all_reduce(total, group=group)
        return total, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return gathered_whole(tangent, ctx.layout, ctx.average)

    @staticmethod
    def vmap(info: Any, in_dims: Any, local: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return torch.stack([gathered_whole(part, *rest) for part in local.unbind(in_dims[0])]), 0


def gathered_whole(local: Tensor, layout: ShardLayout, average: bool) -> Tensor:
    """See `Whole`."""
    result: Tensor = cast(Any, Whole).apply(local, layout, average)
    return result


class Summed(torch.autograd.Function):
    """The shard of the sum of all whole tensors in a group of processes, the transpose of `Whole`. A tensor that is not
    divided is another one in every process, and not added up."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: ShardLayout) -> Tensor:
        ctx.layout = layout
        return layout.summed(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered_whole(gradient, ctx.layout, False), None


@dataclass(frozen=True)
class Shard:
    """A shard that is a function of other tensors, instead of a parameter: derivatives pass through `local`, as
    they do not through a DTensor in forward mode."""

    local: Tensor
    layout: ShardLayout


def in_place_of(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor from which a graph reads `parameter`. local: its shard, or all of a parameter that is not sharded."""
    return cast(Tensor, Shard(local, ShardLayout.of(parameter))) if is_sharded(parameter) else local


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is divided as `parameter` is, in the memory of the shard `local`."""
    return ShardLayout.of(parameter).dtensor(local) if is_sharded(parameter) else local


def is_divided(value: Any) -> bool:
    """Whether `unsharded` has to gather this."""
    return isinstance(value, Shard) or is_sharded(value)


def unsharded(value: Any, average: bool = False) -> Any:
    """The whole tensor of a DTensor or a `Shard`, differentiable; other values are whole.

    average: the gradient of a shard is the mean over processes, as that of FSDP2 in a training step, instead of the
        sum over the processes of its group.
    """
    if is_sharded(value):
        if any(placement.is_partial() for placement in value.placements):  # parts of a sum, as gradients may be
            return value.full_tensor()
        value = Shard(value.to_local(), ShardLayout.of(value))
    return gathered_whole(value.local, value.layout, average) if isinstance(value, Shard) else value


def averaged_unsharded(value: Any) -> Any:
    """`unsharded` in a training step."""
    return unsharded(value, average=True)


class SavedShards:
    """Saves no gathered tensors for a backward: they are gathered again where the backward reads them."""

    def __init__(self, average: bool) -> None:
        self.average = average  # the gradients of a shard over processes, instead of adding them up
        self.gathered: dict[int, tuple[weakref.ref[Tensor], Shard]] = {}  # by the place of their memory

    def unsharded(self, value: Any) -> Any:
        """The whole tensor of a DTensor or a `Shard`."""
        layout = value.layout if isinstance(value, Shard) else ShardLayout.of(value)
        result = unsharded(value, self.average)
        if result.numel():
            local = value.local.detach() if isinstance(value, Shard) else shard(value)
            self.gathered[result.untyped_storage().data_ptr()] = weakref.ref(result), Shard(local, layout)
        return result

    def pack(self, tensor: Tensor) -> Any:
        alive, mine = self.gathered.get(tensor.untyped_storage().data_ptr(), (None, None))
        whole_tensor = None if alive is None else alive()
        if mine is None or whole_tensor is None or whole_tensor.dtype != tensor.dtype:
            return tensor
        return mine, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        mine, shape, stride, offset = packed
        return torch.as_strided(unsharded(mine), shape, stride, offset)


@dataclass(frozen=True)
class Shards:
    """All trained parameters of a sharded model, by name; they are divided among the same processes.

    everyone: the processes that have parts of a batch, or the same part; None: those of the default group.
    units: whether FSDP2 has divided them, and not tensor parallelism alone.
    meshes_differ: whether some parameters are divided among fewer processes than others.
    """

    layouts: Mapping[str, ShardLayout]
    everyone: Any = None
    units: bool = True
    meshes_differ: bool = False

    @staticmethod
    def of(named: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module]) -> Shards | None:
        """None if no trained parameter is sharded.

        FSDP2 divides all parameters along one dimension of processes, and may repeat the shards along others. Tensor
        parallelism divides some, and every process has the others.

        modules: of the model.

        Raises RegistrationError for another division, and if FSDP2 has divided some parameters and not others.
        """
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not any(map(is_sharded, trained.values())):
            return None
        from torch.distributed.fsdp import FSDPModule

        units = any(isinstance(module, FSDPModule) for module in modules)
        meshes = [cast(Any, parameter).device_mesh for parameter in trained.values() if is_sharded(parameter)]
        widest = max(meshes, key=lambda mesh: mesh.ndim)
        problems = {name: problem(parameter, widest, units) for name, parameter in trained.items()}
        if rows := [(name, text) for name, text in problems.items() if text]:
            raise RegistrationError(
                f"K-FAC cannot train {len(rows)} of {len(trained)} parameters that are sharded as they are:\n"
                f"{table(rows)}\n"
                "Call torch.distributed.fsdp.fully_shard on the model itself, after its units: it shards every "
                "parameter that no unit has. Take one DeviceMesh for all of parallelize_module and fully_shard, or "
                "parts of one."
            )
        size, group = widest.size(widest.ndim - 1), widest.get_group(widest.ndim - 1)
        layouts = {
            name: ShardLayout.of(parameter)
            if is_sharded(parameter)
            else ShardLayout(parameter.shape, None, size, group)
            for name, parameter in trained.items()
        }
        everyone, differ = everyone_in(widest) if units else None, any(mesh != widest for mesh in meshes)
        return Shards(layouts, everyone, units, differ)

    @property
    def of_mesh(self) -> ShardLayout:
        """The layout of a DTensor among the parameters."""
        return next(layout for layout in self.layouts.values() if layout.mesh is not None)

    @property
    def in_grid(self) -> bool:
        """Whether parameters are divided along several dimensions of processes."""
        return self.meshes_differ or any(isinstance(layout, GridLayout) for layout in self.layouts.values())

    @property
    def tensor_parallel(self) -> bool:
        """Whether several processes have the same part of a batch."""
        return not self.units or self.in_grid

    def refuse_owners(self, process_group: Any) -> None:
        """Raises RegistrationError if the processes that divide the parameters cannot divide the blocks, too.

        process_group: of all processes that have parts of a batch; None: the default group.
        """
        if self.in_grid:
            raise RegistrationError(
                "FSDP2 and tensor parallelism divide the parameters together, and the way of a gradient to an owner "
                "and back along two dimensions of processes is not written yet: write KFAC(..., "
                "placement='replicated'), which keeps all blocks in every process."
            )
        everyone = dist.get_world_size(process_group or self.everyone)
        if everyone != self.of_mesh.mesh.size():
            raise RegistrationError(
                f"tensor parallelism divides the parameters among {self.of_mesh.mesh.size()} of {everyone} processes, "
                "and owners need to know which of the others have the same shards: write KFAC(..., "
                "placement='replicated'), which keeps all blocks in every process."
            )

    def check_gradients(self, gradients: Tensors) -> None:
        """Raises RuntimeError if processes that have the same elements of a parameter have other gradients of them.
        Waits for the device."""
        shared = {name: gradient for name, gradient in gradients.items() if self.weight(name) < 1}
        if not shared:
            return
        squares = torch.stack([shard(gradient).double().square().sum() for gradient in shared.values()])
        for n, name in enumerate(shared):
            if self.layouts[name].dim is not None:
                dist.all_reduce(squares[n], group=self.layouts[name].group)
        ends = torch.cat([squares, -squares])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.everyone)
        most, least = ends[: len(shared)].sqrt(), (-ends[len(shared) :]).clamp(min=0).sqrt()
        apart = (most - least > NORM_TOLERANCE * most).tolist()
        if rows := [
            (name, f"{low:.4g} to {high:.4g}")
            for name, low, high, differs in zip(shared, least.tolist(), most.tolist(), apart, strict=True)
            if differs
        ]:
            raise RuntimeError(
                f"processes have other gradients of parameters that all of them have; their norms are\n{table(rows)}\n"
                "Give the processes of tensor parallelism the same cases. A module that computes with a part of the "
                "positions needs SequenceParallel() in the plan of parallelize_module, which adds its gradients up."
            )

    @property
    def group(self) -> Any:
        """The processes among which parameters are divided."""
        return self.everyone if self.in_grid else self.of_mesh.group

    @property
    def ranks(self) -> int:
        """Their number."""
        return dist.get_world_size(self.everyone) if self.in_grid else self.of_mesh.ranks

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes among which parameters are divided."""
        result = values.clone()
        dist.all_reduce(result, group=self.group)
        return result

    def weight(self, name: str) -> float:
        """The factor of the elements of a parameter in a sum over processes, in which every element counts once."""
        return self.layouts[name].pieces / self.ranks

    def gathered(self, parts: Tensors) -> Tensors:
        """The whole tensors of shards by name, in one message; in a grid, in one for every tensor."""
        if self.in_grid:
            return {name: self.layouts[name].gather(part) for name, part in parts.items()}
        layouts = {name: self.layouts[name] for name in parts if self.layouts[name].dim is not None}
        if not layouts:
            return dict(parts)
        filled = [layout.fill(parts[name]) for name, layout in layouts.items()]
        message = torch.cat([tensor.reshape(-1) for tensor in filled])
        everything = message.new_empty((self.ranks * message.numel(),))
        all_gather(everything, message, group=self.group)
        pieces = everything.unflatten(0, (self.ranks, -1)).split([tensor.numel() for tensor in filled], 1)
        wholes = {
            name: layout.join(piece.unflatten(1, layout.filled))
            for (name, layout), piece in zip(layouts.items(), pieces, strict=True)
        }
        return {name: wholes.get(name, part) for name, part in parts.items()}

    def to_owners(self, parts: Tensors, owners: Mapping[str, int]) -> Tensors:
        """The whole tensors of shards by name, of those that this process owns, in one message."""
        rank, divided = dist.get_rank(self.group), [name for name in parts if self.layouts[name].dim is not None]
        names = sorted(divided, key=lambda name: owners[name])
        mine = [name for name in names if owners[name] == rank]
        like = next(iter(parts.values()))
        message = torch.cat([like.new_empty(0), *(self.layouts[n].fill(parts[n]).reshape(-1) for n in names)])
        elements = [self.layouts[name].filled.numel() for name in mine]
        received = message.new_empty((self.ranks, sum(elements)))
        self.exchange(received, message, [sum(elements)] * self.ranks, self.elements(names, owners))
        whole = {name: part for name, part in parts.items() if name not in divided and owners[name] == rank}
        return whole | {
            name: self.layouts[name].join(piece.unflatten(1, self.layouts[name].filled))
            for name, piece in zip(mine, received.split(elements, 1), strict=True)
        }

    def from_owners(self, wholes: Tensors, owners: Mapping[str, int], parts: Tensors) -> Tensors:
        """The shards of this process of whole tensors that their owners have, by name, in one message.

        parts: other shards of all these names, of the same dtype and device.
        """
        rank, names = dist.get_rank(self.group), sorted(parts, key=lambda name: owners[name])
        like = next(iter(parts.values()))
        mine = [self.layouts[name].by_process(wholes[name]) for name in names if owners[name] == rank]
        message = torch.cat(mine, 1) if mine else like.new_empty((self.ranks, 0))
        elements = [self.layouts[name].filled.numel() for name in names]
        received = like.new_empty(sum(elements))
        self.exchange(received, message, self.elements(names, owners), [message.shape[1]] * self.ranks)
        return {
            name: self.layouts[name].unfill(piece.view(self.layouts[name].filled), rank)
            for name, piece in zip(names, received.split(elements), strict=True)
        }

    def elements(self, names: Iterable[str], owners: Mapping[str, int]) -> list[int]:
        """The elements of one filled shard of every name, by owner."""
        result = [0] * self.ranks
        for name in names:
            result[owners[name]] += self.layouts[name].filled.numel()
        return result

    def exchange(self, received: Tensor, sent: Tensor, of_processes: list[int], to_processes: list[int]) -> None:
        """Fill `received` with the messages of all processes; both tensors are in the order of the processes."""
        dist.all_to_all_single(received.view(-1), sent.reshape(-1), of_processes, to_processes, group=self.group)

    def parts(self, wholes: Tensors) -> Tensors:
        """The shards of this process of whole tensors by name."""
        layouts = ((name, tensor, self.layouts[name]) for name, tensor in wholes.items())
        return {name: layout.part(tensor, dist.get_rank(layout.group)) for name, tensor, layout in layouts}


def everyone_in(mesh: Any) -> Any:
    """The group of all processes of a mesh. All of them call it together."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)


def problem(parameter: Tensor, mesh: Any, units: bool) -> str:
    """Why a trained parameter beside sharded ones cannot be trained; empty if it can.

    mesh: that of the most dimensions. units: whether FSDP2 has divided parameters.
    """
    if not is_sharded(parameter):
        return "is whole in every process, and others are not" if units else ""
    if parameter.is_complex():
        return "is complex: write model = kfac_fx.with_real_parameters(model) before compile"
    placements, own = cast(Any, parameter).placements, cast(Any, parameter).device_mesh
    if any(placement.is_partial() for placement in placements):
        return f"is divided as {placements}"
    if own != mesh and not set(own.mesh.flatten().tolist()) <= set(mesh.mesh.flatten().tolist()):
        return f"is divided among other processes than others are, {own}"
    return ""
