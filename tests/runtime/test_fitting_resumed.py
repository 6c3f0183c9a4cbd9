"""Fits that go on within a pass over the data: the batches that are recorded again, and those that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kfac_fx
from kfac_fx import Batch, fit_spectrum, load_spectrum
from kfac_fx.compiled.compiled_module import CompiledModule
from tests.runtime.single_cases import T, Text, V
from tests.runtime.test_fitting import same

N = 5


class Stopping(list[Batch]):
    """Batches whose iteration ends in an error at the n-th batch over all passes."""

    def __init__(self, batches: list[Batch], stop: int) -> None:
        super().__init__(batches)
        self.stop, self.seen = stop, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in list.__iter__(self):
            if self.seen == self.stop:
                raise KeyboardInterrupt
            self.seen += 1
            yield batch


@pytest.fixture(scope="module")
def fit() -> tuple[CompiledModule, list[Batch]]:
    torch.manual_seed(0)
    batches = [Batch(torch.randint(V, (2, T)), targets=torch.randint(V, (2, T))) for _ in range(N)]
    net = kfac_fx.compile(Text(), batches[0].args, loss="categorical", approximations={"norm": "generic"})
    return net, batches


Fit = tuple[CompiledModule, list[Batch]]


STOPS = [
    ("gradients", "row", 4),
    ("gradients", "row", 9),
    ("gradients", "sequence", 18),
    ("empirical", "sequence", 6),
    ("empirical", "position", 13),
    ("exact", None, 4),
]


@pytest.mark.parametrize(("mode", "case", "stop"), STOPS)
def test_a_fit_that_stops_within_a_pass_goes_on_to_the_same_bits(
    mode: str, case: str | None, stop: int, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batches = fit
    options: dict[str, Any] = {"mode": mode, "case": case, "parts": 2}
    whole, recorded = fit_spectrum(net, batches, **options), [0]

    def counted(name: str) -> None:
        method = getattr(CompiledModule, name)

        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorded[0] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(CompiledModule, name, count)

    counted("record")
    counted("record_compared")
    counted("record_cases")
    options |= {"folder": tmp_path, "save_every": 2}
    passes = 2 if case is None else 4
    with pytest.raises(KeyboardInterrupt):
        fit_spectrum(net, Stopping(batches, stop), **options)
    assert same(fit_spectrum(net, batches, **options), whole)
    in_pass = max(0, stop - 1) % N  # the batches of the pass that it stopped in, without the first look at the data
    assert recorded[0] == passes * N + in_pass % 2
    assert same(load_spectrum(net, tmp_path, batches=batches), whole)
    assert not list(tmp_path.glob("progress*"))


def test_a_fit_does_not_go_on_with_other_batches(fit: Fit, tmp_path: Path) -> None:
    net, batches = fit
    options: dict[str, Any] = {"mode": "empirical", "folder": tmp_path, "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit_spectrum(net, Stopping(batches, 4), **options)
    other = [batches[0], batches[2], batches[1], *batches[3:]]
    with pytest.raises(
        ValueError, match=r"the first 3 batches are others than those whose sums are in '.*'\. Pass the"
    ):
        fit_spectrum(net, other, **options)
    fit_spectrum(net, batches, **options)
    with pytest.raises(
        ValueError, match=r"has a spectrum of other data:\n  data  is '\w+' in the folder, and '\w+' here"
    ) as error:
        load_spectrum(net, tmp_path, batches=other)
    assert str(error.value).splitlines()[-1] == (
        "Pass the batches that it was made of, of the same sizes and in the same order; or pass any_weights=True, "
        "which takes a spectrum as it is."
    )
    with pytest.warns(UserWarning, match=r"(?s)of other data:.*because any_weights=True"):
        load_spectrum(net, tmp_path, batches=other, any_weights=True)


def test_data_that_change_between_passes_are_told(fit: Fit, tmp_path: Path) -> None:
    net, batches = fit

    class Shuffled(list[Batch]):
        passes = 0

        def __iter__(self) -> Iterator[Batch]:
            self.passes += 1
            rest = self[1:] if self.passes % 2 else self[:0:-1]
            return iter([self[0], *rest])

    with pytest.warns(UserWarning, match=r"two passes over the data had other batches, so '.*' does not say of which"):
        fit_spectrum(net, Shuffled(batches), mode="empirical", case="sequence", folder=tmp_path)
    with pytest.raises(ValueError, match="has no digest of the data that it was made of"):
        load_spectrum(net, tmp_path, batches=batches)
    load_spectrum(net, tmp_path)


@pytest.mark.parametrize("stop", [4, 9])
def test_each_change_of_a_file_of_a_fit_that_stopped_is_an_error_that_names_it(
    stop: int, fit: Fit, tmp_path: Path
) -> None:
    net, batches = fit
    options: dict[str, Any] = {"mode": "empirical", "case": "sequence", "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit_spectrum(net, Stopping(batches, stop), folder=tmp_path / "stopped", **options)
    names = sorted(path.name for path in (tmp_path / "stopped").iterdir())
    assert any(name.startswith("progress") for name in names) and any(n.startswith("block") for n in names) == (
        stop > 6
    )
    for name in names:
        data = (tmp_path / "stopped" / name).read_bytes()
        for place in (0, 9, len(data) // 2, len(data) - 1):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(tmp_path / "stopped", tmp_path / "copy")
            (tmp_path / "copy" / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(ValueError, match=name):
                fit_spectrum(net, batches, folder=tmp_path / "copy", **options)


def test_sums_are_not_written_without_a_folder(fit: Fit) -> None:
    with pytest.raises(ValueError, match="save_every needs a folder"):
        fit_spectrum(*fit, save_every=1)
    with pytest.raises(ValueError, match="save_every is 0; it must be a whole number of batches, at least 1"):
        fit_spectrum(*fit, save_every=0, folder="nowhere")
