"""Files of a folder: each is written under another name and then renamed, and is read only if it is whole.

**Seals.** A file holds the SHA-256 of its own bytes, computed with zeros where the digest is. So a file whose bytes
changed in any place, or that ends early, is refused before anything in it is parsed. The manifest of a folder also
names the digest of every other file, so that files of two folders are not read together.

**Renames.** A file has its name once it is complete. Files of tensors have a part of their digest in their names, so a
folder that is written again keeps its old files until its new manifest is there. The manifest is replaced last, in one
operation of the file system; the files that it does not name are removed afterwards. A process that is killed at any
moment leaves the old folder or the new one.

**Writers.** A writer of a whole folder locks it, where the system has locks of folders. The second of two writers waits
until the first is done, so neither removes files that the manifest of the other one names.

Links, pipes and devices are refused without being opened. No format here can hold code.

**Manifests** are JSON files that say what the other files of a folder are of, so that a run resumes its own work only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.processes import unsharded
from kfac_fx.losses.declared import LossSpec, RegisteredLosses
from kfac_fx.passes.errors import table, warn_user
from kfac_fx.passes.matrix import real_numbers

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

MOST = 2**24  # bytes of a manifest
HEADER = 2**20  # bytes of the header of a file of tensors
OPENINGS = 10**6  # brackets of a manifest, each of which may become an object of Python
UNSEALED = "0" * 64
SEAL = re.compile(rb'"seal": ?"([0-9a-f]{64})"')
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
CHUNK = 2**20
KINDS = {stat.S_ISLNK: "a link", stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe"}


def path_of(folder: object) -> Path:
    """The path of a folder that the user names.

    Raises TypeError for what is no path, and ValueError for a text that can be none.
    """
    if not isinstance(folder, (str, os.PathLike)) or isinstance(os.fspath(folder), bytes):
        raise TypeError(f"a folder is a text or a pathlib.Path, and got a {type(folder).__name__}: write folder='name'")
    if "\0" in os.fspath(folder):
        raise ValueError(f"no folder can have the name {os.fspath(folder)!r}: it has a null character")
    return Path(folder)


# --- reading ----------------------------------------------------------------------------------------------------------


def damaged(path: Path, what: str, remedy: str = "Restore the file from a copy, or delete the folder.") -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(f"{str(path)!r} {what}. {remedy}")


def is_there(path: Path) -> bool:
    """Whether a regular file has this name.

    Raises ValueError for anything else of this name: a link, a folder, a pipe or a device.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in KINDS.items() if is_kind(mode)), "a device")
        raise damaged(path, f"is {kind}, and no regular file", "Put the file itself there, or delete the folder.")
    return True


def sealed_digest(path: Path, head: int) -> str | None:
    """The digest that a file holds, if its bytes have it; None if it holds none.

    Args:
        head: the number of bytes at the start of the file in which the digest is.

    Raises ValueError if the bytes have another one.
    """
    with path.open("rb") as file:
        start = file.read(head)
        seals = list(SEAL.finditer(start))
        if not seals:
            return None
        first, last = seals[0].span(1)
        total = hashlib.sha256(start[:first] + UNSEALED.encode() + start[last:])
        rest(file, total)
    if len(seals) > 1 or total.hexdigest() != seals[0][1].decode():
        raise damaged(path, "is not what was written: its bytes do not have the digest that it holds")
    return total.hexdigest()


def rest(file: BinaryIO, total: Any) -> None:
    while chunk := file.read(CHUNK):
        total.update(chunk)


def header_size(path: Path) -> int:
    """The bytes of the header of a file of tensors, with its length in front. Raises ValueError if it has none."""
    with path.open("rb") as file:
        start = file.read(9)
    size = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or not 2 <= size <= min(HEADER, path.stat().st_size - 8):
        raise damaged(path, "is no file of tensors, or is not whole")
    return 8 + size


def read_tensors(path: Path, device: str = "cpu", *, digest: str | None = None) -> tuple[dict[str, Tensor], str | None]:
    """(the tensors of a file by name, the digest that it holds; None if it holds none).

    Args:
        digest: the one that it must hold; None: any.

    Raises ValueError for a file that is not whole or of another digest, and for what is no file.
    """
    tensors_and_metadata = checked_tensors(path, digest)
    try:
        return load_file(path, device=device), tensors_and_metadata
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise damaged(path, f"is no file of tensors: {error}") from error


