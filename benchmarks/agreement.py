"""The factors of other libraries beside ours: one Fisher, several programs.

    python -m benchmarks.agreement                 # whatever of them is installed
    python -m benchmarks.agreement --write-docs    # and docs/agreement.md

Each is asked for the Fisher of the same small models in float64, by the approximation that it calls K-FAC, with the
exact expectation over labels or with the true ones. Where two differ, the dense Fisher by autograd says who is how far
away. None of them is a dependency:

    pip install curvlinops-for-pytorch nngeometry backpack-for-pytorch laplace-torch asdfghjkl kronfluence dattri
    pip install pyDVL distributed zarr
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx
from benchmarks import agreement_attribution, agreement_kronfluence
from benchmarks.agreement_peers import (
    CASES,
    CLASSES,
    MODELS,
    Task,
    asdl,
    backpack,
    brute,
    corrected,
    curvlinops,
    gradients,
    nngeometry,
    task,
)

DOCS = Path(__file__).parents[1] / "docs" / "agreement.md"
HEAD = f"""# The factors of other libraries

`python -m benchmarks.agreement --write-docs` makes this page. None of these libraries is a dependency. Every row
compares one matrix over all parameters of a small model in float64, for {CASES} cases and {CLASSES} classes. *Exact*
sums over all labels, *empirical* uses the true labels.

- *peer from ours*: the norm of the difference between the peer's matrix and ours, divided by the norm of ours. Where
  the two agree, this is a rounding error.
- *peer from dense* and *ours from dense*: the norm of the difference from the diagonal blocks of the dense Fisher by
  autograd, divided by its norm.

Versions: {{versions}}.

"""
TAIL = """
Reasons for the differences:

- **Kronecker and Kronecker, reduce** are the two settings of K-FAC for weights that positions share (Eschenhagen et al.
  2023): `kron` treats every position as a case of its own ("expand"), `kron_reduce` has one row per case. Reduce suits
  losses that average over positions.
- **BackPACK, CNN**: BackPACK sums the gradients of convolutions over positions first, and the patches, too, so
  positions count twice.
- **asdl, attention**: for a layer that is applied at 5 positions, asdl's factor is 5 times ours. Ours equals that of
  curvlinops. asdl has no factor for biases, so only its weights are compared.
- **asdl and curvlinops, one layer twice**: their matrix is exactly twice ours, because they divide sums over two calls
  as if there were one call, also with reduce. The distance of ours is what the assumption of independent uses omits.
  Full and diagonal blocks omit nothing.
- **nngeometry, one layer twice**: its full and diagonal blocks are meant to be exact, but they differ from the dense
  Fisher.
- **nngeometry, full blocks** differ by the epsilon of float32, which nngeometry adds where it divides.
- **dattri, MLPs**: dattri multiplies gradients with the transposes of the matrices of eigenvectors, so its eigenvalues
  and scores are those of another basis, which depends on the signs of the eigenvectors. With biases it also joins
  weight and bias before it forms rows of both, so elements of a weight get the factors of other elements.
- **pyDVL, MLPs**: pyDVL sends back the gradients of all labels in one sum with the weights √p. Products of different
  labels do not cancel in it, as they would with random signs, so its G is not that of the Fisher. Without biases it
  takes the last column of every weight for a bias.
