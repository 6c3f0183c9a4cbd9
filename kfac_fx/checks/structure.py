"""The modules and parameters of a model as they were when it was compiled."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn

from kfac_fx.passes.errors import ModelChangedError


class Structure:
    """Knows every module and parameter by identity; looking again costs a dictionary's look-up each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = named(model)
        self.holders = [holder for module in model.modules() for holder in (module._parameters, module._modules)]
        self.held: list[dict[str, Any]] = [dict(holder) for holder in self.holders]

    def check(self) -> None:
        """Raises ModelChangedError with the names of all that was replaced, added or removed."""
        if all(map(same_objects, self.holders, self.held)):
            return
        now = named(self.model)
        changed = [name for name in dict.fromkeys((*self.named, *now)) if self.named.get(name) is not now.get(name)]
        inner = [name for name in changed if not any(other.startswith(f"{name}.") for other in changed)]
        many = "1 parameter or module was" if len(inner) == 1 else f"{len(inner)} parameters or modules were"
        raise ModelChangedError(
            f"{many} replaced, added or removed after kfac_fx.compile: {', '.join(inner)}.\n"
            "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
            "parameter.data.copy_(...) or load_state_dict."
        )


def same_objects(holder: dict[str, Any], held: dict[str, Any]) -> bool:
    return len(holder) == len(held) and all(map(is_, map(holder.get, held), held.values()))


def named(model: nn.Module) -> dict[str, Any]:
    """All modules and parameters under all their names."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    return modules | dict(model.named_parameters(remove_duplicate=False))
