"""The exact F v of a batch, against dense Fishers by torch.func alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfac_fx
from tests.runtime.single_cases import T, Text, TextWithLoss, V, classifier

pytestmark = pytest.mark.usefixtures("float64")


def dense(model: nn.Module, outputs: Callable[..., Tensor], hessian: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean over the rows of `outputs(parameters)`, [rows, C], of Jᵀ H J, with H of the values of a row."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    rows = outputs(parameters)
    jacobian: Any = jacrev(outputs)(parameters)
    j = torch.cat([jacobian[name].flatten(2) for name in parameters], 2)
    return torch.einsum("ncp,ncd,ndq->pq", j, torch.stack(list(map(hessian, rows))), j) / len(rows)


def categorical(row: Tensor) -> Tensor:
    p = row.softmax(0)
    return torch.diag(p) - torch.outer(p, p)


def vector_like(model: nn.Module, *lead: int) -> dict[str, Tensor]:
    return {name: torch.randn(*lead, *p.shape) for name, p in model.named_parameters()}


def flat(vector: dict[str, Tensor], lead: int = 0) -> Tensor:
    return torch.cat([tensor.flatten(lead) for tensor in vector.values()], lead)


def test_it_is_the_dense_fisher_of_a_classifier() -> None:
    model, x = classifier(), torch.randn(5, 2, 3, 3)
    net = kfac_fx.compile(model, (x[:2],), loss="categorical")
    matrix = dense(model, lambda p: functional_call(model, p, (x,)), categorical)
    product, v = net.fisher_product(x), vector_like(model)
    torch.testing.assert_close(flat(product(v)), matrix @ flat(v))
    many = vector_like(model, 2, 3)
    torch.testing.assert_close(flat(product(many), 2), flat(many, 2) @ matrix)
    u = {name: tensor.requires_grad_() for name, tensor in vector_like(model).items()}
    penalty = sum((u[name] * tensor).sum() for name, tensor in product(u).items())
    gradient = dict(zip(u, torch.autograd.grad(penalty, list(u.values())), strict=True))  # type: ignore[arg-type]
    torch.testing.assert_close(flat(gradient), 2 * matrix @ flat(u).detach())
    with torch.no_grad():
        next(model.parameters()).mul_(2)
        assert not torch.allclose(flat(product(v)), matrix @ flat(v))


def test_a_batch_instead_of_the_arguments_of_forward_is_refused() -> None:
    x, y = torch.randint(V, (2, T)), torch.randint(V, (2, T))
    net = kfac_fx.compile(Text(), (x,), loss="categorical")
    names = list(inspect.signature(net.model.forward).parameters)[:1]
    with pytest.raises(TypeError, match=r"got a Batch of them: write net.fisher_product\(\*batch.args, targets=batch."):
        net.fisher_product(kfac_fx.Batch(x, targets=y))
    with pytest.raises(TypeError, match=r"got a dict of them: write net.fisher_product\(\*\*batch\)"):
        net.fisher_product(dict(zip(names, (x,), strict=True)))


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(batch["x"])
        return out


def test_a_forward_that_takes_a_dict_has_a_product() -> None:
    model, batch = OfDict(), {"x": torch.randn(4, 3)}
    net = kfac_fx.compile(model, (batch,), loss="categorical")
    assert net.fisher_product(batch)(vector_like(model)).keys() == dict(model.named_parameters()).keys()


def test_some_parameters_have_their_part_of_it() -> None:
    model, x = classifier(), torch.randn(5, 2, 3, 3)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    matrix = dense(model, lambda p: functional_call(model, p, (x,)), categorical)
    v = {name: tensor for name, tensor in vector_like(model).items() if name.startswith("3")}
    size = flat(v).numel()
    torch.testing.assert_close(flat(net.fisher_product(x)(v)), matrix[-size:, -size:] @ flat(v))
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", variables=list(v))
    estimator.update_covariances(x)
    solution = estimator.spectrum(damping=0.1).solve(v, net.fisher_product(x), tolerance=1e-12, iterations=200)
    damped = matrix[-size:, -size:] + 0.1 * torch.eye(size)
    torch.testing.assert_close(flat(solution.vector), torch.linalg.solve(damped, flat(v)))


def test_rows_padding_and_ignored_targets_are_counted_as_in_the_mean_of_the_loss() -> None:
    model, x = Text(), torch.randint(V, (3, T))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    matrix = dense(model, lambda p: functional_call(model, p, (x,)).flatten(0, 1), categorical)
    v = vector_like(model)
    torch.testing.assert_close(flat(net.fisher_product(x)(v)), matrix @ flat(v))
    targets = torch.randint(V, (3, T))
    targets[0, :2] = -100
    kept = (targets != -100).flatten()
    some = dense(model, lambda p: functional_call(model, p, (x,)).flatten(0, 1)[kept], categorical)
    torch.testing.assert_close(flat(net.fisher_product(x, targets=targets)(v)), some @ flat(v))


def test_a_loss_inside_of_forward_and_two_losses() -> None:
    model, x = TextWithLoss(), torch.randint(V, (3, T))
    net = kfac_fx.compile(model, (x,))
    matrix = dense(
        model,
        lambda p: functional_call(model.text, {n[5:]: t for n, t in p.items()}, (x,))[:, :-1].flatten(0, 1),
        categorical,
    )
    v = vector_like(model)
    torch.testing.assert_close(flat(net.fisher_product(x)(v)), matrix @ flat(v))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x.tanh())

    two, z = Two(), torch.randn(5, 3)
    loss = kfac_fx.losses
    net = kfac_fx.compile(
        two, (z,), loss=lambda out: [(0.5, loss.Categorical(out[0])), (2.0, loss.Normal(out[1], var=3.0))]
    )
    first = dense(two, lambda p: functional_call(two, p, (z,))[0], categorical)
    second = dense(two, lambda p: functional_call(two, p, (z,))[1], lambda row: torch.eye(4) / 3)
    v = vector_like(two)
    torch.testing.assert_close(flat(net.fisher_product(z)(v)), (0.5 * first + 2 * second) @ flat(v))


def test_a_gaussian_policy_with_a_free_scale_and_a_step_of_trpo() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std = nn.Linear(3, 2), nn.Parameter(torch.tensor([-0.3, 0.2]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean = torch.tanh(self.mean(x))
            return mean, (2 * self.log_std).exp().expand_as(mean)

    model, x = Policy(), torch.randn(6, 3)
    net = kfac_fx.compile(model, (x,), loss=lambda out: kfac_fx.losses.NormalMeanVariance(*out))
    old = {name: p.detach() for name, p in model.named_parameters()}
    m0, v0 = functional_call(model, old, (x,))

    def divergence(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in old.values()])
        m1, v1 = functional_call(model, {n: part.view_as(old[n]) for n, part in zip(old, parts, strict=True)}, (x,))
        return (0.5 * ((v0 + (m0 - m1) ** 2) / v1 - 1 + (v1 / v0).log())).sum(1).mean()

    matrix: Any = torch.func.hessian(divergence)(flat(old))
    v = vector_like(model)
    torch.testing.assert_close(flat(net.fisher_product(x)(v)), matrix @ flat(v))
    with pytest.raises(kfac_fx.LossError, match="no generalized Gauss-Newton factor"):
        net.fisher_product(x, ggn=True)(v)


class Branches(nn.Module):
    """No single graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return self.second(y) if y.sum() > 0 else self.second(-y)


