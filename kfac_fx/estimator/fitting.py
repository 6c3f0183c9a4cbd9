"""Spectra in folders: fitted part by part, saved and loaded.

A folder has one safetensors file a block, and a manifest in JSON that is checked when they are loaded. A file appears
under its name when it is complete, so a folder that a killed run left can be completed. No code in a folder is executed
when it is loaded.

`fit_spectrum` has only the factors of one part of the parameters in memory. Every part records all batches anew, with
the same seed, so the result does not depend on the number of parts. The blocks of a part are written when it is done; a
run that is repeated with the same folder skips them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.names import check_variables
from kfac_fx.compiled.report import factor_dtype
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.estimator.manifests import FORMAT, Manifest, digest, read_manifest, refuse_other, write_manifest
from kfac_fx.estimator.model_spectrum import ModelSpectrum, as_batch, digest_of
from kfac_fx.fisher.block import key_text, make_groups
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.spectrum import Damping, System
from kfac_fx.linalg.vectors import connected
from kfac_fx.losses.declared import LossSpec
from kfac_fx.passes.errors import RegistrationError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.statistics import Key

VALUES = "values"


def manifest_of(net: CompiledModule, registrations: Iterable[Registration], mode: str, **settings: Any) -> Manifest:
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
            key_text(registration.parameters): {
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
            path = folder / manifest["blocks"][key_text(registration.parameters)]["file"]
            part = path.with_suffix(".part")
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, part)
            os.replace(part, path)


def is_written(folder: Path, manifest: Manifest, registrations: Iterable[Registration]) -> bool:
    """Whether the files of all these blocks are there."""
    blocks = manifest["blocks"]
    return all((folder / blocks[key_text(block.parameters)]["file"]).is_file() for block in registrations)


def read_systems(
    folder: Path, manifest: Manifest, registrations: Sequence[Registration], parameters: Mapping[str, Tensor]
) -> list[System]:
    """The systems of these blocks. Raises FileNotFoundError with all files that are missing, ValueError for tensors of
    other shapes than the blocks have."""
    blocks = manifest["blocks"]
    files = {block.parameters: folder / blocks[key_text(block.parameters)]["file"] for block in registrations}
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
    manifest = manifest_of(spectrum.net, spectrum.registrations, spectrum.mode, case=spectrum.case)
    write_manifest(folder, manifest)
    write_blocks(folder, manifest, spectrum.systems)


def load_spectrum(
    net: CompiledModule, folder: str | Path, *, scale: float | Tensor = 1.0, damping: Damping = 0.0
) -> ModelSpectrum:
    """Load a spectrum that `save_spectrum` or `fit_spectrum` wrote for the same model.

    Args:
        net: the compiled module. Its parameters and the approximations of its blocks must be those of the folder.
        scale, damping: as of `FisherEstimator.spectrum`.

    Raises ValueError with all that differs between the manifest and the module, FileNotFoundError for missing files.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    registrations = [block for block in net.registrations if not manifest["parameters"].keys().isdisjoint(block.owners)]
    here = manifest_of(net, registrations, manifest["mode"])
    settings = {name: value for name, value in manifest.items() if name not in here}
    refuse_other(folder, manifest, here | settings)
    parameters = dict(net.model.named_parameters())
    systems = read_systems(folder, manifest, registrations, parameters)
    owners = dict.fromkeys(name for block in registrations for name in block.owners)
    shapes = {name: parameters[name].shape for name in owners}
    return ModelSpectrum(systems, shapes, scale, damping, net=net, mode=manifest["mode"], case=manifest.get("case"))


Parts = int | Sequence[Iterable[str]]


