"""The step of "eigen_moments" on CUDA: products in bfloat16 of padded matrices, as one CUDA graph.

A plain step turns gradients into the bases and directions back, 4 o i (o + i) flops of a matrix [o, i]. On an H100
these products take ten to sixteen times as long in float32 as in bfloat16, and in bfloat16 three to six times as long
with rows of 769 numbers, which a bias makes, as with 784 (`benchmarks.basis_products`). So every group of blocks keeps

    rows         [L, g, O, I]   bfloat16; O and I are o and i, rounded up to multiples of 16 where the side has a basis
    directions   the same       before they are turned back
    bases        of each dense side, in bfloat16: copies of those in the extras of the blocks

with zeros outside of [o, i]. Sums of products are in float32, as both means, the eigenvalues and the move are. Diagonal
sides have no products and no padding. Where the last column is a bias, gradients of weights and of biases are read into
tensors of their own, and so are their updates: a handful of kernels takes lists of contiguous tensors, and would be one
a parameter for others.

One kernel a group does all that is done element by element (`kfac_fx.optim.padded_kernels`). Where Triton cannot run,
some ten operations of torch do it, and the report says so. In eager mode the host takes longer to issue the operations
of a step than a device to run them, so all operations behind the gradients are one graph. A check needs the update as
a vector, and makes its own move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kfac_fx.fisher.bases import (
    Means,
    StepScalars,
    adam_step,
    combine,
    divide_root,
    eigenvalues_of,
    lengths,
    momentum_of,
)
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import cache_aligned, half_products
from kfac_fx.linalg.vectors import Tensors, joined, split
from kfac_fx.optim.groups import MOST_SUMMED, FlatParameters
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import foreach_add_, foreach_copy_, foreach_mul_, version
from kfac_fx.recording.emitted import CudaGraph

Scalars = Mapping[str, Tensors]
Grow = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels of Triton and graphs run on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def grafted_direction(
    h: Tensor,
    average: Tensor,
    squares: Tensor,
    scalars: StepScalars,
    eigenvalues: Sequence[Tensor],
    exponent: float,
    accept: Tensor,
    out: Tensor,
) -> Tensor:
    """Take h into both means of a group, and write the direction d into `out`.

    Args:
        h: the gradient in the basis [L, g, o, i].
        accept: 0-dim; where it is false, the gradient counts as zero.
        average, squares: the sums of the means.
        exponent: w.
        out: [L, g, o, i].

    Returns |a| and |d| of the blocks, [2, L]: a is Adam's step.
    """
    h = torch.where(accept, h, 0)
    pair = torch.stack([h, h])
    adam_step(pair, average, squares, scalars)
    if exponent:
        divide_root(pair, eigenvalues)
        combine(pair, exponent)
    out.copy_(pair[1 if exponent else 0])
    return lengths(pair) if exponent else lengths(pair[:1]).expand(2, -1)


def scaled_directions(directions: Tensor, scales: Tensor) -> None:
    """Multiply the directions of every block by its scale [L, 1, 1, 1]. They are zero where that is zero."""
    directions.copy_(torch.where(scales == 0, 0, directions * scales))


class KernelOrPlain:
    """A kernel, or the function `plain` after the kernel's first failure. reason: the failure.

    name: of a function in `kfac_fx.optim.padded_kernels`; None: no kernel.
    """

    def __init__(self, plain: Callable[..., Any], name: str | None) -> None:
        self.plain, self.name = plain, name
        self.kernel: Callable[..., Any] | None = None
        self.reason: str | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.name is None or self.reason is not None:
            return self.plain(*arguments)
        try:
            if self.kernel is None:
                self.kernel = getattr(import_module("kfac_fx.optim.padded_kernels"), self.name)
            return self.kernel(*arguments)
        except Exception as error:  # Triton is missing, or has no compiler here; nothing was written
            if fatal(error):
                raise
            self.reason = f"Triton cannot run {self.name}: {first_line(error)}"
            return self.plain(*arguments)


@dataclass
class PaddedGroup:
    """The buffers of a group of blocks."""

    group: BlockGroup
    rows: Tensor
    directions: Tensor
    bases: list[Tensor]  # of the dense sides
    apart: tuple[Tensor, Tensor] | None = None  # gradients of weights and biases, see `by_name`; None: they are `rows`
    views: Tensors | None = None  # of the gradients by parameter; None if the layout of a parameter has no views
    seen: tuple[int, ...] = ()  # the versions of the extras that `bases` are copies of

    @staticmethod
    def of(group: BlockGroup, dtype: torch.dtype) -> PaddedGroup:
        """dtype: of products."""
        shape, dense = list(group.shape), [side for side in group.sides if not side.diagonal]
        if group.multiplies_whole:
            shape[1:] = [
                d if side.diagonal else cache_aligned(d) for side, d in zip(group.sides, shape[1:], strict=True)
            ]
        rows = torch.zeros(len(group), *shape, dtype=dtype if dense else group.dtype, device=group.device)
        bases = []
        for side in dense:
            basis = group.extras[f"basis/{side}"]
            size = cache_aligned(basis.shape[-1]) if group.multiplies_whole else basis.shape[-1]
            bases.append(rows.new_zeros(*basis.shape[:2], size, size))
        padded = PaddedGroup(group, rows, torch.zeros_like(rows), bases)
        if group.alike is not None and group.alike.both:
            width = cache_aligned(group.shape[2] - 1) if padded.turns_both else group.shape[2] - 1
            padded.apart = rows.new_zeros(*rows.shape[:3], width), rows.new_zeros(*rows.shape[:3], 1)
        views = padded.by_name(*padded.gradients)
        memory = [buffer.untyped_storage().data_ptr() for buffer in padded.gradients]
        if all(view.untyped_storage().data_ptr() in memory for view in views.values()):
            padded.views = views
        else:
            padded.apart = None
        return padded

    @property
    def turns_both(self) -> bool:
        """Whether products with one matrix turn either side."""
        return self.group.multiplies_whole and len(self.bases) == 2

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The buffers that gradients are read into."""
        return self.apart or (self.rows,)

    def inside(self, tensor: Tensor) -> Tensor:
        """[..., g, O, I] without its padding: [..., g, o, i]."""
        _, o, i = self.group.shape
        return tensor[..., :o, :i]

    @property
    def names(self) -> list[str]:
        """The parameters."""
        return [name for registration in self.group.registrations for name in registration.parameters]

    def by_name(self, matrices: Tensor, biases: Tensor | None = None) -> Tensors:
        """The parameters in [L, g, O, I], or in weights [L, g, O, I'] and biases [L, g, O, 1]."""
        _, o, i = self.group.shape
        if biases is None:
            return self.group.by_name(matrices[..., :o, :i])
        assert self.group.alike is not None, "bug in kfac_fx: weights apart from biases in groups of unlike forms"
        return self.group.alike.unpack_apart(matrices[..., :o, : i - 1], biases[..., :o, 0])

    def renew_bases(self) -> None:
        """Copy the bases of the blocks, and turn the last directions into them, if they have changed."""
        present = [self.group.extras[f"basis/{side}"] for side in self.group.sides if not side.diagonal]
        versions = tuple(map(version, present))
        if versions != self.seen:
            last = self.turned(self.directions, transpose=False)
            for target, basis in zip(self.bases, present, strict=True):
                target[..., : basis.shape[-2], : basis.shape[-1]].copy_(basis)
            self.directions.copy_(self.turned(last.to(self.directions.dtype), transpose=True))
            self.seen = versions

    def to_eigenbasis(self) -> Tensor:
        """h = Qᵀ W of the gradients, [L, g, o, i] in the precision of the factors."""
        width = self.group.shape[2] - 1
        if self.apart is None or not self.turns_both:
            if self.apart is not None:
                self.rows[..., :width].copy_(self.apart[0])
                self.rows[..., width:].copy_(self.apart[1])
            return self.inside(self.turned(self.rows, transpose=True))
        (left, right), rows = (basis.flatten(0, 1) for basis in self.bases), self.rows.flatten(0, 1)
        weights, biases = (gradients.flatten(0, 1) for gradients in self.apart)
        torch.bmm(left.mT, weights[..., :width], out=rows[..., :width])
        torch.bmm(left.mT, biases, out=rows[..., width : width + 1])
        return self.inside(half_products(rows, right, self.group.dtype).view(self.rows.shape))

    def updates(self) -> Tensors:
        """Q d of the directions, by parameter."""
        width = self.group.shape[2] - 1
        if self.apart is None or not self.turns_both:
            update = self.turned(self.directions, transpose=False)
            parts = (update,) if self.apart is None else (update[..., :width], update[..., width:])
            return self.by_name(*(part.contiguous() for part in parts))
        left, right = (basis.flatten(0, 1) for basis in self.bases)
        turned = half_products(self.directions.flatten(0, 1), right.mT)
        parts = turned[..., :width], turned[..., width : width + 1]
        weights, biases = (half_products(left, part, self.group.dtype) for part in parts)
        blocks = self.rows.shape[:2]
        return self.by_name(*(update.unflatten(0, blocks) for update in (weights, biases)))

    def turned(self, matrices: Tensor, transpose: bool) -> Tensor:
        """Q W, or Qᵀ W, in the precision of the factors: [L, g, O, I]."""
        if not self.bases:
            return matrices
        each = iter(self.bases)
        if not self.group.multiplies_whole:
            one = torch.ones(1, dtype=matrices.dtype, device=matrices.device)
            operators = [one if side.diagonal else next(each) for side in self.group.sides]
            return self.group.applied(matrices, operators, transpose).to(self.group.dtype).contiguous()
        left, right = (None if side.diagonal else next(each).flatten(0, 1) for side in self.group.sides)
        rows, precision = matrices.flatten(0, 1), self.group.dtype
        if left is not None:
            rows = half_products(left.mT if transpose else left, rows, precision if right is None else None)
        if right is not None:
            rows = half_products(rows, right if transpose else right.mT, precision)
        return rows.view(matrices.shape)


