"""dattri and pyDVL beside our spectrum: factors, corrected eigenvalues and scores of small classifiers in float64.

`IFAttributorEKFAC` takes the true labels and `EkfacInfluence` all labels, so ours are of these modes. The Hessian of a
softmax regression is its exact Fisher, so full blocks have the scores of `IFAttributorExplicit` and `DirectInfluence`.
"""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx

CASES, QUERIES, INPUTS, CLASSES, DAMPING = 24, 5, 4, 3, 0.1


class Attribution(NamedTuple):
    """inputs, gradients: the factors of every layer, [i, i] and [o, o]. eigenvalues: corrected, of every layer, sorted.
    scores: [queries, examples]. None stands for results that a method does not have."""

    inputs: list[Tensor] | None
    gradients: list[Tensor] | None
    eigenvalues: list[Tensor] | None
    scores: Tensor


class Data(NamedTuple):
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=CASES)

    @property
    def queries(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.x[:QUERIES], self.y[:QUERIES]), batch_size=QUERIES)


def data(hidden: bool, bias: bool) -> Data:
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 6, bias), nn.Tanh(), nn.Linear(6, CLASSES, bias)]
    model = nn.Sequential(*layers) if hidden else nn.Sequential(nn.Linear(INPUTS, CLASSES, bias))
    return Data(model.double().eval(), torch.randn(CASES, INPUTS).double(), torch.randint(CLASSES, (CASES,)))


def ours(problem: Data, mode: str, full: bool = False) -> Attribution:
    """full: one dense block a layer in place of Kronecker factors with corrected eigenvalues."""
    approximations = {"*": "full"} if full else None
    net = kfac_fx.compile(problem.model, (problem.x,), loss="categorical", approximations=approximations)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode=mode)
    estimator.update_covariances(problem.x, targets=problem.y if mode == "empirical" else None)
    spectrum, batch = estimator.spectrum(damping=0.0), (problem.x, problem.y)
    if full:
        return Attribution(None, None, None, queried(spectrum, problem))
    corrected = spectrum.correct([batch], "row")
    factors = [block.factors for block in estimator.blocks.values()]
    return Attribution(
        [sides["A"].value[0] for sides in factors],
        [sides["G"].value[0] for sides in factors],
        [values.flatten().sort().values for values in corrected.eigenvalues().values()],
        queried(corrected, problem),
    )


def queried(spectrum: kfac_fx.ModelSpectrum, problem: Data) -> Tensor:
    queries = spectrum.at(damping=DAMPING).precondition((problem.x[:QUERIES], problem.y[:QUERIES]))
    scores: Tensor = queries.scores((problem.x, problem.y))
    return scores


# --- the peers --------------------------------------------------------------------------------------------------------


def dattri(problem: Data, full: bool = False) -> Attribution:
    from dattri.algorithm.influence_function import IFAttributorEKFAC, IFAttributorExplicit
    from dattri.func import fisher
    from dattri.task import AttributionTask

    def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(problem.model, parameters, batch[0])
        return F.cross_entropy(outputs, batch[1])

    task = AttributionTask(loss, problem.model, problem.model.state_dict())
    if full:
        explicit = IFAttributorExplicit(task, regularization=DAMPING)
        explicit.cache(problem.loader)
        return Attribution(None, None, None, explicit.attribute(problem.loader, problem.queries).detach().T)
    covariances: list[dict[str, tuple[Tensor, Tensor]]] = []
    decompose = fisher.estimate_eigenvector
    fisher.estimate_eigenvector = lambda found: (covariances.append(found), decompose(found))[1]
    try:
        peer = IFAttributorEKFAC(task, damping=DAMPING)
        peer.cache(problem.loader)
    finally:
        fisher.estimate_eigenvector = decompose
    return Attribution(
        [inputs for inputs, _ in covariances[0].values()],
        [gradients for _, gradients in covariances[0].values()],
        [values.flatten().sort().values for values in peer.cached_lambdas.values()],
        peer.attribute(problem.loader, problem.queries).detach().T,
    )


def pydvl(problem: Data, full: bool = False) -> Attribution:
    from pydvl.influence.torch import DirectInfluence, EkfacInfluence

    batch = problem.x, problem.y
    queries = problem.x[:QUERIES], problem.y[:QUERIES]
    if full:
        direct = DirectInfluence(problem.model, F.cross_entropy, regularization=DAMPING).fit(problem.loader)
        return Attribution(None, None, None, direct.influences(*queries, *batch))
    peer = EkfacInfluence(problem.model, update_diagonal=True, hessian_regularization=DAMPING)
    factors = peer._get_kfac_blocks(problem.loader)
    peer.fit(problem.loader)
    return Attribution(
        list(factors[0].values()),
        list(factors[1].values()),
        [values.flatten().sort().values for values in peer.ekfac_representation.diags],
        peer.influences(*queries, *batch),
    )


PROBLEMS = {"MLP": (True, True), "MLP without biases": (True, False), "softmax regression": (False, True)}
PEERS = {"dattri": (dattri, "empirical"), "pydvl": (pydvl, "exact")}


def distances(name: str, package: str) -> str:
    """ "A | G | corrected eigenvalues | scores" of a peer from ours."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        hidden, bias = PROBLEMS[name]
        problem, (peer, mode) = data(hidden, bias), PEERS[package]
        mine = ours(problem, mode if hidden else "exact", full=not hidden)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            theirs = peer(problem, full=not hidden)
    finally:
        torch.set_default_dtype(before)
    return " | ".join(distance(values, ours) for values, ours in zip(theirs, mine, strict=True))


def distance(values: list[Tensor] | Tensor | None, own: list[Tensor] | Tensor | None) -> str:
    if values is None or own is None:
        return "-"
    left, right = (
        torch.cat([tensor.detach().flatten() for tensor in (side if isinstance(side, list) else [side])])
        for side in (values, own)
    )
    return f"{float((left - right).norm() / right.norm()):.0e}"
