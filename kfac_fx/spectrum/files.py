"""Spectra in folders: one safetensors file a block, and a manifest in JSON that is checked when they are loaded.

A file appears under its name when it is complete, so a folder that a killed run left can be completed. No code in a
folder is executed when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kfac_fx.blocks.block import make_groups
from kfac_fx.blocks.spectrum import Damping, System
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import class_of
from kfac_fx.spectrum.manifests import FORMAT, Manifest, read_manifest, refuse_other, write_manifest
from kfac_fx.spectrum.model_spectrum import CaseNet, ModelSpectrum
from kfac_fx.statistics.moments import Key

VALUES = "values"


class DescribedNet(CaseNet, Protocol):
    """The part of a compiled module that a manifest describes."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def registrations(self) -> tuple[Registration, ...]: ...


def manifest_of(net: DescribedNet, registrations: Iterable[Registration], mode: str, **settings: Any) -> Manifest:
    """The description of a folder's files. settings: how they were made, which a resumed run must share."""
    registrations = list(registrations)
    parameters = dict(net.model.named_parameters())
    owners = dict.fromkeys(name for registration in registrations for name in registration.owners)
    return {
        "format": FORMAT,
        "model": class_of(net.model).__name__,
        "mode": mode,
        "parameters": {name: list(parameters[name].shape) for name in owners},
        "blocks": {
            ",".join(registration.parameters): {
                "file": f"block-{number:05}.safetensors",
                "approximation": registration.approximation,
                "sides": list(registration.blocks),
            }
            for number, registration in enumerate(registrations)
        },
        **settings,
    }


def write_blocks(folder: Path, manifest: Manifest, systems: Sequence[System]) -> None:
    """Write the files of all blocks of the systems, each complete under its name."""
    for system in systems:
        for index, registration in enumerate(system.group.registrations):
            operators = system.group.operators_of(index, system.operators)
            tensors = {VALUES: system.values[index], **{f"operator {n}": op for n, op in enumerate(operators)}}
            path = folder / manifest["blocks"][",".join(registration.parameters)]["file"]
            part = path.with_suffix(".part")
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, part)
            os.replace(part, path)


def is_written(folder: Path, manifest: Manifest, registrations: Iterable[Registration]) -> bool:
    """Whether the files of all these blocks are there."""
    blocks = manifest["blocks"]
    return all((folder / blocks[",".join(block.parameters)]["file"]).is_file() for block in registrations)


def read_systems(
    folder: Path, manifest: Manifest, registrations: Sequence[Registration], parameters: Mapping[str, Tensor]
) -> list[System]:
    """The systems of these blocks. Raises FileNotFoundError with all files that are missing, ValueError for tensors of
    other shapes than the blocks have."""
    files = {
        block.parameters: folder / manifest["blocks"][",".join(block.parameters)]["file"] for block in registrations
    }
    if missing := [path.name for path in files.values() if not path.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} blocks are missing in {str(folder)!r}, the first is {missing[0]}. The run "
            "that made it did not end; repeat it with the same folder, and it resumes."
        )
    without_data = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in parameters.items()
    }
    groups = make_groups(registrations, without_data, roots=(), damping=torch.zeros(()))
    return [read_system(group, files, parameters) for group in groups]


def read_system(group: BlockGroup, files: Mapping[Key, Path], parameters: Mapping[str, Tensor]) -> System:
    device = parameters[group.registrations[0].owners[0]].device
    values, operators = [], []
    for registration in group.registrations:
        tensors = load_file(files[registration.parameters], device=str(device))
        values.append(tensors.pop(VALUES))
        operators.append([tensors[f"operator {n}"] for n in range(len(tensors))])
        if tuple(values[-1].shape) != group.shape:
            raise ValueError(
                f"{str(files[registration.parameters])!r} has eigenvalues {list(values[-1].shape)}, and {registration} "
                f"is a matrix {list(group.shape)}."
            )
    light = group.without_factors(range(len(group)))
    light.dtype, light.device = values[0].dtype, device
    return System(light, torch.stack(values), light.stack_operators(operators))


def save_spectrum(spectrum: ModelSpectrum, folder: str | Path) -> None:
    """Write a spectrum into a folder: one safetensors file a block, and a manifest of model, parameters and blocks.

    Raises ValueError if the folder holds another spectrum.
    """
    folder = Path(folder)
    manifest = manifest_of(spectrum.net, spectrum.registrations, spectrum.mode, case=spectrum.case)  # type: ignore[arg-type]
    write_manifest(folder, manifest)
    write_blocks(folder, manifest, spectrum.systems)


def load_spectrum(
    net: DescribedNet, folder: str | Path, *, scale: float | Tensor = 1.0, damping: Damping = 0.0
) -> ModelSpectrum:
    """Load a spectrum that `save_spectrum` or `fit_spectrum` wrote for the same model.

    Args:
        net: the compiled module. Its parameters and the approximations of its blocks must be those of the folder.
        scale, damping: as of `FisherEstimator.spectrum`.

    Raises ValueError with all that differs between the manifest and the module, FileNotFoundError for missing files.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    names = {name for block in manifest["blocks"] for name in block.split(",")}
    registrations = [block for block in net.registrations if names & set(block.parameters)]
    here = manifest_of(net, registrations, manifest["mode"])
    settings = {name: value for name, value in manifest.items() if name not in here}
    refuse_other(folder, manifest, here | settings)
    parameters = dict(net.model.named_parameters())
    systems = read_systems(folder, manifest, registrations, parameters)
    owners = dict.fromkeys(name for block in registrations for name in block.owners)
    shapes = {name: parameters[name].shape for name in owners}
    return ModelSpectrum(systems, shapes, scale, damping, net=net, mode=manifest["mode"], case=manifest.get("case"))
