"""Spectra in folders of safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import load_spectrum, save_spectrum
from tests.runtime.single_cases import T, Text, V, classifier
from tests.runtime.test_fitting import same


def saved(folder: Path, **options: object) -> tuple[kfac_fx.ModelSpectrum, Text]:
    model, x, y = Text(), torch.randint(V, (3, T)), torch.randint(V, (3, T))
    net = kfac_fx.compile(model, (x,), loss="categorical", **options)  # type: ignore[arg-type]
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    spectrum = estimator.spectrum(damping=0.1).correct([(x, y)], "sequence")
    save_spectrum(spectrum, folder)
    return spectrum, model


def test_a_folder_has_the_spectrum_bit_by_bit(tmp_path: Path) -> None:
    spectrum, model = saved(tmp_path)
    again = load_spectrum(spectrum.net, tmp_path, scale=2.0, damping=0.3)  # type: ignore[arg-type]
    assert same(again, spectrum)
    assert (again.case, again.mode, again.scale, again.damping) == ("sequence", "empirical", 2.0, 0.3)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(spectrum.keys)
    x, y = torch.randint(V, (2, T)), torch.randint(V, (2, T))
    expected = spectrum.at(scale=2.0, damping=0.3)
    torch.testing.assert_close(again.self_scores((x, y)), expected.self_scores((x, y)))
    torch.testing.assert_close(again.diagonal(-1), expected.diagonal(-1))


@pytest.mark.parametrize("options", [{"approximations": {"0": "kron_sua"}}, {"dense_limit": 8}])
def test_sides_in_parts_come_back(options: dict[str, object], tmp_path: Path) -> None:
    model, x, y = classifier(), torch.randn(4, 2, 3, 3), torch.randint(3, (4,))
    net = kfac_fx.compile(model, (x,), loss="categorical", **options)  # type: ignore[arg-type]
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    spectrum = estimator.spectrum(damping=0.1)
    save_spectrum(spectrum, tmp_path)
    again = load_spectrum(net, tmp_path, damping=0.1)
    assert same(again, spectrum)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    torch.testing.assert_close(again.multiply_inverse(v), spectrum.multiply_inverse(v))  # other strides, other rounding


class Sliced(nn.Module):
    """Two pieces of its weight are layers, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.w[:2])).sum(1, keepdim=True) * x, self.w[4:])


def test_pieces_of_a_parameter_come_back_together(tmp_path: Path) -> None:
    net = kfac_fx.compile(Sliced(), (torch.randn(4, 3),), loss="normal")
    estimator = kfac_fx.FisherEstimator(net, seed=0)
    estimator.update_covariances(torch.randn(4, 3))
    spectrum = estimator.spectrum(damping=0.1)
    save_spectrum(spectrum, tmp_path)
    again, v = load_spectrum(net, tmp_path, damping=0.1), {"w": torch.randn(6, 3)}
    assert len(again.keys) == 2 and torch.equal(again.multiply(v)["w"], spectrum.multiply(v)["w"])


def test_a_spectrum_of_some_parameters_comes_back_as_that(tmp_path: Path) -> None:
    model, x, y = classifier(), torch.randn(4, 2, 3, 3), torch.randint(3, (4,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    first = net.registrations[0].parameters
    estimator = kfac_fx.FisherEstimator(net, variables=first, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    save_spectrum(estimator.spectrum(), tmp_path)
    assert load_spectrum(net, tmp_path).keys == [first]


def test_all_differences_of_another_model_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    x = torch.randint(V, (3, T))

    class Other(Text):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 3)

    net = kfac_fx.compile(Other(), (x,), loss="categorical", approximations={"norm": "diagonal"})
    with pytest.raises(ValueError, match=r"holds something else:") as caught:
        load_spectrum(net, tmp_path)
    for words in (
        "model",
        "'Text' in the folder, and 'Other' here",
        "parameters: up.weight",
        "[5, 3]",
        "approximation",
    ):
        assert words in str(caught.value)


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    spectrum, _ = saved(tmp_path / "whole")
    net = spectrum.net
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json: nothing was saved there"):
        load_spectrum(net, tmp_path / "nowhere")  # type: ignore[arg-type]
    block = tmp_path / "whole" / "block-00000.safetensors"
    tensors = load_file(block)
    save_file({**tensors, "values": tensors["values"][..., :-1].contiguous()}, block)
    with pytest.raises(ValueError, match=r"block-00000.*has eigenvalues .* is a matrix"):
        load_spectrum(net, tmp_path / "whole")  # type: ignore[arg-type]


def test_a_pickle_in_the_place_of_a_block_is_not_executed(tmp_path: Path) -> None:
    spectrum, _ = saved(tmp_path / "whole")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"values": Trap()}, tmp_path / "whole" / "block-00000.safetensors")
    with pytest.raises(SafetensorError):
        load_spectrum(spectrum.net, tmp_path / "whole")  # type: ignore[arg-type]
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_was_not_completed_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spectrum, _ = saved(tmp_path / "whole")

    def torn(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("kfac_fx.estimator.fitting.save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        save_spectrum(spectrum, tmp_path / "half")
    assert not list((tmp_path / "half").glob("*.safetensors"))
