"""Fisher blocks: one registration's part of the Fisher matrix, as an operator on vectors of its parameters.

No block knows any layer: a registration says what its matrix is and how it is approximated, and that is all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.blocks.series import SeriesGroup
from kfac_fx.factors.factor import Factor, Failures, NotRegisteredError, additive
from kfac_fx.factors.inverses import Inverter
from kfac_fx.factors.stacks import BlockGroup, Form, Vector
from kfac_fx.factors.sua import UncorrelatedGroup
from kfac_fx.factors.wide import WideGroup, in_blocks
from kfac_fx.linalg.matrices import Root, dense
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.errors import nearest
from kfac_fx.passes.ir import Registration

GROUPS: Mapping[str, type[BlockGroup]] = {  # by `Approximation.group`
    "stacked": BlockGroup,
    "series": SeriesGroup,
    "pixels": UncorrelatedGroup,
}


@dataclass(frozen=True)
class FlatForm:
    """Generic parameters, flattened and concatenated in order: one column [1, p, 1]."""

    shapes: Mapping[str, torch.Size]

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, sum(shape.numel() for shape in self.shapes.values()), 1

    def pack(self, tensors: Vector) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self.shapes]).view(self.shape)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        parts = torch.split(matrix.flatten(), [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}


def form_of(registration: Registration, parameters: Vector) -> Form:
    if registration.matrix is not None:
        return registration.matrix
    return FlatForm({name: parameters[name].shape for name in registration.parameters})


class Operator(ABC):
    """F + λ I, of one block or of all. Vectors are dicts of tensors shaped as the parameters, by name.

    Powers other than 1 are those of the last `update_inverses`, with the damping of that time; the power 1 takes the
    present factors and damping. Products raise NotRegisteredError, a KeyError, for a root that is not kept and for a
    vector that does not fit, and FactorNotReady before the first update.
    """

    @abstractmethod
    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]: ...

    def multiply(self, vector: Vector) -> dict[str, Tensor]:
        """(F + λ I) v with the present factors."""
        return self._multiply(vector, 1.0)

    def multiply_inverse(self, vector: Vector) -> dict[str, Tensor]:
        """(F + λ I)⁻¹ v."""
        return self._multiply(vector, -1.0)

    def multiply_cholesky(self, vector: Vector, transpose: bool = False) -> dict[str, Tensor]:
        """L v or Lᵀ v with L Lᵀ = F + λ I; of series L is not triangular."""
        return self._multiply(vector, "cholesky", transpose)

    def multiply_cholesky_inverse(self, vector: Vector, transpose: bool = False) -> dict[str, Tensor]:
        """L⁻¹ v or L⁻ᵀ v; L⁻ᵀ of white noise has the covariance (F + λ I)⁻¹."""
        return self._multiply(vector, "cholesky_inverse", transpose)


class FisherBlock(Operator):
    """One block of a group of equals.

    factors: "A", "G" and "positions" of a Kronecker product, else "F"; scale and shapes: `kfac_fx.factors.factor`.
    statistics: what a recorder must sum for it (`kfac_fx.statistics.row_sums`); () if it needs the gradient.
    """

    def __init__(self, group: BlockGroup, index: int) -> None:
        self.registration = group.registrations[index]
        self.group = group
        self.member = slice(index, index + 1)
        self.factors: Mapping[str, Factor] = {
            name: Factor(name, str(self.registration), stack, index) for name, stack in group.factors.items()
        }
        self.statistics = statistics_of(self.registration)

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.registration.parameters

    def __repr__(self) -> str:
        return f"FisherBlock({self.registration}, {self.registration.approximation}, {list(self.group.shape)})"

    def update(self, moments: Mapping[str, Tensor], cases: int, *, decay: float, weight: float = 1.0) -> None:
        """Average the moments of one batch of `cases` cases into the factors; not if they are not finite."""
        sums = [additive(self.registration.structure, moments)]
        self.group.update(sums, cases, decay=decay, weight=weight, members=self.member)

    def update_inverses(self) -> None:
        """Of this block and those that share its group."""
        Inverter([self.group], tuple(self.group.roots)).update()

    # --- products: those of `kfac_fx.factors.stacks` ------------------------------------------------------------------

    def multiply_matpower(self, vector: Vector, exp: float) -> dict[str, Tensor]:
        """(F + λ I)^exp v. Raises NotRegisteredError for a power that is not kept."""
        return self._multiply(vector, float(exp))

    @torch.no_grad()
    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]:
        check_fits(vector, self.group.forms[self.member.start].shapes)
        vector = {name: dense(vector[name]) for name in self.parameters}
        product = self.group.multiply(self.group.pack(vector, self.member), root, transpose, self.member)
        return self.group.unpack(product, vector, self.member)

    @property
    def failures(self) -> Failures:
        """What went wrong with this block so far; waits for the device."""
        return self.group.failures(self.member)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the block by name, sharing memory; "ready": were the factors updated, the inverses."""
        group, index = self.group, self.member.start
        state = {"ready": torch.tensor([group.updated, group.inverted])}
        state |= {name: getattr(group, name)[index] for name in ("skipped", "failed")}
        for name, stack in group.factors.items():
            state |= {f"{name}/moment": stack.moment[index], f"{name}/total_weight": stack.total_weight[index]}
        for root, operators in group.roots.items():
            state |= {f"{name}/{root}": op[index] for name, op in zip(group.operands(root), operators, strict=True)}
        return state

    def full_fisher_block(self) -> Tensor:
        """The undamped block [g·o·i, g·o·i] in the order of the flattened matrix (generic: of the parameters)."""
        return self.group.dense(self.member.start)


