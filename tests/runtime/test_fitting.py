"""Spectra that are made part by part: equal bits, probes of the part alone, runs that resume."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx
from kfac_fx import Batch, LossError, RegistrationError, fit_spectrum
from kfac_fx.estimator import fitting as module
from kfac_fx.estimator.fitting import chosen_parts, joint, pack_units, smallest_bound
from kfac_fx.recording.recorder import Recorder
from tests.runtime.single_cases import T, Text, V, classifier

Data = list[Batch]


def net_and_data() -> tuple[kfac_fx.CompiledModule, Data]:
    batches = [Batch(torch.randint(V, (n, T)), targets=torch.randint(V, (n, T))) for n in (3, 2)]
    net = kfac_fx.compile(Text(), batches[0].args, loss="categorical", approximations={"norm": "generic"})
    return net, batches


def same(left: kfac_fx.ModelSpectrum, right: kfac_fx.ModelSpectrum) -> bool:
    """Bit by bit, block by block."""
    ours, theirs = left.places(), right.places()
    pairs = [(ours[key], theirs[key]) for key in ours]
    return ours.keys() == theirs.keys() and all(
        torch.equal(parameter.values[i], other.values[j])
        and all(
            torch.equal(a, b)
            for a, b in zip(
                parameter.group.operators_of(i, parameter.operators),
                other.group.operators_of(j, other.operators),
                strict=True,
            )
        )
        for (parameter, i), (other, j) in pairs
    )


@pytest.mark.parametrize(
    ("batches", "read"),
    [
        ([(torch.ones(2, 4), torch.ones(2))], r"net\(float32 \[2, 4\]\) with targets float32 \[2\]"),
        ([torch.ones(2, 3, 4), torch.ones(5)], r"^Batch 1 .* net\(float32 \[2, 3, 4\]\) without targets\."),
        ([torch.ones(2, 3), torch.ones(5)], r"^Batch 2 .* net\(float32 \[5\]\) without targets\."),
    ],
)
def test_a_batch_on_which_forward_fails_says_how_it_was_read(batches: Any, read: str) -> None:
    net = kfac_fx.compile(nn.Linear(3, 2), loss="normal")
    with pytest.raises((ValueError, RuntimeError)) as error:
        fit_spectrum(net, batches)
    *_, note = error.value.__notes__  # one of the forward, one of the batch
    assert re.search(read, note) and "make a list of kfac_fx.Batch(inputs, targets=labels)" in note


def test_a_loader_instead_of_its_batch_says_what_to_write() -> None:
    net = kfac_fx.compile(nn.Linear(3, 2), loss="normal")
    loader = DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4, 2)), batch_size=2)
    spectrum = fit_spectrum(net, loader, damping=0.1)
    with pytest.raises(TypeError, match=r"torch\.cat\(\[spectrum\.self_scores\(batch\) for batch in loader\]\)"):
        spectrum.self_scores(loader)


@pytest.mark.parametrize(("mode", "case"), [("gradients", "sequence"), ("exact", None), ("empirical", "position")])
def test_one_part_and_four_give_equal_bits(mode: str, case: str | None) -> None:
    net, batches = net_and_data()
    whole = fit_spectrum(net, batches, mode=mode, case=case)
    for parts in (
        4,
        [
            ["words.weight"],
            ["up.weight", "up.bias", "places"],
            ["norm.weight", "norm.bias", "down.weight", "down.bias"],
        ],
    ):
        assert same(fit_spectrum(net, batches, mode=mode, case=case, parts=parts), whole)
    assert whole.case == case and whole.shapes.keys() == dict(net.model.named_parameters()).keys()


def test_the_spectrum_of_one_part_is_that_of_the_estimator() -> None:
    net, batches = net_and_data()
    estimator = kfac_fx.FisherEstimator(net, seed=0)
    for batch in batches:
        estimator.update_covariances(*batch.args, fold=False)
    estimator.fold()
    assert same(fit_spectrum(net, batches), estimator.spectrum())


def test_probes_exist_for_the_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = net_and_data()
    seen: list[set[str]] = []
    make_probes = Recorder.make_probes

    def watched(self: Recorder, *args: Any) -> Any:
        probes = make_probes(self, *args)
        seen.append({r.parameters[0] for r, probe in zip(self.registrations, probes, strict=True) if probe})
        return probes

    monkeypatch.setattr(Recorder, "make_probes", watched)
    spectrum = fit_spectrum(net, batches, variables=["up.weight", "up.bias"])
    assert spectrum.keys == [("up.weight", "up.bias")] and seen == [{"up.weight"}] * len(batches)


def test_some_parameters_have_the_numbers_of_a_fit_of_all(tmp_path: Path) -> None:
    net, batches = net_and_data()
    some = ["up.weight", "up.bias", "places"]
    whole = fit_spectrum(net, batches, case="row")
    for parts in (1, 2, [["places"], ["up.weight", "up.bias"]]):
        assert same(fit_spectrum(net, batches, case="row", variables=some, parts=parts), whole.part(some))
    folder = fit_spectrum(net, batches, case="row", variables=some, folder=tmp_path)
    assert same(folder, whole.part(some)) and same(kfac_fx.load_spectrum(net, tmp_path, batches=batches), folder)
    with pytest.raises(
        RegistrationError, match=r"(?s)`variables` does not fit.*up\.weight.*shares a block with up\.bias"
    ):
        fit_spectrum(net, batches, variables=["up.weight"])
    with pytest.raises(RegistrationError, match=r"variables is empty: name parameters of the net, or leave it out"):
        fit_spectrum(net, batches, variables=[])
    with pytest.raises(RegistrationError, match=r"variables is 'places'; it takes a list of .* variables=\['pla"):
        fit_spectrum(net, batches, variables="places")


def test_a_killed_run_resumes_and_ends_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = net_and_data()
    whole, fit_part, done = fit_spectrum(net, batches, case="row"), module.fit_part, []

    def killed(*args: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return fit_part(*args)

    monkeypatch.setattr(module, "fit_part", killed)
    with pytest.raises(KeyboardInterrupt):
        fit_spectrum(net, batches, case="row", parts=4, folder=tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"blocks are missing .* repeat it with the same folder, and it resumes"
    ):
        kfac_fx.load_spectrum(net, tmp_path)
    monkeypatch.setattr(module, "fit_part", lambda *args: done.append(args) or fit_part(*args))
    assert same(fit_spectrum(net, batches, case="row", parts=4, folder=tmp_path), whole)
    assert len(done) == len(chosen_parts(net.registrations, dict(net.model.named_parameters()), 4, None)) > 2
    assert same(kfac_fx.load_spectrum(net, tmp_path), whole)
    with pytest.raises(ValueError, match=r"(?s)holds something else:.*seed.*is 0 in the folder, and 1 here"):
        fit_spectrum(net, batches, case="row", folder=tmp_path, seed=1)


def test_a_folder_of_other_weights_says_what_to_do(tmp_path: Path) -> None:
    """The error had two digests and no remedy."""
    net, batches = net_and_data()
    fit_spectrum(net, batches, folder=tmp_path)
    with torch.no_grad():
        next(net.parameters()).mul_(2.0)
    with pytest.raises(ValueError, match=r"weights  is .*\nPass another folder=, or delete .*any_weights=True\)\.$"):
        fit_spectrum(net, batches, folder=tmp_path)
    with pytest.warns(UserWarning, match="any_weights=True"):
        kfac_fx.load_spectrum(net, tmp_path, any_weights=True)


def test_a_folder_is_of_one_loss_of_one_model_on_one_set_of_batches(tmp_path: Path) -> None:
    net, batches = net_and_data()
    fit_spectrum(net, batches, folder=tmp_path)
    with pytest.raises(
        ValueError, match=r"(?s)something else:.*first batch .*in the folder, and.*another folder=, or del"
    ):
        fit_spectrum(net, batches[1:], folder=tmp_path)
    with pytest.raises(ValueError, match=rf"batches  is {len(batches)} in the folder, and {len(batches) - 1} here"):
        fit_spectrum(net, batches[:-1], folder=tmp_path)

    def twice(outputs: Tensor) -> Any:
        return 2.0, kfac_fx.losses.Categorical(outputs)

    other = kfac_fx.compile(net.model, batches[0].args, loss=twice, approximations={"norm": "generic"})
    with pytest.raises(ValueError, match=r"""loss  is "'categorical'" in the folder, and 'a function, \w+' here"""):
        fit_spectrum(other, batches, folder=tmp_path)
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
    with pytest.raises(ValueError, match=r"made of: weights  is '\w+' in the folder, and '\w+' here"):
        fit_spectrum(net, batches, folder=tmp_path)
    with pytest.warns(UserWarning, match="any_weights=True"):
        loaded = kfac_fx.load_spectrum(net, tmp_path, any_weights=True)
    assert len(loaded.keys) == len(net.registrations)


def test_a_process_that_is_killed_while_it_corrects_is_resumed(tmp_path: Path) -> None:
    """The data of the child kill it in the second part, between its factors and their correction."""
    child = """
