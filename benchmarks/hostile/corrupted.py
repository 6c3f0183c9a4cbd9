"""Every entry of a state, found by walking it, and ways to corrupt one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_fx.optim.checkpoint import SINCE

Path = tuple[Any, ...]  # ("state", 0, "velocity"), ("param_groups", 0, "lr")
REMOVED = object()


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every entry that is no container, and every list of parameters."""
    if isinstance(tree, dict) or (isinstance(tree, list) and path == ("param_groups",)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from walk(value, (*path, key))
    else:
        yield path, tree


def put(tree: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if value is REMOVED:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


def corrupted(state: dict[str, Any], changes: Mapping[Path, Any]) -> dict[str, Any]:
    new = copy.deepcopy(state)
    for path, value in changes.items():
        put(new, path, value)
    return new


def label(path: Path, names: list[str]) -> str:
    """The words for an entry in the error."""
    if path[0] == "param_groups":
        return f"param_groups[{path[1]}][{path[2]!r}]"
    _, place, entry = path
    return entry if "/" in entry and entry != "kfac/name" else f"{entry} of {names[place]}"


# --- ways -------------------------------------------------------------------------------------------------------------


def floating(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def filled(number: float) -> Callable[[Any], Any]:
    def fill(value: Any) -> Any:
        if not floating(value):
            return None
        if not isinstance(value, Tensor):
            return number
        changed = value.clone()
        changed.view(-1)[-1:] = number
        return changed if value.numel() else None

    return fill


def negative(value: Any) -> Any:
    """Below zero, for an entry that has no negative numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
        return ~value if value.dtype is torch.bool or value.numel() > 1 else None
    return -1 - abs(value)


def other_dtype(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    return value.to(torch.int64 if value.dtype is not torch.int64 else torch.float32)


# From an entry to a corrupted one; None where the way does not apply.
WAYS: dict[str, Callable[[Any], Any]] = {
    "nan": filled(float("nan")),
    "infinite": filled(float("inf")),
    "dtype": other_dtype,
    "shape": lambda value: torch.stack([value, value]) if isinstance(value, Tensor) else [value, value],
    "removed": lambda value: REMOVED,
    "negative": negative,
    "text": lambda value: "a",
    "complex": lambda value: value.to(torch.complex64) if isinstance(value, Tensor) else 1j,
}

CHOICES = ("kfac/momentum_type", "kfac/estimation_mode", "kfac/adapt_damping")  # another one is an error of its own
SIGNED = (
    *("velocity", "checkpoint", "last_update", "exp_avg", "m", "param_groups"),
    *("kfac/fallen", "kfac/repeats", "kfac/after", "kfac/change"),
)
NO_STEP_READS = ("kfac/rho", "kfac/predicted_change", "kfac/qmodel_learning_rate", "kfac/qmodel_momentum", "kfac/best")


def is_legal(way: str, path: Path) -> bool:
    """Whether a corrupted entry may be that of another training."""
    name = path[-1]
    if way == "removed":  # states of earlier versions lack these
        of_versions = (*SINCE, *(f"kfac/{entry}" for entry in SINCE))
        return name in ("kfac/name", "kfac/options", "first_lr", *of_versions)
    if way not in ("nan", "infinite", "negative"):
        return way == "shape" and name == "kfac/options"  # those of another version
    if name in NO_STEP_READS or name == "kfac/options":
        return True
    if name == "kfac/loss_before":  # of a step that was not taken it is no number
        return way != "infinite"
    if name in ("kfac/norm", "kfac/value"):  # infinite before the first check
        return way == "infinite" or (way == "negative" and name == "kfac/value")
    return way == "negative" and (name in SIGNED or name.endswith("average/moment") or is_flag(name))


def is_flag(name: str) -> bool:
    return name in ("kfac/calm", "kfac/same", "kfac/near", "kfac/late")
