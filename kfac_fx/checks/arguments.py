"""Arguments of `compile` and of `FisherEstimator` that are of another kind than they should be, with what to write."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from kfac_fx.linalg.sharded import Shard
from kfac_fx.passes.errors import (
    ApproximationError,
    LayerError,
    LinkError,
    RegistrationError,
    UntraceableError,
    nearest,
)

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
    said = []
    for value in objects:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        said.append(f"write {known[id(value)]!r} for {kind}" if id(value) in known else f"{kind} is none")
    return "; ".join(said)