import os, signal, sys
import torch
from collections.abc import Callable
from pathlib import Path
from tests.runtime.test_fitting import fit_spectrum, net_and_data

class Deadly(list):
    passes = 0
    def __iter__(self):
        Deadly.passes += 1  # the first batch, then factors and correction of every part
        for batch in list.__iter__(self):
            yield batch
            if Deadly.passes == 5:
                os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
net, batches = net_and_data()
fit_spectrum(net, Deadly(batches), case="sequence", parts=4, folder=Path(sys.argv[1]))
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.run([sys.executable, "-c", child, str(tmp_path)], cwd=root, env=environment, check=False)
    assert process.returncode == -signal.SIGKILL
    torch.manual_seed(0)
    net, batches = net_and_data()
    written = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert 0 < len(written) < len(net.registrations)
    times = [(tmp_path / name).stat().st_mtime_ns for name in written]
    whole = fit_spectrum(net, batches, case="sequence")
    assert same(fit_spectrum(net, batches, case="sequence", parts=4, folder=tmp_path), whole)
    assert [(tmp_path / name).stat().st_mtime_ns for name in written] == times


def test_a_bound_on_memory_makes_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = net_and_data()
    parameters = dict(net.model.named_parameters())
    sizes = [module.bytes_of(registration, parameters, None) for registration in net.registrations]
    chosen = chosen_parts(net.registrations, parameters, 1, max(sizes))
    assert len(chosen) > 1 and frozenset().union(*chosen) == parameters.keys()
    assert same(fit_spectrum(net, batches, memory=max(sizes)), fit_spectrum(net, batches))
    with pytest.raises(
        RegistrationError, match=r"(?s)memory=100 bytes are too few.*words\.weight.*smaller dense_limit"
    ):
        fit_spectrum(net, batches, memory=100)


