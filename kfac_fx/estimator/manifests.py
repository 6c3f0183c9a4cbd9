"""Manifests: JSON files that say what the other files of a folder are of, so that a run resumes its own work only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.files import damaged, is_there, read_json, write_json
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.processes import unsharded
from kfac_fx.losses.declared import LossSpec, RegisteredLosses
from kfac_fx.passes.errors import table
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.users_code import warn_user

T = TypeVar("T")
NAME = "manifest.json"
FORMAT = 2  # of the folders; another format is refused
WITHOUT_DIGESTS = 1  # of the folders whose files have no digests, which are read with a warning

Manifest = dict[str, Any]


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], place: str = "") -> list[tuple[str, str]]:
    """The entries of two manifests that differ, by their path, and how."""
    rows: list[tuple[str, str]] = []
    for name in dict.fromkeys((*saved, *here)):
        path = f"{place}{name}"
        if name not in here or name not in saved:
            rows.append((path, "is only in the folder" if name in saved else "is not in the folder"))
        elif isinstance(saved[name], Mapping) and isinstance(here[name], Mapping):
            rows += differences(saved[name], here[name], f"{path}: ")
        elif saved[name] != here[name]:
            rows.append((path, f"is {saved[name]!r} in the folder, and {here[name]!r} here"))
    return rows


def refuse_other(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError with all entries of two manifests that differ."""
    if rows := differences(saved, here):
        raise ValueError(f"the folder {str(folder)!r} holds something else:\n{table(rows)}")


