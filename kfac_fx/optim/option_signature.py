"""The arguments of a class that come from a dataclass, and the checks of single arguments.

A check is a function (name, value) -> None that raises ValueError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_type_hints

from kfac_fx.checks.unchanged import refuse_wrapped
from kfac_fx.losses.sources import check_mode
from kfac_fx.optim.rules import FirstOrder
from kfac_fx.passes.errors import nearest
from kfac_fx.values import not_negative, number, optional

OTHER_NAMES = {"betas": " Write momentum=... and second_moment_decay=... in the place of betas."}  # of other optimizers

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
SelfT = TypeVar("SelfT")


def compiled(name: str, value: Any) -> None:
    refuse_wrapped(value, "KFAC")
    if not hasattr(value, "attach") or not hasattr(value, "registrations"):
        raise ValueError(
            f"KFAC needs a compiled module and got a {type(value).__name__}: "
            "write net = kfac_fx.compile(model, ...) and KFAC(net), and call net in the place of model"
        )


def one_of(choices: Sequence[str]) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if str(value).lower() not in choices:
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{name} {value!r} is none of {names}.{nearest(str(value).lower(), choices)}")

    return check


def either(first: str, second: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in (first, second):
            raise ValueError(f"{name} {value!r} is neither {first!r} nor {second!r}")

    return check


def of_first_order(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be a dict of options, as in dict(lr=1e-3)")
    rule = FirstOrder.read(value)
    not_negative(f"{name}['lr']", rule.lr)
    not_negative(f"{name}['eps']", rule.eps)
    optional(not_negative, f"{name}['weight_decay']", rule.weight_decay)
    betas = rule.betas if isinstance(rule.betas, (tuple, list)) else ()
    if len(betas) != 2 or not all(0 <= number(f"{name}['betas']", beta) < 1 for beta in betas):
        raise ValueError(f"{name}['betas'] is {rule.betas!r}; it must be two numbers, from 0 and below 1")


def a_rate(name: str, value: Any) -> None:
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError(
            f"{name} is a {type(value).__name__}; groups of parameters are an argument, KFAC(net, params=...)"
        )
    not_negative(name, value)


def a_mode(name: str, value: Any) -> None:
    check_mode(value)


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
