"""Folders that are damaged, and writers that are killed: an error that names the file, and never a mix of two."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kfac_fx
from benchmarks.hostile.folders import Small, X, Y, kinds, small_net, small_spectrum
from kfac_fx import load_spectrum, save_spectrum
from kfac_fx.estimator import fitting
from kfac_fx.estimator.files import MOST, UNSEALED
from tests.runtime.test_fitting import same

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and named pipes")
KINDS = kinds()
OURS = (ValueError, FileNotFoundError)


def changed(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """A file with every short range of bytes flipped, cut off, with others appended, and empty."""
    width = max(1, len(data) // 60)
    for start in range(0, len(data), width):
        flipped = bytes(byte ^ rng.randint(1, 255) for byte in data[start : start + width])
        yield data[:start] + flipped + data[start + width :]
        yield data[:start]
    yield data + b"\0"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_change_of_each_file_is_an_error_that_names_it(kind: Small, tmp_path: Path) -> None:
    kind.write(tmp_path)
    rng, expected = random.Random(0), kind.read(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for other in changed(data, rng):
            path.write_bytes(other)
            with pytest.raises(OURS) as caught:
                kind.read(tmp_path)
            assert path.name in str(caught.value)
        path.write_bytes(data)
    assert all(map(torch.equal, kind.read(tmp_path), expected))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_no_file_is_named_at_once(kind: Small, tmp_path: Path) -> None:
    kind.write(tmp_path / "here")
    for path in sorted((tmp_path / "here").iterdir()):
        elsewhere = tmp_path / "elsewhere"
        path.rename(elsewhere)
        for put, words in (
            (lambda p: p.symlink_to(tmp_path / "elsewhere"), "a link"),
            (os.mkfifo, "a pipe"),
            (Path.mkdir, "a folder"),
        ):
            put(path)  # type: ignore[operator]
            with pytest.raises(OURS, match=rf"{path.name}' is {words}, and no regular file"):
                kind.read(tmp_path / "here")
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        elsewhere.rename(path)


def test_files_that_are_exchanged_or_of_another_folder_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (X,), loss="categorical")
    for name, times in (("one", 1.0), ("two", 2.0)):
        save_spectrum(small_spectrum(net, times), tmp_path / name)
    first, second = sorted((tmp_path / "one").glob("block*"))
    foreign = sorted((tmp_path / "two").glob("block*"))[0]
    data = first.read_bytes()
    for other in (second, foreign):
        shutil.copy(other, first)
        with pytest.raises(ValueError, match=rf"{first.name}' is another file than the manifest names"):
            load_spectrum(net, tmp_path / "one")
    first.write_bytes(data)
    load_spectrum(net, tmp_path / "one")
    shutil.copy(tmp_path / "two" / "manifest.json", tmp_path / "one")
    with pytest.raises(FileNotFoundError, match="blocks are missing"):
        load_spectrum(net, tmp_path / "one")


def test_scores_of_another_folder_are_refused(tmp_path: Path) -> None:
    spectrum = small_spectrum(small_net())
    for n in (0, 1):
        spectrum.precondition((X[n : n + 1], Y[n : n + 1])).scores_of_all([(X, Y)], folder=tmp_path / str(n))
    shutil.copy(tmp_path / "1" / "scores-000000.safetensors", tmp_path / "0")
    with pytest.raises(ValueError, match=r"0/scores-000000.safetensors' has the scores of another folder\. Delete"):
        spectrum.precondition((X[:1], Y[:1])).scores_of_all([(X, Y)], folder=tmp_path / "0")


def without_digests(folder: Path) -> dict[str, Any]:
    """Turn a folder of save_spectrum into one of format 1. Returns its manifest."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    for number, block in enumerate(manifest["blocks"].values()):
        tensors = load_file(folder / block["file"])
        (folder / block.pop("file")).unlink()
        del block["digest"]
        block["file"] = f"block-{number:05}.safetensors"
        kept = {name: tensor for name, tensor in tensors.items() if name == "values" or name.startswith("operator")}
        save_file(kept, folder / block["file"])
    manifest = {name: value for name, value in manifest.items() if name not in ("seal", "made of")} | {"format": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def test_a_folder_of_format_1_is_loaded_with_a_warning(tmp_path: Path) -> None:
    net = small_net()
    spectrum = small_spectrum(net)
    save_spectrum(spectrum, tmp_path)
    manifest = without_digests(tmp_path)
    with pytest.warns(UserWarning, match="written by an earlier version of kfac_fx, without digests"):
        assert same(load_spectrum(net, tmp_path), spectrum)
    with pytest.raises(ValueError, match="earlier version of kfac_fx, without digests, so a run cannot resume"):
        kfac_fx.fit_spectrum(net, [(X, Y)], folder=tmp_path)
    for name in ("../block-00000.safetensors", "/etc/passwd", "", ".", "..", "a\\b", "x" * 300, None, 7):
        (block,) = manifest["blocks"].values()
        block["file"] = name
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"manifest\.json' names a file .* which is no plain name in its folder"):
            load_spectrum(net, tmp_path)
    (block,) = manifest["blocks"].values()
    block["file"] = "block-00000.safetensors"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "block-00000.safetensors"
    tensors = load_file(path)
    for name, wrong, words in (
        (
            "values",
            tensors["values"][..., :-1].contiguous(),
            r"has eigenvalues \[1, 2, 2\], and .* is a matrix",
        ),
        ("operator 1", tensors["operator 1"][..., :-1].contiguous(), "has eigenvectors .* which do not fit"),
        ("operator 1", tensors["operator 1"].long(), "has eigenvectors .* which do not fit"),
        ("values", None, "has no eigenvalues and eigenvectors of"),
    ):
        save_file({**{k: v for k, v in tensors.items() if k != name}, **({} if wrong is None else {name: wrong})}, path)
        with pytest.warns(UserWarning), pytest.raises(ValueError, match=rf"(?s)block-00000.*{words}"):
            load_spectrum(net, tmp_path)
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="block-00000.*has no eigenvalues"):
        load_spectrum(net, tmp_path)


