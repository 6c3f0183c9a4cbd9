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
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

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