def test_neighbors_are_packed_as_evenly_as_they_can_be() -> None:
    assert [smallest_bound([3, 1, 4, 1, 5], parts) for parts in (1, 2, 3, 9)] == [14, 8, 5, 5]
    units = [(frozenset([name]), size) for name, size in zip("abcde", [3, 1, 4, 1, 5], strict=True)]
    assert [sorted(names) for names in pack_units(units, 8)] == [["a", "b", "c"], ["d", "e"]]


def test_pieces_of_one_parameter_stay_together() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(6, 3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w[0:2].T + (x @ self.w[4:6].T).tanh() + self.v(x)

    net = kfac_fx.compile(Sliced(), (torch.randn(4, 3),), loss="normal")
    assert sorted(sorted(names) for names, _ in joint(net.registrations)) == [["v.bias", "v.weight"], ["w"]]
    batches = [torch.randn(4, 3)]
    whole, parts = (fit_spectrum(net, batches, parts=n, mode="exact") for n in (1, 2))
    assert same(whole, parts)


class InColumns(nn.Module):
    """Halves of the columns of `w` are used apart: the names of these pieces have commas, as texts of keys have."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :2] @ self.w[:, :2].mT) * (x[:, 2:] @ self.w[:, 2:].mT) @ self.v.mT


def test_pieces_with_commas_in_their_names_are_loaded(tmp_path: Path) -> None:
    net = kfac_fx.compile(InColumns(), (x := torch.randn(6, 4),), loss="normal")
    assert ("w[:, 0:2]",) in [registration.parameters for registration in net.registrations]
    estimator = kfac_fx.FisherEstimator(net, seed=0)
    estimator.update_covariances(x)
    spectrum = estimator.spectrum(damping=0.1)
    kfac_fx.save_spectrum(spectrum, tmp_path)
    assert same(kfac_fx.load_spectrum(net, tmp_path, damping=0.1), spectrum)


def test_variables_and_parts_are_patterns_and_modules_as_those_of_part() -> None:
    net, batches = net_and_data()
    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    wanted = fit_spectrum(net, batches, variables=names)
    assert same(fit_spectrum(net, batches, variables=["up", "down.*"], parts=[["up.*"], ["down"]]), wanted)
    with pytest.raises(RegistrationError, match=r"`variables` does not fit .*\n  upp\.\*  is registered nowhere\."):
        fit_spectrum(net, batches, variables=["upp.*"])


def test_wrong_parts_and_batches_are_refused() -> None:
    net, batches = net_and_data()
    with pytest.raises(ValueError, match=r"parts must be at least 1, got 0"):
        fit_spectrum(net, batches, parts=0)
    with pytest.raises(RegistrationError, match=r"up\.weight.*shares a block with up\.bias"):
        fit_spectrum(net, batches, parts=[["up.weight"]])
    with pytest.raises(RegistrationError, match=r"parameters are in several parts: places"):
        fit_spectrum(net, batches, parts=[["places"], ["places"]])
    of_up, of_down = ["up.weight", "up.bias"], ["down.weight", "down.bias"]
    others = "words.weight, places, norm.weight, norm.bias"
    with pytest.raises(RegistrationError, match=rf"are in no part: {others}\. Parts divide .*variables=\[\.\.\.\]"):
        fit_spectrum(net, batches, parts=[of_up, of_down])
    for wrong in (of_up, "up.weight", 2.0, True, None):
        with pytest.raises(TypeError, match=r"parts is .*; it must be a number of parts, or a list of the names of ev"):
            fit_spectrum(net, batches, parts=wrong)  # type: ignore[arg-type]
    for options, passes in (({"case": "row"}, 2), ({"parts": 2}, 2), ({"parts": 2, "case": "row"}, 4)):
        with pytest.raises(ValueError, match=f"`batches` is an iterator, which ends after one pass, and {passes} are"):
            fit_spectrum(net, iter(batches), **options)
    with pytest.raises(ValueError, match=r"`batches` has no batches"):
        fit_spectrum(net, [])
    with pytest.raises(
        TypeError, match=r"fit_spectrum takes a compiled module, and got a [A-Z]\w+: write net = kfac_fx"
    ):
        fit_spectrum(net.model, batches)  # type: ignore[arg-type]
    x, y = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(TypeError) as error:
        fit_spectrum(net, (x, y))
    assert str(error.value) == (
        "fit_spectrum takes batches, and this is one, net(float32 [4, 3]) with targets int64 [4]: write [(x, y)], or "
        "pass a DataLoader."
    )


def test_examples_are_no_batches() -> None:
    """For a regression, a row of a tensor is a batch without the dimension of the cases, and its elements are cases."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    net = kfac_fx.compile(nn.Linear(3, 2), (x,), loss="normal")
    spectrum = fit_spectrum(net, x.split(3), mode="exact", damping=0.1)
    queries = spectrum.precondition((x, y))
    calls: dict[str, Callable[[Any], Any]] = {
        "fit_spectrum": lambda batches: fit_spectrum(net, batches),
        "correct": spectrum.correct,
        "scores_of_all": queries.scores_of_all,
    }
    for function, call in calls.items():
        with pytest.raises(
            TypeError, match=rf"{function} takes batches, and got a tensor, float32 \[6, 3\], .*x.split"
        ):
            call(x)
        with pytest.raises(TypeError, match=rf"a TensorDataset yields single examples: write {function}\(DataLoader\("):
            call(TensorDataset(x, y))
        with pytest.raises(
            TypeError, match=rf"{function} takes batches, and this is one, net\(input=float32 .*\[batch\]"
        ):
            call({"input": x, "targets": y})
        with pytest.raises(
            TypeError, match=rf"{function} takes batches, and this is one, net\(float32 .* with targets"
        ):
            call(kfac_fx.Batch(x, targets=y))
        with pytest.raises(
            TypeError, match=rf"{function} takes batches, and got a NoneType: pass a DataLoader, or a list"
        ):
            call(None)
    with pytest.raises(RegistrationError, match="names is empty: name parameters of the spectrum, weight, bias"):
        spectrum.part([])
    with pytest.raises(RegistrationError, match=r"names is 'weight'; it takes a list of names .* names=\['weight'\]"):
        spectrum.part("weight")


def test_a_part_is_named_by_patterns_as_a_damping_is() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), loss="categorical")
    spectrum = fit_spectrum(net, [torch.randn(6, 3)], mode="exact", damping=0.1)
    for names in (["2.*"], ["2"], ["2.weight", "2.b*"]):
        assert [*spectrum.part(names).shapes] == ["2.weight", "2.bias"]
    with pytest.raises(RegistrationError, match=r"2\.weight +shares a block with 2\.bias: name both, or none"):
        spectrum.part(["*.weight"])
    text = r"patterns with \*, such as '\*\.bias':\n  3\.\* +fits no parameter in a block\.$"
    with pytest.raises(RegistrationError, match=text):
        spectrum.part(["3.*"])
    with pytest.raises(RegistrationError, match=r"bias +fits no parameter in a block\. Did you mean '\*\.bias'\?"):
        spectrum.part(["bias"])


