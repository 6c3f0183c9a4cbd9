"""Names of parameters and of pieces of them, as users write them: one by one, in keys of several, in arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from kfac_fx.linalg.vectors import overlap, piece_of_view, read_piece
from kfac_fx.passes.errors import RegistrationError, nearest, table
from kfac_fx.passes.ir import Program, Registration
from kfac_fx.passes.pieces import Piece
from kfac_fx.recording.moments import Key

Entry = TypeVar("Entry")


class ParameterNames:
    """Canonical names of parameters and of their pieces.

    Users name a parameter by any of its aliases or by the object, and a piece as `"w[0:64]"`, `"table[:, 2:5]"` or as
    a view such as `model.w[0:64]`.

    Attributes:
        pieces: the pieces that were named so far, by name.
    """

    def __init__(self, program: Program) -> None:
        self.pieces: dict[str, Piece] = dict(program.pieces)
        self._aliases, self._parameters = program.aliases, program.parameters
        self._by_object = {id(parameter): name for name, parameter in program.parameters.items()}

    def __call__(self, parameter: Any) -> str:
        """Raises RegistrationError if this is no trainable parameter of the model and no piece of one."""
        if isinstance(parameter, str) and parameter in self._aliases:
            return self._aliases[parameter]
        if id(parameter) in self._by_object:
            return self._by_object[id(parameter)]
        piece: Piece | None = None
        if isinstance(parameter, str):
            piece = self.pieces.get(parameter) or read_piece(parameter, self._aliases, self._parameters)
        elif isinstance(parameter, Tensor):
            piece = piece_of_view(parameter, self._parameters)
        if piece is not None:
            if piece.stop - piece.start == self._parameters[piece.parameter].shape[piece.dim]:
                return piece.parameter
            return self.pieces.setdefault(piece.name, piece).name
        if isinstance(parameter, str):
            hint = nearest(parameter, self._aliases)
            raise RegistrationError(f"{parameter!r} is not a trainable parameter of the model.{hint}")
        raise RegistrationError(f"a {type(parameter).__name__} that is not a trainable parameter of the model")


class LayerParametersDict(MutableMapping[Any, Entry], Generic[Entry]):
    """A mapping from parameters to values. A key is one parameter, or a tuple or list of them in any order.

    No parameter, and no element of one, is in two keys. Iteration gives tuples of names in the order of insertion.

    Args:
        name_of: from a parameter, as users write it, to its name.
        pieces: the pieces of parameters among the names.
    """

    def __init__(self, name_of: Any = str, pieces: Mapping[str, Piece] | None = None) -> None:
        self.name_of, self.pieces = name_of, {} if pieces is None else pieces
        self._values: dict[Key, Entry] = {}
        self._keys: dict[frozenset[str], Key] = {}
        self._by_owner: dict[str, dict[Key, None]] = {}

    def names(self, key: Any) -> Key:
        """The names in a key as users write it."""
        parts = key if isinstance(key, (tuple, list, set, frozenset)) else (key,)
        return tuple(self.name_of(part) for part in parts)

    def overlapping(self, key: Any) -> list[Key]:
        """Keys that share a parameter, or elements of one, with `key` and are not equal to it."""
        names = self.names(key)
        near = dict.fromkeys(other for name in names for other in self._by_owner.get(self.owner(name), ()))
        return [other for other in near if set(other) != set(names) and self.shared(other, names)]

    def shared(self, first: Iterable[str], second: Iterable[str]) -> list[str]:
        """The names in `second` that have elements in common with a name in `first`."""
        return [name for name in second if any(self.meet(other, name) for other in first)]

    def meet(self, first: str, second: str) -> bool:
        """Whether two parameters or pieces have elements in common."""
        if first in self.pieces and second in self.pieces:
            return overlap(self.pieces[first], self.pieces[second])
        return self.owner(first) == self.owner(second)

    def owner(self, name: str) -> str:
        """The parameter that a piece is of; a parameter itself."""
        return self.pieces[name].parameter if name in self.pieces else name

    def __getitem__(self, key: Any) -> Entry:
        names = self.names(key)
        if frozenset(names) not in self._keys:
            raise KeyError(f"no block of exactly ({', '.join(names)})")
        return self._values[self._keys[frozenset(names)]]

    def __setitem__(self, key: Any, value: Entry) -> None:
        """Raises RegistrationError if another key has one of the parameters."""
        names = self.names(key)
        if taken := self.overlapping(names):
            raise RegistrationError(f"key {names} shares parameters with Key(s) already present: {taken}")
        key = self._keys.setdefault(frozenset(names), names)
        self._values[key] = value
        for name in names:
            self._by_owner.setdefault(self.owner(name), {})[key] = None

    def __delitem__(self, key: Any) -> None:
        names = self._keys.pop(frozenset(self.names(key)))
        del self._values[names]
        for owner in {self.owner(name) for name in names}:
            del self._by_owner[owner][names]

    def __contains__(self, key: Any) -> bool:
        return frozenset(self.names(key)) in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"LayerParametersDict({self._values})"


# --- names in arguments -----------------------------------------------------------------------------------------------


def refuse_other_variables(variables: Any, model: Any) -> list[str]:
    """The names. Raises RegistrationError for variables that are no names."""
    if isinstance(variables, (str, Tensor)) or not isinstance(variables, Iterable):
        raise RegistrationError(
            f"variables is {variables!r}; it takes names of parameters, as in variables=['fc.weight', 'fc.bias']"
        )
    names = list(variables)
    if wrong := [variable for variable in names if not isinstance(variable, str)]:
        raise RegistrationError(f"variables takes names of parameters: {as_written(wrong, model)}")
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


def as_written(objects: Iterable[Any], model: Any) -> str:
    """The text that a user writes in the place of objects: their names, if they are the model's."""
    known = {id(value): name for name, value in (*model.named_parameters(), *model.named_modules())}
    advice = []
    for value in objects:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        advice.append(f"write {known[id(value)]!r} for {kind}" if id(value) in known else f"{kind} is none")
    return "; ".join(advice)
