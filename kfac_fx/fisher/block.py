"""Fisher blocks: the part of the Fisher matrix of one registration, as an operator on vectors of its parameters.

Blocks do not know layers. They read the matrix and the approximation from the registration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from kfac_fx.fisher.factor import Factor, Failures, NotRegisteredError
from kfac_fx.fisher.group_kinds import DividedForm, DividedGroup, UncorrelatedGroup, WideGroup
from kfac_fx.fisher.series import SeriesGroup
from kfac_fx.fisher.stacks import BlockGroup, Inverter
from kfac_fx.linalg.matrices import Root, dense
from kfac_fx.linalg.sharded import Shards
from kfac_fx.linalg.vectors import Vector, split, vector_form
from kfac_fx.passes.errors import FactorNotReady, nearest
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics.moments import Key, additive, statistics_of

GROUPS: Mapping[str, type[BlockGroup]] = {  # by `Approximation.group`
    "stacked": BlockGroup,
    "series": SeriesGroup,
    "pixels": UncorrelatedGroup,
}


class Operator(ABC):
    """F + λ I of one block or of all blocks. Vectors are dicts of tensors of the shapes of the parameters, by name.

    Powers other than 1 are those of the last `update_inverses`, with the damping of that time. The power 1 uses the
    present factors and damping.

    Products raise NotRegisteredError, a KeyError, for a root that is not kept and for a vector that does not fit, and
    FactorNotReady before the first update.
    """

    @abstractmethod
    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]: ...

    def multiply(self, vector: Vector) -> dict[str, Tensor]:
        """c (G + λ_G I) ⊗ (A + λ_A I) v with the present factors, which is not F v + λ v.

        λ is split between the sides of a Kronecker product, as K-FAC does (Martens & Grosse 2015, section 6.3), so the
        product also has the terms λ_A G ⊗ I and λ_G I ⊗ A. They can be larger than F v. `spectrum` adds δ as it is; its
        product with δ = 0 is F v. Blocks that are no Kronecker products have F v + λ v.
        """
        return self._multiply(vector, 1.0)

    def multiply_inverse(self, vector: Vector) -> dict[str, Tensor]:
        """The inverse of the damped F of `multiply`, of the last `update_inverses`, times v.

        If λ is split between the sides, this is not (F + λ I)⁻¹ v; `spectrum(damping=λ).multiply_inverse(v)` is.
        """
        return self._multiply(vector, -1.0)

    def multiply_cholesky(self, vector: Vector, transpose: bool = False) -> dict[str, Tensor]:
        """L v or Lᵀ v with L Lᵀ = F + λ I. L of a series block is not triangular."""
        return self._multiply(vector, "cholesky", transpose)

    def multiply_cholesky_inverse(self, vector: Vector, transpose: bool = False) -> dict[str, Tensor]:
        """L⁻¹ v or L⁻ᵀ v. L⁻ᵀ times white noise has the covariance (F + λ I)⁻¹."""
        return self._multiply(vector, "cholesky_inverse", transpose)


class BlockOperator(Operator):
    """One block of a group.

    Attributes:
        factors: "A", "G" and "positions" of a Kronecker product, otherwise "F"; scale: `kfac_fx.fisher.factor`.
        statistics: the names of the sums that it needs (`recording.statistics.row_sums`); () if it needs the gradient.
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
        """Average the moments of a batch of `cases` cases into the factors; moments that are not finite are skipped."""
        sums = [additive(self.registration.structure, moments)]
        self.group.update(sums, cases, decay=decay, weight=weight, members=self.member)

    def update_inverses(self) -> None:
        """Decompose the damped factors of this block and of all others in its group."""
        Inverter([self.group], tuple(self.group.roots)).update()

    def multiply_matpower(self, vector: Vector, exp: float) -> dict[str, Tensor]:
        """(F + λ I)^exp v."""
        return self._multiply(vector, float(exp))

    @torch.no_grad()
    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]:
        self.group.check_whole()
        check_fits(vector, self.group.forms[self.member.start].shapes)
        vector = {name: dense(vector[name]) for name in self.parameters}
        product = self.group.multiply(self.group.pack(vector, self.member), root, transpose, self.member)
        return self.group.unpack(product, vector, self.member)

    @property
    def failures(self) -> Failures:
        """The failures of this block so far; waits for the device."""
        return self.group.failures(self.member)

    @property
    def has_factors(self) -> bool:
        """Waits for the device. A block that another process keeps is as ready as those that are stacked with it."""
        if not self.group.here:
            return self.group.updated
        return any(bool(factor.total_weight) for factor in self.factors.values())

    def state(self) -> dict[str, Tensor]:
        """All tensors of the block by name, sharing memory; "ready": whether there are factors, and inverses.

        A block that another process keeps has "ready" alone.
        """
        group, index = self.group, self.member.start
        state = {"ready": torch.tensor([group.updated, group.inverted])}
        if not group.here:
            return state
        state |= {name: getattr(group, name)[index] for name in ("skipped", "failed")}
        tensors = dict(group.extras)
        for name, stack in group.factors.items():
            tensors |= {f"{name}/moment": stack.moment, f"{name}/total_weight": stack.total_weight}
        for root, operators in group.roots.items():
            tensors |= {f"{name}/{root}": op for name, op in zip(group.operands(root), operators, strict=True)}
        return state | {name: group.in_state(tensor[index]) for name, tensor in tensors.items()}

    def full_fisher_block(self) -> Tensor:
        """The undamped block [g·o·i, g·o·i], in the order of the flattened matrix; raises FactorNotReady."""
        self.group.check_whole()
        return self.group.dense(self.member.start)