@dataclass
class PaddedStep:
    """The steps of the blocks that have factors. The 0-dim tensors are written in place."""

    means: Means  # of the groups
    groups: list[PaddedGroup]
    registrations: list[Registration]
    names: frozenset[str]  # of the parameters in the blocks
    accept: Tensor  # whether the step's gradient is taken, and then whether the step is made
    length: Tensor  # the factor of the updates; zero before the first
    squared: Tensor  # the sum of the squares of the last move, up to `length`
    decay: float  # β₂
    exponent: float  # w
    region: KernelOrPlain
    scale: KernelOrPlain
    graph: CudaGraph = field(default_factory=CudaGraph)
    packed: FlatParameters | None = None  # whose gradients the buffers have
    moved: Tensors | None = None  # by name, the last move up to a factor, if it is no multiple of the directions

    @staticmethod
    def of(means: Means, scalar: Tensor, decay: float, exponent: float, dtype: torch.dtype) -> PaddedStep:
        """scalar: a zero with the dtype and the device of all scalars. dtype: of products."""
        registrations = [registration for group in means.groups for registration in group.registrations]
        region, scale = (
            KernelOrPlain(plain, kernel if scalar.is_cuda else None)
            for plain, kernel in ((grafted_direction, "graft_by_kernel"), (scaled_directions, "scale_by_kernel"))
        )
        return PaddedStep(
            means,
            [PaddedGroup.of(group, dtype) for group in means.groups],
            registrations,
            frozenset(name for registration in registrations for name in registration.owners),
            torch.ones_like(scalar, dtype=torch.bool),
            torch.zeros_like(scalar),
            torch.zeros_like(scalar),
            decay,
            exponent,
            region,
            scale,
        )

    def fits(self, means: Means, flat: FlatParameters) -> bool:
        """Whether these are the means of all blocks with factors, and the blocks have just these parameters."""
        return self.means is means and self.names == flat.parameters.keys()

    @property
    def described(self) -> str:
        """For the report: the precision of products."""
        turned = next((padded for padded in self.groups if padded.bases), self.groups[0])
        return f"gradients are turned by products of {turned.rows.dtype} with sums in {turned.group.dtype}"

    @property
    def reasons(self) -> list[str]:
        """Why parts run otherwise than they should."""
        each = (self.region.reason, self.scale.reason, self.graph.reason)
        return [f"the step is slower than it could be: {reason}" for reason in each if reason is not None]

    # --- gradients --------------------------------------------------------------------------------------------------

    def pack(self, flat: FlatParameters) -> None:
        """Read the gradients of a step, once."""
        if self.packed is flat:
            return
        self.packed, parts = flat, split(flat.gradients, self.registrations)
        pairs: list[tuple[Tensor, Tensor]] = []
        for padded in self.groups:
            if padded.views is None:
                padded.inside(padded.rows).copy_(padded.group.pack(parts))
            else:
                pairs += [(view, parts[name]) for name, view in padded.views.items()]
        for targets, sources in lists_alike(pairs):
            foreach_copy_(targets, sources)

    def gradient_is_finite(self) -> Tensor:
        """Whether the squares of the packed gradients have a finite sum, also over many steps; 0-dim."""
        norms = [
            torch.linalg.vector_norm(buffer, dtype=padded.group.dtype)
            for padded in self.groups
            for buffer in padded.gradients
        ]
        return (MOST_SUMMED * torch.stack(norms).square().sum()).isfinite()

    def has_gradient(self) -> Tensor:
        """Whether a packed gradient is other than zero, 0-dim."""
        return torch.stack([buffer.any() for padded in self.groups for buffer in padded.gradients]).any()

    # --- updates ----------------------------------------------------------------------------------------------------

    def updates(
        self,
        momentum: Mapping[str, Tensor],
        nesterov: Tensor,
        most: Callable[[], Tensor],
        grow: Grow,
        rate: Callable[[], Tensor],
    ) -> Tensors:
        """rate Δ by the names of the registrations, after the gradient has entered both means.

        Where `accept` is false, or becomes false because an update is not finite, they are zero.

        Args:
            momentum: β₁ by parameter, 0-dim.
            nesterov: 0-dim; whether n is not m̂ alone.
            most: computes the largest β₁, 0-dim, after `grow`.
            grow: takes `accept`, <g, Δ'>, |g|² and |Δ'|² with the last update Δ', before `rate` is asked.
        """
        means, of_blocks = self.means, []
        turned = [padded.to_eigenbasis() for padded in self.groups]
        last = [padded.inside(padded.directions) for padded in self.groups]
        pairs: list[tuple[Tensor, Tensor]] = list(zip(turned, last, strict=True))
        if self.moved is not None:
            gradients = [padded.views or padded.by_name(*padded.gradients) for padded in self.groups]
            pairs = [(g, self.moved[name]) for by_name in gradients for name, g in by_name.items()]
        products = [(g * d).sum(dtype=self.length.dtype) for g, d in pairs]
        squares = torch.stack([torch.linalg.vector_norm(h) for h in turned]).square().sum()
        grow(self.accept, torch.stack(products).sum() * self.length.sign(), squares, self.squared)
        self.length.copy_(rate())
        scalars = means.advance(self.accept, momentum_of(means.groups, momentum, most()), self.decay, nesterov)
        for n, padded in enumerate(self.groups):
            of_blocks.append(
                self.region(
                    turned[n],
                    means.averages[n].moment,
                    means.squares[n].moment,
                    scalars[0 if len(scalars) == 1 else n],
                    eigenvalues_of(padded.group),
                    self.exponent,
                    self.accept,
                    last[n],
                )
            )
        of_adam, of_directions = torch.cat(of_blocks, dim=1)
        self.accept.logical_and_((of_adam + of_directions).isfinite().all())
        scales = self.length * of_adam / of_directions.clamp(min=torch.finfo(of_adam.dtype).tiny)
        self.squared.copy_(torch.where(self.accept, (self.length * of_adam).square().sum(), 0))
        for padded, scale in zip(self.groups, means.split(torch.where(self.accept, scales, 0)), strict=True):
            self.scale(padded.directions, scale)
        return {name: update for padded in self.groups for name, update in padded.updates().items()}

    def vector(
        self,
        flat: FlatParameters,
        ok: Tensor,
        scalars: Scalars,
        nesterov: Tensor,
        most: Callable[[], Tensor],
        grow: Grow,
    ) -> Tensor:
        """Δ, [P]. ok: 0-dim, whether the gradient is taken; `accept` has then whether the step can be made. scalars: as
        of `step`."""
        with on_device(self.accept.device):
            self.prepare(flat, ok)
            self.packed = None  # it holds the gradients
            updates = self.updates(scalars["momentum"], nesterov, most, grow, lambda: torch.ones_like(self.length))
            self.keep_move(updates, split(flat.copies, self.registrations), scalars)
            return flat.flat.joined(joined(updates, self.registrations, flat.gradients))

    def step(
        self,
        flat: FlatParameters,
        ok: Tensor,
        rate: Callable[[], Tensor],
        scalars: Scalars,
        nesterov: Callable[[], Tensor],
        most: Callable[[], Tensor],
        grow: Grow,
    ) -> Tensor:
        """Move the parameters by -rate lr (Δ + weight_decay θ). Returns whether they moved, 0-dim.

        Args:
            ok: 0-dim, whether the gradient is taken.
            rate, nesterov, most: compute 0-dim tensors from others that lie where they are.
            scalars: lr, momentum and weight_decay of the parameters by name, 0-dim.
            grow: as of `updates`.
        """
        one_lr = flat.lr.dim() == 0

        def move() -> None:
            """One graph holds these operations, which read and write tensors that lie where they are."""
            targets = split(flat.copies, self.registrations)
            length = (lambda: -rate() * flat.lr) if one_lr else (lambda: -rate())
            updates = self.updates(scalars["momentum"], nesterov(), most, grow, length)
            self.keep_move(updates, targets, scalars)
            if not one_lr:
                for names, (lr,) in by_scalars(self.owners, scalars["lr"]):
                    foreach_mul_([updates[name] for name in names], lr)
            if flat.weight_decay is not None:
                itself = {name: name for name in flat.copies}
                for names, (lr, decay) in by_scalars(itself, scalars["lr"], scalars["weight_decay"]):
                    foreach_mul_([flat.copies[name] for name in names], 1 - rate() * lr * decay * self.accept)
            for parameters, moves in lists_alike([(targets[name], update) for name, update in updates.items()]):
                foreach_add_(parameters, moves)

        with on_device(self.accept.device):
            self.prepare(flat, ok)
            # A graph depends on where its tensors lie, and on the decisions of the host.
            tensors = [*flat.copies.values(), *(scalar for by_name in scalars.values() for scalar in by_name.values())]
            decisions = self.means.have_equal_weights(), flat.weight_decay is None, one_lr
            self.graph(move, (*decisions, *(tensor.data_ptr() for tensor in tensors)))
        self.packed = None
        return self.accept.clone()

    @property
    def owners(self) -> dict[str, str]:
        """The parameter that has each of the registrations' parameters, which may be a part of it."""
        return {n: owner for r in self.registrations for n, owner in zip(r.parameters, r.owners, strict=True)}

    def keep_move(self, updates: Tensors, theta: Tensors, scalars: Scalars) -> None:
        """Keep lr (Δ + weight_decay θ), up to a factor, if it is no multiple of Δ.

        updates: `length` Δ. theta: the parameters before the move. scalars: as of `step`.
        """
        if self.moved is None:
            return
        for names, (lr, decay) in by_scalars(self.owners, scalars["lr"], scalars["weight_decay"]):
            moved = [self.moved[name] for name in names]
            foreach_copy_(moved, [theta[name] for name in names])
            foreach_mul_(moved, self.length * decay * self.accept)
            foreach_add_(moved, [updates[name] for name in names])
            foreach_mul_(moved, lr)
        norms = torch.stack([torch.linalg.vector_norm(moved) for moved in self.moved.values()])
        self.squared.copy_(norms.square().sum())

    def forget_move(self, where: Tensor) -> None:
        """Forget the last move where `where` is true, 0-dim."""
        self.length.masked_fill_(where, 0)

    def prepare(self, flat: FlatParameters, ok: Tensor) -> None:
        self.pack(flat)
        self.accept.copy_(ok)
        if flat.one_scale:
            self.moved = None
        elif self.moved is None:
            copies = split(flat.copies, self.registrations)
            of_updates = {name: padded.group.dtype for padded in self.groups for name in padded.names}
            self.moved = {n: torch.zeros_like(copies[n], dtype=dtype) for n, dtype in of_updates.items()}
        for padded in self.groups:
            padded.renew_bases()


def lists_alike(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The pairs as lists of tensors whose dtypes are equal on each side, and whose strides are equal in every pair or
    in none: functions of lists take few kernels for equal strides, and one a pair for a list with other ones."""
    alike: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for first, second in pairs:
        key = first.dtype, second.dtype, first.stride() == second.stride()
        lists = alike.setdefault(key, ([], []))
        lists[0].append(first)
        lists[1].append(second)
    yield from alike.values()


def by_scalars(owners: Mapping[str, str], *scalars: Tensors) -> Iterator[tuple[list[str], list[Tensor]]]:
    """The names whose owners have the same scalars, and these scalars. owners: the parameter of every name."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, owner in owners.items():
        alike.setdefault(tuple(id(of[owner]) for of in scalars), []).append(name)
    for names in alike.values():
        yield names, [of[owners[names[0]]] for of in scalars]
