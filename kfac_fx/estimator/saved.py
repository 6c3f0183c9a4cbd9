"""Spectra and queries in folders: saved, and loaded for the same model.

A folder has one safetensors file a block, and a manifest in JSON that says of which model, weights, loss and data they
are (`kfac_fx.estimator.files` has the rules of all files). The file of a block of a spectrum has its eigenvalues,
"values", the tensors that its eigenvectors consist of, "operator 0" and so on, and the factors that were decomposed, by
their names: "A", "G" and "positions", or "F". That of queries has their matrices, "matrix", or "left" and "right" of a
low rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.batches import digest_of_data
from kfac_fx.estimator.files import (
    damaged,
    is_there,
    path_of,
    plain_name,
    read_tensors,
    remove_others,
    write_tensors,
    writing,
)
from kfac_fx.estimator.manifests import (
    FORMAT,
    NAME,
    Manifest,
    is_written,
    made_of,
    read_manifest,
    refuse_other,
    refuse_other_making,
    settled,
    warn_of_no_digests,
    write_manifest,
)
from kfac_fx.estimator.model_spectrum import ModelSpectrum
from kfac_fx.estimator.queries import OF_QUERIES, Queries, recording
from kfac_fx.estimator.weights import Weights
from kfac_fx.fisher.block import key_text, make_groups
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.spectrum import Damping
from kfac_fx.fisher.systems import System
from kfac_fx.linalg.arguments import a_process_group, optional
from kfac_fx.linalg.processes import Replicas
from kfac_fx.passes.errors import fatal
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import real_parameters
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.case_gradients import LowRank, QueryGradients
from kfac_fx.recording.statistics import Key

VALUES, OPERATOR = "values", "operator "
OURS = re.compile(
    r"(block-\d{5}(-[0-9a-f]{12})?|progress-[0-9a-f]{12})\.safetensors|.*\.\d+(-\d+)?\.part|manifest\.json\.part"
)
UNCOMPARED = ("made of", "progress")  # entries that other checks compare


# --- manifests --------------------------------------------------------------------------------------------------------


def manifest_of(net: CompiledModule, registrations: Iterable[Registration], mode: str, **settings: Any) -> Manifest:
    """The description of a folder without its files. settings: how they were made, which a resumed run must share."""
    registrations = list(registrations)
    parameters = real_parameters(net.model.named_parameters())
    owners = dict.fromkeys(name for registration in registrations for name in registration.owners)
    return {
        "format": FORMAT,
        "model": name_of(net),
        "mode": mode,
        "parameters": {name: list(parameters[name].shape) for name in owners},
        "blocks": {
            key_text(registration.parameters): {
                "approximation": registration.approximation,
                "sides": list(registration.blocks),
            }
            for registration in registrations
        },
        **settings,
    }


def name_of(net: CompiledModule) -> str:
    """The name of the class of a model. fully_shard gives the model a class whose name begins with FSDP."""
    return class_of(net.model).__name__.removeprefix("FSDP")


def compared(manifest: Manifest) -> Manifest:
    """The entries of a manifest that those of another folder of the same kind share: without files and digests."""
    blocks = {
        key: {name: value for name, value in block.items() if name not in ("file", "digest")}
        for key, block in manifest["blocks"].items()
    }
    kept = {name: value for name, value in manifest.items() if name not in UNCOMPARED}
    return {**kept, "format": FORMAT, "blocks": blocks}


def read_spectrum_manifest(folder: Path) -> Manifest:
    """See `read_manifest`. Raises ValueError for a manifest that is not of a spectrum, too."""
    manifest = read_manifest(folder)
    path = folder / NAME
    blocks, parameters = manifest.get("blocks"), manifest.get("parameters")
    if not isinstance(blocks, dict) or not isinstance(parameters, dict) or not isinstance(manifest.get("mode"), str):
        raise damaged(path, "is not of a spectrum", "Pass a folder of save_spectrum or fit_spectrum.")
    mappings = {"made of": manifest.get("made of", {}), "progress": manifest.get("progress", {}), **blocks}
    if wrong := [name for name, entry in mappings.items() if not isinstance(entry, dict)]:
        raise damaged(path, f"is not of a spectrum: the entry {wrong[0]!r} is no mapping")
    for block in blocks.values():
        if "file" in block:
            plain_name(block["file"], path)
    return manifest


# --- files ------------------------------------------------------------------------------------------------------------


def write_blocks(folder: Path, numbers: Mapping[str, int], systems: Sequence[System]) -> dict[str, dict[str, str]]:
    """Write the files of all blocks of the systems. Returns their entries in the manifest.

    numbers: of all blocks of the folder, by the text of their keys.
    """
    entries = {}
    for system in systems:
        for index, registration in enumerate(system.group.registrations):
            key = key_text(registration.parameters)
            operators = system.group.operators_of(index, system.operators)
            tensors = {VALUES: system.values[index], **{f"{OPERATOR}{n}": op for n, op in enumerate(operators)}}
            tensors |= {name: factor[index] for name, factor in system.factors.items()}
            name, digest = write_tensors(folder / f"block-{numbers[key]:05}-{{}}.safetensors", tensors)
            entries[key] = {"file": name, "digest": digest}
    return entries


def with_files(manifest: Manifest, entries: Mapping[str, Mapping[str, str]]) -> Manifest:
    """A manifest with the files of some of its blocks."""
    return {**manifest, "blocks": {key: {**of, **entries.get(key, {})} for key, of in manifest["blocks"].items()}}


def files_of(manifest: Manifest) -> list[str]:
    """The files that a manifest names."""
    progress = manifest.get("progress", {})
    entries = [*manifest["blocks"].values(), *progress.get("blocks", {}).values(), progress]
    return [entry["file"] for entry in entries if "file" in entry]


def are_written(manifest: Manifest, registrations: Iterable[Registration]) -> bool:
    """Whether a manifest has the files of all these blocks."""
    return all("file" in manifest["blocks"][key_text(block.parameters)] for block in registrations)


def read_systems(
    folder: Path,
    blocks: Mapping[str, Any],
    registrations: Sequence[Registration],
    parameters: Mapping[str, Tensor],
    factors: bool = False,
) -> list[System]:
    """The systems of these blocks.

    Args:
        blocks: the entries of the manifest, by the text of the keys.
        factors: with the factors, which nothing but a file needs.

    Raises FileNotFoundError with all blocks that are missing, ValueError for a file that is not the one of the
    manifest, or has tensors of other shapes than its block.
    """
    entries = {block.parameters: blocks[key_text(block.parameters)] for block in registrations}
    absent = [key for key, entry in entries.items() if "file" not in entry or not is_there(folder / entry["file"])]
    if absent:
        first = entries[absent[0]].get("file", f"that of {key_text(absent[0])}")
        raise FileNotFoundError(
            f"{len(absent)} of {len(entries)} blocks are missing in {str(folder)!r}, the first is {first}. The run "
            "that made it did not end; repeat it with the same folder, and it resumes."
        )
    groups = make_groups(registrations, without_data(parameters), roots=(), damping=torch.zeros(()))
    return [read_system(group, folder, entries, parameters, factors) for group in groups]


def without_data(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of these shapes on the meta device."""
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in parameters.items()}