"""
KRONFLUENCE = [
    "kronfluence, over the linear modules of two models (`benchmarks/agreement_kronfluence.py`): the empirical Fisher,",
    '`case="sequence"`, a damping of a tenth of the mean eigenvalue. The columns are distances from ours.',
    "",
    "| model | corrected eigenvalues | pairwise scores | self-scores |",
    "|---|---|---|---|",
]
ATTRIBUTION = [
    "dattri and pyDVL (`benchmarks/agreement_attribution.py`): `IFAttributorEKFAC` and `EkfacInfluence` score the",
    "examples of two MLPs; `IFAttributorExplicit` and `DirectInfluence`, which invert the Hessian, those of a softmax",
    "regression. The columns are distances from ours.",
    "",
    "| model | peer | A | G | corrected eigenvalues | pairwise scores |",
    "|---|---|---|---|---|---|",
]
PACKAGES = (
    "torch",
    "curvlinops-for-pytorch",
    "nngeometry",
    "backpack-for-pytorch",
    "laplace-torch",
    "asdfghjkl",
    "kronfluence",
    "dattri",
    "pyDVL",
)


# --- matrices over all parameters, in the order of the model ----------------------------------------------------------


def ours(task: Task, approximation: str | None = None, empirical: bool = False) -> kfac_fx.Spectrum:
    approximations = {"*": approximation} if approximation not in (None, "corrected") else None
    net = kfac_fx.compile(task.model, (task.x,), loss="categorical", approximations=approximations, strict=True)
    est = kfac_fx.FisherEstimator(net, damping=0.0, estimation_mode="empirical" if empirical else "exact")
    est.update_covariances(task.x, targets=task.y if empirical else None)
    spectrum = est.spectrum()
    return spectrum.corrected([gradients(task, empirical)]) if approximation == "corrected" else spectrum


def dense(spectrum: kfac_fx.Spectrum, task: Task) -> Tensor:
    """[P, P] of a spectrum."""
    named = dict(task.model.named_parameters())
    size = sum(p.numel() for p in named.values())
    parts = torch.eye(size).double().split([p.numel() for p in named.values()], dim=1)
    columns = spectrum.multiply(
        {name: part.view(size, *p.shape) for part, (name, p) in zip(parts, named.items(), strict=True)}
    )
    return torch.cat([columns[name].flatten(1) for name in named], dim=1)


# --- the rows ---------------------------------------------------------------------------------------------------------


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def apart(matrix: Tensor, task: Task) -> Tensor:
    """Weights and biases in blocks of their own."""
    owner = torch.tensor([i for i, p in enumerate(task.model.parameters()) for _ in range(p.numel())])
    return torch.where(owner.unsqueeze(0) == owner.unsqueeze(1), matrix, 0)


def weights(matrix: Tensor, task: Task) -> Tensor:
    """Without what is of biases."""
    kept = torch.cat([torch.full((p.numel(),), float(p.dim() > 1)) for p in task.model.parameters()])
    return matrix * kept * kept.unsqueeze(-1)


def attempt(package: str, run: Callable[[], str]) -> str:
    """The result, or in words why there is none."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except Exception as error:  # of a peer, on what it does not take
        return f"{type(error).__name__}: {shorten(str(error), 60, placeholder=' ...')}".replace("|", "/")


class Peer(NamedTuple):
    what: str
    name: str
    package: str
    matrix: Callable[[Task], Tensor]
    approximation: str | None = None
    empirical: bool = False
    of: Callable[[Tensor, Task], Tensor] = lambda matrix, task: matrix


def diagonal(matrix: Tensor, task: Task) -> Tensor:
    return matrix.diagonal().diag()


REDUCE = "kron_reduce"
PEERS = [
    *(
        peer
        for empirical, setting in ((False, "Kronecker, exact"), (True, "Kronecker, empirical"))
        for peer in (
            Peer(setting, "curvlinops", "curvlinops", partial(curvlinops, empirical, "expand"), None, empirical),
            Peer(
                f"{setting}, reduce",
                "curvlinops",
                "curvlinops",
                partial(curvlinops, empirical, "reduce"),
                REDUCE,
                empirical,
            ),
            Peer(f"{setting}, weights", "asdl", "asdl", partial(asdl, empirical), None, empirical, weights),
        )
    ),
    Peer("Kronecker, exact", "nngeometry", "nngeometry", partial(nngeometry, "PMatKFAC")),
    Peer("Kronecker, exact, biases apart", "BackPACK", "backpack", partial(backpack, "KFLR"), of=apart),
    Peer("eigenvalues corrected, exact", "curvlinops", "curvlinops", partial(corrected, False), "corrected"),
    Peer("eigenvalues corrected, empirical", "curvlinops", "curvlinops", partial(corrected, True), "corrected", True),
    Peer("full blocks, exact", "nngeometry", "nngeometry", partial(nngeometry, "PMatBlockDiag"), "full"),
    Peer("diagonal, exact", "nngeometry", "nngeometry", partial(nngeometry, "PMatDiag"), "diagonal", of=diagonal),
    Peer("diagonal, exact", "BackPACK", "backpack", partial(backpack, "DiagGGNExact"), "diagonal", of=diagonal),
]