def test_a_pickle_in_the_place_of_a_file_is_not_executed(tmp_path: Path) -> None:
    net = small_net()
    save_spectrum(small_spectrum(net), tmp_path / "whole")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    for path in sorted((tmp_path / "whole").iterdir()):
        data = path.read_bytes()
        torch.save({"values": Trap()}, path)
        with pytest.raises(ValueError, match=path.name):
            load_spectrum(net, tmp_path / "whole")
        path.write_bytes(data)
    assert not (tmp_path / "sprung").exists()


HUGE = {
    "deep lists": "[" * 200_000,
    "deep mappings": '{"a":' * 200_000 + "1" + "}" * 200_000,
    "many lists": f'{{"format": 1, "blocks": [{"[]," * 2_000_000}[]]}}',
    "a long number": f'{{"format": {"1" * 10_000}}}',
    "no text": "\udcff",
    "more than one": "{} {}",
    "a wrong seal": f'{{"format": 2, "seal": "{UNSEALED}"}}',
    "no seal": '{"format": 2, "mode": "exact", "parameters": {}, "blocks": {}}',
    "format 1 with a seal": f'{{"format": 1, "seal": "{UNSEALED}"}}',
    "other kinds": '{"format": 1, "mode": "exact", "parameters": [], "blocks": {}}',
    "other entries": '{"format": 1, "mode": "exact", "parameters": {}, "blocks": {"a": 1}}',
    "true": '{"format": true}',
    "a list": "[1]",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_deep_huge_and_other_manifests_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest\.json' (is|has the format)"):
        load_spectrum(KINDS_NET, tmp_path)


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MOST + 1)  # without memory or disk
    with pytest.raises(ValueError, match=r"manifest\.json' is no manifest: it has [\d,]+ bytes"):
        load_spectrum(KINDS_NET, tmp_path)


KINDS_NET = small_net()


def test_a_folder_is_named_by_a_text_or_a_path(tmp_path: Path) -> None:
    net = small_net()
    spectrum = small_spectrum(net)
    queries = spectrum.precondition((X[:1], Y[:1]))
    calls: list[Callable[[Any], object]] = [
        lambda folder: save_spectrum(spectrum, folder),
        lambda folder: load_spectrum(net, folder),
        lambda folder: kfac_fx.save_queries(queries, folder),
        lambda folder: kfac_fx.load_queries(net, folder),
        lambda folder: kfac_fx.fit_spectrum(net, [(X, Y)], folder=folder),
        lambda folder: queries.scores_of_all([(X, Y)], folder=folder),
    ]
    for call in calls:
        for wrong in (os.fsencode(tmp_path), 5, [str(tmp_path)]):
            with pytest.raises(TypeError, match=r"a folder is a text or a pathlib\.Path, and got a (bytes|int|list): "):
                call(wrong)
        with pytest.raises(ValueError, match="it has a null character"):
            call(f"{tmp_path}/a\0b")


