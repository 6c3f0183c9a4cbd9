"""The modules and parameters of a model as they were when it was compiled.

What a model comes in, and what it may not be made of: wrappers of data parallelism, torch.compile, TorchScript.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.passes.errors import ModelChangedError, RegistrationError, UntraceableError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.tracing.substitutes import memory


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


# --- wrappers ---------------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of data parallelism and of torch.compile."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    original = getattr(model, "_orig_mod", None)  # of torch.compile, which has no public name for it
    return unwrapped(original) if isinstance(original, nn.Module) else model


def refuse_unfit(model: nn.Module) -> None:
    """Raises UntraceableError for what no capture can do anything with, with all culprits."""
    refuse_sharded(model)
    refuse_scripted(model)
    refuse_without_shapes(model)
    refuse_complex(model)
    refuse_overlapping(model)


def refuse_sharded(model: nn.Module) -> None:
    flat, sharded = (
        loaded("torch.distributed.fsdp", "FullyShardedDataParallel"),
        loaded("torch.distributed.tensor", "DTensor"),
    )
    modules = [name or "the model itself" for name, one in model.named_modules() if flat and isinstance(one, flat)]
    parameters = [name for name, one in model.named_parameters() if sharded and isinstance(one, sharded)]
    if found := [*modules, *parameters]:
        raise UntraceableError(
            f"parameters that are spread over processes have no factors in any: {', '.join(found)}.\n"
            "Compile the model with whole parameters, in DistributedDataParallel for several processes."
        )


def loaded(module: str, name: str) -> Any:
    """A class, if anybody has imported it."""
    return getattr(sys.modules.get(module), name, None)


def refuse_without_shapes(model: nn.Module) -> None:
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    named = (*model.named_parameters(), *model.named_buffers())
    if names := [name for name, one in named if isinstance(one, lazy)]:
        raise UntraceableError(
            f"these parameters have no shape yet: {', '.join(names)}.\n"
            "Run the model once on a batch, as in model(*example_inputs), and compile it then."
        )


def refuse_without_values(model: nn.Module, verify: bool) -> None:
    if verify and (names := [name for name, one in model.named_parameters() if one.is_meta]):
        raise UntraceableError(
            f"these parameters are on the meta device and have no values, so nothing can be proved of the graph: "
            f"{', '.join(names)}.\n"
            "Give them values first, as with model.to_empty(device=...) and load_state_dict; or compile without "
            "example inputs, or with verify=False, for the report alone."
        )


def refuse_untrained(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RegistrationError if none of the named parameters of a compiled module is trained: it has no Fisher."""
    known = dict(named)
    if not any(one.requires_grad for one in known.values()):
        what = f"all {len(known):,} are frozen, with requires_grad=False" if known else "the model has none"
        raise RegistrationError(
            f"the Fisher is of trained parameters, and there are none: {what}.\n"
            "Unfreeze what is to be trained, as with model.requires_grad_(True), and call kfac_fx.compile then."
        )


def refuse_without_blocks(registrations: Sequence[Registration], named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RegistrationError if there is no registration to make a Fisher block of."""
    if not registrations:
        refuse_untrained(named := list(named))
        trained = ", ".join(name for name, one in named if one.requires_grad)
        raise RegistrationError(
            f"there is no Fisher block: none of the trained parameters is registered, as the losses depend on none or "
            f"`variables` names none: {trained}.\n"
            "print(net.report) says what became of each; let forward return what is computed from them."
        )


def refuse_overlapping(model: nn.Module) -> None:
    """Raises UntraceableError for trained parameters that have elements in one place, each of which autograd would give
    a gradient of its own, and every optimizer a step. Parts of one long vector may lie side by side."""
    by_memory: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, one in model.named_parameters():
        if one.requires_grad and one.numel() and (place := memory(one)):
            by_memory.setdefault((place, one.dtype), []).append((name, one.detach()))
    pairs = [pair for members in by_memory.values() if len(members) > 1 for pair in overlaps(members)]
    if pairs:
        rows = table((later, f"has elements of {earlier}") for earlier, later in pairs)
        raise UntraceableError(
            f"parameters share memory and are not the same parameter:\n{rows}\n"
            f"Tie them by name, as in model.{pairs[0][1]} = model.{pairs[0][0]}, or clone one."
        )


def overlaps(members: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Names of tensors of one memory, each with an earlier one that has elements of it."""
    ends = sorted((one.storage_offset(), one.storage_offset() + extent(one)) for _, one in members)
    if all(end <= start for (_, end), (start, _) in pairwise(ends)):
        return
    owner = torch.full((max(end for _, end in ends),), -1)
    for number, (name, one) in enumerate(members):
        distinct = [size if stride else 1 for size, stride in zip(one.shape, one.stride(), strict=True)]
        places = owner.as_strided(distinct, one.stride(), one.storage_offset())
        if (taken := int(places.max())) >= 0:
            yield members[taken][0], name
        places.fill_(number)


def extent(tensor: Tensor) -> int:
    """From its first to its last element in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def refuse_complex(model: nn.Module) -> None:
    names = [name for name, one in model.named_parameters() if one.requires_grad and one.is_complex()]
    if names:
        raise UntraceableError(
            f"the Fisher is of real parameters, and these are complex: {', '.join(names)}.\n"
            "Keep torch.view_as_real(w) as the parameter, and let forward compute with torch.view_as_complex of it."
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raises UntraceableError with the outermost of them."""
    scripted = [name for name, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    outer = [name for name in scripted if not any(other == "" or name.startswith(f"{other}.") for other in scripted)]
    if scripted:
        names = ", ".join(outer) or "the model itself"
        raise UntraceableError(
            f"a TorchScript module, whose Python is gone, cannot be captured: {names}.\n"
            "Hand kfac_fx.compile the module that torch.jit.script or torch.jit.trace was given."
        )