def read_system(
    group: BlockGroup,
    folder: Path,
    entries: Mapping[Key, Mapping[str, str]],
    parameters: Mapping[str, Tensor],
    factors: bool,
) -> System:
    device = parameters[group.registrations[0].owners[0]].device
    values, operators, others = [], [], []
    light = group.without_factors(range(len(group)))
    for registration in group.registrations:
        entry = entries[registration.parameters]
        path = folder / entry["file"]
        tensors, _ = read_tensors(path, str(device), digest=entry.get("digest"))
        names = [f"{OPERATOR}{n}" for n in range(sum(name.startswith(OPERATOR) for name in tensors))]
        if not names or not {VALUES, *names} <= tensors.keys():
            raise damaged(path, f"has no eigenvalues and eigenvectors of {registration}, but {', '.join(tensors)}")
        of_block = [tensors[name] for name in names]
        if tuple(tensors[VALUES].shape) != group.shape:
            raise damaged(
                path,
                f"has eigenvalues {list(tensors[VALUES].shape)}, and {registration} is a matrix {list(group.shape)}",
            )
        refuse_other_vectors(path, light, registration, tensors[VALUES], of_block)
        values.append(tensors[VALUES])
        operators.append(of_block)
        others.append({name: tensor for name, tensor in tensors.items() if name not in (VALUES, *names)})
    light.dtype, light.device = values[0].dtype, device
    kept = {name: torch.stack([of[name] for of in others]) for name in others[0]} if factors else {}
    return System(light, torch.stack(values), light.stack_operators(operators), kept)


def refuse_other_vectors(
    path: Path, group: BlockGroup, registration: Registration, values: Tensor, operators: Sequence[Tensor]
) -> None:
    """Raises ValueError if the eigenvectors in a file do not turn the matrix of its block, or are no numbers."""
    wrong = [tensor.dtype for tensor in (values, *operators) if not tensor.is_floating_point()]
    one = group.without_factors([group.registrations.index(registration)])
    square = all(operator.dim() < 4 or operator.shape[-1] == operator.shape[-2] for operator in operators)
    try:
        turned = one.to_eigenbasis(values.unsqueeze(0).to("meta"), [operator.to("meta") for operator in operators])
        fits = tuple(turned.shape[1:]) == tuple(values.shape)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if fatal(error):
            raise
        fits = False
    if wrong or not (fits and square):
        shapes = ", ".join(f"{list(operator.shape)} of {operator.dtype}" for operator in operators)
        raise damaged(path, f"has eigenvectors {shapes}, which do not fit {registration}")


