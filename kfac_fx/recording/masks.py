"""Masks of padding: from what the user says to a node of the graph, and from the Fisher's outputs to the real ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from kfac_fx.losses.registered import WeightedLosses
from kfac_fx.passes.errors import RegistrationError, fatal, first_line, nearest
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.ir import Dims, Program
from kfac_fx.passes.padding import padding, spread

PaddingMask = str | Callable[..., Tensor]


# --- which node -------------------------------------------------------------------------------------------------------


def with_mask(
    program: Program, said: PaddingMask, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Program:
    """The program with its uses masked. said: the name of an argument of forward, or a function of its arguments.

    Raises RegistrationError if that is no mask [cases, positions].
    """
    node = named(program, said, model) if isinstance(said, str) else computed(program, said, args, kwargs)
    return program if node is None else padding(program.but(mask=checked(node)))


def named(program: Program, name: str, model: nn.Module) -> fx.Node | None:
    """None if this call does without the argument."""
    found = {str(node.target): node for node in program.graph.nodes if node.op == "placeholder"}
    if name not in found:
        refuse_unknown(name, model)
    return found.get(name)


def refuse_unknown(name: str, model: nn.Module) -> None:
    """Raises RegistrationError for what is no argument of forward."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    if name not in known and not takes_any:
        raise RegistrationError(
            f"padding_mask={name!r} is no argument of {type(model).__name__}.forward.{nearest(name, known)}"
        )


def of_call(said: PaddingMask, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The mask of one call; None if it does without. Raises RegistrationError if it is none [cases, positions]."""
    if isinstance(said, str):
        refuse_unknown(said, model)
        value = inspect.signature(model.forward).bind(*args, **kwargs).arguments.get(said, kwargs.get(said))
        if value is None:
            return None
    else:
        value = said(*args, **kwargs)
    if not isinstance(value, Tensor) or value.dim() != 2:
        what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
        raise RegistrationError(f"padding_mask has {what}, wanted [cases, positions], nonzero where a position is real")
    return value


def computed(
    program: Program, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """`function` of the model's arguments, written into the graph behind its inputs."""
    leaves, spec = pytree.flatten((tuple(args), dict(kwargs)))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]

    def called(values: Sequence[Any]) -> Any:
        each = iter(values)
        given = [next(each) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.unflatten(given, spec)
        return function(*own_args, **own_kwargs)

    shapes = [node.meta["val"] for node in placeholders]
    try:
        with getattr(shapes[0], "fake_mode", nullcontext()):
            value = called(shapes)
        with program.graph.inserting_before(placeholders[-1].next):
            made = called([fx.Proxy(node) for node in placeholders])
    except Exception as error:
        if fatal(error):
            raise
        raise RegistrationError(
            f"padding_mask cannot be traced: {first_line(error)}\nWrite it with tensor operations on the "
            "arguments of forward, as in padding_mask=lambda ids: ids != 0."
        ) from error
    if not isinstance(made, fx.Proxy):
        raise RegistrationError(f"padding_mask returned a {type(value).__name__} that no input is in")
    made.node.meta["val"] = value
    return made.node


def checked(node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise RegistrationError(
            f"padding_mask, at {node.name}, has no shape in this graph: capture the model with example inputs"
        )
    if value.dim() != 2:
        raise RegistrationError(
            f"padding_mask has shape {[str(size) for size in value.shape]}, wanted [cases, positions], nonzero where a "
            "position is real"
        )
    return node


# --- which outputs ----------------------------------------------------------------------------------------------------


def real_losses(
    build: Callable[[Sequence[Tensor]], WeightedLosses],
    outputs: Sequence[Tensor],
    dims: Sequence[Dims | None],
    mask: Tensor,
) -> WeightedLosses:
    """The losses of what is real in `outputs`: padding is a constant of them and is no case.

    build: the losses, from the values of the Fisher's outputs.
    dims: of every output, along which the mask goes; None: all of it is real.
    """
    kept = [None if own is None else spread(mask != 0, own, one.shape) for one, own in zip(outputs, dims, strict=True)]
    pairs = list(zip(outputs, kept, strict=True))
    losses = build([one if real is None else torch.where(real, one, one.detach()) for one, real in pairs])
    with torch.no_grad():  # a case is real if it changes with the real values, whatever the losses make of these
        others = build([other(one) if real is None else torch.where(real, other(one), one) for one, real in pairs])
    for (_, loss), (_, changed) in zip(losses, others, strict=True):
        apart = loss.inputs != changed.inputs
        loss.real_cases = int(apart.reshape(*apart.shape[: loss.case_axes], -1).any(-1).sum())
    return losses


def along(mask: Tensor, value: Tensor) -> Dims | None:
    """Where the cases and the positions of a mask are in a value whose sizes are all that is known."""
    (cases, positions), sizes = mask.shape, tuple(value.shape)
    if sizes[:1] == (cases,) and positions in sizes[1:]:
        return 0, 1 + sizes[1:].index(positions)
    return (0, 0) if sizes[:1] == (cases * positions,) else None


def other(value: Tensor) -> Tensor:
    """Another value everywhere, and not by a constant, which a softmax does not see."""
    steps = torch.linspace(1, 2, value.shape[-1] if value.dim() else 1, dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape[-1:])