def test_a_divided_model_and_attention() -> None:
    model, x = Branches(), torch.randn(4, 3)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    v = vector_like(model)
    matrix = dense(model, lambda p: functional_call(model, p, (x,)), categorical)
    torch.testing.assert_close(flat(net.fisher_product(x)(v)), matrix @ flat(v))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(
                F.scaled_dot_product_attention(*self.qkv(x).unflatten(-1, (3, 1, 4)).movedim(2, 0).transpose(2, 3))
                .squeeze(1)
                .mean(1)
            )
            return y

    attention, z = Attention(), torch.randn(2, 3, 4)
    net = kfac_fx.compile(attention, (z,), loss="categorical")
    v = vector_like(attention)
    with sdpa_kernel(SDPBackend.MATH):
        matrix = dense(attention, lambda p: functional_call(attention, p, (z,)), categorical)
    torch.testing.assert_close(flat(net.fisher_product(z)(v)), matrix @ flat(v))


class Looked(nn.Module):
    """Lookups of a table; tied, its rows are the weight of the output layer, too."""

    def __init__(self, spelling: str, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))
        self.layer, self.spelling, self.tied = nn.Linear(6, 3), spelling, tied

    def forward(self, ids: Tensor) -> Tensor:
        rows = {
            "by name": lambda: F.embedding(ids, self.table, padding_idx=0),
            "from the end": lambda: F.embedding(ids, self.table, -5),
            "of ATen": lambda: torch.embedding(self.table, ids, 0),
            "by frequency": lambda: F.embedding(ids, self.table, 0, scale_grad_by_freq=True),
        }[self.spelling]()
        out: Tensor = self.layer(torch.tanh(rows).flatten(1))
        return out @ self.table.T if self.tied else out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spelling", ["by name", "from the end", "of ATen", "by frequency"])
def test_lookups_have_the_derivative_of_their_backward(spelling: str, tied: bool) -> None:
    """As jacrev has it, which differentiates backward. The row of padding has no part of a lookup."""
    model, ids = Looked(spelling, tied), torch.tensor([[1, 0], [2, 3], [4, 1], [0, 0]])
    net = kfac_fx.compile(model, (ids,), loss="categorical")
    product = net.fisher_product(ids)
    u, v = vector_like(model), vector_like(model)
    matrix = dense(model, lambda p: functional_call(model, p, (ids,)), categorical)
    torch.testing.assert_close(flat(product(v)), matrix @ flat(v))
    torch.testing.assert_close(flat(u) @ flat(product(v)), flat(v) @ flat(product(u)))
    assert bool(product(v)["table"][0].any()) == tied


