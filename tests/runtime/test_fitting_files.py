"""Spectra in folders of safetensors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import load_spectrum, save_spectrum
from tests.runtime.single_cases import T, Text, V, classifier
from tests.runtime.test_fitting import same


def saved(folder: Path, **options: object) -> tuple[kfac_fx.ModelSpectrum, Text]:
    model, x, y = Text(), torch.randint(V, (3, T)), torch.randint(V, (3, T))
    net = kfac_fx.compile(model, loss="categorical", **options)  # type: ignore[arg-type]
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
    net = kfac_fx.compile(model, loss="categorical", **options)  # type: ignore[arg-type]
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
    net = kfac_fx.compile(Sliced(), loss="normal")
    estimator = kfac_fx.FisherEstimator(net, seed=0)
    estimator.update_covariances(torch.randn(4, 3))
    spectrum = estimator.spectrum(damping=0.1)
    save_spectrum(spectrum, tmp_path)
    again, v = load_spectrum(net, tmp_path, damping=0.1), {"w": torch.randn(6, 3)}
    assert len(again.keys) == 2 and torch.equal(again.multiply(v)["w"], spectrum.multiply(v)["w"])


def test_a_spectrum_of_some_parameters_comes_back_as_that(tmp_path: Path) -> None:
    model, x, y = classifier(), torch.randn(4, 2, 3, 3), torch.randint(3, (4,))
    net = kfac_fx.compile(model, loss="categorical")
    first = net.registrations[0].parameters
    estimator = kfac_fx.FisherEstimator(net, variables=first, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    save_spectrum(estimator.spectrum(), tmp_path)
    assert load_spectrum(net, tmp_path).keys == [first]


def test_all_differences_of_another_model_are_named(tmp_path: Path) -> None:
    saved(tmp_path)

    class Other(Text):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 3)

    net = kfac_fx.compile(Other(), loss="categorical", approximations={"norm": "diagonal"})
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


def test_folders_without_files_are_refused(tmp_path: Path) -> None:
    spectrum, _ = saved(tmp_path / "whole")
    net = spectrum.net
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json: nothing was saved there"):
        load_spectrum(net, tmp_path / "nowhere")  # type: ignore[arg-type]
    next((tmp_path / "whole").glob("block-00000*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of \d+ blocks are missing .* first is block-00000"):
        load_spectrum(net, tmp_path / "whole")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file' is no folder"):
        save_spectrum(spectrum, tmp_path / "file")


def test_a_file_has_the_factors_that_were_decomposed(tmp_path: Path) -> None:
    model, x, y = classifier(), torch.randn(4, 2, 3, 3), torch.randint(3, (4,))
    net = kfac_fx.compile(model, loss="categorical", approximations={"0.bias": "kron", "3": "full"})
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    spectrum, expected = estimator.spectrum(), {}
    for key, block in estimator.blocks.items():
        expected[key] = {name: factor.value.clone() for name, factor in block.factors.items()}
    estimator.update_covariances(2 * x, targets=y)
    save_spectrum(spectrum, tmp_path)  # of the time when it was made
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {frozenset(factors) for factors in expected.values()} == {
        frozenset({"A", "G", "positions"}),
        frozenset({"F"}),
    }
    for path, factors in zip(files, expected.values(), strict=True):
        tensors = load_file(path)
        for name, factor in factors.items():
            torch.testing.assert_close(tensors[name], factor, rtol=0, atol=0)


def test_other_weights_and_losses_are_refused_and_allowed_in_words(tmp_path: Path) -> None:
    spectrum, model = saved(tmp_path)
    net, x = spectrum.net, torch.randint(V, (3, T))

    def twice(outputs: Tensor) -> object:
        return 2.0, kfac_fx.losses.Categorical(outputs)

    other = kfac_fx.compile(model, loss=twice)
    with pytest.raises(ValueError, match=r"of other loss:\n  loss  is .*'categorical'.*\n.*any_weights=True"):
        load_spectrum(other, tmp_path)
    with pytest.raises(ValueError, match=r"The weights are the same in torch.float32: write model.to\(torch.float32\)"):
        load_spectrum(kfac_fx.compile(copy.deepcopy(model).double(), (x,), loss="categorical"), tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.up.weight.mul_(2)
    remedy = r"Its numbers are not those of this net. Load the weights that it was made with; or pass any_weights=True"
    with pytest.raises(ValueError, match=rf"(?s)has a spectrum of other weights:.*{remedy}"):
        load_spectrum(net, tmp_path)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"of other weights and loss:\n(.*\n)+It is taken as it is, because"):
        assert same(load_spectrum(other, tmp_path, any_weights=True), spectrum)
    model.load_state_dict(before)
    assert same(load_spectrum(net, tmp_path), spectrum)  # type: ignore[arg-type]


def test_batches_for_a_folder_without_a_digest_of_its_data_are_refused(tmp_path: Path) -> None:
    spectrum, _ = saved(tmp_path)
    net, batches = spectrum.net, [torch.randint(V, (3, T))]
    with pytest.raises(ValueError, match=r"has no digest of the data that it was made of, so `batches` cannot be comp"):
        load_spectrum(net, tmp_path, batches=batches)
    with pytest.raises(ValueError, match=r"Leave batches out, which takes a folder of any data, or fit it anew in"):
        load_spectrum(net, tmp_path, batches=batches)
    with pytest.warns(UserWarning, match=r"has no digest of the data .* It is taken as it is, because any_weights=Tr"):
        assert same(load_spectrum(net, tmp_path, batches=batches, any_weights=True), spectrum)
    assert same(load_spectrum(net, tmp_path), spectrum)


def test_a_spectrum_that_is_saved_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    first, model = saved(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.up.weight.mul_(2)
    estimator = kfac_fx.FisherEstimator(first.net, estimation_mode="empirical")  # type: ignore[arg-type]
    x, y = torch.randint(V, (3, T)), torch.randint(V, (3, T))
    estimator.update_covariances(x, targets=y)
    second = estimator.spectrum().correct([(x, y)], "sequence")
    (tmp_path / "notes.txt").write_text("of the user")
    save_spectrum(second, tmp_path)
    assert same(load_spectrum(first.net, tmp_path), second)  # type: ignore[arg-type]
    now = {path.name for path in tmp_path.iterdir()}
    assert len(now) == len(files) + 1 and now & files == {"manifest.json"} and "notes.txt" in now
    with pytest.raises(ValueError, match=r"case  is 'sequence' in the folder, and None here"):
        save_spectrum(estimator.spectrum(), tmp_path)


def test_a_spectrum_is_not_pickled(tmp_path: Path) -> None:
    spectrum, _ = saved(tmp_path)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*save_spectrum\(spectrum, folder\)"):
        pickle.dumps(spectrum)
