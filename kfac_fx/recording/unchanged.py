"""Changes of a compiled model: a capture relies on its modules, parameters and shapes, as they were then.

`Structure` notices what was replaced, and `Trained` parameters that were frozen until now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.linalg.processes import is_sharded
from kfac_fx.passes.errors import ModelChangedError, table
from kfac_fx.passes.torch_private import in_functional_call, parameters_of, submodules_of


class Structure:
    """The modules and parameters of a model when it was compiled. A check costs one dictionary look-up for each."""

    def __init__(self, model: nn.Module, on_shards: Callable[[], None]) -> None:
        """on_shards: called when FSDP2 was seen to have sharded the parameters; it calls `follow_shards`, or raises."""
        self.model, self.on_shards = model, on_shards
        self.objects = named_objects(model)
        self.modules = list(model.modules())
        self.holders = [held(module) for module in self.modules for held in (parameters_of, submodules_of)]
        self.held: list[dict[str, Any]] = [dict(holder) for holder in self.holders]
        self.shapes = {name: (parameter, parameter.shape) for name, parameter in model.named_parameters()}
        self.sharded = False  # FSDP2 swaps the parameters of its units, so that names and shapes tell what they are

    def follow_shards(self) -> None:
        """Take the shards that FSDP2 has made of the parameters for these. Frees the memory of the whole parameters,
        which this and the captured graph hold: they are NaN from now on."""
        for name, now in self.model.named_parameters(remove_duplicate=False):
            before = self.objects.get(name, now)
            if before is not now:
                before.grad = None
                before.data = torch.full((), torch.nan, dtype=before.dtype, device=before.device).expand(before.shape)
        self.sharded = True
        self.shapes = {name: (parameter, parameter.shape) for name, parameter in self.model.named_parameters()}

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Those of the model, after `check`: a walk through a model of many layers takes longer than one of them."""
        return self.model.parameters() if self.sharded else (parameter for parameter, _ in self.shapes.values())

    @property
    def same(self) -> bool:
        """Whether the model holds the modules and parameters that it held then."""
        return all(map(same_objects, self.holders, self.held))

    @property
    def lent(self) -> bool:
        """Whether other tensors stand for parameters in this call alone, as in torch.func.functional_call. Only there
        tensors that are no parameters are held as such."""
        if self.same or self.sharded:
            return False
        kinds = (isinstance(tensor, nn.Parameter) for tensor in self.model.parameters())
        return in_functional_call() or not all(kinds)

    def check(self) -> None:
        """Raises ModelChangedError with the names of all that was replaced, added or removed, or has another shape."""
        if self.same:
            self.check_shapes()
            return
        if not self.sharded and any(map(is_sharded, self.model.parameters())):
            self.on_shards()
        now = named_objects(self.model)
        changed = [
            name
            for name in dict.fromkeys((*self.objects, *now))
            if not self.is_same(self.objects.get(name), now.get(name))
        ]
        if not changed:
            return
        if self.lent:
            raise ModelChangedError(
                "statistics are recorded of the model's own parameters, and other tensors stand for them in this call, "
                f"as in torch.func.functional_call: {', '.join(changed)}.\n"
                "Record outside of it, with the values of these tensors: net.record((x,), {}, parameters={name: "
                "tensor})."
            )
        inner = [name for name in changed if not any(other.startswith(f"{name}.") for other in changed)]
        many = "1 parameter or module was" if len(inner) == 1 else f"{len(inner)} parameters or modules were"
        raise ModelChangedError(
            f"{many} replaced, added or removed after kfac_fx.compile: {', '.join(map(repr, inner))}.\n"
            "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
            "parameter.data.copy_(...) or load_state_dict."
        )

    def check_shapes(self) -> None:
        """Raises ModelChangedError for parameters whose `data` was replaced by a tensor of another shape."""
        changed = [
            (name, f"was {list(shape)} and is {list(parameter.shape)}")
            for name, (parameter, shape) in self.shapes.items()
            if parameter.shape != shape
        ]
        if changed:
            raise ModelChangedError(
                f"parameters have another shape than when kfac_fx.compile was called:\n{table(changed)}\n"
                "Their factors and momenta have the old shape. Compile again, and create the optimizer again."
            )

    def is_same(self, before: Any, now: Any) -> bool:
        """Whether a module or a parameter is what it was, up to the shards that FSDP2 makes of it."""
        if before is now or not self.sharded or not isinstance(before, Tensor) or not isinstance(now, Tensor):
            return before is now
        return before.shape == now.shape and before.dtype == now.dtype


def same_objects(holder: dict[str, Any], held: dict[str, Any]) -> bool:
    return len(holder) == len(held) and all(map(is_, map(holder.get, held), held.values()))


def named_objects(model: nn.Module) -> dict[str, Any]:
    """All modules and parameters under all their names."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    return modules | dict(model.named_parameters(remove_duplicate=False))


class Trained:
    """The parameters of a model that were trained at any time since it was compiled.

    A parameter that was trained once stays registered. While it is frozen its statistics pause, and captures treat it
    as if it were trained, so that it keeps its block. A parameter that is trained for the first time after compile
    needs captures in which it is registered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.registered = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.dormant = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these instead of those that FSDP2 has sharded."""
        self.registered = {name: parameters[name] for name in self.registered}
        self.dormant = {name: parameters[name] for name in self.dormant}

    @property
    def any_now(self) -> bool:
        """Whether any parameter is trained at present."""
        return any(p.requires_grad for p in self.registered.values()) or self.unfrozen

    @property
    def unfrozen(self) -> bool:
        """Whether a parameter is trained that was frozen in all captures."""
        return any(p.requires_grad for p in self.dormant.values())

    def take_unfrozen(self) -> list[str]:
        """Register what was unfrozen. Returns the names."""
        names = [name for name, p in self.dormant.items() if p.requires_grad]
        self.registered |= {name: self.dormant.pop(name) for name in names}
        return names

    @contextmanager
    def in_captures(self) -> Iterator[None]:
        """Inside, all that was ever trained requires gradients."""
        frozen = [p for p in self.registered.values() if not p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)