class Blocks(dict[Key, BlockOperator]):
    """The blocks by the names of their parameters, in the order of the registrations."""

    def __missing__(self, key: object) -> BlockOperator:
        """Raises NotRegisteredError, a KeyError, with the keys that may have been meant."""
        names = {key} if isinstance(key, str) else set(key) if isinstance(key, tuple) else set()
        meant = [block for block in self if names & {*block, *(name.rpartition(".")[0] for name in block)}]
        raise NotRegisteredError(
            f"there is no block {key!r}: a key is the tuple of all parameters of a block, in their order, as in\n"
            + "\n".join(f"  {block!r}" for block in (meant or list(self))[:8])
        )


class Owners(Protocol):
    """The processes among which the blocks are divided (`kfac_fx.fisher.placement`)."""

    @property
    def rank(self) -> int: ...
    @property
    def shards(self) -> Shards | None: ...
    def assign(self, blocks: Sequence[BlockGroup], owners: Mapping[str, int]) -> Sequence[int]: ...
    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]: ...


def check_fits(vector: Vector, shapes: Mapping[str, Sequence[int]], alone: bool = False) -> None:
    """Raises NotRegisteredError with all names that are missing, of another shape or, if the vector is of these
    parameters alone, unknown; TypeError if the vector is not a mapping."""
    if not isinstance(vector, Mapping):
        raise TypeError(f"a vector is a dict of tensors by parameter name, not a {type(vector).__name__}")
    missing, unknown = sorted(shapes.keys() - vector.keys()), sorted(vector.keys() - shapes.keys()) if alone else []
    misshapen = [name for name in shapes if name in vector and tuple(vector[name].shape) != tuple(shapes[name])]
    if not (missing or unknown or misshapen):
        return
    lines = ["the vector does not fit the registered parameters:"]
    lines += [f"  missing  {name}" for name in missing]
    lines += [f"  unknown  {name}{f'.{guess}' if (guess := nearest(name, missing)) else ''}" for name in unknown]
    lines += [f"  {name} is {list(vector[name].shape)}, the parameter {list(shapes[name])}" for name in misshapen]
    if unknown:  # frozen parameters, or those that `variables` leaves out
        lines.append("Pass only the parameters that are estimated: estimator.parameters.")
    raise NotRegisteredError("\n".join(lines))


