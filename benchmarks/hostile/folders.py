"""Folders of spectra, queries and scores that are damaged, lie in odd places, are of other nets, or are written twice.

A reader gets the numbers that were written, to the last bit, or an error says why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from benchmarks.hostile.grading import Input, Outcome, Torchs
from kfac_fx import load_spectrum, save_spectrum

KIND = "folders"
X, Y = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


class Small:
    """A folder of one kind: how it is written, how it is read, and the bits that were read."""

    def __init__(self, write: Callable[[Path], None], read: Callable[[Path], list[Tensor]]) -> None:
        self.write, self.read = write, read


def small_net() -> kfac_fx.CompiledModule:
    torch.manual_seed(0)
    return kfac_fx.compile(nn.Linear(2, 2), (X,), loss="categorical")


def small_spectrum(net: kfac_fx.CompiledModule, times: float = 1.0) -> kfac_fx.ModelSpectrum:
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(times * X, targets=Y)
    return estimator.spectrum(damping=0.1)


def tensors_of(spectrum: kfac_fx.ModelSpectrum) -> list[Tensor]:
    return [tensor for system in spectrum.systems for tensor in (system.values, *system.operators)]


def kinds() -> dict[str, Small]:
    net = small_net()
    spectrum = small_spectrum(net)
    queries = spectrum.precondition((X[:1], Y[:1]))
    batches = [(X[:2], Y[:2]), (X[2:], Y[2:])]
    return {
        "saved": Small(
            lambda folder: save_spectrum(spectrum, folder), lambda folder: tensors_of(load_spectrum(net, folder))
        ),
        "fitted": Small(
            lambda folder: tensors_of(kfac_fx.fit_spectrum(net, batches, case="row", folder=folder)) and None,
            lambda folder: tensors_of(kfac_fx.fit_spectrum(net, batches, case="row", folder=folder)),
        ),
        "queries": Small(
            lambda folder: kfac_fx.save_queries(queries, folder),
            lambda folder: list(map(torch.clone, kfac_fx.load_queries(net, folder).matrices.values())),  # type: ignore[arg-type]
        ),
        "scores": Small(
            lambda folder: queries.scores_of_all(batches, folder=folder) is None or None,
            lambda folder: [queries.scores_of_all(batches, folder=folder)],
        ),
    }


KINDS = kinds()


def as_read(kind: Small, folder: Path, expected: list[Tensor]) -> Outcome:
    tensors = kind.read(folder)
    same = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
    return Outcome(same, "as written" if same else "other numbers than were written")


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# --- damaged ----------------------------------------------------------------------------------------------------------


def with_bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    return lambda path, rng: path.write_bytes(change(path.read_bytes(), rng)) and None


def flipped(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def exchanged_halves(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(1, len(data))
    return data[place:] + data[:place]


def replaced_by(put: Callable[[Path, Path], object]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, rng: random.Random) -> None:
        elsewhere = path.parent.parent / "elsewhere"
        path.rename(elsewhere)
        put(path, elsewhere)

    return damage


def written_again(path: Path, rng: random.Random) -> None:
    """As an editor writes JSON; of other files, the tensors without texts."""
    if path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()), indent=4) + "\n")
    else:
        path.write_bytes(path.read_bytes() + b" ")


def pickled(path: Path, elsewhere: Path) -> None:
    torch.save({"values": torch.ones(2)}, path)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit is flipped": with_bytes(flipped),
    "another bit is flipped": with_bytes(flipped),
    "it is cut off": with_bytes(lambda data, rng: data[: rng.randrange(len(data))]),
    "its first bytes are gone": with_bytes(lambda data, rng: data[rng.randrange(1, len(data)) :]),
    "it is empty": with_bytes(lambda data, rng: b""),
    "it is there twice in one": with_bytes(lambda data, rng: data + data),
    "zeros are behind it": with_bytes(lambda data, rng: data + bytes(100)),
    "its parts are exchanged": with_bytes(exchanged_halves),
    "it is of zeros": with_bytes(lambda data, rng: bytes(len(data))),
    "its lines end as on Windows": with_bytes(lambda data, rng: data.replace(b"\n", b"\r\n")),
    "a mark of UTF-8 begins it": with_bytes(lambda data, rng: b"\xef\xbb\xbf" + data),
    "it is written again by an editor": written_again,
    "it is removed": lambda path, rng: path.unlink(),
    "it is a link": replaced_by(lambda path, elsewhere: path.symlink_to(elsewhere)),
    "it is a hard link": replaced_by(lambda path, elsewhere: os.link(elsewhere, path)),
    "it is a pipe": replaced_by(lambda path, elsewhere: os.mkfifo(path)),
    "it is a folder": replaced_by(lambda path, elsewhere: path.mkdir()),
    "it is a pickle": replaced_by(pickled),
    "it is a link to itself": replaced_by(lambda path, elsewhere: path.symlink_to(path)),
    "a half-written copy is next to it": lambda path, rng: shutil.copy(path, f"{path}.1.part") and None,
    "a foreign file is next to it": lambda path, rng: path.with_name("notes.txt").write_text("mine") and None,
    "its name has another case": lambda path, rng: path.rename(path.with_name(path.name.upper())) and None,
    "it is old": lambda path, rng: os.utime(path, (0, 0)),
}  # fmt: skip


def run_damaged(kind: str, damage: str, seed: int) -> Outcome:
    rng, of_kind = random.Random(seed), KINDS[kind]
    with temporary() as base:
        folder = base / "folder"
        of_kind.write(folder)
        expected = of_kind.read(folder)
        path = rng.choice(sorted(folder.iterdir()))
        DAMAGES[damage](path, rng)
        try:
            return as_read(of_kind, folder, expected)
        except (ValueError, FileNotFoundError) as error:
            if path.name not in str(error):
                return Outcome(False, f"an error that does not name {path.name}: {error}")
            raise


# --- places -----------------------------------------------------------------------------------------------------------


def a_file(base: Path) -> Path:
    path = base / "file"
    path.write_text("mine")
    return path


def linked(base: Path) -> Path:
    (base / "real").mkdir()
    (base / "link").symlink_to(base / "real")
    return base / "link"


def with_other_files(base: Path) -> Path:
    (base / "model").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "manifest.txt"):
        (base / "model" / name).write_text("mine")
    return base / "model"


PLACES: dict[str, Callable[[Path], Any]] = {
    "a text": lambda base: str(base / "a"),
    "a text with a slash at the end": lambda base: f"{base}/a/",
    "spaces": lambda base: base / " a  b ",
    "letters of Greek and a smile": lambda base: base / "Ωμέγα 😀",
    "a new line": lambda base: base / "a\nb",
    "braces": lambda base: base / "{}",
    "percent signs": lambda base: base / "%s%d",
    "a star": lambda base: base / "*[a]?",
    "a name of 250 letters": lambda base: base / ("a" * 250),
    "a name of 300 letters": lambda base: base / ("a" * 300),
    "20 folders deep": lambda base: base.joinpath(*"abcdefghijklmnopqrst"),
    "two dots": lambda base: base / "a" / ".." / "b",
    "a file": a_file,
    "below a file": lambda base: a_file(base) / "a",
    "a link to a folder": linked,
    "a link to nothing": lambda base: (base / "link").symlink_to(base / "none") or base / "link",
    "a folder with other files": with_other_files,
    "a device": lambda base: Path("/dev/null"),
    "a folder of the system": lambda base: Path("/proc/self/kfac_fx"),
    "bytes": lambda base: os.fsencode(base / "a"),
    "a number": lambda base: 5,
    "a list": lambda base: [str(base)],
    "a null character": lambda base: f"{base}/a\0b",
}


def run_placed(kind: str, place: str) -> Outcome:
    of_kind = KINDS[kind]
    with temporary() as base:
        folder = PLACES[place](base)
        try:
            of_kind.write(folder)
        except OSError as error:
            refuse_as_torch(folder, error)
            raise
        expected = of_kind.read(base / "plain") if kind in ("fitted", "scores") else of_kind.read(folder)
        outcome = as_read(of_kind, folder, expected)
        if place == "a folder with other files" and (base / "model" / "config.json").read_text() != "mine":
            return Outcome(False, "a file of the user was changed")
        return outcome


def refuse_as_torch(folder: Any, error: OSError) -> None:
    """Raises Torchs for a place where nobody can write a folder, which the error names."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "a").write_text("a")
    except OSError as plain:
        if type(plain) is type(error) and str(Path(folder).name)[:50] in str(error):
            raise Torchs(str(error)) from error


