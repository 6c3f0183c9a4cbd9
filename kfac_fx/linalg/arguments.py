"""Checks of arguments and of the entries of a state: an error says what the value is, and what it must be.

They are functions (name, value) that raise ValueError. The host waits for the device of a tensor, so these are for
arguments that are read once.

**Entries of a state**: the values that each may have, and their faults.

An entry is declared by a tensor like it (its shape, its dtype, how it is divided) and by `Values`. A state is checked
against all declarations before anything of it is written, so that an error leaves everything as it was.

**Calls** that do not fit a signature: `explains_calls` says what to write.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.linalg.processes import is_sharded, shard
from kfac_fx.passes.errors import fatal, nearest, plural, table

SEEDS = range(-(2**63), 2**64)  # those that a torch.Generator takes


def wrong_value(name: str, value: Any, wanted: str) -> ValueError:
    """The error of an argument; wanted: what follows "it must". A tensor of many numbers is shown by its shape."""
    if isinstance(value, Tensor) and (value.is_meta or value.numel() > 8):
        shown = f"a tensor of shape {list(value.shape)}{' on the meta device' * value.is_meta}"
    else:
        shown = repr(value)
    return ValueError(f"{name} is {shown}; it must {wanted}")


def wrong_kind(function: str, takes: str, value: object, write: str) -> TypeError:
    """The error of a function whose argument is of another kind. write: how to call it."""
    return TypeError(f"{function} takes {takes}, and got a {type(value).__name__}: write {write}")


def number(name: str, value: Any) -> float:
    """The value of a number or of a tensor with one element. Raises ValueError for anything else."""
    given = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_value(name, given, "be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is larger than any floating-point number") from None


def one_element(name: str, tensor: Tensor) -> None:
    """A check of a tensor that is not read, because the host would wait for its device."""
    if tensor.numel() != 1 or tensor.is_meta or tensor.is_complex():
        raise wrong_value(name, tensor, "be a number")


def number_that(wanted: str, holds: Callable[[float], bool]) -> Callable[[str, Any], None]:
    """A check of a number. wanted: the words for `holds`."""

    def check(name: str, value: Any) -> None:
        amount = number(name, value)
        if not holds(amount):
            not_a_number = (
                math.isnan(amount) and wanted == "not be negative"
            )  # which it is not; the other words are true
            raise wrong_value(name, value, "be finite" if math.isinf(amount) or not_a_number else wanted)

    return check


finite = number_that("be finite", math.isfinite)
positive = number_that("be positive", lambda value: 0 < value < math.inf)
not_negative = number_that("not be negative", lambda value: 0 <= value < math.inf)
a_weight = number_that("be between 0 and 1", lambda value: 0 <= value <= 1)
a_decay = number_that("be from 0 and below 1", lambda value: 0 <= value < 1)
a_share = number_that("be above 0 and at most 1", lambda value: 0 < value <= 1)


def listed(names: Iterable[object]) -> str:
    """`"a"`, `"a and b"`, `"a, b and c"`."""
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def choice(
    name: str,
    value: object,
    known: Iterable[str],
    error: type[ValueError] = ValueError,
    meant: str | None = None,
    otherwise: str = "",
) -> str:
    """The value, if it is one of the names that are known.

    Args:
        meant: the name that somebody who writes this value means; None: the nearest one.
        otherwise: the end of the message where no name is near.

    Raises `error` for anything else, with the name that is meant and with all of them.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    hint = f" Did you mean {meant!r}?" if meant else nearest(value, names)
    raise error(f"{name} {value!r} is none of {', '.join(map(repr, names))}.{hint or otherwise}")


