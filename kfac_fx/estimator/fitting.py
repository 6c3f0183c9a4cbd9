"""Spectra that are fitted part by part, and folders of spectra and queries.

`fit_spectrum` has only the factors of one part of the parameters in memory. Every part records all batches anew, with
the same seed, so the result does not depend on the number of parts. The blocks of a part are written when it is done; a
run that is repeated with the same folder skips them. With `save_every` a run also resumes within a pass over the data,
from the sums of the batches so far.

**Folders**: spectra and queries are saved, and loaded for the same model.

A folder has one safetensors file a block, and a manifest in JSON that says of which model, weights, loss and data they
are (`kfac_fx.estimator.files` has the rules of all files). The file of a block of a spectrum has its eigenvalues,
"values", the tensors that its eigenvectors consist of, "operator 0" and so on, and the factors that were decomposed, by
their names: "A", "G" and "positions", or "F". That of queries has their matrices, "matrix", or "left" and "right" of a
low rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule, arguments_of_call
from kfac_fx.compiled.names import check_variables, refuse_other_variables, with_patterns
from kfac_fx.compiled.report import factor_dtype, fold
from kfac_fx.estimator.batches import (
    NO_DATA,
    Batch,
    NotFinite,
    batch_for,
    digest_of,
    digest_of_data,
    refuse_no_batches,
    telling_how_read,
    with_batch,
)
from kfac_fx.estimator.estimator import FisherEstimator, frozen_after
from kfac_fx.estimator.files import (
    FORMAT,
    NAME,
    OTHER_FOLDER,
    WITHOUT_DIGESTS,
    Manifest,
    damaged,
    differences,
    digest,
    is_there,
    is_written,
    made_of,
    path_of,
    plain_name,
    read_manifest,
    read_tensors,
    refuse_other,
    refuse_other_making,
    remove_others,
    settled,
    warn_of_no_digests,
    write_manifest,
    write_tensors,
    writing,
)
from kfac_fx.estimator.model_spectrum import Correction, ModelSpectrum
from kfac_fx.estimator.queries import OF_QUERIES, Queries, Weights, recording
from kfac_fx.fisher.block import key_text, make_groups
from kfac_fx.fisher.groups import BlockGroup, System
from kfac_fx.fisher.spectrum import Damping
from kfac_fx.linalg.arguments import (
    a_flag,
    a_precision,
    a_process_group,
    a_seed,
    explains_calls,
    optional,
    whole_number,
    wrong_kind,
)
from kfac_fx.linalg.processes import Replicas, is_sharded
from kfac_fx.linalg.vectors import connected
from kfac_fx.losses.distributions import Measurement, check_mode
from kfac_fx.passes.errors import LossError, RegistrationError, fatal, plural, table, warn_user
from kfac_fx.passes.graphs.labels import without_loss
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import real_parameters
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.case_gradients import LowRank, QueryGradients, warn_of_noise
from kfac_fx.recording.model_checks import refuse_without_blocks
from kfac_fx.recording.progress import tracked
from kfac_fx.recording.statistics import Key

VALUES, OPERATOR = "values", "operator "
OURS = re.compile(
    r"(block-\d{5}(-[0-9a-f]{12})?|progress-[0-9a-f]{12})\.safetensors|.*\.\d+(-\d+)?\.part|manifest\.json\.part"
)
LOST = (
    "no loss that is known depends on {}, so these parameters have no block, and factors, determinants and scores "
    "leave them out: name their loss with compile(..., loss=lambda outputs: [...]). If that is meant, name the others "
    "with variables=."
)
UNCOMPARED = ("made of", "progress")  # entries that other checks compare


# --- manifests --------------------------------------------------------------------------------------------------------

NO_CASES = "`batches` has no cases: all its batches are empty, or all targets are ignored."
NONE_IN_MASK = (
    " Or the padding mask is inverted: it leaves out every position with a target. A mask is nonzero where a position "
    "is real. If yours is True at padding, invert it with a function of what forward takes, as in "
    "padding_mask=lambda ids, pad: ~pad."
)


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
    if the weights have changed since the spectrum was made. TypeError for what is no ModelSpectrum.
    """
    if not isinstance(spectrum, ModelSpectrum):
        makes = "spectrum = fit_spectrum(net, batches), or estimator.spectrum(),"
        raise wrong_kind("save_spectrum", "a ModelSpectrum", spectrum, f"{makes} and save_spectrum(spectrum, folder)")
    folder, net = path_of(folder), spectrum.net
    spectrum.refuse_other_weights()
    registrations = sorted(spectrum.registrations, key=lambda block: list(net.registrations).index(block))
    measured = {"measurement": MEASURED} if spectrum.measured else {}
    manifest = manifest_of(net, registrations, spectrum.mode, case=spectrum.case, **measured)
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