def test_a_tuple_of_two_batches_is_two_batches() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(torch.nn.Linear(3, 2), loss="categorical")
    two = torch.randn(2, 4, 3)
    of_tuple, of_list = (fit_spectrum(net, batches, mode="exact") for batches in (tuple(two), list(two)))
    vector = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    for name, product in of_tuple.multiply(vector).items():
        assert torch.equal(product, of_list.multiply(vector)[name])


def test_a_tuple_of_two_tensors_of_one_shape_may_be_one_batch() -> None:
    """A regression from a number to a number would take its targets for inputs."""
    x, y = torch.rand(6, 1), torch.rand(6, 1)
    net = kfac_fx.compile(nn.Linear(1, 1), (x,), loss="normal")
    with pytest.raises(TypeError) as error:
        fit_spectrum(net, (x, y), mode="exact")
    assert str(error.value) == (
        "fit_spectrum takes batches, and got a tuple of float32 [6, 1] and float32 [6, 1], which may be one batch or "
        "two: write [(x, y)] if these are inputs and their targets, and [x1, x2] if they are the inputs of two batches."
    )


def calls_with_batches() -> dict[str, Callable[[Any], Any]]:
    """The functions that take batches, for a regression from 3 numbers to one."""
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    net = kfac_fx.compile(nn.Linear(3, 1), (x,), loss="normal")
    spectrum = fit_spectrum(net, [(x, y)], damping=0.1)
    queries = spectrum.precondition((x, y))
    return {
        "fit_spectrum": lambda batches: fit_spectrum(net, batches),
        "correct": spectrum.correct,
        "scores_of_all": queries.scores_of_all,
    }