def check_kinds(vector: Vector, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises TypeError with all entries of a vector that are no numbers of floating point on a device."""
    lines = []
    if isinstance(vector, Mapping) and (others := [type(key).__name__ for key in vector if not isinstance(key, str)]):
        raise TypeError(f"a vector is a dict of tensors by parameter name, and has a key that is a {others[0]}")
    present = [name for name in shapes if name in vector] if isinstance(vector, Mapping) else []
    for name in present:
        entry: Any = vector[name]
        if entry is None:
            lines.append(f"  {name} is None: write zeros for a parameter without a gradient")
        elif not isinstance(entry, Tensor):
            lines.append(f"  {name} is a {type(entry).__name__}: write torch.as_tensor(value)")
        elif not (entry.is_floating_point() or entry.is_complex()):
            lines.append(f"  {name} is of {entry.dtype}: write tensor.float()")
        elif entry.is_meta:
            lines.append(f"  {name} is on the meta device, and has no values")
    if lines:
        raise TypeError("\n".join(["the vector has entries that cannot be multiplied:", *lines]))


def leading(vector: Vector, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The additional dimensions of a vector, in front of those of the parameters."""
    name = next((name for name in shapes if name in vector), None) if isinstance(vector, Mapping) else None
    if name is None:
        return ()
    return tuple(vector[name].shape[: max(0, vector[name].dim() - len(shapes[name]))])


def refuse_other_state(
    state: Mapping[str, Tensor], mine: Mapping[str, Tensor], elsewhere: tuple[str, ...], divided: bool
) -> None:
    """Raises ValueError if the names or shapes of a state are not those of `mine`.

    Args:
        elsewhere: the prefixes of the names of blocks that other processes keep, which may be in the state, too.
        divided: whether every process has the state of its own blocks only.
    """
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ValueError(f"a state is a dict of tensors by name, and not a {kind}: write estimator.state_dict()")
    if divided and (absent := mine.keys() - state.keys()):
        raise ValueError(
            f"the state lacks {len(absent)} tensors of blocks that this process keeps, first {min(absent)!r}. Each "
            "process has the state of its own blocks only: save and load with torch.distributed.checkpoint, which "
            "brings those of all processes together, or load on every process what that same process saved."
        )
    given = state.keys() - {name for name in state.keys() - mine.keys() if name.startswith(elsewhere)}
    if wrong := sorted(mine.keys() ^ given) or sorted(n for n in mine if not loadable(state[n], mine[n])):
        raise ValueError(
            f"the state is of another estimator: {len(wrong)} names or shapes differ, the first is {wrong[0]!r}."
        )


def loadable(entry: object, like: Tensor) -> bool:
    """Whether an entry of a state can be copied into a tensor."""
    return isinstance(entry, Tensor) and entry.shape == like.shape and not entry.is_meta


def without_inverse(registrations: Iterable[Registration]) -> FactorNotReady:
    """The error for blocks whose decompositions have all failed."""
    blocks = "\n".join(f"  {registration}" for registration in registrations)
    return FactorNotReady(
        f"every decomposition of these blocks has failed, so they have no inverse:\n{blocks}\n"
        "Their factors are singular or not finite: use a larger damping, or look for NaN in inputs, outputs or "
        "parameters; then record a batch and call estimator.update_inverses() again."
    )


def make_groups(
    registrations: Iterable[Registration],
    parameters: Mapping[str, Tensor],
    *,
    roots: Sequence[Root],
    damping: Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    divided: Mapping[Key, DividedForm] = MappingProxyType({}),
) -> list[BlockGroup]:
    """Groups of registrations with one approximation and equal matrices, in the order of their first members.

    roots: the exponents to keep besides 1, "cholesky" and "cholesky_inverse". damping: λ, 0-d, which the groups share.
    dtype, device: of the factors; None: those of the parameters, but at least float32.
    divided: the forms of the blocks of which this process keeps a part.
    """
    parameters = split(parameters, registrations := list(registrations))
    members: dict[tuple[Any, ...], list[Registration]] = {}
    for registration in registrations:
        example, approximation = parameters[registration.parameters[0]], registration.structure
        factor_dtype = dtype or torch.promote_types(example.dtype, torch.float32)
        form, sides = vector_form(registration, parameters, divided), (approximation.left, approximation.right)
        layout = form.layout if isinstance(form, DividedForm) else None
        group = group_class(registration) if layout is None else DividedGroup
        alike = group.alike_in(registration), sides, registration.generic, form.shape, layout
        members.setdefault((group, factor_dtype, device or example.device, alike), []).append(registration)
    return [
        group(
            registrations,
            [vector_form(registration, parameters, divided) for registration in registrations],
            roots=roots,
            damping=damping,
            dtype=factor_dtype,
            device=factor_device,
        )
        for (group, factor_dtype, factor_device, _), registrations in members.items()
    ]


def group_class(registration: Registration) -> type[BlockGroup]:
    return GROUPS[registration.structure.group] if registration.blocks == (1, 1) else WideGroup


def make_block(
    registration: Registration,
    *,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    damping: float | Tensor = 0.0,
    roots: Sequence[Root] = (-1.0,),
) -> BlockOperator:
    """A single block; see `make_groups`."""
    damping = damping if isinstance(damping, Tensor) else torch.tensor(damping, dtype=torch.float64)
    (group,) = make_groups([registration], parameters, roots=roots, damping=damping, dtype=dtype)
    return BlockOperator(group, 0)