def whole_number(least: int, of: str) -> Callable[[str, Any], None]:
    """A check of a whole number of these, such as "steps"; it must fit into 64 bits."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_value(name, value, f"be a whole number of {of}, at least {least}")
        if value >= 2**63:
            raise ValueError(f"{name} is too large for a number of {of}: it must be below 2**63")

    return check


def a_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong_value(name, value, "be True or False")


def a_function(name: str, value: Any) -> None:
    if not callable(value):
        raise wrong_value(name, value, "be a function")


def a_generator(name: str, value: Any) -> None:
    if not isinstance(value, torch.Generator):
        raise wrong_value(name, value, "be a torch.Generator, as torch.Generator().manual_seed(0) is")


def a_precision(name: str, value: Any) -> None:
    """A check of the dtype of factors and of their decompositions."""
    if not isinstance(value, torch.dtype) or value not in (torch.float32, torch.float64):
        raise wrong_value(name, value, "be torch.float32 or torch.float64")


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


MOST_COUNTED = 2.0**48  # of steps and failures; sums of two are exact


@dataclass(frozen=True)
class Values:
    """The values that an entry of a state may have; by default all finite numbers.

    Attributes:
        least, most: the bounds, themselves included; `least` of a symmetric matrix is that of its diagonal.
        infinite, nan: whether these are values, too.
        whole: whether the numbers are whole.
        steps: whether the number counts steps, so that it is at most the counter of the optimizer.
        form: "symmetric" or "orthogonal" of matrices, the last two dimensions; "" for none. Columns and rows of zeros
            may fill an orthogonal matrix up, and one with more rows than columns is several, one below the other.
    """

    least: float = -math.inf
    most: float = math.inf
    infinite: bool = False
    nan: bool = False
    whole: bool = False
    steps: bool = False
    form: str = ""


FINITE = Values()
ANY_NUMBER = Values(infinite=True, nan=True)
NOT_NEGATIVE = Values(least=0)
A_SHARE = Values(least=0, most=1)
A_COUNT = Values(least=0, most=MOST_COUNTED, whole=True)
A_NUMBER_OF_STEPS = replace(A_COUNT, steps=True)
A_FLAG = Values(least=0, most=1, whole=True)
SYMMETRIC = Values(least=0, form="symmetric")  # of a matrix without negative eigenvalues
ORTHOGONAL = Values(form="orthogonal")


def values_of(name: str, declared: Mapping[str, Values], usual: Values = FINITE) -> Values:
    """Those that are declared for an entry, by its name or by what its name has before the first slash."""
    return declared.get(name, declared.get(name.partition("/")[0], usual))


@torch.no_grad()
def fault(entry: object, like: Tensor, values: Values = FINITE) -> str | None:
    """The fault of an entry of a state, in words; None without one. Waits for the device.

    Floating-point numbers may have another precision than `like`. The entry is checked as it will be stored, and the
    form of a matrix as precisely as it was saved.
    """
    if not isinstance(entry, Tensor):
        return f"is a {type(entry).__name__}, and must be a tensor"
    if entry.is_meta:
        return "is on the meta device, without values"
    if entry.layout is not torch.strided:
        return f"is a tensor of layout {entry.layout}, and must be dense"
    if entry.shape != like.shape:
        return f"has shape {list(entry.shape)}, and needs {list(like.shape)}"
    both_floating = entry.is_floating_point() and like.is_floating_point()
    if entry.dtype is not like.dtype and not both_floating:
        return f"is {name_of(entry.dtype)}, and must be {name_of(like.dtype)}"
    if is_sharded(entry) != is_sharded(like):
        return "is whole, and must be a DTensor" if is_sharded(like) else "is a DTensor, and must be whole"
    saved = shard(entry)
    if saved.shape != shard(like).shape:
        return f"has a shard of shape {list(saved.shape)} here, and needs {list(shard(like).shape)}"
    return None if saved.dtype is torch.bool else wrong_values(saved.to(like.dtype), values, saved.dtype)


def wrong_values(entry: Tensor, values: Values, saved_as: torch.dtype) -> str | None:
    """saved_as: the dtype that the entry had in the state."""
    if entry.is_floating_point():
        if not values.nan and bool(entry.isnan().any()):
            return "has values that are not a number"
        if not values.infinite and bool(entry.isinf().any()):
            return "has infinite values"
    ranged = entry.diagonal(dim1=-2, dim2=-1) if values.form == "symmetric" else entry
    for wrong, bound in ((ranged < values.least, f"below {values.least:g}"), (ranged > values.most, "too large")):
        if bool(wrong.any()):
            return f"has values {bound}" if entry.dim() else f"is {entry.item():g}, {bound}"
    if values.whole and bool((entry != entry.round()).any()):
        return "has values that are not whole" if entry.dim() else f"is {entry.item():g}, and must be a whole number"
    if values.form and entry.numel():
        tolerance = max(torch.finfo(saved_as).eps, torch.finfo(entry.dtype).eps) ** 0.5
        matrix = entry.to(torch.promote_types(entry.dtype, torch.float32))
        if values.form == "symmetric":
            largest = matrix.abs().amax((-2, -1), keepdim=True)
            wrong = (matrix - matrix.mT).abs() > tolerance * largest
        else:
            blocks = one_below_the_other(matrix)
            product = blocks.mT @ blocks
            of_columns = product.diagonal(dim1=-2, dim2=-1).round().clamp(0, 1)  # zero of a column that fills up
            wrong = (product - torch.diag_embed(of_columns)).abs() > tolerance
        if bool(wrong.any()):
            return f"is no {values.form} matrix"
    return None


def one_below_the_other(matrix: Tensor) -> Tensor:
    """The square blocks of matrices [..., d, w], one below the other: [..., d / w, w, w]. Zeros fill the last."""
    rows, width = matrix.shape[-2:]
    blocks: Tensor = F.pad(matrix, (0, 0, 0, -rows % width)).unflatten(-2, (-1, width))
    return blocks


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def coarser(entry: Tensor, like: Tensor) -> bool:
    """Whether an entry was saved in a lower precision than it will have."""
    if not (entry.is_floating_point() and like.is_floating_point()):
        return False
    return torch.finfo(entry.dtype).eps > torch.finfo(like.dtype).eps


def faults(state: Mapping[str, object], declared: Mapping[str, tuple[Tensor, Values]]) -> list[tuple[str, str]]:
    """All that is wrong with a state, as rows for `refuse`: entries that are missing, unknown, or not as declared."""
    rows = [(name, "is missing") for name in declared if name not in state]
    rows += [(str(name), "is unknown here") for name in state if name not in declared]
    for name, (like, values) in declared.items():
        if name in state and (wrong := fault(state[name], like, values)):
            rows.append((name, wrong))
    return rows


def refuse(rows: Sequence[tuple[str, str]], hint: str = "", *, owner: str) -> None:
    """Raises ValueError for a state with faults. hint: what to do about them. owner: what loads the state."""
    if rows:
        entries = "an entry is" if len(rows) == 1 else f"{len(rows)} entries are"
        text = f"the state does not fit this {owner}, and nothing of it is loaded: {entries} wrong"
        raise ValueError("\n".join(filter(None, (text, table(rows), hint))))


def generator_fault(entry: Tensor, device: str | torch.device) -> str | None:
    """The fault of the state of a random generator of a device; None without one."""
    try:
        torch.Generator(device).set_state(entry.detach().cpu())
    except (RuntimeError, TypeError) as error:  # of torch, which also refuses devices that are not there
        if fatal(error):
            raise
        return f"is no state of a random generator of {device}"
    return None


# --- calls ------------------------------------------------------------------------------------------------------------

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
NO_NAMES: Mapping[str, str] = MappingProxyType({})


def explains_calls(
    takes: str = "", several: str = "", meant: Mapping[str, str] = NO_NAMES
) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function or a method: a call that does not fit its signature raises a TypeError with what to write.

    Args:
        takes: what it takes without names, in words; empty: the names.
        several: the sentence for more arguments than that.
        meant: by a name that somebody may write for an option, the sentence that says what to write instead. By that of
            an option that is given twice, without a name and with it, what the first may have been meant to be.
    """

    def decorated(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if not is_of_the_call(error):
                    raise
                wrong = error
            raise TypeError(misfit(function, args, kwargs, takes, several, meant) or str(wrong)) from None

        return cast(FunctionT, called)

    return decorated


def is_of_the_call(error: TypeError) -> bool:
    """Whether a function was never entered: no other frame than that which catches the error is in its traceback."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def misfit(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    takes: str = "",
    several: str = "",
    meant: Mapping[str, str] = NO_NAMES,
) -> str:
    """Why a call does not fit a signature, with all culprits; empty if it is told by Python's own words alone."""
    *owner, name = function.__qualname__.rsplit(".", 2)
    name = owner[-1] if name == "__init__" else name
    own = [of for of in inspect.signature(function).parameters.values() if of.name != "self"]
    by_place = [of.name for of in own if of.kind in (of.POSITIONAL_ONLY, of.POSITIONAL_OR_KEYWORD)]
    named = [of.name for of in own if of.kind in (of.POSITIONAL_OR_KEYWORD, of.KEYWORD_ONLY)]
    options = [of for of in named if of not in by_place]
    given = len(args) - ("self" in inspect.signature(function).parameters)
    lines = []
    if given > len(by_place):
        got = f"{plural(given, 'argument')} without names" if by_place else str(given)
        wanted = takes or (listed(by_place) if by_place else "no argument without a name")
        others = "other " if by_place and not takes else ""
        have = f"All {others}options have names: {', '.join(f'{of}=' for of in options)}." if options else ""
        lines.append(" ".join(filter(None, (f"{name} takes {wanted}, and got {got}.", several, have))))
    for option in [name for name in by_place[: max(given, 0)] if name in kwargs]:
        place = by_place.index(option) + 1
        twice = f"{name} got {option} twice, as argument {place} and as {option}=."
        lines.append(" ".join(filter(None, (twice, meant.get(option, "Leave one out.")))))
    takes_others = any(of.kind is of.VAR_KEYWORD for of in own)
    if not takes_others and (unknown := [option for option in kwargs if option not in named]):
        for option in unknown:
            near = meant.get(option) or nearest(option, named).strip()
            lines.append(" ".join(filter(None, (f"{name} has no option {option!r}.", near))))
        lines.append(f"Its options are {', '.join(named)}.")
    required = [of.name for of in own if of.default is of.empty and of.name in named]
    if missing := [of for of in required if of not in kwargs and of not in by_place[: max(given, 0)]]:
        written = [*by_place[: max(given, 0)], *(f"{of}=..." for of in missing)]
        lines.append(f"{name} needs {listed(missing)}: write {name}({', '.join(written)}).")
    return "\n".join(lines)