def test_inputs_and_targets_of_a_regression_are_one_batch() -> None:
    """Targets that were read as the inputs of a second batch do not fit the model, which is not what is wrong."""
    cure = r"write \[\(x, y\)\] if these are inputs and their targets, and \[x1, x2\] if they are the inputs of two"
    for function, call in calls_with_batches().items():
        x, y = torch.randn(6, 3), torch.randn(6, 1)
        with pytest.raises(
            TypeError, match=rf"{function} takes batches, and got a tuple of .* one batch or two: {cure}"
        ):
            call((x, y))
        with pytest.raises(Exception) as error:  # [x1, x2] are two batches
            call([x, y])
        notes = error.value.__notes__
        number, read = (1, "[6, 3]") if function == "scores_of_all" else (2, "[6, 1]")  # scores need targets
        assert notes[-2].startswith(f"Batch {number} of `batches` was read as net(float32 {read}) without targets.")
        assert re.match(
            rf"`batches` are float32 \[6, 3\] and float32 \[6, 1\], which look like one batch: {cure}", notes[-1]
        )
        for batch in ([x, torch.arange(6)], ({"input": x}, y), [{"input": x}, y]):
            with pytest.raises(
                TypeError, match=rf"{function} takes batches, and this is one, net\(.*: write \[\(x, y\)\]"
            ):
                call(batch)


def test_a_tuple_of_two_batches_of_other_lengths_is_two_batches() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), loss="categorical")
    longer, shorter = torch.randint(5, (8, 12)), torch.randint(5, (8, 7))
    for batches in ((longer, shorter), (shorter, longer)):
        assert same(fit_spectrum(net, batches), fit_spectrum(net, [*batches]))
    with pytest.raises(TypeError, match=r"this is one, net\(int64 \[8, 12\]\) with targets int64 \[8\]"):
        fit_spectrum(net, (longer, torch.randint(2, (8,))))


@pytest.mark.parametrize("approximation", ["kron_sua", "kron"])
def test_a_bound_on_memory_counts_the_factors_that_there_are(approximation: str) -> None:
    """Three times every factor, and the eigenvalues. kron_sua has an input factor of the channels."""
    model = torch.nn.Conv2d(2, 4, 3)
    approximations = {"weight": approximation}
    net = kfac_fx.compile(model, (torch.randn(2, 2, 5, 5),), loss="normal", approximations=approximations)
    (registration,) = net.registrations
    width = 2 + 1 if approximation == "kron_sua" else 2 * 3 * 3 + 1
    numbers = 4 * (2 * 3 * 3 + 1) + 3 * (width**2 + 4**2)
    assert module.bytes_of(registration, dict(model.named_parameters()), torch.float64) == 8 * numbers


