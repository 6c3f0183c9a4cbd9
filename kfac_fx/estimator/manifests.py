"""Manifests: JSON files that say what the other files of a folder are of, so that a run resumes its own work only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from kfac_fx.linalg.matrices import dense, real_numbers
from kfac_fx.linalg.processes import unsharded
from kfac_fx.passes.errors import table

NAME = "manifest.json"
FORMAT = 1  # of the folders; another format is refused

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


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError without a manifest, ValueError for another format or text that is no manifest."""
    path = folder / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no {NAME}: nothing was saved there.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(path)!r} is no manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{str(path)!r} has the format {version!r}, and this version of kfac_fx reads {FORMAT}.")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, or check it against one that is there. Raises ValueError if they differ."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_file():
        refuse_other(folder, read_manifest(folder), manifest)
        return
    part = folder / f"{NAME}.part"
    part.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(part, folder / NAME)


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
