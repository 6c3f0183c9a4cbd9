"""Parameter groups: which parameters K-FAC moves, which the first-order rule, and with what learning rates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.losses.loss_function import LossFunction, precise
from kfac_fx.optim.first_order import FirstOrder, new_state
from kfac_fx.optim.options import OPTIONS, check_not_negative
from kfac_fx.optim.update import Work
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.recorder import Recorder
from kfac_fx.statistics.moments import Moments, Ride

Group = dict[str, Any]
OF_GROUPS = ("lr", "momentum", "weight_decay")  # what a group may have of its own, as numbers
OF_ALL_GROUPS = frozenset(OPTIONS) - {"first_order"}  # which says what rule a group has


class CompiledNet(Protocol):
    """What KFAC needs of what `kfac_fx.compile` returns."""

    backend: str

    @property
    def registrations(self) -> tuple[Registration, ...]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def buffers(self) -> Iterator[Tensor]: ...
    def attach(self, listener: Any) -> None: ...
    def recorder(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recorder: ...
    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: str,
        targets: Any = None,
        fraction: float,
        generator: torch.Generator | None,
        **options: Any,
    ) -> Moments: ...
    def ride(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator | None = None
    ) -> tuple[Any, Ride]: ...
    def functional(
        self, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, ...]]: ...
    def losses(
        self, outputs: Any, fisher: tuple[Tensor, ...], targets: Any = None, call: Any = None
    ) -> Sequence[tuple[float, LossFunction]]: ...


def checked_net(net: Any) -> CompiledNet:
    if not hasattr(net, "attach") or not hasattr(net, "registrations"):
        raise ValueError(
            f"KFAC needs a compiled module and got a {type(net).__name__}: "
            "net = kfac_fx.compile(model, ...), or of a LayerCollection, KFAC(net, ...), and call net instead of model"
        )
    checked: CompiledNet = net
    return checked


def split_group(
    group: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    registered: Collection[str],
    first_order: FirstOrder,
    own: Collection[str],
) -> list[Group]:
    """A group as the user wrote it -> that of the parameters in Fisher blocks, and that of the others.

    own: the options that groups have.

    Raises ValueError for a parameter that is not the compiled module's, and for an option that groups have not.
    """
    if common := {name: group[name] for name in group if name in OF_ALL_GROUPS and name not in own}:
        written = ", ".join(f"{name}={value!r}" for name, value in common.items())
        raise ValueError(
            f"a parameter group has its own {', '.join(own)}, and shares all other options with the rest: "
            f"KFAC(..., {written}), and not {', '.join(common)} in a group"
        )
    check_not_negative(**{name: group[name] for name in own if name in group})
    given: Any = group["params"]
    members: list[Any] = [
        one[1] if isinstance(one, tuple) else one for one in ([given] if isinstance(given, Tensor) else given)
    ]
    foreign = [list(parameter.shape) for parameter in members if parameter not in names]
    if foreign:
        raise ValueError(
            f"{len(foreign)} parameters are not of the compiled module, the first of shape {foreign[0]}: its graph "
            "does not have them, so K-FAC knows nothing of them. Give them to an optimizer of their own, or compile "
            "the model again with them in it"
        )
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    inside = [parameter for parameter in members if names[parameter] in registered]
    outside = [parameter for parameter in members if names[parameter] not in registered]
    parts: list[Group] = []
    if inside or not outside:
        parts.append({**options, "params": inside, "first_order": False})
    if outside:
        decay = {} if first_order.weight_decay is None else {"weight_decay": first_order.weight_decay}
        parts.append({**options, **decay, "params": outside, "lr": first_order.lr, "first_order": True})
    return parts


@dataclass(frozen=True)
class State:
    """What is kept between steps, as vectors [P] that the optimizer's own tensors are views of.

    by_name: the views, by vector and parameter. g: where the next gradient goes.
    """

    g: Tensor
    vectors: Tensors
    by_name: Mapping[str, Tensors]

    def holds(self, parameters: Tensors, states: Mapping[Any, Any]) -> bool:
        """Are these parameters the ones, and is the optimizer's state still made of the views?"""
        return all(
            views.keys() == parameters.keys()
            and all(states[parameters[name]].get(key) is views[name] for name in views)
            for key, views in self.by_name.items()
        )


