"""Parameter groups: which parameters K-FAC moves, which the first-order rule, and their values as vectors.

**The first-order rule** of parameters in no Fisher block: Adam with decoupled weight decay.
"""

from __future__ import annotations

import difflib
import functools
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.placement import UNDIVIDED, DivisionByOwners, DivisionByShards, VectorDivision
from kfac_fx.linalg.arguments import (
    A_COUNT,
    NOT_NEGATIVE,
    a_decay,
    not_negative,
    number,
    number_that,
    one_element,
    optional,
)
from kfac_fx.linalg.matrices import all_true, copy_if_, dense, zero_unless_
from kfac_fx.linalg.processes import Replicas, Shards, divided_like, shard, sharded_like
from kfac_fx.linalg.vectors import FixedVector, Flat, Tensors
from kfac_fx.passes.errors import nearest
from kfac_fx.passes.matrix import precise, real_numbers
from kfac_fx.passes.torch_private import foreach_add_

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
ADAM_VALUES = {"exp_avg_sq": NOT_NEGATIVE, "step": A_COUNT}


@dataclass(frozen=True)
class FirstOrder:
    """Adam with decoupled weight decay (Kingma & Ba 2015, Loshchilov & Hutter 2019)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | None = None  # None takes that of the parameter group

    @classmethod
    def read(cls, options: Any) -> FirstOrder:
        """From KFAC's `first_order=dict(...)`. Raises ValueError for options that are unknown or out of range."""
        if not isinstance(options, Mapping):
            raise ValueError(f"first_order is {options!r}; it must be a dict of options, as in dict(lr=1e-3)")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise ValueError(f"first_order has no option {name!r}, only {', '.join(names)}.{nearest(name, names)}")
        rule = cls(**options)
        not_negative("first_order['lr']", rule.lr)
        not_negative("first_order['eps']", rule.eps)
        optional(not_negative, "first_order['weight_decay']", rule.weight_decay)
        betas = rule.betas if isinstance(rule.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(0 <= number("first_order['betas']", beta) < 1 for beta in betas):
            raise ValueError(f"first_order['betas'] is {rule.betas!r}; it must be two numbers, from 0 and below 1")
        return rule

    def __call__(self, g: Tensor, state: Mapping[str, Tensor], flat: Flat) -> tuple[Tensor, Tensors]:
        """(Δ, the new state). All are vectors [P] but "step", [parameters]: every parameter counts its own steps."""
        first, second = self.betas
        average = first * state["exp_avg"] + (1 - first) * g
        square = second * state["exp_avg_sq"] + (1 - second) * g.square()
        step = state["step"] + 1
        # The averages start at zero; dividing by 1 - beta^step takes that zero out of them.
        debias, debias_square = (
            flat.spread(dict(zip(flat.shapes, (1 - beta**step).unbind(), strict=True))) for beta in self.betas
        )
        update = average / debias / ((square / debias_square).sqrt() + self.eps)
        return update, dict(zip(ADAM_STATE, (average, square, step), strict=True))


def new_adam_state(parameter: Tensor) -> Tensors:
    """Zeros, in float32 at least; the step counts on the device."""
    like = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    values = like, like.clone(), torch.zeros((), dtype=like.dtype, device=parameter.device)
    return dict(zip(ADAM_STATE, values, strict=True))


Group = dict[str, Any]
NewState = Callable[[Tensor], Tensors]  # the state of a new parameter, by name
OF_GROUPS = ("lr", "momentum", "weight_decay")  # what a group may have of its own, as numbers
FIRST_LR = "first_lr"  # in a group: its lr when it was added, if `norm_constraint` compares later ones with it
# "first_order" in a group says which rule moves it.
ROUNDING = 1e-6  # of the lr at the end of a schedule
IN_CACHE = 2**16  # numbers, whose products stay in the cache of a core
MOST_SUMMED = 1e3  # squared gradients, as many as a running sum of them holds
Product = Callable[[Tensor], Tensor]  # of a matrix with a vector [P]
InnerProduct = Callable[[Tensor, Tensor], Tensor]  # <a, b> of vectors [P] that may be divided among processes


def inner(first: Tensor, second: Tensor) -> Tensor:
    """<a, b> of whole vectors, in float32 at least. Not a BLAS product, which adds up millions of terms one after
    another. On a CPU it is taken part by part: new memory for all products costs more than the products."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    if first.device.type == "cpu" and first.numel() > IN_CACHE and not torch.compiler.is_compiling():
        parts = zip(first.split(IN_CACHE), second.split(IN_CACHE), strict=True)
        return torch.stack([(a.to(dtype) * b.to(dtype)).sum() for a, b in parts]).sum()
    return (first.to(dtype) * second.to(dtype)).sum()


@dataclass(frozen=True)
class Preconditioner:
    """The product of the Fisher, or its inverse, with a vector over the parameters that have a gradient."""

    multiply: Callable[[Tensors], Tensors]  # of the parameters whose blocks this process keeps, by name
    flat: Flat  # where the parameters that have a gradient lie in the vector
    absent: Tensors  # zeros for those that have none
    division: VectorDivision = UNDIVIDED

    def __call__(self, vector: Tensor) -> Tensor:
        parts = self.flat.parts(vector)
        wholes = self.division.to_blocks(parts)
        product = self.multiply({**wholes, **self.absent})
        return self.flat.joined(self.division.from_blocks({name: product[name] for name in wholes}, parts))


# --- parameter groups -------------------------------------------------------------------------------------------------


def split_group(
    group: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    unregistered: Collection[str],
    first_order: FirstOrder,
    of_groups: Mapping[str, Any],
    of_all: Collection[str],
) -> list[Group]:
    """Split a user's group into that of the parameters in Fisher blocks and that of the others.

    The `lr` of a group is that of its parameters in blocks. The others have it if the group has no parameters in
    blocks; else `first_order.lr`, times the ratio of the group's `lr` to that of all.

    Args:
        unregistered: the names of the trained parameters in no Fisher block. A parameter that is frozen gets a block
            when it is unfrozen.
        of_groups: the options that a group may set, with their values for groups that do not.
        of_all: the names of all options that the parameters share.

    Raises:
        ValueError: for a parameter that is not the compiled module's, and for an option that groups do not have.
    """
    members = members_of(group)
    refuse_options_of_all(group, of_groups, of_all)
    refuse_misspelled(group, (*of_groups, *of_all))
    for name in of_groups:
        if name in group:
            OF_A_NEW_GROUP[name](name, group[name])
    foreign = [list(parameter.shape) for parameter in members if parameter not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} parameters are not of the compiled module, the first of shape {foreign[0]}: its graph "
            "does not have them, so K-FAC knows nothing of them. Give them to an optimizer of their own, or compile "
            "the model again with them in it"
        )
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    outside = [parameter for parameter in members if names[parameter] in unregistered]
    inside = [parameter for parameter in members if names[parameter] not in unregistered]
    parts: list[Group] = []
    if inside or not outside:
        parts.append({**options, "params": inside, "first_order": False})
    if outside:
        decay = {} if first_order.weight_decay is None else {"weight_decay": first_order.weight_decay}
        lr, common = options.get("lr"), of_groups["lr"]
        if lr is None or inside:
            ratio = lr / common if lr is not None and (isinstance(common, Tensor) or common) else 1.0
            lr = first_order.lr * ratio
        parts.append({**options, **decay, "params": outside, "lr": lr, "first_order": True})
    return parts


def refuse_options_of_all(group: Mapping[str, Any], of_groups: Iterable[str], of_all: Collection[str]) -> None:
    """Raises ValueError for a group that has options which all parameters share. See `split_group`."""
    if common := {name: group[name] for name in group if name in of_all}:
        written = ", ".join(f"{name}={value!r}" for name, value in common.items())
        raise ValueError(
            f"a parameter group has its own {', '.join(of_groups)}, and shares all other options with the rest: "
            f"KFAC(..., {written}), and not {', '.join(common)} in a group"
        )


def refuse_misspelled(group: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ValueError for entries of a group whose names are nearly those of options, as "Lr" and "weigth_decay" are.

    Schedulers and users add entries of their own to groups, such as "max_momentum", so these are none."""
    by_letters = {letters_of(name): name for name in known}
    wrong = []
    for key in (key for key in group if isinstance(key, str) and key not in known):
        near = difflib.get_close_matches(letters_of(key), by_letters, n=1, cutoff=0.85)
        if near and not ("_" in key and any(part in by_letters for part in key.split("_"))):
            wrong.append(f"{key!r}, which is none. Did you mean {by_letters[near[0]]!r}?")
    if wrong:
        raise ValueError(f"a parameter group has an option {' And '.join(wrong)}")


def letters_of(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def members_of(group: Any) -> list[Any]:
    """The parameters of a user's group. Raises TypeError for anything else."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"a parameter group is a dict such as {{'params': [...], 'lr': 0.1}}, and not {reprlib.repr(group)}"
        )
    params: Any = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    members = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in params]
    if others := [member for member in members if not isinstance(member, Tensor)]:
        raise TypeError(
            f"a parameter group has parameters, and not {reprlib.repr(others[0])}: write net.get_parameter(name) for a "
            "name, as in params=[net.get_parameter('0.weight')]"
        )
    return members


def keep_first_lr(group: Group) -> None:
    """Keep the lr of a group that has no first one.

    The state of an optimizer without `norm_constraint` has none. Its place is taken by the "initial_lr" that schedulers
    keep. Other states do not read it, because OneCycleLR and CyclicLR keep their lowest lr in it.
    """
    if FIRST_LR not in group:
        lr = group.get("initial_lr", group["lr"])
        group[FIRST_LR] = lr.clone() if isinstance(lr, Tensor) else lr


# --- a step's vectors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatParameters:
    """The parameters that have a gradient and follow one rule, as vectors [P] in the order of `flat`.

    Scalars are tensors, so that a compiled update is not specialized to their values: 0-dim or, if groups differ, [P].
    """

    flat: Flat  # where the parameters lie in the vectors
    division: VectorDivision
    parameters: Tensors  # by name; the parts of this process in vectors
    copies: Tensors  # by name, the parameters as this process has them: whole, or shards
    gradients: Tensors  # by name; the parts of this process in vectors
    vectors: StateVectors
    longest_squared: float  # of a move, at most
    lr: Tensor
    largest_lr: Tensor  # of all parameters, 0-dim
    first_lr: Tensor | None  # when the groups were added; None if they do not keep it
    momentum: Tensor | None  # None if it is no option of groups
    weight_decay: Tensor | None  # None if no parameter has any
    weights: Tensor | None = None  # of elements that several processes have, [P]; None if there are none

    @property
    def state(self) -> Tensors:
        """The vectors of the rule's state by name, written in place."""
        return self.vectors.vectors

    @cached_property
    def g(self) -> Tensor:
        """The gradient [P], in float32 at least."""
        return self.flat.joined(self.gradients, out=self.vectors.g.vector)

    @property
    def one_scale(self) -> bool:
        """Whether a move is a multiple of the update: true with one parameter group and no weight decay."""
        return self.weight_decay is None and self.lr.dim() == 0

    def displacement(self, update: Tensor, rate: float | Tensor = 1.0, instead: Tensor | None = None) -> Tensor:
        """δ = -rate lr (Δ + weight_decay θ), in the precision of the update Δ.

        Args:
            rate: a number, or 0-dim.
            instead: a vector that nothing reads any more, and whose memory δ may take.
        """
        lr = -rate * self.lr
        if self.weight_decay is None:
            takes = instead is not None and instead.dtype is torch.result_type(lr, update)
            return torch.mul(lr, update, out=instead if takes else None)
        theta = self.flat.joined(self.parameters).to(update.dtype)
        return lr * (update + self.weight_decay * theta)

    def commit(self, move: Tensor, state: Tensors, ok: Tensor) -> None:
        """Add the move δ, [P], and store the new state, vectors [P] by name; if `ok` is False, everything stays as it
        was. Overwrites the move."""
        self.add(zero_unless_(ok, move))
        for name, new in state.items():
            copy_if_(ok, self.state[name], new)

    def add(self, move: Tensor) -> None:
        """Add a vector to the parameters, in place and in their own precision."""
        foreach_add_(list(self.copies.values()), list(self.everywhere(move).values()))

    def everywhere(self, vector: Tensor) -> Tensors:
        """The tensors of a vector by name, of the shapes that the parameters have in this process."""
        return self.division.to_copies(self.parts(vector), self.copies)

    def parts(self, vector: Tensor) -> Tensors:
        """The tensors of a vector by name, as `Flat.parts`; those of the gradient's memory were made before."""
        return self.vectors.g.parts if vector is self.vectors.g.vector else self.flat.parts(vector)

    def inner(self, first: Tensor, second: Tensor) -> Tensor:
        """<a, b>, 0-dim, in float32 at least."""
        return self.division.total(inner(self.weighted(first), second))

    def total(self, vector: Tensor) -> Tensor:
        """The sum of the elements over all processes, 0-dim. It shows every NaN and infinity, and costs a thirtieth of
        a maximum norm on a CPU."""
        return self.division.total(vector.sum())

    @cached_property
    def sum(self) -> Tensor:
        """The sum of the gradient, 0-dim."""
        return self.total(self.g)

    def gradient_is_finite(self) -> Tensor:
        """A 0-dim bool."""
        return self.sum.isfinite()

    def has_gradient(self) -> Tensor:
        """Whether a gradient is other than zero, 0-dim. Where the host may read their sum, it usually tells."""
        if all_true(is_other := self.sum != 0):
            return is_other
        return self.division.total(self.g.any().to(self.g.dtype)) > 0

    def may_be_added(self, move: Tensor) -> Tensor:
        """Whether a move δ is finite, and its length a number of the parameters whose square is finite; a 0-dim bool.

        A longer one cannot be right: the squares of the new parameters are infinite, or the parameters themselves.
        """
        squared = self.division.total(torch.dot(move, move))
        return (squared <= self.longest_squared) & squared.isfinite()

    def products(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(<a, b>, |a|², |b|²), 0-dim, by one message where vectors are divided."""
        if self.weights is None:
            squares = [torch.linalg.vector_norm(vector).square() for vector in (first, second)]
        else:
            squares = [inner(self.weighted(vector), vector) for vector in (first, second)]
        product, *squares = self.division.total(torch.stack([inner(self.weighted(first), second), *squares])).unbind()
        return product, squares[0], squares[1]

    def weighted(self, vector: Tensor) -> Tensor:
        """A vector for a sum over processes, in which every element counts once."""
        return vector if self.weights is None else vector * self.weights


@functools.cache
def longest_squared(dtypes: frozenset[torch.dtype]) -> float:
    """The squared length of the longest move that numbers of these types, and the squares of its own, can hold."""
    moves = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return min(torch.finfo(moves).max, *(torch.finfo(dtype).max * torch.finfo(dtype).max for dtype in dtypes))


def rule_state(state: Tensors) -> Tensors:
    """The part of a parameter's state that the rule keeps; the rest has a "/" in its names (`optim.optimizer`)."""
    return {name: tensor for name, tensor in state.items() if "/" not in name}


@dataclass(frozen=True)
class StateVectors:
    """The state of a rule as vectors [P]; the optimizer's own state tensors are views of them."""

    names: tuple[str, ...]
    parts: Tensors  # of the parameters in this process
    vectors: Tensors  # by name
    views: Mapping[str, Tensors]  # by vector and parameter, of those that have state in this process

    @staticmethod
    def of(
        new: NewState, division: VectorDivision, parameters: Tensors, parts: Tensors, states: MutableMapping[Any, Any]
    ) -> StateVectors:
        """From the optimizer's state by parameter, where missing state is made by `new`, and all is replaced by
        views. parts: of the parameters in this process."""
        by_parameter = {
            name: rule_state(states[parameter]) or new(real_numbers(parameter))
            if division.keeps(name)
            else new(parts[name])
            for name, parameter in parameters.items()
        }
        vectors: Tensors = {}
        views: dict[str, Tensors] = {}
        for key in next(iter(by_parameter.values())):
            tensors = {name: shard(state[key]) for name, state in by_parameter.items()}
            places = Flat({name: tensor.shape for name, tensor in tensors.items()})
            vectors[key] = places.joined(tensors)
            views[key] = {
                name: sharded_like(by_parameter[name][key], view)
                for name, view in places.parts(vectors[key]).items()
                if division.keeps(name)
            }
            for name, view in views[key].items():
                states[parameters[name]][key] = view
        return StateVectors(tuple(parameters), parts, vectors, views)

    @cached_property
    def g(self) -> FixedVector:
        """The memory of the gradient."""
        return self.new_vector()

    @cached_property
    def update(self) -> FixedVector:
        """Memory for the update of a rule that has use for it."""
        return self.new_vector()

    def new_vector(self) -> FixedVector:
        """[P], in float32 at least."""
        like = precise(torch.cat([part.detach().reshape(-1) for part in self.parts.values()]))
        return FixedVector(Flat({name: part.shape for name, part in self.parts.items()}), torch.empty_like(like))

    def hold(self, parameters: Tensors, states: Mapping[Any, Any]) -> bool:
        """Whether these are the parameters, and the optimizer's state is still made of the views."""
        if self.names != tuple(parameters):
            return False
        # A lookup by a tensor is slow: one for every parameter, and a plain loop.
        by_parameter = {name: states[parameters[name]] for name in self.names}
        for key, views in self.views.items():
            for name, view in views.items():
                if by_parameter[name].get(key) is not view:
                    return False
        return True


# The values that a loop may write into a group between two steps. Schedulers end at an lr of 0 up to rounding.
not_below_rounding = number_that("not be negative", lambda value: -ROUNDING <= value < math.inf)
OF_A_GROUP: Mapping[str, Callable[[str, Any], None]] = {
    "lr": not_below_rounding,
    FIRST_LR: not_below_rounding,
    "momentum": a_decay,
    "weight_decay": not_negative,
}
OF_A_NEW_GROUP = {**OF_A_GROUP, "lr": not_negative, FIRST_LR: not_negative}


@dataclass
class GroupedParameters:
    """The parameters of all groups, with the scalars of their groups on the device."""

    scalars: dict[str, Tensors]  # by the names of `OF_GROUPS` and `FIRST_LR` that the groups have, and by parameter
    new_state: NewState  # of the parameters that K-FAC moves
    division: VectorDivision
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # by name
    first_order: set[str] = field(default_factory=set)  # names of those that the first-order rule moves
    decaying: set[str] = field(default_factory=set)  # names of those with a weight decay other than 0
    last: dict[bool, StateVectors] = field(default_factory=dict)  # of the last step; True for the first-order rule
    kept: dict[bool, FlatParameters] = field(default_factory=dict)  # without gradients, if further steps have the same

    @staticmethod
    def of(
        groups: Sequence[Group],
        names: Mapping[nn.Parameter, str],
        scalar: Tensor,
        new: NewState,
        division: VectorDivision = UNDIVIDED,
    ) -> GroupedParameters:
        """scalar: a tensor with the dtype and the device of all scalars. new: the state of K-FAC's parameters."""
        grouped = GroupedParameters(
            {key: {} for key in (*OF_GROUPS, FIRST_LR) if all(key in group for group in groups)}, new, division
        )
        for group in groups:
            members = [names[parameter] for parameter in group["params"]]
            grouped.parameters |= zip(members, group["params"], strict=True)
            for by_name in grouped.scalars.values():
                by_name |= dict.fromkeys(members, torch.empty_like(scalar))
            if group["first_order"]:
                grouped.first_order.update(members)
        return grouped

    def refresh(self, groups: Iterable[Group], names: Mapping[nn.Parameter, str]) -> None:
        """Read the present values of the groups, which a scheduler may have changed."""
        self.decaying = set()
        for group in groups:
            if group["params"]:
                name = names[group["params"][0]]
                for key, scalars in self.scalars.items():
                    value = group[key]
                    if isinstance(value, Tensor):
                        one_element(key, value)
                        at_least_zero = torch.where(value < -ROUNDING, value, value.clamp(min=0))
                        scalars[name].copy_(at_least_zero.reshape(()))
                    else:
                        OF_A_GROUP[key](f"{key} of a parameter group", value)
                        scalars[name].fill_(max(0.0, float(value)))
                if isinstance(group["weight_decay"], Tensor) or group["weight_decay"]:
                    self.decaying.update(names[parameter] for parameter in group["params"])

    def largest(self, key: str, names: Iterable[str]) -> Tensor:
        """The largest value that the groups of these parameters have, 0-dim."""
        scalars = {id(scalar): scalar for scalar in map(self.scalars[key].__getitem__, names)}
        return torch.stack([*scalars.values()]).amax(0)

    def flat(self, first_order: bool, states: MutableMapping[Any, Any]) -> FlatParameters | None:
        """The parameters that the first-order rule moves, or those that K-FAC moves; None if none has a gradient.

        states: the optimizer's, by parameter; new ones are put into it.
        """
        parameters: Tensors = {
            name: parameter
            for name, parameter in self.parameters.items()
            if (name in self.first_order) == first_order and parameter.grad is not None
        }
        if not parameters:
            return None
        kept = self.kept.get(first_order)
        if kept is not None and kept.parameters.keys() == parameters.keys() and kept.vectors.hold(parameters, states):
            return self.with_gradients(kept, parameters)
        with_gradient = {
            name: (
                (real_numbers(parameter), real_numbers(dense(parameter.grad)))
                if parameter.is_complex()
                else (parameter, parameter.grad)
            )
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        division = self.division
        here = {name: division.part(name, parameter) for name, (parameter, _) in with_gradient.items()}
        flat = Flat({name: part.shape for name, part in here.items()})
        if first_order not in self.last or not self.last[first_order].hold(parameters, states):
            new = new_adam_state if first_order else self.new_state
            self.last[first_order] = StateVectors.of(new, division, parameters, here, states)
        state, decays = self.last[first_order], not self.decaying.isdisjoint(parameters)
        lr = flat.spread(self.scalars["lr"])
        flat_parameters = FlatParameters(
            flat,
            division,
            here,
            {name: shard(parameter) for name, (parameter, _) in with_gradient.items()},
            {
                name: dense(division.part(name, divided_like(parameter, gradient)))
                for name, (parameter, gradient) in with_gradient.items()
            },
            state,
            longest_squared(frozenset(parameter.dtype for parameter, _ in with_gradient.values())),
            lr,
            lr if lr.dim() == 0 else self.largest("lr", parameters),
            flat.spread(self.scalars[FIRST_LR]) if FIRST_LR in self.scalars else None,
            flat.spread(self.scalars["momentum"]) if "momentum" in self.scalars else None,
            flat.spread(self.scalars["weight_decay"]) if decays else None,
            weights_of(division, flat, lr),
        )
        # Parameters of one group have its scalars, which `refresh` writes in place.
        whole = all(here[name] is parameter is flat_parameters.copies[name] for name, parameter in parameters.items())
        self.kept.pop(first_order, None)
        if whole and len({id(self.scalars["lr"][name]) for name in parameters}) == 1:
            self.kept[first_order] = replace(flat_parameters, gradients={})
        return flat_parameters

    def with_gradients(self, kept: FlatParameters, parameters: Tensors) -> FlatParameters:
        """`kept` with the present gradients and the present options of its one group."""
        decay = self.scalars["weight_decay"][next(iter(parameters))]
        return replace(
            kept,
            gradients={n: dense(p.grad) for n, p in parameters.items() if p.grad is not None},
            longest_squared=longest_squared(frozenset(parameter.dtype for parameter in parameters.values())),
            weight_decay=None if self.decaying.isdisjoint(parameters) else decay,
        )


def weights_of(division: VectorDivision, flat: Flat, like: Tensor) -> Tensor | None:
    """See `FlatParameters`. like: of the device and the dtype of the weights."""
    weights = {name: division.weight(name) for name in flat.shapes}
    if set(weights.values()) <= {1.0}:
        return None
    scalars = {weight: like.new_full((), weight) for weight in weights.values()}
    return flat.spread({name: scalars[weight] for name, weight in weights.items()})


@dataclass
class Vectors:
    """The first stage: parameters and gradients as vectors."""

    names: dict[nn.Parameter, str]  # of all parameters of the net
    registered: frozenset[str]  # the names of the parameters in Fisher blocks
    scalar: Tensor  # a zero with the dtype and the device of all scalars
    new_state: NewState
    estimator: FisherEstimator
    replicas: Replicas
    shards: Shards | None  # None if every process has whole parameters
    grouped: GroupedParameters | None = None  # None to read the parameter groups anew

    def __post_init__(self) -> None:
        self._division: VectorDivision = UNDIVIDED
        self._divided: list[BlockGroup] | None = None  # the blocks that it belongs to

    @property
    def division(self) -> VectorDivision:
        """How vectors are divided at present; the same object as long as the owners are the same."""
        estimator, shards = self.estimator, self.shards
        if shards is None and (self.replicas.number == 1 or estimator.owners is None):
            return UNDIVIDED
        estimator.follow_registrations()
        if self._divided is not estimator.groups:
            self._divided, owners = estimator.groups, estimator.owner_of
            if shards is not None:
                self._division = DivisionByShards(shards, owners)
            else:  # parameters in no block are owned in turn: others may join them, and none moves
                in_turn = {name: n % self.replicas.number for n, name in enumerate(self.names.values())}
                self._division = DivisionByOwners(self.replicas, in_turn | dict(owners or {}))
        return self._division

    def of(
        self, groups: Sequence[Group], states: MutableMapping[Any, Any]
    ) -> tuple[FlatParameters | None, FlatParameters | None]:
        """(what the rule moves, what the first-order rule moves); None if nothing of it has a gradient.

        groups, states: the optimizer's.
        """
        grouped, division = self.grouped, self.division
        number = sum(len(group["params"]) for group in groups)
        if grouped is None or len(grouped.parameters) != number or grouped.division is not division:
            self.grouped = grouped = GroupedParameters.of(groups, self.names, self.scalar, self.new_state, division)
        grouped.refresh(groups, self.names)
        return grouped.flat(False, states), grouped.flat(True, states)

    def absent(self, flat: FlatParameters) -> Tensors:
        """Zeros for the parameters in Fisher blocks that have no gradient, by name."""
        if self.registered <= flat.parameters.keys():
            return {}
        idle = self.estimator.idle(flat.parameters)
        return {
            name: self.scalar.new_zeros(flat.division.in_blocks(name, real_numbers(parameter)))
            for parameter, name in self.names.items()
            if name in self.registered
            and name not in flat.parameters
            and name not in idle
            and flat.division.multiplies(name)
        }


def first_order_update(rule: FirstOrder, flat: FlatParameters) -> tuple[tuple[Tensor, Tensors], Tensor]:
    """An update of the first-order rule, compiled as one: (its move and its new state, whether both are finite).

    A gradient whose square is infinite would give a finite move, and none ever after.
    """
    update, new = rule(flat.g, flat.state, flat.flat)
    move = flat.displacement(update)
    finite = torch.stack([flat.may_be_added(move), *(flat.total(vector).isfinite() for vector in new.values())]).all()
    return (move, new), finite