def check_fits(vector: Vector, shapes: Mapping[str, Sequence[int]], alone: bool = False) -> None:
    """Raises NotRegisteredError with all culprits: names that are missing, tensors of another shape than the
    parameter's and, if the vector is of these parameters alone, other names; TypeError for anything but a mapping."""
    if not isinstance(vector, Mapping):
        raise TypeError(f"a vector is a dict of tensors by parameter name, and not a {type(vector).__name__}")
    missing, unknown = sorted(shapes.keys() - vector.keys()), sorted(vector.keys() - shapes.keys()) if alone else []
    other = [name for name in shapes if name in vector and tuple(vector[name].shape) != tuple(shapes[name])]
    if not (missing or unknown or other):
        return
    lines = ["the vector does not fit the registered parameters:"]
    lines += [f"  missing  {name}" for name in missing]
    lines += [f"  unknown  {name}{f'.{guess}' if (guess := nearest(name, missing)) else ''}" for name in unknown]
    lines += [f"  {name} is {list(vector[name].shape)}, and the parameter {list(shapes[name])}" for name in other]
    if unknown:  # frozen parameters, or those that `variables` leaves out
        lines.append("A vector has the parameters that are estimated, and no others: estimator.parameters.")
    raise NotRegisteredError("\n".join(lines))


def statistics_of(registration: Registration) -> tuple[str, ...]:
    approximation = registration.structure
    left, right = approximation.left, approximation.right
    if registration.generic:
        return ()
    if right is not None:
        outputs, inputs = registration.blocks
        return "count", in_blocks(right.statistic, inputs), in_blocks(left.statistic, outputs), *approximation.lagged
    # The square of a sum over uses is not the sum of squares: several uses of one case must add up first.
    if registration.one_use_a_case and (left.diagonal or len(registration.uses) > 1):
        return (left.statistic,)
    return ("per_case",)


def make_groups(
    registrations: Iterable[Registration],
    parameters: Mapping[str, Tensor],
    *,
    roots: Sequence[Root],
    damping: Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[BlockGroup]:
    """Registrations of one approximation and equal matrices in one group, in the order of their first members.

    dtype, device: of the factors; None: the parameters', but at least float32.
    """

    def key(one: Registration) -> tuple[object, ...]:
        example = parameters[one.parameters[0]]
        place = dtype or torch.promote_types(example.dtype, torch.float32), device or example.device
        group, sides = group_class(one), (one.structure.left, one.structure.right)
        return group, group.alike_in(one), sides, one.generic, form_of(one, parameters).shape, place

    found: dict[tuple[object, ...], list[Registration]] = {}
    parameters = split(parameters, registrations := list(registrations))
    for registration in registrations:
        found.setdefault(key(registration), []).append(registration)
    groups = []
    for members in found.values():
        example = parameters[members[0].parameters[0]]
        group = group_class(members[0])(
            members,
            [form_of(one, parameters) for one in members],
            roots=roots,
            damping=damping,
            dtype=dtype or torch.promote_types(example.dtype, torch.float32),
            device=device or example.device,
        )
        groups.append(group)
    return groups


def group_class(registration: Registration) -> type[BlockGroup]:
    return GROUPS[registration.structure.group] if registration.blocks == (1, 1) else WideGroup


def make_block(
    registration: Registration,
    *,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    damping: float | Tensor = 0.0,
    roots: Sequence[Root] = (-1.0,),
) -> FisherBlock:
    """A block on its own; see `make_groups`. roots: exponents to keep besides 1, "cholesky", "cholesky_inverse"."""
    damping = damping if isinstance(damping, Tensor) else torch.tensor(damping, dtype=torch.float64)
    (group,) = make_groups([registration], parameters, roots=roots, damping=damping, dtype=dtype, device=device)
    return FisherBlock(group, 0)