@explains_calls()
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
        batches: the data that the folder must be of. It has a digest of them if one process wrote it by
            `fit_spectrum(..., folder=)`, or if `save_spectrum` wrote a spectrum of such a folder. None: any data.
        any_weights: take a folder of other weights, another loss or other data, with a warning that says so.
        process_group: of torch.distributed, over which `correct` sums; each process loads the folder. None: this one.

    A folder of an earlier version, without digests, is loaded with a warning.

    A folder that another process replaces meanwhile is read as it was before, or as it is then.

    Raises ValueError with all that differs between the folder and the module, for `batches` of a folder that has no
    digest of its data, and for a file that is not whole; FileNotFoundError for missing files.
    """
    refuse_no_net("load_spectrum(net, folder)", net)
    folder = path_of(folder)
    a_flag("any_weights", any_weights)
    optional(a_process_group, "process_group", process_group)
    if batches is not None:
        refuse_no_batches("load_spectrum", batches)
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
    refuse_other(folder, compared(manifest), compared(here | settings), OTHER_NET)
    origin = manifest.get("made of", {})
    unknown = origin.get("data") is None
    if data is not None and unknown:
        tell_unknown_data(folder, any_weights)
    if manifest["format"] == FORMAT:
        here_made_of = made_of(net) | ({} if data is None or unknown else {"data": data()})
        refuse_other_making(net, folder, origin, here_made_of, any_weights, "a spectrum")
    else:
        warn_of_no_digests(folder)
    return manifest, registrations, read_systems(folder, manifest["blocks"], registrations, parameters)


OTHER_NET = "Compile the model with the arguments that it had when the folder was written, or read another folder."
OR_AS_IT_IS = (
    " A fit that has ended may be taken as it is, with the numbers of the weights of its time: "
    "kfac_fx.load_spectrum(net, folder, any_weights=True)."
)


def tell_unknown_data(folder: Path, allowed: bool) -> None:
    """Raises ValueError for `batches` that a folder cannot be compared with; or warns, if that is allowed."""
    text = (
        f"{str(folder)!r} has no digest of the data that it was made of, so `batches` cannot be compared with them. "
        "fit_spectrum(net, batches, folder=...) writes one, in one process and if all passes have the same batches."
    )
    if not allowed:
        raise ValueError(f"{text} Leave batches out, which takes a folder of any data, or fit it anew in this way.")
    warn_user(UserWarning(f"{text} It is taken as it is, because any_weights=True."))


def without_factors(systems: Sequence[System]) -> list[System]:
    """The systems without the factors that were decomposed, which are in files."""
    return [replace(system, factors={}) for system in systems]


def save_queries(queries: Queries, folder: str | Path) -> None:
    """Write queries into a folder: one safetensors file a block, and a manifest of model, weights, loss and blocks.

    Queries that are there are replaced, and a process that is killed meanwhile leaves the old ones.

    Raises ValueError if the folder holds something else than queries, or the queries are of no compiled module;
    TypeError for what are no Queries.
    """
    if not isinstance(queries, Queries):
        raise wrong_kind("save_queries", "Queries", queries, "save_queries(spectrum.precondition(batch), folder)")
    folder, net = path_of(folder), queries.net
    if net is None:
        raise ValueError("queries that were made by hand know no compiled module: pass Queries(..., net=net).")
    if queries.weights is not None:
        queries.weights.refuse_others("these queries were", OF_QUERIES)
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
    refuse_no_net("load_queries(net, folder)", net)
    a_flag("any_weights", any_weights)
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


MEASURED = "of a spectrum in memory"  # where a fit writes a digest of its measurement
NO_LOSS_TO_FIT = (
    "fit_spectrum fits the distribution behind a loss, and knows none of this model. Its modes differ in the targets, "
    'and "empirical" takes the true ones.\n'
    "Let forward return the outputs, and name the distribution that is nearest to your loss, as in "
    'kfac_fx.compile(model, loss="normal"). The gradients of your loss then make the eigenvalues: '
    'fit_spectrum(net, batches, case="sequence", measurement=loss), with loss(outputs, targets) of shape [examples].'
)
FACTORS, CORRECTION = "factors", "correction"  # the passes over the data

Parts = int | Sequence[Iterable[str]]


@explains_calls(
    several="Inputs and targets are one batch of the data: write fit_spectrum(net, [(x, y)]), or pass a DataLoader.",
    meant={"estimation_mode": "Write mode=....", "loader": "Write batches=loader."},
)
def fit_spectrum(
    net: CompiledModule,
    batches: Iterable[Any],
    *,
    mode: str = "gradients",
    case: str | None = None,
    measurement: Measurement | None = None,
    variables: Iterable[str] | None = None,
    parts: Parts = 1,
    memory: int | None = None,
    folder: str | Path | None = None,
    save_every: int | None = None,
    seed: int = 0,
    scale: float | Tensor = 1.0,
    damping: Damping = 0.0,
    factor_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    process_group: Any = None,
) -> ModelSpectrum:
    """Record, decompose and correct the factors of a model, part by part. All cases have the same weight.

    spectrum = kfac_fx.fit_spectrum(net, loader, case="sequence", parts=4, folder="factors")

    A batch whose sums are not finite is left out, with a warning that names its place: one NaN makes all sums NaN.

    Args:
        net: the compiled module.
        batches: of the data, iterated once for every part, and once more with a case: a list or a DataLoader; a
            generator where one pass is enough. Sums over cases do not depend on their order, so it may shuffle, if
            every pass has all cases (no `drop_last`); the samples of a part are then others than with other parts. A
            folder needs the same order every time.
        mode: the estimation mode of the factors and of the correction; see `FisherEstimator`. A measurement has no
            mode: its correction is of the true targets.
        case: of the correction, see `ModelSpectrum.correct`; None: the eigenvalues are those of the factors.
        measurement: whose gradient the correction squares instead of the loss's, such as a loss outside of forward; see
            `ModelSpectrum.correct`. The factors, and so the eigenvectors, are those of the model's distribution.
        variables: the parameters to fit, None for all: names of parameters, of modules with parameters, or patterns
            with `*`. Parameters that share a block must be named together.
        parts: how many parts of about equal memory, or such names for every part, which are all that are fitted.
        memory: bytes that the factors of a part and their eigenvectors may take, in place of `parts`.
        folder: where the blocks are written as they are made, see `save_spectrum`. If it holds some of them, they
            are not computed again; the loss, the weights, the first batch and the number of batches must be those of
            the folder. None: nowhere.
        save_every: write the sums of a pass over the data into the folder after so many batches, so that a run that is
            killed resumes there; the batches up to there are read and compared, and not recorded again. The sums take
            about the memory of the part's factors. None: a run resumes at its part.
        seed: of the samples.
        scale, damping, dtype, device: as of `FisherEstimator.spectrum`; factor_dtype: as of `FisherEstimator`.
        process_group: of torch.distributed, `group.WORLD` for all. All its processes call this, each with its own part
            of the data, and have the spectrum of all of them. A folder is one that all of them see; the first process
            writes into it. None: this process alone.

    Raises:
        FactorNotReady: parameters were frozen after the model was compiled.
        LossError: no loss of the model is known.
        RegistrationError: the variables or parts do not fit the registrations, a block is larger than `memory`, or no
            parameter is trained.
        TypeError: the module is not compiled, or an argument is of another kind than above.
        ValueError: there are no batches, or none that is finite, they are an iterator and several passes are needed,
            the folder holds another spectrum, or there is a measurement and no case.
    """
    refuse_no_net("fit_spectrum(net, ...)", net)
    if measurement is not None and case is None:
        raise ValueError(
            'a measurement is of the corrected eigenvalues, and case=None corrects none: pass case="sequence", or '
            'case="row" for one row an example.'
        )
    refuse_no_batches("fit_spectrum", batches)
    check_mode(mode)
    refuse_other_parts(parts)
    optional(whole_number(1, "bytes"), "memory", memory)
    optional(a_precision, "factor_dtype", factor_dtype)
    if variables is not None and not (variables := refuse_other_variables(variables, net)):
        raise RegistrationError("variables is empty: name parameters of the net, or leave it out for all.")
    a_seed("seed", seed)
    optional(whole_number(1, "batches"), "save_every", save_every)
    if save_every is not None and folder is None:
        raise ValueError("save_every needs a folder, into which the sums are written: pass folder=.")
    optional(a_process_group, "process_group", process_group)
    replicas = None if process_group is None else Replicas(process_group)
    several = replicas is not None and replicas.number > 1
    if several and save_every is not None:
        raise ValueError("save_every is for one process: several resume at their part.")
    if replicas is None and (number := Replicas().number) > 1:
        sharded = any(map(is_sharded, net.parameters()))
        warn_user(
            UserWarning(
                f"{'the model is sharded' if sharded else f'there are {number} processes'}, and fit_spectrum has no "
                "process_group: every process fits its own data, and has another spectrum. Pass "
                "process_group=torch.distributed.group.WORLD."
                + ("" if sharded else " Nothing is wrong if this process has all data.")
            )
        )
    iterator = iter(batches)
    batch = first_batch(net, iterator) if replicas is None else replicas.together(partial(first_batch, net, iterator))
    if replicas is not None and several:
        check_parts_of_data(replicas, net, batch, batches)
    args, kwargs, _ = net.placed(batch.args, *arguments_of_call(net, batch.args, batch.kwargs, batch.targets))
    with telling_how_read(batches, batch, 1):
        recorder = net.recorder(args, kwargs)  # proves the registrations, which may change them
    if recorder.whole and net.knows_no_loss:
        raise LossError(NO_LOSS_TO_FIT)
    refuse_without_blocks(net.registrations, net.model.named_parameters())
    if case is None:  # a correction has a warning of its own
        warn_of_noise(net.model, "the factors of a fit")
    parameters = real_parameters(net.model.named_parameters())
    fitted = net.registrations
    lost = without_loss(recorder.program)
    if variables is not None:
        wanted = with_patterns(variables, fitted)
        check_variables(wanted, fitted, lost=lost)
        fitted = tuple(block for block in fitted if block.owners[0] in wanted)
    elif lost:
        warn_user(UserWarning(LOST.format(fold(lost))))
    chosen = chosen_parts(fitted, parameters, parts, memory, factor_dtype)
    passes = len(chosen) * (1 if case is None else 2)
    once = iterator is batches
    if once and passes > 1:
        raise ValueError(
            f"`batches` is an iterator, which ends after one pass, and {passes} are needed, one for each part and one "
            "more for its case: pass a list or a DataLoader."
        )
    registrations = [block for names in chosen for block in net.registrations if block.owners[0] in names]
    refuse_frozen(net, registrations)
    of_fit = OfFit(mode, case, measurement, seed, factor_dtype, dtype, device, process_group)
    kept: FitFolder | None = None
    if folder is not None:
        settings = {
            "case": case,
            "seed": seed,
            "factor_dtype": str(factor_dtype),
            "dtype": str(dtype),
            "first batch": digest_of(batch),
            "batches": len(batches) if isinstance(batches, Sized) else None,
            **({} if measurement is None else {"measurement": digest(measurement)}),
        }
        if replicas is not None and several:  # those of the first process
            settings = replicas.told(settings | {"processes": replicas.number})[0]
        here = manifest_of(net, sorted(registrations, key=net.registrations.index), mode, **settings)
        here |= {"made of": made_of(net)}
        kept = FitFolder.of(path_of(folder), here, save_every, replicas)
    batches = chain([batch], iterator) if once else batches
    systems: list[System] = []
    not_finite = NotFinite()
    for names in chosen:
        blocks = [block for block in net.registrations if block.owners[0] in names]
        if kept is not None and are_written(kept.manifest, blocks):
            systems += read_systems(kept.path, kept.manifest["blocks"], blocks, parameters)
            continue
        part = fit_part(net, batches, names, of_fit, kept, not_finite)
        if kept is not None:
            kept.add(part.systems)
        systems += part.systems if kept is None and len(chosen) == 1 else without_factors(part.systems)  # for memory
    owners = dict.fromkeys(name for block in net.registrations for name in block.owners)
    shapes = {name: parameters[name].shape for name in owners if any(name in names for names in chosen)}
    data = None if kept is None else kept.data
    return ModelSpectrum(
        systems,
        shapes,
        scale,
        damping,
        net=net,
        mode=mode,
        case=case,
        measured=measurement is not None,
        data=data,
        replicas=replicas,
    )


def refuse_no_net(call: str, net: object) -> None:
    """Raises TypeError for what is no compiled module. call: of the function, as in "load_spectrum(net, folder)"."""
    if not isinstance(net, CompiledModule):
        function, _, _ = call.partition("(")
        raise wrong_kind(function, "a compiled module", net, f"net = kfac_fx.compile(model, ...) and {call}")


def first_batch(net: CompiledModule, batches: Iterator[Any]) -> Batch:
    """Raises ValueError if there is none, and TypeError if it does not fit forward."""
    first = next(batches, None)
    if first is None:
        raise ValueError("`batches` has no batches.")
    return batch_for(net.model, first, "batch 1 of `batches`")


def refuse_frozen(net: CompiledModule, registrations: Iterable[Registration]) -> None:
    """Raises FactorNotReady for blocks of parameters that were frozen after compile: nothing is recorded of them."""
    every = net.model.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in every if parameter.requires_grad}
    if frozen := [name for block in registrations if trained.isdisjoint(block.owners) for name in block.owners]:
        raise frozen_after(frozen)


def check_parts_of_data(replicas: Replicas, net: CompiledModule, batch: Batch, batches: Iterable[Any]) -> None:
    """Warn if all processes have the same batch, which is then counted several times. Raises ValueError for other
    numbers of batches where a forward is one of all processes."""
    number = len(batches) if isinstance(batches, Sized) else None
    told = replicas.told((digest_of(batch), number))
    if len({of_batch for of_batch, _ in told}) == 1:
        warn_user(
            UserWarning(
                f"{replicas.number} processes begin with the same batch: each of them records all data. Give every "
                "process its own part, such as torch.utils.data.Subset(data, range(rank, len(data), processes))."
            )
        )
    numbers = [of_process for _, of_process in told]
    if any(map(is_sharded, net.parameters())) and len(set(numbers)) > 1:
        raise ValueError(
            f"the processes of a sharded model have {', '.join(map(str, numbers))} batches, and a forward is one of "
            "all of them: give all the same number of batches, which may be of different sizes."
        )


@dataclass(frozen=True)
class OfFit:
    """The options of `fit_spectrum` that every part has."""

    mode: str
    case: str | None
    measurement: Measurement | None
    seed: int
    factor_dtype: torch.dtype | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    process_group: Any = None

    @property
    def alone(self) -> bool:
        """Whether one process has all batches."""
        return self.process_group is None or Replicas(self.process_group).number == 1

    def generator(self, device: torch.device, place: int) -> torch.Generator:
        """The random stream of a pass over the data. Those of several processes differ."""
        common = torch.Generator(device).manual_seed(self.seed + place)
        return common if self.process_group is None else Replicas(self.process_group).stream(common, place)


def fit_part(
    net: CompiledModule,
    batches: Iterable[Any],
    names: Iterable[str],
    options: OfFit,
    folder: FitFolder | None,
    not_finite: NotFinite,
) -> ModelSpectrum:
    """The spectrum of the blocks of some parameters."""
    names, of_parameters = sorted(names), next(iter(net.model.parameters())).device
    uncorrected = None if folder is None else folder.decomposed(net, names)
    if uncorrected is None:
        estimator = FisherEstimator(
            net,
            variables=names,
            exps=(),
            estimation_mode=options.mode,
            seed=options.generator(of_parameters, 0).initial_seed(),
            factor_dtype=options.factor_dtype,
            process_group=options.process_group,
        )

        def record(batch: Batch) -> Tensor | None:
            estimator.update_covariances(*batch.args, targets=batch.targets, fold=False, **batch.kwargs)
            return estimator.kept_is_finite

        pending = estimator.pending_state, estimator.load_pending
        over_data(net, batches, FACTORS, names, record, *pending, folder, not_finite)
        not_finite.tell(refuse=options.alone)
        if options.alone and not int(estimator.pending_state()["cases"]):
            is_masked = net.captures.capturing.arguments.padding_mask is not None
            raise ValueError(NO_CASES + NONE_IN_MASK * is_masked)
        estimator.fold()
        spectrum = estimator.spectrum(damping=0.0, dtype=options.dtype, device=options.device)
        del estimator, record  # the spectrum has a copy of the factors
    else:
        shapes = {
            name: parameter.shape
            for name, parameter in real_parameters(net.model.named_parameters()).items()
            if name in names
        }
        spectrum = ModelSpectrum(uncorrected, shapes, 1.0, 0.0, net=net, mode=options.mode)
    if options.case is None:
        return spectrum
    if folder is not None and uncorrected is None:
        folder.keep_decomposed(names, spectrum.systems)
    generator = options.generator(of_parameters, 1)
    correction = Correction(spectrum, options.case, measurement=options.measurement, generator=generator)
    of_sums = correction.state, correction.load_state
    over_data(net, batches, CORRECTION, names, correction.add, *of_sums, folder, not_finite)
    not_finite.tell(refuse=options.alone)
    return correction.result()


# --- passes over the data ---------------------------------------------------------------------------------------------


def over_data(
    net: CompiledModule,
    batches: Iterable[Any],
    stage: str,
    names: Sequence[str],
    take: Callable[[Batch], Tensor | None],
    state: Callable[[], dict[str, Tensor]],
    load_state: Callable[[Mapping[str, Tensor]], None],
    folder: FitFolder | None,
    not_finite: NotFinite,
) -> None:
    """Take all batches of a pass over the data, from the place where a run before this one stopped.

    Args:
        stage: `FACTORS` or `CORRECTION`.
        names: of the parameters of the part.
        take: returns whether the sums of the batch are finite, if it is known.
        state, load_state: of the sums.
        not_finite: gets the batches that are not.

    Raises ValueError if the batches up to there are not those of that run.
    """
    total = len(batches) if isinstance(batches, Sized) else 0
    shown = tracked(((1, item) for item in batches), total, f"{stage} of {plural(len(names), 'parameter')}")
    if folder is None:
        for number, item in enumerate(shown, 1):
            batch = batch_for(net.model, item, f"batch {number} of `batches`")
            with telling_how_read(batches, batch, number):
                not_finite.add(number, take(batch))
        return
    progress = folder.progress_of(stage, names)
    done = 0 if progress is None else progress.batches
    if progress is not None:
        load_state(progress.tensors)
    data, number = NO_DATA, 0
    for number, item in enumerate(shown, 1):
        batch = batch_for(net.model, item, f"batch {number} of `batches`")
        data = with_batch(data, batch)
        if number < done:
            continue
        if progress is not None and number == done:
            if data != progress.data:
                raise ValueError(
                    f"the first {done} batches are others than those whose sums are in {str(folder.path)!r}. Pass the "
                    "batches of that run, in the same order, or another folder."
                )
            continue
        with telling_how_read(batches, batch, number):
            not_finite.add(number, take(batch))
        if folder.save_every is not None and number % folder.save_every == 0:
            not_finite.tell(refuse=False)  # a run that resumes here does not know of them
            folder.keep_progress(Progress(stage, names, number, data, state()))
    if number < done:
        raise ValueError(
            f"{str(folder.path)!r} has the sums of {done} batches, and there are {number}. Pass the batches of that "
            "run, or another folder."
        )
    folder.end_of_pass(data)


@dataclass(frozen=True)
class Progress:
    """How far a pass over the data has come.

    Attributes:
        stage: `FACTORS` or `CORRECTION`.
        names: of the parameters of the part.
        batches: the number of batches whose sums these are.
        data: the digest of these batches.
        tensors: the sums, and the state of the random stream.
    """

    stage: str
    names: Sequence[str]
    batches: int
    data: str
    tensors: Mapping[str, Tensor]


@dataclass
class FitFolder:
    """The folder of one fit.

    Attributes:
        manifest: as it is in the folder.
        save_every: see `fit_spectrum`.
        data: the digest of the data, once a pass over them has ended; None: it is not known, or not the same in all
            passes.
    """

    path: Path
    manifest: Manifest
    save_every: int | None
    replicas: Replicas | None = None

    @staticmethod
    def of(path: Path, here: Manifest, save_every: int | None, replicas: Replicas | None) -> FitFolder:
        """A new folder, or that of a run that stopped. Raises ValueError if it is of another spectrum."""

        def opened() -> FitFolder:
            return FitFolder.opened(path, here, save_every, replicas)

        if replicas is None:
            return opened()
        folder = replicas.together(opened)  # before anything is written
        if not replicas.rank and not is_written(path):
            write_manifest(path, here)
        return folder

    @staticmethod
    def opened(path: Path, here: Manifest, save_every: int | None, replicas: Replicas | None) -> FitFolder:
        """See `of`."""
        if not is_written(path):
            if replicas is None:
                write_manifest(path, here)
            return FitFolder(path, here, save_every, replicas)
        saved = read_spectrum_manifest(path)
        if saved["format"] == WITHOUT_DIGESTS:
            raise ValueError(
                f"{str(path)!r} was written by an earlier version of kfac_fx, without digests, so a run cannot resume "
                "there: pass another folder. load_spectrum reads it."
            )
        weights_and_loss = {name: value for name, value in saved.get("made of", {}).items() if name != "data"}
        settings = not differences(compared(saved), compared(here))
        refuse_other(
            path,
            compared(saved) | {"made of": weights_and_loss},
            compared(here) | {"made of": here["made of"]},
            OTHER_FOLDER + (OR_AS_IT_IS if settings else ""),
        )
        return FitFolder(path, saved, save_every, replicas)

    @property
    def data(self) -> str | None:
        data: str | None = self.manifest["made of"].get("data")
        return data

    @property
    def numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.manifest["blocks"])}

    def commit(self, manifest: Manifest) -> None:
        commit(self.path, manifest)
        self.manifest = manifest

    def add(self, systems: Sequence[System]) -> None:
        """Write the blocks of a part that is done, in the first process."""
        if self.replicas is None:
            self.write(systems)
        else:
            self.replicas.together(partial(self.write, systems if self.replicas.rank == 0 else []))

    def write(self, systems: Sequence[System]) -> None:
        if not systems:
            return
        manifest = with_files(self.manifest, write_blocks(self.path, self.numbers, systems))
        self.commit({name: value for name, value in manifest.items() if name != "progress"})

    def end_of_pass(self, data: str) -> None:
        """Compare the data of a pass with those of the passes before it."""
        if self.replicas is not None and self.replicas.number > 1:
            return  # every process has a part of them
        making = self.manifest["made of"]
        known = making.get("data", data)
        if known is None or (known == data and "data" in making):
            return
        self.commit({**self.manifest, "made of": {**making, "data": data if known == data else None}})
        if known != data:
            warn_user(
                UserWarning(
                    f"two passes over the data had other batches, so {str(self.path)!r} does not say of which data it "
                    "is: they are shuffled, or changed at random. Its factors and their correction are of different "
                    "draws."
                )
            )

    # --- within a pass ------------------------------------------------------------------------------------------------

    def progress_entry(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The entry of the manifest about a part that is not done."""
        entry = self.manifest.get("progress", {})
        return entry if isinstance(entry, dict) and entry.get("names") == list(names) else {}

    def keep_progress(self, progress: Progress) -> None:
        name, of_file = write_tensors(self.path / "progress-{}.safetensors", progress.tensors)
        entry = {**self.progress_entry(progress.names), "names": list(progress.names), "file": name, "digest": of_file}
        entry |= {"stage": progress.stage, "batches": progress.batches, "data": progress.data}
        self.commit({**self.manifest, "progress": entry})

    def progress_of(self, stage: str, names: Sequence[str]) -> Progress | None:
        """How far a stopped run has come in a pass of a part; None if there is nothing of it."""
        entry = self.progress_entry(names)
        if entry.get("stage") != stage:
            return None
        path = self.path / plain_name(entry.get("file"), self.path / NAME)
        tensors, _ = read_tensors(path, digest=entry.get("digest"))
        if not isinstance(entry.get("batches"), int) or not isinstance(entry.get("data"), str):
            raise damaged(self.path / NAME, "does not say of which batches its sums are")
        return Progress(stage, names, entry["batches"], entry["data"], tensors)

    def keep_decomposed(self, names: Sequence[str], systems: Sequence[System]) -> None:
        """Write the blocks of a part before their correction, whose sums are of these eigenvectors."""
        if self.save_every is not None:
            blocks = write_blocks(self.path, self.numbers, systems)
            self.commit({**self.manifest, "progress": {"names": list(names), "blocks": blocks}})

    def decomposed(self, net: CompiledModule, names: Sequence[str]) -> list[System] | None:
        """The blocks of a part before their correction; None if they are not there."""
        blocks = self.progress_entry(names).get("blocks")
        if blocks is None:
            return None
        for entry in blocks.values():
            plain_name(entry.get("file"), self.path / NAME)
        registrations = [block for block in net.registrations if block.owners[0] in names]
        return read_systems(
            self.path, blocks, registrations, real_parameters(net.model.named_parameters()), factors=True
        )


