"""Manifests: JSON files that say what the other files of a folder are of, so that a run resumes its own work only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{str(path)!r} has the format {found!r}, and this version of kfac_fx reads {FORMAT}.")
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