def is_written(folder: Path) -> bool:
    """Whether a folder has a manifest. Raises ValueError for what is no folder."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder. Pass another name.")
    return is_there(folder / NAME)


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError without a manifest, ValueError for another format and for a file that is not whole.

    A manifest of format 1 has no digests, and is read as it is.
    """
    path = folder / NAME
    if not is_written(folder):
        raise FileNotFoundError(f"{str(folder)!r} has no {NAME}: nothing was saved there.")
    manifest, sealed = read_json(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in (WITHOUT_DIGESTS, FORMAT) or isinstance(version, bool):
        raise ValueError(f"{str(path)!r} has the format {version!r}, and this version of kfac_fx reads {FORMAT}.")
    if sealed != (version == FORMAT):
        raise damaged(path, "is not what was written: it holds no digest of its own, or its format has none")
    return {name: value for name, value in manifest.items() if name != "seal"}


def settled(folder: Path, read: Callable[[], T]) -> T:
    """`read()` of a folder; once more whenever another process replaced the manifest meanwhile, and the files that the
    old one names are gone."""
    while True:
        before = bytes_there(folder / NAME)
        try:
            return read()
        except (FileNotFoundError, ValueError):
            if bytes_there(folder / NAME) == before:
                raise


def bytes_there(path: Path) -> bytes | None:
    """None if it cannot be read."""
    try:
        return path.read_bytes() if is_there(path) else None
    except (OSError, ValueError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder instead of the one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NAME, manifest)


# --- digests ----------------------------------------------------------------------------------------------------------


def digest(*values: Any) -> str:
    """A text that is another one if the values are: tensors and modules count by their numbers, functions by their code
    and what is bound to it, plain values by their text, and other objects by their class.

    The numbers are copied to the host.
    """
    total, functions = hashlib.sha256(), set[int]()

    def add(value: Any) -> None:
        total.update(f"{type(value).__qualname__}:".encode())
        if isinstance(value, Tensor):
            numbers = real_numbers(dense(unsharded(value.detach())))
            total.update(save({str(value.dtype): numbers.contiguous().cpu()}))
        elif isinstance(value, nn.Module):
            add(dict(value.named_parameters()) | dict(value.named_buffers()))
        elif isinstance(value, Mapping):
            each(*value.keys(), *value.values())
        elif isinstance(value, (tuple, list)):
            each(*value)
        elif isinstance(value, CodeType):
            each(value.co_code, value.co_names, value.co_consts)
        elif isinstance(value, FunctionType) and id(value) not in functions:
            functions.add(id(value))
            bound = [cell.cell_contents for cell in value.__closure__ or ()]
            each(value.__code__, value.__defaults__, value.__kwdefaults__, bound)
        elif isinstance(value, MethodType):
            each(value.__func__, value.__self__)
        elif isinstance(value, partial):
            each(value.func, value.args, value.keywords)
        elif isinstance(value, type):
            total.update(value.__qualname__.encode())
        elif isinstance(value, (str, bytes, int, float, complex, torch.dtype)):
            total.update(repr(value).encode())

    def each(*parts: Any) -> None:
        total.update(f"{len(parts)};".encode())
        for part in parts:
            add(part)

    each(*values)
    return total.hexdigest()[:16]


# --- of which model, loss and data ------------------------------------------------------------------------------------


def digest_of_weights(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """A digest of the numbers of a model: of its parameters and of the buffers in its state, by name.

    It does not depend on how the model is divided among processes, which all ask for it together.

    dtype: converts the floating numbers first.
    """
    total, in_state = hashlib.sha256(), model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in in_state}
    for name, tensor in sorted({**dict(model.named_parameters()), **buffers}.items()):
        whole = unsharded(tensor.detach()).detach()
        whole = whole if dtype is None or not whole.is_floating_point() else whole.to(dtype)
        total.update(digest(name, whole).encode())
    return total.hexdigest()[:16]


def dtype_of_same_weights(model: nn.Module, saved: str) -> torch.dtype | None:
    """The dtype in which the weights of the model have a digest; None if there is none."""
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return next((dtype for dtype in floats if digest_of_weights(model, dtype) == saved), None)


def words_of_loss(net: CompiledModule) -> str:
    """The loss that was declared, or the losses that forward computes: names, and digests of a user's functions."""
    loss = net.captures.arguments.loss
    if isinstance(loss, LossSpec):
        named = loss.name.removeprefix("loss=")
        return named if named != loss.name else f"a function, {digest(loss.make)}"
    if isinstance(loss, RegisteredLosses):
        return ", ".join(f"{of.coeff:g} {of.kind} {of.name}" for of in loss.losses)
    return ", ".join(f"{site.loss} in forward, {site.reduction}" for site in net.program.losses)


def made_of(net: CompiledModule) -> dict[str, str]:
    """The entries of a manifest that tell of which weights and of which loss the numbers are."""
    return {"weights": digest_of_weights(net.model), "loss": words_of_loss(net)}


OTHER = "is {!r} in the folder, and {!r} here"


def refuse_other_making(
    net: CompiledModule, folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any], allowed: bool, what: str
) -> None:
    """Raises ValueError if the numbers of a folder are of other weights, another loss or other data than are here; or
    warns, if that is allowed.

    Args:
        saved, here: entries of `made_of`, and "data". An entry that one of them lacks is not compared.
        what: what the folder has, as in "a spectrum".
    """
    others = [name for name in here if name in saved and saved[name] != here[name]]
    if not others:
        return
    listed = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
    rows = table([(name, OTHER.format(saved[name], here[name])) for name in others])
    text = f"{str(folder)!r} has {what} of other {listed}:\n{rows}\n"
    if not allowed:
        remedies = {
            "weights": "load the weights that it was made with",
            "loss": "name the loss that it was made with",
            "data": "pass the batches that it was made of, of the same sizes and in the same order",
        }
        if "weights" in others and (dtype := dtype_of_same_weights(net.model, saved["weights"])) is not None:
            remedies["weights"] = f"the weights are the same in {dtype}: write model.to({dtype}) before compile"
        of_net = "" if others == ["data"] else "Its numbers are not those of this net. "
        remedy = ", ".join(remedies[name] for name in others)
        raise ValueError(
            f"{text}{of_net}{remedy[0].upper()}{remedy[1:]}; or pass any_weights=True, which takes {what} as it is."
        )
    warn_user(UserWarning(f"{text}It is taken as it is, because any_weights=True."))


def warn_of_no_digests(folder: Path) -> None:
    warn_user(
        UserWarning(
            f"the folder {str(folder)!r} was written by an earlier version of kfac_fx, without digests: whether its "
            "files are whole, and of which weights and loss they are, is not known. Save it again to have them."
        )
    )