def test_noise_is_the_same_in_all_products_and_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(6, 3)
    net = kfac_fx.compile(model, (x,), loss="categorical", in_place=True)
    optimizer = kfac_fx.KFAC(net)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    product, v = net.fisher_product(x), vector_like(model)
    state = torch.get_rng_state()
    first = product(v)
    assert torch.equal(state, torch.get_rng_state())
    torch.randn(7)
    assert all(torch.equal(first[name], tensor) for name, tensor in product(v).items())
    assert any(not torch.equal(first[name], tensor) for name, tensor in net.fisher_product(x)(v).items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer._forwards.seen.forwards == 0 and all(p.grad is None for p in model.parameters())


def test_wrong_vectors_are_refused() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    product = kfac_fx.compile(model, (x,), loss="categorical").fisher_product(x)
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"unknown  wieght"):
        product({"wieght": torch.randn(2, 3), "bias": torch.randn(2)})
    with pytest.raises(kfac_fx.NotRegisteredError, match=r"weight is \[3, 2\], the parameter \[2, 3\]"):
        product({"weight": torch.randn(3, 2), "bias": torch.randn(2)})
    with pytest.raises(kfac_fx.NotRegisteredError) as other:  # the first one is named, and not those that fit
        product({"weight": torch.randn(1, 2, 3), "bias": torch.randn(2)})
    assert "weight is [1, 2, 3], the parameter [2, 3]" in str(other.value) and "bias" not in str(other.value)
    with pytest.raises(TypeError, match="a vector is a dict of tensors by parameter name, not a Tensor"):
        product(torch.randn(8))  # type: ignore[arg-type]


class Doubled(torch.autograd.Function):
    """It has no derivative in forward mode. hides: its backward hides its gradient from a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hides: bool) -> Tensor:
        ctx.hides = hides
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (g.detach() if ctx.hides else g) * 2, None


class WithDoubled(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.layer, self.hides = nn.Linear(3, 2), hides

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(self.layer(x), self.hides)  # type: ignore[no-untyped-call]
        return y


WITHOUT_FORWARD_MODE: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)
    ),
    "one norm of a weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), dim=None),
    "a function": lambda: WithDoubled(hides=False),
}


@pytest.mark.parametrize("name", WITHOUT_FORWARD_MODE)
def test_models_without_forward_mode_are_multiplied_in_reverse_mode_twice(name: str) -> None:
    """Weight norm was an error: torch has no forward-mode derivative of it."""
    torch.manual_seed(0)
    model, x = WITHOUT_FORWARD_MODE[name]().double(), torch.randn(5, 3, dtype=torch.float64)
    product = kfac_fx.compile(model, (x,), loss="categorical").fisher_product(x)
    parameters = dict(model.named_parameters())
    outputs = model(x)
    rows = [torch.autograd.grad(z, [*parameters.values()], retain_graph=True) for z in outputs.flatten()]
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).view(5, 2, -1)
    p = outputs.softmax(1).detach()
    curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    fisher = torch.einsum("nci,ncd,ndj->ij", jacobian, curvature, jacobian) / 5
    for _ in range(2):
        vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
        found = torch.cat([tensor.flatten() for tensor in product(vector).values()])
        torch.testing.assert_close(found, fisher @ torch.cat([tensor.flatten() for tensor in vector.values()]))


def test_a_backward_that_hides_its_gradient_is_told_at_every_product() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    net = kfac_fx.compile(WithDoubled(hides=True), (x,), loss="categorical")
    product = net.fisher_product(x)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"(?s)derivatives of the model that torch has not.*forward.*reverse mode, twice: the backward",
        ):
            product({name: torch.randn_like(p) for name, p in net.named_parameters()})


@pytest.mark.parametrize("captured", ["no call", "another mode", "a call by keywords"])
def test_a_product_captures_a_call_that_was_not_captured(captured: str) -> None:
    """A capture inside of the derivative ended in an error that the model has none."""
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)),
        torch.randn(5, 4),
    )
    by_keywords = {"example_kwargs": {"input": x}} if captured == "a call by keywords" else {}
    net = kfac_fx.compile(model, (x,) if captured == "another mode" else None, loss="categorical", **by_keywords)
    net.eval()
    expected = kfac_fx.compile(model, (x,), loss="categorical").fisher_product(x)
    vector = {name: torch.randn_like(parameter) for name, parameter in net.named_parameters()}
    torch.testing.assert_close(net.fisher_product(x)(vector), expected(vector), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [None, torch.randn(4, 9), [torch.randn(4, 8)]], ids=["None", "wide", "a loader"])
def test_a_product_of_inputs_on_which_the_model_does_not_run_is_refused_at_once(wrong: Any) -> None:
    """The first product said so."""
    net = kfac_fx.compile(nn.Sequential(nn.Linear(8, 3)), (torch.randn(4, 8),), loss="categorical")
    with pytest.raises(kfac_fx.InputError, match="does not run on these inputs"):
        net.fisher_product(wrong)