def test_a_reader_of_a_folder_that_is_replaced_meanwhile_gets_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that the manifest of before names are gone when they are read."""
    net = small_net()
    first, second = small_spectrum(net), small_spectrum(net, 2.0)
    save_spectrum(first, tmp_path)
    kfac_fx.save_queries(first.precondition((X[:1], Y[:1])), tmp_path / "queries")
    replacing = [lambda: save_spectrum(second, tmp_path)]
    real = fitting.read_tensors

    def read_tensors(*args: Any, **options: Any) -> Any:
        if replacing:
            replacing.pop()()
        return real(*args, **options)

    monkeypatch.setattr(fitting, "read_tensors", read_tensors)
    assert same(load_spectrum(net, tmp_path), second.at(damping=0.0))
    other = second.precondition((X[:1], Y[:1]))
    replacing.append(lambda: kfac_fx.save_queries(other, tmp_path / "queries"))
    loaded = kfac_fx.load_queries(net, tmp_path / "queries")
    assert all(torch.equal(loaded.matrices[key], matrix) for key, matrix in other.matrices.items())  # type: ignore[arg-type]
    next(path for path in tmp_path.iterdir() if path.suffix == ".safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 1 blocks are missing"):  # the manifest is the same
        load_spectrum(net, tmp_path)


def test_two_threads_that_save_into_one_folder_leave_the_last_one(tmp_path: Path) -> None:
    net = small_net()
    both, errors = [small_spectrum(net, times) for times in (1.0, 2.0)], list[BaseException]()

    def save(spectrum: kfac_fx.ModelSpectrum) -> None:
        try:
            for _ in range(15):
                save_spectrum(spectrum, tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(spectrum,)) for spectrum in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert any(same(load_spectrum(net, tmp_path), spectrum) for spectrum in both)
    assert len(list(tmp_path.iterdir())) == 2


# --- writers that are killed ------------------------------------------------------------------------------------------


def killed_at(event: int, write: Callable[[], object]) -> bool:
    """Run a writer in another process that ends at its n-th event in the file system, with SIGKILL. Whether it did."""
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)  # threads do not survive a fork
        seen = 0

        def count(name: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if name in ("open", "os.rename", "os.remove", "os.mkdir"):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            write()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), "the writer raised"
    return os.WIFSIGNALED(status)


@pytest.mark.forks
def test_a_save_that_is_killed_at_any_event_leaves_the_old_or_the_new_spectrum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (X,), loss="categorical")
    both = [small_spectrum(net, times) for times in (1.0, 2.0)]
    save_spectrum(both[0], tmp_path)
    event, seen, last = 1, [], 0
    while killed_at(event, partial(save_spectrum, both[1 - last], tmp_path)):
        loaded = load_spectrum(net, tmp_path)
        last = 0 if same(loaded, both[0]) else 1
        assert same(loaded, both[last])
        seen.append(last)
        event += 1
    assert event > 8 and set(seen) == {0, 1}
    save_spectrum(both[0], tmp_path)
    assert len(list(tmp_path.iterdir())) == len(net.registrations) + 1  # nothing of the killed ones is left


@pytest.mark.forks
def test_a_save_that_is_killed_at_random_moments_leaves_the_old_or_the_new_spectrum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (X,), loss="categorical")
    both, rng = [small_spectrum(net, times) for times in (1.0, 2.0)], random.Random(0)
    save_spectrum(both[0], tmp_path)
    for _ in range(20):
        process = os.fork()
        if process == 0:
            while True:
                for spectrum in both:
                    save_spectrum(spectrum, tmp_path)
        time.sleep(rng.random() * 0.02)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        loaded = load_spectrum(net, tmp_path)
        assert any(same(loaded, spectrum) for spectrum in both)


@pytest.mark.forks
def test_a_fit_that_is_killed_at_any_event_resumes_to_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (X,), loss="categorical")
    batches = [(X[:2], Y[:2]), (X[2:], Y[2:])]

    def fit() -> kfac_fx.ModelSpectrum:
        return kfac_fx.fit_spectrum(net, batches, case="row", parts=2, folder=tmp_path, save_every=1)

    whole, event = kfac_fx.fit_spectrum(net, batches, case="row", parts=2), 1
    while killed_at(event, fit):
        event += 3
        if event % 2:
            shutil.rmtree(tmp_path)
    assert same(fit(), whole) and same(load_spectrum(net, tmp_path), whole) and event > 10