@dataclass
class Members:
    """The parameters of all groups by name, with their group's scalars on the device.

    first_order: the names that the first-order rule moves; the others are in Fisher blocks. scalars: by the names of
    `OF_GROUPS` that the groups have. decaying: what has a weight decay other than 0.
    """

    scalars: dict[str, Tensors]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    first_order: set[str] = field(default_factory=set)
    decaying: set[str] = field(default_factory=set)
    kept: dict[bool, State] = field(default_factory=dict)

    @staticmethod
    def of(groups: Sequence[Group], names: Mapping[nn.Parameter, str], scalar: Tensor) -> Members:
        """scalar: a tensor of the dtype and on the device that scalars shall have."""
        members = Members({key: {} for key in OF_GROUPS if all(key in group for group in groups)})
        for group in groups:
            mine = [names[parameter] for parameter in group["params"]]
            members.parameters |= zip(mine, group["params"], strict=True)
            for by_name in members.scalars.values():
                by_name |= dict.fromkeys(mine, torch.empty_like(scalar))
            if group["first_order"]:
                members.first_order.update(mine)
        return members

    def refresh(self, groups: Iterable[Group], names: Mapping[nn.Parameter, str]) -> None:
        """Read the groups' present values, which a scheduler may have changed."""
        self.decaying = set()
        for group in groups:
            if group["params"]:
                name = names[group["params"][0]]
                for key, scalars in self.scalars.items():
                    value = group[key]
                    scalars[name].copy_(value) if isinstance(value, Tensor) else scalars[name].fill_(value)
                if isinstance(group["weight_decay"], Tensor) or group["weight_decay"]:
                    self.decaying.update(names[parameter] for parameter in group["params"])

    def works(self, states: MutableMapping[Any, Any]) -> tuple[Work | None, Work | None]:
        """What K-FAC moves, and what the first-order rule moves; None for nothing that has a gradient.

        states: the optimizer's, by parameter; new ones are put into it.
        """
        inside, outside = (self.work(outside, states) for outside in (False, True))
        return inside, outside

    def work(self, outside: bool, states: MutableMapping[Any, Any]) -> Work | None:
        found = {name: p for name, p in self.parameters.items() if (name in self.first_order) == outside}
        parameters: dict[str, Tensor] = {name: p for name, p in found.items() if p.grad is not None}
        if not parameters:
            return None
        flat = Flat({name: parameter.shape for name, parameter in parameters.items()})
        state, decays = self.state(outside, flat, parameters, states), not self.decaying.isdisjoint(parameters)
        gradients = {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None}
        return Work(
            flat,
            parameters,
            flat.joined(gradients, out=state.g),
            state.vectors,
            flat.spread(self.scalars["lr"]),
            flat.spread(self.scalars["momentum"]) if "momentum" in self.scalars else None,
            flat.spread(self.scalars["weight_decay"]) if decays else None,
        )

    def state(self, outside: bool, flat: Flat, parameters: Tensors, states: MutableMapping[Any, Any]) -> State:
        """As it was at the last step, unless other parameters have a gradient or the state was loaded."""
        if outside in self.kept and self.kept[outside].holds(parameters, states):
            return self.kept[outside]
        new = new_state if outside else new_velocity
        by_parameter = {name: states[parameter] or new(parameter) for name, parameter in parameters.items()}
        vectors: Tensors = {}
        by_name: dict[str, Tensors] = {}
        for key in next(iter(by_parameter.values())):
            tensors = {name: state[key] for name, state in by_parameter.items()}
            places = Flat({name: tensor.shape for name, tensor in tensors.items()})
            vectors[key] = places.joined(tensors)
            by_name[key] = places.parts(vectors[key])
            for name, view in by_name[key].items():
                states[parameters[name]][key] = view
        g = torch.empty_like(precise(flat.joined(parameters)))
        self.kept[outside] = State(g, vectors, by_name)
        return self.kept[outside]


def new_velocity(parameter: Tensor) -> Tensors:
    """Zero, in float32 at least."""
    return {"velocity": torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))}