# --- saved and loaded -------------------------------------------------------------------------------------------------


def save_spectrum(spectrum: ModelSpectrum, folder: str | Path) -> None:
    """Write a spectrum into a folder: one safetensors file a block, and a manifest of model, weights, loss and blocks.

    A spectrum of the same blocks that is there is replaced, and a process that is killed meanwhile leaves the old one.
    The weights are those that the net has now, which must be those of the spectrum. The files have A and G, too, unless
    the spectrum was loaded itself, or fitted in several parts. If its sums are over several processes, the first one
    writes.

    Raises ValueError if the folder holds another kind of spectrum: of another model, mode or case, or a fitted one; and
    if the weights have changed since the spectrum was made.
    """
    folder, net = path_of(folder), spectrum.net
    spectrum.refuse_other_weights()
    registrations = sorted(spectrum.registrations, key=lambda block: list(net.registrations).index(block))
    manifest = manifest_of(net, registrations, spectrum.mode, case=spectrum.case)
    manifest["made of"] = made_of(net) | ({} if spectrum.data is None else {"data": spectrum.data})
    if spectrum.replicas is not None and spectrum.replicas.rank:
        return
    numbers = {key: number for number, key in enumerate(manifest["blocks"])}
    is_written(folder)  # raises for what is no folder, before one is made
    with writing(folder):
        if is_written(folder):
            refuse_other(folder, compared(read_spectrum_manifest(folder)), compared(manifest))
        commit(folder, with_files(manifest, write_blocks(folder, numbers, spectrum.systems)))


