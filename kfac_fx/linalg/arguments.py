"""Checks of arguments: an error says what the value is, and what it must be or what to write.

Most are functions (name, value) that raise ValueError. `takes` gives a class arguments that come from a dataclass.

The host waits for the device of a tensor, so these are for arguments that are read once.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

from kfac_fx.linalg.sharded import Shard
from kfac_fx.passes.errors import (
    ApproximationError,
    LayerError,
    LinkError,
    RegistrationError,
    UntraceableError,
    fatal,
    nearest,
    table,
)
from kfac_fx.passes.ir import Registration

SEEDS = range(-(2**63), 2**64)  # those that a torch.Generator takes


def wrong_value(name: str, value: Any, wanted: str) -> ValueError:
    """The error of an argument; wanted: what follows "it must". A tensor of many numbers is shown by its shape."""
    if isinstance(value, Tensor) and (value.is_meta or value.numel() > 8):
        shown = f"a tensor of shape {list(value.shape)}{' on the meta device' * value.is_meta}"
    else:
        shown = repr(value)
    return ValueError(f"{name} is {shown}; it must {wanted}")


def number(name: str, value: Any) -> float:
    """The value of a number or of a tensor with one element. Raises ValueError for anything else."""
    given = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_value(name, given, "be a number")
    return float(value)


def one_element(name: str, tensor: Tensor) -> None:
    """A check of a tensor that is not read, because the host would wait for its device."""
    if tensor.numel() != 1 or tensor.is_meta or tensor.is_complex():
        raise wrong_value(name, tensor, "be a number")


def number_that(wanted: str, holds: Callable[[float], bool]) -> Callable[[str, Any], None]:
    """A check of a number. wanted: the words for `holds`."""

    def check(name: str, value: Any) -> None:
        amount = number(name, value)
        if not holds(amount):
            raise wrong_value(name, value, "be finite" if math.isinf(amount) else wanted)

    return check


finite = number_that("be finite", math.isfinite)
positive = number_that("be positive", lambda value: 0 < value < math.inf)
not_negative = number_that("not be negative", lambda value: 0 <= value < math.inf)
a_weight = number_that("be between 0 and 1", lambda value: 0 <= value <= 1)
a_share = number_that("be above 0 and at most 1", lambda value: 0 < value <= 1)


def choice(name: str, value: object, known: Iterable[str], error: type[ValueError] = ValueError) -> str:
    """The value, which must be one of `known`. Raises `error` with the nearest one and all of them for any other."""
    known = list(known)
    if isinstance(value, str) and value in known:
        return value
    raise error(f"{name} {value!r} is none of {', '.join(map(repr, known))}.{nearest(value, known)}")


def whole_number(least: int, of: str) -> Callable[[str, Any], None]:
    """A check of a whole number of these, such as "steps"."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_value(name, value, f"be a whole number of {of}, at least {least}")

    return check


def a_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong_value(name, value, "be True or False")


def a_seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in SEEDS:
        raise wrong_value(name, value, "be a whole number, from -2**63 and below 2**64")


def a_device(name: str, value: Any) -> None:
    """A device that holds values."""
    try:
        there = torch.empty(0, device=value).device.type != "meta"
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's, for a device that it does not know or have
        if fatal(error):
            raise
        there = False
    if not there:
        raise wrong_value(name, value, "be a device of this machine")


def finite_numbers(name: str, values: Any) -> list[float]:
    """Several numbers. Raises ValueError for anything else."""
    if isinstance(values, (str, Tensor)) or not isinstance(values, Iterable):
        raise wrong_value(name, values, "be several numbers, as in (-1,)")
    values = list(values)
    for value in values:
        finite(f"a number in {name}", value)
    return [float(value) for value in values]


def several_names(name: str, value: Any, known: Collection[str]) -> None:
    """A check of names of parameters; known: those that there are."""
    if isinstance(value, (str, Tensor)) or not isinstance(value, Collection):
        raise wrong_value(name, value, "be several names of parameters, as in {'fc.weight', 'fc.bias'}")
    if others := [entry for entry in value if not isinstance(entry, str) or entry not in known]:
        raise ValueError(
            f"{name} has entries that are no names of trained parameters: {', '.join(map(repr, others))}."
            + nearest(others[0], known)
        )