def fit_spectrum(
    net: CompiledModule,
    batches: Iterable[Any],
    *,
    mode: str = "gradients",
    case: str | None = None,
    parts: Parts = 1,
    memory: int | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    scale: float | Tensor = 1.0,
    damping: Damping = 0.0,
    factor_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> ModelSpectrum:
    """Record, decompose and correct the factors of a model, part by part. All cases have the same weight.

    spectrum = kfac_fx.fit_spectrum(net, loader, case="sequence", parts=4, folder="factors")

    Args:
        net: the compiled module.
        batches: of the data, iterated once or twice for every part: a list or a DataLoader. Sums over cases do not
            depend on their order, so it may shuffle, if every pass has all cases (no `drop_last`); the samples of a
            part are then others than with other parts. A folder needs the same order every time.
        mode: the estimation mode of the factors and of the correction; see `FisherEstimator`.
        case: of the correction, see `ModelSpectrum.correct`; None: the eigenvalues are those of the factors.
        parts: how many parts of about equal memory, or the names of the parameters of every part.
        memory: bytes that the factors of a part and their eigenvectors may take, in place of `parts`.
        folder: where the blocks are written as they are made, see `save_spectrum`. If it holds some of them, they
            are not computed again; the loss, the numbers of the model, the first batch and the number of batches must
            be those of the folder. None: nowhere.
        seed: of the samples.
        scale, damping, dtype, device: as of `FisherEstimator.spectrum`; factor_dtype: as of `FisherEstimator`.

    Raises:
        RegistrationError: the parts do not fit the registrations, or a block is larger than `memory`.
        TypeError: the module is not compiled.
        ValueError: there are no batches, they are an iterator, which ends after the first part, or the folder holds
            another spectrum.
    """
    if not isinstance(net, CompiledModule):
        raise TypeError(
            f"fit_spectrum takes a compiled module, and got a {type(net).__name__}: write "
            "net = kfac_fx.compile(model, ...) and fit_spectrum(net, ...)"
        )
    if iter(batches) is batches:
        raise ValueError("`batches` is an iterator, which cannot be repeated: pass a list or a DataLoader.")
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("`batches` has no batches.")
    batch = as_batch(first)
    net.recorder(batch.args, batch.kwargs)  # proves the registrations, which may change them
    parameters = dict(net.model.named_parameters())
    chosen = chosen_parts(net.registrations, parameters, parts, memory, factor_dtype)
    registrations = [block for names in chosen for block in net.registrations if block.owners[0] in names]
    settings: dict[str, Any] = {"case": case, "seed": seed, "factor_dtype": str(factor_dtype), "dtype": str(dtype)}
    path = None if folder is None else Path(folder)
    if path is not None:
        loss = net.captures.arguments.loss
        settings |= {
            "loss": digest(loss.make) if isinstance(loss, LossSpec) else repr(loss),
            "numbers of the model": digest(net.model),
            "first batch": digest_of(batch),
            "batches": len(batches) if isinstance(batches, Sized) else None,
        }
    manifest = manifest_of(net, sorted(registrations, key=net.registrations.index), mode, **settings)
    if path is not None:
        write_manifest(path, manifest)
    systems: list[System] = []
    for names in chosen:
        blocks = [block for block in net.registrations if block.owners[0] in names]
        if path is not None and is_written(path, manifest, blocks):
            systems += read_systems(path, manifest, blocks, parameters)
            continue
        part = fit_part(net, batches, names, mode, case, seed, factor_dtype, dtype, device)
        if path is not None:
            write_blocks(path, manifest, part.systems)
        systems += part.systems
    owners = dict.fromkeys(name for block in net.registrations for name in block.owners)
    shapes = {name: parameters[name].shape for name in owners if any(name in names for names in chosen)}
    return ModelSpectrum(systems, shapes, scale, damping, net=net, mode=mode, case=case)


def fit_part(
    net: CompiledModule,
    batches: Iterable[Any],
    names: Iterable[str],
    mode: str,
    case: str | None,
    seed: int,
    factor_dtype: torch.dtype | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> ModelSpectrum:
    """The spectrum of the blocks of some parameters."""
    estimator = FisherEstimator(
        net, variables=names, exps=(), estimation_mode=mode, seed=seed, factor_dtype=factor_dtype
    )
    for item in batches:
        batch = as_batch(item)
        estimator.update_covariances(*batch.args, targets=batch.targets, fold=False, **batch.kwargs)
    estimator.fold()
    spectrum = estimator.spectrum(damping=0.0, dtype=dtype, device=device)
    if case is None:
        return spectrum
    of_parameters = next(iter(net.model.parameters())).device
    generator = torch.Generator(of_parameters).manual_seed(seed + 1)
    return spectrum.correct(batches, case, generator=generator)


# --- which parts ------------------------------------------------------------------------------------------------------


def chosen_parts(
    registrations: Sequence[Registration],
    parameters: Mapping[str, Tensor],
    parts: Parts,
    memory: int | None,
    dtype: torch.dtype | None = None,
) -> list[frozenset[str]]:
    """The names of the parameters of every part.

    Raises RegistrationError if named parts do not fit the registrations or overlap, or a block exceeds `memory`;
    ValueError for a number of parts below 1.
    """
    if not isinstance(parts, int):
        named = [frozenset(names) for names in parts]
        for names in named:
            check_variables(names, registrations)
        if twice := sorted(name for name in frozenset().union(*named) if sum(name in names for names in named) > 1):
            raise RegistrationError(f"parameters are in several parts: {', '.join(twice)}")
        return named
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}.")
    units = [
        (names, sum(bytes_of(block, parameters, dtype) for block in blocks)) for names, blocks in joint(registrations)
    ]
    if memory is not None and (
        wide := [(", ".join(sorted(names)), f"{size:,}") for names, size in units if size > memory]
    ):
        raise RegistrationError(
            f"memory={memory:,} bytes are too few for the factors of these blocks:\n{table(wide)}\n"
            "Pass more, or a smaller dense_limit to kfac_fx.compile."
        )
    bound = memory if memory is not None else smallest_bound([size for _, size in units], parts)
    return pack_units(units, bound)


def joint(registrations: Sequence[Registration]) -> list[tuple[frozenset[str], list[Registration]]]:
    """Registrations that have parameters in common, as pieces of one have, and the names of these parameters."""
    units = [[registrations[n] for n in places] for places in connected([block.owners for block in registrations])]
    return [(frozenset(name for block in unit for name in block.owners), unit) for unit in units]


def pack_units(units: Sequence[tuple[frozenset[str], int]], bound: int) -> list[frozenset[str]]:
    """Neighbors together, as long as their bytes are within the bound."""
    parts: list[frozenset[str]] = []
    room = 0
    for names, size in units:
        if not parts or size > room:
            parts.append(frozenset())
            room = bound
        parts[-1] |= names
        room -= size
    return parts


def smallest_bound(sizes: Sequence[int], parts: int) -> int:
    """The smallest number of bytes with which neighbors fit into so many parts."""
    low, high = max(sizes), sum(sizes)
    units = [(frozenset[str](), size) for size in sizes]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(pack_units(units, middle)) <= parts else (middle + 1, high)
    return low


def bytes_of(registration: Registration, parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> int:
    """Bytes of the factors of a block while they are decomposed: sums, averages and eigenvectors of every side, and
    the eigenvalues."""
    item = (dtype or factor_dtype(registration, parameters)).itemsize
    elements = sum(parameters[name].numel() for name in registration.owners)
    shapes = registration.factor_shapes(elements)
    eigenvalues = elements if registration.matrix is None else math.prod(registration.matrix.shape)
    return (eigenvalues + 3 * sum(map(math.prod, shapes.values()))) * item