def commit(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder, and remove the files that it does not name."""
    write_manifest(folder, manifest)
    remove_others(folder, OURS, files_of(manifest))


def load_spectrum(
    net: CompiledModule,
    folder: str | Path,
    *,
    scale: float | Tensor = 1.0,
    damping: Damping = 0.0,
    batches: Iterable[Any] | None = None,
    any_weights: bool = False,
    process_group: Any = None,
) -> ModelSpectrum:
    """Load a spectrum that `save_spectrum` or `fit_spectrum` wrote for the same model.

    Args:
        net: the compiled module. Its parameters and the approximations of its blocks must be those of the folder, and
            so must its weights and its loss.
        scale, damping: as of `FisherEstimator.spectrum`.
        batches: the data that the folder must be of, if `fit_spectrum` wrote it; None: any.
        any_weights: take a folder of other weights, another loss or other data, with a warning that says so.
        process_group: of torch.distributed, over which `correct` sums; each process loads the folder. None: this one.

    A folder of an earlier version, without digests, is loaded with a warning.

    A folder that another process replaces meanwhile is read as it was before, or as it is then.

    Raises ValueError with all that differs between the folder and the module, and for a file that is not whole;
    FileNotFoundError for missing files.
    """
    folder = path_of(folder)
    optional(a_process_group, "process_group", process_group)
    parameters = real_parameters(net.model.named_parameters())
    data = None if batches is None else cache(partial(digest_of_data, batches))
    manifest, registrations, systems = settled(
        folder, lambda: read_spectrum(net, folder, parameters, data, any_weights)
    )
    owners = dict.fromkeys(name for block in registrations for name in block.owners)
    return ModelSpectrum(
        systems,
        {name: parameters[name].shape for name in owners},
        scale,
        damping,
        net=net,
        mode=manifest["mode"],
        case=manifest.get("case"),
        measured="measurement" in manifest,
        data=manifest.get("made of", {}).get("data"),
        replicas=None if process_group is None else Replicas(process_group),
        any_weights=any_weights,
    )


def read_spectrum(
    net: CompiledModule,
    folder: Path,
    parameters: Mapping[str, Tensor],
    data: Callable[[], str] | None,
    any_weights: bool,
) -> tuple[Manifest, list[Registration], list[System]]:
    """The manifest, the blocks, and their systems; see `load_spectrum`. data: the digest that the data must have; None:
    any."""
    manifest = read_spectrum_manifest(folder)
    registrations = [block for block in net.registrations if not manifest["parameters"].keys().isdisjoint(block.owners)]
    here = manifest_of(net, registrations, manifest["mode"])
    settings = {name: value for name, value in manifest.items() if name not in here}
    refuse_other(folder, compared(manifest), compared(here | settings))
    if manifest["format"] == FORMAT:
        here_made_of = made_of(net) | ({} if data is None else {"data": data()})
        refuse_other_making(net, folder, manifest.get("made of", {}), here_made_of, any_weights, "a spectrum")
    else:
        warn_of_no_digests(folder)
    return manifest, registrations, read_systems(folder, manifest["blocks"], registrations, parameters)


def without_factors(systems: Sequence[System]) -> list[System]:
    """The systems without the factors that were decomposed, which are in files."""
    return [replace(system, factors={}) for system in systems]


def save_queries(queries: Queries, folder: str | Path) -> None:
    """Write queries into a folder: one safetensors file a block, and a manifest of model, weights, loss and blocks.

    Queries that are there are replaced, and a process that is killed meanwhile leaves the old ones.

    Raises ValueError if the folder holds something else than queries, or the queries are of no compiled module.
    """
    folder, net = path_of(folder), queries.net
    if net is None:
        raise ValueError("queries that were made by hand know no compiled module: pass Queries(..., net=net).")
    if queries.weights is not None:
        queries.weights.refuse_others(net.model, "these queries were", OF_QUERIES)
    blocks, origin = {}, made_of(net)
    is_written(folder)  # raises for what is no folder, before one is made
    with writing(folder):
        if is_written(folder):
            read_queries_manifest(folder)
        for number, (key, tensors) in enumerate(queries.plain().items()):
            name, digest = write_tensors(folder / f"block-{number:05}-{{}}.safetensors", tensors)
            blocks[key] = {"file": name, "digest": digest}
        manifest = {"format": FORMAT, "model": name_of(net), "queries": len(queries), "blocks": blocks}
        commit(folder, {**manifest, "made of": origin})


def read_queries_manifest(folder: Path) -> Manifest:
    """See `read_manifest`. Raises ValueError for a manifest that is not of queries, too."""
    manifest, path = read_manifest(folder), folder / NAME
    blocks, number = manifest.get("blocks"), manifest.get("queries")
    if not isinstance(blocks, dict) or not blocks or not isinstance(number, int) or "mode" in manifest:
        raise damaged(path, "is not of queries", "Pass a folder of save_queries.")
    for entry in blocks.values():
        plain_name(entry.get("file") if isinstance(entry, dict) else None, path)
    return manifest


def load_queries(net: CompiledModule, folder: str | Path, *, any_weights: bool = False) -> Queries:
    """Load queries that `save_queries` wrote for the same model.

    Args:
        net: the compiled module, with the weights and the loss of the folder.
        any_weights: take a folder of other weights or of another loss, with a warning that says so.

    Raises ValueError with all that differs between the folder and the module, and for a file that is not whole;
    FileNotFoundError for missing files.
    """
    folder = path_of(folder)
    return settled(folder, lambda: read_queries(net, folder, any_weights))


def read_queries(net: CompiledModule, folder: Path, any_weights: bool) -> Queries:
    """See `load_queries`."""
    manifest = read_queries_manifest(folder)
    parameters = real_parameters(net.model.named_parameters())
    by_text = {key_text(block.parameters): block for block in net.registrations}
    blocks = manifest["blocks"]
    if unknown := [key for key in blocks if key not in by_text]:
        raise ValueError(
            f"{str(folder)!r} has queries of blocks that this {name_of(net)} has not: {'; '.join(unknown)}. Compile "
            "the model as it was compiled when they were saved."
        )
    refuse_other_making(net, folder, manifest.get("made of", {}), made_of(net), any_weights, "queries")
    matrices: dict[Key, QueryGradients] = {}
    for text, entry in blocks.items():
        registration, path = by_text[text], folder / entry["file"]
        tensors, _ = read_tensors(path, str(parameters[registration.owners[0]].device), digest=entry.get("digest"))
        low = tensors.keys() == {"left", "right"}
        if not low and tensors.keys() != {"matrix"}:
            raise damaged(path, f"has no queries of {registration}, but {', '.join(tensors)}")
        matrix: QueryGradients = LowRank(tensors["left"], tensors["right"]) if low else tensors["matrix"]
        (group,) = make_groups([registration], without_data(parameters), roots=(), damping=torch.zeros(()))
        if shape_of(matrix) != (manifest["queries"], *group.shape):
            wanted = [manifest["queries"], *group.shape]
            raise damaged(path, f"has queries {list(shape_of(matrix))}, and those of {registration} are {wanted}")
        matrices[registration.parameters] = matrix
    weights = None if any_weights else Weights.of(net.model)
    return Queries(matrices, recording(net, list(matrices), weights), net=net, weights=weights)


def shape_of(matrix: QueryGradients) -> tuple[int, ...]:
    """The shape of the matrices that these are or make."""
    return (*matrix.left.shape[:-1], matrix.right.shape[-1]) if isinstance(matrix, LowRank) else tuple(matrix.shape)