def test_a_bound_on_memory_counts_the_lagged_factors_of_a_series() -> None:
    """A, A1, G and G1, each three times, and the eigenvalues."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x).tanh())

    model = Recurrent()
    approximations = {"linear": "kron_series_2"}
    net = kfac_fx.compile(model, (torch.randn(3, 4),), loss="normal", approximations=approximations)
    (registration,) = net.registrations
    numbers = 4 * 5 + 3 * 2 * (5**2 + 4**2)
    assert module.bytes_of(registration, dict(model.named_parameters()), torch.float64) == 8 * numbers


def test_a_generator_is_enough_for_one_pass() -> None:
    net, batches = net_and_data()
    once = fit_spectrum(net, (batch for batch in batches), mode="exact")
    again = fit_spectrum(net, batches, mode="exact")
    for key, values in again.eigenvalues().items():
        assert torch.equal(once.eigenvalues()[key], values)


def test_a_measurement_is_that_of_the_correction(tmp_path: Path) -> None:
    def weighed(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=torch.tensor([1.0, 3.0, 0.5]), reduction="none")

    net = kfac_fx.compile(classifier(), (torch.randn(2, 2, 3, 3),), loss="categorical")
    data = [(torch.randn(4, 2, 3, 3), torch.randint(3, (4,))) for _ in range(2)]
    options: dict[str, Any] = {"mode": "exact", "parts": 2, "folder": tmp_path}
    found = fit_spectrum(net, data, case="row", measurement=weighed, **options)
    assert same(found, fit_spectrum(net, data, mode="exact").correct(data, "row", measurement=weighed))
    assert not same(found, fit_spectrum(net, data, mode="exact", case="row"))
    assert same(fit_spectrum(net, data, case="row", measurement=weighed, **options), found)  # read from the folder
    assert same(kfac_fx.load_spectrum(net, tmp_path), found)
    for other in (None, lambda logits, targets: F.cross_entropy(logits, targets, reduction="none")):
        with pytest.raises(ValueError, match="measurement"):
            fit_spectrum(net, data, case="row", measurement=other, **options)
    with pytest.raises(ValueError, match='case=None corrects none: pass case="sequence"'):
        fit_spectrum(net, data, measurement=weighed)


# --- batches that are not finite, and parameters that are frozen ------------------------------------------------------


def digits() -> tuple[nn.Module, kfac_fx.CompiledModule, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    return model, kfac_fx.compile(model, (x[:2],), loss="categorical"), [*zip(x.split(4), y.split(4), strict=True)]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("mode", ["exact", "empirical"])
@pytest.mark.parametrize("case", [None, "row", "sequence", "position"])
def test_a_batch_that_is_not_finite_is_left_out_with_a_warning(case: str | None, mode: str, place: int) -> None:
    _, net, batches = digits()
    broken = [(x.clone(), y) for x, y in batches]
    broken[place][0][2, 1] = torch.nan
    expected = fit_spectrum(net, batches[:place] + batches[place + 1 :], case=case, mode=mode)
    with pytest.warns(
        UserWarning,
        match=rf"of 3 batches of `batches`, these are not finite, .* all their examples: number {place + 1}\.",
    ) as caught:
        found = fit_spectrum(net, broken, case=case, mode=mode, parts=2)
    assert len(caught) == 1
    for key, values in found.eigenvalues().items():
        torch.testing.assert_close(values, expected.eigenvalues()[key])


def test_sampled_factors_and_measurements_leave_out_batches_that_are_not_finite() -> None:
    _, net, batches = digits()
    batches[1][0][0, 0] = torch.inf
    with pytest.warns(UserWarning, match="these are not finite, .*: number 2"):
        assert all(values.isfinite().all() for values in fit_spectrum(net, batches, case="row").eigenvalues().values())
    batches[1][0][0, 0] = 0
    measured = {"measurement": lambda logits, y: 1 / (logits - logits).abs().sum(1)}
    with pytest.raises(
        ValueError, match="no batch of `batches` is finite, so there is nothing to record. Look for NaN"
    ):
        fit_spectrum(net, batches, mode="exact", case="row", **measured)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [None, "row"])
def test_without_a_finite_batch_a_fit_says_so(case: str | None) -> None:
    model, net, batches = digits()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="no batch of `batches` is finite, so .* Look for NaN .*, targets, parameters"):
        fit_spectrum(net, batches, case=case, mode="empirical")


def test_a_run_that_saves_its_sums_warns_before_it_does(tmp_path: Path) -> None:
    _, net, batches = digits()
    broken = [(torch.full_like(x, torch.nan) if n == 0 else x, y) for n, (x, y) in enumerate(batches)]

    def killed() -> Any:
        yield from broken[:2]
        raise KeyboardInterrupt

    class Killed(list[Any]):
        def __iter__(self) -> Any:
            return killed()

    with pytest.warns(UserWarning, match="of 1 batches .*: number 1"), pytest.raises(KeyboardInterrupt):
        fit_spectrum(net, Killed(broken), mode="exact", folder=tmp_path, save_every=1)
    resumed = fit_spectrum(net, broken, mode="exact", folder=tmp_path, save_every=1)
    for key, values in fit_spectrum(net, batches[1:], mode="exact").eigenvalues().items():
        torch.testing.assert_close(resumed.eigenvalues()[key], values)


def test_a_correction_leaves_out_batches_that_are_not_finite() -> None:
    _, net, batches = digits()
    spectrum = fit_spectrum(net, batches, mode="exact")
    broken = [(batches[0][0] * torch.nan, batches[0][1]), *batches[1:]]
    with pytest.warns(UserWarning, match="of 3 batches of `batches`, .*: number 1"):
        found = spectrum.correct(broken)
    for key, values in spectrum.correct(batches[1:]).eigenvalues().items():
        torch.testing.assert_close(found.eigenvalues()[key], values)
    with pytest.raises(ValueError, match="no batch of `batches` is finite"):
        spectrum.correct(broken[:1])


def test_eigenvalues_of_nan_have_words_of_their_own() -> None:
    _, net, batches = digits()
    spectrum = fit_spectrum(net, batches, damping=1.0)
    for system in spectrum.systems:
        system.values.fill_(torch.nan)
    with pytest.raises(
        ValueError, match=r"2 of 2 blocks have eigenvalues of NaN, so they have no logarithm .*0\.weight"
    ):
        spectrum.log_determinant()


def test_frozen_parameters_are_refused_with_the_cause() -> None:
    model, net, batches = digits()
    model[0].requires_grad_(False)
    with pytest.raises(kfac_fx.FactorNotReady, match=r"^0\.weight, 0\.bias were frozen after the model"):
        fit_spectrum(net, batches, parts=2)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(*batches[0][:1])
    with pytest.raises(kfac_fx.FactorNotReady, match=r"0\.weight, 0\.bias were frozen after the model"):
        estimator.spectrum()
    frozen = kfac_fx.compile(model.requires_grad_(False), (batches[0][0],), loss="categorical")
    with pytest.raises(RegistrationError, match=r"all 4 are frozen, with requires_grad=False\.\nUnfreeze the"):
        fit_spectrum(frozen, batches)


@pytest.mark.parametrize("case", [None, "row"])
def test_a_fit_in_training_mode_warns_once_of_dropout(case: str | None) -> None:
    x = torch.randn(12, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    with pytest.warns(UserWarning, match="are recorded in training mode, where 1 may draw random.*net.eval") as caught:
        fit_spectrum(net, [x], case=case)
    assert len(caught) == 1
    net.eval()
    fit_spectrum(net, [x], case=case)


def test_a_batch_without_examples_counts_as_nothing() -> None:
    _, net, batches = digits()
    nothing = batches[0][0][:0], batches[0][1][:0]
    for case in (None, "row", "sequence", "position"):
        found, expected = (fit_spectrum(net, data, mode="exact", case=case) for data in ([*batches, nothing], batches))
        for key, values in expected.eigenvalues().items():
            torch.testing.assert_close(found.eigenvalues()[key], values)
    spectrum = fit_spectrum(net, batches, damping=0.1)
    assert spectrum.self_scores(nothing).shape == (0,)
    assert spectrum.precondition(batches[0]).scores(nothing).shape == (4, 0)
    with pytest.raises(ValueError, match="a batch of queries has no examples"):
        spectrum.precondition(nothing)


def test_small_mistakes_are_told() -> None:
    _, net, batches = digits()
    with pytest.raises(ValueError, match=r"^seed is 'a'; it must be a whole number"):
        fit_spectrum(net, batches, seed="a")  # type: ignore[arg-type]
    spectrum = fit_spectrum(net, batches, damping=0.1)
    with pytest.raises(ValueError, match=r"^rank is '8'; it must be a whole number, at least 1"):
        spectrum.precondition(batches[0], rank="8")  # type: ignore[arg-type]
    for factor in ("a", -1.0, torch.ones(2)):
        with pytest.raises(ValueError, match=r"^the factor of Relative is .*; it must "):
            kfac_fx.Relative(factor)  # type: ignore[arg-type]
    with pytest.raises(
        RegistrationError, match=r"^`names` does not .*\n  0\.weight  shares a block with 0\.bias: name both"
    ):
        spectrum.part(["0.weight"])
    with pytest.raises(
        RegistrationError, match=r"^`parts` does not .*\n  0\.weight  shares a block with 0\.bias: name both"
    ):
        fit_spectrum(net, batches, parts=[["0.weight"]])


def test_a_batch_without_the_labels_of_the_loss_in_forward_says_so() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.layer(x)
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    net = kfac_fx.compile(Labelled(), (x,), {"labels": y})
    text = r"Labelled computes no loss in this call, .* as in kfac_fx\.Batch\(x, labels=y\); a pair \(x, y\) has y for"
    for batch in (x, (x, y), kfac_fx.Batch(x, targets=y)):
        with pytest.raises(LossError, match=text):
            fit_spectrum(net, [batch])


class WithTargets(nn.Module):
    """The signature of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(torch.tanh(self.table(idx)))
        return logits, None if targets is None else F.cross_entropy(logits.view(-1, 9), targets.view(-1))


