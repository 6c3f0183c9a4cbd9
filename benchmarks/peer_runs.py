"""The runs of `benchmarks/peer_examples.py`: networks, the phases of each library and of kfac_fx, and dense numbers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kfac_fx
from benchmarks.agreement_kronfluence import GPT
from benchmarks.convergence.data import digits, prose

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets, one number a case
Found = dict[str, Tensor]


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over the positions of a case."""
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(logits), -1).sum(1)


def margins(logits: Tensor, targets: Tensor) -> Tensor:
    """Minus the margin of the right class, which kronfluence's examples take for queries."""
    right = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, targets.unsqueeze(1), -torch.inf)
    return others.logsumexp(1) - right


@dataclass(frozen=True)
class Problem:
    """A trained network and its data. loss: its name for kfac_fx; losses: the same, of outputs and targets."""

    model: nn.Module
    loss: str
    losses: Loss
    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor
    batch: int
    measure: Loss | None = None  # of a query, instead of its loss

    def to(self, dtype: torch.dtype) -> Problem:
        """A copy in another precision. Whole numbers stay such."""
        cast = lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor  # noqa: E731
        tensors = [cast(tensor) for tensor in (self.x, self.y, self.query_x, self.query_y)]
        model = copy.deepcopy(self.model).to(dtype)
        return Problem(model, self.loss, self.losses, *tensors, self.batch, self.measure)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(self.batch), self.y.split(self.batch), strict=True))

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        return self.query_x, self.query_y

    def loader(self, batch: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=batch or self.batch)


def trained(problem: Problem, steps: int, rate: float = 3e-3) -> Problem:
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=rate)
    batches = problem.batches
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        problem.losses(problem.model(x), y).mean().backward()
        optimizer.step()
    problem.model.eval().zero_grad()
    return problem


# --- networks and data ------------------------------------------------------------------------------------------------


