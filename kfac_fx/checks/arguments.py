"""Arguments of `compile` and of `FisherEstimator` that are of another kind than they should be, with what to write."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError, UntraceableError

UNFIT = "\"'\\\n\r"  # characters that generated code does not quote


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


def refuse_other_links(groups: Iterable[Any], model: nn.Module) -> None:
    """Raises LinkError for members of a group that are no names."""
    members = [member for group in groups if not isinstance(group, str) for member in group]
    if wrong := [member for member in members if not isinstance(member, str)]:
        raise LinkError(f"linked takes groups of names: {in_place(wrong, model)}")


def refuse_other_variables(variables: Iterable[Any], model: Any) -> None:
    """Raises RegistrationError for variables that are no names."""
    if wrong := [variable for variable in variables if not isinstance(variable, str)]:
        raise RegistrationError(f"variables takes names of parameters: {in_place(wrong, model)}")


def refuse_other_limit(limit: Any) -> None:
    """Raises RegistrationError unless the width of a factor is a whole number, at least 1."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RegistrationError(f"dense_limit is {limit!r}; it must be a whole number of columns, at least 1")


def in_place(objects: Iterable[Any], model: Any) -> str:
    """The text that a user writes in the place of objects: their names, if they are the model's."""
    known = {id(value): name for name, value in (*model.named_parameters(), *model.named_modules())}
    said = []
    for value in objects:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        said.append(f"write {known[id(value)]!r} for {kind}" if id(value) in known else f"{kind} is none")
    return "; ".join(said)