class NeedsTargets(WithTargets):
    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return super().forward(idx, targets)


@pytest.mark.parametrize("model", [WithTargets, NeedsTargets])
def test_targets_are_the_argument_of_forward_that_has_this_name(model: type[nn.Module]) -> None:
    """The batch was said to lack them, with the advice to write it as it was."""
    torch.manual_seed(0)
    x, y = torch.randint(9, (2, 6, 5))
    net = kfac_fx.compile(model().eval(), (x, y))
    expected = fit_spectrum(net, [Batch(x, y)], mode="empirical", damping=0.1)
    scores = expected.self_scores(Batch(x, y))
    for batch in ((x, y), [x, y], {"idx": x, "targets": y}, Batch(x, targets=y), Batch(idx=x, targets=y)):
        spectrum = fit_spectrum(net, [batch], mode="empirical", damping=0.1, case="row")
        torch.testing.assert_close(spectrum.self_scores(batch), spectrum.self_scores(Batch(x, y)))
        torch.testing.assert_close(expected.self_scores(batch), scores)
        measured = expected.self_scores(batch, measurement=lambda out, t: out[0].mean((1, 2)) + 0 * t[:, 0])
        assert measured.shape == (6,)
    est, v = kfac_fx.FisherEstimator(net), {name: torch.ones_like(p) for name, p in net.named_parameters()}
    est.update_covariances(x, targets=y)
    torch.testing.assert_close(net.fisher_product(x, targets=y)(v), net.fisher_product(x, y)(v))


