"""The block-diagonal Fisher: its blocks, and all of them as one operator on vectors over the registered parameters.

A block is the part of the Fisher of one registration. It knows no layers: it reads the matrix and the approximation
from the registration, and works in a group with all blocks that are alike (`kfac_fx.fisher.groups`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from kfac_fx.fisher import series  # noqa: F401  # they fill in their algebras
from kfac_fx.fisher.block_diagonal import WideGroup
from kfac_fx.fisher.groups import BlockGroup, ByBlock, Factor, Factors, Failures, Inverter, System
from kfac_fx.fisher.placement import BlockOwners, DividedForm, DividedGroup, divided_forms
from kfac_fx.linalg.arguments import (
    FINITE,
    NOT_NEGATIVE,
    Values,
    a_device,
    a_precision,
    faults,
    not_negative,
    number,
    one_element,
    optional,
    refuse,
    values_of,
)
from kfac_fx.linalg.matrices import Root, dense
from kfac_fx.linalg.processes import Shards, shard, unsharded
from kfac_fx.linalg.vectors import (
    Vector,
    applied,
    check_fits,
    check_kinds,
    joined,
    leading,
    like_vector,
    real_vector,
    split,
    vector_form,
)
from kfac_fx.passes.approximations import check_filled
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import without_autocast
from kfac_fx.recording.statistics import Key, additive

check_filled()


class Operator(ABC):
    """The damped F of one block or of all. For Kronecker products λ is split between the sides, c (G + λ_G I) ⊗
    (A + λ_A I); for other blocks it is F + λ I. Vectors are dicts of tensors of the shapes of the parameters, by name.

    Powers other than 1 are those of the last `update_inverses`, with the damping of that time. The power 1 uses the
    present factors and damping.

    Products are differentiable in the vector, with the factors and λ as constants; those of a `Spectrum` are so in δ,
    too.

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
        factors: "A", "G" and "positions" of a Kronecker product, otherwise "F": see `kfac_fx.fisher.groups`.
        statistics: the names of the sums that it needs (`recording.statistics`); () if it needs the gradient.
    """

    def __init__(self, group: BlockGroup, index: int) -> None:
        self.registration = group.registrations[index]
        self.group = group
        self.member = slice(index, index + 1)
        self.factors = Factors(
            {name: Factor(name, str(self.registration), stack, index) for name, stack in group.factors.items()}
        )
        self.statistics = tuple(statistic.name for statistic in self.registration.statistics)

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.registration.parameters

    def __repr__(self) -> str:
        return f"BlockOperator({self.registration}, {self.registration.approximation}, {list(self.group.shape)})"

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

    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]:
        self.group.check_whole()
        given, vector = vector, real_vector(vector)
        check_fits(vector, self.group.forms[self.member.start].shapes)

        def product(vector: dict[str, Tensor], transpose: bool) -> dict[str, Tensor]:
            matrix = self.group.multiply(self.group.pack(vector, self.member), root, transpose, self.member)
            return self.group.unpack(matrix, vector, self.member)

        return like_vector(applied(product, {name: dense(vector[name]) for name in self.parameters}, transpose), given)

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

    def contradicts(self, state: Mapping[str, Tensor]) -> bool:
        """Whether "ready" says something else than the other tensors of a state of the block. Waits for the device."""
        updated, inverted = state["ready"].tolist()
        if not self.group.here:
            return bool(inverted and not updated)
        roots = {f"{name}/{root}" for root in self.group.roots for name in self.group.operands(root)}
        weights = any(bool(state[f"{name}/total_weight"]) for name in self.factors)
        inverses = any(bool(shard(state[name]).any()) for name in roots)
        return (weights and not updated) or (inverses and not inverted) or bool(inverted and not updated)

    def full_fisher_block(self) -> Tensor:
        """The undamped block [g·o·i, g·o·i], in the order of the flattened matrix; raises FactorNotReady."""
        self.group.check_whole()
        return self.group.dense(self.member.start)


def key_text(key: Key) -> str:
    """The key of a block as states, folders and metrics name it. Names of pieces have commas, too: `w[:, 0:2]`."""
    return ",".join(key)


OF_OWN_BLOCKS = (
    "Each process has the state of its own blocks only: save and load with torch.distributed.checkpoint, which brings "
    "those of all processes together, or load on every process what that same process saved."
)


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
    if registration.blocks != (1, 1):
        return WideGroup
    group: type[BlockGroup] = registration.structure.algebra.group  # type: ignore[assignment]  # filled, as checked
    return group


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


def products(
    root: Root, groups: Sequence[BlockGroup], matrices: Iterable[Tensor], transpose: bool = False
) -> Iterable[Tensor]:
    """The products of groups with their matrices [L, g, o, i], one for each."""
    return [group.multiply(m, root, transpose) for group, m in zip(groups, matrices, strict=True)]


def one_by_one(
    product: Callable[[Vector], dict[str, Tensor]], vector: Vector, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The products of vectors with additional dimensions in front, all with the same. shapes: of the parameters."""
    lead = next((tensor.shape[: tensor.dim() - len(shapes[name])] for name, tensor in vector.items()), ())
    if not lead:
        return product(vector)
    many = {name: tensor.reshape(math.prod(lead), *shapes[name]) for name, tensor in vector.items()}
    each = [product(dict(zip(many, row, strict=True))) for row in zip(*many.values(), strict=True)]
    return {
        name: torch.stack([row[name] for row in each]).view(tensor.shape) if each else tensor.clone()
        for name, tensor in vector.items()
    }