# --- which parts ------------------------------------------------------------------------------------------------------


def chosen_parts(
    registrations: Sequence[Registration],
    parameters: Mapping[str, Tensor],
    parts: Parts,
    memory: int | None,
    dtype: torch.dtype | None = None,
) -> list[frozenset[str]]:
    """The names of the parameters of every part.

    Raises RegistrationError if named parts do not fit the registrations, overlap or leave some out, or a block exceeds
    `memory`; ValueError for a number of parts below 1.
    """
    if not isinstance(parts, int):
        named = [with_patterns(names, registrations) for names in parts]
        for names in named:
            check_variables(names, registrations, "parts")
        if twice := sorted(name for name in frozenset().union(*named) if sum(name in names for names in named) > 1):
            raise RegistrationError(f"parameters are in several parts: {', '.join(twice)}")
        owners = dict.fromkeys(name for registration in registrations for name in registration.owners)
        if absent := [name for name in owners if not any(name in names for names in named)]:
            raise RegistrationError(
                f"parameters are in no part: {', '.join(absent)}. Parts divide the parameters that are fitted, so name "
                "each of them in one. To fit some parameters alone, name these in variables=[...], too; "
                "spectrum.part([...]) is the spectrum of some."
            )
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


def refuse_other_parts(parts: object) -> None:
    """Raises TypeError for what is neither a number nor names of several parts."""
    if isinstance(parts, int) and not isinstance(parts, bool):
        return
    several = parts if isinstance(parts, Sequence) and not isinstance(parts, str) else [parts]
    if all(isinstance(names, Iterable) and not isinstance(names, (str, Tensor)) for names in several):
        return
    raise TypeError(
        f"parts is {parts!r}; it must be a number of parts, or a list of the names of every part, as in "
        "parts=[['fc.weight', 'fc.bias'], ['head.weight']]"
    )


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