def rows(name: str) -> list[str]:
    found, mine = [], {}
    for peer in PEERS:
        key = peer.approximation, peer.empirical
        if key not in mine:
            mine[key] = dense(ours(task(name), *key), task(name))

        def run(peer: Peer = peer, own: Tensor = mine[key]) -> str:
            one = task(name)  # and another for the peer, which may leave hooks in it
            own, truth = peer.of(own, one), peer.of(brute(one, peer.empirical), one)
            theirs = peer.matrix(task(name))
            return f"{distance(theirs, own):.0e} | {distance(theirs, truth):.2f} | {distance(own, truth):.2f}"

        result = attempt(peer.package, run)
        found.append(f"| {name} | {peer.what} | {peer.name} | {result}{' |' * (3 - result.count('|'))}")
    return found


def laplace_rows() -> list[str]:
    """log det(N F + δ I) and the variances of the logits of 2 cases, beside laplace-torch."""
    one, prior = task("MLP without biases"), 0.7
    lines = []
    for structure, approximation in (("kron", None), ("diag", "diagonal")):

        def run(structure: str = structure, approximation: str | None = approximation) -> str:
            from laplace import Laplace
            from laplace.curvature import CurvlinopsGGN

            if structure == "diag":  # of curvlinops sampled, of BackPACK exact
                from laplace.curvature import BackPackGGN as Backend
            else:
                Backend = CurvlinopsGGN  # type: ignore[misc, assignment]
            spectrum = ours(one, approximation).at(scale=CASES, damping=prior)
            theta = {name: p.detach() for name, p in one.model.named_parameters()}
            apply = lambda p, x: functional_call(one.model, p, (x[None],))[0]  # noqa: E731
            rows = spectrum.multiply_matpower(-0.5, vmap(jacrev(apply), (None, 0))(theta, one.x[:2]))
            flat = torch.cat([row.flatten(2) for row in rows.values()], dim=2)
            mine = flat @ flat.mT
            la = Laplace(one.model, "classification", "all", structure, prior_precision=prior, backend=Backend)
            la.fit(DataLoader(TensorDataset(one.x, one.y), batch_size=CASES))
            _, theirs = la._glm_predictive_distribution(one.x[:2])
            determinants = distance(la.log_det_posterior_precision.double(), spectrum.log_determinant())
            return f"{determinants:.0e} | {distance(theirs, mine):.0e}"

        result = attempt("laplace", run)
        lines.append(f"| {structure} | {result}{' |' * (2 - result.count('|'))}")
    return lines


def versions() -> str:
    found = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


def page() -> str:
    columns = "| model | matrix | peer | peer from ours | peer from dense | ours from dense |"
    lines = [columns, "|---|---|---|---|---|---|", *(line for name in MODELS for line in rows(name))]
    lines += ["", "laplace-torch, of the MLP without biases:", ""]
    lines += ["| structure | log-determinant from ours | covariance of logits from ours |", "|---|---|---|"]
    lines += [*laplace_rows(), "", *KRONFLUENCE]
    for name in agreement_kronfluence.PROBLEMS:
        result = attempt("kronfluence", partial(agreement_kronfluence.rows, name))
        lines.append(f"| {name} | {result}{' |' * (3 - result.count('|'))}")
    lines += ["", *ATTRIBUTION]
    for name in agreement_attribution.PROBLEMS:
        for package in agreement_attribution.PEERS:
            result = attempt(package, partial(agreement_attribution.distances, name, package))
            lines.append(f"| {name} | {package} | {result}{' |' * (4 - result.count('|'))}")
    return HEAD.replace("{versions}", versions()) + "\n".join(lines) + "\n" + TAIL


def main(arguments: Sequence[str]) -> None:
    text = page()
    print(text)
    if "--write-docs" in arguments:
        DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