# --- all blocks of a model --------------------------------------------------------------------------------------------

META = torch.device("meta")


class BlockDiagonalFisher(Operator):
    """F + λ I by blocks, over all of `parameters`. Vectors may have sparse tensors; products are dense.

    All tensors of a vector may have the same additional dimensions in front, for many vectors at once. They are
    multiplied one by one; `Spectrum` multiplies them together.

    Products do not wait for the device, and compile without graph breaks.
    """

    def __init__(self, roots: Sequence[Root], damping: Tensor) -> None:
        self.roots = tuple(roots)
        self._damping = damping
        self.factor_dtype: torch.dtype | None = None  # None: that of the parameters, and at least float32
        self.owners: BlockOwners | None = None  # None: this process keeps all blocks
        self.relative_damping: float | None = None  # of every group
        self.bases_as: str | None = None  # likewise
        self.new_extras: Callable[[Sequence[BlockGroup]], list[dict[str, Tensor]]] | None = None
        """Makes `BlockGroup.extras` of groups in their order."""
        self.of_extras: Mapping[str, Values] = {}  # the values that extras may have, by name
        self._registrations: tuple[Registration, ...] | None = None
        self._never_inverted: set[Key] = set()  # blocks whose decompositions have all failed, as far as the host knows

    @abstractmethod
    def wanted(self) -> tuple[tuple[Registration, ...], Mapping[str, Tensor]]:
        """The registrations that get blocks, and their parameters by name."""

    def build(self) -> None:
        """Make empty blocks for the present registrations."""
        registrations, parameters = self.wanted()
        trained = [r for r in registrations if any(parameters[name].requires_grad for name in r.owners)]
        frozen = [registration for registration in registrations if registration not in trained]
        self._make_blocks([trained, frozen], registrations, parameters, {})

    @torch.no_grad()
    def extend(self) -> None:
        """Make blocks for registrations that are new. The others keep their blocks, with everything in them.

        New blocks have groups of their own, so that they may be decomposed at other times.
        """
        registrations, parameters = self.wanted()
        before = self._blocks
        unchanged = {
            registration.parameters: registration
            for registration in registrations
            if registration.parameters in before
            and before[registration.parameters].registration.approximation == registration.approximation
        }
        cohorts = [[unchanged[key] for key in cohort if key in unchanged] for cohort in self._cohorts]
        new = [registration for registration in registrations if registration.parameters not in unchanged]
        owners = {name: block.group.owner for block in before.values() for name in block.registration.owners}
        self._make_blocks([*cohorts, new], registrations, parameters, owners)
        for key in unchanged:
            block, earlier = self._blocks[key], before[key]
            state = earlier.state()
            for name, tensor in block.state().items():
                tensor.copy_(state[name])
            block.group.updated, block.group.inverted = earlier.group.updated, earlier.group.inverted

    @property
    def cohorts(self) -> dict[Key, int]:
        """By block the number of its cohort: blocks of one are recorded and decomposed at the same times."""
        return {key: number for number, cohort in enumerate(self._cohorts) for key in cohort}

    def set_cohorts(self, cohorts: Mapping[Key, int]) -> None:
        """Make empty blocks in other cohorts, for the values of a state: a process that unfroze a layer before it loads
        has it in a stack with others, and these would get new inverses when the layer does."""
        if cohorts == self.cohorts:
            return
        registrations, parameters = self.wanted()
        owners = {name: block.group.owner for block in self._blocks.values() for name in block.registration.owners}
        members: list[list[Registration]] = [[] for _ in range(max(cohorts.values()) + 1)]
        for registration in registrations:
            members[cohorts[registration.parameters]].append(registration)
        self._make_blocks(members, registrations, parameters, owners)

    def _make_blocks(
        self,
        cohorts: Sequence[Sequence[Registration]],
        registrations: tuple[Registration, ...],
        parameters: Mapping[str, Tensor],
        owners: Mapping[str, int | None],
    ) -> None:
        """
        Args:
            cohorts: registrations that are recorded and decomposed at the same times, so that they may be stacked.
            owners: of parameters that have one already; what is computed for them stays where it is.
        """
        self._cohorts = [[registration.parameters for registration in cohort] for cohort in cohorts]
        self._divided = divided_forms(registrations, self.shards)
        owner_of = self._owners_of(registrations, parameters, owners)
        self._groups = []
        for cohort in cohorts:
            for owner in dict.fromkeys(owner_of[registration.parameters] for registration in cohort):
                members = [registration for registration in cohort if owner_of[registration.parameters] == owner]
                self._groups += self._make_groups(members, parameters, owner)
        self._make_extras(self._groups)
        blocks = [BlockOperator(group, index) for group in self._groups for index in range(len(group))]
        by_key = {block.parameters: block for block in blocks}
        self._blocks = ByBlock({r.parameters: by_key[r.parameters] for r in registrations})
        self._shapes = {name: parameters[name].shape for r in registrations for name in r.owners}
        self._registrations = registrations
        self._never_inverted.clear()
        self._inverter = Inverter(self.kept, self.roots)

    def _owners_of(
        self, registrations: Sequence[Registration], parameters: Mapping[str, Tensor], owners: Mapping[str, int | None]
    ) -> Mapping[Key, int | None]:
        """The owner of every registration; None: every process. owners: those that parameters have already."""
        everywhere = dict.fromkeys(registration.parameters for registration in registrations)
        if self.owners is None:
            return everywhere
        owned = [registration for registration in registrations if registration.parameters not in self._divided]
        blocks = [group for r in owned for group in self._new_groups([r], parameters, META)]
        self._make_extras(blocks)
        known = {name: owner for name, owner in owners.items() if owner is not None}
        assigned = self.owners.assign(blocks, known)
        return everywhere | {r.parameters: owner for r, owner in zip(owned, assigned, strict=True)}

    def _make_groups(
        self, registrations: Sequence[Registration], parameters: Mapping[str, Tensor], owner: int | None
    ) -> list[BlockGroup]:
        """The groups of registrations with one owner, without memory if that is another process."""
        here = self.owners is None or owner in (None, self.owners.rank)
        groups = self._new_groups(registrations, parameters, None if here else META)
        for group in groups:
            group.owner, group.here, group.relative_damping = owner, here, self.relative_damping
            group.bases_as = self.bases_as
        return groups

    def _new_groups(
        self, registrations: Sequence[Registration], parameters: Mapping[str, Tensor], device: torch.device | None
    ) -> list[BlockGroup]:
        """The groups of registrations, without extras. device: None for that of the parameters."""
        return make_groups(
            registrations,
            parameters,
            roots=self.roots,
            damping=self._damping,
            dtype=self.factor_dtype,
            device=device,
            divided=self._divided,
        )

    def _make_extras(self, groups: Sequence[BlockGroup]) -> None:
        if self.new_extras is not None:
            for group, extras in zip(groups, self.new_extras(groups), strict=True):
                group.extras = extras

    def damp_sides(self, part: float | None) -> None:
        """Damp every side by this part of its mean eigenvalue from the next inverses or bases on; None: split λ."""
        self.relative_damping = part
        for group in self.groups:
            group.relative_damping = part

    def keep_bases_as(self, kind: str | None) -> None:
        """Keep the bases of wide sides as this kind of device does; None: as the device of each group does. Those that
        get another shape are zero until they are loaded."""
        self.bases_as = kind
        for group in self.groups:
            group.bases_as = kind
        assert self.new_extras is not None, "bug in kfac_fx: bases of an estimator without any"
        for group, extras in zip(self.groups, self.new_extras(self.groups), strict=True):
            group.extras |= {
                name: tensor for name, tensor in extras.items() if tensor.shape != group.extras[name].shape
            }

    @property
    def groups(self) -> list[BlockGroup]:
        """The stacks of blocks of equal shape."""
        if self._registrations is None:
            self.build()
        return self._groups

    @property
    def kept(self) -> list[BlockGroup]:
        """The groups whose factors and inverses this process keeps: all but those of other owners."""
        return [group for group in self.groups if group.here]

    @property
    def shards(self) -> Shards | None:
        """The sharded parameters, among whose processes blocks are divided."""
        return None if self.owners is None else self.owners.shards

    @property
    def owner_of(self) -> Mapping[str, int] | None:
        """The process that keeps the blocks of each parameter, without those whose blocks are divided as they are; None
        if every process keeps all."""
        if self.owners is None:
            return None
        by_key = {r.parameters: group.owner for group in self.groups for r in group.registrations}
        names = {name: by_key[key] for key, block in self.blocks.items() for name in block.registration.owners}
        return {name: owner for name, owner in names.items() if owner is not None}

    @property
    def blocks(self) -> ByBlock[BlockOperator]:
        """By the names of their parameters, in the order of the registrations."""
        if self._registrations is None:
            self.build()
        return self._blocks

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that vectors must have."""
        return tuple(dict.fromkeys(name for block in self.blocks.values() for name in block.registration.owners))

    @property
    def damping(self) -> Tensor:
        """λ, a 0-d tensor. Assigning a number or a tensor writes into it. Raises ValueError for a negative number."""
        return self._damping

    @damping.setter
    def damping(self, value: float | Tensor) -> None:
        one_element("damping", value) if isinstance(value, Tensor) else not_negative("damping", value)
        self._damping.copy_(value.reshape(())) if isinstance(value, Tensor) else self._damping.fill_(value)

    def update_inverses(self, keys: Collection[Key] | None = None) -> None:
        """Decompose the damped factors. Raises FactorNotReady before the first update of the factors.

        Blocks that were frozen in all batches so far have no factors, and wait. The host waits for the device as long
        as a block has had no valid inverse: its products raise FactorNotReady.

        keys: decompose the blocks of these registrations only, and others that are stacked with them; None: all.
        """
        failed = {
            group: group.failed.clone()
            for group in self.groups
            if not (group.inverted and self._never_inverted.isdisjoint(r.parameters for r in group.registrations))
        }
        for group in self.decompose(keys):
            if group.here and group in failed:
                inverted = (group.failed == failed[group]).tolist()
                for registration, has_inverse in zip(group.registrations, inverted, strict=True):
                    change = self._never_inverted.discard if has_inverse else self._never_inverted.add
                    change(registration.parameters)

    def decompose(self, keys: Collection[Key] | None = None) -> list[BlockGroup]:
        """`update_inverses` without a look at the result, which KFAC guards on the device. Returns the groups."""
        ready = [group for group in self.groups if group.updated]
        if not ready:
            self.groups[0].check_updated()
        if keys is not None:
            ready = [group for group in ready if any(r.parameters in keys for r in group.registrations)]
        all_ready = len(ready) == len(self.groups)
        inverter = self._inverter if all_ready else Inverter([group for group in ready if group.here], self.roots)
        with without_autocast(self._damping.device):
            inverter.update()
        for group in ready:  # those of other owners, too, who decompose them at the same time
            group.inverted = group.inverted or bool(self.roots)
        return ready

    def idle(self, names: Container[str]) -> frozenset[str]:
        """The parameters, none of them among `names`, whose blocks have no factors or no inverses yet, because they
        were frozen in all batches so far."""
        waiting = (group for group in self.groups if not (group.updated and (group.inverted or not group.roots)))
        owners = ({name for r in group.registrations for name in r.owners} for group in waiting)
        return frozenset(n for of_group in owners if not any(name in names for name in of_group) for n in of_group)

    @torch.no_grad()
    def _systems(self, dtype: torch.dtype | None, device: torch.device | str | None) -> list[System]:
        """The eigensystems of the present factors, group by group; see `FisherEstimator.spectrum`."""
        optional(a_precision, "dtype", dtype)
        optional(a_device, "device", device)
        return [System.of(group, dtype, device) for group in self.groups]

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply_kept(self, vector: Vector) -> dict[str, Tensor]:
        """`multiply` for the parameters whose blocks this process keeps, and no others; without a message."""
        return self._multiply_kept(vector, 1.0)

    def multiply_inverse_kept(self, vector: Vector) -> dict[str, Tensor]:
        """`multiply_inverse` for the parameters whose blocks this process keeps, and no others; without a message."""
        return self._multiply_kept(vector, -1.0)

    def multiply_power_kept(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """`multiply_matpower` for the parameters whose blocks this process keeps, and no others; without a message."""
        return self._multiply_kept(vector, exp)

    @torch.no_grad()
    def _multiply_kept(self, vector: Vector, root: Root) -> dict[str, Tensor]:
        """A product without the checks of `_multiply`: a step splits its vectors by the parameters, so that only the
        names can be wrong."""
        groups, shapes = self.groups, self._shapes
        if self.owners is not None:
            groups = self.kept
            shapes = {name: shapes[name] for group in groups for r in group.registrations for name in r.owners}
            shapes |= {n: torch.Size(s) for form in self._divided.values() for n, s in form.shapes.items()}
        groups, present = self._with_factors(groups, shapes, vector)
        if vector.keys() != present.keys():
            check_fits(vector, present, alone=True)
        self._refuse_no_inverse(root)
        return self.of_groups(groups, partial(products, root), vector, kept=True)

    def multiply_matpower(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """(F + λ I)^exp v; exp must be 1 or among `exps`."""
        return self._multiply(vector, number("exp", exp))

    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]:
        given, vector = vector, real_vector(vector)
        check_kinds(vector, self._shapes)
        lead = leading(vector, self._shapes)
        groups, shapes = self._with_factors(self.groups, self._shapes, vector)
        check_fits(vector, shapes, alone=True, lead=lead)
        self._refuse_no_inverse(root)

        def product(vector: dict[str, Tensor], transpose: bool) -> dict[str, Tensor]:
            multiplied = partial(products, root, transpose=transpose)
            return one_by_one(partial(self.of_groups, groups, multiplied), vector, shapes)

        whole = {name: dense(unsharded(tensor)) for name, tensor in vector.items()}
        return like_vector(applied(product, whole, transpose), given)

    def _with_factors(
        self, groups: list[BlockGroup], shapes: Mapping[str, torch.Size], vector: Vector
    ) -> tuple[list[BlockGroup], Mapping[str, torch.Size]]:
        """The groups and shapes without those that have no factors yet and no entries in the vector."""
        idle = self.idle(vector).intersection(shapes)
        if not idle or idle == shapes.keys():
            return groups, shapes
        groups = [group for group in groups if idle.isdisjoint(group.registrations[0].owners)]
        return groups, {name: shape for name, shape in shapes.items() if name not in idle}

    def _refuse_no_inverse(self, root: Root) -> None:
        if root != 1 and self._never_inverted:
            raise without_inverse(self.blocks[key].registration for key in sorted(self._never_inverted))

    def of_groups(
        self,
        groups: Sequence[BlockGroup],
        of: Callable[[Sequence[BlockGroup], Iterable[Tensor]], Iterable[Tensor]],
        vector: Vector,
        kept: bool = False,
    ) -> dict[str, Tensor]:
        """`of(groups, matrices)` as one vector, in the shapes and precisions of `vector`.

        of: takes the groups that this process keeps, and the matrix [L, g, o, i] of each for `vector`, and returns one
            for each. Without `kept` one message brings those of the other processes.
        """
        registrations = [registration for group in groups for registration in group.registrations]
        parts = split(vector, registrations)
        divided = [] if kept else [n for r in registrations if r.parameters in self._divided for n in r.parameters]
        if self.shards is not None and divided:
            parts |= self.shards.parts({name: parts[name] for name in divided})
        product: dict[str, Tensor] = {}
        here = [group for group in groups if group.here]
        for group, matrix in zip(here, of(here, (group.pack(parts) for group in here)), strict=True):
            product |= group.unpack(matrix, parts)
        if self.owners is not None and not kept:
            shards = {name: product.pop(name) for name in divided}
            product = self._gathered(product, groups, parts)
            if self.shards is not None and divided:
                product |= self.shards.gathered(shards)
        return joined(product, registrations, vector)

    def _gathered(
        self, product: Mapping[str, Tensor], groups: Sequence[BlockGroup], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The products of all processes, by the names of the registrations. product: of this process."""
        assert self.owners is not None, "bug in kfac_fx: products of several processes, and no owners"
        names: dict[int, list[str]] = {}
        for group in groups:
            if group.owner is not None:
                names.setdefault(group.owner, []).extend(n for r in group.registrations for n in r.parameters)
        if not names:
            return {}
        of_process = [names.get(n, []) for n in range(max(names) + 1)]
        mine = [product[name] for name in names.get(self.owners.rank, [])]
        everything = self.owners.gather(mine, [[like[name] for name in of_owner] for of_owner in of_process])
        return dict(zip((name for of_owner in of_process for name in of_owner), everything, strict=True))

    # --- failures and state -----------------------------------------------------------------------------------------

    @property
    def failures(self) -> Failures:
        """The failures of all blocks so far; waits for the device."""
        return Failures(*map(sum, zip(*(group.failures() for group in self.groups), strict=True)))

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by readable names, sharing memory, without statistics that are accumulated but not yet folded."""
        state = {"damping": self._damping}
        for key, block in self.blocks.items():
            state |= {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`. Raises ValueError, which names all entries that are wrong, and loads nothing
        then."""
        self.check_state(state)
        self.load_checked(state)

    @torch.no_grad()
    def load_checked(self, state: Mapping[str, Tensor]) -> None:
        """Load a state without faults."""
        self._never_inverted.clear()
        for name, tensor in BlockDiagonalFisher.state_dict(self).items():
            tensor.copy_(state[name])
        for group in self.groups:  # its blocks may have been in several groups, which had their factors at other times
            ready = torch.stack([state[f"{key_text(r.parameters)}/ready"].cpu() for r in group.registrations])
            group.updated, group.inverted = ready.any(0).tolist()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError for a state that cannot be loaded, with all entries that are wrong."""
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise ValueError(f"a state is a dict of tensors by name, and not a {kind}: write estimator.state_dict()")
        rows, hint = self.state_faults(state)
        refuse(rows, hint or hint_of_blocks(rows, state, map(key_text, self.blocks)), owner="estimator")

    def state_faults(
        self, state: Mapping[str, object], others: Mapping[str, Tensor] = MappingProxyType({})
    ) -> tuple[list[tuple[str, str]], str]:
        """All entries of a state that are wrong, each with what is wrong, and what to do about it. Waits for the
        device.

        others: tensors like entries that will have another shape than now.
        """
        mine, by_start = (
            {**self.state_dict(), **others},
            {f"{key_text(key)}/": block for key, block in self.blocks.items()},
        )
        declared: dict[str, Values] = {"damping": NOT_NEGATIVE}
        for start, block in by_start.items():
            values = {**self.of_extras, **block.group.declared()}
            declared |= {start + name: values_of(name, values) for name in block.state()}
        elsewhere = tuple(start for start, block in by_start.items() if not block.group.here)
        # Entries of blocks that other processes keep may be in the state, too.
        given = {name: state[name] for name in state if name in mine or not str(name).startswith(elsewhere)}
        rows = faults(given, {name: (tensor, declared.get(name, FINITE)) for name, tensor in mine.items()})
        wrong = dict(rows)
        for start, block in by_start.items():
            right = wrong.keys().isdisjoint(start + name for name in block.state())
            if right and block.contradicts({name: cast(Tensor, state[start + name]) for name in block.state()}):
                rows.append((f"{start}ready", "contradicts the factors or inverses of the block"))
        divided = self.owners is not None and "is missing" in wrong.values()
        return rows, OF_OWN_BLOCKS if divided else ""


WITHOUT_BLOCK = "these parameters were frozen, no call had used them, or `variables` left them out"
SAME_BLOCKS = (
    "Load it into an estimator with the same blocks: compile the model while the same parameters have "
    "requires_grad=True, record the same kinds of calls, pass the same `variables`; freeze or unfreeze parameters "
    "after the state is loaded. No estimator of this model has these blocks if the state is of another model."
)


def hint_of_blocks(rows: Sequence[tuple[str, str]], state: Mapping[str, object], blocks: Iterable[str]) -> str:
    """Why a state has other blocks than an estimator, and what loads it; "" if it has other faults, too.

    rows: its faults. blocks: of the estimator, the texts of their keys.
    """
    here, there = set(blocks), {name.removesuffix("/ready") for name in map(str, state) if name.endswith("/ready")}
    wrong = {name.removesuffix("/ready") for name, _ in rows if name.endswith("/ready")}
    absent, unknown = sorted(wrong & here - there), sorted(wrong & there - here)
    starts = tuple(f"{text}/" for text in (*absent, *unknown))
    if not here & there or not all(name.startswith(starts) for name, _ in rows):
        return ""
    of_state = f"The state has no block of {'; '.join(absent)}: {WITHOUT_BLOCK} when it was saved."
    of_net = f"This estimator has no block of {'; '.join(unknown)}: {WITHOUT_BLOCK} when it was made."
    return "\n".join([*[of_state] * bool(absent), *[of_net] * bool(unknown), SAME_BLOCKS])