def uci() -> Problem:
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    layers = [nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    model, n = nn.Sequential(*layers, nn.Linear(128, 1)), 398
    return trained(Problem(model, "normal", squared_errors, x[:n], y[:n], x[n:], y[n:], n), 40)


def images(size: int, channels: int) -> tuple[Tensor, Tensor]:
    """Digits [N, channels, size, size], about of mean 0 and variance 1."""
    pictures, labels = digits()
    scaled = (pictures.float().unsqueeze(1) - 5) / 6
    return scaled.repeat_interleave(size // 8, 2).repeat_interleave(size // 8, 3).expand(-1, channels, -1, -1), labels


class Residual(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.module(x)
        return result


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.2 * x


def cifar(width: int = 16, cases: int = 128) -> Problem:
    def block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    a, b, c = width, 2 * width, 4 * width
    model = nn.Sequential(
        block(3, a),
        block(a, b, 5, 2, 2),
        Residual(nn.Sequential(block(b, b), block(b, b))),
        block(b, c),
        nn.MaxPool2d(2),
        Residual(nn.Sequential(block(c, c), block(c, c))),
        block(c, b, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(b, 10, bias=False),
        Scaled(),
    )
    x, y = images(32, 3)
    x, y, queries = x[: cases + 16].contiguous(), y[: cases + 16], slice(cases, cases + 16)
    data = x[:cases], y[:cases], x[queries], y[queries]
    return trained(Problem(model, "categorical", cross_entropies, *data, 32, margins), 12)


def wikitext(cases: int = 128) -> Problem:
    torch.manual_seed(0)
    length = 6  # the places that this network has
    text = prose()[: (cases + 16) * length + 1] % 11
    x, y = text[:-1].view(-1, length), text[1:].view(-1, length)
    data = x[:cases], y[:cases], x[cases:], y[cases:]
    return trained(Problem(GPT(), "categorical", cross_entropies, *data, 32), 30)


def sinusoid() -> Problem:
    x = 8 * torch.rand(150, 1)
    y = x.sin() + 0.3 * torch.randn(150, 1)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    test = torch.linspace(-5, 13, 500).unsqueeze(1)
    return trained(Problem(model, "normal", squared_errors, x, y, test, test.sin(), 150), 500, 1e-2)


def calibration(cases: int = 1000) -> Problem:
    features = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*features, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = images(8, 1)
    data = x[:cases], y[:cases], x[cases:], y[cases:]
    return trained(Problem(model, "categorical", cross_entropies, *data, 128), 60)


def digit_rows(model: nn.Module, cases: int, queries: int, wrong: int) -> Problem:
    """The first labels are wrong."""
    x, y = images(8, 1)
    x, y = x.flatten(1).contiguous(), y.clone()
    y[:wrong] = (y[:wrong] + torch.randint(1, 10, (wrong,))) % 10
    chosen = slice(cases, cases + queries) if queries < cases else slice(0, cases)
    return trained(
        Problem(model, "categorical", cross_entropies, x[:cases], y[:cases], x[chosen], y[chosen], cases), 60
    )


def noisy_labels(cases: int = 1000) -> Problem:
    return digit_rows(nn.Sequential(nn.Linear(64, 10)), cases, cases, cases // 10)


def perceptron(bias: bool, cases: int = 1000) -> Problem:
    layers = [nn.Linear(64, 128, bias), nn.ReLU(), nn.Linear(128, 64, bias), nn.ReLU(), nn.Linear(64, 10, bias)]
    return digit_rows(nn.Sequential(*layers), cases, 100, 0)


# --- runs: the phases of a library, and what they find ----------------------------------------------------------------


@dataclass
class Run:
    """phases: what to call, in this order. found: the numbers, filled by them."""

    phases: dict[str, Callable[[], object]] = field(default_factory=dict)
    found: Found = field(default_factory=dict)


def scores_of_ours(problem: Problem) -> Run:
    """EK-FAC scores over the modules of type Linear and Conv2d, in the phases of kronfluence."""
    run, kept = Run(), {}
    names = [
        f"{path}.{role}"
        for path, module in problem.model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
        for role, _ in module.named_parameters()
    ]  # fmt: skip

    def prepare() -> None:
        kept["net"] = net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=problem.loss)
        net.recorder((problem.x[: problem.batch],), {})  # the proof of the registrations

    def factors() -> None:
        kept["fisher"] = kfac_fx.FisherEstimator(kept["net"], variables=names, exps=(), estimation_mode="empirical")
        for x, y in problem.batches:
            kept["fisher"].update_covariances(x, targets=y, fold=False)
        kept["fisher"].fold()

    def decompose() -> None:
        kept["kfac"] = kept["fisher"].spectrum(damping=kfac_fx.Relative(0.1), dtype=torch.float64)

    def correct() -> None:
        kept["spectrum"] = kept["kfac"].correct(problem.batches, "sequence")

    def pairs() -> None:
        measure = problem.measure
        queries = kept["spectrum"].precondition(problem.queries, measurement=measure)
        run.found["pairwise scores"] = queries.scores_of_all(problem.batches)

    def own() -> None:
        run.found["self-scores"] = torch.cat([kept["spectrum"].self_scores(batch) for batch in problem.batches])

    def eigenvalues() -> None:
        values = kept["spectrum"].at(damping=0.0).eigenvalues().values()
        run.found["corrected eigenvalues"] = torch.cat([part.flatten() for part in values]).sort().values

    run.phases = {
        "prepare": prepare,
        "factors": factors,
        "decompositions": decompose,
        "correction": correct,
        "pairwise scores": pairs,
        "self-scores": own,
        "": eigenvalues,
    }
    return run


def scores_of_kronfluence(problem: Problem) -> Run:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Losses(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return problem.losses(model(batch[0]), batch[1]).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return (problem.measure or problem.losses)(model(batch[0]), batch[1]).sum()

    run, kept, dtype = Run(), {}, next(problem.model.parameters()).dtype
    data, queries = TensorDataset(problem.x, problem.y), TensorDataset(*problem.queries)
    kinds = "activation_covariance_dtype", "gradient_covariance_dtype", "per_sample_gradient_dtype", "lambda_dtype"
    factors = FactorArguments("ekfac", use_empirical_fisher=True, **dict.fromkeys(kinds, dtype))
    kinds = "score_dtype", "per_sample_gradient_dtype", "precondition_dtype"
    scores = ScoreArguments(damping_factor=None, **dict.fromkeys(kinds, dtype))
    each, train = {"per_device_batch_size": problem.batch}, {"per_device_train_batch_size": problem.batch}

    def prepare() -> None:
        kept["folder"] = tempfile.TemporaryDirectory()
        model, task = copy.deepcopy(problem.model), Losses()
        kept["peer"] = Analyzer(
            "examples", prepare_model(model, task), task, cpu=True, output_dir=kept["folder"].name, disable_tqdm=True
        )

    def pairs() -> None:
        sizes = {**train, "per_device_query_batch_size": len(problem.query_x)}
        kept["peer"].compute_pairwise_scores("p", "f", queries, data, score_args=scores, **sizes)
        run.found["pairwise scores"] = kept["peer"].load_pairwise_scores("p")["all_modules"]

    def own() -> None:
        kept["peer"].compute_self_scores("s", "f", data, score_args=scores, **train)
        run.found["self-scores"] = kept["peer"].load_self_scores("s")["all_modules"]

    def eigenvalues() -> None:
        sums = kept["peer"].load_lambda_matrices("f")
        values = [(sums["lambda_matrix"][name] / number) for name, number in sums["num_lambda_processed"].items()]
        run.found["corrected eigenvalues"] = torch.cat([part.flatten() for part in values]).sort().values
        kept["folder"].cleanup()

    run.phases = {
        "prepare": prepare,
        "factors": lambda: kept["peer"].fit_covariance_matrices("f", data, factor_args=factors, **each),
        "decompositions": lambda: kept["peer"].perform_eigendecomposition("f", factor_args=factors),
        "correction": lambda: kept["peer"].fit_lambda_matrices("f", data, factor_args=factors, **each),
        "pairwise scores": pairs,
        "self-scores": own,
        "": eigenvalues,
    }
    return run


# --- Laplace approximations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Posterior:
    """structure: of laplace-torch. last: of the last layer alone. steps: of the search for the prior."""

    structure: str
    last: bool
    steps: int = 100

    def names(self, model: nn.Module) -> list[str]:
        names = [name for name, _ in model.named_parameters()]
        return names[-2:] if self.last else names


def posterior_of_ours(options: Posterior, problem: Problem) -> Run:
    run, kept, n = Run(), {}, len(problem.x)
    names = options.names(problem.model)
    regression = problem.loss == "normal"
    approximation = {"kron": None, "full": "full", "diag": "diagonal"}[options.structure]
    loss = (lambda outputs: kfac_fx.losses.Normal(outputs, var=1.0)) if regression else problem.loss
    theta = torch.cat([parameter.detach().flatten() for parameter in map(problem.model.get_parameter, names)])

    def prepare() -> None:
        chosen = None if approximation is None else dict.fromkeys(names, approximation)
        kept["net"] = net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=loss, approximations=chosen)
        net.recorder((problem.x[: problem.batch],), {})  # the proof of the registrations

    def fit() -> None:
        fisher = kfac_fx.FisherEstimator(kept["net"], variables=names, exps=(), estimation_mode="exact")
        errors = problem.x.new_zeros(())
        for x, y in problem.batches:
            fisher.update_covariances(x, fold=False)
            with torch.no_grad():
                errors += problem.losses(problem.model(x), y).sum()
        fisher.fold()
        kept["spectrum"], kept["errors"] = fisher.spectrum(scale=n, damping=1.0), errors

    def evidence() -> None:
        logs = theta.new_zeros(2) + float(regression)
        logs.requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=0.1)
        for _ in range(options.steps):
            optimizer.zero_grad()
            prior, variance = logs[0].exp(), (2 * logs[1]).exp() if regression else 1.0
            determinant = kept["spectrum"].at(scale=n / variance, damping=prior).log_determinant()
            complexity = prior * theta.square().sum() - len(theta) * logs[0] + determinant
            likelihood = kept["errors"] / variance + 2 * n * logs[1] if regression else 0
            ((complexity + likelihood) / 2).backward()  # minus the log evidence, but for a constant
            optimizer.step()
        run.found["prior of the evidence"] = logs.detach()[: 1 + regression].exp()

    def predict() -> None:
        run.found["variances of outputs"] = kept["spectrum"].functional_variance(problem.query_x, diagonal=True)

    def determinant() -> None:
        run.found["log-determinant"] = kept["spectrum"].log_determinant()

    run.phases = {"prepare": prepare, "fit": fit, "evidence": evidence, "variances": predict, "": determinant}
    return run


def posterior_of_laplace(options: Posterior, problem: Problem) -> Run:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    run, kept = Run(), {}
    regression = problem.loss == "normal"
    kind, part = "regression" if regression else "classification", "last_layer" if options.last else "all"
    backend = BackPackGGN if options.structure == "diag" else CurvlinopsGGN  # whose diagonal is sampled

    def prepare() -> None:
        kept["peer"] = Laplace(copy.deepcopy(problem.model), kind, part, options.structure, backend=backend)

    def evidence() -> None:
        peer = kept["peer"]
        if not regression:
            peer.optimize_prior_precision(method="marglik", n_steps=options.steps)
            run.found["prior of the evidence"] = peer.prior_precision.detach().view(1)
            return
        logs = torch.ones(2, dtype=problem.x.dtype, requires_grad=True)
        optimizer = torch.optim.Adam([logs], lr=0.1)
        for _ in range(options.steps):
            optimizer.zero_grad()
            (-peer.log_marginal_likelihood(logs[0].exp(), logs[1].exp())).backward()
            optimizer.step()
        run.found["prior of the evidence"] = logs.detach().exp()

    def reset() -> None:
        kept["peer"].prior_precision, kept["peer"].sigma_noise = 1.0, 1.0

    def predict() -> None:
        reset()
        _, variance = kept["peer"]._glm_predictive_distribution(problem.query_x)
        run.found["variances of outputs"] = variance.diagonal(dim1=1, dim2=2)

    def determinant() -> None:
        run.found["log-determinant"] = kept["peer"].log_det_posterior_precision.detach().view(())

    run.phases = {
        "prepare": prepare,
        "fit": lambda: kept["peer"].fit(problem.loader()),
        "evidence": evidence,
        "variances": predict,
        "": determinant,
    }
    return run


def dense_posterior(options: Posterior, problem: Problem) -> Found:
    """The numbers of one matrix over all chosen parameters, from Jacobians."""
    model, names = problem.model, options.names(problem.model)
    theta = {name: model.get_parameter(name).detach() for name in names}

    def jacobians(x: Tensor) -> Tensor:
        parts = vmap(jacrev(lambda p, x: functional_call(model, p, (x[None],))[0]), (None, 0))(theta, x)
        return torch.cat([parts[name].flatten(2) for name in names], 2)  # [N, C, P]

    outputs = model(problem.x).detach()
    curvature = torch.eye(outputs.shape[1]).to(outputs).expand(len(outputs), -1, -1)
    if problem.loss == "categorical":
        shares = outputs.softmax(1)
        curvature = torch.diag_embed(shares) - shares.unsqueeze(2) * shares.unsqueeze(1)
    of_cases = jacobians(problem.x)
    precision = torch.einsum("ncp,ncd,ndq->pq", of_cases, curvature, of_cases)
    precision += torch.eye(len(precision)).to(precision)
    of_tests = jacobians(problem.query_x)
    solved = torch.linalg.solve(precision, of_tests.flatten(0, 1).T).T.view_as(of_tests)
    return {
        "log-determinant": torch.logdet(precision),
        "variances of outputs": (of_tests * solved).sum(2),
    }


# --- scores of dattri -------------------------------------------------------------------------------------------------

REGULARIZATION = 0.01


def influence_of_ours(problem: Problem) -> Run:
    """By the Fisher of a softmax regression, which is its Hessian, in one block."""
    run, kept = Run(), {}

    def prepare() -> None:
        net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=problem.loss, approximations={"*": "full"})
        net.recorder((problem.x[: problem.batch],), {})  # the proof of the registrations
        kept["net"] = net

    def scores() -> None:
        fisher = kfac_fx.FisherEstimator(kept["net"], exps=(), estimation_mode="exact")
        for x, _ in problem.batches:
            fisher.update_covariances(x, fold=False)
        fisher.fold()
        queries = fisher.spectrum(damping=REGULARIZATION).precondition(problem.queries)
        run.found["pairwise scores"] = queries.scores_of_all(problem.batches)

    run.phases = {"prepare": prepare, "fit and scores": scores}
    return run


def influence_of_dattri(method: str, problem: Problem) -> Run:
    from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorExplicit

    kinds = {"explicit": IFAttributorExplicit, "cg": IFAttributorCG}
    run, kept = Run(), {}

    def prepare() -> None:
        kept["peer"] = kinds[method](task_of_dattri(problem), regularization=REGULARIZATION)

    def scores() -> None:
        kept["peer"].cache(problem.loader())
        with torch.no_grad():
            queries = DataLoader(TensorDataset(*problem.queries), batch_size=len(problem.query_x))
            run.found["pairwise scores"] = kept["peer"].attribute(problem.loader(), queries).detach().T

    run.phases = {"prepare": prepare, "fit and scores": scores}
    return run


def task_of_dattri(problem: Problem) -> Any:
    from dattri.task import AttributionTask

    def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(problem.model, parameters, batch[0]), batch[1].long())

    return AttributionTask(loss, problem.model, problem.model.state_dict())


def dense_influence(problem: Problem) -> Found:
    model, theta = problem.model, {name: p.detach() for name, p in problem.model.named_parameters()}
    sizes, names = [p.numel() for p in theta.values()], list(theta)

    def losses(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = {name: part.view_as(theta[name]) for name, part in zip(names, flat.split(sizes), strict=True)}
        return problem.losses(functional_call(model, parts, (x,)), y)

    flat = torch.cat([p.flatten() for p in theta.values()])
    curvature = jacrev(grad(lambda flat: losses(flat, problem.x, problem.y).mean()))(flat)
    curvature += REGULARIZATION * torch.eye(len(flat)).to(flat)
    gradient = vmap(grad(lambda flat, x, y: losses(flat, x[None], y[None])[0]), (None, 0, 0))
    solved = torch.linalg.solve(curvature, gradient(flat, *problem.queries).T)
    return {"pairwise scores": (gradient(flat, problem.x, problem.y) @ solved).T}


def ekfac_of_ours(problem: Problem) -> Run:
    run, kept = Run(), {}

    def prepare() -> None:
        kept["net"] = net = kfac_fx.compile(problem.model, (problem.x[:2],), loss=problem.loss)
        net.recorder((problem.x[: problem.batch],), {})  # the proof of the registrations

    def fit() -> None:
        kept["spectrum"] = kfac_fx.fit_spectrum(
            kept["net"], problem.batches, mode="empirical", case="row", damping=REGULARIZATION
        )

    def scores() -> None:
        queries = kept["spectrum"].precondition(problem.queries)
        run.found["pairwise scores"] = queries.scores_of_all(problem.batches)

    run.phases = {"prepare": prepare, "fit": fit, "pairwise scores": scores}
    return run


def ekfac_of_dattri(problem: Problem) -> Run:
    from dattri.algorithm.influence_function import IFAttributorEKFAC

    run, kept = Run(), {}

    def prepare() -> None:
        kept["peer"] = IFAttributorEKFAC(task_of_dattri(problem), damping=REGULARIZATION)

    def scores() -> None:
        queries = DataLoader(TensorDataset(*problem.queries), batch_size=len(problem.query_x))
        run.found["pairwise scores"] = kept["peer"].attribute(problem.loader(), queries).detach().T

    run.phases = {"prepare": prepare, "fit": lambda: kept["peer"].cache(problem.loader()), "pairwise scores": scores}
    return run


def dense_ekfac(relative: bool, problem: Problem) -> Found:
    """EK-FAC scores of a chain of linear layers, from the gradient of every case.

    relative: a damping of a tenth of the mean eigenvalue of a layer, as kronfluence has; else `REGULARIZATION`.
    """

    def gradients(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By layer the inputs [N, i] and the gradients of the outputs [N, o]."""
        rows, outputs = [], []
        for module in problem.model:
            if isinstance(module, nn.Linear):
                ones = x.new_ones(len(x), int(module.bias is not None))
                rows.append(torch.cat([x, ones], 1).detach())
                outputs.append(x := module(x))
            else:
                x = module(x)
        return list(zip(rows, torch.autograd.grad(problem.losses(x, y).sum(), outputs), strict=True))

    scores: list[Tensor] = []
    eigenvalues: list[Tensor] = []
    of_queries = gradients(*problem.queries)
    for (rows, d), (query_rows, query_d) in zip(gradients(problem.x, problem.y), of_queries, strict=True):
        n, left, right = len(d), torch.linalg.eigh(d.T @ d / len(d))[1], torch.linalg.eigh(rows.T @ rows / len(d))[1]
        cases = torch.einsum("no,ni->noi", d @ left, rows @ right)
        values = cases.square().sum(0) / n
        damping = 0.1 * values.mean() if relative else REGULARIZATION
        queries = torch.einsum("no,ni->noi", query_d @ left, query_rows @ right) / (values + damping)
        scores.append(queries.flatten(1) @ cases.flatten(1).T)
        eigenvalues.append(values.flatten())
    total = torch.stack(scores).sum(0)
    found = {"pairwise scores": total, "corrected eigenvalues": torch.cat(eigenvalues).sort().values}
    return found if relative else {"pairwise scores": total}
