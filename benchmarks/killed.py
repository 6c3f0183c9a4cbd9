"""Kill -9 at random moments: of a training that writes checkpoints, and of writers of folders.

    python -m benchmarks.killed             200 kills of trainings, and 50 of each kind of folder
    python -m benchmarks.killed --kills 20  fewer; nothing is written

A training writes a checkpoint after every step, under another name that is then changed (docs/trainers.md). Another
process kills it at a random moment, looks whether the checkpoint is that of an uninterrupted training at its step, to
the last bit, and lets the next one go on from there. The contents of a folder after a kill are compared with those of
before and with those that were being written. Fits and scores go on, and end with the bits of those that were not
killed. Processes are forks, which torch's CPU builds alone allow after a backward.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kfac_fx
from benchmarks.hostile.folders import X, Y, small_net, small_spectrum, tensors_of
from benchmarks.hostile.settings import Setting, Training
from benchmarks.program import versions

OUT = Path(__file__).parent / "results" / "killed.json"
STEPS = 12  # of a training
SETTINGS = (
    Setting("two layers", "eigen_moments", "gradients", in_place=True),
    Setting("two layers", "eigen_moments", "exact", repeated=True),
    Setting("a scale and a spare", "adaptive", "gradients", micro_batches=2),
    Setting("a weight that is used twice", "regular", "exact", scaler=True, weight_decay=0.1),
    Setting("dropout", "adam", "empirical", dtype="float32", groups="two groups"),
)
Digest = tuple[Tensor, ...]


def fork(work: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """Run `work` in another process, which calls its argument when it has begun. Returns (its id, a pipe)."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)  # threads do not survive a fork
            work(lambda: os.write(writing, b"!") and None)
        except BaseException as error:
            print(f"the process that is to be killed raised {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    return process, reading


def killed(work: Callable[[Callable[[], None]], None], wait: Callable[[], float]) -> bool:
    """Whether the process was killed: so many seconds after it had begun. False if it ended before."""
    process, reading = fork(work)
    os.read(reading, 1)
    os.close(reading)
    time.sleep(wait())
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the process that was to be killed raised an error")
    return os.WIFSIGNALED(status)


def was_in_a_save(folder: Path) -> bool:
    """Whether a file is half written. It is renamed, so that it counts once."""
    parts = list(folder.glob("*.part"))
    for part in parts:
        part.rename(part.with_suffix(".old"))
    return bool(parts)


# --- trainings --------------------------------------------------------------------------------------------------------


def save(training: Training, step: int, folder: Path) -> None:
    """As docs/trainers.md writes it."""
    part = folder / "checkpoint.pt.part"
    torch.save({**training.checkpoint(), "step": step}, part)
    os.replace(part, folder / "checkpoint.pt")


def load(training: Training, folder: Path) -> int:
    """Returns the number of steps that the checkpoint has, 0 without one."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True)
    training.resume(checkpoint)
    return int(checkpoint["step"])


def tensors(tree: Any) -> list[Tensor]:
    """All numbers of a checkpoint, in their order."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in tensors(value)]
    return [tree] if isinstance(tree, Tensor) else [torch.tensor(tree)] if isinstance(tree, (int, float)) else []


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def uninterrupted(setting: Setting) -> list[list[Tensor]]:
    """The numbers of the checkpoint after every step."""
    training = Training(setting)
    after = [tensors(training.checkpoint())]
    for step in range(STEPS):
        training.step(step)
        after.append(tensors(training.checkpoint()))
    return after


def kill_trainings(setting: Setting, kills: int, rng: random.Random) -> Counter[str]:
    expected, results = uninterrupted(setting), Counter[str]()
    start = time.monotonic()
    Training(setting).steps(range(3))
    longest = max(0.02, time.monotonic() - start)
    with tempfile.TemporaryDirectory() as name:
        folder, last = Path(name), 0

        def train(begun: Callable[[], None]) -> None:
            training = Training(setting)
            first = load(training, folder)
            begun()
            for step in range(first, STEPS):
                training.step(step)
                save(training, step + 1, folder)

        while results["kills"] < kills:
            results["kills"] += killed(train, lambda: rng.random() * longest)
            results["in a save"] += was_in_a_save(folder)
            if (folder / "checkpoint.pt").exists():
                checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
                step = int(checkpoint.pop("step"))
                results["lost"] += step < last
                results["other bits"] += not same(tensors(checkpoint), expected[step])
                last = step
            if last == STEPS:
                results["trainings to the end"] += 1
                shutil.rmtree(folder)
                folder.mkdir()
                last = 0
    return results


# --- folders ----------------------------------------------------------------------------------------------------------


def kill_writers(kind: str, kills: int, rng: random.Random) -> Counter[str]:
    """Two contents are written in turn, and one of them is there."""
    net = small_net()
    both = [small_spectrum(net, times) for times in (1.0, 2.0)]
    queries = [spectrum.precondition((X[:1], Y[:1])) for spectrum in both]
    results = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write(number: int) -> None:
            if kind == "spectra":
                kfac_fx.save_spectrum(both[number], folder)
            else:
                kfac_fx.save_queries(queries[number], folder)

        def read() -> list[Tensor]:
            if kind == "spectra":
                return tensors_of(kfac_fx.load_spectrum(net, folder))
            return [torch.as_tensor(matrix) for matrix in kfac_fx.load_queries(net, folder).matrices.values()]

        def write_in_turn(begun: Callable[[], None]) -> None:
            begun()
            while True:
                write(1)
                write(0)

        contents = []
        for number in (0, 1):
            write(number)
            contents.append(read())
        for _ in range(kills):
            results["kills"] += killed(write_in_turn, lambda: rng.random() * 0.03)
            results["in a save"] += was_in_a_save(folder)
            here = read()
            results["other bits"] += not any(same(here, content) for content in contents)
        results["lost"] = 0  # reading would have raised an error
    return results


def kill_resumed(kind: str, kills: int, rng: random.Random) -> Counter[str]:
    """Fits and scores that go on after every kill, until their end."""
    net = small_net()
    queries = small_spectrum(net).precondition((X[:1], Y[:1]))
    batches = [(X + number, Y) for number in range(8)]

    def work(folder: Path | None) -> list[Tensor]:
        if kind == "scores":
            return [queries.scores_of_all(batches, folder=folder)]
        every = {} if folder is None else {"save_every": 1}
        return tensors_of(kfac_fx.fit_spectrum(net, batches, case="row", folder=folder, **every))

    expected, results = work(None), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def go_on(begun: Callable[[], None]) -> None:
            begun()
            work(folder)

        while results["kills"] < kills:
            was_killed = killed(go_on, lambda: rng.random() * 0.05)
            results["kills"] += was_killed
            results["in a save"] += was_in_a_save(folder)
            if not was_killed:
                results["to the end"] += 1
                results["other bits"] += not same(work(folder), expected)
                shutil.rmtree(folder)
                folder.mkdir()
        results["other bits"] += not same(work(folder), expected)
        results["lost"] = 0
    return results


def run(kills: int) -> dict[str, dict[str, int]]:
    """kills: of trainings; of each kind of folder a quarter as many."""
    rng, rows = random.Random(0), {}
    for setting in SETTINGS:
        rows[f"training, {setting}"] = kill_trainings(setting, kills // len(SETTINGS), rng)
    for kind in ("spectra", "queries"):
        rows[kind] = kill_writers(kind, kills // 4, rng)
    for kind in ("fits", "scores"):
        rows[kind] = kill_resumed(kind, kills // 4, rng)
    return {
        name: {key: counts[key] for key in ("kills", "in a save", "lost", "other bits")}
        for name, counts in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills
    torch.set_num_threads(1)
    start = time.monotonic()
    rows = run(kills)
    for name, counts in rows.items():
        print(f"{name}: {', '.join(f'{number} {word}' for word, number in counts.items())}")
    print(f"{time.monotonic() - start:.0f} s")
    if kills == parser.get_default("kills"):
        OUT.write_text(json.dumps({**versions(), "rows": rows}, indent=1) + "\n")
        print("docs/hostile.md shows these counts: python -m benchmarks.hostile --write-docs")


if __name__ == "__main__":
    main()