def checked_tensors(path: Path, digest: str | None = None) -> str | None:
    """The digest that a file of tensors holds; see `read_tensors`."""
    if not is_there(path):
        raise FileNotFoundError(f"{str(path)!r} is missing. Restore it from a copy, or delete the folder.")
    held = sealed_digest(path, header_size(path))
    if digest is not None and held != digest:
        other = "holds no digest" if held is None else "is another file than the manifest names"
        raise damaged(path, f"{other}: its digest is not the one in the manifest")
    return held


def metadata_of(path: Path) -> dict[str, str]:
    """The texts in a file of tensors. Raises ValueError for what is no such file."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise damaged(path, f"is no file of tensors: {error}") from error


def read_json(path: Path) -> tuple[Any, bool]:
    """(the value, whether the file holds its digest) of a file of JSON. Raises ValueError for one that is not whole, is
    no JSON, or is larger or deeper than a manifest can be."""
    size = path.stat().st_size
    if size > MOST:
        raise damaged(path, f"is no manifest: it has {size:,} bytes, and a manifest has at most {MOST:,}")
    sealed = sealed_digest(path, MOST) is not None
    text = path.read_bytes()
    if text.count(b"[") + text.count(b"{") > OPENINGS:
        raise damaged(path, f"is no manifest: it has more than {OPENINGS:,} brackets")
    try:
        return json.loads(text.decode()), sealed
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is no manifest: {error}") from error


def plain_name(name: Any, of: Path) -> str:
    """The name of a file in a folder. Raises ValueError for a path, which would lead out of it. of: the file that has
    the name."""
    if not isinstance(name, str) or len(name) > 255 or not PLAIN_NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) < 80 else f"{repr(name)[:80]}..."
        raise damaged(of, f"names a file {shown}, which is no plain name in its folder")
    return name


# --- writing ----------------------------------------------------------------------------------------------------------


def seal(path: Path, head: int) -> str:
    """Put the digest of a file into it, where `UNSEALED` is in its first bytes. Returns the digest."""
    with path.open("r+b") as file:
        start = file.read(head)
        (place,) = (match.start(1) for match in SEAL.finditer(start))
        total = hashlib.sha256(start)
        rest(file, total)
        file.seek(place)
        file.write(total.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    return total.hexdigest()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder, and wait until nobody else writes it. Inside, it belongs to this thread of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # a process that was forked inside has the descriptor, too
        os.close(opened)


def beside(path: Path) -> Path:
    """The name under which this thread writes a file before it is renamed. Whatever has this name is removed."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.part")
    part.unlink(missing_ok=True)
    return part


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Write a file of tensors. Returns (its name, its digest).

    Args:
        path: where; "{}" in the name stands for a part of the digest.
        texts: what the file holds besides.
    """
    part = beside(path)
    contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, part, {**(texts or {}), "seal": UNSEALED})
        digest = seal(part, header_size(part))
        final = path.with_name(path.name.replace("{}", digest[:12]))
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    return final.name, digest


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of JSON with its digest instead of the one that is there."""
    part = beside(path)
    try:
        part.write_text(json.dumps({**value, "seal": UNSEALED}, indent=1), encoding="utf-8")
        if part.stat().st_size > MOST:
            raise ValueError(f"the manifest of {str(path.parent)!r} has more than {MOST:,} bytes: too many blocks.")
        seal(part, MOST)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_others(folder: Path, ours: re.Pattern[str], kept: Iterable[str]) -> None:
    """Remove the files of a folder whose names are of the pattern, and that are not among those to keep."""
    names = set(kept)
    for path in folder.iterdir():
        if path.name not in names and ours.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


T = TypeVar("T")
NAME = "manifest.json"
FORMAT = 2  # of the folders; another format is refused
WITHOUT_DIGESTS = 1  # of the folders whose files have no digests, which are read with a warning

OTHER_FOLDER = "Pass another folder=, or delete this one if it is not needed any more."

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


def refuse_other(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any], remedy: str = OTHER_FOLDER) -> None:
    """Raises ValueError with all entries of two manifests that differ. remedy: the sentence that says what to do."""
    if rows := differences(saved, here):
        raise ValueError(f"the folder {str(folder)!r} holds something else:\n{table(rows)}\n{remedy}")


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
