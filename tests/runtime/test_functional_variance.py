"""The covariance of outputs under s F + δ I, against dense Jacobians by `torch.func` times `multiply_inverse`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import kfac_fx
from kfac_fx.recording import case_gradients

pytestmark = pytest.mark.usefixtures("float64")


class Tied(nn.Module):
    """The output matrix is the transposed table: rows and gradient rows change sides there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return (x + torch.tanh(self.hidden(x.cumsum(1)))) @ self.words.weight.T


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.lstm(x)[0][:, -1]))


class Meeting(nn.Module):
    """Cases meet in the normalization; the two other parameters are generic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.shift, self.gain = nn.Parameter(torch.randn(3, 3, 1)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = (h - h.mean(0)) / h.std(0)
        return self.head(torch.tanh(h)) * self.gain.exp() + self.shift.sum().sin()


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.zeros(3, 4).index_add(0, graph, torch.tanh(self.layer(x)))))


class Divided(nn.Module):
    """Python decides, so no single graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.as_tensor(self.head(h if float(h.sum()) > -1e9 else -h))


class InPlace(nn.Module):
    """Forward writes into what comes out of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h *= 3.0
        h[:, 1:].add_(1.0)
        return torch.as_tensor(self.head(torch.tanh_(h)).mul_(2.0))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.layer(x).tanh(), "number": 3}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


GRAPH = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], dict[str, Any]]] = {
    "mlp": (mlp, lambda: (torch.randn(6, 4),), {}),
    "full blocks": (mlp, lambda: (torch.randn(6, 4),), {"approximations": {"*": "full"}}),
    "full blocks of many rows": (mlp, lambda: (torch.randn(40, 4),), {"approximations": {"*": "full"}}),
    "diagonal blocks": (mlp, lambda: (torch.randn(6, 4),), {"approximations": {"*": "diagonal"}}),
    "convolution": (convolution, lambda: (torch.randn(5, 1, 4, 4),), {}),
    "words": (words, lambda: (torch.randint(6, (5, 2)),), {}),
    "one output": (lambda: nn.Linear(4, 1), lambda: (torch.randn(6, 4),), {"loss": "normal"}),
    "one output, diagonal blocks": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
        lambda: (torch.randn(6, 4),),
        {"loss": "normal", "approximations": {"*": "diagonal"}},
    ),
    "in place": (InPlace, lambda: (torch.randn(6, 4),), {}),
    "tied": (Tied, lambda: (torch.randint(7, (5, 3)),), {}),
    "lstm": (Reader, lambda: (torch.randn(4, 3, 2),), {}),
    "cases meet": (Meeting, lambda: (torch.randn(6, 3),), {}),
    "columns": (Meeting, lambda: (torch.randn(6, 3),), {"approximations": {"shift": "generic", "gain": "generic"}}),
    "graphs": (Graphs, lambda: (torch.randn(9, 3), GRAPH), {"examples": lambda x, graph: graph}),
    "divided": (Divided, lambda: (torch.randn(6, 3),), {}),
    "named": (Named, lambda: (torch.randn(6, 3),), {"loss": lambda out: kfac_fx.losses.Categorical(out["logits"])}),
}


def fitted(kind: str) -> tuple[kfac_fx.ModelSpectrum, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, inputs, options = MODELS[kind]
    model, args = make(), inputs()
    net = kfac_fx.compile(model, args, **{"loss": "categorical", **options})
    return kfac_fx.fit_spectrum(net, [kfac_fx.Batch(*args)]).at(scale=7.0, damping=0.3), model, args


def logits(output: Any) -> Tensor:
    return torch.as_tensor(output["logits"])


def dense(spectrum: kfac_fx.ModelSpectrum, model: nn.Module, args: tuple[Tensor, ...], examples: int) -> Tensor:
    """J (s F + δ I)⁻¹ Jᵀ, [N, C, C]."""

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        output = functional_call(model, parameters, args)
        return torch.as_tensor(output if isinstance(output, Tensor) else logits(output)).reshape(examples, -1)

    jacobian = jacrev(outputs)({name: p.detach() for name, p in model.named_parameters()})
    wide = {name: tensor for name, tensor in jacobian.items() if name in spectrum.shapes}
    solved = spectrum.multiply_inverse(wide)
    lead = next(iter(wide.values())).shape[:2]
    return torch.stack(
        [torch.einsum("ncp,nkp->nck", wide[n].reshape(*lead, -1), solved[n].reshape(*lead, -1)) for n in wide]
    ).sum(0)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_that_of_dense_jacobians(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spectrum, model, args = fitted(kind)
    examples = 3 if kind == "graphs" else len(args[0])
    outputs = logits if kind == "named" else None
    batch = kfac_fx.Batch(*args)
    expected = dense(spectrum, model, args, examples)
    torch.testing.assert_close(spectrum.functional_variance(batch, outputs=outputs), expected)
    variances = expected.diagonal(dim1=1, dim2=2)
    monkeypatch.setattr(case_gradients, "CHUNK", 1)  # one example at a time
    monkeypatch.setattr(case_gradients, "CHUNK_BYTES", 1)  # and one block
    torch.testing.assert_close(spectrum.functional_variance(batch, outputs=outputs, diagonal=True), variances)
    torch.testing.assert_close(spectrum.functional_variance(batch, outputs=outputs), expected)


def test_several_dampings_of_a_block() -> None:
    spectrum, model, args = fitted("mlp")
    mixed = spectrum.at(damping={"*.bias": 0.1, "*": 0.5})
    torch.testing.assert_close(mixed.functional_variance(args[0]), dense(mixed, model, args, 6))


def test_a_part_of_the_parameters() -> None:
    spectrum, model, args = fitted("mlp")
    last = spectrum.part(["2.weight", "2.bias"])
    torch.testing.assert_close(last.functional_variance(args[0]), dense(last, model, args, 6))


def test_a_last_layer_of_many_classes_makes_no_gradients_of_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 300)), torch.randn(6, 4)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    last = kfac_fx.fit_spectrum(net, [x], damping=0.1).part(["2.weight", "2.bias"])
    expected = torch.stack([last.self_scores(x, measurement=lambda out, n=n: out[:, n]) for n in (0, 7, 299)], 1)
    monkeypatch.setattr(case_gradients.Cases, "gradients", None)
    found = last.functional_variance(x, diagonal=True)
    torch.testing.assert_close(found[:, [0, 7, 299]], expected)
    torch.testing.assert_close(last.functional_variance(x).diagonal(dim1=1, dim2=2), found)


@pytest.mark.parametrize("damping", [0.3, {"*.bias": 0.1, "*": 0.5}])
def test_a_full_last_layer_makes_no_gradient_of_its_matrix_for_every_example(damping: Any) -> None:
    spectrum, model, args = fitted("full blocks of many rows")
    last = spectrum.at(damping=damping).part(["2.weight", "2.bias"])
    made: list[int] = []
    gradients = case_gradients.Cases.gradients

    def counted(cases: case_gradients.Cases) -> Tensor:
        made.append(len(cases))
        return gradients(cases)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_gradients.Cases, "gradients", counted)
        found = last.functional_variance(args[0])
        inputs, outputs = 6, 3
        assert max(made) == inputs * outputs < len(args[0]) * outputs
    expected = dense(last, model, args, 40)
    torch.testing.assert_close(found, expected)
    variances = last.functional_variance(args[0], diagonal=True)
    torch.testing.assert_close(variances, expected.diagonal(dim1=1, dim2=2))


def test_it_is_differentiable_in_the_damping() -> None:
    spectrum, _, args = fitted("mlp")
    damping = torch.tensor(0.5, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: spectrum.at(damping=d).functional_variance(args[0]), damping)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda out: out.sum(), r"real numbers \[6, ...\], and these are float64 \[\]. Pass outputs=, a function from"),
        (lambda out: out.argmax(1), r"and these are int64 \[6\]"),
        (lambda out: out.argmax(1)[:, None].double(), r"the function of the outputs has no gradient .*it cuts it off"),
        (lambda out: {"logits": out}, r"wanted as a tensor \[6, ...\], and this is a dict. Pass outputs="),
    ],
)
def test_other_outputs_are_refused(outputs: Callable[[Any], Any], message: str) -> None:
    spectrum, _, args = fitted("mlp")
    with pytest.raises(ValueError, match=message):
        spectrum.functional_variance(args[0], outputs=outputs)


def test_eigenvalues_of_zero_are_refused() -> None:
    spectrum, _, args = fitted("mlp")
    with pytest.raises(ValueError, match="eigenvalues of zero"):
        spectrum.at(damping=0.0).functional_variance(args[0])


@pytest.mark.parametrize("approximation", ["kron", "diagonal", "full"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_autocast_rounds_the_network_and_no_product_of_the_spectrum(approximation: str, diagonal: bool) -> None:
    """Products with the eigenvectors were in bfloat16, too, and so were the variances."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).float(), torch.randn(16, 4).float()
    net = kfac_fx.compile(model, loss="normal", approximations={"*": approximation})
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    spectrum = estimator.spectrum(damping=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        found = spectrum.functional_variance(x, diagonal=diagonal)
    assert found.dtype == torch.float32
    expected = spectrum.functional_variance(x, diagonal=diagonal)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("outputs", [None, lambda out: out[:, :2].square()])
def test_an_empty_batch_has_no_variances(outputs: Callable[[Any], Any] | None) -> None:
    """It was an error of torch, about a shape."""
    spectrum, _, args = fitted("mlp")
    number = 3 if outputs is None else 2
    assert spectrum.functional_variance(args[0][:0], outputs=outputs).shape == (0, number, number)
    assert spectrum.functional_variance(args[0][:0], outputs=outputs, diagonal=True).shape == (0, number)