def a_process_group(name: str, value: Any) -> None:
    if not (torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)):
        raise wrong_value(
            name,
            value,
            "be a group of torch.distributed: torch.distributed.group.WORLD, once init_process_group was called, or a "
            "result of new_group(ranks)",
        )


def optional(check: Callable[[str, Any], object], name: str, value: Any) -> None:
    """A check of an argument that may be left out."""
    if value is not None:
        check(name, value)


# --- the arguments of `compile` and of `FisherEstimator` --------------------------------------------------------------


UNFIT = "\"'\\\n\r\0"  # characters that generated code does not quote


def refuse_unfit_names(model: nn.Module) -> None:
    """Raises UntraceableError for names of modules and parameters that torch cannot write into the code of a graph.

    Quotes in a name would be executed as code.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    unfit = [
        name
        for name in dict.fromkeys(names)
        if any(c in UNFIT for c in name) or any(map(keyword.iskeyword, name.split(".")))
    ]
    if unfit:
        raise UntraceableError(
            f"torch cannot write these names into the code of a graph: {', '.join(map(ascii, unfit))}.\n"
            "Rename the modules and parameters, without quotes, backslashes, line breaks and keywords of Python."
        )


def refuse_other_approximations(approximations: Any, model: nn.Module) -> None:
    """Raises ApproximationError unless this is {name or class: approximation}."""
    if approximations is None:
        return
    if not isinstance(approximations, Mapping):
        raise ApproximationError(
            'approximations takes {name of a parameter or a module: approximation}, as in approximations={"*": '
            f'"diagonal"}}, and got {approximations!r}'
        )
    if wrong := [key for key in approximations if not isinstance(key, (str, type))]:
        raise ApproximationError(
            f"the keys of approximations are names or classes of modules: {in_place(wrong, model)}"
        )


def refuse_other_models(model: Any, by: str) -> None:
    """Raises TypeError for anything but a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, and got the class: write {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, not a {type(model).__name__}")


def refuse_other_inputs(args: Any, kwargs: Any) -> None:
    """Raises TypeError unless these are the arguments of a call: several or one tensor, and some by name."""
    if args is not None and not isinstance(args, (tuple, list, Tensor)):
        wanted = "example_kwargs={'x': x} for arguments by name" if isinstance(args, Mapping) else "(x,) for one tensor"
        raise TypeError(f"example_inputs is a {type(args).__name__}; it must be a tuple: write {wanted}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"example_kwargs is a {type(kwargs).__name__}; it must be a dict, as in {{'mask': mask}}")


def refuse_other_layers(layers: Any) -> list[Any]:
    """The layers. Raises LayerError unless there are several; what they are is checked where they are collected."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        kind = type(layers).__name__
        raise LayerError(f"layers takes a list of layers that @kfac_fx.layer(...) declares, and got a {kind}")
    return list(layers)


def refuse_other_links(linked: Any, model: nn.Module) -> None:
    """Raises LinkError unless these are groups of names; a key of a mapping may be one name."""
    groups = list(linked) if isinstance(linked, Iterable) and not isinstance(linked, (str, Tensor)) else [linked]
    groups = [(group,) if isinstance(group, str) and isinstance(linked, Mapping) else group for group in groups]
    if wrong := [group for group in groups if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable)]:
        kind = "names" if isinstance(wrong[0], str) else f"a {type(wrong[0]).__name__}"
        raise LinkError(f'linked takes groups of names, as in linked=[("fc.weight", "fc.bias")], not {kind}')
    members = [member for group in groups for member in group]
    if wrong := [member for member in members if not isinstance(member, str)]:
        raise LinkError(f"linked takes groups of names: {in_place(wrong, model)}")


def refuse_other_variables(variables: Any, model: Any) -> list[str]:
    """The names. Raises RegistrationError for variables that are no names."""
    if isinstance(variables, (str, Tensor)) or not isinstance(variables, Iterable):
        raise RegistrationError(
            f"variables is {variables!r}; it takes names of parameters, as in variables=['fc.weight', 'fc.bias']"
        )
    names = list(variables)
    if wrong := [variable for variable in names if not isinstance(variable, str)]:
        raise RegistrationError(f"variables takes names of parameters: {in_place(wrong, model)}")
    return names


def check_variables(variables: frozenset[str], registrations: Iterable[Registration]) -> None:
    """Raises RegistrationError for names registered nowhere, or without those that share their registration."""
    registered = [name for registration in registrations for name in registration.owners]
    wrong = [(name, f"is registered nowhere.{nearest(name, registered)}") for name in variables.difference(registered)]
    for owners in (set(registration.owners) for registration in registrations):
        if absent := sorted(owners - variables):
            wrong += [(n, f"shares a registration with {', '.join(absent)}") for n in sorted(owners & variables)]
    if wrong:
        raise RegistrationError(f"`variables` does not fit the registrations:\n{table(sorted(wrong))}")


def refuse_other_parameters(parameters: Any, model: nn.Module) -> None:
    """Raises TypeError unless these are tensors by name, ValueError for names that the model's parameters lack."""
    if not isinstance(parameters, Mapping):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; it must be a dict of tensors by parameter name, as in "
            "dict(net.named_parameters()), or {} for the model's own"
        )
    if others := [name for name, value in parameters.items() if not isinstance(value, Tensor | Shard)]:
        raise TypeError(f"parameters has values that are no tensors: {', '.join(map(repr, others))}")
    names = {name for name, _ in model.named_parameters()}
    if unknown := [name for name in parameters if name not in names]:
        raise ValueError(
            f"parameters has names that are not in net.named_parameters(): {', '.join(map(repr, unknown))}."
            + nearest(unknown[0], names)
        )


def refuse_other_limit(limit: Any) -> None:
    """Raises RegistrationError unless the width of a factor is a whole number, at least 1."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RegistrationError(f"dense_limit is {limit!r}; it must be a whole number of columns, at least 1")


def in_place(objects: Iterable[Any], model: Any) -> str:
    """The text that a user writes in the place of objects: their names, if they are the model's."""
    known = {id(value): name for name, value in (*model.named_parameters(), *model.named_modules())}
    advice = []
    for value in objects:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        advice.append(f"write {known[id(value)]!r} for {kind}" if id(value) in known else f"{kind} is none")
    return "; ".join(advice)


# --- the arguments of `KFAC` ------------------------------------------------------------------------------------------


P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
SelfT = TypeVar("SelfT")
OTHER_NAMES = {"betas": " Write momentum=... and second_moment_decay=... in the place of betas."}  # of other optimizers


def a_rate(name: str, value: Any) -> None:
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError(
            f"{name} is a {type(value).__name__}; groups of parameters are an argument, KFAC(net, params=...)"
        )
    not_negative(name, value)


def a_grad_scaler(name: str, value: Any) -> None:
    if not callable(getattr(value, "get_scale", None)):
        raise ValueError(f"{name} is {value!r}; it must be a torch.amp.GradScaler")


def takes(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[SelfT, OptionsT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Decorate `__init__(self, options)` to take the fields of the dataclass `options` as its own arguments.

    An explicit signature would repeat every name, type and default, and the body would repeat the names once more;
    `**kwargs` would hide the arguments from `help` and from type checkers. With `takes`, type checkers infer the
    arguments from the dataclass through the ParamSpec; `__signature__` and `__doc__` are the dataclass's, too.
    """

    def decorated(init: Callable[[SelfT, OptionsT], None]) -> Callable[Concatenate[SelfT, P], None]:
        @functools.wraps(init)
        def __init__(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> None:
            unknown = [name for name in kwargs if name not in written.parameters]
            if unknown:
                near = "".join(OTHER_NAMES.get(name) or nearest(name, written.parameters) for name in unknown)
                names = ", ".join(map(repr, unknown))
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {names}.{near}")
            init(self, options(*args, **kwargs))

        written, types, public = inspect.signature(options), get_type_hints(options), cast(Any, __init__)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = [argument.replace(annotation=types[name]) for name, argument in written.parameters.items()]
        public.__signature__ = written.replace(parameters=[itself, *arguments], return_annotation=None)
        public.__doc__ = options.__doc__
        return __init__

    return decorated