def test_targets_are_of_the_declared_loss_where_forward_can_do_without_them() -> None:
    x, y = torch.randint(9, (2, 6, 5))
    net = kfac_fx.compile(
        WithTargets().eval(), (x,), loss=lambda outputs: kfac_fx.losses.Categorical(outputs[0].flatten(0, 1))
    )
    spectrum = fit_spectrum(net, [(x, y.flatten())], mode="empirical", damping=0.1)
    assert spectrum.self_scores((x, y.flatten())).shape == (6,)


class WithUnnamedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs if y is None else (outputs - y).abs().pow(1.5).mean()


@pytest.mark.parametrize("mode", ["empirical", "gradients"])
def test_a_returned_loss_without_a_name_is_refused_and_the_advice_works(mode: str) -> None:
    """The words were those of an optimizer."""
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    with pytest.raises(LossError, match="fit_spectrum fits the distribution behind a loss") as error:
        fit_spectrum(kfac_fx.compile(WithUnnamedLoss()), [Batch(x, y)], mode=mode)
    assert "KFAC" not in str(error.value)
    named = kfac_fx.compile(WithUnnamedLoss(), loss="normal")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().pow(1.5).mean(1)

    spectrum = fit_spectrum(named, [(x, y)], case="sequence", mode=mode, measurement=loss)
    assert spectrum.measured and spectrum.self_scores((x, y), measurement=loss).shape == (8,)


@pytest.mark.filterwarnings("ignore:5 of 5 cases of the loss have no target")
@pytest.mark.parametrize("ignored", [False, True])
def test_batches_without_cases_are_refused_in_these_words(ignored: bool) -> None:
    """The words were of batches that are not finite."""
    net = kfac_fx.compile(nn.Linear(4, 3), loss="categorical")
    x = torch.randn(5 if ignored else 0, 4)
    with pytest.raises(ValueError, match="`batches` has no cases"):
        fit_spectrum(net, [(x, torch.full((len(x),), -100))] * 2, mode="empirical")


def test_an_inverted_padding_mask_without_cases_is_named() -> None:
    """The words were of empty batches."""
    ids, pad = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[False, False, True], [False, True, True]])

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
            out: Tensor = self.head(self.words(ids).masked_fill(pad[..., None], 0))
            return out

    net = kfac_fx.compile(Padded(), (ids, pad), loss="categorical", padding_mask="pad")
    batch = Batch(ids, pad, targets=ids.masked_fill(pad, -100))
    with pytest.raises(ValueError, match=r"^`batches` has no cases: .* Or the padding mask is inverted: .*: ~pad\.$"):
        fit_spectrum(net, [batch], case="sequence")


def test_a_measurement_is_known_of_every_spectrum_that_it_made(tmp_path: Path) -> None:
    """A fit in memory did not know it, so its scores by the loss came without a warning; a saved one forgot it."""
    net, x, y = kfac_fx.compile(nn.Linear(4, 3), loss="categorical"), torch.randn(8, 4), torch.randint(3, (8,))

    def square(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.square().sum(1)

    made = fit_spectrum(net, [(x, y)], case="sequence", damping=0.1, measurement=square)
    kfac_fx.save_spectrum(made, tmp_path / "saved")
    corrected = fit_spectrum(net, [(x, y)], damping=0.1).correct([(x, y)], "sequence", measurement=square)
    for spectrum in (made, corrected, kfac_fx.load_spectrum(net, tmp_path / "saved", damping=0.1)):
        assert spectrum.measured
        with pytest.warns(UserWarning, match="a measurement made the eigenvalues"):
            spectrum.self_scores((x, y))
    kfac_fx.save_spectrum(made, tmp_path / "saved")  # the same again
    assert not fit_spectrum(net, [(x, y)]).measured