# --- other nets -------------------------------------------------------------------------------------------------------


def weights_times(factor: float) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    return change


def wrapped(model: nn.Module) -> nn.Module:
    return nn.Sequential(model)


def one_frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


def wider(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 3)


# Each: the change of the model, what compile gets besides, and whether the numbers of the folder are the net's.
NETS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], bool]] = {
    "the same": (lambda model: model, {}, True),
    "in place": (lambda model: model, {"in_place": True}, True),
    "in evaluation mode": (lambda model: model.eval(), {}, True),
    "other weights": (weights_times(2.0), {}, False),
    "weights of zero": (weights_times(0.0), {}, False),
    "weights of NaN": (weights_times(float("nan")), {}, False),
    "float64": (lambda model: model.double(), {}, False),
    "bfloat16": (lambda model: model.bfloat16(), {}, False),
    "another loss": (lambda model: model, {"loss": "normal"}, False),
    "other names": (wrapped, {}, False),
    "a frozen parameter": (one_frozen, {}, False),
    "more outputs": (wider, {}, False),
    "diagonal blocks": (lambda model: model, {"approximations": "diagonal"}, False),
    "full blocks": (lambda model: model, {"approximations": "full"}, False),
}


def run_other_net(kind: str, net: str, any_weights: bool) -> Outcome:
    change, options, is_same = NETS[net]
    with temporary() as folder:
        KINDS[kind].write(folder)
        expected = KINDS[kind].read(folder)
        torch.manual_seed(0)
        model = change(nn.Linear(2, 2))
        x = X.to(next(model.parameters()).dtype)
        other = kfac_fx.compile(model, (x,), **{"loss": "categorical", **options})
        if kind == "saved":
            tensors = tensors_of(load_spectrum(other, folder, any_weights=any_weights))
        else:
            loaded = kfac_fx.load_queries(other, folder, any_weights=any_weights)
            tensors = [matrix for matrix in loaded.matrices.values() if isinstance(matrix, Tensor)]
        same = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
        return Outcome(same and is_same, "as written" if same else "other numbers")


