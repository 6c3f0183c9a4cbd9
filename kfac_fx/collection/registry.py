"""What a registration is filed under, and when one may be filed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from kfac_fx.linalg.vectors import overlap
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.pieces import Piece

Value = TypeVar("Value")
Key = tuple[str, ...]
Reuse = bool | str | None
VARIABLE_SCOPE = "VARIABLE_SCOPE"  # what the innermost `variable_scope` says; False outside of any
AUTO_REUSE = "AUTO_REUSE"  # a tower if there is a registration, else a new one
_scope: ContextVar[bool | str] = ContextVar("reuse", default=False)


@contextmanager
def variable_scope(reuse: bool | str) -> Iterator[None]:
    """Inside, `reuse=VARIABLE_SCOPE`, the default of all register functions, means this `reuse`."""
    token = _scope.set(resolved(reuse))
    try:
        yield
    finally:
        _scope.reset(token)


def resolved(reuse: bool | str | None) -> bool | str:
    """True, False or AUTO_REUSE. Raises ValueError for anything else."""
    if reuse == VARIABLE_SCOPE:
        return _scope.get()
    if reuse is None:
        return False
    if reuse is True or reuse is False or reuse == AUTO_REUSE:
        return reuse
    raise ValueError(f"reuse={reuse!r} is none of True, False, AUTO_REUSE and VARIABLE_SCOPE")


class LayerParametersDict(MutableMapping[Any, Value], Generic[Value]):
    """Values by parameters: one, or a tuple or list of them in any order. No parameter is in two keys.

    name_of: from a parameter, as users write it, to its name. Keys are tuples of names in the order of insertion.
    piece_of: the piece of a parameter that a name stands for, if it does.
    """

    def __init__(
        self, name_of: Callable[[Any], str] = str, piece_of: Callable[[str], Piece | None] = lambda name: None
    ) -> None:
        self.name_of, self.piece_of = name_of, piece_of
        self._values: dict[Key, Value] = {}
        self._keys: dict[frozenset[str], Key] = {}
        self._by_owner: dict[str, dict[Key, None]] = {}

    def names(self, key: Any) -> Key:
        parts = key if isinstance(key, (tuple, list, set, frozenset)) else (key,)
        return tuple(self.name_of(part) for part in parts)

    def overlapping(self, key: Any) -> list[Key]:
        """Keys that share a parameter, or elements of one, with `key` and are not equal to it."""
        names = self.names(key)
        near = dict.fromkeys(known for name in names for known in self._by_owner.get(self.owner(name), ()))
        return [known for known in near if set(known) != set(names) and self.shared(known, names)]

    def shared(self, some: Iterable[str], others: Iterable[str]) -> list[str]:
        """Those of `others` that have elements in common with one of `some`."""
        return [other for other in others if any(self.meet(one, other) for one in some)]

    def meet(self, one: str, other: str) -> bool:
        first, second = self.piece_of(one), self.piece_of(other)
        if first is not None and second is not None:
            return overlap(first, second)
        return self.owner(one) == self.owner(other)

    def owner(self, name: str) -> str:
        piece = self.piece_of(name)
        return name if piece is None else piece.parameter

    def __getitem__(self, key: Any) -> Value:
        names = self.names(key)
        if frozenset(names) not in self._keys:
            raise KeyError(f"no block of exactly ({', '.join(names)})")
        return self._values[self._keys[frozenset(names)]]

    def __setitem__(self, key: Any, value: Value) -> None:
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
