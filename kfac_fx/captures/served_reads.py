"""Operations of Python on parameters, run as their graphs; see `passes.capture.reads`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from kfac_fx.captures.frames import Frames, Unmet, behind
from kfac_fx.passes.capture.captured import Captured, key_of_read
from kfac_fx.passes.capture.following import NOT_CAPTURED, Reads, differentiable
from kfac_fx.passes.capture.reads import Operation, Read
from kfac_fx.passes.errors import ModelChangedError

Serving = Callable[[Sequence[int], tuple[Any, ...], Mapping[str, Any], Any], int]


class ServedReads(Reads):
    """Of one forward. parameters: what Python sees of them. serving: see `DividedRecorder.serving`."""

    def __init__(
        self,
        frames: Frames,
        parameters: Mapping[str, Tensor],
        structured: Collection[str],
        cases: int,
        serving: Serving,
    ) -> None:
        self.by_key = numbers(frames.captured)
        self.readers = {name for one in frames.captured if one.is_read for name in one.names.values()} & set(structured)
        super().__init__({name: one for name, one in parameters.items() if self.readers}, cases)
        self.frames, self.serving, self.unfollowed = frames, serving, set[str]()
        frames.watchers.append(self)

    def served(self) -> AbstractContextManager[Any]:
        """While Python runs, if there is anything to serve."""
        return self if self.readers else nullcontext()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        if self.readers.isdisjoint(read.names) or not self.unfollowed.isdisjoint(read.names):
            return operation()
        try:
            number = self.serving(self.by_key.get(read.key, ()), read.inputs, {}, key_of_read(read.key, read.inputs))
        except Unmet as unmet:
            result = operation()
            if not differentiable(read, result):
                return result
            if not self.frames.tolerant:
                raise Unmet(str(read), unmet.captured) from None
            self.frames.unmet = Unmet(str(read), unmet.captured)
            return result
        output = self.frames.graph(number, read.inputs, {})
        if read.written is None:
            return output
        read.written.copy_(output)
        return None if read.function is Tensor.__setitem__ else read.written

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """What was followed may be another value by now: nothing of it is served, so that `refuse_read` finds it."""
        self.unfollowed |= set(names)


def numbers(captured: Sequence[Captured]) -> dict[Any, list[int]]:
    """Of the captures of reads, by what they read."""
    found: dict[Any, list[int]] = {}
    for number, one in enumerate(captured):
        if isinstance(one.module, Operation):
            found.setdefault(one.module.read_key, []).append(number)
    return found


def refuse_read(model: nn.Module, stand_ins: Mapping[str, Tensor], fisher: tuple[Tensor, ...]) -> None:
    """Raises ModelChangedError for structured parameters that Python read: a use that nothing recorded."""
    if not stand_ins:
        return
    if read := sorted(behind(fisher, stand_ins)):
        raise ModelChangedError(
            f"on these inputs {type(model).__name__} reads {', '.join(read)} outside of its captured "
            "submodules, as it did not on the first.\n"
            "Compile with inputs on which it does, or let these be generic: "
            f'compile(..., approximations={{"{read[0]}": "generic"}}).'
        )