# --- several writers --------------------------------------------------------------------------------------------------


def run_writers(kind: str, writers: int, readers: int) -> Outcome:
    """Threads that write one folder, and others that read it meanwhile."""
    of_kind, errors = KINDS[kind], list[BaseException]()
    with temporary() as folder:
        of_kind.write(folder)
        expected = of_kind.read(folder)

        def repeated(do: Callable[[], Any]) -> None:
            try:
                for _ in range(10):
                    do()
            except BaseException as error:
                errors.append(error)

        tasks = [lambda: of_kind.write(folder)] * writers + [lambda: of_kind.read(folder)] * readers
        threads = [threading.Thread(target=repeated, args=(task,)) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return as_read(of_kind, folder, expected)


def inputs() -> Iterator[Input]:
    for kind in KINDS:
        for seed, damage in enumerate(DAMAGES):
            yield Input(KIND, f"{kind}, {damage}", lambda k=kind, d=damage, s=seed: run_damaged(k, d, s))
        for place in PLACES:
            yield Input(KIND, f"{kind}, in {place}", lambda k=kind, p=place: run_placed(k, p))
        for writers, readers in ((2, 0), (1, 1), (2, 2)):
            yield Input(
                KIND, f"{kind}, {writers} writers and {readers} readers",
                lambda k=kind, w=writers, r=readers: run_writers(k, w, r),
            )  # fmt: skip
    for kind in ("saved", "queries"):
        for net in NETS:
            for any_weights in (False, True):
                words = " with any_weights" if any_weights else ""
                yield Input(
                    KIND, f"{kind}, by a net: {net}{words}",
                    lambda k=kind, n=net, a=any_weights: run_other_net(k, n, a),
                )  # fmt: skip
